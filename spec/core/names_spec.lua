-- SPDX-License-Identifier: BSD-3-Clause
-- Names that do not exist: of ps, ps.F, ps.nn and tensors. The error has the nearest name, the place of the name, or
-- the replacement of an omitted function.
local ps = require "ps"
local fails = require("spec.check_lib").fails

describe("a name that does not exist", function()
  local x = ps.zeros { 2, 2 }
  -- Rows of an expression, and texts in its error.
  local CASES = {
    { function() return ps.matmull end, "ps.matmull does not exist", "did you mean ps.matmul?" },
    { function() return ps.optm end, "did you mean ps.optim?" },
    { function() return ps.F.sofmax end, "ps.F.sofmax does not exist", "did you mean ps.F.softmax?" },
    { function() return ps.nn.Linaer end, "nn.Linaer does not exist", "did you mean ps.nn.Linear?" },
    { function() return x:reshap(4) end, "no method or field 'reshap'", "did you mean t:reshape?" },
    { function() return ps.view(x, 4) end, "ps.view does not exist", "write t:view(...)" },
    { function() return ps.F.matmul(x, x) end, "write ps.matmul(...)" },
    { function() return ps.softplus(x) end, "write ps.F.softplus(...)" },
    { function() return ps.nn.softmax(x) end, "write ps.softmax(...)" },
    { function() return x:softplus() end, "write ps.F.softplus(...)" },
    { function() return ps.fft.rfft(x) end, "ps.fft", "Fourier", "ps.matmul" },
    { function() return ps.complex(x, x) end, "no complex numbers", "F.rope" },
    { function() return x:fft() end, "Fourier" },
    { function() return ps.nn.LSTM(3, 4) end, "nn.LSTM does not exist here", "nn.TransformerEncoderLayer" },
    { function() return ps.nn.GRU(3, 4) end, "nn.GRU does not exist here", "once per step" },
    { function() return ps.linalg.solve(x, x) end, "solvers are left out" },
    { function() return ps.F.scaled_dot_product_attention(x, x, x) end, "write ps.F.attention" },
    { function() return x:cuda() end, 'write t:to("cuda")' },
  }
  for i, case in ipairs(CASES) do
    it(("is an error with advice: %d, %s"):format(i, case[2]), function() fails(case[1], unpack(case, 2)) end)
  end
  it("without a similar name is an error that says only that", function()
    local problem = fails(function() return ps.qqqqqqqq end, "ps.qqqqqqqq does not exist")
    assert.is_nil(tostring(problem):find("did you mean", 1, true))
    assert.is_nil(rawget(ps, "qqqqqqqq"))
  end)
end)
