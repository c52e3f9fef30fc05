-- SPDX-License-Identifier: BSD-3-Clause
-- tools/chat.lua: the text of a conversation, the tokens drawn for it, and its end.
local ps = require "ps"
local gpt2 = require "models.gpt2"
local paths = require "ps.paths"
local check = require "spec.check_lib"
local tokens = require "spec.tokenizer_lib"

local TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
  .. "{% if add_generation_prompt %}[assistant]{% endif %}"

-- Runs a tool with a folder and options. Returns its output and exit status.
local function run(tool, folder, options)
  return check.shell(("'%s' '%s'/tools/%s.lua %s --max-new 5 --temperature 0 --dtype fp32 %s")
    :format(paths.exe, paths.root, tool, folder, options))
end

describe("tools/chat.lua", function()
  it("continues the conversation until /quit or the input's end, and ignores empty lines", function()
    local folder = tokens.gpt2 { { "a", "b" } }
    ps.manual_seed(1)
    gpt2.new("tiny", { vocab_size = 300, n_positions = 128 }):save_pretrained(folder)
    check.write(folder .. "/in.txt", "ab\n\n\nba\n/quit\nnever\n")
    local function chat(more) return run("chat", folder, ("%s <%s/in.txt"):format(more or "", folder)) end
    local out, code = chat()
    assert.equal(0, code, out)
    local model, tok = ps.from_pretrained(folder, { quiet = true }), ps.tokenizer.from_pretrained(folder)
    local text, want = "", ""
    for _, line in ipairs { "ab", "ba" } do
      text = text .. "User: " .. line .. "\nAssistant:"
      local prompt = tok:encode(text)
      local row = model:generate({ prompt }, 5, { temperature = 0 })[1]
      local reply = tok:decode { unpack(row, #prompt + 1) }
      text, want = text .. reply .. "\n", want .. "User: Assistant:" .. reply .. "\n"
      if line == "ab" then want = want .. "User: User: " end                       -- the prompts of the empty lines
    end
    assert.equal(want .. "User: ", out)
    check.write(folder .. "/end.txt", "\nab\n")
    assert.matches("^User: User: Assistant:.*\nUser: \n$", (run("chat", folder, ("<%s/end.txt"):format(folder))))
    local terminal = require("spec.terminal_lib").start { "chat", folder }
    terminal:expect "Ctrl-D or /quit ends the conversation."
    terminal:expect "User: "
    terminal:type "\4"
    assert.equal(0, select(2, terminal:finish()))
    assert.matches("Ctrl-D or the line /quit ends the conversation", (run("chat", folder, "--help")), 1, true)
    check.write(folder .. "/generation_config.json", '{ "num_return_sequences": 2 }')
    assert.equal(out, (chat()))
    local once = run("generate", folder, "--start ab")
    os.remove(folder .. "/generation_config.json")
    assert.equal(run("generate", folder, "--start ab"), once)
    out, code = chat "--max-new 0"
    assert.truthy(code ~= 0 and out:find("max%-new"), out)
    tokens.remove(folder)
  end)

  it("writes each turn in the form of the folder's chat template", function()
    local folder = tokens.gpt2({ { "a", "b" } }, { ["tokenizer_config.json"] = { chat_template = TEMPLATE } })
    ps.manual_seed(1)
    gpt2.new("tiny", { vocab_size = 300, n_positions = 128 }):save_pretrained(folder)
    check.write(folder .. "/in.txt", "ab\n\255\nba\n")
    local model, tok = ps.from_pretrained(folder, { quiet = true }), ps.tokenizer.from_pretrained(folder)
    local function reply(text)
      local prompt = tok:encode(text)
      return tok:decode { unpack(model:generate({ prompt }, 5, { temperature = 0 })[1], #prompt + 1) }
    end
    local first = reply "[system]s[user]ab[assistant]"
    local second = reply("[system]s[user]ab[assistant]" .. first .. "[user]ba[assistant]")
    local out, code = run("chat", folder, ("--system s <%s/in.txt"):format(folder))
    assert.equal(("> %s\n> this line is not valid UTF-8; please write it again\n> %s\n> \n"):format(first, second), out)
    assert.equal(0, code)
    assert.equal(first .. "\n", (run("generate", folder, "--chat --system s --start ab")))
    assert.equal("User: Assistant:", (run("chat", folder, ("--plain <%s/in.txt"):format(folder)):sub(1, 16)))
    out, code = run("generate", folder, "--start ab --pipeline 2")
    assert.equal(1, code)
    assert.matches(("generate: --pipeline 2 needs 2 processes, but 1 is running; start them with the launcher: "
      .. "psluajit launch --nproc-per-node 2 generate %s --pipeline 2 ..."):format(folder), out, 1, true)
    out, code = run("generate", folder, "--system s --start ab")
    assert.truthy(code ~= 0 and out:find("--system: needs --chat", 1, true), out)
    tokens.remove(folder)
  end)
end)
