-- SPDX-License-Identifier: BSD-3-Clause
-- Divides a chat template into tokens. As in transformers, two settings of Jinja are always on. trim_blocks removes the
-- newline after a block. lstrip_blocks removes the spaces between the start of a line and a block.
local characters = require "ps.chat.characters"
local text = require "ps.chat.text"

local lexer = {}

---@class ps.chat.Token
---@field type string "data"; "begin" and "end" of a block; "open" and "close" of a printed value; "name", "string",
--- "number", "float", "op", "eof"
---@field value any
---@field line integer

--- Raises an error about a line of the template.
---@param line integer
---@param message string
---@param ... any arguments for the format in `message`
function lexer.fail(line, message, ...)
  error({ template = ("line %d: "):format(line) .. message:format(...) }, 0)
end
local fail = lexer.fail

local OPERATORS = { "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "<", ">", "=", ".", ":", "|", ",",
  ";", "(", ")", "[", "]", "{", "}" }
local CLOSES = { [")"] = "(", ["]"] = "[", ["}"] = "{" }
local SIMPLE = { n = "\n", t = "\t", r = "\r", a = "\a", b = "\b", f = "\f", v = "\v", ["\\"] = "\\", ["'"] = "'",
  ['"'] = '"', ["\n"] = "" }
local HEX = { x = 2, u = 4, U = 8 }

