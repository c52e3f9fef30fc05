-- SPDX-License-Identifier: BSD-3-Clause
-- Nodes that number themselves (tools/launch.lua --rdzv-backend c10d without --node-rank): several launchers on this
-- machine, one of which listens on the address.
local check = require "spec.check_lib"
local lib = require "spec.ranks_lib"
local paths = require "ps.paths"
local port = require "ps.launch.port"
local socket = require "posix.sys.socket"
local time = require "posix.time"
local unistd = require "posix.unistd"

local folder = lib.folder()
teardown(function() lib.remove(folder) end)

local SHOW = "print(('rank %s of %s on node %s'):format(os.getenv 'RANK', os.getenv 'WORLD_SIZE', "
  .. "os.getenv 'GROUP_RANK'))"
local MEET = [[
  local bmt = require "ps.bmt"
  bmt.init_distributed { quiet = true, timeout = 30 }
  bmt.synchronize()
  print(("met %d of %d"):format(bmt.rank(), bmt.world_size()))
  bmt.close()
]]

-- Runs the torchrun line from BMTrain's guide on one node. Returns the pipe with its output. PS_RENDEZVOUS is set,
-- since the nodes are in fact one machine.
local function start(at, options, script)
  local name = folder .. "/train.lua"
  check.write(name, script)
  return assert(io.popen(("NNODES=%d GPU_PER_NODE=%d MASTER_ADDR=127.0.0.1 MASTER_PORT=%d OMP_NUM_THREADS=1 "
    .. "PS_RENDEZVOUS=tcp://127.0.0.1:%d; export OMP_NUM_THREADS PS_RENDEZVOUS; timeout 60 '%s' '%s/tools/launch.lua' "
    .. "--nnodes=${NNODES} --nproc_per_node=${GPU_PER_NODE} --rdzv_id=%s --rdzv_backend=c10d "
    .. "--rdzv_endpoint=${MASTER_ADDR}:${MASTER_PORT} %s 2>&1; echo \"|$?\""):format(options.nnodes, options.nproc or 1,
    at, at, paths.exe, paths.root, options.id or "1", name)))
end

local function finish(pipe)
  local text, code = pipe:read("*a"):match "^(.*)|(%d+)\n$"
  pipe:close()
  return text, tonumber(code)
end

local function count(text, pattern) return select(2, text:gsub(pattern, "")) end

-- Connects to node 0 when it listens.
local function connected(at)
  for _ = 1, 500 do
    local fd = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0)
    if socket.connect(fd, { family = socket.AF_INET, addr = "127.0.0.1", port = at }) then return fd end
    unistd.close(fd)
    time.nanosleep { tv_sec = 0, tv_nsec = 1e7 }
  end
  error "nobody listens"
end

describe("nodes without numbers", function()
  it("get them from the node with the address, whatever other connections come and go", function()
    local at = assert(port.free())
    local first = start(at, { nnodes = 3, nproc = 2 }, SHOW)
    local silent, stranger, gone = connected(at), connected(at), connected(at)
    socket.send(stranger, "GET / HTTP/1.0\r\n\r\n")
    socket.send(gone, "psluajit-node 1 3 2 1\n")
    assert.equal("no this is not a launcher of psluajit\n", socket.recv(stranger, 100))
    unistd.close(gone)
    local other = start(at, { nnodes = 3, nproc = 2, id = "another" }, SHOW)
    local text, code = finish(other)
    assert.equal(1, code)
    assert.truthy(text:find("refuses this node: --rdzv-id is 'another', but '1' on node 0", 1, true), text)
    text, code = finish(start(at, { nnodes = 3, nproc = 1 }, SHOW))
    assert.equal(1, code)
    assert.truthy(text:find("--nproc-per-node is '1', but '2' on node 0", 1, true), text)
    local pipes = { start(at, { nnodes = 3, nproc = 2 }, SHOW), start(at, { nnodes = 3, nproc = 2 }, SHOW), first }
    local all = ""
    for _, pipe in ipairs(pipes) do
      text, code = finish(pipe)
      assert.equal(0, code, text)
      all = all .. text
    end
    unistd.close(silent)
    unistd.close(stranger)
    for node = 0, 2 do
      assert.equal(1, count(all, ("launch: node %d of 3\n"):format(node)), all)
      for i = 0, 1 do assert.equal(1, count(all, ("rank %d of 6 on node %d\n"):format(2 * node + i, node)), all) end
    end
  end)

  it("meet at the port by which they got their numbers", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    local at = assert(port.free())
    local pipes, all = {}, ""
    for i = 1, 2 do pipes[i] = start(at, { nnodes = 2 }, MEET) end
    for i = 1, 2 do
      local text, code = finish(pipes[i])
      assert.equal(0, code, text)
      all = all .. text
    end
    for rank = 0, 1 do assert.equal(1, count(all, ("met %d of 2\n"):format(rank)), all) end
  end)

  it("get an error if some of them do not come", function()
    local nodes = require "ps.launch.nodes"
    local at = assert(port.free())
    local o = { master_addr = "127.0.0.1", master_port = at, nnodes = 2, nproc = 1, run_id = "1", join_timeout = 0.5 }
    check.fails(function() nodes.number(o) end, "--nnodes is '2', but only 1 of the nodes connected in 0.5 s")
    o.master_addr = "127.0.0.1.example.invalid"
    check.fails(function() nodes.number(o) end, "--rdzv-endpoint", "has no address")
    local fd, number = port.bound()                                -- the port is in use, but no process listens on it
    o.master_addr, o.master_port = "127.0.0.1", number
    check.fails(function() nodes.number(o) end, "no number for this node", "nobody listens")
    unistd.close(fd)
  end)
end)
