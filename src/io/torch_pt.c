/* SPDX-License-Identifier: BSD-3-Clause
 * Reads PyTorch's .pt files. Opening maps a file and checks the archive (zip.c) and the pickle (pickle.c). After that,
 * the values and the bytes of tensors can be read. A ps_pt allocates memory for the archive's directory, for a copy of
 * data.pkl, and for the values, which have about the size of data.pkl. For a state dict, this memory is some hundred
 * bytes per tensor. The bytes of a tensor are read when the caller requests them. They are copied directly from the
 * map, one tensor at a time. ps_pt_drop frees the pages of the map. */
#define _GNU_SOURCE
#include "io/torch_pt.h"
#include "base/alloc.h"
#include "base/dtype.h"
#include <stdlib.h>
#include <string.h>

#define CONVERT "; in PyTorch: torch.save(torch.load(\"%s\", map_location=\"cpu\"), \"new.pt\")"

/* -- opening ----------------------------------------------------------------------------------------------------- */
/* Recognizes other file formats, so that the error names the format instead of a damaged archive. */
static int check_format(const ps_map *map)
{
    static const uint8_t magic[] = { 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19 };
    const uint8_t *b = map->bytes;
    int64_t n = map->nbytes;
    int frame = n > 3 && b[1] >= 4 && b[2] == 0x95 ? 9 : 0;          /* protocol 4 begins with the length of a frame */
    if (n > 9 && b[8] == '{' && !memcmp(b + 4, "\0\0\0\0", 4))
        return ps_fail(PS_EFORMAT, "%s: this is a safetensors file; rename it to .safetensors", map->path);
    if (n >= 16 + frame && b[0] == 0x80 && !memcmp(b + 2 + frame, magic, sizeof magic))
        return ps_fail_sub(PS_EFORMAT, PS_SUB_OLD_TORCH, "%s: this is the format that PyTorch wrote before 1.6 (or "
                           "with _use_new_zipfile_serialization=False), which is not supported; convert it" CONVERT,
                           map->path, map->path);
    if (n >= 512 && !memcmp(b + 257, "ustar", 5))
        return ps_fail_sub(PS_EFORMAT, PS_SUB_OLD_TORCH, "%s: this is a tar archive, the format of PyTorch's first "
                           "versions, which is not supported; convert it" CONVERT, map->path, map->path);
    if (n >= 2 && b[0] == 0x80 && b[1] <= 5)
        return ps_fail(PS_EFORMAT, "%s: this is a bare pickle, not a file of torch.save; convert it in Python",
                       map->path);
    return 0;
}

/* Finds the index of data.pkl, and writes the name of its folder in the archive to pt->prefix. */
static int find_pickle(ps_pt *pt, int *pickle)
{
    for (int i = 0; i < pt->archive.count; i++) {
        const char *name = pt->archive.entries[i].name, *slash = strchr(name, '/');
        if (!slash || slash == name || strcmp(slash, "/data.pkl")) continue;
        if (!(pt->prefix = ps_strdup(name))) return ps_fail_nomem(strlen(name) + 1);
        pt->prefix[slash - name] = 0;
        *pickle = i;
        return 0;
    }
    return ps_fail(PS_EFORMAT, "%s: this is not a file of torch.save: the ZIP archive has no entry FOLDER/data.pkl",
                   pt->archive.map.path);
}

/* Returns the index of the entry "prefix/name", or -1 if the archive has no such entry. */
static int find_beside(const ps_pt *pt, const char *name)
{
    size_t n = strlen(pt->prefix);
    for (int i = 0; i < pt->archive.count; i++) {
        const char *entry = pt->archive.entries[i].name;
        if (!strncmp(entry, pt->prefix, n) && entry[n] == '/' && !strcmp(entry + n + 1, name)) return i;
    }
    return -1;
}

