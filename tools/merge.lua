-- SPDX-License-Identifier: BSD-3-Clause
-- Merges the shards of a checkpoint, one per rank, into one file, with a few MB of memory. lua/ps/checkpoints/merge.lua
-- describes how values that are in several shards are merged.
--   psluajit tools/merge.lua --pattern=checkpoint-*.pt --num=4        -- checkpoint-0.pt .. 3 -> checkpoint-merged.pt
--   psluajit tools/merge.lua --pattern=model-*.pt --num=4 --out model.safetensors
--   psluajit tools/merge.lua out/step-00000100 --out model.safetensors    -- a checkpoint's folder; "out": its newest
--   psluajit tools/merge.lua saved                  -- a folder of save_parallelized or OSLO: saved/pytorch_model.bin
-- If the tool fails, the exit code is 1, and the tool leaves no output file.
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local whole = command_line.whole
local lfs = require "lfs"
local merge = require "ps.checkpoints.merge"
local restore = require "ps.checkpoints.restore"
local folder = require "ps.pretrained.folder"

local NOTES = 20                                           -- maximum number of differences that are printed

local function say(text) io.stderr:write("merge: " .. text .. "\n") end

local function fail(text)
  say(text)
  os.exit(1)
end

local function arguments()
  local parser = argparse("psluajit merge", "Merges the shards of a checkpoint, one file per rank, into one file.")
  parser:option("--pattern", "names of the shards, where * stands for the rank: checkpoint-*.pt")
  whole(parser:option("--num", "number of shards: ranks 0 .. NUM - 1"), 1, 1e6)
  parser:option("--out", "file to write, .pt or .safetensors; default: the pattern with 'merged' for *")
  parser:flag("--strict", "values that differ between shards are an error; without it, the last rank's value is " ..
    "used, with a note")
  parser:flag("--force", "replace an existing file; continue even if there are more shards than --num")
  parser:argument("folder", "instead of --pattern: a folder of ps.checkpoints.save or save_parallelized"):args("*")
  local args = command_line.parse(parser)
  if not args.pattern then
    if #args.folder ~= 1 then
      fail("name the shards to merge: --pattern='checkpoint-*.pt' --num=4, or a checkpoint's folder")
    end
    return args
  end
  if not args.num then fail("--num is missing; it is the number of shards, which is the number of ranks that saved") end
  if #args.folder > 0 or not args.pattern:find("*", 1, true) then
    fail(("the pattern '%s'%s; write --pattern='checkpoint-*.pt', quoted, so that the shell does not expand it"):format(
      args.pattern, #args.folder > 0 and " is followed by " .. args.folder[1] or " has no * for the rank"))
  end
  return args
end

local function fill(pattern, text) return (pattern:gsub("%*", text)) end

local function same_file(a, b)
  local x, y = lfs.attributes(a), lfs.attributes(b)
  return x and y and x.dev == y.dev and x.ino == y.ino
end

-- Returns the names of the shards. Raises an error if a shard is missing, or if there is a shard whose number is --num
-- or higher.
local function shards_of(args)
  local paths, missing = {}, {}
  for rank = 0, args.num - 1 do
    local path = fill(args.pattern, ("%d"):format(rank))
    paths[rank + 1] = path
    if not lfs.attributes(path) then missing[#missing + 1] = path end
    if same_file(path, args.out) then fail(("%s is a shard; choose another --out"):format(args.out)) end
  end
  if #missing > 0 then
    fail(("%d of %d shards are missing: %s%s; --num is the number of ranks that saved"):format(#missing, args.num,
      table.concat(missing, ", ", 1, math.min(#missing, 8)), #missing > 8 and ", ..." or ""))
  end
  local next_one = fill(args.pattern, ("%d"):format(args.num))
  if lfs.attributes(next_one) then
    local text = ("there is a shard %s, but --num=%d"):format(next_one, args.num)
    if not args.force then fail(text .. "; give the number of ranks that saved, or --force to leave it out") end
    say(text .. ": left out")
  end
  return paths
end

-- Returns the folder of a checkpoint. If the path is a folder of checkpoints, returns the folder of the newest
-- checkpoint.
local function folder_of(path)
  local found = restore.candidates(path)[1]
  if not found then fail(restore.why_none(path)) end
  if lfs.attributes(found, "mode") == "directory" then return found end
  fail(lfs.attributes(found) and found .. " is a file, not the folder of a checkpoint" or found .. " does not exist")
end

-- Returns the files that save_parallelized wrote to a folder. If the folder is of another kind, returns nil.
local function parallelized(path)
  local ok, found = pcall(folder.stages, path)
  if not ok then fail(tostring(found)) end
  return found
end

-- Returns the tensors that are split across the files of save_parallelized, in the form that merge.run needs. Returns
-- nil if no tensor is split.
local function pieces_of(files)
  local placement, path = folder.placed(files)
  for _, entry in pairs(placement and placement.pieces or {}) do
    for _, piece in ipairs(entry.pieces) do piece.path = path .. "/" .. piece.file end
  end
  return placement and placement.pieces
end

-- Raises an error if the output would overwrite a shard, even if --force is set.
local function refuse_inputs(from, out, pattern)
  for name in lfs.dir(from) do
    if name:match(pattern or "") and same_file(from .. "/" .. name, out) then
      fail(("%s is %s, a part of the checkpoint; choose another --out"):format(out, from .. "/" .. name))
    end
  end
end

local args, from, paths, pieces = arguments(), nil, nil, nil
if args.pattern then
  args.out = args.out or fill(args.pattern, "merged")
  if not merge.format(args.out) then
    fail(("the name '%s' has no known extension; end --out in .pt (PyTorch) or .safetensors"):format(args.out))
  end
  paths = shards_of(args)
elseif #(parallelized(args.folder[1]) or {}) > 0 then
  paths, args.strict = parallelized(args.folder[1]), true
  pieces = pieces_of(paths)
  args.out = args.out or args.folder[1]:gsub("(.)/+$", "%1") .. "/pytorch_model.bin"
  if not merge.format(args.out) then fail(("end --out in .bin, .pt or .safetensors, not %s"):format(args.out)) end
  refuse_inputs(args.folder[1], args.out, "^pytorch_model_tp_")
else
  from = folder_of(args.folder[1])
  args.out = args.out or from .. "-merged.safetensors"
  refuse_inputs(from, args.out)
end
if lfs.attributes(args.out) and not args.force then fail(args.out .. " exists already; --force replaces it") end

local notes = 0
local function note(text)
  notes = notes + 1
  if notes <= NOTES then say(text) end
end
ps.catch_interrupts()  -- Ctrl-C, SIGTERM and SIGHUP end the merge between two pieces
local total, files = command_line.try("merge", function()
  if from then return merge.folder(from, args.out) end
  return merge.run(paths, { out = args.out, strict = args.strict, note = note, pieces = pieces }), #paths
end)
if notes > NOTES then say(("%d more differ"):format(notes - NOTES)) end
print(("%s: %d tensors, %.1f MB, from %d files"):format(args.out, total.tensors, total.nbytes / 1e6, files))
