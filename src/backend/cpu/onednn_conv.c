/* SPDX-License-Identifier: BSD-3-Clause
 * Convolution, transposed convolution and the gradient of their weight by oneDNN, in fp32. The file supports the C APIs
 * of oneDNN 2.x and 3.x. Only the section "two APIs" depends on the version.
 *
 * The bits of a result do not depend on the number of threads. The reason is that each primitive runs on one thread,
 * and that the division of the samples into tasks depends only on the shape. A task copies its samples into oneDNN's
 * layout, runs the primitive, and copies the result back. The memory of a task fits into the cache of a core. The
 * weight is copied into oneDNN's layout once per call. For the weight's gradient, each task has its own sum, and the
 * sums of the tasks are added in the order of the samples. bf16 and fp16 values are converted to fp32, and results are
 * rounded once.
 *
 * Primitives are created once per shape and kept in a bounded table. All buffers are in the call's workspace. One lock
 * guards the table and its memory objects. Each call holds the lock until it returns. */
#include "backend/cpu/gemm.h"
#include "backend/image.h"
#include "base/alloc.h"
#include "base/error.h"
#include <dnnl.h>
#include <omp.h>
#include <pthread.h>
#include <string.h>

enum {
    SHAPES_MAX = 256,                                /* maximum number of entries of the table; if the table is full,
                                                      * all entries are freed */
    TASK_FLOPS = 1 << 25,                            /* number of operations per task, if there are enough samples */
    TASKS_MIN = 4,                                   /* minimum number of tasks, even if this makes the tasks small */
    SUMS_MAX = 16,                                   /* maximum number of tasks if they compute the gradient of a
                                                      * weight, because each of these tasks has its own sum */
    SUMS_NBYTES = 64 << 20,                          /* maximum total size in bytes of the sums of all tasks */
    SCRATCH_MAX = 64 << 20                           /* implementations that need more bytes of scratch memory are
                                                      * skipped */
};

/* -- two APIs ------------------------------------------------------------------------------------------------------ */
typedef enum role { X, W, Y, ROLES } role;
typedef enum direction { FORWARD, BACK_DATA, BACK_WEIGHT } direction;

#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t desc;                     /* a handle that must be destroyed */
typedef const_dnnl_memory_desc_t desc_ref;
static desc_ref ref_of(const desc *d) { return *d; }
static dnnl_status_t desc_new(desc *d, int ndim, const dnnl_dim_t *dims, dnnl_format_tag_t tag)
{
    return dnnl_memory_desc_create_with_tag(d, ndim, dims, dnnl_f32, tag);
}
static dnnl_status_t desc_copy(desc *d, desc_ref from) { return dnnl_memory_desc_clone(d, from); }
static void desc_free(desc *d) { if (*d) dnnl_memory_desc_destroy(*d); }
#else
typedef dnnl_memory_desc_t desc;                     /* a plain struct */
typedef const dnnl_memory_desc_t *desc_ref;
static desc_ref ref_of(const desc *d) { return d; }
static dnnl_status_t desc_new(desc *d, int ndim, const dnnl_dim_t *dims, dnnl_format_tag_t tag)
{
    return dnnl_memory_desc_init_by_tag(d, ndim, dims, dnnl_f32, tag);
}
static dnnl_status_t desc_copy(desc *d, desc_ref from)
{
    *d = *from;
    return dnnl_success;
}
static void desc_free(desc *d) { (void)d; }
#endif

static dnnl_engine_t engine;
static dnnl_stream_t stream;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int fail_dnnl(dnnl_status_t status, const char *what)
{
    if (status == dnnl_out_of_memory) return ps_fail(PS_ENOMEM, "oneDNN: no memory while %s", what);
    return ps_fail(PS_EBACKEND, "oneDNN: %s failed with status %d", what, (int)status);
}

typedef struct key {                                 /* has no padding, because keys are compared as bytes */
    int64_t n;                                       /* number of samples in a task */
    ps_conv_shape s;                                 /* the shape, with s.n set to 0 */
    int64_t kind, bias;
} key;

typedef struct sizes { dnnl_dims_t stride, dilation, before, after; } sizes;

/* An iterator over oneDNN's implementations of a convolution, in oneDNN's order of preference. */
typedef struct impl_walk {
#if DNNL_VERSION_MAJOR < 3
    dnnl_convolution_desc_t op;                      /* must exist as long as the iterator, which reads it */
    dnnl_primitive_desc_iterator_t it;
#endif
    dnnl_primitive_desc_t pd;                        /* the current implementation */
} impl_walk;

