-- SPDX-License-Identifier: BSD-3-Clause
-- Pages, in a headless Chromium with a real mouse and real keys: that of a profile, and the live one of a run. Without
-- Chromium they are skipped.
local browser_lib = require "spec.browser_lib"
local page = require "ps.profile.page"
local profile_lib = require "spec.profile_lib"
local ranks_lib = require "spec.ranks_lib"
local read = require "ps.profile.read"
local check = require "spec.check_lib"
local paths = require "ps.paths"
local request = require "http.request"

local folder, browser

setup(function()
  folder = ranks_lib.folder()
  if browser_lib.program() then browser = browser_lib.start() end
end)
teardown(function()
  if browser then browser:close() end
  ranks_lib.remove(folder)
end)

describe("the page of a profile", function()
  local LEFT, RIGHT = 80, 10                               -- margins of the drawing within its canvas, in pixels

  local function opened(profile)
    profile_lib.write(folder .. "/profile.json", profile)
    local made = read.file(folder .. "/profile.json")
    page.write(made, folder .. "/profile.html")
    browser:open("file://" .. folder .. "/profile.html")
    return made
  end
  local function text(id) return browser:value(("document.getElementById(%q).textContent"):format(id)) end
  -- Returns the distance of a time from the canvas's left edge, in pixels.
  local function pixels(made, ts)
    local width = browser:value "document.getElementById('memory').width"
    return LEFT + (ts - made.begin) / (made.finish - made.begin) * (width - LEFT - RIGHT)
  end

  it("shows the planted peak if the mouse is over it, and not next to it", function()
    if not browser then return pending(browser_lib.NONE) end
    local made = opened()
    browser:mouse("memory", pixels(made, profile_lib.PEAK.ts) + 5, 100)
    assert.matches("^1%.4%d%d ms  step 2, backward  device: total 96%.000 MiB, chunks 32%.000 MiB, other 64%.000 MiB$",
      text "readout")
    browser:mouse("memory", pixels(made, profile_lib.PEAK.ts) - 5, 100)
    assert.matches("device: total 24%.000 MiB, chunks 16%.000 MiB, other 8%.000 MiB$", text "readout")
    assert.matches("device: peak 128%.000 MiB at 0%.250 ms, budget 100%.000 MiB", text "tiers")
    browser:mouse("peak", 5, 5, true)
    assert.matches("^0%.250 ms  step 1, forward  device: total 128%.000 MiB", text "readout")
    assert.same({}, browser.errors)
  end)

  it("moves from moment to moment with the slider, and shows the places of the chunks", function()
    if not browser then return pending(browser_lib.NONE) end
    opened()
    browser:value "document.getElementById('scrub').focus()"
    browser:key("Home", 36)
    assert.matches("^moment 0 of %d+, 0%.000 ms  1 chunks on disk, 3 chunks on host$", text "chunkinfo")
    browser:key("ArrowRight", 39)
    assert.matches("^moment 1 of %d+, 0%.100 ms  1 chunks on device, 1 chunks on disk, 2 chunks on host$",
      text "chunkinfo")
    browser:key("ArrowRight", 39, 3)                         -- moves to 0.250, 0.260, 0.500
    assert.matches("^moment 4 of %d+, 0%.500 ms  2 chunks on device, 1 chunks on disk, 1 chunks on host$",
      text "chunkinfo")
    assert.matches("^0%.500 ms  step 1, backward  device: total 48%.000 MiB", text "readout")
    -- A box in the map. The first box is chunk 0's, in the device's colour.
    assert.same({ 233, 97, 108 }, browser:value
      "[...document.getElementById('chunks').getContext('2d').getImageData(114, 8, 1, 1).data].slice(0, 3)")
    browser:mouse("chunks", 115, 9)
    assert.matches("^chunk 0, param 0, 16%.000 MiB, on device at 0%.500 ms\nh%.0%.weight </script><b>$",
      text "chunkinfo")
  end)

  it("zooms at the mouse, and back", function()
    if not browser then return pending(browser_lib.NONE) end
    local made = opened()
    local px = pixels(made, profile_lib.PEAK.ts) + 5
    browser:wheel("memory", px, 100, -600)
    -- 40 pixels are now 9 us instead of 80, so this is still the peak
    browser:mouse("memory", px + 40, 100)
    assert.matches("total 96%.000 MiB", text "readout")
    browser:mouse("reset", 5, 5, true)
    browser:mouse("memory", px + 60, 100)
    assert.matches("total 48%.000 MiB", text "readout")
  end)

  it("requests only itself", function()
    if not browser then return pending(browser_lib.NONE) end
    opened()
    assert.same({ "file://" .. folder .. "/profile.html" }, browser:requests())
    browser:value "fetch('http://127.0.0.1:9/').catch(() => 0), new Image().src = 'http://127.0.0.1:9/a.png', 1"
    browser:value "new Promise(done => setTimeout(done, 100))"
    -- its policy blocks other requests
    assert.same({ "file://" .. folder .. "/profile.html" }, browser:requests())
    check.write(folder .. "/other.html", "<!DOCTYPE html><img src='http://127.0.0.1:9/a.png'>")
    browser:open("file://" .. folder .. "/other.html")
    -- requests of another page are recorded
    assert.equal("http://127.0.0.1:9/a.png", browser:requests()[2])
  end)

  it("of a profile without chunks has its memory", function()
    if not browser then return pending(browser_lib.NONE) end
    local made = profile_lib.made()
    made.psluajit.chunks, made.psluajit.tiers, made.psluajit.steps = {}, {}, {}
    for i = #made.traceEvents, 1, -1 do
      if made.traceEvents[i].cat == "chunk" then table.remove(made.traceEvents, i) end
    end
    opened(made)
    assert.matches("device: total 0%.000 MiB", text "readout")
    assert.same({}, browser.errors)
  end)
end)

