-- SPDX-License-Identifier: BSD-3-Clause
-- An HTTP server that provides OpenAI's API for a model (tools/serve.lua). Each connection is a coroutine of cqueues,
-- which lua-http runs. Requests that need the model are computed one after the other, in the order in which they
-- arrive. After each token and each choice, the coroutines of other connections run: they read requests and write
-- replies, but do not use the model.
local json = require("cjson").new()
local answer = require "ps.serve.answer"
local caller = require "ps.core.caller"
local entropy = require "ps.core.entropy"
local http_server = require "ps.core.http_server"
local request = require "ps.serve.request"
local utf8 = require "ps.core.utf8"
local error = caller.error

local serve = {}

local MOST = 8 * 2 ^ 20                                    -- maximum size of a request's body in bytes
local PATIENCE = 30                                        -- default of the option `patience`, in seconds
-- The size in bytes of a piece of a reply. A client must read each piece within the time limit `patience`.
local PIECE = 2 ^ 16

-- Returns whether two texts are equal. The run time does not depend on the position of the first difference, so that it
-- reveals nothing about the token.
local function same(a, b)
  local off = bit.bxor(#a, #b)
  for i = 1, #a do off = bit.bor(off, bit.bxor(a:byte(i), b:byte((i - 1) % math.max(#b, 1) + 1) or 0)) end
  return off == 0
end

local function local_address(host) return host == "127.0.0.1" or host == "::1" or host == "localhost" end

-- Replaces each %XX in a path by the byte that it represents.
local function decoded(path) return (path:gsub("%%(%x%x)", function(hex) return string.char(tonumber(hex, 16)) end)) end

local STATUS = { ["401"] = "authentication_error", ["404"] = "not_found_error", ["500"] = "server_error" }

local OPTIONS = { name = "string", host = "string", port = "whole", token = "string", no_token = "boolean",
  kv_cache = "string", told = "callable", patience = "number" }

--- Serves a model until the process ends.
---@param model ps.pretrained.Model
---@param tok ps.Tokenizer
---@param options {name: string, host?: string, port?: integer, token?: string, no_token?: boolean, kv_cache?:
--- "bf16"|"q8_0", told: fun(address: string, token: string?), patience?: number} name: name of the model in the API.
--- host: the address to listen on (default 127.0.0.1). port: default: a free port. token: default: a random token.
--- no_token = true: requests need no token; excludes token. kv_cache: as in generate. told: called with the
--- address and the token when the server is ready. patience: a time limit in seconds (default 30). It applies
--- separately to reading the body of a request, to writing one event of a stream, and to writing 64 KiB of a reply
--- that is not a stream.
function serve.run(model, tok, options)
  options = caller.options(options, "serve.run", OPTIONS)
  local ok, server = pcall(require, "http.server")
  if not ok then error("the server needs Debian's lua-http", 0) end
  local headers, condition, client = require "http.headers", require "cqueues.condition", require "ps.serve.client"
  local host = options.host or "127.0.0.1"
  if options.no_token and options.token then
    error("serve: token and no_token = true exclude each other; pass only one of them", 0)
  end
  local token = not options.no_token and (options.token or entropy.hex(16)) or nil
  if not token and not local_address(host) then
    error(("serve: without a token the server listens only on this machine, not on %s; pass a token, or listen on "
      .. "127.0.0.1"):format(host), 0)
  end
  if token == "" then error("serve: the token is empty; pass no_token = true for none", 0) end
  if options.kv_cache then                                 -- raises an error if the model does not support such caches
    model:generate({ { 0 } }, 1, { temperature = 0, kv_cache = options.kv_cache })
  end
  local patience = options.patience or PATIENCE
  local hosts, turn, waiting, busy = {}, condition.new(), {}, false

  local bodiless = setmetatable({}, { __mode = "k" })      -- streams of HEAD requests, whose replies have no body

  local function write_head(stream, status, kind, more)
    local h = headers.new()
    h:append(":status", status)
    h:append("content-type", kind)
    h:append("cache-control", "no-store")
    h:append("x-content-type-options", "nosniff")
    for key, value in pairs(more or {}) do h:append(key, value) end
    local first = stream.connection.pipeline               -- in HTTP/1, replies are sent in the order of the requests
    if first and first:peek() ~= stream and stream.state ~= "closed" then stream.pipeline_cond:wait() end
    return stream:write_headers(h, bodiless[stream] or false, patience)
  end
  local function reply(stream, status, value, more)
    local body = answer.text(value)
    more = more or {}
    more["content-length"] = tostring(#body)
    local fine = write_head(stream, status, "application/json", more)
    for at = 1, bodiless[stream] and 0 or #body, PIECE do
      fine = fine and stream:write_chunk(body:sub(at, at + PIECE - 1), at + PIECE > #body, patience)
    end
    if not fine then http_server.drop(stream) end
  end
  local function problem(stream, status, message, param, code)
    reply(stream, status, { error = { message = message, type = STATUS[status] or "invalid_request_error",
      param = param or json.null, code = code or json.null } },
      status == "401" and { ["www-authenticate"] = "Bearer" } or nil)
  end

  -- Waits until all earlier requests that need the model are computed, and then calls fn().
  local function in_turn(fn)
    local me = {}
    waiting[#waiting + 1] = me
    while busy or waiting[1] ~= me do turn:wait() end
    table.remove(waiting, 1)
    busy = true
    local fine, why = pcall(fn)
    busy = false
    turn:signal()
    return fine, why
  end

  local function compute(stream, given, chat)
    if (given:get "expect" or ""):lower() == "100-continue" and stream.peer_version ~= 1 then
      stream:write_continue(patience)                      -- the client sends the body only after it receives this
    end
    local body, why = stream:get_body_chars(MOST + 1, patience)
    if not body and not why then body = "" end
    if not body then return problem(stream, "400", "the body cannot be read: " .. tostring(why)) end
    if #body > MOST then return problem(stream, "413", ("a body has at most %d bytes"):format(MOST)) end
    local result
    local reader = client.new(stream, function() return write_head(stream, "200", "text/event-stream") end, patience)
    local function alive() return reader:alive() end
    local function send(event) return reader:put("data: " .. answer.text(event) .. "\n\n") end
    local fine, failed = in_turn(function()
      if not alive() then return end
      local fields = request.read(body, chat)
      fields.kv_cache = options.kv_cache
      if fields.model and fields.model ~= options.name then
        request.refuse("404", ("there is no model '%s'; this server has '%s'"):format(fields.model, options.name),
          "model", "model_not_found")
      end
      result = answer[chat and "chat" or "completion"](model, tok, options.name, fields, fields.stream and send or nil,
        alive)
    end)
    if not fine then http_server.end_if_interrupted(failed, "serve") end
    if reader.gone then return http_server.drop(stream) end
    if fine and result then return reply(stream, "200", result) end
    local known = type(failed) == "table" and failed.serve
    if not fine and not known then io.stderr:write("serve: " .. request.reason(failed) .. "\n") end
    local message = known and failed.message or "the server failed: " .. request.reason(failed)
    if fine or reader.begun then
      reader:finish(fine and "data: [DONE]\n\n"
        or "data: " .. answer.text { error = { message = message, type = "server_error" } } .. "\n\n")
      if reader.gone then http_server.drop(stream) end
      return
    end
    problem(stream, known and failed.status or "500", message, known and failed.param, known and failed.code)
  end

  local BEGAN = os.time()
  local model_row = { id = options.name, object = "model", created = BEGAN, owned_by = "psluajit" }
  local ROUTES = {
    ["/v1/models"] = { GET = function(stream) reply(stream, "200", { object = "list", data = { model_row } }) end },
    ["/v1/models/" .. options.name] = { GET = function(stream) reply(stream, "200", model_row) end },
    ["/v1/completions"] = { POST = function(stream, given) compute(stream, given, false) end },
    ["/v1/chat/completions"] = { POST = function(stream, given) compute(stream, given, true) end },
  }

  local function on_stream(stream, given)
    local path, method = decoded((given:get ":path" or ""):match "^([^?]*)"), given:get ":method"
    if method == "HEAD" then bodiless[stream], method = true, "GET" end
    if token then
      local has = (given:get "authorization" or ""):match "^[Bb]earer (.*)$"
      if not has or not same(has, token) then
        return problem(stream, "401", "the request needs the header Authorization: Bearer TOKEN, with the token that "
          .. "tools/serve.lua printed", nil, "invalid_api_key")
      end
    elseif not hosts[given:get ":authority"] then
      -- The host name in the request may belong to another site, which made the name resolve to this machine.
      return problem(stream, "401", "without a token the server answers only to its own address")
    end
    local route = ROUTES[path]
    if not route then return problem(stream, "404", "there is no " .. (utf8.valid(path) and path or "such path")) end
    if not route[method] then return problem(stream, "405", ("%s takes %s"):format(path, (next(route)))) end
    route[method](stream, given)
  end

  local s, why = server.listen { host = host, port = options.port or 0, tls = false,
    onstream = http_server.onstream(on_stream),
    onerror = http_server.onerror "serve" }
  if s then ok, why = s:listen() end
  if not s or not ok then
    error(("serve: cannot listen on %s, port %d: %s"):format(host, options.port or 0, tostring(why)), 0)
  end
  local port = select(3, s:localname())
  for _, name in ipairs { "127.0.0.1", "localhost", "[::1]" } do hosts[name .. ":" .. port] = true end
  options.told(("http://%s:%d"):format(host:find(":", 1, true) and "[" .. host .. "]" or host, port), token)
  ok, why = pcall(http_server.loop, s, "serve")
  http_server.end_if_interrupted(why, "serve")
  if not ok then error(why, 0) end
end

return serve
