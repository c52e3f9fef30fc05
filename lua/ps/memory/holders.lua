-- SPDX-License-Identifier: BSD-3-Clause
-- Reports which tensors use memory. Lists the largest tensors on a device at one of three times: now, when the device's
-- memory use was highest, or when the memory last ran out. For each tensor, the list contains the op and the module
-- that made the tensor, and the line of the script. An error about memory contains such a list.
local native = require "ps.core.ffi"
local readable = require "ps.core.readable"
local ffi, C = native.ffi, native.C

local holders = {}

local WHEN = { now = C.PS_HOLD_NOW, peak = C.PS_HOLD_PEAK, failed = C.PS_HOLD_FAILED }
local LEAST = 2 ^ 12           -- size in bytes of the smallest tensor that is listed
local SHOWN = 6                -- number of tensors that an error lists

---@class ps.Holder
---@field nbytes integer
---@field op? string op that made the tensor; nil if the tensor is a parameter or was made by ps.zeros or a similar
---  function
---@field module? string path of the module that made the tensor; "" is the outermost module. If a backward op made the
---  tensor, this is the module of the forward op
---@field class? string class of this module
---@field line? string line of the script, such as "train.lua:12". If a module made the tensor, this is the line that
---  first called the module. Otherwise it is the line that made the tensor
---@field backward boolean whether a backward op made the tensor
---@field scratch boolean whether the tensor is the workspace of a kernel

local function text(h)
  local what = h.scratch and "workspace of " .. (h.op or "an op") or h.op or "a tensor made without an op"
  if h.backward then what = what .. " in backward" end
  if h.module then what = ("%s of %s"):format(what, h.module == "" and h.class or h.module) end
  return h.line and ("%s, %s"):format(what, h.line) or what
end

local function show(self)
  local lines = { self.title }
  for i, h in ipairs(self) do
    if i > (self.shown or #self) then break end
    lines[i + 1] = ("  %10s  %s"):format(readable.bytes(h.nbytes), text(h))
  end
  return table.concat(lines, "\n")
end

local Holders = { __tostring = show }

local list_t, used = ffi.typeof("ps_holder[$]", C.PS_HOLDERS), ffi.new "int64_t[1]"

--- Returns the largest tensors at a time. The list prints as lines of text.
---@param when "now"|"peak"|"failed"
---@param device integer index of the device; with "failed", -1 selects the device that ran out of memory
---@return ps.Holder[] list the tensors; the field `used` of the list is the number of bytes in use at this time
function holders.list(when, device)
  local found = list_t()
  local n = C.ps_memory_holders(native.ctx, device, WHEN[when], found, used)
  native.check(n)
  local modules, lines = require("ps.nn.calls")(), require("ps.nn.module").called_at
  local list = setmetatable({ used = tonumber(used[0]) }, Holders)
  for i = 0, n - 1 do
    local h, module = found[i], modules[found[i].module]
    if h.nbytes >= LEAST then
      local line = h.line > 0 and native.lines[h.line] or lines[h.module]
      list[#list + 1] = { nbytes = tonumber(h.nbytes), op = h.op ~= nil and ffi.string(h.op) or nil,
        module = module and module.path, class = module and module.class, line = line ~= "" and line or nil,
        backward = h.backward == 1, scratch = h.scratch == 1 }
    end
  end
  list.title = ("the largest of %s in use:"):format(readable.bytes(list.used))
  return list
end

--- Returns the largest tensors at the time when memory last ran out, for the text of the error. Returns nil if all
--- tensors were smaller than 4 KiB.
---@return ps.Holder[]?
function holders.refused()
  local list = holders.list("failed", -1)
  if #list == 0 then return nil end
  list.title, list.shown = ("the largest of %s of tensors in use then:"):format(readable.bytes(list.used)), SHOWN
  return list
end

return holders
