-- SPDX-License-Identifier: BSD-3-Clause
-- Names the modules that have been called. Events and tensors refer to these modules by number.
local nn_module = require "ps.nn.module"
local registry = require "ps.nn.registry"

--- Returns the modules that have been called, by number. Each entry has the module's class, and its path from the
--- outermost module of the call.
---@return table<integer, { path: string, class: string }>
return function()
  local called, above, names = nn_module.called, {}, {}
  for _, module in pairs(called) do
    for name, child, kind in registry.members(module) do
      if kind == "module" then above[child] = { module, name } end
    end
    for path, inner in module:named_modules() do
      for name, child, kind in registry.members(inner) do
        if kind == "module" then above[child] = { inner, name, path } end
      end
    end
  end
  for id, module in pairs(called) do
    local path, at = "", module
    while above[at] do
      path = tostring(above[at][2]) .. (path == "" and "" or "." .. path)
      at = above[at][1]
    end
    names[id] = { path = path, class = module.class_name }
  end
  return names
end
