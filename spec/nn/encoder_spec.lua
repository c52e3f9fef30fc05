-- SPDX-License-Identifier: BSD-3-Clause
-- nn.MultiheadAttention and layers of encoders and decoders against F.attention and themselves: decoding by caches,
-- masks and their gradients, PyTorch's names of parameters, dropout, copies; modules that hold others by name; modules
-- of losses; errors of wrong use. spec/oracle/rows_layers.py has PyTorch.
local ps = require "ps"
local check = require "spec.check_lib"
local fails, is = check.fails, check.is
local nn, F, tensor = ps.nn, ps.F, ps.tensor

local function near(a, b, bound) assert((a - b):abs():amax():item() <= (bound or 1e-5)) end
local function names(module)
  local list = {}
  for name in module:named_parameters() do list[#list + 1] = name end
  return table.concat(list, " ")
end

describe("attention", function()
  it("with a mask of floats has the mask's gradient, by finite differences", function()
    ps.manual_seed(3)
    local where = { dtype = "fp64" }
    local q, k, v = ps.randn({ 2, 2, 3, 4 }, where), ps.randn({ 2, 1, 5, 4 }, where), ps.randn({ 2, 1, 5, 4 }, where)
    local bias = ps.nn.Parameter(ps.randn({ 1, 2, 3, 5 }, where))
    local factor = ps.randn({ 2, 2, 3, 4 }, where)
    local function loss(mask) return (F.attention(q, k, v, { mask = mask, causal = true }) * factor):sum() end
    local value = loss(bias)
    near(value, loss(bias:detach()), 1e-12)
    value:backward()
    for _, at in ipairs { { 0, 0, 0, 0 }, { 0, 1, 2, 4 }, { 0, 0, 1, 3 } } do
      local one = ps.zeros({ 1, 2, 3, 5 }, where)
      one[at] = 1e-5
      local slope = (loss(bias:detach() + one):item() - loss(bias:detach() - one):item()) / 2e-5
      assert(math.abs(slope - bias:grad()[at]:item()) < 1e-8)
    end
    assert.equal(0, bias:grad()[{ 0, 0, 0, 4 }]:item())          -- key 4 is hidden, since query 0 sees keys up to 2
  end)

  it("returns its weights, and 0 for a query that sees no key", function()
    local q, k = ps.randn { 1, 1, 2, 4 }, ps.randn { 1, 1, 3, 4 }
    local seen = tensor({ { { { true, false, true }, { false, false, false } } } })
    local y, w = F.attention_weights(q, k, k, { mask = seen })
    near(w:sum(-1), tensor({ { { 1, 0 } } }))
    near(y, F.attention(q, k, k, { mask = seen }))
    is({ 0, 0, 0, 0 }, y[{ 0, 0, 1 }])
    assert.equal(0, w[{ 0, 0, 0, 1 }]:item())
  end)

  it("draws the masks of F.attention if it drops weights", function()
    local q = ps.randn { 2, 2, 4, 8 }
    ps.manual_seed(7)
    local a = F.attention(q, q, q, { dropout = 0.4 })
    ps.manual_seed(7)
    near(a, (F.attention_weights(q, q, q, { dropout = 0.4 })))
  end)

  it("computes the same by a cache as at once", function()
    local m = nn.MultiheadAttention(8, 2, { batch_first = true })
    local x = ps.randn { 3, 6, 8 }
    local whole = m(x, x, x, { is_causal = true, need_weights = false })
    ps.no_grad(function()
      local cache, parts = {}, {}
      local first = x:narrow(1, 0, 3)
      parts[1] = m(first, first, first, { cache = cache, is_causal = true, need_weights = false })
      for t = 3, 5 do
        local one = x:narrow(1, t, 1)
        parts[#parts + 1] = m(one, one, one, { cache = cache, need_weights = false })
      end
      near(ps.cat(parts, 1), whole)
      assert.same({ 3, 2, 6, 4 }, cache.key:shape())
      near(m(x:narrow(1, 5, 1), nil, nil, { cache = cache, need_weights = false }), parts[4])
    end)
    fails(function() return m(x, nil, nil, { cache = {} }) end, "the cache is empty")
  end)

  it("names the fault of shapes and options", function()
    local m, x = nn.MultiheadAttention(8, 2), ps.zeros { 5, 3, 8 }
    assert.equal("in_proj_weight in_proj_bias out_proj.weight out_proj.bias", names(m))
    assert.equal("q_proj_weight k_proj_weight v_proj_weight out_proj.weight",
      names(nn.MultiheadAttention(8, 2, { kdim = 4, vdim = 6, bias = false })))
    fails(function() return nn.MultiheadAttention(8, 3) end, "3 heads do not divide a width of 8")
    fails(function() return m(x, x) end, "the value is missing")
    fails(function() return m(x, ps.zeros { 5, 3, 7 }, x) end, "the key is [5, 3, 7]", "[T, B, 8]")
    fails(function() return m(x, ps.zeros { 5, 2, 8 }, ps.zeros { 5, 2, 8 }) end, "do not fit together")
    fails(function() return m(x, x, x, { attn_mask = ps.zeros { 5, 4 } }) end, "attn_mask is [5, 4]; it must be [5, 5]")
    fails(function() return m(x, x, x, { key_padding_mask = ps.zeros { 5, 3 } }) end, "it must be [3, 5]")
    for name, shape in pairs { attn_mask = { 5, 5 }, key_padding_mask = { 3, 5 } } do
      for _, dtype in ipairs { "int64", "int32", "uint8" } do
        fails(function() return m(x, x, x, { [name] = ps.ones(shape, { dtype = dtype }) }) end,
          ("%s is %s; it must be bool"):format(name, dtype))
      end
    end
    fails(function() return m(x, x, x, { attn_maks = x }) end, "attn_mask")
    local y, w = m(x, x, x)
    assert.same({ 5, 3, 8 }, y:shape())
    assert.same({ 3, 5, 5 }, w:shape())
    y, w = m(x[{ {}, 0 }], x[{ {}, 0 }], x[{ {}, 0 }])
    assert.same({ 5, 8 }, y:shape())
    assert.same({ 5, 5 }, w:shape())
  end)
end)

describe("layers of encoders and decoders", function()
  local ENCODER = "self_attn.in_proj_weight self_attn.in_proj_bias self_attn.out_proj.weight self_attn.out_proj.bias "
    .. "linear1.weight linear1.bias linear2.weight linear2.bias norm1.weight norm1.bias norm2.weight norm2.bias"
  it("have PyTorch's names in its order", function()
    assert.equal(ENCODER, names(nn.TransformerEncoderLayer(8, 2, { dim_feedforward = 16 })))
    local decoder = names(nn.TransformerDecoderLayer(8, 2, { dim_feedforward = 16 }))
    assert.truthy(decoder:find("multihead_attn.in_proj_weight", 1, true) and decoder:find("norm3.bias", 1, true))
    local stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, { dim_feedforward = 16 }), 2,
      { norm = nn.LayerNorm(8) })
    local all = names(stack)
    assert.truthy(all:find("layers.1.self_attn.in_proj_weight", 1, true))
    assert.truthy(all:find("norm.weight norm.bias$"))
    -- Copies have the values of the given layer, but separate memory.
    assert.is_true(stack.layers[0].linear1.weight:equal(stack.layers[1].linear1.weight))
    ps.no_grad(function() stack.layers[0].linear1.weight:zero_() end)
    assert.is_false(stack.layers[0].linear1.weight:equal(stack.layers[1].linear1.weight))
    local other = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, { dim_feedforward = 16 }), 2,
      { norm = nn.LayerNorm(8) })
    other:load_state_dict(stack:state_dict())
    local x = ps.randn { 4, 2, 8 }
    near(other:eval()(x), stack:eval()(x), 0)
  end)

  it("compute the same by a cache as at once", function()
    for _, norm_first in ipairs { true, false } do
      local layer = nn.TransformerDecoderLayer(8, 2, { dim_feedforward = 16, norm_first = norm_first, dropout = 0.3 })
      local m = nn.TransformerDecoder(layer, 2):eval()
      local x, memory = ps.randn { 5, 2, 8 }, ps.randn { 3, 2, 8 }
      ps.no_grad(function()
        local whole = m(x, memory, { tgt_is_causal = true })
        local cache, parts = {}, {}
        for t = 0, 4 do
          parts[t + 1] = m(x:narrow(0, t, 1), t == 0 and memory or nil, { tgt_is_causal = true, cache = cache })
        end
        near(ps.cat(parts, 0), whole)
      end)
    end
    local m = nn.TransformerDecoderLayer(8, 2)
    fails(function() return m(ps.zeros { 2, 1, 8 }) end, "the memory is missing")
  end)

  it("train with dropout, and name unknown options", function()
    ps.manual_seed(1)
    local m = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, { dim_feedforward = 16, activation = nn.GELU() }),
      2)
    local x = ps.randn { 4, 2, 8 }
    assert.is_false(m(x):equal(m(x)))
    m:eval()
    assert.is_true(m(x):equal(m(x)))
    m:train()
    local optimizer = ps.optim.AdamW(m, { lr = 1e-2 })
    local first, last
    for step = 1, 30 do
      local loss = F.mse_loss(m(x), x)
      loss:backward()
      optimizer:step()
      optimizer:zero_grad()
      if step == 1 then first = loss:item() else last = loss:item() end
    end
    assert(last < 0.8 * first, last / first)
    fails(function() return nn.TransformerEncoderLayer(8, 2, { activation = "rellu" }) end, "did you mean 'relu'")
    fails(function() return nn.TransformerEncoderLayer(8, 2, { dim_fedforward = 4 }) end, "dim_feedforward")
    fails(function() return nn.TransformerEncoder(nn.Linear(2, 2), 2) end, "a Linear cannot be copied")
    assert.equal(2, nn.TransformerEncoder({ nn.Linear(2, 2), nn.Linear(2, 2) }).layers:size())
  end)
