/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the reader, the header parser and the writer of safetensors. Included by src/io and the fuzz target only.
 *
 * A file is: u64 header length N (little-endian), N bytes of JSON, the data. An opened ps_st has only checked tensors.
 * Every tensor's bytes are inside the data, and their number follows from type and shape. Together the tensors cover
 * the data without gaps or overlaps. */
#ifndef PS_IO_SAFETENSORS_H
#define PS_IO_SAFETENSORS_H
#include "io/file.h"
#include <stddef.h>

enum { ST_MAX_HEADER = 100000000, ST_NAME_SHOWN = 160 };

/* Checksums (st_sum.c). The header of a file with checksums begins with this key and the digits of the header's
 * checksum. */
#define ST_SUM_KEY "xxh3_64"
#define ST_SUM_HEAD "{\"__metadata__\":{\"" ST_SUM_KEY "\":\""
enum { ST_SUM_AT = 8 + sizeof ST_SUM_HEAD - 1, ST_SUM_DIGITS = 16 };
typedef struct st_sum st_sum;
st_sum *st_sum_new(void);                           /* returns NULL if there is no memory */
void st_sum_add(st_sum *s, const void *data, int64_t nbytes);
uint64_t st_sum_end(st_sum *s);                     /* frees it */
void st_sum_free(st_sum *s);
void st_sum_print(uint64_t sum, char *out);         /* writes ST_SUM_DIGITS characters to out, without a final 0 */
int st_sum_header(const void *bytes, int64_t nbytes, uint64_t *out);    /* computes the checksum of all bytes before
                                                                         * the data */

typedef struct st_type {
    const char *text;       /* name of the type in files */
    int bits;               /* bits per element */
    int dtype;              /* PS_*, or -1 if the type is known but not supported */
} st_type;
const st_type *st_type_by_text(const char *text);   /* returns NULL if the format does not have the type */
const st_type *st_type_by_dtype(int dtype);         /* returns NULL if `dtype` is not a dtype */

typedef struct st_tensor {
    const char *name;       /* in ps_st.text */
    const st_type *type;
    int32_t ndim;
    int64_t shape[PS_MAX_DIMS];
    int64_t begin, end;     /* byte offsets from the start of the data */
    uint64_t *blocks;       /* hashes of the bytes, in blocks, if ps_st_verify found the checksum right; else NULL */
} st_tensor;
typedef struct st_meta { const char *key, *value; } st_meta;

struct ps_st {
    ps_map map;
    const uint8_t *data;
    int64_t data_nbytes;
    char *text;             /* all decoded strings, never longer than the header from which they come */
    st_tensor *tensors;     /* [count] in the order of their offsets in the data */
    const st_tensor **by_name;  /* [count] */
    st_meta *meta;          /* [meta_count] in the order of their keys */
    int count, tensors_room, meta_count, meta_room;
    int64_t loans;          /* under way */
    bool closed;            /* the file is closed, but its map exists until all loans end */
};

/* Reads and checks st->map's header. The other fields of st are initially zero. On failure the caller closes st. */
int st_parse(ps_st *st);
/* Like ps_st_open, for bytes in memory, which must outlive st. */
int st_open_memory(const char *path, const void *bytes, int64_t nbytes, ps_st **out);
/* Verifies the header's checksum if the file has checksums. */
int st_check_header(const ps_st *st);
/* Checks bytes of the data that were read from byte `at` on, if they are of a tensor that has been verified. The disk
 * may return other bytes the second time. Each block of bytes is compared with its hash, and a block of which only a
 * part was read is read again. Returns PS_EFORMAT if they differ. */
int st_check_read(const ps_st *st, int64_t at, const void *bytes, int64_t nbytes);
/* Returns the number of elements of a shape, or -1 if the product (without zero dimensions) overflows. */
int64_t st_numel(int ndim, const int64_t *shape);
/* Writes a name as messages show it: shortened, without control characters. Returns out. */
const char *st_shown(const char *name, char out[ST_NAME_SHOWN]);
#endif
