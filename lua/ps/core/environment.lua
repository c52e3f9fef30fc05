-- SPDX-License-Identifier: BSD-3-Clause
-- Reads psluajit's own environment variables. dist/env.lua reads the environment variables of launchers.
-- docs/environment.md describes each variable, and spec/docs/environment_spec.lua checks that the page is complete.
local environment = {}

local NAMES = {}
for name in ("PS_DISK_THREADS PS_DRY_RUN PS_RUN_ID PS_STRESS PS_TRACEBACK"):gmatch "%S+" do NAMES[name] = true end

--- Returns the value of an environment variable.
---@param name string one of NAMES; any other name is a bug in the calling code
---@return string? value nil if it is not set
function environment.get(name)
  assert(NAMES[name], name)
  return os.getenv(name)
end

--- Returns the value of an environment variable as a number. Raises an error if the value is not a whole number of at
--- least `least`.
---@param name string
---@param least integer
---@return integer? value nil if it is not set, or empty
function environment.whole(name, least)
  local text = environment.get(name)
  if not text or text == "" then return nil end
  local value = text:match "^%d+$" and tonumber(text)
  if not value or value < least then
    error(("environment variable %s is '%s'; it must be a whole number of at least %d"):format(name, text, least), 0)
  end
  return value
end

return environment
