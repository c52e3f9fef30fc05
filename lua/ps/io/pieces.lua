-- SPDX-License-Identifier: BSD-3-Clause
-- Copies the bytes of tensors to and from files, one piece at a time. If a tensor is not in plain host memory, its
-- bytes are copied through a buffer of limited size. This module also checks the shapes of the tensors into which files
-- are read.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local array = require "ps.core.array"
local ffi = require "ffi"
local rectangles = require "ps.core.rectangles"
local error = require("ps.core.caller").error
local C = native.C

local pieces = {}

local PIECE = 2 ^ 21                                       -- largest size of a piece in bytes
local byte_array = array "uint8_t"
local address = ffi.new "void *[1]"

--- Raises an error if the tensor into which `name` is read does not have the shape of the file's tensor.
---@param path string
---@param name string name of the file's tensor
---@param shape integer[] shape of the file's tensor
---@param given integer[] shape of the tensor into which `name` is read
function pieces.check_whole(path, name, shape, given)
  if rectangles.same(shape, given) then return end
  error(("%s: tensor '%s' has shape [%s], but the tensor to read into has [%s]"):format(path, name,
    rectangles.text(shape), rectangles.text(given)))
end

--- Raises an error if a rectangle is not inside the file's tensor.
---@param path string
---@param name string name of the file's tensor
---@param shape integer[] shape of the file's tensor
---@param part integer[] shape of the rectangle
---@param offset integer[] position of the rectangle's first element
function pieces.check_part(path, name, shape, part, offset)
  if rectangles.inside(shape, offset, part) then return end
  error(("%s: tensor '%s' has shape [%s], which has no part of shape [%s] at [%s]"):format(path, name,
    rectangles.text(shape), rectangles.text(part), rectangles.text(offset)))
end

--- Returns a buffer for the pieces of tensors of up to `nbytes` bytes. The buffer is not larger than one piece.
---@param nbytes integer
---@return ffi.cdata*
function pieces.buffer(nbytes) return byte_array(math.max(1, math.min(nbytes, PIECE))) end

--- Returns how many elements of a dtype fit into one piece.
---@param dtype string
---@return integer
function pieces.elements(dtype) return PIECE / tonumber(C.ps_dtype_size(native.dtype_code(dtype))) end

-- Divides a contiguous tensor into runs of consecutive elements, so that each run fits into a piece. Calls
-- fn(part, first, n) for each run. The run begins at element `first` and has n elements. `part` is a view of the run.
local function each(tensor, fn)
  local flat = tensor:detach():reshape(-1)
  local numel, step = flat:numel(), PIECE / tonumber(C.ps_dtype_size(flat.dtype_))
  for first = 0, numel - 1, step do
    local n = math.min(step, numel - first)
    fn(numel <= step and flat or flat:narrow(0, first, n), first, n)
  end
end

--- Passes the bytes of a tensor to `put`, in row-major order. Calls put(bytes, nbytes) for one piece after the other.
--- `put` must not change the bytes or keep the pointer. If the tensor is in plain host memory, `bytes` points into the
--- tensor. Otherwise `bytes` is `buffer`, which contains a copy of the piece.
---@param tensor ps.Tensor
---@param buffer ffi.cdata* see pieces.buffer
---@param put fun(bytes: ffi.cdata*, nbytes: integer)
function pieces.read(tensor, buffer, put)
  if C.ps_tensor_address(tensor, address) == 0 then
    local nbytes = tonumber(C.ps_tensor_nbytes(tensor))
    for at = 0, nbytes - 1, PIECE do
      put(ffi.cast("uint8_t *", address[0]) + at, math.min(PIECE, nbytes - at))
      native.check(C.ps_tensor_address(tensor, address))   -- raises an error if another program changed a mapped file
    end
    return
  end
  scope.scope(scope.no_grad, function()
    each(tensor:detach():contiguous(), function(part)
      local nbytes = C.ps_tensor_nbytes(part)
      native.retry(C.ps_tensor_save, part, buffer, nbytes)
      put(buffer, nbytes)
    end)
  end)
end

--- Fills a contiguous tensor, one piece at a time. Calls get(buffer, first, n) for each piece. `get` must copy n
--- elements to the buffer, starting at element `first`.
---@param tensor ps.Tensor
---@param get fun(buffer: ffi.cdata*, first: integer, n: integer)
function pieces.write(tensor, get)
  local buffer = pieces.buffer(tonumber(C.ps_tensor_nbytes(tensor)))
  scope.scope(scope.no_grad, function()
    each(tensor, function(part, first, n)
      get(buffer, first, n)
      native.retry(C.ps_tensor_write, part, buffer, C.ps_tensor_nbytes(part))
    end)
  end)
end

--- Fills any tensor with values of the type `dtype`, one piece at a time. Calls get(buffer, first, n) for each piece.
--- `get` must copy n elements of this dtype to the buffer, starting at element `first` in row-major order. This
--- function needs additional memory for one piece. It needs memory for two pieces if the tensor is not contiguous or if
--- its dtype is not `dtype`.
---@param tensor ps.Tensor
---@param dtype string
---@param get fun(buffer: ffi.cdata*, first: integer, n: integer)
function pieces.convert(tensor, dtype, get)
  if tensor:dtype() == dtype and C.ps_tensor_is_contiguous(tensor) ~= 0 then return pieces.write(tensor, get) end
  local done = 0
  rectangles.each(tensor:shape(), pieces.elements(dtype), function(offset, shape)
    scope.scope(scope.no_grad, function()
      local part = create.empty(shape, { dtype = dtype, device = tensor:device() })
      pieces.write(part, function(buffer, first, n) get(buffer, done + first, n) end)
      rectangles.view(tensor:detach(), offset, shape):copy_(part)
    end)
    done = done + rectangles.numel(shape)
  end)
end

return pieces
