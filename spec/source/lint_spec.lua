-- SPDX-License-Identifier: BSD-3-Clause
-- The form of the sources: luacheck, line lengths, plain ASCII, no notes to self, files that say what they are.
local paths = require "ps.paths"

local LINE = 120
local FOLDERS = "src lua models examples tools bench spec cmake"

---@param command string a command, which runs in the tree
---@return string[] lines
local function lines_of(command)
  local lines = {}
  local p = assert(io.popen(("cd '%s' && %s"):format(paths.root, command)))
  for line in p:lines() do lines[#lines + 1] = line end
  p:close()
  return lines
end

-- Returns the sources: C, Lua, CMake, shell. Corpora and golden data are excluded.
local function sources()
  return lines_of("ls CMakeLists.txt Makefile 2>/dev/null; find " .. FOLDERS ..
    " -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cmake'" ..
    " -o -name '*.lua' -o -name '*.def' -o -name 'CMakeLists.txt' -o -name '*.sh' | sort")
end

--- Calls check(line) for every line of every source. It returns a reason or nil.
local function complaints(check)
  local found = {}
  for _, path in ipairs(sources()) do
    local number = 0
    for line in io.lines(paths.root .. "/" .. path) do
      number = number + 1
      local reason = check(line, path)
      if reason then found[#found + 1] = ("%s:%d: %s"):format(path, number, reason) end
    end
  end
  return found
end

describe("the sources", function()
  it("pass luacheck", function()
    if os.execute("command -v luacheck >/dev/null 2>&1") ~= 0 then
      pending("luacheck is not installed (Debian: lua-check)")
      return
    end
    assert.same({}, lines_of("luacheck -qqq --no-color --formatter plain lua models examples tools bench spec src"))
  end)

  it("keep their lines short", function()
    assert.same({}, complaints(function(line, path)
      if path:match("ops%.def$") then return nil end            -- in its format, a row is one line
      if #line > LINE then return ("%d columns, %d are allowed"):format(#line, LINE) end
    end))
  end)

  -- Tables and code can be wider.
  it("keep the prose of their documents short", function()
    local found = {}
    for _, path in ipairs(lines_of "ls *.md spec/README.md docs/*.md") do
      local number, code = 0, false
      for line in io.lines(paths.root .. "/" .. path) do
        number = number + 1
        local fence = line:find "^%s*```" ~= nil
        code = code ~= fence
        if #line > LINE and not code and not line:find "^%s*|" and not line:find "^    " then
          found[#found + 1] = ("%s:%d: %d columns, %d are allowed"):format(path, number, #line, LINE)
        end
      end
    end
    assert.same({}, found)
  end)

  it("are plain ASCII without tabs, trailing blanks or carriage returns", function()
    assert.same({}, complaints(function(line, path)
      if line:find("[\128-\255]") then return "a byte that is not ASCII" end
      if line:find("[ \t\r]$") then return "trailing blank" end
      if line:find("\t") and not path:match("Makefile$") then return "a tab" end
    end))
  end)

  it("hold no notes to self", function()
    local words = { "TO" .. "DO", "FIX" .. "ME", "XX" .. "X", "HA" .. "CK" }
    assert.same({}, complaints(function(line)
      for _, word in ipairs(words) do
        if line:find("%f[%w]" .. word .. "%f[%W]") then return word end
      end
    end))
  end)

  it("use ps.array for arrays of any length, which checks the length", function()
    assert.same({}, complaints(function(line, path)
      if path:match("^lua/") and path ~= "lua/ps/core/array.lua" and line:find("[?]", 1, true) then
        return "an array whose length nobody checks; see lua/ps/core/array.lua"
      end
    end))
  end)

  it("reach the members of a module through lua/ps/nn/registry.lua", function()
    assert.same({}, complaints(function(line, path)
      if not path:match "%.lua$" or path:match "^lua/ps/nn/" then return end
      for _, field in ipairs { "_names", "_kind", "_fields" } do
        if line:find("[%w_%])]%." .. field .. "%f[^%w_]") then
          return field .. ": registry.members, walk, tensors, kind and put of ps.nn.registry do this"
        end
      end
    end))
  end)

  -- Programs read an error's fields (ps.Error), since its text is for people and can change. Shortening the text is
  -- allowed: to its first line, or by the prefix of io.open. caller.lua handles the positions that Lua itself adds, and
  -- habits.lua the errors of Lua, which have no fields.
  local OF_LUA = { ["lua/ps/core/caller.lua"] = true, ["lua/ps/prompt/habits.lua"] = true }
  it("do not parse the texts of errors", function()
    local names = { "err", "problem", "why", "message", "msg", "said" }
    local calls = { "find", "match", "gmatch", "gsub" }
    local cuts = { ':match("^[^\\n]*")', ':gsub("^.*: ", "")' }
    local function reads(line)
      for _, cut in ipairs(cuts) do
        local at = line:find(cut, 1, true)
        if at then line = line:sub(1, at - 1) .. line:sub(at + #cut) end
      end
      for _, name in ipairs(names) do
        for _, call in ipairs(calls) do
          if line:find("%f[%w_]" .. name .. "%)?:" .. call .. "%(") or line:find("%.msg%)?:" .. call .. "%(")
            or line:find("string%." .. call .. "%(t?o?s?t?r?i?n?g?%(?" .. name .. "%f[^%w_]") then
            return true
          end
        end
      end
    end
    assert.truthy(reads 'if tostring(err):find("no driver", 1, true) then')
    assert.truthy(reads 'for n in problem.msg:gmatch("%d+") do')
    assert.same({}, complaints(function(line, path)
      if not path:match("%.lua$") or path:match("^spec/") or OF_LUA[path] then return nil end
      if reads(line) then return "a program that reads an error's text; give the error a field" end
    end))
  end)

  -- A level guesses the number of calls between an error and the script, and caller.error determines it. The position
  -- of a ps.strict global is where it is used, also in psluajit's own files.
  it("count no calls to find the origin of an error", function()
    local counts, exempt = {}, { ["lua/ps/core/strict.lua"] = true, ["lua/ps/engine/init.lua"] = true,
      ["lua/ps/engine/step/trained.lua"] = true,
      ["lua/ps/config/doc.lua"] = true }
    for _, path in ipairs(sources()) do
      local f = path:match("^lua/ps/.*%.lua$") and not exempt[path] and assert(io.open(paths.root .. "/" .. path))
      for call in (f and "\n" .. f:read "*a" or ""):gmatch("[^%w_.]error(%b())") do
        if call:find(", [2-9]%)$") then counts[#counts + 1] = path .. ": error" .. call:gsub("%s+", " ") end
      end
      if f then f:close() end
    end
    assert.same({}, counts)
  end)

  it("begin with their licence", function()
    local without = {}
    for _, path in ipairs(sources()) do
      local f = assert(io.open(paths.root .. "/" .. path))
      local head = f:read(200) or ""
      f:close()
      if not head:find("SPDX-License-Identifier: BSD-3-Clause", 1, true) then without[#without + 1] = path end
    end
    assert.same({}, without)
  end)
end)
