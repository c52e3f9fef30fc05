/* SPDX-License-Identifier: BSD-3-Clause
 * Ctrl-C while Lua runs. The signal handler sets a hook, because nothing else in a running lua_State may be changed
 * by a signal handler. The hook raises an error or pauses the script. A pause opens a prompt. The hook opens the
 * prompt only while one of the script's own functions runs, because psluajit's functions may be in the middle of a
 * change. lua/ps/prompt/pause.lua and src/engine/suspend.c handle the effects of a pause on tensors and steps. */
#include <lauxlib.h>
#include <unistd.h>

#include "interrupt.h"
#include "modules.h"
#include "repl.h"

bool interrupt_pauses, interrupt_at_prompt;
static volatile sig_atomic_t count;       /* number of times that Ctrl-C was pressed since the watch began or since
                                           * the last pause */
static lua_State *running;

static void stop_hook(lua_State *L, lua_Debug *ar)
{
    (void)ar;
    lua_sethook(L, NULL, 0, 0);
    luaL_where(L, 0);
    lua_pushfstring(L, "%sinterrupted!", lua_tostring(L, -1));
    lua_error(L);
}

static void pause_hook(lua_State *L, lua_Debug *ar);

/* The first Ctrl-C sets a hook. A compiled loop does not check hooks. So if the hook has not run, the next Ctrl-C
 * prints a warning, and a further Ctrl-C ends the program. */
static void on_interrupt(int sig)
{
    static const char warning[] = "\nstill running compiled or native code; press Ctrl-C again to end psluajit\n";
    bool pauses = interrupt_pauses && !interrupt_at_prompt;
    int n = ++count, last = interrupt_at_prompt || pauses ? 3 : 2;
    if (n >= last) {
        signal(sig, SIG_DFL);
        raise(sig);
    } else if (n == 1) {
        if (pauses) lua_sethook(running, pause_hook, LUA_MASKCOUNT, 1);
        else lua_sethook(running, stop_hook, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT, 1);
    } else if (write(STDERR_FILENO, warning, sizeof warning - 1) < 0) {
        return;
    }
}

void interrupt_begin(lua_State *L, interrupt_watch *was)
{
    struct sigaction act = { .sa_handler = on_interrupt, .sa_flags = interrupt_at_prompt ? 0 : SA_RESTART };
    sigemptyset(&act.sa_mask);
    was->running = running;
    running = L;
    count = 0;
    /* nohup and background jobs start a process that ignores Ctrl-C. The process must continue to ignore it. */
    was->catching = sigaction(SIGINT, NULL, &was->before) == 0 && was->before.sa_handler != SIG_IGN;
    if (was->catching) sigaction(SIGINT, &act, NULL);
}

void interrupt_end(lua_State *L, const interrupt_watch *was)
{
    if (was->catching) sigaction(SIGINT, &was->before, NULL);
    if (count) lua_sethook(L, NULL, 0, 0);
    running = was->running;
}

/* -- pausing ------------------------------------------------------------------------------------------------------ */
/* Calls function `function` of lua/ps/prompt/pause.lua with the `nargs` arguments at the top of the stack. Replaces
 * the arguments by the function's one result. If the call fails, returns false and replaces the arguments by the
 * error message. */
static bool call_pause(lua_State *L, const char *function, int nargs)
{
    int base = lua_gettop(L) - nargs + 1;
    if (!program_require(L, MODULE_PAUSE)) {
        lua_pushliteral(L, MODULE_PAUSE " cannot be loaded");
    } else {
        lua_getfield(L, -1, function);
        lua_insert(L, base);
        lua_pop(L, 1);
        if (lua_pcall(L, nargs, 1, 0) == 0) return true;
    }
    lua_replace(L, base);
    lua_settop(L, base);
    return false;
}

static int yields(lua_State *L) { return lua_yield(L, 0); }

/* Allows hooks to run again. While a hook runs, LuaJIT calls no other hook, so Ctrl-C could not stop a statement that
 * the user types during a pause. LuaJIT leaves this state when a coroutine yields in a hook. This function therefore
 * runs a coroutine that yields at once and is never resumed. */
static void let_hooks_run(lua_State *L)
{
    lua_State *co = lua_newthread(L);
    lua_pushcfunction(co, yields);
    lua_resume(co, 0);
    lua_pop(L, 1);
}

/* Runs a pause, in a stack frame of its own. Returns true if the script cannot be paused now but can be paused later.
 * Otherwise returns nothing. */
static int pause_here(lua_State *L)
{
    struct sigaction before;
    lua_State *watched = running;
    bool going_on;
    if (!call_pause(L, "begin", 0)) return lua_error(L);
    if (lua_isboolean(L, 1)) return 1;                     /* true means that the script cannot be paused now */
    if (lua_isstring(L, 1)) {                              /* The string is the reason why this script can never be
                                                            * paused. Ctrl-C then stops it. */
        luaL_where(L, 1);
        lua_pushfstring(L, "%sinterrupted! (%s)", lua_tostring(L, -1), lua_tostring(L, 1));
        return lua_error(L);
    }
    sigaction(SIGINT, NULL, &before);
    let_hooks_run(L);
    going_on = repl_run(L, NULL, true, REPL_PAUSED);       /* this empties the stack of this frame */
    sigaction(SIGINT, &before, NULL);
    running = watched;
    count = 0;
    lua_settop(L, 0);
    if (!call_pause(L, "finish", 0)) return lua_error(L);
    if (going_on) return 0;
    luaL_where(L, 1);
    lua_pushfstring(L, "%saborted at the prompt", lua_tostring(L, -1));
    return lua_error(L);
}

static const char *source;                /* source of the function that was last passed to is_own */
static bool source_is_own;                /* result of is_own for this source. The result is kept because most
                                           * instructions belong to the same function as the previous instruction. */

/* Returns true if the running function belongs to psluajit. */
static bool is_own(lua_State *L, lua_Debug *ar)
{
    if (!lua_getinfo(L, "S", ar)) return true;
    if (ar->source == source) return source_is_own;
    lua_pushstring(L, ar->source);
    source_is_own = !call_pause(L, "is_own", 1) || lua_toboolean(L, -1);
    lua_pop(L, 1);
    source = ar->source;
    return source_is_own;
}

static void pause_hook(lua_State *L, lua_Debug *ar)
{
    bool later;
    if (ar->event != LUA_HOOKCOUNT || is_own(L, ar)) return;
    lua_sethook(L, NULL, 0, 0);
    lua_pushcfunction(L, pause_here);
    lua_call(L, 0, 1);
    later = lua_toboolean(L, -1);
    lua_pop(L, 1);
    source = NULL;
    if (later) lua_sethook(L, pause_hook, LUA_MASKCOUNT, 1);
}
