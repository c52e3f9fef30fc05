-- SPDX-License-Identifier: BSD-3-Clause
-- Tests whether strangers that connect to the rendezvous port of the ranks can disturb a run.
--   psluajit bench/strangers.lua [--late S] [--rate N]
-- Two ranks on this machine train a tiny model twice. The first time, there are no strangers. The second time, rank 1
-- starts `late` (60) seconds after rank 0. During this time, `rate` (100) connections per second reach the port. The
-- connections are of six kinds in turn:
--   - sends nothing
--   - sends random bytes
--   - claims to be a rank of a larger world
--   - claims to be rank 1
--   - stops within a message
--   - reports a fault with terminal escapes
-- Prints one JSON line with these fields: the seconds until rank 1 joined; true if the losses of both runs have the
-- same bits; how many strangers connected; true if psluajit printed any text that a stranger sent.
local ffi = require "ffi"
local paths = require "ps.paths"
local command_line = require "ps.core.command_line"
local whole, number = command_line.whole, command_line.number

local parser = require "argparse"("bench/strangers.lua")
number(parser:option("--late", "seconds by which rank 1 is late", "60"), 0)
whole(parser:option("--rate", "strangers a second", "100"), 1)
number(parser:option("--timeout", "the timeout of the ranks in seconds", "600"), 0)
whole(parser:option("--flood", "(for this script) the port to connect to"), 1, 65535)
parser:flag("--train", "(for this script) be a rank")
local options = command_line.parse(parser)

local STEPS, KEPT = 5, 300                   -- STEPS: number of training steps; KEPT: number of connections that the
                                             -- strangers keep open
local MARK = "\27[31mstranger"

-- -- a rank -----------------------------------------------------------------------------------------------------------

local function train()
  local ps = require "ps"
  local gpt2 = require "models.gpt2"
  local start = ps.now()
  ps.init_distributed { seed = 1, timeout = options.timeout, quiet = true }
  print(("joined %.3f"):format(ps.now() - start))
  local model, optimizer = ps.initialize { quiet = true, config = { train_micro_batch_size_per_gpu = 2,
    plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-3 } }, zero_optimization = { stage = 2 } },
    model_func = function() return gpt2.new("tiny", { dropout = 0 }) end }
  for step = 1, STEPS do
    ps.manual_seed(100 * step + ps.rank())
    local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
    optimizer:zero_grad()
    local loss = model(x, x)
    model:backward(loss)
    optimizer:step()
    print(("loss %d %.17g"):format(step, loss:item()))
  end
end

-- -- the strangers ----------------------------------------------------------------------------------------------------

