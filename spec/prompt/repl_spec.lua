-- SPDX-License-Identifier: BSD-3-Clause
-- The prompt (driven through a pipe), its output and the completions of TAB.
local check = require "spec.check_lib"
local ranks_lib = require "spec.ranks_lib"
local complete = require "ps.prompt.complete"
local paths = require "ps.paths"
local pretty = require "ps.tensor.pretty"

--- Returns the prompt's answers to these lines: standard output without the banner, and standard error.
---@param input string
local function prompt(input)
  local base = os.tmpname()
  local f = assert(io.open(base, "wb"))
  f:write(input)
  f:close()
  local p = assert(io.popen(("env -u LUA_INIT '%s' -i <%s 2>%s.err"):format(paths.exe, base, base)))
  local out = p:read("*a"):gsub("^[^\n]*\n", "", 1)
  p:close()
  f = assert(io.open(base .. ".err", "rb"))
  local err = f:read("*a")
  f:close()
  os.remove(base)
  os.remove(base .. ".err")
  return out, err
end

describe("psluajit -i of a script that fails", function()
  it("opens a prompt at the error, with the script's variables by name", function()
    local script = os.tmpname()
    local f = assert(io.open(script, "wb"))
    f:write([[
      local kept, losses = 7, {}
      local function step(i)
        local loss = i * 2
        losses[i] = loss
        if i == 250 then error "here" end
        return loss
      end
      for turn = 1, 300 do step(turn) end
    ]])
    f:close()
    local base = os.tmpname()
    f = assert(io.open(base, "wb"))
    f:write "loss, turn, kept, #losses\nloss = 3\nloss\nfresh = 1\nfresh, ps ~= nil\n"
    f:close()
    local p = assert(io.popen(("env -u LUA_INIT '%s' -i %s <%s 2>%s.err; echo code $?"):format(paths.exe, script, base,
      base)))
    local out = p:read "*a"
    p:close()
    f = assert(io.open(base .. ".err", "rb"))
    local err = f:read "*a"
    f:close()
    for _, name in ipairs { script, base, base .. ".err" } do os.remove(name) end
    assert.matches("here", err, 1, true)
    assert.matches("variables of the script at its error: i, kept, loss, losses, step, turn\n", out, 1, true)
    assert.matches("> 500\n250\n7\n250\n> > 3\n> > 1\ntrue\n> \ncode 1\n", out, 1, true)
  end)
end)

describe("psluajit -i of a script whose backward fails in C", function()
  it("has the script's variables at the call of backward, with an engine and without one", function()
    local script, output = os.tmpname(), os.tmpname()
    for _, way in ipairs { "plain", "engine" } do
      check.write(script, ([[
        local ps = require "ps"
        local function loss_of(x, w) return (x:matmul(w)):sum() end
        local function train(way)
          local x, seen, model, loss = ps.ones { 2, 8 }, 7, nil, nil
          if way == "plain" then loss = loss_of(x, ps.ones({ 8, 8 }):requires_grad(true))
          else
            local function model_func() return ps.nn.Linear(8, 8) end
            model = ps.initialize { quiet = true, model_func = model_func, config = { plan_print = false } }
            loss = model(x):sum()
          end
          ps.C.ps_test_fail_alloc(0, 1e6)
          if model then model:backward(loss) else loss:backward() end
          return seen
        end
        print(train "%s")]]):format(way))
      local p = assert(io.popen(("printf 'ps.C.ps_test_fail_alloc(-1, 0)\\nway, seen\\n' | env -u LUA_INIT '%s' "
        .. "-i %s 2>%s"):format(paths.exe, script, output)))
      local out = p:read "*a"
      p:close()
      local said = check.read(output)
      assert.truthy(said:find("no memory for", 1, true), said)
      assert.truthy(said:find("in function 'train'", 1, true), said)
      assert.truthy(out:find("variables of the script at its error: ", 1, true), out)
      assert.truthy(out:find(("> \"%s\"\n7\n"):format(way), 1, true), out)
    end
    os.remove(script)
    os.remove(output)
  end)
end)

