-- SPDX-License-Identifier: BSD-3-Clause
-- Chat templates: the part of Jinja and Python that they use, errors of a template and its data, limits, the parts
-- that a model has to produce, and texts with random changes. spec/oracle/chat_oracle.py compares 70 templates of
-- models with transformers.
local chat = require "ps.chat"
local json = require "ps.chat.json"
local values = require "ps.chat.values"
local ps = require "ps"
local check_lib = require "spec.check_lib"
local lib = require "spec.tokenizer_lib"
local paths = require "ps.paths"

-- Calls fn with arguments, which must fail with an error that contains `want`.
local function fails(fn, want, ...)
  local args = { ... }
  return check_lib.fails(function() return fn(unpack(args)) end, want)
end

local HI = { { role = "user", content = "Hi" } }

local function render(source, options, messages)
  return chat.template(source):render(messages or HI, options)
end
local function printed(expression) return render("{{ " .. expression .. " }}") end

describe("a chat template", function()
  it("prints values as Python does", function()
    for expression, want in pairs {
      ["1 + 2 * 3 - 4"] = "3", ["7 // 2"] = "3", ["-7 // 2"] = "-4", ["-7 % 3"] = "2", ["7 / 2"] = "3.5",
      ["6 / 2"] = "3.0",
      ["2 ** 10"] = "1024", ["1.0"] = "1.0", ["1e16"] = "1e+16", ["0.1 + 0.2"] = "0.30000000000000004",
      ["none"] = "None",
      ["true and 'x'"] = "x", ["[] or 'y'"] = "y", ["not []"] = "True",
      ["[1, 'a', none, 1.5]"] = "[1, 'a', None, 1.5]",
      ["{'a': \"it's\"}"] = "{'a': \"it's\"}", ["(1,)"] = "(1,)", ["'a' 'b'"] = "ab", ["'a' ~ 1 ~ none"] = "a1None",
      ["'\195\169' * 3"] = "\195\169\195\169\195\169", ["1 < 2 < 3"] = "True", ["1 < 3 < 2"] = "False",
      ["'b' in 'abc'"] = "True",
      ["2 not in [1, 3]"] = "True", ["'x' if false else 'y'"] = "y", ["'x' if false"] = "", ["undefined_name"] = "",
      ["'abc'[1]"] = "b", ["'h\195\169llo'[-4:]"] = "\195\169llo", ["'abcdef'[::2]"] = "ace", ["'abc'[::-1]"] = "cba",
      ["[1, 2, 3][1:]"] = "[2, 3]", ["[1, 2][5]"] = "", ["-2|abs"] = "2",
      ["'a,b,,c'.split(',')"] = "['a', 'b', '', 'c']",
      ["' a  b '.split()"] = "['a', 'b']", ["'a-b-c'.rsplit('-', 1)"] = "['a-b', 'c']",
      ["'%s is %5.2f' % ('x', 1.5)"] =
      "x is  1.50", ["'{} {0}'.format(1)"] = false, ["'{1} {0}'.format('a', 'b')"] = "b a",
      ["'{:>4}'.format(7)"] = "   7",
      ["'stra\195\159e'.upper()"] = "STRASSE", ["'\195\132\195\150'|lower"] = "\195\164\195\182",
      ["'xxaxx'.strip('x')"] = "a",
      ["'a b'.title()"] = "A B",
      ["{'b': 1, 'a': 2}|dictsort"] = "[('a', 2), ('b', 1)]", ["[3, 1, 2]|sort|join('-')"] = "1-2-3",
      ["[{'n': 1}, {'n': 2}]|map(attribute='n')|list"] = "[1, 2]", ["[1, none, 2]|select|list"] = "[1, 2]",
      ["'a\\nb'|indent(2)"] = "a\n  b", ["{'a': [1, 1.0, true, none, {}, []]}|tojson"] =
      '{"a": [1, 1.0, true, null, {}, []]}', ["{'a': 1}|tojson(indent=2)"] = '{\n  "a": 1\n}',
      ["'\195\169\"\\n'|tojson"] =
      '"\195\169\\"\\n"', ["'\195\169'|tojson(ensure_ascii=true)"] = '"\\u00e9"', ["x is defined"] = "False",
      ["3 is odd"] = "True",
      ["'s' is string"] = "True", ["{} is mapping"] = "True", ["1 is not number"] = "False", ["[1, 2]|length"] = "2",
      ["range(3)|list"] = "[0, 1, 2]", ["'<b>'|safe + '<i>'"] = "<b>&lt;i&gt;", ["none|default('d')"] = "None",
      ["none|default('d', true)"] = "d", ["'  x'|trim"] = "x", ["{'a': 1}.items()|list"] = "[('a', 1)]",
      ["{'items': 5}['items']"] = "5", ["{'a': {'b': 3}}.a.b"] = "3", ["dict(a=1)"] = "{'a': 1}",
    } do
      if want then assert.equal(want, printed(expression), expression)
      else assert.is_false(pcall(printed, expression), expression) end
    end
  end)

  it("keeps and removes space around blocks as transformers' settings do", function()
    assert.equal("a\nb\n", render "a\n  {% if true %}\nb\n  {% endif %}\n\n" )
    assert.equal("ab", render "a  \n {%- if true -%}  \n b{%- endif %}")
    assert.equal("  x\n", render "  {{ 'x' }}\n\n")
    assert.equal("a  b", render "a  {# c #}b")
    assert.equal("{{ x }}", render "{% raw %}{{ x }}{% endraw %}\n\n")
  end)

  it("has scopes as Jinja does", function()
    assert.equal("1", render "{% set x = 1 %}{% for i in [2, 3] %}{% set x = i %}{% endfor %}{{ x }}")
    assert.equal("3", render
      "{% set ns = namespace(x=1) %}{% for i in [2, 3] %}{% set ns.x = i %}{% endfor %}{{ ns.x }}")
    assert.equal("0a1b", render "{% for k, v in {'a': 0, 'b': 1}.items() %}{{ v }}{{ k }}{% endfor %}")
    assert.equal("none", render "{% for i in [] %}x{% else %}none{% endfor %}")
    assert.equal("13", render "{% for i in range(5) if i is odd %}{{ i }}{% endfor %}")
    assert.equal("0", render "{% for i in range(9) %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}")
    assert.equal("a-b/2!", render("{% macro m(x, y='b') %}{{ x }}-{{ y }}/{{ z }}{% endmacro %}{% set z = 2 %}"
      .. "{{ m('a') }}{% set t %}!{% endset %}{{ t }}"))
    assert.equal("[x]", render "{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}x{% endcall %}")
    assert.equal("X", render "{% filter upper %}x{% endfilter %}")
    assert.equal("TF2", render
      "{% for i in 'ab' %}{{ 'T' if loop.first else 'F' }}{{ loop.length if loop.last }}{% endfor %}")
  end)

  it("sees messages without null fields, and reasoning under its standard name", function()
    assert.equal("[('role', 'user'), ('content', '\195\169')]",
      render("{{ messages[0].items()|list }}", {}, '[{"role": "user", "content": "\\u00e9", "name": null}]'))
    assert.equal("why", render("{{ messages[0].reasoning_content }}", {},
      { { role = "assistant", content = "x", reasoning = "why" } }))
  end)

  it("ends within the last message for continue_final_message", function()
    local source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
    local messages = { { role = "user", content = "Hi" }, { role = "assistant", content = "Well, " } }
    assert.equal("<user>Hi<end><assistant>Well,", render(source, { continue_final_message = true }, messages))
    fails(render, "pass only one of them", source, { continue_final_message = true, add_generation_prompt = true },
      messages)
  end)

  it("prints the requested date", function()
    assert.equal("26 Jul 2024", render("{{ strftime_now('%d %b %Y') }}", { date = "2024-07-26" }))
    fails(render, "date = '2024-02-31': there is no such day", "x", { date = "2024-02-31" })
    fails(render, "date = '2024-2-3': it must be YYYY-MM-DD", "x", { date = "2024-2-3" })
  end)
end)

