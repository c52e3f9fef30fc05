-- SPDX-License-Identifier: BSD-3-Clause
-- Measures the time from the start of a program to the first logits of a model. The model is a folder in Hugging Face's
-- format.
--   psluajit bench/first_logits.lua DIR [--make gpt2-xl] [--dtype bf16] [--ids "1 2"] [--rounds 3] [--mmap] [--cold]
--     [--peer]
-- Each round starts a process that loads the folder, computes the logits of one row of ids, and prints them.
--   --make   if the folder does not exist, writes it first, with random weights in --dtype for a preset of
--            models/gpt2.lua
--   --mmap   the weights stay in the file (mmap = true of from_pretrained)
--   --cold   the file of the weights is dropped from the page cache before each run (`dd iflag=nocache`)
--   --peer   in each round, transformers also loads the folder and computes the logits
--            (bench/peers/first_logits_torch.py, with the Python of PS_TORCH_PYTHON or python3), and `dd` reads the
--            file
-- Prints one JSON line. Seconds are medians of the rounds:
--   file_bytes         size of the file in bytes
--   seconds
--   peak_mib           VmHWM of the process of psluajit
--   over_model_mib     peak_mib minus the size of the file
--   peer_seconds, peer_peak_mib
--   peer_ratio         the peer's seconds divided by psluajit's seconds
--   logits_error       largest difference of logits divided by the largest logit
--   read_bytes_per_s   the rate of dd, through a buffer of 8 MiB
--   read_share         the file's bytes per second in psluajit's run, divided by read_bytes_per_s
local argparse = require "argparse"
local json = require "cjson"
local lfs = require "lfs"
local paths = require "ps.paths"
local process = require "bench.process_lib"
local command_line = require "ps.core.command_line"
local whole = command_line.whole

local parser = argparse("bench/first_logits.lua", "Measures the seconds from a program's start to a model's first " ..
  "logits.")
parser:argument("folder", "a Hugging Face folder with a causal model in one model.safetensors")
parser:option("--make", "preset to write with random weights if the folder does not exist")
parser:option("--dtype", "type of the weights", "bf16")
parser:option("--ids", "the ids of the row, separated by blanks", "464 2068 7586 21831")
whole(parser:option("--rounds", "number of runs, whose median is printed", "3"), 1)
parser:flag("--mmap", "leave the weights in the file")
parser:flag("--cold", "drop the file from the page cache before each run")
parser:flag("--peer", "run transformers alternately with psluajit")
parser:flag("--child", "(for this script) load, run, print the logits")
local args = command_line.parse(parser)

local TOLD, IDS = 64, {}                                   -- TOLD: number of the last id's logits that are printed;
                                                           -- IDS: the row of ids
for id in args.ids:gmatch("%d+") do IDS[#IDS + 1] = tonumber(id) end

if args.child then
  local ps = require "ps"
  local model = ps.from_pretrained(args.folder, { dtype = args.dtype, quiet = true, mmap = args.mmap or nil }):eval()
  local logits = ps.no_grad(function()
    local out = model { input_ids = ps.tensor({ IDS }, { dtype = "int32" }) }
    return out.logits[0][#IDS - 1]:narrow(0, 0, TOLD):to("fp32"):tolist()
  end)
  print(json.encode { logits = logits, peak = ps.peak_rss() })
  os.exit(0, true)
end

local now = require("ps").now
local file = args.folder .. "/model.safetensors"

local quoted = process.quote

local function make()
  if lfs.attributes(args.folder, "mode") then return end
  local code = ("require('ps').manual_seed(1) require('models.gpt2').new(%q, { dtype = %q }):save_pretrained(%q)")
    :format(args.make, args.dtype, args.folder)
  if os.execute(("%s -e %s"):format(quoted(paths.exe), quoted(code))) ~= 0 then error("cannot write the folder", 0) end
end

-- Drops the clean pages of the file from the page cache. `dd` writes nothing, because its count is 0.
local function drop()
  if os.execute(("sync %s && dd if=%s iflag=nocache count=0 2>/dev/null"):format(quoted(file), quoted(file))) ~= 0 then
    error("cannot drop " .. file .. " from the page cache", 0)
  end
end

-- Runs a command that prints a line of JSON at its end. Returns the decoded line, and the seconds until the line
-- arrived.
local function run(command)
  if args.cold then drop() end
  local began = now()
  local told = process.last_json(command)
  if not told then error("a run failed: " .. command, 0) end
  return told, now() - began
end

local function read_file()
  if args.cold then drop() end
  local began = now()
  if os.execute(("dd if=%s of=/dev/null bs=8M 2>/dev/null"):format(quoted(file))) ~= 0 then error("dd failed", 0) end
  return now() - began
end

local function median(list)
  table.sort(list)
  return list[math.floor((#list + 1) / 2)]
end

-- Returns the largest difference between the logits of the two lists, divided by the largest logit.
local function difference(ours, theirs)
  local most, scale = 0, 0
  for i, x in ipairs(theirs) do
    most, scale = math.max(most, math.abs(ours[i] - x)), math.max(scale, math.abs(x))
  end
  return most / scale
end

if args.make then make() end
local bytes = lfs.attributes(file, "size") or error("there is no file " .. file .. "; --make PRESET writes one", 0)
local us = ("%s %s/bench/first_logits.lua %s --dtype %s --ids '%s' --child%s"):format(quoted(paths.exe),
  quoted(paths.root), quoted(args.folder), args.dtype, table.concat(IDS, " "), args.mmap and " --mmap" or "")
local peer = ("%s %s/bench/peers/first_logits_torch.py %s --dtype %s --threads %d --told %d --ids %s"):format(
  os.getenv "PS_TORCH_PYTHON" or "python3", quoted(paths.root), quoted(args.folder), args.dtype,
  require("ps").threads(), TOLD, table.concat(IDS, " "))

if not args.cold then read_file() end  -- reads the file into the page cache before the first round
local seconds, reads, theirs = {}, {}, {}
local result = { file_bytes = bytes, mmap = args.mmap or false, cold = args.cold or false, dtype = args.dtype }
for round = 1, args.rounds do
  local told, told_by_peer
  told, seconds[round] = run(us)
  result.peak_mib = math.max(result.peak_mib or 0, told.peak / 2 ^ 20)
  if args.peer then
    told_by_peer, theirs[round] = run(peer)
    reads[round] = read_file()
    result.peer_peak_mib = math.max(result.peer_peak_mib or 0, told_by_peer.peak / 2 ^ 20)
    result.logits_error = difference(told.logits, told_by_peer.logits)
  end
end
result.seconds, result.over_model_mib = median(seconds), result.peak_mib - bytes / 2 ^ 20
if args.peer then
  result.peer_seconds, result.read_bytes_per_s = median(theirs), bytes / median(reads)
  result.peer_ratio = result.peer_seconds / result.seconds
  result.read_share = bytes / result.seconds / result.read_bytes_per_s
end
print(json.encode(result))