describe("an error inside a module's call", function()
  local script
  local function write(text)
    script = os.tmpname()
    local f = assert(io.open(script, "wb"))
    f:write(text)
    f:close()
    return script
  end
  after_each(function() os.remove(script) end)
  local function run(command, typed)
    local p = assert(io.popen(("echo '%s' | env -u LUA_INIT '%s' %s 2>&1"):format(typed or "", paths.exe, command)))
    local out = p:read "*a"
    p:close()
    return out
  end

  local NET = [[
local ps = require "ps"
local Net = ps.nn.class("Net")
function Net:init() self.inner = ps.nn.Linear(2, 2) end
function Net:forward(x, i)
  local deep = i * 2
  local function fail() %s end
  if i == 3 then fail() end
  return self.inner(x)
end
local net = Net()
local function train(i)
  local shown = i + 100
  local y = ps.no_grad(net, ps.ones { 1, 2 }, i)
  return y, shown
end
]]

  it("ends with the frames of its origin, at its line", function()
    for _, raises in ipairs { 'error "trouble"', "x:matmul(ps.ones { 3, 3 })", "local none = nil; none.field = 1" } do
      local out = run(write(NET:format(raises) .. "train(1)\ntrain(3)\n"))
      assert.matches("psluajit: [^\n]+\nstack traceback:\n", out)
      assert.matches("lua_%w+:6: in function 'fail'\n\t%S*lua_%w+:7: in function <%S*lua_%w+:4>\n", out)
      assert.matches("lua_%w+:13: in function 'train'\n\t%S*lua_%w+:17: in main chunk\n", out)
      assert.is_nil(out:find("scope.lua", 1, true), out)
    end
    local out = run(("-e \"os.execute = nil\" '%s'"):format(write(NET:format 'error { code = 7 }' .. "train(3)\n")))
    assert.matches("the error is a table, not a string: { code = 7 }\nstack traceback:\n", out, 1, true)
  end)

  it("opens the prompt with the variables at its origin", function()
    local path = write(NET:format 'error "trouble"' .. "pcall(train, 3)\ntrain(3)\n")
    local out = run(("-i '%s'"):format(path), "deep, shown, i")
    assert.matches("> 6\n103\n3\n", out, 1, true)
  end)

  it("is not taken for an earlier one with the same text", function()
    local path = write(NET:format 'error("trouble", 0)'
      .. "pcall(train, 3)\nlocal function other()\n  local mine = 1\n  error('trouble', 0)\nend\nother()\n")
    local out = run(("-i '%s'"):format(path), "mine, deep")
    assert.matches("lua_%w+:19: in function 'other'\n\t%S*lua_%w+:21: in main chunk", out)
    assert.is_nil(out:find("in function 'fail'", 1, true), out)
    assert.matches("> 1\nnil\n", out, 1, true)
  end)
end)

