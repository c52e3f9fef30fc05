-- SPDX-License-Identifier: BSD-3-Clause
-- Folders as Hugging Face's save_pretrained writes them: where one is, its config.json, its files of weights, and what
-- goes along when a model is saved.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local json = require "cjson"
local without_bom = require "ps.core.bom"
local lfs = require "lfs"
local rectangles = require "ps.core.rectangles"
local settings = require "ps.pretrained.settings"
local error = caller.error
local C = native.C

local folder = {}

-- Files that belong to a model and hold none of its weights.
local COMPANIONS = { "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
  "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "encoder.json", "vocab.bpe", "tokenizer.model",
  "sentencepiece.bpe.model", "spiece.model", "chat_template.jinja", "preprocessor_config.json" }

local function is(path, mode) return lfs.attributes(path, "mode") == mode end

local function read(path)
  local file, why = io.open(path, "rb")
  if not file then error("no model file: " .. why) end
  local text = file:read("*a") or ""                       -- of a folder: nothing
  file:close()
  return text
end

--- A JSON file that holds an object.
---@param path string
---@return table
function folder.read_json(path)
  local ok, value = pcall(json.decode, without_bom(read(path)))
  if not ok or type(value) ~= "table" then
    error(("%s: %s"):format(path, ok and "it holds no JSON object" or tostring(value)))
  end
  return value
end

-- Where huggingface_hub keeps what it fetched.
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
  local file = io.open(("%s/refs/%s"):format(repo, revision), "rb")
  if not file then return revision end
  local commit = (file:read("*a") or ""):match("^%s*(.-)%s*$")
  file:close()
  return commit
end

--- The folder of a model: the one of that path, else the one that was fetched under that name ("gpt2",
--- "google-bert/bert-base-uncased"), in Hugging Face's cache (HF_HUB_CACHE, HF_HOME). Nothing is fetched.
---@param name string
---@param revision? string a branch, tag or commit, default "main"
---@return string path
function folder.find(name, revision)
  caller.typed(name, "string", "from_pretrained: the folder")
  if is(name, "directory") then return name end
  if is(name, "file") then
    error(("from_pretrained: %s is a file; give the folder that it is in, with config.json"):format(name))
  end
  if not name:match("^[%w%-_.]+$") and not name:match("^[%w%-_.]+/[%w%-_.]+$") or name:match("^%.+/") then
    error(("no model file: there is no %s/config.json"):format(name))
  end
  revision = revision or "main"
  if revision:find("..", 1, true) then error(("from_pretrained: no revision '%s'"):format(revision)) end
  local repo = ("%s/models--%s"):format(cache(), (name:gsub("/", "--")))
  local path = ("%s/snapshots/%s"):format(repo, commit_of(repo, revision))
  if is(path, "directory") then return path end
  return error(("no model file: %s is no folder, and Hugging Face's cache has no such model (%s). psluajit fetches "
    .. "nothing: `hf download %s%s` (of pip's huggingface_hub) puts it there"):format(name, path, name,
    revision ~= "main" and " --revision " .. revision or ""))
end

--- The config.json of a folder; a folder that holds an adapter, or whose weights have a name of their own, is refused.
---@param path string
---@return table
function folder.config(path)
  local adapter = path .. "/adapter_config.json"
  if is(adapter, "file") then
    settings.refuse(path, "adapter_config.json", folder.read_json(adapter).peft_type or "present",
      "adapters are not supported; merge it into its model first (peft's merge_and_unload)")
  end
  local fields = folder.read_json(path .. "/config.json")
  local named = fields.transformers_weights
  if named ~= nil and named ~= json.null then
    settings.refuse(path .. "/config.json", "transformers_weights", named, "weights are read from model.safetensors or "
      .. "model.safetensors.index.json; give the file that name, and take the field out")
  end
  return fields
end

