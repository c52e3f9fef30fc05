-- SPDX-License-Identifier: BSD-3-Clause
-- Folders whose weights bitsandbytes quantized to NF4. This spec writes codes and scales by formulas, and computes the
-- values from them: map[code] * scale, where double quantization has scale = map8[code8] * group's scale + offset, each
-- operation rounded to fp32. spec/golden/nf4.safetensors has two weights and their values from bitsandbytes itself, and
-- bench/peers/bitsandbytes_nf4.py compares whole models with it.
local ps = require "ps"
local paths = require "ps.paths"
local bitsandbytes = require "ps.pretrained.bitsandbytes"
local check = require "spec.check_lib"
local cuda = require "spec.cuda_lib"
local ffi = require "ffi"
local files_of = require "ps.pretrained.files"
local json = require "cjson"
local packed = require "ps.nn.packed"
local parts = require "ps.nn.parts"

local folder = os.tmpname()
os.remove(folder)
assert(require("lfs").mkdir(folder))
teardown(function() os.execute("rm -rf '" .. folder .. "'") end)
local function at(name) return folder .. "/" .. name end

local MAP = { -1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
  -0.18477343022833334, -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
  0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1 }
local OFFSET = 0.0517578125
local CONFIG = { load_in_4bit = true, load_in_8bit = false, bnb_4bit_quant_type = "nf4", quant_method = "bitsandbytes",
  bnb_4bit_quant_storage = "uint8", llm_int8_skip_modules = { "lm_head" }, bnb_4bit_compute_dtype = "bfloat16" }
local LLAMA = { vocab_size = 40, hidden_size = 64, intermediate_size = 320, num_hidden_layers = 1,
  num_attention_heads = 2, num_key_value_heads = 2, max_position_embeddings = 32, initializer_range = 0.1 }
local GPT2 = { vocab_size = 40, n_positions = 32, n_embd = 64, n_layer = 1, n_head = 2 }
local MLP = "model.layers.0.mlp.down_proj.weight"
local ATTENTION = "model.layers.0.self_attn.q_proj.weight"
local SHAPES = { llama = { [MLP] = { 64, 320 }, [ATTENTION] = { 64, 64 } },
  gpt2 = { ["transformer.h.0.attn.c_attn.weight"] = { 192, 64 }, ["transformer.h.0.attn.c_proj.weight"] = { 64, 64 } } }

local function rounded(x) return tonumber(ffi.cast("float", x)) end
local function bytes(list) return ps.tensor(list, { dtype = "uint8" }) end

-- Returns the tensors of a weight [rows, columns] by the end of their names, and its values.
local function quantized(rows, columns, double)
  local codes, values, scales, code8, of_groups, map8 = {}, {}, {}, {}, {}, {}
  local blocks = rows * columns / 64
  for i = 0, 255 do map8[i + 1] = rounded((i - 127) / 1280) end
  for g = 0, math.ceil(blocks / 256) - 1 do of_groups[g + 1] = rounded(0.3 + g / 7) end
  for b = 0, blocks - 1 do
    code8[b + 1] = 127 + b * 37 % 129
    scales[b + 1] = double and rounded(rounded(map8[code8[b + 1] + 1] * of_groups[math.floor(b / 256) + 1]) + OFFSET)
      or rounded((1 + b % 13) / 70)
  end
  for i = 0, rows * columns - 1 do
    local code = (i * 7 + math.floor(i / 5)) % 16
    values[i + 1] = rounded(MAP[code + 1] * scales[math.floor(i / 64) + 1])
    local at_byte = math.floor(i / 2) + 1
    codes[at_byte] = i % 2 == 0 and code * 16 or codes[at_byte] + code
  end
  local state = { quant_type = "nf4", blocksize = 64, dtype = "bfloat16", shape = { rows, columns } }
  local made = { [""] = bytes(codes):reshape(-1, 1), [".quant_map"] = ps.tensor(MAP) }
  if double then
    state.nested_blocksize, state.nested_dtype, state.nested_offset = 256, "float32", OFFSET
    made[".absmax"], made[".nested_absmax"], made[".nested_quant_map"] = bytes(code8), ps.tensor(of_groups),
      ps.tensor(map8)
  else
    made[".absmax"] = ps.tensor(scales)
  end
  return made, ps.tensor(values):reshape(rows, columns), state
