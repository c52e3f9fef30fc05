-- SPDX-License-Identifier: BSD-3-Clause
-- Measures training speed on random tokens.
--   psluajit bench/train.lua --model gpt2 --dtype bf16 --batch 4 --seq 256 --steps 6
--   psluajit bench/train.lua --family llama --model llama-110m       (peer: bench/peers/llama_torch.py)
-- The last line is one JSON object:
--   tokens_per_s, step_s, cpu_s   medians of the steps after the second. cpu_s is the processor seconds of a step,
--                                 which depend less on other programs.
--   peak_rss_mib, losses
--   gemm_peak_gflops   the rate of a matrix product of 2048^3 (or of the size --gemm) in the same type on the same
--                      device, in the same run
--   mfu                6 * N FLOPs per token for N parameters, divided by gemm_peak_gflops
--   mfu_paired         only with --paired. A product runs before the third step, and after the third step and each
--                      later step. The rate of a step is divided by the mean rate of the products just before and just
--                      after it. The figure is the median over the steps. It is more accurate than mfu: a processor's
--                      rate can change within one second, so the best product and the median step can run at different
--                      rates.
local ps = require "ps"
local cjson = require "cjson"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local whole = command_line.whole

io.stdout:setvbuf "line"                                -- if this process is killed, the output up to then is not lost
local parser = argparse("bench/train.lua", "Measures training speed.")
parser:option("--family", "models/FAMILY.lua, which has a causal language model", "gpt2")
parser:option("--model", "preset of the family", "gpt2")
parser:option("--dtype", "fp32, bf16 or fp16", "bf16")
whole(parser:option("--batch", "rows", "4"), 1)
whole(parser:option("--seq", "positions", "256"), 1)
whole(parser:option("--steps", "number of steps; the first two are not counted", "6"), 3)
parser:option("--device", "device", "cpu")
whole(parser:option("--gemm", "size of the square products that measure the peak (0: not measured)", "2048"), 0)
parser:flag("--profile", "print the time of the kernels by op")
parser:flag("--paired", "run products between the steps, for mfu_paired; not with --profile, which would include them")
parser:option("--optimizer", "AdamW, or Muon for the matrices of the blocks and AdamW for the rest", "AdamW")
  :choices { "AdamW", "Muon" }
parser:flag("--recompute", "recompute blocks in backward")
parser:flag("--keep", "keep outputs of norms and GELU for backward")
local args = command_line.parse(parser)
if args.paired and args.profile then parser:error("--paired and --profile exclude each other") end
if args.paired and args.gemm == 0 then parser:error("--paired needs products; remove --gemm 0") end

local function median(list)
  table.sort(list)
  return list[math.floor(#list / 2) + 1]
end

--- Returns the rate of a square matrix product in GFLOP/s. It is the best of `tries` tries. On an asynchronous device,
--- each try starts several products and then waits.
local function gemm_rate(tries)
  local n, best, count = args.gemm, 0, args.device == "cuda" and 10 or 1
  if n == 0 then return 0 end
  local on = { dtype = args.dtype, device = args.device }
  local a, b = ps.randn({ n, n }, on), ps.randn({ n, n }, on)
  for _ = 1, tries do
    local t, c = ps.now(), nil
    for _ = 1, count do
      if c then c:release() end
      c = a:matmul(b)
    end
    if args.device == "cuda" then c:reshape(-1)[0]:item() end
    best = math.max(best, count * 2 * n ^ 3 / (ps.now() - t) / 1e9)
    c:release()
  end
  a:release()
  b:release()
  return best
end

print(ps.device(args.device).description)
ps.manual_seed(0)
ps.keep_cheap_outputs(args.keep or false)
ps.set_default_device(args.device)
local model = require("models." .. args.family).new(args.model,
  { dtype = args.dtype, device = args.device, recompute = args.recompute })
local optimizer = ps.optim[args.optimizer](model, { lr = 3e-4 })
local n_params = model:num_parameters()
local vocab = model.config.vocab_size
local x = ps.randint(0, vocab, { args.batch, args.seq }, { dtype = "int32" })
local y = ps.randint(0, vocab, { args.batch, args.seq }, { dtype = "int32" })

local PEAK_TRIES, PAIR_TRIES = 8, 2
local step_flops = args.batch * args.seq * 6 * n_params
local times, seconds, losses, shares, before_peak, before_step = {}, {}, {}, {}, gemm_rate(PEAK_TRIES), nil
for step = 1, args.steps do
  if args.profile and step == 3 then ps.profiler.start() end
  if args.paired and step == 3 then before_step = gemm_rate(PAIR_TRIES) end
  local t, clock = ps.now(), os.clock()
  optimizer:zero_grad()          -- before the forward, so that old gradients use no memory during the forward
  local loss = model(x, y)
  local t_forward = ps.now()
  loss:backward()
  local t_backward = ps.now()
  optimizer:step()
  losses[step] = loss:item()
  local dt = ps.now() - t
  if step > 2 then times[#times + 1], seconds[#seconds + 1] = dt, os.clock() - clock end
  print(("step %d loss %.5f: %.1f ms (forward %.1f, backward %.1f, optimizer %.1f)"):format(step, losses[step],
    dt * 1e3, (t_forward - t) * 1e3, (t_backward - t_forward) * 1e3, (ps.now() - t_backward) * 1e3))
  if before_step then
    local after = gemm_rate(PAIR_TRIES)
    shares[#shares + 1] = step_flops / dt / 1e9 / ((before_step + after) / 2)
    before_step = after
  end
end
for step, loss in ipairs(losses) do
  if loss ~= loss or math.abs(loss) == math.huge then error(("the loss of step %d is %f"):format(step, loss), 0) end
end
if args.profile then ps.profiler.report() end
local peak = math.max(before_peak, gemm_rate(PEAK_TRIES))
local step_s = median(times)
local tokens_per_s = args.batch * args.seq / step_s
print(cjson.encode {
  model = args.model, dtype = args.dtype, batch = args.batch, seq = args.seq, parameters = n_params, step_s = step_s,
  cpu_s = median(seconds), tokens_per_s = tokens_per_s, peak_rss_mib = ps.peak_rss() / 1048576, losses = losses,
  gemm_peak_gflops = peak,
  mfu = peak > 0 and tokens_per_s * 6 * n_params / (peak * 1e9) or nil,
  mfu_paired = args.paired and median(shares) or nil,
  engine_peak_mib = ps.memory(args.device).peak / 1048576,
})
