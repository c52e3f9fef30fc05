-- SPDX-License-Identifier: BSD-3-Clause
-- Writes a profile as a single HTML page: page.html with the profile's data inserted. The page loads no other files.
local json = require("cjson").new()
local paths = require "ps.paths"
local write_file = require "ps.core.write_file"

local page = {}

-- Returns the JSON of a list. each(value) returns the JSON of one value. cjson is not used, because it would write an
-- empty list as an object.
local function list(values, each)
  local parts = {}
  for i, value in ipairs(values) do parts[i] = each(value) end
  return "[" .. table.concat(parts, ",") .. "]"
end

local function number(value) return ("%.14g"):format(value) end

-- Returns the JSON of an object. The arguments are a name, the JSON of its value, the next name, and so on.
local function object(...)
  local parts, given = {}, { ... }
  for i = 1, #given, 2 do parts[#parts + 1] = ('"%s":%s'):format(given[i], given[i + 1]) end
  return "{" .. table.concat(parts, ",") .. "}"
end

local function data_of(self, tier)
  local shown = 0
  for i, given in ipairs(self.tiers) do if given.name == tier then shown = i - 1 end end
  local title = ("%s%s"):format(self.path:match "[^/]*$",
    self.ranks > 1 and (", rank %d of %d"):format(self.rank, self.ranks) or "")
  return object("title", json.encode(title), "begin", number(self.begin), "finish", number(self.finish),
    "tier", number(shown),
    "tiers", list(self.tiers, function(t)
      return object("name", json.encode(t.name), "budget", number(t.budget), "times", list(t.times, number),
        "held", list(t.held, number), "other", list(t.other, number))
    end),
    "steps", list(self.steps, function(s)
      return object("step", number(s.step), "begin", number(s.begin), "finish", number(s.finish))
    end),
    "bands", list(self.bands, function(b)
      return object("kind", json.encode(b.kind), "begin", number(b.begin), "finish", number(b.finish))
    end),
    "chunks", list(self.chunks, function(c)
      return object("id", number(c.id), "kind", json.encode(c.kind), "index", number(c.index),
        "nbytes", number(c.nbytes), "tensors", list(c.tensors, json.encode), "times", list(c.times, number),
        "on", list(c.on, json.encode))
    end))
end

--- Writes the page to the file `path`.
---@param self ps.Profile
---@param path string
---@param tier? string name of the tier that the page shows first (default: the first tier)
function page.write(self, path, tier)
  local f, why = io.open(paths.root .. "/lua/ps/profile/page.html", "rb")
  if not f then error("cannot read the page: " .. why, 0) end
  local before, after = f:read("*a"):match "^(.*)@DATA@(.*)$"
  f:close()
  -- "<" is escaped, because a name that contains "</script>" would end the script of the page.
  local data = data_of(self, tier):gsub("<", "\\u003c")
  local done, problem = write_file(path, before .. data .. after)
  if not done then error("cannot write " .. problem, 0) end
end

return page
