-- SPDX-License-Identifier: BSD-3-Clause
-- Listings of guides that are parts of scripts: each page's listings run, with what they leave out, and with a small
-- model instead of the one that they name. Every page with listings is run here, or by pages_spec or remedies_spec.
local check = require "spec.check_lib"
local lfs = require "lfs"
local paths = require "ps.paths"
local ranks_lib = require "spec.ranks_lib"

local folder

setup(function()
  folder = ranks_lib.folder()
  check.write(folder .. "/my.txt", ("a text of some lines\n"):rep(200))
end)
teardown(function() ranks_lib.remove(folder) end)

-- Lua text that runs before the listings of all pages. `loader` gives batches, to a loop over itself and to one over an
-- epoch.
local BEFORE = [[
local ps = require "ps"
local gpt2 = require "models.gpt2"
ps.manual_seed(1)
local function make_model() return gpt2.new("char", { dropout = 0 }) end
local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
local y, loader, left = x, nil, 2
loader = setmetatable({ epoch = function()
  local n = 0
  return function() n = n + 1 if n <= 2 then return x, y end end
end }, { __call = function() left = left - 1 if left >= 0 then return { x, y } end end })
]]
local TEXT = 'loader = ps.data.loader { file = "my.txt", batch = 2, seq = 16, vocab = 256 }\n'
local PLAIN = TEXT .. "local model = make_model()\nlocal optimizer = ps.optim.AdamW(model, { lr = 1e-3 })\n"
local INITIALIZE = "local model, optimizer = ps.initialize { model_func = make_model, config = config }\n"
local STEP = "optimizer:zero_grad()\nmodel:backward(model(x, y))\noptimizer:step()\nassert(model:close() == nil)\n"

-- Names and sizes that are replaced on every page.
local SMALLER = { { '"gpt2%-xl"', '"char"' }, { '"gpt2%-large"', '"char"' }, { '"6GiB"', '"64MiB"' },
  { '"64GiB"', '"300MiB"' }, { '"/var/tmp"', '"."' }, { '"/scratch"', '"."' }, { "\n%.%.%.\n", "\n" },
  { ", 100([,%)])", ", 10%1" } }

-- before, after: lines around all listings. replace: further replacements. wrap[i]: text around listing i.
local PAGES = {
  ["docs/checkpoints.md"] = { before = PLAIN, after = 'assert(checkpoints.find "out")\n' },
  ["docs/config.md"] = { after = INITIALIZE .. [[
x = ps.randint(0, 256, { 4, 16 }, { dtype = "int32" })
for _ = 1, 8 do
  model:backward(model(x, x))
  optimizer:step()
end
assert(model:close() == nil)
]] },
  ["docs/cuda.md"] = { replace = { { '"cuda"', '"sim"' }, { '"gpt2", {', '"char", {' },
    { ', %.%.%. }, %.%.%. }', " }, model_func = make_model }" }, { "batch = 8, seq = 1024", "batch = 2, seq = 16" } } },
  ["docs/gguf.md"] = { before = [[
local lib = require "spec.tokenizer_lib"
local source = lib.gpt2({ { "a", "b" } }, { ["tokenizer_config.json"] = { eos_token = "<|endoftext|>" } })
local tiny = require("models.llama").new({ vocab_size = 258, hidden_size = 32, intermediate_size = 64,
  num_hidden_layers = 1, num_attention_heads = 2, num_key_value_heads = 2, max_position_embeddings = 64 })
tiny:save_pretrained(source)
for _, name in ipairs { "model", "model-q4", "base" } do
  ps.from_pretrained(source, { quiet = true }):save_gguf(name .. ".gguf", { type = "q8_0" })
end
]], after = "lib.remove(source)\n" },
  ["docs/memory.md"] = { after = "assert(#ids >= 10 and loss > 0)\n" },
  ["docs/monitoring.md"] = { before = PLAIN, replace = { { "%.%.%., callbacks",
    "model = model, optimizer = optimizer, loader = loader, steps = 3, quiet = true, callbacks" } } },
  ["docs/optimizers.md"] = { wrap = { nil, { "local schedule = {\n", "}\n" }, { "local groups = {\n", "}\n" } },
    after = STEP .. [[
local config = { optimizer = { type = "AdamW", params = { lr = 1e-3 } }, scheduler = schedule.scheduler }
local model, optimizer = ps.initialize { model_func = make_model, config = config, param_groups = groups.param_groups }
]] .. STEP },
  ["docs/pipeline.md"] = { replace = { { "stages = 4, schedule = \"interleaved\", virtual_stages = 2", "stages = 1" },
    { "steps = 8", "steps = 2" } } },
  ["docs/profiling.md"] = { before = PLAIN .. [[
local function train_step()
  optimizer:zero_grad()
  model(x, y):backward()
  optimizer:step()
end
]], after = 'assert(io.open "profile.json")\n' },
  ["docs/tensor_parallel.md"] = { before = "local GPT2Model = {}\n", replace = { { "size = 4", "size = 1" } },
    after = 'local own = require("ps.nn").class "Own"\nown.tensor_parallel = GPT2Model.tensor_parallel\n' },
  ["docs/zero.md"] = { after = INITIALIZE .. STEP },
  ["examples/README.md"] = { replace = { { "2000 do", "2 do" }, { "%% 100 == 0", "== 2" } } },
}
-- Pages whose listings other specs run.
local ELSEWHERE = { ["docs/errors.md"] = true }
for name in check.read(paths.root .. "/spec/docs/pages_spec.lua"):gmatch '"([%l_]+)"' do
  ELSEWHERE["docs/" .. name .. ".md"] = true
end

local function script_of(page)
  local of, parts, n = PAGES[page], { BEFORE, PAGES[page].before or "" }, 0
  for listing in check.read(paths.root .. "/" .. page):gmatch "\n```lua\n(.-\n)```" do
    n = n + 1
    for _, list in ipairs { SMALLER, of.replace or {} } do
      for _, pair in ipairs(list) do listing = ("\n" .. listing):gsub(pair[1], pair[2]):sub(2) end
    end
    local wrap = of.wrap and of.wrap[n] or { "", "" }
    parts[#parts + 1] = wrap[1] .. listing .. wrap[2]
  end
  parts[#parts + 1] = of.after
  return table.concat(parts)
end

describe("the listings of", function()
  for page in pairs(PAGES) do
    it(page .. " run, with what they leave out", function()
      check.write(folder .. "/page.lua", script_of(page))
      local said, code = check.shell(("cd '%s' && OMP_NUM_THREADS=1 timeout 300 '%s' page.lua"):format(folder,
        paths.exe))
      assert.equal(0, code, said)
    end)
  end

  it("every page run", function()
    for _, where in ipairs { "docs", "examples" } do
      for name in lfs.dir(paths.root .. "/" .. where) do
        local page = where .. "/" .. name
        if name:find "%.md$" and check.read(paths.root .. "/" .. page):find("\n```lua\n", 1, true) then
          assert(PAGES[page] or ELSEWHERE[page], page .. " has listings that no spec runs")
        end
      end
    end
  end)
end)
