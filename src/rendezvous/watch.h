/* SPDX-License-Identifier: BSD-3-Clause
 * The watch over the ranks of a group. A thread in each process sends beats to rank 0 over a connection of its own, and
 * rank 0 sends beats to all. A rank that dies, falls silent, fails or leaves the others waiting is named in one
 * verdict, which every rank gets. Rank 0 gives the verdict; the others find one about rank 0 by themselves. A group has
 * one verdict in its life, and cannot be used after it. Collectives note their calls here, and ask here before they
 * blame a peer. Ranks whose scripts wait for each other in calls of different groups get a verdict after a few beats.
 * All functions may be called from any thread. NULL (a world of one) is a watch that sees nothing. */
#ifndef PS_RENDEZVOUS_WATCH_H
#define PS_RENDEZVOUS_WATCH_H
#include <stdbool.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_watch ps_watch;
struct ps_run;                             /* rendezvous/proof.h */
struct ps_store;                           /* rendezvous/store.h */

typedef struct ps_watch_options {
    int rank, size;                        /* size: 2 at least */
    double silence_s;                      /* a rank not heard for so many seconds is given up; the same on all ranks */
    double timeout_s;                      /* seconds to reach the others */
    const char *host;                      /* rank 0: the address to listen at */
    const struct ps_run *run;
    void (*on_verdict)(void *arg);         /* once at most, in the watch's thread, when the verdict is there */
    void *arg;
} ps_watch_options;

enum { PS_WATCH_TEXT = 800 };              /* bytes of a verdict at most, with its 0 */

/* All ranks call it while they have the store. `o`, its host and its run may go afterwards; `arg` is the caller's. */
int ps_watch_start(struct ps_store *store, const ps_watch_options *o, ps_watch **out);
/* This rank leaves, which is no fault, unless another rank waits for it. Takes about a second at most. */
void ps_watch_close(ps_watch *w);

/* A place stands for one group of ranks, which counts its own calls. The group of all ranks is place 0; a group of some
 * joins here. key: the same on all ranks of the group, and no other group's. axis: the group's name in verdicts.
 * Returns the place's number on this rank, or PS_EINVAL: there are PS_WATCH_PLACES. */
enum { PS_WATCH_PLACES = 32 };
int ps_watch_join(ps_watch *w, uint64_t key, const char *axis);
void ps_watch_part(ps_watch *w, int place);            /* the group is closed here; place 0 and -1: nothing happens */
/* enter: this rank comes to a call in a place. leave: it has finished the call. peer: the other rank of a send or recv,
 * else -1. call: the call's number, or PS_WATCH_NO_CALL: it has none. waits: the script waits until all ranks of the
 * call, or the peer, have come to it, and goes nowhere else meanwhile. A call that runs beside the script is none of
 * these; of messages ps_watch_waits says it. One thread at a time uses a place. */
#define PS_WATCH_NO_CALL UINT64_MAX
void ps_watch_enter(ps_watch *w, int place, const char *op, uint64_t call, int peer, bool waits);
void ps_watch_leave(ps_watch *w, int place);
/* Messages of a place. sent: before one is sent. came: one has come here, so that a script which waits for one looks
 * again. waits: whether the script, which is in a call without a number, waits until the peer's script sends one. */
void ps_watch_sent(ps_watch *w, int place);
void ps_watch_came(ps_watch *w, int place);
void ps_watch_waits(ps_watch *w, int place, bool waits);
/* Others hear of this place at once, and not with the next beat: for calls that the others' verdict should name if this
 * rank dies in one. It costs the caller a system call at most. Changes within size x 0.1 ms of each other are told
 * together, by the last of them, so that rank 0 gets 10,000 such messages a second at most. */
void ps_watch_tell(ps_watch *w, int place);

/* True the first time that it is asked (NULL: always): the caller has the ranks' failure told to the script. */
bool ps_watch_first_to_tell(ps_watch *w);
bool ps_watch_over(const ps_watch *w);     /* there is a verdict */
int ps_watch_verdict(ps_watch *w);         /* the verdict, as this thread's error; 0: there is none */
int ps_watch_failed_before(ps_watch *w);   /* the error of using a group that failed, with the verdict, if any */

/* Complaints of a rank. TIME_OUT: a peer's bytes did not come within `seconds`. LOST: the connection to a peer broke
 * (`text` says how). GIVES_UP: this rank hangs up (`text` says why). */
enum { PS_WATCH_TIME_OUT, PS_WATCH_LOST, PS_WATCH_GIVES_UP };
/* place: of the call; peer: the rank whose bytes are missing; -1: unknown. Waits for the verdict and returns
 * ps_watch_verdict. 0: no verdict will come, so the caller reports its own error. PS_WATCH_GIVES_UP does not wait, and
 * leaves this thread's error as it is. */
int ps_watch_complain(ps_watch *w, int place, int what, int peer, double seconds, const char *text);
/* The same of a collective that this rank has left while its bytes were under way. */
int ps_watch_complain_of(ps_watch *w, int place, const char *op, uint64_t call, int what, double seconds,
                         const char *text);

#ifdef __cplusplus
}
#endif
#endif
