-- SPDX-License-Identifier: BSD-3-Clause
-- Access to a run: two runs at one port, different or missing secrets, addresses that other machines cannot reach, and
-- strangers at the port where ranks meet. spec/c/test_store.c tests the messages of one connection.
local paths = require "ps.paths"
local check = require "spec.check_lib"
local secret = require "ps.dist.secret"
local stat = require "posix.sys.stat"
local ranks_lib = require "spec.ranks_lib"
local no_gloo = ranks_lib.no_gloo()

local folder

local function free_port() return (assert(require("ps.launch.port").free())) end

-- A rank that joins the other rank, sums with it, and prints whether it had to wait.
local RANK = [[
  local ps = require "ps"
  local start = ps.now()
  local ok, group = pcall(ps.init_distributed, { quiet = true, timeout = tonumber(arg[1]) })
  print(ok and "sum " .. group:all_reduce(ps.tensor { 1 + ps.rank() }):item() or tostring(group))
  print(ps.now() - start < 100 and "in time" or "late")
]]

--- Starts one of two ranks, which meet at 127.0.0.1 unless `settings` say otherwise. `text(rank)` waits for the rank's
--- end and returns its output.
local function rank(number, port, settings, timeout)
  local command = ("env -u XDG_RUNTIME_DIR -u PS_SECRET -u PS_RUN_ID -u TORCHELASTIC_RUN_ID RANK=%d LOCAL_RANK=%d "
    .. "WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=%d OMP_NUM_THREADS=1 %s timeout 300 '%s' "
    .. "%s %g 2>&1"):format(number, number, port, settings or "", paths.exe, folder .. "/rank.lua",
    timeout or check.FAR_S)
  return assert(io.popen(command))
end

-- Waits until rank 0 listens, by connecting like a stranger.
local function listens(port)
  local socket, unistd = require "posix.sys.socket", require "posix.unistd"
  for _ = 1, 2000 do
    local fd = assert(socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0))
    local there = socket.connect(fd, { family = socket.AF_INET, addr = "127.0.0.1", port = port })
    unistd.close(fd)
    if there then return end
    require("posix.time").nanosleep { tv_sec = 0, tv_nsec = 1e7 }
  end
  error "rank 0 does not listen"
end

local function said(pipe)
  local text = pipe:read("*a")
  pipe:close()
  return text
end

local function has(text, ...)
  for _, part in ipairs { ... } do
    if not text:find(part, 1, true) then error(("'%s' is missing in: %s"):format(part, text), 2) end
  end
end

setup(function()
  folder = ranks_lib.folder()
  -- Written once, since a rank that starts slowly must not find a half-written file.
  check.write(folder .. "/rank.lua", RANK)
end)
teardown(function() ranks_lib.remove(folder) end)

describe("ranks at a port", function()
  if no_gloo then return pending(no_gloo) end

  it("of another run get an error with both names, and those of the right run still join", function()
    local port = free_port()
    local a = rank(0, port, "TORCHELASTIC_RUN_ID=apples PS_SECRET=one")
    listens(port)
    local b = rank(1, port, "TORCHELASTIC_RUN_ID=pears PS_SECRET=one", 3)
    has(said(rank(0, port, "PS_RUN_ID=pears PS_SECRET=one")), ("port %d of this machine is in use"):format(port),
      "run 'apples' answers there, but this rank belongs to run 'pears'", "in time")
    has(said(rank(0, port, "PS_RUN_ID=apples PS_SECRET=one")), ("port %d of this machine is in use"):format(port),
      "rank 0 of run 'apples' already serves there", "in time")
    has(said(b), "rank 1 of 2 at 127.0.0.1 port " .. port,
      "run 'apples' answers there, but this rank belongs to run 'pears'", "in time")
    local late = rank(1, port, "TORCHELASTIC_RUN_ID=apples PS_SECRET=one")
    assert.equal("sum 3\nin time\n", said(late))
    assert.equal("sum 3\nin time\n", said(a))
  end)

  it("that never came are reported as missing, with those that came instead", function()
    local port = free_port()
    local a = rank(0, port, "PS_RUN_ID=apples", 15)
    listens(port)
    local b = rank(1, port, "PS_RUN_ID=\"$(printf 'pears\\033[31m')\"", 3)
    has(said(b), "run 'apples' answers there, but this rank belongs to run 'pears?[31m'")
    has(said(a), "rank 1 of 2 did not come", "one that came from 127.0.0.1 was turned away: it is of run 'pears?[31m'")
  end)

  it("with another secret, or without one, are refused", function()
    local port = free_port()
    local a = rank(0, port, "PS_SECRET=right")
    listens(port)
    local b, c = rank(1, port, "PS_SECRET=wrong", 3), rank(1, port, "PS_RUN_ID=", 3)
    has(said(b), "has another secret; give all ranks the same PS_SECRET")
    has(said(c), "has another secret")                   -- the secret of this user's runs
    check.write(folder .. "/secret", "right\n")
    local late = rank(1, port, ("PS_SECRET=file://%s/secret"):format(folder))
    assert.equal("sum 3\nin time\n", said(late))
    assert.equal("sum 3\nin time\n", said(a))
  end)

  it("meet at 127.0.1.1, as Debian calls a machine by its own name", function()
    local port = free_port()
    local at = ("PS_RENDEZVOUS=tcp://127.0.1.1:%d PS_SECRET=required"):format(port)
    local a, b = rank(0, port, at), rank(1, port, at)
    assert.equal("sum 3\nin time\n", said(a))
    assert.equal("sum 3\nin time\n", said(b))
  end)

  it("get an error at once that no other machine reaches a loopback address", function()
    local start = os.time()
    for _, host in ipairs { "127.0.1.1", "localhost", "::1" } do
      has(said(rank(0, free_port(), "LOCAL_WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=" .. host)),
        "ranks are on several machines, but " .. host .. " is a loopback address on the machine of rank 0", "in time")
    end
    assert.is_true(os.time() - start < check.PROMPT_S)
  end)

  it("of several machines need a secret or get a warning, and fail if a secret is required", function()
    local port = free_port()
    local at = ("PS_RENDEZVOUS=tcp://0.0.0.0:%d"):format(port)
    local a, b = rank(0, port, at), rank(1, port, at)
    local text = said(a)
    has(text, ("this run has no secret (PS_SECRET): any process that can connect to tcp://0.0.0.0:%d"):format(port),
      "sum 3\n")
    assert.equal(3, select(2, text:gsub("\n", "")))
    assert.equal("sum 3\nin time\n", said(b))
    has(said(rank(0, port, at .. " PS_SECRET=required")), "PS_SECRET is 'required', but there is no secret: ranks of "
      .. "several machines meet at tcp://0.0.0.0:" .. port)
    has(said(rank(0, port, at .. " PS_SECRET=")), "PS_SECRET is ''; expected a secret")
  end)

  it("join late while strangers connect all the time, and train with the same bits", function()
    local p = assert(io.popen(("PS_RUN_ID=known timeout 60 '%s' '%s/bench/strangers.lua' --late 2 --timeout 20 2>&1")
      :format(paths.exe, paths.root)))
    local text = said(p)
    local result = text:match("^{.*}\n$") and require("cjson").decode(text) or error(text)
    assert.is_true(result.same_losses)
    assert.is_false(result.shown)
    assert.is_true(result.joined_s < 2, text)
    assert.is_true(result.came >= 100, text)
  end)
end)

