/* SPDX-License-Identifier: BSD-3-Clause
 * psluajit, the program. It is a LuaJIT interpreter that behaves like `luajit` (options, arg, exit codes, LUA_INIT)
 * and that also finds the Lua half of the engine. The program owns the lua_State. Whenever the process ends in an
 * ordinary way, including os.exit, the program closes the state so that finalizers run. This file uses one process
 * and one thread.
 *
 * The folder that contains the Lua files is called ROOT. It is found from the path of the executable. ROOT is the
 * first of the following folders that exists:
 *   a folder named in the file `psluajit.root` next to the executable, by an absolute path or relative to that file;
 *   the folder above the executable's folder, if the executable is in build/ in the source tree;
 *   the data folder of an installation. */
#include <errno.h>
#include <fcntl.h>
#include <lauxlib.h>
#include <limits.h>
#include <lua.h>
#include <luajit.h>
#include <lualib.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/cpu/threads.h"
#include "interrupt.h"
#include "io/map_fault.h"
#include "keys.h"
#include "last_error.h"
#include "modules.h"
#include "ps.h"
#include "ps_cdef.h"
#include "ps_commit.h"
#include "repl.h"

#ifndef PS_VERSION
#define PS_VERSION "unknown"
#endif
#ifndef PS_DATA_FROM_BIN
#define PS_DATA_FROM_BIN "../share/psluajit"
#endif

const char *ps_version(void) { return PS_VERSION; }
const char *ps_abi_hash(void) { return ps_cdef_hash; }

/* -- the command line --------------------------------------------------------------------------------------------- */

struct program {
    int argc;
    char **argv;
    const char *name;            /* program name, which precedes messages */
    int script;                  /* index of the script in argv, or argc if there is no script */
    const char *wrong;           /* the last option that parse_options read */
    bool show_help, show_version, show_build, interactive, no_env, executes, bytecode, stdin_script;
    bool dry_run;                /* --dry-run was given; the remaining arguments are passed to tools/plan.lua */
    bool pauses;                 /* true if Ctrl-C pauses the script */
    char exe[PATH_MAX];          /* path of the running binary, empty if unknown */
    char gen[PATH_MAX];          /* folder of generated Lua files in a build tree, empty if installed */
    char root[PATH_MAX];         /* path of ROOT, empty if it was not found */
    bool installed;
    int status;                  /* exit status */
};

static void message(const struct program *p, const char *text)
{
    fflush(stdout);
    if (p->name) fprintf(stderr, "%s: ", p->name);
    fprintf(stderr, "%s\n", text);
    fflush(stderr);
}

static void print_usage(const struct program *p, FILE *f)
{
    fprintf(f, "usage: %s [options]... [script [args]...].\n", p->name ? p->name : "psluajit");
    fputs("Available options are:\n"
          "  -e chunk  Execute string 'chunk'.\n  -l name   Require library 'name'.\n"
          "  -b ...    Save or list bytecode.\n  -j cmd    Perform LuaJIT control command.\n"
          "  -O[opt]   Control LuaJIT optimizations.\n"
          "  -i        Enter interactive mode after executing 'script', or at its error.\n"
          "  -v        Show version information; --version shows the commit and libraries, too.\n"
          "  -E        Ignore environment variables.\n"
          "  --dry-run [--hardware NAME] script [args]...\n"
          "            Print what the script's first step needs, without computing it.\n"
          "  --        Stop handling options.\n  -         Execute stdin and stop handling options.\n"
          "  --help    Show this text.\nAlone on a terminal it is a prompt: TAB completes, Ctrl-C interrupts, Ctrl-D "
          "or exit leaves.\nCtrl-C pauses a script that runs on a terminal, and opens a prompt with its variables:\n"
          "continue resumes it, abort raises an error in it.\n"
          "A script that is not found from the current folder is looked up in psluajit's own\n"
          "examples, tools and root folder, where NAME stands for NAME.lua: `psluajit tools` and\n"
          "`psluajit examples` list them. `psluajit new text DIR` writes a small project.\n"
          "require \"ps\" is there without any path set.\n"
          "Tracebacks show the script's functions; PS_TRACEBACK=all shows psluajit's own as well.\n", f);
}

