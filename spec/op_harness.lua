-- SPDX-License-Identifier: BSD-3-Clause
-- Shared by the specs of ops: tensors for the sets of the case table, other layouts of the same values, running an op
-- by name, and the comparison of results. Loaded with dofile.
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

local IS_FLOAT = { fp32 = true, bf16 = true, fp16 = true, fp64 = true }
-- The final rounding of the output can go either way: one unit in the last place of bf16 and fp16.
local TOL = { fp32 = 1e-5, bf16 = 2 ^ -7, fp16 = 2 ^ -10, fp64 = 1e-9 }
-- denormals
local TINY = { fp32 = 1e-37, bf16 = 1e-37, fp16 = 6e-8, fp64 = 0, int32 = 0, int64 = 0, uint8 = 0, bool = 0 }

-- -- making and reading tensors -------------------------------------------------------------------------------------
local seed = 0

--- Returns a contiguous tensor on ref for an input of a set.
local function make(spec, dtype)
  seed = seed + 1
  if spec.bool then
    local t = ps.empty(spec.shape, { device = "ref" })
    return ops.uniform_(t, 0, 1, seed):gt(0.3)
  elseif spec.runs then                                           -- every fourth run consists of zeros
    local t = ops.uniform_(ps.empty(spec.shape, { device = "ref" }), 0, 1, seed)
    local run = t:lt(1 / spec.runs):float():cumsum(1) + 1
    return (run * run:ne((run / 4):floor() * 4):float()):to("int32")
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

--- Returns the inputs of a set as tensors on ref, and their number n. Absent inputs are nil.
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

--- Copies tensors to a device. A tensor that occurs twice stays one tensor.
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
--- Returns the same values with other strides, or nil if the shape has no such layout.
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
  if t:device() == "cuda" then t = t:to("cpu") end
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

--- Runs a case's op. Returns the outputs, or all inputs of an op that writes in place.
local function run(name, set, ins, n, dtype)
  local a = attrs_of(set, dtype)
  local out
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

-- -- comparing ------------------------------------------------------------------------------------------------------
local function shape_text(t) return t and "[" .. table.concat(t:shape(), ", ") .. "] " .. t:dtype() or "none" end

local function describe_set(name, dtype, set, ins, n, more)
  local parts = {}
  for i = 1, n do parts[i] = shape_text(ins[i]) end
  local a = attrs_of(set, dtype)
  for i = 1, a.n do parts[#parts + 1] = type(a[i]) == "table" and "{" .. table.concat(a[i], ",") .. "}"
    or tostring(a[i]) end
  return ("%s(%s) in %s%s"):format(name, table.concat(parts, ", "), dtype, more and ", " .. more or "")
end

--- Checks that every |got - want| is at most tol times the larger of |want| and the root mean square of all elements
--- (or that both are the same infinity or NaN). With tol 0, they must be equal. `floor` is an absolute difference that
--- is always allowed. `room` is a tensor with an allowed difference for each element.
local function compare(what, got, want, tol, floor, room)
  floor = floor or 0
  local rooms = room and read(room)
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
      fine = math.abs(x - y) <= tol * math.max(math.abs(y), rms) + floor + (rooms and rooms[i] or 0)
        and math.abs(y) < math.huge
    end
    if not fine then
      error(("%s: element %d of %d is %.9g, not %.9g (off by %.2g; bound %.2g, rms %.3g)"):format(what, i, n, x, y,
        math.abs(x - y), tol * math.max(math.abs(y), rms) + floor + (rooms and rooms[i] or 0), rms), 0)
    end
  end
end

-- A set's numbers depend on its op's name and its index among the op's sets, so that cases added elsewhere in the table
-- do not change them. PS_OP_SEED=n draws other numbers, and no bound may depend on them.
local DRAW = tonumber(os.getenv "PS_OP_SEED") or 0

local function seed_of(name, number)
  local hash = DRAW
  for i = 1, #name do hash = (hash * 31 + name:byte(i)) % 2 ^ 20 end
  return hash * 1000 + number * 100
end

-- The allowance of a case's spread is seven standard deviations, which sums of many rounding errors do not reach.
local UNIT = { fp32 = 2 ^ -24, bf16 = 2 ^ -8, fp16 = 2 ^ -11 }

--- Returns, for each output (or gradient), a tensor with its elements' allowance in addition to tol. Returns none
--- without `spread`.
local function rooms(spread, dtype, ...)
  if not spread or not UNIT[dtype] then return {} end
  local n = select("#", ...)
  local given = { ... }
  given[n + 1] = UNIT[dtype]
  local list = spread(unpack(given, 1, n + 1))
  for i, t in ipairs(list) do list[i] = t * (7 * UNIT[dtype]) end
  return list
end

local rows_of, names, counts = {}, {}, {}
for _, row in ipairs(cases.rows) do
  local name = row[1]
  if not rows_of[name] then
    rows_of[name], counts[name] = {}, 0
    names[#names + 1] = name
  end
  for k = 2, #row do
    row[k].seed = seed_of(name, counts[name])
    counts[name] = counts[name] + 1
  end
  table.insert(rows_of[name], row)
end

return {
  info = info, has_flag = has_flag, IS_FLOAT = IS_FLOAT, TOL = TOL, TINY = TINY, NONE = NONE, LAYOUTS = LAYOUTS,
  make = make, make_inputs = make_inputs, copies = copies, lay_out = lay_out, read = read, run = run,
  describe_set = describe_set, compare = compare, rooms = rooms, rows_of = rows_of, names = names,
}
