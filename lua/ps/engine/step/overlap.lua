-- SPDX-License-Identifier: BSD-3-Clause
-- Supports a backward that updates parameters as soon as their gradients are final (overlap_optimizer). This file makes
-- the settings of such a backward. It raises errors for calls that are not possible after such a backward.
local caller = require "ps.core.caller"
local copied = require "ps.core.copied"
local hooks = require "ps.core.hooks"
local state = require "ps.engine.step.state"

local overlap = {}

--- text of the error that a script gets if it uses gradients that backward has already used
overlap.GONE = "backward has already updated the parameters, so their gradients no longer exist: set gradient_clipping "
  .. "in the configuration, which clips before the update, or overlap_optimizer = false, which keeps the gradients "
  .. "until optimizer:step()"

--- Returns the settings of a backward (ps_action_how).
---@param engine ps.Engine
---@param weight number
---@param last boolean true for the last backward of a step
---@param dry? boolean true in a dry run, which has no weights
---@return ffi.cdata* how
function overlap.backward(engine, weight, last, dry)
  local s = state.of(engine)
  local how, opt = s.backward_how, engine.optimizer
  how.groups = nil
  local updates = last and engine.overlap and not s.measures and (dry or s.total ~= 0) and engine.driver:overlaps()
  how.weight, how.overlap, how.scale = weight, updates and 1 or 0, 1
  how.slot = (last and engine.slots and (not updates or engine.device ~= engine.host or engine.ranks ~= nil)) and 1 or 0
  if updates then
    s.overlaps, s.settings, s.kept = true, opt:checked_settings(), {}
    for i, group in ipairs(opt.groups) do s.kept[i] = copied(group) end
    opt:settings_into(how)
    if not dry then how.scale = opt:grad_scale() end
  end
  return how
end

--- Returns true if backwards of the current step have updated parameters, or may have updated parameters.
---@param s ps.engine.StepState
---@return boolean
function overlap.of(s) return s.is.open == 1 and s.is.micro == s.is.n_micro and s.overlaps end

--- Returns true if backward has updated the parameters in the current step.
---@param engine ps.Engine
---@return boolean
function overlap.gradients_gone(engine) return overlap.of(state.of(engine)) end

--- Raises an error if the optimizer's settings are changed after a backward that has already used these settings for
--- updates.
---@param engine ps.Engine
---@param what string the name of the call
function overlap.check_settings(engine, what)
  local s = state.of(engine)
  if not (overlap.of(s) and s.is.updating == 1) then return end
  caller.error(what .. " was called between backward and optimizer:step(), but backward has already updated "
    .. "parameters with the "
    .. "present settings: call it after step(), or set overlap_optimizer = false")
end

-- Restores the optimizer's settings when a script continues after a pause. During the pause, the user may have entered
-- a statement that changes settings. Backward may already have used these settings for updates.
hooks.on("resumes", function()
  for engine, s in state.engines() do
    local opt = engine.optimizer
    if s.kept and overlap.of(s) and s.is.updating == 1 and opt:checked_settings() ~= s.settings then
      for i, group in ipairs(opt.groups) do
        for key, value in pairs(s.kept[i]) do group[key] = value end
      end
      io.stderr:write("psluajit: the optimizer's settings are those from before the pause: backward has already "
        .. "updated parameters with them; change them after optimizer:step() has ended\n")
    end
  end
end)

return overlap
