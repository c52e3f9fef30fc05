-- SPDX-License-Identifier: BSD-3-Clause
-- Hints for users with habits from other languages, mostly Python. If Lua rejects a text, the hint says what to write
-- instead. If a name is undefined, the hint says what the name means or what to write instead. The program adds a hint
-- to the error that it prints, and loads this file only after an error.
local lfs = require "lfs"
local nearest = require "ps.core.nearest"

local habits = {}

-- -- syntax errors ----------------------------------------------------------------------------------------------------
local BLOCK = "Lua has no blocks by indentation: write if x then ... elseif y then ... else ... end, "
  .. "for i = 1, n do ... end, while x do ... end"
local CHOICE = "Lua has no conditional expression: write c and a or b, or if c then x = a else x = b end"
local POWER = "the operator for powers is ^, as in x ^ 2"
local STEP = "Lua has no %s: write x = x %s y"
local LOCAL = "variables are declared by local: local x = 1"
local ERROR = "write error(\"the message\")"

-- Rules for a line whose strings were removed. A rule has a pattern for the line and a hint. If the line alone is not
-- sufficient, a rule also has a pattern for the message. The first rule that matches is used.
local LINES = {
  { "^%s*import%s+[%w_]", "Lua has no import: write local ps = require \"ps\"; local nn, F = ps.nn, ps.F" },
  { "^%s*from%s+[%w_.]+%s+import%s", "Lua has no import: write local ps = require \"ps\"; local nn, F = ps.nn, ps.F" },
  { "^%s*async%s+def%s", "write local function f(x) ... end" }, { "^%s*def%s", "write local function f(x) ... end, or "
    .. "function Net:forward(x) ... end for a method" },
  { "^%s*class%s+[%w_]", "write local Net = ps.nn.class(\"Net\"); function Net:init() ... end; "
    .. "function Net:forward(x) ... end" },
  { "^%s*elif%s", "write elseif x then" },
  { "%S%s*@%s*[%w_(]", "the product of matrices is a:matmul(b)", "near '@'" },
  { "print%s*%(.*[,(]%s*end%s*=", "print has no options: io.write(x, \" \") writes texts without an end of line",
    "near 'end'" },
  { "^%s*help%s+[%w_]", "write help(x), or help \"name\"", "'=' expected" },
  { "!=", "the operator for inequality is ~=" }, { "&&", "write and" }, { "||", "write or" },
  { "![%w_(]", "write not x" },
  { "%+%+", STEP:format("++", "+") }, { "[%w_%])]%s*%+=", STEP:format("+=", "+") },
  { "[%w_%])]%s*%-=", STEP:format("-=", "-") },
  { "[%w_%])]%s*%*=", STEP:format("*=", "*") }, { "[%w_%])]%s*/=", STEP:format("/=", "/") },
  { "%*%*", POWER, "near '%*'" },
  { "#", "comments begin with --", "near '#'" }, { "^%s*#", "comments begin with --" },
  { "^%s*//", "comments begin with --" }, { "//", "write math.floor(a / b)", "near '/'" },
  { "%f[%w]lambda%f[%W]", "write function(x) return x end" },
  { "^%s*try%s*:", "write local ok, problem = pcall(function() ... end)" },
  { "^%s*except%f[%W]", "write local ok, problem = pcall(function() ... end)" },
  { "^%s*with%s.*:%s*$", "Lua has no with: write ps.no_grad(function() ... end), or call a function at the end" },
  { "%sis%s+not%s", "write x ~= nil" }, { "%sis%s", "write x == nil" },
  { "%snot%s+in%s", "Lua has no in: look a key up, t[key] == nil" },
  { "[%w_]%s*%[[^%]]*:", "a part of a tensor is t[{ { 1, 3 }, ps.all }]: { 1, 3 } is Python's 1:3, ps.all is :",
    "near '[:,]'" },
  { "{", "a table is { a = 1, [\"b c\"] = 2 }", "near ':'" },
  { "%[", "a list is { 1, 2, 3 }", "unexpected symbol near '%['" },
  { "[%w_]%s*%(.*=", "Lua has no named arguments: pass a table of options, as in f(x, { name = 1 })",
    "'%)' expected near '='" },
  { "^%s*continue%s*;?%s*$", "Lua has no continue: write goto continue, and ::continue:: before the loop's end" },
  { "^%s*pass%s*$", "Lua needs no pass: leave the block empty" },
  { "^%s*let%s", LOCAL }, { "^%s*const%s", LOCAL }, { "^%s*var%s", LOCAL },
  { "^%s*raise%f[%W]", ERROR }, { "^%s*throw%f[%W]", ERROR },
  { "^%s*assert%s+[%w_]", "write assert(x > 0, \"the message\")" }, { "^%s*del%s", "write x = nil" },
  { "^%s*if%f[%W].*:%s*$", BLOCK }, { "^%s*else%s*:%s*$", BLOCK }, { "^%s*for%s.*:%s*$", BLOCK },
  { "^%s*while%s.*:%s*$", BLOCK },
  { "%S%s+if%s.*%selse%f[%W]", CHOICE }, { "%?", CHOICE, "near '%?'" },
  { "^%s*if%f[%W]", "the operator for equality is ==", "'then' expected near '='" },
  { "^%s*elseif%f[%W]", "the operator for equality is ==", "'then' expected near '='" },
  { "%)%s*{", "blocks are not in braces: write function f(x) ... end, if x then ... end, for i = 1, n do ... end" },
  { "%d_%d", "write the digits without _", "malformed number" },
}

