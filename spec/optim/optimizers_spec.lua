-- SPDX-License-Identifier: BSD-3-Clause
-- Every optimizer of ps.optimizers: the same bits in plain memory, in chunks, under budgets and with a disk; masters as
-- remainders; states that are saved and loaded; and requests that are refused before the first step.
local ps = require "ps"
local ffi = require "ffi"
local check = require "spec.check_lib"
local optimizers = require "ps.optimizers"
local nn, ops = ps.nn, ps.ops

local function hash(t)
  local out = ffi.new("uint64_t[2]")
  ps.check(ps.C.ps_tensor_hash(t, out))
  return tostring(out[0]) .. tostring(out[1])
end

local function model_func()
  return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 33))
end

local function config(kind, memory, half, micros)
  local momentum = kind == "RMSprop" and 0.9 or nil
  return { optimizer = { type = kind, params = { lr = 1e-2, weight_decay = 0.1, momentum = momentum } },
    memory = memory, plan_print = false,
    bf16 = half and { enabled = true } or nil, gradient_accumulation_steps = micros, chunk_size = 2048,
    gradient_clipping = micros > 1 and 1 or 0 }
end

local function steps(model, opt, n, half, micros)
  for _ = 1, n do
    for _ = 1, micros do
      local x = ps.randn { 6, 48 }
      model:backward((model(half and x:to "bf16" or x):to "fp32"):pow(2):mean())
    end
    opt:step()
  end
end

