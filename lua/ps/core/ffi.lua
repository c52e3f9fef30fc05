-- SPDX-License-Identifier: BSD-3-Clause
-- Connects Lua to the engine's C code. This file declares ps.h, opens the only context, turns error codes into error
-- tables, and attaches the finalizer to every tensor header. No other file attaches finalizers to tensor headers.
local ffi = require "ffi"
local cdef = require "ps.cdef"
require "ps.core.declared"
require "ps.core.coroutines"
local caller = require "ps.core.caller"
local hooks = require "ps.core.hooks"
caller.for_tensors(ffi.typeof "ps_tensor")
local C = ffi.C

-- Raises LuaJIT's limits. With the defaults, a function that calls several ops would never be compiled. LuaJIT gives up
-- a trace after `loopunroll` tail calls (default 15) or after `maxrecord` instructions. An op has three tail calls and
-- about 150 instructions.
require("jit.opt").start("loopunroll=60", "maxrecord=12000", "maxirconst=4000", "maxsnap=3000", "maxmcode=4096")

-- A function on the path of an op must not end in a call of a built-in or C function, such as `return ffi.gc(t,
-- release)`. LuaJIT cannot compile such a function by itself. It tries again and again, and then refuses the function
-- and all loops that call it. To avoid this, a function stores the result in a local variable first.

-- Stops the collector while LuaJIT records a trace. If the collector ran a finalizer, the recording would end. Each
-- tensor has a finalizer, so a loop that makes tensors would be compiled only by chance. LuaJIT calls only one function
-- per event. If another function was attached to the event earlier (the function of `psluajit -jv`, for example), this
-- function calls the other function.
do
  local stopped, earlier, before = false, nil, {}
  local function on_trace(event, ...)
    if event == "start" and collectgarbage "isrunning" then
      collectgarbage "stop"
      stopped = true
    elseif stopped and event ~= "flush" then
      collectgarbage "restart"
      stopped = false
    end
    if earlier then earlier(event, ...) end
  end
  for key, fn in pairs(debug.getregistry()._VMEVENTS or {}) do before[key] = fn end
  jit.attach(on_trace, "trace")
  for key, fn in pairs(debug.getregistry()._VMEVENTS or {}) do if fn == on_trace then earlier = before[key] end end
end

do
  local hash = ffi.string(C.ps_abi_hash())
  if hash ~= cdef.hash then
    error(("this engine was built from another ps.h (%s) than its Lua declarations (%s); rebuild it"):format(hash,
      cdef.hash))
  end
end

---@class ps.Error
---@field code integer PS_E* code, negative
---@field name string "EINVAL", "ENOMEM", ...
---@field msg string what failed, where it failed, which amount was wrong, and what to do
---@field op string|nil name of the op that was running
---@field where string file and line in the engine's C code
---@field sub string|nil name of the specific error, for programs ("OP_CHUNKS", for example: src/base/errors.def)
---@field tier string|nil tier that had too little room: "device", "host" or "disk"
---@field wanted integer|nil number of bytes that were needed at once
---@field left integer|nil number of bytes that were available; below 0 if other memory alone exceeds the tier
---@field lacking integer|nil wanted - left, at least 0
---@field holders ps.Holder[]|nil the largest tensors when memory ran out (ps/memory/holders.lua)
---@field rank integer|nil rank that caused the error
---@field stripe integer|nil stripe of chunks that this rank has reached
---@field other_rank integer|nil the other rank, if two ranks disagree
---@field other_stripe integer|nil stripe of chunks that the other rank has reached
local Error = {}
Error.__index = Error
function Error:__tostring() return self.msg end
-- Supports "prefix .. err", with which callers extend a message.
function Error.__concat(a, b) return tostring(a) .. tostring(b) end

local M = { ffi = ffi, C = C, Error = Error, caller = caller }

local function text(p) return p ~= nil and ffi.string(p) or nil end
local function number(n) return n >= 0 and tonumber(n) or nil end
local tier_info = ffi.new("ps_tier_info")

