-- SPDX-License-Identifier: BSD-3-Clause
-- What a script may ask of the process itself: threads, a clock, signals and its size.
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"
local error = caller.error

local process = {}

--- Sets how many threads compute.
---@param n integer from 1; an error above the most that this machine takes
function process.set_threads(n)
  if caller.whole(n, "ps.set_threads: the number of threads") < 1 then
    error("ps.set_threads takes 1 or more, not " .. n)
  end
  if n > native.C.ps_threads_most() then
    error(("ps.set_threads takes up to %d on this machine, not %.17g"):format(native.C.ps_threads_most(), n))
  end
  native.C.ps_set_threads(n)
end
--- How many threads compute.
---@return integer
function process.threads() return native.C.ps_threads() end
--- Seconds of a clock that only goes forward.
---@return number
function process.now() return native.C.ps_now() end

--- From now on the first Ctrl-C, SIGTERM or SIGHUP is counted instead of ending the process, so that a loop can look at
--- ps.interrupts(), save and leave. The next Ctrl-C or SIGTERM ends it at once. A signal that was ignored when the
--- process began (nohup, a job in the background) stays so.
function process.catch_interrupts() native.check(native.C.ps_interrupts_install()) end
--- How many signals were counted since ps.catch_interrupts().
---@return integer
function process.interrupts() return native.C.ps_interrupts() end
--- The largest resident size of this process so far.
---@return integer bytes
function process.peak_rss() return tonumber(native.C.ps_rss_peak()) end

return process
