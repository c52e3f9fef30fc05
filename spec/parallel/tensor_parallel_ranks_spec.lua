-- SPDX-License-Identifier: BSD-3-Clause
-- Ranks among which a model's layers are cut train like one rank: losses, each tensor's gradient, norms, values and
-- masks of dropout; together with other axes, with settings that save memory, and in generation. bench/mesh.lua has
-- more layouts.
local cjson = require "cjson"
local lib = require "spec.ranks_lib"
local mesh_lib = require "bench.mesh_lib"

local folder
setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

local count = 0
-- Runs several cases on several ranks, one after another in the same processes. A case has {dp =, pp =, tp =, ...} as
-- in bench/mesh_lib.lua. Returns the cases' names.
local function run(size, cases)
  local script = [[
    local cjson, mesh_lib = require "cjson", require "bench.mesh_lib"
    for _, o in ipairs(cjson.decode(CASES)) do mesh_lib.rank(o) end
  ]]
  local names = {}
  for i, case in ipairs(cases) do
    count = count + 1
    names[i] = "run" .. count
    case.folder, case.name = folder, names[i]
  end
  script = ("local CASES = [==[%s]==]\n"):format(cjson.encode(cases)) .. script
  if size == 1 then
    for _, case in ipairs(cases) do mesh_lib.rank(case) end
  else
    lib.check(folder, size, script)
  end
  return names
end

local function agrees(name, size, one, what)
  local r = mesh_lib.compare(folder, name, size, one)
  assert.is_true(r.same_begin, what)
  assert.truthy(r.max_rel_loss_error <= 1e-6, ("%s: loss %g"):format(what, r.max_rel_loss_error))
  assert.truthy(r.max_rel_grad_error <= 1e-5, ("%s: gradient of %s %g"):format(what, r.worst, r.max_rel_grad_error))
  assert.truthy(r.norm_error <= 1e-6, ("%s: norm %g"):format(what, r.norm_error))
  assert.truthy(r.max_rel_param_error <= 1e-4, ("%s: values %g"):format(what, r.max_rel_param_error))
  return r
end

local function copy(t, more)
  local all = {}
  for key, value in pairs(t) do all[key] = value end
  for key, value in pairs(more or {}) do all[key] = value end
  return all
end

