-- SPDX-License-Identifier: BSD-3-Clause
-- Lines of training loops from the guides of PyTorch, Hugging Face, DeepSpeed, PatrickStar, BMTrain and OSLO, in Lua,
-- for idioms_spec.lua. Each runs on every layout, in one process (or set of ranks) per layout. Each must have the
-- values of a module and an optimizer without an engine, or be an error that names the right call. The rows are in
-- idioms_*.lua, a file for each guide or part of it.
local ps = require "ps"
local gpt2 = require "models.gpt2"

local lib = {}

local OPTIONS = { n_layer = 2, n_embd = 16, n_head = 2, vocab_size = 32, n_positions = 8, embd_pdrop = 0,
  attn_pdrop = 0, resid_pdrop = 0 }
local RATE = 0.5

lib.NAMES = { "plain", "chunks", "zero3", "pipeline", "tensor" }
lib.LAYOUTS = {
  plain = { ranks = 1, config = { memory = "plain" } },
  chunks = { ranks = 1, config = {} },
  zero3 = { ranks = 2, config = { zero_optimization = { stage = 3 } } },
  pipeline = { ranks = 2, config = { pipeline = { stages = 2 } } },
  tensor = { ranks = 2, config = { tensor_parallel = { size = 2 } } },
}

---@class Idiom
---@field guide string
---@field name string the idiom's line in the guide
---@field run fun(e: table): any raises an error if a check fails
---@field fails table<string, string> layout -> words of the expected error

---@type Idiom[]
lib.IDIOMS = {}

