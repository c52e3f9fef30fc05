-- SPDX-License-Identifier: BSD-3-Clause
-- Writes manual pages and completions for bash and zsh into a folder. The pages are psluajit.1, and psluajit-NAME.1 for
-- each tool that `psluajit tools` lists. The options of a tool are read from its argparse parser. If a tool has no
-- parser, its options are read from the output of --help:
--   psluajit tools/man.lua DIR
local argparse = require "argparse"
local lfs = require "lfs"
local paths = require "ps.paths"
local scripts = require "ps.prompt.scripts"
local write_file = require "ps.core.write_file"

local folder = arg[1]
if not folder or folder:find "^%-" then error("usage: psluajit tools/man.lua DIR", 0) end
local SECTION = "General Commands Manual"

-- -- the tables -------------------------------------------------------------------------------------------------------
local Parser = getmetatable(argparse "x").__index
local CAPTURED = {}

-- Runs a script until the script calls parse of its argparse parser. Returns the parser, or nil if the script creates
-- no parser.
local function parser_of(path)
  local file = assert(io.open(path))
  local uses = file:read("*a"):find 'require "argparse"'
  file:close()
  if not uses then return nil end
  local parse, pparse, exit, args, found = Parser.parse, Parser.pparse, os.exit, _G.arg, nil
  local function capture(parser)
    found = parser
    error(CAPTURED, 0)
  end
  Parser.parse, Parser.pparse = capture, capture
  os.exit = function() error(CAPTURED, 0) end             -- luacheck: ignore
  _G.arg = { [0] = path }
  local ok, problem = pcall(assert(loadfile(path)))
  Parser.parse, Parser.pparse, os.exit, _G.arg = parse, pparse, exit, args      -- luacheck: ignore
  return found or error(("%s: %s"):format(path, ok and "it is not valid Lua" or tostring(problem)), 0)
end

local function help_of(name)
  local p = assert(io.popen(("'%s' %s --help 2>&1"):format(paths.exe, name)))
  local text = p:read "*a"
  p:close()
  return text
end

-- -- roff ------------------------------------------------------------------------------------------------------------
local function roff(text)
  text = text:gsub("\\", "\\e"):gsub("%-", "\\-")
  return (("\n" .. text):gsub("\n([%.'])", "\n\\&%1"):sub(2))
end

