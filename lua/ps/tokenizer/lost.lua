-- SPDX-License-Identifier: BSD-3-Clause
-- Bytes for which a byte-level vocabulary has no token. Encoding omits them from a text, so the first text that has
-- one gets a note. Many vocabularies lack bytes that occur in no text, such as control characters.
local native = require "ps.core.ffi"
local letters = require "ps.tokenizer.letters"
local C = native.C

local lost = {}

-- Returns whether a byte occurs in UTF-8. Encoding replaces other bytes by U+FFFD before it looks for tokens.
local function in_utf8(byte) return byte < 0xc0 or byte > 0xc1 and byte < 0xf5 end

-- Returns the bytes of UTF-8 for which a tokenizer has neither a token nor an unknown token, as strings of one byte.
local function bytes_of(handle)
  local list = {}
  for byte = 0, C.ps_tok_missing(handle) > 0 and 255 or -1 do
    local letter = letters[byte]
    if in_utf8(byte) and C.ps_tok_find(handle, letter, #letter) < 0 then list[#list + 1] = string.char(byte) end
  end
  return list
end

-- Returns whether a JSON text has a control character.
local function escaped(text, number)
  if number >= 0x20 then return false end
  return text:find(("\\u%04x"):format(number), 1, true) or text:find(("\\u%04X"):format(number), 1, true)
end

--- Returns a function note(text, place, is_json), which prints a note for the first text with a byte that its encoding
--- omits. Returns nil if there are no such bytes. place: where the text is from (default: "a text"). is_json: the text
--- is JSON, which spells control characters as \u0001.
---@param handle ffi.cdata* ps_tok
---@param path string the vocabulary's file or folder, for the note
---@return (fun(text: string, place?: string, is_json?: boolean))?
function lost.notes(handle, path)
  local bytes = bytes_of(handle)
  if not bytes[1] then return nil end
  return function(text, place, is_json)
    for _, byte in ipairs(bytes) do
      local number = byte:byte()
      if text:find(byte, 1, true) or is_json and escaped(text, number) then
        bytes = {}
        io.stderr:write(("%s: the vocabulary has no token for the byte 0x%02X, which occurs in %s; the ids leave such "
          .. "bytes out, and this is said once\n"):format(path, number, place or "a text"))
        return
      end
    end
  end
end

return lost
