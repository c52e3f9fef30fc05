-- SPDX-License-Identifier: BSD-3-Clause
-- Errors for programs: the fields of ps.Error in addition to its text.
local ps = require "ps"
local paths = require "ps.paths"
local ranks_lib = require "spec.ranks_lib"

--- Returns the error of a call that must fail.
local function failure(fn)
  local ok, err = pcall(fn)
  assert(not ok, "no error was raised")
  assert(type(err) == "table" and getmetatable(err) == ps.Error, tostring(err))
  return err
end

describe("an error's fields", function()
  it("are the requested, remaining and missing bytes if memory runs out", function()
    collectgarbage()
    ps.set_memory_limit(ps.memory().used + 2 ^ 20)
    finally(function() ps.set_memory_limit(0) end)
    local err = failure(function() return ps.empty { 2 ^ 20 } end)
    assert.same({ "ENOMEM", 2 ^ 22 }, { err.name, err.wanted })
    assert.truthy(err.left > 0 and err.left <= 2 ^ 20, err.left)
    assert.equal(err.wanted - err.left, err.lacking)
  end)

  it("name the full tier, and the kind of the error", function()
    local model = ps.initialize { quiet = true, config = { plan_print = false, memory = { host = 2 ^ 20 } },
      model_func = function() return ps.nn.Linear(64, 64) end }
    finally(function() model:close() end)
    local err = failure(function() return model(ps.ones { 8192, 64 }):sum() end)
    assert.same({ "ENOMEM", "host" }, { err.name, err.tier })
    assert.truthy(err.lacking > 0 and err.lacking == err.wanted - err.left)
  end)

  it("are absent if they have no meaning, also after an error that had them", function()
    local err = failure(function() return ps.ones { 2 } + ps.ones { 3 } end)
    for _, key in ipairs { "sub", "tier", "wanted", "left", "lacking", "rank", "stripe", "other_rank",
      "other_stripe" } do
      assert.is_nil(err[key], key)
    end
  end)

  it("distinguish a machine without the device from one whose device cannot be used", function()
    local script = os.tmpname()
    local f = assert(io.open(script, "wb"))
    f:write 'local ok, err = pcall(require("ps").device, "cuda") print(ok or err.name, not ok and err.sub)'
    f:close()
    local function says(env)
      local p = assert(io.popen(("env -u PS_CUDA_PLUGIN %s '%s' %s 2>&1"):format(env, paths.exe, script)))
      local text = p:read("*a")
      p:close()
      return text
    end
    local without = says "LD_LIBRARY_PATH= CUDA_VISIBLE_DEVICES="
    local emulated = ranks_lib.emulated()
    local useless = emulated and says("PS_EMULATE_INIT=803 " .. emulated)
    os.remove(script)
    assert.equal("EUNSUP\tNO_DEVICE\n", without)
    if useless then assert.truthy(not useless:find("NO_DEVICE", 1, true), useless) end
  end)

  it("name the rank at fault", function()
    if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
    local folder = ranks_lib.folder()
    local all = ranks_lib.run(folder, 2, ranks_lib.begin(folder) .. [[
      if rank == 1 then                                    -- ends when both have arrived
        group:barrier()
        os.exit(3)
      end
      local ok, err = pcall(function() for _ = 1, 2 do group:barrier() end end)
      print("blamed", not ok and err.rank)
    ]])
    ranks_lib.remove(folder)
    assert.truthy(all[0].text:find("blamed\t1\n", 1, true), all[0].text)
  end)
end)
