-- SPDX-License-Identifier: BSD-3-Clause
-- The owners of chunks: for any list of chunks and number of ranks, shares are as even as whole chunks allow, and
-- stripes have at most one chunk per rank, all of one group.
local share = require "ps.engine.layout.share"
local pack = require "ps.engine.layout.pack"

local function numel(row) return row.numel end

describe("chunk_share.out", function()
  it("gives chunk k to rank k mod N if all have the same size", function()
    local rows = {}
    for i = 1, 14 do rows[i] = { group = 1, numel = 4096 } end
    local made = share.out(rows, 4, numel)
    for i = 1, 14 do
      assert.equal((i - 1) % 4, made.owner[i])
      assert.equal(math.floor((i - 1) / 4), made.stripe[i])
    end
    assert.equal(4, made.stripes)
    assert.near(4 * 4 / 14 - 1, share.imbalance(made), 1e-12)
    assert.equal(0, share.imbalance(share.out(rows, 1, numel)))
    assert.equal(0, share.imbalance(share.out({}, 3, numel)))
  end)

  it("keeps stripes and shares in order for any chunks", function()
    math.randomseed(7)
    for _ = 1, 200 do
      local rows, size, largest, total = {}, math.random(1, 9), 0, 0
      for i = 1, math.random(0, 60) do
        rows[i] = { group = math.random(1, 3), numel = 2048 * math.random(1, 40) }
        largest, total = math.max(largest, rows[i].numel), total + rows[i].numel
      end
      local made = share.out(rows, size, numel)
      local seen, group, bytes = {}, {}, {}
      for r = 1, size do bytes[r] = 0 end
      for i, row in ipairs(rows) do
        local owner, stripe = made.owner[i], made.stripe[i]
        assert.truthy(owner >= 0 and owner < size and stripe >= 0 and stripe < made.stripes)
        assert.falsy(seen[stripe * size + owner], "a stripe has two chunks of one rank")
        seen[stripe * size + owner] = true
        assert.equal(group[stripe] or row.group, row.group)
        group[stripe] = row.group
        bytes[owner + 1] = bytes[owner + 1] + row.numel
      end
      assert.same(bytes, made.bytes)
      for r = 1, size do assert.truthy(bytes[r] <= total / size + largest) end
    end
  end)

  it("makes the search choose sizes with even shares", function()
    local entries = { { numel = 50257 * 768, dtype = "bf16", trains = true } }
    for i = 1, 48 do entries[i + 1] = { numel = 3 * 768 * 768 + 64 * i, dtype = "bf16", trains = true } end
    for _, size in ipairs { 2, 3 } do
      local made = pack.search(entries, { ranks = size }).chosen.layout
      assert.truthy(share.imbalance(share.out(made.chunks, size, numel)) < 0.05)
    end
  end)
end)
