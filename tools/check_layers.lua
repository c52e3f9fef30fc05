-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit tools/check_layers.lua [ROOT [BUILD]]: who may know whom (ARCHITECTURE.md). Prints breaches; exit code 1 if
-- there are any. RULES looks at the names in the sources: includes and requires. With BUILD, a build folder, LINKS
-- looks at the objects in it: a function that an object calls counts, however its declaration came into the file.

-- A row: files whose path fits `of` may name only what fits a pattern; the first row that fits counts, if any.
local RULES = {
  { of = "src/base/", "base/", "ps%.h$", "ps_test%.h$" },
  { of = "src/backend/backend%.h$", "base/", "backend/wire%.h$" },
  { of = "src/backend/%w+%.c$", "base/", "ps%.h$", "backend/backend%.h$" },
  { of = "src/backend/ref/", "base/", "backend/backend%.h$", "backend/ref/", "ops%.def$" },
  { of = "src/backend/cuda", "base/", "ps_cdef%.h$", "backend/backend%.h$", "backend/dims%.h$", "backend/cuda",
    "ops%.def$" },
  { of = "src/backend/pretend/", "base/", "backend/backend%.h$", "backend/cuda_rules%.h$" },
  { of = "src/backend/sim/", "base/", "backend/backend%.h$", "backend/cpu/cpu%.h$", "backend/sim/" },
  { of = "src/backend/", "base/", "ps%.h$", "ps_test%.h$", "backend/backend%.h$", "backend/dims%.h$", "backend/cpu/" },
  { of = "src/mem/", "base/", "backend/backend%.h$", "mem/" },
  { of = "src/offload/", "base/", "backend/backend%.h$", "mem/", "offload/" },
  { of = "src/chunk/", "base/", "backend/backend%.h$", "mem/", "chunk/", "ps_test%.h$" },
  { of = "src/zero/", "base/", "backend/backend%.h$", "mem/mem%.h$", "chunk/chunk%.h$", "tensor/tensor%.h$",
    "comm/group%.h$", "collectives/collectives%.h$", "engine/zero_table%.h$", "zero/", "ps%.h$" },
  { of = "src/pipe/wire%.c$", "base/", "pipe/", "p2p/p2p%.h$" },
  { of = "src/pipe/ranks%.c$", "base/", "collectives/collectives%.h$", "engine/zero_table%.h$" },
  { of = "src/pipe/exec%.c$", "base/", "pipe/", "tensor/tensor%.h$", "tensor/replay%.h$" },
  { of = "src/pipe/", "base/", "pipe/", "ps%.h$" },
  { of = "src/tensor/", "base/", "mem/mem%.h$", "offload/offload%.h$", "tensor/", "ops%.def$" },
  { of = "src/ops/", "base/", "tensor/optable%.h$" },
  { of = "src/grad/", "base/", "tensor/", "grad/" },
  { of = "src/engine/", "base/", "mem/mem%.h$", "chunk/chunk%.h$", "tensor/", "engine/" },
  { of = "src/io/", "base/", "io/", "ps%.h$", "ps_test%.h$" },
  { of = "src/data/", "base/", "io/file%.h$", "data/", "ps%.h$" },
  { of = "src/rendezvous/", "base/", "rendezvous/", "ps%.h$" },
  { of = "src/transport/", "base/", "backend/backend%.h$", "backend/wire%.h$", "rendezvous/store%.h$",
    "rendezvous/watch%.h$", "transport/", "ps%.h$" },
  { of = "src/comm/", "base/", "rendezvous/watch%.h$", "transport/transport%.h$", "comm/", "ps%.h$" },
  { of = "src/collectives/", "base/", "tensor/", "comm/group%.h$", "collectives/", "ps_test%.h$" },
  { of = "src/p2p/", "base/", "backend/backend%.h$", "rendezvous/watch%.h$", "transport/line%.h$", "tensor/",
    "collectives/collectives%.h$", "p2p/", "ps%.h$" },
  { of = "src/tensor_parallel/ranks%.c$", "base/", "collectives/collectives%.h$", "engine/zero_table%.h$" },
  { of = "src/tensor_parallel/", "base/", "tensor/", "collectives/collectives%.h$", "tensor_parallel/" },
  { of = "src/groups%.c$", "base/", "tensor/tensor%.h$", "tensor_parallel/ops%.h$" },
  { of = "lua/ps/caller%.lua", "ps%.paths$", "ps%.nearest$", "ps%.pretty$" },      -- pretty: to show an error value
  { of = "lua/ps/hooks%.lua" },
  { of = "lua/ps/exact%.lua", "ps%.caller$" },
  { of = "lua/ps/rectangles%.lua" },
  { of = "lua/ps/declared%.lua", "ps%.cdef$" },
  { of = "lua/ps/ffi%.lua", "ps%.cdef$", "ps%.declared$", "ps%.ops_generated$", "ps%.caller$", "ps%.hooks$" },
  { of = "lua/ps/array%.lua", "ps%.caller$" },
  { of = "lua/ps/scope%.lua", "ps%.ffi$", "ps%.array$", "ps%.hooks$" },
  { of = "lua/ps/create%.lua", "ps%.ffi$", "ps%.scope$", "ps%.array$" },
  { of = "lua/ps/tensor_math%.lua", "ps%.ffi$", "ps%.scope$", "ps%.create$" },
  { of = "lua/ps/tensor_index%.lua", "ps%.ffi$", "ps%.scope$", "ps%.create$" },
  { of = "lua/ps/tensor%.lua", "ps%.ffi$", "ps%.scope$", "ps%.create$", "ps%.tensor_math$", "ps%.tensor_index$",
    "ps%.pretty$", "ps%.array$", "ps%.exact$", "ps%.hooks$" },
  { of = "lua/ps/tensor_composed%.lua", "ps%.ffi$", "ps%.scope$", "ps%.create$", "ps%.tensor$" },
  { of = "lua/ps/losses%.lua", "ps%.ffi$", "ps%.tensor$", "ps%.scope$" },
  { of = "lua/ps/functional%.lua", "ps%.ffi$", "ps%.tensor$", "ps%.losses$", "ps%.hooks$" },
  { of = "lua/ps/nn/", "ps$", "ps%.caller$", "ps%.exact$", "ps%.hooks$", "ps%.lists$", "ps%.rectangles$",
    "ps%.mesh$", "ps%.nn", "ps%.optim$", "ps%.engine%.handle$" },     -- handle: a model's module, and no engine
  { of = "lua/", "ps", "posix%." },                                 -- the library knows no model, example or tool
  { of = "models/", "ps", "models%." },
}
-- A row: objects of the sources whose path fits `of` may use symbols only of their own folder and of those that fit.
-- The first row that fits counts, and every source has one.
local LINKS = {
  { of = "src/base/" },
  { of = "src/backend/registry%.c$", "src/base/", "src/backend/" },
  { of = "src/backend/cpu/", "src/base/", "src/backend/[%w_]+%.c$", "src/backend/cpu/" },
  { of = "src/backend/sim/", "src/base/", "src/backend/[%w_]+%.c$", "src/backend/cpu/" },
  { of = "src/backend/", "src/base/", "src/backend/[%w_]+%.c$" },
  { of = "src/mem/", "src/base/", "src/backend/" },
  { of = "src/offload/", "src/base/", "src/mem/" },
  { of = "src/chunk/", "src/base/", "src/backend/host%.c$" },
  { of = "src/tensor/", "src/base/", "src/backend/registry%.c$", "src/mem/", "src/offload/", "src/ops/", "src/grad/" },
  { of = "src/ops/", "src/base/", "src/tensor/", "src/grad/" },
  { of = "src/grad/", "src/base/", "src/tensor/", "src/offload/", "src/ops/rules%.c$" },
  { of = "src/engine/", "src/base/", "src/chunk/", "src/tensor/", "src/grad/", "src/ops/rules%.c$" },
  { of = "src/zero/", "src/base/", "src/chunk/", "src/tensor/", "src/comm/", "src/collectives/", "src/engine/" },
  { of = "src/pipe/wire%.c$", "src/base/", "src/comm/comm%.c$", "src/p2p/" },
  { of = "src/pipe/ranks%.c$", "src/base/", "src/tensor/", "src/comm/", "src/collectives/", "src/engine/" },
  { of = "src/pipe/exec%.c$", "src/base/", "src/tensor/", "src/grad/", "src/engine/step%.c$" },
  { of = "src/pipe/", "src/base/" },
  { of = "src/io/", "src/base/" },
  { of = "src/data/", "src/base/", "src/io/" },
  { of = "src/rendezvous/", "src/base/" },
  { of = "src/transport/", "src/base/", "src/rendezvous/" },
  { of = "src/comm/", "src/base/", "src/rendezvous/watch%.c$" },
  { of = "src/collectives/", "src/base/", "src/transport/wired%.c$", "src/tensor/", "src/comm/" },
  { of = "src/p2p/", "src/base/", "src/rendezvous/watch%.c$", "src/transport/line%.c$", "src/tensor/", "src/comm/",
    "src/collectives/" },
  { of = "src/tensor_parallel/ranks%.c$", "src/base/", "src/tensor/", "src/comm/", "src/collectives/", "src/engine/" },
  { of = "src/tensor_parallel/", "src/base/", "src/tensor/", "src/comm/", "src/collectives/" },
  { of = "src/groups%.c$", "src/base/", "src/transport/", "src/collectives/", "src/tensor_parallel/op%.c$" },
  { of = "src/api%.c$", "src/base/", "src/backend/registry%.c$", "src/tensor/" },
  { of = "src/abi%.c$" },
  { of = "src/main%.c$", "src/" },
  { of = "src/repl%.c$", "src/base/", "src/main%.c$", "src/interrupt%.c$" },
  { of = "src/interrupt%.c$", "src/repl%.c$" },
}
-- Libraries that one file alone knows: what its symbols begin with, and that file.
local LIBRARIES = { dnnl_ = "src/backend/cpu/onednn.c", io_uring_ = "src/chunk/disk.c",
  crypto_ = "src/rendezvous/proof.c", sodium_ = "src/rendezvous/proof.c" }

