/* SPDX-License-Identifier: BSD-3-Clause
 * One-way messages from one rank to another, for the stages of a pipeline. They run concurrently with the computation,
 * any number at a time. A send returns at once. A receiver accepts headers at any time from each rank that it receives
 * from. It checks a header against the expected tag, type and shape, and only then receives the payload, directly into
 * its tensor. So two neighbours may both begin with a send.
 *
 * A message is a tag and the bytes of one tensor, or only a tag. Messages of one lane between two ranks arrive in the
 * order of their sends, and are matched with receives in the order of the receives. Lanes do not wait for each other.
 *
 * Failures end the run, as all failures of ranks do: an unexpected tag, type or shape, ps_p2p_abort, or a rank that
 * dies, falls silent or does not send in time. All ranks get the same verdict, which names the rank. From then on every
 * call here and every call of every group of these ranks fails. No call waits for ever.
 *
 * Only the thread that runs the actions of a step calls a ps_p2p. Ranks are those of the group. Tensors are contiguous,
 * and lie in host memory or on the device that the group had connected when the ps_p2p was opened (ps_p2p_carries).
 * Both ends use the same kind of memory. The caller copies tensors of other devices (ps_tensor_to) before a send and
 * after a receive.
 *
 * The bytes of a device are sent from device to device, on lines (line.h); their headers are sent like all others. A
 * wait for such a message returns when the transfer is queued on the device: work that is queued later finds the
 * received bytes, and may overwrite the sent ones. So a failure may appear after the wait. ps_p2p_check reports it, and
 * ps_p2p_settle waits for received bytes. */
#ifndef PS_P2P_H
#define PS_P2P_H
#include <stdbool.h>
#include "ps.h"

typedef struct ps_p2p ps_p2p;
typedef struct ps_p2p_request ps_p2p_request;

/* UP: activations, to later virtual stages. DOWN: gradients, to earlier ones. LOSS: a micro-batch's loss, to all
 * stages. TIED: gradients of embeddings that several stages share. */
enum { PS_P2P_UP, PS_P2P_DOWN, PS_P2P_LOSS, PS_P2P_TIED, PS_P2P_LANES };

/* Identifies a message. The receiver passes the tag that it expects, which must equal the sender's tag. */
typedef struct ps_p2p_tag {
    char kind;                             /* kind of the action that made the message ('F', 'I', 'B', 'W' ...), a
                                            * printable character */
    int16_t part;                          /* index, from 0, of the tensor among the action's tensors */
    int32_t vstage, micro;                 /* virtual stage and micro-batch of the action; micro is -1 if there is
                                            * none */
} ps_p2p_tag;

/* Values that a message carries in addition to its tensor. */
typedef struct ps_p2p_note {
    double when;                           /* time of the sender's virtual clock */
    double value[4];                       /* values such as a loss, its weight, hits and targets */
} ps_p2p_note;

/* A message whose header has arrived and whose payload has not been received yet. */
typedef struct ps_p2p_header {
    ps_p2p_tag tag;
    ps_p2p_note note;
    int32_t dtype, n_dims;                 /* dtype is -1 if the message has no tensor */
    int64_t shape[PS_MAX_DIMS];
} ps_p2p_header;

/* Opens messages between the ranks of a group; all ranks must call it. The group may be closed before the ps_p2p. In
 * a group of one rank every send and receive is an error. Returns the same errors as ps_group_split. */
int ps_p2p_open(ps_group *group, ps_p2p **out);
/* Closes the messages. The caller must first wait for all requests. Ranks that still wait for messages of this rank
 * get an error. */
void ps_p2p_close(ps_p2p *p2p);

bool ps_p2p_carries(const ps_p2p *p2p, int device);    /* returns true if messages are sent directly from this
                                                        * device's memory to the peer's */

/* Begins to send `t`, or only the tag and the note if t is NULL. Until the request has been waited for, the tensor
 * is held and pinned, and must not be written to. PS_EINVAL: there is no such peer or lane, or t is not contiguous.
 * PS_EUNSUP: t is neither in host memory nor on a device of ps_p2p_carries. Also returns PS_ENOMEM, PS_ESTALE, and
 * the errors of ps_p2p_wait. */
int ps_p2p_send(ps_p2p *p2p, int peer, int lane, const ps_p2p_tag *tag, const ps_p2p_note *note, ps_tensor *t,
                ps_p2p_request **out);
/* Begins to receive into `t`, or a message without a tensor if t is NULL. The tensor is held and pinned until the
 * request has been waited for. The message must have this tag, and the type and shape of t. Returns the same errors
 * as ps_p2p_send. */
int ps_p2p_recv(ps_p2p *p2p, int peer, int lane, const ps_p2p_tag *tag, ps_tensor *t, ps_p2p_request **out);
/* Waits for the header of the message that the next ps_p2p_recv on this lane will receive. For a caller that does
 * not know the shape of the message's tensor. */
int ps_p2p_next(ps_p2p *p2p, int peer, int lane, ps_p2p_header *out);

/* Returns 1 if ps_p2p_wait would return at once, else 0. For a receive, 1 can also mean that its bytes are arriving,
 * so that a wait takes little time. For a send from a device, 1 means that its bytes have been sent, so the wait
 * orders nothing. */
int ps_p2p_test(ps_p2p_request *request);
/* Waits until the bytes of a send have been sent, or those of a receive have arrived. Frees the request, even on
 * failure. If note is not NULL, *note gets the values that were received, or sent, with the message. PS_EINVAL:
 * another message arrived; this error, and that of the other ranks (PS_EIO), name the ranks, the actions and both
 * values. PS_ETIME: nothing arrived within the group's time-out, or a rank is silent. PS_EIO: a rank died, failed or
 * aborted. PS_ESTATE: an earlier call returned such an error. */
int ps_p2p_wait(ps_p2p_request *request, ps_p2p_note *note);

/* Returns the error of a message between devices that failed after the wait for it, or 0. */
int ps_p2p_check(ps_p2p *p2p);
/* Waits until all bytes that devices receive have arrived. Does not wait for other work of the devices. Returns the
 * same errors as ps_p2p_wait. */
int ps_p2p_settle(ps_p2p *p2p);

/* Sets the action that this rank is running ("F of micro-batch 3, stage 1"), which verdicts name until the next call
 * that waits. Kind 'Y' is an iteration of the script's loop and belongs to no stage. NULL: this rank runs no action.
 * Notifies other ranks at once (ps_watch_tell). They are notified again when this rank has to wait for a message. */
void ps_p2p_at(ps_p2p *p2p, const ps_p2p_tag *tag);
/* Reports that this rank's step failed, so that the calls of all other ranks fail with this text. Returns at once
 * and does not change this thread's error. */
void ps_p2p_abort(ps_p2p *p2p, const char *text);
int ps_p2p_rank(const ps_p2p *p2p);
int ps_p2p_size(const ps_p2p *p2p);
int64_t ps_p2p_bytes_sent(const ps_p2p *p2p);          /* bytes of tensors that were sent since ps_p2p_open */
#endif
