-- SPDX-License-Identifier: BSD-3-Clause
-- One parameter as several inputs of one op, in plain memory and in an engine. By the chain rule its gradient is the
-- sum of the gradients of distinct leaves with the same values, which is the expected value.
local ps = require "ps"
local nn, F = ps.nn, ps.functional
local N = 4

local function numbers(t) return t:to("cpu"):double():reshape(-1):tolist() end

local cases = {
  matmul = { inputs = 2, fn = function(x, a, b) return x:matmul(a:matmul(b)) end },
  linear = { inputs = 2, fn = function(x, a, b) return x:matmul(F.linear(a, b, nil, { out_in = true })) end },
  ["linear with a residual"] = { inputs = 3,
    fn = function(x, a, b, c) return x:matmul(F.linear(a, b, nil, { residual = c, out_in = false })) end },
  mlp = { inputs = 3, fn = function(x, a, b, c) return F.mlp(F.linear(x, a), b, nil, c, nil) end },
  ["a product with itself transposed"] = { inputs = 2, fn = function(x, a, b) return x:matmul(a:matmul(b:t())) end },
  ["tied biases"] = { inputs = 2, bias = true,
    fn = function(x, a, b)
      local w = ps.ones({ N, N }, { dtype = x:dtype() }) * 0.25
      return F.mlp(ps.cat({ x, x }, 0), w, a, w, b)
    end },
}

-- Returns the values of a parameter, which are fractions that are exact in fp32 and bf16.
local function values(case, dtype)
  local shape, n = case.bias and { N } or { N, N }, case.bias and N or N * N
  return (ps.arange(0, n, 1, { dtype = "fp32" }) * 0.125 - 0.75):reshape(shape):to(dtype)
end

local function call(case, w)
  local list = {}
  for i = 1, case.inputs do list[i] = w end
  return case.fn(ps.ones({ 2, N }, { dtype = w:dtype() }), unpack(list))
end

local function of_distinct_leaves(case, steps)
  local leaves, total = {}, nil
  for i = 1, case.inputs do leaves[i] = values(case, "fp32"):clone():requires_grad(true) end
  for _ = 1, steps do case.fn(ps.ones { 2, N }, unpack(leaves)):sum():backward() end
  for i = 1, case.inputs do total = total and total + leaves[i]:grad() or leaves[i]:grad() end
  return numbers(total)
end

local function of_engine(case, memory, dtype, micro)
  local M = nn.class "M"
  function M:init() self:param("w", values(case, dtype):clone()) end
  function M:forward() return call(case, self.w):sum() end
  local model, optimizer = ps.initialize { quiet = true, model_func = function() return M() end,
    config = { plan_print = false, memory = memory, overlap_optimizer = false, gradient_accumulation_steps = micro,
      bf16 = dtype == "bf16" and { enabled = true } or nil,
      optimizer = { type = "AdamW", params = { lr = 1e-3 } } } }
  local found
  for k = 1, micro do
    model:backward(model())
    if k == micro then found = numbers(model.module.w:grad()) end
    optimizer:step()
  end
  model:close()
  return found
end

describe("the gradient of a parameter that is several inputs of one op,", function()
  for name, case in pairs(cases) do
    it(name .. ", is the sum over them", function()
      local want = of_distinct_leaves(case, 1)
      local w = values(case, "fp32"):clone():requires_grad(true)
      call(case, w):sum():backward()
      local function check(what, got, steps)
        for i, x in ipairs(want) do
          assert(math.abs(got[i] - steps * x) <= 1e-5 * (1 + math.abs(steps * x)),
            ("%s: element %d is %.9g, not %.9g"):format(what, i, got[i], steps * x))
        end
      end
      check("plain tensors", numbers(w:grad()), 1)
      for _, memory in ipairs { "plain", "chunk" } do
        check(memory, of_engine(case, memory, "fp32", 1), 1)
        check(memory .. ", accumulated", of_engine(case, memory, "fp32", 3), 3)
      end
      assert.same(of_engine(case, "plain", "bf16", 2), of_engine(case, "chunk", "bf16", 2))
    end)
  end
end)
