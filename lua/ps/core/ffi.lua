-- SPDX-License-Identifier: BSD-3-Clause
-- The FFI side of the engine: declares ps.h, opens the one context, turns error codes into error tables, and gives
-- every tensor header its finalizer, here and nowhere else.
local ffi = require "ffi"
local cdef = require "ps.cdef"
require "ps.core.declared"
local caller = require "ps.core.caller"
local hooks = require "ps.core.hooks"
caller.for_tensors(ffi.typeof "ps_tensor")
local C = ffi.C
do
  local hash = ffi.string(C.ps_abi_hash())
  if hash ~= cdef.hash then
    error(("this engine was built from another ps.h (%s) than its declarations (%s); rebuild"):format(hash, cdef.hash))
  end
end

---@class ps.Error
---@field code integer PS_E* code, negative
---@field name string "EINVAL", "ENOMEM", ...
---@field msg string names the fault, the place, the amount and the remedy
---@field op string|nil op that was running
---@field where string file:line in the engine
---@field sub string|nil which of its code's errors it is ("OP_CHUNKS", ...: src/base/errors.def), where programs ask
---@field tier string|nil tier without room: "device", "host" or "disk"
---@field wanted integer|nil bytes that were wanted at once
---@field left integer|nil bytes that there were for them; below 0 where other memory is too large by itself
---@field lacking integer|nil wanted - left, from 0
---@field holders ps.Holder[]|nil the largest tensors when memory ran out (ps/memory/holders.lua)
---@field rank integer|nil rank that is to blame
---@field stripe integer|nil stripe of chunks that this rank is at
---@field other_rank integer|nil of two ranks that do not fit together, the other one
---@field other_stripe integer|nil stripe that that one is at
local Error = {}
Error.__index = Error
function Error:__tostring() return self.msg end
-- "..prefix .. err" works, so that callers may add to a message.
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
  end
  local tier = d.tier                      -- the next call may fail, and leave a detail of its own
  if tier >= 0 and C.ps_engine_tier_get(M.ctx, tier, tier_info) == 0 then err.tier = ffi.string(tier_info.name) end
  if err.sub == "ANOMALY" then err.msg = hooks.ask "anomaly" or err.msg end
  local holders = err.wanted and rc == M.C.PS_ENOMEM and hooks.ask "memory_short"
  if holders then err.holders, err.msg = holders, err.msg .. "\n" .. tostring(holders) end
  error(err, 0)
end

--- Passes a result that is not negative on, raises otherwise.
---@param rc integer
---@return integer
function M.check(rc)
  if rc < 0 then M.raise(rc) end
  return rc
end

--- Refuses a call that belongs to a script's step while the script is paused at a prompt.
---@param what string
function M.check_running(what)
  if C.ps_is_suspended(M.ctx) == 0 then return end
  caller.error(("the script is paused: %s has to wait until it goes on (continue)"):format(what))
end

local ctx_out = ffi.new("ps_ctx *[1]")
if C.ps_ctx_new(ctx_out) < 0 then M.raise(-1) end
local ctx = ffi.gc(ctx_out[0], C.ps_ctx_free)
M.ctx = ctx

local ENOMEM = C.PS_ENOMEM
local release = C.ps_tensor_release

--- Gives a tensor header that Lua owns its finalizer. Scripts hold a reference, not a pointer: LuaJIT would add to a
--- pointer before it asked for __add.
---@param t ffi.cdata* ps_tensor*, a reference of ours
---@return ps.Tensor
function M.own(t) return ffi.gc(t[0], release) end
local own = M.own

--- Gives our reference back at once. For tensors that nobody can name any more: the cdata dangles afterwards.
---@param t ps.Tensor
function M.give_back(t)
  ffi.gc(t, nil)
  C.ps_tensor_release(t)
end

--- Memory ran out, and collecting did not help: whether something was given back.
---@return boolean
function M.give_room() return hooks.ask "memory" or false end

--- Calls fn(...). If memory runs out, collects Lua's garbage and tries again. If memory runs out again, asks listeners
--- to give memory back, and tries once more if one did.
---@param fn fun(...): integer
---@return integer
function M.retry(fn, ...)
  local rc = fn(...)
  if rc == ENOMEM then
    collectgarbage()
    collectgarbage()
    rc = fn(...)
  end
  if rc == ENOMEM and M.give_room() then rc = fn(...) end
  if rc < 0 then M.raise(rc) end
  return rc
