-- SPDX-License-Identifier: BSD-3-Clause
-- examples/finetune.lua: a chat model learns conversations, on one process and on two, within a budget; it is
-- continued, and its folder is used for a chat. Data that are not conversations are refused before the model is read.
local ps = require "ps"
local gpt2 = require "models.gpt2"
local check = require "spec.check_lib"
local paths = require "ps.paths"
local tokens = require "spec.tokenizer_lib"

local TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
  .. "{% if add_generation_prompt %}<|assistant|>{% endif %}"
local folder, data

setup(function()
  folder = tokens.gpt2({ { "a", "b" } }, { ["tokenizer_config.json"] = { chat_template = TEMPLATE,
    eos_token = "<|endoftext|>" } })
  ps.manual_seed(1)
  gpt2.new("tiny", { vocab_size = 258, n_positions = 64 }):save_pretrained(folder)
  local lines = {}
  for i = 1, 44 do
    local c = string.char(97 + i % 22)
    lines[i] = ('{"prompt": "say %s", "completion": "%s"}\n'):format(c, c:rep(3))
  end
  data = folder .. "/data.jsonl"
  check.write(data, table.concat(lines))
end)
teardown(function() tokens.remove(folder) end)

local function run(words, ranks)
  local launch = ranks and ("'%s/tools/launch.lua' --nproc-per-node %d"):format(paths.root, ranks) or ""
  return check.shell(("OMP_NUM_THREADS=1 '%s' %s '%s/examples/finetune.lua' --model %s %s")
    :format(paths.exe, launch, paths.root, folder, words))
end

-- Returns the losses in a run's log by step.
local function losses(out)
  local list = {}
  for line in io.lines(out .. "/run/log.csv") do
    local step, loss = line:match "^(%d+),([%d.e-]+)"
    if step then list[tonumber(step)] = tonumber(loss) end
  end
  return list
end

