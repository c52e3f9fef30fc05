/* SPDX-License-Identifier: BSD-3-Clause */
/* The Lua modules that belong to the program, found by name. */
#include <lauxlib.h>
#include <stdio.h>
#include "modules.h"

static bool there;

void program_has_modules(bool has) { there = has; }

bool program_require(lua_State *L, const char *module)
{
    if (!there) return false;
    lua_getglobal(L, "require");
    lua_pushstring(L, module);
    if (lua_pcall(L, 1, 1, 0) == 0 && lua_istable(L, -1)) return true;
    const char *why = lua_tostring(L, -1);
    fprintf(stderr, "psluajit: %s cannot be loaded: %s\n", module, why ? why : "it is no table");
    lua_pop(L, 1);
    return false;
}

void program_hint(lua_State *L, const char *text, size_t n)
{
    int message = lua_gettop(L);
    if (!lua_isstring(L, message) || !program_require(L, MODULE_HABITS)) return;
    lua_getfield(L, -1, "hinted");
    lua_pushvalue(L, message);
    if (text) lua_pushlstring(L, text, n);
    else lua_pushnil(L);
    if (lua_pcall(L, 2, 1, 0) == 0 && lua_isstring(L, -1)) lua_replace(L, message);
    lua_settop(L, message);
}
