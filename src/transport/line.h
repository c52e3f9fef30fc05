/* SPDX-License-Identifier: BSD-3-Clause
 * A one-way line of messages from the device of one rank to the device of another (line.c), for p2p.c. Bytes are sent
 * over a communicator of only these two ranks, on its own stream, in the order of ps_line_put. No thread that runs
 * kernels waits for bytes: events order them against its work.
 *
 * Why lines cannot deadlock: A receive is queued on the device only after the header of its message has arrived, so all
 * work that the send depends on is already queued on the sender's device. A send is queued only after the receiver has
 * reported (ps_line_allow) that its receive is queued. So all work that is queued on a device ends without a further
 * call by any rank's script, and messages on different lines need no common order. */
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
    void *bytes;                           /* device memory, which must stay valid until `end` */
    int64_t nbytes;
    ps_wire_event *ready, *end;            /* ready: from this point on the bytes may be sent, or written to. The
                                            * message owns both events. */
    bool begun;                            /* the message is in the device's queue, and `end` is set */
    char name[PS_LINE_NAME];               /* name for errors, such as "F of micro-batch 3, stage 1" */
} ps_line_message;

/* State and functions of the owner that the line uses. The line calls tell and blame without holding the lock. */
typedef struct ps_line_owner {
    ps_comm *host;                         /* host communicator, which provides the line's watch and time-out */
    struct ps_backend *be;                 /* the device */
    pthread_mutex_t *lock;                 /* guards the owner's state and the line */
    pthread_cond_t *news;                  /* broadcast when a message has begun, when all have ended, and when the
                                            * line fails */
    const ps_error_kept *failed;           /* the owner's error; the line stops if its code is not 0 */
    void *arg;
    int (*tell)(void *arg, int peer, int lane);              /* notifies the sender that this rank has begun a
                                                              * receive */
    int (*blame)(void *arg, int peer, int rc);               /* ends the run with this thread's error */
} ps_line_owner;

/* Starts the line's thread, which then connects. id: from the table's new_id; both ranks must pass the same id. The
 * caller holds the lock. PS_ENOMEM. */
int ps_line_open(const ps_line_owner *owner, const char *id, int peer, int lane, bool out, ps_line **out_line);
const char *ps_line_id(const ps_line *line);
/* Makes the message's events if it has none, and sets `ready`. Called by the thread that runs kernels. */
int ps_line_message_prepare(struct ps_backend *be, ps_line_message *m);
void ps_line_message_free(struct ps_backend *be, ps_line_message *m);

/* The caller of these functions holds the lock. */
void ps_line_put(ps_line *line, ps_line_message *m);
void ps_line_allow(ps_line *line);         /* the receiver is ready for one more message */
void ps_line_stop(ps_line *line);          /* called when nobody waits for the line's messages any more */
bool ps_line_is_still(const ps_line *line);                  /* returns true if all messages that have begun have
                                                              * also ended */
const ps_error_kept *ps_line_failed(const ps_line *line);    /* the line's error, or NULL if it has not failed */
const char *ps_line_at(const ps_line *line);                 /* name of the oldest message under way, or of the
                                                              * message that failed */
bool ps_line_rests(const ps_line *line);   /* after a failure: true if neither the line's thread nor the device uses
                                            * any message */

void ps_line_close(ps_line *line);         /* called without the lock; does nothing for NULL */
#endif
