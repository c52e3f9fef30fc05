-- SPDX-License-Identifier: BSD-3-Clause
-- require "ps" returns the engine's functions for scripts. Large parts (nn, optim, data, ...) are loaded when they are
-- first used.
local native = require "ps.core.ffi"
local tensor = require "ps.tensor"
local scope = require "ps.core.scope"
local devices = require "ps.core.devices"
local exact = require "ps.core.exact"
local foreign = require "ps.core.foreign"
local process = require "ps.core.process"
local autocast = require "ps.core.autocast"
local random = require "ps.core.random"
require "ps.core.words"

---@class ps
---@field functional ps.functional is also called F; it is loaded when it is first used
---@field F ps.functional
local ps = {
  scope_begin = scope.begin, scope_end = scope.finish,
  scope = scope.scope, no_grad = scope.no_grad, enable_grad = scope.enable_grad, grad_enabled = scope.grad_enabled,
  keep_cheap_outputs = scope.keep_cheap_outputs,
  offload_activations = scope.offload_activations,
  recompute = scope.recompute, autocast = autocast.run, backward = scope.backward,
  is_tensor = scope.is_tensor, collect = scope.collect, collect_all = scope.collect_all,
  all = {},                      -- selects every element of a dimension, in t[{ps.all, 0}]
  newaxis = require("ps.tensor.index").newaxis,                    -- adds a dimension of size 1, in t[{ps.newaxis, 0}]
}
for _, name in ipairs { "C", "ffi", "ctx", "check", "retry", "raise", "Error", "check_running", "give_room", "ops",
                        "own", "dtype_code", "device_index", "device_name" } do
  ps[name] = native[name]
end
for _, name in ipairs { "empty", "zeros", "ones", "full", "arange", "randn", "rand", "randint", "tensor", "cat",
                        "stack", "set_default_dtype", "set_default_device" } do
  ps[name] = tensor[name]
end
ps.same = tensor.same
ps.rng, ps.manual_seed, ps.computes = random.state, random.seed, devices.computes
ps.device, ps.devices, ps.fast_dtype, ps.prefers_fused = devices.open, devices.all, devices.fast_dtype,
  devices.prefers_fused
ps.set_memory_limit, ps.reset_peak_memory, ps.memory_available = devices.set_limit, devices.reset_peak,
  devices.available
for name, fn in pairs(process) do ps[name] = fn end
ps.version = native.ffi.string(native.C.ps_version())

local caller = native.caller
local error = caller.error

-- Returns a function that calls a tensor method. For arithmetic methods, the first argument can be a number if the
-- second is a tensor.
local function as_function(name, arithmetic)
  local methods, is_tensor = tensor.exact, scope.is_tensor
  return function(a, ...)
    if not is_tensor(a) and not (arithmetic and type(a) == "number" and is_tensor((...))) then
      error(("ps.%s takes %s, not %s"):format(name, arithmetic and "a tensor and a tensor or number" or "a tensor",
        a == nil and "nil" or type(a) == "number" and arithmetic and "numbers alone" or "a " .. type(a)))
    end
    if arithmetic and type(a) == "number" then return exact.inner(methods[name])(a, ...) end
    return methods[name](a, ...)
  end
end

