/* SPDX-License-Identifier: BSD-3-Clause
 * The prompt. It reads statements, runs them, and prints the values of expressions. This file owns the line editor,
 * the history, and the state between two lines of one statement. Lua code (ps.pretty, ps.prompt.complete) formats
 * values and finds the completions of TAB. Without these Lua files the prompt still works, but it does not format or
 * complete.
 * Only main.c calls this file. repl_run raises no error.
 *
 * A statement that the user types is interpreted and not compiled, because compiled loops do not notice Ctrl-C.
 * Functions that the statement defines or calls are compiled as usual. */
#include <errno.h>
#include <histedit.h>
#include <langinfo.h>
#include <lauxlib.h>
#include <limits.h>
#include <locale.h>
#include <luajit.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

#include "interrupt.h"
#include "modules.h"
#include "repl.h"

enum { HISTORY_LINES = 2000 };

struct repl {
    lua_State *L;
    EditLine *el;                /* NULL if lines are read without the line editor */
    History *history;
    char history_path[PATH_MAX]; /* path of the history file, empty if no history is kept */
    char prompt[80];
    char *line;                  /* buffer of getline, used without the line editor */
    size_t line_size;
    repl_mode mode;
    int environment;             /* environment of statements: a registry reference, or LUA_NOREF for the globals */
    bool keeps;                  /* true if the loaded chunk ends with a call of its argument, which is keep_locals */
    int pretty, complete;        /* registry references of the functions format of ps.pretty and tab of
                                  * ps.prompt.complete, or LUA_NOREF */
};

/* -- signals at the prompt --------------------------------------------------------------------------------------- */

static volatile sig_atomic_t interrupted, resized, continued;

static void on_signal(int sig)
{
    if (sig == SIGINT) interrupted = 1;
    else if (sig == SIGWINCH) resized = 1;
    else continued = 1;
}

static void catch_signal(int sig)
{
    struct sigaction act = { .sa_handler = on_signal };   /* no SA_RESTART: the signal must interrupt a read */
    sigemptyset(&act.sa_mask);
    sigaction(sig, &act, NULL);
}

/* -- reading a line ---------------------------------------------------------------------------------------------- */

/* Reads one byte from the terminal. Returns 1 for a byte, 0 at the end of input, or -1 if the read was interrupted.
 * If the terminal's size has changed, or if the process has returned to the foreground, redraws the line and
 * continues to read. */
static int get_byte(EditLine *el, unsigned char *out)
{
    for (;;) {
        ssize_t n = read(STDIN_FILENO, out, 1);
        if (n >= 0) return (int)n;
        if (errno != EINTR || interrupted) {
            const LineInfo *info = el_line(el);
            el_cursor(el, (int)(info->lastchar - info->cursor));
            el_set(el, EL_REFRESH);
            return -1;
        }
        if (resized) resized = 0, el_resize(el);
        if (continued) {
            continued = 0;
            el_set(el, EL_PREP_TERM, 1);
            el_set(el, EL_REFRESH);
        }
    }
}

/* Reads one character. A byte that is invalid in the terminal's encoding is returned as a character. */
static int get_char(EditLine *el, wchar_t *out)
{
    mbstate_t state;
    unsigned char byte, first = 0;
    memset(&state, 0, sizeof state);
    for (int i = 0;; i++) {
        int n = get_byte(el, &byte);
        size_t used;
        if (n <= 0) return n;
        if (i == 0) first = byte;
        used = mbrtowc(out, (const char *)&byte, 1, &state);
        if (used == (size_t)-2) continue;
        if (used == (size_t)-1) *out = first;
        else if (used == 0) *out = 0;
        return 1;
    }
}

static char *get_prompt(EditLine *el)
{
    struct repl *r;
    el_get(el, EL_CLIENTDATA, &r);
    return r->prompt;
}

/* Sets the prompt. As in luajit, the user can set the globals _PROMPT and _PROMPT2. */
static void set_prompt(struct repl *r, bool first)
{
    const char *text;
    lua_pushstring(r->L, first ? "_PROMPT" : "_PROMPT2");
    lua_rawget(r->L, LUA_GLOBALSINDEX);
    text = lua_tostring(r->L, -1);
    snprintf(r->prompt, sizeof r->prompt, "%s", text ? text : first ? "> " : ">> ");
    lua_pop(r->L, 1);
}

