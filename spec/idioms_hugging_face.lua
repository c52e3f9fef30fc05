-- SPDX-License-Identifier: BSD-3-Clause
-- Idioms of Hugging Face's training and generation guides (idioms_lib.lua).
local ps = require "ps"

local TARGETS = "the targets are a table, not a tensor: write model { input_ids = x, labels = x }"

-- Returns the loss for input_ids = labels = x without an engine.
local function own_loss(e, x, labels)
  return e.model_func() { input_ids = x, labels = labels or x }.loss:item()
end

-- Runs forward and backward of a named batch in the layout's way. Returns the loss of all rows.
local function pass(e, batch)
  local sum, n = 0, 0
  if e.layout == "pipeline" then
    for out in e.model(batch) do
      sum, n = sum + out.loss:item(), n + 1
      out.loss:backward()
    end
    return sum / n
  end
  local out = e.model(batch)
  e.model:backward(out.loss)
  return e:loss_of(out.loss)
end

return function(rows_of, lib)
  local row = rows_of "Hugging Face"
  row("model(input_ids=x, labels=x).loss", function(e)
    local want = own_loss(e, e.whole_x)
    e:make()
    e.optimizer:set_lr(0)
    for n = 1, 2 do
      e:holds(pass(e, { input_ids = e.x, labels = e.x }), n, want)
      e.optimizer:step()
    end
  end)
  row("model(**batch)  # with attention_mask", function(e)
    local want = own_loss(e, e.whole_x)
    e:make()
    e:holds(pass(e, { input_ids = e.x, labels = e.x, attention_mask = ps.ones(e.x:shape(), { dtype = "int64" }) }), 1,
      want)
    e.optimizer:step()
  end)
  row("model(input_ids=x).logits", function(e)
    local want = e.model_func()(e.whole_x):amax():item()
    e:make()
    if e.layout == "pipeline" then e.model(e.x) end
    local logits = ps.no_grad(e.model, { input_ids = e.x }).logits
    assert(logits:size(2) == 32)
    local top = logits:amax():item()
    if e.group then
      local both = ps.zeros { 2 }
      e.group:all_gather(both, ps.tensor { top })
      top = both:amax():item()
    end
    e.near(top, want, "the largest logit")
  end, lib.LOOP)
  row("labels[mask] = -100", function(e)
    local labels = e.whole_x:clone()
    local list = labels:tolist()
    for i = 1, 4 do for t = 5, 8 do list[i][t] = -100 end end
    labels = ps.tensor(list, "int64")
    local want = own_loss(e, e.whole_x, labels)
    e:make()
    local mine = labels
    if e.layout == "zero3" then mine = labels:narrow(0, 2 * ps.rank(), 2):contiguous() end
    e:holds(pass(e, { input_ids = e.x, labels = mine }), 1, want)
    e.optimizer:step()
  end)
  row("outputs = model(x, labels=y)", function(e)
    e:make()
    e.model(e.x, { labels = e.y })
  end, { plain = TARGETS, chunks = TARGETS, zero3 = TARGETS, pipeline = lib.LOOP.pipeline, tensor = TARGETS })
  row("model(x, attention_mask, labels)", function(e)
    e:make()
    e.model(e.x, e.y, e.y)
  end, { plain = "no third argument", chunks = "no third argument", zero3 = "no third argument",
    tensor = "no third argument", pipeline = lib.LOOP.pipeline })
  row("model.generate(ids, max_new_tokens=3, do_sample=False)", function(e)
    e:make()
    e.model:eval()
    local plain = e.model_func()
    plain:eval()
    local want = table.concat(plain:generate({ 1, 2, 3 }, 3, { temperature = 0 }), " ")
    assert(table.concat(e.model:generate({ 1, 2, 3 }, 3, { temperature = 0 }), " ") == want)
    local named = e.model:generate({ 1, 2, 3 }, { max_new_tokens = 3, do_sample = false })
    assert(table.concat(named, " ") == want)
  end)
  row("model.generate(**tokenizer(texts), max_new_tokens=3)", function(e)
    e:make()
    e.model:eval()
    local plain = e.model_func()
    plain:eval()
    local tokens = { input_ids = ps.tensor({ { 0, 1, 2 }, { 3, 4, 5 } }, "int64"),
      attention_mask = ps.tensor({ { 0, 1, 1 }, { 1, 1, 1 } }, "int64") }
    local options = { max_new_tokens = 3, do_sample = false }
    local got, want = e.model:generate(tokens, options), plain:generate(tokens, options)
    for i = 1, 2 do assert(table.concat(got[i], " ") == table.concat(want[i], " ")) end
  end)
  row("model.num_parameters()", function(e)
    e:make()
    assert(e.model:num_parameters() == e.model_func():num_parameters())
  end)
  row("model.config.n_embd", function(e)
    e:make()
    assert(e.model.config.n_embd == 16)
  end)
  row("model.save_pretrained(dir); AutoModel.from_pretrained(dir)", function(e)
    e:make()
    e:after(0)
    e:after(1)
    local folder = e:path("pretrained-" .. e.layout)
    e.model:save_pretrained(folder)
    ps.synchronize()
    local model = ps.from_pretrained(folder, { quiet = true })
    e.near(model(e.whole_x, e.whole_y):item(), e.losses[3], "the loss of the files")
    assert(model.training == false)
  end)
  row("model = AutoModel.from_pretrained(dir)  # in model_func", function(e)
    local folder = e:path("pretrained-of-" .. e.layout)
    if ps.rank() == 0 then e.model_func():save_pretrained(folder) end
    ps.synchronize()
    e:make(nil, { model_func = function() return ps.from_pretrained(folder, { quiet = true }) end })
    e.model:train()
    for n = 1, 2 do e:after(n - 1) end
  end)
  row("model.gradient_checkpointing_enable()", function(e)
    e:make()
    e.model:gradient_checkpointing_enable()
  end, "model:recompute_blocks()")
  row("model.tie_weights()", function(e)
    e:make()
    e.model:tie_weights()
  end, "both fields")
  row("model.get_input_embeddings()", function(e)
    e:make()
    e.model:get_input_embeddings()
  end, "model.wte")
  row("get_linear_schedule_with_warmup(optimizer, 1, 4)", function(e)
    e:make()
    ps.sched.get_linear_schedule_with_warmup(e.optimizer, 1, 4)
  end, "ps.sched.linear(optimizer, num_warmup_steps, num_training_steps)")
  row("get_scheduler(\"linear\", optimizer, 1, 3); scheduler.step()", function(e)
    e:make()
    e:after(0)
    local schedule = ps.sched.get_scheduler("linear", e.optimizer, 1, 3)
    local rates = {}
    for n = 1, 4 do
      rates[n] = schedule:get_last_lr()[1] / e.RATE
      schedule:step()
    end
    for n, want in ipairs { 0, 1, 0.5, 0 } do e.near(rates[n], want, "the share of the rate at step " .. n) end
  end)
  row("scheduler = get_cosine_schedule_with_warmup(...)  # as sched.warmup_cosine", function(e)
    e:make()
    local schedule = ps.sched.warmup_cosine { optimizer = e.optimizer, max_lr = 0.5, warmup = 1, total = 3 }
    local rates = {}
    for n = 1, 3 do
      rates[n] = schedule:get_last_lr()[1]
      e:pass()
      e.optimizer:step()
      schedule:step()
    end
    e.near(rates[1], 0.5)
    e.near(rates[3], 0.25)
    local want = e.reference(4, { before = function(_, optimizer, step) optimizer:set_lr(rates[step] or 0) end })
    e.near(e:look(), want[4], "the loss after 3 steps")
  end)
  row("trainer.evaluate()  # as ps.train.evaluate", function(e)
    e:make()
    local given = false
    local function batches()
      if given then return nil end
      given = true
      return e.x, e.y
    end
    e.near(ps.train.evaluate(e.model, batches), e.losses[1], "the loss")
    assert(e.model.training == true)
    e:after(0)
  end)
  row("accelerator.clip_grad_norm_ as a method of the model", function(e)
    e:make()
    e.model:clip_grad_norm_(1)
  end, "nn.clip_grad_norm_(model, max_norm)")
  return lib
end
