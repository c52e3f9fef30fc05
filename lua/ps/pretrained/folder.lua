-- SPDX-License-Identifier: BSD-3-Clause
-- Reads folders in the form of Hugging Face's save_pretrained: finds the folder, its config.json and its weight files.
-- Also copies companion files when a model is saved.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local file_id = require "ps.core.file_id"
local json = require "cjson"
local without_bom = require "ps.core.bom"
local lfs = require "lfs"
local read_file = require "ps.core.read_file"
local rectangles = require "ps.core.rectangles"
local settings = require "ps.pretrained.settings"
local error = caller.error
local C = native.C

local folder = {}

-- Returns ps/pretrained/gguf.lua if the path is a GGUF file, or nil otherwise. A GGUF file is used like a folder.
local function gguf_of(path)
  return type(path) == "string" and path:match "%.gguf$" and lfs.attributes(path, "mode") == "file"
    and require "ps.pretrained.gguf" or nil
end

-- Files that belong to a model but have no weights.
local COMPANIONS = { "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
  "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "encoder.json", "vocab.bpe", "tokenizer.model",
  "sentencepiece.bpe.model", "spiece.model", "chat_template.jinja", "preprocessor_config.json" }

local function is(path, mode) return lfs.attributes(path, "mode") == mode end

local function read(path)
  local text, why, absent = read_file(path)
  if not text then error((absent and "no model file: " or "cannot read a model's file: ") .. why) end
  return text
end

--- Reads a JSON file that contains an object.
---@param path string
---@return table
function folder.read_json(path)
  local ok, value = pcall(json.decode, without_bom(read(path)))
  if not ok or type(value) ~= "table" then
    error(("%s: %s"):format(path, ok and "it does not contain a JSON object" or tostring(value)))
  end
  return value
end

-- Returns the path of huggingface_hub's cache folder.
local function cache()
  local own = os.getenv "HF_HUB_CACHE" or os.getenv "HUGGINGFACE_HUB_CACHE"
  if own and own ~= "" then return own end
  local home = os.getenv "HF_HOME"
  if not home or home == "" then
    local base = os.getenv "XDG_CACHE_HOME"
    home = (base and base ~= "" and base or (os.getenv "HOME" or "") .. "/.cache") .. "/huggingface"
  end
  return home .. "/hub"
end

local function commit_of(repo, revision)
  local text, why, absent = read_file(("%s/refs/%s"):format(repo, revision))
  if not text and not absent then error("cannot read the commit of a model's revision: " .. why) end
  return text and text:match "^%s*(.-)%s*$" or revision
end

--- Returns the path of a model. If `name` is the path of a folder or a GGUF file, returns it. Otherwise `name` is a
--- model's name, such as "gpt2" or "google-bert/bert-base-uncased", and the function returns its folder in Hugging
--- Face's cache (HF_HUB_CACHE, HF_HOME). This function downloads nothing.
---@param name string
---@param revision? string a branch, tag or commit (default "main")
---@return string path
function folder.find(name, revision)
  if caller.typed(name, "string", "from_pretrained: the folder") == "" then
    error("from_pretrained: the name of the folder is empty")
  end
  if is(name, "directory") then return name end
  if gguf_of(name) then return name end
  if name:lower():find "%.gguf$" and not is(name, "file") then
    error(("no model file: there is no file %s"):format(name))
  end
  if is(name, "file") then
    error(("from_pretrained: %s is a file; pass its folder, which needs a config.json, or a file NAME.gguf"):format(
      name))
  end
  if not name:match("^[%w%-_.]+$") and not name:match("^[%w%-_.]+/[%w%-_.]+$") or name:match("^%.+/") then
    error(("no model file: there is no %s/config.json"):format(name))
  end
  revision = revision or "main"
  if revision:find("..", 1, true) then error(("from_pretrained: no revision '%s'"):format(revision)) end
  local repo = ("%s/models--%s"):format(cache(), (name:gsub("/", "--")))
  local path = ("%s/snapshots/%s"):format(repo, commit_of(repo, revision))
  if is(path, "directory") then return path end
  return error(("no model file: %s is not a folder, and Hugging Face's cache has no such model (%s). psluajit "
    .. "downloads "
    .. "nothing: run `hf download %s%s` (from pip's huggingface_hub) first"):format(name, path, name,
    revision ~= "main" and " --revision " .. revision or ""))
end

--- Returns whether a folder holds an adapter (docs/adapters.md).
---@param path string
---@return boolean
function folder.is_adapter(path) return is(path .. "/adapter_config.json", "file") end

