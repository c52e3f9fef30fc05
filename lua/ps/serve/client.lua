-- SPDX-License-Identifier: BSD-3-Clause
-- The client of a request that needs the model. The computation puts the events of the reply's stream into a queue, and
-- a coroutine writes the events to the client. Therefore a client that reads slowly, or does not read, does not delay
-- the computation or later requests.
local cqueues = require "cqueues"
local condition = require "cqueues.condition"
local http_server = require "ps.core.http_server"

local client = {}

-- The maximum size in bytes of the events in the queue. If the queue grows larger, because the client reads too slowly,
-- the client is disconnected.
local MOST_HELD = 8 * 2 ^ 20

---@class ps.serve.Client
---@field gone boolean true if the client has disconnected, or was disconnected because it does not read
---@field begun boolean true if the stream of events has begun
local Client = {}
Client.__index = Client

--- Creates the client of a request.
---@param stream table the stream of lua-http for the request
---@param begin fun(): boolean? writes the headers of a stream of events
---@param patience number time limit in seconds for writing an event
---@return ps.serve.Client
function client.new(stream, begin, patience)
  return setmetatable({ stream = stream, begin = begin, patience = patience, gone = false, begun = false,
    events = {}, first = 1, last = 0, held = 0, complete = false, written = false, changed = condition.new() }, Client)
end

-- Writes the events in the queue to the client, until the last event of the reply is written. Returns false if the
-- client does not read the events.
local function write_events(self)
  if not self.begin() then return false end
  while true do
    while self.first > self.last do self.changed:wait() end
    local text, ends = self.events[self.first], self.complete and self.first == self.last
    if not self.stream:write_chunk(text, ends, self.patience) then return false end
    self.events[self.first], self.first, self.held = nil, self.first + 1, self.held - #text
    if ends then return true end
  end
end

--- Adds an event to the queue. Returns false if the client is gone.
---@param text string
---@return boolean
function Client:put(text)
  if self.gone then return false end
  self.last = self.last + 1
  self.events[self.last], self.held = text, self.held + #text
  if self.held > MOST_HELD then self.gone = true end
  if not self.begun then
    self.begun = true
    cqueues.running():wrap(function()
      local ok, fine = pcall(write_events, self)
      if ok and fine then self.written = true else self.gone = true end
      self.changed:signal()
      if not ok then http_server.end_if_interrupted(fine, "serve") end
    end)
  end
  self.changed:signal()
  return not self.gone
end

--- Adds the last event of the reply to the queue. Waits until all events are written or the client is gone.
---@param text string
function Client:finish(text)
  self.complete = true
  self:put(text)
  while not self.written and not self.gone do self.changed:wait() end
end

--- Lets the coroutines of other connections run, so that they can read requests and write replies. Returns false if
--- this client is gone.
---@return boolean
function Client:alive()
  cqueues.sleep(0)
  self.gone = self.gone or http_server.disconnected(self.stream)
  return not self.gone
end

return client
