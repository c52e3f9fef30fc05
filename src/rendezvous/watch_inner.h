/* SPDX-License-Identifier: BSD-3-Clause
 * This header is shared by watch.c and watch_judge.c. watch.c contains the thread and the connections. watch_judge.c
 * finds the rank to blame, and writes the verdict. */
#ifndef PS_RENDEZVOUS_WATCH_INNER_H
#define PS_RENDEZVOUS_WATCH_INNER_H
#include "rendezvous/proof.h"
#include "rendezvous/store.h"
#include "rendezvous/watch.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

enum { WATCH_HOST = 64, WATCH_OP = 40, WATCH_AXIS = 16, WATCH_IN = 1024, WATCH_OUT = 16384 };

/* The progress of a rank in the calls of one group. This struct is sent between ranks, so it must have no padding. */
typedef struct watch_place {
    uint64_t key;                          /* key of the group; 0 for the group of all ranks */
    /* turn: counter of this rank. Each enter and each leave of any place increments the counter and stores it in that
     * place. Therefore the place that was used last has the highest turn. */
    uint64_t turn;
    /* moved: like `turn`, but messages and changes of `waits` also increment and store the counter */
    uint64_t moved;
    uint64_t calls;                        /* number of collectives that the rank has begun */
    /* call: number of the present call, or of the last call if the rank is in no call
     * last_call: number of the last finished call */
    uint64_t call, last_call;
    /* under_way: number of messages sent minus number of messages received. The sum over all ranks is the number of
     * messages in transit. */
    int64_t under_way;
    int32_t peer;                          /* for a send or recv, the other rank; otherwise -1 */
    /* inside: 1 if the rank is in a call; otherwise 0
     * waits: 1 if the call blocks the script; otherwise 0 */
    int16_t inside, waits;
    /* op, last_op: names of the calls `call` and `last_call`, or "" */
    char op[WATCH_OP], last_op[WATCH_OP];
    char axis[WATCH_AXIS];                 /* name of the group; "" for the group of all ranks */
} watch_place;

/* All places of a rank in the watch. */
typedef struct watch_places {
    bool known[PS_WATCH_PLACES];
    watch_place at[PS_WATCH_PLACES];
} watch_places;

/* A message between ranks consists of this header and `nbytes` bytes of text. */
typedef struct watch_message {
    uint32_t magic;
    /* code: for VERDICT and BYE, the code of a verdict; for BEAT, the index of the last beat of rank 0 */
    int32_t kind, rank, code;
    /* what: for COMPLAIN, see ps_watch_complain; for POKE, the number of the poke; for BEAT, the number of the last
     * poke
     * peer: for COMPLAIN, see ps_watch_complain; for VERDICT and BYE, the blamed rank */
    int32_t what, peer;
    /* seconds: for COMPLAIN, see ps_watch_complain; for HELLO and WELCOME, the allowed silence */
    double seconds;
    /* at: a place of the sender; for COMPLAIN, the place of the call */
    watch_place at;
    uint32_t nbytes;
    /* places: A beat sends several places in one message each. `places` is the number of messages that are left,
     * including this message. It is 0 if `at` is not used. */
    int32_t places;
} watch_message;
_Static_assert(sizeof(watch_message) == 32 + 160 + 8, "a message between ranks has no padding");
_Static_assert(sizeof(watch_message) + PS_WATCH_TEXT <= WATCH_IN, "a message fits");

/* A beat consists of one message for each place of the sender. A PLACE message contains only one place. It is sent
 * between two beats. */
enum { WATCH_HELLO, WATCH_WELCOME, WATCH_BEAT, WATCH_POKE, WATCH_COMPLAIN, WATCH_FAIL, WATCH_VERDICT, WATCH_BYE,
       WATCH_PLACE, WATCH_KINDS };

/* A connection, and the state of the rank at the other end. */
typedef struct watch_peer {
    /* next: next peer in the list of strangers. A stranger has not sent its rank yet. */
    struct watch_peer *next;
    /* fd: the connection, or -1 if it is closed
     * rank: rank of the peer, or -1 for a stranger */
    int fd, rank;
    bool proved;                           /* the peer has proved that it belongs to this group */
    /* left: the peer has sent BYE
     * fresh: the peer has sent its places in answer to the last poke */
    bool left, fresh;
    ps_proof proof;
    double heard_at;                       /* time (ps_now) of the last message from the peer */
    watch_places places;
    char host[WATCH_HOST];
    uint32_t in_nbytes, out_nbytes;
    char in[WATCH_IN], out[WATCH_OUT];
} watch_peer;