--- Raises an error if a folder contains checkpoints of ps.checkpoints. Only the script that saved a checkpoint
--- can load it.
---@param path string
function folder.refuse_checkpoints(path)
  if is(path .. "/config.json", "file") or not is(path .. "/latest", "file") then return end
  local model = path .. "/model"
  error(("%s has checkpoints of a run, not a model: %s"):format(path, is(model .. "/config.json", "file")
    and "pass " .. model or "load them with ps.checkpoints.load in the script that saved them, and write the model "
      .. "with model:save_pretrained"))
end

--- Returns the path from which `config` was read, for messages: the folder's config.json, or the GGUF file.
---@param path string
---@return string
function folder.where(path) return gguf_of(path) and path or path .. "/config.json" end

--- Returns the contents of a folder's config.json. For a GGUF file, returns the same fields. Raises an error if the
--- folder contains an adapter, or weights with an unusual file name.
---@param path string
---@return table
function folder.config(path)
  local gguf = gguf_of(path)
  if gguf then return gguf.config(path) end
  local adapter = path .. "/adapter_config.json"
  if is(adapter, "file") then
    settings.refuse(path, "adapter_config.json", folder.read_json(adapter).peft_type or "present",
      "the folder holds an adapter; ps.from_pretrained(folder) loads it with its base model, ps.lora.load(model, "
      .. "folder) into a model")
  end
  folder.refuse_checkpoints(path)
  local unread = path .. "/config.json"
  if not is(unread, "file") and (is(unread .. ".new", "file") or is(unread .. ".old", "file")) then
    error(("%s: a process ended while it replaced this model: there is no config.json, only config.json%s; save the "
      .. "model again"):format(path, is(unread .. ".new", "file") and ".new" or ".old"))
  end
  local fields = folder.read_json(path .. "/config.json")
  local named = fields.transformers_weights
  if named ~= nil and named ~= json.null then
    settings.refuse(path .. "/config.json", "transformers_weights", named, "weights are read from model.safetensors or "
      .. "model.safetensors.index.json; rename the file, and remove the field")
  end
  return fields
end

