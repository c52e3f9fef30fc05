-- SPDX-License-Identifier: BSD-3-Clause
-- Optimizers on fp64 parameters: state and arithmetic are fp64, and so is the saved state.
local ps = require "ps"
local optim = ps.optim

local function parameter(values, dtype) return ps.tensor(values, { dtype = dtype, requires_grad = true }) end

--- Runs backward from sum(w * w / 2), so that the gradient is w.
local function step(optimizer, w)
  optimizer:zero_grad()
  local loss = (w * w):sum() * 0.5
  loss:backward()
  optimizer:step()
end

describe("a step without any gradient", function()
  it("updates nothing, is not counted and does not change the loss scale", function()
    local w = ps.tensor({ 1, 2 }, { requires_grad = true })
    local optimizer = ps.optim.AdamW({ w }, { lr = 0.5, max_norm = 1 })
    local scaler = ps.optim.GradScaler { scale = 8, interval = 1 }
    assert.same({ skipped = true }, optimizer:step { scaler = scaler })
    assert.same({ { 1, 2 }, 0, 8 }, { w:tolist(), optimizer.steps, scaler.scale })
    w:sum():backward()
    assert.is_false(optimizer:step().skipped)
    assert.equal(1, optimizer.steps)
    optimizer:zero_grad()
    assert.is_true(optimizer:step().skipped)
    assert.equal(1, optimizer.steps)
  end)
end)

describe("an fp64 parameter", function()
  local start = { 1 + 2 ^ -40, -0.3, 1e-9 }

  it("is its own master, with fp64 averages and arithmetic", function()
    local w = parameter(start, "fp64")
    local optimizer = optim.AdamW({ w }, { lr = 1e-3, weight_decay = 0.1 })
    local p, m, v = {}, {}, {}
    for i, x in ipairs(start) do p[i], m[i], v[i] = x, 0, 0 end
    for t = 1, 3 do
      step(optimizer, w)
      for i, g in ipairs(p) do
        m[i] = 0.9 * m[i] + 0.1 * g
        v[i] = 0.999 * v[i] + 0.001 * g * g
        local m_hat, v_hat = m[i] / (1 - 0.9 ^ t), v[i] / (1 - 0.999 ^ t)
        p[i] = g - 1e-3 * 0.1 * g - 1e-3 * m_hat / (math.sqrt(v_hat) + 1e-8)
      end
    end
    for i, x in ipairs(w:tolist()) do assert.truthy(math.abs(x - p[i]) <= 1e-14 * math.abs(p[i]), x .. " " .. p[i]) end
    local tensors = optimizer:state_dict().tensors
    assert.is_nil(tensors["0.master"])
    assert.equal("fp64", tensors["0.exp_avg"]:dtype())
    assert.equal("fp64", tensors["0.exp_avg_sq"]:dtype())
  end)

  it("keeps its bits under SGD, together with parameters of other types", function()
    local w, half, plain = parameter(start, "fp64"), parameter({ 2 }, "bf16"), parameter({ 3 }, "fp32")
    local optimizer = optim.SGD({ half, w, plain }, { lr = 0.25, momentum = 0.5 })
    optimizer:zero_grad()
    for _, p in ipairs { half, w, plain } do p:pow(2):sum():mul(0.5):backward() end
    optimizer:step()
    assert.same({ start[1] * 0.75, start[2] - 0.25 * start[2], start[3] * 0.75 }, w:tolist())
    assert.same({ 1.5 }, half:tolist())
    assert.same({ 2.25 }, plain:tolist())
    assert.equal("fp64", optimizer:state_dict().tensors["1.momentum_buffer"]:dtype())
  end)

  it("continues from saved state", function()
    local a, b = parameter(start, "fp64"), parameter(start, "fp64")
    local one, two = optim.Adam { a }, optim.Adam { b }
    step(one, a)
    step(two, b)
    local three = optim.Adam { b }
    three:load_state_dict(two:state_dict())
    step(one, a)
    step(three, b)
    assert.same(a:tolist(), b:tolist())
    local other = parameter(start, "fp32")
    local ok, err = pcall(function() optim.Adam({ other }):load_state_dict(one:state_dict()) end)
    assert.falsy(ok)
    assert.truthy(tostring(err):find("is fp64 [3], but the parameter needs fp32 [3]", 1, true), tostring(err))
  end)

  it("refuses to step if module:to has replaced the parameters", function()
    local model, other = ps.nn.Linear(2, 2), ps.nn.Linear(2, 2)
    local optimizer = optim.SGD(model, { lr = 0.1 })
    local function try()
      model(ps.ones({ 1, 2 }, { dtype = model.weight:dtype() })):sum():backward()
      optimizer:step()
    end
    local weight = model.weight
    model:to("fp32")
    model:to { device = "cpu", dtype = "fp32" }            -- nothing is converted, so the tensors are the same
    assert.is_true(ps.same(weight, model.weight))
    try()
    other:to("bf16")                                       -- does not belong to this optimizer
    try()
    model:to("bf16")
    local ok, err = pcall(try)
    assert.falsy(ok)
    assert.truthy(tostring(err):find("SGD: module:to(...) replaced weight", 1, true), tostring(err))
    optimizer = optim.SGD(model, { lr = 0.1 })
    try()
  end)
end)
