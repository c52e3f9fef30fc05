-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit tools/path_doc.lua [--check] [TREE]: writes the drawings at the top of ARCHITECTURE.md. A drawing shows a
-- path through functions, such as the path of one parameter through a step. PATHS below contains the outlines of the
-- drawings. Each row of an outline is a function. The tool checks every row against the sources: the function must be
-- defined in its file, and its body must name the function (or the field of a table) through which it reaches the next
-- row. The tool prints each row that is no longer true, and exits with 1 if there is any. With --check, it writes
-- nothing, and also exits with 1 if a drawing is out of date. TREE is the source tree to read. The default is this
-- tree.
local paths = require "ps.paths"
local write_file = require "ps.core.write_file"

local only_check, root = false, paths.root
for _, word in ipairs(arg) do
  if word == "--check" then only_check = true else root = word end
end

-- The lines of ARCHITECTURE.md that enclose a drawing.
local BEGIN, END = "<!-- path%s: psluajit tools/path_doc.lua -->", "<!-- end of path -->"

-- Rows { lane, function, file, name, text }. The function reaches the next row through `name`. Only the first row of a
-- lane has a `lane`, which is the lane's name. "FFI" marks the boundary between Lua and C.
local PARAMETER = {
  { "Lua call", "step.backward", "lua/ps/engine/step/backward.lua", "backward", "model:backward(loss) of a script" },
  { "", "Driver:backward", "lua/ps/engine/step/table.lua", "timed", "the driver of a model in one process" },
  { "", "perform", "lua/ps/engine/step/actions.lua", "ps_step_next", "ps_step_next, the action's work, ps_step_done" },
  { "", "M.walk_back", "lua/ps/core/scope.lua", "ps_backward_begin_n",
    "the work: one call if nothing is recomputed" },
  { "", "walk", "lua/ps/core/scope.lua", "ps_backward_next", "after a segment, function or hook: continues" },
  { "FFI" },
  { "step", "ps_step_next", "src/engine/step.c", "pass_began", "called first: the next action, or an error" },
  { "tape", "ps_backward_begin_n", "src/grad/walk.c", "ps_backward_next", "called next: the walk from the loss" },
  { "", "ps_backward_next", "src/grad/walk.c", "tape_visit", "nodes in descending order" },
  { "", "visit", "src/grad/walk.c", "tape_pass", "stops at a segment, a function, hooks" },
  { "", "tape_pass", "src/grad/walk.c", "grad", "the gradient rule of one op, which runs ops" },
  { "", "grad_linear", "src/ops/matmul.c", "ps_give_weights", "for example that of F.linear" },
  { "", "tape_leaf_final", "src/grad/tape.c", "grad_final", "no remaining node needs the parameter" },
  { "gradient", "grad_final", "src/engine/engine.c", "engine_make_final", "the engine's hook" },
  { "", "engine_make_final", "src/engine/engine.c", "engine_unit_ready", "overwrites the parameter" },
  { "update", "engine_unit_ready", "src/engine/engine.c", "update_pending", "if no norm is needed: a complete unit" },
  { "", "update_unit", "src/engine/engine.c", "run_update", "otherwise from optimizer:step()" },
  { "", "run_update", "src/engine/engine.c", "engine_run", "an op like any other" },
  { "op", "ps_apply_all", "src/tensor/dispatch.c", "apply_steps", "every op of forward, backward and update" },
  { "", "run_kernel", "src/tensor/dispatch.c", "pin_view", "pin, kernel, unpin" },
  { "", "pin_view", "src/tensor/dispatch.c", "ps_storage_pin", "the table of the memory manager" },
  { "chunk", "chunks_pin", "src/chunk/chunk.c", "chunk_pin", "the storage's chunk" },
  { "", "chunk_pin", "src/chunk/chunk.c", "advance", "records the use; advance, then bring" },
  { "", "bring", "src/chunk/transfer.c", "begin", "fetches this chunk if the plan did not" },
  { "", "advance", "src/chunk/schedule.c", "advance_level", "the plan's moves of other chunks" },
  { "", "begin_move", "src/chunk/schedule.c", "begin_evict", "fetch, evict or drop" },
  { "", "begin_evict", "src/chunk/transfer.c", "slot_take", "takes a slot on the tier below, then copies" },
  { "tier", "transfer_start", "src/chunk/transfer.c", "ps_disk_write", "to the host (copy_start) or to the disk" },
  { "", "ps_disk_write", "src/chunk/disk.c", nil, "a job for the disk's thread" },
}