-- Returns all values and states as text.
local function all_of(model, opt)
  local out = {}
  for name, t in pairs(model:state_dict()) do out[#out + 1] = name .. hash(t) end
  for number, entry in pairs(opt:state_dict().state) do
    for name, t in pairs(entry) do
      if type(t) ~= "number" then out[#out + 1] = ("%d.%s %s"):format(number, name, hash(t)) end
    end
  end
  table.sort(out)
  return table.concat(out, "\n")
end

local function train(kind, memory, half, micros)
  ps.manual_seed(5)
  local model, opt = ps.initialize { quiet = true, model_func = model_func,
    config = config(kind, memory, half, micros) }
  steps(model, opt, 3, half, micros)
  local text = all_of(model, opt)
  model:close()
  collectgarbage()
  collectgarbage()
  return text
end

local KINDS = optimizers.names

-- Closes the engine, since a test that fails must not leave its engine open.
local function close()
  local state = ps.engine()
  if state then state.model:close() end
end

describe("an optimizer", function()
  local folder = os.tmpname() .. "d"
  setup(function() os.execute("mkdir -p " .. folder) end)
  after_each(close)
  teardown(function() os.execute("rm -rf " .. folder) end)

  for _, kind in ipairs(KINDS) do
    for _, half in ipairs { false, true } do
      it(("%s has the same bits in plain memory, in chunks, under budgets and on disk, %s"):format(kind,
        half and "bf16" or "fp32"), function()
        for micros = 1, 2 do
          local disk = { path = folder, limit = 2 ^ 25 }
          local plain = train(kind, "plain", half, micros)
          assert(plain == train(kind, nil, half, micros), "in chunks")
          for _, host in ipairs { 900000, 700000, 560000 } do
            assert(plain == train(kind, { host = host, disk = disk }, half, micros), "with " .. host .. " bytes")
          end
        end
      end)
    end

    it(kind .. " has the same bits with remainders in chunks, under budgets and on disk", function()
      for micros = 1, 2 do
        local whole = train(kind, { master = "remainder" }, true, micros)
        local small = train(kind, { master = "remainder", host = 560000, disk = { path = folder, limit = 2 ^ 25 } },
          true, micros)
        assert(whole == small)
      end
    end)

    it(kind .. " continues from a saved state bit for bit", function()
      for _, master in ipairs { "full", "remainder" } do
        local function make()
          ps.manual_seed(7)
          return ps.initialize { quiet = true, model_func = model_func,
            config = config(kind, { master = master }, true, 1) }
        end
        local model, opt = make()
        steps(model, opt, 2, true, 1)
        local path = folder .. "/" .. kind .. master
        ps.checkpoints.save(path, { model = model, optimizer = opt, step = 2 })
        ps.manual_seed(8)
        steps(model, opt, 2, true, 1)
        local want = all_of(model, opt)
        model:close()
        model, opt = make()
        ps.checkpoints.load(path, { model = model, optimizer = opt })
        ps.manual_seed(8)
        steps(model, opt, 2, true, 1)
        assert(want == all_of(model, opt), master)
        model:close()
      end
    end)
  end
end)

-- The masters of all parameters together do not fit into the budget.
describe("a model with remainders", function()
  local folder = os.tmpname() .. "d"
  setup(function() os.execute("mkdir -p " .. folder) end)
  after_each(close)
  teardown(function() os.execute("rm -rf " .. folder) end)

  it("is saved under a budget that holds one parameter's master at a time", function()
    local gpt2 = require "models.gpt2"
    local function saved(host, async)
      ps.manual_seed(4)
      local model, opt = ps.initialize { quiet = true, config = { plan_print = false, bf16 = { enabled = true },
          optimizer = { type = "AdamW8bit" }, memory = { host = host, master = "remainder",
            disk = { path = folder, limit = "64MiB" } } },
        model_func = function()
          return gpt2.new { n_layer = 6, n_embd = 256, n_head = 4, n_positions = 16, vocab_size = 512 }
        end }
      local x = ps.zeros({ 1, 8 }, { dtype = "int32" })
      model:backward(model(x, x))
      opt:step()
      model:save_pretrained(folder .. "/saved")
      ps.checkpoints.save(folder .. "/checkpoint.safetensors", { model = model, optimizer = opt,
        async = async, quiet = true })
      ps.checkpoints.wait()
      model:close()
      local list = {}
      for i, name in ipairs { "/saved/model.safetensors", "/checkpoint.safetensors" } do
        list[i] = check.read(folder .. name)
      end
      return list
    end
    local want, got = saved "60MiB", saved "9MiB"
    assert.is_true(#want[1] > 19 * 2 ^ 20 * 0.95)
    assert.is_true(want[1] == got[1])
    assert.is_true(want[2] == got[2])
    -- The copy for saving in the background takes 28.5 MiB, and all masters together 18.9 MiB.
    assert.is_true(want[2] == saved("40MiB", true)[2])
  end)
end)

describe("a remainder", function()
  after_each(close)

  -- Upper halves: zeros, subnormals, the smallest normal, one, the largest, infinities and NaNs, with both signs.
  local HIGHS = { 0x0000, 0x0001, 0x007f, 0x0080, 0x3f80, 0x3fff, 0x7f7e, 0x7f7f, 0x7f80, 0x7fc0, 0x7fff, 0x4049 }

  it("and its weight give every fp32 number back, of all lower halves, rounded half away from zero", function()
    for _, sign in ipairs { 0, 0x8000 } do
      for _, high in ipairs(HIGHS) do
        local n = 65536
        local src, param = ps.empty { n }, ps.empty({ n }, { dtype = "bf16" })
        local low = ps.zeros({ 2 * n }, { dtype = "uint8" })
        local bits = ffi.new("uint32_t[?]", n)
        for lo = 0, n - 1 do bits[lo] = (high + sign) * 65536 + lo end
        ps.check(ps.C.ps_tensor_write(src, bits, 4 * n))
        ops.remainder_split_ { param, low, src }
        local joined = ops.remainder_join(param, low)
        local m, w = ffi.new("uint32_t[?]", n), ffi.new("uint16_t[?]", n)
        ps.check(ps.C.ps_tensor_read(joined, m, 4 * n))
        ps.check(ps.C.ps_tensor_read(param, w, 2 * n))
        local wrong = 0
        for lo = 0, n - 1 do
          local nan = high % 0x8000 > 0x7f80 or high == 0x7f80 and lo > 0
          local up = math.floor((tonumber(bits[lo]) + 0x8000) / 65536) % 65536
          local want, weight = nan and 0x7fc00000 or tonumber(bits[lo]), nan and 0x7fc0 or up
          if tonumber(m[lo]) ~= want or tonumber(w[lo]) ~= weight then wrong = wrong + 1 end
        end
        assert.equal(0, wrong, ("high %04x"):format(high + sign))
      end
    end
  end)

  it("run equals, bit for bit, one with whole masters that are rounded by the same rule", function()
    for _, case in ipairs { { "AdamW", "adam_", 2, { 1, 1e-2, 0.9, 0.999, 1e-8, 0.1 } } } do
      ps.manual_seed(11)
      local model, opt = ps.initialize { quiet = true, model_func = model_func,
        config = config(case[1], { master = "remainder" }, true, 1) }
      ps.manual_seed(11)
      local other = model_func()
      local half, whole, states = {}, {}, {}
      for name, p in other:named_parameters() do
        whole[name] = p:detach():clone()
        half[name] = ps.empty(p:shape(), { dtype = "bf16" })
        ops.remainder_split_ { half[name], ps.zeros({ 2 * p:numel() }, { dtype = "uint8" }), whole[name] }
        states[name] = { ps.zeros(p:shape()), ps.zeros(p:shape()) }
      end
      local function forward(x)
        local h = ps.F.gelu(ps.F.linear(x, half["0.weight"], half["0.bias"]))
        h = ps.F.gelu(ps.F.linear(h, half["2.weight"], half["2.bias"]))
        return ps.F.linear(h, half["4.weight"], half["4.bias"])
      end
      for t = 1, 20 do
        local x = ps.randn({ 6, 48 }):to "bf16"
        model:backward((model(x):to "fp32"):pow(2):mean())
        opt:step()
        for _, p in pairs(half) do p:requires_grad(true) end
        (forward(x):to "fp32"):pow(2):mean():backward()
        for name, p in pairs(half) do
          local grad, low = p:grad(), ps.zeros({ 2 * p:numel() }, { dtype = "uint8" })
          ps.no_grad(function()
            ops.adam_({ whole[name], whole[name], grad, states[name][1], states[name][2] }, 1, 1e-2, 0.9, 0.999, 1e-8,
              0.1, 1, 1 - 0.9 ^ t, 1 - 0.999 ^ t)
            ops.remainder_split_ { p, low, whole[name] }
          end)
          p:set_grad(nil)
        end
      end
      for name, value in pairs(model:state_dict()) do assert.equal(hash(whole[name]), hash(value), name) end
      model:close()
    end
  end)

  it("is zero after its parameter was written from outside, and masters that are loaded are whole", function()
    local model = ps.initialize { quiet = true, model_func = model_func,
      config = config("AdamW", { master = "remainder" }, true, 1) }
    local p
    for name, t in model.module:named_parameters() do if name == "0.weight" then p = t end end
    ps.no_grad(function() p:fill_(1 / 3) end)
    local value = model:state_dict()["0.weight"]
    assert.equal(hash(p:to "fp32"), hash(value))
    local state = {}
    for name, t in pairs(model:state_dict()) do state[name] = t:clone() end
    state["0.weight"] = ps.randn(p:shape())
    model:load_state_dict(state)
    assert.equal(hash(state["0.weight"]), hash(model:state_dict()["0.weight"]))
    model:close()
  end)

  it("takes 2 bytes per parameter: 12 with AdamW inside backward, 16 with accumulation, 14 with clipping", function()
    local function bytes(micros, clipping, kind, master)
      local c = config(kind or "AdamW", { master = master or "remainder" }, true, micros)
      c.gradient_clipping, c.chunk_size = clipping, nil
      local model = ps.initialize { quiet = true, config = c, model_func = function()
        return nn.Sequential(nn.Linear(1024, 2048, { bias = false }), nn.Linear(2048, 1024, { bias = false }))
      end }
      local built = require("ps.nn.handle").of(model).built
      local per = tonumber(built.state_bytes) / built.numel
      model:close()
      return per
    end
    assert.near(12, bytes(1, 0), 0.1)
    assert.near(16, bytes(2, 1), 0.1)
    assert.near(14, bytes(1, 1), 0.1)
    assert.near(14, bytes(1, 1, "AdamW", "auto"), 0.1)
    assert.near(12, bytes(1, 0, "AdamW", "auto"), 0.1)
    assert.near(18, bytes(2, 1, "AdamW", "full"), 0.1)
    assert.near(8.03, bytes(1, 1, "AdamW8bit", "full"), 0.1)
    assert.near(6.03, bytes(1, 0, "AdamW8bit"), 0.1)
    assert.near(8, bytes(1, 0, "Lion"), 0.1)
    assert.near(8, bytes(1, 0, "AdamWBF16"), 0.1)
    assert.near(12, bytes(1, 0, "RMSprop"), 0.1)               -- with momentum
    -- Reads the table in docs/optimizers.md: its rows (micro-batches, clipping, master) and its columns.
    local page = check.read(require("ps.paths").root .. "/docs/optimizers.md")
    local table_of = page:match "(| | AdamW | AdamW8bit | Lion |\n.-)\n\n"
    local HOW = { { "whole masters, one micro%-batch", 1, 1, "full" },
      { "remainders, updates inside backward %(no clipping%)", 1, 0, "remainder" },
      { "remainders, clipping, one micro%-batch", 1, 1, "remainder" },
      { "whole masters, several micro%-batches", 2, 1, "full" },
      { "remainders, several micro%-batches", 2, 1, "remainder" } }
    local _, lines = table_of:gsub("\n", "")
    assert.equal(#HOW + 1, lines)
    for _, how in ipairs(HOW) do
      local cells = { table_of:match("| " .. how[1] .. " | (%S+) | (%S+) | (%S+) |") }
      for i, kind in ipairs { "AdamW", "AdamW8bit", "Lion" } do
        assert.near(tonumber(cells[i]), bytes(how[2], how[3], kind, how[4]), 0.05, kind .. ", " .. how[1])
      end
    end
  end)
end)

describe("what an optimizer cannot do", function()
  after_each(close)

  local function refused(why, kind, memory, groups)
    check.fails(function()
      ps.initialize { quiet = true, model_func = model_func, param_groups = groups, config = config(kind, memory, false,
        1) }
    end, why)
  end

  it("is refused before the first step: Muon and a vector, remainders of fp32, an unknown name", function()
    refused("Muon updates only matrices, but 0.bias is", "Muon", nil, { { optimizer = "Muon" } })
    refused("memory.master is \"remainder\", which is for bf16", "AdamW", { master = "remainder" })
    refused("param_groups[1].optimizer is 'Nadam'", "AdamW", nil, { { optimizer = "Nadam" } })
  end)

  it("is refused when a state of another optimizer is loaded", function()
    local path = os.tmpname() .. "d"
    local model, opt = ps.initialize { quiet = true, model_func = model_func, config = config("Lion", nil, false, 1) }
    steps(model, opt, 1, false, 1)
    ps.checkpoints.save(path, { model = model, optimizer = opt, step = 1 })
    model:close()
    model, opt = ps.initialize { quiet = true, model_func = model_func, config = config("AdamW", nil, false, 1) }
    check.fails(function() ps.checkpoints.load(path, { model = model, optimizer = opt }) end,
      "the saved optimizer is Lion, but this one is AdamW")
    model:close()
    os.execute("rm -rf " .. path)
  end)
end)

describe("a state in PyTorch's form", function()
  -- Settings that only these optimizers have, in groups that otherwise look like AdamW's.
  local OTHERS = { LAMB = { grad_averaging = true }, NAdam = { momentum_decay = 4e-3 },
    AdamWScheduleFree = { weight_lr_power = 2 } }

  it("of LAMB, NAdam or AdamWScheduleFree is refused by each kind of Adam", function()
    for _, kind in ipairs { "Adam", "AdamW", "AdamW8bit", "AdamWBF16" } do
      for other, settings in pairs(OTHERS) do
        local opt = ps.optim[kind](nn.Linear(4, 4))
        local state = opt:torch_state_dict()
        for key, value in pairs(settings) do state.param_groups[1][key] = value end
        state.param_groups[1].lr = 0.5
        local text = ("has %s, so it is %s's"):format(next(settings), other)
        check.fails(function() opt:load_state_dict(state) end, "param_groups[1] of the saved optimizer " .. text)
        assert.equal(1e-3, opt.groups[1].lr)
      end
    end
    local model = nn.Linear(4, 4)
    check.fails(function() ps.optim.AdamW(model):load_state_dict(ps.optim.LAMB(model):torch_state_dict()) end,
      "so it is LAMB's")
  end)
  it("of Muon is refused by SGD, and of RAdam by Adam", function()
    local matrix = nn.Linear(4, 4, { bias = false })
    local muon = ps.optim.Muon(matrix):torch_state_dict()
    check.fails(function() ps.optim.SGD(matrix, { momentum = 0.9 }):load_state_dict(muon) end, "is not SGD's")
    local state = ps.optim.AdamW(matrix):torch_state_dict()
    state.param_groups[1].amsgrad = nil
    check.fails(function() ps.optim.AdamW(matrix):load_state_dict(state) end, "so it is RAdam's")
  end)
  it("of transformers' Adafactor with an average of gradients is refused", function()
    local opt = ps.optim.HuggingFaceAdafactor(nn.Linear(4, 4))
    local state = opt:torch_state_dict()
    opt:load_state_dict(state)
    state.param_groups[1].beta1 = 0.9
    check.fails(function() opt:load_state_dict(state) end, "has beta1, so it keeps an average of gradients")
  end)
end)

describe("a saved state that is damaged", function()
  local function refused(change, why, torch)
    local model = nn.Linear(2, 2)
    local opt = ps.optim.AdamW(model, { lr = 0.5 })
    model(ps.randn { 3, 2 }):sum():backward()
    opt:step()
    local state = torch and opt:torch_state_dict() or opt:state_dict(model)
    change(state, state.values)
    local weight = model.weight:clone()
    opt.groups[1].lr = 0.25
    check.fails(function() opt:load_state_dict(state, model) end, why)
    assert.equal(0.25, opt.groups[1].lr)
    assert.same(weight:tolist(), model.weight:tolist())
  end
  it("is refused, and nothing is loaded", function()
    refused(function(_, v) v.groups = nil end, "has no list of groups")
    refused(function(s) s.tensors = nil end, "load_state_dict: its tensors")
    refused(function(_, v) v.groups[1] = 3 end, "group 1 of the saved optimizer is not a table")
    refused(function(_, v) v.t = nil end, "has no table t")
    refused(function(_, v) v.t.weight = "x" end, "number of updates of parameter weight is x")
    refused(function(_, v) v.t.weight = 1.5 end, "number of updates of parameter weight is 1.5")
    refused(function(_, v) v.steps = nil end, "number of steps is nil")
    refused(function(_, v) v.groups[1].lr = "-1" end, "group 1 of the saved optimizer: lr is -1")
    refused(function(_, v) v.groups[1].kind = "Adam" end, "the saved optimizer is Adam, but this one is AdamW")
    refused(function(s) s.state = nil end, "it has no table state", true)
    refused(function(s) s.param_groups[1] = 1 end, "group 1 of the saved optimizer is not a table", true)
    refused(function(s) s.param_groups[1].lr = "x" end, 'lr is "x", not a number', true)
    refused(function(s) s.param_groups[1].lr = 0 / 0 end, "lr is", true)
    refused(function(s) s.state[0].step = "x" end, "step of parameter weight is x, not a whole number", true)
  end)
  it("is refused if its groups have other optimizers", function()
    local function made(first, second)
      local model = nn.Linear(2, 2)
      return ps.optim.AdamW { { params = { model.weight }, optimizer = first }, { params = { model.bias },
        optimizer = second } }
    end
    local state = made("AdamW", "Adam"):state_dict()
    check.fails(function() made("Adam", "Adam"):load_state_dict(state) end,
      "the saved optimizer is AdamW, but this one is Adam (group 1)")
    made("AdamW", "Adam"):load_state_dict(state)
  end)
end)

describe("groups of parameters", function()
  after_each(close)

  -- Returns an engine's output before its first step, for a model and groups. Its memory can be plain.
  local function told(groups, memory)
    return check.told(ps.initialize, { model_func = model_func, config = config("AdamW", memory, false, 1),
      param_groups = groups })
  end
  local function named(pattern) return function(name) return name:find(pattern) ~= nil end end

  it("that miss a parameter are refused, with its name", function()
    for _, memory in ipairs { "plain", "chunk" } do
      local _, ok, why = told({ { match = named "weight" }, { match = named "^0%.bias" } }, memory)
      assert.False(ok)
      assert.matches("no group of param_groups has 2.bias [96]: every group has a match", tostring(why), 1, true)
      close()
    end
  end)

  it("that share parameters or have none are named before the first step", function()
    for _, memory in ipairs { "plain", "chunk" } do
      local text, ok, model, opt = told({ { match = named "^0%.", lr = 1e-3 }, { match = named "weight", lr = 1e-4 }, {
        match = named "wieght" }, {} }, memory)
      assert.True(ok, tostring(model))
      assert.matches("param_groups: several groups match 1 parameter (0.weight: param_groups[1] and [2]); each is in "
        .. "the first group that matches", text, 1, true)
      assert.matches("param_groups[3] has no parameter: its match returns false", text, 1, true)
      assert.equal(1e-3, opt.groups[1].lr)
      close()
      text, ok = told({ { match = named "^0%.", lr = 1e-3 }, {} }, memory)
      assert.True(ok)
      assert.not_matches("param_groups", text, 1, true)
      close()
    end
  end)

  it("of ps.optim that list a parameter twice are refused", function()
    local model = model_func()
    local all = model:parameters()
    check.fails(function() ps.optim.AdamW { { params = all }, { params = { all[1] }, lr = 1 } } end,
      "AdamW: a parameter is listed twice")
  end)

  it("of Muon for a module are its matrices and the rest, as in an engine; a list with a vector is refused", function()
    local model = model_func()
    local opt = ps.optim.Muon(model, { lr = 0.02 })
    local list = {}
    for i, entry in ipairs(opt.entries) do list[i] = entry.group.kind .. " " .. entry.name end
    assert.same({ "Muon 0.weight", "Muon 2.weight", "Muon 4.weight", "AdamW 0.bias", "AdamW 2.bias", "AdamW 4.bias" },
      list)
    check.fails(function() ps.optim.Muon(model:parameters()) end, "Muon updates only matrices",
      "parameter 2 of group 1 is [96]", "AdamW")
    local matrix = nn.Linear(4, 4, { bias = false })
    assert.equal(1, #ps.optim.Muon(matrix, { lr = 0.02 }).groups)     -- no other parameter
  end)

  it("of an optimizer of ps.optim that an engine takes over keep their own optimizers", function()
    local model = model_func()
    local matrices, rest = {}, {}
    for _, p in ipairs(model:parameters()) do table.insert(p:dim() == 2 and matrices or rest, p) end
    local opt = ps.optim.Muon({ { params = matrices, lr = 0.02, ns_steps = 3 }, { params = rest, optimizer = "AdamW",
      lr = 0.003, betas = { 0.8, 0.9 } } }, { lr = 0.01 })
    local _, own = ps.initialize { model = model, optimizer = opt, quiet = true, config = { plan_print = false } }
    assert.same({ "Muon", 0.02, 3 }, { own.groups[1].kind, own.groups[1].lr, own.groups[1].ns_steps })
    assert.same({ "AdamW", 0.003, { 0.8, 0.9 } }, { own.groups[2].kind, own.groups[2].lr, own.groups[2].betas })
  end)
end)

describe("settings that no optimizer can use", function()
  after_each(close)

  local BAD = {
    { "lr", 0 / 0, "lr is nan; expected a number of at least 0 that fp32 holds" },
    { "lr", -1e-3, "lr is -0.001; expected a number of at least 0 that fp32 holds" },
    { "lr", math.huge, "lr is inf" },
    { "weight_decay", -1, "weight_decay is -1" },
    { "betas", { 1, 0.9 }, "betas" }, { "betas", { 0.9, -0.1 }, "betas" }, { "betas", { 0.9 }, "betas" },
  }

  it("are named before the first step, by ps.optim, by a configuration and by param_groups", function()
    for _, kind in ipairs(KINDS) do
      for _, bad in ipairs(BAD) do
        if optimizers.of(kind).defaults[bad[1]] ~= nil then
          local what = ("%s %s"):format(kind, bad[1])
          local options = { [bad[1]] = bad[2] }
          local function refused(call, ...)
            local ok, why = pcall(...)
            assert.False(ok, what .. call)
            why = type(why) == "table" and why.msg or tostring(why)
            assert.truthy(why:find(bad[1], 1, true), what .. call .. ": " .. why)
          end
          local w = ps.ones { 4, 4 }:requires_grad(true)
          refused(" of ps.optim", ps.optim[kind], { w }, options)
          refused(" of a group", ps.optim[kind], { { params = { w }, [bad[1]] = bad[2] } }, {})
          refused(" of a configuration", ps.initialize, { quiet = true, model_func = model_func,
            config = { optimizer = { type = kind, params = options } } })
          close()
        end
      end
    end
  end)

  it("may be rates of 0, which the first step names", function()
    local w = ps.ones { 4, 4 }:requires_grad(true)
    local function step_of(opt)
      w:set_grad(ps.ones { 4, 4 })
      return check.printed(opt.step, opt)
    end
    local none = ps.optim.Lion({ w }, { lr = 0 })
    assert.equal("psluajit: Lion: the learning rate (lr) is 0, so steps change no parameter until a script or a "
      .. "schedule sets another rate\n", step_of(none))
    assert.equal("", step_of(none))
    local warm = ps.optim.AdamW({ w }, { lr = 1e-3 })
    ps.sched.linear(warm, 2, 9)
    assert.equal(0, warm.lr)
    assert.equal("", step_of(warm))
    local c = config("AdamW", "chunk", false, 1)
    c.optimizer.params.lr = 0
    assert.matches("AdamW: the learning rate (lr) is 0", check.printed(function()
      local model, opt = ps.initialize { model_func = model_func, config = c }
      steps(model, opt, 1, false, 1)
      model:close()
    end), 1, true)
  end)

  it("are refused at the step if a script assigns them", function()
    local w = ps.ones { 4, 4 }:requires_grad(true)
    local opt = ps.optim.AdamW({ w })
    w:set_grad(ps.ones { 4, 4 })
    for _, bad in ipairs(BAD) do
      local was = opt.groups[1][bad[1]]
      opt.groups[1][bad[1]] = bad[2]
      check.fails(function() opt:step() end, bad[1])
      opt.groups[1][bad[1]] = was
    end
    opt:step()
  end)
end)

describe("a parameter without elements", function()
  it("has states of its other dimensions in Adafactor", function()
    for _, case in ipairs { { { 4, 0 }, { 4, 1 }, { 1, 0 } }, { { 0, 3 }, { 0, 1 }, { 1, 3 } } } do
      local p, rows, columns = ps.zeros(case[1]), ps.ones(case[2]), ps.ones(case[3])
      ops.adafactor_({ p, p, p:clone(), rows, columns }, 1, 6, 0.1, -0.8, 1e-7, 1e-3, 1, 0)
      assert.equal(rows:numel() + columns:numel(), (rows:sum() + columns:sum()):item())
    end
  end)
end)
