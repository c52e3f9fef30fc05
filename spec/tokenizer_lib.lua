-- SPDX-License-Identifier: BSD-3-Clause
-- Small tokenizers for specs: folders in Hugging Face's form, and byte-pair encoding by its definition.
local json = require "cjson"
local lfs = require "lfs"
local write = require("spec.check_lib").write

local lib = {}

--- Returns the UTF-8 of a code point below U+0800.
function lib.utf8(c)
  if c < 128 then return string.char(c) end
  return string.char(0xc0 + math.floor(c / 64), 0x80 + c % 64)
end

--- Returns GPT-2's letter for each byte. Printable bytes are their own letters, and the others are mapped to U+0100 and
--- up.
---@return table<integer, string>
function lib.letters()
  local letters, n = {}, 0
  for byte = 0, 255 do
    local printable = byte >= 33 and byte <= 126 or byte >= 161 and byte <= 172 or byte >= 174
    letters[byte] = lib.utf8(printable and byte or 256 + n)
    if not printable then n = n + 1 end
  end
  return letters
end

--- Creates a folder with files: { name = text, or a table, which becomes JSON }. Returns its path.
---@param files table<string, string|table>
---@return string path
function lib.folder(files)
  local path = os.tmpname()
  os.remove(path)
  assert(lfs.mkdir(path))
  for name, content in pairs(files) do
    write(path .. "/" .. name, type(content) == "table" and json.encode(content) or content)
  end
  return path
end

function lib.remove(path) os.execute("rm -r '" .. path .. "'") end

--- Returns a vocabulary of the 256 letters, the results of merges, and "<|endoftext|>", with ids in this order.
---@param merges string[][] pairs of tokens, spelled as in files
---@return table<string, integer> vocab
function lib.vocab(merges)
  local vocab, n = {}, 256
  for byte, letter in pairs(lib.letters()) do vocab[letter] = byte end
  for _, pair in ipairs(merges) do
    local token = pair[1] .. pair[2]
    if not vocab[token] then vocab[token], n = n, n + 1 end
  end
  vocab["<|endoftext|>"] = n
  return vocab
end

--- Returns the text of merges.txt.
function lib.merges_text(merges)
  local lines = { "#version: 0.2" }
  for _, pair in ipairs(merges) do lines[#lines + 1] = pair[1] .. " " .. pair[2] end
  return table.concat(lines, "\n") .. "\n"
end

--- Creates a folder of GPT-2's kind, and returns its path.
---@param merges string[][]
---@param more? table<string, string|table> additional files
---@return string path
function lib.gpt2(merges, more)
  local files = { ["vocab.json"] = lib.vocab(merges), ["merges.txt"] = lib.merges_text(merges) }
  for name, content in pairs(more or {}) do files[name] = content end
  return lib.folder(files)
end

--- Encodes a word with byte-pair encoding by its definition: the leftmost pair of the lowest rank is merged until there
--- is none.
---@param word string
---@param merges string[][]
---@param vocab table<string, integer>
---@return integer[]
function lib.bpe(word, merges, vocab)
  local letters, symbols, rank = lib.letters(), {}, {}
  for i = 1, #word do symbols[i] = letters[word:byte(i)] end
  for i, pair in ipairs(merges) do rank[pair[1] .. " " .. pair[2]] = i end
  local ranks, n = {}, #symbols
  local function look(i) ranks[i] = i < n and rank[symbols[i] .. " " .. symbols[i + 1]] or math.huge end
  for i = 1, n do look(i) end
  while n > 1 do
    local best, at = math.huge, nil
    for i = 1, n - 1 do if ranks[i] < best then best, at = ranks[i], i end end
    if not at then break end
    symbols[at], n = symbols[at] .. table.remove(symbols, at + 1), n - 1
    table.remove(ranks, at + 1)
    look(at)
    if at > 1 then look(at - 1) end
  end
  for i, symbol in ipairs(symbols) do symbols[i] = vocab[symbol] end
  return symbols
end

return lib
