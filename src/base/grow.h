/* SPDX-License-Identifier: BSD-3-Clause
 * Growable arrays. A growable array is a pointer and a capacity. The capacity counts elements and has any integer
 * type. The owner of the array stores both. The pointer is NULL and the capacity is 0 at the start. ps_free frees the
 * array. */
#ifndef PS_BASE_GROW_H
#define PS_BASE_GROW_H
#include "base/alloc.h"
#include "base/error.h"

/* Grows the array to at least `wanted` elements. The capacity is at least doubled, so that n appends move O(n)
 * elements. Returns 0, or PS_ENOMEM with the array unchanged. */
#define ps_grow(array, capacity, wanted) \
    (ps_try_grow(array, capacity, wanted) ? 0 : ps_fail_nomem((size_t)(wanted) * sizeof *(array)))

/* Like ps_grow, for an array that is not essential. Returns false if there is no memory, and raises no error. */
#define ps_try_grow(array, capacity, wanted) __extension__({ \
    int64_t ps_wanted_ = (int64_t)(wanted), ps_capacity_ = (int64_t)(capacity); \
    void *ps_array_ = NULL; \
    bool ps_has_ = ps_wanted_ <= ps_capacity_; \
    if (!ps_has_) ps_array_ = ps_alloc_grown(array, sizeof *(array), &ps_capacity_, ps_wanted_, \
                                             sizeof (capacity) < 8 ? INT32_MAX : INT64_MAX); \
    if (ps_array_) (array) = ps_array_, (capacity) = (__typeof__(capacity))ps_capacity_; \
    ps_has_ || ps_array_; })

/* Implements the macros above. Reallocates the array to at least `wanted` elements of `size` bytes, and sets
 * *capacity. Returns NULL if there is no memory, or if `wanted` is greater than `most`. */
void *ps_alloc_grown(void *array, size_t size, int64_t *capacity, int64_t wanted, int64_t most);
#endif
