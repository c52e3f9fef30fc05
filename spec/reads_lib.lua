-- SPDX-License-Identifier: BSD-3-Clause
-- Records which file of lua/ps reads each key of a configuration. Sections of configurations become proxies: a read of
-- a key notes the file of the function that reads it.
local check = require "ps.config.check"
local schema = require "ps.config.schema"

local lib = {}

-- Files that read values for their callers.
local FOR_CALLERS = { ["lua/ps/core/copied.lua"] = true }

-- Returns the file of lua/ps that reads a key, or nil if a file outside of lua/ps reads it.
local function reader()
  local level = 3
  while true do
    local info = debug.getinfo(level, "S")
    if not info then return nil end
    local file = info.source:match "lua/ps/.*"
    if file and not FOR_CALLERS[file] then return file end
    level = level + 1
  end
end

--- Starts recording the reads of every configuration that is checked, until `stop` is called.
---@return table<string, table<string, boolean>> reads path -> files; the path of a schedule's parameter is "PATH of
--- SCHEDULE"
---@return fun() stop
function lib.record()
  local reads, values, run, plain_pairs = {}, setmetatable({}, { __mode = "k" }), check.run, pairs
  local proxy

  local function note(node, kind, key)
    local file = reader()
    if not file or not node.row[key] then return end
    local name = node.row[key].path .. (node.of and " of " .. kind or "")
    reads[name] = reads[name] or {}
    reads[name][file] = true
  end

  -- Returns the proxy of a section. `kind` is the type that selects a variant of the section.
  function proxy(section, node, kind)
    if node.variants then
      for name, variant in plain_pairs(node.variants) do
        if name:lower() == tostring(kind):lower() then node, kind = variant, name end
      end
    end
    local made, subs, under = {}, {}, {}
    for _, sub in ipairs(node.subs) do subs[sub.name] = sub.node end
    values[made] = { section = section, node = node, kind = kind }
    return setmetatable(made, { __newindex = section, __index = function(_, key)
      note(node, kind, key)
      local value = section[key]
      if not subs[key] or type(value) ~= "table" or values[value] then return value end
      if not under[value] then under[value] = proxy(value, subs[key], section.type) end
      return under[value]
    end })
  end

  check.run = function(...)
    local cfg, state = run(...)
    return proxy(cfg, schema.root), state
  end
  _G.pairs = function(t)                                    -- luacheck: globals pairs
    local of = values[t]
    if not of then return plain_pairs(t) end
    for key in plain_pairs(of.section) do note(of.node, of.kind, key) end
    return plain_pairs(of.section)
  end
  return reads, function()
    check.run = run
    _G.pairs = plain_pairs
  end
end

--- Converts the recorded reads to text for another process, with a line "FILE PATH" for each.
---@param reads table<string, table<string, boolean>>
---@return string
function lib.text(reads)
  local lines = {}
  for name, files in pairs(reads) do
    for file in pairs(files) do lines[#lines + 1] = file .. " " .. name .. "\n" end
  end
  return table.concat(lines)
end

--- Adds the reads in `text`, which another process recorded.
---@param reads table<string, table<string, boolean>>
---@param text string
function lib.add(reads, text)
  for file, name in text:gmatch "(lua/ps/%S+) ([^\n]+)" do
    reads[name] = reads[name] or {}
    reads[name][file] = true
  end
end

return lib
