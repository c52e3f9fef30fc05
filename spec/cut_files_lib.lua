-- SPDX-License-Identifier: BSD-3-Clause
-- A small model whose parameters are divided among ranks along tp (ps.tensor.shard), for specs of files. It has
-- parameters cut by columns in blocks, by rows, with padding, and one that is whole on all ranks. The values are those
-- of one process.
local lib = {}

--- Code that follows a script's `local ps = require "ps"`. make(index, count) returns { model, optimizer } for one rank
--- along tp, or for one process if count is 1. train(made, index, count) performs two steps of AdamW, whose gradients
--- are slices of one process's gradients. hash(t) returns a tensor's bytes as a number.
lib.MODEL = [[
  local ffi, C = ps.ffi, ps.C
  local shard, nn, PretrainedModel = require "ps.tensor.shard", ps.nn, require "ps.pretrained.model"
  local WHOLE = {
    { name = "wte", shape = { 7, 4 }, dim = 0, pad = true },
    { name = "qkv", shape = { 4, 36 }, dim = 1, blocks = 3 },
    { name = "bias", shape = { 36 }, dim = 0, blocks = 3 },
    { name = "proj", shape = { 12, 4 }, dim = 0 },
    { name = "norm", shape = { 4 } },
  }
  local function desc_of(row, index, count)
    if count == 1 or not row.dim then return nil end
    local over = row.shape[row.dim + 1] % count
    return shard.new { dim = row.dim, blocks = row.blocks, index = index, count = count, full_shape = row.shape,
      padded = row.pad and over > 0 and count - over or nil }
  end
  local function own(row, whole, index, count)
    local desc = desc_of(row, index, count)
    return desc and shard.of_whole(desc, whole) or whole, desc
  end
  local Net = nn.class "CutNet"
  function Net:init(index, count, dtype)
    ps.manual_seed(11)
    for _, row in ipairs(WHOLE) do
      local values, desc = own(row, ps.randn(row.shape), index, count)
      self:param(row.name, values:to(dtype or "fp32"))
      if desc then shard.set(self[row.name], desc) end
    end
    self:buffer("table", ps.arange(5))
    rawset(self, "config", {})
  end
  Net.family = { settings = { to_file = function() return '{"model_type":"cut"}' end } }
  Net.save_pretrained = PretrainedModel.save_pretrained
  Net.save_parallelized = PretrainedModel.save_parallelized
  local function make(index, count, dtype)
    local model = Net(index, count, dtype)
    return { model = model, optimizer = ps.optim.AdamW(model:parameters(), { lr = 0.1, weight_decay = 0 }) }
  end
  local function train(made, index, count)
    ps.manual_seed(12)
    for _ = 1, 2 do
      for _, row in ipairs(WHOLE) do
        made.model[row.name]:set_grad((own(row, ps.randn(row.shape), index, count)))
      end
      made.optimizer:step()
    end
  end
]]

--- Returns MODEL's functions for the spec's own process.
function lib.here()
  return assert(loadstring("local ps = require 'ps'\n" .. lib.MODEL
    .. "return { make = make, train = train, own = own, desc_of = desc_of, WHOLE = WHOLE }"))()
end

return lib