local TENSOR = {
  { "Lua call", "pretrained.load", "lua/ps/pretrained/init.lua", "weights.load", "config.json names the class" },
  { "", "files_of.open", "lua/ps/pretrained/files.lua", "open_file", "called first: opens each file once" },
  { "", "check_sizes", "lua/ps/pretrained/init.lua", "state", "compares the files with config.json" },
  { "parameter", "Parameter", "lua/ps/nn/module.lua", "hooks.tell", "the class makes its parameters" },
  { "", "run_model", "lua/ps/engine/setup.lua", "hooks.on", "with an engine: listens for parameters" },
  { "", "build.to_chunk", "lua/ps/engine/layout/build.lua", "to_own_chunk", "if ranks share it: part of a chunk" },
  { "", "build.to_own_chunk", "lua/ps/engine/layout/build.lua", "ps_engine_adopt", "each gets a separate chunk" },
  { "names", "weights.load", "lua/ps/pretrained/weights.lua", "take", "finds each tensor's name in the model" },
  { "", "take", "lua/ps/pretrained/weights.lua", "load_state_dict", "raises an error for an incomplete body" },
  { "", "Module:load_state_dict", "lua/ps/nn/state.lua", "sharded.read", "compares all shapes, then reads" },
  { "", "sharded.read", "lua/ps/nn/sharded.lua", "read_into", "the whole tensor, or this rank's slice" },
  { "file", "File:read_into", "lua/ps/io/safetensors.lua", "fill", "read_part if the type changes" },
  { "", "fill", "lua/ps/io/safetensors.lua", "ps_tensor_load", "compares the checksum, if any" },
  { "FFI" },
  { "bytes", "ps_tensor_load", "src/tensor/tensor.c", "ps_storage_pin", "pins the parameter's chunk" },
  { "", "ps_st_read", "src/io/safetensors.c", "ps_map_read", "the reader that it calls" },
  { "layout", "Engine:take", "lua/ps/engine/init.lua", "build.place", "after model_func has returned" },
  { "", "build.place", "lua/ps/engine/layout/build.lua", "place_param", "packs all parameters into chunks" },
  { "", "place_param", "lua/ps/engine/layout/build.lua", "adopt_param", "converts fp32 to the half type, if any" },
  { "FFI" },
  { "chunk", "ps_engine_adopt", "src/engine/place.c", "ps_chunk_adopt", "if the dtype stays, otherwise a copy" },
  { "", "ps_chunk_adopt", "src/chunk/chunk.c", "copy_into", "copies, and frees the separate chunk" },
}

local MICRO_BATCH = {
  { "Lua call", "Loop:next", "lua/ps/engine/micro.lua", "step.next", "a turn of `for out in model:micro_batches`" },
  { "", "turn", "lua/ps/engine/step/loops.lua", "driver:turn", "the same for every driver" },
  { "", "Driver:turn", "lua/ps/engine/pipeline/driver.lua", "advance_step", "the first turn loads all micro-batches" },
  { "", "advance", "lua/ps/engine/pipeline/driver.lua", "next_event", "performs the row up to a yield" },
  { "FFI" },
  { "row", "ps_pipe_next", "src/pipe/exec.c", "go_on", "up to an action that Lua performs" },
  { "", "go_on", "src/pipe/exec.c", "pipe_receive", "transfers, backwards, reductions" },
  { "receive", "pipe_receive", "src/pipe/exec_messages.c", "take_one", "from the previous virtual stage" },
  { "", "pipe_post_before", "src/pipe/exec_messages.c", "post_action", "posts receives ahead of their use" },
  { "", "channel_recv", "src/pipe/channel.c", "ps_p2p_recv", "a message between two ranks" },
  { "FFI" },
  { "forward", "Pipe:forward", "lua/ps/engine/pipeline/row.lua", "parts.run", "runs as in a step without stages" },
  { "", "go_out", "lua/ps/engine/pipeline/row.lua", "give", "the tensors for the next virtual stage" },
  { "FFI" },
  { "send", "forward_done", "src/pipe/exec.c", "hand_on", "keeps the output for backward" },
  { "", "pipe_send", "src/pipe/exec_messages.c", "begin_send", "if the next stage is on another rank" },
  { "", "channel_send", "src/pipe/channel.c", "ps_p2p_send", "while the rank computes" },
  { "yield", "begin_event", "src/pipe/exec.c", "pipe_take_loss", "all ranks get the loss" },
  { "", "Pipe:output", "lua/ps/engine/pipeline/row.lua", "loss_here", "`out` of the script's turn" },
  { "", "Pipe:mark", "lua/ps/engine/pipeline/row.lua", "ps_pipe_mark", "model:backward(loss) of the script" },
  { "backward", "go_through", "src/pipe/exec.c", "perform", "when the row reaches it, in a later turn" },
  { "", "perform", "src/pipe/exec.c", "walk", "an action of the step" },
  { "", "walk", "src/pipe/exec.c", "ps_backward_begin_n", "from the loss, or from received gradients" },
  { "", "back_done", "src/pipe/exec.c", "ps_boundary_take", "gradients for the previous stage (send)" },
}

local PATHS = { { of = "", rows = PARAMETER }, { of = " of a micro-batch", rows = MICRO_BATCH },
  { of = " of a tensor", rows = TENSOR } }

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

-- Finds the definition of a function. Returns the number of its first line, and the text that its last line must have.
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

---@return string? body nil if the file does not define the function
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
    complaints[#complaints + 1] = ("%s of %s no longer reaches the next row by %s"):format(name, file, leads)
  end
end

-- -- drawing ----------------------------------------------------------------------------------------------------------
local INSIDE, ARROW = 110, 18                     -- INSIDE: number of columns in a box; ARROW: column of the arrows
                                                  -- between boxes

local function edge(title)
  local line = "+--" .. (title and (" %s "):format(title) or "")
  return line .. ("-"):rep(INSIDE + 1 - #line) .. "+"
end

local function drawing(rows)
  local out, border = { "```" }, nil
  for i, row in ipairs(rows) do
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
      local words = ("%-22s  %-34s  %s"):format(row[2], row[3], row[5])
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
local new = old
for _, path in ipairs(PATHS) do
  local begin = BEGIN:format(path.of)
  local _, first = new:find(begin, 1, true)
  local last = first and new:find(END, first, true)
  if not last then error(("%s lacks the lines %s and %s"):format(file, begin, END), 0) end
  new = new:sub(1, first) .. "\n" .. drawing(path.rows) .. "\n" .. new:sub(last)
end
for _, complaint in ipairs(complaints) do print(complaint) end
if new ~= old then
  if only_check then
    print(file .. " is out of date; run psluajit tools/path_doc.lua")
  else
    assert(write_file(file, new))
    print("wrote " .. file)
  end
end
os.exit(#complaints == 0 and (new == old or not only_check) and 0 or 1)
