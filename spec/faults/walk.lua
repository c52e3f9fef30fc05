-- SPDX-License-Identifier: BSD-3-Clause
-- Run by psluajit_faults (spec/faults/walk_spec.lua): fails the Nth call of a file, for N = 0, 1, 2, ... until the work
-- makes no more calls. Arguments: a folder, the work (save, load or step), an action, and how many calls in a row have
-- it. Each failure is an error that names its cause. Afterwards the folder has the old checkpoint or the new one,
-- whole, and training continues from it with the bits of a run without faults. Prints the numbers of calls, failures
-- and successes.
local ps = require "ps"
local ffi = require "ffi"
local lfs = require "lfs"
local gpt2 = require "models.gpt2"
ffi.cdef "void faults_arm(const char *plan); int64_t faults_happened(void); int64_t faults_calls(void);"
local C = ffi.C

local folder, work, action, count = arg[1], arg[2], arg[3], tonumber(arg[4])
local CAUSES = { EIO = "Input/output error", ENOSPC = "No space left on device", EMFILE = "Too many open files",
  flip = "damaged" }
local run = folder .. "/run"

local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
ps.manual_seed(3)
x:copy_(ps.randint(0, 256, { 2, 16 }, { dtype = "int32" }))

local function parts()
  ps.manual_seed(1)
  local config = { plan_print = false, chunk_size = 4096, optimizer = { type = "AdamW", params = { lr = 1e-3 } } }
  if work == "step" then
    config.memory = { host = "560KiB", disk = { path = folder, limit = "4MiB", checksums = true } }
  end
  local model, optimizer = ps.initialize { quiet = true, config = config, model_func = function()
    return gpt2.new("tiny")
  end }
  return { model = model, optimizer = optimizer, quiet = true, shards = true, keep = 9 }
end

local function train(made)
  local loss = made.model(x, x)
  made.model:backward(loss)
  made.optimizer:step()
  made.optimizer:zero_grad()
  return loss:item()
end

-- The losses of steps without faults.
local golden = {}
do
  local made = parts()
  for step = 1, 6 do golden[step] = train(made) end
  made.model:close()
end

local function check(made, what, nth)
  local step = made.optimizer.steps + 1
  local loss = train(made)
  if loss ~= golden[step] then
    error(("%s, call %d: loss %d is %.17g, not %.17g"):format(what, nth, step, loss, golden[step]), 0)
  end
end

local function leftovers(nth)
  for name in lfs.dir(run) do
    if not (name:match "^%.%.?$" or name == "latest" or name:match "^step%-%d+$") then
      error(("call %d: %s was left behind"):format(nth, name), 0)
    end
  end
end

local function resume(made, nth, least)
  local from = ps.checkpoints.load(run, made)
  if from.step < least or #from.skipped > 0 then
    error(("call %d: continued from step %d, %d checkpoints skipped"):format(nth, from.step, #from.skipped), 0)
  end
  check(made, "resumed", nth)
end

local WORKS = {
  save = function(made) ps.checkpoints.save(run, made) end,
  load = function(made) ps.checkpoints.load(run, made) end,
  step = function(made)
    train(made)
    ps.check(ps.C.ps_engine_settle(ps.ctx))
  end,
}

local failures, survived = 0, 0
local made = parts()
train(made)
ps.checkpoints.save(run, made)
for nth = 0, 5000 do
  if work == "save" then train(made) end
  if made.optimizer.steps > 4 then ps.checkpoints.load(run .. "/step-00000001", made) end
  C.faults_arm(("0:any@%d+%d=%s"):format(nth, count, action))
  local ok, problem = pcall(WORKS[work], made)
  local hit, calls = C.faults_happened() > 0, tonumber(C.faults_calls())
  C.faults_arm("")
  if nth >= calls then
    assert(ok, tostring(problem))
    print(("%d calls, %d failed, %d survived"):format(nth, failures, survived))
    os.exit(0)
  end
  if not ok then failures = failures + 1 elseif hit then survived = survived + 1 end
  local cause = CAUSES[action:match "^[%w_]+"]
  if not ok and not (cause and tostring(problem):find(cause, 1, true)) then
    error(("call %d: %s"):format(nth, tostring(problem)), 0)
  end
  if work == "save" and not ok then
    ps.checkpoints.save(run, made)                         -- the next save removes the remains of a failed one
    leftovers(nth)
  end
  if work == "step" and not ok then
    made.model:close()
    made = parts()
  end
  if hit then resume(made, nth, 1) end
end
error("it never ended", 0)
