/* SPDX-License-Identifier: BSD-3-Clause */
/* Implements require "ps.keys": checks of the keys of tables, for ps.core.caller. */
#ifndef PS_KEYS_H
#define PS_KEYS_H
#include <lua.h>

int keys_load(lua_State *L);
#endif
