/* SPDX-License-Identifier: BSD-3-Clause
 * The names, calls and references to storages that a .pt file's pickle may use. Other names and calls are errors. No
 * code of the pickle is executed. A call selects a row of this file's table, and C code builds the value. */
#include "io/torch_pt.h"
#include "base/alloc.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const pt_type types[] = {
    { "torch.float32", "torch.FloatStorage", PS_F32, 4 }, { "torch.bfloat16", "torch.BFloat16Storage", PS_BF16, 2 },
    { "torch.float16", "torch.HalfStorage", PS_F16, 2 }, { "torch.float64", "torch.DoubleStorage", PS_F64, 8 },
    { "torch.int32", "torch.IntStorage", PS_I32, 4 }, { "torch.int64", "torch.LongStorage", PS_I64, 8 },
    { "torch.uint8", "torch.ByteStorage", PS_U8, 1 }, { "torch.bool", "torch.BoolStorage", PS_BOOL, 1 },
    { "torch.int8", "torch.CharStorage", -1, 1 }, { "torch.int16", "torch.ShortStorage", -1, 2 },
    { "torch.complex64", "torch.ComplexFloatStorage", -1, 8 }, { "torch.complex32", NULL, -1, 4 },
    { "torch.complex128", "torch.ComplexDoubleStorage", -1, 16 }, { "torch.uint16", NULL, -1, 2 },
    { "torch.uint32", NULL, -1, 4 }, { "torch.uint64", NULL, -1, 8 }, { "torch.float8_e4m3fn", NULL, -1, 1 },
    { "torch.float8_e4m3fnuz", NULL, -1, 1 }, { "torch.float8_e5m2", NULL, -1, 1 },
    { "torch.float8_e5m2fnuz", NULL, -1, 1 }, { "torch.float8_e8m0fnu", NULL, -1, 1 },
};
enum { N_TYPES = sizeof types / sizeof *types, TYPE_U8 = 6 };

enum { PT_DTYPE, PT_STORAGE, PT_DICT, PT_COUNTER, PT_SET, PT_BYTEARRAY, PT_ENCODE, PT_SIZE, PT_DEVICE, PT_CLASS,
       PT_TENSOR_V1, PT_TENSOR_V2, PT_TENSOR_V3, PT_PARAMETER, PT_FROM_TYPE, PT_UNTYPED };
static const struct { const char *text; int what; } names[] = {
    { "collections.OrderedDict", PT_DICT }, { "collections.Counter", PT_COUNTER },
    { "builtins.set", PT_SET }, { "__builtin__.set", PT_SET },
    { "builtins.bytearray", PT_BYTEARRAY }, { "__builtin__.bytearray", PT_BYTEARRAY },
    { "_codecs.encode", PT_ENCODE }, { "torch.Size", PT_SIZE }, { "torch.device", PT_DEVICE },
    { "torch.Tensor", PT_CLASS }, { "torch.nn.parameter.Parameter", PT_CLASS },
    { "torch._utils._rebuild_tensor", PT_TENSOR_V1 }, { "torch._utils._rebuild_tensor_v2", PT_TENSOR_V2 },
    { "torch._utils._rebuild_tensor_v3", PT_TENSOR_V3 }, { "torch._utils._rebuild_parameter", PT_PARAMETER },
    { "torch._utils._rebuild_parameter_with_state", PT_PARAMETER },
    { "torch._tensor._rebuild_from_type_v2", PT_FROM_TYPE },
    { "torch.storage.UntypedStorage", PT_UNTYPED }, { "torch.UntypedStorage", PT_UNTYPED },
};
enum { N_NAMES = sizeof names / sizeof *names };

const pt_type *pt_type_at(int i) { return &types[i]; }

const pt_type *pt_type_by_dtype(int dtype)
{
    for (int i = 0; i < N_TYPES && dtype >= 0; i++)
        if (types[i].dtype == dtype) return &types[i];
    return NULL;
}

const char *pt_name_text(const pk_value *global)
{
    if (global->count == PT_DTYPE) return types[global->u.integer].text;
    if (global->count == PT_STORAGE) return types[global->u.integer].storage;
    for (int i = 0; i < N_NAMES; i++)
        if (names[i].what == global->count) return names[i].text;
    return "";
}

