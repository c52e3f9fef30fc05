/* SPDX-License-Identifier: BSD-3-Clause
 * The record of what a run does: events of ops, modules, actions of a step, copies, disk, collectives, waits, chunks
 * and bytes of tiers. One ring for the process, which all threads write; the oldest events are overwritten, and
 * counted. Off, a writer pays one branch that is predicted. ps.h has the event; docs/profiling.md what it becomes.
 *
 * The module and the action under way are noted whether the record is on or not, since errors of memory name them. */
#ifndef PS_BASE_RECORD_H
#define PS_BASE_RECORD_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include "ps.h"

/* What runs now. Written by the script's thread, read by all. */
typedef struct ps_record_place {
    _Atomic int32_t step, module;
    _Atomic uint8_t action;                /* PS_ACT_* */
    _Atomic uint8_t backward;              /* a gradient rule runs */
} ps_record_place;
extern ps_record_place ps_record_at;
extern atomic_bool ps_record_flag, ps_flops_flag;
extern atomic_bool ps_record_silent;       /* a dry run is under way, or a script is paused: nothing counts */
extern int64_t ps_flops_sum;               /* of the script's thread, the one that runs ops */
extern int32_t ps_record_run;              /* counts starts: who records changes begins anew */

static inline bool ps_record_on(void)
{
    return __builtin_expect(atomic_load_explicit(&ps_record_flag, memory_order_relaxed), 0);
}
/* Where an interval begins: the time, or 0 while the record is off. What began before the record is not in it. */
static inline int64_t ps_record_begin(void) { return ps_record_on() ? ps_record_clock() : 0; }
/* Puts an event into the ring, with the step, action and module of now, unless it began before the record. end_ns 0:
 * now. Any thread. */
void ps_record_put(ps_record_event e);
/* For work of which the times are known later: note gives an event the step, action and module of now; put_late puts it
 * into the ring with its own times, also when the record has been stopped meanwhile. Script's thread. */
void ps_record_note(ps_record_event *e);
void ps_record_put_late(ps_record_event e);
/* Ends the interval that began at e.begin_ns, unless that is 0. */
static inline void ps_record_end(ps_record_event e)
{
    if (__builtin_expect(e.begin_ns != 0, 0)) ps_record_put(e);
}
/* A script is paused: nothing is recorded, nor counted, until it goes on. */
void ps_record_pause(bool on);
/* A step begins: the events behind it have its number, until it ends. dry: nothing is recorded meanwhile. */
void ps_record_step_begin(bool dry, bool planned);
void ps_record_step_end(void);
/* An action begins; kind PS_ACT_NONE: it has ended. */
void ps_record_action(ps_action action);
/* The action that events are told to be of, without an event of its own: an update within a backward. Returns the one
 * before. */
static inline int ps_record_phase(int kind)
{
    return atomic_exchange_explicit(&ps_record_at.action, (uint8_t)kind, memory_order_relaxed);
}
/* The module of what follows, without an event of its own: a gradient rule runs for its forward's module. Returns the
 * module before. */
int32_t ps_record_module(int32_t id);
int ps_module_depth(void);
#endif
