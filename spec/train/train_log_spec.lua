-- SPDX-License-Identifier: BSD-3-Clause
-- The log of ps.train.run: a resumed run loses no line of it, and a full disk neither ends the run nor remains
-- unreported.
local ps = require "ps"
local gpt2 = require "models.gpt2"
local json = require "cjson"
local lfs = require "lfs"
local chunks = require "ps.memory.chunks"
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

-- Returns the steps in a log's lines.
local function steps_of(path)
  local steps = {}
  for step in check.read(path):gmatch "\n(%d+),%d" do steps[#steps + 1] = tonumber(step) end
  return steps
end

-- Runs fn while the system's write accepts `room` bytes in total and then reports a full disk. Returns a function that
-- makes room on the disk.
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

-- Creates a folder with a text for the tests of a block.
local function own_folder()
  setup(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(lfs.mkdir(folder))
    check.write(folder .. "/text.txt", ("a line of text to learn\n"):rep(50))
  end)
  teardown(function() os.execute("rm -rf " .. folder) end)
end

describe("the log of a training", function()
  own_folder()

  it("is not begun if checkpoints cannot be written", function()
    for place, why in pairs { ["text.txt"] = "is a file, not a folder", ["text.txt/a"] = "cannot be made: " } do
      check.fails(function()
        ps.train.run(options { log = folder .. "/none.csv", checkpoint = { folder = folder .. "/" .. place } })
      end, "ps.train.run: checkpoint.folder: ", why)
    end
    check.fails(function() ps.train.run(options { checkpoint = { every = 1 } }) end, "the name of the folder is empty")
    assert.is_nil(lfs.attributes(folder .. "/none.csv"))
  end)

  it("keeps its old file intact until the resumed run's is complete", function()
    local path, old = folder .. "/whole.csv", folder .. "/old.csv"
    ps.train.run(options { log = path })
    check.write(path, check.read(path) .. "5,1.0,0.")          -- a line that a crash truncated
    assert(lfs.link(path, old))
    local before = check.read(old)
    local result = ps.train.run(options { log = path, start = 3, steps = 5 })
    assert.equal(before, check.read(old))                      -- the existing file was not changed
    assert.same({ 1, 2, 3, 4, 5 }, steps_of(path))
    assert.equal(5, #result.history)
    assert.equal(before:match "\n(3,[^\n]*)\n", check.read(path):match "\n(3,[^\n]*)\n")
  end)

  it("is an error before the first step if it cannot be written", function()
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

  it("that the disk rejects ends the run with an error, after its checkpoint", function()
    local path = folder .. "/lost.csv"
    on_small_disk(45, function()
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
    on_small_disk(45, function(free)
      local n = 0
      ps.train.run(options { log = path, loss = function(model, x, y)
        n = n + 1
        if n == 4 then free() end
        return model(x, y)
      end })
    end)
    assert.same({ 1, 2, 3, 4 }, steps_of(path))
    local function numbers(name)
      return (check.read(folder .. name):gsub(",%d+,([^,\n]*,[^,\n]*,[^,\n]*)\n", ",%1\n"))
    end
    assert.equal(numbers "/smooth.csv", numbers "/late.csv")   -- all values except tokens per second
  end)

  -- Returns the decoded lines of a JSONL log.
  local function lines_of(path)
    local list = {}
    for line in check.read(path):gmatch "[^\n]+" do list[#list + 1] = json.decode(line) end
    return list
  end

  it("is next to the CSV file as JSON, a line for each step, which a resumed run keeps", function()
    local began = os.time()
    ps.train.run(options { log = folder .. "/both.csv",
      eval = { every = 2, data = function()
        return ps.data.windows { file = folder .. "/text.txt", batch = 2, seq = 16, limit = 2 }
      end } })
    local list = lines_of(folder .. "/both.jsonl")
    assert.equal(4, #list)
    local rows = {}
    for row in check.read(folder .. "/both.csv"):gmatch "\n(%d[^\n]*)" do rows[#rows + 1] = row end
    for step, line in ipairs(list) do
      local function cell(value, format) return value and format:format(value) or "" end
      assert.equal(rows[step], ("%d,%.6f,%.6g,%s,%.0f,%s,%.6f,%s"):format(line.step, line.loss, line.lr,
        cell(line.grad_norm, "%.5g"), line.tokens_per_s, cell(line.val_loss, "%.6f"), line.accuracy,
        cell(line.val_accuracy, "%.6f")))
      assert.equal(step * 2 * 16, line.tokens)
      assert.truthy(line.time >= began - 1 and line.time <= os.time() + 1)
      assert.is_false(line.skipped)
      assert.equal(step % 2 == 0, line.val_loss ~= nil)
    end
    ps.train.run(options { log = folder .. "/both.csv", start = 3, steps = 5 })
    local after = lines_of(folder .. "/both.jsonl")
    assert.same({ 1, 2, 3, 4, 5 }, { after[1].step, after[2].step, after[3].step, after[4].step, after[5].step })
    assert.equal(list[3].time, after[3].time)
    assert.not_equal(list[4].time, after[4].time)
  end)

  it("is in the folder of checkpoints if the run has no CSV file, with the tiers of an engine", function()
    local model, optimizer = ps.initialize { quiet = true, model_func = function() return gpt2.new "tiny" end,
      config = { plan_print = false, fp16 = { enabled = true, initial_scale_power = 4 } } }
    ps.train.run(options { model = model, optimizer = optimizer, steps = 1,
      checkpoint = { folder = folder .. "/own" } })
    local line = lines_of(folder .. "/own/log.jsonl")[1]
    local host, total = chunks.tiers()[1], 0
    for _, runs in pairs(line.map) do
      for n, letter in runs:gmatch "(%d+)(%a)" do
        assert.truthy(letter == "h" or letter == "n", runs)
        total = total + tonumber(n)
      end
    end
    assert.equal(#chunks.chunks(), total)
    model:close()
    assert.equal(16, line.loss_scale)
    assert.equal(host.chunks, line.tiers.host.chunks)
    assert.truthy(line.tiers.host.peak >= line.tiers.host.chunks)
    ps.train.run(options { log = "/dev/null" })
    assert.is_nil(lfs.attributes "/dev/null.jsonl")
  end)
end)

describe("callbacks of a training", function()
  own_folder()

  it("are called for steps, evaluations and checkpoints in their order", function()
    local heard = {}
    local result = ps.train.run(options { steps = 2, checkpoint = { folder = folder .. "/run" },
      eval = { every = 2, data = function()
        return ps.data.windows { file = folder .. "/text.txt", batch = 2, seq = 16, limit = 2 }
      end },
      callbacks = {
        step = function(line) heard[#heard + 1] = ("step %d %.6f"):format(line.step, line.loss) end,
        evaluate = function(line) heard[#heard + 1] = ("evaluate %d %.6f"):format(line.step, line.val_loss) end,
        save = function(at) heard[#heard + 1] = ("save %d %s"):format(at.step, at.saved) end,
      } })
    assert.same({ ("step 1 %.6f"):format(result.history[1].loss), ("evaluate 2 %.6f"):format(result.val_loss),
      ("step 2 %.6f"):format(result.loss), "save 2 " .. result.saved }, heard)
  end)

  it("end the run after their step, with a checkpoint", function()
    local result = ps.train.run(options { checkpoint = { folder = folder .. "/ended" },
      callbacks = { step = function(line) return line.step == 2 and "stop" or nil end } })
    assert.same({ 2, true }, { result.step, result.interrupted })
    assert.matches("step%-00000002", result.saved)
  end)

  it("that fail or return another value end it with an error", function()
    check.fails_saying({ "no luck" }, function()
      ps.train.run(options { callbacks = { step = function() error "no luck" end } })
    end)
    check.fails_saying({ "callbacks.step returned halt", '"stop"' }, function()
      ps.train.run(options { callbacks = { step = function() return "halt" end } })
    end)
    check.fails_saying({ "no option 'steps'", "did you mean 'step'" }, function()
      ps.train.run(options { callbacks = { steps = function() end } })
    end)
  end)
end)
