-- SPDX-License-Identifier: BSD-3-Clause
-- Subscriptions: functions that are called when another part of the library reports an event. With them, a file of a
-- lower layer (ps.ffi, ps.scope, ps.nn) can call files of higher layers without knowing them. A subscribed function is
-- called a listener. It stays subscribed until it is removed.
local hooks = {}

-- The events. Each text names the listener's arguments and describes the situation. If hooks.ask reports the event, the
-- text also describes the expected answer. hooks.ask returns the first answer that is not nil or false.
local EVENTS = {
  memory = "nothing: memory ran out, and collecting did not help. Answer: true if the listener freed some",
  memory_short = "nothing: an error says that memory ran out. Answer: the largest holders, a list with a text",
  begins = "nothing: a step of an engine is about to begin",
  stepped = "module, how: a step of the module's engine, which computes, begins (\"begins\"), has ended (\"done\"), or "
    .. "was given up or skipped (\"given_up\")",
  step = "nothing: a step has ended, and the next has not begun",
  parameter = "parameter: nn.Parameter made it",
  packed = "weight, name: a packed weight of a layer got its blocks",
  load = "parameter, state, name: the values of that name are about to be loaded. Answer: {to, loaded(self, "
    .. "parameter)} or {elsewhere}",
  owner = "parameter: its values are about to be loaded. Answer: the rank that owns it, if another rank does",
  sharded = "nothing: values have been read from a file. Answer: true if reading a parameter is a collective call",
  saves = "value, path: ps.save is about to write the value to the file",
  loaded = "module: its load_state_dict has written the values of a state",
  op_failed = "n_in, inputs: an op failed. Answer: a text about one of the inputs",
  anomaly = "nothing: an op made a NaN or an infinity, in anomaly mode. Answer: the text of the error",
  scaled = "nothing: the next op multiplies a loss by a loss scale",
  backward = "tensor, gradient, options: a script calls tensor:backward(gradient, options). Answer: true if the "
    .. "listener performed it",
  tied_head = "weight: F.linear or F.lm_loss is called. Answer: the head of the table whose rows ranks share, if the "
    .. "weight is such a table's",
  first_head = "heads: attention with dropout of this number of heads runs, and the script did not say the first. "
    .. "Answer: the number of this rank's first head in the module that runs",
  walked = "nothing: a walk of backward has ended",
  backwards = "note: a backward of a script begins; note(text) prints a text",
  clip = "parameters (a list), max_norm: nn.clip_grad_norm is called. Answer: the norm, if an engine has them",
  gradient = "parameter: a script reads the gradient of an engine's parameter, and there is none",
  zero_grad = "parameters (a list): module:zero_grad() is called. Answer: the list of those that no engine has",
  lookup = "module, nbytes: an nn.Embedding sent rows to a device other than its table's",
  resumes = "nothing: a pause of the script ends",
  settings = "cfg: a configuration was read for an engine; a listener may change its settings",
  model = "model_func: an engine is about to make its model. Answer: the function to call instead",
  batch = "engine, given: a micro-batch of a step, a list with n. Answer: the list to use instead",
  action = "action (ps_action), begins: an action of a step begins (true) or has ended (false)",
  unjoined = "what: a launcher started several processes, and the script did not join them before it called `what`. "
    .. "Answer: the text of the error",
  before_cut = "nothing: an engine is about to count its model's parts and to cut it into stages. Answer: {costs, "
    .. "first} of stages.new",
  part_costs = "key: a pipeline is about to count the parts for micro-batches with this signature. Answer: their costs",
  plan_note = "text: a note for the plan; the dry run of a script differs here from a real run",
  ranks_wanted = "ranks: the mesh of a script needs this number of ranks, or a multiple, and the run has another "
    .. "number. Answer: how to start that number",
}
local listeners = {}  -- lists of listeners by event; a list is never changed, only replaced by a new list
for event in pairs(EVENTS) do listeners[event] = {} end

--- Calls fn whenever an event occurs.
---@param event string one of EVENTS
---@param fn function
---@return fun() off unsubscribes; a second call does nothing
function hooks.on(event, fn)
  local own = function(...) return fn(...) end      -- the same fn may be subscribed twice
  local list = { own }
  for i, other in ipairs(listeners[event]) do list[i], list[i + 1] = other, own end
  listeners[event] = list
  return function()
    local rest = {}
    for _, other in ipairs(listeners[event]) do if other ~= own then rest[#rest + 1] = other end end
    listeners[event] = rest
  end
end

--- Calls all listeners of an event. An error that a listener raises is passed to the caller.
---@param event string
---@param ... any
function hooks.tell(event, ...)
  local list = listeners[event]
  for i = 1, #list do list[i](...) end
end

--- Returns whether an event has a listener.
---@param event string
---@return boolean
function hooks.heard(event) return #listeners[event] > 0 end

--- Calls the listeners of an event until one returns an answer that is not nil or false. Returns this answer, or nil.
---@param event string
---@param ... any
---@return any
function hooks.ask(event, ...)
  local list = listeners[event]
  for i = 1, #list do
    local answer = list[i](...)
    if answer then return answer end
  end
end

return hooks
