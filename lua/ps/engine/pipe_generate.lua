-- SPDX-License-Identifier: BSD-3-Clause
-- model:generate of a model that is cut into stages. All ranks call it with the same request, and get the same ids. A
-- token is a forward through the stages, each of which keeps the keys and values of its own layers; the last one's
-- logits then go to all ranks, which choose from them alike. ps/pretrained/generate.lua runs on every rank, with an
-- object in the model's place that has the module's fields and these functions.
local ps = require "ps"
local agree = require "ps.dist.agree"
local caller = require "ps.caller"
local mesh = require "ps.mesh"
local step = require "ps.engine.step"

local pipe_generate = {}

---@class ps.engine.Staged in the place of a model; ps/pretrained/generate_rows.lua says what each function is
---@field where_ids string
---@field next_logits fun(self: ps.engine.Staged, ids: ps.Tensor, at: table): ps.Tensor
---@field agreed fun(read: (fun(): table), told: fun(request: table): string[][]): table
---@field together fun(fn: fun(): boolean): boolean

-- Logits [R, V] fp32 of a forward through the stages, on all ranks.
local function next_logits(engine, ids, at)
  local module, pipe = engine.module, engine.pipe
  local out = step.pipe_once(engine, ids, module:step_batch(ids, at))
  local logits
  if out then logits = out.logits:reshape(ids:size(0), -1):to("fp32"):contiguous()
  else
    logits = ps.empty({ ids:size(0), module.config.vocab_size }, { dtype = "fp32", device = engine.device_name })
  end
  return pipe.group:broadcast(logits, pipe.stages.ranks[pipe.n])
end

local function staged(engine)
  local module = engine.module
  -- The parameters of stage 3 are gathered among ranks that have other rows: they go on together, too.
  local group = engine.zero_stage == 3 and mesh.group "world" or engine.pipe.group
  local self = { where_ids = engine.device_name, training = module.training }
  function self.eval() module:eval() end
  function self.train(_, mode) module:train(mode) end
  function self.next_logits(_, ids, at) return next_logits(engine, ids, at) end
  function self.together(fn) return agree.all(group, fn) end
  function self.agreed(read, told)
    step.begin_generate(engine)
    local request, list
    agree.run(group, function()
      request = read()
      list = told(request)
    end)
    agree.same(group, "generate", list)
    request.chosen.followed = not agree.all(group, function() return not request.chosen.followed end)
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

--- The generate of an engine with a pipeline.
---@param engine ps.Engine
---@param ... any what the module's own takes
---@return integer[]|integer[][] ids
function pipe_generate.generate(engine, ...)
  engine:check_open()
  local module = engine.module
  if type(module.step_batch) ~= "function" then
    caller.error(("generate in a pipeline: %s has no method step_batch(ids, step), which gives what its parts read "
      .. "(ps/pretrained/generate_rows.lua)"):format(module.class_name))
  end
  return module.generate(staged(engine), ...)
end

return pipe_generate
