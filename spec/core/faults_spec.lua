-- SPDX-License-Identifier: BSD-3-Clause
-- Fails the Nth request for memory, for N = 0, 1, 2, ... until the work succeeds. Each failure must be a clean ENOMEM:
-- nothing leaks, nothing is half done, and the engine continues with the same bits. If memory runs out, the engine's
-- Lua part collects garbage and tries once more, so it often survives a single failure (then the results must be the
-- same); two failures in a row, or all from the Nth on, become errors.
local ps = require "ps"
local gpt2 = require "models.gpt2"
local lfs = require "lfs"
local check = require "spec.check_lib"
local C, ctx = ps.C, ps.ctx

jit.off()                                                  -- compiled traces hold references to tensors

local MODES = { { "one failure", 1 }, { "two failures in a row", 2 }, { "nothing but failures", 2 ^ 50 } }
-- Long walks fail every third request. Each mode begins with another request, so the modes together fail every request.
-- With PS_FULL=1 each mode fails every request.
local STRIDE = os.getenv "PS_FULL" == "1" and 1 or #MODES
for i, mode in ipairs(MODES) do mode.first = (i - 1) % STRIDE end

--- Runs fn while `count` requests fail, beginning with request `nth`. Returns ok, the error, and whether any request
--- failed.
local function with_failures(nth, count, fn)
  C.ps_test_fail_alloc(nth, count)
  local ok, problem = pcall(fn)
  local hit = C.ps_test_fail_alloc_left() < 0
  C.ps_test_fail_alloc(-1, 0)
  return ok, problem, hit
end

