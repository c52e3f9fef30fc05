-- SPDX-License-Identifier: BSD-3-Clause
-- PatrickStar's benchmark (examples/benchmark): its sizes, a real run of a small one, and the table of sizes that fit.
local check = require "spec.check_lib"
local json = require "cjson"
local paths = require "ps.paths"
local ranks_lib = require "spec.ranks_lib"

local here = paths.root .. "/examples/benchmark"
local sizes = dofile(here .. "/models.lua")
local folder

setup(function() folder = ranks_lib.folder() end)
teardown(function() ranks_lib.remove(folder) end)

local function run(script, arguments)
  return check.shell(("OMP_NUM_THREADS=1 '%s' '%s/%s' %s"):format(paths.exe, here, script, arguments))
end

describe("the sizes", function()
  -- Names that state another number than their sizes have.
  local OTHER = { ["megatron_3.9B"] = 2.0, GPT_310B = 413.1 }

  it("have the parameters that their names say", function()
    local n = 0
    for _, name in ipairs(sizes.names()) do
      local size = sizes.of(name)
      local billions = OTHER[name] or tonumber(name:match "_([%d.]+)B$")
      if size.kind == "gpt2" and billions then
        n = n + 1
        local ratio = sizes.gpt_parameters(size) / 1e9 / billions
        assert(ratio > 0.95 and ratio < 1.17, ("%s: %.3f of its name"):format(name, ratio))
      end
    end
    assert.equal(26, n)
  end)

  it("may be numbers, and others are refused", function()
    local size = sizes.of "64/32/2/4/256"
    assert.same({ 64, 32, 2, 4, 256 }, { size.width, size.seq, size.layers, size.heads, size.vocabulary })
    assert.equal(50257, sizes.of("64/32/2/4").vocabulary)
    for _, name in ipairs { "GPT3_7B", "64/32/2", "64/32/2/4/256/1", "64/0/2/4", "64/x/2/4", "64/1.5/2/4", "" } do
      check.fails_saying({ ("there is no model '%s'; the models are Bert, Bertlarge"):format(name) },
        function() sizes.of(name) end)
    end
  end)
end)

describe("train.lua", function()
  it("trains a GPT, and prints each step and its rate", function()
    local said, code = run("train.lua",
      "--model 64/32/2/2/256 --batch 2 --steps 3 --precision fp32 --device cpu --json")
    assert.equal(0, code, said)
    for step = 1, 3 do
      assert.matches(("\nStep %d elapse [%%d.]+ s, [%%d.]+ Tflops per process, [%%d.]+ samples per second, loss 4%%.")
        :format(step), said)
    end
    local line = json.decode(said:match "({.*})")
    assert.equal(sizes.gpt_parameters(sizes.of "64/32/2/2/256"), line.parameters)
    for _, step in ipairs(line.steps) do
      local flops = step.tflops * 1e12 * step.seconds
      assert(math.abs(flops / (line.parameters * 2 * 32 * 8) - 1) < 1e-9, flops)
      assert(math.abs(step.samples_per_s * step.seconds - 2) < 1e-9)
    end
    assert(line.steps[3].loss < line.steps[1].loss)
  end)

  it("refuses a model that does not exist", function()
    local said, code = run("train.lua", "--model GPT3_7B")
    assert.equal(1, code)
    assert.matches("^train.lua: there is no model 'GPT3_7B'; the models are Bert", said)
  end)
end)

describe("scale.lua", function()
  it("plans sizes until two do not fit, and writes a table and a plot", function()
    local said, code = run("scale.lua", ("--hardware xeon-amx-2,a100-40x2 --host 600MB --batch 2 --precision bf16 "
      .. "--models 64/32/2/2/256,1024/32/12/16/256,1024/32/13/16/256,1024/32/14/16/256 --out '%s/out'"):format(folder))
    assert.equal(0, code, said)
    local csv = check.read(folder .. "/out/scale.csv")
    assert.matches("^machine,model,parameters,fits,device_peak_bytes,host_peak_bytes,disk_peak_bytes,least_s,most_s,"
      .. "least_tflops,most_tflops\n", csv)
    assert.matches("\nxeon%-amx%-2,64/32/2/2/256,118528,true,,%d+,,[%d.e-]+,[%d.e-]+,[%d.e-]+,[%d.e-]+\n", csv)
    assert.matches("\nxeon%-amx%-2,1024/32/12/16/256,%d+,false,,,,,,,\n", csv)
    assert.matches("\nxeon%-amx%-2,1024/32/13/16/256,%d+,false,,,,,,,\n", csv)
    assert.is_nil(csv:find("xeon-amx-2,1024/32/14", 1, true))
    -- 8 operations for each of 118,528 parameters, 2 rows of 32 tokens and 2 processes
    local least_s, most_s, least, most = csv:match(
      "\na100%-40x2,64/32/2/2/256,118528,true,%d+,%d+,,([%d.e-]+),([%d.e-]+),([%d.e-]+),([%d.e-]+)\n")
    local flops = 8 * 118528 * 2 * 32 * 2
    assert(math.abs(least * most_s * 1e12 / flops - 1) < 1e-6, least)
    assert(math.abs(most * least_s * 1e12 / flops - 1) < 1e-6, most)
    local markdown = check.read(folder .. "/out/scale.md")
    assert.matches("| | 64/32/2/2/256 | 1024/32/12/16/256 | 1024/32/13/16/256 | ", markdown, 1, true)
    assert.matches("\n| xeon%-amx%-2 | [%d.e-]+ to [%d.e-]+ | %- | %- |", markdown)
    assert.matches("\nxeon%-amx%-2 +64/32/2/2/256 +0%.0001185 G\n", said)
    local svg = check.read(folder .. "/out/scale.svg")
    assert.matches('<text [^>]*>largest GPT that fits, 2 rows of a process, bf16</text>', svg)
    assert.equal(2, select(2, svg:gsub('fill="#3385fe"', "")))
    assert.matches("</svg>\n$", svg)
    local speed = check.read(folder .. "/out/speed.svg")
    assert.matches("planned TFLOP/s of all processes, 2 rows of a process, bf16", speed, 1, true)
    assert.is_true(select(2, speed:gsub('width="22"', "")) >= 2)
    assert.matches("wrote scale.csv, scale.md, scale.svg, speed.svg into", said, 1, true)
  end)
end)
