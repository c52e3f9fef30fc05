/* SPDX-License-Identifier: BSD-3-Clause
 * Determines the rows of an epoch: the examples of each row, and the order of the rows. Sources have weights, and
 * stride scheduling (Waldspurger and Weihl 1995) selects the source of each example. In this algorithm the examples of
 * a source are due at times that are 1 / weight apart. The order of the examples is divided into windows. The examples
 * of a window are packed by best fit or sorted by length. A row depends only on the examples, the settings and the
 * epoch. It does not depend on batches or ranks. */
#include "base/alloc.h"
#include "base/philox.h"
#include "data/examples.h"
#include <stdlib.h>
#include <string.h>

enum { GROUP = 64 };                    /* number of rows of similar length that stay together when rows are grouped by
                                         * length */

typedef struct item { int32_t example; int64_t first, n; } item;     /* n tokens of an example, starting at `first` */

struct ps_rows {
    _Atomic int more;                   /* number of owners minus one */
    ps_examples *examples;              /* retained */
    bool packing;
    int64_t n_items, n_windows;
    /* n_rows is atomic, because the thread that makes batches reads rows while the script's thread adds rows. */
    _Atomic int64_t n_rows;
    _Atomic bool complete;
    ps_rows_config config;              /* the settings; its lists `counts` and `weights` are NULL */
    int32_t *order;                     /* [places] number of the example at each place of the epoch; freed when the
                                         * rows are complete */
    int64_t places, taken;              /* taken: number of places whose example became an item or was left out */
    int64_t arranged;                   /* number of items that were put into rows */
    item *items;
    int64_t *row;                       /* [n_rows + 1] index of each row's first item */
    int64_t *windows;                   /* [n_windows + 1] index of each window's first row; only the script's thread
                                         * may use it */
    ps_rows_info info;
};

/* -- order --------------------------------------------------------------------------------------------------------- */
/* Returns random number i of the stream `stream`. The number is at least 0 and less than n. */
static int64_t draw(uint64_t seed, uint64_t stream, int64_t i, int64_t n)
{
    ps_philox r = ps_philox4x32(seed, (uint64_t)i, stream);
    uint64_t x = (uint64_t)r.v[0] << 32 | r.v[1];
    return (int64_t)((unsigned __int128)x * (uint64_t)n >> 64);
}

static void shuffle(int32_t *order, int64_t n, uint64_t seed, uint64_t stream)
{
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t j = draw(seed, stream, i, i + 1);
        int32_t kept = order[i];
        order[i] = order[j], order[j] = kept;
    }
}

typedef struct source { int64_t first, n, next, passes; double weight; int32_t *order; } source;

static void begin_pass(const ps_rows_config *c, source *s, int k)
{
    for (int64_t i = 0; i < s->n; i++) s->order[i] = (int32_t)(s->first + i);
    uint64_t stream = (uint64_t)c->epoch << 32 ^ (uint64_t)s->passes << 16 ^ (uint64_t)k;
    if (c->shuffle) shuffle(s->order, s->n, c->seed, stream);
    s->next = 0;
}

/* Returns the index of the source of the next example, or -1 at the end of the epoch. */
static int due(const ps_rows_config *c, const source *s, const int64_t *taken)
{
    int best = -1;
    double least = 0;
    bool all_done = true;
    for (int k = 0; k < c->n_sources; k++) all_done = all_done && (s[k].passes > 0 || s[k].next == s[k].n);
    if (all_done) return -1;
    for (int k = 0; k < c->n_sources; k++) {
        if (s[k].next == s[k].n && c->exhausted == PS_MIX_LEAVE) continue;
        double at = ((double)taken[k] + 0.5) / s[k].weight;
        if (best < 0 || at < least) best = k, least = at;
    }
    return best >= 0 && s[best].next == s[best].n && c->exhausted == PS_MIX_STOP ? -1 : best;
}

typedef struct list { int32_t *at; int64_t n, room; } list;

static int push(list *l, int32_t x)
{
    if (l->n == l->room) {
        int64_t room = l->room ? 2 * l->room : 1024;
        int32_t *at = ps_realloc(l->at, (size_t)room * sizeof *at);
        if (!at) return ps_fail_nomem((size_t)room * sizeof *at);
        l->at = at;
        l->room = room;
    }
    l->at[l->n++] = x;
    return 0;
}

