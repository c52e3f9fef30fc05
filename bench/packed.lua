-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/packed.lua DIR IN.safetensors [--device NAME] [--one-by-one]: runs the model of a Hugging Face folder
-- in fp32 and in evaluation mode (no dropout) on rows that contain several sequences each. IN.safetensors contains
-- input_ids [R, T] and segment_ids [R, T], both int32. Adjacent positions with the same nonzero segment id are one
-- sequence. Segment id 0 is padding. Position ids begin again at 0 in each sequence.
-- The results are written to IN.out.safetensors. losses [R, T]: element [r, t] is the loss of row r for predicting
-- token t + 1 at position t. The loss is 0 at the last position of a sequence and at padding. grad.NAME: the gradient
-- of the sum of all losses with respect to tensor NAME of the folder's files, in that tensor's shape.
-- With --one-by-one, each sequence is a batch of its own, for comparisons.
-- If the folder is not supported, the exit status is 2, and the first line of stderr is `refused: FIELD = VALUE: why`.
local ps = require "ps"
local same_shape = require("ps.nn.module").same_shape
local F, IGNORED = ps.functional, require("ps.data.batch").IGNORED

local function ids_of(file, name, path)
  local t = file:tensor(name)
  if t == nil or t:dtype() ~= "int32" or t:dim() ~= 2 then
    error(("%s: %s is %s; it must be int32 [R, T]"):format(path, name, t == nil and "missing"
      or t:dtype() .. " [" .. table.concat(t:shape(), ", ") .. "]"), 0)
  end
  return t
end

-- Returns the sequences in segments [R, T] as a list of {row, first, n}. row and first are counted from 0.
local function sequences(segments, path)
  local R, T, list = segments:size(0), segments:size(1), {}
  for row = 0, R - 1 do
    local ids, seen, at = segments[row]:tolist(), {}, 1
    while at <= T do
      local id, last = ids[at], at
      while ids[last + 1] == id do last = last + 1 end
      if id ~= 0 and seen[id] then
        error(("%s: row %d of segment_ids has segment %d in two places, at %d and at %d: give each its own number")
          :format(path, row, id, seen[id] - 1, at - 1), 0)
      end
      seen[id] = at
      if id ~= 0 then list[#list + 1] = { row, at - 1, last - at + 1 } end
      at = last + 1
    end
  end
  return list
end

-- Returns the losses [R, T] of a batch, with gradients. The target of a position is the id at the next position of the
-- same segment.
local function losses_of(model, batch)
  local ids, segments = batch.input_ids, batch.segment_ids
  local B, T = ids:size(0), ids:size(1)
  local logits = model(batch).logits
  if logits == nil or logits:dim() ~= 3 then
    error(model.class_name .. " has no logits for each position: give a folder of a language model", 0)
  end
  local targets = require("ps.pretrained.heads").shifted { labels = ids, segment_ids = segments }
  return F.cross_entropy(logits:reshape(B * T, -1), targets:reshape(B * T), { reduction = "none",
    ignore_index = IGNORED }):reshape(B, T)
end

local function run(folder, path, device, one_by_one)
  local file = ps.safetensors.open(path)
  local ids, segments = ids_of(file, "input_ids", path), ids_of(file, "segment_ids", path)
  if not same_shape(ids:shape(), segments:shape()) then
    error(("%s: input_ids is [%s], but segment_ids is [%s]"):format(path, table.concat(ids:shape(), ", "),
      table.concat(segments:shape(), ", ")), 0)
  end
  local list = sequences(segments, path)
  local model = ps.from_pretrained(folder, { dtype = "fp32", device = device, quiet = true })
  model:eval()
  local out = { losses = ps.zeros(ids:shape()) }
  local function part(from, to, first, n)
    local where = function(t) return t:slice(0, from, to):slice(1, first, first + n):contiguous():to(device) end
    local losses = losses_of(model, { input_ids = where(ids), segment_ids = where(segments) })
    losses:sum():backward()
    out.losses:slice(0, from, to):slice(1, first, first + n):copy_(losses:detach():to "cpu")
  end
  if one_by_one then for _, s in ipairs(list) do part(s[1], s[1] + 1, s[2], s[3]) end
  else part(0, ids:size(0), 0, ids:size(1)) end
  local grads = {}
  for name, p in model:named_parameters() do grads[name] = p:grad() end
  for name, own in pairs(model.loaded.names) do
    if grads[own] ~= nil then out["grad." .. name] = grads[own]:detach():to("cpu"):contiguous():keep() end
  end
  ps.safetensors.save((path:gsub("%.safetensors$", "") .. ".out.safetensors"), out)
end

local parser = require "argparse" ("bench/packed.lua", "Runs a Hugging Face folder on rows of several sequences.")
parser:argument "folder"
parser:argument "file"
parser:option("--device", "a device; ref gives the same bits packed and one by one"):default "cpu"
parser:flag("--one-by-one", "each sequence in a batch of its own")
local args = require("ps.core.command_line").parse(parser)
local ok, problem = pcall(run, args.folder, args.file, args.device, args.one_by_one)
if not ok then
  local refused = type(problem) == "table" and problem.refused
  io.stderr:write(refused and "refused: " .. refused or tostring(problem), "\n")
  os.exit(refused and 2 or 1)
end
