-- SPDX-License-Identifier: BSD-3-Clause
-- Run by psluajit_faults (spec/faults/walk_spec.lua): fails the Nth call of a file, for N = 0, 1, 2, ... while a model
-- or an adapter is written over an older one, until the work makes no more calls. Arguments: a folder, the work (a key
-- of WORKS), an action, and how many calls in a row have it. Each failure is an error that names the cause and the
-- file. Afterwards the older files are whole, or the new ones are. If a rename failed, the folder may also be refused
-- by name. It never loads as a mixture. Prints the numbers of calls, failures and successes.
local ps = require "ps"
local ffi = require "ffi"
local merge = require "ps.lora.merge_folder"
local read_file = require "ps.core.read_file"
local check = require "spec.check_lib"
local run = require "tools.faults.run"
ffi.cdef "void faults_arm(const char *plan); int64_t faults_happened(void); int64_t faults_calls(void);"
local C = ffi.C

local folder, work, action, count = arg[1], arg[2], arg[3], tonumber(arg[4])
local CAUSES = { EIO = "Input/output error", ENOSPC = "No space left on device", EROFS = "Read-only file system" }
local function at(name) return folder .. "/" .. name end

-- Returns a model of a kind, 1 or 2, which differ in their values and in one setting that changes results.
local function base(kind)
  ps.manual_seed(kind)
  require("models.llama").new { vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64, initializer_range = 0.3,
    pad_token_id = 0, rope_theta = 1000 * kind }:save_pretrained(at "base" .. kind)
  return ps.from_pretrained(at "base" .. kind, { quiet = true })
end

local function wrapped(kind)
  local model = ps.lora.wrap(base(1), { r = 2, alpha = 3 * kind })
  ps.manual_seed(10 + kind)
  ps.no_grad(function()
    for _, p in model:named_parameters() do if p:needs_grad() then p:copy_(ps.randn(p:shape()) * 0.2) end end
  end)
  return model
end

local ids = ps.randint(1, 39, { 2, 9 }, { dtype = "int32" }):keep()
local function bits(model)
  return check.bytes(ps.no_grad(function() return model({ input_ids = ids }).logits end))
end

local function read_gguf(path) return assert(read_file(path .. ".gguf")) end
local function load(path) return bits(ps.from_pretrained(path, { quiet = true })) end
local function load_adapter(path)
  return bits(ps.lora.load(ps.from_pretrained(at "base1", { quiet = true }), path))
end

-- save(made, path) writes kind 1 or 2, whose `made` is make(kind); load(path) returns something that tells them apart.
local SHARDS = { max_shard_size = "12KB" }
local WORKS = {
  folder = { make = base, save = function(made, path) made:save_pretrained(path) end, load = load },
  shards = { make = base, save = function(made, path) made:save_pretrained(path, SHARDS) end, load = load },
  gguf = { make = base, save = function(made, path) made:save_gguf(path .. ".gguf", { type = "f32", name = "x" }) end,
    load = read_gguf },
  adapter = { make = wrapped, save = function(made, path) made:save_pretrained(path) end, load = load_adapter },
  adapter_gguf = { make = wrapped, save = function(made, path) made:save_gguf(path .. ".gguf", { adapter = true }) end,
    load = read_gguf },
  merged = { make = wrapped, load = load,
    save = function(made, path) made:save_pretrained(path, { merged = true }) end },
  merge_folder = { make = function(kind)
    wrapped(kind):save_pretrained(at "adapter" .. kind)
    return kind
  end, save = function(kind, path) ps.lora.merge_folder(at "base1", at "adapter" .. kind, path, SHARDS) end,
    load = load },
  convert = { make = function(kind)
    base(kind)
    return kind
  end, save = function(kind, path) merge.convert(at "base" .. kind, path .. ".gguf", { type = "f32", name = "x" }) end,
    load = read_gguf },
}

-- NAME.old can remain if its removal failed. The next save replaces it.
local function leftovers(nth, ok)
  for _, path in ipairs { folder, at "out" } do
    for _, name in ipairs(run.names(path)) do
      if name:find("tmp", 1, true) or name:find "%.new$" or not ok and name:find "%.old$" then
        error(("call %d: %s was left behind"):format(nth, name), 0)
      end
    end
  end
end

local W = assert(WORKS[work], "no work has this name")
local made, contents = { W.make(1), W.make(2) }, {}
for kind = 1, 2 do
  os.execute(("rm -rf '%s' '%s.gguf'"):format(at "out", at "out"))
  W.save(made[kind], at "out")
  contents[kind] = W.load(at "out")
end
assert(contents[1] ~= contents[2])

local failures, survived, refused, old = 0, 0, 0, 2
for nth = 0, 5000 do
  local new = 3 - old
  C.faults_arm(("0:any@%d+%d=%s"):format(nth, count, action))
  local ok, problem = pcall(W.save, made[new], at "out")
  local hit, calls = C.faults_happened() > 0, tonumber(C.faults_calls())
  C.faults_arm("")
  problem = tostring(problem)
  if nth >= calls then
    assert(ok, problem)
    print(("%d calls, %d failed, %d survived, %d refused"):format(nth, failures, survived, refused))
    os.exit(0)
  end
  if not ok then failures = failures + 1 elseif hit then survived = survived + 1 end
  local cause = CAUSES[action:match "^[%w_]+"]
  if not ok and not (cause and problem:find(cause, 1, true) and problem:find(folder, 1, true)) then
    error(("call %d: %s"):format(nth, problem), 0)
  end
  leftovers(nth, ok)
  local fine, found = pcall(W.load, at "out")
  local is = fine and (found == contents[1] and 1 or found == contents[2] and 2) or nil
  if ok and is ~= new or fine and not is then
    error(("call %d: neither the older files nor the new ones are whole: %s"):format(nth, problem), 0)
  end
  if not fine then
    found = tostring(found)
    if action == "ENOSPC" or not found:find(folder, 1, true) then
      error(("call %d: %s; then: %s"):format(nth, problem, found), 0)
    end
    refused = refused + 1
    W.save(made[new], at "out")
    is = new
  end
  old = is
end
error("it never ended", 0)
