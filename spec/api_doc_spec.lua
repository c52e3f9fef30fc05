-- SPDX-License-Identifier: BSD-3-Clause
-- docs/api.md is what tools/api_doc.lua writes, and says something of every function.
local paths = require "ps.paths"
local check = require "spec.check_lib"

describe("docs/api.md", function()
  local text = check.read(paths.root .. "/docs/api.md")

  it("is what psluajit tools/api_doc.lua writes", function()
    local p = assert(io.popen(("timeout 60 '%s' '%s/tools/api_doc.lua' --check 2>&1; echo $?"):format(paths.exe,
      paths.root)))
    assert.equal("0\n", p:read("*a"))
    p:close()
  end)

  it("has what scripts use", function()
    for _, call in ipairs { "ps.randn(", "ps.initialize(", "ps.catch_interrupts()", "t:matmul(b)", "t:keep()",
      "F.attention(q, k, v, options?)", "nn.Linear(", "nn.init.normal_(", "optim.AdamW(", "optimizer:step(",
      "sched.warmup_cosine(", "data.loader(", "train.run(", "checkpoints.load(", "model:backward(" } do
      assert.truthy(text:find("`" .. call, 1, true), call)
    end
    assert.truthy(text:find("| `rms_norm(x, w?)` | ", 1, true))
  end)

  it("says something of every function but forward", function()
    local missing = {}
    for call, after in text:gmatch("\n%- %*%*`([^`]*)`%*%*[^\n]*\n(%s*)") do
      if #after < 2 and not call:match("^module:forward") then missing[#missing + 1] = call end
    end
    assert.same({}, missing)
  end)
end)
