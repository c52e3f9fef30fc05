-- SPDX-License-Identifier: BSD-3-Clause
-- Monitors: the files of tensorboard and csv_monitor. oracle/monitor_oracle.py has TensorBoard itself read event files.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local nn = require "ps.nn"
local tfevents = require "ps.monitor.tfevents"
local unistd = require "posix.unistd"
local check = require "spec.check_lib"
local ranks_lib = require "spec.ranks_lib"

local folder

-- Trains some steps with these settings in addition to a CSV monitor's. Returns each step's mean loss and learning
-- rate. begin(model, optimizer) is called before all steps, and each(step) before each step.
local function train(settings, steps, begin, each)
  ps.manual_seed(3)
  local config = { train_batch_size = 4, gradient_accumulation_steps = 2, plan_print = false,
    csv_monitor = { enabled = true, output_path = folder, job_name = "run" } }
  for key, value in pairs(settings) do config[key] = value end
  local model, optimizer = ps.initialize { quiet = true, config = config, model_func = function()
    return nn.Linear(4, 3)
  end }
  local ok, result = pcall(function()
    if begin then begin(model, optimizer) end
    local losses = { rates = {} }
    for step = 1, steps do
      if each then each(step) end
      losses.rates[step] = optimizer.groups[1].lr
      local sum = 0
      for _ = 1, 2 do
        local loss = (model(ps.randn({ 2, 4 }, { dtype = model.weight:dtype() })) ^ 2):mean()
        sum = sum + loss:item()
        model:backward(loss)
        optimizer:step()
      end
      losses[step] = sum / 2
    end
    return losses
  end)
  model:close()
  if not ok then error(result, 0) end
  return result
end

