-- SPDX-License-Identifier: BSD-3-Clause
-- Runs whole training steps of a model whose state does not fit into the host's budget. Parameters and optimizer state
-- are streamed from a disk file. Prints the plan, each step, and one JSON line:
--   step_s         time of the last step
--   compute_s      the part of step_s without waits for copies
--   processor_s    processor time of all threads
--   bound_s        max(compute_s, bytes read / read rate + bytes written / write rate), with rates that are measured in
--                  this run
--   step_over_bound, peak_rss_mib, rates
--   bytes_moved    number of bytes that the last step moved
--   disk_gb_per_s  bytes_moved divided by step_s
--   state_bytes    size in bytes of all chunks: parameters, masters and the optimizer's states
--   losses         the losses of all steps
--   making_s, making_processor_s   the wall-clock time and the processor time in which the model was created
--   planned_read, planned_written, planned_peak   the plan's bytes per step, and its peak on the host
--   host_peak      the highest number of bytes that the engine had on the host
--   least_moved, moved_over_least  with --bound: the number of bytes that any policy must move (bench/bound_lib.lua),
--                                  and bytes_moved divided by it
--   hash           with --hash: a hash over the bits of all trained parameters and masters after the last step
--   psluajit bench/larger_than_memory.lua --model gpt2-xl --host 6GiB --disk DIR --steps 2
--   psluajit bench/larger_than_memory.lua --family llama --model llama-3-8b --optimizer AdamW8bit --master remainder \
--     --host 20GiB --disk DIR --steps 3
--   psluajit bench/larger_than_memory.lua --folder FOLDER --lora 16 --host 4GiB --disk DIR
--   psluajit bench/larger_than_memory.lua --folder NF4 --keep-quantized --lora 8 --targets q_proj,v_proj --host 6GiB \
--     --no-disk                             (bench/model_folder.lua writes such a folder)
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local whole, number = command_line.whole, command_line.number
local cjson = require "cjson"

local parser = argparse("bench/larger_than_memory.lua", "Trains a model whose state is larger than the host's budget.")
parser:option("--family", "models/FAMILY.lua, which has a causal language model", "gpt2")
parser:option("--model", "preset of the family", "gpt2-xl")
parser:option("--folder", "a Hugging Face folder, instead of --family and --model; weights that are frozen stay in it")
whole(parser:option("--lora", "train an adapter of this rank over the frozen model of --folder"), 1)
parser:option("--targets", "names of the layers with adapters, joined by commas (default: all linear layers)")
parser:flag("--keep-quantized", "the weights of --folder, which is in NF4 of bitsandbytes, stay packed")
parser:option("--optimizer", "optimizer.type of the configuration", "AdamW")
parser:option("--master", "memory.master: full or remainder (bf16 only)", "full"):choices { "full", "remainder" }
number(parser:option("--lr", "learning rate", "1e-4"), 0)
parser:option("--host", "host budget", "6GiB")
parser:option("--disk", "folder of the disk tier", ".")
parser:flag("--no-disk", "no disk tier: everything must fit into the host's budget")
whole(parser:option("--limit", "bytes of the disk tier (default: what the state needs)"), 0)
whole(parser:option("--steps", "training steps", "2"), 1)
whole(parser:option("--batch", "rows", "1"), 1)
whole(parser:option("--seq", "tokens a row", "1024"), 1)
parser:option("--dtype", "bf16, fp32 or fp16", "bf16")
number(parser:option("--clip", "clip the gradient norm (updates then wait for the whole backward)", "0"), 0)
whole(parser:option("--chunk-size", "elements (default: search)"), 1)
parser:option("--eviction", table.concat(require "ps.config.policies", ", "), "plan")
whole(parser:option("--layers", "number of layers, instead of the preset's"), 1)
whole(parser:option("--width", "another width"), 1)
whole(parser:option("--heads", "number of heads, instead of the preset's"), 1)
whole(parser:option("--spare", "disk space to leave free, bytes", "5e9"), 0)
parser:flag("--repeat", "use one batch in all steps, so that the loss must fall")
parser:flag("--no-recompute", "keep activations")
parser:flag("--checksums", "memory.disk.checksums: verify the bytes that are read from the disk")
parser:flag("--bound", "compute the least bytes that any policy moves (glpsol of Debian's glpk-utils)")
parser:flag("--hash", "print a hash of the trained parameters after the last step")
whole(parser:option("--seed", "random seed of parameters and batches", "0"), 0)
local args = command_line.parse(parser)

local ps = require "ps"
local optimizers = require "ps.optimizers"
local ffi, C = ps.ffi, ps.C
local dry = C.ps_machine_pretended() ~= 0 -- true under psluajit --dry-run, where there are no values and no disk

