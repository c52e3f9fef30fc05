-- SPDX-License-Identifier: BSD-3-Clause
-- Functions for scripts that concern the process itself: threads, a clock, signals and memory size.
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"
local error = caller.error

local process = {}

--- Sets the number of compute threads.
---@param n integer at least 1; more than this machine's limit raises an error
function process.set_threads(n)
  if caller.whole(n, "ps.set_threads: the number of threads") < 1 then
    error("ps.set_threads takes a number of at least 1, not " .. n)
  end
  if n > native.C.ps_threads_most() then
    error(("ps.set_threads takes at most %d threads on this machine, not %.17g"):format(native.C.ps_threads_most(), n))
  end
  native.C.ps_set_threads(n)
end
--- Returns the number of compute threads.
---@return integer
function process.threads() return native.C.ps_threads() end
--- Returns the time in seconds, from a monotonic clock.
---@return number
function process.now() return native.C.ps_now() end

--- Makes the first Ctrl-C, SIGTERM or SIGHUP increase a counter instead of ending the process. A loop can then check
--- ps.interrupts(), save a checkpoint and exit. The next Ctrl-C or SIGTERM ends the process at once. A signal that was
--- ignored when the process began stays ignored (with nohup or in a background job, for example).
function process.catch_interrupts() native.check(native.C.ps_interrupts_install()) end
--- Returns the number of signals counted since ps.catch_interrupts().
---@return integer
function process.interrupts() return native.C.ps_interrupts() end
--- Returns the largest resident memory size of this process so far.
---@return integer bytes
function process.peak_rss() return tonumber(native.C.ps_rss_peak()) end

return process
