-- SPDX-License-Identifier: BSD-3-Clause
-- Parses the command line of tools/launch.lua. Options have torchrun's names, with dashes or underscores. An option's
-- value follows after = or in the next word. As with torchrun, PET_<NAME> in the environment replaces a missing option.
-- All words after the script's name belong to the script. Options of torchrun or deepspeed that this launcher lacks are
-- refused by name.
local nearest = require "ps.core.nearest"

local launch_options = {}

---@class ps.dist.LaunchOptions
---@field nproc integer
---@field min_nproc integer          smallest number of ranks, if each failure removes one rank; otherwise nproc
---@field nnodes integer
---@field node_rank integer?         this node's number, or nil if node 0 assigns it (ps.launch.nodes)
---@field join_timeout number        seconds within which all nodes must connect
---@field master_addr string
---@field master_port integer?       the port, or nil if a free port is chosen for each attempt
---@field max_restarts integer
---@field grace number               seconds between SIGTERM and SIGKILL
---@field log_dir string?
---@field run_id string
---@field prefix boolean
---@field pass_local_rank boolean
---@field no_python boolean          whether the script is an executable program
---@field help boolean
---@field script string
---@field args string[]

local USAGE = [[
usage: psluajit launch [options] script.lua [arguments of the script]
Starts a script several times, as ranks of one run. Names may have dashes or underscores; values follow = or a blank.
  --nproc-per-node N   ranks on this node: a number, cpu (one per core), gpu (one per GPU), auto (gpu if there is
                       one, else cpu); also --num-gpus. Default 1. MIN:MAX, on one node: MAX at first, then one
                       fewer at each restart of --max-restarts, but at least MIN
  --nnodes N           nodes; the launcher runs on each with the same options, except --node-rank. Default 1
  --node-rank N        number of this node, from 0. Required with several nodes, unless --rdzv-backend is c10d: then the
                       node with --rdzv-endpoint's address is 0, and the others are numbered as they connect
  --master-addr HOST   node 0's host; required with several nodes. Default 127.0.0.1
  --master-port PORT   port on which rank 0 listens. Default: a free port on one node, 29500 on several
  --rdzv-endpoint HOST[:PORT], --rdzv-backend static|c10d, --rdzv-id NAME
                       torchrun's names: the first is --master-addr and --master-port in one
  --standalone         one node, a free port
  --max-restarts N     how often all ranks are started again after a failure. Default 0
  --grace SECONDS      between SIGTERM and SIGKILL when ranks are ended. Default 30
  --log-dir DIR        writes DIR/attempt_A/rank_R.log as well
  --no-prefix          prints lines without [rank] in front
  --pass-local-rank    gives the script --local_rank=N as its first argument
  --no-python          the script is a program, started as it is
  --help               shows this
]]

-- Options by name. `kind` is number (from low to high), text, flag, choice, nodes or nproc. If the name is an alias,
-- `same` is the option to which it refers.
local OPTIONS = {
  ["nproc-per-node"] = { kind = "nproc" }, ["num-gpus"] = { same = "nproc-per-node" },
  ["nnodes"] = { kind = "nodes" }, ["num-nodes"] = { same = "nnodes" },
  ["node-rank"] = { kind = "number", low = 0, high = 65535 },
  ["master-addr"] = { kind = "text" }, ["master-port"] = { kind = "number", low = 0, high = 65535 },
  ["rdzv-endpoint"] = { kind = "endpoint" }, ["rdzv-id"] = { kind = "text" },
  ["rdzv-backend"] = { kind = "choice", "static", "c10d" },
  ["max-restarts"] = { kind = "number", low = 0, high = 1e6 },
  ["grace"] = { kind = "number", low = 0, high = 86400 },
  ["log-dir"] = { kind = "text" }, ["standalone"] = { kind = "flag" }, ["no-prefix"] = { kind = "flag" },
  ["pass-local-rank"] = { kind = "flag" }, ["no-python"] = { kind = "flag" }, ["help"] = { kind = "flag" },
  -- options of torchrun that this launcher accepts and ignores
  ["monitor-interval"] = { kind = "text" }, ["start-method"] = { kind = "text" }, ["role"] = { kind = "text" },
  ["use-env"] = { kind = "flag" },
}

local ONE_NODE = "the launcher starts ranks only on this machine: run it on each node, with --nnodes, "
  .. "--node-rank, --master-addr"
