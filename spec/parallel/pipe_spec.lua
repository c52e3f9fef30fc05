-- SPDX-License-Identifier: BSD-3-Clause
-- Tables of pipelines from Lua, and the tool that shows them; spec/c/test_pipe.c checks the properties of tables.
local pipe_table = require "ps.parallel.pipeline.table"
local picture = require "ps.parallel.pipeline.picture"
local paths = require "ps.paths"
local check = require "spec.check_lib"
local fails = check.fails

local folder = os.tmpname()
os.remove(folder)
os.execute("mkdir " .. folder)
teardown(function() os.execute("rm -r " .. folder) end)

local function tool(words)
  local p = assert(io.popen(("cd '%s' && '%s' tools/pipeline.lua %s 2>&1; echo $?"):format(paths.root, arg[-1],
    words)))
  local text = p:read "*a"
  p:close()
  return text:match("^(.-)(%d+)\n$")
end

describe("ps.pipe", function()
  it("returns the ranks' actions, their times, and the pairs that they hold", function()
    local t = pipe_table.table { schedule = "zb_h1", stages = 4, micro_batches = 8 }
    assert.same({ kind = "F", vstage = 2, micro = 0 }, t:row(2)[1])
    assert.same({ 2, 0 }, { t:place(2) })
    assert.same({ 2, 3 }, { t:held(2) })
    local course = t:simulate()
    assert.same({ 27, 3 / 27 }, { course.makespan, course.bubble })
    assert.same({ begin = 2, finish = 3 }, course.spans[3][1])
    assert.same({ first = 2, last = 27, busy = 24, peak = 0 }, course.ranks[3])
    assert.equal(27 * 2, t:simulate({ forward = 2, input = 2, weight = 2 }).makespan)
    assert.equal("YIELD", t:lower():row(3)[3].kind)
    local same = pipe_table.read(t:text(), "mine.csv")
    assert.same({ "custom", 4, 1, 8 }, { same.schedule, same.stages, same.virtual_stages, same.micro_batches })
    assert.equal(t:text(), same:text())
    assert.truthy(t:text(true):find("YIELD0", 1, true))
  end)

  it("cuts a model, and accepts Megatron's layouts", function()
    local t = pipe_table.table { schedule = "interleaved", stages = 2, virtual_stages = 2, micro_batches = 4 }
    local part, head = { forward = 1, input = 1, weight = 1 }, { forward = 9, input = 9, weight = 9 }
    local counts, times = pipe_table.cut(t, { part, part, part, part, part, head })
    assert.equal(6, counts[1] + counts[2] + counts[3] + counts[4])
    assert.truthy(times.makespan <= times.equal and times.bound <= times.makespan)
    assert.equal(6, times.bound_part)
    assert.same({ 4, 2, 2, 1, 1 }, pipe_table.layout("Et*3|(tt|)*2,m|L", "EtttttttmL", 5))
  end)

  it("names the fault", function()
    local function t() return pipe_table.table { schedule = "gpipe", stages = 4, micro_batches = 8 } end
    fails(function() pipe_table.table { schedule = "gpipe", stage = 4, micro_batches = 8 } end, "did you mean 'stages'")
    fails(function() pipe_table.table { schedule = "dualpipe", stages = 4, micro_batches = 8 } end,
      "no schedule 'dualpipe'; there are gpipe")
    fails(function() pipe_table.table { schedule = "1f1b", stages = 4, virtual_stages = 2, micro_batches = 8 } end,
      "1 virtual stage per rank, not 2")
    fails(function() pipe_table.read("0F0,0X0", "mine.csv") end, "mine.csv, line 1, cell 2: '0X0'")
    fails(function() t():row(4) end, "there is no rank 4")
    fails(function() t():simulate({ forwrad = 1 }) end, "did you mean 'forward'")
    fails(function() t():simulate(nil, { latencey = 1 }) end, "did you mean 'latency'")
    fails(function() pipe_table.layout("Et|tL", "EtttL", 2) end, "has 4 parts, the model has 5")
    fails(function() pipe_table.cut(t(), { { forward = 1 }, {}, {} }) end, "a model of 3 parts cannot be cut into 4")
  end)
end)

describe("tools/pipeline.lua", function()
  it("prints a table and draws it", function()
    local svg, csv = folder .. "/zb.svg", folder .. "/zb.csv"
    local text, code = tool(("--stages 2 --micro-batches 3 --schedule zb_h1 --out %s --csv %s"):format(svg, csv))
    assert.equal("0", code)
    assert.truthy(text:find("rank 0   F0 F1    I0 W0 F2 I1 W1 I2 W2\nrank 1      F0 I0 F1 I1 W0 F2 I2 W1 W2\n"
      .. "makespan 10, bubble 10.0 %", 1, true), text)
    assert.truthy(text:find("rank 1   busy 9, idle 1 before, 0 between, 0 after; in flight 1, waiting for W 2\n", 1,
      true), text)
    assert.equal("0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n", check.read(csv))
    local _, drawn = check.read(svg):gsub("<rect", "")
    assert.truthy(drawn > 2 + 18, drawn)
    local again = tool(("--read %s --weight 0.5"):format(csv))
    assert.truthy(again:find("custom: 2 stages", 1, true) and again:find("not whole", 1, true), again)
  end)

  it("draws a PNG by gnuplot", function()
    if os.execute("command -v gnuplot >/dev/null 2>&1") ~= 0 then
      pending("gnuplot is not installed")
      return
    end
    local png = folder .. "/a.png"
    local t = pipe_table.table { schedule = "zb_v", stages = 2, micro_batches = 4 }
    assert.truthy(picture.png(png, t, t:simulate()))
    assert.equal("\137PNG", check.read(png):sub(1, 4))
  end)

  it("refuses invalid arguments in one line", function()
    local text, code = tool "--stages 4 --micro-batches 8 --schedule zb_v --virtual-stages 3"
    assert.equal("1", code)
    assert.equal("pipeline.lua: schedule zb_v has 2 virtual stages per rank, not 3; interleaved and "
      .. "looped_bfs allow any number\n", text)
    assert.truthy(tool("--stages 4 --schedule gpipe"):find("give --schedule, --stages and --micro-batches", 1, true))
    assert.truthy(tool("--read /"):find("/: Is a directory", 1, true))
    for _, n in ipairs { 2, 64 } do          -- a table that the buffer of io holds, and one that it does not hold
      text, code = tool(("--stages 16 --micro-batches %d --schedule gpipe --csv /dev/full"):format(n))
      assert.truthy(text:find("/dev/full: No space left on device", 1, true), text)
      assert.equal("1", code)
    end
    assert.truthy(tool("--read x.csv --stages 3"):find("--stages does not apply with --read FILE", 1, true))
    assert.truthy(tool("--stages 4 --micro-batches 8 --schedule 1f1b --out a.pdf"):find("ends in .svg or .png", 1,
      true))
  end)
end)
