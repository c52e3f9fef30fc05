-- SPDX-License-Identifier: BSD-3-Clause
-- Budgets that are far too small for a model: the error of ps.initialize has the whole state's bytes, what each tier
-- can hold, and what to change.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local check_lib = require "spec.check_lib"
local shortage = require "ps.engine.plan.shortage"
local readable = require "ps.core.readable"
local nn = ps.nn

local WIDTH, LAYERS = 64, 8

local function model_func()
  local layers = {}
  for i = 1, LAYERS do layers[i] = nn.Linear(WIDTH, WIDTH, { bias = false }) end
  return nn.Sequential(unpack(layers))
end

local function config(memory, more)
  local cfg = { optimizer = { type = "AdamW", params = { lr = 1e-3 } }, memory = memory }
  for key, value in pairs(more or {}) do cfg[key] = value end
  return cfg
end

local function refused(memory, more, func, ...)
  local cfg = config(memory, more)
  return check_lib.fails(function()
    ps.initialize { model_func = func or model_func, config = cfg, quiet = true }
  end, ...)
end

describe("a model far too large for its budgets", function()
  local numel = WIDTH * WIDTH * LAYERS

  before_each(function() ps.collect() end)

  it("is refused with the bytes of its state, those that the tiers can hold, and what to change", function()
    local problem = refused({ host = 20000 }, nil, nil, "the model does not fit", readable.bytes(numel * 16),
      ("%d parameters, 16 bytes"):format(numel), "memory.host 19.5 KiB", "raise memory.host",
      "set memory.disk = { path = FOLDER }", "train in bf16", "smaller model", "wanted on tier host")
    assert.equal("ENOMEM", problem.name)
    assert.is_nil(tostring(problem):find("zero_optimization", 1, true))
    refused({ host = 20000 }, { bf16 = { enabled = true } }, nil, readable.bytes(numel * 14), "14 bytes")
    refused({ host = 20000 }, { bf16 = { enabled = true }, gradient_accumulation_steps = 2 }, nil, "18 bytes")
  end)

  it("does not lead to advice about a budget that is large enough", function()
    local text = check_lib.run("OMP_NUM_THREADS=1", [[
      local ps, ffi = require "ps", require "ffi"
      ffi.cdef "int setrlimit(int, const uint64_t *);"
      local pages = tonumber(io.open("/proc/self/statm"):read("*l"):match "%d+")
      local limit = pages * 4096 + 60 * 2 ^ 20
      ffi.C.setrlimit(9, ffi.new("uint64_t[2]", limit, limit))                -- ulimit -v
      print(pcall(ps.initialize, { quiet = true, model_func = function() return ps.nn.Linear(64, 64) end,
        config = { optimizer = { type = "AdamW", params = { lr = 1e-3 } }, memory = { host = 2 ^ 23 } } }))
    ]])
    check_lib.fails(function() error(text) end, "wanted on tier host, whose budget of 8.0 MiB has room for it",
      "left of its address space (ulimit -v), and 64 MiB have to stay free")
    assert.is_nil(text:find("raise memory.host,", 1, true), text)
  end)

  it("is refused with the numbers of device and host separately", function()
    refused({ device = 20000, host = 24000 }, { device = "sim" }, nil, "the model does not fit",
      readable.bytes(numel * 16), "memory.device 19.5 KiB and memory.host 23.4 KiB",
        "raise memory.device or memory.host")
  end)

  it("with a tensor that fits nowhere is refused with that tensor and the rest", function()
    local problem = refused({ host = 12000, disk = { path = "/tmp", limit = 2 ^ 22 } }, nil, nil,
      "20.0 KiB wanted on tier host", "The model has " .. readable.bytes(numel * 16),
      "memory.host 11.7 KiB and memory.disk.limit 4.0 MiB")
    assert.is_nil(tostring(problem):find("the model does not fit", 1, true))
  end)

  it("is counted if its parameters are frozen", function()
    refused({ host = 20000 }, { bf16 = { enabled = true } }, function()
      local module = model_func()
      for i = 0, LAYERS - 2 do module[i].weight:requires_grad(false) end
      return module
    end, readable.bytes(WIDTH * WIDTH * (14 + 2 * (LAYERS - 1))))
  end)

  it("keeps the original error if it cannot be counted, and errors of other kinds", function()
    local calls = 0
    local problem = refused({ host = 20000 }, nil, function()
      calls = calls + 1
      if calls > 1 then error("once only") end
      return model_func()
    end, "wanted on tier host")
    assert.is_nil(tostring(problem):find("parameters", 1, true))
    local mine = {}
    assert.equal(mine, shortage.explain(mine, { numel = 1, trained = 1 }, {}, 0, 1))
    assert.equal("text", shortage.explain("text", { numel = 1, trained = 1 }, {}, 0, 1))
    check_lib.fails(function()
      ps.initialize { model_func = function() error("mine", 0) end, config = config { host = 20000 }, quiet = true }
    end, "mine")
  end)

  it("counts the bytes that an engine needs, and each process's share if state is sharded", function()
    local cfg = config { host = "100MiB" }
    for _, more in ipairs { {}, { bf16 = { enabled = true } },
      { bf16 = { enabled = true }, gradient_accumulation_steps = 2 } } do
      for key, value in pairs(more) do cfg[key] = value end
      local model = ps.initialize { model_func = model_func, config = cfg, quiet = true }
      local options = require "ps.engine.layout.options"(inner(model))
      local each = shortage.bytes_each(options, 0, 1)
      local taken = inner(model).built.state_bytes
      model:close()
      assert.truthy(taken >= numel * each and taken < numel * each * 1.1, taken .. " " .. numel * each)
    end
    local bf16 = { precision = "bf16", grads = true, grad_dtype = "fp32", state_bytes = 18 }
    assert.same({ 18, 18, 2 + 4 + 3, 2 + 1 + 3, 18 / 4 }, { (shortage.bytes_each(bf16, 0, 1)),
      (shortage.bytes_each(bf16, 0, 4)), (shortage.bytes_each(bf16, 1, 4)), (shortage.bytes_each(bf16, 2, 4)),
      (shortage.bytes_each(bf16, 3, 4)) })
  end)
end)
