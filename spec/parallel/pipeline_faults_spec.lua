-- SPDX-License-Identifier: BSD-3-Clause
-- A rank that ends or is stopped in the middle of a pipeline's step: all others fail in time, and their errors name the
-- rank, the axis and the action that it was in.
local check = require "spec.check_lib"
local lib = require "spec.ranks_lib"

local folder

setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

-- Three stages. `victim` causes its fault in the iteration of micro-batch 1 (from 0) in step 2.
local SCRIPT = [[
  local ps = require "ps"
  local group = ps.init_distributed { seed = 3, quiet = true, timeout = 20, heartbeat = HEARTBEAT,
    rendezvous = "file://FOLDER/rendezvous" }
  local gpt2, unistd, signal = require "models.gpt2", require "posix.unistd", require "posix.signal"
  local model, optimizer = ps.initialize { quiet = true, config = { gradient_accumulation_steps = 4,
      plan_print = false, pipeline = { stages = 3, schedule = "SCHEDULE" } },
    model_func = function() return gpt2.new("tiny", { n_layer = 3, dropout = 0 }) end }
  local function victim()
    local pid = unistd.getpid()
    HOW
  end
  local began
  local ok, problem = pcall(function()
    for step = 1, 50 do
      ps.manual_seed(step)
      local x = ps.randint(0, 250, { 8, 16 }, { dtype = "int32" })
      optimizer:zero_grad()
      local n = 0
      if step == 2 then began = ps.now() end
      for out in model:micro_batches(x, x) do
        n = n + 1
        if step == 2 and n == 2 and ps.rank() == VICTIM then victim() end
        model:backward(out.loss)
      end
      optimizer:step()
    end
  end)
  print(ok and "trained" or "problem: " .. tostring(problem))
  print(("after %.1f s"):format(ps.now() - began))
  if ps.rank() == VICTIM then error(problem, 0) end
]]

-- Returns the errors of the other ranks about rank `victim`, long before a time-out.
local function others(victim, schedule, heartbeat, how, words)
  local script = SCRIPT:gsub("FOLDER", folder):gsub("SCHEDULE", schedule):gsub("VICTIM", tostring(victim))
    :gsub("HEARTBEAT", tostring(heartbeat)):gsub("HOW", function() return how end)
  local all = lib.run(folder, 3, script)
  for rank = 0, 2 do
    if rank ~= victim then
      local text = all[rank].text
      for _, word in ipairs(words) do
        assert.truthy(text:find(word), ("rank %d: no '%s' in %s"):format(rank, word, text))
      end
      assert.truthy(tonumber(text:match "after ([%d.]+) s") < check.PROMPT_S, text)
    end
  end
end

-- Three stages. The script of the ranks in FAILS catches an error in the iteration of micro-batch 1 of step 2, and then
-- runs NEXT.
local CAUGHT = [[
  local ps = require "ps"
  ps.init_distributed { seed = 3, quiet = true, timeout = 1000, heartbeat = 1,
    rendezvous = "file://FOLDER/rendezvous" }
  local model, optimizer = ps.initialize { quiet = true, config = { gradient_accumulation_steps = 4,
      plan_print = false, pipeline = { stages = 3, schedule = "1f1b" } },
    model_func = function() return require("models.gpt2").new("tiny", { n_layer = 3, dropout = 0 }) end }
  local x = ps.randint(0, 250, { 8, 16 }, { dtype = "int32" })
  local function train(step)
    optimizer:zero_grad()
    local n = 0
    for out in model:micro_batches(x, x) do
      n = n + 1
      if step == 2 and n == 2 and (FAILS) then error "no such luck" end
      model:backward(out.loss)
    end
    optimizer:step()
  end
  local began = ps.now()
  for step = 1, 4 do
    local ok, problem = pcall(train, step)
    print(("step %d: %s"):format(step, ok and "trained" or tostring(problem)))
    if not ok then NEXT end
  end
  print(("after %.1f s"):format(ps.now() - began))
]]

-- Checks each rank's output about steps 2 to 4 with patterns by rank.
local function caught(fails, next_call, wanted)
  local script = CAUGHT:gsub("FOLDER", folder):gsub("FAILS", fails):gsub("NEXT", next_call)
  local all = lib.run(folder, 3, script)
  for rank = 0, 2 do
    local text = all[rank].text
    for step, pattern in pairs(wanted[rank]) do
      assert.matches(pattern, text:match("step " .. step .. ": ([^\n]*)"), rank .. ": " .. text)
    end
    assert.truthy(tonumber(text:match "after ([%d.]+) s") < check.PROMPT_S, text)
  end
end

describe("a stage of a pipeline", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  -- Heartbeats are a second apart, and the weight gradients' action ends the process 0.1 s after the action began.
  it("that is killed is named by all, with the action that it was in", function()
    others(1, "zb_h1", 10, "ps.C.ps_test_signal(ps.C.PS_ACT_WEIGHT, 2, 0.1, signal.SIGKILL)", { "rank 1 %(",
      "died: its process ended without a word",
      "it was last known in W of micro%-batch 2, stage 1 of pp" })
  end)

  -- A thread reports the loop's iteration, and the stop would also stop this thread. Therefore the stop is sent a
  -- second after the iteration began.
  it("that is stopped is named by all", function()
    others(2, "1f1b", 1, 'os.execute(("sleep 1; (sleep 6; kill -CONT %d) >/dev/null 2>&1 &"):format(pid)) '
      .. "signal.kill(pid, signal.SIGSTOP)", { "rank 2 %(", "is silent for", "of pp with rank %d: ",
      "it was last known in the loop's turn of micro%-batch 1 of pp" })
  end)

  it("whose script fails is named by all, with its words", function()
    others(1, "1f1b", 1, 'print "fails" error "no such luck"', { "rank 1 %(", "no such luck" })
  end)

  local LEFT = "%S*script%.lua:%d+: optimizer:zero_grad%(%) was called before the end of a loop over micro%-batches, "
    .. "at micro%-batch 2 of 4: .*continue from a checkpoint"
  local LUCK = "script%.lua:%d+: no such luck"
  local OVER = "this group failed before and can be used no more; close it %(rank %d %(%S+%) gave up: " .. LEFT

  it("whose script catches its error and continues is named by all, with the line", function()
    local others_say = { [2] = "rank 1 %(%S+%) gave up: " .. LEFT, [3] = OVER, [4] = OVER }
    caught("ps.rank() == 1", "", { [0] = others_say, { [2] = LUCK, [3] = LEFT, [4] = OVER }, others_say })
  end)

  it("whose script catches its error and calls a collective is named long before the time-out", function()
    local circle = "ranks wait for each other: .*rank 1 %(%S+%) is in all_reduce %(call %d+%), to which rank %d has "
      .. "not come"
    local both = { [2] = "with rank 1: " .. circle, [3] = "failed before" }
    caught("ps.rank() == 1", "pcall(ps.any_rank, true)", { [0] = both, { [2] = LUCK }, both })
  end)

  it("does not continue if all ranks caught an error in the same iteration", function()
    local all = { [4] = OVER }
    caught("true", "", { [0] = all, all, all })
  end)
end)
