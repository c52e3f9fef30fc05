-- SPDX-License-Identifier: BSD-3-Clause
-- tools/serve.lua: what it answers to requests of OpenAI's API, as a whole and as streams, and what it refuses.
local ps = require "ps"
local answer = require "ps.serve.answer"
local check = require "spec.check_lib"
local gpt2 = require "models.gpt2"
local http = require "http.request"
local http_server = require "ps.core.http_server"
local json = require "cjson"
local paths = require "ps.paths"
local tokens = require "spec.tokenizer_lib"

local folder, address, token, pid, model, tok

setup(function()
  folder = tokens.gpt2 { { "a", "b" } }
  ps.manual_seed(1)
  gpt2.new("tiny", { vocab_size = 258, n_positions = 64, initializer_range = 0.3 }):save_pretrained(folder)
  check.write(folder .. "/chat_template.jinja", "{% for m in messages %}{{ m.role }}"
    .. "{% if m.name %} {{ m.name }}{% endif %}:{{ m.content }};{% endfor %}"
    .. "{% if add_generation_prompt %}assistant:{% endif %}"
    .. "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}")
  model, tok = ps.from_pretrained(folder, { quiet = true }), ps.tokenizer.from_pretrained(folder)
  local p = io.popen(("'%s' '%s/tools/serve.lua' '%s' --name tiny >'%s/said' 2>&1 & echo $!"):format(paths.exe,
    paths.root, folder, folder))
  pid = p:read()
  p:close()
  for _ = 1, 600 do
    address, token = (check.read(folder .. "/said") or ""):match "^tiny: (http://%S+)/v1  token (%x+)\n"
    if address then break end
    os.execute "sleep 0.1"
  end
  assert(address, check.read(folder .. "/said"))
end)
teardown(function()
  os.execute("kill " .. pid)
  tokens.remove(folder)
end)

-- Returns the status and the body of a reply. `body` is a table, which becomes JSON, or nil if the method is GET.
local function ask(path, body, more)
  local r = http.new_from_uri(address .. path)
  r.headers:upsert("authorization", "Bearer " .. token)
  for key, value in pairs(more or {}) do r.headers:upsert(key, value) end
  if body then
    r.headers:upsert(":method", "POST")
    r:set_body(type(body) == "string" and body or json.encode(body))
  end
  local headers, stream = assert(r:go(60))
  return headers:get ":status", assert(stream:get_body_as_string(60)), headers
end

local function reply(path, body)
  local status, text = ask(path, body)
  assert.equal("200", status, text)
  return json.decode(text), text
end

local function refused(status, part, path, body, more)
  local got, text = ask(path, body, more)
  assert.equal(status, got, text)
  local problem = json.decode(text).error
  assert.truthy(problem.message:find(part, 1, true), text)
  return problem
end

