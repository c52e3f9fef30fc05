-- SPDX-License-Identifier: BSD-3-Clause
-- Lists a model's modules with their numbers of parameters. The list prints as a table.
local readable = require "ps.core.readable"

local SUMMARY = { prints_rows = true, __tostring = function(self)
  local lines = {}
  for i, row in ipairs(self) do
    lines[i] = { row.name == "" and "(the model)" or row.name, row.class, ("%d"):format(row.parameters),
      ("%d"):format(row.trained), readable.bytes(row.nbytes) }
  end
  return table.concat(readable.lines({ { title = "module", left = true }, { title = "class", left = true },
    { title = "parameters" }, { title = "trained" }, { title = "size" } }, lines), "\n")
end }

---@param module ps.nn.Module
---@return {name: string, class: string, parameters: integer, trained: integer, nbytes: integer}[] rows the modules,
---  beginning with the model
return function(module)
  local rows = {}
  for name, inner in module:named_modules() do
    local row = { name = name, class = inner.class_name, parameters = 0, trained = 0, nbytes = 0 }
    for _, p in ipairs(inner:parameters()) do
      row.parameters, row.nbytes = row.parameters + p:numel(), row.nbytes + p:nbytes()
      if p:needs_grad() then row.trained = row.trained + p:numel() end
    end
    rows[#rows + 1] = row
  end
  return setmetatable(rows, SUMMARY)
end