static int read_archive(ps_pt *pt)
{
    zip *z = &pt->archive;
    int pickle = 0;
    PS_TRY(check_format(&z->map));
    PS_TRY(zip_open(z));
    PS_TRY(find_pickle(pt, &pickle));
    if (find_beside(pt, "constants.pkl") >= 0)
        return ps_fail(PS_EFORMAT, "%s: this is a TorchScript program; save its weights in PyTorch: "
                       "torch.save(torch.jit.load(\"%s\").state_dict(), \"new.pt\")", z->map.path, z->map.path);
    int order = find_beside(pt, "byteorder");
    if (order >= 0 && (z->entries[order].nbytes != 6 || memcmp(z->map.bytes + z->entries[order].begin, "little", 6)))
        return ps_fail(PS_EFORMAT, "%s: its numbers are big-endian; save it again on a little-endian machine",
                       z->map.path);
    pk *p = &pt->pickle;
    p->nbytes = z->entries[pickle].nbytes;
    if (p->nbytes > PK_MAX_NBYTES)
        return ps_fail(PS_EFORMAT, "%s: data.pkl has %lld bytes, but at most %d are supported; keep long lists of "
                       "numbers in tensors", z->map.path, (long long)p->nbytes, PK_MAX_NBYTES);
    p->path = z->map.path, p->archive = z, p->prefix = pt->prefix;
    if (!(p->bytes = ps_alloc((size_t)p->nbytes + 1))) return ps_fail_nomem(p->nbytes + 1);
    PS_TRY(zip_verify(z, pickle));
    memcpy(p->bytes, z->map.bytes + z->entries[pickle].begin, (size_t)p->nbytes);
    return pk_read(p);
}

/* Opens the file in `map`. If this fails, the function closes `map`. Otherwise the result owns `map`. */
static int open_map(ps_map *map, ps_pt **out)
{
    ps_pt *pt = ps_alloc0(sizeof *pt);
    if (!pt) {
        ps_map_close(map);
        return ps_fail_nomem(sizeof *pt);
    }
    pt->archive.map = *map;
    int rc = read_archive(pt);
    if (rc < 0) ps_pt_close(pt);
    else *out = pt;
    return rc;
}

int ps_pt_open(const char *path, ps_pt **out)
{
    PS_NEED(out);
    ps_map map;
    PS_TRY(ps_map_open(&map, path));
    return open_map(&map, out);
}

int pt_open_memory(const char *path, const void *bytes, int64_t nbytes, ps_pt **out)
{
    ps_map map;
    PS_TRY(ps_map_borrow(&map, path, bytes, nbytes));
    return open_map(&map, out);
}

void ps_pt_close(ps_pt *pt)
{
    if (!pt) return;
    pk_close(&pt->pickle);
    zip_close(&pt->archive);
    ps_free(pt->prefix);
    ps_free(pt);
}

/* -- values ------------------------------------------------------------------------------------------------------ */
int ps_pt_root(const ps_pt *pt) { return pt ? pt->pickle.root : -1; }

static int value_at(const ps_pt *pt, int value, const pk_value **out)
{
    PS_NEED(pt);
    if (value < 0 || value >= pt->pickle.count)
        return ps_fail(PS_ERANGE, "%s: value %d was requested, but there are %d", pt->archive.map.path, value,
                       pt->pickle.count);
    *out = &pt->pickle.values[value];
    return 0;
}

int ps_pt_get(const ps_pt *pt, int value, ps_pt_value *out)
{
    const pk_value *v = NULL;
    PS_NEED(out);
    PS_TRY(value_at(pt, value, &v));
    *out = (ps_pt_value){ .kind = v->kind };
    switch (v->kind) {
    case PS_PT_BOOL: case PS_PT_INT: out->integer = v->u.integer; break;
    case PS_PT_FLOAT: out->number = ps_lua_number(v->u.number); break;
    case PS_PT_STRING: case PS_PT_BYTES:
        out->text = (const char *)pk_text(&pt->pickle, v);
        out->integer = v->u.text.nbytes;
        break;
    case PS_PT_LIST: case PS_PT_TUPLE: case PS_PT_SET: case PS_PT_DICT: out->count = v->count; break;
    case PK_STORAGE: out->kind = PS_PT_TENSOR; break;
    case PK_GLOBAL:
        out->kind = PS_PT_NAME;
        out->text = pt_name_text(v);
        out->integer = (int64_t)strlen(out->text);
        break;
    default: break;
    }
    return 0;
}

