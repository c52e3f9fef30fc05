-- SPDX-License-Identifier: BSD-3-Clause
-- The site (`make site`): the pages that tools/site.lua writes, the check of their HTML, the examples of the API
-- reference, and, if Sphinx is installed, the HTML itself in a browser.
local browser_lib = require "spec.browser_lib"
local check = require "spec.check_lib"
local entry = require "tools.site.entry"
local html = require "tools.site.html"
local lfs = require "lfs"
local paths = require "ps.paths"
local ranks_lib = require "spec.ranks_lib"

local folder

setup(function() folder = ranks_lib.folder() end)
teardown(function() ranks_lib.remove(folder) end)

local function sh(command)
  local p = assert(io.popen(command .. " 2>&1; echo $?"))
  local text = p:read "*a"
  p:close()
  return text:match "^(.-)(%d+)\n$"
end

describe("the pages of the site", function()
  local pages
  setup(function()
    pages = folder .. "/pages"
    local said, code = sh(("'%s' '%s/tools/site.lua' '%s'"):format(paths.exe, paths.root, pages))
    assert(code == "0", said)
  end)

  it("are README.md, every guide, and a page for each group of the API", function()
    assert.matches("^# psluajit", check.read(pages .. "/index.md"))
    local menu = check.read(pages .. "/index.md")
    for name in lfs.dir(paths.root .. "/docs") do
      local page = name:match "^(.*)%.md$"
      if page then
        assert.equal("file", lfs.attributes(pages .. "/docs/" .. name, "mode"), name)
        assert.matches("\ndocs/" .. page .. "\n", menu, 1, true)
      end
    end
    for group in check.read(pages .. "/docs/api.md"):gmatch "\n(api/[%w_]+)" do
      assert.equal("file", lfs.attributes(pages .. "/docs/" .. group .. ".md", "mode"), group)
    end
  end)

  it("link source files to pages that the site has of them", function()
    local listed, n = {}, 0
    for path in check.read(pages .. "/sources.txt"):gmatch "[^\n]+" do
      listed[path] = true
      assert(lfs.attributes(paths.root .. "/" .. path), path)
    end
    local function page_links(name)
      for target in check.read(pages .. "/" .. name):gmatch 'href="([^"#]*source/[^"#]*)%.html' do
        local path = html.resolved(name, target):match "^source/(.*)$"
        assert(path and listed[path], name .. ": " .. target)
        n = n + 1
      end
    end
    page_links "index.md"
    for _, sub in ipairs { "docs", "docs/api", "examples" } do
      for name in lfs.dir(pages .. "/" .. sub) do if name:find "%.md$" then page_links(sub .. "/" .. name) end end
    end
    assert(n > 700, n)
  end)

  it("have each function with its signature, types, errors and source", function()
    local text = check.read(pages .. "/docs/api/optim.md")
    local adamw = text:match "{lua%-function} optim%.AdamW%(params, options%?%)\n(.-)\n````"
    assert.matches("- `params`: `ps.nn.Module|ps.Tensor[]|table[]`", adamw, 1, true)
    assert.matches("- returns `ps.Optimizer`", adamw, 1, true)
    assert.matches('href="../../source/lua/ps/optim/init.lua.html#L%d+"', adamw)
    local groups = text:match "{lua%-function} optim%.groups%(.-\n````"
    assert.matches("- error: optim.groups takes a module, not", groups, 1, true)
    assert.matches("# ps.optim\n\n```lua\nlocal ps", text, 1, true)
  end)
end)

describe("errors of the API reference", function()
  it("are the messages in a function's text", function()
    assert.same({ "the rate must be above 0, not ...", "a 5% share needs a base", "the whole message on two lines" },
      entry.errors [[
      if lr <= 0 then error(("the rate must be above 0, not %g"):format(lr)) end
      fail(name, "%s: a 5%% share needs a base")
      refuse("the whole message "
        .. "on two lines")
      error("short")
      error(problem) local text = "this text is far away from the call, on the same line, and no message of it"
      error("the rate must be above 0, not %g") ]])
  end)
end)

