-- SPDX-License-Identifier: BSD-3-Clause
-- Writes a tokenizer's files to another folder. The source files are copied. Settings that a script has changed
-- (special tokens, padding_side, truncation_side and model_max_length) are written to tokenizer_config.json.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local companions = require "ps.pretrained.gguf_companions"
local folder = require "ps.pretrained.folder"
local gguf = require "ps.io.gguf"
local json = require "cjson"
local lfs = require "lfs"
local read_file = require "ps.core.read_file"
local error = caller.error
local C, check = native.C, native.check

local save = {}

-- Files in a tokenizer's folder that belong to the model and are not copied.
local OTHERS = { ["generation_config.json"] = true, ["preprocessor_config.json"] = true }

local function read(path)
  local text, why = read_file(path)
  if not text then error("cannot read a tokenizer's file: " .. why) end
  return text
end

local function write(path, text) check(C.ps_file_write_atomic(path, text, #text)) end

-- Reads a JSON object from a file, changes the fields in `changes`, and returns the JSON text. Empty tables are
-- omitted, because in Lua an empty list and an empty object are the same table.
local function patched(path, changes)
  local fields = lfs.attributes(path, "mode") == "file" and folder.read_json(path) or {}
  for key, value in pairs(fields) do
    if type(value) == "table" and next(value) == nil then fields[key] = nil end
  end
  for key, value in pairs(changes) do fields[key] = value end
  return json.encode(fields)
end

local function make_folder(path)
  if lfs.attributes(path, "mode") == "directory" then return end
  local made, why = lfs.mkdir(path)
  if not made then error(("tokenizer:save_pretrained: %s: %s"):format(path, why)) end
end

--- Writes files to a folder. The folder is created if it does not exist.
---@param to string
---@param files table<string, string> contents by file name
function save.write(to, files)
  make_folder(to)
  for name, text in pairs(files) do write(to .. "/" .. name, text) end
end

-- Returns whether a file belongs to a tokenizer.
local function is_own(name) return folder.is_companion(name) and not OTHERS[name] or name:match "%.tiktoken$" ~= nil end

-- Removes the files of another tokenizer: a reader might prefer them to the new files.
local function remove_others(path, texts)
  local others = {}
  for name in lfs.dir(path) do if is_own(name) and not texts[name] then others[#others + 1] = name end end
  for _, name in ipairs(others) do
    local done, why = os.remove(path .. "/" .. name)
    if not done then error("tokenizer:save_pretrained: the file of an older tokenizer cannot be removed: " .. why) end
  end
end

--- Copies a tokenizer's files to a folder. The folder is created if it does not exist. Files of another tokenizer that
--- the folder has are removed.
---@param source string the folder from which the tokenizer was read, or one of its files
---@param to string
---@param tokens table<string, any> special tokens that a script has set. A key is a name such as "pad_token". A value
---  is the token's text, or json.null.
---@param plain table<string, any> other settings that a script has set
function save.run(source, to, tokens, plain)
  caller.typed(to, "string", "tokenizer:save_pretrained: the folder")
  local from = lfs.attributes(source, "mode") == "directory" and source or source:match("^(.*)/[^/]*$") or "."
  local is_gguf = gguf.is_path(source)
  make_folder(to)
  local texts = {}                                         -- the contents of the files to write, by name
  for name in lfs.dir(from) do
    if is_own(name) and not is_gguf and lfs.attributes(from .. "/" .. name, "mode") == "file" then
      texts[name] = read(from .. "/" .. name)
    end
  end
  local name = source ~= from and not is_gguf and source:match("[^/]*$")
  -- The source is a file with a name that is not standard. It is copied under the standard name.
  if name and not folder.is_companion(name) and not name:match("%.tiktoken$") then
    texts[name:match("%.txt$") and "vocab.txt" or "tokenizer.json"] = read(source)
  end
  remove_others(to, texts)
  for file, text in pairs(texts) do write(to .. "/" .. file, text) end
  if is_gguf then companions.write_tokenizer(source, to) end
  if next(tokens) == nil and next(plain) == nil then return end
  local all, config, map = {}, to .. "/tokenizer_config.json", to .. "/special_tokens_map.json"
  for _, list in ipairs { tokens, plain } do for key, value in pairs(list) do all[key] = value end end
  write(config, patched(config, all))
  if next(tokens) ~= nil and lfs.attributes(map, "mode") == "file" then write(map, patched(map, tokens)) end
end

return save
