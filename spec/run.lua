-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit spec/run.lua [--list] [--jobs N] [--only WORDS] [FILE | NAME | FOLDER/]...
-- Runs specs under busted, inside this very interpreter: all spec/*/*_spec.lua but those of spec/cluster, or those
-- given (repl, repl_spec and repl_spec.lua are short for spec/prompt/repl_spec.lua, prompt/ for all of that folder).
-- Prints one line per file, each failure as it happens, and at the end "busted: N passed, N failed, N skipped". The
-- exit code is 1 if something failed. If there are several files, each has its own process, so that leftovers of one
-- (tensors in upvalues, a large heap) do not affect the next, and a crash fails only one file. With --jobs N, N files
-- run at the same time, and those of waits.txt one by one at the same time. With --only WORDS, only tests whose full
-- name (as a failure prints it) contains these words run: `run.lua ops --only softplus`. If there are several files and
-- PS_TEST_LIMIT_S is set, a file that runs longer than this number of seconds is ended and has failed.
local folder = arg[0]:match("^(.*)/[^/]*$") or "."

---@return string[] all specs but those of spec/cluster, in order
---@return table<string, string> by_name for example "repl" -> "spec/prompt/repl_spec.lua", also of spec/cluster
local function all_specs()
  local files, by_name = {}, {}
  local list = assert(io.popen(("find '%s' -mindepth 2 -name '*_spec.lua' | LC_ALL=C sort"):format(folder)))
  for path in list:lines() do
    local name = path:match "([^/]*)_spec%.lua$"
    if by_name[name] then
      io.stderr:write(("spec/run.lua: %s and %s have one name\n"):format(by_name[name], path))
      os.exit(1)
    end
    by_name[name] = path
    if not path:find("/cluster/", 1, true) then files[#files + 1] = path end
  end
  list:close()
  return files, by_name
end
local every, by_name = all_specs()

---@param path string
---@return boolean
local function exists(path)
  local f = io.open(path, "rb")
  if f then f:close() end
  return f ~= nil
end

--- Returns the path of a spec, given as `repl`, `repl_spec` or `repl_spec.lua`.
---@param name string
---@return string?
local function path_of(name) return by_name[(name:gsub("%.lua$", ""):gsub("_spec$", ""))] end

-- Returns the specs in a folder, given as "prompt/" or "spec/prompt/".
local function specs_in(name)
  local found, within = {}, ("%s/%s"):format(folder, name:gsub("^spec/", ""))
  for _, path in ipairs(every) do if path:sub(1, #within) == within then found[#found + 1] = path end end
  return found
end

-- Returns the specs that a list in spec/ names, one per line. A name without a spec ends the run, since the spec was
-- moved or is misspelt.
local function listed(list)
  local found = {}
  for line in io.lines(("%s/%s"):format(folder, list)) do
    local name = line:match "^[^#%s]+"
    if name and not path_of(name) then
      io.stderr:write(("spec/run.lua: %s names '%s', and there is no such spec\n"):format(list, name))
      os.exit(1)
    end
    if name then found[path_of(name)] = true end
  end
  return found
end
local waiting_ones = listed "waits.txt"
for _, list in ipairs { "computing.txt", "check.txt" } do listed(list) end

local files, only_list, jobs, words, or_none = {}, false, 1, nil, false
local at = 1
while arg[at] do
  local a = arg[at]
  local short = path_of(a)
  if a == "--list" then only_list = true
  elseif a == "--jobs" then
    at = at + 1
    jobs = tonumber(arg[at])
    if not jobs or jobs < 1 or jobs % 1 ~= 0 then
      io.stderr:write("spec/run.lua: --jobs is '" .. tostring(arg[at]) .. "'; expected a whole number from 1\n")
      os.exit(1)
    end
  elseif a == "--only" then
    at = at + 1
    words = arg[at]
    if not words then
      io.stderr:write("spec/run.lua: --only needs words of the names of tests\n")
      os.exit(1)
    end
  elseif a == "--or-none" then or_none = true  -- for a part of a run, since another part can contain the words
  elseif a:match("%.lua$") and exists(a) then files[#files + 1] = a
  elseif short then files[#files + 1] = short
  elseif a:match "/$" and specs_in(a)[1] then
    for _, path in ipairs(specs_in(a)) do files[#files + 1] = path end
  else
    io.stderr:write("spec/run.lua: there is no spec '" .. a .. "' (looked for " .. a .. " and " .. folder .. "/*/" .. a
      .. "_spec.lua)\n")
    os.exit(1)
  end
  at = at + 1
end
if #files == 0 then files = every end
if only_list then
  print(table.concat(files, "\n"))
  os.exit(0)
end

local passed, failed, skipped = 0, 0, 0
local cache                                                -- the specs' cache folder

local function finish()
  if cache then os.execute("rm -rf " .. cache) end
  print(("busted: %d passed, %d failed, %d skipped"):format(passed, failed, skipped))
  if words and not or_none and passed + failed + skipped == 0 then
    io.stderr:write(("spec/run.lua: no test of these specs has '%s' in its name\n"):format(words))
    os.exit(1)
  end
  os.exit(failed == 0 and 0 or 1)
end

---@param text string
---@return string
local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

