-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit tools/check_layers.lua [ROOT]: who may include whom (ARCHITECTURE.md). Prints breaches; exit code 1 if there
-- are any. A row: files whose path fits `of` may name only what fits a pattern; the first row that fits counts, if any.
local RULES = {
  { of = "src/base/", "base/", "ps%.h$", "ps_test%.h$" },
  { of = "src/backend/backend%.h$", "base/", "backend/wire%.h$" },
  { of = "src/backend/%w+%.c$", "base/", "ps%.h$", "backend/backend%.h$" },
  { of = "src/backend/ref/", "base/", "backend/backend%.h$", "backend/ref/", "ops%.def$" },
  { of = "src/backend/cuda", "base/", "ps_cdef%.h$", "backend/backend%.h$", "backend/dims%.h$", "backend/cuda",
    "ops%.def$" },
  { of = "src/backend/", "base/", "ps%.h$", "ps_test%.h$", "backend/backend%.h$", "backend/dims%.h$", "backend/cpu/" },
  { of = "src/mem/", "base/", "backend/backend%.h$", "mem/" },
  { of = "src/offload/", "base/", "backend/backend%.h$", "mem/", "offload/" },
  { of = "src/chunk/", "base/", "backend/backend%.h$", "mem/", "chunk/", "ps_test%.h$" },
  { of = "src/zero/", "base/", "backend/backend%.h$", "mem/mem%.h$", "chunk/chunk%.h$", "tensor/tensor%.h$",
    "comm/group%.h$", "engine/zero_table%.h$", "zero/", "ps%.h$" },
  { of = "src/tensor/", "base/", "mem/mem%.h$", "offload/offload%.h$", "tensor/", "ops%.def$" },
  { of = "src/ops/", "base/", "tensor/optable%.h$" },
  { of = "src/grad/", "base/", "tensor/" },
  { of = "src/engine/", "base/", "mem/mem%.h$", "chunk/chunk%.h$", "tensor/", "engine/" },
  { of = "src/io/", "base/", "io/", "ps%.h$", "ps_test%.h$" },
  { of = "src/data/", "base/", "io/file%.h$", "data/", "ps%.h$" },
  { of = "src/comm/op%.c$", "base/", "tensor/", "comm/" },
  { of = "src/comm/collective%.c$", "base/", "tensor/", "comm/", "ps_test%.h$" },
  { of = "src/comm/connect%.c$", "base/", "tensor/", "comm/" },
  { of = "src/comm/", "base/", "backend/backend%.h$", "backend/wire%.h$", "comm/", "ps%.h$" },
  { of = "lua/ps/caller%.lua", "ps%.paths$", "ps%.nearest$" },
  { of = "lua/ps/hooks%.lua" },
  { of = "lua/ps/ffi%.lua", "ps%.cdef$", "ps%.ops_generated$", "ps%.caller$", "ps%.hooks$" },
  { of = "lua/ps/array%.lua", "ps%.caller$" },
  { of = "lua/ps/scope%.lua", "ps%.ffi$", "ps%.array$", "ps%.hooks$" },
  { of = "lua/ps/create%.lua", "ps%.ffi$", "ps%.scope$", "ps%.array$" },
  { of = "lua/ps/tensor_math%.lua", "ps%.ffi$", "ps%.scope$", "ps%.create$" },
  { of = "lua/ps/tensor%.lua", "ps%.ffi$", "ps%.scope$", "ps%.create$", "ps%.tensor_math$", "ps%.pretty$",
    "ps%.array$" },
  { of = "lua/ps/functional%.lua", "ps%.ffi$", "ps%.tensor$" },
  { of = "lua/ps/nn/", "ps$", "ps%.caller$", "ps%.hooks$", "ps%.nn", "ps%.optim$" },
  { of = "lua/", "ps", "posix%." },                                 -- the library knows no model, example or tool
  { of = "models/", "ps", "models%." },
}
local function allowed(path, name)
  for _, rule in ipairs(RULES) do
    if path:match("^" .. rule.of) then
      for _, pattern in ipairs(rule) do if name:match("^" .. pattern) then return true end end
      return false
    end
  end
  return true
end
local root, breaches = arg[1] or ".", 0
for path in assert(io.popen(("cd '%s' && find src lua models -name '*.[chl]*'"):format(root))):lines() do
  local text, lua = assert(io.open(root .. "/" .. path)):read("*a"), path:match("%.lua$")
  for name in ("\n" .. text):gmatch(lua and 'require[ (]+"([pm][^"]+)"' or '\n#include "([^"]+)"') do
    local beside = lua and name or (path:match("^src/(.*/)") or "") .. name    -- an include may name a neighbour
    if not allowed(path, name) and (name:find("/") or not allowed(path, beside)) then
      print(("%s names %s, which its layer may not"):format(path, name))
      breaches = breaches + 1
    end
  end
end
os.exit(breaches == 0 and 0 or 1)
