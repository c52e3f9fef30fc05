-- SPDX-License-Identifier: BSD-3-Clause
-- Numbers on the command lines of examples, tools and benches: one check for all of them, and its errors.
local lfs = require "lfs"
local check = require "spec.check_lib"
local paths = require "ps.paths"
local command_line = require "ps.core.command_line"
local lib = require "spec.check_lib"

local function parse(option, text)
  local parser = require "argparse" "p"
  option(parser:option("--n", "A number."))
  return parser:pparse { "--n", text }
end

describe("a number of a command line", function()
  local function whole(least, most) return function(option) return command_line.whole(option, least, most) end end
  local function number(least, most) return function(option) return command_line.number(option, least, most) end end

  it("is read in decimal", function()
    for text, want in pairs { ["480"] = 480, ["5e3"] = 5000, ["1.5e1"] = 15, ["2."] = 2,
      ["9007199254740992"] = 2 ^ 53 } do
      assert.same({ true, { n = want } }, { parse(whole(0), text) })
    end
    for text, want in pairs { ["0"] = 0, ["1e-3"] = 0.001, ["2.5"] = 2.5 } do
      assert.same({ true, { n = want } }, { parse(number(0), text) })
    end
    assert.same({ true, { n = 1 } }, { parse(number(0, 1), "1") })
  end)

  it("that is invalid or out of range is refused with the option's name and its valid values", function()
    for _, text in ipairs { "2.5", "0", "1e308", "1e300", "nan", "inf", "0x10", "abc", "", " 5", "1e",
      "9007199254740994" } do
      local ok, problem = parse(whole(1), text)
      assert(not ok and problem:find(("--n %s: it takes a whole number from 1 to 2^53"):format(text), 1, true), problem)
    end
    local _, problem = parse(whole(1, 4096), "4097")
    assert(problem:find("from 1 to 4096", 1, true), problem)
    for _, text in ipairs { "nan", "inf", "1e999", "1,5", "x" } do
      local ok, said = parse(number(0), text)
      assert(not ok and said:find("--n " .. text .. ": it takes a number from 0 on", 1, true), said)
    end
    assert.is_false((parse(number(0, 1), "1.5")))
  end)
end)

describe("a type of weights", function()
  it("is a type of floating-point numbers or auto", function()
    for _, name in ipairs { "auto", "fp32", "bf16", "float16", "fp64" } do
      assert.same({ true, { n = name } }, { parse(command_line.dtype, name) })
    end
    for _, name in ipairs { "int32", "uint8", "bool", "bf17", "" } do
      local ok, problem = parse(command_line.dtype, name)
      assert.is_false(ok)
      assert.matches(("--n %s: weights are fp32, bf16, fp16 or fp64, or auto"):format(name), problem, 1, true)
    end
  end)
end)

describe("a command line", function()
  local function parser()
    local made = require "argparse" "p"
    command_line.number(made:option("--lr", "A rate."), -10)
    command_line.whole(made:option("--n -n", "A count."), -10)
    made:option("--text", "A text.")
    made:flag("--force", "A flag.")
    made:argument("rest", "Words."):args "*"
    return made
  end

  it("takes a negative number after an option for its value", function()
    for _, words in ipairs { { "--lr", "-1" }, { "--lr", "-0.5e1" }, { "--lr=-1" } } do
      assert.is_true(command_line.parse(parser(), words).lr < 0)
    end
    assert.same({ lr = -1, n = -2, text = "-3", rest = { "x" } },
      command_line.parse(parser(), { "--lr", "-1", "--n", "-2", "--text", "-3", "x" }))
    local words = { "--force", "--", "--lr", "-1" }
    assert.same({ force = true, rest = { "--lr", "-1" } }, command_line.parse(parser(), words))
    assert.same({ force = true, lr = 1, rest = {} }, command_line.parse(parser(), { "--lr", "1", "--force" }))
  end)

  it("may have a negative number after an option of a command", function()
    local made = require "argparse" "p"
    command_line.number(made:command "go":option("--lr", "A rate."), -10)
    assert.same({ go = true, lr = -1 }, command_line.parse(made, { "go", "--lr", "-1" }))
  end)

  it("stays as it is in the global arg", function()
    local before = _G.arg
    _G.arg = { [0] = "p", "--lr", "-1" }
    assert.same({ lr = -1, rest = {} }, command_line.parse(parser()))
    assert.same({ [0] = "p", "--lr", "-1" }, _G.arg)
    _G.arg = before
  end)
end)

-- Returns the output and the exit code of a program for a command line.
local function says(line)
  return check.shell(("cd '%s' && timeout 300 '%s' %s"):format(paths.root, paths.exe, line))
end

