/* SPDX-License-Identifier: BSD-3-Clause
 * The executor (exec.c) from the inside: the wire that carries its messages. Messages of one lane from one rank to
 * another arrive in order. A send never waits, and holds its tensor until the wait for the send. A receive checks the
 * tag, type and shape of the message before it takes the bytes. */
#ifndef PS_PIPE_EXEC_H
#define PS_PIPE_EXEC_H
#include "pipe/pipe.h"

enum { PIPE_LANE_UP, PIPE_LANE_DOWN, PIPE_LANE_LOSS, PIPE_LANES };

/* Names a message: the action that made it, and which of that action's tensors it has. Also names the action that a
 * rank is at. */
typedef struct pipe_tag {
    char kind;                              /* of messages 'F', 'B', 'L' (a loss); else the action's first letter */
    int16_t part;                           /* number of the tensor; -1: none */
    int32_t vstage, micro;
} pipe_tag;

/* Numbers that go with a message. */
typedef struct pipe_note {
    double when;                            /* the message's arrival by the virtual clock */
    double loss;
} pipe_note;

typedef struct pipe_wire pipe_wire;
typedef struct pipe_wire_table {
    int (*send)(pipe_wire *w, int peer, int lane, const pipe_tag *tag, const pipe_note *note, ps_tensor *t, void **out);
    int (*recv)(pipe_wire *w, int peer, int lane, const pipe_tag *tag, ps_tensor *t, void **out);
    int (*wait)(pipe_wire *w, void *request, pipe_note *note);      /* frees the request, on failure, too */
    bool (*test)(pipe_wire *w, void *request);                      /* whether a wait would return at once */
    /* (NULL: none) Whether tensors on this device are sent and received as they are; others are of host memory. What
     * was received there may still be on its way after the wait, in front of what the device is given to do next:
     * `settle` waits for it (`all`), or only tells whether that has failed. */
    bool (*carries)(pipe_wire *w, int device);
    int (*settle)(pipe_wire *w, bool all);
    void (*at)(pipe_wire *w, const pipe_tag *tag);                  /* tells this rank's action now; NULL: none */
    void (*abort)(pipe_wire *w, const char *why);
    void (*close)(pipe_wire *w);
} pipe_wire_table;
struct pipe_wire { const pipe_wire_table *table; };

/* The executor of a rank's row. The table is lowered; it is counted, so that its maker may free it. The wire is the
 * executor's from now on, unless this fails. */
int pipe_open(ps_ctx *ctx, const ps_pipe_table *table, int rank, pipe_wire *wire, ps_pipe **out);
#endif