-- Replaces Python's escape sequences, such as \n, in a string.
local function unescape(s, line)
  local parts, at = {}, 1
  while true do
    local stop = s:find("\\", at, true)
    if not stop then break end
    parts[#parts + 1] = s:sub(at, stop - 1)
    local c = s:sub(stop + 1, stop + 1)
    at = stop + 2
    if SIMPLE[c] then parts[#parts + 1] = SIMPLE[c]
    elseif HEX[c] then
      local hex = s:match("^" .. ("%x"):rep(HEX[c]), at) or fail(line, "\\%s needs %d hexadecimal digits", c, HEX[c])
      local point = tonumber(hex, 16)
      at = at + HEX[c]
      if point > 0x10ffff or (point >= 0xd800 and point < 0xe000) then
        fail(line, "\\%s%s is not a character", c, hex)
      end
      parts[#parts + 1] = characters.utf8(point)
    elseif c:find "[0-7]" then
      local octal = s:match("^[0-7][0-7]?[0-7]?", stop + 1)
      parts[#parts + 1] = characters.utf8(tonumber(octal, 8))
      at = stop + 1 + #octal
    elseif c == "N" then fail(line, "\\N in a string is not supported")
    else parts[#parts + 1] = "\\" .. c end
  end
  parts[#parts + 1] = s:sub(at)
  return table.concat(parts)
end

-- Returns the position of the first character at or after `at` that does not match Python's \s.
local function spaces(s, at)
  while true do
    local c = s:match("^[^\128-\191][\128-\191]*", at)
    if not c or not text.is_space(c) then return at end
    at = at + #c
  end
end

---@param source string valid UTF-8
---@return ps.chat.Token[]
function lexer.tokens(source)
  local s = source:gsub("\r\n", "\n"):gsub("\r", "\n"):gsub("\n$", "")
  -- fresh: true if `at` is at the start of the text or just after a removed newline
  local tokens, at, line, fresh = {}, 1, 1, true
  local function advance(to)
    local _, n = s:sub(at, to - 1):gsub("\n", "")
    line, at = line + n, to
  end
  local function add(kind, value) tokens[#tokens + 1] = { type = kind, value = value, line = line } end

  -- Adds the text between `at` and a tag that begins at `to`. `sign` is "-", "+" or "", as written in the tag. `block`
  -- is true for {% and false for {{.
  local function data(to, sign, block)
    local part = s:sub(at, to - 1)
    if sign == "-" then part = text.strip(part, nil, false, true)
    elseif sign ~= "+" and block then
      local before, tail = part:match "^(.*\n)(.*)$"
      if not before then before, tail = "", part end
      if (before ~= "" or fresh) and text.strip(tail, nil, true, false) == "" then part = before end
    end
    if part ~= "" then add("data", part) end
    advance(to)
  end

  -- Processes the end of a tag. Then skips the spaces after the tag that its sign or trim_blocks removes.
  local function finish(to, sign, block)
    local after = to
    if sign == "-" then after = spaces(s, to)
    elseif block and sign ~= "+" and s:sub(to, to) == "\n" then after = to + 1 end
    fresh = s:sub(after - 1, after - 1) == "\n"
    advance(after)
  end

  local function number()
    local digits = s:match("^%d[%d_]*", at)
    local stop = at + #digits
    local rest = s:match("^%.%d[%d_]*", stop) or ""
    rest = rest .. (s:match("^[eE][+-]?%d[%d_]*", stop + #rest) or "")
    local prefixed = s:match("^0[xXoObB][%x_]+", at)
    if prefixed then
      local base = ({ x = 16, o = 8, b = 2 })[prefixed:sub(2, 2):lower()]
      add("number", tonumber((prefixed:sub(3):gsub("_", "")), base) or fail(line, "'%s' is not a number", prefixed))
      return advance(at + #prefixed)
    end
    if rest ~= "" then add("float", tonumber(((digits .. rest):gsub("_", ""))))
    else
      local x = tonumber((digits:gsub("_", "")))
      if x >= 2 ^ 53 then fail(line, "the number %s is over 2^53", digits) end
      add("number", x)
    end
    advance(stop + #rest)
  end

  local function string_literal(quote)
    local stop = at + 1
    while true do
      stop = s:find("[\\" .. quote .. "]", stop) or fail(line, "a string has no end")
      if s:sub(stop, stop) == quote then break end
      stop = stop + 2
    end
    add("string", unescape(s:sub(at + 1, stop - 1), line))
    advance(stop + 1)
  end

  -- Reads one token of an expression.
  local function expression(open)
    local c = s:sub(at, at)
    if c:find "[%a_\128-\255]" then
      local name = s:match("^[%w_\128-\255]+", at)
      add("name", name)
      return advance(at + #name)
    end
    if c:find "%d" then return number() end
    if c == "'" or c == '"' then return string_literal(c) end
    for _, op in ipairs(OPERATORS) do
      if s:sub(at, at + #op - 1) == op then
        if op == "(" or op == "[" or op == "{" then open[#open + 1] = op end
        if CLOSES[op] and table.remove(open) ~= CLOSES[op] then fail(line, "unexpected '%s'", op) end
        add("op", op)
        return advance(at + #op)
      end
    end
    fail(line, "unexpected character '%s'", s:match("^[^\128-\191][\128-\191]*", at) or c)
  end

  local function tag(kind, opening, closing, block)
    add(kind == "block" and "begin" or "open")
    local start, open = line, {}
    while true do
      at = (function() advance(spaces(s, at)); return at end)()
      if at > #s then fail(start, "'%s' has no end", opening) end
      local sign = s:match("^[-+]?", at)
      if #open == 0 and s:sub(at + #sign, at + #sign + 1) == closing and (sign ~= "+" or block) then
        add(kind == "block" and "end" or "close")
        return finish(at + #sign + 2, sign, block)
      end
      expression(open)
    end
  end

  while at <= #s do
    local first, last, what, sign = s:find("{([{%%#])([-+]?)", at)
    if not first then
      add("data", s:sub(at))
      break
    end
    data(first, sign, what ~= "{")
    local start = line
    if what == "#" then
      local stop = s:find("#}", last + 1, true) or fail(start, "a comment has no end")
      local mark = s:sub(stop - 1, stop - 1)
      finish(stop + 2, stop - 1 > last and mark:match "[-+]" or "", true)
    else
      local raw, after = s:match("^{%%[-+]?%s*raw%s*(-?)%%}()", first)
      if raw then
        advance(raw == "-" and spaces(s, after) or after)
        local from, to, left, right = s:find("{%%([-+]?)%s*endraw%s*([-+]?)%%}", at)
        if not from then fail(start, "'raw' has no end") end
        fresh = false
        data(from, left, true)
        finish(to + 1, right, true)
      else
        advance(last + 1)
        if what == "%" then tag("block", "{%", "%}", true) else tag("value", "{{", "}}", false) end
      end
    end
  end
  add "eof"
  return tokens
end

return lexer
