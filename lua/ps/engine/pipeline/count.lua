-- SPDX-License-Identifier: BSD-3-Clause
-- Counts the costs of a model's parts (ps.nn.parts). To do so, runs one forward of the whole model on the device
-- "meta", which computes no values. Therefore models of any size can be counted, with or without data. The costs of a
-- part are its floating-point operations (of its forward and of both halves of its backward), its size in bytes, the
-- number of its dropouts, and the tensors that it passes to the next part.
--
-- The operations are the multiplications and additions of products and of attention, as in ps_op_cost. Backward
-- consists of two halves, which schedules use. INPUT computes the gradients of a part's inputs. WEIGHT computes the
-- gradients of a part's parameters. The backward of a product costs as much as its forward, for each input that
-- requires a gradient. The backward of attention costs 2.5 times as much as its forward, because backward computes the
-- scores again.
local create = require "ps.tensor.create"
local random = require "ps.core.random"
local scope = require "ps.core.scope"
local collector = require "ps.core.collector"
local views = require "ps.memory.views"
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"
local nn_module = require "ps.nn.module"
local registry = require "ps.nn.registry"
local parts = require "ps.nn.parts"
local random_state = require "ps.dist.random_state"
local C = native.C
local bit = require "bit"

local count = {}

---@class ps.engine.PartCost
---@field name string
---@field forward number floating-point operations of the part's forward for one micro-batch
---@field input number floating-point operations for the gradients of the part's inputs
---@field weight number floating-point operations for the gradients of the part's parameters
---@field numel integer number of elements of the part's parameters
---@field nbytes integer size in bytes of the part's parameters, in the dtypes in which they are used in ops
---@field activations integer number of bytes that the part's forward keeps for its backward, including the outputs; 0
---  if the forward frees more bytes of other parts than it keeps
---@field dropouts integer number of the part's ops that draw dropout masks
---@field first_dropout integer number of dropouts in all earlier parts
---@field trains boolean true if at least one of the part's parameters trains
---@field carry ps.engine.Carry[] the tensors that the part passes to the next part; empty for the last part
---@field carry_nbytes integer total size in bytes of the tensors in `carry`
---@field out? ps.engine.Carry[] outputs of the last part; nil in other parts
---@field uses string[] names of the parameters and buffers that the part's ops read; a tied tensor is listed under its
---  first name
---@field region? {on: boolean, shape: integer[]} the state of the tensor-parallel region before the part

---@class ps.engine.Carry
---@field name string
---@field shape integer[]
---@field dtype string
---@field nbytes integer
---@field needs_grad boolean true if the backward of the next part returns a gradient of this tensor

-- -- ops ------------------------------------------------------------------------------------------------------------
-- Returns true if backward computes a gradient of t.
local function wants(t) return t ~= nil and (t.node ~= nil or bit.band(t.flags, C.PS_T_REQUIRES_GRAD) ~= 0) end
-- Returns true if t is a leaf. Parameters are leaves.
local function is_leaf(t) return t.node == nil end

-- Returns a number that is equal for tensors that share a storage.
local function storage_of(t) return tonumber(native.ffi.cast("uintptr_t", t.storage)) end

local function size(t, d) return tonumber(t.shape_[d < 0 and t.ndim + d or d]) end

-- Adds the cost of a product with `flops` operations. The further arguments are inputs. Each input that requires a
-- gradient adds `flops` operations to backward.
local function product(cost, flops, ...)
  cost.forward = cost.forward + flops
  for i = 1, select("#", ...) do
    local t = select(i, ...)
    if wants(t) then
      local half = is_leaf(t) and "weight" or "input"
      cost[half] = cost[half] + flops
    end
  end
end

local function attention(cost, flops, ...)
  cost.forward = cost.forward + flops
  for i = 1, select("#", ...) do
    if wants((select(i, ...))) then
      cost.input = cost.input + 2.5 * flops
      return
    end
  end
end

-- COSTS contains functions by op name. Each function adds the operations of an op to a cost. Its arguments are the
-- cost, `flops`, the op's inputs `x` (from 0) and its attributes `a`. `flops` is the result of ps_op_cost for the
-- outputs that Lua gets. Therefore an lm_loss that computes gradients in its forward counts as one product. If an op
-- has the flag PRODUCT in ops.def, it counts as one product of its first two inputs, and needs no function here.
local COSTS = {
  mlp = function(cost, flops, x, a)                                               -- [N, I] -> [N, H] -> [N, O]
    local inner, outer = size(x[0], -1), size(x[3], a.out_in ~= 0 and 0 or 1)
    local first = flops * inner / (inner + outer)
    product(cost, first, x[0], x[1])
    product(cost, flops - first, x[3])
    if wants(x[0]) or wants(x[1]) then cost.input = cost.input + flops - first end   -- input of the second product
  end,
  attention = function(cost, flops, x) attention(cost, flops, x[0], x[1], x[2]) end,
  attention_packed = function(cost, flops, x) attention(cost, flops, x[0]) end,
}
local COST_OF = {}                                                                -- functions like COSTS, by op code
for op, row in pairs(native.op_info) do
  if row.flags:find "PRODUCT" then
    COST_OF[op] = function(cost, flops, x) product(cost, flops, x[0], x[1]) end
  end
