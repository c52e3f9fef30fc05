-- SPDX-License-Identifier: BSD-3-Clause
-- The executor of pipelines in four processes, by bench/pipeline.lua: by the virtual clock, its makespan equals the
-- formula's.
local cjson = require "cjson"
local paths = require "ps.paths"
local no_gloo = require("spec.ranks_lib").no_gloo()

describe("a pipeline of four processes", function()
  it("has the times of formulas and the simulator by the virtual clock", function()
    if no_gloo then return pending(no_gloo) end
    local command = "OMP_NUM_THREADS=1 timeout 300 '%s' '%s/bench/pipeline.lua' --clock-only --tick 0.001 --rounds 1"
    local p = assert(io.popen(command:format(paths.exe, paths.root) .. " 2>&1"))
    local text = p:read "*a"
    p:close()
    local result = cjson.decode(text:match("(%b{})\n$") or error(text))
    assert.same({ gpipe = 33, ["1f1b"] = 33, interleaved = 57, looped_bfs = 57, zb_h1 = 27, zb_v = 51 },
      result.makespan)
    local work = { gpipe = 24, ["1f1b"] = 24, interleaved = 48, looped_bfs = 48, zb_h1 = 24, zb_v = 48 }
    for name, makespan in pairs(result.makespan) do       -- the text has 14 digits
      assert.truthy(math.abs(result.bubble[name] - (makespan - work[name]) / makespan) < 1e-13, name)
    end
    assert.same({ gpipe = { 8, 8, 8, 8 }, ["1f1b"] = { 4, 3, 2, 1 }, interleaved = { 11, 9, 7, 5 },
      looped_bfs = { 16, 16, 16, 16 }, zb_h1 = { 4, 3, 2, 1 }, zb_v = { 8, 8, 8, 8 } }, result.in_flight)
    for name, same in pairs(result.linked_as_simulated) do
      assert.is_true(same, name)
      assert.truthy(result.bubble_links[name] > result.bubble[name], name)
      assert.truthy(result.cut_over_best[name] <= 1.01, name)
      assert.truthy(result.makespan_over_equal[name] < 0.9, name)
      assert.truthy(result.bubble_wall[name] > 0, name)
    end
  end)
end)
