-- SPDX-License-Identifier: BSD-3-Clause
-- Frozen weights that stay in the user's safetensors file: an engine with a disk tier reads them from there and never
-- writes them. Values are those of plain memory, also if the script writes into such a weight; a file that changes is
-- an error.
local ffi = require "ffi"
local lfs = require "lfs"
local ps = require "ps"
local chunks = require "ps.memory.chunks"
local check = require "spec.check_lib"
local handle = require "ps.nn.handle"
local paths = require "ps.paths"
local fails = check.fails

local MIB = 2 ^ 20
local folder, base, ids, model

setup(function()
  folder = os.tmpname()
  os.remove(folder)
  os.execute("mkdir -p " .. folder)
  base = folder .. "/base"
  ps.manual_seed(3)
  require("models.llama").new("tiny", { hidden_size = 128, intermediate_size = 704, num_hidden_layers = 16,
    pad_token_id = 0, initializer_range = 0.1 }):save_pretrained(base)           -- 21 MiB
  ids = ps.randint(3, 60, { 2, 9 }, { dtype = "int32" }):keep()
end)
teardown(function() os.execute("rm -rf " .. folder) end)
after_each(function()
  if model then model:close() end
  model = nil
end)

local function disk(limit) return { path = folder, limit = limit * MIB } end

-- Opens an engine whose model has a frozen base. made(model) selects the parameters to train.
local function open(mmap, memory, made)
  if model then                                            -- its plain tensors would count below
    local before = model:parameters()
    model:close()
    for _, p in ipairs(before) do if memory ~= "plain" then p:release() end end
  end
  model = nil
  ps.manual_seed(11)
  local optimizer
  model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, memory = memory,
    chunk_size = memory ~= "plain" and 2 ^ 18 or nil, optimizer = { type = "AdamW", params = { lr = 1e-2 } } },
    model_func = function() return made(ps.from_pretrained(base, { quiet = true, mmap = mmap })) end }
  return optimizer
end

local function adapted(dora)
  return function(m)
    ps.lora.wrap(m, { r = 2, use_dora = dora })
    ps.no_grad(function()
      for _, p in m:named_parameters() do if p:needs_grad() then p:copy_(p + ps.randn(p:shape()) * 0.1) end end
    end)
    return m
  end
end

local function losses(optimizer, steps)
  local list = {}
  for i = 1, steps or 3 do
    local loss = model { input_ids = ids, labels = ids }.loss
    list[i] = ("%.17g"):format(loss:item())
    model:backward(loss)
    optimizer:step()
  end
  return list
end

ffi.cdef [[
  int spec_frozen_open(const char *path, int flags, ...) __asm__("open");
  int spec_frozen_close(int fd) __asm__("close");
  int spec_frozen_fadvise(int fd, long at, long n, int advice) __asm__("posix_fadvise64");
  void *spec_frozen_mmap(void *at, size_t n, int protection, int flags, int fd, long offset) __asm__("mmap");
  int spec_frozen_munmap(void *at, size_t n) __asm__("munmap");
  int spec_frozen_mincore(void *at, size_t n, unsigned char *resident) __asm__("mincore");
  int spec_frozen_fsync(int fd) __asm__("fsync");
]]

-- Returns the bytes of a file that the system's page cache holds. With `drop`, drops them first.
local function cached(path, drop)
  local n, fd = lfs.attributes(path, "size"), ffi.C.spec_frozen_open(path, 0)
  if drop then
    ffi.C.spec_frozen_fsync(fd)
    ffi.C.spec_frozen_fadvise(fd, 0, 0, 4)                          -- POSIX_FADV_DONTNEED
  end
  local pages, count = ffi.new("unsigned char[?]", n / 4096 + 1), 0
  local at = ffi.C.spec_frozen_mmap(nil, n, 1, 1, fd, 0)            -- PROT_READ, MAP_SHARED
  assert(ffi.C.spec_frozen_mincore(at, n, pages) == 0)
  for i = 0, math.ceil(n / 4096) - 1 do count = count + pages[i] % 2 end
  ffi.C.spec_frozen_munmap(at, n)
  ffi.C.spec_frozen_close(fd)
  return 4096 * count
end

local function tier(name)
  for _, row in ipairs(chunks.tiers()) do if row.name == name then return row end end
