-- SPDX-License-Identifier: BSD-3-Clause
-- Engines that keep activations or embeddings on the host (activation_checkpointing.cpu_checkpointing,
-- use_cpu_embedding) or do not keep activations (recompute): the losses and parameters are those of plain memory, bit
-- for bit.
local ps = require "ps"
local engine_of = require("ps.nn.handle").of
local nn = require "ps.nn"
local gpt2 = require "models.gpt2"
local F = ps.F

local check = require "spec.check_lib"
local fails, bytes = check.fails, check.bytes

before_each(function() ps.manual_seed(1) end)

local Block = nn.class("Block")
function Block:init(C_)
  self.norm, self.up, self.down = nn.LayerNorm(C_), nn.Linear(C_, 4 * C_), nn.Linear(4 * C_, C_)
  self.drop = nn.Dropout(0.1)
end
function Block:forward(x) return x + self.drop(self.down(F.gelu(self.up(self.norm(x))))) end

local Net = nn.class("Net")
function Net:init(options)
  local width = options and options.width or 32
  self.tokens, self.places = nn.Embedding(256, width, { std = 0.3 }), nn.Embedding(32, width, { std = 0.3 })
  self.h = nn.ModuleList()
  for _ = 1, options and options.layers or 3 do self.h:append(Block(width)) end
  self.out = nn.Linear(width, 256)
  self.tied, self.frozen = options and options.tied, options and options.frozen
  if self.frozen then self.places.weight:requires_grad(false) end
end
function Net:forward(x, y)
  local h = self.tokens(x) + self.places(ps.arange(x:size(1), { dtype = "int32", device = x:device() }))
  for _, block in self.h:each() do h = block(h) end
  local logits = self.tied and F.linear(h, self.tokens.weight) or self.out(h)
  return F.cross_entropy(logits:reshape(-1, 256), y:reshape(-1))
end

local function net() return Net() end

