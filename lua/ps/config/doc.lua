-- SPDX-License-Identifier: BSD-3-Clause
-- Formats the schema as the reference tables of docs/config.md, for tools/config_doc.lua. A spec checks that the tables
-- in the file are up to date.
local schema = require "ps.config.schema"
local check = require "ps.config.check"
local wrap = require "ps.core.wrap"

local doc = { BEGIN = "<!-- tables: psluajit tools/config_doc.lua -->", END = "<!-- end of tables -->" }

local function default_of(row)
  if row.required then return "needed" end
  if row.default == nil then return "" end
  if type(row.default) == "table" then
    local items = {}
    for i, item in ipairs(row.default) do items[i] = check.show(item) end
    return "`[" .. table.concat(items, ", ") .. "]`"
  end
  return "`" .. check.show(row.default) .. "`"
end

-- Returns the status of a key. Also returns the effect of the key, or the reason why the key has no effect.
local function meaning(row)
  if row.status == "alias" then return "honoured", "another spelling of `" .. row.words .. "`" end
  if row.status == "later" then return "refused", "not in this version: " .. row.words end
  return row.status, row.words
end

local function cell(text) return (text:gsub("|", "\\|")) end

local function heading(section)
  if section[1] == "" then return "At the top" end
  return section[1] .. (section.of and " of " .. section.of or "")
end

--- Returns all tables as Markdown. Each section has one table.
---@return string
function doc.tables()
  local lines = {}
  for _, section in ipairs(schema.sections) do
    lines[#lines + 1] = "\n### " .. heading(section) .. "\n"
    if section[2] ~= "" then
      wrap(lines, section[2], 120, "")
      lines[#lines + 1] = ""
    end
    lines[#lines + 1] = "| key | value | default | status | effect, or the reason why it has none "
      .. "|\n|---|---|---|---|---|"
    for _, row in ipairs(section[3]) do
      local status, words = meaning(row)
      lines[#lines + 1] = ("| `%s` | %s | %s | %s | %s |"):format(row.path, cell(row.type.text), default_of(row),
        status, cell(words))
    end
  end
  return table.concat(lines, "\n") .. "\n"
end

--- Returns the text of docs/config.md with its tables replaced by the tables that doc.tables() returns.
---@param text string
---@return string
function doc.renew(text)
  local _, first = text:find(doc.BEGIN, 1, true)
  local last = text:find(doc.END, 1, true)
  if not first or not last then error("docs/config.md lacks the lines " .. doc.BEGIN .. " and " .. doc.END, 2) end
  return text:sub(1, first) .. "\n" .. doc.tables() .. "\n" .. text:sub(last)
end

return doc
