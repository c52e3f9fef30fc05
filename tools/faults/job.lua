-- SPDX-License-Identifier: BSD-3-Clause
-- The job of tools/faults.lua: one rank of a small training run that saves and resumes, written like a script of a
-- user. The arguments are a file with the settings (JSON, tools/faults/draw.lua), the folder of the run, the log, and
-- the number of this life. Each line of the log is one event of this rank:
--   RANK LIFE resumed STEP SKIPPED     SKIPPED: number of checkpoints that could not be used
--   RANK LIFE step STEP HASHES ROWS    written after the step. HASHES: NAME=HASH for each parameter of this rank, for
--                                      the rank's optimizer state and for the rank's next random numbers. ROWS: a hash
--                                      of each row that the rank read
--   RANK LIFE saved STEP               written after the checkpoint was reported complete
--   RANK LIFE end STEP
--   RANK LIFE damaged FILE
local ps = require "ps"
local bit = require "bit"
local ffi = require "ffi"
local fcntl = require "posix.fcntl"
local json = require "cjson"
local unistd = require "posix.unistd"
local folders = require "ps.checkpoints.folder"

ffi.cdef "unsigned alarm(unsigned seconds);"

local file = assert(io.open(arg[1], "rb"))
local job = json.decode(file:read("*a"))
file:close()
local folder, life = arg[2], tonumber(arg[4])
local run = folder .. "/run"
ffi.C.alarm(20 * job.limit_s)                               -- ends the job even if the process that started the job has
                                                            -- died

local group = job.ranks > 1 and ps.init_distributed { quiet = true, timeout = job.timeout_s,
  heartbeat = job.heartbeat_s, rendezvous = "file://" .. folder .. "/rendezvous" }
local rank = ps.rank()
-- All ranks append to one log. Each line is written by a single call of write(). A Lua file would write a line in
-- parts, because its buffer is shorter than a line. Lines of other ranks could then appear between the parts.
local log = assert(fcntl.open(arg[3], fcntl.O_WRONLY + fcntl.O_APPEND + fcntl.O_CREAT, 420))
local function note(text, ...)
  local line = ("%d %d %s\n"):format(rank, life, text:format(...))
  assert(unistd.write(log, line) == #line)
end

local function hash(text) return bit.tohex(ps.C.ps_xxh3(text, #text)) end

local function bytes_of(t)
  t = t:contiguous()
  local n = tonumber(ps.C.ps_tensor_nbytes(t))
  local buffer = ffi.new("uint8_t[?]", n)
  ps.check(ps.C.ps_tensor_read(t, buffer, n))
  return ffi.string(buffer, n)
end

local function hashes_of(model, optimizer)
  local list = { ("random%d=%s"):format(rank, hash(bytes_of(ps.rand { 4 }))) }
  for name, tensor in pairs(model:state_dict()) do list[#list + 1] = name .. "=" .. hash(bytes_of(tensor)) end
  for name, tensor in pairs(optimizer:state_dict(model).tensors) do
    list[#list + 1] = ("optimizer.%s=%s"):format(name, hash(bytes_of(tensor)))
  end
  return table.concat(list, ",")
end

local function rows_of(x)
  local list = {}
  for i, row in ipairs(x:tolist()) do list[i] = hash(table.concat(row, " ")) end
  return table.concat(list, ",")
end

local FAMILIES = { gpt2 = "models.gpt2", llama = "models.llama", qwen2 = "models.qwen2", qwen3 = "models.qwen3",
  mistral = "models.mistral" }

ps.manual_seed(11)
local config = job.config
config.plan_print, config.seed = false, 11
if config.memory and config.memory.disk then config.memory.disk.path = folder end
if config.csv_monitor then config.csv_monitor.output_path, config.csv_monitor.job_name = folder, "monitor" end
local model, optimizer = ps.initialize { quiet = true, config = config, model_func = function()
  return require(FAMILIES[job.family]).new("tiny")
end }
local loader = ps.data.loader { file = job.text, batch = job.rows, seq = 16, seed = 2, vocab = 256 }
local parts = { model = model, optimizer = optimizer, loader = loader, keep = job.keep, quiet = true,
  async = job.async, shards = job.shards }

-- Loads all kept checkpoints except the newest checkpoint. It must be possible to load every checkpoint that was
-- reported complete.
local function load_kept()
  local latest = assert(io.open(run .. "/latest", "rb"))
  local newest = tonumber((latest:read "*l" or ""):match "^step%-(%d+)")
  latest:close()
  local older = {}
  for _, name in ipairs(folders.names(run)) do
    if newest and tonumber(name:match "^step%-(%d+)") < newest then older[#older + 1] = name end
  end
  for i = math.min(job.keep - 1, #older), 1, -1 do ps.checkpoints.load(run .. "/" .. older[i], parts) end
end

-- Checks the file `latest`. The file is always replaced as a whole, so it must contain a complete version.
local function check_latest()
  local latest = io.open(run .. "/latest", "rb")
  if not latest then return end
  if not latest:read("*a"):match "^step%-%d+%.?%l*\n%x+\n$" then note "damaged latest" end
  latest:close()
end

local first = 0
if job.checks then check_latest() end
if ps.checkpoints.find(run) then
  if job.checks then load_kept() end
  local from = ps.checkpoints.load(run, parts)
  first = from.step
  note("resumed %d %d", first, #from.skipped)
else
  note "resumed 0 0"
end

local function saved(path) note("saved %d", tonumber(path:match "step%-(%d+)")) end

for step = first + 1, job.upto or job.steps do
  local x, y = loader:next()
  if not x then x, y = loader:next() end                   -- a new epoch begins
  local rows = rows_of(x)
  optimizer:zero_grad()
  if config.pipeline or job.accumulate > 1 then
    for out in model:micro_batches(x, y) do model:backward(out.loss) end
  else
    model:backward(model(x, y))
  end
  optimizer:step()
  note("step %d %s %s", step, hashes_of(model, optimizer), rows)
  if step % job.every == 0 then
    if job.async then
      local path = ps.checkpoints.wait()
      if path then saved(path) end
    end
    local path = ps.checkpoints.save(run, parts)
    if not job.async then saved(path) end
  end
end
local path = ps.checkpoints.wait()
if path then saved(path) end
if group then group:barrier() end
note("end %d", optimizer.steps)
model:close()
unistd.close(log)
