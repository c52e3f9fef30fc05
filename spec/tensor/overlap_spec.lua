-- SPDX-License-Identifier: BSD-3-Clause
-- Writing in place if source and destination share bytes, and if elements of the destination do.
local ps = require "ps"
local fails = require("spec.check_lib").fails

local DEVICES = { "cpu", "ref" }

local function range(n, device, dtype) return ps.arange(0, n, 1, { dtype = dtype or "fp32", device = device }) end

describe("a copy between views that overlap", function()
  it("has the result of a copy from a clone", function()
    for _, device in ipairs(DEVICES) do
      local w = ps.tensor({ { 1, 2 }, { 3, 4 } }, { device = device })
      w:copy_(w:t())
      assert.same({ { 1, 3 }, { 2, 4 } }, w:tolist())
      w:copy_(w[0])
      assert.same({ { 1, 3 }, { 1, 3 } }, w:tolist())
      w:copy_(w)
      assert.same({ { 1, 3 }, { 1, 3 } }, w:tolist())
      w[{ {}, 0 }] = w[{ {}, 1 }]                               -- adjacent, so nothing overlaps
      assert.same({ { 3, 3 }, { 3, 3 } }, w:tolist())
      local n = 64
      local big = range(n * n, device):reshape(n, n):contiguous()
      local want = big:t():contiguous()
      big:copy_(big:t())
      assert.equal(0, big:ne(want):long():sum():item())
    end
  end)

  it("shifts by any distance in both directions", function()
    for _, m in ipairs { 5, 2 ^ 18 + 3 } do
      for _, dtype in ipairs { "fp32", "uint8" } do
        for way = 0, 1 do
          local v = range(m, "cpu"):to(dtype):contiguous()
          local from, to = v:narrow(0, way, m - 1), v:narrow(0, 1 - way, m - 1)
          local want = from:clone()
          to:copy_(from)
          assert.equal(0, to:ne(want):long():sum():item())
        end
      end
    end
  end)

  it("adds the earlier values", function()
    for _, device in ipairs(DEVICES) do
      local v = range(6, device)
      v:narrow(0, 1, 5):add_(v:narrow(0, 0, 5))
      assert.same({ 0, 1, 3, 5, 7, 9 }, v:tolist())
      v:add_(v)
      assert.same({ 0, 2, 6, 10, 14, 18 }, v:tolist())
      ps.ops.scale_by_(v, v[1], 1)                              -- reads the element that it changes
      assert.same({ 0, 4, 12, 20, 28, 36 }, v:tolist())
    end
  end)
end)

describe("a tensor whose elements share memory", function()
  it("is not written into element by element", function()
    for _, device in ipairs(DEVICES) do
      local e = ps.zeros({ 1 }, { device = device }):expand(4)
      local said = { "expanded", ":clone()" }
      fails(function() e:copy_(range(4, device)) end, "copy_", unpack(said))
      fails(function() e:add_(range(4, device)) end, unpack(said))
      fails(function() e:mul_(2) end, unpack(said))
      fails(function() e[{ { 0, 2 } }] = range(2, device) end, unpack(said))
      assert.same({ 0, 0, 0, 0 }, e:tolist())
      e:fill_(3)                                                -- one value for all elements
      assert.same({ 3, 3, 3, 3 }, e:tolist())
      e[{ { 1, 2 } }] = ps.tensor({ 7 }, { device = device })   -- one element
      assert.same({ 7, 7, 7, 7 }, e:tolist())
      local none = ps.zeros({ 1, 0 }, { device = device }):expand(4, 0)
      none:copy_(none:clone())
    end
  end)
end)
