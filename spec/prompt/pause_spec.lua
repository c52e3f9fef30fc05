-- SPDX-License-Identifier: BSD-3-Clause
-- Ctrl-C pauses a script on a terminal: the contents of the prompt, its possibilities, and a run that continues with
-- the bits of one that was never paused.
local paths = require "ps.paths"
local terminal = require "spec.terminal_lib"

local folder

--- Writes a script in the scratch folder, and returns its path.
---@param text string
---@return string path
local function script(text)
  local path = folder .. "/script.lua"
  local f = assert(io.open(path, "wb"))
  f:write(text)
  f:close()
  return path
end

-- A loop of 300 iterations in plain memory. In iteration 250 it raises SIGINT, as a terminal does for Ctrl-C. At the
-- end it prints the bits of its losses and parameters.
local PLAIN = [[
local ps = require "ps"
local signal, unistd = require "posix.signal", require "posix.unistd"
ps.manual_seed(7)
local net = ps.nn.Linear(8, 4)
local opt = ps.optim.AdamW(net:parameters(), { lr = 1e-2 })
local losses = {}
local function step(i)
  local x = ps.randn { 16, 8 }
  local loss = ps.F.dropout(net(x), 0.25):square():mean()
  local shown = i * 2
  losses[i] = loss:item()
  if i == 250 and arg[1] == "pause" then signal.kill(unistd.getpid(), signal.SIGINT) end
  loss:backward()
  opt:step()
  opt:zero_grad()
end
for turn = 1, 300 do
  local unread = turn + 0.5
  step(turn)
end
local sum = 0
for i = 1, 300 do sum = sum * 1.0000001 + losses[i] end
print(("end %.17g %.17g %.17g"):format(sum, net.weight:sum():item(), ps.randn({ 1 }):item()))
]]

