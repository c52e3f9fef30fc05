/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the reader and the writer of PyTorch's .pt files. Included by src/io, the C tests and the fuzz target.
 *
 * A file is a ZIP archive of stored entries under one folder: data.pkl (the values; tensors refer to storages by key),
 * data/KEY (the bytes of one storage), version, byteorder. Files that psluajit wrote also have a text named
 * psluajit. */
#ifndef PS_IO_TORCH_PT_H
#define PS_IO_TORCH_PT_H
#include "io/pickle.h"

typedef struct pt_type {
    const char *text;           /* "torch.float32" */
    const char *storage;        /* "torch.FloatStorage", or NULL if the type has no storage */
    int dtype, nbytes;          /* dtype: PS_*, or -1 if the type is known but not supported. nbytes: bytes per
                                 * element. */
} pt_type;
const pt_type *pt_type_at(int i);
const pt_type *pt_type_by_dtype(int dtype);
const char *pt_name_text(const pk_value *global);

struct ps_pt {
    zip archive;
    char *prefix;               /* prefix of the names in the archive */
    pk pickle;
};

/* Reads the tensor that value `id` (a TENSOR or STORAGE) describes, and checks it against its storage. Does not set
 * out->data. */
int pt_tensor_of(const pk *p, int32_t id, ps_pt_tensor *out);
/* Sets numel and nbytes of t. Returns PS_EFORMAT if an element is outside the storage. */
int pt_measure(const pk *p, int nbytes_each, ps_pt_tensor *t);
/* Like ps_pt_open, for bytes in memory, which must outlive the result. */
int pt_open_memory(const char *path, const void *bytes, int64_t nbytes, ps_pt **out);
/* For tests: numbers from `n` on are written as in archives larger than 4 GiB. */
void pt_write_wide_from(ps_ptw *w, int64_t n);
#endif
