-- SPDX-License-Identifier: BSD-3-Clause
-- The device sim, a simulated accelerator. Copies move tensors to it and back. The op table runs on it with the cpu's
-- bits, training has the cpu's losses and parameters bit for bit, and its memory has the set limit.
local ps = require "ps"
local ffi = require "ffi"
local gpt2 = require "models.gpt2"
local H = dofile((arg[0]:match("^(.*)/[^/]*$") or ".") .. "/op_harness.lua")
local C = ps.C

local check = require "spec.check_lib"
local fails, bytes, run = check.fails, check.bytes, check.run

before_each(function() ps.manual_seed(1) end)

describe("sim", function()
  it("is a device like others, and does not change their numbers", function()
    local names = {}
    for i, device in ipairs(ps.devices()) do names[i] = device.name end
    assert.same({ "cpu", "ref", "meta", "sim" }, names)
    assert.matches("MiB of memory, .* GB/s in, .* GB/s out", ps.device("sim").description)
    fails(function() ps.zeros({ 1 }, { device = "gpu" }) end, "no device called 'gpu'", "cpu, ref, meta, sim")
  end)

  it("has tensors that can be copied to it and back", function()
    for _, dtype in ipairs { "fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint8", "bool" } do
      local t = ps.tensor({ { 1, 0, 1 }, { 0, 1, 1 } }, dtype)
      for _, host in ipairs { "cpu", "ref" } do
        local there = t:to(host):to("sim")
        assert.equal("sim", there:device())
        assert.equal(dtype, there:dtype())
        assert.same({ 2, 3 }, there:shape())
        assert.equal(host, there:to(host):device())
        assert.same(t:tolist(), there:to(host):tolist())
      end
    end
    local x = ps.randn { 7, 5 }
    assert.same(x:t():tolist(), x:t():to("sim"):to("cpu"):tolist())
    assert.same(x:t():tolist(), x:to("sim"):t():to("cpu"):tolist())
    assert.same(x:narrow(1, 1, 3):tolist(), x:to("sim"):narrow(1, 1, 3):to("ref"):tolist())
    local there = x:to("sim")
    assert(ps.same(there, there:to("sim")))
    assert.same({ 0, 2 }, ps.zeros { 0, 2 }:to("sim"):to("cpu"):shape())
    assert.same({ 2 }, ps.zeros({ 2 }, { device = "sim" }):to("meta"):shape())
    fails(function() ps.zeros({ 2 }, { device = "meta" }):to("sim") end, "tensors of device meta have no data")
  end)

  it("takes values from Lua and returns them through copies", function()
    local t = ps.tensor({ { 1, 2 }, { 3, 4.5 } }, { device = "sim" })
    assert.equal("sim", t:device())
    assert.same({ { 1, 2 }, { 3, 4.5 } }, t:tolist())
    assert.equal(10.5, t:sum():item())
    assert.same({ 3, 4.5 }, t[1]:tolist())
    assert.same({ false, true }, ps.tensor({ false, true }, { device = "sim" }):tolist())
    assert.equal(7, ps.tensor(7, { device = "sim", dtype = "int64" }):item())
    local cell = ffi.new("double[1]")
    assert.equal(C.PS_EUNSUP, C.ps_tensor_read_f64(t, 0, 1, cell))
    assert.matches("move the tensor to the cpu first: it is on sim", ffi.string(C.ps_error_message()))
    assert.matches("^tensor %[2, 2%] fp32 sim", tostring(t))
    local w = ps.ones({ 2 }, { device = "sim", requires_grad = true })
    assert.equal(2, (w * w):sum():item())
  end)

  it("draws the cpu's random numbers", function()
    ps.manual_seed(9)
    local a = bytes(ps.randn { 1000 })
    ps.manual_seed(9)
    assert(a == bytes(ps.randn({ 1000 }, { device = "sim" })))
  end)

  it("does not mix with other devices", function()
    local a, b = ps.ones { 3 }, ps.ones({ 3 }, { device = "sim" })
    fails(function() return a + b end, "different devices", "cpu", "sim", ":to(device)")
  end)
end)

describe("an op on sim has the cpu's bits:", function()
  for _, name in ipairs(H.names) do
    if not (H.has_flag(name, "MOVE") or H.has_flag(name, "RANKS")) then
      it(name, function()
        for _, row in ipairs(H.rows_of[name]) do
          local set, dtype = row[2], (row.types or { "fp32" })[1]
          local ins, n = H.make_inputs(set, dtype)
          local want = H.run(name, set, H.copies(ins, n, "cpu"), n, dtype)
          local got = H.run(name, set, H.copies(ins, n, "sim"), n, dtype)
          for i = 1, H.has_flag(name, "INPLACE") and n or #want do
            if want[i] then
              assert.equal("sim", got[i]:device())
              assert(bytes(want[i]) == bytes(got[i]), H.describe_set(name, dtype, set, ins, n, "output " .. i))
            end
          end
        end
      end)
    end
  end

  it("on kernels of the cpu's own", function()
    local cpu, ref, sim = 0, 1, 3
    for code = 0, C.PS_OP_COUNT - 1 do
      local of_cpu = C.ps_op_kernel_device(ps.ctx, cpu, code)
      assert.equal(of_cpu == cpu and sim or of_cpu, C.ps_op_kernel_device(ps.ctx, sim, code))
      assert(of_cpu ~= ref or C.ps_op_kernel_device(ps.ctx, sim, code) == ref)
    end
  end)
end)

