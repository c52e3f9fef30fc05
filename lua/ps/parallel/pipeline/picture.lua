-- SPDX-License-Identifier: BSD-3-Clause
-- Draws a pipeline's table as text, as SVG, or as PNG (with gnuplot). Each rank has a lane that shows its actions over
-- time. Below the lane is the number of (virtual stage, micro-batch) pairs that the rank holds.
local caller = require "ps.core.caller"
local write_file = require "ps.core.write_file"

local picture = {}

-- The colours of forwards, whole backwards, input gradients and weight gradients. Colour i is for the i-th virtual
-- stage of a rank.
local COLOURS = {
  F = { "#9ecae1", "#4292c6", "#2171b5", "#084594" }, B = { "#c7e9c0", "#74c476", "#238b45", "#00441b" },
  I = { "#fdd0a2", "#fdae6b", "#f16913", "#a63603" }, W = { "#dadaeb", "#9e9ac8", "#807dba", "#54278f" },
}
local LEFT, TOP, WIDTH, LANE, HELD, GAP = 70, 34, 1130, 26, 22, 12

-- Returns whether an action is drawn. Transfers and yields are not drawn, because they use no compute time of a rank.
local function is_work(action) return COLOURS[action.kind] ~= nil end

local function label(t, action)
  local micro = action.kind .. action.micro
  return t.virtual_stages > 1 and action.vstage .. micro or micro
end

