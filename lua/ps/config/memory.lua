-- SPDX-License-Identifier: BSD-3-Clause
-- Resolves the tiers and their budgets to { kind, device, host, disk }. The section memory, DeepSpeed's sections for
-- offloading, and PatrickStar's ratios determine the tiers and the budgets.
local check = require "ps.config.check"

local memory = {}

local OPTIMIZER, PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
local TRACER = "client.mem_tracer."

-- Replaces DeepSpeed's old boolean keys with the newer sections.
local function old_spellings(state, zero)
  for old, new in pairs { cpu_offload = "offload_optimizer", cpu_offload_params = "offload_param" } do
    local path = "zero_optimization." .. new .. ".device"
    if zero[old] then
      if state.given[path] and zero[new].device == "none" then
        state:fail("zero_optimization.%s is true and %s is \"none\": they contradict each other", old, path)
      end
      if zero[new].device == "none" then zero[new].device = "cpu" end
    end
  end
end

local function plain_path(path) return #path > 1 and (path:gsub("/+$", "")) or path end

-- Returns the folder of the disk tier. Three settings can set it and must agree.
local function disk_path(state, cfg)
  local zero, chosen, from = cfg.zero_optimization, cfg.memory.disk.path, "memory.disk.path"
  for _, name in ipairs { "offload_optimizer", "offload_param" } do
    local section, path = zero[name], "zero_optimization." .. name
    if section.device == "nvme" and section.nvme_path then
      local here = path .. ".nvme_path"
      if chosen and plain_path(chosen) ~= plain_path(section.nvme_path) then
        state:fail("%s is %s and %s is %s; the disk tier has one folder, so they must agree", from, check.show(chosen),
          here,
          check.show(section.nvme_path))
      end
      if not chosen then chosen, from = section.nvme_path, here end
    elseif section.nvme_path then
      state:note("%s.nvme_path: ignored: %s.device is \"%s\"", path, path, section.device)
    end
  end
  for _, name in ipairs { "offload_optimizer", "offload_param" } do
    if zero[name].device == "nvme" and not chosen then
      state:fail("zero_optimization.%s.device is \"nvme\", but no folder is given: set zero_optimization.%s.nvme_path "
        .. "or memory.disk.path", name, name)
    end
  end
  return chosen
end

-- Resolves the settings of offloading. An explicit "none" keeps the optimizer's state and updates on the device. In
-- this case, settings that would move a part of the state or of the updates to the host are errors. The tier of
-- parameters depends only on the budgets.
local function resolve_offload(state, cfg)
  local optimizer, param = cfg.zero_optimization.offload_optimizer, cfg.zero_optimization.offload_param
  if state.given[OPTIMIZER .. ".device"] and optimizer.device == "none" then
    optimizer.stays = true
    local function refuse(path, value)
      state:fail('%s.device is "none" and %s is %s: they contradict each other', OPTIMIZER, state:shown(path), value)
    end
    if cfg.device ~= "cpu" then
      if not cfg.optimizer.params.use_hybrid_adam then refuse("optimizer.params.use_hybrid_adam", "false") end
      if cfg.use_cpu_embedding == true then refuse("use_cpu_embedding", "true") end
      cfg.use_cpu_embedding = false
    end
  end
  if (state.given[PARAM .. ".device"] or param.device == "cpu") and param.device ~= "nvme" and cfg.device ~= "cpu" then
    state:note("%s.device: \"%s\" has no effect: parameters are on the device while memory.device has room, and "
      .. "otherwise on the host", PARAM, param.device)
  end
end

-- Settings that only apply to chunks, and only if the device is not the host.
local OF_CHUNKS = { "chunk_size", "eviction", "prefetch", "overlap_optimizer", "rates",
  TRACER .. "overall_gpu_mem_ratio", TRACER .. "overall_cpu_mem_ratio", TRACER .. "margin_use_ratio",
  "client.opts.with_async_move", "optimizer.params.use_hybrid_adam" }
local OF_DEVICE = { "rates", TRACER .. "overall_gpu_mem_ratio", TRACER .. "margin_use_ratio",
  "optimizer.params.use_hybrid_adam", OPTIMIZER .. ".ratio" }