describe("the dashboard of a run", function()
  local log, pid, address

  -- Returns a line in the form that ps.train.run writes.
  local function line(step, loss)
    return ('{"step":%d,"time":1,"loss":%g,"lr":0.001,"tokens":64,"tokens_per_s":1234,"skipped":false,"tiers":{"host":'
      .. '{"budget":0,"chunks":2097152,"other":1048576,"peak":4194304,"bytes_up":0,"bytes_down":0}},'
      .. '"map":{"param":"2d1h","exp_avg":"1k"}}\n'):format(step, loss)
  end
  local function add(text)
    local f = assert(io.open(log, "ab"))
    f:write(text)
    f:close()
  end
  local function now() return browser:value "document.getElementById('now').textContent" end
  -- Waits until the page's text matches a pattern.
  local function says(pattern)
    for _ = 1, 100 do
      if now():match(pattern) then return end
      browser:value "new Promise(done => setTimeout(done, 100))"
    end
    error(("'%s' does not come; the page says: %s"):format(pattern, now()))
  end
  -- Returns the status code of the answer to a request. `host` is the host name in the request.
  local function status(path, host, method)
    local r = request.new_from_uri(address:match "^(http://[^/]*)/" .. path)
    if host then r.headers:upsert(":authority", host) end
    if method then r.headers:upsert(":method", method) end
    return assert(r:go(10)):get ":status"
  end

  setup(function()
    log = folder .. "/log.jsonl"
    check.write(log, line(1, 5.5) .. line(2, 4.25))
    local p = io.popen(("'%s' '%s/tools/dashboard.lua' '%s' >'%s/said' 2>&1 & echo $!"):format(paths.exe, paths.root,
      folder, folder))
    pid = p:read()
    p:close()
    for _ = 1, 100 do
      address = (check.read(folder .. "/said") or ""):match "(http://%S+)\n"
      if address then break end
      os.execute "sleep 0.1"
    end
  end)
  teardown(function() os.execute("kill " .. pid) end)

  it("shows the log's last step, and each new one as it arrives; a resumed run starts again", function()
    if not browser then return pending(browser_lib.NONE) end
    browser:open(address)
    says "^step 2  loss 4%.25  1234 tokens/s  lr 0%.001  host 3%.0 MiB$"
    assert.same({ 3, 1 }, browser:value
      "[...document.querySelectorAll('#chunks div')].map(d => d.querySelectorAll('span').length).reverse()")
    browser:mouse("loss", 85, 50)
    assert.matches("^step 1  loss 5%.5 ", browser:value "document.getElementById('loss_told').textContent")
    add(line(3, 3.5):sub(1, 40))
    add(line(3, 3.5):sub(41))
    says "^step 3  loss 3%.5 "
    check.write(folder .. "/new", line(1, 5.5) .. line(2, 4))
    assert(os.rename(folder .. "/new", log))
    says "^step 2  loss 4  "
    for _, asked in ipairs(browser:requests()) do
      assert.equal(address:match "^http://[^/]*/", asked:match "^http://[^/]*/" or asked)
    end
    assert.same({}, browser.errors)
  end)

  it("refuses requests without the token, and other names of this machine", function()
    local token = address:match "%?token=(%x+)$"
    assert.equal(32, #token)
    assert.equal("200", status("/?token=" .. token))
    assert.equal("403", status "/")
    assert.equal("403", status("/?token=" .. ("0"):rep(32)))
    assert.equal("403", status "/log?from=0")
    assert.equal("403", status("/?token=" .. token, "evil.example"))
    assert.equal("404", status("/etc/passwd?token=" .. token))
    assert.equal("405", status("/?token=" .. token, nil, "POST"))
  end)

  it("survives requests that are not HTTP", function()
    local token = address:match "%?token=(%x+)$"
    for _, field in ipairs { "Content-Length: -5", "Content-Length: x", "Transfer-Encoding: ," } do
      local socket = require("cqueues.socket").connect("127.0.0.1", tonumber(address:match ":(%d+)/"))
      socket:setmode("b", "b")
      socket:settimeout(20)
      socket:onerror(function(_, _, why) return why end)
      socket:write(("GET / HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n"):format(field))
      socket:flush()
      socket:read "*l"
      socket:close()
      assert.equal("200", status("/?token=" .. token))
    end
  end)

  it("reports a path that is not a run", function()
    local function said(words)
      local p = io.popen(("'%s' '%s/tools/dashboard.lua' %s 2>&1"):format(paths.exe, paths.root, words))
      local text = p:read "*a"
      p:close()
      return text
    end
    assert.equal("dashboard.lua: there is no /nowhere\n", said "/nowhere")
    assert.matches("^dashboard.lua: .* has no log %(%.jsonl%); ps.train.run writes one", said(paths.root .. "/docs"))
    assert.matches("^dashboard.lua: .*README.md is not a log: name the run's folder", said(paths.root .. "/README.md"))
    local port = address:match ":(%d+)/"
    assert.matches("^dashboard.lua: cannot listen on port " .. port, said(("'%s' --port %s"):format(folder, port)))
  end)
end)
