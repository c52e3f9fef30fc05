-- SPDX-License-Identifier: BSD-3-Clause
-- Dropout of parts: whatever rows, columns or heads a part has, its masks are those of the whole, element by element.
local ps = require "ps"
local F = ps.functional

local function same(a, b) return a:ne(b):to("fp32"):sum():item() == 0 end

-- Calls fn with the random numbers of one dropout, whatever was drawn before.
local function numbered(fn)
  local rng = ps.rng()
  rng.seed, rng.step, rng.sample, rng.op = 5, 3, 2, 7
  return fn()
end

for _, device in ipairs { "ref", "cpu" } do
  for _, dtype in ipairs { "fp32", "bf16", "fp64" } do
    describe("masks of parts, " .. dtype .. " on " .. device, function()
      it("are those of the whole's rows", function()
        for _, size in ipairs { { 3, 8, 40 }, { 4, 6, 33 }, { 2, 3, 6001 } } do
          local B, T, C = unpack(size)
          local x = ps.randn({ B, T, C }, { dtype = "fp32" }):to(dtype):to(device)
          local whole = numbered(function() return F.dropout(x, 0.3) end):reshape(B * T, C)
          local dropped = whole:eq(0):to("fp32"):mean():item()
          assert(math.abs(dropped - 0.3) < 0.06, dropped)
          for _, ranks in ipairs { 2, 3, 6 } do
            local n = B * T / ranks
            for rank = 0, n % 1 == 0 and ranks - 1 or -1 do
              local rows = x:reshape(B * T, C):narrow(0, rank * n, n)
              local part = numbered(function()
                return F.dropout(rows, 0.3, true, { first = rank * n * C, per_sample = T * C })
              end)
              assert(same(whole:narrow(0, rank * n, n), part), ("%d of %d"):format(rank, ranks))
            end
          end
          local rows = ps.tensor({ B * T - 1, 0, 3, 4 }, "int64"):to(device)                  -- by number
          local some = F.embedding(rows, x:reshape(B * T, C)):detach():requires_grad(true)
          local part = numbered(function() return F.dropout(some, 0.3, true, { rows = rows, per_sample = T * C }) end)
          assert(same(F.embedding(rows, whole), part:detach()), "by number")
          part:backward(some:detach())
          assert(same(part:detach(), some:grad()), "by number, backward")
        end
      end)

      it("take time in proportion to their elements, however large the sample is", function()
        local x = ps.ones({ 64 }, { dtype = dtype, device = device })
        local began = os.clock()                  -- processor seconds, which do not depend on other load
        local part = numbered(function() return F.dropout(x, 0.5, true, { first = 2 ^ 33, per_sample = 2 ^ 34 }) end)
        assert(os.clock() - began < 5)
        local known = numbered(function()
          return F.dropout(x:to "ref", 0.5, true, { first = 2 ^ 33, per_sample = 2 ^ 34 })
        end)
        assert(same(known:to(device), part))
      end)

      it("are those of the whole's heads, in forward and backward", function()
        local B, T, H, D = 2, 37, 4, 8
        local qkv = ps.randn({ B, T, 3, H, D }, { dtype = "fp32" }):to(dtype):to(device)
        local seed = ps.randn({ B, T, H * D }, { dtype = "fp32" }):to(dtype):to(device)
        -- Computes attention of some heads, packed or not, and the gradient of its inputs.
        local function run(first, n, packed)
          local x = qkv:narrow(3, first, n):reshape(B, T, 3 * n * D):clone():requires_grad(true)
          local options = { causal = true, dropout = 0.4, first_head = first }
          local y = numbered(function()
            if packed then return F.attention_packed(x, n, options) end
            local parts = x:reshape(B, T, 3, n, D):permute(2, 0, 3, 1, 4)
            return F.attention(parts[0], parts[1], parts[2], options):transpose(1, 2):reshape(B, T, n * D)
          end)
          local dy = seed:reshape(B, T, H, D):narrow(2, first, n):reshape(B, T, n * D)
          y:backward(dy)
          return y:detach():reshape(B, T, n, D), x:grad():reshape(B, T, 3, n, D)
        end
        local plain_y = numbered(function() return F.attention_packed(qkv:reshape(B, T, -1), H, { causal = true }) end)
        for _, packed in ipairs { true, false } do
          local y, dx = run(0, H, packed)
          assert(not same(y:reshape(B, T, -1), plain_y))
          for first = 0, 2, 2 do
            local part, dpart = run(first, 2, packed)
            assert(same(y:narrow(2, first, 2), part))
            assert(same(dx:narrow(3, first, 2), dpart))
          end
        end
      end)
    end)
  end
end

describe("masks of parts", function()
  it("refuse invalid numbers", function()
    local x = ps.ones { 2, 3 }
    local function by_number(rows, n) return function() F.dropout(x, 0.5, true, { rows = rows, per_sample = n }) end end
    for _, case in ipairs {
      { "first", function() F.dropout(x, 0.5, true, { first = -1, per_sample = 3 }) end },
      { "per_sample", function() F.dropout(x, 0.5, true, { first = 0, per_sample = -3 }) end },
      { "elements", function() F.dropout(x, 0.5, true, { first = 0, per_sample = 2 ^ 34 + 1 }) end },
      { "samples", function() F.dropout(x, 0.5, true, { first = 0, samples = 3 }) end },
      { "equal rows", by_number(ps.tensor({ 0, 1, 2, 3 }, "int64"), 3) },
      { "rows must be int", by_number(ps.zeros { 2 }, 3) },
      { "multiple", by_number(ps.tensor({ 0, 1 }, "int64"), 4) },
      { "outside", by_number(ps.tensor({ 0, -1 }, "int64"), 3) },
      { "first_head", function() F.attention_packed(ps.ones { 1, 2, 6 }, 1, { first_head = -1 }) end },
    } do
      local ok, why = pcall(case[2])
      assert(not ok and tostring(why):find(case[1]), tostring(why))
    end
  end)
end)
