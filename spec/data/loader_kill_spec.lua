-- SPDX-License-Identifier: BSD-3-Clause
-- Training on packed rows is killed (SIGKILL) at random times, on 1, 2 and 3 ranks in turn: in the steps that
-- checkpoints contain, each example occurs once per epoch. On one rank losses have the bits of a run without kills.
-- PS_FULL=1 kills 20 times; PS_KILL_SEED=n repeats the draws of one run.
local lib = require "spec.ranks_lib"
local paths = require "ps.paths"

local KILLS, EXAMPLES, EPOCHS = os.getenv "PS_FULL" == "1" and 20 or 6, 75, 12
local MOST_STEPS = 5             -- that an attempt notes before it is killed

-- Arguments: the folder, and the number of the attempt. Each rank records the examples of each step.
local TRAIN = [[
  local ffi = require "ffi"
  ffi.cdef "unsigned alarm(unsigned seconds);"
  ffi.C.alarm(100)
  local ps = require "ps"
  local folder, attempt = arg[1], tonumber(arg[2])
  local checkpoints = ps.checkpoints
  if tonumber(os.getenv "WORLD_SIZE" or 1) > 1 then
    ps.init_distributed { quiet = true, timeout = 30, rendezvous = "file://" .. folder .. "/rendezvous" .. attempt }
  end
  local rank, size = ps.rank(), ps.world_size()
  local rows = {}
  for i = 1, EXAMPLES do
    rows[i] = { input_ids = { i } }
    for k = 2, 2 + i * 37 % 13 do rows[i].input_ids[k] = 100 + k end
  end
  local mixture = ps.data.mix { { ps.data.table(rows):take(50), 0.6 }, { ps.data.table(rows):skip(50), 0.4 } }
  local loader = ps.data.loader { table = mixture, tokenizer = ps.tokenizer.bytes(), batch = 6 / size, seq = 16,
    packing = true, window = 20, seed = 4 }
  local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, optimizer = { type = "AdamW",
    params = { lr = 1e-3 } } }, model_func = function()
    ps.manual_seed(11)
    return require("models.gpt2").new("tiny", { vocab_size = 128, dropout = 0.1 }):train()
  end }
  local parts = { model = model, optimizer = optimizer, loader = loader, keep = 2, quiet = true }
  if checkpoints.find(folder .. "/run") then checkpoints.load(folder .. "/run", parts) end
  local out = assert(io.open(("%s/log%d"):format(folder, rank), "a"))
  out:setvbuf "full"
  while true do
    local epoch = loader:position().epoch
    local batch = loader:next()
    epoch = math.max(epoch, loader:position().epoch)
    local here = loader.at.row == 0 and epoch - 1 or epoch
    if here >= EPOCHS then break end
    local ids, places, labels = batch.input_ids:tolist(), batch.position_ids:tolist(), batch.labels:tolist()
    local numbers = {}
    for r, row in ipairs(ids) do
      local counts = false
      for _, label in ipairs(labels[r]) do counts = counts or label ~= -100 end
      for k, id in ipairs(row) do
        if counts and places[r][k] == 0 and id > 0 then numbers[#numbers + 1] = id end
      end
    end
    optimizer:zero_grad()
    local loss = model(batch).loss
    model:backward(loss)
    optimizer:step()
    out:write(("%d %d %d %d %.17g %s\n"):format(attempt, size, optimizer.steps, here, loss:item(),
      table.concat(numbers, ",")))
    out:flush()
    checkpoints.save(folder .. "/run", parts)
  end
  out:write "end\n"
  out:close()
]]

local folder, seed

local function draw(n)
  seed = (seed * 16807) % 2147483647
  return seed % n
end

local function write(name, text)
  local f = assert(io.open(name, "wb"))
  f:write(text)
  f:close()
end

