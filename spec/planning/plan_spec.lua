-- SPDX-License-Identifier: BSD-3-Clause
-- tools/plan.lua: a script runs dry to the end of its first step. The plan is compared with real runs of the same
-- script: it trains in the least budget, with the bits of a run without tight budgets, and is refused in 0.97 of that
-- budget before its first step.
local cjson = require "cjson"
local lfs = require "lfs"
local pages = require "ps.planning.pages"
local paths = require "ps.paths"
local check = require "spec.check_lib"

local PROGRAM = paths.exe
local FOLDER = os.tmpname()
os.remove(FOLDER)
lfs.mkdir(FOLDER)

local function write(name, text)
  local path = FOLDER .. "/" .. name
  local f = assert(io.open(path, "w"))
  f:write(text)
  f:close()
  return path
end

-- Returns a command's output, errors and exit code.
local function run(words)
  local quoted = {}
  for i, word in ipairs(words) do quoted[i] = "'" .. word .. "'" end
  local errors = FOLDER .. "/stderr"
  local p = assert(io.popen(("%s 2>%s; echo $?"):format(table.concat(quoted, " "), errors)))
  local text = p:read "*a"
  p:close()
  local f = assert(io.open(errors))
  local said = f:read "*a"
  f:close()
  local out, code = text:match "^(.*)\n(%d+)\n$"
  if not out then out, code = "", text:match "(%d+)\n$" end
  return out, said, tonumber(code)
end

local function plan(...)
  local out, said, code = run { PROGRAM, "tools/plan.lua", "--json", ... }
  assert.truthy(code ~= 1, said)
  return cjson.decode(out), code
end

local SCRIPT = [[
local ps = require "ps"
local gpt2 = require "models.gpt2"
local device, budget, host, steps = arg[1], tonumber(arg[2]) or arg[2], arg[3], tonumber(arg[4] or 1)
local memory = { disk = { path = "/tmp" }, host = device == "cpu" and budget or host,
  device = device ~= "cpu" and budget or nil }
local shape = { n_layer = 1, n_embd = 32, n_head = 2, n_positions = 32, vocab_size = 256 }
local model, optimizer = ps.initialize { model_func = function() return gpt2.new(shape) end, quiet = true,
  config = { device = device, seed = 3, bf16 = { enabled = true }, memory = memory,
    rates = device ~= "cpu" and { host_adam = 1e9, device_adam = 4e9, up = 8e9, down = 8e9, at_once = 0 } or nil } }
local x = ps.randint(0, 256, { 8, 32 }, { dtype = "int32" })
local loss
for step = 1, steps do
  optimizer:zero_grad()
  loss = model(x, x)
  model:backward(loss)
  optimizer:step()
end
print(("%.17g"):format(loss:item()))
]]

