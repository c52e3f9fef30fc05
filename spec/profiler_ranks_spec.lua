-- SPDX-License-Identifier: BSD-3-Clause
-- ps.profiler.save of several ranks: a file each, on one clock. Ranks of one machine have one clock in truth, so that a
-- skew that is planted is what has to be measured.
local json = require "cjson"
local lib = require "spec.ranks_lib"
local check = require "spec.check_lib"

local SKEW_NS = 5e9            -- by which rank 1's clock is ahead

describe("profiles of ranks", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end
  local folder, about, events, all

  setup(function()
    folder, about, events = lib.folder(), {}, {}
    all = lib.check(folder, 2, ([[
      local gpt2 = require "models.gpt2"
      if rank == 1 then ps.C.ps_test_record_skew(%d) end
      ps.profiler.start()
      ps.manual_seed(3)
      local model, optimizer = ps.initialize { quiet = true,
        config = { plan_print = false, optimizer = { type = "AdamW" }, gradient_accumulation_steps = 2,
          pipeline = { stages = 2 } },
        model_func = function() return gpt2.new("tiny", { n_layer = 4, tie_word_embeddings = false }) end }
      local x = ps.randint(0, 256, { 4, 12 }, { dtype = "int32" })
      for _ = 1, 2 do
        for out in model:micro_batches(x, x) do out.loss:backward() end
        optimizer:step()
      end
      for _ = 1, 5 do group:all_reduce(ps.ones { 777 }) end
      ps.profiler.stop()
      print("wrote " .. ps.profiler.save(folder .. "/profile.json"))
      print("wrote " .. ps.profiler.save(folder .. "/plain"))
      local rows = ps.profiler.report { limits = false, quiet = true }        -- this rank's alone
      assert(#rows > 0)
      model:close()
    ]]):format(SKEW_NS))
    for rank = 0, 1 do
      local profile = json.decode(check.read(("%s/profile.rank%d.json"):format(folder, rank)))
      about[rank], events[rank] = profile.psluajit, profile.traceEvents
    end
  end)
  teardown(function() lib.remove(folder) end)

  local function of(rank, cat, name, bytes)
    local list = {}
    for _, e in ipairs(events[rank]) do
      if e.cat == cat and (not name or e.name == name) and (not bytes or e.args.bytes == bytes) then
        list[#list + 1] = e
      end
    end
    return list
  end

  it("are files named by rank, which say whose they are", function()
    for rank = 0, 1 do
      assert.same({ rank, 2 }, { about[rank].rank, about[rank].ranks })
      for _, e in ipairs(events[rank]) do assert.equal(rank, e.pid) end
      assert.truthy(all[rank].text:find(("wrote %s/profile.rank%d.json\n"):format(folder, rank), 1, true))
      assert.truthy(all[rank].text:find(("wrote %s/plain.rank%d\n"):format(folder, rank), 1, true))
    end
  end)

  it("have the skew of a clock, within the error that they state", function()
    assert.same({ 0, 0 }, { about[0].clock_offset_ns, about[0].clock_error_ns })
    local offset, wrong = about[1].clock_offset_ns, about[1].clock_error_ns
    assert.truthy(wrong > 0 and wrong < 0.2e9, wrong)
    assert.truthy(math.abs(offset + SKEW_NS) <= wrong, ("%d, %d"):format(offset, wrong))
  end)

  it("have collectives at one time on all ranks, and none before time 0", function()
    local first = math.huge
    for rank = 0, 1 do
      for _, e in ipairs(events[rank]) do first = math.min(first, e.ts or math.huge) end
    end
    assert.equal(0, first)
    local one, other = of(0, "collective", "all_reduce", 4 * 777), of(1, "collective", "all_reduce", 4 * 777)
    assert.same({ 5, 5 }, { #one, #other })
    local wrong = about[1].clock_error_ns / 1000 + 0.002
    for i, e in ipairs(one) do                                 -- nobody's ends before the other's begins
      assert.truthy(e.ts <= other[i].ts + other[i].dur + wrong)
      assert.truthy(other[i].ts <= e.ts + e.dur + wrong)
    end
  end)

  it("have the waits of a pipeline's stages for messages", function()
    for rank = 0, 1 do assert.truthy(#of(rank, "wait", "message") > 0) end
  end)
end)
