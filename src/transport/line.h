/* SPDX-License-Identifier: BSD-3-Clause
 * A one-way line of messages between the devices of two ranks (line.c), for p2p.c. The bytes are sent over a
 * communicator of these two ranks, on its own stream, in the order of ps_line_put. No thread that runs kernels waits
 * for bytes, because events order them against its work.
 *
 * Lines cannot deadlock. A receive is queued on the device after its message's header has arrived, so all work that
 * the send depends on is already queued on the sender's device. A send is queued after the receiver has reported
 * that its receive is queued (ps_line_allow). So everything queued on a device ends without another call by any
 * script, and lines need no common order. */
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
    void *bytes;                           /* device memory, valid until `end` */
    int64_t nbytes;
    ps_wire_event *ready, *end;            /* ready: the bytes may be sent, or written to. It owns both events */
    bool begun;                            /* in the device's queue, and `end` is set */
    char name[PS_LINE_NAME];               /* name for errors, such as "F of micro-batch 3, stage 1" */
} ps_line_message;

/* The part of its owner that the line needs. It calls tell and blame without holding the lock. */
typedef struct ps_line_owner {
    ps_comm *host;                         /* host communicator, for its watch and time-out */
    struct ps_backend *be;                 /* the device */
    pthread_mutex_t *lock;                 /* guards the owner's state and the line */
    pthread_cond_t *news;                  /* a message has begun, all have ended, or the line failed */
    const ps_error_kept *failed;           /* owner's error; the line stops if its code is not 0 */
    void *arg;
    int (*tell)(void *arg, int peer, int lane);              /* tells the sender that a receive has begun */
    int (*blame)(void *arg, int peer, int rc);               /* ends the run with this thread's error */
} ps_line_owner;

/* Starts the line's thread, which connects. Both ranks pass the same id, from the table's new_id. The lock is held.
 * PS_ENOMEM. */
int ps_line_open(const ps_line_owner *owner, const char *id, int peer, int lane, bool out, ps_line **out_line);
const char *ps_line_id(const ps_line *line);
/* Makes the message's events if it has none, and sets `ready`. Called by the thread that runs kernels. */
int ps_line_message_prepare(struct ps_backend *be, ps_line_message *m);
void ps_line_message_free(struct ps_backend *be, ps_line_message *m);

/* The caller of these functions holds the lock. */
void ps_line_put(ps_line *line, ps_line_message *m);
void ps_line_allow(ps_line *line);         /* the receiver is ready for one more message */
void ps_line_stop(ps_line *line);          /* nobody waits for the line's messages any more */
bool ps_line_is_still(const ps_line *line);                  /* whether all messages begun have ended */
const ps_error_kept *ps_line_failed(const ps_line *line);    /* the line's error, or NULL */
const char *ps_line_at(const ps_line *line);                 /* name of the oldest message, or of the failed one */
bool ps_line_rests(const ps_line *line);   /* after a failure: nothing uses the messages any more */

void ps_line_close(ps_line *line);         /* called without the lock; does nothing for NULL */
#endif