describe("programs", function()
  local CASES = {
    ["examples/train_gpt2.lua --data no --out no"] = { "--accumulate 2.5", "--accumulate 0", "--steps 1e308",
      "--steps 0", "--seed 1e300", "--batch 1.5", "--seq 0", "--lr nan", "--dropout 2", "--vocab 3000000000" },
    ["examples/train_chunked.lua --data no --out no"] = { "--steps 2.5", "--save 0", "--seed 1e300", "--seq nan" },
    ["examples/finetune_bert.lua --data no --out no"] = { "--lr nan", "--epochs 0", "--batch 1.5", "--seed 0.5" },
    ["examples/train_char.lua --data no"] = { "--iters 1e308", "--seed 0.5" },
    ["tools/merge.lua --pattern=a-*.pt"] = { "--num 0", "--num -3", "--num 1.5", "--num 1e7" },
    ["bench/train.lua"] = { "--steps 0" },
  }
  for program, lines in pairs(CASES) do
    it("refuse invalid counts before they begin: " .. program:match("^%S+"), function()
      for _, line in ipairs(lines) do
        local text, code = says(program .. " " .. line)
        assert(code ~= 0 and text:find(line .. ": it takes a ", 1, true), text)
      end
      assert.is_nil(lfs.attributes(paths.root .. "/no"))
    end)
  end

  it("refuse at the start to write where they cannot", function()
    local place = os.tmpname()                             -- a plain file
    for line, want in pairs {
      ["examples/finetune_bert.lua --out FILE"] = "FILE is a file, not a folder; name another folder with --out",
      ["examples/finetune_bert.lua --out FILE/a/b"] = "the folder FILE/a/b cannot be made: FILE is a file",
      ["examples/dpo.lua --model no --data no --out FILE"] = "FILE is a file, not a folder",
      ["examples/dpo.lua --model no --data no --out no --cache FILE/x.pt"] = "--cache: the file FILE/x.pt cannot be "
        .. "written: FILE is a file, not a folder",
      ["examples/train_gpt2.lua --out FILE"] = "FILE is a file, not a folder",
      ["examples/train_chunked.lua --data README.md --out FILE"] = "FILE is a file, not a folder",
      ["examples/bmtrain.lua --save FILE/x.pt"] = "--save: the file FILE/x.pt cannot be written",
      ["examples/bmtrain.lua --save FILE.txt"] = "--save FILE.txt: its name must end in .pt or .pth or",
      ["examples/vit.lua --save FILE"] = "--save: FILE is a file, not a folder",
      ["examples/vit.lua --picture FILE.svg"] = "--picture FILE.svg: its name must end in .pgm",
      ["examples/gpt.lua --picture /nowhere/x.pgm"] = "--picture: the file /nowhere/x.pgm cannot be written: there is "
        .. "no folder /nowhere",
      ["examples/vit.lua --trace spec"] = "--trace spec: its name must end in .pt",
      ["tools/evaluate.lua no --data no --samples spec"] = "--samples: spec is a folder, not a file",
      ["tools/gguf.lua convert no --out FILE"] = "--out: FILE is a file, not a folder",
    } do
      local text, code = says((line:gsub("FILE", place)))
      assert(code == 1 and text:find((want:gsub("FILE", place)), 1, true), line .. ": " .. text)
      assert.is_nil(text:find("traceback", 1, true), text)
    end
    assert.equal(0, lfs.attributes(place, "size"))
    os.remove(place)
  end)

  it("refuse at the start to write to a full disk", function()
    local statvfs, writable = require "posix.sys.statvfs", require "ps.core.writable"
    local real = statvfs.statvfs
    statvfs.statvfs = function() return { f_bavail = 3, f_frsize = 1024 } end
    local ok, problems = pcall(function() return { writable.folder "/tmp/new/folder", writable.file "/tmp/x.pt" } end)
    statvfs.statvfs = real
    assert.is_true(ok)
    assert.same({ "the folder /tmp/new/folder cannot be made: /tmp: its disk is full (3.0 KiB free)",
      "the file /tmp/x.pt cannot be written: its disk is full (3.0 KiB free)" }, problems)
  end)

  it("print errors with their own flags, and Ctrl-C without the line at which it came", function()
    local script = os.tmpname()
    check.write(script, [[
      local line = require "ps.core.command_line"
      local parser = require "argparse" "p"
      parser:command_target "command"
      parser:require_command(false)
      parser:command "go":flag "--other-base"
      parser:argument "what"
      local args = line.parse(parser)
      line.try("p", function()
        if args.what == "stop" then error("x.lua:3: interrupted!", 0) end
        error("load it, or pass other_base = true, another_base = true or other_base = trues", 0)
      end)
    ]])
    assert.same({ "p: load it, or pass --other-base, another_base = true or other_base = trues\n", 1 },
      { says(script .. " flag") })
    assert.same({ "p: interrupted!\n", 130 }, { says(script .. " stop") })
    os.remove(script)
  end)

  it("refuse types that weights cannot have", function()
    for _, tool in ipairs { "generate DIR", "chat DIR", "evaluate DIR --data no" } do
      local text, code = says(tool .. " --dtype int32")
      assert(code ~= 0 and text:find("--dtype int32: weights are fp32, bf16, fp16 or fp64, or auto", 1, true), text)
    end
  end)

  it("end with code 130 at Ctrl-C on a terminal", function()
    if not pcall(require, "http.server") then return pending("the dashboard needs lua-http") end
    local folder = os.tmpname()
    os.remove(folder)
    assert(lfs.mkdir(folder))
    check.write(folder .. "/log.jsonl", '{"step":1}\n')
    local tool = require("spec.terminal_lib").start { "dashboard", folder }
    tool:expect "token="
    tool:interrupt()
    local text, status = tool:finish()
    assert.matches("\ndashboard%.?l?u?a?: interrupted!\n$", (text:gsub("%^C", "")))
    assert.equal(130, status)
    os.execute(("rm -r '%s'"):format(folder))
  end)

  it("suggest the option that has another name elsewhere, or is misspelt", function()
    for line, want in pairs {
      ["tools/generate.lua DIR --max-new-tokens 5"] = "--max-new", ["tools/generate.lua DIR --max_new 5"] = "--max-new",
      ["tools/generate.lua DIR --prompt=x"] = "--start", ["tools/generate.lua DIR --temprature 1"] = "--temperature",
      ["examples/finetune.lua --learning_rate 1"] = "--lr", ["examples/finetune.lua --output-dir x"] = "--out",
      ["examples/finetune.lua --held-out x"] = "--eval", ["examples/finetune_bert.lua --eval x"] = "--held-out",
      ["tools/data.lua show DIR x --raw 3"] = "--row",
    } do
      local text, code = says(line)
      assert(code == 1 and text:find(("\nDid you mean '%s'?\n"):format(want), 1, true), line .. ": " .. text)
    end
    local text, code = says "tools/generate.lua DIR --zyzzyva 1"
    assert(code == 1 and text:find("Error: unknown option '--zyzzyva'\n", 1, true), text)
    assert.is_nil(text:find("Did you mean", 1, true))
  end)

  it("all read their command line and their numbers in this way", function()
    for _, folder in ipairs { "examples", "examples/benchmark", "tools", "tools/hardware", "bench" } do
      for name in lfs.dir(paths.root .. "/" .. folder) do
        if name:match "%.lua$" then
          local text = lib.read(paths.root .. "/" .. folder .. "/" .. name)
          assert(not text:find("convert(tonumber)", 1, true), folder .. "/" .. name)
          assert(not text:find("parser:p?parse%("), folder .. "/" .. name .. ": it calls parser:parse")
        end
      end
    end
  end)

  it("print one default per option, and no run of zero minutes", function()
    for folder, form in pairs { tools = "tools/%s", examples = "examples/%s" } do
      for name in lfs.dir(paths.root .. "/" .. folder) do
        local source = name:match "%.lua$" and lib.read(paths.root .. "/" .. folder .. "/" .. name) or ""
        if source:find("command_line.parse", 1, true) or source:find("line.parse", 1, true) then
          local text = says(form:format(name) .. " --help"):gsub("\n%s+", " ")
          for option in (text .. "\n"):gmatch "[^\n]+" do
            for one in (option:gsub(" %-%-?%a", "\n%0")):gmatch "[^\n]+" do
              local _, n = one:gsub("[Dd]efault[: ]", "")
              assert(n <= 1, name .. ": " .. one)
            end
          end
        end
      end
    end
    local text, code = says "examples/train_gpt2.lua --minutes 0"
    assert(code == 1 and text:find("--minutes 0: a run takes some time", 1, true), text)
  end)

  -- The name in a usage line is the one that `psluajit NAME` runs.
  it("name themselves in their usage", function()
    local n = 0
    for folder, form in pairs { tools = "psluajit %s", examples = "psluajit %s.lua" } do
      for name in lfs.dir(paths.root .. "/" .. folder) do
        local text = name:match "%.lua$" and lib.read(paths.root .. "/" .. folder .. "/" .. name) or ""
        local named = text:match 'argparse"?%s*%(%s*"([^"]*)"' or text:match 'layout%.open%("([^"]*)"'
        if named and name ~= "layout.lua" then
          n = n + 1
          if text:find("layout.open", 1, true) then named = "psluajit " .. named end
          assert.equal(form:format((name:gsub("%.lua$", ""))), named)
        end
      end
    end
    assert(n >= 30, n)
    for _, script in ipairs { "gpt.lua", "chat", "plan", "launch" } do
      assert.matches("[Uu]sage: psluajit " .. script .. "%f[%s]", (says(script .. " --help")))
    end
  end)
end)