-- Returns the weight files that an index lists, without duplicates and sorted by name.
local function indexed(path, from)
  local map = folder.read_json(from).weight_map
  if type(map) ~= "table" then error(from .. ": it has no weight_map, which maps tensors to files") end
  local paths, seen = {}, {}
  for name, file in pairs(map) do
    if type(file) ~= "string" then error(("%s: the weight_map has no file for '%s'"):format(from, tostring(name))) end
    if file:find("/", 1, true) then
      error(("%s: the weight_map has '%s', which is not a file in the same folder"):format(from, file))
    end
    if not seen[file] then paths[#paths + 1] = path .. "/" .. file end
    seen[file] = true
  end
  table.sort(paths)
  return paths
end

--- Returns the weight files of a folder. As in Hugging Face's libraries, safetensors files take precedence over PyTorch
--- files, and a single file takes precedence over several files with an index. For a GGUF file, returns
--- the file itself.
---@param path string the folder or GGUF file
---@return string[]
function folder.files(path)
  if gguf_of(path) then return { path } end
  for _, name in ipairs { "model.safetensors", "pytorch_model.bin" } do
    local whole, index = path .. "/" .. name, path .. "/" .. name .. ".index.json"
    if lfs.attributes(whole, "mode") then return { whole } end
    if lfs.attributes(index, "mode") then return indexed(path, index) end
  end
  local stages = folder.stages(path)
  if stages then return stages end
  return error(("no model file: %s has neither model.safetensors nor pytorch_model.bin, nor an index of either, nor "
    .. "pytorch_model_tp_0_pp_0.bin"):format(path))
end

local PARALLEL = "^pytorch_model_tp_(%d+)_pp_(%d+)%.bin$"

---@class ps.pretrained.Placement the contents of placement.json (ps/pretrained/parallel.lua)
---@field pipeline_parallel_size integer
---@field tensor_parallel_size integer
---@field weight_map table<string, string>
---@field pieces table<string, {dtype: string, shape: integer[], pieces: {file: string, offset: integer[], shape:
--- integer[], at: integer[]}[]}> the tensors that are split into several pieces

-- Checks the entry of placement.json for a tensor that is split into pieces.
local function check_placed(path, name, entry)
  local fine = type(entry) == "table" and type(entry.dtype) == "string" and type(entry.shape) == "table"
    and type(entry.pieces) == "table" and entry.pieces[1] ~= nil
  for _, piece in ipairs(fine and entry.pieces or {}) do
    fine = fine and type(piece) == "table" and type(piece.file) == "string" and piece.file:match(PARALLEL) ~= nil
      and rectangles.inside(entry.shape, piece.offset, piece.shape) and type(piece.at) == "table"
      and #piece.at == #entry.shape
  end
  if not fine then error(("%s: the entry of '%s' needs dtype, shape and pieces"):format(path, name), 0) end
end

--- Reads the placement.json of a folder. Returns nil if there is none.
---@param path string the folder
---@return ps.pretrained.Placement?
function folder.placement(path)
  local from = path .. "/placement.json"
  if not is(from, "file") then return nil end
  local placement = folder.read_json(from)
  if placement.version ~= 1 and placement.version ~= 2 then
    error(("%s has version %s; this psluajit reads versions 1 and 2"):format(from, tostring(placement.version)), 0)
  end
  placement.pieces = placement.version == 2 and placement.pieces or {}
  for key, kind in pairs { pipeline_parallel_size = "number", tensor_parallel_size = "number", weight_map = "table",
    pieces = "table" } do
    if type(placement[key]) ~= kind then error(("%s: it has no %s"):format(from, key), 0) end
  end
  for name, file in pairs(placement.weight_map) do
    if type(file) ~= "string" then error(("%s: the weight_map has no file for '%s'"):format(from, name), 0) end
  end
  for name, entry in pairs(placement.pieces) do check_placed(from, name, entry) end
  return placement
end

--- Returns the weight files that save_parallelized (OSLO's or ours) wrote to a folder, sorted by stage. Returns nil if
--- the folder has none. Raises an error if a file is missing. Also raises an error for OSLO's files of tensor-parallel
--- ranks, because these files do not record how the layers were split.
---@param path string
---@return string[]?
function folder.stages(path)
  local found, pp_size, tp_size = {}, 0, 0
  if not is(path, "directory") then return nil end
  for name in lfs.dir(path) do
    local tp, pp = name:match(PARALLEL)
    if tp then
      found[name] = true
      tp_size, pp_size = math.max(tp_size, tonumber(tp) + 1), math.max(pp_size, tonumber(pp) + 1)
    end
  end
  if tp_size == 0 then return nil end
  local placement = folder.placement(path)
  if tp_size > 1 and not (placement and next(placement.pieces)) then
    error(("%s/pytorch_model_tp_%d_pp_0.bin has parts of layers (tensor parallelism), but without "
      .. "a placement.json from save_parallelized the way they were split is unknown"):format(path, tp_size - 1))
  end
  local list = {}
  for pp = 0, pp_size - 1 do
    for tp = 0, tp_size - 1 do
      local name = ("pytorch_model_tp_%d_pp_%d.bin"):format(tp, pp)
      if not found[name] then
        error(("%s/%s is missing: the folder has files of stages up to %d, and of ranks up to %d along tp"):format(path,
          name, pp_size - 1, tp_size - 1))
      end
      list[#list + 1] = path .. "/" .. name
    end
  end
  if placement and (placement.pipeline_parallel_size ~= pp_size or placement.tensor_parallel_size ~= tp_size) then
    error(("%s has files of %d stages and %d ranks along tp, but placement.json says %s and %s"):format(path, pp_size,
      tp_size, tostring(placement.pipeline_parallel_size), tostring(placement.tensor_parallel_size)))
  end
  return list
end

--- Returns the placement for files that save_parallelized wrote for a model with split layers. Returns nil for other
--- files.
---@param paths string[]
---@return ps.pretrained.Placement? placement
---@return string? path the folder
function folder.placed(paths)
  for _, path in ipairs(paths) do
    local at, name = path:match("^(.*)/([^/]*)$")
    local tp = (name or path):match(PARALLEL)
    local placement = tp and folder.placement(at or ".")
    if placement and next(placement.pieces) then return placement, at or "." end
  end
end

--- Returns whether a file belongs to a model but has no weights.
---@param name string
---@return boolean
function folder.is_companion(name)
  for _, known in ipairs(COMPANIONS) do if name == known then return true end end
  return false
end

--- Removes a model's companion files (tokenizer, generation settings) from a folder.
---@param path string
function folder.remove_companions(path)
  for _, name in ipairs(COMPANIONS) do
    local file = path .. "/" .. name
    local removed, why = os.remove(file)
    if not removed and lfs.symlinkattributes(file, "mode") then
      error(("the file of the older model cannot be removed: %s"):format(why), 0)
    end
  end
end

--- Copies a model's companion files to a folder. Does not overwrite files in the folder.
---@param from string
---@param to string
---@return string[] kept companion files that `to` had before and that are not equal to those of `from`
function folder.copy_companions(from, to)
  local kept = {}
  if file_id(from) == file_id(to) then return kept end
  local gguf = gguf_of(from)
  if gguf then
    gguf.write_companions(from, to)
    return kept
  end
  for _, name in ipairs(COMPANIONS) do
    local source, target = from .. "/" .. name, to .. "/" .. name
    local text = is(source, "file") and read(source) or nil
    if lfs.attributes(target, "mode") then
      if not is(target, "file") or read(target) ~= text then kept[#kept + 1] = name end
    elseif text then
      native.check(C.ps_file_write_atomic(target, text, #text))
    end
  end
  return kept
end

return folder
