-- SPDX-License-Identifier: BSD-3-Clause
-- Shows the table of a pipeline (docs/pipeline.md): the actions of each rank over time, the idle time (bubbles), and
-- the number of activations that each rank holds.
--   psluajit tools/pipeline.lua --stages 4 --micro-batches 8 --schedule zb_h1 --out zb_h1.svg
--   psluajit tools/pipeline.lua --read mine.csv --weight 0.5
-- --csv writes the table in PyTorch's CSV format. --read reads a table in this format, instead of creating the table of
-- a schedule.
local argparse = require "argparse"
local pipe_table = require "ps.parallel.pipeline.table"
local picture = require "ps.parallel.pipeline.picture"
local command_line = require "ps.core.command_line"
local read_file = require "ps.core.read_file"
local write_file = require "ps.core.write_file"
local whole, number = command_line.whole, command_line.number

local parser = argparse("psluajit pipeline", "Shows the table of a pipeline.")
whole(parser:option("--stages", "ranks that share the model"), 1, 4096)
whole(parser:option("--micro-batches", "micro-batches of a step"), 1, 2 ^ 20)
whole(parser:option("--virtual-stages", "virtual stages on each rank; default 1, or 2 for zb_v"), 1, 4096)
parser:option("--schedule", "gpipe, 1f1b, interleaved, looped_bfs, zb_h1 or zb_v")
parser:option("--read", "a table as a CSV file, instead of --schedule and its sizes")
parser:flag("--evaluation", "forwards alone")
number(parser:option("--forward", "time of a virtual stage's forward", "1"), 0)
number(parser:option("--input", "time of the gradient of its input", "1"), 0)
number(parser:option("--weight", "time of the gradients of its weights", "1"), 0)
number(parser:option("--latency", "of a message", "0"), 0)
parser:option("--csv", "file to write the table to")
parser:option("--out", "picture to draw: a file that ends in .svg or .png")
local args = command_line.parse(parser)

local function write(path, text)
  local done, why = write_file(path, text)
  if not done then error(why, 0) end
end

local function table_of()
  if args.read then
    for _, name in ipairs { "schedule", "stages", "micro_batches", "virtual_stages", "evaluation" } do
      if args[name] then error(("--%s does not apply with --read FILE, which has the table"):format(
        (name:gsub("_", "-"))), 0) end
    end
    local text, why = read_file(args.read)
    if not text then error(why, 0) end
    return pipe_table.read(text, args.read)
  end
  if not (args.schedule and args.stages and args.micro_batches) then
    error("give --schedule, --stages and --micro-batches, or --read FILE", 0)
  end
  return pipe_table.table { schedule = args.schedule, stages = args.stages, micro_batches = args.micro_batches,
    virtual_stages = args.virtual_stages, forward_only = args.evaluation or false }
end

local function main()
  local ending = args.out and args.out:match("%.(%a+)$")
  if args.out and ending ~= "svg" and ending ~= "png" then
    error(("--out %s: a picture's name ends in .svg or .png"):format(args.out), 0)
  end
  local t = table_of()
  local course = t:simulate({ forward = args.forward, input = args.input, weight = args.weight },
    { latency = args.latency })
  print(("%s: %d stages, %d virtual stages, %d micro-batches"):format(t.schedule, t.stages, t.vstages, t.micro_batches))
  io.write(picture.text(t, course) or "(no picture in characters: too long, or times are not whole; see --out)\n")
  print(("makespan %.6g, bubble %.1f %%"):format(course.makespan, 100 * course.bubble))
  for rank = 0, t.stages - 1 do
    local r, in_flight, waiting = course.ranks[rank + 1], t:held(rank)
    print(("rank %-3d busy %.6g, idle %.6g before, %.6g between, %.6g after; in flight %d, waiting for W %d"):format(
      rank, r.busy, r.first, r.last - r.first - r.busy, course.makespan - r.last, in_flight, waiting))
  end
  if args.csv then write(args.csv, t:text()) end
  if ending == "svg" then write(args.out, picture.svg(t, course)) end
  if ending == "png" then
    local ok, why = picture.png(args.out, t, course)
    if not ok then
      error(("%s was not drawn: %s; a picture in .svg needs no other program"):format(args.out, why), 0)
    end
  end
end

command_line.try("pipeline.lua", main)
