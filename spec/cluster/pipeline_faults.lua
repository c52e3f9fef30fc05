-- SPDX-License-Identifier: BSD-3-Clause
-- Causes faults in each kind of action of a pipeline, on each rank, and prints the other ranks' errors and the seconds
-- until them. Run it by hand. Three ranks train under zb_h1; in their second step one of them has the fault.
--   psluajit spec/cluster/pipeline_faults.lua [FAULTS [ACTIONS [RANKS]]]     e.g. "kill stop" "F W" 1
-- FAULTS: kill (SIGKILL), stop (SIGSTOP for 6 s), lua (an error in Lua), memory (every request fails), disk (every
-- write fails, as on a full disk). ACTIONS: F, B, W, REDUCE, YIELD, NORM, UPDATE; B, W and REDUCE run entirely in C,
-- where no error in Lua can occur. PS_SLOW=SECONDS: the duration of an action. Prints a line for each case, which ends
-- with the error of the lowest other rank. The exit code is 1 if a rank hung or named no rank.
local lib = require "spec.ranks_lib"

local SCRIPT = [[
  local ps = require "ps"
  local C = ps.C
  local FAULT, ACTION, VICTIM, SLOW = %q, %q, %d, %s
  local folder = %q
  ps.init_distributed { seed = 3, quiet = true, timeout = 20, heartbeat = 1,
    rendezvous = "file://" .. folder .. "/rendezvous" }
  local gpt2, unistd, signal = require "models.gpt2", require "posix.unistd", require "posix.signal"
  local memory = FAULT == "disk" and { host = "4MiB", disk = { path = folder } } or nil
  local model, optimizer = ps.initialize { quiet = true, config = { gradient_accumulation_steps = 4,
      plan_print = false, gradient_clipping = 1, memory = memory, pipeline = { stages = 3, schedule = "zb_h1" } },
    model_func = function() return gpt2.new("tiny", { n_layer = 3, dropout = 0 }) end }
  local step, at, met = 0, nil, false
  local faults = {
    kill = function() signal.kill(unistd.getpid(), signal.SIGKILL) end,
    stop = function()
      local pid = unistd.getpid()
      os.execute(("(sleep 6; kill -CONT %%d) >/dev/null 2>&1 &"):format(pid))
      signal.kill(pid, signal.SIGSTOP)
    end,
    lua = function() error("no such luck", 0) end,
    memory = function() C.ps_test_fail_alloc(0, 2 ^ 40) end,
    disk = function() C.ps_test_fail_io(0, 2 ^ 40, 28) end          -- ENOSPC,
  }
  local function action(name)
    if step ~= 2 then return end
    if SLOW > 0 then os.execute("sleep " .. SLOW) end
    if met or name ~= ACTION or ps.rank() ~= VICTIM then return end
    met = true
    faults[FAULT]()
  end
  -- C performs B, W and REDUCE before it reaches an event. Signals arrive during them, and memory and disk fail from
  -- the previous event on.
  local IN_C = { B = C.PS_ACT_INPUT, W = C.PS_ACT_WEIGHT, REDUCE = C.PS_ACT_REDUCE }
  local own = {}
  for _, kind in pairs(IN_C) do own[kind] = true end
  local SIGNALS = { kill = signal.SIGKILL, stop = signal.SIGSTOP }
  local row, events = require("ps.nn.handle").of(model).driver.pipe:actions(4), 0
  local function follows()                                        -- whether the action precedes the next event
    local n = 0
    for _, action in ipairs(row) do
      local kind, _, micro = unpack(action)
      if not own[kind] then n = n + 1 end
      if n > events then return false end
      if n == events and kind == IN_C[ACTION] and (ACTION == "REDUCE" or micro > 0) then return true end
    end
    return false
  end
  local function plant()
    if step ~= 2 or met or not IN_C[ACTION] or ps.rank() ~= VICTIM then return end
    if SIGNALS[FAULT] then
      met = true
      if FAULT == "stop" then
        os.execute(("(sleep 7; kill -CONT %%d) >/dev/null 2>&1 &"):format(unistd.getpid()))
      end
      C.ps_test_signal(IN_C[ACTION], ACTION == "REDUCE" and 0 or 1, SLOW, SIGNALS[FAULT])
    elseif FAULT ~= "lua" and follows() then
      met = true
      faults[FAULT]()
    end
  end
  local names = { [C.PS_ACT_FORWARD] = "F", [C.PS_ACT_YIELD] = "YIELD" }
  local function before(object, method, tell)
    local was = object[method]
    object[method] = function(...)
      tell()
      return was(...)
    end
  end
  local engine = require("ps.nn.handle").of(model)
  local pipe, own_optimizer = engine.driver.pipe, engine.optimizer
  local next_action = pipe.next
  function pipe:next()
    plant()
    local kind, v, micro = next_action(self)
    if step == 2 and kind and kind ~= C.PS_ACT_YIELD then events = events + 1 end
    if kind and micro > 0 then action(names[kind]) end
    return kind, v, micro
  end
  before(own_optimizer, "norm", function() action "NORM" end)
  before(own_optimizer, "update", function() action "UPDATE" end)
  local ok, problem = pcall(function()
    for s = 1, 20 do
      step = s
      ps.manual_seed(s)
      local x = ps.randint(0, 250, { 8, 16 }, { dtype = "int32" })
      optimizer:zero_grad()
      if step == 2 then at = ps.now() end
      for out in model:micro_batches(x, x) do model:backward(out.loss) end
      optimizer:step()
    end
  end)
  local words = ok and "nothing" or tostring(problem):gsub("\n", " ")
  print(("told after %%.1f s: %%s"):format(ps.now() - (at or ps.now()), words))
  if not ok and ps.rank() == VICTIM then error(problem, 0) end
]]

local faults = arg[1] or "kill stop lua memory disk"
local actions, victims = arg[2] or "F B W REDUCE YIELD NORM UPDATE", arg[3] or "0 1 2"
local slow = tonumber(os.getenv "PS_SLOW" or 0)
local folder, failed = lib.folder(), false

local function meets(fault, action) return fault ~= "lua" or not ({ B = 1, W = 1, REDUCE = 1 })[action] end

for fault in faults:gmatch "%a+" do
  for action in actions:gmatch "%a+" do
    for victim in meets(fault, action) and victims:gmatch "%d+" or function() end do
      local all = lib.run(folder, 3, SCRIPT:format(fault, action, victim, slow, folder),
        fault == "disk" and "PS_STRESS=1" or nil)               -- chunks move to the disk and back at every pin
      local line, said = {}, nil
      for rank = 0, 2 do
        local seconds, words = all[rank].text:match "told after ([%d.]+) s: ([^\n]*)"
        if rank ~= tonumber(victim) then
          local named = words and words:find("rank " .. victim .. " (", 1, true)
          local stage = words and words:find("stage %d of pp")
          line[#line + 1] = not words and "silent" or ("%s s, %s%s"):format(seconds, named and "named" or "NOT NAMED",
            stage and ", action and stage" or "")
          failed = failed or not named
          said = said or words or all[rank].text
        end
      end
      print(("%-6s %-6s on rank %s: %s | %s: %s"):format(fault, action, victim, line[1], line[2], said:sub(1, 300)))
      io.stdout:flush()
    end
  end
end
lib.remove(folder)
os.exit(failed and 1 or 0)
