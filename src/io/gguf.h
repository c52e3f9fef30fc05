/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the reader and the writer of GGUF, the format of llama.cpp. Included by src/io and the fuzz target only.
 *
 * A file is: "GGUF", u32 version, u64 number of tensors, u64 number of metadata entries, the entries (key, type,
 * value), the tensors (name, number of dimensions, u64 dimensions from the innermost on, type, u64 offset in the
 * data), padding to the alignment, the data. All numbers are little-endian. A string is a u64 length and its bytes.
 * An opened ps_gguf holds checked entries and tensors only. Every tensor has its bytes inside the file, and no two
 * overlap. */
#ifndef PS_IO_GGUF_H
#define PS_IO_GGUF_H
#include "io/file.h"
#include <stddef.h>

enum { GGUF_MAX_DIMS = 4, GGUF_LONGEST_NAME = 4095, GGUF_NAME_SHOWN = 160, GGUF_ALIGNMENT = 32,
       GGUF_MAX_ALIGNMENT = 1 << 20, GGUF_MAX_BLOCK = 256 };
/* Types of metadata values, by their number in files. */
enum { GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STRING, GGUF_ARRAY,
       GGUF_U64, GGUF_I64, GGUF_F64, GGUF_VALUE_TYPES };

extern const int gguf_value_bytes[GGUF_VALUE_TYPES];     /* of a value of a type; 0: it has no fixed size */

/* A type of tensors: blocks of `block` elements in `bytes` bytes. */
typedef struct gguf_type {
    const char *name;           /* NULL: no type has this number */
    int block, bytes;
    int dtype;                  /* PS_*: the dtype of the values that are read; -1: known, not supported */
    /* Block types: the values of one block. NULL: elements are values of dtype as they are. */
    void (*unpack)(const uint8_t *block, float *out);
} gguf_type;
/* The type with a number; NULL: there is none. */
const gguf_type *gguf_type_of(int64_t number);
int gguf_type_by_name(const char *name);            /* its number; -1: none */
/* Block types that can be written: `pack` makes one block of `block` values. NULL: not supported. */
typedef void (*gguf_pack)(const float *values, uint8_t *block);
gguf_pack gguf_pack_of(int number);

typedef struct gguf_meta {
    char *key;                  /* in ps_gguf.text */
    int type, of;               /* of: the type of an array's elements, else that of the value */
    int64_t n;                  /* elements of an array, else 1 */
    const uint8_t *bytes;       /* in the map: the value, without an array's header */
    const uint64_t *at;         /* strings: where each begins (its length), from the map's start */
} gguf_meta;

typedef struct gguf_tensor {
    char *name;                 /* in ps_gguf.text */
    int number;                 /* of the type */
    const gguf_type *type;
    int ndim;
    int64_t shape[GGUF_MAX_DIMS];           /* from the outermost dimension on */
    int64_t begin, nbytes;      /* begin: from the map's start */
    int64_t heads;              /* > 0: rows are read in the order of Hugging Face's rotary embedding */
    bool transposed;            /* two dimensions are read in the other order */
} gguf_tensor;

struct ps_gguf {
    ps_map map;
    int64_t alignment, data;    /* data: where tensors begin, from the map's start */
    char *text;                 /* keys and names, each with a final 0 */
    uint64_t *strings;          /* gguf_meta.at */
    gguf_meta *meta;            /* [meta_count], in file order */
    gguf_tensor *tensors;       /* [count], in file order */
    int *by_key, *by_name;      /* numbers, sorted by key and by name */
    int count, meta_count;
    int64_t loans;              /* under way */
    bool closed;                /* closed, except for the map, which loans need */
};

/* Reads and checks g->map's header into g, whose other fields are zero. On failure the caller closes g. */
int gguf_parse(ps_gguf *g);
/* The row of the file in which row j of Hugging Face's order is stored. */
int64_t gguf_stored_row(const gguf_tensor *t, int64_t j);
/* ps_gguf_open on bytes in memory, which must outlive it. */
int gguf_open_memory(const char *path, const void *bytes, int64_t nbytes, ps_gguf **out);
/* A name in the form for messages: shortened, without control characters. Returns out. */
const char *gguf_shown(const char *name, char out[GGUF_NAME_SHOWN]);
#endif