/* Returns the next line with its newline. The line is valid until the next call. Returns NULL at the end of input.
 * After Ctrl-C, also returns NULL and sets `interrupted`. */
static const char *read_line(struct repl *r, bool first)
{
    ssize_t n;
    set_prompt(r, first);
    fflush(stdout);
    if (r->el) {
        int count = 0;
        const char *text;
        interrupted = 0;
        el_resize(r->el);
        catch_signal(SIGINT), catch_signal(SIGWINCH), catch_signal(SIGCONT);
        text = el_gets(r->el, &count);
        signal(SIGWINCH, SIG_DFL), signal(SIGCONT, SIG_DFL);     /* on_signal handles SIGINT until the statement runs */
        if (text && count > 0) return text;
        if (interrupted) fputs("^C\n", stdout);
        return NULL;
    }
    fputs(r->prompt, stdout);
    fflush(stdout);
    n = getline(&r->line, &r->line_size, stdin);
    return n > 0 ? r->line : NULL;
}

/* -- history: a plain text file; each line is appended to it as soon as the user enters the line ----------------- */

/* Makes the folders above the file `path`. If this fails, opening the file will also fail and report it. */
static void make_folders(char *path)
{
    for (char *s = strchr(path + 1, '/'); s; s = strchr(s + 1, '/')) {
        *s = 0;
        mkdir(path, 0700);
        *s = '/';
    }
}

static void set_history_path(struct repl *r)
{
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    int n;
    if (state && state[0] == '/') n = snprintf(r->history_path, PATH_MAX, "%s/psluajit/history", state);
    else if (home && home[0] == '/') n = snprintf(r->history_path, PATH_MAX, "%s/.local/state/psluajit/history", home);
    else return;
    if (n >= PATH_MAX) r->history_path[0] = 0;
    else make_folders(r->history_path);
}

/* Reads the history. If the file has more than twice HISTORY_LINES lines, it is rewritten with its last lines. */
static void load_history(struct repl *r)
{
    HistEvent ev;
    FILE *f = r->history_path[0] ? fopen(r->history_path, "r") : NULL;
    long lines = 0;
    if (!f) return;
    while (getline(&r->line, &r->line_size, f) > 0) {
        r->line[strcspn(r->line, "\n")] = 0;
        if (r->line[0]) history(r->history, &ev, H_ENTER, r->line);
        lines++;
    }
    fclose(f);
    if (lines <= 2 * HISTORY_LINES) return;
    if (!(f = fopen(r->history_path, "w"))) return;
    for (int ok = history(r->history, &ev, H_LAST); ok >= 0; ok = history(r->history, &ev, H_PREV)) {
        fprintf(f, "%.*s\n", (int)strcspn(ev.str, "\n"), ev.str);
    }
    fclose(f);
}

/* Adds the first line of a text to the history, and appends it to the history file. */
static void remember(struct repl *r, const char *text)
{
    HistEvent ev;
    FILE *f;
    size_t length = strcspn(text, "\n");
    char *copy;
    if (!r->el || strspn(text, " \t\n") == strlen(text)) return;
    if ((copy = strndup(text, length))) history(r->history, &ev, H_ENTER, copy);
    free(copy);
    if (!r->history_path[0] || !(f = fopen(r->history_path, "a"))) return;
    fchmod(fileno(f), 0600);
    fprintf(f, "%.*s\n", (int)length, text);
    fclose(f);
}

/* -- TAB --------------------------------------------------------------------------------------------------------- */

static int terminal_columns(void)
{
    struct winsize size;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col ? size.ws_col : 80;
}

/* Completes the text before the cursor. Calls complete.tab(text, columns, environment), which returns the text to
 * insert and the text to show below the line. */
