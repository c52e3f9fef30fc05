-- SPDX-License-Identifier: BSD-3-Clause
-- Computes a lower bound of the number of bytes that any policy moves in a step that is repeated. The bound is the
-- solution of a linear program, which glpsol solves (Debian: glpk-utils). A chunk has a gap between each two successive
-- uses. For each gap, the program has a variable in [0, 1]. It is the share of the chunk that stays in memory during
-- the gap. At each moment, the shares that stay and the chunks in use must fit into the capacity. The share that does
-- not stay must be read again. Between two writes of the chunk, this share must also be written back once. The model
-- includes the sizes of chunks, writing back, and gaps that extend over the end of the step. The model ignores that
-- chunks cannot be split, so the result is a lower bound.
local ps = require "ps"
local ffi, C = ps.ffi, ps.C

local bound = {}

---@class bound.use
---@field moment integer
---@field chunk integer
---@field write boolean
---@field ends? boolean         true if the chunk's contents are not needed after this use

---@class bound.trace
---@field sizes number[]        the size of each chunk in bytes, indexed from 1
---@field uses bound.use[]      the uses of chunks, sorted by moment
---@field moments integer       the number of moments, which are counted from 0

--- Returns three values for the open engine: the trace of a step, the number of bytes that chunks can use on the first
--- tier, and the size in bytes of the tensors outside chunks. The second value is the budget of the tier minus the
--- third value.
---@param engine ps.Engine the engine's own table, as returned by ps.nn.handle
---@return bound.trace trace
---@return number capacity
---@return number other
function bound.trace_of(engine)
  local _, id = next(engine.traces)
  if not id then error("no step has been traced", 0) end
  local about, info, tier = ffi.new "ps_trace_info", ffi.new "ps_chunk_info", ffi.new "ps_tier_info"
  ps.check(C.ps_engine_trace_get(ps.ctx, id, about, 0, nil))
  local uses = ffi.new("ps_use[?]", about.n_uses + 1)
  ps.check(C.ps_engine_trace_get(ps.ctx, id, about, about.n_uses, uses))
  local trace = { sizes = {}, uses = {}, moments = about.n_moments }
  for i = 0, about.n_uses - 1 do
    trace.uses[i + 1] = { moment = uses[i].moment, chunk = uses[i].chunk + 1, write = uses[i].write == 1,
      ends = uses[i].ends == 1 }
  end
  for chunk = 0, C.ps_engine_chunk_count(ps.ctx) - 1 do
    ps.check(C.ps_engine_chunk_get(ps.ctx, chunk, info))
    trace.sizes[chunk + 1] = tonumber(info.nbytes)
  end
  ps.check(C.ps_engine_tier_get(ps.ctx, 0, tier))
  local other = tonumber(about.other[0])
  return trace, tonumber(tier.budget) - other, other
end

--- Returns the gaps of a trace. The fields `first` and `last` of a gap are the moments of two successive uses of its
--- chunk. `last` can be in the next step. `stretch` is a number that is the same for all gaps between two successive
--- writes of the chunk. It is nil if the chunk is never written.
---@param trace bound.trace
---@return table[] gaps
---@return integer stretches
local function gaps_of(trace)
  local by_chunk, gaps, stretches = {}, {}, 0
  for _, use in ipairs(trace.uses) do
    by_chunk[use.chunk] = by_chunk[use.chunk] or {}
    table.insert(by_chunk[use.chunk], use)
  end
  for chunk, uses in pairs(by_chunk) do
    local last_write
    for i, use in ipairs(uses) do if use.write then last_write = i end end
    local current = last_write and stretches + 1
    if last_write then stretches = stretches + 1 end
    local opening = current                       -- the stretch that began in the previous step
    for i, use in ipairs(uses) do
      if use.write then
        if i == last_write then
          current = opening
        else
          stretches = stretches + 1
          current = stretches
        end
      end
      local next_use = uses[i + 1]
      if not use.ends then                        -- otherwise the next use does not read the contents, so there is no
                                                  -- gap
        gaps[#gaps + 1] = { chunk = chunk, first = use.moment, stretch = current,
          last = next_use and next_use.moment or uses[1].moment + trace.moments }
      end
    end
  end
  return gaps, stretches
