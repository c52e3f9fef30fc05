-- SPDX-License-Identifier: BSD-3-Clause
-- The case table of ops: every row of ops.def has a case here (otherwise spec/tensor/ops_spec.lua fails). It drives
-- the comparison of backends, odd and strided shapes, types, and gradients by finite differences.
--
-- A case: { "op", sets..., fields }. A set is a list of inputs with `attrs`, the op's attributes in ops.def's order (a
-- list with n, or a function of the type's name that returns one), and optionally:
--   grads = false   no gradients are checked for this set (it is too large for finite differences, or not smooth)
--   large = true    the op is divided among threads: it runs with one thread and with all of them, and must have equal
--                   bits; fewer layouts
--   prepare(ins)    computes inputs that depend on others; all are contiguous tensors on ref
--   spread(ins, u)  for results whose terms cancel, so that their relative error may be large: for each output a
--                   tensor with the output's standard deviation, in units of u, if every stored value has a relative
--                   error of up to u; seven standard deviations are allowed in addition to tol
--   spread_of_gradients(dy, ins, u)  the same for the gradients of the inputs
-- An input: F(shape, low, high) float of the type under test, I(shape, low, high) index, B(shape) bool, NONE absent,
-- R({ B, T }, length) int32, whose rows are runs of equal numbers of about this length; some runs are zeros. F(shape,
-- low, high, "fp32") has this type whatever type is tested, except that gradients are checked in fp64: then all float
-- inputs are fp64, so the op's shape rule must accept them (for instance a table of cosines in fp64 instead of fp32).
-- Fields of a case:
--   types   the types to run, default fp32 bf16 fp16;  ints = true adds int32, int64, uint8 and bool, compared exactly
--   wrt     the inputs with gradients, default all F (without `dtype`) if the op has a gradient rule
--   exact   equal bits are promised between backends
--   tol, gtol  { fp32 =, bf16 =, fp16 = } instead of the usual bounds, of outputs and of gradients
--   floor   an absolute difference that is always allowed, for results that are small differences of large numbers;
--   gfloor  { fp32 =, bf16 = }, the same for gradients, if the rule computes with a rounded output
--   edges   the op also runs on infinities, NaN, zeros, large and small values ("finite": only finite ones)
--   layouts = false: only contiguous inputs
local NONE = { absent = true }

local function F(shape, low, high, dtype) return { shape = shape, low = low or -2, high = high or 2, dtype = dtype } end
local function I(shape, low, high) return { shape = shape, low = low, high = high, index = true } end
local function B(shape) return { shape = shape, bool = true } end
local function R(shape, length) return { shape = shape, runs = length } end
--- Returns an input that is the same tensor as input i.
local function SAME(i) return { same = i } end

local function args(...) return { n = select("#", ...), ... } end

-- Vectors have 4, 8 or 16 elements or multiples of them. All of these sizes are between or beyond these numbers.
local SHAPES = { { 5, 7 }, {}, { 1 }, { 7 }, { 33 }, { 65 }, { 130 }, { 3, 5, 33 }, { 2, 0, 3 }, { 130, 1, 33 } }
local PAIRS = {
  { { 5, 7 }, { 5, 7 } }, { { 4, 1, 5 }, { 3, 1 } }, { {}, {} }, { { 33 }, { 33 } }, { { 65 }, {} },
  { { 2, 130 }, { 2, 1 } }, { { 130 }, { 3, 1, 1 } }, { { 3, 5, 33 }, { 33 } }, { { 33 }, { 2, 5, 33 } },
  { { 2, 0 }, { 2, 1 } }, { { 130, 33 }, { 130, 33 } },
}

-- A size with enough elements for parallel loops.
local LARGE = { 131, 257 }

--- Rounds the first two inputs, if they are floats, to whole numbers, many of which are equal.
local function whole(ins)
  for i = 1, 2 do if ins[i] and ins[i]:is_float() then ins[i] = ins[i]:round() end end
end

local cases = {}

local function case(row) cases[#cases + 1] = row end

--- Adds an op with one input for all SHAPES.
local function unary(name, low, high, attrs, fields)
  local row = { name }
  for i, shape in ipairs(SHAPES) do
    row[i + 1] = { F(shape, low, high), attrs = attrs, grads = (i <= 2) }
  end
  row[#row + 1] = { F(LARGE, low, high), attrs = attrs, grads = false, large = true }
  for k, v in pairs(fields or {}) do row[k] = v end
  case(row)
end

--- Adds an op with two inputs for all PAIRS of shapes.
local function binary(name, a, b, fields)
  local row = { name }
  a, b = a or { -2, 2 }, b or { -2, 2 }
  for i, p in ipairs(PAIRS) do
    row[i + 1] = { F(p[1], a[1], a[2]), F(p[2], b[1], b[2]), grads = (i <= 3) }
  end
  for _, shape in ipairs { LARGE, { 257 }, { 131, 1 } } do
    row[#row + 1] = { F(LARGE, a[1], a[2]), F(shape, b[1], b[2]), grads = false, large = true }
  end
  for k, v in pairs(fields or {}) do row[k] = v end
  case(row)
end

-- -- views ----------------------------------------------------------------------------------------------------------
case { "reshape", { F { 4, 6 }, attrs = args(3, { 2, 3, 4 }) }, { F { 2, 3, 5 }, attrs = args(2, { -1, 5 }) },
       { F { 1 }, attrs = args(0, {}) }, { F { 2, 0 }, attrs = args(3, { 0, 3, 2 }) }, layouts = false, exact = true,
       ints = true }
case { "permute", { F { 2, 3, 5 }, attrs = args { 2, 0, 1 } }, { F { 4, 3 }, attrs = args { -1, 0 } }, exact = true,
       ints = true }
case { "slice", { F { 5, 7 }, attrs = args(1, 1, 6, 2) }, { F { 5, 7 }, attrs = args(-2, 2, 2) },
       { F { 33 }, attrs = args(0, 3, 33, 4) }, exact = true, ints = true }
case { "expand", { F { 3, 1 }, attrs = args(3, { 2, 3, 4 }) }, { F {}, attrs = args(2, { 3, 2 }) },
       { F { 1, 5 }, attrs = args(2, { -1, -1 }) }, exact = true, ints = true }

-- -- copies and types -----------------------------------------------------------------------------------------------
unary("contiguous", nil, nil, nil, { exact = true, ints = true })
do
  -- conversions to each type (see also ops_spec)
  local row = { "cast", exact = true, ints = true, edges = true, wrt = {} }
  for code = 0, 7 do row[#row + 1] = { F({ 3, 33 }, -300, 300), attrs = args(code) } end
  case(row)
  case { "cast", { F { 5, 7 }, attrs = args(3) }, types = { "fp32" } }          -- the gradient is cast back
end
case { "copy_", { F { 5, 7 }, F { 5, 7 } }, { F { 3, 5, 33 }, F { 33 } }, { F { 130 }, F {} },
       { F({ 4, 33 }, 0, 1, "int32"), F({ 4, 33 }, -300, 300) }, { F { 4, 33 }, F({ 4, 33 }, -300, 300, "fp32") },
       exact = true, ints = true }
case { "fill_", { F { 5, 7 }, attrs = args(1.7) }, { F { 130 }, attrs = args(-3) }, { F {}, attrs = args(1e9) },
       exact = true, ints = true }
case { "arange_", { F { 5, 7 }, attrs = args(3, 2) }, { F { 130 }, attrs = args(-1, 0.25) }, exact = true, ints = true }
case { "uniform_", { F { 130 }, attrs = args(-1, 2, 5, 7) }, { F { 3, 33 }, attrs = args(0, 1, 77, 2 ^ 33) },
       exact = true, layouts = false }
case { "normal_", { F { 130 }, attrs = args(0, 1, 5, 7) }, { F { 3, 33 }, attrs = args(-3, 0.5, 77, 2 ^ 33) },
       layouts = false }
case { "randint_", { F { 130 }, attrs = args(-9, 1000, 5, 7) }, { F { 3, 33 }, attrs = args(0, 2, 77, 2 ^ 33) },
       types = { "int32", "int64" }, exact = true, layouts = false }
case { "randperm_", { F { 130 }, attrs = args(5, 7) }, { F { 1 }, attrs = args(5, 7) }, { F { 0 }, attrs = args(5, 7) },
       { F { 33 }, attrs = args(77, 2 ^ 33) }, { F { 33000 }, attrs = args(3, 1), large = true }, types = { "int64" },
       exact = true, layouts = false }
case { "bernoulli", { F({ 130 }, 0, 1), attrs = args(-1, 5, 7) }, { F({ 3, 33 }, 0, 1), attrs = args(-1, 77, 2 ^ 33) },
       { F { 5, 7 }, attrs = args(0.3, 5, 7) }, { F {}, attrs = args(1, 5, 7) }, { F { 2, 0 }, attrs = args(0, 5, 7) },
       { F({ 131, 257 }, 0, 1), attrs = args(-1, 5, 7), large = true }, exact = true }
case { "axpy_", { F { 5, 7 }, F { 5, 7 }, attrs = args(-0.3) }, { F { 130 }, F({ 130 }, -2, 2, "fp32") },
       { F { 65 }, F({ 65 }, -2, 2, "bf16") }, layouts = false }
case { "scale_", { F { 5, 7 }, attrs = args(-0.3) }, { F { 130 }, attrs = args(0) }, layouts = false }

-- -- elementwise, two inputs ----------------------------------------------------------------------------------------
binary("add", nil, nil, { ints = true })
binary("sub", nil, nil, { ints = true })
binary("mul", nil, nil, { ints = true })
binary("div", nil, { 0.5, 3 }, { ints = true })
binary("pow", { 0.3, 3 }, nil, { tol = { fp32 = 2e-5 } })
for _, name in ipairs { "remainder", "fmod", "floor_divide" } do
  binary(name, { -9, 9 }, { 0.5, 3 }, { exact = true, ints = true })
  binary(name, { -9, 9 }, { -3, -0.5 }, { exact = true, ints = true })
end
for _, weight in ipairs { 0.3, -0.25, 0.75, 2 } do
  case { "lerp", { F { 5, 7 }, F { 5, 7 }, attrs = args(weight) }, { F { 4, 1, 5 }, F { 3, 1 }, attrs = args(weight) },
         { F {}, F { 65 }, attrs = args(weight) }, { F { 130 }, F { 130 }, attrs = args(weight), grads = false } }
end
binary("prelu")
binary("logit_entropy", { -9, 9 }, { 0, 1 }, { floor = 2e-6 })
for _, name in ipairs { "maximum", "minimum" } do binary(name, nil, nil, { exact = true, ints = true }) end
for _, name in ipairs { "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or" } do
  binary(name, { -1, 1 }, { -1, 1 }, { exact = true, ints = true })
end
case { "where", { B { 5, 7 }, F { 5, 7 }, F { 5, 7 } }, { B { 7 }, F { 3, 1 }, F {} },
       { B { 3, 5, 1 }, F { 33 }, F { 5, 33 }, grads = false }, { B { 130 }, F { 130 }, F { 130 }, grads = false },
       { B {}, F { 65 }, F { 65 }, grads = false }, exact = true, ints = true }

-- -- elementwise, one input -----------------------------------------------------------------------------------------
unary("affine", nil, nil, args(-1.5, 0.25), { edges = true })
case { "affine", { F { 3, 33 }, attrs = args(3, -7) }, { F { 65 }, attrs = args(0, 2) }, ints = true }
unary("pow_scalar", 0.3, 3, args(1.7), { tol = { fp32 = 2e-5 } })
case { "pow_scalar", { F { 5, 7 }, attrs = args(2) }, { F { 5, 7 }, attrs = args(3) },
       { F({ 33 }, 0.5, 2), attrs = args(-1) }, { F({ 33 }, 0.5, 2), attrs = args(0.5) },
       { F { 33 }, attrs = args(0) } }
unary("log1p", -0.9, 3, nil, { edges = true })
unary("expm1", -3, 3, nil, { edges = true })
unary("leaky_relu", nil, nil, args(0.125), { edges = true })
unary("elu", nil, nil, args(0.75), { edges = true, tol = { fp32 = 2e-5 } })
unary("softplus", nil, nil, args(1.5, 4), { edges = true })
unary("trunc", -5, 5, nil, { exact = true, edges = true })
unary("nan_to_num", nil, nil, args(0.5, 9, -7), { edges = true })
unary("hardsigmoid", -5, 5, nil, { edges = true })
unary("hardswish", -5, 5, nil, { edges = true })
unary("mish", -8, 8, nil, { edges = "finite", floor = 1e-35, gfloor = { fp32 = 1e-6, bf16 = 0.02 } })
unary("logsigmoid", -8, 8, nil, { edges = true })
unary("huber", nil, nil, args(0.75), { edges = "finite" })
for of = 0, 4 do
  case { "slope", { F({ 5, 7 }, -5, 5), F { 5, 7 }, attrs = args(of, 0.75) },
         { F({ 130 }, -5, 5), F { 130 }, attrs = args(of, 0.75) },
         { F({ 3, 5, 33 }, -5, 5), F { 3, 5, 33 }, attrs = args(of, 0.75) }, floor = 1e-6 }
end
unary("clamp", nil, nil, args(-0.75, 1.125), { exact = true, ints = true, edges = true })
unary("exp", -10, 10, nil, { edges = true })
unary("log", 0.01, 50, nil, { edges = true })
unary("sqrt", 0.01, 50, nil, { edges = true })
unary("rsqrt", 0.01, 50, nil, { edges = true })
unary("reciprocal", 0.1, 5, nil, { edges = true })
unary("abs", nil, nil, nil, { exact = true, ints = true, edges = true })
unary("sign", nil, nil, nil, { exact = true, ints = true, edges = true })
unary("floor", -5, 5, nil, { exact = true, edges = true })
unary("ceil", -5, 5, nil, { exact = true, edges = true })
unary("round", -5, 5, nil, { exact = true, edges = true })
unary("sin", -20, 20)
unary("cos", -20, 20)
-- error of exp(-x^2), since x^2 is rounded
unary("erf", -4, 4, nil, { edges = true, gtol = { bf16 = 16 * 2 ^ -8 + 0.02 } })
-- Their gradients are small differences between an output near 1 and 1.
unary("tanh", -4, 4, nil, { edges = true, gfloor = { fp32 = 4e-7, bf16 = 0.02 } })
unary("sigmoid", -8, 8, nil, { edges = true, gfloor = { fp32 = 4e-7, bf16 = 0.02 } })
unary("relu", nil, nil, nil, { exact = true, edges = true })
unary("silu", -8, 8, nil, { edges = "finite", floor = 1e-35 })
-- The result is x / 2 times (a number near 1, minus 1), which has an error of 6e-8.
unary("gelu", -5, 5, args(0), { edges = "finite", floor = 3e-7 })
unary("gelu", -5, 5, args(1), { edges = "finite", floor = 3e-7 })
for tanh = 0, 1 do
  case { "gelu_backward", { F({ 5, 7 }, -5, 5), F { 5, 7 }, attrs = args(tanh) },
         { F({ 130 }, -5, 5), F { 130 }, attrs = args(tanh) },
         { F({ 3, 5, 33 }, -5, 5), F { 3, 5, 33 }, attrs = args(tanh) } }
end
case { "silu_backward", { F({ 5, 7 }, -8, 8), F { 5, 7 } }, { F({ 130 }, -8, 8), F { 130 } },
       { F({ 3, 5, 33 }, -8, 8), F { 3, 5, 33 } } }
for act = 0, 2 do
  local sets = { {}, { "act_mul_backward" } }
  for i, shape in ipairs { { 5, 7 }, { 130 }, { 3, 5, 33 }, { 2, 0, 3 }, {} } do
    sets[1][i] = { F(shape, -5, 5), F(shape), attrs = args(act), grads = i == 1 }
    sets[2][i + 1] = { F(shape, -5, 5), F(shape), F(shape), attrs = args(act) }
  end
  case { "act_mul", floor = 6e-7, unpack(sets[1]) }
  case(sets[2])
end
unary("isfinite", nil, nil, nil, { exact = true, edges = true })
unary("logical_not", -1, 1, nil, { exact = true, ints = true, edges = true })

-- -- reductions: dims is a bit set ----------------------------------------------------------------------------------
do
  --- shape, dims, and whether the shape is too large for finite differences
  local shapes = {
    { { 5, 7 }, 0 }, { { 3, 4, 5 }, 2 }, { { 3, 4, 5 }, 5 }, { { 3, 4, 5 }, 1 }, { { 33 }, 1 }, { {}, 0 },
    { { 7, 130 }, 1, true }, { { 7, 130 }, 2, true }, { { 65, 33 }, 0, true }, { { 130, 65 }, 1, true },
    { { 2, 65, 3, 33 }, 10, true }, { LARGE, 0, true }, { LARGE, 1, true }, { LARGE, 2, true },
  }
  local function reduction(name, fields)
    local row = { name }
    for _, s in ipairs(shapes) do
      for keepdim = 0, 1 do
        row[#row + 1] = { F(s[1]), attrs = args(s[2], keepdim), grads = not s[3] and keepdim == 0,
          large = s[1] == LARGE }
      end
    end
    -- a sum of many terms moves away from 0 and back, in at least 16 lanes
    for k = 2, #row do
      local set = row[k]
      if set.attrs[1] == 0 and (name == "sum" or name == "mean") then
        set.spread = function(ins)
          local n = ins[1]:numel()
          return { ins[1]:double():square():mean():sqrt() * (math.max(1, n / 16) / (name == "sum" and 1 or n)) }
        end
      end
    end
    for k, v in pairs(fields) do row[k] = v end
    case(row)
  end
  reduction("sum", { ints = true })
  case { "sum", { F { 0, 3 }, attrs = args(1, 0) }, { F { 2, 0 }, attrs = args(0, 0) } }
  reduction("mean", {})
  reduction("amax", { ints = true, exact = true })
  reduction("amin", { ints = true, exact = true })
end
for _, name in ipairs { "argmax", "argmin" } do
  case { name, { F { 5, 7 }, attrs = args(0, 0) }, { F { 5, 7 }, attrs = args(-1, 1) },
         { F { 3, 130, 2 }, attrs = args(1, 0) }, { F { 65, 33 }, attrs = args(1, 0) },
         { F { 130 }, attrs = args(0, 0) }, exact = true, ints = true }
end
case { "prod", { F { 5, 7 }, attrs = args(0, 0) }, { F { 5, 7 }, attrs = args(-1, 1) },
       { F { 3, 13, 2 }, attrs = args(1, 0) }, { F { 65, 33 }, attrs = args(0, 0) }, { F { 130 }, attrs = args(0, 0) },
       { F { 1 }, attrs = args(0, 1) },
       { F { 3, 0, 2 }, attrs = args(1, 0) }, { F { 0, 3 }, attrs = args(1, 0) }, exact = true, ints = true }
case { "flip", { F { 5, 7 }, attrs = args(1) }, { F { 5, 7 }, attrs = args(2) }, { F { 3, 5, 2 }, attrs = args(5) },
       { F { 3, 5, 2 }, attrs = args(2) }, { F { 130 }, attrs = args(1) }, { F { 4, 3 }, attrs = args(0) },
       { F { 3, 0 }, attrs = args(3) }, { F { 65, 513 }, attrs = args(3), grads = false, large = true },
       exact = true, ints = true }
case { "triangle", { F { 5, 7 }, attrs = args(0, 0) }, { F { 7, 5 }, attrs = args(2, 1) },
       { F { 2, 3, 5 }, attrs = args(-1, 0) }, { F { 2, 5, 3 }, attrs = args(-1, 1) },
       { F { 4, 4 }, attrs = args(9, 0) }, { F { 4, 4 }, attrs = args(-2 ^ 53, 0) },
       { F { 4, 4 }, attrs = args(2 ^ 53, 1) }, { F { 3, 0 }, attrs = args(0, 0) },
       { F { 65, 513 }, attrs = args(1, 1), grads = false, large = true }, exact = true, ints = true }
case { "cumsum", { F { 5, 7 }, attrs = args(0, 0) }, { F { 5, 7 }, attrs = args(1, 1) },
       { F { 3, 130, 2 }, attrs = args(1, 0), grads = false }, { F { 65, 33 }, attrs = args(-1, 1), grads = false },
       { F { 130 }, attrs = args(0, 0), grads = false }, ints = true, tol = { bf16 = 0.02 } }
case { "cumprod", { F({ 5, 7 }, 0.5, 1.5), attrs = args(0) }, { F { 5, 7 }, attrs = args(1), prepare = whole },
       { F { 3, 4, 2 }, attrs = args(1), prepare = whole }, { F { 2, 0, 3 }, attrs = args(1) },
       { F({ 3, 130, 2 }, 0.5, 1.5), attrs = args(1), grads = false },
       { F({ 33, 65 }, 0.5, 1.5), attrs = args(0), grads = false },
       { F({ 65, 33 }, 0.5, 1.5), attrs = args(-1), grads = false },
       { F({ 131, 257 }, 0.9, 1.1), attrs = args(1), grads = false, large = true },
       { F({ 131, 257 }, 0.9, 1.1), attrs = args(0), grads = false, large = true }, ints = true }
case { "cumprod_backward", { F { 5, 7 }, F { 5, 7 }, attrs = args(0), prepare = whole },
       { F { 5, 7 }, F { 5, 7 }, attrs = args(1) }, { F { 2, 0, 3 }, F { 2, 0, 3 }, attrs = args(1) },
       { F({ 3, 130, 2 }, 0.9, 1.1), F { 3, 130, 2 }, attrs = args(1) },
       { F({ 33, 65 }, 0.9, 1.1), F({ 33, 65 }, 0, 1), attrs = args(0) },
       { F({ 131, 257 }, 0.9, 1.1), F({ 131, 257 }, 0, 1), attrs = args(1), large = true },
       { F({ 131, 257 }, 0.9, 1.1), F({ 131, 257 }, 0, 1), attrs = args(0), large = true }, floor = 1e-5 }
do
  local row = { "masked_scatter", exact = true, ints = true }
  for _, of in ipairs { { { 5, 7 }, { 35 } }, { { 130 }, { 2, 100 } }, { {}, { 1 } }, { { 2, 0 }, { 0 } },
                        { { 131, 257 }, { 131, 257 } } } do
    row[#row + 1] = { F(of[1]), B(of[1]), F(of[2]), large = of[1][1] == 131 or nil }
  end
  case(row)
  local windows = { "unfold", exact = true, ints = true }
  local back = { "unfold_backward" }
  for _, of in ipairs { { { 7 }, 0, 3, 2 }, { { 3, 5, 2 }, 1, 2, 1 }, { { 5, 33 }, -1, 4, 7 }, { { 65 }, 0, 65, 1 },
                        { { 2, 0, 4 }, 2, 3, 1 }, { { 131, 257 }, 1, 5, 2 }, { { 257, 131 }, 0, 5, 2 } } do
    local shape, d, size, step = unpack(of)
    local n, many = shape[d % #shape + 1], shape[1] > 130 or nil
    windows[#windows + 1] = { F(shape), attrs = args(d, size, step), grads = not many, large = many }
    local dy = {}
    for i, m in ipairs(shape) do dy[i] = m end
    dy[d % #shape + 1], dy[#shape + 1] = math.floor((n - size) / step) + 1, size
    back[#back + 1] = { F(dy), attrs = args(d % #shape, size, step, n), large = many }
  end
  case(windows)
  case(back)
end
do
  local function sorted(ins)
    whole(ins)
    ins[1] = ins[1]:sort(-1)
  end
  local row = { "searchsorted", exact = true, ints = true }
  for _, right in ipairs { 0, 1 } do
    for _, of in ipairs { { { 33 }, { 5, 7 } }, { { 1 }, {} }, { { 0 }, { 7 } }, { { 130 }, { 65 } },
                          { { 3, 5, 33 }, { 3, 5, 7 } }, { { 2, 7 }, { 2, 0 } }, { { 257 }, { 131, 257 } },
                          { { 131, 9 }, { 131, 257 } } } do
      row[#row + 1] = { F(of[1], 0, 99), F(of[2], -3, 102), attrs = args(right), prepare = sorted, grads = false,
                        large = of[2][2] == 257 or nil }
    end
  end
  case(row)
end
case { "var", { F { 5, 7 } }, { F { 33 }, attrs = args(0) }, { F { 3, 130 }, attrs = args(1, 1) },
       { F { 2, 65 }, attrs = args(0, 1, 1) }, { F { 3, 2 }, attrs = args(1, 0, 1) }, { F { 0, 3 } },
       { F { 131, 257 }, large = true } }
case { "median", { F { 7 } }, { F { 1 } }, { F { 130 }, prepare = whole }, { F { 64 } }, { F { 65 } },
       { F { 3000 }, prepare = whole }, { F { 30001 } }, exact = true, edges = true }
case { "cdist", { F { 5, 3 }, F { 4, 3 } }, { F { 2, 3, 5 }, F { 2, 7, 5 } },
       { F { 2, 33 }, F { 130, 33 }, grads = false }, { F { 7, 65 }, F { 1, 65 }, grads = false },
       { F { 3, 0 }, F { 2, 0 }, grads = false }, { F { 0, 3 }, F { 2, 3 } },
       { F { 131, 17 }, F { 257, 17 }, grads = false, large = true } }
do
  local function measure(ins) ins[3] = (ins[1]:double():unsqueeze(-2) - ins[2]:double():unsqueeze(-3)):norm(2, -1):to(
    ins[1]:dtype()) end
  local row = { "cdist_backward", floor = 2e-5 }
  for _, s in ipairs { { { 5, 3 }, { 4, 3 }, { 5, 4 } }, { { 2, 3, 5 }, { 2, 7, 5 }, { 2, 3, 7 } },
                       { { 2, 33 }, { 130, 33 }, { 2, 130 } }, { { 0, 3 }, { 2, 3 }, { 0, 2 } },
                       { { 131, 17 }, { 257, 17 }, { 131, 257 } } } do
    row[#row + 1] = { F(s[1]), F(s[2]), NONE, F(s[3]), prepare = measure, large = s[1][1] == 131 or nil }
  end
  case(row)
end
case { "topk", { F { 5, 7 }, attrs = args(3) }, { F { 3, 1500 }, attrs = args(700) }, { F { 97 }, attrs = args(97) },
       { F { 130 }, attrs = args(130) }, { F { 3, 65 }, attrs = args(1) },
       exact = true, ints = true }
case { "sq_norms", { F { 5, 7 }, F { 130 }, F {} }, { F { 65, 33 } },
       { F { 3, 33 }, F { 0 }, F({ 33 }, -2, 2, "fp32") } }
do
  -- conversions to each float type (see also test_cpu_norm.c)
  local row = { "grad_store", wrt = {} }
  for code = 0, 2 do
    for _, shape in ipairs { { 5, 7 }, { 130 }, {}, { 2, 0, 3 } } do
      row[#row + 1] = { F(shape), attrs = args(code) }
    end
  end
  case(row)
  case { "grad_store", { F { 5, 7 }, attrs = args(3) }, types = { "fp64" } }
end

-- -- matrix products ------------------------------------------------------------------------------------------------
case { "matmul", { F { 3, 4 }, F { 4, 5 } }, { F { 2, 3, 4 }, F { 4, 5 } }, { F { 3, 4 }, F { 2, 4, 5 } },
       { F { 2, 1, 3, 4 }, F { 3, 4, 2 } }, { F { 1, 3, 4 }, F { 5, 4, 1 } }, { F { 2, 3, 4 }, F { 2, 4, 5 } },
       { F { 33, 65 }, F { 65, 130 }, grads = false }, { F { 130, 7 }, F { 7, 1 }, grads = false },
       { F { 2, 33, 7 }, F { 2, 7, 65 }, grads = false }, { F { 1, 65 }, F { 65, 33 }, grads = false },
       { F { 3, 0 }, F { 0, 4 }, grads = false }, { F { 0, 3 }, F { 3, 4 }, grads = false } }
for out_in = 0, 1 do
  local function w(i, o) return out_in == 1 and { o, i } or { i, o } end
  local a = args(out_in)
  case { "linear", { F { 3, 4 }, F(w(4, 5)), F { 5 }, NONE, attrs = a },
         { F { 2, 3, 4 }, F(w(4, 5)), NONE, NONE, attrs = a },
         { F { 2, 3, 4 }, F(w(4, 5)), F { 5 }, F { 2, 3, 5 }, attrs = a },
         { F { 4 }, F(w(4, 5)), F { 5 }, NONE, attrs = a }, { F { 3, 4 }, F(w(4, 5)), NONE, F { 3, 5 }, attrs = a },
         { F { 33, 65 }, F(w(65, 130)), F { 130 }, F { 33, 130 }, attrs = a, grads = false },
         { F { 130, 7 }, F(w(7, 1)), F { 1 }, NONE, attrs = a, grads = false },
         { F { 2, 5, 33 }, F(w(33, 7)), F({ 7 }, -2, 2, "fp32"), NONE, attrs = a, grads = false },
         { F { 0, 33 }, F(w(33, 7)), F { 7 }, NONE, attrs = a, grads = false } }
  -- few rows and a large matrix, whose sizes are multiples of a piece in some cases
  case { "linear", { F { 1, 1, 200 }, F(w(200, 333)), NONE, NONE, attrs = a, grads = false },
         { F { 3, 131 }, F(w(131, 1100)), F { 1100 }, F { 3, 1100 }, attrs = a, grads = false },
         { F { 4, 1, 601 }, F(w(601, 111)), F({ 111 }, -2, 2, "fp32"), NONE, attrs = a, grads = false },
         { F { 2, 64 }, F(w(64, 1024)), NONE, F { 2, 1024 }, attrs = a, grads = false },
         { F { 5, 131 }, F(w(131, 1100)), F { 1100 }, F { 5, 1100 }, attrs = a, grads = false } }
end

-- Packed weights are random blocks. Their fp16 scales are between 1/128 and 1/64, and so are their minima. Each entry
-- is { type, numbers in a block, bytes of a block, offsets of the scales' upper halves }. NF4 has an fp32 scale. Type
-- 257 is NF4 with double quantization, whose scales are an input.
local PACKED = { { 2, 32, 18, { 1 } }, { 3, 32, 20, { 1, 3 } }, { 6, 32, 22, { 1 } }, { 7, 32, 24, { 1, 3 } },
  { 8, 32, 34, { 1 } }, { 10, 256, 84, { 81, 83 } }, { 11, 256, 110, { 109 } }, { 12, 256, 144, { 1, 3 } },
  { 13, 256, 176, { 1, 3 } }, { 14, 256, 210, { 209 } }, { 20, 32, 18, { 1 } }, { 23, 256, 136, { 1 } },
  { 39, 32, 17, {} }, { 256, 64, 36, {} }, { 257, 64, 33, {} } }
local function packed_rows(kind, place)
  return function(ins)
    local shape = ins[place]:shape()
    local flat = ins[place]:to("uint8"):reshape(-1, kind[3])
    for _, at in ipairs(kind[4]) do flat:narrow(1, at, 1):fill_(0x20 + at % 4) end
    if kind[1] == 39 then flat:narrow(1, 0, 1):fill_(122) end
    if kind[1] == 256 then flat:narrow(1, 2, 1):fill_(0x80) flat:narrow(1, 3, 1):fill_(0x3e) end
    ins[place] = flat:reshape(unpack(shape))
  end
end
-- Products of more than 4 rows use weights, and on some devices a bias, that are rounded to the type of x.
local function rounded_weights(number, back)
  local ps = require "ps"
  return function(ins, u)
    local x, bias = ins[1]:double(), ins[3]
    local w = ps.ops.unpack(ins[2], ins[5], number, 0):double()
    local rows = x:numel() / x:size(-1)
    if u < 2 ^ -20 or rows <= 4 and not back then return {} end
    local squares = x:square():matmul(back and w:square() or w:square():t())
    return { (bias and squares + bias:double():square() or squares):sqrt() * 3 ^ -0.5 }
  end
end
for _, kind in ipairs(PACKED) do
  local number, block, nbytes = kind[1], kind[2], kind[3]
  local function w(rows, blocks) return I({ rows, blocks * nbytes }, 0, 255) end
  local function set(list, attrs)
    list.prepare, list.attrs, list.grads, list.wrt = packed_rows(kind, #list == 1 and 1 or 2), attrs, false, nil
    if #list > 1 then list.spread = rounded_weights(number, attrs[2] == 1) end
    local rows = list[#list > 1 and 2 or 1].shape
    list[#list + 1] = number == 257 and F({ 257 + math.ceil(rows[1] * rows[2] / nbytes / 256) }, -1, 1, "fp32") or NONE
    return list
  end
  for code, dtype in ipairs { "fp32", "bf16", "fp16" } do
    case { "unpack", set({ w(3, 2) }, args(number, code - 1)), set({ w(1, 1) }, args(number, code - 1)),
           set({ w(0, 2) }, args(number, code - 1)), types = { dtype }, layouts = false, exact = true }
  end
  local forward, back, int8 = args(number, 0, 0), args(number, 1, 0), args(number, 0, 1)
  case { "linear_packed", set({ F { 1, block * 3 }, w(37, 3), F { 37 }, NONE }, int8),
         set({ F { 4, block }, w(6, 1), NONE, F { 4, 6 } }, int8),
         set({ F { 2, block * 4 }, w(130, 4), NONE, NONE }, int8),
         set({ F { 5, block }, w(3, 1), NONE, NONE }, int8),
         set({ F { 1, block * 2 }, w(5, 2), F { 5 }, NONE }, forward),
         set({ F { 2, 3, block }, w(37, 1), NONE, F { 2, 3, 37 } }, forward),
         set({ F { 4, block * 3 }, w(130, 3), F { 130 }, F { 4, 130 } }, forward),
         set({ F { block }, w(33, 1), NONE, NONE }, forward),
         set({ F { 0, block }, w(3, 1), NONE, NONE }, forward),
         set({ F { 33, block * 2 }, w(65, 2), F({ 65 }, -2, 2, "fp32"), NONE }, forward),
         set({ F { 3, 5 }, w(5, 2), NONE, NONE }, back), set({ F { 2, 9, 70 }, w(70, 1), NONE, NONE }, back),
         layouts = false }
end
case { "pack", { F { 3, 64 }, attrs = args(8) }, { F { 32 }, attrs = args(8) }, { F { 0, 32 }, attrs = args(8) },
       { F({ 2, 3, 96 }, -1e-3, 1e-3), attrs = args(8) }, { F { 700, 32 }, attrs = args(8), large = true },
       exact = true }
case { "linear_packed", { F { 3, 64 }, I({ 4, 36 * 1 }, 0, 255), F { 4 }, F { 3, 4 }, NONE, attrs = args(256, 0, 0),
         prepare = packed_rows(PACKED[14], 2) },
       { F { 3, 4 }, I({ 4, 36 * 1 }, 0, 255), NONE, NONE, NONE, attrs = args(256, 1, 0),
         prepare = packed_rows(PACKED[14], 2) },
       layouts = false }

-- -- softmax and losses ---------------------------------------------------------------------------------------------
local ROWS = { { 5, 7 }, { 1 }, { 2, 3, 4 }, { 3, 33 }, { 2, 65 }, { 7, 130 }, { 0, 3 } }
for _, name in ipairs { "softmax", "log_softmax" } do
  local row = { name, gfloor = { bf16 = 0.02 } }
  -- Returns dy minus a mean of dy, times a weight that has the rounding error of an exponent of up to 16.
  local function spread(dy, ins, u)
    local weights, exponent = ins[1]:double():softmax(-1), u < 2 ^ -20 and 16 / 2 or 1
    local size = dy:abs()
    local mean = (name == "softmax" and weights * size or size):sum(-1, true)
    return { weights * (name == "softmax" and size + mean or mean) * exponent }
  end
  for i, shape in ipairs(ROWS) do
    row[i + 1] = { F(shape, -8, 8), grads = i <= 3, spread_of_gradients = spread }
  end
  case(row)
  row = { name .. "_backward" }
  for i, shape in ipairs(ROWS) do
    row[i + 1] = { F(shape, name == "softmax" and 0 or -5, name == "softmax" and 0.3 or 0), F(shape) }
  end
  case(row)
end
do
  local forward, backward = { "nll_loss" }, { "nll_loss_backward" }
  for reduction = 0, 2 do
    for i, s in ipairs { { { 5, 7 }, { 5 } }, { { 2, 3, 4 }, { 2, 3 } }, { { 7, 130 }, { 7 } }, { { 33 }, {} },
                         { { 0, 3 }, { 0 } } } do
      local V, ignore = s[1][#s[1]], i == 2 and 1 or -100
      local weight = i % 2 == 0 and F({ V }, 0.5, 2) or NONE
      forward[#forward + 1] = { F(s[1], -5, 0), I(s[2], 0, V), weight, attrs = args(ignore, reduction) }
      backward[#backward + 1] = { I(s[2], 0, V), F(reduction == 0 and s[2] or {}, 0.5, 1.5), weight,
        attrs = args(ignore, V, reduction) }
    end
  end
  forward[#forward + 1] = { F({ 3, 6 }, -5, 0), I({ 3 }, 0, 1), NONE, attrs = args(0, 1) }  -- no target counts
  forward[#forward + 1] = { F({ 131, 257 }, -5, 0), I({ 131 }, 0, 257), NONE, attrs = args(-100, 1), grads = false,
    large = true }
  backward[#backward + 1] = { I({ 131 }, 0, 257), F({}, 0.5, 1.5), NONE, attrs = args(7, 257, 1), large = true }
  forward.wrt = { 1 }
  case(forward)
  case(backward)
end
do
  local forward, backward = { "cross_entropy" }, { "cross_entropy_backward" }
  for reduction = 0, 2 do
    for i, s in ipairs { { { 5, 7 }, { 5 } }, { { 2, 3, 4 }, { 2, 3 } }, { { 7, 130 }, { 7 } }, { { 3, 65 }, { 3 } },
                         { { 33 }, {} } } do
      local V = s[1][#s[1]]
      local a = args(i == 2 and 1 or -100, reduction)
      forward[#forward + 1] = { F(s[1], -5, 5), I(s[2], 0, V), attrs = a }
      backward[#backward + 1] = {
        F(s[1], -5, 5), I(s[2], 0, V), NONE, F(reduction == 0 and s[2] or {}, 0.5, 1.5, "fp32"), attrs = a,
        prepare = function(ins) ins[3] = (ins[1]:double():exp():sum(-1):log()):float() end }
    end
  end
  forward[#forward + 1] = { F({ 3, 6 }, -5, 5), I({ 3 }, 0, 1), attrs = args(0, 1) }        -- no target counts
  -- Hits: whole-number logits, several of which are the largest, in rows of several blocks, and in rows longer than a
  -- kernel keeps.
  for reduction, s in ipairs { { 40, 7 }, { 40, 130 }, { 9, 5000 }, { 3, 70000 }, { 33, 256 } } do
    forward[#forward + 1] = { F(s, -2, 2), I({ s[1] }, 0, math.min(s[2], 9)), grads = false, prepare = whole,
                              attrs = args(reduction == 2 and 1 or -100, reduction % 3, 1) }
  end
  case(forward)
  case(backward)
  local function lm(x, V, target, ...) return { F(x), F { V, x[#x] }, I(target, 0, V), NONE, attrs = args(...) } end
  local function biased(x, V, ...)
    local ins = lm(x, V, ...)
    ins[4] = F { V }
    return ins
  end
  case { "lm_loss", lm({ 5, 4 }, 7, { 5 }, -100, 1), lm({ 2, 3, 4 }, 6, { 2, 3 }, 1, 2),
         lm({ 2, 3, 4 }, 6, { 2, 3 }, 1, 1), lm({ 33, 65 }, 130, { 33 }, -100, 1), lm({ 130, 8 }, 33, { 130 }, 3, 1),
         biased({ 5, 4 }, 7, { 5 }, -100, 1), biased({ 2, 3, 4 }, 6, { 2, 3 }, 1, 2),
         { F { 5, 4 }, F { 7, 4 }, I({ 5 }, 0, 1), NONE, attrs = args(0, 1) },                    -- no target counts
         { F { 60, 3 }, F { 9, 3 }, I({ 60 }, 0, 9), NONE, attrs = args(1, 1, 0, 0, 1), prepare = whole },
         { F { 60, 3 }, F { 300, 3 }, I({ 60 }, 0, 30), F { 300 }, attrs = args(-100, 2, 0, 0, 1), prepare = whole,
           grads = false },
         tol = { bf16 = 0.01, fp16 = 0.001 }, gtol = { fp32 = 5e-5, bf16 = 0.1 } }
end

-- -- tables ---------------------------------------------------------------------------------------------------------
case { "embedding", { F { 6, 4 }, I({ 5 }, 0, 6) }, { F { 6, 4 }, I({ 2, 3 }, 0, 6) }, { F { 3, 33 }, I({}, 0, 3) },
       { F { 3, 4 }, I({ 9 }, 0, 3), attrs = args(2), grads = false },
       { F { 130, 65 }, I({ 33 }, 0, 130), grads = false },
       { F { 3, 4 }, I({ 12 }, 0, 9), attrs = args(-1, 3, 9) },                                 -- rows 3 to 5 of 9
       { F { 4, 65 }, I({ 40 }, 0, 7), attrs = args(6, 4, 7), grads = false }, exact = true, ints = true }
do
  local codes = { fp32 = 0, bf16 = 1, fp16 = 2, fp64 = 3 }
  local function a(rows, padding, first, total)
    return function(dtype) return args(rows, 0, codes[dtype], padding, first, total) end
  end
  case { "embedding_backward", { I({ 5 }, 0, 6), F { 5, 4 }, attrs = a(6) },
         { I({ 2, 33 }, 0, 3), F { 2, 33, 65 }, attrs = a(7) }, { I({ 130 }, 0, 1), F { 130, 7 }, attrs = a(2) },
         { I({ 130 }, 0, 5), F { 130, 7 }, attrs = a(5, 3) },
         { I({ 130 }, 0, 9), F { 130, 7 }, attrs = a(3, 4, 3, 9) },
         { I({ 300 }, 0, 5), F { 300, 8 }, attrs = a(3, -1, 3, 5) } }
end
case { "flat_index", { I({ 3, 4 }, 0, 5), attrs = args({ 5 }, { 0 }) },
       { I({ 130 }, -5, 5), attrs = args({ 5 }, { 2 }) },
       { I({ 3, 1 }, -2, 2), I({ 4 }, 0, 7), attrs = args({ 2, 7 }, { 0, 1 }) },
       { I({}, 0, 9), I({ 2, 3 }, -3, 3), I({ 3 }, 0, 1), attrs = args({ 9, 3, 1 }, { 0, 2, 3 }) },
       { I({ 33 }, -65, 65), attrs = args({ 65 }, { 0 }) }, exact = true }
-- If an index has no dimensions after dim, it selects whole parts.
case { "gather", { F { 5, 4 }, I({ 3, 4 }, 0, 5), attrs = args(0) }, { F { 5, 4 }, I({ 5, 2 }, 0, 4), attrs = args(1) },
       { F { 5, 4 }, I({ 7 }, 0, 5), attrs = args(0) }, { F { 2, 5, 3, 2 }, I({ 2, 4 }, 0, 5), attrs = args(1) },
       { F { 3, 65, 2 }, I({ 2, 7, 1 }, 0, 65), attrs = args(1), grads = false },
       { F { 3, 65, 2 }, I({ 3, 7, 2 }, 0, 65), attrs = args(-2), grads = false }, exact = true, ints = true }
case { "scatter_add", { F { 5, 4 }, I({ 3, 4 }, 0, 5), F { 3, 4 }, attrs = args(0) },
       { F { 5, 4 }, I({ 5, 6 }, 0, 4), F { 5, 6 }, attrs = args(1) },
       { F { 5, 4 }, I({ 7 }, 0, 5), F { 7, 4 }, attrs = args(0) },
       { F { 2, 5, 3 }, I({ 2, 9 }, 0, 5), F { 2, 9, 3 }, attrs = args(1) },
       { F { 3, 65 }, I({ 3, 130 }, 0, 65), F { 3, 130 }, attrs = args(-1), grads = false }, ints = true }
do
  -- Adds cases in which several elements of src are written to the same element.
  local function sets(name, gradients, ...)
    return { name, { F { 5, 4 }, I({ 8, 4 }, 0, 5), F { 8, 4 }, attrs = args(0, ...), grads = gradients },
      { F { 5, 4 }, I({ 3, 6 }, 0, 4), F { 3, 6 }, attrs = args(1, ...), grads = gradients },
      { F { 5, 4 }, I({ 7 }, 0, 5), F { 7, 4 }, attrs = args(0, ...), grads = gradients },
      { F { 2, 5, 3 }, I({ 2, 9 }, 0, 5), F { 2, 9, 3 }, attrs = args(-2, ...), grads = gradients },
      { F { 5, 3 }, I { 0 }, F { 0, 3 }, attrs = args(0, ...), grads = gradients },
      { F { 3, 65 }, I({ 3, 130 }, 0, 65), F { 3, 130 }, attrs = args(-1, ...), grads = false }, ints = true }
  end
  for _, name in ipairs { "scatter", "scatter_" } do
    local row = sets(name)
    row.exact = true
    case(row)
  end
  case { "scatter_backward", { F { 5, 4 }, I({ 8, 4 }, 0, 5), attrs = args(0) },
         { F { 3, 33 }, I({ 3, 65 }, 0, 33), attrs = args(1) }, { F { 2, 5, 3 }, I({ 2, 9 }, 0, 5), attrs = args(1) },
         { F { 5, 65 }, I({ 9 }, 0, 5), attrs = args(0) }, exact = true }
  local row = sets("scatter_reduce", nil, 0)
  for _, reduce in ipairs { 1, 2 } do
    for k = 2, 7 do row[#row + 1] = sets("scatter_reduce", reduce == 1 and nil, reduce)[k] end
  end
  case(row)
end
case { "concat", { F { 2, 3 }, F { 2, 4 }, F { 2, 1 }, attrs = args(1) }, { F { 2, 3 }, F { 1, 3 }, attrs = args(0) },
       { F { 3, 33 }, F { 3, 0 }, F { 3, 65 }, attrs = args(-1), grads = false },
       { F { 130, 7 }, F { 33, 7 }, attrs = args(0), grads = false },
       { F { 2, 5 }, F({ 2, 5 }, -2, 2, "int32"), attrs = args(0), grads = false }, exact = true, ints = true }

-- -- normalisation --------------------------------------------------------------------------------------------------
do
  local LN, LNB, RMS, RMSB = { "layer_norm" }, { "layer_norm_backward" }, { "rms_norm" }, { "rms_norm_backward" }
  --- Returns the mean and rstd of x as the forward saves them, or the rstd of the mean square.
  local function moments(x, centred)
    local d = x:double()
    local mean = d:mean(-1, true)
    if centred then d = d - mean end
    local rstd = (d:square():mean(-1) + 1e-5):rsqrt()
    return mean:squeeze(-1):float(), rstd:float()
  end
  for i, x in ipairs { { 5, 7 }, { 2, 3, 4 }, { 33 }, { 7, 65 }, { 3, 5, 130 }, { 1 }, { 0, 3 } } do
    local C, small = x[#x], i <= 3
    for _, with in ipairs { true, false } do
      local w = with and F { C } or NONE
      LN[#LN + 1] = { F(x), w, w, attrs = args(), grads = small }
      RMS[#RMS + 1] = { F(x), w, attrs = args(1e-5), grads = small }
      for _, add in ipairs { F(x), NONE } do
        local a = args(with and 1 or 0)
        LNB[#LNB + 1] = { F(x), F(x), w, NONE, NONE, add, attrs = a,
                          prepare = function(ins) ins[4], ins[5] = moments(ins[2], true) end }
        RMSB[#RMSB + 1] = { F(x), F(x), w, NONE, add, attrs = a,
                            prepare = function(ins) ins[4] = select(2, moments(ins[2], false)) end }
      end
    end
  end
  LN[#LN + 1] = { F { 5, 7 }, F { 7 }, NONE, attrs = args() }
  LN.tol, RMS.tol = { fp32 = 2e-5 }, { fp32 = 2e-5 }
  LNB.floor, RMSB.floor = 2e-5, 2e-5      -- with C = 1 the gradient is 0 except for rounding errors times rstd = 316
  -- Values far from 0, where numbers are 8e-6 apart. An error of this size in the mean is divided by a deviation above
  -- 0.2 and multiplied by 2.
  case { "layer_norm", { F({ 5, 7 }, 99, 101), F { 7 }, F { 7 }, attrs = args(), grads = false },
         tol = { fp32 = 2e-5 }, floor = 8e-5 }
  for _, row in ipairs { LN, LNB, RMS, RMSB } do case(row) end
end

do
  --- Returns the mean and variance as the forward returns them, [C] or [N, groups].
  local function moments(x, groups)
    local N, C = x:size(0), x:size(1)
    local d = groups > 0 and x:double():reshape(N, groups, -1) or x:double():transpose(0, 1):reshape(C, -1)
    local mean = d:mean(-1, true)
    return mean:squeeze(-1):float(), (d - mean):square():mean(-1):float()
  end
  local forward, backward = { "channel_norm" }, { "channel_norm_backward" }
  for i, of in ipairs { { { 3, 4, 5 }, 0 }, { { 2, 4, 3, 3 }, 2 }, { { 5, 3 }, 0 }, { { 4, 6 }, 2 },
                        { { 3, 5, 7, 9 }, 0 }, { { 2, 6, 33 }, 3 }, { { 40, 33 }, 0 }, { { 2, 8, 4, 16 }, 1 },
                        { { 9, 16, 15, 16 }, 0 }, { { 9, 16, 15, 16 }, 4 } } do
    local x, groups = of[1], of[2]
    local C, large = x[2], i > 8
    for _, w in ipairs { F { C }, NONE } do
      forward[#forward + 1] = { F(x), w, w, NONE, NONE, attrs = args(1e-3, groups), grads = i <= 4, large = large }
      for given = 0, groups == 0 and 1 or 0 do
        backward[#backward + 1] = { F(x), F(x), w, NONE, NONE, attrs = args(1e-3, groups, given, 1, 1), large = large,
                                    prepare = function(ins) ins[4], ins[5] = moments(ins[2], groups) end }
      end
    end
  end
  for _, x in ipairs { { 3, 4, 5 }, { 40, 33 } } do
    local stats = F({ x[2] }, 0.5, 2, "fp32")
    forward[#forward + 1] = { F(x), F { x[2] }, F { x[2] }, stats, stats, attrs = args(1e-3, 0) }
  end
  forward.tol, forward.floor = { fp32 = 2e-5 }, 2e-6
  backward.floor = 2e-5                          -- gradients are differences of sums
  case(forward)
  case(backward)
end

-- -- images ---------------------------------------------------------------------------------------------------------
do
  local conv, transpose, weight = { "conv" }, { "conv_transpose" }, { "conv_weight" }
  --- x's and w's shapes, stride, dilation, padding, groups, and y's size
  for i, of in ipairs {
    { { 2, 3, 5, 6 }, { 4, 3, 3, 2 }, { 1, 1 }, { 1, 1 }, { 1, 0, 1, 1 }, 1, { 5, 6 } },
    { { 2, 4, 7, 6 }, { 6, 2, 2, 3 }, { 2, 1 }, { 1, 2 }, { 0, 2, 1, 1 }, 2, { 4, 5 } },
    { { 3, 4, 9 }, { 4, 1, 3 }, { 1, 2 }, { 1, 1 }, { 0, 1, 0, 1 }, 4, { 1, 5 } },
    { { 1, 2, 6 }, { 3, 2, 1 }, { 1, 1 }, { 1, 1 }, { 0, 0, 0, 0 }, 1, { 1, 6 } },
    { { 2, 3, 9, 8 }, { 5, 3, 3, 3 }, { 3, 2 }, { 2, 3 }, { 2, 1, 0, 3 }, 1, { 3, 3 } },
    { { 5, 33, 6, 7 }, { 17, 33, 3, 3 }, { 1, 1 }, { 1, 1 }, { 1, 1, 1, 1 }, 1, { 6, 7 } },
    { { 3, 32, 8, 8 }, { 32, 1, 3, 3 }, { 1, 1 }, { 1, 1 }, { 1, 1, 1, 1 }, 32, { 8, 8 } },
    { { 3, 1, 28, 28 }, { 8, 1, 5, 5 }, { 1, 1 }, { 1, 1 }, { 0, 0, 0, 0 }, 1, { 24, 24 } },
    { { 9, 16, 17, 18 }, { 32, 16, 3, 3 }, { 2, 2 }, { 1, 1 }, { 1, 1, 1, 1 }, 1, { 9, 9 } },
    { { 7, 64, 3, 3 }, { 64, 64, 3, 3 }, { 1, 1 }, { 1, 1 }, { 1, 1, 1, 1 }, 1, { 3, 3 } },
  } do
    local x, w, stride, dilation, padding, groups, size = unpack(of)
    local two = #x == 4
    local y = { x[1], w[1], two and size[1] or size[2], two and size[2] or nil }
    local grads, large = i <= 4, i > 8
    for _, b in ipairs(large and { true } or { true, false }) do
      conv[#conv + 1] = { F(x), F(w), b and F { w[1] } or NONE, attrs = args(stride, dilation, padding, groups),
                          grads = grads, large = large }
      transpose[#transpose + 1] = { F(y), F(w), b and F { x[2] } or NONE, grads = grads, large = large,
        attrs = args(stride, dilation, padding, groups, { two and x[3] or 1, x[#x] }) }
      weight[#weight + 1] = { F(x), F(y), large = large,
        attrs = args(stride, dilation, padding, groups, b and 1 or 0, { two and w[3] or 1, w[#w] }) }
    end
  end
  conv[#conv + 1] = { F { 0, 3, 5, 6 }, F { 4, 3, 3, 3 }, NONE, grads = false,
                      attrs = args({ 1, 1 }, { 1, 1 }, { 0, 0, 0, 0 }, 1) }
  weight[#weight + 1] = { F { 0, 3, 5, 6 }, F { 0, 4, 3, 4 }, attrs = args({ 1, 1 }, { 1, 1 }, { 0, 0, 0, 0 }, 1, 1,
                          { 3, 3 }) }
  --- The results are sums of n products in an order that oneDNN chooses.
  for _, row in ipairs { conv, transpose, weight } do row.floor, row.gfloor = 4e-5, { fp32 = 4e-5, bf16 = 0.05 } end
  case(conv)
  case(transpose)
  case(weight)
end
do
  local function p(before, after, value) return args(before, after, value) end
  case { "pad", { F { 5, 7 }, attrs = p({ 1, 2 }, { 0, 3 }, 1.5) },
         { F { 3, 4, 33 }, attrs = p({ 0, -1, 2 }, { 1, 2, -5 }) },
         { F { 33 }, attrs = p({ 65 }, { 1 }, -2) }, { F { 2, 0, 3 }, attrs = p({ 0, 1, 0 }, { 0, 1, 1 }, 7) },
         { F { 4, 5 }, attrs = p({ -2, 3 }, { -2, 0 }, 1) }, { F { 3, 65, 130 }, attrs = p({ 1, 1, 1 }, { 1, 1, 1 }),
           grads = false, large = true }, exact = true, ints = true }
  --- kind, size, kernel, stride, padding, flag, scale, divisor of x [.., H, W]
  local row = { "resample", gfloor = { bf16 = 0.02 } }
  for i, of in ipairs {
    { { 2, 2, 5, 6 }, 0, { 2, 3 }, { 2, 2 }, { 2, 2 }, { 0, 0, 0, 0 }, 1, { 0, 0 }, 0 },
    { { 1, 2, 5, 6 }, 0, { 3, 3 }, { 3, 3 }, { 2, 2 }, { 1, 1, 1, 1 }, 0, { 0, 0 }, 0 },
    { { 1, 2, 6, 7 }, 0, { 4, 4 }, { 3, 2 }, { 2, 2 }, { 1, 1, 1, 1 }, 1, { 0, 0 }, 5 },
    { { 2, 1, 5, 7 }, 1, { 3, 4 }, { 1, 1 }, { 1, 1 }, { 0, 0, 0, 0 }, 0, { 0, 0 }, 0 },
    { { 1, 2, 3, 4 }, 1, { 5, 7 }, { 1, 1 }, { 1, 1 }, { 0, 0, 0, 0 }, 0, { 0, 0 }, 0 },
    { { 1, 2, 3, 5 }, 2, { 7, 4 }, { 1, 1 }, { 1, 1 }, { 0, 0, 0, 0 }, 0, { 0, 0 }, 0 },
    { { 1, 2, 3, 5 }, 2, { 7, 12 }, { 1, 1 }, { 1, 1 }, { 0, 0, 0, 0 }, 1, { 1 / 2.4, 1 / 2.4 }, 0 },
    { { 1, 2, 3, 2 }, 2, { 7, 4 }, { 1, 1 }, { 1, 1 }, { 0, 0, 0, 0 }, 0, { 1 / 2.4, 1 / 2.4 }, 0 },
    { { 2, 1, 3, 5 }, 3, { 7, 4 }, { 1, 1 }, { 1, 1 }, { 0, 0, 0, 0 }, 0, { 0, 0 }, 0 },
    { { 2, 1, 3, 5 }, 3, { 6, 10 }, { 1, 1 }, { 1, 1 }, { 0, 0, 0, 0 }, 1, { 0, 0 }, 0 },
    { { 1, 1, 1, 5 }, 3, { 1, 11 }, { 1, 1 }, { 1, 1 }, { 0, 0, 0, 0 }, 0, { 0, 1 / 2.3 }, 0 },
    { { 1, 2, 4, 5 }, 4, { 8, 9 }, { 1, 1 }, { 1, 1 }, { 3, 4, 1, 0 }, 0, { 0, 0 }, 0 },
    { { 1, 2, 4, 3 }, 5, { 9, 9 }, { 1, 1 }, { 1, 1 }, { 2, 6, 3, 0 }, 0, { 0, 0 }, 0 },
    { { 1, 2, 4, 3 }, 6, { 9, 8 }, { 1, 1 }, { 1, 1 }, { 4, 3, 1, 2 }, 0, { 0, 0 }, 0 },
    { { 9, 16, 15, 17 }, 3, { 30, 33 }, { 1, 1 }, { 1, 1 }, { 0, 0, 0, 0 }, 0, { 0, 0 }, 0 },
    { { 9, 16, 15, 17 }, 0, { 7, 8 }, { 2, 2 }, { 2, 2 }, { 0, 0, 0, 0 }, 1, { 0, 0 }, 0 },
  } do
    local x, kind, size, kernel, stride, padding, flag, scale, divisor = unpack(of, 1, 9)
    local y = { x[1], x[2], size[1], size[2] }
    local large = i > 14
    row[#row + 1] = { F(x), attrs = args(kind, 0, size, kernel, stride, padding, flag, scale, divisor),
                      grads = not large, large = large }
    row[#row + 1] = { F(y), attrs = args(kind, 1, { x[3], x[4] }, kernel, stride, padding, flag, scale, divisor),
                      grads = not large, large = large }
  end
  case(row)
end
do
  local ps = require "ps"
  local forward, backward = { "max_pool", exact = true, edges = false }, { "max_pool_backward" }
  --- kernel, stride, dilation, padding, size, adaptive of x [.., H, W]
  for i, of in ipairs {
    { { 2, 2, 5, 6 }, { 2, 2 }, { 2, 2 }, { 1, 1 }, { 0, 0 }, { 2, 3 }, 0 },
    { { 1, 2, 7, 6 }, { 3, 3 }, { 2, 1 }, { 1, 2 }, { 1, 1 }, { 4, 4 }, 0 },
    { { 1, 3, 1, 9 }, { 1, 3 }, { 1, 2 }, { 1, 1 }, { 0, 1 }, { 1, 5 }, 0 },
    { { 2, 1, 5, 7 }, { 1, 1 }, { 1, 1 }, { 1, 1 }, { 0, 0 }, { 3, 4 }, 1 },
    { { 1, 2, 3, 4 }, { 1, 1 }, { 1, 1 }, { 1, 1 }, { 0, 0 }, { 5, 7 }, 1 },
    { { 9, 16, 15, 17 }, { 3, 3 }, { 2, 2 }, { 1, 1 }, { 1, 1 }, { 8, 9 }, 0 },
  } do
    local x, kernel, stride, dilation, padding, size, adaptive = unpack(of)
    local y = { x[1], x[2], size[1], size[2] }
    forward[#forward + 1] = { F(x), attrs = args(kernel, stride, dilation, padding, size, adaptive), grads = i <= 5,
                              large = i > 5 }
    backward[#backward + 1] = { F(y), NONE, large = i > 5,
      attrs = args(kernel, stride, dilation, padding, { x[3], x[4] }, adaptive),
      prepare = function(ins)
        local of_x = ps.randn(x):to("ref")
        ins[2] = select(2, ps.ops.max_pool(of_x, kernel, stride, dilation, padding, size, adaptive))
      end }
  end
  case(forward)
  case(backward)
end

-- -- attention and dropout ------------------------------------------------------------------------------------------
-- a part that begins within a sample
for _, attrs in ipairs { args(0.3, 11, 2, 3, 4), args(0.3, 11, 2, 3, 4, 37, 10),
                         args(0.3, 11, 2, 3, 4, 8, 12) } do
  local row = { "dropout", tol = { fp32 = 2e-7 } }
  for i, shape in ipairs(SHAPES) do row[i + 1] = { F(shape), NONE, attrs = attrs, grads = i <= 2 } end
  row[#row + 1] = { F(LARGE), NONE, attrs = attrs, grads = false, large = true }
  case(row)
end
case { "dropout", { F { 5, 7 }, I({ 5 }, 0, 9), attrs = args(0.3, 11, 2, 3, 4, 0, 21) },  -- rows selected by index
       { F { 3, 4, 33 }, I({ 12 }, 0, 40), attrs = args(0.3, 11, 2, 3, 4, 0, 66) },
       { F { 0, 5 }, I({ 0 }, 0, 1), attrs = args(0.3, 11, 2, 3, 4, 0, 5) },
       { F(LARGE), I({ 131 }, 0, 999), attrs = args(0.3, 11, 2, 3, 4, 0, 514), grads = false, large = true },
       tol = { fp32 = 2e-7 } }
do
  --- scale, causal, p, seed, step, sample, op, window
  local plain, causal, drop = args(0.4, 0), args(0.4, 1), args(0.3, 1, 0.25, 9, 3, 5, 2)
  local forward, backward = { "attention" }, { "attention_backward" }
  local ps = require "ps"
  --- Returns the scores [B, H, T, S], with -inf where a query does not see a key.
  local function seen(s, mask, a)
    local B_, T, S = s:size(0), s:size(2), s:size(3)
    local sees = mask and mask:dim() == 2 and mask:reshape(B_, 1, 1, S):expand(B_, 1, T, S) or nil
    if mask and mask:dim() == 4 and mask:dtype() == "bool" then sees = mask:expand(B_, mask:size(1), T, S) end
    if mask and mask:dim() == 2 and mask:dtype() == "int32" then
      local before = ps.cat({ ps.zeros({ B_, 1 }, { dtype = "int32", device = "ref" }), mask:narrow(1, 0, S - 1) }, 1)
      local run = mask:ne(before):float():cumsum(1)
      sees = run:reshape(B_, 1, T, 1):eq(run:reshape(B_, 1, 1, S)):logical_and(mask:ne(0):reshape(B_, 1, 1, S))
    end
    if mask and mask:is_float() then s = s + mask:double() end
    if a[2] == 1 then
      local i, j = ps.arange(T, { device = "ref" }), ps.arange(S, { device = "ref" })
      local last, key = (i + (S - T)):reshape(T, 1), j:reshape(1, S)
      local c = last:ge(key)
      if (a[8] or 0) > 0 then c = c:logical_and(key:gt(last - a[8])) end
      c = c:reshape(1, 1, T, S)
      sees = sees and sees:logical_and(c) or c
    end
    return sees and ps.where(sees, s, -1 / 0) or s
  end
  --- Returns functions that repeat each head of [B, G, S, D] for the queries that share it, and that sum over these
  --- queries.
  local function each(x, H)
    local G, S, D = x:size(1), x:size(2), x:size(3)
    return x:reshape(-1, G, 1, S, D):expand(x:size(0), G, H / G, S, D):reshape(-1, H, S, D)
  end
  --- Returns y and the log-sum-exp of the scores in fp64.
  local function saved(ins, a)
    local k = each(ins[3]:double(), ins[2]:size(1))
    local s = seen(ins[2]:double():matmul(k:transpose(2, 3)) * a[1], ins[5], a)
    return ps.ops.attention(ins[2], ins[3], ins[4], ins[5], unpack(a, 1, a.n)), s:exp():sum(-1):log():float()
  end
  --- Returns the errors of dq, dk and dv if the values that a kernel stores have a relative error of u: the weights w,
  --- dw = dy v^T, y and with it delta = dy . y, and ds = w (dw - delta), of which dq = scale ds k, dk = scale ds^T q
  --- and dv = w^T dy are sums. In fp32, sums of n products also contribute, as sqrt(n) roundings.
  local function deviations(dy, q, k, v, mask, a, u)
    local G, H = k:size(1), q:size(1)
    dy, q, k, v = dy:double(), q:double(), each(k:double(), H), each(v:double(), H)
    local function shared(x) return x:reshape(-1, G, H / G, x:size(2), x:size(3)):sum(2) end
    local scale, keep, T, S = a[1], 1 / (1 - (a[3] or 0)), q:size(2), k:size(2)
    local function t(x) return x:transpose(2, 3) end
    local function square(x) return x * x end
    local s = q:matmul(t(k)) * scale
    local sum = (2 ^ -24 / u) ^ 2 * math.max(T, S, q:size(3))
    local of_w = (square(q):matmul(square(t(k))) * scale ^ 2 + 1) * sum + 1 / 3            -- relative variance
    local w = seen(s, mask, a):softmax(-1)
    w = ps.where(w:ne(w), ps.zeros({}, { dtype = "fp64", device = "ref" }), w)       -- a query that sees no key
    local y = w:matmul(v)
    local ds = w * (dy:matmul(t(v)) * keep - (dy * y):sum(-1, true))
    local delta = (square(dy) * (square(y) + square(w):matmul(square(v)))):sum(-1, true) / 3
    local of_ds = square(ds) * of_w + square(w) * square(dy):matmul(square(t(v))) * (keep ^ 2 * sum)
    local dq = square(w:matmul(k)) * delta + of_ds:matmul(square(k))
    local dk = t(square(w) * delta + of_ds):matmul(square(q))
    local dv = t(square(w * keep) * of_w):matmul(square(dy))
    return { dq:sqrt() * scale, shared(dk):sqrt() * scale, shared(dv):sqrt() }
  end
  --- Adds a case. H is the number of heads, or { heads, key heads }. mask is true for a mask of bytes [B, S], or a mask
  --- of 4 dimensions.
  local function add(B_, H, T, S, D, mask, a, grads)
    local G = type(H) == "table" and H[2] or H
    H = type(H) == "table" and H[1] or H
    local q, k, m = { B_, H, T, D }, { B_, G, S, D }, mask == true and B { B_, S } or mask or NONE
    m = type(m) == "number" and R({ B_, S }, m) or m  -- a number is the length of segments
    forward[#forward + 1] = { F(q), F(k), F(k), m, attrs = a, grads = grads or false,
                              spread_of_gradients = function(dy, ins, u)
                                return deviations(dy, ins[1], ins[2], ins[3], ins[4], a, u)
                              end }
    backward[#backward + 1] = { F(q), F(q), F(k), F(k), m, NONE, NONE, attrs = a,
                                prepare = function(ins) ins[6], ins[7] = saved(ins, a) end,
                                spread = function(ins, u)
                                  return deviations(ins[1], ins[2], ins[3], ins[4], ins[5], a, u)
                                end }
  end
  add(2, 2, 3, 3, 4, false, plain, true)
  add(1, 2, 3, 5, 4, true, causal, true)
  add(2, 1, 4, 4, 3, true, drop, true)
  add(1, 2, 5, 3, 4, false, causal, true)        -- the first queries see no key
  add(2, 3, 7, 7, 16, false, causal)
  add(1, 2, 33, 33, 8, true, plain)
  add(2, 1, 65, 65, 64, false, causal)
  add(1, 1, 130, 130, 33, true, drop)
  add(1, 2, 1, 65, 32, false, causal)            -- one token with a cache
  local function windowed(n, p) return args(0.4, 1, p or 0, 9, 3, 5, 2, n) end
  add(2, { 4, 2 }, 3, 3, 4, false, causal, true)
  add(1, { 6, 1 }, 3, 5, 4, true, plain, true)
  add(2, { 6, 2 }, 65, 65, 64, true, drop)
  add(1, { 4, 2 }, 130, 130, 33, false, causal)
  add(1, 2, 6, 6, 3, false, windowed(2), true)
  add(1, 1, 3, 7, 4, true, windowed(4), true)
  add(1, 1, 3, 3, 4, false, windowed(1), true)
  add(2, { 2, 1 }, 130, 150, 16, true, windowed(37, 0.25))
  add(1, 2, 200, 200, 64, false, windowed(64))
  add(2, 2, 3, 5, 4, F({ 2, 2, 3, 5 }, -1, 1, "fp32"), plain, false)
  add(2, { 4, 2 }, 3, 5, 4, F({ 1, 1, 3, 5 }, -1, 1, "fp32"), causal, false)
  add(2, 2, 70, 130, 8, F({ 2, 1, 70, 130 }, -1, 1), drop, false)
  add(2, { 2, 1 }, 33, 33, 8, F({ 1, 2, 1, 33 }, -1, 1), windowed(5), false)
  add(2, 2, 70, 70, 16, B { 2, 1, 70, 70 }, plain, false)
  add(2, { 2, 1 }, 33, 40, 8, true, args(0.3, 1, 0.25, 9, 3, 5, 2, 0, 6), false)    -- heads 6 and 7 of more heads
  add(1, 2, 5, 6, 4, B { 1, 2, 1, 6 }, causal, false)
  add(2, 2, 5, 5, 4, 2, causal, true)
  add(2, { 4, 2 }, 6, 6, 3, 3, plain, true)
  add(1, 1, 7, 7, 4, 4, windowed(2, 0.25), true)
  add(2, { 4, 2 }, 130, 130, 33, 9, causal)
  add(3, 2, 200, 200, 64, 50, causal)
  add(2, 1, 150, 150, 16, 40, plain)
  add(1, { 2, 1 }, 140, 140, 64, 30, drop)
  add(2, 1, 260, 260, 16, 80, windowed(37))
  add(1, 1, 200, 200, 100, 30, causal)
  add(1, 1, 130, 130, 130, 30, args(0.3, 0, 0.25, 9, 3, 5, 2))
  local tol = { fp32 = 2e-5, bf16 = 0.03, fp16 = 0.005 }
  forward.tol = tol
  case(forward)
  --- Adds a case whose keys and values are a cache of another type. There are 4 heads of queries and 2 of keys.
  local cached = { "attention", tol = tol, layouts = false }
  local function cache(T, S, D, turn, mask)
    cached[#cached + 1] = { F { 2, 4, T, D }, F { 2, 2, S, D }, F { 2, 2, S, D }, mask and B { 2, S } or NONE,
      attrs = causal, grads = false, wrt = {}, cached = true,
      prepare = function(ins) ins[2], ins[3] = turn(ins[2]), turn(ins[3]) end }
  end
  for _, turn in ipairs { function(x) return ps.ops.pack(x, 8) end, function(x) return x:to "bf16" end,
    function(x) return x:to "fp16" end } do
    cache(1, 150, 64, turn)
    cache(1, 33, 32, turn, true)
    cache(5, 70, 96, turn)
    cache(3, 9, 32, turn, true)
  end
  case(cached)
  case(backward)

  local packed, packed_backward = { "attention_packed" }, { "attention_packed_backward" }
  local function add_packed(B_, T, C, heads, mask, a, grads)
    local qkv, m = { B_, T, 3 * C }, type(mask) == "number" and R({ B_, T }, mask) or mask and B { B_, T } or NONE
    a = args(heads, a[2], a[1], unpack(a, 3, a.n))
    local plain_a = args(a[3] == 0 and 1 / math.sqrt(C / heads) or a[3], a[2], a[4] or 0, a[5], a[6], a[7], a[8], 0,
      a[9])
    local function split(x)
      x = x:reshape(B_, T, 3, heads, C / heads):permute(2, 0, 3, 1, 4)
      return x[0]:contiguous(), x[1]:contiguous(), x[2]:contiguous()
    end
    local function joined(y) return y:transpose(1, 2):contiguous():reshape(B_, T, C) end
    local function spread(dy, x, mask_, u)
      local q, k, v = split(x)
      local parts = deviations(dy:reshape(B_, T, heads, C / heads):transpose(1, 2), q, k, v, mask_, plain_a, u)
      for i = 1, 3 do parts[i] = joined(parts[i]) end
      return { ps.cat(parts, 2) }
    end
    packed[#packed + 1] = { F(qkv), m, attrs = a, grads = grads or false,
                            spread_of_gradients = function(dy, ins, u) return spread(dy, ins[1], ins[2], u) end }
    packed_backward[#packed_backward + 1] = { F { B_, T, C }, F(qkv), m, NONE, NONE, attrs = a, prepare = function(ins)
      local q, k, v = split(ins[2])
      local y, lse = saved({ false, q, k, v, ins[3] }, plain_a)
      ins[4], ins[5] = joined(y), lse
    end, spread = function(ins, u) return spread(ins[1], ins[2], ins[3], u) end }
  end
  add_packed(2, 3, 4, 2, false, args(0, 1), true)
  add_packed(2, 4, 6, 2, true, drop, true)
  add_packed(1, 5, 4, 1, true, plain, true)
  add_packed(2, 7, 48, 3, false, args(0, 1))
  add_packed(1, 33, 64, 1, true, plain)
  add_packed(2, 65, 128, 2, false, args(0, 1))
  add_packed(1, 130, 66, 2, true, drop)
  add_packed(1, 40, 16, 2, false, args(0.3, 1, 0.25, 9, 3, 5, 2, 3))
  add_packed(2, 6, 6, 2, 3, drop, true)
  add_packed(2, 130, 64, 1, 40, args(0, 1))
  packed.tol = tol
  case(packed)
  case(packed_backward)
end

case { "rope", wrt = { 1 },
       { F { 2, 3, 5, 8 }, F({ 2, 5, 4 }, -1, 1, "fp32"), F({ 2, 5, 4 }, -1, 1, "fp32"), attrs = args(0) },
       { F { 2, 3, 5, 8 }, F({ 1, 5, 3 }, -1, 1, "fp32"), F({ 1, 5, 3 }, -1, 1, "fp32"), attrs = args(1) },
       { F { 1, 2, 33, 70 }, F({ 1, 33, 35 }, -1, 1, "fp32"), F({ 1, 33, 35 }, -1, 1, "fp32"), attrs = args(0),
         grads = false },
       { F { 3, 1, 7, 5 }, F({ 1, 7, 1 }, -1, 1, "fp32"), F({ 1, 7, 1 }, -1, 1, "fp32"), attrs = args(0) },
       { F { 1, 2, 3, 3 }, F({ 1, 3, 0 }, -1, 1, "fp32"), F({ 1, 3, 0 }, -1, 1, "fp32"), attrs = args(0) },
       { F { 2, 0, 3, 4 }, F({ 1, 3, 2 }, -1, 1, "fp32"), F({ 1, 3, 2 }, -1, 1, "fp32"), attrs = args(0) },
       { F { 2, 3, 5, 32 }, F({ 2, 5, 16 }, -1, 1, "fp32"), F({ 2, 5, 16 }, -1, 1, "fp32"), attrs = args(0) },
       { F { 2, 3, 33, 16 }, F({ 1, 33, 8 }, -1, 1, "fp32"), F({ 1, 33, 8 }, -1, 1, "fp32"), attrs = args(1),
         grads = false } }

-- -- optimizers and sampling: the list must keep its order of tensors -----------------------------------------------
do
  local adam = args(1, 1e-2, 0.9, 0.99, 1e-8, 0.1, 0.5, 0.1, 0.01)
  local function group(shape, n, master)
    local m, v = F(shape, -1, 1, "fp32"), F(shape, 0, 1, "fp32")
    local list = { F(shape), master and F(shape, -2, 2, "fp32") or SAME(1), F(shape), m, v }
    for i = n + 1, 5 do list[i] = nil end
    return list
  end
  local function set(list, a)
    list.attrs = a
    return list
  end
  case { "adam_", set(group({ 5, 7 }, 5), adam),
         set(group({ 130 }, 5), args(0, 1e-2, 0.9, 0.99, 1e-8, 0.1, 1, 0.1, 0.01)), types = { "fp32" }, exact = true,
         layouts = false }
  case { "adam_", set(group({ 5, 7 }, 5, true), adam), set(group({ 130 }, 5, true), adam), set(group({ 65 }, 5, true),
         args(1, 1e-2, 0.9, 0.99, 1e-8, 0, 1, 0.1, 0.01)), exact = true, layouts = false }
  --- lr, momentum, weight decay, dampening, nesterov, first, gradient scale
  case { "sgd_", set(group({ 5, 7 }, 4), args(0.1, 0.9, 0.01, 0, 1, 0, 0.5)),
         set(group({ 130 }, 4), args(0.1, 0.9, 0, 0.1, 0, 1)),
         set({ F { 33 }, SAME(1), F { 33 }, SAME(1) }, args(0.1)), types = { "fp32" }, exact = true, layouts = false }
  case { "sgd_", set(group({ 65 }, 4, true), args(0.1, 0.9, 0.01, 0, 0, 0)), exact = true, layouts = false }
  -- Masters that are stored as remainders: uint8, two per element.
  local function low(shape)
    local numel = 2
    for _, size in ipairs(shape) do numel = numel * size end
    return I({ numel }, 0, 255)
  end
  local function bytes(...)
    local places = { ... }
    return function(ins) for _, i in ipairs(places) do ins[i] = ins[i]:to "uint8" end end
  end
  local function with_low(list, shape, prepare)
    list[2] = low(shape)
    list.prepare = prepare or bytes(2)
    return list
  end
  case { "adam_", set(with_low(group({ 5, 7 }, 5, true), { 5, 7 }), adam),
         set(with_low(group({ 130 }, 5, true), { 130 }), adam), types = { "bf16" }, exact = true, layouts = false }
  case { "sgd_", set(with_low(group({ 65 }, 4, true), { 65 }), args(0.1, 0.9, 0.01, 0, 0, 0)), types = { "bf16" },
         exact = true, layouts = false }
  --- gradient scale, step, lr, betas, weight decay
  local lion = args(0.5, 3, 1e-2, 0.9, 0.99, 0.1)
  case { "lion_", set(group({ 5, 7 }, 4), lion), set(group({ 130 }, 4), lion), types = { "fp32" }, exact = true,
         layouts = false }
  case { "lion_", set(group({ 65 }, 4, true), lion), set(group({ LARGE[1], LARGE[2] }, 4, true), lion), exact = true,
         layouts = false }
  case { "lion_", set(with_low(group({ 65 }, 4, true), { 65 }), lion), types = { "bf16" }, exact = true,
         layouts = false }
  --- gradient scale, step, lr, alpha, eps, weight decay, momentum
  local rmsprop = args(0.5, 3, 1e-2, 0.9, 1e-3, 0.1, 0.9)
  local function squared(list, a)                             -- the squares come first
    list[4], list[5] = list[5], list[4]
    return set(list, a or rmsprop)
  end
  case { "rmsprop_", squared(group({ 5, 7 }, 5)), squared(group({ 130 }, 5), args(1, 1, 1e-2, 0.99, 1e-3)),
         set({ F { 33 }, SAME(1), F { 33 }, F({ 33 }, 0, 1, "fp32"), SAME(1) }, args(0.5, 1, 0.1, 0.5, 1e-3, 0.1)),
         types = { "fp32" }, exact = true, layouts = false }
  case { "rmsprop_", squared(group({ 65 }, 5, true)), squared(group({ LARGE[1], LARGE[2] }, 5, true)), exact = true,
         layouts = false }
  case { "rmsprop_", squared(with_low(group({ 65 }, 5, true), { 65 })), types = { "bf16" }, exact = true,
         layouts = false }
  --- gradient scale, step, lr, betas, eps, weight decay, average, bias correction
  local free = args(0.5, 3, 1e-2, 0.9, 0.99, 1e-8, 0.1, 0.25, 0.3)
  case { "adam_schedule_free_", set(group({ 5, 7 }, 5), free), set(group({ 130 }, 5), free),
         set(group({ 65 }, 5), args(1, 1, 1e-2, 0.9, 0.99, 1e-8)), types = { "fp32" }, exact = true, layouts = false }
  case { "adam_schedule_free_", set(group({ 65 }, 5, true), free), set(group({ LARGE[1], LARGE[2] }, 5, true), free),
         exact = true, layouts = false }
  case { "adam_schedule_free_", set(with_low(group({ 65 }, 5, true), { 65 }), free),
         set(with_low(group({ 130 }, 5, true), { 130 }), args(1, 1, 1e-2, 0.9, 0.99, 1e-8)), types = { "bf16" },
         exact = true, layouts = false }
  local function three(shape, weight, master)
    return set({ F(shape), master and F(shape, -2, 2, "fp32") or SAME(1), F(shape, -1, 1, "fp32") }, args(weight))
  end
  case { "master_lerp_", three({ 5, 7 }, 0.1), three({ 130 }, -1 / 9), three({ 65 }, -1), types = { "fp32" },
         exact = true, layouts = false }
  case { "master_lerp_", three({ 65 }, 0.7, true), three({ LARGE[1], LARGE[2] }, -0.25, true), exact = true,
         layouts = false }
  case { "master_lerp_", with_low(three({ 65 }, -0.25), { 65 }), types = { "bf16" }, exact = true, layouts = false }
  local near = { fp32 = 2e-5, bf16 = 2e-2, fp16 = 4e-3 }
  case { "lamb_", set(group({ 5, 7 }, 5), args(0.5, 3, 1e-2, 0.9, 0.99, 1e-6, 0.1)),
         set(group({ 9000 }, 5), args(1, 1, 1e-2, 0.9, 0.99, 1e-6, 0)), types = { "fp32" }, tol = near, floor = 1e-6,
         layouts = false }
  case { "lamb_", set(group({ 65 }, 5, true), args(1, 2, 1e-2, 0.9, 0.99, 1e-6, 0.1, 0, 0, 1, 1)), tol = near,
         floor = 1e-6, layouts = false }
  local muon = args(0.5, 3, 1e-2)
  case { "muon_", set(group({ 5, 7 }, 4), muon), set(group({ 33, 9 }, 4), muon), set(group({ 1, 6 }, 4), muon),
         set(group({ 300, 280 }, 4), args(1, 1, 0.1, 0.9, 0.1, 1e-7, 3.4445, -4.775, 2.0315, 0, 3, 1)),
         types = { "fp32" }, tol = { fp32 = 2e-4 }, floor = 2e-5, layouts = false }
  case { "muon_", set(group({ 40, 65 }, 4, true), muon), tol = { fp32 = 2e-4, bf16 = 2e-2, fp16 = 4e-3 }, floor = 3e-3,
         layouts = false }
  --- Averages of rows and columns, or of elements.
  local function factored(shape, rows, cols, a)
    local list = { F(shape), SAME(1), F(shape), F(rows, 0.1, 1, "fp32"), cols and F(cols, 0.1, 1, "fp32") or SAME(1) }
    return set(list, a)
  end
  case { "adafactor_", factored({ 5, 7 }, { 5, 1 }, { 1, 7 }, args(0.5, 3, 1e-2, -0.8, 1e-7, 1e-3, 1, 0.1)),
         factored({ 2, 5, 70 }, { 2, 5, 1 }, { 2, 1, 70 }, args(1, 1, 1e-2, -0.8, 1e-7, 1e-3, 1, 0)),
         factored({ 5, 7 }, { 5 }, { 7 }, args(1, 4, 1e-2, -0.8, 1e-30, 1e-3, 1, 0.1, 1, 1, 1, 1)),
         factored({ 33 }, { 33 }, nil, args(1, 4, 1e-2, -0.8, 1e-30, 1e-3, 1, 0.1, 1, 0)),
         factored({ 33 }, { 33 }, nil, args(1, 4, 1e-2, -0.8, 1e-7, 1e-3)), types = { "fp32" }, tol = near,
         floor = 1e-6, layouts = false }
  --- Averages in bf16 and in 8 bits.
  local function half(ins) ins[4], ins[5] = ins[4]:to "bf16", ins[5]:to "bf16" end
  local function in_bf16(list, a)
    list.prepare = half
    return set(list, a)
  end
  case { "adam_bf16_", in_bf16(group({ 5, 7 }, 5), args(0.5, 3, 1e-2, 0.9, 0.99, 1e-8, 0.1, 7)),
         in_bf16(group({ 130 }, 5), args(1, 1, 1e-2)), types = { "fp32" }, exact = true, layouts = false }
  case { "adam_bf16_", in_bf16(group({ 65 }, 5, true), args(0.5, 3, 1e-2, 0.9, 0.99, 1e-8, 0.1, 7)), exact = true,
         layouts = false }
  local function in_8_bits(shape, blocks, master, a)
    local list = { F(shape), master and F(shape, -2, 2, "fp32") or SAME(1), F(shape), I(shape, 0, 255),
      F({ blocks }, 0, 1, "fp32"), I(shape, 0, 255), F({ blocks }, 0, 1, "fp32") }
    list.prepare = bytes(4, 6)
    return set(list, a)
  end
  local of_8 = args(0.5, 3, 1e-2, 0.9, 0.99, 1e-8, 0.1)
  case { "adam8bit_", in_8_bits({ 5, 7 }, 1, false, of_8), in_8_bits({ 1000 }, 4, false, of_8), types = { "fp32" },
         exact = true, layouts = false }
  case { "adam8bit_", in_8_bits({ 65 }, 1, true, of_8), in_8_bits({ 131, 257 }, 132, true, of_8), exact = true,
         layouts = false }
  case { "adam8bit_", with_low(in_8_bits({ 300 }, 2, true, of_8), { 300 }, bytes(2, 4, 6)), types = { "bf16" },
         exact = true, layouts = false }
  local function lion_in_8_bits(shape, blocks, master)
    local list = in_8_bits(shape, blocks, master, lion)
    list[6], list[7] = nil, nil
    list.prepare = bytes(4)
    return list
  end
  case { "lion8bit_", lion_in_8_bits({ 5, 7 }, 1), lion_in_8_bits({ 1000 }, 4), types = { "fp32" }, exact = true,
         layouts = false }
  case { "lion8bit_", lion_in_8_bits({ 65 }, 1, true), lion_in_8_bits({ 131, 257 }, 132, true), exact = true,
         layouts = false }
  case { "lion8bit_", with_low(lion_in_8_bits({ 300 }, 2, true), { 300 }, bytes(2, 4)), types = { "bf16" },
         exact = true, layouts = false }
  case { "remainder_split_", with_low({ F { 5, 7 }, SAME(1), F({ 5, 7 }, -2, 2, "fp32") }, { 5, 7 }),
         with_low({ F { 131, 257 }, SAME(1), F({ 131, 257 }, -2, 2, "fp32") }, { 131, 257 }), types = { "bf16" },
         exact = true, layouts = false }
  case { "remainder_join", with_low({ F { 5, 7 }, SAME(1) }, { 5, 7 }),
         with_low({ F { 131, 257 }, SAME(1) }, { 131, 257 }), types = { "bf16" }, exact = true, layouts = false }
end
-- Small for cuda, since a block of the emulated device needs a second for a row of 5000.
local LONG_ROWS = os.getenv "PS_TEST_DEVICE" == "cuda" and 4 or 40
case { "sample", { F({ 5, 33 }, -5, 5), attrs = args(1, 1, 0, 3, 4) },
       { F({ 2, 3, 65 }, -5, 5), attrs = args(0.7, 0.9, 5, 3, 4) }, { F({ 130 }, -5, 5), attrs = args(0) },
       { F({ 40, 65 }, -5, 5), attrs = args(1.5, 0.9, 0, 3, 4, 0.2) },
       { F({ LONG_ROWS, 5000 }, -2, 2), attrs = args(0.5, 1, 900, 3, 4, 0.01) }, exact = true }

-- -- the same ops cut over threads ----------------------------------------------------------------------------------
do
  local function large(name, ...)
    local row = { name, ... }
    for k = 2, #row do row[k].large, row[k].grads = true, false end
    case(row)
    return row
  end
  large("copy_", { F(LARGE), F { 257 } }, { F(LARGE, -300, 300, "fp32"), F(LARGE) }).exact = true
  large("cast", { F(LARGE), attrs = args(0) }, { F(LARGE), attrs = args(1) },
    { F(LARGE), attrs = args(4) }).exact = true
  large("fill_", { F(LARGE), attrs = args(1.7) })
  large("arange_", { F(LARGE), attrs = args(1, 0.25) }).layouts = false
  for _, row in ipairs { large("uniform_", { F(LARGE), attrs = args(0, 1, 5, 7) }),
                         large("normal_", { F(LARGE), attrs = args(0, 1, 5, 7) }),
                         large("axpy_", { F(LARGE), F(LARGE), attrs = args(-0.3) }),
                         large("scale_", { F(LARGE), attrs = args(-0.3) }) } do row.layouts = false end
  large("where", { B(LARGE), F(LARGE), F { 257 } })
  large("gelu_backward", { F(LARGE), F(LARGE), attrs = args(1) })
  large("silu_backward", { F(LARGE), F(LARGE) })
  large("argmax", { F(LARGE), attrs = args(0, 0) }, { F(LARGE), attrs = args(1, 0) })
  large("cumsum", { F(LARGE), attrs = args(0, 0) }, { F(LARGE), attrs = args(1, 0) }).tol = { fp32 = 1e-4, bf16 = 0.02 }
  large("topk", { F(LARGE), attrs = args(3) })
  large("sq_norms", { F(LARGE), F { 5 }, F(LARGE) })
  large("grad_store", { F(LARGE), attrs = args(0) }, { F(LARGE), attrs = args(1) }, { F(LARGE), attrs = args(2) })
  large("matmul", { F { 131, 257 }, F { 257, 65 } }, { F { 3, 65, 130 }, F { 3, 130, 33 } },
    { F { 257, 300 }, F { 300, 1 } }, { F({ 1, 70001 }, 0, 1), F({ 70001, 1 }, 0, 1) },
    { F({ 2, 1, 70001 }, 0, 1), F({ 2, 70001, 1 }, 0, 1) })
  large("linear_packed", { F { 131, 256 }, I({ 130, 8 * 34 }, 0, 255), F { 130 }, F { 131, 130 }, NONE,
    attrs = args(8, 0, 0),
    prepare = packed_rows(PACKED[5], 2), spread = rounded_weights(8) })
  -- NF4 with double quantization: several absolute maxima of the scales. The emulated cuda computes several panels, and
  -- with the last two cases cpu computes three tiles.
  local function double_quant(x, back, rows, blocks)
    local maxima = math.ceil(rows * blocks / 256)
    return { x, I({ rows, blocks * 33 }, 0, 255), NONE, NONE, F({ 257 + maxima }, -1, 1, "fp32"),
      attrs = args(257, back, 0), prepare = packed_rows(PACKED[15], 2), spread = rounded_weights(257, back == 1) }
  end
  large("linear_packed", double_quant(F { 1, 576 }, 0, 331, 9), double_quant(F { 5, 576 }, 0, 331, 9),
    double_quant(F { 5, 331 }, 1, 331, 9), double_quant(F { 5, 8192 }, 0, 600, 128),
    double_quant(F { 5, 4200 }, 1, 4200, 9))
  local unpacked = large("unpack", { I({ 70, 8 * 33 }, 0, 255), F({ 257 + 3 }, -1, 1, "fp32"), attrs = args(257, 0),
    prepare = packed_rows(PACKED[15], 1) })
  unpacked.exact, unpacked.types = true, { "fp32" }
  large("linear_packed", { F { 1, 512 }, I({ 331, 2 * 144 }, 0, 255), NONE, NONE, NONE, attrs = args(12, 0, 0),
    prepare = packed_rows(PACKED[8], 2) })
  large("linear", { F { 131, 257 }, F { 65, 257 }, F { 65 }, F { 131, 65 }, attrs = args(1) })
  large("softmax", { F(LARGE, -8, 8) })
  large("log_softmax", { F(LARGE, -8, 8) })
  large("softmax_backward", { F(LARGE, 0, 0.01), F(LARGE) })
  large("log_softmax_backward", { F(LARGE, -5, 0), F(LARGE) }).tol = { fp32 = 5e-5 }
  large("cross_entropy", { F(LARGE, -5, 5), I({ 131 }, 0, 257), attrs = args(-100, 1) },
        { F(LARGE, -5, 5), I({ 131 }, 0, 257), attrs = args(7, 0) })
  large("lm_loss", { F { 257, 33 }, F { 300, 33 }, I({ 257 }, 0, 300), NONE, attrs = args(-100, 1) }).tol =
    { fp32 = 1e-5, bf16 = 0.01, fp16 = 0.001 }
  large("embedding", { F(LARGE), I({ 300 }, 0, 131) })
  large("embedding_backward", { I({ 300 }, 0, 50), F { 300, 130 }, attrs = function(dtype)
    return args(131, 0, ({ fp32 = 0, bf16 = 1, fp16 = 2 })[dtype])
  end })
  large("gather", { F(LARGE), I({ 131, 300 }, 0, 257), attrs = args(1) })
  large("scatter", { F(LARGE), I({ 131, 300 }, 0, 257), F { 131, 300 }, attrs = args(1) },
    { F { 257, 1300 }, I({ 131 }, 0, 257), F { 131, 1300 }, attrs = args(0) })
  large("gather", { F { 257, 130 }, I({ 301 }, 0, 257), attrs = args(0) })
  large("scatter_backward", { F { 257, 1300 }, I({ 131 }, 0, 257), attrs = args(0) })
  large("scatter_add", { F { 257, 1300 }, I({ 431 }, 0, 257), F { 431, 1300 }, attrs = args(0) })
  large("scatter_add", { F(LARGE), I({ 131, 300 }, 0, 257), F { 131, 300 }, attrs = args(1) })
  large("concat", { F(LARGE), F { 131, 65 }, attrs = args(1) }, { F(LARGE), F { 33, 257 }, attrs = args(0) })
  large("layer_norm", { F(LARGE), F { 257 }, F { 257 }, attrs = args() })
  large("rms_norm", { F(LARGE), F { 257 }, attrs = args() })
  large("dropout", { F(LARGE), NONE, attrs = args(0.3, 11, 2, 3, 4) })
  local state = { F(LARGE), F(LARGE, -2, 2, "fp32"), F(LARGE), F(LARGE, -1, 1, "fp32"), F(LARGE, 0, 1, "fp32"),
                  attrs = args(1, 1e-2, 0.9, 0.99, 1e-8, 0.1, 0.5, 0.1, 0.01) }
  local row = large("adam_", state)
  row.exact, row.layouts = true, false
  local causal, plain = args(2, 1, 0.2), args(2, 0, 0.2, 0.25, 9, 3, 5, 2)
  large("attention_packed", { F { 2, 130, 192 }, NONE, attrs = causal }, { F { 2, 130, 192 }, B { 2, 130 },
    attrs = plain }).tol =
    { fp32 = 2e-5, bf16 = 0.03, fp16 = 0.005 }
end

case { "to_device", { F { 5, 7 }, attrs = args(1) }, { F {}, attrs = args(1) }, { F { 0, 3 }, attrs = args(1) },
       exact = true, ints = true }                                    -- to ref

-- Ops in a group of this process alone. spec/dist/ranks_ops_spec.lua tests groups of several ranks.
do
  local group = require("ps").dist.self()
  local alone = args(require("ps").C.ps_group_number(group.c), 1, 0, 0)
  for _, name in ipairs { "all_reduce", "all_gather", "reduce_scatter", "broadcast", "copy_to_tp", "reduce_from_tp",
                          "scatter_to_tp", "gather_from_tp", "all_gather_again", "counted_once" } do
    case { name, { F { 5, 7 }, attrs = alone }, { F { 33 }, attrs = alone }, { F { 0, 3 }, attrs = alone },
           exact = true, alive = group }
  end
  for out_in = 0, 1 do
    local function w(a, b) return out_in == 1 and F { b, a } or F { a, b } end
    local function attrs(...) return args(alone[1], 1, 0, 0, out_in, 3, ...) end
    local function lone(x, weight, b) return x, weight, b, NONE, NONE, NONE, NONE end
    local function column(at, ...)
      local one = { ... }
      one.attrs, one.grads, one.wrt = attrs(at.keep), at.grads, at.wrt
      return one
    end
    case { "column_linear", column({ keep = 1 }, lone(F { 5, 4 }, w(4, 6), F { 6 })),
           column({ keep = 0 }, lone(F { 3, 4 }, w(4, 2), NONE)),
           -- Gradients of the first output. spec/parallel/parallel_layers_spec.lua tests gradients of all outputs.
           column({ keep = 0, wrt = { 1, 2 } }, F { 3, 4 }, w(4, 2), NONE, w(4, 6), F { 6 }, w(4, 3), NONE),
           column({ keep = 1, wrt = { 1, 2, 3 } }, F { 5, 4 }, w(4, 6), F { 6 }, w(4, 1), F { 1 }, NONE, NONE),
           column({ keep = 0, grads = false }, lone(F { 33, 65 }, w(65, 130), F { 130 })),
           column({ keep = 0, grads = false }, F { 33, 65 }, w(65, 130), F { 130 }, w(65, 23), NONE, w(65, 7), NONE),
           column({ keep = 0, grads = false }, lone(F { 0, 4 }, w(4, 6), F { 6 })), alive = group }
    case { "row_linear", { F { 5, 4 }, w(4, 6), attrs = attrs() }, { F { 33, 65 }, w(65, 130), attrs = attrs(),
           grads = false }, { F { 0, 4 }, w(4, 6), attrs = attrs(), grads = false }, alive = group }
    -- attrs: want_w and want_b as bits
    case { "column_linear_grad",
           { F { 5, 6 }, w(4, 6), F { 5, 4 }, NONE, NONE, NONE, NONE, NONE, attrs = attrs(1, 1) },
           { F { 5, 6 }, w(4, 6), NONE, F { 5, 4 }, NONE, NONE, NONE, NONE, attrs = attrs(1, 0) },
           { F { 5, 6 }, w(4, 6), NONE, NONE, F { 5, 3 }, w(4, 3), F { 5, 2 }, w(4, 2), attrs = attrs(0, 0) },
           { F { 5, 6 }, w(4, 6), F { 5, 4 }, NONE, F { 5, 3 }, w(4, 3), F { 5, 2 }, w(4, 2), attrs = attrs(7, 5) },
           { F { 5, 6 }, w(4, 6), F { 5, 4 }, NONE, F { 5, 3 }, w(4, 3), NONE, NONE, attrs = attrs(2, 0) },
           { F { 33, 23 }, w(65, 23), F { 33, 65 }, NONE, NONE, NONE, NONE, NONE, attrs = attrs(1, 1) }, alive = group }
  end
  -- Losses over a vocabulary: over 30 tokens from token 5 on, in 33 columns, with the statistics of two ranks, and over
  -- all tokens.
  local function share(N) return F({ 3, N }, 0.5, 1.5, "fp32") end
  local function mass(V) return F({ V }, 0, 1, "fp32") end
  local function others(N, kinds)
    return function(ins)
      local ps = require "ps"
      local both = { ps.ops.logit_stats(ins[1], ins[2], ins[5], 5, 30), ps.ops.logit_stats(ins[1] * 0.5, ins[2], ins[5],
        35, 30) }
      ins[3] = ps.cat(both, 0):reshape(2, kinds, N)
    end
  end
  local stats, losses = { "logit_stats" }, { "logit_loss", tol = { fp32 = 2e-5, bf16 = 0.02, fp16 = 0.004 } }
  for _, N in ipairs { 1, 5, 130 } do
    stats[#stats + 1] = { F({ N, 33 }, -5, 5), I({ N }, 0, 40), NONE, attrs = args(5, 30) }
    stats[#stats + 1] = { F({ N, 33 }, -5, 5), I({ N }, 0, 40), mass(33), attrs = args(5, 30) }
    losses[#losses + 1] = { F({ N, 33 }, -5, 5), I({ N }, 0, 40), NONE, share(N), NONE, attrs = args(5, 30, 1, 0, 2),
                            prepare = others(N, 3) }
    losses[#losses + 1] = { F({ N, 33 }, -5, 5), I({ N }, 0, 40), NONE, share(N), mass(33), attrs = args(5, 30, 1),
                            prepare = others(N, 4) }
  end
  for _, N in ipairs { 5, 130 } do
    stats[#stats + 1] = { F({ N, 33 }, -2, 2), I({ N }, 5, 12), NONE, attrs = args(5, 30), prepare = whole }
    losses[#losses + 1] = { F({ N, 33 }, -2, 2), I({ N }, 0, 60), NONE, share(N), NONE, attrs = args(5, 30, 1, 1),
      prepare = function(ins)
        whole(ins)
        others(N, 3)(ins)
        ins[4]:narrow(1, 0, N / 5):fill_(0)
      end }
  end
  stats[#stats + 1] = { F({ 3, 5 }, -5, 5), I({ 3 }, 0, 40), NONE, attrs = args(40, 0) }           -- padding alone
  stats[#stats + 1] = { F(LARGE, -5, 5), I({ 131 }, 0, 257), mass(257), attrs = args(0, 257), large = true }
  case(stats)
  case(losses)
  local function words(V, ...) return args(alone[1], 1, 0, 0, 0, 0, V, ...) end
  case { "parallel_lm_loss", { F { 5, 4 }, F { 7, 4 }, I({ 5 }, 0, 7), share(5), NONE, NONE, attrs = words(7) },
         { F { 6, 4 }, F { 7, 4 }, I({ 6 }, 0, 7), share(6), F { 7 }, mass(7), attrs = words(7, 4) },
         { F { 130, 8 }, F { 33, 8 }, I({ 130 }, 0, 33), share(130), F { 33 }, NONE, attrs = words(33), grads = false },
         { F { 0, 4 }, F { 7, 4 }, I({ 0 }, 0, 7), share(0), NONE, NONE, attrs = words(7), grads = false },
         { F { 0, 4 }, F { 7, 4 }, I({ 0 }, 0, 7), share(0), NONE, NONE, attrs = words(7, 1, 1), grads = false },
         { F { 60, 3 }, F { 9, 3 }, I({ 60 }, 0, 9), share(60), NONE, NONE, attrs = words(9, 1, 1), prepare = whole },
         alive = group, tol = { fp32 = 2e-5, bf16 = 0.01, fp16 = 0.001 }, gtol = { fp32 = 5e-5, bf16 = 0.1 } }
end

case { "scale_by_", { F { 5, 7 }, F({}, 1.5, 3), attrs = args(-0.3) }, { F { 130 }, F({ 1 }, -2, 2, "fp32") },
       { F { 3, 33 }, F({}, 1, 1, "fp32") }, { F { 65 }, F({}, 2, 2), attrs = args(0.5) },
       { F(LARGE), F {}, attrs = args(-0.3), large = true }, layouts = false }

-- Two products with a GELU between them, and the gradients of a product's weights.
do
  local function w(a, b, out_in) return out_in == 1 and F { b, a } or F { a, b } end
  local mlp, back = { "mlp" }, { "linear_gelu_backward" }
  for out_in = 0, 1 do
    local a, both = args(out_in), args(out_in, 1)
    mlp[#mlp + 1] = { F { 3, 4 }, w(4, 6, out_in), F { 6 }, w(6, 5, out_in), F { 5 }, F { 3, 5 }, attrs = a }
    mlp[#mlp + 1] = { F { 2, 3, 4 }, w(4, 3, out_in), NONE, w(3, 4, out_in), NONE, NONE, attrs = a }
    mlp[#mlp + 1] = { F { 4 }, w(4, 3, out_in), F { 3 }, w(3, 2, out_in), F { 2 }, F { 2 }, attrs = a }
    mlp[#mlp + 1] = { F { 2, 33, 24 }, w(24, 64, out_in), F { 64 }, w(64, 16, out_in), F { 16 }, F { 2, 33, 16 },
                      attrs = a, grads = false }
    mlp[#mlp + 1] = { F { 2, 0, 4 }, w(4, 3, out_in), F { 3 }, w(3, 2, out_in), F { 2 }, NONE, attrs = a,
                      grads = false }
    for _, size in ipairs { { 3, 5, 4 }, { 33, 16, 64 }, { 7, 24, 23 }, { 40, 8, 39 } } do
      local N, O, H = unpack(size)
      back[#back + 1] = { F { N, O }, w(H, O, out_in), F { N, H }, attrs = both }
    end
    back[#back + 1] = { F { 2, 3, 5 }, w(8, 5, out_in), F { 2, 3, 8 }, attrs = a }
    back[#back + 1] = { F { 5 }, w(8, 5, out_in), F { 8 }, attrs = both }
  end
  mlp[#mlp + 1] = { F { 131, 96 }, F { 96, 200 }, F { 200 }, F { 200, 65 }, F { 65 }, F { 131, 65 }, attrs = args(0),
                    grads = false, large = true }
  -- Returns the allowed error. The first output is rounded twice, and the second is the sum of its rows.
  local function spread_of(a)
    return function(ins)
      local dy, w1, h = ins[1]:double(), ins[2]:double(), ins[3]:double()
      local z = require("ps").ops.linear_gelu_backward(dy, w1, h, a[1], 0):square() * (2 / 3)
      return { z:sqrt(), z:reshape(-1, z:size(-1)):sum(0):sqrt() }
    end
  end
  for k = 2, #back do back[k].spread = spread_of(back[k].attrs) end
  mlp.tol = { fp32 = 2e-5, bf16 = 0.02, fp16 = 0.003 }
  -- A sum of terms of size 1 to 6, three of whose factors were rounded, can be near 0.
  mlp.gfloor = { bf16 = 0.05 }
  mlp.gtol = { fp32 = 5e-5, bf16 = 0.06, fp16 = 0.01 }
  back.tol = { fp32 = 2e-5, bf16 = 0.02, fp16 = 0.003 }
  case(mlp)
  case(back)
  case { "linear_grad", { F { 5, 3 }, F { 5, 4 }, attrs = args(0) }, { F { 5, 3 }, F { 5, 4 }, attrs = args(1) },
         { F { 33, 16 }, F { 33, 24 }, attrs = args(0) }, { F { 33, 7 }, F { 33, 23 }, attrs = args(1) },
         { F { 1, 8 }, F { 1, 8 }, attrs = args(0) }, { F { 257, 65 }, F { 257, 131 }, attrs = args(0), large = true },
         { F { 257, 65 }, F { 257, 131 }, attrs = args(1), large = true } }
end

return { rows = cases, NONE = NONE, args = args }
