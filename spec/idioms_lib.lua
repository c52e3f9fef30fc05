-- SPDX-License-Identifier: BSD-3-Clause
-- Lines of training loops of PyTorch, Hugging Face, DeepSpeed and OSLO, in Lua, for idioms_spec.lua. Each runs on every
-- layout, in one process (or set of ranks) per layout: it does what PyTorch does, by value, or fails with an error that
-- names the right call.
local ps = require "ps"
local gpt2 = require "models.gpt2"
local nn = ps.nn

local lib = {}

local OPTIONS = { n_layer = 2, n_embd = 16, n_head = 2, vocab_size = 32, n_positions = 8,
  embd_pdrop = 0, attn_pdrop = 0,
  resid_pdrop = 0 }
local RATE = 0.5

lib.LAYOUTS = {
  plain = { ranks = 1, config = { memory = "plain" } },
  chunks = { ranks = 1, config = {} },
  zero3 = { ranks = 2, config = { zero_optimization = { stage = 3 } } },
  pipeline = { ranks = 2, config = { pipeline = { stages = 2 } } },
  tensor = { ranks = 2, config = { tensor_parallel = { size = 2 } } },
}

local function model_func()
  ps.manual_seed(1)
  return gpt2.new(OPTIONS)
end

-- A batch of all ranks: inputs and targets [4, 8], of which every target counts.
local function whole_batch()
  ps.manual_seed(2)
  local ids = ps.randint(0, 32, { 4, 9 }, { dtype = "int64" })
  return ids:narrow(1, 0, 8):contiguous(), ids:narrow(1, 1, 8):contiguous()
end

-- Losses of the whole batch before step 1, 2, 3, ... of SGD without the engine.
local function reference(n, rate_of)
  local model, losses = model_func(), {}
  local optimizer = ps.optim.SGD(model, { lr = RATE, per_rank = ps.world_size() > 1 or nil })
  local x, y = whole_batch()
  for step = 1, n do
    local loss = model(x, y)
    losses[step] = loss:item()
    loss:backward()
    if rate_of then optimizer:set_lr(rate_of(step)) end
    optimizer:step()
    optimizer:zero_grad()
  end
  return losses
end

---@class Idiom
---@field name string the line of the guide
---@field run fun(e: table): any raises an error, or checks by e
---@field fails? string an error with these words
---@field on? string the names of the layouts; default: all

