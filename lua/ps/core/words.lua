-- SPDX-License-Identifier: BSD-3-Clause
-- Makes True and False, Python's words, an error in scripts. In Lua they are undefined global variables, so both would
-- be nil, and `if True then` would never run. A script may define them. None needs no error, since nil is its meaning.
local caller = require "ps.core.caller"

local WORDS = { True = "true", False = "false" }

-- A script that has set a metatable keeps it.
if getmetatable(_G) == nil then
  setmetatable(_G, { __index = function(_, name)
    local word = WORDS[name]
    if word then caller.error(("%s is undefined, so it would be nil: write %s"):format(name, word)) end
    return nil
  end })
end

return {}
