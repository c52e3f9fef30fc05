/* SPDX-License-Identifier: BSD-3-Clause
 * This file runs collectives on chunks concurrently with the computation. A thread of the group performs the jobs in
 * the order in which they were started. This order must be the same on all ranks. If a job fails, the next jobs still
 * run. They fail as well only if the connections are closed. A job on a device is finished for this thread as soon as
 * the bytes of the job are being sent. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/record.h"
#include "base/thread.h"
#include "comm/inner.h"

enum { TEXT = 900 };

struct ps_job {
    ps_job *next;
    place at;
    /* mark: position in the device's work queue at the start of the job
     * point: position in the device's work queue after the bytes of the job, or -1 */
    int op, dtype, stripe, failed, rc, mark, point;
    uint64_t check;
    bool done;
    ps_comm_part *parts;                   /* [size] stored after this struct */
    char text[TEXT];                       /* error message of a job that failed */
    ps_error_detail detail;                /* ranks and stripes that `text` names */
};

struct ps_jobs {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t more, fewer;
    /* first: the job that runs now, or the next job that will run
     * spare: jobs that can be reused */
    ps_job *first, *last, *spare;
    bool closing;
};

static int carry_out(ps_group *g, ps_job *job)
{
    header mine = { .seq = g->seq++, .op = job->op, .dtype = job->dtype, .root = job->stripe, .failed = job->failed,
                    .check = job->check, .place = job->at };
    int64_t piece = 0, largest = 0;
    if (g->comm->pretends) {                               /* simulated ranks have no bytes to move */
        group_count_parts(g, job->parts, job->op != OP_CHUNK_GATHER, job->op != OP_CHUNK_REDUCE);
        return 0;
    }
    for (int r = 0; r < g->comm->size; r++) {
        mine.nbytes += job->parts[r].nbytes;
        if (job->parts[r].nbytes > largest) largest = job->parts[r].nbytes;
    }
    if (!mine.failed && job->op != OP_CHUNK_GATHER)
        mine.failed = group_prepare_sum(g, job->at, PS_REDUCE_SUM, job->dtype, largest, &piece);
    if (mine.failed) {
        char why[TEXT];
        snprintf(why, sizeof why, "%s", job->failed ? job->text : ps_error_message());
        group_agree(g, &mine);
        return ps_fail(mine.failed, "%s of stripe %d: %s", group_op_name(job->op), job->stripe, why);
    }
    PS_TRY(group_agree(g, &mine));
    int rc = group_after(g, job->at, job->mark);
    if (rc == 0 && job->op != OP_CHUNK_GATHER) rc = group_reduce(g, job->at, PS_REDUCE_SUM, job->dtype,
                                                                   job->parts, piece, NULL);
    if (rc == 0 && job->op != OP_CHUNK_REDUCE) rc = group_gather(g, job->at, job->parts);
    if (rc == 0) rc = job->point = group_hand_over(g, job->at, job->op, mine.seq);
    if (rc > 0) rc = 0;
    if (rc == 0 && group_call_is_timed(job->op)) rc = group_settle(g, job->at);
    group_done(g);
    if (rc < 0)
        ps_error_prefix("%s of stripe %d, call %llu of rank %d, moving its bytes: ", group_op_name(job->op),
                        job->stripe, (unsigned long long)mine.seq, group_world(g, g->comm->rank));
    return rc;
}

