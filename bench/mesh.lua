-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/mesh.lua [--steps 10] [--layouts 2,2,1;...] [--figures-only]: trains a small GPT-2 on meshes of dp, pp
-- and tp, and compares the results with the results of one rank (bench/mesh_lib.lua). The script itself starts up to 8
-- ranks. It prints one JSON line:
--   layouts              for each layout: dp, pp, tp, zero, sgd; the largest relative error of the losses, of the
--                        gradients of all tensors in the first step, and of the gradient norms
--   dropout_masks_equal  true if dropout and attention drop the same elements on two ranks along tp as on one rank
--   tp2_parameter_ratio  number of GPT-2's parameters on one of two ranks, divided by the number of all its parameters
--   sp_activation_ratio  number of bytes that a block keeps for backward on one of two ranks, divided by the number of
--                        bytes that it keeps on a single rank
--   sp_activation_ratio_kept, sp_activation_ratio_pieces
--                        sp_activation_ratio with tp_keep_gathered, and with tp_overlap_comm = 4
--   bytes_over_theory    bytes that a rank sends, divided by the theoretical number of bytes
--     tp                 per layer and micro-batch; in theory 10 * (t - 1) / t times the size of B * T * C numbers
--     tp_pieces          like tp, with tp_overlap_comm = 4
--     tp_kept            like tp, with tp_keep_gathered; in theory the factor is 8 * (t - 1) / t
--     dp                 in a step of ZeRO's stage 1; in theory 2 * (N - 1) / N times the size of all parameters
--     dp_zero_3          like dp, for stage 3; in theory the factor is 3 * (N - 1) / N
--     pp                 messages of the first of two stages; in theory the bytes of the activations [B, T, C] between
--                        the stages
--   plan_175b_s, plan_175b_mib
--                        the figures of bench/planner.lua for a plan of a model of GPT-3's sizes on dp 4 x pp 8 x tp 8
--                        ranks of other machines
--   small_all_reduce_over_gloo, small_all_reduce_p99_over_gloo
--                        seconds of all-reduces of 4 KiB within a planned step of two ranks, divided by the seconds of
--                        Gloo's own calls, which alternate with these all-reduces. The first figure is the ratio of the
--                        medians, and the second is the ratio of the 99th percentiles.
--   small_all_reduce_planned   the share of these all-reduces that followed the plan
--   overlap_ratio        seconds of forward and backward of a block on two ranks of one thread each, divided by the
--                        longer of two times: the time of the block's computation alone, and the time of its exchanges
--                        alone. Rows are exchanged in 4 pieces while products are computed. The rate of the links
--                        (PS_SIM_LINK) is chosen so that the two times are nearly equal.
--   overlap_ratio_composed   overlap_ratio if the exchanges run before and after the products
--   overlap_seconds      median seconds of the computation alone, of the exchanges alone, and of the block in both
--                        forms
local ps = require "ps"
local argparse = require "argparse"
local cjson = require "cjson"
local lfs = require "lfs"
local comms_summary = require "ps.profile.comms_summary"
local command_line = require "ps.core.command_line"
local count = require "ps.engine.pipeline.count"
local mesh_lib = require "bench.mesh_lib"
local paths = require "ps.paths"
local process_lib = require "bench.process_lib"
local tensor_parallel = require "ps.parallel.tensor.cut"
local F = ps.functional

local parser = argparse("bench/mesh.lua", "Models on ranks that are cut along axes, compared with one rank.")
command_line.whole(parser:option("--steps", "of each layout", "10"), 1)
parser:option("--layouts", "dp,pp,tp[,zero[,sgd]] of each, separated by ;")
parser:flag("--figures-only", "no layouts")
parser:flag("--overlap-only", "overlap_ratio alone")
parser:option("--run", "(for this script) a rank's job, in JSON"):hidden(true)
local args = command_line.parse(parser)