local function allowed(path, name)
  for _, rule in ipairs(RULES) do
    if path:match("^" .. rule.of) then
      for _, pattern in ipairs(rule) do if name:match("^" .. pattern) then return true end end
      return false
    end
  end
  return true
end
local root, build, breaches = arg[1] or ".", arg[2], 0
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
--- The symbols that objects of the program define and use. Objects whose source was moved or removed stay in a build
--- folder and do not count.
---@param folder string of the build
---@return table<string, string> defined symbol to source
---@return {[1]: string, [2]: string}[] used source and symbol
local function symbols(folder)
  local defined, used, exists = {}, {}, {}
  local nm = assert(io.popen(("cd '%s/CMakeFiles' && find ps_engine.dir ps_simd_*.dir psluajit.dir -name '*.o' "
    .. "2>/dev/null | xargs -r nm -A -P"):format(folder)))
  for line in nm:lines() do
    local source, symbol, kind = line:match("%.dir/(src/%S+)%.o: (%S+) (%a)")
    if source and exists[source] == nil then
      local file = io.open(root .. "/" .. source)
      exists[source] = file ~= nil
      if file then file:close() end
    end
    if not exists[source] then kind = nil end
    if kind == "U" then used[#used + 1] = { source, symbol } end
    if kind and kind:find "[TDBRC]" then defined[symbol] = source end
  end
  nm:close()
  return defined, used
end

local function may_use(source, other)
  for _, rule in ipairs(LINKS) do
    if source:match("^" .. rule.of) then
      if other:match("^(.*)/") == source:match("^(.*)/") and source:find("/.*/") then return true end
      for _, pattern in ipairs(rule) do if other:match("^" .. pattern) then return true end end
      return false
    end
  end
  return false
end

if build then
  local defined, used = symbols(build)
  if not next(defined) then
    print(build .. ": there are no objects of the program, or nm is not installed")
    breaches = breaches + 1
  end
  for _, use in ipairs(used) do
    local source, symbol = use[1], use[2]
    local other = defined[symbol]
    if other and not may_use(source, other) then
      print(("%s uses %s of %s, which its layer may not"):format(source, symbol, other))
      breaches = breaches + 1
    end
    for prefix, file in pairs(LIBRARIES) do
      if symbol:find("^" .. prefix) and source ~= file then
        print(("%s uses %s of a library that %s alone knows"):format(source, symbol, file))
        breaches = breaches + 1
      end
    end
  end
end
os.exit(breaches == 0 and 0 or 1)
