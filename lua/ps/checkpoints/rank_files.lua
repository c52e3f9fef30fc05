-- SPDX-License-Identifier: BSD-3-Clause
-- Reads and writes a checkpoint of several processes. The checkpoint is a folder with a safetensors file of each rank,
-- and index.json. The metadata of each file ("psluajit_shard") contains the save, the step and the rank of the file, so
-- that files of different checkpoints are never mixed. The index contains the place of each tensor, and all state that
-- is not in tensors:
--   "xxh3_64":    checksum of the text after this value
--   "version":    3
--   "save":       a number that only this save has
--   "run":        the number of the run
--   "step", "world_size"
--   "mesh":       { axis: number of ranks }
--   "files":      [...]
--   "tensors":    { tensor: { "dtype", "shape": of the whole tensor, "pieces": [...] } }
--                 A piece is { "file", "offset", "shape", "at", "xxh3_64" }. "offset" is the index of the piece's first
--                 element in the whole tensor, and "at" is its index in the file's tensor. "xxh3_64" is the checksum of
--                 the file's tensor, as in the file
--   "rng":        [random numbers of each rank]
--   "updates":    { parameter: number of its updates }
--   "state":      the same state that a single file has under "psluajit"
-- Each element of the whole tensor is in exactly one piece, and each element of the files' tensors is in a piece. A
-- rank's file has its pieces under the tensor's name. If these pieces are not the whole tensor, the file's metadata has
-- "pieces": { tensor: { "shape": of the whole tensor, "parts": [ { "offset", "shape", "at" } ] } }.
--
-- Versions 1 and 2 are also read. In version 2, a file has at most one piece of a tensor, so pieces have no "at". The
-- "pieces" in the file's metadata are { tensor: { "offset", "shape": of the whole tensor } }. Version 2 is written if
-- no tensor is cut. Version 1 has only whole tensors. It has "weight_map": { tensor: file } and "checksums": { tensor:
-- checksum as in the file }, but no mesh.
local native = require "ps.core.ffi"
local json = require("cjson").new()
local bit = require "bit"
local errno = require "posix.errno"
local lfs = require "lfs"
local encode = require "ps.core.encode"
local Pieced = require "ps.io.pieced"
local rectangles = require "ps.core.rectangles"
local read_file = require "ps.core.read_file"
local safetensors = require "ps.io.safetensors"
local C = native.C
local error = require("ps.core.caller").error

local rank_files = {}

local INDEX, KEY, VERSION = "/index.json", "psluajit_shard", 3
local UNCUT = 2                                            -- version of files without cut tensors
local HEAD = "{\"xxh3_64\":\""

---@param rank integer
---@param size integer
---@return string
function rank_files.file_name(rank, size) return ("rank-%05d-of-%05d.safetensors"):format(rank, size) end