end
for name, fn in pairs(COSTS) do COST_OF[C["PS_OP_" .. name]] = fn end

-- Observes ops while they run (see E.recorder).
local Watch = {}
Watch.__index = Watch
function Watch:begin(op, n_in, ins, attrs)
  for i = 0, n_in - 1 do
    local name = ins[i] ~= nil and self.name_of[storage_of(ins[i])]
    if name then self.used[name] = true end
  end
  local fn = COST_OF[op]
  if not fn then return nil end
  return { fn = fn, op = op, n_in = n_in, ins = ins, attrs = attrs }  -- C owns the arrays, which are valid until finish
end
local info = native.ffi.new "ps_op_cost_info"
function Watch:finish(note, outs)
  local x = {}
  for i = 0, note.n_in - 1 do x[i] = note.ins[i] ~= nil and note.ins[i] or nil end
  native.check(C.ps_op_cost(note.op, note.n_in, note.ins, note.attrs, native.op_info[note.op].n_out, outs, info))
  note.fn(self.cost, tonumber(info.flops), x, note.attrs)
end
function Watch:empty() end                                                        -- luacheck: ignore 212
function Watch:copied() end                                                       -- luacheck: ignore 212

-- -- models ---------------------------------------------------------------------------------------------------------
--- Replaces the tensors of modules by zeros. An fp32 parameter is replaced by zeros of the dtype in which ops use the
--- parameter. The returned function put_back restores the old tensors.
---@param places ps.nn.PartTensor[]
---@param device string
---@param precision? string
---@return fun() put_back
function count.stand_in(places, device, precision)
  local standing = {}
  for _, at in ipairs(places) do
    local value, is_param = at.tensor, at.kind == "param"
    local stand = standing[nn_module.address(value)]
    if not stand then
      local dtype = value:dtype()
      stand = create.zeros(value:shape(), { dtype = is_param and dtype == "fp32" and precision or dtype,
        device = device })
      if is_param and value:needs_grad() then stand:requires_grad(true) end
      standing[nn_module.address(value)] = stand:keep()
    end
    registry.put(at.owner, at.key, stand)
  end
  return function() for _, at in ipairs(places) do registry.put(at.owner, at.key, at.tensor) end end
end

