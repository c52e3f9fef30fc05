-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit tools/check_layers.lua [ROOT [BUILD]]: checks which parts of the source use which other parts
-- (ARCHITECTURE.md). Prints violations, and exits with 1 if there are any. There are three tables of rules. RULES
-- applies to the names in includes and requires. FLOORS applies to the requires between the folders of lua/ps. If BUILD
-- is given, LINKS applies to the object files in this build folder. LINKS covers every call between files, even if a
-- file declares the called function itself.

-- The rules for includes and requires. A file whose path matches `of` can include or require only names that match one
-- of the other patterns of the row. Only the first row whose `of` matches the file applies.
local RULES = {
  { of = "src/base/", "base/", "ps%.h$", "ps_test%.h$" },
  { of = "src/backend/backend%.h$", "base/", "backend/wire%.h$" },
  { of = "src/backend/%w+%.c$", "base/", "ps%.h$", "backend/backend%.h$" },
  { of = "src/backend/image%.h$", "base/half%.h$", "backend/backend%.h$" },
  { of = "src/backend/ref/", "base/", "backend/backend%.h$", "backend/image%.h$", "backend/ref/", "ops%.def$" },
  { of = "src/backend/cuda", "base/", "ps_cdef%.h$", "backend/backend%.h$", "backend/dims%.h$", "backend/image%.h$",
    "backend/cuda", "ops%.def$" },
  { of = "src/backend/pretend/", "base/", "backend/backend%.h$", "backend/cuda_rules%.h$" },
  { of = "src/backend/sim/", "base/", "backend/backend%.h$", "backend/cpu/cpu%.h$", "backend/sim/" },
  { of = "src/backend/", "base/", "ps%.h$", "ps_test%.h$", "backend/backend%.h$", "backend/dims%.h$",
    "backend/image%.h$", "backend/cpu/" },
  { of = "src/mem/", "base/", "backend/backend%.h$", "mem/" },
  { of = "src/offload/", "base/", "backend/backend%.h$", "mem/", "offload/" },
  { of = "src/chunk/", "base/", "backend/backend%.h$", "mem/", "chunk/", "ps_test%.h$" },
  { of = "src/zero/", "base/", "backend/backend%.h$", "mem/mem%.h$", "chunk/chunk%.h$", "tensor/tensor%.h$",
    "comm/group%.h$", "collectives/collectives%.h$", "engine/zero_table%.h$", "zero/", "ps%.h$" },
  { of = "src/pipe/channel%.c$", "base/", "pipe/", "p2p/p2p%.h$" },
  { of = "src/pipe/ranks%.c$", "base/", "collectives/collectives%.h$", "engine/zero_table%.h$" },
  { of = "src/pipe/exec[%a_]*%.c$", "base/", "pipe/", "tensor/tensor%.h$", "tensor/replay%.h$" },
  { of = "src/pipe/exec_state%.h$", "base/", "pipe/", "tensor/tensor%.h$" },
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
  { of = "lua/ps/core/caller%.lua", "ps%.keys$", "ps%.paths$", "ps%.core%.nearest$", "ps%.core%.environment$" },
  { of = "lua/ps/core/hooks%.lua" },
  { of = "lua/ps/core/exact%.lua", "ps%.core%.caller$" },
  { of = "lua/ps/core/rectangles%.lua" },
  { of = "lua/ps/core/declared%.lua", "ps%.cdef$" },
  { of = "lua/ps/core/ops%.lua", "ps%.ops_generated$" },
  { of = "lua/ps/core/coroutines%.lua" },
  { of = "lua/ps/core/ffi%.lua", "ps%.cdef$", "ps%.core%.coroutines$", "ps%.core%.declared$", "ps%.core%.ops$",
    "ps%.core%.caller$", "ps%.core%.hooks$" },
  { of = "lua/ps/core/array%.lua", "ps%.core%.caller$" },
  { of = "lua/ps/core/scope%.lua", "ps%.core%.ffi$", "ps%.core%.array$", "ps%.core%.hooks$" },
  { of = "lua/ps/core/autocast%.lua", "ps%.core%.ffi$", "ps%.core%.scope$", "ps%.core%.hooks$" },
  { of = "lua/ps/tensor/create%.lua", "ps%.core%.ffi$", "ps%.core%.scope$", "ps%.core%.array$" },
  { of = "lua/ps/tensor/math%.lua", "ps%.core%.ffi$", "ps%.core%.scope$", "ps%.core%.autocast$",
    "ps%.tensor%.create$" },
  { of = "lua/ps/tensor/index%.lua", "ps%.core%.ffi$", "ps%.core%.scope$", "ps%.tensor%.create$" },
  { of = "lua/ps/tensor/init%.lua", "ps%.core%.ffi$", "ps%.core%.scope$", "ps%.tensor%.create$", "ps%.tensor%.math$",
    "ps%.tensor%.index$", "ps%.tensor%.pretty$", "ps%.core%.array$", "ps%.core%.exact$", "ps%.core%.foreign$",
    "ps%.core%.hooks$", "ps%.tensor%.hooks$" },
  { of = "lua/ps/tensor/hooks%.lua", "ps%.core%.ffi$", "ps%.core%.scope$", "ps%.tensor%.unscaled$" },
  { of = "lua/ps/tensor/composed%.lua", "ps%.core%.ffi$", "ps%.core%.scope$", "ps%.core%.autocast$",
    "ps%.tensor%.create$", "ps%.tensor$" },
  { of = "lua/ps/tensor/losses%.lua", "ps%.core%.ffi$", "ps%.tensor$", "ps%.core%.scope$", "ps%.core%.autocast$",
    "ps%.core%.loss_weight$" },
  { of = "lua/ps/tensor/functional%.lua", "ps%.core%.ffi$", "ps%.core%.scope$", "ps%.tensor$", "ps%.tensor%.losses$",
    "ps%.tensor%.activations$", "ps%.tensor%.images$", "ps%.tensor%.segments$", "ps%.core%.hooks$",
    "ps%.core%.loss_weight$" },
  { of = "lua/ps/tensor/images%.lua", "ps%.core%.ffi$", "ps%.core%.scope$" },
  { of = "models/", "ps", "models%." },
}
-- The layers of the library, starting at the lowest layer. Each row is a folder of lua/ps, followed by the folders
-- whose files the files of this folder can require. A file can also require files of its own folder, and the modules
-- that the program itself provides (PROGRAM).
local FLOORS = {
  { "core" },
  { "optimizers", "core" },
  { "config", "core", "optimizers" },
  { "chat", "core" },
  { "tensor", "core" },
  { "dist", "core", "tensor" },
  { "autograd", "core", "tensor" },
  { "io", "core", "tensor" },
  { "nn", "core", "tensor", "dist", "io", "autograd" },
  { "data", "core", "chat", "tensor", "dist", "nn" },
  { "optim", "core", "optimizers", "config", "tensor", "dist", "io", "nn" },
  { "memory", "core", "nn" },
  { "profile", "core", "optimizers", "tensor", "dist", "nn", "memory" },
  { "checkpoints", "core", "tensor", "dist", "io", "nn" },
  { "monitor", "io", "checkpoints" },
  { "parallel/tensor", "core", "tensor", "nn" },
  { "parallel/pipeline", "core" },
  { "engine/step", "core", "tensor", "dist", "nn", "data" },
  { "engine/state", "core", "optimizers", "tensor", "nn", "optim", "engine/step" },
  { "engine/layout", "core", "optimizers", "tensor", "nn", "optim", "engine/step", "engine/state" },
  { "engine/ranks", "core", "optimizers", "tensor", "dist", "nn", "data", "optim", "engine/step" },
  { "engine/plan", "core", "optimizers", "dist", "data", "memory", "engine/step", "engine/layout" },
  { "engine/pipeline", "core", "tensor", "dist", "nn", "data", "memory", "parallel/pipeline", "engine/step",
    "engine/ranks" },
  { "engine/report", "core", "memory", "profile", "monitor" },
  { "engine", "core", "optimizers", "config", "tensor", "dist", "nn", "data", "optim", "parallel/tensor", "engine/step",
    "engine/state", "engine/layout", "engine/ranks", "engine/plan", "engine/pipeline", "engine/report" },
  { "inspect", "core", "dist", "nn", "engine/state", "engine" },
  { "pretrained", "core", "tensor", "dist", "io", "nn", "data", "checkpoints" },
  { "lora", "core", "tensor", "dist", "io", "nn", "checkpoints", "parallel/tensor", "pretrained" },
  { "tokenizer", "core", "tensor", "chat", "io", "pretrained" },
  { "train", "core", "tensor", "dist", "io", "nn", "data", "memory", "optim", "checkpoints", "engine/step" },
  { "evaluate", "core", "chat", "tensor", "dist", "nn", "data", "train" },
  { "prompt", "core", "tensor", "dist", "io", "nn", "memory", "engine", "inspect", "pretrained" },
  { "serve", "core", "tensor" },
  { "launch", "core" },
  { "planning", "core", "optimizers", "dist", "data", "memory", "profile", "parallel/pipeline", "engine/step",
    "engine/plan", "engine" },
  -- Modules that scripts require by name. Each of them only returns another module, or a table that collects several
  -- folders.
  { "", "core", "tensor", "dist", "io", "nn", "data", "optim", "memory", "profile", "parallel/tensor",
    "parallel/pipeline", "engine/step", "engine/state", "engine/plan", "engine", "inspect", "pretrained", "lora",
    "train", "prompt" },
  { "bmt", "core", "config", "tensor", "dist", "io", "nn", "optim", "memory", "parallel/tensor", "engine/step",
    "engine/state", "engine/layout", "engine/pipeline", "engine", "inspect", "pretrained" },
}
local PROGRAM = { ["ps.paths"] = true, ["ps.cdef"] = true, ["ps.ops_generated"] = true,
  ["ps.keys"] = true }

