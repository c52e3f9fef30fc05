-- SPDX-License-Identifier: BSD-3-Clause
-- Creates servers of lua-http 0.4 and corrects faults of lua-http, so that no request can stop a server.
local caller = require "ps.core.caller"
local ffi = require "ffi"

local http_server = {}

ffi.cdef "int getsockopt(int socket, int level, int name, void *value, unsigned *nbytes);"
local IPPROTO_TCP, TCP_INFO, ESTABLISHED = 6, 11, 1
local MOST_DISCARDED, DISCARD_S = 2 ^ 24, 5                -- limits for discarding a body: bytes, seconds
local info, nbytes = ffi.new "uint8_t[256]", ffi.new "unsigned[1]"

--- Ends the process if an error that was caught is Ctrl-C.
---@param problem any
---@param who string the program's name
function http_server.end_if_interrupted(problem, who)
  if not caller.is_interrupt(problem) then return end
  io.stderr:write(who, ": interrupted!\n")
  os.exit(130)
end

--- Returns a function for lua-http's option `onerror`. A client that disconnects is not an error. Ctrl-C may be raised
--- as an error in the code that answers a request. In this case the process ends.
---@param who string the program's name
---@return fun(server: table, context: table, op: string, why: any)
function http_server.onerror(who)
  return function(_, _, _, why) http_server.end_if_interrupted(why, who) end
end

--- Returns whether a stream's client has closed its side of the TCP connection or cancelled the stream. The function
--- asks for the state of the TCP connection. It cannot read from the socket instead, because lua-http shuts down the
--- socket's reading side after a request with "Connection: close".
---@param stream table
---@return boolean
function http_server.disconnected(stream)
  local socket = stream.connection.socket
  if not socket or stream.state == "closed" then return true end
  nbytes[0] = ffi.sizeof(info)
  if ffi.C.getsockopt(socket:pollfd(), IPPROTO_TCP, TCP_INFO, info, nbytes) ~= 0 then return false end
  return info[0] ~= ESTABLISHED                            -- the first byte is the state
end

--- Ends a stream without a reply, or in the middle of its reply. An HTTP/2 stream is reset. For HTTP/1, the connection
--- is closed.
---@param stream table
function http_server.drop(stream)
  local connection, state = stream.connection, stream.state
  if connection.version >= 2 then
    if state == "closed" or state == "idle" then return end
    if stream:rst_stream(require("http.h2_error").errors.CANCEL, 0) then return end
  end                                                      -- if the reset fails, the client is not reading
  if connection.socket then connection.socket:shutdown() end
  if stream.state == "closed" or connection.pipeline and connection.pipeline:peek() ~= stream then return end
  stream:set_state "closed"                                -- so that stream:shutdown() reads no body
end

-- Makes stream:shutdown() stop if the client closed the connection in the middle of the body. shutdown() calls step()
-- until the body is read. Without this change shutdown() would loop forever, because step() would read nothing.
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

-- Reads and discards the rest of a request's body after the reply. If the server closed a connection on which data
-- still arrived, the client could lose the reply. A reset of an HTTP/2 stream does not help: some clients, such as curl
-- 7.88, discard the reply of a stream that is reset, even if the reset has no error code.
local function discard_rest(stream)
  local now = require("cqueues").monotime
  local left, deadline = MOST_DISCARDED, now() + DISCARD_S
  while stream.state == "half closed (local)" and left > 0 and now() < deadline do
    local chunk = stream:get_next_chunk(deadline - now())
    if not chunk then return end
    left = left - #chunk
  end
end

-- Makes HTTP/1 connections wait for both bytes of the line end after the headers. lua-http fails if the two bytes
-- arrive separately.
local function wait_for_line_end(connections)
  local errno, read_header = require "cqueues.errno", connections.read_header
  function connections:read_header(timeout)
    local ok, why, number = self.socket:fill(2, 0)         -- a header and the end of the headers have at least 2 bytes
    if not ok then return nil, why or errno.strerror(errno.EPIPE), number or errno.EPIPE end
    return read_header(self, timeout)
  end
end

-- Makes a step of an HTTP/2 connection fail after the client has closed the connection. Otherwise lua-http's loops that
-- wait for a frame would run without a pause until their timeouts.
local function fail_at_end(connections)
  local errno, step = require "cqueues.errno", connections.step
  function connections:step(timeout)
    local ok, why, number = step(self, timeout)
    if ok and self.socket:eof "r" and self.socket:pending() == 0 then
      return nil, errno.strerror(errno.EPIPE), errno.EPIPE
    end
    return ok, why, number
  end
