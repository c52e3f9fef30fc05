-- SPDX-License-Identifier: BSD-3-Clause
-- The part of Python's regular expressions that PEFT's configurations use for names of modules:
--   literals, ".", and classes in brackets
--   \d \w \s and \D \W \S
--   groups: (...), (?:...) and (?P<name>...)
--   alternatives: a|b
--   repetitions: * + ? {m,n}, greedy or lazy
--   the anchors ^ and $
-- Other constructs are errors. A pattern always matches the whole text.
local error = require("ps.core.caller").error

local regex = {}

local MOST = 1e6                                           -- maximum number of repetitions that are tried for one text

local CLASSES = { d = "%d", D = "%D", w = "[%w_]", W = "[^%w_]", s = "%s", S = "%S" }
local ESCAPES = { n = "\n", t = "\t", r = "\r" }

---@class ps.lora.RegexParser
---@field text string
---@field at integer the position of the next character
---@field tries integer number of repetitions that were tried for the current text
local Parser = {}
Parser.__index = Parser

function Parser:fail(what)
  error(("the pattern '%s' is not supported: %s at character %d"):format(self.text, what, self.at))
end

function Parser:peek() return self.text:sub(self.at, self.at) end

function Parser:take(literal)
  if self.text:sub(self.at, self.at + #literal - 1) ~= literal then return false end
  self.at = self.at + #literal
  return true
end

-- Returns a matcher for one character of a set. A matcher is a function m(s, i, k) that tries to match a piece of s
-- that begins at i. The matcher returns true if it finds a piece for which k(j) is true, where j is the position after
-- the piece.
local function of_set(contains)
  return function(s, i, k) return i <= #s and contains(s:sub(i, i)) and k(i + 1) end
end

local function literal(char) return of_set(function(c) return c == char end) end

-- Parses an escape sequence. Returns its set of characters, as a function that tells whether a character is in the set.
function Parser:escape()
  local c = self:peek()
  self.at = self.at + 1
  local class = CLASSES[c]
  if class then return function(one) return one:find("^" .. class) ~= nil end end
  if c == "" or c:find "^[%w]" and not ESCAPES[c] then
    self.at = self.at - 1
    self:fail("\\" .. c)
  end
  c = ESCAPES[c] or c
  return function(one) return one == c end, c
end

-- Parses [...], a set of characters in brackets. The opening bracket has already been read.
function Parser:class()
  local negated, sets, first = self:take "^", {}, true
  while first or self:peek() ~= "]" do
    if self:peek() == "" then self:fail "a class without its ]" end
    first = false
    local low = self:peek()
    self.at = self.at + 1
    if low == "\\" then
      sets[#sets + 1] = self:escape()
    elseif self.text:find("^%-[^%]\\]", self.at) then
      local high = self.text:sub(self.at + 1, self.at + 1)
      self.at = self.at + 2
      sets[#sets + 1] = function(c) return low <= c and c <= high end
    else
      sets[#sets + 1] = function(c) return c == low end
    end
  end
  self.at = self.at + 1
  return of_set(function(c)
    local found = false
    for _, set in ipairs(sets) do found = found or set(c) end
    return found ~= negated
  end)
end

function Parser:group()
  if self:take "?" and not self:take ":" then
    if not self:take "P<" then self:fail("(?" .. self:peek()) end
    local name = self.text:match("^[%a_][%w_]*>", self.at)
    if not name then self:fail "a group without a name" end
    self.at = self.at + #name
  end
  local inner = self:alternatives()
  if not self:take ")" then self:fail "a group without its )" end
  return inner
end

function Parser:atom()
  local c = self:peek()
  self.at = self.at + 1
  if c == "." then return of_set(function(one) return one ~= "\n" end) end
  if c == "(" then return self:group() end
  if c == "[" then return self:class() end
  if c == "\\" then return of_set((self:escape())) end
  if c == "^" then return function(_, i, k) return i == 1 and k(i) end end
  if c == "$" then return function(s, i, k) return i == #s + 1 and k(i) end end
  if c == "*" or c == "+" or c == "?" then
    self.at = self.at - 1
    self:fail("nothing to repeat before " .. c)
  end
  return literal(c)
end

-- Parses a repetition. Returns its lower and upper bound, or nil if there is no repetition.
function Parser:bounds()
  if self:take "*" then return 0, math.huge end
  if self:take "+" then return 1, math.huge end
  if self:take "?" then return 0, 1 end
  local low, comma, high = self.text:match("^{(%d+)(,?)(%d*)}", self.at)
  if not low then return end
  self.at = self.text:find("}", self.at, true) + 1
  return tonumber(low), comma == "" and tonumber(low) or tonumber(high) or math.huge
end

-- Returns a matcher for a repetition. The number of tries is limited, because the time of nested repetitions such as
-- (a*)*b grows exponentially with the length of the text.
local function repeated(parser, one, low, high, lazy)
  local function more(s, i, k, n)
    parser.tries = parser.tries + 1
    if parser.tries > MOST then
      error(("the pattern '%s' takes too long to match '%s'; write it without repetitions inside repetitions"):format(
        parser.text, s))
    end
    local function again()
      return n < high and one(s, i, function(j) return (j > i or n < low) and more(s, j, k, n + 1) end)
    end
    if n < low then return again() end
    if lazy then return k(i) or again() end
    return again() or k(i)
  end
  return function(s, i, k) return more(s, i, k, 0) end
end

local function both(a, b)
  return function(s, i, k) return a(s, i, function(j) return b(s, j, k) end) end
end

function Parser:sequence()
  local all = function(_, i, k) return k(i) end
  while self.at <= #self.text and self:peek() ~= "|" and self:peek() ~= ")" do
    local one = self:atom()
    local low, high = self:bounds()
    if low then one = repeated(self, one, low, high, self:take "?") end
    all = both(all, one)
  end
  return all
end

function Parser:alternatives()
  local list = { self:sequence() }
  while self:take "|" do list[#list + 1] = self:sequence() end
  if #list == 1 then return list[1] end
  return function(s, i, k)
    for _, one in ipairs(list) do if one(s, i, k) then return true end end
    return false
  end
end

--- Compiles a pattern. Returns a function that tells whether the pattern matches a whole text.
---@param text string the pattern
---@return fun(s: string): boolean
function regex.compile(text)
  local parser = setmetatable({ text = text, at = 1, tries = 0 }, Parser)
  local matcher = parser:alternatives()
  if parser.at <= #text then parser:fail "a ) without its (" end
  return function(s)
    parser.tries = 0
    return matcher(s, 1, function(i) return i == #s + 1 end) and true or false
  end
end

return regex