-- Runs files in their own processes, `number` at a time. At the same time, the files of `beside` run one at a time.
-- Prints their output lines and counts their results. If several run at a time, the lines of a file are printed
-- together at its end.
local function run_apart(list, number, beside)
  if #list + #beside == 0 then return end
  local END = "spec/run.lua: that was "
  local lock = os.tmpname()
  local limit = tonumber(os.getenv "PS_TEST_LIMIT_S")
  local run = ("%s %s %s %s \"$1\" 2>&1; echo \"%s$1\""):format(limit and "timeout -k 10 " .. limit or "",
    quoted(arg[-1]), quoted(arg[0]),
    words and "--or-none --only " .. quoted(words) or "", END)
  if number > 1 then
    run = ("said=$(mktemp) && { %s; } >\"$said\"; flock \"$0\" cat \"$said\"; rm \"$said\""):format(run)
  end
  local lanes, all = {}, {}
  for _, lane in ipairs { { list, number }, { beside, 1 } } do
    local names = {}
    for i, file in ipairs(lane[1]) do names[i], all[#all + 1] = quoted(file), file end
    -- A shell makes background jobs (&) ignore SIGINT and SIGQUIT, but the specs need the default.
    lanes[#lanes + 1] = #names > 0
      and ("printf '%%s\\0' %s | env --default-signal=INT,QUIT xargs -0 -n 1 -P %d sh -c %s %s & "):format(
        table.concat(names, " "), lane[2], quoted(run), quoted(lock)) or nil
  end
  local child = assert(io.popen(table.concat(lanes) .. "wait"))
  local ended, counted = {}, false
  for line in child:lines() do
    local p, f, s = line:match("^busted: (%d+) passed, (%d+) failed, (%d+) skipped$")
    if p then
      passed, failed, skipped, counted = passed + p, failed + f, skipped + s, true
    elseif line:sub(1, #END) == END then
      ended[line:sub(#END + 1)], counted = counted, false
    else
      io.stdout:write(line, "\n")
      io.stdout:flush()
    end
  end
  child:close()
  os.remove(lock)
  for _, file in ipairs(all) do
    if not ended[file] then
      print(("FAILED: %s did not run to its end"):format(file))
      failed = failed + 1
    end
  end
end

if #files > 1 then
  local waiting, others = {}, {}
  for _, file in ipairs(files) do table.insert(jobs > 1 and waiting_ones[file] and waiting or others, file) end
  run_apart(others, jobs, waiting)
  finish()
end

-- Programs in specs find no files that earlier runs left in the user's cache, and leave none there.
cache = os.tmpname()
os.remove(cache)
assert(require("lfs").mkdir(cache))
require("posix.stdlib").setenv("XDG_CACHE_HOME", cache)

local file_passed, file_failed, file_skipped = 0, 0, 0
local started = 0

local busted = require "busted.core"()
require "busted"(busted)
busted.register("file", "file", {})     -- no insulation, since FFI types cannot be declared twice

---@param element table
---@return string
local function full_name(element)
  local names = { element.name or element.descriptor }
  local parent = busted.context.parent(element)
  while parent and parent.descriptor ~= "file" and (parent.name or parent.descriptor) do
    table.insert(names, 1, parent.name or parent.descriptor)
    parent = busted.context.parent(parent)
  end
  return table.concat(names, " ")
end

---@param kind string
---@param element table
---@param message any
local function print_problem(kind, element, message)
  io.stdout:write(("%s: %s\n  %s\n"):format(kind, full_name(element), (tostring(message):gsub("\n", "\n  "))))
  io.stdout:flush()
end

if words then
  -- A test that is not registered does not run. The other tests of its file count as usual.
  for _, kind in ipairs { "it", "pending" } do
    busted.subscribe({ "register", kind }, function(name)
      local parent = busted.context.get()
      local whole = (parent.descriptor == "file" and "" or full_name(parent) .. " ") .. tostring(name)
      return nil, whole:find(words, 1, true) ~= nil
    end, { priority = 1 })
  end
end

local SLOW_S = tonumber(os.getenv("PS_SPEC_SLOW")) or 10
local test_started = 0
busted.subscribe({ "test", "start" }, function()
  test_started = busted.monotime()
  return nil, true
end)
busted.subscribe({ "test", "end" }, function(element, _, status)
  local seconds = busted.monotime() - test_started
  if seconds > SLOW_S then print(("slow: %.1f s: %s"):format(seconds, full_name(element))) end
  if status == "success" then file_passed = file_passed + 1
  elseif status == "pending" then file_skipped = file_skipped + 1
  else file_failed = file_failed + 1 end
  return nil, true
end)
busted.subscribe({ "failure" }, function(element, _, message)
  if element.descriptor ~= "it" then file_failed = file_failed + 1 end
  print_problem("FAILED", element, message)
  return nil, true
end)
busted.subscribe({ "error" }, function(element, _, message)
  if element.descriptor ~= "it" then file_failed = file_failed + 1 end
  print_problem("ERROR", element, message)
  return nil, true
end)
busted.subscribe({ "pending" }, function(element, _, message)
  if message then print_problem("skipped", element, message) end
  return nil, true
end)
busted.subscribe({ "file", "start" }, function()
  file_passed, file_failed, file_skipped = 0, 0, 0
  started = busted.monotime()
  return nil, true
end)
busted.subscribe({ "file", "end" }, function(file)
  io.stdout:write(("%-48s %4d passed, %d failed, %d skipped  %6.1f s\n"):format(file.name, file_passed, file_failed,
    file_skipped, busted.monotime() - started))
  io.stdout:flush()
  passed, failed, skipped = passed + file_passed, failed + file_failed, skipped + file_skipped
  return nil, true
end)

package.loaded["busted.luajit"] = function() end      -- luassert would cache ffi.typeof only by its first argument
require "busted.modules.test_file_loader"(busted, { "lua" })(files, {}, { excludes = {} })
require "busted.execute"(busted)(1, {})

finish()
