-- SPDX-License-Identifier: BSD-3-Clause
-- Makes Python's words True and False an error in scripts. In Lua they are undefined global variables, so both would be
-- nil, and the body of `if True then` would never run. A script may define these names. The word None is not an error,
-- because an undefined variable is nil, which has the meaning of Python's None.
local caller = require "ps.core.caller"

local WORDS = { True = "true", False = "false" }

-- If a script has already set a metatable of _G, the metatable stays.
if getmetatable(_G) == nil then
  setmetatable(_G, { __index = function(_, name)
    local word = WORDS[name]
    if word then caller.error(("%s is undefined, so it would be nil: write %s"):format(name, word)) end
    return nil
  end })
end

return {}
