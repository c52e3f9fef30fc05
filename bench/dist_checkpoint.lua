-- SPDX-License-Identifier: BSD-3-Clause
-- The section `checkpoint` of bench/dist.lua. Every rank trains a small GPT-2 with AdamW and saves `rounds` times in
-- the background to --folder. Each rank has the whole model and saves its share of the checkpoint. The benchmark also
-- measures the rate of the disk: between the saves, all ranks write plain files of the same size at the same time, with
-- O_DIRECT and fsync. Prints JSON with medians of the rounds:
--   step_s               seconds per step while nothing is saved
--   stall_s              the time that training waits in ps.checkpoints.save and, on rank 0, for the commit between
--                        two steps
--   first_stall_s        stall_s of the first save, which also allocates the memory for the copy
--   stall_percent        stall_s / (50 * step_s): with one save every 50 steps, the share of the training time that is
--                        lost
--   slowed_s             additional time of the steps that run while the background thread writes
--   write, disk          bytes per second of all ranks, for saves and for plain files
--   write_over_disk      the ratio of the two rates
--   sync_s               the time of a save without async
local ps = require "ps"
local ffi = require "ffi"
local gpt2 = require "models.gpt2"
local lfs = require "lfs"
local background = require "ps.checkpoints.background"
local folders = require "ps.checkpoints.folder"
local checkpoints = ps.checkpoints

ffi.cdef [[
  int open(const char *path, int flags, ...);
  int close(int fd);
  int fsync(int fd);
  long pwrite(int fd, const void *from, unsigned long nbytes, long offset);
  int posix_memalign(void **out, unsigned long align, unsigned long nbytes);
]]
-- Flags of the Linux system call open on x86-64.
local O_WRONLY, O_CREAT, O_TRUNC, O_DIRECT = 1, 64, 512, 16384
local PIECE, WARM = 8 * 2 ^ 20, 4

local function median(list)
  table.sort(list)
  return list[math.floor((#list + 1) / 2)]
end

-- Returns the largest of the numbers that the ranks pass.
local function largest(group, number)
  local all = ps.empty({ group:size() }, { dtype = "fp64" })
  group:all_gather(all, ps.tensor({ number }, { dtype = "fp64" }))
  return all:amax():item()
end

-- Writes a plain file of `nbytes` bytes in pieces, bypassing the page cache. Returns the time in seconds.
local function plain_write(path, nbytes, buffer)
  local start = ps.now()
  local fd = ffi.C.open(path, O_WRONLY + O_CREAT + O_TRUNC + O_DIRECT, ffi.cast("int", 420))
  if fd < 0 then error("cannot open " .. path .. " with O_DIRECT; give --folder on a disk", 0) end
  for at = 0, nbytes - 1, PIECE do
    local n = math.min(PIECE, math.ceil((nbytes - at) / 4096) * 4096)
    if ffi.C.pwrite(fd, buffer, n, at) ~= n then error("cannot write " .. path, 0) end
  end
  if ffi.C.fsync(fd) ~= 0 then error("cannot sync " .. path, 0) end
  ffi.C.close(fd)
  local seconds = ps.now() - start
  os.remove(path)
  return seconds
end

return function(group, options)
  local rank, size = group:rank(), group:size()
  local folder = ("%s/psluajit-bench-checkpoint"):format(options.folder)
  folders.make(folder)
  ps.set_threads(math.max(1, math.floor(ps.threads() / size)))         -- as the launcher does
  local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, optimizer = { type = "AdamW",
    params = { lr = 1e-4 } } }, model_func = function()
    local config = { n_layer = 6, n_head = 8, n_embd = 512, vocab_size = 8192, n_positions = 128 }
    return gpt2.new(config, { dropout = 0 })
  end }
  ps.manual_seed(1)
  local x = ps.randint(0, 8192, { 2, 128 }, { dtype = "int32" }):keep()
  local function step()
    local start = ps.now()
    optimizer:zero_grad()
    model:backward(model(x, x))
    optimizer:step()
    return ps.now() - start
  end
  local parts = { model = model, optimizer = optimizer, async = true, keep = 1, quiet = true }
  for _ = 1, WARM do step() end
  local steps = {}
  for i = 1, 2 * WARM do steps[i] = step() end
  local step_s = median(steps)

  local buffer = ffi.new("void *[1]")
  assert(ffi.C.posix_memalign(buffer, 4096, PIECE) == 0)
  for i = 0, PIECE / 4 - 1 do ffi.cast("uint32_t *", buffer[0])[i] = i * 2654435761 end
  local stalls, slowed, writes, disks, syncs, own_bytes = {}, {}, {}, {}, {}, 0
  for round = 0, options.rounds do
    group:barrier()
    local start = ps.now()
    parts.step = round
    local at = checkpoints.save(folder, parts)
    local stall, extra = ps.now() - start, 0
    -- The loop ends with the step in which rank 0 commits, which is the first step after all files are complete.
    repeat
      extra = extra + step() - step_s
    until not ps.any_rank(background.busy())
    extra = extra + step() - step_s
    local _, seconds = checkpoints.wait()
    own_bytes = lfs.attributes(("%s/rank-%05d-of-%05d.safetensors"):format(at, rank, size), "size") or 0
    group:barrier()
    stalls[round], slowed[round] = largest(group, stall), largest(group, extra)
    writes[round] = largest(group, seconds)
    group:barrier()
    disks[round] = largest(group, plain_write(("%s/plain-%d"):format(folder, rank), own_bytes, buffer[0]))
  end
  for round = 1, 3 do
    parts.async, parts.step = false, options.rounds + round
    group:barrier()
    local start = ps.now()
    checkpoints.save(folder, parts)
    syncs[round] = largest(group, ps.now() - start)
  end
  local all = ps.tensor({ own_bytes }, { dtype = "fp64" })
  group:all_reduce(all)
  local bytes = all:item()
  if rank == 0 then
    local first = stalls[0]
    for _, list in ipairs { stalls, slowed, writes, disks } do list[0] = nil end
    local stall, write, disk = median(stalls), bytes / median(writes), bytes / median(disks)
    print(("{\"bench\": \"dist\", \"section\": \"checkpoint\", \"ranks\": %d, \"bytes\": %d, \"step_s\": %.4f, "
      .. "\"stall_s\": %.4f, \"first_stall_s\": %.4f, \"stall_percent\": %.3f, \"slowed_s\": %.3f, "
      .. "\"write_bytes_per_s\": %.4g, \"disk_bytes_per_s\": %.4g, \"write_over_disk\": %.3f, \"sync_s\": %.3f}"
    ):format(size, bytes, step_s, stall, first, 100 * stall / (50 * step_s), median(slowed), write, disk, write / disk,
      median(syncs)))
    for name in lfs.dir(folder) do if name ~= "." and name ~= ".." then folders.remove(folder .. "/" .. name) end end
    lfs.rmdir(folder)
  end
  group:barrier()
  model:close()
end
