/* SPDX-License-Identifier: BSD-3-Clause
 * One way of messages from the device of one rank to that of another (line.c), for p2p.c. Bytes go over a communicator
 * of these two ranks alone, on a stream of its own, in the order in which messages are put. No thread that runs kernels
 * waits for bytes: events order them against its work.
 *
 * Why nothing waits in a circle. A receive is given to the device once the header of its message has come, so the
 * sender's device has all the work in front of the send. A send is given to the device once the receiver has said
 * (ps_line_allow) that its receive was given. So what a device has been given to do ends without a further call of any
 * rank's script, and what goes along different lines needs no common order. */
#ifndef PS_TRANSPORT_LINE_H
#define PS_TRANSPORT_LINE_H
#include <pthread.h>
#include <stdbool.h>
#include "base/error.h"
#include "transport/transport.h"

typedef struct ps_line ps_line;

enum { PS_LINE_NAME = 40 };

typedef struct ps_line_message {
    struct ps_line_message *next;
    void *bytes;                           /* on the device; they stay until `end` */
    int64_t nbytes;
    ps_wire_event *ready, *end;            /* ready: the bytes may be sent, or written to. Owned by the message */
    bool begun;                            /* the device has been given the message, and `end` is set */
    char name[PS_LINE_NAME];               /* for errors: "F of micro-batch 3, stage 1" */
} ps_line_message;

/* What a line shares with its owner. */
typedef struct ps_line_owner {
    ps_comm *host;                         /* of host memory; its watch is looked at, its time-out counts */
    struct ps_backend *be;                 /* the device */
    pthread_mutex_t *lock;                 /* of the line, too */
    pthread_cond_t *news;                  /* the line broadcasts it: a message was begun, all have ended, it failed */
    const ps_error_kept *failed;           /* where the code is set, the line gives up */
    void *arg;
    int (*tell)(void *arg, int peer, int lane);              /* a receive was begun: tells the sender */
    int (*blame)(void *arg, int peer, int rc);               /* this thread's error, as the run's; both without lock */
} ps_line_owner;

/* Starts the line's thread, which connects. id: from the table's new_id, the same on both ranks. The lock is held.
 * PS_ENOMEM */
int ps_line_open(const ps_line_owner *owner, const char *id, int peer, int lane, bool out, ps_line **out_line);
const char *ps_line_id(const ps_line *line);
/* Makes the message's events where it has none, and sets `ready`; called by the thread that runs kernels. */
int ps_line_message_prepare(struct ps_backend *be, ps_line_message *m);
void ps_line_message_free(struct ps_backend *be, ps_line_message *m);

/* The lock is held in the following calls. */
void ps_line_put(ps_line *line, ps_line_message *m);
void ps_line_allow(ps_line *line);         /* the receiver was ready for one more message */
void ps_line_stop(ps_line *line);          /* nobody waits for its messages any more */
bool ps_line_is_still(const ps_line *line);                  /* all messages that were begun have ended */
const ps_error_kept *ps_line_failed(const ps_line *line);    /* NULL: it did not */
const char *ps_line_at(const ps_line *line);                 /* the oldest message under way, or the one that failed */
bool ps_line_rests(const ps_line *line);   /* after a failure: neither its thread nor the device uses any message */

void ps_line_close(ps_line *line);         /* without lock; NULL: nothing happens */
#endif
