/* SPDX-License-Identifier: BSD-3-Clause
 * The pickle machine consists of a stack, marks, a memo, and one function per family of opcodes. It implements protocol
 * 2, which PyTorch writes, and the binary opcodes of protocols 1, 3, 4 and 5. It does not implement the opcodes that
 * make objects of classes. The input is treated as hostile. */
#include "io/pickle.h"
#include "base/alloc.h"
#include "base/grow.h"
#include "io/safetensors.h"
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct machine {
    pk *p;
    const uint8_t *at, *end;
    int32_t *stack, *memo;          /* ids of values; an empty entry of `memo` is -1 */
    int64_t n, stack_room, memo_n, memo_used;
    int64_t floor;                  /* number of values below the last mark, or 0; these values cannot be popped */
    int64_t *marks;                 /* [n_marks] the previous values of `floor` */
    int64_t n_marks, marks_room;
    bool stopped;
} machine;

/* -- messages ---------------------------------------------------------------------------------------------------- */
const char *pk_shown(const uint8_t *text, int64_t nbytes, char out[PK_SHOWN])
{
    char copy[PK_SHOWN];
    size_t n = nbytes < PK_SHOWN - 1 ? (size_t)nbytes : PK_SHOWN - 1;
    memcpy(copy, text, n);
    copy[n] = 0;
    return st_shown(copy, out);
}

int pk_bad(const pk *p, const char *fmt, ...)
{
    char what[700];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    return ps_fail(PS_EFORMAT, "%s: %s", p->path, what);
}

