-- SPDX-License-Identifier: BSD-3-Clause
-- OSLO's tutorial of pipelines, in its order: inference, training, saving, loading and merging, and the defaults that
-- transformers has for its calls.
local ps = require "ps"
local check = require "spec.check_lib"
local lib = require "spec.ranks_lib"
local tokens = require "spec.tokenizer_lib"
local gpt2 = require "models.gpt2"
local json = require "cjson"
local fails = check.fails

local folder
setup(function()
  folder = tokens.gpt2({}, { ["generation_config.json"] = { eos_token_id = 256 } })
  ps.manual_seed(2)
  gpt2.new({ vocab_size = 257, n_positions = 32, n_layer = 2, n_head = 2, n_embd = 16, initializer_range = 0.3 })
    :save_pretrained(folder)
end)
teardown(function() tokens.remove(folder) end)

-- The tutorial's training script, which has 35 lines in Python.
local TRAINS = [[
local ps = require "ps"
local BATCH_SIZE, SEQ_LEN, SAVE_INTERVAL, TRAIN_STEP = 4, 16, 2, 4

local tokenizer = ps.tokenizer.from_pretrained(FOLDER)
tokenizer.pad_token = tokenizer.eos_token

ps.init_distributed()
local model, optimizer = ps.initialize {
  model_func = function() return ps.from_pretrained(FOLDER) end,
  config = { model_parallelism = { pipeline_parallel_size = 2 },
    optimizer = { type = "Adam", params = { lr = 3e-5 } } },
}
model:train()

for step = 1, TRAIN_STEP do
  local texts = {}
  for i = 1, BATCH_SIZE do texts[i] = ("text %d of step %d"):format(i, step):sub(1, 6 + 2 * i) end
  local batch = tokenizer(texts, { padding = true, truncation = true, max_length = SEQ_LEN })
  optimizer:zero_grad()
  for out in model { input_ids = batch.input_ids, attention_mask = batch.attention_mask, labels = batch.input_ids } do
    out.loss:backward()
  end
  optimizer:step()
  if step % SAVE_INTERVAL == 0 then model:save_parallelized { save_directory = FOLDER .. "/parallel_ckpt" } end
end
]]

it("trains in at most 24 lines, on two ranks", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end
  local lines = 0
  for line in TRAINS:gmatch "[^\n]+" do lines = lines + (line:find "%S" and 1 or 0) end
  assert(lines <= 24, lines .. " lines")
  local here = lib.folder()
  local joins = ('ps.init_distributed { quiet = true, rendezvous = "file://%s/rendezvous" }'):format(here)
  local all = lib.run(here, 2, ("local FOLDER = %q\n"):format(folder) .. TRAINS:gsub("ps%.init_distributed%(%)", joins)
    .. [[
    local was = model
    model = model:from_parallelized(FOLDER .. "/parallel_ckpt")
    assert(rawequal(model, was))
    local ids = model:generate(tokenizer "text", { num_beams = 3 })
    local some = ps.ones({ 2, 4 }, { dtype = "int64" })
    for out in model { input_ids = some, labels = some } do
      out.loss:backward()
    end
    optimizer:step()
    model:save_parallelized(FOLDER .. "/merged_ckpt", { merge_checkpoints = true })
    print "done"
  ]])
  lib.remove(here)
  for rank = 0, 1 do assert.truthy(all[rank].text:find("done", 1, true), all[rank].text) end
  for _, name in ipairs { "parallel_ckpt", "merged_ckpt" } do
    assert.equal("GPT2LMHeadModel", ps.from_pretrained(folder .. "/" .. name, { quiet = true }).class_name)
  end
end)

describe("generate without a count", function()
  local function model_of(config)
    local at = os.tmpname()
    os.remove(at)
    local size = { vocab_size = 64, n_positions = 32, n_layer = 1, n_head = 2, n_embd = 16 }
    gpt2.new(size):save_pretrained(at)
    if config then check.write(at .. "/generation_config.json", json.encode(config)) end
    local model = ps.from_pretrained(at, { quiet = true })
    return model, function() os.execute("rm -rf " .. at) end
  end
  local NEVER = { do_sample = false, eos_token_id = false }
  local function added(model, prompt, more)
    local options = {}
    for _, list in ipairs { NEVER, more or {} } do for key, value in pairs(list) do options[key] = value end end
    return #model:generate(prompt, options) - #prompt
  end
  local function prompt(n)
    local ids = {}
    for i = 1, n do ids[i] = i end
    return ids
  end

  it("adds the same number of tokens as transformers: 20, or up to the last position", function()
    local model, remove = model_of()
    assert.same({ 20, 20, 7 }, { added(model, prompt(1)), added(model, prompt(12)), added(model, prompt(25)) })
    assert.equal(20, #model:generate(prompt(3), nil, NEVER) - 3)
    assert.equal(20, added(model, prompt(3), { num_beams = 3 }))
    assert.equal(5, added(model, prompt(3), { max_new_tokens = 5 }))
    assert.equal(6, added(model, prompt(3), { max_length = 9 }))
    assert.equal(20, #model:generate(prompt(3), { do_sample = false, eos_token_id = false, num_beams = 3 }) - 3)
    remove()
  end)

  it("follows the folder's file, and options before it", function()
    local model, remove = model_of { max_length = 10 }
    assert.same({ 7, 4 }, { added(model, prompt(3)), added(model, prompt(3), { max_new_tokens = 4 }) })
    remove()
    model, remove = model_of { max_new_tokens = 2 }
    assert.same({ 2, 9 }, { added(model, prompt(3)), added(model, prompt(3), { max_length = 12 }) })
    remove()
  end)

  it("refuses two counts, and lengths that the prompt already has", function()
    local model, remove = model_of()
    fails(function() model:generate(prompt(3), 4, { max_new_tokens = 5 }) end, "pass only one of the two")
    fails(function() model:generate(prompt(3), { max_length = 3 }) end, "max_length is 3, but a prompt has 3 tokens")
    fails(function() model:generate(prompt(3), { max_new_token = 5 }) end, "did you mean 'max_new_tokens'?")
    remove()
  end)
end)

describe("ps.from_config", function()
  it("makes the model of a folder with new weights, and from fields that are null or unknown here", function()
    local f = assert(io.open(folder .. "/config.json"))
    local fields = json.decode(f:read "*a")
    f:close()
    fields.n_inner, fields.transformers_version, fields._name_or_path = json.null, "5.0.0", "gpt2"
    fields.summary_type, fields.eos_token_id = "cls_index", 256
    local want = {}
    for name, t in pairs(ps.from_pretrained(folder, { quiet = true }):state_dict()) do want[name] = t:shape() end
    for _, source in ipairs { folder, fields } do
      ps.manual_seed(5)
      local model = ps.from_config(source)
      assert.same({ "GPT2LMHeadModel", true }, { model.class_name, model.training })
      local found = {}
      for name, t in pairs(model:state_dict()) do found[name] = t:shape() end
      assert.same(want, found)
      ps.manual_seed(5)
      local again = ps.from_config(source)
      assert.is_true(model.transformer.wte.weight:eq(again.transformer.wte.weight):all():item())
    end
    fields.scale_attn_by_inverse_layer_idx = "maybe"
    fails(function() ps.from_config(fields) end, "scale_attn_by_inverse_layer_idx")
    fails(function() ps.from_config(folder, { num_label = 3 }) end, "no option 'num_label'")
    fails(function() ps.from_config { model_type = "nothing" } end, "nothing")
  end)
end)
