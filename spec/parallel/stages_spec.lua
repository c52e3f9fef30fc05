-- SPDX-License-Identifier: BSD-3-Clause
-- Models cut into virtual stages (ps/engine/pipeline/stages.lua): the cut, the tensors that each rank makes and holds,
-- and the bits of the whole model if the stages run one after the other. One process performs the ranks in turn.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local check = require "spec.check_lib"
local stages = require "ps.engine.pipeline.stages"
local lib = require "spec.stages_lib"
local gpt2 = require "models.gpt2"
local ffi, C, nn, fails = ps.ffi, ps.C, ps.nn, check.fails_saying

local table_of = lib.table_of

local CONFIG = { vocab_size = 96, n_positions = 24, n_embd = 32, n_layer = 8, n_head = 4, embd_pdrop = 0.1,
  attn_pdrop = 0.1, resid_pdrop = 0.1 }

local hash_out = ffi.new("uint64_t[1]")
local function hash(t)
  ps.check(C.ps_tensor_hash(t:contiguous(), hash_out))
  return tostring(hash_out[0])
end

-- Returns the costs of parts, which are only used to split the model.
local function costs_of(list)
  local all = {}
  for i, c in ipairs(list) do
    all[i] = { name = i == 1 and "embed" or i == #list and "head" or "h." .. i - 2, forward = c, input = c, weight = c,
      numel = 10 * i, carry_nbytes = 0, activations = 0 }
  end
  return all
end

describe("a cut", function()
  it("gives the shortest step, equal parts, equal parameters, or follows a list or Megatron's layout", function()
    local costs, t = costs_of { 0, 1, 1, 1, 1, 1, 1, 4 }, table_of("1f1b", 4, 1, 8)
    -- The head has 4 of 10 units. No stage can have less than that, and the others share 6 layers.
    local first, times = stages.cut(costs, t)
    assert.equal(8, first[4])
    assert.same({ 1, 9 }, { first[1], first[5] })
    assert.equal("head", times.bound_part)
    assert.truthy(times.makespan >= times.bound and times.makespan <= times.equal)
    assert.same({ 1, 3, 5, 7, 9 }, (stages.cut(costs, t, "uniform")))
    assert.same({ 1, 3, 5, 7, 9 }, (stages.cut(costs_of { 0, 1, 1, 1, 1, 1, 1, 4 }, t, { 2, 2, 2, 2 })))
    assert.same({ 1, 2, 5, 7, 9 }, (stages.cut(costs, t, { 1, 3, 2, 2 })))
    assert.same({ 1, 4, 6, 8, 9 }, (stages.cut(costs, t, "Ett|tt|tt|L")))
    assert.same(stages.cut(costs, t), (stages.cut(costs, t, "best")))
    local list = {}
    for i = 1, 8 do list[i] = { name = costs[i].name, modules = { i < 4 and nn.Linear(1, 1) or nn.LayerNorm(1) } } end
    first = stages.cut(costs, t, "type:norm|embedding", list)        -- the last 5 of 8 parts
    assert.truthy(first[2] >= 4 and first[4] >= 6)
    fails({ "type:conv", "no part" }, function() stages.cut(costs, t, "type:conv", list) end)
    fails({ "type:.*", "name of a class" }, function() stages.cut(costs, t, "type:.*", list) end)
    first = stages.cut(costs, t, "parameters")               -- 10, 20, ... 80: 150, 110, 70 + 60..., at best 150
    local sums = {}
    for v = 1, 4 do
      sums[v] = 0
      for i = first[v], first[v + 1] - 1 do sums[v] = sums[v] + costs[i].numel end
    end
    assert.equal(110, math.max(unpack(sums)))
  end)

  it("that is invalid is refused with the numbers", function()
    local costs, t = costs_of { 0, 1, 1, 1, 1, 1, 1, 4 }, table_of("1f1b", 4, 1, 8)
    fails({ "pipeline.partition", "{ 2, 2, 2 }", "8 parts", "4 virtual stages" },
      function() stages.cut(costs, t, { 2, 2, 2 }) end)
    fails({ "Ett|tt|L" }, function() stages.cut(costs, t, "Ett|tt|L") end)
    fails({ "6 layers", "8 virtual stages" },
      function() stages.cut(costs, table_of("interleaved", 4, 2, 8)) end)
  end)
end)

