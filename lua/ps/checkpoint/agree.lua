-- SPDX-License-Identifier: BSD-3-Clause
-- Small talk between the ranks of a checkpoint: what one says all hear, and an error of one is an error of all, so that
-- nobody waits for a rank that gave up. Every rank makes the same calls; `group` nil: one process.
local ps = require "ps"
local ffi, C = ps.ffi, ps.C

local agree = {}

--- Every rank's text, in the order of ranks.
---@param group? ps.Group
---@param text string
---@return string[]
function agree.texts(group, text)
  if not group then return { text } end
  local size, texts = group:size(), {}
  ps.scope(function()
    local lengths = ps.empty({ size }, { dtype = "int64", device = "cpu" })
    group:all_gather(lengths, ps.tensor({ #text }, { dtype = "int64", device = "cpu" }))
    local length, most = lengths:tolist(), 1
    for rank = 1, size do most = math.max(most, length[rank]) end
    local mine = ps.empty({ most }, { dtype = "uint8", device = "cpu" })
    local all = ps.empty({ size * most }, { dtype = "uint8", device = "cpu" })
    local bytes = ffi.new("uint8_t[?]", size * most)
    ffi.copy(bytes, text, #text)
    ps.check(C.ps_tensor_write(mine, bytes, most))
    group:all_gather(all, mine)
    ps.check(C.ps_tensor_read(all, bytes, size * most))
    for rank = 1, size do texts[rank] = ffi.string(bytes + (rank - 1) * most, length[rank]) end
  end)
  return texts
end

-- Ranks that say the same are named together.
local function together(texts)
  local lines, ranks = {}, {}
  for rank, text in ipairs(texts) do
    if text ~= "" then
      if not ranks[text] then
        ranks[text] = {}
        lines[#lines + 1] = text
      end
      table.insert(ranks[text], rank - 1)
    end
  end
  if #lines == 0 then return nil end
  if #lines == 1 and #ranks[lines[1]] == #texts then return lines[1] end
  for i, text in ipairs(lines) do
    local list = ranks[text]
    lines[i] = ("%s %s: %s"):format(#list > 1 and "ranks" or "rank", table.concat(list, ", "), text)
  end
  return table.concat(lines, "\n")
end

--- Runs fn on every rank; where it failed on any, all get the same error, which says on which.
---@generic T
---@param group? ps.Group
---@param fn fun(): T
---@return T
function agree.run(group, fn)
  local ok, result = pcall(fn)
  if not group then
    if not ok then error(result, 0) end
    return result
  end
  local text = ok and "" or tostring(result)
  local problem = together(agree.texts(group, not ok and text == "" and "an error without words" or text))
  if problem then error(problem, 0) end
  return result
end

--- As agree.run, for what rank 0 does alone; its text is everybody's result.
---@param group? ps.Group
---@param fn fun(): string?
---@return string
function agree.first(group, fn)
  if not group then return fn() or "" end
  local answer
  agree.run(group, function() if group:rank() == 0 then answer = fn() end end)
  return agree.texts(group, answer or "")[1]
end

--- Fails, on every rank, where they do not all say the same: `what` names it, { name, value } pairs are compared.
---@param group? ps.Group
---@param what string
---@param pairs_of string[][]
function agree.same(group, what, pairs_of)
  if not group then return end
  for _, pair in ipairs(pairs_of) do
    local texts = agree.texts(group, pair[2])
    for rank = 1, #texts - 1 do
      if texts[rank + 1] ~= texts[1] then
        error(("%s: the %s is %s on rank %d, %s on rank 0"):format(what, pair[1], texts[rank + 1], rank, texts[1]), 0)
      end
    end
  end
end

return agree
