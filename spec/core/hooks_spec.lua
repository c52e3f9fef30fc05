-- SPDX-License-Identifier: BSD-3-Clause
-- ps.hooks: which listeners get which events, until when, and that removed listeners get none.
local ps = require "ps"
local hooks = require "ps.core.hooks"
local fails = require("spec.check_lib").fails

describe("a hook", function()
  it("calls its listeners in the order of registration, or until one answers", function()
    local heard = {}
    local function listener(name, answer)
      return hooks.on("step", function(x)
        heard[#heard + 1] = name .. tostring(x)
        return answer
      end)
    end
    local offs = { listener("a", false), listener("b", "yes"), listener("c", "no") }
    hooks.tell("step", 1)
    assert.equal("yes", hooks.ask("step", 2))
    assert.same({ "a1", "b1", "c1", "a2", "b2" }, heard)
    for _, off in ipairs(offs) do off() end
    hooks.tell("step", 3)
    assert.is_nil(hooks.ask("step", 3))
    assert.equal(5, #heard)
  end)

  it("may lose a listener during a call, and the others are still called", function()
    local heard, off = {}, nil
    off = hooks.on("step", function()
      heard[#heard + 1] = "first"
      off()
    end)
    local other = hooks.on("step", function() heard[#heard + 1] = "second" end)
    hooks.tell "step"
    hooks.tell "step"
    other()
    assert.same({ "first", "second", "second" }, heard)
  end)

  it("must have a known name", function()
    assert.is_false(pcall(hooks.on, "stepp", print))
  end)
end)

describe("an engine", function()
  local config = { plan_print = false, bf16 = { enabled = true }, memory = { host = 2 ^ 22 } }

  it("that cannot be made gets no events of later parameters", function()
    fails(function()
      ps.initialize { quiet = true, config = config, model_func = function() error("no model", 0) end }
    end, "no model")
    local p = ps.nn.Parameter(ps.ones { 4 })
    assert.equal(-1, ps.C.ps_engine_tensor_chunk(ps.ctx, p))
  end)

  it("that is closed gets no loaded values", function()
    local model = ps.initialize { quiet = true, config = config, model_func = function() return ps.nn.Linear(4, 4) end }
    local module = model.module
    assert.truthy(hooks.ask("load", module.weight))
    model:close()
    assert.is_nil(hooks.ask("load", module.weight))
  end)
end)
