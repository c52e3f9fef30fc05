-- SPDX-License-Identifier: BSD-3-Clause
-- ps.bmt with pipe_size: blocks on several stages, compared with one rank; the listing of BMTrain's guide; one file
-- with all blocks.
local ps = require "ps"
local bmtrain = require "spec.bmtrain_lib"
local lib = require "spec.ranks_lib"

local folder = lib.folder()
teardown(function() lib.remove(folder) end)

-- A model in the style of BMTrain's users: everything is in one forward, on a rank's own rows. The embedding and the
-- head are tied. Blocks get a mask with rows, a trained bias and a number, and the loss also depends on the hidden
-- states.
local SCRIPT = [[
  local pipe, tp, micros, level, dtype = PIPE, TP, MICROS, LEVEL, "DTYPE"
  local plain = { tensor_parallel = { sequence_parallel = false } }
  begin { pipe_size = pipe, tp_size = tp, num_micro_batches = micros, zero_level = level, config = plain }
  local B, T, WORDS, W = 12, 3, 12, 8
  local Linear = tp > 1 and bmt.nn.ColumnParallelLinear or bmt.nn.Linear
  local column = tp > 1 and { gather_input = false, gather_output = true, dtype = dtype } or { dtype = dtype }

  local Block = nn.class("Block", bmt.DistributedModule)
  function Block:init()
    self.norm = nn.LayerNorm(W, { dtype = dtype })
    self.fc = Linear(W, W, column)
    self.runs = self:buffer("runs", ps.zeros { 1 })
  end
  function Block:forward(x, mask, bias, scale)
    assert(scale == 0.5)
    local y = self.fc(F.gelu(self.norm(x)))
    y = F.dropout(y * scale + bias, 0.25, self.training)
    return x + mask:to(dtype):matmul(y) / T
  end

  local Net = nn.class("Net", bmt.DistributedModule)
  function Net:init()
    self.table = bmt.DistributedParameter(ps.empty({ WORDS, W }, { dtype = dtype }),
      { init_method = bmt.ParameterInitializer(nn.init.normal_, 0, 0.5) })
    self.bias = bmt.DistributedParameter(ps.full({ W }, 0.125, { dtype = dtype }))
    self.blocks = bmt.PipelineTransformerBlockList { bmt.CheckpointBlock(Block(), { mode = "PIPE" }), Block(),
      bmt.CheckpointBlock(Block(), { use_checkpoint = false }) }
  end
  function Net:forward(ids, mask)
    local x = F.dropout(F.embedding(ids, self.table), 0.25, self.training)
    local y, hidden = self.blocks(x, mask, self.bias, 0.5, { return_hidden_states = true })
    assert(table.concat(hidden:shape(), " ") == ("3 %d %d %d"):format(ids:size(0), T, W))
    local logits = F.dropout(y, 0.25, self.training):matmul(self.table:transpose(0, 1))
    return logits, hidden
  end

  local model = Net()
  bmt.init_parameters(model)
  for i = 0, 2 do
    local here = model.blocks[i].fc.weight:device() ~= "meta"
    assert(here == (math.floor(i * pipe / 3) == math.floor(bmt.rank() * pipe / bmt.world_size())))
  end
  bmt.save(model, folder .. "/begin.pt")
  bmt.init_parameters(model)
  bmt.load(model, folder .. "/begin.pt")
  local optimizer = bmt.optim.AdamOptimizer(model:parameters(), { lr = 1, eps = 1 })      -- approximates the gradient
  local manager = bmt.optim.OptimManager { loss_scale = dtype ~= "fp32" and 64 or nil }
  manager:add_optimizer(optimizer)
  ps.manual_seed(9)
  local all = ps.randint(0, WORDS, { B, T }, { dtype = "int32" })
  local mask = ps.randint(0, 2, { B, T, T }, { dtype = "int32" })
  local copies = bmt.world_size() / tp                       -- number of ranks with different rows
  -- Samples are numbered along the pipeline first.
  local stage = math.floor(bmt.rank() * pipe / bmt.world_size())
  local number = (math.floor(bmt.rank() / tp) % (copies / pipe)) * pipe + stage
  local n = B / copies
  local ids, own = all:narrow(0, number * n, n), mask:narrow(0, number * n, n)
  local loss_func = bmt.loss.FusedCrossEntropy()
  for step = 1, 2 do
    if copies > pipe then ps.rng().sample = number * n end     -- as a loader does
    local logits, hidden = model(ids, own)
    local loss = loss_func(logits:reshape(n * T, WORDS), ids:reshape(n * T)) + hidden:to("fp32"):pow(2):mean()
    local mean = bmt.sum_loss(loss):item()
    manager:zero_grad()
    manager:backward(loss)
    local norm = manager:clip_grad_norm(optimizer.param_groups, 1e9)
    manager:step()
    bmt.print_rank(("step %.17g %.17g"):format(mean, norm))
    if step == 1 then bmt.save(model, folder .. "/first.pt") end
  end
  model:eval()
  bmt.print_rank(("step %.17g %.17g"):format(bmt.sum_loss((model(ids, own)):pow(2):mean()):item(), 1))
  bmt.save(model, folder .. "/end.pt")
  bmt.load(model, folder .. "/end.pt")
  bmt.close()
]]

