-- SPDX-License-Identifier: BSD-3-Clause
-- Adafactor (Shazeer and Stern 2018), in PyTorch's form and in the form of transformers. The Trainer calls the second
-- form "adafactor". A tensor of two or more dimensions has one average per row and one per column. A vector has one
-- average per element.
local types = require "ps.core.types"

local function rows(shape)
  if #shape < 2 then return nil end
  local out = { unpack(shape) }
  out[#out] = 1
  return out
end
local function cols(shape)
  if #shape < 2 then return nil end
  local out = { unpack(shape) }
  out[#out - 1] = 1
  return out
end
local function without(number)
  return function(shape)
    if #shape < 2 then return nil end
    local out = {}
    for i, size in ipairs(shape) do if i ~= #shape - number then out[#out + 1] = size end end
    return out
  end
end
local function elements(shape) return #shape < 2 and shape or nil end

local PAIR = types.number(0)

-- PyTorch's files store eps1 and eps2 as a pair named eps. The first number of the pair may be None.
local function write_eps(group, out) out.eps1, out.eps2, out.eps = nil, nil, { group.eps1, group.eps2 } end
local function read_eps(saved)
  local eps = saved.eps or {}
  return { eps1 = eps[1], eps2 = eps[2] }
end

local Torch = {
  name = "Adafactor", op = "adafactor_", whole = true, takes = 2,
  needed = function() return 1 end,
  states = { { name = "row_var", dtype = "fp32", shape = rows, most = 4 }, { name = "col_var", dtype = "fp32",
    shape = cols, most = 4 }, { name = "variance", dtype = "fp32", shape = elements, most = 4 } },
  settings = { "lr", "beta2_decay", "eps1", "eps2", "d", "weight_decay" },
  defaults = { lr = 1e-2, beta2_decay = -0.8, eps1 = 1.1920928955078125e-07, eps2 = 1e-3, d = 1, weight_decay = 0 },
  ranges = { beta2_decay = types.number(nil, 0), eps1 = PAIR, eps2 = PAIR, d = types.number(1) },
  attrs = function(into, group)
    into.lr, into.beta2_decay, into.eps1, into.eps2 = group.lr, group.beta2_decay, group.eps1, group.eps2
    into.d, into.weight_decay, into.hugging_face = group.d, group.weight_decay, 0
  end,
  torch = {
    write = write_eps, read = read_eps,
    belongs = function(group) if group.beta2_decay == nil then return "is not Adafactor's" end end,
  },
}

local HuggingFace = {
  name = "HuggingFaceAdafactor", op = "adafactor_", whole = true, takes = 2,
  needed = function() return 1 end,
  states = { { name = "exp_avg_sq_row", dtype = "fp32", shape = without(0), most = 4 }, { name = "exp_avg_sq_col",
    dtype = "fp32", shape = without(1), most = 4 }, { name = "exp_avg_sq", dtype = "fp32", shape = elements,
    most = 4 } },
  settings = { "lr", "decay_rate", "eps1", "eps2", "clip_threshold", "weight_decay", "scale_parameter", "relative_step",
    "warmup_init" },
  -- These are the Trainer's defaults. transformers.Adafactor itself has scale_parameter and relative_step = true.
  defaults = { lr = 1e-3, decay_rate = -0.8, eps1 = 1e-30, eps2 = 1e-3, clip_threshold = 1, weight_decay = 0,
    scale_parameter = false, relative_step = false, warmup_init = false },
  ranges = { decay_rate = types.number(nil, 0), eps1 = PAIR, eps2 = PAIR, clip_threshold = types.number(0) },
  problem = function(group)
    if group.warmup_init and not group.relative_step then return "warmup_init needs relative_step" end
  end,
  attrs = function(into, group)
    into.lr, into.beta2_decay, into.eps1, into.eps2 = group.lr, group.decay_rate, group.eps1, group.eps2
    into.d, into.weight_decay, into.hugging_face = group.clip_threshold, group.weight_decay, 1
    into.scale_parameter, into.relative_step = group.scale_parameter and 1 or 0, group.relative_step and 1 or 0
    into.warmup_init = group.warmup_init and 1 or 0
  end,
  torch = {
    write = write_eps, read = read_eps,
    nones = { "beta1" },               -- steps of transformers read it; it is None without an average of gradients
    belongs = function(group)
      if group.clip_threshold == nil then return "is not transformers' Adafactor's" end
      if group.beta1 then return "has beta1, so it keeps an average of gradients, which this one does not" end
    end,
  },
  exact_aliases = { "adafactor" },
}

return { Adafactor = Torch, HuggingFaceAdafactor = HuggingFace }
