-- SPDX-License-Identifier: BSD-3-Clause
-- Draws the pictures of the guides again (`make pictures`), as SVG. Writes these files into a folder, by default
-- docs/pictures:
--   memory.svg   host memory over a step of a model whose state is larger than the budget
--   chunks.svg   where each chunk of the same step is
--   bytes.svg, tiers.svg, step.svg   how memory works
--   schedule_1f1b.svg, schedule_zb_h1.svg   four stages of a pipeline with eight micro-batches
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local draw = require "ps.profile.draw"
local drawings = require "tools.site.drawings"
local gpt2 = require "models.gpt2"
local lfs = require "lfs"
local paths = require "ps.paths"
local ps = require "ps"
local read = require "ps.profile.read"
local write_file = require "ps.core.write_file"

local parser = argparse("psluajit pictures", "Draws the pictures of the guides.")
parser:argument("folder", "folder to write to", paths.root .. "/docs/pictures")
local args = command_line.parse(parser)
lfs.mkdir(args.folder)

-- A GPT-2 with 3.6 million parameters. Its state has 55.7 MiB, and is divided between 48 MiB of memory and a file.
ps.manual_seed(1)
local profile, disk = os.tmpname(), os.tmpname()
os.remove(disk)
assert(lfs.mkdir(disk))
local model, optimizer = ps.initialize {
  config = {
    optimizer = { type = "AdamW", params = { lr = 1e-4 } },
    memory = { host = "48MiB", disk = { path = disk, limit = "400MiB" } },
    chunk_size = 262144,
  },
  model_func = function()
    return gpt2.new({ vocab_size = 256, n_positions = 128, n_layer = 8, n_head = 4, n_embd = 192 }, { dropout = 0 })
  end,
}
local x = ps.randint(0, 256, { 4, 128 }, { dtype = "int32" })

local function step()
  optimizer:zero_grad()
  model:backward(model(x, x))
  optimizer:step()
end

for _ = 1, 2 do step() end                                 -- the trace of the first step is needed to plan the second
                                                           -- step
ps.profiler.start()
for _ = 1, 2 do step() end
ps.profiler.save(profile)
model:close()

local figures = read.file(profile)
read.drop_warmup(figures)
draw.memory(figures, read.tier(figures, "CPU"), args.folder .. "/memory.svg")
draw.access(figures, args.folder .. "/chunks.svg")
os.remove(profile)
os.execute(("rm -r '%s'"):format(disk))
for _, name in ipairs { "bytes", "tiers", "step" } do
  assert(write_file(("%s/%s.svg"):format(args.folder, name), drawings[name]()))
end
for _, schedule in ipairs { "1f1b", "zb_h1" } do
  local command = ("'%s' '%s/tools/pipeline.lua' --stages 4 --micro-batches 8 --schedule %s --out '%s/schedule_%s.svg' "
    .. ">/dev/null"):format(paths.exe, paths.root, schedule, args.folder, schedule)
  if os.execute(command) ~= 0 then error(("tools/pipeline.lua could not draw the schedule %s"):format(schedule), 0) end
end
print(("wrote the pictures into %s"):format(args.folder))
