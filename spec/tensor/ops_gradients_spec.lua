-- SPDX-License-Identifier: BSD-3-Clause
-- Gradients of every op that has a rule, driven by the case table (spec/cases.lua): against finite differences in fp64
-- on ref, and cpu's in fp32 and bf16 against those; on all paths by which gradients are accumulated: a leaf with an
-- existing gradient, a tensor used twice, a pending gradient, views, sums in fp32.
local ps = require "ps"
local ffi = require "ffi"
local H = dofile((arg[0]:match("^(.*)/[^/]*$") or ".") .. "/op_harness.lua")
local larger = require("spec.check_lib").larger
local ops, C, NONE = ps.ops, ps.C, H.NONE
local info, run, compare, describe_set, rows_of, names = H.info, H.run, H.compare, H.describe_set, H.rows_of, H.names
local make, make_inputs, read = H.make, H.make_inputs, H.read

local NO_FLOOR = {}
local GTOL = { fp32 = 2e-5, bf16 = 0.03 }

local function differentiable(row, set)
  if set.wrt or row.wrt then return set.wrt or row.wrt end
  local list = {}
  for i = 1, #set do
    local spec = set[i]
    if spec ~= NONE and not spec.index and not spec.bool and not spec.runs and not spec.same
      and not spec.dtype then list[#list + 1] = i end
  end
  return list
end

--- Gradients of sum(y * p) for the inputs `wrt` (copies of `ins` become leaves on the device, of that type). How:
---   plain    leaves go into the op
---   twice    two backwards: the second adds to gradients that are there
---   inner    the inputs are computed from leaves, used by two calls and by one other op: gradients meet inside
---   strided  the op sees transposed views of the leaves
---   leaf     the leaves themselves have other strides, over two backwards
---   fp32     leaves sum their gradients in fp32, over two backwards
---   kept     two backwards through one graph, which the first one keeps
local function gradients(name, set, ins, n, wrt, p, device, dtype, how)
  local used, leaves = {}, {}
  for i = 1, n do used[i] = ins[i] and ins[i]:to(device) or nil end
  for _, i in ipairs(wrt) do
    local t = ins[i]:to(dtype):to(device)
    if how == "leaf" then
      leaves[i] = (H.lay_out(t, "transposed") or t:clone()):requires_grad(true)
    elseif how == "strided" and t.ndim >= 2 then
      leaves[i] = t:transpose(0, -1):contiguous():requires_grad(true)
    else
      leaves[i] = t:clone():requires_grad(true)
    end
    if how == "fp32" then leaves[i]:grad_in_fp32(true) end
  end
  p = p:to(device)
  for _ = 1, (how == "twice" or how == "leaf" or how == "fp32") and 2 or 1 do
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
    local weights = p:to { dtype = y:dtype(), device = y:device() }
    if how == "inner" then
      local again = run(name, set, used, n, dtype)[1]
      local loss = ((y * weights):double():sum() + (again * weights):double():sum()):to(device) + extra
      loss:backward()
    elseif how == "kept" then
      y:backward(weights, { retain_graph = true })
      y:backward(weights)
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

--- Checks gradients with central differences of sum(y * p) at up to 20 elements of each input, on ref in fp64.
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
    for e = 0, count - 1 do largest = larger(largest, math.abs(gb[e])) end
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
      assert(math.abs(slope - gb[e]) <= 1e-6 * larger(1, largest),
             ("%s: the gradient of input %d at element %d is %.10g, differences give %.10g"):format(
               describe_set(name, "fp64", set, ins, n), i, e, gb[e], slope))
    end
  end
end

--- Returns g * factor + plus, on ref in fp64.
local function expected(g, factor, plus) return ops.affine(g, factor, plus) end

local function check_gradients(row, set)
  local name = row[1]
  local wrt = differentiable(row, set)
  for _, dtype in ipairs { "fp32", "bf16" } do
    -- The same values are used for every type, so they are rounded to the narrowest type first.
    local narrow, n = make_inputs(set, dtype)
    local wide = {}
    for i = 1, n do wide[i] = narrow[i] and (narrow[i]:is_float() and narrow[i]:double() or narrow[i]) end
    local y = run(name, set, wide, n, "fp64")[1]
    local p = make({ shape = y:shape(), low = 0.5, high = 1.5 }, dtype):double()
    local exact = gradients(name, set, wide, n, wrt, p, "ref", "fp64", "plain")
    if dtype == "fp32" then
      check_differences(name, set, wide, n, wrt, p, exact)
      for how, f in pairs { twice = { 2, 0 }, kept = { 2, 0 }, inner = { 2, 1 },
        strided = row.layouts ~= false and { 1, 0 } or nil } do
        local got = gradients(name, set, wide, n, wrt, p, "ref", "fp64", how)
        for _, i in ipairs(wrt) do
          compare(describe_set(name, "fp64 on ref", set, wide, n, how .. ", gradient " .. i), got[i],
            expected(exact[i], f[1], f[2]), 1e-9)
        end
      end
    end
    local rooms = H.rooms(set.spread_of_gradients, dtype, p, wide)
    local plans = { plain = { 1, 0 }, twice = { 2, 0 }, kept = { 2, 0 }, inner = { 2, 1 } }
    if row.layouts ~= false then plans.strided, plans.leaf = { 1, 0 }, { 2, 0 } end
    if dtype == "bf16" then plans = { plain = { 1, 0 }, fp32 = { 2, 0 }, inner = { 2, 1 } } end
    for how, f in pairs(plans) do
      local got = gradients(name, set, narrow, n, wrt, p, "cpu", dtype, how)
      local tol, floor = row.gtol and row.gtol[dtype] or GTOL[dtype], (row.gfloor or NO_FLOOR)[dtype] or row.floor or 0
      if how == "inner" then floor = floor + tol end       -- 2 g + 1 can be small even if 2 g is not
      for _, i in ipairs(wrt) do
        assert.equal(how == "fp32" and "fp32" or dtype, got[i]:dtype())
        compare(describe_set(name, dtype .. " on cpu", set, narrow, n, how .. ", gradient " .. i), got[i],
          expected(exact[i], f[1], f[2]), tol, floor, rooms[i] and rooms[i] * f[1])
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
