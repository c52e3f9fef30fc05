-- SPDX-License-Identifier: BSD-3-Clause
-- Drawings of docs/how_memory_works.md, as SVG. tools/pictures.lua writes them.
local drawings = {}

local BLUE, GREEN, ORANGE, VIOLET, GREY = "#9ecae1", "#c7e9c0", "#fdd0a2", "#dadaeb", "#eeeeee"
local KINDS = { { "param", BLUE, 2 }, { "param_fp32", GREEN, 4 }, { "exp_avg", ORANGE, 4 },
  { "exp_avg_sq", VIOLET, 4 } }

local function canvas(width, height)
  local out = { ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" '
    .. 'font-size="13">'):format(width, height), '<rect width="100%" height="100%" fill="white"/>',
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    .. '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>' }
  local self = {}
  function self.rect(x, y, w, h, fill, stroke)
    out[#out + 1] = ('<rect x="%g" y="%g" width="%g" height="%g" fill="%s" stroke="%s"/>'):format(x, y, w, h, fill,
      stroke or "none")
  end
  function self.text(x, y, words, anchor, fill)
    out[#out + 1] = ('<text x="%g" y="%g" text-anchor="%s" fill="%s">%s</text>'):format(x, y, anchor or "start",
      fill or "#222", words)
  end
  function self.arrow(x1, y1, x2, y2)
    out[#out + 1] = ('<line x1="%g" y1="%g" x2="%g" y2="%g" stroke="#555" stroke-width="1.5" marker-end="url(#tip)"/>')
      :format(x1, y1, x2, y2)
  end
  function self.done() return table.concat(out, "\n") .. "\n</svg>\n" end
  return self
end

--- Draws the number of bytes per parameter for a bf16 model with AdamW, to scale. Each row is a unit, which is the
--- chunks of all kinds for the same parameters.
---@return string svg
function drawings.bytes()
  local c = canvas(760, 250)
  local left, scale = 110, 44
  c.text(left, 24, "bytes per parameter, bf16 with AdamW")
  for unit = 0, 2 do
    local x, y = left, 40 + unit * 46
    c.text(left - 10, y + 22, "chunk " .. unit, "end")
    for _, kind in ipairs(KINDS) do
      c.rect(x, y, kind[3] * scale - 3, 34, kind[2], "#888")
      c.text(x + 8, y + 22, ("%s, %d"):format(kind[1], kind[3]))
      x = x + kind[3] * scale
    end
  end
  c.text(20, 200, "The same parameters are in chunk 0 of every kind: this row is a unit, which one update changes.")
  c.text(20, 222, "The gradient takes the parameter's own place between backward and update: 2 + 4 + 4 + 4 = 14 bytes.")
  return c.done()
end

--- Draws the tiers, and the two directions in which chunks move between them.
---@return string svg
function drawings.tiers()
  local c = canvas(760, 330)
  local rows = {
    { "device", "what the running op reads and writes, and chunks that are needed soon", { 1, 1, 2, 3 } },
    { "host", "chunks that are needed later in the step", { 1, 1, 2, 2, 3, 4 } },
    { "disk", "one file, with a place for every chunk", { 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4 } },
  }
  for i, row in ipairs(rows) do
    local y = 20 + (i - 1) * 105
    c.rect(20, y, 560, 70, GREY, "#888")
    c.text(32, y + 20, row[1])
    c.text(100, y + 20, row[2], "start", "#555")
    for at, kind in ipairs(row[3]) do c.rect(32 + (at - 1) * 44, y + 32, 38, 26, KINDS[kind][2], "#888") end
    if i < #rows then
      c.arrow(200, y + 103, 200, y + 73)
      c.text(212, y + 92, "fetch")
      c.arrow(400, y + 72, 400, y + 102)
      c.text(412, y + 92, "evict")
    end
  end
  for at, kind in ipairs(KINDS) do
    c.rect(610, 24 + (at - 1) * 28, 20, 18, kind[2], "#888")
    c.text(638, 38 + (at - 1) * 28, kind[1])
  end
  return c.done()
end

-- Returns the moments at which forward and backward use each of four parameter chunks. Forward has the moments 1 to 4,
-- and backward has the moments 5 to 8.
local function course()
  local rows = {}
  for chunk = 1, 4 do rows[chunk] = { forward = chunk, backward = 9 - chunk } end
  return rows
end

--- Draws a step over time: the chunk that each op uses, and the moves that a plan begins before a chunk is used.
---@return string svg
function drawings.step()
  local c = canvas(760, 300)
  local left, width, top, height = 110, 72, 60, 44
  local function x_of(moment) return left + (moment - 1) * width end
  c.rect(x_of(1), 26, 4 * width, 22, "#d9f0d3")
  c.text(x_of(1) + 8, 42, "forward")
  c.rect(x_of(5), 26, 4 * width, 22, "#d1e5f0")
  c.text(x_of(5) + 8, 42, "backward and update")
  for chunk, row in ipairs(course()) do
    local y = top + (chunk - 1) * height
    c.text(left - 10, y + 24, "chunk " .. chunk - 1, "end")
    c.rect(left, y + 6, 8 * width, 28, GREY)
    local spans = { { row.forward, row.forward }, { row.backward, row.backward } }
    if row.backward - row.forward <= 3 then spans = { { row.forward, row.backward } } end
    for _, span in ipairs(spans) do
      if span[1] > 1 then
        c.rect(x_of(span[1] - 1), y + 13, width, 14, "#fee391", "#888")
        c.text(x_of(span[1] - 1) + 8, y + 25, "fetch")
      end
      c.rect(x_of(span[1]), y + 6, (span[2] - span[1] + 1) * width, 28, BLUE, "#888")
    end
    for _, moment in ipairs { row.forward, row.backward } do
      c.text(x_of(moment) + width / 2, y + 25, "use", "middle")
    end
  end
  for moment = 1, 8 do c.text(x_of(moment) + width / 2, 252, tostring(moment), "middle", "#555") end
  c.text(left - 10, 252, "moment", "end", "#555")
  c.text(20, 282, "A fetch runs while the previous op computes. Between two uses, a chunk is evicted if others "
    .. "need the room.")
  return c.done()
end

return drawings
