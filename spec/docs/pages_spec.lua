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

describe("the listings of", function()
  for _, page in ipairs { "bmtrain", "models", "planning", "pretrained", "tensors", "inspecting",
    "autograd", "conversations", "data", "adapters" } do
    it("docs/" .. page .. ".md run", function()
      local script = script_of(check.read(("%s/docs/%s.md"):format(paths.root, page)))
      local _, asserts = script:gsub("%f[%w]assert%(", "")
      assert(asserts >= 5, "the page shows nothing")
      assert.equal("", (check.run("OMP_NUM_THREADS=2", script)))
    end)
  end
end)
