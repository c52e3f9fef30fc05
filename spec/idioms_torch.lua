-- SPDX-License-Identifier: BSD-3-Clause
-- Idioms of PyTorch's tutorials: the step, modes, freezing, clipping, accumulation, rates (idioms_lib.lua).
local ps = require "ps"
local nn, F = ps.nn, ps.F

local BACKWARD = "call model:backward(loss)"

-- Returns an expected error for all layouts, with a different text in a pipeline (default: the error of a call outside
-- of a loop).
local function each_layout(lib, words, pipeline)
  local fails = {}
  for _, layout in ipairs(lib.NAMES) do fails[layout] = words end
  fails.pipeline = pipeline or lib.LOOP.pipeline
  return fails
end

-- -- the step -------------------------------------------------------------------------------------------------------
local function steps(row, lib)
  row("optimizer.zero_grad(); loss = model(x, y); loss.backward(); optimizer.step()", function(e)
    e:make()
    for n = 1, 2 do
      e.optimizer:zero_grad()
      local loss = e.model(e.x, e.y)
      e:holds(loss, n)
      loss:backward()
      e.optimizer:step()
    end
  end, each_layout(lib, BACKWARD))
  row("optimizer.zero_grad(); loss = model(x, y); model.backward(loss); optimizer.step()", function(e)
    e:make()
    for n = 1, 2 do
      e.optimizer:zero_grad()
      local loss = e.model(e.x, e.y)
      e:holds(loss, n)
      e.model:backward(loss)
      e.optimizer:step()
    end
    e:after(2)
  end, lib.LOOP)
  row("for out in model(x, y): loss.backward()  # in a loop over micro-batches", function(e)
    e:make()
    for n = 1, 2 do
      local sum, count = 0, 0
      for out in e.model:micro_batches(e.x, e.y) do
        sum, count = sum + e:loss_of(out.loss), count + 1
        out.loss:backward()
      end
      e:holds(sum / count, n)
      e.optimizer:step()
    end
    e:after(2)
  end)
  row("loss.backward(); optimizer.step(); optimizer.zero_grad()", function(e)
    e:make()
    for n = 1, 3 do
      e:after(n - 1)
      e.optimizer:zero_grad()
    end
  end)
  row("model.zero_grad()", function(e)
    e:make()
    for n = 1, 3 do
      e.model:zero_grad()
      e:after(n - 1)
      e.model:zero_grad()
    end
  end)
  row("optimizer.zero_grad(set_to_none=True)", function(e)
    e:make()
    for n = 1, 2 do
      e.optimizer:zero_grad(true)
      e:after(n - 1)
      e.optimizer:zero_grad { set_to_none = true }
    end
    e:after(2)
  end)
  row("optimizer.zero_grad(set_to_none=False)", function(e)
    e:make()
    e.optimizer:zero_grad { set_to_none = false }
  end, "set_to_none is false")
  row("optimizer.zero_grad() between backward and step: no update", function(e)
    e:make_kept()
    e:pass()
    e.optimizer:zero_grad()
    e:after(0)
    e:after(1)
  end)
  row("loss.backward(retain_graph=True)", function(e)
    e:make()
    local loss = e.model(e.x, e.y)
    loss:backward(nil, true)
  end, each_layout(lib, "backward takes a table of options"))
  row("loss.backward(retain_graph=True), as options", function(e)
    e:make()
    if e.layout == "pipeline" then
      return e:in_loop(function(loss) loss:backward { retain_graph = true } end)
    end
    local loss = e.model(e.x, e.y)
    loss:backward { retain_graph = true }
    e.optimizer:step()
  end, each_layout(lib, BACKWARD, "with retain_graph = true: its backward updates parameters"))
  row("loss.backward(); loss.backward()", function(e)
    e:make()
    if e.layout == "pipeline" then return e:in_loop(function(loss) loss:backward() end, true) end
    local loss = e.model(e.x, e.y)
    e.model:backward(loss)
    e.model:backward(loss)
  end, each_layout(lib, "gradient_accumulation_steps is 1", "a second time: each micro-batch has one"))
  row("optimizer.step(closure)", function(e)
    e:make()
    e.optimizer:step(function() end)
  end, "optimizer:step takes no closure")
  row("optimizer.step() without a backward", function(e)
    e:make()
    e.optimizer:step()
  end, "call model:backward(loss) first")
  row("total += loss.item(); print(f'{loss.item():.3f}')", function(e)
    e:make()
    local loss = e.model(e.x, e.y)
    local total = 0 + loss:item()
    assert(("%.3f"):format(loss:item()):match "^%d%.%d%d%d$" and total > 0)
    e:holds(loss, 1)
    e.model:backward(loss)
    e.optimizer:step()
  end, lib.LOOP)
  row("total += float(loss)", function(e)
    e:make()
    local total = 0 + tonumber(e.model(e.x, e.y))
    return total
  end, each_layout(lib, "arithmetic on a nil value"))
  row("loss.detach()", function(e)
    e:make()
    local loss = e.model(e.x, e.y)
    e:holds(loss:detach(), 1)
    assert(not loss:detach():requires_grad())
    e.model:backward(loss)
    e.optimizer:step()
    e:after(1)
  end, lib.LOOP)
  row("loss.detach().backward()", function(e)
    e:make()
    if e.layout == "pipeline" then return e:in_loop(function(loss) e.model:backward(loss:detach()) end) end
    e.model:backward(e.model(e.x, e.y):detach())
  end, each_layout(lib, "depends on nothing that requires a gradient", "not made from its output"))
  row("loss.cpu().item()", function(e)
    e:make()
    return e.model(e.x, e.y):cpu()
  end, each_layout(lib, 't:to("cpu")'))
  row("logits = model(x); loss = F.cross_entropy(logits, y); loss.backward()", function(e)
    e:make()
    for n = 1, 2 do
      local loss = F.cross_entropy(e.model(e.x), e.y)
      e:holds(loss, n)
      e.model:backward(loss)
      e.optimizer:step()
    end
  end, lib.LOOP)
  row("criterion = nn.CrossEntropyLoss(); criterion(logits, y)", function(e)
    local logits = ps.arange(0, 12):reshape(4, 3) / 4
    local y = ps.tensor({ 0, 2, 1, 1 }, "int64")
    e.near(nn.CrossEntropyLoss()(logits, y):item(), F.cross_entropy(logits, y):item(), "the loss", 1e-6)
  end)
  row("correct = (logits.argmax(-1) == y).float().mean().item()", function(e)
    e:make()
    local got = ps.no_grad(e.model, e.x):argmax(-1):eq(e.y):float():mean()
    local plain = e.model_func()(e.whole_x):argmax(-1):eq(e.whole_y):float():mean():item()
    e.near(e:loss_of(got), plain, "the accuracy")
  end, lib.LOOP)
  row("if torch.isnan(loss).item(): break", function()
    assert(ps.isnan(ps.zeros { 1 }):item() == false and ps.isnan(ps.tensor { 0 / 0 }):item() == true)
  end)
  row("if loss.isnan().any().item(): break", function()
    assert(ps.zeros({ 2 }):isnan():any():item() == false and ps.tensor({ 1, 0 / 0 }):isnan():any():item() == true)
  end)
