/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the files of comm only. */
#ifndef PS_COMM_INNER_H
#define PS_COMM_INNER_H
#include "comm/group.h"

/* -- comm.c */
/* Writes a description of a call to `text`, such as "all_reduce (call 3, fp32, 64 bytes)". */
void group_describe(const header *h, char *text, size_t room);
/* A mark is a point in a device's work queue (>= 0, or an error), made by the thread that runs kernels. Exchanges
 * after group_after wait for all work before the mark. */
int group_mark(ps_group *g, place at);
int group_after(ps_group *g, place at, int mark);

/* -- plan.c */
bool group_plan_is_open(const ps_group *g);            /* returns true if the plan has a next call */
/* Exchanges calls with all ranks, or only with rank `peer` if peer >= 0, while the plan is open. g->heard gets the
 * calls. *planned: number of ranks that make the planned call, including this one. If any does, the plan advances. */
int group_plan_exchange(ps_group *g, const header *mine, int peer, int *planned);
void group_plan_free(ps_group *g);

/* -- job.c */
void group_jobs_close(ps_group *g);        /* ends the group's job thread, if it was started */
#endif
