-- SPDX-License-Identifier: BSD-3-Clause
-- Trains a small model on a mesh of ranks (dp, pp, tp), and compares it with the same training on one rank.
-- bench/mesh.lua and spec/parallel/tensor_parallel_ranks_spec.lua use it. mesh_lib.rank runs on each rank and writes
-- files. mesh_lib.compare runs in another process, joins the tensors of the ranks and compares them.
--
-- There are two runs. The first run is a single step of SGD without momentum. The gradient of a parameter is computed
-- from this step as
--   (value before - value after) / learning rate
-- This formula is correct for every layout, no matter where the layout stores gradients. The second run starts again
-- from the initial values and has o.steps steps.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local cjson = require "cjson"
local mesh = require "ps.dist.mesh"
local shard = require "ps.tensor.shard"

local lib = {}

---@class bench.Mesh a training run of several ranks
---@field folder string
---@field dp? integer
---@field pp? integer
---@field tp? integer
---@field zero? integer
---@field family? string the model's family (default gpt2)
---@field options? table the model's options
---@field task? string if it is set, batches have named tensors
---@field preset? string|table the model's preset (default tiny)
---@field rows? integer number of rows in a batch (default 4)
---@field positions? integer number of positions in a row (default 16)
---@field words? integer number of token ids (default 256)
---@field micros? integer number of micro-batches (default 1)
---@field steps? integer number of steps in the second run (default 3), or 0 for no second run
---@field sgd? boolean true if the second run uses SGD with momentum instead of AdamW
---@field clip? number the maximum norm of the gradients (default 1)
---@field config? table the configuration for ps.initialize

local hash_out = ps.ffi.new "uint64_t[1]"

local function same_bits(a, b)
  ps.check(ps.C.ps_tensor_hash(a:contiguous(), hash_out))
  local first = hash_out[0]
  ps.check(ps.C.ps_tensor_hash(b:contiguous(), hash_out))
  return hash_out[0] == first
end

local function merged(a, b)
  for key, value in pairs(b or {}) do
    if type(value) == "table" and type(a[key]) == "table" then merged(a[key], value) else a[key] = value end
  end
  return a
end

local function open(o, optimizer, clip)
  ps.manual_seed(5)
  local options = merged({ dropout = 0, task = o.task }, o.options)
  return ps.initialize { quiet = true, model_func = function()
    return require("models." .. (o.family or "gpt2")).new(o.preset or "tiny", options)
  end, config = merged({ plan_print = false, gradient_accumulation_steps = o.micros or 1, gradient_clipping = clip,
    optimizer = optimizer, pipeline = { stages = o.pp or 1 }, tensor_parallel = { size = o.tp or 1 },
    zero_optimization = { stage = o.zero or 0 } }, o.config) }
end

-- Returns the mean over all ranks that have different rows.
local function mean(value)
  local group = mesh.group "dp"
  if not group then return value end
  return group:all_reduce(ps.tensor({ value }, { dtype = "fp64" })):item() / group:size()
end

-- Runs a step on this rank's rows of batch `number`. Returns the loss of the batch.
local function step(o, model, optimizer, number)
  ps.manual_seed(20 + number)
  local rows, T, words = o.rows or 4, o.positions or 16, o.words or 256
  local x, y = ps.randint(0, words, { rows, T }, { dtype = "int32" }), ps.randint(0, words, { rows, T },
    { dtype = "int32" })
  local n = rows / mesh.size "dp"
  local first = mesh.rank "dp" * n
  ps.rng().sample = first                          -- samples have the same indices as on one rank
  local sum, count = 0, 0
  optimizer:zero_grad()
  x, y = x:narrow(0, first, n):contiguous(), y:narrow(0, first, n):contiguous()
  local given = { x, y }
  if o.task then
    if o.task == "sequence_classification" then y = y:select(1, 0):ge(128):to "int64" end
    given = { { input_ids = x, labels = y } }
  end
  for out in model:micro_batches(unpack(given)) do
    sum, count = sum + out.loss:item(), count + 1
    model:backward(out.loss)
  end
  optimizer:step()
  return mean(sum / count)
end

-- Writes this rank's tensors, and their positions within the whole tensors.
local function save(o, model, name)
  local state, places = {}, {}
  local of = {}
  for key, p in model.module:named_parameters() do of[key] = shard.of(p) end
  for key, t in pairs(model:state_dict()) do
    state[key] = t:to { dtype = "fp32", device = "cpu" }:detach()
    local desc = of[key]
    if desc then places[key] = { shape = desc.full_shape, pieces = shard.pieces(desc) } end
  end
  local path = ("%s/%s.%d"):format(o.folder, name, ps.rank())
  ps.save(state, path .. ".safetensors")
  local f = assert(io.open(path .. ".json", "w"))
  f:write(cjson.encode(places))
  assert(f:close())
end

