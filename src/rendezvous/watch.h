/* SPDX-License-Identifier: BSD-3-Clause
 * The watch finds out why a group of ranks stops. A thread in each process exchanges beats with rank 0, over its own
 * connection. If a rank dies, falls silent, fails or keeps the others waiting, one verdict names it, and every rank
 * gets the verdict. Rank 0 makes the verdict; the others make one about rank 0 by themselves. A group cannot be used
 * after its verdict.
 *
 * Collectives record their calls here, and ask the watch before they blame a peer. A deadlock between calls of
 * different groups gets a verdict after a few beats. All functions may be called from any thread. NULL is a watch
 * that does nothing, for a world of one. */
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
    double silence_s;                      /* a rank without a beat for this time is lost; equal on all ranks */
    double timeout_s;                      /* longest time for connecting to the other ranks */
    const char *host;                      /* rank 0: address at which it listens */
    const struct ps_run *run;
    void (*on_verdict)(void *arg);         /* called at most once, on the watch's thread, at the verdict */
    void *arg;
} ps_watch_options;

enum { PS_WATCH_TEXT = 800 };              /* largest verdict in bytes, with its final 0 */

/* Starts the watch. All ranks must call it before they close the store. `arg` must stay valid until ps_watch_close;
 * the rest of `o` may be freed. */
int ps_watch_start(struct ps_store *store, const ps_watch_options *o, ps_watch **out);
/* Ends the watch on this rank, within about a second. This is a fault only if another rank waits for this one. */
void ps_watch_close(ps_watch *w);

/* Makes a place, which records this rank's progress in one group. Place 0 exists and belongs to the group of all
 * ranks. key: equal on all ranks of the group, and different from other groups' keys. axis: name of the group in
 * verdicts. Returns the place's index on this rank. PS_EINVAL: all PS_WATCH_PLACES are in use. */
enum { PS_WATCH_PLACES = 32 };
int ps_watch_join(ps_watch *w, uint64_t key, const char *axis);
void ps_watch_part(ps_watch *w, int place);            /* the group is closed here; ignores places 0 and -1 */
/* Record that this rank begins and finishes a call in a place. peer: other rank of a send or recv, else -1. call:
 * its number, or PS_WATCH_NO_CALL. waits: the script is blocked until all ranks of the call, or the peer, have begun
 * it. It is false for calls that run concurrently with the script, and set by ps_watch_waits for messages. One
 * thread at a time uses a place. */
#define PS_WATCH_NO_CALL UINT64_MAX
void ps_watch_enter(ps_watch *w, int place, const char *op, uint64_t call, int peer, bool waits);
void ps_watch_leave(ps_watch *w, int place);
/* Record messages of a place. sent: before a message is sent. came: a message has arrived, so a script no longer
 * waits for one. waits: whether the script, in a call without a number, is blocked until the peer's script sends a
 * message. */
void ps_watch_sent(ps_watch *w, int place);
void ps_watch_came(ps_watch *w, int place);
void ps_watch_waits(ps_watch *w, int place, bool waits);
/* Sends a place to the other ranks now, not with the next beat. For calls that a verdict should name if this rank
 * dies in them. Costs at most one system call. Of several changes within size x 0.1 ms only the last is sent, so
 * rank 0 gets at most 10,000 such messages per second. */
void ps_watch_tell(ps_watch *w, int place);

/* Returns true once, or always if w is NULL. The caller that gets true must report the ranks' failure to the script. */
bool ps_watch_first_to_tell(ps_watch *w);
bool ps_watch_over(const ps_watch *w);     /* whether there is a verdict */
int ps_watch_verdict(ps_watch *w);         /* raises the verdict, or returns 0 if there is none */
int ps_watch_failed_before(ps_watch *w);   /* raises the error for using a failed group */

/* Complaints. TIME_OUT: a peer's bytes did not arrive within `seconds`. LOST: the connection to a peer broke, and
 * `text` says how. GIVES_UP: this rank closes its connections, and `text` says why. */
enum { PS_WATCH_TIME_OUT, PS_WATCH_LOST, PS_WATCH_GIVES_UP };
/* Reports a complaint to rank 0, waits for the verdict, and returns ps_watch_verdict. If this is 0, there will be no
 * verdict, and the caller reports its own error. place: that of the call. peer: rank whose bytes are missing, or -1.
 * PS_WATCH_GIVES_UP does not wait, and does not change this thread's error. */
int ps_watch_complain(ps_watch *w, int place, int what, int peer, double seconds, const char *text);
/* Like ps_watch_complain, for a collective that this rank has left while its bytes were under way. */
int ps_watch_complain_of(ps_watch *w, int place, const char *op, uint64_t call, int what, double seconds,
                         const char *text);

/* Returns true if an error repeats a verdict of this process about another rank. Copies it to
 * verdict[PS_WATCH_TEXT]. */
bool ps_watch_repeats(const char *error, char *verdict);
/* Returns how many bytes of an error are sent to other ranks: its first line, at most 400. */
size_t ps_watch_last_words(const char *error);

#ifdef __cplusplus
}
#endif
#endif