describe("the prompt", function()
  it("prints the values of expressions, and nothing for statements", function()
    assert.equal("> 2\n> \"a\"\n> > 3\n> 1\nnil\n> x\n> \n", (prompt "1+1\n'a'\ny = 3\n=y\n1, nil\nprint 'x'\n"))
  end)

  it("reads further lines until a statement is complete", function()
    assert.equal("> >> >> 1\n2\n> \n", (prompt "for i = 1, 2 do\nprint(i)\nend\n"))
    assert.equal("> >> \"a\\nb\"\n> \n", (prompt "[[a\nb]]\n"))
    assert.equal("> >> 5\n> \n", (prompt "=2 +\n3\n"))
    assert.equal("> >> 3\n> \n", (prompt "1 +\n2\n"))
    assert.equal("> >> >> 9\n> \n", (prompt "math.max(\n4,\n9)\n"))
    assert.equal("> >> >> { 1, a = 2 }\n> \n", (prompt "{ 1,\na = 2\n}\n"))
    assert.equal("> >> > 3\n> \n", (prompt "x = 1 +\n2\nx\n"))
    local out, err = prompt "1 + 2 3\nx x +\n4\n"
    assert.equal("> > > 4\n> \n", out)
    assert.matches("near '1'", err, 1, true)
    assert.matches("near 'x'", err, 1, true)
  end)

  it("accepts lines with the prompts that a listing shows", function()
    assert.equal("> 2\n> > >> >> 1\n2\n> \n", (prompt "> 1+1\n>   y = 3\n> for i = 1, 2 do\n>> print(i)\n>> end\n"))
    assert.equal("> >> >> \"a\\n>> b\"\n> \n", (prompt "([[a\n>> b\n]]):sub(1, 6)\n"))
  end)

  it("survives errors and shows their origin", function()
    local out, err = prompt "error('boom')\nx x\nerror({})\nlocal function f() error('deep') end f()\n1\n"
    assert.equal("> > > > > 1\n> \n", out)
    assert.matches("boom\n", err, 1, true)
    assert.matches("'=' expected near 'x'", err, 1, true)
    assert.matches("the error is a table, not a string: {}\n", err, 1, true)
    assert.matches("stdin:1: deep\nstack traceback:\n", err, 1, true)
    assert.matches("in function 'f'", err, 1, true)
    assert.is_nil(err:find("[C]: at", 1, true))
  end)

  it("survives a value that cannot be printed", function()
    local out = prompt "setmetatable({}, { __tostring = function() error 'no' end })\n1\n"
    assert.equal("> <table whose __tostring failed>\n> 1\n> \n", out)
  end)

  it("honours os.exit and _PROMPT", function()
    assert.equal("> # ", (prompt "_PROMPT = '# '\nos.exit(0)\n"))
  end)
end)

describe("ps.pretty", function()
  local format = pretty.format

  it("shows plain values", function()
    assert.equal("nil", format(nil))
    assert.equal("1.5", format(1.5))
    assert.equal("true", format(true))
    assert.equal([["a\n\"\\\001"]], format("a\n\"\\\1"))
    assert.equal("12LL", format(12LL))
    assert.equal("function <builtin>", format(print))
    assert.matches("^function <.*repl_spec.lua:%d+>$", format(function() end))
    assert.matches("^function t:numel%(%) <.*init.lua:%d+>$", format(require("ps").ones({ 1 }).numel))
    assert.matches("^function F.softplus%(%) <.*:%d+>$", format(require("ps").F.softplus))
  end)

  it("cuts long strings", function()
    assert.equal("\"aaaa\"... (10 bytes)", format(("a"):rep(10), { text = 4 }))
  end)

  it("shows tables with sorted keys", function()
    assert.equal("{}", format({}))
    assert.equal("{ 1, 2, a = 3, b = 4, [\"end\"] = 5, [\"x y\"] = 6 }",
      format({ 1, 2, b = 4, a = 3, ["x y"] = 6, ["end"] = 5 }))
    assert.equal("{ [-1] = 1, [true] = 2 }", format({ [-1] = 1, [true] = 2 }))
  end)

  it("wraps values that do not fit on a line", function()
    assert.equal("{\n  name = \"aaaaaaaaaa\",\n  other = { 1, 2, 3 }\n}",
      format({ name = "aaaaaaaaaa", other = { 1, 2, 3 } }, { width = 30 }))
  end)

  it("stops at cycles, depth and width", function()
    local t = { name = "t" }
    t.self = t
    assert.equal("{ name = \"t\", self = <cycle> }", format(t))
    assert.equal("{ { {...} } }", format({ { { { 1 } } } }, { depth = 2 }))
    assert.equal("{ 1, 2, ... 3 more }", format({ 1, 2, 3, 4, 5 }, { items = 2 }))
    local shared = {}
    assert.equal("{ {}, {} }", format({ shared, shared }))
  end)

  it("uses __tostring and survives one that fails", function()
    assert.equal("T", format(setmetatable({}, { __tostring = function() return "T" end })))
    assert.equal("{ <table whose __tostring failed> }",
      format({ setmetatable({}, { __tostring = function() error("no") end }) }))
  end)
end)

