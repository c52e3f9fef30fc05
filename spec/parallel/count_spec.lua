-- SPDX-License-Identifier: BSD-3-Clause
-- The costs of a model's parts (ps/engine/pipeline/count.lua), compared with formulas that were derived by hand.
local ps = require "ps"
local count = require "ps.engine.pipeline.count"
local check = require "spec.check_lib"
local gpt2 = require "models.gpt2"
local nn = ps.nn

local V, P, C, L, H = 96, 24, 32, 3, 4
local B, T = 5, 17
local CONFIG = { vocab_size = V, n_positions = P, n_embd = C, n_layer = L, n_head = H }
local x = ps.zeros({ B, T }, { dtype = "int32" })

local function of(options, precision, args)
  return count.parts(gpt2.new(CONFIG, options or {}), args or { x, x }, precision)
end

local N = B * T
local LAYER = 2 * N * (3 * C * C + C * C + 8 * C * C)          -- products of a layer: 12 C^2 weights
local PAIRS = B * T * (T + 1) / 2                              -- number of pairs of queries and visible keys
local ATTENTION = 4 * C * PAIRS                                -- scores and sums over all heads
local HEAD = 2 * N * C * V
local LAYER_NUMEL = 12 * C * C + 13 * C                        -- 4 biases: 9 C; two norms: 4 C

