-- SPDX-License-Identifier: BSD-3-Clause
-- ARCHITECTURE.md and the guides name files and folders of this tree, and these exist.
local paths = require "ps.paths"
local check = require "spec.check_lib"
local lfs = require "lfs"

local PAGES = { "ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "spec/README.md", "docs/bmtrain.md",
  "docs/checkpoints.md", "docs/config.md", "docs/cuda.md", "docs/dependencies.md", "docs/distributed.md",
  "docs/gguf.md", "docs/inspecting.md", "docs/memory.md", "docs/models.md", "docs/monitoring.md", "docs/pipeline.md",
  "docs/planning.md", "docs/pretrained.md", "docs/profiling.md", "docs/tensor_parallel.md", "docs/tensors.md",
  "docs/zero.md" }
local FOLDERS = { src = true, lua = true, spec = true, tools = true, bench = true, docs = true, examples = true,
  models = true, cmake = true }

-- Returns whether a path exists in the tree. "store*.c" matches any file with this pattern.
local function exists(path)
  local folder, name = path:match("^(.-)/?([^/]*)$")
  if not name:find("*", 1, true) then return lfs.attributes(paths.root .. "/" .. path, "mode") ~= nil end
  if lfs.attributes(paths.root .. "/" .. folder, "mode") ~= "directory" then return false end
  local pattern = "^" .. name:gsub("[%.%-]", "%%%0"):gsub("%*", ".*") .. "$"
  for entry in lfs.dir(paths.root .. "/" .. folder) do if entry:match(pattern) then return true end end
  return false
end

-- Returns whether a path exists that can omit its chapter's folder, as in "chunk/plan.c".
local function exists_below(path)
  for _, above in ipairs { "", "src/", "src/backend/", "lua/ps/", "lua/ps/engine/", "spec/" } do
    if exists(above .. path) then return true end
  end
  return false
end

describe("the guides", function()
  it("name files and folders that exist", function()
    local missing, n = {}, 0
    for _, page in ipairs(PAGES) do
      for word in check.read(paths.root .. "/" .. page):gmatch("`([%w_%-%./*]+)`") do
        local path = word:gsub("/$", "")
        local is_file = path:match("^%l[%w_/%-]*/[%w_%-*]+%.(%a+)$")
        if FOLDERS[path:match("^(%w+)/") or ""] or is_file and ("c h cu cpp cc lua"):find(is_file, 1, true) then
          n = n + 1
          if not exists_below(path) then missing[#missing + 1] = page .. ": " .. word end
        end
      end
    end
    assert.same({}, missing)
    assert.truthy(n > 100, n)
  end)
end)

describe("ARCHITECTURE.md's paths", function()
  local function tool(tree)
    local p = assert(io.popen(("timeout 300 '%s' '%s/tools/path_doc.lua' --check '%s' 2>&1; echo $?"):format(paths.exe,
      paths.root, tree)))
    local text = p:read("*a")
    p:close()
    return text
  end

  it("agree with the sources", function() assert.equal("0\n", tool(paths.root)) end)

  -- For each drawing: a folder, one of its files, a name that is renamed in the file, and the tool's report.
  for _, case in ipairs {
    { "src/chunk", "transfer.c", "begin_evict", "src/chunk/transfer.c has no function begin_evict\n" },
    { "src/pipe", "exec.c", "pipe_take_loss", "begin_event of src/pipe/exec.c no longer reaches the next row by " ..
      "pipe_take_loss\n" },
    { "src/io", "safetensors.c", "ps_st_read", "src/io/safetensors.c has no function ps_st_read\n" },
  } do
    it("name each function that is gone, or no longer reaches the next row: " .. case[3], function()
      local tree = os.tmpname()
      os.remove(tree)
      assert(os.execute(([[mkdir -p 'TREE/src' && cd '%s' && cp ARCHITECTURE.md 'TREE' && ln -s "$PWD/lua" 'TREE/lua' &&
        for folder in src/*/; do ln -s "$PWD/$folder" "TREE/${folder%%/}"; done && rm 'TREE/FOLDER' &&
        cp -r FOLDER 'TREE/FOLDER' && sed -i 's/%s/renamed/g' 'TREE/FOLDER/%s']]):format(paths.root, case[3], case[2])
        :gsub("TREE", tree):gsub("FOLDER", case[1])) == 0)
      local said = tool(tree)
      os.execute(("rm -r '%s'"):format(tree))
      assert.truthy(said:find(case[4], 1, true), said)
      assert.truthy(said:find("\n1\n$"), said)
    end)
  end
end)

describe("ARCHITECTURE.md's map of the tree", function()
  -- Reads lines "folder words", with additional words on the following lines, up to the end of the block.
  local map, folder = {}, nil
  local block = check.read(paths.root .. "/ARCHITECTURE.md"):match("```\n(src/ps%.h.-)```")
  for line in block:gmatch("[^\n]+") do
    local first, rest = line:match("^(%S+)%s+(.*)$")
    if first and FOLDERS[first:match("^(%w+)/") or ""] then folder = first else rest = line end
    map[folder] = (map[folder] or "") .. " " .. rest
  end

  it("has every folder of the library", function()
    local missing = {}
    for name in lfs.dir(paths.root .. "/lua/ps") do
      local is_folder = not name:match "^%." and lfs.attributes(paths.root .. "/lua/ps/" .. name, "mode") == "directory"
      if is_folder and not map["lua/ps/" .. name .. "/"] then missing[#missing + 1] = name end
    end
    assert.same({}, missing)
  end)

  it("has every folder of src", function()
    local missing = {}
    for name in lfs.dir(paths.root .. "/src") do
      if not name:match("^%.") and lfs.attributes(paths.root .. "/src/" .. name, "mode") == "directory"
        and not map["src/" .. name .. "/"] and not map["src/" .. name .. "/tape.c"] then
        missing[#missing + 1] = name
      end
    end
    assert.same({}, missing)
  end)

  it("names files that are in their folder", function()
    local missing, n = {}, 0
    for at, words in pairs(map) do
      local inside = at:match("^(.*)/[^/]*$")
      for name in words:gmatch("[%w_/*]+%.[ch]c?%f[^%w]") do
        n = n + 1
        if not exists(inside .. "/" .. name) and not exists_below(name) then missing[#missing + 1] = at .. name end
      end
    end
    assert.same({}, missing)
    assert.truthy(n > 25, n)
  end)
end)
