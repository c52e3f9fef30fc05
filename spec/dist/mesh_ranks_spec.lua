-- SPDX-License-Identifier: BSD-3-Clause
-- Ranks that are divided along axes: four processes on this machine, in groups over one set of connections.
local lib = require "spec.ranks_lib"

local folder
setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

local function said(all, rank, word) return all[rank].text:match(word .. ": ([^\n]*)") end

describe("four ranks", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  it("are divided into rows and columns, whose sums run at the same time", function()
    local all = lib.check(folder, 4, [[
      local mesh = ps.mesh { pp = 2, tp = 2 }
      assert(mesh.group "dp" == nil and mesh.size "dp" == 1 and mesh.group "world" == group)
      local row, column = mesh.group "tp", mesh.group "pp"
      assert(row:axis() == "tp" and row:size() == 2 and row:rank() == rank % 2 and group:axis() == nil)
      assert(column:rank() == mesh.rank "pp" and column:world_rank(1) == rank % 2 + 2 and row:world_rank() == rank)
      local function one(value, dtype) return ps.tensor({ value }, { dtype = dtype or "fp32" }) end
      print(("sums: %d %d %d"):format(row:all_reduce(one(10 ^ rank)):item(), column:all_reduce(one(10 ^ rank)):item(),
        group:all_reduce(one(10 ^ rank)):item()))
      print(("others: %d %d %d"):format(group:all_reduce(one(rank, "int64")):item(),
        row:all_reduce(one(rank), "max"):item(), column:all_reduce(one(rank, "int32"), "min"):item()))
      assert(ps.any_rank(rank == 3) == true)
      -- Ranks reach the calls of their rows and columns at different times.
      if rank == 2 then os.execute "sleep 0.2" end
      row:barrier()
      -- A sum as an op along an axis has a gradient.
      local x = ps.nn.Parameter(ps.tensor({ rank + 1 }, { dtype = "fp32" }))
      local y = row:sum(x)
      y:backward()
      print(("op: %d %d"):format(y:item(), x:grad():item()))
      -- If ranks disagree, this is an error on all of them, and the group continues.
      local ok, problem = pcall(group.split, group, rank == 3 and { 2, 3 } or { 0, 1, 2 }, "ep")
      print("lists: " .. tostring(not ok and problem))
      print("wrong: " .. tostring(select(2, pcall(group.split, group, { rank, "x" }, "ep"))))
      ok, problem = pcall(function()
        if rank == 3 then column:barrier() else column:all_reduce(one(1)) end
      end)
      print("differ: " .. tostring(not ok and problem))
      group:barrier()
      -- Closing a group closes the groups that were split from it.
      local rest = group:split(rank < 3 and { 0, 1, 2 } or { 3 }, "rest")
      group:close()
      print("closed: " .. tostring(select(2, pcall(rest.barrier, rest))))
      assert(mesh.group "tp" == nil and ps.world_size() == 1)
    ]])
    local rows, columns = { [0] = 11, 11, 1100, 1100 }, { [0] = 101, 1010, 101, 1010 }
    for rank = 0, 3 do
      assert.equal(("%d %d 1111"):format(rows[rank], columns[rank]), said(all, rank, "sums"))
      assert.equal(("6 %d %d"):format(rank < 2 and 1 or 3, rank % 2), said(all, rank, "others"))
      assert.equal(rank < 2 and "3 2" or "7 2", said(all, rank, "op"))
      assert.truthy(said(all, rank, "lists"):find("rank 3 makes a group ep of 2 ranks, rank 2 among them, which makes "
        .. "a group ep of 3", 1, true), said(all, rank, "lists"))
      assert.truthy(said(all, rank, "closed"):find "this group is closed")
      assert.truthy(said(all, rank, "wrong"):find("ranks[2] is x; it takes the number of a rank", 1, true))
      local differ = said(all, rank, "differ")
      if rank % 2 == 0 then assert.equal("false", differ)
      else assert.truthy(differ:find("the ranks of pp disagree: rank 1 is in all_reduce (call 2, fp32, 4 bytes), "
        .. "rank 3 in barrier", 1, true), differ) end
    end
  end)

  it("get the rows of their copy of the model, and dropout's random numbers for these rows", function()
    local all = lib.check(folder, 4, [[
      local mesh = ps.mesh { pp = 2 }
      local path = folder .. "/tokens"
      if rank == 0 then
        local ids = {}
        for i = 1, 400 do ids[i] = i end
        ps.data.write_tokens(path, ids)
      end
      group:barrier()
      local loader = ps.data.loader { shards = { path }, batch = 3, seq = 4, shuffle = false }
      local rows = {}
      for _ = 1, 2 do
        local x = loader:next()
        for _, row in ipairs(x:tolist()) do rows[#rows + 1] = row[1] end
        rows[#rows + 1] = "at " .. tonumber(ps.rng().sample)
      end
      print("rows: " .. table.concat(rows, " ") .. (" of %d"):format(loader.world_size))
    ]])
    local copies = { "1 5 9 at 0 25 29 33 at 6 of 2", "13 17 21 at 3 37 41 45 at 9 of 2" }
    for rank = 0, 3 do assert.equal(copies[rank % 2 + 1], said(all, rank, "rows")) end
  end)

  it("train two copies of two stages with the bits of two processes: rows, dropout, sums", function()
    local TRAIN = [[
      local gpt2 = require "models.gpt2"
      local path = folder .. "/tokens"
      if rank == 0 then
        local ids = {}
        for i = 1, 2000 do ids[i] = i * 7 % 250 end
        ps.data.write_tokens(path, ids)
      end
      group:barrier()
      local model, optimizer = ps.initialize { quiet = true, config = { gradient_accumulation_steps = 4,
          plan_print = false, gradient_clipping = 0.5, optimizer = { type = "AdamW", params = { lr = 1e-2 } } },
        model_func = function() return gpt2.new("tiny", { dropout = 0.1, tie_word_embeddings = false }) end }
      local loader = ps.data.loader { shards = { path }, batch = 8, seq = 12, seed = 3 }
      for step = 1, 2 do
        optimizer:zero_grad()
        for out in model:micro_batches(loader:next()) do
          print(("loss %d: %.17g"):format(step, out.loss:item()))
          model:backward(out.loss)
        end
        optimizer:step()
      end
      for name, t in pairs(model:state_dict()) do
        local t64 = t:to "fp64":reshape(-1)
        local weights = ps.arange(1, t64:numel() + 1, 1, { dtype = "fp64" })
        print(("tensor %s: %.17g %.17g"):format(name, t64:sum():item(), (t64 * weights):sum():item()))
      end
    ]]
    local function lines(text, word)
      local list = {}
      for line in text:gmatch("(" .. word .. " [^\n]*)") do list[#list + 1] = line end
      return list
    end
    local two = lib.check(folder, 2, TRAIN)
    local all = lib.check(folder, 4, "ps.mesh { pp = 2 }" .. TRAIN)
    local known, seen = {}, {}
    for _, line in ipairs(lines(two[0].text, "tensor")) do known[line] = true end
    for rank = 0, 3 do  -- ranks 0 and 2 form one replica, and ranks 1 and 3 the other
      local losses = lines(all[rank].text, "loss")
      assert.equal(8, #losses)
      assert.same(lines(two[rank % 2].text, "loss"), losses)
      for _, line in ipairs(lines(all[rank].text, "tensor")) do
        assert.truthy(known[line], line)
        seen[line] = true
      end
    end
    for line in pairs(known) do assert.truthy(seen[line], line) end
    assert.not_same(lines(two[0].text, "loss"), lines(two[1].text, "loss"))
  end)
end)
