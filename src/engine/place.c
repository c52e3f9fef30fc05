/* SPDX-License-Identifier: BSD-3-Clause
 * This file makes chunks, and moves tensors into them. */
#include "base/error.h"
#include "engine/engine.h"

int ps_engine_chunk_new(ps_ctx *ctx, int kind, int group, int index, int dtype, int64_t nbytes, int32_t *chunk)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    if (!ps_kind_name(kind)) return ps_fail(PS_EINVAL, "there is no kind %d of chunks", kind);
    return ps_chunk_new(e->chunks, kind, group, index, dtype, nbytes, chunk);
}

int engine_check_whole(const ps_tensor *t)
{
    PS_TRY(ps_tensor_check_alive(t));
    if (t->offset != 0 || !ps_tensor_is_contiguous(t) || ps_tensor_nbytes(t) != t->storage->nbytes)
        return ps_fail(PS_EINVAL, "only a contiguous tensor that covers its whole storage can go into a chunk");
    return 0;
}

int ps_engine_adopt(ps_ctx *ctx, ps_tensor *t, int32_t chunk, int64_t offset, const char *name)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    PS_TRY(engine_check_whole(t));
    PS_TRY(ps_chunk_adopt(e->chunks, t->storage, chunk, offset, name, !(t->flags & PS_T_REQUIRES_GRAD)));
    ps_scope_adopt(ctx, t->storage);
    ps_scope_uncount(t->storage);
    return 0;
}

int engine_check_device(const ps_engine *e, int device)
{
    if (device == e->device || device == e->host) return 0;
    return ps_fail(PS_EINVAL, "device %d is not a device of the engine", device);
}

int engine_meta_like(const ps_engine *e, const ps_tensor *like, int dtype, int device, ps_meta *meta, int64_t *nbytes)
{
    if (dtype < 0 || dtype >= PS_DTYPE_COUNT) return ps_fail(PS_EINVAL, "there is no type %d", dtype);
    PS_TRY(engine_check_device(e, device));
    *meta = ps_meta_like(like);
    meta->dtype = dtype;
    *nbytes = like->numel_ * ps_dtype_bytes(dtype);
    return 0;
}

int ps_engine_tensor_new(ps_ctx *ctx, const ps_tensor *like, int dtype, int device, int32_t chunk, int64_t offset,
                         const char *name, ps_tensor **out)
{
    ps_engine *e = NULL;
    ps_meta meta;
    int64_t nbytes;
    ps_storage *s;
    PS_TRY(engine_get(ctx, &e));
    PS_TRY(engine_meta_like(e, like, dtype, device, &meta, &nbytes));
    PS_TRY(ps_chunk_storage_new(e->chunks, chunk, offset, nbytes, name, &s));
    int rc = ps_tensor_over(ctx, s, &meta, device, out);
    if (rc < 0) ps_chunk_storage_undo(e->chunks, s);         /* so that the caller can try again */
    return rc;
}

int ps_engine_tensor_shaped(ps_ctx *ctx, int ndim, const int64_t *shape, int dtype, int device, int32_t chunk,
                            int64_t offset, const char *name, ps_tensor **out)
{
    ps_tensor like = { .ndim = ndim, .numel_ = 1 };
    if (ndim < 0 || ndim > PS_MAX_DIMS) return ps_fail(PS_EINVAL, "a tensor cannot have %d dimensions", ndim);
    for (int i = 0; i < ndim; i++) like.shape_[i] = shape[i], like.numel_ *= shape[i];
    return ps_engine_tensor_new(ctx, &like, dtype, device, chunk, offset, name, out);
}

int ps_engine_tensor_at(ps_ctx *ctx, ps_tensor *t, int device, ps_tensor **out)
{
    ps_engine *e = NULL;
    PS_TRY(engine_get(ctx, &e));
    PS_TRY(ps_tensor_check_alive(t));
    if ((device != e->device && device != e->host) || !engine_holds(e, t->storage))
        return ps_fail(PS_EINVAL, "only tensors in chunks can be seen from another device of the engine");
    ps_tensor *view;
    PS_TRY(ps_tensor_detach(t, &view));
    view->device_ = device;
    *out = view;
    return 0;
}
