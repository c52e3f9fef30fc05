-- SPDX-License-Identifier: BSD-3-Clause
-- The layers of the source stay apart: runs tools/check_layers.lua over the tree and its objects, and over trees with a
-- breach.
local lfs = require "lfs"
local paths = require "ps.paths"

local BUILD = paths.exe:match("^(.*)/[^/]*$")

---@param tree string
---@param build? string its build folder
---@return string output, integer code
local function check(tree, build)
  local p = assert(io.popen(("'%s' '%s/tools/check_layers.lua' '%s' %s 2>&1; echo \"|$?\""):format(paths.exe,
    paths.root, tree, build and "'" .. build .. "'" or "")))
  local out, code = p:read("*a"):match("^(.*)|(%d+)\n$")
  p:close()
  return out, tonumber(code)
end

-- Lines of files below a folder of the tree that fit a pattern, as "path: line", but for those of `owner`.
local function elsewhere(folder, names, pattern, owner)
  local found = {}
  local list = assert(io.popen(("cd '%s' && find %s -name '%s'"):format(paths.root, folder, names)))
  for path in list:lines() do
    for line in io.lines(paths.root .. "/" .. path) do
      if path ~= owner and line:find(pattern) then found[#found + 1] = path .. ": " .. line end
    end
  end
  list:close()
  return found
end

describe("a step", function()
  it("is written by engine/step.c alone: others have it by a const pointer, and assign nothing through it", function()
    assert.same({}, elsewhere("src", "*.[ch]*", "step%->[%w_.]+ *[-+|]?=[^=]", "src/engine/step.c"))
    assert.same({}, elsewhere("src", "*.[ch]*", "step%->[%w_.]+[-+][-+]", "src/engine/step.c"))
    local free = elsewhere("src", "*.[ch]*", "%f[%w]ps_step %*", "src/engine/step.c")
    for i = #free, 1, -1 do
      local allowed = free[i]:find("const ps_step *", 1, true) or free[i]:match("^src/ps%.h: ")
        or free[i]:find("void step_join(", 1, true) or free[i]:find("int ps_engine_open(", 1, true)
        or free[i]:match("^src/pipe/exec%.c: ")                -- which hands it to ps_step_next and ps_step_done
      if allowed then table.remove(free, i) end
    end
    assert.same({}, free)
  end)

  it("is driven by lua/ps/engine/step/actions.lua alone", function()
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

  it("does not tell the step's files whether there is a pipeline: engine.driver does", function()
    assert.same({}, elsewhere("lua/ps/engine/step", "*.lua", "engine%.pipe%f[%W]", ""))
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
  it("is started by base/thread.c alone, which blocks its signals", function()
    assert.same({}, elsewhere("src", "*.[ch]*", "%f[%w]pthread_create *%(", "src/base/thread.c"))
  end)
end)

describe("a storage", function()
  local OWNERS = { tape = "src/grad/", replay = "src/tensor/replay%.", engine = "src/engine/", offload = "src/offload/",
    scope = "src/tensor/scope%.c" }

  it("has notes of layers above, each in the struct of its layer, which alone writes it", function()
    local found = {}
    for name, owner in pairs(OWNERS) do
      for _, pattern in ipairs { "%->" .. name .. "%.[%w_]+ *[-+|&]?=[^=]", "%->" .. name .. "%.[%w_]+[-+][-+]",
        "[-+][-+][%w_>.-]*%->" .. name .. "%." } do
        for _, line in ipairs(elsewhere("src", "*.[ch]*", pattern, "src/mem/mem.h")) do
          if not line:find("^" .. owner) then found[#found + 1] = line end
        end
      end
    end
    assert.same({}, found)
  end)

  it("has at most 14 fields", function()
    local text = assert(io.open(paths.root .. "/src/mem/mem.h")):read("*a"):match("struct ps_storage (%b{});")
    local fields = 0
    text = text:gsub("/%*.-%*/", ""):sub(2, -2):gsub("%b{}", "")
    for names in text:gmatch("[^;]+;") do fields = fields + 1 + select(2, names:gsub(",", "")) end
    assert.equal(14, fields)
  end)
end)

describe("layers", function()
  it("are kept by the sources", function()
    local out, code = check(paths.root)
    assert.equal("", out)
    assert.equal(0, code)
  end)

  it("are kept by the objects, whatever their sources include", function()
    if not lfs.attributes(BUILD .. "/CMakeFiles/ps_engine.dir/src") then
      return pending "no objects beside the program"
    end
    local out, code = check(paths.root, BUILD)
    assert.equal("", out)
    assert.equal(0, code)
  end)

  -- mem/a.c includes base alone, as it may; a header there declares a function of the tensors above it. The source of
  -- mem/moved.c is gone, so that its object does not count.
  it("are not evaded by what a header includes", function()
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
    os.remove(tree .. "/src/base/all.h")                       -- the includes' own check sees that one
    local out, code = check(tree, tree .. "/build")
    os.execute("rm -r " .. tree)
    assert.equal(1, code)
    assert.truthy(out:find("src/mem/a.c uses above of src/tensor/t.c", 1, true), out)
    assert.truthy(out:find("src/base/b.c uses dnnl_init of a library that src/backend/cpu/onednn.c", 1, true), out)
    assert.equal(2, select(2, out:gsub("\n", "")))
  end)

  it("are what the tool looks at", function()
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
