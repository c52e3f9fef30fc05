-- SPDX-License-Identifier: BSD-3-Clause
-- Models that are made without data (ps.deferred). ps.materialize gives them, bit for bit, the values of the model made
-- with data, no matter which ops made these values. Only the requested tensors have memory.
local ps = require "ps"
local check = require "spec.check_lib"
local lfs = require "lfs"
local gpt2 = require "models.gpt2"
local registry = require "ps.nn.registry"
local deferred = require "ps.nn.deferred"
local shard = require "ps.tensor.shard"
local nn, fails = ps.nn, check.fails_saying

local folder = os.tmpname()
os.remove(folder)
lfs.mkdir(folder)
local function path(name) return folder .. "/" .. name end
teardown(function() os.execute("rm -rf '" .. folder .. "'") end)

local hash_out = ps.ffi.new("uint64_t[1]")
local function hash(t)
  ps.check(ps.C.ps_tensor_hash(t, hash_out))
  return tostring(hash_out[0])
end

-- Returns the bits of all parameters and buffers, and the position in the random number stream.
local function bits(model)
  local all = { ("offset %s"):format(tostring(ps.rng().offset)) }
  for _, iterate in ipairs { model.named_parameters, model.named_buffers } do
    for name, t in iterate(model) do
      assert.equal("cpu", t:device(), name)
      all[#all + 1] = ("%s %s %s"):format(name, tostring(t:needs_grad()), hash(t))
    end
  end
  return all
end

local function same(fn)
  ps.manual_seed(11)
  local whole = bits(fn())
  ps.manual_seed(11)
  local model = ps.deferred(fn)
  for name, p in model:named_parameters() do assert.equal("meta", p:device(), name) end
  ps.materialize(model)
  for i, line in ipairs(bits(model)) do assert.equal(whole[i], line) end
  return model
end

describe("a model made without data gets the bits of one made with data", function()
  it("of each family", function()
    same(function() return gpt2.new "tiny" end)
    same(function() return require("models.bert").new("tiny", { task = "masked_lm" }) end)
    same(function() return require("models.roberta").new("tiny", { task = "sequence_classification" }) end)
    same(function() return gpt2.new("tiny", { tie_word_embeddings = false, dtype = "bf16" }) end)
  end)

  it("for all ways to fill tensors: layers' defaults, padding rows, constants, lists, copies, casts; frozen", function()
    local Net = nn.class("Net")
    function Net:init()
      self.linear = nn.Linear(7, 5)
      self.embed = nn.Embedding(9, 7, { padding_idx = 3 })
      self.norm = nn.LayerNorm(5)
      self:param("scaled", ps.randn { 4, 6 } * 0.02 + 1)                     -- computed from values
      self:param("listed", ps.tensor { { 1, 2 }, { 3, 4.5 } })
      self:param("uniform", nn.init.xavier_uniform_(ps.empty { 6, 3 }))
      self:param("rows", ps.zeros { 8, 2 })
      ps.no_grad(function()
        self.rows:narrow(0, 2, 3):normal_(1, 2)
        self.rows:narrow(0, 6, 1):copy_(self.listed:narrow(0, 1, 1))
        self.norm.weight:detach():mul_(3)
        self.embed.weight[{ { 0, 2 }, 1 }] = 0.25
      end)
      local rates = (ps.arange(0, 8, 2) / -8):exp()
      self:buffer("cos", (ps.arange(0, 5, 1, { dtype = "fp32" }):reshape(-1, 1) * rates):cos())
      self:buffer("order", ps.randint(0, 100, { 12 }))
      self.plain = ps.full({ 3 }, 7)                                         -- not registered
      self.linear.bias:requires_grad(false)
    end
    local net = same(Net)
    assert.same({ 7, 7, 7 }, net.plain:tolist())
    same(function() return Net():to "bf16" end)
  end)

  it("that was loaded, from files or from tensors, and changed afterwards", function()
    ps.manual_seed(4)
    local config = { vocab_size = 64, n_positions = 16, n_embd = 32, n_layer = 3, n_head = 2 }
    gpt2.new(config):save_pretrained(path "saved", { max_shard_size = 30000 })
    same(function() return gpt2.from_pretrained(path "saved", { quiet = true }) end)
    same(function()
      return gpt2.from_pretrained(path "saved", { quiet = true }):resize_token_embeddings(80)
    end)
    same(function() return gpt2.from_pretrained(path "saved", { quiet = true, tie_word_embeddings = false }) end)
    local state = nn.Linear(3, 4):state_dict()
    same(function()
      local model = nn.Linear(3, 4)
      model:load_state_dict(state)
      ps.no_grad(function() model.weight:narrow(0, 0, 1):fill_(2) end)
      return model
    end)
  end)

  it("so that it trains like that one", function()
    local function losses(model)
      local x, y = ps.randint(0, 256, { 2, 16 }), ps.randint(0, 256, { 2, 16 })
      local optimizer, all = ps.optim.AdamW(model, { lr = 1e-2 }), {}
      for i = 1, 3 do
        optimizer:zero_grad()
        local loss = model(x, y)
        loss:backward()
        optimizer:step()
        all[i] = loss:item()
      end
      return all
    end
    ps.manual_seed(2)
    local want = losses(gpt2.new("tiny", { dropout = 0.1 }))
    ps.manual_seed(2)
    assert.same(want, losses(ps.materialize(ps.deferred(gpt2.new, "tiny", { dropout = 0.1 }))))
  end)
end)

local function used()
  collectgarbage()
  collectgarbage()
  return ps.memory("cpu").used
end

describe("a model that was made without data", function()
  it("leaves no bytes, however many models are made in succession", function()
    local function some(n)
      for _ = 1, n do ps.materialize(ps.deferred(gpt2.new, "tiny")) end
      return used()
    end
    local before = some(4)
    assert.truthy(some(16) < before + 2 ^ 16)              -- a model has 0.1 MiB
  end)
end)

describe("part of a model made without data", function()
  it("needs memory only for that part, has its bits, and names tensors on other processes", function()
    local config = { vocab_size = 512, n_positions = 64, n_embd = 64, n_layer = 4, n_head = 4 }
    -- A separate function, so that no slot of the caller's stack holds the model when memory is counted.
    local function hashes()
      ps.manual_seed(7)
      local all = gpt2.new(config):state_dict()
      for name, t in pairs(all) do all[name] = hash(t) end
      return all
    end
    local whole = hashes()
    ps.manual_seed(7)
    local before = used()
    local model = ps.deferred(gpt2.new, config)
    assert.equal(before, used())
    local n = model:num_parameters()
    local mine, bytes = {}, 0
    for name, p in model:named_parameters() do
      if name:match "%.h%.[23]%." then
        mine[name] = true
        bytes = bytes + math.ceil(p:nbytes() / 256) * 256                   -- memory blocks have multiples of 256 bytes
      end
    end
    ps.materialize(model, { elsewhere = function(name) return not mine[name] and "rank 0 (stage 0)" end })
    assert.equal(bytes, used() - before)
    assert.equal(n, model:num_parameters())
    for name, p in model:named_parameters() do
      assert.equal(mine[name] and "cpu" or "meta", p:device(), name)
      if mine[name] then assert.equal(whole[name], hash(p), name) end
    end
    local x = model.transformer.h[3](model.transformer.h[2](ps.randn { 1, 8, 64 }))
    assert.same({ 1, 8, 64 }, x:shape())
    fails({ "transformer.h.1.ln_1.weight", "rank 0 (stage 0)" }, function() model.transformer.h[1](x) end)
    fails({ "transformer.wte.weight", "rank 0 (stage 0)" },
      function() model:head():loss(x, ps.zeros({ 1, 8 }, { dtype = "int64" })) end)
    fails({ "transformer.wte.weight", "rank 0 (stage 0)" },
      function() model.transformer.wte(ps.zeros({ 1, 8 }, { dtype = "int64" })) end)
    ps.materialize(model)                                                    -- and the others later
    for name, p in model:named_parameters() do assert.equal(whole[name], hash(p), name) end
  end)

  it("frees the bytes of tensors that were made on a named device but belong to another process", function()
    local before = used()
    local model = ps.deferred(gpt2.new, "tiny", { device = "cpu" })
    ps.materialize(model, { elsewhere = function() return "rank 3" end })
    assert.equal(before, used())
    assert.equal("meta", model:parameters()[1]:device())
  end)
end)

describe("a shard of a model made without data", function()
  local function cases(model, count)
    local list = {}
    for at, module in model:named_modules() do
      for key, t, kind in registry.members(module) do
        t = kind == "param" and t
        local name = at .. "." .. key
        if t and name:find "c_attn" then list[name] = { module, key, { dim = t:dim() - 1, blocks = 3 } }
        elseif t and name:find "c_proj.weight" then list[name] = { module, key, { dim = 0 } }
        elseif t and name:find "wte" then list[name] = { module, key, { dim = 0, padded = -t:size(0) % count } } end
      end
    end
    return list
  end

  it("has the bits of that part of the whole, from fills, casts and files; frozen ones, too", function()
    ps.manual_seed(3)
    local config = { vocab_size = 61, n_positions = 16, n_embd = 24, n_layer = 2, n_head = 3 }
    gpt2.new(config):save_pretrained(path "cut")
    for _, fn in ipairs { function() return gpt2.new(config) end, function() return gpt2.new(config):to "bf16" end,
      function() return gpt2.from_pretrained(path "cut", { quiet = true }) end } do
      for rank = 0, 2 do
        ps.manual_seed(5)
        local whole = fn():state_dict()
        ps.manual_seed(5)
        local model = ps.deferred(function()
          local made = fn()
          made.transformer.wte.weight:requires_grad(false)
          return made
        end)
        for name, at in pairs(cases(model, 3)) do
          local module, key, given = unpack(at)
          given.index, given.count, given.full_shape = rank, 3, module[key]:shape()
          local part = deferred.cut(model, module[key], shard.new(given, name))
          module[key] = part
        end
        ps.materialize(model)
        assert.is_false(model.transformer.wte.weight:needs_grad())
        for name, t in model:named_parameters() do
          local desc = shard.of(t)
          assert.equal(hash(desc and shard.of_whole(desc, whole[name]) or whole[name]), hash(t), name)
          if not name:find "wte" then assert.is_true(t:needs_grad(), name) end
        end
      end
    end
  end)

  it("is made without the whole tensor if that is filled", function()
    local model = ps.deferred(nn.Linear, 256, 1024, { std = 0.02 })
    model.weight = deferred.cut(model, model.weight, shard.new { dim = 1, index = 1, count = 8,
      full_shape = { 1024, 256 } })
    model.bias = deferred.cut(model, model.bias, shard.new { dim = 0, index = 1, count = 8, full_shape = { 1024 } })
    local before = used()
    ps.reset_peak_memory()
    ps.materialize(model)
    assert.truthy(ps.memory("cpu").peak < before + 1024 * 256 * 4 / 2)
  end)
end)

describe("a value that cannot be computed again", function()
  it("is an error that names the parameter", function()
    ps.safetensors.save(path "raw.safetensors", { w = ps.randn { 3 } })
    local Raw = nn.class("Raw")
    function Raw:init() self:param("loaded", ps.load(path "raw.safetensors").w:to "meta") end
    ps.materialize(ps.deferred(Raw))                                         -- existing values are copied
    local Changed = nn.class("Changed")
    local source = ps.zeros { 3 }
    function Changed:init() self:param("source", source:to "meta") end
    local model = ps.deferred(Changed)
    source:fill_(1)
    fails({ "source", "has changed since" }, function() ps.materialize(model) end)
    local Late = nn.class("Late")
    function Late:init() self:param("late", ps.zeros { 3 }) end
    model = ps.deferred(Late)
    ps.no_grad(function() model.late:fill_(2) end)                           -- while nothing is recorded
    fails({ "late", "cannot be repeated" }, function() ps.materialize(model) end)
    local outside = ps.zeros({ 3 }, { device = "meta" })
    local Outside = nn.class("Outside")
    function Outside:init() self:param("outside", outside + 1) end
    fails({ "outside", "cannot be repeated" }, function() ps.materialize(ps.deferred(Outside)) end)
    local Asks = nn.class("Asks")
    function Asks:init() self:param("asks", ps.full({ 3 }, ps.randn({ 1 }):item())) end
    fails({ "meta" }, function() ps.deferred(Asks) end)
    assert.equal("cpu", ps.zeros({ 1 }):device())                            -- the default is unchanged
  end)

  it("is a removed file", function()
    local model = gpt2.new("tiny")
    ps.save(model:state_dict(), path "gone.safetensors")
    local later = ps.deferred(function() return gpt2.new("tiny"):load_weights(path "gone.safetensors") end)
    os.remove(path "gone.safetensors")
    fails({ "gone.safetensors", "transformer.wte.weight" }, function() ps.materialize(later) end)
  end)

  it("is a model that ps.deferred did not make", function()
    fails({ "ps.deferred" }, function() ps.materialize(nn.Linear(2, 2)) end)
    fails({ "not a module" }, function() ps.deferred(function() return 3 end) end)
    fails({ "inside" }, function() ps.deferred(function() return ps.deferred(nn.Linear, 2, 2) end) end)
  end)
end)