-- Each layout is {dp, pp, tp, ZeRO stage, sgd}. sgd is true if the steps use SGD.
local LAYOUTS = { { 2, 1, 1 }, { 1, 2, 1 }, { 1, 1, 2, 0, true }, { 2, 2, 1, 1 }, { 2, 1, 2, 2 }, { 1, 2, 2 },
  { 1, 1, 4 }, { 1, 4, 1 }, { 2, 2, 2, 1, true }, { 4, 1, 2, 3 }, { 1, 2, 4, 0, true }, { 2, 1, 4, 1 }, { 1, 4, 2 },
  { 1, 1, 8 } }
-- 8 heads of width 8. The vocabulary of 250 is a multiple of neither 4 nor 8.
local MODEL = { vocab_size = 250, n_positions = 32, n_embd = 64, n_layer = 4, n_head = 8 }

-- -- a rank ----------------------------------------------------------------------------------------------------------
-- Creates a model without data, sharded for this rank.
local function deferred(preset, options, how)
  local model = ps.deferred(require("models.gpt2").new, preset, options)
  tensor_parallel.cut(model, { group = ps.mesh.group "tp", sequence = true, keep_gathered = how.kept or false,
    pieces = how.pieces, note = function() end })
  return model
end

-- Returns the number of elements in this rank's parameters.
local function numel_of(model)
  local n = 0
  for _, p in ipairs(model:parameters()) do n = n + p:numel() end
  return n
end

-- Returns the number of bytes that block 0 keeps for backward.
local function activations_of(model)
  local x = ps.empty({ 4, 256 }, { dtype = "int32", device = "meta" })
  return count.parts(model, { x, x, n = 2 })[2].activations
end

-- Returns the number of bytes that this rank sends along tp in the first micro-batch of a step of a model with `layers`
-- layers.
local function sent(layers, how)
  ps.manual_seed(1)
  local model = ps.initialize { quiet = true, model_func = function()
    return require("models.gpt2").new({ vocab_size = 64, n_positions = how.T, n_embd = how.C, n_layer = layers,
      n_head = 4 }, { dropout = 0 })
  end, config = { plan_print = false, gradient_accumulation_steps = 2, optimizer = { type = "AdamW" },
    tensor_parallel = { size = 2, tp_keep_gathered = how.kept or false, tp_overlap_comm = how.pieces } } }
  local x, bytes = ps.zeros({ 2 * how.B, how.T }, { dtype = "int32" }), nil
  local group = ps.mesh.group "tp"
  for out in model:micro_batches(x, x) do
    if not bytes then
      local before = group:bytes_sent()
      -- The forward of this micro-batch had already run when `before` was read. Hence a second forward is run and
      -- counted.
      ps.no_grad(function() model.module:train(true)(x:narrow(0, 0, how.B), x:narrow(0, 0, how.B)) end)
      bytes = group:bytes_sent() - before
      before = group:bytes_sent()
      model:backward(out.loss)
      bytes = bytes + group:bytes_sent() - before
    else
      model:backward(out.loss)
    end
  end
  model:close()
  return bytes
end

local function over_theory(kept, pieces)
  local how = { B = 8, T = 128, C = 256, kept = kept, pieces = pieces }
  local layer = sent(3, how) - sent(2, how)
  return layer / ((kept and 8 or 10) / 2 * how.B * how.T * how.C * 4)
end

-- Returns the number of bytes that a rank sends along dp in a step, divided by the theoretical number of bytes for the
-- ZeRO stage. For stages below 3, a rank must send 2 * (N - 1) / N times the size of the parameters: gradients to be
-- summed, and updated values. Stage 3 sends the values in forward and again in backward, so its factor is 3 * (N - 1) /
-- N.
local function data_parallel(stage)
  ps.manual_seed(1)
  local model, optimizer = ps.initialize { quiet = true, model_func = function()
    return require("models.gpt2").new({ vocab_size = 64, n_positions = 64, n_embd = 128, n_layer = 4, n_head = 4 },
      { dropout = 0 })
  end, config = { plan_print = false, optimizer = { type = "AdamW" }, zero_optimization = { stage = stage } } }
  local x, group, mine = ps.zeros({ 2, 64 }, { dtype = "int32" }), ps.mesh.group "dp", 0
  for _ = 1, 2 do                                          -- the second step is counted, because ranks compare their
                                                           -- models in the first step
    local before = group:bytes_sent()
    model:backward(model(x, x))
    optimizer:step()
    mine = group:bytes_sent() - before
  end
  local numel = numel_of(model.module)
  model:close()
  -- averages over all ranks
  local all = group:all_reduce(ps.tensor({ mine }, { dtype = "fp64" })):item() / group:size()
  return all / ((stage == 3 and 3 or 2) * (group:size() - 1) / group:size() * numel * 4)
