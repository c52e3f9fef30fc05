-- SPDX-License-Identifier: BSD-3-Clause
-- Checkpoints of several processes: written by all ranks together, resumed on any number of them, and a fault on one
-- rank, or in one file, is an error on every rank that names the fault.
local lfs = require "lfs"
local check = require "spec.check_lib"
local lib = require "spec.ranks_lib"
local paths = require "ps.paths"

local tool = require("ps.paths").root .. "/tools/merge.lua"
if tool:sub(1, 1) ~= "/" then tool = lfs.currentdir() .. "/" .. tool end
local folder

local function write(name, text)
  local f = assert(io.open(name, "wb"))
  f:write(text)
  f:close()
end

-- Runs a script as `size` ranks. The script has `folder`, `group`, `rank` and `size`, and additional arguments in
-- `arg`. Returns each rank's output and exit code.
local function run(size, script, ...)
  local words = {}
  for i = 1, select("#", ...) do words[i] = ("%q"):format(tostring((select(i, ...)))) end
  return lib.run(folder, size, ([[
    local ps = require "ps"
    local folder = %q
    local arg = { %s }
    local checkpoints, C = ps.checkpoints, ps.C
    local group = ps.init_distributed { seed = 3, quiet = true, timeout = 30, rendezvous = "file://%s/rendezvous" }
    local rank, size = ps.rank(), ps.world_size()
  ]]):format(folder, table.concat(words, ", "), folder) .. script)
end

-- Runs a script like `run`, and checks that every rank succeeds. `row(what)` returns the text that rank 0 printed after
-- "what ".
local function works(size, script, ...)
  local out = run(size, script, ...)
  for rank = 0, size - 1 do assert.equal(0, out[rank].code, out[rank].text) end
  return out
end

local function rows(text, what)
  local list = {}
  for row in ("\n" .. text):gmatch("\n" .. what .. " ([^\n]*)") do list[#list + 1] = row end
  return list
end

setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)
after_each(function() os.execute(("rm -rf '%s'/*"):format(folder)) end)

