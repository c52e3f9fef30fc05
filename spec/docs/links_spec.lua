-- SPDX-License-Identifier: BSD-3-Clause
-- Links of README.md and the guides lead to files and headings that exist, README.md links to each path that it names,
-- and its commands and listings are those of the program.
local lfs = require "lfs"
local paths = require "ps.paths"
local check = require "spec.check_lib"

local README = check.read(paths.root .. "/README.md")

local function pages_of(folder)
  local list = {}
  for name in lfs.dir(paths.root .. "/" .. folder) do
    if name:find "%.md$" then list[#list + 1] = folder == "." and name or folder .. "/" .. name end
  end
  table.sort(list)
  return list
end

-- Returns a page's text without its listings.
local function prose(text)
  local lines, inside = {}, false
  for line in (text .. "\n"):gmatch "([^\n]*)\n" do
    if line:find "^%s*```" then inside = not inside
    elseif not inside and not line:find "^    " then lines[#lines + 1] = line end
  end
  return table.concat(lines, "\n")
end

-- Returns the anchors of a page's headings, in GitHub's form.
local function anchors_of(text)
  local anchors = {}
  for title in ("\n" .. prose(text)):gmatch "\n#+ ([^\n]+)" do
    local anchor = title:gsub("%[([^%]]*)%]%([^%)]*%)", "%1"):lower():gsub("[^%w%s_-]", ""):gsub(" ", "-")
    anchors[anchor] = true
  end
  for anchor in text:gmatch '<a name="([^"]*)">' do anchors[anchor] = true end
  return anchors
end

-- Returns a path relative to a page's folder, without "..".
local function resolved(page, target)
  local path = (page:match "^(.*/)" or "") .. target
  repeat
    local n
    path, n = path:gsub("[^/]+/%.%./", "", 1)
  until n == 0
  return path
end

-- Returns a page's links that lead nowhere.
local function broken(page, text)
  local list, n = {}, 0
  for target in prose(text):gmatch "%]%(([^%)%s]+)%)" do
    if not target:find "^%a+://" then
      n = n + 1
      local file, anchor = target:match "^([^#]*)#?(.*)$"
      local path = file == "" and page or resolved(page, file)
      local full = paths.root .. "/" .. path
      if not lfs.attributes(full, "mode") then list[#list + 1] = page .. ": " .. target
      elseif anchor ~= "" and path:find "%.md$" and not anchors_of(check.read(full))[anchor] then
        list[#list + 1] = page .. ": " .. target .. " (no such heading)"
      end
    end
  end
  return list, n
end

describe("links", function()
  it("of README.md and all guides resolve", function()
    local all, count = {}, 0
    for _, folder in ipairs { ".", "docs", "spec", "examples" } do
      for _, page in ipairs(pages_of(folder)) do
        local list, n = broken(page, check.read(paths.root .. "/" .. page))
        count = count + n
        for _, link in ipairs(list) do all[#all + 1] = link end
      end
    end
    assert.same({}, all)
    assert.is_true(count > 120, count)
  end)

  it("that are wrong are found", function()
    local text = "[a](docs/none.md) [b](#nowhere) [c](docs/zero.md#no-such) [d](docs/zero.md)\n"
      .. "```\n[e](in/a/listing)\n```\n"
    assert.same({ "README.md: docs/none.md", "README.md: #nowhere (no such heading)",
      "README.md: docs/zero.md#no-such (no such heading)" }, (broken("README.md", text)))
    assert.same({}, (broken("docs/zero.md", "[a](../README.md#four-commands) [b](memory.md)")))
  end)

  it("exist for every path that README.md names", function()
    local bare = prose(README):gsub("%[[^%]]*%]%([^%)]*%)", "")
    local missing = {}
    for word in bare:gmatch "`([%w_%-%./]+)`" do
      local is_path = word:find "[/%.]" and not word:find "^build/" and not word:find "^out/"  -- made by commands
      if is_path and lfs.attributes(paths.root .. "/" .. word, "mode") then missing[#missing + 1] = word end
    end
    for word in bare:gmatch "[%w_%-/]+%.md" do missing[#missing + 1] = word end
    assert.same({}, missing)
  end)

  it("of README.md lead to every guide", function()
    for _, page in ipairs(pages_of "docs") do assert.matches("(" .. page, README, 1, true) end
  end)
end)

describe("README.md", function()
  it("has at most 220 lines", function() assert.is_true(select(2, README:gsub("\n", "")) <= 220) end)

  it("has listings that are Lua", function()
    local n = 0
    for listing in README:gmatch "\n```lua\n(.-)\n```" do
      n = n + 1
      assert(loadstring("local ps, gpt2, loader, folder = ...\n" .. listing))
    end
    assert.is_true(n >= 5)
  end)

  it("has a loop in chunks, and an inspection, that run", function()
    local script = { [[
      local ps, gpt2 = require "ps", require "models.gpt2"
      local function batches()
        local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
        return ipairs { { x, x }, { x, x } }
      end
      local loader = {}
      function loader:epoch()
        local each, list, at = batches()
        return function()
          local _, pair
          at, pair = each(list, at)
          if pair then return pair[1], pair[2] end
        end
      end
    ]] }
    for _, word in ipairs { "memory = { host", "profiler.start" } do
      local listing
      for text in README:gmatch "\n```lua\n(.-)\n```" do listing = text:find(word, 1, true) and text or listing end
      script[#script + 1] = assert(listing, word)
    end
    local text = table.concat(script, "\n")
    for from, to in pairs { ["gpt2-xl"] = "tiny", ['"6GiB"'] = '"1MiB"', ['"32GiB"'] = '"16MiB"',
      ["/var/tmp"] = os.getenv "TMPDIR" or "/tmp", ["recompute = true"] = "dropout = 0",
      ['"profile.json"'] = "os.tmpname()" } do
      local n
      text, n = text:gsub(from:gsub("%p", "%%%0"), (to:gsub("%%", "%%%%")))
      assert(n > 0, from)
    end
    local out = check.run("OMP_NUM_THREADS=1", text)
    assert.matches("plan: %d+ parameters, .- of state", out)
    assert.matches("predicted peak", out)
  end)

  it("has commands whose scripts and options exist", function()
    local n = 0
    for line in README:gmatch "\n    (%S[^\n]*)" do
      for command in (line .. " && "):gmatch "(.-) && " do
        local target = command:match "^make (%l+)$"
        local script = command:match "psluajit ([%w_]+)[%s%.]"
        if target then
          n = n + 1
          assert.matches("\n" .. target .. ":", check.read(paths.root .. "/Makefile"), 1, true)
        elseif script and script ~= "train" then
          n = n + 1
          local p = io.popen(("'%s' %s --help 2>&1"):format(paths.exe, script))
          local help = p:read "*a"
          p:close()
          for option in command:gmatch "%s(%-%-[%w-]+)" do assert.matches(option, help, 1, true) end
          assert.matches("[Uu]sage:", help)
        end
      end
    end
    assert.is_true(n >= 5, n)
  end)
end)
