/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the reader, the header parser and the writer of safetensors. Only src/io and the fuzz target include this
 * header.
 *
 * A file contains the length N of the header (u64, little-endian), the header (N bytes of JSON), and the data. An
 * opened ps_st contains only checked tensors. Each tensor has the size in bytes that its type and shape require. All
 * tensors together cover the data without gaps and overlaps. */
#ifndef PS_IO_SAFETENSORS_H
#define PS_IO_SAFETENSORS_H
#include "io/file.h"
#include <stddef.h>

enum { ST_MAX_HEADER = 100000000, ST_NAME_SHOWN = 160 };

/* Checksums (st_sum.c). The header of a file with checksums begins with ST_SUM_HEAD. The ST_SUM_DIGITS digits of the
 * header's checksum follow at offset ST_SUM_AT of the file. */
#define ST_SUM_KEY "xxh3_64"
#define ST_SUM_HEAD "{\"__metadata__\":{\"" ST_SUM_KEY "\":\""
enum { ST_SUM_AT = 8 + sizeof ST_SUM_HEAD - 1, ST_SUM_DIGITS = 16 };
typedef struct st_sum st_sum;
st_sum *st_sum_new(void);                           /* returns NULL if there is no memory */
void st_sum_add(st_sum *s, const void *data, int64_t nbytes);
uint64_t st_sum_end(st_sum *s);                     /* returns the checksum and frees s */
void st_sum_free(st_sum *s);
void st_sum_print(uint64_t sum, char *out);         /* writes ST_SUM_DIGITS characters to `out`, without a final 0 */
/* Computes the checksum of all bytes before the data. */
int st_sum_header(const void *bytes, int64_t nbytes, uint64_t *out);

typedef struct st_type {
    const char *text;       /* name of the type in files */
    int bits;               /* number of bits per element */
    int dtype;              /* PS_*, or -1 if the type is known but not supported */
} st_type;
const st_type *st_type_by_text(const char *text);   /* returns NULL if the format has no such type */
const st_type *st_type_by_dtype(int dtype);         /* returns NULL if `dtype` is not a dtype */

typedef struct st_tensor {
    const char *name;       /* points into ps_st.text */
    const st_type *type;
    int32_t ndim;
    int64_t shape[PS_MAX_DIMS];
    int64_t begin, end;     /* offsets in bytes from the start of the data */
    /* Hashes of the blocks of the tensor's bytes. `blocks` is NULL until ps_st_verify has verified the tensor's
     * checksum. */
    uint64_t *blocks;
} st_tensor;
typedef struct st_meta { const char *key, *value; } st_meta;

struct ps_st {
    ps_map map;
    const uint8_t *data;
    int64_t data_nbytes;
    char *text;             /* all decoded strings; they are never longer than the header */
    st_tensor *tensors;     /* [count] in the order of their offsets */
    const st_tensor **by_name;  /* [count] */
    st_meta *meta;          /* [meta_count] in the order of their keys */
    int count, tensors_room, meta_count, meta_room;
    int64_t loans;          /* number of loans that have not ended */
    bool closed;            /* true if the file was closed, but its map is kept for loans that have not ended */
};

/* Reads and checks the header in st->map. The other fields of st must be zero. If this fails, the caller closes st. */
int st_parse(ps_st *st);
/* Like ps_st_open, but reads `bytes` instead of a file. `bytes` must not be freed before the result is closed. */
int st_open_memory(const char *path, const void *bytes, int64_t nbytes, ps_st **out);
/* If the file has checksums, returns PS_EFORMAT if the header's checksum is wrong. */
int st_check_header(const ps_st *st);
/* Checks bytes that were read from the data, starting at byte `at` of the data. If the bytes belong to a tensor that
 * ps_st_verify has verified, each block of bytes is compared with its hash. Without this check, a disk could return
 * other bytes than it returned to ps_st_verify. If only a part of a block was read, the whole block is read again.
 * Returns PS_EFORMAT if bytes differ. */
int st_check_read(const ps_st *st, int64_t at, const void *bytes, int64_t nbytes);
/* Returns the number of elements of a shape, or -1 if the product of the nonzero dimensions overflows. */
int64_t st_numel(int ndim, const int64_t *shape);
/* Writes the name to `out` for an error message: shortened and without control characters. Returns `out`. */
const char *st_shown(const char *name, char out[ST_NAME_SHOWN]);
#endif