describe("two ranks with layers cut among them", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  it("train like one rank, with dropout, a padded vocabulary and two micro-batches", function()
    local base = { micros = 2, steps = 2, options = { dropout = 0.2, vocab_size = 257 } }
    local one = run(1, { copy(base) })[1]
    local list = { copy(base, { tp = 2 }), copy(base, { tp = 2, config = { recompute = true } }),
      copy(base, { tp = 2, config = { tensor_parallel = { sequence_parallel = false } } }),
      copy(base, { tp = 2, config = { tensor_parallel = { tp_keep_gathered = true } } }),
      copy(base, { tp = 2, config = { tensor_parallel = { tp_overlap_comm = 3 }, recompute = true } }) }
    for i, name in ipairs(run(2, list)) do
      local r = agrees(name, 2, one, "case " .. i)
      assert.truthy(r.numel < 0.53, r.numel)
    end
  end)

  it("train rows that cannot be divided, or only in part", function()
    local base = { steps = 1, rows = 1, positions = 15, options = { dropout = 0.1 } }
    local one = run(1, { copy(base) })[1]
    agrees(run(2, { copy(base, { tp = 2 }) })[1], 2, one, "15 rows")
  end)

  it("train Llama's grouped heads, norms of heads, and encoders", function()
    local cases, ones = {}, {}
    for i, case in ipairs { { family = "llama", options = { dropout = 0.1 } }, { family = "qwen3" },
      { family = "bert", task = "masked_lm", options = { dropout = 0.1, vocab_size = 257 } },
      { family = "roberta", task = "masked_lm", options = { tie_word_embeddings = false } },
      { family = "roberta", task = "sequence_classification" } } do
      case.steps = 0
      ones[i] = run(1, { copy(case) })[1]
      cases[i] = copy(case, { tp = 2 })
    end
    for i, pieces in ipairs { 3, 2, 4 } do  -- exchanges rows of q, k and v during all three products
      cases[#cases + 1] = copy(cases[i], { config = { tensor_parallel = { tp_overlap_comm = pieces } } })
      ones[#cases] = ones[i]
    end
    for i, name in ipairs(run(2, cases)) do
      local r = agrees(name, 2, ones[i], cases[i].family)
      assert.truthy(cases[i].task ~= "masked_lm" or r.numel < 0.56, r.numel)
    end
  end)

  it("exchange rows in pieces if requested, and otherwise before and after products", function()
    lib.check(folder, 2, [[
      local ROWS = { "column_linear", "row_linear", "column_linear_grad" }
      local ids = {}
      for i, case in ipairs { { "gpt2", 1 }, { "gpt2", 4 }, { "llama", 1 }, { "llama", 4 } } do
        local family, pieces = unpack(case)
        ps.manual_seed(3)
        local model, optimizer = ps.initialize { quiet = true, model_func = function()
          return require("models." .. family).new("tiny", { dropout = 0 })
        end, config = { plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-3 } },
          tensor_parallel = { size = 2, tp_overlap_comm = pieces > 1 and pieces or nil } } }
        local x, found = ps.randint(0, 250, { 2, 16 }, { dtype = "int32" }), {}
        ps.profiler.start { events = 16 }
        model:backward(model(x, x))
        optimizer:step()
        for _, op in ipairs(ps.profiler.stop()) do found[op.name] = op.calls end
        -- Two layers: in gpt2, each has two column layers and two row layers; in llama, one of q, k and v, and one of
        -- gate and up.
        for _, name in ipairs(ROWS) do
          assert(found[name] == (pieces > 1 and (name == "column_linear" and 8 or 4) or nil),
            ("%s with %d pieces: %s"):format(name, pieces, tostring(found[name])))
        end
        model:eval()
        ids[i] = table.concat(model:generate({ 10, 72, 105 }, 12, { temperature = 0 }), " ")
        model:close()
      end
      for i = 1, 3, 2 do assert(ids[i] == ids[i + 1], ids[i] .. " | " .. ids[i + 1]) end
    ]])
  end)

  it("draw the masks of one rank in attention of a user's own model, which does not pass its first head", function()
    local MODEL = [[
      local ps = require "ps"
      local nn, F = ps.nn, ps.F
      local A = nn.class "A"
      function A:init(c, h)
        self.heads, self.qkv = h, nn.Linear(c, 3 * c, { bias = false })
        self.o = nn.Linear(c, c, { bias = false })
      end
      function A:forward(x)
        local y = self.qkv(x)
        local B, T = y:size(0), y:size(1)
        y = y:reshape(B, T, 3, self.heads, -1):permute(2, 0, 3, 1, 4)
        return self.o(F.attention(y[0], y[1], y[2], { dropout = 0.5 }):transpose(1, 2):reshape(B, T, -1))
      end
      local Net = nn.class "Net"
      function Net:init() self.embed, self.a = nn.Embedding(16, 32), A(32, 4) end
      function Net:batch_of(ids) return { input_ids = ids } end
      function Net:parts()
        return { { name = "a", modules = { self.embed, self.a }, forward = function(_, b)
          return { loss = (self.a(self.embed(b.input_ids)) ^ 2):mean() }
        end } }
      end
      function Net:forward(...) return nn.fold(self:parts(), self:batch_of(...)).loss end
      Net.tensor_parallel = { a = { "divide", "heads" }, ["a.qkv"] = { "column", blocks = 3 }, ["a.o"] = "row" }
      local losses = {}
      for i, recompute in ipairs { false, true } do
        ps.manual_seed(1)
        local model, optimizer = ps.initialize { quiet = true, model_func = function()
          local net = Net()
          rawset(net.a, "recomputes", recompute or nil)
          return net
        end, config = { plan_print = false, optimizer = { type = "SGD", params = { lr = 1 } },
          tensor_parallel = ps.world_size() > 1 and { size = 2, sequence_parallel = false } or nil } }
        ps.manual_seed(2)
        local ids = ps.randint(0, 16, { 8, 12 })
        for step = 1, 2 do
          local loss = model(ids)
          losses[2 * i + step - 2] = loss:item()
          model:backward(loss)
          optimizer:step()
        end
        model:close()
      end
    ]]
    local one = assert(loadstring(MODEL .. "return losses"))()
    lib.check(folder, 2, MODEL .. ([[
      for i, want in ipairs { %.9g, %.9g, %.9g, %.9g } do
        local text = ("loss %%d: %%.9g, of one rank %%.9g"):format(i, losses[i], want)
        assert(math.abs(losses[i] - want) < 2e-6 * want, text)
      end
    ]]):format(unpack(one)))
  end)

  it("divide a resized table that is also the head", function()
    lib.check(folder, 2, [[
      local x = ps.randint(0, 250, { 2, 16 }, { dtype = "int32" })
      for _, family in ipairs { "gpt2", "llama" } do
        local function made()
          ps.manual_seed(3)
          local model = require("models." .. family).new("tiny", { dropout = 0, tie_word_embeddings = true })
          return model:resize_token_embeddings(263)
        end
        local want = ps.no_grad(made(), x, x):item()
        local model = ps.initialize { quiet = true, model_func = made, config = { plan_print = false,
          optimizer = { type = "AdamW", params = { lr = 1e-3 } }, tensor_parallel = { size = 2 } } }
        local loss = model(x, x)
        assert(math.abs(loss:item() - want) < 1e-5, ("%s: %.9g, not %.9g"):format(family, loss:item(), want))
        model:backward(loss)
        model:close()
      end
    ]])
  end)

  it("lay out their chunks again together if only one of them has no room for them", function()
    lib.check(folder, 2, [[
      local gpt2, x = require "models.gpt2", ps.randint(0, 256, { 12, 12 }, { dtype = "int32" })
      -- Returns whether a step gave the chunks a new layout because of rank 1's budget.
      local function anew(nbytes)
        local model, optimizer = ps.initialize { quiet = true, model_func = function() return gpt2.new "tiny" end,
          config = { plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-3 } },
            tensor_parallel = { size = 2 },
            memory = { host = rank == 1 and nbytes or 2 ^ 30, disk = { path = folder, limit = 2 ^ 26 } } } }
        local ok, problem = pcall(function()
          model:backward(model(x, x))
          optimizer:step()
        end)
        local was = false
        for text in pairs(require("ps.nn.handle").of(model).said) do
          was = was or text:find "got a new layout" ~= nil
        end
        model:close()
        assert(ok, tostring(problem))
        return was
      end
      local budget = 3 * 2 ^ 20
      while not anew(budget) do budget = budget - 2 ^ 17 end
    ]])
  end)

  it("generate the same as one rank, and report different requests", function()
    local GENERATE = [[
      for _, family in ipairs { "gpt2", "llama" } do
        ps.manual_seed(3)
        local model = ps.initialize { quiet = true, config = { plan_print = false, optimizer = { type = "AdamW" },
          tensor_parallel = { size = SIZE } },
          model_func = function() return require("models." .. family).new("tiny", { dropout = 0.1 }) end }
        for _, how in ipairs { { temperature = 0 }, { seed = 4, top_k = 50 }, { num_beams = 3 } } do
          print("ids: " .. table.concat(model:generate({ 5, 6, 7 }, 9, how), " "))
        end
        model:eval()
        local x = ps.arange(0, 30, 1, { dtype = "int32" }):reshape(2, 15)
        local out = ps.no_grad(function() return model { input_ids = x, labels = x } end)
        print(("loss: %.5f"):format(out.loss:item()))
        if SIZE > 1 then
          local ok, problem = pcall(model.generate, model, { 5, 6 + ps.rank() }, 3, { temperature = 0 })
          print("other: " .. tostring(not ok and problem))
        end
        model:close()
      end
    ]]
    local function ids(text)
      local list = {}
      for line in text:gmatch "\n?(%l+: [^\n]*)" do
        if not line:find "^other" then list[#list + 1] = line end
      end
      return list
    end
    local one = ids(lib.check(folder, 1, "local SIZE = 1\n" .. GENERATE)[0].text)
    assert.equal(8, #one)
    local all = lib.check(folder, 2, "local SIZE = 2\n" .. GENERATE)
    for rank = 0, 1 do
      assert.same(one, ids(all[rank].text))
      assert.truthy(all[rank].text:find("generate: the [^\n]* on rank 1"), all[rank].text)
    end
  end)
end)

describe("four ranks with layers, stages and rows divided among them", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  it("train like one rank, with ZeRO and in a pipeline", function()
    local base = { micros = 2, steps = 1, options = { dropout = 0.1 } }
    local one = run(1, { copy(base) })[1]
    local list = {}
    for _, zero in ipairs { 0, 3 } do list[#list + 1] = copy(base, { dp = 2, tp = 2, zero = zero }) end
    for i, name in ipairs(run(4, list)) do agrees(name, 4, one, "zero " .. list[i].zero) end
    local late = { pp = 2, tp = 2, config = { pipeline = { schedule = "zb_h1" },
      tensor_parallel = { tp_overlap_comm = true } } }          -- gradients of weights are separate actions
    local llama = copy(base, { family = "llama" })
    local one_llama = run(1, { copy(llama) })[1]
    local pipes = { copy(base, { pp = 2, tp = 2 }), copy(base, late), copy(llama, late) }
    for i, name in ipairs(run(4, pipes)) do agrees(name, 4, i < 3 and one or one_llama, "pipeline " .. i) end
  end)

  -- In training, ranks would share the rows of these prompts, but not if keys and values are cached.
  it("generate in a pipeline the same as one rank", function()
    local GENERATE = [[
      ps.manual_seed(3)
      local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false,
        optimizer = { type = "AdamW" }, tensor_parallel = { size = SIZE }, pipeline = { stages = SIZE } },
        model_func = function() return require("models.gpt2").new("tiny", { dropout = 0.1 }) end }
      local x = ps.arange(0, 16, 1, { dtype = "int32" }):reshape(1, 16)
      for out in model:micro_batches(x, x) do
        print(("loss: %.4f"):format(out.loss:item()))
        model:backward(out.loss)
      end
      optimizer:step()
      for _, how in ipairs { { temperature = 0 }, { seed = 4, top_k = 50 }, { num_beams = 2 } } do
        print("ids: " .. table.concat(model:generate({ 5, 6, 7, 8 }, 5, how), " "))
      end
      for _, ids in ipairs(model:generate({ { 5, 6, 7, 8 }, { 9, 1 } }, 5, { temperature = 0 })) do
        print("ids: " .. table.concat(ids, " "))
      end
      model:close()
    ]]
    local function said(text)
      local list = {}
      for line in text:gmatch "%l+: [^\n]*" do list[#list + 1] = line end
      return list
    end
    local one = said(lib.check(folder, 1, "local SIZE = 1\n" .. GENERATE)[0].text)
    assert.equal(6, #one)
    local all = lib.check(folder, 4, "local SIZE = 2\n" .. GENERATE)
    for rank = 0, 3 do assert.same(one, said(all[rank].text)) end
  end)

  it("cut a model of four heads four times", function()
    local base = { words = 60, steps = 0,
      preset = { vocab_size = 62, n_positions = 16, n_embd = 32, n_layer = 2, n_head = 4 } }
    local one = run(1, { copy(base) })[1]
    agrees(run(4, { copy(base, { tp = 4 }) })[1], 4, one, "four")
  end)
end)
