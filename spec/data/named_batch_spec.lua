-- SPDX-License-Identifier: BSD-3-Clause
-- Batches and outputs by names, as in transformers: gpt2's results for input_ids, labels and attention_mask, and
-- engines, which have the same bits as with the same positional tensors.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local gpt2 = require "models.gpt2"
local lib = require "spec.check_lib"
local nn, F = ps.nn, ps.functional

local B, T = 3, 12
local model

after_each(function()
  if model and inner(model) then model:close() end
  model = nil
end)

-- Returns token ids, and labels of which the first `hidden` in each row are ignored.
local function tokens(seed, hidden, columns)
  ps.manual_seed(seed)
  local ids = ps.randint(0, 256, { B, columns or T }, { dtype = "int32" })
  local labels = ids:clone()
  if hidden > 0 then labels:narrow(1, 0, hidden):fill_(-100) end
  return ids, labels
end

-- Returns the same targets in the form of gpt2's second argument: the target of each position.
local function shifted(labels)
  local y = ps.full(labels:shape(), -100, { dtype = labels:dtype() })
  y:narrow(1, 0, labels:size(1) - 1):copy_(labels:narrow(1, 1, labels:size(1) - 1))
  return y
end

describe("gpt2 with a batch by names", function()
  before_each(function()
    ps.manual_seed(2)
    model = gpt2.new "tiny"
  end)

  it("returns the loss of labels shifted by one, or logits", function()
    local ids, labels = tokens(5, 3)
    local out = model { input_ids = ids, labels = labels }
    assert.is_nil(out.logits)
    assert.equal(model(ids, shifted(labels)):item(), out.loss:item())
    local rows = model(ids)                                                    -- shape [B, T, V]
    local by_hand = F.cross_entropy(rows:narrow(1, 0, T - 1):reshape(B * (T - 1), 256),
      labels:narrow(1, 1, T - 1):reshape(B * (T - 1)))
    assert(math.abs(by_hand:item() - out.loss:item()) < 1e-5)
    assert.equal(lib.bytes(rows), lib.bytes(model({ input_ids = ids }).logits))
    assert.equal(B * (T - 3), model:count_targets { input_ids = ids, labels = labels })
    assert.equal(0, (model { input_ids = ids:narrow(1, 0, 1), labels = labels:narrow(1, 0, 1) }).loss:item())
  end)

  it("hides keys by attention_mask: padded rows have the results of rows without padding", function()
    local ids, labels = tokens(6, 0)
    local mask = ps.ones({ B, T }, { dtype = "int64" })
    mask:narrow(1, 8, T - 8):fill_(0)
    labels:narrow(1, 8, T - 8):fill_(-100)
    local short = ids:narrow(1, 0, 8):contiguous()
    local want = model { input_ids = short, labels = short }
    for _, given in ipairs { mask, mask:ne(0) } do
      local got = model { input_ids = ids, labels = labels, attention_mask = given }
      assert(math.abs(got.loss:item() - want.loss:item()) < 1e-6)
    end
    -- affects the positions that see it
    local left = ps.ones({ B, T }, { dtype = "int32" })
    left:narrow(1, 0, 2):fill_(0)
    local seen, hidden = model(ids), model({ input_ids = ids, attention_mask = left }).logits
    assert((seen - hidden):abs():narrow(1, 2, T - 2):max():item() > 1e-3)
  end)

  it("refuses unknown names and wrong shapes", function()
    local ids, labels = tokens(7, 0)
    lib.fails(function() model { input_ids = ids, label = labels } end, "named_batch_spec.lua", "label",
      "did you mean 'labels'")
    lib.fails(function() model { labels = labels } end, "needs input_ids")
    lib.fails(function() model { input_ids = ids, labels = labels:narrow(1, 0, 4) } end, "labels is [3, 4]",
      "input_ids is [3, 12]")
    lib.fails(function() model { input_ids = 3 } end, "input_ids", "a tensor")
  end)
end)

