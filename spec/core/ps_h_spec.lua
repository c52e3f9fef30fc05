-- SPDX-License-Identifier: BSD-3-Clause
-- src/ps.h documents the errors of each function that can fail.
local paths = require "ps.paths"
local check = require "spec.check_lib"

-- Functions that return a number or a flag and never fail.
local NEVER = {}
for name in ([[ps_device_count ps_collect_due ps_tensor_alive ps_tensor_is_contiguous ps_grad_enabled ps_st_count
    ps_st_find ps_st_meta_count ps_saver_busy ps_engine_is_open ps_engine_chunk_count ps_engine_tensor_chunk
    ps_engine_holds ps_engine_tier_count ps_interrupts ps_is_terminal ps_terminal_columns ps_threads_most ps_threads
    ps_pt_root ps_host_is_loopback ps_group_rank ps_group_size ps_group_number ps_op_kernel_device
    ps_is_suspended]]):gmatch "%S+" do
  NEVER[name] = true
end

--- Returns a header's functions that return int, with their comments. A comment is above the function, or above the
--- adjacent functions that precede it, or after it.
---@param text string
---@return table<string, string>
local function told(text)
  local found, above, inside, since = {}, "", false, nil
  for line in text:gmatch("([^\n]*)\n") do
    if line == "" then above = "" end
    local opens = line:match("^%s*/%*")
    if opens and not inside then above = since and "" or above end
    if opens or inside then
      above, since = above .. line, nil
      inside = not line:find("*/", 1, true)
    else
      local name = line:match("^int (ps_[%w_]+)%(")
      since = since or name
      if name then found[name] = above .. " " .. (line:match("/%*.*$") or "") end
      local last = line:match("/%*.*$")
      if last and not last:find("*/", 1, true) then inside = true end
    end
  end
  return found
end

describe("src/ps.h", function()
  it("documents the errors of each function that can fail", function()
    local text = check.read(paths.root .. "/src/ps.h"):match("@cdef %*/(.-)/%* @endcdef")
    local missing, n = {}, 0
    for name, words in pairs(told(text)) do
      n = n + 1
      local tells = words:find("PS_E%u") or words:find("[Ee]rrors? of ") or words:find("never fails")
      if not tells and not NEVER[name] then missing[#missing + 1] = name end
    end
    table.sort(missing)
    assert.same({}, missing)
    assert.truthy(n > 120, n)
  end)
end)
