-- SPDX-License-Identifier: BSD-3-Clause
-- How models are cut among ranks (ps/parallel/tensor/cut.lua): shards by name, bits of the uncut model, parameters that
-- all ranks have, and errors with the numbers. One process performs the ranks in turn; tensor_parallel_ranks_spec.lua
-- has them train.
local ps = require "ps"
local check = require "spec.check_lib"
local deferred = require "ps.nn.deferred"
local shard = require "ps.tensor.shard"
local tensor_parallel = require "ps.parallel.tensor.cut"
local nn, fails = ps.nn, check.fails_saying

local function group_of(size, rank)
  return { size = function() return size end, rank = function() return rank end, copy_to = error }
end

-- Returns a model sharded for one of `size` ranks, and the notes that were printed.
local function cut(fn, size, rank, sequence)
  local said
  ps.manual_seed(3)
  local model = ps.deferred(fn)
  tensor_parallel.cut(model, { group = group_of(size, rank), sequence = sequence ~= false, keep_gathered = false,
    note = function(text) said = text end })
  return model, said
end

local FAMILIES = { gpt2 = { "causal_lm", "base", "sequence_classification" }, llama = { "causal_lm", "base" },
  qwen3 = { "causal_lm" }, bert = { "masked_lm", "base" }, roberta = { "masked_lm", "sequence_classification" } }

