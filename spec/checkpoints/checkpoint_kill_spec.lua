-- SPDX-License-Identifier: BSD-3-Clause
-- Processes are killed (SIGKILL) at random times while they train and save every step, also while they write and
-- commit. Every resume succeeds, also on other numbers of ranks, and has the losses of a run without kills. PS_FULL=1
-- kills 300 times; PS_KILL_SEED=n repeats the draws of one run (the times depend on the machine).
local lfs = require "lfs"
local lib = require "spec.ranks_lib"
local paths = require "ps.paths"

local KILLS = os.getenv "PS_FULL" == "1" and 200 or 6
local STEPS = 100                                          -- number of steps in a run; then another run begins

-- Trains, saves each step, and records each loss. Arguments: folder, log, "none" or async, and form.
local TRAIN = [[
  local ffi = require "ffi"
  ffi.cdef "unsigned alarm(unsigned seconds);"
  ffi.C.alarm(60)                                          -- ends ranks that hang
  local ps = require "ps"
  local folder, log, how = arg[1], arg[2], arg[3]
  local checkpoints = ps.checkpoints
  local group = tonumber(os.getenv "WORLD_SIZE" or 1) > 1
    and ps.init_distributed { quiet = true, timeout = 20, rendezvous = "file://" .. folder .. "/rendezvous" }
  local rank, size = ps.rank(), ps.world_size()
  ps.manual_seed(11)
  local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, optimizer = { type = "AdamW",
    params = { lr = 1e-3 } } }, model_func = function()
    return ps.nn.Sequential(ps.nn.Linear(24, 40), ps.nn.ReLU(), ps.nn.Dropout(0.1), ps.nn.Linear(40, 24))
  end }
  local loader = ps.data.loader { file = log .. ".text", batch = 12 / size, seq = 24, seed = 2, vocab = 256 }
  local parts = { model = model, optimizer = optimizer, loader = loader, keep = 3, quiet = true,
    async = how:find("async", 1, true) ~= nil, shards = how:find("folder", 1, true) ~= nil }
  if checkpoints.find(folder .. "/run") then
    local from = checkpoints.load(folder .. "/run", parts)
    assert(#from.skipped == 0, "a checkpoint was damaged by a kill")
  end
  local out = assert(io.open(log, "a"))
  out:setvbuf "line"
  if rank == 0 then out:write(("resumed %d\n"):format(optimizer.steps)) end
  while optimizer.steps < STEPS do
    local x, y = loader:next()
    optimizer:zero_grad()
    local difference = model(x:to "fp32" / 100) - y:to "fp32" / 100
    local loss = (difference * difference):mean()
    local value = ps.tensor({ loss:item() / size }, { dtype = "fp64" })
    model:backward(loss)
    optimizer:step()
    if group then group:all_reduce(value) end
    if rank == 0 then out:write(("%d %.9g\n"):format(optimizer.steps, value:item())) end
    if how ~= "none" then checkpoints.save(folder .. "/run", parts) end
  end
  if rank == 0 then out:write "end\n" end
]]

local folder, seed, wanted

local function write(name, text)
  local f = assert(io.open(name, "wb"))
  f:write(text)
  f:close()
end

