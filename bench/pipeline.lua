-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/pipeline.lua [--tick 0.025] [--rounds 2]: measures the time that pipelines need in addition to the
-- computation. Starts 4 ranks whose actions take a modelled time (p = 4, m = 8, forward = input = weight = 1 tick), and
-- prints one JSON line. The figures for each schedule are:
--   makespan         in ticks, by the executor's virtual clock, with free links
--   bubble           share of the makespan in which ranks are idle
--   bubble_links     bubble if messages take time on the links
--   linked_as_simulated   true if the times of each rank are exactly the simulator's times
--   bubble_wall      bubble by the wall clock, where each action sleeps for its modelled time (the best of --rounds)
--   in_flight        for each rank, the largest number of pairs (virtual stage, micro-batch) that it held at a time
--   cut_over_best    the simulated makespan of the engine's cut into stages, divided by the makespan of the best of all
--                    cuts (GPT-2's 12 layers and head, 8 virtual stages)
--   makespan_over_equal   the cut's makespan divided by the makespan with equal numbers of layers, where the last
--                         layers also have the head
--   makespan_over_bound   the cut's makespan divided by a lower bound for all cuts, which is usually set by the head
-- The figures of training are from 5 steps of a small untied GPT-2 with 8 layers in bf16. With --clock-only, these
-- figures are absent:
--   same_bits_schedules, same_bits_one_rank    true if parameters and averages are the same under all schedules, and in
--                                              one process
--   hashes           the hash of each run
--   traffic_mib      MiB that all ranks move between memory and disk in a step in fp32. The state is three times as
--                    large as the ranks' budgets.
--   bfs_traffic_ratio   the traffic of looped_bfs divided by the traffic of 1f1b, and divided by the traffic of
--                       interleaved
--   traffic_bound_mib   a lower bound of the traffic for the same ops in the same memory (bench/bound_lib.lua). The
--                       figure is absent if glpsol is not installed.
local ps = require "ps"
local engine_of = require("ps.nn.handle").of
local argparse = require "argparse"
local cjson = require "cjson"
local lfs = require "lfs"
local array = require "ps.core.array"
local bound = require "bench.bound_lib"
local command_line = require "ps.core.command_line"
local paths = require "ps.paths"
local pipe_table = require "ps.parallel.pipeline.table"
local time = require "posix.time"
local ffi, C, check = ps.ffi, ps.C, ps.check

local parser = argparse("bench/pipeline.lua", "Measures the cost of pipelines in addition to computation.")
command_line.number(parser:option("--tick", "seconds of a forward, where actions sleep", "0.025"), 0.001, 1)
command_line.whole(parser:option("--rounds", "number of runs of each schedule by the wall clock", "2"), 1)
parser:flag("--clock-only", "no training")
parser:flag("--traffic-only", "measure only the bytes between memory and disk")
parser:option("--train", "(for this script) the schedule of a rank that trains"):hidden(true)
parser:flag("--traffic", "(for this script) the rank trains within budgets"):hidden(true)
parser:option("--out", "(for this script) the file to which rank 0 writes its figures"):hidden(true)
local args = command_line.parse(parser)

local P, M = 4, 8
local SCHEDULES = { "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v" }
local VIRTUAL = { interleaved = 2, looped_bfs = 2, zb_v = 2 }
local WORK = { [C.PS_ACT_FORWARD] = 1, [C.PS_ACT_BACKWARD] = 2, [C.PS_ACT_INPUT] = 1, [C.PS_ACT_WEIGHT] = 1 }
local LINK = { latency = 0.25, rate = 8 }
local cost_array, tensor_array, times_array = array "ps_pipe_cost", array "ps_tensor *", array "ps_pipe_rank_times"

local function table_of(name, stages)
  local v = VIRTUAL[name] or 1
  return pipe_table.table { schedule = name, stages = stages / v, virtual_stages = v, micro_batches = M }
end

-- -- a rank ----------------------------------------------------------------------------------------------------------
-- Performs the actions of this rank. Returns the time at which the first action began, the time at which the last
-- action ended, and the largest number of pairs (virtual stage, micro-batch) that were held at a time.
local function perform(x, t, tick)
  local event, none = ffi.new("ps_pipe_event"), tensor_array(1)
  local first, last, held, most = nil, 0, 0, 0
  check(C.ps_pipe_begin(x, nil, 0, 0))
  while true do
    check(C.ps_pipe_next(x, event))
    local kind = event.kind
    if kind == C.PS_ACT_NONE then return first, last, most end
    local ticks = WORK[kind]
    if ticks then
      first = first or ps.now()
      if kind == C.PS_ACT_FORWARD then held = held + 1 end
      most = math.max(most, held)
      if tick > 0 then time.nanosleep { tv_sec = 0, tv_nsec = ticks * tick * 1e9 } end
      if kind == C.PS_ACT_BACKWARD or kind == C.PS_ACT_INPUT then held = held - 1 end
      last = ps.now()
    end
    local gives = kind == C.PS_ACT_FORWARD and event.vstage < t.vstages - 1
    if gives then
      local carry = ps.zeros { 256 }
      none[0] = carry
      check(C.ps_pipe_done(x, 1, none))
    else
      check(C.ps_pipe_done(x, 0, nil))
    end
  end
end

-- Returns the times of this rank by the virtual clock. Also returns true if all of these times equal the simulator's
-- times.
local function virtual(x, t, rank, link)
  local costs, times, spans = cost_array(t.vstages), times_array(1), ffi.new "const ps_pipe_span *[1]"
  local cost = { forward = 1, input = 1, weight = 1, nbytes = 4 }
  for v = 0, t.vstages - 1 do for key, value in pairs(cost) do costs[v][key] = value end end
  local c_link = ffi.new("ps_pipe_link")
  for key, value in pairs(link) do c_link[key] = value end
  check(C.ps_pipe_clock(x, costs, c_link))
  local _, _, most = perform(x, t, 0)
  check(C.ps_pipe_measured(x, times, spans))
  local same = 1
  for i, span in ipairs(t:simulate(cost, link).spans[rank + 1]) do
    if span.begin ~= spans[0][i - 1].begin or span.finish ~= spans[0][i - 1]["end"] then same = 0 end
  end
  return times[0].last, times[0].busy, most, same
end

local function rank_main()
  local group = ps.init_distributed { seed = 1, quiet = true }
  local rank, out, carry = group:rank(), {}, ffi.new("ps_pipe_tensor")
  carry.dtype, carry.ndim, carry.shape[0] = C.PS_F32, 1, 256
  for _, name in ipairs(SCHEDULES) do
    local t, opened = table_of(name, P * (VIRTUAL[name] or 1)):lower(), ffi.new("ps_pipe *[1]")
    check(C.ps_pipe_open(ps.ctx, t.c, group.c, opened))
    local x, mine = opened[0], {}
    for v = 0, t.vstages - 2 do for i = 0, M - 1 do check(C.ps_pipe_expect(x, v, i, 1, carry)) end end
    local last, busy, most = virtual(x, t, rank, {})
    local linked_last, linked_busy, _, same = virtual(x, t, rank, LINK)
    check(C.ps_pipe_clock(x, nil, nil))
    for _ = 1, args.rounds do
      group:barrier()
      local began, ended = perform(x, t, args.tick)
      mine[#mine + 1], mine[#mine + 2] = began, ended
    end
    C.ps_pipe_close(x)
    mine = { last, busy, most, linked_last, linked_busy, same, unpack(mine) }
    local all = ps.empty({ P, #mine }, { dtype = "fp64" })
    group:all_gather(all, ps.tensor(mine, { dtype = "fp64" }))
    out[name] = all:tolist()
  end
  if rank == 0 then
    local f = assert(io.open(args.out, "w"))
    f:write(cjson.encode(out))
    f:close()
  end
end

-- -- a rank that trains ----------------------------------------------------------------------------------------------
local hash_out = ffi.new "uint64_t[1]"

-- Writes a line for each tensor of the model and the optimizer on this rank. The line has the name and the hash of the
-- tensor.
local function write_hashes(path, model, optimizer)
  local f = assert(io.open(path, "w"))
  local function write(name, value)
    if ps.is_tensor(value) then
      check(C.ps_tensor_hash(value:contiguous(), hash_out))
      f:write(name, " ", ("%016x"):format(hash_out[0]), "\n")
    elseif type(value) == "table" then
      for key, inner in pairs(value) do write(name .. "/" .. key, inner) end
    end
  end
  write("model", model:state_dict())
  write("optimizer", { optimizer:state_dict(model) })
  f:close()
end

-- Trains with a memory budget of a third of the state's size. Returns the number of bytes that the last step moved. The
-- activations of a micro-batch are large (64 KiB), because tensors of this size are freed as soon as they are no longer
-- needed, and not only when Lua collects garbage.
local POSITIONS = 64
local TRAFFIC = { n_layer = 16, n_embd = 256, n_head = 4, n_positions = POSITIONS, tie_word_embeddings = false,
  dropout = 0 }

-- Writes the figures of a rank: the numbers of bytes that were moved, that are held and that chunks can use, and the
-- uses of chunks in a step.
local function write_traffic(path, moved, model)
  local tier, info, nbytes = require("ps.memory.chunks").tiers()[1], ffi.new("ps_trace_info"), {}
  local id = select(2, next(engine_of(model).traces))
  check(C.ps_engine_trace_get(ps.ctx, id, info, 0, nil))
  local uses = array("ps_use")(info.n_uses)
  check(C.ps_engine_trace_get(ps.ctx, id, info, info.n_uses, uses))
  for _, chunk in ipairs(ps.chunks()) do nbytes[chunk.id] = chunk.nbytes end
  local f = assert(io.open(path, "w"))
  f:write(("%d %d %d %d\n"):format(moved, engine_of(model).built.state_bytes, tier.budget - tonumber(info.other[0]),
    info.n_moments))
  for i = 0, info.n_uses - 1 do
    local use = uses[i]
    f:write(("%d %d %d %d %d\n"):format(use.moment, use.chunk, nbytes[use.chunk], use.write, use.ends))
  end
  assert(f:close())
end

local function traffic_main()
  local rank = ps.init_distributed({ seed = 1, quiet = true }):rank()
  local model, optimizer = ps.initialize { quiet = true, model_func = function()
    return require("models.gpt2").new("tiny", TRAFFIC)
  end, config = { gradient_accumulation_steps = M, plan_print = false, chunk_size = 262144, recompute = true,
    optimizer = { type = "AdamW", params = { lr = 1e-3 } }, overlap_optimizer = true,
    pipeline = { stages = P, schedule = args.train, virtual_stages = VIRTUAL[args.train], partition = "parameters" },
    memory = { host = "16860KiB", disk = { path = args.out .. ".disk", limit = "128MiB" } } } }
  local function moved()
    check(C.ps_engine_settle(ps.ctx))
    local sum = 0
    for _, tier in ipairs(require("ps.memory.chunks").tiers()) do sum = sum + tier.bytes_up + tier.bytes_down end
    return sum
  end
  local before, last
  for _ = 1, 4 do
    before = moved()
    local x = ps.randint(0, 256, { M, POSITIONS }, { dtype = "int32" })
    optimizer:zero_grad()
    for out in model:micro_batches(x, x) do model:backward(out.loss) end
    optimizer:step()
    last = moved() - before
  end
  write_traffic(args.out .. "." .. rank, last, model)
  model:close()
end

local function train_main()
  local rank, config = 0, { gradient_accumulation_steps = M, plan_print = false, bf16 = { enabled = true },
    optimizer = { type = "AdamW", params = { lr = 1e-2 } } }
  if args.train ~= "one" then
    rank = ps.init_distributed({ seed = 1, quiet = true }):rank()
    config.pipeline = { stages = P, schedule = args.train, virtual_stages = VIRTUAL[args.train] }
  end
  local model, optimizer = ps.initialize { config = config, quiet = true, model_func = function()
    ps.manual_seed(1)
    return require("models.gpt2").new("tiny", { n_layer = 8, tie_word_embeddings = false, dropout = 0.1 })
  end }
  for step = 1, 5 do
    ps.manual_seed(step)
    local x = ps.randint(0, 256, { 2 * M, 16 }, { dtype = "int32" })
    optimizer:zero_grad()
    for out in model:micro_batches(x, x) do model:backward(out.loss) end
    optimizer:step()
  end
  write_hashes(args.out .. "." .. rank, model, optimizer)
  model:close()
end

-- -- figures of all ranks --------------------------------------------------------------------------------------------
local function run()
  local out = os.tmpname()
  local command = ("'%s' '%s/tools/launch.lua' --nproc-per-node %d '%s' --tick %.6f --rounds %d --out %s 1>&2"):format(
    paths.exe, paths.root, P, paths.root .. "/bench/pipeline.lua", args.tick, args.rounds, out)
  if os.execute(command) ~= 0 then
    io.stderr:write("bench/pipeline.lua: the ranks failed; their output says why\n")
    os.exit(1)
  end
  local f = assert(io.open(out))
  local rows = cjson.decode(f:read "*a")
  f:close()
  os.remove(out)
  return rows
end

-- Trains with a schedule, or in one process. Returns one hash over the hashes of all tensors. If two ranks have
-- different hashes for the same tensor, both hashes are included.
local function hash_of(name)
  local out, hashes, names = os.tmpname(), {}, {}
  local ranks = name == "one" and 1 or P
  local command = ("OMP_NUM_THREADS=1 '%s' '%s/tools/launch.lua' --nproc-per-node %d '%s' --train %s --out %s 1>&2")
    :format(paths.exe, paths.root, ranks, paths.root .. "/bench/pipeline.lua", name, out)
  if os.execute(command) ~= 0 then
    io.stderr:write("bench/pipeline.lua: training failed; the output of the ranks says why\n")
    os.exit(1)
  end
  for rank = 0, ranks - 1 do
    for line in io.lines(out .. "." .. rank) do
      local tensor, hash = line:match "^(.*) (%x+)$"
      if hashes[tensor] and hashes[tensor] ~= hash then hash = hashes[tensor] .. "/" .. hash end
      hashes[tensor] = hash
    end
    os.remove(out .. "." .. rank)
  end
  os.remove(out)
  for tensor in pairs(hashes) do names[#names + 1] = tensor end
  table.sort(names)
  for i, tensor in ipairs(names) do names[i] = tensor .. " " .. hashes[tensor] end
  local all = table.concat(names, "\n")
  local bytes = ps.empty({ #all }, { dtype = "uint8" })
  check(C.ps_tensor_write(bytes, all, #all))
  check(C.ps_tensor_hash(bytes, hash_out))
  return ("%016x of %d tensors"):format(hash_out[0], #names)
end

-- Returns the figures that a rank wrote: the number of bytes moved, the number of bytes held, and a lower bound of the
-- number of bytes that must be moved, or nil if the bound is unknown.
local function read_traffic(path)
  local f, trace, number = assert(io.open(path)), { sizes = {}, uses = {} }, {}
  local moved, held, capacity, moments = f:read("*n", "*n", "*n", "*n")
  trace.moments = moments
  for moment, chunk, nbytes, write, ends in function() return f:read("*n", "*n", "*n", "*n", "*n") end do
    if not number[chunk] then
      trace.sizes[#trace.sizes + 1] = nbytes
      number[chunk] = #trace.sizes
    end
    trace.uses[#trace.uses + 1] = { moment = moment, chunk = number[chunk], write = write == 1, ends = ends == 1 }
  end
  f:close()
  return moved, held, bound.available() and bound.solve(trace, capacity) or nil
end

-- Returns three numbers for all ranks together: the MiB that they move in a step, the MiB of their state, and a lower
-- bound of the MiB that must be moved.
local function traffic_of(name)
  local out, moved, state, least = os.tmpname(), 0, 0, 0
  assert(lfs.mkdir(out .. ".disk"))
  local command = ("OMP_NUM_THREADS=1 '%s' '%s/tools/launch.lua' --nproc-per-node %d '%s' --train %s --traffic "
    .. "--out %s 1>&2"):format(paths.exe, paths.root, P, paths.root .. "/bench/pipeline.lua", name, out)
  if os.execute(command) ~= 0 then
    io.stderr:write("bench/pipeline.lua: training failed; the output of the ranks says why\n")
    os.exit(1)
  end
  for rank = 0, P - 1 do
    local bytes, held, floor = read_traffic(out .. "." .. rank)
    moved, state = moved + bytes / 2 ^ 20, state + held / 2 ^ 20
    least = least and floor and least + floor / 2 ^ 20
    os.remove(out .. "." .. rank)
  end
  lfs.rmdir(out .. ".disk")
  os.remove(out)
  return moved, state, least
end

local function most(rows, i)
  local value = -math.huge
  for _, row in ipairs(rows) do value = math.max(value, row[i]) end
  return value
end

-- Returns the share of the ranks' total time in which they do not compute.
local function bubble(rows, last, busy)
  local makespan, sum = most(rows, last), 0
  for _, row in ipairs(rows) do sum = sum + row[busy] end
  return (makespan * P - sum) / (makespan * P)
end

local function bubble_wall(rows)
  local best = 1
  for round = 1, args.rounds do
    local began, ended = math.huge, most(rows, 6 + 2 * round)
    for _, row in ipairs(rows) do began = math.min(began, row[5 + 2 * round]) end
    best = math.min(best, 1 - rows[1][2] * args.tick / (ended - began))       -- all ranks have the same amount of work
  end
  return best
end

-- -- cuts ------------------------------------------------------------------------------------------------------------
local LAYER, HEAD = 12 * 768 ^ 2, 768 * 50257                  -- number of multiplications per token

local function makespan_of(t, parts, counts)
  local costs, at, times = cost_array(t.vstages), 0, ffi.new("ps_pipe_times")
  for v = 0, t.vstages - 1 do
    for _ = 1, counts[v + 1] do
      at = at + 1
      costs[v].forward = costs[v].forward + parts[at].forward
    end
    costs[v].input, costs[v].weight = costs[v].forward, costs[v].forward
  end
  check(C.ps_pipe_simulate(t.c, costs, nil, times, nil, nil))
  return times.makespan
end

-- Calls fn(counts) for each way to divide n layers into v consecutive groups.
local function each_cut(n, v, fn, counts)
  counts = counts or {}
  if v == 1 then
    counts[#counts + 1] = n
    fn(counts)
    counts[#counts] = nil
    return
  end
  for size = 1, n - v + 1 do
    counts[#counts + 1] = size
    each_cut(n - size, v - 1, fn, counts)
    counts[#counts] = nil
  end
end

local function cuts(name)
  local t, parts, best = table_of(name, 8), {}, math.huge
  for i = 1, 13 do
    local cost = i == 13 and HEAD or LAYER
    parts[i] = { forward = cost, input = cost, weight = cost }
  end
  local _, times = pipe_table.cut(t, parts)
  each_cut(#parts, t.vstages, function(counts) best = math.min(best, makespan_of(t, parts, counts)) end)
  local equal = makespan_of(t, parts, { 2, 2, 2, 2, 1, 1, 1, 2 })
  return times.makespan / best, times.makespan / equal, times.makespan / times.bound
end

if args.traffic then return traffic_main() end
if args.train then return train_main() end
if args.out then return rank_main() end
local result = { bench = "pipeline", stages = P, micro_batches = M }
if not args.traffic_only then
  local rows = run()
  for _, key in ipairs { "makespan", "bubble", "bubble_links", "linked_as_simulated", "bubble_wall", "in_flight",
    "cut_over_best", "makespan_over_equal", "makespan_over_bound" } do result[key] = {} end
  for _, name in ipairs(SCHEDULES) do
    local mine, held = rows[name], {}
    for i, row in ipairs(mine) do held[i] = row[3] end
    result.makespan[name] = most(mine, 1)
    result.bubble[name], result.bubble_links[name] = bubble(mine, 1, 2), bubble(mine, 4, 5)
    result.linked_as_simulated[name] = mine[1][6] + mine[2][6] + mine[3][6] + mine[4][6] == P
    result.bubble_wall[name], result.in_flight[name] = bubble_wall(mine), held
    result.cut_over_best[name], result.makespan_over_equal[name], result.makespan_over_bound[name] = cuts(name)
  end
end
if not args.clock_only and not args.traffic_only then
  result.hashes, result.same_bits_schedules = { one = hash_of "one" }, true
  for _, name in ipairs(SCHEDULES) do
    result.hashes[name] = hash_of(name)
    result.same_bits_schedules = result.same_bits_schedules and result.hashes[name] == result.hashes.gpipe
  end
  result.same_bits_one_rank = result.same_bits_schedules and result.hashes.gpipe == result.hashes.one
end
if not args.clock_only then
  result.traffic_mib, result.traffic_bound_mib = {}, {}
  for _, name in ipairs { "1f1b", "interleaved", "looped_bfs" } do
    result.traffic_mib[name], result.traffic_mib.state, result.traffic_bound_mib[name] = traffic_of(name)
  end
  local bfs = result.traffic_mib.looped_bfs
  result.bfs_traffic_ratio = { ["1f1b"] = bfs / result.traffic_mib["1f1b"],
    interleaved = bfs / result.traffic_mib.interleaved }
end
print(cjson.encode(result))