/* Prints the version. If `build` is true, also prints the commit, the compiler and the libraries. */
static void print_version(bool build)
{
    printf("psluajit %s -- %s\n", PS_VERSION, LUAJIT_VERSION);
    if (!build) return;
    printf("commit %s, compiled by %s\n", PS_COMMIT, PS_COMPILER);
    printf("libraries: %s\n", PS_LIBRARIES);
}

/* -- protected calls ----------------------------------------------------------------------------------------------- */

/* Passes the message at index 1 through a function of lua/ps/core/caller.lua.
 *   "at": if the message begins with a position in psluajit's own Lua files, replaces this position by a position in
 *   the script.
 *   "trace": removes the frames of psluajit's own files from a traceback.
 *   "described": turns an error that is not a string into a text. */
static void by_caller(lua_State *L, const char *function)
{
    luaL_findtable(L, LUA_REGISTRYINDEX, "_LOADED", 1);
    lua_getfield(L, -1, MODULE_CALLER);
    if (lua_istable(L, -1)) {
        lua_getfield(L, -1, function);
        lua_pushvalue(L, 1);
        if (lua_pcall(L, 1, 1, 0) == 0 && lua_isstring(L, -1)) lua_replace(L, 1);
    }
    lua_settop(L, 1);
}

static bool keeps_locals;        /* true if a script runs and a prompt will open when the script fails */

/* Records the script's variables (lua/ps/prompt/locals.lua) while the script's frames still exist. The error stays at
 * index 1. */
static void keep_locals(lua_State *L)
{
    if (program_require(L, MODULE_LOCALS)) {
        lua_getfield(L, -1, "keep_at_error");
        lua_pushvalue(L, 1);
        lua_pcall(L, 1, 0, 0);
    }
    lua_settop(L, 1);
}

/* The floor: a Lua function that is below all other functions on the stack. It calls its first argument with all its
 * arguments. When LuaJIT abandons a trace, it searches the stack downwards for a Lua function. LuaJIT needs this
 * function for its trace event, to which lua/ps/core/ffi.lua listens. The search does not stop at the end of the
 * stack. If a script or a statement ends in a tail call of a C function, the floor is the only Lua function on the
 * stack. */
static const char floor_text[] = "(...)(...)", floor_name[] = "=(psluajit)";
static const char floor_frame[] = "\n\t(psluajit):";

/* Removes the floor's frame and all frames below it from the traceback at the top of the stack. */
static void hide_floor(lua_State *L)
{
    const char *text = lua_tostring(L, -1), *at = strstr(text, floor_frame);
    if (!at) return;
    lua_pushlstring(L, text, (size_t)(at - text));
    lua_remove(L, -2);
}

/* Removes the floor's position from the message at the top of the stack. The message contains this position if the
 * last statement of a script is a tail call of a function that raises an error, because the tail call removes the
 * script's own line from the stack. */
static void hide_floor_position(lua_State *L)
{
    const char *text = lua_tostring(L, -1), *position = floor_frame + 2;
    size_t n = strlen(position);
    if (strncmp(text, position, n) != 0) return;
    for (text += n; *text >= '0' && *text <= '9'; text++) {}
    lua_pushstring(L, strncmp(text, ": ", 2) == 0 ? text + 2 : text);
    lua_replace(L, -2);
}

const char no_text[] = "(error object is not a string)";

/* Turns the error object into a message with a traceback. An object that has no text is not changed. */
static int traceback(lua_State *L)
{
    if (keeps_locals) keep_locals(L);
    if (!lua_isstring(L, 1)) {
        if (luaL_callmeta(L, 1, "__tostring") && lua_isstring(L, -1)) {
            lua_replace(L, 1);
            lua_settop(L, 1);
        } else {
            lua_settop(L, 1);
            program_require(L, MODULE_PRETTY);                     /* needed if the script has not loaded ps */
            lua_settop(L, 1);
            by_caller(L, "described");
        }
        if (!lua_isstring(L, 1)) return 1;
    }
    by_caller(L, "at");
    hide_floor_position(L);
    luaL_traceback(L, L, lua_tostring(L, 1), 1);
    hide_floor(L);
    lua_replace(L, 1);
    by_caller(L, "trace");
    program_hint(L, NULL, 0);
    return 1;
}

