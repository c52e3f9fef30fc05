-- SPDX-License-Identifier: BSD-3-Clause
-- Sharding: with any stage, ranks, budgets and settings the parameters are those of stage 0, bit for bit, or nearly if
-- micro-batches are summed in another order. Also the tensors that each rank holds, saves and loads, and its refusals.
local lib = require "spec.ranks_lib"

local folder

-- Trains a small GPT-2 with each stage, one after another, and prints sums of the tensors that this rank owns, before
-- and after the steps.
local TRAIN = lib.TRAINING .. [[
  local gpt2 = require "models.gpt2"
  local function show(tag, model) for _, line in ipairs(sums(model)) do print(tag .. " " .. line) end end
  local config = CONFIG
  local settings = SETTINGS
  for stage = 0, 3 do
    config.zero_optimization, config.plan_print = { stage = stage, reshard_after_forward = settings.reshard }, false
    ps.manual_seed(5)
    local model, optimizer = ps.initialize { config = config, quiet = true, model_func = function()
      local made = gpt2.new("tiny", { dropout = settings.dropout or 0 })
      if settings.frozen then
        for name, p in made:named_parameters() do if name:find("h%.0%.mlp") then p:requires_grad(false) end end
      end
      return made
    end }
    if settings.before then show(stage .. ":before", model) end
    ps.manual_seed(17)
    for step = 1, 3 do
      train(model, optimizer, step, config.gradient_accumulation_steps or 1)
      if settings.eval and step == 2 then
        model:eval()
        local x = ps.arange(0, 32, 1, { dtype = "int32" }):reshape { 2, 16 }
        print(("%d:eval - %.17g 0"):format(stage, ps.no_grad(function() return model(x, x):item() end)))
        model:train()
      end
    end
    show(stage .. ":after", model)
    model:close()
  end
]]

-- Returns {stage = {name = {sum, sum of squares}}} of all ranks together. Above stage 0, every tensor has one owner.
local function sums(all, size)
  local stages = {}
  for rank = 0, size - 1 do
    for stage, tag, name, a, b in all[rank].text:gmatch("(%d):(%a+) (%S+) (%S+) (%S+)\n") do
      local at = stages[stage] or {}
      stages[stage] = at
      local key = tag .. " " .. name
      assert.truthy(stage == "0" or not at[key] or tag == "eval", "two ranks own " .. key)
      if at[key] then assert.same({ a, b }, at[key]) end
      at[key] = { a, b }
    end
  end
  return stages
end

local function compare(size, config, settings, tolerance)
  local values = { FOLDER = folder, CONFIG = config:gsub("FOLDER", folder), SETTINGS = settings or "{}" }
  local script = TRAIN:gsub("%u%u%u%u%u%u+", values)
  local env = settings and settings:match("stress") and "PS_STRESS=1"
    or config:find("'cuda'", 1, true) and lib.emulated() or nil
  local stages = sums(lib.check(folder, size, script, env), size)
  for stage = 1, 3 do
    local got, count = stages[tostring(stage)], 0
    for key, want in pairs(stages["0"]) do
      local here = ("stage %d, %s: "):format(stage, key)
      assert.truthy(got[key], here .. "no rank has it")
      count = count + 1
      if stage == 1 or not tolerance then assert.same(want, got[key], here)
      else
        local square = tonumber(want[2])
        assert.near(square, tonumber(got[key][2]), tolerance * math.max(square, 1e-2), here)
      end
    end
    assert.truthy(count > 20)
  end
end

setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

