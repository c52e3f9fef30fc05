-- SPDX-License-Identifier: BSD-3-Clause
-- ps.save and ps.load. A .pt file, PyTorch's format, contains any nesting of tables, numbers, strings, booleans and
-- tensors. A safetensors file contains tensors by name.
--
--   ps.save({ model = model:state_dict(), step = 10 }, "run.pt")
--   local state = ps.load "run.pt"                        -- tables and tensors on "cpu"
--   model:load_state_dict(ps.load("run.pt", { lazy = true }):at "model")       -- one tensor at a time
--
-- Values are converted as follows:
--
--   tables         A table with the keys 1 .. n becomes a list. Any other table becomes a dict, whose keys are strings
--                  or integers. An empty table becomes a dict unless it was made by serialize.list {}.
--   numbers        A whole number becomes an int. Any other number becomes a float. When a file is read, an int of 2^53
--                  or more in magnitude becomes an int64_t.
--   tuples, sets   They are read as lists.
--   None           In a list, None is read as serialize.none. A dict's key is omitted if its value is None.
--   same object    A tensor or a table that occurs twice is stored once and read as one object. Different views of one
--                  storage become separate tensors.
--   expand         A tensor that repeats its elements (expand) is stored without the repetitions. It is read as an
--                  expanded tensor.
--   requires_grad  It is not saved.
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local encode = require "ps.core.encode"
local hooks = require "ps.core.hooks"
local safetensors = require "ps.io.safetensors"
local shard = require "ps.tensor.shard"
local torch_pt = require "ps.io.torch_pt"
local shard_note = require "ps.io.shard_note"
local torch_pt_write = require "ps.io.torch_pt_write"
local error = caller.error

local serialize = { none = torch_pt.none, keys = torch_pt.keys }

--- Marks a table to be saved as a list. This is usually needed only for an empty table.
---@param t table
---@return table t
function serialize.list(t) return torch_pt.mark("list", caller.typed(t, "table", "ps.serialize.list: its argument")) end
--- Marks a table to be saved as a dict. This is usually needed only for a table with the keys 1 .. n.
---@param t table
---@return table t
function serialize.dict(t) return torch_pt.mark("dict", caller.typed(t, "table", "ps.serialize.dict: its argument")) end

local FORMAT = { safetensors = "safetensors", pt = "pt", pth = "pt", bin = "pt", ckpt = "pt" }

local function by_name(path) return FORMAT[(path:match("%.(%w+)$") or ""):lower()] end

local function check_flat(path, value)
  local what
  if type(value) ~= "table" then what = "a " .. type(value) end
  for name, item in pairs(what and {} or value) do
    if type(name) ~= "string" then what = ("the key %s"):format(tostring(name))
    elseif not scope.is_tensor(item) then what = ("'%s', a %s"):format(name, type(item)) end
  end
  if what then
    error(("%s: a safetensors file holds only tensors by name, but this is %s; save it as .pt, or pass a flat " ..
      "table of tensors"):format(path, what))
  end
end

--- Writes a value to a file. If a file with this name exists, it is replaced only when the new file is complete on the
--- disk. Tensors are written one at a time.
---@param value any for a .safetensors file: a table<string, ps.Tensor>
---@param path string *.pt, *.pth, *.bin, *.ckpt or *.safetensors
function serialize.save(value, path)
  if type(path) ~= "string" then error("ps.save(value, path): the path must be a string, not a " .. type(path)) end
  local format = by_name(path)
  hooks.tell("saves", value, path)
  if format == "pt" then
    torch_pt_write.save(path, value)
  elseif format == "safetensors" then
    check_flat(path, value)
    local shards = {}
    for name, tensor in pairs(value) do shards[name] = shard.of(tensor) end
    local note = next(shards) and { psluajit_shards = encode({ shards = shards }, "the shards") } or nil
    safetensors.save(path, value, note)
  else
    error(("ps.save: the name '%s' has no known format; end it in .pt (PyTorch) or .safetensors"):format(path))
  end
end

--- Determines the format of a file from its first bytes. Returns "safetensors" or "pt", or nil if the file has another
--- format or does not exist. "pt" means an archive of PyTorch or a plain pickle. The reader of .pt files raises an
--- error for a plain pickle.
---
--- A safetensors file begins with the length of its header in 8 bytes. Bytes 5 to 8 are 0, because the length is below
--- 2^32. Byte 9 is the header's "{". These bytes are checked first, because the bytes of the length may be equal to the
--- first bytes of an archive or a pickle.
---@param path string
---@return "pt"|"safetensors"|nil
function serialize.format(path)
  local f = io.open(caller.typed(path, "string", "ps.serialize.format: the path"), "rb")
  local head = f and f:read(9) or ""
  if f then f:close() end
  if head:sub(5) == "\0\0\0\0{" then return "safetensors" end
  if head:sub(1, 2) == "PK" or head:byte(1) == 0x80 then return "pt" end
  if #head == 9 and head:sub(9) == "{" then return "safetensors" end
end

local OPTIONS = { lazy = "boolean", verify = "boolean", device = "string", mmap = "boolean" }

--- Reads a file. For a .pt file, returns its value. For a safetensors file, returns a table of tensors by name.
---
--- With lazy = true, returns the open file (a ps.TorchFile or a ps.SafeTensors) and reads no tensor.
--- Module:load_state_dict reads an open file one tensor at a time.
---
--- With mmap = true, tensors on the cpu use the bytes of the mapped safetensors file. The system loads a page of the
--- file when a tensor uses it, and may evict the page later. Several processes share the pages, and the pages do not
--- count towards any budget. Writes to such a tensor stay in memory and do not change the file. If another program
--- writes to the file, using the tensors raises an error. If the file is replaced by another file, the tensors are not
--- affected.
---@param path string
---@param options? {lazy?: boolean, device?: string, verify?: boolean, mmap?: boolean} device: device of the tensors
---  (default "cpu"). verify = false: checksums are not compared.
---@return any
function serialize.load(path, options)
  if type(path) ~= "string" then error("ps.load(path): the path must be a string, not a " .. type(path)) end
  options = caller.options(options, "ps.load", OPTIONS)
  local format = serialize.format(path) or by_name(path) or "pt"
  if options.mmap and format == "pt" then
    error(("ps.load: mmap = true needs a safetensors file, but %s is a .pt file; remove mmap"):format(path))
  end
  local file
  if format == "pt" then file = torch_pt.open(path, { verify = options.verify })
  else file = safetensors.open(path, { verify = options.verify, mmap = options.mmap }) end
  if options.lazy then return file end
  local ok, result = pcall(function()
    local value = {}
    if format == "pt" then value = file:value(options.device)
    else
      for _, name in ipairs(file:names()) do value[name] = file:tensor(name, options.device or "cpu") end
      for name, first in pairs(file.metadata) do            -- add the other names of a tensor (ps.safetensors.save)
        if value[name] == nil then value[name] = value[first] end
      end
    end
    shard_note.mark(value, file:shards())
    return value
  end)
  file:close()
  if not ok then error(result, 0) end
  return result
end

return serialize
