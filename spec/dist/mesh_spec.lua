-- SPDX-License-Identifier: BSD-3-Clause
-- The groups along the axes of the mesh.
local ps = require "ps"
local mesh = require "ps.dist.mesh"

describe("the mesh", function()
  local function group_of(size) return { size = function() return size end } end

  it("has no group along any axis before ranks have joined", function()
    assert.is_false(mesh.is_open())
    assert.is_nil(mesh.group "world")
    assert.is_nil(mesh.group "dp")
    assert.equal(0, ps.rank())
    assert.equal(1, ps.world_size())
  end)

  it("has all ranks along both axes until it is cut", function()
    local group = group_of(2)
    mesh.open(group, { rank = 1, world_size = 2, local_rank = 1 })
    finally(function() mesh.close(group) end)
    assert.equal(group, mesh.group "world")
    assert.equal(group, mesh.group "dp")
    assert.equal(1, ps.rank())
    assert.equal(2, ps.world_size())
    mesh.close(group_of(2))                          -- another group, which a script created
    assert.equal(group, mesh.group "dp")
    mesh.close(group)
    assert.is_nil(mesh.group "dp")
    assert.equal(0, ps.rank())
  end)

  it("has no group along an axis of one rank", function()
    local group = group_of(1)
    mesh.open(group, { rank = 0, world_size = 1, local_rank = 0 })
    finally(function() mesh.close(group) end)
    assert.is_true(mesh.is_open())
    assert.is_nil(mesh.group "dp")
  end)

  it("refuses an unknown axis", function()
    assert.error_matches(function() mesh.group "xp" end, "no axis 'xp'; the axes are world, dp, pp, tp, cp and ep")
    assert.error_matches(function() mesh.size "stages" end, "no axis 'stages'", 1, true)
    assert.error_matches(function() mesh.group() end, "no axis 'nil'")
  end)

  -- Returns the groups that each of `size` ranks gets from a cut: axis -> ranks.
  local function lines(size, sizes)
    local all = {}
    for rank = 0, size - 1 do
      local group = { size = function() return size end, rank = function() return rank end,
        split = function(_, list, axis) return { list = list, axis = axis } end }
      mesh.open(group, { rank = rank, world_size = size, local_rank = rank })
      local made = mesh.cut(sizes)
      assert.equal(size, made.dp * made.pp * made.tp)
      all[rank] = {}
      for _, axis in ipairs { "dp", "pp", "tp" } do
        local found = mesh.group(axis)
        all[rank][axis] = found and table.concat(found.list, " ") or "-"
        assert.equal(axis, found and found.axis or axis)
      end
      assert.equal(group, mesh.group "world")
      assert.equal(rank, mesh.rank "tp" + made.tp * (mesh.rank "dp" + made.dp * mesh.rank "pp"))
      assert.same({ made.dp, made.pp, made.tp, 1 }, { mesh.size "dp", mesh.size "pp", mesh.size "tp", mesh.size "cp" })
      assert.same({ rank, size }, { mesh.rank "world", mesh.size "world" })
      assert.equal(made.pp, mesh.asked()["pipeline.stages"][1])
      assert.is_nil(mesh.group "ep")
      assert.same(made, mesh.cut(sizes))                                -- a second call is harmless
      assert.equal(mesh, ps.mesh(sizes))
      mesh.close(group)
    end
    return all
  end

  it("is cut with tp fastest, then dp, and pp slowest", function()
    local all = lines(8, { pp = 2, tp = 2 })
    assert.same({ dp = "0 2", pp = "0 4", tp = "0 1" }, all[0])
    assert.same({ dp = "5 7", pp = "1 5", tp = "4 5" }, all[5])
    assert.same({ dp = "4 6", pp = "2 6", tp = "6 7" }, all[6])
    all = lines(6, { pp = 3 })
    assert.same({ dp = "2 3", pp = "1 3 5", tp = "-" }, { dp = all[3].dp, pp = all[3].pp, tp = all[3].tp })
    assert.same({ dp = "-", pp = "0 1", tp = "-" }, lines(2, { pp = 2 })[1])
  end)

  it("refuses sizes that do not fit, and a second, different cut", function()
    local group = { size = function() return 6 end, rank = function() return 0 end,
      split = function(_, list) return list end }
    mesh.open(group, { rank = 0, world_size = 6, local_rank = 0 })
    finally(function() mesh.close(group) end)
    local function refused(sizes, text) assert.error_matches(function() mesh.cut(sizes) end, text, 1, true) end
    refused({ pp = 4 }, "dp = the rest, pp = 4, tp = 1 do not fit 6 processes")
    refused({ pp = 2, dp = 2 }, "dp = 2, pp = 2, tp = 1 do not fit 6 processes")
    refused({ pp = 0 }, "pp is 0; it must be a whole number of at least 1")
    refused({ pp = 1.5 }, "pp is 1.5; it must be a whole number of at least 1")
    refused({ cp = 2 }, "cp = 2: context parallelism does not exist yet")
    refused({ xp = 2 }, "no axis 'xp'; the axes are dp, pp and tp")
    refused(2, "ps.mesh takes a table of sizes, not a number")
    assert.same({ 6, 0 }, { mesh.size "dp", mesh.rank "pp" })
    assert.same({ dp = 6, pp = 1, tp = 1 }, mesh.cut { cp = 1 })
    assert.equal(group, mesh.group "dp")
    mesh.cut { pp = 2 }
    assert.same({ 3, 2, 1 }, { mesh.size "dp", mesh.size "pp", mesh.size "tp" })
    refused({ pp = 3 }, "cut into dp = 3, pp = 2, tp = 1; they cannot be cut into dp = 2, pp = 3, tp = 1")
  end)

  it("refuses sizes that contradict ps.init_distributed", function()
    local group = { size = function() return 4 end, rank = function() return 1 end,
      split = function(_, list) return list end }
    mesh.open(group, { rank = 1, world_size = 4, local_rank = 1 },
      { ["pipeline.stages"] = { 2, "ps.init_distributed's pipe_size" } })
    finally(function() mesh.close(group) end)
    assert.error_matches(function() ps.mesh { pp = 4 } end,
      "pp is 4 and ps.init_distributed's pipe_size is 2; they mean the same, keep one", 1, true)
    ps.mesh { pp = 2 }
    assert.same({ 2, "ps.init_distributed's pipe_size" }, mesh.asked()["pipeline.stages"])
  end)
end)