-- Runs one attempt. If `seconds` is given, kills a random rank, or all, this long after rank 0 has noted `noted` steps,
-- so that the speed of the machine does not matter.
local function start(size, attempt, noted, seconds)
  local parts = { ("n=$(cat '%s/log0' 2>/dev/null | wc -l)"):format(folder) }
  for rank = 0, size - 1 do
    parts[#parts + 1] = ("RANK=%d LOCAL_RANK=%d WORLD_SIZE=%d LOCAL_WORLD_SIZE=%d OMP_NUM_THREADS=1 "
      .. "MASTER_ADDR=127.0.0.1 MASTER_PORT=1 '%s' '%s/train.lua' '%s' %d >'%s/out%d' 2>&1 & p%d=$!"):format(rank, rank,
      size, size, paths.exe, folder, folder, attempt, folder, rank, rank)
  end
  if seconds then
    parts[#parts + 1] = ("while kill -0 $p0 && [ \"$(cat '%s/log0' | wc -l)\" -lt $((n + %d)) ]; do sleep 0.01; done; "
      .. "sleep %.3f"):format(folder, noted, seconds)
    local one = draw(size)
    for rank = 0, size - 1 do
      if rank == one or draw(2) == 0 then parts[#parts + 1] = ("kill -9 $p%d 2>/dev/null"):format(rank) end
    end
    -- A rank whose group has lost a member ends by itself. The next attempt must not connect to it.
    parts[#parts + 1] = "sleep 0.2"
    for rank = 0, size - 1 do parts[#parts + 1] = ("kill -9 $p%d 2>/dev/null"):format(rank) end
  end
  for rank = 0, size - 1 do parts[#parts + 1] = ("wait $p%d; echo $? >'%s/code%d'"):format(rank, folder, rank) end
  write(folder .. "/start.sh", table.concat(parts, "\n") .. "\n")
  os.execute(("sh '%s/start.sh' 2>/dev/null"):format(folder))
  return tonumber(io.open(folder .. "/code0"):read "*l")
end

-- Returns the records of the last attempt that reached each step: step -> {attempt =, size =, epoch =, loss =, numbers
-- =, ranks =}.
local function steps_of()
  local steps = {}
  for rank = 0, 2 do
    local f = io.open(("%s/log%d"):format(folder, rank))
    for line in f and f:lines() or function() end do
      local attempt, size, step, epoch, loss, numbers = line:match "^(%d+) (%d+) (%d+) (%d+) (%S+) (%S*)$"
      if attempt then
        step, attempt = tonumber(step), tonumber(attempt)
        if not steps[step] or steps[step].attempt < attempt then
          steps[step] = { attempt = attempt, size = tonumber(size), epoch = tonumber(epoch), numbers = {}, ranks = 0 }
        end
        local at = steps[step]
        if at.attempt == attempt then
          at.ranks, at.loss = at.ranks + 1, at.loss or loss
          for id in numbers:gmatch "%d+" do at.numbers[#at.numbers + 1] = tonumber(id) end
        end
      end
    end
    if f then f:close() end
  end
  return steps
end

local function check_examples(steps)
  local seen = {}
  for step = 1, #steps do
    local at = steps[step]
    assert.equal(at.size, at.ranks, ("step %d of attempt %d"):format(step, at.attempt))
    seen[at.epoch] = seen[at.epoch] or {}
    for _, id in ipairs(at.numbers) do
      assert(not seen[at.epoch][id], ("example %d twice in epoch %d"):format(id, at.epoch))
      seen[at.epoch][id] = true
    end
  end
  for epoch = 0, EPOCHS - 1 do
    for id = 1, EXAMPLES do assert(seen[epoch][id], ("example %d is missing in epoch %d"):format(id, epoch)) end
  end
end

before_each(function()
  seed = tonumber(os.getenv "PS_KILL_SEED") or os.time() % 100000 + 1
  folder = lib.folder()
  write(folder .. "/train.lua", (TRAIN:gsub("EXAMPLES", EXAMPLES):gsub("EPOCHS", EPOCHS)))
end)
after_each(function() lib.remove(folder) end)

local function killed(sizes)
  local began = seed
  local ok, problem = pcall(function()
    for attempt = 1, KILLS do
      start(sizes[(attempt - 1) % #sizes + 1], attempt, 1 + draw(MOST_STEPS), draw(30) / 1000)
    end
    local code = start(sizes[#sizes], KILLS + 1)
    assert.equal(0, code, io.open(folder .. "/out0"):read "*a")
    local steps, attempts, different = steps_of(), {}, 0
    check_examples(steps)
    for _, at in ipairs(steps) do
      if not attempts[at.attempt] then attempts[at.attempt], different = true, different + 1 end
    end
    assert(different > KILLS / 3, ("only %d of %d attempts came to a step that stayed"):format(different, KILLS))
  end)
  if not ok then error(("PS_KILL_SEED=%d: %s"):format(began, tostring(problem)), 0) end
end

describe("packed rows of a mixture, in a run that is killed,", function()
  it("occur once per epoch, with the bits of a run without kills", function()
    assert.equal(0, start(1, 0), io.open(folder .. "/out0"):read "*a")
    local want = steps_of()
    check_examples(want)
    lib.remove(folder)
    folder = lib.folder()
    write(folder .. "/train.lua", (TRAIN:gsub("EXAMPLES", EXAMPLES):gsub("EPOCHS", EPOCHS)))
    killed { 1 }
    local got = steps_of()
    assert.equal(#want, #got)
    for step, at in ipairs(want) do assert.same({ at.loss, at.numbers }, { got[step].loss, got[step].numbers }) end
  end)

  it("occur once per epoch on 1, 2 and 3 ranks in turn", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    killed { 1, 2, 3 }
  end)
end)
