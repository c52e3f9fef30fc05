-- SPDX-License-Identifier: BSD-3-Clause
-- Finds the largest models that fit machines which are not available here. For each machine, the script plans runs of
-- train.lua (PatrickStar's benchmark) with models of increasing size. It starts with the smallest model and ends when
-- two models do not fit. It writes scale.csv, the table scale.md, and two plots. As in the figures of PatrickStar's
-- README, scale.svg shows the largest model of each machine, and speed.svg shows the planned rates.
--
--   psluajit scale.lua --hardware v100-32,v100-32x4,v100-32x8 --host 240GB --out out/scale
local argparse = require "argparse"
local command_line = require "ps.command_line"
local json = require "cjson"
local paths = require "ps.paths"
local make_folder = require("ps.checkpoints.folder").make
local here = arg[0]:match "^(.*)/" or "."
local sizes = dofile(here .. "/models.lua")

local parser = argparse("psluajit benchmark/scale.lua", "Plans PatrickStar's benchmark for machines that are not here.")
parser:option("--hardware", "Machines of psluajit plan, separated by commas.", "v100-32,v100-32x2,v100-32x4,v100-32x8")
parser:option("--models", "Sizes from small to large, separated by commas. Default: the GPTs by their parameters.")
parser:option("--host", "Host memory of a machine, such as 240GB. Default: that of the tables.")
parser:option("--disk", "Folder for a disk tier. Default: no disk tier.")
command_line.whole(parser:option("--batch", "Rows per process and step.", "16"), 1)
parser:option("--precision", "fp16, bf16 or fp32.", "fp16"):choices { "fp16", "bf16", "fp32" }
parser:option("--out", "Folder for scale.csv, scale.md, scale.svg and speed.svg.", "out/scale")
local args = command_line.parse(parser)

local function split(text)
  local list = {}
  for word in text:gmatch "[^,%s]+" do list[#list + 1] = word end
  return list
end

local function try(fn, ...) return command_line.try("scale.lua", fn, ...) end

-- The sizes to plan, sorted by their number of parameters.
local models = {}
for _, name in ipairs(args.models and split(args.models) or sizes.names()) do
  local size = try(sizes.of, name)
  if size.kind == "gpt2" then
    models[#models + 1] = { name = name, parameters = sizes.gpt_parameters(size), seq = size.seq }
  elseif args.models then
    try(error, ("'%s' is a BERT; name GPTs"):format(name), 0)
  end
end
table.sort(models, function(a, b) return a.parameters < b.parameters end)

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

-- Returns the plan for a size on a machine. tools/plan.lua describes its fields.
local function plan(machine, model)
  local command = { quoted(paths.exe), quoted(paths.root .. "/tools/plan.lua"), "--json", "--find", "nothing",
    "--hardware", quoted(machine) }
  if args.host then
    command[#command + 1] = "--host"
    command[#command + 1] = quoted(args.host)
  end
  for _, word in ipairs { here .. "/train.lua", "--model", model.name, "--batch", tostring(args.batch),
    "--precision", args.precision } do command[#command + 1] = quoted(word) end
  if args.disk then
    command[#command + 1] = "--disk"
    command[#command + 1] = quoted(args.disk)
  end
  local p = assert(io.popen(table.concat(command, " ") .. " 2>&1"))
  local text = p:read "*a"
  p:close()
  local line = text:match "({.*})"
  local ok, result = pcall(json.decode, line)
  if not ok then try(error, ("no plan of %s for %s: %s"):format(model.name, machine, text), 0) end
  return result
end

-- Returns the lowest and the highest planned rate of all processes together, in TFLOP/s. FLOPs are counted as in
-- PatrickStar (train.lua).
local function rates(machine, model, parameters, seconds)
  if not seconds then return nil end
  local processes = tonumber(machine:match "x(%d+)$") or 1
  local flops = 8 * parameters * args.batch * model.seq * processes
  return { flops / seconds[2] / 1e12, flops / seconds[1] / 1e12 }
end

-- Rows of the table: { machine, model, parameters, fits, peaks, seconds, rates }.
local machines, rows, largest = split(args.hardware), {}, {}
for _, machine in ipairs(machines) do
  local misses = 0
  for _, model in ipairs(models) do
    local result = plan(machine, model)
    local row = { machine = machine, model = model.name, parameters = result.parameters or model.parameters,
      fits = result.fits, seconds = result.seconds and result.seconds.step }
    row.rates = rates(machine, model, row.parameters, row.fits and row.seconds)
    for _, tier in ipairs(result.tiers or {}) do row[tier.name] = tier.peak end
    rows[#rows + 1] = row
    if row.fits then
      largest[machine], misses = row, 0
    else
      misses = misses + 1
    end
    print(("%-12s %-18s %7.4g G parameters  %s"):format(machine, model.name, row.parameters / 1e9, row.fits
      and ("fits; %s"):format(row.seconds and ("%.4g to %.4g s per step, %.3g to %.3g TFLOP/s"):format(
        row.seconds[1], row.seconds[2], row.rates[1], row.rates[2]) or "only memory is counted")
      or "does not fit"))
    if misses == 2 then break end
  end
end

local function write(name, text)
  local file = assert(io.open(args.out .. "/" .. name, "wb"))
  file:write(text)
  assert(file:close())
end

make_folder(args.out)
local lines = { "machine,model,parameters,fits,device_peak_bytes,host_peak_bytes,disk_peak_bytes,least_s,most_s,"
  .. "least_tflops,most_tflops" }
for _, row in ipairs(rows) do
  local function number(value) return value and ("%.10g"):format(value) or "" end
  lines[#lines + 1] = table.concat({ row.machine, row.model, ("%.0f"):format(row.parameters), tostring(row.fits),
    number(row.fits and row.device), number(row.fits and row.host), number(row.fits and row.disk),
    number(row.fits and row.seconds and row.seconds[1]), number(row.fits and row.seconds and row.seconds[2]),
    number(row.rates and row.rates[1]), number(row.rates and row.rates[2]) }, ",")
end
write("scale.csv", table.concat(lines, "\n") .. "\n")

-- The table has one row per machine and one column per size. A cell contains the rate of all processes together, in
-- TFLOP/s.
local cells, used = {}, {}
for _, row in ipairs(rows) do
  used[row.model] = true
  cells[row.machine .. " " .. row.model] = not row.fits and "-" or not row.rates and "fits"
    or ("%.3g to %.3g"):format(row.rates[1], row.rates[2])
end
local columns = {}
for _, model in ipairs(models) do if used[model.name] then columns[#columns + 1] = model.name end end
local markdown = { "| | " .. table.concat(columns, " | ") .. " |", "|---" .. ("|---"):rep(#columns) .. "|" }
for _, machine in ipairs(machines) do
  local line = {}
  for i, name in ipairs(columns) do line[i] = cells[machine .. " " .. name] or "" end
  markdown[#markdown + 1] = ("| %s | %s |"):format(machine, table.concat(line, " | "))
end
write("scale.md", table.concat(markdown, "\n") .. "\n")

-- The plot scale.svg has one bar per machine. The length of a bar is the number of parameters of the machine's largest
-- model.
local WIDTH, LEFT, BAR = 620, 130, 34
local most = 0
for _, row in pairs(largest) do most = math.max(most, row.parameters) end
local svg = { ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" '
  .. 'font-size="13">'):format(WIDTH + LEFT + 110, 50 + #machines * BAR), '<rect width="100%" height="100%" '
  .. 'fill="white"/>', ('<text x="%d" y="24">largest GPT that fits, %d rows of a process, %s</text>'):format(LEFT,
  args.batch, args.precision) }
for i, machine in ipairs(machines) do
  local y, row = 36 + (i - 1) * BAR, largest[machine]
  svg[#svg + 1] = ('<text x="%d" y="%d" text-anchor="end">%s</text>'):format(LEFT - 10, y + 18, machine)
  if row then
    local length = row.parameters / most * WIDTH
    svg[#svg + 1] = ('<rect x="%d" y="%d" width="%.1f" height="24" fill="#3385fe"/>'):format(LEFT, y, length)
    svg[#svg + 1] = ('<text x="%.1f" y="%d">%.4g G</text>'):format(LEFT + length + 8, y + 18, row.parameters / 1e9)
  else
    svg[#svg + 1] = ('<text x="%d" y="%d">none of them</text>'):format(LEFT + 8, y + 18)
  end
end
write("scale.svg", table.concat(svg, "\n") .. "\n</svg>\n")

-- The plot speed.svg has a group of bars for each model size. A group has one bar per machine. A bar extends from the
-- lowest to the highest planned rate.
local COLORS = { "#3385fe", "#e8b31a", "#4cb050", "#d04a4a", "#8a63d2", "#888888" }
local GROUP, HEIGHT = math.max(100, 26 * #machines + 20), 300
local top = 0
for _, row in ipairs(rows) do top = math.max(top, row.rates and row.rates[2] or 0) end
local round = 10 ^ math.floor(math.log(math.max(top, 1e-9)) / math.log(10))
top = 4 * math.ceil(top / round * 5 / 4) * round / 5        -- four grid lines at round numbers
if top > 0 then
  svg = { ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="13">')
    :format(90 + #columns * GROUP, HEIGHT + 110), '<rect width="100%" height="100%" fill="white"/>',
    ('<text x="60" y="20">planned TFLOP/s of all processes, %d rows of a process, %s</text>'):format(args.batch,
      args.precision) }
  local function y_of(rate) return 50 + HEIGHT * (1 - rate / top) end
  for i = 0, 4 do
    local y = y_of(top * i / 4)
    svg[#svg + 1] = ('<path d="M60 %.1fH%d" stroke="#ddd"/><text x="54" y="%.1f" text-anchor="end">%.4g</text>'):format(
      y, 70 + #columns * GROUP, y + 4, top * i / 4)
  end
  local at = {}
  for i, name in ipairs(columns) do
    at[name] = 70 + (i - 1) * GROUP
    svg[#svg + 1] = ('<text x="%d" y="%d">%s</text>'):format(at[name], HEIGHT + 70, name)
  end
  for m, machine in ipairs(machines) do
    local color = COLORS[(m - 1) % #COLORS + 1]
    svg[#svg + 1] = ('<rect x="%d" y="%d" width="12" height="12" fill="%s"/><text x="%d" y="%d">%s</text>'):format(
      60 + (m - 1) * 120, HEIGHT + 86, color, 78 + (m - 1) * 120, HEIGHT + 97, machine)
    for _, row in ipairs(rows) do
      if row.machine == machine and row.rates then
        svg[#svg + 1] = ('<rect x="%d" y="%.1f" width="22" height="%.1f" fill="%s"/>'):format(
          at[row.model] + (m - 1) * 26, y_of(row.rates[2]), y_of(row.rates[1]) - y_of(row.rates[2]), color)
      end
    end
  end
  write("speed.svg", table.concat(svg, "\n") .. "\n</svg>\n")
end
print()
print(("%-12s %-18s %s"):format("machine", "largest model", "parameters"))
for _, machine in ipairs(machines) do
  local row = largest[machine]
  print(("%-12s %-18s %s"):format(machine, row and row.model or "none", row
    and ("%.4g G"):format(row.parameters / 1e9) or "-"))
end
print(("\nwrote scale.csv, scale.md, scale.svg%s into %s"):format(top > 0 and ", speed.svg" or "", args.out))