-- Returns a line without the contents of its strings and without its comment.
local function bare(line)
  return (line:gsub("\\.", ""):gsub("[fr]?(['\"]).-%1", "%1%1"):gsub("%-%-.*$", ""))
end

local function hint_of(line, message)
  if line:find('"""', 1, true) or line:find("'''", 1, true) then
    return "a text of several lines is [[ ... ]], and a comment of several lines is --[[ ... ]]"
  end
  line = bare(line)
  for _, rule in ipairs(LINES) do
    if line:find(rule[1]) and (not rule[3] or message:find(rule[3])) then return rule[2] end
  end
end

local function read(path)
  if lfs.attributes(path, "mode") ~= "file" then return nil end
  local file = io.open(path, "rb")
  local text = file and file:read(2 ^ 22)
  if file then file:close() end
  return text
end

-- Returns the hint for a syntax error in a text. The hint is about the line of the error or the line before it, because
-- Lua may detect an error only at the next word.
local function of_text(text, number, message)
  local lines = {}
  for line in (text .. "\n"):gmatch "(.-)\r?\n" do lines[#lines + 1] = line end
  if message:find("'end' expected", 1, true) and message:find("<eof>", 1, true) then
    for i, line in ipairs(lines) do
      if bare(line):find "^%s*else%s+if%s" then
        return ("line %d has else if, which needs an end of its own: write elseif"):format(i)
      end
    end
  end
  local found = lines[number] and hint_of(lines[number], message)
  local before = number - 1
  while before > 0 and lines[before] and not bare(lines[before]):find "%S" do before = before - 1 end
  local hint = found or lines[before] and hint_of(lines[before], message)
  return hint and (found or number == before) and hint or hint and ("line %d: %s"):format(before, hint)
end

-- -- undefined names --------------------------------------------------------------------------------------------------
local CONDITION = "write c and a or b"
local GLOBALS = {
  ps = "write local ps = require \"ps\" at the beginning of the script",
  nn = "write local nn = ps.nn", F = "write local F = ps.F", optim = "write local optim = ps.optim",
  torch = "write local ps = require \"ps\"; ps has PyTorch's functions, and ps.nn, ps.F and ps.optim",
  np = "write ps.tensor { ... } for arrays, and math for numbers", numpy = "write ps.tensor { ... } for arrays",
  self = "a function that uses self is declared with a colon: function Net:forward(x)",
  len = "write #x, or t:size(0) for a tensor", range = "write for i = 0, n - 1 do", str = "write tostring(x)",
  int = "write math.floor(x), or t:to(\"int32\") for a tensor", float = "write tonumber(x), or t:float() for a tensor",
  bool = CONDITION, isinstance = "write type(x) == \"number\", or module:is_a(class)",
  enumerate = "write for i, x in ipairs(list) do", zip = "write for i = 1, #a do local x, y = a[i], b[i]",
  super = "write Base.init(self, ...)", abs = "write math.abs(x)", max = "write math.max(x, y)",
  min = "write math.min(x, y)", sum = "write t:sum() for a tensor, or a loop", round = "write math.floor(x + 0.5)",
  open = "write io.open(path)", input = "write io.read()", list = "a list is { 1, 2, 3 }",
  dict = "a table is { a = 1 }",
  tuple = "a list is { 1, 2, 3 }", sorted = "write table.sort(list)", format = "write (\"%d\"):format(x)",
  f = "Lua has no f\"{x}\": write (\"%s\"):format(x)", hasattr = "write x.name ~= nil", getattr = "write x[name]",
  setattr = "write x[name] = value", exit = "write os.exit()", quit = "write os.exit()", sleep = "write os.execute "
    .. "\"sleep 1\"", printf = "write print((\"%d\"):format(x))", console = "write print(x)", echo = "write print(x)",
}

local METHODS = {
  append = "write table.insert(list, x)", extend = "write a loop of table.insert(list, x)",
  items = "write for key, value in pairs(t) do", keys = "write for key in pairs(t) do",
  values = "write for _, value in pairs(t) do", split = "write for word in s:gmatch \"%S+\" do",
  strip = "write s:match \"^%s*(.-)%s*$\"", join = "write table.concat(list, separator)",
  startswith = "write s:sub(1, #start) == start", endswith = "write s:sub(-#ending) == ending",
  replace = "write s:gsub(pattern, text)",
}

local LEAST = 4                                            -- names with fewer letters get no suggestion

-- Returns the hint for an error of a running script.
local function of_running(message)
  local name = message:match "attempt to [%a ]- global '([%w_]+)' %(a nil value%)"
  if name then
    if GLOBALS[name] then return GLOBALS[name] end
    local names = {}
    for key in next, _G do if type(key) == "string" and key:sub(1, 1) ~= "_" then names[#names + 1] = key end end
    table.sort(names)
    local near = #name >= LEAST and nearest.find(name, names)
    local alike = near and nearest.distance(name, near) <= math.max(1, math.floor(#name / 4))
    return alike and ("did you mean %s?"):format(near) or nil
  end
  name = message:match "attempt to call method '([%w_]+)' %(a nil value%)"
    or message:match "attempt to call field '([%w_]+)' %(a nil value%)"
  if name then return METHODS[name] end
  if message:find "attempt to index local 'self' %(a %a+ value%)" then
    return "a method is called with a colon, as in model:forward(x): with a dot it has no self"
  end
  name = message:match "attempt to [%a ]- [%a]+ '([%w_]+)' %(a function value%)"
  if name then return ("%s is a function or a method: call it, as in x:%s()"):format(name, name) end
  if message:find "attempt to perform arithmetic on .*a? ?string value" then
    return "texts are joined by ..: \"a\" .. \"b\", and (\"%d\"):format(x) writes numbers into a text"
  end
  if message:find "attempt to call a table value" then
    return "a loop over a list is for i, x in ipairs(list) do, and over a table for key, x in pairs(t) do"
  end
  if message:find("number expected, got cdata", 1, true) then
    return "if it is a tensor, t:item() is the number of its only element"
  end
  if message:find("string expected, got cdata", 1, true) then
    return "if it is a tensor, tostring(t) is its text, and t:item() the number of its only element"
  end
end

local MOST = 4096                            -- largest message that gets a hint, in bytes; Lua's own errors are shorter

-- -- the hint ---------------------------------------------------------------------------------------------------------
--- Returns a message with a hint added. If there is no hint, returns the message unchanged. A traceback stays at the
--- end.
---@param message string
---@param text? string the text with the syntax error; by default it is read from the file that the message names
---@return string
function habits.hinted(message, text)
  local at = message:find("\nstack traceback:", 1, true) or #message + 1
  if at > MOST then return message end
  local before, trace = message:sub(1, at - 1), message:sub(at)
  local place, number, what = before:match "([^\n\t]-):(%d+): ([^\n]* near '[^\n]*)$"
  local hint
  if place then
    text = text or read(place)
    hint = text and of_text(text, tonumber(number), what)
  else hint = of_running(before) end
  if not hint then return message end
  return ("%s\n  %s%s"):format(before, hint, trace)
end

return habits