static int take_all(const ps_rows_config *c, source *s, int64_t *taken, list *order)
{
    for (int k; (k = due(c, s, taken)) >= 0;) {
        if (s[k].next == s[k].n) {
            s[k].passes++;
            begin_pass(c, &s[k], k);
        }
        taken[k]++;
        PS_TRY(push(order, s[k].order[s[k].next++]));
    }
    return 0;
}

/* Determines the order of the epoch's examples, and appends their numbers to `order`. */
static int order_of(const ps_examples *e, const ps_rows_config *c, list *order)
{
    source *s = ps_alloc0((size_t)c->n_sources * sizeof *s);
    int64_t *taken = ps_alloc0((size_t)c->n_sources * sizeof *taken), first = 0;
    int32_t *numbers = ps_alloc((size_t)(e->count + 1) * sizeof *numbers);
    int rc = s && taken && numbers ? 0 : ps_fail_nomem((size_t)(e->count + 1) * sizeof *numbers);
    for (int k = 0; k < c->n_sources && rc == 0; k++) {
        s[k].first = first, s[k].n = c->counts[k], s[k].weight = c->weights[k], s[k].order = numbers + first;
        first += s[k].n;
        begin_pass(c, &s[k], k);
    }
    if (rc == 0) rc = take_all(c, s, taken, order);
    ps_free(s);
    ps_free(taken);
    ps_free(numbers);
    return rc;
}

/* -- lengths ------------------------------------------------------------------------------------------------------- */
/* Returns the number of tokens of item `it` that a model must predict: all trained tokens except the item's first
 * token. */
static int64_t targets_of(const ps_examples *e, const item *it)
{
    int64_t n = 0;
    const uint8_t *records = example_records(e, it->example);
    for (int64_t k = it->first + 1; k < it->first + it->n; k++) n += example_label(e, records, k) != EXAMPLE_IGNORED;
    return n;
}

/* Makes an item of an example. If the example is longer than a row, it is truncated or left out. *keep is false if the
 * example is left out. */
static int cut(ps_rows *r, const ps_rows_config *c, int32_t example, item *it, bool *keep)
{
    const ps_examples *e = r->examples;
    int64_t n = example_length(e, example);
    *it = (item){ example, 0, n };
    *keep = true;
    if (n <= c->seq) return 0;
    if (c->rule == PS_LONG_ERROR) {
        r->info.failed = example;
        return ps_fail(PS_ERANGE, "the example has %lld tokens, more than %lld", (long long)n, (long long)c->seq);
    }
    it->n = c->seq;
    if (c->rule == PS_LONG_LEFT) it->first = n - c->seq;
    *keep = c->rule != PS_LONG_DROP && targets_of(e, it) > 0;
    if (*keep) r->info.cut++;
    else r->info.dropped++;
    return 0;
}

/* Makes items of the next examples in the order. Stops at the first example that has not been put yet. */
static int take_items(ps_rows *r)
{
    const ps_examples *e = r->examples;
    for (; r->taken < r->places && (!e->at || e->at[r->order[r->taken]]); r->taken++) {
        bool keep;
        PS_TRY(cut(r, &r->config, r->order[r->taken], &r->items[r->n_items], &keep));
        if (keep) r->info.tokens += r->items[r->n_items++].n;
    }
    return 0;
}

/* -- packing ------------------------------------------------------------------------------------------------------- */
/* A row that is being filled. left: free room in tokens. earliest: index in the window of the bin's earliest item.
 * next: the next bin with the same free room, or -1. */
typedef struct bin { int64_t left, earliest; int32_t next; } bin;

/* The bins, grouped by their free room. top[left] is the top of a stack of all bins that have room for exactly `left`
 * more tokens, or -1. Bit `left` of `there` is set if this stack is not empty. */
typedef struct bins { bin *all; int64_t n; int32_t *top; uint64_t *there; int64_t seq; } bins;

static void stack_push(bins *b, int32_t i)
{
    int64_t left = b->all[i].left;
    b->all[i].next = b->top[left];
    b->top[left] = i;
    b->there[left / 64] |= (uint64_t)1 << left % 64;
}

/* Among the bins that have room for n more tokens, removes the bin with the least room from its stack and returns it.
 * Returns -1 if no bin has room for n more tokens. */
