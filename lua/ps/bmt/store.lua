-- SPDX-License-Identifier: BSD-3-Clause
-- bmt.save writes the state dict of the whole model to one file, and bmt.load reads the file, even if ranks share the
-- model.
local create = require "ps.tensor.create"
local scope = require "ps.core.scope"
local serialize = require "ps.io.serialize"
local handle = require "ps.nn.handle"
local agree = require "ps.dist.agree"
local caller = require "ps.core.caller"
local mesh = require "ps.dist.mesh"
local parallel = require "ps.pretrained.parallel"
local save = require "ps.pretrained.save"
local shard = require "ps.tensor.shard"
local session = require "ps.bmt.session"
local error = caller.error

local store = {}

local BIN = parallel.bin_file
local SAVE = { non_blocking = "boolean" }
local WRITERS = { pt = BIN, pth = BIN, bin = BIN, ckpt = BIN, safetensors = save.safetensors_file }

-- Returns the whole tensor of a parameter that the ranks along tp share, gathered from their shards.
local function joined(own, desc)
  local group, shards = mesh.group "tp", {}
  local all = create.empty({ group:size(), own:numel() }, { dtype = own:dtype() })
  group:all_gather(all, own:contiguous():reshape(1, own:numel()))
  for i = 1, group:size() do shards[i] = all:select(0, i - 1):reshape(own:shape()) end
  return shard.join(desc, shards)
end

-- Returns a copy of a parameter in memory. If the parameter belongs to a block, all stages get the values from the
-- block's stage.
local function value_of(tensor)
  local stage = session.stage_of(tensor)
  local copy = session.elsewhere(tensor) and create.empty(tensor:shape(), { dtype = tensor:dtype(), device = "cpu" })
    or tensor:detach():clone():to "cpu"
  return stage and mesh.group "pp":broadcast(copy, stage) or copy
end

-- Returns the state of a model that has no engine yet. On rank 0, the result contains the whole state, in memory. On
-- other ranks, the result is empty. All ranks read all parameters, because reading a parameter gathers the parameter.
local function gathered(model, rank)
  local state, names, all = {}, {}, model:state_dict { tied = false }
  for name in pairs(all) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    scope.scope(scope.no_grad, function()
      local desc, copy = shard.of(all[name]), value_of(all[name])
      if desc then copy = joined(copy, desc) end
      if rank == 0 then state[name] = copy:keep() end
    end)
  end
  return state
end

--- Writes the model's values to one file, as a dict of tensors. The file's suffix selects the format: .pt, .pth, .bin
--- and .ckpt are PyTorch's format, and .safetensors is safetensors. For a model in training, the values are the fp32
--- values (masters). Only rank 0 writes, piece by piece. All ranks call this function between two steps. An error on
--- one rank is raised on all ranks.
---@param model ps.nn.Module
---@param file_name string
---@param options? {non_blocking?: boolean} non_blocking: true raises an error
function store.save(model, file_name, options)
  options = caller.options(options, "bmt.save", SAVE)
  caller.typed(file_name, "string", "bmt.save: the file")
  if options.non_blocking then
    error("bmt.save: non_blocking is not supported: the file is complete when bmt.save returns; "
      .. "ps.checkpoints.save has async = true")
  end
  local target, group = session.target(model), mesh.group "world"
  local rank = group and group:rank() or 0
  local writer = WRITERS[(file_name:match "%.(%w+)$" or ""):lower()]
  if not writer then
    error(("bmt.save: %s: the name must end in .pt, .pth, .bin, .ckpt or .safetensors, which sets the format"):format(
      file_name))
  end
  agree.same(group, "bmt.save", { { "file", file_name } })
  if not handle.of(target) then
    local state = agree.run(group, function() return gathered(model, rank) end)
    agree.run(group, function() if rank == 0 then serialize.save(state, file_name) end end)
    return
  end
  if target.micro > 0 then
    error "bmt.save writes the state between steps: call it after OptimManager:step(), or zero_grad()"
  end
  agree.run(group, function() return save.entries(target) end)       -- raises one rank's error on all ranks
  save.write(file_name, save.whole(target), writer, group)
end

local LOAD = { strict = "boolean" }

--- Copies the values of a file from bmt.save or torch.save into the model, one tensor at a time. All ranks call this
--- function and read the file. A step in progress is abandoned. If an OptimManager has received the model's optimizers,
--- the fp32 values of the file are written to the masters of bf16 and fp16 parameters. Otherwise the values are rounded
--- to the dtype of the parameters.
---@param model ps.nn.Module
---@param file_name string
---@param options? {strict?: boolean} strict: whether missing and unexpected names are errors (default true)
---@return {missing: string[], unexpected: string[]}
function store.load(model, file_name, options)
  options = caller.options(options, "bmt.load", LOAD)
  caller.typed(file_name, "string", "bmt.load: the file")
  session.hand_over(model)
  local target, group = session.target(model), mesh.group "world"
  local file = agree.run(group, function() return serialize.load(file_name, { lazy = true }) end)
  local function load() return target:load_state_dict(file, { strict = options.strict }) end
  if handle.of(target) then return load() end            -- the engine raises one rank's error on all ranks
  return agree.run(group, load)
end

return store
