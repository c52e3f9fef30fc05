-- SPDX-License-Identifier: BSD-3-Clause
-- Draws a profile with gnuplot, as SVG or PNG. There are two figures, as in PatrickStar. One figure shows the memory
-- use of a tier over time. The other figure shows the tier of each chunk over time.
local read = require "ps.profile.read"
local write_file = require "ps.core.write_file"

local draw = {}

local MIB = 2 ^ 20
local BANDS = { { "forward", "#2ca02c" }, { "backward", "#1f77b4" }, { "adam", "#9467bd", "Adam" } }
local ORDER = { device = 1, host = 2, disk = 3 }
local TIERS = { device = "#e9616c", host = "#3385fe", disk = "#e6ab02" }      -- PatrickStar's red and blue

-- Returns a text in quotes, for a gnuplot script. Raises an error if the text contains a control character: a name from
-- an untrusted file might contain a line break, and gnuplot would run the next line as a command.
local function quote(text)
  if text:find "%c" then
    error(("gnuplot cannot draw the name '%s', which has control characters"):format((text:gsub("%c", "?"))), 0)
  end
  return "'" .. text:gsub("'", "''") .. "'"
end

-- Runs a gnuplot script that draws to the file `path`.
local function gnuplot(path, lines, height)
  if os.execute("command -v gnuplot >/dev/null 2>&1") ~= 0 then
    error("gnuplot is not installed (Debian's gnuplot-nox); --html does not need it", 0)
  end
  local f, why = io.open(path, "wb")  -- checked here, because gnuplot does not say why it cannot write a file
  if not f then error(("cannot write %s"):format(why), 0) end
  f:close()
  local svg = path:match "%.svg$"
  table.insert(lines, 1, ("set terminal %s size 1200,%d font 'sans,14' background rgb 'white'"):format(
    svg and "svg" or "pngcairo", height))
  table.insert(lines, 2, "set output " .. quote(path))
  local script, log = os.tmpname(), os.tmpname()
  local done, problem = write_file(script, table.concat(lines, "\n") .. "\n")
  if not done then error("cannot write " .. problem, 0) end
  local status = os.execute(("gnuplot '%s' >/dev/null 2>'%s'"):format(script, log))
  f = assert(io.open(log))
  local said = f:read "*a"
  f:close()
  os.remove(script)
  os.remove(log)
  f = io.open(path, "rb")
  local size = f and f:seek "end" or 0
  if f then f:close() end
  if status ~= 0 or size == 0 then
    error(("gnuplot could not draw %s: %s"):format(path, said:match "%S[^\n]*" or "no message"), 0)
  end
end

