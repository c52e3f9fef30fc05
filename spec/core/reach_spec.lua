-- SPDX-License-Identifier: BSD-3-Clause
-- Everything that a script can reach is in docs/api.md and in help: functions of ps and its tables, methods of all
-- objects that these return, and the classes of tables that annotations name.
local ps = require "ps"
local annotations = require "ps.prompt.annotations"
local bert = require "models.bert"
local gpt2 = require "models.gpt2"
local help = require("ps.prompt.help").of(ps)
local llama = require "models.llama"
local paths = require "ps.paths"
local check = require "spec.check_lib"
local ranks_lib = require "spec.ranks_lib"

local text = check.read(paths.root .. "/docs/api.md")

-- Methods that scripts do not call: methods with which a model informs the engine (docs/models.md), and parts of
-- classes.
local OWN = {}
for name in ([[
    model.begin model.extra_repr model.init model.new model.batch_of model.costs model.head_modules model.parts
    model.vocabulary model.count_targets model.head model.new_caches model.next_logits model.positions
    model.step_batch
  ]]):gmatch "%S+" do OWN[name] = true end

-- Returns an object's public functions by name, including those of the classes from which it derives.
local function methods(object)
  local found = {}
  local function take(t)
    for name, value in pairs(t) do
      if type(name) == "string" and type(value) == "function" and not name:find "^_" then found[name] = true end
    end
  end
  local seen, at = {}, getmetatable(object)
  while type(at) == "table" and not seen[at] do
    seen[at] = true
    local names = rawget(at, "__names")
    if names then                                           -- for modules, their class and the classes above it
      local _, class = names(object)
      while class do
        take(class)
        local above = getmetatable(class)
        class = above and rawget(above, "__index")
        -- Module, which names the right call for names of other libraries
        if type(class) == "function" then class = nil end
      end
    end
    local index = rawget(at, "__index")
    if type(index) ~= "table" then break end
    take(index)
    at = getmetatable(index)
  end
  return found
end

local function check_methods(kind, object)
  local lacking = {}
  for name in pairs(methods(object)) do
    local is = text:find(":" .. name .. "(", 1, true)
    if not is and not OWN["model." .. name] then lacking[#lacking + 1] = name end
  end
  table.sort(lacking)
  assert.same({}, lacking, kind .. " has methods that docs/api.md lacks")
end

describe("docs/api.md and help", function()
  local folder
  setup(function() folder = ranks_lib.folder() end)
  teardown(function() ranks_lib.remove(folder) end)

  it("have every method of the objects that scripts get", function()
    ps.data.write_tokens(folder .. "/t.bin", { 1, 2, 3, 4, 5 })
    ps.safetensors.save(folder .. "/a.safetensors", { a = ps.ones { 2 } })
    local p = ps.nn.Parameter(ps.zeros { 1 })
    local optimizer = ps.optim.SGD({ p }, { lr = 1 })
    local objects = { tensor = ps.zeros { 1 }, module = ps.nn.Linear(1, 1), list = ps.nn.ModuleList {},
      gpt2 = gpt2.new "tiny", bert = bert.new("tiny", { task = "masked_lm" }), llama = llama.new "tiny",
      optimizer = optimizer,
      schedule = ps.sched.constant { optimizer = optimizer, max_lr = 1 }, scaler = ps.optim.GradScaler(),
      tokens = ps.data.tokens(folder .. "/t.bin"), tokenizer = ps.tokenizer.bytes(), group = ps.dist.self(),
      loader = ps.data.loader { shards = folder .. "/t.bin", batch = 1, seq = 2 },
      file = ps.safetensors.open(folder .. "/a.safetensors"),
      display = ps.progress.new { total = 1, quiet = true } }
    for kind, object in pairs(objects) do check_methods(kind, object) end
  end)

  it("have every option and field of the classes that annotations of public functions name", function()
    local undescribed = {}
    for name in text:gmatch "ps%.[%w_.]*%u[%w_.]*%f[^%w_.]" do
      name = name:gsub("%.$", "")
      local class = annotations.class(name)
      if class and class.fields[1] and not text:find("\n### `" .. name .. "`\n", 1, true) then
        undescribed[name] = true
      end
    end
    for _, name in ipairs { "ps.Engine", "ps.Config", "ps.nn.Region", "ps.Rates", "ps.Tensor" } do
      undescribed[name] = nil                               -- objects of which scripts only use methods
    end
    assert.same({}, undescribed)
    for _, name in ipairs { "ps.TrainOptions", "ps.CheckpointParts", "TrainOptions" } do
      local said = help.text(name)
      assert.truthy(said:find("\n    model: ps.nn.Module|ps.Engine", 1, true), said)
    end
  end)

  it("explain methods of models, by the model, its name and an engine", function()
    local model = gpt2.new "tiny"
    for _, name in ipairs { "generate", "save_pretrained", "save_parallelized", "from_parallelized", "load_weights" } do
      assert.truthy(text:find("**`model:" .. name .. "(", 1, true), name)
      local said = help.text(name)
      assert.truthy(said:find("model:" .. name .. "(", 1, true), said)
      assert.is_nil(said:find("It has no description", 1, true), said)
      assert.is_nil(help.text(model[name]):find("It has no description", 1, true), name)
    end
    local engine = ps.initialize { quiet = true, model_func = function() return gpt2.new "tiny" end,
      config = { plan_print = false } }
    for _, name in ipairs { "generate", "save_pretrained", "load_weights", "resize_token_embeddings" } do
      assert.is_nil(help.text(engine[name]):find("It has no description", 1, true), name)
    end
    engine:close()
  end)

  it("print a text once for a function with several names", function()
    local said = help.text(ps.initialize)
    assert.equal(1, select(2, said:gsub("Creates an engine", "")))
    assert.truthy(said:find("ps.initialize_engine is the same as ps.initialize", 1, true), said)
  end)

  it("show calls in valid Lua", function()
    assert.truthy(text:find('**`profiler["end"]()`**', 1, true))
    assert.is_nil(text:find("profiler.end(", 1, true))
    for call in text:gmatch "%*%*`([%w_.:]+)%(" do
      assert.truthy(loadstring("return function(" .. call:match "^[%w_]+" .. ") " .. call .. "() end"), call)
    end
  end)
end)