static int32_t stack_pop(bins *b, int64_t n)
{
    int64_t word = n / 64, words = b->seq / 64 + 1;
    uint64_t bits = b->there[word] & ~(uint64_t)0 << n % 64;
    while (!bits && ++word < words) bits = b->there[word];
    if (!bits) return -1;
    int64_t left = word * 64 + __builtin_ctzll(bits);
    int32_t i = b->top[left];
    b->top[left] = b->all[i].next;
    if (b->top[left] < 0) b->there[word] &= ~((uint64_t)1 << left % 64);
    return i;
}

typedef struct place { int64_t n, at; int32_t row; } place;          /* an item's length, its index in the window, and
                                                                      * its bin */

static int longer_first(const void *a, const void *b)
{
    const place *x = a, *y = b;
    if (x->n != y->n) return x->n > y->n ? -1 : 1;
    return x->at < y->at ? -1 : 1;
}
static int by_row(const void *a, const void *b)
{
    const place *x = a, *y = b;
    if (x->row != y->row) return x->row < y->row ? -1 : 1;
    return x->at < y->at ? -1 : 1;
}

/* Packs the n items of a window into rows. Puts each item, from the longest to the shortest, into the fullest bin that
 * still has room for the item. Each bin becomes a row. The rows are sorted by their earliest items, and the items of a
 * row keep their order. */
static int64_t pack_window(bins *b, item *items, int64_t n, place *places, item *sorted, int64_t *row)
{
    b->n = 0;
    memset(b->there, 0, (size_t)(b->seq / 64 + 1) * sizeof *b->there);
    for (int64_t i = 0; i <= b->seq; i++) b->top[i] = -1;
    for (int64_t i = 0; i < n; i++) places[i] = (place){ items[i].n, i, 0 };
    qsort(places, (size_t)n, sizeof *places, longer_first);
    for (int64_t i = 0; i < n; i++) {
        int32_t at = stack_pop(b, places[i].n);
        if (at < 0) {
            at = (int32_t)b->n++;
            b->all[at] = (bin){ .left = b->seq, .earliest = places[i].at };
        }
        places[i].row = at;
        b->all[at].left -= places[i].n;
        if (places[i].at < b->all[at].earliest) b->all[at].earliest = places[i].at;
        stack_push(b, at);
    }
    for (int64_t i = 0; i < n; i++) places[i].row = (int32_t)b->all[places[i].row].earliest;
    qsort(places, (size_t)n, sizeof *places, by_row);
    int64_t rows = 0;
    for (int64_t i = 0; i < n; i++) {
        sorted[i] = items[places[i].at];
        if (i == 0 || places[i].row != places[i - 1].row) row[rows++] = i;
    }
    memcpy(items, sorted, (size_t)n * sizeof *items);
    return rows;
}

/* Sorts the items of a window by length, and shuffles groups of GROUP items. */
static void group_window(const ps_rows_config *c, item *items, int64_t n, int64_t window, place *places, item *sorted)
{
    int64_t groups = (n + GROUP - 1) / GROUP, to = 0;
    for (int64_t i = 0; i < n; i++) places[i] = (place){ items[i].n, i, 0 };
    qsort(places, (size_t)n, sizeof *places, longer_first);
    for (int64_t g = 0; g < groups; g++) places[g].row = (int32_t)g;
    for (int64_t g = groups - 1; g > 0 && c->shuffle; g--) {
        int64_t j = draw(c->seed, (uint64_t)c->epoch << 32 ^ (uint64_t)(window + 1) << 8 ^ 0xff, g, g + 1);
        int32_t kept = places[g].row;
        places[g].row = places[j].row, places[j].row = kept;
    }
    for (int64_t g = 0; g < groups; g++)
        for (int64_t i = (int64_t)places[g].row * GROUP; i < n && i < ((int64_t)places[g].row + 1) * GROUP; i++)
            sorted[to++] = items[places[i].at];
    memcpy(items, sorted, (size_t)n * sizeof *items);
}

/* Scratch memory for the items of one window. */
typedef struct desk { bins bins; place *places; item *sorted; } desk;

static void desk_free(desk *d)
{
    ps_free(d->places);
    ps_free(d->sorted);
    ps_free(d->bins.all);
    ps_free(d->bins.top);
    ps_free(d->bins.there);
}