#if DNNL_VERSION_MAJOR >= 3
static dnnl_status_t walk_begin(impl_walk *w, direction k, const desc d[ROLES], const desc *bias, const sizes *z,
                                const_dnnl_primitive_attr_t attr, const_dnnl_primitive_desc_t hint)
{
    const_dnnl_memory_desc_t b = bias ? *bias : NULL;
    memset(w, 0, sizeof *w);
    if (k == FORWARD)
        return dnnl_convolution_forward_primitive_desc_create(&w->pd, engine, dnnl_forward_training,
            dnnl_convolution_direct, d[X], d[W], b, d[Y], z->stride, z->dilation, z->before, z->after, attr);
    if (k == BACK_DATA)
        return dnnl_convolution_backward_data_primitive_desc_create(&w->pd, engine, dnnl_convolution_direct, d[X], d[W],
            d[Y], z->stride, z->dilation, z->before, z->after, hint, attr);
    return dnnl_convolution_backward_weights_primitive_desc_create(&w->pd, engine, dnnl_convolution_direct, d[X], d[W],
        b, d[Y], z->stride, z->dilation, z->before, z->after, hint, attr);
}
static bool walk_next(impl_walk *w) { return dnnl_primitive_desc_next_impl(w->pd) == dnnl_success; }
static void walk_end(impl_walk *w) { if (w->pd) dnnl_primitive_desc_destroy(w->pd); }
#else
static dnnl_status_t walk_begin(impl_walk *w, direction k, const desc d[ROLES], const desc *bias, const sizes *z,
                                const_dnnl_primitive_attr_t attr, const_dnnl_primitive_desc_t hint)
{
    dnnl_status_t st;
    memset(w, 0, sizeof *w);
    if (k == FORWARD)
        st = dnnl_dilated_convolution_forward_desc_init(&w->op, dnnl_forward_training, dnnl_convolution_direct, &d[X],
            &d[W], bias, &d[Y], z->stride, z->dilation, z->before, z->after);
    else if (k == BACK_DATA)
        st = dnnl_dilated_convolution_backward_data_desc_init(&w->op, dnnl_convolution_direct, &d[X], &d[W], &d[Y],
            z->stride, z->dilation, z->before, z->after);
    else
        st = dnnl_dilated_convolution_backward_weights_desc_init(&w->op, dnnl_convolution_direct, &d[X], &d[W], bias,
            &d[Y], z->stride, z->dilation, z->before, z->after);
    if (st == dnnl_success) st = dnnl_primitive_desc_iterator_create(&w->it, &w->op, attr, engine, hint);
    if (st != dnnl_success) return st;
    w->pd = dnnl_primitive_desc_iterator_fetch(w->it);
    return w->pd ? dnnl_success : dnnl_out_of_memory;
}
static bool walk_next(impl_walk *w)
{
    if (dnnl_primitive_desc_iterator_next(w->it) != dnnl_success) return false;
    dnnl_primitive_desc_t pd = dnnl_primitive_desc_iterator_fetch(w->it);
    if (!pd) return false;
    dnnl_primitive_desc_destroy(w->pd);
    w->pd = pd;
    return true;
}
static void walk_end(impl_walk *w)
{
    if (w->pd) dnnl_primitive_desc_destroy(w->pd);
    if (w->it) dnnl_primitive_desc_iterator_destroy(w->it);
}
#endif

/* -- the table of primitives --------------------------------------------------------------------------------------- */
/* The memory objects of one thread. */
typedef struct slot { dnnl_memory_t plain[ROLES], laid[ROLES], bias, scratch; } slot;

typedef struct entry {
    key key;
    bool supported;                                  /* false if oneDNN has only its plain loops for this shape */
    desc plain[ROLES], laid[ROLES], scratch, bias;   /* plain: row-major layouts; laid: the layouts in which the
                                                      * primitive reads and writes its operands */
    bool same[ROLES];
    dnnl_primitive_t prim, to_laid[ROLES], to_plain[ROLES];
    size_t laid_nbytes[ROLES], scratch_nbytes;
    slot *slots;
    int n_slots;
} entry;

static entry *table[SHAPES_MAX];
static int table_count;

