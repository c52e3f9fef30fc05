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

/* A rank's progress in the calls of one of its groups. It is sent between ranks, so it has no padding. */
typedef struct watch_place {
    uint64_t key;                          /* key of the group, 0 for the group of all ranks */
    uint64_t turn;                         /* increases with each enter and leave; highest in the place used last */
    uint64_t moved;                        /* like `turn`, but messages that are sent or received also increase it */
    uint64_t calls;                        /* number of collectives that the rank has begun */
    uint64_t call, last_call;              /* number of the present or last call, and number of the last finished one */
    int64_t under_way;                     /* messages sent minus messages received. The sum over all ranks is the
                                            * number of messages under way. */
    int32_t peer;                          /* other rank of a send or recv, else -1 */
    int16_t inside, waits;                 /* 1 or 0. inside: the rank is in a call. waits: the call blocks the
                                            * script. */
    char op[WATCH_OP], last_op[WATCH_OP];  /* names of `call` and `last_call`, "" if there is no such call yet */
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
    int32_t what, peer;                    /* arguments of ps_watch_complain; in VERDICT and BYE, peer is the blamed
                                            * rank */
    double seconds;                        /* COMPLAIN: argument of ps_watch_complain. HELLO, WELCOME: the allowed
                                            * silence. */
    watch_place at;                        /* a place of the sender; in COMPLAIN, the place of the call */
    uint32_t nbytes;
    int32_t places;                        /* number of messages that carry places of the sender, counted from this
                                            * one on; 0: `at` is not set */
} watch_message;
_Static_assert(sizeof(watch_message) == 32 + 160 + 8, "a message between ranks has no padding");
_Static_assert(sizeof(watch_message) + PS_WATCH_TEXT <= WATCH_IN, "a message fits");

/* A PLACE carries one place of the sender and is sent between two beats. A beat carries all places. */
enum { WATCH_HELLO, WATCH_WELCOME, WATCH_BEAT, WATCH_POKE, WATCH_COMPLAIN, WATCH_FAIL, WATCH_VERDICT, WATCH_BYE,
       WATCH_PLACE, WATCH_KINDS };

/* A connection, and the state of the rank at its other end. */
typedef struct watch_peer {
    struct watch_peer *next;               /* next in the list of strangers, which have not identified themselves yet */
    int fd, rank;                          /* fd is -1 if closed; rank is -1 for a stranger */
    bool proved;                           /* the peer has proved that it belongs to this group */
    bool left, fresh;                      /* left: the peer sent BYE. fresh: the peer has sent its places since the
                                            * last poke. */
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
    watch_place at;                        /* place that the complaint is about, of the rank that complains */
    char text[PS_WATCH_TEXT];
} watch_complaint;

/* Rank 0's information on how long a rank has made no progress. */
typedef struct watch_rest {
    uint64_t moved;                        /* the highest `moved` of the rank's places */
    int32_t since;                         /* index of the first beat that rank 0 sent after it had received `moved` */
    int32_t heard;                         /* index of the last of rank 0's beats that the rank had received when it
                                            * sent its places */
    bool rests;                            /* the rank has made no progress since an earlier moment (watch_circle) */
    bool held;                             /* the rank rests, and its script waits for a rank that is also held */
} watch_rest;

enum { WATCH_STAYS, WATCH_FAILED, WATCH_LEAVES, WATCH_GONE };

struct ps_watch {
    int rank, size;
    double silence_s, beat_s;
    ps_run run;                            /* copy of the run, with a key of this group's own */
    void (*on_verdict)(void *arg);
    void *arg;
    char host[WATCH_HOST];
    int launcher;                          /* pipe to this rank's launcher (ps_watch_start), or -1 */
    pid_t pid;                             /* process in which the thread runs; forked processes do not have it */
    pthread_t thread;
    int wake[2];

    /* Only the watch's thread uses the following fields. */
    int epoll, listener;                   /* listener: rank 0's until all ranks have connected, else -1 */
    int n_come, n_strangers;
    watch_peer **peers;                    /* [size] on rank 0: all other ranks, NULL if not connected. On other
                                            * ranks: only rank 0. */
    watch_peer *strangers;
    watch_complaint pending;               /* on rank 0: the complaint to judge. On other ranks: the complaint that
                                            * was sent to rank 0. */
    watch_rest *rests;                     /* [size] used on rank 0 */
    int32_t n_beats;                       /* index of rank 0's last beat that this rank has received */
    double beat_at;                        /* time (ps_now) of the next beat */
    double told_at;                        /* time (ps_now) of the last PLACE */
    bool leaving;                          /* this rank has sent BYE, so the end of a connection no longer means that
                                            * a rank died */

    /* Shared. */
    atomic_int over, told;                 /* over: there is a verdict. told: set by ps_watch_first_to_tell. */
    pthread_mutex_t lock;                  /* guards the following fields except `next` */
    pthread_cond_t news;
    watch_places places;
    int moved;                             /* place that must be sent at once, or -1 */
    uint64_t turn;
    watch_complaint asks;                  /* complaint of a caller in this process; `on` until the thread handles it */
    bool unanswered;                       /* the last complaint will get no verdict */
    int farewell, farewell_done;           /* WATCH_*: the farewell that this process has requested, and the one that
                                            * the thread has completed */
    char last_words[PS_WATCH_TEXT];        /* text of WATCH_FAILED */
    int code, blamed;                      /* code of the verdict, and the blamed rank; -1 if no single rank is to
                                            * blame */
    char verdict[PS_WATCH_TEXT];
    struct ps_watch *next;                 /* next in the list of all watches of this process, which all_lock guards */
};

/* Makes the verdict, unless there already is one. Passes it to this process and, on rank 0, to all ranks. blamed: as
 * in ps_watch. Called by the watch's thread. */
void watch_decide(ps_watch *w, int code, int blamed, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
void watch_own_places(ps_watch *w, watch_places *out);
const watch_place *watch_find(const watch_places *places, uint64_t key);    /* returns NULL if no place belongs to
                                                                             * the group */

/* -- watch_judge.c: called by the watch's thread */
void watch_died(ps_watch *w, const watch_peer *p);                  /* the peer's connection ended without BYE */
void watch_silent(ps_watch *w, const watch_peer *p, double now);
void watch_failed(ps_watch *w, int rank, const char *host, const char *text);
/* Makes the verdict on the pending complaint if enough is known. Returns false if there will never be a verdict. */
bool watch_judge(ps_watch *w, double now);
void watch_circle(ps_watch *w);            /* on rank 0, before each beat: looks for ranks that wait for each other
                                            * in a cycle */
#endif
