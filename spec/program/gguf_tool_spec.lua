-- SPDX-License-Identifier: BSD-3-Clause
-- tools/gguf.lua: its output for a file, conversions in both directions, and certificates.
local ps = require "ps"
local check = require "spec.check_lib"
local gpt2 = require "models.gpt2"
local json = require "cjson"
local lfs = require "lfs"
local paths = require "ps.paths"
local readable = require "ps.core.readable"
local tokens = require "spec.tokenizer_lib"

local function run(options)
  return check.shell(("'%s' '%s'/tools/gguf.lua %s"):format(paths.exe, paths.root, options))
end

-- Returns the JSON in the last line of an output. Notes about a small vocabulary can precede it.
local function last_object(out) return json.decode(out:match "([^\n]*)\n$") end

-- Runs another program of the tree.
local function other(program, options)
  return check.shell(("'%s' '%s/%s' %s"):format(paths.exe, paths.root, program, options))
end

describe("tools/gguf.lua", function()
  local folder, file
  setup(function()
    folder = tokens.gpt2 { { "a", "b" } }
    file = folder .. "/x.gguf"
    ps.manual_seed(1)
    gpt2.new("tiny", { vocab_size = 258, n_positions = 128 }):save_pretrained(folder)
  end)
  teardown(function() tokens.remove(folder) end)

  it("converts a folder to a file, and the file to a folder", function()
    local out, code = run(("convert %s --out %s --type f32 --name Tiny"):format(folder, file))
    assert.equal(0, code, out)
    local wrote = ("wrote %s (%s)\n"):format(file, readable.bytes(#check.read(file)))
    assert.equal(wrote, out:sub(-#wrote))
    out, code = run(("info %s --json"):format(file))
    assert.equal(0, code, out)
    local info, meta, found = json.decode(out), {}, {}
    for _, one in ipairs(info.metadata) do meta[one.key] = one.value end
    for _, one in ipairs(info.tensors) do found[one.name] = one end
    assert.equal("gpt2", meta["general.architecture"])
    assert.equal("Tiny", meta["general.name"])
    assert.equal("gpt-2", meta["tokenizer.ggml.pre"])
    assert.equal(258, #meta["tokenizer.ggml.tokens"])
    assert.same({ 258, found["token_embd.weight"].shape[2] }, found["token_embd.weight"].shape)
    assert.equal("F32", found["token_embd.weight"].type)
    out, code = run(("info %s"):format(file))
    assert.equal(0, code, out)
    assert.truthy(out:find("general.architecture", 1, true) and out:find("token_embd.weight", 1, true), out)
    run(("quantize %s --out %s/again.gguf --type q8_0"):format(file, folder))
    out = run(("info %s/again.gguf"):format(folder))
    assert.matches('general.name +"Tiny"', out)
    local back = folder .. "/back"
    out, code = run(("convert %s --out %s"):format(file, back))
    assert.equal(0, code, out)
    assert.truthy(out:find("wrote " .. back .. "\n", 1, true), out)
    local weights = check.read(back .. "/model.safetensors")
    run(("convert %s --out %s --type q8_0"):format(folder, file))
    out, code = run(("convert %s --out %s"):format(file, back))
    assert.truthy(code == 1 and out:find(back .. " has a model, at ", 1, true) and out:find("--force", 1, true), out)
    assert.truthy(check.read(back .. "/model.safetensors") == weights)
    local ids = ps.tensor({ { 1, 2, 3, 4 } }, "int32")
    local function logits(from)
      return ps.no_grad(function() return ps.from_pretrained(from, { quiet = true })({ input_ids = ids }).logits end)
    end
    assert.equal(0, (logits(folder) - logits(back)):abs():max():item())
    local tok = ps.tokenizer.from_pretrained(back)
    assert.same(ps.tokenizer.from_pretrained(folder):encode "abba b", tok:encode "abba b")
  end)

  it("verifies a file against its model, and reports a different model", function()
    run(("convert %s --out %s --type q8_0"):format(folder, file))
    local out, code = run(("verify %s --against %s --json"):format(file, folder))
    assert.equal(0, code, out)
    local c = last_object(out)
    assert.truthy(c.pass and c.same_ids)
    assert.truthy(c.mean_kl > 0 and c.mean_kl < 1e-3 and c.max_kl >= c.mean_kl, out)
    assert.truthy(c.top1 > 0.9 and math.abs(c.perplexity / c.reference_perplexity - 1) < 0.01, out)
    out, code = run(("quantize %s --out %s --type q8_0 --verify"):format(folder, file))
    assert.truthy(code == 0 and out:find("pass", 1, true), out)
    local noted = {}
    for _, one in ipairs(json.decode((run(("info %s --json"):format(file)))).metadata) do noted[one.key] = one.value end
    assert.equal(true, noted["psluajit.verify.pass"])
    assert.equal(c.tokens, noted["psluajit.verify.tokens"])
    assert.truthy(math.abs(noted["psluajit.verify.mean_kl"] - c.mean_kl) < 1e-9)
    local stranger = tokens.gpt2 { { "a", "b" } }
    ps.manual_seed(2)
    gpt2.new("tiny", { vocab_size = 258, n_positions = 128, initializer_range = 0.5 }):save_pretrained(stranger)
    out, code = run(("verify %s --against %s"):format(file, stranger))
    assert.equal(2, code, out)
    assert.truthy(out:find("FAIL", 1, true), out)
    tokens.remove(stranger)
  end)

  it("writes files that other programs accept like a folder", function()
    run(("convert %s --out %s --type f32"):format(folder, file))
    local ids = (ps.rand { 2, 5 } * 257):to("int32")
    ps.safetensors.save(folder .. "/inputs.safetensors", { input_ids = ids })
    local said = {}
    for _, from in ipairs { folder, file } do
      local out, code = other("bench/hf.lua", from)
      assert.equal(0, code, out)
      said[#said + 1] = ps.load(folder .. "/outputs.safetensors").logits
      out, code = other("bench/generate.lua", from .. " --ids '1 2 3' --max-new 5")
      assert.equal(0, code, out)
      said[from] = out:match "1 2 3[%d ]*"
      out, code = other("tools/generate.lua", from .. " --start ab --max-new 4 --temperature 0")
      assert.equal(0, code, out)
      said[from .. "text"] = out:match "([^\n]*)\n$"
    end
    assert.equal(0, (said[1] - said[2]):abs():max():item())
    assert.truthy(said[file] and said[file] == said[folder])
    assert.equal(said[folder .. "text"], said[file .. "text"])
  end)

  it("names the fault of a file or an option in one line", function()
    local out, code = run(("info %s/config.json"):format(folder))
    assert.truthy(code == 1 and out:find("not a GGUF file", 1, true), out)
    out, code = run(("convert %s --out %s/dir --type q8_0"):format(folder, folder))
    assert.truthy(code == 1 and out:find("--type needs a file to write", 1, true), out)
    out, code = run(("quantize %s --out %s"):format(folder, file))
    assert.truthy(code ~= 0 and out:find("--type", 1, true), out)
    out, code = run(("quantize %s --out %s --type q9"):format(folder, file))
    assert.truthy(code == 1 and out:find("q4_k_m", 1, true), out)
  end)

  it("compares with a reference that has fewer positions", function()
    local shorter = tokens.gpt2 { { "a", "b" } }
    ps.manual_seed(1)
    gpt2.new("tiny", { vocab_size = 258, n_positions = 32 }):save_pretrained(shorter)
    run(("convert %s --out %s --type f32"):format(folder, file))
    local out, code = run(("verify %s --against %s --json"):format(file, shorter))
    assert.equal(2, code, out)                             -- another model
    assert.truthy(last_object(out).tokens > 1000, out)
    tokens.remove(shorter)
  end)

  it("refuses to verify with files that do not say how texts are split, before anything is written", function()
    local llama = tokens.gpt2 { { "a", "b" } }
    require("models.llama").new("tiny", { vocab_size = 258 }):save_pretrained(llama)
    local out, code = run(("convert %s --out %s/y.gguf --type f32 --verify"):format(llama, llama))
    assert.equal(1, code, out)
    assert.truthy(out:find("no tokenizer: " .. llama .. " has no tokenizer.json", 1, true), out)
    assert.falsy(lfs.attributes(llama .. "/y.gguf"))
    tokens.remove(llama)
  end)

  it("refuses a BERT whose tokenizer is not WordPiece", function()
    local bert = tokens.folder { ["tokenizer.json"] = json.encode { model = { type = "BPE", vocab = { a = 0, b = 1 },
      merges = {} }, pre_tokenizer = { type = "ByteLevel" }, added_tokens = {} } }
    require("models.bert").new("tiny", { vocab_size = 258, task = "base" }):save_pretrained(bert)
    local out, code = run(("convert %s --out %s/y.gguf --type f32"):format(bert, bert))
    assert.truthy(code == 1 and out:find("needs WordPiece", 1, true), out)
    tokens.remove(bert)
  end)

  it("removes the temporary files of processes that were killed", function()
    local out = folder .. "/out-1.gguf"
    -- No process has the number 4194305, and process 1 always runs. A file that was written just now is in use.
    local left = { [out .. ".tmp-4194305-0"] = 300, [out .. ".tmp-4194305-1"] = 0, [out .. ".tmp-1-0"] = 300,
      [folder .. "/xout-1.gguf.tmp-4194305-0"] = 300 }
    for name, age_s in pairs(left) do
      check.write(name, "half")
      assert(lfs.touch(name, os.time() - age_s))
    end
    run(("convert %s --out %s --type f32"):format(folder, out))
    for name in pairs(left) do
      assert.equal(name == out .. ".tmp-4194305-0" and "gone" or "file", lfs.attributes(name, "mode") or "gone", name)
      os.remove(name)
    end
    local link, beside = folder .. "/link.gguf", out .. ".tmp-4194305-0"    -- they are next to the file, not the link
    assert(lfs.mkdir(folder .. "/linked"))
    assert(lfs.link("../out-1.gguf", folder .. "/linked/link.gguf", true))
    assert(lfs.link("linked/link.gguf", link, true))
    check.write(beside, "half")
    assert(lfs.touch(beside, os.time() - 300))
    run(("convert %s --out %s --type f32"):format(folder, link))
    assert.is_nil(lfs.attributes(beside, "mode"))
    assert.equal("link", lfs.symlinkattributes(link, "mode"))
  end)

  it("names a folder in which a save was interrupted", function()
    local half = folder .. "/half"
    local out, code = run(("convert %s --out %s/"):format(file, half))
    assert.truthy(code == 0 and out:find("wrote " .. half .. "\n", 1, true), out)
    for _, ending in ipairs { ".new", ".old" } do
      assert(os.rename(half .. "/config.json", half .. "/config.json" .. ending))
      out, code = run(("convert %s --out %s --type f32"):format(half, file))
      assert.equal(1, code, out)
      assert.truthy(out:find("ended while it replaced this model", 1, true) and out:find(ending, 1, true), out)
      assert(os.rename(half .. "/config.json" .. ending, half .. "/config.json"))
    end
    out, code = run(("convert '' --out %s"):format(file))
    assert.truthy(code == 1 and out:find("the name of the folder is empty", 1, true), out)
  end)
end)