describe("tensors at the prompt", function()
  local has_ps, ps = pcall(require, "ps")
  if not has_ps then
    pending("ps is not available")
    return
  end

  it("show shape, type, device and values", function()
    assert.equal("tensor [2, 3] fp32 cpu\n[[1., 2., 3.],\n [4., 5., 6.]]",
      pretty.format(ps.tensor({ { 1, 2, 3 }, { 4, 5, 6 } })))
    assert.equal("tensor [2] fp32 cpu\n[ 0.5000, -1.2500]", pretty.format(ps.tensor({ 0.5, -1.25 })))
  end)

  it("show a corner of large tensors", function()
    local text = pretty.format(ps.zeros({ 100, 100 }))
    assert.matches("tensor [100, 100] fp32 cpu\n[[0., 0., 0., ..., 0., 0., 0.],\n", text, 1, true)
    assert.matches(" ...,\n", text, 1, true)
    local _, lines = text:gsub("\n", "")
    assert.equal(7, lines)
  end)

  it("are named, not printed, inside tables", function()
    assert.equal("{ w = tensor [3] fp32 cpu }", pretty.format({ w = ps.zeros({ 3 }) }))
  end)

  it("report that they were freed", function()
    local stale
    ps.scope(function() stale = ps.zeros({ 256, 256 }) + 1 end)
    assert.matches("its scope has ended", pretty.format(stale), 1, true)
  end)

  it("offer their methods", function()
    rawset(_G, "completion_target", ps.zeros({ 2 }))
    local names = complete.candidates("completion_target:backw")
    rawset(_G, "completion_target", nil)
    assert.same({ "backward(" }, names)
  end)
end)