-- Adds a named block of data to a gnuplot script.
local function block(lines, name, rows)
  lines[#lines + 1] = ("$%s << EOD"):format(name)
  for _, row in ipairs(rows) do lines[#lines + 1] = row end
  lines[#lines + 1] = "EOD"
end

local function title_of(self, what)
  local first, last = self.steps[1], self.steps[#self.steps]
  return ("%s%s%s"):format(what, first and (", steps %d to %d"):format(first.step, last.step) or "",
    self.ranks > 1 and (", rank %d of %d"):format(self.rank, self.ranks) or "")
end

--- Returns a number as a text for a title. A number below 1000 is rounded to four significant digits, and any other
--- number to a whole number.
---@param n number
---@return string
function draw.figure(n) return (n < 1000 and "%.4g" or "%.0f"):format(n) end

--- Draws the memory use of a tier over time. There are three lines: the total, the chunks, and everything else. The
--- background shows bands for forward, backward and Adam.
---@param self ps.Profile
---@param tier ps.profile.Tier
---@param path string ends in .svg or .png
function draw.memory(self, tier, path)
  local lines, plots, rows = {}, {}, {}
  local most, at = read.peak(tier)
  local has_budget = tier.budget > 0 and tier.budget <= 2 * most         -- a larger budget would flatten the lines
  local top = math.max(most * 1.1, has_budget and tier.budget * 1.05 or 1) / MIB
  local function ms(time) return (time - self.begin) / 1e3 end
  for _, band in ipairs(BANDS) do
    local list = {}
    for _, b in ipairs(self.bands) do
      if b.kind == band[1] then
        list[#list + 1] = ("%.6f 0 %.6f %.6f 0 %.9g"):format(ms(b.begin), ms(b.begin), ms(b.finish), top)
      end
    end
    if list[1] then
      block(lines, band[1], list)
      plots[#plots + 1] = ("$%s using 1:2:3:4:5:6 with boxxyerror fc rgb '%s' fs transparent solid 0.2 noborder "
        .. "title '%s'"):format(band[1], band[2], band[3] or band[1])
    end
  end
  for i, time in ipairs(tier.times) do
    rows[i] = ("%.6f %.9g %.9g %.9g"):format(ms(time), (tier.held[i] + tier.other[i]) / MIB, tier.held[i] / MIB,
      tier.other[i] / MIB)
  end
  local n = #rows
  rows[n + 1] = ("%.6f %s"):format(ms(self.finish), rows[n]:match " (.*)$")        -- the last values remain valid until
                                                                                   -- the profile ends
  block(lines, "memory", rows)
  for column, name in ipairs { "total", "chunks", "other" } do
    plots[#plots + 1] = ("$memory using 1:%d with steps lw 2 lc rgb '%s' title '%s'"):format(column + 1,
      ({ "#d62728", "#1f77b4", "#ff7f0e" })[column], name)
  end
  if has_budget then
    plots[#plots + 1] = ("%.9g with lines dt 2 lc rgb '#555555' title 'budget'"):format(tier.budget / MIB)
  end
  local function set(...) lines[#lines + 1] = "set " .. (...):format(select(2, ...)) end
  set("title %s noenhanced", quote(("%s; peak %s MiB at %s ms"):format(title_of(self, tier.name .. " memory"),
    draw.figure(most / MIB), draw.figure(ms(at)))))
  set "xlabel 'time / ms'"
  set "ylabel 'memory / MiB'"
  set("xrange [0:%.9g]", math.max(ms(self.finish), 1e-6))
  set("yrange [0:%.9g]", top)
  set "key outside right top noenhanced"
  set "grid"
  lines[#lines + 1] = "plot " .. table.concat(plots, ", \\\n  ")
  gnuplot(path, lines, 600)
end

--- Draws the tier of each chunk over time. Each chunk is a horizontal row, whose colour shows the fastest tier on which
--- the chunk has memory. The rows are ordered by the chunks' kinds, from the bottom to the top.
---@param self ps.Profile
---@param path string ends in .svg or .png
function draw.access(self, path)
  if not self.chunks[1] then
    error(self.path .. " has no chunks: memory.kind was plain, or there was no engine", 0)
  end
  local by_tier, names, tics, seams, lines, plots = {}, {}, {}, {}, {}, {}
  local function ms(time) return (time - self.begin) / 1e3 end
  local first = 1
  for row, chunk in ipairs(self.chunks) do
    local following = self.chunks[row + 1]
    if not following or following.kind ~= chunk.kind then
      tics[#tics + 1] = ("%s %.1f"):format(quote(chunk.kind), (first - 1 + row) / 2)
      if following then seams[#seams + 1] = row end
      first = row + 1
    end
    for i, time in ipairs(chunk.times) do
      local tier, finish = chunk.on[i], chunk.times[i + 1] or self.finish
      if tier then
        if not by_tier[tier] then
          by_tier[tier] = {}
          names[#names + 1] = tier
        end
        local list = by_tier[tier]
        list[#list + 1] = ("%.6f %g %.6f %.6f %g %g"):format(ms(time), row, ms(time), ms(finish), row - 1, row)
      end
    end
  end
  table.sort(names, function(a, b) return (ORDER[a] or 4) < (ORDER[b] or 4) end)
  for i, name in ipairs(names) do
    block(lines, "tier" .. i, by_tier[name])
    plots[i] = ("$tier%d using 1:2:3:4:5:6 with boxxyerror fc rgb '%s' fs solid 0.9 noborder title %s"):format(i,
      TIERS[name] or "#888888", quote(name))
  end
  if not plots[1] then plots[1] = "-1 notitle" end
  local function set(...) lines[#lines + 1] = "set " .. (...):format(select(2, ...)) end
  set("title %s noenhanced", quote(title_of(self, ("where %d chunks are"):format(#self.chunks))))
  set "xlabel 'time / ms'"
  set("xrange [0:%.9g]", math.max(ms(self.finish), 1e-6))
  set("yrange [0:%d]", #self.chunks)
  set("ytics (%s) noenhanced", table.concat(tics, ", "))
  set "lmargin 14"
  for _, row in ipairs(seams) do
    set("arrow from graph 0, first %d to graph 1, first %d nohead lc rgb 'black' front", row, row)
  end
  set "key outside right top noenhanced"
  lines[#lines + 1] = "plot " .. table.concat(plots, ", \\\n  ")
  gnuplot(path, lines, math.max(300, math.min(1600, 120 + 12 * #self.chunks)))
end

return draw
