-- SPDX-License-Identifier: BSD-3-Clause
-- A checkpoint of several processes: a folder with a safetensors file of each rank and index.json. Every file's
-- metadata ("psluajit_shard") say of which save, step and rank it is, so that files of two checkpoints cannot be taken
-- for one; the index says which tensor is in which file, and everything that is no tensor.
--   { "xxh3_64": of all that follows this value, "version": 1, "save": a number of this save alone,
--     "run": of its run, "step", "world_size", "files": [...], "weight_map": { tensor: file },
--     "checksums": { tensor: as in the file },
--     "rng": [of each rank], "updates": { parameter: how many it has had }, "state": as in a single file, under
--     "psluajit" }
local ps = require "ps"
local json = require("cjson").new()
local bit = require "bit"
local encode = require "ps.checkpoints.encode"
local safetensors = require "ps.safetensors"
local C = ps.C
local error = require("ps.caller").error

local rank_files = {}

local INDEX, KEY, VERSION = "/index.json", "psluajit_shard", 1
local HEAD = "{\"xxh3_64\":\""

---@param rank integer
---@param size integer
---@return string
function rank_files.file_name(rank, size) return ("rank-%05d-of-%05d.safetensors"):format(rank, size) end

--- Deals items out among ranks, balanced by bytes; the same on every rank that has the same items.
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

--- The metadata of a rank's file. about: { save, step, rank, world_size, rng, updates }.
---@param about table
---@return table<string, string>
function rank_files.metadata(about)
  about.version = VERSION
  return { format = "pt", [KEY] = encode(about) }
end

local function about_of(file)
  local text = file.metadata[KEY]
  local ok, about = pcall(json.decode, text or "")
  if not ok or type(about) ~= "table" or about.version ~= VERSION then
    error(file.path .. " is not a rank's file of a checkpoint", 0)
  end
  return about
end

-- Opens rank `rank`'s file in `folder` and checks that it belongs there; wanted: { save, step, world_size }.
local function open_shard(folder, rank, wanted, options)
  local path = folder .. "/" .. rank_files.file_name(rank, wanted.world_size)
  local there = io.open(path, "rb")
  if not there then
    error(("%s is missing: the checkpoint has files of %d ranks, all in one folder that every rank sees"):format(path,
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
  error(("%s does not belong to this checkpoint: it is of step %s, rank %s of %s, save %s; wanted is step %d, "
    .. "rank %d of %d, save %s"):format(path, tostring(about.step), tostring(about.rank), tostring(about.world_size),
    tostring(about.save), wanted.step, rank, wanted.world_size, wanted.save), 0)
end

-- -- writing --------------------------------------------------------------------------------------------------------
--- Whether every rank's file has appeared, complete.
---@param folder string
---@param size integer
---@return boolean
function rank_files.all_there(folder, size)
  for rank = 0, size - 1 do
    local file = io.open(folder .. "/" .. rank_files.file_name(rank, size), "rb")
    if not file then return false end
    file:close()
  end
  return true
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
    if index.weight_map[tensor] then
      error(("tensor '%s' was saved twice, in %s and in %s"):format(tensor, index.weight_map[tensor], name), 0)
    end
    index.weight_map[tensor], index.checksums[tensor] = name, file:checksum(tensor)
  end
end

--- Writes the index of a folder that has all ranks' files. expected: names of tensors that must be among them.
---@param folder string
---@param about {save: string, run: string, step: integer, world_size: integer}
---@param state_text string JSON
---@param expected string[]
function rank_files.write_index(folder, about, state_text, expected)
  local index = { version = VERSION, save = about.save, run = about.run, step = about.step,
    world_size = about.world_size, files = {}, weight_map = {}, checksums = {}, rng = {}, updates = {} }
  for rank = 0, about.world_size - 1 do
    local file, of = open_shard(folder, rank, about)
    local ok, problem = pcall(add, index, file, of)
    file:close()
    if not ok then error(problem, 0) end
  end
  for _, name in ipairs(expected) do
    if not index.weight_map[name] then error(("tensor '%s' was saved by no rank"):format(name), 0) end
  end
  local text = "," .. encode(index):sub(2, -2) .. ",\"state\":" .. state_text .. "}\n"
  text = HEAD .. bit.tohex(C.ps_xxh3("\"" .. text, #text + 1), 16) .. "\"" .. text
  ps.check(C.ps_file_write_atomic(folder .. INDEX, text, #text))
end

-- -- reading --------------------------------------------------------------------------------------------------------
---@class ps.checkpoints.RankFiles the files of a folder as one, with the methods of ps.SafeTensors that readers call
---@field path string
local RankFiles = {}
RankFiles.__index = RankFiles

function RankFiles:names()
  local names = {}
  for name in pairs(self.file_of) do names[#names + 1] = name end
  table.sort(names)
  return names
end

function RankFiles:has(name) return self.file_of[name] ~= nil end

for _, method in ipairs { "shape", "dtype", "check", "verify", "checksum", "nbytes", "tensor", "read_into" } do
  RankFiles[method] = function(self, name, ...)
    local file = self.file_of[name]
    if not file then error(("%s holds no tensor '%s'"):format(self.path, name)) end
    return file[method](file, name, ...)
  end
end

function RankFiles:close()
  for _, file in ipairs(self.files) do file:close() end
end

--- The index of a checkpoint's folder; an error where it is missing or damaged.
---@param folder string
---@return table
function rank_files.index(folder)
  local path = folder .. INDEX
  local file, why = io.open(path, "rb")
  if not file then error(("this checkpoint is not complete: cannot open %s"):format(why), 0) end
  local text = file:read("*a")
  file:close()
  local digits, rest = (text or ""):sub(#HEAD + 1, #HEAD + 16), (text or ""):sub(#HEAD + 17)
  if text:sub(1, #HEAD) ~= HEAD or bit.tohex(C.ps_xxh3(rest, #rest), 16) ~= digits then
    error(path .. " is damaged: its checksum is not the one that it holds", 0)
  end
  local index = json.decode(text)
  if index.version ~= VERSION then error(path .. " is of another version of psluajit", 0) end
  return index
end

-- Every tensor of the index is in its file with that checksum, and no file has others.
local function check_tensors(self, index)
  for _, file in ipairs(self.files) do
    local name = file.path:match("[^/]+$")
    for _, tensor in ipairs(file:names()) do
      if index.weight_map[tensor] ~= name or index.checksums[tensor] ~= file:checksum(tensor) then
        error(("%s has tensor '%s' with checksum %s, index.json says %s in %s"):format(file.path, tensor,
          tostring(file:checksum(tensor)), tostring(index.checksums[tensor]), tostring(index.weight_map[tensor])), 0)
      end
      self.file_of[tensor] = file
    end
  end
  for tensor, name in pairs(index.weight_map) do
    if not self.file_of[tensor] then
      error(("%s/%s has no tensor '%s', which index.json says is there"):format(self.path, name, tensor), 0)
    end
  end
end

--- Opens a folder's files and checks that they belong together. Tensors' bytes are not read.
---@param path string
---@param options? {verify?: boolean}
---@return ps.checkpoints.RankFiles
---@return table index
function rank_files.open(path, options)
  local index = rank_files.index(path)
  local self = setmetatable({ path = path, files = {}, file_of = {} }, RankFiles)
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