--- Trains a model. Returns the losses and the final values as bytes, and the result of `look`, which is called before
--- the engine closes.
local function train(make, config, look, batch)
  ps.manual_seed(7)
  local cfg = { optimizer = { type = "AdamW", params = { lr = 1e-2, weight_decay = 0.1 } }, plan_print = false }
  for key, value in pairs(config) do cfg[key] = value end
  local model, optimizer = ps.initialize { model_func = make, config = cfg, quiet = true }
  local result, seen = {}, nil
  local ok, err = pcall(function()
    for step = 1, 3 do
      ps.manual_seed(100 + step)
      for _ = 1, cfg.gradient_accumulation_steps or 1 do
        local x = ps.randint(0, 256, batch or { 2, 16 }, { dtype = "int32" })
        local loss = model(x, x)
        result[#result + 1] = bytes(loss)
        model:backward(loss)
        optimizer:step()
      end
      optimizer:zero_grad()
    end
    model:eval()
    local x = ps.randint(0, 256, { 1, 9 }, { dtype = "int32" })
    result[#result + 1] = bytes(ps.no_grad(model, x, x))
    for name, t in pairs(model:state_dict()) do result[name] = bytes(t) end
    seen = look and look(model)
  end)
  model:close()
  if not ok then error(err, 0) end
  return result, seen
end

local function notes(model)
  local list = {}
  for text in pairs(engine_of(model).said) do list[#list + 1] = text end
  return table.concat(list, "\n")
end

local VARIANTS = {
  { "fp32", {} }, { "bf16 with clipping", { bf16 = { enabled = true }, gradient_clipping = 0.5 } },
  { "bf16", { bf16 = { enabled = true } } },
  { "two micro-batches", { gradient_accumulation_steps = 2 } },
}

local function with(a, b)
  local all = {}
  for key, value in pairs(a) do all[key] = value end
  for key, value in pairs(b) do all[key] = value end
  return all
end

describe("an embedding whose table is on another device than its indices", function()
  it("looks up there and copies the vectors back", function()
    local here, there = nn.Embedding(50, 8), nn.Embedding(50, 8)
    there:load_state_dict(here:state_dict())
    local index = ps.randint(0, 50, { 3, 4 }, { dtype = "int32" })
    local y = there(index:to("sim"))
    assert.equal("sim", y:device())
    assert(bytes(here(index)) == bytes(y))
    y:square():sum():backward()
    here(index):square():sum():backward()
    assert.equal("cpu", there.weight:grad():device())
    assert(bytes(here.weight:grad()) == bytes(there.weight:grad()))
  end)
end)

describe("use_cpu_embedding has plain memory's bits:", function()
  local function places(model)
    local module = model.module
    return { module.tokens.weight:device(), module.places.weight:device(), module.out.weight:device() }
  end
  for _, variant in ipairs(VARIANTS) do
    it(variant[1], function()
      local want = train(net, with(variant[2], { memory = "plain" }))
      local got, where = train(net, with(variant[2], { device = "sim", use_cpu_embedding = true }), places)
      assert.same({ "cpu", "cpu", "sim" }, where)
      assert.same(want, got)
      got, where = train(net, with(variant[2], { device = "sim", use_cpu_embedding = false }), places)
      assert.same({ "sim", "sim", "sim" }, where)
      assert.same(want, got)
    end)
  end

  it("if tables are frozen, small or tied, or Adam runs on the device", function()
    local function frozen() return Net { frozen = true } end
    local function tied() return Net { tied = true } end
    local want = train(frozen, { memory = "plain" })
    local room = { device = "64MiB" }
    local got, where = train(frozen, { device = "sim", use_cpu_embedding = true, memory = room }, places)
    assert.same({ "cpu", "cpu", "sim" }, where)
    assert.same(want, got)
    -- Everything fits, so a slow host would only cost time. (spec/engine/hybrid_adam_spec.lua has embeddings for which
    -- the host pays off.)
    local rates = { host_adam = 1e6, device_adam = 1e9, up = 1e10, down = 1e10 }
    got, where = train(net, { device = "sim", memory = room, rates = rates }, places, { 2, 32 })
    assert.same({ "sim", "sim", "sim" }, where)
    assert.same(train(net, { memory = "plain" }, nil, { 2, 32 }), got)
    local said
    got = train(tied, { device = "sim", use_cpu_embedding = true }, function(model)
      where, said = places(model), notes(model)
    end)
    assert.same({ "sim", "cpu", "sim" }, where)
    assert(said:find("tokens.weight stays on the device", 1, true), said)
    assert.same(train(tied, { memory = "plain" }), got)
  end)

  it("for GPT-2, whose tables are the head and a slice: they stay", function()
    local function make() return gpt2.new("tiny") end
    local got, said = train(make, { device = "sim", use_cpu_embedding = true }, notes)
    assert(said:find("transformer.wte.weight stays on the device", 1, true), said)
    assert(said:find("transformer.wpe.weight stays on the device", 1, true), said)
    assert.same(train(make, { memory = "plain" }), got)
  end)

  it("where it has no effect, with a note", function()
    local _, said = train(net, { use_cpu_embedding = true }, notes)
    assert(said:find("use_cpu_embedding has no effect: all ops already run on the cpu", 1, true), said)
    _, said = train(net, { device = "sim", memory = "plain", use_cpu_embedding = true }, notes)
    assert(said:find("use_cpu_embedding has no effect: with memory = \"plain\"", 1, true), said)
    _, said = train(net, { use_cpu_embedding = "auto" }, notes)
    assert.falsy(said:find("use_cpu_embedding", 1, true), said)
  end)
end)

describe("cpu_checkpointing has plain memory's bits:", function()
  local AWAY = { activation_checkpointing = { cpu_checkpointing = true } }
  local function wide() return Net { width = 64, layers = 4 } end
  local BATCH = { 4, 32 }                               -- the stream: 32 KiB in fp32, 16 KiB in bf16

  local function forecast(model)
    local peak = engine_of(model).plan.forecast.tiers[1]
    return { other = peak.other, peak = peak.peak }
  end

  for _, variant in ipairs(VARIANTS) do
    it(variant[1], function()
      local plain_memory = train(wide, with(variant[2], { memory = "plain" }), nil, BATCH)
      for _, recompute in ipairs { false, true } do
        local base = with(variant[2], { device = "sim", recompute = recompute, use_cpu_embedding = false })
        local got, without = train(wide, base, forecast, BATCH)
        assert.same(plain_memory, got)
        local less
        got, less = train(wide, with(base, AWAY), forecast, BATCH)
        assert.same(plain_memory, got)
        if not recompute then assert(less.other < without.other, less.other .. " of " .. without.other) end
        got = train(wide, with(with(base, AWAY), { memory = "plain" }), nil, BATCH)
        assert.same(plain_memory, got)
      end
    end)
  end

  it("in a budget that is too small without it, with chunks moving", function()
    local function deep() return Net { width = 64, layers = 8 } end
    local batch = { 8, 32 }
    local base = { device = "sim", use_cpu_embedding = false, chunk_size = 16384 }
    local _, without = train(deep, base, forecast, batch)
    local _, less = train(deep, with(base, AWAY), forecast, batch)
    local budget = math.floor((less.other + without.other) / 2 + 4 * 16384 * 4)
    assert(budget < without.other, ("%d, %d without"):format(less.other, without.other))
    local small = with(base, { memory = { device = budget, host = "256MiB" } })
    fails(function() train(deep, small, nil, batch) end, "memory.device")
    local want = train(deep, { memory = "plain" }, nil, batch)
    assert.same(want, (train(deep, with(small, AWAY), nil, batch)))
    local disk = { path = os.getenv("TMPDIR") or "/tmp", limit = "64MiB" }
    local three = with(small, { memory = { device = budget, host = "8MiB", disk = disk } })
    local got, fetched = train(deep, with(three, AWAY), function(model)
      return engine_of(model).plan.forecast.fetched
    end, batch)
    assert.same(want, got)
    assert(fetched[1] > 0 and fetched[2] > 0, "nothing moved")
  end)

  it("where it has no effect, with a note", function()
    local _, said = train(net, AWAY, notes)
    assert(said:find("cpu_checkpointing has no effect: the model is already in host memory", 1, true), said)
  end)
end)

describe("recompute", function()
  it("has plain memory's bits", function()
    for _, variant in ipairs(VARIANTS) do
      local want = train(net, with(variant[2], { memory = "plain" }))
      assert.same(want, (train(net, with(variant[2], { recompute = true, chunk_size = 4096 }))))
      assert.same(want, (train(net, with(variant[2], { recompute = true, memory = "plain" }))))
    end
  end)

  it("is freed with its model, although the model holds an output without a backward", function()
    local Keeps = nn.class "Keeps"
    function Keeps:init() self.a, self.b = nn.Linear(96, 96), nn.Linear(96, 96) end
    function Keeps:forward(x)
      self.inner = ps.recompute(function(t) return self.a(t) end, x)
      return ps.recompute(function(t) return self.b(t) end, self.inner):sum()
    end
    ps.collect_all()
    local before, seen = ps.memory("cpu").used, setmetatable({}, { __mode = "v" })
    do
      local mine = ps.ones({ 3 }, { requires_grad = true })
      local own = ps.recompute(function(t) return t * 2 end, mine)
      local module = Keeps()
      local model = ps.initialize { quiet = true, model = module, config = { plan_print = false } }
      model(ps.randn { 24, 96 })
      seen.module = module
      model:close()
      fails(function() module.inner:sum():backward() end, "call backward before model:close()")
      own:sum():backward()                                     -- no parameter of the model is read
      assert.same({ 2, 2, 2 }, mine:grad():tolist())
    end
    ps.collect_all()
    assert.is_nil(seen.module)
    assert.equal(before, ps.memory("cpu").used)
  end)

  it("of an earlier, larger model does not affect a plan", function()
    local function others(layers, fits)
      local model = ps.initialize { quiet = true,
        model_func = function() return gpt2.new("tiny", { n_layer = layers }) end,
        config = { device = "sim", recompute = true, plan_print = false, bf16 = { enabled = true },
          memory = { device = "1MiB", host = "8MiB" } } }
      local x = ps.randint(0, 256, { 1, 32 }, { dtype = "int32", device = "sim" })
      assert.equal(fits, (pcall(model, x, x)))
      local found = fits and engine_of(model).plan.forecast.tiers[1].other
      model:close()
      return found
    end
    local alone = others(4, true)
    others(40, false)
    assert.equal(alone, others(4, true))
  end)

  it("runs again in the same budgets, however tight", function()
    local ran = 0
    for layers = 11, 17 do
      local model, optimizer = ps.initialize { quiet = true,
        model_func = function() return gpt2.new("tiny", { n_layer = layers }) end,
        config = { device = "sim", recompute = true, plan_print = false, bf16 = { enabled = true },
          memory = { device = "1MiB", host = "8MiB" } } }
      local x = ps.randint(0, 256, { 1, 32 }, { dtype = "int32", device = "sim" })
      local function step()
        optimizer:zero_grad()
        model:backward(model(x, x))
        optimizer:step()
      end
      if pcall(step) then
        ran = ran + 1
        for _ = 1, 2 do step() end
      end
      model:close()
    end
    assert.truthy(ran > 0 and ran < 7, ran)
  end)

  it("treats the elements of lists as blocks, and recomputes them in either mode", function()
    local calls = 0
    local Counted = nn.class("Counted")
    function Counted:init() self.layer = nn.Linear(4, 4) end
    function Counted:forward(x)
      calls = calls + 1
      return self.layer(x)
    end
    local inner = Counted()
    inner.more = nn.ModuleList { Counted(), Counted() }
    local model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), inner, nn.Sequential(nn.Linear(4, 4)))
    assert.equal(2, model:recompute_blocks())
    local y = model(ps.randn { 2, 4 }):sum()
    assert.equal(1, calls)
    y:backward()
    assert.equal(2, calls)
    model:eval();
    model(ps.randn { 2, 4 }):sum():backward()
    assert.equal(4, calls)
    model:train()
    model:recompute_blocks(false);
    model(ps.randn { 2, 4 }):sum():backward()
    assert.equal(5, calls)
    local lists = nn.ModuleList { nn.ModuleList { Counted(), Counted() }, Counted() }
    assert.equal(3, lists:recompute_blocks())
    assert.equal(0, nn.Linear(4, 4):recompute_blocks())
  end)

  it("reports that there is no block, or that a block is invalid", function()
    local Flat = nn.class("Flat")
    function Flat:init() self.w = nn.Linear(1, 1) end
    function Flat:forward(x, _) return self.w(x:float():reshape(-1, 1)):square():mean() end
    local _, said = train(function() return Flat() end, { recompute = true }, notes, { 2, 8 })
    assert(said:find("recompute has no effect: the model has no nn.ModuleList", 1, true), said)
    local Pair = nn.class("Pair")
    function Pair:init() self.w = nn.Linear(8, 8) end
    function Pair:forward(x) return { self.w(x) } end
    local list = nn.ModuleList { Pair() }
    list:recompute_blocks()
    fails(function() list[0](ps.randn { 2, 8 }) end, "must return tensors only")
  end)
end)