--- Raises the engine's last error as a ps.Error table.
---@param rc integer
function M.raise(rc)
  local d = C.ps_error_get_detail()
  local err = setmetatable({
    code = rc,
    name = ffi.string(C.ps_error_name(rc)),
    msg = ffi.string(C.ps_error_message()),
    op = text(C.ps_error_op()),
    where = ffi.string(C.ps_error_where()),
    sub = text(C.ps_error_sub_name(d.sub)),
    rank = number(d.rank), stripe = number(d.stripe),
    other_rank = number(d.other_rank), other_stripe = number(d.other_stripe),
  }, Error)
  if d.wanted >= 0 then
    err.wanted, err.left = tonumber(d.wanted), tonumber(d.left)
    err.lacking = math.max(0, err.wanted - err.left)
  elseif rc == M.C.PS_ENOMEM then                          -- the memory of the system ran out, not the budget of a tier
    err.msg = ("%s (%s%s)"):format(err.msg, err.op and "op " .. err.op .. ", " or "", err.where)
  end
  local tier = d.tier                      -- read first, since the next call may fail and overwrite the detail
  if tier >= 0 and C.ps_engine_tier_get(M.ctx, tier, tier_info) == 0 then err.tier = ffi.string(tier_info.name) end
  if err.sub == "ANOMALY" then err.msg = hooks.ask "anomaly" or err.msg end
  local holders = err.wanted and rc == M.C.PS_ENOMEM and hooks.ask "memory_short"
  if holders then err.holders, err.msg = holders, err.msg .. "\n" .. tostring(holders) end
  error(err, 0)
end

--- Returns `rc`, or raises the engine's last error if `rc` is negative.
---@param rc integer
---@return integer
function M.check(rc)
  if rc < 0 then M.raise(rc) end
  return rc
end

--- Raises an error if a script calls a function of a step while the script is paused at a prompt.
---@param what string
function M.check_running(what)
  if C.ps_is_suspended(M.ctx) == 0 then return end
  caller.error(("the script is paused: %s must wait until the script continues (type 'continue')"):format(what))
end

local ctx_out = ffi.new("ps_ctx *[1]")
if C.ps_ctx_new(ctx_out) < 0 then M.raise(-1) end
local ctx = ffi.gc(ctx_out[0], C.ps_ctx_free)
M.ctx = ctx

local ENOMEM = C.PS_ENOMEM

-- Returns whether a call that failed with rc may succeed if it is repeated with more memory.
local function repeatable(rc) return rc == ENOMEM and C.ps_error_get_detail().final == 0 end

local release = C.ps_tensor_release

--- Attaches the finalizer to a tensor header. Scripts get a C reference to the header instead of a pointer, because
--- LuaJIT would do pointer arithmetic with a pointer before it looked for __add.
---@param t ffi.cdata* ps_tensor*; Lua owns its reference
---@return ps.Tensor
function M.own(t)
  local header = ffi.gc(t[0], release)
  return header
end
local own = M.own

--- Releases Lua's reference to a tensor at once. Afterwards the cdata points to freed memory, so no other code may
--- refer to the tensor.
---@param t ps.Tensor
function M.give_back(t)
  ffi.gc(t, nil)
  C.ps_tensor_release(t)
end

--- Asks listeners to release memory. Called if collecting garbage did not free enough.
---@return boolean released whether a listener released some memory
function M.give_room() return hooks.ask "memory" or false end

-- A collection takes about half a millisecond per MiB of Lua's own memory. In half a millisecond, ops write many MiB.
-- If a script has large tables, a collection is due only after the memory of tensors has grown by more bytes, but at
-- the latest after it has grown by MOST bytes.
local LEAST, MOST, PER_BYTE = 2 ^ 24, 2 ^ 28, 8

--- Runs a full collection. Every full collection of the library calls this function. A stopped collector remains
--- stopped.
function M.collect()
  local running = collectgarbage "isrunning"
  collectgarbage()
  if not running then collectgarbage "stop" end
  C.ps_collected(ctx, math.min(math.max(collectgarbage "count" * 1024 * PER_BYTE, LEAST), MOST))
end
local collect = M.collect

--- Calls fn(...). If memory runs out, collects Lua's garbage and tries again. If memory runs out again, asks listeners
--- to release memory, and tries once more if a listener has released memory.
---@param fn fun(...): integer
---@return integer
function M.retry(fn, ...)
  local rc = fn(...)
  if repeatable(rc) then
    collect()
    collect()
    rc = fn(...)
  end
  if repeatable(rc) and M.give_room() then rc = fn(...) end
  if rc < 0 then M.raise(rc) end
  return rc
