-- SPDX-License-Identifier: BSD-3-Clause
-- Losses as modules, with PyTorch's names. Each module calls a function of ps.F with the options that its constructor
-- got.
local functional = require "ps.tensor.functional"
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local F = functional

local losses = {}

local REDUCTION = { none = true, mean = true, sum = true }
local KL_REDUCTION = { none = true, mean = true, sum = true, batchmean = true }

-- Creates the class of a module that calls F[name].
--   keys: the module's options and their kinds
--   buffers: the options that are saved with the module
--   of_three: whether the function has three tensor arguments
local function loss(class_name, name, keys, buffers, of_three)
  local class = nn_module.class(class_name)
  class.unscoped = true
  --- Checks and stores the options, which forward passes to the function of ps.F.
  ---@param options? table
  function class:init(options)
    options = caller.options(options, "nn." .. class_name, keys)
    if options.reduction ~= nil then
      caller.one_of(options.reduction, keys.log_target and KL_REDUCTION or REDUCTION,
        "nn." .. class_name .. ": reduction")
    end
    for key in pairs(keys) do
      if buffers and buffers[key] and options[key] ~= nil then self:buffer(key, options[key])
      else self[key] = options[key] end
    end
  end
  local function options_of(self)
    local options = {}
    for key in pairs(keys) do options[key] = self[key] end
    return options
  end
  --- Returns the loss of a prediction against its target.
  ---@param x ps.Tensor
  ---@param target ps.Tensor
  ---@return ps.Tensor of 0 dimensions, unless the reduction is "none"
  function class:forward(x, target) return F[name](x, target, options_of(self)) end
  if of_three then
    --- Returns the loss of three tensors. The arguments have the order of the function's arguments in ps.F.
    ---@param a ps.Tensor
    ---@param b ps.Tensor
    ---@param c ps.Tensor
    ---@return ps.Tensor of 0 dimensions, unless the reduction is "none"
    function class:forward(a, b, c) return F[name](a, b, c, options_of(self)) end
  end
  function class:extra_repr()
    local parts = {}
    for key, kind in pairs(keys) do
      if self[key] ~= nil and kind ~= "tensor" then parts[#parts + 1] = ("%s=%s"):format(key, tostring(self[key])) end
    end
    table.sort(parts)
    return table.concat(parts, ", ")
  end
  local options = caller.sorted_names(keys)                 -- help shows them
  for i, key in ipairs(options) do
    options[i] = ("%s?: %s"):format(key, keys[key] == "whole" and "integer" or keys[key])
  end
  class._like, class._takes = name, { ("options?: {%s}"):format(table.concat(options, ", ")) }
  losses[class_name] = class
end

local WEIGHT = { weight = true }

loss("CrossEntropyLoss", "cross_entropy", { weight = "tensor", ignore_index = "whole", reduction = "string",
  label_smoothing = "number" }, WEIGHT)
loss("NLLLoss", "nll_loss", { weight = "tensor", ignore_index = "whole", reduction = "string" }, WEIGHT)
loss("MSELoss", "mse_loss", { reduction = "string" })
loss("L1Loss", "l1_loss", { reduction = "string" })
loss("SmoothL1Loss", "smooth_l1_loss", { reduction = "string", beta = "number" })
loss("HuberLoss", "huber_loss", { reduction = "string", delta = "number" })
loss("BCELoss", "binary_cross_entropy", { reduction = "string" })
loss("BCEWithLogitsLoss", "binary_cross_entropy_with_logits", { reduction = "string", pos_weight = "tensor" },
  { pos_weight = true })
loss("KLDivLoss", "kl_div", { reduction = "string", log_target = "boolean" })

loss("HingeEmbeddingLoss", "hinge_embedding_loss", { margin = "number", reduction = "string" })
loss("MarginRankingLoss", "margin_ranking_loss", { margin = "number", reduction = "string" }, nil, true)
loss("CosineEmbeddingLoss", "cosine_embedding_loss", { margin = "number", reduction = "string" }, nil, true)
loss("TripletMarginLoss", "triplet_margin_loss", { margin = "number", p = "number", eps = "number", swap = "boolean",
  reduction = "string" }, nil, true)
loss("GaussianNLLLoss", "gaussian_nll_loss", { full = "boolean", eps = "number", reduction = "string" }, nil, true)

---@class ps.nn.CosineSimilarity: ps.nn.Module
local CosineSimilarity = nn_module.class("CosineSimilarity")
CosineSimilarity.unscoped = true

--- Creates a module that computes cosines of angles between vectors. Stores the dimension of the vectors.
---@param dim? integer the dimension along which the vectors are (default 1)
---@param eps? number norms of vectors below eps are replaced by eps (default 1e-8)
function CosineSimilarity:init(dim, eps)
  self.dim, self.eps = caller.whole(dim or 1, "nn.CosineSimilarity: dim"),
    caller.typed(eps or 1e-8, "number", "nn.CosineSimilarity: eps")
end
--- Returns the cosines of the angles between the vectors of a and b.
---@param a ps.Tensor
---@param b ps.Tensor of a shape that broadcasts with a's
---@return ps.Tensor without the dimension `dim`
function CosineSimilarity:forward(a, b) return F.cosine_similarity(a, b, self.dim, self.eps) end
function CosineSimilarity:extra_repr() return ("dim=%d, eps=%g"):format(self.dim, self.eps) end
losses.CosineSimilarity = CosineSimilarity

return losses
