-- SPDX-License-Identifier: BSD-3-Clause
-- model:generate for a model that is cut into stages, or whose layers are shared by several ranks. All ranks call
-- model:generate with the same request, and get the same ids. Every rank runs ps/pretrained/generate.lua with a
-- stand-in instead of the model. The stand-in has the fields of the module and the functions of ps.engine.Staged.
--
-- In a pipeline, each token needs a forward through all stages. Each stage keeps the keys and values of its own layers.
-- All ranks receive the logits of the last stage and choose the same token. Ranks that share layers keep the keys and
-- values of their own attention heads, and the model's output layer returns the logits on every rank.
local create = require "ps.tensor.create"
local agree = require "ps.dist.agree"
local caller = require "ps.core.caller"
local mesh = require "ps.dist.mesh"

local pipe_generate = {}

---@class ps.engine.Staged stand-in for the model (ps/pretrained/generate_rows.lua describes each function)
---@field where_ids? string
---@field next_logits fun(self: ps.engine.Staged, ids: ps.Tensor, at: table): ps.Tensor
---@field agreed fun(read: (fun(): table), told: fun(request: table): string[][]): table
---@field together fun(fn: fun(): boolean): boolean

-- Runs a forward through all stages. Returns the logits [R, V] in fp32 on all ranks.
local function next_logits(engine, ids, at)
  local module, pipe = engine.module, engine.driver.pipe
  local out = engine.driver:once(ids, module:step_batch(ids, at))
  local logits
  if out then logits = out.logits:reshape(ids:size(0), -1):to("fp32"):contiguous()
  else
    logits = create.empty({ ids:size(0), module.config.vocab_size }, { dtype = "fp32", device = engine.device_name })
  end
  return pipe.group:broadcast(logits, pipe.stages.ranks[pipe.n])
end

-- Returns the groups of this rank whose ranks must generate each token together. In ZeRO stage 3, ranks with different
-- rows gather parameters from each other, so all ranks must generate each token together.
local function groups_of(engine)
  if engine.zero_stage == 3 then return { mesh.group "world" } end
  local list = { mesh.group "pp" }
  list[#list + 1] = mesh.group "tp"
  return list
end

-- Nests the calls for all groups. The innermost call is call(group, fn) with the first group. Each further group calls
-- `call` with a function that makes the call for the previous group. In this way, all ranks of all groups get the same
-- result.
local function among(groups, call, fn)
  for _, group in ipairs(groups) do
    local inner = fn
    fn = function() return call(group, inner) end
  end
  return fn()
end

local function staged(engine)
  local module, groups = engine.module, groups_of(engine)
  local self = {}
  if engine.driver.in_loops then
    self.where_ids = engine.device_name
    function self.next_logits(_, ids, at) return next_logits(engine, ids, at) end
  end
  function self.together(fn) return among(groups, agree.all, fn) end
  function self.agreed(read, told)
    if engine.driver.in_loops then engine.driver:begin_generate() end
    local request, list
    among(groups, agree.run, function()
      request = read()
      list = told(request)
    end)
    among(groups, function(group, inner)
      return agree.run(group, function()
        inner()
        agree.same(group, "generate", list)
      end)
    end, function() end)
    local quiet = among(groups, agree.all, function() return not request.chosen.followed end)
    request.chosen.followed = not quiet
    return request
  end
  return setmetatable(self, { __index = function(_, key)
    local value = module[key]
    if type(value) ~= "function" then return value end
    return function(first, ...)
      if rawequal(first, self) then return value(module, ...) end
      return value(first, ...)
    end
  end })
end

--- Generates with an engine of which several ranks share the model.
---@param engine ps.Engine
---@param ... any the arguments of the module's generate
---@return integer[]|integer[][] ids
function pipe_generate.generate(engine, ...)
  engine:check_open()
  local module = engine.module
  if engine.driver.in_loops and type(module.step_batch) ~= "function" then
    caller.error(("generate in a pipeline: %s has no method step_batch(ids, step), which makes the batch of its parts "
      .. "(ps/pretrained/generate_rows.lua)"):format(module.class_name))
  end
  return module.generate(staged(engine), ...)
end

return pipe_generate
