-- SPDX-License-Identifier: BSD-3-Clause
-- Ctrl-C pauses a script, if the script runs on a terminal as a single process and no other handler uses the signal.
-- src/interrupt.c stops the script between two instructions of the script, calls begin(), opens a prompt, and then
-- calls finish().
--
-- LuaJIT's compiled code does not update variables that are never read again, so a pause could show old values. To
-- avoid this, functions of the script that are on the stack when a step begins are interpreted from then on. For other
-- functions, the prompt warns that they may have been compiled.
local caller = require "ps.core.caller"
local hooks = require "ps.core.hooks"
local locals = require "ps.prompt.locals"
local paths = require "ps.paths"

local pause = { is_own = caller.is_own }

local exact = setmetatable({}, { __mode = "k" })           -- functions that are interpreted
local typed = {}                                           -- names that statements at the prompt have defined
local where, doubtful                                      -- the script's position; whether values can be out of date
local scope                                                -- the tensor scope of the pause, or nil
-- The table that scripts know as `ps`, and the module ps.core.ffi. Both are nil if they are not loaded.
local facade, native

--- Sets the table that the script has loaded as `ps`. If this function is not called, no engine has to be preserved.
---@param ps table
function pause.attach(ps) facade, native = ps, require "ps.core.ffi" end

--- Makes LuaJIT interpret the script's functions that are on the stack. LuaJIT does not compile these
--- functions any more.
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

-- Returns the reason why this process cannot be paused, or nil if it can be paused.
local function refusal()
  local ok, size = pcall(function()                        -- launchers never set a malformed variable
    return math.max(facade and facade.world_size() or 1, require("ps.dist.env").read(os.getenv, {}).world_size)
  end)
  if ok and size > 1 then return ("one of %d ranks cannot pause: the others would wait for it"):format(size) end
end

--- Begins a pause. The caller's frame must be directly above the script's frame.
---@return nil|boolean|string later nil if the pause has begun; true if a pause is not possible yet; a text with the
--- reason if a pause is impossible
function pause.begin()
  local why = refusal()
  if why then return why end
  if native then
    if native.recorder then return true end                     -- a model without data is being created
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

--- Returns the environment for statements during the pause. It contains the script's variables, its globals, the names
--- that statements have defined, ps and help. Prints the script's position.
---@return table
function pause.environment()
  local names = locals.names()
  print(("\npaused at %s: continue resumes the script, abort raises an error in it"):format(where))
  if names[1] then print("variables of the script: " .. table.concat(names, ", ")) end
  if doubtful then
    print "(some of its functions may have been compiled: variables that are not read again may be out of date)"
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

-- Ends the tensor scope of the pause. Tensors in values that are used after the scope are kept, as in scope.finish.
local function finish_scope()
  local list, n = require("ps.core.scope").tensors(locals.changed())
  local rc = native.C.ps_resume(native.ctx, n, list)
  if rc < 0 then
    io.stderr:write(("after the pause memory exceeds its budgets: %s\n"):format(
      native.ffi.string(native.C.ps_error_message())))
  end
end

--- Ends the pause. It must be called from the same frame as begin().
function pause.finish()
  locals.write()
  hooks.tell "resumes"
  if scope then
    scope = nil
    finish_scope()
  end
end

return pause