-- The files that an index names, each once, in order of name.
local function indexed(path, from)
  local map = folder.read_json(from).weight_map
  if type(map) ~= "table" then error(from .. ": it has no weight_map, which says what is in which file") end
  local paths, seen = {}, {}
  for name, file in pairs(map) do
    if type(file) ~= "string" then error(("%s: the weight_map names no file for '%s'"):format(from, tostring(name))) end
    if file:find("/", 1, true) then
      error(("%s: the weight_map names '%s', which is not a file beside it"):format(from, file))
    end
    if not seen[file] then paths[#paths + 1] = path .. "/" .. file end
    seen[file] = true
  end
  table.sort(paths)
  return paths
end

--- The files with a folder's weights, safetensors before PyTorch's, whole ones before indexed ones, as Hugging Face
--- looks for them.
---@param path string the folder
---@return string[]
function folder.files(path)
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

---@class ps.pretrained.Placement what placement.json says (ps/pretrained/parallel.lua)
---@field pipeline_parallel_size integer
---@field tensor_parallel_size integer
---@field weight_map table<string, string>
---@field pieces table<string, {dtype: string, shape: integer[], pieces: {file: string, offset: integer[],
---  shape: integer[], at: integer[]}[]}> of tensors that are in several pieces

-- Checks what is said of a tensor in pieces.
local function check_placed(path, name, entry)
  local fine = type(entry) == "table" and type(entry.dtype) == "string" and type(entry.shape) == "table"
    and type(entry.pieces) == "table" and entry.pieces[1] ~= nil
  for _, piece in ipairs(fine and entry.pieces or {}) do
    fine = fine and type(piece) == "table" and type(piece.file) == "string" and piece.file:match(PARALLEL) ~= nil
      and rectangles.inside(entry.shape, piece.offset, piece.shape) and type(piece.at) == "table"
      and #piece.at == #entry.shape
  end
  if not fine then error(("%s: it does not say where '%s' is: dtype, shape and pieces"):format(path, name), 0) end
end

--- What the placement.json of a folder says; nil: there is none.
---@param path string the folder
---@return ps.pretrained.Placement?
function folder.placement(path)
  local from = path .. "/placement.json"
  if not is(from, "file") then return nil end
  local placement = folder.read_json(from)
  if placement.version ~= 1 and placement.version ~= 2 then
    error(("%s is of version %s; this psluajit reads versions 1 and 2"):format(from, tostring(placement.version)), 0)
  end
  placement.pieces = placement.version == 2 and placement.pieces or {}
  for key, kind in pairs { pipeline_parallel_size = "number", tensor_parallel_size = "number", weight_map = "table",
    pieces = "table" } do
    if type(placement[key]) ~= kind then error(("%s: it has no %s"):format(from, key), 0) end
  end
  for name, file in pairs(placement.weight_map) do
    if type(file) ~= "string" then error(("%s: the weight_map names no file for '%s'"):format(from, name), 0) end
  end
  for name, entry in pairs(placement.pieces) do check_placed(from, name, entry) end
  return placement
end

--- The files of a folder that OSLO's save_parallelized, or ours, wrote, stage by stage; nil: it has none. A missing
--- file is an error, and so are OSLO's own files of tensor-parallel ranks, which do not say how layers were cut.
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
    error(("%s/pytorch_model_tp_%d_pp_0.bin is of a rank that has parts of layers (tensor parallelism); without "
      .. "placement.json, as save_parallelized writes it, nothing says how they were cut"):format(path, tp_size - 1))
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
    error(("%s has files of %d stages and %d ranks along tp, placement.json says %s and %s"):format(path, pp_size,
      tp_size, tostring(placement.pipeline_parallel_size), tostring(placement.tensor_parallel_size)))
  end
  return list
end

--- The placement of files that save_parallelized wrote of cut layers; nil: these files are none.
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

--- Whether a file belongs to a model and holds none of its weights.
---@param name string
---@return boolean
function folder.is_companion(name)
  for _, known in ipairs(COMPANIONS) do if name == known then return true end end
  return false
end

--- Copies a model's other files (tokenizer, generation settings) to a folder, where it lacks them.
---@param from string
---@param to string
function folder.copy_companions(from, to)
  for _, name in ipairs(COMPANIONS) do
    local source, target = from .. "/" .. name, to .. "/" .. name
    if is(source, "file") and not lfs.attributes(target, "mode") then
      local text = read(source)
      native.check(C.ps_file_write_atomic(target, text, #text))
    end
  end
end

return folder
