-- SPDX-License-Identifier: BSD-3-Clause
-- Records of benches: bench/record.lua, and the files of docs/benchmarks/, each of which docs/benchmarks.md links.
local check = require "spec.check_lib"
local json = require "cjson"
local lfs = require "lfs"
local paths = require "ps.paths"

local function record(path, command)
  return check.shell(("cd '%s' && '%s' bench/record.lua '%s' '%s'"):format(paths.root, paths.exe, path, command))
end

describe("bench/record.lua", function()
  it("writes the machine, the day, the command and the last line's JSON", function()
    local path = os.tmpname()
    local said, code = record(path, [[echo first; echo "{\"a\": 1.5, \"list\": [1, 2], \"b\": {\"text\": \"x/y\"}}"]])
    assert.equal(0, code, said)
    local read = json.decode(check.read(path))
    assert.same({ a = 1.5, list = { 1, 2 }, b = { text = "x/y" } }, read.result)
    assert.matches("^echo first", read.command)
    assert.matches("^%d%d%d%d%-%d%d%-%d%d$", read.date)
    assert.matches(", %d+ cores$", read.machine)
    os.remove(path)
  end)

  it("records nothing of a command without JSON", function()
    local path = os.tmpname()
    os.remove(path)
    local said, code = record(path, "echo no figures")
    assert.equal(1, code)
    assert.matches("'echo no figures' ended without a line of JSON; nothing was recorded", said, 1, true)
    assert.is_nil(lfs.attributes(path))
  end)
end)

describe("the records of docs/benchmarks/", function()
  it("are complete, name a bench that exists, and are linked", function()
    local page, n = check.read(paths.root .. "/docs/benchmarks.md"), 0
    for name in lfs.dir(paths.root .. "/docs/benchmarks") do
      if name:find "%.json$" then
        n = n + 1
        local read = json.decode(check.read(paths.root .. "/docs/benchmarks/" .. name))
        for _, field in ipairs { "command", "machine", "date", "commit" } do
          assert.equal("string", type(read[field]), name .. ": " .. field)
        end
        assert.equal("table", type(read.result), name)
        local script = read.command:match "bench/[%w_]+%.lua" or read.command:match "examples/[%w_/]+%.lua"
        assert(script and lfs.attributes(paths.root .. "/" .. script, "mode"), name .. ": " .. read.command)
        assert.matches("(benchmarks/" .. name .. ")", page, 1, true)
      end
    end
    assert(n >= 2, n)
  end)

  -- Adds all numbers of a record's result to a list.
  local function numbers(value, list)
    if type(value) == "table" then
      for _, v in pairs(value) do numbers(v, list) end
    elseif type(value) == "number" then list[#list + 1] = value end
    return list
  end

  -- Returns whether a number as text is one of the values, rounded to the text's last digit.
  local function is_one_of(text, values)
    local digits = #text:gsub("[eE].*", ""):gsub("^[-0.]+", ""):gsub("%D", "")
    for _, value in ipairs(values) do
      if tonumber(("%%.%dg"):format(digits):format(value)) == tonumber(text) then return true end
    end
    return false
  end

  it("have the figures of the tables that link them", function()
    assert(is_one_of("5.4e-8", { 5.404e-08 }) and is_one_of("14.0082", { 14.00818 }))
    assert(is_one_of("66956546", { 66956546 }))
    assert(not is_one_of("5.5e-8", { 5.404e-08 }) and not is_one_of("1.05", { 1.0417 }))
    local page, n = check.read(paths.root .. "/docs/benchmarks.md"), 0
    for figures, name in page:gmatch "|([^|\n]*)|[^|\n]*%(benchmarks/([%w_]+%.json)%)[^|\n]*|\n" do
      local values = numbers(json.decode(check.read(paths.root .. "/docs/benchmarks/" .. name)).result, {})
      for text in figures:gmatch "%f[%w.]%d[%d.]*[eE]?%-?%d*" do
        n = n + 1
        assert(is_one_of(text, values), name .. " has no " .. text)
      end
    end
    assert(n >= 10, n)
    local own = check.read(paths.root .. "/examples/benchmark/README.md")
    local steps = json.decode(check.read(paths.root .. "/docs/benchmarks/patrickstar_bert.json")).result.steps
    for i, step in ipairs(steps) do
      assert.matches(("\n| %d | %.1f | %.3f | %.4f |\n"):format(i, step.seconds, step.tflops, step.loss), own, 1, true)
    end
  end)

  it("have the speed in README.md", function()
    local got = json.decode(check.read(paths.root .. "/docs/benchmarks/train_bf16.json")).result
    local row = check.read(paths.root .. "/README.md"):match "\n(|[^\n]*train_bf16%.json[^\n]*)\n"
    local compiled, eager = got[2], got[3]
    assert.is_nil(compiled.command:find "no%-compile")
    assert.matches(("**%.1fx the speed of compiled PyTorch**"):format(compiled.first_is_better_cpu_s), row, 1, true)
    assert.matches(("%.1fx without compilation"):format(eager.first_is_better_cpu_s), row, 1, true)
  end)

  it("have the figures of the Llama of 8 B in README.md", function()
    local got = json.decode(check.read(paths.root .. "/docs/benchmarks/larger_than_memory_8b.json")).result
    local row = check.read(paths.root .. "/README.md"):match "\n(|[^\n]*larger_than_memory_8b%.json[^\n]*)\n"
    for _, text in ipairs {
      ("All %.2f B parameters of a Llama in %s of memory"):format(got.parameters / 1e9, got.host:gsub("GiB", " GiB")),
      ("%s and a disk, %d tokens per step"):format(got.optimizer, got.tokens),
      ("a step takes %.2f times as long as its computation alone"):format(got.step_s / got.compute_s),
    } do assert.matches(text, row, 1, true) end
    assert.matches("moved bytes and peak memory are the plan's", row, 1, true)
    assert.near(1, got.bytes_read / got.planned_read, 1e-3)
    assert.near(1, got.bytes_written / got.planned_written, 1e-3)
    assert.near(1, got.host_peak / got.planned_peak, 1e-3)
  end)

  it("stand for all figures: each section with a table has a date and commands that exist", function()
    local page, n = check.read(paths.root .. "/docs/benchmarks.md"), 0
    for title, text in (page:gsub("\n##+ ", "\n\0")):gmatch "%z([^\n]*)([^%z]*)" do
      if text:find "\n|%-" then
        n = n + 1
        assert.matches("2026%-%d%d%-%d%d", text, title)
        local commands = 0
        for script in text:gmatch "bench/[%w_/]+%.%l+" do
          assert(lfs.attributes(paths.root .. "/" .. script, "mode"), script)
          commands = commands + 1
        end
        assert(commands > 0, title)
      end
    end
    assert(n >= 4, n)
  end)
end)
