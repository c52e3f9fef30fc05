-- SPDX-License-Identifier: BSD-3-Clause
-- lua/ps/core/http_server.lua: connections that lua-http alone would end, or never answer.
local check = require "spec.check_lib"
local cqueues = require "cqueues"
local http_server = require "ps.core.http_server"
local paths = require "ps.paths"
local server = require "http.server"
local sockets = require "cqueues.socket"

local TIME_LIMIT_S = 60

-- Answers every request at once, without reading its body.
local function reply(stream)
  local headers = require("http.headers").new()
  headers:append(":status", "200")
  headers:append("content-length", "2")
  stream:write_headers(headers, false)
  stream:write_chunk("ok", true)
end

-- Calls fn(port) as a coroutine next to a server whose requests fn_of_server answers. `wait`: seconds that lua-http
-- waits for the next request.
local function with_server(fn_of_server, fn, wait)
  local queue = cqueues.new()
  local s = assert(server.listen { host = "127.0.0.1", port = 0, tls = false, cq = queue,
    onstream = http_server.onstream(fn_of_server), onerror = function() end, intra_stream_timeout = wait })
  assert(s:listen())
  local done, ok, why = false, nil, nil
  queue:wrap(function()
    ok, why = pcall(fn, select(3, s:localname()))
    done = true
  end)
  local deadline = cqueues.monotime() + TIME_LIMIT_S
  while not done and cqueues.monotime() < deadline do assert(queue:step(1)) end
  s:close()
  assert(done, "no answer")
  if not ok then error(why, 0) end
end

local function connected(port)
  local socket = sockets.connect("127.0.0.1", port)
  socket:setmode("b", "bn")
  socket:settimeout(TIME_LIMIT_S)
  socket:onerror(function(_, _, why) return why end)
  return socket
end

local function http2(port)
  return assert(require("http.client").connect({ host = "127.0.0.1", port = port, tls = false, version = 2 }))
end

local function post_headers(length)
  local headers = require("http.headers").new()
  headers:append(":method", "POST")
  headers:append(":scheme", "http")
  headers:append(":authority", "x")
  headers:append(":path", "/")
  headers:append("content-length", tostring(length))
  return headers
end