describe("the check of the HTML", function()
  local function problems(files)
    local root = folder .. "/html"
    os.execute(("rm -rf '%s'"):format(root))
    assert(lfs.mkdir(root))
    for name, text in pairs(files) do check.write(root .. "/" .. name, text) end
    return (select(2, html.check(root)))
  end

  it("accepts links to pages, anchors and other sites", function()
    assert.same({}, problems { ["a.html"] = '<a href="b.html#x">b</a><a href="https://example.org/">e</a>'
      .. '<img src="p.svg"/><!-- <img src="//evil"> --><script>"<img src=\'//evil\'>"</script>',
      ["b.html"] = '<h1 id="x">x</h1><a href="a.html"></a>', ["p.svg"] = "<svg/>" })
  end)

  it("names links that lead nowhere", function()
    assert.same({ "a.html: <a> none.html leads to no file", "a.html: <a> b.html#y leads to no anchor",
      "a.html: <a> #z leads to no anchor", "a.html: <img> none.png leads to no file" }, problems {
      ["a.html"] = '<a href="none.html">n</a><a href="b.html#y">b</a><a href="#z">z</a><img src="none.png">',
      ["b.html"] = "<h1>x</h1>" })
  end)

  it("names whatever a page would load from a network", function()
    assert.same({ "a.html: <script> loads https://cdn.example/x.js from a network",
      "a.html: <link> loads //fonts.example/f.css from a network",
      "a.html: <img> loads http://img.example/i.png from a network",
      "a.html: style loads http://img.example/s.png from a network",
      "a.html: <style> loads https://fonts.example/g.css from a network",
      "b.css: it /javascript/n.css leads to no file",
      "b.css: it loads https://img.example/c.png from a network" }, problems {
      ["a.html"] = '<script src="https://cdn.example/x.js"></script><link rel="stylesheet" '
        .. "href='//fonts.example/f.css'><img src=\"http://img.example/i.png\">"
        .. '<p style="background: url(http://img.example/s.png)"></p>'
        .. "<style>@import 'https://fonts.example/g.css';</style>",
      ["b.css"] = "@import url(/javascript/n.css);\nbody { background: url('https://img.example/c.png') }\n" })
  end)
end)

describe("the groups of docs/api.md", function()
  it("have an example each, except the fields of tables", function()
    for title in check.read(paths.root .. "/docs/api.md"):gmatch "\n## ([^\n]+)" do
      local group = entry.page_name(title)
      local path = ("%s/tools/site/examples/%s.lua"):format(paths.root, group)
      assert.equal(group ~= "fields" and "file" or nil, lfs.attributes(path, "mode"), group)
    end
  end)
end)

describe("the example of", function()
  for name in lfs.dir(paths.root .. "/tools/site/examples") do
    local group = name:match "^([%w_]+)%.lua$"
    if group then
      it(group .. " runs, and belongs to a group of docs/api.md", function()
        local path = paths.root .. "/tools/site/examples/" .. name
        assert(select(2, check.read(path):gsub("%f[%w]assert%(", "")) > 0, "the example shows nothing")
        local said, code = sh(("OMP_NUM_THREADS=1 '%s' '%s'"):format(paths.exe, path))
        assert.equal("0", code, said)
        local titles = {}
        for title in check.read(paths.root .. "/docs/api.md"):gmatch "\n## ([^\n]+)" do
          titles[entry.page_name(title)] = true
        end
        assert(titles[group], "docs/api.md has no such group")
      end)
    end
  end
end)

describe("the site", function()
  local NONE = "needs Sphinx with myst-parser and furo (packages-cluster.apt), and Chromium"
  local site, browser

  setup(function()
    if os.execute "command -v sphinx-build >/dev/null" ~= 0 or not browser_lib.program() then return end
    site = folder .. "/site"
    local said, code = sh(("'%s/tools/site.sh' '%s' '%s'"):format(paths.root, paths.exe:match "^(.*)/", site))
    assert(code == "0", said)
    assert(said:match " (%d+) problems" == "0", said)
    browser = browser_lib.start()
  end)
  teardown(function() if browser then browser:close() end end)

  local function open(page, width, scheme)
    browser:call("Emulation.setDeviceMetricsOverride", { width = width, height = 900, deviceScaleFactor = 1,
      mobile = false })
    browser:call("Emulation.setEmulatedMedia", { features = { { name = "prefers-color-scheme", value = scheme } } })
    browser:open("file://" .. site .. "/" .. page)
  end

  it("loads only its own files, fits two widths, and is light or dark as the browser asks", function()
    if not browser then return pending(NONE) end
    for _, page in ipairs { "index.html", "docs/api/optim.html", "docs/config.html", "docs/gallery.html",
      "source/lua/ps/optim/init.lua.html" } do
      for _, width in ipairs { 1300, 420 } do
        for scheme, dark in pairs { light = false, dark = true } do
          open(page, width, scheme)
          for _, address in ipairs(browser:requests()) do
            assert(address:find("file://" .. site, 1, true) or address:find "^data:", page .. ": " .. address)
          end
          assert.same({}, browser.errors)
          assert.is_true(browser:value "document.scrollingElement.scrollWidth <= innerWidth", page .. " " .. width)
          local red = browser:value "parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
          assert.equal(dark, red < 100, ("%s %s: %d"):format(page, scheme, red))
        end
      end
    end
  end)

  it("finds a function by its name, from a file", function()
    if not browser then return pending(NONE) end
    open("search.html?q=warmup_cosine", 1300, "light")
    local found
    for _ = 1, 100 do
      found = browser:value "(document.querySelector('#search-results li a') || {}).href || ''"
      if found ~= "" then break end
      os.execute "sleep 0.1"
    end
    assert.matches("^file://.*/docs/api/sched%.html.*#", found)
    assert.same({}, browser.errors)
  end)
end)