-- The listing from BMTrain's guide, followed by calls that a list of several stages rejects before it waits for another
-- rank.
local GUIDE = [[
  begin { pipe_size = pipe, num_micro_batches = 2 }
  local SomeTransformerBlock = nn.class("SomeTransformerBlock", bmt.DistributedModule)
  function SomeTransformerBlock:init()
    self.scale = bmt.DistributedParameter(ps.full({ 1024 }, 2))
    self.shift = bmt.DistributedParameter(ps.full({ 1024 }, -1))
  end
  function SomeTransformerBlock:forward(x, one, two, three)
    assert(one == 1 and two == 2 and three == 3)
    return x * self.scale + self.shift
  end
  local MyModule = nn.class("MyModule", bmt.DistributedModule)
  function MyModule:init()
    self.param = bmt.DistributedParameter(ps.empty { 1, 1024 })
    self.module_list = bmt.PipelineTransformerBlockList {
      bmt.CheckpointBlock(SomeTransformerBlock()),
      bmt.CheckpointBlock(SomeTransformerBlock()),
      bmt.CheckpointBlock(SomeTransformerBlock()),
    }
  end
  function MyModule:forward()
    local x = self.param
    x = self.module_list(x, 1, 2, 3)
    return x
  end
  local guide = MyModule()
  ps.no_grad(function() guide.param:copy_((ps.arange(0, 1024) / 1024):reshape(1, 1024)) end)
  optimizer = bmt.optim.AdamOptimizer(guide:parameters(), { lr = 0.5 })
  manager = bmt.optim.OptimManager()
  manager:add_optimizer(optimizer)
  local y = guide()
  assert(y[0][512]:item() == 8 * 512 / 1024 - 7)
  manager:zero_grad()
  manager:backward(y:sum())
  manager:step()
  assert(math.abs(guide.param[0][256]:item() - (256 / 1024 - 0.5)) < 1e-6, "Adam's first step is lr")
  bmt.save(guide, folder .. "/guide.pt")
  -- the blocks' inputs are 2 x - 1 and 4 x - 3, for x = 700 / 1024
  local saved = ps.load(folder .. "/guide.pt")
  for i, want in ipairs { 1.5, 2.5 } do
    assert(math.abs(saved[("module_list.%d.scale"):format(i)][700]:item() - want) < 1e-6)
  end
  bmt.close()

  begin { pipe_size = pipe, num_micro_batches = 3 }
  local function refused(fn, ...)
    local ok, problem = pcall(fn)
    assert(not ok)
    for _, text in ipairs { ... } do assert(tostring(problem):find(text, 1, true), tostring(problem)) end
  end
  local function few(count, options)
    local blocks = {}
    for i = 1, count do blocks[i] = SomeTransformerBlock() end
    return bmt.PipelineTransformerBlockList(blocks, options)
  end
  refused(function() few(1) end, "1 blocks for pipe_size = 2")
  refused(function() few(2, { num_hidden = 2 }) end, "num_hidden is 2")
  local both = SomeTransformerBlock()
  refused(function() bmt.PipelineTransformerBlockList { both, both } end, "stages 0 and 1")
  local list = few(2)
  local there = list[bmt.rank() == 0 and 1 or 0]
  refused(function() return there(ps.ones { 1, 1024 }, 1, 2, 3) end, "on stage", "pipeline")
  refused(function() list(ps.ones { 1, 1024 }, 1, 2, 3) end, "1 rows on each of 2 stages", "num_micro_batches = 3")
  refused(function() list(ps.ones { 2, 1024 }, ps.ones { 2 }, 2, 3) end, "batch_related = { 0 }")
  refused(function() list(ps.ones { 2, 1024 }, 1, ps.ones { 3 }, 3, { batch_related = { 1 } }) end, "2 rows")
  local Shared = nn.class("Shared", bmt.DistributedModule)
  function Shared:init()
    self.list = few(2)
    self.mine = self.list[0].scale
  end
  function Shared:forward(x) return self.list(x, 1, 2, 3) end
  local shared = Shared()
  manager = bmt.optim.OptimManager()
  manager:add_optimizer(bmt.optim.AdamOptimizer(shared:parameters()))
  refused(function() shared(ps.ones { 2, 1024 }) end, "mine is also a parameter of a block on stage 0")
  bmt.close()
]]

