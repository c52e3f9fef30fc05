-- SPDX-License-Identifier: BSD-3-Clause
-- Help for users at the shell: lists of tools and examples, names without an ending, the nearest name of a
-- misspelt one, new projects, and the version.
local lfs = require "lfs"
local paths = require "ps.paths"
local check = require "spec.check_lib"

local folder

-- Runs a shell command in the scratch folder, with `psluajit` in its path. Returns the output of both streams and the
-- exit code.
local function sh(command)
  return check.shell(("cd '%s' && PATH='%s':\"$PATH\" OMP_NUM_THREADS=1 timeout 300 sh -c '%s'"):format(folder,
    paths.exe:match "^(.*)/", (command:gsub("'", "'\\''"))))
end

-- Runs a command that must succeed.
local function good(command)
  local text, code = sh(command)
  assert.equal(0, code, command .. "\n" .. text)
  return text
end

setup(function()
  folder = os.tmpname()
  os.remove(folder)
  assert(lfs.mkdir(folder))
end)
teardown(function() os.execute("rm -r " .. folder) end)

-- Returns the Lua files in a folder that a user can run.
local function scripts_in(name)
  local list = {}
  for file in lfs.dir(paths.root .. "/" .. name) do
    local script = file:match "^([%w_]+)%.lua$"
    if script then list[#list + 1] = script end
  end
  return list
end

describe("psluajit's lists", function()
  -- Files that work on psluajit's source, and files that other files load.
  local HIDDEN = {
    tools = "api_doc check_layers config_doc faults path_doc pictures pytorch_doc site tools examples man",
    examples = "layout digits",
  }
  for _, of in ipairs { "tools", "examples" } do
    it("have a line for each of the " .. of, function()
      local text, hidden = good("psluajit " .. of), {}
      for name in HIDDEN[of]:gmatch "%S+" do hidden[name] = true end
      for _, name in ipairs(scripts_in(of)) do
        local about = ("\n" .. text):match("\n" .. name .. "%s%s+([^\n]+)%.\n")
        assert(hidden[name] and not about or about and #about > 15, of .. ": " .. name .. "\n" .. text)
      end
      -- Whole sentences, also if the description has several literals or the comment several lines.
      assert.is_nil(text:find " %a+ and%.\n" or text:find "for two%.\n" or text:find "the seed%.\n", text)
    end)

    it("name " .. of .. " that run without their ending", function()
      for line in good("psluajit " .. of):gmatch "[^\n]+" do
        local name = line:match "^([%w_]+)%s%s"
        if name and name ~= "train_char" then
          assert.matches("[Uu]sage: ", good("psluajit " .. name .. " --help"), 1, name)
        end
      end
    end)
  end

  it("are described by their parser, however it is written", function()
    assert.matches("\nmerge_adapter +Merges an adapter into its base model%.\n", (good "psluajit tools"))
    assert.matches("\ndpo +Trains a chat model on preferences%.\n", (good "psluajit examples"))
  end)

  it("come after the user's own files", function()
    local file = assert(io.open(folder .. "/chat", "w"))
    file:write "print 'my chat'\n"
    file:close()
    assert.equal("my chat\n", good "psluajit chat")
    file = assert(io.open(folder .. "/data", "w"))
    file:write "some data\n"
    file:close()
    local text, code = sh "psluajit data --help"
    assert.equal(1, code)
    assert.matches("data:1: .-\n  'data' is a file in the current folder; psluajit's own script is data%.lua\n", text)
    assert.matches("^Usage: psluajit data ", good "psluajit data.lua --help")
    os.remove(folder .. "/data")
    os.remove(folder .. "/chat")
    assert(lfs.mkdir(folder .. "/tools"))                  -- a folder with this name is not a script
    assert.matches("launch", good "psluajit tools")
    lfs.rmdir(folder .. "/tools")
  end)
end)

describe("a misspelt script", function()
  it("is an error that names the nearest one", function()
    for name, near in pairs { ["trian_gpt2.lua"] = "train_gpt2.lua", chatt = "chat", lanch = "launch",
      ["finetune-bert.lua"] = "finetune_bert.lua", tols = "tools", exampels = "examples", help = "--help",
      version = "--version" } do
      local text, code = sh("psluajit " .. name)
      assert.equal(1, code)
      assert.matches(("cannot open %s: No such file or directory"):format(name), text, 1, true)
      assert.matches(("\n  did you mean %s?\n"):format(near), text, 1, true)
    end
    for name, near in pairs { ["models.gtp2"] = "models.gpt2", ["ps.nnn"] = "ps.nn", pss = "ps" } do
      local text = sh(("psluajit -e 'require \"%s\"'"):format(name))
      assert.matches(("module '%s' not found:"):format(name), text, 1, true)
      assert.matches(("\n\tdid you mean '%s'?\n"):format(near), text, 1, true)
    end
    assert.is_nil((sh "psluajit -e 'require \"models.nothing_like_it\"'"):find("did you mean", 1, true))
    assert.is_nil((sh "psluajit nofile.lua"):find("did you mean", 1, true))
    local text = sh "psluajit nothing_like_it.lua"
    assert.is_nil(text:find("did you mean", 1, true))
    assert.matches("\n  psluajit examples and psluajit tools list psluajit's scripts\n", text, 1, true)
  end)

  it("that is a word of several names, or near such a word, is an error that names them", function()
    for name, meant in pairs { train = "train_char, train_chunked or train_gpt2", fine = "finetune or finetune_bert",
      ["tarin.lua"] = "train_char.lua, train_chunked.lua or train_gpt2.lua", gpt2 = "train_gpt2" } do
      assert.matches("\n  did you mean " .. meant .. "?\n", (sh("psluajit " .. name)), 1, true)
    end
  end)

  it("is the same error of a dry run, which finds psluajit's own scripts, too", function()
    local text, code = sh "psluajit --dry-run trian_gpt2.lua"
    assert.equal(1, code)
    assert.matches("^plan: cannot open trian_gpt2.lua: No such file or directory\n", text)
    assert.matches("\n  did you mean train_gpt2.lua?\n", text, 1, true)
    text, code = sh "psluajit --dry-run train_char.lua --data nosuch.txt"
    assert.equal(1, code)
    assert.matches("nosuch.txt: No such file or directory", text, 1, true)
    assert.is_nil(text:find("cannot open train_char", 1, true))
  end)

  it("may be the user's, also in another folder", function()
    assert(lfs.mkdir(folder .. "/mine"))
    assert(io.open(folder .. "/mine/experiment.lua", "w")):close()
    assert.matches("did you mean mine/experiment.lua?", sh "psluajit mine/experimnt.lua", 1, true)
    os.execute("rm -r " .. folder .. "/mine")
  end)
end)

describe("psluajit new", function()
  for kind in lfs.dir(paths.root .. "/templates") do
    if kind:match "^%w" then
      it(kind .. " writes a project whose commands run", function()
        local text = good(("psluajit new %s my_%s"):format(kind, kind))
        local n, readme = 0, assert(io.open(("%s/my_%s/README.md"):format(folder, kind))):read "*a"
        for command in readme:gmatch "\n    (psluajit[^\n]*)" do
          n = n + 1
          assert.matches("\n    " .. command .. "\n", text, 1, true)
          good(("cd my_%s && %s"):format(kind, command))
        end
        assert.is_true(n > 0)
        for file in lfs.dir(paths.root .. "/templates/" .. kind) do
          if file:match "^%w" and file ~= "README.md" then assert.matches("`" .. file .. "`", readme, 1, true) end
        end
      end)
    end
  end

  it("writes scripts that end with one line if their input is missing or too short", function()
    for kind, file in pairs { text = "data.txt", ranks = "data.txt", classifier = "data.tsv" } do
      good(("psluajit new %s poor_%s && rm poor_%s/%s"):format(kind, kind, kind, file))
      local at = ("cd poor_%s && psluajit "):format(kind)
      local text, code = sh(at .. "train.lua")
      assert.equal(1, code)
      assert.equal(("train.lua: cannot open %s: No such file or directory\n"):format(file), text)
      check.write(("%s/poor_%s/%s"):format(folder, kind, file), kind == "classifier" and "a\tb\n" or "a\n")
      text, code = sh(at .. "train.lua")
      assert.equal(1, code)
      assert.matches("^train%.lua: [^\n]*needs? [^\n]*\n$", text:gsub("needed", "needs "))
    end
    local rows = { "label\ttext" }
    for i = 1, 12 do rows[#rows + 1] = (i % 2 == 0 and "good" or "bad") .. "\ttext " .. i end
    check.write(folder .. "/poor_classifier/data.tsv", table.concat(rows, "\n") .. "\n")
    assert.equal("train.lua: data.tsv: the class 'label' has only one text. A line is a class, a tab and a text, and "
      .. "there is no header line.\n", (sh "cd poor_classifier && psluajit train.lua"))
    for line, want in pairs { ["cd poor_text && psluajit sample.lua"] =
      "sample.lua: there is no model.safetensors: run psluajit train.lua first\n",
      ["cd poor_classifier && psluajit classify.lua x"] =
      "classify.lua: there is no classes.txt: run psluajit train.lua first\n",
      ["cd poor_classifier && psluajit classify.lua"] = "classify.lua: give a text: psluajit classify.lua TEXT\n",
      ["psluajit train_char.lua --data none.txt"] = "train_char.lua: cannot open none.txt: No such file or directory\n",
      ["psluajit train_char.lua --data poor_text/data.txt"] =
      "train_char.lua: too few tokens for one batch: 12 x 64 needs 832, 1 are there; use a smaller batch or seq, or "
        .. "more data\n" } do
      local text, code = sh(line)
      assert.equal(1, code)
      assert.equal(want, text)
    end
  end)

  it("overwrites nothing", function()
    assert(lfs.mkdir(folder .. "/full"))
    assert(io.open(folder .. "/full/x", "w")):close()
    local text, code = sh "psluajit new text full"
    assert.equal(1, code)
    assert.equal("new: the folder full is not empty; name another one\n", text)
    text, code = sh "psluajit new text full/x"
    assert.equal(1, code)
    assert.equal("new: full/x is a file; name another folder\n", text)
    text, code = sh "psluajit new text none/there"
    assert.equal(1, code)
    assert.equal("new: cannot make the folder none/there: No such file or directory\n", text)
  end)
end)

describe("the version", function()
  it("names release, commit, compiler and libraries", function()
    local text = good "psluajit --version"
    assert.matches("^psluajit %d+%.%d+%.%d+ %-%- LuaJIT 2%.1[^\n]*\ncommit [^\n]+, compiled by %a+ %d[^\n]*\n"
      .. "libraries: [^\n]*libsodium %d[^\n]*oneDNN %d+%.%d+%.%d+[^\n]*\n$", text)
    assert.equal(text:match "^[^\n]*\n", good "psluajit -v")
  end)
end)

describe("psluajit alone", function()
  it("greets at a terminal with three commands to try, which work, and prints nothing elsewhere", function()
    local terminal = require("spec.terminal_lib").start {}
    terminal:expect "Three things to try:\n"
    local statement, help = terminal:expect("psluajit new text DIR"):match "^  (ps%..-)  +%l[^\n]*\n  (help .-)  +%l"
    terminal:expect "> "
    terminal:type(statement .. "\n")
    terminal:expect "tensor [2, 3] fp32"
    terminal:type(help .. "\n")
    terminal:expect "gelu"
    terminal:type "exit\n"
    terminal:finish()
    assert.equal(0, terminal.status)
    assert.equal("", good "psluajit </dev/null")
  end)
end)
