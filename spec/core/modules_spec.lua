-- SPDX-License-Identifier: BSD-3-Clause
-- Modules by name: the public ones, each alone in its own process, and those that C and the library look up.
local check = require "spec.check_lib"
local paths = require "ps.paths"
local lfs = require "lfs"

-- The names that scripts can require. All other names are internal, and can change without notice.
local PUBLIC = { "ps", "ps.batch", "ps.bmt", "ps.caller", "ps.chat", "ps.checkpoints", "ps.comm", "ps.command_line",
  "ps.config", "ps.data", "ps.dist", "ps.dist.env", "ps.engine", "ps.evaluate",
  "ps.inspect", "ps.lora", "ps.mesh", "ps.nn",
  "ps.nn.module", "ps.nn.parts", "ps.nn.shard", "ps.optim", "ps.pipe", "ps.pretrained", "ps.pretrained.generate",
  "ps.pretrained.heads", "ps.pretrained.model", "ps.pretrained.rope", "ps.pretrained.settings", "ps.pretrained.unpad",
  "ps.pretty", "ps.profiler", "ps.progress", "ps.safetensors", "ps.sched", "ps.serialize", "ps.tokenizer", "ps.train" }

local function lua(code)
  local p = assert(io.popen(("'%s' -e '%s' 2>&1; echo $?"):format(paths.exe, code)))
  local text = p:read("*a")
  p:close()
  return text
end

describe("a public module", function()
  for _, name in ipairs(PUBLIC) do
    it("is there alone: " .. name, function()
      local code = ('local m = require "%s" print(type(m))'):format(name)
      assert.truthy(("table\n0\nfunction\n0\n"):find(lua(code), 1, true), lua(code))
    end)
  end

  it("lists exactly the files in lua/ps itself", function()
    local public, missing, n = {}, {}, 0
    for _, name in ipairs(PUBLIC) do public[name] = true end
    for file in lfs.dir(paths.root .. "/lua/ps") do
      local name = file:match "^(.*)%.lua$"
      if name and name ~= "init" and name ~= "checkpoint" then         -- the last one is an error that names two others
        n = n + 1
        if not public["ps." .. name] then missing[#missing + 1] = name end
      end
    end
    assert.same({}, missing)
    assert.truthy(n > 8, n)
  end)

  it("is used by models, examples and guides", function()
    local public, others = { ["ps.paths"] = true }, {}
    for _, name in ipairs(PUBLIC) do public[name] = true end
    local list = assert(io.popen(("cd '%s' && grep -rhoE 'require[ (]*\"ps[a-z_.]*\"' models docs README.md"):format(
      paths.root)))
    for line in list:lines() do
      local name = line:match '"(.-)"'
      if not public[name] then others[#others + 1] = name end
    end
    list:close()
    assert.same({}, others)
  end)
end)

describe("a module that is looked up by name", function()
  it("exists, if the program calls it", function()
    local n = 0
    for name in check.read(paths.root .. "/src/modules.h"):gmatch '#define MODULE_%u+ "([%w_.]+)"' do
      n = n + 1
      assert.equal("table", type(require(name)), name)
    end
    assert.truthy(n >= 8, n)
  end)

  it("exists, if it is read from package.loaded", function()
    local n = 0
    local list = assert(io.popen(("cd '%s' && grep -rhoE 'package[.]loaded[[]\"ps[a-z_.]*\"' lua"):format(paths.root)))
    for line in list:lines() do
      n = n + 1
      local name = line:match '"(.-)"'
      assert.truthy(package.searchpath(name, package.path), name)
    end
    list:close()
    assert.truthy(n > 0)
  end)
end)
