-- SPDX-License-Identifier: BSD-3-Clause
-- Ranks that meet by a real Redis server, where redis-server is installed: with and without its password, by a key that
-- expires, and when the server dies or is stopped. What it may answer wrongly is in spec/c/test_comm.c.
local ps = require "ps"
local paths = require "ps.paths"
local signal = require "posix.signal"

local no_gloo = require("spec.ranks_lib").no_gloo()
local _, no_hiredis = pcall(ps.dist.gloo, "redis://", 0, 2, 1)
local has_server = os.execute("command -v redis-server redis-cli >/dev/null 2>&1") == 0

describe("ranks that meet by Redis", function()
  if no_gloo or no_hiredis.name == "EUNSUP" then
    pending("needs a build with Gloo and hiredis (libgloo-dev, libhiredis-dev)")
    return
  elseif not has_server then
    pending("needs redis-server and redis-cli")
    return
  end
  local folder, port, server

  local function read(name)
    local f = io.open(folder .. "/" .. name, "rb")
    local text = f and f:read("*a") or ""
    if f then f:close() end
    return text
  end

  local function cli(command)
    local p = assert(io.popen(("REDISCLI_AUTH=sesame redis-cli -p %d %s 2>&1"):format(port, command)))
    local text = p:read("*a")
    p:close()
    return text
  end

  local function start_server()
    port = assert(require("ps.dist.port").free())
    os.remove(folder .. "/pid")
    assert(os.execute(("cd %s && timeout -k 1 60 redis-server --port %d --bind 127.0.0.1 --requirepass sesame "
      .. "--save '' --daemonize no --pidfile %s/pid --dir %s >redis.log 2>&1 &"):format(folder, port, folder,
      folder)) == 0)
    for _ = 1, 500 do
      server = tonumber(read "pid")
      if server and cli("PING") == "PONG\n" then return end
      os.execute("sleep 0.01")
    end
    error("redis-server did not start: " .. read "redis.log")
  end

  local function stop_server()
    if server then signal.kill(server, signal.SIGKILL) end
    server = nil
  end

  setup(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(os.execute("mkdir " .. folder) == 0)
    start_server()
  end)
  teardown(function()
    stop_server()
    os.execute("rm -r " .. folder)
  end)

  -- Starts rank after rank; `between` happens when the first runs. What each said, and the seconds it took.
  local function ranks(urls, timeout, between)
    local start = ps.now()
    for i = 1, #urls do
      assert(os.execute(("(env -u LUA_INIT REDIS_PASSWORD= %s timeout -k 1 20 '%s' -e \"local ps = require 'ps' "
        .. "local ok, err = pcall(ps.init_distributed, { rank = %d, world_size = 2, local_rank = 0, quiet = true, "
        .. "timeout = %g }) print(ok and ps.dist.group:all_reduce(ps.ones({ 1 })):item() or err)\" >%s/out%d 2>&1; "
        .. "echo done >>%s/out%d) &"):format(urls[i], paths.exe, urls.first and urls.first + i - 1 or i - 1, timeout,
        folder, i, folder, i)) == 0)
      if i == 1 and between then between() end
    end
    local said = {}
    for i = 1, #urls do
      for _ = 1, 1000 do
        said[i] = read("out" .. i):match("^(.*)done\n$")
        if said[i] then break end
        os.execute("sleep 0.02")
      end
      os.remove(folder .. "/out" .. i)
    end
    return said, ps.now() - start
  end

  local function url(password, run)
    return ("PS_RENDEZVOUS='redis://%s127.0.0.1:%d/%s'"):format(password, port, run)
  end

  it("find each other, with the password in the URL or in REDIS_PASSWORD, and the key expires", function()
    local said = ranks({ url(":sesame@", "a"), url("", "a") .. " REDIS_PASSWORD=sesame" }, 30)
    assert.same({ "2\n", "2\n" }, said)
    local seconds = tonumber(cli("TTL a/rank0"):match("%d+"))
    assert.is_true(seconds > 0 and seconds <= 31)
    assert.equal("a/rank0\n", cli("KEYS '*'"))
    assert.matches("^%d+%.%d+%.%d+%.%d+:%d+\n", cli("GET a/rank0"))
    -- again by the same key, which names a store that is gone; the later rank comes first
    said = ranks({ url("default:sesame@", "a"), url(":sesame@", "a"), first = 0 }, 30)
    assert.same({ "2\n", "2\n" }, said)
  end)

  it("are told of a wrong password, of none, and of nobody", function()
    local said, seconds = ranks({ url(":swordfish@", "b"), url("", "b") }, 5)
    assert.matches("rank 0 of 2: the Redis server at 127.0.0.1 port %d+ refuses AUTH: WRONGPASS", said[1])
    assert.matches("refuses GET: NOAUTH .*; its password goes into redis://:PASSWORD@HOST:PORT/PREFIX or " ..
      "REDIS_PASSWORD", said[2])
    assert.is_nil((said[1] .. said[2]):find("swordfish", 1, true))
    said = ranks({ url(":sesame@", "b"), url(":swordfish@", "b") }, 1)
    assert.matches("rank 1 of 2 did not come", said[1], 1, true)
    assert.matches("WRONGPASS", said[2], 1, true)
    said = ranks({ url(":sesame@", "c"), first = 1 }, 0.3)
    assert.matches("rank 1 of 2 found nobody by the key c/rank0 of the Redis server at 127.0.0.1 port %d+ in 0.3 s " ..
      "%(it is not there%)", said[1])
    assert.is_true(seconds < 10)
  end)

  it("end when the server dies or is stopped", function()
    local said, seconds = ranks({ url(":sesame@", "d"), first = 1 }, 10, function()
      for _ = 1, 500 do                                        -- until the rank has asked for the key
        if cli("CLIENT LIST"):find("cmd=get", 1, true) then break end
        os.execute("sleep 0.01")
      end
      stop_server()
    end)
    assert.matches("the Redis server at 127.0.0.1 port %d+ hung up", said[1])
    assert.is_true(seconds < 8)
    said = ranks({ url(":sesame@", "d"), first = 1 }, 0.3)
    assert.matches("no Redis server answered at 127.0.0.1 port %d+ in 0.3 s: Connection refused", said[1])
    start_server()
    signal.kill(server, signal.SIGSTOP)
    said, seconds = ranks({ url(":sesame@", "d"), first = 1 }, 0.5)
    assert.matches("the Redis server at 127.0.0.1 port %d+ does not answer; is it stopped?", said[1])
    assert.is_true(seconds < 8)
  end)
end)