static void entry_free(entry *e)
{
    if (e->prim) dnnl_primitive_destroy(e->prim);
    for (int r = 0; r < ROLES; r++) {
        if (e->to_laid[r]) dnnl_primitive_destroy(e->to_laid[r]);
        if (e->to_plain[r]) dnnl_primitive_destroy(e->to_plain[r]);
        desc_free(&e->plain[r]);
        desc_free(&e->laid[r]);
    }
    desc_free(&e->scratch);
    desc_free(&e->bias);
    for (int i = 0; i < e->n_slots; i++) {
        slot *s = &e->slots[i];
        dnnl_memory_t all[] = { s->plain[X], s->plain[W], s->plain[Y], s->laid[X], s->laid[W], s->laid[Y], s->bias,
                                s->scratch };
        for (size_t k = 0; k < sizeof all / sizeof *all; k++)
            if (all[k]) dnnl_memory_destroy(all[k]);
    }
    ps_free(e->slots);
    ps_free(e);
}

static void table_clear(void)
{
    for (int i = 0; i < table_count; i++) entry_free(table[i]);
    table_count = 0;
}

/* Describes the operands. tags[0] is the layout of x and y. tags[1] is the layout of w if there is one group. tags[2]
 * is the layout of w if there are several groups. */
static dnnl_status_t descs_new(const key *k, desc d[ROLES], const dnnl_format_tag_t tags[3])
{
    const ps_conv_shape *s = &k->s;
    bool grouped = s->groups > 1;
    dnnl_dims_t dx = { k->n, s->c, s->in[0], s->in[1] }, dy = { k->n, s->o, s->out[0], s->out[1] };
    dnnl_dims_t dw = { s->groups, s->o / s->groups, s->c / s->groups, s->k[0], s->k[1] };
    dnnl_status_t st = desc_new(&d[X], 4, dx, tags[0]);
    if (st == dnnl_success) st = desc_new(&d[Y], 4, dy, tags[0]);
    if (st == dnnl_success) st = desc_new(&d[W], grouped ? 5 : 4, grouped ? dw : dw + 1, tags[grouped ? 2 : 1]);
    return st;
}

static size_t size_of(const desc *d) { return dnnl_memory_desc_get_size(ref_of(d)); }

static dnnl_status_t reorder_new(dnnl_primitive_t *out, const desc *from, const desc *to)
{
    dnnl_primitive_desc_t pd = NULL;
    dnnl_status_t st = dnnl_reorder_primitive_desc_create(&pd, ref_of(from), engine, ref_of(to), engine, NULL);
    if (st == dnnl_success) st = dnnl_primitive_create(out, pd);
    if (pd) dnnl_primitive_desc_destroy(pd);
    return st;
}

/* Stores the layouts in which the chosen implementation needs its operands. Creates primitives that copy between these
 * layouts and row-major memory. */
static dnnl_status_t take_layouts(entry *e, dnnl_primitive_desc_t pd)
{
    static const dnnl_query_t queries[3][ROLES] = {
        { dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md },
        { dnnl_query_diff_src_md, dnnl_query_weights_md, dnnl_query_diff_dst_md },
        { dnnl_query_src_md, dnnl_query_diff_weights_md, dnnl_query_diff_dst_md } };
    dnnl_status_t st = dnnl_primitive_create(&e->prim, pd);
    for (int r = 0; r < ROLES && st == dnnl_success; r++) {
        bool is_result = r == (e->key.kind == FORWARD ? Y : e->key.kind == BACK_DATA ? X : W);
        st = desc_copy(&e->laid[r], dnnl_primitive_desc_query_md(pd, queries[e->key.kind][r], 0));
        if (st != dnnl_success) return st;
        e->laid_nbytes[r] = size_of(&e->laid[r]);
        e->same[r] = dnnl_memory_desc_equal(ref_of(&e->laid[r]), ref_of(&e->plain[r]));
        if (e->same[r]) continue;
        if (is_result) st = reorder_new(&e->to_plain[r], &e->laid[r], &e->plain[r]);
        else st = reorder_new(&e->to_laid[r], &e->plain[r], &e->laid[r]);
    }
    if (st == dnnl_success) st = desc_copy(&e->scratch, dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0));
    if (st == dnnl_success) e->scratch_nbytes = size_of(&e->scratch);
    return st;
}

