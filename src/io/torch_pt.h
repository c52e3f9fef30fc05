/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the reader and the writer of PyTorch's .pt files. Only src/io, the C tests and the fuzz target include this
 * header.
 *
 * A file is a ZIP archive. Its entries are not compressed and are all in one folder:
 *   data.pkl    the values; a tensor in data.pkl refers to a storage by the storage's key
 *   data/KEY    the bytes of the storage with the key KEY
 *   version, byteorder
 *   psluajit    a text; only files that psluajit wrote have this entry */
#ifndef PS_IO_TORCH_PT_H
#define PS_IO_TORCH_PT_H
#include "io/pickle.h"

typedef struct pt_type {
    const char *text;           /* "torch.float32" */
    const char *storage;        /* name of the type of storages, such as "torch.FloatStorage", or NULL */
    /* dtype: PS_*, or -1 if the type is known but not supported. nbytes: size of an element in bytes. */
    int dtype, nbytes;
} pt_type;
const pt_type *pt_type_at(int i);
const pt_type *pt_type_by_dtype(int dtype);
const char *pt_name_text(const pk_value *global);

struct ps_pt {
    zip archive;
    char *prefix;               /* folder of the archive's entries */
    pk pickle;
};

/* Writes the dtype, shape and storage of the tensor that value `id` describes to *out. The value must be a TENSOR or
 * STORAGE. Returns PS_EFORMAT if the tensor is not inside its storage. Does not set out->data. */
int pt_tensor_of(const pk *p, int32_t id, ps_pt_tensor *out);
/* Sets t->numel and t->nbytes. Returns PS_EFORMAT if an element is outside the storage. */
int pt_measure(const pk *p, int nbytes_each, ps_pt_tensor *t);
/* Like ps_pt_open, but reads `bytes` instead of a file. `bytes` must not be freed before the result is closed. */
int pt_open_memory(const char *path, const void *bytes, int64_t nbytes, ps_pt **out);
/* For tests. Sizes and offsets that are at least `n` are written as ZIP64, as if the archive were larger than 4 GiB. */
void pt_write_wide_from(ps_ptw *w, int64_t n);
#endif
