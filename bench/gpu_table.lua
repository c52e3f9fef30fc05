-- SPDX-License-Identifier: BSD-3-Clause
-- Prints the figures of bench/gpu_check.sh next to their targets.
--   psluajit bench/gpu_table.lua --figures FILE            prints each JSON line in a short form
--   psluajit bench/gpu_table.lua --part PART PART.tsv      prints a table from lines "row<TAB>JSON", or nothing if PART
--                                                          has no table
--   psluajit bench/gpu_table.lua --kernels FILE.csv        prints the kernels that Nsight Compute timed, summed by name
--                                                          and grid
-- A ratio above 1 means that psluajit is better. If a program has several lines for one figure, the fastest line is
-- used.
local cjson = require "cjson"

local SHOWN = { "how", "kind", "model", "layers", "parameters", "batch", "n", "tflops", "head", "forward_ms", "both_ms",
  "forward_tflops", "both_tflops", "way", "gb_per_s", "tokens_per_s", "step_s", "mfu", "engine_peak_mib", "peak_mib",
  "device_memory", "compute_s", "copies_s", "over_bound", "link_share", "link_up_gb_per_s", "link_down_gb_per_s",
  "gb_up", "gb_down", "same_losses", "host_bytes_a_parameter" }

local function short(value)
  return type(value) == "number" and (value % 1 == 0 and "%.0f" or "%.4g"):format(value) or tostring(value)
end