describe("measured parts", function()
  it("are in seconds, do not change the model, and determine the cut", function()
    local measure, count = require "ps.engine.pipeline.measure", require "ps.engine.pipeline.count"
    local config = { vocab_size = 32768, n_positions = 64, n_embd = 64, n_layer = 4, n_head = 2, embd_pdrop = 0.1 }
    local model = ps.deferred(gpt2.new, config)
    local offset, args = tostring(ps.rng().offset), { model:example(1, 64) }
    local costs = count.parts(model, args)
    ps.collect()
    local before = ps.memory("cpu").used
    local seconds = measure.parts(model, costs, args, "cpu")
    ps.collect()
    assert.equal(before, ps.memory("cpu").used)
    assert.equal(offset, tostring(ps.rng().offset))
    for i, cost in ipairs(costs) do
      assert.equal(cost.name, seconds[i].name)
      assert.truthy(seconds[i].forward > 0 and seconds[i].input >= 0 and seconds[i].weight >= 0)
    end
    for _, p in model:named_parameters() do assert.equal("meta", p:device()) end
    local _, cut = stages.make(function() return gpt2.new(config) end, { table = table_of("1f1b", 2, 1, 4), rank = 1,
      partition = "measured" }, { device = "cpu" })
    assert.equal(7, cut.first[3])
    assert.truthy(cut.times.makespan > 0)
  end)

  -- The clock only advances by the time that part i adds: 3 i, i and 2 i in its three runs. All layers are of the same
  -- kind.
  it("are the fastest run of each kind", function()
    local measure, count = require "ps.engine.pipeline.measure", require "ps.engine.pipeline.count"
    local model = ps.deferred(gpt2.new, { vocab_size = 64, n_positions = 8, n_embd = 16, n_layer = 4, n_head = 2 })
    local process = require "ps.core.process"
    local args, list, clock, at = { model:example(1, 8) }, model:parts(), process.now, 0
    local costs = count.parts(model, args)
    for i, part in ipairs(list) do
      local forward, runs = part.forward, 0
      part.forward = function(...)
        runs = runs + 1
        at = at + i * (({ 3, 1, 2 })[runs] or error("part " .. i .. " runs more often"))
        return forward(...)
      end
    end
    rawset(model, "parts", function() return list end)
    process.now = function() return at end
    local ok, seconds = pcall(measure.parts, model, costs, args, "cpu")
    process.now = clock
    assert(ok, seconds)
    local forward = {}
    for i, part in ipairs(seconds) do
      forward[i] = part.forward
      assert.same({ 0, 0 }, { part.input, part.weight })
    end
    assert.same({ 1, 2, 2, 2, 2, 6 }, forward)
  end)
end)

