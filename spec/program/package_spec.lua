-- SPDX-License-Identifier: BSD-3-Clause
-- Debian packages (tools/deb.sh): the tree runs where it is unpacked, each tool has a manual page and completions made
-- from its own options, and the package names what it depends on. An installation (cmake/install.cmake) has the same
-- files, and removes those of an older one. tools/deb_root.sh tries the package in a bare Debian root.
local lfs = require "lfs"
local paths = require "ps.paths"
local check = require "spec.check_lib"

-- README.md links these for readers of the sources. They are not installed.
local SOURCES = " ARCHITECTURE.md CONTRIBUTING.md packages.apt spec src "

local build = paths.exe:match "^(.*)/"
local folder, root

local sh = check.shell

local function good(command)
  local text, code = sh(command)
  assert.equal(0, code, command .. "\n" .. text)
  return text
end

-- Returns the tools that `psluajit tools` lists.
local function tools()
  local list = {}
  for _, tool in ipairs(require("ps.prompt.scripts").list "tools") do
    if not tool.own then list[#list + 1] = tool.name end
  end
  return list
end

describe("the version", function()
  it("is the newest release of CHANGELOG.md, whose sections it has, each with its date", function()
    local text, releases = check.read(paths.root .. "/CHANGELOG.md"), {}
    for title in text:gmatch "\n## ([^\n]+)" do
      if title ~= "Unreleased" then
        local version, date = title:match "^(%d+%.%d+%.%d+) %- (%d%d%d%d%-%d%d%-%d%d)$"
        assert(version and (not releases[1] or date <= releases[#releases].date), title)
        releases[#releases + 1] = { version = version, date = date }
      end
    end
    assert.equal(paths.version, releases[1].version)
    for section in text:gmatch "\n### ([^\n]+)" do assert.truthy(("Added Changed Fixed"):find(section, 1, true)) end
  end)

  it("is said with the commit, the compiler and the libraries", function()
    local said = good("'" .. paths.exe .. "' --version")
    assert.matches("^psluajit " .. paths.version:gsub("%p", "%%%0") .. " %-%- LuaJIT 2", said)
    assert.matches("\ncommit [%x]+[^\n]*, compiled by %u%w+ %d+%.%d", said)
    for _, library in ipairs { "libedit", "liburing", "libsodium", "PCRE2", "utf8proc", "xxHash", "OpenMP",
      "oneDNN" } do
      assert.matches("\nlibraries: [^\n]*" .. library .. " %d", said)
    end
  end)
end)

describe("a Debian package", function()
  for _, program in ipairs { "dpkg-deb", "dpkg-shlibdeps", "cmake" } do
    if os.execute("command -v " .. program .. " >/dev/null 2>&1") ~= 0 then
      return pending(program .. " is not installed")
    end
  end
  if not lfs.attributes(build .. "/cmake_install.cmake") then return pending "this is no build folder" end

  local package
  setup(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(lfs.mkdir(folder))
    local text = good(("DEB_COMPRESSION=gzip sh '%s/tools/deb.sh' '%s' '%s'"):format(paths.root, build, folder))
    package = text:match "([^\n]*/psluajit_[^\n]*%.deb)"
    root = folder .. "/root"
    good(("dpkg-deb -x '%s' '%s'"):format(package, root))
  end)
  teardown(function() os.execute(("rm -rf '%s'"):format(folder)) end)

  -- The set of files below a folder, without the compression of manual pages and what Debian adds.
  local ADDED = { ["share/doc/psluajit/changelog.gz"] = true, ["share/doc/psluajit/copyright"] = true }
  local function files(below)
    local set = {}
    for path in good(("cd '%s' && find . ! -type d -printf '%%P\\n'"):format(below)):gmatch "[^\n]+" do
      path = path:gsub("^(share/man/.*)%.gz$", "%1")
      if not ADDED[path] then set[path] = true end
    end
    return set
  end
  -- The paths that one set has and the other lacks.
  local function differences(a, b)
    local list = {}
    for path in pairs(a) do if not b[path] then list[#list + 1] = path end end
    for path in pairs(b) do if not a[path] then list[#list + 1] = path end end
    table.sort(list)
    return list
  end

  it("has the files of an installation, which replaces an older one", function()
    local prefix = folder .. "/prefix"
    local install = ("cmake --install '%s' --prefix '%s'"):format(build, prefix)
    good(install)
    local first, listed = files(prefix), { ["share/psluajit/installed.txt"] = true }
    local plugin = "lib/psluajit/libps_cuda.so"                         -- a package of its own, if it was built
    local packaged = files(root .. "/usr")
    packaged[plugin] = first[plugin]
    assert.same({}, differences(packaged, first))
    for path in check.read(prefix .. "/share/psluajit/installed.txt"):gmatch "[^\n]+" do listed[path] = true end
    assert.same({}, differences(listed, first))
    -- An older installation had two files more. A file of the user's stays.
    good(("cd '%s' && mkdir share/psluajit/lua/gone && touch share/psluajit/lua/gone/old.lua bin/old bin/mine "
      .. "&& printf 'share/psluajit/lua/gone/old.lua\\nbin/old\\n' >>share/psluajit/installed.txt"):format(prefix))
    good(install)
    assert.is_nil(lfs.attributes(prefix .. "/share/psluajit/lua/gone"))
    assert.same({ "bin/mine" }, differences(first, files(prefix)))
    -- One from before the list of files had other Lua files.
    good(("cd '%s/share/psluajit' && touch lua/older.lua && rm installed.txt"):format(prefix))
    good(install)
    assert.is_nil(lfs.attributes(prefix .. "/share/psluajit/lua/older.lua"))
  end)

  it("has an installation that `make uninstall` removes, without files of the user's", function()
    local place = folder .. "/dest"
    local remove = ("DESTDIR='%s' make -s -C '%s' uninstall BUILD='%s' 2>&1"):format(place, paths.root, build)
    good(("DESTDIR='%s' cmake --install '%s'"):format(place, build))
    local prefix = check.read(build .. "/CMakeCache.txt"):match "CMAKE_INSTALL_PREFIX:PATH=([^\n]*)"
    local mine = prefix:sub(2) .. "/share/psluajit/lua/mine.lua"
    check.write(place .. "/" .. mine, "")
    good(remove)
    assert.same({ mine }, differences(files(place), {}))
    local text, code = check.shell(remove)
    assert(code ~= 0 and text:find("so psluajit is not installed there", 1, true), text)
  end)

  it("has the program's version, and so have its manual pages", function()
    assert.equal(paths.version .. "\n", good("dpkg-deb -f '" .. package .. "' Version"))
    assert.matches("/psluajit_" .. paths.version:gsub("%p", "%%%0") .. "_", package)
    for _, page in ipairs { "psluajit", "psluajit-launch" } do
      local title = good(("zcat '%s/usr/share/man/man1/%s.1.gz' | head -1"):format(root, page))
      assert.matches('"psluajit ' .. paths.version .. '"', title, 1, true)
    end
  end)

  it("has README.md among the documents, and the pages that README.md links", function()
    local n = 0
    for target in check.read(root .. "/usr/share/doc/psluajit/README.md"):gmatch "%]%(([^)#:]+)[^):]*%)" do
      if not SOURCES:find(" " .. target:match "^[^/]+" .. " ", 1, true) then
        n = n + 1
        assert(lfs.attributes(root .. "/usr/share/doc/psluajit/" .. target, "mode"), target)
        assert(lfs.attributes(root .. "/usr/share/psluajit/" .. target, "mode"), target)
      end
    end
    assert(n > 50, n)
  end)

  it("runs in the folder where it is unpacked", function()
    local program = ("cd / && env -u LUA_PATH '%s/usr/bin/psluajit' "):format(root)
    assert.matches("^psluajit %d", good(program .. "--version"))
    local script = [[-e 'local p, ps = require "ps.paths", require "ps"
      print(p.installed, p.root, ps.ones({ 2, 3 }):sum():item())']]
    assert.equal("true\t" .. root .. "/usr/share/psluajit\t6\n", good(program .. script))
    assert.matches("\nchat +%u", "\n" .. good(program .. "tools"))
    good(("%s new ranks '%s/project'"):format(program, folder))
    assert.truthy(lfs.attributes(folder .. "/project/train.lua"))
  end)

  it("has a manual page for each tool, with the options of the tool's --help", function()
    local n = 0
    for _, name in ipairs(tools()) do
      local page = good(("zcat '%s/usr/share/man/man1/psluajit-%s.1.gz'"):format(root, name)):gsub("\\%-", "-")
      assert.matches("^%.TH PSLUAJIT%-", page)
      for option in good(("'%s' %s --help"):format(paths.exe, name)):gmatch "\n +[^\n]-(%-%-[%l][%w-]*)" do
        n = n + 1
        assert.matches(option, page, 1, true)
      end
    end
    assert.is_true(n > 50, n)
    local page = good(("zcat '%s/usr/share/man/man1/psluajit.1.gz'"):format(root)):gsub("\\%-", "-")
    for option in good("'" .. paths.exe .. "' --help"):gmatch "\n  (%-%-?[%w-]+)" do
      assert.matches(option, page, 1, true)
    end
    if os.execute "command -v man >/dev/null 2>&1" == 0 then
      local command = "LC_ALL=C.UTF-8 man --warnings -l '%s'/usr/share/man/man1/*.gz >/dev/null"
      assert.equal("", (good(command:format(root))))
    end
  end)

  it("completes tools and their options in bash", function()
    local file = root .. "/usr/share/bash-completion/completions/psluajit"
    local function completed(...)
      local words, n = {}, select("#", ...)
      for i = 1, n do words[i] = ("'%s'"):format((select(i, ...))) end
      local script = 'cd / && . "%s" && COMP_WORDS=(psluajit %s) COMP_CWORD=%d && _psluajit && echo "${COMPREPLY[*]}"'
      return good(("bash -c '%s'"):format(script:format(file, table.concat(words, " "):gsub("'", "\""), n)))
    end
    assert.equal("generate\n", completed "gene")
    assert.equal("finetune finetune_bert\n", completed "finet")
    assert.equal("--max-new\n", completed("generate", "--max-n"))
    assert.equal("--nproc-per-node\n", completed("launch", "--npr"))
    -- Every option that a tool's manual page has is completed, and no other.
    local script = {}
    for _, name in ipairs(tools()) do
      script[#script + 1] = ('COMP_WORDS=(psluajit %s --) COMP_CWORD=2; _psluajit; echo "%s: ${COMPREPLY[*]}"'):format(
        name, name)
    end
    check.write(folder .. "/complete.sh", (". '%s'\n%s\n"):format(file, table.concat(script, "\n")))
    local said, n = good(("cd / && bash '%s/complete.sh'"):format(folder)), 0
    for _, name in ipairs(tools()) do
      local words, options = {}, {}
      for word in ("\n" .. said):match("\n" .. name .. ": ([^\n]*)"):gmatch "%S+" do
        words[word:gsub("_", "-")] = true                  -- names may have dashes or underscores
      end
      local help = good(("'%s' %s --help"):format(paths.exe, name))
      for option, value in (" " .. help):gmatch "[%s,(%[](%-%-%l[%w_-]*)(=?)" do       -- --x=N is given to a script
        if value == "" then
          options[option:gsub("_", "-")] = true
          n = n + 1
        end
      end
      assert.same({}, differences(options, words), name)
    end
    assert.is_true(n > 100, n)
  end)

  it("names its dependencies, and has all files owned by root, below /usr", function()
    local fields = good("dpkg-deb -f '" .. package .. "'")
    for _, name in ipairs { "libluajit-5.1-2", "libdnnl2", "libsodium23", "libxxhash0", "lua-argparse", "lua-cjson",
      "lua-filesystem", "lua-posix" } do
      assert.matches("Depends: [^\n]*" .. name:gsub("%p", "%%%0"), fields)
    end
    for line in good("dpkg-deb -c '" .. package .. "'"):gmatch "[^\n]+" do
      assert.matches("root/root", line, 1, true)
      assert.is_true(line:find " %./$" ~= nil or line:find " %./usr/" ~= nil, line)
    end
    assert.equal("", good(("find '%s' -newermt now -o -perm /022 ! -type l"):format(root)))
    assert.matches("Changes", good(("zcat '%s/usr/share/doc/psluajit/changelog.gz' | head -1"):format(root)))
    assert.equal(check.read(paths.root .. "/LICENSE"), check.read(root .. "/usr/share/doc/psluajit/copyright"))
  end)
end)
