/* SPDX-License-Identifier: BSD-3-Clause
 * The record of a run: events of ops, modules, actions of a step, copies, disk, collectives, waits, chunks and bytes
 * of tiers (ps.h declares the event; docs/profiling.md shows its uses). The process has one ring, which all threads
 * write. The oldest events are overwritten, and counted. While the record is off, a call costs one predicted branch.
 *
 * The module and the action under way are tracked even then, since memory errors name them. */
#ifndef PS_BASE_RECORD_H
#define PS_BASE_RECORD_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include "ps.h"

/* The step, module and action under way. The script's thread writes them, all threads read them. */
typedef struct ps_record_place {
    _Atomic int32_t step, module;
    _Atomic uint8_t action;                /* PS_ACT_* */
    _Atomic uint8_t backward;              /* a gradient rule is running */
} ps_record_place;
extern ps_record_place ps_record_at;
extern atomic_bool ps_record_flag, ps_flops_flag;
extern atomic_bool ps_record_silent;       /* true in a dry run or while the script is paused: nothing is counted */
extern int64_t ps_flops_sum;               /* FLOPs counted by the script's thread, which runs the ops */
extern int32_t ps_record_run;              /* number of starts; code that records only changes records all once after
                                            * each */

static inline bool ps_record_on(void)
{
    return __builtin_expect(atomic_load_explicit(&ps_record_flag, memory_order_relaxed), 0);
}
/* Begins an interval: returns the time, or 0 while the record is off, so that the interval is not recorded. */
static inline int64_t ps_record_begin(void) { return ps_record_on() ? ps_record_clock() : 0; }
/* Adds an event to the ring, with the current step, action and module. Does nothing if the event began before recording
 * started. end_ns 0 means now. Any thread can call it. */
void ps_record_put(ps_record_event e);
/* Record work whose times become known later; only for the script's thread. ps_record_note sets the event's step,
 * action and module to the current ones. ps_record_put_late adds the event with its own times, even if recording has
 * stopped. */
void ps_record_note(ps_record_event *e);
void ps_record_put_late(ps_record_event e);
/* Ends the interval that began at e.begin_ns. Does nothing if e.begin_ns is 0. */
static inline void ps_record_end(ps_record_event e)
{
    if (__builtin_expect(e.begin_ns != 0, 0)) ps_record_put(e);
}
/* Called when the script pauses (on) or resumes. In between nothing is recorded or counted. */
void ps_record_pause(bool on);
/* Begins a step, whose number later events get until it ends. dry: nothing is recorded in it. */
void ps_record_step_begin(bool dry, bool planned);
void ps_record_step_end(void);
/* Begins an action. The kind PS_ACT_NONE means that the action has ended. */
void ps_record_action(ps_action action);
/* Sets the action of later events without an event of its own, for an update within a backward. Returns the previous
 * one. */
static inline int ps_record_phase(int kind)
{
    return atomic_exchange_explicit(&ps_record_at.action, (uint8_t)kind, memory_order_relaxed);
}
/* Sets the module of later events without an event of its own, for a gradient rule, which runs for the module of its
 * forward op. Returns the previous one. */
int32_t ps_record_module(int32_t id);
int ps_module_depth(void);
#endif