describe("ranks that share a model", function()
  local x, y = ps.randint(0, 96, { 3, 11 }), ps.randint(0, 96, { 3, 11 })

  local function make(table_, rank, options)
    ps.manual_seed(9)
    local config = {}
    for key, value in pairs(CONFIG) do config[key] = value end
    for key, value in pairs(options or {}) do config[key] = value end
    return stages.make(function() return gpt2.new(config) end, { table = table_, rank = rank }, { device = "cpu" })
  end

  local function whole(options)
    ps.manual_seed(9)
    local config = {}
    for key, value in pairs(CONFIG) do config[key] = value end
    for key, value in pairs(options or {}) do config[key] = value end
    return gpt2.new(config)
  end

  for _, case in ipairs { { "1f1b", 2, 1 }, { "interleaved", 2, 2 }, { "zb_v", 4, 2 } } do
    local schedule, ranks, virtual = unpack(case)
    local title = "hold their stages alone, with one process's bits: %s of %d ranks x %d"
    it(title:format(schedule, ranks, virtual), function()
      local t = table_of(schedule, ranks, virtual, 2 * ranks)
      for _, tied in ipairs(virtual == 1 and { true, false } or { true }) do
        local one = whole { tie_word_embeddings = tied }
        local bits, held, made = {}, {}, {}
        for name, p in one:named_parameters() do bits[name], held[name] = hash(p), {} end
        ps.collect()
        for rank = 0, ranks - 1 do
          local before = ps.memory("cpu").used
          local model, cut = make(t, rank, { tie_word_embeddings = tied })
          ps.collect()
          local bytes = 0
          for name, p in model:named_parameters() do
            if p:device() == "cpu" then
              assert.equal(bits[name], hash(p), name)
              bytes = bytes + math.ceil(p:nbytes() / 256) * 256
              table.insert(held[name], rank)
            else
              assert.equal("meta", p:device())
              assert.truthy(cut:elsewhere(name):find "rank %d+ of the pipeline %(virtual stage %d+%)")
            end
          end
          assert.equal(bytes, ps.memory("cpu").used - before)
          assert.equal(one:num_parameters(), model:num_parameters())
          assert.equal(one:flops_per_token(), model:flops_per_token())
          made[rank] = { model = model, stages = cut }
        end
        local last = made[0].stages.ranks[ranks * virtual]
        for name, list in pairs(held) do                       -- each has one rank, a tied table the ranks of both uses
          local shared = tied and name == "transformer.wte.weight" and last ~= 0
          assert.equal(shared and 2 or 1, #list, name)
          if shared then
            assert.same({ last }, made[0].stages:sharers(name))
            assert.same({ 0 }, made[last].stages:sharers(name))
          end
        end
        -- Virtual stages run one after another, each with its own dropout indices.
        local rng = ps.rng()
        rng.op = 0
        local loss = one(x, y):item()
        local carry = {}
        for v = 0, ranks * virtual - 1 do
          local at = made[made[0].stages.ranks[v + 1]]
          local own = 0
          for i, mine in ipairs(at.stages.mine) do if mine == v then own = i - 1 end end
          rng.op = at.stages:cost(v).first_dropout
          carry = at.stages:run(own, carry, at.model:batch_of(x, y))
          if v == 0 then
            at.stages:recount(at.model, { x, y })
            assert.same(carry.x:shape(), at.stages:cost(v).carry[1].shape)
            assert.equal(carry.x:nbytes(), at.stages:cost(v).carry_nbytes)
          end
        end
        assert.equal(loss, carry.loss:item())
      end
    end)
  end

  it("send no gradient below the first part that trains", function()
    local t = table_of("1f1b", 4, 1, 4)
    ps.manual_seed(9)
    local _, cut = stages.make(function()
      local model = gpt2.new(CONFIG)
      for name, p in model:named_parameters() do if not name:match "h%.[567]%." then p:requires_grad(false) end end
      return model
    end, { table = t, rank = 2, partition = { 3, 2, 2, 3 } }, { device = "cpu" })
    assert.same({ false, false, false, true }, { cut:sends_gradient(0), cut:sends_gradient(1), cut:sends_gradient(2),
      cut:sends_gradient(3) })
    assert.same({ false, false, true, true }, { cut:cost(0).trains, cut:cost(1).trains, cut:cost(2).trains,
      cut:cost(3).trains })
  end)

  it("refuse models without parts, or with parameters outside of parts", function()
    local t = table_of("1f1b", 2, 1, 2)
    fails({ "Linear", "parts()" }, function()
      stages.make(function() return nn.Linear(2, 2) end, { table = t, rank = 0 }, { device = "cpu" })
    end)
    local Odd = nn.class("Odd", gpt2.GPT2)
    function Odd:init(...)
      gpt2.GPT2.init(self, ...)
      self.extra = nn.Linear(2, 2)
    end
    fails({ "extra.weight", "no part" }, function()
      stages.make(function() return Odd({ n_layer = 2, n_embd = 8, n_head = 2, vocab_size = 8 }) end,
        { table = t, rank = 0 }, { device = "cpu" })
    end)
  end)

  -- Every virtual stage of six parts uses one embedding. Its gradient can only be summed in the order
  -- ((g0 + g1) + g2) + ...
  it("refuse a table of several virtual stages whose sums would have another order than the model's", function()
    local Six = nn.class("Six")
    function Six:init() self.table = nn.Embedding(4, 4) end
    function Six:parts()
      local list = {}
      for i = 1, 6 do list[i] = { name = "h." .. i - 1, modules = { self.table }, forward = print } end
      return list
    end
    local function of(schedule, ranks, virtual, used)
      local model, first = Six(), { 1 }
      local list = model:parts()
      for i, part in ipairs(list) do if not used[i] then part.modules = {} end end
      function model.parts() return list end
      for v = 1, ranks * virtual do first[v + 1] = v + 1 end
      return stages.new(model, {}, first, { table = table_of(schedule, ranks, virtual, 8), rank = 0 })
    end
    local all = { true, true, true, true, true, true }
    assert.same({ 0, 1, 2, 3, 4, 5 }, of("1f1b", 6, 1, all).vstages_of["table.weight"])
    of("interleaved", 1, 6, all)                                           -- one rank adds all of them
    of("interleaved", 2, 3, { true, false, true, true })                   -- 0, 0, 1
    of("zb_v", 3, 2, { true, false, false, false, false, true })  -- two addends have the same sum in either order
    local words = { "table.weight", "a different order" }
    fails({ "virtual stages 0, 1, 2, on ranks 0, 1, 0", unpack(words) }, function()
      of("interleaved", 2, 3, { true, true, true })
    end)
    fails(words, function() of("interleaved", 2, 3, { true, true, false, true }) end)      -- 0, 1, 1
    fails(words, function() of("zb_v", 3, 2, { false, false, true, true, true }) end)      -- 2, 2, 1
  end)
end)

describe("an engine of one rank of a pipeline", function()
  local engine
  local UNTIED = { tie_word_embeddings = false }                    -- copies of an embedding need the other ranks
  for key, value in pairs(CONFIG) do UNTIED[key] = value end
  after_each(function()
    lib.stop()
    if engine then engine:close() end
    engine = nil
  end)

  -- Creates the layout of rank `rank`. Nothing is trained.
  local function initialize(table_, rank, config, param_groups)
    lib.play(table_, rank)
    ps.manual_seed(9)
    local all = { optimizer = { type = "AdamW" }, memory = { host = 2 ^ 27 }, plan_print = false }
    for key, value in pairs(config or {}) do all[key] = value end
    local model, optimizer = ps.initialize { model_func = function() return gpt2.new(UNTIED) end, config = all,
      quiet = true, param_groups = param_groups }
    lib.stop()
    engine = model
    return model, optimizer
  end

  it("has the rows of its virtual stages, with numbers of the whole model, in chunks of their own", function()
    local t = table_of("interleaved", 2, 2, 2)
    ps.manual_seed(9)
    local one, order, bits = gpt2.new(UNTIED), {}, {}
    local no_decay = { { match = function(_, p) return p:dim() < 2 end, weight_decay = 0 }, {} }
    for _, first in ipairs { true, false } do                      -- norms are summed group by group
      for name, p in one:named_parameters() do
        if (p:dim() < 2) == first then
          order[name] = order.n or 0
          order.n = order[name] + 1
        end
        bits[name] = hash(p)
      end
    end
    local seen = {}
    for rank = 0, 1 do
      local model = initialize(t, rank, { bf16 = { enabled = true } }, no_decay)
      local built, last, units = inner(model).built, -1, {}
      for _, row in ipairs(built.list) do
        assert.equal(order[row.name], row.order)
        assert.equal(inner(model).stages:own(row.name), row.vstage)
        assert.truthy(row.vstage * 1e6 + row.order > last)
        last = row.vstage * 1e6 + row.order
        assert.equal(row.vstage, units[row.unit] or row.vstage)
        units[row.unit] = row.vstage
        assert.equal(bits[row.name], hash(row.master))             -- fp32 masters equal the values of one process
        seen[row.name] = (seen[row.name] or 0) + 1
      end
      assert.equal(order.n, #built.list + #built.elsewhere)
      assert.equal(one:num_parameters(), model:num_parameters())
      assert.equal(one:flops_per_token(), model:flops_per_token())
      local state, count = model:state_dict(), 0
      for name in pairs(state) do
        count = count + 1
        assert.truthy(bits[name])
      end
      assert.equal(#built.list, count)
      engine:close()
      engine = nil
    end
    for name in pairs(bits) do assert.equal(1, seen[name], name) end
  end)

  it("needs memory only for its stages", function()
    local t, sums = table_of("1f1b", 4, 1, 4), 0
    for rank = 0, 3 do
      local model = initialize(t, rank)
      local bytes = 0
      for _, row in ipairs(inner(model).built.list) do bytes = bytes + 16 * row.numel end
      assert.truthy(inner(model).built.state_bytes >= bytes and inner(model).built.state_bytes < 1.1 * bytes + 2 ^ 17,
        ("rank %d: %d bytes of chunks for %d of state"):format(rank, inner(model).built.state_bytes, bytes))
      sums = sums + bytes
      engine:close()
      engine = nil
    end
    assert.equal(16 * gpt2.new(UNTIED):num_parameters(), sums)
  end)

  it("accepts an existing model, and its parameters there keep their values", function()
    local t = table_of("1f1b", 2, 1, 2)
    lib.play(t, 0)
    local made, bits, own = gpt2.new(UNTIED), {}, 0
    for name, p in made:named_parameters() do bits[name] = hash(p) end
    local model = ps.initialize { model = made, client = {}, config = { optimizer = { type = "AdamW" } }, quiet = true }
    engine = inner(model)
    assert.truthy(rawequal(made, model.module))
    for name, p in made:named_parameters() do
      if p:device() ~= "meta" then
        own = own + 1
        assert.equal(bits[name], hash(p))
      end
    end
    assert.equal(own, #inner(model).built.list)
  end)
end)
