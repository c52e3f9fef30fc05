/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by watch.c (threads and connections) and watch_judge.c (finds the rank to blame and writes the verdict). */
#ifndef PS_RENDEZVOUS_WATCH_INNER_H
#define PS_RENDEZVOUS_WATCH_INNER_H
#include "rendezvous/proof.h"
#include "rendezvous/store.h"
#include "rendezvous/watch.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

enum { WATCH_HOST = 64, WATCH_OP = 40, WATCH_AXIS = 16, WATCH_IN = 1024, WATCH_OUT = 16384 };

/* A rank's progress in the calls of one group. It is sent between ranks, so it has no padding. */
typedef struct watch_place {
    uint64_t key;                          /* of the group, 0 for the group of all ranks */
    uint64_t turn;                         /* rises with each enter and leave; highest in the latest place */
    uint64_t moved;                        /* like `turn`, and also rises with each message */
    uint64_t calls;                        /* number of collectives begun */
    uint64_t call, last_call;              /* number of the present or last call; of the last finished one */
    int64_t under_way;                     /* messages sent minus received; summed over the ranks: under way */
    int32_t peer;                          /* other rank of a send or recv, else -1 */
    int16_t inside, waits;                 /* 0 or 1: is in a call; the call blocks the script */
    char op[WATCH_OP], last_op[WATCH_OP];  /* names of `call` and `last_call`, or "" */
    char axis[WATCH_AXIS];                 /* name of the group, "" for all ranks */
} watch_place;

/* All places of a rank. */
typedef struct watch_places {
    bool known[PS_WATCH_PLACES];
    watch_place at[PS_WATCH_PLACES];
} watch_places;

/* A message between ranks is this header, then `nbytes` of text. */
typedef struct watch_message {
    uint32_t magic;
    int32_t kind, rank, code;              /* VERDICT, BYE: code of a verdict. BEAT: index of rank 0's last beat. */
    int32_t what, peer;                    /* as in ps_watch_complain; VERDICT, BYE: peer is the blamed rank. POKE: what
                                            * is its number. BEAT: that of the last poke */
    double seconds;                        /* COMPLAIN: as there. HELLO, WELCOME: the allowed silence */
    watch_place at;                        /* a place of the sender. COMPLAIN: that of the call */
    uint32_t nbytes;
    int32_t places;                        /* messages with places of the sender, from this one on; 0: no `at` */
} watch_message;
_Static_assert(sizeof(watch_message) == 32 + 160 + 8, "a message between ranks has no padding");
_Static_assert(sizeof(watch_message) + PS_WATCH_TEXT <= WATCH_IN, "a message fits");

/* A beat carries all places of the sender, a PLACE carries one and is sent between beats. */
enum { WATCH_HELLO, WATCH_WELCOME, WATCH_BEAT, WATCH_POKE, WATCH_COMPLAIN, WATCH_FAIL, WATCH_VERDICT, WATCH_BYE,
       WATCH_PLACE, WATCH_KINDS };

/* A connection, and the state of the rank at its other end. */
typedef struct watch_peer {
    struct watch_peer *next;               /* in the list of strangers, which have not sent their rank yet */
    int fd, rank;                          /* fd is -1 if closed; rank is -1 for a stranger */
    bool proved;                           /* the peer has proved that it belongs to this group */
    bool left, fresh;                      /* left: it sent BYE. fresh: its places answer the last poke */
    ps_proof proof;
    double heard_at;                       /* time (ps_now) of its last message */
    watch_places places;
    char host[WATCH_HOST];
    uint32_t in_nbytes, out_nbytes;
    char in[WATCH_IN], out[WATCH_OUT];
} watch_peer;

typedef struct watch_complaint {
    bool on;
    int what, from, peer;
    double seconds, since;
    watch_place at;                        /* the complaining rank's place that it is about */
    char text[PS_WATCH_TEXT];
} watch_complaint;

/* How long a rank has made no progress, as rank 0 knows it. */
typedef struct watch_rest {
    uint64_t moved;                        /* highest `moved` of its places */
    int32_t since;                         /* first beat that rank 0 sent after it had received `moved` */
    int32_t heard;                         /* rank 0's last beat that the rank had received when it sent its places */
    bool rests;                            /* no progress since an earlier moment (watch_circle) */
    bool held;                             /* rests, and its script waits for a rank that is also held */
} watch_rest;

enum { WATCH_STAYS, WATCH_FAILED, WATCH_LEAVES, WATCH_GONE };

struct ps_watch {
    int rank, size;
    double silence_s, beat_s;
    ps_run run;                            /* the run, with this group's own key */
    void (*on_verdict)(void *arg);
    void *arg;
    char host[WATCH_HOST];
    int launcher;                          /* pipe to this rank's launcher (ps_watch_start), or -1 */
    pid_t pid;                             /* process of the thread, which forked processes do not have */
    pthread_t thread;
    int wake[2];

    /* Only the watch's thread uses the following fields. */
    int epoll, listener;                   /* listener: rank 0's until all ranks have connected, else -1 */
    int n_come, n_strangers;
    watch_peer **peers;                    /* [size] on rank 0, NULL if not connected; elsewhere only rank 0 */
    watch_peer *strangers;
    watch_complaint pending;               /* rank 0: complaint to judge. Others: complaint sent to rank 0 */
    watch_rest *rests;                     /* [size] used on rank 0 */
    int32_t n_beats;                       /* rank 0's last beat received here */
    int32_t n_pokes;                       /* number of rank 0's last poke; beats with an earlier one are stale */
    double beat_at;                        /* time (ps_now) of the next beat */
    double told_at;                        /* time (ps_now) of the last PLACE */
    bool leaving;                          /* BYE is sent: a lost connection no longer means a death */

    /* Shared. */
    atomic_int over, told;                 /* over: there is a verdict. told: by ps_watch_first_to_tell */
    pthread_mutex_t lock;                  /* guards the following fields except `next` */
    pthread_cond_t news;
    watch_places places;
    int moved;                             /* place that must be sent at once, or -1 */
    uint64_t turn;
    watch_complaint asks;                  /* a caller's complaint; `on` until the thread handles it */
    bool unanswered;                       /* the last complaint will get no verdict */
    int farewell, farewell_done;           /* WATCH_*: requested by this process; completed by the thread */
    char last_words[PS_WATCH_TEXT];        /* text of WATCH_FAILED */
    int code, blamed;                      /* of the verdict; blamed: rank, or -1 if no single rank is */
    char verdict[PS_WATCH_TEXT];
    struct ps_watch *next;                 /* in the list of this process's watches; all_lock guards it */
};

/* Makes the verdict, unless there is one, and passes it to this process and, on rank 0, to all ranks. blamed: as in
 * ps_watch. Called by the watch's thread. */
void watch_decide(ps_watch *w, int code, int blamed, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
void watch_own_places(ps_watch *w, watch_places *out);
const watch_place *watch_find(const watch_places *places, uint64_t key);    /* or NULL */

/* -- watch_judge.c: called by the watch's thread */
void watch_died(ps_watch *w, const watch_peer *p);                  /* its connection ended without BYE */
void watch_silent(ps_watch *w, const watch_peer *p, double now);
void watch_failed(ps_watch *w, int rank, const char *host, const char *text);
/* Judges the pending complaint if enough is known. Returns false if there will never be a verdict. */
bool watch_judge(ps_watch *w, double now);
void watch_circle(ps_watch *w);            /* rank 0, before each beat: finds ranks that wait in a cycle */
#endif
