-- SPDX-License-Identifier: BSD-3-Clause
-- Golden values: whole training runs against float64 results of transformers and PyTorch (spec/oracle/make_golden.py).
local paths = require "ps.paths"
local golden = require "bench.golden_lib"
local check = require "spec.check_lib"

local folder = paths.root .. "/spec/golden/"

-- Bounds for fp32: 2e-6 relative for every loss, and 1e-5 for first gradients and final parameters. In bf16 the weights
-- themselves are rounded to 8 bits, so only the losses are compared.
local CASES = {
  { device = "cpu", dtype = "fp32", loss = 2e-6, tensors = 1e-5 },
  { device = "ref", dtype = "fp32", loss = 2e-6, tensors = 1e-5 },
  { device = "cpu", dtype = "fp32", loss = 2e-6, tensors = 1e-5, recompute = true },
  { device = "cpu", dtype = "bf16", loss = 5e-3 },
}

-- With ps.initialize, errors must equal those of plain memory, to the last digit.
local CHUNKS = {
  { dtype = "fp32" },
  { dtype = "fp32", host = "3MiB", disk = "/tmp", chunk_size = 8192 },
  { dtype = "fp32", host = "2MiB", disk = "/tmp", chunk_size = 4096, recompute = true, eviction = "lru" },
  { dtype = "fp32", device = "sim", device_memory = "1500KiB", chunk_size = 8192 },
  { dtype = "bf16", device = "sim", device_memory = "1500KiB", chunk_size = 8192 },
  { dtype = "bf16", host = "2MiB", disk = "/tmp", chunk_size = 4096 },
}
local FIGURES = { "max_rel_loss_error", "max_rel_grad_error", "max_rel_param_error", "c_attn_bias_grad_error",
  "c_attn_bias_param_error" }

local function words(case)
  local parts = { case.dtype }
  for _, key in ipairs { "device", "device_memory", "host", "disk", "chunk_size", "recompute", "eviction" } do
    if case[key] then parts[#parts + 1] = key .. " " .. tostring(case[key]) end
  end
  return table.concat(parts, ", ")
end

describe("the comparison with golden values", function()
  it("detects a NaN anywhere", function()
    local ps = require "ps"
    local good = ps.arange(1, 33, 1, { dtype = "fp32" }):reshape(4, 8)
    local want = { t = { l2 = good:norm():item(), first8 = { 1, 2, 3, 4, 5, 6, 7, 8 } } }
    assert.truthy((golden.compare({ t = good }, want)) < 1e-6)
    for _, at in ipairs { 0, 3, 7, 8, 31 } do
      local bad = good:clone()
      bad:reshape(-1)[at] = 0 / 0
      assert.equal(math.huge, (golden.compare({ t = bad }, want)))
      assert.equal(math.huge, select(2, golden.compare({ ["c_attn.bias"] = bad }, { ["c_attn.bias"] = want.t })))
    end
  end)
end)

describe("golden values", function()
  for _, name in ipairs { "gpt2_tiny", "gpt2_b8" } do
    local file = folder .. name .. ".json"
    for _, case in ipairs(CASES) do
      local how = case.recompute and " with recompute" or ""
      local what = ("%s on %s in %s%s"):format(name, case.device, case.dtype, how)
      it("are reproduced: " .. what, function()
        local result = golden.run(file, { device = case.device, dtype = case.dtype, recompute = case.recompute })
        assert.truthy(result.max_rel_loss_error <= case.loss, "loss error " .. result.max_rel_loss_error)
        if case.tensors then
          assert.truthy(result.max_rel_grad_error <= case.tensors, "gradient error " .. result.max_rel_grad_error)
          assert.truthy(result.max_rel_param_error <= case.tensors, "parameter error " .. result.max_rel_param_error)
        end
      end)
    end
    local plain = {}
    for _, case in ipairs(CHUNKS) do
      it(("are the same in chunks: %s, %s"):format(name, words(case)), function()
        local options = { memory = "chunk" }
        for key, value in pairs(case) do options[key] = value end
        plain[case.dtype] = plain[case.dtype] or golden.run(file, { dtype = case.dtype })
        local result = golden.run(file, options)
        for _, figure in ipairs(FIGURES) do assert.equal(plain[case.dtype][figure], result[figure], figure) end
      end)
    end
  end

  -- Batches of 8 rows are distributed over the ranks, unevenly over 3 of them. The losses must be those of one process,
  -- and the line is printed once.
  local ranks = require "spec.ranks_lib"
  for _, case in ipairs(check.lower_set and {} or { { 2, 0 }, { 3, 1 }, { 3, 2 }, { 2, 3 }, { 4, 3 }, { 2, 3, "cuda" },
    { 2, 0, nil, "1f1b" }, { 4, 1, nil, "gpipe" }, { 2, 0, "cuda", "zb_h1" } }) do
    local size, stage, device, schedule = unpack(case, 1, 4)
    it(("are reproduced by %d processes at stage %d%s%s"):format(size, stage, device and " on emulated GPUs" or "",
      schedule and " in two stages of a pipeline, " .. schedule or ""),
      function()
        local env = ""
        if device then env = ranks.emulated() end
        if ranks.no_gloo() then return pending(ranks.no_gloo()) end
        if not env then return pending(ranks.NO_EMULATED) end
        local command = ("cd '%s' && env %s timeout 600 '%s' tools/launch.lua --no-prefix --nproc-per-node %d "
          .. "bench/golden.lua '%sgpt2_b8.json' --zero-stage %d --device %s %s 2>&1")
        local pipeline = schedule and "--pipeline 2 --micro-batches 4 --schedule " .. schedule or ""
        local p = assert(io.popen(command:format(paths.root, env, paths.exe, size, folder, stage, device or "cpu",
          pipeline)))
        local text = p:read("*a")
        p:close()
        local line, more = text:match("(%b{})(.*)$")
        assert.truthy(line, text)
        assert.is_nil(more:find("{", 1, true), text)
        local result = require("cjson").decode(line)
        assert.truthy(result.max_rel_loss_error <= 1e-6, line)
        local no_gradients = schedule and size > 2                -- bench/golden_lib.lua
        assert.truthy(no_gradients or result.max_rel_grad_error <= 1e-5, line)
        assert.truthy(result.max_rel_param_error <= 1e-5, line)
      end)
  end
end)
