-- SPDX-License-Identifier: BSD-3-Clause
-- Memory of this process as the operating system sees it (/proc/self). A process that was forked has none of its
-- parent's pages of files (of the program, of libraries) until it touches them itself, so a dry run's process is less
-- than one which was started for the script. Both are counted by the page, from what each of them has.
local pages = {}

local PAGE, PRESENT = 4096, 128            -- bytes; the highest bit of a page's eight bytes in /proc/self/pagemap

--- Bytes that this process has in memory now. nil: the system does not say.
---@return integer?
function pages.resident()
  local f = io.open "/proc/self/smaps_rollup"
  local kib = f and f:read("*a"):match "Rss:%s+(%d+) kB"
  if f then f:close() end
  return kib and tonumber(kib) * 1024
end

--- The pages of files that this process has in memory, by address; a fork has them at the same addresses. nil: the
--- system does not say.
---@return table<number, true>?
function pages.of_files()
  local map, there = io.open("/proc/self/pagemap", "rb"), {}
  if not map then return nil end
  for line in io.lines "/proc/self/maps" do
    local first, last = line:match "^(%x+)%-(%x+) %S+ %S+ %S+ %S+ +/"
    first, last = tonumber(first or "", 16), tonumber(last or "", 16)
    if first and map:seek("set", first / PAGE * 8) then
      local text = map:read((last - first) / PAGE * 8) or ""
      for i = 8, #text, 8 do
        if text:byte(i) >= PRESENT then there[first + (i / 8 - 1) * PAGE] = true end
      end
    end
  end
  map:close()
  return there
end

--- Bytes of the pages that are in one set and not in another.
---@param set table<number, true>
---@param other table<number, true>
---@return integer
function pages.missing(set, other)
  local n = 0
  for address in pairs(set) do if not other[address] then n = n + 1 end end
  return n * PAGE
end

return pages
