-- SPDX-License-Identifier: BSD-3-Clause
-- Raises errors about mistakes in a script with a position in the script, not a position in psluajit's own files.
-- Modules call caller.error (as `error`) and check arguments with the functions below. Lua itself may also raise an
-- error in one of psluajit's files, for example if nil is indexed or a conversion fails. The program's handler receives
-- these errors and calls caller.at. Tracebacks pass through caller.trace, which keeps only the script's frames. Only
-- this file finds the script's position.
local ffi = require "ffi"
local environment = require "ps.core.environment"
local keys_of = require "ps.keys"
local lfs = require "lfs"
local nearest = require "ps.core.nearest"
local paths = require "ps.paths"

local caller = {}

-- The folders of psluajit's own files, each in the form in which a chunk name begins ("@/path/").
local own = {}
for _, folder in ipairs { paths.root and paths.root .. "/lua/", paths.root and paths.root .. "/models/",
  paths.gen and paths.gen .. "/" } do
  own[#own + 1] = "@" .. folder
end

--- Returns whether a chunk's name (`source` of debug.getinfo) is the name of one of psluajit's own files.
---@param source string
---@return boolean
local function is_own(source)
  if source:sub(1, 3) == "@./" then source = "@" .. lfs.currentdir() .. source:sub(3) end
  for _, folder in ipairs(own) do
    if source:sub(1, #folder) == folder then return true end
  end
  return false
end

local pause  -- the C function that runs the prompt of a paused script

--- Returns the position of the innermost Lua function that is not psluajit's, as "script.lua:12: ". Returns "" if there
--- is no such function. Statements typed at the prompt of a pause have no position in the paused script.
---@return string
local function position()
  local level = 2
  while true do
    local info = debug.getinfo(level, "Slf")
    if not info or info.func == pause then return "" end
    if info.what ~= "C" and not is_own(info.source) then return ("%s:%d: "):format(info.short_src, info.currentline) end
    level = level + 1
  end
end

caller.position, caller.is_own = position, is_own

--- Registers the C function that pauses a script. The search for the script's position ends at this function's frame.
---@param func function
function caller.pauses(func) pause = func end

--- Returns the position of the innermost Lua function that is not psluajit's, as "script.lua:12". Returns "" if there
--- is no such function.
---@return string
function caller.where() return (position():gsub(": $", "")) end

-- The last error that psluajit caught before the error reached the script.
--   value: the error's value
--   text: the value as text
--   frames: the traceback from the place where the error was raised
--   passing: whether the error has been raised again since it was caught
local noted

--- Raises an error that begins with the script's position. If the level is 0 or the message is not a string, the
--- message is unchanged.
---@param message any
---@param level? integer only 0 has an effect
function caller.error(message, level)
  if noted then noted.passing = level == 0 and rawequal(message, noted.value) end
  if level ~= 0 and type(message) == "string" then message = position() .. message end
  error(message, 0)
end
local raise = caller.error

-- Returns whether a file name, as an error message shows it, is the name of one of psluajit's files. Lua may have cut
-- off the beginning of the name.
local function is_own_shown(file)
  local tail = file:match("^%.%.%..*/(lua/ps/.*)$") or file:match("^%.%.%..*/(models/.*)$")   -- Lua shortens long names
  local gen = paths.gen and file:match("^%.%.%.") and file:match("/gen/ops%.lua$")
  return is_own("@" .. file) or gen or tail and is_own("@" .. paths.root .. "/" .. tail)
end

-- Calls fn with the name of each field and method of an object. The object's metatable has __names.
local function each_name(object, fn)
  local fields, class = getmetatable(object).__names(object)
  for name in pairs(fields) do fn(name) end
  while type(class) == "table" do
    for name in pairs(class) do fn(name) end
    local meta = getmetatable(class)
    class = meta and rawget(meta, "__index")
  end
end

-- Returns the end of an error about a field or method that is nil. If an object in the script's innermost function has
-- a similar name, the end is a text such as "; did you mean self.fc1?". Otherwise it is "".
local function similar_field(message)
  local way, name = message:match "^attempt to [%a ]- (%a+) '([%w_]+)' %(a nil value%)"
  if way ~= "field" and way ~= "method" or message:find("; did you mean", 1, true) then return "" end
  local level = 3
  local info = debug.getinfo(level, "S")
  while info and (info.what == "C" or is_own(info.source)) do
    level = level + 1
    info = debug.getinfo(level, "S")
  end
  if not info then return "" end
  local found
  for at = 1, 200 do
    local variable, object = debug.getlocal(level, at)
    if not variable then break end
    local meta = type(object) == "table" and getmetatable(object)
    local named = type(meta) == "table" and rawget(meta, "__names") and not rawequal(object, package.loaded.ps)
    if named and not found then
      local names = {}
      each_name(object, function(known) if type(known) == "string" then names[#names + 1] = known end end)
      table.sort(names)
      local near = nearest.find(name, names)
      found = near and ("; did you mean %s%s%s?"):format(variable, way == "method" and ":" or ".", near)
    end
  end
  return found or ""
end

--- Corrects an error message. If the message begins with a position in psluajit's files, the script's position replaces
--- that position. If the message is about a misspelt field, a suggestion is added. Other values are returned unchanged.
--- Only error handlers may call this function, because the frames of the error must still exist.
---@param message any
---@return any
function caller.at(message)
  if type(message) ~= "string" then return message end
  local file, text = message:match("^([^\n:]*):%d+: (.*)$")
  if not file then return message end
  if is_own_shown(file) then return position() .. text end
  local ok, similar = pcall(similar_field, text)
  return ok and message .. similar or message
end

--- A function that shows a value as text. ps.pretty sets it. The program's handler loads ps.pretty before it calls
--- `described`.
---@type (fun(value: any): string)?
caller.shown = nil

--- Returns a text for an error that is not a string. The text contains the error's type and value. The program's
--- handler prints it.
---@param e any
---@return string
function caller.described(e)
  local ok, text = pcall(caller.shown or tostring, e)
  return ("the error is a %s, not a string: %s"):format(type(e), ok and text or tostring(e))
end

-- Returns whether an error that psluajit had caught is being raised again. `level` is the stack level of the function
-- that raises the error, counted from this function's caller.
local function raised_again(message, level)
  if not (noted and noted.passing and rawequal(message, noted.value)) then return false end
  local raiser, above = debug.getinfo(level + 1, "S"), debug.getinfo(level + 2, "S")
  return raiser ~= nil and raiser.what == "C" and above ~= nil and is_own(above.source)
end

--- Records an error when it is first caught, while the frames that raised it still exist. If the script fails with this
--- error, the traceback ends with these frames. Returns the error with the script's position. Only the handler of an
--- xpcall may call this function.
---@param e any
---@param told? fun() called if the error is recorded
---@return any
function caller.note(e, told)
  if raised_again(e, 3) then return e end
  e = caller.at(e)
  local frames = debug.traceback("", 3):match "\nstack traceback:(.*)$"
  frames = frames and frames:gsub("\n\t%(psluajit%):.*$", "")              -- omits the program's frames, as main.c does
  noted = { value = e, text = select(2, pcall(tostring, e)), frames = frames, passing = false }
  if told then told() end
  return e
end

--- Returns whether psluajit had caught an error before the error ended the script. Only a function that the program's
--- handler calls may call this function.
---@param e any
---@return boolean
function caller.was_noted(e)
  local again = raised_again(e, 4)  -- not a tail call, because raised_again counts levels of the stack
  return again
end

--- Returns the script's innermost line at which an error was raised, as "FILE:LINE". Returns nil if the error's frames
--- were not recorded, or if no frame is the script's.
---@param e any
---@return string?
function caller.place(e)
  local frames = type(e) == "table" and type(e.traceback) == "string" and e.traceback:match "\nstack traceback:(.*)$"
  if not frames and noted and rawequal(noted.value, e) then frames = noted.frames end
  return frames and caller.trace("\nstack traceback:" .. frames):match "\n\t([^\n]-:%d+): in "
end

--- Returns a message with its traceback. Omits the frames of psluajit's own functions and of the C functions that they
--- call, because the mistake is in the script. With PS_TRACEBACK=all, no frame is omitted.
---@param text string
---@return string
function caller.trace(text)
  local title = "\nstack traceback:"
  local before, frames = text:match("^(.*)" .. title .. "(.*)$")
  if not before then return text end
  local again = frames:match "^\n\t%[C%]: in function 'error'\n\t(.-):%d+: "
  if noted and again and is_own_shown(again) and before:sub(-#noted.text) == noted.text then frames = noted.frames end
  if environment.get "PS_TRACEBACK" == "all" then return before .. title .. frames end
  local kept, in_c = {}, {}                                -- in_c: frames of C functions whose caller is not yet known
  for frame in frames:gmatch("[^\n]+") do
    local file = frame:match("^\t(.-):%d+: ") or frame:match("^\t(.-): in ")
    if file == "[C]" then in_c[#in_c + 1] = frame
    else
      if frame ~= "\t..." and not (file and is_own_shown(file)) then       -- Lua writes "..." for omitted frames
        for _, c in ipairs(in_c) do kept[#kept + 1] = c end
        kept[#kept + 1] = frame
      end
      in_c = {}
    end
  end
  for _, c in ipairs(in_c) do kept[#kept + 1] = c end
  return before .. title .. "\n" .. table.concat(kept, "\n")
end

-- -- arguments -------------------------------------------------------------------------------------------------------
local function kind(value) return value == nil and "nil" or "a " .. type(value) end

-- The kinds of options in addition to Lua's types. Each kind has its name in errors and a function that checks a value.
local KINDS = {
  whole = { "a whole number", function(value)
    return type(value) == "number" and value % 1 == 0 or type(value) == "cdata" and tonumber(value) ~= nil
  end },
  callable = { "a function", function(value)
    local mt = type(value) == "table" and getmetatable(value)
    return type(value) == "function" or mt and mt.__call ~= nil
  end },
  tensor = { "a tensor", function() return false end },                     -- caller.for_tensors sets the check
  any = { "anything", function() return true end },
}

local function fits(value, kinds)
  for name in kinds:gmatch("%w+") do
    if KINDS[name] and KINDS[name][2](value) or type(value) == name then return true end
  end
  return false
end

--- Returns a number and its noun, such as "1 step" or "2 steps".
---@param n integer
---@param noun string a noun whose plural ends with s
---@return string
function caller.counted(n, noun) return ("%d %s%s"):format(n, noun, n == 1 and "" or "s") end

local function sorted_names(keys)
  local names = {}
  for name in pairs(keys) do names[#names + 1] = name end
  table.sort(names)
  return names
end
caller.sorted_names = sorted_names

-- The keys are names of options in PyTorch and transformers. The values are the options of psluajit that mean the same.
local MEANT = { torch_dtype = "dtype", attn_mask = "mask", init_scale = "scale" }

-- Returns the text about an unknown option, such as "no option 'casual'; did you mean 'causal'? (there are causal,
-- mask)".
local function unknown(key, keys)
  if type(key) ~= "string" then return "options must be named, { name = value }, but one has no name" end
  local names = sorted_names(keys)
  if not names[1] then return ("no option '%s'; the call has no options"):format(key) end
  local meant = MEANT[key]
  local near, list = keys[meant] and meant or nearest.find(key, names), table.concat(names, ", ")
  if near then return ("no option '%s'; did you mean '%s'? (there are %s)"):format(key, near, list) end
  return ("no option '%s' (there are %s)"):format(key, list)
end

local function of_kind(value, kinds)
  local words = {}
  for name in kinds:gmatch("%w+") do words[#words + 1] = KINDS[name] and KINDS[name][1] or "a " .. name end
  local is = type(value) == "number" and kinds:find("whole") and ("%.14g"):format(value)
    or type(value) == "cdata" and "a cdata" or kind(value)
  return ("is %s, not %s"):format(is, table.concat(words, " or "))
end

--- Checks the names and types of options, and returns the options. Returns an empty table for nil. Raises an error for
--- an unknown option, and names the nearest known option. Raises an error for a value of the wrong type.
---@param options any
---@param call string name of the called function in errors
---@param keys table<string, string> the kind of each option: a Lua type, "whole" (a whole number), "callable",
--- "tensor" or "any"; several kinds are separated by "|"
---@return table
function caller.options(options, call, keys)
  if options == nil then return {} end
  if type(options) ~= "table" then raise(("%s takes a table of options, not %s"):format(call, kind(options))) end
  if keys_of.known(options, keys) then return options end
  for key, value in pairs(options) do
    local kinds = keys[key]
    if not kinds then raise(("%s: %s"):format(call, unknown(key, keys))) end
    if type(value) ~= kinds and not fits(value, kinds) then
      raise(("%s: %s %s"):format(call, key, of_kind(value, kinds)))
    end
  end
  return options
end

--- The text of a call of each public function, such as "t:sum", by function. ps.core.exact fills the table.
---@type table<function, string>
caller.calls = setmetatable({}, { __mode = "k" })

caller.IN_ORDER = "arguments have no names, and go in order"

--- Raises an error if a script passes a table of named values to a function without options, as in x:sort { descending
--- = true }.
---@param value any
function caller.check_named(value)
  if type(value) ~= "table" or getmetatable(value) ~= nil then return end
  local named = {}
  for key in pairs(value) do if type(key) == "string" then named[key] = true end end
  if next(named) == nil then return end
  local level, info, fn = 2, debug.getinfo(2, "f"), nil              -- fn: the outermost function that got the value
  while info do
    for i = 1, caller.calls[info.func] and debug.getinfo(level, "u").nparams or 0 do
      if rawequal(select(2, debug.getlocal(level, i)), value) then fn = info.func end
    end
    level = level + 1
    info = debug.getinfo(level, "f")
  end
  local given = "{ " .. table.concat(sorted_names(named), " = ..., ") .. " = ... }"
  if not fn then return end
  local call, names = caller.calls[fn], {}
  for i = call:find(":", 1, true) and 2 or 1, debug.getinfo(fn, "u").nparams do
    names[#names + 1] = debug.getlocal(fn, i)
    if names[#names] == "options" then return end
  end
  raise(("%s(%s) takes its arguments in this order, without names, but it was given %s"):format(call,
    table.concat(names, ", "), given))
end

--- Raises the error about a method that was called with a dot instead of a colon.
---@param call string how the method is called, such as "t:sum"
function caller.no_self(call)
  raise(("%s is a method, which is called with a colon: write %s(...), not with a dot"):format(call, call))
end

--- Returns the value of a word in the table `words`. An unknown word is an error that names the nearest known word.
---@param value any
---@param words table<string, any>
---@param what string what the word is for, such as "F.gelu: approximate"
---@return any
function caller.one_of(value, words, what)
  local found = type(value) == "string" and words[value]
  if found then return found end
  local names = sorted_names(words)
  local near = type(value) == "string" and nearest.find(value, names)
  raise(("%s is %s%s (there are %s)"):format(what, type(value) == "string" and ("'%s'"):format(value) or kind(value),
    near and ("; did you mean '%s'?"):format(near) or "", table.concat(names, ", ")))
end

--- Checks that a value has a given Lua type, such as "string", "table" or "number".
---@param value any
---@param want string
---@param what string name of the value in errors, such as "ps.data.tokens: the path"
---@return any value
function caller.typed(value, want, what)
  if type(value) ~= want then raise(("%s is %s; it must be a %s"):format(what, kind(value), want)) end
  return value
end

--- Raises an error if a value is neither a function nor a table with __call.
function caller.callable(value, what)
  local mt = type(value) == "table" and getmetatable(value)
  if type(value) ~= "function" and not (mt and mt.__call) then
    raise(("%s takes a function, not %s"):format(what, kind(value)))
  end
  return value
end

--- Checks that a value is a whole number of at least `least`. Its absolute value must be at most 2^53, because a double
--- represents every whole number only up to 2^53.
---@param value any
---@param what string name of the value in errors, such as "ps.train.run: steps"
---@param least? integer
---@return integer value
function caller.whole(value, what, least)
  local is = type(value) == "number" and value % 1 == 0 and math.abs(value) <= 2 ^ 53
  if is and not (least and value < least) then return value end
  raise(("%s is %s; it must be a whole number%s"):format(what, type(value) == "number" and ("%.14g"):format(value)
    or kind(value), least and (" from %d on"):format(least) or ""))
end

--- Checks a seed. A number that would wrap around or lose digits in 64 bits is an error. Otherwise two different seeds
--- could select the same stream.
---@param value any
---@param what string name of the value in errors, such as "ps.manual_seed"
---@return integer value
function caller.seed(value, what)
  local t = type(value)
  if t == "cdata" and tonumber(value) or t == "number" and value % 1 == 0 and value >= 0 and value <= 2 ^ 53 then
    return value
  end
  raise(("%s takes a whole number, not %s; a seed is from 0 to 2^53, or 64 bits (1ULL)"):format(what,
    t == "number" and ("%.14g"):format(value) or "a " .. t))
end

local ORDINALS = { "first", "second", "third" }

--- Raises the error about a surplus argument.
---@param call string the call, such as "t:sum"
---@param params string the function's parameters, separated by ", "
---@param value any the argument
---@param at? integer the argument's position (default: after the last parameter)
---@param hint? string what to write instead
function caller.more(call, params, value, at, hint)
  at = at or select(2, params:gsub("[^, ]+", "")) + 1
  local is = type(value) == "cdata" and "a tensor" or type(value) == "string" and ("'%s'"):format(value)
    or (type(value) == "number" or type(value) == "boolean") and tostring(value) or "a " .. type(value)
  raise(("%s(%s) has no %s argument; it was given %s%s"):format(call, params, ORDINALS[at] or at .. "th", is,
    hint or type(value) == "cdata" and ". (A call in the last place passes all its results; parentheses around it "
    .. "keep only the first.)" or ""))
end

--- Returns whether an error that pcall caught was raised by Ctrl-C (src/interrupt.c). Code that continues after a
--- failed read must raise this error again.
---@param problem any
---@return boolean
function caller.is_interrupt(problem)
  return type(problem) == "string" and problem:find("interrupted!", 1, true) ~= nil
end

--- Checks that a table is a list, whose keys are 1, 2, and so on. Any other key is an error, because its value would be
--- ignored.
---@param value table
---@param what string name of the list in errors, such as "ps.zeros: the shape"
---@param hint? string what to do with another key
---@return table value
function caller.list(value, what, hint)
  local key = keys_of.stray(caller.typed(value, "table", what))
  if key == nil then return value end
  if type(value[key]) ~= "cdata" then caller.check_named(value) end
  local name = type(key) == "string" and ("'%s'"):format(key) or ("[%s]"):format(tostring(key))
  raise(("%s has %s among its values, whose keys are 1, 2, ...; %s"):format(what, name,
    hint or "pass options as a separate table after it"))
end

--- Defines the checks of op arguments. ps.ffi calls this function after it has declared ps_tensor.
---@param tensor_type ffi.ctype*
function caller.for_tensors(tensor_type)
  local istype = ffi.istype
  KINDS.tensor[2] = function(value) return istype(tensor_type, value) end

  --- Checks an input of an op. The input must be a tensor or nil. The op itself may reject nil. `name` is the input's
  --- name, or its index in a list.
  function caller.tensor(value, op, name)
    if istype(tensor_type, value) or rawequal(value, nil) then return value end
    if type(value) == "cdata" and value == nil then return nil end                -- a NULL pointer
    if type(name) == "number" then name = "tensor " .. name end
    raise(("%s: %s is %s; it takes a tensor"):format(op, name, kind(value)))
  end

  --- Checks a number argument of an op. nil selects the default. The wrappers of ops call this function and
  --- caller.tensor only if their quick check fails. `ctype` is the integer type into which the number does not fit.
  function caller.number(value, op, name, ctype)
    local t = type(value)
    if t == "number" and ctype and ctype ~= "double" then
      raise(("%s: %s is %.17g; it takes a whole number that fits %s"):format(op, name, value, ctype))
    end
    if t == "number" or t == "nil" or t == "boolean" or t == "cdata" and tonumber(value) then return value end
    caller.check_named(value)
    local is = istype(tensor_type, value) and "a tensor" or kind(value)
    raise(("%s: %s is %s; it takes a number%s"):format(op, name, is, t == "table" and next(value) ~= nil
      and value[1] == nil and ": " .. caller.IN_ORDER or ""))
  end
end

return caller
