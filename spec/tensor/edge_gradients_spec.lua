-- SPDX-License-Identifier: BSD-3-Clause
-- Values and gradients at edges: NaN, infinities, zeros and their signs, selected elements. The expected values are
-- PyTorch 2.15's. Tested on the cpu, on ref, and on the emulated device cuda in its own process (PS_EDGES=cuda).
local ps = require "ps"
local cuda = require "spec.cuda_lib"
local DEVICE = os.getenv("PS_EDGES")
local nan, inf = 0 / 0, 1 / 0

-- Returns values as text, which includes the sign of zero.
local function text(t)
  local parts = {}
  for i, x in ipairs(t:reshape(-1):tolist()) do
    parts[i] = x ~= x and "nan" or x == 0 and (1 / x < 0 and "-0" or "0") or ("%.6g"):format(x)
  end
  return table.concat(parts, " ")
end

for _, device in ipairs(DEVICE and { DEVICE } or { "cpu", "ref" }) do
  for _, dtype in ipairs { "fp32", "bf16", "fp16", "fp64" } do
    local function leaf(values) return ps.tensor(values, { dtype = dtype, device = device, requires_grad = true }) end
    local function plain(values) return ps.tensor(values, { dtype = dtype, device = device }) end

    -- Returns the gradients of fn's inputs with respect to the sum of its result.
    local function gradients(fn, ...)
      local inputs, found = {}, {}
      for i, values in ipairs { ... } do inputs[i] = leaf(values) end
      fn(unpack(inputs)):sum():backward()
      for i, x in ipairs(inputs) do found[i] = text(x:grad()) end
      return table.concat(found, ", ")
    end

    describe("at edges, on " .. device .. " in " .. dtype .. ",", function()
      it("zeros keep their sign", function()
        assert.equal("-0 0", text(-plain { 0, -0.0 }))
        assert.equal("-0 0", text(plain { -0.0, 0 } * 1))
        assert.equal("0 -0", text(plain { -0.0, 0 } * -2))
        assert.equal("-0 0", text(plain { -0.0, 0 } / 4))
        assert.equal("-0 0", text(plain { -0.0, 0 } / 3))
        assert.equal("0 0", text(plain { -0.0, 0 } + 0))
        assert.equal("-0 0", text(plain { -0.0, 0 } - 0))
        assert.equal("0 0", text(0 - plain { 0, -0.0 }))
        assert.equal("-0 0 nan inf 0", text(plain({ -0.0, 0, nan, inf, -3 }):relu()))
        assert.equal("-0 nan 0", text(plain({ -0.0, nan, -3 }):clamp(0, 1)))
        assert.equal("-0 -0 0", text(plain({ -0.0, -0.25, 0.25 }):round()))
        assert.equal("-0 0", gradients(function(x) return (-x) * plain { 0, -0.0 } end, { 1, 1 }))
        assert.equal("0 -0", gradients(function(x) return (x / 4) * plain { 0, -0.0 } end, { 1, 1 }))
      end)

      it("a power of 0 has no gradient", function()
        assert.equal("0 0 0", gradients(function(x) return x:pow(0) end, { 0, 2, nan }))
        assert.equal("0 -inf 0 0 0 nan, 0 -inf 0 0.693147 nan nan",
          (gradients(ps.pow, { 0, 0, 0, 2, nan, 0 }, { 0, -1, 2, 0, 0, nan }):gsub("0%.69%d+", "0.693147")))
      end)

      it("both inputs of a NaN among maxima have the gradient", function()
        for _, fn in ipairs { ps.maximum, ps.minimum } do
          assert.equal("1 1 0.5 1, 1 1 0.5 1", gradients(fn, { nan, 1, 2, nan }, { 1, nan, 2, nan }))
        end
        assert.equal("0 1, 1 0", gradients(ps.maximum, { 1, 3 }, { 2, 2 }))
        assert.equal("1 0, 0 1", gradients(ps.minimum, { 1, 3 }, { 2, 2 }))
      end)

      it("relu passes the gradient at NaN, and step functions pass none", function()
        assert.equal("1 0 0 1 0", gradients(function(x) return x:relu() end, { nan, 0, -0.0, 1, -1 }))
        assert.equal("0 0", gradients(function(x) return x:floor() * inf end, { 1.5, nan }))
        assert.equal("0 0", gradients(function(x) return x:sign() * plain { nan, 2 } end, { 1.5, 0 }))
      end)

      it("limited functions pass no gradient at their bounds", function()
        local given = { -inf, -1, 0, 1, inf, nan }
        for _, case in ipairs { { "0 0 1 0 0 0", -1, 1 }, { "0 0 0 1 1 0", 0 }, { "1 1 0 0 0 0", nil, 0 },
          { "0 0 0 0 0 0", 1, 1 } } do
          assert.equal(case[1], gradients(function(x) return x:clamp(case[2], case[3]) end, given))
        end
        assert.equal("0 0 0 1 1 0", gradients(function(x) return x:clamp_min(0) end, given))
        assert.equal("1 1 0 0 0 0", gradients(function(x) return x:clamp_max(0) end, given))
        assert.equal("0 0 1 0 0 1", gradients(ps.F.hardtanh, given))
        assert.equal("0 0 1 0 0", gradients(ps.F.relu6, { -1, 0, 3, 6, 7 }))
        assert.equal("0 0 0.5 1 1 1", gradients(ps.F.hardswish, { -4, -3, 0, 3, 4, nan }))
        assert.equal("0 3 0 0", gradients(function(x) return ps.F.hardsigmoid(x) * 18 end, { -3, 0, 3, nan }))
        assert.equal("-1 0 1 nan", gradients(function(x)
          return ps.F.huber_loss(x, ps.zeros_like(x), { reduction = "sum" })
        end, { -1, 0, 2, nan }))
      end)

      it("an element of 0 gives a norm no gradient", function()
        for _, p in ipairs { -1, 0.5, 1.5, 2, 3 } do
          local function norm(x) return x:norm(p) end
          assert.equal("0 0", gradients(norm, { 0, 0 }))
          assert.equal(p == -1 and "0 0" or "0 1", gradients(norm, { 0, 2 }))
        end
        if dtype == "fp64" then
          assert.equal("0 2.22474 -1.8165", gradients(function(x) return x:norm(0.5) end, { 0, 2, -3 }))
        end
      end)

      it("the largest elements pass their gradient to their origins", function()
        assert.equal("1 2 2", gradients(function(x)
          local values = x:topk(2)
          return ps.cat({ values, x }, 0)
        end, { 1, 5, 3 }))
        assert.equal("0 2 3 0 3 2", gradients(function(x)
          local values, indices = x:topk(2)
          assert.falsy(indices:needs_grad())
          assert.truthy(values:needs_grad())
          return values * plain { 2, 3 }
        end, { { 1, 9, 3 }, { 4, 5, 6 } }))
        assert.equal("0 1 0", gradients(function(x) return (x:max(0)) end, { 1, 5, 5 }))
        assert.equal("0 1 0 1 0 0", gradients(function(x) return (x:min(-1, true)) end, { { 3, 2, 2 }, { 4, 4, 4 } }))
        assert.equal("1 1 0 0 0 1", gradients(function(x) return (x:max(0)) end, { { 4, nan, 2 }, { 4, nan, 3 } }))
        assert.equal("0 0.5 0.5", gradients(function(x) return x:max() end, { 1, 5, 5 }))
        local values, indices = plain({ 1, 5, 3 }):topk(2)
        assert.falsy(values:needs_grad())
        assert.same({ 1, 2 }, indices:tolist())
      end)
    end)
  end
end

if not DEVICE then
  describe("at edges, on the device cuda,", function()
    it("the results are the same", function()
      local lacking = cuda.lacks_kernels()
      if lacking then return pending(lacking) end
      local out, code = cuda.child({ "spec/run.lua", "edge_gradients" }, { PS_EDGES = "cuda" })
      assert.truthy(code == 0 and out:find("28 passed, 0 failed, 0 skipped", 1, true), out)
    end)
  end)
end
