-- SPDX-License-Identifier: BSD-3-Clause
-- The machine code, by objdump, of the vector kernels in which training spends its time: loops work in registers.
-- Vectors wider than the machine's are moved through the stack by GCC, which costs more than their arithmetic. Loops
-- over single numbers become vectors only where a pragma asks for it, since the build uses -O2. The plain build is
-- exempt.
local lfs = require "lfs"
local paths = require "ps.paths"

local BUILD = paths.exe:match("^(.*)/[^/]*$")
local SETS = { "avx2", "avx512" }
local FAMILIES = { "optim", "norm", "loss", "elementwise", "elementwise_copy", "attention", "reduce", "table",
  "dropout" }
-- The largest fraction of a loop's vector instructions that can use the stack, which also holds constants.
local SHARE = 0.3
-- Loops with fewer instructions are tails and short rows, and not a kernel's main loop.
local FEWEST = 16

--- Returns the functions of an object file: {name, list of {address, text}}.
local function functions(path)
  local all = {}
  local pipe = assert(io.popen(("objdump -d --no-show-raw-insn '%s' 2>/dev/null"):format(path)))
  for line in pipe:lines() do
    local name = line:match("^%x+ <([^>]+)>:$")
    if name then all[#all + 1] = { name = name } end
    local address, text = line:match("^%s*(%x+):%s+(.*)$")
    if address and #all > 0 then table.insert(all[#all], { address = address, text = text }) end
  end
  pipe:close()
  return all
end

--- Returns a function's innermost loops as first and last instruction. Loops that call functions are skipped, since
--- they handle rows that end within a vector.
local function loops(f)
  local at, found, inner = {}, {}, {}
  for i, instruction in ipairs(f) do at[instruction.address] = i end
  for last, instruction in ipairs(f) do
    local first = at[instruction.text:match("^j%a+%s+(%x+)") or ""]
    if first and first <= last then found[#found + 1] = { first = first, last = last } end
  end
  for _, l in ipairs(found) do
    local holds = false
    for _, other in ipairs(found) do
      local within = other.first >= l.first and other.last <= l.last
      if within and (other.first > l.first or other.last < l.last) then holds = true end
    end
    for i = l.first, l.last do holds = holds or f[i].text:find("^call") ~= nil end
    if not holds then inner[#inner + 1] = l end
  end
  return inner
end

local function count(f, l)
  local vectors, stack = 0, 0
  for i = l.first, l.last do
    local text = f[i].text
    if text:find("[xyz]mm%d") then
      vectors = vectors + 1
      if text:find("%(%%r[sb]p") then stack = stack + 1 end
    end
  end
  return vectors, stack
end

--- Returns whether a loop without vectors adds fp32 numbers one by one and writes the sums to memory.
local function adds_in_memory(f, l)
  local adds, stores = false, false
  for i = l.first, l.last do
    local text = f[i].text
    if text:find("[yz]mm%d") then return false end
    adds = adds or text:find("^vaddss") ~= nil
    stores = stores or text:find("^vmovss%s+%%xmm%d+,.*%(") ~= nil
  end
  return adds and stores
end

local function object(set, family)
  return ("%s/CMakeFiles/ps_simd_%s.dir/src/backend/cpu/simd/%s.c.o"):format(BUILD, set, family)
end

--- Returns the reason why this build cannot be examined, or nil.
local function obstacle()
  local cache = io.open(BUILD .. "/CMakeCache.txt")
  if not cache then return "no build folder around the program" end
  local text = cache:read "*a"
  cache:close()
  if text:find("PS_SANITIZE:[^=]*=%a") or not text:find("CMAKE_BUILD_TYPE:[^=]*=RelWithDebInfo") then
    return "a build for debugging"
  end
  if lfs.attributes(BUILD .. "/CMakeFiles/ps_simd_avx2.dir", "mode") ~= "directory" then return "no x86-64 machine" end
  if os.execute("command -v objdump >/dev/null 2>&1") ~= 0 then return "objdump is missing (binutils has it)" end
end

describe("machine code of the vector kernels", function()
  it("stays in registers in its loops", function()
    local why = obstacle()
    if why then return pending(why) end
    local wrong, seen = {}, {}
    for _, set in ipairs(SETS) do
      for _, family in ipairs(FAMILIES) do
        local path = object(set, family)
        for _, f in ipairs(functions(path)) do
          for _, l in ipairs(loops(f)) do
            local vectors, stack = count(f, l)
            if vectors >= FEWEST then
              seen[set .. family] = true
              if stack > SHARE * vectors then
                wrong[#wrong + 1] = ("%s, %s.c, %s at %s: %d of %d vector instructions touch the stack"):format(set,
                  family, f.name, f[l.first].address, stack, vectors)
              end
            end
          end
        end
        assert.truthy(seen[set .. family], "no loop was found in " .. path)
      end
    end
    assert.equal("", table.concat(wrong, "\n"))
  end)

  it("has vectors in reductions of rows", function()
    local why = obstacle()
    if why then return pending(why) end
    local wrong = {}
    for _, set in ipairs(SETS) do
      for _, family in ipairs { "loss", "norm", "reduce" } do
        local found = {}
        for _, f in ipairs(functions(object(set, family))) do
          for _, l in ipairs(loops(f)) do
            for i = l.first, l.last do found[f[i].text:match("^(vpmaxs[wd])%s+%%[yz]mm") or ""] = true end
            if adds_in_memory(f, l) and f.name ~= "nll_loss" then       -- nll_loss reads one number of each row
              wrong[#wrong + 1] = ("%s, %s.c, %s at %s: sums of single numbers"):format(set, family, f.name,
                f[l.first].address)
            end
          end
        end
        for _, name in ipairs(family == "loss" and { "vpmaxsd", "vpmaxsw" } or {}) do
          if not found[name] then wrong[#wrong + 1] = ("%s, %s.c: no loop has %s"):format(set, family, name) end
        end
      end
    end
    assert.equal("", table.concat(wrong, "\n"))
  end)

  -- If a probe's loop did more accesses than the probe counts, the rate would be too low.
  it("accesses memory in the bandwidth probe's loops as often as the probe counts", function()
    local why = obstacle()
    if why then return pending(why) end
    local path = BUILD .. "/CMakeFiles/ps_engine.dir/src/backend/cpu/probe.c.o"
    for name, register in pairs { walk_plain = "%%xmm", walk_avx2 = "%%ymm", walk_avx512 = "%%zmm" } do
      local found = {}
      for _, f in ipairs(functions(path)) do
        for _, l in ipairs(f.name == name and loops(f) or {}) do
          local loads, stores, others = 0, 0, 0
          for i = l.first, l.last do
            local operands = f[i].text:match "^%S+%s+(.*)$" or ""
            if operands:find("(", 1, true) then
              if not operands:find(register) or operands:find "%(%%r[sb]p" then others = others + 1
              elseif operands:match "%)$" then stores = stores + 1
              else loads = loads + 1 end
            end
          end
          found[("%d loads, %d stores, %d others"):format(loads, stores, others)] = true
        end
      end
      -- Each written stream is read a second time, from the cache.
      for _, streams in ipairs { { 2, 1 }, { 4, 3 }, { 4, 4 }, { 4, 0 } } do
        local reads, writes = unpack(streams)
        local want = ("%d loads, %d stores, 0 others"):format(reads + writes, writes)
        assert.truthy(found[want], ("%s has no loop of %s"):format(name, want))
      end
    end
  end)
end)