/* -- names ------------------------------------------------------------------------------------------------------- */
/* Returns whether `text` is the module, a dot, and the name. */
static bool names_it(const char *text, const uint8_t *module, int64_t module_n, const uint8_t *name, int64_t name_n)
{
    return (int64_t)strlen(text) == module_n + 1 + name_n && !memcmp(text, module, (size_t)module_n) &&
           text[module_n] == '.' && !memcmp(text + module_n + 1, name, (size_t)name_n);
}

int32_t pt_global(pk *p, const uint8_t *module, int64_t module_n, const uint8_t *name, int64_t name_n)
{
    pk_value v = { .kind = PK_GLOBAL };
    if (module_n == 10 && !memcmp(module, "torch.cuda", 10)) module_n = 5;   /* read CUDA storages into host memory */
    for (int i = 0; i < N_TYPES; i++) {
        bool dtype = names_it(types[i].text, module, module_n, name, name_n);
        if (!dtype && !(types[i].storage && names_it(types[i].storage, module, module_n, name, name_n))) continue;
        v.count = dtype ? PT_DTYPE : PT_STORAGE, v.u.integer = i;
        return pk_new(p, v);
    }
    for (int i = 0; i < N_NAMES; i++) {
        if (!names_it(names[i].text, module, module_n, name, name_n)) continue;
        v.count = names[i].what, v.u.integer = TYPE_U8;
        return pk_new(p, v);
    }
    char module_shown[PK_SHOWN], name_shown[PK_SHOWN];
    return pk_bad(p, "data.pkl uses '%s.%s', which is not one of the allowed names; nothing was executed. Files "
                  "may have tensors, numbers, strings, booleans, lists, tuples, sets and dicts of these: if you trust "
                  "it, load it in PyTorch and save its state_dict", pk_shown(module, module_n, module_shown),
                  pk_shown(name, name_n, name_shown));
}

/* -- storages ---------------------------------------------------------------------------------------------------- */
/* `id` is a tuple ("storage", type, key, device, number of elements). */
int32_t pt_persistent(pk *p, int32_t id)
{
    const pk_value *v = p->values, *args = &v[id];
    if (args->kind != PS_PT_TUPLE || args->count < 5 || !pk_is_text(p, &v[args->u.items[0]], "storage"))
        return pk_bad(p, "data.pkl refers to something other than a storage");
    const pk_value *type = &v[args->u.items[1]], *key = &v[args->u.items[2]], *numel = &v[args->u.items[4]];
    char name[256], shown[PK_SHOWN];
    if (type->kind != PK_GLOBAL || (type->count != PT_STORAGE && type->count != PT_UNTYPED) ||
        key->kind != PS_PT_STRING || numel->kind != PS_PT_INT)
        return pk_bad(p, "data.pkl describes a storage in a form that is not supported");
    pk_shown(pk_text(p, key), key->u.text.nbytes, shown);
    int n = snprintf(name, sizeof name, "%s/data/%s", p->prefix, shown);
    int entry = n < (int)sizeof name && pk_is_text(p, key, shown) ? zip_find(p->archive, name) : -1;
    if (entry < 0) return pk_bad(p, "storage '%s' is not in the archive", shown);
    int64_t nbytes, has = p->archive->entries[entry].nbytes;
    if (numel->u.integer < 0 || __builtin_mul_overflow(numel->u.integer, types[type->u.integer].nbytes, &nbytes) ||
        nbytes != has)
        return pk_bad(p, "storage '%s' has %lld bytes, but data.pkl says that it has %lld elements of %d bytes", shown,
                      (long long)has, (long long)numel->u.integer, types[type->u.integer].nbytes);
    return pk_new(p, (pk_value){ .kind = PK_STORAGE, .count = (int32_t)type->u.integer, .u.tuple = { id, entry } });
}

/* -- tensors ----------------------------------------------------------------------------------------------------- */
static int read_dims(const pk *p, const char *what, const pk_value *tuple, int64_t out[PS_MAX_DIMS])
{
    if (tuple->kind != PS_PT_TUPLE) return pk_bad(p, "a tensor's %s is not a tuple", what);
    if (tuple->count > PS_MAX_DIMS)
        return pk_bad(p, "a tensor has %d dimensions; at most %d are supported", tuple->count, PS_MAX_DIMS);
    for (int d = 0; d < tuple->count; d++) {
        const pk_value *n = &p->values[tuple->u.items[d]];
        if (n->kind != PS_PT_INT || n->u.integer < 0)
            return pk_bad(p, "dimension %d of a tensor's %s is not a number from 0", d, what);
        out[d] = n->u.integer;
    }
    return 0;
}

