/* SPDX-License-Identifier: BSD-3-Clause
 * A restricted pickle machine: reads the values in PyTorch's state files into a tree, and executes nothing. A pickle
 * may use only the names in the table of pt_rebuild.c. Included by src/io only.
 *
 * Invariants of a pk that was read: Every item is one of its values. There are no cycles, and a path of items from
 * the root is at most PK_MAX_DEPTH long. Several paths may lead to one value, which is shared, as in Python. Memory
 * is linear in the pickle's size: no opcode makes more than one value, and copies refer to the same value. */
#ifndef PS_IO_PICKLE_H
#define PS_IO_PICKLE_H
#include "io/zip.h"

enum { PK_MAX_NBYTES = 256 << 20, PK_MAX_VALUES = 1 << 24, PK_MAX_DEPTH = 200, PK_SHOWN = 160 };
/* Kinds in addition to PS_PT_* of ps.h. PK_GLOBAL: an allowed name; `count` is its row in pt_rebuild.c, and
 * u.integer the type to which it refers. PK_STORAGE: bytes in the archive; tuple.args has the file's description,
 * tuple.entry is the index in the zip, and `count` the type. In a PS_PT_TENSOR, tuple.args has the arguments, and
 * `count` is the function to which they are passed. */
enum { PK_GLOBAL = 100, PK_STORAGE };

typedef struct pk_value {
    int32_t kind, count;        /* count: number of items; for a text see nbytes */
    union {
        int64_t integer;
        double number;
        int32_t *items;         /* [count] owned, with room for the next power of two; a dict: key, value, key, ... */
        struct { uint32_t at, nbytes; } text;       /* offset in pk.bytes or, for BYTES with count 1, in pk.decoded */
        struct { int32_t args, entry; } tuple;
    } u;
} pk_value;

typedef struct pk {
    const char *path;           /* name of the file for messages, lent */
    const zip *archive;         /* archive with the storages */
    const char *prefix;         /* prefix of the names in the archive: "archive" */
    uint8_t *bytes;             /* the pickle, owned; texts point into it */
    int64_t nbytes;
    uint8_t *decoded;           /* [nbytes] decoded byte strings, or NULL; each string counts once */
    int64_t decoded_used;
    pk_value *values;           /* [count] */
    int32_t count, room, root;
} pk;

/* Reads p->bytes. The caller closes p, even after a failure. */
int pk_read(pk *p);
void pk_close(pk *p);

/* Makes a new value, for the functions to which names refer. Returns its id (pk.values can move), or a negative
 * error. */
int32_t pk_new(pk *p, pk_value value);
const uint8_t *pk_text(const pk *p, const pk_value *v);     /* text of a STRING or BYTES, of v->u.text.nbytes bytes */
const char *pk_shown(const uint8_t *text, int64_t nbytes, char out[PK_SHOWN]);
bool pk_is_text(const pk *p, const pk_value *v, const char *text);
/* Raises PS_EFORMAT with the file's name as a prefix. */
int pk_bad(const pk *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* pt_rebuild.c: implements the only supported names, calls and outside references. Each function returns the
 * resulting value or a negative error. */
int32_t pt_global(pk *p, const uint8_t *module, int64_t module_n, const uint8_t *name, int64_t name_n);
int32_t pt_call(pk *p, int32_t function, int32_t args);
int32_t pt_persistent(pk *p, int32_t id);
#endif
