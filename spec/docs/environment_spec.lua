-- SPDX-License-Identifier: BSD-3-Clause
-- docs/environment.md has each environment variable that the sources read, and no other. An invalid value of a variable
-- is an error.
local check = require "spec.check_lib"
local paths = require "ps.paths"

-- Returns whether a variable is psluajit's. The page lists other programs' variables in its last paragraph.
local function is_own(name) return name:match "^PS_" ~= nil end

local function named_in_sources()
  local found = {}
  local pattern = '(getenv|read_number|choose_set|environment[.]get|whole|host|number)[( ]+(get, )?"[A-Z][A-Z_]+"'
    .. '|get[(]"PS_[A-Z_]+"'
  local list = assert(io.popen(("cd '%s' && grep -rhoE '%s' src lua --include=*.c --include=*.cc --include=*.cpp "
    .. "--include=*.lua"):format(paths.root, pattern)))
  for line in list:lines() do found[line:match '"(.-)"'] = true end
  list:close()
  return found
end

describe("docs/environment.md", function()
  local page = check.read(paths.root .. "/docs/environment.md")
  local sources = named_in_sources()

  it("has every variable that the sources read", function()
    local missing, n = {}, 0
    for name in pairs(sources) do
      n = n + 1
      local there = page:find(is_own(name) and "\n| `" .. name .. "` |" or "`" .. name .. "`", 1, true)
      local of_launchers = not is_own(name)              -- docs/distributed.md lists these variables
      if not there and not of_launchers then missing[#missing + 1] = name end
    end
    assert.same({}, missing)
    assert.truthy(n >= 20, n)
  end)

  it("has no other", function()
    local others = {}
    for name in page:gmatch "\n| `(PS_[%u_]+)` |" do
      if not sources[name] and name ~= "PS_SIM_ISA" then others[#others + 1] = name end    -- by a variable's name
    end
    assert.same({}, others)
  end)

  it("names the valid values of PS_DISK_THREADS", function()
    local environment = require "ps.core.environment"
    local stdlib = require "posix.stdlib"
    stdlib.setenv("PS_DISK_THREADS", "two")
    check.fails(function() environment.whole("PS_DISK_THREADS", 1) end,
      "PS_DISK_THREADS is 'two'; it must be a whole number of at least 1")
    stdlib.setenv("PS_DISK_THREADS", "2")
    assert.equal(2, environment.whole("PS_DISK_THREADS", 1))
    stdlib.setenv("PS_DISK_THREADS", nil)
    assert.is_nil(environment.whole("PS_DISK_THREADS", 1))
  end)
end)
