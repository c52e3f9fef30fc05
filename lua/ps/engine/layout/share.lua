-- SPDX-License-Identifier: BSD-3-Clause
-- Chooses the rank that owns each chunk, if ranks share chunks (ZeRO, src/zero/shard.h). Chunks are assigned in the
-- order of the layout. Each chunk is assigned to the rank that has the fewest bytes so far. If all chunks have the same
-- size, chunk k is assigned to rank k mod N, where N is the number of ranks. A stripe consists of adjacent chunks, at
-- most one per rank, which are gathered or reduced together. The functions are pure, so all ranks get the same result.

local share = {}

---@class ps.Share
---@field owner integer[] for each row of the layout, the rank that owns it
---@field stripe integer[] for each row, the index of its stripe, from 0; all rows of a stripe are in one group
---@field stripes integer number of stripes
---@field bytes number[] by rank from 1, the total weight of the rank's rows

--- Divides rows that have owners into stripes. A stripe consists of adjacent rows of one group, at most one row per
--- rank.
---@param rows {group: integer}[] in the order of the layout
---@param owner integer[] the rank that owns each row
---@return integer[] stripe of each row, from 0
---@return integer number of stripes
function share.stripes(rows, owner)
  local stripes, count, open = {}, 0, {}
  for i, row in ipairs(rows) do
    local stripe = open[row.group]
    if not stripe or stripe[owner[i]] then
      stripe = { number = count }
      count = count + 1
      open[row.group] = stripe
    end
    stripe[owner[i]] = true
    stripes[i] = stripe.number
  end
  return stripes, count
end

--- Assigns rows to ranks.
---@param rows {group: integer, numel: integer}[] in the order of the layout
---@param size integer number of ranks
---@param weight fun(row: table): number number of bytes that the owner of a row needs for the row
---@param bytes? number[] by rank from 1, the number of bytes that the rank already has (default: 0); the bytes of the
---  new rows are added to it
---@return ps.Share
function share.out(rows, size, weight, bytes)
  local made = { owner = {}, bytes = bytes or {} }
  for rank = 1, size do made.bytes[rank] = made.bytes[rank] or 0 end
  for i, row in ipairs(rows) do
    local rank = 1
    for r = 2, size do if made.bytes[r] < made.bytes[rank] then rank = r end end
    made.bytes[rank] = made.bytes[rank] + weight(row)
    made.owner[i] = rank - 1
  end
  made.stripe, made.stripes = share.stripes(rows, made.owner)
  return made
end

--- Returns (bytes of the fullest rank) / (mean over all ranks) - 1.
---@param made ps.Share
---@return number
function share.imbalance(made)
  local sum, most = 0, 0
  for _, bytes in ipairs(made.bytes) do sum, most = sum + bytes, math.max(most, bytes) end
  return sum > 0 and most * #made.bytes / sum - 1 or 0
end

return share