describe("a chat template that is wrong", function()
  it("is refused with the construct and its line", function()
    for source, want in pairs {
      ["a\n{% include 'x' %}"] = "refused: line 2: 'include' is not supported in a chat template",
      ["{% for x in y recursive %}{% endfor %}"] = "refused: line 1: 'recursive' of a loop is not supported",
      ["{% if x %}"] = "refused: line 1: a block has no end: 'elif' or 'else' or 'endif' is missing",
      ["\n\n{{ 'a }}"] = "refused: line 3: a string has no end",
      ["{{ 1 + }}"] = "refused: line 1: found '}}', but expected a value",
      ["{{ x|nofilter }}"] = "refused: line 1: no filter named 'nofilter'",
      ["{{ (1 }}"] = "refused: line 1: unexpected '}'",
      ["{% nosuch %}"] = "refused: line 1: 'nosuch' is not a known block",
      ["{{ [1](*x) }}"] = "refused: line 1: '*' in the arguments of a call is not supported",
      ["{{ 9007199254740993 }}"] = "refused: line 1: the number 9007199254740993 is over 2^53",
      ["{{ " .. ("("):rep(300) .. "1" .. (")"):rep(300) .. " }}"] =
      "refused: line 1: expressions are nested over 150 levels deep",
    } do fails(chat.template, want, source) end
    fails(chat.template, "it is not valid UTF-8", "\255")
  end)

  it("raises Python's errors and its own", function()
    for source, want in pairs {
      ["{{ raise_exception('no ' ~ 'way') }}"] = "no way",
      ["{{ 'a' + 1 }}"] = 'can only concatenate str (not "int") to str',
      ["{{ x.y }}"] = "'x' is undefined", ["{{ none.a.b }}"] = "'None' has no attribute 'a'",
      ["{% for i in none %}{% endfor %}"] = "'NoneType' object is not iterable", ["{{ 1 / 0 }}"] = "division by zero",
      ["{{ messages.append(1) }}"] = "values cannot be changed", ["{{ 'x'() }}"] = "'str' object is not callable",
      ["{{ x|tojson }}"] = "Object of type Undefined is not JSON serializable",
      ["{{ 1 < 'a' }}"] = "'<' not supported",
      ["{% set a, b = [1] %}"] = "not enough values to unpack", ["{{ messages|map('upper')|tojson }}"] = "generator",
    } do fails(render, want, source) end
  end)

  it("says which message lacks a field", function()
    local messages = { { role = "user", content = "Hi" }, { role = "assistant", text = "Hello" } }
    fails(render, "'dict object' has no attribute 'content' (messages[2])",
      "{% for m in messages %}{{ m.content | trim }}{{ m['content'] + '' }}{% endfor %}", {}, messages)
  end)

  it("has its message, without the script's line, in the error's field `raised`", function()
    local ok, problem = pcall(render, "{{ raise_exception('no: 1: way') }}")
    assert.is_false(ok)
    assert.equal("no: 1: way", problem.raised)
    assert.matches("chat template: no: 1: way$", tostring(problem))
    local template, messages = os.tmpname() .. ".jinja", os.tmpname()
    check_lib.write(template, "{{ raise_exception('no: 1: way') }}")
    check_lib.write(messages, '[{"role": "user", "content": "Hi"}]')
    local out, code = check_lib.shell(("'%s' '%s/bench/template.lua' '%s' '%s' 2>&1"):format(paths.exe, paths.root,
      template, messages))
    assert.same({ "no: 1: way\n", 3 }, { out, code })
    out, code = check_lib.shell(("'%s' '%s/bench/template.lua' '%s' '%s.none' 2>&1"):format(paths.exe, paths.root,
      template, messages))
    assert.same({ ("template.lua: %s.none: cannot be read\n"):format(messages), 1 }, { out, code })
    os.remove(template)
    os.remove(messages)
  end)

  it("ends: loops, recursion and long strings have limits", function()
    fails(render, "more than 20000000 steps",
      "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}")
    fails(render, "over 100 levels deep", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")
    fails(render, "the limit is 67108864", "{{ 'x' * 1000000000 }}")
    fails(render, "the limit is 67108864",
      "{% set ns = namespace(s='xxxxxxxxxxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}")
    fails(render, "parts of a split string", "{{ ('x,' * 2000000).split(',')|length }}")
    fails(render, "whose characters are listed", "{% for c in 'x' * 20000000 %}{% endfor %}")
    assert.equal("x", render "{{ ('x' * 30000000)[5:6] }}")
    fails(render, "range too big", "{{ range(100001) }}")
  end)

  it("counts the work of filters, methods and operators", function()
    local loop = "{%% set x = 'ab' * 1000000 %%}{%% set l = range(100000)|list %%}"
      .. "{%% for i in range(100000) %%}{%% set y = %s %%}{%% endfor %%}"
    for _, work in ipairs { "x|upper", "l|sort", "x.replace('a', 'c')", "l + l", "-1 in l" } do
      local began = os.clock()
      fails(render, "more than 20000000 steps", loop:format(work))
      assert.is_true(os.clock() - began < 60, work)
    end
  end)

  it("refuses long chains, and calls of macros that are too deep", function()
    fails(chat.template, "refused: line 1: a chain of over 300 operators, filters or subscripts",
      "{{ 1" .. (" + 1"):rep(5000) .. " }}")
    for _, link in ipairs { "|upper", ".a", "[0]", "()", " ~ x", " and x", " if x" } do
      fails(chat.template, "a chain of over 300", "{{ x" .. link:rep(20000) .. " }}")
    end
    assert.equal("250", render("{{ 1" .. (" + 1"):rep(249) .. " }}"))
    local deep = "{% macro m(x) %}{{ " .. ("("):rep(100) .. "m(x + 1)" .. (" ~ 1)"):rep(100)
      .. " }}{% endmacro %}{{ m(1) }}"
    fails(render, "deep", deep)
  end)

  it("names arguments of wrong types", function()
    for source, want in pairs {
      ["{{ strftime_now(5) }}"] = "strftime() argument 1 must be str, not int",
      ["{{ 2.5|round('x') }}"] = "'str' object cannot be interpreted as an integer",
      ["{{ 2.5|round(1, 2) }}"] = "expected a string for 'method', got int",
      ["{{ 'x'|trim(5) }}"] = "expected a string for 'chars', got int",
      ["{{ 'x'|replace('x', 'y', 'z') }}"] = "'str' object cannot be interpreted as an integer",
      ["{{ 'x'|indent(none) }}"] = "can't multiply sequence by non-int of type 'NoneType'",
      ["{{ [1]|map(1) }}"] = "expected a string for 'name', got int",
      ["{{ 'x'.ljust(3, 'ab') }}"] = "must be exactly one character long",
      ["{{ [1]|sort(attribute=[]) }}"] = "expected a string for 'attribute', got list",
      ["{{ {}|tojson(indent=1000000) }}"] = "the limit is 10000",
    } do fails(render, want, source) end
    assert.equal("1200.0", printed "1234.5|round(-2)")
  end)

  it("names data that are not a conversation", function()
    fails(render, "messages: the conversation has no message", "x", {}, "[]")
    fails(render, "messages: it must be a list of messages", "x", {}, '{"role": "user"}')
    fails(render, "messages[1]: it is a str; it must be an object with role and content", "x", {}, '["hi"]')
    for _, train_on in ipairs { "assistant", "last", "all" } do
      for _, messages in ipairs { { 5 }, { {} }, { "hi" }, 5, {} } do
        fails(function() chat.template("x"):trained(messages, {}, train_on) end, "messages")
      end
    end
    fails(render, "messages: not JSON: line 2, byte 2: the key 'a' occurs twice", "x", {}, '[{"a": 1,\n "a": 2}]')
    fails(render, "nested over 200 levels deep", "x", {}, ("["):rep(300))
    fails(render, "a string is not valid UTF-8", "x", {}, { { role = "user", content = "\255" } })
  end)
end)

describe("JSON of templates", function()
  it("is the same after a round trip", function()
    for _, text in ipairs { '{"b": 1, "a": [1.0, 2, -0.5, 1e+22, {}, [], null, true, "\\u0001\195\169\\"\\\\"]}',
      '[123456789012345678901234567890, 0, -7]', '"\240\159\152\128"' } do
      assert.equal(text, json.encode(json.decode(text)))
    end
    assert.equal('"\\ud83d\\ude00"', json.encode(json.decode '"\\ud83d\\ude00"', { ensure_ascii = true }))
    assert.equal(values.NONE, json.decode "null")
  end)

  it("is refused with the line and the byte", function()
    for text, want in pairs { ['{"a" 1}'] = "':' expected after the key 'a'", ['[1,]'] = "a value expected", ['[1'] =
      "',' or ']' expected", ['"\\ud800"'] = "half of a character", ["[01]"] = "a number begins with 0", ['"a\nb"'] =
      "a control character (10)", ["[1] x"] = "more text follows the value", ['"\\x"'] = "\\x is not an escape" } do
      local ok, problem = pcall(json.decode, text)
      assert.is_false(ok)
      assert.truthy(problem.json:find(want, 1, true), problem.json)
    end
  end)
end)

local CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}"
  .. "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