-- Trains from the newest checkpoint to step arg[1], and saves there. arg: step, async, "all" to save each step, the
-- ZeRO stage. The run has every kind of state: fp16 with a changing loss scale, a schedule, dropout, shuffled data, two
-- micro-batches per step, frozen parameters, and a buffer.
local TRAIN = [[
  local gpt2 = require "models.gpt2"
  local last, async, each, stage = tonumber(arg[1]), arg[2] == "async", arg[3] == "all", tonumber(arg[4] or 0)
  local f = io.open(folder .. "/text.txt", "rb")
  f:close()
  local config = { plan_print = false, zero_optimization = { stage = stage }, chunk_size = 8192,
    gradient_accumulation_steps = 2, gradient_clipping = 1,
    fp16 = { enabled = true, initial_scale_power = 2, loss_scale_window = 3, hysteresis = 1 },
    optimizer = { type = "AdamW", params = { lr = 1e-3, weight_decay = 0.1 } },
    scheduler = { type = "WarmupLR", params = { warmup_num_steps = 5 } } }
  local model, optimizer = ps.initialize { config = config, quiet = true, model_func = function()
    local made = gpt2.new("tiny", { dropout = 0.1 })
    for name, p in made:named_parameters() do if name:find("h.0.mlp", 1, true) then p:requires_grad(false) end end
    made:buffer("drawn", ps.randn { 5 })
    return made
  end }
  local loader = ps.data.loader { file = folder .. "/text.txt", batch = 12 / size, seq = 16, seed = 4 }
  local parts = { model = model, optimizer = optimizer, loader = loader, async = async, extra = { name = "x" },
    keep = 9 }
  local inner = require("ps.nn.handle").of
  local function digest()
    local list = {}
    local function add(tensors)
      for name, t in pairs(tensors) do
        t = t:detach():to("fp64"):reshape(-1)
        local weights = ps.arange(t:numel(), { dtype = "fp64" }):add(1.5):sqrt()
        list[#list + 1] = ("%s %.17g"):format(name, (t * weights):sum():item())
      end
    end
    ps.no_grad(function()
      add(model:state_dict())
      add(optimizer:state_dict(model).tensors)
    end)
    -- If ranks own their state, all ranks together have each tensor once.
    local together, seen = {}, {}
    for _, text in ipairs(require("ps.dist.agree").texts(size > 1 and group or nil, table.concat(list, ";"))) do
      for row in text:gmatch("[^;]+") do
        if not seen[row] then together[#together + 1] = row end
        seen[row] = true
      end
    end
    list = together
    table.sort(list)
    local position, rng = loader:position(), ps.rng()
    local text = ("%s|%s %s|%s %s|%d %d|%s %s %s"):format(table.concat(list, ";"), optimizer.scaler.scale,
      inner(model).scheduler:state_dict().step or "", optimizer.steps, optimizer.groups[1].lr, position.epoch,
      position.batch,
      tostring(rng.seed), tostring(rng.offset), tostring(rng.step))
    return require("bit").tohex(C.ps_xxh3(text, #text), 16)
  end
  if checkpoints.find(folder) then
    local from = checkpoints.load(folder, parts)
    assert(from.extra.name == "x" and #from.skipped == 0)
    print("loaded " .. from.step .. " " .. digest())
  end
  while inner(model).steps < last do
    local sum, tokens = 0, 0
    for _ = 1, 2 do
      local x, y = loader:next()
      local loss = model(x, y)
      sum = sum + loss:item() / 2
      tokens = tokens + x:to("fp64"):sum():item()
      model:backward(loss)
      optimizer:step()
    end
    local both = ps.tensor({ sum / size, tokens }, { dtype = "fp64" })
    if size > 1 then group:all_reduce(both) end
    print(("step %d %.9g %d"):format(inner(model).steps, both[0]:item(), both[1]:item()))
    if each then
      parts.step = inner(model).steps
      checkpoints.save(folder, parts)
    end
  end
  local wanted = digest()
  parts.step = inner(model).steps
  local at = checkpoints.save(folder, parts)
  print(("saved %d %s %s"):format(inner(model).steps, wanted, at))
  checkpoints.wait()
  model:close()
]]

local function text_file()
  local text = {}
  for i = 1, 4000 do text[i] = string.char(32 + (i * i * 7 + i) % 90) end
  write(folder .. "/text.txt", table.concat(text))
end

describe("a checkpoint of several processes", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end
  before_each(text_file)

  it("continues on any number of ranks and in any stage", function()
    local wanted = rows(works(1, TRAIN, 12)[0].text, "step")
    os.execute(("rm -r '%s'/step* '%s/latest'"):format(folder, folder))
    local got, before = {}, nil
    for i, case in ipairs { { 1, 0 }, { 3, 3 }, { 2, 0 }, { 3, 1 }, { 2, 2 }, { 1, 0 } } do
      local size = case[1]
      local out = works(size, TRAIN, 2 * i, i % 2 == 0 and "async" or "sync", "-", case[2])
      for rank = 0, size - 1 do
        local loaded = rows(out[rank].text, "loaded")[1]
        assert.equal(before, loaded, out[rank].text)                   -- every rank has all saved values
      end
      local saved = rows(out[0].text, "saved")[1]
      before = saved:match("^%d+ %x+")
      assert.equal(size > 1, saved:match("step%-%d+$") ~= nil)
      for _, row in ipairs(rows(out[0].text, "step")) do got[#got + 1] = row end
    end
    assert.equal(12, #got)
    for i, row in ipairs(got) do
      local number, loss, tokens = row:match("(%S+) (%S+) (%S+)")
      local number0, loss0, tokens0 = wanted[i]:match("(%S+) (%S+) (%S+)")
      assert.equal(number0 .. " " .. tokens0, number .. " " .. tokens)  -- exactly the same data
      assert.near(tonumber(loss0), tonumber(loss), 2e-4)                -- sums are rounded to fp16
    end
  end)

  it("continues bit for bit on the same number of ranks, from every checkpoint of a run", function()
    for stage = 0, 3, 3 do
      local whole = works(2, TRAIN, 6, "async", "all", stage)
      os.execute(("cd '%s' && rm -r step-00000006 && echo step-00000004 > latest"):format(folder))
      local again = works(2, TRAIN, 6, "sync", "-", stage)
      for rank = 0, 1 do
        assert.equal(rows(whole[rank].text, "saved")[1], rows(again[rank].text, "saved")[1])
        local wanted = rows(whole[rank].text, "step")
        assert.same({ wanted[5], wanted[6] }, rows(again[rank].text, "step"))
      end
      os.execute(("cd '%s' && rm -r step-* latest"):format(folder))
    end
  end)

  local MODEL = [[
    local nn, optim = ps.nn, ps.optim
    local class = nn.class("Pair")
    function class:init()
      for i = 1, 6 do self["layer" .. i] = nn.Linear(8 * i, 16) end
      self:buffer("count", ps.ones { 3 })
    end
    function class:forward(x)
      local sum = 0
      for i = 1, 6 do sum = sum + self["layer" .. i](x:narrow(1, 0, 8 * i)):sum() end
      return sum
    end
    local model, optimizer = ps.initialize { quiet = true, model_func = function() return class() end,
      config = { plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-2 } } } }
    local function step()
      optimizer:zero_grad()
      model:backward(model(ps.ones { 2, 48 }))
      optimizer:step()
    end
    local parts = { model = model, optimizer = optimizer, quiet = true, keep = 9 }
    local function with(more)
      local all = {}
      for key, value in pairs(parts) do all[key] = value end
      for key, value in pairs(more) do all[key] = value end
      return all
    end
    local function case(name, fn, ...)
      group:barrier()
      local ok, problem = pcall(fn, ...)
      print(("case %s|%s|%s"):format(name, tostring(ok), (tostring(problem):gsub("\n", " // "))))
      group:barrier()
    end
    -- Runs a shell command on rank 0 while the other ranks wait.
    local function shell(command)
      group:barrier()
      if rank == 0 then assert(os.execute(("cd '%s' && %s"):format(folder, command)) == 0) end
      group:barrier()
    end
  ]]

  local function cases(out, size)
    local found = {}
    for rank = 0, size - 1 do
      for _, row in ipairs(rows(out[rank].text, "case")) do
        local name, ok, text = row:match("^([^|]*)|([^|]*)|(.*)$")
        found[name] = found[name] or {}
        found[name][rank] = { ok = ok == "true", text = text }
      end
    end
    return found
  end

  -- Checks the cases. wanted: name -> texts that every rank's message must contain, or true if the case must succeed.
  local function check_cases(out, size, wanted)
    local found = cases(out, size)
    for name, parts in pairs(wanted) do
      for rank = 0, size - 1 do
        local case = found[name] and found[name][rank]
        assert.truthy(case, ("no case %s on rank %d: %s"):format(name, rank, out[rank].text))
        assert.equal(parts == true, case.ok, name .. ": " .. case.text)
        for _, part in ipairs(parts == true and {} or parts) do
          assert.truthy(case.text:find(part, 1, true), ("%s: '%s' is not in: %s"):format(name, part, case.text))
        end
      end
    end
  end

  it("is refused on every rank with the reason if files are missing, foreign, mixed or damaged", function()
    local out = works(2, MODEL .. [[
      step()
      checkpoints.save(folder .. "/a", parts)
      step()
      checkpoints.save(folder .. "/a", parts)
      checkpoints.save(folder .. "/b", parts)
      local function load(path) return function() checkpoints.load(folder .. path, parts) end end
      local TWO, ONE = "/a/step-00000002", "/a/step-00000001"
      local R0, R1 = "/rank-00000-of-00002.safetensors", "/rank-00001-of-00002.safetensors"
      shell "cp -r a good"
      local function broken(name, command)
        shell(command)
        case(name, load(TWO))
        shell "rm -r a && cp -r good a"
      end
      broken("missing", "rm ." .. TWO .. R1)
      broken("older", "cp ." .. ONE .. R1 .. " ." .. TWO .. R1)
      broken("other save", "cp b/step-00000002" .. R0 .. " ." .. TWO .. R0)
      broken("other rank", "cp ." .. TWO .. R0 .. " ." .. TWO .. R1)
      broken("no index", "rm ." .. TWO .. "/index.json")
      broken("other index", "cp ." .. ONE .. "/index.json ." .. TWO .. "/index.json")
      broken("damaged index", "sed -i 's/world_size\":2/world_size\":1/' ." .. TWO .. "/index.json")
      broken("short", "truncate -s -1 ." .. TWO .. R0)
      broken("flipped 0", "printf x | dd of=." .. TWO .. R0 .. " bs=1 seek=4200 conv=notrunc 2>/dev/null")
      broken("flipped 1", "printf x | dd of=." .. TWO .. R1 .. " bs=1 seek=4200 conv=notrunc 2>/dev/null")
      broken("not one of ours", "cp " .. folder .. "/text.txt ." .. TWO .. R1)
      shell("rm ." .. TWO .. R1)
      local from = checkpoints.load(folder .. "/a", parts)
      print("fell back " .. from.step .. " " .. from.skipped[1].problem)
      case("nothing", load "/none")
      case("good", load "/good")
    ]])
    local one, two = "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"
    check_cases(out, 2, { missing = { two, "is missing", "files of 2 ranks" },
      older = { two, "does not belong", "it is of step 1, rank 1 of 2", "not of step 2, rank 1 of 2" },
      ["other save"] = { one, "does not belong", "save" }, ["other rank"] = { two, "rank 0 of 2", "rank 1 of 2" },
      ["no index"] = { "is incomplete", "index.json" }, ["other index"] = { one, "does not belong", "step 1" },
      ["damaged index"] = { "index.json is damaged" }, short = { one }, ["flipped 0"] = { one, "tensor '", "damaged" },
      ["flipped 1"] = { two, "tensor '", "damaged" }, ["not one of ours"] = { two },
      nothing = { "holds no checkpoint" }, good = true })
    for rank = 0, 1 do assert.truthy(out[rank].text:find("fell back 1 [^\n]*is missing"), out[rank].text) end
    assert.truthy(out[0].text:find("cannot be used: ", 1, true), out[0].text)
  end)

  it("that one rank cannot write is an error on every rank, and leaves the previous one", function()
    local out = works(2, MODEL .. [[
      local at = folder .. "/a"
      step()
      checkpoints.save(at, parts)
      step()
      local function fail(nth) if rank == 1 then C.ps_test_fail_file(nth, 2 ^ 40, 28) end end
      local create = require "ps.tensor.create"
      local empty = create.empty
      local function mend()
        C.ps_test_fail_file(-1, 0, 0)
        create.empty = empty
      end
      local function save(more) return function() checkpoints.save(at, with(more or {})) end end
      fail(0)
      case("full at once", save())
      fail(2)
      case("full later", save())
      mend()
      save { async = true } ()
      checkpoints.wait()
      step()
      fail(2)
      case("begins", save { async = true })
      case("full, async", checkpoints.wait)
      mend()
      fail(2)
      case("begins again", save { async = true })
      case("full, told by the next", save())
      mend()
      save()()                                             -- releases the memory of the copy
      create.empty = function(shape, options)
        if rank == 1 and shape[1] > 10000 then error "none left" end
        return empty(shape, options)
      end
      case("memory", save { async = true })
      mend()
      case("step", save { step = 5 + rank })
      case("path", function() checkpoints.save(at .. rank, parts) end)
      case("async", save { async = rank == 0 })
      if rank == 0 then C.ps_test_fail_file(3, 2 ^ 40, 28) end
      case("rank 0 commits", save())
      mend()
      local from = checkpoints.load(at, parts)
      case("parts", function()
        checkpoints.load(at, with { loader = rank == 1 and { load_state_dict = function() end } or nil })
      end)
      print("step " .. from.step)
      shell "ls a > names"
    ]])
    local full = { "rank 1: ", "rank-00001-of-00002.safetensors", "No space left on device" }
    check_cases(out, 2, { ["full at once"] = full, ["full later"] = full, begins = true, ["full, async"] = full,
      ["begins again"] = true, ["full, told by the next"] = full,
      memory = { "rank 1: ", "none left", "Save without async" },
      step = { "the step is 6 on rank 1, 5 on rank 0" }, path = { "the path is", "/a1/", "/a0/", "on rank 1" },
      async = { "the option async is false on rank 1, true on rank 0" },
      ["rank 0 commits"] = { "rank 0: ", "No space left" }, parts = { "rank 1: ", "has no loader" } })
    for rank = 0, 1 do assert.same({ "3" }, rows(out[rank].text, "step")) end
    local names = io.open(folder .. "/names"):read("*a")
    assert.equal("latest\nstep-00000001\nstep-00000002\nstep-00000003\n", names)
  end)

  it("is divided into equal shares, or by owner if ranks do not hold the whole state", function()
    local out = works(3, MODEL .. [[
      step()
      checkpoints.save(folder .. "/whole", parts)
      -- As in the engine with sharded parameters, each rank passes the tensors that it owns.
      local owner, inner = {}, require("ps.nn.handle").of(model)
      for i, row in ipairs(inner.built.list) do
        row.owner = (i * i) % 3
        owner[row.name] = row.owner
      end
      local model_state, optimizer_state = inner.values_later, optimizer.state_dict
      rawset(inner, "values_later", function(self)
        local mine = {}
        for name, t in pairs(model_state(self)) do if (owner[name] or 0) == rank then mine[name] = t end end
        return mine
      end)
      optimizer.state_dict = function(self, of)
        local state = optimizer_state(self, of)
        for name in pairs(state.tensors) do
          if owner[name:match("^(.*)%.[^.]+$")] ~= rank then state.tensors[name] = nil end
        end
        for name in pairs(state.values.t) do if owner[name] ~= rank then state.values.t[name] = nil end end
        return state
      end
      case("one file", function() checkpoints.save(folder .. "/x.safetensors", parts) end)
      checkpoints.save(folder .. "/owned", with { async = true })
      checkpoints.wait()
      local first = inner.built.list[1].name
      owner[first] = 7
      case("owned by none", function() checkpoints.save(folder .. "/none", parts) end)
      if rank == 2 then owner[first] = 2 end
      if rank == 1 then owner[first] = 1 end
      case("owned by two", function() checkpoints.save(folder .. "/none", parts) end)
    ]])
    check_cases(out, 3, { ["one file"] = { "holds only its part", "tools/merge.lua" },
      ["owned by none"] = { "no rank saved tensor" }, ["owned by two"] = { "was saved twice" } })
    local bytes = {}
    for rank = 0, 2 do
      bytes[rank + 1] = lfs.attributes(("%s/whole/step-00000001/rank-%05d-of-00003.safetensors"):format(folder, rank),
        "size")
    end
    table.sort(bytes)
    assert.truthy(bytes[3] - bytes[1] <= 48 * 16 * 4, table.concat(bytes, " "))
    out = works(2, MODEL .. [[
      for _, name in ipairs { "whole", "owned" } do
        step()
        checkpoints.load(folder .. "/" .. name, parts)
        checkpoints.save(folder .. "/" .. name .. ".safetensors", parts)
      end
    ]])
    assert.truthy(out)
    local whole = io.open(folder .. "/whole.safetensors"):read("*a")
    local owned = io.open(folder .. "/owned.safetensors"):read("*a")
    assert.truthy(#whole > 20000)
    assert.truthy(whole == owned)
    -- Runs the tool, which must create exactly the file that one process would have written.
    local function merge(arguments)
      return check.shell(("cd '%s' && '%s' '%s' %s"):format(folder, paths.exe, tool, arguments))
    end
    for i, name in ipairs { "whole/step-00000001", "owned" } do
      local text, code = merge(("%s --out merged%d.safetensors"):format(name, i))
      assert.equal(0, code, text)
      assert.truthy(whole == io.open(("%s/merged%d.safetensors"):format(folder, i)):read("*a"))
    end
    local text, code = merge "whole"
    assert.truthy(code == 0 and text:find("whole/step-00000001-merged.safetensors", 1, true), text)
    local shard = folder .. "/whole/step-00000001/rank-00001-of-00003.safetensors"
    assert.equal(0, os.execute(("ln -s owned/step-00000001/rank-00002-of-00003.safetensors '%s/alias.safetensors'")
      :format(folder)))
    assert.equal(0, os.execute(("printf x | dd of=%s bs=1 seek=4200 conv=notrunc 2>/dev/null"):format(shard)))
    for arguments, part in pairs { ["whole --out y.safetensors"] = shard:match("[^/]*$"), whole = "exists already",
      ["owned --force --out owned/step-00000001/rank-00000-of-00003.safetensors"] = "choose another --out",
      ["owned --force --out alias.safetensors"] = "rank-00002-of-00003.safetensors, a part of the checkpoint",
      none = "holds no checkpoint", ["whole.safetensors"] = "is a file, not the folder",
      [""] = "name the shards to merge", ["owned --out x.pt"] = "not to x.pt",
      ["whole owned"] = "name the shards to merge" } do
      text, code = merge(arguments)
      assert.equal(1, code, arguments .. ": " .. text)
      assert.truthy(text:find(part, 1, true) and not text:find("traceback", 1, true), text)
    end
    text, code = merge "owned --out again.safetensors"     -- the failed calls left it intact
    assert.equal(0, code, text)
    assert.truthy(whole == io.open(folder .. "/again.safetensors"):read("*a"))
  end)

  it("falls back only within its run, and reports what is known if the others cannot be reached", function()
    local SAVE = MODEL .. [[
      local sharded = with { shards = true }
      for _ = 1, tonumber(arg[1]) do step() end
      checkpoints.save(folder .. "/a", sharded)
      step()
      if arg[2] then checkpoints.save(folder .. "/a", with { step = tonumber(arg[2]) }) end
    ]]
    works(2, SAVE, 3)                                      -- run A: step 3
    works(2, SAVE, 4, 5)                                   -- run B, a new run: steps 4, 5
    local function damage(name)
      assert.equal(0, os.execute(("cd '%s/a/%s' && printf x | dd of=rank-00001-of-00002.safetensors bs=1 seek=4200 "
        .. "conv=notrunc 2>/dev/null"):format(folder, name)))
    end
    local LOAD = MODEL .. [[case("load", function() return checkpoints.load(folder .. "/a", parts).step end)]]
    damage "step-00000005"
    local out = works(2, LOAD)
    check_cases(out, 2, { load = true })
    for rank = 0, 1 do assert.equal("4", cases(out, 2).load[rank].text) end
    damage "step-00000004"
    check_cases(works(2, LOAD), 2, { load = { "step-00000003 belongs to another run; pass its own path", "damaged" } })

    out = works(2, MODEL .. [[
      local agree = require "ps.dist.agree"
      local async = with { async = true }
      local function alone(name)                           -- waits, since no other rank can be reached
        local gather = group.all_gather
        rawset(group, "all_gather", function() error("the network is down", 0) end)
        local ok, problem = pcall(checkpoints.wait)
        rawset(group, "all_gather", gather)
        case(name .. " " .. rank, function() assert(ok, problem) end)
        case(name .. " " .. 1 - rank, function() end)
      end
      step()
      checkpoints.save(folder .. "/c", async)
      local there
      repeat
        step()
        local file = io.open(folder .. "/c/latest")
        if file then file:close() end
        there = agree.texts(group, file and "y" or "n")[1] == "y"
      until there
      alone "committed"
      checkpoints.save(folder .. "/d", async)
      alone "not committed"
    ]])
    local told = cases(out, 2)
    local text0 = told["committed 0"][0].text
    assert.falsy(told["committed 0"][0].ok)
    assert.truthy(text0:find "the network is down$" and not text0:find "saved" and not text0:find "is unknown", text0)
    for _, name in ipairs { "committed 1", "not committed 1" } do
      local text = told[name][1].text
      assert.truthy(text:find("it is unknown whether the checkpoint .* is complete %(the file latest tells%): "),
        text)
    end
    text0 = told["not committed 0"][0].text
    assert.truthy(text0:find "was not saved: .*the network is down$", text0)
  end)

  it("is completed when the scripts end without waiting, with an open or a closed group", function()
    for i, ending in ipairs { "group:close()", "os.exit(0)" } do
      works(2, MODEL .. ("step()\ncheckpoints.save(folder .. '/e%d', with { async = true })\n%s"):format(i, ending))
      assert.truthy(lfs.attributes(("%s/e%d/step-00000001/index.json"):format(folder, i)))
      assert.equal("step-00000001", io.open(("%s/e%d/latest"):format(folder, i)):read("*l"))
    end
  end)
end)
