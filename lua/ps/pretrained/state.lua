-- SPDX-License-Identifier: BSD-3-Clause
-- Several files of weights as one state for load_state_dict: tensors stay in the files, and are read one at a time, of
-- a cut parameter its part. Tensors of which files have pieces (save_parallelized) are put together.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local serialize = require "ps.io.serialize"
local Pieced = require "ps.io.pieced"
local ffi = require "ffi"
local folder = require "ps.pretrained.folder"
local pieces = require "ps.io.pieces"
local rectangles = require "ps.core.rectangles"
local settings = require "ps.pretrained.settings"

local state_of = {}

-- A file of weights, whose tensors stay in it. A format that is known and not read is a refusal.
local function open_file(path, mmap)
  local ok, file = pcall(serialize.load, path, { lazy = true, mmap = mmap })
  if ok then return file end
  if type(file) == "table" and file.sub == "OLD_TORCH" then
    local at, name = path:match "^(.*)/([^/]*)$"
    settings.refuse(at or ".", name or path, "an old format", file.msg:sub(#path + #": " + 1))
  end
  return error(file, 0)
end

-- The tensors that a placement has in pieces, of open files by path, as one file.
local function pieced_of(placement, path, by_path)
  local self = setmetatable({ path = path, tensors = {} }, Pieced)
  for name, entry in pairs(placement.pieces) do
    local list = {}
    for i, piece in ipairs(entry.pieces) do
      local file = by_path[path .. "/" .. piece.file]
      if not file or not file:has(name) then
        error(("%s/%s has no tensor '%s', a part of which placement.json says is there"):format(path, piece.file, name),
          0)
      end
      if file:dtype(name) ~= entry.dtype or not rectangles.inside(file:shape(name), piece.at, piece.shape) then
        error(("%s: '%s' is %s [%s], placement.json says that %s [%s] from [%s] on is there"):format(file.path, name,
          tostring(file:dtype(name)), rectangles.text(file:shape(name)), entry.dtype, rectangles.text(piece.shape),
          rectangles.text(piece.at)), 0)
      end
      list[i] = { from = file, name = name, offset = piece.offset, shape = piece.shape, at = piece.at }
    end
    rectangles.check(name, entry.shape, list, function(piece) return piece.from.path end)
    self.tensors[name] = { dtype = entry.dtype, shape = entry.shape, pieces = list }
  end
  return self
end

--- Open files as one state for load_state_dict, their tensors under the names that own_name gives; nil leaves one out.
--- Close it when it was read.
---@param paths string[]
---@param own_name fun(name: string): string?
---@param mmap? boolean tensors have their bytes in the files (ps.load)
---@return table state
function state_of.open(paths, own_name, mmap)
  local home, files, state = {}, {}, { whole = true, mmap = mmap }      -- home: our name -> {file, its name}
  local placement, path_of_all = folder.placed(paths)
  local placed = placement and placement.pieces or {}
  function state.close() for _, file in ipairs(files) do file:close() end end
  local function take(file, name)
    local own = own_name(name)
    if own and home[own] then
      error(("tensor '%s' is in %s and in %s"):format(own, home[own][1].path, file.path), 0)
    end
    if own then home[own] = { file, name } end
  end
  local ok, problem = pcall(function()
    local by_path = {}
    for i, path in ipairs(paths) do
      files[i] = open_file(path, mmap)
      by_path[path] = files[i]
      for _, name in ipairs(files[i]:names()) do
        local elsewhere = placement and placement.weight_map[name]     -- the same is in the files of all ranks along tp
        if not placed[name] and (not elsewhere or path:sub(-#elsewhere) == elsewhere) then take(files[i], name) end
      end
    end
    local all = placement and pieced_of(placement, path_of_all, by_path)
    for _, name in ipairs(all and all:names() or {}) do take(all, name) end
  end)
  if not ok then
    state.close()
    error(problem, 0)
  end
  function state.names()
    local names = {}
    for name in pairs(home) do names[#names + 1] = name end
    return names
  end
  function state.has(_, name) return home[name] ~= nil end
  --- The file that a tensor is in, and its name there; for one in pieces, the folder, and a function that opens it.
  function state.origin(_, name)
    local file = home[name][1]
    local pieced = getmetatable(file) == Pieced
    local open = pieced and function() return state_of.open(paths, function(n) return n end, mmap) end
    return file.path, home[name][2], open or nil
  end
  --- Gives a tensor another name, or leaves it out.
  function state.rename(_, from, to)
    local found = home[from]
    home[from] = nil
    if to then home[to] = found end
  end
  --- Whether two tensors have the same type, shape and bytes. A piece of each is in memory at a time.
  function state.same(_, a, b)
    local shape, dtype, equal = state:shape(a), state:dtype(a), true
    if dtype ~= state:dtype(b) or not rectangles.same(shape, state:shape(b)) then return false end
    local nbytes = rectangles.numel(shape) * tonumber(native.C.ps_dtype_size(native.dtype_code(dtype)))
    local one, other = pieces.buffer(nbytes), pieces.buffer(nbytes)
    rectangles.each(shape, pieces.elements(dtype), function(offset, size)
      if not equal then return end
      scope.scope(function()
        for name, buffer in pairs { [a] = one, [b] = other } do
          local part = create.empty(size, { dtype = dtype, device = "cpu" })
          state:read_part(name, part, offset)
          native.check(native.C.ps_tensor_read(part, buffer, part:nbytes()))
        end
      end)
      local n = rectangles.numel(size) * tonumber(native.C.ps_dtype_size(native.dtype_code(dtype)))
      equal = ffi.string(one, n) == ffi.string(other, n)
    end)
    return equal
  end
  for _, method in ipairs { "shape", "dtype", "check", "read_into", "read_part", "tensor" } do
    state[method] = function(_, name, ...)
      local file = home[name][1]
      return file[method](file, home[name][2], ...)
    end
  end
  return state
end

return state_of