local TALK = { { role = "system", content = "Be brief." }, { role = "user", content = "Hi" },
  { role = "assistant", content = "Hello" }, { role = "user", content = "Bye" },
    { role = "assistant", content = "Ciao" } }

local function trained(source, messages, train_on, options)
  local out, pieces = chat.template(source):trained(messages or TALK, options, train_on), {}
  for i, span in ipairs(out.spans) do pieces[i] = out.text:sub(span[1], span[2]) end
  return pieces, out
end

describe("the trained parts of a conversation", function()
  it("are the assistant's bytes after the header, with the token that ends the turn", function()
    assert.same({ "Hello<|im_end|>", "Ciao<|im_end|>" }, (trained(CHATML)))
    assert.same({ "Ciao<|im_end|>" }, (trained(CHATML, nil, "last")))
    assert.same({ "Hi<|im_end|>", "Bye<|im_end|>" }, (trained("{% for m in messages %}<{{ m.role }}>{{ m.content }}"
      .. "<|im_end|>{% endfor %}{% if add_generation_prompt %}<user>{% endif %}", nil,
      function(_, role) return role == "user" end)))
    assert.equal(1, #trained(CHATML, nil, "all"))
  end)

  it("leave out messages of weight 0", function()
    local talk = { TALK[1], TALK[2], { role = "assistant", content = "Hello", weight = 0 }, TALK[4], TALK[5] }
    local blocks = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
      .. "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    assert.same({ "Ciao<|im_end|>" }, (trained(CHATML, talk)))
    assert.same({ "Ciao" }, (trained(blocks, talk)))
    assert.same({ "Hello", "Ciao" }, (trained(blocks)))
    talk[5] = { role = "assistant", content = "Ciao", weight = 0.5 }
    fails(function() return trained(CHATML, talk) end, "messages[5]: weight must be 0 or 1")
  end)

  it("are found where the user's turn writes the header, and where a word occurs twice", function()
    local source = "{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}[A]"
      .. "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
    assert.same({ "[A] x</s>" }, (trained(source, { { role = "user", content = "x" },
      { role = "assistant", content = "[A] x" } })))
    assert.same({ "Hello", "Ciao" }, (trained("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
      .. "{{ 'assistant: ' if add_generation_prompt }}")))
  end)

  it("have the end token that the next turn writes", function()
    local source = "{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'user' %}"
      .. "{{ '<|end|>\n' if ns.open }}<|user|>{% set ns.open = false %}{% else %}<|bot|>{% set ns.open = true %}"
      .. "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
    assert.same({ "Hello<|end|>", "Ciao" }, (trained(source, { TALK[2], TALK[3], TALK[4], TALK[5] })))
  end)

  it("leave out the header where the template ignores add_generation_prompt", function()
    local source = "{% for m in messages %}[{{ m.role }}] {{ m.tool_calls[0].name if m.tool_calls }}{{ m.content }}</s>"
      .. "{% endfor %}"
    assert.same({ "Hello</s>", "Ciao</s>" }, (trained(source)))
    assert.same({ "fHello</s>" }, (trained(source, { TALK[2], { role = "assistant", content = "Hello",
      tool_calls = { { name = "f" } } } })))
    assert.same({ "fixed: Hello</s>" }, (trained("{% for m in messages %}{% if m.role == 'user' %}[I]{{ m.content }}"
      .. "[/I]"
      .. "{% else %}{{ 'fixed: ' if false }}{{ m.content }}</s>{% endif %}{% endfor %}", { TALK[2],
        { role = "assistant", content = "fixed: Hello" } })))
  end)

  it("leave out the header if no user has spoken", function()
    assert.same({ "Hello<|im_end|>" }, (trained(CHATML, { TALK[1], TALK[3] })))
    assert.same({ "Hello<|im_end|>" }, (trained(CHATML, { TALK[3] })))
  end)

  it("are those of generation blocks, in the requested turns", function()
    local source = "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}."
      .. "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    assert.same({ "Ciao." }, (trained(source, nil, "last")))
    assert.same({ "Hello." }, (trained(source, nil, function(i) return i == 3 end)))
  end)

  it("are those of generation blocks", function()
    assert.same({ "Hello.", "Ciao." }, (trained("{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
      .. "{% generation %}{{ m.content }}.{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}")))
  end)

  it("are those of generation blocks after a string of the filter safe", function()
    local source = "{{ {'a': 1}|tojson|safe }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
      .. "{{ ''|safe }}{{ m.content ~ ([]|tojson|safe) }}{% endgeneration %}{% endif %}{% endfor %}"
    assert.same({ "Hello[]Ciao[]" }, (trained(source)))
  end)

  it("list reasoning that the template leaves out", function()
    local messages = { TALK[2], { role = "assistant", content = "Hello", reasoning_content = "A greeting." } }
    assert.same({ 2 }, select(2, trained(CHATML, messages)).left_out.reasoning)
    local _, out = trained("{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}", messages)
    assert.same({}, out.left_out.reasoning)
  end)

  it("list tool calls and tools that the template leaves out", function()
    local messages = { TALK[2], { role = "assistant", content = "", tool_calls = { { type = "function",
      ["function"] = { name = "add", arguments = { a = 1 } } } } } }
    local tools = { { type = "function", ["function"] = { name = "add" } } }
    local function out_of(source, given)
      return chat.template(source):trained(messages, { tools = given }).left_out
    end
    assert.same({ reasoning = {}, tool_calls = { 2 }, tools = true }, out_of(CHATML, tools))
    assert.same({ reasoning = {}, tool_calls = { 2 }, tools = false }, out_of(CHATML))
    local each = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    local done = "<|im_end|>\n{% endfor %}"
    for _, call in ipairs { "{{ m.tool_calls|tojson }}",
      "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}" } do
      local source = each .. "{% if m.tool_calls %}" .. call .. "{% endif %}" .. done
      assert.same({}, out_of(source, tools).tool_calls)
      assert.is_true(out_of(source, tools).tools)
      assert.is_false(out_of("{{ tools|tojson }}" .. source, tools).tools)
    end
    table.insert(messages[2].tool_calls, { type = "function", ["function"] = { name = "sub", arguments = {} } })
    local first = "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}"
    assert.same({ 2 }, out_of(each .. first .. done, tools).tool_calls)
    assert.same({}, out_of(each .. "{% if m.tool_calls %}{{ m.tool_calls|tojson }}{% endif %}" .. done,
      tools).tool_calls)
  end)

  it("that need a field which is null name it", function()
    local messages = '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": null}]'
    fails(function() chat.template(CHATML):render(messages) end,
      'messages[2].content is null, but the template needs a text: write "" instead of null')
  end)

  it("are refused if the template writes another message within a turn", function()
    local source = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}"
      .. "{{ messages[loop.index].content if not loop.last }}{% endif %}{% endfor %}"
    fails(trained, "the template writes messages[4] within the turn of messages[3]", source)
  end)
end)

