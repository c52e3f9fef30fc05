/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the reader and the writer of GGUF, the format of llama.cpp. Included by src/io and the fuzz target only.
 *
 * A file is: "GGUF", u32 version, u64 number of tensors, u64 number of metadata entries, the entries (key, type,
 * value), the tensors (name, number of dimensions, u64 dimensions from the innermost on, type, u64 offset in the data),
 * padding to the alignment, the data. All numbers are little-endian. A string is a u64 length and its bytes. An opened
 * ps_gguf contains only checked entries and tensors. The bytes of every tensor are inside the file, and no two tensors
 * overlap. */
#ifndef PS_IO_GGUF_H
#define PS_IO_GGUF_H
#include "io/file.h"
#include <stddef.h>

enum { GGUF_MAX_DIMS = 4, GGUF_LONGEST_NAME = 4095, GGUF_NAME_SHOWN = 160, GGUF_ALIGNMENT = 32,
       GGUF_MAX_ALIGNMENT = 1 << 20, GGUF_MAX_BLOCK = 256 };
/* Types of metadata values, by their id in files. */
enum { GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STRING, GGUF_ARRAY,
       GGUF_U64, GGUF_I64, GGUF_F64, GGUF_VALUE_TYPES };

extern const int gguf_value_bytes[GGUF_VALUE_TYPES];     /* bytes per value of a type, 0 if its size is not fixed */

/* A tensor type: blocks of `block` elements in `bytes` bytes. */
typedef struct gguf_type {
    const char *name;           /* NULL if no type has this id */
    int block, bytes;
    int dtype;                  /* dtype of the values that are read; -1 if the type is known but not supported */
    /* Unpacks the values of one block. If this function is NULL, the elements are plain values of dtype. */
    void (*unpack)(const uint8_t *block, float *out);
} gguf_type;
/* Returns the type with an id, or NULL if there is none. */
const gguf_type *gguf_type_of(int64_t number);
int gguf_type_by_name(const char *name);            /* id of the type, or -1 if there is none */
/* Makes one block from gguf_type.block values. gguf_pack_of returns NULL for block types that cannot be written. */
typedef void (*gguf_pack)(const float *values, uint8_t *block);
gguf_pack gguf_pack_of(int number);

typedef struct gguf_meta {
    char *key;                  /* in ps_gguf.text */
    int type, of;               /* of: type of an array's elements, else equal to `type` */
    int64_t n;                  /* elements of an array, else 1 */
    const uint8_t *bytes;       /* the value in the map, without an array's header */
    const uint64_t *at;         /* for strings: the offset in the map of each string, which begins with its length */
} gguf_meta;

typedef struct gguf_tensor {
    char *name;                 /* in ps_gguf.text */
    int number;                 /* id of the type */
    const gguf_type *type;
    int ndim;
    int64_t shape[GGUF_MAX_DIMS];           /* sizes from the outermost dimension on */
    int64_t begin, nbytes;      /* begin: offset in the map */
    int64_t heads;              /* if positive, rows are read in the order of Hugging Face's rotary embedding */
    bool transposed;            /* the two dimensions are swapped on reading */
} gguf_tensor;

struct ps_gguf {
    ps_map map;
    int64_t alignment, data;    /* data: offset of the tensors in the map */
    char *text;                 /* keys and names, each with a final 0 */
    uint64_t *strings;          /* gguf_meta.at */
    gguf_meta *meta;            /* [meta_count], in file order */
    gguf_tensor *tensors;       /* [count], in file order */
    int *by_key, *by_name;      /* indices, sorted by key and by name */
    int count, meta_count;
    int64_t loans;              /* under way */
    bool closed;                /* the file is closed, but its map is kept because loans need it */
};

/* Reads and checks g->map's header. The other fields of g are initially zero. On failure the caller closes g. */
int gguf_parse(ps_gguf *g);
/* Returns the row of the file in which row j of Hugging Face's order is stored. */
int64_t gguf_stored_row(const gguf_tensor *t, int64_t j);
/* Like ps_gguf_open, for bytes in memory, which must outlive the result. */
int gguf_open_memory(const char *path, const void *bytes, int64_t nbytes, ps_gguf **out);
/* Writes a name as messages show it: shortened, without control characters. Returns out. */
const char *gguf_shown(const char *name, char out[GGUF_NAME_SHOWN]);
#endif
