-- SPDX-License-Identifier: BSD-3-Clause
-- Repeats the ops of a generation step without running the model's Lua code. When a model continues a text token by
-- token, two consecutive steps run the same ops on the same weights and caches. Only the tensors of the batch and the
-- number of cached positions differ. This file records the ops of two steps and compares the recordings. If only the
-- batch's tensors and the number of cached positions differ, the following steps run the recorded ops, and the results
-- are identical bit for bit. Otherwise all steps run the model's code.
--
-- A step always runs the model's code in these cases:
--   the step has several columns
--   a module's code is not part of psluajit
--   the model has hooks or adapters
--   an engine holds the model, or several ranks share it
--   ops are profiled, cast or checked for anomalies
-- If a script assigns to a module's field outside the module's calls, the recorded ops are discarded.
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"
local module_hooks = require "ps.nn.hooks"
local nn_module = require "ps.nn.module"
local scope = require "ps.core.scope"
local C, ffi = native.C, native.ffi

-- on: whether steps are repeated. Tests set it to false to compare repeated steps with steps that run the model's code.
-- count: number of steps that were repeated.
local replay = { on = true, count = 0 }

local POINTER, WORDS = ffi.typeof "ps_tensor *", ffi.typeof "int64_t *"
local words, pointers = array "int64_t", array "ps_tensor *"
local NONE = -1                         -- the slot number for an absent input or output

-- A slot is the number of one tensor of a step. The kind of a slot is one of these values:
--   the tensor's name      if the tensor belongs to the batch
--   the tensor's pointer   if the tensor was made outside the step
--   true                   if the tensor is an output of an op
---@class ps.pretrained.Tape
---@field at integer number of cached positions of the recorded step
---@field kinds table<integer, string|ffi.cdata*|true> kind of each slot, counted from 0
---@field count integer number of slots
---@field ops table[] the ops in order. op: the op, or nil for attention over the caches; ins and outs: slots; attrs:
---  the attributes as bytes
---@field held ffi.cdata*[] references that keep recorded tensors alive, so that each address belongs to one tensor
---@field forms string names and types of the batch's tensors
---@field results table<string, integer> slots of the results of the model's last part
---@field unrepeatable boolean? whether the step cannot be repeated: a tensor belongs to an engine, an op needs several
---  ranks, or the code read values, on which the ops of later steps can depend

local function address(t) return tonumber(ffi.cast("intptr_t", ffi.cast(POINTER, t))) end

