-- SPDX-License-Identifier: BSD-3-Clause
-- Benches with the smallest of models: that they run, and what they take is in proportion.
local lfs = require "lfs"
local paths = require "ps.paths"

describe("larger_than_memory.lua", function()
  it("measures the disk with bytes that fit small budgets", function()
    local folder = os.tmpname()
    os.remove(folder)
    assert(lfs.mkdir(folder))
    local command = ("OMP_NUM_THREADS=1 timeout 60 '%s' '%s/bench/larger_than_memory.lua' --model tiny --seq 32 "
      .. "--host 6MiB --limit 20000000 --disk '%s' --spare 0 --steps 1 2>&1; echo \"|$?\"")
    local p = assert(io.popen(command:format(paths.exe, paths.root, folder)))
    local text, code = p:read("*a"):match("^(.*)|(%d+)\n$")
    p:close()
    local left = 0
    for name in lfs.dir(folder) do if name ~= "." and name ~= ".." then left = left + 1 end end
    os.execute("rm -r " .. folder)
    assert.equal("0", code, text)
    assert.equal(0, left)
    local result = require("cjson").decode(text:match("(%b{})\n$"))
    assert.equal(6 * 2 ^ 20, result.probe_nbytes)
    assert.truthy(result.probe_read_gb_per_s > 0 and result.probe_write_gb_per_s > 0)
  end)
end)