--- Returns the picture as text with one column per tick. Returns nil if an action begins or ends between two ticks.
---@param t ps.pipe.Table
---@param course ps.pipe.Course
---@param most? integer largest number of columns (default 400); if the picture is wider, the function returns nil
---@return string?
function picture.text(t, course, most)
  local wide = 0
  for rank = 0, t.stages - 1 do
    for _, action in ipairs(t:row(rank)) do
      if is_work(action) then wide = math.max(wide, #label(t, action) + 1) end
    end
  end
  if course.makespan * wide > (most or 400) then return nil end
  local lines = {}
  for rank = 0, t.stages - 1 do
    local cells, at = {}, 0
    for i, action in ipairs(t:row(rank)) do
      local span = course.spans[rank + 1][i]
      if is_work(action) then
        if span.begin % 1 ~= 0 or span.finish % 1 ~= 0 then return nil end
        cells[#cells + 1] = (" "):rep((span.begin - at) * wide)
        local text, room = label(t, action), (span.finish - span.begin) * wide
        cells[#cells + 1] = room > 0 and text .. ("-"):rep(room - #text - 1) .. " " or ""
        at = span.finish
      end
    end
    lines[#lines + 1] = (("rank %-3d %s"):format(rank, table.concat(cells)):gsub("%s+$", ""))
  end
  return table.concat(lines, "\n") .. "\n"
end

-- Returns the times at which the number of (virtual stage, micro-batch) pairs that a rank holds changes, and the
-- changes. A pair is held from its forward until its B or I. After I, it is held until W.
local function changes(t, course, rank)
  local list = {}
  for i, action in ipairs(t:row(rank)) do
    local span = course.spans[rank + 1][i]
    if action.kind == "F" then list[#list + 1] = { span.begin, 1, 0 } end
    if action.kind == "B" or (t.forward_only and action.kind == "F") then list[#list + 1] = { span.finish, -1, 0 } end
    if action.kind == "I" then list[#list + 1] = { span.finish, -1, 1 } end
    if action.kind == "W" then list[#list + 1] = { span.finish, 0, -1 } end
  end
  return list
end

-- Returns the shapes to draw. Positions are in pixels from the top left corner. A shape is { "rect", x, y, width,
-- height, colour } or { "text", x, y, text, anchor, size }, where anchor is "start" or "middle".
local function shapes(t, course)
  local list, scale = {}, WIDTH / math.max(course.makespan, 1e-30)
  local function add(...) list[#list + 1] = { ... } end
  add("text", LEFT, 20, ("%s: %d stages, %d virtual stages, %d micro-batches; makespan %.6g, bubble %.1f %%"):format(
    t.schedule, t.stages, t.vstages, t.micro_batches, course.makespan, 100 * course.bubble), "start", 14)
  local most, tops = 1, {}
  for rank = 0, t.stages - 1 do
    local holds, top = 0, 0
    for _, change in ipairs(changes(t, course, rank)) do
      holds = holds + change[2] + change[3]
      top = math.max(top, holds)
    end
    most, tops[rank] = math.max(most, top), top
  end
  for rank = 0, t.stages - 1 do
    local y = TOP + rank * (LANE + HELD + GAP)
    add("text", 8, y + 17, "rank " .. rank, "start", 12)
    add("rect", LEFT, y, WIDTH, LANE, "#eeeeee")
    for i, action in ipairs(t:row(rank)) do
      local span = course.spans[rank + 1][i]
      if is_work(action) and span.finish > span.begin then
        local _, index = t:place(action.vstage)
        local shades, width, text = COLOURS[action.kind], (span.finish - span.begin) * scale, label(t, action)
        local x = LEFT + span.begin * scale
        add("rect", x, y, math.max(width - 1, 0.5), LANE, shades[index % #shades + 1])
        if width > 8 * #text then add("text", x + width / 2, y + 17, text, "middle", 11) end
      end
    end
    local in_flight, waiting, from = 0, 0, 0
    local function bar(to)
      local x, width, unit = LEFT + from * scale, (to - from) * scale, (HELD - 2) / most
      if in_flight > 0 then
        add("rect", x, y + LANE + 2 + HELD - 2 - in_flight * unit, width, in_flight * unit, "#969696")
      end
      if waiting > 0 then
        add("rect", x, y + LANE + 2 + HELD - 2 - (in_flight + waiting) * unit, width, waiting * unit, "#9e9ac8")
      end
      from = to
    end
    for _, change in ipairs(changes(t, course, rank)) do
      if change[1] > from then bar(change[1]) end
      in_flight, waiting = in_flight + change[2], waiting + change[3]
    end
    add("text", 8, y + LANE + 16, ("holds %d"):format(tops[rank]), "start", 10)
  end
  return list, LEFT + WIDTH + 20, TOP + t.stages * (LANE + HELD + GAP) + 6
end

--- Returns the picture as the contents of an SVG file.
---@param t ps.pipe.Table
---@param course ps.pipe.Course
---@return string
function picture.svg(t, course)
  local list, width, height = shapes(t, course)
  local out = { ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif">'):format(
    width, height), '<rect width="100%" height="100%" fill="white"/>' }
  for _, s in ipairs(list) do
    if s[1] == "rect" then
      out[#out + 1] = ('<rect x="%.2f" y="%.2f" width="%.2f" height="%.2f" fill="%s"/>'):format(unpack(s, 2))
    else
      out[#out + 1] = ('<text x="%.2f" y="%.2f" text-anchor="%s" font-size="%d">%s</text>'):format(s[2], s[3], s[5],
        s[6], s[4])
    end
  end
  out[#out + 1] = "</svg>\n"
  return table.concat(out, "\n")
end

local function quote(text) return "'" .. text:gsub("'", "''") .. "'" end

--- Draws the picture into a PNG file with gnuplot. If gnuplot is not installed or fails, returns nil and the reason.
---@param path string
---@param t ps.pipe.Table
---@param course ps.pipe.Course
---@return boolean? ok
---@return string? why
function picture.png(path, t, course)
  caller.typed(path, "string", "picture.png: the path")
  if os.execute("command -v gnuplot >/dev/null 2>&1") ~= 0 then return nil, "gnuplot is not installed" end
  local list, width, height = shapes(t, course)
  local out = { ("set terminal pngcairo size %d,%d font 'sans,9'"):format(width, height), "set output " .. quote(path),
    "unset border; unset tics; unset key; set margins 0,0,0,0",
    ("set xrange [0:%d]; set yrange [%d:0]"):format(width, height) }
  for _, s in ipairs(list) do
    if s[1] == "rect" then
      out[#out + 1] = ("set object rect from %.2f,%.2f to %.2f,%.2f fc rgb '%s' fs solid noborder"):format(s[2], s[3],
        s[2] + s[4], s[3] + s[5], s[6])
    else
      out[#out + 1] = ("set label %s at %.2f,%.2f %s font ',%d' noenhanced"):format(quote(s[4]), s[2],
        s[3] - s[6] * 0.35, s[5] == "middle" and "center" or "left", s[6] * 0.75)
    end
  end
  out[#out + 1] = "plot -1 notitle"
  local script = os.tmpname()
  local done, why = write_file(script, table.concat(out, "\n") .. "\n")
  if not done then return nil, "cannot write " .. why end
  local status = os.execute(("gnuplot '%s' >/dev/null 2>&1"):format(script))
  os.remove(script)
  if status ~= 0 then return nil, "gnuplot failed" end
  return true
end

return picture
