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

/* The progress of a rank in the calls of one of its groups. It is sent between ranks, so it has no padding. */
typedef struct watch_place {
    uint64_t key;                          /* the group's key; 0: the group of all ranks */
    uint64_t turn;                         /* the place that the rank entered or left last has the highest number */
    uint64_t moved;                        /* the same, but a message that is sent or received also raises it */
    uint64_t calls;                        /* number of collectives that the rank has begun */
    uint64_t call, last_call;              /* numbers of the call in which the rank is, or was last, and of the last
                                            * finished call */
    int64_t under_way;                     /* messages sent minus messages received; the sum over all ranks is the
                                            * number under way */
    int32_t peer;                          /* the other rank of a send or recv, else -1 */
    int16_t inside, waits;                 /* 1 or 0; inside: in a call; waits: the script is blocked in it */
    char op[WATCH_OP], last_op[WATCH_OP];  /* names of `call` and `last_call`; empty: none yet */
    char axis[WATCH_AXIS];                 /* the group's name; "": all ranks */
} watch_place;

/* The places of a rank. */
typedef struct watch_places {
    bool known[PS_WATCH_PLACES];
    watch_place at[PS_WATCH_PLACES];
} watch_places;

/* A message between ranks is this header, then `nbytes` of text. */
typedef struct watch_message {
    uint32_t magic;
    int32_t kind, rank, code;              /* code: the code of a verdict (VERDICT, BYE). BEAT: number of rank 0's last
                                            * beat */
    int32_t what, peer;                    /* as in ps_watch_complain. VERDICT, BYE: peer is the rank that caused it */
    double seconds;                        /* COMPLAIN: as ps_watch_complain. HELLO, WELCOME: the allowed silence */
    watch_place at;                        /* one of the sender's places; COMPLAIN: the place of the call */
    uint32_t nbytes;
    int32_t places;                        /* number of messages that follow with places of the sender, including this
                                            * one; 0: no `at` */
} watch_message;
_Static_assert(sizeof(watch_message) == 32 + 160 + 8, "a message between ranks has no padding");
_Static_assert(sizeof(watch_message) + PS_WATCH_TEXT <= WATCH_IN, "a message fits");

/* PLACE: one place of the sender, sent between two beats. A beat carries all places. */
enum { WATCH_HELLO, WATCH_WELCOME, WATCH_BEAT, WATCH_POKE, WATCH_COMPLAIN, WATCH_FAIL, WATCH_VERDICT, WATCH_BYE,
       WATCH_PLACE, WATCH_KINDS };

/* A connection, and the state of the rank at its other end. */
typedef struct watch_peer {
    struct watch_peer *next;               /* the list of strangers, which have not identified themselves yet */
    int fd, rank;                          /* fd -1: closed; rank -1: a stranger */
    bool proved;                           /* the peer has proved to belong to this group */
    bool left, fresh;                      /* left: the peer sent BYE; fresh: its places arrived since the last poke */
    ps_proof proof;
    double heard_at;                       /* ps_now() of its last message */
    watch_places places;
    char host[WATCH_HOST];
    uint32_t in_nbytes, out_nbytes;
    char in[WATCH_IN], out[WATCH_OUT];
} watch_peer;

typedef struct watch_complaint {
    bool on;
    int what, from, peer;
    double seconds, since;
    watch_place at;                        /* the complaint of the rank */
    char text[PS_WATCH_TEXT];
} watch_complaint;

/* How long a rank has made no progress, as far as rank 0 knows. */
typedef struct watch_rest {
    uint64_t moved;                        /* the highest `moved` of the rank's places */
    int32_t since;                         /* number of the first beat that rank 0 sent after it knew `moved` */
    int32_t heard;                         /* number of the last beat that the rank had received when it sent its
                                            * places */
    bool rests;                            /* the rank has made no progress since an earlier moment (watch_circle) */
    bool held;                             /* it rests, and its script waits for a rank whose script also waits */
} watch_rest;

enum { WATCH_STAYS, WATCH_FAILED, WATCH_LEAVES, WATCH_GONE };

struct ps_watch {
    int rank, size;
    double silence_s, beat_s;
    ps_run run;                            /* the run, with a key of this group only */
    void (*on_verdict)(void *arg);
    void *arg;
    char host[WATCH_HOST];
    int launcher;                          /* the pipe to our launcher (ps_watch_start), or -1 */
    pid_t pid;                             /* the process that has the thread; processes forked from it do not have
                                            * it */
    pthread_t thread;
    int wake[2];

    /* Only the thread uses this. */
    int epoll, listener;                   /* listener: rank 0, until all ranks are connected; else -1 */
    int n_come, n_strangers;
    watch_peer **peers;                    /* [size]; rank 0: all others (NULL: not connected); others: only rank 0 */
    watch_peer *strangers;
    watch_complaint pending;               /* rank 0: the complaint to judge; other ranks: the one sent to rank 0 */
    watch_rest *rests;                     /* [size]; rank 0 uses them */
    int32_t n_beats;                       /* number of the last beat of rank 0 that this rank received */
    double beat_at;                        /* ps_now() of the next beat */
    double told_at;                        /* ps_now() of the last PLACE */
    bool leaving;                          /* this rank sent BYE: a connection that ends no longer means a death */

    /* Shared. */
    atomic_int over, told;                 /* over: there is a verdict; told: see ps_watch_first_to_tell */
    pthread_mutex_t lock;                  /* guards the following fields, except `next` */
    pthread_cond_t news;
    watch_places places;
    int moved;                             /* the place that is to be sent at once, or -1 */
    uint64_t turn;
    watch_complaint asks;                  /* this process's complaint; `on` until the thread takes it */
    bool unanswered;                       /* there will be no verdict for the last complaint */
    int farewell, farewell_done;           /* WATCH_STAYS ...: how this process wants to leave; the thread's progress */
    char last_words[PS_WATCH_TEXT];        /* the text of WATCH_FAILED */
    int code, blamed;                      /* of the verdict; blamed: a rank; -1: not a single rank */
    char verdict[PS_WATCH_TEXT];
    struct ps_watch *next;                 /* in the list of all watches of this process, which all_lock guards */
};

/* Makes the verdict, if there is none yet, and passes it to this process and, on rank 0, to all ranks. blamed: as in
 * ps_watch. Called in the watch's thread. */
void watch_decide(ps_watch *w, int code, int blamed, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
void watch_own_places(ps_watch *w, watch_places *out);
const watch_place *watch_find(const watch_places *places, uint64_t key);    /* NULL: none belongs to that group */

/* -- watch_judge.c; called in the watch's thread */
void watch_died(ps_watch *w, const watch_peer *p);                  /* the peer's connection ended without BYE */
void watch_silent(ps_watch *w, const watch_peer *p, double now);
void watch_failed(ps_watch *w, int rank, const char *host, const char *text);
/* Makes the verdict on the pending complaint as soon as enough is known. False: there will never be a verdict. */
bool watch_judge(ps_watch *w, double now);
void watch_circle(ps_watch *w);            /* rank 0, before each beat: looks for ranks that wait in a circle */
#endif
