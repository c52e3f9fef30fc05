-- SPDX-License-Identifier: BSD-3-Clause
-- Small functions of tensors against formulas and counts: products with zeros, random draws (counts, seeds, threads),
-- comparisons of whole tensors, diagonals, and errors of wrong use. spec/oracle/rows_small.py has PyTorch.
local ps = require "ps"
local check = require "spec.check_lib"
local fails, is = check.fails, check.is
local tensor, F = ps.tensor, ps.F

describe("a product", function()
  it("has the product of the other elements as gradient, also at zeros", function()
    for _, case in ipairs { { { 2, 3, 4 }, { 12, 8, 6 } }, { { 2, 0, 4 }, { 0, 8, 0 } },
                            { { 0, 3, 0, 2 }, { 0, 0, 0, 0 } } } do
      local x = ps.nn.Parameter(tensor(case[1]))
      x:prod():backward()
      is(case[2], x:grad())
    end
    local x = ps.nn.Parameter(tensor { 2, 0, 3 })
    local y = x:cumprod(0)
    is({ 2, 0, 0 }, y)
    y:sum():backward()
    is({ 1, 8, 0 }, x:grad())                              -- 1 + x2 + x2 x3, x1 + x1 x3, x1 x2
  end)
  it("of nothing is 1, and of integers exact", function()
    is(1, ps.zeros({ 0 }):prod())
    is({ 1, 1 }, ps.zeros({ 2, 0 }):prod(1))
    is(3 * 7 ^ 10, tensor({ 3, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7 }, "int32"):prod(), "int64")
    is({ { 6 }, { 20 } }, tensor({ { 2, 3 }, { 4, 5 } }):prod(-1, true))
    is({}, ps.zeros({ 0 }):cumprod(0))
    fails(function() return ps.zeros({ 2 }):prod({ 0, 0 }) end, "named twice")
    fails(function() return ps.zeros({ 2 }):cumprod() end, "cumprod needs a dimension")
  end)
end)

