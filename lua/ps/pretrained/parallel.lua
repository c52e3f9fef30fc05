-- SPDX-License-Identifier: BSD-3-Clause
-- Writes OSLO's folders for a model that several ranks share. A folder has a file pytorch_model_tp_I_pp_J.bin for each
-- combination of tensor-parallel rank I and pipeline stage J, a config.json, and a placement.json. placement.json maps
-- tensors to files:
--   { "version": 1, "pipeline_parallel_size", "tensor_parallel_size", "weight_map": { tensor: file } }
-- If layers are split over ranks, the version is 2. A tensor that is whole on all ranks along tp is in the files of all
-- these ranks, and weight_map names the first of these files. For every other tensor, each file has the part of its
-- rank, without padding, and placement.json describes these parts:
--   "pieces": { tensor: { "dtype", "shape": shape of the whole tensor, "pieces": [ { "file", "shape",
--     "offset": offset of the piece's first element in the whole tensor,
--     "at": offset of the piece's first element in the file's tensor } ] } }
-- With merge_checkpoints, the weights are in one file pytorch_model.bin. The folder is written under a temporary name
-- and then renamed as a whole. No file of an older, larger layout therefore remains.
local native = require "ps.core.ffi"
local handle = require "ps.nn.handle"
local caller = require "ps.core.caller"
local agree = require "ps.dist.agree"
local checkpoint_folder = require "ps.checkpoints.folder"
local sharded = require "ps.nn.sharded"
local encode = require "ps.core.encode"
local folder = require "ps.pretrained.folder"
local lfs = require "lfs"
local mesh = require "ps.dist.mesh"
local save = require "ps.pretrained.save"
local ffi, C, check = native.ffi, native.C, native.check
local error = caller.error

local parallel = {}

-- -- PyTorch's files, a tensor at a time ------------------------------------------------------------------------------
local Bin = {}
Bin.__index = Bin