describe("examples/finetune.lua", function()
  it("prints that the chat template writes no end token after an answer", function()
    local said = "the chat template writes no end token after an answer (the last trained token of row 1 is "
    local open = tokens.gpt2({ { "a", "b" } }, { ["tokenizer_config.json"] = { eos_token = "<|endoftext|>",
      chat_template = (TEMPLATE:gsub("{{ eos_token }}", "\n")) } })
    gpt2.new("tiny", { vocab_size = 258, n_positions = 64 }):save_pretrained(open)
    local out, code = check.shell(("OMP_NUM_THREADS=1 '%s' '%s/examples/finetune.lua' --model %s --data %s --out %s "
      .. "--epochs 1"):format(paths.exe, paths.root, open, data, open .. "/tuned"))
    assert(code == 0 and out:find(said, 1, true), out)
    out = check.shell(("'%s' '%s/tools/data.lua' show %s %s"):format(paths.exe, paths.root, open, data))
    assert.matches("note: " .. said .. "'b'", out, 1, true)
    assert.matches("let the template write eos_token, <|endoftext|>, there", out, 1, true)
    tokens.remove(open)
    out = check.shell(("'%s' '%s/tools/data.lua' show %s %s"):format(paths.exe, paths.root, folder, data))
    assert.is_nil(out:find(said, 1, true), out)
  end)

  it("learns the answers, and writes a folder that answers", function()
    local to = folder .. "/tuned"
    local out, code = run(("--data %s --out %s --epochs 50 --batch 8 --lr 6e-3"):format(data, to))
    assert.equal(0, code, out)
    local log = losses(to)
    assert.is_true(log[#log] < log[1] / 3, out)
    local model, tok = ps.from_pretrained(to, { quiet = true }), ps.tokenizer.from_pretrained(to)
    local prompt = tok:apply_chat_template({ { role = "user", content = "say c" } }, { add_generation_prompt = true })
    local row = model:generate({ prompt }, 6, { temperature = 0, tokenizer = tok })[1]
    assert.equal("ccc", tok:decode({ unpack(row, #prompt + 1) }, { skip_special_tokens = true }))
    out, code = run(("--data %s --out %s --epochs 50 --batch 8 --resume"):format(data, to))
    assert.truthy(code == 0 and out:find("nothing to do", 1, true), out)
  end)

  it("has the same losses on two processes with ZeRO 3, within a budget", function()
    local one, two = folder .. "/one", folder .. "/two"
    local out, code = run(("--data %s --out %s --epochs 1 --batch 8 --lr 1e-3"):format(data, one))
    assert.equal(0, code, out)
    out, code = run(("--data %s --out %s --epochs 1 --batch 4 --lr 1e-3 --host 256MiB"):format(data, two), 2)
    assert.equal(0, code, out)
    local want, got = losses(one), losses(two)
    assert.is_true(#want >= 5 and #want == #got)
    for step, loss in ipairs(want) do assert.is_true(math.abs(got[step] - loss) < 1e-5 * loss, step) end
  end)

  it("trains an adapter, on one process and on two with ZeRO 3, and merges it", function()
    local one, two = folder .. "/lora1", folder .. "/lora2"
    local out, code = run(("--data %s --out %s --epochs 2 --batch 8 --lr 1e-2 --lora 4"):format(data, one))
    assert.equal(0, code, out)
    out, code = run(("--data %s --out %s --epochs 2 --batch 4 --lr 1e-2 --lora 4 --merge --host 256MiB"):format(data,
      two), 2)
    assert.equal(0, code, out)
    local want, got = losses(one), losses(two)
    assert.is_true(#want >= 10 and #want == #got and want[#want] < want[1])
    for step, loss in ipairs(want) do assert.is_true(math.abs(got[step] - loss) < 2e-5 * loss, step) end
    local x = ps.tensor({ { 5, 6, 7, 8 } }, "int32")
    local function logits(path) return ps.no_grad(ps.from_pretrained(path, { quiet = true }), x) end
    local adapted = logits(one)
    assert.is_true((adapted - logits(folder)):abs():amax():item() > 1e-3)
    for _, path in ipairs { two, two .. "/adapter" } do
      assert.is_true((adapted - logits(path)):abs():amax():item() < 1e-4, path)
    end
    out, code = run(("--data %s --out %s/none --dora"):format(data, folder))
    assert.truthy(code == 1 and out:find("--lora", 1, true), out)
    out, code = run(("--data %s --out %s/none --batch 4 --epochs 2 --accumulate 60"):format(data, folder))
    assert.truthy(code == 1 and out:find("--accumulate 60: all of --epochs 2 has only 22 batches: pass --accumulate 22",
      1, true), out)
    local talk = io.popen(("'%s' '%s/tools/generate.lua' %s --adapter %s --start a --temperature 0 --max-new 4 2>&1")
      :format(paths.exe, paths.root, folder, one))
    local text = talk:read "*a"
    talk:close()
    assert.truthy(text:find "^a" and not text:find "psluajit:", text)
    local function perplexity(more)
      local measured = io.popen(("'%s' '%s/tools/evaluate.lua' %s --data %s --limit 8 %s 2>&1"):format(paths.exe,
        paths.root, folder, data, more))
      local result = measured:read "*a"
      measured:close()
      return assert(tonumber(result:match "token_perplexity +([%d.e+]+)"), result)
    end
    assert(perplexity("--adapter " .. one) < 0.9 * perplexity "")
  end)

  it("trains an adapter over a GGUF file whose weights stay packed, resumes it, and writes GGUF files", function()
    local file, logs = folder .. "/packed.gguf", {}
    ps.from_pretrained(folder, { quiet = true }):save_gguf(file, { type = "q8_0" })
    local function train(to, words)
      local out, code = check.shell(("OMP_NUM_THREADS=1 '%s' '%s/examples/finetune.lua' --model %s --data %s --out %s "
        .. "--batch 8 --lr 1e-2 --lora 4 %s"):format(paths.exe, paths.root, file, data, folder .. to, words))
      assert.equal(0, code, out)
      logs[to] = losses(folder .. to)
    end
    train("/packed", "--epochs 2 --keep-quantized --merge")
    train("/unpacked", "--epochs 2")
    local want, got = logs["/unpacked"], logs["/packed"]
    assert.is_true(#want >= 10 and #want == #got and got[#got] < got[1])
    for step, loss in ipairs(want) do assert.is_true(math.abs(got[step] - loss) < 1e-4 * loss, step) end
    train("/packed", "--epochs 3 --keep-quantized --resume")
    assert.is_true(#logs["/packed"] > #got)
    local function gguf(words)
      local out, code = check.shell(("'%s' '%s/tools/gguf.lua' convert %s"):format(paths.exe, paths.root, words))
      assert.equal(0, code, out)
    end
    gguf(("%s/packed --base %s --out %s/adapter.gguf"):format(folder, file, folder))
    gguf(("%s --adapter %s/adapter.gguf --out %s/whole.gguf --type f32"):format(file, folder, folder))
    local x = ps.tensor({ { 5, 6, 7, 8 } }, "int32")
    local function logits(model) return ps.no_grad(model, x) end
    local base = ps.from_pretrained(file, { quiet = true, keep_quantized = true })
    local plain = logits(base)
    local adapted = logits(ps.lora.load(base, folder .. "/packed"))
    assert.is_true((adapted - plain):abs():amax():item() > 1e-3)
    local whole = logits(ps.from_pretrained(folder .. "/whole.gguf", { quiet = true }))
    assert.is_true((adapted - whole):abs():amax():item() < 1e-4)
  end)

  it("ends on Ctrl-C with a checkpoint, without errors about other ranks", function()
    for i, at in ipairs { "before:", "step %d+/" } do
      local p = assert(io.popen(("exec 2>&1; echo $$; OMP_NUM_THREADS=1 exec '%s' '%s/tools/launch.lua' "
        .. "--nproc-per-node 2 '%s/examples/finetune.lua' --model %s --data %s --out %s/stopped%d --epochs 100000")
        :format(paths.exe, paths.root, paths.root, folder, data, folder, i)))
      local pid, lines, sent = p:read "*l", {}, false
      for line in p:lines() do
        lines[#lines + 1] = line
        if not sent and line:find(at) then
          os.execute("kill -INT " .. pid)
          sent = true
        end
      end
      p:close()
      local out = table.concat(lines, "\n")
      assert.truthy(out:find("interrupted; --resume continues", 1, true), out)
      assert.is_nil(out:find "failed" or out:find "all_", out)
    end
  end)

  it("resumes an adapter from a checkpoint with only the trained values", function()
    local one, two = folder .. "/whole", folder .. "/parts"
    local words = ("--data %s --batch 8 --lr 1e-2 --lora 4 --dora"):format(data)
    local out, code = run(words .. " --epochs 4 --out " .. one)
    assert.equal(0, code, out)
    for _, ranks in ipairs { false, 2 } do
      os.execute(("rm -rf %s; cp -r %s %s"):format(two, one, two))
      local each = ranks and words:gsub("%-%-batch 8", "--batch 4") or words
      local newest = ps.checkpoints.info(two .. "/run")
      -- Goes back to the first kept checkpoint.
      local names = io.popen(("ls -d %s/run/step-*"):format(two)):read "*a"
      local first = names:match "(step%-%d+[^\n]*)"
      check.write(two .. "/run/latest", first .. "\n")
      assert(ps.checkpoints.info(two .. "/run").step < newest.step)
      out, code = run(each .. " --epochs 4 --resume --out " .. two, ranks or nil)
      assert.equal(0, code, out)
      local a, b = ps.safetensors.open(one .. "/adapter_model.safetensors"),
        ps.safetensors.open(two .. "/adapter_model.safetensors")
      for _, name in ipairs(a:names()) do
        local far = (a:tensor(name) - b:tensor(name)):abs():amax():item()
        assert(far <= (ranks and 1e-3 or 0), ("%s: %.3g"):format(name, far))
      end
      a:close()
      b:close()
    end
    local file = ps.safetensors.open(ps.checkpoints.info(one .. "/run").file)
    for _, name in ipairs(file:names()) do assert.truthy(name:find "lora_", name) end
    file:close()
    os.execute(("cp %s/model.safetensors %s/model.kept"):format(folder, folder))
    ps.manual_seed(77)
    gpt2.new("tiny", { vocab_size = 258, n_positions = 64 }):save_pretrained(folder)
    out, code = run(words .. " --epochs 5 --resume --out " .. one)
    assert.truthy(code == 1 and out:find("fingerprint", 1, true), out)
    os.execute(("mv %s/model.kept %s/model.safetensors"):format(folder, folder))
  end)

  it("continues with the adapter, the rate and the seed of the run, and refuses others", function()
    local to = folder .. "/adapter"
    local words = ("--data %s --batch 8 --out %s"):format(data, to)
    local out, code = run(words .. " --epochs 1 --lora 4 --alpha 16 --lr 1e-3 --seed 5 --lora-dropout 0")
    assert.equal(0, code, out)
    for option, had in pairs { ["lora 8"] = "4", ["alpha 2"] = "16", ["dora"] = "none", ["lr 1e-4"] = "0.001",
      ["seed 1"] = "5", ["lora-dropout 0.1"] = "0" } do
      out, code = run(("%s --epochs 2 --resume --%s"):format(words, option))
      assert.truthy(code == 1 and out:find(("the run in %s has %s: remove this option to resume"):format(to, had), 1,
        true), option .. out)
    end
    out, code = run(words .. " --epochs 2 --resume --lora-dropout 0")
    assert.equal(0, code, out)
    local config = check.read(to .. "/adapter_config.json")
    assert.truthy(config:find('"lora_alpha":%s*16') and config:find('"r":%s*4'), config)
    out, code = run(("--data %s --out %s/nothing --resume"):format(data, folder))
    assert.truthy(code == 1 and out:find("to start a new run there, remove --resume", 1, true), out)
  end)

  -- Starts a run, and kills it when its first checkpoint is there.
  local function killed(words, out)
    check.shell(("OMP_NUM_THREADS=1 '%s' '%s/examples/finetune.lua' --model %s %s --out %s >/dev/null 2>&1 & "
      .. "while ! [ -f %s/run/latest ]; do sleep 0.05; done; kill -9 $!; wait"):format(paths.exe, paths.root, folder,
      words, out, out))
    return ps.checkpoints.info(out .. "/run")
  end

  it("trains all epochs if another batch or number of processes continues", function()
    local from = folder .. "/killed"
    local words = ("--data %s --epochs 12 --lr 1e-3"):format(data)
    local step = killed(words .. " --batch 4", from).step
    assert.is_true(step % 11 == 0 and step < 132)          -- 42 rows are 11 batches of 4
    for i, case in ipairs { { "--batch 8 --accumulate 2", 3 }, { "--batch 4", 6, 2 }, { "--batch 4", 11 },
      { "--batch 42", 1 } } do
      local to = ("%s/more%d"):format(folder, i)
      os.execute(("cp -r %s %s"):format(from, to))
      local out, code = run(("%s %s --out %s --resume"):format(words, case[1], to), case[3])
      assert.equal(0, code, out)
      assert.equal(step + math.ceil((12 - step / 11) * case[2]), ps.checkpoints.info(to .. "/run").step, case[1])
      assert.equal("file", require "lfs".attributes(to .. "/model.safetensors", "mode"))
    end
  end)

  it("writes the model of a run that ended after its last checkpoint, though its data changed", function()
    local copy, to = folder .. "/copy.jsonl", folder .. "/written"
    check.write(copy, check.read(data))
    local words = ("--data %s --epochs 4 --batch 8 --lr 1e-3 --out %s"):format(copy, to)
    local out, code = check.shell(("OMP_NUM_THREADS=1 '%s' '%s/examples/finetune.lua' --model %s %s 2>&1 & "
      .. "while ! [ -f %s/run/latest ]; do sleep 0.02; done; echo changed >>%s; wait $!"):format(paths.exe, paths.root,
      folder, words, to, copy))
    assert.equal(0, code, out)
    check.write(copy, check.read(data))
    local want = check.read(to .. "/model.safetensors")
    assert(os.remove(to .. "/model.safetensors"))
    out, code = run(words .. " --resume")
    assert.truthy(code == 0 and out:find("nothing to do but to write the model", 1, true), out)
    local at = out:match "is at step (%d+) of"
    assert.truthy(out:find("after " .. at .. " steps", 1, true), out)
    assert.is_true(want == check.read(to .. "/model.safetensors"))
  end)

  it("says that a resumed run continues the model of its checkpoint, and not another --model", function()
    local to, other = folder .. "/continued", folder .. "-other"
    local words = ("--data %s --out %s --batch 8"):format(data, to)
    local out, code = run(words .. " --epochs 1")
    assert.equal(0, code, out)
    os.execute(("mkdir '%s'; cp '%s'/*.json '%s'/*.txt '%s'/*.safetensors '%s'"):format(other, folder, folder, folder,
      other))
    finally(function() tokens.remove(other) end)
    local function resumed(from)
      return check.shell(("OMP_NUM_THREADS=1 '%s' '%s/examples/finetune.lua' --model %s %s --resume --epochs 1"):format(
        paths.exe, paths.root, from, words))
    end
    out, code = resumed(folder .. "/.")
    assert.truthy(code == 0 and not out:find("continues the model", 1, true), out)
    out, code = resumed(other)
    assert.truthy(code == 0 and out:find(("continues the model that was loaded from %s, but this script loaded %s, "
      .. "whose weights are not used"):format(folder, other), 1, true), out)
  end)

  it("refuses data that are not conversations", function()
    check.write(folder .. "/text.jsonl", '{"text": "abc"}\n')
    local out, code = run(("--data %s/text.jsonl --out %s/none"):format(folder, folder))
    assert.truthy(code == 1 and out:find("text.jsonl:1: a row in the form 'text' is not a conversation", 1, true), out)
    out, code = run(("--data %s --out %s/none --seq 2"):format(data, folder))
    assert.truthy(code == 1 and out:find("of more than seq = 2 tokens were left out", 1, true), out)
  end)

  it("refuses options that do not fit before the model is loaded", function()
    check.write(folder .. "/one.jsonl", '{"prompt": "a", "completion": "b"}\n')
    check.write(folder .. "/none.jsonl", "\n")
    check.write(folder .. "/turns.jsonl", ('{"messages": [{"role": "user", "content": "a"}]}\n'):rep(9))
    local to, weights, bare = folder .. "/refused", folder .. "/model.safetensors", folder .. "-bare"
    os.execute(("mv '%s' '%s.kept'; mkdir -p '%s'; cp '%s'/*.json '%s'/*.txt '%s'"):format(weights, weights, bare,
      folder, folder, bare))
    check.write(bare .. "/tokenizer_config.json", '{"eos_token": "<|endoftext|>"}')
    finally(function() os.execute(("mv '%s.kept' '%s'; rm -r '%s'"):format(weights, weights, bare)) end)
    for words, want in pairs {
      [("--data %s --out %s"):format(data, data)] = "finetune.lua: --out: " .. data .. " is a file, not a folder\n",
      [("--data %s --out %s/."):format(data, folder)] =
        ("--out: %s/. is the folder of --model, %s"):format(folder, folder),
      [("--data %s --out %s/new/../"):format(data, folder)] =
        ("--out: %s/new/../ is the folder of --model, %s"):format(folder, folder),
      [("--data %s --out %s/new/.."):format(data, bare)] =
        "/new/.. has a model, at " .. bare .. "/config.json: --force",
      [("--data %s --out %s"):format(data, bare)] = bare .. " has a model, at " .. bare
        .. "/config.json: --force writes the new one in its place, another --out keeps both",
      [("--data %s/one.jsonl --out %s"):format(folder, to)] = "--data: it has one row, and one is held out",
      [("--data %s/none.jsonl --out %s"):format(folder, to)] = "none.jsonl has no rows",
      [("--data %s --out %s --batch 100"):format(data, to)] =
        "42 rows to train on (2 of --data are held out) are fewer than a batch of 100 (100 on each of 1 processes): "
          .. "pass --batch 42 or less",
      [("--data %s --out %s --seq 65"):format(data, to)] = "--seq: 65 tokens, but the model has only 64 positions",
      [("--data %s --out %s --eval %s/none.jsonl"):format(data, to, folder)] = "--eval: " .. folder .. "/none.jsonl",
      [("--data %s/turns.jsonl --out %s"):format(folder, to)] = "turns.jsonl:",
      [("--data %s --out %s --date yesterday"):format(data, to)] = "date = 'yesterday': it must be YYYY-MM-DD",
      [("--data %s --out %s --lora-dropout 0.1"):format(data, to)] = "--lora-dropout need --lora",
      [("--data %s --out %s --model %s"):format(data, to, bare)] = "finetune.lua: " .. bare .. " has no chat template",
    } do
      local out, code = run(words)
      assert.truthy(code == 1 and out:find(want, 1, true), out)
      assert.is_nil(out:find("traceback", 1, true))
      assert.is_nil(require "lfs".attributes(to))          -- no folder remains
    end
  end)

  it("continues on another day, by the date of the checkpoint", function()
    local to, jinja = folder .. "/dated", folder .. "/chat_template.jinja"
    check.write(jinja, TEMPLATE:gsub("{%% if", "{{ strftime_now('%%d') }}%0"))
    local out, code = run(("--data %s --out %s --epochs 1 --batch 8 --date 2020-02-03"):format(data, to))
    assert.equal(0, code, out)
    out, code = run(("--data %s --out %s --epochs 2 --batch 8 --resume"):format(data, to))
    os.remove(jinja)
    assert.equal(0, code, out)
    assert.equal(12, #losses(to))                          -- 42 rows are 5 batches of 8, and one that is filled up
  end)
end)
