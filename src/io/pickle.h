/* SPDX-License-Identifier: BSD-3-Clause
 * A restricted pickle machine. It reads the values in PyTorch's state files into a tree and executes nothing. A pickle
 * may use only the names in the table of pt_rebuild.c. Only src/io includes this header.
 *
 * Invariants of a pk after reading: Every item is the index of a value in pk.values. There are no cycles. A path of
 * items from the root is at most PK_MAX_DEPTH long. Several paths may lead to the same value, because values can be
 * shared, as in Python. Memory is linear in the size of the pickle, because no opcode makes more than one value, and a
 * copy refers to the same value. */
#ifndef PS_IO_PICKLE_H
#define PS_IO_PICKLE_H
#include "io/zip.h"

enum { PK_MAX_NBYTES = 256 << 20, PK_MAX_VALUES = 1 << 24, PK_MAX_DEPTH = 200, PK_SHOWN = 160 };
/* Kinds of values in addition to PS_PT_* of ps.h.
 * PK_GLOBAL: a name that is allowed. `count` is the name's row in pt_rebuild.c, and u.integer is the type that the name
 * refers to.
 * PK_STORAGE: bytes in the archive. tuple.args is the value that describes the storage, tuple.entry is the entry's
 * index in the zip, and `count` is the type.
 * A PS_PT_TENSOR of ps.h also uses the fields: tuple.args is the tuple of arguments, and `count` is the function that
 * gets these arguments. */
enum { PK_GLOBAL = 100, PK_STORAGE };

typedef struct pk_value {
    int32_t kind, count;        /* count: number of items; a text has nbytes instead */
    union {
        int64_t integer;
        double number;
        /* [count] Owned, with room for the next power of two. The items of a dict are key, value, key, value, ... */
        int32_t *items;
        struct { uint32_t at, nbytes; } text;       /* at: offset in pk.bytes; BYTES with count 1: in pk.decoded */
        struct { int32_t args, entry; } tuple;
    } u;
} pk_value;

typedef struct pk {
    const char *path;           /* name of the file for error messages, not owned */
    const zip *archive;         /* the archive that contains the storages */
    const char *prefix;         /* folder of the archive's entries, such as "archive" */
    uint8_t *bytes;             /* the pickle, owned; texts are offsets in it */
    int64_t nbytes;
    /* [nbytes] The byte strings that were decoded, one after the other, or NULL if there is none. */
    uint8_t *decoded;
    int64_t decoded_used;
    pk_value *values;           /* [count] */
    int32_t count, room, root;
} pk;

/* Reads the pickle in p->bytes. The caller closes p, even if this fails. */
int pk_read(pk *p);
void pk_close(pk *p);

/* Makes a new value and returns its id, or a negative error. It is called by the functions to which names refer. It may
 * move pk.values, so callers must keep ids and not pointers. */
int32_t pk_new(pk *p, pk_value value);
const uint8_t *pk_text(const pk *p, const pk_value *v);     /* bytes of a STRING or BYTES, v->u.text.nbytes of them */
const char *pk_shown(const uint8_t *text, int64_t nbytes, char out[PK_SHOWN]);
bool pk_is_text(const pk *p, const pk_value *v, const char *text);
/* Raises PS_EFORMAT. The message begins with the file's name. */
int pk_bad(const pk *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* These functions in pt_rebuild.c implement the names, the calls and the outside references that are supported. Each
 * returns the id of the resulting value or a negative error. */
int32_t pt_global(pk *p, const uint8_t *module, int64_t module_n, const uint8_t *name, int64_t name_n);
int32_t pt_call(pk *p, int32_t function, int32_t args);
int32_t pt_persistent(pk *p, int32_t id);
#endif
