/* SPDX-License-Identifier: BSD-3-Clause
 * Checks of the keys of Lua tables, for the arguments of functions that run in a loop. These checks are in C because
 * LuaJIT does not compile a loop over `next`, while a compiled loop can call a C function. */
#include "keys.h"
#include <lauxlib.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

/* keys.stray(t): returns a key of a table that is not one of 1, 2, ... #t, or nil if there is no such key. The
 * function calls no metamethods. For a list of modules it can therefore return the name of a field. */
static int stray(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    double n = (double)lua_objlen(L, 1);
    for (lua_pushnil(L); lua_next(L, 1); lua_pop(L, 1)) {
        double key = lua_type(L, -2) == LUA_TNUMBER ? lua_tonumber(L, -2) : 0;
        if (key >= 1 && key <= n && key == floor(key)) continue;
        lua_settop(L, 2);
        return 1;
    }
    lua_pushnil(L);
    return 1;
}

/* Returns whether the value at the top of the stack has the kind `kind`, which is a Lua type or "whole". */
static bool fits(lua_State *L, const char *kind)
{
    if (strcmp(kind, luaL_typename(L, -1)) == 0) return true;
    if (strcmp(kind, "whole") != 0 || lua_type(L, -1) != LUA_TNUMBER) return false;
    double value = lua_tonumber(L, -1);
    return value == floor(value) && !isinf(value);
}

/* keys.known(options, kinds): returns true if `kinds` contains the name of each option and the option's value has the
 * kind that `kinds` names. Some kinds can be checked only in Lua. For these kinds the function returns false. */
static int known(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_settop(L, 2);
    bool all = !lua_getmetatable(L, 1);
    lua_settop(L, 2);
    for (lua_pushnil(L); all && lua_next(L, 1); lua_pop(L, 1)) {
        lua_pushvalue(L, 3);
        lua_rawget(L, 2);
        const char *kind = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : NULL;
        lua_pop(L, 1);
        all = kind && fits(L, kind);
    }
    lua_pushboolean(L, all);
    return 1;
}

int keys_load(lua_State *L)
{
    static const luaL_Reg functions[] = { { "stray", stray }, { "known", known }, { NULL, NULL } };
    lua_newtable(L);
    luaL_setfuncs(L, functions, 0);
    return 1;
}
