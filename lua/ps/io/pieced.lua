-- SPDX-License-Identifier: BSD-3-Clause
-- Tensors whose pieces are in several open files. A ps.Pieced object has the same methods as one open file. Its read
-- methods read from each file only the part that they need.
local caller = require "ps.core.caller"
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local pieces = require "ps.io.pieces"
local rectangles = require "ps.core.rectangles"
local error = caller.error

---@class ps.PieceInFile: ps.Rectangle the piece's position and shape in the whole tensor
---@field from table the open file that contains the piece (a ps.SafeTensors or a ps.TorchFile)
---@field name name of the tensor in the file `from` that contains the piece
---@field at? integer[] position of the piece in the tensor `name` (default: the position of its first element)

---@class ps.PiecedTensor
---@field shape integer[] shape of the whole tensor
---@field dtype string
---@field pieces ps.PieceInFile[]

---@class ps.Pieced
---@field path string for error messages
---@field tensors table<string, ps.PiecedTensor>
local Pieced = {}
Pieced.__index = Pieced

--- Returns the names of the tensors, sorted.
---@return string[]
function Pieced:names()
  return caller.sorted_names(self.tensors)
end

---@param name string
---@return boolean
function Pieced:has(name) return self.tensors[name] ~= nil end

local function entry_of(self, name)
  local entry = self.tensors[name]
  if not entry then error(("%s holds no tensor '%s'"):format(self.path, tostring(name))) end
  return entry
end

---@param name string
---@return integer[] shape of the whole tensor
function Pieced:shape(name) return { unpack(entry_of(self, name).shape) } end

---@param name string
---@return string
function Pieced:dtype(name) return entry_of(self, name).dtype end

---@param name string
---@return integer
function Pieced:nbytes(name)
  local entry = entry_of(self, name)
  return rectangles.numel(entry.shape) * tonumber(native.C.ps_dtype_size(native.dtype_code(entry.dtype)))
end

--- Raises an error if a piece is missing or if its type is not supported.
---@param name string
function Pieced:check(name)
  for _, piece in ipairs(entry_of(self, name).pieces) do piece.from:check(piece.name) end
end

--- Compares the bytes of each piece of a tensor with the piece's checksum.
---@param name string
---@return boolean has false if a piece has no checksum
function Pieced:verify(name)
  local all = true
  for _, piece in ipairs(entry_of(self, name).pieces) do all = piece.from:verify(piece.name) and all end
  return all
end

--- Reads a rectangle of the tensor `name` into `tensor`, which must have the rectangle's shape. Converts the values to
--- the dtype of `tensor`.
---@param name string
---@param tensor ps.Tensor
---@param offset integer[] position of the rectangle's first element in `name`
function Pieced:read_part(name, tensor, offset)
  local entry, wanted = entry_of(self, name), { offset = offset, shape = tensor:shape() }
  pieces.check_part(self.path, name, entry.shape, wanted.shape, offset)
  if tensor:numel() == 0 then return end
  for _, piece in ipairs(entry.pieces) do
    local part = rectangles.common(wanted, piece)
    if part then
      piece.from:read_part(piece.name, rectangles.view(tensor, rectangles.moved(part.offset, offset), part.shape),
        rectangles.moved(part.offset, piece.offset, piece.at))
    end
  end
end

--- Reads the values of `name` into `tensor`, which must have the same shape. Converts the values to the dtype of
--- `tensor`.
---@param name string
---@param tensor ps.Tensor
function Pieced:read_into(name, tensor)
  local entry = entry_of(self, name)
  pieces.check_whole(self.path, name, entry.shape, tensor:shape())
  local only = entry.pieces[1]
  if #entry.pieces == 1 then return only.from:read_into(only.name, tensor) end
  self:read_part(name, tensor, rectangles.zeros(entry.shape))
end

--- Returns a new tensor with the values of `name`. The tensor is not freed at the end of a scope.
---@param name string
---@param device? string
---@return ps.Tensor
function Pieced:tensor(name, device)
  local entry = entry_of(self, name)
  local only = entry.pieces[1]
  if #entry.pieces == 1 then return only.from:tensor(only.name, device) end
  local tensor = create.empty(entry.shape, { dtype = entry.dtype, device = device or "cpu" })
  self:read_into(name, tensor)
  return tensor:keep()
end

return Pieced
