/* SPDX-License-Identifier: BSD-3-Clause
 * Messages from one rank to another, for the stages of a pipeline. A send returns at once, and messages move while
 * ranks compute. A message is a tag and the bytes of one tensor, or only a tag.
 *
 * Messages of one lane between two ranks arrive in the order of their sends, and match the receives in that order.
 * Lanes do not wait for each other. A payload is received directly into its tensor, after its header has matched the
 * expected tag, type and shape. Headers are accepted at any time, so two neighbours may both begin with a send.
 *
 * Only the thread that runs the actions of a step calls these functions. Ranks are those of the group. Tensors are
 * contiguous, in host memory or on the device that was connected when the ps_p2p was opened (ps_p2p_carries). Both
 * ends use the same kind of memory. The caller copies tensors of other devices (ps_tensor_to).
 *
 * Any failure ends the run: an unexpected message, ps_p2p_abort, or a rank that dies, falls silent or does not send
 * in time. All ranks get the same verdict, which names the rank. From then on every call here, and every call of a
 * group of these ranks, fails. No call waits for ever.
 *
 * Between devices the bytes are sent on lines (line.h). The wait for such a message returns when the transfer is
 * queued on the device. Work that is queued later finds the received bytes, and may overwrite the sent ones. An
 * error can therefore appear after the wait: ps_p2p_check reports it. */
#ifndef PS_P2P_H
#define PS_P2P_H
#include <stdbool.h>
#include "ps.h"

typedef struct ps_p2p ps_p2p;
typedef struct ps_p2p_request ps_p2p_request;

/* UP: activations, to later virtual stages. DOWN: gradients, to earlier ones. LOSS: a micro-batch's loss, to all
 * stages. TIED: gradients of embeddings that stages share. */
enum { PS_P2P_UP, PS_P2P_DOWN, PS_P2P_LOSS, PS_P2P_TIED, PS_P2P_LANES };

/* Identifies a message. The tag that a receiver expects must equal the sender's tag. */
typedef struct ps_p2p_tag {
    char kind;                             /* printable kind of the sending action: 'F', 'I', 'B', 'W' ... */
    int16_t part;                          /* index of the tensor among the action's tensors */
    int32_t vstage, micro;                 /* of the action; micro is -1 if there is none */
} ps_p2p_tag;

/* Values that travel with a message. */
typedef struct ps_p2p_note {
    double when;                           /* time of the sender's virtual clock */
    double value[4];                       /* such as a loss, its weight, hits and targets */
} ps_p2p_note;

/* A message whose header has arrived, but not yet its payload. */
typedef struct ps_p2p_header {
    ps_p2p_tag tag;
    ps_p2p_note note;
    int32_t dtype, n_dims;                 /* dtype is -1 if there is no tensor */
    int64_t shape[PS_MAX_DIMS];
} ps_p2p_header;

/* Opens messages between the ranks of a group. All ranks must call it. The group may be closed first. In a group of
 * one rank every send and receive is an error. Returns the errors of ps_group_split. */
int ps_p2p_open(ps_group *group, ps_p2p **out);
/* Closes the messages, after the caller has waited for all requests. Ranks that still wait for messages of this rank
 * get an error. */
void ps_p2p_close(ps_p2p *p2p);

bool ps_p2p_carries(const ps_p2p *p2p, int device);    /* whether messages read this device's memory directly */

/* Begins to send `t`, or only the tag and the note if t is NULL. Until ps_p2p_wait, the tensor is held and pinned,
 * and must not be written to. PS_EINVAL: no such peer or lane, or t is not contiguous. PS_EUNSUP: t is neither in
 * host memory nor on a device of ps_p2p_carries. Also returns PS_ENOMEM, PS_ESTALE, and the errors of ps_p2p_wait. */
int ps_p2p_send(ps_p2p *p2p, int peer, int lane, const ps_p2p_tag *tag, const ps_p2p_note *note, ps_tensor *t,
                ps_p2p_request **out);
/* Begins to receive into `t`, or a message without a tensor if t is NULL. The message must have this tag, and the
 * type and shape of t. Until ps_p2p_wait, the tensor is held and pinned. Returns the errors of ps_p2p_send. */
int ps_p2p_recv(ps_p2p *p2p, int peer, int lane, const ps_p2p_tag *tag, ps_tensor *t, ps_p2p_request **out);
/* Waits for the header of the message that the next ps_p2p_recv on this lane will receive. For callers that do not
 * know its shape. */
int ps_p2p_next(ps_p2p *p2p, int peer, int lane, ps_p2p_header *out);

/* Returns 1 if ps_p2p_wait would return at once, else 0. For a receive, 1 can also mean that the bytes are arriving.
 * For a send from a device, 1 means that the bytes have been sent. */
int ps_p2p_test(ps_p2p_request *request);
/* Waits until a message has been sent or received. Frees the request, even on failure. If note is not NULL, *note
 * gets the message's values. Errors:
 *   PS_EINVAL   another message arrived; also names the ranks, the actions and both values (PS_EIO on other ranks)
 *   PS_ETIME    nothing arrived within the group's time-out, or a rank is silent
 *   PS_EIO      a rank died, failed or aborted
 *   PS_ESTATE   an earlier call returned such an error */
int ps_p2p_wait(ps_p2p_request *request, ps_p2p_note *note);

/* Returns the error of a message between devices that failed after its wait, or 0. */
int ps_p2p_check(ps_p2p *p2p);
/* Waits until all bytes that devices receive have arrived, but not for other work of the devices. Returns the errors
 * of ps_p2p_wait. */
int ps_p2p_settle(ps_p2p *p2p);

/* Names the action that this rank is running, such as "F of micro-batch 3, stage 1". Verdicts contain the name until
 * the next call that waits. Kind 'Y' is an iteration of the script's loop, without a stage. NULL: no action. Other
 * ranks are notified at once (ps_watch_tell), and again when this rank waits for a message. */
void ps_p2p_at(ps_p2p *p2p, const ps_p2p_tag *tag);
/* Reports that this rank's step failed: the calls of all other ranks fail with this text. Returns at once and does
 * not change this thread's error. */
void ps_p2p_abort(ps_p2p *p2p, const char *text);
int ps_p2p_rank(const ps_p2p *p2p);
int ps_p2p_size(const ps_p2p *p2p);
int64_t ps_p2p_bytes_sent(const ps_p2p *p2p);          /* bytes of tensors since ps_p2p_open */
#endif
