/* SPDX-License-Identifier: BSD-3-Clause
 * The watch over the ranks of a group. A thread in each process sends beats to rank 0 over its own connection, and rank
 * 0 sends beats to all ranks. If a rank dies, falls silent, fails or leaves the others waiting, one verdict names it,
 * and every rank gets the verdict. Rank 0 makes the verdict; the other ranks make a verdict about rank 0 by themselves.
 * A group has at most one verdict, and cannot be used after it. Collectives record their calls here, and ask the watch
 * before they blame a peer. Ranks whose scripts deadlock in calls of different groups get a verdict after a few beats.
 * All functions may be called from any thread. NULL (a world of one) is a watch that does nothing. */
#ifndef PS_RENDEZVOUS_WATCH_H
#define PS_RENDEZVOUS_WATCH_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_watch ps_watch;
struct ps_run;                             /* rendezvous/proof.h */
struct ps_store;                           /* rendezvous/store.h */

typedef struct ps_watch_options {
    int rank, size;                        /* size: at least 2 */
    double silence_s;                      /* number of seconds without a beat after which a rank is lost; the same on
                                            * all ranks */
    double timeout_s;                      /* largest number of seconds to connect to the other ranks */
    const char *host;                      /* on rank 0: the address at which it listens */
    const struct ps_run *run;
    void (*on_verdict)(void *arg);         /* called at most once, when there is a verdict; the watch's thread calls
                                            * it */
    void *arg;
} ps_watch_options;

enum { PS_WATCH_TEXT = 800 };              /* largest number of bytes of a verdict, with its final 0 */

/* All ranks call it while they have the store. `o`, its host and its run may be freed afterwards; `arg` must stay valid
 * until ps_watch_close. */
int ps_watch_start(struct ps_store *store, const ps_watch_options *o, ps_watch **out);
/* This rank leaves, which is not a fault unless another rank waits for it. Takes at most about a second. */
void ps_watch_close(ps_watch *w);

/* A place is the record of one group of ranks, which counts its own calls. The group of all ranks is place 0; other
 * groups join here. key: the same on all ranks of the group, and different from all other groups' keys. axis: the
 * group's name in verdicts. Returns the place's number on this rank, or PS_EINVAL: all PS_WATCH_PLACES are taken. */
enum { PS_WATCH_PLACES = 32 };
int ps_watch_join(ps_watch *w, uint64_t key, const char *axis);
void ps_watch_part(ps_watch *w, int place);            /* the group is closed on this rank; place 0 and -1: does
                                                        * nothing */
/* enter: this rank begins a call in a place. leave: it has finished the call. peer: the other rank of a send or recv,
 * else -1. call: the call's number; PS_WATCH_NO_CALL: it has no number. waits: the script is blocked until all ranks of
 * the call, or the peer, have begun it; false for a call that runs concurrently with the script. For messages
 * ps_watch_waits sets it. One thread at a time uses a place. */
#define PS_WATCH_NO_CALL UINT64_MAX
void ps_watch_enter(ps_watch *w, int place, const char *op, uint64_t call, int peer, bool waits);
void ps_watch_leave(ps_watch *w, int place);
/* Messages of a place. sent: called before a message is sent. came: a message has arrived; wakes a script that waits
 * for one. waits: whether the script, which is in a call without a number, is blocked until the peer's script sends a
 * message. */
void ps_watch_sent(ps_watch *w, int place);
void ps_watch_came(ps_watch *w, int place);
void ps_watch_waits(ps_watch *w, int place, bool waits);
/* Sends this place to the other ranks at once instead of with the next beat: for calls that the verdict should name if
 * this rank dies in one of them. It costs the caller at most one system call. Changes within size x 0.1 ms of each
 * other are sent as one message, with the last state, so that rank 0 gets at most 10,000 such messages per second. */
void ps_watch_tell(ps_watch *w, int place);

/* True in the first call (w NULL: in every call): that caller reports the ranks' failure to the script. */
bool ps_watch_first_to_tell(ps_watch *w);
bool ps_watch_over(const ps_watch *w);     /* there is a verdict */
int ps_watch_verdict(ps_watch *w);         /* raises the verdict as this thread's error; 0: there is none */
int ps_watch_failed_before(ps_watch *w);   /* raises the error of using a failed group, with the verdict, if any */

/* Complaints of a rank. TIME_OUT: a peer's bytes did not arrive within `seconds`. LOST: the connection to a peer broke
 * (`text` says how). GIVES_UP: this rank hangs up (`text` says why). */
enum { PS_WATCH_TIME_OUT, PS_WATCH_LOST, PS_WATCH_GIVES_UP };
/* place: the place of the call. peer: the rank whose bytes are missing; -1: unknown. Waits for the verdict and returns
 * ps_watch_verdict. 0: there will be no verdict, so the caller reports its own error. PS_WATCH_GIVES_UP does not wait,
 * and does not change this thread's error. */
int ps_watch_complain(ps_watch *w, int place, int what, int peer, double seconds, const char *text);
/* The same for a collective whose bytes were still under way when this rank left it. */
int ps_watch_complain_of(ps_watch *w, int place, const char *op, uint64_t call, int what, double seconds,
                         const char *text);

/* True if an error repeats a verdict about another rank, in any group of this process. Copies that verdict to
 * verdict[PS_WATCH_TEXT]. */
bool ps_watch_repeats(const char *error, char *verdict);
/* The number of bytes of an error that other ranks get: those of its first line, at most 400. */
size_t ps_watch_last_words(const char *error);

#ifdef __cplusplus
}
#endif
#endif