local function heading(lines, name, about)
  lines[#lines + 1] = (".TH %s 1 \"\" \"psluajit %s\" \"%s\""):format(roff(name:upper()), paths.version, SECTION)
  lines[#lines + 1] = ".SH NAME"
  lines[#lines + 1] = ("%s \\- %s"):format(roff(name), roff((about:gsub("%.$", ""))))
end

local function section(lines, title) lines[#lines + 1] = ".SH " .. title end

local function write(name, lines)
  local done, why = write_file(folder .. "/" .. name, table.concat(lines, "\n") .. "\n")
  if not done then error("cannot write " .. why, 0) end
end

-- Returns a list of the options and arguments of a parser. Each entry has a label and a text.
local function elements(parser)
  local list = {}
  for _, element in ipairs(parser._arguments) do list[#list + 1] = element end
  for _, element in ipairs(parser._options) do list[#list + 1] = element end
  for i, element in ipairs(list) do
    list[i] = { label = table.concat(element:_get_label_lines(), ", "), text = element:_get_description() or "",
      names = element._aliases }
  end
  return list
end

local function page_of_tool(tool, parser)
  local name, lines = "psluajit-" .. tool.name, {}
  heading(lines, name, tool.about)
  section(lines, "SYNOPSIS")
  if parser then
    lines[#lines + 1] = roff((parser:get_usage():gsub("^Usage: ", "", 1):gsub("%s+", " ")))
    section(lines, "DESCRIPTION")
    lines[#lines + 1] = roff(parser._description or tool.about)
    section(lines, "OPTIONS")
    for _, element in ipairs(elements(parser)) do
      lines[#lines + 1] = ".TP"
      lines[#lines + 1] = ".B " .. roff(element.label)
      lines[#lines + 1] = roff(element.text ~= "" and element.text or "\\&")
    end
    if parser._epilog then
      section(lines, "NOTES")
      lines[#lines + 1] = ".nf\n" .. roff(parser._epilog) .. "\n.fi"
    end
  else
    lines[#lines + 1] = ("psluajit %s [options]"):format(tool.name)
    section(lines, "DESCRIPTION")
    lines[#lines + 1] = ".nf\n" .. roff(help_of(tool.name):gsub("%s+$", "")) .. "\n.fi"
  end
  section(lines, "SEE ALSO")
  lines[#lines + 1] = ".BR psluajit (1)"
  write(name .. ".1", lines)
end

-- -- the program's page -----------------------------------------------------------------------------------------------
local function page_of_program(tools)
  local lines, help = {}, help_of ""
  local options, rest = help:match "Available options are:\n(.-)(\n%u.*)$"
  heading(lines, "psluajit", "trains transformers, scripted in Lua")
  section(lines, "SYNOPSIS")
  lines[#lines + 1] = roff "psluajit [options]... [script [args]...]"
  section(lines, "DESCRIPTION")
  lines[#lines + 1] = roff(rest:gsub("^\n", ""):gsub("%s+$", ""))
  section(lines, "OPTIONS")
  for line in (options .. "\n"):gmatch "([^\n]*)\n" do
    local label, text = line:match "^  (%-.-)%s%s+(%S.*)$"
    if label or line:find "^  %-" then
      lines[#lines + 1] = ".TP"
      lines[#lines + 1] = ".B " .. roff(label or line:match "^%s*(.-)%s*$")
      lines[#lines + 1] = text and roff(text) or nil
    else lines[#lines + 1] = roff(line:match "^%s*(.*)$") end
  end
  section(lines, "TOOLS")
  for _, tool in ipairs(tools) do
    lines[#lines + 1] = ".TP"
    lines[#lines + 1] = (".BR psluajit\\-%s (1)"):format(roff(tool.name))
    lines[#lines + 1] = roff(tool.about)
  end
  section(lines, "FILES")
  lines[#lines + 1] = roff "The Lua library, models, examples, tools and guides are in share/psluajit next to bin."
  section(lines, "ENVIRONMENT")
  lines[#lines + 1] = roff "docs/environment.md there lists every variable."
  write("psluajit.1", lines)
end

-- -- completions ------------------------------------------------------------------------------------------------------
local function completion(tools, examples, parsers)
  local names, cases = { "tools", "examples" }, {}
  for _, list in ipairs { tools, examples } do
    for _, script in ipairs(list) do names[#names + 1] = script.name end
  end
  table.sort(names)
  for _, tool in ipairs(tools) do
    local words = {}
    for _, element in ipairs(parsers[tool.name] and elements(parsers[tool.name]) or {}) do
      for _, alias in ipairs(element.names or {}) do
        if alias:find "^%-%-" then words[#words + 1] = alias end
      end
    end
    if not parsers[tool.name] then
      -- for --x=N, only --x is a word; =N is an argument of the script
      for word, rest in help_of(tool.name):gmatch "%f[%S](%-%-[%l%d-]+)([_=]?)" do
        if rest == "" then words[#words + 1] = word end
      end
    end
    cases[#cases + 1] = ("    %s|*/%s.lua) words='%s' ;;"):format(tool.name, tool.name, table.concat(words, " "))
  end
  return ([[
# Completion of psluajit's tools, examples and options. Written by tools/man.lua.
_psluajit() {
  local current=${COMP_WORDS[COMP_CWORD]} words=
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W '%s --help --version --dry-run' -- "$current") $(compgen -f -X '!*.lua' -- "$current"))
    return 0
  fi
  case ${COMP_WORDS[1]} in
%s
  esac
  case $current in
    -*) COMPREPLY=($(compgen -W "$words" -- "$current")) ;;
    *) COMPREPLY=($(compgen -f -- "$current")) ;;
  esac
  return 0
}
]]):format(table.concat(names, " "), table.concat(cases, "\n"))
end

lfs.mkdir(folder)
local tools, parsers = {}, {}
for _, tool in ipairs(scripts.list "tools") do
  if not tool.own then
    tools[#tools + 1] = tool
    parsers[tool.name] = parser_of(paths.root .. "/tools/" .. tool.name .. ".lua")
  end
end
for _, tool in ipairs(tools) do page_of_tool(tool, parsers[tool.name]) end
page_of_program(tools)
local functions = completion(tools, scripts.list "examples", parsers)
write("psluajit.bash", { functions .. "complete -F _psluajit psluajit" })
write("_psluajit", { "#compdef psluajit", "autoload -U +X bashcompinit && bashcompinit",
  functions .. "complete -F _psluajit psluajit" })
print(("wrote %d pages and completions for bash and zsh into %s"):format(#tools + 1, folder))
