-- SPDX-License-Identifier: BSD-3-Clause
-- Short messages between ranks: numbers, records by name, and texts, whose hashes are sent first.
local lib = require "spec.ranks_lib"

local folder
setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

describe("ps.dist.agree", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  it("gathers numbers and records, and names a rank that differs", function()
    lib.check(folder, 3, [[
      local agree = require "ps.dist.agree"
      local function same(a, b)
        if type(a) ~= "table" then return a == b end
        for key, value in pairs(a) do if not same(value, b[key]) then return false end end
        for key in pairs(b) do if a[key] == nil then return false end end
        return true
      end
      assert(same(agree.numbers(group, { rank, 0.5 }), { { 0, 0.5 }, { 1, 0.5 }, { 2, 0.5 } }))
      assert(same(agree.numbers(group, { 2 ^ 40 + rank }, "int64"), { { 2 ^ 40 }, { 2 ^ 40 + 1 }, { 2 ^ 40 + 2 } }))
      assert(agree.least(group, 7 - rank) == 5)
      local sent = group:bytes_sent()
      local records = agree.gather(group, { "failed", "share" }, { share = rank == 1 and 0.25 or nil })
      assert(same(records, { { failed = 0, share = 0 }, { failed = 0, share = 0.25 }, { failed = 0, share = 0 } }))
      local of_records = group:bytes_sent() - sent
      agree.numbers(group, { 1, 2 })                        -- names are not sent
      assert(group:bytes_sent() - sent == 2 * of_records)
      assert(not pcall(agree.gather, group, { "failed" }, { fialed = 1 }))
      assert(agree.differs(group, "one text") == nil)
      local other, its, first = agree.differs(group, rank == 2 and "another" or "one text")
      assert(other == 2 and its == "another" and first == "one text")
    ]])
  end)
end)