describe("the plan of a script", function()
  local path = write("train.lua", SCRIPT)

  for _, device in ipairs { "cpu", "sim" } do
    it("has the least budget with which it trains on " .. device, function()
      local said = plan("--find", "budget", path, device, "8MiB", "8MiB")
      assert.truthy(said.fits)
      assert.equal(device, said.device)
      local least = said.least_budget
      local roomy = run { PROGRAM, path, device, "64MiB", "64MiB", "10" }
      assert.equal(roomy, (run { PROGRAM, path, device, ("%d"):format(least), "64MiB", "10" }))
      local _, why, code = run { PROGRAM, path, device, ("%d"):format(math.floor(0.97 * least)), "64MiB", "1" }
      assert.equal(1, code)
      assert.truthy(why:find("does not fit", 1, true), why)
    end)
  end

  it("has the largest batch and the largest model, and the number of missing bytes", function()
    local said, code = plan(path, "cpu", "4MiB")
    assert.equal(0, code)
    assert.equal(8, said.rows)
    assert.truthy(said.largest_batch > 8)
    assert.truthy(said.largest_model.blocks > said.blocks and said.largest_model.parameters > said.parameters)
    local out = table.concat(require("ps.planning.report").lines(said), "\n")
    for _, text in ipairs { "fits: yes", "least budget", "host %- disk", "largest micro%-batch" } do
      assert.truthy(out:find(text), out)
    end
    assert.is_nil(said.limited or said.largest_model.is_bound or said.largest_batch_is_bound)
    local bound = plan("--limit", "0.001", "--find", "model", path, "cpu", "4MiB")
    assert.same({ 0.001, { blocks = 1, parameters = said.parameters, is_bound = true } },
      { bound.limited, bound.largest_model })
    out = table.concat(require("ps.planning.report").lines(bound), "\n")
    assert.truthy(out:find("largest model: at least 1 blocks", 1, true), out)
    assert.truthy(out:find("the search ended after 0.001 s", 1, true), out)
    bound = plan("--limit", "0.001", "--find", "batch", path, "cpu", "128KiB")
    out = table.concat(require("ps.planning.report").lines(bound), "\n")
    assert.truthy(out:find("largest micro-batch: not found in time", 1, true), out)
    said, code = plan(path, "cpu", "600KiB")
    assert.equal(2, code)
    assert.truthy(said.short.least_budget > said.short.budget and said.short.budget == 600 * 2 ^ 10)
    assert.truthy(said.largest_batch < 8)
  end)

  -- The gradients of the token table and of the head (1 GiB each, more than a region of an arena) exist at different
  -- moments and must count once.
  it("covers all parameters of Llama 8B in 20 GiB of host memory and 50 GB of disk", function()
    local got = plan("--find", "nothing", "bench/larger_than_memory.lua", "--family", "llama", "--model", "llama-3-8b",
      "--optimizer", "AdamW8bit", "--master", "remainder", "--host", "20GiB", "--limit", "50000000000",
      "--disk", "/tmp", "--seq", "256")
    assert.is_true(got.fits)
    assert.equal(8030261248, got.parameters)
    assert.is_true(got.state_bytes < 6.04 * got.parameters, got.state_bytes)
    assert.is_true(got.process.nbytes < 20.5 * 2 ^ 30, got.process.nbytes)
    local host, table_bytes = got.tiers[1], 128256 * 4096 * 2
    assert.is_true(host.other > table_bytes and host.other < 1.7 * table_bytes, host.other)
    local least = 2 * (got.state_bytes - (host.budget - host.other))      -- what cannot stay is read and written
    assert.is_true(got.links[1].up + got.links[1].down < 1.1 * least, got.links[1].up)
  end)

  it("is the same by --dry-run, even if another file is called plan.lua", function()
    local by_option, _, code = run { PROGRAM, "--dry-run", "--json", "--find", "nothing", path, "cpu", "64MiB" }
    assert.equal(0, code)
    local one, other = plan("--find", "nothing", path, "cpu", "64MiB"), cjson.decode(by_option)
    for _, said in ipairs { one, other } do                -- the memory of a process is a measurement
      assert.truthy(said.process.nbytes == said.process.besides + said.tiers[1].peak and said.process.besides > 2 ^ 20)
      said.process = nil
    end
    assert.same(one, other)
  end)

  it("reads as a table", function()
    local out = run { PROGRAM, "tools/plan.lua", "--find", "nothing", path, "cpu", "4MiB" }
    local said = plan("--find", "nothing", path, "cpu", "4MiB")
    local measured = "process: [%d.]+ MiB of memory, of which [%d.]+ MiB are the program, Lua, libraries and "
      .. "what oneDNN keeps"
    local function told(text) return text:gsub(measured, "process") end
    local text, n = told(out)
    assert.equal(1, n)
    assert.equal(told(table.concat(require("ps.planning.report").lines(said), "\n")), text)
    assert.truthy(out:find("fits: yes", 1, true), out)
  end)
end)

