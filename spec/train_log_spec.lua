-- SPDX-License-Identifier: BSD-3-Clause
-- The log of ps.train.run: a resumed run loses no line of it, and a disk that takes no more neither ends the run nor
-- goes unnoticed.
local ps = require "ps"
local gpt2 = require "models.gpt2"
local lfs = require "lfs"
local unistd = require "posix.unistd"
local check = require "spec.check_lib"

local folder

local function options(more)
  ps.manual_seed(5)
  local model = gpt2.new "tiny"
  local o = { model = model, optimizer = ps.optim.AdamW(model, { lr = 1e-3 }), steps = 4, quiet = true,
    loader = ps.data.loader { file = folder .. "/text.txt", batch = 2, seq = 16, vocab = 256, seed = 1 } }
  for key, value in pairs(more) do o[key] = value end
  return o
end

-- The steps of a log's lines.
local function steps_of(path)
  local steps = {}
  for step in check.read(path):gmatch "\n(%d+),%d" do steps[#steps + 1] = tonumber(step) end
  return steps
end

-- Runs fn while the system's write takes `room` bytes in all and then says that the disk is full; gives a function
-- that frees the disk.
local function on_small_disk(room, fn)
  local write = unistd.write
  local function free() unistd.write = write end
  unistd.write = function(fd, text) -- luacheck: ignore 122
    if room <= 0 then return nil, "No space left on device", 28 end
    local n = write(fd, text:sub(1, room))
    room = room - n
    return n
  end
  local ok, problem = pcall(fn, free)
  free()
  if not ok then error(problem, 0) end
end

describe("the log of a training", function()
  setup(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(lfs.mkdir(folder))
    check.write(folder .. "/text.txt", ("a line of text to learn\n"):rep(50))
  end)
  teardown(function() os.execute("rm -rf " .. folder) end)

  it("keeps its old file whole until the resumed run's is there", function()
    local path, old = folder .. "/whole.csv", folder .. "/old.csv"
    ps.train.run(options { log = path })
    check.write(path, check.read(path) .. "5,1.0,0.")          -- a line that a crash cut
    assert(lfs.link(path, old))
    local before = check.read(old)
    local result = ps.train.run(options { log = path, start = 3, steps = 5 })
    assert.equal(before, check.read(old))                      -- nobody wrote into the file that was there
    assert.same({ 1, 2, 3, 4, 5 }, steps_of(path))
    assert.equal(5, #result.history)
    assert.equal(before:match "\n(3,[^\n]*)\n", check.read(path):match "\n(3,[^\n]*)\n")
  end)

  it("is an error before the first step where it cannot be written", function()
    assert(lfs.link("/dev/full", folder .. "/full.csv", true))
    for _, path in ipairs { folder .. "/full.csv", folder, folder .. "/nowhere/log.csv" } do
      local o = options { log = path }
      local before = o.model.transformer.wte.weight:sum():item()
      check.fails_saying({ path }, function() ps.train.run(o) end)
      assert.equal(before, o.model.transformer.wte.weight:sum():item())
    end
    check.fails_saying({ "cannot write the log", "full.csv", "No space left on device" }, function()
      ps.train.run(options { log = folder .. "/full.csv" })
    end)
  end)

  it("that the disk does not take ends the run with an error, after its checkpoint", function()
    local path = folder .. "/lost.csv"
    on_small_disk(30, function()
      check.fails_saying({ "reached step 4", path, "lacks its last 3 lines", "No space left on device",
        "step-00000004.safetensors" }, function()
        ps.train.run(options { log = path, checkpoint = { folder = folder .. "/run" } })
      end)
    end)
    local o = options {}
    assert.equal(4, ps.checkpoints.load(folder .. "/run", { model = o.model, optimizer = o.optimizer }).step)
  end)

  it("has all lines when the disk has room again", function()
    local path = folder .. "/late.csv"
    ps.train.run(options { log = folder .. "/smooth.csv", loss = function(model, x, y) return model(x, y) end })
    on_small_disk(30, function(free)
      local n = 0
      ps.train.run(options { log = path, loss = function(model, x, y)
        n = n + 1
        if n == 4 then free() end
        return model(x, y)
      end })
    end)
    assert.same({ 1, 2, 3, 4 }, steps_of(path))
    local function numbers(name) return (check.read(folder .. name):gsub(",%d+,([^,\n]*)\n", ",%1\n")) end
    assert.equal(numbers "/smooth.csv", numbers "/late.csv")   -- all but the tokens a second
  end)
end)
