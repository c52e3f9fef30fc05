-- SPDX-License-Identifier: BSD-3-Clause
-- The examples that define a model, in five layouts selected by a command-line option: losses of 20 steps and
-- gradients compared with plain memory, and with PyTorch from the same weights (if PS_TORCH_PYTHON names a Python with
-- PyTorch); the pictures; errors of wrong command lines.
local paths = require "ps.paths"
local ps = require "ps"
local check = require "spec.check_lib"
local ranks_lib = require "spec.ranks_lib"

local STEPS, BATCH, RATE = 20, 16, 1024                             -- RATE: learning rate of layout.lua's SGD
local folder = ranks_lib.folder()
teardown(function() ranks_lib.remove(folder) end)

local function run(command, code)
  local text, got = check.shell(("cd '%s' && OMP_NUM_THREADS=1 timeout 500 %s"):format(folder, command))
  assert.equal(code or 0, got, text)
  return text
end

-- Returns the losses that a command prints.
local function losses(command, steps)
  local text, list = run(command), {}
  for loss in text:gmatch "step %d+  loss (%S+)" do list[#list + 1] = tonumber(loss) end
  assert.equal(steps, #list, text)
  return list
end

local function near(want, got)
  for i = 1, #want do assert(math.abs(want[i] - got[i]) <= 1e-6, ("step %d: %.9f, %.9f"):format(i, want[i], got[i])) end
end

-- Returns the gradients by name, computed from the weights before and after one step of SGD.
local function gradients(before, after)
  local was, is, all = ps.load(folder .. "/" .. before), ps.load(folder .. "/" .. after), {}
  for name, t in pairs(was) do
    if not name:match "^%d" then all[name] = (t:double() - assert(is[name], name):double()) / RATE end
  end
  return all
end

local function same_gradients(want, got)
  local n = 0
  for name, t in pairs(want) do
    local off, most = (t - got[name]):abs():amax():item(), t:abs():amax():item()
    assert(off <= 1e-5 * most + 1e-9, ("%s: %g off, of %g"):format(name, off, most))
    n = n + 1
  end
  assert(n > 5, "gradients")
end

-- The example, its picture with height and width, and the fraction of the first loss below which the last loss must be.
local EXAMPLES = { { "denoiser", "denoised.pgm", 48, 160, 0.7 }, { "vit", "digits.pgm", 32, 160, 0.98 },
  { "two_towers", "towers.pgm", 160, 192, 0.8 }, { "moe", "experts.pgm", 48, 144, 0.9 },
  { "seq2seq", "sorted.pgm", 128, 128, 0.95 }, { "gpt", "rows.pgm", 96, 160, 0.95 } }
local LAYOUTS = { "chunks", "zero", "pipeline", "tensor" }

for _, case in ipairs(EXAMPLES) do
  local name, picture, height, width, share = unpack(case)

  local function command(layout, options)
    local alone = layout == "plain" or layout == "chunks"
    local launched = alone and "" or ("'%s/tools/launch.lua' --nproc-per-node 2 --no-prefix"):format(paths.root)
    return ("'%s' %s '%s/examples/%s.lua' --layout %s --batch %d --picture %s %s"):format(paths.exe, launched,
      paths.root, name, layout, BATCH, picture, options)
  end

  local function example(layout, more)
    return losses(command(layout, ("--steps %d %s"):format(STEPS, more or "")), STEPS)
  end

  -- Returns the gradients of one step in a layout.
  local function of_one_step(layout)
    local to = name .. "_" .. layout
    run(command(layout, ("--steps 1 --optimizer sgd --save %s"):format(to)))
    run(("'%s' '%s/tools/merge.lua' %s/step-00000001 --out %s.safetensors"):format(paths.exe, paths.root, to, to))
    return gradients(name .. "_first.safetensors", to .. ".safetensors")
  end

  describe(("examples/%s.lua"):format(name), function()
    local plain, grads
    lazy_setup(function()
      plain = example("plain", ("--trace %s_trace.safetensors"):format(name))
      run(command("plain", ("--steps 1 --trace %s_first.safetensors"):format(name)))
      grads = of_one_step "plain"
    end)

    it("learns, writes a picture, and has fewer than 80 lines", function()
      assert(plain[STEPS] < share * plain[1], plain[STEPS])
      local lines = {}
      for line in io.lines(folder .. "/" .. picture) do lines[#lines + 1] = line end
      assert.equal(("P2 %d %d 255"):format(width, height), lines[1])
      assert.equal(height + 1, #lines)
      assert.equal(width, select(2, lines[20]:gsub("%d+", "")))
      local _, source = check.read(("%s/examples/%s.lua"):format(paths.root, name)):gsub("\n", "")
      assert(source < 80, source)
    end)

    for _, layout in ipairs(LAYOUTS) do
      it("has the losses and gradients of plain memory: " .. layout, function()
        if layout ~= "chunks" and ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
        local got = example(layout)
        if layout == "chunks" then assert.same(plain, got) else near(plain, got) end
        same_gradients(grads, of_one_step(layout))
      end)
    end

    it("has PyTorch's losses and gradients", function()
      local python = os.getenv "PS_TORCH_PYTHON"
      if not python then return pending "PS_TORCH_PYTHON names no Python with PyTorch" end
      local peer = ("'%s' '%s/spec/program/%s_torch.py'"):format(python, paths.root, name)
      local got = losses(("%s %s_trace.safetensors adamw then %s_first.safetensors sgd %s_torch.safetensors"):format(
        peer, name, name, name), STEPS + 1)
      near(plain, got)
      same_gradients(gradients(name .. "_first.safetensors", name .. "_torch.safetensors"), grads)
    end)
  end)
end

describe("an example's command line", function()
  it("names the unknown option, and the number of ranks that a layout needs", function()
    local vit = ("'%s' '%s/examples/vit.lua' "):format(paths.exe, paths.root)
    check.fails(function() run(vit .. "--stride 2") end, "unknown option")
    assert.matches("--layout pipeline runs on 2 ranks, not on 1: psluajit launch.lua --nproc-per-node 2 vit.lua",
      run(vit .. "--layout pipeline", 1), nil, true)
  end)
end)
