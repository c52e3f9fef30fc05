-- SPDX-License-Identifier: BSD-3-Clause
-- Definitions for editors (`psluajit definitions`): each function of docs/api.md with its parameters and results, in
-- Lua that loads, and a class for every type.
local check = require "spec.check_lib"
local json = require "cjson"
local paths = require "ps.paths"
local ranks_lib = require "spec.ranks_lib"

local folder, text

local function run(arguments)
  return check.shell(("'%s' %s"):format(paths.exe, arguments))
end

setup(function()
  folder = ranks_lib.folder()
  local said, code = run(("new classifier '%s/project'"):format(folder))
  assert(code == 0, said)
  text = check.read(folder .. "/project/.psluajit/ps.lua")
end)
teardown(function() ranks_lib.remove(folder) end)

describe("definitions", function()
  it("are Lua, and return ps with its tables", function()
    local ps = assert(loadstring(text))()
    assert.equal("function", type(ps.zeros))
    for _, name in ipairs { "ps/bmt.lua", "models/gpt2.lua", "models/bert.lua" } do
      assert(loadfile(folder .. "/project/.psluajit/" .. name))
    end
    local settings = json.decode(check.read(folder .. "/project/.luarc.json"))
    assert.same({ ".psluajit" }, settings["workspace.library"])
    assert.equal("LuaJIT", settings["runtime.version"])
  end)

  it("have each function of docs/api.md", function()
    local owners = { ps = "ps", t = "ps_Tensor", F = "ps_functional", nn = "ps_nn", optim = "ps_optim",
      optimizer = "ps_Optimizer", sched = "ps_sched", schedule = "ps_Schedule", data = "ps_data",
      loader = "ps_Loader", tokenizer = "ps_tokenizer", train = "ps_train", checkpoints = "ps_checkpoints",
      group = "ps_Group", profiler = "ps_profiler" }
    local n = 0
    for owner, mark, name in check.read(paths.root .. "/docs/api.md"):gmatch "\n%- %*%*`(%l+)([.:])([%w_]+)%(" do
      local variable = owners[owner]
      if owner == "F" or variable and not (owner == "tokenizer" and mark == ":") then
        n = n + 1
        if not text:find(("\nfunction %s%s%s("):format(variable, mark, name), 1, true)
          and not (owner == "optimizer" and text:find("\nfunction ps_EngineOptimizer:" .. name .. "(", 1, true)) then
          error(("%s%s%s is not defined"):format(owner, mark, name))
        end
      end
    end
    assert(n > 400, n)
    assert.matches("---@param shape integer[] at most 8 sizes", text, 1, true)
    assert.matches("---@param options? {dtype?: string, device?: string, requires_grad?: boolean}\n", text, 1, true)
    assert.matches("\n---@return ps.Tensor # [ceil((stop - start) / step)]\nfunction ps.arange(start, stop, step, "
      .. "options) end\n", text, 1, true)
  end)

  it("have methods of tensors that are functions of ps, operators, and the modules that classes make", function()
    assert.matches("\n---@field softmax fun(t: ps.Tensor, ...: any): ps.Tensor\n", text, 1, true)
    assert.matches("\n---@operator add(ps.Tensor|number): ps.Tensor\n", text, 1, true)
    assert.matches("\n---@return ps.nn.Linear\nfunction ps_nn.Linear(inputs, outputs, options) end\n", text, 1, true)
    assert.matches("\n---@class ps.nn.Linear: ps.nn.Module\n", text, 1, true)
  end)

  it("define every class once, and each class that a type names", function()
    local defined = {}
    for name in text:gmatch "\n%-%-%-@class ([%w_.]+)" do
      assert(not defined[name], name .. " is defined twice")
      defined[name] = true
    end
    local missing = {}
    for line in text:gmatch "\n%-%-%-@[pr]%l+ ([^\n]*)" do
      local types = line:match "^[%w_?.]+ (%S+)" or line
      for name in types:gmatch "%f[%w_]ps%.[%w_.]*%u[%w_.]*" do
        if not defined[name] then missing[name] = true end
      end
    end
    assert.same({}, missing)
  end)

  it("keep the settings of an editor that are there", function()
    check.write(folder .. "/project/.luarc.json", '{ "hint.enable": true }\n')
    local said, code = run(("definitions '%s/project'"):format(folder))
    assert.equal(0, code)
    assert.matches("add it to workspace.library of .*%.luarc%.json, which was not changed", said)
    assert.equal('{ "hint.enable": true }\n', check.read(folder .. "/project/.luarc.json"))
    said, code = run(("definitions '%s/none'"):format(folder))
    assert.equal(1, code)
    assert.equal(("definitions: there is no folder %s/none\n"):format(folder), said)
  end)
end)
