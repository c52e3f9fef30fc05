/* SPDX-License-Identifier: BSD-3-Clause
 * Functions that main.c and repl.c share: protected calls, and the loop of the prompt. */
#ifndef PS_REPL_H
#define PS_REPL_H
#include <lua.h>
#include <stdbool.h>

/* Calls the function that is on the stack below its `nargs` arguments. The error handler adds a traceback, and Ctrl-C
 * is watched (interrupt.h). Returns the status of lua_pcall. After a failure the message is on the stack. If the
 * error object has no text, the message is not a string. */
int program_call(lua_State *L, int nargs, int nresults);

extern const char no_text[];     /* text that is printed for an error that has no text */

typedef enum repl_mode {
    REPL_ALONE,
    REPL_AT_ERROR,               /* A script has failed. Statements can use its variables (lua/ps/prompt/locals.lua). */
    REPL_PAUSED                  /* A script is paused. Statements can use its variables (lua/ps/prompt/pause.lua). */
} repl_mode;

/* Reads and runs statements until the end of input. Errors are printed and do not end the loop. `interactive` is true
 * if a person uses a terminal. Lines are then edited and kept in a history. Otherwise lines are read without the line
 * editor, but with prompts. `version` is NULL in a pause, which has no banner. Returns true if a paused script should
 * continue: the user typed "continue", or the input ended. Returns false if the script should be aborted: the user
 * typed "abort". */
bool repl_run(lua_State *L, const char *version, bool interactive, repl_mode mode);
#endif
