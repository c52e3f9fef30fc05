-- SPDX-License-Identifier: BSD-3-Clause
-- Bytes for which a byte-level vocabulary has no token. Encoding omits them from a text, so the first text that has
-- one gets a note. Many vocabularies lack bytes that occur in no text, such as control characters.
local native = require "ps.core.ffi"
local C = native.C

local lost = {}

-- Returns a byte as byte-level vocabularies spell it (GPT-2's bytes_to_unicode), in UTF-8. Printable bytes are the
-- code points of their own numbers. The other bytes, of which `others` are smaller, follow from U+0100 on.
local function letter(byte, others)
  local printable = byte >= 0x21 and byte <= 0x7e or byte >= 0xa1 and byte ~= 0xad
  local code = printable and byte or 0x100 + others
  if code < 0x80 then return string.char(code), printable end
  return string.char(0xc0 + math.floor(code / 0x40), 0x80 + code % 0x40), printable
end

-- Returns whether a byte occurs in UTF-8. Encoding replaces other bytes by U+FFFD before it looks for tokens.
local function in_utf8(byte) return byte < 0xc0 or byte > 0xc1 and byte < 0xf5 end

-- Returns the bytes of UTF-8 for which a tokenizer has neither a token nor an unknown token, as strings of one byte.
local function bytes_of(handle)
  local list, others = {}, 0
  for byte = 0, C.ps_tok_missing(handle) > 0 and 255 or -1 do
    local spelt, printable = letter(byte, others)
    if not printable then others = others + 1 end
    if in_utf8(byte) and C.ps_tok_find(handle, spelt, #spelt) < 0 then list[#list + 1] = string.char(byte) end
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
