-- SPDX-License-Identifier: BSD-3-Clause
-- docs/errors.md: the first listing of each entry raises the error of its heading, and every later listing runs.
local check = require "spec.check_lib"
local paths = require "ps.paths"
local ps = require "ps"
local ranks_lib = require "spec.ranks_lib"

local folder

setup(function() folder = ranks_lib.folder() end)
teardown(function() ranks_lib.remove(folder) end)
after_each(function()
  local engine = ps.engine()
  if engine then engine.model:close() end
end)

local text = check.read(paths.root .. "/docs/errors.md")
local prelude = text:match "\n```lua\n(.-)```"

-- Runs a listing after the lines with which all listings begin. TMPDIR is a folder of this spec.
local function run(listing)
  local tmpdir = os.getenv
  local fn = assert(loadstring(prelude .. listing))
  setfenv(fn, setmetatable({ print = function() end, os = setmetatable({
    getenv = function(name) return name == "TMPDIR" and folder or tmpdir(name) end,
    tmpname = function() return folder .. "/" .. tostring({}):match "0x(%x+)" end,
  }, { __index = os }) }, { __index = _G }))
  return pcall(fn)
end

-- Returns the title and the text of each entry "### `TITLE`".
local function entries()
  local list, from = {}, 1
  while true do
    local _, last, title = text:find("\n### `([^\n]*)`\n", from)
    if not last then return list end
    local finish = text:find("\n##", last, true) or #text
    list[#list + 1] = { title = title, body = text:sub(last, finish) }
    from = finish
  end
end

local list = entries()
for _, entry in ipairs(list) do
  local title, body = entry.title, entry.body
  describe("the error '" .. title .. "'", function()
    local listings = {}
    for listing in body:gmatch "\n```lua\n(.-)```" do listings[#listings + 1] = listing end

    it("is raised by its listing", function()
      local ok, problem = run(assert(listings[1], "the entry has no listing"))
      assert.is_false(ok)
      assert(tostring(problem):find(title, 1, true), tostring(problem))
    end)

    for i = 2, #listings do
      it("is not raised by the remedy", function() assert(run(listings[i])) end)
    end

    it("has a cause and a remedy in words", function()
      local prose = body:gsub("```.-```", "")
      assert(select(2, prose:gsub("%.%s", "")) >= 1, prose)
      assert(#prose:gsub("%s+", " ") > 40, prose)
    end)
  end)
end

describe("docs/errors.md", function()
  it("has the 60 likeliest errors", function()
    assert(#list >= 60, #list)
    assert.equal(select(2, text:gsub("\n### ", "")), #list)
  end)
end)
