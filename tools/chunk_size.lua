-- SPDX-License-Identifier: BSD-3-Clause
-- Searches for the best chunk size of a model. Shows the search and the setting to use. The weights are not allocated,
-- because the model is on device meta.
--   psluajit tools/chunk_size.lua --model gpt2-xl --host 6GiB
--   psluajit tools/chunk_size.lua --model my_model.lua:build --config ds_config.json
-- If --model is a file, the file returns a module, a function that creates a module, or a table of such functions. The
-- tool calls the function with { dtype =, device = "meta" }. During the call, these values are also the defaults of new
-- tensors. The tool assumes that a step uses the parameters in the order in which they are registered. The exit code is
-- 1 if no size is feasible.
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local pack = require "ps.engine.layout.pack"
local readable = require "ps.core.readable"

local SHOWN = 5               -- number of sizes with the best scores that are shown in addition to the powers of two

local function fail(message)
  io.stderr:write("chunk_size: " .. message .. "\n")
  os.exit(1)
end

-- -- arguments ------------------------------------------------------------------------------------------------------

local function bytes(text)
  local ok, value = require("ps.core.types").bytes.take(text)
  if not ok then return nil, ("'%s' is not a number of bytes (6GiB, 500MB, ...)"):format(text) end
  return tonumber(value)
end

local ELEMENTS = { [""] = 1, k = 1000, m = 1e6, ki = 1024, mi = 1024 ^ 2 }

local function elements(text)
  local number, unit = text:match("^([%d.]+)(%a*)$")
  local factor = number and ELEMENTS[unit:lower()]
  if not factor or not tonumber(number) then
    return nil, ("'%s' is not a number of elements (4194304, 4Mi, ...)"):format(text)
  end
  return math.floor(tonumber(number) * factor)
end

local function arguments()
  local parser = argparse("psluajit chunk_size", "Searches the chunk size for a model.")
  parser:option("--model", "preset of models/gpt2.lua, or FILE.lua[:FUNCTION]", "gpt2")
  parser:option("--dtype", "bf16, fp16 or fp32; default: as the config says, else bf16")
    :choices { "bf16", "fp16", "fp32" }
  parser:option("--host", "host memory, as 6GiB; default: no limit"):convert(bytes)
  parser:option("--device", "memory of an accelerator, as 8GiB; default: there is none"):convert(bytes)
  parser:option("--other", "bytes of the faster of the two that activations and work space need"):convert(bytes)
  parser:option("--config", "configuration (.lua or .json): budgets, type, accumulation, chunk_size")
  parser:option("--sizes", "try only these sizes, in elements, such as 4194304 or 4Mi"):args("+"):convert(elements)
  parser:flag("--uniform", "give all chunks one size, instead of shortening each to its contents")
  parser:flag("--all", "show every size that was tried")
  parser:flag("--json", "print one JSON object instead of a table")
  return command_line.parse(parser)
end

-- Returns the number of free bytes of host memory. A budget in a configuration can be a fraction of this number.
local function available()
  local f = io.open("/proc/meminfo", "rb")
  if not f then return nil end
  local kib = f:read("*a"):match("MemAvailable:%s*(%d+) kB")
  f:close()
  return kib and tonumber(kib) * 1024
end

-- Returns the settings for the search, from the configuration and the command's arguments. Arguments take precedence
-- over the configuration.
local function settings(args)
  local options = { uniform = args.uniform, sizes = args.sizes }
  local device, host, dtype, grad = args.device, args.host, args.dtype, nil
  if args.config then
    local ok, cfg = pcall(require("ps.config").read, args.config,
      { available = { host = available() } })
    if not ok then fail(tostring(cfg)) end
    device, host = device or cfg.memory.device, host or cfg.memory.host
    dtype = dtype or cfg.precision
    if not args.sizes then options.chunk_size = cfg.chunk_size end
    if cfg.gradient_accumulation_steps > 1 then grad = cfg.grad_accum_dtype end
  end
  dtype = dtype or "bf16"
  local capacity = device or host
  if capacity then
    options.capacity = capacity - (args.other or 0)
    if options.capacity <= 0 then fail("--other leaves no memory for chunks of " .. readable.bytes(capacity)) end
  end
  if grad and dtype ~= "fp32" then                        -- accumulated gradients have chunks of their own
    options.state_bytes = pack.state_bytes({ dtype = dtype, trains = true }) + (grad == "fp32" and 4 or 2)
  end
  return options, dtype, device and "device" or "host"
