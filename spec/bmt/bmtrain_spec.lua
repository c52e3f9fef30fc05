-- SPDX-License-Identifier: BSD-3-Clause
-- require "ps.bmt" in one process: the listings of BMTrain's guide as Lua, training against PyTorch's numbers,
-- schedules against BMTrain's formulas in float64, blocks, loss scales, files, and refused calls.
local ps = require "ps"
local bmt = require "ps.bmt"
local lib = require "spec.check_lib"
local fails = lib.fails
local nn, F = ps.nn, ps.F

before_each(function() bmt.init_distributed { seed = 0, quiet = true, config = { plan_print = false } } end)
after_each(function() bmt.close() end)

local function near(want, got, bound, what)
  local off = math.abs(want - got) / math.max(1e-30, math.abs(want))
  assert(off <= bound, ("%s: %.17g, expected %.17g, off by %.3g"):format(what or "", got, want, off))
end

-- Returns a manager with one optimizer for a model.
local function trains(model, options, more)
  local optimizer = bmt.optim.AdamOptimizer(model:parameters(), options)
  local manager = bmt.optim.OptimManager(more)
  manager:add_optimizer(optimizer)
  return manager, optimizer
end

describe("BMTrain's guide", function()
  local SomeTransformerBlock = nn.class("SomeTransformerBlock", bmt.DistributedModule)
  function SomeTransformerBlock:init()
    self.scale = bmt.DistributedParameter(ps.full({ 1024 }, 2))
    self.shift = bmt.DistributedParameter(ps.full({ 1024 }, -1))
  end
  function SomeTransformerBlock:forward(x, one, two, three)
    assert.same({ 1, 2, 3 }, { one, two, three })
    return x * self.scale + self.shift
  end

  -- Steps 2 and 3 differ from the preceding listing in the lines that a user replaces. model() computes 8 x - 7.
  local function check(model, names)
    assert.same(names, (function()
      local list = {}
      for name in model:named_parameters() do list[#list + 1] = name end
      return list
    end)())
    ps.no_grad(function() model.param:copy_(ps.arange(0, 1024) / 1024) end)
    local manager = trains(model, { lr = 0.5 })
    local y = model()
    assert.equal(8 * 512 / 1024 - 7, y[512]:item())
    manager:zero_grad()
    manager:backward(y:sum())
    manager:step()
    near(256 / 1024 - 0.5, model.param[256]:item(), 1e-6, "Adam's first step is lr")
    near(1.5, model.module_list[1].scale[700]:item(), 1e-6)
  end
  local NAMES = { "param", "module_list.0.scale", "module_list.0.shift", "module_list.1.scale", "module_list.1.shift",
    "module_list.2.scale", "module_list.2.shift" }

  -- Returns the listing of step 2, with the list of modules and the lines that call it, both of which step 3 replaces.
  local function listing(list_of, call)
    local MyModule = nn.class("MyModule", bmt.DistributedModule)
    function MyModule:init()
      self.param = bmt.DistributedParameter(ps.empty { 1024 })
      self.module_list = list_of {
        bmt.CheckpointBlock(SomeTransformerBlock()),
        bmt.CheckpointBlock(SomeTransformerBlock()),
        bmt.CheckpointBlock(SomeTransformerBlock()),
      }
    end
    function MyModule:forward()
      local x = self.param
      x = call(self, x)
      return x
    end
    check(MyModule(), NAMES)
  end

  it("step 2: a DistributedModule with DistributedParameters and CheckpointBlocks", function()
    listing(nn.ModuleList, function(self, x)
      for _, module in self.module_list:each() do
        x = module(x, 1, 2, 3)
      end
      return x
    end)
  end)

  it("step 3: a TransformerBlockList", function()
    listing(bmt.TransformerBlockList, function(self, x)
      return self.module_list(x, 1, 2, 3)
    end)
  end)
end)

describe("training", function()
  local X = ps.tensor { { 1, 2, -1 }, { 0.5, -1, 2 }, { 3, 0.25, 1 }, { -2, 1, 0.5 } }
  local Y = ps.tensor { 1, -2, 0.5, 3 }
  local Fit = nn.class("Fit", bmt.DistributedModule)
  function Fit:init()
    self.w = bmt.DistributedParameter(ps.tensor { 0.5, -0.25, 1 })
    self.v = bmt.DistributedParameter(ps.tensor { 0.125 })
  end
  function Fit:forward(x) return x:matmul(self.w:unsqueeze(-1)):squeeze(-1) + self.v end

  -- Expected loss and norm of each step, and final values, from torch.optim.Adam(lr, betas = (0.8, 0.9), eps = 1e-6,
  -- weight_decay = 0.1) of PyTorch 2.15 in float64, with clip_grad_norm_(2.0) and Noam's rates from start_lr 0.05 and
  -- warmup_iter 3.
  local WANT = { { 10.5751953125, 10.66779353229412 }, { 10.5751953125, 10.66779353229412 },
    { 10.393810056566224, 10.554631489584994 }, { 10.037465090149766, 10.328876130493015 },
    { 9.519044909459437, 9.991865469567895 }, { 9.08573551170941, 9.701940344875414 } }
  local W, V = { 0.3949937929771485, -0.14479038080054024, 0.8949646138988838 }, 0.022284149776164712

  it("has PyTorch's losses, norms and values, also with gradients of parts of the batch", function()
    for _, parts in ipairs { 1, 2 } do
      bmt.close()
      bmt.init_distributed { quiet = true, config = { plan_print = false, gradient_accumulation_steps = parts } }
      local model = Fit()
      local manager, optimizer = bmt.optim.OptimManager(), bmt.optim.AdamOffloadOptimizer(model:parameters(),
        { betas = { 0.8, 0.9 }, eps = 1e-6, weight_decay = 0.1 })
      manager:add_optimizer(optimizer, bmt.lr_scheduler.Noam(optimizer, { start_lr = 0.05, warmup_iter = 3,
        end_iter = 100 }))
      for step, want in ipairs(WANT) do
        manager:zero_grad()
        local sum = 0
        for part = 0, parts - 1 do
          if part == 1 then fails(function() manager:step() end, "1 of the 2 backwards", "gradient_accumulation") end
          local n = 4 / parts
          local d = model(X:narrow(0, part * n, n)) - Y:narrow(0, part * n, n)
          local loss = (d * d):mean() / parts  -- the script accumulates gradients itself, as with BMTrain
          manager:backward(loss)
          sum = sum + bmt.sum_loss(loss):item()
        end
        near(want[1], sum, 1e-6, "loss of step " .. step)
        near(want[2], manager:clip_grad_norm(optimizer.param_groups, 2), 1e-6, "norm of step " .. step)
        manager:step()
      end
      for i, w in ipairs(W) do near(w, model.w[i - 1]:item(), 1e-6, "w" .. i) end
      near(V, model.v[0]:item(), 2e-6, "v")
    end
  end)

  it("names a group that the script removed or replaced after training began", function()
    bmt.close()
    bmt.init_distributed { quiet = true, config = { plan_print = false } }
    local model, manager = Fit(), bmt.optim.OptimManager()
    local optimizer = bmt.optim.AdamOptimizer({ { params = { model.w } }, { params = { model.v } } }, { lr = 0.1 })
    manager:add_optimizer(optimizer)
    local function one()
      manager:zero_grad()
      manager:backward((model(X) - Y):square():mean())
      manager:step()
    end
    one()
    local second = table.remove(optimizer.param_groups)
    fails(one, "bmt.optim, group 2 was removed after the optimizer was made")
    optimizer.param_groups[2] = { params = second.params, lr = 0 }
    fails(one, "bmt.optim, group 2 was replaced after the optimizer was made")
    optimizer.param_groups[2], second.lr = second, 0
    local before = model.v:tolist()
    one()
    assert.same(before, model.v:tolist())
  end)

  it("of half types has decoupled decay, masters, a loss scale, and rates of 0 in its hold_steps", function()
    for _, dtype in ipairs { "bf16", "fp16" } do
      bmt.close()
      bmt.init_distributed { quiet = true, config = { plan_print = false } }
      local Dot = nn.class("Dot", bmt.DistributedModule)
      function Dot:init() self.w = bmt.DistributedParameter(ps.tensor({ 1, -2, 3 }, { dtype = dtype })) end
      function Dot:forward(x) return (self.w * x):sum() end
      local model, g = Dot(), { 0.5, -1.5, 2 }
      local options = { lr = 0.01, betas = { 0.9, 0.95 }, eps = 1e-3, weight_decay = 0.25, hold_steps = 3 }
      local manager, optimizer = trains(model, options,
        { loss_scale = 256, loss_scale_steps = 2, max_loss_scale = 512 })
      local scales, norm = {}, math.sqrt(0.25 + 2.25 + 4)
      for step = 1, 5 do
        manager:backward(model(ps.tensor(g, { dtype = dtype })))
        scales[step] = manager.loss_scale
        near(norm, manager:clip_grad_norm(optimizer.param_groups, 1, { eps = 256 }), 1e-6, "norm")
        manager:step()
        assert.equal(0.01, optimizer.param_groups[1].lr)
      end
      assert.same({ 256, 256, 512, 512, 512 }, scales)
      local path = os.tmpname() .. ".pt"
      bmt.save(model, path)
      local saved = ps.load(path).w
      os.remove(path)
      assert.equal("fp32", saved:dtype())
      for i = 1, 3 do
        local m, v, w = 0, 0, ({ 1, -2, 3 })[i]
        -- The gradients are the same in each step, so a formula gives the values of AdamW (Loshchilov and Hutter). The
        -- eps of clipping is added to the scaled norm.
        for t = 1, 5 do
          local scale, lr = scales[t], t < 3 and 0 or 0.01
          local grad = g[i] / (norm + 256 / scale)
          m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad * grad
          w = w - lr * 0.25 * w - lr * (m / (1 - 0.9 ^ t)) / (math.sqrt(v / (1 - 0.95 ^ t)) + 1e-3)
        end
        near(w, saved[i - 1]:item(), 2e-6, dtype .. " w" .. i)
      end
    end
  end)

  it("skips a step that overflows, lowers the scale, prints it and does not advance the schedule", function()
    local Dot = nn.class("Dot", bmt.DistributedModule)
    function Dot:init() self.w = bmt.DistributedParameter(ps.tensor({ 1, -2 }, { dtype = "fp16" })) end
    function Dot:forward(x) return (self.w * x):sum() end
    local model = Dot()
    local optimizer = bmt.optim.AdamOptimizer(model:parameters())
    local rates = bmt.lr_scheduler.NoDecay(optimizer, { start_lr = 0.5, warmup_iter = 0, end_iter = 9 })
    local manager = bmt.optim.OptimManager { loss_scale = 2 ^ 17, loss_scale_factor = 0.25, min_loss_scale = 2 ^ 14 }
    manager:add_optimizer(optimizer, rates)
    local said = {}
    local print_was = print
    _G.print = function(text) said[#said + 1] = text end
    finally(function() _G.print = print_was end)
    for _ = 1, 3 do
      manager:backward(model(ps.ones({ 2 }, { dtype = "fp16" })))
      manager:step()
    end
    assert.same({ "Gradient overflow, change scale from 131072.000000 to 32768.000000" }, said)
    assert.equal(2, rates.num_iter)
    assert.equal(2 ^ 15, manager.loss_scale)
    assert.same({ 0, -3 }, model.w:tolist())                     -- two steps of 0.5
    local x = ps.full({ 2 }, 3, { dtype = "fp16" })              -- also for clip_grad_norm, which reads the norm first
    manager:backward(model(x))
    assert.equal(math.huge, manager:clip_grad_norm(optimizer.param_groups, 1))
    manager:step()
    assert.equal("Gradient overflow, change scale from 32768.000000 to 8192.000000", said[2])
    manager:backward(model(x))
    near(3 * math.sqrt(2), manager:clip_grad_norm(optimizer.param_groups, 1), 1e-6)
    manager:step()
    assert.equal(2, #said)
  end)

  it("without a loss scale refuses gradients that are not finite, and continues", function()
    local model = Fit()
    local manager, optimizer = trains(model, { lr = 0.5 })
    for _, clips in ipairs { false, true } do
      manager:backward((model(ps.ones { 1, 3 }) * (clips and math.huge or 0 / 0)):sum())
      fails(function()
        if clips then manager:clip_grad_norm(optimizer.param_groups, 1) end
        manager:step()
      end, "the gradient norm is")
    end
    manager:backward(model(ps.ones { 1, 3 }):sum())
    manager:step()
    near(0.125 - 0.5, model.v[0]:item(), 1e-6)
  end)

  it("of several optimizers uses their settings and schedules", function()
    local model = Fit()
    local first = bmt.optim.AdamOptimizer({ model.w }, { lr = 0.5 })
    local second = bmt.optim.AdamOptimizer({ { params = { model.v }, lr = 0.25, weight_decay = 0 } }, { lr = 1 })
    local manager = bmt.optim.OptimManager()
    manager:add_optimizer(first)
    manager:add_optimizer(second, bmt.lr_scheduler.Exponential(second, { start_lr = 0.125, warmup_iter = 0,
      end_iter = 5, gamma = 0.5 }))
    for _ = 1, 2 do
      manager:backward(model(ps.ones { 1, 3 }):sum())
      manager:step()
    end
    near(0.125 - 0.125 - 0.0625, model.v[0]:item(), 1e-5)
    near(-0.25 - 1, model.w[1]:item(), 1e-5)
    manager:backward(model(ps.ones { 1, 3 }):sum())
    near(2, manager:clip_grad_norm({ second.param_groups[1], first.param_groups[1] }, 1), 1e-6)
    fails(function() manager:clip_grad_norm({ first.param_groups[1], second.param_groups[1] }, 1) end, "once per step")
    manager:step()
  end)

  it("clips the groups it is given, each by its own norm", function()
    for _, both in ipairs { false, true } do
      bmt.close()
      bmt.init_distributed { quiet = true, config = { plan_print = false } }
      local model = Fit()
      local first = bmt.optim.AdamOptimizer({ model.v }, { lr = 0.5, eps = 1 })
      local second = bmt.optim.AdamOptimizer({ model.w }, { lr = 0.5, eps = 1 })
      local manager = bmt.optim.OptimManager()
      manager:add_optimizer(first)
      manager:add_optimizer(second)
      for step = 1, 2 do
        manager:backward(model(ps.ones { 1, 3 }):sum())                    -- gradients 1
        near(math.sqrt(3), manager:clip_grad_norm(second.param_groups, step == 1 and 0.5 or 9, { eps = 0 }), 1e-6)
        if both then near(1, manager:clip_grad_norm(first.param_groups, 0.25, { eps = 0 }), 1e-6) end
        fails(function() manager:clip_grad_norm(second.param_groups, 1) end, "once per step", "group 2")
        if step == 1 then
          manager:step()
          local function updated(g) return 0.5 * g / (g + 1) end  -- Returns Adam's first update with eps = 1.
          near(0.5 - updated(0.5 / math.sqrt(3)), model.w[0]:item(), 1e-6, "w")
          near(0.125 - updated(both and 0.25 or 1), model.v[0]:item(), 1e-6, "v")
        end
      end
      fails(function() manager:clip_grad_norm({ {} }, 1) end, "does not belong to this OptimManager's")
      fails(function() manager:clip_grad_norm({}, 1) end, "list of groups")
      local group = first.param_groups[1]
      fails(function() manager:clip_grad_norm({ group, group }, 1) end, "in the list twice")
    end
  end)

  it("divides gradients by grad_scale", function()
    local model = Fit()
    local manager, optimizer = trains(model, nil, { grad_scale = 4 })
    manager:backward(model(ps.ones { 1, 3 }):sum())
    near(0.5, manager:clip_grad_norm(optimizer.param_groups, 9), 1e-6)
  end)

  it("continues after an abandoned step and after evaluations", function()
    local model = Fit()
    local manager, optimizer = trains(model, { lr = 0.5 })
    assert.equal("AdamOptimizer\n  group 1: 2 parameters, lr 0.5, betas 0.9 0.999, eps 1e-08, weight_decay 0",
      tostring(optimizer))
    assert.equal("OptimManager of 1 optimizers, loss scale 1", tostring(manager))
    manager:backward(model(ps.ones { 1, 3 }):sum())
    fails(function() model(ps.ones { 1, 3 }) end, "called again before OptimManager:step()", "1 of 1 backwards",
      "gradient_accumulation_steps")
    manager:zero_grad()
    model(ps.ones { 1, 3 })
    assert.equal(1.375, ps.no_grad(model, ps.ones { 1, 3 }):item())
    model:eval()
    assert.equal(1.375, model(ps.ones { 1, 3 }):item())
    model:train()
    manager:backward(model(ps.ones { 1, 3 }):sum())
    manager:step()
    near(0.125 - 0.5, model.v[0]:item(), 1e-6)
  end)
end)

describe("schedules", function()
  -- Expected rates for L = 0.01, w = 7, e = 40 at these iterations, computed with Python's floats by the formulas in
  -- BMTrain's files.
  local AT = { 0, 1, 6, 7, 8, 23, 40, 41 }
  local WANT = {
    NoDecay = { 0, 0.0014285714285714286, 0.008571428571428572, 0.01, 0.01, 0.01, 0.01, 0.01 },
    Noam = { 0, 0.0005399492471560389, 0.0032396954829362334, 0.003779644730092272, 0.0035355339059327372,
      0.002085144140570748, 0.0015811388300841897, 0.0015617376188860608 },
    Linear = { 0, 0.0014285714285714286, 0.008571428571428572, 0.01, 0.009696969696969697, 0.005151515151515152, 0, 0 },
    Cosine = { 0, 0.0014285714285714286, 0.008571428571428572, 0.01, 0.009977359612865423, 0.005237909579118713, 0,
      2.2640387134577058e-05 },
    Exponential = { 0, 0.0014285714285714286, 0.008571428571428572, 0.01, 0.0095, 0.0044012666865176535,
      0.0018402591023557583, 0.0017482461472379703 },
  }
  for name, want in pairs(WANT) do
    it(name .. " has BMTrain's rates", function()
      local optimizer = { param_groups = { {}, {} } }
      local options = { start_lr = 0.01, warmup_iter = 7, end_iter = 40 }
      local rates = bmt.lr_scheduler[name](optimizer, options)
      for i, n in ipairs(AT) do
        while rates.num_iter < n do rates:step() end
        if want[i] == 0 then assert.equal(0, rates.current_lr) else near(want[i], rates.current_lr, 1e-14, name) end
        assert.same({ rates.current_lr, rates.current_lr }, { optimizer.param_groups[1].lr,
          optimizer.param_groups[2].lr })
      end
      options.num_iter = 23
      local other = bmt.lr_scheduler[name](optimizer, options)
      near(want[6], other.current_lr, 1e-14)
      other:load_state_dict(rates:state_dict())
      assert.equal(41, other.num_iter)
      assert.equal(rates.current_lr, other.current_lr)
    end)
  end

  it("without a rate for an iteration raise an error, where BMTrain divides by 0", function()
    local optimizer = { param_groups = { { lr = 1 } } }
    fails(function() bmt.lr_scheduler.Noam(optimizer, { start_lr = 0.01, warmup_iter = 0, end_iter = 40 }) end,
      "bmt.lr_scheduler.Noam: the rate of iteration 0 is inf, with warmup_iter = 0 and end_iter = 40")
    local rates = bmt.lr_scheduler.Linear(optimizer, { start_lr = 0.01, warmup_iter = 1, end_iter = 1 })
    fails(function() rates:step() end, "bmt.lr_scheduler.Linear: the rate of iteration 1 is", "end_iter = 1")
    assert.equal(0, optimizer.param_groups[1].lr)
  end)
end)

describe("blocks", function()
  local Pair = nn.class("Pair", bmt.DistributedModule)
  function Pair:init(k) self.w = bmt.DistributedParameter(ps.full({ 2 }, k)) end
  function Pair:forward(x, y, mask, word)
    assert(word == nil or word == "word")
    return x * self.w, mask and y + self.w * mask or y
  end

  it("pass num_hidden tensors from one to the next, and return the inputs of each", function()
    local list = bmt.TransformerBlockList({ Pair(2), Pair(3) }, { num_hidden = 2 })
    local x, y, mask = ps.tensor { 1, 10 }, ps.tensor { 0, 1 }, ps.tensor { 1, 0 }
    local a, b, c = list(x, y, mask, "word")
    assert.same({ { 6, 60 }, { 5, 1 } }, { a:tolist(), b:tolist() })
    assert.is_nil(c)
    local first, second, xs, ys = list(x, y, mask, "word", { return_hidden_states = true })
    assert.same({ { 6, 60 }, { 5, 1 } }, { first:tolist(), second:tolist() })
    assert.same({ { { 1, 10 }, { 2, 20 } }, { { 0, 1 }, { 2, 1 } } }, { xs:tolist(), ys:tolist() })
    assert.equal(2, list:size())
    assert.equal(3, list[1].w[0]:item())
    fails(function() list(x) end, "num_hidden = 2", "1 arguments")
    fails(function() bmt.TransformerBlockList {} end, "at least one block")
    fails(function() list(x, y, { return_hidden_states = true, batch = 1 }) end, "batch")
  end)

  it("are those of PipelineTransformerBlockList if there is one stage", function()
    local list = bmt.PipelineTransformerBlockList { nn.Sequential(nn.Tanh()), nn.Sequential(nn.Tanh()) }
    local x = ps.tensor { 1, 10 }
    local y, hidden = list(x, { return_hidden_states = true, batch_related = { 1 } })
    assert.same({ x:tanh():tanh():tolist(), { { 1, 10 }, x:tanh():tolist() } }, { y:tolist(), hidden:tolist() })
    assert.same(y:tolist(), list(x, { batch_related = {} }):tolist())
  end)

  it("recompute their activations if requested, with the same gradients", function()
    local runs, values = 0, {}
    local Counted = nn.class("Counted", bmt.DistributedModule)
    function Counted:init() self.w = bmt.DistributedParameter(ps.tensor { 2, -1 }) end
    function Counted:forward(x)
      runs = runs + 1
      return F.gelu(x * self.w) * self.w
    end
    local Net = nn.class("Net", bmt.DistributedModule)
    function Net:init(again)
      self.a = bmt.DistributedParameter(ps.tensor { 0.5, 0.75 })
      self.block = bmt.Block(Counted(), { use_checkpoint = again })
    end
    function Net:forward() return self.block(self.a):sum() end
    for i, again in ipairs { false, true } do
      bmt.close()
      bmt.init_distributed { quiet = true, config = { plan_print = false } }
      local model = Net(again)
      local manager, optimizer = trains(model)
      manager:backward(model())
      runs = 0
      manager:step()
      manager:backward(model())
      assert.equal(again and 2 or 1, runs)
      values[i] = manager:clip_grad_norm(optimizer.param_groups, 1)
    end
    assert.equal(values[1], values[2])
  end)

  it("fill parameters by init_method, and list them by group", function()
    local Net = nn.class("Net", bmt.DistributedModule)
    function Net:init()
      self.block = bmt.CheckpointBlock(nn.Linear(2, 2))          -- its parameters were not created by bmt
      self.a = bmt.DistributedParameter(ps.zeros { 3 }, { group = "delta", requires_grad = false,
        init_method = bmt.ParameterInitializer(nn.init.uniform_, 4, 5) })
    end
    local model = Net()
    bmt.init_parameters(model)
    for _, v in ipairs(model.a:tolist()) do assert(v >= 4 and v < 5) end
    assert.is_false(model.a:needs_grad())
    local seen = {}
    for group, params in bmt.grouped_parameters(model) do
      seen[#seen + 1] = ("%s %d"):format(tostring(group), #params)
    end
    assert.same({ "false 2", "delta 1" }, seen)
  end)
end)

describe("FusedCrossEntropy", function()
  -- Expected values from torch.nn.functional.cross_entropy of PyTorch 2.15 in float64.
  local LOGITS = ps.tensor { { 1, -2, 0.5, 3 }, { 0.25, 0, -1, 2 }, { 2, 2.5, -0.5, 1 }, { 0, 0, 1, -1 } }
  local TARGET = ps.tensor({ 2, -100, 1, 3 }, { dtype = "int64" })
  local WEIGHT = ps.tensor { 1, 2, 0.5, 4 }

  it("has PyTorch's values", function()
    local function value(options, target)
      return bmt.loss.FusedCrossEntropy(options)(LOGITS, target or TARGET):item()
    end
    near(1.9865849599841, value(), 1e-6)
    near(5.9597548799523, value { reduction = "sum" }, 1e-6)
    near(2.018334821301302, value { weight = WEIGHT }, 1e-6)
    near(13.119176338458463, value { weight = WEIGHT, reduction = "sum" }, 1e-6)
    near(2.4618165484089576, value({ ignore_index = 1 }, ps.tensor({ 2, 0, 1, 3 }, { dtype = "int64" })), 1e-6)
    local none = bmt.loss.FusedCrossEntropy { reduction = "none" }(LOGITS:to "bf16", TARGET)
    assert.equal("fp32", none:dtype())                           -- these logits are exact in bf16
    for i, want in ipairs { 2.7022534476793516, 0, 0.6309780572365026, 2.6265233750364456 } do
      assert(math.abs(none[i - 1]:item() - want) < 1e-6)
    end
    fails(function() bmt.loss.FusedCrossEntropy { parallel = true, label_smoothing = 0.1 } end, "label_smoothing")
  end)
end)

describe("files", function()
  local Net = nn.class("Net", bmt.DistributedModule)
  function Net:init(dtype)
    self.blocks = bmt.TransformerBlockList { nn.Linear(4, 4, { dtype = dtype }), nn.Linear(4, 4, { dtype = dtype }) }
    self.head = bmt.DistributedParameter(ps.randn({ 4 }, { dtype = dtype }))
  end
  function Net:forward(x) return F.gelu(self.blocks(x)) * self.head end

  local function begin(dtype, seed)
    bmt.close()
    bmt.init_distributed { seed = seed, quiet = true, config = { plan_print = false } }
    local model = Net(dtype)
    local optimizer = bmt.optim.AdamOptimizer(model:parameters(), { weight_decay = 0.1 })
    local manager = bmt.optim.OptimManager { loss_scale = 64, loss_scale_steps = 2 }
    manager:add_optimizer(optimizer, bmt.lr_scheduler.Cosine(optimizer, { start_lr = 0.1, warmup_iter = 2,
      end_iter = 9 }))
    return model, manager
  end

  local function go_on(model, manager, first, last)
    for step = first, last do
      local x = (ps.arange(0, 8) * step / 8):reshape(2, 4):to(model.head:dtype())
      manager:zero_grad()
      manager:backward(model(x):mean())
      manager:step()
    end
  end

  for _, name in ipairs { "model.pt", "model.safetensors" } do
    it("continue a run bit for bit: " .. name, function()
      local folder = os.tmpname()
      os.remove(folder)
      local weights, state = folder .. name, folder .. "state.pt"
      finally(function()
        os.remove(weights)
        os.remove(state)
      end)
      for _, dtype in ipairs { "fp32", "bf16" } do
        local model, manager = begin(dtype, 1)
        go_on(model, manager, 1, 3)
        bmt.save(model, weights)
        ps.save(manager:state_dict(), state)
        local names = {}
        for key in pairs(ps.load(weights)) do names[#names + 1] = key end
        table.sort(names)
        assert.same({ "blocks.0.bias", "blocks.0.weight", "blocks.1.bias", "blocks.1.weight", "head" }, names)
        go_on(model, manager, 4, 6)
        bmt.save(model, weights .. ".end.pt")
        local want = ps.load(weights .. ".end.pt")
        os.remove(weights .. ".end.pt")
        for _, late in ipairs { false, true } do               -- loaded before or after the model's first call
          local other, its = begin(dtype, 2)
          if late then go_on(other, its, 1, 1) else other:eval() end
          bmt.load(other, weights)
          assert.equal(late, other.training)
          other:train()
          its:load_state_dict(ps.load(state))
          go_on(other, its, 4, 6)
          bmt.save(other, weights .. ".end.pt")
          for key, value in pairs(ps.load(weights .. ".end.pt")) do
            assert(lib.bytes(value) == lib.bytes(want[key]), key .. (late and " late" or ""))
          end
          os.remove(weights .. ".end.pt")
          assert.equal(manager.loss_scale, its.loss_scale)
        end
      end
    end)
  end

  it("can also be saved by ps.checkpoints, with model and optimizer of ps.engine()", function()
    local model, manager = begin("bf16", 1)
    go_on(model, manager, 1, 2)
    local path = os.tmpname()
    os.remove(path)
    finally(function() os.execute(("rm -r '%s'"):format(path)) end)
    local function parts() return { model = ps.engine().model, optimizer = ps.engine().optimizer, step = 2 } end
    ps.checkpoints.save(path, parts())
    go_on(model, manager, 3, 4)
    local want = model.head:tolist()
    local other, its = begin("bf16", 2)
    go_on(other, its, 1, 2)
    ps.checkpoints.load(path, parts())
    go_on(other, its, 3, 4)
    assert.same(want, other.head:tolist())
    fails(function() manager:state_dict(true) end, "gather_opt", "ps.checkpoints")
  end)

  it("are refused if they do not fit or have no format", function()
    local model = begin "fp32"
    fails(function() bmt.save(model, "model") end, ".safetensors")
    fails(function() bmt.save({}, "model.pt") end, "not a model")
    fails(function() bmt.save(model, "model.pt", { non_blocking = true }) end, "non_blocking", "async = true")
    fails(function() bmt.sum_loss(ps.ones {}, "tp") end, "comm")
    local path = os.tmpname() .. ".pt"
    finally(function() os.remove(path) end)
    ps.save({ head = ps.ones { 4 } }, path)
    fails(function() bmt.load(model, path) end, "4 missing")
    assert.equal(4, #bmt.load(model, path, { strict = false }).missing)
    assert.same({ 1, 1, 1, 1 }, model.head:tolist())
  end)
end)

describe("inspecting", function()
  it("has the values of the model in training, and recorded tensors", function()
    local Net = nn.class("Net", bmt.DistributedModule)
    function Net:init() self.w = bmt.DistributedParameter(ps.tensor { 1, 3 }) end
    function Net:forward(x) return bmt.inspect.record_tensor(self.w * x, "product"):sum() end
    local model = Net()
    local manager = trains(model, { lr = 1 })
    local inspector = bmt.inspect.inspect_tensor(function()
      manager:backward(model(ps.tensor { 2, 2 }))
    end)
    assert.equal(4, inspector:get_summary()[1].mean)
    assert.equal(2, bmt.inspect.inspect_model(model, "*")[1].grad_mean)
    manager:step()
    local row = bmt.inspect.inspect_model(model, "w", "m.")[1]
    assert.equal("m.w", row.name)
    near(1, row.mean, 1e-6)
    assert.truthy(bmt.inspect.format_summary({ row }):find("m.w", 1, true))
  end)
end)

describe("helpers", function()
  it("print and average like BMTrain's", function()
    local recorder = bmt.utils.AverageRecorder()
    assert.equal(0, recorder.value)
    for _, v in ipairs { 1, 2, 4 } do recorder:record(v) end
    near((0.1 * 0.81 + 0.2 * 0.9 + 0.4) / (1 - 0.729), recorder.value, 1e-14)
    fails(function() bmt.utils.AverageRecorder(1) end, "alpha is 1")
    local said, print_was = {}, print
    _G.print = function(...) said[#said + 1] = table.concat({ ... }, " ") end
    finally(function() _G.print = print_was end)
    bmt.print_dict("Sizes", { rank = 0, world_size = 4, [10] = "ten" })
    bmt.see_memory("before")
    bmt.print_rank("a", 1, { rank = 0 })
    bmt.print_rank("b", { rank = 1 })
    _G.print = print_was
    assert.same({ ("="):rep(26) .. " Sizes " .. ("="):rep(27),
      "10 :         ten\nrank :       0\nworld_size : 4" }, { said[1], said[2] })
    assert.truthy(said[3]:find("^before\n.*cpu"), said[3])
    assert.same({ "a 1" }, { said[4], said[5] })
  end)
end)

describe("on a device", function()
  it("AdamOffloadOptimizer keeps state and updates on the host; AdamOptimizer uses the room on the device", function()
    local counts = {}
    for _, name in ipairs { "AdamOptimizer", "AdamOffloadOptimizer" } do
      bmt.close()
      bmt.init_distributed { quiet = true, config = { plan_print = false, device = "sim",
        memory = { device = "4MiB" } } }
      local Net = nn.class("Net", bmt.DistributedModule)
      function Net:init() self.fc = bmt.CheckpointBlock(nn.Linear(64, 64)) end
      function Net:forward(x) return self.fc(x) end
      local model, manager = Net(), bmt.optim.OptimManager()
      manager:add_optimizer(bmt.optim[name](model:parameters()))
      manager:backward(model(ps.ones { 2, 64 }):sum())
      manager:step()
      assert.equal("sim", model.fc.weight:device())
      counts[name] = require("ps.nn.handle").of(ps.engine().model).plan.adam_split.count
    end
    assert.same({ AdamOptimizer = 1, AdamOffloadOptimizer = 0 }, counts)
  end)
end)

describe("what is refused", function()
  it("names the replacement", function()
    for _, name in ipairs { "BMTrainModelWrapper", "wait_loader", "benchmark", "distributed" } do
      fails(function() return bmt[name] end, "bmt." .. name, "not in ps.bmt")
    end
    assert.is_nil(bmt.something)
    local p = bmt.DistributedParameter(ps.ones { 2 })
    local optimizer = bmt.optim.AdamOptimizer { p }
    for _, method in ipairs { "step", "zero_grad", "state_dict" } do
      fails(function() optimizer[method](optimizer) end, "OptimManager")
    end
    for _, method in ipairs { "get_avg_delta", "get_var_delta" } do
      fails(function() optimizer[method](optimizer) end, method, "record_delta", "inspect_model")
    end
    fails(function() bmt.optim.AdamOffloadOptimizer({ p }, { record_delta = true }) end, "record_delta")
    fails(function() bmt.optim.AdamOptimizer({ p }, { amsgrad = true }) end, "amsgrad")
    fails(function() bmt.optim.AdamOptimizer({ p }, { lr = -1 }) end, "lr")
    fails(function() bmt.optim.OptimManager { loss_scale = 0 } end, "loss_scale is 0")
    fails(function() bmt.optim.OptimManager():add_optimizer {} end, "bmt.optim")
    fails(function() bmt.optim.OptimManager():backward(ps.ones {}) end, "no model trains yet", "DistributedModule")
    fails(function() bmt.DistributedParameter(ps.ones({ 2 }, { dtype = "bf16" })) end, "bf16", "fp32", "one dtype")
    fails(function() bmt.DistributedParameter(ps.ones { 2 }, { tp_split_dim = 0 }) end, "tp_mode = true")
    fails(function() bmt.DistributedParameter(ps.ones { 2 }, { tp_mode = true, group = "a" }) end, "tp_mode", "group")
    fails(function() bmt.nn.ColumnParallelLinear(2, 2, { async_gather_chunks = 9 }) end, "async_gather_chunks is 9",
      "1 to 8")
    fails(function() bmt.nn.RowParallelLinear(2, 2, { async_chunks = 0 }) end, "async_chunks is 0")
    fails(function() bmt.CheckpointBlock(nn.Linear(2, 2), { zero_level = 1 }) end, "zero_level is 1",
      "zero_level) is 3")
    fails(function() bmt.CheckpointBlock(p) end, "takes a module")
    fails(function() bmt.init_distributed() end, "already called", "bmt.close()")
  end)

  it("refuses unsupported options of init_distributed, and calls before it", function()
    bmt.close()
    fails(function() bmt.DistributedParameter(ps.ones { 2 }) end, "bmt.init_distributed")
    fails(function() bmt.CheckpointBlock(nn.Linear(2, 2)) end, "bmt.init_distributed")
    fails(function() bmt.init_distributed { tp_size = 2 } end, "tp_size = 2", "it is 1")
    fails(function() bmt.init_distributed { tp_size = 2, config = { tensor_parallel = { size = 1 } } } end, "keep one")
    fails(function() bmt.init_distributed { pipe_size = 2 } end, "pipe_size = 2", "it is 1")
    fails(function() bmt.init_distributed { num_micro_batches = 0 } end, "num_micro_batches")
    fails(function() bmt.init_distributed { config = { pipeline = { stages = 2 } } } end, "pipe_size")
    fails(function() bmt.init_distributed { config = { pipeline = { schedule = "1f1b" } } } end, "1f1b", "only gpipe")
    fails(function() bmt.init_distributed { zero_level = 4 } end, "zero_level is 4")
    fails(function() bmt.init_distributed { loss_scale_factor = 2 } end, "loss_scale_factor")
    fails(function() bmt.init_distributed { config = { bf16 = { enabled = true } } } end, "bf16", "parameters' type")
    fails(function() bmt.init_distributed { config = { memory = "plain" } } end, "plain")
    fails(function() bmt.init_distributed { zero_level = 2, config = { zero_optimization = { stage = 1 } } } end,
      "keep one")
    bmt.init_distributed { pipe_size = -1, num_micro_batches = 4, quiet = true, init_method = "env://" }
    assert.equal(1, bmt.config.world_size)
    assert.is_true(bmt.config.initialized)
  end)

  it("refuses a parameter that is made too late, and an optimizer that lacks one", function()
    local Net = nn.class("Net", bmt.DistributedModule)
    function Net:init()
      self.a, self.b = bmt.DistributedParameter(ps.ones { 2 }), bmt.DistributedParameter(ps.ones {})
    end
    function Net:forward() return (self.a * self.b):sum() end
    local model = Net()
    local manager = bmt.optim.OptimManager()
    manager:add_optimizer(bmt.optim.AdamOptimizer { model.a })
    fails(function() model() end, "does not have b of the model")
    manager:add_optimizer(bmt.optim.AdamOptimizer { model.b })
    manager:backward(model())
    fails(function() bmt.DistributedParameter(ps.ones { 2 }) end, "has begun to train")
    fails(function() manager:add_optimizer(bmt.optim.AdamOptimizer { model.b }) end, "has begun to train")
  end)
end)
