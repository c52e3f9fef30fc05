/* SPDX-License-Identifier: BSD-3-Clause
 * Declares the functions that main.c and repl.c share: protected calls, and the read-eval-print loop. */
#ifndef PS_REPL_H
#define PS_REPL_H
#include <lua.h>
#include <stdbool.h>

/* Calls the function that is on the stack below its `nargs` arguments, with a traceback as error handler and Ctrl-C
 * watched (interrupt.h). Returns lua_pcall's status. After a failure the message is on the stack. It is not a string
 * if the error object has no text. */
int program_call(lua_State *L, int nargs, int nresults);

extern const char no_text[];     /* printed instead of an error that has no text */

typedef enum repl_mode {
    REPL_ALONE,
    REPL_AT_ERROR,               /* a script has failed, and statements see its variables (lua/ps/prompt/locals.lua) */
    REPL_PAUSED                  /* a script is paused, and statements see its variables (lua/ps/prompt/pause.lua) */
} repl_mode;

/* Reads and runs statements until the end of input. Errors are printed and do not leave the function. `interactive`
 * is true if a person uses a terminal: lines are then edited and kept in a history. Otherwise lines are read
 * plainly, with prompts. `version` is NULL in a pause, which has no banner. Returns false if a paused script is to
 * be aborted (the word abort), and true if it is to continue (the word continue, or the end of input). */
bool repl_run(lua_State *L, const char *version, bool interactive, repl_mode mode);
#endif
