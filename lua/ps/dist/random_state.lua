-- SPDX-License-Identifier: BSD-3-Clause
-- Saves and restores the whole state of the random numbers (ps.rng), also as text for files, and shares the state among
-- ranks. The 64-bit numbers of the state are saved as decimal text, because the numbers of Lua and JSON cannot
-- represent them exactly.
local random = require "ps.core.random"
local agree = require "ps.dist.agree"

local random_state = {}

local FIELDS = { "seed", "offset", "step", "sample", "op" }

local function u64(text)
  local value = 0ULL
  for digit in text:gmatch("%d") do value = value * 10 + tonumber(digit) end
  return value
end

--- Returns the state as decimal texts: {seed = "17", ...}.
---@return table<string, string>
function random_state.get()
  local rng, state = random.state(), {}
  for _, key in ipairs(FIELDS) do state[key] = (tostring(rng[key]):gsub("ULL$", "")) end
  return state
end

--- Sets a state that `get` returned. A field that `state` lacks does not change.
---@param state table<string, string>
function random_state.set(state)
  local rng = random.state()
  for _, key in ipairs(FIELDS) do if state[key] then rng[key] = u64(state[key]) end end
end

--- Returns a function that restores the current state.
---@return fun()
function random_state.keep()
  local rng, kept = random.state(), {}
  for i, key in ipairs(FIELDS) do kept[i] = rng[key] end
  return function() for i, key in ipairs(FIELDS) do rng[key] = kept[i] end end
end

--- Sets the state of all ranks to rank 0's state.
---@param group ps.Group
function random_state.share(group)
  local text = agree.first(group, function()
    local state, values = random_state.get(), {}
    for i, key in ipairs(FIELDS) do values[i] = state[key] end
    return table.concat(values, " ")
  end)
  local state, values = {}, text:gmatch("%d+")
  for _, key in ipairs(FIELDS) do state[key] = values() end
  random_state.set(state)
end

return random_state
