-- SPDX-License-Identifier: BSD-3-Clause
-- Who is together along an axis of the mesh.
local ps = require "ps"
local mesh = require "ps.mesh"

describe("the mesh", function()
  local function group_of(size) return { size = function() return size end } end

  it("has nobody along any axis before ranks have joined", function()
    assert.is_false(mesh.is_open())
    assert.is_nil(mesh.group "world")
    assert.is_nil(mesh.group "dp")
    assert.equal(0, ps.rank())
    assert.equal(1, ps.world_size())
  end)

  it("has all ranks along both axes until they part", function()
    local group = group_of(2)
    mesh.open(group, { rank = 1, world_size = 2, local_rank = 1 })
    finally(function() mesh.close(group) end)
    assert.equal(group, mesh.group "world")
    assert.equal(group, mesh.group "dp")
    assert.equal(1, ps.rank())
    assert.equal(2, ps.world_size())
    mesh.close(group_of(2))                          -- another group, that a script made
    assert.equal(group, mesh.group "dp")
    mesh.close(group)
    assert.is_nil(mesh.group "dp")
    assert.equal(0, ps.rank())
  end)

  it("has nobody along an axis of one rank", function()
    local group = group_of(1)
    mesh.open(group, { rank = 0, world_size = 1, local_rank = 0 })
    finally(function() mesh.close(group) end)
    assert.is_true(mesh.is_open())
    assert.is_nil(mesh.group "dp")
  end)

  it("refuses an axis that there is not", function()
    assert.error_matches(function() mesh.group "tp" end, "no axis 'tp'; there are world and dp")
    assert.error_matches(function() mesh.group() end, "no axis 'nil'")
  end)
end)