int ps_pt_item(const ps_pt *pt, int value, int i)
{
    const pk_value *v = NULL;
    PS_TRY(value_at(pt, value, &v));
    if (v->kind < PS_PT_LIST || v->kind > PS_PT_DICT || i < 0 || i >= v->count)
        return ps_fail(PS_ERANGE, "%s: value %d has no item %d", pt->archive.map.path, value, i);
    return v->u.items[i];
}

/* -- tensors ----------------------------------------------------------------------------------------------------- */
int ps_pt_tensor_get(const ps_pt *pt, int value, ps_pt_tensor *out)
{
    const pk_value *v = NULL;
    PS_NEED(out);
    PS_TRY(value_at(pt, value, &v));
    if (v->kind != PS_PT_TENSOR && v->kind != PK_STORAGE)
        return ps_fail(PS_EINVAL, "%s: value %d is not a tensor", pt->archive.map.path, value);
    PS_TRY(pt_tensor_of(&pt->pickle, value, out));
    out->data = pt->archive.map.bytes + pt->archive.entries[out->storage].begin;
    return 0;
}

int ps_pt_verify(ps_pt *pt, int value)
{
    ps_pt_tensor t;
    PS_TRY(ps_pt_tensor_get(pt, value, &t));
    return zip_verify(&pt->archive, t.storage);
}

int64_t ps_pt_note(ps_pt *pt, const char **text)
{
    PS_NEED(pt);
    PS_NEED(text);
    int i = find_beside(pt, "psluajit");
    if (i < 0) return 0;
    PS_TRY(ps_map_check(&pt->archive.map));
    PS_TRY(zip_verify(&pt->archive, i));
    *text = (const char *)pt->archive.map.bytes + pt->archive.entries[i].begin;
    return pt->archive.entries[i].nbytes;
}

int ps_pt_ready(const ps_pt *pt)
{
    PS_NEED(pt);
    return ps_map_check(&pt->archive.map);
}

int ps_pt_copy(const ps_pt *pt, const ps_pt_tensor *tensor, int64_t first, void *dst, int64_t numel)
{
    PS_NEED(pt);
    PS_NEED(tensor);
    ps_pt_tensor t = *tensor;
    bool wrong = t.storage < 0 || t.storage >= pt->archive.count || t.dtype < 0 || t.dtype >= PS_DTYPE_COUNT ||
                 t.ndim < 0 || t.ndim > PS_MAX_DIMS || t.offset < 0;
    for (int d = 0; d < t.ndim && !wrong; d++) wrong = t.shape[d] < 0 || t.stride[d] < 0;
    if (wrong) return ps_fail(PS_EINVAL, "%s: this value does not describe a tensor of the file", pt->archive.map.path);
    int64_t each = (int64_t)ps_dtype_bytes(t.dtype);
    t.storage_nbytes = pt->archive.entries[t.storage].nbytes;
    PS_TRY(pt_measure(&pt->pickle, (int)each, &t));
    if (first < 0 || numel < 0 || numel > t.numel - first || (numel && !dst))
        return ps_fail(PS_ERANGE, "%s: %lld elements from %lld on were requested, but the tensor has %lld",
                       pt->archive.map.path, (long long)numel, (long long)first, (long long)t.numel);
    PS_TRY(ps_pt_ready(pt));
    if (!numel) return 0;
    const char *data = (const char *)pt->archive.map.bytes + pt->archive.entries[t.storage].begin;
    ps_copy_strided(data + t.offset * each, each, t.ndim, t.shape, t.stride, first, dst, numel);
    return 0;
}

void ps_pt_drop(const ps_pt *pt, int value)
{
    ps_pt_tensor t;
    if (!pt || pt->archive.map.fd < 0 || ps_pt_tensor_get(pt, value, &t) < 0) return;
    ps_map_drop(&pt->archive.map, t.data, t.storage_nbytes);
}
