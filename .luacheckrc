-- luacheck's settings: LuaJIT's globals, busted's in the specs; nothing else may be global.
std = "luajit"
max_line_length = 120
self = false                     -- methods that do not use self are fine
cache = false
files["spec/*/*_spec.lua"] = { std = "+busted" }
exclude_files = { "build*" }
