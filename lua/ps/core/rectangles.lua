-- SPDX-License-Identifier: BSD-3-Clause
-- Computes with rectangles of tensors. A rectangle is a part of a tensor: the coordinates of its first element
-- (`offset`, from 0) and its `shape`.
local rectangles = {}

---@class ps.Rectangle
---@field offset integer[]
---@field shape integer[]

--- Returns the number of elements of a shape.
---@param shape integer[]
---@return integer
function rectangles.numel(shape)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return n
end

--- Returns the offset of a rectangle that is a whole tensor of the given shape. All coordinates of the offset are 0.
---@param shape integer[]
---@return integer[]
function rectangles.zeros(shape)
  local all = {}
  for d in ipairs(shape) do all[d] = 0 end
  return all
end

--- Returns whether two shapes are the same.
---@param a integer[]
---@param b integer[]
---@return boolean
function rectangles.same(a, b)
  if #a ~= #b then return false end
  for i = 1, #a do if a[i] ~= b[i] then return false end end
  return true
end

--- Returns the sizes of a shape as text: "2, 3" for the shape [2, 3].
---@param list integer[]
---@return string
function rectangles.text(list) return table.concat(list, ", ") end

--- Returns the intersection of two rectangles of one tensor.
---@param a ps.Rectangle
---@param b ps.Rectangle
---@return ps.Rectangle? common nil if it is empty
function rectangles.common(a, b)
  local offset, shape = {}, {}
  for d, size in ipairs(a.shape) do
    offset[d] = math.max(a.offset[d], b.offset[d])
    shape[d] = math.min(a.offset[d] + size, b.offset[d] + b.shape[d]) - offset[d]
    if shape[d] <= 0 then return nil end
  end
  return { offset = offset, shape = shape }
end

--- Converts the coordinates of an element in a whole tensor to its coordinates in a tensor that stores a rectangle. The
--- rectangle begins at `from` in the whole tensor and at `at` in the storing tensor.
---@param offset integer[]
---@param from integer[]
---@param at? integer[] (default: zeros)
---@return integer[]
function rectangles.moved(offset, from, at)
  local to = {}
  for d, first in ipairs(offset) do to[d] = first - from[d] + (at and at[d] or 0) end
  return to
end

--- Returns a view of the elements of a tensor that are in a rectangle.
---@param tensor ps.Tensor
---@param offset integer[]
---@param shape integer[]
---@return ps.Tensor
function rectangles.view(tensor, offset, shape)
  local size = tensor:shape()
  for d, n in ipairs(shape) do
    if offset[d] > 0 or n < size[d] then tensor = tensor:narrow(d - 1, offset[d], n) end
  end
  return tensor
end

--- Returns whether a rectangle is inside a tensor of the shape `whole`.
---@param whole integer[]
---@param offset integer[]
---@param shape integer[]
---@return boolean
function rectangles.inside(whole, offset, shape)
  if type(offset) ~= "table" or type(shape) ~= "table" or #offset ~= #whole or #shape ~= #whole then return false end
  for d, size in ipairs(whole) do
    local first, n = offset[d], shape[d]
    if type(first) ~= "number" or type(n) ~= "number" or first % 1 ~= 0 or n % 1 ~= 0 then return false end
    if first < 0 or n < 0 or first + n > size then return false end
  end
  return true
end

-- Divides a rectangle into parts of at most `most` elements, and calls fn for each part. The dimensions before d have
-- already been divided.
local function cut_up(offset, shape, d, most, fn)
  local row = 1
  for k = d + 1, #shape do row = row * shape[k] end
  if d > #shape or row * shape[d] <= most then return fn({ unpack(offset) }, { unpack(shape) }) end
  local first, size, rows = offset[d], shape[d], math.max(1, math.floor(most / row))
  for at = 0, size - 1, rows do
    offset[d], shape[d] = first + at, math.min(rows, size - at)
    if row > most then cut_up(offset, shape, d + 1, most, fn) else fn({ unpack(offset) }, { unpack(shape) }) end
  end
  offset[d], shape[d] = first, size
end

--- Calls fn(offset, shape) for rectangles of at most `most` elements. The rectangles cover a tensor in row-major order.
---@param shape integer[]
---@param most integer
---@param fn fun(offset: integer[], shape: integer[])
function rectangles.each(shape, most, fn)
  if rectangles.numel(shape) > 0 then cut_up(rectangles.zeros(shape), { unpack(shape) }, 1, most, fn) end
end

--- Checks that pieces cover a whole tensor, and that no element is in two pieces. Errors name the tensor and the
--- locations of the pieces.
---@param name string
---@param shape integer[] shape of the whole tensor
---@param pieces ps.Rectangle[]
---@param named fun(piece: ps.Rectangle): string returns the location of a piece
function rectangles.check(name, shape, pieces, named)
  local sum, text = 0, rectangles.text
  for i, piece in ipairs(pieces) do
    if not rectangles.inside(shape, piece.offset, piece.shape) then
      error(("%s has a piece of shape [%s] at [%s] of tensor '%s', outside the tensor's shape [%s]"):format(
        named(piece), text(piece.shape or {}), text(piece.offset or {}), name, text(shape)), 0)
    end
    for k = 1, i - 1 do
      if rectangles.common(piece, pieces[k]) then
        error(("tensor '%s' was saved twice, in %s and in %s"):format(name, named(pieces[k]), named(piece)), 0)
      end
    end
    sum = sum + rectangles.numel(piece.shape)
  end
  if sum ~= rectangles.numel(shape) then
    error(("tensor '%s' of shape [%s] is incomplete: the ranks saved %.0f of %.0f elements"):format(name,
      text(shape), sum, rectangles.numel(shape)), 0)
  end
end

return rectangles
