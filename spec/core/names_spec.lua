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
    { function() return ps.sched.StepLr end, "did you mean ps.sched.StepLR?" },
    { function() return ps.optim.AdmW end, "ps.optim.AdmW does not exist; did you mean ps.optim.AdamW?" },
    { function() return x:cuda() end, 'write t:to("cuda")' },
  }
  for i, case in ipairs(CASES) do
    it(("is an error with advice: %d, %s"):format(i, case[2]), function() fails(case[1], unpack(case, 2)) end)
  end
  -- Rows as above: names of PyTorch, which are no misspelt names of another meaning.
  local TORCH = {
    { function() return x:asin() end, "no method or field 'asin'; psluajit lacks this function of PyTorch" },
    { function() return ps.atan2(x, x) end, "ps.atan2 does not exist; psluajit lacks this function of PyTorch" },
    { function() return x:logit() end, "lacks this function of PyTorch: write (x / (1 - x)):log()" },
    { function() return x:asin_() end, "psluajit lacks this function of PyTorch" },
    { function() return x:sin_() end, "no form in place: write x = x:sin(...)" },
    { function() return x.is_leaf end, "leaves are the tensors that no op made" },
    { function() return x:trace() end, "write x:diagonal():sum()" },
    { function() return ps.F.unfold(x) end, "psluajit lacks this function of PyTorch" },
    { function() return ps.F.poisson_nll_loss(x, x) end, "write (x:exp() - y * x):mean()" },
    { function() return ps.nn.Softmax2d() end, "psluajit lacks this class of PyTorch" },
    { function() return ps.optim.Rprop(x) end, "there are ps.optim.Adam" },
    { function() return ps.optim.StepLR end, "write ps.sched.StepLR(...)" },
  }
  for i, case in ipairs(TORCH) do
    it(("of PyTorch says how else: %d, %s"):format(i, case[2]), function()
      local problem = tostring(fails(case[1], unpack(case, 2)))
      assert.is_nil(problem:find("did you mean", 1, true))
    end)
  end

  it("is an error in each public table", function()
    local n, spaces = 0, { ops = true }
    for space in pairs(getmetatable(ps).__names()) do spaces[space] = true end
    for space in pairs(spaces) do
      local table_of = ps[space]
      if type(table_of) == "table" and space ~= "op_info" then
        fails(function() return table_of.qqqqqqqq end, "qqqqqqqq does not exist")
        assert.is_nil(table_of[3])
        local name = space ~= "mesh" and space ~= "ops" and next(table_of)
        while name and (type(name) ~= "string" or #name < 5) do name = next(table_of, name) end
        if name then
          fails(function() return table_of[name .. "x"] end, name .. "x does not exist; did you mean ")
          n = n + 1
        end
      end
    end
    assert.truthy(n > 15, n)
  end)

  it("of PyTorch is listed only if no table has it, and its formula runs", function()
    local torch, formulas, known = require "ps.core.torch_names", require("ps.core.foreign").names "formulas", {}
    local homes = { ops = { require("ps.tensor").methods(), getmetatable(ps).all(), ps.F }, nn = { ps.nn } }
    homes.F = homes.ops
    local OTHER = { trace = true, unfold = true, dist = true }           -- names of another meaning
    for list, text in pairs(torch) do
      local before = ""
      for name in text:gmatch "%S+" do
        known[name] = true
        for _, home in ipairs(homes[list]) do assert(rawget(home, name) == nil or OTHER[name], name .. " exists") end
        assert(before < name, name .. " is out of order")
        before = name
      end
    end
    local values = { x = ps.tensor { { 0.25, 0.5 }, { 0.5, 0.75 } }, y = ps.ones { 2, 2 }, ps = ps, F = ps.F, d = 1,
      nn = ps.nn, math = math, mean = 0, std = 1, first = 0, last = 3, n = 1, threshold = 0.5, value = 0, inputs = 2,
      outputs = 2, fn = function() end, index = ps.tensor({ { 0 }, { 1 } }, { dtype = "int64" }) }
    values.x:requires_grad_(true)
    for name, formula in pairs(formulas) do
      assert(known[name], name .. " is not a name of torch_names.lua")
      if name ~= "set_num_threads" then setfenv(assert(loadstring("return " .. formula, name)), values)() end
    end
    local function of(name, a, b)
      return setfenv(loadstring("return " .. formulas[name]), { x = ps.tensor(a), y = b and ps.tensor(b), ps = ps,
        math = math, F = ps.F })()
    end
    -- Expected values by math and by hand.
    local close = function(want, got) assert.truthy(math.abs(want - got:item()) < 1e-6, want .. ", " .. got:item()) end
    for name, value in pairs { sinh = math.sinh(0.5), cosh = math.cosh(0.5), tan = math.tan(0.5), logit = 0,
      asinh = math.log(0.5 + math.sqrt(1.25)), atanh = math.log(3) / 2, exp2 = math.sqrt(2), frac = 0.5,
      tanhshrink = 0.5 - math.tanh(0.5) } do close(value, of(name, { 0.5 })) end
    close(math.log(math.exp(0.5) + math.exp(0.25)), of("logaddexp", { 0.5 }, { 0.25 }))
    close(5, of("hypot", { 3 }, { 4 }))
    close(math.exp(2) - 6, of("poisson_nll_loss", { 2 }, { 3 }))
    close(math.log(1 + math.exp(-6)), of("soft_margin_loss", { 2 }, { 3 }))
  end)

  it("without a similar name is an error that says only that", function()
    local problem = fails(function() return ps.qqqqqqqq end, "ps.qqqqqqqq does not exist")
    assert.is_nil(tostring(problem):find("did you mean", 1, true))
    assert.is_nil(rawget(ps, "qqqqqqqq"))
  end)
end)