end

local STATE = ".quant_state.bitsandbytes__nf4"

-- Writes a folder with a model whose weights in SHAPES are quantized. `change` gets the tensors by name, the
-- quant_states and the fields of config.json before they are written. Returns the values of the quantized weights.
local function write(name, family, double, change)
  ps.manual_seed(4)
  local model = require("models." .. family).new(family == "gpt2" and GPT2 or LLAMA)
  model:save_pretrained(at(name))
  local tensors, want, states = {}, {}, {}
  for key, t in pairs(ps.load(at(name) .. "/model.safetensors")) do tensors[key] = t end
  for key, shape in pairs(SHAPES[family]) do
    local made
    made, want[key], states[key] = quantized(shape[1], shape[2], double)
    for suffix, t in pairs(made) do tensors[key .. suffix] = t end
    if family == "gpt2" then want[key] = want[key]:t():contiguous() end
  end
  local fields = json.decode(check.read(at(name) .. "/config.json"))
  fields.quantization_config = {}
  for key, value in pairs(CONFIG) do fields.quantization_config[key] = value end
  if change then change(tensors, states, fields.quantization_config, fields) end
  for key, state in pairs(states) do
    local text = type(state) == "string" and state or json.encode(state)
    tensors[key .. STATE] = bytes { text:byte(1, -1) }
  end
  check.write(at(name) .. "/config.json", json.encode(fields))
  ps.safetensors.save(at(name) .. "/model.safetensors", tensors)
  return want, tensors
end

local function load(name, options)
  local given = { quiet = true }
  for key, value in pairs(options or {}) do given[key] = value end
  return ps.from_pretrained(at(name), given)
end

local ids = ps.randint(0, 40, { 2, 9 }, { dtype = "int32" }):keep()
local function logits(model, rows)
  return ps.no_grad(function() return model({ input_ids = rows or ids }).logits:keep() end)
end
local function far(a, b) return (a:to "fp64" - b:to "fp64"):abs():max():item() end