--- Assigns items to ranks so that each rank has about the same number of bytes. Ranks with the same items compute the
--- same result.
---@param nbytes table<string, integer>
---@param size integer
---@return table<string, integer> rank_of
function rank_files.deal(nbytes, size)
  local names, loads, rank_of = {}, {}, {}
  for name in pairs(nbytes) do names[#names + 1] = name end
  table.sort(names, function(a, b)
    if nbytes[a] ~= nbytes[b] then return nbytes[a] > nbytes[b] end
    return a < b
  end)
  for rank = 0, size - 1 do loads[rank] = 0 end
  for _, name in ipairs(names) do
    local least = 0
    for rank = 1, size - 1 do if loads[rank] < loads[least] then least = rank end end
    rank_of[name], loads[least] = least, loads[least] + nbytes[name]
  end
  return rank_of
end

--- Returns the metadata of a rank's file. `about` is { save, step, rank, world_size, rng, updates, pieces }. The field
--- `pieces` contains the cut tensors as { tensor = { shape, parts } }. It is nil if no tensor is cut.
---@param about table
---@return table<string, string>
function rank_files.metadata(about)
  about.version = about.pieces and VERSION or UNCUT
  return { format = "pt", [KEY] = encode(about) }
end

-- Raises an error if the file has a version that is not known.
local function check_version(path, version)
  if version == 1 or version == UNCUT or version == VERSION then return end
  error(("%s has version %s of checkpoints; this psluajit reads versions 1 to %d"):format(path, tostring(version),
    VERSION), 0)
end

local function about_of(file)
  local text = file.metadata[KEY]
  local ok, about = pcall(json.decode, text or "")
  if not ok or type(about) ~= "table" then error(file.path .. " is not a checkpoint's file of one rank", 0) end
  check_version(file.path, about.version)
  return about
end

--- Reads the metadata of a file. Returns the names of the tensors of which the file contains only a piece. Returns nil
--- if the file is not a rank's file, or if it contains only whole tensors.
---@param metadata table<string, string>
---@return string[]?
function rank_files.pieces_in(metadata)
  local ok, about = pcall(json.decode, metadata[KEY] or "")
  local names = {}
  for name in pairs(ok and type(about) == "table" and about.pieces or {}) do names[#names + 1] = name end
  table.sort(names)
  return #names > 0 and names or nil
end

-- Opens the file of rank `rank` in `folder`, and checks that it belongs to this checkpoint. `wanted` is { save, step,
-- world_size } of the checkpoint.
local function open_shard(folder, rank, wanted, options)
  local path = folder .. "/" .. rank_files.file_name(rank, wanted.world_size)
  local there, why, code = io.open(path, "rb")
  if not there and code ~= errno.ENOENT then error(("cannot open %s"):format(why), 0) end
  if not there then
    error(("%s is missing: the checkpoint has files of %d ranks, which must all be in one folder that every rank sees")
      :format(path,
      wanted.world_size), 0)
  end
  there:close()
  local file = safetensors.open(path, options)
  local ok, about = pcall(about_of, file)
  local differs
  if ok then
    for _, key in ipairs { "save", "step", "world_size" } do
      if about[key] ~= wanted[key] then differs = differs or key end
    end
    if not differs and about.rank ~= rank then differs = "rank" end
  end
  if ok and not differs then return file, about end
  file:close()
  if not ok then error(about, 0) end
  error(("%s does not belong to this checkpoint: it is of step %s, rank %s of %s, save %s, not of step %d, rank %d of "
    .. "%d, save %s"):format(path, tostring(about.step), tostring(about.rank), tostring(about.world_size),
    tostring(about.save), wanted.step, rank, wanted.world_size, wanted.save), 0)
end

-- -- writing --------------------------------------------------------------------------------------------------------
--- Returns whether every rank's file exists and is complete.
---@param folder string
---@param size integer
---@return boolean
function rank_files.all_there(folder, size)
  for rank = 0, size - 1 do
    if not lfs.attributes(folder .. "/" .. rank_files.file_name(rank, size), "mode") then return false end
  end
  return true
end

local list_text, zeros = rectangles.text, rectangles.zeros

local function file_of(piece) return piece.file end

-- Checks that the pieces of a tensor cover the whole tensor.
local function check_pieces(name, entry) rectangles.check(name, entry.shape, entry.pieces, file_of) end

-- Returns the parts of a tensor that a file contains, as a list of { offset, shape, at }. Also returns the shape of the
-- whole tensor.
local function parts_of(file, tensor, of)
  local shape = file:shape(tensor)
  if not of then return { { offset = zeros(shape), shape = shape } }, shape end
  if not of.parts then return { { offset = of.offset, shape = shape } }, of.shape end
  local places = {}
  for i, part in ipairs(of.parts) do places[i] = { offset = part.at, shape = part.shape } end
  rectangles.check(tensor, shape, places, function() return file.path end)
  return of.parts, of.shape
end

-- Adds a rank's file to the index.
local function add(index, file, about)
  local name = file.path:match("[^/]+$")
  index.files[#index.files + 1] = name
  index.rng[#index.rng + 1] = about.rng
  for parameter, updates in pairs(about.updates or {}) do
    index.updates[parameter] = math.max(index.updates[parameter] or 0, updates)
  end
  for _, tensor in ipairs(file:names()) do
    local of, dtype = about.pieces and about.pieces[tensor], file:dtype(tensor)
    local parts, whole = parts_of(file, tensor, of)
    local entry = index.tensors[tensor] or { dtype = dtype, shape = whole, pieces = {} }
    index.tensors[tensor] = entry
    if entry.dtype ~= dtype or not rectangles.same(entry.shape, whole) then
      error(("tensor '%s' is %s [%s] in %s, but %s [%s] in %s"):format(tensor, entry.dtype, list_text(entry.shape),
        entry.pieces[1].file, dtype, list_text(whole), name), 0)
    end
    for _, part in ipairs(parts) do
      if part.at then index.version = VERSION end
      table.insert(entry.pieces, { file = name, shape = part.shape, offset = part.offset, at = part.at,
        xxh3_64 = file:checksum(tensor) })
    end
  end
end

--- Writes the index of a folder that has the files of all ranks. `expected` has the names of the tensors that the files
--- must contain.
---@param folder string
---@param about {save: string, run: string, step: integer, world_size: integer, mesh: table<string, integer>}
---@param state_text string JSON
---@param expected string[]
function rank_files.write_index(folder, about, state_text, expected)
  local index = { version = UNCUT, save = about.save, run = about.run, step = about.step,
    world_size = about.world_size, mesh = about.mesh, files = {}, tensors = {}, rng = {}, updates = {} }
  for rank = 0, about.world_size - 1 do
    local file, of = open_shard(folder, rank, about)
    local ok, problem = pcall(add, index, file, of)
    file:close()
    if not ok then error(problem, 0) end
  end
  for _, name in ipairs(expected) do
    if not index.tensors[name] then error(("no rank saved tensor '%s'"):format(name), 0) end
  end
  for name, entry in pairs(index.tensors) do check_pieces(name, entry) end
  local text = "," .. encode(index):sub(2, -2) .. ",\"state\":" .. state_text .. "}\n"
  text = HEAD .. bit.tohex(C.ps_xxh3("\"" .. text, #text + 1), 16) .. "\"" .. text
  native.check(C.ps_file_write_atomic(folder .. INDEX, text, #text))
end

-- -- reading --------------------------------------------------------------------------------------------------------
---@class ps.checkpoints.RankFiles: ps.Pieced all files of a folder, with the interface of one file
---@field files ps.SafeTensors[] open files by rank, from 1
local RankFiles = setmetatable({}, { __index = Pieced })
RankFiles.__index = RankFiles

--- Returns the tensors that consist of several pieces, so that ps.checkpoints.merge can assemble them.
---@return table<string, {dtype: string, shape: integer[], pieces: {path: string, offset: integer[], shape: integer[],
---  at?: integer[]}[]}>
function RankFiles:divided()
  local all = {}
  for name, entry in pairs(self.tensors) do
    if #entry.pieces > 1 then
      local pieces = {}
      for i, piece in ipairs(entry.pieces) do
        pieces[i] = { path = piece.from.path, offset = piece.offset, shape = piece.shape, at = piece.at }
      end
      all[name] = { dtype = entry.dtype, shape = entry.shape, pieces = pieces }
    end
  end
  return all
end

function RankFiles:close()
  for _, file in ipairs(self.files) do file:close() end
end

--- Returns the index of a checkpoint's folder. Raises an error if the index is missing or damaged.
---@param folder string
---@return table
function rank_files.index(folder)
  local path = folder .. INDEX
  local text, why, absent = read_file(path)
  if absent then error(("this checkpoint is incomplete: cannot open %s"):format(why), 0) end
  if not text then error("cannot read " .. why, 0) end
  local digits, rest = text:sub(#HEAD + 1, #HEAD + 16), text:sub(#HEAD + 17)
  if text:sub(1, #HEAD) ~= HEAD or bit.tohex(C.ps_xxh3(rest, #rest), 16) ~= digits then
    error(path .. " is damaged: its checksum differs from the one in it", 0)
  end
  local index = json.decode(text)
  check_version(path, index.version)
  return index
end

-- Returns the tensors of a version 1 index in the form of version 2. Reads their shapes and dtypes from the files.
local function of_version_1(index, files)
  local tensors = {}
  for tensor, name in pairs(index.weight_map) do
    local file = files[name]
    if file and file:has(tensor) then
      local shape = file:shape(tensor)
      tensors[tensor] = { dtype = file:dtype(tensor), shape = shape,
        pieces = { { file = name, offset = zeros(shape), shape = shape, xxh3_64 = index.checksums[tensor] } } }
    else
      tensors[tensor] = { pieces = { { file = name } } }
    end
  end
  return tensors
end

-- Checks a file's tensor against its pieces in the index.
local function check_pieces_of(self, file, tensor, pieces)
  local first = pieces and pieces[1]
  if not first or first.xxh3_64 ~= file:checksum(tensor) then
    error(("%s has tensor '%s' with checksum %s, but index.json has %s"):format(file.path, tensor,
      tostring(file:checksum(tensor)), first and tostring(first.xxh3_64) or "no such tensor"), 0)
  end
  local shape, dtype = file:shape(tensor), self.tensors[tensor].dtype
  local whole = #pieces == 1 and not first.at
  if whole and not rectangles.same(first.shape, shape) or dtype ~= file:dtype(tensor) then
    error(("%s has tensor '%s' as %s [%s], but index.json as %s [%s]"):format(file.path, tensor, file:dtype(tensor),
      list_text(shape), tostring(dtype), list_text(first.shape)), 0)
  end
  if whole then return end
  local places = {}
  for i, piece in ipairs(pieces) do places[i] = { offset = piece.at or zeros(shape), shape = piece.shape } end
  rectangles.check(tensor, shape, places, function() return file.path end)
end

-- Checks that every piece in the index is in its file and has the same checksum there. Also checks that no file
-- contains other tensors.
local function check_tensors(self, index)
  local files, pieces = {}, {}
  for _, file in ipairs(self.files) do files[file.path:match("[^/]+$")] = file end
  self.tensors = index.version == 1 and of_version_1(index, files) or index.tensors
  for tensor, entry in pairs(self.tensors) do
    for _, piece in ipairs(entry.pieces) do
      local file = files[piece.file]
      if not file or not file:has(tensor) then
        error(("%s/%s has no tensor '%s', although index.json lists it there"):format(self.path, piece.file, tensor), 0)
      end
      piece.from, piece.name = file, tensor
      local key = piece.file .. "\n" .. tensor
      pieces[key] = pieces[key] or {}
      table.insert(pieces[key], piece)
    end
  end
  for name, file in pairs(files) do
    for _, tensor in ipairs(file:names()) do check_pieces_of(self, file, tensor, pieces[name .. "\n" .. tensor]) end
  end
  for name, entry in pairs(self.tensors) do check_pieces(name, entry) end
end

--- Opens a folder's files and checks that they belong together. Does not read the tensors' bytes.
---@param path string
---@param options? {verify?: boolean}
---@return ps.checkpoints.RankFiles
---@return table index
function rank_files.open(path, options)
  local index = rank_files.index(path)
  local self = setmetatable({ path = path, files = {}, tensors = {} }, RankFiles)
  local ok, problem = pcall(function()
    for rank = 0, index.world_size - 1 do self.files[rank + 1] = open_shard(path, rank, index, options) end
    check_tensors(self, index)
  end)
  if not ok then
    self:close()
    error(problem, 0)
  end
  return self, index
end

return rank_files