-- Returns a message. It consists of 32-bit numbers in network byte order, followed by text.
local function message(numbers, text)
  local n = ffi.new("int32_t[?]", #numbers, numbers)
  return ffi.string(n, 4 * #numbers) .. (text or "")
end

local function noise(n)
  local bytes = {}
  for i = 1, n do bytes[i] = string.char(math.random(0, 255)) end
  return table.concat(bytes)
end

local STORE, PROOF = 0x31565350, 0x31485350  -- from src/rendezvous/store_protocol.h and proof.h
local HELLO, FAULT = 0, 3
local function of_store(what, a, b, text) return message({ STORE, what, 0, #(text or ""), a, b }, text) end
-- Returns the message `text`, preceded by the greeting of a rank that knows the name of the run but not its secret.
local function behind_proof(text)
  local name = os.getenv "PS_RUN_ID" or ""
  return message({ PROOF, 1 }, name .. ("\0"):rep(128 - #name) .. noise(32)) .. message({ PROOF, 0 }, noise(32)) .. text
end

local KINDS = {
  function() return "" end,
  function() return noise(math.random(1, 2000)) end,
  function() return of_store(HELLO, 5, 9) end,
  function() return of_store(HELLO, 1, 2) end,
  function() return of_store(HELLO, 1, 2):sub(1, 11) end,
  function() return of_store(FAULT, 0, 0, MARK) end,
  function() return "" end,
  function() return behind_proof(noise(100)) end,
  function() return behind_proof(of_store(HELLO, 5, 9)) end,
  function() return behind_proof(of_store(HELLO, 1, 2)) end,
  function() return behind_proof(""):sub(1, math.random(1, 207)) end,
  function() return behind_proof(of_store(FAULT, 0, 0, MARK)) end,
}

local function flood(port)
  local socket, unistd, time = require "posix.sys.socket", require "posix.unistd", require "posix.time"
  require("posix.signal").signal(13, require("posix.signal").SIG_IGN)
  local ranks = require "ps.launch.supervisor"
  local held, came, tried, refused = {}, 0, 0, 0
  local start = ranks.now()
  while came == 0 or refused < options.rate do             -- ends when no process has listened for one second
    if ranks.now() - start > options.late + 60 then break end
    for _ = 1, math.floor((ranks.now() - start) * options.rate) - tried do
      tried = tried + 1
      local fd = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0)
      if fd and socket.connect(fd, { family = socket.AF_INET, addr = "127.0.0.1", port = port }) then
        came, refused = came + 1, 0
        socket.send(fd, KINDS[came % #KINDS + 1]())
        held[#held + 1] = fd
      else
        refused = refused + 1
        if fd then unistd.close(fd) end
      end
      if #held > KEPT then unistd.close(table.remove(held, 1)) end
    end
    time.nanosleep { tv_sec = 0, tv_nsec = 5e6 }
  end
  print(came)
end

-- -- both runs --------------------------------------------------------------------------------------------------------

local function start(words, settings)
  local command = ("%s exec timeout %d '%s' '%s/bench/strangers.lua' --late %g --rate %g --timeout %g %s 2>&1"):format(
    settings, options.late + 90, paths.exe, paths.root, options.late, options.rate, options.timeout, words)
  return assert(io.popen(command))
end

local function as_rank(rank, port)
  return start("--train", ("RANK=%d WORLD_SIZE=2 LOCAL_RANK=%d LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=%d "
    .. "OMP_NUM_THREADS=1"):format(rank, rank, port))
end

local function finished(pipe)
  local text = pipe:read("*a")
  pipe:close()
  return text
end

local function losses(text) return (text:gsub("joined[^\n]*\n", "")) end

local function measure()
  local port = assert(require("ps.launch.port").free())
  local first = as_rank(0, port)
  local alone = { finished(as_rank(1, port)), finished(first) }
  port = assert(require("ps.launch.port").free())
  first = as_rank(0, port)
  local strangers = start("--flood " .. port, "PS_RUN_ID='" .. (os.getenv "PS_RUN_ID" or "") .. "'")
  require("posix.time").nanosleep { tv_sec = math.floor(options.late), tv_nsec = options.late % 1 * 1e9 }
  local late = { finished(as_rank(1, port)), finished(first) }
  local came = tonumber(finished(strangers))
  local same = losses(alone[1]) == losses(late[1]) and losses(alone[2]) == losses(late[2])
  local complete = select(2, losses(alone[1]):gsub("loss", "")) == STEPS
  local shown = (late[1] .. late[2]):find("stranger", 1, true) ~= nil
  local joined = tonumber(late[1]:match("joined ([%d.]+)"))
  print(("{\"bench\": \"strangers\", \"late_s\": %g, \"rate\": %g, \"came\": %s, \"joined_s\": %s, "
    .. "\"same_losses\": %s, \"shown\": %s}"):format(options.late, options.rate, came or "null", joined or "null",
    tostring(same and complete), tostring(shown)))
  if not (same and complete and joined) then
    io.stderr:write("rank 0:\n", late[2], "rank 1:\n", late[1])
    os.exit(1)
  end
end

if options.train then train() elseif options.flood then flood(options.flood) else measure() end
