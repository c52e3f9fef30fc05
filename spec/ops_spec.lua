-- SPDX-License-Identifier: BSD-3-Clause
-- Every op of ops.def, driven by the case table (spec/cases.lua): the cpu kernels against ref for all types, odd sizes
-- and layouts; gradients against finite differences in fp64, and the paths by which gradients meet (a leaf that has one
-- already, a tensor used twice, a gradient that waits). PS_LIST=1 prints which device's kernel runs each op.
local ps = require "ps"
local ffi = require "ffi"
local folder = arg[0]:match("^(.*)/[^/]*$") or "."
local cases = dofile(folder .. "/cases.lua")
local ops, C, NONE = ps.ops, ps.C, cases.NONE

local info = {}                      -- by name
for code, row in pairs(ps.op_info) do
  row.code = code
  info[row.name] = row
end
local function has_flag(name, flag) return ("|" .. info[name].flags .. "|"):find("|" .. flag .. "|", 1, true) ~= nil end

local FLOATS = { "fp32", "bf16", "fp16" }
local INTS = { "int32", "int64", "uint8", "bool" }
local IS_FLOAT = { fp32 = true, bf16 = true, fp16 = true, fp64 = true }
-- One rounding of the output may fall either way: one unit in the last place of bf16 and fp16.
local TOL = { fp32 = 1e-5, bf16 = 2 ^ -7, fp16 = 2 ^ -10, fp64 = 1e-9 }
local TINY = { fp32 = 1e-37, bf16 = 1e-37, fp16 = 6e-8, fp64 = 0, int32 = 0, int64 = 0, uint8 = 0, bool = 0 }   -- denormals
local GTOL = { fp32 = 2e-5, bf16 = 0.03 }

-- -- making and reading tensors ------------------------------------------------------------------------------------------
local seed = 0

--- A contiguous tensor on ref for an input of a set.
local function make(spec, dtype)
  seed = seed + 1
  if spec.bool then
    local t = ps.empty(spec.shape, { device = "ref" })
    return ops.uniform_(t, 0, 1, seed):gt(0.3)
  elseif spec.index then
    local t = ps.empty(spec.shape, { dtype = seed % 2 == 0 and "int32" or "int64", device = "ref" })
    return t:numel() > 0 and ops.randint_(t, spec.low, spec.high, seed) or t
  end
  dtype = spec.dtype or dtype
  if IS_FLOAT[dtype] then
    return ops.uniform_(ps.empty(spec.shape, { dtype = dtype, device = "ref" }), spec.low, spec.high, seed)
  end
  local t = ps.empty(spec.shape, { dtype = dtype == "bool" and "uint8" or dtype, device = "ref" })
  if dtype == "bool" then return ops.randint_(t, 0, 2, seed):bool() end
  return ops.randint_(t, dtype == "uint8" and 0 or -20, 21, seed)
end

--- The inputs of a set as tensors on ref; absent ones are nil. n: how many.
local function make_inputs(set, dtype)
  seed = set.seed
  local ins, n = {}, #set
  for i = 1, n do
    if set[i].same then ins[i] = ins[set[i].same]
    elseif set[i] ~= NONE then ins[i] = make(set[i], dtype) end
  end
  if set.prepare then set.prepare(ins) end
  return ins, n
end

--- Copies of tensors on a device; what was one tensor stays one.
local function copies(ins, n, device)
  local out = {}
  for i = 1, n do
    if ins[i] then
      for j = 1, i - 1 do
        if ins[j] and ps.same(ins[i], ins[j]) then out[i] = out[j] end
      end
      out[i] = out[i] or (ins[i]:device() == device and ins[i]:clone() or ins[i]:to(device))
    end
  end
  return out
end

