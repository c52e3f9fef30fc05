/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the door of io_uring (faults.h). Each vectored read or write passes the door when it is
 * submitted. If a request must fail, or if a bit of its bytes must be flipped, an empty request is submitted instead.
 * When the empty request is completed, its result is replaced. */
#define _GNU_SOURCE
#include "faults/faults.h"
#include <errno.h>
#include <liburing.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST = 64 };
/* The requests whose results are replaced. No lock guards them, because only one thread uses a ring, and a process has
 * only one disk tier. */
static struct { uint64_t user_data; int res; bool used; } replaced[MOST];
static struct iovec shortened[MOST];
static unsigned n_shortened;

static void replace(struct io_uring_sqe *sqe, int res)
{
    for (int i = 0; i < MOST; i++) {
        if (replaced[i].used) continue;
        replaced[i].user_data = sqe->user_data, replaced[i].res = res, replaced[i].used = true;
        uint64_t data = sqe->user_data;
        io_uring_prep_nop(sqe);
        sqe->user_data = data;
        return;
    }
}

/* Passes a request to its door. last: the last request of the batch. The action `reorder` swaps the request with the
 * last request. */
static void pass(struct io_uring_sqe *sqe, struct io_uring_sqe *last)
{
    bool reads = sqe->opcode == IORING_OP_READV;
    if ((!reads && sqe->opcode != IORING_OP_WRITEV) || sqe->len != 1) return;
    struct iovec *v = (struct iovec *)(uintptr_t)sqe->addr;
    unsigned can = CAN(ACT_ERRNO) | CAN(ACT_INTERRUPT) | CAN(ACT_SHORT) | CAN(ACT_REORDER)
                   | (reads ? CAN(ACT_FLIP) : CAN(ACT_FULL));
    faults_hit hit = faults_pass(reads ? DOOR_READ : DOOR_WRITE, can, "(ring)");
    if (hit.action == ACT_REORDER) {
        struct io_uring_sqe first = *sqe;
        *sqe = *last, *last = first;
    } else if (hit.err) replace(sqe, -hit.err);
    else if (hit.action == ACT_FLIP) {
        ssize_t n = syscall(SYS_pread64, sqe->fd, v->iov_base, v->iov_len, sqe->off);
        if (n > 0) faults_flip(v->iov_base, (size_t)n, hit.arg);
        replace(sqe, n < 0 ? -errno : (int)n);
    } else if (hit.action == ACT_SHORT && v->iov_len >= 8192) {
        struct iovec *less = &shortened[n_shortened++ % MOST];
        *less = (struct iovec){ v->iov_base, v->iov_len / 2 / 4096 * 4096 };
        sqe->addr = (uint64_t)(uintptr_t)less;
    }
}

int io_uring_submit_and_wait(struct io_uring *ring, unsigned n)
{
    static int (*next)(struct io_uring *, unsigned);
    if (!next) *(void **)&next = faults_next("io_uring_submit_and_wait", NULL);
    struct io_uring_sqe *sqes = ring->sq.sqes;
    unsigned mask = ring->sq.ring_mask, end = ring->sq.sqe_tail;
    for (unsigned at = ring->sq.sqe_head; at != end; at++) pass(&sqes[at & mask], &sqes[(end - 1) & mask]);
    int rc = next(ring, n);
    unsigned head, i;
    struct io_uring_cqe *cqe;
    for (i = 0; i < MOST && !replaced[i].used; i++) { }
    if (i == MOST) return rc;
    io_uring_for_each_cqe(ring, head, cqe)
        for (i = 0; i < MOST; i++)
            if (replaced[i].used && replaced[i].user_data == cqe->user_data) {
                cqe->res = replaced[i].res;
                replaced[i].used = false;
            }
    return rc;
}
