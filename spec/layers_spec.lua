-- SPDX-License-Identifier: BSD-3-Clause
-- The layers of the source stay apart: runs tools/check_layers.lua over the tree, and over a tree with a breach.
local paths = require "ps.paths"

---@param tree string
---@return string output, integer code
local function check(tree)
  local p = assert(io.popen(("'%s' '%s/tools/check_layers.lua' '%s' 2>&1; echo \"|$?\""):format(paths.exe, paths.root,
    tree)))
  local out, code = p:read("*a"):match("^(.*)|(%d+)\n$")
  p:close()
  return out, tonumber(code)
end

describe("layers", function()
  it("are kept by the sources", function()
    local out, code = check(paths.root)
    assert.equal("", out)
    assert.equal(0, code)
  end)

  it("are what the tool looks at", function()
    local tree = os.tmpname()
    os.remove(tree)
    assert(os.execute(("mkdir -p %s/src/mem %s/src/ops %s/lua/ps %s/models"):format(tree, tree, tree, tree)) == 0)
    local function write(name, text)
      local f = assert(io.open(tree .. "/" .. name, "wb"))
      f:write(text)
      f:close()
    end
    write("src/mem/a.c", '#include "base/error.h"\n#include "tensor/tensor.h"\n')
    write("src/ops/b.c", '#include "mem/mem.h"\n#include "tensor/optable.h"\n')
    write("lua/ps/tensor.lua", 'local nn = require "ps.nn"\n')
    local out, code = check(tree)
    os.execute("rm -r " .. tree)
    assert.equal(1, code)
    assert.truthy(out:find("src/mem/a.c names tensor/tensor.h", 1, true))
    assert.truthy(out:find("src/ops/b.c names mem/mem.h", 1, true))
    assert.truthy(out:find("lua/ps/tensor.lua names ps.nn", 1, true))
    assert.equal(3, select(2, out:gsub("\n", "")))
  end)
end)
