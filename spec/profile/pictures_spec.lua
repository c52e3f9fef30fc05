-- SPDX-License-Identifier: BSD-3-Clause
-- Pictures of a profile: the data read from the file, PatrickStar's two figures, and invalid files.
-- spec/profile/browser_spec.lua tests the page.
local ps = require "ps"
local gpt2 = require "models.gpt2"
local json = require "cjson"
local look = require "ps.memory.chunks"
local paths = require "ps.paths"
local read = require "ps.profile.read"
local profile_lib = require "spec.profile_lib"
local ranks_lib = require "spec.ranks_lib"
local check = require "spec.check_lib"
local draw = require "ps.profile.draw"

local folder
setup(function() folder = ranks_lib.folder() end)
teardown(function() ranks_lib.remove(folder) end)

-- Runs the tool. Returns its output and exit code.
local function tool(words)
  return check.shell(("cd '%s' && '%s' '%s/tools/profile_visualizer.lua' %s"):format(folder,
    paths.exe, paths.root, words))
end

-- Writes a changed version of the profile, and returns the file's path.
local function changed(change)
  local made = profile_lib.made()
  made = change(made) or made
  profile_lib.write(folder .. "/changed.json", made)
  return folder .. "/changed.json"
end

-- Returns the points of the line with a colour in an SVG of gnuplot, as {x, y} from the top left corner. The text
-- before its last M belongs to the key.
local function line_of(svg, red, green, blue)
  local path = svg:match(("<path stroke='rgb%%(%3d, %3d, %3d%%)'  d='[^']*M([^M']*)'"):format(red, green, blue))
  local points = {}
  for x, y in assert(path, "no line of this colour"):gmatch "([%d.]+),([%d.]+)" do
    points[#points + 1] = { tonumber(x), tonumber(y) }
  end
  return points
end

-- Returns the x at which a line first has its highest point, as a fraction of the line's width.
local function highest(points)
  local best = points[1]
  for _, p in ipairs(points) do if p[2] < best[2] then best = p end end
  return (best[1] - points[1][1]) / (points[#points][1] - points[1][1])
end

local function areas(svg, colour)
  local _, n = svg:gsub(("fill *= *'rgb%%(%s%%)'"):format(colour), "")
  return n
end

describe("a profile", function()
  it("is read as the bytes of each tier, the place of each chunk, and the part of the step", function()
    local path = folder .. "/profile.json"
    profile_lib.write(path)
    local p = read.file(path)
    assert.same({ "device", "host" }, { p.tiers[1].name, p.tiers[2].name })            -- the disk has no events
    assert.same({ profile_lib.FIRST_PEAK.nbytes, profile_lib.FIRST_PEAK.ts }, { read.peak(p.tiers[1]) })
    assert.same({ { kind = "forward", begin = 0, finish = 300 }, { kind = "backward", begin = 300, finish = 700 },
      { kind = "adam", begin = 700, finish = 990 } }, { p.bands[1], p.bands[2], p.bands[3] })
    assert.same({ 0, 100, 600, 1100, 1600 }, p.chunks[1].times)
    assert.same({ "host", "device", "host", "device", "host" }, p.chunks[1].on)
    local kinds = {}                          -- PatrickStar's sections: FP16_PARAM, FP32_PARAM, VARIANCE, MOMENTUM
    for i, chunk in ipairs(p.chunks) do kinds[i] = chunk.kind end
    assert.same({ "param", "param", "exp_avg_sq", "exp_avg" }, kinds)
    assert.same({ "disk", "host" }, p.chunks[3].on)
  end)

  it("without its first step begins with the values at that time", function()
    local path = folder .. "/profile.json"
    profile_lib.write(path)
    local p = read.file(path)
    read.drop_warmup(p)
    local tier = p.tiers[1]
    assert.same({ profile_lib.PEAK.nbytes, profile_lib.PEAK.ts }, { read.peak(tier) })
    assert.same({ 1000, 0, 4 * 2 ^ 20 }, { tier.times[1], tier.held[1], tier.other[1] })
    assert.same({ 1000, 1100 }, { p.chunks[1].times[1], p.chunks[1].times[2] })
    assert.same({ { 1000 }, { "host" } }, { p.chunks[3].times, p.chunks[3].on })
    assert.same({ 3, 1000, 2 }, { #p.bands, p.bands[1].begin, p.steps[1].step })
    p = read.file(changed(function(made) made.psluajit.steps[2].first = true end))
    check.fails_saying({ "none of the 2 steps has a plan" }, function() read.drop_warmup(p) end)
  end)

  it("may have chunks that no longer existed when it was saved", function()
    local p = read.file(changed(function(made)
      local function at(ts, what, on)
        table.insert(made.traceEvents, 5, { cat = "chunk", ph = "i", name = what, ts = ts,
          args = { chunk = 9, bytes = 4096, tier = "host", on = on } })
      end
      at(0, "release", {})
      at(0, "allocate", { "host" })
      made.traceEvents[#made.traceEvents + 1] = { cat = "chunk", ph = "i", name = "allocate", ts = 5000,
        args = { chunk = 8, bytes = 4096, tier = "host", on = { "host" } } }
    end))
    assert.equal(5, #p.chunks)                               -- chunk 9 was created and freed at the same moment
    local gone = p.chunks[5]
    assert.same({ 8, "gone", 4096, 5000, "host" }, { gone.id, gone.kind, gone.nbytes, gone.times[1], gone.on[1] })
    p = read.file(changed(function(made)
      made.traceEvents[#made.traceEvents + 1] = { cat = "chunk", ph = "i", name = "allocate", ts = 5000,
        args = { chunk = 8, kind = "param", bytes = 4096, tier = "host", on = { "host" } } }
    end))
    assert.same({ 8, "param", true }, { p.chunks[3].id, p.chunks[3].kind, p.chunks[3].gone })
  end)

  it("that is invalid, truncated or damaged is an error that names the fault", function()
    local function fails(text, ...)
      check.write(folder .. "/bad.json", text)
      check.fails_saying({ folder .. "/bad.json", ... }, function() read.file(folder .. "/bad.json") end)
    end
    local whole = json.encode(profile_lib.made())
    for _, part in ipairs { 1, 100, math.floor(#whole / 2), #whole - 1 } do
      fails(whole:sub(1, part), "is not a profile")
    end
    fails(whole:sub(1, 1000), "cut off after 1000 bytes")
    fails("", "cut off after 0 bytes")
    fails("hello]", "it is not JSON")
    fails('{"traceEvents":[]}', "not a profile of psluajit")  -- a profile of Chrome or PyTorch
    fails("[1,2]", "not a profile of psluajit")
    fails('"text"', "not a profile of psluajit")
    fails('{"psluajit":{"version":2},"traceEvents":[]}', "version 2; this program reads version 1")
    fails('{"psluajit":{"version":1},"traceEvents":[]}', "has no events")
    fails('{"psluajit":{"version":1}}', "traceEvents is nil, not a list")
    fails('{"psluajit":{"version":1},"traceEvents":[{"ph":"i"}]}', "traceEvents[1].ts is nil, not a number")
    fails('{"psluajit":{"version":1},"traceEvents":[{"ph":"X","ts":1}]}', "traceEvents[1].dur")
    fails('{"psluajit":{"version":1},"traceEvents":[7]}', "traceEvents[1] is 7, not an event")
    fails('{"psluajit":{"version":1},"traceEvents":[{"ph":"i","cat":"chunk","ts":1,"args":{"chunk":"9"}}]}',
      "traceEvents[1].args.chunk is 9, not a number")
    fails('{"psluajit":{"version":1},"traceEvents":[{"ph":"C","cat":"memory","name":"host","ts":1,'
      .. '"args":{"chunks":-1,"other":0}}]}', "args.chunks is -1, not a number of bytes")
    fails('{"psluajit":{"version":1,"dropped":"9"},"traceEvents":[]}', "psluajit.dropped is 9, not a whole number")
    fails('{"psluajit":{"version":1,"ranks":null},"traceEvents":[]}', "psluajit.ranks is ", "not a whole number")
    fails('{"psluajit":{"version":1},"traceEvents":[{"ph":"i","cat":"chunk","ts":1,"args":{"chunk":9,"on":[{}]}}]}',
      "traceEvents[1].args.on[1] is a table, not a text")
    fails('{"psluajit":{"version":1,"chunks":[{"id":1,"kind":"grad","index":0,"nbytes":1,"tensors":[7]}]},'
      .. '"traceEvents":[]}', "psluajit.chunks[1].tensors[1] is 7, not a text")
    fails('{"psluajit":{"version":1},"traceEvents":[{"ph":"i","ts":2},{"ph":"i","ts":1}]}', "after the event before it")
    check.fails_saying({ "cannot read", folder }, function() read.file(folder) end)
    check.fails_saying({ "cannot read", "nowhere.json" }, function() read.file(folder .. "/nowhere.json") end)
  end)
end)

describe("a profile that was just saved", function()
  it("is read: with the contents of its tiers, and the places of its chunks", function()
    local path = folder .. "/saved.json"
    ps.profiler.start()
    local model, optimizer = ps.initialize { quiet = true, model_func = function() return gpt2.new "tiny" end,
      config = { device = "sim", chunk_size = 16384, plan_print = false, memory = { device = "900KiB", host = "64MiB" },
        optimizer = { type = "AdamW" } } }
    local at, chunks
    local ok, problem = pcall(function()
      for _ = 1, 2 do
        local x = ps.randint(0, 256, { 4, 32 }, { dtype = "int32" })
        model:backward(model(x, x))
        optimizer:step()
      end
      ps.profiler.stop()
      ps.profiler.save(path)
      at, chunks = look.tiers(), look.chunks()
    end)
    model:close()
    assert.truthy(ok, problem)
    local p = read.file(path)
    assert.same({ { "device", "host" }, 2 }, { { p.tiers[1].name, p.tiers[2].name }, #p.steps })
    for t, tier in ipairs(p.tiers) do
      assert.equal(at[t].budget, tier.budget)
      assert.equal(at[t].chunks, tier.held[#tier.held])
    end
    local peak = read.peak(p.tiers[1])  -- the peak of the bytes when ops began, without their scratch memory
    assert.truthy(peak <= at[1].peak and peak > at[1].peak / 2, peak .. " of " .. at[1].peak)
    local where, on_device = {}, 0
    for _, chunk in ipairs(p.chunks) do
      where[chunk.id] = chunk.on[#chunk.on]
      if where[chunk.id] == "device" then on_device = on_device + chunk.nbytes end
    end
    assert.equal(at[1].chunks, on_device)
    for _, chunk in ipairs(chunks) do                        -- a chunk with memory can still wait for its values
      if chunk.tiers.device then assert.equal("device", where[chunk.id], "chunk " .. chunk.id) end
    end
    read.drop_warmup(p)
    assert.same({ 1, 2 }, { #p.steps, p.steps[1].step })
    for _, chunk in ipairs(p.chunks) do assert.not_equal("gone", chunk.kind) end
    local kinds = {}
    for _, band in ipairs(p.bands) do kinds[band.kind] = true end
    assert.same({ forward = true, backward = true, adam = true }, kinds)
  end)
end)

describe("a profile that was started before ps.initialize", function()
  it("has no memory of a device without data", function()
    local path = folder .. "/early.json"
    ps.profiler.start()
    local model, optimizer = ps.initialize { quiet = true, model_func = function() return gpt2.new "tiny" end,
      config = { plan_print = false, optimizer = { type = "AdamW" } } }
    local x = ps.randint(0, 256, { 2, 32 }, { dtype = "int32" })
    model:backward(model(x, x))
    optimizer:step()
    ps.profiler.stop()
    ps.profiler.save(path)
    model:close()
    local p = read.file(path)
    for _, tier in ipairs(p.tiers) do assert.not_equal("meta", tier.name) end
    check.fails_saying({ "has no memory of type GPU; it has CPU" }, function() read.tier(p, "GPU") end)
  end)
end)

describe("tools/profile_visualizer.lua", function()
  it("draws a tier's memory, with its peak at its moment", function()
    profile_lib.write(folder .. "/profile.json")
    local out, code = tool "profile.json --fig_type=memory --memory_type=GPU --out memory.svg"
    assert.same({ "wrote memory.svg\n", 0 }, { out, code })
    local svg = check.read(folder .. "/memory.svg")
    assert.near(profile_lib.FIRST_PEAK.ts / 1990, highest(line_of(svg, 214, 39, 40)), 1e-3)       -- total
    assert.near(500 / 1990, highest(line_of(svg, 31, 119, 180)), 1e-3)                              -- chunks
    assert.truthy(svg:find("peak 128 MiB at 0.25 ms", 1, true))
    for _, word in ipairs { "forward", "backward", "Adam", "total", "chunks", "other", "budget" } do
      assert.truthy(svg:find(">" .. word .. "<", 1, true), word)
    end
  end)

  it("rounds the peak and its moment to four digits, or to whole numbers", function()
    for number, want in pairs { [46.83125] = "46.83", [123456.7] = "123457", [0.25] = "0.25", [9999.96] = "10000" } do
      assert.equal(want, draw.figure(number))
    end
  end)

  it("leaves out the first step with --rm_warmup, which accepts PatrickStar's True and False", function()
    profile_lib.write(folder .. "/profile.json")
    for words, peak in pairs { ["--rm_warmup"] = "96 MiB at 0.4005", ["--rm_warmup=True"] = "96 MiB at 0.4005",
      ["--rm_warmup=False"] = "128 MiB at 0.25" } do
      local out, code = tool("profile.json " .. words .. " --out memory.svg")
      assert.same({ "wrote memory.svg\n", 0 }, { out, code })
      local svg = check.read(folder .. "/memory.svg")
      assert.truthy(svg:find(("peak %s ms"):format(peak), 1, true), words)
      local at = peak:match "^96" and 400.5 / 990 or 250 / 1990
      assert.near(at, highest(line_of(svg, 214, 39, 40)), 1e-3)
    end
  end)

  it("draws a row for each chunk in its tier's colour, as PNG, too", function()
    profile_lib.write(folder .. "/profile.json")
    local out, code = tool "profile.json --fig_type=access --out access.svg"
    assert.same({ "wrote access.svg\n", 0 }, { out, code })
    local svg = check.read(folder .. "/access.svg")
    -- Chunks 0 and 1 are on the device twice. Each tier has one more area in the key.
    assert.same({ 5, 1 + 1 }, { areas(svg, "233, *97, 108"), areas(svg, "230, 171, *2") })
    for _, kind in ipairs { "param", "exp_avg", "exp_avg_sq" } do
      assert.truthy(svg:find(">" .. kind .. "<", 1, true), kind)
    end
    local function height(kind)
      return tonumber(svg:match("translate%([%d.]+,([%d.]+)%)[^\n]*\n%s*<text>" .. kind .. "<"))
    end
    assert.truthy(height "param" > height "exp_avg_sq" and height "exp_avg_sq" > height "exp_avg")   -- from the bottom
    assert.same({ "wrote access.png\n", 0 }, { tool "profile.json --fig_type=access --out access.png" })
    assert.equal("\137PNG", check.read(folder .. "/access.png"):sub(1, 4))
  end)

  it("names in one line the fault of its arguments or its file", function()
    profile_lib.write(folder .. "/profile.json")
    check.write(folder .. "/cut.json", check.read(folder .. "/profile.json"):sub(1, 500))
    check.write(folder .. "/text.json", "no profile\n")
    local begins = check.read(folder .. "/profile.json"):sub(1, 700)
    for length = 1, #begins - 1, 3 do                               -- truncated at any length
      check.write(folder .. "/part.json", begins:sub(1, length))
      local _, why = pcall(read.file, folder .. "/part.json")
      assert.truthy(tostring(why):find(("it is cut off after %d bytes"):format(length), 1, true), why)
    end
    assert(require("lfs").link("/dev/full", folder .. "/full.html", true))
    for words, told in pairs {
      ["cut.json"] = "cut.json is not a profile: it is cut off after 500 bytes",
      ["text.json"] = "text.json is not a profile: it is not JSON",
      ["profile.json --memory_type=DISK"] = "has no memory of type DISK; it has GPU (device), CPU (host)",
      ["profile.json --memory_type=TPU"] = "--memory_type TPU: it takes GPU, CPU, DISK",
      ["profile.json --fig_type=time"] = "--fig_type time: it takes memory, access",
      ["profile.json --rm_warmup=maybe"] = "--rm_warmup maybe: it must be True or False",
      ["profile.json --out picture.gif"] = "its name ends in .svg or .png",
      ["profile.json --html --out picture.svg"] = "its name ends in .html",
      ["profile.json --out nowhere/a.svg"] = "cannot write nowhere/a.svg",
      ["profile.json --html --out nowhere/a.html"] = "cannot write nowhere/a.html",
      ["profile.json --html --out full.html"] = "cannot write full.html: No space left on device",
    } do
      local out, code = tool(words)
      assert.equal(1, code, out)
      assert.truthy(out:find(told, 1, true), out)
      assert.matches("^profile_visualizer.lua: [^\n]*\n$", out)
    end
    -- gnuplot runs shell commands after a "!" at the beginning of a line
    local function renamed(made)
      for _, e in ipairs(made.traceEvents) do
        if e.name == "device" then e.name = "gpu\n!touch ran\n#" end
        if e.cat == "chunk" and e.args.on[1] == "device" then e.args.on[1] = "gpu\n!touch ran\n#" end
      end
      for _, chunk in ipairs(made.psluajit.chunks) do chunk.kind = chunk.kind .. "'\n!touch ran\n#" end
    end
    for _, words in ipairs { "--memory_type GPU --out a.svg", "--fig_type access --out a.svg" } do
      local out, code = tool(changed(renamed) .. " " .. words)
      assert.equal(nil, require("lfs").attributes(folder .. "/ran"), words)
      assert.equal(1, code, out)
      assert.matches("^profile_visualizer.lua: gnuplot cannot draw the name '[^\n]*', which has control characters\n$",
        out)
    end
    local plain = changed(function(made)
      made.psluajit.chunks = {}
      local events = {}
      for _, e in ipairs(made.traceEvents) do if e.cat ~= "chunk" then events[#events + 1] = e end end
      made.traceEvents = events
    end)
    local out, code = tool(plain .. " --fig_type access")
    assert.equal(1, code)
    assert.truthy(out:find("has no chunks", 1, true), out)
  end)
end)
