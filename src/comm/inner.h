/* SPDX-License-Identifier: BSD-3-Clause
 * This header is shared by the files of comm. No other folder includes it. */
#ifndef PS_COMM_INNER_H
#define PS_COMM_INNER_H
#include "comm/group.h"

/* -- comm.c */
/* Writes a description of the call with the header `h` to `text`, such as "all_reduce (call 3, fp32, 64 bytes)". */
void group_describe(const header *h, char *text, size_t room);
/* A mark is a point in the work queue of a device. group_mark must be called by the thread that runs kernels. It
 * returns the mark, which is a number >= 0, or a negative error. Exchanges that begin after group_after wait for all
 * work before the mark. */
int group_mark(ps_group *g, place at);
int group_after(ps_group *g, place at, int mark);

/* -- plan.c */
/* Returns true if the plan has a next call. */
bool group_plan_is_open(const ps_group *g);
/* Exchanges headers while the plan is open, either with all ranks, or only with rank `peer` if peer >= 0. g->heard
 * receives the headers of these ranks and of this rank. *planned receives the number of ranks that make the planned
 * call, including this rank. If *planned is at least 1, the plan advances to its next call. */
int group_plan_exchange(ps_group *g, const header *mine, int peer, int *planned);
void group_plan_free(ps_group *g);

/* -- job.c */
void group_jobs_close(ps_group *g);        /* ends the job thread of the group, if it was started */
#endif