local function run(size, layout)
  local pipe, tp, micros, level, dtype = layout.pipe or 1, layout.tp or 1, layout.micros or 1, layout.level or 3,
    layout.dtype or "fp32"
  local text = SCRIPT:gsub("PIPE,", pipe .. ","):gsub("TP,", tp .. ","):gsub("MICROS", micros):gsub("LEVEL", level)
    :gsub("DTYPE", dtype)
  local numbers = bmtrain.run(folder, size, text .. (layout.more or ""))
  assert.equal(6, #numbers)
  return numbers, ps.load(folder .. "/begin.pt"), ps.load(folder .. "/first.pt"), ps.load(folder .. "/end.pt")
end

local function off(a, b)
  return (a - b):abs():amax():item() / math.max(1e-30, b:abs():amax():item())
end

-- Prints losses, norms, the initial bits, updates that are approximately gradients, and the values saved at the end.
local function compare(size, layout, numbers, begin, first, last)
  local got, its_begin, its_first, its_last = run(size, layout)
  local what = ("%d ranks, pipe %d, tp %d, dp %d: "):format(size, layout.pipe, layout.tp or 1,
    size / layout.pipe / (layout.tp or 1))
  for i, want in ipairs(numbers) do
    assert(math.abs(got[i] / want - 1) < (layout.bound or 2e-6), what .. ("number %d: %.9g, of one %.9g"):format(i,
      got[i], want))
  end
  for name, value in pairs(begin) do
    assert(its_begin[name], what .. name)
    assert.equal(0, off(its_begin[name], value), what .. name)
    local moved = first[name] - value
    if moved:abs():amax():item() > 0 then
      local wrong = off(its_first[name] - its_begin[name], moved)
      assert(wrong < (layout.grad or 1e-5), what .. ("gradient of %s is off by %g"):format(name, wrong))
    end
    assert(off(its_last[name], last[name]) < (layout.grad or 1e-5), what .. name)
  end
end

describe("ps.bmt in stages", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  for _, tp in ipairs { 1, 2 } do
    it("detects at the next step that a stage's optimizer has other settings, tp_size = " .. tp, function()
      local _, all = bmtrain.run(folder, 2 * tp, ("local tp = %d\n"):format(tp) .. [[
        begin { pipe_size = 2, tp_size = tp, config = { tensor_parallel = { sequence_parallel = false } } }
        local stage = math.floor(bmt.rank() / tp)
        local Block = nn.class("Block", bmt.DistributedModule)
        function Block:init() self.fc = bmt.nn.Linear(4, 4) end
        function Block:forward(x) return x + self.fc(x) end
        local Net = nn.class("Net", bmt.DistributedModule)
        function Net:init() self.blocks = bmt.PipelineTransformerBlockList { Block(), Block() } end
        function Net:forward(x) return self.blocks(x):sum() end
        local model = Net()
        bmt.init_parameters(model)
        local optimizer = bmt.optim.AdamOffloadOptimizer(model:parameters(), { lr = 1e-2 })
        local manager = bmt.optim.OptimManager()
        manager:add_optimizer(optimizer)
        ps.manual_seed(7 + stage)                            -- each stage has different rows
        print(select(2, pcall(function()
          for step = 1, 3 do
            manager:zero_grad()
            manager:backward(model(ps.randn { 2, 4 }))
            manager:step()
            print("step " .. step)
            if step == 2 and stage == 1 then optimizer.param_groups[1].lr = 1 end
          end
        end)))
      ]])
      for rank = 0, 2 * tp - 1 do
        local text = all[rank].text
        assert.truthy(text:find("step 2\n", 1, true) and not text:find("step 3", 1, true), text)
        assert.truthy(text:find(("rank %d continues with another step count, learning rate or other setting of the "
          .. "optimizer"):format(tp), 1, true), text)
      end
    end)
  end

  it("has one rank's losses, gradients, masks and files for any micro-batches", function()
    local numbers, begin, first, last = run(1, {})
    local names = {}
    for name in pairs(begin) do names[#names + 1] = name end
    assert.equal(2 + 3 * 5, #names)
    compare(2, { pipe = 2, micros = 3, more = GUIDE }, numbers, begin, first, last)
    for layout in (os.getenv "PS_SPEC_LAYOUTS" or ""):gmatch "%S+" do        -- ranks,pipe,tp,micros,level
      local size, pipe, tp, micros, level = layout:match "(%d+),(%d+),(%d+),(%d+),(%d+)"
      compare(tonumber(size), { pipe = pipe, tp = tp, micros = micros, level = level }, numbers, begin, first, last)
    end
  end)
end)
