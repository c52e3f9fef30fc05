-- SPDX-License-Identifier: BSD-3-Clause
-- BMTrain's tensor parallelism: the GPT of its example and layers with all options, against one rank.
local ps = require "ps"
local bmtrain = require "spec.bmtrain_lib"
local check = require "spec.check_lib"
local lib = require "spec.ranks_lib"

local folder = lib.folder()
teardown(function() lib.remove(folder) end)

-- The model in BMTrain's example (attention, feed-forward, GPT), with the lines that tp_size > 1 requires.
local GPT = [[
  local config = bmt.config
  begin { config = CONFIG, tp_size = TP_SIZE, zero_level = LEVEL }
  local Linear, ColumnParallelLinear, RowParallelLinear = bmt.nn.Linear, bmt.nn.ColumnParallelLinear,
    bmt.nn.RowParallelLinear
  local WIDTH, HEADS, WORDS, T = 8, 4, 12, 6

  local Attention = nn.class("Attention", bmt.DistributedModule)
  function Attention:init(width)
    if config.tp_size > 1 then
      self.project_q = ColumnParallelLinear(width, width, { gather_input = false })
      self.project_k = ColumnParallelLinear(width, width, { gather_input = false })
      self.project_v = ColumnParallelLinear(width, width, { gather_input = false })
      self.project_out = RowParallelLinear(width, width)
    else
      for _, name in ipairs { "project_q", "project_k", "project_v", "project_out" } do
        self[name] = Linear(width, width)
      end
    end
  end
  function Attention:forward(x)
    local batch_size, q, k, v = x:size(0), nil, nil, nil
    if config.tp_size > 1 then
      local packed = bmt.nn.OpParallelLinear(x,
        ps.cat({ self.project_q.weight, self.project_k.weight, self.project_v.weight }, 0),
        ps.cat({ self.project_q.bias, self.project_k.bias, self.project_v.bias }, 0), { gather_input = true })
      packed = packed:reshape(batch_size, -1, packed:size(-1))
      q, k, v = packed:chunk(3, -1)
    else
      q, k, v = self.project_q(x), self.project_k(x), self.project_v(x)
    end
    local dim = WIDTH / HEADS
    local function heads(t) return t:reshape(batch_size, T, -1, dim):permute(0, 2, 1, 3):contiguous() end
    local out = F.attention(heads(q), heads(k), heads(v), { causal = true })
    out = out:permute(0, 2, 1, 3):reshape(batch_size, T, -1)
    if config.tp_size > 1 then out = out:reshape(out:size(0) * config.tp_size, -1, out:size(-1)) end
    return self.project_out(out)
  end

  local Feedforward = nn.class("Feedforward", bmt.DistributedModule)
  function Feedforward:init(width)
    if config.tp_size > 1 then
      self.w_in = ColumnParallelLinear(width, 4 * width)
      self.w_out = RowParallelLinear(4 * width, width)
    else
      self.w_in = Linear(width, 4 * width)
      self.w_out = Linear(4 * width, width)
    end
  end
  function Feedforward:forward(x) return self.w_out(F.gelu(self.w_in(x))) end

  local Encoder = nn.class("Encoder", bmt.DistributedModule)
  function Encoder:init(width)
    self.ln_attn, self.attn = nn.LayerNorm(width), Attention(width)
    self.ln_ff, self.ff = nn.LayerNorm(width), Feedforward(width)
  end
  function Encoder:forward(x)
    x = x + self.attn(self.ln_attn(x)):reshape(x:shape())
    return x + self.ff(self.ln_ff(x)):reshape(x:shape())
  end

  local Net = nn.class("Net", bmt.DistributedModule)
  function Net:init()
    self.word_emb = bmt.nn.VPEmbedding(WORDS, WIDTH, { dtype = "fp32", init_std = 0.5 })
    self.pos_emb = nn.Embedding(T, WIDTH)
    self.transformers = bmt.TransformerBlockList { bmt.CheckpointBlock(Encoder(WIDTH)), Encoder(WIDTH) }
    self.layernorm = nn.LayerNorm(WIDTH)
  end
  function Net:forward(input, pos)
    if config.tp_size > 1 then
      input = select(config.tp_rank + 1, input:chunk(config.tp_size, 1))
      pos = select(config.tp_rank + 1, pos:chunk(config.tp_size, 1))
    end
    local out = self.pos_emb(pos) + self.word_emb(input)
    out = self.layernorm(self.transformers(out))
    return self.word_emb(out, true)
  end

  local model = Net()
  if bmt.world_size() == 1 then
    bmt.init_parameters(model)
    bmt.save(model, folder .. "/filled.pt")
    local state = ps.load(folder .. "/filled.pt")          -- biases are initially 0, so other values are set
    for _, t in pairs(state) do ps.no_grad(function() t:add_(ps.randn(t:shape()) * 0.1) end) end
    ps.save(state, folder .. "/begin.pt")
  else
    bmt.init_parameters(model)
    bmt.save(model, folder .. "/again.pt")
  end
  bmt.load(model, folder .. "/begin.pt")
  local loss_func = bmt.loss.FusedCrossEntropy { ignore_index = -100, parallel = true }
  local optimizer = bmt.optim.AdamOptimizer(model:parameters(), { lr = 1, eps = 1 })   -- approximates the gradient
  local manager = bmt.optim.OptimManager()
  manager:add_optimizer(optimizer)
  ps.manual_seed(9)
  for step = 1, 2 do
    local ids = ps.randint(0, WORDS, { SAMPLES, T + 1 }, { dtype = "int32" })
    local dp = config.tp_zero_size
    local own = SAMPLES / dp
    ids = ids:narrow(0, config.tp_zero_rank * own, own)
    local pos = ps.arange(0, T):to("int32"):reshape(1, T):expand(own, T):contiguous()
    local logits = model(ids:narrow(1, 0, T):contiguous(), pos)
    local loss = loss_func(logits:reshape(own * T, -1), ids:narrow(1, 1, T):contiguous():reshape(own * T))
    local mean = bmt.sum_loss(loss):item()
    manager:zero_grad()
    manager:backward(loss)
    local norm = manager:clip_grad_norm(optimizer.param_groups, 1e9)
    manager:step()
    bmt.print_rank(("step %.17g %.17g"):format(mean, norm))
    if step == 1 then bmt.save(model, folder .. "/first.pt") end
  end
  local row = bmt.inspect.inspect_model(model, "word_emb.weight")[1]
  bmt.print_rank(("row %d %.9g %.9g"):format(row.shape[1], row.mean, row.std))
  bmt.save(model, folder .. "/end.pt")
  bmt.load(model, folder .. "/end.pt")
  bmt.close()
]]