static unsigned char on_tab(EditLine *el, int ch)
{
    struct repl *r;
    lua_State *L;
    unsigned char result = CC_REFRESH_BEEP;
    const LineInfo *info = el_line(el);
    int top;
    (void)ch;
    el_get(el, EL_CLIENTDATA, &r);
    L = r->L;
    top = lua_gettop(L);
    /* TAB before the first character of a line inserts indentation. This happens when code is pasted. */
    if (strspn(info->buffer, " \t") >= (size_t)(info->cursor - info->buffer)) {
        el_insertstr(el, "  ");
        return CC_REFRESH;
    }
    if (r->complete == LUA_NOREF) return CC_REFRESH_BEEP;
    lua_rawgeti(L, LUA_REGISTRYINDEX, r->complete);
    lua_pushlstring(L, info->buffer, (size_t)(info->cursor - info->buffer));
    lua_pushinteger(L, terminal_columns());
    if (r->environment != LUA_NOREF) lua_rawgeti(L, LUA_REGISTRYINDEX, r->environment);
    else lua_pushnil(L);
    if (program_call(L, 3, 2) == 0) {
        const char *insert = lua_tostring(L, -2), *listing = lua_tostring(L, -1);
        if (insert && *insert) {
            el_insertstr(el, insert);
            result = CC_REFRESH;
        }
        if (listing) {
            printf("\n%s\n", listing);
            fflush(stdout);
            result = CC_REDISPLAY;
        }
    }
    lua_settop(L, top);
    return result;
}

static void open_editor(struct repl *r)
{
    static const char *const keys[][2] = {
        { "^I", "ps-complete" }, { "^R", "em-inc-search-prev" }, { "^W", "ed-delete-prev-word" },
        { "\\e[3~", "ed-delete-next-char" }, { "\\e[1~", "ed-move-to-beg" }, { "\\e[4~", "ed-move-to-end" },
        { "\\e[H", "ed-move-to-beg" }, { "\\e[F", "ed-move-to-end" }, { "\\eOH", "ed-move-to-beg" },
        { "\\eOF", "ed-move-to-end" }, { "\\e[1;5C", "em-next-word" }, { "\\e[1;5D", "ed-prev-word" },
    };
    HistEvent ev;
    setlocale(LC_CTYPE, "");
    if (strcmp(nl_langinfo(CODESET), "UTF-8") != 0) setlocale(LC_CTYPE, "C.UTF-8");
    if (!(r->history = history_init())) return;
    if (!(r->el = el_init("psluajit", stdin, stdout, stderr))) {
        history_end(r->history);
        return;
    }
    history(r->history, &ev, H_SETSIZE, HISTORY_LINES);
    history(r->history, &ev, H_SETUNIQUE, 1);
    set_history_path(r);
    load_history(r);
    el_set(r->el, EL_CLIENTDATA, r);
    el_set(r->el, EL_SIGNAL, 0);
    el_set(r->el, EL_EDITOR, "emacs");
    el_set(r->el, EL_PROMPT, get_prompt);
    el_set(r->el, EL_HIST, history, r->history);
    el_set(r->el, EL_GETCFN, get_char);
    el_set(r->el, EL_ADDFN, "ps-complete", "complete names, fields and methods", on_tab);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) el_set(r->el, EL_BIND, keys[i][0], keys[i][1], NULL);
    el_source(r->el, NULL);
}

static void close_editor(struct repl *r)
{
    if (r->el) {
        signal(SIGINT, SIG_DFL);
        el_end(r->el);
        history_end(r->history);
    }
    free(r->line);
}

/* -- evaluation -------------------------------------------------------------------------------------------------- */

/* Returns whether the message at a stack index reports that the text ended too early. */
static bool is_incomplete(lua_State *L, int status, int index)
{
    static const char mark[] = "'<eof>'";
    size_t n, m = sizeof mark - 1;
    const char *text = lua_tolstring(L, index, &n);
    return status == LUA_ERRSYNTAX && text && n >= m && strcmp(text + n - m, mark) == 0;
}

/* Copies the local variables of the calling statement into the environment, which is the upvalue of this function. A
 * statement calls it at its end, so that the next statement can use the variables. The user can therefore paste a
 * script line by line. */
static int keep_locals(lua_State *L)
{
    lua_Debug caller;
    const char *name;
    if (!lua_getstack(L, 1, &caller)) return 0;
    for (int i = 1; (name = lua_getlocal(L, &caller, i)); i++) {
        if (name[0] == '(') {                                      /* the value has no name */
            lua_pop(L, 1);
            continue;
        }
        lua_pushstring(L, name);
        lua_insert(L, -2);
        lua_rawset(L, lua_upvalueindex(1));
    }
    return 0;
}

