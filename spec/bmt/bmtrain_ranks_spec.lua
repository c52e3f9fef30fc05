-- SPDX-License-Identifier: BSD-3-Clause
-- ps.bmt on several ranks: losses, norms and files are those of one process at every ZeRO level; values come from rank
-- 0.
local paths = require "ps.paths"
local ps = require "ps"
local bmtrain = require "spec.bmtrain_lib"
local lib = require "spec.ranks_lib"
local check = require "spec.check_lib"

local folder = lib.folder()
teardown(function() lib.remove(folder) end)

-- Trains a model of two blocks on six rows, which are divided among the ranks. The script prints losses and norms, and
-- writes a file.
local SCRIPT = [[
  local dtype, levels = "DTYPE", { BLOCKS }
  begin { zero_level = LEVEL }
  local rank, size = bmt.rank(), bmt.world_size()
  local Net = nn.class("Net", bmt.DistributedModule)
  function Net:init()
    self.early = nn.Parameter(ps.full({ 8 }, 0.25 + rank, { dtype = dtype }))
    self.table = bmt.DistributedParameter(ps.full({ 20, 8 }, 9 + rank, { dtype = dtype }),
      { init_method = bmt.ParameterInitializer(nn.init.normal_, 0, 0.5) })
    self.shift = bmt.DistributedParameter(ps.full({ 20 }, 0.5 * (rank + 1), { dtype = dtype }))
    self.blocks = bmt.TransformerBlockList {
      bmt.CheckpointBlock(nn.Linear(8, 8, { dtype = dtype }), { zero_level = levels[1] }),
      bmt.CheckpointBlock(nn.Linear(8, 8, { dtype = dtype }), { use_checkpoint = false, zero_level = levels[2] }) }
  end
  function Net:forward(ids)
    local x = F.gelu(self.blocks(F.embedding(ids, self.table) + self.early))
    return x:matmul(self.table:transpose(0, 1)) + self.shift
  end
  local model = Net()
  assert(model.shift:sum():item() == 10, "rank 0's bits count, and reading gathers")
  bmt.init_parameters(model)
  bmt.save(model, folder .. "/begin.pt")
  bmt.init_parameters(model)
  bmt.load(model, folder .. "/begin.pt")
  local optimizer = bmt.optim.AdamOptimizer(model:parameters(), { weight_decay = 0.1 })
  local manager = bmt.optim.OptimManager { loss_scale = dtype ~= "fp32" and 64 or nil }
  manager:add_optimizer(optimizer, bmt.lr_scheduler.Linear(optimizer, { start_lr = 0.02, warmup_iter = 2,
    end_iter = 9 }))
  local loss_func = bmt.loss.FusedCrossEntropy()
  local ids = ps.randint(0, 20, { 6, 5 }, { dtype = "int32" }):narrow(0, rank * 6 / size, 6 / size)
  for step = 1, 4 do
    local logits = model(ids)
    local loss = loss_func(logits:reshape(ids:numel(), 20), ids:reshape(ids:numel()))
    local mean = bmt.sum_loss(loss):item()
    manager:zero_grad()
    manager:backward(loss)
    local norm = manager:clip_grad_norm(optimizer.param_groups, 0.5)
    manager:step()
    bmt.print_rank(("step %.17g %.17g"):format(mean, norm))
  end
  local rows = bmt.inspect.inspect_model(model, "shift")
  assert(#rows == 1 and rows[1].shape[1] == 20)
  assert(bmt.gather_result(ps.full({ 2, 3 }, rank)):sum():item() == 6 * size * (size - 1) / 2)
  bmt.print_rank("here", { rank = size - 1 })
  bmt.save(model, folder .. "/end.pt")
  bmt.load(model, folder .. "/end.pt")
  bmt.synchronize()
  bmt.close()
]]

-- `blocks` is the zero_level of each block, as text.
local function run(size, level, dtype, blocks)
  local numbers, all = bmtrain.run(folder, size, (SCRIPT:gsub("LEVEL", level):gsub("DTYPE", dtype)
    :gsub("BLOCKS", blocks or "")))
  for rank = 0, size - 1 do assert.equal(rank == size - 1, all[rank].text:find "here" ~= nil) end
  assert.equal(8, #numbers)
  local values, list = ps.load(folder .. "/end.pt"), {}
  for name, t in pairs(values) do list[#list + 1] = name .. " " .. check.bytes(t) end
  table.sort(list)
  return numbers, table.concat(list, "\n"), values
end

describe("ps.bmt on several ranks", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  local CASES = { fp32 = { bound = 2e-6, off = 1e-5, { 2, 3 }, { 2, 3, "3, 2" }, { 2, 0 }, { 2, 2 },
    { 3, 3 } },
    bf16 = { bound = 2e-2, off = 2e-2, { 2, 3 } } }
  for dtype, case in pairs(CASES) do
    it("trains like one process, with the same bits at each level of ZeRO and of blocks: " .. dtype, function()
      local want, _, values = run(1, 3, dtype)
      local bits = {}                                            -- number of ranks -> bits
      for _, layout in ipairs(case) do
        local size, level, blocks = unpack(layout)
        local numbers, bytes, own = run(size, level, dtype, blocks)
        for i, number in ipairs(want) do
          assert(math.abs(numbers[i] / number - 1) < case.bound, ("%d ranks, level %d, number %d: %.9g, of one %.9g")
            :format(size, level, i, numbers[i], number))
        end
        for name, value in pairs(values) do
          local off = (own[name] - value):abs():amax():item()
          assert(off < case.off, ("%d ranks, level %d: %s is off by %g"):format(size, level, name, off))
        end
        bits[size] = bits[size] or bytes
        assert(bits[size] == bytes, ("%d ranks, level %d: other bits"):format(size, level))
      end
    end)
  end

  it("gathers blocks of level 3 again in backward, and those of level 2 once per step", function()
    local _, all = bmtrain.run(folder, 2, [[
      local Net = nn.class("Net", bmt.DistributedModule)
      function Net:init(levels)
        local blocks = {}
        for i, level in ipairs(levels) do blocks[i] = bmt.Block(nn.Linear(64, 64), { zero_level = level }) end
        self.blocks = bmt.TransformerBlockList(blocks)
      end
      function Net:forward(x) return self.blocks(x) end
      for _, levels in ipairs { { 3, 3 }, { 2, 2 }, { 3, 2 }, { 2, 3 } } do
        begin { config = { chunk_size = 1024 } }                   -- makes each weight a chunk
        local model, manager = Net(levels), bmt.optim.OptimManager()
        manager:add_optimizer(bmt.optim.AdamOptimizer(model:parameters()))
        local group, sent = ps.mesh.group "world", nil
        for _ = 1, 2 do
          sent = group:bytes_sent()
          manager:backward(model(ps.ones { 2, 64 }):sum())
          manager:step()
        end
        print(("sent %d %d %d"):format(levels[1], levels[2], group:bytes_sent() - sent))
        bmt.close()
      end
    ]])
    local sent = {}
    for rank = 0, 1 do
      for levels, bytes in all[rank].text:gmatch "sent (%d %d) (%d+)" do
        sent[levels] = (sent[levels] or 0) + tonumber(bytes)
      end
    end
    -- The last block is the first one in backward, so no level would free it in between.
    assert(sent["2 2"] < sent["3 3"] and sent["2 3"] < sent["3 2"])
  end)

  it("runs examples/bmtrain.lua, with any cut of its layers", function()
    local function losses_of(ranks, options)
      local pipe = assert(io.popen(("cd '%s' && OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive timeout 100 '%s' "
        .. "'%s/tools/launch.lua' --nproc-per-node %d --no-prefix '%s/examples/bmtrain.lua' %s 2>&1"):format(folder,
        paths.exe, paths.root, ranks, paths.root, options)))
      local text, losses = pipe:read "*a", {}
      pipe:close()
      for loss in text:gmatch "| loss: ([%d.]+)" do losses[#losses + 1] = tonumber(loss) end
      return losses, text
    end
    -- After 100 steps, ranks compare the state that must be equal.
    local losses, text = losses_of(2, "--iters 101 --dtype bf16 --save gpt.safetensors")
    assert(#losses == 11 and losses[3] < losses[1] - 0.5, text)
    local n = 0
    for _ in pairs(ps.load(folder .. "/gpt.safetensors")) do n = n + 1 end
    assert.equal(2 + 2 + 4 * 16, n)
    -- rows for two ranks, on two stages, each with layers that two ranks share
    local plain, whole_text = losses_of(2, "--iters 5")
    local cut, cut_text = losses_of(4, "--iters 5 --pipe-size 2 --tp-size 2")
    assert(#plain == 1 and #cut == 1, whole_text .. cut_text)
    assert.near(plain[1], cut[1], 2e-4)
  end)

  it("starts by both commands of BMTrain's guide", function()
    local script = folder .. "/train.lua"
    check.write(script, [[
      local bmt = require "ps.bmt"
      bmt.init_distributed { quiet = true }
      bmt.synchronize()
      print(("rank %d of %d"):format(bmt.rank(), bmt.world_size()))
      bmt.close()
    ]])
    local lines = {
      "python3 -m torch.distributed.launch --master_addr ${MASTER_ADDR} --master_port ${MASTER_PORT} "
        .. "--nproc_per_node ${GPU_PER_NODE} --nnodes ${NNODES} --node_rank ${NODE_RANK} train.py",
      "torchrun --nnodes=${NNODES} --nproc_per_node=${GPU_PER_NODE} --rdzv_id=1 --rdzv_backend=c10d "
        .. "--rdzv_endpoint=${MASTER_ADDR}:${MASTER_PORT} train.py",
    }
    for _, line in ipairs(lines) do
      local command = line:gsub("^python3 %-m torch.distributed.launch", "LAUNCH"):gsub("^torchrun", "LAUNCH")
        :gsub("LAUNCH", ("'%s' '%s/tools/launch.lua'"):format(paths.exe, paths.root)):gsub("train%.py", script)
      local pipe = assert(io.popen(("export OMP_NUM_THREADS=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=%d GPU_PER_NODE=2 "
        .. "NNODES=1 NODE_RANK=0; timeout 100 %s 2>&1"):format(require("ps.launch.port").free(), command)))
      local text = pipe:read "*a"
      pipe:close()
      for rank = 0, 1 do assert(text:find(("rank %d of 2"):format(rank), 1, true), line .. "\n" .. text) end
    end
  end)
end)