static dnnl_status_t choose(entry *e, const desc any[ROLES], const sizes *z, dnnl_primitive_attr_t attr)
{
    const desc *bias = e->key.bias ? &e->bias : NULL;
    impl_walk forward, w;
    memset(&forward, 0, sizeof forward);
    memset(&w, 0, sizeof w);
    dnnl_status_t st = dnnl_success;
    if (e->key.kind != FORWARD) st = walk_begin(&forward, FORWARD, any, bias, z, attr, NULL);
    if (st == dnnl_success) st = walk_begin(&w, (direction)e->key.kind, any, bias, z, attr, forward.pd);
    bool more = st == dnnl_success, found = false;
    for (; more && !found; more = !found && walk_next(&w)) {
        const char *name = "";
        dnnl_primitive_desc_query(w.pd, dnnl_query_impl_info_str, 0, &name);
        size_t scratch = dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(w.pd, dnnl_query_scratchpad_md, 0));
        found = strncmp(name, "ref", 3) != 0 && scratch <= SCRATCH_MAX;
    }
    if (st == dnnl_success) st = found ? take_layouts(e, w.pd) : dnnl_unimplemented;
    walk_end(&w);
    walk_end(&forward);
    return st;
}

static dnnl_status_t entry_fill(entry *e)
{
    static const dnnl_format_tag_t row_major[3] = { dnnl_nchw, dnnl_oihw, dnnl_goihw };
    static const dnnl_format_tag_t free_choice[3] = { dnnl_format_tag_any, dnnl_format_tag_any, dnnl_format_tag_any };
    const ps_conv_shape *s = &e->key.s;
    desc any[ROLES];
    sizes z;
    dnnl_primitive_attr_t attr = NULL;
    memset(any, 0, sizeof any);
    for (int i = 0; i < 2; i++) {
        z.stride[i] = s->stride[i], z.dilation[i] = s->dilation[i] - 1, z.before[i] = s->before[i];
        /* The size of the padding after the input. It is just large enough to compute the last output element. It is
         * negative if the last elements of the input are unused. */
        z.after[i] = (s->out[i] - 1) * s->stride[i] + (s->k[i] - 1) * s->dilation[i] + 1 - s->in[i] - s->before[i];
    }
    dnnl_dims_t channels = { s->o };
    dnnl_status_t st = descs_new(&e->key, e->plain, row_major);
    if (st == dnnl_success) st = descs_new(&e->key, any, free_choice);
    if (st == dnnl_success) st = desc_new(&e->bias, 1, channels, dnnl_x);
    if (st == dnnl_success) st = dnnl_primitive_attr_create(&attr);
    if (st == dnnl_success) st = dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user);
    if (st == dnnl_success) st = choose(e, any, &z, attr);
    e->supported = st == dnnl_success;
    if (attr) dnnl_primitive_attr_destroy(attr);
    for (int r = 0; r < ROLES; r++) desc_free(&any[r]);
    return st == dnnl_unimplemented || st == dnnl_invalid_arguments ? dnnl_success : st;
}

/* Creates memory objects for `n` threads. */
static dnnl_status_t slots_grow(entry *e, int n)
{
    if (n <= e->n_slots) return dnnl_success;
    slot *more = ps_realloc(e->slots, (size_t)n * sizeof *more);
    if (!more) return dnnl_out_of_memory;
    e->slots = more;
    while (e->n_slots < n) {
        slot *s = &e->slots[e->n_slots++];
        memset(s, 0, sizeof *s);
        dnnl_status_t st = dnnl_memory_create(&s->scratch, ref_of(&e->scratch), engine, DNNL_MEMORY_NONE);
        if (st == dnnl_success) st = dnnl_memory_create(&s->bias, ref_of(&e->bias), engine, DNNL_MEMORY_NONE);
        for (int r = 0; r < ROLES && st == dnnl_success; r++) {
            st = dnnl_memory_create(&s->plain[r], ref_of(&e->plain[r]), engine, DNNL_MEMORY_NONE);
            if (st == dnnl_success) st = dnnl_memory_create(&s->laid[r], ref_of(&e->laid[r]), engine, DNNL_MEMORY_NONE);
        }
        if (st != dnnl_success) return st;
    }
    return dnnl_success;
}

/* Finds or creates the entry of a key. The entry has memory objects for `threads` threads. Each primitive runs on one
 * thread. */
static int entry_get(const key *k, int threads, entry **out)
{
    entry *e = NULL;
    for (int i = 0; i < table_count && !e; i++)
        if (memcmp(&table[i]->key, k, sizeof *k) == 0) e = table[i];
    int was = omp_get_max_threads();
    omp_set_num_threads(1);
    dnnl_status_t st = engine ? dnnl_success : dnnl_engine_create(&engine, dnnl_cpu, 0);
    if (st == dnnl_success && !stream) st = dnnl_stream_create(&stream, engine, dnnl_stream_default_flags);
    if (st == dnnl_success && !e) {
        e = ps_alloc0(sizeof *e);
        if (e) {
            e->key = *k;
            st = entry_fill(e);
            if (st == dnnl_success) table[table_count++] = e;
            else entry_free(e);
        } else {
            st = dnnl_out_of_memory;
        }
    }
    if (st == dnnl_success && e->supported) st = slots_grow(e, threads);
    omp_set_num_threads(was);
    *out = e;
    return st == dnnl_success ? 0 : fail_dnnl(st, "preparing a convolution");
}

