-- SPDX-License-Identifier: BSD-3-Clause
-- JSON with sorted keys, so that equal states give equal bytes.
local json = require("cjson").new()

local function encode(value)
  if type(value) ~= "table" then return json.encode(value) end
  if #value > 0 then
    local items = {}
    for i, item in ipairs(value) do items[i] = encode(item) end
    return "[" .. table.concat(items, ",") .. "]"
  end
  local keys, fields = {}, {}
  for key in pairs(value) do keys[#keys + 1] = key end
  table.sort(keys)
  for i, key in ipairs(keys) do fields[i] = json.encode(tostring(key)) .. ":" .. encode(value[key]) end
  return "{" .. table.concat(fields, ",") .. "}"
end

return encode