local REFUSED = {
  ["m"] = "modules cannot be run by name: pass the script's file",
  ["module"] = "modules cannot be run by name: pass the script's file",
  ["rdzv-conf"] = "set the node's number by --node-rank, or give --rdzv-backend c10d without it",
  ["redirects"] = "all output is shown, and also written with --log-dir DIR",
  ["tee"] = "all output is shown, and also written with --log-dir DIR",
  ["local-ranks-filter"] = "all ranks are shown",
  ["local-addr"] = "use --master-addr", ["run-path"] = "pass the script's file",
  ["hostfile"] = ONE_NODE, ["include"] = ONE_NODE, ["exclude"] = ONE_NODE, ["launcher"] = ONE_NODE,
  ["elastic-training"] = "use --nproc-per-node MIN:MAX and --max-restarts N for fewer ranks after a failure",
  ["bind-cores-to-rank"] = "start it under taskset or numactl",
}

local MOST_RANKS = 4096
local JOIN_TIMEOUT = 600               -- seconds; the default of torchrun

local function fail(text, ...) error(text:format(...), 0) end

local function name_list()
  local names = {}
  for name in pairs(OPTIONS) do names[#names + 1] = name end
  table.sort(names)
  return names
end

local function wrong(name, value, expected) fail("%s is '%s'; expected %s", name, value, expected) end

local function whole(name, text, low, high)
  local n = text:match("^%d+$") and tonumber(text)
  if not n or n < low or n > high then wrong(name, text, ("a whole number from %d to %d"):format(low, high)) end
  return n
end

local function gpus()
  local n, dir = 0, require "posix.dirent"
  for _, name in ipairs(dir.dir "/dev") do n = n + (name:match("^nvidia%d+$") and 1 or 0) end
  return n
end

-- Returns the number of cores that this process can use.
function launch_options.cores()
  local f = io.open("/proc/self/status", "rb")
  local list = f and f:read("*a"):match("Cpus_allowed_list:%s*([%d,%-]+)")
  if f then f:close() end
  local n = 0
  for from, to in (list or ""):gmatch("(%d+)%-?(%d*)") do
    n = n + 1 + (to ~= "" and tonumber(to) - tonumber(from) or 0)
  end
  return math.max(n, 1)
end

local check = {}
function check.flag() return true end
function check.text(name, text)
  if text == "" then wrong(name, text, "some text") end
  return text
end
function check.number(name, text, row) return whole(name, text, row.low, row.high) end
function check.choice(name, text, row)
  for _, choice in ipairs(row) do if text == choice then return text end end
  wrong(name, text, table.concat(row, " or ") .. ": no other backend is supported")
end
function check.nodes(name, text)
  local low, high = text:match("^(%d+):(%d+)$")
  if low and low ~= high then wrong(name, text, "one number of nodes: it cannot change while ranks run") end
  return whole(name, low or text, 1, 65536)
end
function check.nproc(name, text)
  if text == "cpu" then return launch_options.cores() end
  if text == "auto" then return gpus() > 0 and gpus() or launch_options.cores() end
  if text == "gpu" then
    local n = gpus()
    return n > 0 and n or wrong(name, text, "a number, or cpu: there is no /dev/nvidia0 on this machine")
  end
  local low, high = text:match("^(%d+):(%d+)$")
  if low then
    high = whole(name .. "'s maximum", high, 1, MOST_RANKS)
    return { low = whole(name .. "'s minimum", low, 1, high), high = high }
  end
  if not text:match("^%d+$") then
    wrong(name, text, ("a whole number from 1 to %d, MIN:MAX, cpu, gpu or auto"):format(MOST_RANKS))
  end
  return whole(name, text, 1, MOST_RANKS)
end
function check.endpoint(name, text)
  local host, port = text:match("^(.-):(%d+)$")
  host = host or text
  if not host:match("^[%w%.%-_]+$") then wrong(name, text, "HOST or HOST:PORT") end
  return { host = host, port = port and whole(name .. "'s port", port, 0, 65535) }
end

-- Parses the options before the script's name. Returns the values by option, and the index of the script's name.
local function split(words)
  local values, i = {}, 1
  while i <= #words do
    local word = words[i]
    if word == "--" then return values, i + 1 end
    if word:sub(1, 1) ~= "-" or word == "-" then return values, i end
    local name, value = word:match("^%-%-?([^=]*)=(.*)$")
    name = name or word:match("^%-%-?(.*)$")
    local key = word == "-h" and "help" or name:gsub("_", "-")
    if REFUSED[key] then fail("%s is not supported: %s", word:match("^[^=]*"), REFUSED[key]) end
    local row = word:match("^%-%-") and OPTIONS[key] or key == "help" and OPTIONS.help
    if not row then
      local names = name_list()
      local near = nearest.find(key, names)
      local begin = {}
      for _, one in ipairs(names) do if #key > 1 and one:sub(1, #key) == key then begin[#begin + 1] = one end end
      if not near and #begin == 1 then near = begin[1] end
      fail("there is no option %s%s (--help shows all)", word:match("^[^=]*"), near and "; did you mean --" .. near
        .. "?" or "")
    end
    local shown = "--" .. key
    key, row = row.same or key, row.same and OPTIONS[row.same] or row
    if row.kind == "flag" then
      if value then fail("%s takes no value, but has '%s'", shown, value) end
    elseif not value then
      i = i + 1
      value = words[i] or fail("%s needs a value", shown)
    end
    values[key] = check[row.kind](shown, value, row)
    i = i + 1
  end
  return values, i
end

local function from_environment(values, get)
  for key, row in pairs(OPTIONS) do
    local name = "PET_" .. key:gsub("-", "_"):upper()
    local text = get(name)
    if text and text ~= "" and values[key] == nil and row.kind and key ~= "help" then
      if row.kind ~= "flag" then values[key] = check[row.kind](name, text, row)
      elseif text == "1" then values[key] = true
      elseif text ~= "0" then wrong(name, text, "0 or 1") end
    end
  end
end

-- Combines --master-addr, --master-port and --rdzv-endpoint into one address.
local function address(values)
  local point = values["rdzv-endpoint"] or {}
  local addr, port = values["master-addr"], values["master-port"]
  if addr and point.host and addr ~= point.host then
    fail("--master-addr is '%s', but --rdzv-endpoint has '%s'; use one of the two", addr, point.host)
  end
  if port and point.port and port ~= point.port then
    fail("--master-port is '%d', but --rdzv-endpoint has port '%d'; use one of the two", port, point.port)
  end
  return addr or point.host, port or point.port
end

-- Returns the number of ranks on this node, and the smallest number of ranks to which failures may reduce it.
local function rank_counts(values, nnodes)
  local nproc = values["nproc-per-node"] or 1
  if type(nproc) == "number" then return nproc, nproc end
  if nnodes > 1 then
    fail("--nproc-per-node is '%d:%d', but --nnodes is '%d'; expected a single number of ranks, since the nodes' "
      .. "launchers "
      .. "cannot agree on another one", nproc.low, nproc.high, nnodes)
  end
  return nproc.high, nproc.low
end

--- Parses the command line. Raises a string that contains the option, its value and the expected form.
---@param words string[]
---@param getenv? fun(name: string): string?
---@return ps.dist.LaunchOptions
function launch_options.read(words, getenv)
  local values, first = split(words)
  if values.help then return { help = true } end
  from_environment(values, getenv or os.getenv)
  local nnodes = values.nnodes or 1
  local addr, port = address(values)
  if values.standalone then
    if nnodes > 1 then fail("--standalone is for one node, but --nnodes is '%d'; use one of the two", nnodes) end
    addr, port = nil, nil
  end
  if nnodes > 1 then
    if not addr then fail("--nnodes is '%d', but --master-addr is missing; expected node 0's host", nnodes) end
    if not values["node-rank"] and values["rdzv-backend"] ~= "c10d" then
      fail("--nnodes is '%d', but --node-rank is missing; expected the number of this node, from 0 to %d, or "
        .. "--rdzv-backend "
        .. "c10d, which numbers the nodes", nnodes, nnodes - 1)
    end
    if port == 0 then
      fail("--master-port is '0'; expected a port that all nodes know, since --nnodes is '%d'", nnodes)
    end
  end
  local node_rank = values["node-rank"] or nnodes == 1 and 0 or nil
  if node_rank and node_rank >= nnodes then
    wrong("--node-rank", ("%d"):format(node_rank), ("less than --nnodes, which is %d"):format(nnodes))
  end
  local script = words[first]
  if not script then fail("a script is missing: psluajit launch [options] script.lua (--help shows all)") end
  if script == "-" then fail("the script is '-'; expected a file, since several ranks cannot share standard input") end
  local args = {}
  for i = first + 1, #words do args[#args + 1] = words[i] end
  if port == 0 then port = nil end
  local nproc, min_nproc = rank_counts(values, nnodes)
  return { nproc = nproc, min_nproc = min_nproc, nnodes = nnodes, node_rank = node_rank, join_timeout = JOIN_TIMEOUT,
    master_addr = addr or "127.0.0.1", master_port = port or (nnodes > 1 and 29500 or nil),
    max_restarts = values["max-restarts"] or 0, grace = values.grace or 30, log_dir = values["log-dir"],
    run_id = values["rdzv-id"] or "none", prefix = not values["no-prefix"],
    pass_local_rank = values["pass-local-rank"] or false, no_python = values["no-python"] or false, help = false,
    script = script, args = args }
end

launch_options.usage = USAGE

return launch_options
