-- SPDX-License-Identifier: BSD-3-Clause
-- Every op of ops.def, driven by the case table (spec/cases.lua): the cpu kernels against ref for all types, odd sizes,
-- layouts and extreme values, and accumulating outputs. PS_LIST=1 prints the backend whose kernel runs each op.
-- PS_TEST_DEVICE=cuda tests that device's kernels instead (spec/backend/cuda_spec.lua does so in a process of its
-- own); PS_TEST_SKIP=fp16 leaves out a type, PS_TEST_TYPES=bf16 tests only one type, and PS_TEST_PART=2/8 tests every
-- eighth op, from the second on, so that a device that fails permanently at one op is still tested with the others.
local ps = require "ps"
local ffi = require "ffi"
local cuda = require "spec.cuda_lib"
local H = dofile((arg[0]:match("^(.*)/[^/]*$") or ".") .. "/op_harness.lua")
local ops, C = ps.ops, ps.C
local info, has_flag, run, copies, lay_out, compare = H.info, H.has_flag, H.run, H.copies, H.lay_out, H.compare
local describe_set, rows_of, names = H.describe_set, H.rows_of, H.names

local DEVICE = os.getenv("PS_TEST_DEVICE") or "cpu"
local ON_CPU, SKIPPED, ONLY_TYPE = DEVICE == "cpu", os.getenv("PS_TEST_SKIP"), os.getenv("PS_TEST_TYPES")
local PART, PARTS = (os.getenv("PS_TEST_PART") or "1/1"):match("^(%d+)/(%d+)$")
assert(PART, "PS_TEST_PART is '" .. tostring(os.getenv("PS_TEST_PART")) .. "'; expected k/n, such as 2/8")

local FLOATS = { "fp32", "bf16", "fp16" }
local INTS = { "int32", "int64", "uint8", "bool" }

--- Compares the device's outputs with ref's.
local function check_outputs(row, what, got, want, n_out, dtype, rooms)
  for i = 1, n_out do
    if want[i] then
      assert(got[i]:dtype() == want[i]:dtype(), what .. ": output type")
      local out = want[i]:dtype()
      local tol = (row.exact or not H.IS_FLOAT[out]) and 0 or row.tol and row.tol[dtype] or out == "fp64" and 1e-6
        or H.TOL[out]
      compare(what .. (n_out > 1 and " output " .. i or ""), got[i], want[i], tol, math.max(row.floor or 0,
        H.TINY[dtype]), rooms[i])
    end
  end
end

-- oneDNN's matrix products have the same bits for all thread counts with AVX-512, but not with AVX2, and in bf16 not
-- with AMX (docs/reliability.md). linear_packed uses them for many rows.
local CPU = ps.device("cpu").description
local WIDE, AMX = CPU:find "oneDNN.*AVX%-512" ~= nil, CPU:find "oneDNN.*AMX" ~= nil
local PRODUCTS = {}
for name in ("matmul linear linear_grad linear_gelu_backward linear_packed mlp lm_loss"):gmatch "%S+" do
  PRODUCTS[name] = true
end
local function varies(name, dtype) return PRODUCTS[name] and (not WIDE or AMX and dtype == "bf16") end

--- Checks that one thread and all threads produce the same bits.
local function check_threads(row, set, ins, n, dtype)
  local name, threads = row[1], ps.threads()
  local many = run(name, set, copies(ins, n, "cpu"), n, dtype)
  ps.set_threads(1)
  local ok, one = pcall(run, name, set, copies(ins, n, "cpu"), n, dtype)
  ps.set_threads(threads)
  assert(ok, one)
  for i = 1, has_flag(name, "INPLACE") and n or #many do
    local what = describe_set(name, dtype, set, ins, n, threads .. " threads against 1")
    if many[i] then compare(what, many[i], one[i], varies(name, dtype) and H.TOL[many[i]:dtype()] or 0) end
  end
end