describe("the memory of an engine's process", function()
  -- In the second model a weight is as large as a chunk, so the memory in which a weight was created could be reused
  -- for a chunk.
  for what, case in pairs { ["weights that share chunks"] = { layers = 12, inputs = 1024, chunk = 2 ^ 21 },
    ["weights as large as a chunk"] = { layers = 4, inputs = 4096, chunk = 2 ^ 22 } } do
    it("is that of its tiers, for " .. what .. ": making the model leaves nothing behind", function()
      local why = check.sanitized()
      if why then return pending(why) end
      local path = write("taken.lua", ([[
local ps = require "ps"
local nn = ps.nn
local function anonymous()
  for line in io.lines "/proc/self/status" do
    local kib = line:match "^RssAnon:%%s+(%%d+)"
    if kib then return kib * 1024 end
  end
end
local layers = {}
local before = anonymous()
local model = ps.initialize { quiet = true, config = { plan_print = false, chunk_size = %d },
  model_func = function()
    for i = 1, %d do layers[i] = nn.Linear(%d, 1024, { bias = false }) end
    return nn.ModuleList(layers)
  end }
collectgarbage()
local tier = ps.memory().tiers[1]
print(anonymous() - before - tier.chunks - tier.other, tier.chunks)]]):format(case.chunk, case.layers, case.inputs))
      local out, said, code = run { PROGRAM, path }
      assert.equal(0, code, said)
      local rest, chunks = out:match "^(%-?%d+)%s+(%d+)"
      assert.truthy(tonumber(chunks) >= case.layers * case.inputs * 1024 * 4, out)
      assert.truthy(tonumber(rest) < 12 * 2 ^ 20, out)         -- memory of the program itself
    end)
  end
end)

describe("a plan's line about the process", function()
  -- oneDNN packs these matrices into buffers of 2 MiB per thread, which remain in the heap. Its code is several MiB.
  it("includes the memory that oneDNN keeps of its products", function()
    local why = check.sanitized()
    if why then return pending(why) end
    local path = write("products.lua", [[
local ps = require "ps"
local gpt2 = require "models.gpt2"
local shape = { n_layer = 2, n_embd = 512, n_head = 8, n_positions = 128, vocab_size = 4096 }
local model, optimizer = ps.initialize { model_func = function() return gpt2.new(shape) end, quiet = true,
  config = { device = "cpu", plan_print = false } }
for step = 1, 3 do
  local x = ps.randint(0, 4096, { 2, 128 }, { dtype = "int32" })
  optimizer:zero_grad()
  model:backward(model(x, x))
  optimizer:step()
end
print(ps.peak_rss())]])
    if not pages.resident() or not pages.of_files() then return pending "the system does not report pages of " ..
      "processes" end
    local said = plan("--find", "nothing", path)
    local out, problem, code = run { PROGRAM, path }
    assert.equal(0, code, problem)
    local off = said.process.nbytes / tonumber(out) - 1
    assert.truthy(said.process.kept > 2 ^ 21 and math.abs(off) < 0.05, ("%g"):format(off))
  end)
end)

describe("the memory of a dry run's process", function()
  it("does not grow with the tensors, since ops compute nothing", function()
    local why = check.sanitized()
    if why then return pending(why) end
    local path = write("blocks.lua", [[
local ps = require "ps"
local gpt2 = require "models.gpt2"
local shape = { n_layer = tonumber(arg[1]), n_embd = 512, n_head = 8, n_positions = 64, vocab_size = 256 }
local model, optimizer = ps.initialize { model_func = function() return gpt2.new(shape) end, quiet = true,
  config = { device = "cpu", bf16 = { enabled = true }, plan_print = false } }
local x = ps.randint(0, 256, { 8, 64 }, { dtype = "int32" })
optimizer:zero_grad()
model:backward(model(x, x))
optimizer:step()]])
    local few, many = plan("--find", "nothing", path, "1"), plan("--find", "nothing", path, "9")
    assert.truthy(many.tiers[1].peak > few.tiers[1].peak + 8 * 12 * 512 ^ 2 * 12)
    local more = many.process.besides - (many.process.kept or 0) - (few.process.besides - (few.process.kept or 0))
    assert.truthy(more < 16 * 2 ^ 20, more)                 -- Lua's tables and the plan's
  end)
end)