end

--- Writes the linear program in CPLEX's format. Each moment has a row for the capacity. The row contains only the
--- difference from the previous moment's row, so that each gap is in only two rows.
---@param trace bound.trace
---@param capacity number
---@param f file*
local function write_program(trace, capacity, f)
  local gaps, stretches = gaps_of(trace)
  local rows, used = {}, {}
  for m = 0, trace.moments do rows[m], used[m] = {}, 0 end
  for _, use in ipairs(trace.uses) do used[use.moment] = used[use.moment] + trace.sizes[use.chunk] end
  local unit = 2 ^ 20
  f:write("Minimize\n cost:")
  local written = {}
  for i, gap in ipairs(gaps) do
    local size = trace.sizes[gap.chunk] / unit
    f:write((" + %.9g d%d\n"):format(size, i))              -- d is the fraction that does not stay, 1 - kept
    if gap.stretch and not written[gap.stretch] then
      written[gap.stretch] = true
      f:write((" + %.9g w%d\n"):format(size, gap.stretch))
    end
    -- Records that the bytes that stay use memory from moment `from` to the moment before `to`.
    local function span(from, to)
      if from >= to then return end
      table.insert(rows[from], { i, size })
      table.insert(rows[to], { i, -size })
    end
    span(gap.first + 1, math.min(gap.last, trace.moments))
    if gap.last > trace.moments then span(0, gap.last - trace.moments) end
  end
  f:write("Subject To\n")
  for m = 0, trace.moments - 1 do
    local terms, right = { (" c%d: + s%d"):format(m, m) }, capacity - used[m]
    if m > 0 then
      terms[#terms + 1] = (" - s%d"):format(m - 1)
      right = right - (capacity - used[m - 1])
    end
    right = right / unit
    for _, entry in ipairs(rows[m]) do                      -- adds size * (1 - d); the constant `size` is on the other
                                                            -- side of the row
      terms[#terms + 1] = ("\n %s %.9g d%d"):format(entry[2] > 0 and "-" or "+", math.abs(entry[2]), entry[1])
      right = right - entry[2]
    end
    f:write(table.concat(terms), (" = %.9g\n"):format(right))
  end
  for i, gap in ipairs(gaps) do
    if gap.stretch then f:write((" v%d: w%d - d%d >= 0\n"):format(i, gap.stretch, i)) end
  end
  f:write("Bounds\n")
  for i in ipairs(gaps) do f:write((" 0 <= d%d <= 1\n"):format(i)) end
  for i = 1, stretches do f:write((" 0 <= w%d <= 1\n"):format(i)) end
  for m = 0, trace.moments - 1 do f:write((" s%d >= 0\n"):format(m)) end
  f:write("End\n")
  return unit
end

--- Returns true if glpsol is installed.
---@return boolean
function bound.available()
  return os.execute("command -v glpsol >/dev/null 2>&1") == 0
end

--- Returns the lower bound of the bytes that a step moves. If the solver finds no solution, returns nil and the reason.
---@param trace bound.trace
---@param capacity number
---@param seconds? integer time limit for the solver
---@return number? bytes
---@return string? reason
function bound.solve(trace, capacity, seconds)
  local name = os.tmpname()
  local f = assert(io.open(name, "w"))
  local unit = write_program(trace, capacity, f)
  f:close()
  local p = assert(io.popen(("timeout %d glpsol --lp %s --tmlim %d -o /dev/stdout 2>&1"):format(
    (seconds or 120) + 10, name, seconds or 120)))
  local text = p:read("*a")
  p:close()
  os.remove(name)
  if not text:find("Status:%s+OPTIMAL") then return nil, text:match("Status:[^\n]*") or text:sub(-300) end
  return tonumber(text:match("Objective:%s+cost = (%S+)")) * unit
end

return bound
