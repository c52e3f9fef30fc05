-- SPDX-License-Identifier: BSD-3-Clause
-- examples/train_gpt2.lua: a run, a resumed run, and runs that --resume refuses without changing a file.
local lfs = require "lfs"
local paths = require "ps.paths"
local check = require "spec.check_lib"

local folder

local function write(name, text) check.write(folder .. "/" .. name, text) end

-- Returns every file of a run with its bytes.
local function files(out)
  local all = {}
  for name in lfs.dir(folder .. "/" .. out) do
    local f = lfs.attributes(folder .. "/" .. out .. "/" .. name, "mode") == "file"
      and io.open(folder .. "/" .. out .. "/" .. name, "rb")
    if f then
      all[name] = f:read("*a")
      f:close()
    end
  end
  return all
end

-- Returns the output of an example, and its exit code.
local function example(options, name)
  local command = ("cd %s && OMP_NUM_THREADS=1 timeout 300 %s %s/examples/%s %s 2>&1; echo \"|$?\""):format(folder,
    paths.exe, paths.root, name or "train_gpt2.lua", options)
  local p = assert(io.popen(command))
  local text, code = p:read("*a"):match("^(.*)|(%d+)\n$")
  p:close()
  return text, tonumber(code)
end

local SMALL = "--model tiny --seq 16 --batch 2 --dtype fp32 --eval-batches 2 "

local function train(data, steps, more)
  return example(("%s --out run --data %s --steps %d %s"):format(SMALL, data, steps, more or ""))
end

local function has(text, ...)
  for _, part in ipairs { ... } do assert.truthy(text:find(part, 1, true), text) end
end

local function refused(data, more, ...)
  local before = files "run"
  local text, code = train(data, 8, more)
  assert.equal(1, code, text)
  has(text, ...)
  assert.same(before, files "run")
end

