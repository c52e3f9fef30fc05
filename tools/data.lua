-- SPDX-License-Identifier: BSD-3-Clause
-- Shows how a model reads a file of conversations:
--   psluajit tools/data.lua show MODEL FILE --row 3      one example, trained tokens in colour or in [[ ]]
--   psluajit tools/data.lua stats MODEL FILE             lengths, trained tokens, and rows that training cannot use
-- MODEL is a Hugging Face folder with a tokenizer and a chat template, or a name in its cache. ps.data.table reads
-- FILE. FILE contains JSON lines with messages, with conversations, with prompt and completion, or with instruction and
-- output.
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local folder = require "ps.pretrained.folder"
local endless = require "ps.data.endless"
local left_out_texts = require("ps.data.left_out").texts
local formats = require "ps.data.formats"
local posix = require "posix.unistd"
local values = require "ps.chat.values"
local whole = command_line.whole

local parser = argparse("psluajit data", "Shows a file of conversations as a model reads it.")
parser:require_command(true)
local function command(name, text)
  local one = parser:command(name, text)
  one:argument("model", "a Hugging Face folder with a tokenizer and a chat template, or a name in its cache")
  one:argument("file", "JSON lines of conversations, or a folder or pattern of such files")
  one:option("--train-on", "the turns to train: assistant, last or all", "assistant"):choices {
    "assistant", "last", "all" }
  one:option("--date", "YYYY-MM-DD, for templates that print the date (default: today)")
  return one
end
local show = command("show", "Prints one example with its trained tokens marked.")
whole(show:option("--row", "the row, from 1", "1"), 1)
show:flag("--ids", "also print the ids")
local stats = command("stats", "Prints lengths and counts over all rows.")
whole(stats:option("--max-length", "count the rows that are longer than this"), 1)
local args = command_line.parse(parser)

local function open()
  local tok = ps.tokenizer.from_pretrained(folder.find(args.model))
  local rows = ps.data.table(args.file)
  local form = ps.data.format(rows)
  print(("%s: %d rows in the form '%s'"):format(args.file, #rows, form))
  local note = endless(tok, rows, form, args)
  if note then print("note: " .. note) end
  return tok, rows, form
end

-- Returns the text in a form that is safe to print on a terminal. Control characters are replaced by text such as \x1b,
-- so that the terminal does not execute them.
local function printable(text)
  text = text:gsub("[%z\1-\8\11-\31\127]", function(c) return ("\\x%02x"):format(c:byte()) end)
  return (text:gsub("\194([\128-\159])", function(c) return ("\\x%02x"):format(c:byte()) end))
end

-- Returns the ids and the mask of row i, and the parts that the template leaves out (ps.chat.Rendered).
local function example(tok, rows, form, i)
  local messages, tools = ps.data.conversation(rows, i, form)
  local how = { train_on = args.train_on, date = args.date, tools = tools }
  local ids, mask = formats.of_row(rows, i, tok.apply_chat_template, tok, messages, how)
  local rendered = tok:render_chat(messages, how)
  local empty = 0
  for k, message in ipairs(messages) do
    local said, calls = values.get(message, "content"), values.get(message, "tool_calls")
    if values.get(message, "role") == "assistant" and (said == nil or said == values.NONE
      or type(said) == "string" and not said:find "%S") and (calls == nil or calls == values.NONE or #calls == 0) then
      empty = k
    end
  end
  return ids, mask, rendered.left_out, empty
end

local function shown()
  local tok, rows, form = open()
  local ids, mask, left_out, empty = example(tok, rows, form, args.row)
  local colour = posix.isatty(1) == 1 and not os.getenv "NO_COLOR"
  local on, off = colour and "\27[32m" or "[[", colour and "\27[0m" or "]]"
  local out, at = {}, 1
  while at <= #ids do                                      -- each iteration finds one run of tokens that are all
                                                           -- trained or all untrained
    local last = at
    while last < #ids and mask[last + 1] == mask[at] do last = last + 1 end
    local run = {}
    for i = at, last do run[#run + 1] = ids[i] end
    local text = printable(tok:decode(run, { bytes = true }))
    out[#out + 1] = mask[at] == 1 and on .. text .. off or text
    at = last + 1
  end
  print(table.concat(out))
  if args.ids then print(table.concat(ids, " ")) end
  local n = 0
  for _, m in ipairs(mask) do n = n + m end
  print(("row %d (%s): %d tokens, %d of them trained"):format(args.row, rows:place(args.row), #ids, n))
  for _, what in ipairs(left_out_texts(left_out)) do print("the template leaves out " .. what) end
  if empty > 0 then print(("message %d is an empty answer, which the model learns to give"):format(empty)) end
  if n == 0 then error("no token is trained: the template writes nothing that the model has to produce", 0) end
end

local BARS = 40

-- Counts the rows for which a condition holds, and keeps the first of them.
local function count_row(counts, what, i, holds)
  if not holds then return end
  local count = counts[what] or { n = 0, first = i }
  count.n, counts[what] = count.n + 1, count
end

-- The conditions, in the order in which their counts are printed.
local COUNTED = { "reasoning that the template leaves out", "tool calls that the template leaves out",
  "tools that the template leaves out", "an empty answer, which the model learns to give" }

local function counted()
  local tok, rows, form = open()
  local lengths, trained, none, longer, total, counts = {}, 0, {}, 0, 0, {}
  for i = 1, #rows do
    local ids, mask, left_out, empty = example(tok, rows, form, i)
    local n = 0
    for k, holds in ipairs { #left_out.reasoning > 0, #left_out.tool_calls > 0, left_out.tools, empty > 0 } do
      count_row(counts, COUNTED[k], i, holds)
    end
    for _, m in ipairs(mask) do n = n + m end
    if n == 0 then none[#none + 1] = i end
    lengths[i], trained, total = #ids, trained + n, total + #ids
    if args.max_length and #ids > args.max_length then longer = longer + 1 end
  end
  local sorted = {}
  for i, length in ipairs(lengths) do sorted[i] = length end
  table.sort(sorted)
  local function at(share) return sorted[math.max(1, math.ceil(share * #sorted))] end
  print(("%d tokens, %d of them trained (%.1f %%)"):format(total, trained, 100 * trained / total))
  print(("lengths: least %d, median %d, 95 %% up to %d, largest %d"):format(sorted[1], at(0.5), at(0.95),
    sorted[#sorted]))
  local width, bins, most = math.max(1, math.ceil((sorted[#sorted] + 1) / 16)), {}, 0
  for _, length in ipairs(lengths) do
    local bin = math.floor(length / width)
    bins[bin] = (bins[bin] or 0) + 1
    most = math.max(most, bins[bin])
  end
  for bin = math.floor(sorted[1] / width), math.floor(sorted[#sorted] / width) do
    local n = bins[bin] or 0
    print(("%7d to %-7d %7d %s"):format(bin * width, (bin + 1) * width - 1, n, ("#"):rep(math.ceil(n * BARS / most))))
  end
  if args.max_length then print(("%d rows are longer than %d tokens"):format(longer, args.max_length)) end
  for _, what in ipairs(COUNTED) do
    local count = counts[what]
    if count then
      print(("%d rows have %s; the first is row %d (%s)"):format(count.n, what, count.first, rows:place(count.first)))
    end
  end
  if #none > 0 then
    error(("%d rows have no trained token; the first is row %d (%s)"):format(#none, none[1], rows:place(none[1])), 0)
  end
end

command_line.try("data", args.show and shown or counted)
