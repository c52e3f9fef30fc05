-- SPDX-License-Identifier: BSD-3-Clause
-- ps.profiler.save of several ranks: a file for each rank, on one clock. Ranks of one machine share a clock, so a
-- simulated skew must be measured exactly.
local ps = require "ps"
local json = require "cjson"
local lib = require "spec.ranks_lib"
local check = require "spec.check_lib"

local SKEW_NS = 5e9            -- nanoseconds by which rank 1's clock is ahead

describe("profiles of ranks", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end
  local folder, about, events, all

  setup(function()
    folder, about, events = lib.folder(), {}, {}
    all = lib.check(folder, 2, ([[
      local gpt2 = require "models.gpt2"
      if rank == 1 then ps.C.ps_test_record_skew(%d) end
      -- Runs calls that comms_logger counts. Two chunks of one layer each form a stripe. ZeRO stage 1 reduces its
      -- gradients and gathers its parameters once per step.
      local function counted(logger, steps)
        print "begin"
        local logged, by = ps.initialize { config = { plan_print = false, chunk_size = 128 * 128 + 128,
          zero_optimization = { stage = 1 }, comms_logger = logger }, model_func = function()
            return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
          end }
        for _ = 1, steps do
          logged:backward(logged(ps.ones { 2, 128 }):sum())
          by:step()
        end
        for _ = 1, 7 do group:all_reduce(ps.ones { 555 }) end
        group:all_gather(ps.zeros { 2, 300 }, ps.ones { 1, 300 })
        print "quiet"
        local list, told = {}, ps.comm.log_rows()
        print "told"
        assert(#ps.comms_logger.log_summary() == #told)
        assert(ps.comms_logger == ps.comm)                  -- the older name
        for i, row in ipairs(told) do
          list[i] = ("%%s %%d %%d %%d %%.17g %%.17g %%.17g"):format(row.op, row.bytes, row.count, row.ranks,
            row.seconds, row.algbw, row.busbw)
        end
        print("stripe: " .. 2 * ps.chunks()[1].nbytes)
        print("rows: " .. table.concat(list, "; "))
        logged:close()
      end
      counted({ enabled = true, verbose = true }, 3)
      counted({ enabled = true, prof_all = false, prof_ops = { "all_reduce", "all_gather_into_tensor" } }, 2)
      print "begin"
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
      ps.no_grad(function()                                      -- 10 rows of each rank, in pieces of 3, 3, 3 and 1
        local w = ps.ones { 32, 64 }
        group:gathered_linear(ps.ones { 10, 64 }, w, nil, { pieces = 4 })
        group:linear_scattered(ps.ones { 20, 64 }, w, { pieces = 4 })
      end)
      ps.profiler.stop()
      print("wrote " .. ps.profiler.save(folder .. "/profile.json", { align = true }))
      print("wrote " .. ps.profiler.save(folder .. "/plain", { align = true }))
      if ps.rank() == 0 then print("wrote " .. ps.profiler.save(folder .. "/alone.json")) end
      group:all_reduce(ps.ones { 7 })
      local rows = ps.profiler.report { limits = false, quiet = true }        -- only this rank's rows
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

  it("are files named by rank, which contain the rank", function()
    for rank = 0, 1 do
      assert.same({ rank, 2 }, { about[rank].rank, about[rank].ranks })
      for _, e in ipairs(events[rank]) do assert.equal(rank, e.pid) end
      assert.truthy(all[rank].text:find(("wrote %s/profile.rank%d.json\n"):format(folder, rank), 1, true))
      assert.truthy(all[rank].text:find(("wrote %s/plain.rank%d\n"):format(folder, rank), 1, true))
    end
  end)

  it("may be saved by one rank alone", function()
    assert.truthy(all[0].text:find(("wrote %s/alone.rank0.json\n"):format(folder), 1, true))
    assert.is_nil(io.open(folder .. "/alone.rank1.json"))
    local alone = json.decode(check.read(folder .. "/alone.rank0.json"))
    assert.same({ 0, 2, 0, 0 }, { alone.psluajit.rank, alone.psluajit.ranks, alone.psluajit.clock_offset_ns,
      alone.psluajit.clock_error_ns })
    assert.same(#events[0], #alone.traceEvents)
    for i, e in ipairs(alone.traceEvents) do                   -- the same events with another zero
      local other = events[0][i]
      assert.equal(other.name, e.name)
      if e.ts then assert.near(other.ts - events[0][1].ts, e.ts - alone.traceEvents[1].ts, 0.002) end
    end
  end)

  it("have the skew of a clock, within the stated error", function()
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
    for i, e in ipairs(one) do                                 -- the two overlap in time
      assert.truthy(e.ts <= other[i].ts + other[i].dur + wrong)
      assert.truthy(other[i].ts <= e.ts + e.dur + wrong)
    end
  end)

  it("have the messages of a pipeline's stages, with their bytes", function()
    local sent = { [0] = of(0, "collective", "send"), of(1, "collective", "send") }
    local got = { [0] = of(0, "collective", "recv"), of(1, "collective", "recv") }
    for rank = 0, 1 do
      local nbytes, count = 0, 0
      for _, e in ipairs(sent[rank]) do
        nbytes, count = nbytes + e.args.bytes, count + (e.args.bytes > 0 and 1 or 0)
        assert.equal(2, e.args.ranks)
      end
      for _, e in ipairs(got[1 - rank]) do nbytes = nbytes - e.args.bytes end
      assert.same({ 0, 4 }, { nbytes, count })                 -- two steps of two micro-batches
    end
  end)

  it("have the waits of a pipeline's stages for messages", function()
    for rank = 0, 1 do assert.truthy(#of(rank, "wait", "message") > 0) end
  end)

  it("have rows that are exchanged in pieces, each exchange separately, and the products during them", function()
    for rank = 0, 1 do
      for name, features in pairs { column = 64, row = 32 } do
        local op = of(rank, "op", name .. "_linear")
        assert.equal(1, #op)
        op = op[1]
        local call = name == "row" and "reduction in a row layer" or "gather in a column layer"
        local pieces, bytes = of(rank, "collective", call), {}
        for i, e in ipairs(pieces) do bytes[i] = e.args.bytes / (2 * features * 4) end
        assert.same({ 3, 3, 3, 1 }, bytes)
        local products, rows = {}, {}
        for _, e in ipairs(of(rank, "part", "linear")) do
          if op.ts <= e.ts and e.ts + e.dur <= op.ts + op.dur + 0.002 then
            products[#products + 1], rows[#rows + 1] = e, e.args.rows
          end
        end
        assert.same(name == "row" and { 3, 3, 3, 1, 10 } or { 10, 3, 3, 3, 1 }, rows)
        assert.same({ "fp32", "cpu" }, { products[1].args.dtype, products[1].args.device })
        -- While a piece is sent, this rank's own rows are multiplied.
        local own = products[name == "row" and 5 or 1]
        for _, e in ipairs(pieces) do
          assert.truthy(op.ts <= e.ts and e.ts <= own.ts and own.ts + own.dur <= e.ts + e.dur + 0.002)
          assert.truthy(e.ts + e.dur <= op.ts + op.dur + 0.002)
        end
      end
    end
  end)

  -- Returns the rows of the n-th engine whose rows are requested, and the rank's output in the meantime.
  local function counted(rank, n)
    local at, rows = 1, {}
    for _ = 1, n do at = select(2, all[rank].text:find("begin\n", at, true)) + 1 end
    local text = all[rank].text:sub(at, (all[rank].text:find("begin\n", at, true) or 0) - 1)
    for row in text:match("rows: ([^\n]*)"):gmatch "[^;]+" do
      local op, more = row:match "^ ?([^%d]+) (%d.*)$"
      local n_bytes, count, ranks, seconds, algbw, busbw = more:match "(%S+) (%S+) (%S+) (%S+) (%S+) (%S+)"
      rows[#rows + 1] = { op = op, bytes = tonumber(n_bytes), count = tonumber(count), ranks = tonumber(ranks),
        seconds = tonumber(seconds), algbw = tonumber(algbw), busbw = tonumber(busbw) }
    end
    return rows, text
  end

  local function row_of(rows, op, nbytes)
    for _, row in ipairs(rows) do if row.op == op and row.bytes == nbytes then return row end end
  end

  it("are summed by comms_logger: calls and bytes by formulas, bus bandwidth as in NCCL's tests", function()
    for rank = 0, 1 do
      local rows, text = counted(rank, 1)
      local stripe = tonumber(text:match "stripe: (%d+)")
      assert.truthy(stripe >= 2 * (128 * 128 + 128) * 4)
      assert.equal(7, row_of(rows, "all_reduce", 4 * 555).count)
      assert.equal(1, row_of(rows, "all_gather", 4 * 300 * 2).count)
      assert.equal(3, row_of(rows, "reduction of chunks", stripe).count)
      assert.equal(3, row_of(rows, "gather of chunks", stripe).count)
      for _, row in ipairs(rows) do
        assert.equal(2, row.ranks)
        assert.truthy(row.seconds > 0)
        assert.truthy(math.abs(row.algbw * row.seconds - row.bytes * row.count) <= 1e-9 * row.bytes * row.count, row.op)
        local factor = (row.op:find "reduce" and not row.op:find "scatter") and 1 or (row.op:find "gather"
          or row.op == "reduction of chunks") and 0.5 or 1               -- 2 (n - 1) / n and (n - 1) / n for two ranks
        assert.truthy(math.abs(row.busbw - factor * row.algbw) <= 1e-9 * row.algbw, row.op)
      end
    end
    for call, factors in pairs { [0] = { 1.5, 1.75 }, [1] = { 0.75, 0.875 }, [2] = { 0.75, 0.875 }, [3] = { 1, 1 } } do
      assert.same(factors, { ps.C.ps_calls_bus(call, 4), ps.C.ps_calls_bus(call, 8) })
    end
  end)

  it("are printed by comms_logger: each call if it is verbose, and DeepSpeed's table, by rank 0", function()
    local _, first = counted(0, 1)
    assert.truthy(first:find("quiet\ntold\n", 1, true))                 -- log_rows prints nothing
    assert.equal(7, select(2, first:gsub("comm op: all_reduce | time %(ms%): [%d.]+ | msg size: 2220 B | algbw", "")))
    local heading = "Comm%. Op +Message Size +Count +Total Latency%(ms%) +Avg Latency%(ms%) +algbw %(Gbps%) +busbw"
    assert.equal(2, select(2, first:gsub(heading, "")))                   -- on request, and when the engine is closed
    assert.matches("\nall_reduce +2%.2 KiB +7 +%S+ +%S+ +%S+ +%S+\n", first)
    for n = 1, 2 do
      local _, other = counted(1, n)
      assert.falsy(other:find "comm op:" or other:find "Comm%.")
    end
    assert.falsy(select(2, counted(0, 2)):find "comm op:")
  end)

  it("are summed for the calls that comms_logger names", function()
    for rank = 0, 1 do
      local rows, seen = counted(rank, 2), {}
      for _, row in ipairs(rows) do seen[row.op] = true end
      assert.same({ all_reduce = true, all_gather = true, ["gather of chunks"] = true }, seen)
      assert.equal(7, row_of(rows, "all_reduce", 4 * 555).count)
    end
  end)
end)
