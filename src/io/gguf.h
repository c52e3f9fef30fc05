/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the reader and the writer of GGUF, the format of llama.cpp. Only src/io and the fuzz target include this
 * header.
 *
 * A file contains, in this order:
 *   "GGUF"
 *   the version (u32)
 *   the number of tensors (u64)
 *   the number of metadata entries (u64)
 *   the metadata entries: for each entry a key, a type and a value
 *   the descriptions of the tensors: for each tensor a name, the number of dimensions, the dimensions (u64, innermost
 *     first), a type, and an offset in the data (u64)
 *   padding to the alignment
 *   the data
 * All numbers are little-endian. A string is its length (u64) followed by its bytes.
 *
 * An opened ps_gguf contains only checked entries and tensors. The bytes of every tensor are inside the file, and no
 * two tensors overlap. */
#ifndef PS_IO_GGUF_H
#define PS_IO_GGUF_H
#include "io/file.h"
#include <stddef.h>

enum { GGUF_MAX_DIMS = 4, GGUF_LONGEST_NAME = 4095, GGUF_NAME_SHOWN = 160, GGUF_ALIGNMENT = 32,
       GGUF_MAX_ALIGNMENT = 1 << 20, GGUF_MAX_BLOCK = 256 };
/* Types of metadata values. The value of a constant is the id of the type in files. */
enum { GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STRING, GGUF_ARRAY,
       GGUF_U64, GGUF_I64, GGUF_F64, GGUF_VALUE_TYPES };

extern const int gguf_value_bytes[GGUF_VALUE_TYPES];     /* size of a value in bytes, or 0 if it varies */

/* A tensor type. Each block of `block` elements has `bytes` bytes. */
typedef struct gguf_type {
    const char *name;           /* NULL if there is no type with this id */
    int block, bytes;
    int dtype;                  /* dtype of the values after reading, or -1 if the type is known but not supported */
    /* Unpacks the values of one block. If `unpack` is NULL, the file stores the elements as plain values of `dtype`. */
    void (*unpack)(const uint8_t *block, float *out);
} gguf_type;
/* Returns the type with the id `number`, or NULL if no type has this id. */
const gguf_type *gguf_type_of(int64_t number);
int gguf_type_by_name(const char *name);            /* returns the type's id, or -1 if no type has the name */
/* A gguf_pack makes one block from gguf_type.block values. gguf_pack_of returns the function for the type with the id
 * `number`, or NULL if blocks of this type cannot be written. */
typedef void (*gguf_pack)(const float *values, uint8_t *block);
gguf_pack gguf_pack_of(int number);

typedef struct gguf_meta {
    char *key;                  /* points into ps_gguf.text */
    int type, of;               /* of: type of an array's elements; equal to `type` if the value is not an array */
    int64_t n;                  /* number of elements of an array; 1 if the value is not an array */
    const uint8_t *bytes;       /* the value in the map; for an array, its first element */
    const uint64_t *at;         /* [n] for strings: the offset of each string in the map, where its length is stored */
} gguf_meta;

typedef struct gguf_tensor {
    char *name;                 /* points into ps_gguf.text */
    int number;                 /* id of the tensor's type */
    const gguf_type *type;
    int ndim;
    int64_t shape[GGUF_MAX_DIMS];           /* sizes of the dimensions, outermost first */
    int64_t begin, nbytes;      /* begin: offset in the map; nbytes: size in bytes */
    int64_t heads;              /* number of heads if gguf_stored_row() permutes the rows, or 0 */
    bool transposed;            /* true if reading and writing swap the two dimensions */
} gguf_tensor;

struct ps_gguf {
    ps_map map;
    int64_t alignment, data;    /* data: offset in the map of the tensors' data */
    char *text;                 /* all keys and names, each with a final 0 */
    uint64_t *strings;          /* the arrays that gguf_meta.at points to */
    gguf_meta *meta;            /* [meta_count], in file order */
    gguf_tensor *tensors;       /* [count], in file order */
    int *by_key, *by_name;      /* indices of the entries, sorted by key, and of the tensors, sorted by name */
    int count, meta_count;
    int64_t loans;              /* number of loans that have not ended */
    bool closed;                /* true if the file was closed, but its map is kept for loans that have not ended */
};

/* Reads and checks the header in g->map. The other fields of g must be zero. If this fails, the caller closes g. */
int gguf_parse(ps_gguf *g);
/* Returns the index of the row in the file that contains row j of Hugging Face's order. */
int64_t gguf_stored_row(const gguf_tensor *t, int64_t j);
/* Like ps_gguf_open, but reads `bytes` instead of a file. `bytes` must not be freed before the result is closed. */
int gguf_open_memory(const char *path, const void *bytes, int64_t nbytes, ps_gguf **out);
/* Writes the name to `out` for an error message: shortened and without control characters. Returns `out`. */
const char *gguf_shown(const char *name, char out[GGUF_NAME_SHOWN]);
#endif
