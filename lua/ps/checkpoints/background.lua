-- SPDX-License-Identifier: BSD-3-Clause
-- Saves a checkpoint while training continues. The state is copied to host memory, in the layout of the file. A thread
-- of the engine (src/io/saver.c) writes the copy. The memory of the copy is a tensor, so that budgets count it. This
-- memory is kept between saves until a larger copy is needed, or until release() frees the memory. If a step does not
-- fit in the remaining memory, the step waits until the file is written.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local hooks = require "ps.core.hooks"
local safetensors = require "ps.io.safetensors"
local time = require "posix.time"
local ffi, C = native.ffi, native.C

local background = {}

local ALIGN = 4096                                         -- alignment in bytes, required to write past the page cache
local saver, buffer, buffer_nbytes, copying, said, unlisten
local seconds_out, address_out = ffi.new("double[1]"), ffi.new("void *[1]")

local function shown(nbytes)
  if nbytes >= 2 ^ 30 then return ("%.2f GiB"):format(nbytes / 2 ^ 30) end
  return nbytes >= 2 ^ 20 and ("%.1f MiB"):format(nbytes / 2 ^ 20) or ("%.1f KiB"):format(nbytes / 2 ^ 10)
end

--- Frees the memory of the copy.
function background.release()
  if not buffer then return end
  native.give_back(buffer)
  unlisten()
  buffer, buffer_nbytes = nil, nil
end

-- Frees the copy's memory after the file was written. Called when an allocation found no memory. `wait` reports the
-- result of the save.
local function give_way(quiet)
  if copying then return false end
  if not (quiet or said) then
    io.stderr:write(("psluajit: a step does not fit in memory next to the %s that saving in the background holds; it "
      .. "waits until the file is written\n"):format(shown(buffer_nbytes)))
    said = true
  end
  while background.busy() do time.nanosleep { tv_sec = 0, tv_nsec = 2e6 } end
  background.release()
  return true
end

-- Returns the address of memory for a copy of `nbytes` bytes. The address is a multiple of ALIGN.
local function room(nbytes, quiet)
  if not buffer or buffer_nbytes < nbytes then
    background.release()
    local ok, made = pcall(create.empty, { nbytes + ALIGN }, { dtype = "uint8", device = "cpu" })
    if not ok then
      error(("saving in the background (async = true) needs %s of host memory for its copy, which is not available: "
        .. "%s. Save without async"):format(shown(nbytes), tostring(made)), 0)
    end
    buffer, buffer_nbytes = made:keep(), nbytes
    unlisten = hooks.on("memory", function() return give_way(quiet) end)
    if not quiet then
      io.stderr:write(("psluajit: saving in the background holds %s of host memory for its copy\n"):format(
        shown(nbytes)))
    end
  end
  native.check(C.ps_tensor_address(buffer, address_out))
  local address = ffi.cast("uintptr_t", address_out[0])
  return ffi.cast("uint8_t *", (address + ALIGN - 1) / ALIGN * ALIGN)
end

--- Returns whether saving can overlap with training. Saving cannot overlap in a script's dry run, because tensors have
--- no bytes to copy.
---@return boolean
function background.possible() return C.ps_machine_pretended() == 0 end

--- Copies tensors, and starts to write the copy to a file with checksums. Writes to the tensors after this call do not
--- affect the copy.
---@param path string
---@param tensors table<string, ps.Tensor>
---@param metadata table<string, string>
---@param quiet? boolean if true, no message about the memory of the copy is printed
---@return integer nbytes
function background.start(path, tensors, metadata, quiet)
  if not saver then
    local out = ffi.new("ps_saver *[1]")
    native.check(C.ps_saver_new(out))
    saver = ffi.gc(out[0], C.ps_saver_free)
  end
  copying = true
  local ok, writer, data = pcall(safetensors.copy, path, tensors, metadata, function(nbytes)
    return room(nbytes, quiet)
  end)
  copying = false
  if not ok then error(writer, 0) end
  local nbytes = tonumber(C.ps_stw_nbytes(writer))
  native.check(C.ps_saver_start(saver, ffi.gc(writer, nil), data, nbytes))
  return nbytes
end

--- Returns whether a file is still being written.
---@return boolean
function background.busy() return saver ~= nil and C.ps_saver_busy(saver) ~= 0 end

--- Waits until the file is written. Raises the error of the write if it failed.
---@return number seconds duration of the write
function background.wait()
  if not saver then return 0 end
  native.check(C.ps_saver_wait(saver, seconds_out))
  return seconds_out[0]
end

return background
