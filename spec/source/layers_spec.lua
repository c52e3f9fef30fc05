-- SPDX-License-Identifier: BSD-3-Clause
-- The layers of the source stay apart: runs tools/check_layers.lua over the tree and its objects, and over trees with a
-- breach.
local lfs = require "lfs"
local paths = require "ps.paths"

local BUILD = paths.exe:match("^(.*)/[^/]*$")

---@param tree string
---@param build? string the tree's build folder
---@return string output, integer code
local function check(tree, build)
  local p = assert(io.popen(("'%s' '%s/tools/check_layers.lua' '%s' %s 2>&1; echo \"|$?\""):format(paths.exe,
    paths.root, tree, build and "'" .. build .. "'" or "")))
  local out, code = p:read("*a"):match("^(.*)|(%d+)\n$")
  p:close()
  return out, tonumber(code)
end

local lists, texts = {}, {}              -- read once: paths by folder and names, lines by path

local function lines_of(path)
  if not texts[path] then
    texts[path] = {}
    for line in io.lines(paths.root .. "/" .. path) do table.insert(texts[path], line) end
  end
  return texts[path]
end

local function paths_of(folder, names)
  local key = folder .. " " .. names
  if not lists[key] then
    lists[key] = {}
    local list = assert(io.popen(("cd '%s' && find %s -name '%s'"):format(paths.root, folder, names)))
    for path in list:lines() do table.insert(lists[key], path) end
    list:close()
  end
  return lists[key]
end