int pt_measure(const pk *p, int nbytes_each, ps_pt_tensor *t)
{
    int64_t numel = 1, last = t->offset, step;
    bool empty = false, overflow = false;
    for (int d = 0; d < t->ndim; d++) empty = empty || t->shape[d] == 0;
    for (int d = 0; d < t->ndim && !empty; d++) {
        overflow = overflow || __builtin_mul_overflow(numel, t->shape[d], &numel);
        overflow = overflow || __builtin_mul_overflow(t->shape[d] - 1, t->stride[d], &step);
        overflow = overflow || __builtin_add_overflow(last, step, &last);
    }
    t->numel = empty ? 0 : numel;
    if (overflow || __builtin_mul_overflow(t->numel, nbytes_each, &t->nbytes))
        return pk_bad(p, "a tensor's shape and strides are too large");
    if (!empty && last >= t->storage_nbytes / nbytes_each)
        return pk_bad(p, "a tensor needs element %lld of a storage that has %lld elements", (long long)last,
                      (long long)(t->storage_nbytes / nbytes_each));
    return 0;
}

int pt_tensor_of(const pk *p, int32_t id, ps_pt_tensor *out)
{
    const pk_value *v = p->values, *tensor = &v[id], *storage = tensor;
    ps_pt_tensor t = { 0 };
    int type = storage->count;
    if (tensor->kind == PS_PT_TENSOR) {
        const int32_t *args = v[tensor->u.tuple.args].u.items;
        const pk_value *offset = &v[args[1]];
        storage = &v[args[0]];
        type = storage->count;
        if (tensor->count == PT_TENSOR_V3) type = (int)v[args[6]].u.integer;
        if (offset->kind != PS_PT_INT || offset->u.integer < 0)
            return pk_bad(p, "a tensor's offset is not a number from 0");
        t.offset = offset->u.integer;
        t.ndim = v[args[2]].count;
        PS_TRY(read_dims(p, "shape", &v[args[2]], t.shape));
        PS_TRY(read_dims(p, "strides", &v[args[3]], t.stride));
        if (v[args[3]].count != t.ndim) return pk_bad(p, "a tensor has %d sizes and %d strides", t.ndim,
                                                      v[args[3]].count);
    }
    t.dtype = types[type].dtype, t.type = types[type].text;
    t.storage = storage->u.tuple.entry;
    t.storage_nbytes = p->archive->entries[t.storage].nbytes;
    if (tensor == storage) t.ndim = 1, t.shape[0] = t.storage_nbytes / types[type].nbytes, t.stride[0] = 1;
    PS_TRY(pt_measure(p, types[type].nbytes, &t));
    *out = t;
    return 0;
}

/* `args` is a tuple (storage, offset, shape, strides[, requires_grad, hooks[, dtype][, {"conj", "neg"}]]). */
static int32_t new_tensor(pk *p, int what, int32_t args)
{
    const pk_value *v = p->values, *a = &v[args];
    int least = what == PT_TENSOR_V1 ? 4 : what == PT_TENSOR_V2 ? 6 : 7;
    if (a->count < least) return pk_bad(p, "a tensor is described by %d values instead of %d", a->count, least);
    if (v[a->u.items[0]].kind != PK_STORAGE) return pk_bad(p, "a tensor is made from a value that is not a storage");
    const pk_value *dtype = &v[a->u.items[least - 1]];
    if (what == PT_TENSOR_V3 && (dtype->kind != PK_GLOBAL || dtype->count != PT_DTYPE))
        return pk_bad(p, "a tensor's dtype is not a dtype");
    if (what != PT_TENSOR_V1 && a->count > least) {
        const pk_value *view = &v[a->u.items[least]];
        if (view->kind != PS_PT_DICT || view->count)
            return pk_bad(p, "a tensor is stored as the conjugate or negative of another; save it with .resolve_conj() "
                          "or .resolve_neg()");
    }
    int32_t id = pk_new(p, (pk_value){ .kind = PS_PT_TENSOR, .count = what, .u.tuple = { args, 0 } });
    if (id < 0) return id;
    ps_pt_tensor unused;
    int rc = pt_tensor_of(p, id, &unused);
    return rc < 0 ? rc : id;
}

