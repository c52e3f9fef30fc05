-- SPDX-License-Identifier: BSD-3-Clause
-- ps.autocast: the type of each op's result by PyTorch's lists for CUDA (asked of PyTorch itself where PS_TORCH_PYTHON
-- names a Python that has it), values and gradients of a model in half precision, how often a weight is converted, and
-- recompute, gradients and errors in a region.
local ps = require "ps"
local nn, F = ps.nn, ps.F
local fails = require("spec.check_lib").fails

-- x is fp32 and h is bf16, both 4 x 4, and v is fp32 [4]. Rows: name, the result's type, our line, PyTorch's line.
local x, h, v = ps.rand { 4, 4 } + 0.5, (ps.rand { 4, 4 } + 0.5):to "bf16", ps.rand { 4 } + 0.5
local y = ps.tensor({ 0, 1, 2, 3 }, { dtype = "int64" })
local q = function(t) return t:reshape(1, 1, 4, 4) end
local ROWS = {
  { "bf16", function() return F.linear(x, x, v) end, "F.linear(x, x, v)" },
  { "bf16", function() return x:matmul(x) end, "x @ x" },
  { "bf16", function() return x:matmul(v) end, "x @ v" },
  { "bf16", function() return x:reshape(1, 4, 4):matmul(h:reshape(1, 4, 4)) end, "torch.bmm(x[None], h[None])" },
  { "bf16", function() return ps.einsum("ij,jk->ik", x, x) end, "torch.einsum('ij,jk->ik', x, x)" },
  { "bf16", function() return F.conv1d(x:reshape(1, 4, 4), x:reshape(4, 4, 1)) end, "F.conv1d(x[None], x[..., None])" },
  { "bf16", function() return F.conv2d(q(x), x:reshape(16, 1, 1, 1)) end,
    "F.conv2d(x[None, None], x.view(16, 1, 1, 1))" },
  { "bf16", function() return F.attention(q(x), q(h), q(x)) end,
    "F.scaled_dot_product_attention(x[None, None], h[None, None], x[None, None])" },
  { "fp32", function() return F.linear(x, x, v, { residual = x }) end, "x + F.linear(x, x, v)" },
  { "fp32", function() return F.softmax(h) end, "h.softmax(-1)" },
  { "fp32", function() return F.log_softmax(h) end, "h.log_softmax(-1)" },
  { "fp32", function() return F.layer_norm(h, v, v) end, "F.layer_norm(h, (4,), v, v)" },
  { "fp32", function() return F.rms_norm(h, v) end, "F.rms_norm(h, (4,), v)" },
  { "fp32", function() return F.group_norm(h, 2, v, v) end, "F.group_norm(h, 2, v, v)" },
  { "bf16", function() return F.batch_norm(h, v:clone(), v:clone(), v, v, { training = true }) end,
    "F.batch_norm(h, v.clone(), v.clone(), v, v, True)" },
  { "bf16", function() return F.batch_norm(h, v, v, v, v) end, "F.batch_norm(h, v, v, v, v)" },
  { "fp32", function() return F.cross_entropy(h, y) end, "F.cross_entropy(h, y)" },
  { "fp32", function() return F.nll_loss(h, y) end, "F.nll_loss(h, y)" },
  { "fp32", function() return F.mse_loss(h, h) end, "F.mse_loss(h, h)" },
  { "fp32", function() return F.l1_loss(h, h) end, "F.l1_loss(h, h)" },
  { "fp32", function() return F.smooth_l1_loss(h, h) end, "F.smooth_l1_loss(h, h)" },
  { "fp32", function() return F.kl_div(h, h) end, "F.kl_div(h, h)" },
  { "fp32", function() return F.binary_cross_entropy_with_logits(h, h) end,
    "F.binary_cross_entropy_with_logits(h, h)" },
  { "fp32", function() return F.cosine_similarity(h, h) end, "F.cosine_similarity(h, h)" },
  { "fp32", function() return F.normalize(h) end, "F.normalize(h)" },
  { "fp32", function() return h:norm() end, "h.norm()" },
  { "fp32", function() return h:sum() end, "h.sum()" },
  { "fp32", function() return h:cumsum(0) end, "h.cumsum(0)" },
  { "fp32", function() return h:prod() end, "h.prod()" },
  { "fp32", function() return h:cumprod(0) end, "h.cumprod(0)" },
  { "fp32", function() return h:exp() end, "h.exp()" },
  { "fp32", function() return h:log() end, "h.log()" },
  { "fp32", function() return h:log1p() end, "h.log1p()" },
  { "fp32", function() return h:expm1() end, "h.expm1()" },
  { "fp32", function() return h:rsqrt() end, "h.rsqrt()" },
  { "fp32", function() return h:reciprocal() end, "h.reciprocal()" },
  { "fp32", function() return 1 / h end, "1 / h" },
  { "fp32", function() return h ^ 3 end, "h ** 3" },
  { "fp32", function() return 2 ^ h end, "2 ** h" },
  { "fp32", function() return h:square() end, "h.square()" },
  { "fp32", function() return F.softplus(h) end, "F.softplus(h)" },
  { "bf16", function() return F.logsigmoid(h) end, "F.logsigmoid(h)" },
  { "bf16", function() return F.mish(h) end, "F.mish(h)" },
  { "bf16", function() return F.gelu(h) end, "F.gelu(h)" },
  { "bf16", function() return F.silu(h) end, "F.silu(h)" },
  { "bf16", function() return h:tanh() end, "h.tanh()" },
  { "bf16", function() return h:sqrt() end, "h.sqrt()" },
  { "bf16", function() return h:mean() end, "h.mean()" },
  { "bf16", function() return h:var() end, "h.var()" },
  { "bf16", function() return h:amax(0) end, "h.amax(0)" },
  { "bf16", function() return h * 2 end, "h * 2" },
  { "bf16", function() return h / 3 end, "h / 3" },
  { "bf16", function() return h * h end, "h * h" },
  { "fp32", function() return h + x end, "h + x" },
  { "fp32", function() return x * h end, "x * h" },
  { "fp32", function() return ps.cat({ h, x }, 0) end, "torch.cat([h, x])" },
  { "fp32", function() return ps.where(h:gt(1), h, x) end, "torch.where(h > 1, h, x)" },
  { "fp32", function() return F.embedding(y, x) end, "F.embedding(y, x)" },
  { "bf16", function() return F.dropout(h, 0.5) end, "F.dropout(h, 0.5)" },
}

