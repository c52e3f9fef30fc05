-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/template.lua DIR_OR_JINJA MESSAGES.json: renders a conversation with the chat template of a folder, or
-- with a .jinja file. Prints the text without adding a newline.
--   --add-generation-prompt   ends the text with the header of the model's next turn
--   --tools TOOLS.json        functions that the model may call
--   --date YYYY-MM-DD         the date for templates that print it (default: today)
--   --mask assistant          prints a JSON list of pieces [text, trained]. `trained` is true for the parts that the
--                             model has to produce.
-- For a .jinja file without a folder, bos_token, eos_token, unk_token and pad_token are <s>, </s>, <unk> and <pad>. The
-- exit status is:
--   2  if the template uses a construct that is not supported; stderr is `refused: WHY`
--   3  if the template raises an error; stderr is only the template's message
--   1  if there is another error, such as a file that cannot be read
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local cjson = require "cjson"
local chat = require "ps.chat"
local ps = require "ps"

local parser = argparse("bench/template.lua", "Renders a conversation by a chat template.")
parser:argument("template", "a folder with a tokenizer and its chat template, or a .jinja file")
parser:argument("messages", "a JSON file: a list of messages")
parser:flag("--add-generation-prompt", "end with the header of the model's next turn")
parser:option("--tools", "a JSON file: a list of functions as JSON schemas")
parser:option("--date", "YYYY-MM-DD, for templates that print the date")
parser:option("--mask", "print pieces and whether they are trained"):choices { "assistant" }
local args = command_line.parse(parser)

local function read(path)
  local file = io.open(path, "rb") or error(path .. ": cannot be read", 0)
  local text = file:read "*a"
  file:close()
  return text
end

local BARE = { bos_token = "<s>", eos_token = "</s>", unk_token = "<unk>", pad_token = "<pad>" }

local ok, problem = pcall(function()
  local template, tokens
  if args.template:match "%.jinja$" then
    template, tokens = chat.template(read(args.template), args.template), BARE
  else
    local tok = ps.tokenizer.from_pretrained(args.template)
    template, tokens = tok:chat_template { tools = args.tools ~= nil }, tok:special_tokens()
  end
  local options = { add_generation_prompt = args.add_generation_prompt or false, date = args.date, tokens = tokens,
    tools = args.tools and read(args.tools) }
  if not args.mask then return io.write(template:render(read(args.messages), options)) end
  local rendered = template:trained(read(args.messages), options, args.mask)
  local pieces, at = {}, 1
  for _, span in ipairs(rendered.spans) do
    if span[1] > at then pieces[#pieces + 1] = { rendered.text:sub(at, span[1] - 1), false } end
    pieces[#pieces + 1] = { rendered.text:sub(span[1], span[2]), true }
    at = span[2] + 1
  end
  if at <= #rendered.text then pieces[#pieces + 1] = { rendered.text:sub(at), false } end
  io.write(#pieces == 0 and "[]" or cjson.encode(pieces))
end)
if ok then return end
local refused, raised = type(problem) == "table" and problem.refused, type(problem) == "table" and problem.raised
if not (refused or raised) then command_line.try("template.lua", error, problem, 0) end
io.stderr:write(refused and "refused: " .. refused or raised, "\n")
os.exit(refused and 2 or 3)
