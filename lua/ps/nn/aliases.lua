-- SPDX-License-Identifier: BSD-3-Clause
-- Adds PyTorch's names for methods of modules that have other names in psluajit: lists of members, conversions to
-- types, and moves to devices.

-- Returns the values that an iterator over names and values produces, as a list.
local function values(next_one)
  local list = {}
  for _, value in next_one do list[#list + 1] = value end
  return list
end

-- Returns the modules that an iterator over names and modules produces, as a list in which each module occurs once.
local function once(next_one)
  local list, seen = {}, {}
  for _, module in next_one do
    if not seen[module] then list[#list + 1], seen[module] = module, true end
  end
  return list
end

---@param Module ps.nn.Module the class to which the methods are added
return function(Module)
  --- Returns the direct child modules as a list. Each module occurs once.
  ---@return ps.nn.Module[]
  function Module:children() return once(self:named_children()) end
  --- Returns the module itself and all modules in it, as a list. Each module occurs once.
  ---@return ps.nn.Module[]
  function Module:modules() return once(self:named_modules()) end
  --- Returns all buffers as a list, in the order of named_buffers. Each buffer occurs once.
  ---@return ps.Tensor[]
  function Module:buffers() return values(self:named_buffers()) end

  --- Sets whether backward computes gradients for the module's parameters. This is PyTorch's way to freeze a module.
  ---@param on? boolean (default true)
  ---@return ps.nn.Module self
  function Module:requires_grad_(on)
    for _, p in ipairs(self:parameters()) do p:requires_grad_(on) end
    return self
  end

  --- Converts the module to fp16, like module:to("fp16").
  ---@return ps.nn.Module self
  function Module:half() return self:to "fp16" end
  --- Converts the module to bf16, like module:to("bf16").
  ---@return ps.nn.Module self
  function Module:bfloat16() return self:to "bf16" end
  --- Converts the module to fp32, like module:to("fp32").
  ---@return ps.nn.Module self
  function Module:float() return self:to "fp32" end
  --- Converts the module to fp64, like module:to("fp64").
  ---@return ps.nn.Module self
  function Module:double() return self:to "fp64" end
  --- Moves the module to the CPU, like module:to("cpu").
  ---@return ps.nn.Module self
  function Module:cpu() return self:to "cpu" end
  --- Moves the module to a GPU, like module:to("cuda").
  ---@param n? integer index of the device, as in "cuda:n"
  ---@return ps.nn.Module self
  function Module:cuda(n) return self:to(n and ("cuda:%d"):format(n) or "cuda") end
end
