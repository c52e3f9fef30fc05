-- SPDX-License-Identifier: BSD-3-Clause
-- Measures the rate at which the weights of a GGUF file are read when tokens are generated one by one. Also measures
-- two limits of this rate: the rate at which memory is read, and the rate at which one row is multiplied by weights
-- that are in the L2 caches.
--   psluajit bench/decode.lua FILE.gguf [--dtype bf16] [--keep-quantized] [--int8-activations] [--json]
-- Each figure is from the fastest of --rounds rounds:
--   tokens_per_s           does not count the first token, whose time includes the time of the prompt
--   bytes_per_token        stored size in bytes of the weights by which a token is multiplied. These are all weights
--                          except an embedding table from which tokens only read rows.
--   memory_bytes_per_s     reads of 512 MiB (ps_probe_bandwidth) with four streams per thread. The reads run after each
--                          round, for as long as the round took. The figure is their mean rate.
--   kernel_bytes_per_s     stored size in bytes of weights divided by the time of the products with these weights. For
--                          each type, the time is measured with a matrix that fills half of each thread's L2 cache.
--   memory_share, kernel_share   bytes_per_token * tokens_per_s divided by each limit
--   share                  bytes_per_token * tokens_per_s divided by the smaller limit
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local ffi = require "ffi"
local json = require "cjson"

local parser = argparse("bench/decode.lua", "Measures the rate at which weights are read when tokens are generated.")
parser:argument("file", "a GGUF file")
command_line.whole(parser:option("--tokens", "number of tokens to generate", "64"), 2)
command_line.whole(parser:option("--rounds", "number of rounds", "5"), 1)
parser:option("--dtype", "type of weights that do not stay packed", "fp32")
parser:flag("--keep-quantized", "weights stay packed")
parser:flag("--int8-activations", "with --keep-quantized: round activations to 8 bits, which is faster")
parser:flag("--json", "one JSON object")
local args = command_line.parse(parser)

local ps = require "ps"
local io_gguf = require "ps.io.gguf"
local nn = ps.nn

-- Returns the size of an L2 cache in bytes.
local function cache_nbytes()
  local file = io.open "/sys/devices/system/cpu/cpu0/cache/index2/size"
  local size = file and tonumber(file:read "*a":match "^(%d+)K")
  if file then file:close() end
  return (size or 1024) * 1024
end

-- Returns the stored size in bytes of the weights by which a token is multiplied, by the name of the type. If a file
-- has no output.weight, the embedding table is one of these weights.
local function stored(path)
  local by_type = {}
  io_gguf.with(path, function(file)
    for _, name in ipairs(file:names()) do
      if #file:shape(name) == 2 and (name ~= "token_embd.weight" or not file:has "output.weight") then
        local kind, nbytes = file:type(name), file:nbytes(name)
        if not args.keep_quantized then
          kind = args.dtype
          nbytes = ps.empty(file:shape(name), { dtype = kind, device = "meta" }):nbytes()
        end
        by_type[kind] = (by_type[kind] or 0) + nbytes
      end
    end
  end)
  return by_type
end

-- Multiplies one row by a matrix of type `kind` that is in the caches. Returns the rate in bytes of weights per second.
local function kernel_rate(kind)
  local columns, wanted = 2048, cache_nbytes() / 2 * ps.threads()
  local plain = ({ F32 = "fp32", F16 = "fp16", BF16 = "bf16" })[kind] or not args.keep_quantized and kind
  local function layer(rows)
    local module = nn.Linear(columns, rows, { bias = false })
    if plain then return module:to(plain) end
    return (ps.quantize(nn.Sequential(module), { type = kind:lower(), int8_activations = args.int8_activations }))
  end
  local function nbytes_of(module)
    local sum = 0
    for _, t in pairs(module:state_dict()) do sum = sum + t:nbytes() end
    return sum
  end
  local rows = math.floor(wanted / nbytes_of(layer(64)) * 64 / 32) * 32
  local module = layer(rows):eval()
  local nbytes, x = nbytes_of(module), ps.randn({ 1, columns }, { dtype = plain or "fp32" })
  local best = math.huge
  ps.no_grad(function()
    for _ = 1, 30 do
      local began = ps.now()
      for _ = 1, 100 do ps.scope(function() module(x) end) end
      best = math.min(best, (ps.now() - began) / 100)
    end
  end)
  return nbytes / best
end

local function decode(model, ids)
  local began, seconds
  model:generate({ ids }, args.tokens, { do_sample = false, eos_token_id = false, on_token = function(_, i)
    if i == 1 then began = ps.now() elseif i == args.tokens then seconds = ps.now() - began end
  end })
  return seconds
end

local by_type, total, kernel_s = stored(args.file), 0, 0
local result = { kernel_bytes_per_s_by_type = {} }
for kind, nbytes in pairs(by_type) do
  local rate = kernel_rate(kind)
  result.kernel_bytes_per_s_by_type[kind] = rate
  total, kernel_s = total + nbytes, kernel_s + nbytes / rate
end
local model = ps.from_pretrained(args.file, { dtype = args.dtype, quiet = true,
  keep_quantized = args.keep_quantized, int8_activations = args.int8_activations })
-- Returns the rate at which memory is read, in bytes per second. It is the mean over `seconds` seconds.
local function memory_rate(seconds)
  local began, n, slowness, rate = ps.now(), 0, 0, ffi.new "double[1]"
  repeat
    ps.check(ps.C.ps_probe_bandwidth(2 ^ 29, 4, 0, 0, 1, rate))
    n, slowness = n + 1, slowness + 1 / rate[0]
  until ps.now() - began >= seconds
  return n / slowness
end

local memory, best = 0, math.huge
for _ = 1, args.rounds do
  local seconds = decode(model, { 5, 6, 7, 8 })
  best, memory = math.min(best, seconds), math.max(memory, memory_rate(seconds))
end
result.bytes_per_token, result.memory_bytes_per_s, result.kernel_bytes_per_s = total, memory, total / kernel_s
result.tokens_per_s = (args.tokens - 1) / best
local read = total * result.tokens_per_s
result.memory_share, result.kernel_share = read / memory, read / result.kernel_bytes_per_s
result.share = read / math.min(memory, result.kernel_bytes_per_s)
if args.json then return print(json.encode(result)) end
print(("%.1f tokens/s, %.2f GB of weights per token: %.1f GB/s"):format(result.tokens_per_s, total / 1e9, read / 1e9))
print(("memory %.1f GB/s (%.2f of it), products in the caches %.1f GB/s (%.2f of it)"):format(memory / 1e9,
  result.memory_share, result.kernel_bytes_per_s / 1e9, result.kernel_share))
