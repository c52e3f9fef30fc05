/* SPDX-License-Identifier: BSD-3-Clause
 * The watch over the ranks of a group. A thread in each process beats over a connection of its own to rank 0, and rank
 * 0 to all. A rank that dies, falls silent, fails or leaves the others waiting is named in one verdict, which every
 * rank gets. Rank 0 gives the verdict; the others find one about rank 0 by themselves. A group has one verdict in its
 * life, and is of no use after it. Collectives note their calls here, and ask here before they blame a peer.
 * All functions may be called from any thread, and take NULL (a world of one) for a watch that sees nothing. */
#ifndef PS_COMM_WATCH_H
#define PS_COMM_WATCH_H
#include <stdbool.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_watch ps_watch;
struct ps_run;                             /* comm/proof.h */
struct ps_store;                           /* comm/store.h */

typedef struct ps_watch_options {
    int rank, size;                        /* size: 2 at least */
    double silence_s;                      /* a rank that is not heard for so long is given up; the same on all ranks */
    double timeout_s;                      /* to reach the others */
    const char *host;                      /* rank 0: the address to listen at */
    const struct ps_run *run;
    void (*on_verdict)(void *arg);         /* once at most, in the watch's thread, when the verdict is there */
    void *arg;
} ps_watch_options;

enum { PS_WATCH_TEXT = 800 };              /* bytes of a verdict at most, with its 0 */

/* All ranks call it while they have the store. `o` and everything that it points to may go afterwards. */
int ps_watch_start(struct ps_store *store, const ps_watch_options *o, ps_watch **out);
/* Leaves: no fault, unless somebody waits for this rank. Takes a second at most. */
void ps_watch_close(ps_watch *w);

/* A group of some of the ranks, each with calls of its own, is a place; that of all ranks is place 0. key: the same on
 * all its ranks, and no other group's. axis: what verdicts call it. Returns its number here, or PS_EINVAL: there are
 * PS_WATCH_PLACES. */
enum { PS_WATCH_PLACES = 32 };
int ps_watch_join(ps_watch *w, uint64_t key, const char *axis);
void ps_watch_part(ps_watch *w, int place);            /* the group is closed here; place 0 and -1: nothing happens */
/* This rank comes to a call in a place, and has finished it. peer: of send and recv, else -1. call PS_WATCH_NO_CALL: of
 * those that have no number. One thread at a time uses a place. */
#define PS_WATCH_NO_CALL UINT64_MAX
void ps_watch_enter(ps_watch *w, int place, const char *op, uint64_t call, int peer);
void ps_watch_leave(ps_watch *w, int place);

bool ps_watch_over(const ps_watch *w);     /* there is a verdict */
int ps_watch_verdict(ps_watch *w);         /* it, as this thread's error; 0: there is none */
int ps_watch_failed_before(ps_watch *w);   /* the error of using a group that failed, with the verdict, if any */

/* Complaints of a rank: a peer's bytes did not come in time (`seconds`), its connection broke (`text` says how), or the
 * ranks do not fit together and this one hangs up (`text` says why). */
enum { PS_WATCH_TIME_OUT, PS_WATCH_LOST, PS_WATCH_GIVES_UP };
/* place: of the call; peer: the rank whose bytes are missing; -1: unknown. It waits for the verdict and returns
 * ps_watch_verdict. 0: there will be no verdict, so the caller reports its own error. PS_WATCH_GIVES_UP does not wait,
 * and leaves this thread's error as it is. */
int ps_watch_complain(ps_watch *w, int place, int what, int peer, double seconds, const char *text);

#ifdef __cplusplus
}
#endif
#endif
