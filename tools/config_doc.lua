-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit tools/config_doc.lua [FILE]: rewrites the tables of docs/config.md from lua/ps/config/schema.lua. With
-- --check, the tool writes nothing, and exits with 1 if the tables are out of date.
local doc = require "ps.config.doc"
local write_file = require "ps.core.write_file"

local only_check, path = false, (arg[0]:match("^(.*)/tools/") or ".") .. "/docs/config.md"
for _, word in ipairs(arg) do
  if word == "--check" then only_check = true else path = word end
end
local f = assert(io.open(path))
local old = f:read("*a")
f:close()
local new = doc.renew(old)
if new == old then os.exit(0) end
if only_check then
  print(path .. " is out of date; run psluajit tools/config_doc.lua")
  os.exit(1)
end
assert(write_file(path, new))
print("wrote " .. path)
