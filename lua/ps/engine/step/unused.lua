-- SPDX-License-Identifier: BSD-3-Clause
-- Reports parameters that got no gradient in the first step. A forward that skips a layer is usually a mistake. After
-- the first update, a line that names these parameters is written. With strict_gradients, an error with this line is
-- raised instead. Frozen parameters are not reported. The ranks combine their information, and rank 0 writes the line.
local agree = require "ps.dist.agree"
local nn_module = require "ps.nn.module"
local lists = require "ps.core.lists"
local mesh = require "ps.dist.mesh"
local devices = require "ps.core.devices"
local dist = require "ps.dist"

local unused = {}

local SHOWN = 8

-- by engine and parameter index: number of updates of the parameter before the step to check; false after the check
local before = setmetatable({}, { __mode = "k" })

--- Records how often each parameter has been updated. The check after the next step needs these numbers. Also called
--- after the state of an optimizer has been loaded.
---@param engine ps.Engine
function unused.begin(engine)
  if before[engine] == false then return end
  local counts, optimizer = {}, engine.optimizer
  for i = 1, optimizer:count() do counts[i] = optimizer:updates(i) end
  before[engine] = counts
end

-- Returns true if a module was called, or if a module inside it was called.
local function was_called(module)
  for _, inner in module:named_modules() do if rawget(inner, "_number") then return true end end
  return false
end

-- Returns two tables by the path of a module. The first table contains the number of trained parameters in the module.
-- The second table contains the number of trained parameters in the module that lack a gradient.
local function counts_of(trained, lacking)
  local all, without = {}, {}
  for _, name in ipairs(trained) do
    local path = name:match "^(.*)%.[^.]*$"
    while path do
      all[path] = (all[path] or 0) + 1
      if lacking[name] then without[path] = (without[path] or 0) + 1 end
      path = path:match "^(.*)%.[^.]*$"
    end
  end
  return all, without
end

-- Returns the path of the outermost module that contains the parameter `name` and in which no parameter got a gradient.
-- Returns nil if there is no such module.
local function outermost(name, all, without)
  for at in name:gmatch "()%." do
    local path = name:sub(1, at - 1)
    if all[path] == without[path] then return path end
  end
end

--- Returns the line about parameters without a gradient. Returns nil if all parameters got a gradient.
---@param module ps.nn.Module
---@param trained string[] names of the parameters that train, in order
---@param lacking table<string, true>
---@param calls boolean true if this process knows which modules were called
---@return string?
function unused.text(module, trained, lacking, calls)
  local modules, said, list, n, of_list = {}, {}, {}, 0, false
  for path, inner in module:named_modules() do
    modules[path] = inner
    for key in pairs(rawget(inner, "_unused") or {}) do
      -- the class of the parameter's module declares that the parameter gets no gradient
      lacking[(path == "" and "" or path .. ".") .. key] = nil
    end
  end
  local all, without = counts_of(trained, lacking)
  for _, name in ipairs(trained) do
    if lacking[name] then
      n = n + 1
      local path = outermost(name, all, without)
      if not said[path or name] then
        local inner, text = path and modules[path], path or name
        if inner then
          of_list = of_list or lists.is_list(inner) and calls and not was_called(inner)
          text = ("%s (%s, %d parameter%s%s)"):format(path, inner.class_name, all[path], all[path] == 1 and "" or "s",
            calls and not was_called(inner) and ", never called" or "")
        end
        said[path or name], list[#list + 1] = true, text
      end
    end
  end
  if n == 0 then return nil end
  if #list > SHOWN then
    list[SHOWN + 1] = ("and %d more"):format(#list - SHOWN)
    for i = #list, SHOWN + 2, -1 do list[i] = nil end
  end
  return ("the first step gave no gradient to %d of %d trained parameters: %s. Does the forward use them? Freeze "
    .. "those that "
    .. "should not train with parameter:requires_grad(false)%s"):format(n, #trained, table.concat(list, ", "),
    of_list and ". Iterate over a list of modules with ipairs(list), from 0 on; #list is always 0, but "
    .. "list:size() is its number of modules" or "")
end

-- Returns the information of this rank as text, with one line per parameter. The line is "fc.weight=+" if the parameter
-- fc.weight got a gradient, and "fc.weight=-" if it got no gradient.
local function said_by(engine, counts)
  local optimizer, parts = engine.optimizer, {}
  for i, row in ipairs(engine.built.list) do
    if row.param:needs_grad() then
      local had = optimizer:updates(i) > (counts and counts[i] or 0)
      parts[#parts + 1] = ("%s=%s"):format(row.name, had and "+" or "-")
    end
  end
  return table.concat(parts, "\n")
end

--- Reports parameters that got no gradient. Called after each step, and reports after the first step that was not
--- skipped. All ranks must call this function.
---@param engine ps.Engine
function unused.look(engine)
  local counts = before[engine]
  if counts == false or not devices.computes then return end                   -- a script's dry run updates nothing
  before[engine] = false
  local several = engine.ranks or engine.stages or engine.tensor_parallel
  local state, trained, lacking = {}, {}, {}
  for _, text in ipairs(agree.texts(several and mesh.group "world" or nil, said_by(engine, counts))) do
    for name, sign in text:gmatch "([^\n]+)=([+-])" do if state[name] ~= "+" then state[name] = sign end end
  end
  for name in engine.module:named_parameters() do
    if state[name] then trained[#trained + 1] = name end
    if state[name] == "-" then lacking[name] = true end
  end
  local text = unused.text(engine.module, trained, lacking, not engine.stages)
  if not text then return end
  if engine.cfg.strict_gradients then error("strict_gradients: " .. text, 0) end
  if dist.rank() == 0 then engine:note(text) end
end

--- Returns the line about parameters without a gradient, for an optimizer of ps.optim that has made one step. Returns
--- nil if there is nothing to report.
---@param module ps.nn.Module
---@param optimizer ps.Optimizer
---@return string?
function unused.of_plain(module, optimizer)
  local trained, lacking, entries = {}, {}, {}
  for _, entry in ipairs(optimizer.entries) do entries[nn_module.address(entry.param)] = entry end
  for name, p in module:named_parameters() do
    local entry = p:needs_grad() and entries[nn_module.address(p)]
    if entry then
      trained[#trained + 1] = name
      if entry.t == 0 then lacking[name] = true end
    end
  end
  return unused.text(module, trained, lacking, true)
end

return unused
