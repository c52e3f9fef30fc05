-- SPDX-License-Identifier: BSD-3-Clause
-- Every optimizer has the same bits under ZeRO 1 to 3 on the same number of ranks (2 and 3), also with remainders; and
-- optimizers that need a whole parameter refuse one that is cut among tensor-parallel ranks.
local lib = require "spec.ranks_lib"
local optimizers = require "ps.optimizers"

local SCRIPT = [[
local ps = require "ps"
local ffi = require "ffi"
local nn = ps.nn
local group = ps.init_distributed { rendezvous = "file://FOLDER/rendezvous", quiet = true }
local function hash(t)
  local out = ffi.new("uint64_t[2]")
  ps.check(ps.C.ps_tensor_hash(t, out))
  return tostring(out[0]) .. tostring(out[1])
end
for _, kind in ipairs { KINDS } do
  for _, case in ipairs { { "fp32" }, { "bf16" }, { "bf16", "remainder" } } do
    for stage = 1, 3 do
      ps.manual_seed(5)
      local half = case[1] == "bf16"
      local model, opt = ps.initialize { quiet = true, config = { plan_print = false, chunk_size = 2048,
        optimizer = { type = kind, params = { lr = 1e-2, weight_decay = 0.1 } },
        bf16 = half and { enabled = true } or nil, zero_optimization = { stage = stage },
        memory = { master = case[2] } }, model_func = function()
          return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 70), nn.GELU(), nn.Linear(70, 33))
        end }
      ps.manual_seed(9 + group:rank())
      for _ = 1, 3 do
        local x = ps.randn { 6, 48 }
        model:backward((model(half and x:to "bf16" or x):to "fp32"):pow(2):mean())
        opt:step()
      end
      opt:eval()
      local x = ps.ones { 1, 48 }
      local out = ps.no_grad(function() return model(half and x:to "bf16" or x) end)
      print(("%s %s%s output|0.weight|%d|%s"):format(kind, case[1], case[2] or "", stage, hash(out)))
      opt:train()
      if opt.groups[1].train_mode then opt:eval() end
      for name, t in pairs(model:state_dict()) do
        print(("%s %s%s|%s|%d|%s"):format(kind, case[1], case[2] or "", name, stage, hash(t)))
      end
      model:close()
    end
  end
end
]]

describe("ZeRO 1 to 3 have the same bits with every optimizer", function()
  for _, size in ipairs { 2, 3 } do
    it(("on %d ranks"):format(size), function()
      if lib.no_gloo() then return pending(lib.no_gloo()) end
      local folder = lib.folder()
      local kinds = {}
      for i, name in ipairs(optimizers.names) do kinds[i] = ("%q"):format(name) end
      local said = lib.run(folder, size, (SCRIPT:gsub("KINDS", table.concat(kinds, ", ")):gsub("FOLDER", folder)))
      local seen, count = {}, 0
      for rank = 0, size - 1 do
        assert.equal(0, said[rank].code, said[rank].text)
        for case, name, stage, hash in said[rank].text:gmatch "([^|\n]+)|([^|\n]+)|(%d)|(%d[^\n]*)" do
          local key = case .. name
          seen[key] = seen[key] or { hash = hash, stages = {} }
          assert.equal(seen[key].hash, hash, ("%s, %s, stage %s"):format(case, name, stage))
          seen[key].stages[tonumber(stage)] = true
          count = count + 1
        end
      end
      for key, row in pairs(seen) do assert.same({ true, true, true }, row.stages, key) end
      assert.equal(#optimizers.names * 3 * 3 * (6 + size), count)
      lib.remove(folder)
    end)
  end
end)

local PARTS = [[
local ps = require "ps"
local gpt2 = require "models.gpt2"
local optimizers = require "ps.optimizers"
ps.init_distributed { rendezvous = "file://FOLDER/rendezvous", quiet = true }
for _, kind in ipairs(optimizers.names) do
  local ok, why = pcall(ps.initialize, { quiet = true, model_func = function() return gpt2.new "tiny" end,
    config = { plan_print = false, optimizer = { type = kind }, tensor_parallel = { size = 2 } } })
  print(("%s|%s|%s"):format(kind, tostring(ok), ok and "" or (tostring(type(why) == "table" and why.msg or why)
    :gsub("\n", " "))))
  if ok then why:close() end
end
]]

describe("tensor parallelism", function()
  it("refuses optimizers that need a whole parameter, with the parameter's name, and trains with the others", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    local folder = lib.folder()
    local said = lib.run(folder, 2, (PARTS:gsub("FOLDER", folder)))
    for rank = 0, 1 do
      assert.equal(0, said[rank].code, said[rank].text)
      local seen = 0
      for kind, ok, why in said[rank].text:gmatch "(%w+)|(%a+)|([^\n]*)" do
        local made = optimizers.of(kind)
        seen = seen + 1
        assert.equal(tostring(not (made.whole or made.blocks)), ok, kind .. ": " .. why)
        if ok == "false" then
          assert.matches(kind .. " needs the whole of %S+, but each tensor%-parallel rank has only a part", why)
        end
      end
      assert.equal(#optimizers.names, seen)
    end
    lib.remove(folder)
  end)
end)

local SAVES = [[
local ps = require "ps"
local gpt2 = require "models.gpt2"
local group = ps.init_distributed { rendezvous = "file://FOLDER/rendezvous", quiet = true }
for _, host in ipairs { "HOST", "80MiB" } do
  ps.manual_seed(4)
  local model, opt = ps.initialize { quiet = true, config = { plan_print = false, bf16 = { enabled = true },
      optimizer = { type = "AdamW" }, SHARES, memory = { host = host, master = "remainder",
        disk = { path = "FOLDER/" .. group:rank(), limit = "128MiB" } } },
    model_func = function()
      return gpt2.new { n_layer = 12, n_embd = 256, n_head = 4, n_positions = 16, vocab_size = 512 }
    end }
  local x = ps.zeros({ 1, 8 }, { dtype = "int32" })
  model:backward(model(x, x))
  opt:step()
  model:save_pretrained("FOLDER/saved-" .. host)
  if host == "HOST" then
    ps.checkpoints.save("FOLDER/checkpoints", { model = model, optimizer = opt })
  else
    ps.no_grad(function() for _, p in model:named_parameters() do p:zero_() end end)
    ps.checkpoints.load("FOLDER/checkpoints", { model = model, optimizer = opt })
    model:save_pretrained "FOLDER/loaded"
  end
  model:close()
end
]]

-- The masters of all parameters of a rank together do not fit into the smaller budget.
describe("ranks with remainders save under a budget that holds one parameter's master at a time", function()
  for name, case in pairs { ZeRO = { "zero_optimization = { stage = 3 }", "18MiB" },
    ["tensor parallelism"] = { "tensor_parallel = { size = 2 }", "18MiB" } } do
    it("with " .. name, function()
      if lib.no_gloo() then return pending(lib.no_gloo()) end
      local folder = lib.folder()
      os.execute(("mkdir '%s/0' '%s/1'"):format(folder, folder))
      local said = lib.run(folder, 2, (SAVES:gsub("FOLDER", folder):gsub("SHARES", case[1]):gsub("HOST", case[2])))
      for rank = 0, 1 do assert.equal(0, said[rank].code, said[rank].text) end
      for _, other in ipairs { "saved-" .. case[2], "loaded" } do
        assert.equal(0, os.execute(("diff -r '%s/saved-80MiB' '%s/%s'"):format(folder, folder, other)))
      end
      lib.remove(folder)
    end)
  end
end)
