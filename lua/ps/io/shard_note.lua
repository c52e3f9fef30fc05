-- SPDX-License-Identifier: BSD-3-Clause
-- The shard note: a JSON text in files of ps.save. It describes the tensors of the file that are shards of tensor
-- parallelism (ps.tensor.shard). Each tensor is identified by its path in the saved value, such as "wte.weight",
-- "model.wte.weight" or "list[1]".
local json = require("cjson").new()
local scope = require "ps.core.scope"
local shard = require "ps.tensor.shard"

local shard_note = {}

--- Returns the descriptions in a note by tensor path, without checking the descriptions. Returns an empty table if the
--- text is not a shard note.
---@param text? string
---@return table<string, any>
function shard_note.entries(text)
  local ok, note = pcall(json.decode, text or "")
  return ok and type(note) == "table" and type(note.shards) == "table" and note.shards or {}
end

--- Returns the valid shard descriptions in a note, by tensor path.
---@param text? string
---@return table<string, ps.nn.Shard>
function shard_note.read(text)
  local found = {}
  for place, desc in pairs(shard_note.entries(text)) do
    local fits, made = pcall(shard.new, desc)
    if fits then found[place] = made end
  end
  return found
end

--- Sets the shard description of each tensor in `value` whose path is in `shards`.
---@param value any
---@param shards table<string, ps.nn.Shard> the descriptions by tensor path
---@param place? string path of `value` (default: the whole value)
function shard_note.mark(value, shards, place)
  if next(shards) == nil then return end
  if scope.is_tensor(value) then
    local desc = shards[place or ""]
    if desc then pcall(shard.set, value, desc) end         -- fails if the tensor has another shape
  elseif type(value) == "table" then
    for key, item in pairs(value) do
      local inside = place and ("%s.%s"):format(place, tostring(key)) or tostring(key)
      if type(key) == "number" and not shards[inside] then inside = ("%s[%d]"):format(place or "", key) end
      shard_note.mark(item, shards, inside)
    end
  end
end

return shard_note