-- The rules for object files. If the path of a source matches `of`, its object can use only the symbols that are
-- defined in its own folder or in sources that match one of the other patterns of the row. Only the first row whose
-- `of` matches the source applies. Every source must match a row.
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
  { of = "src/pipe/channel%.c$", "src/base/", "src/comm/comm%.c$", "src/p2p/" },
  { of = "src/pipe/ranks%.c$", "src/base/", "src/tensor/", "src/comm/", "src/collectives/", "src/engine/" },
  { of = "src/pipe/exec[%a_]*%.c$", "src/base/", "src/tensor/", "src/grad/", "src/engine/step%.c$" },
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
  { of = "src/keys%.c$" },
  { of = "src/last_error%.c$", "src/base/hash%.c$", "src/rendezvous/watch%.c$" },
  { of = "src/repl%.c$", "src/base/", "src/main%.c$", "src/interrupt%.c$", "src/modules%.c$" },
  { of = "src/interrupt%.c$", "src/repl%.c$", "src/modules%.c$" },
  { of = "src/modules%.c$" },
}
-- Libraries that only a few files can use. The key is the prefix of the library's symbols, and the value is the list of
-- files.
local LIBRARIES = { dnnl_ = { "src/backend/cpu/onednn.c", "src/backend/cpu/onednn_conv.c" },
  io_uring_ = { "src/chunk/disk.c" }, crypto_ = { "src/rendezvous/proof.c" }, sodium_ = { "src/rendezvous/proof.c" },
  XXH = { "src/base/hash.c", "src/io/st_sum.c" } }

