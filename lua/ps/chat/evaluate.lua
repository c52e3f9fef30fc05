-- SPDX-License-Identifier: BSD-3-Clause
-- Compiles the nodes of a chat template to Lua functions. An expression becomes a function of a scope that returns a
-- value. A statement becomes a function of a scope and an output, to which it appends text. As in Jinja, each iteration
-- of a loop, each call of a macro, and each block whose output is captured has its own scope. `if` has no own scope.
local text = require "ps.chat.text"
local values = require "ps.chat.values"
local operators = require "ps.chat.operators"
local attributes = require "ps.chat.attributes"
local filters = require "ps.chat.filters"
local tests = require "ps.chat.tests"
local lexer = require "ps.chat.lexer"
local raise, truth, work, charge = values.raise, values.truth, text.work, text.charge

local evaluate = {}

local DEPTH = 100                                          -- maximum nesting of macro calls
local LEVELS = 300                                         -- maximum nesting of expressions; a.b.c is nested 3 deep

---@class ps.chat.State the state of one rendering
---@field depth integer
---@field track boolean true: the pieces of the output are marked with their messages
---@field doing? table node of the filter, test or call that began most recently
---@field owners table<integer, table> by message index: the marks of the text that the template writes while it
--- processes the message

---@class ps.chat.Scope
---@field vars table<string, any>
---@field parent? ps.chat.Scope
---@field state ps.chat.State
---@field owner? integer index of the message that the current iteration or macro call processes

local function child(scope)
  return { vars = {}, parent = scope, state = scope.state, owner = scope.owner, turn = scope.turn }
end

local function lookup(scope, name)
  repeat
    local v = scope.vars[name]
    if v ~= nil then return v end
    scope = scope.parent
  until not scope
  return values.undefined(("'%s' is undefined"):format(name))
end

-- Assigns a value to a name in a scope. If the scope belongs to a loop iteration or a macro call, and the value is a
-- message, the template processes this message from now on.
local function assign(scope, name, value)
  scope.vars[name] = value
  if scope.turn and getmetatable(value) == values.Dict and value.message then scope.owner = value.message end
end

-- Returns a copy of a mark with the field `owner`: the index of the message that the template is processing. If the
-- mark already has an owner, returns the mark itself.
local function owned(state, mark, owner)
  local known = state.owners[owner]
  if not known then
    known = { [false] = { owner = owner } }
    state.owners[owner] = known
  end
  if mark and mark.owner then return mark end
  if not known[mark] then known[mark] = text.mark(mark, "owner", owner) end
  return known[mark]
end

