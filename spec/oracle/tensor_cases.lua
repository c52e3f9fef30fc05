-- SPDX-License-Identifier: BSD-3-Clause
-- For tensor_oracle.py: the networks and models of its cases on two ranks, which write losses and whole gradients.
local ps = require "ps"
local cjson = require "cjson"
local shard = require "ps.tensor.shard"
local nn, F = ps.nn, ps.F

local f = assert(io.open(arg[1]))
local cases = cjson.decode(f:read "*a")
f:close()
local group = ps.init_distributed { quiet = true }

-- Fills a layer with this rank's shard of the weights that a file has under a name.
local function fill(layer, state, name)
  for key, p in layer:named_parameters() do
    local desc, whole = shard.of(p), state[name .. "." .. key]
    ps.no_grad(function() p:copy_(desc and shard.of_whole(desc, whole) or whole) end)
  end
  return layer
end

-- Gathers a tensor from the shards of all ranks.
local function whole_of(desc, t)
  if not desc then return t end
  local shape = t:shape()
  table.insert(shape, 1, group:size())
  local all, parts = ps.empty(shape), {}
  group:all_gather(all, t:detach():contiguous():unsqueeze(0))
  for i = 1, shape[1] do parts[i] = all:select(0, i - 1) end
  return shard.join(desc, parts)
end

-- Returns the whole gradient of a parameter on all ranks.
local function gradient(p)
  if shard.is_partial(p) then return group:all_reduce(p:grad():clone()) end
  return whole_of(shard.of(p), p:grad())
end

local RATE = 64                                    -- a power of two, so that dividing a step's change does not round it

local function begin(case, optimizer)
  return ps.initialize { quiet = true, model_func = function()
    return ps.from_pretrained(case.model, { quiet = true })
  end, config = { plan_print = false, optimizer = optimizer, tensor_parallel = { size = group:size(),
    sequence_parallel = case.sequence, tp_overlap_comm = case.pieces } } }
end

-- Runs a whole model, sharded by its table of names. Returns the gradients of a step, and the losses of some steps.
local function run_model(case)
  local state = ps.load(case.data)
  local model, optimizer = begin(case, { type = "SGD", params = { lr = RATE } })
  local before, out = {}, {}
  for name, p in model.module:named_parameters() do before[name] = p:detach():clone():keep() end
  local loss = model(state.ids, state.targets)
  out.loss = loss:detach():reshape(1):clone():keep()
  model:backward(loss)
  optimizer:step()
  local names = {}
  for name in model.module:named_parameters() do names[#names + 1] = name end
  table.sort(names)  -- all ranks run collectives in the same order
  local now = {}
  for name, p in model.module:named_parameters() do now[name] = p end
  for _, name in ipairs(names) do
    local p = now[name]
    out[name] = ps.no_grad(function() return whole_of(shard.of(p), (before[name] - p:detach()) / RATE) end)
  end
  model:close()
  local adamw = { lr = case.adamw.lr, betas = case.adamw.betas, eps = case.adamw.eps,
    weight_decay = case.adamw.weight_decay }
  model, optimizer = begin(case, { type = "AdamW", params = adamw })
  local losses = ps.empty { case.steps }
  for step = 1, case.steps do
    loss = model(state.ids, state.targets)
    losses[step - 1]:copy_(loss:detach())
    optimizer:zero_grad()
    model:backward(loss)
    optimizer:step()
  end
  out.losses = losses
  if group:rank() == 0 then ps.save(out, case.out .. "/ours.safetensors") end
  model:close()
end

local function run(case)
  local state = ps.load(case.data)
  local region = nn.Region.new(group, true, case.keep)
  local o = { region = region }
  local net = { embed = nn.VocabParallelEmbedding(case.V, case.C, { region = region, enter = true }),
    norm = nn.LayerNorm(case.C), up = nn.ColumnParallelLinear(case.C, case.H, o),
    down = nn.RowParallelLinear(case.H, case.C, o), last = nn.LayerNorm(case.C),
    head = nn.ParallelLMHead(case.C, case.V, o) }
  for name, layer in pairs(net) do fill(layer, state, name) end
  for _, norm in ipairs { net.norm, net.last } do
    for _, p in ipairs(norm:parameters()) do shard.set_partial(p) end      -- the norm sees this rank's rows
  end
  region:set(case.B, case.T)
  local x = net.embed(state.ids)
  x = net.down(F.gelu(net.up(net.norm(x)), "tanh"), x)
  local loss = net.head:loss(net.last(x), state.targets)
  loss:backward()
  local out = { loss = loss:detach():reshape(1) }
  for name, layer in pairs(net) do
    local list = {}
    for key, p in layer:named_parameters() do list[#list + 1] = { name .. "." .. key, p } end
    for _, at in ipairs(list) do out[at[1]] = at[2] end
  end
  local names = {}
  for name in pairs(out) do if name ~= "loss" then names[#names + 1] = name end end
  table.sort(names)  -- all ranks run collectives in the same order
  for _, name in ipairs(names) do out[name] = gradient(out[name]) end
  if group:rank() == 0 then ps.save(out, case.out .. "/ours.safetensors") end
end

for _, case in ipairs(cases) do (case.family and run_model or run)(case) end
