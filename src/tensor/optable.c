/* SPDX-License-Identifier: BSD-3-Clause
 * The op table. It includes ops.def four times, with different macros. */
#include "tensor/optable.h"
#include <pthread.h>
#include <string.h>

#define OP(name, ins, outs, attrs, infer, grad, ...) int infer_##infer(ps_infer *f);
#include "ops.def"
#undef OP
#define grad_none grad_none_unused
#define OP(name, ins, outs, attrs, infer, grad, ...) int grad_##grad(ps_grad *g);
#include "ops.def"
#undef OP
#define OP(name, ins, outs, attrs, infer, grad, saved, flags, cost, doc) void cost_##cost(ps_cost *c);
#include "ops.def"
#undef OP
#undef grad_none
#define grad_none NULL

enum { VIEW = PS_OPF_VIEW, STRIDED = PS_OPF_STRIDED, PROMOTE = PS_OPF_PROMOTE, CHEAP = PS_OPF_CHEAP,
       INPLACE = PS_OPF_INPLACE, ACCUM = PS_OPF_ACCUM, ROWS = PS_OPF_ROWS, MOVE = PS_OPF_MOVE,
       RANKS = PS_OPF_RANKS, SPLIT = PS_OPF_SPLIT, PRODUCT = PS_OPF_PRODUCT };

static ps_opinfo table[PS_OP_COUNT] = {
#define OP(id, IN, OUT, ATTRS, INFER, GRAD, SAVED, FLAGS, COST, DOC)                                                \
    [PS_OP_##id] = { .name = #id, .ins = IN, .outs = OUT, .saved = SAVED, .attrs_nbytes = sizeof(ps_attrs_##id),     \
                     .infer = infer_##INFER, .grad = grad_##GRAD, .cost = cost_##COST, .flags = FLAGS },
#include "ops.def"
#undef OP
};

static size_t word(const char *s) { return strcspn(s, " ?*~"); }

static int input_of(const ps_opinfo *op, const char *p, size_t n)
{
    int i = 0;
    for (const char *q = op->ins; *q; q += strspn(q, " ?*"), i++) {
        if (word(q) == n && !memcmp(p, q, n)) return i;
        q += word(q);
    }
    return -1;
}

static void parse(ps_opinfo *op)
{
    for (const char *p = op->ins; *p; p += strspn(p, " ?*")) {
        size_t n = word(p);
        if (p[n] == '*') op->n_in = -1;
        else {
            if (op->n_in < 8) op->in_name[op->n_in] = p;
            if (p[n] == '?') op->optional_in |= 1ull << op->n_in;
            op->n_in++;
        }
        p += n;
    }
    for (const char *p = op->outs; *p; p += strspn(p, " ~")) {
        size_t n = word(p);
        if (p[n] == '~') op->hidden_out |= 1u << op->n_out;
        op->n_out++;
        p += n;
    }
    for (const char *p = op->saved; *p; p += strspn(p, " ")) {
        bool ahead = *p == '+';
        size_t n = word(p += ahead);
        int i = input_of(op, p, n);
        if (i >= 0) *(ahead ? &op->ahead_in : &op->saved_in) |= 1ull << i;
        i = 0;
        for (const char *q = op->outs; *q; q += strspn(q, " ~"), i++) {
            if (word(q) == n && !memcmp(p, q, n)) op->saved_out |= 1u << i;
            q += word(q);
        }
        p += n;
    }
}

/* Some saved inputs (column `saved` of ops.def) are read only to compute the gradient of another input, such as a
 * weight. If the other input is frozen, the saved input is not kept. */
static const struct {
    int op;
    const char *input, *other;
} narrowed[] = {
    { PS_OP_linear, "x", "w" }, { PS_OP_linear, "w", "x" }, { PS_OP_matmul, "a", "b" }, { PS_OP_matmul, "b", "a" },
    { PS_OP_mul, "a", "b" },    { PS_OP_mul, "b", "a" },    { PS_OP_mlp, "x", "w1" },   { PS_OP_mlp, "w1", "x" },
};

static void parse_all(void)
{
    for (int i = 0; i < PS_OP_COUNT; i++) {
        memset(table[i].saved_for, -1, sizeof table[i].saved_for);
        parse(&table[i]);
    }
    for (size_t k = 0; k < sizeof narrowed / sizeof *narrowed; k++) {
        ps_opinfo *op = &table[narrowed[k].op];
        int i = input_of(op, narrowed[k].input, strlen(narrowed[k].input));
        op->saved_for[i] = (int8_t)input_of(op, narrowed[k].other, strlen(narrowed[k].other));
    }
}

const ps_opinfo *ps_op(int op)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, parse_all);
    return &table[op];
}
