-- SPDX-License-Identifier: BSD-3-Clause
-- Parses the subset of Jinja that chat templates use. The result is a list of nodes. A node is a table that contains
-- the kind of the node, its line, and its parts. If the template contains a construct that is not in this subset, the
-- parser raises an error with the construct and its line.
local lexer = require "ps.chat.lexer"
local values = require "ps.chat.values"
local fail = lexer.fail

---@class ps.chat.Parser
---@field tokens ps.chat.Token[]
---@field at integer index of the next token
---@field depth integer depth of nested expressions and statements
local Parser = {}
Parser.__index = Parser

local DEPTH = 150                                          -- maximum nesting of expressions and statements
local REFUSED = { block = true, extends = true, include = true, import = true, from = true, autoescape = true,
  ["do"] = true, trans = true, pluralize = true, debug = true }
local CONSTANTS = { ["true"] = true, True = true, ["false"] = false, False = false, none = values.NONE,
  None = values.NONE }
local COMPARISONS = { ["=="] = true, ["!="] = true, ["<"] = true, ["<="] = true, [">"] = true, [">="] = true }

function Parser:peek() return self.tokens[self.at] end

function Parser:next()
  local token = self.tokens[self.at]
  if token.type ~= "eof" then self.at = self.at + 1 end
  return token
end

function Parser:is(kind, value)
  local token = self.tokens[self.at]
  return token.type == kind and (value == nil or token.value == value)
end

function Parser:skip(kind, value)
  if not self:is(kind, value) then return false end
  self:next()
  return true
end

-- Returns a token as text for an error.
local function shown(token)
  if token.type == "eof" then return "the end of the template" end
  if token.type == "end" then return "'%}'" elseif token.type == "close" then return "'}}'" end
  return "'" .. tostring(token.value or token.type) .. "'"
end

function Parser:expect(kind, value)
  local token = self:peek()
  if not self:is(kind, value) then
    fail(token.line, "%s where '%s' is expected", shown(token), value or kind == "end" and "%}" or kind)
  end
  return self:next()
end

function Parser:node(kind, line)
  return { kind = kind, line = line or self:peek().line }
end

function Parser:nested(fn, ...)
  self.depth = self.depth + 1
  if self.depth > DEPTH then fail(self:peek().line, "expressions are nested over %d levels deep", DEPTH) end
  local node = fn(self, ...)
  self.depth = self.depth - 1
  return node
end

function Parser:expression() return self:nested(self.conditional) end

function Parser:conditional()
  local node = self:either()
  while self:is("name", "if") do
    local line = self:next().line
    local cond = self:node("conditional", line)
    cond.yes, cond.test = node, self:either()
    if self:skip("name", "else") then cond.no = self:expression() end
    node = cond
  end
  return node
end

-- Returns a function that parses a chain of left-associative operators with the same precedence. `inner` is the name of
-- the method that parses an operand.
local function left(operators, inner, kind)
  return function(self)
    local node = self[inner](self)
    while self:is(kind) and operators[self:peek().value] do
      local token = self:next()
      local op = self:node("binary", token.line)
      op.op, op.left, op.right = token.value, node, self[inner](self)
      node = op
    end
    return node
  end
end
Parser.either = left({ ["or"] = true }, "both", "name")
Parser.both = left({ ["and"] = true }, "negation", "name")
Parser.sum = left({ ["+"] = true, ["-"] = true }, "joined", "op")
Parser.joined = left({ ["~"] = true }, "product", "op")
Parser.product = left({ ["*"] = true, ["/"] = true, ["//"] = true, ["%"] = true }, "power", "op")
Parser.power = left({ ["**"] = true }, "unary", "op")

function Parser:negation()
  if not self:is("name", "not") then return self:comparison() end
  local node = self:node "not"
  self:next()
  node.value = self:nested(self.negation)
  return node
end

