-- SPDX-License-Identifier: BSD-3-Clause
-- Every call of a file fails once, over one checkpoint, one resume and one step with a disk tier (walk.lua).
local paths = require "ps.paths"
local lib = require "spec.ranks_lib"

local exe, missing = require("tools.faults.run").program()
local folder = lib.folder()
teardown(function() lib.remove(folder) end)

-- The first calls are those of `make test`. PS_FULL=1 runs all calls.
local SHORT = { { "save", "EIO", 1, 10 }, { "save", "short", 1, 0 }, { "load", "EIO", 1, 3 }, { "step", "EIO", 1, 10 },
  { "step", "flip:12345", 1, 5 } }
local FULL = { { "save", "EIO", 1e6, 10 }, { "save", "ENOSPC", 1, 10 }, { "save", "ENOSPC", 1e6, 10 },
  { "save", "EINTR", 3, 0 }, { "load", "EIO", 1e6, 3 }, { "load", "EMFILE", 1, 0 }, { "load", "short", 1, 0 },
  { "step", "short", 1, 0 }, { "step", "EINTR", 2, 0 }, { "step", "EIO", 1e6, 10 } }
local ROWS = {}
for _, row in ipairs(SHORT) do ROWS[#ROWS + 1] = row end
for _, row in ipairs(os.getenv "PS_FULL" == "1" and FULL or {}) do ROWS[#ROWS + 1] = row end

describe("each call of a file", function()
  for _, row in ipairs(ROWS) do
    for _, threads in ipairs(row[1] == "step" and { 0, 2 } or { 0 }) do
      it(("of a %s has %s (%d in a row, %s)"):format(row[1], row[2], row[3],
        threads == 0 and "io_uring" or threads .. " threads"), function()
        if missing then return pending(missing) end
        os.execute(("rm -rf '%s/'*"):format(folder))
        local p = assert(io.popen(("%s PS_FAULT_FOLDER='%s' OMP_NUM_THREADS=1 timeout 300 '%s' "
          .. "'%s/spec/faults/walk.lua' '%s' %s %s %d 2>&1"):format(threads > 0 and "PS_DISK_THREADS=" .. threads or "",
          folder, exe, paths.root, folder, row[1], row[2], row[3])))
        local text = p:read "*a"
        p:close()
        local calls, failed = text:match "(%d+) calls, (%d+) failed, %d+ survived\n$"
        assert.truthy(calls and tonumber(calls) >= 10, text)
        if row[2] == "short" or row[2] == "EINTR" then assert.equal("0", failed) end
        assert.truthy(tonumber(failed) >= row[4], text)
      end)
    end
  end
end)