--- Returns a function that adds rows of a guide: row(name, run, fails). `fails` has words of the expected error, for
--- all layouts or by layout.
---@param guide string
---@return fun(name: string, run: fun(e: table), fails?: string|table<string, string>)
local function rows_of(guide)
  return function(name, run, fails)
    if type(fails) == "string" then
      local words = fails
      fails = {}
      for _, layout in ipairs(lib.NAMES) do fails[layout] = words end
    end
    lib.IDIOMS[#lib.IDIOMS + 1] = { guide = guide, name = name, run = run, fails = fails or {} }
  end
end

-- -- the reference --------------------------------------------------------------------------------------------------
local function model_func(more)
  local options = {}
  for key, value in pairs(OPTIONS) do options[key] = value end
  for key, value in pairs(more or {}) do options[key] = value end
  ps.manual_seed(1)
  return gpt2.new(options)
end

-- Returns a batch of all ranks: inputs and targets [4, 8], without ignored targets.
local function whole_batch()
  ps.manual_seed(2)
  local ids = ps.randint(0, 32, { 4, 9 }, { dtype = "int64" })
  return ids:narrow(1, 0, 8):contiguous(), ids:narrow(1, 1, 8):contiguous()
end

-- Returns the losses of the whole batch before steps 1, 2, 3, ... of SGD without an engine. `how` has functions:
-- made(model) is called first, and before(model, optimizer, step) between backward and step.
local function reference(n, how)
  how = how or {}
  local model, losses = model_func(how.options), {}
  if how.made then how.made(model) end
  local optimizer = ps.optim.SGD(model, { lr = RATE, per_rank = ps.world_size() > 1 or nil })
  local x, y = whole_batch()
  for step = 1, n do
    local loss = model(x, y)
    losses[step] = loss:item()
    loss:backward()
    if how.before then how.before(model, optimizer, step) end
    optimizer:step()
    optimizer:zero_grad()
  end
  return losses, model
end

-- -- the case -------------------------------------------------------------------------------------------------------
---@class IdiomCase
---@field layout string
---@field config table the configuration keys that define the layout
---@field losses number[] the reference's losses
---@field model ps.Engine
---@field optimizer ps.EngineOptimizer
---@field x ps.Tensor this rank's rows
---@field y ps.Tensor
---@field whole_x ps.Tensor the rows of all ranks
---@field whole_y ps.Tensor
local Case = {}
Case.__index = Case
Case.model_func, Case.reference, Case.OPTIONS, Case.RATE = model_func, reference, OPTIONS, RATE

--- Creates an engine.
---@param config? table additional configuration keys
---@param request? table other arguments of ps.initialize
function Case:make(config, request)
  local all = { plan_print = false, optimizer = { type = "SGD", params = { lr = RATE } } }
  for key, value in pairs(lib.LAYOUTS[self.layout].config) do all[key] = value end
  for key, value in pairs(config or {}) do all[key] = value end
  local arguments = { quiet = true, model_func = model_func, config = all }
  for key, value in pairs(request or {}) do arguments[key] = value end
  if arguments.model then arguments.model_func = nil end
  if self.model then self.model:close() end
  self.model, self.optimizer = ps.initialize(arguments)
  return self.model, self.optimizer
end

--- Creates an engine whose gradients remain until optimizer:step() in every layout.
function Case:make_kept(config)
  local all = { overlap_optimizer = false }
  for key, value in pairs(config or {}) do all[key] = value end
  return self:make(all)
end

--- Returns the loss of all ranks' rows.
---@param loss ps.Tensor
---@return number
function Case:loss_of(loss)
  local value = loss:detach():reshape(1):clone()
  return self.group and self.group:all_reduce(value):item() / ps.world_size() or value:item()
end

--- Compares numbers.
function Case.near(got, want, what, bound)
  if math.abs(got - want) <= (bound or 2e-5) * math.max(math.abs(want), 1e-3) then return end
  error(("%s is %.7g, not %.7g"):format(what or "the value", got, want), 2)
end

--- Compares a loss with the reference's loss before step n.
function Case:holds(loss, n, want)
  want = want or self.losses[n]
  local got = type(loss) == "number" and loss or self:loss_of(loss)
  if math.abs(got - want) > 2e-5 * want then
    error(("the loss before step %d is %.7g, the reference's is %.7g"):format(n, got, want), 2)
  end
end

--- Calls fn in the first iteration of a loop over micro-batches, before or after backward. Ends the step, and then
--- raises the call's error. An error that leaves the loop would end the ranks' group.
---@param fn fun(loss: ps.Tensor)
---@param after? boolean
function Case:in_loop(fn, after)
  local ok, problem
  for out in self.model:micro_batches(self.x, self.y) do
    if after then self.model:backward(out.loss) end
    if ok == nil then ok, problem = pcall(fn, out.loss) end
    if not after then self.model:backward(out.loss) end
  end
  self.optimizer:step()
  if not ok then error(problem, 0) end
end

--- Runs forward and backward of a step in the layout's way.
---@return number loss the loss of all rows
function Case:pass(x, y)
  x, y = x or self.x, y or self.y
  if self.layout ~= "pipeline" then
    local loss = self.model(x, y)
    self.model:backward(loss)
    return self:loss_of(loss)
  end
  local sum, n = 0, 0
  for out in self.model:micro_batches(x, y) do
    sum, n = sum + out.loss:item(), n + 1
    self.model:backward(out.loss)
  end
  return sum / n
end

--- Returns the loss of all rows, without gradients.
function Case:look(x, y)
  x, y = x or self.x, y or self.y
  return ps.no_grad(function()
    if self.layout ~= "pipeline" then return self:loss_of(self.model(x, y)) end
    local sum, n = 0, 0
    for out in self.model:micro_batches(x, y) do sum, n = sum + out.loss:item(), n + 1 end
    return sum / n
  end)
end

--- Runs a step of the case after n steps. The loss must equal the reference's loss.
---@return table info the result of optimizer:step()
function Case:after(n, want)
  self:holds(self:pass(), n + 1, want)
  return self.optimizer:step()
end

--- Returns a path that is the same on all ranks.
function Case:path(name) return ("%s/%s"):format(self.folder, name) end

--- Returns a path that is different on each rank.
function Case:own_path(name) return ("%s/rank%d-%s"):format(self.folder, ps.rank(), name) end

local function new_case(layout, losses, folder)
  local self = setmetatable({ layout = layout, config = lib.LAYOUTS[layout].config, losses = losses, folder = folder },
    Case)
  local x, y = whole_batch()
  self.whole_x, self.whole_y = x, y
  if layout == "zero3" then x, y = x:narrow(0, 2 * ps.rank(), 2), y:narrow(0, 2 * ps.rank(), 2) end
  self.x, self.y = x:contiguous(), y:contiguous()
  self.group = layout == "zero3" and ps.mesh.group "world" or nil
  return self
end

-- -- runs -----------------------------------------------------------------------------------------------------------
-- The error of a pipeline for model(x, y) outside of a loop.
lib.LOOP = { pipeline = "in model:micro_batches(x, y) do" }

-- Runs a case. Returns "", or the fault.
local function outcome(idiom, layout, losses, folder)
  local e = new_case(layout, losses, folder)
  local ok, problem = pcall(idiom.run, e)
  if e.model then pcall(e.model.close, e.model) end
  problem = tostring(problem):gsub("%s+", " ")
  local words = idiom.fails[layout]
  if not words then return ok and "" or problem end
  if ok then return "did nothing, without an error that says " .. words end
  return problem:find(words, 1, true) and "" or ("the error lacks '%s': %s"):format(words, problem)
end

--- Runs all idioms in a layout. Rank 0 prints a line for each: "layout | guide: name | fault".
---@param layout string
---@param folder string a folder for files
---@param only? string runs only the idioms whose guide or name contains this text
function lib.run(layout, folder, only)
  io.stdout:setvbuf "line"                                 -- keeps lines on standard error separate
  local losses, rank = reference(5), ps.rank()             -- BMTrain's rows close the group
  for _, idiom in ipairs(lib.IDIOMS) do
    local whole = idiom.guide .. ": " .. idiom.name
    if not only or whole:find(only, 1, true) then
      local wrong = outcome(idiom, layout, losses, folder)
      if rank == 0 or wrong ~= "" then print(("%s | %s | %s"):format(layout, whole, wrong)) end
    end
  end
end

for _, part in ipairs { "torch", "torch_state", "deepspeed", "hugging_face", "oslo", "bmtrain" } do
  require("spec.idioms_" .. part)(rows_of, lib)
end

return lib
