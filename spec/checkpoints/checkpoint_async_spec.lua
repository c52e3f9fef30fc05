-- SPDX-License-Identifier: BSD-3-Clause
-- Saving in the background saves the state at the time of the call, whatever follows: training, errors, the
-- end of the script, steps that need the copy's memory.
local ps = require "ps"
local lfs = require "lfs"
local lib = require "spec.checkpoint_lib"
local checkpoints, C = ps.checkpoints, ps.C
local path, read, names, child, new, step = lib.path, lib.read, lib.names, lib.child, lib.new, lib.step
local fails, said, saved = lib.fails, lib.said, lib.saved

local ENOSPC = 28
local folder

before_each(function() folder = lib.open() end)
after_each(lib.close)

describe("saving in the background", function()
  it("saves the state at that time, in memory that budgets count and the next save reuses", function()
    local run = new(300)
    step(run, 1)
    checkpoints.save(path("now.safetensors"), run)
    local function used()
      collectgarbage()
      collectgarbage()
      return ps.memory().used
    end
    local free = used()
    local function save(name)
      checkpoints.save(path(name), { model = run.model, optimizer = run.optimizer, async = true })
    end
    local _, text = said(function() save "then.safetensors" end)
    assert.truthy(text:find("10.6 KiB of host memory", 1, true), text)
    local holds = used() - free
    assert.truthy(holds >= 3 * 301 * 3 * 4 and holds < 3 * 301 * 3 * 4 + 8192, holds)
    for number = 2, 20 do step(run, number) end                        -- training continues
    local at, seconds = checkpoints.wait()
    assert.equal(path("then.safetensors"), at)
    assert.truthy(seconds > 0 and seconds < 60)
    assert.truthy(read(path("now.safetensors")) == read(at))  -- the bytes do not depend on the thread that wrote them
    assert.equal(nil, checkpoints.wait())
    local before = used()
    _, text = said(function() save "again.safetensors" end)
    assert.equal("", text)
    assert.equal(before, used())
    checkpoints.save(path("now.safetensors"), run)                     -- without async, waits and releases the memory
    assert.truthy(lfs.attributes(path("again.safetensors")))
    assert.truthy(used() <= before - 3 * 301 * 3 * 4)
  end)

  it("commits between steps, and has a checkpoint at every moment", function()
    for _, sharded in ipairs { false, true } do
      local run, last = new(), 0
      for number = 1, 30 do
        step(run, number)                                              -- commits the complete checkpoint
        local newest = checkpoints.find(folder)
        if newest then
          local at = tonumber(newest:match("step%-(%d+)"))
          assert.truthy(at >= last and at < number)
          last = at
        end
        if number % 3 == 0 then
          checkpoints.save(folder, { model = run.model, optimizer = run.optimizer, async = true, shards = sharded,
            quiet = true })
        end
      end
      checkpoints.wait()
      assert.equal(30, checkpoints.load(folder, run).step)
      local deadline = ps.now() + 200                                  -- steps commit without a call of wait
      step(run, 31)
      checkpoints.save(folder, { model = run.model, optimizer = run.optimizer, async = true, shards = sharded,
        quiet = true })
      while checkpoints.find(folder):match("step%-(%d+)") ~= "00000031" and ps.now() < deadline do step(run, 32) end
      assert.equal("00000031", checkpoints.find(folder):match("step%-(%d+)"))
      checkpoints.wait()
      os.execute(("rm -r '%s'/*"):format(folder))
    end
  end)

  it("reports that its copy does not fit, and saves without it", function()
    local run = new(4000)
    step(run, 1)
    collectgarbage()
    collectgarbage()
    ps.set_memory_limit(ps.memory().used + 100000)
    local ok, problem = pcall(fails, function()
      checkpoints.save(folder, { model = run.model, optimizer = run.optimizer, async = true })
    end, "KiB", "of host memory", "Save without async")
    ps.set_memory_limit(0)
    assert(ok, problem)
    assert.equal("", names(folder))
    checkpoints.save(folder, run)
    assert.equal(1, checkpoints.load(folder, run).step)
  end)

  it("is counted in an engine's budgets, whose chunks make room, and changes no number", function()
    local gpt2 = require "models.gpt2"
    local x = ps.tensor({ { 1, 2, 3, 4, 5, 6, 7, 8 } }, "int32")
    -- Trains 6 steps, and saves each step from the third on. Returns the losses.
    local function train(host, options)
      jit.flush()                                  -- compiled traces can hold tensors of an earlier test
      ps.collect()
      ps.manual_seed(7)
      local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, chunk_size = 4096,
        memory = { host = host, disk = { path = folder, limit = "64MiB" } },
        optimizer = { type = "AdamW", params = { lr = 1e-3 } } }, model_func = function()
        return gpt2.new("tiny", { dropout = 0.1 })
      end }
      local losses = {}
      local ok, problem = pcall(function()
        for number = 1, 6 do
          optimizer:zero_grad()
          local loss = model(x, x)
          losses[number] = loss:item()
          model:backward(loss)
          optimizer:step()
          if number > 2 and options then
            checkpoints.save(path(options.name .. number .. ".safetensors"), { model = model, optimizer = optimizer,
              async = options.async })
          end
        end
        checkpoints.wait()
      end)
      model:close()
      checkpoints.save(path("small.safetensors"), new())               -- releases the copy's memory
      collectgarbage()
      collectgarbage()
      if not ok then error(problem, 0) end
      return losses
    end
    local wanted = train("1800KiB")
    assert.same(wanted, train("300KiB", { name = "now" }))
    assert.same(wanted, train("1800KiB", { name = "then", async = true }))
    for _, host in ipairs { "640KiB", "560KiB", "480KiB" } do               -- steps wait until the copy is released
      assert.same(wanted, train(host, { name = "then", async = true }))
    end
    for number = 3, 6 do
      assert.truthy(read(path("now" .. number .. ".safetensors")) == read(path("then" .. number .. ".safetensors")))
    end
    fails(function() train("300KiB", { name = "never", async = true }) end, "406.5 KiB of host memory",
      "budget of 300.0 KiB", "Save without async")
  end)

  local TRAIN = [[
    local ps = require "ps"
    local model = ps.nn.Linear(64, 64)
    local optimizer = ps.optim.AdamW(model, { lr = 1e-2 })
    model(ps.ones { 1, 64 }):sum():backward()
    optimizer:step()
    ps.checkpoints.save(arg[1], { model = model, optimizer = optimizer, async = true, shards = %s })
    %s
  ]]
  it("is complete when the script ends, in whatever way", function()
    for ending, code in pairs { [""] = 0, ["os.exit(3)"] = 3, ["error 'over'"] = 1 } do
      for _, sharded in ipairs { "false", "true" } do
        local out, status = child(TRAIN:format(sharded, ending))
        assert.equal(code, status, out)
        assert.equal("1", (checkpoints.find(folder) or ""):match("step%-0*(%d+)"), out)
        os.execute(("rm -r '%s'/*"):format(folder))
      end
    end
  end)

  it("reports an error of the thread in wait, in the next save, and when the script ends", function()
    local run = new()
    saved(run, 1)
    local function save(async)
      checkpoints.save(folder, { model = run.model, optimizer = run.optimizer, async = async, quiet = true })
    end
    for _, at_end in ipairs { checkpoints.wait, save } do
      step(run, 2)
      save(true)
      checkpoints.wait()
      local good = run.optimizer.steps
      step(run, 3)
      C.ps_test_fail_file(2, 2 ^ 40, ENOSPC)                           -- after the reservation and the header
      save(true)
      fails(at_end, "step-00000", "was not saved", "No space left on device", "bytes free")
      C.ps_test_fail_file(-1, 0, 0)
      assert.equal(good, checkpoints.load(folder, run).step)
    end
    local out, code = child((TRAIN:format("false", ""):gsub("ps%.checkpoints%.save",
      "ps.C.ps_test_fail_file(2, 2 ^ 40, 28); %0")))
    assert.equal(1, code, out)
    assert.truthy(out:find("was not saved", 1, true) and out:find("No space left on device", 1, true), out)
  end)
end)
