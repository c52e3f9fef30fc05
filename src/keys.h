/* SPDX-License-Identifier: BSD-3-Clause */
/* Implements require "ps.keys", which ps.core.caller uses to check the keys of tables. */
#ifndef PS_KEYS_H
#define PS_KEYS_H
#include <lua.h>

int keys_load(lua_State *L);
#endif
