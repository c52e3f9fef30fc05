-- SPDX-License-Identifier: BSD-3-Clause
-- Batches in which some targets, or all, are ignored (-100): losses, what a micro-batch weighs, and steps in which no
-- target counts.
local ps = require "ps"
local F = ps.functional

local function ignored(shape) return ps.full(shape, -100, { dtype = "int64" }) end
local function all_zero(t)
  for _, v in ipairs(t:to("fp32"):reshape(-1):tolist()) do if v ~= 0 then return false end end
  return true
end

describe("the mean loss of no targets", function()
  for _, dtype in ipairs { "fp32", "bf16", "fp16", "fp64" } do
    it("is 0, and so is its gradient, in " .. dtype, function()
      for _, shape in ipairs { { 4 }, { 2, 3 }, { 0 } } do
        local x = ps.randn({ shape[1], shape[2] or 5, shape[2] and 5 or nil }):to(dtype):detach():requires_grad()
        local w = ps.randn({ 7, 5 }):to(dtype):detach():requires_grad()
        for reduction, loss in pairs { mean = F.cross_entropy(x, ignored(shape)), sum = F.cross_entropy(x,
          ignored(shape), { reduction = "sum" }), lm = F.lm_loss(x, w, ignored(shape)) } do
          assert(loss:item() == 0, reduction .. " " .. loss:item())
          loss:backward()
          assert(all_zero(x:grad()), reduction)
        end
        assert(all_zero(w:grad()))
      end
    end)
  end
end)