local function lines(name)
  local list = {}
  for line in io.lines(name) do list[#list + 1] = line end
  return list
end

-- A small random generator, since LuaJIT's generator has shared state.
local function draw(n)
  seed = (seed * 16807) % 2147483647
  return seed % n
end

-- Starts `size` ranks. Kills the ranks in `victims`, in this order, `seconds` after the log has `noted` lines, so that
-- the test does not depend on the machine's speed. The other ranks must end by themselves.
local function start(size, how, noted, seconds, victims)
  os.remove(folder .. "/rendezvous")
  local parts = {}
  for rank = 0, size - 1 do
    parts[#parts + 1] = ("RANK=%d LOCAL_RANK=%d WORLD_SIZE=%d LOCAL_WORLD_SIZE=%d OMP_NUM_THREADS=1 "
      .. "MASTER_ADDR=127.0.0.1 MASTER_PORT=1 '%s' "
      .. "'%s/train.lua' '%s' '%s/log' '%s' >'%s/out%d' 2>&1 & p%d=$!"):format(rank,
      rank, size, size, paths.exe, folder, folder, folder, how, folder, rank, rank)
  end
  if seconds then
    parts[#parts + 1] = ("for i in $(seq 2000); do [ \"$(cat '%s/log' 2>/dev/null | wc -l)\" -ge %d ] && break; "
      .. "sleep 0.01; done"):format(folder, noted)
    parts[#parts + 1] = ("sleep %.3f"):format(seconds)
    for _, rank in ipairs(victims) do parts[#parts + 1] = ("kill -9 $p%d 2>/dev/null"):format(rank) end
  end
  for rank = 0, size - 1 do parts[#parts + 1] = ("wait $p%d; echo $? >'%s/code%d'"):format(rank, folder, rank) end
  write(folder .. "/start.sh", table.concat(parts, "\n") .. "\n")
  os.execute(("sh '%s/start.sh' 2>/dev/null"):format(folder))
  local codes = {}
  for rank = 0, size - 1 do codes[rank] = tonumber(lines(("%s/code%d"):format(folder, rank))[1]) end
  return codes
end

-- Compares the lines from `from` on. Returns the last step, and whether the run was complete.
local function check_log(from, exact)
  local list, last, over = lines(folder .. "/log"), 0, false
  for i = from, #list do
    local number, loss = list[i]:match("^(%d+) (%S+)$")
    if number then
      number, last = tonumber(number), tonumber(number)
      local off = math.abs(tonumber(loss) - tonumber(wanted[number]))
      if exact then assert.equal(wanted[number], loss, "step " .. number)
      else assert.truthy(off <= 1e-5 * math.abs(tonumber(loss)), ("step %d: %s, not %s"):format(number, loss,
        wanted[number])) end
    end
    over = over or list[i] == "end"
  end
  return #list + 1, last, over
end

setup(function()
  seed = tonumber(os.getenv "PS_KILL_SEED") or os.time() % 100000 + 1
  folder = os.tmpname()
  os.remove(folder)
  assert(lfs.mkdir(folder))
  local text = {}
  for i = 1, 6000 do text[i] = string.char(32 + (i * i * 3 + i) % 90) end
  write(folder .. "/log.text", table.concat(text))
  write(folder .. "/train.lua", (TRAIN:gsub("STEPS", STEPS)))
end)
teardown(function() os.execute(("rm -r '%s'"):format(folder)) end)

describe("a run that is killed", function()
  -- Records the losses of runs without kills, of one process and of several processes, whose sums are rounded
  -- differently.
  before_each(function()
    os.execute(("rm -rf '%s/run' '%s/log'"):format(folder, folder))
    assert.equal(0, start(1, "none")[0])
    wanted = {}
    for _, line in ipairs(lines(folder .. "/log")) do
      local number, loss = line:match("^(%d+) (%S+)$")
      if number then wanted[tonumber(number)] = loss end
    end
    assert.equal(STEPS, #wanted)
    os.remove(folder .. "/log")
  end)

  local function killed(kills, sizes, exact)
    local from, reached, resumed, began = 1, 0, 0, seed
    local ok, problem = pcall(function()
      for _ = 1, kills do
        local size = sizes[draw(#sizes) + 1]
        local how = (draw(2) == 0 and "async " or "") .. (draw(2) == 0 and "folder" or "file")
        local victims = { draw(size) }
        if draw(2) == 0 then for rank = 0, size - 1 do victims[#victims + 1] = rank end end
        -- The delay begins after the run's first step. In one of four runs it begins at the start or, since the other
        -- ranks would wait for a rank that never arrives, when all ranks have joined.
        local noted = draw(4) > 0 and from + 1 or size > 1 and from or 0
        local codes = start(size, how, noted, draw(300) / 1000, victims)
        for rank = 0, size - 1 do
          local out = io.open(("%s/out%d"):format(folder, rank)):read("*a")
          if codes[rank] ~= 137 and codes[rank] ~= 0 and size == 1 or codes[rank] == 142 then error(out, 0) end
          assert.falsy(out:find("damaged", 1, true), out)
        end
        if not lfs.attributes(folder .. "/log") then write(folder .. "/log", "") end
        local last, over
        local before = from
        from, last, over = check_log(from, exact)
        if from > before then resumed, reached = resumed + 1, last end
        if over then os.execute(("rm -r '%s/run'"):format(folder)) end
      end
    end)
    if not ok then error(("PS_KILL_SEED=%d: %s"):format(began, tostring(problem)), 0) end
    assert.truthy(resumed > kills / 4, ("only %d of %d got as far as a step"):format(resumed, kills))
    assert.equal(0, start(1, "file")[0], io.open(folder .. "/out0"):read("*a"))    -- and runs to the end
    -- A run that was killed after its last step only has to end.
    local _, last, over = check_log(from, exact)
    assert.truthy(over and (last == STEPS or last == 0 and reached == STEPS))
  end

  it("resumes with the same losses", function() killed(KILLS, { 1 }, true) end)

  it("resumes with the same losses on any number of ranks", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    killed(math.floor(KILLS / 2), { 1, 2, 3 }, false)
  end)
end)