/* Loads a statement of n bytes. Adds a call of keep_locals at the statement's end, unless the statement ends with
 * `return`. */
static int load_statement(struct repl *r, const char *text, size_t n)
{
    lua_State *L = r->L;
    int status = luaL_loadbuffer(L, text, n, "=stdin");
    if (status) return status;
    lua_pushlstring(L, text, n);
    lua_pushliteral(L, "\n;(...)()");
    lua_concat(L, 2);
    r->keeps = luaL_loadbuffer(L, lua_tostring(L, -1), lua_objlen(L, -1), "=stdin") == 0;
    lua_remove(L, -2);
    lua_remove(L, r->keeps ? -2 : -1);
    return 0;
}

/* Loads the text at the top of the stack, which is an expression or a statement. Replaces the text by a function or
 * by an error message. */
static int load_text(struct repl *r)
{
    lua_State *L = r->L;
    size_t n;
    const char *text = lua_tolstring(L, -1, &n), *s = text + strspn(text, " \t\n");
    int status;
    r->keeps = false;
    lua_pushfstring(L, "return %s", *s == '=' ? s + 1 : text);
    status = luaL_loadbuffer(L, lua_tostring(L, -1), lua_objlen(L, -1), "=stdin");
    lua_remove(L, -2);
    if (status && *s != '=') {
        int expression = status;
        status = load_statement(r, text, n);
        if (status && is_incomplete(L, expression, -2)) status = expression, lua_pop(L, 1);  /* such as "1 +" */
        else lua_remove(L, -2);
    }
    lua_remove(L, -2);
    if (!status) luaJIT_setmode(L, -1, LUAJIT_MODE_FUNC | LUAJIT_MODE_OFF);
    if (!status && r->environment != LUA_NOREF) {
        lua_rawgeti(L, LUA_REGISTRYINDEX, r->environment);
        lua_setfenv(L, -2);
    }
    return status;
}

enum { ENDED = -1, CONTINUED = -2, ABORTED = -3 };

/* Returns whether the line consists of this word, with optional blanks and semicolons. */
static bool is_word(const char *line, const char *word)
{
    size_t n = strlen(word);
    line += strspn(line, " \t");
    return strncmp(line, word, n) == 0 && line[n + strspn(line + n, " \t\r\n;")] == 0;
}

/* Returns the statement that a line abbreviates, such as "?" for help. Returns NULL if the line is a statement
 * itself. */
static const char *stands_for(const char *line)
{
    if (is_word(line, "?") || is_word(line, "help")) return "help()";
    return NULL;
}

/* Returns whether a line ends the prompt. The lines "exit", "quit", "exit()" and "quit()" end the prompt. If the user
 * has given the name `exit` or `quit` a value, a line with this name does not end the prompt. */
static bool leaves(struct repl *r, const char *line)
{
    static const char *const words[][2] = { { "exit", "exit()" }, { "quit", "quit()" } };
    lua_State *L = r->L;
    bool found = false;
    for (size_t i = 0; i < sizeof words / sizeof *words && !found; i++) {
        if (!is_word(line, words[i][0]) && !is_word(line, words[i][1])) continue;
        if (r->environment != LUA_NOREF) lua_rawgeti(L, LUA_REGISTRYINDEX, r->environment);
        else lua_pushvalue(L, LUA_GLOBALSINDEX);
        lua_getfield(L, -1, words[i][0]);
        found = lua_isnil(L, -1);
        lua_pop(L, 2);
    }
    return found;
}

/* Removes a prompt from the begin of the line, so that the user can paste a listing that contains prompts. No
 * statement begins with ">". */
static const char *without_prompt(const char *line, bool first)
{
    size_t n = first ? 1 : 2;
    const char *s = line + strspn(line, " \t");
    return strncmp(s, first ? "> " : ">> ", n + 1) == 0 ? s + n + 1 : line;
}

/* Reads lines until they form a statement, and loads the statement. Returns 0 with a function on the stack, an error
 * status with a message on the stack, or ENDED at the end of input. In a pause, returns CONTINUED for the word
 * "continue" and ABORTED for the word "abort". */
