/* SPDX-License-Identifier: BSD-3-Clause
 * A restricted pickle machine, which reads the values in PyTorch's state files into a tree and executes no code. A
 * pickle may use only the names in the table of pt_rebuild.c. Only src/io includes this header.
 *
 * Invariants of a pk after reading:
 *   Every item is the index of a value in pk.values.
 *   No value contains itself, directly or through other values.
 *   A path of items from the root is at most PK_MAX_DEPTH long.
 *   Several paths may lead to the same value, because containers can share a value, as in Python.
 *   Memory is linear in the size of the pickle, because an opcode makes at most one value, and a copy of a value is
 *     only its id. */
#ifndef PS_IO_PICKLE_H
#define PS_IO_PICKLE_H
#include "io/zip.h"

enum { PK_MAX_NBYTES = 256 << 20, PK_MAX_VALUES = 1 << 24, PK_MAX_DEPTH = 200, PK_SHOWN = 160 };
/* Kinds of values in addition to PS_PT_* of ps.h, and the fields of pk_value that a kind uses:
 *   PK_GLOBAL      an allowed name. `count` is the name's row in the table of pt_rebuild.c. u.integer is the type that
 *                  the name refers to.
 *   PK_STORAGE     bytes in the archive. tuple.args is the value that describes the storage. tuple.entry is the index
 *                  of the storage's entry in the zip. `count` is the type.
 *   PS_PT_TENSOR   tuple.args is the tuple of arguments of a function that makes a tensor. `count` is the function. */
enum { PK_GLOBAL = 100, PK_STORAGE };

typedef struct pk_value {
    int32_t kind, count;        /* count: number of items of a container */
    union {
        int64_t integer;
        double number;
        /* [count] Owned. The allocated size is the next power of two. A dict's items are key, value, key, value, ... */
        int32_t *items;
        /* at: offset in pk.bytes, or in pk.decoded if the value is a BYTES with `count` 1 */
        struct { uint32_t at, nbytes; } text;
        struct { int32_t args, entry; } tuple;
    } u;
} pk_value;

typedef struct pk {
    const char *path;           /* name of the file for error messages, not owned */
    const zip *archive;         /* the archive that contains the storages */
    const char *prefix;         /* folder of the archive's entries, such as "archive" */
    uint8_t *bytes;             /* the pickle, owned; texts are offsets in it */
    int64_t nbytes;
    /* [nbytes] The decoded byte strings, one after the other, or NULL if no byte string was decoded. */
    uint8_t *decoded;
    int64_t decoded_used;
    pk_value *values;           /* [count] */
    int32_t count, room, root;
} pk;

/* Reads the pickle in p->bytes. The caller closes p, even if this fails. */
int pk_read(pk *p);
void pk_close(pk *p);

/* Makes a new value and returns its id, or a negative error. The machine and pt_rebuild.c call this function. It may
 * move pk.values, so a caller must keep ids and not pointers into pk.values. */
int32_t pk_new(pk *p, pk_value value);
const uint8_t *pk_text(const pk *p, const pk_value *v);     /* v: a STRING or BYTES; returns [v->u.text.nbytes] bytes */
const char *pk_shown(const uint8_t *text, int64_t nbytes, char out[PK_SHOWN]);
bool pk_is_text(const pk *p, const pk_value *v, const char *text);
/* Raises PS_EFORMAT. The message begins with the file's name. */
int pk_bad(const pk *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The functions of pt_rebuild.c. pt_global implements the supported names, pt_call the supported calls, and
 * pt_persistent the references to storages outside the pickle. Each function returns the id of a value or a negative
 * error. */
int32_t pt_global(pk *p, const uint8_t *module, int64_t module_n, const uint8_t *name, int64_t name_n);
int32_t pt_call(pk *p, int32_t function, int32_t args);
int32_t pt_persistent(pk *p, int32_t id);
#endif
