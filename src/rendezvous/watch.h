/* SPDX-License-Identifier: BSD-3-Clause
 * The watch finds the reason why a group of ranks stops. A thread in each process exchanges beats with rank 0 on a
 * separate connection. If a rank dies, is silent, fails or keeps other ranks waiting, the watch makes one verdict that
 * names this rank. Every rank receives the verdict. Rank 0 makes all verdicts except verdicts about rank 0 itself,
 * which each of the other ranks makes on its own. A group cannot be used after its verdict.
 *
 * Collectives record their calls in the watch, and ask the watch before they blame a peer. If calls of different groups
 * deadlock, the watch makes a verdict after a few beats. All functions may be called from any thread. If `w` is NULL,
 * as in a world of one rank, the functions do nothing. */
#ifndef PS_RENDEZVOUS_WATCH_H
#define PS_RENDEZVOUS_WATCH_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_watch ps_watch;
struct ps_run;                             /* declared in rendezvous/proof.h */
struct ps_store;                           /* declared in rendezvous/store.h */

typedef struct ps_watch_options {
    int rank, size;                        /* size must be at least 2 */
    /* silence_s: A rank is lost if it sends no beat for this number of seconds. silence_s must be equal on all
     * ranks. */
    double silence_s;
    double timeout_s;                      /* maximum time for connecting to the other ranks */
    /* host: on rank 0, the address at which rank 0 listens */
    const char *host;
    const struct ps_run *run;
    /* on_verdict: called at most once, when there is a verdict, on the thread of the watch */
    void (*on_verdict)(void *arg);
    void *arg;
} ps_watch_options;

enum { PS_WATCH_TEXT = 800 };              /* maximum size of a verdict in bytes, with its final 0 */

/* Starts the watch. All ranks must call this function before they close the store. o->arg must stay valid until
 * ps_watch_close. The other fields of `o` are not needed after this call. */
int ps_watch_start(struct ps_store *store, const ps_watch_options *o, ps_watch **out);
/* Ends the watch on this rank, within about one second. The watch reports this as a fault only if another rank waits
 * for this rank. */
void ps_watch_close(ps_watch *w);

/* Makes a place, which records the progress of this rank in one group. Place 0 always exists, and belongs to the group
 * of all ranks. Returns the index of the place on this rank, or PS_EINVAL if all PS_WATCH_PLACES places are in use.
 * key: must be equal on all ranks of the group, and different from the keys of other groups
 * axis: name of the group in verdicts */
enum { PS_WATCH_PLACES = 32 };
int ps_watch_join(ps_watch *w, uint64_t key, const char *axis);
/* Frees a place. Must be called when this rank closes the group of the place. Does nothing for places 0 and -1. */
void ps_watch_part(ps_watch *w, int place);
/* These functions record that this rank begins and finishes a call of the group of a place. Only one thread at a time
 * may use a place.
 * peer: for a send or recv, the other rank; otherwise -1
 * call: number of the call, or PS_WATCH_NO_CALL
 * waits: true if the script is blocked until all ranks of the call (or the peer) have begun the call. For calls that
 * run concurrently with the script, it is false. For messages, ps_watch_waits sets it. */
#define PS_WATCH_NO_CALL UINT64_MAX
void ps_watch_enter(ps_watch *w, int place, const char *op, uint64_t call, int peer, bool waits);
void ps_watch_leave(ps_watch *w, int place);
/* These functions record the messages of a place. ps_watch_sent is called before a message is sent. ps_watch_came is
 * called when a message has arrived, so that a script no longer waits for that message. ps_watch_waits records whether
 * the script is blocked until the script of the peer sends a message. It is for calls without a number
 * (PS_WATCH_NO_CALL). */
void ps_watch_sent(ps_watch *w, int place);
void ps_watch_came(ps_watch *w, int place);
void ps_watch_waits(ps_watch *w, int place, bool waits);
/* Sends a place now, instead of with the next beat. Rank 0 sends its place to all ranks, and other ranks send theirs to
 * rank 0. Used for calls that a verdict should name if this rank dies during the call. Makes at most one system call.
 * If a place changes several times within size x 0.1 ms, only the last change is sent. Rank 0 therefore receives at
 * most 10,000 such messages per second. */
void ps_watch_tell(ps_watch *w, int place);

/* Returns true to only one caller, or to every caller if w is NULL. The caller that gets true must report the failure
 * of the ranks to the script. */
bool ps_watch_first_to_tell(ps_watch *w);
bool ps_watch_over(const ps_watch *w);     /* returns true if there is a verdict */
int ps_watch_verdict(ps_watch *w);         /* raises the verdict, or returns 0 if there is none */
/* Raises an error which says that the group has failed before. */
int ps_watch_failed_before(ps_watch *w);

/* The kinds of complaints.
 * TIME_OUT: the bytes of a peer did not arrive within `seconds` seconds
 * LOST: the connection to a peer broke; `text` says how it broke
 * GIVES_UP: this rank closes its connections; `text` says why */
enum { PS_WATCH_TIME_OUT, PS_WATCH_LOST, PS_WATCH_GIVES_UP };
/* Reports a complaint to rank 0, waits for the verdict, and returns the result of ps_watch_verdict. If the result is 0,
 * the watch will make no verdict, and the caller reports its own error. A complaint of the kind PS_WATCH_GIVES_UP does
 * not wait, and does not change the error of this thread.
 * place: the place of the call
 * peer: the rank whose bytes are missing, or -1 */
int ps_watch_complain(ps_watch *w, int place, int what, int peer, double seconds, const char *text);
/* Does the same as ps_watch_complain, for the collective `op` with the number `call`. This rank has left the collective
 * while its bytes were still in transit. */
int ps_watch_complain_of(ps_watch *w, int place, const char *op, uint64_t call, int what, double seconds,
                         const char *text);

/* Returns true if the text `error` contains a verdict about another rank that this process has received. In this case,
 * copies the verdict to verdict[PS_WATCH_TEXT]. */
bool ps_watch_repeats(const char *error, char *verdict);
/* Returns how many bytes of an error's text are sent to other ranks. These bytes are the first line of the text, up to
 * 400 bytes. */
size_t ps_watch_last_words(const char *error);

#ifdef __cplusplus
}
#endif
#endif