local found, family = pcall(require, "models." .. args.family)
if not found then parser:error("--family: there is no models/" .. args.family .. ".lua") end
if args.lora and not args.folder then parser:error "--lora: give the frozen model with --folder" end
if args.keep_quantized and not args.lora then
  parser:error "--keep-quantized needs --lora: packed weights are frozen"
end
local kind = optimizers.of(optimizers.find(args.optimizer))
if not kind then parser:error("--optimizer: psluajit has no optimizer " .. args.optimizer) end

local function disk_free(path)
  local stat = assert(require("posix.sys.statvfs").statvfs(path))
  return stat.f_bavail * stat.f_frsize
end

local options = { recompute = not args.no_recompute }
if args.family == "gpt2" then
  options.n_layer, options.n_embd, options.n_head = args.layers, args.width, args.heads
  options.n_positions = math.max(args.seq, 1024)
else
  options.num_hidden_layers, options.hidden_size, options.num_attention_heads = args.layers, args.width, args.heads
end
-- Creates the model. With --lora, adds the adapter to it.
local function make(device)
  if args.folder then
    local given = { dtype = "auto", recompute = options.recompute, device = device }
    if device then return ps.from_config(args.folder, given) end
    given.quiet, given.mmap, given.keep_quantized = true, "auto", args.keep_quantized
    local base, targets = ps.from_pretrained(args.folder, given), nil
    if not args.lora then return base end
    if args.targets then
      targets = {}
      for name in args.targets:gmatch "[^,]+" do targets[#targets + 1] = name end
    end
    return ps.lora.wrap(base, { r = args.lora, alpha = 2 * args.lora, targets = targets })
  end
  local given = { device = device }
  for key, value in pairs(options) do given[key] = value end
  return family.new(args.model, given)
end
local shape = make "meta"
local numel, flops = shape:num_parameters(), shape:flops_per_token(args.seq)
-- The number of bytes per parameter: the weight, the gradient, the master, and the optimizer states. A bf16 or fp16
-- gradient uses the memory of its weight.
local state = args.dtype == "fp32" and 8 or args.master == "remainder" and 4 or 6
state = state + optimizers.states_most(kind.states)
-- weights that are copied because the file stores them in another order
local copied = args.keep_quantized and args.folder:find "%.gguf$" and 0.53 or 0
local need = args.limit or args.lora and numel * copied + 2 ^ 30
  or numel * (state + 4) * 1.02 + 2 ^ 28
local result = { family = args.folder == nil and args.family or nil, model = args.folder or args.model,
  lora = args.lora, optimizer = kind.name, master = args.master,
  parameters = numel, state_bytes = numel * state, host = args.host,
  dtype = args.dtype, tokens = args.batch * args.seq, disk_free = disk_free(args.disk) }
if not dry and not args.no_disk and result.disk_free - need < args.spare then
  result.skipped = ("the disk of %s has %.1f GB free; this run needs %.1f GB and leaves %.1f GB alone"):format(
    args.disk, result.disk_free / 1e9, need / 1e9, args.spare / 1e9)
  print(result.skipped)
  print(cjson.encode(result))
  os.exit(0, true)
end

local limit = args.limit or math.ceil(need / 4096) * 4096
ps.manual_seed(args.seed)
local began, clock = ps.now(), os.clock()
local model, optimizer = ps.initialize {
  model_func = function() return make() end,
  config = {
    optimizer = { type = kind.name, params = { lr = args.lr } },
    bf16 = args.dtype == "bf16" and { enabled = true } or nil,
    fp16 = args.dtype == "fp16" and { enabled = true } or nil,
    gradient_clipping = args.clip, chunk_size = args.chunk_size, eviction = args.eviction,
    memory = { host = args.host, master = args.master,
      disk = not args.no_disk and { path = args.disk, limit = limit, checksums = args.checksums } or nil },
  },
}
local engine = require("ps.nn.handle").of(model)
result.state_bytes = tonumber(engine.built.state_bytes)
result.making_s, result.making_processor_s = ps.now() - began, os.clock() - clock
print(("initialised in %.1f s (processor %.1f), peak RSS %.0f MiB"):format(result.making_s, result.making_processor_s,
  ps.peak_rss() / 2 ^ 20))

-- Returns the number of bytes that are written and read to measure the disk: 1 GiB, but at most the host's budget and
-- at most half of the disk tier's free bytes.
local function probe_nbytes()
  if args.no_disk then return 0 end
  local tiers = require("ps.memory.chunks").tiers()
  local host, disk = tiers[#tiers - 1], tiers[#tiers]
  local most = math.min(2 ^ 30, host.budget, disk.free / 2)
  return math.max(1, math.floor(most / 2 ^ 20)) * 2 ^ 20
end

local read, write, probed = ffi.new("double[1]", 1), ffi.new("double[1]", 1), probe_nbytes()
if not dry and not args.no_disk then
  ps.check(C.ps_engine_disk_probe(ps.ctx, probed, read, write))
  print(("disk: reads %.2f GB/s, writes %.2f GB/s (%d MiB each way)"):format(read[0] / 1e9, write[0] / 1e9,
    probed / 2 ^ 20))
end

local stats, tier = ffi.new("ps_engine_stats"), ffi.new("ps_tier_info")
local function counters()
  ps.check(C.ps_engine_stats_get(ps.ctx, stats))
  local last = C.ps_engine_tier_count(ps.ctx) - 1
  ps.check(C.ps_engine_tier_get(ps.ctx, last, tier))
  return { wait = tonumber(stats.wait_s), unplanned = tonumber(stats.unplanned), up = tonumber(tier.bytes_up),
    down = tonumber(tier.bytes_down), at = ps.now(), processor = os.clock() }
end

-- Returns a hash over the bits of all trained parameters and masters, in the order of the model.
local function hash_of(rows)
  local out, parts = ffi.new("uint64_t[2]"), {}
  for _, row in ipairs(rows) do
    for _, t in ipairs { row.param, row.master } do
      ps.check(C.ps_tensor_hash(t, out))
      parts[#parts + 1] = ("%016x%016x"):format(out[0], out[1])
    end
  end
  ps.check(C.ps_tensor_hash(ps.tensor({ table.concat(parts):byte(1, -1) }, { dtype = "uint8" }), out))
  return ("%016x"):format(out[0])
end

local last, x
result.losses = {}
for step = 1, args.steps do
  if step == 1 or not args["repeat"] then
    x = ps.randint(0, shape.config.vocab_size, { args.batch, args.seq }, { dtype = "int32" })
  end
  local before = counters()
  optimizer:zero_grad()
  local loss = args.folder and model({ input_ids = x, labels = x }).loss or model(x, x)
  local value = dry and 0 or loss:item()
  result.losses[step] = value
  local forward = ps.now() - before.at
  model:backward(loss)
  local backward = ps.now() - before.at - forward
  optimizer:step()
  ps.check(C.ps_engine_settle(ps.ctx))
  local after = counters()
  last = { seconds = after.at - before.at, processor = after.processor - before.processor,
    wait = after.wait - before.wait, read = after.up - before.up, written = after.down - before.down,
    unplanned = after.unplanned - before.unplanned }
  print(("step %d: loss %.4f, %.1f s (forward %.1f, backward %.1f, update %.1f; waiting %.1f; processor %.1f), read "
    .. "%.2f GB, wrote %.2f GB, %d unplanned fetches, peak RSS %.0f MiB"):format(step, value, last.seconds, forward,
    backward, last.seconds - forward - backward, last.wait, last.processor, last.read / 1e9,
    last.written / 1e9, last.unplanned, ps.peak_rss() / 2 ^ 20))
end
result.step_s, result.wait_s, result.processor_s = last.seconds, last.wait, last.processor
result.compute_s = last.seconds - last.wait
result.bytes_read, result.bytes_written, result.bytes_moved = last.read, last.written, last.read + last.written
result.transfer_s = last.read / read[0] + last.written / write[0]
result.bound_s = math.max(result.compute_s, result.transfer_s)
result.step_over_bound = result.step_s / result.bound_s
result.peak_rss_mib = ps.peak_rss() / 2 ^ 20
result.disk_gb_per_s = result.bytes_moved / result.step_s / 1e9
result.probe_nbytes = probed
result.probe_read_gb_per_s, result.probe_write_gb_per_s = read[0] / 1e9, write[0] / 1e9
result.gflops = (options.recompute and 8 / 6 or 1) * flops * result.tokens / result.compute_s / 1e9
local forecast, tiers = engine.plan.forecast, require("ps.memory.chunks").tiers()
if not args.no_disk then result.planned_read, result.planned_written = forecast.fetched[1], forecast.evicted[1] end
result.planned_peak, result.host_peak = forecast.tiers[1].peak, tiers[1].peak
if args.bound then
  local bound = require "bench.bound_lib"
  local trace, capacity = bound.trace_of(engine)
  local least, reason = bound.solve(trace, capacity, 300)
  if least then result.least_moved, result.moved_over_least = least, result.bytes_moved / least
  else print("no lower bound: " .. reason) end
end
if args.hash then result.hash = hash_of(engine.built.list) end
model:close()
print(cjson.encode(result))
