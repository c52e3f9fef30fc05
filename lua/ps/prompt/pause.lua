-- SPDX-License-Identifier: BSD-3-Clause
-- Ctrl-C pauses a script that runs on a terminal, alone and with nobody else holding the signal: src/interrupt.c stops
-- it between two instructions of its own and calls begin() and finish() here, with a prompt between them.
--
-- LuaJIT's compiled code does not keep variables up to date that nothing will read, and a pause would show old values.
-- So functions of the script that are running when a step begins are interpreted from then on; of others the prompt
-- says that they may have been compiled.
local caller = require "ps.core.caller"
local hooks = require "ps.core.hooks"
local locals = require "ps.prompt.locals"
local paths = require "ps.paths"

local pause = { is_own = caller.is_own }

local exact = setmetatable({}, { __mode = "k" })           -- functions that are interpreted
local typed = {}                                           -- names that statements made
local where, doubtful                                      -- the script's place; whether values may be old
local scope                                                -- of what is computed in it, or nil
local facade, native                                       -- what scripts have as `ps`, and ps.ffi; nil: not loaded

--- Tells what the script has loaded as `ps`. A pause without it holds no engine.
---@param ps table
function pause.attach(ps) facade, native = ps, require "ps.core.ffi" end

--- Keeps the functions of the script that are running from the compiler.
function pause.keep_exact()
  local level = 2
  while true do
    local info = debug.getinfo(level, "f")
    if not info then return end
    local func = info.func
    if not exact[func] then
      exact[func] = true
      local about = debug.getinfo(func, "S")
      if about.what ~= "C" and not caller.is_own(about.source) then jit.off(func) end
    end
    level = level + 1
  end
end

if paths.pauses and not paths.interprets then
  hooks.on("begins", pause.keep_exact)
  hooks.on("backward", function() pause.keep_exact() end)
end

-- Why this process cannot pause, or nil.
local function refusal()
  local ok, size = pcall(function()                        -- a malformed variable is of no launcher
    return math.max(facade and facade.world_size() or 1, require("ps.dist.env").read(os.getenv, {}).world_size)
  end)
  if ok and size > 1 then return ("one of %d ranks does not pause: the others would wait"):format(size) end
end

--- A pause begins. The caller is the frame above the script's.
---@return nil|boolean|string later nil: it has begun. true: not yet. A string: it cannot, and why
function pause.begin()
  local why = refusal()
  if why then return why end
  if native then
    if native.recorder then return true end                     -- a model is made without data
    local id = native.ffi.new "int64_t[1]"
    local rc = native.C.ps_suspend(native.ctx, id)
    if rc < 0 then return native.ffi.string(native.C.ps_error_message()) end
    if rc > 0 then return true end
    scope = id[0]
  end
  where, doubtful = caller.where(), false
  caller.pauses(debug.getinfo(2, "f").func)
  locals.keep(function(func) doubtful = doubtful or not (exact[func] or paths.interprets) end)
end

--- The environment of statements in the pause: the script's variables, its globals, names that statements made, ps and
--- help. Says where the script is.
---@return table
function pause.environment()
  local names = locals.names()
  print(("\npaused at %s: continue goes on, abort raises an error in the script"):format(where))
  if names[1] then print("variables of the script: " .. table.concat(names, ", ")) end
  if doubtful then
    print "(some of its functions may have been compiled: values that nothing reads any more may be old)"
  end
  return locals.over(setmetatable({}, {
    __names = function()
      local values = {}
      for name, value in pairs(typed) do values[name] = value end
      values.ps, values.help = values.ps or facade, values.help or facade and facade.help
      return values, _G
    end,
    __index = function(_, name)
      local value = rawget(_G, name)
      if value == nil then value = typed[name] end
      if value == nil and (name == "ps" or name == "help") then
        return name == "ps" and facade or facade and facade.help
      end
      if value == nil then return _G[name] end
      return value
    end,
    __newindex = function(_, name, value)
      if rawget(_G, name) ~= nil then rawset(_G, name, value) else typed[name] = value end
    end,
  }))
end

-- The tensors in values that survive a scope, as scope.finish finds them.
local function finish_scope()
  local list, n = require("ps.core.scope").tensors(locals.changed())
  local rc = native.C.ps_resume(native.ctx, n, list)
  if rc < 0 then
    io.stderr:write(("after the pause memory is not within its budgets: %s\n"):format(
      native.ffi.string(native.C.ps_error_message())))
  end
end

--- The pause ends. The caller is the frame that begin() had.
function pause.finish()
  locals.write()
  hooks.tell "resumes"
  if scope then
    scope = nil
    finish_scope()
  end
end

return pause
