-- SPDX-License-Identifier: BSD-3-Clause
-- Memory of this process as the operating system sees it (/proc/self). A forked process does not have its parent's
-- pages of files (the program, libraries) until it touches them itself. So the process of a dry run is smaller than a
-- process that was started for the script. The sizes of both processes are counted from their pages.
local pages = {}

local PAGE = 4096                          -- page size in bytes on x86-64
local PRESENT = 128                        -- the highest bit of the eight bytes of a page in /proc/self/pagemap
local LARGEST = 2 ^ 28  -- size in bytes of the largest mapping that counts; larger ones are a script's data

---@class ps.planning.Pages consecutive pages that a process has in memory
---@field first number address of the first page
---@field count integer

--- Returns the number of bytes of this process that are in memory. Returns nil if the system does not report it.
---@return integer?
function pages.resident()
  local f = io.open "/proc/self/smaps_rollup"
  local kib = f and f:read("*a"):match "Rss:%s+(%d+) kB"
  if f then f:close() end
  return kib and tonumber(kib) * 1024
end

-- Returns the system's entries for consecutive pages, with 8 bytes per page. Returns nil if there are none.
local function read(map, first, count)
  local text = map:seek("set", first / PAGE * 8) and map:read(count * 8)
  return text and #text == count * 8 and text or nil
end

--- Returns the pages of files that this process has in memory. A forked process has them at the same addresses. Returns
--- nil if the system does not report them.
---@return ps.planning.Pages[]?
function pages.of_files()
  local map, list = io.open("/proc/self/pagemap", "rb"), {}
  if not map then return nil end
  for line in io.lines "/proc/self/maps" do
    local first, last = line:match "^(%x+)%-(%x+) %S+ %S+ %S+ %S+ +/"
    first, last = tonumber(first or "", 16), tonumber(last or "", 16)
    if first and last - first <= LARGEST then
      local text, run = read(map, first, (last - first) / PAGE), nil
      if not text then
        map:close()
        return nil
      end
      for i = 1, #text / 8 do
        if text:byte(8 * i) < PRESENT then run = nil
        elseif run then run.count = run.count + 1
        else
          run = { first = first + (i - 1) * PAGE, count = 1 }
          list[#list + 1] = run
        end
      end
    end
  end
  map:close()
  return list
end

--- Returns the number of bytes in the given pages that this process does not have in memory. Returns nil if the system
--- does not report them.
---@param list ps.planning.Pages[]
---@return integer?
function pages.missing(list)
  local map, n = io.open("/proc/self/pagemap", "rb"), 0
  for _, run in ipairs(map and list or {}) do
    local text = read(map, run.first, run.count)
    if not text then
      map:close()
      return nil
    end
    for i = 1, run.count do if text:byte(8 * i) < PRESENT then n = n + 1 end end
  end
  if not map then return nil end
  map:close()
  return n * PAGE
end

return pages