describe("the secret of a run", function()
  local FILE_MODE = tonumber("600", 8)

  local function with(values) return function(name) return values[name] end end

  it("is the value of PS_SECRET or the contents of its file", function()
    assert.equal("x", secret.find(with { PS_SECRET = "x" }, "tcp://a:1", false))
    assert.equal("x", secret.find(with { PS_SECRET = "x" }, "file:///a", true))
    check.write(folder .. "/given", "one two\n\n")
    assert.equal("one two", secret.find(with { PS_SECRET = "file://" .. folder .. "/given" }, "tcp://a:1", false))
    check.write(folder .. "/given", "\n")
    check.fails(function() secret.find(with { PS_SECRET = "file://" .. folder .. "/given" }, "tcp://a:1", false) end,
      "PS_SECRET names " .. folder .. "/given, which is empty")
    check.fails(function() secret.find(with { PS_SECRET = "file:///no/such" }, "tcp://a:1", false) end,
      "PS_SECRET names a file that cannot be read: /no/such")
    assert.is_nil(secret.find(with {}, "tcp://a:1", false))
    assert.is_nil(secret.find(with { PS_SECRET = "required" }, "file:///a", false))     -- rank 0 writes a secret there
    check.fails(function() secret.find(with { PS_SECRET = "required" }, "tcp://a:1", false) end,
      "PS_SECRET is 'required'")
  end)

  it("is on one machine a file that only this user can read, the same for all ranks", function()
    local get = with { XDG_RUNTIME_DIR = folder }
    local known = secret.find(get, "tcp://127.0.0.1:1", true)
    assert.matches("^%x+$", known)
    assert.equal(64, #known)
    assert.equal(known, secret.find(get, "tcp://127.0.0.1:1", true))
    local required = with { XDG_RUNTIME_DIR = folder, PS_SECRET = "required" }
    assert.equal(known, secret.find(required, "tcp://127.0.0.1:1", true))
    assert.equal(FILE_MODE, stat.stat(folder .. "/psluajit/secret").st_mode % 512)
    assert.equal("secret\n", (said(io.popen("ls " .. folder .. "/psluajit"))))
    check.write(folder .. "/psluajit/secret", "short")
    check.fails(function() secret.find(get, "tcp://127.0.0.1:1", true) end, "is not a secret that psluajit wrote")
    os.execute(("chmod 755 %s/psluajit"):format(folder))
    check.fails(function() secret.find(get, "tcp://127.0.0.1:1", true) end, "not a folder that only user",
      "set PS_SECRET")
    os.execute(("rm -r %s/psluajit && ln -s /tmp %s/psluajit"):format(folder, folder))
    check.fails(function() secret.find(get, "tcp://127.0.0.1:1", true) end, "not a folder that only user")
  end)

  it("is the same for ranks that start at the same time", function()
    os.execute(("rm -rf %s/psluajit"):format(folder))
    local pipes, seen = {}, {}
    for i = 1, 8 do
      pipes[i] = io.popen(("XDG_RUNTIME_DIR=%s '%s' -e 'print(require(\"ps.dist.secret\").of_this_machine(os.getenv))' "
        .. "2>&1"):format(folder, paths.exe))
    end
    for _, p in ipairs(pipes) do seen[said(p)] = true end
    local text = next(seen)
    assert.is_nil(next(seen, text))
    assert.matches("^%x+\n$", text)
  end)

  it("is new for every attempt of the launcher, unless one is set", function()
    assert.not_equal(secret.of_attempt(with {}), secret.of_attempt(with {}))
    assert.equal(64, #secret.of_attempt(with { PS_SECRET = "required" }))
    assert.equal("x", secret.of_attempt(with { PS_SECRET = "x" }))
  end)
end)
