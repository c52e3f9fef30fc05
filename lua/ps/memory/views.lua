-- SPDX-License-Identifier: BSD-3-Clause
-- The functions ps.memory and ps.chunks. ps.memory returns the memory that is in use on a device and in each tier.
-- ps.chunks returns the chunks of the open engine.
local caller = require "ps.core.caller"
local chunks = require "ps.memory.chunks"
local holders = require "ps.memory.holders"
local native = require "ps.core.ffi"
local view = require "ps.memory.view"
local error = caller.error

local views = {}

local MEMORY = { at = "string", device = "string" }

--- Returns how much memory of a device is in use, in bytes, and the tiers of the open engine. The result prints as a
--- table. With `at`, returns a list of the largest tensors outside chunks, now or when the memory use was highest. Each
--- item of the list contains the tensor's size in bytes, its op, module and line.
---@param device? string|{at?: "peak"|"now", device?: string} (default: the first device, "cpu")
---@return {device: string, used: integer, peak: integer, reserved: integer, limit: integer, tiers: table[]}|ps.Holder[]
---  memory the numbers of bytes, where `limit` is 0 if there is no limit; with `at`, the tensors, largest first
function views.memory(device)
  if type(device) == "table" then
    local options = caller.options(device, "ps.memory", MEMORY)
    device = options.device
    if options.at and options.at ~= "peak" and options.at ~= "now" then
      error(("ps.memory: at is '%s'; it must be 'peak' or 'now'"):format(options.at))
    end
    if options.at then return holders.list(options.at, device and native.device_index(device) or 0) end
  end
  local info = native.ffi.new("ps_memory_info")
  native.check(native.C.ps_memory_get(native.ctx, device and native.device_index(device) or 0, info))
  return view.memory({ device = device or native.device_name[0], used = tonumber(info.used),
    peak = tonumber(info.peak), reserved = tonumber(info.reserved), limit = tonumber(info.limit) },
    chunks.tiers())
end

--- Returns the chunks of the open engine, as a list that prints as a table. The list is empty if no engine is open.
---@param options? integer|string|{all?: boolean, kind?: string, tier?: string, state?: string} an integer selects the
---  chunk with this id, which prints with the names of its tensors. A string selects the chunks that contain the tensor
---  of this name, its master and its optimizer states. kind: selects chunks of this kind. tier: selects chunks with a
---  valid copy on this tier. state: selects chunks in this state. all = true: prints every row
---@return table[] chunks
function views.chunks(options)
  return view.chunks(chunks.chunks(), options)
end

return views