local function check_on_device(row, set, dtype)
  if dtype == SKIPPED or ONLY_TYPE and dtype ~= ONLY_TYPE and H.IS_FLOAT[dtype] then return end
  local name = row[1]
  local ins, n = H.make_inputs(set, dtype)
  local ref_ins = copies(ins, n, "ref")
  local want = run(name, set, ref_ins, n, dtype)
  local n_out = has_flag(name, "INPLACE") and n or #want
  local rooms = H.rooms(set.spread, dtype, ref_ins)
  local function check(there, more)
    local what = describe_set(name, dtype, set, ins, n, more)
    local ok, err = pcall(function()
      check_outputs(row, what, run(name, set, there, n, dtype), want, n_out, dtype, rooms)
    end)
    if not ok then error((tostring(err):find(what, 1, true) and "" or what .. ": ") .. tostring(err), 0) end
  end
  check(copies(ins, n, DEVICE), nil)
  if set.large and ON_CPU then check_threads(row, set, ins, n, dtype) end
  if row.layouts == false then return end
  for _, how in ipairs(set.large and { "transposed" } or H.LAYOUTS) do
    local there, changed = copies(ins, n, DEVICE), false
    for i = 1, n do
      local t = there[i] and lay_out(there[i], how)
      if t and not (i == 1 and has_flag(name, "INPLACE") and not has_flag(name, "STRIDED")) then
        there[i], changed = t, true
      end
    end
    if changed then check(there, how) end
  end
end