describe("a model that is cut among ranks", function()
  it("has on each rank the bits of its part of the uncut model, under the same names", function()
    for family, tasks in pairs(FAMILIES) do
      for _, task in ipairs(tasks) do
        local function fn() return require("models." .. family).new("tiny", { task = task }) end
        ps.manual_seed(3)
        local uncut = fn()
        local whole, kept = uncut:state_dict(), 0
        for rank = 0, 1 do
          local model, names = cut(fn, 2, rank), 0
          ps.materialize(model)
          assert.equal(uncut:num_parameters(), model:num_parameters())
          assert.equal(uncut:flops_per_token(), model:flops_per_token())
          for name, t in model:named_parameters() do
            local desc, wanted = shard.of(t), whole[name]
            if desc then
              assert.same(wanted:shape(), desc.full_shape)
              wanted = shard.of_whole(desc, wanted)
              kept = kept + t:numel()
            end
            assert.equal(check.bytes(wanted), check.bytes(t:detach()), family .. " " .. name)
            names = names + 1
          end
          for _ in pairs(whole) do names = names - 1 end
          assert.equal(0, names, family .. " " .. task)
        end
        local all = 0
        for _, t in pairs(whole) do all = all + t:numel() end
        assert.truthy(kept > (task == "masked_lm" and 0.4 or 0.6) * all, family .. " " .. task)
      end
    end
  end)

  it("is cut by the names of its classes' tables: columns, blocks, rows, a padded vocabulary", function()
    local gpt2 = require "models.gpt2"
    local model = cut(function()
      return gpt2.new { vocab_size = 61, n_positions = 8, n_embd = 12, n_layer = 1, n_head = 3 }
    end, 3, 1)
    local function desc(name)
      local d = shard.of(model.transformer[name] and model.transformer[name].weight or model:state_dict()[name])
      return { d.dim, d.blocks, d.index, d.count, d.padded }
    end
    assert.same({ 0, 1, 1, 3, 2 }, desc "wte")
    assert.same({ 1, 3, 1, 3 }, desc "transformer.h.0.attn.c_attn.weight")
    assert.same({ 0, 3, 1, 3 }, desc "transformer.h.0.attn.c_attn.bias")
    assert.same({ 0, 1, 1, 3 }, desc "transformer.h.0.attn.c_proj.weight")
    assert.same({ 1, 1, 1, 3 }, desc "transformer.h.0.mlp.c_fc.weight")
    assert.same({ 21, 12 }, model.transformer.wte.weight:shape())
    assert.same({ 12, 12 }, model.transformer.h[0].attn.c_attn.weight:shape())
    assert.is_nil(shard.of(model.transformer.wpe.weight))
    assert.same({ 1, 4, 1 }, { model.transformer.h[0].attn.heads, model.transformer.h[0].attn.width,
      model.transformer.h[0].attn.first_head })
  end)

  it("lists the parameters that are whole on all ranks, and those whose gradients are sums", function()
    local function fn() return require("models.gpt2").new "tiny" end
    local model, said = cut(fn, 2, 0)
    for _, name in ipairs { "transformer.wpe.weight", "transformer.h.*.ln_1.weight", "transformer.h.*.mlp.c_proj.bias",
      "transformer.ln_f.bias" } do
      assert.truthy(said:find(name, 1, true), said)
    end
    assert.falsy(said:find("c_attn", 1, true) or said:find("wte", 1, true), said)
    local function sums(made)
      local list = {}
      for name, p in made:named_parameters() do
        if shard.is_partial(p) then list[#list + 1] = name:gsub("^transformer%.", "") end
      end
      return list
    end
    assert.same({ "h.0.ln_1.weight", "h.0.ln_1.bias", "h.0.attn.c_proj.bias", "h.0.ln_2.weight", "h.0.ln_2.bias",
      "h.0.mlp.c_proj.bias", "h.1.ln_1.weight", "h.1.ln_1.bias", "h.1.attn.c_proj.bias", "h.1.ln_2.weight",
      "h.1.ln_2.bias", "h.1.mlp.c_proj.bias", "ln_f.weight", "ln_f.bias" }, sums(model))
    assert.same({}, sums((cut(fn, 2, 0, false))))
    -- Norms of heads apply to this rank's heads, regardless of how rows are shared.
    assert.same({ "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight",
      "model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.k_norm.weight" },
      sums((cut(function() return require("models.qwen3").new "tiny" end, 2, 0, false))))
  end)
end)

describe("a region whose rows are divided", function()
  it("gathers a rank's rows, and does not change all rows", function()
    local calls = {}
    local group = group_of(2, 0)
    for _, name in ipairs { "copy_to", "gathered_again" } do
      group[name] = function(_, x)
        calls[#calls + 1] = name
        return name == "copy_to" and x or ps.cat({ x, x }, 0)
      end
    end
    local region = nn.Region.new(group, true)
    region:set(2, 4)
    assert.same({ 2, 4, 3 }, region:gather(ps.zeros { 4, 3 }):shape())
    region:gather(ps.zeros { 2, 4, 3 })                       -- after leave
    region:gather(ps.zeros { 8, 3 })
    assert.same({ "gathered_again", "copy_to", "copy_to" }, calls)
  end)
end)

describe("a model that cannot be cut", function()
  it("is an error with the numbers", function()
    fails({ "tensor_parallel.size = 4: transformer.h.0.attn has n_head = 2" },
      function() cut(function() return require("models.gpt2").new "tiny" end, 4, 0) end)
    fails({ "tensor_parallel.size = 4: model.layers.0.self_attn has num_key_value_heads = 2" },
      function() cut(function() return require("models.llama").new "tiny" end, 4, 0) end)
    fails({ "transformer.h.0.mlp.c_fc.weight [32, 33]: dimension 1, 33, cannot be cut into 2 equal parts" },
      function() cut(function() return require("models.gpt2").new("tiny", { n_inner = 33 }) end, 2, 0) end)
  end)

  it("is refused without a table, or with a table that names nothing or a wrong module", function()
    local Net = nn.class "Net"
    function Net:init()
      self.fc = nn.Linear(4, 4)
      self.norm = nn.LayerNorm(4)
    end
    local function net() return Net() end
    fails({ "Net has no table tensor_parallel" }, function() cut(net, 2, 0) end)
    Net.tensor_parallel = { ["fd"] = "column" }
    fails({ "Net.tensor_parallel: no module of the model is fd" }, function() cut(net, 2, 0) end)
    Net.tensor_parallel = { fc = "colum" }
    fails({ "Net.tensor_parallel: fc is colum; there are attention, channels, column" }, function() cut(net, 2, 0) end)
    Net.tensor_parallel = { norm = "row" }
    fails({ "norm is a LayerNorm; columns and rows cut nn.Conv1D, nn.Conv1d, nn.Conv2d and nn.Linear" },
      function() cut(net, 2, 0) end)
    local Two = nn.class "Two"
    function Two:init() self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4) end
    function Net:init() self.two = Two() end
    for problem, gather in pairs { ["gather names 4 columns; it must be true or a list of 1 to 3"] = { 1, 2, 3, 4 },
      ["gather names 0 columns; it must be true or a list of 1 to 3"] = {},
      ["gather is a; it must be true or a list of 1 to 3"] = "a",
      ["gather names x, which is not a column of the module"] = { "a", "x" },
      ["gather leaves out b, a column of the module"] = { "a" } } do
      Net.tensor_parallel = { two = { "divide", gather = gather }, ["two.a"] = "column", ["two.b"] = "column" }
      fails({ 'Net.tensor_parallel["two"]: ' .. problem }, function() cut(net, 2, 0) end)
    end
  end)

  it("is refused if its products are inside replaced modules, with the names to list", function()
    local Lora = nn.class "Lora"
    function Lora:init(base)
      self.base = base
      self.down = nn.Linear(base.inputs, 2, { bias = false })
      self.up = nn.Linear(2, base.outputs, { bias = false })
    end
    fails({ "transformer.h.0.attn.c_attn is a Lora; columns and rows cut", "Instead of GPT2Model.tensor_parallel"
      .. "[\"h.*.attn.c_attn\"], name in the table the layers inside it that are to be cut: base, down, up" },
      function()
      cut(function()
        local model = require("models.gpt2").new "tiny"
        for _, block in model.transformer.h:each() do block.attn.c_attn = Lora(block.attn.c_attn) end
        return model
      end, 2, 0)
    end)
  end)

  it("is refused if it already has values", function()
    local model = require("models.gpt2").new "tiny"
    fails({ "a parameter can be cut only before it has values" }, function()
      deferred.cut(model, model.transformer.wte.weight, shard.new { dim = 0, index = 0, count = 2,
        full_shape = { 256, 32 } })
    end)
  end)
end)