local LAYOUTS = { "transposed", "every second", "rows apart", "offset" }
--- The same values with other strides; nil when the shape has no such layout.
local function lay_out(t, how)
  local shape = t:shape()
  local n = #shape
  if n == 0 then return nil end
  if how == "transposed" then
    if n < 2 then return nil end
    return t:transpose(0, -1):contiguous():transpose(0, -1)
  end
  local big = t:shape()
  if how == "every second" then big[n] = 2 * big[n] + 1
  elseif how == "rows apart" then big[n] = big[n] + 3
  else big[1] = big[1] + 1 end
  local view = ps.zeros(big, { dtype = t:dtype(), device = t:device() })
  if how == "every second" then view = ops.slice(view, n - 1, 1, 2 * shape[n] + 1, 2)
  elseif how == "rows apart" then view = ops.slice(view, n - 1, 2, shape[n] + 2)
  else view = ops.slice(view, 0, 1, shape[1] + 1) end
  return ops.copy_(view, t)
end

local function read(t)
  local n = t:numel()
  local buffer = ffi.new("double[?]", n + 1)
  ps.check(C.ps_tensor_read_f64(t, 0, n, buffer))
  return buffer, n
end

local function attrs_of(set, dtype)
  local a = set.attrs
  if type(a) == "function" then a = a(dtype) end
  return a or { n = 0 }
end

--- Runs a case's op. Gives the outputs; of ops that write in place all of their inputs.
local function run(name, set, ins, n, dtype)
  local a, out = attrs_of(set, dtype), nil
  if info[name].ins:find("*", 1, true) then
    out = { ops[name](ins, unpack(a, 1, a.n)) }
  else
    local all = {}
    for i = 1, n do all[i] = ins[i] end
    for i = 1, a.n do all[n + i] = a[i] end
    out = { ops[name](unpack(all, 1, n + a.n)) }
  end
  return has_flag(name, "INPLACE") and ins or out
end

-- -- comparing ---------------------------------------------------------------------------------------------------------------
local function shape_text(t) return t and "[" .. table.concat(t:shape(), ", ") .. "] " .. t:dtype() or "none" end

