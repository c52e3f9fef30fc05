-- SPDX-License-Identifier: BSD-3-Clause
-- tools/faults.lua: fixed seeds, of which none may be wrong, and the checker itself, which must see what is wrong.
-- PS_FULL=1 runs 100 seeds; PS_FAULT_SEEDS=A:B runs others.
local json = require "cjson"
local draw = require "tools.faults.draw"
local judge = require "tools.faults.judge"
local lfs = require "lfs"
local paths = require "ps.paths"
local lib = require "spec.ranks_lib"

local missing = select(2, require("tools.faults.run").program()) or lib.no_gloo()
local SEEDS = os.getenv "PS_FAULT_SEEDS" or os.getenv "PS_FULL" == "1" and "1:100" or "1:20"
-- Plans that found a defect, each with the defect in `found`. A line is what --json prints, with the shortest plan.
local FOUND = paths.root .. "/spec/faults/found.jsonl"

-- Returns the output of tools/faults.lua and its exit code.
local function faults(arguments)
  local p = assert(io.popen(("'%s' '%s/tools/faults.lua' %s 2>&1; echo \"|$?\""):format(paths.exe, paths.root,
    arguments)))
  local text, code = p:read("*a"):match "^(.*)|(%d+)\n$"
  p:close()
  return text, tonumber(code)
end

