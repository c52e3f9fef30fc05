-- SPDX-License-Identifier: BSD-3-Clause
-- Checks the HTML of the site. The page and the anchor of every link must exist. No page may load anything from a
-- network.
local lfs = require "lfs"

local html = {}

-- For each element, the attribute whose address a browser loads without a click. `link` is not in the table, because
-- its rel decides whether the browser loads it.
local LOADS = { img = "src", script = "src", iframe = "src", source = "src", video = "src", audio = "src",
  embed = "src", object = "data", input = "src", track = "src" }

--- Resolves the path `target`. `target` is relative to the folder of `page`. Returns a path without "." and "..".
---@param page string for example "docs/zero.md"
---@param target string for example "../src/ps.h"
---@return string
function html.resolved(page, target)
  local parts = {}
  for part in ((page:match "^(.*/)" or "") .. target):gmatch "[^/]+" do
    if part == ".." and parts[1] and parts[#parts] ~= ".." then table.remove(parts)
    elseif part ~= "." then parts[#parts + 1] = part end
  end
  return table.concat(parts, "/") .. (target:find "/$" and "/" or "")
end

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read "*a"
  file:close()
  return text
end

local function files_of(root, folder, list)
  for name in lfs.dir(root .. "/" .. folder) do
    if name ~= "." and name ~= ".." then
      local path = folder == "" and name or folder .. "/" .. name
      if lfs.attributes(root .. "/" .. path, "mode") == "directory" then files_of(root, path, list)
      else list[#list + 1] = path end
    end
  end
  return list
end

local ENTITIES = { amp = "&", lt = "<", gt = ">", quot = '"', ["#39"] = "'", ["#x27"] = "'" }
local function plain(text)
  text = text:gsub("&(#?%w+);", ENTITIES)
  return (text:gsub("%%(%x%x)", function(hex) return string.char(tonumber(hex, 16)) end))
end

-- Returns true if an address refers to another machine. This is the case if it begins with "//", or if it has a scheme
-- other than data.
local function is_remote(address)
  return address:find "^//" ~= nil or address:find "^%a[%w+.-]*:" ~= nil and not address:find "^data:"
end

-- Calls fn with the name and the attributes of each element. Skips comments and the text of scripts.
local function elements(text, fn)
  text = text:gsub("<!%-%-.-%-%->", ""):gsub("(<script[^>]*>).-</script>", "%1"):gsub("(<style[^>]*>).-</style>", "%1")
  for name, rest in text:gmatch "<(%a%w*)(%f[%s>][^>]*)>" do
    local attributes = {}
    for key, value in rest:gmatch '([%w:_-]+)%s*=%s*"([^"]*)"' do attributes[key:lower()] = plain(value) end
    for key, value in rest:gmatch "([%w:_-]+)%s*=%s*'([^']*)'" do attributes[key:lower()] = plain(value) end
    fn(name:lower(), attributes)
  end
end

-- Returns the addresses that a style sheet loads.
local function addresses_of_style(text)
  local list = {}
  text = text:gsub("/%*.-%*/", "")
  for address in text:gmatch "url%(%s*[\"']?([^\"'%)]*)" do list[#list + 1] = address end
  for address in text:gmatch "@import%s*[\"']([^\"']*)" do list[#list + 1] = address end
  return list
end

--- Checks a folder of HTML files.
---@param root string
---@return {pages: integer, links: integer} count
---@return string[] problems for example "docs/zero.html: ..."
function html.check(root)
  local count, problems, anchors, there = { pages = 0, links = 0 }, {}, {}, {}
  local files, pages = files_of(root, "", {}), {}
  table.sort(files)
  for _, path in ipairs(files) do
    there[path] = true
    if path:find "%.html$" then
      local text = read(root .. "/" .. path)
      pages[#pages + 1], anchors[path] = path, {}
      pages[path] = text
      elements(text, function(name, attributes)
        if attributes.id then anchors[path][attributes.id] = true end
        if name == "a" and attributes.name then anchors[path][attributes.name] = true end
      end)
    end
  end
  local function problem(path, text, ...) problems[#problems + 1] = path .. ": " .. text:format(...) end
  -- Checks that the file and the anchor of a local address exist.
  local function check_local(path, address, what)
    count.links = count.links + 1
    local file, anchor = address:match "^([^#?]*)[^#]*#?(.*)$"
    local full = file == "" and path or file:find "^/" and file or html.resolved(path, file)
    if not there[full] then return problem(path, "%s %s leads to no file", what, address) end
    if anchor ~= "" and anchors[full] and not anchors[full][anchor] then
      problem(path, "%s %s leads to no anchor", what, address)
    end
  end
  local function check_loaded(path, address, what)
    if is_remote(address) then problem(path, "%s loads %s from a network", what, address)
    elseif not address:find "^data:" then check_local(path, address, what) end
  end
  for _, path in ipairs(pages) do
    count.pages = count.pages + 1
    local text = pages[path]
    elements(text, function(name, attributes)
      local loaded = attributes[LOADS[name] or ""]
      if loaded then check_loaded(path, loaded, "<" .. name .. ">") end
      for address in (attributes.srcset or ""):gmatch "%s*(%S+)[^,]*,?" do check_loaded(path, address, "srcset") end
      if name == "link" and attributes.href then check_loaded(path, attributes.href, "<link>") end
      if name == "a" and attributes.href and not is_remote(attributes.href) then
        check_local(path, attributes.href, "<a>")
      end
      for _, address in ipairs(addresses_of_style(attributes.style or "")) do check_loaded(path, address, "style") end
    end)
    for style in text:gmatch "<style[^>]*>(.-)</style>" do
      for _, address in ipairs(addresses_of_style(style)) do check_loaded(path, address, "<style>") end
    end
  end
  for _, path in ipairs(files) do
    if path:find "%.css$" then
      for _, address in ipairs(addresses_of_style(read(root .. "/" .. path))) do
        check_loaded(path, address, "it")
      end
    end
  end
  return count, problems
end

return html
