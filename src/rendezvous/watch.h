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
    int rank, size;                        /* size is at least 2 */
    double silence_s;                      /* seconds without a beat after which a rank counts as lost; equal on all
                                            * ranks */
    double timeout_s;                      /* longest time in seconds for connecting to the other ranks */
    const char *host;                      /* on rank 0: address at which it listens */
    const struct ps_run *run;
    void (*on_verdict)(void *arg);         /* called at most once, by the watch's thread, when there is a verdict */
    void *arg;
} ps_watch_options;

enum { PS_WATCH_TEXT = 800 };              /* largest size of a verdict in bytes, with its final 0 */

/* Starts the watch. All ranks must call this function before they close the store. `o`, its host and its run may be
 * freed afterwards; `arg` must stay valid until ps_watch_close. */
int ps_watch_start(struct ps_store *store, const ps_watch_options *o, ps_watch **out);
/* Ends the watch on this rank. This is a fault only if another rank waits for this one. Takes at most about a
 * second. */
void ps_watch_close(ps_watch *w);

/* A place records the progress of one group of ranks, which numbers its own calls. Place 0 belongs to the group of
 * all ranks; ps_watch_join makes places for other groups. key: equal on all ranks of the group, and different from
 * the keys of all other groups. axis: name of the group in verdicts. Returns the index of the place on this rank, or
 * PS_EINVAL if all PS_WATCH_PLACES are in use. */
enum { PS_WATCH_PLACES = 32 };
int ps_watch_join(ps_watch *w, uint64_t key, const char *axis);
void ps_watch_part(ps_watch *w, int place);            /* called when the group is closed on this rank; does nothing
                                                        * for places 0 and -1 */
/* enter: this rank begins a call in a place. leave: it has finished the call. peer: the other rank of a send or
 * recv, else -1. call: number of the call, or PS_WATCH_NO_CALL. waits: the script is blocked until all ranks of the
 * call, or the peer, have begun it. waits is false for a call that runs concurrently with the script; for messages,
 * ps_watch_waits sets it. Only one thread at a time may use a place. */
#define PS_WATCH_NO_CALL UINT64_MAX
void ps_watch_enter(ps_watch *w, int place, const char *op, uint64_t call, int peer, bool waits);
void ps_watch_leave(ps_watch *w, int place);
/* Messages of a place. sent: called before a message is sent. came: called when a message has arrived; wakes a
 * script that waits for one. waits: sets whether the script, in a call without a number, is blocked until the peer's
 * script sends a message. */
void ps_watch_sent(ps_watch *w, int place);
void ps_watch_came(ps_watch *w, int place);
void ps_watch_waits(ps_watch *w, int place, bool waits);
/* Sends this place to the other ranks at once instead of with the next beat. For calls that the verdict should name
 * if this rank dies in them. Costs the caller at most one system call. If a place changes several times within size
 * x 0.1 ms, only the last state is sent, so rank 0 gets at most 10,000 of these messages per second. */
void ps_watch_tell(ps_watch *w, int place);

/* Returns true only in the first call; if w is NULL, in every call. The caller that gets true must report the ranks'
 * failure to the script. */
bool ps_watch_first_to_tell(ps_watch *w);
bool ps_watch_over(const ps_watch *w);     /* returns true if there is a verdict */
int ps_watch_verdict(ps_watch *w);         /* raises the verdict as this thread's error; returns 0 if there is none */
int ps_watch_failed_before(ps_watch *w);   /* raises the error for using a failed group; the error includes the
                                            * verdict if there is one */

/* Kinds of complaints. TIME_OUT: a peer's bytes did not arrive within `seconds`. LOST: the connection to a peer
 * broke (`text` says how). GIVES_UP: this rank closes its connections (`text` says why). */
enum { PS_WATCH_TIME_OUT, PS_WATCH_LOST, PS_WATCH_GIVES_UP };
/* Reports a complaint to rank 0. place: the place of the call. peer: the rank whose bytes are missing, or -1 if
 * unknown. Waits for the verdict, and returns ps_watch_verdict. If it returns 0, there will be no verdict, and the
 * caller reports its own error. PS_WATCH_GIVES_UP does not wait, and does not change this thread's error. */
int ps_watch_complain(ps_watch *w, int place, int what, int peer, double seconds, const char *text);
/* Like ps_watch_complain, for a collective whose bytes were still under way when this rank left it. */
int ps_watch_complain_of(ps_watch *w, int place, const char *op, uint64_t call, int what, double seconds,
                         const char *text);

/* Returns true if an error repeats the verdict of any group of this process about another rank. Copies the verdict
 * to verdict[PS_WATCH_TEXT]. */
bool ps_watch_repeats(const char *error, char *verdict);
/* Returns how many bytes of an error are sent to other ranks: those of its first line, at most 400. */
size_t ps_watch_last_words(const char *error);

#ifdef __cplusplus
}
#endif
#endif
