-- SPDX-License-Identifier: BSD-3-Clause
-- For specs of checkpoints of one process: a folder for each test, a small run to save, files, and messages.
local ps = require "ps"
local check = require "spec.check_lib"
local lfs = require "lfs"
local paths = require "ps.paths"
local checkpoints, nn, optim, C = ps.checkpoints, ps.nn, ps.optim, ps.C

local lib = {}

--- Creates a new folder before each test.
---@return string
function lib.open()
  lib.folder = os.tmpname()
  os.remove(lib.folder)
  assert(lfs.mkdir(lib.folder))
  return lib.folder
end

--- Removes the folder after each test.
function lib.close()
  C.ps_test_fail_file(-1, 0, 0)
  C.ps_test_fail_alloc(-1, 0)
  pcall(checkpoints.wait)
  os.execute(("rm -r '%s'"):format(lib.folder))
end

function lib.path(name) return lib.folder .. "/" .. name end

function lib.read(name)
  local f = assert(io.open(name, "rb"))
  local text = f:read("*a")
  f:close()
  return text
end

function lib.write(name, text)
  local f = assert(io.open(name, "wb"))
  f:write(text)
  f:close()
end

function lib.flipped(text, at) return text:sub(1, at) .. string.char(255 - text:byte(at + 1)) .. text:sub(at + 2) end

function lib.names(of)
  local list = {}
  for name in lfs.dir(of) do if name ~= "." and name ~= ".." then list[#list + 1] = name end end
  table.sort(list)
  return table.concat(list, " ")
end

--- Runs a script in a separate process. Returns its output and exit code.
function lib.child(script, before)
  lib.write(lib.path("child.lua"), script)
  local out, code = check.shell(("%s OMP_NUM_THREADS=1 timeout 300 '%s' '%s' '%s'"):format(before or "",
    paths.exe, lib.path("child.lua"), lib.folder))
  os.remove(lib.path("child.lua"))
  return out, code
end

--- Creates a model and an optimizer to save.
function lib.new(size)
  ps.manual_seed(5)
  local model = nn.Linear(size or 4, 3)
  return { model = model, optimizer = optim.AdamW(model, { lr = 1e-2 }) }
end

function lib.step(run, number)
  local weight = run.model.weight
  local x = ps.full({ 2, weight:shape()[2] }, number)
  run.model(x):mul(0.1 * number):sum():backward()
  run.optimizer:step()
  run.optimizer:zero_grad()
end

function lib.values(run)
  local list = {}
  for _, t in ipairs { run.model.weight, run.model.bias } do
    for _, row in ipairs(t:detach():reshape(-1):tolist()) do list[#list + 1] = ("%.9g"):format(row) end
  end
  return table.concat(list, " ")
end

function lib.fails(fn, ...)
  local ok, problem = pcall(fn)
  assert(not ok, "no error was raised")
  for i = 1, select("#", ...) do
    local part = select(i, ...)
    assert(tostring(problem):find(part, 1, true), ("the message lacks '%s': %s"):format(part, tostring(problem)))
  end
  return tostring(problem)
end

--- Calls fn with standard error redirected to a file. Returns its result and the text.
function lib.said(fn)
  local stderr, file = io.stderr, assert(io.tmpfile())
  io.stderr = file -- luacheck: ignore 122
  local ok, result = pcall(fn)
  io.stderr = stderr -- luacheck: ignore 122
  file:seek("set")
  local text = file:read("*a")
  file:close()
  if not ok then error(result, 0) end
  return result, text
end

--- Saves steps 1 to n. Returns the values after each step.
function lib.saved(run, n, options)
  local after = {}
  for number = 1, n do
    lib.step(run, number)
    after[number] = lib.values(run)
    local parts = { model = run.model, optimizer = run.optimizer, keep = 5, quiet = true }
    for key, value in pairs(options or {}) do parts[key] = value end
    checkpoints.save(lib.folder, parts)
  end
  checkpoints.wait()
  return after
end

return lib
