-- SPDX-License-Identifier: BSD-3-Clause
-- Finds the secret that only the ranks of a run know (docs/distributed.md, "Authentication"). PS_SECRET sets the
-- secret. If PS_SECRET is not set and all ranks are on this machine, the secret is in a file that all runs of this user
-- share. src/rendezvous/proof.c proves that a rank knows the secret, and never sends the secret.
local bit = require "bit"
local fcntl = require "posix.fcntl"
local stat = require "posix.sys.stat"
local unistd = require "posix.unistd"
local entropy = require "ps.core.entropy"
local read_file = require "ps.core.read_file"

local secret = {}

local FILE_MODE, FOLDER_MODE, OTHERS = tonumber("600", 8), tonumber("700", 8), tonumber("077", 8)
local EEXIST = 17

local function fail(text, ...) error(text:format(...), 0) end

--- Returns 256 random bits, as text.
---@return string
function secret.random()
  return entropy.hex(32)
end

-- Returns a folder that no other user can read or replace.
local function own_folder(getenv)
  local runtime, me = getenv("XDG_RUNTIME_DIR"), unistd.geteuid()
  local at = runtime and runtime:sub(1, 1) == "/" and stat.stat(runtime)
  local path = at and stat.S_ISDIR(at.st_mode) ~= 0 and at.st_uid == me and runtime .. "/psluajit"
    or ("/tmp/psluajit-%d"):format(me)
  local made, why, code = stat.mkdir(path, FOLDER_MODE)
  if not made and code ~= EEXIST then
    fail("cannot create folder %s for the secret of this user's runs: %s; set PS_SECRET to a secret", path, why)
  end
  local s = stat.lstat(path)
  if not s or stat.S_ISDIR(s.st_mode) == 0 or s.st_uid ~= me or bit.band(s.st_mode, OTHERS) ~= 0 then
    fail("%s is for the secret of this user's runs, but it is not a folder that only user %d can open; remove it, "
      .. "or set PS_SECRET to a secret", path, me)
  end
  return path
end

-- Creates the file of the secret. If several processes create the file, the first file is kept. The file is complete
-- before it gets its name.
local function make(path)
  local temp = ("%s.%d-%s"):format(path, unistd.getpid(), secret.random():sub(1, 8))
  local fd, why = fcntl.open(temp, fcntl.O_WRONLY + fcntl.O_CREAT + fcntl.O_EXCL, FILE_MODE)
  local text = secret.random()
  local ok = fd and unistd.write(fd, text) == #text
  if fd then unistd.close(fd) end
  local code
  if ok then ok, why, code = unistd.link(temp, path) end
  if fd then unistd.unlink(temp) end
  if not ok and code ~= EEXIST then
    fail("cannot write %s, the secret of this user's runs: %s; set PS_SECRET to a secret", path,
      why or "the disk is full")
  end
end

--- Returns the secret that all runs of this user on this machine share. The first run creates the secret.
---@param getenv fun(name: string): string?
---@return string
function secret.of_this_machine(getenv)
  local path = own_folder(getenv) .. "/secret"
  if not stat.stat(path) then make(path) end
  local text, why = read_file(path)
  if not text then fail("cannot read the secret of this user's runs: %s", why) end
  if not text:match("^%x+$") or #text ~= 64 then
    fail("%s is not a secret that psluajit wrote (64 hexadecimal digits); remove it", path)
  end
  return text
end

local function of_file(path)
  local text, why = read_file(path)
  if not text then fail("PS_SECRET names a file that cannot be read: %s", why) end
  text = text:gsub("%s+$", "")
  if text == "" then fail("PS_SECRET names %s, which is empty; write a secret into it", path) end
  return text
end

--- Returns the secret of a run whose ranks meet at `rendezvous`. Returns nil if the run has no secret. Also returns nil
--- if the ranks meet by a file, because the file itself contains a secret. Errors are strings.
---@param getenv fun(name: string): string?
---@param rendezvous string
---@param here boolean whether all ranks are on this machine
---@return string?
function secret.find(getenv, rendezvous, here)
  local given = getenv("PS_SECRET")
  if given == "" then fail("PS_SECRET is ''; expected a secret, file:///PATH of one, or 'required'") end
  if given and given ~= "required" then
    local path = given:match("^file://(/.*)$")
    return path and of_file(path) or given
  end
  if rendezvous:match("^file:") then return nil end
  if here then return secret.of_this_machine(getenv) end
  if given then
    fail("PS_SECRET is 'required', but there is no secret: ranks of several machines meet at %s; set PS_SECRET to the "
      .. "same secret on all machines (openssl rand -hex 32 makes a secret), or to file:///PATH of a file that has "
      .. "it", rendezvous)
  end
end

--- Returns the secret that the launcher passes to the ranks of one attempt on this machine. If PS_SECRET is set, this
--- is the secret. Otherwise the secret is new for each attempt.
---@param getenv fun(name: string): string?
---@return string
function secret.of_attempt(getenv)
  local given = getenv("PS_SECRET")
  if given and given ~= "required" then return given end
  return secret.random()
end

return secret