local root, build, breaches = arg[1] or ".", arg[2], 0
local function breach(text, ...)
  print(text:format(...))
  breaches = breaches + 1
end

local fitted = {}                                          -- rules that matched at least one file
local function allowed(path, name)
  for _, rule in ipairs(RULES) do
    if path:match("^" .. rule.of) then
      fitted[rule] = true
      for _, pattern in ipairs(rule) do if name:match("^" .. pattern) then return true end end
      return false
    end
  end
  return true
end

local sources = {}                                         -- text of each source, by path
for path in assert(io.popen(("cd '%s' && find src lua models -name '*.[chl]*'"):format(root))):lines() do
  sources[path] = assert(io.open(root .. "/" .. path)):read("*a")
end

-- Returns the folder of lua/ps that contains a module's file, or nil if the module is not part of the library.
local function folder_of(module)
  local path = "lua/" .. module:gsub("%.", "/")
  if sources[path .. ".lua"] then return (path:match "^lua/ps/(.*)/[^/]*$" or "") end
  if sources[path .. "/init.lua"] then return (path:match "^lua/ps/(.*)$" or "") end
end

local floors = {}                                          -- for each folder, the set of folders that it can require
for at, row in ipairs(FLOORS) do
  floors[row[1]] = { [row[1]] = true, at = at }
  for i = 2, #row do
    if not floors[row[i]] then breach("the floor '%s' may not use '%s', which is not below it", row[1], row[i]) end
    floors[row[1]][row[i]] = true
  end