local function describe_set(name, dtype, set, ins, n, more)
  local parts = {}
  for i = 1, n do parts[i] = shape_text(ins[i]) end
  local a = attrs_of(set, dtype)
  for i = 1, a.n do parts[#parts + 1] = type(a[i]) == "table" and "{" .. table.concat(a[i], ",") .. "}" or tostring(a[i]) end
  return ("%s(%s) in %s%s"):format(name, table.concat(parts, ", "), dtype, more and ", " .. more or "")
end

--- Every |got - want| is within tol of the larger of |want| and the root mean square of all (or is the same infinity or
--- NaN); tol 0: equal. `floor` is an absolute difference that is always allowed.
local function compare(what, got, want, tol, floor)
  floor = floor or 0
  assert(#got:shape() == #want:shape() and shape_text(got):match("^[^%]]*") == shape_text(want):match("^[^%]]*"),
         what .. ": shape " .. shape_text(got) .. ", not " .. shape_text(want))
  local g, n = read(got)
  local w = read(want)
  local squares, finite = 0, 0
  for i = 0, n - 1 do
    if math.abs(w[i]) < math.huge then squares, finite = squares + w[i] * w[i], finite + 1 end
  end
  local rms = math.sqrt(squares / math.max(1, finite))
  for i = 0, n - 1 do
    local x, y = g[i], w[i]
    local fine = x == y or (x ~= x and y ~= y)
    if not fine and tol > 0 then
      fine = math.abs(x - y) <= tol * math.max(math.abs(y), rms) + floor and math.abs(y) < math.huge
    end
    if not fine then
      error(("%s: element %d of %d is %.9g, not %.9g (off by %.2g; bound %.2g, rms %.3g)"):format(what, i, n, x, y,
        math.abs(x - y), tol * math.max(math.abs(y), rms), rms), 0)
    end
  end
end

--- cpu's outputs for `ins` (tensors on cpu) against ref's.
local function check_outputs(row, what, got, want, n_out, dtype)
  for i = 1, n_out do
    if want[i] then
      assert(got[i]:dtype() == want[i]:dtype(), what .. ": output type")
      local out = want[i]:dtype()
      local tol = (row.exact or not IS_FLOAT[out]) and 0 or row.tol and row.tol[dtype] or out == "fp64" and 1e-6 or TOL[out]
      compare(what .. (n_out > 1 and " output " .. i or ""), got[i], want[i], tol, math.max(row.floor or 0, TINY[dtype]))
    end
  end
end

local function check_on_cpu(row, set, dtype)
  local name = row[1]
  local ins, n = make_inputs(set, dtype)
  local ref_ins = copies(ins, n, "ref")
  local want = run(name, set, ref_ins, n, dtype)
  local n_out = has_flag(name, "INPLACE") and n or #want
  local function check(cpu_ins, more)
    local what = describe_set(name, dtype, set, ins, n, more)
    local ok, err = pcall(function()
      check_outputs(row, what, run(name, set, cpu_ins, n, dtype), want, n_out, dtype)
    end)
    if not ok then error((tostring(err):find(what, 1, true) and "" or what .. ": ") .. tostring(err), 0) end
  end
  check(copies(ins, n, "cpu"), nil)
  if row.layouts == false then return end
  for _, how in ipairs(LAYOUTS) do
    local cpu, changed = copies(ins, n, "cpu"), false
    for i = 1, n do
      local t = cpu[i] and lay_out(cpu[i], how)
      if t and not (i == 1 and has_flag(name, "INPLACE") and not has_flag(name, "STRIDED")) then cpu[i], changed = t, true end
    end
    if changed then check(cpu, how) end
  end
end

-- -- kernels ---------------------------------------------------------------------------------------------------------------------
local rows_of, names = {}, {}
for i, row in ipairs(cases.rows) do
  local name = row[1]
  for k = 2, #row do row[k].seed = i * 10000 + k * 100 end         -- a set's numbers do not depend on the other sets
  if not rows_of[name] then
    rows_of[name] = {}
    names[#names + 1] = name
  end
  table.insert(rows_of[name], row)
end

describe("the case table", function()
  it("has every op of ops.def", function()
    local missing = {}
    for name in pairs(info) do if not rows_of[name] then missing[#missing + 1] = name end end
    table.sort(missing)
    assert.equal("", table.concat(missing, " "))
    for _, name in ipairs(names) do assert(info[name], "a case for " .. name .. ", which is no op") end
  end)

  it("finds a cpu kernel for each op that a training step needs", function()
    local cpu, own, fallback = 0, {}, {}
    for code = 0, C.PS_OP_COUNT - 1 do
      local name = ps.op_info[code].name
      local device = C.ps_op_kernel_device(ps.ctx, cpu, code)
      if device == cpu then own[name] = true
      elseif not has_flag(name, "VIEW") then fallback[#fallback + 1] = name end
    end
    if os.getenv("PS_LIST") then
      local list = {}
      for name in pairs(own) do list[#list + 1] = name end
      table.sort(list)
      table.sort(fallback)
      print(("cpu's own kernels (%d): %s\non ref (%d): %s"):format(#list, table.concat(list, " "), #fallback, table.concat(fallback, " ")))
    end
    for name in ([[matmul linear lm_loss layer_norm layer_norm_backward gelu gelu_backward attention_packed
        attention_packed_backward attention attention_backward adam_ sgd_ sq_norms embedding embedding_backward cross_entropy
        cross_entropy_backward softmax softmax_backward add mul sum cast copy_ contiguous dropout axpy_ scale_ fill_
        rms_norm rms_norm_backward]]):gmatch("%S+") do
      assert(own[name], name .. " has no kernel on cpu")
    end
  end)
end)

describe("cpu agrees with ref:", function()
  for _, name in ipairs(names) do
    it(name, function()
      for _, row in ipairs(rows_of[name]) do
        for k = 2, #row do
          for _, dtype in ipairs(row.types or FLOATS) do check_on_cpu(row, row[k], dtype) end
          if row.ints and k % 2 == 0 then
            for _, dtype in ipairs(INTS) do check_on_cpu(row, row[k], dtype) end
          end
        end
      end
      collectgarbage()
    end)
  end
end)

-- -- values at the edges ------------------------------------------------------------------------------------------------------------
local EDGES = { 0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 255, 256, 300, -3.7, 65504, 65520, 70000, 1e-3, 1e-7, 1e10, -1e10, 2147483647,
                2147483648, -2147483648, 1e19, -1e19, 80, -80, 100, -100, 1000, -1000, 1e38, -1e38, 3.4e38, 6e-8, 1e-20 }
local WILD = { 1 / 0, -1 / 0, 0 / 0 }

local function edge_tensor(dtype, wild, device)
  local list, n = {}, #EDGES
  for pass = 1, 3 do                                   -- so that both vector bodies and tails see each
    for i = 1, n do
      local x = EDGES[(i + pass * 5) % n + 1]
      if wild or dtype ~= "fp16" or math.abs(x) < 65520 then list[#list + 1] = x end
    end
    if wild then for _, x in ipairs(WILD) do list[#list + 1] = x end end
  end
  return ps.tensor(list, { dtype = "fp64", device = "ref" }):to(dtype):to(device)
end

describe("at the edges of their range cpu agrees with ref:", function()
  for _, name in ipairs(names) do
    for _, row in ipairs(rows_of[name]) do
      if row.edges then
        it(name, function()
          for _, dtype in ipairs(row.types or FLOATS) do
            for k = 2, #row do
              if k == 2 or name == "cast" then
                local set, wild = row[k], row.edges ~= "finite"
                local want = run(name, set, { edge_tensor(dtype, wild, "ref") }, 1, dtype)
                local got = run(name, set, { edge_tensor(dtype, wild, "cpu") }, 1, dtype)
                local what = describe_set(name, dtype, set, got, 1, "edges")
                local tol = (row.exact or not IS_FLOAT[want[1]:dtype()]) and 0 or TOL[dtype]
                local g, w = read(got[1]), read(want[1])
                local from = read(edge_tensor(dtype, wild, "ref"))
                for i = 0, want[1]:numel() - 1 do
                  local x, y = g[i], w[i]
                  local floor = math.max(row.floor or 0, TINY[dtype])
                  assert(x == y or (x ~= x and y ~= y) or (tol > 0 and math.abs(x - y) <= tol * math.abs(y) + floor),
                         ("%s: of %.9g it gives %.9g, not %.9g"):format(what, from[i], x, y))
                end
              end
            end
          end
        end)
      end
    end
  end

  it("casts between all pairs of types", function()
    for from = 0, C.PS_DTYPE_COUNT - 1 do
      for to = 0, C.PS_DTYPE_COUNT - 1 do
        local name = ffi.string(C.ps_dtype_name(from))
        local r, c = edge_tensor(name, true, "ref"), edge_tensor(name, true, "cpu")
        compare(("cast %d to %d"):format(from, to), ops.cast(c, to), ops.cast(r, to), 0)
        local dst_r, dst_c = ps.zeros(r:shape(), { device = "ref" }), ps.zeros(r:shape())
        dst_r, dst_c = ops.cast(dst_r, to), ops.cast(dst_c, to)
        compare(("copy_ %d to %d"):format(from, to), ops.copy_(dst_c, c), ops.copy_(dst_r, r), 0)
      end
    end
  end)
end)

-- -- outputs that are added to ------------------------------------------------------------------------------------------------------------
--- ps_apply with an output given.
local function apply_into(name, ins, attrs, given)
  local c_in = ffi.new("ps_tensor *[?]", #ins)
  for i, t in ipairs(ins) do c_in[i - 1] = t end
  local a, out = ffi.new("ps_attrs_" .. name, attrs), ffi.new("ps_tensor *[4]")
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
      for i, spec in ipairs(in_specs) do ins[i] = make(spec, dtype) end
      local given = make({ shape = shape, low = -2, high = 2 }, out)
      for _, device in ipairs { "ref", "cpu" } do
        local there = copies(ins, #ins, device)
        if strided and device == "cpu" then
          for i, t in ipairs(there) do there[i] = lay_out(t, strided) end
        end
        attrs.accumulate = accumulate
        results[device] = given:to(device)
        if device == "ref" then results[device] = given:clone() end
        apply_into(name, there, attrs, results[device])
      end
      compare(("%s %s into %s, accumulate %d"):format(name, dtype, out, accumulate), results.cpu, results.ref, TOL[out])
    end
  end

  it("takes a matrix product", function()
    each(function(s, dtype, out)
      local a, b = { shape = { s[1], s[2] }, low = -2, high = 2 }, { shape = { s[2], s[3] }, low = -2, high = 2 }
      both("matmul", dtype, out, { a, b }, { s[1], s[3] }, {})
      both("matmul", dtype, out, { a, b }, { s[1], s[3] }, {}, "transposed")
    end)
    both("matmul", "fp32", "fp32", { { shape = { 2, 3, 33 }, low = -2, high = 2 }, { shape = { 2, 33, 7 }, low = -2, high = 2 } },
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
  it("takes the gradient of an embedding", function()
    each(function(s, dtype, out)
      both("embedding_backward", dtype, out, { { shape = { s[2] }, low = 0, high = s[1], index = true },
           { shape = { s[2], s[3] }, low = -2, high = 2 } }, { s[1], s[3] }, { rows = s[1], dtype = ffi.new("int32_t", 0) })
    end)
  end)
  it("must fit", function()
    local a = ps.ones { 2, 3 }
    local ok, err = pcall(apply_into, "sum", { a }, { dims = 1 }, ps.zeros { 2 })
    assert(not ok and tostring(err):find("sum: the output given has shape [2] (fp32), needed [3] (fp32)", 1, true), tostring(err))
  end)
end)

-- -- gradients --------------------------------------------------------------------------------------------------------------------------------
local function differentiable(row, set)
  if row.wrt then return row.wrt end
  local list = {}
  for i = 1, #set do
    local spec = set[i]
    if spec ~= NONE and not spec.index and not spec.bool and not spec.same and not spec.dtype then list[#list + 1] = i end
  end
  return list
end

--- Gradients of sum(y * p) for the inputs `wrt` (copies of `ins` become leaves on the device, of that type). How:
---   plain    leaves go into the op
---   twice    two backwards: the second adds to gradients that are there
---   inner    the inputs are computed from leaves, used by two calls and once more beside them: gradients meet inside
---   strided  the op sees transposed views of the leaves
---   fp32     leaves sum their gradients in fp32, over two backwards
local function gradients(name, set, ins, n, wrt, p, device, dtype, how)
  local used, leaves = {}, {}
  for i = 1, n do used[i] = ins[i] and ins[i]:to(device) or nil end
  for _, i in ipairs(wrt) do
    local t = ins[i]:to(dtype):to(device)
    if how == "strided" and t.ndim >= 2 then
      leaves[i] = t:transpose(0, -1):contiguous():requires_grad()
    else
      leaves[i] = t:clone():requires_grad()
    end
    if how == "fp32" then leaves[i]:grad_in_fp32() end
  end
  p = p:to(device)
  for _ = 1, (how == "twice" or how == "fp32") and 2 or 1 do
    local extra
    for _, i in ipairs(wrt) do
      used[i] = leaves[i]
      if how == "inner" then
        used[i] = ops.affine(leaves[i], 1, 0)
        local part = used[i]:double():sum()
        extra = extra and extra + part or part
      elseif how == "strided" and leaves[i].ndim >= 2 then
        used[i] = leaves[i]:transpose(0, -1)
      end
    end
    local y = run(name, set, used, n, dtype)[1]
    local weights = p:to(y:dtype())
    if how == "inner" then
      local again = run(name, set, used, n, dtype)[1]
      local loss = (y * weights):double():sum() + (again * weights):double():sum() + extra
      loss:backward()
    else
      y:backward(weights)
    end
  end
  local out = {}
  for _, i in ipairs(wrt) do
    out[i] = assert(leaves[i]:grad(), "input " .. i .. " of " .. name .. " got no gradient")
    if how == "strided" and leaves[i].ndim >= 2 then out[i] = out[i]:transpose(0, -1) end
  end
  return out
end

--- Central differences of sum(y * p) at up to 20 elements of each input, on ref in fp64.
local function check_differences(name, set, ins, n, wrt, p, analytic)
  local function value()
    local y = run(name, set, ins, n, "fp64")[1]
    local yb, count = read(y)
    local pb = read(p)
    local sum = 0
    for i = 0, count - 1 do sum = sum + yb[i] * pb[i] end
    return sum
  end
  local cell = ffi.new("double[1]")
  for _, i in ipairs(wrt) do
    local x, g = ins[i], analytic[i]
    assert(g:dtype() == "fp64")
    local gb, count = read(g)
    local largest = 0
    for e = 0, count - 1 do largest = math.max(largest, math.abs(gb[e])) end
    for k = 0, math.min(count, 20) - 1 do
      local e = math.floor(k * count / math.min(count, 20))
      ps.check(C.ps_tensor_read_f64(x, e, 1, cell))
      local at = cell[0]
      local h = 1e-6 * math.max(1, math.abs(at))
      local function shifted(by)
        cell[0] = at + by
        ps.check(C.ps_tensor_write_f64(x, e, 1, cell))
        return value()
      end
      local slope = (shifted(h) - shifted(-h)) / (2 * h)
      cell[0] = at
      ps.check(C.ps_tensor_write_f64(x, e, 1, cell))
      assert(math.abs(slope - gb[e]) <= 1e-6 * math.max(1, largest),
             ("%s: the gradient of input %d at element %d is %.10g, differences give %.10g"):format(
               describe_set(name, "fp64", set, ins, n), i, e, gb[e], slope))
    end
  end
end

--- want * factor + 1 * plus, on ref in fp64.
local function expected(g, factor, plus) return ops.affine(g, factor, plus) end

local function check_gradients(row, set)
  local name = row[1]
  local wrt = differentiable(row, set)
  for _, dtype in ipairs { "fp32", "bf16" } do
    -- The same values in every type: rounded to the narrow one first.
    local narrow, n = make_inputs(set, dtype)
    local wide = {}
    for i = 1, n do wide[i] = narrow[i] and (narrow[i]:is_float() and narrow[i]:double() or narrow[i]) end
    local y = run(name, set, wide, n, "fp64")[1]
    local p = make({ shape = y:shape(), low = 0.5, high = 1.5 }, dtype):double()
    local exact = gradients(name, set, wide, n, wrt, p, "ref", "fp64", "plain")
    if dtype == "fp32" then
      check_differences(name, set, wide, n, wrt, p, exact)
      for how, f in pairs { twice = { 2, 0 }, inner = { 2, 1 }, strided = row.layouts ~= false and { 1, 0 } or nil } do
        local got = gradients(name, set, wide, n, wrt, p, "ref", "fp64", how)
        for _, i in ipairs(wrt) do
          compare(describe_set(name, "fp64 on ref", set, wide, n, how .. ", gradient " .. i), got[i], expected(exact[i], f[1], f[2]), 1e-9)
        end
      end
    end
    local plans = { plain = { 1, 0 }, twice = { 2, 0 }, inner = { 2, 1 }, strided = row.layouts ~= false and { 1, 0 } or nil }
    if dtype == "bf16" then plans = { plain = { 1, 0 }, fp32 = { 2, 0 }, inner = { 2, 1 } } end
    for how, f in pairs(plans) do
      local got = gradients(name, set, narrow, n, wrt, p, "cpu", dtype, how)
      for _, i in ipairs(wrt) do
        assert.equal(how == "fp32" and "fp32" or dtype, got[i]:dtype())
        compare(describe_set(name, dtype .. " on cpu", set, narrow, n, how .. ", gradient " .. i), got[i],
                expected(exact[i], f[1], f[2]), row.gtol and row.gtol[dtype] or GTOL[dtype],
                dtype == "bf16" and row.gfloor or row.floor)
      end
    end
  end
end

describe("gradients are right:", function()
  for _, name in ipairs(names) do
    if info[name].grad ~= "none" then
      it(name, function()
        local checked = 0
        for _, row in ipairs(rows_of[name]) do
          for k = 2, #row do
            local set = row[k]
            if set.grads ~= false and #differentiable(row, set) > 0 then
              check_gradients(row, set)
              checked = checked + 1
            end
          end
        end
        assert(checked > 0, "no set of " .. name .. " has gradients")
        collectgarbage()
      end)
    end
  end
end)
