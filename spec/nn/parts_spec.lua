-- SPDX-License-Identifier: BSD-3-Clause
-- Models as lists of parts (ps.nn.parts): their names and parameters, the tensors between them, and the bits of the
-- whole model.
local ps = require "ps"
local address = require("ps.nn.module").address
local parts = require "ps.nn.parts"
local check = require "spec.check_lib"

local FAMILIES = {
  gpt2 = { body = "transformer.", tasks = { "causal_lm", "base", "sequence_classification", "token_classification" } },
  bert = { body = "bert.", tasks = { "masked_lm", "base", "sequence_classification", "token_classification",
    "question_answering" } },
  roberta = { body = "roberta.", tasks = { "masked_lm", "base", "sequence_classification", "token_classification",
    "question_answering" } },
}

local function tiny(family, task, options)
  ps.manual_seed(3)
  local all = { task = task, dropout = 0.1 }
  for key, value in pairs(options or {}) do all[key] = value end
  return require("models." .. family).new("tiny", all)
end

local function batch_for(task)
  local given = { input_ids = ps.randint(2, 200, { 2, 16 }), attention_mask = ps.ones({ 2, 16 }, { dtype = "int64" }) }
  given.attention_mask[{ 1, { 12, 16 } }] = 0
  if task == "causal_lm" or task == "masked_lm" then given.labels = ps.randint(0, 200, { 2, 16 })
  elseif task == "token_classification" then given.labels = ps.randint(0, 2, { 2, 16 })
  elseif task == "question_answering" then
    given.start_positions, given.end_positions = ps.randint(0, 8, { 2 }), ps.randint(8, 16, { 2 })
  elseif task == "sequence_classification" then given.labels = ps.randint(0, 2, { 2 }) end
  return given
end

local function parts_of(family, task)
  local all = {}
  for i, part in ipairs(tiny(family, task):parts()) do all[i] = part.name end
  return all
end

local function keys(t)
  local all = {}
  for key in pairs(t) do all[#all + 1] = key end
  return all
end

-- Returns the bits of a model's result.
local function bits(out)
  local all = {}
  for key, t in pairs(out) do all[#all + 1] = key .. ":" .. check.bytes(t:detach():contiguous()) end
  table.sort(all)
  return table.concat(all)
end

describe("parts", function()
  it("have names in the order of the model", function()
    assert.same({ "embed", "h.0", "h.1", "head" }, parts_of("gpt2", "causal_lm"))
    assert.same({ "embed", "h.0", "h.1", "ln_f" }, parts_of("gpt2", "base"))
    assert.same({ "embeddings", "encoder.layer.0", "encoder.layer.1", "head" }, parts_of("bert", "masked_lm"))
    assert.same({ "embeddings", "encoder.layer.0", "encoder.layer.1", "pooler" }, parts_of("roberta", "base"))
  end)

  it("use each parameter of the model, and a tied table twice", function()
    for family, about in pairs(FAMILIES) do
      for _, task in ipairs(about.tasks) do
        local model, uses = tiny(family, task, family == "gpt2" and { pad_token_id = 0 } or nil), {}
        for _, part in ipairs(model:parts()) do
          for _, module in ipairs(part.modules) do
            for _, p in module:named_parameters() do
              local at = address(p)
              uses[at] = (uses[at] or 0) + 1
            end
          end
        end
        local table_name = about.body .. (family == "gpt2" and "wte.weight" or "embeddings.word_embeddings.weight")
        for name, p in model:named_parameters() do
          local tied = name == table_name and (task == "causal_lm" or task == "masked_lm")
          assert.equal(tied and 2 or 1, uses[address(p)], family .. " " .. task .. ": " .. name)
        end
      end
    end
  end)

  it("untied, the head has a weight of its own", function()
    local model = tiny("gpt2", "causal_lm", { tie_word_embeddings = false })
    local list = model:parts()
    assert.same({ "weight" }, { (list[#list].modules[2]:named_parameters()()) })
    assert.equal(address(model.lm_head.weight), address(list[#list].modules[2].weight))
  end)

  it("have the bits of the model if they run one after the other; the carry is only the stream", function()
    for family, about in pairs(FAMILIES) do
      for _, task in ipairs(about.tasks) do
        local model = tiny(family, task, family == "gpt2" and { pad_token_id = 0 } or nil)
        local given = batch_for(task)
        local rng = ps.rng()
        rng.op = 0
        local want = bits(model(given))
        rng.op = 0
        local list = model:parts()
        local batch, carry = model:batch_of(given), {}
        for i, part in ipairs(list) do
          carry = parts.run(list, i, i, carry, batch)
          if i < #list then
            assert.same({ "x" }, keys(carry))
            assert.same({ 2, 16, 32 }, carry.x:shape(), part.name)
          end
        end
        assert.equal(want, bits(carry), family .. " " .. task)
      end
    end
  end)

  it("have the loss of GPT-2's formula, which the head computes in panels", function()
    for _, tied in ipairs { true, false } do
      local model = tiny("gpt2", "causal_lm", { tie_word_embeddings = tied, dropout = 0 })
      local x, y = ps.randint(0, 256, { 3, 9 }), ps.randint(0, 256, { 3, 9 })
      local loss, logits = model(x, y):item(), model(x):tolist()
      local targets, sum = y:tolist(), 0
      for b = 1, 3 do
        for t = 1, 9 do
          local row, z = logits[b][t], 0
          for v = 1, 256 do z = z + math.exp(row[v]) end
          sum = sum + math.log(z) - row[targets[b][t] + 1]
        end
      end
      assert.near(sum / 27, loss, 1e-5)
    end
  end)
end)
