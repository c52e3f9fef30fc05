-- SPDX-License-Identifier: BSD-3-Clause
-- Numbers nodes that have no number, like torchrun's c10d without --node-rank. Node 0 is the launcher that can bind the
-- run's address. The other launchers connect to it and are numbered in the order of arrival. After all launchers have
-- their numbers, node 0 frees the port, because rank 0 listens on this port.
--
-- Each launcher sends "psluajit-node 1 NNODES NPROC RUN\n". It receives "node K\n" or "no REASON\n".
local bit = require "bit"
local errno = require "posix.errno"
local fcntl = require "posix.fcntl"
local poll = require "posix.poll"
local signal = require "posix.signal"
local socket = require "posix.sys.socket"
local time = require "posix.time"
local unistd = require "posix.unistd"

local nodes = {}

local WORD, LONGEST = "psluajit-node 1 ", 512        -- largest number of bytes in a line
local CONNECT_S, SILENT_S, AGAIN_S = 5, 10, 0.2
local MOST = 128                                     -- largest number of open connections that have sent no line yet

local function now()
  local t = time.clock_gettime(time.CLOCK_MONOTONIC)
  return t.tv_sec + t.tv_nsec * 1e-9
end

local function sleep(seconds) time.nanosleep { tv_sec = math.floor(seconds), tv_nsec = seconds % 1 * 1e9 } end

local function set_blocking(fd, blocks)
  local flags = fcntl.fcntl(fd, fcntl.F_GETFL)
  local other = bit.band(flags, bit.bnot(fcntl.O_NONBLOCK))
  fcntl.fcntl(fd, fcntl.F_SETFL, blocks and other or bit.bor(other, fcntl.O_NONBLOCK))
end

-- Resolves a host. Names of the loopback interface are not looked up (src/rendezvous/net.c).
local function addresses(host, port)
  local name = "." .. host:lower():gsub("%.$", "")
  local looked_up = name ~= ".localhost" and not name:match "^%..+%.localhost$" and host or nil
  local list, why = socket.getaddrinfo(looked_up, tostring(port), { family = socket.AF_UNSPEC,
    socktype = socket.SOCK_STREAM })
  if not list then error(("--rdzv-endpoint: %s has no address: %s"):format(host, why), 0) end
  return list
end