static int read_statement(struct repl *r)
{
    lua_State *L = r->L;
    bool pasted = false;                     /* true if the first line of the statement began with a prompt */
    lua_settop(L, 0);
    for (;;) {
        bool first = lua_gettop(L) == 0;
        const char *line = read_line(r, first), *typed = line;
        int status;
        if (!line) {
            lua_settop(L, 0);
            if (!interrupted) return ENDED;
            interrupted = 0;
            continue;
        }
        if (first || pasted) line = without_prompt(line, first);
        if (first) pasted = line != typed;
        remember(r, line);
        if (first && r->mode == REPL_PAUSED && is_word(line, "continue")) return CONTINUED;
        if (first && r->mode == REPL_PAUSED && is_word(line, "abort")) return ABORTED;
        if (first && leaves(r, line)) {
            if (r->mode != REPL_PAUSED) return ENDED;
            puts("continue resumes the script, abort raises an error in it");
            continue;
        }
        if (first && stands_for(line)) line = stands_for(line);
        lua_pushlstring(L, line, strcspn(line, "\n"));
        if (!first) {
            lua_pushliteral(L, "\n");
            lua_insert(L, -2);
            lua_concat(L, 3);
        }
        if (first && strspn(line, " \t\n") == strlen(line)) {
            lua_settop(L, 0);
            continue;
        }
        lua_pushvalue(L, 1);
        status = load_text(r);
        if (!is_incomplete(L, status, -1)) {
            size_t n;
            const char *text = lua_tolstring(L, 1, &n);
            if (status) program_hint(L, text, n);
            lua_remove(L, 1);
            return status;
        }
        lua_settop(L, 1);
    }
}

/* Prints the message at the top of the stack, with its traceback. Frames below the statement's own frame are left
 * out. */
static void print_error(lua_State *L)
{
    static const char title[] = "\nstack traceback:";
    const char *text = lua_tostring(L, -1), *trace, *end, *next;
    if (!text) text = no_text;
    end = text + strlen(text);
    trace = strstr(text, title);
    if (trace) {
        const char *statement = NULL;
        next = strstr(trace, "\n\t[C]: at 0x");
        if (next) end = next;                                           /* frame from which C code called the
                                                                         * statement */
        for (next = trace; (next = strstr(next + 1, "\n\tstdin:"));) statement = next;
        if (statement && (next = strstr(statement, "in main chunk"))) end = next + strlen("in main chunk");
        next = trace + strlen(title);                                  /* a traceback of one frame is not printed */
        if (end <= next || !memchr(next + 1, '\n', (size_t)(end - next - 1))) end = trace;
    }
    fflush(stdout);
    fprintf(stderr, "%.*s\n", (int)(end - text), text);
    fflush(stderr);
    lua_pop(L, 1);
}

/* Prints the `count` values at the top of the stack, one value per line. */
static int print_values(struct repl *r, int count)
{
    lua_State *L = r->L;
    int first = lua_gettop(L) - count + 1;
    const char *wish = getenv("NO_COLOR");              /* no-color.org: colors are off if NO_COLOR is set and not
                                                         * empty */
    bool no_color = wish && *wish;
    for (int i = first; i < first + count; i++) {
        if (r->pretty != LUA_NOREF) {
            lua_rawgeti(L, LUA_REGISTRYINDEX, r->pretty);
            lua_pushvalue(L, i);
            lua_newtable(L);
            lua_pushinteger(L, r->el ? terminal_columns() : 80);
            lua_setfield(L, -2, "width");
            lua_pushboolean(L, r->el && !no_color);
            lua_setfield(L, -2, "color");
            if (program_call(L, 2, 1)) return 1;
        } else {
            lua_pushliteral(L, "tostring");
            lua_rawget(L, LUA_GLOBALSINDEX);
            lua_pushvalue(L, i);
            if (program_call(L, 1, 1)) return 1;
        }
        if (lua_isstring(L, -1)) puts(lua_tostring(L, -1));
        lua_pop(L, 1);
    }
    return 0;
}

