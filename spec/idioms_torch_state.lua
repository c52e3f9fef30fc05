-- SPDX-License-Identifier: BSD-3-Clause
-- Idioms of PyTorch's tutorials: parameters, modules, states and files, data, random numbers (idioms_lib.lua).
local ps = require "ps"
local nn = ps.nn

-- Returns the sum of a parameter's whole tensor in any layout, or nil if another rank has the parameter.
local function count(list)
  local n = 0
  for _ in pairs(list) do n = n + 1 end
  return n
end

-- -- parameters and modules -----------------------------------------------------------------------------------------
local function parameters(row)
  row("[n for n, p in model.named_parameters()]", function(e)
    e:make()
    local names, want = {}, {}
    for name in e.model:named_parameters() do names[#names + 1] = name end
    for name in e.model_func():named_parameters() do want[#want + 1] = name end
    assert(table.concat(names, " ") == table.concat(want, " "), table.concat(names, " "))
  end)
  row("len(list(model.parameters()))", function(e)
    e:make()
    assert(#e.model:parameters() == #e.model_func():parameters())
  end)
  row("sum(p.numel() for p in model.parameters())", function(e)
    e:make()
    local n, want = 0, e.model_func():num_parameters()
    for _, p in ipairs(e.model:parameters()) do n = n + p:numel() end
    if e.layout == "tensor" then assert(n < want) else assert(n == want, n) end   -- n counts shards with "tensor"
    assert(e.model:num_parameters() == want)
  end)
  row("sum(p.numel() for p in model.parameters() if p.requires_grad)", function(e)
    e:make()
    local all, n = 0, 0
    e.model.transformer.wpe:requires_grad_(false)
    for _, p in ipairs(e.model:parameters()) do
      all = all + p:numel()
      if p:requires_grad() then n = n + p:numel() end
    end
    assert(all - n == 8 * 16, all - n)
  end)
  row("if p.requires_grad: print(name)", function(e)
    e:make()
    for name, p in e.model:named_parameters() do
      assert(p:requires_grad() == true, name)
      assert(p:requires_grad() == true, name)                 -- a query changes nothing
    end
    e:after(0)
  end)
  row("[n for n, m in model.named_modules()]", function(e)
    e:make()
    local names, want = {}, {}
    for name in e.model:named_modules() do names[#names + 1] = name end
    for name in e.model_func():named_modules() do want[#want + 1] = name end
    assert(#names > 10 and table.concat(names, " ") == table.concat(want, " "), table.concat(names, " "))
  end)
  row("list(model.modules()); list(model.children()); dict(model.named_children())", function(e)
    e:make()
    local n = 0
    for _ in e.model:named_modules() do n = n + 1 end
    assert(#e.model:modules() == n)
    local names = {}
    for name, child in e.model.transformer:named_children() do
      names[#names + 1] = name
      assert(nn.is_module(child))
    end
    assert(table.concat(names, " ") == "wte wpe drop h ln_f", table.concat(names, " "))
    assert(#e.model.transformer:children() == 5 and e.model:children()[1] == e.model.transformer)
  end)
  row("list(model.buffers()); model.register_buffer('runs', torch.zeros(1))", function(e)
    e:make(nil, { model_func = function()
      local model = e.model_func()
      model:buffer("runs", ps.full({ 1 }, 3))
      return model
    end })
    assert(#e.model:buffers() == 1 and e.model:buffers()[1]:item() == 3 and e.model.runs:item() == 3)
    e:after(0)
  end)
  row("model.register_buffer(...), model.register_parameter(...), model.add_module(...)", function(e)
    local module = e.model_func()
    for name, words in pairs { register_buffer = "module:buffer(name, tensor)", add_module = "module[name] = other",
        register_parameter = "module:param(name, tensor)" } do
      local ok, problem = pcall(function() module[name](module, "a", ps.zeros { 1 }) end)
      assert(not ok and tostring(problem):find(words, 1, true), problem)
    end
  end)
  row("model.apply(init_weights)  # in model_func", function(e)
    local function init(m) if m.class_name == "LayerNorm" then nn.init.constant_(m.weight, 0.5) end end
    local want = e.reference(2, { made = function(model) model:apply(function(m) ps.no_grad(init, m) end) end })
    e:make(nil, { model_func = function() return e.model_func():apply(function(m) ps.no_grad(init, m) end) end })
    for n = 1, 2 do e:after(n - 1, want[n]) end
  end)
  row("model.apply(init_weights)  # of an engine's model", function(e)
    local function init(m)
      if m.class_name == "LayerNorm" and m.weight:device() ~= "meta" then
        ps.no_grad(nn.init.constant_, m.weight, 0.5)
      end
    end
    local want = e.reference(2, { made = function(model) model:apply(init) end })
    e:make()
    assert(e.model:apply(init) == e.model)
    for n = 1, 2 do e:after(n - 1, want[n]) end
  end)
  row("model.lm_head.weight is model.wte.weight  # tied", function(e)
    e:make()
    local names = {}
    for name in e.model:named_parameters() do names[name] = true end
    assert(names["transformer.wte.weight"] and not names["lm_head.weight"])
    assert(e.model:state_dict()["lm_head.weight"] == nil)
  end)
  row("self.b.weight = self.a.weight", function(e)
    local net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    assert(#net:parameters() == 3 and ps.same(net[0].weight, net[1].weight))
    net(ps.ones { 2, 4 }):sum():backward()
    assert(net[0].weight:grad() ~= nil and e)
  end)
  row("isinstance(model, nn.Module); model.module", function(e)
    e:make()
    assert(nn.is_module(e.model.module))
  end)
  row("print(model)", function(e)
    e:make()
    assert(tostring(e.model):find "GPT2" and tostring(e.model):find "ln_f", tostring(e.model))
  end)
  row("model.note = 'mine'; model.note", function(e)
    e:make()
    e.model.note = "mine"
    assert(e.model.note == "mine" and e.model.module.note == "mine")
  end)
  row("for block in model.transformer.h: ...; len(model.transformer.h); h[0]", function(e)
    e:make()
    local list, n = e.model.transformer.h, 0
    for i, block in ipairs(list) do
      assert(i == n and block == list[i])
      n = n + 1
    end
    assert(n == 2 and list:size() == 2 and list[-1] == list[1])
  end)
end

-- -- types and devices ----------------------------------------------------------------------------------------------
local function types(row)
  for _, name in ipairs { "half", "bfloat16", "float", "double", "cpu", "cuda" } do
    row(("model.%s()  # of an engine's model"):format(name), function(e)
      e:make()
      e.model[name](e.model)
    end, "keep the dtype and the device of its configuration")
  end
  row("model.to('cuda')  # of an engine's model", function(e)
    e:make()
    e.model:to "cuda"
  end, "keep the dtype and the device of its configuration")
  row("model.bfloat16(); model.float(); model.cpu()  # of a module", function(e)
    local module = e.model_func()
    local want = module.transformer.wte.weight:to("bf16"):to("fp32"):tolist()[1][1]
    assert(module:bfloat16() == module and module.transformer.wte.weight:dtype() == "bf16")
    assert(module:float():cpu().transformer.wte.weight:dtype() == "fp32")
    assert(module.transformer.wte.weight:tolist()[1][1] == want)
    assert(module:half().transformer.ln_f.bias:dtype() == "fp16" and module:double().transformer.ln_f.bias:dtype()
      == "fp64")
  end)
  row("x.to(device); x.to(device, non_blocking=True)", function(e)
    assert(ps.same(e.x:to "cpu", e.x))
    e.x:to("cpu", { non_blocking = true })
  end, "and no further argument")
  row("with torch.autocast('cuda', dtype=torch.bfloat16): ...", function() ps.autocast("cuda") end, "bf16 = { enabled")
  row("torch.amp.autocast(...)", function() ps.amp.autocast() end, "bf16 = { enabled")
  row("bf16 training", function(e)
    e:make { bf16 = { enabled = true } }
    for n = 1, 2 do
      local got = e:pass()
      assert(math.abs(got - e.losses[n]) < 1e-2 * e.losses[n], ("%g, not %g"):format(got, e.losses[n]))
      e.optimizer:step()
    end
  end)
  row("scaler.scale(loss).backward(); scaler.step(optimizer)  # with an engine", function(e)
    e:make()
    ps.optim.GradScaler():step(e.optimizer)
  end, "optimizer:step { scaler = scaler }")
  row("scaler.unscale_(optimizer)", function() ps.optim.GradScaler():unscale_() end,
    "optimizer:step { scaler = scaler }")
  row("optimizer.step { scaler = scaler }  # with an engine", function(e)
    e:make()
    e:pass()
    e.optimizer:step { scaler = ps.optim.GradScaler() }
  end, "scaler")
  row("torch.zeros(2, dtype=torch.float16)", function() return ps.zeros({ 2 }, { dtype = ps.float16 }) end, "dtype")
  row("torch.cuda.is_available()", function() return ps.cuda.is_available() end, "ps.devices()")
  row("torch.compile(model)", function(e) return ps.compile(e.model_func()) end, "plans each step")
  row("DistributedDataParallel(model)", function(e) return nn.parallel.DistributedDataParallel(e.model_func()) end,
    "ps.initialize")
  row("dist.get_rank(), dist.all_reduce(loss)", function() ps.distributed.get_rank() end, "ps.rank()")
end

-- -- states and files -----------------------------------------------------------------------------------------------
local function states(row)
  local function copy(state)
    local kept = {}
    for name, t in pairs(state) do kept[name] = t:clone():keep() end
    return kept
  end
  row("state = model.state_dict(); model.load_state_dict(state)", function(e)
    e:make()
    local state = copy(e.model:state_dict())
    e:after(0)
    e:after(1)
    e.model:load_state_dict(state)
    e:after(0)
  end)
  row("model.state_dict().keys()", function(e)
    e:make()
    local own = e.model:state_dict()
    local names = count(own)
    if e.layout == "zero3" or e.layout == "pipeline" then
      names = ps.mesh.group("world"):all_reduce(ps.tensor { names }):item()
    end
    -- The tied embedding is on the first stage and on the last.
    assert(names == count(e.model_func():state_dict()) + (e.layout == "pipeline" and 1 or 0), names)
  end)
  row("model.load_state_dict({}, strict=True)", function(e)
    e:make()
    e.model:load_state_dict {}
  end, "missing")
  row("missing, unexpected = model.load_state_dict(state, strict=False)", function(e)
    e:make()
    local result = e.model:load_state_dict({ other = ps.zeros { 1 } }, { strict = false })
    local missing = ps.tensor { #result.missing }
    if e.layout == "zero3" or e.layout == "pipeline" then ps.mesh.group("world"):all_reduce(missing) end
    assert(missing:item() == count(e.model_func():state_dict()) + (e.layout == "pipeline" and 1 or 0), missing:item())
    assert(#result.unexpected == 1 and result.unexpected[1] == "other")
    e:after(0)
  end)
  row("model.load_state_dict(state, False)", function(e)
    e:make()
    e.model:load_state_dict(e.model:state_dict(), false)
  end, "load_state_dict")
  row("torch.save(model.state_dict(), 'model.pt'); model.load_state_dict(torch.load('model.pt'))", function(e)
    e:make()
    e:after(0)
    local path = e:own_path "model.pt"
    ps.save(e.model:state_dict(), path)
    e:after(1)
    e:make()
    e.model:load_state_dict(ps.load(path))
    e:after(1)
    e:after(2)
  end)
  row("torch.load(path, map_location='cpu')", function(e)
    local path = e:own_path "one.pt"
    ps.save({ a = ps.ones { 2 } }, path)
    assert(ps.load(path).a:sum():item() == 2)
    return ps.load(path, { map_location = "cpu" })
  end, "map_location")
  row("optimizer.state_dict(); optimizer.load_state_dict(state)  # momentum", function(e)
    local momentum = { optimizer = { type = "SGD", params = { lr = 0.1, momentum = 0.9 } } }
    e:make(momentum)
    local losses = {}
    for n = 1, 4 do
      losses[n] = e:pass()
      e.optimizer:step()
    end
    e:make(momentum)
    for _ = 1, 2 do
      e:pass()
      e.optimizer:step()
    end
    local model, optimizer = e:own_path "m.pt", e:own_path "o.pt"
    ps.save(e.model:state_dict(), model)
    ps.save(e.optimizer:state_dict(), optimizer)
    e:make(momentum)
    e.model:load_state_dict(ps.load(model))
    e.optimizer:load_state_dict(ps.load(optimizer))
    for n = 3, 4 do
      e:holds(e:pass(), n, losses[n])
      e.optimizer:step()
    end
  end)
  row("torch.save({'epoch': n, 'model': ..., 'optimizer': ...}, path)  # resume", function(e)
    e:make { optimizer = { type = "Adam", params = { lr = 0.01 } } }
    local losses, path = {}, e:own_path "all.pt"
    for n = 1, 4 do
      if n == 3 then
        ps.save({ epoch = n, model = e.model:state_dict(), optimizer = e.optimizer:state_dict() }, path)
      end
      losses[n] = e:pass()
      e.optimizer:step()
    end
    e:make { optimizer = { type = "Adam", params = { lr = 0.01 } } }
    local saved = ps.load(path)
    e.model:load_state_dict(saved.model)
    e.optimizer:load_state_dict(saved.optimizer)
    for n = saved.epoch, 4 do
      e:holds(e:pass(), n, losses[n])
      e.optimizer:step()
    end
  end)
  row("copy.deepcopy(model.state_dict()); best = ...; model.load_state_dict(best); model.eval()", function(e)
    e:make()
    e:after(0)
    local best = copy(e.model:state_dict())
    e:after(1)
    e:after(2)
    e.model:load_state_dict(best)
    e.model:eval()
    e:holds(e:look(), 2)
  end)
  row("ema = 0.5 * ema + 0.5 * p  # of state_dict()", function(e)
    e:make()
    local first = copy(e.model:state_dict())
    e:after(0)
    local moved = false
    for name, t in pairs(e.model:state_dict()) do
      local mean = ps.no_grad(function() return first[name]:clone():mul_(0.5):add_(t, 0.5) end)
      assert(mean:isfinite():all():item())
      moved = moved or mean:sub(t):abs():amax():item() > 0
    end
    assert(moved or not next(first))
    e:after(1)
  end)
end

-- -- data and random numbers ----------------------------------------------------------------------------------------
local function data(row)
  -- Returns a loader for 13 rows of 8 tokens each, and the sums of an epoch's rows, in order.
  local function loader(e, more)
    local path = e:own_path "tokens.bin"
    local ids = {}
    for i = 1, 13 * 8 + 1 do ids[i] = i - 1 end
    ps.data.write_tokens(path, ids)
    local options = { file = path, batch = 2, seq = 8, shuffle = false, rank = 0, world_size = 1 }
    for key, value in pairs(more or {}) do options[key] = value end
    return ps.data.loader(options)
  end
  local function firsts(loader_)
    local list = {}
    for x in loader_:epoch() do
      for _, value in ipairs(x:tolist()) do list[#list + 1] = value[1] / 8 end
    end
    return list
  end
  row("for x, y in dataloader", function(e)
    local n = 0
    for x, y in loader(e):epoch() do
      assert(x:size(0) == 2 and x:size(1) == 8 and x:tolist()[1][1] == 16 * n)
      assert(y:tolist()[2][8] == x:tolist()[2][8] + 1)
      n = n + 1
    end
    assert(n == 6)
  end)
  row("for batch in dataloader: x, y = batch", function(e)
    local n = 0
    for batch in loader(e) do
      local x, y = batch[1], batch[2]
      assert(y:tolist()[1][1] == x:tolist()[1][1] + 1)
      n = n + 1
    end
    assert(n == 6)
  end)
  row("len(dataloader)", function(e) assert(loader(e).batches == 6 and loader(e):size() == 6) end)
  row("next(iter(dataloader))", function(e) assert((loader(e):next()):tolist()[2][1] == 8) end)
  row("DataLoader(shuffle=True): each row once, another order each epoch", function(e)
    local all = loader(e, { shuffle = true, batch = 1 })
    local one, two = firsts(all), firsts(all)
    assert(table.concat(one, " ") ~= table.concat(two, " "))
    for _, list in ipairs { one, two } do                    -- windows begin at a different token in each epoch
      assert(#list == 12)
      table.sort(list)
      for i = 2, 12 do assert(list[i] - list[i - 1] == 1) end
    end
  end)
  -- Returns the rows of an epoch of texts: the number of batches and the sorted first bytes.
  local function of_texts(more)
    local options = { texts = { "one", "two", "three", "four", "five" }, tokenizer = ps.tokenizer.bytes(), batch = 2,
      seq = 8, rank = 0, world_size = 1 }
    for key, value in pairs(more or {}) do options[key] = value end
    local all, list, n = ps.data.loader(options), {}, 0
    for batch in all:epoch() do
      n = n + 1
      for _, ids in ipairs(batch.input_ids:tolist()) do list[#list + 1] = string.char(ids[1], ids[2]) end
    end
    assert(n == all.batches)
    return n, list
  end
  row("DataLoader(texts, drop_last=True); drop_last=False", function()
    assert(of_texts() == 2 and of_texts { drop_last = false } == 3)
    local _, list = of_texts { drop_last = false }
    table.sort(list)
    assert(table.concat(list, " ") == "fi fo on th tw", table.concat(list, " "))
  end)
  row("DataLoader(texts, shuffle=False)", function()
    local _, list = of_texts { shuffle = false, drop_last = false }
    assert(table.concat(list, " ") == "on tw th fo fi", table.concat(list, " "))
  end)
  row("torch.manual_seed(0); DataLoader(shuffle=True, generator=g)", function(e)
    local one, two = firsts(loader(e, { shuffle = true, seed = 5 })), firsts(loader(e, { shuffle = true, seed = 5 }))
    assert(table.concat(one, " ") == table.concat(two, " "))
    assert(table.concat(one, " ") ~= table.concat(firsts(loader(e, { shuffle = true, seed = 6 })), " "))
  end)
  row("DataLoader(drop_last=False)", function(e) loader(e, { drop_last = false }) end,
    "drop_last applies only to texts")
  row("DataLoader(num_workers=4, pin_memory=True)", function(e) loader(e, { num_workers = 4 }) end, "num_workers")
  row("for epoch in range(2): for x, y in dataloader: ...", function(e)
    local all, n = loader(e), 0
    for _ = 1, 2 do for _ in all:epoch() do n = n + 1 end end
    assert(n == 12)
  end)
  row("sampler.set_epoch(1)", function(e)
    local straight, jumps = loader(e, { shuffle = true }), loader(e, { shuffle = true })
    firsts(straight)
    jumps:seek { epoch = 1, batch = 0 }
    assert(table.concat(firsts(straight), " ") == table.concat(firsts(jumps), " "))
    jumps:set_epoch(1)
  end, "loader:seek { epoch = n")
  row("dataloader.sampler.set_epoch(1)", function(e) loader(e).sampler:set_epoch(1) end, "loader:seek { epoch = n")
  row("DistributedSampler(dataset): each rank its own rows", function(e)
    local all = {}
    for rank = 0, 1 do
      for _, value in ipairs(firsts(loader(e, { batch = 1, rank = rank, world_size = 2 }))) do all[#all + 1] = value end
    end
    table.sort(all)
    assert(table.concat(all, " ") == "0 1 2 3 4 5 6 7 8 9 10 11")
  end)
  row("loader.state_dict(); loader.load_state_dict(state)", function(e)
    local first = loader(e, { shuffle = true })
    first:next()
    local state = first:state_dict()
    local want = (first:next()):tolist()[1][1]
    local second = loader(e, { shuffle = true })
    second:load_state_dict(state)
    assert((second:next()):tolist()[1][1] == want)
  end)
  row("for step, (x, y) in enumerate(dataloader): train", function(e)
    local rows = {}
    for i, row_ in ipairs(e.whole_x:tolist()) do
      rows[i] = row_
      rows[i][9] = e.whole_y:tolist()[i][8]
    end
    local ids = {}
    for _, row_ in ipairs(rows) do for i = 1, 8 do ids[#ids + 1] = row_[i] end end
    ids[#ids + 1] = rows[4][9]
    local path = e:own_path "train.bin"
    ps.data.write_tokens(path, ids)
    local want
    -- the rows of a shard end with the first token of the next row
    do
      local model = e.model_func()
      local x, y = ps.data.loader({ file = path, batch = 4, seq = 8, shuffle = false, rank = 0, world_size = 1 }):next()
      want = model(x, y):item()
    end
    e:make()
    local batches = ps.data.loader { file = path, batch = e.layout == "zero3" and 2 or 4, seq = 8, shuffle = false }
    local n = 0
    for x, y in batches:epoch() do
      e:holds(e:pass(x, y), 1, want)
      e.optimizer:step()
      n = n + 1
    end
    assert(n == 1)
  end)
  row("torch.manual_seed(0); torch.randn(3)", function()
    ps.manual_seed(5)
    local a = ps.randn({ 3 }):tolist()
    ps.manual_seed(5)
    assert(table.concat(a, " ") == table.concat(ps.randn({ 3 }):tolist(), " "))
  end)
  row("torch.get_rng_state()", function() return ps.get_rng_state() end, "ps.rng()")
end

return function(rows_of)
  local row = rows_of "PyTorch"
  parameters(row)
  types(row)
  states(row)
  data(row)
end