int program_call(lua_State *L, int nargs, int nresults)
{
    int base = lua_gettop(L) - nargs, status;
    interrupt_watch was;
    lua_pushcfunction(L, traceback);
    lua_insert(L, base);
    interrupt_begin(L, &was);
    status = lua_pcall(L, nargs, nresults, base);
    interrupt_end(L, &was);
    lua_remove(L, base);
    return status;
}

/* Prints an error that ends the program, and pops its message. Notifies ranks that wait for this rank. Returns
 * `status`. */
static int report(const struct program *p, lua_State *L, int status)
{
    if (status) {
        const char *text = lua_tostring(L, -1);
        if (!text) text = no_text;
        last_error(p->name, text);
        ps_groups_end(text);
        lua_pop(L, 1);
    }
    return status;
}

/* -- paths ------------------------------------------------------------------------------------------------------- */

static bool is_file(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && !S_ISDIR(st.st_mode);
}

/* Joins two paths into out[PATH_MAX]. Returns false if the result does not fit. */
static bool join(char *out, const char *folder, const char *name)
{
    int n = snprintf(out, PATH_MAX, "%s/%s", folder, name);
    return n > 0 && n < PATH_MAX;
}

/* Sets ROOT to `folder` if it contains the Lua files. Otherwise returns false. */
static bool take_root(struct program *p, const char *folder)
{
    char probe[PATH_MAX];
    if (!join(probe, folder, "lua/ps/init.lua") || !is_file(probe)) return false;
    return realpath(folder, p->root) != NULL;
}

static void find_paths(struct program *p)
{
    char dir[PATH_MAX], path[PATH_MAX], line[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", p->exe, sizeof p->exe - 1);
    char *slash;
    FILE *f;
    p->exe[n > 0 ? n : 0] = 0;
    snprintf(dir, sizeof dir, "%s", p->exe);
    if (!(slash = strrchr(dir, '/'))) return;
    *slash = 0;
    if (join(path, dir, "gen/ops.lua") && is_file(path)) join(p->gen, dir, "gen");
    if (join(path, dir, "psluajit.root") && (f = fopen(path, "r"))) {
        bool taken = false;
        while (!taken && fgets(line, sizeof line, f)) {
            line[strcspn(line, "\r\n")] = 0;
            if (line[0] == '/') taken = take_root(p, line);
            else taken = line[0] && join(path, dir, line) && take_root(p, path);
        }
        fclose(f);
        if (taken) return;
    }
    if (join(path, dir, "..") && take_root(p, path)) return;
    if (join(path, dir, PS_DATA_FROM_BIN) && take_root(p, path)) p->installed = true;
}

/* Implements require "ps.paths", a table { root, exe, gen, installed, version, pauses, interprets }. root and gen are
 * nil if they do not exist. pauses is true if Ctrl-C pauses the script. interprets is true if all of the script's
 * functions are interpreted and none is compiled. */
static int load_paths(lua_State *L)
{
    const struct program *p = lua_touserdata(L, lua_upvalueindex(1));
    lua_newtable(L);
    if (p->root[0]) lua_pushstring(L, p->root), lua_setfield(L, -2, "root");
    if (p->exe[0]) lua_pushstring(L, p->exe), lua_setfield(L, -2, "exe");
    if (p->gen[0]) lua_pushstring(L, p->gen), lua_setfield(L, -2, "gen");
    lua_pushboolean(L, p->installed), lua_setfield(L, -2, "installed");
    lua_pushliteral(L, PS_VERSION), lua_setfield(L, -2, "version");
    lua_pushboolean(L, p->pauses), lua_setfield(L, -2, "pauses");
    lua_pushboolean(L, p->interactive && p->script < p->argc), lua_setfield(L, -2, "interprets");
    return 1;
}

/* Implements require "ps.cdef", a table { text, hash } of the C API with which this binary was built. */
static int load_cdef(lua_State *L)
{
    lua_newtable(L);
    lua_pushlstring(L, ps_cdef_text, sizeof ps_cdef_text - 1), lua_setfield(L, -2, "text");
    lua_pushstring(L, ps_cdef_hash), lua_setfield(L, -2, "hash");
    return 1;
}

/* Implements require "ps.ops_generated". Returns the path of gen/ops.lua in a build tree, or the path of the
 * installed copy of that file. */
static int load_ops(lua_State *L)
{
    const struct program *p = lua_touserdata(L, lua_upvalueindex(1));
    if (p->gen[0]) lua_pushfstring(L, "%s/ops.lua", p->gen);
    else lua_pushfstring(L, "%s/lua/ps/ops.lua", p->root);
    return 1;
}

static void add_preload(lua_State *L, struct program *p, const char *name, lua_CFunction loader)
{
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "preload");
    lua_pushlightuserdata(L, p);
    lua_pushcclosure(L, loader, 1);
    lua_setfield(L, -2, name);
    lua_pop(L, 2);
}

