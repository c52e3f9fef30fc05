-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/profiler_cost.lua [--rounds N] [--steps N] [--count-steps N]: measures the cost of recording events
-- (ps.profiler). Ends with one JSON line:
--   event_ns   nanoseconds per event, in the fastest of --rounds rounds. A loop calls ps_module_enter and
--              ps_module_leave. Such a pair of calls reads the clock twice and adds one event to a ring of the usual
--              size.
--   op_ns      nanoseconds that recording adds to an op (its event, its operations and bytes, and a reading of the
--              memory in use). A loop runs an op that adds two tensors of one element. The figure is the time of the
--              shortest round with recording minus the time of the shortest round without recording, per op.
--   on         the share by which recording lengthens a step of the model of examples/train_char.lua. A round times
--              --steps steps with recording and --steps steps without recording. From round to round, the order of the
--              two changes. The figure is the median of the rounds.
--   off        the share of a step's instructions that belong to recording if recording was not started. callgrind
--              counts the instructions in --count-steps steps of one row, without LuaJIT's compiler. The instructions
--              of recording are those of record.c, of record.h, and of lines that call these files or test a time that
--              they returned. The count is an upper limit, because these lines also record the module and the current
--              action for errors about memory. If nothing was counted, the figure is null, and a line contains the
--              reason. --count-steps 0 skips the figure.
--   instructions, of_record    for `off`: the number of all instructions of a step, and of the instructions that belong
--                              to recording
--   step_ms, events            milliseconds of a step without recording, and number of events of a step
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local whole = command_line.whole

local parser = argparse("bench/profiler_cost.lua", "Measures the cost of the record of events.")
whole(parser:option("--rounds", "number of measurements of each figure", "100"), 1)
whole(parser:option("--steps", "steps of the model in a round, with the record and without", "4"), 1)
whole(parser:option("--count-steps", "steps whose instructions are counted; 0: none", "2"), 0)
parser:flag("--only-steps", "only train --count-steps steps, for a count of their instructions")
local args = command_line.parse(parser)

local cjson = require "cjson"
local ps = require "ps"
local gpt2 = require "models.gpt2"
local instructions = require "bench.instructions_lib"
local optim = require "ps.optim"
local paths = require "ps.paths"
local C = ps.C

local EVENTS, CALLS, ROWS, WARM = 2 ^ 18, 2 ^ 14, 12, 3

local function median(list)
  table.sort(list)
  local half = #list / 2
  return (list[math.ceil(half)] + list[math.floor(half) + 1]) / 2
end

-- Returns the seconds that fn(n) takes.
local function seconds(fn, n)
  local began = ps.now()
  fn(n)
  return ps.now() - began
end

local function event_pairs(n)
  for _ = 1, n do C.ps_module_leave(C.ps_module_enter(1)) end
end

local function event_seconds()
  local least = math.huge
  ps.profiler.start { events = EVENTS }
  for _ = 1, args.rounds do least = math.min(least, seconds(event_pairs, EVENTS)) end
  ps.profiler.stop()
  return least / EVENTS
end

-- Measures fn(n) with and without recording, alternately. Returns a list of the seconds with recording and a list of
-- the seconds without recording, one entry per round.
local function in_turn(fn, n)
  local on, off = {}, {}
  local function one(times, record)
    if record then ps.profiler.start { events = EVENTS } end
    fn(1)  -- a warm-up, because clearing the ring has filled the caches with other bytes
    times[#times + 1] = seconds(fn, n)
    ps.profiler.stop()
  end
  for round = 1, args.rounds do
    one(round % 2 == 1 and off or on, round % 2 == 0)
    one(round % 2 == 1 and on or off, round % 2 == 1)
  end
  return on, off
end

local function op_seconds()
  local x, y = ps.zeros { 1 }, ps.ones { 1 }
  local on, off = in_turn(function(n)
    for _ = 1, n do x:add_(y) end
  end, CALLS)
  return (math.min(unpack(on)) - math.min(unpack(off))) / CALLS
end

-- Trains the model of train_char.lua for n steps on a constant batch.
local function trainer(rows)
  ps.manual_seed(1)
  local model = gpt2.new({ vocab_size = 256, n_positions = 64, n_layer = 4, n_head = 4, n_embd = 128 },
    { dtype = ps.fast_dtype() })
  local opt = optim.AdamW(model, { lr = 1e-3, betas = { 0.9, 0.99 }, weight_decay = 0.1, max_norm = 1.0 })
  local x = ps.randint(0, 256, { rows, 64 }, { dtype = "int32" })
  return function(n)
    for _ = 1, n do
      model(x, x):backward()
      opt:step()
      opt:zero_grad()
    end
  end
end

-- Returns the fraction that recording adds to a step, the seconds of a step without recording, and the number of events
-- in a step with recording.
local function step_cost(train)
  local on, off = in_turn(train, args.steps)
  for i = 1, #on do on[i] = on[i] / off[i] - 1 end
  local dropped = ps.ffi.new "int64_t[1]"                    -- the last recording contains the warm-up step and the
                                                             -- measured steps
  local events = tonumber(C.ps_record_count(dropped) + dropped[0]) / (args.steps + 1)
  return median(on), median(off) / args.steps, events
end

-- Runs the steps that callgrind counts. The count begins with the call of ps_record_stop and ends with the call of
-- ps_record_is_on.
local function counted_steps()
  local train = trainer(1)
  train(1)
  C.ps_record_stop()
  train(args.count_steps)
  C.ps_record_is_on()
end

local function of_record(file, text)
  return file == "base/record.c" or file == "base/record.h" or text:find("ps_record_", 1, true) ~= nil
    or text:find "%f[%w_]began%f[^%w_]" ~= nil
end

-- Returns the number of instructions of a step, and the number of them that belong to recording. If no instructions
-- were counted, returns nil and the reason.
local function counted()
  if args.count_steps == 0 then return nil, "left out" end
  local command = ("'%s' -joff '%s/bench/profiler_cost.lua' --only-steps --count-steps %d"):format(paths.exe,
    paths.root, args.count_steps)
  local counts, why = instructions.count(command, "ps_record_stop", "ps_record_is_on")
  if not counts then return nil, why end
  local sum, all = instructions.of(counts, of_record)
  if all == 0 then return nil, "psluajit was built without -g" end
  return counts.total / args.count_steps, sum / args.count_steps
end

local function round(x) return tonumber(("%.4g"):format(x)) end

local function main()
  local out = { event_ns = round(event_seconds() * 1e9), op_ns = round(op_seconds() * 1e9) }
  local train = trainer(ROWS)
  train(WARM)
  local on, seconds_off, events = step_cost(train)
  out.on, out.step_ms, out.events = round(on), round(1e3 * seconds_off), round(events)
  print(("an event %.1f ns, per op %.1f ns; on: %+.2f %% of a step of %.3f ms with %.0f events"):format(out.event_ns,
    out.op_ns, 100 * out.on, out.step_ms, out.events))
  local all, sum = counted()
  if all then
    out.instructions, out.of_record, out.off = round(all), round(sum), round(sum / all)
    print(("off: %.0f of %.4g instructions per step, %.4f %%"):format(sum, all, 100 * sum / all))
  else
    out.off = cjson.null
    print("off: not counted: " .. sum)
  end
  print(cjson.encode(out))
end

if args.only_steps then counted_steps() else main() end