/* -- the other calls ---------------------------------------------------------------------------------------------- */
static int32_t wrong_args(const pk *p, int32_t function)
{
    return pk_bad(p, "data.pkl calls '%s' in a form that is not supported", pt_name_text(&p->values[function]));
}

/* Makes a byte string from a text of characters below 256. Each character becomes one byte. All byte strings share the
 * buffer p->decoded, which has the size of the pickle. The byte strings of a valid file fit into this buffer, because a
 * byte string is never longer than its text. */
static int32_t new_bytes(pk *p, const pk_value *text)
{
    uint32_t n = text->u.text.nbytes, used = 0;
    const uint8_t *from = pk_text(p, text);
    if (!p->decoded && !(p->decoded = ps_alloc((size_t)p->nbytes))) return ps_fail_nomem(p->nbytes);
    if (n > p->nbytes - p->decoded_used)
        return pk_bad(p, "data.pkl makes byte strings that together are longer than data.pkl");
    uint8_t *to = p->decoded + p->decoded_used;
    for (uint32_t i = 0; i < n; i++) {
        if (from[i] < 0x80) to[used++] = from[i];
        else if ((from[i] == 0xc2 || from[i] == 0xc3) && i + 1 < n && (from[i + 1] & 0xc0) == 0x80)
            to[used++] = (uint8_t)(from[i] << 6 | (from[i + 1] & 0x3f)), i++;
        else return pk_bad(p, "a byte string in data.pkl is not Latin-1 text");
    }
    pk_value v = { .kind = PS_PT_BYTES, .count = 1, .u.text = { (uint32_t)p->decoded_used, used } };
    p->decoded_used += used;
    return pk_new(p, v);
}

/* Performs the call function(args...) for functions that do not make tensors. */
static int32_t call_plain(pk *p, int32_t function, const pk_value *args)
{
    pk_value *v = p->values;
    int what = v[function].count, n = args->count;
    int32_t first = n ? args->u.items[0] : -1;
    int kind = n ? v[first].kind : -1;
    if (what == PT_DICT && n == 0) return pk_new(p, (pk_value){ .kind = PS_PT_DICT });
    if (what == PT_COUNTER && n == 0) return pk_new(p, (pk_value){ .kind = PS_PT_DICT });
    if (what == PT_COUNTER && n == 1 && kind == PS_PT_DICT) return first;
    if (what == PT_SET && n == 0) return pk_new(p, (pk_value){ .kind = PS_PT_SET });
    if (what == PT_SET && n == 1 && kind == PS_PT_LIST) {
        v[first].kind = PS_PT_SET;          /* the list was made for this call and has no other use */
        return first;
    }
    if (what == PT_SET && n == 1 && kind == PS_PT_SET) return first;
    if (what == PT_BYTEARRAY && n == 0) return pk_new(p, (pk_value){ .kind = PS_PT_BYTES });
    if (what == PT_BYTEARRAY && n == 1 && kind == PS_PT_BYTES) return first;
    if (what == PT_ENCODE && n == 2 && kind == PS_PT_STRING && pk_is_text(p, &v[args->u.items[1]], "latin1"))
        return new_bytes(p, &v[first]);
    if (what == PT_SIZE && n == 1 && kind == PS_PT_TUPLE) return first;
    if (what == PT_DEVICE && n >= 1 && kind == PS_PT_STRING) return first;
    return wrong_args(p, function);
}

int32_t pt_call(pk *p, int32_t function, int32_t args)
{
    const pk_value *v = p->values, *a = &v[args];
    int what = v[function].count;
    /* The arguments describe a tensor with attributes: (function, class, arguments of the function, attributes). */
    if (what == PT_FROM_TYPE) {
        if (a->count < 3 || v[a->u.items[0]].kind != PK_GLOBAL || v[a->u.items[1]].kind != PK_GLOBAL ||
            v[a->u.items[1]].count != PT_CLASS || v[a->u.items[2]].kind != PS_PT_TUPLE)
            return wrong_args(p, function);
        function = a->u.items[0], args = a->u.items[2];
        what = v[function].count, a = &v[args];
    }
    if (what >= PT_TENSOR_V1 && what <= PT_TENSOR_V3) return new_tensor(p, what, args);
    if (what == PT_PARAMETER) {             /* arguments: (tensor, requires_grad, hooks[, attributes]) */
        if (!a->count || v[a->u.items[0]].kind != PS_PT_TENSOR) return wrong_args(p, function);
        return a->u.items[0];
    }
    return call_plain(p, function, a);
}
