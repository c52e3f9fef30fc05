-- SPDX-License-Identifier: BSD-3-Clause
-- Opens the files of a model's weights, and presents their tensors as one state for load_state_dict. Tensors stay in
-- the files and are read one at a time. If a parameter is split over ranks, each rank reads only its own part. Tensors
-- that save_parallelized split over several files are assembled. A weight that bitsandbytes quantized appears as one
-- tensor.
local bitsandbytes = require "ps.pretrained.bitsandbytes"
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local serialize = require "ps.io.serialize"
local Pieced = require "ps.io.pieced"
local ffi = require "ffi"
local folder = require "ps.pretrained.folder"
local gguf = require "ps.pretrained.gguf"
local pieces = require "ps.io.pieces"
local rectangles = require "ps.core.rectangles"
local settings = require "ps.pretrained.settings"

local files_of = {}

-- Opens a weight file without reading its tensors. Raises an error for formats that are known but not supported.
local function open_file(path, mmap, packed)
  if gguf.is(path) then
    local file = gguf.open(path, mmap)
    for name in pairs(packed or {}) do file:keep_packed(name) end
    return file
  end
  local ok, file = pcall(serialize.load, path, { lazy = true, mmap = mmap })
  if ok then return file end
  if type(file) == "table" and file.sub == "OLD_TORCH" then
    local at, name = path:match "^(.*)/([^/]*)$"
    settings.refuse(at or ".", name or path, "an old format", file.msg:sub(#path + #": " + 1))
  end
  return error(file, 0)
end

-- Returns an object that has the methods of one file and contains the tensors that are split across several files.
-- `by_path` maps a path to its open file.
local function pieced_of(placement, path, by_path)
  local self = setmetatable({ path = path, tensors = {} }, Pieced)
  for name, entry in pairs(placement.pieces) do
    local list = {}
    for i, piece in ipairs(entry.pieces) do
      local file = by_path[path .. "/" .. piece.file]
      if not file or not file:has(name) then
        error(("%s/%s has no tensor '%s', but placement.json lists a part of it in this file"):format(
          path, piece.file, name),
          0)
      end
      if file:dtype(name) ~= entry.dtype or not rectangles.inside(file:shape(name), piece.at, piece.shape) then
        error(("%s: '%s' is %s [%s], but placement.json lists %s [%s] from [%s] on in this file"):format(
          file.path, name,
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

---@class ps.pretrained.Files
---@field paths string[]
---@field mmap boolean whether the tensors' data stays in the mapped files (the option mmap of ps.load)
---@field private list table[] the open files, sorted by path
---@field private closed boolean
---@field private packed? table<string, boolean> names of the tensors in the files that are read in packed form
---@field quantized? ps.pretrained.Nf4Weights weights that bitsandbytes quantized
---@field private placement? ps.pretrained.Placement the placement of the files, if save_parallelized wrote them
---@field private folder? string the folder that the placement describes
local Files = {}
Files.__index = Files

--- Opens weight files. The caller must close the result after it has read the tensors.
---@param paths string[]
---@param mmap? boolean whether the tensors' data stays in the mapped files (the option mmap of ps.load)
---@return ps.pretrained.Files
function files_of.open(paths, mmap)
  local self = setmetatable({ paths = paths, mmap = mmap or false, list = {}, closed = false }, Files)
  self.placement, self.folder = folder.placed(paths)
  local ok, problem = pcall(function()
    for i, path in ipairs(paths) do self.list[i] = open_file(path, mmap) end
    self.quantized = bitsandbytes.find((paths[1] or ""):match "^(.*)/[^/]*$" or ".", self.list)
  end)
  if ok then return self end
  self:close()
  error(problem, 0)
end

--- Makes later reads of a quantized tensor return its packed form (ps/io/gguf.lua, ps/pretrained/bitsandbytes.lua).
---@param name string
---@param state table a state of these files that contains a tensor with this name
---@param kind ps.nn.PackedType the type of the packed form
function Files:keep_packed(name, state, kind)
  local _, raw = state:origin(name)
  self.packed = self.packed or {}
  self.packed[raw] = kind
  state:keep_packed(name, kind)
end

--- Closes the files.
function Files:close()
  self.closed = true
  for _, file in ipairs(self.list) do file:close() end
end

-- Returns the open file with the given path. Opens the file again if the files are closed.
local function again(self, path)
  for i, file in ipairs(self.list) do
    if self.paths[i] == path then return self.closed and open_file(path, self.mmap, self.packed) or file end
  end
end

-- Returns a state of the files. Opens the files again if they are closed.
local function state_again(self)
  if not self.closed then return self:state() end
  local files = files_of.open(self.paths, self.mmap)
  for name, kind in pairs(files.quantized and self.packed or {}) do files.quantized:keep_packed(name, kind) end
  return files:state()
end

local function same_name(name) return name end

--- Returns all tensors of the open files as one state for load_state_dict. `own_name` maps a name in the files to the
--- model's name. A tensor is skipped if own_name returns nil for its name.
---@param own_name? fun(name: string): string? (default: the names in the files)
---@return table state
function Files:state(own_name)
  own_name = own_name or same_name
  local home, state = {}, { whole = true }                 -- home: the model's name -> {file, name in the file}
  local placement = self.placement
  local placed, by_path = placement and placement.pieces or {}, {}
  local function take(file, name)
    local own = own_name(name)
    if own and home[own] then
      error(("tensor '%s' is in both %s and %s; remove one of them"):format(own, home[own][1].path, file.path), 0)
    end
    if own then home[own] = { file, name } end
  end
  for i, path in ipairs(self.paths) do
    local file = self.list[i]
    by_path[path] = file
    for _, name in ipairs(file:names()) do
      -- A tensor that is whole on all ranks along tp is in the files of all these ranks. weight_map names one of the
      -- files.
      local elsewhere = placement and placement.weight_map[name]
      local hidden = placed[name] or self.quantized and self.quantized:hides(name)
      if not hidden and (not elsewhere or path:sub(-#elsewhere) == elsewhere) then take(file, name) end
    end
  end
  local all = placement and pieced_of(placement, self.folder, by_path)
  for _, name in ipairs(all and all:names() or {}) do take(all, name) end
  for _, name in ipairs(self.quantized and self.quantized:names() or {}) do take(self.quantized, name) end
  function state.close() self:close() end
  function state.names()
    local names = {}
    for name in pairs(home) do names[#names + 1] = name end
    return names
  end
  function state.has(_, name) return home[name] ~= nil end
  --- Returns a tensor's file, the tensor's name in the file, and a function that returns the open file. The function
  --- opens the file again if the file is closed. If the tensor is split into pieces or stored as NF4, the first result
  --- is the folder, and the function returns a state.
  function state.origin(_, name)
    local file = home[name][1]
    if getmetatable(file) ~= Pieced and file ~= self.quantized then
      return file.path, home[name][2], function() return again(self, file.path) end
    end
    return file.path, home[name][2], function() return state_again(self) end
  end
  --- Renames a tensor, or removes the tensor if `to` is nil.
  function state.rename(_, from, to)
    local found = home[from]
    home[from] = nil
    if to then home[to] = found end
  end
  --- Returns a tensor's type if the tensor is in a GGUF file or if bitsandbytes quantized it. Otherwise returns nil.
  function state.type(_, name)
    local file, raw = home[name][1], home[name][2]
    return (file == self.quantized or gguf.is(file.path)) and file:type(raw) or nil
  end
  --- Makes later reads of a quantized tensor return its blocks. `kind` is ignored unless bitsandbytes
  --- quantized the tensor.
  function state.keep_packed(_, name, kind)
    local file, raw = home[name][1], home[name][2]
    if file == self.quantized then file:keep_packed(raw, kind) else file:keep_packed(raw) end
  end
  --- Returns whether two tensors have the same dtype, shape and bytes. Compares the tensors piece by piece, and keeps
  --- only one piece of each tensor in memory.
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

return files_of