describe("results by a shorter path", function()
  it("have the bits of the longer one: a product with and without a gradient", function()
    ps.manual_seed(5)
    for _, shape in ipairs { { 1 }, { 2 }, { 7 }, { 64 }, { 1001 }, { 5, 13 }, { 13, 5 } } do
      local x = ps.rand(shape) + 0.5
      local p = ps.nn.Parameter(x:clone())
      for d = 0, #shape - 1 do assert.is_true(p:prod(d):detach():equal(x:prod(d))) end
      assert.is_true(p:prod():detach():equal(x:prod()))
      assert.is_true(p:prod(-1, true):detach():equal(x:prod(-1, true)))
      if #shape == 1 then assert.is_true(p:norm():detach():equal(x:norm())) end
    end
  end)

  it("are those of a general key: pairs of indices, rows, masks", function()
    local x = ps.arange(12, { dtype = "fp32" }):reshape(3, 4)
    local i, j = tensor({ { 2, -1 }, { 0, 1 } }, "int64"), tensor({ 1, -4 }, "int32")
    is({ { 9, 8 }, { 1, 4 } }, x[{ i, j }])
    is({ { 9, 8 }, { 1, 4 } }, x:t():contiguous():t()[{ i, j }])
    is({ 9, 1 }, x:reshape(3, 4, 1)[{ tensor({ 2, 0 }, "int64"), tensor({ 1, 1 }, "int64") }]:reshape(-1))
    fails(function() return x[{ i, tensor({ 4 }, "int64") }] end, "4", "dimension 1")
    local p = ps.nn.Parameter(x:clone())
    p[{ tensor({ 1, 1 }, "int64"), tensor({ 2, 2 }, "int64") }]:sum():backward()
    is({ { 0, 0, 0, 0 }, { 0, 0, 2, 0 }, { 0, 0, 0, 0 } }, p:grad())
    local y = x:clone()
    y[tensor({ -1, 0 }, "int64")] = x:narrow(0, 0, 2)
    is({ { 4, 5, 6, 7 }, { 4, 5, 6, 7 }, { 0, 1, 2, 3 } }, y)
    y[tensor({ 1, 0 }, "int64")] = y:narrow(0, 0, 2)          -- the source is part of the tensor
    is({ { 4, 5, 6, 7 }, { 4, 5, 6, 7 }, { 0, 1, 2, 3 } }, y)
    fails(function() y[tensor({ 3 }, "int64")] = x:narrow(0, 0, 1) end, "3", "dimension 0")
    is({ 8, 9, 10, 11 }, x[x:gt(7)])
    is({ { 2, 0 }, { 2, 1 } }, x:narrow(1, 0, 2):gt(7):nonzero())
    is({}, ps.zeros({ 0, 3 }):nonzero():reshape(-1))
  end)

  it("sort equal elements as a longer list is sorted, NaN and zeros of both signs included", function()
    local nan = 0 / 0
    for _, n in ipairs { 6, 66, 3000 } do
      local list = {}
      for i = 1, n do list[i] = ({ 1, nan, -0.0, 0, -1, 1 })[(i - 1) % 6 + 1] end
      local values, at = tensor(list):sort(0, true)
      local want = {}
      for _, k in ipairs { 1, 0, 5, 2, 3, 4 } do                -- NaN, then 1, 1, -0, 0, -1
        want[k] = {}
        for i = k, n - 1, 6 do table.insert(want[k], i) end
      end
      local function merged(a, b)
        local all = {}
        for i = 1, #want[a] do all[#all + 1], all[#all + 2] = want[a][i], want[b][i] end
        return all
      end
      local all = {}
      for _, part in ipairs { want[1], merged(0, 5), merged(2, 3), want[4] } do
        for _, i in ipairs(part) do all[#all + 1] = i end
      end
      assert.same(all, at:tolist())
      assert.equal(-math.huge, 1 / values[n / 6 * 3]:item())     -- the first of the zeros is -0
      local up = select(2, tensor(list):sort())
      assert.same(all, up:flip(0):tolist())
    end
  end)

  it("draw the same dropout for samples of one element on cpu and ref", function()
    ps.manual_seed(3)
    for _, n in ipairs { 1, 31, 5000 } do
      local x = ps.ones { n }
      local y = ps.ops.dropout(x, nil, 0.3, 7, 2, 5, 1, 3, 1)
      assert.is_true(y:equal(ps.ops.dropout(x:to "ref", nil, 0.3, 7, 2, 5, 1, 3, 1):to "cpu"))
    end
  end)
end)

describe("comparisons of whole tensors", function()
  it("return booleans", function()
    local inf, nan = math.huge, 0 / 0
    local a = tensor { 1, inf, -inf, nan }
    is({ true, true, true, false }, a:isclose(a))
    is({ true, true, true, true }, a:isclose(a, { equal_nan = true }))
    is({ false, true, true, false }, a:isinf():logical_or(tensor { false, false, false, false }))
    is({ false, false, false, true }, a:isnan())
    assert.is_false(a:allclose(a))
    assert.is_true(a:allclose(a, nil, nil, true))
    assert.is_false(tensor({ inf }):allclose(tensor { 1 }))
    assert.is_false(tensor({ 1 }):allclose(tensor { inf }))
    assert.is_true(tensor({ 1 }):allclose(tensor { 1.05 }, 0.1))
    assert.is_true(tensor({ 1, 2 }):equal(tensor { 1, 2 }))
    assert.is_false(tensor({ 1, 2 }):equal(tensor { { 1, 2 } }))
    assert.is_false(a:equal(a))
    fails(function() return a:allclose(a, { rtl = 1 }) end, "rtol")
    fails(function() return a:allclose() end, "the other tensor is missing")
  end)
end)

describe("parts and shapes", function()
  it("unbind, diag, outer and lerp", function()
    local x = ps.arange(6):reshape(2, 3)
    local a, b, c = x:unbind(1)
    is({ 0, 3 }, a)
    is({ 2, 5 }, c)
    assert(b)
    is({ 0, 4 }, x:diag())
    is({ 1, 5 }, x:diag(1))
    is({ 3 }, x:diag(-1))
    is({ { 0, 0, 0 }, { 1, 0, 0 }, { 0, 2, 0 } }, tensor({ 1, 2 }, "int64"):diag(-1))
    is({ { 3, 4 }, { 6, 8 } }, tensor({ 1, 2 }):outer(tensor { 3, 4 }))
    is({ 5, 7 }, tensor({ 1, 2 }):lerp(tensor { 5, 7 }, 1))
    fails(function() return x:outer(x) end, "outer takes two vectors", "[2, 3]")
    is({ 1, 2, 0, 1 }, tensor({ -5, 5, -3, 1 }) % 3)
    is({ -2, 2, 0, 1 }, tensor({ -5, 5, -3, 1 }):fmod(3))
    is({ -1, 0, 1 }, tensor({ -1.5, -0.5, 1.5 }):trunc())
    is({ 1, 1, 2, 2 }, tensor({ 1, 2 }):repeat_interleave(2))
    assert.same({ 2, 1, 3 }, x:unflatten(1, { 1, -1 }):shape())
    fails(function() return x:unflatten(1, { 2, -1 }) end, "unflatten", "size 3", "2, -1")
    fails(function() return x:unflatten(1, { 2, 2 }) end, "unflatten", "size 3", "2, 2")
    local w = ps.ones({ 3 }):requires_grad(true)
    fails(function() return w:floor_divide(2) end, "floor_divide has no gradient", "x:detach()")
    fails(function() return x:floor_divide(w) end, "floor_divide has no gradient")
    fails(function() return ps.arange(3):remainder(0) end, "remainder", "divided by 0")
    fails(function() return ps.arange(3):fmod(ps.arange(3)) end, "fmod", "divided by 0")
    fails(function() return x:remainder "2" end, "remainder", "a string")
    fails(function() return 7 % x end, "%")
    fails(function() return x:repeat_interleave(tensor { 1, 2 }, 0) end, "repeat_interleave", "fp32 [2]")
    fails(function() return x:cdist(tensor { 1, 2 }) end, "cdist", "[2, 3]", "[2]")
    fails(function() return ps.F.triplet_margin_loss(x, x, x, { margins = 1 }) end, "margins", "margin")
    local f = x:float()
    fails(function() return ps.F.triplet_margin_loss(f, f, tensor { 1 }) end, "F.triplet_margin_loss", "shapes differ")
    fails(function() return ps.F.cosine_embedding_loss(f, f, f) end, "F.cosine_embedding_loss", "[N, D]")
    fails(function() return ps.zeros({ 1, 1, 1 }):diag() end, "diag takes one or two dimensions")
    fails(function() return x:lerp(x, 0.5) end, "lerp takes floats of one type, not int64")
    local p = ps.nn.Parameter(tensor { 2, 3 });
    (p:diag(1) * ps.arange(9):reshape(3, 3)):sum():backward()
    is({ 1, 5 }, p:grad())
  end)
end)

describe("activations", function()
  it("keep their values at the edges", function()
    local inf, nan = math.huge, 0 / 0
    local edge = tensor { -inf, -2 ^ 100, 2 ^ 100, inf }
    is({ 0, 0, 2 ^ 100, inf }, F.softplus(edge:double()))
    is({ -1, -1, 2 ^ 100, inf }, F.elu(edge:double()))
    is({ -inf, -2 ^ 100, 2 ^ 100, inf }, F.leaky_relu(edge:double(), 1))
    is({ -inf, -2 ^ 100, 0, 0 }, F.logsigmoid(edge:double()))
    is({ -1, -1, 1, 1 }, F.hardtanh(edge))
    is({ 0, 0, 6, 6 }, F.relu6(edge))
    for _, name in ipairs { "softplus", "elu", "leaky_relu", "hardtanh", "relu6", "mish", "selu", "logsigmoid" } do
      assert.is_true(F[name](tensor { nan }):isnan():all():item(), name)
    end
    is({ -inf, 0, inf }, tensor({ -1, 0, inf }):log1p())
    is({ -1, 0, inf }, tensor({ -inf, 0, 200 }):expm1())
    assert(math.abs(tensor({ 1e-6 }):log1p():item() / 9.999995e-7 - 1) < 2e-7)
    local certain = F.binary_cross_entropy_with_logits(tensor { 17 }, tensor { 1 }):item()      -- log(1 + exp(-17))
    assert(math.abs(certain / 4.13993771e-8 - 1) < 1e-6, certain)
    local options = { pos_weight = tensor { 2 } }
    local weighted = F.binary_cross_entropy_with_logits(tensor { 17 }, tensor { 1 }, options):item()
    assert(math.abs(weighted / 8.27987542e-8 - 1) < 1e-6, weighted)
    assert(math.abs(tensor({ 1e-6 }):expm1():item() / 1.0000005e-6 - 1) < 2e-7)
    fails(function() return F.softplus(ps.arange(3)) end, "F.softplus takes floats, not int64")
    fails(function() return F.hardtanh(edge, 2, 1) end, "the lower bound, 2, is above the upper one, 1")
    fails(function() return F.glu(ps.zeros { 3 }) end, "size 3, which is odd")
    fails(function() return F.smooth_l1_loss(edge, edge, { beta = -1 }) end, "beta is -1")
  end)
end)

describe("draws", function()
  local function twice(fn)
    local threads = ps.threads()
    ps.manual_seed(5)
    local first = fn()
    ps.manual_seed(5)
    ps.set_threads(threads == 1 and 2 or 1)
    local second = fn()
    ps.set_threads(threads)
    return first, second
  end

  it("are the same for the same seed, on any number of threads", function()
    for name, fn in pairs {
      randperm = function() return ps.randperm(30000) end,
      bernoulli = function() return ps.full({ 100000 }, 0.3):bernoulli() end,
      multinomial = function() return ps.rand({ 3, 50 }):multinomial(20) end,
      replaced = function() return ps.rand({ 3, 50 }):multinomial(200, true) end,
      rand_like = function() return ps.rand_like(ps.zeros { 100 }) end,
      randint_like = function() return ps.randint_like(ps.zeros { 100 }, 3, 9) end,
    } do
      local a, b = twice(fn)
      assert.is_true(a:equal(b), name)
      assert.is_false(a:equal(fn()), name)
    end
  end)

  it("of randperm are permutations, all equally likely", function()
    ps.manual_seed(1)
    for _, n in ipairs { 0, 1, 2, 1000 } do
      is(ps.arange(n):tolist(), (ps.randperm(n):sort()))
    end
    local counts, draws = {}, 3000
    for _ = 1, draws do
      local p = ps.randperm(3):tolist()
      local key = table.concat(p)
      counts[key] = (counts[key] or 0) + 1
    end
    for _, n in pairs(counts) do assert(math.abs(n - draws / 6) < 100, n) end            -- 4.9 standard deviations
    assert.equal("int32", ps.randperm(3, { dtype = "int32" }):dtype())
    fails(function() return ps.randperm(-1) end, "ps.randperm: n")
  end)

  it("of bernoulli and multinomial have the requested frequencies", function()
    ps.manual_seed(2)
    local n = 40000
    local hits = ps.full({ n }, 0.3):bernoulli():sum():item()
    assert(math.abs(hits - 0.3 * n) < 5 * math.sqrt(n * 0.21), hits)
    is({ 0, 1 }, tensor({ 0, 1 }):bernoulli())
    is({ 1, 1 }, ps.zeros({ 2 }):bernoulli_(1))
    local weights = tensor { 1, 0, 2, 5 }
    local many = weights:multinomial(n, true)
    for k, w in ipairs { 1, 0, 2, 5 } do
      local got, p = many:eq(k - 1):sum():item(), w / 8
      assert(math.abs(got - p * n) <= 5 * math.sqrt(n * p * (1 - p)), got)
    end
    -- Without replacement, the first draw has the probabilities of the weights, no category occurs twice, and none with
    -- weight 0 occurs.
    local first, rows = { 0, 0, 0, 0 }, 4000
    local drawn = weights:reshape(1, 4):expand(rows, 4):multinomial(3)
    assert.same({ rows, 3 }, drawn:shape())
    for _, row in ipairs(drawn:tolist()) do
      first[row[1] + 1] = first[row[1] + 1] + 1
      assert(row[1] ~= row[2] and row[1] ~= row[3] and row[2] ~= row[3])
    end
    for k, w in ipairs { 1, 0, 2, 5 } do
      local p = w / 8
      assert(math.abs(first[k] - p * rows) <= 5 * math.sqrt(rows * p * (1 - p)), first[k])
    end
    assert.equal(0, drawn:eq(1):sum():item())
    fails(function() return weights:multinomial(4) end, "4 draws without replacement", "3 categories")
    fails(function() return tensor({ 0, 0 }):multinomial(1) end, "all probabilities of a row are 0")
    fails(function() return tensor({ -1, 2 }):multinomial(1) end, "negative")
    fails(function() return tensor({ 0 / 0, 2 }):multinomial(1) end, "or NaN")
    fails(function() return weights:multinomial(0) end, "the number of draws")
    fails(function() return tensor({ 1.5 }):bernoulli() end, "a probability is 1.5")
    fails(function() return ps.arange(3):bernoulli() end, "bernoulli takes floats, not int64")
  end)

  it("with another tensor's shape have its type and device", function()
    local x = ps.zeros({ 2, 3 }, { dtype = "bf16" })
    assert.equal("bf16", ps.rand_like(x):dtype())
    assert.equal("fp64", ps.randn_like(x, { dtype = "fp64" }):dtype())
    is({ { 7, 7, 7 }, { 7, 7, 7 } }, ps.full_like(x, 7), "bf16")
    local k = ps.randint_like(x, 2)
    assert.equal("bf16", k:dtype())
    assert(k:amax():item() <= 1 and k:amin():item() >= 0)
    assert.is_true(ps.zeros_like(x, { dtype = "fp32", requires_grad = true }):requires_grad())
    assert.same({ 2, 3 }, ps.empty_like(x):shape())
    fails(function() return ps.full_like(ps.arange(2), 2 ^ 70) end, "does not fit int64")
    fails(function() return ps.rand_like(3) end, "ps.rand_like")
  end)
end)

describe("counts and order", function()
  it("refuse values that they cannot count or search", function()
    local x = tensor({ 1, 0, 3 }, "int64")
    fails(function() return ps.ones({ 2 }):bincount() end, "bincount takes a vector of integers", "fp32 [2]")
    fails(function() return (x - 2):bincount() end, "bincount: a value is -2")
    fails(function() return x:bincount { weights = ps.ones { 2 } } end, "the weights are fp32 [2]", "3 values")
    fails(function() return ps.zeros({ 0 }):median() end, "median: the tensor has no elements")
    fails(function() return ps.ones({ 2 }):quantile(1.5) end, "quantile: q is 1.5", "[0, 1]")
    fails(function() return ps.ones({ 2, 3 }):searchsorted(ps.ones { 3, 3 }) end,
      "all sizes of the sequence and the values except the last must be equal")
    assert.is_true(tensor({ 1, 0 / 0, 3 }):median():isnan():item())
    is({ 0, 3 }, ps.zeros({ 0 }, { dtype = "int64" }):bincount { minlength = 2 } + tensor({ 0, 3 }, "int64"))
  end)

  it("search integers that fp64 cannot tell apart, and NaN as PyTorch does", function()
    local large = ps.arange(4) + 2 ^ 62 + (2 ^ 62 - 1024)
    is({ 0, 1, 2, 3 }, large:searchsorted(large))
    is({ 1, 2, 3, 4 }, large:searchsorted(large, { right = true }))
    is({ 0, 1, 2, 3 }, large:reshape(1, 4):searchsorted(large:reshape(1, 4)):reshape(-1))
    local seq = tensor { 1, 2, 0 / 0 }
    is({ 1, 3, 3 }, seq:searchsorted(tensor { 1.5, 2.5, 0 / 0 }))
    is({ 1, 3, 3 }, seq:to("bf16"):searchsorted(tensor({ 1.5, 2.5, 0 / 0 }, "bf16"), { right = true }))
  end)

  it("write in place only what fits, and nothing that needs a gradient", function()
    fails(function() return ps.arange(3):sqrt_() end, "sqrt_: the result is a tensor of fp32 [3]", "int64 [3]")
    fails(function() return ps.ones({ 2 }):lerp_(ps.ones { 3, 2 }, 0.5) end, "lerp_: the result", "[3, 2]")
    local p = ps.nn.Parameter(ps.ones { 2, 2 })
    fails(function() return p:clamp_(0, 1) end, "clamp_ writes in place", "t:clamp(low, high)")
    fails(function() return p:fill_diagonal_(0) end, "fill_diagonal_ writes in place")
    fails(function() return p:mul_(2) end, "mul_ writes in place", "t:mul(x)")
    fails(function() return (p * 2):add_(1) end, "add_ writes in place", "t:add(x)")
    fails(function() return ps.ones({ 2, 2 }):sub_(p) end, "sub_ writes in place, but the value")
    fails(function() return p:div_(2) end, "div_ writes in place")
    fails(function() return p:zero_() end, "zero_ writes in place")
    fails(function() return p:bernoulli_() end, "bernoulli_ writes in place")
    for _, name in ipairs { "add_", "sub_", "mul_", "div_" } do
      local x = ps.ones { 2, 3 }
      fails(function() return x[name](x, ps.ones { 4 }) end, name .. ": x has shape [4]", "[2, 3]")
      fails(function() return x[name](x, ps.ones { 1, 2, 3 }) end, name .. ": x has shape [1, 2, 3]")
      fails(function() return x[name](x) end, name .. ": x is missing")
      fails(function() return x[name](x, "a") end, name .. ": x is a string")
    end
    fails(function() return ps.ones({ 2 }):addcmul_(ps.ones { 2 }, ps.ones { 3 }) end, "addcmul: a has shape [2]",
      "[3]")
    ps.no_grad(function() p:clamp_(0, 0.5) end)
    is({ { 0.5, 0.5 }, { 0.5, 0.5 } }, p:detach())
  end)
end)

describe("a loss", function()
  local x, p, w

  before_each(function()
    x, p = ps.nn.Parameter(tensor { { 1, 2, -1 }, { 0, 0.5, 3 } }), ps.nn.Parameter(tensor { { 0.2, 0.5, 0.3 },
      { 0.1, 0.1, 0.8 } })
    w = tensor { 1, 2, 0.5 }
  end)

  local function near(want, got)
    for i, v in ipairs(got:reshape(-1):tolist()) do assert.near(want[i], v, 2e-6) end
  end

  it("of class probabilities has PyTorch's values and gradients", function()
    for _, case in ipairs {
      { {}, { 1.061442 }, { 0.029748, 0.102692, -0.13244, -0.028007, -0.013739, 0.041746 } },
      { { weight = w }, { 1.003939 }, { 0.07516, -0.023865, -0.051295, -0.034605, -0.074617, 0.109222 } },
      { { label_smoothing = 0.1 }, { 1.137276 }, { 0.023082, 0.111026, -0.134107, -0.039673, -0.025406, 0.065079 } },
      { { weight = w, label_smoothing = 0.1, reduction = "sum" }, { 2.21226 },
        { 0.132229, -0.02733, -0.1049, -0.09049, -0.192517, 0.283007 } },
      { { reduction = "none", weight = w }, { 1.121166, 0.886711 },
        { 0.15032, -0.047731, -0.102589, -0.069209, -0.149235, 0.218445 } } } do
      x:set_grad(nil)
      local loss = F.cross_entropy(x, p, case[1])
      near(case[2], loss)
      loss:sum():backward()
      near(case[3], x:grad())
    end
    near({ 1.061442 }, F.lm_loss(x, ps.eye(3), p))
    p:set_grad(nil)
    F.cross_entropy(x, p):backward()
    near({ 0.674506, 0.174506, 1.674506, 1.561936, 1.311936, 0.061936 }, p:grad())
    fails(function() return F.cross_entropy(x, p, { ignore_index = 0 }) end, "F.cross_entropy: ignore_index = 0")
    fails(function() return F.cross_entropy(x, tensor { 0, 1 }) end, "class probabilities", "[2, 3]", 'to("int64")')
    fails(function() return F.nll_loss(x, p) end, "F.nll_loss: targets must be int32 or int64", "F.cross_entropy")
  end)

  it("of classes says that they come last", function()
    local logits, target = ps.zeros { 2, 3, 5 }, ps.zeros({ 2, 5 }, { dtype = "int64" })
    for _, fn in ipairs { F.cross_entropy, F.nll_loss } do
      for _, options in ipairs { {}, { weight = ps.ones { 3 } } } do
        fails(function() return fn(logits, target, options) end, "[2, 3]", "[2, 5]", "x:movedim(1, -1)")
        assert.is_true(fn(logits:movedim(1, -1), target, options):item() >= 0)
      end
    end
    local outside = tensor({ 0, 9 }, "int64")
    fails(function() return F.cross_entropy(x, outside, { weight = w }) end, "F.cross_entropy: target 9 at position 1")
    fails(function() return F.cross_entropy(x, nil, { weight = w }) end, "F.cross_entropy: the target is missing")
    fails(function() return F.nll_loss(x) end, "F.nll_loss: the target is missing")
  end)

  it("names itself in errors about shapes and devices", function()
    local a, four = ps.zeros { 2, 3 }, ps.zeros { 4 }
    for _, shape in ipairs { { 4 }, { 5, 2, 3 } } do
      fails(function() return F.binary_cross_entropy_with_logits(a, a, { pos_weight = ps.ones(shape) }) end,
        "F.binary_cross_entropy_with_logits: pos_weight has shape", "[2, 3]")
    end
    fails(function() return F.margin_ranking_loss(a, a, four) end, "F.margin_ranking_loss: the target", "[4]")
    fails(function() return F.margin_ranking_loss(a, a, ps.ones { 3 }) end, "the inputs have 2 dimensions", "[3]")
    fails(function() return F.gaussian_nll_loss(a, a, a - 0.5) end, "a variance is negative (-0.5)")
    fails(function() return F.cosine_embedding_loss(a, a, four) end, "F.cosine_embedding_loss", "[4]")
    fails(function() return F.pairwise_distance(a, four) end, "F.pairwise_distance: a has shape [2, 3]", "[4]")
    fails(function() return F.cosine_similarity(a, four) end, "F.cosine_similarity: a has shape [2, 3]", "[4]")
    fails(function() return F.gaussian_nll_loss(a, a, four) end, "F.gaussian_nll_loss: the variance", "[4]")
    fails(function() return F.mse_loss(a, a:to "ref") end, "F.mse_loss", "cpu and ref")
    fails(function() return F.swiglu(a) end, "F.swiglu takes two tensors", "chunk(2, -1)")
    fails(function() return F.geglu(a, four) end, "F.geglu: 'gate' is fp32 [2, 3]", "[4]")
  end)

  it("reads variances without the last dimension as PyTorch does", function()
    local loss = F.gaussian_nll_loss(tensor { { 1, 2 }, { 3, 4 } }, tensor { { 0, 1 }, { 1, 1 } }, tensor { 0.5, 2 },
      { reduction = "none" })
    near({ 0.653426, 0.653426, 1.346574, 2.596574 }, loss)
  end)
end)

describe("a small layer", function()
  local nn = ps.nn
  it("says what PyTorch's arguments mean here", function()
    fails(function() return nn.ReLU { inplace = true } end, "inplace does not exist here", "write nn.ReLU()")
    fails(function() return nn.InstanceNorm2d(3, { track_running_stats = true }) end, "track_running_stats")
    fails(function() return nn.init.trunc_normal_(ps.ones { 2, 2 }) end, "nn.init.trunc_normal_ does not exist",
      "xavier_normal_")
    fails(function() return nn.EmbeddingBag(3, 2)(tensor({ 0, 1 }, "int64")) end, "[N] with offsets [B]")
    fails(function() return nn.EmbeddingBag(3, 2)(tensor({ 0, 1 }, "int64"), tensor({ 1 }, "int64")) end,
      "the first offset is 1; it must be 0")
    fails(function() return F.dropout1d(ps.ones { 2, 2 }) end, "takes a tensor of 3 dimensions")
  end)

  it("is an object of its class and of the classes from which that derives", function()
    local Wide = nn.class("Wide", nn.Linear)
    local wide = Wide(2, 3)
    assert.same({ true, true, true, false }, { wide:is_a(Wide), wide:is_a(nn.Linear), wide:is_a(nn.Module),
      nn.Linear(2, 3):is_a(Wide) })
    fails(function() return wide:is_a "Linear" end, "takes a class, not a string")
  end)

  it("starts from orthogonal weights, by rows or by columns", function()
    for _, shape in ipairs { { 5, 9 }, { 9, 5 }, { 4, 3, 2 } } do
      local w = nn.init.orthogonal_(ps.empty(shape), 2):reshape(shape[1], -1)
      local square = shape[1] <= w:size(1) and w:matmul(w:t()) or w:t():matmul(w)
      assert.is_true((square - ps.eye(square:size(0)) * 4):abs():max():item() < 1e-5)
    end
    local w = ps.ones { 8, 4 }
    ps.manual_seed(3)
    nn.init.kaiming_normal_(w, { mode = "fan_out", nonlinearity = "relu" })
    ps.manual_seed(3)
    assert.is_true((ps.randn { 8, 4 } * math.sqrt(2 / 8) - w):abs():max():item() < 1e-6)
  end)

  it("makes all gradients NaN if clip_grad_norm finds a NaN", function()
    for _, case in ipairs { { 0 / 0, "nan nan nan" }, { math.huge, "nan 0 0" } } do
      local a, b = nn.Parameter(tensor { 1, 2 }), nn.Parameter(tensor { 3 })
      local loss = (a * ps.tensor { case[1], 1 }):sum() + (b * 4):sum()
      loss:backward()
      nn.clip_grad_norm({ a, b }, math.huge)                               -- only measures
      assert.equal(4, b:grad():item())
      nn.clip_grad_norm({ a, b }, 1)
      local found = {}
      for i, x in ipairs { a:grad()[0]:item(), a:grad()[1]:item(), b:grad():item() } do
        found[i] = x ~= x and "nan" or tostring(x)
      end
      assert.equal(case[2], table.concat(found, " "))
    end
  end)

  it("has gradients that clip_grad_value limits", function()
    local p = nn.Parameter(ps.ones { 3 })
    ps.sum(p * tensor { 3, -4, 0.5 }):backward()
    nn.clip_grad_value_({ p }, 1)
    is({ 1, -1, 0.5 }, p:grad())
    fails(function() nn.clip_grad_value({ 3 }, 1) end, "item 1", "a number")
  end)
end)