describe("counting", function()
  it("has GPT-2's operations, bytes and transfers between parts", function()
    local all = of()
    assert.equal(L + 2, #all)
    assert.same({ "embed", 0, 0, 0, (V + P) * C, 4 * (V + P) * C },
      { all[1].name, all[1].forward, all[1].input, all[1].weight, all[1].numel, all[1].nbytes })
    for i = 2, L + 1 do
      local part = all[i]
      assert.same({ "h." .. i - 2, LAYER + ATTENTION, LAYER + 2.5 * ATTENTION, LAYER, LAYER_NUMEL, 4 * LAYER_NUMEL },
        { part.name, part.forward, part.input, part.weight, part.numel, part.nbytes })
      assert.truthy(part.activations > part.carry_nbytes)
    end
    local head = all[L + 2]
    assert.same({ "head", HEAD, HEAD, HEAD, 2 * C + V * C, {}, 0 },
      { head.name, head.forward, head.input, head.weight, head.numel, head.carry, head.carry_nbytes })
    for i = 1, L + 1 do
      assert.same({ { name = "x", shape = { B, T, C }, dtype = "fp32", nbytes = 4 * N * C, needs_grad = true } },
        all[i].carry)
      assert.equal(4 * N * C, all[i].carry_nbytes)
      assert.truthy(all[i].trains)
    end
  end)

  it("never counts negative bytes for a part that frees more than it leaves", function()
    local Mean = nn.class "Mean"
    function Mean:init() self.wide = nn.Linear(4, 64) end
    function Mean:batch_of(a) return { x = a } end
    function Mean:parts()
      return { { name = "wide", modules = { self.wide }, forward = function(_, batch) return { y = self.wide(batch.x) }
      end }, { name = "mean", modules = {}, forward = function(carry) return { loss = carry.y:mean() } end } }
    end
    local all = count.parts(Mean(), { ps.ones { 512, 4 } })
    assert.same({ 4 * 512 * 64, 0 }, { all[1].activations, all[2].activations })
    require("ps.parallel.pipeline.table").cut(require("spec.stages_lib").table_of("1f1b", 2, 1, 4),
      { { held = all[1].activations },
      { held = all[2].activations } })
  end)

  it("counts products that are cut among ranks equally, composed or in pieces", function()
    local Cut = nn.class "Cut"
    function Cut:init(pieces) self.pieces, self.up, self.down = pieces, nn.Parameter(ps.ones { 3, 8 }),
      nn.Parameter(ps.ones { 8, 3 }) end
    function Cut:batch_of(a) return { x = a } end
    function Cut:parts()
      return { { name = "one", parameters = { "up", "down" }, forward = function(_, batch)
        local all                                          -- rows [4, 8] of each of two ranks
        if self.pieces then
          all = ps.ops.column_linear(batch.x, self.up, nil, nil, nil, nil, nil, 0, 2, 0, 0, 1, self.pieces, 0)
        else all = ps.ops.linear(ps.ops.all_gather_again(batch.x, 0, 2, 0), self.up, nil, nil, 1) end
        if self.pieces then return { y = ps.ops.row_linear(all, self.down, 0, 2, 0, 0, 1, self.pieces) } end
        return { y = ps.ops.reduce_scatter(ps.ops.linear(all, self.down, nil, nil, 1), 0, 2, 0) }
      end } }
    end
    local want = count.parts(Cut(), { ps.zeros { 4, 8 } })[1]
    local got = count.parts(Cut(4), { ps.zeros { 4, 8 } })[1]
    assert.same({ 2 * 2 * 8 * 8 * 3, 2 * 8 * 8 * 3, 2 * 2 * 8 * 8 * 3 }, { want.forward, want.input, want.weight })
    assert.same({ want.forward, want.input, want.weight }, { got.forward, got.input, got.weight })
  end)

  it("uses the type in which parameters compute", function()
    local all = of({}, "bf16")
    assert.equal("bf16", all[1].carry[1].dtype)
    assert.equal(2 * N * C, all[2].carry_nbytes)
    assert.equal(2 * LAYER_NUMEL, all[2].nbytes)
    assert.equal("fp16", of({ dtype = "fp16" }, "bf16")[1].carry[1].dtype)                -- other types do not change
  end)

  it("numbers the dropouts of each part", function()
    local all = of { dropout = 0.1 }
    local first = 0
    for i, n in ipairs { 1, 3, 3, 3, 0 } do  -- embed; attention, its projection, the MLP's projections
      assert.same({ first, n }, { all[i].first_dropout, all[i].dropouts })
      first = first + n
    end
    assert.equal(0, of({ dropout = 0 })[L + 2].first_dropout)
  end)

  it("leaves out gradients of frozen parts, and those that nothing below them needs", function()
    local model = gpt2.new(CONFIG)
    for name, p in model:named_parameters() do
      if not name:match "h%.[12]%." or name:match "h%.1%.ln_1" then p:requires_grad(false) end
    end
    local all = count.parts(model, { x, x })
    assert.same({ false, false, true, true, false },
      { all[1].trains, all[2].trains, all[3].trains, all[4].trains, all[5].trains })
    assert.same({ 0, 0 }, { all[2].input, all[2].weight })
    assert.falsy(all[1].carry[1].needs_grad)
    assert.falsy(all[2].carry[1].needs_grad)
    assert.truthy(all[3].carry[1].needs_grad)
    -- This is the first part that trains. Each of its matrix products has a weight gradient, and all except the first
    -- also have an input gradient.
    assert.equal(LAYER, all[3].weight)
    assert.equal(LAYER + 2.5 * ATTENTION - 2 * N * 3 * C * C, all[3].input)
    assert.same({ HEAD, 0 }, { all[5].input, all[5].weight })
  end)

  it("counts other models, named batches and recomputed blocks, and a model of any size", function()
    local bert = require("models.bert").new("tiny", { task = "sequence_classification" })
    local all = count.parts(bert, { { input_ids = x, labels = ps.zeros({ B }, { dtype = "int64" }) } })
    local c, hidden = 32, 64
    local pairs = 4 * c * B * T * T
    assert.equal(2 * N * (4 * c * c + 2 * c * hidden) + pairs, all[2].forward)
    local plain, again = of(), of { recompute = true }
    assert.equal(plain[2].forward, again[2].forward)
    assert.truthy(again[2].activations < plain[2].activations / 4)
    ps.collect()
    local before = ps.memory("cpu").used
    local huge = ps.deferred(gpt2.new, { n_layer = 2, n_embd = 12288, n_head = 96, vocab_size = 50257 })
    local parts = count.parts(huge, { x, x }, "bf16")
    assert.equal(24 * N * 12288 ^ 2, parts[2].weight)
    ps.collect()
    assert.equal(before, ps.memory("cpu").used)
  end)

  it("counts both products of an MLP whose sides differ", function()
    local Ends = nn.class("Ends")
    function Ends:init() self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 4) end
    function Ends:batch_of(t) return { t = t } end                                        -- luacheck: ignore 212/self
    function Ends:parts()
      return { { name = "mlp", modules = { self.up, self.down }, forward = function()
        local rows = ps.zeros({ 3, 6 }, { device = "meta" })
        return { y = ps.F.mlp(rows, self.up.weight, self.up.bias, self.down.weight, self.down.bias) }
      end } }
    end
    local part = count.parts(Ends(), { x })[1]
    local first, second = 2 * 3 * 6 * 10, 2 * 3 * 10 * 4
    assert.same({ first + second, second, first + second }, { part.forward, part.input, part.weight })
  end)

  it("counts the keys that a query sees: causal after cached ones, and within a window", function()
    local Attends = nn.class("Attends")
    local function flops(options)
      function Attends:batch_of(t) return { t = t } end                                   -- luacheck: ignore 212/self
      function Attends:parts()                                                            -- luacheck: ignore 212/self
        return { { name = "all", modules = {}, forward = function()
          local function heads(n) return ps.zeros({ 1, 2, n, 8 }, { device = "meta" }) end
          return { y = ps.F.attention(heads(5), heads(11), heads(11), options) }
        end } }
      end
      return count.parts(Attends(), { x })[1].forward / (4 * 2 * 8)
    end
    assert.equal(55, flops {})
    assert.equal(7 + 8 + 9 + 10 + 11, flops { causal = true })
    assert.equal(7 + 8 + 9 + 9 + 9, flops { causal = true, window = 9 })
    assert.equal(5 * 3, flops { causal = true, window = 3 })
  end)

  it("changes nothing", function()
    local model = gpt2.new(CONFIG, { dropout = 0.1 })
    local function state()
      local all = { tostring(ps.rng().offset), tostring(ps.rng().op), tostring(ps.grad_enabled()) }
      for name, p in model:named_parameters() do
        all[#all + 1] = ("%s %s %d %s"):format(name, p:device(), ps.C.ps_tensor_version(p), tostring(p:grad()))
      end
      return all
    end
    local before = state()
    local loss = ps.no_grad(model.forward, model, x, x):item()
    ps.rng().op = 0
    count.parts(model, { x, x }, "bf16")
    assert.same(before, state())
    assert.equal(loss, ps.no_grad(model.forward, model, x, x):item())
  end)

  it("names a part that returns no tensors", function()
    local Odd = nn.class("Odd")
    function Odd:batch_of(t) return { t = t } end                                         -- luacheck: ignore 212/self
    function Odd:parts()                                                                  -- luacheck: ignore 212/self
      return { { name = "first", modules = {}, forward = function() return { x = 3 } end } }
    end
    check.fails_saying({ "part first", "x = a number" }, function() count.parts(Odd(), { x }) end)
    assert.is_nil(require("ps.core.ffi").recorder)
  end)
end)