static void run_statement(struct repl *r)
{
    lua_State *L = r->L;
    int status;
    if (r->keeps) {
        if (r->environment != LUA_NOREF) lua_rawgeti(L, LUA_REGISTRYINDEX, r->environment);
        else lua_pushvalue(L, LUA_GLOBALSINDEX);
        lua_pushcclosure(L, keep_locals, 1);
    }
    status = program_call(L, r->keeps ? 1 : 0, LUA_MULTRET);
    if (!status && lua_gettop(L) > 0) {
        luaL_checkstack(L, LUA_MINSTACK, "too many results to print");
        status = print_values(r, lua_gettop(L));
    }
    if (status) print_error(L);
}

/* -- the loop ---------------------------------------------------------------------------------------------------- */

/* Returns a registry reference to function `name` of module `module`, or LUA_NOREF if there is no such module. */
static int find_function(lua_State *L, const char *module, const char *name)
{
    int ref = LUA_NOREF, top = lua_gettop(L);
    if (program_require(L, module)) {
        lua_getfield(L, -1, name);
        if (lua_isfunction(L, -1)) ref = luaL_ref(L, LUA_REGISTRYINDEX);
    }
    lua_settop(L, top);
    return ref;
}

/* Lua code that makes `ps` and `help` globals, and returns the part of the banner that describes the device. */
static const char start_text[] =
    "local ok, ps = pcall(require, 'ps')\n"
    "if not ok then return 'ps is not available: ' .. tostring(ps):match('^[^\\n]*') end\n"
    "rawset(_G, 'ps', ps)\n"
    "if rawget(_G, 'help') == nil then rawset(_G, 'help', ps.help) end\n"
    "local F = package.loaded['" MODULE_FFI "']\n"
    "return F and F.ffi.string(F.C.ps_device_describe(F.ctx, 0)) or ''\n";

static void print_banner(struct repl *r, const char *version, bool greets)
{
    lua_State *L = r->L;
    const char *device = "";
    if (luaL_loadbuffer(L, start_text, sizeof start_text - 1, "=start") == 0 && program_call(L, 0, 1) == 0 &&
        lua_isstring(L, -1)) {
        device = lua_tostring(L, -1);
    }
    printf("psluajit %s (%s) %s\n", version, LUAJIT_VERSION, device);
    if (greets)
        fputs("Three things to try:\n"
              "  ps.randn { 2, 3 }:softmax(1)           computes\n"
              "  help \"gelu\"                            shows what a function does\n"
              "  psluajit new text DIR                  in a shell: writes a project that trains a model\n", stdout);
    lua_settop(L, 0);
}

/* Returns a registry reference to an environment that contains a script's variables, or LUA_NOREF. */
static int environment_of(lua_State *L, const char *module)
{
    int ref = LUA_NOREF, make = find_function(L, module, "environment");
    if (make == LUA_NOREF) return LUA_NOREF;
    lua_rawgeti(L, LUA_REGISTRYINDEX, make);
    luaL_unref(L, LUA_REGISTRYINDEX, make);
    if (program_call(L, 0, 1) == 0 && lua_istable(L, -1)) ref = luaL_ref(L, LUA_REGISTRYINDEX);
    lua_settop(L, 0);
    return ref;
}

bool repl_run(lua_State *L, const char *version, bool interactive, repl_mode mode)
{
    struct repl r = { .L = L, .mode = mode, .environment = LUA_NOREF };
    bool before = interrupt_at_prompt;
    int status;
    interrupt_at_prompt = true;
    lua_settop(L, 0);
    if (mode != REPL_PAUSED) print_banner(&r, version, interactive && mode == REPL_ALONE);
    if (mode != REPL_ALONE) r.environment = environment_of(L, mode == REPL_PAUSED ? MODULE_PAUSE : MODULE_LOCALS);
    r.pretty = find_function(L, MODULE_PRETTY, "format");
    r.complete = find_function(L, MODULE_COMPLETE, "tab");
    if (interactive) open_editor(&r);
    while ((status = read_statement(&r)) >= 0) {
        if (status) print_error(L);
        else run_statement(&r);
        lua_settop(L, 0);
    }
    if (status == ENDED) fputs("\n", stdout);
    fflush(stdout);
    close_editor(&r);
    luaL_unref(L, LUA_REGISTRYINDEX, r.environment);
    luaL_unref(L, LUA_REGISTRYINDEX, r.pretty);
    luaL_unref(L, LUA_REGISTRYINDEX, r.complete);
    interrupt_at_prompt = before;
    return status != ABORTED;
}