-- Single layers: values and gradients with all options, compared with a product with the whole weight.
local LAYERS = [[
  begin { config = CONFIG, tp_size = 2, zero_level = 0 }
  local SEQUENCE = WANTED
  local shard, group = require "ps.tensor.shard", ps.mesh.group "tp"
  local rank, t = bmt.config.tp_rank, bmt.config.tp_size
  local function near(got, want, what)
    assert(table.concat(got:shape(), " ") == table.concat(want:shape(), " "), what .. ": shapes")
    local off = (got - want):abs():amax():item() / math.max(1, want:abs():amax():item())
    assert(off <= 1e-5, ("%s is off by %g"):format(what, off))
  end
  local function part(x, dim)
    local own = x:size(dim) / t
    return x:narrow(dim, rank * own, own):contiguous()
  end
  local function leaf(x) return x:detach():clone():requires_grad(true) end

  -- Compares the gradients of a layer's parameters with those of the whole parameters.
  local function check_grads(layer, whole, what)
    for name, p in layer:named_parameters() do
      local got, desc, want = p:grad():clone(), shard.of(p), whole[name]:grad()
      if shard.is_partial(p) then got = group:all_reduce(got) end
      near(got, desc and shard.of_whole(desc, want) or want, what .. ": gradient of " .. name)
      p:set_grad(nil)
    end
  end

  local function whole_of(layer, file)
    bmt.init_parameters(layer)
    if layer.bias ~= nil then
      local desc, values = shard.of(layer.bias), ps.randn({ 6 })
      ps.no_grad(function() layer.bias:copy_(desc and shard.of_whole(desc, values) or values) end)
    end
    bmt.save(layer, folder .. file)
    local whole = {}
    for name, value in pairs(ps.load(folder .. file)) do whole[name] = leaf(value) end
    bmt.synchronize()
    return whole
  end

  local both = { false, true }
  for _, bias in ipairs(both) do for _, gather_input in ipairs(both) do for _, gather_output in ipairs(both) do
    local what = ("column, bias %s, gather_input %s, gather_output %s"):format(bias, gather_input, gather_output)
    local layer = bmt.nn.ColumnParallelLinear(4, 6, { bias = bias, gather_input = gather_input,
      gather_output = gather_output })
    assert(layer.weight:size(0) == 3 and (layer.bias ~= nil) == bias)
    local whole, all, w = whole_of(layer, "/column.pt"), leaf(ps.randn { 8, 3, 4 }), ps.randn { 8, 3, 6 }
    local x = leaf(gather_input and part(all, 0) or all)
    local y, want = layer(x), F.linear(all, whole.weight, whole.bias)
    near(y, gather_output and want or part(want, -1), what)
    ;(y * (gather_output and w or part(w, -1))):sum():backward()
    ;(want * w):sum():backward()
    near(x:grad(), gather_input and part(all:grad(), 0) or all:grad(), what .. ": gradient of x")
    check_grads(layer, whole, what)
  end end end
  for _, bias in ipairs(both) do for _, split_input in ipairs(both) do for _, all_reduce_output in ipairs(both) do
    local what = ("row, bias %s, split_input %s, all_reduce_output %s"):format(bias, split_input, all_reduce_output)
    local layer = bmt.nn.RowParallelLinear(4, 6, { bias = bias, split_input = split_input,
      all_reduce_output = all_reduce_output })
    assert(layer.weight:size(1) == 2 and (layer.bias ~= nil) == bias)
    local whole, all, w = whole_of(layer, "/row.pt"), leaf(ps.randn { 8, 3, 4 }), ps.randn { 8, 3, 6 }
    local x = leaf(split_input and part(all, 0) or part(all, -1))
    local y, want = layer(x), F.linear(all, whole.weight, whole.bias)
    near(y, all_reduce_output and want or part(want, 0), what)
    ;(y * (all_reduce_output and w or part(w, 0))):sum():backward()
    ;(want * w):sum():backward()
    near(x:grad(), part(all:grad(), split_input and 0 or -1), what .. ": gradient of x")
    check_grads(layer, whole, what)
  end end end

  -- Checks the embedding: indices and rows of [n] and [B, T], and their logits with the loss.
  local function rows(x) return SEQUENCE and part(x, x:dim() - (x:is_float() and 2 or 1)) or x end
  for _, shape in ipairs { { 4 }, { 3, 4 } } do
    local what = #shape .. " dimensions"
    local layer = bmt.nn.VPEmbedding(10, 6, { dtype = "fp32" })
    local whole, ids = whole_of(layer, "/table.pt"), ps.randint(0, 10, shape, { dtype = "int32" })
    local w = ps.randn(#shape == 1 and { 4, 6 } or { 3, 4, 6 })
    local y, want = layer(rows(ids)), F.embedding(ids, whole.weight)
    near(y, rows(want), what)
    ;(y * rows(w)):sum():backward()
    ;(want * w):sum():backward()
    check_grads(layer, whole, what)
    whole.weight:set_grad(nil)
    local all = leaf(w)
    local x = leaf(rows(w))
    local targets = ids:clone()
    targets:reshape(-1):narrow(0, 1, 1):fill_(-100)
    for _, reduction in ipairs { "mean", "sum", "none" } do
      local logits, full = layer(x, true), F.linear(all, whole.weight)
      near(logits, part(full, -1), what .. ": logits")
      local n = targets:numel()
      local got = bmt.nn.ParallelCrossEntropy { reduction = reduction } (logits:reshape(n, -1), targets:reshape(n))
      local loss = F.cross_entropy(full:reshape(n, -1), targets:reshape(n), { reduction = reduction })
      near(got, loss, what .. ": loss, " .. reduction)
      got:sum():backward()
      loss:sum():backward()
      near(x:grad(), rows(all:grad()), what .. ": gradient of rows, " .. reduction)
      check_grads(layer, whole, what .. ", " .. reduction)
      for _, one in ipairs { x, all, whole.weight } do one:set_grad(nil) end
    end
  end

  -- Dropout of this rank's rows of one sample. `part` selects the rows.
  local rng = ps.rng()
  rng.op = 0
  local mask = F.dropout(ps.ones { 1, 8, 4 }, 0.5)
  rng.op = 0
  local x = part(ps.ones { 1, 8, 4 }, 1)
  near(F.dropout(x, 0.5, true, { first = rank * x:numel(), per_sample = t * x:numel() }), part(mask, 1), "dropout")

  -- Checks the sums over ranks, and the defaults.
  local norm, alike = nn.LayerNorm(4), bmt.DistributedParameter(ps.ones { 4 }, { tp_mode = true })
  assert(shard.is_partial(norm.weight) == SEQUENCE and not shard.is_partial(alike))
  local row, column = bmt.nn.RowParallelLinear(4, 6), bmt.nn.ColumnParallelLinear(4, 6)
  assert(shard.is_partial(row.bias) == SEQUENCE and row.how.reduce_output_type == (SEQUENCE and "reduce_scatter"
    or "all_reduce") and column.how.gather_input == SEQUENCE)
  for _, case in ipairs { { "ColumnParallelLinear", 4, 5 }, { "RowParallelLinear", 5, 4 }, { "VPEmbedding", 5, 4 } } do
    local name, inputs, outputs = unpack(case)
    local ok, problem = pcall(function() return bmt.nn[name](inputs, outputs) end)
    assert(not ok and tostring(problem):find("5, which is not a multiple of tp_size = 2", 1, true), tostring(problem))
  end
  bmt.close()
]]

local function run(size, script, names)
  local numbers, all = bmtrain.run(folder, size, (script:gsub("%u[%u_]+", names)))
  for words, mean, std in all[0].text:gmatch "row (%S+) (%S+) (%S+)" do           -- gradient of the whole embedding
    numbers[#numbers + 1], numbers[#numbers + 2] = tonumber(words), tonumber(mean) + 1
    numbers[#numbers + 1] = tonumber(std)
  end
  return numbers
end

local function near(got, want, tol, what)
  local scale = math.max(1e-2, want:abs():amax():item())
  assert(table.concat(got:shape(), " ") == table.concat(want:shape(), " "), what .. ": shapes")
  local off = (got - want):abs():amax():item() / scale
  assert(off <= tol, ("%s is off by %g"):format(what, off))
end

-- Compares losses, norms, gradients and values for the same samples on one rank and on several ranks.
local function compare(size, level, config, samples)
  local function names(tp) return { TP_SIZE = tp, LEVEL = level, CONFIG = config, SAMPLES = samples } end
  local want = run(1, GPT, names(1))
  local begin, first, last, filled = ps.load(folder .. "/begin.pt"), ps.load(folder .. "/first.pt"),
    ps.load(folder .. "/end.pt"), ps.load(folder .. "/filled.pt")
  local numbers = run(size, GPT, names(2))
  assert(#want == 7 and #numbers == 7)
  for i, number in ipairs(want) do
    assert(math.abs(numbers[i] / number - 1) < 1e-5, ("number %d: %.9g, of one %.9g"):format(i, numbers[i], number))
  end
  local got, ended, again = ps.load(folder .. "/first.pt"), ps.load(folder .. "/end.pt"),
    ps.load(folder .. "/again.pt")
  for name, t in pairs(begin) do
    near(t - got[name], t - first[name], 1e-4, name .. "'s gradient")
    near(ended[name], last[name], 1e-5, name)
    assert(check.bytes(again[name]) == check.bytes(filled[name]), name .. ": other bits than one rank's")
  end
end

describe("layers of bmt.nn", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  it("compute like whole layers with all options, if ranks share the rows", function()
    run(2, LAYERS, { CONFIG = "{}", WANTED = "true" })
  end)
  it("compute like whole layers if all ranks have all rows", function()
    run(2, LAYERS, { CONFIG = "{ tensor_parallel = { sequence_parallel = false } }", WANTED = "false" })
  end)
end)

describe("BMTrain's tensor parallelism", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  it("trains its example's GPT like one rank", function() compare(2, 3, "{}", 1) end)
  it("with data parallelism and kept gathered rows", function()
    compare(4, 3, "{ tensor_parallel = { tp_keep_gathered = true } }", 2)
  end)
end)
