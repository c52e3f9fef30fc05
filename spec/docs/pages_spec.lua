-- SPDX-License-Identifier: BSD-3-Clause
-- The pages whose listings are whole scripts: all ```lua blocks of a page, one after the other, run without an error.
local paths = require "ps.paths"
local check = require "spec.check_lib"

--- Returns the Lua listings of a page as one script, on the same lines as in the page.
local function script_of(text)
  local lines, inside = {}, false
  for line in text:gmatch("([^\n]*)\n") do
    if line:match("^```") then
      inside = line == "```lua"
      line = ""
    end
    lines[#lines + 1] = inside and line or ""
  end
  return table.concat(lines, "\n") .. "\n"
end

-- Pages whose listings print output.
local PRINTING = { "first_hour", "encoder", "evaluation" }

describe("the listings of", function()
  for _, page in ipairs { "bmtrain", "models", "planning", "pretrained", "tensors", "inspecting",
    "autograd", "conversations", "data", "adapters", "migrating", "how_memory_works",
    "from_scratch", "extending" } do
    it("docs/" .. page .. ".md run", function()
      local script = script_of(check.read(("%s/docs/%s.md"):format(paths.root, page)))
      local _, asserts = script:gsub("%f[%w]assert%(", "")
      assert(asserts >= 5, "the page shows nothing")
      assert.equal("", (check.run("OMP_NUM_THREADS=2", script)))
    end)
  end

  for _, page in ipairs(PRINTING) do
    it("docs/" .. page .. ".md run, and print", function()
      local script = script_of(check.read(("%s/docs/%s.md"):format(paths.root, page)))
      local _, asserts = script:gsub("%f[%w]assert%(", "")
      assert(asserts >= 5, "the page shows nothing")
      local name = os.tmpname()
      check.write(name, script)
      local said, code = check.shell(("OMP_NUM_THREADS=2 timeout 300 '%s' '%s'"):format(paths.exe, name))
      os.remove(name)
      assert.equal(0, code, said)
      assert.matches("%d", said)
    end)
  end
end)