--- Elementwise functions and shape functions are also available as ps.exp(x), ps.matmul(a, b), ps.where(c, a, b), ...
for _, name in ipairs { "add", "sub", "mul", "div", "pow", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge" } do
  ps[name] = as_function(name, true)
end
ps.where = tensor.where
for _, name in ipairs { "exp", "log", "sqrt", "rsqrt", "abs", "sign", "floor", "ceil", "round", "sin", "cos",
                        "erf", "tanh", "sigmoid", "relu", "silu", "gelu", "clamp", "isfinite", "sum", "mean", "amax",
                        "amin", "argmax", "argmin", "cumsum", "topk", "matmul", "softmax", "log_softmax", "gather",
                        "var", "std", "split", "reshape", "permute", "transpose", "flip", "roll", "tril", "triu",
                        "tile", "logsumexp", "norm", "sort", "scatter", "scatter_add", "scatter_reduce", "index_add",
                        "index_copy", "index_fill", "index_put", "index_select", "masked_fill", "masked_scatter",
                        "masked_select", "nonzero", "prod", "cumprod", "outer", "isnan", "isinf", "log1p", "expm1",
                        "lerp", "argsort", "remainder", "fmod", "trunc", "unflatten", "repeat_interleave",
                        "cdist", "isclose", "allclose", "equal", "unbind", "diag", "bernoulli",
                        "multinomial", "any", "max", "min", "neg", "square", "squeeze", "unsqueeze", "flatten", "chunk",
                        "narrow", "select", "numel", "bincount", "count_nonzero", "unique", "median", "quantile",
                        "searchsorted", "bucketize", "nan_to_num", "movedim", "swapaxes", "diagonal", "clip", "addcmul",
                        "addcdiv", "addmm", "baddbmm", "dot", "mv", "diff", "floor_divide", "log2", "log10" } do
  ps[name] = as_function(name)
end

function ps.memory(...) return exact.of(require("ps.memory.views").memory, "ps.memory")(...) end
function ps.chunks(...) return exact.of(require("ps.memory.views").chunks, "ps.chunks")(...) end

--- Returns the trace from which the plan was made for steps like the last step. The trace lists the moments of a step
--- in order, each with its chunks. A moment is the index of an op that uses chunks. The list prints as a table.
--- Adjacent moments with the same chunks share a row of this table. Before the first step is planned, the list is
--- empty.
---@param options? integer|string|{all?: boolean, action?: string} a chunk's id selects the moments that use this chunk;
--- a tensor's name selects the moments that use a chunk with this tensor. action: selects the moments of one action
--- ("forward", "backward", "update", ...). all: if true, every row is printed.
---@return ps.view.Moment[] moments The field `other` of the list has the peak number of bytes outside chunks for each
--- tier.
function ps.trace(options)
  local engine = require("ps.engine.setup").current()
  return require("ps.memory.trace").trace(engine and require("ps.engine.step").trace(engine), options)
end

--- Returns the state of the open engine as a table. The table prints as one line. Returns nil if no engine is open, or
--- if the engine's parameters are in plain memory.
---@return {model: ps.Engine, optimizer: ps.EngineOptimizer, device: string, precision: string, zero_stage: integer,
--- parameters: integer, scheduler?: ps.Schedule, steps: integer, micro: integer, micros: integer, in_step: boolean,
--- config: ps.Config}? state
function ps.engine()
  local engine = require("ps.engine.setup").current()
  return engine and require("ps.engine.state.values").state(engine) or nil
end

--- Returns the speed of Adam and of copies on a device. The first call in a process measures the speed, unless an
--- engine has already measured it.
---@param device string
---@return ps.Rates
function ps.device_rates(device) return require("ps.engine.plan.rates").measured(device) end

--- Creates models without data. The data is added later (see ps/nn/deferred.lua).
function ps.deferred(...) return exact.of(require("ps.nn.deferred").make, "ps.deferred")(...) end
function ps.materialize(...) return exact.of(require("ps.nn.deferred").materialize, "ps.materialize")(...) end

--- Creates an engine and its optimizer (see lua/ps/engine/init.lua and docs/config.md).
function ps.initialize(...)
  native.check_running "ps.initialize"
  return exact.of(require("ps.engine").initialize, "ps.initialize")(...)
end
ps.initialize_engine = ps.initialize

--- Prints help about a function, an op, a class or a module (see ps/prompt/help.lua).
function ps.help(...) return exact.of(require("ps.prompt.help").of(ps).help, "ps.help")(...) end

--- Finds the first op whose result contains a NaN or an infinity (see ps/inspect/anomaly.lua).
function ps.set_detect_anomaly(...)
  return exact.of(require("ps.inspect.anomaly").set_detect_anomaly, "ps.set_detect_anomaly")(...)
end
function ps.detect_anomaly(...) return require("ps.inspect.anomaly").detect_anomaly(...) end

--- Writes a value to a .pt or .safetensors file (see ps/io/serialize.lua).
function ps.save(value, path) return require("ps.io.serialize").save(value, path) end
function ps.load(path, options) return require("ps.io.serialize").load(path, options) end

--- Returns the model in a folder that Hugging Face's save_pretrained wrote, or the model with that name in Hugging
--- Face's cache. Nothing is downloaded. Every field of its config.json except dtype is applied. If a field is not
--- supported, the error names it. Weights are read one tensor at a time. In an engine's model_func, weights are read
--- directly into the engine's chunks, and each rank reads only the tensors that it owns. Parameters of the head that
--- the files lack get random values from the seed. A line on standard error names these parameters, and the tensors of
--- the files that the model does not use.
---@param name string a folder, or a name such as "gpt2" or "google-bert/bert-base-uncased"
---@param options? table The options are device, recompute, revision, quiet, dropout, and the options below. Settings
--- such as num_labels or hidden_dropout_prob replace the settings in config.json.
--- task: "causal_lm", "masked_lm", "sequence_classification", "token_classification", "question_answering" or "base"
--- (default: the class that config.json's architectures name).
--- dtype: default is the dtype of new tensors; "auto" is the file's dtype.
--- ignore_mismatched_sizes: if true, a head whose sizes in the files differ starts with random values.
--- mmap: true keeps weights in their safetensors files (docs/pretrained.md); "auto" does this if possible.
--- keep_quantized: true keeps weights of a GGUF file, or of a folder in NF4, packed and frozen (docs/gguf.md).
--- int8_activations: with keep_quantized, true rounds activations to 8 bits in generation, which is faster.
--- If the folder contains an adapter (docs/adapters.md), the base model that the adapter names is also loaded.
---@return ps.pretrained.Model model
function ps.from_pretrained(name, options)
  local load = require("ps.pretrained").load
  local folder = require "ps.pretrained.folder"
  if not (type(name) == "string" and folder.is_adapter(name)) then return load(name, options) end
  return require("ps.lora").from_pretrained(name, options)
end

--- Packs the weights of a model's linear layers as NF4, Q8_0, Q4_K or another type. Packed weights are frozen (see
--- ps/nn/quantize.lua).
---@param model ps.nn.Module a model without adapters, before ps.initialize
---@param options? {type?: string, skip?: string[], int8_activations?: boolean, double_quant?: boolean} type: "nf4"
--- (default), "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k" or "q6_k". skip: layers that are not packed, by their
--- names or the last components of their names. double_quant: for "nf4", uses 4.127 bits per weight instead of 4.5
---@return ps.nn.Module model
---@return {name: string, type: string}[] layers The packed layers.
function ps.quantize(model, options) return require "ps.nn.quantize"(model, options) end

--- Returns a model with random weights from a config.json. The model is in training mode. As in ps.from_pretrained,
--- every field is applied. If a field is not supported, the error names it.
---@param source string|table a folder, a name in Hugging Face's cache, or the decoded fields
---@param options? {task?: string, dtype?: string, device?: string, recompute?: boolean, revision?: string}
---@return ps.pretrained.Model model
function ps.from_config(source, options) return require("ps.pretrained").from_config(source, options) end

--- Functions for distributed runs (see ps/dist/init.lua).
for _, name in ipairs { "init_distributed", "rank", "world_size", "local_rank", "print_rank", "synchronize",
  "any_rank" } do
  ps[name] = function(...) return ps.dist[name](...) end
end

if require("ps.paths").pauses then require("ps.prompt.pause").attach(ps) end
if require("ps.paths").interprets then scope.caught = require("ps.prompt.locals").note end
require("ps.core.hooks").on("memory_short", function() return require("ps.memory.holders").refused() end)

exact.all(ps, "ps.")
tensor.later(function()
  require "ps.tensor.scatter"
  require "ps.tensor.small"
  require "ps.tensor.like"
  require "ps.tensor.composed"
  require "ps.tensor.counts"
  require "ps.tensor.shapes"
end)

local lazy = { nn = "ps.nn", lora = "ps.lora", preference = "ps.lora.preference", autograd = "ps.autograd",
  optim = "ps.optim", sched = "ps.optim.sched", data = "ps.data", chat = "ps.chat", tokenizer = "ps.tokenizer",
  checkpoints = "ps.checkpoints", train = "ps.train", evaluate = "ps.evaluate", safetensors = "ps.io.safetensors",
  progress = "ps.train.progress", pretty = "ps.tensor.pretty", profiler = "ps.profile.profiler",
  serialize = "ps.io.serialize", dist = "ps.dist", mesh = "ps.dist.mesh", inspect = "ps.inspect",
  comms_logger = "ps.profile.comms_summary", comm = "ps.profile.comms_summary" }       -- comm is the older name

-- Functions that are loaded from their file when a script first uses one of them.
local file_of = {}
for file, names in pairs { ["ps.tensor.composed"] = "eye linspace einsum one_hot",
  ["ps.tensor.shapes"] = "tril_indices triu_indices meshgrid",
  ["ps.tensor.like"] = "empty_like full_like ones_like rand_like randint_like randn_like randperm zeros_like" } do
  for name in names:gmatch "%S+" do file_of[name] = file end
end

local lazy_names = { F = true, functional = true, op_info = true }
for name in pairs(lazy) do lazy_names[name] = true end
for name in pairs(file_of) do lazy_names[name] = true end

local function names_of(...)
  local names = {}
  for i = 1, select("#", ...) do for name in pairs((select(i, ...))) do names[#names + 1] = name end end
  return names
end
foreign.home("ps", function(name) return rawget(ps, name) ~= nil or lazy_names[name] ~= nil end,
  function() return names_of(ps, lazy_names) end)
for place, file in pairs { F = "ps.tensor.functional", nn = "ps.nn", optim = "ps.optim", sched = "ps.optim.sched" } do
  foreign.home(place, function(name) return rawget(require(file), name) ~= nil end,
    function() return caller.sorted_names(require(file)) end)
end

local function old_checkpoint() require "ps.checkpoint" end

setmetatable(ps, {
  __names = function() return lazy_names end,
  all = function()               -- loads all functions of ps and returns ps, for code that lists them
    for name in pairs(file_of) do local _ = ps[name] end
    return ps
  end,
  __index = function(self, key)
    if key == "F" or key == "functional" then
      local functional = exact.all(require "ps.tensor.functional", "F.")
      rawset(self, "F", functional)
      rawset(self, "functional", functional)
      return foreign.public(functional, "F")
    end
    if file_of[key] then
      local fn = exact.of(require(file_of[key])[key], "ps." .. key)
      rawset(self, key, fn)
      return fn
    end
    if key == "op_info" then
      rawset(self, key, native.op_info)
      return native.op_info
    end
    local module = lazy[key]
    if not module then return key == "checkpoint" and old_checkpoint or foreign.known("ps", key) end
    local value = foreign.public(exact.all(require(module), key .. "."), key)
    rawset(self, key, value)
    return value
  end,
})

return ps