-- Returns the lines below a folder of the tree that match a pattern, as "path: line", except those of `owner`. `part`
-- is a text that such lines contain, which is faster to find than the pattern.
local function elsewhere(folder, names, pattern, owner, part)
  local found = {}
  for _, path in ipairs(paths_of(folder, names)) do
    if path ~= owner then
      for _, line in ipairs(lines_of(path)) do
        local fits = (not part or line:find(part, 1, true)) and line:find(pattern)
        if fits then found[#found + 1] = path .. ": " .. line end
      end
    end
  end
  return found
end

describe("a step", function()
  it("is written only by engine/step.c: others have a const pointer, and assign nothing through it", function()
    assert.same({}, elsewhere("src", "*.[ch]*", "step%->[%w_.]+ *[-+|]?=[^=]", "src/engine/step.c"))
    assert.same({}, elsewhere("src", "*.[ch]*", "step%->[%w_.]+[-+][-+]", "src/engine/step.c"))
    local free = elsewhere("src", "*.[ch]*", "%f[%w]ps_step %*", "src/engine/step.c")
    for i = #free, 1, -1 do
      local allowed = free[i]:find("const ps_step *", 1, true) or free[i]:match("^src/ps%.h: ")
        or free[i]:find("void step_join(", 1, true) or free[i]:find("int ps_engine_open(", 1, true)
        or free[i]:match("^src/pipe/exec[_state]*%.[ch]: ")    -- which passes it to ps_step_next and ps_step_done
      if allowed then table.remove(free, i) end
    end
    assert.same({}, free)
  end)

  it("is driven only by lua/ps/engine/step/actions.lua", function()
    assert.same({}, elsewhere("lua", "*.lua", "C%.ps_step_%l+", "lua/ps/engine/step/actions.lua"))
    assert.same({}, elsewhere("lua", "*.lua", "C%.ps_engine_update%f[%W]", "lua/ps/engine/state/optimizer.lua"))
    assert.same({}, elsewhere("lua", "*.lua", "C%.ps_engine_sq_norm", "lua/ps/engine/state/optimizer.lua"))
  end)
end)

describe("the state of a step", function()
  it("is a record of engine/step/ and of the pipeline's driver; other files ask engine/step/state.lua", function()
    local found = {}
    for _, line in ipairs(elsewhere("lua", "*.lua", "%f[%w]state%.of%(", "lua/ps/engine/pipeline/driver.lua")) do
      if not line:find("^lua/ps/engine/step/") then found[#found + 1] = line end
    end
    assert.same({}, found)
  end)

  it("does not say whether there is a pipeline: engine.driver does", function()
    assert.same({}, elsewhere("lua", "*.lua", "engine%.pipe%f[%W]", "", "engine.pipe"))
    assert.same({}, elsewhere("lua", "*.lua", "[^.]%f[%w]engine%.pipeline%f[^%w_]", "", "engine.pipeline"))
  end)
end)

describe("an engine", function()
  it("is assembled by engine/init.lua; other files change its fields by its methods", function()
    for _, assignment in ipairs { "^[%w_%., ]*%f[%w]engine%.[%w_]+ = ",
      "^[%w_%., ]*%f[%w]engine%.[%w_]+, [%w_%., ]*[%w_] = " } do
      assert.same({}, elsewhere("lua/ps/", "*.lua", assignment, "lua/ps/engine/init.lua"))
    end
  end)
end)

describe("Lua's collector", function()
  it("is paced by core/collector.lua, and below it by core/ffi.lua and core/scope.lua", function()
    local found = {}
    for _, line in ipairs(elsewhere("lua", "*.lua", "collectgarbage", "lua/ps/core/collector.lua")) do
      if not line:find("^lua/ps/core/ffi%.lua: ") and not line:find("^lua/ps/core/scope%.lua: ") then
        found[#found + 1] = line
      end
    end
    assert.same({}, found)
  end)
end)

describe("a thread", function()
  it("is started only by base/thread.c, which blocks its signals", function()
    assert.same({}, elsewhere("src", "*.[ch]*", "%f[%w]pthread_create *%(", "src/base/thread.c"))
  end)
end)

-- Returns lines that write a field of a struct within a struct, in files that do not match the pattern of its owner.
---@param before string a pattern for the text before the inner struct's name
---@param owners table<string, string|string[]> inner struct's name -> its owner
---@param declared string the file that declares it
local function written_elsewhere(before, owners, declared)
  local found = {}
  for name, owner in pairs(owners) do
    local field = before .. name .. "%.[%w_.]+"
    for _, pattern in ipairs { field .. " *[-+|&]?=[^=]", field .. "%[[^]]*%] *=[^=]", field .. "[-+][-+]",
      "[-+][-+][%w_>.-]*" .. field } do
      for _, line in ipairs(elsewhere("src", "*.[ch]*", pattern, declared, "->" .. name .. ".")) do
        local owned = false
        for _, path in ipairs(type(owner) == "table" and owner or { owner }) do
          owned = owned or line:find("^" .. path) ~= nil
        end
        if not owned then found[#found + 1] = line end
      end
    end
  end
  return found
end

-- Returns the number of a struct's fields, without those of structs within it.
local function fields_of(path, name)
  local text = assert(io.open(paths.root .. "/" .. path)):read("*a"):match("struct " .. name .. " (%b{});")
  local fields = 0
  text = text:gsub("/%*.-%*/", ""):sub(2, -2):gsub("%b{}", ""):gsub("%b()", "")
  for names in text:gmatch("[^;]+;") do fields = fields + 1 + select(2, names:gsub(",", "")) end
  return fields
end

describe("a storage", function()
  local OWNERS = { tape = "src/grad/", replay = "src/tensor/replay%.", engine = "src/engine/", offload = "src/offload/",
    scope = "src/tensor/scope%.c" }

  it("has fields of upper layers, each in the struct of its layer, which only that layer writes", function()
    -- [^x] excludes ctx->tape, which belongs to the context.
    assert.same({}, written_elsewhere("[^x]%->", OWNERS, "src/mem/mem.h"))
  end)

  it("has 14 fields", function() assert.equal(14, fields_of("src/mem/mem.h", "ps_storage")) end)
end)

describe("a context", function()
  local OWNERS = { mem = "src/tensor/tensor%.c", dry = "src/tensor/", scope = "src/tensor/",
    offload = "src/tensor/tensor%.c",
    recorded = "src/tensor/dispatch%.c", anomaly = "src/tensor/anomaly%.c", tape = "src/grad/",
    ranks = { "src/collectives/", "src/groups%.c" }, engine = "src/engine/" }

  it("has the state of each layer in that layer's struct, which only this layer writes", function()
    assert.same({}, written_elsewhere("ctx%->", OWNERS, "src/tensor/tensor.h"))
  end)

  it("has 16 fields", function() assert.equal(16, fields_of("src/tensor/tensor.h", "ps_ctx")) end)
end)

describe("layers", function()
  it("are respected by the sources", function()
    local out, code = check(paths.root)
    assert.equal("", out)
    assert.equal(0, code)
  end)

  it("are respected by the objects, whatever their sources include", function()
    if not lfs.attributes(BUILD .. "/CMakeFiles/ps_engine.dir/src") then
      return pending "no objects beside the program"
    end
    local out, code = check(paths.root, BUILD)
    assert.equal("", out)
    assert.equal(0, code)
  end)

  -- mem/a.c includes only base, as permitted. A header there declares a function of the tensors, which are in a higher
  -- layer. The source of mem/moved.c was removed, so its object does not count.
  it("cannot be evaded by the includes of a header", function()
    if os.execute("command -v cc >/dev/null 2>&1") ~= 0 then return pending "cc is not installed" end
    local tree = os.tmpname()
    os.remove(tree)
    local objects = tree .. "/build/CMakeFiles/ps_engine.dir/src"
    for _, folder in ipairs { "base", "mem", "tensor" } do
      assert(os.execute(("mkdir -p %s/src/%s %s/%s"):format(tree, folder, objects, folder)) == 0)
    end
    assert(os.execute(("mkdir -p %s/lua %s/models"):format(tree, tree)) == 0)
    for name, text in pairs { ["base/all.h"] = '#include "tensor/t.h"\n', ["tensor/t.h"] = "int above(void);\n",
      ["base/b.c"] = "int dnnl_init(void); int below(void) { return dnnl_init(); }\n",
      ["tensor/t.c"] = "int below(void); int above(void) { return below(); }\n",
      ["mem/a.c"] = '#include "base/all.h"\nint m(void) { return above(); }\n',
      ["mem/moved.c"] = '#include "base/all.h"\nint n(void) { return above(); }\n' } do
      local f = assert(io.open(tree .. "/src/" .. name, "wb"))
      f:write(text)
      f:close()
    end
    for _, name in ipairs { "base/b.c", "tensor/t.c", "mem/a.c", "mem/moved.c" } do
      assert(os.execute(("cc -c -I%s/src %s/src/%s -o %s/%s.o"):format(tree, tree, name, objects, name)) == 0)
    end
    os.remove(tree .. "/src/mem/moved.c")
    os.remove(tree .. "/src/base/all.h")                       -- the check of includes detects this one
    local out, code = check(tree, tree .. "/build")
    os.execute("rm -r " .. tree)
    assert.equal(1, code)
    assert.truthy(out:find("src/mem/a.c uses above of src/tensor/t.c", 1, true), out)
    assert.truthy(out:find("src/base/b.c uses dnnl_init of a library that only src/backend/cpu/onednn.c", 1, true), out)
    assert.equal(2, select(2, out:gsub("\n", "")))
  end)

  it("are checked by the tool", function()
    local tree = os.tmpname()
    os.remove(tree)
    for _, folder in ipairs { "src/mem", "src/ops", "src/comm", "lua/ps/tensor", "models" } do
      assert(os.execute(("mkdir -p %s/%s"):format(tree, folder)) == 0)
    end
    local function write(name, text)
      local f = assert(io.open(tree .. "/" .. name, "wb"))
      f:write(text)
      f:close()
    end
    write("src/mem/a.c", '#include "base/error.h"\n#include "tensor/tensor.h"\n')
    write("src/ops/b.c", '#include "mem/mem.h"\n#include "tensor/optable.h"\n')
    write("src/comm/c.c", '#include "tensor/tensor.h"\n#include "transport/transport.h"\n')
    write("lua/ps/tensor/init.lua", 'local nn = require "ps.nn"\n')
    local out, code = check(tree)
    os.execute("rm -r " .. tree)
    assert.equal(1, code)
    assert.truthy(out:find("src/mem/a.c names tensor/tensor.h", 1, true))
    assert.truthy(out:find("src/ops/b.c names mem/mem.h", 1, true))
    assert.truthy(out:find("src/comm/c.c names tensor/tensor.h", 1, true))
    assert.truthy(out:find("lua/ps/tensor/init.lua names ps.nn", 1, true))
    assert.equal(4, select(2, out:gsub("\n", "")))
  end)
end)