/* Sets package.path. The engine's own modules are first, so that a file in the current folder cannot replace them.
 * The folders models, examples and tools are last, so that a user's file with the same name as one of their files is
 * found first. */
static void set_package_path(lua_State *L, const struct program *p)
{
    const char *path;
    if (!p->root[0]) return;
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "path");
    path = lua_tostring(L, -1);
    lua_pushfstring(L, "%s/lua/?.lua;%s/lua/?/init.lua;%s;%s/?.lua", p->root, p->root, path ? path : "", p->root);
    if (p->gen[0]) lua_pushfstring(L, ";%s/?.lua", p->gen), lua_concat(L, 2);
    lua_setfield(L, -3, "path");
    lua_pop(L, 2);
}

/* The last function of package.loaders. If a module does not exist, it adds the most similar module name to the
 * error. */
static int suggest_module(lua_State *L)
{
    luaL_checkstring(L, 1);
    lua_settop(L, 1);
    if (!program_require(L, MODULE_SCRIPTS)) return 0;
    lua_getfield(L, -1, "instead_of_module");
    lua_pushvalue(L, 1);
    return lua_pcall(L, 1, 1, 0) == 0;
}

static void add_suggestions(lua_State *L)
{
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "loaders");
    lua_pushcfunction(L, suggest_module);
    lua_rawseti(L, -2, (int)lua_objlen(L, -2) + 1);
    lua_pop(L, 2);
}

/* Replaces some of Lua's functions before the first line of the script runs. The new functions for lists also support
 * lists of modules. The functions that make coroutines are replaced as well. */
static void load_replacements(lua_State *L)
{
    int top = lua_gettop(L);
    program_require(L, MODULE_LISTS);
    program_require(L, MODULE_COROUTINES);
    lua_settop(L, top);
}

static const char no_checkpoint[] = "its checkpoint could not be completed";

/* Waits until a checkpoint that is being written in the background is complete. Must be called before the process
 * ends. Returns false if writing the checkpoint failed. */
static bool finish_checkpoint(lua_State *L, bool failed)
{
    bool ok = true;
    int top = lua_gettop(L);
    lua_getfield(L, LUA_REGISTRYINDEX, "_LOADED");
    lua_getfield(L, -1, MODULE_CHECKPOINTS);
    if (lua_istable(L, -1)) {
        lua_getfield(L, -1, "at_exit");
        lua_pushboolean(L, failed);
        if (lua_isfunction(L, -2)) ok = lua_pcall(L, 1, 1, 0) == 0 && lua_isnil(L, -1);
        if (!ok) {
            const char *text = lua_tostring(L, -1);
            last_error("psluajit", text ? text : no_checkpoint);
        }
    }
    lua_settop(L, top);
    return ok;
}

/* Waits until exchanges of device memory with other ranks are finished. Must be called before a normal end of the
 * process. If an exchange failed, the reason is sent to the other ranks and printed on stderr, and the result is
 * false. */
static bool finish_exchanges(void)
{
    char why[1000];
    if (ps_groups_settle() == 0) return true;
    snprintf(why, sizeof why, "%s", ps_error_message());
    last_error("psluajit", why);
    ps_groups_end(why);
    return false;
}

/* Implements os.exit(code, close). Unless the caller passes false, close is true, so that finalizers run. Notifies
 * the other ranks. */
