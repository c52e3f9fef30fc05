-- SPDX-License-Identifier: BSD-3-Clause
-- Serves a live page of a run from the run's JSONL log (docs/monitoring.md). Only this machine can open the page.
--   psluajit tools/dashboard.lua out            a folder, or the .jsonl file itself
-- The tool prints the address of the page. The address contains a token, and requests without the token are refused.
-- The tool never changes the log. Ctrl-C ends the tool.
local argparse = require "argparse"
local lfs = require "lfs"
local paths = require "ps.paths"
local json = require("cjson").new()
local entropy = require "ps.core.entropy"
local http_server = require "ps.core.http_server"
local command_line = require "ps.core.command_line"

local parser = argparse("psluajit dashboard", "Shows a run of ps.train.run as a live page on this machine.")
parser:argument("run", "the run's folder, or its .jsonl file")
command_line.whole(parser:option("--port", "the port of the page; default: a free one", "0"):show_default(false), 0,
  65535)
local args = command_line.parse(parser)

local MOST = 4 * 2 ^ 20                                    -- maximum number of log bytes in a reply

-- Returns the path of a run's log: `run` itself if it is a file, or the only .jsonl file in the folder `run`.
local function log_of(run)
  local mode = lfs.attributes(run, "mode")
  if mode == "file" and run:match "%.jsonl$" then return run end
  if mode == "file" then error(("%s is not a log: name the run's folder, or its .jsonl file"):format(run), 0) end
  if mode ~= "directory" then error(("there is no %s"):format(run), 0) end
  local found = {}
  for name in lfs.dir(run) do if name:match "%.jsonl$" then found[#found + 1] = run .. "/" .. name end end
  table.sort(found)
  if not found[1] then
    error(("%s has no log (.jsonl); ps.train.run writes one from its first step on"):format(run), 0)
  end
  if found[2] then error(("%s has several logs; name one: %s"):format(run, table.concat(found, ", ")), 0) end
  return found[1]
end

-- Returns the complete lines of the log, starting at byte `from`. If a resumed run has replaced the file, its inode
-- differs from `inode`, and the lines start at byte 0.
local function lines_from(path, from, inode)
  local f = io.open(path, "rb")
  if not f then return { inode = 0, next = 0, text = "" } end
  local now = lfs.attributes(path, "ino")
  if now ~= inode or from > f:seek "end" then from = 0 end
  f:seek("set", from)
  local text = (f:read(MOST) or ""):match "^.*\n" or ""
  f:close()
  return { inode = now, next = from + #text, text = text }
end

local function serve(log, page)
  local ok, server = pcall(require, "http.server")
  if not ok then error("the dashboard needs Debian's lua-http", 0) end
  local headers = require "http.headers"
  local token, hosts = entropy.hex(16), {}
  local function reply(stream, status, kind, body)
    local h = headers.new()
    h:append(":status", status)
    h:append("content-type", kind)
    h:append("content-length", tostring(#body))
    h:append("cache-control", "no-store")
    h:append("referrer-policy", "no-referrer")
    h:append("x-content-type-options", "nosniff")
    h:append("content-security-policy", "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
      .. "connect-src 'self'; img-src data:; frame-ancestors 'none'")
    stream:write_headers(h, false)
    stream:write_chunk(body, true)
  end
  local function answer(stream, given)
    local path, query = (given:get ":path"):match "^([^?]*)%??(.*)$"
    local value = {}
    for key, text in query:gmatch "([^&=]+)=([^&]*)" do value[key] = text end
    if given:get ":method" ~= "GET" then return reply(stream, "405", "text/plain", "only GET\n") end
    -- Rejects requests for a host name that is not in `hosts`, because a site could make its own name resolve to this
    -- machine (DNS rebinding).
    if not hosts[given:get ":authority"] or value.token ~= token then
      return reply(stream, "403", "text/plain", "the address printed by tools/dashboard.lua has a token\n")
    end
    if path == "/" then return reply(stream, "200", "text/html; charset=utf-8", page) end
    if path == "/log" then
      return reply(stream, "200", "application/json", json.encode(lines_from(log, tonumber(value.from) or 0,
        tonumber(value.inode) or 0)))
    end
    reply(stream, "404", "text/plain", "there is no such page\n")
  end
  local s, why = server.listen { host = "127.0.0.1", port = args.port, tls = false,
    onstream = http_server.onstream(answer),
    onerror = http_server.onerror "dashboard" }
  if s then ok, why = s:listen() end
  if not s or not ok then error(("cannot listen on port %d: %s"):format(args.port, tostring(why)), 0) end
  local port = select(3, s:localname())
  hosts["127.0.0.1:" .. port], hosts["localhost:" .. port] = true, true
  print(("%s: http://127.0.0.1:%d/?token=%s"):format(log, port, token))
  io.stdout:flush()
  http_server.loop(s, "dashboard")
end

local function main()
  local log = log_of(args.run)
  local f, why = io.open(paths.root .. "/lua/ps/profile/dashboard.html", "rb")
  if not f then error(why, 0) end
  local page = f:read "*a"
  f:close()
  serve(log, page)
end

command_line.try("dashboard.lua", main)