end

describe("a frozen base in an engine with a disk tier", function()
  it("is read from its own file and never written", function()
    for _, dora in ipairs { false, true } do
      local want = losses(open(nil, "plain", adapted(dora)))
      local got = losses(open("auto", { host = (dora and 18 or 10) * MIB, disk = disk(4) }, adapted(dora)))
      assert.same(want, got)
      local at = tier "disk"
      assert(at.chunks < 4 * MIB)
      local tiers = handle.of(model).plan.forecast.tiers
      assert(tiers[#tiers].peak < 4 * MIB, tiers[#tiers].peak)  -- the peak of the disk's file, as the plan prints it
      if not os.getenv "PS_STRESS" then assert(at.bytes_down < 2 * MIB, at.bytes_down) end       -- what is trained
      assert(at.bytes_up > 3 * 10 * MIB, at.bytes_up)      -- more than half of it is read again in each step
    end
    fails(function() losses(open(nil, { host = 10 * MIB, disk = disk(4) }, adapted(false))) end, "disk")
  end)

  it("is not in memory twice while it is copied, if there is no disk tier", function()
    ps.manual_seed(3)
    local large = folder .. "/large"
    local made = require("models.llama").new("tiny", { vocab_size = 2 ^ 15, hidden_size = 512, head_dim = 64,
      num_attention_heads = 4, num_key_value_heads = 2, tie_word_embeddings = true, pad_token_id = 0 })
    made:save_pretrained(large)                            -- 64 MiB
    local function peak(path)
      check.write(folder .. "/peak.lua", [[
local ps = require "ps"
local model = ps.initialize { quiet = true, config = { plan_print = false, optimizer = { type = "AdamW" } },
  model_func = function()
    return ps.lora.wrap(ps.from_pretrained(arg[1], { quiet = true, mmap = true, dtype = "auto" }), { r = 2 })
  end }
print(ps.peak_rss())]])
      local out = check.shell(("'%s' '%s' '%s'"):format(paths.exe, folder .. "/peak.lua", path))
      return assert(tonumber(out:match "(%d+)%s*$"), out)
    end
    local more = peak(large) - peak(base)                  -- the other base has 21 MiB
    os.execute("rm -r '" .. large .. "'")
    assert(more > 32 * MIB and more < 75 * MIB, more)
  end)

  it("has the plan of a dry run, which reads no weights either", function()
    local script = folder .. "/plan.lua"
    check.write(script, ([[
local ps = require "ps"
local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, chunk_size = 2 ^ 18,
  memory = { host = "10MiB", disk = { path = "%s", limit = "4MiB" } }, optimizer = { type = "AdamW" } },
  model_func = function()
    return ps.lora.wrap(ps.from_pretrained("%s", { quiet = true, mmap = "auto" }), { r = 2 })
  end }
local ids = ps.zeros({ 2, 9 }, { dtype = "int32" })
local loss = model({ input_ids = ids, labels = ids }).loss
model:backward(loss)
optimizer:step()
local forecast, stats = require("ps.nn.handle").of(model).plan.forecast, require("ps.memory.chunks").tiers()[2]
print(("%%d %%d %%d"):format(forecast.fetched[1], forecast.tiers[1].peak, stats.peak))
]]):format(folder, base))
    local function read(command)                           -- without stderr, which may have notes
      local p = assert(io.popen(command:format(paths.exe, script)))
      local text = p:read "*a"
      p:close()
      return text
    end
    local plan = require("cjson").decode(read "'%s' tools/plan.lua --json --find nothing '%s'")
    assert.is_true(plan.fits)
    assert.is_true(plan.process.besides < 64 * MIB, plan.process.besides)
    local fetched, peak, disk_peak = read("'%s' '%s'"):match "^(%d+) (%d+) (%d+)"
    assert.same({ tonumber(fetched), tonumber(disk_peak) }, { plan.links[1].up, plan.tiers[2].peak })
    assert.is_true(math.abs(tonumber(peak) - plan.tiers[1].peak) < 0.03 * plan.tiers[1].peak)
  end)

  it("leaves no pages in the system's page cache", function()
    local path = base .. "/model.safetensors"
    if cached(path, true) > 0 then return pending "needs a file system with a page cache that can be dropped" end
    local optimizer = open("auto", { host = 10 * MIB, disk = disk(4) }, adapted(false))
    losses(optimizer, 1)
    cached(path, true)                                              -- of the next steps only, not of loading
    losses(optimizer, 2)
    assert(tier("disk").bytes_up > 3 * 10 * MIB)
    local bytes = cached(path)
    local direct = jit.arch == "x64" and ffi.C.spec_frozen_open(path, 0x4000) or -1         -- O_DIRECT
    if direct >= 0 then ffi.C.spec_frozen_close(direct) end
    assert(bytes <= (direct >= 0 and 2 ^ 16 or 5 * MIB), ("%d bytes are in the page cache"):format(bytes))
  end)

  it("keeps what a script writes, and trains what is not frozen", function()
    local function some(m) return m:freeze { "layers.*" }:thaw { "input_layernorm", "layers.3.mlp" } end
    local function double(m)
      ps.no_grad(function()
        for name, p in m:named_parameters() do if name:find "layers.5.mlp.up_proj" then p:copy_(p * 2) end end
      end)
      return m
    end
    local function all(optimizer)
      local list = losses(optimizer, 2)
      double(model)
      for _, loss in ipairs(losses(optimizer, 2)) do list[#list + 1] = loss end
      return list
    end
    for _, made in ipairs { some, function(m) return some(double(m)) end } do
      local want = all(open(nil, "plain", made))
      assert.same(want, all(open("auto", { host = 14 * MIB, disk = disk(24) }, made)))
    end
  end)

  it("is an error if the file changes", function()
    local optimizer = open("auto", { host = 10 * MIB, disk = disk(4) }, adapted(false))
    losses(optimizer, 1)
    local path = base .. "/model.safetensors"
    local text = check.read(path)
    local f = assert(io.open(path, "r+b"))
    f:seek("set", #text - 4)
    f:write "xxxx"
    f:close()
    fails(function() losses(optimizer, 1) end, path, "was written to")
    check.write(path, text)
  end)

  it("is the same on two ranks", function()
    local script = ([[
      local ps = require "ps"
      ps.init_distributed { quiet = true, seed = 7 }
      local x = ps.randint(3, 60, { 2, 9 }, { dtype = "int32" }):keep()
      local config = { plan_print = false, chunk_size = 2 ^ 18, train_micro_batch_size_per_gpu = 2,
        memory = { host = (arg[2] == "map" and (arg[1] == "tensor" and 11 or 14) or 40) * 2 ^ 20,
          disk = { path = "%s", limit = (arg[2] == "map" and (arg[1] == "tensor" and 6 or 4) or 64) * 2 ^ 20 } },
        optimizer = { type = "AdamW", params = { lr = 1e-2 } } }
      if arg[1] == "pipeline" then config.pipeline = { stages = 2 }
      elseif arg[1] == "tensor" then config.tensor_parallel = { size = 2 }
      else config.zero_optimization = { stage = tonumber(arg[1]) } end
      local model, optimizer = ps.initialize { quiet = true, config = config, model_func = function()
        return ps.lora.wrap(ps.from_pretrained("%s", { quiet = true, mmap = arg[2] == "map" and "auto" or nil }),
          { r = 2 })
      end }
      for _ = 1, 2 do
        for out in model:micro_batches { input_ids = x, labels = x } do
          ps.print_rank(("%%.17g"):format(out.loss:item()))
          model:backward(out.loss)
        end
        optimizer:step()
      end
      for _, row in ipairs(require("ps.memory.chunks").tiers()) do
        assert(arg[2] ~= "map" or row.bytes_down == 0 and (row.name ~= "disk" or row.bytes_up > 2 * 4 * 2 ^ 20))
      end
      model:close()
    ]]):format(folder, base)
    check.write(folder .. "/ranks.lua", script)
    for _, how in ipairs { "0", "3", "pipeline", "tensor" } do
      local function run(map)
        local out, code = check.shell(("OMP_NUM_THREADS=1 '%s' '%s/tools/launch.lua' --nproc-per-node 2 "
          .. "'%s/ranks.lua' %s %s"):format(paths.exe, paths.root, folder, how, map))
        assert.equal(0, code, out)
        return out
      end
      assert.equal(run "copy", run "map")
    end
  end)
end)
