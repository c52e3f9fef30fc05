-- SPDX-License-Identifier: BSD-3-Clause
-- Every call of a file fails once, over one checkpoint, one resume and one step with a disk tier (walk.lua), and while
-- a model or an adapter is written over an older one (walk_files.lua).
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
-- The works of walk_files.lua.
local FILES = { { "folder", "EIO", 1, 30 }, { "adapter", "ENOSPC", 1e6, 30 }, { "shards", "ENOSPC", 1e6, 100 } }
local FULL_FILES = { { "folder", "ENOSPC", 1e6, 30 }, { "adapter", "EIO", 1, 30 }, { "shards", "EIO", 1, 100 },
  { "shards", "short", 1, 0 }, { "shards", "EINTR", 2, 0 } }
for _, work in ipairs { "gguf", "adapter_gguf", "merged", "merge_folder", "convert" } do
  table.insert(FULL_FILES, { work, "ENOSPC", 1e6, 30 })
  table.insert(FULL_FILES, { work, "EIO", 1, 30 })
end

local function rows(short, full)
  local all = { unpack(short) }
  for _, row in ipairs(os.getenv "PS_FULL" == "1" and full or {}) do all[#all + 1] = row end
  return all
end

-- Runs a walk and checks its numbers. `threads` is PS_DISK_THREADS, or 0.
local function walk(script, row, threads)
  os.execute(("rm -rf '%s/'*"):format(folder))
  local p = assert(io.popen(("%s PS_FAULT_FOLDER='%s' OMP_NUM_THREADS=1 timeout 300 '%s' '%s/spec/faults/%s' '%s' %s "
    .. "%s %d 2>&1"):format(threads > 0 and "PS_DISK_THREADS=" .. threads or "", folder, exe, paths.root, script,
    folder, row[1], row[2], row[3])))
  local text = p:read "*a"
  p:close()
  local calls, failed = text:match "(%d+) calls, (%d+) failed, %d+ survived[^\n]*\n$"
  assert.truthy(calls and tonumber(calls) >= 10, text)
  if row[2] == "short" or row[2] == "EINTR" then assert.equal("0", failed) end
  assert.truthy(tonumber(failed) >= row[4], text)
end

describe("each call of a file", function()
  for _, row in ipairs(rows(SHORT, FULL)) do
    for _, threads in ipairs(row[1] == "step" and { 0, 2 } or { 0 }) do
      it(("of a %s has %s (%d in a row, %s)"):format(row[1], row[2], row[3],
        threads == 0 and "io_uring" or threads .. " threads"), function()
        if missing then return pending(missing) end
        walk("walk.lua", row, threads)
      end)
    end
  end

  for _, row in ipairs(rows(FILES, FULL_FILES)) do
    it(("of a written %s has %s (%d in a row)"):format(row[1], row[2], row[3]), function()
      if missing then return pending(missing) end
      walk("walk_files.lua", row, 0)
    end)
  end
end)
