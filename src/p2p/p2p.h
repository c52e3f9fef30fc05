/* SPDX-License-Identifier: BSD-3-Clause
 * Messages from one rank to another, for the stages of a pipeline: one way, beside the computation, any number at a
 * time. A send returns at once. A receiver takes headers at any time from each rank that it receives from. It checks a
 * header against what it expects, and only then takes the payload, straight into its tensor. So two neighbours may both
 * send first.
 *
 * A message is a tag and the bytes of one tensor, or a tag alone. Messages of one lane between two ranks arrive in the
 * order of their sends, and go to receives in the order of the receives. Lanes do not wait for each other.
 *
 * Failures end the run, as all failures of ranks do: a tag, a type or a shape that is not the expected one,
 * ps_p2p_abort, a rank that dies, falls silent or does not come in time. All ranks get one verdict, which names the
 * rank, and every call here and of every group of these ranks fails from then on. Nothing waits for ever.
 *
 * One thread, that which runs the actions of a step, makes all calls of a ps_p2p. Ranks are those of the group. Tensors
 * are contiguous, and in host memory, or on the device that the group had connected when the ps_p2p was opened
 * (ps_p2p_carries); the same on both ends. What lies on another device is copied (ps_tensor_to) before a send and after
 * a receive.
 *
 * A device's bytes go from device to device, on lines (line.h); headers go as ever. A wait for such a message returns
 * when the device has been given it to do: what the device is given to do later finds a receive's bytes there, and may
 * write to what was sent. So a failure may come after the wait. ps_p2p_check tells of it, and ps_p2p_settle waits for
 * what was received. */
#ifndef PS_P2P_H
#define PS_P2P_H
#include <stdbool.h>
#include "ps.h"

typedef struct ps_p2p ps_p2p;
typedef struct ps_p2p_request ps_p2p_request;

/* UP: to later virtual stages (activations). DOWN: to earlier ones (gradients). LOSS: what all stages are told of a
 * micro-batch. TIED: gradients of tables that several stages have. */
enum { PS_P2P_UP, PS_P2P_DOWN, PS_P2P_LOSS, PS_P2P_TIED, PS_P2P_LANES };

/* Names a message. The receiver gives the tag that it expects; both ends must mean the same. */
typedef struct ps_p2p_tag {
    char kind;                             /* of the action that made it: 'F', 'I', 'B', 'W', ...; printable */
    int16_t part;                          /* the number, from 0, of the tensor among those of one action */
    int32_t vstage, micro;                 /* the action's virtual stage and micro-batch; micro -1: none */
} ps_p2p_tag;

/* What comes with a message, beside the tensor. */
typedef struct ps_p2p_note {
    double when;                           /* the sender's virtual clock */
    double value[2];                       /* such as a loss and its weight */
} ps_p2p_note;

/* A message whose header has come, and which is not received yet. */
typedef struct ps_p2p_header {
    ps_p2p_tag tag;
    ps_p2p_note note;
    int32_t dtype, n_dims;                 /* dtype -1: the message has no tensor */
    int64_t shape[PS_MAX_DIMS];
} ps_p2p_header;

/* A collective call of all the group's ranks. The group may be closed before the ps_p2p. In a group of one rank every
 * send and receive is an error. Errors: as ps_group_split. */
int ps_p2p_open(ps_group *group, ps_p2p **out);
/* All requests must have been waited for. Other ranks that still wait for messages of this one get an error. */
void ps_p2p_close(ps_p2p *p2p);

bool ps_p2p_carries(const ps_p2p *p2p, int device);    /* messages go from this device's memory to the peer's */

/* Begins to send `t` (NULL: the tag and the note alone). The tensor is held and pinned, and must not be written to,
 * until the request is waited for. PS_EINVAL: no such peer or lane, or t is not contiguous. PS_EUNSUP: t is neither in
 * host memory nor on a device of ps_p2p_carries. PS_ENOMEM, PS_ESTALE; the errors of ps_p2p_wait. */
int ps_p2p_send(ps_p2p *p2p, int peer, int lane, const ps_p2p_tag *tag, const ps_p2p_note *note, ps_tensor *t,
                ps_p2p_request **out);
/* Begins to receive into `t` (NULL: a message without a tensor), which is held and pinned until the request is waited
 * for. The message must have this tag, and t's type and shape. Errors: as ps_p2p_send. */
int ps_p2p_recv(ps_p2p *p2p, int peer, int lane, const ps_p2p_tag *tag, ps_tensor *t, ps_p2p_request **out);
/* Waits for the message that the next ps_p2p_recv of this lane will take, for who does not know its shape. */
int ps_p2p_next(ps_p2p *p2p, int peer, int lane, ps_p2p_header *out);

/* Whether ps_p2p_wait would return at once (of a receive: soon, since its bytes are on the way): 1 or 0. Of a device's
 * send: whether its bytes are gone, so that the wait orders nothing. */
int ps_p2p_test(ps_p2p_request *request);
/* Waits until a send's bytes are sent, or a receive's have come; the request is gone afterwards, also after a failure.
 * note (or NULL): what came with a receive's message, or went with a send's. PS_EINVAL: another message came; the
 * error, and the other ranks' (PS_EIO), name the ranks, the actions and both values. PS_ETIME: nothing came within the
 * group's time-out, or a rank is silent. PS_EIO: a rank died, failed or aborted. PS_ESTATE: after such an error. */
int ps_p2p_wait(ps_p2p_request *request, ps_p2p_note *note);

/* Whether messages of devices that were waited for have failed since: 0, or the error. */
int ps_p2p_check(ps_p2p *p2p);
/* Waits until all received bytes of devices are there, without the device's other work. Errors: as ps_p2p_wait. */
int ps_p2p_settle(ps_p2p *p2p);

/* Notes, for verdicts, the action that this rank runs now ("F of micro-batch 3, stage 1"), until the next call that
 * waits. Kind 'Y' is a turn of the script's loop, of no stage. NULL: this rank is in no action. Other ranks hear of it
 * at once (ps_watch_tell), as of a message that does not come at once. */
void ps_p2p_at(ps_p2p *p2p, const ps_p2p_tag *tag);
/* This rank's step failed: the calls of all other ranks fail with this text. Returns at once, and leaves this thread's
 * error as it is. */
void ps_p2p_abort(ps_p2p *p2p, const char *text);
int ps_p2p_rank(const ps_p2p *p2p);
int ps_p2p_size(const ps_p2p *p2p);
int64_t ps_p2p_bytes_sent(const ps_p2p *p2p);          /* of tensors, since ps_p2p_open */
#endif