end

-- -- modes and freezing ---------------------------------------------------------------------------------------------
local function modes(row, lib)
  row("model.train()  # returns the model", function(e)
    e:make()
    e.model = e.model:train()
    e:after(0)
    e:after(1)
  end)
  row("model.eval(); with torch.no_grad(): loss = model(x, y)", function(e)
    e:make()
    e.model:eval()
    e:holds(e:look(), 1)
    e.model:train()
    e:after(0)
    e:holds(e:look(), 2)
  end)
  row("model.eval(); logits = model(x)", function(e)
    e:make()
    e.model:eval()
    local logits = ps.no_grad(e.model, e.x)
    assert(table.concat(logits:shape(), " ") == e.x:size(0) .. " 8 32")
    e:holds(F.cross_entropy(logits, e.y), 1)
  end, lib.LOOP)
  row("model.training", function(e)
    e:make()
    assert(e.model.training == true)
    e.model:eval()
    assert(e.model.training == false)
    e.model:train(true)
    assert(e.model.training == true)
  end)
  row("with torch.inference_mode(): ...", function() ps.inference_mode(function() end) end, "ps.no_grad")
  row("torch.set_grad_enabled(False)", function() ps.set_grad_enabled(false) end, "ps.no_grad")
  row("with torch.no_grad():  # without a function", function() ps.no_grad() end, "function")
  row("with torch.no_grad(): loss = model(x, y); loss.requires_grad", function(e)
    e:make()
    assert(ps.no_grad(e.model, e.x, e.y):requires_grad() == false)
    e:after(0)
  end, lib.LOOP)
  row("dropout: train() drops, eval() does not", function(e)
    local with = { embd_pdrop = 0.5, resid_pdrop = 0.5 }
    e:make(nil, { model_func = function() return e.model_func(with) end })
    e.model:eval()
    e:holds(e:look(), 1)
    e.model:train()
    local loss = e:look()
    assert(math.abs(loss - e.losses[1]) > 1e-4 * loss, "nothing was dropped")
  end)
  row("p.requires_grad = False", function(e)
    e:make()
    e.model:parameters()[1].requires_grad = false
  end, "t:requires_grad_(false)")
  local function freeze(model) model.transformer.h:requires_grad_(false) end
  local function frozen_losses(e)
    return (e.reference(3, { made = freeze }))
  end
  row("for p in model.transformer.h.parameters(): p.requires_grad_(False)  # before the optimizer", function(e)
    local want = frozen_losses(e)
    e:make(nil, { model_func = function()
      local model = e.model_func()
      for _, p in ipairs(model.transformer.h:parameters()) do p:requires_grad_(false) end
      return model
    end })
    for n = 1, 3 do e:after(n - 1, want[n]) end
  end)
  row("model.transformer.h.requires_grad_(False)", function(e)
    local want = frozen_losses(e)
    e:make()
    assert(e.model.transformer.h:requires_grad_(false) == e.model.transformer.h)
    for n = 1, 3 do e:after(n - 1, want[n]) end
  end)
  row("optimizer = SGD(filter(lambda p: p.requires_grad, model.parameters()))", function(e)
    local n = 0
    e:make()
    freeze(e.model)
    for _, p in ipairs(e.model:parameters()) do if p:requires_grad() then n = n + 1 end end
    assert(n == #e.model_func():parameters() - #e.model_func().transformer.h:parameters(), n)
  end)
end

-- -- clipping and gradients -----------------------------------------------------------------------------------------
local function clipping(row)
  local MAX = 0.1
  local function reference(e)
    local norms = {}
    local losses = e.reference(3, { before = function(model, _, step)
      norms[step] = nn.clip_grad_norm(model, MAX)
    end })
    return losses, norms
  end
  row("norm = clip_grad_norm_(model.parameters(), 0.1)  # between backward and step", function(e)
    local want, norms = reference(e)
    e:make_kept()
    for n = 1, 3 do
      e:holds(e:pass(), n, want[n])
      e.near(nn.clip_grad_norm_(e.model:parameters(), MAX), norms[n], "the norm")
      e.optimizer:step()
    end
  end)
  row("clip_grad_norm_(model.parameters(), 0.1)  # where backward updates", function(e)
    local want, norms = reference(e)                -- gradients remain in plain memory and in a pipeline
    e:make { overlap_optimizer = true }
    for n = 1, 2 do
      e:holds(e:pass(), n, want[n])
      e.near(nn.clip_grad_norm_(e.model:parameters(), MAX), norms[n], "the norm")
      e.optimizer:step()
    end
  end, { chunks = "gradient_clipping", zero3 = "gradient_clipping", tensor = "gradient_clipping" })
  row("total_norm = clip_grad_norm_(model.parameters(), inf)", function(e)
    local _, norms = reference(e)
    e:make_kept()
    e:pass()
    e.near(nn.clip_grad_norm(e.model, math.huge), norms[1], "the norm")
    e.optimizer:step()
    e:after(1)
  end)
  row("clip_grad_norm_(model.parameters(), 1.0, norm_type=inf)", function(e)
    e:make_kept()
    e:pass()
    nn.clip_grad_norm_(e.model:parameters(), 1, math.huge)
  end, "it was given inf")
  row("torch.nn.utils.clip_grad_norm_(...)", function(e) nn.utils.clip_grad_norm_(e.model, 1) end, "nn.clip_grad_norm_")
  row("clip_grad_value_(model.parameters(), 1.0)", function(e)          -- clips, or is an error that says what to do
    e:make_kept()
    e:pass()
    local ok, problem = pcall(nn.clip_grad_value_, e.model:parameters(), 1e-4)
    if not ok then
      assert(tostring(problem):find("register a hook on the parameters", 1, true), tostring(problem))
      return
    end
    for _, p in ipairs(e.model:parameters()) do
      local g = p:grad()
      assert(not g or g:abs():amax():item() <= 1.01e-4, "a gradient is above the bound")
    end
  end)
  row("gradient_clipping: 0.1", function(e)
    local want, norms = reference(e)
    e:make { gradient_clipping = MAX }
    for n = 1, 3 do e.near(e:after(n - 1, want[n]).grad_norm, norms[n], "the norm") end
  end)
  row("p.grad is None after zero_grad()", function(e)
    e:make_kept()
    e:pass()
    e.optimizer:zero_grad()
    for name, p in e.model:named_parameters() do assert(p:grad() == nil, name) end
  end)
  row("p.grad = None", function(e)
    e:make()
    e.model:parameters()[1].grad = nil
  end, "optimizer:zero_grad()")
  row("for p in model.parameters(): p.grad.mul_(0.5)", function(e)
    local want = e.reference(2, { before = function(model)
      ps.no_grad(function() for _, p in ipairs(model:parameters()) do p:grad():mul_(0.5) end end)
    end })
    e:make_kept()
    e:holds(e:pass(), 1, want[1])
    ps.no_grad(function()
      for _, p in ipairs(e.model:parameters()) do
        local g = p:grad()
        if g then g:mul_(0.5) end
      end
    end)
    e.optimizer:step()
    e:after(1, want[2])
  end)
  row("with torch.no_grad(): for p in model.parameters(): p.mul_(0.5)", function(e)
    local function halve(model)
      ps.no_grad(function() for _, p in ipairs(model:parameters()) do p:mul_(0.5) end end)
    end
    local want = e.reference(2, { made = halve })
    e:make()
    ps.no_grad(function()
      for _, p in ipairs(e.model:parameters()) do if p:device() ~= "meta" then p:mul_(0.5) end end
    end)
    e:after(0, want[1])
    e:after(1, want[2])
  end)
  row("p.data.mul_(0.5)", function(e)
    e:make()
    return e.model:parameters()[1].data
  end, "t:detach()")
  row("x.register_hook(fn)", function() ps.zeros({ 1 }):register_hook(print) end, "requires no gradient")
  row("model.register_forward_hook(fn)", function(e)
    e:make()
    local calls = 0
    local handle = e.model:register_forward_hook(function() calls = calls + 1 end)
    e:look()
    handle:remove()
    e:look()
    assert(calls == 1, calls)
  end, { pipeline = "a pipeline never calls the whole model" })
  row("module.register_full_backward_hook(fn)", function(e)
    local seen = {}
    e:make(nil, { model_func = function()
      local model = e.model_func()
      model.transformer.h[0].mlp:register_full_backward_hook(function(_, into, out)
        local sum = out[1]:sum():item()                     -- a dry run ends here
        seen[#seen + 1] = { into.n, out.n, sum }
      end)
      return model
    end })
    local micros = 1
    if e.layout == "pipeline" then
      micros = 0
      for out in e.model:micro_batches(e.x, e.y) do
        micros = micros + 1
        e.model:backward(out.loss)
      end
    else
      e:pass()
    end
    e.optimizer:step()
    for _, n in ipairs(seen) do assert(n[1] == 2 and n[2] == 1) end
    assert(#seen == (e.layout == "pipeline" and ps.rank() == 1 and 0 or micros), #seen)
  end)
end

-- -- accumulation ---------------------------------------------------------------------------------------------------
local function accumulation(row, lib)
  local function halves(e, each)
    local rows = e.x:size(0) / 2
    for i = 0, 1 do each(i + 1, e.x:narrow(0, i * rows, rows), e.y:narrow(0, i * rows, rows)) end
  end
  row("loss.backward(); if (i + 1) % n == 0: optimizer.step(); optimizer.zero_grad()", function(e)
    e:make { gradient_accumulation_steps = 2 }
    for n = 1, 2 do
      local sum = 0
      halves(e, function(i, x, y)
        local loss = e.model(x, y)
        sum = sum + e:loss_of(loss) / 2
        e.model:backward(loss)
        if i % 2 == 0 then
          e.optimizer:step()
          e.optimizer:zero_grad()
        end
      end)
      e:holds(sum, n)
    end
  end, lib.LOOP)
  row("optimizer.step() after every micro-batch", function(e)
    e:make { gradient_accumulation_steps = 2 }
    for n = 1, 2 do
      local sum = 0
      halves(e, function(i, x, y)
        local loss = e.model(x, y)
        sum = sum + e:loss_of(loss) / 2
        e.model:backward(loss)
        assert(e.optimizer:step().accumulating == (i == 1))
        e.optimizer:zero_grad()
      end)
      e:holds(sum, n)
    end
  end, lib.LOOP)
  row("loss.backward() twice, one step, without a setting", function(e)
    e:make()
    halves(e, function(_, x, y) e.model:backward(e.model(x, y)) end)
  end, each_layout(lib, "gradient_accumulation_steps"))
  row("clip_grad_norm_ before the last micro-batch", function(e)
    e:make_kept { gradient_accumulation_steps = 2 }
    if e.layout == "pipeline" then
      return e:in_loop(function() nn.clip_grad_norm_(e.model:parameters(), 1) end, true)
    end
    halves(e, function(_, x, y)
      e.model:backward(e.model(x, y))
      nn.clip_grad_norm_(e.model:parameters(), 1)
    end)
  end, each_layout(lib, "after the last backward of the step", "after the loop, before optimizer:step()"))
  row("with model.no_sync(): loss.backward()", function(e)
    e:make()
    e.model:no_sync(function() end)
  end, "gradient_accumulation_steps")
end

-- -- rates ----------------------------------------------------------------------------------------------------------
local function rates(row)
  local function stays(e, set)
    e:make()
    e:after(0)
    set(e.optimizer)
    e:after(1)
    e:after(1)
  end
  row("optimizer.param_groups[0]['lr'] = 0", function(e)
    stays(e, function(optimizer) optimizer.param_groups[1].lr = 0 end)
  end)
  row("for g in optimizer.param_groups: g['lr'] *= 0.1", function(e)
    local want = e.reference(3, { before = function(_, optimizer, step)
      if step == 2 then optimizer:set_lr(0.05) end
    end })
    e:make()
    e:after(0)
    for _, g in ipairs(e.optimizer.param_groups) do g.lr = g.lr * 0.1 end
    e.near(e.optimizer.lr, 0.05)
    e:after(1, want[2])
    e:after(2, want[3])
  end)
  row("optimizer.lr = 0", function(e) stays(e, function(optimizer) optimizer.lr = 0 end) end)
  row("optimizer.set_lr(0)", function(e) stays(e, function(optimizer) optimizer:set_lr(0) end) end)
  row("print(optimizer.param_groups[0]['lr'])", function(e)
    e:make()
    assert(e.optimizer.param_groups[1].lr == 0.5 and e.optimizer.lr == 0.5)
  end)
  row("optimizer.param_groups[1] = {...}; optimizer.param_groups = []", function(e)
    e:make()
    e.optimizer.param_groups = {}
  end, "optimizer.param_groups is the list of groups")
  row("optimizer.add_param_group(...)", function(e)
    e:make()
    e.optimizer:add_param_group { params = {} }
  end, "param_groups = ...")
  row("AdamW([{'params': decay, 'weight_decay': 0.1}, {'params': rest, 'lr': 0}])", function(e)
    local want = e.reference(3, { before = function(model)
      for name, p in model:named_parameters() do if name:find "%.h%." then p:set_grad(nil) end end
    end })
    e:make(nil, { param_groups = { { match = function(name) return name:find "%.h%." ~= nil end, lr = 0 }, {} } })
    assert(#e.optimizer.param_groups == 2 and e.optimizer.param_groups[1].lr == 0)
    for n = 1, 3 do e:after(n - 1, want[n]) end
  end)
  local function linear(step) return 0.5 * math.max(0, 4 - step) / 4 end
  row("optimizer.step(); scheduler.step(); scheduler.get_last_lr()[0]", function(e)
    local want = e.reference(4, { before = function(_, optimizer, step) optimizer:set_lr(linear(step - 1)) end })
    e:make()
    local schedule = ps.sched.warmup_linear { optimizer = e.optimizer, max_lr = 0.5, total = 4 }
    for n = 1, 4 do
      e.near(schedule:get_last_lr()[1], linear(n - 1), "the rate")
      e:after(n - 1, want[n])
      schedule:step()
    end
  end)
  row("scheduler.step() before optimizer.step()", function(e)
    local want = e.reference(2, { before = function(_, optimizer, step) optimizer:set_lr(linear(step)) end })
    e:make_kept()
    local schedule = ps.sched.warmup_linear { optimizer = e.optimizer, max_lr = 0.5, total = 4 }
    e:holds(e:pass(), 1, want[1])
    schedule:step()
    e.optimizer:step()
    e:holds(e:pass(), 2, want[2])
    e.optimizer:step()
  end)
  row("scheduler.step() between backward and step  # where backward updates", function(e)
    e:make { overlap_optimizer = true }
    local schedule = ps.sched.warmup_linear { optimizer = e.optimizer, max_lr = 0.5, total = 4 }
    e:pass()
    schedule:step()
    e.optimizer:step()
    local want = e.reference(2, { before = function(_, optimizer, step) optimizer:set_lr(linear(step)) end })
    e:after(1, want[2])
  end, { chunks = "set_lr", zero3 = "set_lr", tensor = "set_lr" })
  row("scheduler.state_dict(); scheduler.load_state_dict(state)", function(e)
    e:make()
    local first = ps.sched.warmup_linear { optimizer = e.optimizer, max_lr = 0.5, total = 4 }
    first:step()
    local second = ps.sched.warmup_linear { optimizer = e.optimizer, max_lr = 0.5, total = 4 }
    second:load_state_dict(first:state_dict())
    e.near(second:get_last_lr()[1], linear(1), "the rate")
    e.near(e.optimizer.lr, linear(1), "the optimizer's rate")
  end)
  for _, kind in ipairs { { "StepLR", { step_size = 1, gamma = 0.5 } }, { "CosineAnnealingLR", { T_max = 2 } },
    { "LambdaLR", { lr_lambda = function(n) return 0.5 ^ n end } } } do
    local name, options = kind[1], kind[2]
    row(("scheduler = %s(optimizer, ...); scheduler.step()"):format(name), function(e)
      e:make()
      options.optimizer = e.optimizer
      local schedule = ps.sched[name](options)
      e.near(e.optimizer.lr, e.RATE, "the first rate")
      e:after(0)
      schedule:step()
      e.near(e.optimizer.lr, e.RATE / 2, "the second rate")
    end)
  end
  row("scheduler = OneCycleLR(optimizer, max_lr=..., total_steps=4)", function(e)
    e:make()
    local schedule = ps.sched.OneCycleLR(e.optimizer, { max_lr = 0.5, total_steps = 4, cycle_momentum = false })
    e.near(e.optimizer.lr, 0.02, "the first rate")
    e:after(0)
    schedule:step()
    assert(e.optimizer.lr > 0.4)
  end)
  row("scheduler = ReduceLROnPlateau(optimizer); scheduler.step(loss)", function(e)
    e:make()
    local schedule = ps.sched.ReduceLROnPlateau(e.optimizer, { factor = 0.5, patience = 1 })
    e:after(0)
    for _ = 1, 3 do schedule:step(1) end
    e.near(e.optimizer.lr, e.RATE / 2, "the rate after two evaluations that were no better")
  end)
  row("scheduler = MultiplicativeLR(optimizer, ...)", function(e)
    e:make()
    local schedule = ps.sched.MultiplicativeLR(e.optimizer, function() return 0.5 end)
    e:after(0)
    schedule:step()
    e.near(e.optimizer.lr, e.RATE / 2, "the second rate")
  end)
  row("scheduler = ChainedScheduler([LinearLR(optimizer, ...), ExponentialLR(optimizer, ...)])", function(e)
    e:make()
    local schedule = ps.sched.ChainedScheduler { ps.sched.LinearLR(e.optimizer, 0.5, 1, 2),
      ps.sched.ExponentialLR(e.optimizer, 0.5) }
    e.near(e.optimizer.lr, e.RATE / 2, "the first rate")
    e:after(0)
    schedule:step()
    e.near(e.optimizer.lr, e.RATE * 0.75 * 0.5, "the second rate")
  end)
  row("optimizer.param_groups[0][\"lr\"] = ...  # with StepLR", function(e)
    e:make()
    local schedule = ps.sched.StepLR(e.optimizer, 1, 0.5)
    e:after(0)
    e.optimizer.param_groups[1].lr = e.RATE * 4
    schedule:step()
    e.near(e.optimizer.lr, e.RATE * 2, "the second rate")
  end)
  row("scheduler = CyclicLR(optimizer, ...)", function(e)
    e:make()
    ps.sched.CyclicLR(e.optimizer)
  end, "optimizer:set_lr(lr)")
  row("torch.optim.lr_scheduler.StepLR(optimizer, ...)", function() ps.optim.lr_scheduler.StepLR() end,
    "there are ps.sched.")
  row("optimizer = optim.Adagrad(model.parameters())", function(e) ps.optim.Adagrad(e.model) end,
    "ps.optim.Adam, AdamW, SGD, Lion")
  row("optimizer = SGD(model.parameters(), lr=...)  # of an engine's model", function(e)
    e:make()
    local second = ps.optim.SGD(e.model:parameters(), { lr = 0.5 })
    e:pass()
    second:step()
  end, "ps.initialize")
end

return function(rows_of, lib)
  local row = rows_of "PyTorch"
  steps(row, lib)
  modes(row, lib)
  clipping(row)
  accumulation(row, lib)
  rates(row)
end
