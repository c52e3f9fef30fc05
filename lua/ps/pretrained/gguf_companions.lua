-- SPDX-License-Identifier: BSD-3-Clause
-- Converts the parts of a GGUF file that are not weights to files in Hugging Face's formats: tokenizer.json,
-- tokenizer_config.json, chat_template.jinja and generation_config.json.
local native = require "ps.core.ffi"
local encode = require "ps.core.encode"
local io_gguf = require "ps.io.gguf"
local json = require "cjson"
local gguf_tokenizer = require "ps.pretrained.gguf_tokenizer"
local lfs = require "lfs"

local companions = {}

local function write(path, text)
  if not lfs.attributes(path, "mode") then
    native.check(native.C.ps_file_write_atomic(path, text, #text))
  end
end

-- Returns the merges for a vocabulary with scores. Each pair of tokens whose concatenation is a token becomes a merge.
-- The merges are sorted by the score of the concatenation, highest first.
local function merges_of_scores(t)
  local ids, order, merges = {}, {}, {}
  for i, token in ipairs(t.tokens) do
    ids[token] = i
    if t.types[i] ~= gguf_tokenizer.TYPES.byte then order[#order + 1] = i end
  end
  table.sort(order, function(a, b)
    if t.scores[a] ~= t.scores[b] then return t.scores[a] > t.scores[b] end
    return a < b
  end)
  for _, i in ipairs(order) do
    local token, list = t.tokens[i], {}
    for at = 1, #token - 1 do
      local left, right = token:sub(1, at), token:sub(at + 1)
      if ids[left] and ids[right] and (right:byte() < 0x80 or right:byte() >= 0xc0) then
        list[#list + 1] = { left, right, ids[left], ids[right] }
      end
    end
    table.sort(list, function(a, b)
      if a[3] ~= b[3] then return a[3] < b[3] end
      return a[4] < b[4]
    end)
    for _, one in ipairs(list) do merges[#merges + 1] = { one[1], one[2] } end
  end
  return merges
end

-- Returns the text of a tokenizer.json. The vocabulary is sorted by id.
local function tokenizer_json(t)
  local model, words, merges = {}, {}, nil
  for key, value in pairs(t.description.model) do model[key] = value end
  for i, token in ipairs(t.tokens) do words[i] = json.encode(token) .. ":" .. i - 1 end
  if t.merges then
    merges = {}
    for i, merge in ipairs(t.merges) do
      local at = merge:find(" ", 2, true)
      merges[i] = { merge:sub(1, at - 1), merge:sub(at + 1) }
    end
  elseif t.scores then merges = merges_of_scores(t)
  end
  local all = { version = "1.0" }
  for key, value in pairs(t.description) do all[key] = value end
  for _, key in ipairs { "normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding" } do
    if all[key] == nil then all[key] = json.null end
  end
  local mark = "MODEL"                             -- replaced by the model below; occurs nowhere else
  local rest = encode(all, "tokenizer.json")
  while rest:find(mark, 1, true) do mark = mark .. "_" end
  all.model = mark
  local head = encode(model, "tokenizer.json"):sub(1, -2)
  local text = head .. (",\"vocab\":{%s}"):format(table.concat(words, ","))
  if merges then text = text .. (",\"merges\":%s"):format(json.encode(merges)) end
  if #all.added_tokens == 0 then all.added_tokens = nil end
  local whole = encode(all, "tokenizer.json")
  local at, to = whole:find(('"%s"'):format(mark), 1, true)
  return whole:sub(1, at - 1) .. text .. "}" .. whole:sub(to + 1)
end

local CLASSES = { gpt2 = "PreTrainedTokenizerFast", llama = "PreTrainedTokenizerFast", bert = "BertTokenizer" }

--- Writes the tokenizer files for a GGUF file to a folder. Files that the folder already has are kept.
---@param from string the GGUF file
---@param to string
function companions.write_tokenizer(from, to)
  io_gguf.with(from, function(file)
    if not gguf_tokenizer.kind(file) then return end
    local t = gguf_tokenizer.of(file)
    write(to .. "/tokenizer.json", tokenizer_json(t))
    local config = { tokenizer_class = CLASSES[t.kind], clean_up_tokenization_spaces = false }
    for key, value in pairs(t.config) do config[key] = value end
    if type(t.template) == "table" then config.chat_template = t.template end
    write(to .. "/tokenizer_config.json", encode(config, "tokenizer_config.json"))
    if type(t.template) == "string" then write(to .. "/chat_template.jinja", t.template) end
  end)
end

--- Writes a GGUF file's tokenizer and generation settings to a folder. Files that the folder already has are kept.
---@param from string the GGUF file
---@param to string
---@param fields table the fields of a config.json for the file's model
function companions.write(from, to, fields)
  companions.write_tokenizer(from, to)
  local generation = { bos_token_id = fields.bos_token_id, eos_token_id = fields.eos_token_id,
    pad_token_id = fields.pad_token_id }
  if next(generation) then
    write(to .. "/generation_config.json", encode(generation, "generation_config.json"))
  end
end

return companions
