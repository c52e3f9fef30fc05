/* SPDX-License-Identifier: BSD-3-Clause
 * Internal header of the executor (exec.c): its creation, and the channel for its messages (exec_messages.c).
 * Messages of one lane from one rank to another arrive in order. A send never blocks, and holds its tensor until the
 * wait for the send. A receive checks tag, type and shape of the message before it receives the bytes. */
#ifndef PS_PIPE_EXEC_H
#define PS_PIPE_EXEC_H
#include "pipe/pipe.h"

enum { PIPE_LANE_UP, PIPE_LANE_DOWN, PIPE_LANE_LOSS, PIPE_LANES };

/* Names a message (the action that made it, and the index of its tensor there), or the action that a rank is
 * running. */
typedef struct pipe_tag {
    char kind;                              /* of a message: 'F', 'B' or 'L' (a loss); of an action: its first letter */
    int16_t part;                           /* index of the tensor, or -1 for none */
    int32_t vstage, micro;
} pipe_tag;

/* Values that travel with a message. */
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
    int (*wait)(pipe_channel *w, void *request, pipe_note *note);      /* waits; frees the request even on failure */
    bool (*test)(pipe_channel *w, void *request);                      /* true if a wait would return at once */
    /* carries returns true if the channel sends and receives tensors on this device directly (NULL: on no device).
     * Others go through host memory. Received bytes on such a device can still be in transit after the wait, but
     * work that is queued later on the device runs after them. settle waits for these bytes if `all` is set;
     * otherwise it only reports whether they have failed. */
    bool (*carries)(pipe_channel *w, int device);
    int (*settle)(pipe_channel *w, bool all);
    void (*at)(pipe_channel *w, const pipe_tag *tag);                  /* action that this rank runs, or NULL */
    void (*abort)(pipe_channel *w, const char *why);
    void (*close)(pipe_channel *w);
} pipe_channel_table;
struct pipe_channel { const pipe_channel_table *table; };

/* Makes an executor for the row of a rank, from a lowered table. It holds a reference to the table. On success it
 * owns the channel. */
int pipe_open(ps_ctx *ctx, const ps_pipe_table *table, int rank, pipe_channel *channel, ps_pipe **out);
#endif
