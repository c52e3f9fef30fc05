-- SPDX-License-Identifier: BSD-3-Clause
-- How many targets of a batch count: what a loss is the mean of, and what a micro-batch weighs among others.
local ps = require "ps"
local core = require "ps.nn.module"

local targets = {}

--- Targets that do not count have this value, as in PyTorch and transformers.
targets.IGNORED = -100

local function are_classes(t)
  if not ps.is_tensor(t) then return false end
  local dtype = t:dtype()
  return dtype == "int32" or dtype == "int64"
end

-- The targets of a batch as a model takes it: y of (x, y), which has the shape of x; nil where there are none.
local function find(x, y)
  if are_classes(y) and ps.is_tensor(x) and core.same_shape(x:shape(), y:shape()) then return y end
end

---@class ps.Targets
---@field count integer targets that count
---@field places integer all of them, ignored ones too

--- The targets of a batch of two tensors: inputs x, and y int [...] of the same shape; nil where the batch is another
--- one. The host waits for a y that is on a device.
---@param batch any[] as a model is called with it
---@return ps.Targets?
function targets.of(batch)
  local y = find(batch[1], batch[2])
  if y == nil then return nil end
  local count = ps.no_grad(function() return y:ne(targets.IGNORED):sum():item() end)
  return { count = count, places = y:numel() }
end

return targets