static int desk_new(const ps_rows_config *c, int64_t most, desk *d)
{
    *d = (desk){ .bins.seq = c->seq };
    d->places = ps_alloc((size_t)(most + 1) * sizeof *d->places);
    d->sorted = ps_alloc((size_t)(most + 1) * sizeof *d->sorted);
    d->bins.all = ps_alloc((size_t)(most + 1) * sizeof *d->bins.all);
    d->bins.top = ps_alloc((size_t)(c->seq + 1) * sizeof *d->bins.top);
    d->bins.there = ps_alloc((size_t)(c->seq / 64 + 1) * sizeof *d->bins.there);
    if (d->places && d->sorted && d->bins.all && d->bins.top && d->bins.there) return 0;
    desk_free(d);
    return ps_fail_nomem((size_t)(most + 1) * (sizeof *d->places + sizeof *d->sorted + sizeof *d->bins.all));
}

/* Makes rows of n items, starting at item `first`. With packing or grouping, the items are a whole window. Otherwise
 * they may be a part of a window. The end of each row is written before n_rows is increased, because another thread may
 * read all rows below n_rows. */
static void add_rows(ps_rows *r, desk *d, int64_t first, int64_t n)
{
    const ps_rows_config *c = &r->config;
    int64_t rows = n, at = r->n_rows;
    if (c->packing) rows = pack_window(&d->bins, r->items + first, n, d->places, d->sorted, r->row + at + 1);
    else if (c->grouping) group_window(c, r->items + first, n, first / c->window, d->places, d->sorted);
    for (int64_t i = 0; i + 1 < rows; i++) r->row[at + i + 1] = first + (c->packing ? r->row[at + i + 2] : i + 1);
    r->row[at + rows] = first + n;
    r->n_rows = at + rows;
}

/* Makes the rows of all items whose window is complete. If all examples were taken, makes the rows of all items. */
static int arrange(ps_rows *r)
{
    const ps_rows_config *c = &r->config;
    int64_t W = c->window, most = r->places < W ? r->places : W;
    bool whole = c->packing || c->grouping, all = r->taken == r->places;
    desk d = { 0 };
    if (whole && r->n_items > r->arranged) PS_TRY(desk_new(c, most, &d));
    while (r->arranged < r->n_items) {
        int64_t end = r->arranged - r->arranged % W + W;
        if (end > r->n_items) {
            if (whole && !all) break;
            end = r->n_items;
        }
        add_rows(r, &d, r->arranged, end - r->arranged);
        r->arranged = end;
        if (end % W == 0 || all) r->windows[++r->n_windows] = r->n_rows;
    }
    desk_free(&d);
    if (all && r->arranged % W && r->windows[r->n_windows] != r->n_rows) r->windows[++r->n_windows] = r->n_rows;
    return 0;
}

static int check(const ps_examples *e, const ps_rows_config *c)
{
    int64_t all = 0;
    if (c->seq < 1 || c->seq > INT32_MAX)
        return ps_fail(PS_EINVAL, "a row cannot have %lld tokens; seq must be 1 to 2^31 - 1", (long long)c->seq);
    if (c->window < 1 || c->window > INT32_MAX)
        return ps_fail(PS_EINVAL, "a window cannot have %lld examples; it must have 1 to 2^31 - 1",
                       (long long)c->window);
    if (e->count > INT32_MAX)
        return ps_fail(PS_EUNSUP, "there are %lld examples; at most 2^31 - 1 are supported", (long long)e->count);
    if (c->n_sources < 1) return ps_fail(PS_EINVAL, "there are %d sources; there must be 1 or more", c->n_sources);
    for (int k = 0; k < c->n_sources; k++) {
        if (!(c->weights[k] > 0) || c->counts[k] < 0)
            return ps_fail(PS_EINVAL, "source %d has weight %g and %lld examples; the weight must be positive, and the "
                           "number of examples must not be negative", k, c->weights[k], (long long)c->counts[k]);
        all += c->counts[k];
    }
    if (all == e->count) return 0;
    return ps_fail(PS_EINVAL, "the sources have %lld examples in total, but there are %lld examples", (long long)all,
                   (long long)e->count);
}

