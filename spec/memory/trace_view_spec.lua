-- SPDX-License-Identifier: BSD-3-Clause
-- ps.trace: the moments of a step with the chunks that each uses, and how they print.
local ps = require "ps"
local view = require "ps.memory.trace"
local nn = ps.nn
local fails = require("spec.check_lib").fails

local Net = nn.class("TraceNet")
function Net:init()
  self.up = nn.Linear(64, 64)
  self.down = nn.Linear(64, 64)
end
function Net:forward(x)
  local h = ps.F.gelu(self.up(x))
  if self.reads then h:sum():item() end
  return self.down(h)
end

local model, optimizer

-- Opens an engine of two layers with a chunk of each kind per layer. Returns its forward and backward.
local function open(reads, overlap)
  model, optimizer = ps.initialize { quiet = true, model_func = function()
    local net = Net()
    net.reads = reads
    return net
  end, config = { train_batch_size = 2, plan_print = false, chunk_size = 4160,
    overlap_optimizer = overlap or false,
    optimizer = { type = "AdamW", params = { lr = 1e-3 } } } }
  return function() model:backward((model(ps.ones { 2, 64 }) ^ 2):mean()) end
end

-- Returns the chunks of a kind that hold a parameter.
local function chunk_of(name, kind)
  for _, chunk in ipairs(ps.chunks(name)) do
    if chunk.kind == kind then return chunk.id end
  end
end

-- Returns the first and last moment of an action that uses a chunk, and whether the last one writes it.
local function span(moments, action, id)
  local first, last, writes
  for _, m in ipairs(moments) do
    for _, use in ipairs(m.uses) do
      if m.action == action and use.chunk == id then first, last, writes = first or m.moment, m.moment, use.write end
    end
  end
  return first, last, writes
end

