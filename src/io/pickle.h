/* SPDX-License-Identifier: BSD-3-Clause
 * A restricted pickle machine: reads the values that PyTorch's state files hold into a tree and runs nothing. A pickle
 * may ask for the names in the table of pt_rebuild.c; any other name is refused. Included by src/io only.
 *
 * Invariants of a read pk: every item is a value of it; following items from the root never meets a value twice on one
 * path (no cycles) and is at most PK_MAX_DEPTH deep, but a value may be reached by several paths (it is shared, as in
 * Python). Memory is linear in the pickle's size: no opcode makes more than one value, and copies share. */
#ifndef PS_IO_PICKLE_H
#define PS_IO_PICKLE_H
#include "io/zip.h"

enum { PK_MAX_NBYTES = 256 << 20, PK_MAX_VALUES = 1 << 24, PK_MAX_DEPTH = 200, PK_SHOWN = 160 };
/* Kinds beyond ps.h's PS_PT_*: an allowed name (`count`: its row in pt_rebuild.c, u.integer: the type it names), and
 * bytes in the archive (tuple.args: as the file describes them, tuple.entry: in the zip, `count`: their type). A
 * PS_PT_TENSOR is its arguments (tuple.args) and the function that takes them (`count`). */
enum { PK_GLOBAL = 100, PK_STORAGE };

typedef struct pk_value {
    int32_t kind, count;        /* count: of items; of a text, see nbytes */
    union {
        int64_t integer;
        double number;
        int32_t *items;         /* [count], owned; room for the next power of two. A dict: keys and values in turn */
        struct { uint32_t at, nbytes; } text;       /* in pk.bytes, or (BYTES with count 1) in pk.decoded */
        struct { int32_t args, entry; } tuple;
    } u;
} pk_value;

typedef struct pk {
    const char *path;           /* of the file, for messages; lent */
    const zip *archive;         /* where storages are */
    const char *prefix;         /* of the names in it: "archive" */
    uint8_t *bytes;             /* the pickle, owned: texts point into it */
    int64_t nbytes;
    uint8_t *decoded;           /* [nbytes] or NULL: decoded byte strings; each is charged once */
    int64_t decoded_used;
    pk_value *values;           /* [count] */
    int32_t count, room, root;
} pk;

/* Reads p->bytes; on failure, too, the caller closes p. */
int pk_read(pk *p);
void pk_close(pk *p);

/* For the functions that names refer to. Returns a new value, which may move pk.values, or a negative code. */
int32_t pk_new(pk *p, pk_value value);
const uint8_t *pk_text(const pk *p, const pk_value *v);     /* of a STRING or BYTES: v->u.text.nbytes of it */
const char *pk_shown(const uint8_t *text, int64_t nbytes, char out[PK_SHOWN]);
bool pk_is_text(const pk *p, const pk_value *v, const char *text);
/* PS_EFORMAT, prefixed with the file's name. */
int pk_bad(const pk *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* pt_rebuild.c: the only supported names, calls and outside references. Each returns the resulting value or a negative
 * code. */
int32_t pt_global(pk *p, const uint8_t *module, int64_t module_n, const uint8_t *name, int64_t name_n);
int32_t pt_call(pk *p, int32_t function, int32_t args);
int32_t pt_persistent(pk *p, int32_t id);
#endif
