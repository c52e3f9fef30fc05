-- SPDX-License-Identifier: BSD-3-Clause
-- docs/api.md is the output of tools/api_doc.lua, which refuses a public function that its annotations do not describe.
local paths = require "ps.paths"
local check = require "spec.check_lib"

describe("docs/api.md", function()
  local text = check.read(paths.root .. "/docs/api.md")

  it("is what psluajit tools/api_doc.lua writes", function()
    local p = assert(io.popen(("timeout 300 '%s' '%s/tools/api_doc.lua' --check 2>&1; echo $?"):format(paths.exe,
      paths.root)))
    assert.equal("0\n", p:read("*a"))
    p:close()
  end)

  it("has PyTorch's name of each op, in docs/pytorch.md", function()
    local p = assert(io.popen(("timeout 300 '%s' '%s/tools/pytorch_doc.lua' --check 2>&1; echo $?"):format(paths.exe,
      paths.root)))
    assert.equal("0\n", p:read("*a"))
    p:close()
  end)

  it("has the functions that scripts use", function()
    for _, call in ipairs { "ps.randn(", "ps.initialize(", "ps.catch_interrupts()", "t:matmul(b)", "t:keep()",
      "F.attention(q, k, v, options?)", "nn.Linear(", "nn.init.normal_(", "optim.AdamW(", "optimizer:step(",
      "sched.warmup_cosine(", "data.loader(", "train.run(", "checkpoints.load(", "model:backward(" } do
      assert.truthy(text:find("`" .. call, 1, true), call)
    end
    assert.truthy(text:find("| `rms_norm(x, w?)` | ", 1, true))
  end)

  it("names each public function that has no text, an undescribed parameter or an undescribed result", function()
    local module, script = os.tmpname(), os.tmpname()
    check.write(module, "return function(first, second) return first, second end\n")
    check.write(script, ([[
      require("ps").undescribed = dofile %q
      arg = { [0] = "api_doc.lua", "--check" }
      dofile %q]]):format(module, paths.root .. "/tools/api_doc.lua"))
    local p = assert(io.popen(("timeout 300 '%s' '%s' 2>&1; echo $?"):format(paths.exe, script)))
    local said = p:read("*a")
    p:close()
    os.remove(module)
    os.remove(script)
    assert.truthy(said:find("\n1\n$"), said)
    for _, words in ipairs { "it has no text", "its parameter first has no @param",
      "its parameter second has no @param", "it returns a value and has no @return" } do
      assert.truthy(said:find("ps.undescribed: " .. words, 1, true), said)
    end
  end)
end)
