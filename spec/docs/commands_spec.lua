-- SPDX-License-Identifier: BSD-3-Clause
-- Commands in README.md, the guides, and the pages of examples and tests: their scripts and make targets exist, and
-- have the options that are given to them. Options that the text names are those of a script.
local lfs = require "lfs"
local paths = require "ps.paths"
local check = require "spec.check_lib"

local PAGES = { "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "spec/README.md", "examples/README.md",
  "examples/benchmark/README.md" }
for name in lfs.dir(paths.root .. "/docs") do
  if name:find "%.md$" and name ~= "api.md" then PAGES[#PAGES + 1] = "docs/" .. name end
end
table.sort(PAGES)

-- Options of other programs that the text names alone.
local FOREIGN = {}
for option in ("--local_rank --local-rank --log_dir --export --mpi --use-env --no-python --gpus"):gmatch "%S+" do
  FOREIGN[option] = true
end

-- The script that a word of a command names, as a path below the root.
local function script_of(word)
  local file = word:find "%.lua$" and word or word .. ".lua"
  for _, folder in ipairs { "", "tools/", "examples/", "examples/benchmark/" } do
    if lfs.attributes(paths.root .. "/" .. folder .. file, "mode") == "file" then return folder .. file end
  end
end

-- Texts that --help of scripts and of the program prints. For scripts without --help, their first comment.
local helps = {}
local function help_of(script)
  if not helps[script] then
    local text = script ~= "" and check.read(paths.root .. "/" .. script) or ""
    local command = ("cd / && OMP_NUM_THREADS=1 timeout 60 '%s' %s --help"):format(paths.exe,
      script ~= "" and ("'%s/%s'"):format(paths.root, script) or "")
    local has_parser = script == "" or text:find("argparse", 1, true) or text:find("command_line", 1, true)
      or text:find("--help", 1, true)
    helps[script] = (has_parser and check.shell(command) or "") .. "\n" .. (text:match "^(.-)\n[^%-]" or "")
  end
  return helps[script]
end

local function has(script, option)
  return (help_of(script) .. " "):find(option:gsub("%p", "%%%0") .. "[^%w_-]") ~= nil
end

-- The words of a shell command; quoted ones without their quotes.
local function words_of(command)
  local words = {}
  for word in command:gsub("#%s.*$", ""):gsub("(['\"])(.-)%1", function(_, text) return (text:gsub("%s", "_")) end)
    :gmatch "%S+" do
    words[#words + 1] = word
  end
  return words
end

-- Problems of one command. Adds the scripts that it names to `seen`.
local function problems_of(command, seen)
  local list, words = {}, words_of(command)
  local at = 1
  while words[at] and words[at]:find "^[%u_]+=" do at = at + 1 end
  local program = words[at] or ""
  if program == "make" then
    for i = at + 1, #words do
      if words[i]:find "^%l[%l-]*$" and not check.read(paths.root .. "/Makefile"):find("\n" .. words[i] .. ":", 1, true)
        and not check.read(paths.root .. "/Makefile"):find("%f[%w-]" .. words[i]:gsub("%p", "%%%0") .. "[^\n]*:") then
        list[#list + 1] = "make " .. words[i]
      end
    end
    return list
  end
  local script
  if program:find "psluajit$" then
    at = at + 1
    while words[at] and words[at]:find "^%-" do
      if not has("", words[at]) then list[#list + 1] = "psluajit " .. words[at] end
      at = at + (words[at] == "--hardware" and 2 or 1)
      if words[at - 1] == "-e" then return list end
    end
    local word = words[at]
    if not word or not word:find "^[%l_/]+[%l%d_/.]*$" then return list end
    if word == "new" or word == "script.lua" or word == "train.lua" or word == "hour.lua" then return list end
    script = script_of(word)
    if not script then return { "psluajit " .. word } end
  elseif program:find "^tools/[%w_]+%.lua$" or program:find "^examples/[%w_/]+%.lua$"
    or program:find "^bench/[%w_]+%.lua$" then
    script = script_of(program)
    if not script then return { program } end
  else return list end
  if seen then seen[script] = true end
  for i = at + 1, #words do
    local option = words[i]:match "^%-%-[%w_-]+"
    if script == "tools/launch.lua" and script_of(words[i]) and words[i]:find "%.lua$" then
      script = script_of(words[i])                         -- the launched script, with its own options
    elseif option and not has(script, option) then list[#list + 1] = script .. " " .. option end
  end
  return list
end

-- Commands of a page: indented lines (a backslash continues one), and code in the text.
local function commands_of(text)
  local list, spans = {}, {}
  text = text:gsub("\n```.-\n```", "\n")
  for line in (text:gsub("\\\n%s*", "")):gmatch "\n    (%S[^\n]*)" do
    for command in (line .. " && "):gmatch "(.-) && " do list[#list + 1] = command end
  end
  for span in text:gmatch "`([^`]+)`" do
    spans[#spans + 1] = span:gsub("%s+", " ")
    list[#list + 1] = spans[#spans]
  end
  return list, spans
end

local function problems_of_page(text, seen)
  local all = {}
  for _, command in ipairs((commands_of(text))) do
    for _, problem in ipairs(problems_of(command, seen)) do all[#all + 1] = problem end
  end
  return all
end

describe("commands of the pages", function()
  local seen = {}

  it("name scripts, options and targets that exist", function()
    local all = {}
    for _, page in ipairs(PAGES) do
      for _, problem in ipairs(problems_of_page(check.read(paths.root .. "/" .. page), seen)) do
        all[#all + 1] = page .. ": " .. problem
      end
    end
    assert.same({}, all)
    local n = 0
    for _ in pairs(seen) do n = n + 1 end
    assert.is_true(n > 40, n)
  end)

  it("that are wrong are found", function()
    assert.same({ "psluajit chatt", "tools/chat.lua --modle", "psluajit --dry-ran", "make nothing",
      "examples/train_gpt2.lua --minute", "tools/launch.lua --nprocs", "tools/generate.lua --begin",
      "bench/none.lua", "tools/gguf.lua --typ" }, problems_of_page([[

    psluajit chatt FOLDER
    psluajit chat.lua FOLDER --modle x          # --no-option
    psluajit --dry-ran --hardware h200 script.lua
    make nothing
    A=1 build/psluajit examples/train_gpt2.lua --data my.txt \
        --minute 10
    psluajit launch --nprocs 4 generate.lua FOLDER --begin "a --text"
Text with `bench/none.lua --model x` and `tools/gguf.lua convert FOLDER --typ q8_0`.
]]))
  end)

  it("and options that stand alone are those of a script, or of a launcher", function()
    local all, every = {}, {}
    for _, folder in ipairs { "tools", "examples", "examples/benchmark", "bench" } do
      for name in lfs.dir(paths.root .. "/" .. folder) do
        if name:find "%.lua$" and not name:find "_lib%.lua$" then every[#every + 1] = folder .. "/" .. name end
      end
    end
    local function known(option)
      if FOREIGN[option] or has("", option) then return true end
      for _, script in ipairs(every) do if seen[script] and has(script, option) then return true end end
      for _, script in ipairs(every) do if has(script, option) then return true end end
    end
    for _, page in ipairs(PAGES) do
      for _, span in ipairs((select(2, commands_of(check.read(paths.root .. "/" .. page))))) do
        local option = span:match "^(%-%-[%w_-]+)"
        if option and not known(option) then all[#all + 1] = page .. ": " .. option end
      end
    end
    assert.same({}, all)
    assert.is_nil(known "--no-such-option")
  end)
end)
