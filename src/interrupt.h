/* SPDX-License-Identifier: BSD-3-Clause
 * Ctrl-C while Lua runs: stops the running code, or pauses a script. */
#ifndef PS_INTERRUPT_H
#define PS_INTERRUPT_H
#include <lua.h>
#include <signal.h>
#include <stdbool.h>

/* The previous state, so that watches can be nested. */
typedef struct interrupt_watch {
    struct sigaction before;
    lua_State *running;
    bool catching;
} interrupt_watch;

/* Between the two calls Ctrl-C acts on L. The first Ctrl-C raises "interrupted!" or, if interrupt_pauses is set,
 * pauses the script. The second ends the process. At a prompt, and for a script that can be paused, the second
 * prints a warning, and the third ends the process. If SIGINT was ignored before, it stays ignored. */
void interrupt_begin(lua_State *L, interrupt_watch *was);
void interrupt_end(lua_State *L, const interrupt_watch *was);

/* The running script was started on a terminal, so Ctrl-C pauses it, unless it is one of several ranks. */
extern bool interrupt_pauses;
/* True inside a prompt, where Ctrl-C raises an error and does not restart system calls. */
extern bool interrupt_at_prompt;
#endif
