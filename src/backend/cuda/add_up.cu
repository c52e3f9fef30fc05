/* SPDX-License-Identifier: BSD-3-Clause
 * The kernel that adds up the values of all ranks for the wire (nccl.cpp). The kernel adds the values in the order of
 * the ranks, in fp32 (fp64 for fp64 values), and rounds the sum once. comm/comm.c computes bit-identical sums in host
 * memory. */
#include "backend/cuda/device.h"
#include "backend/cuda/nccl.h"

/* The addresses of the operands: at[r] points to the [numel] elements of rank r. CUDA allows at least 4 KiB of kernel
 * arguments, so the struct is passed by value. */
struct addends { const void *at[PS_CUDA_MOST_RANKS]; };

template <class T> KERNEL_UP_TO(THREADS) add_up(addends in, int n, int64_t packs, int64_t numel, T *to)
{
    typedef typename type_info<T>::acc A;
    const int W = pack<T>::n;
    for (int64_t i = FIRST_ELEMENT; i < packs; i += ALL_THREADS) {
        A total[W];
        for (int r = 0; r < n; r++) {
            pack<T> v = load_pack((const T *)in.at[r] + i * W);
#pragma unroll
            for (int k = 0; k < W; k++) total[k] = r ? total[k] + (A)up(v.v[k]) : (A)up(v.v[k]);
        }
        pack<T> out;
#pragma unroll
        for (int k = 0; k < W; k++) out.v[k] = down<T>(total[k]);
        store_pack(to + i * W, out);
    }
    for (int64_t i = packs * W + FIRST_ELEMENT; i < numel; i += ALL_THREADS) {
        A total = (A)up(((const T *)in.at[0])[i]);
        for (int r = 1; r < n; r++) total = total + (A)up(((const T *)in.at[r])[i]);
        to[i] = down<T>(total);
    }
}

template <class T> static int start(cudaStream_t stream, const addends &in, int n, int64_t numel, void *to)
{
    bool aligned = aligned16(to);
    for (int r = 0; r < n; r++) aligned = aligned && aligned16(in.at[r]);
    int64_t packs = aligned ? numel / pack<T>::n : 0, work = packs + numel - packs * pack<T>::n;
    PS_START(add_up<T>, blocks_for(work), THREADS, 0, stream, in, n, packs, numel, (T *)to);
    return 0;
}

int ps_cuda_add_up(cudaStream_t stream, int dtype, int n, char *const *at, int64_t numel, void *to)
{
    addends in;
    if (n > PS_CUDA_MOST_RANKS)
        return ps_fail(PS_EUNSUP, "cannot sum over %d ranks on cuda: at most %d are supported", n,
                       (int)PS_CUDA_MOST_RANKS);
    for (int r = 0; r < n; r++) in.at[r] = at[r];
    return BY_FLOAT(dtype, start, stream, in, n, numel, to);
}
