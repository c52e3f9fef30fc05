-- SPDX-License-Identifier: BSD-3-Clause
-- Between backward and step, where gradients lie in the places of parameters: parameters without a gradient can be
-- read, on all ranks at once and at every stage, and a failing step leaves every parameter unchanged. Also passes that
-- never end, with exchanges under way.
local lib = require "spec.ranks_lib"

local folder

setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

-- A model in which some parameters, in several chunks, get no gradient.
local PARTLY = [[
  local Partly = nn.class("Partly")
  function Partly:init()
    self.list = nn.ModuleList()
    for _ = 1, 6 do self.list:append(nn.Linear(40, 40)) end
  end
  function Partly:forward(x)
    for i, layer in self.list:each() do if i % 2 == 0 then x = ps.F.tanh(layer(x)) + x end end
    return x:to("fp32"):pow(2):mean()
  end
]]

describe("between backward and step", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  it("parameters without a gradient can be read at every stage, those with one cannot", function()
    lib.check(folder, 2, PARTLY .. [[
      for _, device in ipairs { "cpu", "sim" } do
        for _, clipping in ipairs { 0, 0.5 } do
          local want
          for stage = 0, 3 do
            ps.manual_seed(4)
            local model, optimizer = ps.initialize { quiet = true, model_func = function() return Partly() end,
              config = { plan_print = false, chunk_size = 2048, bf16 = { enabled = true }, overlap_optimizer = false,
                device = device, gradient_clipping = clipping, zero_optimization = { stage = stage },
                memory = device == "sim" and { device = "1MiB", host = "8MiB" } or nil } }
            ps.manual_seed(9 + rank)
            local seen = {}
            local function see(t) seen[#seen + 1] = ("%.17g"):format(t:to("fp32"):pow(2):sum():item()) end
            for step = 1, 4 do
              local x = ps.randn({ 4, 40 }, { dtype = "bf16" }):to(device)
              local loss = model(x)
              model:backward(loss)
              see(loss)
              if step > 1 then                             -- the others expect the results of the first step
                see(model.module.list[1].weight)
                see(model.module.list[5].bias)
                local ok, why = pcall(see, model.module.list[2].weight)
                assert(not ok and tostring(why):find("between backward and optimizer:step", 1, true), tostring(why))
                if step == 3 then see(model.module.list[3].weight) end
              end
              optimizer:step()
              see(model.module.list[2].weight)
            end
            seen = table.concat(seen, " ")
            want = want or seen
            assert(seen == want, ("%s, stage %d:\n%s, not\n%s"):format(device, stage, seen, want))
            model:close()
          end
        end
      end
    ]])
  end)

  -- A reduction that fails leaves sums, or parts of them, in the memory of the values. So do later reductions that were
  -- in progress.
  it("a reduction that fails leaves every parameter equal to its master", function()
    local all = lib.check(folder, 2, PARTLY .. ([[
      local function mismatch(model)
        for _, row in ipairs(require("ps.nn.handle").of(model).built.list) do
          if row.master ~= nil then
            local here = row.place ~= nil and row.place or row.param
            local gap = (here:to("fp32") - row.master:to("bf16"):to("fp32")):abs():max():item()
            if gap ~= 0 then return ("%%s is off by %%g"):format(row.name, gap) end
          end
        end
      end
      local full = %s
      local meetings = 0
      local function try(stage, n)
        group:close()
        meetings = meetings + 1
        group = ps.init_distributed { seed = 3, quiet = true, timeout = 20,
          rendezvous = ("file://%%s/meeting%%d"):format(folder, meetings) }
        local model = ps.initialize { quiet = true, model_func = function() return Partly() end,
          config = { plan_print = false, chunk_size = 2048, bf16 = { enabled = true }, overlap_optimizer = false,
            zero_optimization = { stage = stage } } }
        local loss = model(ps.ones({ 4, 40 }, { dtype = "bf16" }))
        ps.C.ps_test_fail_alloc(rank == 1 and n or 1e6, 1)
        local ok = pcall(model.backward, model, loss)
        local requests = 1e6 - tonumber(ps.C.ps_test_fail_alloc_left())
        ps.C.ps_test_fail_alloc(-1, 0)
        if ok then require("ps.nn.handle").of(model):abandon() else print("failed", stage, n) end
        local why = mismatch(model)
        assert(not why, ("stage %%d, request %%d: %%s"):format(stage, n, tostring(why)))
        model:close()
        collectgarbage()
        return requests
      end
      for stage = 0, 3, full and 1 or 3 do
        local requests = ps.tensor({ try(stage, 1e6) }, { dtype = "int32" })   -- the last requests belong to reductions
        requests = group:broadcast(requests, 1):item()
        for n = full and 0 or requests - 24, requests, full and 1 or 3 do try(stage, n) end
      end
    ]]):format(os.getenv "PS_FULL" and "true" or "false"))
    for rank = 0, 1 do assert.truthy(all[rank].text:find("failed", 1, true), all[rank].text) end
  end)
end)

describe("a model that fails in the middle of a pass", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  -- At this point, stripes for the next layer are being gathered.
  local FAILS = PARTLY .. [[
    local WHERE, WHO = AT, "WHOSE"
    local model, optimizer = ps.initialize { quiet = true, model_func = function() return Partly() end,
      config = { plan_print = false, chunk_size = 2048, bf16 = { enabled = true },
        zero_optimization = { stage = 3 } } }
    local calls, fail_at = 0, nil
    local tanh = ps.F.tanh
    ps.F.tanh = function(x)
      calls = calls + 1
      if calls == fail_at and (WHO == "all" or rank == 1) then error("the model failed") end
      return tanh(x)
    end
    local function step()
      model:backward(model(ps.randn({ 4, 40 }, { dtype = "bf16" })))
      optimizer:step()
    end
    for _ = 1, 2 do step() end
    calls, fail_at = 0, WHERE
    local ok, why = pcall(step)
    why = tostring(why)
    local other = WHO == "one" and rank == 0 and why:find("rank 1 %(%S+%) ")
    assert(not ok and (why:find("the model failed") or other), why)
  ]]
  local function failing(at, whose) return (FAILS:gsub("AT", at):gsub("WHOSE", whose)) end

  it("can be repeated, closed, or left at the script's end", function()
    for where = 1, 3 do
      lib.check(folder, 2, failing(where, "all") .. "fail_at = nil; step(); model:close()")
      lib.check(folder, 2, failing(where, "all") .. "model:close()")
      lib.check(folder, 2, failing(where, "all"))
    end
  end)
  it("on one rank is an error on the others, which end normally", function()
    lib.check(folder, 2, failing(2, "one"))
    lib.check(folder, 2, failing(2, "one") .. "model:close()")
  end)

  -- Finalizers run in any order at a script's end. In this test the step's finalizer is the first, and the engine still
  -- reads the step while it waits for the exchange that rank 0 reaches late. The C library overwrites freed memory.
  it("waits for exchanges under way before memory is freed, in any order of finalizers", function()
    local late, n = failing(2, "one"):gsub("return tanh%(x%)",
      [[if calls + 1 == fail_at and rank == 0 then os.execute("sleep 0.3") end %0]])
    assert.equal(1, n)
    lib.check(folder, 2, late .. [[
      if rank == 1 then
        local ffi = require "ffi"
        local function free(name, object) ps.C[name](ffi.gc(object, nil)) end
        local state = require "ps.engine.step.state"
        free("ps_step_free", state.of(require("ps.nn.handle").of(model)).c)
        free("ps_ctx_free", ps.ctx)
      end
    ]], "GLIBC_TUNABLES=glibc.malloc.perturb=165:glibc.malloc.tcache_count=0")
  end)
end)
