-- SPDX-License-Identifier: BSD-3-Clause
-- The border between C and Lua: exactly the declared functions exist, every struct has C's layout, Lua files of
-- another build are refused, and the JIT compiles calls across the border.
local ffi = require "ffi"
local check = require "spec.check_lib"
local lfs = require "lfs"
local cdef = require "ps.cdef"
local ps = require "ps"
local paths = require "ps.paths"
local C = ps.C

--- Runs a script in a new psluajit process. Returns the output of both streams, and the exit code.
---@param script string
local function child(script)
  local name = os.tmpname()
  local f = assert(io.open(name, "wb"))
  f:write(script)
  f:close()
  local out, code = check.shell(("env -u LUA_INIT '%s' %s"):format(paths.exe, name))
  os.remove(name)
  return out, code
end

describe("the declarations", function()
  it("name functions that exist in the program", function()
    local text, count, missing = cdef.text:gsub("%b{}", "{}"), 0, {}
    for name in text:gmatch("[%s%*](ps_[%w_]+)%s*%(") do
      count = count + 1
      if not pcall(function() return C[name] end) then missing[#missing + 1] = name end
    end
    assert.same({}, missing)
    assert.truthy(count > 90, count)
  end)

  it("lay out structs like C", function()
    local name_out, compared, i = ffi.new("const char *[1]"), {}, 0
    while true do
      local size = tonumber(C.ps_abi_size(i, name_out))
      if size < 0 then break end
      local name = ffi.string(name_out[0])
      local struct, field = name:match("^([%w_]+)%.([%w_]+)$")
      local here = struct and ffi.offsetof(struct, field) or ffi.sizeof(name)
      assert.equal(name .. " " .. size, name .. " " .. tostring(here))
      compared[name] = true
      i = i + 1
    end
    local plain = 0
    for struct in cdef.text:gmatch("typedef struct ([%w_]+) {") do
      plain = plain + 1
      if not compared[struct] then error(struct .. " is missing in src/abi.c") end
    end
    assert.equal(2 * plain, i)
  end)

  it("have no number that Lua would round", function()
    assert.equal(ps.op_info[C.PS_OP_COUNT - 1].name, "sample")
    for op = 0, C.PS_OP_COUNT - 1 do assert.truthy(C["PS_OP_" .. ps.op_info[op].name] == op) end
  end)

  it("are refused if the engine was built from other declarations", function()
    local out, code = child [[
      local cdef = require "ps.cdef"
      package.loaded["ps.cdef"] = { text = cdef.text, hash = "0123456789abcdef" }
      require "ps"
    ]]
    assert.equal(1, code)
    assert.truthy(out:find("built from another ps.h", 1, true))
    assert.truthy(out:find("rebuild", 1, true))
  end)
end)

describe("the symbols", function()
  --- Returns the names in a file's dynamic symbol table, with their kinds in `nm` (T: code, U: undefined ...).
  ---@param file string
  local function symbols(file)
    local kinds, p = {}, assert(io.popen(("nm -D '%s'"):format(file)))
    for kind, name in p:read("*a"):gmatch(" (%a) ([^\n]+)") do kinds[name] = kind end
    p:close()
    return kinds
  end
  local DECLARED = {}
  for name in cdef.text:gsub("%b{}", "{}"):gmatch("[%s%*](ps_[%w_]+)%s*%(") do DECLARED[name] = true end
  -- Returns whether a name is psluajit's. Names with a leading underscore belong to the compiler (start-up code,
  -- templates of C++'s library), and @ marks libc's names.
  local function is_own(name) return not name:find("^_") and not name:find "@" and name ~= "data_start" end

  it("of the program are exactly those of ps.h", function()
    if os.execute("command -v nm >/dev/null 2>&1") ~= 0 then return pending("nm is not installed") end
    local others, n = {}, 0
    for name, kind in pairs(symbols(paths.exe)) do
      if kind:find("[TDBRVWui]") and is_own(name) then
        if DECLARED[name] then n = n + 1 else others[#others + 1] = name end
      end
    end
    table.sort(others)
    assert.same({}, others)
    assert.truthy(n > 200, n)
  end)

  it("of a plug-in are its single entry point, and it uses none of the program", function()
    if os.execute("command -v nm >/dev/null 2>&1") ~= 0 then return pending("nm is not installed") end
    local folder, found = paths.exe:match("^(.*)/[^/]*$"), 0
    for _, plugin in ipairs { "libps_cuda.so", "libps_cuda_emulated.so" } do
      local others = {}
      for name, kind in pairs(lfs.attributes(folder .. "/" .. plugin) and symbols(folder .. "/" .. plugin) or {}) do
        if name == "ps_cuda_plugin_open" then
          found = found + 1
        elseif kind == "U" and name:find("^ps_") or kind ~= "U" and is_own(name) and not name:find("^ps_emu_") then
          others[#others + 1] = kind .. " " .. name
        end
      end
      table.sort(others)
      assert.same({}, others)
    end
    if found == 0 then pending("no plug-in was built") end
  end)
end)

describe("the bandwidth probe", function()
  it("compiles what it can and names what it cannot", function()
    local rate = ffi.new("double[1]")
    for _, streams in ipairs { { 4, 3, 1 }, { 2, 1, 0 }, { 1, 1, 1 }, { 3, 5, 0 }, { 4, 0, 0 }, { 3, 0, 0 } } do
      rate[0] = 0
      ps.check(C.ps_probe_bandwidth(2 ^ 20, streams[1], streams[2], streams[3], 3, rate))
      assert.truthy(rate[0] > 1e6 and rate[0] < 1e14, rate[0])
    end
    for text, a in pairs { ["few for a probe"] = { 100, 4, 3, 1, 3 }, ["3 streams read, 4 written in place"] =
      { 2 ^ 20, 3, 4, 1, 3 }, ["0 streams read"] = { 2 ^ 20, 0, 1, 0, 3 }, ["-1 written"] = { 2 ^ 20, 1, -1, 0, 3 },
      ["32 passes"] = { 2 ^ 20, 1, 1, 0, 32 } } do
      local ok, err = pcall(function() ps.check(C.ps_probe_bandwidth(a[1], a[2], a[3], a[4], a[5], rate)) end)
      assert.falsy(ok)
      assert.truthy(tostring(err):find(text, 1, true), tostring(err))
    end
  end)
end)

describe("calls across the border", function()
  -- Runs a loop of `body` in a separate process, and returns the JIT's report: the number of traces that begin at the
  -- loop and close it or continue in another trace, and the reasons why traces were aborted. Addresses, which differ
  -- between runs, decide which of a body's functions have a trace before the loop has one.
  local function traces(body)
    local out, code = child(([[
      local vmdef, util = require "jit.vmdef", require "jit.util"
      local loops, given_up, begun = 0, {}, {}
      local main, closed = debug.getinfo(1, "f").func, { loop = true, root = true }
      local function on_trace(what, trace, func, _, code, extra)
        if what == "start" then begun[trace] = func end
        if what == "stop" and begun[trace] == main and closed[util.traceinfo(trace).linktype] then
          loops = loops + 1
        end
        if what ~= "abort" then return end
        local text = type(code) == "number" and vmdef.traceerr[code] or tostring(code)
        given_up[#given_up + 1] = text:format(tostring(extra))
      end
      jit.attach(on_trace, "trace")                 -- before ps, whose own function then calls this one
      local ps = require "ps"
      local ops, F = ps.ops, ps.F
      local a, b = ps.ones { 4, 4 }, ps.ones { 4, 4 }
      do %s end                                     -- the first call loads modules and wraps functions
      loops, given_up = 0, {}
      for _ = 1, 5000 do %s end
      jit.off()
      print(loops)
      for _, reason in ipairs(given_up) do print(reason) end
    ]]):format(body, body))
    assert.equal(0, code, out)
    return tonumber(out:match("^(%d+)\n")), (out:gsub("NYI: return to lower frame\n", ""))  -- an inner function's trace
  end

  for name, body in pairs {
    ["an op"] = "ops.add(a, b)",
    ["an operator"] = "local _ = a + b",
    ["an operator with a number"] = "local _ = a * 2",
    ["a method"] = "local _ = a:sum(0)",
    ["a chain without gradients"] = "local _ = ops.relu(ops.matmul(a, b))",
    ["a function of several ops"] = "local _ = F.normalize(a)",
  } do
    it("are compiled: " .. name, function()
      if not pcall(require, "jit.vmdef") then
        pending("LuaJIT's own jit/vmdef.lua is not installed")
        return
      end
      local loops, out = traces(body)
      assert.truthy(loops >= 1, out)
      assert.falsy(out:find("NYI", 1, true), out)
    end)
  end
end)