static int os_exit(lua_State *L)
{
    char why[64];
    int code = lua_isboolean(L, 1) ? !lua_toboolean(L, 1) : (int)lua_tointeger(L, 1);
    snprintf(why, sizeof why, "it called os.exit(%d); its own output may say why", code);
    if (code) ps_groups_end(why);
    lua_settop(L, 2);
    if (lua_isnil(L, 1)) lua_pushboolean(L, 1), lua_replace(L, 1);
    if (lua_isnil(L, 2)) lua_pushboolean(L, 1), lua_replace(L, 2);
    bool whole = code || finish_exchanges();
    bool saved = !lua_toboolean(L, 2) || finish_checkpoint(L, code != 0 || !whole);
    if (!code && whole) ps_groups_end(saved ? NULL : no_checkpoint);
    if (!code && !(whole && saved)) lua_pushboolean(L, 0), lua_replace(L, 1);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, 2, 0);
    return 0;
}

static void wrap_os_exit(lua_State *L)
{
    lua_getglobal(L, "os");
    lua_getfield(L, -1, "exit");
    lua_pushcclosure(L, os_exit, 1);
    lua_setfield(L, -2, "exit");
    lua_pop(L, 1);
}

/* -- options ----------------------------------------------------------------------------------------------------- */

/* Lua code for LuaJIT's own options. It is in Lua because the options need LuaJIT's jit.* modules, which are in Lua.
 * The arguments are the option's letter and text (-j, -O), or "b" and the arguments of jit.bcsave. The code uses tail
 * calls, so that error messages do not contain line numbers of this code. */
static const char jit_options[] =
    "local kind, text = ...\n"
    "local function module(name)\n"
    "  local ok, m = pcall(require, 'jit.' .. name)\n"
    "  if ok and type(m) == 'table' and m.start then return m.start end\n"
    "  error('unknown luaJIT command or jit.* modules not installed', 0)\n"
    "end\n"
    "if kind == 'b' then return module('bcsave')(select(2, ...)) end\n"
    "local start, list\n"
    "if kind == 'O' then\n"
    "  start, list = module('opt'), text\n"
    "else\n"
    "  local name, rest = text:match('^([^=]*)=?(.*)$')\n"
    "  start, list = jit[name], rest\n"
    "  if type(start) ~= 'function' then start = module(name) end\n"
    "end\n"
    "local args = {}\n"
    "for a in list:gmatch('[^,]+') do args[#args + 1] = a end\n"
    "return start(unpack(args))\n";

static int run_jit_option(struct program *p, lua_State *L, const char *kind, int argc, char **argv)
{
    int status = luaL_loadbuffer(L, jit_options, sizeof jit_options - 1, "=options");
    if (!status) {
        lua_pushstring(L, kind);
        for (int i = 0; i < argc; i++) lua_pushstring(L, argv[i]);
        status = lua_pcall(L, 1 + argc, 0, 0);
    }
    return report(p, L, status);
}

static int run_loaded(struct program *p, lua_State *L, int status)
{
    if (!status) status = program_call(L, 0, 0);
    return report(p, L, status);
}

static int run_string(struct program *p, lua_State *L, const char *text, const char *name)
{
    int status = luaL_loadbuffer(L, text, strlen(text), name);
    if (status) program_hint(L, text, strlen(text));
    return run_loaded(p, L, status);
}

static int run_require(struct program *p, lua_State *L, const char *name)
{
    lua_getglobal(L, "require");
    lua_pushstring(L, name);
    return report(p, L, program_call(L, 1, 0));
}

/* Separates the options from the script, and sets p->script. Returns false if an option is not valid. The text of an
 * option is the rest of the option's word. If the rest is empty, the text is the next word, except for -O. */
static bool parse_options(struct program *p)
{
    int i;
    for (i = 1; i < p->argc; i++) {
        const char *a = p->wrong = p->argv[i];
        if (a[0] != '-') break;
        if (a[1] == 0) {
            p->stdin_script = true;
            break;
        }
        if (strcmp(a, "--") == 0) {
            i++;
            break;
        }
        if (strcmp(a, "--dry-run") == 0) {
            p->dry_run = true;
            break;
        }
        if (strcmp(a, "--help") == 0) p->show_help = true;
        else if (strcmp(a, "--version") == 0) p->show_version = p->show_build = true;
        else if (strcmp(a, "-v") == 0) p->show_version = true;
        else if (strcmp(a, "-i") == 0) p->interactive = true;
        else if (strcmp(a, "-E") == 0) p->no_env = true;
        else if (strchr("ejl", a[1])) {
            if (a[1] == 'e') p->executes = true;
            if (a[2] == 0 && ++i >= p->argc) return false;
        } else if (a[1] == 'b') {
            if (i != 1) return false;
            p->bytecode = p->executes = true;
            break;
        } else if (a[1] != 'O') return false;
    }
    p->script = i;
    return true;
}

