-- SPDX-License-Identifier: BSD-3-Clause
-- Updates of optimizers on the device cuda, emulated (spec/cuda_lib.lua): kernels with the cpu's bits at all sizes,
-- types and addresses, and engines that have the same bits wherever their updates run.
local cuda = require "spec.cuda_lib"

--- Runs a script that must print "fine" at its end.
local function runs(script)
  local why = cuda.lacks_kernels()
  if why then return pending(why) end
  local out, code = cuda.child(script .. "\nprint 'fine'")
  assert.truthy(code == 0 and out:find("fine\n", 1, true), out)
end

describe("updates of the device cuda", function()
  it("have the cpu's bits for all types and addresses, and with remainders", function()
    runs [[
      -- Each op with the types of its states, and its attributes.
      local OPS = { adam_ = { { "fp32", "fp32" }, { 1, 1e-2, 0.9, 0.999, 1e-8, 0.1, 0.5, 0.1, 0.3 } },
        sgd_ = { { "fp32" }, { 0.1, 0.9, 0.01, 0.1, 1, 0, 0.5 } },
        lion_ = { { "fp32" }, { 0.5, 3, 1e-2, 0.9, 0.99, 0.1 } },
        rmsprop_ = { { "fp32", "fp32" }, { 0.5, 3, 1e-2, 0.9, 1e-3, 0.1, 0.9 } },
        adam_bf16_ = { { "bf16", "bf16" }, { 0.5, 3, 1e-2, 0.9, 0.99, 1e-8, 0.1, 7 } },
        adam_schedule_free_ = { { "fp32", "fp32" }, { 0.5, 3, 1e-2, 0.9, 0.99, 1e-8, 0.1, 0.2, 0.03 } },
        master_lerp_ = { {}, { 0.7 } },
        lamb_ = { { "fp32", "fp32" }, { 0.5, 3, 1e-2, 0.9, 0.99, 1e-6, 0.1 } },
        adam8bit_ = { { "codes", "scales", "codes", "scales" }, { 0.5, 3, 1e-2, 0.9, 0.99, 1e-8, 0.1 } } }
      local function check(name, master, g_type, numel, off)
        local states, attrs = unpack(OPS[name])
        local function make(dtype, scale)
          return (ps.randn({ numel + 1 }, { device = "cpu" }) * scale):to { dtype = dtype }
        end
        local p_type = master == "remainder" and "bf16" or master
        local all = { make(p_type, 1), make("fp32", 1), make(g_type, 0.1) }
        if master == "remainder" then all[2] = ps.randint(0, 256, { 2 * numel + 1 }, { dtype = "uint8" }) end
        local sizes, blocks = { numel, master == "remainder" and 2 * numel or numel, numel }, math.ceil(numel / 256)
        for i, kind in ipairs(states) do
          sizes[i + 3] = kind == "scales" and blocks or numel
          if kind == "codes" then all[i + 3] = ps.randint(0, 256, { numel + 1 }, { dtype = "uint8" })
          else all[i + 3] = make(kind == "scales" and "fp32" or kind, 0.01):abs() end
        end
        local results = {}
        for _, device in ipairs { "cpu", "cuda" } do
          local there = {}
          for i, t in ipairs(all) do there[i] = t:to(device):clone():narrow(0, off, sizes[i]) end
          if master == "fp32" then there[2] = there[1] end
          ps.ops[name](there, unpack(attrs))
          for i, t in ipairs(there) do there[i] = t:to("cpu"):tolist() end
          results[device] = there
        end
        for i, want in ipairs(results.cpu) do
          for k, value in ipairs(want) do
            assert(value == results.cuda[i][k], ("%s, %s, %s, %d from %d: %d of operand %d is %.9g, not %.9g"):format(
              name, master, g_type, numel, off, k, i, results.cuda[i][k], value))
          end
        end
      end
      -- Adafactor's states are averages of rows and of columns, or of elements.
      local function check_factored(shape, rows, cols, g_type, hugging_face)
        local param, results = ps.randn(shape), {}
        local grad, low = (ps.randn(shape) * 0.1):to(g_type), ps.randint(0, 256, { 2 * param:numel() },
          { dtype = "uint8" })
        local of_rows, of_cols = ps.rand(rows) + 0.1, cols and ps.rand(cols) + 0.1
        for _, device in ipairs { "cpu", "cuda" } do
          for _, half in ipairs { false, true } do
            local p = half and param:to("bf16"):to(device) or param:to(device):clone()
            local all = { p, half and low:to(device):clone() or p, grad:to(device), of_rows:to(device):clone() }
            all[5] = of_cols and of_cols:to(device):clone() or all[2]
            ps.ops.adafactor_(all, 0.5, 3, 1e-2, -0.8, 1e-7, 1e-3, 1, 0.1, hugging_face, 1, 0)
            local seen = {}
            for i, t in ipairs(all) do seen[i] = require("spec.check_lib").bytes(t:to("cpu")) end
            results[#results + 1] = table.concat(seen)
          end
        end
        assert(results[1] == results[3] and results[2] == results[4], "adafactor_ of " .. table.concat(shape, " x "))
      end
      for hugging_face = 0, 1 do
        check_factored({ 300, 280 }, { 300, 1 }, { 1, 280 }, "fp32", hugging_face)
        check_factored({ 3, 5, 70 }, { 3, 5, 1 }, { 3, 1, 70 }, "bf16", hugging_face)
        check_factored({ 700 }, { 700 }, nil, "fp32", hugging_face)
      end
      for name in pairs(OPS) do
        for _, master in ipairs { "fp32", "bf16", "fp16", "remainder" } do
          for _, g_type in ipairs { "fp32", "bf16" } do
            for _, numel in ipairs { 3, 1024, 4611 } do
              for off = 0, 1 do check(name, master, g_type, numel, off) end
            end
          end
        end
      end
    ]]
  end)

  it("of an engine have the same bits on the device, on the host and on both", function()
    runs [[
      local nn, bytes = ps.nn, require("spec.check_lib").bytes
      local inner = require("ps.nn.handle").of
      local function train(kind, memory, rates, micros)
        ps.manual_seed(5)
        local model, opt = ps.initialize { quiet = true,
          model_func = function()
            local layers = {}
            for i = 1, 8 do layers[2 * i - 1], layers[2 * i] = nn.Linear(64, 64), nn.GELU() end
            return nn.Sequential(unpack(layers))
          end,
          config = { device = "cuda", bf16 = { enabled = true }, memory = memory, rates = rates, plan_print = false,
            chunk_size = 4096, gradient_accumulation_steps = micros, gradient_clipping = 1,
            optimizer = { type = kind, params = { lr = 1e-2, weight_decay = 0.1, momentum = kind == "RMSprop" and 0.9
              or nil } }, client = { mem_tracer = { margin_use_ratio = 0.3 } } } }
        for _ = 1, 2 * micros do
          local x = ps.randn({ 6, 64 }, { dtype = "bf16", device = "cuda" })
          model:backward(model(x):float():square():mean())
          opt:step()
        end
        local seen, names, state = {}, {}, model:state_dict()
        for name in pairs(state) do names[#names + 1] = name end
        table.sort(names)
        for _, name in ipairs(names) do seen[#seen + 1] = bytes(state[name]) end
        local split = inner(model).plan and inner(model).plan.adam_split
        local count, units = split and split.count, inner(model).built and inner(model).built.units
        model:close()
        return table.concat(seen), count, units
      end
      local FAST = { up = 1e15, down = 1e15, host_adam = 1e6, device_adam = 1e12, at_once = 1 }
      local SLOW = { up = 1e6, down = 1e6, host_adam = 1e12, device_adam = 1e12, at_once = 1 }
      for _, case in ipairs { { "Lion", "full" }, { "RMSprop", "full" }, { "AdamWBF16", "full" },
                              { "AdamW", "remainder" }, { "AdamW8bit", "remainder" },
                              { "LAMB", "full" }, { "AdamWScheduleFree", "full" }, { "Adafactor", "remainder" } } do
        local kind, master = case[1], case[2]
        local small = { device = 240 * 1024, host = "64MiB", master = master }
        local most, on_device, units = train(kind, small, FAST, 2)
        local least, on_host = train(kind, small, SLOW, 2)
        local all = train(kind, { device = "64MiB", host = "64MiB", master = master }, SLOW, 2)
        local what = ("%s, %s masters: %d and %d of %d units on the device"):format(kind, master, on_device, on_host,
          units)
        assert(on_device > on_host and on_host < units, what)
        assert(most == least and most == all, what)
      end
    ]]
  end)
end)