describe("ps.complete", function()
  local ps = require "ps"
  local target

  before_each(function()
    target = setmetatable({ name = 1, nested = { [1] = { deep = true }, ["x y"] = { odd = 1 } }, run = print },
      { __index = { method = print, inherited = 2 } })
    rawset(_G, "completion_target", target)
  end)
  after_each(function() rawset(_G, "completion_target", nil) end)

  it("offers globals and keywords", function()
    assert.same({ "completion_target" }, (complete.candidates("x = completion_t")))
    assert.same({ "while" }, (complete.candidates("whil")))
    assert.same({ "print(" }, (complete.candidates("pri")))
  end)

  it("offers fields, also inherited ones, after a dot", function()
    assert.same({ "inherited", "method(", "name", "nested", "run(" }, (complete.candidates("completion_target.")))
    assert.same({ "name", "nested" }, (complete.candidates("f(completion_target.n")))
    assert.same({ "deep" }, (complete.candidates("completion_target.nested[1].")))
    assert.same({ "odd" }, (complete.candidates("completion_target.nested['x y'].o")))
  end)

  it("offers only callable names after a colon", function()
    assert.same({ "method(", "run(" }, (complete.candidates("completion_target:")))
  end)

  it("offers the methods of strings", function()
    target.text = "abc"
    assert.same({ "upper(" }, (complete.candidates("completion_target.text:up")))
  end)

  local function has(text, ...)
    local names = {}
    for _, name in ipairs(complete.candidates(text)) do names[name] = true end
    for _, name in ipairs { ... } do assert(names[name], text .. " lacks " .. name) end
    return names
  end

  it("offers modules that were not loaded yet", function()
    rawset(_G, "ps", ps)                                      -- as at the prompt
    finally(function() rawset(_G, "ps", nil) end)
    has("ps.", "nn", "optim", "sched", "data", "checkpoints", "recompute(", "train", "dist", "profiler", "safetensors")
    assert.same({ "data" }, (complete.candidates("ps.da")))
    has("ps.data.", "loader(", "tokens(")
    has("ps.nn.Lin", "Linear(")
    assert.same({ "checkpoints" }, (complete.candidates("ps.checkp")))
  end)

  it("offers the members of containers and modules", function()
    rawset(_G, "completion_target", ps.nn.Sequential(ps.nn.Linear(2, 2)))
    local names = has("completion_target:", "append(", "forward(", "parameters(", "state_dict(", "train(")
    for name in pairs(names) do assert.is_nil(name:match("^_"), name) end
    has("completion_target[0].", "weight", "bias", "forward(", "training")
  end)

  for _, memory in ipairs { "chunks", "plain" } do
    it("offers the engine's own names, and those of its model: " .. memory, function()
      local config = { optimizer = { type = "AdamW", params = { lr = 1e-3 } } }
      if memory == "plain" then config.memory = "plain" end
      local model, optimizer = ps.initialize { quiet = true, config = config,
        model_func = function() return require("models.gpt2").new("tiny") end }
      rawset(_G, "completion_target", model)
      local names = has("completion_target:", "backward(", "train(", "eval(", "parameters(", "generate(", "close(",
        "state_dict(", "save_pretrained(")
      for _, name in ipairs { "mode(", "module(", "request_model_func(", "run(", "set_mode(", "end_step(" } do
        assert.is_nil(names[name], name)
      end
      assert.same({ "backward(" }, (complete.candidates("completion_target:back")))
      has("completion_target.", "module(", "config", "transformer(")
      rawset(_G, "completion_target", optimizer)
      has("completion_target:", "step(", "zero_grad(", "set_lr(", "state_dict(")
      local _, lines = pretty.format(optimizer):gsub("\n", "\n")
      assert(lines < 10, pretty.format(optimizer))
      assert.matches("^AdamW, 0 steps\n  group 1: %d+ tensors, %d+ numbers, lr 0.001, betas 0.9, 0.999, eps 1e%-08",
        pretty.format(optimizer))
      model:close()
    end)
  end

  it("shows optimizers and schedules in a few lines", function()
    local optim, weights = ps.optim, {}
    for i = 1, 20 do weights[i] = { params = { ps.nn.Parameter(ps.zeros { i }) }, lr = i } end
    local text = pretty.format(optim.SGD(weights, { lr = 1, momentum = 0.9 }))
    assert.matches("^SGD, 0 steps\n  group 1: 1 tensor, 1 number, lr 1, momentum 0.9, weight_decay 0\n", text)
    assert.matches("\n  and 12 more groups$", text)
    local _, breaks = text:gsub("\n", "")
    assert.equal(9, breaks)
    local opt = optim.Adam(weights[1].params, { lr = 0.5, max_norm = 2 })
    assert.matches("^Adam, 0 steps, max_norm 2\n  group 1: 1 tensor, 1 number, lr 0.5, betas 0.9, 0.999, eps 1e%-08, "
      .. "weight_decay 0$", pretty.format(opt))
    local schedule = ps.sched.constant { optimizer = opt, max_lr = 0.25 }
    assert.equal("constant, 0 steps, lr 0.25", pretty.format(schedule))
  end)

  it("offers nothing if nothing can be known, and never raises an error or calls a function", function()
    for _, text in ipairs { "", "nosuch.", "f().", "1.", "\"abc", "completion_target.name.", "a..", "x:y:", ")." } do
      assert.has_no.errors(function() complete.candidates(text) end)
    end
    assert.same({}, (complete.candidates("f().a")))
    assert.same({}, (complete.candidates("nosuch.a")))
    target.trap = setmetatable({}, { __index = function() error("trap") end })
    assert.same({}, (complete.candidates("completion_target.trap.a.b")))
  end)

  it("inserts the common part and lists the rest", function()
    assert.same({ "arget" }, { complete.tab("completion_t", 80) })
    assert.same({ "" }, { complete.tab("nosuch.", 80) })
    local insert, listing = complete.tab("completion_target.n", 80)
    assert.same({ "", "name    nested" }, { insert, listing })
    assert.same({ "", "name\nnested" }, { complete.tab("completion_target.n", 10) })
  end)
end)

