-- SPDX-License-Identifier: BSD-3-Clause
-- Compares the time to convert a folder to a GGUF file with the rates of the disk. The rates are measured with dd
-- before and after the conversion, and the figures use the mean of both measurements. dd reads the folder's own files
-- and writes a new file, and bypasses the page cache (O_DIRECT). The folder's files are not in the page cache when the
-- conversion begins.
--   psluajit bench/export.lua FOLDER --type q8_0 --out FILE.gguf
-- The last line of the output is a JSON object:
--   seconds        time of the conversion, including the fsync of the file
--   bound_s        bytes read / read rate + bytes written / write rate
--   share          bound_s / seconds, the conversion's rate as a share of the disk's rate
--   bytes_read, bytes_written, read_gb_per_s, write_gb_per_s, processor_s, peak_rss_mib, largest_tensor_mib
local argparse = require "argparse"
local cjson = require "cjson"
local command_line = require "ps.core.command_line"
local lfs = require "lfs"

local parser = argparse("bench/export.lua", "Measures the conversion of a folder to a GGUF file.")
parser:argument("folder", "a Hugging Face folder with safetensors files")
parser:option("--type", "type of most tensors", "q8_0")
parser:option("--out", "the file, which is removed at the end"):count(1)
local args = command_line.parse(parser)

local ps = require "ps"
local merge_folder = require "ps.lora.merge_folder"
local quote = require("bench.process_lib").quote
-- BLOCK: size of a read or a write in bytes. PROBED: size of dd's test file in bytes
local BLOCK, PROBED = 8 * 2 ^ 20, 2 ^ 31

local files, bytes_read, largest = {}, 0, 0
for name in lfs.dir(args.folder) do
  if name:find "%.safetensors$" then
    local path = args.folder .. "/" .. name
    files[#files + 1] = path
    bytes_read = bytes_read + lfs.attributes(path, "size")
    local file = ps.safetensors.open(path)
    for _, tensor in ipairs(file:names()) do largest = math.max(largest, file:nbytes(tensor)) end
    file:close()
  end
end
table.sort(files)
if #files == 0 then error(args.folder .. " has no safetensors files", 0) end

-- Runs dd. Returns its rate in bytes per second.
local function rate_of(options)
  local began = ps.now()
  assert(os.execute("dd bs=" .. BLOCK .. " status=none " .. options) == 0, "dd failed")
  return PROBED / (ps.now() - began)
end

local first = lfs.attributes(files[1], "size")
assert(first >= PROBED, files[1] .. " is smaller than a probe, 2 GiB")
local function rates()
  local count = PROBED / BLOCK
  local read = rate_of(("if=%s of=/dev/null iflag=direct count=%d"):format(quote(files[1]), count))
  local write = rate_of(("if=/dev/zero of=%s oflag=direct conv=fsync count=%d"):format(quote(args.out .. ".probe"),
    count))
  os.remove(args.out .. ".probe")
  return read, write
end

local read, write = rates()
for _, path in ipairs(files) do
  assert(os.execute(("dd if=%s iflag=nocache count=0 status=none"):format(quote(path))) == 0, "dd failed")
end
local began, processor = ps.now(), os.clock()
merge_folder.convert(args.folder, args.out, { type = args.type })
local seconds = ps.now() - began
processor = os.clock() - processor
local written = lfs.attributes(args.out, "size")
os.remove(args.out)
local read_after, write_after = rates()
read, write = (read + read_after) / 2, (write + write_after) / 2
local bound = bytes_read / read + written / write
print(cjson.encode { seconds = seconds, processor_s = processor, bytes_read = bytes_read, bytes_written = written,
  read_gb_per_s = read / 1e9, write_gb_per_s = write / 1e9, bound_s = bound, share = bound / seconds,
  peak_rss_mib = ps.peak_rss() / 2 ^ 20, largest_tensor_mib = largest / 2 ^ 20, type = args.type })
