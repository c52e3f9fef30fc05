-- SPDX-License-Identifier: BSD-3-Clause
-- Code that the examples with their own model share: options, the layout that --layout selects, and the training loop.
--   plain      one process; the model is in plain memory
--   chunks     one process; the model is in chunks (docs/memory.md)
--   zero       two ranks, over which all state is sharded
--   pipeline   two ranks, each with a stage of the model
--   tensor     two ranks, each with a part of each layer
-- The last three layouts run under tools/launch.lua --nproc-per-node 2. Each step has two micro-batches. With ZeRO,
-- each of the two ranks computes one micro-batch. So all layouts compute the same losses, even if a loss depends on
-- several rows of its micro-batch.
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.command_line"
local whole = command_line.whole

local CUTS = 2                                     -- number of micro-batches per step, summed over data-parallel ranks
local RANKS = { plain = 1, chunks = 1, zero = 2, pipeline = 2, tensor = 2 }

local layout = {}
layout.__index = layout

--- Reads the command line and joins the ranks.
---@param name string the script's name
---@param what string a sentence that describes the script
---@param default {steps: integer, batch: integer, lr: number, picture: string}
---@return table run run.args has the options
function layout.open(name, what, default)
  local parser = argparse("psluajit " .. name, what)
  parser:option("--layout", "how the model is trained", "plain"):choices { "plain", "chunks", "zero", "pipeline",
    "tensor" }
  whole(parser:option("--steps", "training steps", tostring(default.steps)), 1)
  whole(parser:option("--batch", "rows per step, of all ranks", tostring(default.batch)), CUTS)
  parser:option("--optimizer", "adamw or sgd", "adamw"):choices { "adamw", "sgd" }
  command_line.file(parser:option("--picture", "the picture's file, in PGM format", default.picture), ".pgm")
  command_line.folder(parser:option("--save", "a folder for a checkpoint of the last step"))
  command_line.file(parser:option("--trace", "a file for the first weights and batches, so that another program can "
    .. "repeat the training"), ".pt", ".pth", ".bin", ".ckpt", ".safetensors")
  local self = setmetatable({ args = command_line.parse(parser), lr = default.lr }, layout)
  local how, ranks = self.args.layout, tonumber(os.getenv "WORLD_SIZE" or "1")
  if RANKS[how] ~= ranks then
    io.stderr:write(("%s: --layout %s runs on %d rank%s, not on %d: psluajit launch.lua --nproc-per-node %d %s\n")
      :format(name, how, RANKS[how], RANKS[how] > 1 and "s" or "", ranks, RANKS[how], name))
    os.exit(1)
  end
  if ranks > 1 then ps.init_distributed { quiet = true } end
  return self
end

local SGD = { type = "SGD", params = { lr = 1024 } }

--- Creates the engine for a model.
---@param model_func fun(): ps.nn.Module
---@param example table a batch that a pipeline uses to measure the parts of the model
function layout:initialize(model_func, example)
  local how = self.args.layout
  local adamw = { type = "AdamW", params = { lr = self.lr, weight_decay = 0.01 } }
  self.model, self.optimizer = ps.initialize { quiet = true, model_func = model_func, example = example, config = {
    optimizer = self.args.optimizer == "sgd" and SGD or adamw, plan_print = false,
    gradient_accumulation_steps = how == "zero" and 1 or CUTS,
    memory = how == "plain" and "plain" or nil, zero_optimization = { stage = how == "zero" and 3 or 0 },
    pipeline = how == "pipeline" and { stages = 2 } or nil,
    tensor_parallel = how == "tensor" and { size = 2 } or nil } }
end

--- Trains on batches of named tensors. All ranks generate the same batch, and each data-parallel rank uses only its own
--- rows of the batch.
---@param batch fun(rows: integer): table
function layout:train(batch)
  local args, model, rank, ranks = self.args, self.model, ps.mesh.rank "dp", ps.mesh.size "dp"
  local trace = args.trace and model:state_dict()
  for name, t in pairs(trace or {}) do trace[name] = t:clone() end
  ps.manual_seed(2)
  for step = 1, args.steps do
    local given, own, loss = batch(args.batch), {}, 0
    for name, t in pairs(given) do
      if trace then trace[step .. "." .. name] = t end
      own[name] = t:narrow(0, rank * args.batch / ranks, args.batch / ranks)
    end
    for out in model:micro_batches(own) do
      model:backward(out.loss)
      loss = loss + out.loss:item() / CUTS
    end
    self.optimizer:step()
    if ranks > 1 then loss = ps.mesh.group("dp"):sum(ps.tensor(loss)):item() end
    if step <= 20 or step % 50 == 0 then ps.print_rank(("step %d  loss %.9f"):format(step, loss)) end
  end
  if trace then ps.save(trace, args.trace) end
  if args.save then ps.checkpoints.save(args.save, { model = model, optimizer = self.optimizer, shards = true }) end
end

--- Returns the model's output for a batch, on all ranks, without training.
---@param given table
---@param name string the tensor's name
---@return ps.Tensor the rows of all micro-batches
function layout:output(given, name)
  local list = {}
  self.model:eval()
  ps.no_grad(function()
    for out in self.model:micro_batches(given, { gather = true }) do list[#list + 1] = out[name]:clone():keep() end
  end)
  return ps.cat(list, 0)
end

return layout
