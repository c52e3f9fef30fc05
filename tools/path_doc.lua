-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit tools/path_doc.lua [--check] [TREE]: writes the drawing at the top of ARCHITECTURE.md, the path of one
-- parameter through a step. PATH below is the outline. Each row is a function, and the tool reads the sources: the
-- function must be defined in its file, and its body must name the function (or the table's field) by which it leads on
-- to the next row. The tool names each row that is no longer true and exits with 1. With --check it writes nothing and
-- exits with 1, too, when the drawing is out of date. TREE: the tree to read, this one when absent.
local paths = require "ps.paths"

local only_check, root = false, paths.root
for _, word in ipairs(arg) do
  if word == "--check" then only_check = true else root = word end
end

local BEGIN, END = "<!-- path: psluajit tools/path_doc.lua -->", "<!-- end of path -->"

-- { lane, function, file, leads on by, words }. A lane is named where it begins; "FFI" is the border of Lua and C.
local PATH = {
  { "Lua call", "step.backward", "lua/ps/engine/step/backward.lua", "backward", "model:backward(loss) of a script" },
  { "", "Driver:backward", "lua/ps/engine/step/table.lua", "timed", "the driver of a model in one process" },
  { "", "perform", "lua/ps/engine/step/actions.lua", "ps_step_next", "ps_step_next, the action's work, ps_step_done" },
  { "", "M.walk_back", "lua/ps/core/scope.lua", "ps_backward_begin_n",
    "the work: one call, where nothing is recomputed" },
  { "", "walk", "lua/ps/core/scope.lua", "ps_backward_next", "only with recompute: a segment again, then on" },
  { "FFI" },
  { "step", "ps_step_next", "src/engine/step.c", "pass_began", "called first: the action due, or an error" },
  { "tape", "ps_backward_begin_n", "src/grad/walk.c", "ps_backward_next", "called next: the walk from the loss" },
  { "", "ps_backward_next", "src/grad/walk.c", "tape_pass", "nodes by falling number" },
  { "", "tape_pass", "src/grad/walk.c", "grad", "the gradient rule of one op; ops of its own" },
  { "", "grad_linear", "src/ops/matmul.c", "ps_give_weights", "for instance that of F.linear" },
  { "", "tape_leaf_final", "src/grad/tape.c", "grad_final", "no node ahead needs the parameter any more" },
  { "gradient", "grad_final", "src/engine/engine.c", "engine_make_final", "the engine's hook" },
  { "", "engine_make_final", "src/engine/engine.c", "engine_unit_ready", "stored in the parameter's place" },
  { "update", "engine_unit_ready", "src/engine/engine.c", "update_pending", "a whole unit; if no norm is needed" },
  { "", "update_unit", "src/engine/engine.c", "run_update", "else from optimizer:step()" },
  { "", "run_update", "src/engine/engine.c", "engine_run", "an op as any other" },
  { "op", "ps_apply_all", "src/tensor/dispatch.c", "apply_steps", "every op, of forward and update, too" },
  { "", "run_kernel", "src/tensor/dispatch.c", "pin_view", "pin, kernel, unpin" },
  { "", "pin_view", "src/tensor/dispatch.c", "ps_storage_pin", "the table of the memory manager" },
  { "chunk", "chunks_pin", "src/chunk/chunk.c", "chunk_pin", "the storage's chunk" },
  { "", "chunk_pin", "src/chunk/chunk.c", "advance", "notes the use; advance, then bring" },
  { "", "bring", "src/chunk/transfer.c", "begin", "fetches this chunk if the plan did not" },
  { "", "advance", "src/chunk/schedule.c", "advance_level", "the plan's moves of OTHER chunks" },
  { "", "begin_move", "src/chunk/schedule.c", "begin_evict", "fetch, evict or drop" },
  { "", "begin_evict", "src/chunk/transfer.c", "slot_take", "a place below, then the copy" },
  { "tier", "transfer_start", "src/chunk/transfer.c", "ps_disk_write", "to the host (copy_start) or to the disk" },
  { "", "ps_disk_write", "src/chunk/disk.c", nil, "a job of the disk's thread" },
}

-- -- reading sources --------------------------------------------------------------------------------------------------
local sources = {}

local function lines_of(file)
  if not sources[file] then
    local lines = {}
    local f = io.open(root .. "/" .. file)
    if f then
      for line in f:lines() do lines[#lines + 1] = line end
      f:close()
    end
    sources[file] = lines
  end
  return sources[file]
end

local function quoted(name) return (name:gsub("%p", "%%%0")) end

-- Where a function's definition begins, and the text of the line that ends it.
local function definition(name, file, lines)
  for at, line in ipairs(lines) do
    if file:match("%.lua$") then
      local indent = line:match("^(%s*)local function " .. quoted(name) .. "%(")
        or line:match("^(%s*)function " .. quoted(name) .. "%(")
      if indent then return at, indent .. "end" end
    elseif line:match("^%a[%w_ *]-[ *]" .. quoted(name) .. "%(") and not line:match(";$") then
      return at, "}"
    end
  end
end

---@return string? body nil: the file does not define the function
local function body_of(name, file)
  local lines = lines_of(file)
  local first, last = definition(name, file, lines)
  if not first then return nil end
  local body = { lines[first] }
  local one_line = lines[first]:match("%send%s*$") or lines[first]:match("}$")
  while not one_line and lines[first + #body] and body[#body] ~= last do body[#body + 1] = lines[first + #body] end
  return table.concat(body, "\n")
end

local complaints = {}

local function check(row)
  local _, name, file, leads = unpack(row, 1, 5)
  local body = body_of(name, file)
  if not body then
    complaints[#complaints + 1] = ("%s has no function %s"):format(file, name)
  elseif leads and not body:match("%f[%w_:]" .. quoted(leads) .. "%f[^%w_]") then
    complaints[#complaints + 1] = ("%s of %s no longer leads on by %s"):format(name, file, leads)
  end
end

-- -- drawing ----------------------------------------------------------------------------------------------------------
local INSIDE, ARROW = 102, 18                     -- columns of a box's inside; column of the arrows between boxes

local function edge(title)
  local line = "+--" .. (title and (" %s "):format(title) or "")
  return line .. ("-"):rep(INSIDE + 1 - #line) .. "+"
end

local function drawing()
  local out, border = { "```" }, nil
  for i, row in ipairs(PATH) do
    local lane = row[1]
    if lane == "FFI" then border = "FFI"
    else
      check(row)
      if lane ~= "" then
        if i > 1 then
          out[#out + 1] = edge()
          out[#out + 1] = (" "):rep(ARROW) .. "v" .. (border and "   " .. border or "")
        end
        out[#out + 1], border = edge(lane), nil
      end
      local words = ("%-19s  %-31s  %s"):format(row[2], row[3], row[5])
      out[#out + 1] = ("|  %s%s|"):format(words, (" "):rep(INSIDE - 2 - #words))
    end
  end
  out[#out + 1] = edge()
  out[#out + 1] = "```"
  return table.concat(out, "\n")
end

local file = root .. "/ARCHITECTURE.md"
local f = assert(io.open(file))
local old = f:read("*a")
f:close()
local _, first = old:find(BEGIN, 1, true)
local last = old:find(END, 1, true)
if not first or not last then error(file .. " lacks the lines " .. BEGIN .. " and " .. END, 0) end
local new = old:sub(1, first) .. "\n" .. drawing() .. "\n" .. old:sub(last)
for _, complaint in ipairs(complaints) do print(complaint) end
if new ~= old then
  if only_check then
    print(file .. " is out of date; run psluajit tools/path_doc.lua")
  else
    f = assert(io.open(file, "w"))
    f:write(new)
    f:close()
    print("wrote " .. file)
  end
end
os.exit(#complaints == 0 and (new == old or not only_check) and 0 or 1)
