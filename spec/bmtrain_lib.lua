-- SPDX-License-Identifier: BSD-3-Clause
-- For specs of ps.bmt on several ranks: the beginning of their scripts, and the output of the ranks.
local ranks = require "spec.ranks_lib"

local lib = {}

-- `begin` calls bmt.init_distributed with options that are equal on all ranks.
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

--- Runs a script as `size` ranks. The script has ps, bmt, nn, F, folder and begin(options). Fails unless every rank
--- reaches its end.
---@param folder string
---@param size integer
---@param script string
---@return number[] numbers of the lines "step A B" of rank 0
---@return table<integer, {text: string, code: integer}> each rank's output
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
