-- SPDX-License-Identifier: BSD-3-Clause
-- The step of an engine. This file collects the functions that other folders call. The files are:
--   state.lua      the state of a step
--   actions.lua    performs the actions of a step. A driver defines the actions (table.lua, or
--                  engine/pipeline/driver.lua for a model that is cut into stages)
--   forward.lua    model(...)
--   loops.lua      loops over micro-batches
--   backward.lua   model:backward
--   overlap.lua    model:backward that updates parameters
--   update.lua     optimizer:step()
--   dry.lua        dry runs
--   ending.lua     ends or abandons a step
local actions = require "ps.engine.step.actions"
local backward = require "ps.engine.step.backward"
local dry = require "ps.engine.step.dry"
local ending = require "ps.engine.step.ending"
local forward = require "ps.engine.step.forward"
local loops = require "ps.engine.step.loops"
local overlap = require "ps.engine.step.overlap"
local state = require "ps.engine.step.state"
local update = require "ps.engine.step.update"

return {
  new = actions.new, begin = actions.begin, dry_run = dry.run,
  fields = state.fields, engines = state.engines,
  -- queries about a step
  count = state.count, batch_text = state.batch_text, is_open = state.is_open, evaluates = state.evaluates,
  acts = state.acts,
  trace = state.trace, factors = state.factors, weight_factor = state.weight_factor,
  gradients_gone = overlap.gradients_gone, GONE = overlap.GONE,
  -- functions that scripts call
  forward = forward.call, next = loops.next, backward = backward.backward, weight_of = backward.weight_of,
  score_of = backward.score_of,
  norm = update.norm, remember = update.remember, unscale = update.unscale, clip = update.clip,
  CLIP_EPS = update.CLIP_EPS, update = update.update, zero_grad = update.zero_grad,
  -- functions that reject calls
  check_whole = state.check_whole, check_settings = overlap.check_settings, check_gradients = update.check_gradients,
  -- functions that end a step before its update
  take_back = ending.take_back, give_up = ending.give_up, leave_loop = ending.leave_loop, mend = state.mend,
  closed = state.closed,
}