/* Adds the rows of the examples that were put since the last call. */
static int grow(ps_rows *r)
{
    if (r->complete) return 0;
    int rc = take_items(r), arranged = arrange(r);      /* if an example is too long, the rows before it are made */
    r->info.examples = r->n_items, r->info.rows = r->n_rows, r->info.windows = r->n_windows, r->info.taken = r->taken;
    PS_TRY(rc);
    PS_TRY(arranged);
    if (r->taken < r->places) return 0;
    ps_free(r->order);
    r->order = NULL;
    r->complete = true;
    return 0;
}

/* Makes a ps_rows that has an order but no rows yet. */
static int begin(ps_examples *e, const ps_rows_config *c, ps_rows **out)
{
    PS_TRY(check(e, c));
    ps_rows *r = ps_alloc0(sizeof *r);
    if (!r) return ps_fail_nomem(sizeof *r);
    list order = { 0 };
    examples_retain(e);
    r->examples = e, r->packing = c->packing != 0, r->info.failed = -1, r->config = *c;
    r->config.counts = NULL, r->config.weights = NULL;
    *out = r;
    int rc = order_of(e, c, &order);
    r->order = order.at, r->places = r->info.places = order.n;
    PS_TRY(rc);
    r->items = ps_alloc((size_t)(order.n + 1) * sizeof *r->items);
    r->row = ps_alloc0((size_t)(order.n + 1) * sizeof *r->row);
    r->windows = ps_alloc0((size_t)(order.n / c->window + 2) * sizeof *r->windows);
    return r->items && r->row && r->windows ? 0 : ps_fail_nomem((size_t)(order.n + 1) * sizeof *r->items);
}

int ps_rows_new(ps_examples *e, const ps_rows_config *c, ps_rows_info *info, ps_rows **out)
{
    PS_NEED(e);
    PS_NEED(c);
    PS_NEED(info);
    PS_NEED(out);
    ps_rows *r = NULL;
    *info = (ps_rows_info){ .failed = -1 };
    if (!e->finished) return ps_fail(PS_ESTATE, "examples can be read only after ps_examples_finish");
    int rc = begin(e, c, &r);
    if (rc == 0) rc = grow(r);
    if (r) *info = r->info;
    if (rc < 0) ps_rows_free(r);
    else *out = r;
    return rc;
}

int ps_rows_begin(ps_examples *e, const ps_rows_config *c, ps_rows **out)
{
    PS_NEED(e && e->at);
    PS_NEED(c);
    PS_NEED(out);
    ps_rows *r = NULL;
    int rc = begin(e, c, &r);
    if (rc < 0) ps_rows_free(r);
    else *out = r;
    return rc;
}

int32_t ps_rows_order(const ps_rows *r, int64_t i)
{
    if (!r || !r->order || i < 0 || i >= r->places)
        return ps_fail(PS_ERANGE, "there is no place %lld in the order of these rows", (long long)i);
    return r->order[i];
}

int ps_rows_grow(ps_rows *r, ps_rows_info *info)
{
    PS_NEED(r);
    PS_NEED(info);
    int rc = grow(r);
    *info = r->info;
    return rc;
}

/* -- rows ---------------------------------------------------------------------------------------------------------- */
int ps_rows_window(const ps_rows *r, int64_t row, int64_t *window, int64_t *within)
{
    PS_NEED(r);
    PS_NEED(window && within);
    if (row < 0 || row > r->n_rows)
        return ps_fail(PS_ERANGE, "there is no row %lld: there are %lld rows", (long long)row, (long long)r->n_rows);
    int64_t low = 0, high = r->n_windows;
    while (low < high) {                             /* search for the last window that begins at or before this row */
        int64_t middle = (low + high + 1) / 2;
        if (r->windows[middle] <= row) low = middle;
        else high = middle - 1;
    }
    *window = low;
    *within = row - r->windows[low];
    return 0;
}

int64_t ps_rows_first(const ps_rows *r, int64_t window)
{
    if (!r || window < 0 || window > r->n_windows)
        return ps_fail(PS_ERANGE, "there is no window %lld of the rows of a loader; there are %lld", (long long)window,
                       r ? (long long)r->n_windows : 0LL);
    return r->windows[window];
}

