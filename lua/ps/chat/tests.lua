-- SPDX-License-Identifier: BSD-3-Clause
-- Jinja's tests, as in `x is NAME`. A test is a function with two parameters: the value and a list of arguments.
local text = require "ps.chat.text"
local values = require "ps.chat.values"
local operators = require "ps.chat.operators"
local letters = require "ps.chat.letters"

local tests = {}

local function class_is(...)
  local kinds = {}
  for _, kind in ipairs { ... } do kinds[kind] = true end
  return function(v) return kinds[values.kind(v)] == true end
end

function tests.defined(v) return getmetatable(v) ~= values.Undefined end
function tests.undefined(v) return getmetatable(v) == values.Undefined end
function tests.none(v) return v == values.NONE end
tests.boolean = class_is "bool"
tests["true"] = function(v) return v == true end
tests["false"] = function(v) return v == false end
tests.integer = class_is "int"
tests.float = class_is "float"
tests.number = class_is("int", "float", "bool")
tests.string = class_is "str"
tests.mapping = class_is "dict"
tests.sequence = class_is("str", "list", "tuple", "dict", "undefined")
tests.iterable = class_is("str", "list", "tuple", "dict", "undefined", "loop", "generator", "dict_items", "dict_keys",
  "dict_values")
tests.callable = class_is "callable"
function tests.escaped() return false end

function tests.odd(v) return operators["%"](v, 2) == 1 end
function tests.even(v) return operators["%"](v, 2) == 0 end
function tests.divisibleby(v, args)
  if args[1] == nil then values.raise "the test 'divisibleby' needs a value" end
  return operators["%"](v, args[1]) == 0
end
tests.lower = function(v) return text.flat(letters.lower(values.str(v))) == text.flat(values.str(v)) end
tests.upper = function(v) return text.flat(letters.upper(values.str(v))) == text.flat(values.str(v)) end

for names, op in pairs { ["eq equalto =="] = "==", ["ne !="] = "!=", ["lt lessthan <"] = "<", ["le <="] = "<=",
  ["gt greaterthan >"] = ">", ["ge >="] = ">=", ["in"] = "in" } do
  for name in names:gmatch "%S+" do
    tests[name] = function(v, args)
      if args[1] == nil then values.raise("the test '%s' needs a value", name) end
      return operators[op](v, args[1])
    end
  end
end

function tests.sameas(v, args)
  return rawequal(v, args[1]) or text.is(v) and text.is(args[1]) and values.equal(v, args[1])
end

return tests
