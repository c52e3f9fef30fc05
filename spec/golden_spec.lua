-- SPDX-License-Identifier: BSD-3-Clause
-- Golden values: whole training runs against float64 results of an independent implementation. The folders lie in
-- ../shared/golden beside the tree, or under $PS_SHARED.
local lfs = require "lfs"
local paths = require "ps.paths"
local golden = require "bench.golden_lib"

local shared = os.getenv("PS_SHARED") or paths.root .. "/../shared"

-- Bounds: every loss 2e-6 relative, first gradients and final parameters 1e-5, in fp32. In bf16 the weights themselves
-- are rounded to 8 bits, so only the losses are looked at.
local CASES = {
  { device = "cpu", dtype = "fp32", loss = 2e-6, tensors = 1e-5 },
  { device = "ref", dtype = "fp32", loss = 2e-6, tensors = 1e-5 },
  { device = "cpu", dtype = "fp32", loss = 2e-6, tensors = 1e-5, recompute = true },
  { device = "cpu", dtype = "bf16", loss = 5e-3 },
}

describe("golden values", function()
  for _, name in ipairs { "gpt2_tiny", "gpt2_b8" } do
    for _, case in ipairs(CASES) do
      local how = case.recompute and " with recompute" or ""
      local what = ("%s on %s in %s%s"):format(name, case.device, case.dtype, how)
      it("are reproduced: " .. what, function()
        local folder = shared .. "/golden/" .. name
        if lfs.attributes(folder .. "/golden.json", "mode") ~= "file" then
          pending("no golden values at " .. folder .. "; set PS_SHARED to the folder that holds golden/")
          return
        end
        local result = golden.run(folder, { device = case.device, dtype = case.dtype, recompute = case.recompute })
        assert.truthy(result.max_rel_loss_error <= case.loss, "loss error " .. result.max_rel_loss_error)
        if case.tensors then
          assert.truthy(result.max_rel_grad_error <= case.tensors, "gradient error " .. result.max_rel_grad_error)
          assert.truthy(result.max_rel_param_error <= case.tensors, "parameter error " .. result.max_rel_param_error)
        end
      end)
    end
  end
end)