describe("ps.core.http_server", function()
  it("reads headers that arrive byte by byte", function()
    with_server(reply, function(port)
      local socket = connected(port)
      for _ = 1, 2 do                                      -- the second request uses the same connection
        for byte in ("GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n"):gmatch "." do
          assert(socket:write(byte))
          cqueues.sleep(0.005)
        end
        assert.equal("HTTP/1.1 200 OK\r", socket:read "*l")
        repeat local line = socket:read "*l" until line == "\r"
        assert.equal("ok", socket:read(2))
      end
      socket:close()
    end)
  end)

  it("ends a connection that is closed within the headers", function()
    local asked = 0
    with_server(function(stream)
      asked = asked + 1
      reply(stream)
    end, function(port)
      for _, part in ipairs { "GET / HTTP/1.1\r\nHost: x\r\n", "GET / HTTP/1.1\r\nHost: x\r\n\r", "GET /" } do
        local socket = connected(port)
        assert(socket:write(part))
        socket:shutdown "w"
        assert.equal(nil, (socket:read "*l"))
        socket:close()
      end
    end)
    assert.equal(0, asked)
  end)

  -- Sends the headers of a request over HTTP/2, and checks the reply, which arrives before the body.
  local function reply_before_body(connection, length)
    local stream = connection:new_stream()
    assert(stream:write_headers(post_headers(length), false, TIME_LIMIT_S))
    assert.equal("200", assert(stream:get_headers(TIME_LIMIT_S)):get ":status")
    assert.equal("ok", assert(stream:get_body_as_string(TIME_LIMIT_S)))
    return stream
  end

  it("lets an HTTP/2 client finish the body after the reply", function()
    with_server(reply, function(port)
      local connection = http2(port)
      for _ = 1, 2 do
        local stream = reply_before_body(connection, 2 ^ 20)
        assert(stream:write_chunk(("x"):rep(2 ^ 20), true, TIME_LIMIT_S))
        assert.equal(nil, stream.rst_stream_error)
      end
      connection:close()
    end)
  end)

  it("reads further requests of a connection while one is answered for a long time", function()
    local released = require("cqueues.condition").new()
    with_server(function(stream, given)
      if given:get "content-length" == "0" then released:signal()
      else released:wait() end
      reply(stream)
    end, function(port)
      local connection, streams = http2(port), {}
      for i = 1, 0, -1 do
        streams[#streams + 1] = connection:new_stream()
        assert(streams[#streams]:write_headers(post_headers(i), i == 0, TIME_LIMIT_S))
        cqueues.sleep(0.3)                                 -- longer than lua-http waits
      end
      for _, stream in ipairs(streams) do assert.equal("ok", assert(stream:get_body_as_string(TIME_LIMIT_S))) end
    end, 0.05)
  end)

  it("waits for frames also after a write", function()
    local wanted
    with_server(function(stream)
      reply(stream)
      wanted = stream.connection:events()
    end, function(port)
      local stream = http2(port):new_stream()
      assert(stream:write_headers(post_headers(0), true, TIME_LIMIT_S))
      assert.equal("ok", assert(stream:get_body_as_string(TIME_LIMIT_S)))
    end)
    assert.matches("r", wanted)
  end)

  it("ends only the stream if an HTTP/2 client sends data after it was reset", function()
    with_server(reply, function(port)
      local connection, streams = http2(port), {}
      local function send(stream)
        assert(connection:write_http2_frame(0, 0, stream.id, ("x"):rep(16384), TIME_LIMIT_S))
        for _ = 1, 4 do connection:step(0) end             -- receives updates of the window, and the reset
      end
      for i = 1, 2 do
        local stream = reply_before_body(connection, 2 ^ 26)
        streams[i] = stream                                -- lua-http forgets streams that are collected
        repeat send(stream) until stream.state == "closed"
        assert.equal(0, stream.rst_stream_error.code)
        if i == 2 then collectgarbage() end                -- the server has forgotten the stream, too
        local before = connection.peer_flow_credits
        for _ = 1, 3 do send(stream) end                   -- as if the reset had not been received yet
        local other = connection:new_stream()
        assert(other:write_headers(post_headers(0), true, TIME_LIMIT_S))
        assert.equal("ok", assert(other:get_body_as_string(TIME_LIMIT_S)))
        assert.truthy(connection.peer_flow_credits >= before + 3 * 16384)  -- the server has counted the data
      end
      assert.equal(2, #streams)
      assert.equal(nil, connection.recv_goaway_lowest)
      connection:close()
    end)
  end)

  -- Answers a request with two headers that contain its number.
  local function numbered(stream, number)
    local headers = require("http.headers").new()
    headers:append(":status", "200")
    headers:append("x-same", "same")
    headers:append("etag", "number " .. number)
    return stream:write_headers(headers, true, TIME_LIMIT_S)
  end
  local function check_numbered(connection, number)
    local stream = connection:new_stream()
    assert(stream:write_headers(post_headers(0), true, TIME_LIMIT_S))
    local got = assert(stream:get_headers(TIME_LIMIT_S))
    assert.equal("same", got:get "x-same")
    assert.equal("number " .. number, got:get "etag")
    assert.equal(3, got:len())
  end

  it("sends correct headers after an HTTP/2 client has cancelled a stream", function()
    local asked = 0
    with_server(function(stream)
      asked = asked + 1
      if asked > 1 then return numbered(stream, asked) end
      assert.equal(nil, (stream:get_body_as_string(TIME_LIMIT_S)))
      assert.equal(false, (pcall(numbered, stream, asked)))
    end, function(port)
      local connection = http2(port)
      local cancelled = connection:new_stream()
      assert(cancelled:write_headers(post_headers(5), false, TIME_LIMIT_S))
      assert(cancelled:rst_stream("cancelled", 8, TIME_LIMIT_S))
      for i = 2, 4 do check_numbered(connection, i) end
      connection:close()
    end)
    assert.equal(4, asked)
  end)

  it("sends correct headers in many replies of an HTTP/2 connection", function()
    local asked = 0
    with_server(function(stream)
      asked = asked + 1
      numbered(stream, asked)
    end, function(port)
      local connection = http2(port)
      for i = 1, 90 do check_numbered(connection, i) end
      connection:close()
    end)
  end)

  it("lets an HTTP/1 client finish the body after the reply", function()
    with_server(reply, function(port)
      local socket, n = connected(port), 2 ^ 23
      assert(socket:write(("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"):format(n)))
      assert.equal("HTTP/1.1 200 OK\r", socket:read "*l")
      for _ = 1, 8 do assert(socket:write(("x"):rep(n / 8))) end
      assert(socket:write "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
      repeat local line = assert(socket:read "*l") until line == "okHTTP/1.1 200 OK\r"
      socket:close()
    end)
  end)

  it("stops waiting for a body when its HTTP/2 client has left", function()
    local why
    local ended = require("cqueues.condition").new()
    with_server(function(stream)
      local _
      _, why = stream:get_body_as_string(TIME_LIMIT_S)
      ended:signal()
    end, function(port)
      local connection = http2(port)
      local stream = connection:new_stream()
      assert(stream:write_headers(post_headers(5), false, TIME_LIMIT_S))
      assert(connection:flush(TIME_LIMIT_S))
      cqueues.sleep(0.05)
      connection.socket:shutdown()
      assert.truthy(ended:wait(TIME_LIMIT_S))
    end)
    assert.matches("[Pp]ipe", tostring(why))
  end)

  -- The error is Ctrl-C's. A signal would arrive at any place.
  it("ends the process at Ctrl-C in a request, in the headers, in an event of a stream, and in lua-http", function()
    local script = os.tmpname()
    check.write(script, [[
      local cqueues = require "cqueues"
      local http_server = require "ps.core.http_server"
      local where = arg[1]
      local function interrupt() error("interrupted!", 0) end
      if where == "headers" then require("http.h1_stream").methods.get_headers = interrupt end
      if where == "step" then require("http.h1_connection").methods.get_next_incoming_stream = interrupt end
      local s = require("http.server").listen { host = "127.0.0.1", port = 0, tls = false,
        onerror = http_server.onerror "it", onstream = http_server.onstream(function(stream)
          if where == "request" then interrupt() end
          require("ps.serve.client").new(stream, interrupt, 60):finish "text"
        end) }
      assert(s:listen())
      s.cq:wrap(function()
        local socket = require("cqueues.socket").connect("127.0.0.1", (select(3, s:localname())))
        socket:setmode("b", "bn")
        socket:write "GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        cqueues.sleep(60)
      end)
      http_server.loop(s, "it")
    ]])
    for _, where in ipairs { "request", "headers", "event", "step" } do
      local out, code = check.shell(("timeout 50 '%s' '%s' %s"):format(paths.exe, script, where))
      assert.equal(130, code, where .. ": " .. out)
      assert.matches("^%l+: interrupted!\n$", out)
    end
    os.remove(script)
  end)
end)