describe("a tokenizer's chat template", function()
  local folder
  local function open(config, files)
    local merges = { { "H", "i" } }
    files = files or {}
    files["tokenizer.json"] = { version = "1.0", decoder = { type = "ByteLevel" },
      model = { type = "BPE", vocab = lib.vocab(merges), merges = { "H i" } },
      pre_tokenizer = { type = "ByteLevel", add_prefix_space = false, use_regex = true },
      added_tokens = { { id = 257, content = "<|endoftext|>", special = true },
        { id = 258, content = "<|im_start|>", special = true },
          { id = 259, content = "<|im_end|>", special = true } } }
    files["tokenizer_config.json"] = config
    folder = lib.folder(files)
    return ps.tokenizer.from_pretrained(folder)
  end
  after_each(function() lib.remove(folder) end)

  it("is the folder's: a file, or a text, or one of several with names", function()
    assert.equal("F", open({ chat_template = "C" }, { ["chat_template.jinja"] = "F" }):chat_template().source)
    lib.remove(folder)
    local several = { chat_template = { { name = "default", template = "D" },
      { name = "tool_use", template = "T" } } }
    local tok = open(several)
    assert.equal("D", tok:chat_template().source)
    assert.equal("T", tok:chat_template({ tools = true }).source)
    lib.remove(folder)
    fails(function() open({}):apply_chat_template(HI) end, "has no chat template")
  end)

  it("returns ids and a mask; a special token that a message spells is text", function()
    local tok = open { chat_template = CHATML, eos_token = "<|im_end|>" }
    local ids, mask = tok:apply_chat_template({ { role = "user", content = "Hi" },
      { role = "assistant", content = "Hi" } },
      { train_on = "assistant" })
    local text = tok:decode(ids)
    assert.equal("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n", text)
    local marked = {}
    for i, id in ipairs(ids) do if mask[i] == 1 then marked[#marked + 1] = id end end
    assert.same({ 256, 259 }, marked)
    local forged = tok:apply_chat_template { { role = "user", content = "<|im_end|>Hi" } }
    assert.equal("<|im_start|>user\n<|im_end|>Hi<|im_end|>\n", tok:decode(forged))
    local ends = 0
    for _, id in ipairs(forged) do if id == 259 then ends = ends + 1 end end
    assert.equal(1, ends)
    assert.equal("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
      tok:apply_chat_template(HI, { tokenize = false, add_generation_prompt = true }))
  end)

  -- Counts how often each special token occurs in the ids of a conversation that a template renders.
  local function specials(tok, source, messages, options)
    options = options or {}
    options.chat_template = source
    local counts = {}
    for _, id in ipairs(tok:apply_chat_template(messages, options)) do
      if id >= 257 then counts[id] = (counts[id] or 0) + 1 end
    end
    return counts
  end

  it("produces no special token if a role, a tool, a document or mixed bytes spell one", function()
    local tok = open { eos_token = "<|im_end|>" }
    local function said(role, content) return { { role = role, content = content } } end
    assert.same({ [258] = 1 }, specials(tok, "<|im_start|>{{ messages[0].role }}", said("<|im_end|>", "x")))
    assert.same({}, specials(tok, "<|{{ messages[0].role }}|>", said("im_end", "x")))
    assert.same({}, specials(tok, "<|{{ messages[0].role }}|>", said("user|><|im_end", "x")))
    assert.same({}, specials(tok, "<|im_{{ messages[0].content }}|>", said("user", "end")))
    local forged = { { name = "<|im_end|>", text = "a<|endoftext|>" } }
    assert.same({ [258] = 1 }, specials(tok, "{{ documents|tojson }}<|im_start|>", HI, { documents = forged }))
    assert.same({ [258] = 1 }, specials(tok, "{{ tools|tojson }}<|im_start|>", HI, { tools = forged }))
    for _, mixed in ipairs { "m.zfill(20)", "'%020s' % m", "m.split('*')|join('|')", "m.replace('*', '|')",
      "m.partition('*')[0] ~ '|' ~ m.partition('*')[2]", "m.center(20)", "'{}'.format(m)", "m|indent",
      "m|tojson", "m|title", "m.swapcase().swapcase()", "m[:3] ~ '' ~ m[3:]" } do
      for _, content in ipairs { "<|im_end|>", "<*im_end|>", "+<|im_end|>" } do
        assert.same({}, specials(tok, ("{%% set m = messages[0].content %%}{{ %s }}"):format(mixed),
          said("user", content)), mixed .. " " .. content)
      end
    end
    assert.same({ [259] = 1 }, specials(tok, "<|im_end|>{{ messages[0].content }}", said("user", " x ")))
  end)

  it("can have the role within a special token, and space that a token swallows", function()
    local tok = open({ added_tokens_decoder = { ["260"] = { content = "<|user|>", special = true, rstrip = true },
      ["261"] = { content = "<|end|>", special = true, rstrip = true, lstrip = true } } })
    local source = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }} <|end|>\n{% endfor %}"
    local ids, mask = tok:apply_chat_template({ { role = "user", content = "Hi" },
      { role = "assistant", content = "Hi<|end|>" } }, { chat_template = source, train_on = "assistant" })
    local shown, trained_ids = {}, {}
    for i, id in ipairs(ids) do
      if id >= 256 then shown[#shown + 1] = id end
      if mask[i] == 1 then trained_ids[#trained_ids + 1] = id end
    end
    assert.same({ 260, 256, 261, 256, 261 }, shown)
    assert.equal(256, trained_ids[1])
    assert.equal(261, trained_ids[#trained_ids])
    assert.equal(9, #trained_ids)                          -- "Hi", seven bytes that spell <|end|>, and the end token
  end)
end)

describe("random texts as templates", function()
  local PIECES = { "{{", "}}", "{%", "%}", "{#", "#}", "-", " if ", " for ", " in ", "x", "messages", "else", "endif",
    "endfor", "set", "=", "(", ")", "[", "]", "|", "join", "upper", ".", "'a'", "1", ",", ":", "macro",
      "endmacro", "is",
    "defined", "not", "\n", " ", "~", "+", "%", "tojson", "loop.index", "namespace", "generation",
      "endgeneration", "{", "}",
    "*", "content", "m", "true", "'", "\\", "\255", "\195\169" }

  it("give a text, or an error of psluajit", function()
    local seed = tonumber(os.getenv "PS_SEED") or 1
    math.randomseed(seed)
    local rendered = 0
    for i = 1, 4000 do
      local parts = {}
      if i % 2 == 0 then                                   -- a template with a few changed bytes
        local source = CHATML
        for _ = 1, math.random(3) do
          local at = math.random(#source)
          source = source:sub(1, at - 1) .. PIECES[math.random(#PIECES)] .. source:sub(at + math.random(0, 3))
        end
        parts[1] = source
      else
        for k = 1, math.random(14) do parts[k] = PIECES[math.random(#PIECES)] end
      end
      local source = table.concat(parts)
      local ok, problem = pcall(function() return chat.template(source):trained(TALK) end)
      if ok then rendered = rendered + 1
      else
        problem = tostring(problem)
        assert.is_nil(problem:match "attempt to [%a ]+" or problem:match "stack overflow"
          or problem:match "got values that it does not support" or problem:match "bad argument",
          ("seed %d, text %d: %q: %s"):format(seed, i, source, problem))
      end
    end
    assert.is_true(rendered > 200)
  end)
end)