end

--- Collects if the memory of tensors has grown enough since the last collection.
function M.collect_if_due()
  if C.ps_collect_due(ctx) ~= 0 then collect() end
end

--- Collects at the end of a step, or at the end of an iteration of a script's loop. Collects only if the memory of
--- tensors has grown by at least a few MiB since the last collection. The next iteration then has as much memory as
--- this iteration.
function M.collect_turn()
  local least = math.max(2 ^ 22, collectgarbage "count" * 1024 * 2)
  if tonumber(C.ps_collect_waiting(ctx)) >= least then collect() end
end

local outs = ffi.new "ps_tensor *[PS_MAX_OUT]"
local OUTS_NBYTES = ffi.sizeof(outs)

-- Releases the references that M.cast acquired for an op.
local function let_go(held)
  for i = 1, held and #held or 0 do release(held[i]) end
end

--- Collects garbage and repeats an op that ran out of memory. The wrappers of ops end in tail calls, so Lua may hold no
--- reference to the inputs any more. This function therefore holds a reference to each input while the collector runs.
local function apply_again(op, n_in, ins, attrs, nbytes, held)
  for i = 0, n_in - 1 do if ins[i] ~= nil then C.ps_tensor_retain(ins[i]) end end
  collect()
  collect()
  ffi.fill(outs, OUTS_NBYTES)
  local rc = C.ps_apply(ctx, op, n_in, ins, attrs, nbytes, outs)
  if repeatable(rc) and M.give_room() then rc = C.ps_apply(ctx, op, n_in, ins, attrs, nbytes, outs) end
  for i = 0, n_in - 1 do if ins[i] ~= nil then release(ins[i]) end end
  if rc < 0 then
    let_go(held)
    M.raise(rc)
  end
end

-- Raises the error of an op. A listener may add facts about the op's inputs that the C code does not know.
local function refuse(rc, n_in, ins, held)
  local _, err = pcall(M.raise, rc)
  local more = hooks.ask("op_failed", n_in, ins)
  if more then err.msg = ("%s (%s)"):format(err.msg, more) end
  let_go(held)
  error(err, 0)
end

-- Lines of scripts by index, for reports on the tensors that hold memory (ps/memory/holders.lua). Only a tensor that a
-- script itself creates has a line. The reports name other tensors by their module. Small tensors have no line, because
-- reading Lua's stack takes microseconds and ends a trace.
local LINED_NUMEL = 2 ^ 18
local line_numbers = {}
M.lines = {}

