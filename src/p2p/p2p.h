/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares messages from one rank to another, for the stages of a pipeline. A send returns at once, and
 * messages are sent while ranks compute. A message consists of a tag and the bytes of one tensor, or only of a tag.
 *
 * The messages of a lane from one rank to another arrive in the order of their sends. The first message matches the
 * first receive, and so on. Lanes do not wait for each other. A payload is received directly into its tensor, after its
 * header has matched the expected tag, type and shape. Headers are accepted at any time. Therefore two neighbors may
 * both begin with a send.
 *
 * Only the thread that runs the actions of a step calls these functions. Ranks are numbered as in the group. Tensors
 * must be contiguous. They must be in host memory, or on the device that was connected when the ps_p2p was opened
 * (ps_p2p_carries). Both ends must use the same kind of memory. Tensors of other devices must be copied by the caller
 * (ps_tensor_to).
 *
 * Any failure ends the run. A run fails if an unexpected message arrives, if ps_p2p_abort is called, or if a rank dies,
 * is silent or does not send in time. All ranks get the same verdict, which names the rank that failed. After a
 * verdict, every call of these functions and every call of a group of these ranks fails. No call waits forever.
 *
 * Between devices, the bytes are sent on lines (line.h). ps_p2p_wait returns as soon as the transfer is queued on the
 * device. Work that is queued later finds the received bytes, and may overwrite the sent bytes. The transfer can
 * therefore fail after ps_p2p_wait has returned. ps_p2p_check reports such errors. */
#ifndef PS_P2P_H
#define PS_P2P_H
#include <stdbool.h>
#include "ps.h"

typedef struct ps_p2p ps_p2p;
typedef struct ps_p2p_request ps_p2p_request;

/* UP: activations, which are sent to later virtual stages
 * DOWN: gradients, which are sent to earlier virtual stages
 * LOSS: the loss of a micro-batch, which is sent to all stages
 * TIED: gradients of embeddings that stages share */
enum { PS_P2P_UP, PS_P2P_DOWN, PS_P2P_LOSS, PS_P2P_TIED, PS_P2P_LANES };

/* The identity of a message. The tag that the receiver expects must equal the tag that the sender has sent. */
typedef struct ps_p2p_tag {
    /* kind: printable kind of the sending action, such as 'F', 'I', 'B' or 'W' */
    char kind;
    int16_t part;                          /* index of the tensor among the tensors of the action */
    /* vstage, micro: virtual stage and micro-batch of the action; micro is -1 if there is none */
    int32_t vstage, micro;
} ps_p2p_tag;

/* Values that are sent in the header of a message. */
typedef struct ps_p2p_note {
    double when;                           /* time of the sender's virtual clock */
    double value[4];                       /* for example a loss, its weight, hits and targets */
} ps_p2p_note;

/* A message whose header has arrived, but whose payload has not. */
typedef struct ps_p2p_header {
    ps_p2p_tag tag;
    ps_p2p_note note;
    int32_t dtype, n_dims;                 /* dtype is -1 if there is no tensor */
    int64_t shape[PS_MAX_DIMS];
} ps_p2p_header;

/* Opens messages between the ranks of a group. All ranks must call this function. The group may be closed before the
 * messages are closed. In a group of one rank, every send and every receive is an error. Returns the errors of
 * ps_group_split. */
int ps_p2p_open(ps_group *group, ps_p2p **out);
/* Closes the messages. The caller must have waited for all its requests. Ranks that still wait for messages of this
 * rank get an error. */
void ps_p2p_close(ps_p2p *p2p);

/* Returns true if messages can read and write the memory of this device without a copy in host memory. */
bool ps_p2p_carries(const ps_p2p *p2p, int device);

/* Begins to send `t`. If t is NULL, sends only the tag and the note. Until ps_p2p_wait returns, the tensor is held and
 * pinned, and must not be written to. Returns one of these errors:
 *   PS_EINVAL   there is no such peer or lane, or t is not contiguous
 *   PS_EUNSUP   t is neither in host memory nor on a device for which ps_p2p_carries returns true
 *   PS_ENOMEM, PS_ESTALE, and the errors of ps_p2p_wait */
int ps_p2p_send(ps_p2p *p2p, int peer, int lane, const ps_p2p_tag *tag, const ps_p2p_note *note, ps_tensor *t,
                ps_p2p_request **out);
/* Begins to receive into `t`. If t is NULL, receives a message without a tensor. The sender's tag must equal `tag`, and
 * the sender's tensor must have the type and shape of t. Until ps_p2p_wait returns, the tensor is held and pinned.
 * Returns the errors of ps_p2p_send. */
int ps_p2p_recv(ps_p2p *p2p, int peer, int lane, const ps_p2p_tag *tag, ps_tensor *t, ps_p2p_request **out);
/* Waits for the header of the message that the next ps_p2p_recv on this lane will receive. Used by callers that do not
 * know the shape of that message. */
int ps_p2p_next(ps_p2p *p2p, int peer, int lane, ps_p2p_header *out);

/* Returns 1 if ps_p2p_wait would return at once, and 0 otherwise. For a receive, ps_p2p_wait can still wait until the
 * payload has arrived. For a send from a device, 1 means that the bytes have been sent. */
int ps_p2p_test(ps_p2p_request *request);
/* Waits until a message has been sent or received. Frees the request, even if the message has failed. If `note` is not
 * NULL, *note receives the values of the message. Returns one of these errors:
 *   PS_EINVAL   a message arrived that does not match. The error names the ranks, the actions and both values. The
 *               other ranks get PS_EIO.
 *   PS_ETIME    nothing arrived within the time-out of the group, or a rank is silent
 *   PS_EIO      a rank has died, failed or aborted
 *   PS_ESTATE   an earlier call returned an error of this list */
int ps_p2p_wait(ps_p2p_request *request, ps_p2p_note *note);

/* Returns 0, or the error of a message between devices that failed after ps_p2p_wait had returned. */
int ps_p2p_check(ps_p2p *p2p);
/* Waits until all bytes that this rank receives on its device have arrived. Does not wait for other work of the device.
 * Returns the errors of ps_p2p_wait. */
int ps_p2p_settle(ps_p2p *p2p);

/* Names the action that this rank is running, such as "F of micro-batch 3, stage 1". Verdicts contain this name until
 * the next call that waits. The kind 'Y' is an iteration of the script's loop, which has no stage. If `tag` is NULL,
 * this rank runs no action. The watch sends this name at once (ps_watch_tell), and again when this rank waits for a
 * message. */
void ps_p2p_at(ps_p2p *p2p, const ps_p2p_tag *tag);
/* Reports that the step of this rank has failed. The calls of all other ranks then fail with `text`. Returns at once,
 * and does not change the error of this thread. */
void ps_p2p_abort(ps_p2p *p2p, const char *text);
int ps_p2p_rank(const ps_p2p *p2p);
int ps_p2p_size(const ps_p2p *p2p);
/* Returns the number of tensor bytes that this rank has sent since ps_p2p_open. */
int64_t ps_p2p_bytes_sent(const ps_p2p *p2p);
#endif