end

--- Collects when so much was made outside scopes that it is due.
function M.collect_if_due()
  if C.ps_collect_due(ctx) ~= 0 then collectgarbage() end
end

local outs = ffi.new "ps_tensor *[PS_MAX_OUT]"
local OUTS_NBYTES = ffi.sizeof(outs)

--- Collects and runs an op that found no memory once more. The wrappers end in tail calls, so nothing in Lua may be
--- holding the inputs any more: they need references of their own while the collector runs.
local function apply_again(op, n_in, ins, attrs, nbytes)
  for i = 0, n_in - 1 do if ins[i] ~= nil then C.ps_tensor_retain(ins[i]) end end
  collectgarbage()
  collectgarbage()
  ffi.fill(outs, OUTS_NBYTES)
  local rc = C.ps_apply(ctx, op, n_in, ins, attrs, nbytes, outs)
  if rc == ENOMEM and M.give_room() then rc = C.ps_apply(ctx, op, n_in, ins, attrs, nbytes, outs) end
  for i = 0, n_in - 1 do if ins[i] ~= nil then release(ins[i]) end end
  if rc < 0 then M.raise(rc) end
end

-- Raises the error of an op; somebody may know more of its inputs than C does.
local function refuse(rc, n_in, ins)
  local _, err = pcall(M.raise, rc)
  local more = hooks.ask("op_failed", n_in, ins)
  if more then err.msg = ("%s (%s)"):format(err.msg, more) end
  error(err, 0)
end

-- Lines of scripts by number, for what holds memory (ps/memory/holders.lua). Modules have lines of their own: this is
-- for what a script makes itself. Small tensors have none, since looking at Lua's stack takes microseconds.
local LINED_NUMEL = 2 ^ 16
local line_numbers = {}
M.lines = {}

--- Notes the script's line for a large tensor that was made outside of modules.
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

-- M.placer: called before each op, in anomaly mode (ps/inspect/anomaly.lua).
-- M.recorder: while a model is made without data, notes how tensors come to values (ps/nn/deferred.lua).

-- Outputs i and following, of n.
local function owned_from(i, n)
  if i == n then return end
  local t = outs[i] ~= nil and own(outs[i]) or nil
  return t, owned_from(i + 1, n)
end

--- Runs an op; `ins` is the shared array that the generated wrappers fill.
local function apply(op, n_in, ins, attrs, nbytes, n_out)
  local note = M.recorder and M.recorder:begin(op, n_in, ins, attrs, nbytes)
  if M.placer then M.placer() end
  ffi.fill(outs, OUTS_NBYTES)
  local rc = C.ps_apply(ctx, op, n_in, ins, attrs, nbytes, outs)
  if rc < 0 then
    if rc ~= ENOMEM then refuse(rc, n_in, ins) end
    apply_again(op, n_in, ins, attrs, nbytes)
  end
  if note then M.recorder:finish(note, outs) end
  if C.ps_collect_due(ctx) ~= 0 then collectgarbage() end
  if outs[0] ~= nil and outs[0].numel_ >= LINED_NUMEL and outs[0] ~= ins[0] then note_line(outs[0]) end
  if n_out == 1 then return own(outs[0]) end
  local a, b, c = outs[0], outs[1], outs[2]
  a = a ~= nil and own(a) or nil
  b = b ~= nil and own(b) or nil
  if n_out == 2 then return a, b end
  c = c ~= nil and own(c) or nil
  if n_out == 3 then return a, b, c end
  return a, b, c, owned_from(3, n_out)
end

local ops, info = require "ps.ops_generated"(ffi, C, apply, caller)
M.ops, M.op_info = ops, info

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

--- Code of a type's name ("fp32", "bf16", ...; PyTorch's names too).
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

--- Number of a device's name ("cpu", "ref", "meta", "sim", "cuda"). The device cuda is opened by the first call.
---@param name string
---@return integer
function M.device_index(name)
  for i = 0, #device_name do if device_name[i] == name then return i end end
  M.check(C.ps_device_find(ctx, tostring(name), int_out))
  device_name[int_out[0]] = name
  return int_out[0]
end

local device_can = {}
--- The abilities of a device (struct ps_device_info of ps.h).
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

return M