end

-- -- the model ------------------------------------------------------------------------------------------------------

local function is_module(value)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table" and meta.ps_module or false
end

local function from_file(spec, where)
  local path, name = spec:match("^(.-%.lua):?([%w_]*)$")
  local chunk, why = loadfile(path)
  if not chunk then fail(why) end
  local made = chunk()
  if name ~= "" then
    if type(made) ~= "table" or made[name] == nil then fail(("%s returns no field '%s'"):format(path, name)) end
    made = made[name]
  end
  if type(made) == "function" then made = made(where) end
  if not is_module(made) then
    fail(("%s yields a %s; expected a module or a function that makes one%s"):format(spec, type(made),
      type(made) == "table" and ", by name: " .. path .. ":NAME" or ""))
  end
  return made
end

---@return ps.layout.Entry[]
local function tensors_of(spec, dtype)
  local where = { dtype = dtype, device = "meta" }
  ps.set_default_dtype(dtype)
  ps.set_default_device("meta")
  local model
  if spec:match("%.lua:?[%w_]*$") then
    model = from_file(spec, where)
  else
    local gpt2 = require "models.gpt2"
    if not gpt2.presets[spec] then
      local names = {}
      for name in pairs(gpt2.presets) do names[#names + 1] = name end
      table.sort(names)
      fail(("no preset '%s' (the presets are %s), and no .lua file"):format(spec, table.concat(names, ", ")))
    end
    model = gpt2.new(spec, where)
  end
  local list = {}
  for name, p in model:named_parameters() do
    list[#list + 1] = { name = name, numel = p:numel(), dtype = p:dtype(), trains = p:needs_grad() }
  end
  if #list == 0 then fail(spec .. " has no parameters") end
  return list
end

-- -- output ---------------------------------------------------------------------------------------------------------

local function counts(row)
  local list = {}
  for i, group in ipairs(row.layout.groups) do list[i] = ("%d"):format(group.chunks) end
  return table.concat(list, "+")
end

local function alone(row)
  local n = 0
  for _, chunk in ipairs(row.layout.chunks) do n = n + (chunk.alone and 1 or 0) end
  return n
end

-- Returns the sizes to show: powers of two, the chosen size, and the sizes with the SHOWN best scores. With --all or
-- --sizes, returns all sizes.
local function selection(found, args)
  if args.all or args.sizes then return found.rows end
  local by_score, keep, shown = {}, { [found.chosen] = true }, {}
  for i, row in ipairs(found.rows) do
    by_score[i] = row
    if math.frexp(row.size) == 0.5 then keep[row] = true end
  end
  table.sort(by_score, function(a, b)
    if a.feasible ~= b.feasible then return a.feasible end
    if a.score ~= b.score then return a.score < b.score end
    return a.size < b.size
  end)
  local best = {}
  for _, row in ipairs(by_score) do                       -- sizes that lead to the same chunks have the same score
    local score = ("%.6f"):format(row.score)
    if not best[score] and #best < SHOWN then
      best[score], best[#best + 1], keep[row] = true, score, true
    end
  end
  for _, row in ipairs(found.rows) do
    if keep[row] then shown[#shown + 1] = row end
  end
  return shown
end

local function count(n) return n >= 1e6 and ("%.1f M"):format(n / 1e6) or ("%d"):format(n) end

local function show_table(found, args, facts)
  local chosen, groups = found.chosen, found.chosen.layout.groups
  local element = require("ps.core.dtype").nbytes
  print(("%s: %s parameters in %d tensors"):format(args.model, count(facts.parameters), facts.tensors))
  for i, group in ipairs(groups) do
    print(("  group %d: %s, %s: %s, %g bytes of chunks per element"):format(i, group.dtype,
      group.trains and "trained" or "frozen", count(group.used), pack.state_bytes(group, facts.state_bytes)))
  end
  print(facts.capacity and ("%s: %s for chunks; all chunks take %s"):format(facts.tier, readable.bytes(facts.capacity),
    readable.bytes(chosen.bytes)) or ("no memory limit given; all chunks take %s"):format(readable.bytes(chosen.bytes)))
  print()
  local rows, why = {}, nil
  for i, row in ipairs(selection(found, args)) do
    rows[i] = { row == chosen and "*" or "", ("%d"):format(row.size),
      readable.bytes(row.size * element[groups[1].dtype]), counts(row), ("%d"):format(alone(row)),
      ("%.3f"):format(100 * row.waste_share), ("%.3f"):format(row.bytes_per_param),
      readable.bytes(row.set_bytes * pack.SETS), row.feasible and ("%.4f"):format(row.score) or "no" }
    if not why and chosen.feasible and row.why then why = ("no: %d elements: %s"):format(row.size, row.why) end
  end
  local lines = readable.lines({ { title = "", left = true }, { title = "elements" }, { title = groups[1].dtype },
    { title = "chunks" }, { title = "alone" }, { title = "waste %" }, { title = "bytes/p" },
    { title = pack.SETS .. " sets" }, { title = "score" } }, rows)
  print(table.concat(lines, "\n"))
  if #rows < #found.rows then print(("%d more were tried: --all"):format(#found.rows - #rows)) end
  print(([[

alone: tensors larger than a chunk. bytes/p: of all chunks, waste included, for
each parameter. %d sets: so many chunks with their state, which must fit. score:
waste, fixed costs of copies, and coarseness as shares; the least is chosen.]]):format(pack.SETS))
  if why then print(why) end
  if chosen.feasible then
    print(("\ndefault_chunk_size = %d"):format(chosen.size))
  else
    print(("\nno size is feasible: %s"):format(chosen.why))
  end
end

local function show_json(found, args, facts)
  local rows = {}
  for i, row in ipairs(found.rows) do
    local groups = {}
    for g, group in ipairs(row.layout.groups) do
      groups[g] = { dtype = group.dtype, trains = group.trains, chunks = group.chunks, numel = group.numel,
        used = group.used }
    end
    rows[i] = { size = row.size, chunks = #row.layout.chunks, alone = alone(row), groups = groups,
      waste = row.layout.waste, waste_share = row.waste_share, state_bytes_per_param = row.bytes_per_param,
      bytes = row.bytes, set_bytes = row.set_bytes, alone_bytes = row.alone_bytes, score = row.score,
      feasible = row.feasible, why = row.why, chosen = row == found.chosen }
  end
  local chosen = found.chosen
  print(require("cjson").encode { model = args.model, parameters = facts.parameters, tensors = facts.tensors,
    capacity = facts.capacity, feasible = chosen.feasible, why = chosen.why,
    default_chunk_size = chosen.feasible and chosen.size or nil, rows = rows })
end

local args = arguments()
local options, dtype, tier = settings(args)
local entries = tensors_of(args.model, dtype)
local facts = { tensors = #entries, parameters = 0, capacity = options.capacity, state_bytes = options.state_bytes,
  tier = tier }
for _, entry in ipairs(entries) do facts.parameters = facts.parameters + entry.numel end
local ok, found = pcall(pack.search, entries, options)
if not ok then fail(tostring(found)) end
if args.json then show_json(found, args, facts) else show_table(found, args, facts) end
os.exit(found.chosen.feasible and 0 or 1, true)
