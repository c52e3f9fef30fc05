/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares a line of messages from the device of one rank to the device of another rank (line.c). It is
 * used by p2p.c. A communicator of these two ranks sends the messages in the order of the ps_line_put calls. The
 * communicator has its own stream. A thread that runs kernels never waits for bytes, because events put the transfers
 * and the kernels in order on the device.
 *
 * Lines cannot deadlock, for the following reason. A receive is queued on the receiver's device after the header of its
 * message has arrived. At this time, all work that the send depends on is already queued on the sender's device. The
 * send is queued after the receiver has reported that its receive is queued (ps_line_allow). Therefore everything that
 * is queued on a device ends without another call of any script, and different lines need no common order. */
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
    void *bytes;                           /* device memory, which must stay valid until the event `end` */
    int64_t nbytes;
    /* ready: the event after which the bytes may be sent (for a send) or overwritten (for a receive)
     * end: the event after which the message has ended
     * The message owns both events. */
    ps_wire_event *ready, *end;
    /* begun: the message is in the queue of the device, and the event `end` is set */
    bool begun;
    /* name: the name for errors, such as "F of micro-batch 3, stage 1" */
    char name[PS_LINE_NAME];
} ps_line_message;

/* The fields and functions of its owner that a line needs. The line does not hold the lock when it calls tell and
 * blame. */
typedef struct ps_line_owner {
    /* host: communicator for host memory; the line uses its watch and its time-out */
    ps_comm *host;
    struct ps_backend *be;                 /* the device */
    pthread_mutex_t *lock;                 /* guards the state of the owner and of the line */
    /* news: signals that a message has begun, that all messages have ended, or that the line has failed */
    pthread_cond_t *news;
    /* failed: error of the owner. The line stops if this error's code is not 0. */
    const ps_error_kept *failed;
    void *arg;
    int (*tell)(void *arg, int peer, int lane);              /* notifies the sender that a receive has begun */
    int (*blame)(void *arg, int peer, int rc);               /* ends the run with the error of this thread */
} ps_line_owner;

/* Starts the thread of the line, which connects the devices. Both ranks must pass the same id, which was made by new_id
 * of ps_wire_table. The caller must hold the lock. Returns PS_ENOMEM if there is no memory. */
int ps_line_open(const ps_line_owner *owner, const char *id, int peer, int lane, bool out, ps_line **out_line);
const char *ps_line_id(const ps_line *line);
/* Makes the events of the message if they do not exist yet, and records `ready` at the end of the work that is now
 * queued on the device. Called by the thread that runs kernels. */
int ps_line_message_prepare(struct ps_backend *be, ps_line_message *m);
void ps_line_message_free(struct ps_backend *be, ps_line_message *m);

/* The caller of the functions from ps_line_put to ps_line_rests must hold the lock. */
void ps_line_put(ps_line *line, ps_line_message *m);
void ps_line_allow(ps_line *line);         /* the receiver is ready for one more message */
/* Stops the line. Called when no thread waits for the messages of the line any more. */
void ps_line_stop(ps_line *line);
/* Returns true if all messages that have begun are known to have ended. */
bool ps_line_is_still(const ps_line *line);
/* Returns the error of the line, or NULL. */
const ps_error_kept *ps_line_failed(const ps_line *line);
/* Returns the name of the oldest message in progress, or of the message that failed. */
const char *ps_line_at(const ps_line *line);
/* Returns true if the line has failed and no longer uses its messages. */
bool ps_line_rests(const ps_line *line);

/* Closes the line. The caller must not hold the lock. Does nothing if `line` is NULL. */
void ps_line_close(ps_line *line);
#endif