describe("sharding", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  local BF16 = "chunk_size = 8192, bf16 = { enabled = true }, "
  for name, case in pairs {
    ["fp32, one chunk"] = { 2, "{}", "{ before = true, eval = true }" },
    ["fp32, small chunks, clipped, dropout, SGD"] = { 3, "{ chunk_size = 4096, gradient_clipping = 0.5, optimizer = "
      .. "{ type = 'SGD', params = { lr = 0.1, momentum = 0.9, nesterov = true } } }",
      "{ dropout = 0.1, eval = true }" },
    ["bf16, four ranks"] = { 4, "{ " .. BF16 .. "}", "{ before = true }" },
    ["bf16, clipped, on the disk, moving at every pin"] = { 2, "{ " .. BF16 .. "gradient_clipping = 0.5, memory = { "
      .. "host = '3MiB', disk = { path = 'FOLDER', limit = '64MiB' } } }", "{ stress = true }" },
    ["bf16, frozen parameters, recompute, no overlap, SGD without momentum"] = { 2, "{ " .. BF16 .. "recompute = true, "
      .. "overlap_optimizer = false, optimizer = { type = 'SGD', params = { lr = 0.1, weight_decay = 0.1 } } }",
      "{ frozen = true, eval = true }" },
    ["bf16, parameters that stay"] = { 2, "{ " .. BF16 .. "}", "{ reshard = 'never', eval = true }" },
    ["bf16, accumulated, parameters that stay, moving at every pin"] = { 3, "{ " .. BF16 .. "recompute = true, "
      .. "gradient_accumulation_steps = 2 }", "{ reshard = 'never', stress = true }", 1e-5 },
    ["fp16 with overflows"] = { 3, "{ chunk_size = 8192, fp16 = { enabled = true, initial_scale_power = 24 } }" },
    ["bf16 on a device apart"] = { 2, "{ " .. BF16 .. "device = 'sim', memory = { device = '2MiB', host = '64MiB' } "
      .. "}", "{ carrier = 'gloo' }" },
    ["bf16 on a device apart, by way of the host"] = { 2, "{ " .. BF16 .. "device = 'sim', memory = { device = "
      .. "'2MiB', host = '64MiB' } }", "{ backend = 'gloo' }" },
    ["bf16 on emulated GPUs"] = { 2, "{ " .. BF16 .. "device = 'cuda', memory = { device = '2MiB', host = '64MiB' } }",
      "{ carrier = 'nccl' }" },
    ["accumulated"] = { 3, "{ chunk_size = 8192, gradient_accumulation_steps = 3, gradient_clipping = 0.5 }", nil,
      1e-6 },
    ["accumulated on a device apart, by lru"] = { 2, "{ chunk_size = 8192, gradient_accumulation_steps = 2, device = "
      .. "'sim', eviction = 'lru', memory = { device = '2MiB', host = '64MiB' } }", "{ carrier = 'gloo' }", 1e-6 },
  } do
    it("gives stage 0's values: " .. name, function()
      if case[2]:find("'cuda'", 1, true) and lib.no_emulated() then return pending(lib.no_emulated()) end
      compare(unpack(case, 1, 4))
    end)
  end

  -- Runs a script with tests of the fraction of state per rank, of models with unusual parameters, and of budgets.
  local function check(size, script) return lib.check(folder, size, script) end

  it("trains models with tied, unused and frozen parameters, and dense ones of many sizes", function()
    check(3, [[
      local Odd = nn.class("Odd")
      function Odd:init()
        self.table, self.first, self.never = nn.Embedding(50, 24), nn.Linear(24, 100), nn.Linear(64, 64)
        self.second, self.frozen = nn.Linear(100, 24), nn.Linear(24, 24)
        self.frozen.weight:requires_grad(false)
        self.gain = nn.Parameter(ps.ones { 24 })
        self.head = self.table.weight
      end
      function Odd:forward(x, y)
        local h = self.second(ps.F.gelu(self.first(self.table(x))))
        return ps.F.cross_entropy(ps.F.linear(self.frozen(h) * self.gain, self.head), y)
      end
      local seen = {}
      for _, precision in ipairs { "fp32", "bf16" } do
        for stage = 0, 3 do
          local config = { plan_print = false, zero_optimization = { stage = stage }, gradient_clipping = 1 }
          if precision == "bf16" then config.bf16 = { enabled = true } end
          config.chunk_size = 2048
          ps.manual_seed(11)
          local model, optimizer = ps.initialize { config = config, quiet = true, model_func = function()
            return Odd()
          end }
          ps.manual_seed(12 + rank)
          local losses = {}
          for step = 1, 4 do
            local x = ps.randint(0, 50, { 4, 6 }, { dtype = "int32" })
            local loss = model(x, x)
            losses[step] = ("%.17g"):format(loss:item())
            model:backward(loss)
            optimizer:step()
          end
          seen[stage] = table.concat(losses, " ") .. (" %.17g"):format(optimizer.grad_norm)
          assert(seen[stage] == seen[0], precision .. " stage " .. stage .. ": " .. seen[stage] .. ", not " .. seen[0])
          model:close()
        end
      end
    ]])
  end)

  it("keeps a share of the state, and never the whole model during its construction", function()
    check(4, [[
      local function make(stage)
        return ps.initialize { quiet = true, config = { plan_print = false, bf16 = { enabled = true },
          chunk_size = 16384, zero_optimization = { stage = stage } }, model_func = function()
          local list = {}
          for i = 1, 24 do list[i] = nn.Linear(128, 256) end
          return nn.Sequential(unpack(list))
        end }
      end
      ps.reset_peak_memory()
      local model = make(3)
      local tier = ps.ffi.new "ps_tier_info"
      ps.check(ps.C.ps_engine_tier_get(ps.ctx, 0, tier))
      local built = require("ps.nn.handle").of(model).built
      local numel, state, peak = built.numel, built.state_bytes, tonumber(tier.peak)
      assert(state < 0.27 * 14 * numel, ("%d of %d"):format(state, 14 * numel))
      assert(peak < 0.6 * 4 * numel + state, ("a peak of %d, %d parameters"):format(peak, numel))   -- created in fp32
      local own, all = 0, 0
      for _, row in ipairs(built.list) do
        own, all = own + (row.owner == rank and row.numel or 0), all + row.numel
        assert((row.averages ~= nil) == (row.owner == rank))
      end
      assert(own < 0.27 * all)
      model:close()
    ]])
  end)

  it("gives each rank its tensors, from which training continues together, separately, merged, on one rank", function()
    check(3, [[
      local gpt2 = require "models.gpt2"
      local function make()
        return ps.initialize { config = { plan_print = false, bf16 = { enabled = true }, chunk_size = 8192,
          zero_optimization = { stage = 3 } }, quiet = true, model_func = function()
          return gpt2.new("tiny", { dropout = 0 })
        end }
      end
      local function steps(model, optimizer, first, last)
        local value
        for step = first, last do
          ps.manual_seed(100 * step + rank)
          local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
          local loss = model(x, x)
          value = loss:item()
          model:backward(loss)
          optimizer:step()
        end
        return value
      end
      local model, optimizer = make()
      steps(model, optimizer, 1, 2)
      ps.save(model:state_dict(), ("%s/model-%d.pt"):format(folder, rank))
      ps.save(optimizer:state_dict(model), ("%s/optimizer-%d.pt"):format(folder, rank))
      local want = steps(model, optimizer, 3, 4)
      model:close()
      group:barrier()
      local whole = {}
      for r = 0, size - 1 do
        for name, t in pairs(ps.load(("%s/model-%d.pt"):format(folder, r))) do
          assert(whole[name] == nil or name:find "lm_head", name)
          whole[name] = t
        end
      end
      for _, state in ipairs { whole, ps.load(("%s/model-%d.pt"):format(folder, rank)) } do
        model, optimizer = make()
        local told = model:load_state_dict(state, { strict = false })
        assert(#told.unexpected == 0 and (state ~= whole or #told.missing == 0))
        optimizer:load_state_dict(ps.load(("%s/optimizer-%d.pt"):format(folder, rank)))
        local got = steps(model, optimizer, 3, 4)
        assert(got == want, got .. " after loading, not " .. want)
        model:close()
      end
      local one = gpt2.new("tiny", { dropout = 0 })
      assert(#one:load_state_dict(whole).missing == 0)
    ]])
  end)

  it("reads parameters again after an optimizer's or a model's state was loaded", function()
    check(2, [[
      for stage = 0, 3 do
        local model, optimizer = ps.initialize { quiet = true, model_func = function() return nn.Linear(64, 64) end,
          config = { plan_print = false, chunk_size = 2048, bf16 = { enabled = true },
            zero_optimization = { stage = stage } } }
        local weight = model.module.weight
        local function read() return weight:to("fp32"):mean():item() end
        local saved = optimizer:state_dict(model)
        assert(read() ~= 3)                                -- gathered, and open from now on
        if optimizer:slot(1).master ~= nil then
          saved.tensors["weight.master"] = ps.full({ 64, 64 }, 3)
        end
        optimizer:load_state_dict(saved)
        assert(read() == 3, ("stage %d: %g"):format(stage, read()))
        model:load_state_dict({ weight = ps.full({ 64, 64 }, 5) }, { strict = false })
        assert(read() == 5, ("stage %d: %g"):format(stage, read()))
        model:close()
      end
    ]])
  end)

  it("equals stage 0 for models that write their parameters, and for reads between backward and step", function()
    check(2, [[
      local Shrink = nn.class("Shrink")
      function Shrink:init()
        self.list = nn.ModuleList()
        for _ = 1, 6 do self.list:append(nn.Linear(48, 48)) end
      end
      function Shrink:forward(x)
        for _, layer in self.list:each() do
          if self.training and self.shrinks then ps.no_grad(function() layer.weight:mul_(0.9) end) end
          x = ps.F.tanh(layer(x)) + x
        end
        return x:to("fp32"):pow(2):mean()
      end
      for _, shrinks in ipairs { true, false } do
        local want
        for stage = 0, 3 do
          ps.manual_seed(4)
          local config = { plan_print = false, chunk_size = 2048, zero_optimization = { stage = stage } }
          if not shrinks then config.bf16 = { enabled = true } end
          local model, optimizer = ps.initialize { quiet = true, config = config, model_func = function()
            local made = Shrink()
            made.shrinks = shrinks
            return made
          end }
          ps.manual_seed(9 + rank)
          local seen = {}
          for step = 1, 3 do
            local x = ps.randn({ 4, 48 }, { dtype = shrinks and "fp32" or "bf16" })
            local loss = model(x)
            model:backward(loss)
            seen[#seen + 1] = ("%.17g"):format(loss:item())
            if not shrinks then
              model:eval()
              seen[#seen + 1] = ("%.17g"):format(ps.no_grad(function() return model(x):item() end))
              model:train()
            end
            optimizer:step()
          end
          want = want or table.concat(seen, " ")
          assert(table.concat(seen, " ") == want, ("stage %d: %s, not %s"):format(stage, table.concat(seen, " "), want))
          model:close()
        end
      end
    ]])
  end)

  it("refuses, by name, gradients that exist only on ranks that do not own them, also with micro-batches", function()
    check(2, [[
      local Odd = nn.class("Odd")
      function Odd:init()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
      end
      for user = 0, 1 do
        for stage = 0, 3 do
          local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, chunk_size = 1024,
            gradient_accumulation_steps = 2, zero_optimization = { stage = stage } }, model_func = function()
            local made = Odd()
            function made.forward(self, x)
              x = self.a(x)
              return (rank == user and self.b(x) or x):sum()
            end
            return made
          end }
          local ok, why = pcall(function()
            for micro = 1, 2 do
              model:backward(model(ps.ones { 2, 8 }))
              optimizer:step()
            end
          end)
          assert(not ok and tostring(why):find("disagree"), tostring(why))
          if rank ~= user and stage < 3 then assert(tostring(why):find("b.weight", 1, true), tostring(why)) end
          model:close()
          group:close()
          group = ps.init_distributed { quiet = true, rendezvous = ("file://%s/odd%d%d"):format(folder, user, stage) }
        end
      end
    ]])
  end)

  -- One rank runs out of memory at some point in a step. It continues, or both ranks end with an error. Neither
  -- crashes, hangs, or takes part in a different exchange than the other.
  it("survives a failure of memory on one rank anywhere in a step", function()
    local by = os.getenv "PS_FULL" and 3 or 83
    local all = check(2, ([[
      local gpt2 = require "models.gpt2"
      for n = 0, 700, %d do
        if n > 0 then
          local meeting = "file://" .. folder .. "/at" .. n
          group = ps.init_distributed { seed = 3, quiet = true, timeout = 20, rendezvous = meeting }
        end
        local model, optimizer
        local ok, why = pcall(function()
          model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, chunk_size = 8192,
            bf16 = { enabled = true }, zero_optimization = { stage = 3 },
            memory = { host = "1500KiB", disk = { path = folder, limit = "32MiB" } } },
            model_func = function() return gpt2.new("tiny", { dropout = 0 }) end }
          for step = 1, 2 do
            if step == 2 and rank == 1 then ps.C.ps_test_fail_alloc(n, 1) end
            local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
            model:backward(model(x, x))
            optimizer:step()
          end
        end)
        ps.C.ps_test_fail_alloc(-1, 0)
        print("case", n, ok, ok and "" or (tostring(why):gsub("\\n.*", "")))
        if model then model:close() end
        group:close()
        collectgarbage()
        collectgarbage()
      end
    ]]):format(by))
    local failed, went_on = 0, 0
    for rank = 0, 1 do
      assert.falsy(all[rank].text:find("disagree", 1, true), all[rank].text)
      for ok in all[rank].text:gmatch("case\t%d+\t(%a+)") do
        if ok == "true" then went_on = went_on + 1 else failed = failed + 1 end
      end
    end
    assert.truthy(failed > 0 and went_on > 0, failed .. " failed, " .. went_on .. " went on")
  end)

  it("refuses reads on a single rank, and invalid stages", function()
    local all = lib.run(folder, 2, [[
      local ps = require "ps"
      ps.init_distributed { quiet = true, timeout = 2, rendezvous = "file://]] .. folder .. [[/rendezvous" }
      assert(not pcall(ps.initialize, { config = { zero_optimization = { stage = 4 } }, quiet = true,
        model_func = function() return ps.nn.Linear(8, 8) end }))
      local model = ps.initialize { config = { zero_optimization = { stage = 3 } }, quiet = true,
        model_func = function() return ps.nn.Linear(8, 8) end }
      if ps.rank() == 0 then model.module.weight:sum():item() else ps.synchronize() end
    ]])
    assert.equal(1, all[0].code)
    assert.truthy(all[0].text:find("gather of chunks", 1, true), all[0].text)
    assert.truthy(all[1].text:find("barrier", 1, true), all[1].text)
  end)
end)
