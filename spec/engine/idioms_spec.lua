-- SPDX-License-Identifier: BSD-3-Clause
-- Idioms of training loops (idioms_lib.lua) on five layouts: in one process without and with chunks, and on two ranks
-- with ZeRO 3, a pipeline and tensor parallelism. Each does what its guide says, or is an error that names the right
-- call. Each idiom is short, so on two ranks Lua is interpreted: compiling it would take longer than running it.
local lib = require "spec.ranks_lib"
local idioms = require "spec.idioms_lib"
local foreign = require "ps.core.foreign"

-- Checks lines "layout | guide: name | what is wrong". All names must be present, and no fault can be listed.
local function check(layout, text)
  local n = 0
  for name, wrong in text:gmatch("\n?" .. layout .. " | ([^\n]-) | ([^\n]*)") do
    n = n + 1
    assert(wrong == "", ("%s: %s: %s"):format(layout, name, wrong))
  end
  assert(n == #idioms.IDIOMS, ("%s: %d of %d idioms ran: %s"):format(layout, n, #idioms.IDIOMS, text))
end

describe("idioms of training loops", function()
  local folder
  setup(function() folder = lib.folder() end)
  teardown(function() lib.remove(folder) end)

  for _, layout in ipairs { "plain", "chunks" } do
    it("in one process: " .. layout, function()
      local f = assert(io.popen(("'%s' -e 'require(\"spec.idioms_lib\").run(\"%s\", \"%s\")' 2>&1"):format(
        require("ps.paths").exe, layout, folder)))
      local text = f:read "*a"
      f:close()
      check(layout, text)
    end)
  end
  for _, layout in ipairs { "zero3", "pipeline", "tensor" } do
    it("on two ranks: " .. layout, function()
      if lib.no_gloo() then return pending(lib.no_gloo()) end
      local out = lib.run(folder, 2, lib.begin(folder)
        .. ("jit.off() require('spec.idioms_lib').run('%s', folder)"):format(layout))
      check(layout, out[0].text)
      assert(out[1].code == 0 and not out[1].text:find " | ", out[1].text)
    end)
  end

  it("have unique names", function()
    local seen = {}
    for _, idiom in ipairs(idioms.IDIOMS) do
      local whole = idiom.guide .. ": " .. idiom.name
      assert(not seen[whole] and not idiom.name:find "|", whole)
      seen[whole] = true
    end
  end)
end)

describe("names that psluajit does not have", function()
  local ps = require "ps"

  -- Returns the names that the library has at a place.
  local function owner(place)
    if place == "ps" then return ps end
    if place == "nn" or place == "optim" or place == "sched" then return ps[place] end
    if place == "module" then return ps.nn.Linear(2, 2) end
    if place == "optimizer" then return ps.optim.SGD(ps.nn.Linear(2, 2), { lr = 1 }) end
    if place == "scaler" then return ps.optim.GradScaler() end
    if place == "loader" then
      return ps.data.loader { texts = { "a", "b" }, tokenizer = ps.tokenizer.bytes(), batch = 1, seq = 4 }
    end
    return ps.initialize { quiet = true, model_func = function() return ps.nn.Linear(2, 2) end,
      config = { plan_print = false } }
  end

  for _, place in ipairs { "ps", "nn", "optim", "sched", "module", "optimizer", "scaler", "loader", "model" } do
    it("name the right call: " .. place, function()
      local thing = owner(place)
      for name, text in pairs(foreign.names(place)) do
        assert(type(thing[name]) == "table", name .. " is there: " .. tostring(thing[name]))
        for _, use in ipairs { function() thing[name](thing) end, function() return thing[name].other end } do
          local ok, problem = pcall(use)
          assert(not ok and tostring(problem):find(text, 1, true), problem)
          assert(tostring(problem):find("idioms_spec.lua", 1, true), problem)
        end
        assert(tostring(thing[name]):find("does not exist here", 1, true))
      end
      if place == "ps" or place == "nn" or place == "optim" or place == "sched" then
        local ok, problem = pcall(function() return thing.no_such_name end)
        assert(not ok and tostring(problem):find(place .. ".no_such_name does not exist", 1, true), problem)
      else
        assert(thing.no_such_name == nil)
      end
      if place == "model" then thing:close() end
    end)
  end

  it("belong to a module that has them", function()
    local net = ps.nn.Linear(2, 2)
    net.step = 3
    local model = ps.initialize { quiet = true, model_func = function() return net end,
      config = { plan_print = false, memory = "plain" } }
    assert(model.step == 3)
    model:close()
  end)
end)