local function emit(scope, out, piece)
  if piece == "" then return end
  local state, owner = scope.state, scope.owner
  if state.track and owner then
    piece = type(piece) == "string" and text.marked(piece, owned(state, false, owner))
      or text.remark(piece, function(mark) return owned(state, mark, owner) end)
  end
  out[#out + 1] = piece
end

local expression, body                                     -- defined below

-- Compiles a list of nodes to a list of functions.
local function all(nodes)
  local fns = {}
  for i, node in ipairs(nodes) do fns[i] = expression(node) end
  return fns
end

local function arguments(args)
  local positional, named = all(args.positional), {}
  for i, pair in ipairs(args.named) do named[i] = { pair[1], expression(pair[2]) } end
  return function(scope)
    local list, map = {}, {}
    for i, fn in ipairs(positional) do list[i] = fn(scope) end
    for _, pair in ipairs(named) do
      if map[pair[1]] ~= nil then raise("the argument '%s' occurs twice", pair[1]) end
      map[pair[1]] = pair[2](scope)
    end
    return list, map
  end
end

local EXPRESSIONS = {}

function EXPRESSIONS.constant(node)
  local value = node.value
  return function() return value end
end

function EXPRESSIONS.name(node)
  local name = node.name
  return function(scope) return lookup(scope, name) end
end

function EXPRESSIONS.conditional(node)
  local yes, test, no = expression(node.yes), expression(node.test), node.no and expression(node.no)
  local message = ("the inline if-expression on line %d evaluated to false and no else section was defined"):format(
    node.line)
  return function(scope)
    if truth(test(scope)) then return yes(scope) end
    if no then return no(scope) end
    return values.undefined(message)
  end
end

function EXPRESSIONS.binary(node)
  local a, b, op = expression(node.left), expression(node.right), node.op
  if op == "or" then
    return function(scope)
      local v = a(scope)
      if truth(v) then return v end
      return b(scope)
    end
  elseif op == "and" then
    return function(scope)
      local v = a(scope)
      if not truth(v) then return v end
      return b(scope)
    end
  elseif op == "~" then
    return function(scope)
      local v = text.concat { values.str(a(scope)), values.str(b(scope)) }
      charge(v)
      return v
    end
  end
  local fn = operators[op]
  return function(scope)
    local v = fn(a(scope), b(scope))
    charge(v)
    return v
  end
end

EXPRESSIONS["not"] = function(node)
  local value = expression(node.value)
  return function(scope) return not truth(value(scope)) end
end

function EXPRESSIONS.negative(node)
  local value = expression(node.value)
  return function(scope) return operators.negative(value(scope)) end
end

function EXPRESSIONS.positive(node)
  local value = expression(node.value)
  return function(scope) return operators.positive(value(scope)) end
end

function EXPRESSIONS.compare(node)
  local first, others, ops = expression(node.first), all(node.others), {}
  for i, op in ipairs(node.ops) do ops[i] = operators[op] end
  return function(scope)
    local left = first(scope)
    for i, other in ipairs(others) do
      local right = other(scope)
      charge(right)
      if not ops[i](left, right) then return false end
      left = right
    end
    return true
  end
end

-- Compiles a list or a tuple. `make` is values.list or values.tuple.
local function sequence(node, make)
  local items = all(node.items)
  return function(scope)
    local list = {}
    for i, item in ipairs(items) do list[i] = item(scope) end
    return make(list)
  end
end

function EXPRESSIONS.list(node) return sequence(node, values.list) end
function EXPRESSIONS.tuple(node) return sequence(node, values.tuple) end

function EXPRESSIONS.dict(node)
  local keys, items = all(node.keys), all(node.items)
  return function(scope)
    local dict = values.dict()
    for i, key in ipairs(keys) do values.set(dict, key(scope), items[i](scope)) end
    return dict
  end
end

function EXPRESSIONS.attribute(node)
  local value, name = expression(node.value), node.name
  return function(scope) return attributes.attribute(value(scope), name) end
end

function EXPRESSIONS.item(node)
  local value = expression(node.value)
  if node.key.kind == "slice" then
    local parts = {}
    for i, part in ipairs(node.key.parts) do parts[i] = part and expression(part) end
    return function(scope)
      local v, bounds = value(scope), {}
      for i = 1, 3 do bounds[i] = parts[i] and parts[i](scope) or values.NONE end
      return attributes.slice(v, bounds[1], bounds[2], bounds[3])
    end
  end
  local key = expression(node.key)
  return function(scope) return attributes.item(value(scope), key(scope)) end
end

function EXPRESSIONS.call(node)
  local value, args = expression(node.value), arguments(node.args)
  return function(scope)
    local callee = values.defined(value(scope))
    if getmetatable(callee) ~= values.Callable then raise("'%s' object is not callable", values.kind(callee)) end
    local list, named = args(scope)
    charge(callee.of)
    scope.state.doing = node
    local v = callee.call(list, named, scope)
    charge(v)
    return v
  end
end

-- Returns the function of a filter or a test. If the name is unknown, the template is rejected. However, if the node is
-- `soft` (it is inside a condition and may never run), the error is raised only when the function is called.
local function named(set, what, node)
  local fn = set[node.name]
  if fn then return fn end
  if not node.soft then lexer.fail(node.line, "no %s named '%s'", what, node.name) end
  return function() raise("no %s named '%s' (line %d)", what, node.name, node.line) end
end

function EXPRESSIONS.filter(node)
  local value, args, fn = expression(node.value), arguments(node.args), named(filters, "filter", node)
  return function(scope)
    local list, map = args(scope)
    local v = value(scope)
    charge(v)
    scope.state.doing = node
    v = fn(v, list, map, scope)
    charge(v)
    return v
  end
end

function EXPRESSIONS.test(node)
  local value, args, fn = expression(node.value), arguments(node.args), named(tests, "test", node)
  return function(scope)
    local v, list = value(scope), args(scope)
    scope.state.doing = node
    return fn(v, list)
  end
end

-- Compiles the node for the output of a filter block. The block stores its output in node.value before it applies the
-- filter.
function EXPRESSIONS.given(node)
  return function() return node.value end
end

local level = 0                                            -- nesting of the expression that is being compiled
function expression(node)
  level = level + 1
  if level > LEVELS then
    level = 0
    lexer.fail(node.line or 1, "a chain of over %d operators, filters or subscripts", LEVELS)
  end
  local fn = EXPRESSIONS[node.kind](node)
  level = level - 1
  return fn
end

local STATEMENTS = {}

function STATEMENTS.data(node)
  local value = node.value
  return function(scope, out) emit(scope, out, value) end
end

function STATEMENTS.print(node)
  local value = expression(node.value)
  return function(scope, out) emit(scope, out, values.str(value(scope))) end
end

-- Compiles the target of an assignment to a function that assigns a value to it.
local function setter(target)
  if target.kind == "name" then
    return function(scope, value) assign(scope, target.name, value) end
  elseif target.kind == "field" then
    return function(scope, value)
      local object = lookup(scope, target.name)
      if getmetatable(object) ~= values.Namespace then
        raise("cannot assign attribute on non-namespace object '%s'", target.name)
      end
      object.map[target.field] = value
    end
  end
  local setters = {}
  for i, name in ipairs(target.names) do setters[i] = setter(name) end
  return function(scope, value)
    local items = values.items(values.defined(value))
    if #items ~= #setters then
      raise("%s values to unpack (expected %d, got %d)", #items > #setters and "too many" or "not enough", #setters,
        #items)
    end
    for i, set in ipairs(setters) do set(scope, items[i]) end
  end
end

function STATEMENTS.set(node)
  local value, set = expression(node.value), setter(node.target)
  return function(scope) set(scope, value(scope)) end
end

-- Runs a body in a scope and returns its output as a string.
local function caught(run, scope)
  local out = {}
  run(scope, out)
  return text.concat(out)
end

-- Compiles the filters of a filter block to a function. The function applies the filters to the output of the block.
local function block_filter(node)
  local innermost = node
  while innermost.value do innermost = innermost.value end
  local given = { kind = "given" }
  innermost.value = given
  local fn = expression(node)
  return function(scope, value)
    given.value = value
    return fn(scope)
  end
end

function STATEMENTS.set_block(node)
  local run, set, filter = body(node.body), setter(node.target), node.filter and block_filter(node.filter)
  return function(scope)
    local value = caught(run, child(scope))
    set(scope, filter and filter(scope, value) or value)
  end
end

function STATEMENTS.filter_block(node)
  local run, filter = body(node.body), block_filter(node.filter)
  return function(scope, out)
    emit(scope, out, values.str(filter(scope, caught(run, child(scope)))))
  end
end

STATEMENTS["if"] = function(node)
  local conditions, bodies, otherwise = all(node.tests), {}, node.otherwise and body(node.otherwise)
  for i, nodes in ipairs(node.bodies) do bodies[i] = body(nodes) end
  return function(scope, out)
    for i, condition in ipairs(conditions) do
      if truth(condition(scope)) then return bodies[i](scope, out) end
    end
    if otherwise then return otherwise(scope, out) end
  end
end

STATEMENTS["for"] = function(node)
  local items, set, test = expression(node.items), setter(node.target), node.test and expression(node.test)
  local run, otherwise = body(node.body), node.otherwise and body(node.otherwise)
  return function(scope, out)
    local list = values.items(items(scope))
    if test then
      local kept = {}
      for _, item in ipairs(list) do
        local inner = child(scope)
        set(inner, item)
        work(1)
        if truth(test(inner)) then kept[#kept + 1] = item end
      end
      list = kept
    end
    if #list == 0 and otherwise then return otherwise(child(scope), out) end
    local loop = attributes.loop(list)
    for i, item in ipairs(list) do
      local inner = child(scope)
      inner.turn = true
      loop.i = i
      inner.vars.loop = loop
      set(inner, item)
      work(1)
      if run(inner, out) == "break" then break end
    end
  end
end

STATEMENTS["break"] = function() return function() return "break" end end
STATEMENTS.continue = function() return function() return "continue" end end

-- Returns whether a node, or any node inside it, reads a variable of the given name.
local function uses(node, name)
  if node.kind == "name" and node.name == name then return true end
  for _, part in pairs(node) do
    if type(part) == "table" and not getmetatable(part) and uses(part, name) then return true end
  end
  return false
end

-- Compiles a macro to a function that returns a callable value.
local function macro(node, name)
  local names, defaults, run = node.names, {}, body(node.body)
  for i, default in pairs(node.defaults) do defaults[i] = expression(default) end
  local takes = { varargs = uses(node.body, "varargs"), kwargs = uses(node.body, "kwargs"),
    caller = uses(node.body, "caller") }
  return function(scope)
    return values.callable("macro '" .. name .. "'", function(args, given, from)
      local state, inner = scope.state, child(scope)
      inner.turn, inner.owner = true, from.owner
      if state.depth >= DEPTH then raise("macros call one another over %d levels deep", DEPTH) end
      local used = {}
      for i, parameter in ipairs(names) do
        local value = args[i]
        if given[parameter] ~= nil then
          if value ~= nil then raise("macro '%s' takes '%s' twice", name, parameter) end
          value, used[parameter] = given[parameter], true
        end
        if value == nil and defaults[i] then value = defaults[i](inner) end
        if value == nil then
          value = values.undefined(("parameter '%s' was not provided"):format(parameter))
        end
        assign(inner, parameter, value)
      end
      if given.caller ~= nil and not used.caller then
        if not takes.caller then raise("macro '%s' does not use `caller`, but a call block passes one to it", name) end
        inner.vars.caller, used.caller = given.caller, true
      elseif takes.caller then
        inner.vars.caller = values.undefined "No caller defined"
      end
      local rest = values.dict()
      for key, value in pairs(given) do
        if not used[key] then
          if not takes.kwargs then raise("macro '%s' takes no keyword argument '%s'", name, key) end
          values.set(rest, key, value)
        end
      end
      if #args > #names and not takes.varargs then
        raise("macro '%s' takes not more than %d argument(s)", name, #names)
      end
      if takes.kwargs then inner.vars.kwargs = rest end
      if takes.varargs then inner.vars.varargs = values.tuple(values.copied(args, #names + 1)) end
      state.depth = state.depth + 1
      local value = caught(run, inner)
      state.depth = state.depth - 1
      return value
    end)
  end
end

function STATEMENTS.macro(node)
  local make = macro(node, node.name)
  return function(scope) scope.vars[node.name] = make(scope) end
end

function STATEMENTS.call_block(node)
  local make, value, args = macro(node, "caller"), expression(node.call.value), arguments(node.call.args)
  return function(scope, out)
    local callee = values.defined(value(scope))
    if getmetatable(callee) ~= values.Callable then raise("'%s' object is not callable", values.kind(callee)) end
    local list, given = args(scope)
    given.caller = make(scope)
    emit(scope, out, values.str(callee.call(list, given, scope)))
  end
end

function STATEMENTS.with(node)
  local sets, fns, run = {}, all(node.values), body(node.body)
  for i, target in ipairs(node.targets) do sets[i] = setter(target) end
  return function(scope, out)
    local inner = child(scope)
    for i, fn in ipairs(fns) do sets[i](inner, fn(scope)) end
    return run(inner, out)
  end
end

-- Compiles a generation block. The block's output is marked as text that the model has to produce.
function STATEMENTS.generation(node)
  local run = body(node.body)
  return function(scope, out)
    local value = caught(run, child(scope))
    if scope.state.track then
      value = text.remark(value, function(mark)
        return text.mark(mark, "generated", true)
      end)
    end
    emit(scope, out, value)
  end
end

function body(nodes)
  local fns = {}
  for i, node in ipairs(nodes) do fns[i] = STATEMENTS[node.kind](node) end
  return function(scope, out)
    for i = 1, #fns do
      work(1)
      local signal = fns[i](scope, out)
      if signal then return signal end
    end
  end
end

--- Compiles a parsed template to a function. The function renders the template with the given variables. If `track` is
--- true, the rendered text contains marks (see ps.chat.Text).
---@param nodes table[]
---@return fun(variables: table<string, any>, track: boolean): string|ps.chat.Text
function evaluate.compile(nodes)
  level = 0
  local run = body(nodes)
  return function(variables, track)
    local state = { depth = 0, track = track, owners = {} }
    local context = { vars = variables, state = state }
    local ok, result = text.counted(caught, run, child(context))
    if ok then return result end
    if type(result) == "table" then error(result, 0) end
    if result:find("stack overflow", 1, true) then raise "expressions and macros are nested too deeply" end
    local node = state.doing                               -- a filter, test or method that did not check its arguments
    if not node then error(result, 0) end
    return raise("line %d: '%s' got values that it does not support", node.line,
      node.name or node.value.name or node.value.kind)
  end
end

return evaluate