end

-- Returns the size of the messages that the first of two stages sends in a step of several micro-batches, divided by
-- the size of the activations [B, T, C] between the stages.
local function pipeline()
  local m, B, T = 4, 8, MODEL.n_positions
  local model, optimizer = ps.initialize { quiet = true, model_func = function()
    return require("models.gpt2").new(MODEL, { dropout = 0 })
  end, config = { plan_print = false, optimizer = { type = "AdamW" }, gradient_accumulation_steps = m,
    pipeline = { stages = 2 } } }
  local x, nbytes = ps.zeros({ B, T }, { dtype = "int32" }), 0
  comms_summary.begin({ prof_ops = { "send" } }, false)
  for out in model:micro_batches(x, x) do model:backward(out.loss) end
  optimizer:step()
  comms_summary.stop()
  for _, row in ipairs(comms_summary.log_rows()) do
    if row.op == "send of pp" then nbytes = nbytes + row.bytes * row.count end
  end
  model:close()
  return nbytes / (B * T * MODEL.n_embd * 4)
end

-- Returns the dropout masks of a training forward: the masks of dropout over flat rows, and the masks of attention [B,
-- H, T, T] for this rank's heads. Each mask is a list of 0 and 1, and contains the position of its first number in the
-- whole mask.
local function masks(tp)
  local list, rng = {}, ps.rng()
  local dropout, packed = F.dropout, F.attention_packed
  local function again(fn)  -- calls fn with the same random numbers as the next call
    local op = rng.op
    local mask = ps.no_grad(fn)
    rng.op = op
    return mask
  end
  function F.dropout(x, p, training, part)
    local mask = again(function() return dropout(ps.ones(x:shape()), p, training, part) end)
    list[#list + 1] = { first = part and part.first or 0, whole = not part, mask = mask:ne(0):to("int32"):reshape(-1) }
    return dropout(x, p, training, part)
  end
  function F.attention_packed(qkv, heads, options)
    local mask = again(function()
      -- The value vector of position i is 1 in column i and 0 in the other columns. Hence the output is the matrix of
      -- attention weights.
      local B, T, D = qkv:size(0), qkv:size(1), qkv:size(2) / heads / 3
      local eye = ps.zeros { T, D }
      for i = 0, T - 1 do eye[{ i, i }] = 1 end
      local v = eye:reshape(1, T, 1, D):expand(B, T, heads, D):reshape(B, T, heads * D)
      local given = ps.cat({ ps.zeros { B, T, 2 * heads * D }, v }, 2)
      return packed(given, heads, options):reshape(B, T, heads, D):permute(0, 2, 1, 3):contiguous()
    end)
    list[#list + 1] = { head = options.first_head or 0, shape = mask:shape(),
      mask = mask:ne(0):to("int32"):reshape(-1) }
    return packed(qkv, heads, options)
  end
  ps.manual_seed(1)
  local model = ps.initialize { quiet = true, model_func = function()
    return require("models.gpt2").new({ vocab_size = 64, n_positions = 16, n_embd = 64, n_layer = 2, n_head = 4 },
      { dropout = 0.3 })
  end, config = { plan_print = false, optimizer = { type = "AdamW" }, tensor_parallel = { size = tp } } }
  local x = ps.ones({ 3, 16 }, { dtype = "int32" })
  list = {}
  ps.manual_seed(2)
  ps.no_grad(function() model.module:train(true)(x, x) end)
  F.dropout, F.attention_packed = dropout, packed
  model:close()
  for _, entry in ipairs(list) do entry.mask = entry.mask:tolist() end
  return list
end

local function figures()
  local preset = { n_layer = 2, n_positions = 1024 }
  local function whole() return ps.deferred(require("models.gpt2").new, preset, { dropout = 0.1 }) end
  local function cut(kept, pieces) return deferred(preset, { dropout = 0.1 }, { kept = kept, pieces = pieces }) end
  local all = activations_of(whole())
  return { tp2_parameter_ratio = numel_of(deferred("gpt2", {}, {})) / numel_of(ps.deferred(
      require("models.gpt2").new, "gpt2")),
    sp_activation_ratio = activations_of(cut(false)) / all, sp_activation_ratio_kept = activations_of(cut(true)) / all,
    sp_activation_ratio_pieces = activations_of(cut(false, 4)) / all,
    bytes_over_theory = { tp = over_theory(false), tp_kept = over_theory(true), tp_pieces = over_theory(false, 4) } }
end

-- Measures the small all-reduces of a step's forward. They alternate with Gloo's own all-reduces.
local function latency()
  local group, world, ours, gloo, forwards, planned = nil, nil, {}, {}, 0, 0
  local raw_in, raw_sum = ps.zeros { 1024 }, ps.zeros { 1024 }
  local function exchange()
    for i = -3, 4000 do                            -- the first calls are a warm-up
      local x = ps.zeros { 1024 }
      local began = ps.now()
      group:reduce_from(x)
      local middle = ps.now()
      if forwards > 1 then ps.check(ps.C.ps_group_raw(world.c, 1, raw_sum, raw_in)) end
      if i > 0 then ours[i], gloo[i] = middle - began, ps.now() - middle end
    end
  end
  local model, optimizer = ps.initialize { quiet = true, model_func = function()
    local model = require("models.gpt2").new({ vocab_size = 64, n_positions = 16, n_embd = 64, n_layer = 1,
      n_head = 4 }, { dropout = 0 })
    local forward = model.forward
    rawset(model, "forward", function(...)
      forwards = forwards + 1                      -- the first forward belongs to the dry run
      local before = tonumber(ps.C.ps_group_planned(group.c))
      ps.no_grad(exchange)
      planned = tonumber(ps.C.ps_group_planned(group.c)) - before
      return forward(...)
    end)
    return model
  end, config = { plan_print = false, optimizer = { type = "AdamW" }, tensor_parallel = { size = 2 } } }
  group, world = ps.mesh.group "tp", ps.mesh.group "world"
  local x = ps.zeros({ 2, 16 }, { dtype = "int32" })
  model:backward(model(x, x))
  optimizer:step()
  model:close()
  table.sort(ours)
  table.sort(gloo)
  local function ratio(share)
    local at = math.ceil(#ours * share)
    return ours[at] / gloo[at]
  end
  return { small_all_reduce_over_gloo = ratio(0.5), small_all_reduce_p99_over_gloo = ratio(0.99),
    small_all_reduce_planned = planned / (#ours + 4) }
end

-- Returns a group that reports two ranks but exchanges nothing. It is used to time the computation of a block without
-- exchanges. Where the other rank's rows are needed, the group returns a copy of this rank's rows.
local function nobody(group)
  local alone = setmetatable({}, { __index = group })
  function alone:gathered_linear(x, w, b, how)
    return ps.ops.linear(ps.cat({ x, x }, 0), w, b, nil, how.out_in and 1 or 0)
  end
  function alone:linear_scattered(x, w, how)
    local y = ps.ops.linear(x, w, nil, nil, how.out_in and 1 or 0)
    y = how.flat and y:reshape(-1, y:size(-1)) or y
    return y:narrow(0, 0, y:size(0) / 2)
  end
  return alone
end

-- Returns the median seconds of forward and backward of a block, without its exchanges. If how.link is set, also
-- returns the seconds of its exchanges alone, and of the block with exchanges in both forms.
local function overlap(how)
  local group, C, B, T = ps.mesh.group "tp", 1024, 4, 256
  ps.manual_seed(1)
  local model, region = tensor_parallel.make(function()
    return require("models.gpt2").new({ vocab_size = 64, n_positions = T, n_embd = C, n_layer = 1, n_head = 16 },
      { dropout = 0 })
  end, { group = group, sequence = true, keep_gathered = false, pieces = 4, note = function() end }, { device = "cpu" })
  local block, n = model.transformer.h[0], B * T / 2
  local x = ps.randn({ n, C }):requires_grad(true)
  local rows, all = ps.randn { n, C }, ps.randn { 2 * n, C }
  region:set(B, T)
  local function step()
    block(x):sum():backward()
    ps.collect()
  end
  local RUNS = {
    products = function()
      region.group = nobody(group)
      step()
      region.group = group
    end,
    exchanges = function()                                     -- the exchanges of two column and two row layers
      for _ = 1, 6 do group:all_gather(all, rows) end
      for _ = 1, 4 do group:reduce_scatter(rows, all) end
    end,
    pieces = step,
    composed = function()
      region.pieces = 1
      step()
      region.pieces = 4
    end,
  }
  local result = { nbytes = 10 * n * C * 4 }
  for _, name in ipairs(how.link and { "products", "exchanges", "pieces", "composed" } or { "products" }) do
    local seconds = {}
    for i = 0, 5 do                                            -- round 0 is a warm-up
      group:barrier()
      local began = ps.now()
      RUNS[name]()
      group:barrier()
      seconds[i] = ps.now() - began
    end
    table.sort(seconds)
    result[name] = seconds[3]
  end
  return result
end

local function rank_main(o)
  if (tonumber(os.getenv "WORLD_SIZE") or 1) > 1 then ps.init_distributed { quiet = true } end
  if o.what == "layout" then return mesh_lib.rank(o) end
  local result
  if o.what == "masks" then result = masks(o.tp)
  elseif o.what == "dp" then result = { dp = data_parallel(1), dp_zero_3 = data_parallel(3) }
  elseif o.what == "pp" then result = { pp = pipeline() }
  elseif o.what == "latency" then result = latency()
  else
    ps.mesh { tp = 2 }
    result = o.what == "overlap" and overlap(o) or figures()
  end
  local f = assert(io.open(("%s/%s.%d"):format(o.folder, o.what .. (o.tp or ""), ps.rank()), "w"))
  f:write(cjson.encode(result))
  assert(f:close())
end

if args.run then
  local f = assert(io.open(args.run))
  local o = cjson.decode(f:read "*a")
  f:close()
  return rank_main(o)
end

-- -- the process that starts the ranks --------------------------------------------------------------------------------
local folder = os.tmpname()
os.remove(folder)
assert(lfs.mkdir(folder))

local function run(size, o)
  o.folder = folder
  local path = folder .. "/run.json"
  local f = assert(io.open(path, "w"))
  f:write(cjson.encode(o))
  assert(f:close())
  local launch = size > 1 and ("'%s/tools/launch.lua' --nproc-per-node %d"):format(paths.root, size) or ""
  local command = ("%s OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive '%s' %s '%s/bench/mesh.lua' --run '%s' 1>&2"):format(
    o.link and ("PS_SIM_LINK=%.0f"):format(o.link) or "", paths.exe, launch, paths.root, path)
  if os.execute(command) ~= 0 then
    io.stderr:write("bench/mesh.lua: the ranks failed; their output says why\n")
    os.execute(("rm -rf '%s'"):format(folder))
    os.exit(1)
  end
end

local function read(name)
  local f = assert(io.open(folder .. "/" .. name))
  local value = cjson.decode(f:read "*a")
  f:close()
  return value
end

local function layout_rows()
  local ones, rows = {}, {}
  local function settings(name, sgd, more)
    local o = { what = "layout", name = name, preset = MODEL, rows = 16, positions = 32, words = 250,
      steps = tonumber(args.steps), sgd = sgd, options = { dropout = 0.1 } }
    for key, value in pairs(more or {}) do o[key] = value end
    return o
  end
  local list = LAYOUTS
  if args.layouts then
    list = {}
    for text in args.layouts:gmatch "[^;]+" do
      local numbers = {}
      for n in text:gmatch "%d+" do numbers[#numbers + 1] = tonumber(n) end
      numbers[5] = text:find "sgd" ~= nil
      list[#list + 1] = numbers
    end
  end
  for i, layout in ipairs(list) do
    local dp, pp, tp, zero, sgd = layout[1], layout[2], layout[3], layout[4] or 0, layout[5] or false
    local one = sgd and "one.sgd" or "one"
    if not ones[one] then
      run(1, settings(one, sgd))
      ones[one] = true
    end
    local name = "layout" .. i
    run(dp * pp * tp, settings(name, sgd, { dp = dp, pp = pp, tp = tp, zero = zero, micros = pp > 1 and 4 or 1 }))
    local r = mesh_lib.compare(folder, name, dp * pp * tp, one)
    rows[i] = { dp = dp, pp = pp, tp = tp, zero = zero, sgd = sgd, max_rel_loss_error = r.max_rel_loss_error,
      max_rel_grad_error = r.max_rel_grad_error, norm_error = r.norm_error }
    io.stderr:write(cjson.encode(rows[i]), "\n")
  end
  return rows
end

-- Returns true if two ranks along tp dropped the same elements as one rank, and if at least one element was dropped.
local function masks_equal()
  run(1, { what = "masks", tp = 1 })
  run(2, { what = "masks", tp = 2 })
  local one, dropped = read "masks1.0", 0
  for rank = 0, 1 do
    local mine = read("masks2." .. rank)
    if #mine ~= #one then return false end
    for i, entry in ipairs(mine) do
      local place                                                    -- position of element k (counted from 0) in the
                                                                     -- whole mask
      if entry.head then
        local B, H, T, S = unpack(entry.shape)
        local all = one[i].shape[2]
        assert(all == 2 * H and B * H * T * S == #entry.mask)
        function place(k)
          local b, rest = math.floor(k / (H * T * S)), k % (H * T * S)
          return (b * all + entry.head) * T * S + rest
        end
      else
        function place(k) return k + entry.first end
      end
      for k, value in ipairs(entry.mask) do
        if one[i].mask[place(k - 1) + 1] ~= value then return false end
        dropped = dropped + 1 - value
      end
    end
  end
  return dropped > 0
end

-- Measures overlap_ratio. First measures the computation alone, and then sets the rate of the link so that the
-- exchanges take as long as the computation.
local function overlap_rows()
  run(2, { what = "overlap" })
  local free = read "overlap.0"
  run(2, { what = "overlap", link = free.nbytes / free.products })
  local r = read "overlap.0"
  local longer = math.max(r.products, r.exchanges)
  return { overlap_ratio = r.pieces / longer, overlap_ratio_composed = r.composed / longer,
    overlap_seconds = { products = r.products, exchanges = r.exchanges, pieces = r.pieces, composed = r.composed } }
end

local result = overlap_rows()
if not args.overlap_only then
  -- bench/planner.lua runs in a process of its own, because plans fork, and a process with threads must not fork.
  local plan = assert(process_lib.last_json(("'%s' '%s/bench/planner.lua' --settings 0 --no-published"):format(
    paths.exe, paths.root)), "bench/planner.lua failed")
  result.plan_175b_s, result.plan_175b_mib = plan.plan_175b_s, plan.plan_175b_mib
  run(2, { what = "figures" })
  for key, value in pairs(read "figures.0") do result[key] = value end
  run(2, { what = "latency" })
  for key, value in pairs(read "latency.0") do result[key] = value end
  result.dropout_masks_equal = masks_equal()
  run(2, { what = "dp" })
  for key, value in pairs(read "dp.0") do result.bytes_over_theory[key] = value end
  run(2, { what = "pp" })
  result.bytes_over_theory.pp = read("pp.0").pp
  if not args.figures_only then result.layouts = layout_rows() end
end
os.execute(("rm -rf '%s'"):format(folder))
print(cjson.encode(result))
