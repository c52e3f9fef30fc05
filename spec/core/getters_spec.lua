-- SPDX-License-Identifier: BSD-3-Clause
-- A function that can be called without arguments is a getter, or its name is a verb or ends in "_", as those of
-- methods that write in place. Getters change nothing.
local ps = require "ps"
local annotations = require "ps.prompt.annotations"
local fails = require("spec.check_lib").fails
local nn = ps.nn

-- Functions without a required argument whose names are verbs.
local VERBS = {}
for name in ([[ backward release keep train eval zero_grad recompute_blocks step skip close micro_batches generate to
  load_weights barrier forward save_pretrained save_parallelized apply
]]):gmatch "%S+" do VERBS[name] = true end

-- Returns the names of functions that are meant to be called without arguments.
local function answering(functions)
  local names = {}
  for name, fn in pairs(functions) do
    if type(name) == "string" and type(fn) == "function" and not VERBS[name] and not name:find "^_"
      and not name:find "_$" then
      local needed = 0
      for i, param in ipairs(annotations.described(fn).params) do
        if i > (annotations.parameter_names(fn)[1] == "self" and 0 or 1) and not param.name:find "%?$"
          and param.name ~= "self" and param.name ~= "..." then needed = needed + 1 end
      end
      if needed == 0 then names[#names + 1] = name end
    end
  end
  table.sort(names)
  return names
end

local function facts_of_tensor(t)
  return { t.flags, t:needs_grad(), t:tolist(), t:grad() ~= nil and t:grad():tolist() or false }
end

describe("without an argument", function()
  it("no method of a tensor sets anything", function()
    local walked = 0
    for _, flags in ipairs { { false, false }, { true, false }, { false, true }, { true, true } } do
      local function make()
        local t = nn.Parameter(ps.tensor { { 1, 2 }, { 3, 4 } })
        return t:set_grad(ps.ones { 2, 2 }):requires_grad(flags[1]):grad_in_fp32(flags[2])
      end
      for _, name in ipairs(answering(require("ps.tensor").methods())) do
        local t = make()
        local before = facts_of_tensor(t)
        pcall(t[name], t)
        assert.same(before, facts_of_tensor(t), name)
        walked = walked + 1
      end
      assert.same(flags, { make():requires_grad(), make():grad_in_fp32() })
    end
    assert.truthy(walked > 4 * 60)
  end)

  it("no method of a module, a model, its optimizer or a schedule sets anything", function()
    local frozen = { ["0.weight"] = true }
    local model, optimizer = ps.initialize { quiet = true, model_func = function()
      local made = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
      made[0].weight:requires_grad(false)
      return made
    end, config = { plan_print = false, scheduler = { type = "WarmupLR", params = { warmup_num_steps = 5 } } } }
    local schedule = require("ps.nn.handle").of(model).scheduler
    local function facts()
      local list = { optimizer.groups[1].lr, optimizer.steps, schedule:state_dict().count, ps.engine().steps }
      for _, module in model:named_modules() do list[#list + 1] = { module.training, module.recomputes or false } end
      for name, p in model:named_parameters() do list[#list + 1] = { name, p:needs_grad() } end
      for name, value in pairs(model:state_dict()) do list[name] = value:tolist() end
      return list
    end
    -- PyTorch's names for module:to(...). They convert a module in place, but return another tensor for a tensor.
    local converts = { half = true, bfloat16 = true, float = true, double = true, cpu = true, cuda = true }
    local before, walked = facts(), 0
    for _, of in ipairs { { model, require("ps.engine").Engine.methods }, { model.module, nn.Module },
      { optimizer, require("ps.engine.state.optimizer").methods }, { schedule, getmetatable(schedule).__index } } do
      for _, name in ipairs(answering(of[2])) do
        if not converts[name] then
          pcall(of[1][name], of[1])
          assert.same(before, facts(), name)
          walked = walked + 1
        end
      end
    end
    assert.truthy(walked > 12)
    for name, p in model:named_parameters() do assert.equal(not frozen[name], p:requires_grad()) end
    model:close()
  end)
end)

describe("requires_grad", function()
  it("returns the value of PyTorch's attribute, for leaves and for computed tensors", function()
    local w = nn.Parameter(ps.ones { 2 })
    assert.is_true(w:requires_grad())
    assert.is_false(ps.ones({ 2 }):requires_grad())
    assert.is_true((w * 2):requires_grad())
    assert.is_false(w:detach():requires_grad())
    assert.is_false(w:requires_grad(false):requires_grad())
    assert.is_true(w:requires_grad_():requires_grad())
    assert.is_false(w:requires_grad_(false):requires_grad())
  end)

  it("leaves frozen parameters frozen if a script reads it", function()
    local model = nn.Linear(4, 4)
    for _, p in ipairs(model:parameters()) do p:requires_grad(false) end
    for _, p in ipairs(model:parameters()) do assert.is_false(p:requires_grad()) end
    fails(function() model(ps.ones { 2, 4 }):mean():backward() end, "requires a gradient")
  end)

  it("takes booleans alone", function()
    local w = nn.Parameter(ps.ones { 2 })
    for _, name in ipairs { "requires_grad", "requires_grad_", "grad_in_fp32" } do
      fails(function() w[name](w, 0) end, name .. " takes true or false, not a number")
    end
    assert.is_true(w:requires_grad())
  end)
end)