-- Returns the events of a stream, and whether it ended correctly.
local function events(text)
  local list, ended = {}, false
  for line in text:gmatch "([^\n]+)\n\n" do
    local data = line:match "^data: (.*)$"
    if data == "[DONE]" then ended = true else list[#list + 1] = json.decode(data) end
  end
  assert.truthy(ended, text)
  return list
end

local function greedy(ids, n) return model:generate(ids, n, { temperature = 0 }) end
local function text_of(ids, first) return tok:decode({ unpack(ids, first) }, { skip_special_tokens = true }) end

describe("tools/serve.lua", function()
  it("names its model", function()
    local list = reply "/v1/models"
    assert.equal("list", list.object)
    assert.equal("tiny", list.data[1].id)
    assert.equal("tiny", reply("/v1/models/tiny").id)
    assert.equal("tiny", reply("/v1/models/%74in%79?x=y").id)
    refused("404", "there is no /v1/models/a b", "/v1/models/a%20b")
    refused("404", "there is no such path", "/v1/models/%ff")
  end)

  it("writes lists without elements as JSON arrays", function()
    local _, text = reply("/v1/completions", { prompt = "abba", max_tokens = 0, logprobs = 1 })
    for _, key in ipairs { "tokens", "token_logprobs", "top_logprobs", "text_offset" } do
      assert.truthy(text:find('"' .. key .. '":[]', 1, true), text)
    end
  end)

  it("completes texts and ids", function()
    local ids = tok:encode "abba"
    local want = text_of(greedy(ids, 6), #ids + 1)
    local got = reply("/v1/completions", { model = "tiny", prompt = "abba", max_tokens = 6, temperature = 0 })
    assert.equal("text_completion", got.object)
    assert.equal(want, got.choices[1].text)
    assert.equal("length", got.choices[1].finish_reason)
    assert.same({ prompt_tokens = #ids, completion_tokens = 6, total_tokens = #ids + 6 }, got.usage)
    got = reply("/v1/completions", { prompt = { ids, { 5, 6, 7 } }, max_tokens = 6, temperature = 0 })
    assert.equal(2, #got.choices)
    assert.equal(want, got.choices[1].text)
    assert.equal(1, got.choices[2].index)
    assert.equal(text_of(greedy({ 5, 6, 7 }, 6), 4), got.choices[2].text)
    local function drawn(seed)
      return reply("/v1/completions", { prompt = "abba", max_tokens = 8, seed = seed, n = 2 }).choices
    end
    local a, b = drawn(7), drawn(7)
    assert.equal(a[1].text, b[1].text)
    assert.equal(a[2].text, b[2].text)
    assert.not_equal(a[1].text, a[2].text)
  end)

  it("gives log-probabilities as lm-eval asks for them: echo with n + 1 entries, the first null", function()
    local ids = { 5, 6, 7, 8 }
    local got = reply("/v1/completions", { prompt = ids, max_tokens = 1, temperature = 0, logprobs = 1, echo = true })
    local row = got.choices[1].logprobs
    assert.equal(5, #row.token_logprobs)
    assert.equal(json.null, row.token_logprobs[1])
    assert.equal(json.null, row.top_logprobs[1])
    local all = ps.no_grad(function()
      return model({ input_ids = ps.tensor({ ids }, "int32") }).logits:log_softmax(-1):tolist()[1]
    end)
    for i = 2, 4 do
      assert.truthy(math.abs(row.token_logprobs[i] - all[i - 1][ids[i] + 1]) < 1e-4)
      local most = -math.huge
      for _, value in pairs(row.top_logprobs[i]) do most = math.max(most, value) end
      local best = -math.huge
      for _, value in ipairs(all[i - 1]) do best = math.max(best, value) end
      assert.truthy(math.abs(most - best) < 1e-4)
    end
    assert.equal(text_of(greedy(ids, 1), 1), got.choices[1].text)
    got = reply("/v1/completions", { prompt = ids, max_tokens = 0, logprobs = 0, echo = true })
    assert.equal(4, #got.choices[1].logprobs.token_logprobs)
  end)

  it("answers conversations by the template", function()
    local messages = { { role = "user", content = "abba" } }
    local ids = tok:apply_chat_template(messages, { add_generation_prompt = true })
    local want = text_of(greedy(ids, 5), #ids + 1)
    local got = reply("/v1/chat/completions", { messages = messages, max_tokens = 5, temperature = 0, logprobs = true,
      top_logprobs = 2 })
    assert.equal("chat.completion", got.object)
    assert.same({ role = "assistant", content = want }, got.choices[1].message)
    assert.equal(5, #got.choices[1].logprobs.content)
    assert.equal(2, #got.choices[1].logprobs.content[1].top_logprobs)
    messages[1].content = { { type = "text", text = "ab" }, { type = "text", text = "ba" } }
    got = reply("/v1/chat/completions", { messages = messages, max_completion_tokens = 5, temperature = 0 })
    assert.equal(want, got.choices[1].message.content)
  end)

  it("passes the names of messages to the template", function()
    local messages = { { role = "user", content = "abba", name = "ab" } }
    local ids = tok:apply_chat_template(messages, { add_generation_prompt = true })
    local got = reply("/v1/chat/completions", { messages = messages, max_tokens = 5, temperature = 0 })
    assert.equal(#ids, got.usage.prompt_tokens)
    assert.equal(text_of(greedy(ids, 5), #ids + 1), got.choices[1].message.content)
    messages[1].name = json.null
    local fewer = reply("/v1/chat/completions", { messages = messages, max_tokens = 0 }).usage.prompt_tokens
    assert.equal(#tok:encode " ab", #ids - fewer)
  end)

  it("streams", function()
    local _, text, headers = ask("/v1/chat/completions", { messages = { { role = "user", content = "abba" } },
      max_tokens = 9, temperature = 0, stream = true, stream_options = { include_usage = true } })
    assert.equal("text/event-stream", headers:get "content-type")
    local list, pieces = events(text), {}
    assert.equal("assistant", list[1].choices[1].delta.role)
    for _, one in ipairs(list) do
      if one.choices[1] then pieces[#pieces + 1] = one.choices[1].delta.content end
    end
    local whole = reply("/v1/chat/completions", { messages = { { role = "user", content = "abba" } }, max_tokens = 9,
      temperature = 0 })
    assert.equal(whole.choices[1].message.content, table.concat(pieces))
    assert.equal("length", list[#list - 1].choices[1].finish_reason)
    assert.equal(9, list[#list].usage.completion_tokens)
    assert.truthy(text:find('"choices":[]', 1, true))
  end)

  it("ends at a stop string, which is not in the text, also in a stream", function()
    local ids = tok:encode "abba"
    local text = text_of(greedy(ids, 12), #ids + 1)
    local stop = text:sub(5, 6)
    local want = text:sub(1, text:find(stop, 1, true) - 1)
    local fields = { prompt = "abba", max_tokens = 12, temperature = 0, stop = { "zzzz", stop } }
    local got = reply("/v1/completions", fields)
    assert.equal(want, got.choices[1].text)
    assert.equal("stop", got.choices[1].finish_reason)
    assert.truthy(got.usage.completion_tokens < 12)
    fields.stream = true
    local _, said = ask("/v1/completions", fields)
    local pieces = {}
    for _, one in ipairs(events(said)) do pieces[#pieces + 1] = one.choices[1].text end
    assert.equal(want, table.concat(pieces))
  end)

  it("ends as generation_config.json says, and draws as the request says", function()
    local other = folder .. "/other"
    os.execute(("mkdir '%s' && cp '%s'/*.json '%s'/*.safetensors '%s'"):format(other, folder, folder, other))
    local ids = tok:encode "abba"
    local last = greedy(ids, 3)[#ids + 3]
    check.write(other .. "/generation_config.json", json.encode { eos_token_id = last, do_sample = true, top_k = 1,
      top_p = 1e-6, min_p = 1, num_return_sequences = 2 })
    local own = ps.from_pretrained(other, { quiet = true })
    local function choice(fields)
      fields.prompt = "abba"
      return answer.completion(own, tok, "tiny", fields).choices[1]
    end
    local got = choice { max_tokens = 3, temperature = 0 }   -- the last of max_tokens is also the end
    assert.equal("stop", got.finish_reason)
    assert.equal(text_of(greedy(ids, 3), #ids + 1), got.text)
    assert.not_equal(choice({ max_tokens = 8, seed = 1 }).text, choice({ max_tokens = 8, seed = 2 }).text)
    assert.equal(choice({ max_tokens = 8, seed = 1, top_p = 1e-6 }).text,
      choice({ max_tokens = 8, seed = 2, top_p = 1e-6 }).text)
  end)

  it("answers several clients, and continues when one closes its stream", function()
    local body = json.encode { prompt = "abba", max_tokens = 50, temperature = 0, stream = true }
    local socket = require("cqueues.socket").connect("127.0.0.1", tonumber(address:match ":(%d+)$"))
    socket:setmode("b", "b")                               -- keeps line ends unchanged
    assert(socket:write(("POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\ncontent-length: %d"
      .. "\r\n\r\n%s"):format(token, #body, body)))
    assert(socket:flush())
    local line, why = socket:read "*l"
    assert.truthy(line and line:find("200", 1, true), line or why)
    socket:close()
    local cqueues = require "cqueues"
    local queue, texts = cqueues.new(), {}
    for i = 1, 3 do
      queue:wrap(function()
        texts[i] = reply("/v1/completions", { prompt = "abba", max_tokens = 10, temperature = 0 }).choices[1].text
      end)
    end
    assert(queue:loop(60))
    assert.truthy(texts[1] and texts[1] == texts[2] and texts[1] == texts[3])
    reply "/v1/models"
  end)

  it("answers other requests while it computes a reply that is not a stream", function()
    local cqueues = require "cqueues"
    local queue, order = cqueues.new(), {}
    queue:wrap(function()
      reply("/v1/completions", { prompt = "abba", max_tokens = 50, n = 40 })
      order[#order + 1] = "computed"
    end)
    queue:wrap(function()
      for _ = 1, 3 do reply "/v1/models" end
      order[#order + 1] = "asked"
    end)
    assert(queue:loop(60))
    assert.same({ "asked", "computed" }, order)
  end)

  it("lets other requests run between the choices of a request for no tokens", function()
    local asked = 0
    local done = answer.completion(model, tok, "tiny", { prompt = { "a", "b" }, max_tokens = 0, n = 3 }, nil, function()
      asked = asked + 1
      return asked < 4
    end)
    assert.equal(4, asked)
    assert.equal(4, #done.choices)
    assert.equal(nil, done.usage)
  end)

  it("limits the choices of a request, before it computes anything", function()
    local fields = { prompt = { "a", "b" }, max_tokens = 0, n = 65 }
    local problem = refused("400", "2 prompts, which with n = 65 asks for 130 choices; the limit is 128 choices",
      "/v1/completions", fields)
    assert.equal("prompt", problem.param)
    fields.n = 64
    assert.equal(128, #reply("/v1/completions", fields).choices)
    local prompts = {}
    for i = 1, 30000 do prompts[i] = "a" end
    local function encode() error "a prompt was tokenized" end
    local ok, why = pcall(require("ps.serve.request").prompts, prompts, { encode = encode }, 258, 128)
    assert.truthy(not ok and why.message:find("asks for 3840000 choices", 1, true))
  end)

  it("stops computing a reply when its client has disconnected", function()
    local socket = require "cqueues.socket"
    local listening = assert(socket.listen("127.0.0.1", 0))
    assert(listening:listen())
    local client = socket.connect("127.0.0.1", (select(3, listening:localname())))
    assert(client:connect())
    local ours = assert(listening:accept())
    local stream = { connection = { socket = ours }, state = "idle" }
    assert.falsy(http_server.disconnected(stream))
    ours:shutdown "r"                                      -- as lua-http does after "Connection: close"
    assert.falsy(http_server.disconnected(stream))
    stream.state = "closed"
    assert.truthy(http_server.disconnected(stream))
    stream.state = "idle"
    client:close()
    for _ = 1, 200 do                                      -- the end of the connection may arrive later
      if http_server.disconnected(stream) then break end
      os.execute "sleep 0.05"
    end
    assert.truthy(http_server.disconnected(stream))
    assert.truthy(http_server.disconnected { connection = {} })
    local request, asked = { prompt = { 5, 6, 7, 8 }, max_tokens = 50, temperature = 0, n = 3 }, 0
    local done = answer.completion(model, tok, "tiny", request, nil, function()
      asked = asked + 1
      return asked < 4
    end)
    assert.equal(4, asked)
    assert.same({}, done.choices)
    assert.equal(nil, done.usage)
    asked, request.stop, request.n = 0, { ("\1"):rep(500) }, 1     -- no text is passed on before the end
    answer.completion(model, tok, "tiny", request, nil, function()
      asked = asked + 1
      return true
    end)
    assert.equal(50, asked)
  end)

  it("answers HEAD without a body, and requests after it on the same connection", function()
    local socket = require("cqueues.socket").connect("127.0.0.1", tonumber(address:match ":(%d+)$"))
    socket:setmode("b", "b")
    socket:settimeout(20)
    local head = (" /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n\r\n"):format(token)
    assert(socket:write("HEAD" .. head .. "GET" .. head))
    assert(socket:flush())
    for _ = 1, 2 do
      assert.equal("HTTP/1.1 200 OK", socket:read("*l"):sub(1, 15))
      repeat local line = socket:read "*l" until line == "\r"
    end
    assert.equal("{", socket:read(1))
    socket:close()
  end)

  it("tells a client that waits with its body to continue", function()
    local socket = require("cqueues.socket").connect("127.0.0.1", tonumber(address:match ":(%d+)$"))
    socket:setmode("b", "bn")
    socket:settimeout(60)
    local head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\nexpect: 100-continue\r\n"
      .. "content-length: %d\r\n\r\n"
    local body = json.encode { prompt = "a", max_tokens = 1 }
    assert(socket:write(head:format("wrong", #body)))
    assert.equal("HTTP/1.1 401 Unauthorized\r", socket:read "*l")
    socket:close()
    socket = require("cqueues.socket").connect("127.0.0.1", tonumber(address:match ":(%d+)$"))
    socket:setmode("b", "bn")
    socket:settimeout(60)
    assert(socket:write(head:format(token, #body)))
    assert.equal("HTTP/1.1 100 Continue\r", socket:read "*l")
    assert.equal("\r", socket:read "*l")
    assert(socket:write(body))
    assert.equal("HTTP/1.1 200 OK\r", socket:read "*l")
    socket:close()
  end)

  it("ends at Ctrl-C, also within a computation", function()
    local said = folder .. "/said_at_end"
    local p = io.popen(("sh -c 'echo $$ >%s/pid; exec %s %s/tools/serve.lua %s --token abc' >'%s' 2>&1; echo $? >>'%s'")
      :format(folder, paths.exe, paths.root, folder, said, said), "w")
    local own
    for _ = 1, 600 do
      own = (check.read(said) or ""):match "(http://%S+)/v1"
      if own then break end
      os.execute "sleep 0.1"
    end
    local r = http.new_from_uri(own .. "/v1/completions")
    r.headers:upsert("authorization", "Bearer abc")
    r.headers:upsert(":method", "POST")
    r:set_body(json.encode { prompt = "abba", max_tokens = 60, n = 100, stream = true })
    local _, stream = assert(r:go(60))
    assert(stream:get_next_chunk(60))
    os.execute("kill -INT " .. check.read(folder .. "/pid"))
    p:close()
    assert.matches("130\n$", check.read(said))
  end)

  it("answers requests after which the connection closes", function()
    for _, stream in ipairs { false, true } do
      local body = { prompt = "abba", max_tokens = 5, temperature = 0, stream = stream }
      local status, text = ask("/v1/completions", body, { connection = "close" })
      assert.equal("200", status, text)
      assert.truthy(text:find(stream and "[DONE]" or '"choices"', 1, true), text)
    end
  end)

  it("counts the characters before each token, not the bytes, and names the bytes of parts of characters", function()
    local prompt = "\195\169\226\130\172a"                -- characters of 2, 3 and 1 bytes
    local got = reply("/v1/completions", { prompt = prompt, max_tokens = 0, logprobs = 20, echo = true }).choices[1]
    local row = got.logprobs
    assert.same({ [[bytes:\xc3]], [[bytes:\xa9]], [[bytes:\xe2]], [[bytes:\x82]], [[bytes:\xac]], "a" }, row.tokens)
    assert.same({ 0, 0, 1, 1, 1, 2 }, row.text_offset)
    for i = 2, 6 do
      local n = 0
      for name in pairs(row.top_logprobs[i]) do
        n = n + 1
        assert.falsy(name:find("\239\191\189", 1, true), name)
      end
      assert.truthy(n >= 20)
    end
  end)

  it("gives the bytes of tokens in conversations", function()
    local fields = { messages = { { role = "user", content = "abba" } }, max_tokens = 20, logprobs = true,
      top_logprobs = 20, seed = 1 }
    local choice, halves = reply("/v1/chat/completions", fields).choices[1], 0
    for _, one in ipairs(choice.logprobs.content) do
      local names = {}
      assert.equal(20, #one.top_logprobs)
      table.insert(one.top_logprobs, one)
      for _, other in ipairs(one.top_logprobs) do
        local bytes = string.char(unpack(other.bytes))
        if require("ps.core.utf8").valid(bytes) then assert.equal(bytes, other.token)
        else
          halves = halves + 1
          assert.equal(1, #bytes)
          assert.equal(([[\x%02x]]):format(bytes:byte()), other.token)
        end
        assert.truthy(other == one or not names[other.token], other.token)
        names[other.token] = true
      end
    end
    assert.truthy(halves > 0)
  end)

  it("refuses requests without the token, and what it does not know", function()
    refused("401", "Authorization: Bearer", "/v1/models", nil, { authorization = "Bearer " .. ("0"):rep(32) })
    refused("401", "Authorization: Bearer", "/v1/completions", { prompt = "a" }, { authorization = "Basic x" })
    refused("404", "/v1/embeddings", "/v1/embeddings", {})
    refused("405", "POST", "/v1/completions")
    refused("404", "no model 'gpt-4'", "/v1/completions", { model = "gpt-4", prompt = "a" })
  end)

  it("names the field that is wrong", function()
    local function bad(param, part, body, path)
      local problem = refused("400", part, path or "/v1/completions", body)
      assert.equal(param or json.null, problem.param)
    end
    bad(nil, "JSON object", "{")
    bad(nil, "JSON object", "")
    bad(nil, "JSON object", "[]")
    bad(nil, "JSON object", "[1]")
    bad(nil, "JSON object", '"{}"')
    bad("prompt", "missing", " \r\n\t{} ")
    bad(nil, "UTF-8", '{"prompt": "a\255"}')
    bad("top_k", "2147483647", { prompt = "a", top_k = 2 ^ 31 })
    bad("stop", "up to 16 strings", { prompt = "a", stop = { a = "b" } })
    bad("prompt", "missing", {})
    bad("prompt", "258 tokens", { prompt = { 1, 258 } })
    bad("prompt", "empty", { prompt = "" })
    bad("max_tokens", "64 positions", { prompt = "ab", max_tokens = 64 })
    bad("temperature", "[0, 100]", { prompt = "a", temperature = -1 })
    bad("n", "whole", { prompt = "a", n = 1.5 })
    bad("frobnicate", "no field", { prompt = "a", frobnicate = 1 })
    bad("presence_penalty", "not supported", { prompt = "a", presence_penalty = 1 })
    bad("stop", "empty", { prompt = "a", stop = "" })
    local function chat(field, value, part)
      bad(field, part or "not supported", { messages = { { role = "user", content = "a" } }, max_tokens = 1,
        [field] = value }, "/v1/chat/completions")
    end
    chat("modalities", { "text", "audio" }, [[(only ["text"])]])
    chat("modalities", { "audio" })
    chat("modalities", {})
    chat("modalities", "text")
    chat("modalities", { text = true })
    chat("audio", { voice = "alloy", format = "wav" })
    chat("web_search_options", { search_context_size = "low" })
    chat("functions", { { name = "f" } })
    chat("function_call", "auto")
    chat("reasoning_effort", "high")
    chat("verbosity", "low")
    reply("/v1/chat/completions", { messages = { { role = "user", content = "a" } }, max_tokens = 1,
      modalities = { "text" }, audio = json.null, function_call = "none", verbosity = "medium", service_tier = "flex",
      store = true, metadata = { a = "b" }, prediction = { type = "content", content = "b" } })
    reply("/v1/chat/completions", { messages = { { role = "user", content = "a" } }, max_tokens = 1,
      modalities = json.null })
    bad("messages[0].name", "string", { messages = { { role = "user", content = "a", name = 1 } } },
      "/v1/chat/completions")
    bad("messages", "list of messages", {}, "/v1/chat/completions")
    local image = { role = "user", content = { { type = "image_url" } } }
    bad("messages[0].content", "parts of type text", { messages = { image } }, "/v1/chat/completions")
    bad("top_logprobs", "needs logprobs", { messages = { { role = "user", content = "a" } }, top_logprobs = 1 },
      "/v1/chat/completions")
    local tools = { messages = { { role = "tool", content = "" } } }
    local problem = refused("400", "no tools", "/v1/chat/completions", tools)
    assert.falsy(problem.message:find("server.lua", 1, true), problem.message)
    assert.equal("context_length_exceeded", refused("400", "positions", "/v1/completions", { prompt = ("a"):rep(70) })
      .code)
  end)

  it("survives requests that are not HTTP, and clients that leave within a body", function()
    -- Returns the first line of the answer to bytes, or nil if there is none.
    local function said(bytes)
      local socket = require("cqueues.socket").connect("127.0.0.1", tonumber(address:match ":(%d+)$"))
      socket:setmode("b", "b")
      socket:settimeout(20)
      socket:onerror(function(_, _, why) return why end)
      socket:write(bytes)
      socket:flush()
      local line = socket:read "*l"
      socket:close()
      return line
    end
    local head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n{}"
    said(head:format "Content-Length: -5")
    said(head:format("Authorization: Bearer " .. token .. "\r\nContent-Length: -5"))
    said(head:format("Authorization: Bearer " .. token .. "\r\nContent-Length: " .. ("9"):rep(22)))
    said(head:format "Content-Length: x")
    said(head:format "Transfer-Encoding: gzip")
    said(head:format "Transfer-Encoding: ,")
    said "\0\1\2\r\n\r\n"
    local half = require("cqueues.socket").connect("127.0.0.1", tonumber(address:match ":(%d+)$"))
    half:setmode("b", "b")
    half:write((head:format("Authorization: Bearer " .. token .. "\r\nContent-Length: 100")))
    half:flush()
    require("cqueues").sleep(0.2)
    half:close()                                           -- within the body
    require("cqueues").sleep(0.2)
    reply "/v1/models"
    reply("/v1/completions", { prompt = "a", max_tokens = 1 })
  end)

  -- Calls fn(port) with a server whose events are large, and whose patience is given in seconds.
  local function with_server(patience, fn)
    local script = folder .. "/patience.lua"
    check.write(script, [[
      local ps = require "ps"
      local folder, token, patience = arg[1], arg[2], tonumber(arg[3])
      require("ps.serve").run(ps.from_pretrained(folder, { quiet = true }), ps.tokenizer.from_pretrained(folder),
        { name = ("long"):rep(2 ^ 15), token = token, patience = patience, told = function(address)
          print(address)
          io.stdout:flush()
        end })
    ]])
    local server = io.popen(("'%s' '%s' '%s' %s %g & echo $!; wait"):format(paths.exe, script, folder, token, patience))
    local other, at, here = server:read(), server:read(), address
    address = at
    local ok, why = pcall(fn, tonumber(at:match ":(%d+)$"))
    address = here
    os.execute("kill " .. other)
    server:close()
    if not ok then error(why, 0) end
  end

  -- Sends a request for a stream over HTTP/2, whose client at first permits no data. Returns its connection and stream.
  local function ask_without_window(port, fields)
    local socket = require("cqueues.socket").connect("127.0.0.1", port)
    local connection = assert(require("http.h2_connection").new(socket, "client", { [4] = 0 }))
    http_server.mend()
    local stream, headers = connection:new_stream(), require("http.headers").new()
    for _, one in ipairs { { ":method", "POST" }, { ":scheme", "http" }, { ":path", "/v1/completions" },
      { ":authority", "x" }, { "authorization", "Bearer " .. token } } do headers:append(one[1], one[2]) end
    assert(stream:write_headers(headers, false, 60))
    assert(stream:write_chunk(json.encode(fields), true, 60))
    return connection, stream
  end

  it("answers others while an HTTP/2 client permits no data, and that client when it does", function()
    local fields = { prompt = "abba", max_tokens = 9, temperature = 0, stream = true }
    local connection, stream = ask_without_window(tonumber(address:match ":(%d+)$"), fields)
    assert.equal("200", assert(stream:get_headers(60)):get ":status")
    local whole = reply("/v1/completions", { prompt = "abba", max_tokens = 9, temperature = 0 })
    assert(stream:write_window_update(2 ^ 20, 60))
    local pieces = {}
    for i, one in ipairs(events(assert(stream:get_body_as_string(60)))) do pieces[i] = one.choices[1].text end
    assert.equal(whole.choices[1].text, table.concat(pieces))
    connection:close()
  end)

  it("ends a stream that its client does not read, without waiting for it", function()
    with_server(3600, function(port)
      local fields = { prompt = "a", n = 128, max_tokens = 60, stream = true }
      local body, socket = json.encode(fields), require("cqueues.socket").connect("127.0.0.1", port)
      socket:setmode("b", "b")
      socket:write(("POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\ncontent-length: %d"
        .. "\r\n\r\n%s"):format(token, #body, body))
      assert(socket:flush())
      require("cqueues").sleep(0.2)
      reply("/v1/completions", { prompt = "a", max_tokens = 1 })
      socket:close()
      local connection, stream = ask_without_window(port, fields)
      assert(stream:get_headers(60))
      reply("/v1/completions", { prompt = "a", max_tokens = 1 })
      local text, why = stream:get_body_as_string(60)
      assert.equal(nil, text)
      assert.matches("CANCEL", tostring(why))
      connection:close()
    end)
  end)

  it("ends a stream whose client reads nothing for longer than the patience", function()
    with_server(0.2, function(port)
      local connection, stream = ask_without_window(port, { prompt = "a", max_tokens = 2, stream = true })
      local text, why = stream:get_body_as_string(60)
      assert.equal(nil, text)
      assert.matches("CANCEL", tostring(why))
      connection:close()
    end)
  end)

  it("says in a line why it does not begin", function()
    local out, code = check.shell(("'%s' '%s/tools/serve.lua' /nowhere.gguf"):format(paths.exe, paths.root))
    assert.truthy(code == 1 and out:find("nowhere", 1, true), out)
    out, code = check.shell(("'%s' '%s/tools/serve.lua' '%s' --host 0.0.0.0 --no-token"):format(paths.exe, paths.root,
      folder))
    assert.truthy(code == 1 and out:find("pass a token", 1, true), out)
    out, code = check.shell(("timeout 60 '%s' '%s/tools/serve.lua' '%s' --kv-cache q8_0"):format(paths.exe, paths.root,
      folder))
    assert.truthy(code == 1 and out:find("serve: generate: kv_cache = \"q8_0\" needs heads", 1, true), out)
  end)

  -- Returns the message with which the program refuses a command line.
  local function refusal(words)
    local out, code = check.shell(("timeout 60 '%s' '%s/tools/serve.lua' '%s' %s"):format(paths.exe, paths.root, folder,
      words))
    assert.truthy(code ~= 0 and code ~= 124, out)
    return out
  end

  it("refuses options that contradict each other", function()
    assert.matches("'%-%-token' can not be used together with option '%-%-no%-token'", refusal "--no-token --token x")
    assert.matches("'%-%-no%-token' can not be used together with option '%-%-token'", refusal "--token x --no-token")
    assert.matches("--other-base needs --adapter", refusal "--other-base", 1, true)
    check.fails(function()
      require("ps.serve").run(model, tok, { name = "tiny", token = "x", no_token = true, told = print })
    end, "token and no_token = true exclude each other")
  end)

  it("names the options of the command line in advice", function()
    assert.matches("pass --no-token for none", refusal "--token ''", 1, true)
    assert.matches("set --keep-quantized, too", refusal "--int8-activations", 1, true)
    local base, adapter = folder .. "/base", folder .. "/adapter"
    gpt2.new("tiny", { vocab_size = 258, n_positions = 64 }):save_pretrained(base)
    ps.lora.wrap(ps.from_pretrained(base, { quiet = true }), { r = 2 }):save_pretrained(adapter)
    local out = refusal(("--adapter '%s'"):format(adapter))
    assert.matches("trained on other weights", out, 1, true)
    assert.matches("or pass --other-base to use it", out, 1, true)
    assert.falsy(out:find("other_base", 1, true), out)
    -- With --other-base, the program loads the adapter and fails only at the next step.
    assert.matches("needs heads", refusal(("--adapter '%s' --other-base --kv-cache q8_0"):format(adapter)), 1, true)
  end)
end)

describe("the text of an answer", function()
  it("has no part of a stop string, however it comes", function()
    for _, pieces in ipairs { { "abc<en", "d>x" }, { "abc", "<", "end", ">" }, { "abc<end>x" } } do
      local got = {}
      local add, rest = answer.cutter({ "<end>", "zz" }, function(text) got[#got + 1] = text end)
      for _, one in ipairs(pieces) do add(one) end
      assert.equal(true, rest())
      assert.equal("abc", table.concat(got))
    end
    local got = {}
    local add, rest = answer.cutter({ "<end>" }, function(text) got[#got + 1] = text end)
    add "x\195\169"
    add "\195\169<en"
    assert.equal(false, rest())
    assert.equal("x\195\169\195\169<en", table.concat(got))
    for _, piece in ipairs(got) do assert.truthy(require("ps.core.utf8").valid(piece), piece) end
  end)
end)