static void *run(void *arg)
{
    ps_group *g = arg;
    ps_jobs *q = g->jobs;
    pthread_mutex_lock(&q->lock);
    for (;;) {
        while (!q->first && !q->closing) pthread_cond_wait(&q->more, &q->lock);
        ps_job *job = q->first;
        if (!job) break;
        pthread_mutex_unlock(&q->lock);
        group_call call = { job->op, group_call_begin(), 0 };
        for (int r = 0; r < g->comm->size; r++) call.nbytes += job->parts[r].nbytes;
        int rc = carry_out(g, job);
        group_call_end(g, &call);
        pthread_mutex_lock(&q->lock);
        job->rc = rc;
        if (rc < 0) {
            snprintf(job->text, sizeof job->text, "%s", ps_error_message());
            job->detail = *ps_error_get_detail();
        }
        job->done = true;
        q->first = job->next;
        if (!q->first) q->last = NULL;
        pthread_cond_broadcast(&q->fewer);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

static void jobs_free(ps_jobs *q)
{
    pthread_mutex_destroy(&q->lock);
    pthread_cond_destroy(&q->more);
    pthread_cond_destroy(&q->fewer);
    while (q->spare) {
        ps_job *job = q->spare;
        q->spare = job->next;
        ps_free(job);
    }
    ps_free(q);
}

static int jobs_open(ps_group *g)
{
    if (g->jobs) return 0;
    ps_jobs *q = ps_alloc0(sizeof *q);
    if (!q) return ps_fail_nomem(sizeof *q);
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->more, NULL);
    pthread_cond_init(&q->fewer, NULL);
    g->jobs = q;
    int failed = ps_thread_start(&q->thread, run, g);
    if (!failed) return 0;
    g->jobs = NULL;
    jobs_free(q);
    return ps_fail(PS_ENOMEM, "cannot start a thread for the collectives of a group of ranks: %s", strerror(failed));
}

static ps_job *job_take(ps_group *g)
{
    ps_jobs *q = g->jobs;
    /* Only the thread that starts jobs and waits for them uses the list `spare`. */
    ps_job *job = q->spare;
    size_t parts = sizeof *job->parts * (size_t)g->comm->size;
    if (job) q->spare = job->next;
    else if (!(job = ps_alloc(sizeof *job + parts))) return NULL;
    memset(job, 0, sizeof *job);
    job->parts = (ps_comm_part *)(job + 1);
    return job;
}

int group_job_start(ps_group *g, int op, place at, int dtype, int stripe, uint64_t check, const ps_comm_part *parts,
                    int failed, ps_job **out)
{
    char why[TEXT];
    int mark = failed ? 0 : group_mark(g, at);
    if (mark < 0) failed = mark;
    snprintf(why, sizeof why, "%s", failed ? ps_error_message() : "");
    PS_TRY(jobs_open(g));
    ps_job *job = job_take(g);
    if (!job) return ps_fail_nomem(sizeof *job);
    job->op = op, job->at = at, job->mark = mark, job->point = -1;
    job->dtype = dtype, job->stripe = stripe, job->check = check;
    job->failed = failed;
    memcpy(job->parts, parts, sizeof *parts * (size_t)g->comm->size);
    if (failed) memcpy(job->text, why, sizeof job->text);
    ps_jobs *q = g->jobs;
    pthread_mutex_lock(&q->lock);
    if (q->last) q->last->next = job;
    else q->first = job;
    q->last = job;
    pthread_cond_signal(&q->more);
    pthread_mutex_unlock(&q->lock);
    *out = job;
    return 0;
}

int group_job_wait(ps_group *g, ps_job *job)
{
    ps_jobs *q = g->jobs;
    int64_t began = ps_record_begin();
    pthread_mutex_lock(&q->lock);
    while (!job->done) pthread_cond_wait(&q->fewer, &q->lock);
    pthread_mutex_unlock(&q->lock);
    ps_record_end((ps_record_event){ .kind = PS_REC_WAIT, .name = PS_WAIT_COLLECTIVE, .begin_ns = began, .id = -1 });
    int rc = g->comm->pretends ? 0 : group_catch_up(g, job->at, job->point);
    if (job->rc < 0) {
        rc = ps_fail(job->rc, "%s", job->text);
        ps_error_set_detail(&job->detail);
    }
    job->next = q->spare;
    q->spare = job;
    return rc;
}

static bool is_busy(const ps_jobs *q, bool device)
{
    const ps_job *job = q->first;
    while (job && device && job->at != ON_DEVICE) job = job->next;
    return job != NULL;
}

static void drain(ps_group *g, bool device)
{
    ps_jobs *q = g->jobs;
    if (!q) return;
    pthread_mutex_lock(&q->lock);
    while (is_busy(q, device)) pthread_cond_wait(&q->fewer, &q->lock);
    pthread_mutex_unlock(&q->lock);
}

void group_drain(ps_group *g) { drain(g, false); }
void group_drain_device(ps_group *g) { drain(g, true); }

void group_jobs_close(ps_group *g)
{
    ps_jobs *q = g->jobs;
    if (!q) return;
    pthread_mutex_lock(&q->lock);
    q->closing = true;
    pthread_cond_signal(&q->more);
    pthread_mutex_unlock(&q->lock);
    pthread_join(q->thread, NULL);
    jobs_free(q);
    g->jobs = NULL;
}
