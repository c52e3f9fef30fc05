-- SPDX-License-Identifier: BSD-3-Clause
-- Notes about data. All ranks read all rows, so their notes are equal, and only rank 0 prints them.
local mesh = require "ps.dist.mesh"

--- Prints a note on standard error, on rank 0.
---@param text string a line
return function(text)
  local env = mesh.env()
  if not env or env.rank == 0 then io.stderr:write(text) end
end
