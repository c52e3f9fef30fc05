-- SPDX-License-Identifier: BSD-3-Clause
-- Writes the pages of the site into a folder, for Sphinx (`make site`). With --check, checks the HTML that Sphinx has
-- created from these pages:
--   psluajit tools/site.lua FOLDER
--   psluajit tools/site.lua --check FOLDER
-- The pages are README.md, the guides of docs/, and the API reference. If a page links to a source file, the site also
-- has a page for the source file.
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local lfs = require "lfs"
local paths = require "ps.paths"
local html = require "tools.site.html"
local write_file = require "ps.core.write_file"

local parser = argparse("psluajit site", "Writes the pages of the site for Sphinx, or checks those that Sphinx made.")
parser:argument("folder", "where to write them, or the HTML to check")
parser:flag("--check", "check that every link leads somewhere, and that no page loads anything from a network")
local args = command_line.parse(parser)

-- The pages in the order of the site's menu. Pages of docs/ that are not in this list follow in a separate group.
local MENU = {
  { "Start", { "docs/first_hour", "docs/from_scratch", "docs/encoder", "docs/errors", "docs/gallery", "docs/benchmarks",
    "docs/reliability" } },
  { "Train", { "docs/data", "docs/conversations", "docs/serve", "docs/pretrained", "docs/gguf", "docs/adapters",
    "docs/evaluation", "docs/monitoring", "docs/checkpoints", "docs/optimizers" } },
  { "Memory", { "docs/how_memory_works", "docs/memory", "docs/planning", "docs/tensors" } },
  { "Several processes", { "docs/distributed", "docs/zero", "docs/pipeline", "docs/tensor_parallel" } },
  { "Your own", { "docs/models", "docs/autograd", "docs/extending" } },
  { "Coming from", { "docs/migrating", "docs/pytorch", "docs/bmtrain" } },
  { "Look inside", { "docs/inspecting", "docs/profiling" } },
  { "Reference", { "docs/api", "docs/config", "docs/environment", "docs/glossary", "docs/cuda", "docs/dependencies" } },
  { "Examples and source", { "examples/README", "examples/benchmark/README",
    "ARCHITECTURE", "CONTRIBUTING", "spec/README", "CHANGELOG" } },
}

local make_folder = require("ps.checkpoints.folder").make

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read "*a"
  file:close()
  return text
end

local function write(path, text)
  make_folder(path:match "^(.*)/")
  assert(write_file(path, text))
end

if args.check then
  local count, problems = html.check(args.folder)
  for _, problem in ipairs(problems) do print(problem) end
  print(("%d pages, %d links, %d problems"):format(count.pages, count.links, #problems))
  os.exit(#problems == 0 and 0 or 1)
end

local is_page, sources, more = { README = true }, {}, {}
for _, group in ipairs(MENU) do for _, page in ipairs(group[2]) do is_page[page] = true end end
for name in lfs.dir(paths.root .. "/docs") do
  local page = name:match "^(.*)%.md$"
  if page and not is_page["docs/" .. page] then more[#more + 1] = "docs/" .. page end
end
table.sort(more)
for _, page in ipairs(more) do is_page[page] = true end
if more[1] then MENU[#MENU + 1] = { "More", more } end

-- Creates the source page of a file, or the source pages of a folder and its files.
local function add_source(path)
  sources[path] = true
  local full = paths.root .. "/" .. path
  if lfs.attributes(full, "mode") ~= "directory" then return end
  for name in lfs.dir(full) do
    if not name:find "^[._]" and lfs.attributes(full .. "/" .. name, "mode") == "file" then
      sources[path .. "/" .. name] = true
    end
  end
end

-- Converts a link in a page of the repository to a link on the site.
local function link_of(page, text, target)
  if target:find "^%a+:" or target:find "^#" then return nil end
  local file, anchor = target:match "^([^#]*)(.*)$"
  local path = html.resolved(page, file):gsub("/$", "")
  local up = ("../"):rep(select(2, page:gsub("/", "")))
  local name = path:match "^(.*)%.md$"
  if name == "docs/api" and anchor ~= "" then             -- a section, which is a separate page on the site
    return ("[%s](%sdocs/api/%s.md)"):format(text, up, (anchor:sub(2):gsub("^ps(%w)", "%1"):gsub("-", "_")))
  end
  if name and is_page[name] then
    return ("[%s](%s%s%s)"):format(text, up, name == "README" and "index.md" or path, anchor)
  end
  if path:find "%.svg$" then return ("[%s](%sdocs/gallery.md)"):format(text, up) end
  if not lfs.attributes(paths.root .. "/" .. path) then return nil end
  add_source(path)
  return ('<a href="%ssource/%s.html">%s</a>'):format(up, path, text)
end

-- Converts the links in the text of a page to links on the site. Listings do not change.
local function with_links(page, text)
  local out, from, fence = {}, 1, false
  local function put(part)
    out[#out + 1] = fence and part
      or part:gsub("(!?)%[([^%[%]]+)%]%(([^%)%s]+)%)", function(image, words, target)
        return image == "" and link_of(page, words, target) or nil
      end)
  end
  for at in text:gmatch "()```[^\n]*\n" do
    if at == 1 or text:sub(at - 1, at - 1) == "\n" then
      put(text:sub(from, at - 1))
      fence, from = not fence, at
    end
  end
  put(text:sub(from))
  -- Links to anchors that a page defines by hand become HTML, because Sphinx knows only the anchors of headings.
  return (table.concat(out):gsub("%[([^%[%]]+)%]%(#([^%)%s]+)%)", function(words, anchor)
    if text:find(('<a name="%s">'):format(anchor), 1, true) then
      return ('<a href="#%s">%s</a>'):format(anchor, words)
    end
  end))
end

local function write_page(name)
  local page = name .. ".md"
  write(("%s/%s"):format(args.folder, name == "README" and "index.md" or page),
    with_links(page, read(paths.root .. "/" .. page)) .. (name == "README" and "\n%MENU%" or ""))
end

local function menu()
  local out = {}
  for _, group in ipairs(MENU) do
    out[#out + 1] = ("```{toctree}\n:hidden:\n:caption: %s\n\n%s\n```\n"):format(group[1], table.concat(group[2], "\n"))
  end
  return table.concat(out, "\n")
end

for page in pairs(is_page) do if page ~= "docs/api" then write_page(page) end end
write(args.folder .. "/index.md", (read(args.folder .. "/index.md"):gsub("%%MENU%%", (menu():gsub("%%", "%%%%")))))

for _, folder in ipairs { "/docs/pictures/", "/examples/benchmark/" } do
  for name in lfs.dir(paths.root .. folder) do
    if name:find "%.svg$" then write(args.folder .. folder .. name, read(paths.root .. folder .. name)) end
  end
end
write(args.folder .. "/_static/site.css", read(paths.root .. "/tools/site/site.css"))

if os.execute(("'%s' '%s/tools/api_doc.lua' --site '%s/docs'"):format(paths.exe, paths.root, args.folder)) ~= 0 then
  error("tools/api_doc.lua did not write the API reference", 0)
end
for path in read(args.folder .. "/docs/api/sources.txt"):gmatch "[^\n]+" do sources[path] = true end
local list = {}
for path in pairs(sources) do list[#list + 1] = path end
table.sort(list)
write(args.folder .. "/sources.txt", table.concat(list, "\n") .. "\n")
print(("wrote the pages of the site, with %d source files, into %s"):format(#list, args.folder))
