-- SPDX-License-Identifier: BSD-3-Clause
-- Servers of lua-http 0.4 that survive every request.
local ffi = require "ffi"

local http_server = {}

ffi.cdef "int getsockopt(int socket, int level, int name, void *value, unsigned *nbytes);"
local IPPROTO_TCP, TCP_INFO, ESTABLISHED = 6, 11, 1
local info, nbytes = ffi.new "uint8_t[256]", ffi.new "unsigned[1]"

--- Returns whether a stream's client has closed its side of the TCP connection, or cancelled the stream. The socket
--- cannot be read for this: lua-http shuts its reading side down after a request with "Connection: close".
---@param stream table
---@return boolean
function http_server.disconnected(stream)
  local socket = stream.connection.socket
  if not socket or stream.state == "closed" then return true end
  nbytes[0] = ffi.sizeof(info)
  if ffi.C.getsockopt(socket:pollfd(), IPPROTO_TCP, TCP_INFO, info, nbytes) ~= 0 then return false end
  return info[0] ~= ESTABLISHED                            -- the first byte is the state
end

--- Ends a stream and its connection without a reply.
---@param stream table
function http_server.drop(stream)
  local socket = stream.connection.socket
  if socket then socket:shutdown() end
  if stream.set_state then stream:set_state "closed" end   -- so that stream:shutdown() reads no body
end

-- Makes stream:shutdown(), which calls step until the body is read, end when a step reads nothing. lua-http would loop
-- forever if the client closed the connection within the body.
local function end_without_progress(stream)
  if stream.connection.version >= 2 then return end
  local step = stream.step
  function stream:step(timeout)
    local received, state = self.stats_recv, self.state
    local ok, why, number = step(self, timeout)
    if ok and self.stats_recv == received and self.state == state then return nil end
    return ok, why, number
  end
end

--- Returns a function for lua-http's option `onstream`, which calls fn(stream, headers) for each request. A request
--- whose Content-Length is not a number of up to 15 digits, or whose Transfer-Encoding is empty, ends its connection.
--- lua-http would loop forever, or raise an error in the loop of the server.
---@param fn fun(stream: table, headers: table)
---@return fun(server: table, stream: table)
function http_server.onstream(fn)
  return function(_, stream)
    local ok, given = pcall(stream.get_headers, stream)
    local length = ok and given and given:get "content-length"
    if not ok or not given or length and not (length:find "^%d+$" and #length <= 15) then
      return http_server.drop(stream)
    end
    local fine, why = pcall(fn, stream, given)
    end_without_progress(stream)
    if not fine then error(why, 0) end
  end
end

--- Runs a server until the process ends. An error outside of `onstream` ends its connection, not the server.
---@param server table a server of lua-http that listens
---@param who string the program's name, for notes on stderr
function http_server.loop(server, who)
  while true do
    local ok, why = server:loop()
    if ok then return end
    io.stderr:write(("%s: a connection failed: %s\n"):format(who, tostring(why)))
  end
end

return http_server
