-- SPDX-License-Identifier: BSD-3-Clause
-- Layers over signals and images: initialisation, wrong calls, threads, chunks and recompute, and the running
-- statistics of batch norm, which are updated once per micro-batch. spec/oracle compares values and gradients with
-- PyTorch's.
local ps = require "ps"
local lib = require "spec.check_lib"
local fails, bytes = lib.fails, lib.bytes
local nn, F = ps.nn, ps.F

local function image(...) return ps.randn { ... } end

describe("convolutions", function()
  it("begin as PyTorch's do: uniform in +-1 / sqrt(fan in)", function()
    for _, case in ipairs { { nn.Conv2d(8, 16, 3, { groups = 2 }), 4 * 9, { 16, 4, 3, 3 } },
                            { nn.Conv1d(6, 9, 5), 30, { 9, 6, 5 } },
                            { nn.ConvTranspose2d(8, 16, { 3, 2 }, { groups = 4 }), 4 * 6, { 8, 4, 3, 2 } } } do
      local layer, fan_in, shape = unpack(case)
      local bound = 1 / math.sqrt(fan_in)
      assert.same(shape, layer.weight:shape())
      for _, p in ipairs { layer.weight, layer.bias } do
        local most = p:abs():amax():item()
        assert(most <= bound and most > bound / 2, most)
      end
    end
    assert.is_nil(nn.Conv2d(1, 1, 1, { bias = false }).bias)
  end)

  it("have values computed by hand", function()
    local y = F.conv2d(lib.count(1, 1, 3, 3), ps.ones { 1, 1, 2, 2 }, ps.tensor { 10 })
    lib.is({ { { { 18, 22 }, { 30, 34 } } } }, y)
    lib.is({ { 3, 5 } }, F.conv1d(lib.count(1, 4), ps.ones { 1, 1, 2 }, nil, { dilation = 2, padding = 0 })
      :add(ps.tensor { { 1, 1 } }))
    lib.is({ { { 0, 1, 1, 2, 2 } } }, F.conv_transpose1d(lib.count(1, 1, 3), ps.ones { 1, 1, 2 }, nil,
      { stride = 2, padding = 1, output_padding = 1 }))
    assert.same({ 2, 4, 7, 7 }, F.conv2d(image(2, 3, 7, 7), image(4, 3, 2, 5), nil, { padding = "same" }):shape())
  end)

  it("name the mismatch, with both numbers", function()
    local x, w = image(2, 3, 5, 5), image(4, 3, 3, 3)
    fails(function() F.conv2d(image(2, 4, 5, 5), w) end, "x has 4 channels, but w needs 3")
    fails(function() F.conv2d(x, image(4, 3, 7, 3)) end, "kernel of height 7 spans 7 elements", "the 5 of the padded")
    fails(function() F.conv2d(x, w, nil, { dilation = 3 }) end, "spans 7 elements (dilation 3)")
    fails(function() F.conv2d(x, w, nil, { groups = 2 }) end, "3 input channels cannot be divided into 2 groups")
    fails(function() F.conv2d(x, image(4, 1, 1, 1), nil, { groups = 3 }) end, "4 output channels", "3 groups")
    fails(function() F.conv2d(x, w, image(3)) end, "bias must be float [4]")
    fails(function() F.conv2d(x, w, nil, { stride = 0 }) end, "stride is 0", "from 1 on")
    fails(function() F.conv2d(x, w, nil, { padding = { 1, 2, 3 } }) end, "padding has 3 numbers; it takes 2")
    fails(function() F.conv2d(x, w, nil, { padding = "same", stride = 2 }) end, "\"same\" takes stride 1", "it is 2")
    fails(function() F.conv2d(x, w, nil, { padding = "full" }) end, "padding is 'full'")
    fails(function() F.conv2d(image(5, 5), w) end, "not a tensor of 2 dimensions, [5, 5]")
    fails(function() F.conv1d(image(2, 3, 5), w) end, "not a tensor of 4 dimensions")
    fails(function() F.conv2d(x, w:half()) end, "of one float type")
    fails(function() nn.Conv2d(3, 4, 3, { groups = 2 }) end, "3 input channels cannot be divided into 2 groups")
    fails(function() nn.Conv2d(4, 5, 3, { groups = 2 }) end, "5 output channels cannot be divided into 2 groups")
    fails(function() F.conv_transpose2d(x, w) end, "x has 3 channels, but w needs 4")
    fails(function() F.conv_transpose2d(image(1, 4, 2, 2), w, nil, { padding = 3 }) end, "-2 elements along the height")
    fails(function() F.conv_transpose2d(image(1, 4, 2, 2), w, nil, { stride = 2, output_padding = 2 }) end,
      "output_padding is 2", "less than the stride, 2")
    fails(function()
      ps.ops.conv_transpose(image(1, 4, 2, 2), w, nil, { 2, 2 }, { 1, 1 }, { 0, 0, 0, 0 }, 1, { 7, 5 })
    end, "cannot have 7 elements along the height; it must have 5 to 6")
  end)

  it("have the same bits on one thread and on several, and the second call repeats them", function()
    local script = [[
      local ps = require "ps"
      ps.manual_seed(3)
      local h = {}
      for _, of in ipairs { { 5, 3, 17, 8, 3, 1 }, { 33, 16, 9, 32, 3, 2 }, { 2, 64, 8, 64, 1, 1 },
                            { 9, 8, 6, 8, 3, 8 } } do
        local N, C, S, O, K, g = unpack(of)
        local x = ps.randn({ N, C, S, S }):requires_grad(true)
        local w = ps.randn({ O, C / (g == 8 and 8 or 1), K, K }):requires_grad(true)
        local b = ps.randn({ O }):requires_grad(true)
        for _ = 1, 2 do
          local y = ps.F.conv2d(x, w, b, { padding = 1, stride = g == 2 and 2 or 1, groups = g == 8 and 8 or 1 })
          y:square():sum():backward()
          for _, t in ipairs { y, x:grad(), w:grad(), b:grad() } do
            h[#h + 1] = ("%.17g %.17g"):format(t:double():sum():item(), t:double():square():sum():item())
          end
        end
      end
      io.write(table.concat(h, "\n"))]]
    local path, seen = os.tmpname(), {}
    lib.write(path, script)
    for _, threads in ipairs { 1, 2, 3, 7 } do
      local p = assert(io.popen(("OMP_NUM_THREADS=%d timeout 100 '%s' '%s' 2>&1"):format(threads,
        require("ps.paths").exe, path)))
      seen[#seen + 1] = p:read("*a")
      p:close()
    end
    os.remove(path)
    assert.truthy(seen[1]:find("^%-?%d"), seen[1])
    for i = 2, #seen do assert.equal(seen[1], seen[i]) end
  end)
end)

describe("pooling, padding and interpolation", function()
  it("have values counted by hand", function()
    local x = lib.count(1, 1, 4, 4)
    lib.is({ { { { 5, 7 }, { 13, 15 } } } }, F.max_pool2d(x, 2))
    lib.is({ { { { 2.5, 4.5 }, { 10.5, 12.5 } } } }, F.avg_pool2d(x, 2))
    local _, index = F.max_pool2d(x, 2, { return_indices = true })
    lib.is({ { { { 5, 7 }, { 13, 15 } } } }, index, "int64")
    lib.is({ { { 1, 3, 4 } } }, F.max_pool1d(lib.count(1, 1, 5), 3, { stride = 2, padding = 1, ceil_mode = true }))
    lib.is({ { { 0, 1, 2, 2, 2 } } }, F.pad(lib.count(1, 1, 3), { 0, 2 }, "replicate"))
    lib.is({ { { 2, 1, 0, 1, 2, 1 } } }, F.pad(lib.count(1, 1, 3), { 2, 1 }, "reflect"))
    lib.is({ { { 0, 0, 1, 1 } } }, F.interpolate(lib.count(1, 1, 2), { scale_factor = 2 }))
    lib.is({ { { 0, 0.25, 0.75, 1 } } }, F.interpolate(lib.count(1, 1, 2), { size = 4, mode = "linear" }))
    lib.is({ { { { 7.5 } } } }, F.adaptive_avg_pool2d(x, 1))
    lib.is({ { { 0.5, 2.5, 4.5 } } }, F.adaptive_avg_pool1d(lib.count(1, 1, 6), 3))
    lib.is({ { 0.5, 2, 3.5 } }, F.adaptive_avg_pool1d(lib.count(1, 5), 3))      -- windows overlap
    assert.same({ 3, 20 }, nn.Flatten()(image(3, 4, 5)):shape())
  end)

  it("name the mismatch, with both numbers", function()
    local x = image(1, 2, 4, 4)
    fails(function() F.max_pool2d(x, 5) end, "the kernel spans 5 elements along the height, more than the 4")
    fails(function() F.max_pool2d(x, 2, { padding = 2 }) end, "padding is 2", "half of the kernel, 2")
    fails(function() F.max_pool1d(image(1, 2, 1), 2, { dilation = 2, padding = 1 }) end,
      "window 0 along the width has only padding", "dilation 2, padding 1, 1 elements")
    fails(function() F.avg_pool2d(x, 2, { divisor_override = 0 }) end, "divisor_override is 0")
    fails(function() F.avg_pool1d(x, 2) end, "not a tensor of 4 dimensions")
    fails(function() F.adaptive_avg_pool2d(x, 0) end, "output's size is 0", "from 1 on")
    fails(function() F.adaptive_avg_pool1d(image(1, 2, 5), 2.5) end, "F.adaptive_avg_pool1d", "output's size is 2.5")
    fails(function() F.pad(x, { 1 }) end, "the padding has 1 numbers")
    fails(function() F.pad(x, { 4, 0 }, "reflect") end, "padding 4 along the width by reflection is too large; it can "
      .. "be at most 3")
    fails(function() F.pad(x, { 5, 0 }, "circular") end, "padding 5", "at most 4")
    fails(function() F.pad(x, { 1, 1, 1, 1, 1, 1 }, "reflect") end, "one or two dimensions, not 3")
    fails(function() F.pad(x, { -5, 0 }) end, "cut more than the 4 elements of dimension 3")
    fails(function() F.pad(x, { 1, 1 }, "reflect", 3) end, "takes no value")
    fails(function() F.interpolate(x, {}) end, "either size or scale_factor")
    fails(function() F.interpolate(x, { size = 3, mode = "linear" }) end, "use \"bilinear\"")
    fails(function() F.interpolate(x, { size = 3, mode = "bicubic" }) end, "mode is 'bicubic'")
    fails(function() F.interpolate(x, { size = 3, align_corners = true }) end, "align_corners is for")
    fails(function() F.interpolate(x, { scale_factor = 0.1 }) end, "leaves 0 of 4 elements")
  end)
end)

describe("norms over channels", function()
  it("name the mismatch, with both numbers", function()
    fails(function() nn.BatchNorm2d(3)(image(2, 4, 2, 2)) end, "the input has 4 channels, but num_features is 3")
    fails(function() nn.BatchNorm2d(3)(image(2, 3)) end, "takes [N, C, H, W], not a tensor of 2 dimensions")
    fails(function() nn.BatchNorm1d(3)(image(1, 3)) end, "more than 1 value per channel", "[1, 3]")
    fails(function() nn.GroupNorm(3, 4) end, "4 channels cannot be divided into 3 groups")
    fails(function() F.group_norm(image(2, 4), 3) end, "4 channels cannot be divided into 3 groups")
    fails(function() F.batch_norm(image(2, 4)) end, "needs running_mean and running_var")
    fails(function() nn.BatchNorm1d(3, { momentum = true }) end, "momentum is true")
  end)

  it("have running statistics by momentum, or of all batches", function()
    local a, b = ps.tensor { { 1 }, { 3 } }, ps.tensor { { 5 }, { 9 } }          -- means 2 and 7, variances 2 and 8
    local moving, mean = nn.BatchNorm1d(1, { momentum = 0.5 }), nn.BatchNorm1d(1, { momentum = false })
    for _, x in ipairs { a, b } do moving(x) mean(x) end
    lib.is({ 4 }, moving.running_mean)
    lib.is({ 4.75 }, moving.running_var)
    lib.is({ 4.5 }, mean.running_mean)
    lib.is({ 5 }, mean.running_var)
    assert.equal(2, tonumber(mean.num_batches_tracked:item()))
    mean:eval()
    local y = mean(ps.tensor { { 4.5 } })
    assert.equal(0, y:item())
    assert.equal(2, tonumber(mean.num_batches_tracked:item()))
    ps.no_grad(function() mean:train() mean(a) end)
    assert.equal(3, tonumber(mean.num_batches_tracked:item()))
  end)

  it("are updated once if backward recomputes the forward, also within another segment", function()
    local x = image(4, 3, 5, 5)
    local plain, again, inner = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    plain(x):square():sum():backward()
    ps.recompute(again, x):square():sum():backward()
    ps.recompute(function(t) return ps.recompute(inner, t) * 1 end, x):square():sum():backward()
    for _, other in ipairs { again, inner } do
      assert.equal(1, tonumber(other.num_batches_tracked:item()))
      assert.equal(bytes(plain.running_mean), bytes(other.running_mean))
      assert.equal(bytes(plain.running_var), bytes(other.running_var))
      assert.equal(bytes(plain.weight:grad()), bytes(other.weight:grad()))
    end
  end)
end)

-- -- engines ----------------------------------------------------------------------------------------------------------
local Net = nn.class("Net")
function Net:init()
  self.conv = nn.Conv2d(1, 8, 3, { padding = 1 })
  self.norm = nn.BatchNorm2d(8)
  self.down = nn.Conv2d(8, 8, 3, { stride = 2, padding = 1, groups = 2 })
  self.group = nn.GroupNorm(2, 8)
  self.up = nn.ConvTranspose2d(8, 4, 4, { stride = 2, padding = 1 })
  self.sync = nn.SyncBatchNorm(4)
  self.head = nn.Linear(4 * 4 * 4, 3)
end
function Net:body(x)
  x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
  x = F.interpolate(self.group(self.down(x)), { scale_factor = 2, mode = "bilinear" })
  return F.avg_pool2d(self.sync(self.up(x)), 2)
end
function Net:forward(x, target)
  x = self.recomputed and ps.recompute(function(t) return self:body(t) end, x) or self:body(x)
  return F.mse_loss(self.head(F.pad(x, { 0, 0, 0, 0 }):flatten(1)), target)
end

local function train(config, how)
  how = how or {}
  local all = { plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-2 } }, overlap_optimizer = false,
    gradient_accumulation_steps = how.micro or 1 }
  for key, value in pairs(config) do all[key] = value end
  ps.manual_seed(7)
  local model, optimizer = ps.initialize { quiet = true, config = all, model_func = function()
    local net = Net()
    rawset(net, "recomputed", how.recomputed)
    return net
  end }
  ps.manual_seed(8)
  local parts = {}
  for step = 1, how.steps or 3 do
    for _ = 1, how.micro or 1 do
      local loss = model(image(6, 1, 8, 8), image(6, 3))
      parts[#parts + 1] = ("%.17g"):format(loss:item())
      model:backward(loss)
    end
    if how.before then how.before(model, optimizer, step) end
    optimizer:step()
  end
  local names = {}
  for name in pairs(model:state_dict()) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do parts[#parts + 1] = name .. " " .. bytes(model:state_dict()[name]) end
  return table.concat(parts, "\n"), model
end

describe("a model of images in an engine", function()
  it("has the bits of plain memory in chunks with recompute; statistics are updated once per micro-batch", function()
    local want, plain = train({ memory = "plain" }, { micro = 2, steps = 2 })
    plain:close()
    local again = { recomputed = true }
    for _, case in ipairs { { {}, {} }, { {}, again }, { { memory = "plain" }, again } } do
      local config, how = case[1], case[2]
      how.micro, how.steps = 2, 2
      local got, model = train(config, how)
      assert(got == want, "other bits")
      assert.equal(4, tonumber(model:state_dict()["norm.num_batches_tracked"]:item()))
      model:close()
    end
  end)

  it("restores statistics when a step is abandoned", function()
    local _, model = train({}, { steps = 1 })
    local function statistics()
      local state, parts = model:state_dict(), {}
      for _, name in ipairs { "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
                              "sync.running_var" } do
        parts[#parts + 1] = bytes(state[name])
      end
      return table.concat(parts, "|")
    end
    local before = statistics()
    local loss = model(image(6, 1, 8, 8), image(6, 3))
    model:backward(loss)
    assert(statistics() ~= before, "the forward moves them")
    model:zero_grad()
    assert(statistics() == before, "zero_grad() after backward gives the step up")
    local ok = pcall(function()
      model:backward(model(image(6, 1, 8, 8), image(6, 3)))
      model(image(6, 1, 7, 7), image(6, 3))                                -- the head does not fit
    end)
    assert.is_false(ok)
    model:zero_grad()
    assert(statistics() == before, "an error")
    model:close()
  end)

  it("restores statistics when an overflow skips the step", function()
    local model, optimizer
    ps.manual_seed(7)
    model, optimizer = ps.initialize { quiet = true, model_func = function() return Net() end,
      config = { plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-2 } },
        bf16 = { enabled = true, check_grad_overflow = true } } }
    local before = bytes(model:state_dict()["norm.running_mean"])
    local loss = model(image(6, 1, 8, 8):to("bf16"), image(6, 3):to("bf16"))
    model:backward(loss * (1 / 0))
    local info = optimizer:step()
    assert.is_true(info.skipped)
    assert.equal(before, bytes(model:state_dict()["norm.running_mean"]))
    assert.equal(0, tonumber(model:state_dict()["norm.num_batches_tracked"]:item()))
    loss = model(image(6, 1, 8, 8):to("bf16"), image(6, 3):to("bf16"))
    model:backward(loss)
    assert.is_false(optimizer:step().skipped)
    assert.equal(1, tonumber(model:state_dict()["norm.num_batches_tracked"]:item()))
    model:close()
  end)
end)
