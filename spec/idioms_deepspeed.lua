-- SPDX-License-Identifier: BSD-3-Clause
-- Idioms of DeepSpeed's getting-started guide and PatrickStar's (idioms_lib.lua).
local ps = require "ps"

local function deepspeed(row, lib)
  row("loss = engine(x, y); engine.backward(loss)", function(e)
    e:make()
    for n = 1, 2 do
      local loss = e.model(e.x, e.y)
      e:holds(loss, n)
      e.model:backward(loss)
      e.optimizer:step()
    end
  end, lib.LOOP)
  row("engine.step()", function(e)
    e:make()
    e:pass()
    e.model:step()
  end, "optimizer:step()")
  -- Methods of DeepSpeed's engine, and the name in the error.
  local METHODS = {
    { "save_checkpoint(dir, tag)", "save_checkpoint", "ps.checkpoints.save(folder" },
    { "load_checkpoint(dir, tag)", "load_checkpoint", "ps.checkpoints.load(folder" },
    { "get_global_grad_norm()", "get_global_grad_norm", "optimizer:step().grad_norm" },
    { "train_batch(data_iter)", "train_batch", "model:micro_batches(loader)" },
    { "eval_batch(data_iter)", "eval_batch", "ps.train.evaluate" },
    { "is_gradient_accumulation_boundary()", "is_gradient_accumulation_boundary", "model:at_boundary()" },
    { "gradient_accumulation_steps()", "gradient_accumulation_steps", "ps.engine()" },
    { "train_micro_batch_size_per_gpu()", "train_micro_batch_size_per_gpu", "ps.engine()" },
    { "train_batch_size()", "train_batch_size", "ps.engine()" },
    { "get_lr()[0]", "get_lr", "optimizer.lr" },
    { "set_lr(lr)", "set_lr", "optimizer:set_lr(lr)" },
    { "save_16bit_model(dir)", "save_16bit_model", "model:save_pretrained(folder)" },
    { "allreduce_gradients()", "allreduce_gradients", "model:backward(loss)" },
    { "lr_scheduler.step()", "lr_scheduler", "optimizer.lr" },
    { "destroy()", "destroy", "model:close()" },
  }
  row("engine.save_checkpoint, load_checkpoint, train_batch, get_lr, ...", function(e)
    e:make()
    for _, method in ipairs(METHODS) do
      local ok, problem = pcall(function() e.model[method[2]](e.model) end)
      assert(not ok and tostring(problem):find(method[3], 1, true), method[1] .. ": " .. tostring(problem))
    end
    e:after(0)
  end)
  row("engine.save_checkpoint(dir); engine.load_checkpoint(dir)  # as ps.checkpoints", function(e)
    local adam = { optimizer = { type = "Adam", params = { lr = 0.01 } } }
    e:make(adam)
    local losses, folder = {}, e:path("checkpoint-" .. e.layout)
    for n = 1, 4 do
      if n == 3 then
        ps.checkpoints.save(folder, { model = e.model, optimizer = e.optimizer, step = 2, extra = { epoch = 7 } })
      end
      losses[n] = e:pass()
      e.optimizer:step()
    end
    e:make(adam)
    local info = ps.checkpoints.load(folder, { model = e.model, optimizer = e.optimizer })
    assert(info.step == 2 and info.extra.epoch == 7)
    for n = 3, 4 do
      e:holds(e:pass(), n, losses[n])
      e.optimizer:step()
    end
  end)
  row("engine.is_gradient_accumulation_boundary()  # as model:at_boundary()", function(e)
    e:make { gradient_accumulation_steps = 2 }
    local seen = {}
    for out in e.model:micro_batches(e.x, e.y) do
      e.model:backward(out.loss)
      seen[#seen + 1] = tostring(e.model:at_boundary())
    end
    assert(seen[1] == "false" and #seen == 2, table.concat(seen, " "))
    assert(e.model:at_boundary())
    e.optimizer:step()
    e:after(1)
  end)
  row("optimizer.step().grad_norm  # get_global_grad_norm()", function(e)
    local norms = {}
    e.reference(2, { before = function(model, _, step) norms[step] = ps.nn.clip_grad_norm(model, math.huge) end })
    e:make { gradient_clipping = 1e9 }
    for n = 1, 2 do e.near(e:after(n - 1).grad_norm, norms[n], "the norm") end
  end)
  row("\"scheduler\": {\"type\": \"WarmupLR\"}  # stepped by the engine", function(e)
    local rates = { 0, 0.25, 0.5, 0.5 }                     -- linear over 2 steps, one step late as in DeepSpeed
    local schedule = { type = "WarmupLR", params = { warmup_min_lr = 0, warmup_max_lr = 0.5, warmup_num_steps = 2,
      warmup_type = "linear" } }
    e:make { scheduler = schedule }
    local seen = {}
    for n = 1, 4 do
      seen[n] = e.optimizer.lr
      e:pass()
      e.optimizer:step()
    end
    for n = 1, 4 do rates[n] = seen[n] end
    local want = e.reference(4, { before = function(_, optimizer, step) optimizer:set_lr(rates[step]) end })
    assert(seen[1] == 0 and seen[4] == 0.5 and seen[3] > 0, table.concat(seen, " "))
    e.near(e:look(), (e.reference(5, { before = function(_, optimizer, step)
      optimizer:set_lr(rates[step] or 0)
    end }))[5], "the loss after 4 steps")
    assert(#want == 4)
  end)
  row("lr_scheduler.get_last_lr()  # of a schedule that the script steps", function(e)
    e:make()
    local schedule = ps.sched.WarmupLR { optimizer = e.optimizer, warmup_max_lr = 0.5, warmup_num_steps = 2,
      warmup_type = "linear" }
    local rates = {}
    for n = 1, 3 do
      rates[n] = schedule:get_last_lr()[1]
      assert(rates[n] == e.optimizer.param_groups[1].lr)
      e:pass()
      e.optimizer:step()
      schedule:step()
    end
    e.near(e:look(), (e.reference(4, { before = function(_, optimizer, step)
      optimizer:set_lr(rates[step] or 0)
    end }))[4], "the loss after 3 steps")
  end)
  row("\"zero_optimization\": {\"stage\": 3, \"offload_optimizer\": {\"device\": \"cpu\"}}", function(e)
    local stage = e.layout == "zero3" and 3 or 0
    e:make(e.layout ~= "plain" and { zero_optimization = { stage = stage, offload_optimizer = { device = "cpu" } } }
      or nil)
    e:after(0)
    e:after(1)
  end)
  row("\"train_batch_size\": 4, \"train_micro_batch_size_per_gpu\": \"auto\"", function(e)
    e:make { train_batch_size = 4, train_micro_batch_size_per_gpu = "auto" }
    e:after(0)
  end)
  row("\"fp16\": {\"enabled\": true, \"loss_scale\": 128}", function(e)
    e:make { fp16 = { enabled = true, loss_scale = 128 } }
    for n = 1, 2 do
      local got = e:pass()
      assert(math.abs(got - e.losses[n]) < 1e-2 * e.losses[n], ("%g, not %g"):format(got, e.losses[n]))
      assert(e.optimizer:step().skipped == false)
    end
  end)
  row("engine.module, engine.optimizer", function(e)
    e:make()
    assert(ps.nn.is_module(e.model.module) and e.model.optimizer == nil)      -- the optimizer is returned separately
  end)
  row("deepspeed.checkpointing.checkpoint(fn, x)", function() ps.checkpointing.checkpoint(print) end, "ps.recompute")
  row("checkpoint(block, x)  # as ps.recompute in forward, model:recompute_blocks()", function(e)
    e:make(nil, { model_func = function()
      local model = e.model_func()
      assert(model:recompute_blocks() == 2)
      return model
    end })
    for n = 1, 3 do e:after(n - 1) end
  end)
end

local function patrickstar(row)
  row("model, optimizer = initialize_engine(model_func, local_rank, config)", function(e)
    if e.layout == "plain" then e:make()
    else
      local config = { plan_print = false, optimizer = { type = "SGD", params = { lr = 0.5 } } }
      for key, value in pairs(e.config) do config[key] = value end
      e.model, e.optimizer = ps.initialize_engine(e.model_func, ps.local_rank(), config)
    end
    e:after(0)
    e:after(1)
  end)
  row("torch.save(model.state_dict(), f'model-{rank}.pt'); state_dict.update(state_dict1)", function(e)
    e:make()
    e:after(0)
    e:after(1)
    ps.save(e.model:state_dict(), e:path(("model-%s-%d.pt"):format(e.layout, ps.rank())))
    ps.synchronize()
    local whole = {}
    -- Tensor-parallel ranks have shards of one tensor under the same name, and the last shard would replace the others.
    local parts = e.layout == "tensor"
    if parts then
      local other = ps.load(e:path(("model-%s-%d.pt"):format(e.layout, 1 - ps.rank())))
      local ok, problem = pcall(e.model.load_state_dict, e.model, other)
      assert(not ok and tostring(problem):find("load this rank's own file", 1, true), tostring(problem))
    end
    for rank = parts and ps.rank() or 0, parts and ps.rank() or ps.world_size() - 1 do
      for name, t in pairs(ps.load(e:path(("model-%s-%d.pt"):format(e.layout, rank)))) do whole[name] = t end
    end
    ps.synchronize()
    e:make()
    e.model:load_state_dict(whole)
    e:after(2)
  end)
  row("torch.save(optimizer.state_dict(), f'optimizer-{rank}.pt')", function(e)
    local adam = { optimizer = { type = "Adam", params = { lr = 0.01 } } }
    e:make(adam)
    for _ = 1, 2 do
      e:pass()
      e.optimizer:step()
    end
    ps.save(e.model:state_dict(), e:own_path "model.pt")
    ps.save(e.optimizer:state_dict(), e:own_path "optimizer.pt")
    local want = e:pass()
    e.optimizer:step()
    local after = e:look()
    e:make(adam)
    e.model:load_state_dict(ps.load(e:own_path "model.pt"))
    e.optimizer:load_state_dict(ps.load(e:own_path "optimizer.pt"))
    e:holds(e:pass(), 3, want)
    e.optimizer:step()
    e:holds(e:look(), 4, after)
  end)
  row("profiler.start(); ...; profiler.end(); if rank == 0: profiler.save(file)", function(e)
    ps.profiler.start()
    e:make()
    e:after(0)
    local ops = ps.profiler["end"]()
    assert(#ops > 3 and ops[1].calls > 0)
    if ps.rank() == 0 then
      local path = ps.profiler.save(e:path("profile-" .. e.layout .. ".json"))
      assert(io.open(path)):close()
    end
  end)
end

return function(rows_of, lib)
  deepspeed(rows_of "DeepSpeed", lib)
  patrickstar(rows_of "PatrickStar")
end
