-- SPDX-License-Identifier: BSD-3-Clause
-- Exchanges short messages between ranks. Every rank receives all messages. An error of one rank is raised on all
-- ranks, so that no rank waits for a failed rank. All ranks must make the same calls. If `group` is nil, there is only
-- one process. A call needs one exchange, or two exchanges if a message is long.
local create = require "ps.tensor.create"
local devices = require "ps.core.devices"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local array = require "ps.core.array"
local byte_array = array "uint8_t"
local ffi, C = native.ffi, native.C

local agree = {}

local SHORT = 192  -- number of bytes of each message that the first exchange sends
local SILENT = "an error without words"
local NO = "\0no"                                          -- differs from the text of every error

--- Returns the upper 53 bits of a hash as a number. A double represents 53 bits exactly, and tensors are made from
--- doubles.
---@param hash ffi.cdata* uint64_t
---@return number
function agree.hash_number(hash) return tonumber(hash / 2048) end

--- Returns a hash of a text as a number. Different texts have different numbers, unless their hashes collide.
---@param text string
---@return number
function agree.text_hash(text) return agree.hash_number(C.ps_xxh3(text, #text)) end

-- Gathers `nbytes` bytes from every rank. fill(buffer) writes this rank's bytes.
local function gather(group, nbytes, fill)
  local size = group:size()
  local bytes = byte_array(size * nbytes)
  scope.scope(function()
    local mine = create.empty({ nbytes }, { dtype = "uint8", device = "cpu" })
    local all = create.empty({ size * nbytes }, { dtype = "uint8", device = "cpu" })
    fill(bytes)
    native.check(C.ps_tensor_write(mine, bytes, nbytes))
    group:all_gather(all, mine)
    native.check(C.ps_tensor_read(all, bytes, size * nbytes))
  end)
  return bytes
end

--- Returns every rank's text, in the order of ranks.
---@param group? ps.Group
---@param text string
---@return string[]
function agree.texts(group, text)
  if not group then return { text } end
  local size, texts, room = group:size(), {}, SHORT + 8
  local got = gather(group, room, function(buffer)
    ffi.cast("int64_t *", buffer)[0] = #text
    ffi.copy(buffer + 8, text, math.min(#text, SHORT))
  end)
  local lengths, most = {}, 0
  for rank = 1, size do
    lengths[rank] = tonumber(ffi.cast("int64_t *", got + (rank - 1) * room)[0])
    most = math.max(most, lengths[rank])
    texts[rank] = ffi.string(got + (rank - 1) * room + 8, math.min(lengths[rank], SHORT))
  end
  if most > SHORT then
    local rest = most - SHORT
    got = gather(group, rest, function(buffer) ffi.copy(buffer, text:sub(SHORT + 1), math.max(0, #text - SHORT)) end)
    for rank = 1, size do
      texts[rank] = texts[rank] .. ffi.string(got + (rank - 1) * rest, math.max(0, lengths[rank] - SHORT))
    end
  end
  return texts
end

-- Joins the ranks' texts into one text. Ranks with equal texts share a line, which begins with their global ranks.
local function together(group, texts)
  local lines, ranks = {}, {}
  for rank, text in ipairs(texts) do
    if text ~= "" then
      if not ranks[text] then
        ranks[text] = {}
        lines[#lines + 1] = text
      end
      table.insert(ranks[text], group:world_rank(rank - 1))
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

local function words(problem)
  local text = tostring(problem)
  return text == "" and SILENT or text
end

--- Runs fn on every rank. If fn fails on any rank, all ranks raise the same error, which names the failed ranks.
---@generic T
---@param group? ps.Group
---@param fn fun(): T
---@param heard? fun() called once all ranks have sent their results; not called if the exchange itself fails
---@return T
function agree.run(group, fn, heard)
  local ok, result = pcall(fn)
  if not group then
    if not ok then error(result, 0) end
    return result
  end
  local problem = together(group, agree.texts(group, ok and "" or words(result)))
  if heard then heard() end
  if problem then error(problem, 0) end
  return result
end

--- Runs fn like agree.run, and returns whether fn returned true on all ranks.
---@param group? ps.Group
---@param fn fun(): boolean?
---@return boolean
function agree.all(group, fn)
  local ok, result = pcall(fn)
  if not group then
    if not ok then error(result, 0) end
    return result
  end
  local texts, all = agree.texts(group, ok and (result and "" or NO) or words(result)), true
  for rank, text in ipairs(texts) do
    if text == NO then all, texts[rank] = false, "" end
  end
  local problem = together(group, texts)
  if problem then error(problem, 0) end
  return all
end

--- Runs fn only on the group's rank 0. All ranks get the result of fn.
---@param group? ps.Group
---@param fn fun(): string?
---@return string
function agree.first(group, fn)
  if not group then return fn() or "" end
  local text = ""
  if group:rank() == 0 or not devices.computes then                 -- in a dry run, rank 0 may have no process
    local ok, result = pcall(fn)
    text = ok and "+" .. (result or "") or "-" .. words(result)
  end
  local answer = agree.texts(group, text)[1]
  if answer:sub(1, 1) ~= "+" then error(("rank %d: %s"):format(group:world_rank(0), answer:sub(2)), 0) end
  return answer:sub(2)
end

--- Compares lists of pairs { name, value }. If the values differ between ranks, every rank raises an error that begins
--- with `what`.
---@param group? ps.Group
---@param what string
---@param list string[][]
function agree.same(group, what, list)
  if not group then return end
  local values = {}
  for i, pair in ipairs(list) do values[i] = pair[2] end
  local texts = agree.texts(group, table.concat(values, "\n"))
  for rank = 1, #texts - 1 do
    local theirs, first = texts[rank + 1]:gmatch("[^\n]+"), texts[1]:gmatch("[^\n]+")
    for _, pair in ipairs(list) do
      local a, b = theirs(), first()
      if a ~= b then
        error(("%s: the %s is %s on rank %d, %s on rank %d"):format(what, pair[1], tostring(a), group:world_rank(rank),
          tostring(b), group:world_rank(0)), 0)
      end
    end
  end
end

-- -- numbers ----------------------------------------------------------------------------------------------------------
--- Returns the numbers of every rank, in the order of ranks. All ranks must pass the same count of numbers.
---@param group ps.Group
---@param mine number[] this rank's numbers
---@param dtype? string dtype of the message (default "fp64")
---@return number[][] rows
function agree.numbers(group, mine, dtype)
  dtype = dtype or "fp64"
  local all = create.empty({ group:size(), #mine }, { dtype = dtype })
  return group:all_gather(all, create.tensor(mine, { dtype = dtype })):tolist()
end

--- Returns the records of every rank, in the order of ranks. A record is a table from names to numbers.
---@param group ps.Group
---@param fields string[] the names, in the order in which the values are sent; they must be equal on all ranks
---@param mine table<string, number> this rank's record; a missing field counts as 0
---@return table<string, number>[] records
function agree.gather(group, fields, mine)
  local values, known = {}, {}
  for i, name in ipairs(fields) do values[i], known[name] = mine[name] or 0, true end
  for name in pairs(mine) do assert(known[name], name) end
  local records = {}
  for rank, row in ipairs(agree.numbers(group, values)) do
    records[rank] = {}
    for i, name in ipairs(fields) do records[rank][name] = row[i] end
  end
  return records
end

--- Returns the smallest of all ranks' integers.
---@param group ps.Group
---@param value integer
---@return integer
function agree.least(group, value)
  for _, row in ipairs(agree.numbers(group, { value }, "int64")) do value = math.min(value, row[1]) end
  return value
end

--- Returns the first rank whose text differs from rank 0's text, or nil. Texts are sent only if their hashes differ.
---@param group ps.Group
---@param text string
---@return integer? rank in the group, from 0
---@return string? its the text of this rank
---@return string? first rank 0's text
function agree.differs(group, text)
  local rows = agree.numbers(group, { agree.text_hash(text), #text }, "int64")
  for rank = 2, #rows do
    if rows[rank][1] ~= rows[1][1] or rows[rank][2] ~= rows[1][2] then
      local texts = agree.texts(group, text)
      return rank - 1, texts[rank], texts[1]
    end
  end
end

return agree
