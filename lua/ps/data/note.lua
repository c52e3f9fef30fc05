-- SPDX-License-Identifier: BSD-3-Clause
-- Prints notes about data. All ranks read the same rows and would print the same notes. Therefore only rank 0 prints
-- notes.
local mesh = require "ps.dist.mesh"

--- On rank 0, prints a note to standard error.
---@param text string the note, including a line end
return function(text)
  local env = mesh.env()
  if not env or env.rank == 0 then io.stderr:write(text) end
end