local function assert_no_memory(problem, nth)
  if getmetatable(problem) ~= ps.Error or problem.name ~= "ENOMEM" then
    error(("request %d: not a clean ENOMEM: %s"):format(nth, tostring(problem)), 2)
  end
  assert.truthy(#problem.msg > 0 and problem.where:match("^src/[%w_/]+%.c:%d+$"))
end

-- An abandoned checkpointed segment is released when the next scope begins, and the previous one after another
-- collection. Collections take most of the time, so additional ones run only if the number of bytes is unexpected.
local function memory_used(expected)
  for _ = 1, 3 do
    collectgarbage()
    if ps.memory().used == expected then return expected end
    ps.scope(function() end)
  end
  collectgarbage()
  return ps.memory().used
end

-- Rounds after which the memory is counted.
local COUNTED = 8

--- Walks over the requests that `case.work(state)` makes: over all of them, or over every STRIDE-th one beginning with
--- request `first`. `case` has setup() -> state, work(state), and check(state, ok, nth), which is called with failures
--- disabled.
local function walk(count, case, first)
  local survived, failed, rounds = 0, 0, 0
  local depth = tonumber(C.ps_scope_depth(ctx))            -- loops that other specs left can have open scopes
  local before = memory_used()                             -- a round that ends with another number fails
  for nth = first or 0, 20000, first and STRIDE or 1 do
    local state = case.setup()
    local ok, problem, hit = with_failures(nth, count, function() case.work(state) end)
    if not hit then
      assert(ok, tostring(problem))
      case.check(state, true, nth)
      assert.truthy(nth > 0)
      state = nil                                          -- luacheck: ignore 311
      assert.equal(before, memory_used(before))
      return failed, survived
    end
    if ok then
      survived = survived + 1
    else
      failed = failed + 1
      assert_no_memory(problem, nth)
    end
    assert.truthy(ps.grad_enabled())
    assert.truthy(C.ps_scope_depth(ctx) <= depth + 1)      -- the step scope
    case.check(state, ok, nth)
    state, problem = nil, nil                              -- luacheck: ignore 311
    rounds = rounds + 1
    if rounds % COUNTED == 1 then
      local after = memory_used(before)
      if after ~= before then
        error(("request %d or one of the %d walks before: %d bytes leaked"):format(nth, COUNTED - 1, after - before))
      end
    end
  end
  error("it never succeeded")
end

describe("a training step without memory", function()
  local x, y, threads

  setup(function()
    threads = ps.threads()
    ps.set_threads(1)                                      -- since there are thousands of tiny steps
    ps.manual_seed(7)
    x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
    y = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
  end)
  teardown(function()
    x, y = nil, nil
    ps.set_threads(threads)
  end)

  local function step(state)
    local rng = ps.rng()
    rng.step, rng.op, rng.sample = state.optimizer.steps, 0, 0
    local loss = state.model(x, y)
    loss:backward()
    state.optimizer:step()
    state.optimizer:zero_grad()
    return loss:item()
  end

  local function cases(options)
    local function setup()
      ps.manual_seed(1)
      local config = { embd_pdrop = options.dropout, attn_pdrop = options.dropout, resid_pdrop = options.dropout }
      for key, value in pairs(gpt2.presets.tiny) do config[key] = value end
      local model = gpt2.new(config, { recompute = options.recompute, dtype = options.dtype })
      local optimizer = ps.optim.AdamW(ps.optim.groups(model, 0.1), { lr = 1e-2, max_norm = 1 })
      return { model = model, optimizer = optimizer }
    end
    local state, losses = setup(), {}
    for i = 1, 3 do losses[i] = step(state) end
    assert.truthy(losses[3] < losses[1])
    return {
      setup = setup,
      work = function(made) made.loss = step(made) end,
      -- Checks that the optimizer's step happened completely or not at all. The next step must have the loss of the
      -- corresponding step number.
      check = function(made, ok, nth)
        if made.loss then assert.equal(losses[1], made.loss) end
        if ok then assert.equal(1, made.optimizer.steps) end
        made.optimizer:zero_grad()
        for _ = 1, 2 do
          local number = made.optimizer.steps + 1
          local loss = step(made)
          if loss ~= losses[number] then
            error(("request %d: loss %d is %.17g, not %.17g"):format(nth, number, loss, losses[number]))
          end
        end
      end,
    }
  end

  for _, mode in ipairs(MODES) do
    it("survives " .. mode[1], function() walk(mode[2], cases {}, mode.first) end)
  end
  it("survives two failures in a row with recompute", function()
    walk(2, cases { recompute = true }, MODES[2].first)
  end)
  it("survives in bf16 with fp32 masters and dropout", function()
    walk(2 ^ 50, cases { dtype = "bf16", dropout = 0.1 }, MODES[3].first)
  end)

  it("survives on the reference backend", function()
    ps.set_default_device "ref"
    local x_cpu, y_cpu = x, y
    x, y = x:to "ref", y:to "ref"
    local ok, problem = pcall(walk, 2, cases {}, MODES[1].first)
    ps.set_default_device "cpu"
    x, y = x_cpu, y_cpu
    assert(ok, problem)
  end)

  it("survives a memory limit", function()
    local case, margin, refused = cases { recompute = true }, 1024, 0
    while true do
      local before = memory_used()
      local state = case.setup()
      ps.set_memory_limit(memory_used() + margin)
      local ok, problem = pcall(case.work, state)
      ps.set_memory_limit(0)
      if not ok then
        assert_no_memory(problem, margin)
        assert.truthy(problem.msg:match("the limit set is [%d.]+ MiB; raise it"), problem.msg)
        refused = refused + 1
      end
      case.check(state, ok, margin)
      state, problem = nil, nil                            -- luacheck: ignore 311
      assert.equal(before, memory_used())
      if ok then break end
      margin = math.floor(margin * 1.2)
    end
    assert.truthy(refused > 5)
  end)
end)

describe("functions and hooks without memory", function()
  local Gate = ps.autograd.Function "Gate"
  function Gate.forward(context, x, w)
    local s = x:sigmoid()
    context:save_for_backward(x, s)
    return x * s * w, x * 2
  end
  function Gate.backward(context, dy, dz)
    local x, s = context:saved_tensors()
    return dy * (s + x * s * (1 - s)) + dz * 2, dy * x * s
  end

  local function setup()
    ps.manual_seed(1)
    local state = { x = ps.randn({ 4, 8 }, { requires_grad = true }), w = ps.randn({ 4, 8 }, { requires_grad = true }) }
    state.handle = state.w:register_hook(function(g) return g * 2 end)
    return state
  end

  local function work(state)
    local x, w = state.x, state.w
    local y, z = Gate(x * 1, w)
    y:register_hook(function(g) return g * 3 end)
    local loss = ps.recompute(function(a, b) return Gate(a, b) * w end, y, z):sum()
    local gx, gy = ps.autograd.grad(loss, { x, y }, { retain_graph = true })
    loss:backward { retain_graph = true }
    loss:backward()
    return { gx:tolist(), gy:tolist(), x:grad():tolist(), w:grad():tolist() }
  end

  for _, mode in ipairs(MODES) do
    it("survive " .. mode[1], function()
      local first = setup()
      local want = work(first)
      first = nil                                            -- luacheck: ignore 311
      walk(mode[2], { setup = setup, work = function(state) state.found = work(state) end,
        check = function(state)
          if state.found then assert.same(want, state.found) end
          state.x:set_grad(nil)
          state.w:set_grad(nil)
          assert.same(want, work(state))
          state.handle:remove()
        end }, mode.first)
    end)
  end
end)

describe("files without memory", function()
  local folder

  setup(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(lfs.mkdir(folder))
  end)
  teardown(function() os.execute("rm -r " .. folder) end)

  local function files()
    local names = {}
    for name in lfs.dir(folder) do
      if not name:match("^%.%.?$") then names[#names + 1] = name end
    end
    table.sort(names)
    return table.concat(names, " ")
  end

  local function contents(name) return assert(check.read(folder .. "/" .. name), name) end

  local function put(name, text)
    check.write(folder .. "/" .. name, text)
    return folder .. "/" .. name
  end

  local function walk_all(case)
    for _, mode in ipairs(MODES) do walk(mode[2], case) end
  end

  it("are saved and read, or are unchanged", function()
    local path = folder .. "/t.safetensors"
    local function tensors(value)
      local list = { step = ps.full({}, value, { dtype = "int64" }) }
      for i = 1, 5 do list["w" .. i] = ps.full({ 30, i }, value) end
      return list
    end
    ps.safetensors.save(path, tensors(1), { format = "pt" })
    local old = contents "t.safetensors"
    ps.safetensors.save(path, tensors(2), { format = "pt" })
    local new = contents "t.safetensors"
    walk_all {
      setup = function()
        put("t.safetensors", old)
        return { tensors = tensors(2) }
      end,
      work = function(state) ps.safetensors.save(path, state.tensors, { format = "pt" }) end,
      check = function(_, ok)
        assert.equal("t.safetensors", files())
        assert.truthy(contents "t.safetensors" == (ok and new or old))
      end,
    }
    walk_all {
      setup = function() return {} end,
      work = function(state)
        local file = ps.safetensors.open(path)
        for _, name in ipairs(file:names()) do state[name] = file:tensor(name) end
        file:close()
      end,
      check = function(state, ok)
        if ok then assert.equal(2, state.w5[{ 29, 4 }]:item()) end
      end,
    }
    os.remove(path)
  end)

  it("are checkpoints that stay intact", function()
    local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
    ps.manual_seed(1)
    local model = gpt2.new "tiny"
    local optimizer = ps.optim.AdamW(model, { lr = 1e-3 })
    local function train()
      model(x, x):backward()
      optimizer:step()
      optimizer:zero_grad()
    end
    train()
    ps.checkpoints.save(folder .. "/run", { model = model, optimizer = optimizer })
    train()
    walk(2 ^ 50, {
      setup = function() return {} end,
      work = function() ps.checkpoints.save(folder .. "/run", { model = model, optimizer = optimizer }) end,
      check = function(_, ok)
        local number = 0
        for name in lfs.dir(folder .. "/run") do
          assert.truthy(name:match("^%.%.?$") or name == "latest" or name:match("^step%-%d+%.safetensors$"))
          number = number + 1
        end
        assert.truthy(number >= 4)
        local file = ps.safetensors.open(ps.checkpoints.find(folder .. "/run"))
        if ok then assert.truthy(file.path:match("step%-00000002")) end
        assert.equal(256, file:shape("transformer.wte.weight")[1])
        file:close()
      end,
    })
    walk(2 ^ 50, {
      setup = function() return {} end,
      work = function() ps.checkpoints.load(folder .. "/run", { model = model, optimizer = optimizer }) end,
      check = function() end,
    })
    assert.equal(2, optimizer.steps)
    os.execute(("rm -r '%s/run'"):format(folder))
  end)

  it("are token shards and loaders", function()
    local text = put("text.txt", ("All work and no play. "):rep(200))
    local path = folder .. "/t.bin"
    walk_all {
      setup = function()
        os.remove(path)
        return {}
      end,
      work = function() ps.data.encode_file(text, path, ps.tokenizer.bytes()) end,
      check = function(_, ok)
        assert.equal(ok and "t.bin text.txt" or "text.txt", files())
        if ok then assert.equal(4400, ps.data.tokens(path):count()) end
      end,
    }
    ps.data.encode_file(text, path, ps.tokenizer.bytes())
    walk_all {
      setup = function() return {} end,
      work = function(state)
        ps.scope(function()                                -- an unfinished loader loop leaves a scope open
          local loader = ps.data.loader { shards = { path, path }, batch = 4, seq = 32, vocab = 256, seed = 3 }
          state.x = loader:next()
          state.position = loader:position()
        end)
      end,
      check = function(state, ok)
        if ok then
          assert.same({ epoch = 0, batch = 1 }, state.position)
          assert.same({ 4, 32 }, state.x:shape())
        end
      end,
    }
    os.remove(path)
    os.remove(text)
  end)
end)
