-- SPDX-License-Identifier: BSD-3-Clause
-- Prints notes about data. All ranks read all rows, so they have the same notes. Therefore only rank 0 prints them.
local mesh = require "ps.dist.mesh"

--- On rank 0, prints a note to standard error.
---@param text string a line, with its line end
return function(text)
  local env = mesh.env()
  if not env or env.rank == 0 then io.stderr:write(text) end
end