local function figures(path)
  for line in io.lines(path) do
    local ok, d = pcall(cjson.decode, line)
    local parts = {}
    for _, key in ipairs(ok and SHOWN or {}) do
      if d[key] ~= nil and d[key] ~= cjson.null then parts[#parts + 1] = key .. " " .. short(d[key]) end
    end
    print(table.concat(parts, "  "))
  end
end

-- Returns the rows of a file. Each row is { name =, figures... }.
local function read(path)
  local rows = {}
  for line in io.lines(path) do
    local name, text = line:match("^([^\t]*)\t(.*)$")
    local ok, d = pcall(cjson.decode, text or "")
    if ok and type(d) == "table" then
      d.name = name
      rows[#rows + 1] = d
    end
  end
  return rows
end

-- Returns the row with the largest row[key]. Considers only the rows for which take(row) returns true.
local function best(rows, key, take)
  local found
  for _, row in ipairs(rows) do
    if take(row) and type(row[key]) == "number" and (not found or row[key] > found[key]) then found = row end
  end
  return found
end

local function put(what, ours, peer, ratio, goal, verdict)
  print(("%-42s %12s %12s %7s %7s  %s"):format(what, ours or "-", peer or "-", ratio and ("%.3f"):format(ratio) or "-",
    goal, verdict or not ratio and "NO FIGURE" or ratio >= tonumber(goal) and "reached" or "SHORT"))
end

local function against(what, ours, peer, key, goal, note)
  put(what, ours and short(ours[key]), peer and short(peer[key]), ours and peer and ours[key] / peer[key], goal)
  if note and peer then print("    peer: " .. note(peer)) end
end

local function is_peer(row) return row.peer ~= nil end

local parts = {}

function parts.speed(rows)
  local ceiling = 0  -- the largest TFLOP/s that any program reaches in matrix products
  for _, row in ipairs(rows) do
    ceiling = math.max(ceiling, row.what == "matmul" and row.tflops or 0, (row.gemm_peak_gflops or 0) / 1e3)
  end
  print(("ceiling: %.4g TFLOP/s, the best product of matrices of this run"):format(ceiling))
  local models, seen = {}, {}
  for _, row in ipairs(rows) do
    if row.what == "train" or row.mfu or row.tokens_per_s then
      if not seen[row.model] then models[#models + 1] = row.model end
      seen[row.model] = true
    end
  end
  for _, model in ipairs(models) do
    local function of(peer) return function(row) return row.model == model and is_peer(row) == peer end end
    local ours, peer = best(rows, "tokens_per_s", of(false)), best(rows, "tokens_per_s", of(true))
    against(model .. ", tokens/s", ours, peer, "tokens_per_s", "1.1", function(row)
      return ("%s, %s, batch %d"):format(row.peer, row.how, row.batch)
    end)
    local rate = ours and 6 * ours.parameters * ours.tokens_per_s / 1e12
    put(model .. ", share of the ceiling (6 N FLOPs per token)", rate and ("%.4g"):format(rate),
      ("%.4g"):format(ceiling),
      rate and ceiling > 0 and rate / ceiling or nil, "0.6")
  end
  for _, head in ipairs { 64, 128 } do
    for _, way in ipairs { "forward", "both" } do
      local key = way .. "_tflops"
      local function of(kind) return function(row) return row.head == head and row.kind == kind end end
      local ours = best(rows, key, of(nil))
      local what = ("attention, head %d, %s, TFLOP/s"):format(head, way == "both" and "fwd + bwd" or "forward")
      local flash = best(rows, key, of "flash")
      against(what, ours, flash, key, way == "both" and "1.0" or "0.8", function()
        local cudnn = best(rows, key, of "cudnn")
        return ("flash; the first goal is 0.8%s; ours: %s"):format(cudnn and (", cuDNN has %s (%.3f)"):format(
          short(cudnn[key]), ours and ours[key] / cudnn[key] or 0) or "", ours and ours.name or "none")
      end)
    end
  end
end

function parts.offload(rows)
  -- Speeds are compared in tokens times parameters per second, because a peer's model can have fewer layers.
  for _, row in ipairs(rows) do
    if row.tokens_per_s and row.parameters then row.work = row.tokens_per_s * row.parameters / 1e9 end
  end
  local ours = best(rows, "work", function(row) return not is_peer(row) and row.over_bound end)
  local peer = best(rows, "work", is_peer)
  against("state 3 x the budget, G tokens x params/s", ours, peer, "work", "2", function(row)
    return ("%s, %.3g B parameters, %.4g tokens/s; ours %s"):format(row.peer, row.parameters / 1e9, row.tokens_per_s,
      ours and ("%.4g"):format(ours.tokens_per_s) or "none")
  end)
  if not ours then return end
  local bound = ours.over_bound <= 1.15
  put("step over max(compute, copies)", ("%.3f s"):format(ours.step_s), ("%.3f s"):format(math.max(ours.compute_s,
    ours.copies_s)), ours.over_bound, "<=1.15", bound and "reached" or "SHORT")
  local idle = ours.copies_s < 0.85 * ours.compute_s
  put("copies while computing, of the link", ("%.3f s"):format(ours.copies_s), ("%.3f s"):format(ours.step_s),
    ours.link_share, "0.85", idle and "the computation is longer, so copies are not the bound" or nil)
  print(("    link by psluajit: %.4g GB/s up, %.4g down, both busy"):format(ours.link_up_gb_per_s,
    ours.link_down_gb_per_s))
  for _, row in ipairs(rows) do
    if row.what == "copy" then print(("    link by PyTorch: %s %.4g GB/s"):format(row.way, row.gb_per_s)) end
  end
  print("    same losses as with everything on the device: " .. tostring(ours.same_losses))
end

function parts.largest(rows)
  local ours = best(rows, "parameters", function(row) return not is_peer(row) end)
  local peer = { parameters = 100 * 2 ^ 30 / 16 }
  against("largest that trains, parameters", ours, peer, "parameters", "2", function()
    return "by count: fp32 parameters, gradients and two moments, 16 bytes, in 100 GiB of host memory"
  end)
end

local function fields_of(line)
  local fields = {}
  for text in line:gmatch '"([^"]*)"' do fields[#fields + 1] = text end
  return fields
end

local function kernels(path)
  local columns, sums, order, total = nil, {}, {}, 0
  for line in io.lines(path) do
    local fields = fields_of(line)
    if columns and #fields > 10 then
      local function of(name) return fields[columns[name]] end
      local ns = tonumber((of "Metric Value":gsub(",", "")))
      local key = ("%s %s x %s"):format(of "Kernel Name":gsub("%s+", " "):sub(1, 110), of "Grid Size", of "Block Size")
      if not sums[key] then
        sums[key] = { key = key, calls = 0, ns = 0 }
        order[#order + 1] = sums[key]
      end
      sums[key].calls, sums[key].ns, total = sums[key].calls + 1, sums[key].ns + ns, total + ns
    elseif fields[1] == "ID" then
      columns = {}
      for i, name in ipairs(fields) do columns[name] = i end
    end
  end
  table.sort(order, function(a, b) return a.ns > b.ns end)
  for i = 1, math.min(#order, 60) do
    local s = order[i]
    print(("%6.2f %%  %5d calls  %9.1f us each  %s"):format(100 * s.ns / total, s.calls, s.ns / s.calls / 1e3, s.key))
  end
  print(("all: %.3f ms"):format(total / 1e6))
end

if arg[1] == "--kernels" and arg[2] then kernels(arg[2])
elseif arg[1] == "--figures" and arg[2] then figures(arg[2])
elseif arg[1] == "--part" and arg[3] then
  if parts[arg[2]] then
    print(("\n%-42s %12s %12s %7s %7s"):format("what", "psluajit", "peer", "ratio", "goal"))
    parts[arg[2]](read(arg[3]))
  end
else
  io.stderr:write("gpu_table.lua takes --figures FILE, or --part PART FILE\n")
  os.exit(2, true)
end
