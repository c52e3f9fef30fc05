-- SPDX-License-Identifier: BSD-3-Clause
-- Idioms of BMTrain's guide (idioms_lib.lua): its listings in ps.bmt, compared with the same model without an engine.
-- ps.bmt has no plain memory, so the layouts plain and chunks are the same here.
local ps = require "ps"
local bmt = require "ps.bmt"
local nn = ps.nn

-- The options of bmt.init_distributed for each layout.
local LAYOUTS = { plain = {}, chunks = {}, zero3 = { zero_level = 3 }, pipeline = { pipe_size = 2 },
  tensor = { tp_size = 2 } }
local WIDTH, RATE = 48, 0.1

-- Returns the guide's SomeTransformerBlock as a module, with the lines that its second step replaces.
local function block_class(base, parameter)
  local Block = nn.class("SomeTransformerBlock", base)
  function Block:init(number)
    self.scale = parameter(ps.full({ WIDTH }, 1 + number / 8))
    self.shift = parameter(ps.arange(0, WIDTH) / WIDTH - 0.5)
  end
  function Block:forward(x, one, two, three)
    assert(one == 1 and two == 2 and three == 3)
    return (x * self.scale + self.shift):tanh()
  end
  return Block
end

-- Returns the guide's MyModule. list_of creates the list of blocks, wrap creates each block, and call applies the list.
local function module_class(base, parameter, Block, list_of, wrap, call)
  local MyModule = nn.class("MyModule", base)
  function MyModule:init()
    self.param = parameter(ps.arange(0, WIDTH) / WIDTH)
    self.module_list = list_of { wrap(Block(1)), wrap(Block(2)), wrap(Block(3)) }
  end
  function MyModule:forward() return call(self.module_list, self.param) end
  return MyModule
end

local function each_in_turn(list, x)
  for _, module in ipairs(list) do x = module(x, 1, 2, 3) end
  return x
end

local function same(x) return x end

-- Returns the losses of Adam's steps without ps.bmt.
local function reference(n)
  local losses = {}
  local model = module_class(nn.Module, nn.Parameter, block_class(nn.Module, nn.Parameter), nn.ModuleList, same,
    each_in_turn)()
  local optimizer = ps.optim.Adam(model, { lr = RATE, per_rank = ps.world_size() > 1 or nil })
  for step = 1, n do
    local loss = model():square():sum()
    losses[step] = loss:item()
    loss:backward()
    optimizer:step()
    optimizer:zero_grad()
  end
  return losses, model
end

return function(rows_of)
  local row = rows_of "BMTrain"

  -- Runs fn between bmt.init_distributed and bmt.close, which close the group of ranks from the previous rows.
  local number = 0
  local function session(e, fn)
    local world = ps.mesh.group "world"
    if world then world:close() end
    number = number + 1
    local options = { seed = 0, quiet = true, config = { plan_print = false },
      rendezvous = ps.world_size() > 1 and "file://" .. e:path("bmt" .. number) or nil }
    for key, value in pairs(LAYOUTS[e.layout]) do options[key] = value end
    bmt.init_distributed(options)
    local ok, problem = pcall(fn)
    bmt.close()
    if not ok then error(problem, 0) end
  end

  -- Trains a model for three steps. The losses must equal the reference's losses.
  local function trains(e, model)
    local losses = reference(3)
    local optimizer = bmt.optim.AdamOptimizer(model:parameters(), { lr = RATE })
    local manager = bmt.optim.OptimManager()
    manager:add_optimizer(optimizer)
    for step = 1, 3 do
      local loss = model():square():sum()
      e.near(bmt.sum_loss(loss):item(), losses[step], "the loss before step " .. step)
      manager:zero_grad()
      manager:backward(loss)
      manager:step()
    end
  end

  local function listing(e, list_of, wrap, call, base)
    session(e, function()
      local Block = block_class(bmt.DistributedModule, bmt.DistributedParameter)
      trains(e, module_class(base or bmt.DistributedModule, bmt.DistributedParameter, Block, list_of, wrap, call)())
    end)
  end

  row("for module in self.module_list: x = module(x, 1, 2, 3)  # CheckpointBlocks", function(e)
    listing(e, nn.ModuleList, bmt.CheckpointBlock, each_in_turn)
  end)
  row("x = self.module_list(x, 1, 2, 3)  # TransformerBlockList", function(e)
    listing(e, bmt.TransformerBlockList, bmt.CheckpointBlock, function(list, x) return list(x, 1, 2, 3) end)
  end)
  row("class MyModule(torch.nn.Module)  # not replaced by bmt.DistributedModule", function(e)
    listing(e, nn.ModuleList, bmt.CheckpointBlock, each_in_turn, nn.Module)
  end, "DistributedModule")
  row("torch.distributed.init_process_group()  # beside bmt.init_distributed", function(e)
    session(e, function() ps.init_distributed { quiet = true } end)
  end, "was called before")
  row("bmt.inspect.inspect_model(model, '*')  # after steps", function(e)
    session(e, function()
      local Block = block_class(bmt.DistributedModule, bmt.DistributedParameter)
      local model = module_class(bmt.DistributedModule, bmt.DistributedParameter, Block, nn.ModuleList,
        bmt.CheckpointBlock, each_in_turn)()
      trains(e, model)
      local _, plain = reference(3)
      local means, n = {}, 0
      for name, p in plain:named_parameters() do means[name] = p:mean():item() end
      for _, line in ipairs(bmt.inspect.inspect_model(model, "*")) do
        e.near(line.mean, means[line.name], line.name, 1e-4)
        assert(line.shape[1] == WIDTH)
        n = n + 1
      end
      assert(n == 7)
    end)
  end)
end
