-- SPDX-License-Identifier: BSD-3-Clause
-- The letters that represent bytes in the vocabularies of byte-level BPE (bytes_to_unicode in GPT-2). letters[byte] is
-- a text of one code point in UTF-8. The code point of a printable byte is the byte's value. The other bytes, in
-- ascending order, have the code points U+0100, U+0101, and so on.
local letters, others = {}, 0
for byte = 0, 255 do
  local code = byte
  if not (byte >= 0x21 and byte <= 0x7e or byte >= 0xa1 and byte ~= 0xad) then
    code, others = 0x100 + others, others + 1
  end
  letters[byte] = code < 0x80 and string.char(code) or string.char(0xc0 + math.floor(code / 0x40), 0x80 + code % 0x40)
end

return letters
