-- SPDX-License-Identifier: BSD-3-Clause
-- The machines that a plan can be made for. Each file in tools/hardware/ returns a ps.planning.Machine, or a family of
-- machines. A family is a table with the fields that its machines have in common, and a field `variants`, which
-- contains the other fields of each machine by name. A name can end with x and a number of GPUs: "h200x8" is a machine
-- with 8 GPUs.
local lfs = require "lfs"
local paths = require "ps.paths"

local hardware = {}

---@class ps.planning.Machine
---@field text string
---@field source string the publication or measurement that the numbers are from
---@field gpu? {nbytes: number, sms?: integer, flops: table<string, number>, bandwidth: number, between: number} nbytes:
---  size of the memory in bytes. sms: number of multiprocessors, which determines the workspace of kernels. flops:
---  operations per second by dtype. bandwidth: bytes per second of the memory. between: bytes per second to and from
---  the other GPUs, in each direction
---@field taken? {what: string, nbytes: number, ranks?: boolean, source: string}[] parts of a GPU's memory that the
---  engine cannot use. A part with ranks = true is unusable only if there are several ranks
---@field host {nbytes: number, flops?: table<string, number>, bandwidth?: number}
---@field links {up: number, down: number} bytes per second between host and GPU
---@field network? number bytes per second between a GPU and the GPUs of other machines, in each direction
---@field disk? {read: number, write: number} bytes per second, or nil if they were not measured
---@field adam {host: number, device?: number} parameters per second
---@field efficiency table<string, number[]> lowest and highest fraction of a speed that is reached in practice, by name
---  of the speed: compute, memory, links, between, disk
---@field measured? boolean whether probe.lua measured the fractions on the machine
---@field memory_alone? string if set, a plan for this machine contains no times; the text says why
---@field path string path of the table's file

local FOLDER = "/tools/hardware/"

local function bytes_text(n) return ("%.0f MiB"):format(n / 2 ^ 20) end

-- Returns a copy of `base` in which the fields of `other` replace the fields of the same name, also in nested tables.
local function over(base, other)
  local out = {}
  for key, value in pairs(base) do out[key] = value end
  for key, value in pairs(other) do
    out[key] = type(value) == "table" and type(base[key]) == "table" and over(base[key], value) or value
  end
  return out
end

-- Returns all machines by name. If a file does not return a table, the machine's entry contains the text of the error,
-- which is raised only if the machine is used.
local function machines()
  local all = {}
  for file in lfs.dir(paths.root .. FOLDER) do
    local stem = file:match "^([%w%-]+)%.lua$"
    if stem and stem ~= "probe" then
      local path = paths.root .. FOLDER .. file
      local ok, t = pcall(dofile, path)
      local wrong = not ok and tostring(t) or type(t) ~= "table" and ("it returned %s, not a table"):format(tostring(t))
      for name, variant in pairs(not wrong and t.variants or { [stem] = {} }) do
        all[name] = wrong and { wrong = wrong } or over(t, variant)
        all[name].path = path
      end
    end
  end
  return all
end

-- The fields that every table must have. TEXTS lists the texts, and NUMBERS lists the numbers. OF_GPU lists the numbers
-- that the table of a machine with a GPU must also have.
local TEXTS = { "text", "source" }
local NUMBERS = { "host.nbytes", "links.up", "links.down", "adam.host" }
local OF_GPU = { "gpu.nbytes", "gpu.bandwidth", "gpu.between" }
for _, what in ipairs { "compute", "memory", "links", "between", "disk" } do
  for i = 1, 2 do NUMBERS[#NUMBERS + 1] = ("efficiency.%s.%d"):format(what, i) end
end

-- Raises an error if a machine's table does not have all fields that plans need.
local function check(t)
  local function fail(wrong) error(("%s is not a table of a machine: %s"):format(t.path, wrong), 0) end
  if t.wrong then fail(t.wrong) end
  local function look(names, fits, wanted)
    for _, name in ipairs(names) do
      local value = t
      for key in name:gmatch "[^.]+" do
        if type(value) ~= "table" then break end
        value = value[tonumber(key) or key]
      end
      if not fits(value) then fail(("%s is %s, not %s"):format(name, tostring(value), wanted)) end
    end
  end
  local function above_0(x) return type(x) == "number" and x > 0 and x < math.huge end
  look(TEXTS, function(x) return type(x) == "string" end, "a text")
  look(NUMBERS, above_0, "a number above 0")
  if t.gpu then look(OF_GPU, above_0, "a number above 0") end
end

--- Returns the names of the machines that have tables.
---@return string[]
function hardware.names()
  local list = {}
  for name in pairs(machines()) do list[#list + 1] = name end
  table.sort(list)
  return list
end

local function split(name, known)
  local stem, count = name:match "^(.-)x(%d+)$"
  if not known[name] and stem and known[stem] and tonumber(count) >= 1 then return stem, tonumber(count) end
  if known[name] then return name, 1 end
  error(("there is no hardware '%s'; the known names are %s, and for several GPUs a name such as h200x8; "
    .. "psluajit tools/hardware/probe.lua describes another machine when it runs there"):format(name,
    table.concat(hardware.names(), ", ")), 0)
end

---@class ps.planning.Hardware
---@field text string
---@field machine {host_nbytes: number, device_nbytes: number, device_total?: number, device_sms?: number} the machine
---  that a dry run simulates
---@field rates table<string, number> speeds in the form of ps.rates
---@field table ps.planning.Machine
---@field one string name of the machine that is like this one, but has one GPU
---@field count integer number of GPUs
---@field taken {what: string, nbytes: number, source: string}[]
---@field notes string[]

--- Returns a machine by name.
---@param name string
---@param host_nbytes? number size of the host memory in bytes (default: the size in the table)
---@return ps.planning.Hardware
function hardware.find(name, host_nbytes)
  local known = machines()
  local stem, count = split(name, known)
  local t = known[stem]
  check(t)
  local notes, taken, left = { t.text .. ": " .. t.source }, {}, t.gpu and t.gpu.nbytes or 0
  for _, row in ipairs(t.taken or {}) do
    if count > 1 or not row.ranks then
      taken[#taken + 1], left = row, left - row.nbytes
      notes[#notes + 1] = ("the engine cannot use %s of the GPU's memory: %s (%s)"):format(bytes_text(row.nbytes),
        row.what, row.source)
    end
  end
  if t.gpu then
    notes[#notes + 1] = "work space of kernels on the GPU: counted by the rules of "
      .. (t.gpu.sms and ("its kernels, for %d multiprocessors"):format(t.gpu.sms)
      or "the processor's kernels, since the table does not say how many multiprocessors it has (sms)")
  end
  if t.memory_alone then notes[#notes + 1] = "only memory is counted: " .. t.memory_alone end
  local host = host_nbytes or t.host.nbytes
  local share = t.gpu and count or 1
  return { name = name, one = stem, text = ("%s%s, %.0f GiB of host memory"):format(count > 1 and count .. " x " or "",
      t.text, host / 2 ^ 30), table = t, count = t.gpu and count or 0, taken = taken, notes = notes,
    machine = { host_nbytes = host, device_nbytes = left, device_total = t.gpu and t.gpu.sms and t.gpu.nbytes or 0,
      device_sms = t.gpu and t.gpu.sms or 0 },
    rates = { host_adam = t.adam.host / share, device_adam = t.adam.device or t.adam.host, up = t.links.up,
      down = t.links.down, at_once = t.gpu and 1 or 0 } }
end

return hardware