typedef struct watch_complaint {
    bool on;
    int what, from, peer;
    double seconds, since;
    /* at: the place of the call that the complaint is about, on the rank that complains */
    watch_place at;
    char text[PS_WATCH_TEXT];
} watch_complaint;

/* How long a rank has made no progress, as far as rank 0 knows. */
typedef struct watch_rest {
    uint64_t moved;                        /* highest value of `moved` in the rank's places */
    /* since: index of the first beat that rank 0 sent after it had received `moved` */
    int32_t since;
    /* heard: index of the last beat of rank 0 that the rank had received when the rank last sent its places */
    int32_t heard;
    /* rests: the rank has made no progress since the moment that watch_circle examines */
    bool rests;
    /* held: the rank rests, and its script waits for another rank that is held as well */
    bool held;
} watch_rest;

enum { WATCH_STAYS, WATCH_FAILED, WATCH_LEAVES, WATCH_GONE };

struct ps_watch {
    int rank, size;
    double silence_s, beat_s;
    ps_run run;                            /* the run, but with a key that only this group has */
    void (*on_verdict)(void *arg);
    void *arg;
    char host[WATCH_HOST];
    /* launcher: pipe to the launcher of this rank (see launcher_pipe), or -1 */
    int launcher;
    /* pid: the process that runs the thread. A process that was forked from it does not have the thread. */
    pid_t pid;
    pthread_t thread;
    int wake[2];

    /* Only the thread of the watch uses the fields up to `leaving`. */
    /* listener: on rank 0, the listening socket, which is closed when all ranks have connected; otherwise -1 */
    int epoll, listener;
    int n_come, n_strangers;
    /* peers: on rank 0 [size], where the entries of ranks that are not connected are NULL. Other ranks use only
     * peers[0]. */
    watch_peer **peers;
    watch_peer *strangers;
    /* pending: on rank 0, the complaint that must be judged; on other ranks, the complaint that was sent to rank 0 */
    watch_complaint pending;
    watch_rest *rests;                     /* [size] used only on rank 0 */
    int32_t n_beats;                       /* index of the last beat of rank 0 that this rank knows */
    /* n_pokes: number of the last poke of rank 0. A beat that contains a lower number is stale. */
    int32_t n_pokes;
    double beat_at;                        /* time (ps_now) of the next beat */
    double told_at;                        /* time (ps_now) of the last PLACE */
    /* leaving: BYE has been sent. From now on, a connection that ends does not mean that a rank has died. */
    bool leaving;

    /* Several threads use the fields that follow. */
    /* over: there is a verdict
     * told: set by ps_watch_first_to_tell */
    atomic_int over, told;
    /* The lock guards the fields that follow, except `next`. */
    pthread_mutex_t lock;
    pthread_cond_t news;
    watch_places places;
    int moved;                             /* index of the place that must be sent at once, or -1 */
    uint64_t turn;
    /* asks: the complaint of a caller. `on` is set until the thread of the watch has handled the complaint. */
    watch_complaint asks;
    bool unanswered;                       /* the watch will make no verdict about the last complaint */
    /* farewell: the WATCH_* constant that this process has requested
     * farewell_done: the WATCH_* constant that the thread has completed */
    int farewell, farewell_done;
    char last_words[PS_WATCH_TEXT];        /* the text for WATCH_FAILED */
    /* code: code of the verdict
     * blamed: the blamed rank, or -1 if no single rank is to blame */
    int code, blamed;
    char verdict[PS_WATCH_TEXT];
    /* next: next watch in the list of the watches of this process. all_lock guards it. */
    struct ps_watch *next;
};

/* Makes the verdict, unless there is already a verdict. Notifies this process. Rank 0 also notifies all other ranks.
 * Called by the thread of the watch. blamed: the rank to blame, or -1 if no single rank is to blame. */
void watch_decide(ps_watch *w, int code, int blamed, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
void watch_own_places(ps_watch *w, watch_places *out);
const watch_place *watch_find(const watch_places *places, uint64_t key);    /* returns NULL if there is no such place */

/* -- watch_judge.c: called by the thread of the watch */
/* Called when the connection of a peer has ended without BYE. */
void watch_died(ps_watch *w, const watch_peer *p);
void watch_silent(ps_watch *w, const watch_peer *p, double now);
void watch_failed(ps_watch *w, int rank, const char *host, const char *text);
/* Judges the pending complaint, if enough information has arrived. Returns false if there will never be a verdict about
 * it. */
bool watch_judge(ps_watch *w, double now);
/* Called on rank 0 before each beat. Finds ranks that wait in a cycle. */
void watch_circle(ps_watch *w);
#endif
