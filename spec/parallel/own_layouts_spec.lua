-- SPDX-License-Identifier: BSD-3-Clause
-- A user's own models in every layout: the Llama of docs/models.md, whose listings are read from the page, and small
-- models with their own parameters, batches by names, tied tables and dropout. Errors name the wrong parts.
local paths = require "ps.paths"
local ps = require "ps"
local check = require "spec.check_lib"
local lib = require "spec.ranks_lib"
local stages_lib = require "spec.stages_lib"
local stages = require "ps.engine.pipeline.stages"
local nn, fails = ps.nn, check.fails_saying

local folder
setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

-- Returns the Lua listings in a section of a page.
local function section(page, name)
  local text = page:match("\n## " .. name .. "\n(.-)\n## ") or page:match("\n## " .. name .. "\n(.*)$")
  local list = {}
  for listing in assert(text, name):gmatch "```lua\n(.-)```" do list[#list + 1] = listing end
  assert(#list > 0, name)
  return table.concat(list)
end

-- Prints the losses of three steps of two micro-batches. Data-parallel ranks share each batch.
local TRAIN = [[
  local function train(model_func, batch, how, example)
    ps.manual_seed(1)
    local config = { optimizer = { type = "AdamW", params = { lr = 1e-2 } }, plan_print = false,
      gradient_accumulation_steps = 2 }
    for key, value in pairs(how) do config[key] = value end
    local model, optimizer = ps.initialize { quiet = true, model_func = model_func, config = config, example = example }
    local ranks, rank, seen = ps.mesh.size "dp", ps.mesh.rank "dp", {}
    local function own(t) return t:narrow(0, rank * t:size(0) / ranks, t:size(0) / ranks) end
    ps.manual_seed(2)
    for step = 1, 3 do
      local given, sum = batch(), 0
      for name, t in pairs(given) do given[name] = own(t) end
      local loop = given.x ~= nil and model:micro_batches(given.x, given.y) or model:micro_batches(given)
      for out in loop do
        model:backward(out.loss)
        sum = sum + out.loss:item() / 2
      end
      optimizer:step()
      seen[step] = ranks > 1 and ps.mesh.group("dp"):sum(ps.tensor { sum }):item() / ranks or sum
    end
    model:close()
    return seen
  end
  local function same(want, got)
    for i, loss in ipairs(want) do
      assert(math.abs(loss - got[i]) <= 2e-6 * loss, ("step %d: %.9g, want %.9g"):format(i, got[i], loss))
    end
  end
  local LAYOUTS = { zero = { zero_optimization = { stage = 3 } }, pipeline = { pipeline = { stages = 2 } },
    tensor = { tensor_parallel = { size = 2 } },
    ["tensor, rows not shared"] = { tensor_parallel = { size = 2, sequence_parallel = false } } }
]]

-- Trains a model in one process, in chunks and in plain memory, and on two ranks in each layout.
local function in_every_layout(model, names)
  local begin = 'local ps = require "ps"\nlocal nn, F = ps.nn, ps.F\n'
  local one = assert(loadstring(begin .. TRAIN .. model
    .. 'local want = train(make, batch, { memory = "plain" }, example)\n'
    .. 'same(want, train(make, batch, { memory = { host = "16MiB" } }, example))\nreturn want'))()
  for _, name in ipairs(names) do
    lib.check(folder, 2, "local F = ps.F\n" .. TRAIN .. model
      .. ("same({ %.9g, %.9g, %.9g }, train(make, batch, LAYOUTS[%q], example))"):format(one[1], one[2], one[3], name))
  end
end

local ALL = { "zero", "pipeline", "tensor", "tensor, rows not shared" }

describe("a user's own model has one process's losses in every layout:", function()
  it("the Llama of docs/models.md", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    local page = check.read(paths.root .. "/docs/models.md")
    local parts = section(page, "In parts"):gsub("ps%.manual_seed%(1%)\nlocal parted.*$", "")
    in_every_layout(section(page, "A Llama") .. parts .. section(page, "On several ranks") .. [[
      local config = { vocab = 63, width = 32, heads = 4, kv_heads = 2, hidden = 96, layers = 2, positions = 64 }
      local function make() return Parted(config) end
      local function batch()
        local ids = ps.randint(0, 63, { 4, 17 }, { dtype = "int32" })
        return { x = ids:narrow(1, 0, 16):contiguous(), y = ids:narrow(1, 1, 16):contiguous() }
      end
      local of = batch()
      local example = { of.x, of.y }
    ]], ALL)
  end)

  it("own parameters, any names, dropout, attention without its first head", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    in_every_layout([[
      local Block = nn.class "Block"
      function Block:init(C)
        self.qkv, self.o, self.drop = nn.Linear(C, 3 * C), nn.Linear(C, C), nn.Dropout(0.2)
      end
      function Block:forward(x)
        local y = self.qkv(x)
        local D = 8
        y = y:reshape(y:size(0), y:size(1), 3, -1, D):permute(2, 0, 3, 1, 4)
        y = F.attention(y[0], y[1], y[2], { dropout = 0.3 }):transpose(1, 2):flatten(2)
        return x + self.drop(self.o(y))
      end
      local Net = nn.class "Net"
      Net.tensor_parallel = { ["blocks.0"] = "enter", blocks = "inside", ["blocks.*.qkv"] = { "column", blocks = 3 },
        ["blocks.*.o"] = "row", norm = "leave" }
      function Net:init()
        self:param("first", ps.randn { 3, 32 })
        self:param("shift", ps.zeros { 32 })
        self.blocks, self.norm = nn.ModuleList { Block(32), Block(32) }, nn.LayerNorm(32)
      end
      function Net:parts()
        local list = { { name = "in", parameters = { "first", "shift" }, forward = function(_, given)
          return { x = given.points:matmul(self.first) + self.shift }
        end } }
        for i, block in self.blocks:each() do
          list[#list + 1] = { name = "blocks." .. i, modules = { block }, forward = function(carry)
            return { x = block(carry.x):transpose(0, 1):transpose(0, 1) }
          end }
        end
        list[#list + 1] = { name = "out", modules = { self.norm }, forward = function(carry, given)
          local y = self.norm(carry.x):matmul(self.first:transpose(0, 1))
          return { loss = F.mse_loss(y, given.wanted), y = y }
        end }
        return list
      end
      function Net:forward(given) return nn.fold(self:parts(), given) end
      local function make() return Net() end
      local function batch() return { points = ps.randn { 4, 6, 3 }, wanted = ps.randn { 4, 6, 3 } } end
      local example = batch()
    ]], { "pipeline", "tensor", "tensor, rows not shared" })
  end)

  it("PyTorch's layers, whose heads and columns are cut among ranks, with dropout", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    in_every_layout([[
      local Net = nn.class "Net"
      function Net:init()
        local how = { dim_feedforward = 64, dropout = 0.2, batch_first = true }
        self.embed = nn.Embedding(11, 32)
        self.encoder, self.decoder = nn.TransformerEncoderLayer(32, 4, how), nn.TransformerDecoderLayer(32, 4, how)
        self.head = nn.Linear(32, 11, { bias = true })
        self.head.weight = self.embed.weight
      end
      Net.tensor_parallel = { embed = "vocabulary" }
      function Net:forward(given)
        local memory = self.encoder(self.embed(given.from))
        local y = self.head(self.decoder(self.embed(given.to), memory, { tgt_is_causal = true }))
        return { loss = F.cross_entropy(y:flatten(0, 1), given.to:flatten()) }
      end
      local function make() return Net() end
      local function batch()
        return { from = ps.randint(0, 11, { 4, 5 }, { dtype = "int64" }), to = ps.randint(0, 11, { 4, 7 },
          { dtype = "int64" }) }
      end
      local example
    ]], { "tensor" })
  end)
end)

describe("parts", function()
  local Net = nn.class "Net"
  function Net:init()
    self:param("scale", ps.ones { 4 })
    self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
  end
  local list
  function Net.parts() return list end

  local function make(of, example)
    list = of
    return stages.make(function() return Net() end, { table = stages_lib.table_of("1f1b", 2, 1, 2), rank = 0,
      example = example }, { device = "cpu" })
  end

  it("that cannot be read are named", function()
    local function forward(carry) return carry end
    for _, case in ipairs {
      { {}, "Net: parts() returned an empty table" },
      { { 1 }, "part 1 of Net is a number" },
      { { { forward = forward } }, "part 1 of Net has no name" },
      { { { name = "a", module = {}, forward = forward } },
        "part 1 (a) of Net has an unknown key 'module': did you mean modules?" },
      { { { name = "a", modules = {}, forward = forward }, { name = "a", forward = forward } },
        "part 2 (a) of Net has the name of part 1" },
      { { { name = "a", modules = { 1 }, forward = forward } }, "part 1 (a) of Net has modules[1] = a number" },
      { { { name = "a", parameters = { ps.ones { 1 } }, forward = forward } }, "has a tensor in `parameters`" },
      { { { name = "a", parameters = { "scal" }, forward = forward } },
        "names a parameter 'scal', which the model does not have: did you mean scale?" },
      { { { name = "a" } }, "part 1 (a) of Net has no forward" },
    } do
      fails({ case[2] }, function() make(case[1]) end)
    end
  end)

  it("of the whole model are refused", function()
    function Net.parts(self)
      return { { name = "all", modules = { self }, forward = function(carry) return carry end } }
    end
    fails({ "part 1 (all) of Net has the whole model in `modules`", "`parameters`" }, function() make {} end)
    function Net.parts() return list end
  end)

  -- Returns parts a and b. `use` determines which layers each part calls.
  local function two(modules, use)
    function Net.parts(self)
      local all = {}
      for i, name in ipairs { "a", "b" } do
        local of = {}
        for k, key in ipairs(modules[i]) do of[k] = self[key] end
        all[i] = { name = name, modules = of, forward = function(carry, batch)
          local x = carry.x or batch.x
          for _, key in ipairs(use[i]) do x = key == "scale" and x * self.scale or self[key](x) end
          return i == 2 and { loss = x:sum() } or { x = x }
        end }
      end
      return all
    end
    return function() return select(2, stages.make(function() return Net() end, { rank = 0, example = { { x = ps.ones {
      2, 4 } } }, table = stages_lib.table_of("1f1b", 2, 1, 2) }, { device = "cpu" })) end
  end

  it("that overlap are refused, and those that share a parameter are found", function()
    fails({ "pipeline: parts a and b overlap: both declare parameter b.", "only b uses it", "the modules of a" },
      two({ { "a", "b" }, { "b" } }, { { "a", "scale" }, { "b" } }))
    local cut = two({ { "a" }, { "b" } }, { { "a", "scale" }, { "b", "scale" } })()
    assert.same({ 0, 1 }, cut.vstages_of.scale)
    assert.same({ 0 }, cut.vstages_of["a.weight"])
    cut = two({ { "a" }, { "b" } }, { { "a", "scale" }, { "b", "a" } })()
    assert.same({ 0, 1 }, cut.vstages_of["a.weight"])
    fails({ "no part of the model uses parameter scale", "`parameters`" },
      two({ { "a" }, { "b" } }, { { "a" }, { "b" } }))
  end)

  it("are cut by parameters if no batch is known, and checked at the first one", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    lib.check(folder, 2, [[
      local declares
      local Net = nn.class "Net"
      function Net:init() self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4) end
      function Net:parts()
        return { { name = "l.0", modules = { self.a }, forward = function(_, given)
            return { x = self.a(given.z) }
          end },
          { name = "l.1", modules = { self.b, declares and self.a or nil }, forward = function(carry)
            return { loss = self.a(self.b(carry.x)):sum() }
          end } }
      end
      local function train()
        local model, optimizer = ps.initialize { quiet = true, model_func = function() return Net() end,
          config = { plan_print = false, gradient_accumulation_steps = 2, pipeline = { stages = 2 } } }
        local ok, why = pcall(function()
          for out in model:micro_batches { z = ps.ones { 4, 4 } } do model:backward(out.loss) end
          optimizer:step()
        end)
        model:close()
        return ok, tostring(why)
      end
      local ok, why = train()
      assert(not ok and why:find("part l.1 uses a.", 1, true) and why:find("`example`", 1, true), why)
      declares = true
      ok, why = train()
      assert(ok, why)
    ]])
  end)
end)

describe("tensor parallelism", function()
  it("refuses an unnamed module that shares a cut weight, and kinds for other classes", function()
    local group = { size = function() return 2 end, rank = function() return 0 end,
      copy_to = function(_, x) return x end }
    local tensor_parallel = require "ps.parallel.tensor.cut"
    local function cut(class)
      return tensor_parallel.cut(ps.deferred(function() return class() end), { group = group, sequence = false,
        note = function() end })
    end
    local Tied = nn.class "Tied"
    Tied.tensor_parallel = { up = "column" }
    function Tied:init()
      self.up, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
      self.again.weight = self.up.weight
    end
    fails({ "again.weight is tied to a parameter that is cut" }, function() cut(Tied) end)
    for kind, class in pairs { attention = "MultiheadAttention", channels = "GroupNorm", columns = "Dropout" } do
      Tied.tensor_parallel = { up = kind }
      fails({ ("up is a Linear, but \"%s\" is for an nn.%s"):format(kind, class) }, function() cut(Tied) end)
    end
    local Conv = nn.class "Conv"
    Conv.tensor_parallel = { conv = "column" }
    function Conv:init() self.conv = nn.Conv2d(4, 4, 1, { groups = 2 }) end
    fails({ "conv has groups = 2; only convolutions with groups = 1" }, function() cut(Conv) end)
    local Odd = nn.class "Odd"
    Odd.tensor_parallel = { attn = "attention" }
    function Odd:init() self.attn = nn.MultiheadAttention(9, 3) end
    fails({ "attn has heads = 3, which is not a multiple of the size" }, function() cut(Odd) end)
  end)

  it("cuts nn.MultiheadAttention by heads, also with weights and other widths of keys", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    lib.check(folder, 2, [[
      local cut = require "ps.parallel.tensor.cut"
      ps.mesh { tp = 2 }
      for _, how in ipairs { {}, { kdim = 6, vdim = 10, batch_first = true }, { bias = false } } do
        local Net = nn.class "Net"
        function Net:init() self.attn = nn.MultiheadAttention(16, 4, how) end
        function Net:forward(q, k, v, options) return self.attn(q, k, v, options) end
        Net.tensor_parallel = { attn = "attention" }
        ps.manual_seed(4)
        local whole = Net()
        ps.manual_seed(4)
        local mine = cut.make(Net, { group = ps.mesh.group "tp", sequence = false, note = function() end },
          { device = "cpu" })
        local q = ps.randn { 3, 5, 16 }
        local k, v = ps.randn { 3, 5, how.kdim or 16 }, ps.randn { 3, 5, how.vdim or 16 }
        for _, options in ipairs { { need_weights = false }, {}, { average_attn_weights = false } } do
          local function run(net)
            local leaf = q:clone():requires_grad(true)
            local y, w = net(leaf, k, v, options)
            local loss = (y * y):sum()
            if w ~= nil then loss = loss + (w * w):sum() end
            loss:backward()
            return y, w, leaf:grad()
          end
          local y, w, dq = run(whole)
          local y2, w2, dq2 = run(mine)
          assert((w == nil) == (w2 == nil))
          for _, pair in ipairs { { y, y2 }, { dq, dq2 }, w ~= nil and { w, w2 } or nil } do
            assert((pair[1] - pair[2]):abs():amax():item() < 1e-5)
          end
        end
      end
    ]])
  end)
end)