end)

describe("modules that hold others", function()
  it("by name, in order", function()
    local d = nn.ModuleDict { b = nn.Linear(2, 3), a = nn.Identity() }
    assert.same({ "a", "b" }, d:keys())
    assert.equal("b.weight b.bias", names(d))
    d:update { { "z", nn.Linear(1, 1) }, { "c", nn.ReLU() } }
    assert.same({ "a", "b", "z", "c" }, d:keys())
    local seen = {}
    for name, module in d:items() do seen[#seen + 1] = name .. module.class_name end
    assert.equal("aIdentity bLinear zLinear cReLU", table.concat(seen, " "))
    assert.equal("ReLU", d:pop("c").class_name)
    assert.equal(3, d:size())
    assert.is_true(d:contains "a")
    assert.is_nil(d:get "keys")
    assert.equal(3, #d:values())
    fails(function() d:set("keys", nn.ReLU()) end, "'keys' is the name of a method")
    fails(function() d:set("a.b", nn.ReLU()) end, "without a dot")
    fails(function() d:set("e", 3) end, "'e' is a number, not a module")
    fails(function() d:pop "no" end, "there is no module 'no' (there are a, b, z)")
    fails(function() return nn.ModuleDict(nn.ReLU()) end, "takes a table of names")
  end)
  it("of parameters, which train and are saved", function()
    local list = nn.ParameterList { ps.ones { 2 }, ps.zeros { 3 } }
    list:append(ps.ones { 1 })
    assert.equal("0 1 2", names(list))
    local count = 0
    for i, p in ipairs(list) do
      assert.equal(count, i)
      assert.is_true(p:requires_grad())
      count = count + 1
    end
    assert.equal(3, count)
    is({ 1 }, list[-1])
    local p = nn.ParameterDict { scale = ps.ones { 2 } }
    local copy = nn.ParameterDict { scale = ps.zeros { 2 } }
    copy:load_state_dict(p:state_dict())
    is({ 1, 1 }, copy.scale)
    fails(function() list:append(3) end, "is a number, not a tensor")
    fails(function() return nn.ParameterList(ps.ones { 1 }) end, "takes one list of tensors")
    assert.same({ 2, 2 }, nn.Identity("anything")(ps.zeros { 2, 2 }):shape())
  end)
end)

describe("modules of losses and norms", function()
  it("call the functions with their options, and save weights", function()
    local x, y = tensor { { 1, 2, 3 }, { 3, 2, 1 } }, tensor({ 2, 0 }, "int64")
    local weight = tensor { 1, 2, 5 }
    local loss = nn.CrossEntropyLoss { weight = weight, label_smoothing = 0.1 }
    near(loss(x, y), F.cross_entropy(x, y, { weight = weight, label_smoothing = 0.1 }), 0)
    assert.same({ "weight" }, (function()
      local keys = {}
      for name in loss:named_buffers() do keys[#keys + 1] = name end
      return keys
    end)())
    near(nn.SmoothL1Loss { beta = 2, reduction = "sum" }(x, x * 2), F.smooth_l1_loss(x, x * 2, { beta = 2,
      reduction = "sum" }), 0)
    assert.equal("MSELoss(reduction=none)", tostring(nn.MSELoss { reduction = "none" }))
    fails(function() return nn.MSELoss { reduction = "avg" } end, "nn.MSELoss: reduction")
    fails(function() return nn.MSELoss { beta = 1 } end, "no option 'beta'")
  end)
  it("normalise over several dimensions, also without parameters", function()
    local x = ps.randn { 4, 3, 5 }
    local y = nn.LayerNorm({ 3, 5 }, { elementwise_affine = false })(x)
    near(y:reshape(4, 15):mean(1), ps.zeros { 4 }, 1e-6)
    near(y:reshape(4, 15):var(1, false), ps.ones { 4 }, 1e-4)
    assert.equal("", names(nn.LayerNorm(5, { elementwise_affine = false })))
    assert.same({ 3, 5 }, nn.LayerNorm({ 3, 5 }).weight:shape())
    fails(function() return nn.LayerNorm({ 3, 4 })(x) end, "it must be [3, 5]")
    fails(function() return nn.LayerNorm {} end, "the list of sizes is empty")
  end)
end)