end
local whole = sources["lua/ps/init.lua"] ~= nil            -- false outside psluajit's own source tree
local lived = {}                                           -- folders that contain at least one file
local function check_floor(path, name)
  local folder = path:match "^lua/ps/(.*)/[^/]*$" or ""
  lived[folder] = true
  if not floors[folder] then return breach("%s is in a folder without a floor", path) end
  if not name or PROGRAM[name] or not name:match "^ps%f[.%z]" then
    if name and not PROGRAM[name] and not name:match "^posix%." then breach("%s names %s of a script", path, name) end
    return
  end
  local other = folder_of(name)
  if not other and whole and not name:match "%.$" then return breach("%s names %s, which is not a file", path, name) end
  if other and not floors[folder][other] then breach("%s names %s, which its layer may not", path, name) end
  if name == "ps" then breach("%s names ps, which is for scripts", path) end
end

for path, text in pairs(sources) do
  local lua = path:match("%.lua$")
  local library = path:match "^lua/ps/"
  allowed(path, "")
  if library then check_floor(path) end
  if lua then text = text:gsub("%-%-[^\n]*", ""):gsub("'[^'\n]*'", "") end
  for name in ("\n" .. text):gmatch(lua and 'require[ (]+"([pm][^"]+)"' or '\n#include "([^"]+)"') do
    if library then check_floor(path, name) end
    -- An include can also name a file in the folder of the including file.
    local beside = lua and name or (path:match("^src/(.*/)") or "") .. name
    if not allowed(path, name) and (name:find("/") or not allowed(path, beside)) then
      breach("%s names %s, which its layer may not", path, name)
    end
  end
end
for folder in pairs(floors) do
  if whole and not lived[folder] then breach("the floor '%s' has no file", folder) end
end
for _, rule in ipairs(RULES) do
  if whole and not fitted[rule] then breach("the rule of '%s' fits no file", rule.of) end
end
--- Returns the symbols that the program's objects define and use. Ignores objects whose source was moved or removed,
--- because these objects remain in a build folder.
---@param folder string the build folder
---@return table<string, string> defined source of each defined symbol
---@return {[1]: string, [2]: string}[] used pairs of source and symbol
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
    breach("%s: there are no objects of the program, or nm is not installed", build)
  end
  for _, use in ipairs(used) do
    local source, symbol = use[1], use[2]
    local other = defined[symbol]
    if other and not may_use(source, other) then
      breach("%s uses %s of %s, which its layer may not", source, symbol, other)
    end
    for prefix, files in pairs(LIBRARIES) do
      local known = source == files[1] or source == files[2]
      if symbol:find("^" .. prefix) and not known then
        breach("%s uses %s of a library that only %s may use", source, symbol, table.concat(files, " or "))
      end
    end
  end
end
os.exit(breaches == 0 and 0 or 1)
