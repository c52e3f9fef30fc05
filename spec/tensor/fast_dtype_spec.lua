-- SPDX-License-Identifier: BSD-3-Clause
-- ps.fast_dtype: the type that it names, and the processor's method of multiplying bf16, by the time of products.
local ps = require "ps"

-- Returns the processor seconds of a product of 1024^3 in each type, as the smallest of several alternating runs on one
-- thread.
local function seconds()
  local threads, least, of = ps.threads(), { fp32 = math.huge, bf16 = math.huge }, {}
  ps.set_threads(1)
  for dtype in pairs(least) do of[dtype] = ps.randn({ 1024, 1024 }, { dtype = dtype }) end
  for _ = 1, 9 do
    for dtype, a in pairs(of) do
      local began = os.clock()
      a:matmul(a):release()
      least[dtype] = math.min(least[dtype], os.clock() - began)
    end
  end
  ps.set_threads(threads)
  return least
end

describe("fast_dtype", function()
  it("is bf16 only if its products are faster than fp32's, and these are never much slower", function()
    local took, fast = seconds(), ps.fast_dtype()
    local said = ("%s; fp32 %.1f ms, bf16 %.1f ms"):format(ps.device("cpu").description, took.fp32 * 1e3,
      took.bf16 * 1e3)
    if fast == "bf16" then assert.truthy(took.bf16 < took.fp32, said) end
    assert.truthy(took.bf16 < 1.4 * took.fp32, said)
  end)
end)