local function ignore_given(state, paths, words)
  for _, path in ipairs(paths) do
    if state.given[path] then state:ignore(path, words) end
  end
end

-- Raises an error for settings that need tiers, because plain memory has no tiers.
local function refuse_with_plain(state, cfg)
  for _, path in ipairs { "memory.device", "memory.host", "memory.disk" } do
    if state.given[path] then
      state:fail("memory.kind is \"plain\" and %s is given: plain memory has no budgets", path)
    end
  end
  for path, section in pairs { [OPTIMIZER] = cfg.zero_optimization.offload_optimizer,
    [PARAM] = cfg.zero_optimization.offload_param } do
    if section.device ~= "none" then
      state:fail("memory is \"plain\" and %s.device is \"%s\": plain memory stays where it is made", path,
        section.device)
    end
  end
  ignore_given(state, OF_CHUNKS, "plain memory has no chunks")
end

-- Returns a budget as a number of bytes. The budget may be given as a share of the available memory.
local function resolve(state, path, budget, there)
  if type(budget) ~= "table" then return budget end
  if not there then
    state:fail("%s is \"%g%%\", but the available memory is not known here; give bytes", path, budget.share * 100)
  end
  local bytes = math.floor(budget.share * there)
  if bytes < 1 then
    state:fail("%s is %g%% of %.14g available bytes, less than 1 byte", path, budget.share * 100, there)
  end
  return bytes
end

-- Returns the budget of a tier in bytes. This is the given budget. If no budget is given, it is PatrickStar's ratio
-- (`share`) of the available memory (`there`). Returns nil if the available memory is then unknown.
local function budget(state, tier, given, ratio_key, share, there)
  local path = "memory." .. tier
  if given then
    if state.given[TRACER .. ratio_key] then
      state:ignore(TRACER .. ratio_key, path .. " gives the budget")
    end
    return resolve(state, path, given, there)
  end
  if state.given[TRACER .. ratio_key] then path = state:shown(TRACER .. ratio_key) end
  if there then return resolve(state, path, { share = share }, there) end
end

---@param state ps.config.State
---@param cfg ps.Config
---@param available ps.config.Available
function memory.resolve(state, cfg, available)
  local given, tracer = cfg.memory, cfg.client.mem_tracer
  old_spellings(state, cfg.zero_optimization)
  if given.kind == "plain" then
    refuse_with_plain(state, cfg)
    if given.master == "remainder" then
      state:fail("memory.master is \"remainder\" and memory.kind is \"plain\": remainders are kept in chunks")
    end
    cfg.memory = { kind = "plain" }
    return
  end
  if cfg.device == "cpu" then
    ignore_given(state, OF_DEVICE, "the cpu computes in host memory; there is no other device")
  end
  resolve_offload(state, cfg)
  local path = disk_path(state, cfg)
  if state.given["memory.disk"] and not path then
    state:fail("memory.disk%s is given without memory.disk.path: set the folder of the disk tier",
      given.disk.limit and ".limit" or "")
  end
  if cfg.device == "cpu" and given.device then
    if given.host then
      state:ignore("memory.device", "the cpu computes in host memory, so memory.host applies")
    else
      given.host = given.device
      state:note("memory.device: used as memory.host, because the cpu computes in host memory")
    end
    given.device = nil
  end
  cfg.memory = {
    kind = "chunk",
    master = given.master ~= "full" and given.master or nil,
    device = cfg.device ~= "cpu"
      and budget(state, "device", given.device, "overall_gpu_mem_ratio", tracer.overall_gpu_mem_ratio,
        available.device) or nil,
    host = budget(state, "host", given.host, "overall_cpu_mem_ratio", tracer.overall_cpu_mem_ratio, available.host),
    disk = path and { path = path, limit = resolve(state, "memory.disk.limit", given.disk.limit, available.disk),
      checksums = given.disk.checksums or nil },
  }
  local wanted, there = cfg.memory.device, available.device
  if wanted and there and wanted > there then
    state:note("memory.device: %.2f GiB is more than the %.2f GiB free on %s", wanted / 2 ^ 30, there / 2 ^ 30,
      cfg.device)
  end
end

return memory
