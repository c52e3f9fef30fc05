/* SPDX-License-Identifier: BSD-3-Clause
 * This is the internal header of the executor (exec.c). It declares the function that creates an executor, and the
 * channel for the executor's messages (exec_messages.c). The messages that one rank sends to another rank in one lane
 * arrive in the order of their sends. A send never blocks, and its request holds the tensor until the caller has waited
 * for the request. A receive checks the tag, the type and the shape of the message before it receives the bytes. */
#ifndef PS_PIPE_EXEC_H
#define PS_PIPE_EXEC_H
#include "pipe/pipe.h"

enum { PIPE_LANE_UP, PIPE_LANE_DOWN, PIPE_LANE_LOSS, PIPE_LANES };

/* The name of a message or of an action. The name of a message consists of the action that made the message, and the
 * index of the message's tensor in this action. The name of an action tells the watch which action a rank is
 * running. */
typedef struct pipe_tag {
    /* kind: for a message, 'F', 'B' or 'L' (a loss); for an action, the first letter of pipe_kind_text() */
    char kind;
    int16_t part;                           /* index of the tensor; -1 if there is no tensor */
    int32_t vstage, micro;
} pipe_tag;

/* Values that are sent with a message. */
typedef struct pipe_note {
    double when;                            /* arrival time of the message, by the virtual clock */
    double loss;
    double weight;                          /* weight of the loss, or -1 if it is unknown */
    double hits, targets;                   /* hits and targets of the loss; both are 0 if unknown */
} pipe_note;

typedef struct pipe_channel pipe_channel;
typedef struct pipe_channel_table {
    int (*send)(pipe_channel *w, int peer, int lane, const pipe_tag *tag, const pipe_note *note, ps_tensor *t,
                void **out);
    int (*recv)(pipe_channel *w, int peer, int lane, const pipe_tag *tag, ps_tensor *t, void **out);
    /* Waits for the request. Frees the request even if it has failed. */
    int (*wait)(pipe_channel *w, void *request, pipe_note *note);
    bool (*test)(pipe_channel *w, void *request);                     /* returns true if wait() would not block */
    /* carries: returns true if the channel sends and receives tensors on `device` directly. If `carries` is NULL, the
     * channel has no direct transfers. Tensors without direct transfers are sent through host memory.
     * settle: With direct transfers, received bytes can still be in transit after wait(). Work that is queued on the
     * device after wait() runs after these bytes have arrived. If `all` is set, settle() waits until all bytes have
     * arrived. In any case it returns an error if a direct transfer has failed. */
    bool (*carries)(pipe_channel *w, int device);
    int (*settle)(pipe_channel *w, bool all);
    /* Notifies the watch of the action that this rank begins. tag: the action's name, or NULL if the step has ended. */
    void (*at)(pipe_channel *w, const pipe_tag *tag);
    void (*abort)(pipe_channel *w, const char *why);
    void (*close)(pipe_channel *w);
} pipe_channel_table;
struct pipe_channel { const pipe_channel_table *table; };

/* Creates an executor for the row of a rank in a lowered table. The executor holds a reference to the table. If the
 * function succeeds, the executor owns the channel. */
int pipe_open(ps_ctx *ctx, const ps_pipe_table *table, int rank, pipe_channel *channel, ps_pipe **out);
#endif