static int64_t length(const ps_rows *r, int64_t row)
{
    int64_t n = 0;
    for (int64_t i = r->row[row]; i < r->row[row + 1]; i++) n += r->items[i].n;
    return n;
}

int64_t ps_rows_longest(const ps_rows *r, int64_t first, int64_t n)
{
    int64_t most = 0;
    if (!r || first < 0 || n < 0)
        return ps_fail(PS_EINVAL, "the first row, %lld, and the number of rows, %lld, must not be negative",
                       (long long)first, (long long)n);
    for (int64_t i = first; i < first + n && i < r->n_rows; i++) {
        int64_t own = length(r, i);
        most = own > most ? own : most;
    }
    return most;
}

/* Copies an item into a row of a batch, starting at position `at`. If `filler` is true, the item's weight is 0. */
static void put_item(const ps_examples *e, const item *it, int32_t segment, bool filler, const ps_rows_batch *b,
                     int64_t at, bool packed)
{
    const uint8_t *records = example_records(e, it->example);
    double share = e->weights[it->example];
    if (b->weights && b->by == PS_WEIGHTS_EXAMPLE) {
        int64_t targets = targets_of(e, it);
        share = targets > 0 ? share / (double)targets : 0;
    }
    for (int64_t k = 0; k < it->n; k++) {
        bool trained = !filler && !(packed && k == 0);
        int64_t own = it->first + k;
        b->ids[at + k] = example_id(e, records, own);
        b->labels[at + k] = trained ? example_label(e, records, own) : EXAMPLE_IGNORED;
        b->mask[at + k] = packed ? segment : 1;
        if (b->positions) b->positions[at + k] = (int32_t)k;
        if (b->weights) b->weights[at + k] = trained ? (float)(share * example_token_weight(e, records, own)) : 0;
    }
}

int ps_rows_fill(const ps_rows *r, int64_t first, const ps_rows_batch *b)
{
    PS_NEED(r);
    PS_NEED(b && b->ids && b->labels && b->mask);
    if (first < 0 || b->filler < 0 || b->filler >= r->n_rows)
        return ps_fail(PS_ERANGE, "there are no rows %lld and %lld; there are %lld", (long long)first,
                       (long long)b->filler, (long long)r->n_rows);
    for (int64_t i = 0; i < b->rows; i++) {
        bool filler = first + i >= r->n_rows || i >= b->real;
        int64_t row = filler ? b->filler : first + i, at = i * b->length;
        if (length(r, row) > b->length)
            return ps_fail(PS_EINVAL, "row %lld has %lld tokens, but the batch has only %lld columns", (long long)row,
                           (long long)length(r, row), (long long)b->length);
        int32_t segment = 0;
        for (int64_t k = r->row[row]; k < r->row[row + 1]; at += r->items[k++].n)
            put_item(r->examples, &r->items[k], ++segment, filler, b, at, r->packing);
        for (; at < (i + 1) * b->length; at++) {
            b->ids[at] = b->pad, b->labels[at] = EXAMPLE_IGNORED, b->mask[at] = 0;
            if (b->positions) b->positions[at] = 0;
            if (b->weights) b->weights[at] = 0;
        }
    }
    return 0;
}

int64_t ps_rows_examples(const ps_rows *r, int64_t row, int64_t *out, int64_t room)
{
    if (!r || row < 0 || row >= r->n_rows) return ps_fail(PS_ERANGE, "there is no row %lld", (long long)row);
    int64_t n = r->row[row + 1] - r->row[row];
    for (int64_t k = 0; k < n && k < room; k++) out[k] = r->items[r->row[row] + k].example;
    return n;
}

void rows_retain(ps_rows *r) { atomic_fetch_add(&r->more, 1); }
int64_t rows_count(const ps_rows *r) { return r->n_rows; }
bool rows_complete(const ps_rows *r) { return r->complete; }
int rows_check(const ps_rows *r) { return r->examples->map.bytes ? ps_map_check(&r->examples->map) : 0; }
void rows_info(const ps_rows *r, ps_rows_info *out) { *out = r->info; }

void ps_rows_free(ps_rows *r)
{
    if (!r || atomic_fetch_sub(&r->more, 1) > 0) return;
    ps_examples_free(r->examples);
    ps_free(r->order);
    ps_free(r->items);
    ps_free(r->row);
    ps_free(r->windows);
    ps_free(r);
}