end

-- Makes HTTP/2 connections wait for frames after each write. lua-http waits for the events that cqueues remembers from
-- the last call. After a successful write there are no such events, so nothing would wake the connection.
local function wait_after_writes(connections)
  local events = connections.events
  function connections:events()
    local wanted = events(self) or ""
    return wanted:find("r", 1, true) and wanted or wanted .. "r"
  end
end

-- Makes a server's connections wait for further requests while a request is answered. lua-http stops waiting after 10
-- seconds. It would then also stop reading window updates and resets of the HTTP/2 streams that are being answered.
local function wait_during_answers(connections, active)
  local errno, next_stream = require "cqueues.errno", connections.get_next_incoming_stream
  function connections:get_next_incoming_stream(timeout)
    while true do
      local stream, why, number = next_stream(self, timeout)
      if stream or number ~= errno.ETIMEDOUT or not active(self) then return stream, why, number end
    end
  end
end

-- Makes lua-http ignore data for an HTTP/2 stream that has been reset, as RFC 9113, section 5.1, demands. The client
-- sent such data before it received the reset. Without this change lua-http would close the connection. The data still
-- counts for the connection's window.
local function ignore_data_after_reset(handlers, DATA)
  local on_data = handlers[DATA]
  handlers[DATA] = function(stream, flags, payload, deadline)
    if stream.state ~= "closed" then return on_data(stream, flags, payload, deadline) end
    if #payload > 0 then stream.connection:write_window_update(#payload, 0) end
    return true
  end
end

-- Makes HTTP/2 connections encode headers without a table of earlier headers (HPACK's dynamic table). This avoids two
-- faults of lua-http. It adds headers to its table even if they cannot be sent because the client has cancelled the
-- stream. It also encodes index 127 wrongly. A header of each reply reaches this index after 63 replies of different
-- lengths. In both cases the client would read the headers of later replies wrongly or close the connection.
local function encode_without_table()
  local contexts = getmetatable(require("http.hpack").new(0)).__index
  function contexts:encode_headers(headers)
    for name, value in headers:each() do self:add_header_never_indexed(name, value) end
    return true
  end
end

local mended = false

--- Replaces the faulty methods of lua-http for all connections. `onstream` calls this function.
function http_server.mend()
  if mended then return end
  mended = true
  local h1, h2 = require("http.h1_connection").methods, require("http.h2_connection").methods
  local h2_stream = require "http.h2_stream"
  wait_for_line_end(h1)
  fail_at_end(h2)
  wait_after_writes(h2)
  wait_during_answers(h1, function(connection) return connection.pipeline:length() > 0 end)
  wait_during_answers(h2, function(connection) return connection.n_active_streams > 0 end)
  ignore_data_after_reset(h2_stream.frame_handlers, h2_stream.frame_types.DATA)
  encode_without_table()
end

--- Returns a function for lua-http's option `onstream`. The returned function calls fn(stream, headers) for each
--- request. A request ends without a reply if its Content-Length is not a number of up to 15 digits, or if its
--- Transfer-Encoding is empty. For such a request lua-http would loop forever or raise an error in the server's loop.
---@param fn fun(stream: table, headers: table)
---@return fun(server: table, stream: table)
function http_server.onstream(fn)
  http_server.mend()
  return function(_, stream)
    local ok, given = pcall(stream.get_headers, stream)
    if not ok and caller.is_interrupt(given) then error(given, 0) end
    local length = ok and given and given:get "content-length"
    if not ok or not given or length and not (length:find "^%d+$" and #length <= 15) then
      return http_server.drop(stream)
    end
    local fine, why = pcall(fn, stream, given)
    if fine then discard_rest(stream) end
    end_without_progress(stream)
    if not fine then error(why, 0) end
  end
end

--- Runs a server until the process ends. If a connection raises an error outside of `onstream`, only this connection
--- ends, and the server continues.
---@param server table a server of lua-http that listens
---@param who string the program's name, for notes on stderr
function http_server.loop(server, who)
  while true do
    local ok, why = server:loop()
    if ok then return end
    http_server.end_if_interrupted(why, who)
    io.stderr:write(("%s: a connection failed: %s\n"):format(who, tostring(why)))
  end
end

return http_server