-- Returns the names of a batch's tensors, sorted.
local function tensors_of(batch)
  local names = {}
  for name, t in pairs(batch) do if scope.is_tensor(t) then names[#names + 1] = name end end
  table.sort(names)
  return names
end

-- Returns a text that lists the batch's tensors: their names, numbers of dimensions and types.
local function forms_of(batch)
  local names = tensors_of(batch)
  for i, name in ipairs(names) do names[i] = ("%s %d %d"):format(name, batch[name].ndim, batch[name].dtype_) end
  return table.concat(names, ",")
end

local function new_slot(tape, kind)
  local slot = tape.count
  tape.kinds[slot], tape.count = kind, slot + 1
  return slot
end

local function hold(tape, t)
  C.ps_tensor_retain(t)
  tape.held[#tape.held + 1] = t
end

local function drop(tape)
  for _, t in ipairs(tape.held) do C.ps_tensor_release(t) end
  tape.held = {}
end

-- Returns the slot of an input. If no recorded op made the tensor, the tensor was made outside the step.
local function input(tape, slots, t)
  if t == nil then return NONE end
  t = ffi.cast(POINTER, t)
  local key = address(t)
  if not slots[key] then
    hold(tape, t)
    slots[key] = new_slot(tape, t)
    if t.managed ~= nil then tape.unrepeatable = true end
  end
  return slots[key]
end

local function output(tape, slots, t)
  if t == nil then return NONE end
  t = ffi.cast(POINTER, t)
  hold(tape, t)
  slots[address(t)] = new_slot(tape, true)
  return slots[address(t)]
end

-- Runs the model's parts and records their ops. Returns the result of the last part, and the tape.
local function record(list, batch, run)
  local tape, slots = { at = batch.at, kinds = {}, count = 0, ops = {}, held = {}, forms = forms_of(batch) }, {}
  for _, name in ipairs(tensors_of(batch)) do
    local t = ffi.cast(POINTER, batch[name])
    hold(tape, t)
    slots[address(t)] = new_slot(tape, name)
  end
  local function add(op, attrs, nbytes, n_in, ins, n_out, outs)
    if op == "read" or op and native.op_info[op].flags:find "RANKS" then
      tape.unrepeatable = true
      return
    end
    local one = { op = op, attrs = ffi.string(attrs, nbytes), ins = {}, outs = {} }
    for i = 1, n_in do one.ins[i] = input(tape, slots, ins[i - 1]) end
    for i = 1, n_out do one.outs[i] = output(tape, slots, outs[i - 1]) end
    tape.ops[#tape.ops + 1] = one
  end
  native.follower = add
  local ok, carry = xpcall(run, scope.trace, list, batch)
  native.follower = nil
  if not ok then
    drop(tape)
    error(carry, 0)
  end
  tape.results = {}
  for name, t in pairs(carry) do tape.results[name] = scope.is_tensor(t) and slots[address(t)] or NONE end
  return carry, tape
end

local function same_slots(a, b)
  if #a ~= #b then return false end
  for i = 1, #a do if a[i] ~= b[i] then return false end end
  return true
end

-- Compares the attributes of one op in two steps, word by word. at_a and at_b are the numbers of cached positions in
-- the two steps. A word may differ if it is at_a + c in one step and at_b + c in the other step, where c is 0 or 1.
-- Returns a table that maps the index of each such word to c. Returns nil if a word differs in another way.
local function moving(a, b, at_a, at_b)
  if a == b then return {} end
  if #a ~= #b or #a % 8 ~= 0 then return nil end
  local x, y, moves = ffi.cast(WORDS, ffi.cast("const char *", a)), ffi.cast(WORDS, ffi.cast("const char *", b)), {}
  for i = 0, #a / 8 - 1 do
    local one, other = tonumber(x[i]), tonumber(y[i])
    if x[i] ~= y[i] then
      if one - at_a ~= other - at_b or one - at_a < 0 or one - at_a > 1 then return nil end
      moves[i] = one - at_a
    end
  end
  return moves
end

-- Returns the program that repeats the steps of two consecutive tapes. Returns nil if the tapes differ.
local function program_of(a, b)
  if a.unrepeatable or b.unrepeatable then return nil end
  if a.forms ~= b.forms or a.count ~= b.count or #a.ops ~= #b.ops then return nil end
  for slot = 0, a.count - 1 do
    if a.kinds[slot] ~= b.kinds[slot] then return nil end         -- pointers are equal if their addresses are equal
  end
  local program = { ops = {}, batch = {}, results = {}, count = a.count, held = {},
    slots = pointers(a.count) }
  local last = {}
  for i, one in ipairs(a.ops) do
    local other = b.ops[i]
    local moves = one.op == other.op and same_slots(one.ins, other.ins) and same_slots(one.outs, other.outs)
      and moving(one.attrs, other.attrs, a.at, b.at)
    if not moves then return nil end
    local attrs = words(math.ceil(#one.attrs / 8) + 1)
    ffi.copy(attrs, one.attrs, #one.attrs)
    local step = { op = one.op, attrs = attrs, nbytes = #one.attrs, ins = one.ins, outs = one.outs, moves = {},
      free = {} }
    for word, offset in pairs(moves) do step.moves[#step.moves + 1] = { word, offset } end
    program.ops[i] = step
    for _, slot in ipairs(one.ins) do last[slot] = i end
    for _, slot in ipairs(one.outs) do last[slot] = i end
  end
  local taken = {}
  for name, slot in pairs(a.results) do
    if slot ~= b.results[name] or a.kinds[slot] ~= true or taken[slot] then return nil end
    program.results[name], last[slot], taken[slot] = slot, nil, true
  end
  for slot, i in pairs(last) do
    if a.kinds[slot] == true then table.insert(program.ops[i].free, slot) end
  end
  for slot = 0, a.count - 1 do
    local kind = a.kinds[slot]
    if type(kind) == "string" then program.batch[kind] = slot
    elseif not rawequal(kind, true) then
      program.slots[slot] = kind
      hold(program, kind)
    end
  end
  program.kinds, program.forms = a.kinds, a.forms
  return program
end

local ins, outs = ffi.new "ps_tensor *[64]", ffi.new "ps_tensor *[PS_MAX_OUT]"

local function run_op(step, slots)
  local inputs = step.ins
  for i = 1, #inputs do
    local slot = inputs[i]
    if slot < 0 then ins[i - 1] = nil else ins[i - 1] = slots[slot] end
  end
  if not step.op then
    return C.ps_attention_cached(native.ctx, ffi.cast("ps_cached_attention *", step.attrs), ins[0], ins[1], ins[2],
      ins[3], ins[4], ins[5], ins[6], ins[7], outs)
  end
  ffi.fill(outs, ffi.sizeof(outs))
  return C.ps_apply(native.ctx, step.op, #inputs, ins, step.attrs, step.nbytes, outs)
end

-- Frees the outputs that still exist after an error.
local function release_all(program)
  for slot = 0, program.count - 1 do
    if program.kinds[slot] == true and program.slots[slot] ~= nil then
      C.ps_tensor_release(program.slots[slot])
      program.slots[slot] = nil
    end
  end
end

local function play(program, batch)
  local slots, at = program.slots, batch.at
  for name, slot in pairs(program.batch) do slots[slot] = ffi.cast(POINTER, batch[name]) end
  for _, step in ipairs(program.ops) do
    for _, move in ipairs(step.moves) do step.attrs[move[1]] = at + move[2] end
    local rc = run_op(step, slots)
    if rc < 0 then
      local ok, problem
      if rc == C.PS_ENOMEM then ok, problem = pcall(native.retry, run_op, step, slots)
      else ok, problem = pcall(native.raise, rc) end
      if not ok then
        release_all(program)
        error(problem, 0)
      end
    end
    for i, slot in ipairs(step.outs) do if slot >= 0 then slots[slot] = outs[i - 1] end end
    for _, slot in ipairs(step.free) do
      C.ps_tensor_release(slots[slot])
      slots[slot] = nil
    end
  end
  local carry = {}
  for name, slot in pairs(program.results) do
    carry[name], slots[slot] = native.own(slots[slot]), nil
  end
  native.collect_if_due()
  return carry
end

-- Returns whether the modules' ops depend only on their weights and inputs. Also checks a head that shares its weight
-- with the token embedding, because this head is not in the list of the model's modules.
local function is_plain(model, modules)
  local head = rawget(model, "tied_head")
  if head and module_hooks.has(head) then return false end
  for i = 1, #modules do
    local module = modules[i]
    if module.training or module_hooks.has(module) or rawget(module, "lora_") then return false end
  end
  return true
end

local function is_free()
  return not (native.placer or native.cast or native.recorder or native.follower or scope.grad_enabled())
    and C.ps_record_is_on() == 0
end

---@class ps.pretrained.Replay
---@field model ps.pretrained.Model
---@field list ps.nn.Part[] the model's parts
---@field modules ps.nn.Module[]? the model and its modules
---@field ours boolean? whether all code of `modules` is part of psluajit
---@field rows integer? number of rows of the recorded steps
---@field tape ps.pretrained.Tape? the tape of the first of two steps
---@field program table? the program that repeats the steps
---@field caches table? the caches of the recorded steps
---@field changes integer value of nn_module.assigned when `modules` was computed
---@field failed boolean? whether two steps differed
local Replay = {}
Replay.__index = Replay

local function forget(self)
  if self.tape then drop(self.tape) end
  if self.program then drop(self.program) end
  self.tape, self.program, self.rows, self.modules = nil, nil, nil, nil
end

-- Returns a list of the model and all its modules.
local function modules_of(model)
  local list = {}
  for _, module in model:named_modules() do list[#list + 1] = module end
  return list
end

-- Returns whether all code of a step is part of psluajit. A script's code could depend on anything and have side
-- effects.
local function is_ours(model, modules, list)
  local functions = { model.next_logits, model.step_batch }
  for _, module in ipairs(modules) do functions[#functions + 1] = module.forward end
  for _, part in ipairs(list) do functions[#functions + 1] = part.forward end
  for _, fn in ipairs(functions) do
    if not caller.is_own(debug.getinfo(fn, "S").source) then return false end
  end
  return true
end

-- Runs a step. If a recording fits the step, repeats the recording. Otherwise calls `run`, which runs the model's
-- parts, and records the step if possible.
function Replay:step(list, batch, run)
  local ids = batch.input_ids
  if not replay.on or self.failed or batch.caches == nil or batch.at == 0 or ids:size(1) ~= 1 or not is_free() then
    return run(list, batch)
  end
  if self.changes ~= nn_module.assigned or self.rows ~= ids:size(0) or self.caches ~= batch.caches
    or self.program and self.program.forms ~= forms_of(batch) then
    forget(self)
  end
  if not self.modules then
    self.modules, self.changes = modules_of(self.model), nn_module.assigned
    self.ours = is_ours(self.model, self.modules, self.list)
    self.rows, self.caches = ids:size(0), batch.caches
  end
  if not (self.ours and is_plain(self.model, self.modules)) then
    forget(self)
    return run(list, batch)
  end
  if self.program then
    replay.count = replay.count + 1
    return play(self.program, batch)
  end
  local carry, tape = record(list, batch, run)
  if not self.tape then self.tape = tape
  elseif tape.at == self.tape.at + 1 then
    self.program = program_of(self.tape, tape)
    self.failed = self.program == nil
    drop(self.tape)
    drop(tape)
    self.tape = nil
  else
    drop(self.tape)
    self.tape = tape
  end
  return carry
end

--- Makes a generation repeat its model's steps. Sets the field `replay` of the list of parts, which parts.fold calls.
---@param model ps.pretrained.Model
---@param list ps.nn.Part[] the model's parts, which only this generation uses
---@return ps.pretrained.Replay? replay nil if the steps of this model must always run its code
function replay.attach(model, list)
  if model.together or model.agreed or not model.named_modules then return nil end
  local self = setmetatable({ model = model }, Replay)
  list.replay = function(given, batch, run) return self:step(given, batch, run) end
  self.list = list
  return self
end

--- Frees the recorded tensors, and detaches the replay from the parts.
function Replay:close()
  forget(self)
  self.list.replay = nil
end

return replay
