/* SPDX-License-Identifier: BSD-3-Clause
 * Internal header of the executor (exec.c): the channel that carries its messages (exec_messages.c). Messages of one
 * lane from one rank to another arrive in order. A send never blocks, and holds its tensor until the wait for the send.
 * A receive checks the tag, type and shape of the message before it receives the bytes. */
#ifndef PS_PIPE_EXEC_H
#define PS_PIPE_EXEC_H
#include "pipe/pipe.h"

enum { PIPE_LANE_UP, PIPE_LANE_DOWN, PIPE_LANE_LOSS, PIPE_LANES };

/* Identifies a message: the action that made it, and the index of its tensor among the action's tensors. Also
 * identifies the action that a rank is running. */
typedef struct pipe_tag {
    char kind;                              /* for a message: 'F', 'B' or 'L' (a loss); for an action: its first
                                             * letter */
    int16_t part;                           /* index of the tensor, or -1 for none */
    int32_t vstage, micro;
} pipe_tag;

/* Values that are sent with a message. */
typedef struct pipe_note {
    double when;                            /* the message's arrival time by the virtual clock */
    double loss;
    double weight;                          /* weight of the loss, or -1 if unknown */
    double hits, targets;                   /* hits and targets of the loss, both 0 if unknown */
} pipe_note;

typedef struct pipe_channel pipe_channel;
typedef struct pipe_channel_table {
    int (*send)(pipe_channel *w, int peer, int lane, const pipe_tag *tag, const pipe_note *note, ps_tensor *t,
                void **out);
    int (*recv)(pipe_channel *w, int peer, int lane, const pipe_tag *tag, ps_tensor *t, void **out);
    int (*wait)(pipe_channel *w, void *request, pipe_note *note);      /* waits for the message, and frees the
                                                                        * request even on failure */
    bool (*test)(pipe_channel *w, void *request);                      /* returns true if a wait would return at once */
    /* carries (NULL: for no device) returns true if tensors on this device are sent and received directly. Other
     * tensors are sent through host memory. Bytes that were received on such a device can still be in transit after
     * the wait; the device performs all work that is queued later after them. settle waits for these bytes if `all`
     * is set, and otherwise only reports whether they have failed. */
    bool (*carries)(pipe_channel *w, int device);
    int (*settle)(pipe_channel *w, bool all);
    void (*at)(pipe_channel *w, const pipe_tag *tag);                  /* sets the action that this rank is running,
                                                                        * or NULL for none */
    void (*abort)(pipe_channel *w, const char *why);
    void (*close)(pipe_channel *w);
} pipe_channel_table;
struct pipe_channel { const pipe_channel_table *table; };

/* Makes an executor for the row of a rank. The table must be lowered. The executor holds a reference to the table,
 * so the caller may free the table. If this call succeeds, the executor owns the channel. */
int pipe_open(ps_ctx *ctx, const ps_pipe_table *table, int rank, pipe_channel *channel, ps_pipe **out);
#endif