describe("the case table", function()
  it("has every op of ops.def", function()
    local missing = {}
    for name in pairs(info) do if not rows_of[name] then missing[#missing + 1] = name end end
    table.sort(missing)
    assert.equal("", table.concat(missing, " "))
    for _, name in ipairs(names) do assert(info[name], "a case for " .. name .. ", which is no op") end
  end)

  it("finds a kernel of the device for each op that a training step needs", function()
    local index, own, fallback = ps.device_index(DEVICE), {}, {}
    for code = 0, C.PS_OP_COUNT - 1 do
      local name = ps.op_info[code].name
      local device = C.ps_op_kernel_device(ps.ctx, index, code)
      if device == index then own[name] = true
      elseif not has_flag(name, "VIEW") then fallback[#fallback + 1] = name end
    end
    if os.getenv("PS_LIST") then
      local list = {}
      for name in pairs(own) do list[#list + 1] = name end
      table.sort(list)
      table.sort(fallback)
      print(("%s's own kernels (%d): %s\nothers (%d): %s"):format(DEVICE, #list, table.concat(list, " "), #fallback,
        table.concat(fallback, " ")))
    end
    for name in ([[matmul linear lm_loss layer_norm layer_norm_backward gelu gelu_backward attention_packed
        attention_packed_backward attention attention_backward adam_ sgd_ sq_norms embedding embedding_backward
        cross_entropy cross_entropy_backward softmax softmax_backward add mul sum cast copy_ contiguous dropout
        axpy_ scale_ fill_ rms_norm rms_norm_backward]]):gmatch("%S+") do
      assert(own[name], name .. " has no kernel on " .. DEVICE)
    end
  end)
end)

-- Returns whether the device runs an op. It does not run collectives, moves between two devices other than the host,
-- and ops of the host.
local function runs_there(name)
  return ON_CPU or not (has_flag(name, "RANKS") or has_flag(name, "MOVE") or cuda.HOST[name])
end

-- Returns whether the device leaves a case to the host: attention with a cache of another type than the queries.
local function left_to_host(set) return not ON_CPU and set.cached end

-- Calls check for all sets of inputs and types of an op. An error contains the first MOST differences.
local MOST = 8
local function check_all(name, check)
  local wrong, count = {}, 0
  local function try(row, set, dtype)
    local ok, err = pcall(check, row, set, dtype)
    if ok then return end
    count = count + 1
    if count <= MOST then wrong[count] = tostring(err) end
  end
  for _, row in ipairs(rows_of[name]) do
    for k = 2, #row do
      for _, dtype in ipairs(left_to_host(row[k]) and {} or row.types or FLOATS) do try(row, row[k], dtype) end
      if row.ints and k % 2 == 0 then
        for _, dtype in ipairs(INTS) do try(row, row[k], dtype) end
      end
    end
  end
  assert(count == 0, ("%d cases differ:\n%s"):format(count, table.concat(wrong, "\n")))
end

describe(DEVICE .. " agrees with ref:", function()
  for number, name in ipairs(names) do
    if runs_there(name) and number % PARTS == PART % PARTS then it(name, function()
      check_all(name, check_on_device)
      collectgarbage()
    end) end
  end
end)

-- The following tests are small, and belong to the first part.
if tonumber(PART) ~= 1 then return end

-- -- values at the edges --------------------------------------------------------------------------------------------
local EDGES = { 0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 255, 256, 300, -3.7, 65504, 65520, 70000, 1e-3, 1e-7, 1e10,
  -1e10, 2147483647,
                2147483648, -2147483648, 1e19, -1e19, 80, -80, 100, -100, 1000, -1000, 1e38, -1e38, 3.4e38, 6e-8,
                  1e-20 }
local WILD = { 1 / 0, -1 / 0, 0 / 0 }

local function edge_tensor(dtype, wild, device)
  local list, n = {}, #EDGES
  for pass = 1, 3 do                                   -- so that each value occurs in vector bodies and in tails
    for i = 1, n do
      local x = EDGES[(i + pass * 5) % n + 1]
      if wild or dtype ~= "fp16" or math.abs(x) < 65520 then list[#list + 1] = x end
    end
    if wild then for _, x in ipairs(WILD) do list[#list + 1] = x end end
  end
  return ps.tensor(list, { dtype = "fp64", device = "ref" }):to(dtype):to(device)
end

describe("at the edges of their range " .. DEVICE .. " agrees with ref:", function()
  for _, name in ipairs(names) do
    for _, row in ipairs(rows_of[name]) do
      if row.edges and runs_there(name) then
        it(name, function()
          local wrong = {}
          for _, dtype in ipairs(row.types or FLOATS) do
            for k = 2, #row do
              if k == 2 or name == "cast" then
                local set, wild = row[k], row.edges ~= "finite"
                local want = run(name, set, { edge_tensor(dtype, wild, "ref") }, 1, dtype)
                local got = run(name, set, { edge_tensor(dtype, wild, DEVICE) }, 1, dtype)
                local what = describe_set(name, dtype, set, got, 1, "edges")
                local tol = (row.exact or not H.IS_FLOAT[want[1]:dtype()]) and 0 or H.TOL[dtype]
                local g, w = H.read(got[1]), H.read(want[1])
                local from = H.read(edge_tensor(dtype, wild, "ref"))
                for i = 0, want[1]:numel() - 1 do
                  local x, y = g[i], w[i]
                  local floor = math.max(row.floor or 0, H.TINY[dtype])
                  if not (x == y or (x ~= x and y ~= y) or (tol > 0 and math.abs(x - y) <= tol * math.abs(y) + floor))
                  then
                    wrong[#wrong + 1] = ("%s: of %.9g it gives %.9g, not %.9g"):format(what, from[i], x, y)
                  end
                end
              end
            end
          end
          assert(#wrong == 0, table.concat(wrong, "\n", 1, math.min(#wrong, MOST)))
        end)
      end
    end
  end

  it("casts between all pairs of types", function()
    for from = 0, C.PS_DTYPE_COUNT - 1 do
      for to = 0, C.PS_DTYPE_COUNT - 1 do
        local name = ffi.string(C.ps_dtype_name(from))
        local r, c = edge_tensor(name, true, "ref"), edge_tensor(name, true, DEVICE)
        compare(("cast %d to %d"):format(from, to), ops.cast(c, to), ops.cast(r, to), 0)
        local dst_r, dst_c = ps.zeros(r:shape(), { device = "ref" }), ps.zeros(r:shape(), { device = DEVICE })
        dst_r, dst_c = ops.cast(dst_r, to), ops.cast(dst_c, to)
        compare(("copy_ %d to %d"):format(from, to), ops.copy_(dst_c, c), ops.copy_(dst_r, r), 0)
      end
    end
  end)
end)

-- -- accumulating outputs --------------------------------------------------------------------------------------
--- Calls ps_apply with an output that is given.
local function apply_into(name, ins, attrs, given)
  local c_in = ffi.new("ps_tensor *[?]", #ins)
  for i, t in ipairs(ins) do c_in[i - 1] = t end
  local a, out = ffi.new("ps_attrs_" .. name, attrs), ffi.new "ps_tensor *[PS_MAX_OUT]"
  out[0] = given
  ps.check(C.ps_apply(ps.ctx, info[name].code, #ins, c_in, a, ffi.sizeof(a), out))
  assert(out[0] == ffi.cast("ps_tensor *", given))
end

describe("an output that is given", function()
  local sizes = { { 3, 4, 5 }, { 33, 65, 7 }, { 65, 130, 33 } }
  local function each(fn)
    for _, s in ipairs(sizes) do
      for _, dtype in ipairs(FLOATS) do
        for _, out in ipairs { dtype, "fp32" } do fn(s, dtype, out) end
      end
    end
  end
  local function both(name, dtype, out, in_specs, shape, attrs, strided)
    for accumulate = 0, 1 do
      local ins, results = {}, {}
      for i, spec in ipairs(in_specs) do ins[i] = H.make(spec, dtype) end
      local given = H.make({ shape = shape, low = -2, high = 2 }, out)
      for _, device in ipairs { "ref", DEVICE } do
        local there = copies(ins, #ins, device)
        if strided and device ~= "ref" then
          for i, t in ipairs(there) do there[i] = lay_out(t, strided) end
        end
        attrs.accumulate = accumulate
        results[device] = given:to(device)
        if device == "ref" then results[device] = given:clone() end
        apply_into(name, there, attrs, results[device])
      end
      compare(("%s %s into %s, accumulate %d"):format(name, dtype, out, accumulate), results[DEVICE], results.ref,
        H.TOL[out])
    end
  end

  it("takes a matrix product", function()
    each(function(s, dtype, out)
      local a, b = { shape = { s[1], s[2] }, low = -2, high = 2 }, { shape = { s[2], s[3] }, low = -2, high = 2 }
      both("matmul", dtype, out, { a, b }, { s[1], s[3] }, {})
      both("matmul", dtype, out, { a, b }, { s[1], s[3] }, {}, "transposed")
    end)
    both("matmul", "fp32", "fp32", { { shape = { 2, 3, 33 }, low = -2, high = 2 }, { shape = { 2, 33, 7 }, low = -2,
      high = 2 } },
         { 2, 3, 7 }, {})
  end)
  it("takes a sum", function()
    each(function(s, dtype, out)
      local x = { shape = s, low = -2, high = 2 }
      for _, how in ipairs { "contiguous", "transposed", "rows apart" } do
        both("sum", dtype, out, { x }, { s[3] }, { dims = 3 }, how ~= "contiguous" and how or nil)
        both("sum", dtype, out, { x }, { s[1], s[2] }, { dims = 4 }, how ~= "contiguous" and how or nil)
      end
    end)
  end)
  it("accumulates the gradient of an embedding", function()
    each(function(s, dtype, out)
      both("embedding_backward", dtype, out, { { shape = { s[2] }, low = 0, high = s[1], index = true },
           { shape = { s[2], s[3] }, low = -2, high = 2 } }, { s[1], s[3] },
             { rows = s[1], dtype = ffi.new("int32_t", 0) })
    end)
  end)
  it("must fit", function()
    local a = ps.ones { 2, 3 }
    local ok, err = pcall(apply_into, "sum", { a }, { dims = 1 }, ps.zeros { 2 })
    assert(not ok and tostring(err):find("sum: the given output has shape [2] (fp32); it must have shape [3] (fp32)", 1,
      true), tostring(err))
  end)
end)
