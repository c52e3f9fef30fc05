-- SPDX-License-Identifier: BSD-3-Clause
-- The letters by which byte-level BPE writes bytes in a vocabulary (GPT-2's bytes_to_unicode): letters[byte] is one
-- code point in UTF-8. Printable bytes are the code points of their own numbers. The others follow from U+0100 on, in
-- order.
local letters, others = {}, 0
for byte = 0, 255 do
  local code = byte
  if not (byte >= 0x21 and byte <= 0x7e or byte >= 0xa1 and byte ~= 0xad) then
    code, others = 0x100 + others, others + 1
  end
  letters[byte] = code < 0x80 and string.char(code) or string.char(0xc0 + math.floor(code / 0x40), 0x80 + code % 0x40)
end

return letters