-- Returns a listening socket on one of the addresses in `list`. Returns nil if no address belongs to this machine, or
-- if another launcher uses the address.
local function listen(list)
  local problem
  for _, at in ipairs(list) do
    local fd = socket.socket(at.family, socket.SOCK_STREAM, 0)
    if fd then
      socket.setsockopt(fd, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      local ok, why, code = socket.bind(fd, at)
      if ok then ok, why, code = socket.listen(fd, MOST) end
      if ok then return fd end
      unistd.close(fd)
      if code ~= errno.EADDRINUSE and code ~= errno.EADDRNOTAVAIL then problem = why end
    end
  end
  if problem then error(("--rdzv-endpoint: cannot listen: %s"):format(problem), 0) end
end

-- Returns the line that a connection has sent. Returns nil if the line is not complete. Returns false if the connection
-- ended or the line is too long.
local function line_of(peer)
  local data = socket.recv(peer.fd, LONGEST)
  if not data or data == "" then return false end
  peer.text = peer.text .. data
  local line = peer.text:match "^([^\n]*)\n"
  if line then return line end
  if #peer.text > LONGEST then return false end
end

local function say(fd, text) return socket.send(fd, text) == #text end

-- -- node 0 -----------------------------------------------------------------------------------------------------------
-- Returns the reason why a launcher's line does not match this launcher's line, or nil if the lines match.
local function mismatch(line, o)
  local nnodes, nproc, run = line:match("^" .. WORD:gsub("%-", "%%-") .. "(%d+) (%d+) (.*)$")
  if not nnodes then return "this is not a launcher of psluajit" end
  local function differs(what, theirs, own)
    return ("%s is '%s', but '%s' on node 0"):format(what, theirs, own)
  end
  if tonumber(nnodes) ~= o.nnodes then return differs("--nnodes", nnodes, o.nnodes) end
  if tonumber(nproc) ~= o.nproc then return differs("--nproc-per-node", nproc, o.nproc) end
  if run ~= o.run_id then return differs("--rdzv-id", run, o.run_id) end
end

-- Runs one round of node 0: accepts a connection, reads lines, and drops closed connections. `peers` are the
-- connections in the order of arrival.
local function hear(server, peers, o, seconds)
  local fds = { [server] = { events = { IN = true } } }
  for _, peer in ipairs(peers) do fds[peer.fd] = { events = { IN = true } } end
  poll.poll(fds, math.ceil(seconds * 1000))
  local left = {}
  for _, peer in ipairs(peers) do
    local got, stays = fds[peer.fd].revents or {}, true
    if got.IN or got.HUP or got.ERR then
      local line = not peer.known and line_of(peer)              -- a peer that has a number sends nothing more
      local why = line and mismatch(line, o)
      if why then say(peer.fd, "no " .. why .. "\n") end
      stays, peer.known = line ~= false and not why, line ~= nil
    end
    if not peer.known and now() - peer.came > SILENT_S then stays = false end
    if stays then left[#left + 1] = peer else unistd.close(peer.fd) end
  end
  if (fds[server].revents or {}).IN then
    local fd = socket.accept(server)
    if fd and #left < MOST + o.nnodes then left[#left + 1] = { fd = fd, text = "", came = now() }
    elseif fd then unistd.close(fd) end
  end
  return left
end

local function known(peers)
  local list = {}
  for _, peer in ipairs(peers) do if peer.known then list[#list + 1] = peer end end
  return list
end

local function serve(server, o, ends)
  local peers = {}
  while #known(peers) < o.nnodes - 1 do
    if now() > ends then
      local n = #known(peers) + 1
      for _, peer in ipairs(peers) do unistd.close(peer.fd) end
      unistd.close(server)
      error(("--nnodes is '%d', but only %d of the nodes connected in %g s"):format(o.nnodes, n, o.join_timeout), 0)
    end
    peers = hear(server, peers, o, 1)
  end
  unistd.close(server)
  for number, peer in ipairs(known(peers)) do
    if number < o.nnodes then say(peer.fd, ("node %d\n"):format(number)) end
  end
  for _, peer in ipairs(known(peers)) do                 -- if the peers close first, the port is free immediately
    poll.rpoll(peer.fd, 2000)
  end
  for _, peer in ipairs(peers) do unistd.close(peer.fd) end
  return 0
end

-- -- the others -------------------------------------------------------------------------------------------------------
-- Connects to one of the addresses in `list`. Returns nil if no process listens there.
local function connect(list)
  for _, at in ipairs(list) do
    local fd = socket.socket(at.family, socket.SOCK_STREAM, 0)
    if fd then
      set_blocking(fd, false)
      local ok, _, code = socket.connect(fd, at)
      if not ok and code == errno.EINPROGRESS then
        local fds = { [fd] = { events = { OUT = true } } }
        poll.poll(fds, CONNECT_S * 1000)
        ok, _, code = socket.connect(fd, at)                   -- a second call returns the result of the first call
        ok = ok or code == errno.EISCONN
      end
      if ok then
        set_blocking(fd, true)
        return fd
      end
      unistd.close(fd)
    end
  end
end

-- Returns the number that node 0 assigns to this node. If node 0 assigns no number, returns nil and the reason.
local function ask(fd, o, ends)
  local peer = { fd = fd, text = "" }
  if not say(fd, ("%s%d %d %s\n"):format(WORD, o.nnodes, o.nproc, o.run_id)) then return nil, "it closed the "
    .. "connection" end
  while now() < ends do
    local ready = poll.rpoll(fd, 1000)
    if ready == 1 then
      local line = line_of(peer)
      if line == false then return nil, "it closed the connection" end
      if line then
        local number, why = line:match "^node (%d+)$", line:match "^no (.*)$"
        if number then return tonumber(number) end
        if why then error(("node 0 at %s:%d refuses this node: %s"):format(o.master_addr, o.master_port, why), 0) end
        return nil, "another program answers"
      end
    end
  end
  return nil, "not all nodes connected"
end

local function join(list, o, ends)
  local why = "nobody listens"
  while now() < ends do
    local fd = connect(list)
    if fd then
      local number, problem = ask(fd, o, ends)
      unistd.close(fd)
      if number then return number end
      why = problem
    end
    sleep(AGAIN_S)
  end
  error(("no number for this node from %s:%d in %g s: %s"):format(o.master_addr, o.master_port, o.join_timeout, why), 0)
end

--- Returns this node's number. The launchers of all nodes must call this function. Its errors are strings.
---@param o {master_addr: string, master_port: integer, nnodes: integer, nproc: integer, run_id: string, join_timeout:
--- number} join_timeout is in seconds
---@return integer number The node's number, from 0.
function nodes.number(o)
  local list, ends = addresses(o.master_addr, o.master_port), now() + o.join_timeout
  local was = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
  local ok, result = pcall(function()
    local server = listen(list)
    if server then return serve(server, o, ends) end
    return join(list, o, ends)
  end)
  signal.signal(signal.SIGPIPE, was)
  if not ok then error(result, 0) end
  return result
end

return nodes
