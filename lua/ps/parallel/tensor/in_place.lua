-- SPDX-License-Identifier: BSD-3-Clause
-- Splits modules among ranks without changing the class of the modules. The modules are convolutions, nn.GroupNorm,
-- nn.MultiheadAttention, and nn.Dropout between a column layer and a row layer. Their parameters become this rank's
-- shards. Their forward exchanges values with other ranks if necessary. cut.lua calls the functions with the current
-- cut (ps.tensor_parallel.Cut) and a claim.
local caller = require "ps.core.caller"
local create = require "ps.tensor.create"
local functional = require "ps.tensor.functional"

local in_place = {}

--- The classes of convolutions that can be split.
in_place.CONVOLUTIONS = { Conv1d = true, Conv2d = true }

-- Divides the number in a field of the module by the number of ranks.
local function divided(cut, claim, field)
  local value, size = claim.module[field], cut.region.size
  if value % size ~= 0 then
    caller.error(("tensor_parallel.size = %d: %s has %s = %d, which is not a multiple of the size"):format(size,
      claim.path, field, value))
  end
  claim.module[field] = value / size
end

local function check_whole_groups(claim)
  local module = claim.module
  if module.groups ~= 1 then
    caller.error(("tensor_parallel: %s has groups = %d; only convolutions with groups = 1 are cut"):format(claim.path,
      module.groups))
  end
end

--- Splits the output channels of a convolution.
---@param cut ps.tensor_parallel.Cut
---@param claim ps.tensor_parallel.Claim
function in_place.conv_column(cut, claim)
  local module, group, blocks = claim.module, cut.region.group, claim.entry.blocks
  check_whole_groups(claim)
  cut:take(claim, module, "weight", { dim = 0, blocks = blocks })
  cut:take(claim, module, "bias", { dim = 0, blocks = blocks })
  module.out_channels = module.out_channels / cut.region.size
  local forward = module.forward
  rawset(module, "forward", function(self, x) return forward(self, group:copy_to(x)) end)
end

--- Splits the input channels of a convolution. The bias is added after the ranks' results are summed.
---@param cut ps.tensor_parallel.Cut
---@param claim ps.tensor_parallel.Claim
function in_place.conv_row(cut, claim)
  local module, group = claim.module, cut.region.group
  check_whole_groups(claim)
  cut:take(claim, module, "weight", { dim = 1, blocks = claim.entry.blocks })
  module.in_channels = module.in_channels / cut.region.size
  local forward = module.forward
  local bare = setmetatable({}, { __index = function(_, key) if key ~= "bias" then return module[key] end end })
  rawset(module, "forward", function(self, x)
    local y = group:reduce_from(forward(bare, x))
    if self.bias == nil then return y end
    local shape = { -1 }
    for d = 2, #self.kernel_size + 1 do shape[d] = 1 end
    return y + self.bias:reshape(shape)
  end)
end

--- Splits an nn.GroupNorm after a column layer. Each rank then has some of the groups.
---@param cut ps.tensor_parallel.Cut
---@param claim ps.tensor_parallel.Claim
function in_place.channels(cut, claim)
  divided(cut, claim, "num_groups")
  divided(cut, claim, "num_channels")
  cut:take(claim, claim.module, "weight", { dim = 0 })
  cut:take(claim, claim.module, "bias", { dim = 0 })
end

--- Changes an nn.Dropout between a column layer and a row layer. Its mask becomes this rank's part of the mask for all
--- columns.
---@param cut ps.tensor_parallel.Cut
---@param claim ps.tensor_parallel.Claim
function in_place.columns(cut, claim)
  local region = cut.region
  rawset(claim.module, "forward", function(self, x)
    if not self:active() then return x end
    local shape, C = x:shape(), x:size(-1)
    shape[#shape] = C * region.size
    local mask = functional.dropout(create.ones(shape, { dtype = x:dtype(), device = x:device() }), self.p, true)
    return x * mask:narrow(-1, region.rank * C, C)
  end)
end

--- Splits an nn.MultiheadAttention. Each rank then has some of the heads. The layer out_proj has its own claim, as a
--- row layer.
---@param cut ps.tensor_parallel.Cut
---@param claim ps.tensor_parallel.Claim
---@param note_heads fun(module: ps.nn.Module, first: integer) records this rank's first head
function in_place.attention(cut, claim, note_heads)
  local module, region = claim.module, cut.region
  divided(cut, claim, "heads")
  module.inner = module.heads * module.head_size
  cut:take(claim, module, "in_proj_weight", { dim = 0, blocks = 3 })
  cut:take(claim, module, "in_proj_bias", { dim = 0, blocks = 3 })
  for _, name in ipairs { "q_proj_weight", "k_proj_weight", "v_proj_weight" } do
    cut:take(claim, module, name, { dim = 0 })
  end
  for _, child in module:named_modules() do note_heads(child, region.rank * module.heads) end
  local forward = module.forward
  rawset(module, "forward", function(self, query, key, value, options)
    if region:has_part(query) and not self.batch_first then
      caller.error(("tensor_parallel: %s is inside sequence parallelism, which needs batch_first = true"):format(
        claim.path))
    end
    local q, k = region:gather(query), nil
    if key ~= nil then k = rawequal(key, query) and q or region:gather(key) end
    local v = value
    if value ~= nil then
      v = rawequal(value, query) and q or rawequal(value, key) and k or region:gather(value)
    end
    local y, weights = forward(self, q, k, v, options)
    if weights == nil then return y end
    if options and options.average_attn_weights == false then
      return y, region.group:gather_from(weights, weights:dim() - 3)
    end
    return y, region.group:reduce_from(weights) / region.size
  end)
end

local KINDS = { attention = "MultiheadAttention", channels = "GroupNorm", columns = "Dropout" }

--- Raises an error if a module of this class cannot be split in the way that the claim's kind describes.
---@param claim ps.tensor_parallel.Claim
function in_place.check(claim)
  local class = KINDS[claim.kind]
  if claim.module.class_name == class then return end
  caller.error(("tensor_parallel: %s is a %s, but \"%s\" is for an nn.%s"):format(claim.path, claim.module.class_name,
    claim.kind, class))
end

return in_place
