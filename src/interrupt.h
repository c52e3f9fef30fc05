/* SPDX-License-Identifier: BSD-3-Clause
 * Ctrl-C while Lua runs. It stops the running code or pauses the script. */
#ifndef PS_INTERRUPT_H
#define PS_INTERRUPT_H
#include <lua.h>
#include <signal.h>
#include <stdbool.h>

/* The state before a watch. interrupt_end restores this state, so watches can be nested. */
typedef struct interrupt_watch {
    struct sigaction before;
    lua_State *running;
    bool catching;
} interrupt_watch;

/* Begin and end a watch. During a watch, Ctrl-C acts on L. The first Ctrl-C raises "interrupted!", or pauses the
 * script if interrupt_pauses is set. The second Ctrl-C ends the process. At a prompt, and for a script that can be
 * paused, the second Ctrl-C prints a warning and the third Ctrl-C ends the process. If the process ignored SIGINT
 * before the watch, it also ignores SIGINT during the watch. */
void interrupt_begin(lua_State *L, interrupt_watch *was);
void interrupt_end(lua_State *L, const interrupt_watch *was);

/* True if Ctrl-C pauses the running script: the script was started on a terminal and is not one of several ranks. */
extern bool interrupt_pauses;
/* True while a prompt is open. Ctrl-C then raises an error, and system calls are not restarted. */
extern bool interrupt_at_prompt;
#endif
