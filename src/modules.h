/* SPDX-License-Identifier: BSD-3-Clause */
/* The Lua modules that the program itself calls, by name. spec/core/modules_spec.lua requires each of them. */
#ifndef PS_MODULES_H
#define PS_MODULES_H
#include <lua.h>
#include <stdbool.h>
#include <stddef.h>

#define MODULE_CALLER "ps.core.caller"              /* The program uses at, trace and described. */
#define MODULE_CHECKPOINTS "ps.checkpoints"         /* The program uses at_exit. */
#define MODULE_COMPLETE "ps.prompt.complete"        /* The program uses tab. */
#define MODULE_COROUTINES "ps.core.coroutines"
#define MODULE_FFI "ps.core.ffi"                    /* The program uses ffi, C and ctx. */
#define MODULE_HABITS "ps.prompt.habits"            /* The program uses hinted. */
#define MODULE_LISTS "ps.core.lists"
#define MODULE_LOCALS "ps.prompt.locals"            /* The program uses keep_at_error and environment. */
#define MODULE_PAUSE "ps.prompt.pause"              /* The program uses begin, finish and environment. */
#define MODULE_PRETTY "ps.tensor.pretty"            /* The program uses format. The module loads MODULE_CALLER. */
#define MODULE_SCRIPTS "ps.prompt.scripts"          /* The program uses instead. */

/* Pushes a module of the list above. If the module cannot be loaded, pushes nothing, prints the reason on standard
 * error, and returns false. The reason is not printed if the program runs without its Lua files. */
bool program_require(lua_State *L, const char *module);

/* Appends a hint (lua/ps/prompt/habits.lua), if there is one, to the message at the top of the stack. text [n] is the
 * text whose syntax is wrong. `text` is NULL if the message is not about syntax, or if the message already names its
 * file. */
void program_hint(lua_State *L, const char *text, size_t n);

/* Sets whether the program runs with its Lua files. */
void program_has_modules(bool has);
#endif
