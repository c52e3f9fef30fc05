-- SPDX-License-Identifier: BSD-3-Clause
-- Loaders over Lua iterators (ps.data.iterate): epochs, positions that are saved, training and resuming with them, and
-- wrong iterators.
local ps = require "ps"
local fails = require("spec.check_lib").fails
local nn, F = ps.nn, ps.F

-- Returns epochs of three named batches, whose values identify the epoch and the batch.
local function make(epoch, from)
  local i = from - 1
  return function()
    i = i + 1
    if i == 3 then return nil end
    return { x = ps.full({ 2, 4 }, 10 * epoch + i), y = ps.full({ 2, 1 }, epoch - i) }
  end
end
local function first(batch) return batch.x[0][0]:item() end

describe("a loader over a Lua iterator", function()
  for _, seeks in ipairs { false, true } do
    it("counts epochs and batches, and continues at a position" .. (seeks and ", which it seeks" or ""), function()
      local loader, seen = ps.data.iterate(make, { seeks = seeks }), {}
      for i = 1, 4 do seen[i] = first(loader:next()) end
      assert.same({ 0, 1, 2, 10 }, seen)
      local state = loader:state_dict()
      assert.same({ epoch = 1, batch = 1 }, state)
      local rest = {}
      for batch in loader:epoch() do rest[#rest + 1] = first(batch) end
      assert.same({ 11, 12 }, rest)
      assert.same({ epoch = 2, batch = 0 }, loader:state_dict())
      loader:load_state_dict(state)
      assert.equal(11, first(loader:next()))
      local other = ps.data.iterate(make, { seeks = seeks })
      other:load_state_dict { epoch = 0, batch = 3 }
      assert.equal(10, first(other:next()))
    end)
  end

  it("trains and resumes in ps.train.run with the bits of one run", function()
    local Net = nn.class "Net"
    function Net:init() self.fc = nn.Linear(4, 1) end
    function Net:forward(batch) return F.mse_loss(self.fc(batch.x * 0.1), batch.y) end
    local function run(steps, folder, start)
      ps.manual_seed(1)
      local model = Net()
      local parts = { model = model, optimizer = ps.optim.AdamW(model, { lr = 0.1 }), loader = ps.data.iterate(make) }
      local at = start and ps.checkpoints.load(folder, parts).step or nil
      ps.train.run { model = model, optimizer = parts.optimizer, loader = parts.loader, steps = steps, start = at,
        checkpoint = folder and { folder = folder } or nil, quiet = true }
      return model.fc.weight:tolist()
    end
    local folder = os.tmpname()
    os.remove(folder)
    local want = run(7)
    run(4, folder)
    assert.same(want, run(7, folder, true))
    os.execute(("rm -r '%s'"):format(folder))
  end)

  it("refuses values that are not iterators or batches, by name", function()
    fails(function() ps.data.iterate(3) end, "ps.data.iterate")
    fails(function() ps.data.iterate(function() return {} end):next() end, "make(0) returned a table")
    fails(function() ps.data.iterate(function() return function() return { 1 } end end):next() end,
      "batch 0 of epoch 0 is a table without tensors")
    fails(function() ps.data.iterate(function() return function() return "x" end end):next() end, "is a string")
    fails(function() ps.data.iterate(function() return function() end end):next() end, "has no batch")
    local loader = ps.data.iterate(make)
    loader:load_state_dict { epoch = 0, batch = 9 }
    fails(function() loader:next() end, "the position is batch 9 of epoch 0, but that epoch has only 3 batches")
    fails(function() loader:load_state_dict { epoch = 0 } end, "the position's batch")
  end)
end)
