-- SPDX-License-Identifier: BSD-3-Clause
-- ps.inspect: statistics compared with numbers computed by hand, of parameters in any place of an engine, and of
-- tensors inside a model.
local ps = require "ps"
local nn = ps.nn
local inspect = ps.inspect
local lib = require "spec.ranks_lib"
local fails = require("spec.check_lib").fails

local function near(want, got, text) assert.near(want, got, 1e-12 * math.max(1, math.abs(want)), text) end

-- Returns the mean, std, min and max of some elements as PyTorch defines them, by two passes over doubles.
local function by_hand(t)
  local list, n, sum, squares = {}, 0, 0, 0
  for _, x in ipairs(t:to("cpu"):to("fp64"):reshape(-1):tolist()) do list[#list + 1], n, sum = x, n + 1, sum + x end
  for _, x in ipairs(list) do squares = squares + (x - sum / n) ^ 2 end
  table.sort(list)
  return { mean = sum / n, std = math.sqrt(squares / (n - 1)), min = list[1], max = list[n] }
end

local function check_row(t, row, grad)
  local want = by_hand(t)
  for key, value in pairs(want) do near(value, row[key], row.name .. " " .. key) end
  if not grad then return end
  want = by_hand(grad)
  near(want.mean, row.grad_mean, row.name .. " grad_mean")
  near(want.std, row.grad_std, row.name .. " grad_std")
end

describe("ps.inspect.inspect_model", function()
  it("has the numbers of torch.std, and PyTorch's NaN", function()
    local net = nn.class("Net")()
    net:param("a", ps.tensor { 1, 2, 3, 4 })
    net:param("big", ps.tensor { 1e8, 1e8 + 8, 1e8 + 16 })  -- a one-pass variance in fp32 would lose these differences
    net:param("one", ps.tensor { 7 })
    net:param("bad", ps.tensor { 1, 0 / 0, -1 })
    local rows = {}
    for _, row in ipairs(inspect.inspect_model(net)) do rows[row.name] = row end
    near(2.5, rows.a.mean)
    near(1.2909944487358056, rows.a.std)
    assert.same({ 4 }, rows.a.shape)
    assert.is_nil(rows.a.grad_mean)
    near(8, rows.big.std)
    near(1e8 + 8, rows.big.mean)
    assert.truthy(rows.one.std ~= rows.one.std)
    for _, key in ipairs { "mean", "std", "min", "max" } do assert.truthy(rows.bad[key] ~= rows.bad[key], key) end
  end)

  it("joins blocks, and reads strided and half tensors", function()
    local net = nn.class("Net")()
    ps.manual_seed(4)
    net:param("wide", ps.randn { 97, 131 })
    net:param("half", (ps.randn { 5000 } * 3 + 100):to("bf16"))
    local loss = (net.wide * net.wide):sum() + net.half:to("fp32"):sum()
    loss:backward()
    for _, row in ipairs(inspect.inspect_model(net)) do check_row(net[row.name], row, net[row.name]:grad()) end
  end)

  it("selects names like fnmatch", function()
    local net = nn.class("Net")()
    for _, name in ipairs { "w1", "w2", "w10", "a+b" } do net:param(name, ps.zeros { 2 }) end
    local function names(pattern, prefix)
      local list = {}
      for i, row in ipairs(inspect.inspect_model(net, pattern, prefix)) do list[i] = row.name end
      return table.concat(list, " ")
    end
    assert.equal("w1 w2 w10 a+b", names "*")
    assert.equal("w1 w2", names "w?")
    assert.equal("w1 w10", names "w1*")
    assert.equal("w2", names "w[!1]")
    assert.equal("w1 w2", names "w[1-2]")
    assert.equal("a+b", names "a+b")
    assert.equal("net.a+b", names("a+b", "net."))
    assert.equal("", names "w")
    fails(function() inspect.inspect_model(3) end, "takes a model, not a number")
    fails(function() inspect.inspect_model(net, 3) end, "the pattern")
  end)

  it("reads masters and gradients of an engine while gradients lie in the parameters' places", function()
    local config = { train_batch_size = 2, bf16 = { enabled = true }, plan_print = false, overlap_optimizer = false,
      gradient_clipping = 1e9, optimizer = { type = "AdamW", params = { lr = 1e-3 } },
      chunk_size = 65536 }
    local function open(memory)
      config.memory = memory
      ps.manual_seed(3)
      return ps.initialize { config = config, quiet = true, model_func = function()
        local net = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 8))
        return net
      end }
    end
    local function run(memory)
      local model, optimizer = open(memory)
      ps.manual_seed(5)
      local x, seen = ps.randn({ 2, 48 }):to("bf16"), {}
      for turn = 1, 2 do
        local loss = (model(x) ^ 2):mean()
        model:backward(loss)
        local masters = model:state_dict()
        for _, row in ipairs(inspect.inspect_model(model)) do
          check_row(masters[row.name], row)
          assert.equal("fp32", masters[row.name]:dtype())
          seen[#seen + 1] = ("%d %s %.17g %.17g %.17g"):format(turn, row.name, row.std, row.grad_mean, row.grad_std)
          assert.truthy(row.grad_std > 0)
        end
        optimizer:step()
        seen[#seen + 1] = ("%.17g"):format(loss:item())
      end
      assert.is_nil(inspect.inspect_model(model)[1].grad_std)
      model:close()
      return table.concat(seen, "\n")
    end
    assert.equal(run "plain", run(nil))
  end)

  it("has gradients without the loss scale", function()
    local function grads(fp16)
      ps.manual_seed(3)
      local model = ps.initialize { quiet = true, model_func = function() return nn.Linear(16, 4) end,
        config = { train_batch_size = 4, fp16 = fp16, plan_print = false, gradient_clipping = 1e9,
          optimizer = { type = "AdamW", params = { lr = 1e-3 } } } }
      local x = ps.arange(64):reshape(4, 16) / 64
      local loss = model(x:to(fp16 and "fp16" or "fp32")):to("fp32"):sum()
      model:backward(loss)
      local rows = inspect.inspect_model(model)
      model:close()
      return rows
    end
    -- The bias's gradient is the number of rows. With the scale it would be 4 * 1024.
    local rows = grads { enabled = true, loss_scale = 1024 }
    assert.equal(4, rows[2].grad_mean)
    assert.equal(0, rows[2].grad_std)
    near(by_hand(ps.arange(64):reshape(4, 16):sum(0) / 64).mean, rows[1].grad_mean)
  end)
end)

describe("ps.inspect.inspect_tensor", function()
  local function net_of(recompute)
    local Block = nn.class("Block")
    function Block:init() self.fc = nn.Linear(6, 6, { bias = false }) end
    function Block:forward(x)
      local h = inspect.record_tensor(self.fc(x), "h", "block")
      return inspect.record_tensor(h * h, "square")
    end
    ps.manual_seed(2)
    local net = nn.Sequential(Block(), Block())
    if recompute then assert.equal(2, net:recompute_blocks()) end
    return net
  end

  local function inspected(recompute)
    local net = net_of(recompute)
    ps.manual_seed(7)
    local x, out = ps.randn { 3, 6 }, nil
    local inspector = inspect.inspect_tensor(function()
      out = net(x)
      out:sum():backward()
    end)
    return inspector, net, x, out
  end

  it("records values and gradients, in the order of calls", function()
    local inspector, net, x = inspected(false)
    local rows = inspector:get_summary()
    assert.equal(4, #rows)
    local names = {}
    for i, row in ipairs(rows) do names[i] = ("%s.%s%d"):format(row.group or "", row.name, row.index) end
    assert.equal("block.h0 .square0 block.h1 .square1", table.concat(names, " "))
    -- The forward and its gradients, written out: d sum(h1^2) / d h1 = 2 h1, and so on.
    local w0, w1 = net:parameters()[1]:detach(), net:parameters()[2]:detach()
    local h0 = x:matmul(w0:transpose(0, 1))
    local s0 = h0 * h0
    local h1 = s0:matmul(w1:transpose(0, 1))
    local dh1 = h1 * 2
    local ds0 = dh1:matmul(w1)
    local want = { { h0, ds0 * h0 * 2 }, { s0, ds0 }, { h1, dh1 }, { h1 * h1, ps.ones_like(h1) } }
    for i, row in ipairs(rows) do
      local value, grad = by_hand(want[i][1]), by_hand(want[i][2])
      for key, number in pairs(value) do assert.near(number, row[key], 1e-5, i .. key) end
      assert.near(grad.mean, row.grad_mean, 1e-5)
      assert.near(grad.std, row.grad_std, 1e-5)
    end
    local tensor, grad = inspector:get_tensor("h", "block", 1)
    check_row(tensor, rows[3], grad)
    assert.same(tensor:tolist(), inspector:get_tensor("h"):tolist())
    assert.is_nil(inspector:get_tensor("h", "other"))
    assert.is_nil((inspector:get_tensor("h", "block", 2)))
    local text = inspect.format_summary(rows)
    for _, bad in ipairs { { 1 }, { {} }, { { name = "a" } } } do
      fails(function() inspect.format_summary(bad) end, "format_summary: row 1 is not a row of inspect_model or")
    end
    assert.truthy(text:find("^name +shape +mean +std +min +max +grad mean +grad std\n"), text)
    assert.truthy(text:find("block.h[1]", 1, true), text)
  end)

  it("has the records of recomputed blocks once, with their gradients", function()
    local one, other = inspected(false), inspected(true)
    local a, b = one:get_summary(), other:get_summary()
    assert.equal(4, #b)
    for i, row in ipairs(a) do
      assert.same({ row.name, row.mean, row.std, row.grad_mean, row.grad_std },
        { b[i].name, b[i].mean, b[i].std, b[i].grad_mean, b[i].grad_std })
    end
  end)

  it("has the outputs of a recomputed block, for the next one or its caller", function()
    local Block = nn.class("Block")
    function Block:init() self.fc = nn.Linear(6, 6) end
    function Block:forward(x) return self.fc(inspect.record_tensor(x, "into")) * 0.5 end
    local Net = nn.class("Net")
    function Net:init() self.blocks = nn.ModuleList { Block(), Block(), Block() } end
    function Net:forward(x)
      for _, block in self.blocks:each() do x = block(x) end
      return inspect.record_tensor(x, "out"):sum()
    end
    local seen = {}
    for i, recompute in ipairs { false, true } do
      ps.manual_seed(4)
      local net = Net()
      net:recompute_blocks(recompute)
      seen[i] = inspect.inspect_tensor(function() net(ps.randn { 3, 6 }):backward() end):get_summary()
    end
    assert.equal(4, #seen[1])
    assert.equal(1, seen[1][4].grad_mean)
    for i, row in ipairs(seen[1]) do
      local other = seen[2][i]
      assert.same({ row.name, row.mean, row.grad_mean, row.grad_std }, { other.name, other.mean, other.grad_mean,
        other.grad_std })
      assert.equal(i > 1, row.grad_mean ~= nil)
    end
  end)

  it("has one tensor under several names, and for several inspectors, each with its gradient", function()
    for _, recompute in ipairs { false, true } do
      local Twice = nn.class("Twice")
      function Twice:init() self.fc = nn.Linear(3, 3) end
      function Twice:forward(x)
        local y = inspect.record_tensor(self.fc(x), "one")
        return inspect.record_tensor(y, "other") * 2
      end
      local net, inner = nn.ModuleList { Twice() }, nil
      net:recompute_blocks(recompute)
      local outer = inspect.inspect_tensor(function()
        inner = inspect.inspect_tensor(function()
          local y = net[0](ps.ones { 2, 3 })
          inspect.record_tensor(inspect.record_tensor(y, "result"), "again"):sum():backward()
        end)
      end)
      for _, inspector in ipairs { inner, outer } do
        local seen = {}
        for i, row in ipairs(inspector:get_summary()) do seen[i] = ("%s %g"):format(row.name, row.grad_mean or -1) end
        assert.same({ "one 2", "other 2", "result 1", "again 1" }, seen)
      end
    end
  end)

  it("changes no bit of the training, and also ends its scope after an error", function()
    local function grads(fn)
      local net = net_of(false)
      ps.manual_seed(7)
      local x = ps.randn { 3, 6 }
      fn(function() net(x):sum():backward() end)
      return net:parameters()[1]:grad():tolist()
    end
    assert.same(grads(function(run) run() end), grads(inspect.inspect_tensor))
    fails(function() inspect.inspect_tensor(function() error("here", 0) end) end, "here")
    local t = ps.ones { 2 }
    local inspector = inspect.inspect_tensor()
    inspect.record_tensor(t, "in")
    inspector:close()
    inspect.record_tensor(t, "out")
    assert.equal(1, #inspector:get_summary())
    assert.is_nil(inspector:get_summary()[1].grad_mean)
    fails(function() inspect.inspect_tensor(function() inspect.record_tensor(t) end) end, "the name")
  end)

  it("records each micro-batch of an engine once, although steps begin with dry runs", function()
    local net
    local model, optimizer = ps.initialize { quiet = true, model_func = function()
      net = net_of(true)
      return net
    end, config = { train_batch_size = 4, gradient_accumulation_steps = 2, plan_print = false,
      optimizer = { type = "AdamW", params = { lr = 1e-3 } } } }
    local inspector = inspect.inspect_tensor(function()
      for _ = 1, 2 do model:backward(model(ps.ones { 2, 6 }):mean()) end
      optimizer:step()
    end)
    local rows = inspector:get_summary()
    assert.equal(8, #rows)
    for _, row in ipairs(rows) do assert.truthy(row.grad_std, row.name) end
    model:close()
  end)
end)

describe("ps.inspect of several ranks", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end
  local folder
  setup(function() folder = lib.folder() end)
  teardown(function() lib.remove(folder) end)

  local SCRIPT = [[
    local gpt2 = require "models.gpt2"
    local inspect = ps.inspect
    local function open(config)
      config.plan_print, config.optimizer = false, { type = "AdamW", params = { lr = 1e-3 } }
      config.overlap_optimizer, config.gradient_clipping, config.seed = false, 1e9, 3
      ps.manual_seed(3)
      return ps.initialize { config = config, quiet = true, model_func = function()
        return gpt2.new("tiny", { n_layer = 2, tie_word_embeddings = false, dropout = 0 })
      end }
    end
    ps.manual_seed(8)
    local x, y = ps.randint(0, 256, { 4, 8 }, { dtype = "int32" }), ps.randint(0, 256, { 4, 8 }, { dtype = "int32" })
    local function rows(model)
      local lines = {}
      for _, row in ipairs(inspect.inspect_model(model, "*.c_fc.*")) do
        lines[#lines + 1] = ("%s %.9g %.9g %.6g %.5g"):format(row.name, row.mean, row.std, row.max, row.grad_std)
      end
      return table.concat(lines, ";")
    end
  ]]

  it("reads what other ranks own, in each stage of ZeRO and in a pipeline", function()
    local function said(size, script)
      local all, texts = lib.check(folder, size, SCRIPT .. script), {}
      for rank = 0, size - 1 do
        for label, text in all[rank].text:gmatch "(%S+)=([^\n]*)" do
          texts[label] = texts[label] or {}
          texts[label][rank + 1] = text
        end
      end
      return texts
    end
    local one = said(1, [[
      local model = open { gradient_accumulation_steps = 2 }
      for out in model:micro_batches(x, y) do model:backward(out.loss) end
      print("one=" .. rows(model))
    ]]).one[1]
    assert.truthy(one:find("^transformer%.h%.0%.mlp%.c_fc%.weight .*h%.1%.mlp%.c_fc%.bias"), one)
    local two = said(2, [[
      local from = 2 * rank
      for stage = 0, 3 do
        for _, half in ipairs { false, true } do
          local model, optimizer = open { zero_optimization = { stage = stage }, bf16 = { enabled = half } }
          local inspector = inspect.inspect_tensor(function()
            inspect.record_tensor(model.transformer.h[0].mlp.c_fc.weight, "weight")
            model:backward(model(x:narrow(0, from, 2), y:narrow(0, from, 2)))
          end)
          print(("%s%d="):format(half and "half" or "zero", stage) .. rows(model))
          local row = inspector:get_summary()[1]
          print(("%s%d="):format(half and "parthalf" or "partzero", stage) .. ("%s %.9g %.9g %.6g %.5g"):format(
            "transformer.h.0.mlp.c_fc.weight", row.mean, row.std, row.max, row.grad_std))
          optimizer:step()
          model:close()
        end
      end
      local model = open { gradient_accumulation_steps = 2, pipeline = { stages = 2 } }
      for out in model:micro_batches(x, y) do model:backward(out.loss) end
      print("pipe=" .. rows(model))
      local inspector = inspect.inspect_tensor()
      inspect.record_tensor(ps.tensor { 1 + 2 * rank, 2 + 2 * rank }, "mine")
      local row = inspector:get_summary()[1]
      print(("mine=%.17g %.17g %g %g"):format(row.mean, row.std, row.min, row.max))
    ]])
    local function alike(want, got, digits)
      local a, b = want:gmatch "%S+", got:gmatch "%S+"
      for word in a do
        local other = b()
        if tonumber(word) and tonumber(other) then
          assert.near(tonumber(word), tonumber(other), digits * math.max(1e-3, math.abs(tonumber(word))))
        end
      end
    end
    local recorded = 0
    for label, texts in pairs(two) do
      assert.equal(texts[1], texts[2], label)
      local want = one
      if label:find "^part" then want, recorded = one:match "^[^;]*", recorded + 1 end
      if label:find "zero" or label == "pipe" then alike(want, texts[1], 1e-4) end
      if label:find "half" then alike(want, texts[1], 5e-2) end
    end
    assert.equal(8, recorded)
    assert.equal("2.5 1.2909944487358056 1 4", two.mine[1])
  end)
end)