/* -- one call ------------------------------------------------------------------------------------------------------ */
/* A row-major operand of the call. `each` is the number of elements per sample. For w it is the number of all
 * elements. */
typedef struct operand { void *data; int dtype; int64_t each; } operand;

typedef struct work {
    ps_call *call;
    direction kind;
    ps_conv_shape s;
    operand of[ROLES], bias;                         /* bias.data is NULL if there is no bias */
    int64_t per_task, tasks;
    int threads;
    entry *whole, *rest;                             /* whole: the entry for tasks with per_task samples; rest: the
                                                      * entry for the last task, which can be smaller */
    const float *late;                               /* the bias of a transposed convolution, which oneDNN cannot add;
                                                      * otherwise NULL */
    char *w_laid, *buffers, *sums;                   /* sums: the sums of the weight's gradient, one per task */
    size_t thread_nbytes, sum_nbytes;
} work;

static size_t rounded(size_t nbytes) { return (nbytes + 63) / 64 * 64; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t samples_of(const work *w, int64_t task) { return least(w->per_task, w->s.n - task * w->per_task); }

static void cut_into_tasks(work *w)
{
    const ps_conv_shape *s = &w->s;
    int64_t weight = s->o * (s->c / s->groups) * s->k[0] * s->k[1], places = s->out[0] * s->out[1];
    int64_t flops = most(2 * weight * places, 1), image = w->of[X].each + w->of[Y].each;
    w->per_task = (TASK_FLOPS + flops - 1) / flops;
    w->per_task = most(w->per_task, weight / (2 * image + 1));         /* each task reads w once, so a task has more
                                                                        * samples if w is large */
    w->per_task = most(1, least(w->per_task, (s->n + TASKS_MIN - 1) / TASKS_MIN));
    if (w->kind == BACK_WEIGHT) {
        int64_t sums = least(SUMS_MAX, most(1, SUMS_NBYTES / (4 * weight + 1)));
        w->per_task = most(w->per_task, (s->n + sums - 1) / sums);
    }
    w->tasks = (s->n + w->per_task - 1) / w->per_task;
    w->threads = (int)least(omp_get_max_threads(), w->tasks);
}

static int prepare(work *w)
{
    key k;
    memset(&k, 0, sizeof k);
    k.n = w->per_task, k.s = w->s, k.kind = w->kind, k.bias = w->bias.data != NULL;
    k.s.n = 0;
    if (table_count + 2 > SHAPES_MAX) table_clear();
    PS_TRY(entry_get(&k, w->threads, &w->whole));
    k.n = samples_of(w, w->tasks - 1);
    PS_TRY(entry_get(&k, w->threads, &w->rest));
    return 0;
}

/* Returns the size in bytes of a thread's buffers. They contain operands in oneDNN's layout, bf16 and fp16 operands as
 * fp32, and the scratchpad. */
static size_t of_thread(const work *w, const entry *e)
{
    size_t n = rounded(e->scratch_nbytes);
    for (int r = 0; r < ROLES; r++) {
        if (r == W) continue;
        if (!e->same[r]) n += rounded(e->laid_nbytes[r]);
        if (w->of[r].dtype != PS_F32) n += rounded((size_t)(w->per_task * w->of[r].each * 4));
    }
    return n;
}

static void *asked(work *w, size_t nbytes) { return w->call->scratch(w->call, nbytes ? nbytes : 1); }

static void run(dnnl_primitive_t prim, int n, const dnnl_exec_arg_t *args, dnnl_status_t *st)
{
    if (*st == dnnl_success) *st = dnnl_primitive_execute(prim, stream, n, args);
}

static void copied(dnnl_primitive_t reorder, dnnl_memory_t from, dnnl_memory_t to, dnnl_status_t *st)
{
    dnnl_exec_arg_t args[2] = { { DNNL_ARG_FROM, from }, { DNNL_ARG_TO, to } };
    run(reorder, 2, args, st);
}

static void set(dnnl_memory_t m, const void *p, dnnl_status_t *st)
{
    if (*st == dnnl_success) *st = dnnl_memory_set_data_handle(m, (void *)(uintptr_t)p);
}

/* Converts the weight to oneDNN's layout. A call does this once, for all tasks. */
static int lay_weight(work *w, float *plain)
{
    entry *e = w->whole;
    slot *s = &e->slots[0];
    dnnl_status_t st = dnnl_success;
    const void *from = w->of[W].data;
    if (w->of[W].dtype != PS_F32) {
        ps_cpu_row_load(plain, from, w->of[W].each, w->of[W].dtype);
        from = plain;
    }
    if (e->same[W]) {
        w->w_laid = (char *)(uintptr_t)from;
        return 0;
    }
    set(s->plain[W], from, &st);
    set(s->laid[W], w->w_laid, &st);
    copied(e->to_laid[W], s->plain[W], s->laid[W], &st);
    return st == dnnl_success ? 0 : fail_dnnl(st, "a copy of the weight");
}

static const void *sample(const operand *o, int64_t i)
{
    return (const char *)o->data + i * o->each * ps_dtype_bytes(o->dtype);
}

/* Copies operand r (x or y) into oneDNN's layout. If the operand is the result, only reserves memory for it. *p points
 * to the next free byte of the thread's buffer. */
static void stage(const work *w, entry *e, slot *s, role r, int64_t task, char **p, bool is_result, dnnl_status_t *st)
{
    const operand *o = &w->of[r];
    const void *plain = sample(o, task * w->per_task);
    if (o->dtype != PS_F32) {
        float *wide = (float *)*p;
        *p += rounded((size_t)(w->per_task * o->each * 4));
        if (!is_result) ps_cpu_row_load(wide, plain, samples_of(w, task) * o->each, o->dtype);
        plain = wide;
    }
    set(s->plain[r], plain, st);
    if (e->same[r]) {
        set(s->laid[r], plain, st);
        return;
    }
    set(s->laid[r], *p, st);
    *p += rounded(e->laid_nbytes[r]);
    if (!is_result) copied(e->to_laid[r], s->plain[r], s->laid[r], st);
}

/* Copies the result from oneDNN's layout to row-major memory, and converts it from fp32 to its type. */
static void unstage(const work *w, entry *e, slot *s, role r, int64_t task, dnnl_status_t *st)
{
    const operand *o = &w->of[r];
    void *plain = NULL;
    if (!e->same[r]) copied(e->to_plain[r], s->laid[r], s->plain[r], st);
    if (*st == dnnl_success) *st = dnnl_memory_get_data_handle(s->plain[r], &plain);
    if (*st != dnnl_success) return;
    int64_t n = samples_of(w, task), places = o->each / w->s.c;          /* places: in a transposed convolution, the
                                                                          * number of positions in one channel of the
                                                                          * result */
    for (int64_t i = 0; w->late && i < n * w->s.c; i++) {
        float *p = (float *)plain + i * places, more = w->late[i % w->s.c];
        for (int64_t k = 0; k < places; k++) p[k] += more;
    }
    void *to = (void *)(uintptr_t)sample(o, task * w->per_task);
    if (o->dtype != PS_F32) ps_cpu_row_store(to, plain, n * o->each, o->dtype);
}

static dnnl_status_t do_task(const work *w, int64_t task, int thread)
{
    static const int args_of[3][ROLES] = {
        { DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST },
        { DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DIFF_DST },
        { DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST } };
    static const role results[3] = { Y, X, W };
    dnnl_status_t st = dnnl_success;
    entry *e = samples_of(w, task) == w->per_task ? w->whole : w->rest;
    slot *s = &e->slots[thread];
    role result = results[w->kind];
    char *p = w->buffers + (size_t)thread * w->thread_nbytes;
    char *sum = w->sums + (size_t)task * w->sum_nbytes;               /* dw followed by db; used only for BACK_WEIGHT */
    set(s->scratch, p, &st);
    p += rounded(e->scratch_nbytes);
    stage(w, e, s, X, task, &p, result == X, &st);
    stage(w, e, s, Y, task, &p, result == Y, &st);
    set(s->laid[W], result == W ? sum : w->w_laid, &st);
    dnnl_exec_arg_t args[5] = { { DNNL_ARG_SCRATCHPAD, s->scratch } };
    for (int r = 0; r < ROLES; r++) args[1 + r] = (dnnl_exec_arg_t){ args_of[w->kind][r], s->laid[r] };
    if (w->bias.data) {
        set(s->bias, result == W ? (const void *)(sum + rounded(e->laid_nbytes[W])) : w->bias.data, &st);
        args[4] = (dnnl_exec_arg_t){ result == W ? DNNL_ARG_DIFF_BIAS : DNNL_ARG_BIAS, s->bias };
    }
    run(e->prim, w->bias.data ? 5 : 4, args, &st);
    if (result != W) unstage(w, e, s, result, task, &st);
    return st;
}

static int do_tasks(work *w)
{
    dnnl_status_t worst = dnnl_success;
    /* oneDNN does not recognize a parallel region with one thread. Without this, it would use all threads in the
     * region. */
    int was = omp_get_max_threads();
    if (w->threads == 1) omp_set_num_threads(1);
#pragma omp parallel for schedule(static) num_threads(w->threads) if (w->threads > 1)
    for (int64_t task = 0; task < w->tasks; task++) {
        dnnl_status_t st = do_task(w, task, w->threads > 1 ? omp_get_thread_num() : 0);
        if (st != dnnl_success) {
#pragma omp atomic write
            worst = st;
        }
    }
    if (w->threads == 1) omp_set_num_threads(was);
    return worst == dnnl_success ? 0 : fail_dnnl(worst, "a convolution");
}

/* -- the ops ------------------------------------------------------------------------------------------------------- */
static bool multiplies(const ps_view *v) { return v->dtype == PS_F32 || v->dtype == PS_BF16 || v->dtype == PS_F16; }

static operand operand_of(const ps_view *v, bool by_samples)
{
    return (operand){ v->data, v->dtype, by_samples && v->shape[0] ? v->numel / v->shape[0] : v->numel };
}

/* Runs the convolution or the transposed convolution. The caller holds the lock. Returns PS_EUNSUP only if nothing has
 * been written yet. */
static int by_samples(work *w)
{
    operand b = w->bias;
    float *w_wide = NULL, *b_wide = NULL;
    if (w->kind == BACK_DATA) w->bias.data = NULL;
    PS_TRY(prepare(w));
    if (!w->whole->supported || !w->rest->supported) return PS_EUNSUP;
    w->thread_nbytes = most((int64_t)of_thread(w, w->whole), (int64_t)of_thread(w, w->rest));
    w->buffers = asked(w, w->thread_nbytes * (size_t)w->threads);
    w->w_laid = asked(w, w->whole->same[W] ? 0 : w->whole->laid_nbytes[W]);
    if (!w->buffers || !w->w_laid) return PS_ENOMEM;
    if (w->of[W].dtype != PS_F32 && !(w_wide = asked(w, (size_t)w->of[W].each * 4))) return PS_ENOMEM;
    if (b.data && b.dtype != PS_F32 && !(b_wide = asked(w, (size_t)b.each * 4))) return PS_ENOMEM;
    if (w->call->dry) return 0;
    if (b_wide) {
        ps_cpu_row_load(b_wide, b.data, b.each, b.dtype);
        b.data = b_wide;
    }
    if (w->kind == BACK_DATA) w->late = b.data;
    else w->bias.data = b.data;
    PS_TRY(lay_weight(w, w_wide));
    return do_tasks(w);
}

static int conv_locked(ps_call *call, direction kind)
{
    const ps_view *in = &call->in[0], *weight = &call->in[1], *b = &call->in[2], *out = &call->out[0];
    const ps_view *x = kind == FORWARD ? in : out, *y = kind == FORWARD ? out : in;
    work w = { .call = call, .kind = kind };
    w.s = ps_conv_shape_of(call->attrs, x, weight, y);
    w.of[X] = operand_of(x, true), w.of[Y] = operand_of(y, true), w.of[W] = operand_of(weight, false);
    if (ps_has(b)) w.bias = operand_of(b, false);
    cut_into_tasks(&w);
    pthread_mutex_lock(&lock);
    int rc = by_samples(&w);
    pthread_mutex_unlock(&lock);
    return rc;
}

static int conv_by(ps_call *call, direction kind)
{
    const ps_view *x = &call->in[0], *w = &call->in[1], *b = &call->in[2], *y = &call->out[0];
    if (!multiplies(x) || !multiplies(w) || !multiplies(y) || (ps_has(b) && !multiplies(b))) return PS_EUNSUP;
    if (y->numel == 0) return 0;
    return x->numel == 0 ? PS_EUNSUP : conv_locked(call, kind);
}

int ps_cpu_conv(ps_call *call) { return conv_by(call, FORWARD); }
int ps_cpu_conv_transpose(ps_call *call) { return conv_by(call, BACK_DATA); }

/* Stores src [n], which is fp32, in dst, or adds src to dst. */
static void put(const ps_view *dst, const float *src, bool add)
{
    enum { PIECE = 1024 };
#pragma omp parallel for schedule(static) if (dst->numel > PS_PAR_MIN)
    for (int64_t i = 0; i < dst->numel; i += PIECE) {
        float sum[PIECE];
        int64_t n = least(PIECE, dst->numel - i);
        char *to = (char *)dst->data + i * ps_dtype_bytes(dst->dtype);
        memset(sum, 0, sizeof sum);
        if (add) ps_cpu_row_load(sum, to, n, dst->dtype);
        for (int64_t k = 0; k < n; k++) sum[k] = add ? sum[k] + src[i + k] : src[i + k];
        ps_cpu_row_store(to, sum, n, dst->dtype);
    }
}

/* Adds the sums of all tasks to the sum of the first task, in the order of the tasks. */
static void add_sums(const work *w)
{
    int64_t n = (int64_t)(w->sum_nbytes / 4);
    float *first = (float *)w->sums;
#pragma omp parallel for schedule(static) if (n * w->tasks > PS_PAR_MIN)
    for (int64_t i = 0; i < n; i += 256)
        for (int64_t t = 1; t < w->tasks; t++) {
            const float *p = first + t * n;
            for (int64_t k = i; k < least(i + 256, n); k++) first[k] += p[k];
        }
}

static int weight_locked(work *w, const ps_view *dw, const ps_view *db)
{
    const ps_attrs_conv_weight *a = w->call->attrs;
    PS_TRY(prepare(w));
    entry *e = w->whole;
    if (!e->supported || !w->rest->supported) return PS_EUNSUP;
    /* The sums of the tasks can be added only if both entries have the same layout of the weight's gradient. */
    if (!dnnl_memory_desc_equal(ref_of(&e->laid[W]), ref_of(&w->rest->laid[W]))) return PS_EUNSUP;
    w->thread_nbytes = most((int64_t)of_thread(w, e), (int64_t)of_thread(w, w->rest));
    w->sum_nbytes = rounded(e->laid_nbytes[W]) + (w->bias.data ? rounded((size_t)w->s.o * 4) : 0);
    w->buffers = asked(w, w->thread_nbytes * (size_t)w->threads);
    w->sums = asked(w, w->sum_nbytes * (size_t)w->tasks);
    float *plain = asked(w, (size_t)dw->numel * 4);
    if (!w->buffers || !w->sums || !plain) return PS_ENOMEM;
    if (w->call->dry) return 0;
    memset(w->sums, 0, w->sum_nbytes * (size_t)w->tasks);     /* initializes the padding between the sums, because
                                                               * add_sums also adds the padding */
    PS_TRY(do_tasks(w));
    add_sums(w);
    const float *result = (const float *)w->sums;
    if (!e->same[W]) {
        slot *s = &e->slots[0];
        dnnl_status_t st = dnnl_success;
        set(s->laid[W], w->sums, &st);
        set(s->plain[W], plain, &st);
        copied(e->to_plain[W], s->laid[W], s->plain[W], &st);
        if (st != dnnl_success) return fail_dnnl(st, "a copy of a weight's gradient");
        result = plain;
    }
    put(dw, result, a->accumulate);
    if (w->bias.data) put(db, (const float *)(w->sums + rounded(e->laid_nbytes[W])), a->add_b);
    return 0;
}

int ps_cpu_conv_weight(ps_call *call)
{
    const ps_view *x = &call->in[0], *dy = &call->in[1], *dw = &call->out[0], *db = &call->out[1];
    if (!multiplies(x) || !multiplies(dy) || !ps_has(dw) || !multiplies(dw) || (ps_has(db) && !multiplies(db)))
        return PS_EUNSUP;
    if (x->numel == 0 || dy->numel == 0 || dw->numel == 0) return PS_EUNSUP;
    work w = { .call = call, .kind = BACK_WEIGHT };
    w.s = ps_conv_shape_of(call->attrs, x, dw, dy);
    w.of[X] = operand_of(x, true), w.of[Y] = operand_of(dy, true), w.of[W] = operand_of(dw, false);
    if (ps_has(db)) w.bias = operand_of(db, false);
    cut_into_tasks(&w);
    pthread_mutex_lock(&lock);
    int rc = weight_locked(&w, dw, db);
    pthread_mutex_unlock(&lock);
    return rc;
}

void ps_cpu_conv_close(void)
{
    pthread_mutex_lock(&lock);
    table_clear();
    if (stream) dnnl_stream_destroy(stream);
    if (engine) dnnl_engine_destroy(engine);
    stream = NULL;
    engine = NULL;
    pthread_mutex_unlock(&lock);
}
