/* SPDX-License-Identifier: BSD-3-Clause
 * The watch finds the reason why a group of ranks stops. A thread in each process exchanges beats with rank 0 on a
 * separate connection. If a rank dies, is silent, fails or keeps other ranks waiting, the watch makes one verdict
 * that names this rank. Every rank receives the verdict. Rank 0 makes verdicts. Only a verdict about rank 0 is made
 * by each of the other ranks itself. A group cannot be used after its verdict.
 *
 * Collectives record their calls in the watch, and ask the watch before they blame a peer. A deadlock between calls
 * of different groups gets a verdict after a few beats. All functions may be called from any thread. A watch may be
 * NULL. It then does nothing, which is used for a world of one rank. */
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
    /* silence_s: A rank that sends no beat for this number of seconds is lost. It must be equal on all ranks. */
    double silence_s;
    double timeout_s;                      /* maximum time for connecting to the other ranks */
    const char *host;                      /* on rank 0, the address at which it listens */
    const struct ps_run *run;
    /* on_verdict: called at most once, when there is a verdict, on the thread of the watch */
    void (*on_verdict)(void *arg);
    void *arg;
} ps_watch_options;

enum { PS_WATCH_TEXT = 800 };              /* maximum size of a verdict in bytes, with its final 0 */

/* Starts the watch. All ranks must call this function before they close the store. `arg` must stay valid until
 * ps_watch_close. The rest of `o` may be freed after this call. */
int ps_watch_start(struct ps_store *store, const ps_watch_options *o, ps_watch **out);
/* Ends the watch on this rank, within about one second. This is a fault only if another rank waits for this rank. */
void ps_watch_close(ps_watch *w);

/* Makes a place, which records the progress of this rank in one group. Place 0 always exists, and belongs to the group
 * of all ranks. Returns the index of the place on this rank, or PS_EINVAL if all PS_WATCH_PLACES places are in use.
 * key: must be equal on all ranks of the group, and different from the keys of other groups
 * axis: name of the group in verdicts */
enum { PS_WATCH_PLACES = 32 };
int ps_watch_join(ps_watch *w, uint64_t key, const char *axis);
/* Must be called when this rank closes the group. Ignores places 0 and -1. */
void ps_watch_part(ps_watch *w, int place);
/* These functions record that this rank begins and finishes a call in a place. Only one thread at a time may use a
 * place.
 * peer: the other rank of a send or recv; otherwise -1
 * call: number of the call, or PS_WATCH_NO_CALL
 * waits: true if the script is blocked until all ranks of the call, or the peer, have begun the call. It is false for
 * calls that run concurrently with the script. For messages, it is set by ps_watch_waits. */
#define PS_WATCH_NO_CALL UINT64_MAX
void ps_watch_enter(ps_watch *w, int place, const char *op, uint64_t call, int peer, bool waits);
void ps_watch_leave(ps_watch *w, int place);
/* These functions record the messages of a place. ps_watch_sent is called before a message is sent. ps_watch_came is
 * called when a message has arrived, so that a script no longer waits for it. ps_watch_waits records whether the
 * script is blocked until the script of the peer sends a message. It applies to calls without a number. */
void ps_watch_sent(ps_watch *w, int place);
void ps_watch_came(ps_watch *w, int place);
void ps_watch_waits(ps_watch *w, int place, bool waits);
/* Sends a place to the other ranks now, and not only with the next beat. Used for calls that a verdict should name if
 * this rank dies in them. Makes at most one system call. If there are several changes within size x 0.1 ms, only the
 * last one is sent. Rank 0 therefore gets at most 10,000 such messages per second. */
void ps_watch_tell(ps_watch *w, int place);

/* Returns true to only one caller, or to every caller if w is NULL. This caller must report the failure of the ranks
 * to the script. */
bool ps_watch_first_to_tell(ps_watch *w);
bool ps_watch_over(const ps_watch *w);     /* returns true if there is a verdict */
int ps_watch_verdict(ps_watch *w);         /* raises the verdict, or returns 0 if there is none */
/* Raises the error for using a group that has failed. */
int ps_watch_failed_before(ps_watch *w);

/* The kinds of complaints.
 * TIME_OUT: the bytes of a peer did not arrive within `seconds` seconds
 * LOST: the connection to a peer broke; `text` says how
 * GIVES_UP: this rank closes its connections; `text` says why */
enum { PS_WATCH_TIME_OUT, PS_WATCH_LOST, PS_WATCH_GIVES_UP };
/* Reports a complaint to rank 0, waits for the verdict, and returns the result of ps_watch_verdict. If the result is
 * 0, there will be no verdict, and the caller reports its own error. PS_WATCH_GIVES_UP does not wait, and does not
 * change the error of this thread.
 * place: the place of the call
 * peer: the rank whose bytes are missing, or -1 */
int ps_watch_complain(ps_watch *w, int place, int what, int peer, double seconds, const char *text);
/* Does the same as ps_watch_complain, for a collective that this rank has left while the bytes of the collective were
 * still in transit. */
int ps_watch_complain_of(ps_watch *w, int place, const char *op, uint64_t call, int what, double seconds,
                         const char *text);

/* Returns true if an error repeats a verdict of this process about another rank. Copies the verdict to
 * verdict[PS_WATCH_TEXT]. */
bool ps_watch_repeats(const char *error, char *verdict);
/* Returns the number of bytes of an error that are sent to other ranks. These are the first line of the error, but at
 * most 400 bytes. */
size_t ps_watch_last_words(const char *error);

#ifdef __cplusplus
}
#endif
#endif
