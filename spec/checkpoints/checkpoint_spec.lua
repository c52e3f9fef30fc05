-- SPDX-License-Identifier: BSD-3-Clause
-- Checkpoints of one process: every byte has a checksum, a damaged checkpoint is named and the previous one is used,
-- and a failed save does not change what was saved. In the background: checkpoint_async_spec.lua; several processes:
-- checkpoint_ranks_spec.lua; killed ones: checkpoint_kill_spec.lua.
local ps = require "ps"
local lfs = require "lfs"
local safetensors = require "ps.io.safetensors"
local lib = require "spec.checkpoint_lib"
local checkpoints, C = ps.checkpoints, ps.C
local path, read, write, flipped, names, child = lib.path, lib.read, lib.write, lib.flipped, lib.names, lib.child
local new, step, values, fails, said, saved = lib.new, lib.step, lib.values, lib.fails, lib.said, lib.saved

local ENOSPC, EIO = 28, 5
local folder

before_each(function() folder = lib.open() end)
after_each(lib.close)

describe("a checkpoint's bytes", function()
  for _, form in ipairs { "file", "folder" } do
    it("are covered by checksums, all of them: " .. form, function()
      local run = new()
      saved(run, 1, { shards = form == "folder" })
      local at = checkpoints.find(folder)
      local files = form == "file" and { at } or { at .. "/index.json", at .. "/rank-00000-of-00001.safetensors" }
      for _, name in ipairs(files) do
        local good = read(name)
        assert.truthy(#good > 500 and #good < 20000)
        local tensors = 0
        for i = 0, #good - 1 do
          if good:byte(i + 1) ~= 32 or i % 64 == 0 then       -- most of the header's padding is skipped
            write(name, flipped(good, i))
            local problem = fails(function() checkpoints.load(at, run) end, name)
            if problem:find("tensor '", 1, true) then tensors = tensors + 1 end
          end
        end
        if name:match("safetensors$") then assert.equal(3 * 15 * 4, tensors) end   -- weight, bias, moments
        write(name, good)
      end
      assert.equal(1, checkpoints.load(at, run).step)
    end)
  end

  it("may be older than checksums, or be checked by hand", function()
    local run = new()
    saved(run, 1)
    local at = checkpoints.find(folder)
    local file = safetensors.open(at)
    local tensors, text = {}, file.metadata.psluajit
    for _, name in ipairs(file:names()) do tensors[name] = file:tensor(name) end
    assert.equal(16, #file:checksum(file:names()[1]))
    file:close()
    local wanted = values(run)
    step(run, 2)
    -- like another program that rewrites the file without the checksums
    safetensors.save(path("other.safetensors"), tensors, { format = "pt", psluajit = text })
    fails(function() checkpoints.load(path("other.safetensors"), run) end, "it has no checksums", "verify = false")
    checkpoints.load(path("other.safetensors"), { model = run.model, optimizer = run.optimizer, verify = false })
    assert.equal(wanted, values(run))
    step(run, 2)
    safetensors.save(path("old.safetensors"), tensors, { psluajit = (text:gsub('"version":2', '"version":1')) })
    checkpoints.load(path("old.safetensors"), run)
    assert.equal(wanted, values(run))
    fails(function() safetensors.save(path("x.safetensors"), tensors, { xxh3_64 = "0" }) end, "xxh3_64", "checksums")
    write(path("other.safetensors"), "")
    local damaged = flipped(read(at), #read(at) - 1)
    write(at, damaged)
    fails(function() ps.load(at) end, "tensor '", at)                -- ps.load also compares checksums
    assert.truthy(ps.load(at, { verify = false }))
  end)
end)

describe("a folder of checkpoints", function()
  it("falls back to the one before a damaged one, and prints that", function()
    for _, sharded in ipairs { false, true } do
      local run = new()
      local after = saved(run, 3, { shards = sharded })
      local newest = checkpoints.find(folder)
      local name = sharded and newest .. "/rank-00000-of-00001.safetensors" or newest
      write(name, flipped(read(name), #read(name) - 3))
      fails(function() checkpoints.load(folder, { model = run.model, optimizer = run.optimizer, fallback = false }) end,
        "tensor '", name)
      local from, text = said(function() return checkpoints.load(folder, run) end)
      assert.equal(2, from.step)
      assert.equal(after[2], values(run))
      assert.truthy(from.skipped[1].file == newest and from.skipped[1].problem:find(name, 1, true))
      for _, part in ipairs { "tensor '", name, "continuing from the checkpoint", "step-00000002" } do
        assert.truthy(text:find(part, 1, true), text)
      end
      step(run, 3)                                                     -- and saves step 3 again
      checkpoints.save(folder, { model = run.model, optimizer = run.optimizer, shards = sharded })
      from, text = said(function() return checkpoints.load(folder, run) end)
      assert.equal(3, from.step)
      assert.equal("", text)
      assert.equal(after[3], values(run))
      os.execute(("rm -r '%s' && mkdir '%s'"):format(folder, folder))
    end
  end)

  it("can be identified before anything is made for it", function()
    for _, sharded in ipairs { false, true } do
      local run = new()
      saved(run, 2, { shards = sharded, extra = { options = { lr = 0.1, names = { "a", "b" } } } })
      local newest = checkpoints.find(folder)
      local info = checkpoints.info(folder)
      assert.same({ step = 2, file = newest, extra = { options = { lr = 0.1, names = { "a", "b" } } } }, info)
      assert.same(info, checkpoints.info(newest))
      local name = sharded and newest .. "/index.json" or newest
      write(name, read(name):sub(1, 100))
      assert.equal(1, checkpoints.info(folder).step)                   -- from which load would also continue
      fails(function() checkpoints.info(newest) end, name)
      os.execute(("rm -r '%s' && mkdir '%s'"):format(folder, folder))
    end
    fails(function() checkpoints.info(folder) end, "holds no checkpoint")
    fails(function() checkpoints.info() end, "ps.checkpoints.info: the path")
  end)

  it("falls back only within a run: a process that loads continues that run, another one begins a new run",
    function()
      local SAVE = [[
        local ps = require "ps"
        local model = ps.nn.Linear(4, 3)
        local parts = { model = model, optimizer = ps.optim.AdamW(model, { lr = 1e-2 }), keep = 9 }
        if %q ~= "" then ps.checkpoints.load(arg[1] .. %q, parts) end
        for _, step in ipairs { %s } do
          parts.step = step
          ps.checkpoints.save(arg[1], parts)
        end
      ]]
      local function save(from, steps)
        local out, code = child(SAVE:format(from, from, steps))
        assert.equal(0, code, out)
      end
      local function damage(number, header)
        local name = path(("step-%08d.safetensors"):format(number))
        write(name, flipped(read(name), header and 60 or #read(name) - 3))
      end
      local run = new()
      local function loaded() return (said(function() return checkpoints.load(folder, run) end)) end
      save("", "10, 20")                                               -- run A
      save("", "15")                                                   -- run B
      local good = read(path "step-00000015.safetensors")
      for _, header in ipairs { false, true } do                       -- `latest` also contains the run
        damage(15, header)
        said(function()
          fails(function() checkpoints.load(folder, run) end, "holds no checkpoint that can be used", "damaged",
            "step-00000010.safetensors belongs to another run; pass its own path")
        end)
        write(path "step-00000015.safetensors", good)
      end
      assert.equal(10, checkpoints.load(path "step-00000010.safetensors", run).step)
      save("/step-00000010.safetensors", "16")                         -- run A continues
      damage(16)
      local from = loaded()
      assert.equal(10, from.step)                                      -- and not step 15 of B
      assert.equal(2, #from.skipped)
      assert.truthy(from.skipped[2].problem:find("00000015.safetensors belongs to another run", 1, true))
      save("", "17")                                                   -- run C
      damage(17)
      assert.falsy(pcall(loaded))

      -- Older checkpoints contain no run and count as one run.
      for _, number in ipairs { 16, 17 } do os.remove(path(("step-%08d.safetensors"):format(number))) end
      for _, number in ipairs { 10, 15 } do
        local name = path(("step-%08d.safetensors"):format(number))
        local file = safetensors.open(name)
        local tensors, text = {}, file.metadata.psluajit
        for _, tensor in ipairs(file:names()) do tensors[tensor] = file:tensor(tensor) end
        file:close()
        safetensors.save(name, tensors, { format = "pt", psluajit = text }, { checksums = true })
        if number == 10 then good = read(name) end
      end
      write(path "latest", "step-00000015.safetensors\n")
      damage(15)
      assert.equal(10, loaded().step)
      os.execute(("rm '%s'/*"):format(folder))
      save("", "20")
      write(path "step-00000010.safetensors", good)
      damage(20)
      said(function()
        fails(function() checkpoints.load(folder, run) end, "step-00000010.safetensors belongs to another run")
      end)
    end)

  it("without a usable predecessor names the fault of each", function()
    local run = new()
    saved(run, 2)
    local was = values(run)
    for number = 1, 2 do
      local name = path(("step-%08d.safetensors"):format(number))
      write(name, read(name):sub(1, -2 - number))
    end
    said(function()
      fails(function() checkpoints.load(folder, run) end, "holds no checkpoint that can be used", "step-00000001.saf",
        "step-00000002.saf")
    end)
    assert.equal(was, values(run))                                     -- nothing was partly loaded
    fails(function() checkpoints.load(path("nothing"), run) end, "holds no checkpoint")
    assert.equal(nil, checkpoints.find(path("nothing")))
  end)

  it("is found by name if `latest` is damaged, and not found without that file", function()
    local run = new()
    local after = saved(run, 2)
    for _, text in ipairs { "step-0000\1\n", "", "step-00000007.safetensors\n", "step-00000000.safetensors\n" }
    do
      write(path("latest"), text)
      local from, told = said(function() return checkpoints.load(folder, run) end)
      assert.equal(2, from.step)
      assert.equal(after[2], values(run))
      assert.truthy(told:find("continuing from the checkpoint", 1, true), told)
      assert.equal(not text:find "[07]%.", told:find("does not name a checkpoint", 1, true) ~= nil, told)
    end
    os.remove(path("latest"))
    assert.equal(nil, checkpoints.find(folder))
    fails(function() checkpoints.load(folder, run) end, "no file `latest`", "there are step-00000002.safetensors and "
      .. "1 more", "/latest")
  end)

  it("is not taken for missing where `latest` or a rank's file cannot be read", function()
    local run = new()
    saved(run, 1)
    os.remove(path("latest"))
    assert(lfs.link("latest", path("latest"), true))       -- a link to itself cannot be opened
    for _, call in ipairs { checkpoints.find, function() return checkpoints.load(folder, run) end } do
      fails(function() call(folder) end, "cannot tell which checkpoint of ", "is the newest", "Too many levels")
    end
    os.remove(path("latest"))
    assert(lfs.mkdir(path("latest")))                      -- a folder can be opened, but not read
    fails(function() checkpoints.find(folder) end, "cannot tell which checkpoint of ", "/latest: ", "directory")
    assert(lfs.rmdir(path("latest")))
    run.shards = true
    local name = checkpoints.save(folder, run)
    local shard = name .. "/rank-00000-of-00001.safetensors"
    os.remove(shard)
    fails(function() checkpoints.load(name, run) end, shard .. " is missing")
    assert(lfs.link("x", name .. "/x", true) and lfs.link(name .. "/x", shard, true))
    fails(function() checkpoints.load(name, run) end, "cannot open ", "Too many levels")
    os.remove(name .. "/index.json")
    assert(lfs.mkdir(name .. "/index.json"))
    fails(function() checkpoints.load(name, run) end, "cannot read ", "index.json", "directory")
  end)

  it("refuses invalid arguments, and names the valid ones", function()
    local run = new()
    local function with(more)
      local parts = {}
      for _, from in ipairs { run, more } do for key, value in pairs(from) do parts[key] = value end end
      return parts
    end
    for _, case in ipairs {
      { { nil, run }, "the path is nil" }, { { "", run }, "the path is empty" }, { { folder }, "table of parts" },
      { { folder, run.model }, "table of parts" }, { { folder, { optimizer = run.optimizer } }, "its model is a nil" },
      { { folder, with { asyn = true } }, "no option 'asyn'; did you mean 'async'?" },
      { { folder, with { keep = "3" } }, "keep is a string, not a whole number" },
      { { folder, with { step = 1.5 } }, "step is 1.5, not a whole number" },
      { { folder, with { loader = {} } }, "loader is a table without " },
      { { folder, with { extra = { print } } }, "extra has a value that JSON cannot hold: extra[1] is a function" },
    } do
      for _, call in ipairs { "save", "load" } do
        fails(function() checkpoints[call](case[1][1], case[1][2]) end, "checkpoint_spec.lua",
          "ps.checkpoints." .. call, case[2])
      end
    end
    write(path("text"), "words")
    fails(function() checkpoints.load(path("text"), run) end, "/text holds no checkpoint: it is a file, neither a")
    fails(function() checkpoints.load(path("nowhere"), run) end, "there is no such folder")
    fails(function() checkpoints.save(path("text"), run) end, "cannot create the folder", "/text")
    fails(function() run.model:load_state_dict() end, "takes a table of tensors by name, or an open file, not a nil")
  end)

  for _, form in ipairs { "file", "folder" } do
    it("returns `extra` unchanged, bit for bit: " .. form, function()
      local run = new()
      local list = { 0.1 + 0.2, 1 / 3, 2 ^ 53 - 1, -(2 ^ 53 - 1), 2 ^ 53, 1e14 + 1, 123456789012345678, 5e-324, -2e-308,
        1.7976931348623157e308, 0, 1, -7, 1e21, 100000000000001 }
      local extra = { list = list, deep = { { { best = 0.1 + 0.2 } } }, yes = true, no = false, empty = {},
        text = "a\n\"\0z\195\169", ["10"] = "ten", [""] = "none", zero = -0.0 }
      saved(run, 1, { shards = form == "folder", extra = extra })
      local back = checkpoints.load(folder, { model = run.model }).extra
      assert.equal(-math.huge, 1 / back.zero)
      -- compares numbers with ==, which is bit for bit except for the sign of 0
      assert.same(extra, back)
    end)
  end

  it("refuses an `extra` that would be read back differently, and names the place", function()
    local run = new()
    local loop = {}
    loop.again = { loop }
    local deep = {}
    for _ = 1, 300 do deep = { deep } end
    for _, case in ipairs {
      { { mixed = { 1, 2, name = "x" } }, "extra.mixed is a table with string keys and other keys" },
      { { a = { [10] = "ten" } }, "extra.a is a table with the key 10" },
      { { a = { [true] = 1 } }, "extra.a is a table with the key true" },
      { { a = { [1.5] = 1 } }, "extra.a is a table with the key 1.5" },
      { { a = { { 1, nil, 3 } } }, "extra.a[1] is a " }, { { a = { 1, 2, nil, nil, 5 } }, "extra.a is a " },
      { { a = 0 / 0 }, "extra.a is nan" }, { { a = { 1, -math.huge } }, "extra.a[2] is -inf" },
      { { a = { b = 1LL } }, "extra.a.b is a cdata" }, { { f = print }, "extra.f is a function" },
      { { s = "\255" }, "extra.s is text that is not UTF-8" }, { { ["\192"] = 1 }, "a name in extra is text that" },
      { loop, "extra.again[1] is a table that contains itself" }, { deep, "inside more than 200 tables" },
    } do
      fails(function()
        checkpoints.save(folder, { model = run.model, extra = case[1] })
      end, "checkpoint_spec.lua", "extra has a value that JSON cannot hold: ", case[2])
    end
    assert.equal("", names(folder))
    local shared = { 1 }
    checkpoints.save(folder, { model = run.model, extra = { a = shared, b = shared } })
    assert.same({ a = { 1 }, b = { 1 } }, checkpoints.load(folder, { model = run.model }).extra)
  end)

  it("finds a checkpoint that lost its name while the same step was saved again", function()
    local run = new()
    local after = saved(run, 2, { shards = true })
    local name = path("step-00000002")
    assert(os.rename(name, name .. ".tmp-00112233aabbccdd-aside"))
    step(run, 3)
    local from
    local _, text = said(function() from = checkpoints.load(folder, run) end)
    assert.equal(2, from.step)
    assert.equal(after[2], values(run))
    assert.truthy(text:find("step-00000002", 1, true), text)
    saved(run, 1, { shards = true })                        -- the next save removes it
    assert.equal("latest step-00000001 step-00000003", names(folder))
  end)

  it("keeps the newest K, leaves later steps and foreign files alone, and removes the leftovers of crashes", function()
    local run = new()
    assert(lfs.mkdir(path("step-00000009")))
    assert(lfs.mkdir(path("step-00000001.tmp-0123456789abcdef")))
    write(path("step-00000001.tmp-0123456789abcdef/rank-00000-of-00001.safetensors"), "half")
    write(path("step-00000002.safetensors.tmp-77-1"), "half")
    write(path("notes.tmp-1"), "mine")
    for number = 1, 4 do
      step(run, number)
      checkpoints.save(folder, { model = run.model, optimizer = run.optimizer, keep = 3, shards = number % 2 == 0 })
    end
    assert.equal("latest notes.tmp-1 step-00000002 step-00000003.safetensors step-00000004 step-00000009",
      names(folder))
    checkpoints.save(folder, { model = run.model, optimizer = run.optimizer, keep = 1 })   -- step 4 in the other form
    assert.equal("latest notes.tmp-1 step-00000004.safetensors step-00000009", names(folder))
    assert.equal(4, checkpoints.load(folder, run).step)
  end)
end)

describe("a load that leaves a part out", function()
  it("says which part, if the script continues training", function()
    local run = new()
    local schedule = ps.sched.StepLR(run.optimizer, 2, 0.5)
    local tokens = {}
    for i = 1, 100 do tokens[i] = i end
    ps.data.write_tokens(path("tokens.bin"), tokens)
    local loader = ps.data.loader { file = path("tokens.bin"), batch = 2, seq = 4 }
    checkpoints.save(folder, { model = run.model, optimizer = run.optimizer, sched = schedule, loader = loader,
      step = 1 })
    local function notes(parts)
      parts.model = run.model
      return select(2, said(function() checkpoints.load(folder, parts) end))
    end
    local text = notes { optimizer = run.optimizer }
    assert.truthy(text:find("state of a schedule", 1, true) and text:find("pass sched = sched", 1, true), text)
    assert.truthy(text:find("state of a loader", 1, true) and text:find("its batches begin anew", 1, true), text)
    text = notes { optimizer = run.optimizer, sched = schedule }
    assert.truthy(text:find("pass loader = loader", 1, true) and not text:find("schedule", 1, true), text)
    assert.equal("", notes { optimizer = run.optimizer, sched = schedule, loader = loader })
    assert.equal("", notes {})                              -- evaluates the model
  end)
end)

describe("a save that fails", function()
  local MODES = { file = {}, folder = { shards = true }, ["file, async"] = { async = true },
    ["folder, async"] = { async = true, shards = true } }

  -- Makes the nth request that `switch` counts fail during a save of step 2, for every n. Step 1 must remain valid.
  local function walk(options, switch, off, left)
    local run, failed = new(), 0
    local after = saved(run, 1, options)
    step(run, 2)
    after[2] = values(run)
    local parts = { model = run.model, optimizer = run.optimizer, keep = 5, quiet = true }
    for key, value in pairs(options) do parts[key] = value end
    local function save()
      checkpoints.save(folder, parts)
      checkpoints.wait()
    end
    for nth = 0, 400 do
      switch(nth)
      local ok, problem = pcall(save)
      local hit = left() < 0
      off()
      pcall(checkpoints.wait)
      if not hit then
        assert(ok, tostring(problem))
        assert.equal(2, checkpoints.load(folder, run).step)
        return failed
      end
      failed = failed + (ok and 0 or 1)
      assert.falsy(names(folder):find("tmp", 1, true), names(folder))
      local from, told = said(function() return checkpoints.load(folder, run) end)
      assert.equal("", told)
      -- a sync that fails after `latest` is after the commit
      if ok then assert.equal(2, from.step) end
      assert.equal(after[from.step], values(run))
      if from.step == 1 then step(run, 2) end
      assert.equal(after[2], values(run))
    end
    error "it never succeeded"
  end

  for name, options in pairs(MODES) do
    it("leaves the previous one, whatever the disk refuses: " .. name, function()
      for _, code in ipairs { ENOSPC, EIO } do
        local failed = walk(options, function(nth) C.ps_test_fail_file(nth, 1, code) end,
          function() C.ps_test_fail_file(-1, 0, 0) end, function() return tonumber(C.ps_test_fail_file_left()) end)
        assert.truthy(failed >= 7, failed)
      end
    end)
    it("leaves the previous one, whatever request for memory fails: " .. name, function()
      local failed = walk(options, function(nth) C.ps_test_fail_alloc(nth, 2 ^ 40) end,
        function() C.ps_test_fail_alloc(-1, 0) end, function() return tonumber(C.ps_test_fail_alloc_left()) end)
      assert.truthy(failed >= 10, failed)
    end)
  end
end)

describe("tensors of the script", function()
  for _, form in ipairs { "file", "folder" } do
    it("are saved with the rest, and read back into the script's tensors: " .. form, function()
      local run = new()
      local average, count = ps.randn { 3, 4 }, ps.tensor({ 7 }, { dtype = "int64" })
      local want = average:tolist()
      run.tensors = { ["average.weight"] = average, count = count }
      checkpoints.save(folder, { model = run.model, optimizer = run.optimizer, tensors = run.tensors, step = 1,
        shards = form == "folder" })
      average:zero_()
      count:zero_()
      checkpoints.load(folder, run)
      assert.same(want, average:tolist())
      assert.equal(7, count:item())
      local before = values(run)
      run.tensors = { ["average.weight"] = ps.zeros { 4, 3 } }
      fails(function() checkpoints.load(folder, run) end, "'average.weight' is [3, 4] in the checkpoint, but [4, 3]")
      run.tensors = { other = count }
      fails(function() checkpoints.load(folder, run) end, "this checkpoint has no tensor 'other' of the script")
      assert.equal(before, values(run))
      run.tensors = nil
      checkpoints.load(folder, run)                          -- they need not be read
      run.tensors = { "x" }
      fails(function() checkpoints.save(folder, run) end, "tensors.1 is a string; every value of tensors must be a "
        .. "tensor")
      run.tensors = nil
    end)
  end
end)