static int bad(const machine *m, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static int bad(const machine *m, const char *fmt, ...)
{
    char what[500];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    return ps_fail(PS_EFORMAT, "%s: data.pkl, before byte %lld: %s", m->p->path, (long long)(m->at - m->p->bytes),
                   what);
}

/* -- values ------------------------------------------------------------------------------------------------------ */
int32_t pk_new(pk *p, pk_value value)
{
    if (p->count == PK_MAX_VALUES)
        return pk_bad(p, "data.pkl has more than %d values; keep long lists of numbers in tensors", PK_MAX_VALUES);
    PS_TRY(ps_grow(p->values, p->room, p->count + 1));
    p->values[p->count] = value;
    return p->count++;
}

const uint8_t *pk_text(const pk *p, const pk_value *v)
{
    return (v->kind == PS_PT_BYTES && v->count ? p->decoded : p->bytes) + v->u.text.at;
}

bool pk_is_text(const pk *p, const pk_value *v, const char *text)
{
    size_t n = strlen(text);
    return (v->kind == PS_PT_STRING || v->kind == PS_PT_BYTES) && v->u.text.nbytes == n &&
           !memcmp(pk_text(p, v), text, n);
}

static bool has_items(const pk_value *v) { return v->kind >= PS_PT_LIST && v->kind <= PS_PT_DICT; }

/* Removes the top `n` ids from the stack and appends them to the items of value `to`. */
static int take_items(machine *m, int32_t to, int64_t n)
{
    pk_value *v = &m->p->values[to];
    int64_t old = 1, room = 1;
    while (old < v->count) old *= 2;
    while (room < v->count + n) room *= 2;
    if (n && (v->count == 0 || room > old)) {
        int32_t *items = ps_realloc(v->u.items, (size_t)room * sizeof *items);
        if (!items) return ps_fail_nomem((size_t)room * sizeof *items);
        v->u.items = items;
    }
    for (int64_t i = 0; i < n; i++) v->u.items[v->count + i] = m->stack[m->n - n + i];
    v->count += (int32_t)n;
    m->n -= n;
    return 0;
}

/* -- the stack --------------------------------------------------------------------------------------------------- */
static int push_id(machine *m, int32_t id)
{
    if (id < 0) return id;                  /* the function that failed to make the value has reported the error */
    if (m->n == PK_MAX_VALUES) return bad(m, "the stack has more than %d values", PK_MAX_VALUES);
    PS_TRY(ps_grow(m->stack, m->stack_room, m->n + 1));
    m->stack[m->n++] = id;
    return 0;
}

static int push(machine *m, pk_value value)
{
    int32_t id = pk_new(m->p, value);
    return push_id(m, id);
}

static int need_stack(const machine *m, int64_t n)
{
    return m->n - m->floor >= n ? 0 : bad(m, "an instruction needs a value, but the stack is empty");
}

static int push_mark(machine *m)
{
    if (m->n_marks == PK_MAX_VALUES) return bad(m, "there are more than %d marks", PK_MAX_VALUES);
    PS_TRY(ps_grow(m->marks, m->marks_room, m->n_marks + 1));
    m->marks[m->n_marks++] = m->floor;
    m->floor = m->n;
    return 0;
}

/* Removes the last mark. Sets *n to the number of values above the mark. These values stay on the stack. */
static int pop_mark(machine *m, int64_t *n)
{
    if (!m->n_marks) return bad(m, "a mark is missing");
    *n = m->n - m->floor;
    m->floor = m->marks[--m->n_marks];
    return 0;
}

/* -- operands ---------------------------------------------------------------------------------------------------- */
static int need(const machine *m, uint64_t n)
{
    return n <= (uint64_t)(m->end - m->at) ? 0 : bad(m, "the pickle ends inside an instruction");
}

static int number(machine *m, int nbytes, uint64_t *out)
{
    PS_TRY(need(m, (uint64_t)nbytes));
    *out = 0;
    for (int i = 0; i < nbytes; i++) *out |= (uint64_t)*m->at++ << (8 * i);
    return 0;
}

/* Reads a text that begins with its length. The length has `width` bytes. */
static int push_text(machine *m, int kind, int width)
{
    uint64_t n;
    PS_TRY(number(m, width, &n));
    PS_TRY(need(m, n));
    pk_value v = { .kind = kind, .u.text = { (uint32_t)(m->at - m->p->bytes), (uint32_t)n } };
    m->at += n;
    return push(m, v);
}

static pk_value integer(int64_t i) { return (pk_value){ .kind = PS_PT_INT, .u.integer = i }; }

enum { MOST_DIGITS = 309 };     /* number of digits of the largest double */

/* Pushes the double that is nearest to an integer that does not fit into 64 bits. `text` is the integer in decimal, or
 * in hexadecimal after 0x. */
static int push_large(machine *m, const char *text)
{
    double value = strtod(text, NULL);
    if (isinf(value)) return bad(m, "an integer is larger than every double");
    return push(m, (pk_value){ .kind = PS_PT_FLOAT, .u.number = value });
}

/* Reads a two's complement integer of any length and pushes it. If the integer does not fit into 64 bits, pushes the
 * nearest double. */
static int push_long(machine *m, int width)
{
    uint64_t n;
    PS_TRY(number(m, width, &n));
    PS_TRY(need(m, n));
    const uint8_t *p = m->at;
    m->at += n;
    bool negative = n && p[n - 1] & 0x80;
    int fill = negative ? 0xff : 0;
    while (n > 8 && p[n - 1] == fill && (p[n - 2] & 0x80) == (fill & 0x80)) n--;
    if (n <= 8) {
        uint64_t v = negative ? ~(uint64_t)0 : 0;
        for (uint64_t i = 0; i < n; i++) v = (v & ~((uint64_t)0xff << (8 * i))) | (uint64_t)p[i] << (8 * i);
        return push(m, integer((int64_t)v));
    }
    char text[2 * 129 + 4] = "-0x", *to = text + 3;
    if (n > 129) return bad(m, "an integer of %llu bytes is too long", (unsigned long long)n);
    /* The magnitude of a negative number is the number with all bits inverted, plus 1. */
    bool carry = negative;
    uint8_t magnitude[129];
    for (uint64_t i = 0; i < n; i++) {
        magnitude[i] = negative ? (uint8_t)(~p[i] + carry) : p[i];
        carry = carry && magnitude[i] == 0;
    }
    for (uint64_t i = n; i-- > 0; to += 2) snprintf(to, 3, "%02x", magnitude[i]);
    return push_large(m, negative ? text : text + 1);
}

static int push_double(machine *m)
{
    PS_TRY(need(m, 8));
    uint64_t bits = 0;
    pk_value v = { .kind = PS_PT_FLOAT };
    for (int i = 0; i < 8; i++) bits = bits << 8 | *m->at++;        /* the only big-endian value of the format */
    memcpy(&v.u.number, &bits, 8);
    return push(m, v);
}

/* Reads the text up to the end of the line. */
static int line(machine *m, const uint8_t **text, int64_t *n)
{
    const uint8_t *newline = memchr(m->at, '\n', (size_t)(m->end - m->at));
    if (!newline) return bad(m, "the pickle ends inside an instruction");
    *text = m->at, *n = newline - m->at;
    m->at = newline + 1;
    return 0;
}

/* Reads a boolean ("I01") or a decimal integer ("L12345L") of protocol 1 and pushes it. */
static int push_decimal(machine *m, bool is_long)
{
    const uint8_t *text = NULL;
    char digits[MOST_DIGITS + 2], *end;
    int64_t n = 0;
    PS_TRY(line(m, &text, &n));
    if (!is_long && n == 2 && text[0] == '0' && (text[1] == '0' || text[1] == '1'))
        return push(m, (pk_value){ .kind = PS_PT_BOOL, .u.integer = text[1] == '1' });
    if (is_long && n && text[n - 1] == 'L') n--;
    if (n < 1 || n >= (int64_t)sizeof digits) return bad(m, "an integer of %lld digits is too long", (long long)n);
    memcpy(digits, text, (size_t)n);
    digits[n] = 0;
    const char *first = digits + (digits[0] == '-');
    if (!*first || strspn(first, "0123456789") != strlen(first) || strlen(digits) != (size_t)n)
        return bad(m, "an integer is malformed");
    errno = 0;
    int64_t value = strtoll(digits, &end, 10);
    return errno == ERANGE ? push_large(m, digits) : push(m, integer(value));
}

/* -- the memo ---------------------------------------------------------------------------------------------------- */
static int put(machine *m, uint64_t i)
{
    PS_TRY(need_stack(m, 1));
    if (i >= PK_MAX_VALUES || i >= (uint64_t)m->p->nbytes)
        return bad(m, "the memo index %llu is too large", (unsigned long long)i);
    int64_t n = m->memo_n;
    PS_TRY(ps_grow(m->memo, m->memo_n, i + 1));
    for (; n < m->memo_n; n++) m->memo[n] = -1;
    m->memo_used += m->memo[i] < 0;
    m->memo[i] = m->stack[m->n - 1];
    return 0;
}

static int get(machine *m, uint64_t i)
{
    if (i >= (uint64_t)m->memo_n || m->memo[i] < 0)
        return bad(m, "the memo index %llu was never set", (unsigned long long)i);
    return push_id(m, m->memo[i]);
}

/* -- containers -------------------------------------------------------------------------------------------------- */
/* Replaces the top n values by a container of these values. */
static int push_items(machine *m, int kind, int64_t n)
{
    PS_TRY(need_stack(m, n));
    if (kind == PS_PT_DICT && n % 2) return bad(m, "a key has no value");
    int32_t id = pk_new(m->p, (pk_value){ .kind = kind });
    if (id < 0) return id;
    PS_TRY(take_items(m, id, n));
    return push_id(m, id);
}

static int push_marked(machine *m, int kind)
{
    int64_t n = 0;
    PS_TRY(pop_mark(m, &n));
    return push_items(m, kind, n);
}

/* Adds the top n values to the container that is below them on the stack. The container must be of kind `kind`. */
static int add_items(machine *m, int kind, int64_t n)
{
    static const char *const names[] = { "list", "tuple", "set", "dict" };
    PS_TRY(need_stack(m, n + 1));
    int32_t to = m->stack[m->n - n - 1];
    if (m->p->values[to].kind != kind) return bad(m, "items are added to something that is not a "
                                                     "%s", names[kind - PS_PT_LIST]);
    if (kind == PS_PT_DICT && n % 2) return bad(m, "a key has no value");
    if (m->p->values[to].count > PK_MAX_VALUES - n) return bad(m, "there are more than %d items", PK_MAX_VALUES);
    return take_items(m, to, n);
}

static int add_marked(machine *m, int kind)
{
    int64_t n = 0;
    PS_TRY(pop_mark(m, &n));
    return add_items(m, kind, n);
}

/* -- names and calls --------------------------------------------------------------------------------------------- */
static int push_global(machine *m)
{
    const uint8_t *module = NULL, *name = NULL;
    int64_t module_n = 0, name_n = 0;
    PS_TRY(line(m, &module, &module_n));
    PS_TRY(line(m, &name, &name_n));
    return push_id(m, pt_global(m->p, module, module_n, name, name_n));
}

static int push_stack_global(machine *m)
{
    PS_TRY(need_stack(m, 2));
    const pk_value *v = m->p->values, *module = &v[m->stack[m->n - 2]], *name = &v[m->stack[m->n - 1]];
    if (module->kind != PS_PT_STRING || name->kind != PS_PT_STRING) return bad(m, "a name is not a string");
    m->n -= 2;
    return push_id(m, pt_global(m->p, pk_text(m->p, module), module->u.text.nbytes, pk_text(m->p, name),
                                name->u.text.nbytes));
}

static int call(machine *m)
{
    PS_TRY(need_stack(m, 2));
    int32_t args = m->stack[m->n - 1], function = m->stack[m->n - 2];
    const pk_value *v = m->p->values;
    if (v[function].kind != PK_GLOBAL || v[args].kind != PS_PT_TUPLE) return bad(m, "the value to be called is "
        "not a function");
    m->n -= 2;
    return push_id(m, pt_call(m->p, function, args));
}

/* Removes the state of an object from the stack and ignores it. Only an OrderedDict may have state (the _metadata of a
 * state dict). */
static int build(machine *m)
{
    PS_TRY(need_stack(m, 2));
    if (m->p->values[m->stack[m->n - 2]].kind != PS_PT_DICT)
        return bad(m, "an object has state; only a dict can have state");
    m->n--;
    return 0;
}

/* -- instructions ------------------------------------------------------------------------------------------------ */
static int unknown(const machine *m, int op)
{
    if (op == 0x81 || op == 0x92 || op == 'o' || op == 'i')
        return bad(m, "instruction 0x%02x makes an object of a class; only tensors, numbers, strings, booleans, lists, "
                   "tuples, sets and dicts are read: save a state_dict, not a whole model", op);
    return bad(m, "instruction 0x%02x is not one that PyTorch writes", op);
}

static int short_step(machine *m, int op)
{
    int64_t n = 0;
    switch (op) {
    case '0': PS_TRY(need_stack(m, 1)); m->n--; return 0;
    case '1': PS_TRY(pop_mark(m, &n)); m->n -= n; return 0;
    case '2': PS_TRY(need_stack(m, 1)); return push_id(m, m->stack[m->n - 1]);
    case '(': return push_mark(m);
    case 'N': return push(m, (pk_value){ .kind = PS_PT_NONE });
    case 0x88: case 0x89: return push(m, (pk_value){ .kind = PS_PT_BOOL, .u.integer = op == 0x88 });
    case ')': return push_items(m, PS_PT_TUPLE, 0);
    case ']': return push_items(m, PS_PT_LIST, 0);
    case '}': return push_items(m, PS_PT_DICT, 0);
    case 0x8f: return push_items(m, PS_PT_SET, 0);
    case 0x85: case 0x86: case 0x87: return push_items(m, PS_PT_TUPLE, op - 0x84);
    case 't': return push_marked(m, PS_PT_TUPLE);
    case 'l': return push_marked(m, PS_PT_LIST);
    case 'd': return push_marked(m, PS_PT_DICT);
    case 0x91: return push_marked(m, PS_PT_SET);
    case 'a': return add_items(m, PS_PT_LIST, 1);
    case 'e': return add_marked(m, PS_PT_LIST);
    case 's': return add_items(m, PS_PT_DICT, 2);
    case 'u': return add_marked(m, PS_PT_DICT);
    case 0x90: return add_marked(m, PS_PT_SET);
    case 0x94: return put(m, (uint64_t)m->memo_used);
    case 'c': return push_global(m);
    case 0x93: return push_stack_global(m);
    case 'R': return call(m);
    case 'b': return build(m);
    case 'Q': PS_TRY(need_stack(m, 1)); return push_id(m, pt_persistent(m->p, m->stack[--m->n]));
    default: return unknown(m, op);
    }
}

static int step(machine *m, int op)
{
    uint64_t n = 0;
    switch (op) {
    case 0x80:
        PS_TRY(number(m, 1, &n));
        return n <= 5 ? 0 : bad(m, "protocol %d of pickle is not supported", (int)n);
    /* The opcode contains the length of a frame. Only programs that read a pickle from a stream need this length. */
    case 0x95: return number(m, 8, &n);
    case '.': m->stopped = true; return need_stack(m, 1);
    case 'K': PS_TRY(number(m, 1, &n)); return push(m, integer((int64_t)n));
    case 'M': PS_TRY(number(m, 2, &n)); return push(m, integer((int64_t)n));
    case 'J': PS_TRY(number(m, 4, &n)); return push(m, integer((int32_t)n));
    case 0x8a: return push_long(m, 1);
    case 0x8b: return push_long(m, 4);
    case 'I': return push_decimal(m, false);
    case 'L': return push_decimal(m, true);
    case 'G': return push_double(m);
    case 'X': case 'T': return push_text(m, PS_PT_STRING, 4);
    case 'U': case 0x8c: return push_text(m, PS_PT_STRING, 1);
    case 0x8d: return push_text(m, PS_PT_STRING, 8);
    case 'C': return push_text(m, PS_PT_BYTES, 1);
    case 'B': return push_text(m, PS_PT_BYTES, 4);
    case 0x8e: case 0x96: return push_text(m, PS_PT_BYTES, 8);
    case 'h': PS_TRY(number(m, 1, &n)); return get(m, n);
    case 'j': PS_TRY(number(m, 4, &n)); return get(m, n);
    case 'q': PS_TRY(number(m, 1, &n)); return put(m, n);
    case 'r': PS_TRY(number(m, 4, &n)); return put(m, n);
    default: return short_step(m, op);
    }
}

/* -- the finished tree ------------------------------------------------------------------------------------------- */
enum { UNSEEN, ON_PATH = 0xffff };

/* Returns the height of the tree with the root `id`. A value without items has height 1. heights [count] stores the
 * heights that were already computed, or UNSEEN. `depth` is the number of values above `id` on the current path. */
static int height(const pk *p, uint16_t *heights, int32_t id, int depth)
{
    const pk_value *v = &p->values[id];
    int most = 0;
    if (heights[id] == ON_PATH) return pk_bad(p, "a %s in data.pkl contains itself; such values cannot be read",
                                              v->kind == PS_PT_DICT ? "dict" : "list");
    if (heights[id] != UNSEEN) return heights[id];
    if (depth > PK_MAX_DEPTH) return pk_bad(p, "data.pkl nests values more than %d deep", PK_MAX_DEPTH);
    heights[id] = ON_PATH;
    for (int32_t i = 0; has_items(v) && i < v->count; i++) {
        int below = height(p, heights, v->u.items[i], depth + 1);
        if (below < 0) return below;
        most = below > most ? below : most;
    }
    if (most >= PK_MAX_DEPTH) return pk_bad(p, "data.pkl nests values more than %d deep", PK_MAX_DEPTH);
    heights[id] = (uint16_t)(most + 1);
    return most + 1;
}

static int check_tree(const pk *p)
{
    uint16_t *heights = ps_alloc0((size_t)p->count * sizeof *heights);
    if (!heights) return ps_fail_nomem((size_t)p->count * sizeof *heights);
    int rc = height(p, heights, p->root, 0);
    ps_free(heights);
    return rc < 0 ? rc : 0;
}

int pk_read(pk *p)
{
    machine m = { .p = p, .at = p->bytes, .end = p->bytes + p->nbytes };
    int rc = 0;
    while (rc == 0 && !m.stopped) {
        if (m.at == m.end) rc = bad(&m, "the pickle ends without its last instruction");
        else {
            int op = *m.at++;
            rc = step(&m, op);
        }
    }
    if (rc == 0) p->root = m.stack[m.n - 1];
    ps_free(m.stack);
    ps_free(m.memo);
    ps_free(m.marks);
    return rc < 0 ? rc : check_tree(p);
}

void pk_close(pk *p)
{
    for (int32_t i = 0; i < p->count; i++)
        if (has_items(&p->values[i])) ps_free(p->values[i].u.items);
    ps_free(p->values);
    ps_free(p->bytes);
    ps_free(p->decoded);
    *p = (pk){ 0 };
}