-- Returns the rows of a monitor's file without the header, which is checked.
local function rows(tag)
  local text = assert(check.read(("%s/run/Train_Samples_%s.csv"):format(folder, tag)), tag)
  local header, rest = text:match "^([^\n]*\n)(.*)$"
  assert.equal(("step,%s\n"):format(tag), header)
  local list = {}
  for x, value in rest:gmatch "(%d+),(%S+)\n" do list[#list + 1] = { tonumber(x), tonumber(value) } end
  return list
end

before_each(function() folder = ranks_lib.folder() end)
after_each(function() ranks_lib.remove(folder) end)

describe("csv_monitor", function()
  it("has the loss, the rate and the loss scale of each step, by the number of samples", function()
    local losses = train({ fp16 = { enabled = true, initial_scale_power = 8 },
      scheduler = { type = "WarmupLR", params = { warmup_max_lr = 0.1, warmup_num_steps = 10,
        warmup_type = "linear" } } }, 3)
    local loss, lr, scale = rows "train_loss", rows "lr", rows "loss_scale"
    assert.truthy(losses.rates[3] > losses.rates[2])
    assert.same({ 3, 3, 3 }, { #loss, #lr, #scale })
    for step = 1, 3 do
      assert.same({ 4 * step, 4 * step, 4 * step }, { loss[step][1], lr[step][1], scale[step][1] })
      assert.near(losses[step], loss[step][2], 1e-6 * losses[step])
      assert.near(losses.rates[step], lr[step][2], 1e-8)
      assert.equal(256, scale[step][2])
    end
  end)

  it("has a step's times only with wall_clock_breakdown", function()
    train({}, 1)
    assert.is_nil(check.read(folder .. "/run/Train_Samples_elapsed_time_ms_forward.csv"))
    train({ wall_clock_breakdown = true, steps_per_print = 2 }, 3)
    for _, part in ipairs { "forward", "backward", "step" } do
      local list = rows("elapsed_time_ms_" .. part)
      assert.equal(3, #list)
      for _, row in ipairs(list) do assert.truthy(row[2] > 0 and row[2] < 60e3, part .. " " .. row[2]) end
    end
  end)

  it("continues existing files, and counts on from a loaded state", function()
    train({}, 2)
    local state
    train({}, 1, function(model, optimizer)
      state = optimizer:state_dict(model)
      state.values.steps, state.values.calls = 5, 5
      optimizer:load_state_dict(state)
      assert.equal(5, inner(model).steps)
    end)
    local xs = {}
    for i, row in ipairs(rows "train_loss") do xs[i] = row[1] end
    assert.same({ 4, 8, 24 }, xs)
  end)

  it("of two ranks is written by the first, with the loss of both", function()
    if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
    local said = ranks_lib.run(folder, 2, (([[
      local ps, nn = require "ps", require "ps.nn"
      ps.init_distributed { seed = 1, rendezvous = "file://FOLDER/rendezvous" }
      local model, optimizer = ps.initialize { quiet = true, model_func = function() return nn.Linear(4, 3) end,
        config = { train_batch_size = 4, plan_print = false,
          csv_monitor = { enabled = true, output_path = "FOLDER", job_name = "run" },
          tensorboard = { enabled = true, output_path = "FOLDER", job_name = "run" } } }
      local loss = (model(ps.ones { 2, 4 } * (1 + ps.rank())) ^ 2):mean()
      model:backward(loss)
      optimizer:step()
      print(("loss %.9g"):format(loss:item()))
    ]]):gsub("FOLDER", folder)))
    local sum = 0
    for rank = 0, 1 do
      assert.equal(0, said[rank].code, said[rank].text)
      sum = sum + tonumber(said[rank].text:match "loss (%S+)")
    end
    local list = rows "train_loss"
    assert.equal(1, #list)
    assert.equal(4, list[1][1])
    assert.near(sum / 2, list[1][2], 1e-6 * sum)
    local files = io.popen(("ls '%s/run' | grep -c tfevents"):format(folder))
    assert.equal("1", files:read())
    files:close()
  end)
end)

describe("an event file", function()
  it("has CRC-32C, masked, and the record that event files begin with", function()
    assert.equal("e3069283", bit.tohex(tfevents.crc32c "123456789"))          -- the check value of CRC-32/ISCSI
    local first = tfevents.version(1.5)
    assert.equal("\24\0\0\0\0\0\0\0\163\127\75\34\9", first:sub(1, 13))       -- as written by TensorFlow and PyTorch
    assert.equal("\26\13brain.Event:2", first:sub(22, 36))
    assert.equal(40, #first)
  end)

  it("has tags, values and steps in the fields of the protocol buffer", function()
    local record = tfevents.scalars(0, 300, { { "a/b", -2.5 } })
    assert.equal("\9" .. ("\0"):rep(8) .. "\16\172\2" .. "\42\12\10\10\10\3a/b\21\0\0\32\192", record:sub(13, -5))
    assert.equal(string.char(#record - 16), record:sub(1, 1))
  end)
end)

describe("a monitor", function()
  it("that cannot work is an error before the first step", function()
    check.write(folder .. "/file", "")
    check.fails_saying({ "cannot create the folder", folder .. "/file" }, function()
      train({ csv_monitor = { enabled = true, output_path = folder .. "/file" } }, 1)
    end)
    check.fails_saying({ "tensorboard.enabled", "train_batch_size" }, function()
      ps.initialize { model_func = function() return nn.Linear(2, 2) end, quiet = true,
        config = { plan_print = false, tensorboard = { enabled = true, output_path = folder } } }
    end)
    for _, name in ipairs { "wandb", "comet" } do
      check.fails_saying({ name .. ".enabled is true; refused", "csv_monitor" }, function()
        train({ [name] = { enabled = true } }, 1)
      end)
    end
  end)

  it("that cannot write to the disk prints that once and does not stop training; the lines are written when there " ..
    "is room", function()
    local write, full = unistd.write, true
    unistd.write = function(...) -- luacheck: ignore 122
      if full then return nil, "No space left on device", 28 end
      return write(...)
    end
    local all, ok, problem = check.told(train, {}, 4, nil, function(step) full = step < 3 end)
    unistd.write = write -- luacheck: ignore 122
    assert.truthy(ok, problem)
    local _, times = all:gsub("train_loss.csv: No space left on device", "")
    assert.equal(1, times, all)
    assert.equal(4, #rows "train_loss")
    assert.equal(4, #rows "lr")
  end)
end)
