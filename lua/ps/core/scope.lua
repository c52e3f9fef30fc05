-- SPDX-License-Identifier: BSD-3-Clause
-- Scopes, gradient modes, backward and recompute, on top of the C functions of the same names.
local native = require "ps.core.ffi"
local array = require "ps.core.array"
local hooks = require "ps.core.hooks"
local ffi, C, ctx, check, own, caller = native.ffi, native.C, native.ctx, native.check, native.own, native.caller
local error = caller.error

local M = {}
local id_out = ffi.new("int64_t[1]")
local tensor_t = ffi.typeof("ps_tensor")
local pointer_array = array "ps_tensor *"

--- Returns whether a value is a tensor.
---@param x any
---@return boolean
local function is_tensor(x) return type(x) == "cdata" and ffi.istype(tensor_t, x) end
M.is_tensor = is_tensor

--- Collects the tensors in a value and its nested tables, up to 6 levels deep. Keys can have any type.
local function gather(list, x, depth)
  if is_tensor(x) then
    list[#list + 1] = x
  elseif type(x) == "table" and depth > 0 then
    for _, v in pairs(x) do gather(list, v, depth - 1) end
  end
end

-- The entries at which C stops a backward walk, by C's id. An entry is a recompute segment (below), a function of the
-- script (autograd/function.lua), or the hooks of a tensor (tensor/hooks.lua). resume(entry, number, factor) runs the
-- entry.
--   args: the arguments of a segment. Tensors among them are bare references, which this file releases. Each of these
--         tensors holds the previous segment. If Lua's collector released the tensors, it would free only one segment
--         of a chain per cycle.
--   leaf: the tensor that has the hooks. The entry holds no reference to it. C reports when the tensor is freed.
---@type table<integer, {resume: fun(entry: table, number: integer, factor?: number), args?: any[],
---  reads_engine?: boolean, leaf?: ffi.cdata*}>
local waiting = {}
M.waiting = waiting

local function hold_args(segment)
  for i = 1, segment.args.n do
    local t = segment.args[i]
    if is_tensor(t) then
      C.ps_tensor_retain(t)
      segment.args[i] = ffi.cast("ps_tensor *", t)
    end
  end
end

--- Returns the arguments of a segment for another call of its function.
local function lend_args(segment)
  local args = { n = segment.args.n }
  for i = 1, args.n do
    args[i] = segment.args[i]
    if is_tensor(args[i]) then
      C.ps_tensor_retain(args[i])
      args[i] = own(args[i])
    end
  end
  return args
end

local function forget(id)
  local args = waiting[id] and waiting[id].args
  waiting[id] = nil
  for i = 1, args and args.n or 0 do
    if is_tensor(args[i]) then C.ps_tensor_release(args[i]) end
  end
end

-- Drops the functions whose backward has finished. Returns whether any function was dropped.
local function forget_reaped()
  local any = false
  while true do
    local id = tonumber(C.ps_segment_reap(ctx))
    if id < 0 then return any end
    forget(id)
    any = true
  end
end

--- Drops the functions that read parameters of an engine, and the hooks of these parameters. Called when the engine is
--- about to be closed. A function may hold the model, and the model may hold an output of the function and thus its
--- segment. The collector cannot see this cycle, because the cycle passes through C.
function M.engine_closes()
  forget_reaped()
  for id, entry in pairs(waiting) do
    if entry.reads_engine or entry.leaf and entry.leaf.managed ~= nil then forget(id) end
  end
end

M.segments_end = newproxy(true)                -- drops the remaining entries when the program ends
getmetatable(M.segments_end).__gc = function() for id in pairs(waiting) do forget(id) end end

--- Frees tensors that nothing refers to. Also frees the arguments that recompute keeps for functions whose backward has
--- finished.
function M.collect()
  native.collect()
  forget_reaped()
  native.collect()
end

--- Runs Lua's collector once. Runs it a second time only if the arguments of a function became free. In other cases a
--- second run would free more only if a script's finalizers drop tensors.
function M.collect_tensors()
  native.collect()
  if forget_reaped() then native.collect() end
end

--- Collects garbage like M.collect, and also frees the objects that only compiled code holds. LuaJIT's traces hold the
--- closures and tables that they used, so they may hold a whole model to which nothing else refers. Compiling the
--- traces again takes milliseconds.
function M.collect_all()
  jit.flush()
  M.collect()
end

--- Collects the tensors in the arguments and in nested tables. Returns them as an array for C.
---@param ... any
---@return ffi.cdata*? pointers nil if there are none
---@return integer n
function M.tensors(...)
  local list = {}
  for i = 1, select("#", ...) do gather(list, (select(i, ...)), 6) end
  local n = #list
  local pointers = n > 0 and pointer_array(n) or nil
  for i = 1, n do pointers[i - 1] = list[i] end
  return pointers, n
end

--- Begins a scope. ps.scope_end ends it. Use these two functions for code that cannot be a function passed to ps.scope.
---@return integer id
function M.begin()
  forget_reaped()
  check(C.ps_scope_begin(ctx, id_out))
  return tonumber(id_out[0])
end

--- Ends a scope. Inner scopes that are still open end too.
---@param id integer
---@param ... any tensors, or tables of tensors, that survive into the enclosing scope
function M.finish(id, ...)
  caller.typed(id, "number", "ps.scope_end: the scope, which ps.scope_begin returned,")
  local keep, n = M.tensors(...)
  check(C.ps_scope_end(ctx, id, n, keep))
end

local function finish_scope(id, ok, ...)
  if not ok then
    C.ps_scope_end(ctx, id, 0, nil)
    error((...), 0)
  end
  M.finish(id, ...)
  return ...
end

--- The error handler for xpcall. Records the frames of the error, and adds a traceback to the table of a C error. When
--- an error is recorded, M.caught is called if it is set.
local function trace(e)
  if getmetatable(e) == native.Error and not e.traceback then e.traceback = debug.traceback("", 2) end
  e = caller.note(e, M.caught)
  return e
end
M.trace = trace

--- Runs fn(...) in a scope. At the end of the scope, the memory of the tensors that were made in the scope is freed.
--- Exceptions are tensors that fn returns (also within tables), tensors that t:keep() has kept, and small tensors.
---@param fn function
---@param ... any arguments of fn
---@return any ... the results of fn
function M.scope(fn, ...)
  caller.callable(fn, "ps.scope")
  local id = M.begin()
  return finish_scope(id, xpcall(fn, trace, ...))
end

local function restore_grad(was, ok, ...)
  C.ps_set_grad_enabled(ctx, was)
  if not ok then error((...), 0) end
  return ...
end

--- Runs fn(...) without recording gradients.
---@param fn function
---@param ... any arguments of fn
---@return any ... the results of fn
function M.no_grad(fn, ...)
  caller.callable(fn, "ps.no_grad")
  return restore_grad(C.ps_set_grad_enabled(ctx, 0), xpcall(fn, trace, ...))
end

--- Runs fn(...) and records gradients, also inside no_grad.
---@param fn function
---@param ... any arguments of fn
---@return any ... the results of fn
function M.enable_grad(fn, ...)
  caller.callable(fn, "ps.enable_grad")
  native.check_running "ps.enable_grad"
  return restore_grad(C.ps_set_grad_enabled(ctx, 1), xpcall(fn, trace, ...))
end

--- Sets whether outputs of norms, GELU and SwiGLU are kept for backward. With false, the default, backward recomputes
--- each output of 1 MiB or more. With true, the outputs are kept, which takes more memory and saves 1 to 2 % of the
--- time on a GPU. The results of both settings are equal bit for bit. Ops that have already run are not affected.
---@param on boolean
---@return boolean was the previous setting
function M.keep_cheap_outputs(on)
  if type(on) ~= "boolean" then error("ps.keep_cheap_outputs takes true or false, not " .. tostring(on)) end
  return C.ps_set_keep_cheap(ctx, on and 1 or 0) ~= 0
end

--- Returns whether ops are being recorded for backward.
---@return boolean
function M.grad_enabled() return C.ps_grad_enabled(ctx) ~= 0 end

local function restore_offload(was, ok, ...)
  C.ps_set_offload(ctx, was)
  if not ok then error((...), 0) end
  return ...
end

--- Runs fn(...) and keeps the activations for its backward in host memory. If fn calls ps.recompute, the inputs of the
--- recomputed function are evicted after that function has run. Other tensors that the tape holds are evicted at the
--- end of the scope that made them (the end of a module's call, for example). All evicted tensors are fetched before
--- backward needs them. Copies run while ops compute. Gradients do not change. Tensors under 64 KiB are not moved. On
--- the cpu the call has no effect.
---@param fn function
---@param ... any arguments of fn
---@return any ... the results of fn
function M.offload_activations(fn, ...)
  caller.callable(fn, "ps.offload_activations")
  local was = C.ps_set_offload(ctx, 1)
  if was < 0 then native.raise(was) end
  return restore_offload(was, xpcall(fn, trace, ...))
end

--- Ends a step. Calls the hook "step", and collects garbage if the step left tensors that only Lua's collector can
--- free. optimizer:step() calls this function last.
function M.end_step()
  forget_reaped()
  hooks.tell "step"
  collectgarbage("step", 100)
  native.collect_turn()
end

-- -- recompute ------------------------------------------------------------------------------------------------------
local function pack(...) return { n = select("#", ...), ... } end

-- While a segment's function runs, M.segment is {segment, again, outer}. Otherwise it is nil. `again` is true if
-- backward runs the function a second time. `outer` is the previous M.segment.
local function enter(segment, again) M.segment = { segment = segment, again = again, outer = M.segment } end
local function leave() M.segment = M.segment.outer end

local carried = setmetatable({}, { __mode = "k" })   -- objects whose state is restored for a segment's second run

--- Registers an object whose state affects recomputed functions. The first run of a segment stores object:state().
--- Before the second run, object:restore(state) is called with the stored state.
---@param object {state: fun(self: table): table, restore: fun(self: table, state: table)}
function M.carry_state(object) carried[object] = true end

local function states()
  if not next(carried) then return nil end
  local all = {}
  for object in pairs(carried) do all[object] = object:state() end
  return all
end

local function set_states(all)
  for object, state in pairs(all or {}) do object:restore(state) end
end

--- Runs fn(...) without keeping the activations for its backward. Backward runs fn again instead (Chen et al. 2016,
--- "Training Deep Nets with Sublinear Memory Cost"). The gradients equal the gradients of a plain call bit for bit. fn
--- must be pure: the same inputs must result in the same outputs. Dropout draws the same numbers again.
---
--- fn and everything that it refers to are kept until backward has passed fn or has failed, or until fn's outputs are
--- freed. The outputs are not freed early if fn refers to an object that holds an output of fn (self.last, for
--- example). In that case fn is kept until backward, or until model:close() of a model of ps.initialize.
---@param fn function must return only tensors
---@param ... any arguments of fn: tensors and other values
---@return ps.Tensor ... the results of fn
function M.recompute(fn, ...)
  caller.callable(fn, "ps.recompute")
  if not M.grad_enabled() then return fn(...) end
  local rng = C.ps_rng_get(ctx)
  local segment = { resume = M.run_again, fn = fn,
    args = pack(...), seed = rng.seed, op = rng.op, sample = rng.sample, step = rng.step,
    module = C.ps_module_now(), states = states() }
  C.ps_segment_begin(ctx)
  enter(segment, false)
  local ok, results = xpcall(function(...) return pack(M.no_grad(M.scope, fn, ...)) end, trace, ...)
  leave()
  if not ok then
    C.ps_segment_cancel(ctx)
    error(results, 0)
  end
  local ins, n_in, inner = {}, 0, {}
  for i = 1, segment.args.n do
    local value = segment.args[i]
    if is_tensor(value) then ins[n_in], n_in = value, n_in + 1
    elseif type(value) == "table" and getmetatable(value) == nil then gather(inner, value, 3) end
  end
  -- Tensors in plain tables (a batch, for example) are passed to C like tensors among the arguments. They then also
  -- outlive the scope that made them.
  for _, t in ipairs(inner) do ins[n_in], n_in = t, n_in + 1 end
  local c_in, c_out = pointer_array(n_in + 1), pointer_array(results.n + 1)
  for i = 0, n_in - 1 do c_in[i] = ins[i] end
  for i = 1, results.n do
    if not is_tensor(results[i]) then
      C.ps_segment_cancel(ctx)
      error("ps.recompute: the function must return tensors only")
    end
    c_out[i - 1] = results[i]
  end
  local rc = C.ps_segment_new(ctx, n_in, c_in, results.n, c_out, id_out)
  if rc < 0 then
    C.ps_segment_cancel(ctx)
    native.raise(rc)
  end
  segment.reads_engine = rc == 1
  hold_args(segment)
  waiting[tonumber(id_out[0])] = segment
  return unpack(results, 1, results.n)
end

--- Runs a segment's function again when a walk has stopped at the segment. Inserts the recorded ops into the walk.
---@param s table the segment
---@param id integer
function M.run_again(s, id)
  local rng = C.ps_rng_get(ctx)
  local seed, op, sample, step = rng.seed, rng.op, rng.sample, rng.step
  local scope = M.begin()
  rng.seed, rng.op, rng.sample, rng.step = s.seed, s.op, s.sample, s.step
  local was = states()
  set_states(s.states)
  local args = lend_args(s)
  if s.module > 0 then C.ps_module_enter(s.module) end                 -- the end of the scope leaves the module
  enter(s, true)
  local results = pack(xpcall(M.enable_grad, trace, s.fn, unpack(args, 1, args.n)))
  leave()
  rng.seed, rng.op, rng.sample, rng.step = seed, op, sample, step
  set_states(was)
  local rc = 0
  if results[1] then
    local n = results.n - 1
    local c_out = pointer_array(n + 1)
    for i = 1, n do
      if not is_tensor(results[i + 1]) then
        results[1], results[2] = false, "ps.recompute: the function must return tensors"
      end
      if results[1] then c_out[i - 1] = results[i + 1] end
    end
    if results[1] then rc = C.ps_backward_splice(ctx, n, c_out) end
  end
  C.ps_scope_end(ctx, scope, 0, nil)
  if not results[1] then error(results[2], 0) end
  check(rc)
  M.passed(id)
end

local root_in, gradient_in = pointer_array(1), pointer_array(1)
local keeps = false                            -- whether the current walk keeps the graph for another walk

--- Drops an entry that a backward walk has passed, unless the walk keeps the graph.
---@param id integer
function M.passed(id) if not keeps then forget(id) end end

--- Runs the entry at which a walk has stopped.
---@param id integer
---@param factor? number the factor by which an engine multiplies the gradients of the walk. Each gradient is the
--- gradient of the loss times the factor. nil if the walk belongs to no engine
function M.resume(id, factor)
  local entry = waiting[id]
  if entry then return entry.resume(entry, id, factor) end
  if C.ps_hooks_done(ctx) == 0 then return end  -- the entry has the hooks of a parameter whose engine was closed
  error("a recompute segment, or a function of ps.autograd, read parameters of a model that was closed since: call "
    .. "backward before model:close()", 0)
end

-- Continues a walk to its end. `rc` is the result of the C call that last advanced the walk.
local function walk(rc, factor)
  while rc ~= 0 do
    if rc < 0 then
      if rc == C.PS_ENOMEM then native.collect() end
      native.raise(rc)
    end
    M.resume(tonumber(id_out[0]), factor)
    rc = C.ps_backward_next(ctx, id_out)
  end
end

-- Completes a walk. `rc` is the result of the C call that began the walk.
local function walk_on(rc, factor)
  if rc ~= 0 then  -- 0 is the usual case: the walk is complete and did not stop at an entry
    local ok, err = xpcall(walk, trace, rc, factor)
    C.ps_backward_end(ctx)
    keeps = false
    if not ok then
      forget_reaped()
      error(err, 0)
    end
  end
  if next(waiting) then forget_reaped() end
  hooks.tell "walked"
end

--- Performs M.backward, but does not call the hooks.
---@param t ps.Tensor
---@param gradient? ps.Tensor
---@param factor? number as in M.resume
function M.walk_back(t, gradient, factor)
  root_in[0], gradient_in[0] = t, gradient
  walk_on(C.ps_backward_begin_n(ctx, 1, root_in, gradient_in, id_out), factor)
end

--- Walks backward from the tensors `roots` to the tensors `to` (ps_backward_for).
---@param roots ps.Tensor[]
---@param gradients table<integer, ps.Tensor> gradients of roots, by index
---@param keep boolean whether to keep the graph for another walk
---@param to ps.Tensor[] tensors whose gradients are computed; if it is empty, the leaves get gradients, as in backward
---@return table<integer, ps.Tensor> gradients by index in `to`
function M.walk_for(roots, gradients, keep, to)
  local n, c_roots, c_gradients, c_to = #roots, pointer_array(#roots), pointer_array(#roots), pointer_array(#to + 1)
  for i = 1, n do c_roots[i - 1], c_gradients[i - 1] = roots[i], gradients[i] end
  for i, t in ipairs(to) do c_to[i - 1] = t end
  keeps = keep
  local rc = C.ps_backward_for(ctx, n, c_roots, c_gradients, keep and 1 or 0, #to, c_to, id_out)
  if rc == 0 then keeps = false end
  walk_on(rc)
  local found = {}
  check(C.ps_backward_taken(ctx, #to, c_to))
  for i = 1, #to do found[i] = c_to[i - 1] ~= nil and own(c_to[i - 1]) or nil end
  return found
end

local BACKWARD = { retain_graph = "boolean", create_graph = "boolean" }

--- Checks the options of a backward, and returns them.
---@param options any
---@param call string
---@param more? table<string, string> kinds of further options
---@return table
function M.backward_options(options, call, more)
  local kinds = more or BACKWARD
  options = caller.options(options, call, kinds)
  if options.create_graph then
    error(call .. ": create_graph = true requests gradients of gradients, but the gradients of ops have no "
      .. "gradients here: compute the gradient with ops in a forward, and call backward on the result")
  end
  return options
end

--- Computes the gradients of the leaves that t was computed from. Adds them to the gradients that the leaves already
--- have. If t is the loss of a micro-batch of ps.initialize's model, the loss's weight is applied as in model:backward.
---@param t ps.Tensor of one element, unless gradient is passed
---@param gradient? ps.Tensor|{retain_graph?: boolean} gradient of t's shape, or the options
---@param options? {retain_graph?: boolean} retain_graph: keep the graph for another backward
function M.backward(t, gradient, options)
  if type(gradient) == "table" and options == nil then gradient, options = nil, gradient end
  caller.tensor(t, "backward", "the loss")
  caller.tensor(gradient, "backward", "the gradient")
  options = M.backward_options(options, "backward")
  if hooks.ask("backward", t, gradient, options) then return end
  hooks.tell("backwards", function(text) io.stderr:write("psluajit: ", text, "\n") end)
  if options.retain_graph then M.walk_for({ t }, { gradient }, true, {})
  else M.walk_back(t, gradient) end
end

--- Returns whether a tensor is in a list, or was computed by recorded ops from a tensor in the list.
---@param t ps.Tensor
---@param from ps.Tensor[]
---@return boolean
function M.made_from(t, from)
  local list = pointer_array(math.max(#from, 1))
  for i, tensor in ipairs(from) do list[i - 1] = tensor end
  local rc = C.ps_tensor_made_from(t, #from, list)
  check(rc)
  return rc == 1
end

--- Returns the gradient of a leaf, or nil, without the checks of T:grad.
---@param t ps.Tensor
---@return ps.Tensor|nil
function M.grad_of(t)
  local g = C.ps_tensor_get_grad(t)
  if g == nil then return nil end
  C.ps_tensor_retain(g)
  return own(g)
end

--- Returns a view of a tensor's values without history. Gradients do not pass through the view.
---@param t ps.Tensor
---@return ps.Tensor
function M.detach(t)
  local out = ffi.new("ps_tensor *[1]")
  check(C.ps_tensor_detach(t, out))
  local view = own(out[0])
  if native.recorder then native.recorder:copied(t, view) end
  return view
end

return M
