-- SPDX-License-Identifier: BSD-3-Clause
-- The record of events: the files of ps.profiler.save (docs/profiling.md), compared with the engine's own numbers and
-- with costs computed by hand.
local ps = require "ps"
local json = require "cjson"
local chunks = require "ps.memory.chunks"
local fails = require("spec.check_lib").fails
local ffi, C, nn = ps.ffi, ps.C, ps.nn

local function read(path)
  local file = assert(io.open(path))
  local all = json.decode(file:read("*a"))
  file:close()
  return all
end

-- Saves the record and reads it back.
local function saved()
  local path = os.tmpname()
  ps.profiler.save(path)
  local all = read(path)
  os.remove(path)
  return all.traceEvents, all.psluajit
end

local function of(events, cat, name)
  local list = {}
  for _, e in ipairs(events) do
    if e.cat == cat and (not name or e.name == name) then list[#list + 1] = e end
  end
  return list
end

local Net = nn.class("Net")
function Net:init(width, deep)
  self.a = nn.Linear(width, 4 * width)
  self.act = nn.GELU()
  self.b = nn.Linear(4 * width, width)
  self.deep = deep and Net(width) or nil
end
function Net:forward(x)
  x = self.b(self.act(self.a(x)))
  return self.deep and self.deep(x) or x
end

local function train(model, optimizer, steps)
  for _ = 1, steps do
    local loss = model(ps.randn { 8, 64 }):pow(2):mean()
    model:backward(loss)
    optimizer:step()
  end
end

local function engine(memory)
  return ps.initialize { quiet = true, model_func = function() return Net(64, true) end,
    config = { optimizer = { type = "AdamW", params = { lr = 1e-3 } }, memory = memory, chunk_size = 16384 } }
end

-- Returns the bytes copied up and down between tiers.
local function moved()
  local up, down = 0, 0
  for _, tier in ipairs(chunks.tiers()) do up, down = up + tier.bytes_up, down + tier.bytes_down end
  return up, down
end

describe("the cost of an op", function()
  local cost, outs = ffi.new("ps_op_cost_info"), ffi.new "ps_tensor *[PS_MAX_OUT]"
  local function of_op(name, n_in, ins, attrs, n_out, out)
    local list = ffi.new "ps_tensor *[64]"
    for i = 1, #ins do list[i - 1] = ins[i] end
    outs[0], outs[1] = out, nil
    ps.check(C.ps_op_cost(C["PS_OP_" .. name], n_in, list, ffi.new("ps_attrs_" .. name, attrs), n_out, outs, cost))
    return tonumber(cost.flops), tonumber(cost.bytes)
  end
  local function t(...) return ps.empty({ ... }, { device = "meta" }) end

  it("is two FLOPs for each multiplication and addition of a product, and each operand's bytes once", function()
    assert.same({ 2 * 5 * 3 * 7, 4 * (15 + 21 + 35) }, { of_op("matmul", 2, { t(5, 3), t(3, 7) }, {}, 1, t(5, 7)) })
    assert.same({ 2 * 2 * 5 * 3 * 7, 4 * (30 + 21 + 70) },
      { of_op("matmul", 2, { t(2, 5, 3), t(1, 3, 7):expand { 2, 3, 7 } }, {}, 1, t(2, 5, 7)) })
    assert.same({ 2 * 6 * 4 * 8, 4 * (24 + 32 + 48) },
      { of_op("linear", 4, { t(2, 3, 4), t(8, 4) }, { out_in = 1 }, 1, t(2, 3, 8)) })
  end)

  it("counts the visible pairs of query and key", function()
    local q, k = t(2, 4, 5, 8), t(2, 2, 9, 8)                     -- queries at positions 4 to 8
    local seen = 5 + 6 + 7 + 8 + 9
    local function flops(attrs) return (of_op("attention", 4, { q, k, k }, attrs, 2, q)) end
    assert.equal(4 * 2 * 4 * 8 * 45, flops {})
    assert.equal(4 * 2 * 4 * 8 * seen, flops { causal = 1 })
    assert.equal(4 * 2 * 4 * 8 * 15, flops { causal = 1, window = 3 })
  end)

  it("counts nothing for a view, and only the rows of a table that are read", function()
    assert.same({ 0, 0 }, { of_op("permute", 1, { t(5, 3) }, {}, 1, t(3, 5)) })
    assert.same({ 0, 4 * (6 + 2 * 6 * 8) },
      { of_op("embedding", 2, { t(1000, 8), ps.empty({ 6 }, { device = "meta", dtype = "int32" }) }, {}, 1,
        t(6, 8)) })
    -- The gradient is read, the parameter is written, and the master and both averages are read and written.
    assert.same({ 0, 4 * 10 * 8 }, { of_op("adam_", 5, { t(10), t(10), t(10), t(10), t(10) }, {}, 1, t(10)) })
  end)

  it("refuses another number of operands", function()
    fails(function() of_op("matmul", 1, { t(5, 3) }, {}, 1, t(5, 7)) end, "matmul has 2 inputs and 1 outputs, but 1")
    fails(function() of_op("matmul", 2, { t(5, 3) }, {}, 1, t(5, 7)) end, "matmul: input 1 is missing")
  end)
end)

describe("ps.profiler", function()
  after_each(function() ps.profiler.stop() end)

  it("records ops with their module, also those of backward, steps and phases, each inside of the other", function()
    ps.profiler.start()
    local model, optimizer = engine { host = "1GiB" }
    train(model, optimizer, 2)
    local events, about = saved()
    model:close()
    assert.same({ 1, 0, 1, 0 }, { about.version, about.rank, about.ranks, about.dropped })
    assert.equal(2, #about.steps)
    local products = of(events, "op", "linear")
    local by = {}
    for _, e in ipairs(products) do
      local key = e.args.phase .. " " .. e.args.module
      by[key] = (by[key] or 0) + 1
    end
    assert.same({ ["forward a"] = 2, ["forward b"] = 2, ["forward deep.a"] = 2, ["forward deep.b"] = 2,
      ["backward b"] = 2, ["backward deep.a"] = 2, ["backward deep.b"] = 2 }, by)    -- the input needs no gradient
    for _, e in ipairs(products) do assert.equal(2 * 8 * 64 * 256, e.args.flops) end
    for _, e in ipairs(of(events, "op", "adam_")) do assert.equal("update", e.args.phase) end
    local inside = 0
    for _, op in ipairs(products) do
      for _, outer in ipairs(events) do
        local around = outer.ph == "X" and outer.ts <= op.ts and op.ts + op.dur <= outer.ts + outer.dur + 0.002
        if around and (outer.cat == "action" or outer.cat == "step" or outer.cat == "module") then
          inside = inside + 1
          assert.equal(op.args.step, outer.args.step)
        end
      end
    end
    -- Each forward op is nested in four events: step, action, module and the outer Net. Half of the ops are also in the
    -- inner Net. Each backward op is nested in step and action.
    assert.equal(4 * 4 + 4 * 5 + 6 * 2, inside)
  end)

  it("has the places of chunks and the bytes of tiers: its last events agree with ps.chunks and ps.memory", function()
    local model, optimizer = engine { host = "1MiB", disk = { path = "/tmp", limit = "32MiB" } }
    train(model, optimizer, 1)
    ps.profiler.start()
    local up_before, down_before = moved()
    train(model, optimizer, 2)
    ps.no_grad(function() return ps.ones { 2 } + 1 end)                 -- an op after the last release of memory
    local events, about = saved()
    local up_after, down_after = moved()
    local on, bytes, up, down = {}, {}, 0, 0
    for _, e in ipairs(events) do
      if e.cat == "chunk" then on[e.args.chunk] = table.concat(e.args.on, " ") end
      if e.cat == "memory" then bytes[e.name] = e.args.chunks end
      if e.cat == "copy" and e.name == "fetch" then up = up + e.args.bytes end
      if e.cat == "copy" and e.name == "evict" then down = down + e.args.bytes end
    end
    assert.truthy(up > 0 and down > 0)
    assert.equal(up_after - up_before, up)
    assert.equal(down_after - down_before, down)
    assert.equal(ps.memory().tiers[1].chunks, bytes.host)
    local list = ps.chunks { all = true }
    assert.equal(#list, #about.chunks)
    for _, chunk in ipairs(list) do
      local names = {}
      for _, tier in ipairs { "host", "disk" } do if chunk.tiers[tier] then names[#names + 1] = tier end end
      assert.equal(names[1], on[chunk.id]:match("%w+"))
    end
    assert.truthy(#of(events, "disk", "read") > 0 and #of(events, "disk", "write") > 0)
    model:close()
  end)

  it("counts the work space of kernels among the bytes of their device", function()
    local a = ps.ones({ 64, 64 }, { device = "ref" })
    ps.profiler.start()
    local y = ps.no_grad(function() return a:matmul(a) end)
    local most, last = 0, nil
    for _, e in ipairs((saved())) do
      if e.cat == "memory" and e.name == "ref" then most, last = math.max(most, e.args.other), e.args.other end
    end
    assert.equal(64 * 64, y:numel())
    assert.truthy(most >= last + 3 * 64 * 64 * 8, most - last)           -- ref multiplies copies in fp64
  end)

  it("keeps the newest events, and counts the dropped events and all calls", function()
    local x = ps.ones { 4 }
    ps.profiler.start { events = 10 }
    for _ = 1, 40 do x = x * 1 end
    local _ = -x
    local rows = ps.profiler.stop()
    local events, about = saved()
    assert.equal(41, rows[1].calls)
    assert.equal(10, about.events)
    assert.truthy(about.dropped >= 31)
    assert.equal("affine", of(events, "op")[#of(events, "op")].name)
    fails(function() ps.profiler.start { events = 0 } end, "events is 0; it must be 1 to")
    fails(function() ps.profiler.save() end, "takes the name of a file")
    fails(function() ps.profiler.save("x.json", { aligned = true }) end, "did you mean 'align'?")
    fails(function() ps.profiler.save "/no/such/folder/profile.json" end, "no/such/folder")
  end)

  it("records nothing after stop", function()
    ps.profiler.start()
    ps.profiler["end"]()
    local _ = ps.ones { 4 } * 2
    assert.equal(0, #of((saved()), "op"))
  end)

  it("has no module after a failed call outside of all scopes", function()
    local Bad = nn.class("Bad")
    function Bad:init() self.inner = nn.Linear(3, 3) end                 -- init opens no scope
    function Bad:forward(x) return self.inner(x) end
    for _, module in ipairs { nn.Linear(3, 3), Bad() } do
      fails(function() module(ps.ones { 2, 2 }) end, "w needs 3")
      assert.equal(0, C.ps_module_now())
    end
  end)

  it("has the right module after one that failed, and in a recomputed segment", function()
    local Bad = nn.class("Bad")
    function Bad:forward(x) return x:matmul(ps.ones { 3, 3 }) end
    local bad, good = Bad(), Net(64)
    pcall(ps.scope, bad, ps.ones { 2, 2 })
    ps.profiler.start()
    local _ = ps.ones { 4 } * 2
    good.recomputes = true
    local loss = good(ps.randn({ 8, 64 })):sum()
    loss:backward()
    local events = saved()
    for _, e in ipairs(of(events, "op", "affine")) do assert.equal(nil, e.args.module) end
    assert.equal(3, #of(events, "op", "linear") - 2)  -- twice in forward, and the gradient of b's input
    for _, e in ipairs(of(events, "op", "linear")) do assert.truthy(e.args.module:match("^[ab]$")) end
  end)
end)

describe("a report", function()
  -- Two steps of 10 ms. Each has a product of 4 ms in the forward of h.0.attn, one of 2 ms in its backward, a wait of 1
  -- ms in h.0 and an Adam of 1 ms. h.0 takes 6 ms in forward.
  local function profile(slower)
    local events = {}
    local function event(cat, name, ts, dur, args)
      events[#events + 1] = { name = name, cat = cat, ph = "X", ts = ts, dur = dur, pid = 0, tid = 0, args = args }
    end
    for step = 1, 2 do
      local at = (step - 1) * 10000
      local function op(name, ts, dur, phase, module, flops, dtype)
        event("op", name, at + ts, dur, { step = step, phase = phase, module = module, flops = flops, bytes = 4e6,
          dtype = dtype })
      end
      event("module", "h.0 (Block)", at, 6000, { step = step, phase = "forward", path = "h.0" })
      event("module", "h.0.attn (Attention)", at, 5000, { step = step, phase = "forward", path = "h.0.attn" })
      op("linear", at * 0, 4000 * slower, "forward", "h.0.attn", 8e6, "bf16")
      event("wait", "copy", at + 4000, 1000, { step = step, phase = "forward", module = "h.0" })
      op("linear", 6000, 2000, "backward", "h.0.attn", 8e6, "fp32")
      op("adam_", 8000, 1000, "update", nil, 0)
    end
    return { displayTimeUnit = "ms", traceEvents = events, psluajit = { version = 1, events = 10, dropped = 3,
      steps = { { step = 1, first = true, begin = 0, ["end"] = 10000 },
        { step = 2, first = false, begin = 10000, ["end"] = 20000 } } } }
  end
  local function written(content)
    local path = os.tmpname()
    local file = assert(io.open(path, "w"))
    file:write(type(content) == "table" and json.encode(content) or content)
    file:close()
    return path
  end
  local function near(expected, found) assert.truthy(math.abs(expected - found) < 1e-9, expected .. " " .. found) end

  it("reports that nothing was recorded", function()
    local p = assert(io.popen(("'%s' -e 'require(\"ps\").profiler.report()' 2>&1"):format(require("ps.paths").exe)))
    local out = p:read "*a"
    p:close()
    assert.matches("^nothing was recorded: call ps.profiler.start%(%) before[^\n]*\n$", out)
  end)

  it("sums ops and modules per step, next to a limit and another profile", function()
    local path, other = written(profile(1)), written(profile(0.5))
    local limits = { flops = 4e9, bytes = 4e9 }
    local rows = ps.profiler.report { file = path, against = other, limits = limits, quiet = true }
    assert.same({ "linear", "adam_" }, { rows[1].name, rows[2].name })
    near(0.006, rows[1].seconds)
    near(0.004, rows[1].forward)
    near(0.002, rows[1].backward)
    near(0.004, rows[1].before)
    near(16e6, rows[1].flops)
    near((16e6 / 4e9) / 0.006, rows[1].limit)
    near((4e6 / 4e9) / 0.001, rows[2].limit)
    near(0.010, rows.wall)
    near(0.010 - 0.007 - 0.001, rows.idle)
    rows = ps.profiler.report { file = path, by = "module", limits = false, quiet = true }
    local by = {}
    for _, row in ipairs(rows) do by[row.name] = row end
    local names = {}
    for i, row in ipairs(rows) do names[i] = row.name end
    assert.same({ "", "h", "h.0", "h.0.attn", "(no module)" }, names)    -- also h, which is never called
    near(0.006, by["h.0.attn"].seconds)
    near(0.006, by["h.0"].seconds)
    near(0.006, by["h"].seconds)
    near(0.001, by["h.0"].waits)
    -- 6 ms minus 4 ms of the op and 1 ms of the wait
    near(0.001, by["h.0"].idle)
    near(0.001, by["(no module)"].seconds)
    assert.truthy(tostring(rows):find("3 older events were overwritten", 1, true))
    os.remove(path)
    os.remove(other)
  end)

  it("compares products with the speed of their type", function()
    local path = written(profile(1))
    local function limits_of(flops)
      local rows = ps.profiler.report { file = path, limits = { flops = flops, bytes = 4e9 }, quiet = true }
      return rows[1].limit, rows[2].limit, tostring(rows)
    end
    local products, update, text = limits_of { bf16 = 16e9, float32 = 2e9 }
    near((8e6 / 16e9 + 8e6 / 2e9) / 0.006, products)
    near((4e6 / 4e9) / 0.001, update)
    assert.matches("the limit: 16.0 GFLOP/s in products of bf16, 2.0 GFLOP/s in products of fp32, 4.0 GB/s", text, 1,
      true)
    products, update = limits_of { bf16 = 16e9 }                         -- without fp32's rate there is no limit
    assert.equal(nil, products)
    near((4e6 / 4e9) / 0.001, update)
    fails(function() limits_of { bf16 = 0 } end, "flops (a number, or one for each type) and bytes, both per second")
    fails(function() limits_of { bf15 = 1 } end, "no such type: bf15")
    os.remove(path)
  end)

  it("has the types of products, and measures those", function()
    ps.profiler.start()
    ps.no_grad(function()
      for dtype, side in pairs { fp32 = 8, bf16 = 16 } do
        local a = ps.ones({ side, side }, { dtype = dtype })
        local _ = a:matmul(a) + 1
      end
    end)
    local events = saved()
    local types = {}
    for _, e in ipairs(of(events, "op")) do types[e.args.flops] = e.args.dtype or types[e.args.flops] end
    assert.same({ [2 * 8 ^ 3] = "fp32", [2 * 16 ^ 3] = "bf16" }, types)
    local rows = ps.profiler.report { quiet = true }
    assert.truthy(rows.limits.flops.fp32 > 1e8 and rows.limits.flops.bf16 > 1e8 and rows.limits.bytes > 1e8)
    assert.equal(nil, rows.limits.flops.fp16)
    fails(function() ps.profiler.report { device = "gpu9" } end, "gpu9")
  end)

  it("has no limit if this machine lacks the profile's device", function()
    local made = profile(1)
    for _, e in ipairs(made.traceEvents) do e.args.device = "gpu9" end
    local path = written(made)
    assert.equal(nil, ps.profiler.report({ file = path, quiet = true })[1].limit)
    os.remove(path)
  end)

  it("refuses truncated files, files of other programs and versions, and wrong options", function()
    local whole = json.encode(profile(1))
    for text, words in pairs { [whole:sub(1, 300)] = "is not a profile, or", ['{"traceEvents":[]}'] = "it lacks",
        ["[1]"] = "it lacks", [whole:gsub('"version":1', '"version":2')] = "a profile of version 2" } do
      local path = written(text)
      fails(function() ps.profiler.report { file = path, quiet = true } end, words)
      os.remove(path)
    end
    local function damaged(words, change)
      local made = profile(1)
      change(made)
      local path = written(made)
      fails(function() ps.profiler.report { file = path, quiet = true } end, "is damaged: " .. words)
      os.remove(path)
    end
    damaged("psluajit.steps is not a list", function(made) made.psluajit.steps = nil end)
    damaged("psluajit.steps[1].end is not a number", function(made) made.psluajit.steps[1]["end"] = "x" end)
    damaged("traceEvents[1] is not an object", function(made) made.traceEvents[1] = 1 end)
    damaged("traceEvents[2].dur is not a number", function(made)
      made.traceEvents[2] = { cat = "wait", name = "copy", ts = 1, args = { step = 1 } }
    end)
    damaged("traceEvents[3].args.dtype is not a text", function(made) made.traceEvents[3].args.dtype = 1 end)
    damaged("traceEvents[3].args.module is not a text", function(made) made.traceEvents[3].args.module = { 1 } end)
    damaged("psluajit.dropped is not a number", function(made) made.psluajit.dropped = json.null end)
    damaged("traceEvents[1].args is not an object", function(made)
      made.traceEvents[1] = { cat = "op", name = "linear", ts = 1, dur = 1 }
    end)
    fails(function() ps.profiler.report { file = "/no/such" } end, "cannot read")
    fails(function() ps.profiler.report { by = "line" } end, "'op' or 'module'")
    for _, limits in ipairs { { flops = 1 }, { flops = 0, bytes = 1 }, { flops = 1, bytes = -1 } } do
      fails(function() ps.profiler.report { limits = limits } end, "and bytes, both per second and above 0")
    end
  end)
end)
