/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the files of comm. No other folder includes it. */
#ifndef PS_COMM_INNER_H
#define PS_COMM_INNER_H
#include "comm/group.h"

/* -- comm.c */
/* Writes "all_reduce (call 3, fp32, 64 bytes)" to `text`. */
void group_describe(const header *h, char *text, size_t room);
/* A mark (>= 0, or an error) is a point in a device's work queue, made by the thread that runs kernels. Exchanges
 * that begin after group_after wait for all work before the mark. */
int group_mark(ps_group *g, place at);
int group_after(ps_group *g, place at, int mark);

/* -- plan.c */
bool group_plan_is_open(const ps_group *g);            /* returns true if the plan has a next call */
/* Call it only while the plan is open. Sends this rank's call to all ranks (if peer >= 0, only to that rank), and
 * receives their calls into g->heard. *planned: number of these ranks, including this one, that make the planned
 * call. If any rank does, the plan advances to its next call. */
int group_plan_exchange(ps_group *g, const header *mine, int peer, int *planned);
void group_plan_free(ps_group *g);

/* -- job.c */
void group_jobs_close(ps_group *g);        /* ends the group's thread if there is one */
#endif