--- Trains on this rank. Writes these files to o.folder, with names that begin with o.name:
---   .begin  the values before the first run
---   .sgd    the values after the first run
---   .end    the values after the second run
---   .run    the losses of both runs, the gradient norms of the second run, and the number of elements
---@param o bench.Mesh
function lib.rank(o)
  local model, optimizer = open(o, { type = "SGD", params = { lr = 100 } }, 0)
  save(o, model, o.name .. ".begin")
  local losses, norms, numel = { step(o, model, optimizer, 0) }, {}, 0
  save(o, model, o.name .. ".sgd")
  for _, row in ipairs(inner(model).built.list) do numel = numel + row.numel end
  model:close()
  if (o.steps or 3) > 0 then
    model, optimizer = open(o, o.sgd and { type = "SGD", params = { lr = 0.1, momentum = 0.9 } }
      or { type = "AdamW", params = { lr = 1e-3, eps = 1e-4 } }, o.clip or 1)
    for i = 1, o.steps or 3 do
      losses[i + 1] = step(o, model, optimizer, i)
      norms[i] = optimizer.grad_norm or 0
    end
    save(o, model, o.name .. ".end")
    model:close()
  end
  local f = assert(io.open(("%s/%s.%d.run"):format(o.folder, o.name, ps.rank()), "w"))
  f:write(cjson.encode { losses = losses, norms = norms, numel = numel })
  assert(f:close())
end

-- -- outside the ranks ------------------------------------------------------------------------------------------------
local function read_json(path)
  local f = assert(io.open(path))
  local value = cjson.decode(f:read "*a")
  f:close()
  return value
end

--- Joins the tensors that `size` ranks wrote under the name `name`. Returns the whole tensors. If several ranks wrote
--- the same shard, its copies must be bit-identical.
---@param folder string
---@param name string
---@param size integer
---@return table<string, ps.Tensor>
function lib.whole(folder, name, size)
  local state, filled = {}, {}
  for rank = 0, size - 1 do
    local path = ("%s/%s.%d"):format(folder, name, rank)
    local places = read_json(path .. ".json")
    for key, t in pairs(ps.load(path .. ".safetensors")) do
      local place = places[key]
      if not place then
        if state[key] and not same_bits(state[key], t) then
          error(("%s: %s has different values on rank %d"):format(name, key, rank), 0)
        end
        state[key] = t
      else
        state[key] = state[key] or ps.zeros(place.shape)
        filled[key] = filled[key] or ps.zeros(place.shape)
        for _, piece in ipairs(place.pieces) do
          local from, to, counts = t, state[key], filled[key]
          for d, n in ipairs(piece.shape) do
            from = from:narrow(d - 1, piece.at[d], n)
            to, counts = to:narrow(d - 1, piece.offset[d], n), counts:narrow(d - 1, piece.offset[d], n)
          end
          to:copy_(from)
          counts:fill_(1)
        end
      end
    end
  end
  for key, t in pairs(filled) do
    if t:min():item() < 1 then error(("%s: a part of %s is missing"):format(name, key), 0) end
  end
  return state
end

local function largest(list, wanted)
  local worst = 0
  for i, value in ipairs(list) do
    local err = math.abs(value - wanted[i]) / math.abs(wanted[i])
    worst = math.max(worst, err == err and err or math.huge)
  end
  return worst
end

--- Compares the results that `size` ranks wrote under the name `name` with the results that a single rank wrote under
--- the name `one`.
---@param folder string
---@param name string
---@param size integer number of ranks
---@param one string
---@return {max_rel_loss_error: number, max_rel_grad_error: number, worst: string, norm_error: number, same_begin:
--- boolean, max_rel_param_error: number, numel: number}
function lib.compare(folder, name, size, one)
  local run, want = read_json(("%s/%s.0.run"):format(folder, name)), read_json(("%s/%s.0.run"):format(folder, one))
  local result = { max_rel_loss_error = largest(run.losses, want.losses), max_rel_grad_error = 0, worst = "",
    norm_error = largest(run.norms, want.norms), same_begin = true, max_rel_param_error = 0,
    numel = run.numel / want.numel }
  local states = {}
  for _, when in ipairs(#run.norms > 0 and { "begin", "sgd", "end" } or { "begin", "sgd" }) do
    states[when] = { lib.whole(folder, name .. "." .. when, size), lib.whole(folder, one .. "." .. when, 1) }
  end
  for key, t in pairs(states.begin[2]) do
    local begin, sgd = states.begin[1][key], states.sgd[1][key]
    if not begin then error(("no rank has %s"):format(key), 0) end
    result.same_begin = result.same_begin and same_bits(begin, t)
    local update = states.sgd[2][key]:to "fp64" - t:to "fp64"
    local norm = update:norm():item()
    local err = (sgd:to "fp64" - begin:to "fp64" - update):norm():item() / (norm > 0 and norm or 1)
    -- The true gradient of a key bias is zero, because the softmax of attention does not change if the same number is
    -- added to all scores.
    local none = key:find "key%.bias$" or key:find "k_proj%.bias$"
    if err ~= err then err = math.huge end
    if not none and err > result.max_rel_grad_error then result.max_rel_grad_error, result.worst = err, key end
    if states["end"] then
      local last, wanted = states["end"][1][key]:to "fp64", states["end"][2][key]:to "fp64"
      result.max_rel_param_error = math.max(result.max_rel_param_error,
        (last - wanted):norm():item() / math.max(wanted:norm():item(), 1e-3))
    end
  end
  return result
end

return lib