describe("ps.strict", function()
  it("makes undeclared globals errors", function()
    local p = assert(io.popen(("'%s' -e \"%s\" 2>&1"):format(paths.exe, [[
      local strict = require 'ps.core.strict'
      strict.declare('fine') fine = 1
      print(fine, (pcall(function() wrong = 1 end)), (pcall(function() return wrong end)), rawget(_G, 'wrong'))]])))
    local out = p:read("*a")
    p:close()
    assert.equal("1\tfalse\tfalse\tnil\n", out)
  end)
end)

describe("the prompt", function()
  it("keeps the locals of a statement for the next ones", function()
    local out, err = prompt("local a, b = 3, 4\na + b\nlocal function twice(x) return 2 * x end\ntwice(a)\n"
      .. "local none\nnone\n")
    assert.equal("", err)
    assert.equal("> > 7\n> > 6\n> > nil\n> \n", out)
    out, err = prompt("for i = 1, 2 do\n  local inner = i\nend\ninner\ndo local hidden = 1 end\nhidden\n"
      .. "local z = 1 return z\nz\n")
    assert.equal("", err)
    assert.equal("> >> >> > nil\n> > nil\n> 1\n> nil\n> \n", out)
    out = prompt "local t = { 1,\n  2 } -- two\n#t\n"
    assert.equal("> >> > 2\n> \n", out)
  end)

  it("runs README's first listing when pasted", function()
    local folder = ranks_lib.folder()
    local text = check.read(paths.root .. "/README.md"):match "```lua\n(.-)\n```"
    local ids = {}
    for i = 1, 400 do ids[i] = i % 250 end
    require("ps").data.write_tokens(folder .. "/tokens_000000.bin", ids)
    -- Returns the same script with a small model and its own shard.
    for from, to in pairs { ['gpt2.new("gpt2", {'] = 'gpt2.new("tiny", { vocab_size = 50257, n_positions = 1024,',
      ["batch = 4, seq = 1024"] = "batch = 2, seq = 16", ["tokens_000000.bin"] = folder .. "/tokens_000000.bin",
      ['dtype = "bf16"'] = 'dtype = "fp32"' } do
      local at, last = text:find(from, 1, true)
      text = text:sub(1, at - 1) .. to .. text:sub(last + 1)
    end
    local out, err = prompt(text .. "\nloader:position().batch, optimizer.steps\n")
    assert.equal("", err)
    assert.matches("> 0\n12\n> \n$", out)
    ranks_lib.remove(folder)
  end)

  it("ends at exit and quit, and prints an overview at ?", function()
    for _, word in ipairs { "exit", "exit()", "quit", "quit()" } do
      local out, err = prompt("1\n" .. word .. "\n2\n")
      assert.same({ "> 1\n> \n", "" }, { out, err })
    end
    local out = prompt "exit = 5\nexit\n"
    assert.equal("> > 5\n> \n", out)
    for _, word in ipairs { "?", "help" } do
      assert.matches("help(ps.nn.Linear)", (prompt(word .. "\n")), 1, true)
    end
  end)

  it("prints the value of an error that is not a text", function()
    for raises, told in pairs { ["error { code = 3 }"] = "table, not a string: { code = 3 }",
      ["error()"] = "nil, not a string: nil", ["error(true)"] = "boolean, not a string: true" } do
      local out, err = prompt(raises .. "\n1\n")
      assert.equal("the error is a " .. told .. "\n", err)
      assert.equal("> > 1\n> \n", out)
    end
  end)
end)