-- Three steps of two micro-batches each, with an engine, dropout and recompute. stop("name") raises SIGINT if the
-- script's first argument is this name. The end prints the bits of all values, and the trace.
local ENGINE = [[
local ps = require "ps"
local nn = ps.nn
local signal, unistd = require "posix.signal", require "posix.unistd"
local place, device, passes = arg[1], arg[2], 0
local function stop(name)
  if name ~= place then return end
  place = nil
  signal.kill(unistd.getpid(), signal.SIGINT)
  local _ = 1
end
local Net = nn.class("Net")
function Net:init()
  self.a, self.b, self.c = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 8)
  self.drop = nn.Dropout(0.3)
end
function Net:forward(x, y)
  x = self.drop(ps.F.gelu(self.a(x)))
  local h = ps.recompute(function(given)
    if passes == 5 then stop "forward" elseif passes == 6 then stop "recompute" end
    if ps.grad_enabled() or passes < 7 then passes = passes + 1 end
    return self.drop(ps.F.gelu(self.b(given)))
  end, x)
  return ps.F.cross_entropy(self.c(h), y)
end
local memory = { cpu = { host = "120KiB", disk = { path = arg[3], limit = "2MiB" } },
  sim = { device = "120KiB", host = "200KiB", disk = { path = arg[3], limit = "2MiB" } },
  plain = "plain" }
ps.manual_seed(11)
local model, optimizer = ps.initialize { quiet = true, model_func = function() return Net() end,
  config = { plan_print = false, chunk_size = 1024, gradient_accumulation_steps = 2, memory = memory[device],
    device = device ~= "plain" and device or nil, overlap_optimizer = arg[4] == "overlap",
    optimizer = { type = "AdamW", params = { lr = 1e-2 } } } }
local input, target = ps.randn { 6, 16 }, ps.randint(0, 8, { 6 }, { dtype = "int32" })
local losses = {}
for step = 1, 3 do
  optimizer:zero_grad()
  if step == 2 then stop "between" end
  for micro = 1, 2 do
    local loss = model(input + step, target)
    losses[#losses + 1] = ("%.17g"):format(loss:item())
    if step == 2 and micro == 2 then stop "loss" end
    model:backward(loss)
    if step == 2 then stop("backward" .. micro) end
  end
  optimizer:step()
end
local sum = 0
for _, p in ipairs(model:parameters()) do sum = sum * 1.5 + p:to("cpu"):sum():item() end
local uses = 0
for _, moment in ipairs(ps.trace { all = true } or {}) do
  for _, use in ipairs(moment.uses) do uses = (uses * 31 + moment.moment * 7 + use.chunk) % 1000003 end
end
print(("end %s %.17g %.17g %d %d"):format(table.concat(losses, " "), sum, ps.randn({ 1 }):item(), uses,
  #(ps.trace { all = true } or {})))
]]

describe("Ctrl-C on a terminal", function()
  setup(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(os.execute("mkdir " .. folder) == 0)
  end)
  teardown(function() os.execute("rm -rf " .. folder) end)

  local function ends(args)
    local text, status = terminal.start(args):finish()
    assert.equal(0, status, text)
    return (assert(text:match "end [^\n]*", text))
  end

  it("pauses a loop in iteration 250 with its variables, and it continues with the same bits", function()
    local path = script(PLAIN)
    local whole = ends { path }
    local t = terminal.start { path, "pause" }
    t:expect "paused at "
    t:expect "variables of the script: "
    t:expect "> "
    assert.equal("250", t:ask "turn")
    assert.equal("250.5", t:ask "unread")
    assert.equal("500", t:ask "shown")
    assert.equal("true", t:ask "loss:item() == losses[250]")
    assert.equal("249", t:ask "#losses - 1")
    assert.equal("true", t:ask "ps.randn({ 3 }):sum():item() ~= ps.randn({ 3 }):sum():item()")
    assert.equal("true", t:ask "net(ps.ones { 2, 8 }):sum():item() ~= 0")
    local said = t:ask "ps.zeros { 2 } + ps.zeros { 3 }"    -- an error at the prompt, not at a line of the script
    assert.truthy(said:find "^add: " and not said:find("script.lua", 1, true), said)
    assert.truthy(t:ask("net.weight:zero_()"):find("to write into a parameter must wait", 1, true))
    assert.truthy(t:ask("loss:backward()"):find("backward must wait", 1, true))
    assert.truthy(t:ask("opt:step()"):find("optimizer:step() must wait", 1, true))
    assert.truthy(t:ask("opt:zero_grad()"):find("optimizer:zero_grad() must wait", 1, true))
    t:type "while true do end\n"
    t:expect "while true do end"
    t:wait(0.5)                                            -- it runs
    t:interrupt()
    t:expect "interrupted!"
    t:expect "> "
    t:type "continue\n"
    local text, status = t:finish()
    assert.equal(0, status, text)
    assert.equal(whole, text:match "end [^\n]*")
  end)

  -- Iterations from 57 on are compiled unless something prevents it, and iteration 250 leaves the compiled code.
  it("shows values that nothing reads again, in functions that were running when a step began", function()
    local t = terminal.start { script [[
      local ps = require "ps"
      local signal, unistd = require "posix.signal", require "posix.unistd"
      local w = ps.nn.Parameter(ps.ones { 2 })
      for turn = 1, 300 do
        local loss = turn + 0.5
        if turn == 1 then w:sum():backward() end
        if turn == 250 then signal.kill(unistd.getpid(), signal.SIGINT) end
        local _ = 1
      end]] }
    t:expect "variables of the script: loss, ps, signal, turn, unistd, w\n"
    t:expect "> "
    assert.equal("250\n250.5", t:ask "turn, loss")
    t:type "continue\n"
    local text, status = t:finish()
    assert.equal(0, status, text)
    assert.falsy(text:find("may have been compiled", 1, true), text)
  end)

  it("assigns values to the script's variables, and keeps other names in the pause", function()
    local t = terminal.start { script [[
      local ps = require "ps"
      local signal, unistd = require "posix.signal", require "posix.unistd"
      counted = 1
      local rate, x, none, top = 0.1, ps.ones { 200, 200 }, nil, 5
      local function inner(a)
        local b = a + top
        signal.kill(unistd.getpid(), signal.SIGINT)
        return a, b, rawget(_G, "fresh"), rawget(_G, "ps"), top
      end
      print("first", inner(1))
      print("second", inner(2))
      print("end", rate, x:sum():item(), none, counted)]] }
    t:expect "paused at "
    t:expect "variables of the script: a, b, inner, none, ps, rate, signal, top, unistd, x\n"
    t:expect "> "
    t:wait(0.3)                                            -- until the prompt reads
    t:type "unis\t"
    t:expect "unistd"
    t:type " ~= 1\n"
    t:expect "true\n> "
    t:run "a, top, rate, none = 10, 50, rate * 2, 'now'"
    t:run "x = x * 3"
    t:run "fresh, counted = 7, counted + 1"
    assert.equal("7\n10\n50\n0.2\n2", t:ask "fresh, a, top, rate, counted")
    assert.equal("nil", t:ask "_G.fresh")
    t:wait(0.3)                                            -- until the prompt reads
    t:type "\4"                                            -- end of input, so the script continues
    t:expect "first\t10\t6\tnil\tnil\t50\n"
    t:expect "paused at "
    t:expect "> "
    assert.equal("7\n52", t:ask "fresh, b")
    t:type "  continue;\n"
    local text = t:finish()
    assert.truthy(text:find("second\t2\t52\tnil\tnil\t50\n", 1, true), text)
    assert.truthy(text:find("end\t0.2\t120000\tnow\t2\n", 1, true), text)
  end)

  it("raises an error in the script when it is aborted", function()
    local t = terminal.start { script [[
      local signal, unistd = require "posix.signal", require "posix.unistd"
      local function inner()
        signal.kill(unistd.getpid(), signal.SIGINT)
        return 1
      end
      print("caught", pcall(inner))
      inner()
      print "not reached"]] }
    for _ = 1, 2 do
      t:expect "variables of the script: "
      t:expect "> "
      t:type "abort\n"
    end
    local text, status = t:finish()
    assert.truthy(text:find("script.lua:4: aborted at the prompt\n", 1, true), text)
    assert.truthy(text:find("caught\tfalse\t", 1, true), text)
    assert.truthy(text:find("stack traceback:\n", 1, true), text)
    assert.truthy(text:find("in function 'inner'", 1, true), text)
    assert.falsy(text:find("\nnot reached", 1, true), text)
    assert.equal(1, status)
  end)

  it("reports that values may be out of date", function()
    local t = terminal.start { script [[
      local sum = 0
      while true do
        for i = 1, 100 do sum = (sum + i) % 1000 end
        local _ = function() return sum end                -- the function is interpreted
      end]] }
    t:wait(1)
    t:interrupt()
    t:expect "(some of its functions may have been compiled"
    t:expect "> "
    t:type "abort\n"
    t:finish()
  end)

  it("is an ordinary interrupt for one of several ranks, and for psluajit's own tools", function()
    local path = script 'require("posix.signal").kill(require("posix.unistd").getpid(), 2) print "not reached"'
    local text, status = terminal.start({ path }, { RANK = "0", WORLD_SIZE = "2", LOCAL_RANK = "0",
      MASTER_ADDR = "127.0.0.1" }):finish()
    assert.equal(1, status)
    assert.truthy(text:find("script.lua:1: interrupted! (one of 2 ranks cannot pause", 1, true), text)
    assert.falsy(text:find("not reached", 1, true), text)
    local t = terminal.start { paths.root .. "/tools/plan.lua", path }
    text = t:finish()
    assert.falsy(text:find("paused at", 1, true), text)
  end)

  local PLACES = { cpu = { "between", "forward", "recompute", "loss", "backward1", "backward2" },
    sim = { "forward", "backward1", "backward2" }, plain = { "recompute", "loss" } }
  for _, device in ipairs { "cpu", "sim", "plain" } do
    it("pauses a step of an engine anywhere, without any effect on it: " .. device, function()
      local path = script(ENGINE)
      local whole = ends { path, "nowhere", device, folder }
      for _, place in ipairs(PLACES[device]) do
        local t = terminal.start { path, place, device, folder }
        t:expect "paused at "
        t:expect "> "
        t:wait(0.05)
        assert.equal("{ 6, 16 }", t:ask "input:shape()")
        assert.truthy(tonumber((t:ask "model(ps.ones { 2, 16 }, target:narrow(0, 0, 2)):item()")), place)
        assert.equal("true", t:ask "ps.randn({ 200, 64 }):abs():sum():item() > 0")
        for _, p in ipairs(place ~= "backward2" and { "a", "b", "c" } or {}) do
          assert.truthy(tonumber((t:ask(("model.module.%s.weight:abs():sum():item()"):format(p)))), place)
        end
        assert.truthy(t:ask("ps.chunks(), 1"))
        if place ~= "between" or device == "plain" then
          local said = t:ask "model.module.b.bias:zero_()"
          assert.truthy(said:find("must wait until", 1, true), place .. ": " .. said)
        end
        for _, call in ipairs { "optimizer:step()", "optimizer:zero_grad()", "model:close()",
          "model:backward(model(input, target))", "ps.enable_grad(model, input, target)" } do
          local said = t:ask(call)
          assert.truthy(said:find("must wait until", 1, true), place .. ": " .. said)
        end
        t:type "continue\n"
        local text, status = t:finish()
        assert.equal(0, status, text)
        assert.equal(whole, text:match "end [^\n]*", place)
      end
    end)
  end

  it("is left to a script that catches the signal", function()
    local text = terminal.start({ script [[
      local ps = require "ps"
      ps.catch_interrupts()
      require("posix.signal").kill(require("posix.unistd").getpid(), 2)
      print("counted", ps.interrupts())]] }):finish()
    assert.truthy(text:find("counted\t1\n", 1, true), text)
  end)
end)
