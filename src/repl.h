/* SPDX-License-Identifier: BSD-3-Clause
 * What main.c and repl.c share: protected calls that Ctrl-C can stop, and the read-eval-print loop. */
#ifndef PS_REPL_H
#define PS_REPL_H
#include <lua.h>
#include <signal.h>
#include <stdbool.h>

/* Calls the function below its `nargs` arguments with a traceback as error handler. While it runs, the first Ctrl-C
 * raises "interrupted!" in the script; later ones end the process (at the prompt: only after a warning). Returns
 * lua_pcall's status; on failure the message is on the stack (no string if the error object had none). */
int program_call(lua_State *L, int nargs, int nresults);

/* Counts Ctrl-C since it was last set to 0. */
extern volatile sig_atomic_t program_interrupts;
/* True inside the REPL: Ctrl-C does not restart system calls, and the second one only warns. */
extern bool program_at_prompt;

/* Reads and runs statements until end of input. Errors are printed and never leave it. `interactive`: a person sits at
 * a terminal, so lines are edited and kept in a history; otherwise lines are read plainly, with prompts.
 * `at_error`: a script failed, and statements see its variables (lua/ps/locals.lua). */
void repl_run(lua_State *L, const char *version, bool interactive, bool at_error);
#endif
