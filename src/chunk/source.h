/* SPDX-License-Identifier: BSD-3-Clause
 * A source provides the contents of a chunk from a mapped file of the user. An example is a chunk of frozen weights
 * in a safetensors file. Such a chunk counts as a chunk on the disk tier, but has no extent in the disk tier's file.
 * The chunk is read from its source and never written to the source. The first write to the chunk ends the source.
 * Two threads read sources. The threads bypass the page cache if the file system allows it. Otherwise they read the
 * mapped pages. */
#ifndef PS_SOURCE_H
#define PS_SOURCE_H
#include <stdbool.h>
#include <stdint.h>
#include "mem/mem.h"

/* A range of nbytes bytes of a chunk, starting at offset `at` of the chunk. The bytes are borrowed through loans. */
typedef struct source_part {
    int64_t at, nbytes;
    ps_loans loans;
    struct {
        int fd;                               /* descriptor for reads that bypass the page cache, or -1 */
        int64_t offset;                       /* offset of the bytes in the file */
    } file[2];                                /* file[i] has the bytes of loans.loan[i] */
} source_part;

typedef struct ps_source ps_source;           /* the threads and their queue of jobs */
typedef struct ps_source_job ps_source_job;

int ps_source_open(ps_source **out);
/* Must be called after all jobs were waited for. `source` may be NULL. */
void ps_source_close(ps_source *source);
/* Begins a job that fills `nbytes` bytes at dst from parts. The parts must be in order and must not overlap. The
 * bytes of dst that belong to no part become 0. `parts` and dst must stay valid until ps_source_wait. Fails if the
 * file of a lender has changed. */
int ps_source_read(ps_source *source, const source_part *parts, int32_t n, void *dst, int64_t nbytes,
                   ps_source_job **out);
/* Returns 1 if the job has ended, and frees the job. Returns 0 if the job is still in progress; this happens only if
 * `block` is false. */
int ps_source_wait(ps_source *source, ps_source_job *job, bool block);
#endif
