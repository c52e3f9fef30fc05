-- SPDX-License-Identifier: BSD-3-Clause
-- Kernels of the device cuda that choose a method by shape, type and alignment. Every method is compared with ref, on
-- the emulator (spec/emulate), or with PS_CUDA_REAL=1 on this machine's GPU. spec/backend/cuda_spec.lua runs the table
-- of cases.
local cuda = require "spec.cuda_lib"

-- Runs a script that must succeed on the device.
local function runs(script)
  local lacking = cuda.lacks_kernels()
  if lacking then return pending(lacking) end
  local out, code = cuda.child(cuda.NEAR .. [[
    local function list(...)
      local all = {}
      for i = 1, select("#", ...) do all[i] = (select(i, ...)) end
      return all
    end
  ]] .. script .. "\nall_near() print 'fine'")
  assert.truthy(code == 0 and out:find("fine\n", 1, true), out)
end

describe("kernels of the device cuda" .. (cuda.REAL and "" or ", on the processor,"), function()
  it("normalise rows of every width, aligned or not, and compute their gradients", function()
    runs [[
      -- Rows, width, with add, with w. With bf16 a thread has 8 columns; 13 and 20 are not multiples of 8, and 2056 and
      -- 4104 are large.
      for _, case in ipairs { { 1, 24, true, true }, { 67, 40, false, true }, { 133, 96, true, false },
                              { 9, 1600, true, true }, { 5, 2056, true, true }, { 3, 4104, false, true },
                              { 21, 13, true, true }, { 10, 20, false, true } } do
        local N, C, adds, weighs = unpack(case)
        for _, types in ipairs { { "bf16", "bf16" }, { "fp32", "fp32" }, { "bf16", "fp32" }, { "fp64", "fp64" } } do
          local dtype, w_type = unpack(types)
          local what = ("%d x %d in %s with %s"):format(N, C, dtype, w_type)
          local function make(...) return ps.randn({ ... }, { dtype = dtype, device = "ref" }) end
          local x, dy, add = make(N, C) + 0.5, make(N, C), adds and make(N, C) or nil
          local w, b = weighs and make(C):to { dtype = w_type } or nil, weighs and make(C):to { dtype = w_type } or nil
          local wide = dtype == "fp64" and x or x:to { dtype = "fp32" }
          local mean = wide:mean(1)
          local rstd = ((wide - mean:unsqueeze(1)):square():mean(1) + 1e-5):rsqrt()
          local root = (wide:square():mean(1) + 1e-5):rsqrt()
          local results = {}
          for _, device in ipairs { "ref", "cuda" } do
            local function there(t) return t and t:to(device) or nil end
            local y = ps.ops.layer_norm(there(x), there(w), there(b), 1e-5)
            local given = { there(mean), there(rstd) }
            local function back(want_w)
              return ps.ops.layer_norm_backward(there(dy), there(x), there(w), given[1], given[2], there(add), want_w)
            end
            local dx, dw, db = back(1)
            local only_dx = back(0)
            local z = ps.ops.rms_norm(there(x), there(w), 1e-5)
            local ex, ew = ps.ops.rms_norm_backward(there(dy), there(x), there(w), there(root), there(add), 1)
            results[device] = list(y, dx, dw, db, only_dx, z, ex, ew)
          end
          for i, want in pairs(results.ref) do
            near(results.cuda[i], want, dtype == "bf16" and 0.02 or dtype == "fp32" and 5e-6 or 1e-12,
              ("result %d of %s"):format(i, what))
          end
        end
      end
    ]]
  end)

  it("sum the losses of a vocabulary in one pass over each row, or in several", function()
    runs [[
      -- Positions, vocabulary size, width. 300 bf16 elements are not a multiple of 16 bytes, and 304 are. 131 positions
      -- need two panels.
      for _, case in ipairs { { 131, 300, 16 }, { 9, 304, 8 }, { 140, 1003, 8 }, { 7, 21, 8 }, { 40, 5000, 8 } } do
        local N, V, C = unpack(case)
        for _, dtype in ipairs { "bf16", "fp32" } do
          local x = ps.randn({ N, C }, { dtype = dtype, device = "ref" })
          local w = ps.randn({ V, C }, { dtype = dtype, device = "ref" })
          local target = ps.randint(0, V, { N }, { dtype = "int32", device = "ref" })
          target:narrow(0, 3, 2):fill_(-100)
          local results = {}
          for _, device in ipairs { "ref", "cuda" } do
            local a, b = x:to(device):clone():requires_grad(true), w:to(device):clone():requires_grad(true)
            local loss = ps.F.lm_loss(a, b, target:to(device))
            loss:backward()
            results[device] = { loss, a:grad(), b:grad() }
          end
          for i, what in ipairs { "loss", "dx", "dw" } do
            near(results.cuda[i], results.ref[i], dtype == "bf16" and 0.02 or 1e-5,
              ("%s of %d x %d in %s"):format(what, N, V, dtype))
          end
        end
      end
      for _, V in ipairs { 256, 301, 4104 } do
        for _, dtype in ipairs { "bf16", "fp32", "fp64" } do
          local logits = ps.randn({ 6, V }, { dtype = dtype, device = "ref" }) * 4
          local target = ps.tensor({ 1, V - 1, -100, 0, 7, 5 }, { dtype = "int64", device = "ref" })
          logits:narrow(0, 4, 1):narrow(1, 8, V - 8):fill_(-math.huge)           -- excludes all but eight tokens
          logits:narrow(0, 5, 1):copy_(logits:narrow(0, 5, 1) - 200)
          local results = {}
          for _, device in ipairs { "ref", "cuda" } do
            local a = logits:to(device):clone():requires_grad(true)
            local losses = ps.F.cross_entropy(a, target:to(device), { reduction = "none" })
            losses:sum():backward()
            results[device] = { losses, a:grad() }
          end
          for i = 1, 2 do
            near(results.cuda[i], results.ref[i], dtype == "bf16" and 0.02 or 1e-5, i .. ": " .. V .. " in " .. dtype)
          end
          local bad = logits:to("cuda"):clone()
          bad:narrow(0, 1, 1):narrow(1, 20, 1):fill_(0 / 0)
          bad:narrow(0, 3, 1):fill_(-math.huge)
          local losses = ps.F.cross_entropy(bad, target:to("cuda"), { reduction = "none" }):tolist()
          for i, x in ipairs(losses) do assert((x ~= x) == (i == 2 or i == 4), V .. ": " .. i .. " is " .. x) end
        end
      end
    ]]
  end)

  it("sum the gradients of table rows that few, many or all positions selected", function()
    runs [[
      -- Positions, rows, columns, and the number of positions that select row 3. The row is hot from 65 positions on,
      -- and sorted separately from 513 on.
      for _, case in ipairs { { 90, 40, 24, 0 }, { 200, 7, 16, 66 }, { 1500, 11, 40, 600 }, { 700, 5, 13, 700 } } do
        local n, V, C, same = unpack(case)
        local index = ps.randint(0, V, { n }, { dtype = "int32", device = "ref" })
        if same > 0 then index:narrow(0, n - same, same):fill_(3) end
        for _, dtype in ipairs { "fp32", "bf16", "fp64" } do
          local what = ("%d into %d x %d in %s"):format(n, V, C, dtype)
          local bound = dtype == "bf16" and 0.01 or dtype == "fp32" and 1e-5 or 1e-12
          local dy, base = ps.randn({ n, C }, { dtype = dtype, device = "ref" }), ps.randn({ V, C }, { device = "ref" })
          local results = {}
          for _, device in ipairs { "ref", "cuda" } do
            local w = base:to(device):to { dtype = dtype }:clone():detach():requires_grad(true)
            local function once() (ps.F.embedding(index:to(device), w) * dy:to(device)):sum():backward() end
            once()
            local first = w:grad():clone()
            once()                                            -- the second call adds to existing values
            local wide = ps.ops.embedding_backward(index:to(device), dy:to(device), V, 0, ps.C.PS_F32)
            results[device] = { first, w:grad(), dtype ~= "fp64" and wide or nil }
          end
          for i, want in ipairs(results.ref) do near(results.cuda[i], want, i == 3 and 1e-5 or bound, what) end
        end
      end
    ]]
  end)

  it("update with Adam and square with the cpu's bits for all types and addresses", function()
    runs [[
      for _, types in ipairs { { "fp32", "fp32" }, { "bf16", "bf16" }, { "fp16", "fp16" }, { "bf16", "fp32" },
                               { "fp32", "bf16" } } do
        local p_type, g_type = unpack(types)
        for _, numel in ipairs { 3, 1024, 5001 } do
          for off = 0, 1 do                                   -- an address that is not a multiple of 16 bytes
            local function make(dtype, scale)
              return (ps.randn({ numel + 1 }, { device = "cpu" }) * scale):abs():to { dtype = dtype }
            end
            local param, grad = make(p_type, 1), make(g_type, 0.1)
            local master = p_type == "fp32" and param or param:to { dtype = "fp32" }
            local m, v, results = make("fp32", 0.01), make("fp32", 0.001), {}
            for _, device in ipairs { "cpu", "cuda" } do
              local function there(t) return t:to(device):clone() end
              local all = { there(param), there(master), there(grad), there(m), there(v) }
              if p_type == "fp32" then all[2] = all[1] end
              for i = 1, 5 do all[i] = all[i]:narrow(0, off, numel) end
              ps.ops.adam_(all, off, 1e-2, 0.9, 0.999, 1e-8, 0.1, 0.5, 0.1, 0.3)
              local square = ps.ops.sq_norms { all[3] }
              for i = 1, 5 do all[i] = all[i]:to("cpu"):tolist() end
              all[6] = square:to("cpu"):tolist()
              results[device] = all
            end
            for i = 1, 5 do
              for k = 1, numel do
                assert(results.cpu[i][k] == results.cuda[i][k], ("%s, %s: %d of %d is %.9g, not %.9g"):format(p_type,
                  g_type, i, k, results.cuda[i][k], results.cpu[i][k]))
              end
            end
            local want = results.cpu[6][1]
            assert(math.abs(results.cuda[6][1] - want) <= 1e-14 * want, "squares")
          end
        end
      end
      -- The sum's bits do not depend on the address.
      local x = ps.randn({ 9001 }, { device = "cuda" })
      local moved = ps.zeros({ 9002 }, { device = "cuda" }):narrow(0, 1, 9001)
      moved:copy_(x)
      assert(ps.ops.sq_norms { x }:item() == ps.ops.sq_norms { moved }:item())
    ]]
  end)
end)