/* Runs the options -e, -j, -l and -O in the order of the command line. Stops at the first failure. */
static int run_options(struct program *p, lua_State *L)
{
    for (int i = 1; i < p->script; i++) {
        char *a = p->argv[i], *text;
        int status = 0;
        if (a[0] != '-' || !strchr("ejlO", a[1])) continue;
        text = a + 2;
        if (*text == 0 && a[1] != 'O') text = p->argv[++i];
        if (a[1] == 'e') status = run_string(p, L, text, "=(command line)");
        else if (a[1] == 'l') status = run_require(p, L, text);
        else status = run_jit_option(p, L, a[1] == 'j' ? "j" : "O", 1, &text);
        if (status) return status;
    }
    return 0;
}

/* Runs the option -b. The other words of the command line are passed to jit.bcsave. */
static int run_bytecode(struct program *p, lua_State *L)
{
    int first = 2;
    if (p->argv[1][2]) {
        p->argv[1][1] = '-';                 /* -bl means -b -l */
        p->argv[1]++;
        first = 1;
    }
    return run_jit_option(p, L, "b", p->argc - first, p->argv + first);
}

static int run_init(struct program *p, lua_State *L)
{
    const char *init = getenv("LUA_INIT");
    if (!init || !*init) return 0;
    if (init[0] == '@') return run_loaded(p, L, luaL_loadfile(L, init + 1));
    return run_string(p, L, init, "=LUA_INIT");
}

/* -- the script -------------------------------------------------------------------------------------------------- */

/* Appends the name of the most similar script (lua/ps/prompt/scripts.lua) to the message at the top of the stack, if
 * a name is similar enough. */
static void add_nearest(lua_State *L, const char *name)
{
    int message = lua_gettop(L);
    if (program_require(L, MODULE_SCRIPTS)) {
        lua_getfield(L, -1, "instead");
        lua_pushstring(L, name);
        if (lua_pcall(L, 1, 1, 0) == 0 && lua_isstring(L, -1)) {
            lua_pushvalue(L, message);
            lua_insert(L, -2);
            lua_concat(L, 2);
            lua_replace(L, message);
        }
    }
    lua_settop(L, message);
}

static bool is_bare(const char *name) { return !strpbrk(name, "./"); }

/* Pushes and returns the path of script `name` in one of psluajit's own folders. In these folders, a name without a
 * folder and without an extension means NAME.lua, as in `psluajit chat`. */
enum { PLACES = 3 };
static const char *push_own_path(const struct program *p, lua_State *L, const char *name, int place)
{
    static const char *const places[PLACES] = { "/examples/", "/tools/", "/" };
    return lua_pushfstring(L, "%s%s%s%s", p->root, places[place], name, is_bare(name) ? ".lua" : "");
}

/* Finds the path of script `name`. If a file with this name exists, the path is the name itself. Otherwise the path
 * is in the first of the folders ROOT/examples, ROOT/tools and ROOT that contains the script. A name that starts with
 * / or . is not searched for in these folders. Pushes the path, or pushes a message and returns false. */
static bool push_script_path(const struct program *p, lua_State *L, const char *name)
{
    int err;
    lua_pushstring(L, name);
    if (p->dry_run) {
        lua_pushfstring(L, "%s/tools/plan.lua", p->root);
        return true;
    }
    if (is_file(name)) return true;
    err = access(name, F_OK) == 0 ? EISDIR : errno;
    lua_pushfstring(L, "cannot open %s: %s", name, strerror(err));
    if (p->root[0] && name[0] != '/' && name[0] != '.') {
        lua_pushfstring(L, "\n  looked for %s in the current folder", name);
        lua_concat(L, 2);
        for (int i = 0; i < PLACES; i++) {
            const char *path = push_own_path(p, L, name, i);
            if (is_file(path)) return true;
            lua_pushfstring(L, ",\n  and %s", path);
            lua_remove(L, -2);
            lua_concat(L, 2);
        }
    }
    add_nearest(L, name);
    return false;
}

