-- SPDX-License-Identifier: BSD-3-Clause
-- A query that sees one key: its weight is 1 whatever the scores, so dq is exactly 0, and so is its contribution to
-- dk. A rounding error there would become a full step of Adam, whose size does not depend on the gradient's. Tested on
-- the cpu, on ref, and on the emulated device cuda (all its kernels: for half types with and without masks, and for
-- other types). Large scores, compared with float64: their rounding must not enter the weights a second time through
-- lse.
local cuda = require "spec.cuda_lib"

local CHECKS = [[
  local devices, dtypes, quick = ...                      -- quick: fewer heads and settings, and no long cases
  local H = quick and 1 or 2
  -- T, S, causal, and the hidden keys of both samples. sure: for each sample, the queries that see at most one key.
  local function upto(n)
    local list = {}
    for i = 0, n - 1 do list[#list + 1] = i end
    return list
  end
  local cases = {
    { T = 1, S = 1, causal = 1, sure = { { 0 }, { 0 } } }, { T = 1, S = 1, causal = 0, sure = { { 0 }, { 0 } } },
    { T = 70, S = 70, causal = 1, sure = { { 0 }, { 0 } } },
    { T = 130, S = 130, causal = 1, sure = { { 0 }, { 0 } }, long = true },
    { T = 5, S = 1, causal = 0, sure = { upto(5), upto(5) } },
    { T = 5, S = 1, causal = 1, sure = { upto(5), upto(5) } },
    { T = 70, S = 66, causal = 1, sure = { upto(5), upto(5) } }, { T = 3, S = 70, causal = 1, sure = { {}, {} } },
    { T = 70, S = 70, causal = 0, sure = { {}, {} } },
    { T = 70, S = 70, causal = 1, hidden = { { 0, 1, 3, 4 }, {} }, sure = { upto(5), { 0 } } },
    { T = 9, S = 9, causal = 0, hidden = { { 0, 1, 2, 3, 5, 6, 7, 8 }, {} }, sure = { upto(9), {} } },
    { T = 7, S = 140, causal = 0, hidden = { upto(139), upto(138) }, sure = { upto(7), {} } },
    { T = 70, S = 70, causal = 1, hidden = { upto(70), upto(69) }, sure = { upto(70), upto(70) } },
  }
  local function run(case, device, dtype, D, p, sees_dk)
    ps.manual_seed(3)
    local function draw(n) return ps.randn({ 2, H, n, D }, { dtype = dtype, device = "ref" }) end
    local q, k, v, dy = draw(case.T), draw(case.S), draw(case.S), draw(case.T)
    if sees_dk then  -- sets dy only for these queries, which gives their whole contribution to dk
      local keep = ps.zeros({ 2, 1, case.T, 1 }, { device = "ref" })
      for b = 0, 1 do for _, i in ipairs(case.sure[b + 1]) do keep[{ b, 0, i }] = 1 end end
      dy = dy * keep:to(dtype)
    end
    local mask
    if case.hidden then
      mask = ps.ones({ 2, case.S }, { device = "ref" })
      for b = 0, 1 do for _, j in ipairs(case.hidden[b + 1]) do mask[{ b, j }] = 0 end end
      mask = mask:bool():to(device)
    end
    local leaves = {}
    for i, t in ipairs { q, k, v } do leaves[i] = t:to(device):clone():requires_grad(true) end
    ps.ops.attention(leaves[1], leaves[2], leaves[3], mask, 0.7, case.causal, p, 7, 1, 0, 5):backward(dy:to(device))
    local grads = {}
    for i, t in ipairs(leaves) do grads[i] = t:grad():to("cpu"):double() end
    return unpack(grads)
  end
  local function largest(t) return t:numel() == 0 and 0 or t:abs():max():item() end
  for _, device in ipairs(devices) do
    for _, dtype in ipairs(dtypes) do
      for n, case in ipairs(cases) do
        for _, setting in ipairs { { 64, 0 }, n % 2 == 0 and { 20, 0.25 } or { 16, 0 } } do
          local D, p = setting[1], setting[2]
          if quick and (case.long or (D ~= 64 or dtype == "fp32") and case.T * case.S > 1000 and n ~= 10) then break end
          local what = ("case %d on %s in %s, D %d, p %g"):format(n, device, dtype, D, p)
          local dq, dk, dv = run(case, device, dtype, D, p)
          for b = 0, 1 do
            for _, i in ipairs(case.sure[b + 1]) do
              assert(largest(dq[{ b, {}, i }]) == 0, ("%s: dq of sample %d, query %d: %g"):format(what, b, i,
                largest(dq[{ b, {}, i }])))
            end
          end
          assert(largest(dv) > 0 or case.hidden, what .. ": dv is 0")
          if #case.sure[1] + #case.sure[2] > 0 then
            local _, only = run(case, device, dtype, D, p, true)
            assert(largest(only) == 0, ("%s: dk: %g"):format(what, largest(only)))
          end
          if device ~= "ref" then                     -- the others are unchanged
            local bound = dtype == "fp64" and 1e-12 or dtype == "fp32" and 1e-5 or dtype == "fp16" and 0.01 or 0.08
            local want = { run(case, "ref", dtype, D, p) }
            for i, got in ipairs { dq, dk, dv } do
              local off = largest(got - want[i])
              assert(off <= bound * math.max(1, largest(want[i])), ("%s: result %d is off by %g"):format(what, i, off))
            end
          end
        end
      end
    end
  end
]]

describe("a query that sees one key has no gradient,", function()
  it("on the cpu and on ref", function()
    local ps = require "ps"
    local check = assert(loadstring("local ps = ...\nreturn function(...)" .. CHECKS .. "\nend"))(ps)
    check({ "cpu", "ref" }, { "fp32", "bf16", "fp16" })
    check({ "ref" }, { "fp64" })
  end)

  it("on the device cuda", function()
    local lacking = cuda.lacks_kernels()
    if lacking then return pending(lacking) end
    for _, kernels in ipairs { "mma", "wgmma" } do
      local env = { PS_CUDA_ATTENTION = kernels }
      local out, code = cuda.child("local function check(...)" .. CHECKS .. "\nend\ncheck({ 'cuda' }, "
        .. (kernels == "mma" and "{ 'fp32', 'bf16' }" or "{ 'fp16' }") .. ", true)\nprint 'fine'", env)
      assert.truthy(code == 0 and out:find("fine\n", 1, true), out)
    end
  end)
end)

describe("with scores of ten and more", function()
  local ps = require "ps"

  -- Returns y, dq, dk and dv of attention, some of whose weights are nearly 1.
  local function run(q, k, v, dy, dtype)
    local function leaf(t) return t:to(dtype):detach():requires_grad(true) end
    local Q, K, V = leaf(q), leaf(k), leaf(v)
    local y = ps.F.attention(Q, K, V, { causal = true, scale = 1 })
    ps.backward((y * dy:to(dtype)):sum())
    return { y:to "fp64", Q:grad():to "fp64", K:grad():to "fp64", V:grad():to "fp64" }
  end

  it("the weights of backward are those of forward, by float64, if a block has all keys", function()
    for _, T in ipairs { 3, 17, 64 } do
      ps.manual_seed(3)
      local function draw(scale) return ps.randn { 8, 4, T, 16 } * scale end
      local q, k, v, dy = draw(2), draw(2), draw(1), draw(1)
      local got, want = run(q, k, v, dy, "fp32"), run(q, k, v, dy, "fp64")
      local off = {}
      for i, name in ipairs { "y", "dq", "dk", "dv" } do
        local d = got[i] - want[i]
        off[name] = ((d * d):sum():item() / (want[i] * want[i]):sum():item()) ^ 0.5
      end
      assert(off.y <= 1e-6 and off.dq <= 3e-6 and off.dk <= 3e-6, ("T %d: %g %g %g"):format(T, off.y, off.dq, off.dk))
      assert(off.dv <= 1.5 * off.y, ("T %d: dv is %g of its norm off, y %g"):format(T, off.dv, off.y))
    end
  end)
end)

describe("attention refuses", function()
  local ps, check = require "ps", require "spec.check_lib"
  local F = ps.functional
  local q, k = ps.randn { 2, 4, 3, 8 }, ps.randn { 2, 2, 5, 8 }

  it("heads of keys that do not divide the heads, and windows of non-causal attention", function()
    check.fails(function() F.attention(q, ps.randn { 2, 3, 5, 8 }, ps.randn { 2, 3, 5, 8 }) end,
      "3 heads of keys do not divide 4 heads")
    check.fails(function() F.attention(q, k, k, { window = 2 }) end, "a window needs causal attention")
    check.fails(function() F.attention(q, k, k, { causal = true, window = -1 }) end, "it is -1")
  end)

  it("masks of other shapes or types", function()
    check.fails(function() F.attention(q, k, k, { mask = ps.zeros { 2, 4, 3, 4 } }) end,
      "must be bool, fp32 or fp32, [2 or 1, 4 or 1, 3 or 1, 5]")
    check.fails(function() F.attention(q, k, k, { mask = ps.zeros({ 2, 1, 3, 5 }, { dtype = "int32" }) }) end,
      "a mask of 4 dimensions must be bool")
    check.fails(function() F.attention(q, k, k, { key_mask = ps.zeros { 2, 5 }, mask = ps.zeros { 1, 1, 3, 5 } }) end,
      "mask or key_mask, not both")
    check.fails(function() F.attention(q, k, k, { key_mask = ps.zeros { 1, 1, 3, 5 } }) end, "it must be [B, S]")
  end)

  it("masks that could be of keys or of queries and keys", function()
    local x = ps.randn { 3, 1, 3, 4 }
    local square = ps.ones({ 3, 3 }, { dtype = "bool" }):tril()
    for _, fn in ipairs { F.attention, F.attention_weights } do
      for _, mask in ipairs { square, square:float(), square:unsqueeze(0) } do
        check.fails(function() fn(x, x, x, { mask = mask }) end, "mask:reshape(1, 1, T, S)", "key_mask = mask")
      end
      local function near(a, b) assert.is_true((a - b):abs():max():item() < 1e-6) end
      near((fn(x, x, x, { mask = square:reshape(1, 1, 3, 3) })), F.attention(x, x, x, { causal = true }))
      near((fn(x, x, x, { key_mask = square })), F.attention(x, x, x, { mask = square:reshape(3, 1, 1, 3) }))
    end
  end)

  it("a rotation by a number of angles other than the positions of x", function()
    check.fails(function() F.rope(q, ps.zeros { 1, 4, 4 }, ps.zeros { 1, 4, 4 }) end,
      "cos and sin must be fp32 [2 or 1, 3, at most 4]")
  end)
end)
