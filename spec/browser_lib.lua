-- SPDX-License-Identifier: BSD-3-Clause
-- Drives a headless Chromium by its DevTools protocol, over two pipes (--remote-debugging-pipe): real
-- mouse and keys, the requests that a page makes, and the errors of its scripts.
local json = require "cjson"
local poll = require "posix.poll"
local stdlib = require "posix.stdlib"
local unistd = require "posix.unistd"
local wait = require "posix.sys.wait"
local signal = require "posix.signal"

local lib = {}

local LIMIT_MS = 30000

---@class spec.Browser
---@field private asked {id: string, address: string}[] the page's requests
---@field private refused table<string, boolean> request id -> whether the page's own policy blocked the request, so
--- that it was not sent
---@field errors string[] errors of the page's scripts
local Browser = {}
Browser.__index = Browser

--- Returns the path of the browser, or nil if there is none.
---@return string?
function lib.program()
  for _, name in ipairs { "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome" } do
    local p = io.popen("command -v " .. name)
    local path = p:read()
    p:close()
    if path then return path end
  end
end

lib.NONE = "needs Chromium (Debian's chromium-headless-shell)"

-- Reads the next message from the browser.
local function receive(self)
  while true do
    local message, rest = self.unread:match "^(%Z*)%z(.*)$"
    if message then
      self.unread = rest
      return json.decode(message)
    end
    if poll.rpoll(self.from, LIMIT_MS) ~= 1 then error("the browser said nothing for 30 s", 0) end
    local text = unistd.read(self.from, 65536)
    if not text or text == "" then error("the browser ended", 0) end
    self.unread = self.unread .. text
  end
end

local function note(self, message)
  local params = message.params
  if message.method == "Network.requestWillBeSent" then
    self.asked[#self.asked + 1] = { id = params.requestId, address = params.request.url }
  elseif message.method == "Network.loadingFailed" and params.blockedReason == "csp" then
    self.refused[params.requestId] = true
  elseif message.method == "Runtime.exceptionThrown" then
    local details = params.exceptionDetails
    self.errors[#self.errors + 1] = details.exception and details.exception.description or details.text
  elseif message.method == "Page.loadEventFired" then
    self.loaded = true
  end
end

--- Calls a method of the protocol, and returns its result.
---@param method string
---@param params? table
---@return table
function Browser:call(method, params)
  self.number = self.number + 1
  local text = json.encode { id = self.number, method = method, params = params or { unused = json.null },
    sessionId = self.session }
  unistd.write(self.to, text .. "\0")
  while true do
    local message = receive(self)
    if message.id == self.number then
      if message.error then error(method .. ": " .. message.error.message, 0) end
      return message.result
    end
    note(self, message)
  end
end

--- Evaluates a JavaScript expression in the page, and returns its value.
---@param expression string
---@return any
function Browser:value(expression)
  local result = self:call("Runtime.evaluate", { expression = expression, returnByValue = true,
    awaitPromise = true })
  if result.exceptionDetails then error(expression .. ": " .. json.encode(result.exceptionDetails), 0) end
  return result.result.value
end

--- Moves the mouse to a position in an element, in pixels from its corner, and clicks if `press` is true.
---@param id string
---@param x number
---@param y number
---@param press? boolean
function Browser:mouse(id, x, y, press)
  local at = self:value(("(r => ({ x: r.x, y: r.y }))(document.getElementById(%q).getBoundingClientRect())"):format(id))
  local function send(kind, more)
    local event = { type = kind, x = at.x + x, y = at.y + y, button = "none" }
    for key, value in pairs(more or {}) do event[key] = value end
    self:call("Input.dispatchMouseEvent", event)
  end
  send "mouseMoved"
  if press then
    send("mousePressed", { button = "left", clickCount = 1 })
    send("mouseReleased", { button = "left", clickCount = 1 })
  end
end

--- Turns the mouse wheel over a position in an element.
---@param id string
---@param x number
---@param y number
---@param delta number
function Browser:wheel(id, x, y, delta)
  local at = self:value(("(r => ({ x: r.x, y: r.y }))(document.getElementById(%q).getBoundingClientRect())"):format(id))
  self:call("Input.dispatchMouseEvent", { type = "mouseWheel", x = at.x + x, y = at.y + y, deltaX = 0, deltaY = delta })
end

--- Presses a key several times. The element that has the focus receives it.
---@param key string for example "ArrowRight"
---@param code integer the key's Windows key code, which the protocol requires
---@param times? integer
function Browser:key(key, code, times)
  for _ = 1, times or 1 do
    for _, kind in ipairs { "rawKeyDown", "keyUp" } do
      self:call("Input.dispatchKeyEvent", { type = kind, key = key, code = key, windowsVirtualKeyCode = code })
    end
  end
end

--- Opens an address, and waits until the page has loaded.
---@param address string
function Browser:open(address)
  self.asked, self.refused, self.errors, self.loaded = {}, {}, {}, false
  self:call("Page.navigate", { url = address })
  while not self.loaded do note(self, receive(self)) end
end

--- Returns the addresses that the page requested.
---@return string[]
function Browser:requests()
  local list = {}
  for _, row in ipairs(self.asked) do if not self.refused[row.id] then list[#list + 1] = row.address end end
  return list
end

--- Ends the browser.
function Browser:close()
  pcall(self.call, self, "Browser.close")
  signal.kill(self.pid, signal.SIGKILL)
  wait.wait(self.pid)
  unistd.close(self.to)
  unistd.close(self.from)
  os.execute(("rm -rf '%s'"):format(self.folder))
end

--- Starts a browser with one page.
---@return spec.Browser
function lib.start()
  local program = assert(lib.program(), lib.NONE)
  local folder = assert(stdlib.mkdtemp((os.getenv "TMPDIR" or "/tmp") .. "/browser-XXXXXX"))
  local its_in, to = unistd.pipe()
  local from, its_out = unistd.pipe()
  local pid = unistd.fork()
  if pid == 0 then
    -- Descriptors 3 and 4 can be ends of these pipes, so the pipes' ends are moved first.
    local high_in, high_out = unistd.dup2(its_in, 98), unistd.dup2(its_out, 99)
    unistd.dup2(high_in, 3)
    unistd.dup2(high_out, 4)
    unistd.close(98)
    unistd.close(99)
    unistd.exec("/bin/sh", { [0] = "sh", "-c", ('exec "$0" "$@" 2>/dev/null'), program, "--headless", "--no-sandbox",
      "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--remote-debugging-pipe", "--window-size=1300,900",
      "--user-data-dir=" .. folder, "about:blank" })
    unistd._exit(127)
  end
  unistd.close(its_in)
  unistd.close(its_out)
  local self = setmetatable({ pid = pid, to = to, from = from, unread = "", number = 0, folder = folder, asked = {},
    refused = {}, errors = {} }, Browser)
  local ok, problem = pcall(function()
    local target = self:call("Target.createTarget", { url = "about:blank" })
    self.session = self:call("Target.attachToTarget", { targetId = target.targetId, flatten = true }).sessionId
    for _, domain in ipairs { "Page", "Network", "Runtime" } do self:call(domain .. ".enable") end
  end)
  if not ok then
    self:close()
    error(problem, 0)
  end
  return self
end

return lib