/* Sets the global `arg`. The script has index 0, its arguments have positive indices, and the program and its options
 * have negative indices. */
static void set_arg(lua_State *L, const struct program *p, const char *script)
{
    lua_createtable(L, p->argc - p->script, p->script);
    for (int i = 0; i < p->argc; i++) {
        lua_pushstring(L, i == p->script ? script : p->argv[i]);
        lua_rawseti(L, -2, i - p->script);
    }
    lua_setglobal(L, "arg");
}

/* Returns whether Ctrl-C may pause a script. Ctrl-C may pause scripts on a terminal, but not psluajit's own tools. */
static bool may_pause(const struct program *p, const char *path)
{
    char tools[PATH_MAX], real[PATH_MAX];
    if (p->dry_run || !path || !p->root[0] || !isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO)) return false;
    if (!join(tools, p->root, "tools/") || !realpath(path, real)) return false;
    return strncmp(real, tools, strlen(tools)) != 0;
}

/* If psluajit has a script of its own with the script's name, adds a sentence about it to the syntax error at the top
 * of the stack. For example, the user's file "data" may contain data and not a script. */
static void add_hidden(const struct program *p, lua_State *L)
{
    const char *name = p->argv[p->script];
    if (!p->root[0] || !is_bare(name)) return;
    for (int i = 0; i < PLACES; i++) {
        bool found = is_file(push_own_path(p, L, name, i));
        lua_pop(L, 1);
        if (!found) continue;
        lua_pushfstring(L, "\n  '%s' is a file in the current folder; psluajit's own script is %s.lua", name, name);
        lua_concat(L, 2);
        return;
    }
}

/* Runs the script. Sets *ran to true if the script was read and has run. If a prompt will open when the script fails,
 * the script's functions are interpreted. If they were compiled, the prompt would show old values of their
 * variables. */
static int run_script(struct program *p, lua_State *L, const char *path, bool *ran)
{
    int nargs = p->argc - p->script - 1, status = luaL_loadfile(L, path);
    *ran = !status;
    if (status == LUA_ERRSYNTAX) program_hint(L, NULL, 0);
    if (status == LUA_ERRSYNTAX && path) add_hidden(p, L);
    if (!status) {
        keeps_locals = p->interactive;
        if (keeps_locals) luaJIT_setmode(L, -1, LUAJIT_MODE_ALLFUNC | LUAJIT_MODE_OFF);
        luaL_checkstack(L, nargs + 3, "too many arguments to the script");
        for (int i = 1; i <= nargs; i++) lua_pushstring(L, p->argv[p->script + i]);
        interrupt_pauses = p->pauses;
        status = program_call(L, nargs, 0);
        interrupt_pauses = false;
        keeps_locals = false;
    }
    return report(p, L, status);
}

static int run_program(struct program *p, lua_State *L)
{
    const char *script = p->script < p->argc ? p->argv[p->script] : NULL;
    bool terminal = isatty(STDIN_FILENO), found = true, ran = false, failed = false;
    const char *error = NULL;
    if (script && !p->stdin_script) {
        found = push_script_path(p, L, script);
        if (found) script = lua_tostring(L, -1);
        else error = lua_tostring(L, -1);
    }
    p->pauses = script && !p->stdin_script && may_pause(p, script);
    set_arg(L, p, script);
    if (!p->no_env && run_init(p, L)) return 1;
    if (p->show_version) print_version(p->show_build);
    if (run_options(p, L)) return 1;
    if (!found) {
        last_error(p->name, error);
        return 1;
    }
    if (script && run_script(p, L, p->stdin_script ? NULL : script, &ran)) {
        if (!p->interactive || !ran || p->stdin_script) return 1;
        failed = true;
    }
    if (p->interactive || (!script && !p->executes && !p->show_version && terminal)) {
        repl_run(L, PS_VERSION, terminal && isatty(STDOUT_FILENO), failed ? REPL_AT_ERROR : REPL_ALONE);
    } else if (!script && !p->executes && !p->show_version) {
        return run_loaded(p, L, luaL_loadfile(L, NULL)) ? 1 : 0;
    }
    return failed;
}

