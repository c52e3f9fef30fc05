/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the reader and the writer of PyTorch's .pt files. Only src/io, the C tests and the fuzz target include this
 * header.
 *
 * A file is a ZIP archive of entries that are not compressed. All entries are in one folder. data.pkl contains the
 * values. A tensor in data.pkl refers to a storage by the storage's key. data/KEY contains the bytes of that storage.
 * The other entries are `version`, `byteorder`, and `psluajit`, a text in the files that psluajit wrote. */
#ifndef PS_IO_TORCH_PT_H
#define PS_IO_TORCH_PT_H
#include "io/pickle.h"

typedef struct pt_type {
    const char *text;           /* "torch.float32" */
    const char *storage;        /* name of the storage's type, such as "torch.FloatStorage", or NULL if there is none */
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

/* Reads the tensor that value `id` describes, and compares it with its storage. The value must be a TENSOR or STORAGE.
 * Does not set out->data. */
int pt_tensor_of(const pk *p, int32_t id, ps_pt_tensor *out);
/* Sets t->numel and t->nbytes. Returns PS_EFORMAT if an element is outside the storage. */
int pt_measure(const pk *p, int nbytes_each, ps_pt_tensor *t);
/* Like ps_pt_open, but for bytes in memory. The bytes must not be freed before the result is closed. */
int pt_open_memory(const char *path, const void *bytes, int64_t nbytes, ps_pt **out);
/* For tests. Sizes and offsets of at least `n` are written as in archives larger than 4 GiB. */
void pt_write_wide_from(ps_ptw *w, int64_t n);
#endif