-- Returns the bytes of all parameters after two steps. batch(number) returns the model's argument.
local function trained(config, class, batch, loss_of)
  local wanted = { plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-2 } } }
  for key, value in pairs(config) do wanted[key] = value end
  ps.manual_seed(2)
  local optimizer
  model, optimizer = ps.initialize { quiet = true, model_func = function() return class() end, config = wanted }
  local seen = {}
  for number = 1, 2 * inner(model).accumulate do
    local out = model(batch(number))
    local loss = loss_of(out)
    seen[#seen + 1] = loss:item()
    model:backward(loss)
    optimizer:step()
  end
  for name, t in pairs(model:state_dict()) do seen[#seen + 1] = name .. lib.bytes(t) end
  table.sort(seen, function(a, b) return tostring(a) < tostring(b) end)
  local traces = 0
  for _ in pairs(inner(model).traces) do traces = traces + 1 end
  model:close()
  return table.concat(seen, "\n"), traces
end

local CONFIGS = {
  chunks = {}, ["plain memory"] = { memory = "plain" }, ["micro-batches"] = { gradient_accumulation_steps = 2 },
  ["micro-batches in plain memory"] = { memory = "plain", gradient_accumulation_steps = 2 },
  ["chunks below an accelerator, bf16"] = { device = "sim", bf16 = { enabled = true }, gradient_accumulation_steps = 2,
    chunk_size = 4096 },
}

describe("an engine with batches by names", function()
  for name, config in pairs(CONFIGS) do
    it("trains like with the same positional tensors: " .. name, function()
      local function tiny() return gpt2.new "tiny" end
      local named = trained(config, tiny, function(number)
        local ids, labels = tokens(number, number % 2 * 5)
        local mask = not config.bf16 and ps.ones({ B, T }, { dtype = "bool" }) or nil    -- rounds differently in bf16
        return { input_ids = ids, labels = labels, attention_mask = mask }
      end, function(out) return out.loss end)
      local ordered = trained(config, tiny, function(number)
        local ids, labels = tokens(number, number % 2 * 5)
        return ids, shifted(labels)
      end, function(loss) return loss end)
      assert(named == ordered)
    end)
  end

  -- A model that uses each label and returns more than its loss.
  local Classes = nn.class "Classes"
  function Classes:init() self.fc = nn.Linear(8, 5) end
  function Classes:forward(x, y)
    local by_name = y == nil
    if by_name then x, y = x.inputs, x.labels end
    local logits = self.fc(x)
    local loss = F.cross_entropy(logits, y)
    return by_name and { aux = logits:square():mean(), loss = loss, logits = logits } or loss
  end

  it("counts labels, and uses the loss of an output with several tensors, also in its plan", function()
    local function given(number)
      ps.manual_seed(number)
      local y = ps.randint(0, 5, { 6 }, { dtype = "int64" })
      if number % 2 == 0 then y:narrow(0, 0, 4):fill_(-100) end
      return ps.randn { 6, 8 }, y
    end
    for _, memory in ipairs { "chunk", "plain" } do
      local config = { memory = memory, gradient_accumulation_steps = 2 }
      local named, traces = trained(config, Classes, function(number)
        local x, y = given(number)
        return { inputs = x, labels = y }
      end, function(out) return out.loss end)
      local weights = {}                               -- the same micro-batches, weighted by the script
      local ordered = trained(config, Classes, function(number)
        local x, y = given(number)
        weights[number] = y:ne(-100):sum():item()
        return x, y
      end, function(loss) return loss end)
      assert.same({ 6, 2, 6, 2 }, weights)
      assert.equal(memory == "chunk" and 1 or 0, traces)
      assert(named == ordered, "the loss itself counts its targets, whatever the shapes of x and y")
    end
  end)

  it("weights by labels like a weight that the script passes", function()
    local function run(named)
      local wanted = { plan_print = false, gradient_accumulation_steps = 2, optimizer = { type = "AdamW",
        params = { lr = 1e-2 } } }
      ps.manual_seed(2)
      local optimizer
      model, optimizer = ps.initialize { quiet = true, model_func = function() return Classes() end, config = wanted }
      for number = 1, 2 do
        ps.manual_seed(number)
        local x, y = ps.randn { 6, 8 }, ps.randint(0, 5, { 6 }, { dtype = "int64" })
        if number == 2 then y:narrow(0, 0, 4):fill_(-100) end
        if named then model:backward(model({ inputs = x, labels = y }).loss)
        else model:backward(model(x, y), { weight = number == 2 and 2 or 6 }) end
        optimizer:step()
      end
      local bytes = lib.bytes(model:state_dict()["fc.weight"])
      model:close()
      return bytes
    end
    assert(run(true) == run(false))
  end)

  it("plans each shape", function()
    ps.manual_seed(2)
    local optimizer
    model, optimizer = ps.initialize { quiet = true, model_func = function() return gpt2.new "tiny" end,
      config = { plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-2 } } } }
    for number, columns in ipairs { 12, 8, 12, 8 } do
      local ids, labels = tokens(number, 2, columns)
      model:backward(model({ input_ids = ids, labels = labels }).loss)
      optimizer:step()
    end
    local keys = {}
    for key in pairs(inner(model).traces) do keys[#keys + 1] = key end
    assert.equal(2, #keys)
    assert(table.concat(keys):find("labels= int32[3,8]", 1, true), table.concat(keys, "; "))
  end)

  it("names what backward accepts of a named output, and what count_targets may return", function()
    for _, memory in ipairs { "chunk", "plain" } do
      trained({ memory = memory }, Classes, function(number)
        ps.manual_seed(number)
        return { inputs = ps.randn { 6, 8 }, labels = ps.randint(0, 5, { 6 }, { dtype = "int64" }) }
      end, function(out)
        lib.fails(function() model:backward(out) end, "not a table: model:backward(output.loss)")
        return out.loss
      end)
    end
    local Wrong = nn.class("Wrong", Classes)
    function Wrong.count_targets() return "many" end
    lib.fails(function()
      trained({ memory = "plain" }, Wrong, function()
        return { inputs = ps.randn { 6, 8 }, labels = ps.zeros({ 6 }, { dtype = "int64" }) }
      end, function(out) return out.loss end)
    end, "count_targets returned many")
  end)
end)
