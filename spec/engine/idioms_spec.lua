-- SPDX-License-Identifier: BSD-3-Clause
-- Idioms of training loops (idioms_lib.lua) on five layouts: in one process without and with chunks, and on two ranks
-- with ZeRO 3, a pipeline and tensor parallelism. Each does what PyTorch does, or fails and names the right call.
local lib = require "spec.ranks_lib"
local idioms = require "spec.idioms_lib"

-- Lines "layout | name | what is wrong": all names are there, and nothing is wrong.
local function check(layout, text)
  local n = 0
  for name, wrong in text:gmatch("\n?" .. layout .. " | ([^\n]-) | ([^\n]*)") do
    n = n + 1
    assert(wrong == "", ("%s: %s: %s"):format(layout, name, wrong))
  end
  local want = 0
  for _, idiom in ipairs(idioms.IDIOMS) do
    if not idiom.on or idiom.on:find(layout, 1, true) then want = want + 1 end
  end
  assert(n == want, ("%s: %d of %d idioms ran: %s"):format(layout, n, want, text))
end

describe("idioms of training loops", function()
  local folder
  setup(function() folder = lib.folder() end)
  teardown(function() lib.remove(folder) end)

  for _, layout in ipairs { "plain", "chunks" } do
    it("in one process: " .. layout, function()
      local f = assert(io.popen(("'%s' -e 'require(\"spec.idioms_lib\").run(\"%s\")' 2>&1"):format(
        require("ps.paths").exe, layout)))
      local text = f:read "*a"
      f:close()
      check(layout, text)
    end)
  end
  for _, layout in ipairs { "zero3", "pipeline", "tensor" } do
    it("on two ranks: " .. layout, function()
      if lib.no_gloo() then return pending(lib.no_gloo()) end
      local out = lib.run(folder, 2, lib.begin(folder) .. ("require('spec.idioms_lib').run('%s')"):format(layout))
      check(layout, out[0].text)
      assert(out[1].code == 0 and not out[1].text:find " | ", out[1].text)
    end)
  end
end)
