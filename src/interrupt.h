/* SPDX-License-Identifier: BSD-3-Clause
 * Ctrl-C while Lua runs: it stops what runs, or pauses a script. */
#ifndef PS_INTERRUPT_H
#define PS_INTERRUPT_H
#include <lua.h>
#include <signal.h>
#include <stdbool.h>

/* Who is watched, so that watches can be nested. */
typedef struct interrupt_watch {
    struct sigaction before;
    lua_State *running;
    bool catching;
} interrupt_watch;

/* Between the two Ctrl-C acts on L: the first raises "interrupted!" or, where interrupt_pauses is set, pauses the
 * script; later ones end the process (at a prompt, and where scripts pause: only after a warning). A SIGINT that is
 * ignored stays so. */
void interrupt_begin(lua_State *L, interrupt_watch *was);
void interrupt_end(lua_State *L, const interrupt_watch *was);

/* The script that runs was started on a terminal: Ctrl-C pauses it, unless it is one of several ranks. */
extern bool interrupt_pauses;
/* True inside a prompt: Ctrl-C does not restart system calls, and raises. */
extern bool interrupt_at_prompt;
#endif
