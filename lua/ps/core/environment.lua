-- SPDX-License-Identifier: BSD-3-Clause
-- The door for environment variables of psluajit's own, but for those of launchers, which dist/env.lua reads.
-- docs/environment.md says what each variable does; spec/docs/environment_spec.lua checks that the page has them all.
local environment = {}

local NAMES = {}
for name in ("PS_DISK_THREADS PS_DRY_RUN PS_RUN_ID PS_STRESS PS_TRACEBACK"):gmatch "%S+" do NAMES[name] = true end

--- The value of a variable.
---@param name string one of NAMES; another is a mistake in the caller
---@return string? value nil: it is not set
function environment.get(name)
  assert(NAMES[name], name)
  return os.getenv(name)
end

--- The value of a variable as a number; an error where it is another text.
---@param name string
---@param least integer
---@return integer? value nil: it is not set, or empty
function environment.whole(name, least)
  local text = environment.get(name)
  if not text or text == "" then return nil end
  local value = text:match "^%d+$" and tonumber(text)
  if not value or value < least then
    error(("%s is '%s'; it takes a whole number from %d"):format(name, text, least), 0)
  end
  return value
end

return environment
