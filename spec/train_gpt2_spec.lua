-- SPDX-License-Identifier: BSD-3-Clause
-- examples/train_gpt2.lua: a run, one that goes on, and what --resume refuses, which changes no file.
local lfs = require "lfs"
local paths = require "ps.paths"
local check = require "spec.check_lib"

local folder

local function write(name, text) check.write(folder .. "/" .. name, text) end

-- Every file of a run with its bytes.
local function files(out)
  local all = {}
  for name in lfs.dir(folder .. "/" .. out) do
    local f = lfs.attributes(folder .. "/" .. out .. "/" .. name, "mode") == "file"
      and io.open(folder .. "/" .. out .. "/" .. name, "rb")
    if f then
      all[name] = f:read("*a")
      f:close()
    end
  end
  return all
end

-- What a run on data says, and its exit code.
local function train(data, steps, more)
  local command = ("cd %s && OMP_NUM_THREADS=1 timeout 60 %s %s/examples/train_gpt2.lua --model tiny --seq 16 "
    .. "--batch 2 --dtype fp32 --out run --data %s --steps %d %s 2>&1; echo \"|$?\""):format(folder, paths.exe,
    paths.root, data, steps, more or "")
  local p = assert(io.popen(command))
  local text, code = p:read("*a"):match("^(.*)|(%d+)\n$")
  p:close()
  return text, tonumber(code)
end

local function refused(data, more, ...)
  local before = files "run"
  local text, code = train(data, 8, more)
  assert.equal(1, code, text)
  for _, part in ipairs { ... } do assert.truthy(text:find(part, 1, true), text) end
  assert.same(before, files "run")
end

describe("train_gpt2.lua", function()
  setup(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(lfs.mkdir(folder))
    write("text.txt", ("a line of text to learn\n"):rep(200))
    write("other.txt", ("another one, of another length\n"):rep(200))
    write("alike.txt", ("a line of TEXT to learn\n"):rep(200))
  end)

  teardown(function() os.execute("rm -rf " .. folder) end)

  it("has nothing to go on from where no run was, and leaves nothing there", function()
    local text, code = train("text.txt", 8, "--resume")
    assert.equal(1, code, text)
    assert.truthy(text:find("run holds no checkpoint", 1, true), text)
    assert.is_nil(lfs.attributes(folder .. "/run"))
  end)

  it("goes on with the data it began with", function()
    local text, code = train("text.txt", 4)
    assert.equal(0, code, text)
    text, code = train("text.txt", 6, "--resume")
    assert.equal(0, code, text)
    assert.truthy(text:find("resumed from run/step-00000004", 1, true), text)
  end)

  it("refuses to go on with other data, and leaves the run's files as they are", function()
    refused("other.txt", "--resume", "run/train.bin", "other.txt", "--out")
    refused("alike.txt", "--resume", "run/train.bin", "alike.txt")        -- of the same length
    refused("nowhere.txt", "--resume", "nowhere.txt")
    local text, code = train("text.txt", 8, "--resume")
    assert.equal(0, code, text)
    assert.truthy(text:find("resumed from run/step-00000006", 1, true), text)
  end)

  it("begins anew without --resume", function()
    local before = files "run"
    local text, code = train("other.txt", 1)
    assert.equal(0, code, text)
    assert.not_equal(before["train.bin"], files("run")["train.bin"])
  end)
end)