static int protected_main(lua_State *L)
{
    struct program *p = lua_touserdata(L, 2);
    lua_settop(L, 0);
    if (p->no_env) lua_pushboolean(L, 1), lua_setfield(L, LUA_REGISTRYINDEX, "LUA_NOENV");
    lua_gc(L, LUA_GCSTOP, 0);
    luaL_openlibs(L);
    lua_gc(L, LUA_GCRESTART, -1);
    wrap_os_exit(L);
    set_package_path(L, p);
    program_has_modules(p->root[0] != 0);
    add_preload(L, p, "ps.paths", load_paths);
    add_preload(L, p, "ps.cdef", load_cdef);
    add_preload(L, p, "ps.ops_generated", load_ops);
    add_preload(L, p, "ps.keys", keys_load);
    load_replacements(L);
    add_suggestions(L);
    p->status = p->bytecode ? run_bytecode(p, L) != 0 : run_program(p, L);
    if (p->status == 0 && !finish_exchanges()) p->status = 1;
    if (!finish_checkpoint(L, p->status != 0)) {
        ps_groups_end(no_checkpoint);
        p->status = 1;
    }
    return 0;
}

/* Opens /dev/null in place of stdin, stdout and stderr if the program was started with these descriptors closed.
 * Otherwise files that the program opens later would get these descriptors, and its output would be written into
 * these files. Returns false if no file can be opened. */
static bool open_stdio(void)
{
    int fd;
    do {
        fd = open("/dev/null", O_RDWR);
        if (fd < 0) fd = open("/", O_RDONLY);       /* If /dev does not exist, reads and writes of this descriptor
                                                     * fail, which is sufficient. */
    } while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0) close(fd);
    return fd >= 0 || fcntl(STDERR_FILENO, F_GETFD) >= 0;
}

/* Called at exit, after finalizers have printed. If output could not be written, the program exits with a failure. */
static void check_stdout(void)
{
    errno = 0;
    bool lost = fflush(stdout) != 0, known = lost && errno;
    if (!lost && !ferror(stdout)) return;
    fprintf(stderr, "psluajit: not all of the output could be written to stdout%s%s\n", known ? ": " : "",
            known ? strerror(errno) : "");
    _exit(EXIT_FAILURE);
}

/* Calls protected_main with the floor below it on the stack. */
static int on_floor(lua_State *L)
{
    if (luaL_loadbuffer(L, floor_text, sizeof floor_text - 1, floor_name)) return lua_error(L);
    lua_pushcfunction(L, protected_main);
    lua_pushvalue(L, 1);
    lua_call(L, 2, 0);
    return 0;
}

/* Returns the last part of the error message about the wrong option `w`. It names the option that the user probably
 * meant. */
static const char *meant(const char *w)
{
    if (strncmp(w, "--hardware", 10) == 0) return " without --dry-run before it";
    if (strncmp(w, "--v", 3) == 0) return "; did you mean '--version'?";
    if (strncmp(w, "--h", 3) == 0) return "; did you mean '--help'?";
    return strncmp(w, "--d", 3) == 0 ? "; did you mean '--dry-run'?" : "";
}

int main(int argc, char **argv)
{
    /* The struct is static because Lua closures point to it until the process ends. */
    static struct program p;
    lua_State *L;
    int status;
    if (!open_stdio()) return EXIT_FAILURE;
    ps_threads_start(argv);
    atexit(check_stdout);
    p.argc = argc;
    p.argv = argv;
    p.name = argc > 0 && argv[0][0] ? argv[0] : "psluajit";
    ps_map_fault_install(p.name);
    if (!parse_options(&p)) {
        print_usage(&p, stderr);
        const char *w = p.wrong, *why = w[1] == 'b' ? "must be the first option"
                                        : w[1] && strchr("ejl", w[1]) ? "needs a value" : "does not exist";
        fprintf(stderr, "%s: the option '%s' %s%s\n", p.name, w, why, why[0] == 'd' ? meant(w) : "");
        return EXIT_FAILURE;
    }
    if (p.show_help) {
        print_usage(&p, stdout);
        return EXIT_SUCCESS;
    }
    find_paths(&p);
    if (!(L = luaL_newstate())) {
        message(&p, "cannot create state: not enough memory");
        return EXIT_FAILURE;
    }
    status = lua_cpcall(L, on_floor, &p);
    report(&p, L, status);
    lua_close(L);
    return status || p.status ? EXIT_FAILURE : EXIT_SUCCESS;
}