describe("ps.trace of an engine", function()
  after_each(function()
    if model then model:close() end
    model = nil
  end)

  it("has the uses of forward, backward and update in their order", function()
    assert.equal(0, #ps.trace())
    assert.matches("no trace: no step has been planned yet", tostring(ps.trace()), 1, true)
    local train = open()
    assert.equal(0, #ps.trace())
    train()
    local planned = ps.trace()  -- the trace of the dry run, since this step has not ended
    local up, down = chunk_of("up.weight", "param"), chunk_of("down.weight", "param")
    assert.not_equal(up, down)
    assert.truthy(span(planned, "forward", up) < span(planned, "forward", down))
    assert.truthy(span(planned, "backward", chunk_of("down.weight", "grad"))
      < span(planned, "backward", chunk_of("up.weight", "grad")))
    assert.is_nil((span(planned, "forward", chunk_of("up.weight", "grad"))))
    local backward = select(2, span(planned, "backward", chunk_of("up.weight", "grad")))
    for _, kind in ipairs { "param", "exp_avg", "exp_avg_sq" } do
      local at, _, writes = span(planned, "update", chunk_of("up.weight", kind))
      assert.truthy(at > backward and writes, kind)
    end
    local _, _, writes = span(planned, "forward", up)
    assert.is_false(writes)                                     -- a forward changes no parameter
    for m, moment in ipairs(planned) do
      assert.equal(m - 1, moment.moment)
      local nbytes = 0
      for _, use in ipairs(moment.uses) do
        assert.equal(ps.chunks(use.chunk).kind, use.kind)
        nbytes = nbytes + ps.chunks(use.chunk).nbytes
      end
      assert.equal(nbytes, moment.nbytes)
    end
    optimizer:step()
    assert.equal(#planned, #ps.trace())
    for m, moment in ipairs(ps.trace()) do assert.same(planned[m], moment) end
    model:close()
    model = nil
    assert.equal(0, #ps.trace())
  end)

  it("has the updates in backward if they overlap it, as soon as a layer's gradients are complete", function()
    local train = open(false, true)
    train()
    local trace = ps.trace()
    assert.truthy(select(2, span(trace, "backward", chunk_of("down.weight", "exp_avg")))
      < span(trace, "backward", chunk_of("up.weight", "grad")))
    assert.is_nil((span(trace, "update", chunk_of("down.weight", "exp_avg"))))
    optimizer:step()
  end)

  it("selects moments by chunk, by tensor and by action", function()
    local train = open()
    train()
    local id, all = chunk_of("down.weight", "exp_avg"), ps.trace()
    local one = ps.trace(id)
    assert.equal(1, #one)
    assert.equal("update", one[1].action)
    local named, count = ps.trace "down.weight", 0
    for _, m in ipairs(named) do count = count + (m.action == "forward" and 1 or 0) end
    assert.equal(1, count)
    local parts = 0
    for _, action in ipairs { "forward", "backward", "update" } do
      local list = ps.trace { action = action }
      for _, m in ipairs(list) do assert.equal(action, m.action) end
      parts = parts + #list
    end
    assert.equal(#all, parts)
    fails(function() ps.trace { action = "norm" } end,
      "the step has no action 'norm' (it has forward, backward, update)")
    fails(function() ps.trace "down.weigth" end, "ps.trace: no chunk holds a tensor called 'down.weigth'")
    fails(function() ps.trace(999) end, "ps.trace: there is no chunk 999")
    fails(function() ps.trace { kind = "grad" } end, "ps.trace")
    optimizer:step()
  end)

  it("is that of the first step if no dry run could make it", function()
    local train = open(true)
    train()
    assert.equal(0, #ps.trace())
    optimizer:step()
    local trace = ps.trace()
    assert.equal("forward", trace[1].action)
    assert.equal("update", trace[#trace].action)
  end)
end)

-- Returns `n` moments, each of which writes `width` chunks that no other moment uses.
local function moments_of(n, width)
  local list = {}
  for m = 0, n - 1 do
    local uses = {}
    for i = 1, width do
      uses[i] = { chunk = m * width + i, kind = "exp_avg_sq", nbytes = 2 ^ 20, tier = i % 2 == 1 and "device" or "host",
        write = true, ends = i == 2 }
    end
    list[m + 1] = { moment = m, action = "update", nbytes = width * 2 ^ 20, uses = uses }
  end
  return list
end

describe("the table of ps.trace", function()
  it("has moments with the same uses as one row", function()
    local list = moments_of(1, 2)
    list[2] = { moment = 1, action = "update", nbytes = list[1].nbytes, uses = list[1].uses }
    list[3] = { moment = 2, action = "forward", nbytes = 2 ^ 20, uses = { { chunk = 9, kind = "param", nbytes = 2 ^ 20,
      tier = "host", write = false, ends = false } } }
    assert.equal(table.concat({
      "moments  action   tier           bytes  chunks",
      " 0 .. 1  update   device+host  2.0 MiB  exp_avg_sq 1* 2*-",
      "      2  forward  host         1.0 MiB  param 9",
      "3 moments, 5 uses of 3 chunks; at most 2.0 MiB of chunks at once, at moment 0",
      "outside chunks, at most: device 1.5 MiB, host 0 B",
      "*: written; -: the chunk's contents end there",
    }, "\n"), tostring(view.list(list, { device = 1.5 * 2 ^ 20, host = 0 }, {})))
  end)

  it("is at most 100 columns wide and leaves out the middle of a long trace", function()
    local function lines(options)
      local n = 0
      for line in tostring(view.list(moments_of(1000, 40), { host = 1 }, {}, options)):gmatch "[^\n]+" do
        assert.truthy(#line <= 100, line)
        n = n + 1
      end
      return n
    end
    assert.equal(1 + 33 + 3, lines())
    assert.equal(1 + 1000 + 3, lines { all = true })
    local text = tostring(view.list(moments_of(1000, 1), { host = 1 }, {}))
    assert.matches("... 968 more: ps.trace{all=true}", text, 1, true)
  end)
end)