-- PyTorch computes the types for CUDA with fake tensors, which need no GPU.
local TYPES = [=[
import sys, torch, torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
import warnings
warnings.simplefilter("ignore")
torch.set_autocast_enabled("cuda", True)
torch.set_autocast_dtype("cuda", torch.bfloat16)
with FakeTensorMode():
    x = torch.empty(4, 4, device="cuda")
    h = torch.empty(4, 4, device="cuda", dtype=torch.bfloat16)
    v = torch.empty(4, device="cuda")
    y = torch.zeros(4, dtype=torch.long, device="cuda")
    for line in open(sys.argv[1]):
        print({torch.bfloat16: "bf16", torch.float32: "fp32"}[eval(line).dtype])
]=]

-- A transformer block and its loss on the processor, with explicit casts as in the lists.
local BLOCK = [=[
import sys, torch, torch.nn.functional as F
from safetensors.torch import load_file, save_file
t = load_file(sys.argv[1])
p = {k: v.requires_grad_(k not in ("x", "y")) for k, v in t.items()}
class Lists(torch.overrides.TorchFunctionMode):
    half = {F.linear, torch.matmul, torch.Tensor.matmul, F.scaled_dot_product_attention}
    full = {F.layer_norm, F.softmax, F.cross_entropy}
    def __torch_function__(self, fn, types, args=(), kwargs=None):
        to = torch.bfloat16 if fn in self.half else torch.float32 if fn in self.full else None
        if to:
            with torch._C.DisableTorchFunction():
                args = [a.to(to) if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
        return fn(*args, **(kwargs or {}))
with Lists():
    x, y = p["x"], t["y"]
    B, T, C = x.shape
    h = F.layer_norm(x, (C,), p["n1.weight"], p["n1.bias"])
    qkv = F.linear(h, p["qkv.weight"], p["qkv.bias"]).view(B, T, 3, 4, C // 4).permute(2, 0, 3, 1, 4)
    a = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True).transpose(1, 2).reshape(B, T, C)
    x = x + F.linear(a, p["out.weight"], p["out.bias"])
    h = F.layer_norm(x, (C,), p["n2.weight"], p["n2.bias"])
    x = x + F.linear(F.gelu(F.linear(h, p["up.weight"], p["up.bias"])), p["down.weight"], p["down.bias"])
    loss = F.cross_entropy(F.linear(x, p["head.weight"]).flatten(0, 1), y.flatten())
loss.backward()
out = {k: v.grad for k, v in p.items() if v.grad is not None}
save_file({**out, "loss": loss.detach().reshape(1)}, sys.argv[2])
]=]

local Block = nn.class "Block"
function Block:init()
  self.n1, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
  self.n2, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
  self.head = nn.Linear(32, 50, { bias = false })
end
function Block:body(t)
  local B, T, C = unpack(t:shape())
  local qkv = self.qkv(self.n1(t)):reshape(B, T, 3, 4, C / 4):permute(2, 0, 3, 1, 4)
  local a = F.attention(qkv[0], qkv[1], qkv[2], { causal = true }):transpose(1, 2):reshape(B, T, C)
  t = self.out(a, t)                                        -- with a residual
  return t + self.down(F.gelu(self.up(self.n2(t))))
end
function Block:forward(t, target)
  t = self.recomputed and ps.recompute(self.body, self, t) or self:body(t)
  return F.cross_entropy(self.head(t):reshape(-1, 50), target:reshape(-1))
end

local python = os.getenv "PS_TORCH_PYTHON"
if python == "" then python = nil end

local function python_script(text, ...)
  local path = os.tmpname()
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
  local p = assert(io.popen(("'%s' '%s' '%s' 2>&1"):format(python, path,
    table.concat({ ... }, "' '"))))
  local out = p:read "*a"
  p:close()
  os.remove(path)
  return out
end

local function gradients(model)
  local list = {}
  for name, p in model:named_parameters() do list[name] = p:grad():clone():keep() end
  model:zero_grad()
  return list
end

describe("ps.autocast", function()
  it("runs each op in the type that its lists say", function()
    local out = {}
    ps.autocast("bf16", function() for i, row in ipairs(ROWS) do out[i] = row[2]():dtype() end end)
    for i, row in ipairs(ROWS) do assert.equal(row[3] .. " " .. row[1], row[3] .. " " .. out[i]) end
    assert.same({ "fp32", "bf16" }, { F.linear(x, x):dtype(), F.softmax(h):dtype() })      -- after the region
  end)

  it("has the types of PyTorch", function()
    if not python then return pending "PS_TORCH_PYTHON names no Python with PyTorch" end
    local path, lines, want = os.tmpname(), {}, {}
    for i, row in ipairs(ROWS) do lines[i], want[i] = row[3] .. "\n", row[1] .. "\n" end
    local file = assert(io.open(path, "wb"))
    file:write(table.concat(lines))
    file:close()
    local out = python_script(TYPES, path)
    os.remove(path)
    assert.equal(table.concat(want), out)
  end)

  it("has the values and gradients of PyTorch", function()
    if not python then return pending "PS_TORCH_PYTHON names no Python with PyTorch" end
    ps.manual_seed(3)
    local model, input = Block(), ps.randn { 2, 12, 32 }
    local target = ps.randint(0, 50, { 2, 12 }, { dtype = "int64" })
    local state, from, to = model:state_dict(), os.tmpname(), os.tmpname()
    state.x, state.y = input, target
    ps.safetensors.save(from, state)
    local said = python_script(BLOCK, from, to)
    assert.equal("", said)
    local theirs = ps.safetensors.open(to)
    local loss = ps.autocast("bf16", model, input, target)
    loss:backward()
    assert(math.abs(loss:item() - theirs:tensor "loss":item()) < 2e-3, loss:item())
    for name, grad in pairs(gradients(model)) do
      local want = theirs:tensor(name)
      local off = (grad - want):norm():item() / want:norm():item()
      assert(off < 1e-2, ("%s: %g off"):format(name, off))
    end
    theirs:close()
    os.remove(from)
    os.remove(to)
  end)

  it("leaves parameters and gradients in fp32, and recomputes to the same bits", function()
    ps.manual_seed(3)
    local model, input = Block(), ps.randn { 2, 12, 32 }
    local target = ps.randint(0, 50, { 2, 12 }, { dtype = "int64" })
    local function pass()
      local loss = ps.autocast("bf16", model, input, target)
      loss:backward()
      return loss, gradients(model)
    end
    local loss, want = pass()
    model.recomputed = true
    local again, got = pass()
    assert.equal(loss:item(), again:item())
    for name, p in model:named_parameters() do
      assert.same({ "fp32", "fp32" }, { p:dtype(), want[name]:dtype() })
      assert.truthy(want[name]:equal(got[name]), name)
    end
    local exact = model(input, target)
    assert(loss:item() ~= exact:item() and math.abs(loss:item() - exact:item()) < 1e-2)
  end)

  it("converts a weight once per region, and again after backward or a change", function()
    local w = nn.Parameter(ps.randn { 512, 512 })
    local t = ps.randn { 4, 512 }
    local nbytes = 512 * 512 * 2
    local function grown(fn)
      ps.collect()
      local before = ps.memory().used
      fn()
      ps.collect()
      return math.floor((ps.memory().used - before) / nbytes + 0.5)
    end
    ps.autocast("bf16", function()
      local first, second
      assert.equal(1, grown(function() first, second = F.linear(t, w), F.linear(t, w) end))
      assert.truthy(first:equal(second))
      local loss = (first + second):sum()
      loss:backward()
      first, second = nil, nil                              -- luacheck: ignore 311
      local g = w:grad():clone()
      w:set_grad(nil)
      F.linear(t, w):sum():backward()                       -- another graph in the same region
      assert.truthy((w:grad() * 2):allclose(g))
      w:set_grad(nil)
      ps.no_grad(function()
        local before = F.linear(t, w)
        w:mul_(2)
        assert.truthy((before * 2):equal(F.linear(t, w)))
      end)
    end)
    assert.equal(0, grown(function()
      ps.autocast("bf16", function() F.linear(t, w):sum():backward() end)
      w:set_grad(nil)
    end))
  end)

  it("nests, ends with errors, and passes results on", function()
    assert.same({ 1, nil, "s" }, { ps.autocast("bf16", function(...) return ... end, 1, nil, "s") })
    ps.autocast("fp16", function()
      assert.equal("fp16", F.linear(x, x):dtype())
      ps.autocast("fp32", function() assert.equal("fp32", F.linear(x, x):dtype()) end)
      pcall(ps.autocast, "bf16", function() error "stop" end)
      assert.equal("fp16", F.linear(x, x):dtype())
    end)
    local err = fails(function() ps.autocast("bf16", function() error { code = 3 } end) end)
    assert.same({ code = 3 }, err)
    assert.equal("fp32", F.linear(x, x):dtype())
    fails(function() ps.autocast("bf16", function() F.linear(x, ps.ones { 3, 5 }) end) end, "linear")
    assert.equal("fp32", F.linear(x, x):dtype())
    fails(function() ps.autocast("cuda", function() end) end, 'the type is "cuda"', 'ps.autocast("bf16"')
    fails(function() ps.autocast("int32", function() end) end, 'the type is "int32"')
    fails(function() ps.autocast("bf16") end, "ps.autocast")
    fails(function() ps.autocast("bf16", function() F.binary_cross_entropy(v, v) end) end, "with_logits")
  end)

  it("works with an engine, whose parameters stay in fp32", function()
    ps.manual_seed(3)
    local input, target = ps.randn { 2, 12, 32 }, ps.randint(0, 50, { 2, 12 }, { dtype = "int64" })
    local plain = Block()
    local want = ps.autocast("bf16", plain, input, target):item()
    local model, optimizer = ps.initialize { model = plain, quiet = true, config = { plan_print = false,
      optimizer = { type = "AdamW", params = { lr = 1e-3 } } } }
    local losses = {}
    for i = 1, 3 do
      local loss = ps.autocast("bf16", model, input, target)
      losses[i] = loss:item()
      model:backward(loss)
      optimizer:step()
    end
    assert.equal(want, losses[1])
    assert(losses[3] < losses[1])
    for _, p in model:named_parameters() do assert.equal("fp32", p:dtype()) end
    model:close()
  end)
end)

describe("half types of a module and of tables", function()
  it("leave marked buffers as they are", function()
    local Net = nn.class "Net"
    function Net:init()
      self.fc = nn.Linear(2, 2)
      self:buffer("table", ps.ones { 3 }, { keep_dtype = true })
      self:buffer("other", ps.ones { 3 })
    end
    local net = Net():to "bf16"
    assert.same({ "fp32", "bf16", "bf16" }, { net.table:dtype(), net.other:dtype(), net.fc.weight:dtype() })
    net:buffer("table", ps.ones { 3 })                      -- registered again, without the mark
    assert.equal("fp16", net:half().table:dtype())
  end)

  it("are taken by F.rope", function()
    local t, angles = ps.randn { 1, 2, 5, 8 }, ps.rand { 1, 5, 4 }
    for _, dtype in ipairs { "bf16", "fp16" } do
      local cos, sin = angles:cos():to(dtype), angles:sin():to(dtype)
      assert.truthy(F.rope(t, cos, sin):equal(F.rope(t, cos:to "fp32", sin:to "fp32")))
      assert.equal(dtype, F.rope(t:to(dtype), cos, sin):dtype())
    end
  end)
end)
