-- SPDX-License-Identifier: BSD-3-Clause
-- examples/denoiser.lua and examples/vit.lua: 20 steps in plain memory, in chunks, on two ranks with ZeRO 3, and by
-- PyTorch from the same weights (where PS_TORCH_PYTHON names a Python that has it); the pictures.
local lfs = require "lfs"
local paths = require "ps.paths"
local check = require "spec.check_lib"
local ranks_lib = require "spec.ranks_lib"

local STEPS = 20
local folder = ranks_lib.folder()
teardown(function() ranks_lib.remove(folder) end)

-- The losses that a command prints.
local function losses(command)
  local p = assert(io.popen(("cd '%s' && OMP_NUM_THREADS=1 timeout 300 %s 2>&1; echo \"|$?\""):format(folder, command)))
  local text, code = p:read("*a"):match("^(.*)|(%d+)\n$")
  p:close()
  assert.equal("0", code, text)
  local list = {}
  for loss in text:gmatch "step %d+  loss (%S+)" do list[#list + 1] = tonumber(loss) end
  assert.equal(STEPS, #list, text)
  return list
end

local function near(want, got)
  for i = 1, STEPS do assert(math.abs(want[i] - got[i]) <= 1e-6, ("step %d: %.9f, %.9f"):format(i, want[i], got[i])) end
end

-- The example, its picture, that one's height, and the share of the first loss that the last one is below.
for _, case in ipairs { { "denoiser", "denoised.pgm", 48, 0.7 }, { "vit", "digits.pgm", 32, 0.97 } } do
  local name, picture, height, share = unpack(case)

  local function example(options, launched)
    return losses(("'%s' %s '%s/examples/%s.lua' --steps %d --batch 16 %s"):format(paths.exe, launched or "",
      paths.root, name, STEPS, options))
  end

  describe(("examples/%s.lua"):format(name), function()
    local plain
    lazy_setup(function() plain = example "--memory plain --trace first.safetensors" end)

    it("learns, and writes a picture", function()
      assert(plain[STEPS] < share * plain[1], plain[STEPS])
      local lines = {}
      for line in io.lines(folder .. "/" .. picture) do lines[#lines + 1] = line end
      assert.equal(("P2 160 %d 255"):format(height), lines[1])
      assert.equal(height + 1, #lines)
      assert.equal(160, select(2, lines[20]:gsub("%d+", "")))
      assert.truthy(table.concat(lines, " ", height - 14):find(" 255 ", 1, true))           -- clean digits below
    end)

    it("has in chunks the losses of plain memory", function() assert.same(plain, example "") end)

    it("has on two ranks with ZeRO 3 the losses of one", function()
      if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
      near(plain, example("--zero 3", ("'%s/tools/launch.lua' --nproc-per-node 2 --no-prefix"):format(paths.root)))
    end)

    it("has PyTorch's losses", function()
      local python = os.getenv "PS_TORCH_PYTHON"
      if not python then return pending "PS_TORCH_PYTHON names no Python with PyTorch" end
      assert(lfs.attributes(folder .. "/first.safetensors"), "a trace")
      local peer = ("%s/spec/program/%s_torch.py"):format(paths.root, name)
      near(losses(("'%s' '%s' first.safetensors"):format(python, peer)), plain)
    end)

    it("refuses an option that it has not", function()
      check.fails(function() example "--stride 2" end, "unknown option")
    end)
  end)
end
