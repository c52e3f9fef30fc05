/* SPDX-License-Identifier: BSD-3-Clause
 * The record of a run. It contains events of ops, modules, actions of a step, copies, disk accesses, collectives,
 * waits, chunks, and bytes of tiers. ps.h declares the event, and docs/profiling.md shows uses of the record. The
 * process has one ring buffer, and all threads write to it. New events overwrite the oldest ones, and the number of
 * overwritten events is counted. While recording is off, a call costs one branch, which the processor predicts.
 *
 * The current module and action are tracked even while recording is off, because memory errors name them. */
#ifndef PS_BASE_RECORD_H
#define PS_BASE_RECORD_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include "ps.h"

/* The current step, module and action. The script's thread writes these fields. All threads read them. */
typedef struct ps_record_place {
    _Atomic int32_t step, module;
    _Atomic uint8_t action;                /* PS_ACT_* */
    _Atomic uint8_t backward;              /* 1 while a gradient rule is running */
} ps_record_place;
extern ps_record_place ps_record_at;
extern atomic_bool ps_record_flag, ps_flops_flag;
extern atomic_bool ps_record_silent;       /* true in a dry run and while the script is paused: nothing is counted */
extern int64_t ps_flops_sum;               /* number of FLOPs counted by the script's thread, which runs the ops */
extern int32_t ps_record_run;              /* number of times that recording was started. Code that records only
                                            * changes also records the whole state once after each start. */

static inline bool ps_record_on(void)
{
    return __builtin_expect(atomic_load_explicit(&ps_record_flag, memory_order_relaxed), 0);
}
/* Begins an interval. Returns the time, or 0 while recording is off. ps_record_end does not record an interval that
 * began at 0. */
static inline int64_t ps_record_begin(void) { return ps_record_on() ? ps_record_clock() : 0; }
/* Adds an event to the ring, with the current step, action and module. Does nothing if the event began before
 * recording started. If end_ns is 0, the event ends now. Any thread can call this function. */
void ps_record_put(ps_record_event e);
/* These two functions record work whose times become known only later. Only the script's thread may call them.
 * ps_record_note sets the event's step, action and module to the current step, action and module. When the times are
 * known, ps_record_put_late adds the event, even if recording has stopped. */
void ps_record_note(ps_record_event *e);
void ps_record_put_late(ps_record_event e);
/* Ends the interval that began at e.begin_ns. Does nothing if e.begin_ns is 0. */
static inline void ps_record_end(ps_record_event e)
{
    if (__builtin_expect(e.begin_ns != 0, 0)) ps_record_put(e);
}
/* Must be called when the script pauses (`on` is true) and when it resumes. During a pause nothing is recorded or
 * counted. */
void ps_record_pause(bool on);
/* Begins a step. Events are recorded with the step's number until the step ends. If `dry` is true, nothing is
 * recorded in the step. */
void ps_record_step_begin(bool dry, bool planned);
void ps_record_step_end(void);
/* Begins an action. The kind PS_ACT_NONE means that the action has ended. */
void ps_record_action(ps_action action);
/* Sets the action of later events, without an event for the action itself. It is used for an update within a
 * backward. Returns the previous action. */
static inline int ps_record_phase(int kind)
{
    return atomic_exchange_explicit(&ps_record_at.action, (uint8_t)kind, memory_order_relaxed);
}
/* Sets the module of later events, without an event for the module itself. It is used for a gradient rule, which runs
 * in the module of its forward op. Returns the previous module. */
int32_t ps_record_module(int32_t id);
int ps_module_depth(void);
#endif