describe("faults by seeds", function()
  it("end golden or named", function()
    if missing then return pending(missing) end
    local text, code = faults(("--jobs 3 --patience 2 --plans '%s' --seeds %s"):format(FOUND, SEEDS))
    assert.truthy(code == 0, text)
    local golden, named, happened = text:match "(%d+) golden, (%d+) named, 0 WRONG; (%d+) faults happened"
    assert.truthy(tonumber(golden) >= 3 and tonumber(named) >= 8 and tonumber(happened) >= 20, text)
  end)

  it("are logged one by one", function()
    if missing then return pending(missing) end
    local text, code = faults "--replay 11 --patience 2 --plan '1/0:sync@0=EIO'"
    assert.equal(0, code)
    assert.truthy(text:find("fault: rank 0 sync@0=EIO:0 sync ", 1, true), text)
    assert.truthy(text:find("named: ", 1, true), text)
    assert.truthy(text:find("life 2: no faults", 1, true), text)
  end)

  it("are listed without being run", function()
    if missing then return pending(missing) end
    local text, code = faults "--seeds 17:18 --dry --patience 2"
    assert.equal(0, code)
    assert.truthy(text:match "^17  [^\n]+ %[[^\n]+%]\n18  [^\n]+ %[[^\n]+%]\n$", text)
    text, code = faults "--seeds 17:18 --dry --json --patience 2"
    assert.equal(0, code)
    local seeds = {}
    for line in text:gmatch "[^\n]+" do seeds[#seeds + 1] = json.decode(line).seed end
    assert.same({ 17, 18 }, seeds)
  end)

  -- Returns the output, the exit code, and the names in the folder of temporary files afterwards, if a command ends the
  -- program with process id $p.
  local function ended(command)
    local folder = lib.folder()
    local run = ("TMPDIR='%s' '%s' '%s/tools/faults.lua' --seeds 1:20 --jobs 2 --patience 2 >'%s/out' 2>&1 & p=$!; "
      .. "%s; wait $p; echo $?"):format(folder, paths.exe, paths.root, folder, command:format(folder))
    local p = assert(io.popen(("bash -c \"set -m; %s\" 2>/dev/null"):format((run:gsub("[$\"]", "\\%0")))))
    local code = tonumber(p:read "*a")
    p:close()
    local names, f = {}, assert(io.open(folder .. "/out"))
    local text = f:read "*a"
    f:close()
    for name in lfs.dir(folder) do if name:match "%w" and name ~= "out" then names[#names + 1] = name end end
    lib.remove(folder)
    return text, code, names
  end

  it("leave nothing when a signal ends them", function()
    if missing then return pending(missing) end
    for name, number in pairs { INT = 2, TERM = 15, HUP = 1 } do
      local text, code, names = ended("for i in $(seq 600); do ls %s/psluajit-faults-*/golden* && break; sleep 0.1; "
        .. "done >/dev/null 2>&1; sleep 1; kill -" .. name .. " $p")
      assert.equal(128 + number, code, text)
      assert.truthy(text:find(("faults: ended by %s; %%d+ golden"):format(name == "INT" and "Ctrl%-C"
        or "SIG" .. name)), text)
      assert.same({}, names)
    end
  end)

  it("are refused by name", function()
    local text, code = faults "--seeds 5:1"
    assert.truthy(code ~= 0 and text:find("it takes A:B", 1, true), text)
    text, code = faults "--jobs 2"
    assert.truthy(code ~= 0 and text:find("give --seeds A:B, --plans FILE or --replay SEED", 1, true), text)
    text, code = faults "--seeds 9007199254740993:9007199254740993"
    assert.truthy(code ~= 0 and text:find("below 2^53", 1, true), text)
    text, code = faults "--seeds 1:2 --plan 1/0:sync@0=EIO"
    assert.truthy(code ~= 0 and text:find("--plan needs --replay SEED", 1, true), text)
    text, code = faults "--replay 3 --json"
    assert.truthy(code ~= 0 and text:find("--json needs --seeds A:B or --plans FILE", 1, true), text)
    text, code = faults "--replay 3 --dry"
    assert.truthy(code ~= 0 and text:find("--dry needs --seeds A:B", 1, true), text)
    if missing then return end
    text, code = faults(("--plans '%s/README.md'"):format(paths.root))
    assert.truthy(code == 2 and text:find("line 1: it is not an object of JSON", 1, true), text)
    text, code = faults(("--plans '%s'"):format(paths.root))
    assert.truthy(code == 2 and text:find("it is a folder", 1, true), text)
    text, code = faults("--plans /nowhere/plans")
    assert.truthy(code == 2 and text:find("/nowhere/plans: No such file", 1, true), text)
  end)

  it("need a folder for temporary files that can be written", function()
    if missing then return pending(missing) end
    local p = assert(io.popen(("TMPDIR=/proc/nowhere '%s' '%s/tools/faults.lua' --seeds 1:1 2>&1; echo \"|$?\""):format(
      paths.exe, paths.root)))
    local text, code = p:read("*a"):match "^(.*)|(%d+)\n$"
    p:close()
    assert.equal("2", code)
    assert.truthy(text:find("faults: cannot make a folder in /proc/nowhere (TMPDIR)", 1, true), text)
  end)

  it("run in any folder for temporary files, and leave nothing there", function()
    if missing then return pending(missing) end
    local folder = lib.folder()
    assert(lfs.mkdir(folder .. "/it's"))
    local p = assert(io.popen(("cd '%s' && TMPDIR=\"it's\" '%s' '%s/tools/faults.lua' --seeds 2:2 --patience 2 2>&1")
      :format(folder, paths.exe, paths.root)))
    local text = p:read "*a"
    p:close()
    assert.truthy(text:find(", 0 WRONG;", 1, true), text)
    for name in lfs.dir(folder .. "/it's") do assert.truthy(name == "." or name == "..", name) end
    lib.remove(folder)
  end)

  it("are written and read again without events", function()
    if missing then return pending(missing) end
    local plan = lib.folder()
    local f = assert(io.open(plan .. "/plans", "w"))
    local job = draw.job(1, { ranks = 1, steps = 1 })
    f:write(json.encode { seed = 1, settings = job, begins = "new", events = draw.NO_EVENTS }, "\n")
    f:close()
    local text, code = faults(("--patience 2 --plans '%s/plans'"):format(plan))
    lib.remove(plan)
    assert.equal(0, code, text)
    assert.truthy(text:find("1 golden, 0 named, 0 WRONG", 1, true), text)
  end)
end)

describe("a seed", function()
  local options = { ranks = 2, steps = 6 }
  -- The calls of a life: those of a profile are as many for every run of a job.
  local calls = { ["write/save"] = 77, ["sync/save"] = 3, ["sync/folder"] = 9, ["rename/save"] = 5,
    ["write/latest"] = 2, ["open/save"] = 6, ["space/save"] = 2, ["mkdir/save"] = 2, ["remove/save"] = 1,
    ["read/chunk"] = 553, ["write/chunk"] = 81, ["write/log"] = 6 }
  local loads = { ["read/save"] = 77, ["map/save"] = 2, ["read/latest"] = 2, ["open/save"] = 4, ["sync/folder"] = 4 }
  local profile = { new = { [0] = calls, calls }, saved = { [0] = loads, loads } }
  local function plan_of(seed) return draw.plan(seed, draw.job(seed, options), profile) end

  it("draws the same plan again", function()
    for seed = 1, 50 do assert.same(plan_of(seed), plan_of(seed)) end
    local before = plan_of(7)
    calls["read/chunk"] = 560                              -- reads ahead differ by a few from run to run
    assert.same(before, plan_of(7))
  end)

  it("draws every kind, and switches every kind off", function()
    local on, off = {}, {}
    for seed = 1, 600 do
      local plan = plan_of(seed)
      for _, event in ipairs(plan.events) do on[event.kind] = true end
      for _, kind in ipairs(plan.off) do off[kind] = true end
    end
    for _, kind in ipairs(draw.KINDS) do assert.truthy(on[kind.name] and off[kind.name], kind.name) end
  end)

  it("draws calls of files that the life makes, of each class its share", function()
    local drawn, files = {}, 0
    for seed = 1, 1300 do
      local plan = plan_of(seed)
      for _, event in ipairs(plan.events) do
        local class, nth = (event.text or ""):match "^(%l+/%l+)@(%d+)"
        if class then
          local n = profile[event.life > 1 and "saved" or plan.begins][0][class]
          assert.truthy(n and tonumber(nth) < n, event.text)
          drawn[class], files = (drawn[class] or 0) + 1, files + 1
        end
      end
    end
    for class in pairs(calls) do assert.truthy((drawn[class] or 0) >= 4, class) end
    for class in pairs(loads) do assert.truthy((drawn[class] or 0) >= 4, class) end
    assert.truthy(drawn["write/save"] < files / 4, drawn["write/save"])          -- 77 of 190 calls
  end)

  -- Returns the fraction of the events of some kinds whose class of calls is one of `classes`.
  local function fraction(kinds, classes, of)
    local n, all = 0, 0
    for seed = 1, 600 do
      for _, event in ipairs(draw.plan(seed, draw.job(seed, options), of).events) do
        if kinds[event.kind] then
          all, n = all + 1, n + (classes[event.text:match "^[%l/]+"] and 1 or 0)
        end
      end
    end
    return n / all
  end

  it("ends processes while a checkpoint is committed", function()
    local share = fraction({ kill = true, power = true, power_all = true },
      { ["rename/save"] = true, ["sync/folder"] = true }, profile)
    assert.truthy(share > 0.3 and share < 0.7, share)      -- with equal weights for all classes: 0.1
  end)

  it("has flipped bits and errors in the disk tier as often as in checkpoints", function()
    local both = {}
    for _, of in ipairs { calls, loads } do for name, n in pairs(of) do both[name] = n end end
    local life = { [0] = both, both }
    local profile_of_both = { new = life, saved = life }
    local share = fraction({ flip = true }, { ["read/chunk"] = true }, profile_of_both)
    assert.truthy(share > 0.5 and share < 0.8, share)
    share = fraction({ eio = true, full = true }, { ["read/chunk"] = true, ["write/chunk"] = true }, profile_of_both)
    assert.truthy(share > 0.4 and share < 0.8, share)
  end)

  it("draws other plans for seeds that a double's 14 digits do not tell apart", function()
    assert.are_not.same(plan_of(2 ^ 52 + 1).events, plan_of(2 ^ 52 + 2).events)
  end)

  it("draws jobs with a schedule, which have golden runs of their own", function()
    local keys = { [true] = {}, [false] = {} }
    for seed = 1, 400, 8 do
      local job = draw.job(seed, options)
      keys[job.config.scheduler ~= nil][draw.golden(job)] = true
    end
    assert.truthy(next(keys[true]) and next(keys[false]))
    for key in pairs(keys[true]) do assert.is_nil(keys[false][key]) end
  end)
end)

-- Tests the checker with logs and process ends that the spec invents.
describe("the checker", function()
  local run = require "tools.faults.run"
  local job = { ranks = 1, steps = 2, keep = 2, config = {} }
  local folder, shm = lib.folder(), {}
  for _, name in ipairs(run.names "/dev/shm") do shm[name] = true end
  teardown(function() run.clean(folder) end)

  local function golden()
    return { { w = "a1" }, { w = "b2" }, ["0 1"] = { rows = "aa" }, ["0 2"] = { rows = "bb" } }
  end

  local function write(name, text)
    local f = assert(io.open(folder .. name, "w"))
    f:write(text)
    f:close()
  end

  -- Judges one life with these lines of its log. saved: the steps of earlier checkpoints.
  local function judged(lines, process, events, happened, resumes, saved)
    write(".log", table.concat(lines, "\n") .. "\n")
    write(".faults", happened or "")
    process.rank, process.text, process.seconds = 0, process.text or "", 1
    local plan = { events = events or {}, job = job }
    local state = judge.state()
    for _, step in ipairs(saved or {}) do state.complete[step] = true end
    local verdict = judge.life({ folder = folder, job = job }, plan, 1, { process }, golden(), state, resumes)
    return verdict.outcome, verdict.why or "", state, verdict.timed
  end

  local WELL = { "0 1 resumed 0 0", "0 1 step 1 w=a1 aa", "0 1 saved 1", "0 1 step 2 w=b2 bb", "0 1 end 2" }

  it("accepts a run that went well", function()
    local outcome, _, state = judged(WELL, { code = 0 })
    assert.equal("golden", outcome)
    assert.same({ [1] = true }, state.complete)
    assert.is_nil(judge.left({ folder = folder, job = job }, state, shm))
  end)

  it("sees other parameters, other rows and lost checkpoints", function()
    local function wrong(lines, ...)
      local outcome, why = judged(lines, { code = 0 }, nil, nil, ...)
      assert.equal("WRONG", outcome)
      return why
    end
    assert.truthy(wrong { "0 1 step 1 w=a2 aa" }:find("other values of w after step 1", 1, true))
    assert.truthy(wrong { "0 1 step 1 v=a1 aa" }:find("other values of v", 1, true))
    assert.truthy(wrong { "0 1 step 1 w=a1 bb" }:find("other rows in step 1", 1, true))
    assert.truthy(wrong { "0 1 step 3 w=a1 aa" }:find("does not exist", 1, true))
    assert.truthy(wrong { "0 1 damaged latest" }:find("`latest` was damaged", 1, true))
    assert.truthy(wrong({ "0 1 resumed 0 0" }, false, { 1 }):find("continued from step 0", 1, true))
    assert.truthy(wrong({ "0 1 resumed 1 1" }, true, { 1 }):find("were damaged", 1, true))
    assert.truthy(wrong { "0 1 resumed 1 0", "1 1 resumed 0 0" }:find("another rank from step 1", 1, true))
    local _, _, state = judged({ "0 1 step 1 w=a1 aa" }, { code = 0 })
    assert.equal("rank 0 never reported step 2", judge.left({ folder = folder, job = job }, state, shm))
  end)

  it("sees ends without a cause", function()
    local eio = { { kind = "eio", life = 1, rank = 0, text = "write@0=EIO" } }
    local stopped = "0 9.5 event any@0=stop:0 open /x\n"
    local stop = { { kind = "stop", life = 1, rank = 0, text = "any@0=stop" } }
    local hit = "0 9.5 event write@0=EIO:0 write /x\n"
    local function ends(process, events, happened, resumes)
      local outcome, why = judged({}, process, events, happened, resumes)
      return outcome .. " " .. why
    end
    assert.truthy(ends({ code = 1, text = "psluajit: oops\n" }):match "^WRONG rank 0 ended with code 1, without a ")
    assert.truthy(ends({ code = 1, text = "psluajit: oops\n" }, eio, hit):match "^WRONG")
    local function said() return { code = 1, text = "psluajit: Input/output error\n" } end
    assert.truthy(ends(said(), eio):match "^WRONG")        -- the fault did not happen
    assert.equal("named Input/output error", ends(said(), eio, hit))
    assert.truthy(ends(said(), eio, hit, true):match "^WRONG the resume")
    assert.truthy(ends({ signal = 11 }, eio, hit):match "^WRONG rank 0 was ended by signal 11")
    assert.truthy(ends({ signal = 9, hung = "calm" }, eio, hit):match "^WRONG rank 0 did not end within")
    assert.truthy(ends({ code = 0, orphans = true }):match "^WRONG rank 0 left a process")
    assert.truthy(ends({ code = 1, text = "psluajit: slow" }, stop, stopped):match "^WRONG")
    local kill = { { kind = "kill", life = 1, rank = 0, text = "any@0=kill" } }
    assert.equal("named kill", ends({ signal = 9 }, kill, "0 9.5 event any@0=kill:0 open /x\n"))
  end)

  it("accepts a skipped checkpoint only if a fault of the life made it unreadable", function()
    local function skips(kind, text, process, number, saved)
      local lines = { "0 1 resumed 0 " .. number, "0 1 step 1 w=a1 aa", "0 1 end 2" }
      local outcome, why = judged(lines, process, { { kind = kind, life = 1, rank = 0, text = text } },
        ("0 9.5 event %s:0 x /x\n"):format(text), false, saved)
      return outcome .. " " .. why
    end
    assert.equal("WRONG 1 checkpoints were damaged", skips("kill", "any@900=kill", { signal = 9 }, 1, { 1 }))
    assert.equal("golden ", skips("flip", "read/save@3=flip", { code = 0 }, 1, { 1 }))
    -- keep is 2, so a checkpoint older than the two newest need not exist
    assert.equal("golden ", skips("flip", "read/save@3=flip", { code = 0 }, 2, { 1, 2, 3 }))
    assert.equal("WRONG rank 0 continued from step 0 and skipped 1 checkpoints, but that of step 1 was complete",
      skips("flip", "read/save@3=flip", { code = 0 }, 1, { 1, 2 }))
  end)

  it("sees a process that succeeds before the end of its script", function()
    local function ends(lines)
      local outcome, why = judged(lines, { code = 0, text = "psluajit: oops\n" })
      return outcome .. " " .. why
    end
    assert.equal("WRONG rank 0 ended with exit code 0, but before the end of its script: oops",
      ends { "0 1 resumed 0 0", "0 1 step 1 w=a1 aa" })
    assert.equal("WRONG rank 0 ended with exit code 0, but after step 1 of 2: oops",
      ends { "0 1 resumed 0 0", "0 1 step 1 w=a1 aa", "0 1 end 1" })
    assert.equal("golden ", ends(WELL))
  end)

  it("sees causes of a link that do not name a rank and an operation", function()
    local reset = { { kind = "reset", life = 1, rank = 0, text = "send@5=reset" } }
    local function said(text)
      local outcome = judged({}, { code = 1, text = "psluajit: " .. text .. "\n" }, reset,
        "0 9.5 event send@5=reset:0 send \n")
      return outcome
    end
    assert.equal("named", said "all_gather, call 7 of rank 0: rank 1 (vm) died: its process ended")
    assert.equal("named", said "joining the other ranks: rank 1 sent nothing within 5 s")
    assert.equal("WRONG", said "rank 1 sent nothing within 5 s")
    assert.equal("WRONG", said "all_gather, call 7 of rank 0: the connection is gone")
    assert.equal("WRONG", said "Connection reset by peer")
  end)

  it("tells ends that depend on time from others", function()
    local function timed(process, lines) return select(4, judged(lines or {}, process)) end
    assert.is_true(timed { signal = 9, hung = "busy" })
    assert.is_false(timed { signal = 9, hung = "calm" })
    assert.is_true(timed { code = 1, text = "psluajit: all_gather, call 7 of rank 0: rank 1 is silent for 3 s\n" })
    assert.is_false(timed { code = 1, text = "psluajit: Input/output error\n" })
    assert.is_nil(timed({ code = 0 }, { "0 1 step 1 w=a2 aa" }))
  end)

  it("sees ranks that end late", function()
    job.ends_s = 10
    local eio = { { kind = "eio", life = 1, rank = 0, text = "write@0=EIO" } }
    local hit = "0 100.0 event write@0=EIO:0 write /x\n"
    local function ends(over)
      return (judged({}, { code = 1, over = over, text = "psluajit: Input/output error\n" }, eio, hit))
    end
    assert.equal("named", ends(109))
    job.ends_s = -10                                       -- this rank is the first that ended
    local process = { code = 1, over = 109, text = "psluajit: Input/output error\n" }
    local outcome, why = judged({}, process, eio, hit)
    assert.equal("WRONG", outcome)
    assert.truthy(why:match "rank 0 ended 0%.0 s after the last fault", why)
    job.ends_s = nil
  end)

  it("sees what is left behind", function()
    local _, _, state = judged(WELL, { code = 0 })
    write("/run.tmp", "")
    assert.equal("left behind: run.tmp", judge.left({ folder = folder, job = job }, state, shm))
    os.remove(folder .. "/run.tmp")
    write(".faults", ("0 9.5 outside %s.new\n0 9.5 outside %s.log\n0 9.5 outside %s.none\n"):format(folder, folder,
      folder))
    write(".new", "")
    assert.equal("left behind: " .. folder .. ".new", judge.left({ folder = folder, job = job }, state, shm))
    os.remove(folder .. ".new")
    assert(lfs.mkdir(folder .. "/run"))
    write("/run/step-00000001.tmp-1", "")
    assert.equal("left behind: run/step-00000001.tmp-1", judge.left({ folder = folder, job = job }, state, shm))
    state.saves = 0                                        -- no save has come after it, which would remove it
    assert.is_nil(judge.left({ folder = folder, job = job }, state, shm))
    for i = 1, 3 do write(("/run/step-%08d.safetensors"):format(i), "") end
    assert.is_nil(judge.left({ folder = folder, job = job }, state, shm))
    os.remove(folder .. "/run/step-00000001.tmp-1")
    state.saves = 1
    assert.equal("run/ has 3 checkpoints, but keep is 2", judge.left({ folder = folder, job = job }, state, shm))
  end)
end)

describe("a job that fails without faults", function()
  it("fails for each seed that has it", function()
    local trials = require("tools.faults.trial").new("none", 1)
    lib.remove(trials.root)
    function trials.spec() error("the job fails without faults", 0) end
    local job = draw.job(1, { ranks = 2, steps = 6 })
    for _ = 1, 2 do assert.has_error(function() trials:golden(job) end, "the job fails without faults") end
  end)
end)

describe("a plan on a busy machine", function()
  it("has processes that lack a processor", function()
    local starved = require("tools.faults.run").starved
    local function sample(ran, waited, ready) return { ran = ran, waited = waited, ready = ready } end
    assert.is_true(starved(sample(1, 1, false), sample(1.1, 1.1, false), 0.25))
    assert.is_true(starved(sample(1, 1, true), sample(1, 1, true), 0.25))                -- and got none at all
    assert.is_false(starved(sample(1, 1, true), sample(1.24, 1.01, true), 0.25))         -- it computes
    assert.is_false(starved(sample(1, 1, false), sample(1, 1, false), 0.25))             -- it sleeps, as if it hung
  end)

  local trial = require "tools.faults.trial"

  -- Returns what is reported, and the patience of each attempt, if all attempts end with `verdict`.
  local function performed(verdict)
    local trials, tried = trial.new("none", 1), {}
    lib.remove(trials.root)
    function trials.attempt(_, _, _, patience)
      tried[#tried + 1] = patience
      return verdict
    end
    return trials:perform({}, "x"), tried
  end

  it("is repeated with more patience, if its verdict depends on time", function()
    local late = { outcome = "WRONG", timed = true, starved_s = 2 }
    local verdict, tried = performed(late)
    assert.equal(late, verdict)
    assert.same({ 1, 3, 9, 27 }, tried)
    assert.same({ 1 }, select(2, performed { outcome = "WRONG", timed = true, starved_s = 0.1 }))
    assert.same({ 1 }, select(2, performed { outcome = "WRONG", starved_s = 2 }))        -- other numbers, for example
    assert.same({ 1 }, select(2, performed { outcome = "golden", starved_s = 2 }))
  end)
end)

describe("planted.lua", function()
  it("has texts that the sources have once", function()
    local rows = dofile(paths.root .. "/spec/faults/planted.lua")
    assert.truthy(#rows >= 10)
    for _, row in ipairs(rows) do
      for _, change in ipairs { row, row.also } do
        local f = assert(io.open(paths.root .. "/" .. (change.file or row.file), "rb"))
        local text = f:read "*a"
        f:close()
        local _, last = text:find(change.from, 1, true)
        assert.truthy(last and not text:find(change.from, last, true), row.name)
      end
    end
  end)
end)