describe("a folder in NF4 of bitsandbytes", function()
  for family, double in pairs { llama = true, gpt2 = false } do
    for _, nested in ipairs { double, not double } do
      it(("has the formula's values: %s, %s quantization"):format(family, nested and "double" or "single"), function()
        local want = write("m", family, nested)
        for _, dtype in ipairs { "fp32", "bf16" } do
          local state = load("m", { dtype = dtype }):state_dict()
          for name, values in pairs(want) do
            assert.equal(check.bytes(values:to(dtype)), check.bytes(state[name]), name)
          end
        end
      end)
    end
  end

  it("has the values that bitsandbytes computed (spec/oracle/make_nf4_golden.py)", function()
    local path = paths.root .. "/spec/golden/nf4.safetensors"
    local files = files_of.open { path }
    local file, weights = files.list[1], files.quantized
    local _, quantization = bitsandbytes.split({ quantization_config = json.decode(file.metadata.quantization_config) },
      path)
    bitsandbytes.check(weights, quantization, path)
    assert.same({ "double.weight", "single.weight" }, weights:names())
    for _, name in ipairs(weights:names()) do
      local values, columns = weights:tensor(name, "cpu"), {}
      for i = 0, values:size(1) - 1, 32 do columns[#columns + 1] = values:narrow(1, i, 1) end
      local golden = check.bytes(file:tensor(name .. ".values", "cpu"))
      assert.equal(golden, check.bytes(ps.cat(columns, 1)), name)
      if name == "double.weight" then
        local kind = packed.type "NF4_DOUBLE"
        weights:keep_packed(name, kind)
        local blocks, scales = weights:tensor(name, "cpu"), weights:tensor(name .. "_scales", "cpu")
        local of_blocks, list = ps.ops.unpack(blocks, scales, kind.number, 0), {}
        for i = 0, of_blocks:size(1) - 1, 32 do list[#list + 1] = of_blocks:narrow(1, i, 1) end
        assert.equal(golden, check.bytes(ps.cat(list, 1)))
        assert.equal(check.bytes(file:tensor(name .. ".nested_quant_map", "cpu")),
          check.bytes(ps.tensor(require("ps.nn.double_quant").map())))
      end
    end
    files:close()
  end)

  it("stays packed with the numbers of the unpacked model, also mapped and in products of few rows", function()
    for family, layer in pairs { llama = "model.layers.0.mlp.down_proj", gpt2 = "transformer.h.0.attn.c_attn" } do
      local want = write("m", family, true)
      local plain = load "m"
      local one = ids:narrow(0, 0, 1):narrow(1, 0, 3):contiguous()
      for _, mmap in ipairs { false, true } do
        local kept = load("m", { keep_quantized = true, mmap = mmap })
        assert.truthy(far(logits(plain), logits(kept)) < 1e-5)
        assert.truthy(far(logits(plain, one), logits(kept, one)) < 1e-5)
        local count = 0
        for name, module in kept:named_modules() do
          local kind = packed.of(module)
          if kind then
            count = count + 1
            assert.equal("NF4_DOUBLE", kind.name)
            assert.equal(check.bytes(want[name .. ".weight"]), check.bytes(parts.weight(module):contiguous()))
          end
          if name == layer then assert.truthy(kind) end
        end
        assert.equal(2, count)
      end
    end
  end)

  it("stays packed with double quantization on cuda, with the cpu's blocks, scales and values", function()
    local lacking = cuda.lacks_kernels()
    if lacking then return pending(lacking) end
    local want = write("m", "llama", true)
    ps.safetensors.save(at "values.safetensors", { want = want[MLP], ids = ids })
    local layer = MLP:gsub("%.weight$", "")
    local out, code = cuda.child(cuda.NEAR .. ("local folder, name = %q, %q\n"):format(folder, layer) .. [[
      local packed, parts, check = require "ps.nn.packed", require "ps.nn.parts", require "spec.check_lib"
      local given = ps.load(folder .. "/values.safetensors")
      local function layer_of(model)
        for of_layer, layer in model:named_modules() do if of_layer == name then return layer end end
      end
      local function compare(on_cpu, on_cuda)
        local a, b = layer_of(on_cpu), layer_of(on_cuda)
        assert(packed.of(b).name == "NF4_DOUBLE", packed.of(b).name)
        assert(b.weight:device():find "^cuda" and b.weight_scales:device():find "^cuda", b.weight_scales:device())
        assert(check.bytes(a.weight) == check.bytes(b.weight:to "cpu"), "blocks")
        assert(check.bytes(a.weight_scales) == check.bytes(b.weight_scales:to "cpu"), "scales")
        assert(check.bytes(parts.weight(a)) == check.bytes(parts.weight(b):to "cpu"), "values")
        for _, rows in ipairs { 3, 33 } do                   -- few rows use the blocks directly
          local values, grads = ps.randn({ rows, b.inputs }), {}
          for i, layer in ipairs { a, b } do
            local x = values:to(layer.weight:device()):clone():requires_grad_()
            local y = layer(x)
            y:square():sum():backward()
            grads[i] = { y:detach(), x:grad() }
          end
          for i, what in ipairs { "product", "gradient" } do
            near(grads[2][i], grads[1][i], 1e-5, what .. " of " .. rows .. " rows")
          end
        end
      end
      local function load(device)
        return ps.from_pretrained(folder .. "/m", { quiet = true, keep_quantized = true, device = device })
      end
      local on_cpu, on_cuda = load "cpu", load "cuda"
      compare(on_cpu, on_cuda)
      assert(check.bytes(given.want) == check.bytes(parts.weight(layer_of(on_cuda)):to "cpu"), "the folder's values")
      ps.no_grad(function()
        near(on_cuda({ input_ids = given.ids:to "cuda" }).logits, on_cpu({ input_ids = given.ids }).logits, 1e-5,
          "logits")
      end)
      on_cuda:save_pretrained(folder .. "/cuda")
      local plain = {}
      for _, device in ipairs { "cpu", "cuda" } do
        plain[device] = ps.from_pretrained(folder .. "/m", { quiet = true }):to(device)
        ps.quantize(plain[device], { double_quant = true })
      end
      compare(plain.cpu, plain.cuda)
      all_near()
      print "fine"
    ]])
    assert.truthy(code == 0 and out:find("fine\n", 1, true), out)
    local tensors = ps.load(at "cuda/model.safetensors")
    for suffix, t in pairs((quantized(64, 320, true))) do
      assert.equal(check.bytes(t), check.bytes(tensors[MLP .. suffix]), suffix)
    end
  end)

  it("has 4.127 bits per weight if packed with double quantization", function()
    local layer = ps.nn.Linear(1024, 2048, { bias = false, dtype = "bf16" })
    local bf16 = layer.weight:nbytes()
    ps.quantize(ps.nn.Sequential(layer), { double_quant = true })
    local blocks = 1024 * 2048 / 64
    assert.equal(1024 * 2048 / 2 + blocks, layer.weight:nbytes())
    assert.equal(4 * (257 + blocks / 256), layer.weight_scales:nbytes())
    assert.equal("0.258", ("%.3f"):format((layer.weight:nbytes() + layer.weight_scales:nbytes()) / bf16))
  end)

  it("keeps a table of embeddings packed with fp32 scales", function()
    local table_of = "model.embed_tokens.weight"
    write("m", "llama", true, function(tensors, states)
      local made
      made, states[table_of] = quantized(40, 64, true), select(3, quantized(40, 64, true))
      for suffix, t in pairs(made) do tensors[table_of .. suffix] = t end
    end)
    local kept = load("m", { keep_quantized = true })
    assert.equal("NF4", packed.of(kept.model.embed_tokens).name)
    assert.equal("NF4_DOUBLE", packed.of(kept.model.layers[0].mlp.down_proj).name)
    assert.truthy(far(logits(load "m"), logits(kept)) < 1e-5)
  end)

  it("has the gradients of the unpacked weights, for few rows and for many", function()
    write("m", "llama", true)
    local plain, kept = load "m", load("m", { keep_quantized = true })
    for _, model in ipairs { plain, kept } do
      ps.manual_seed(8)
      ps.lora.wrap(model, { r = 2, alpha = 4, dropout = 0 })
      for name, p in model:named_parameters() do
        if name:find "lora_B" then ps.no_grad(function() p:fill_(0.02) end) end
      end
    end
    for _, rows in ipairs { 3, 33 } do
      local values, found = ps.randn({ rows, 64 }):tolist(), {}
      for i, model in ipairs { plain, kept } do
        local layer = model.model.layers[0].self_attn.q_proj
        assert.equal(i == 2, packed.of(layer) == packed.type "NF4_DOUBLE")
        local x = ps.tensor(values):requires_grad_()
        local a = layer.lora_A.default.weight
        layer(x):square():sum():backward()
        found[i] = { x:grad():clone():keep(), a:grad():clone():keep() }
      end
      for i = 1, 2 do
        assert.truthy(far(found[1][i], found[2][i]) < 1e-5 * found[1][i]:abs():max():item())
      end
    end
    local losses = {}
    for i, model in ipairs { plain, kept } do
      local optimizer = ps.optim.AdamW(model, { lr = 1e-2 })
      losses[i] = {}
      for step = 1, 6 do
        optimizer:zero_grad()
        local loss = model({ input_ids = ids, labels = ids }).loss
        losses[i][step] = loss:item()
        loss:backward()
        optimizer:step()
      end
      assert.truthy(losses[i][6] < losses[i][1])
    end
    for step = 1, 6 do assert.truthy(math.abs(losses[1][step] - losses[2][step]) < 1e-4 * losses[1][step]) end
  end)

  it("is read by parts, from files that do not have all tensors of a weight, and without config.json", function()
    local want, tensors = write("m", "llama", true)
    local files = files_of.open { at "m/model.safetensors" }
    local state = files:state()
    local part = ps.empty { 20, 100 }
    state:read_part(MLP, part, { 37, 33 })
    assert.equal(check.bytes(want[MLP]:narrow(0, 37, 20):narrow(1, 33, 100):contiguous()), check.bytes(part))
    files:close()
    os.execute("rm -r '" .. at "m/model.safetensors" .. "'")
    local list, map = { {}, {} }, {}
    for name, t in pairs(tensors) do
      local file = name:find "absmax" and 1 or 2
      list[file][name], map[name] = t, ("part-%d.safetensors"):format(file)
    end
    for i = 1, 2 do ps.safetensors.save(at(("m/part-%d.safetensors"):format(i)), list[i]) end
    check.write(at "m/model.safetensors.index.json", json.encode { metadata = {}, weight_map = map })
    for _, keep in ipairs { false, true } do
      local model = load("m", { keep_quantized = keep })
      assert.equal(check.bytes(want[MLP]), check.bytes(parts.weight(model.model.layers[0].mlp.down_proj)))
    end
    local model = require("models.llama").new(LLAMA)
    model:load_weights(at "m/part-1.safetensors", at "m/part-2.safetensors")
    assert.equal(check.bytes(want[ATTENTION]), check.bytes(model.model.layers[0].self_attn.q_proj.weight))
  end)

  it("is written unpacked without quantization_config, and merged with an adapter", function()
    write("m", "llama", false)
    local model = load("m", { keep_quantized = true })
    ps.lora.wrap(model, { r = 2 })
    for name, p in model:named_parameters() do
      if name:find "lora_B" then ps.no_grad(function() p:fill_(0.02) end) end
    end
    model:save_pretrained(at "adapter")
    ps.lora.merge_folder(at "m", at "adapter", at "merged")
    assert.truthy(far(logits(model), logits(load "merged")) < 1e-5)
    load("m"):save_pretrained(at "plain")
    for _, name in ipairs { "merged", "plain" } do
      assert.is_nil(json.decode(check.read(at(name) .. "/config.json")).quantization_config)
    end
    assert.equal(check.bytes(logits(load "m")), check.bytes(logits(load "plain")))
  end)
end)

describe("a model with weights packed as NF4 is written", function()
  local function tensors_of(name) return ps.load(at(name) .. "/model.safetensors") end

  it("with the codes and scales of its blocks, from every family's layers", function()
    for family, config in pairs { llama = LLAMA, gpt2 = GPT2 } do
      ps.manual_seed(6)
      local model = require("models." .. family).new(config, { dtype = "bf16" }):eval()
      local skipped = family == "llama" and "model.layers.0.mlp.down_proj" or "transformer.h.0.mlp.c_fc"
      local _, layers = ps.quantize(model, { skip = { skipped } })
      model:save_pretrained(at "w")
      local tensors, count, modules = tensors_of "w", 0, {}
      for name, module in model:named_modules() do modules[name] = module end
      for _, layer in ipairs(layers) do
        local name = layer.name .. ".weight"
        local values = parts.weight(modules[layer.name]):to "fp32"
        if family == "gpt2" then values = values:t():contiguous() end
        local state = json.decode(ffi.string(check.bytes(tensors[name .. STATE])))
        assert.same({ quant_type = "nf4", blocksize = 64, dtype = "bfloat16", shape = values:shape() }, state)
        local numel = values:numel()
        assert.same({ { numel / 2, 1 }, { numel / 64 }, { 16 } }, { tensors[name]:shape(),
          tensors[name .. ".absmax"]:shape(), tensors[name .. ".quant_map"]:shape() })
        local flat, codes, scales = values:reshape(-1):tolist(), tensors[name]:reshape(-1):tolist(),
          tensors[name .. ".absmax"]:tolist()
        local map = tensors[name .. ".quant_map"]:tolist()
        for i = 0, numel - 1, 97 do
          local byte = codes[math.floor(i / 2) + 1]
          local code = i % 2 == 0 and math.floor(byte / 16) or byte % 16
          local value = rounded(map[code + 1] * scales[math.floor(i / 64) + 1])
          assert.equal(ps.tensor({ value }):to "bf16":to("fp32"):item(), flat[i + 1], name)
        end
        count = count + 1
      end
      assert.equal(family == "llama" and 6 or 3, count)
      local fields = json.decode(check.read(at "w/config.json"))
      assert.equal("bfloat16", fields.dtype)
      local given, skips = fields.quantization_config, {}
      for _, name in ipairs(given.llm_int8_skip_modules) do skips[name] = true end
      assert.is_true(skips[skipped] and skips.lm_head)
      given.llm_int8_skip_modules = nil
      assert.same({ quant_method = "bitsandbytes", load_in_4bit = true, load_in_8bit = false,
        bnb_4bit_quant_type = "nf4", bnb_4bit_use_double_quant = false, bnb_4bit_quant_storage = "uint8",
        bnb_4bit_compute_dtype = "bfloat16" }, given)
      for _, size in ipairs { "50GB", 30000 } do                          -- one file, or several with an index
        model:save_pretrained(at "again", { max_shard_size = size })
        local back = load("again", { dtype = "bf16", keep_quantized = true })
        assert.equal(check.bytes(logits(model)), check.bytes(logits(back)))
        os.execute("rm -r '" .. at "again" .. "'")
      end
    end
  end)

  it("from a folder in NF4, also with an engine, with the same values", function()
    local want = write("m", "llama", true)
    load("m", { keep_quantized = true }):save_pretrained(at "single")
    local tensors = tensors_of "single"
    for suffix, given in pairs((quantized(64, 320, true))) do
      assert.equal(check.bytes(given), check.bytes(tensors[MLP .. suffix]), suffix)
    end
    assert.is_nil(tensors[MLP .. "_scales"])
    assert.is_true(json.decode(check.read(at "single/config.json")).quantization_config.bnb_4bit_use_double_quant)
    local model = load("m", { keep_quantized = true })
    local engine = ps.initialize { model = model, config = { train_batch_size = 2,
      optimizer = { type = "adamw", params = { lr = 1e-3 } } } }
    engine:save_pretrained(at "engine")
    engine:close()
    for _, name in ipairs { "single", "engine" } do
      local state = load(name):state_dict()
      for key, values in pairs(want) do assert.equal(check.bytes(values), check.bytes(state[key]), name) end
    end
    assert.equal(check.bytes(logits(load "m")), check.bytes(logits(load "single")))
  end)

  it("from ps.quantize with double_quant, whose scales differ little from those of NF4", function()
    local function made(double)
      ps.manual_seed(6)
      local model = require("models.llama").new(LLAMA):eval()
      return ps.quantize(model, { double_quant = double, skip = { "q_proj" } })
    end
    local single, model = made(false), made(true)
    local off, singles = 0, {}
    for name, module in single:named_modules() do singles[name] = module end
    for name, module in model:named_modules() do
      if packed.of(module) then
        local values = parts.weight(module)
        local other = parts.weight(singles[name])
        off = math.max(off, far(values, other) / other:abs():max():item())
      end
    end
    assert.truthy(off > 0 and off < 0.02, off)
    model:save_pretrained(at "double")
    local back = load("double", { keep_quantized = true })
    assert.equal(check.bytes(logits(model)), check.bytes(logits(back)))
    assert.equal("NF4_DOUBLE", packed.of(back.model.layers[0].mlp.down_proj).name)
    assert.equal(check.bytes(logits(load "double")), check.bytes(logits(load("double", { dtype = "fp32" }))))
    local zeros = ps.nn.Linear(64, 4)
    ps.no_grad(function() zeros.weight:zero_() end)
    ps.quantize(ps.nn.Sequential(zeros), { double_quant = true })
    assert.equal(0, parts.weight(zeros):abs():max():item())
    check.fails(function() ps.quantize(made(nil), { type = "q8_0", double_quant = true }) end,
      "double_quant is only for the type nf4, not q8_0")
    local layer = model.model.layers[0].mlp.down_proj
    check.fails(function() ps.ops.unpack(layer.weight, nil, 257, 0) end, "must be fp32 [259]")
    check.fails(function() ps.ops.unpack(layer.weight, ps.zeros { 258 }, 257, 0) end, "must be fp32 [259]")
  end)

  it("but not with weights of other types, or as another file", function()
    local model = require("models.llama").new(LLAMA)
    ps.quantize(model, { skip = { "down_proj" } })
    local entries = { { name = ATTENTION, shape = { 64, 36 }, dtype = "uint8", owner = 1 } }
    check.fails(function() require("ps.pretrained.bitsandbytes_save").of(model):entries(entries) end, "on another rank")
    check.fails(function() model:save_gguf(at "x.gguf") end, "(NF4)")
    check.fails(function() model:save_parallelized(at "x") end, "(NF4)")
    ps.quantize(model, { type = "q8_0" })
    check.fails(function() model:save_pretrained(at "x") end, "(Q8_0)")
  end)
end)

describe("a quantized folder", function()
  local function refused(text, change, family, double)
    write("refused", family or "llama", double ~= false, change)
    local ok, problem = pcall(load, "refused")
    assert.is_false(ok, text)
    assert.truthy(type(problem.refused) == "string" and problem.refused:sub(1, #text) == text,
      ("'%s' is not '%s'"):format(tostring(problem.refused or problem), text))
  end
  local function config(key, value, text)
    refused(("quantization_config.%s = %s"):format(key, text), function(_, _, given) given[key] = value end)
  end

  it("of another kind is refused by the field of quantization_config", function()
    config("quant_method", "gptq", "gptq: only bitsandbytes with nf4 is supported")
    config("quant_method", "awq", "awq")
    config("load_in_8bit", true, "true: weights of 8 bits are not supported")
    config("load_in_4bit", false, "false: it must be true")
    config("bnb_4bit_quant_type", "fp4", "fp4: only nf4 is supported")
    config("bnb_4bit_quant_type", nil, "none: only nf4 is supported")
    config("bnb_4bit_quant_storage", "bfloat16", "bfloat16: only uint8 is supported")
    config("llm_int8_skip_modules", "lm_head", "lm_head: it must be a list of names")
    for _, skip in ipairs { "q_proj", "model.layers", "model.layers.0.mlp.down_proj" } do
      config("llm_int8_skip_modules", { "lm_head", skip }, skip .. ": the files have model.layers.0.")
    end
    refused("quantization_config = {...}: it has no quant_method", function(_, _, given, fields)
      for key in pairs(given) do given[key] = nil end
      fields.quantization_config = { bits = 4 }
    end)
    refused("quantization_config = fp8: it must be an object", function(_, _, _, fields)
      fields.quantization_config = "fp8"
    end)
    refused("quantization_config.load_in_4bit = true: the files have no weights in NF4", function(tensors, states)
      for key, shape in pairs(SHAPES.llama) do
        for _, suffix in ipairs { "", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map" } do
          tensors[key .. suffix] = nil
        end
        tensors[key], states[key] = ps.zeros(shape), nil
      end
    end)
  end)

  it("is refused if a tensor of a weight is missing or has another type or shape", function()
    for _, case in ipairs { { ".absmax", "uint8 [320]", bytes { 1, 2 }, "uint8 [2]" },
      { ".nested_absmax", "fp32 [2]", ps.ones { 3 }, "fp32 [3]" },
      { ".nested_quant_map", "fp32 [256]", ps.ones { 255 }, "fp32 [255]" },
      { ".quant_map", "fp32 [16]", ps.ones({ 16 }):to "bf16", "bf16 [16]" },
      { "", "", ps.zeros({ 10240, 2 }, { dtype = "uint8" }), "uint8 [10240, 2]: a weight of [64, 320] in NF4 must be "
        .. "uint8 [10240, 1]" } } do
      local suffix, wanted, other, shown = unpack(case)
      refused(MLP .. suffix .. " = none: the files lack", function(tensors) tensors[MLP .. suffix] = nil end)
      refused(("%s%s = %s%s"):format(MLP, suffix, shown, suffix ~= "" and ": it must be " .. wanted or ""),
        function(tensors) tensors[MLP .. suffix] = other end)
    end
    refused(MLP .. ".absmax = uint8 [320]: it must be fp32 [320]", function(tensors)
      tensors[MLP .. ".absmax"] = ps.zeros({ 320 }, { dtype = "uint8" })
    end, "llama", false)
    refused(MLP .. STATE .. " = none", function(_, states) states[MLP] = nil end)
    refused(MLP .. ".quant_map[3] = -0.375: NF4 has -0.394917488", function(tensors)
      local other = { unpack(MAP) }
      other[4] = -0.375
      tensors[MLP .. ".quant_map"] = ps.tensor(other)
    end)
  end)

  it("is refused by the field of a weight's quant_state", function()
    local function state(key, value, text)
      refused(("%s%s.%s = %s"):format(MLP, STATE, key, text), function(_, states) states[MLP][key] = value end)
    end
    state("blocksize", 128, "128: only 64 is supported")
    state("quant_type", "fp4", "fp4: only nf4 is supported")
    state("shape", { 128, 160 }, "[128, 160]: rows must be multiples of 64 values")
    state("shape", { 64 }, "[64]: it must be two whole numbers")
    state("shape", { 64, -320 }, "[64,-320]: it must be two whole numbers")
    state("shape", { { 64 }, true }, "[[64],true]: it must be two whole numbers")
    refused(MLP .. STATE .. ".shape = {...}: it must be two whole numbers", function(_, states)
      states[MLP] = '{"quant_type":"nf4","blocksize":64,"shape":[64,1e999]}'
    end)
    state("shape", "64", "64: it must be two whole numbers")
    state("nested_blocksize", 128, "128: only 256 is supported")
    state("nested_dtype", "bfloat16", "bfloat16: only float32 is supported")
    state("nested_offset", nil, "none: it must be a number")
    refused(MLP .. STATE .. " = damaged", function(_, states) states[MLP] = "{" end)
    refused(MLP .. ".quant_state.bitsandbytes__fp4 = present: only weights in NF4", function(tensors, states)
      tensors[MLP .. ".quant_state.bitsandbytes__fp4"], states[MLP] = bytes { 123, 125 }, nil
    end)
  end)

  it("without weights in NF4 has nothing to keep packed", function()
    require("models.llama").new(LLAMA):save_pretrained(at "plain")
    check.fails(function() load("plain", { keep_quantized = true }) end, "GGUF")
  end)
end)