-- The engine of a case and what it needs: model, optimizer, x, y (this rank's rows), losses, layout.
local function environment(layout, losses)
  local config = { plan_print = false, optimizer = { type = "SGD", params = { lr = RATE } } }
  for key, value in pairs(lib.LAYOUTS[layout].config) do config[key] = value end
  local e = { layout = layout, losses = losses }
  function e.make(more)
    for key, value in pairs(more or {}) do config[key] = value end
    e.model, e.optimizer = ps.initialize { quiet = true, model_func = model_func, config = config }
    return e.model, e.optimizer
  end
  local x, y = whole_batch()
  e.whole_x = x
  if layout == "zero3" then x, y = x:narrow(0, 2 * ps.rank(), 2), y:narrow(0, 2 * ps.rank(), 2) end
  e.x, e.y = x:contiguous(), y:contiguous()
  local group = layout == "zero3" and ps.mesh.group "world"

  -- The loss of all ranks' rows.
  function e.loss_of(loss)
    local value = loss:detach():reshape(1):clone()
    return group and group:all_reduce(value):item() / ps.world_size() or value:item()
  end
  -- Holds a loss to that before step n of the reference.
  function e.holds(loss, n, want)
    want = want or losses[n]
    local got = e.loss_of(loss)
    assert(math.abs(got - want) < 2e-5 * want, ("the loss before step %d is %.7g, PyTorch's is %.7g"):format(n, got,
      want))
  end
  -- After n steps of the case: a further loss.
  function e.after(n, want)
    local loss = e.model(e.x, e.y)
    e.holds(loss, n + 1, want)
    e.model:backward(loss)
    e.optimizer:step()
  end
  return e
end

local function loop(e, step)
  e.make()
  for n = 1, 2 do
    step(n)
  end
  e.after(2)
end

---@type Idiom[]
lib.IDIOMS = {
  -- -- the step -------------------------------------------------------------------------------------------------------
  { name = "optimizer.zero_grad(); loss = model(x, y); loss.backward(); optimizer.step()", run = function(e)
    loop(e, function(n)
      e.optimizer:zero_grad()
      local loss = e.model(e.x, e.y)
      e.holds(loss, n)
      loss:backward()
      e.optimizer:step()
    end)
  end },
  { name = "loss = engine(x, y); engine.backward(loss); engine.step()  # DeepSpeed", run = function(e)
    e.make()
    e.model:backward(e.model(e.x, e.y))
    e.model:step()
  end, fails = "step" },
  { name = "loss.backward(); optimizer.step(); optimizer.zero_grad()", run = function(e)
    loop(e, function()
      e.model:backward(e.model(e.x, e.y))
      e.optimizer:step()
      e.optimizer:zero_grad()
    end)
  end },
  { name = "optimizer.zero_grad(set_to_none=True)", run = function(e)
    loop(e, function()
      e.optimizer:zero_grad(true)
      e.model:backward(e.model(e.x, e.y))
      e.optimizer:step()
      e.optimizer:zero_grad { set_to_none = true }
    end)
  end },
  { name = "optimizer.zero_grad(set_to_none=False)", run = function(e)
    e.make()
    e.optimizer:zero_grad { set_to_none = false }
  end, fails = "set_to_none is false" },
  { name = "model(input_ids=x, labels=x).loss  # Hugging Face", run = function(e)
    e.make()
    e.optimizer:set_lr(0)
    local x = e.whole_x
    local want = model_func() { input_ids = x, labels = x }.loss:item()
    for n = 1, 2 do
      local out = e.model { input_ids = e.x, labels = e.x }
      e.holds(out.loss, n, want)
      e.model:backward(out.loss)
      e.optimizer:step()
    end
  end, on = "plain chunks zero3 tensor" },
  { name = "loss.backward(retain_graph=True)", run = function(e)
    e.make()
    e.model:backward(e.model(e.x, e.y), nil, true)
  end, fails = "it was given true" },
  { name = "optimizer.step(closure)", run = function(e)
    e.make()
    e.optimizer:step(function() end)
  end, fails = "takes a table of options, not a function" },
  { name = "total += loss.item(); print(f'{loss.item():.3f}')", run = function(e)
    e.make()
    local loss = e.model(e.x, e.y)
    local total = 0 + loss:item()
    assert(("%.3f"):format(loss:item()):match "^%d%.%d%d%d$" and total > 0)
    e.model:backward(loss)
    e.optimizer:step()
  end },
  { name = "total += float(loss)", run = function(e)
    e.make()
    local loss = e.model(e.x, e.y)
    assert(tonumber(loss) == nil)                             -- a tensor is no number of Lua's, as told in the pages
    e.model:backward(loss)
    e.optimizer:step()
  end },
  { name = "loss.detach()", run = function(e)
    e.make()
    local loss = e.model(e.x, e.y)
    e.holds(loss:detach(), 1)
    e.model:backward(loss)
    e.optimizer:step()
  end },
  -- -- modes ----------------------------------------------------------------------------------------------------------
  { name = "model.train()  # returns the model", run = function(e)
    e.make()
    e.model = e.model:train()
    e.after(0)
    e.after(1)
  end },
  { name = "model.eval(); with torch.no_grad(): loss = model(x, y)", run = function(e)
    e.make()
    e.model:eval()
    e.holds(ps.no_grad(function() return e.model(e.x, e.y) end), 1)
    e.model:train()
    e.after(0)
  end },
  { name = "model.eval(); logits = model(x)", on = "plain chunks zero3 tensor", run = function(e)
    e.make()
    e.model:eval()
    local logits = ps.no_grad(e.model, e.x)
    assert(table.concat(logits:shape(), " ") == e.x:size(0) .. " 8 32")
    e.holds(ps.F.cross_entropy(logits, e.y), 1)
  end },
  { name = "model.training", run = function(e)
    e.make()
    assert(e.model.training == true)
    e.model:eval()
    assert(e.model.training == false)
  end },
  -- -- parameters -----------------------------------------------------------------------------------------------------
  { name = "[n for n, p in model.named_parameters()]", run = function(e)
    e.make()
    local names, want = {}, {}
    for name in e.model:named_parameters() do names[#names + 1] = name end
    for name in gpt2.new(OPTIONS):named_parameters() do want[#want + 1] = name end
    assert(table.concat(names, " ") == table.concat(want, " "), table.concat(names, " "))
  end },
  { name = "len(list(model.parameters()))", run = function(e)
    e.make()
    assert(#e.model:parameters() == #gpt2.new(OPTIONS):parameters())
  end },
  { name = "sum(p.numel() for p in model.parameters())", on = "plain chunks zero3", run = function(e)
    e.make()
    local n = 0
    for _, p in ipairs(e.model:parameters()) do n = n + p:numel() end
    assert(n == gpt2.new(OPTIONS):num_parameters(), n)
  end },
  { name = "model.num_parameters()", run = function(e)
    e.make()
    assert(e.model:num_parameters() == gpt2.new(OPTIONS):num_parameters())
  end },
  { name = "if p.requires_grad: ...", run = function(e)
    e.make()
    for _, p in e.model:named_parameters() do assert(p:requires_grad() == true) end
  end },
  { name = "model.config.n_embd", run = function(e)
    e.make()
    assert(e.model.config.n_embd == 16)
  end },
  { name = "isinstance(model, nn.Module); model.module", run = function(e)
    e.make()
    assert(nn.is_module(e.model.module))
  end },
  -- -- learning rate --------------------------------------------------------------------------------------------------
  { name = "optimizer.set_lr(0)", run = function(e)
    e.make()
    e.after(0)
    e.optimizer:set_lr(0)
    e.after(1)
    e.after(1)
  end },
  { name = "optimizer.param_groups[0]['lr'] = 0", run = function(e)
    e.make()
    e.after(0)
    e.optimizer.groups[1].lr = 0
    e.after(1)
    e.after(1)
  end },
  -- -- arguments ------------------------------------------------------------------------------------------------------
  { name = "model(x, mask, labels)", run = function(e)
    e.make()
    e.model(e.x, e.y, e.y)
  end, fails = "no third argument" },
  { name = "model(x, labels=y)", run = function(e)
    e.make()
    e.model(e.x, { labels = e.y })
  end, fails = "its targets are a table, not a tensor: write model { input_ids = x, labels = x }" },
  { name = "model.to('cuda')", run = function(e)
    e.make()
    e.model:to "cuda"
  end, fails = "device" },
  { name = "model.half()", run = function(e)
    e.make()
    e.model:half()
  end, fails = "half" },
  { name = "model.cuda()", run = function(e)
    e.make()
    e.model:cuda()
  end, fails = "cuda" },
  -- -- state ----------------------------------------------------------------------------------------------------------
  { name = "state = model.state_dict(); model.load_state_dict(state)", on = "plain chunks pipeline tensor",
    run = function(e)
    e.make()
    local state = {}
    for name, t in pairs(e.model:state_dict()) do state[name] = t:clone():keep() end
    e.after(0)
    e.model:load_state_dict(state)
    e.after(0)
  end },
  { name = "model.load_state_dict(state, strict=False) by position", run = function(e)
    e.make()
    e.model:load_state_dict(e.model:state_dict(), false)
  end, fails = "load_state_dict" },
  { name = "optimizer.state_dict(); optimizer.load_state_dict(state)", run = function(e)
    e.make()
    e.after(0)
    e.optimizer:load_state_dict(e.optimizer:state_dict())
    e.after(1)
  end },
  { name = "torch.manual_seed(0); ...; torch.manual_seed(0)", run = function()
    ps.manual_seed(5)
    local a = ps.randn({ 3 }):tolist()
    ps.manual_seed(5)
    assert(table.concat(a, " ") == table.concat(ps.randn({ 3 }):tolist(), " "))
  end },
  { name = "model.generate(ids, max_new_tokens=3)", run = function(e)
    e.make()
    e.model:eval()
    local ids = e.model:generate({ 1, 2, 3 }, 3, { temperature = 0 })
    local plain = model_func()
    plain:eval()
    assert(table.concat(ids, " ") == table.concat(plain:generate({ 1, 2, 3 }, 3, { temperature = 0 }), " "))
  end },
}

-- Words of errors that name the right call.
local RIGHT = { "call model:backward(loss)", "in model:micro_batches(x, y) do" }

-- Runs a case; "" or what is wrong.
local function outcome(idiom, layout, losses)
  local e = environment(layout, losses)
  local ok, problem = pcall(idiom.run, e)
  if e.model then pcall(e.model.close, e.model) end
  problem = tostring(problem):gsub("%s+", " ")
  local words = idiom.fails
  for _, right in ipairs(RIGHT) do
    if not ok and problem:find(right, 1, true) then return "" end
  end
  if not words then return ok and "" or problem end
  if ok then return "did nothing, without an error that says " .. words end
  return problem:find(words, 1, true) and "" or ("the error lacks '%s': %s"):format(words, problem)
end

--- Runs all idioms on a layout; prints a line each, "layout | name | what is wrong", of rank 0.
---@param layout string
---@param only? string a part of a name
function lib.run(layout, only)
  local losses = reference(4)
  for _, idiom in ipairs(lib.IDIOMS) do
    if (not idiom.on or idiom.on:find(layout, 1, true)) and (not only or idiom.name:find(only, 1, true)) then
      local wrong = outcome(idiom, layout, losses)
      if ps.rank() == 0 or wrong ~= "" then print(("%s | %s | %s"):format(layout, idiom.name, wrong)) end
    end
  end
end

return lib