local function declare(self, entries)
  local value = ffi.new("ps_pt_value", { kind = C.PS_PT_DICT, count = 2 * #entries })
  check(C.ps_ptw_put(self.writer, value))
  for _, entry in ipairs(entries) do
    local key = ffi.new("ps_pt_value", { kind = C.PS_PT_STRING, integer = #entry.name })
    key.text = entry.name
    check(C.ps_ptw_put(self.writer, key))
    self.storage[entry.name] = check(C.ps_ptw_storage(self.writer, native.dtype_code(entry.dtype), entry.numel))
    local t, stride = ffi.new("ps_pt_tensor", { ndim = #entry.shape, storage = self.storage[entry.name] }), 1
    for d = #entry.shape - 1, 0, -1 do
      t.shape[d], t.stride[d] = entry.shape[d + 1], stride
      stride = stride * math.max(1, entry.shape[d + 1])
    end
    check(C.ps_ptw_tensor(self.writer, t))
  end
  check(C.ps_ptw_begin(self.writer))
end

function Bin:append(name, data, nbytes) check(C.ps_ptw_write(self.writer, self.storage[name], data, nbytes)) end
function Bin:commit() check(C.ps_ptw_commit(self.writer)) end
function Bin:close() C.ps_ptw_free(ffi.gc(self.writer, nil)) end

--- Creates a PyTorch file that stores a dict of tensors. Returns a writer for save.write.
---@param path string
---@param entries table[]
---@return table writer
function parallel.bin_file(path, entries)
  local out = ffi.new("ps_ptw *[1]")
  check(C.ps_ptw_new(path, out))
  local self = setmetatable({ writer = ffi.gc(out[0], C.ps_ptw_free), storage = {} }, Bin)
  local ok, problem = pcall(declare, self, entries)
  if not ok then
    self:close()
    error(problem, 0)
  end
  return self
end

-- -- saving -----------------------------------------------------------------------------------------------------------
local function name_of(tp, pp) return ("pytorch_model_tp_%d_pp_%d.bin"):format(tp, pp) end

local function placement_of(model, entries)
  local map, pieces = {}, {}
  for _, entry in ipairs(entries) do
    local first = entry.parts and entry.parts[1] or entry
    map[entry.name] = name_of(first.tp or 0, first.pp or 0)
    if entry.parts then
      local list = {}
      for i, part in ipairs(entry.parts) do
        list[i] = { file = name_of(part.tp, part.pp), offset = part.offset, shape = part.shape, at = part.at }
      end
      pieces[entry.name] = { dtype = entry.dtype, shape = entry.shape, pieces = list }
    end
  end
  local engine, cuts = handle.of(model), next(pieces) ~= nil
  local stages = engine and engine.stages
  return { version = cuts and 2 or 1, pipeline_parallel_size = stages and mesh.size "pp" or 1,
    tensor_parallel_size = cuts and mesh.size "tp" or 1, weight_map = map, pieces = cuts and pieces or nil }
end

-- Writes this rank's file. The ranks that train the same parameters write it together.
local function write_part(model, temp)
  local cuts = sharded.of(model) ~= nil
  -- Without split layers, tensors are equal on all ranks along tp, so only tp rank 0 writes them.
  if not cuts and mesh.rank "tp" > 0 then return end
  local engine = handle.of(model)
  local peers = (cuts or engine and engine.ranks) and mesh.group "dp" or nil
  local pp = engine and engine.stages and mesh.rank "pp" or 0
  save.write(temp .. "/" .. name_of(cuts and mesh.rank "tp" or 0, pp), save.entries(model), parallel.bin_file,
    peers)
end

local function write_text(path, text) check(C.ps_file_write_atomic(path, text, #text)) end

-- Raises an error if the folder contains a file that a save does not write, because the file may be a user's data.
local function check_ours(path)
  if not lfs.symlinkattributes(path, "mode") then return end
  if lfs.attributes(path, "mode") ~= "directory" then error(("%s is not a folder"):format(path), 0) end
  for name in lfs.dir(path) do
    local ours = name:match("^%.%.?$") or name:match("^pytorch_model.*%.bin$") or name:match("^model.*%.safetensors$")
      or name:match("%.index%.json$") or name == "config.json" or name == "placement.json" or folder.is_companion(name)
    if not ours then
      error(("%s holds %s, which is not a file of a saved model; save_parallelized replaces its folder as a "
        .. "whole, so choose "
        .. "another one"):format(path, name), 0)
    end
  end
end

--- Writes the folder. All ranks call this function. An error on one rank is raised on all ranks, and the folder does
--- not change. If a step is in progress, it keeps its gradients and can continue afterwards.
---@param model ps.nn.Module|ps.Engine
---@param path string
---@param config_of fun(dtype: string): string returns the text of config.json for a weight dtype
---@param whole boolean whether to write one file with all stages
---@param source? string the folder from which the model was loaded; its tokenizer and generation settings are copied
function parallel.save(model, path, config_of, whole, source)
  caller.typed(path, "string", "save_parallelized: the folder")
  path = path:gsub("(.)/+$", "%1")
  local group = save.group_of(model)
  local rank = group and group:rank() or 0
  agree.same(group, "save_parallelized", { { "folder", path }, { "merge_checkpoints", tostring(whole) } })
  local temp = ("%s.tmp-%s"):format(path, agree.first(group,
    function() return ("%x"):format(native.C.ps_now() * 1e6) end))
  local ok, problem = pcall(function()
    agree.run(group, function()
      if rank > 0 then return end
      check_ours(path)
      checkpoint_folder.make(temp)
    end)
    agree.run(group, function() return save.entries(model) end)       -- raises one rank's error on all ranks
    local all = save.whole(model)
    if whole then
      save.write(temp .. "/pytorch_model.bin", all, parallel.bin_file, group)
    else
      agree.run(group, function() write_part(model, temp) end)
    end
    agree.run(group, function()
      if rank > 0 then return end
      write_text(temp .. "/config.json", config_of(save.dtype_of(all)))
      if not whole then write_text(temp .. "/placement.json", encode(placement_of(model, all), "placement.json")) end
      if source then folder.copy_companions(source, temp) end
      check(C.ps_file_swap_folder(temp, path))
    end)
  end)
  if rank == 0 then checkpoint_folder.remove(temp) end                -- the old folder, or the rest of a failed save
  if not ok then error(problem, 0) end
end

return parallel