describe("train_gpt2.lua", function()
  setup(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(lfs.mkdir(folder))
    write("text.txt", ("a line of text to learn\n"):rep(200))
    write("other.txt", ("another one, of another length\n"):rep(200))
    write("alike.txt", ("a line of TEXT to learn\n"):rep(200))
  end)

  teardown(function() os.execute("rm -rf " .. folder) end)

  it("has nothing to continue in a folder without a run, and leaves no file there", function()
    local text, code = train("text.txt", 8, "--resume")
    assert.equal(1, code, text)
    assert.truthy(text:find("run holds no checkpoint", 1, true), text)
    assert.is_nil(lfs.attributes(folder .. "/run"))
  end)

  it("continues with the data of its start", function()
    local text, code = train("text.txt", 4)
    assert.equal(0, code, text)
    text, code = train("text.txt", 6, "--resume")
    assert.equal(0, code, text)
    assert.truthy(text:find("resumed from run/step-00000004", 1, true), text)
  end)

  it("writes the trained model with its tokenizer, which tools/generate.lua continues texts with", function()
    local ps = require "ps"
    local run = folder .. "/run"
    local model = ps.from_pretrained(run .. "/model", { dtype = "fp32" })
    local saved = ps.safetensors.open(run .. "/step-00000006.safetensors")
    for name, value in pairs(model:state_dict { tied = false }) do
      assert.is_true(ps.equal(saved:tensor(name), value), name)
    end
    local text = { "\xe2\x82\xac \xf0\x9f\x98\x80" }
    for code = 0, 0x7f do text[#text + 1] = string.char(code) end
    for code = 0x80, 0x7ff do text[#text + 1] = string.char(0xc0 + math.floor(code / 64), 0x80 + code % 64) end
    text = table.concat(text)
    local tok = ps.tokenizer.from_pretrained(run .. "/model")
    assert.same(ps.tokenizer.bytes():encode(text), tok:encode(text))
    assert.equal(256, tok.vocab_size)
    local config = check.read(run .. "/model/config.json")    -- transformers would assume 50256
    assert.truthy(config:find('"bos_token_id":null', 1, true) and config:find('"eos_token_id":null', 1, true), config)
    local out, code = check.shell(("cd '%s' && OMP_NUM_THREADS=1 timeout 120 '%s' '%s/tools/generate.lua' %s --start "
      .. "'a line' --max-new 4 2>&1"):format(folder, paths.exe, paths.root, "run/model"))
    assert.equal(0, code, out)
    assert.equal("a line", out:sub(1, 6))
    model:save_gguf(folder .. "/model.gguf", { type = "f32" })
    assert.same(ps.tokenizer.bytes():encode(text), ps.tokenizer.from_pretrained(folder .. "/model.gguf"):encode(text))
    out, code = check.shell(("cd '%s' && timeout 120 '%s' '%s/tools/generate.lua' run --start a 2>&1"):format(folder,
      paths.exe, paths.root))
    assert.equal(1, code, out)
    has(out, "run has checkpoints of a run, not a model: pass run/model")
  end)

  it("refuses to continue with other data, and does not change the run's files", function()
    refused("other.txt", "--resume", "run/train.bin", "other.txt", "--out")
    refused("alike.txt", "--resume", "run/train.bin", "alike.txt")        -- has the same length
    refused("nowhere.txt", "--resume", "nowhere.txt")
    local text, code = train("text.txt", 8, "--resume")
    assert.equal(0, code, text)
    assert.truthy(text:find("resumed from run/step-00000006", 1, true), text)
  end)

  it("starts no new run in a folder that has one, and changes no file there", function()
    refused("other.txt", "", "train_gpt2.lua: run has a run, at run/step-0000000", "--resume", "--force", "--out")
  end)

  it("leaves an earlier run as it was, and resumable, if a new one with --force cannot begin", function()
    write("empty.txt", "")
    write("short.txt", "a few words")
    refused("empty.txt", "--force", "train_gpt2.lua: empty.txt: the text is too short")
    refused("short.txt", "--force", "train_gpt2.lua: short.txt: the text is too short: its held-out tenth has 2 bytes")
    refused("text.txt", "--force --batch 1000000000")
    refused("text.txt", "--force --device nope")
    local text, code = train("text.txt", 8, "--resume")
    assert.equal(0, code, text)
    has(text, "nothing to do: the checkpoint is at step 8")
  end)

  it("starts a new run with --force", function()
    local before = files "run"
    local text, code = train("other.txt", 1, "--force")
    assert.equal(0, code, text)
    assert.not_equal(before["train.bin"], files("run")["train.bin"])
  end)

  it("prints that a new run replaces an earlier one", function()
    local text, code = train("other.txt", 1, "--force")
    assert.equal(0, code, text)
    has(text, "run has an earlier run (at run/step-00000001", "), which the new one replaces")
  end)

  it("--resume alone continues with the run's own options, to the same bits", function()
    local options = SMALL .. "--accumulate 2 --lr 0.003 --dropout 0.1 --seed 7 --steps 6 --eval-every 3 --data text.txt"
    local text, code = example(options .. " --out whole")
    assert.equal(0, code, text)
    os.execute(("cp -r %s/whole %s/cut"):format(folder, folder))
    assert(os.remove(folder .. "/cut/step-00000006.safetensors"))
    write("cut/latest", (files("whole").latest:gsub("step%-00000006", "step-00000004")))
    text, code = example "--resume --out cut"
    assert.equal(0, code, text)
    has(text, "resumed from cut/step-00000004", "6 steps; held-out loss every 3 steps, on 2 batches")
    local whole, cut = files "whole", files "cut"
    assert.truthy(whole["step-00000006.safetensors"] == cut["step-00000006.safetensors"])
    local function losses(log)  -- Returns all values except tokens per second.
      return (log:gsub(",%d+,([^,\n]*,[^,\n]*,[^,\n]*\n)", ",%1"))
    end
    assert.equal(losses(whole["log.csv"]), losses(cut["log.csv"]))
  end)

  it("--resume refuses options that would make it another run, and prints other changes", function()
    local before = files "cut"
    for option, value in pairs { model = "small", batch = 4, seq = 8, accumulate = 1, dtype = "bf16", lr = 0.001,
      dropout = 0, seed = 8 } do
      local text, code = example(("--resume --out cut --steps 9 --%s %s"):format(option, value))
      assert.equal(1, code, text)
      has(text, ("--%s %s: the run in cut has "):format(option, value))
    end
    local text, code = example "--resume --out cut --minutes 1"
    assert.equal(1, code, text)
    has(text, "--minutes is for a new run")
    text, code = example "--resume --out cut --steps 4"
    assert.equal(0, code, text)
    assert.matches("nothing to do: the checkpoint is at step 6, %-%-steps is 4\n$", text)
    assert.is_nil(text:find("loss curve", 1, true))
    assert.same(before, files "cut")
    text, code = example "--resume --out cut --steps 7 --eval-batches 3"
    assert.equal(0, code, text)
    has(text, "--steps is 7 from here on; it was 6; the learning rate follows the new number",
      "--eval-batches is 3 from here on; it was 2", "7 steps; held-out loss every 3 steps, on 3 batches")
  end)

  it("also holds out a tenth of a text in one line, and names a text that is too short", function()
    write("line.txt", ("words in one line "):rep(200) .. "\n")
    local text, code = example(SMALL .. "--data line.txt --out one --steps 2")
    assert.equal(0, code, text)
    has(text, "3,240 bytes of training text, 361 held out")
    write("short.txt", "a few words")
    text, code = example(SMALL .. "--data short.txt --out few --steps 2")
    assert.equal(1, code, text)
    has(text, "train_gpt2.lua: short.txt: the text is too short: its held-out tenth has 2 bytes, but a row of --seq 16 "
      .. "and its targets are 17 bytes")
  end)

  it("--minutes runs as many steps as fit, and prints their number", function()
    local text, code = example(SMALL .. "--data text.txt --out timed --minutes 0.02")
    assert.equal(0, code, text)
    local steps = text:match "measured %d+ steps: [%d.]+ s each on this machine.* 0%.02 minutes have room for (%d+) "
    assert.truthy(steps, text)
    has(text, ("done: %s steps"):format(steps))
    assert.truthy(tonumber(steps) > 1, text)
    assert.equal(tonumber(steps) < 100, text:find("teach a new model little", 1, true) ~= nil, text)
    text, code = example(SMALL .. "--data text.txt --out short --minutes 0.0001")
    assert.equal(0, code, text)
    has(text, "\n1 steps teach a new model little: give more --minutes, or a smaller --model, --batch or --seq\n")
  end)

  it("--minutes leaves most of the time to the steps, also if measuring the held-out loss takes long", function()
    write("long.txt", ("words in a line\n"):rep(4000))
    local text, code = example(SMALL .. "--data long.txt --out long --minutes 0.03 --eval-batches 250")
    assert.equal(0, code, text)
    local step_s, eval_s, steps = text:match "steps: ([%d.]+) s each on this machine, ([%d.]+) s .-room for (%d+) "
    assert.is_true(tonumber(eval_s) > 20 * tonumber(step_s), text)
    assert.is_true(steps * step_s > 0.5 * (1.8 - 4 * eval_s), text)
  end)

  it("train_chunked.lua names in one line the fault of its configuration, files and budgets", function()
    write("key.json", '{ "optimzer": {} }')
    write("value.json", '{ "optimizer": { "params": { "lr": -1 } } }')
    write("cut.json", "{")
    for given, line in pairs {
      ["--config key.json"] = "config: unknown key optimzer; did you mean 'optimizer'?",
      ["--config value.json"] = "config: optimizer.params.lr is -1; expected a number of at least 0 that fp32 holds",
      ["--config cut.json"] = "cut.json:1:2: expected a key in quotes, found the end of the file",
      ["--config none.json"] = "config: cannot read none.json: No such file or directory (nor is it base64 of a "
        .. "JSON object)",
      ["--device gpu"] = 'config: device is "gpu"; expected "auto", "cpu", "sim" or "cuda"',
      ["--model nope"] = "gpt2: there is no preset 'nope' "
        .. "(the presets are char, gpt2, gpt2-large, gpt2-medium, gpt2-xl, small, tiny)",
      ["--data none.txt"] = "cannot open none.txt: No such file or directory",
    } do
      local text, code = example("--data text.txt --model tiny --seq 16 --out no --steps 2 " .. given,
        "train_chunked.lua")
      assert.same({ 1, "train_chunked.lua: " .. line .. "\n" }, { code, text })
    end
    local text, code = example("--data text.txt --model tiny --seq 16 --out no --host 20KiB", "train_chunked.lua")
    assert.equal(1, code)
    assert.matches("^train_chunked%.lua: the model does not fit: [^\n]*raise memory.host[^\n]*\n$", text)
  end)

  it("train_chunked.lua keeps an earlier run if a new one with --force cannot begin", function()
    local options = "--data text.txt --model tiny --seq 16 --out kept --steps 1 "
    local text, code = example(options, "train_chunked.lua")
    assert.equal(0, code, text)
    local before = files "kept"
    for _, more in ipairs { "--seq 100000", "--host 20KiB", "--device nope" } do
      text, code = example(options .. "--force " .. more, "train_chunked.lua")
      assert.equal(1, code, text)
      assert.same(before, files "kept")
    end
  end)

  it("train_chunked.lua replaces no run by accident", function()
    local options = "--data text.txt --model tiny --seq 16 --out chunked --steps 2"
    local text, code = example(options, "train_chunked.lua")
    assert.equal(0, code, text)
    local before = files "chunked"
    text, code = example(options, "train_chunked.lua")
    assert.equal(1, code, text)
    has(text, "chunked has a run", "--resume", "--force")
    assert.same(before, files "chunked")
    text, code = example(options .. " --force", "train_chunked.lua")
    assert.equal(0, code, text)
    assert.is_nil(text:find("resumed from", 1, true))
    text, code = example(options .. " --resume", "train_chunked.lua")
    assert.equal(0, code, text)
    has(text, "resumed from chunked/step-00000002")
  end)
end)