--- Trains a small model for a few steps. Returns the losses and the bytes of all parameters.
local function train(device, dtype, recompute)
  ps.manual_seed(4)
  local config = { vocab_size = 64, n_positions = 16, n_layer = 2, n_head = 2, n_embd = 32, resid_pdrop = 0.1 }
  local model = gpt2.new(config, { device = device, dtype = dtype, recompute = recompute })
  local optimizer = ps.optim.AdamW(ps.optim.groups(model, 0.1), { lr = 1e-2, max_norm = 1 })
  local losses, params = {}, {}
  for step = 1, 4 do
    local ids = ps.randint(0, 64, { 3, 17 })
    local x, y = ids:narrow(1, 0, 16):contiguous(), ids:narrow(1, 1, 16):contiguous()
    optimizer:zero_grad()
    local loss = model(x:to(device), y:to(device))
    loss:backward()
    losses[step] = loss:item()
    optimizer:step()
  end
  for name, p in model:named_parameters() do
    assert.equal(device, p:device())
    params[name] = bytes(p:detach())
  end
  return losses, params
end

describe("training on sim has the cpu's losses and parameters, bit for bit", function()
  for _, dtype in ipairs { "fp32", "bf16" } do
    for _, recompute in ipairs { false, true } do
      it(dtype .. (recompute and " with recompute" or ""), function()
        local losses, params = train("cpu", dtype, recompute)
        local on_sim, params_on_sim = train("sim", dtype, recompute)
        assert(losses[1] ~= losses[4])
        assert.same(losses, on_sim)
        for name, want in pairs(params) do assert(params_on_sim[name] == want, name .. " differs") end
      end)
    end
  end
end)

describe("sim's memory", function()
  it("has the size of PS_SIM_MEMORY, and the error of running out of it has the numbers", function()
    local text = run("PS_SIM_MEMORY=8MiB", [[
      local ps = require "ps"
      local on_sim = { device = "sim" }
      print(ps.device("sim").description)
      local a = ps.ones({ 1024, 1024 }, on_sim)
      local ok, err = pcall(ps.ones, { 5 * 256, 1024 }, on_sim)
      print(ok, err.name, err)
      local b = ps.ones({ 1024, 1024 }, on_sim)
      print(a:device(), b:device())
    ]])
    assert.matches("accelerator: 8 MiB of memory, 8 GB/s in, 8 GB/s out, 10 us", text, 1, true)
    assert.matches("false\tENOMEM\tdevice sim: 5.0 MiB wanted, 4.0 of 4.0 MiB held in use: ", text, 1, true)
    assert.matches("sim has 8.0 MiB of memory and 4.0 MiB of it left; use a smaller batch, a smaller model or "
      .. "recompute, or set PS_SIM_MEMORY higher (src/backend/sim/sim.c:", text, 1, true)
    assert.matches("%)\nsim\tsim\n", text)
  end)

  it("and its rates are refused if they are invalid", function()
    assert.matches("PS_SIM_MEMORY is 'plenty'; it must be a number of bytes such as 1000000, 64MiB or 1.5GiB",
      run("PS_SIM_MEMORY=plenty", "require 'ps'"), 1, true)
    assert.matches("PS_SIM_BANDWIDTH is '-3'", run("PS_SIM_BANDWIDTH=-3", "require 'ps'"), 1, true)
    assert.matches("PS_SIM_LATENCY is '1ms'", run("PS_SIM_LATENCY=1ms", "require 'ps'"), 1, true)
  end)

  it("starts no thread until something is copied", function()
    local text = run("", [[
      local ps, lfs = require "ps", require "lfs"
      local function threads()
        local names = {}
        for task in lfs.dir("/proc/self/task") do
          local f = io.open("/proc/self/task/" .. task .. "/comm")
          local name = f and f:read("*l") or ""
          if name:find("^ps%-sim") then names[#names + 1] = name end
          if f then f:close() end
        end
        table.sort(names)
        return table.concat(names, " ")
      end
      local t = ps.zeros({ 3 }, { device = "sim" })
      print("[" .. threads() .. "]")
      t:to("cpu")
      print("[" .. threads() .. "]")
      t:copy_(ps.ones { 3 }:to("sim"))
      print("[" .. threads() .. "]", t:sum():item())
    ]])
    assert.equal("[]\n[ps-sim-out]\n[ps-sim-in ps-sim-out]\t3\n", text)
  end)
end)