function Parser:comparison()
  local node, chain = self:sum(), nil
  while true do
    local token, op = self:peek(), nil
    if token.type == "op" and COMPARISONS[token.value] then op = token.value
    elseif self:is("name", "in") then op = "in"
    elseif self:is("name", "not") then
      local after = self.tokens[self.at + 1]
      if after.type ~= "name" or after.value ~= "in" then break end
      self:next()
      op = "not in"
    end
    if not op then break end
    self:next()
    chain = chain or { kind = "compare", line = token.line, first = node, ops = {}, others = {} }
    chain.ops[#chain.ops + 1], chain.others[#chain.others + 1] = op, self:sum()
  end
  return chain or node
end

function Parser:unary(bare)
  local node = self:node "negative"
  if self:is("op", "-") or self:is("op", "+") then
    if self:next().value == "+" then node.kind = "positive" end
    node.value = self:nested(self.unary, true)
  else
    node = self:primary()
  end
  node = self:postfix(node)
  if not bare then node = self:filters(node) end
  return node
end

function Parser:primary()
  local token = self:next()
  local node = self:node("constant", token.line)
  if token.type == "name" then
    if CONSTANTS[token.value] ~= nil then node.value = CONSTANTS[token.value]
    else node.kind, node.name = "name", token.value end
  elseif token.type == "string" then
    local parts = { token.value }
    while self:is "string" do parts[#parts + 1] = self:next().value end
    node.value = table.concat(parts)
  elseif token.type == "number" then node.value = token.value
  elseif token.type == "float" then node.value = values.float(token.value)
  elseif token.type == "op" and token.value == "(" then
    node = self:tuple(true, true)
    self:expect("op", ")")
  elseif token.type == "op" and token.value == "[" then
    node.kind, node.items = "list", {}
    while not self:is("op", "]") do
      node.items[#node.items + 1] = self:expression()
      if not self:skip("op", ",") then break end
    end
    self:expect("op", "]")
  elseif token.type == "op" and token.value == "{" then
    node.kind, node.keys, node.items = "dict", {}, {}
    while not self:is("op", "}") do
      node.keys[#node.keys + 1] = self:expression()
      self:expect("op", ":")
      node.items[#node.items + 1] = self:expression()
      if not self:skip("op", ",") then break end
    end
    self:expect("op", "}")
  else
    fail(token.line, "found %s, but expected a value", shown(token))
  end
  return node
end

-- Parses an expression, or a tuple of expressions that are separated by commas. If `empty` is true, the tuple may have
-- no items.
function Parser:tuple(with_conditional, empty)
  local line, items, is_tuple = self:peek().line, {}, false
  local function ends()
    local token = self:peek()
    return token.type == "end" or token.type == "close" or token.type == "eof"
      or (token.type == "op" and (token.value == ")" or token.value == "="))
      or (not with_conditional and token.type == "name" and token.value == "recursive")
  end
  while not ends() do
    items[#items + 1] = with_conditional and self:expression() or self:nested(self.either)
    if not self:skip("op", ",") then break end
    is_tuple = true
  end
  if not is_tuple then
    if #items == 1 then return items[1] end
    if not empty then fail(line, "found %s, but expected a value", shown(self:peek())) end
  end
  return { kind = "tuple", line = line, items = items }
end

function Parser:subscript()
  local line, parts = self:peek().line, {}
  local slice, expecting = false, true
  while not self:is("op", "]") do
    if self:skip("op", ":") then
      if expecting then parts[#parts + 1] = false end
      slice, expecting = true, true
    elseif self:is("op", ",") then
      fail(line, "a subscript of several values is not supported")
    else
      parts[#parts + 1], expecting = self:expression(), false
    end
    if #parts > 3 then fail(line, "a slice has at most three parts") end
  end
  if slice and expecting then parts[#parts + 1] = false end
  self:expect("op", "]")
  if slice then return { kind = "slice", line = line, parts = parts } end
  return parts[1] or fail(line, "an empty subscript")
end

-- Parses the arguments of a call. The caller has already read the "(".
function Parser:arguments()
  local args = { positional = {}, named = {} }
  while not self:is("op", ")") do
    local after = self.tokens[self.at + 1]
    if self:is("op", "*") or self:is("op", "**") then
      fail(self:peek().line, "'%s' in the arguments of a call is not supported", self:peek().value)
    elseif self:is "name" and after.type == "op" and after.value == "=" then
      local name = self:next().value
      self:next()
      args.named[#args.named + 1] = { name, self:expression() }
    else
      if #args.named > 0 then fail(self:peek().line, "a positional argument follows a named one") end
      args.positional[#args.positional + 1] = self:expression()
    end
    if not self:skip("op", ",") then break end
  end
  self:expect("op", ")")
  return args
end

function Parser:postfix(node)
  while true do
    local line = self:peek().line
    if self:skip("op", ".") then
      local token = self:next()
      if token.type == "name" then node = { kind = "attribute", line = line, value = node, name = token.value }
      elseif token.type == "number" then
        local key = { kind = "constant", line = line, value = token.value }
        node = { kind = "item", line = line, value = node, key = key }
      else fail(line, "found %s, but expected a name", shown(token)) end
    elseif self:skip("op", "[") then
      node = { kind = "item", line = line, value = node, key = self:subscript() }
    elseif self:skip("op", "(") then
      node = { kind = "call", line = line, value = node, args = self:arguments() }
    else
      return node
    end
  end
end

-- Parses a filter. The caller has already read the "|". If self.soft is true, the filter's name may be unknown: an
-- error is raised only when the filter is called.
function Parser:filter(node)
  local token = self:expect "name"
  local filter = { kind = "filter", line = token.line, name = token.value, value = node, soft = self.soft }
  filter.args = self:skip("op", "(") and self:arguments() or { positional = {}, named = {} }
  return filter
end

function Parser:test(node)
  local line = self:next().line
  local negated = self:skip("name", "not")
  local name = self:expect("name").value
  local test = { kind = "test", line = line, name = name, value = node, soft = self.soft,
    args = { positional = {}, named = {} } }
  local token = self:peek()
  if self:skip("op", "(") then
    test.args = self:arguments()
  elseif (token.type == "name" and not ({ ["else"] = 1, ["or"] = 1, ["and"] = 1, ["if"] = 1, ["in"] = 1, ["not"] = 1,
      ["is"] = 1, recursive = 1 })[token.value])
      or token.type == "string" or token.type == "number" or token.type == "float"
      or (token.type == "op" and (token.value == "[" or token.value == "{")) then
    test.args.positional[1] = self:postfix(self:primary())
  elseif token.type == "name" and token.value == "is" then
    fail(token.line, "a test after a test: parentheses are missing")
  end
  if negated then return { kind = "not", line = line, value = test } end
  return test
end

function Parser:filters(node)
  while true do
    if self:skip("op", "|") then node = self:filter(node)
    elseif self:is("name", "is") then node = self:test(node)
    elseif self:is("op", "(") then
      local line = self:next().line
      node = { kind = "call", line = line, value = node, args = self:arguments() }
    else return node end
  end
end

-- Parses the target of `set` or `for`: a name, or several names that are separated by commas. If `namespaces` is true,
-- the target may also be a field of a namespace.
function Parser:target(namespaces)
  local line, names, several = self:peek().line, {}, false
  local parens = self:skip("op", "(")
  repeat
    if #names > 0 and not self:is "name" then break end
    local token = self:expect "name"
    if CONSTANTS[token.value] ~= nil then fail(token.line, "'%s' cannot be assigned to", token.value) end
    local target = { kind = "name", line = token.line, name = token.value }
    if namespaces and self:skip("op", ".") then
      target = { kind = "field", line = token.line, name = token.value, field = self:expect("name").value }
    end
    names[#names + 1] = target
    local more = self:skip("op", ",")
    several = several or more
  until not more
  if parens then self:expect("op", ")") end
  if not several then return names[1] end
  return { kind = "names", line = line, names = names }
end

local STATEMENTS = {}

STATEMENTS["for"] = function(self, line)
  local node = { kind = "for", line = line, target = self:target() }
  self:expect("name", "in")
  node.items = self:tuple(false)
  if self:skip("name", "if") then node.test = self:expression() end
  if self:is("name", "recursive") then fail(line, "'recursive' of a loop is not supported") end
  self:expect "end"
  local word
  node.body, word = self:body { endfor = true, ["else"] = true }
  if word == "else" then
    self:expect "end"
    node.otherwise = self:body { endfor = true }
  end
  return node
end

STATEMENTS["if"] = function(self, line)
  local node = { kind = "if", line = line, tests = {}, bodies = {} }
  local word
  local soft = self.soft
  repeat
    node.tests[#node.tests + 1] = self:tuple(false, false)
    self:expect "end"
    self.soft = true
    node.bodies[#node.bodies + 1], word = self:body { endif = true, ["else"] = true, ["elif"] = true }
    self.soft = soft
  until word ~= "elif"
  if word == "else" then
    self:expect "end"
    self.soft = true
    node.otherwise = self:body { endif = true }
    self.soft = soft
  end
  return node
end

-- Parses the parameters of a macro. The caller has already read the "(".
function Parser:parameters(node)
  node.names, node.defaults = {}, {}
  while not self:is("op", ")") do
    node.names[#node.names + 1] = self:expect("name").value
    if self:skip("op", "=") then node.defaults[#node.names] = self:expression()
    elseif next(node.defaults) then fail(node.line, "a parameter without a default follows one with a default") end
    if not self:skip("op", ",") then break end
  end
  self:expect("op", ")")
end

STATEMENTS.macro = function(self, line)
  local node = { kind = "macro", line = line, name = self:expect("name").value }
  self:expect("op", "(")
  self:parameters(node)
  self:expect "end"
  node.body = self:body { endmacro = true }
  return node
end

STATEMENTS.call = function(self, line)
  local node = { kind = "call_block", line = line, names = {}, defaults = {} }
  if self:skip("op", "(") then self:parameters(node) end
  node.call = self:expression()
  if node.call.kind ~= "call" then fail(line, "'call' needs a call of a macro") end
  self:expect "end"
  node.body = self:body { endcall = true }
  return node
end

STATEMENTS.filter = function(self, line)
  local node = { kind = "filter_block", line = line }
  node.filter = self:filter(false)
  while self:skip("op", "|") do node.filter = self:filter(node.filter) end
  self:expect "end"
  node.body = self:body { endfilter = true }
  return node
end

STATEMENTS.set = function(self, line)
  local node = { kind = "set", line = line, target = self:target(true) }
  if self:skip("op", "=") then
    node.value = self:tuple(true)
    return node
  end
  node.kind = "set_block"
  if self:skip("op", "|") then
    node.filter = self:filter(false)
    while self:skip("op", "|") do node.filter = self:filter(node.filter) end
  end
  self:expect "end"
  node.body = self:body { endset = true }
  return node
end

STATEMENTS.with = function(self, line)
  local node = { kind = "with", line = line, targets = {}, values = {} }
  while not self:is "end" do
    node.targets[#node.targets + 1] = self:target()
    self:expect("op", "=")
    node.values[#node.values + 1] = self:expression()
    if not self:skip("op", ",") then break end
  end
  self:expect "end"
  node.body = self:body { endwith = true }
  return node
end

STATEMENTS.generation = function(self, line)
  self:expect "end"
  return { kind = "generation", line = line, body = self:body { endgeneration = true } }
end

STATEMENTS["break"] = function(_, line) return { kind = "break", line = line } end
STATEMENTS.continue = function(_, line) return { kind = "continue", line = line } end

STATEMENTS.print = function(self, line)
  return { kind = "print", line = line, value = self:tuple(true) }
end

-- Parses statements up to a block whose name is in `ends`, such as `endif`. Then reads the "{%" and the name of this
-- block. Also reads its "%}", unless the name is `else` or `elif`.
---@return table[] nodes
---@return string? word name of the block, or nil at the end of the template
function Parser:body(ends)
  local nodes, start = {}, self:peek().line
  local soft = self.soft
  while true do
    local token = self:next()
    if token.type == "data" then
      nodes[#nodes + 1] = { kind = "data", line = token.line, value = token.value }
    elseif token.type == "open" then
      nodes[#nodes + 1] = { kind = "print", line = token.line, value = self:tuple(true) }
      self:expect "close"
    elseif token.type == "begin" then
      local name = self:expect "name"
      local word = name.value
      if ends[word] then
        if word:find "^end" then
          self:expect "end"
        end
        self.soft = soft
        return nodes, word
      end
      local parse = STATEMENTS[word]
      if not parse then
        if REFUSED[word] then fail(name.line, "'%s' is not supported in a chat template", word) end
        fail(name.line, "'%s' is not a known block", word)
      end
      if word ~= "if" then self.soft = soft end
      local node = self:nested(parse, name.line)
      nodes[#nodes + 1] = node
      if not (node.body or node.bodies) then self:expect "end" end
    else
      if next(ends) then
        local words = {}
        for word in pairs(ends) do words[#words + 1] = "'" .. word .. "'" end
        table.sort(words)
        fail(start, "a block has no end: %s is missing", table.concat(words, " or "))
      end
      return nodes
    end
  end
end

---@param source string
---@return table[] nodes
local function parse(source)
  local parser = setmetatable({ tokens = lexer.tokens(source), at = 1, depth = 0, soft = false }, Parser)
  return (parser:body {})
end

return { parse = parse }