--- Records the script's line for a large tensor that is created outside of modules.
---@param t ps.Tensor
function M.note_line(t)
  if t.numel_ < LINED_NUMEL or C.ps_module_now() ~= 0 then return end
  local where = caller.where()
  if where == "" then return end
  if not line_numbers[where] then
    M.lines[#M.lines + 1] = where
    line_numbers[where] = #M.lines
  end
  C.ps_tensor_note_line(t, line_numbers[where])
end
local note_line = M.note_line

-- Functions that other files set:
--   M.placer: called before each op in anomaly mode (ps/inspect/anomaly.lua)
--   M.follower: called after each op, and with "read" before values are read (ps/pretrained/generate_replay.lua)
--   M.recorder: records how tensors get their values while a model is created without data (ps/nn/deferred.lua)
--   M.cast: converts an op's inputs in a region of ps.autocast (ps/core/autocast.lua)

-- Returns the outputs of an op with the indices i to n - 1.
local function owned_from(i, n)
  if i == n then return end
  local t = outs[i] ~= nil and own(outs[i]) or nil
  return t, owned_from(i + 1, n)
end

--- Runs an op. `ins` is the shared array that the generated wrappers fill.
local function apply(op, n_in, ins, attrs, nbytes, n_out)
  local held = M.cast and not M.recorder and M.cast(op, n_in, ins) or nil
  local note = M.recorder and M.recorder:begin(op, n_in, ins, attrs, nbytes)
  if M.placer then M.placer() end
  ffi.fill(outs, OUTS_NBYTES)
  local rc = C.ps_apply(ctx, op, n_in, ins, attrs, nbytes, outs)
  if rc < 0 then
    if not repeatable(rc) then refuse(rc, n_in, ins, held) end
    apply_again(op, n_in, ins, attrs, nbytes, held)
  end
  let_go(held)
  if note then M.recorder:finish(note, outs) end
  if M.follower then M.follower(op, attrs, nbytes, n_in, ins, n_out, outs) end
  if C.ps_collect_due(ctx) ~= 0 then collect() end
  if outs[0] ~= nil and outs[0].numel_ >= LINED_NUMEL and outs[0] ~= ins[0] then note_line(outs[0]) end
  if n_out == 1 then
    local y = own(outs[0])
    return y
  end
  local a, b, c = outs[0], outs[1], outs[2]
  a = a ~= nil and own(a) or nil
  b = b ~= nil and own(b) or nil
  if n_out == 2 then return a, b end
  c = c ~= nil and own(c) or nil
  if n_out == 3 then return a, b, c end
  return a, b, c, owned_from(3, n_out)
end

local list_ins = ffi.new("ps_tensor *[64]")     -- PS_MAX_IN

--- Runs an op that takes a list of tensors and writes into them.
---@param op integer
---@param list ps.Tensor[] at most PS_MAX_IN
---@param attrs ffi.cdata*
---@param nbytes integer size of attrs in bytes
function M.run(op, list, attrs, nbytes)
  for i, t in ipairs(list) do list_ins[i - 1] = t end
  return apply(op, #list, list_ins, attrs, nbytes, 1)
end

local ops, info = require "ps.core.ops"(ffi, C, apply, caller)
M.ops = ops
-- M.op_info describes ops by op code: { name, ins, outs, n_out, flags, grad, doc }. It is created when it is first
-- read.
setmetatable(M, { __index = function(self, key)
  if key ~= "op_info" then return nil end
  self.op_info = info()
  return self.op_info
end })

-- -- types and devices by name --------------------------------------------------------------------------------------
local code_of, name_of = {}, {}
for code = 0, C.PS_DTYPE_COUNT - 1 do
  local name = ffi.string(C.ps_dtype_name(code))
  name_of[code], code_of[name] = name, code
end
for alias, name in pairs { float32 = "fp32", float = "fp32", bfloat16 = "bf16", float16 = "fp16", half = "fp16",
                           float64 = "fp64", double = "fp64", int = "int32", long = "int64", byte = "uint8" } do
  code_of[alias] = code_of[name]
end
M.dtype_name = name_of

-- The codes of the floating-point types that ops compute with.
M.FLOAT = { [C.PS_F32] = true, [C.PS_BF16] = true, [C.PS_F16] = true, [C.PS_F64] = true }

--- Returns the code of a type. The name is psluajit's ("fp32", "bf16", ...) or PyTorch's.
---@param name string
---@return integer
function M.dtype_code(name)
  local code = code_of[name]
  if not code then
    caller.error(("no such type: %s (there are fp32, bf16, fp16, fp64, int32, int64, uint8, bool)")
      :format(tostring(name)))
  end
  return code
end

local device_name = {}
for i = 0, C.ps_device_count(ctx) - 1 do device_name[i] = ffi.string(C.ps_device_name(ctx, i)) end
M.device_name = device_name
local int_out = ffi.new("int[1]")

--- Returns the index of a device ("cpu", "ref", "meta", "sim", "cuda"). The device cuda is opened by the first call
--- that names it.
---@param name string
---@return integer
function M.device_index(name)
  for i = 0, #device_name do if device_name[i] == name then return i end end
  M.check(C.ps_device_find(ctx, tostring(name), int_out))
  device_name[int_out[0]] = name
  return int_out[0]
end

local device_can = {}
--- Returns the abilities of a device (struct ps_device_info of ps.h).
---@param index integer
---@return ffi.cdata*
function M.device_info(index)
  local can = device_can[index]
  if not can then
    can = ffi.new("ps_device_info")
    M.check(C.ps_device_info_get(ctx, index, can))
    device_can[index] = can
  end
  return can
end

--- Returns whether a tensor is in host memory. Some ops have kernels only for devices that use host memory.
---@param t ps.Tensor
---@return boolean
function M.on_host(t) return M.device_info(t.device_).is_host ~= 0 end

return M
