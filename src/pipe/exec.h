/* SPDX-License-Identifier: BSD-3-Clause
 * The executor (exec.c) from the inside: the wire that carries its messages. Messages of one lane from one rank to
 * another arrive in order. A send never waits; what it sends is held until the wait for it. A receive checks the tag,
 * type and shape of the message before it takes the bytes. */
#ifndef PS_PIPE_EXEC_H
#define PS_PIPE_EXEC_H
#include "pipe/pipe.h"

enum { PIPE_LANE_UP, PIPE_LANE_DOWN, PIPE_LANE_LOSS, PIPE_LANES };

/* Which message: of which action, and which of its tensors. */
typedef struct pipe_tag {
    char kind;                              /* 'F', 'B', 'I' */
    int16_t part;
    int32_t vstage, micro;
} pipe_tag;

typedef struct pipe_note {
    double when;                            /* by the virtual clock, when it arrives */
    double loss;
} pipe_note;

typedef struct pipe_wire pipe_wire;
typedef struct pipe_wire_table {
    int (*send)(pipe_wire *w, int peer, int lane, const pipe_tag *tag, const pipe_note *note, ps_tensor *t, void **out);
    int (*recv)(pipe_wire *w, int peer, int lane, const pipe_tag *tag, ps_tensor *t, void **out);
    int (*wait)(pipe_wire *w, void *request, pipe_note *note);      /* the request is gone afterwards, whatever comes */
    bool (*test)(pipe_wire *w, void *request);                      /* a wait would return at once */
    void (*at)(pipe_wire *w, const pipe_tag *tag);                  /* what this rank does now; NULL: nothing */
    void (*abort)(pipe_wire *w, const char *why);
    void (*close)(pipe_wire *w);
} pipe_wire_table;
struct pipe_wire { const pipe_wire_table *table; };

/* The executor of a rank. The table is lowered and stays; the wire is the executor's from now on, unless this fails. */
int pipe_open(ps_ctx *ctx, const ps_pipe_table *table, int rank, pipe_wire *wire, ps_pipe **out);
#endif
