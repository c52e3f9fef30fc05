-- SPDX-License-Identifier: BSD-3-Clause
-- Random bits from the operating system, for secrets, tokens and run numbers. They do not depend on the seed.
local entropy = {}

--- Reads n random bytes from /dev/urandom and returns them as 2 n hexadecimal digits. Raises an error if the file
--- cannot be read.
---@param n integer
---@return string
function entropy.hex(n)
  local file = assert(io.open("/dev/urandom", "rb"))
  local bytes = file:read(n)
  file:close()
  return (bytes:gsub(".", function(c) return ("%02x"):format(c:byte()) end))
end

return entropy