describe("the plan of another machine", function()
  local path = write("rented.lua", [[
local ps = require "ps"
local gpt2 = require "models.gpt2"
if arg[1] == "ranks" then ps.init_distributed { quiet = true } end
local model, optimizer = ps.initialize { quiet = true, model_func = function()
  return gpt2.new { n_layer = 24, n_embd = 2048, n_head = 16, n_positions = 1024, vocab_size = 50304 } end,
  config = { device = "cuda", bf16 = { enabled = true }, zero_optimization = { stage = arg[1] and 3 or 0 } } }
local x = ps.randint(0, 50304, { 2, 1024 }, { dtype = "int32" })
model:backward(model(x, x))
optimizer:step()]])

  it("has its memory, and its seconds as a range", function()
    local said, code = plan("--find", "nothing", "--hardware", "h100", path)
    assert.equal(0, code)
    assert.equal("cuda", said.device)
    assert.equal(1313722368, said.parameters)             -- 24 x (12 C^2 + 13 C) + (50304 + 1024) C + 2 C
    local device = said.tiers[1]
    assert.truthy(device.budget < 0.8 * 80 * 2 ^ 30 and device.peak >= 14 * said.parameters)
    -- six operations per parameter and token for the layers and the head, and half of attention, since it is causal
    local tokens, matrices = 2 * 1024, 24 * 12 * 2048 ^ 2 + 50304 * 2048
    assert.truthy(said.seconds.flops > 6 * tokens * matrices and said.seconds.flops < 1.1 * 6 * tokens * matrices)
    assert.truthy(said.seconds.step[1] < said.seconds.step[2])
    assert.truthy(said.seconds.compute[1] > said.seconds.flops / 989.4e12)
    assert.truthy(table.concat(said.notes, "\n"):find("the CUDA context", 1, true))
  end)

  it("has the work space of the card's own kernels: a panel of logits by the card's memory", function()
    -- 8192 rows of 50304 logits. A panel uses 1/128 of an H100's memory, 633 MiB, so there are three panels of 2816
    -- rows. On an H200 it is limited to 1 GiB, so there are two panels of 4096 rows. A logit has four bytes, and its
    -- gradient two.
    local wide = write("wide.lua", [[
local ps = require "ps"
local gpt2 = require "models.gpt2"
local model, optimizer = ps.initialize { quiet = true, model_func = function()
  return gpt2.new { n_layer = 1, n_embd = 64, n_head = 1, n_positions = 1024, vocab_size = 50304 } end,
  config = { device = "cuda", bf16 = { enabled = true } } }
local x = ps.randint(0, 50304, { 8, 1024 }, { dtype = "int32" })
model:backward(model(x, x))
optimizer:step()]])
    local peak = {}
    for _, card in ipairs { "h100", "h200" } do
      local said, code = plan("--find", "nothing", "--hardware", card, wide)
      assert.equal(0, code)
      assert.truthy(table.concat(said.notes, "\n"):find("the rules of its kernels, for 132 multiprocessors", 1, true))
      peak[card] = said.tiers[1].peak
    end
    assert.truthy(peak.h100 > 2816 * 50304 * 6)
    -- an arena's block is up to 1/32 larger than its contents
    assert.truthy(math.abs((peak.h200 - peak.h100) / ((4096 - 2816) * 50304 * 6) - 1) < 1 / 32, peak.h200 - peak.h100)
  end)

  it("runs one rank of each kind", function()
    local said, code = plan("--find", "nothing", "--hardware", "h100x4", path, "ranks")
    assert.equal(0, code)
    assert.equal(4, said.world)
    assert.equal(0, said.kinds[1])
    assert.truthy(said.gathered > 0 and said.seconds.communication[1] > 0)
    local sum = 0
    for _, numel in ipairs(said.owned) do sum = sum + numel end
    assert.truthy(sum >= said.parameters and #said.owned == 4)
  end)

  it("of several GPUs and a script of one process names the remedy", function()
    for option, way in pairs { ["--hardware=h200x8"] = "--hardware h200", ["--ranks=8"] = "--ranks 1" } do
      local name, value = option:match "(.*)=(.*)"
      local _, said, code = run { PROGRAM, "tools/plan.lua", "--find", "nothing", name, value, path }
      assert.equal(1, code)
      local wanted = "rented.lua:4: this plan has 8 processes, but the script does not call ps.init_distributed() "
        .. "before ps.initialize: call it, or plan one process with " .. way .. "\n"
      assert.truthy(said:find(wanted, 1, true), said)
    end
  end)

  it("counts only memory if the kernels cannot run", function()
    local said = plan("--find", "nothing", "--hardware", "v100-32", path)
    assert.is_nil(said.seconds)
    assert.truthy(table.concat(said.notes, "\n"):find("only memory is counted", 1, true))
  end)

  it("refuses an invalid host memory, and one too small for a share, by the option and the key", function()
    local own = write("own.lua", SCRIPT:gsub("memory = memory,", ""))
    for _, words in ipairs { "0", "0.5", "nan", "1e30", "many", "10%" } do
      local _, said, code = run { PROGRAM, "tools/plan.lua", "--host", words, own, "cpu" }
      assert.equal(1, code)
      assert.truthy(said:find(("--host %s: it takes bytes above 0"):format(words), 1, true), said)
    end
    local _, said, code = run { PROGRAM, "tools/plan.lua", "--host", "1", own, "cpu" }
    assert.equal(1, code)
    assert.truthy(said:find("config: memory.host is 80% of 1 available bytes", 1, true), said)
    local out
    out, _, code = run { PROGRAM, "tools/plan.lua", "--find", "nothing", "--host", "1MB", own, "cpu" }
    assert.equal(2, code)
    assert.truthy(out:find("only 976.6 KiB are left on this machine, and 64 MiB have to stay free", 1, true), out)
    assert.truthy(out:find("The model has [^\n]+\nthe largest of "), out)                   -- the text ends with a list
  end)

  it("of an unknown name lists the known", function()
    local _, said, code = run { PROGRAM, "tools/plan.lua", "--hardware", "b1000", path }
    assert.equal(1, code)
    for _, name in ipairs { "a100-40", "a100-80", "h100", "h200", "v100-32", "xeon-amx-2", "probe.lua" } do
      assert.truthy(said:find(name, 1, true), said)
    end
  end)

  it("of an invalid table of a machine names the missing field, and does not affect the other tables", function()
    local hardware = require "ps.planning.hardware"
    local root, whole = paths.root, check.read(paths.root .. "/tools/hardware/xeon-amx-2.lua")
    lfs.mkdir(FOLDER .. "/tools")
    lfs.mkdir(FOLDER .. "/tools/hardware")
    for name, text in pairs { good = whole, empty = "", cut = whole:sub(1, -20),
      slow = (whole:gsub("up = [%w.]+, ", "")),
      vague = (whole:gsub("memory = { 0.5, 1 }", "memory = { 0.5 }")), silent = (whole:gsub("text = ", "name = ")) } do
      write("tools/hardware/" .. name .. ".lua", text)
    end
    paths.root = FOLDER
    local ok, problem = pcall(function()
      assert.same({ "cut", "empty", "good", "silent", "slow", "vague" }, hardware.names())
      assert.equal(24e9, hardware.find("good").machine.host_nbytes)
      for name, told in pairs { empty = "it returned nil, not a table", cut = "cut.lua:", slow = "links.up is nil",
        vague = "efficiency.memory.2 is nil", silent = "text is nil" } do
        check.fails_saying({ ("%s/tools/hardware/%s.lua is not a table of a machine: "):format(FOLDER, name), told },
          function() hardware.find(name) end)
      end
    end)
    paths.root = root
    os.execute(("rm -r '%s/tools'"):format(FOLDER))
    assert.truthy(ok, problem)
  end)
end)

describe("a dry run", function()
  local function refused(text, ...)
    local path = write("bad.lua", text)
    local _, said, code = run { PROGRAM, "tools/plan.lua", path, "word", "another" }
    assert.equal(1, code)
    for _, wanted in ipairs { ... } do assert.truthy(said:find(wanted, 1, true), said) end
  end

  it("refuses a script that reads a value, with the script's line", function()
    refused([[
local ps = require "ps"
local t = ps.ones({ 2 }) * 3
print(t:sum():item())]], "bad.lua:3: a value was read before the end of the first optimizer:step()")
  end)

  it("lets a script read values that it wrote itself", function()
    refused([[
local ps = require "ps"
local t = ps.tensor { 3, 4 }
if t:tolist()[2] == 4 then error "as written" end]], "bad.lua:3: as written")
  end)

  it("names the line of a script that fails, has no step, or exits", function()
    refused("local x = nil\nprint(x.y)", "bad.lua:2: attempt to index")
    refused("local = 3", "bad.lua:1:")
    refused("local ps = require 'ps'\nerror { code = 3 }", "bad.lua:2: the error is a table, not a string: { code")
    refused([[
local ps = require "ps"
local Net = ps.nn.class "Net"
function Net:init() self.l = ps.nn.Linear(4, 4) end
function Net:forward(x)
  local h = self.l(x)
  return h + ps.ones { 3, 7 }
end
local model = ps.initialize { quiet = true, model_func = function() return Net() end,
  config = { optimizer = { type = "AdamW" } } }
model:backward(model(ps.randn { 2, 4 }):sum())]], "bad.lua:6: add: shapes do not broadcast")
    refused("print 'nothing'", "ended without a call of optimizer:step()")
    refused("print 'nothing'\nos.exit(0)", "bad.lua:2:", "os.exit(0)")
    refused('require("argparse")("bad.lua", "A script."):parse()', "called os.exit(1)", "too many arguments")
    refused('local p = require("argparse")("bad.lua", "")\np:argument "a"\np:argument "b"\nerror(p:parse().b, 0)',
      "another")
    local _, said, code = run { PROGRAM, "tools/plan.lua", FOLDER .. "/missing.lua" }
    assert.equal(1, code)
    assert.truthy(said:find("missing.lua", 1, true), said)
  end)

  it("counts targets of -100 that the script wrote", function()
    local text = [[
local ps = require "ps"
local model, optimizer = ps.initialize { quiet = true, config = { gradient_accumulation_steps = 2 },
  model_func = function() return require("models.gpt2").new { n_layer = 1, n_embd = 8, n_head = 1, n_positions = 4,
    vocab_size = 16 } end }
local x = ps.tensor({ { 1, 2, 3, 4 } }, { dtype = "int32" })
local y = ps.tensor({ { 2, 3, %s, -100 } }, { dtype = "int32" })
for _ = 1, 2 do
  model:backward(model(x, y))
  optimizer:step()
end]]
    local path = write("ignored.lua", text:format "-100")
    local some = plan("--find", "nothing", path)
    assert.truthy(some.fits)
    local function has_adam(said)
      for _, op in ipairs(said.ops) do if op.name == "adam" or op.name == "adam_" then return true end end
      return false
    end
    assert.is_true(has_adam(some))
    write("ignored.lua", (text:format "-100"):gsub("2, 3, %-100", "-100, -100, -100"))   -- such a step is skipped
    assert.is_false(has_adam(plan("--find", "nothing", path)))
  end)

  it("lets a script read files that it wrote, and removes them", function()
    local target = FOLDER .. "/out"
    local path = write("writes.lua", ([[
local ps = require "ps"
local fcntl, unistd, lfs = require "posix.fcntl", require "posix.unistd", require "lfs"
local folder = %q
assert(lfs.mkdir(folder) and lfs.attributes(folder, "mode") == "directory")
local f = assert(io.open(folder .. "/text", "w"))
f:write "one\n"
f:close()
f = assert(io.open(folder .. "/text", "a"))
f:write "two\n"
f:close()
local lines = {}
for line in io.lines(folder .. "/text") do lines[#lines + 1] = line end
assert(table.concat(lines, " ") == "one two")
assert(os.rename(folder .. "/text", folder .. "/other") and not io.open(folder .. "/text"))
local dry = os.getenv "TMPDIR" .. "/psluajit-dry-" .. unistd.getpid()
local fd = assert(fcntl.open(folder .. "/log", fcntl.O_WRONLY + fcntl.O_CREAT + fcntl.O_APPEND))
assert(unistd.write(fd, "line") == 4)
unistd.close(fd)
assert(io.open(folder .. "/./log"):read "*a" == "line")
assert(io.open(arg[0], "a")):close()
local own = assert(io.open(arg[0])):read "*a"
assert(own:find("local ps", 1, true), "a file that is added to keeps what it has")
ps.data.encode_text(("text "):rep(100), folder .. "/train.bin", ps.tokenizer.bytes())
ps.save({ a = ps.tensor { 1, 2, 3 }, made = ps.randn { 1000, 1000 } }, folder .. "/saved.pt")
local saved = ps.load(folder .. "/saved.pt")        -- values that the script wrote are known, and those of ops are 0
assert(saved.a:tolist()[3] == 3 and saved.made:shape()[2] == 1000)
ps.safetensors.save(folder .. "/saved.safetensors", { made = ps.randn { 1000, 1000 } }, nil, { checksums = true })
assert(ps.load(folder .. "/saved.safetensors").made:numel() == 1e6)
local x, y = ps.data.loader { shards = { folder .. "/train.bin" }, batch = 2, seq = 8 }:next()
assert(x:tolist()[1][2] == y:tolist()[1][1])
local model = ps.nn.Linear(1000, 1000)
local optimizer = ps.optim.AdamW(model, { max_norm = 1 })
for _, async in ipairs { false, true } do
  ps.checkpoints.save(folder .. "/run", { model = model, optimizer = optimizer, step = 1, async = async })
end
ps.checkpoints.wait()
ps.checkpoints.load(folder .. "/run/step-00000001.safetensors", { model = model })
for name in lfs.dir(dry) do
  assert(lfs.attributes(dry .. "/" .. name, "blocks") < 1000, "a file of values that are not here takes no space")
end
ps.backward(model(ps.randn { 4, 1000 }):sum())
optimizer:step()]]):format(target))
    local temporary = FOLDER .. "/temporary"
    assert(lfs.mkdir(temporary))
    local out, said, code = run { "env", "TMPDIR=" .. temporary, PROGRAM, "tools/plan.lua", "--json", path }
    assert.equal(0, code, said)
    -- weights, gradients and two averages, each of 1001 x 1000 floats
    assert.truthy(cjson.decode(out).plain.cpu >= 4 * 4 * 1001 * 1000)
    assert.is_nil(lfs.attributes(target))
    assert(lfs.rmdir(temporary))                               -- fails unless it is empty
  end)

  it("starts no program, and names the program", function()
    refused('io.popen("ls")', "bad.lua:1: a dry run does not start programs")
    refused('require("posix.unistd").fork()', "bad.lua:1: a dry run does not start programs")
  end)

  it("plans the examples", function()
    local text = write("text.txt", ("to be or not to be\n"):rep(4000))
    for _, words in ipairs { { "examples/train_char.lua", "--data", text },
      { "examples/train_gpt2.lua", "--data", text, "--out", FOLDER .. "/run", "--steps", "10" } } do
      local out, said, code = run { PROGRAM, "tools/plan.lua", "--json", unpack(words) }
      assert.equal(0, code, said)
      assert.truthy(cjson.decode(out).plain.cpu > 2 ^ 20)
    end
    assert.is_nil(lfs.attributes(FOLDER .. "/run"))
    -- this script catches its errors, also those of budgets that the search tries
    local out, said, code = run { PROGRAM, "tools/plan.lua", "--json", "examples/train_chunked.lua", "--data", text,
      "--host", "100MiB", "--disk", FOLDER }
    assert.equal(0, code, said)
    local found = cjson.decode(out)
    assert.is_true(found.fits and found.least_budget < 100 * 2 ^ 20)
  end)

  it("is refused in a process that a fork cannot copy, with the cause", function()
    local script = write("whole.lua", SCRIPT)
    local CALL = ('print(pcall(require("ps.planning").plan, { script = "%s", find = "nothing" }))'):format(script)
    local loaded = run { PROGRAM, write("loaded.lua", 'require "ps"\n' .. CALL) }
    assert.matches('^false\t.*this process has loaded psluajit %(require "ps"%), which a fork cannot copy', loaded)
    assert.matches("tools/plan.lua SCRIPT", loaded)
    local threads = write("threads.lua", [[
      local ffi = require "ffi"
      ffi.cdef "int pthread_create(unsigned long *, const void *, void *(*)(void *), void *); unsigned sleep(unsigned);"
      ffi.C.pthread_create(ffi.new "unsigned long[1]", nil, ffi.cast("void *(*)(void *)", ffi.C.sleep),
        ffi.cast("void *", 30))
    ]] .. CALL)
    assert.matches("^false\t.*this process has 2 threads, which a fork cannot copy", (run { PROGRAM, threads }))
  end)
end)
