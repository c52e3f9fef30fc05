-- SPDX-License-Identifier: BSD-3-Clause
-- Finds ports of this machine. posix.sys.socket.getsockname returns an undefined result, because it passes an
-- uninitialized length to the C function. This file calls the C function with an initialized length.
local ffi = require "ffi"
local socket = require "posix.sys.socket"
local unistd = require "posix.unistd"

ffi.cdef "int getsockname(int fd, void *address, unsigned *nbytes);"

local port = {}

--- Returns the port to which a socket is bound.
---@param fd integer
---@return integer?
function port.of(fd)
  local address, nbytes = ffi.new("uint8_t[128]"), ffi.new("unsigned[1]", 128)
  if ffi.C.getsockname(fd, address, nbytes) ~= 0 then return nil end
  return address[2] * 256 + address[3]  -- the port is at the same offset for IPv4 and IPv6, high byte first
end

--- Returns a socket that is bound to a free port of 127.0.0.1. The caller closes the socket.
---@return integer? fd
---@return integer|string port The port, or the text of the error.
function port.bound()
  local fd, why = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0)
  if not fd then return nil, why end
  local ok
  ok, why = socket.bind(fd, { family = socket.AF_INET, addr = "127.0.0.1", port = 0 })
  local number = ok and port.of(fd)
  if not number then
    unistd.close(fd)
    return nil, why or "no address"
  end
  return fd, number
end

--- Returns a port of this machine that is free at this time.
---@return integer? port
---@return string? the error
function port.free()
  local fd, number = port.bound()
  if not fd then return nil, number end
  unistd.close(fd)
  return number
end

return port
