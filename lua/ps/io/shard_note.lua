-- SPDX-License-Identifier: BSD-3-Clause
-- The note in a file of ps.save about which of its tensors are shards of tensor parallelism (ps.tensor.shard), by their
-- places in the saved value ("wte.weight", "model.wte.weight", "list[1]").
local json = require("cjson").new()
local scope = require "ps.core.scope"
local shard = require "ps.tensor.shard"

local shard_note = {}

--- Returns the raw descriptions in a note, by path. A damaged note, or a note of another kind, has none.
---@param text? string
---@return table<string, any>
function shard_note.entries(text)
  local ok, note = pcall(json.decode, text or "")
  return ok and type(note) == "table" and type(note.shards) == "table" and note.shards or {}
end

--- Returns the shards that a note describes, by path, without invalid descriptions.
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

--- Attaches the description of its shard to each tensor in a value.
---@param value any
---@param shards table<string, ps.nn.Shard> descriptions by path
---@param place? string path of the value
function shard_note.mark(value, shards, place)
  if next(shards) == nil then return end
  if scope.is_tensor(value) then
    local desc = shards[place or ""]
    if desc then pcall(shard.set, value, desc) end         -- fails for a tensor of another shape
  elseif type(value) == "table" then
    for key, item in pairs(value) do
      local inside = place and ("%s.%s"):format(place, tostring(key)) or tostring(key)
      if type(key) == "number" and not shards[inside] then inside = ("%s[%d]"):format(place or "", key) end
      shard_note.mark(item, shards, inside)
    end
  end
end

return shard_note