--- Returns all tensors of a model, or of one of its parts, as the list that count.stand_in needs.
---@param model ps.nn.Module
---@param part? ps.nn.Part
---@param more? string[] names of further parameters of the model
---@return ps.nn.PartTensor[]
function count.places_of(model, part, more)
  local places = {}
  parts.each_tensor(model, part or { modules = { model } }, function(at) places[#places + 1] = at end, more)
  return places
end

-- Returns a copy of the arguments in which all tensors, including tensors in tables, are on the device "meta".
local function arguments_on_meta(value)
  if scope.is_tensor(value) then return create.empty(value:shape(), { dtype = value:dtype(), device = "meta" }) end
  if type(value) ~= "table" then return value end
  local copy = {}
  for key, item in pairs(value) do copy[key] = arguments_on_meta(item) end
  return copy
end

local function used()
  collector.thoroughly()
  return views.memory("meta").used
end

-- Returns the tensors that a part passes to the next part, as a list sorted by name, and their total size in bytes.
local function carry_of(part, carry)
  if type(carry) ~= "table" then
    error(("part %s returned a %s; a part's forward must return a table of tensors"):format(part.name, type(carry)), 0)
  end
  local list, nbytes = {}, 0
  for name, t in pairs(carry) do
    if type(name) ~= "string" or not scope.is_tensor(t) then
      error(("part %s returned %s = a %s; a part's forward must return tensors by name"):format(
        part.name, tostring(name),
        type(t)), 0)
    end
    list[#list + 1] = { name = name, shape = t:shape(), dtype = t:dtype(), nbytes = t:nbytes(),
      needs_grad = t:needs_grad() }
    nbytes = nbytes + t:nbytes()
  end
  table.sort(list, function(a, b) return a.name < b.name end)
  return list, nbytes
end

--- Adds the number of elements and bytes of a part's parameters to the part's cost. Sets cost.trains if at least one of
--- these parameters trains.
---@param model ps.nn.Module
---@param part ps.nn.Part
---@param cost ps.engine.PartCost
function count.add_parameters(model, part, cost)
  local seen = {}
  parts.each_tensor(model, part, function(at)
    local p = at.tensor
    if at.kind ~= "param" or seen[nn_module.address(p)] then return end
    seen[nn_module.address(p)] = true
    cost.numel, cost.nbytes = cost.numel + p:numel(), cost.nbytes + p:nbytes()
    cost.trains = cost.trains or p:needs_grad()
  end)
end

-- Returns a text that is equal for parts that have the same modules, sizes and operations. If two parts have equal
-- texts, they keep the same number of bytes for backward.
local function likeness(part, cost)
  local said = {}
  for _, module in ipairs(part.modules or {}) do said[#said + 1] = tostring(module) end
  for _, key in ipairs { "forward", "input", "weight", "numel", "nbytes", "dropouts" } do
    said[#said + 1] = ("%.17g"):format(cost[key])
  end
  for _, t in ipairs(cost.carry) do
    said[#said + 1] = ("%s %s %s %s"):format(t.name, t.dtype, tostring(t.needs_grad), table.concat(t.shape, ","))
  end
  return table.concat(said, "\n")
end

--- Returns the names of a model's parameters and buffers. A tied tensor has the first of its names.
---@param module ps.nn.Module
---@param key_of fun(t: ps.Tensor): any returns equal keys for tensors that count as one
---@return table<any, string> names by key
function count.first_names(module, key_of)
  local name_of = {}
  for _, iterate in ipairs { module.named_parameters, module.named_buffers } do
    for name, t in iterate(module) do
      local at = key_of(t)
      name_of[at] = name_of[at] or name
    end
  end
  return name_of
end

-- Runs one forward of all parts. For each part whose index is in `measured`, also measures the bytes that the part
-- keeps. For this purpose, collects garbage before and after the part.
local function pass(module, args, measured, cached)
  local list, rng = parts.of(module), random.state()
  local watch = setmetatable({ name_of = count.first_names(module, storage_of), used = {} }, Watch)
  local batch, carry, costs = parts.batch(module, arguments_on_meta(args)), {}, {}
  local region = rawget(module, "parallel_region")
  if cached then batch.cached = true end
  rng.op = 0
  native.recorder = watch
  for i, part in ipairs(list) do
    local cost = { name = part.name, forward = 0, input = 0, weight = 0, numel = 0, nbytes = 0, trains = false,
      activations = 0, first_dropout = tonumber(rng.op), region = region and region:state() }
    count.add_parameters(module, part, cost)
    watch.used = {}
    watch.cost = cost
    local before = measured[i] and used()
    carry = scope.scope(part.forward, carry, batch)
    if before then cost.activations = math.max(0, used() - before) end
    cost.dropouts, cost.uses = tonumber(rng.op) - cost.first_dropout, caller.sorted_names(watch.used)
    cost.carry, cost.carry_nbytes = carry_of(part, carry)
    if i == #list then cost.out, cost.carry, cost.carry_nbytes = cost.carry, {}, 0 end
    costs[i] = cost
  end
  return costs
end

-- Counts the costs of all parts. Measures the kept bytes only for the first part of each kind. Most parts of a model
-- are equal, and collecting the garbage of a large model is slow.
local function run(module, args, carries, cached)
  local list, costs = parts.of(module), pass(module, args, {}, cached)
  if carries then return costs end
  local first, kind = {}, {}
  for i, cost in ipairs(costs) do
    local like = likeness(list[i], cost)
    kind[like] = kind[like] or i
    first[i] = kind[like]
  end
  local measured = {}
  for _, i in pairs(kind) do measured[i] = true end
  local seen = pass(module, args, measured)
  for i, cost in ipairs(costs) do cost.activations = seen[first[i]].activations end
  return costs
end

--- Counts the costs of a model's parts for one micro-batch.
---@param module ps.nn.Module with parts()
---@param args any[] the model's arguments; their tensors have the shapes of a micro-batch, on any device
---@param precision? "fp32"|"bf16"|"fp16" the dtype in which ops use fp32 parameters (default fp32)
---@param carries? boolean if true, does not measure `activations`, which requires a garbage collection before and after
---  each part
---@param cached? boolean if true, counts a step of generate with cached keys and values (the batch has cached = true).
---  Requires `carries`
---@return ps.engine.PartCost[]
function count.parts(module, args, precision, carries, cached)
  parts.of(module)                      -- raises an error if the list of parts is wrong, before tensors are replaced
  local put_back = count.stand_in(count.places_of(module), "meta", precision)
  local restore, was = random_state.keep(), native.recorder
  local ok, result = pcall(scope.scope, scope.enable_grad, run, module, args, carries, cached)
  native.recorder = was
  restore()
  put_back()
  if ok then return result end
  local why = type(result) == "table" and result.msg or tostring(result)
  local text = ("the costs of the model's parts cannot be counted: they ran once on tensors without data, and one "
    .. "failed: %s. A model that is cut into stages must not read values in its forward (item, tolist, a comparison of "
    .. "tensors)"):format(why)
  if type(result) ~= "table" then error(text, 0) end
  result.msg = text
  error(result, 0)
end

return count
