-- SPDX-License-Identifier: BSD-3-Clause
-- For specs of ps.bmt on several ranks: how their scripts begin, and what they said.
local ranks = require "spec.ranks_lib"

local lib = {}

-- `begin` is bmt.init_distributed, alike for all.
local BEGIN = [[
  local ps = require "ps"
  local bmt = require "ps.bmt"
  local nn, F, folder = ps.nn, ps.F, %q
  local function begin(options)
    options.seed, options.quiet, options.config = 7, true, options.config or {}
    options.config.plan_print = false
    options.rendezvous = "file://" .. folder .. "/rendezvous"
    bmt.init_distributed(options)
  end
]]

--- Runs a script, which has ps, bmt, nn, F, folder and begin(options), as `size` ranks; fails unless every rank comes
--- to its end.
---@param folder string
---@param size integer
---@param script string
---@return number[] numbers of the lines "step A B" of rank 0
---@return table<integer, {text: string, code: integer}> all what each rank said
function lib.run(folder, size, script)
  local all = ranks.run(folder, size, BEGIN:format(folder) .. script .. "\n  print 'done'\n")
  for rank = 0, size - 1 do
    assert(all[rank].code == 0 and all[rank].text:find "done\n$", ("rank %d: %s"):format(rank, all[rank].text))
  end
  local numbers = {}
  for a, b in all[0].text:gmatch "step (%S+) (%S+)" do
    numbers[#numbers + 1], numbers[#numbers + 2] = tonumber(a), tonumber(b)
  end
  return numbers, all
end

return lib
