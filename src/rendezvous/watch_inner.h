/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by watch.c (threads and connections) and watch_judge.c (who is to blame, and in which words). */
#ifndef PS_RENDEZVOUS_WATCH_INNER_H
#define PS_RENDEZVOUS_WATCH_INNER_H
#include "rendezvous/proof.h"
#include "rendezvous/store.h"
#include "rendezvous/watch.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

enum { WATCH_HOST = 64, WATCH_OP = 40, WATCH_AXIS = 16, WATCH_IN = 1024, WATCH_OUT = 16384 };

/* How far a rank is in the calls of one of its groups. Goes over the wire: no holes. */
typedef struct watch_place {
    uint64_t key;                          /* of the group; 0: of all ranks */
    uint64_t turn;                         /* of a rank's places, the one entered or left last has the highest */
    uint64_t moved;                        /* the same where a message that was sent or has come counts, too */
    uint64_t calls;                        /* collectives that the rank has come to */
    uint64_t call, last_call;              /* numbers: the call that it is or was in last; the collective it finished */
    int64_t under_way;                     /* messages sent, less those that came; of all ranks: those on their way */
    int32_t peer;                          /* of send and recv, else -1 */
    int16_t inside, waits;                 /* 1 or 0; inside: in a call; waits: the script waits in it */
    char op[WATCH_OP], last_op[WATCH_OP];  /* names of `call` and `last_call`; empty: none yet */
    char axis[WATCH_AXIS];                 /* the group's name; "": all ranks */
} watch_place;

/* The places of a rank. */
typedef struct watch_places {
    bool known[PS_WATCH_PLACES];
    watch_place at[PS_WATCH_PLACES];
} watch_places;

/* A message between ranks is this head, then `nbytes` of text. */
typedef struct watch_message {
    uint32_t magic;
    int32_t kind, rank, code;              /* code: of a verdict; BEAT: the number of rank 0's beat heard last */
    int32_t what, peer;                    /* of a complaint; peer: also the rank that a verdict blames */
    double seconds;                        /* of a complaint; HELLO and WELCOME: the silence that is allowed */
    watch_place at;                        /* one of the sender's places; of a complaint: that of the call */
    uint32_t nbytes;
    int32_t places;                        /* messages left, this one included, of the sender's places; 0: no `at` */
} watch_message;
_Static_assert(sizeof(watch_message) == 32 + 160 + 8, "what goes over the wire has no holes");
_Static_assert(sizeof(watch_message) + PS_WATCH_TEXT <= WATCH_IN, "a message fits");

/* PLACE: one place of the sender, between two beats, which tell all of them. */
enum { WATCH_HELLO, WATCH_WELCOME, WATCH_BEAT, WATCH_POKE, WATCH_COMPLAIN, WATCH_FAIL, WATCH_VERDICT, WATCH_BYE,
       WATCH_PLACE, WATCH_KINDS };

/* A connection, and the state of the rank behind it. */
typedef struct watch_peer {
    struct watch_peer *next;               /* among those that have not said who they are */
    int fd, rank;                          /* fd -1: closed; rank -1: a stranger */
    bool proved;                           /* the peer has proved to be of this group */
    bool left, fresh;                      /* left: the peer said BYE; fresh: its places came since the last poke */
    ps_proof proof;
    double heard_at;                       /* ps_now() */
    watch_places places;
    char host[WATCH_HOST];
    uint32_t in_nbytes, out_nbytes;
    char in[WATCH_IN], out[WATCH_OUT];
} watch_peer;

typedef struct watch_complaint {
    bool on;
    int what, from, peer;
    double seconds, since;
    watch_place at;                        /* of the rank that complains */
    char text[PS_WATCH_TEXT];
} watch_complaint;

/* What rank 0 knows of how long a rank has been where it is. */
typedef struct watch_rest {
    uint64_t moved;                        /* the highest one of the rank's places */
    int32_t since;                         /* number of the first beat of rank 0 that left once it knew that */
    int32_t heard;                         /* and of the last one that the rank had heard when it told its places */
    bool rests;                            /* the rank was at an earlier moment where it is (watch_circle) */
    bool held;                             /* and its script waits for a rank whose script waits, too */
} watch_rest;

enum { WATCH_STAYS, WATCH_FAILED, WATCH_LEAVES, WATCH_GONE };

struct ps_watch {
    int rank, size;
    double silence_s, beat_s;
    ps_run run;                            /* with a key that only this group has */
    void (*on_verdict)(void *arg);
    void *arg;
    char host[WATCH_HOST];
    int launcher;                          /* our launcher's pipe (ps_watch_start), or -1 */
    pid_t pid;                             /* of the process that has the thread; its forks have none */
    pthread_t thread;
    int wake[2];

    /* Of the thread alone. */
    int epoll, listener;                   /* listener: rank 0, until all ranks have come; else -1 */
    int n_come, n_strangers;
    watch_peer **peers;                    /* [size]; rank 0: all others, NULL: not come; else: rank 0 only */
    watch_peer *strangers;
    watch_complaint pending;               /* rank 0: the one that it has to judge; else: the one it told rank 0 */
    watch_rest *rests;                     /* [size]; rank 0 uses them */
    int32_t n_beats;                       /* the number of rank 0's last beat, as this rank has heard */
    double beat_at;                        /* ps_now() of the next beat */
    double told_at;                        /* ps_now() of the last PLACE */
    bool leaving;                          /* this rank said BYE: a connection that ends is no death any more */

    /* Shared. */
    atomic_int over, told;                 /* over: there is a verdict; told: see ps_watch_first_to_tell */
    pthread_mutex_t lock;                  /* of the fields that follow, but for `next` */
    pthread_cond_t news;
    watch_places places;
    int moved;                             /* the place that is to be told at once, or -1 */
    uint64_t turn;
    watch_complaint asks;                  /* of this process; `on` until the thread takes it */
    bool unanswered;                       /* no verdict will come for the last complaint */
    int farewell, farewell_done;           /* WATCH_STAYS ...: how this process wants to leave; the thread's progress */
    char last_words[PS_WATCH_TEXT];        /* of WATCH_FAILED */
    int code, blamed;                      /* of the verdict; blamed: the rank, -1: no single one */
    char verdict[PS_WATCH_TEXT];
    struct ps_watch *next;                 /* of all watches of this process; all_lock guards it */
};

/* Gives the verdict, if there was none: to this process and, on rank 0, to all ranks. blamed: as in ps_watch. Called in
 * the watch's thread. */
void watch_decide(ps_watch *w, int code, int blamed, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
void watch_own_places(ps_watch *w, watch_places *out);
const watch_place *watch_find(const watch_places *places, uint64_t key);    /* NULL: none of these is of that group */

/* -- watch_judge.c; called in the watch's thread */
void watch_died(ps_watch *w, const watch_peer *p);                  /* the peer's connection ended without BYE */
void watch_silent(ps_watch *w, const watch_peer *p, double now);
void watch_failed(ps_watch *w, int rank, const char *host, const char *text);
/* Gives the verdict on the pending complaint once there is enough to judge by. False: there never will be one. */
bool watch_judge(ps_watch *w, double now);
void watch_circle(ps_watch *w);            /* on rank 0, in front of each beat: looks for ranks that wait in a circle */
#endif
