-- SPDX-License-Identifier: BSD-3-Clause
-- Shard descriptions (ps.tensor.shard): the rectangles of a whole tensor on each rank of tensor parallelism.
local ps = require "ps"
local shard = require "ps.tensor.shard"
local fails = require("spec.check_lib").fails_saying
local nn = ps.nn

local function pieces(given) return shard.pieces(shard.new(given)) end

-- Returns the whole tensor, assembled from all ranks' shards only by their pieces, and the number of times that each
-- element was written.
local function joined(whole, given)
  local t, times, parts, any = ps.zeros(whole:shape()), ps.zeros(whole:shape()), {}, nil
  for index = 0, given.count - 1 do
    given.index, given.full_shape = index, whole:shape()
    local desc = shard.new(given)
    local part = shard.of_whole(desc, whole)
    parts[index + 1], any = part, desc
    for _, piece in ipairs(shard.pieces(desc)) do
      local from, to, counts = part, t, times
      for d, size in ipairs(piece.shape) do
        from = from:narrow(d - 1, piece.at[d], size)
        to, counts = to:narrow(d - 1, piece.offset[d], size), counts:narrow(d - 1, piece.offset[d], size)
      end
      to:copy_(from)
      counts:add_(1)
    end
  end
  assert.same(whole:tolist(), shard.join(any, parts):tolist())
  return t, times
end

describe("a shard", function()
  it("of rows is one rectangle", function()
    assert.same({ { offset = { 4, 0 }, shape = { 4, 3 }, at = { 0, 0 } } },
      pieces { dim = 0, index = 1, count = 2, full_shape = { 8, 3 } })
  end)

  it("of packed queries, keys and values is a rectangle of each block", function()
    assert.same({ { offset = { 0, 2 }, shape = { 5, 2 }, at = { 0, 0 } },
      { offset = { 0, 6 }, shape = { 5, 2 }, at = { 0, 2 } },
      { offset = { 0, 10 }, shape = { 5, 2 }, at = { 0, 4 } } },
      pieces { dim = 1, blocks = 3, index = 1, count = 2, full_shape = { 5, 12 } })
    local desc = shard.new { dim = 0, blocks = 3, index = 1, count = 2, full_shape = { 6 } }
    assert.same({ 1, 3, 5 }, shard.of_whole(desc, ps.arange(6)):tolist())
  end)

  it("of a padded vocabulary has padding after its rows, and may consist of padding", function()
    local given = { dim = 0, count = 4, full_shape = { 5, 2 }, padded = 3, index = 2 }
    assert.same({ { offset = { 4, 0 }, shape = { 1, 2 }, at = { 0, 0 } } }, pieces(given))
    local whole = ps.ones { 5, 2 }
    assert.same({ { 1, 1 }, { 0, 0 } }, shard.of_whole(shard.new(given), whole):tolist())
    given.index = 3
    assert.same({}, pieces(given))
    assert.same({ 2, 2 }, shard.shape(shard.new(given)))
    assert.same({ { 0, 0 }, { 0, 0 } }, shard.of_whole(shard.new(given), whole):tolist())
  end)

  it("of all ranks together are the whole tensor, each element once", function()
    for _, case in ipairs {
      { shape = { 12 }, dim = 0, blocks = 3, count = 4 }, { shape = { 3, 24 }, dim = 1, blocks = 3, count = 2 },
      { shape = { 7, 3 }, dim = 0, count = 4, padded = 1 }, { shape = { 2, 6, 3 }, dim = 1, count = 3 },
      { shape = { 5, 2 }, dim = 0, count = 8, padded = 3 }, { shape = { 4, 4 }, dim = 1, count = 1 },
    } do
      local whole = ps.randn(case.shape)
      local t, times = joined(whole, { dim = case.dim, blocks = case.blocks, count = case.count, padded = case.padded })
      assert.same(whole:tolist(), t:tolist())
      assert.same(ps.ones(case.shape):tolist(), times:tolist())
    end
  end)

  it("that is not equal on all ranks is refused with the numbers", function()
    local function refused(text, given, name) fails({ text }, function() shard.new(given, name) end) end
    refused("h.0.attn.c_attn.weight [4, 18]: dimension 1, 3 blocks of 6, cannot be cut into 4 equal parts",
      { dim = 1, blocks = 3, index = 0, count = 4, full_shape = { 4, 18 } }, "h.0.attn.c_attn.weight")
    refused("a parameter [7]: dimension 0, 7, cannot be cut into 2 equal parts",
      { dim = 0, index = 0, count = 2, full_shape = { 7 } })
    refused("has no dimension 1", { dim = 1, index = 0, count = 2, full_shape = { 8 } })
    refused("shard 2 of 2", { dim = 0, index = 2, count = 2, full_shape = { 8 } })
    refused("a dimension of 3 blocks cannot be padded",
      { dim = 0, blocks = 3, index = 0, count = 2, full_shape = { 9 }, padded = 3 })
  end)

  it("of another rank is refused by a load, from tables and from files of both formats", function()
    local function part(index)
      local net = nn.Linear(4, 4, { bias = false })
      ps.no_grad(function() net.weight:fill_(index) end)
      shard.set(net.weight, shard.new { dim = 0, index = index, count = 2, full_shape = { 8, 4 } })
      return net
    end
    for _, format in ipairs { "pt", "safetensors" } do
      local path = os.tmpname() .. "." .. format
      ps.save(part(1):state_dict(), path)
      local words = { "'weight' of the state is the part of rank 1 of 2 along tp, but this is rank 0 of 2",
        "load this rank's own file" }
      for _, lazy in ipairs { false, true } do
        local own, other = part(1), part(0)
        fails(words, function() other:load_state_dict(ps.load(path, { lazy = lazy })) end)
        assert.equal(0, other.weight:sum():item())
        ps.no_grad(function() own.weight:fill_(7) end)
        own:load_state_dict(ps.load(path, { lazy = lazy }))
        assert.equal(16, own.weight:sum():item())
      end
      if format == "pt" then
        ps.save({ model = part(1):state_dict(), list = { part(1).weight } }, path)
        local value = ps.load(path)
        fails(words, function() part(0):load_state_dict(value.model) end)
        assert.equal(1, shard.of(value.list[1]).index)
        assert.equal(1, ps.load(path, { lazy = true }):at("model"):shards().weight.index)
      end
      os.remove(path)
    end
  end)

  it("belongs to a parameter, and moves to the tensor that replaces it", function()
    local desc = shard.new { dim = 0, index = 0, count = 2, full_shape = { 8 } }
    local p, q = nn.Parameter(ps.zeros { 4 }), nn.Parameter(ps.zeros { 4 })
    assert.is_nil(shard.of(p))
    assert.is_false(shard.is_partial(p))
    shard.set(p, desc)
    shard.set_partial(p)
    assert.equal(desc, shard.of(p))
    shard.move(p, q)
    assert.equal(desc, shard.of(q))
    assert.is_true(shard.is_partial(q))
    local net = nn.Linear(4, 4)
    shard.set(net.weight, shard.new { dim = 0, index = 0, count = 2, full_shape = { 8, 4 } })
    net:to "bf16"
    assert.same({ 8, 4 }, shard.of(net.weight).full_shape)
    fails({ "a shard of [8] is [4], not [5]" }, function() shard.set(ps.zeros { 5 }, desc) end)
  end)
end)
