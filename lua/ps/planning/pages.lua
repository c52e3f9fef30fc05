-- SPDX-License-Identifier: BSD-3-Clause
-- The memory of this process, as reported by the operating system (/proc/self). In a forked process, a page of a file
-- (the program, a library) is not in memory until the process touches the page, even if it is in the parent's memory.
-- So the process of a dry run is smaller than a process that is started for the script. This module counts the pages by
-- which the two processes differ.
local pages = {}

local PAGE = 4096                          -- page size in bytes on x86-64
local PRESENT = 128                        -- highest bit of the last of the 8 bytes per page in /proc/self/pagemap
local LARGEST = 2 ^ 28  -- mappings of more than this number of bytes are not counted, because they are a script's data

---@class ps.planning.Pages consecutive pages that a process has in memory
---@field first number address of the first page
---@field count integer

--- Returns the resident size of this process in bytes, or nil if the system does not report it.
---@return integer?
function pages.resident()
  local f = io.open "/proc/self/smaps_rollup"
  local kib = f and f:read("*a"):match "Rss:%s+(%d+) kB"
  if f then f:close() end
  return kib and tonumber(kib) * 1024
end

-- Returns the entries of /proc/self/pagemap for `count` consecutive pages, as a text with 8 bytes per page. Returns nil
-- if the entries cannot be read.
local function read(map, first, count)
  local text = map:seek("set", first / PAGE * 8) and map:read(count * 8)
  return text and #text == count * 8 and text or nil
end

--- Returns the pages of mapped files that are in the memory of this process. In a forked process, the same pages have
--- the same addresses. Returns nil if the system does not report the pages.
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

--- Returns how many bytes of the pages in `list` are not in the memory of this process. Returns nil if the system does
--- not report the pages.
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
