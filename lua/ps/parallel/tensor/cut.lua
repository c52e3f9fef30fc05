-- SPDX-License-Identifier: BSD-3-Clause
-- Splits a model's layers among the ranks of tensor parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022). The
-- model's code is written for one process. Tables in the classes of modules name the layers to split. A table's keys
-- are paths relative to the module. In a path, "*" matches any single name, and -1 is the last item of a list:
--
--   GPT2Model.tensor_parallel = {
--     ["wte"] = "vocabulary", ["drop"] = "enter",
--     ["h.*.attn"] = { "divide", "heads", "width" },
--     ["h.*.attn.c_attn"] = { "column", blocks = 3 }, ["h.*.attn.c_proj"] = "row",
--     ["h"] = "inside", ["ln_f"] = "leave",
--   }
--
--   column      a linear layer or a convolution; its outputs are split. blocks: the outputs consist of this number of
--               equal blocks, and each block is split
--   row         a linear layer or a convolution; its inputs are split, and the ranks' products are summed. blocks: the
--               inputs consist of this number of equal blocks, and each block is split
--   attention   an nn.MultiheadAttention; its heads are split
--   channels    an nn.GroupNorm after a column layer; its groups are split
--   columns     an nn.Dropout between a column layer and a row layer; its mask is this rank's part of the mask that a
--               single rank would use
--   vocabulary  a matrix of token embeddings; its rows are split
--   head        an nn.LMHead, or an nn.Linear with one output per word; its rows are split in the same way as the rows
--               of the embedding
--   words       a module with a bias over the vocabulary. Its weight is the embedding at the path `table` in the model.
--               The module gets a field `vocabulary`, which is an nn.ParallelLMHead with this weight and this bias
--   divide      a module; its named fields are divided by the number of ranks. The first field is the number of heads.
--               keys: the names of these fields in a configuration.
--               gather: the input is gathered once for several column layers of the module. If gather is true, the
--               input is gathered for all column layers, before forward. If gather is a list of up to three names, in
--               the order of their calls, only these column layers read the input. The ranks then exchange the rows of
--               the input while they compute the products of these layers
--   enter       with sequence parallelism, each rank has only its own rows, starting at this module's input. The rows
--               have the number of dimensions of the input. With flat = true, they are [rows, C]
--   inside      with sequence parallelism, each rank has only its own rows in this module
--   leave       with sequence parallelism, each rank has only its own rows in this module, and all rows after it
--   partial     parameters that each rank applies to different values; their gradients are summed over the ranks
--   whole       a module that is not split, even if the table of an inner module lists it
--
-- The rest of the model is the same on every rank. The tables of outer modules override the tables of inner modules.
-- The model is created without data (ps.deferred), then split, and then filled. The values on each rank are bit for bit
-- the rank's part of the values of the whole model.
local native = require "ps.core.ffi"
local packed = require "ps.nn.packed"
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local deferred = require "ps.nn.deferred"
local exact = require "ps.core.exact"
local registry = require "ps.nn.registry"
local hooks = require "ps.core.hooks"
local module_hooks = require "ps.nn.hooks"
local tensor_hooks = require "ps.tensor.hooks"
local shard = require "ps.tensor.shard"
local scope = require "ps.core.scope"
local in_place = require "ps.parallel.tensor.in_place"
local layers = require "ps.parallel.tensor.layers"
local C = native.C

local tensor_parallel = {}

---@class ps.tensor_parallel.Claim
---@field module ps.nn.Module
---@field owner? ps.nn.Module the module that has `module` as a field; nil if `module` is the model itself
---@field key any the name or index of `module` in its owner
---@field path string path of `module` in the model
---@field kind string the kind in the table, such as "column"
---@field entry table the entry in the table
---@field named string the name of the entry in the table, for errors: "GPT2Model.tensor_parallel[h.*.attn.c_attn]"

-- -- tables -----------------------------------------------------------------------------------------------------------
-- Calls fn(module, owner, key, path) for each module that a path matches. The path is relative to a module.
local function each_match(module, names, i, path, fn)
  local name = names[i]
  local function go(child, key)
    if not nn_module.is_module(child) then return end
    local at = path == "" and tostring(key) or path .. "." .. tostring(key)
    if i == #names then fn(child, module, key, at) else each_match(child, names, i + 1, at, fn) end
  end
  if name == "*" then
    for key, child in registry.members(module) do go(child, key) end
    return
  end
  local key = tonumber(name) or name
  if key == -1 then key = module.length - 1 end
  go(module[key], key)
end

local function split(path)
  local names = {}
  for name in path:gmatch "[^.]+" do names[#names + 1] = name end
  return names
end

local KINDS = { column = true, row = true, vocabulary = true, head = true, divide = true, enter = true, inside = true,
  leave = true, partial = true, whole = true, words = true, attention = true, channels = true, columns = true }
local KIND_NAMES = "attention, channels, column, columns, divide, enter, head, inside, leave, partial, row, "
  .. "vocabulary, whole and words"

-- Maps the kind of a claim to a layer that is split together with the claimed module: { field of the module, the
-- layer's kind }.
local WITH = { attention = { "out_proj", "row" } }

-- Returns the claims that the tables of a model and of its modules make, sorted by path.
local function claims_of(model)
  local claims, by_module, tables = {}, {}, 0
  for prefix, module in model:named_modules() do
    local list = module.tensor_parallel
    for path, entry in pairs(type(list) == "table" and list or {}) do
      tables = tables + 1
      entry = type(entry) == "table" and entry or { entry }
      if not KINDS[entry[1]] then
        caller.error(("%s.tensor_parallel: %s is %s; there are %s"):format(module.class_name, path, tostring(entry[1]),
          KIND_NAMES))
      end
      local found = false
      local function claim(child, owner, key, at, kind, given)
        if by_module[child] then return end                   -- an outer module's table claims this module
        by_module[child] = { module = child, owner = owner, key = key, path = at, kind = kind, entry = given,
          named = ("%s.tensor_parallel[\"%s\"]"):format(module.class_name, path) }
        claims[#claims + 1] = by_module[child]
        local with = WITH[kind]
        local inner = with and child[with[1]]
        if nn_module.is_module(inner) then claim(inner, child, with[1], at .. "." .. with[1], with[2], { with[2] }) end
      end
      each_match(module, split(path), 1, prefix, function(child, owner, key, at)
        found = true
        claim(child, owner, key, at, entry[1], entry)
      end)
      if not found and not entry.optional then
        caller.error(("%s.tensor_parallel: no module of the model is %s"):format(module.class_name, path))
      end
    end
  end
  if tables == 0 then return nil end
  table.sort(claims, function(a, b) return a.path < b.path end)
  return claims
end

-- -- cutting ----------------------------------------------------------------------------------------------------------
---@class ps.tensor_parallel.Cut state while a model is split
---@field model ps.nn.Module
---@field region ps.nn.Region
---@field made table<ps.nn.Module, ps.nn.Module> maps each module that was replaced to its replacement
---@field gathered table<ps.nn.Module, boolean> column layers whose input has already been gathered
---@field claims ps.tensor_parallel.Claim[]
---@field parts table<integer, ps.Tensor> this rank's shards, by the address of the whole parameter
local Cut = {}
Cut.__index = Cut

-- Replaces the module of a claim with another module.
local function put(claim, module)
  rawset(module, "training", claim.module.training)
  module_hooks.move(claim.module, module)
  if rawget(claim.owner, claim.key) ~= nil then rawset(claim.owner, claim.key, module)
  else claim.owner[claim.key] = module end
end

-- Returns this rank's part of a whole parameter, as described by `given`.
function Cut:part_of(whole, given, name)
  local part = self.parts[nn_module.address(whole)]
  if part then return part end
  local desc = { dim = given.dim, blocks = given.blocks, padded = given.padded, index = self.region.rank,
    count = self.region.size, full_shape = whole:shape() }
  part = deferred.cut(self.model, whole, shard.new(desc, name))
  tensor_hooks.move(whole, part)
  self.parts[nn_module.address(whole)] = part
  return part
end

-- Copies the parameter `key` of the claim's module to the module `to`. If `given` describes a shard, only this rank's
-- shard is copied. Otherwise the whole parameter is copied.
function Cut:take(claim, to, key, given)
  local whole = claim.module[key]
  if whole == nil then return end
  local blocks = packed.of(claim.module)
  if blocks then
    caller.error(("tensor_parallel: the weight of %s is packed (%s) and cannot be cut; load the model without "
      .. "keep_quantized, or use ZeRO (zero_optimization) or a pipeline (pipeline) instead of tensor parallelism")
      :format(claim.path, blocks.name))
  end
  local name = claim.path .. "." .. key
  to[key] = given and self:part_of(whole, given, name) or whole
  local adapters = rawget(self.model, "adapters_")            -- ps.lora.wrap sets it
  if not given or not adapters then return end
  adapters:cut_saved(name, function(holder, inner)
    registry.put(holder, inner, self:part_of(holder[inner], given, name))
  end)
end

-- Maps a class to true if its weight is [out, in], and to false if its weight is [in, out].
local OUT_IN = { Linear = true, Conv1D = false }
local LINEARS = { Linear = true, Conv1D = false, Conv1d = true, Conv2d = true }

local function check_class(claim, classes, what)
  if classes[claim.module.class_name] == nil then
    local names = {}
    for name in pairs(classes) do names[#names + 1] = "nn." .. name end
    table.sort(names)
    local last = table.remove(names)
    local own = {}
    for key, child, kind in registry.members(claim.module) do
      if kind == "module" and classes[child.class_name] ~= nil then own[#own + 1] = tostring(key) end
    end
    local advice = #own == 0 and "" or (". Instead of %s, name in the table the layers inside it that are to be " ..
      "cut: %s")
      :format(claim.named, table.concat(own, ", "))
    caller.error(("tensor_parallel: %s is a %s; %s cut %s%s"):format(claim.path, claim.module.class_name, what,
      (#names > 0 and table.concat(names, ", ") .. " and " or "") .. last, advice))
  end
end

-- Returns a function that replaces a whole linear layer with a layer that has this rank's part.
local function linear(class)
  return function(cut, claim, out_dim)
    local old = claim.module
    check_class(claim, LINEARS, "columns and rows")
    local out_in = OUT_IN[old.class_name]
    local options = { region = cut.region, out_in = out_in, parameters = false }
    if out_dim and cut.gathered[old] then options.gather_input = false end
    local new = class(old.inputs, old.outputs, options)
    local blocks = claim.entry.blocks
    cut:take(claim, new, "weight", { dim = (out_in == out_dim) and 0 or 1, blocks = blocks })
    cut:take(claim, new, "bias", out_dim and { dim = 0, blocks = blocks } or nil)
    rawset(claim.owner, "parallel", true)
    return new
  end
end

local column, row = linear(layers.ColumnParallelLinear), linear(layers.RowParallelLinear)

-- Describes how the rows of a vocabulary are split. The number of rows is padded to a multiple of the number of ranks.
local function rows_of(cut, whole) return { dim = 0, padded = -whole:size(0) % cut.region.size } end

local REPLACE = {
  column = function(cut, claim)
    if in_place.CONVOLUTIONS[claim.module.class_name] then return in_place.conv_column(cut, claim) end
    return column(cut, claim, true)
  end,
  row = function(cut, claim)
    if in_place.CONVOLUTIONS[claim.module.class_name] then return in_place.conv_row(cut, claim) end
    return row(cut, claim, false)
  end,
  vocabulary = function(cut, claim)
    local old = claim.module
    check_class(claim, { Embedding = true }, "vocabularies")
    local new = layers.VocabParallelEmbedding(old.rows, old.width, { region = cut.region, padding_idx = old.padding_idx,
      enter = claim.entry.enter, parameters = false })
    cut:take(claim, new, "weight", rows_of(cut, old.weight))
    return new
  end,
  head = function(cut, claim)
    local old = claim.module
    check_class(claim, { LMHead = true, Linear = true }, "heads")
    local tied = rawget(old, "tied")
    local new = layers.ParallelLMHead(old.inputs, old.outputs, { region = cut.region, tied = tied and cut.made[tied],
      parameters = false })
    if not tied then
      cut:take(claim, new, "weight", rows_of(cut, old.weight))
      if old.bias ~= nil then cut:take(claim, new, "bias", rows_of(cut, old.bias)) end
    end
    return new
  end,
}

-- Handles a module with a bias over the vocabulary. Creates an nn.ParallelLMHead for the module. This head has the
-- embedding's weight and the module's bias. A module with a weight of its own (decoder) does not change.
local function words(cut, claim)
  local module, found = claim.module, nil
  if module.decoder then return end
  each_match(cut.model, split(claim.entry.table), 1, "", function(child) found = child end)
  if not found or found.class_name ~= "VocabParallelEmbedding" then
    caller.error(("%s: table = %s is not an embedding of the model that is cut by rows"):format(claim.named,
      tostring(claim.entry.table)))
  end
  cut:take(claim, module, "bias", rows_of(cut, module.bias))
  rawset(module, "vocabulary", layers.ParallelLMHead(found.width, found.rows, { region = cut.region, tied = found,
    biased = module }))
end

-- Maps an attention module, or a module inside it, to the index of this rank's first head. F.attention with dropout
-- uses the index.
local first_heads = setmetatable({}, { __mode = "k" })
-- Maps each module that contains column layers, and all modules inside it, to the region. Attention in these modules
-- uses the heads of the column layers.
local with_columns = setmetatable({}, { __mode = "k" })
hooks.on("first_head", function(heads)
  local module = nn_module.called[tonumber(C.ps_module_now())]
  local region = with_columns[module]
  return first_heads[module] or region and region.rank * heads
end)

local function note_heads(module, first) first_heads[module] = first end

-- Records the modules in which attention uses the heads of column layers. These are modules whose linear layers are all
-- split.
local function note_columns(cut, claim)
  if not claim.owner then return end
  local claimed = {}
  for _, other in ipairs(cut.claims) do claimed[other.module] = other.kind == "column" or other.kind == "row" end
  for _, child, kind in registry.members(claim.owner) do
    if kind == "module" and OUT_IN[child.class_name] ~= nil and not claimed[child] then return end
  end
  for _, module in claim.owner:named_modules() do with_columns[module] = cut.region end
end

-- Divides the module's fields that the entry names by the number of ranks. If the entry has `gather`, also makes the
-- module gather its input.
local function divide(cut, claim)
  local module, size, region = claim.module, cut.region.size, cut.region
  local fields = { unpack(claim.entry, 2) }
  for _, field in ipairs(fields) do
    local value = module[field]
    if type(value) ~= "number" or value % size ~= 0 then
      local key = (claim.entry.keys or {})[field] or field
      caller.error(("tensor_parallel.size = %d: %s has %s = %s, which is not a multiple of the size"):format(
        size, claim.path, key, tostring(value)))
    end
    module[field] = value / size
  end
  if fields[1] then
    module.first_head = region.rank * module[fields[1]]
    for _, child in module:named_modules() do first_heads[child] = module.first_head end
  end
  local names = claim.entry.gather
  if not names then return end
  local forward = module.forward
  local function whole(self, x, ...) return forward(self, region:gather(x), ...) end
  if names == true then
    for _, child in module:named_modules() do cut.gathered[child] = true end
    rawset(module, "forward", whole)
    return
  end
  local n = type(names) == "table" and #names
  if not n or n < 1 or n > C.PS_MAX_COLUMNS then
    caller.error(("%s: gather %s; it must be true or a list of 1 to %d"):format(claim.named,
      n and ("names %d columns"):format(n) or "is " .. tostring(names), C.PS_MAX_COLUMNS))
  end
  local prefix, left = claim.path .. ".", {}
  for _, other in ipairs(cut.claims) do
    if other.kind == "column" and other.path:sub(1, #prefix) == prefix then
      left[other.path:sub(#prefix + 1)] = other.module
    end
  end
  for _, name in ipairs(names) do
    if not left[name] or name:find(".", 1, true) then
      caller.error(("%s: gather names %s, which is not a column of the module; gather = true gathers for the "
        .. "whole module")
        :format(claim.named, tostring(name)))
    end
    cut.gathered[left[name]], left[name] = true, nil
  end
  if next(left) then
    caller.error(("%s: gather leaves out %s, a column of the module"):format(claim.named, next(left)))
  end
  local function forward_of_columns(self, x, ...)
    if region.pieces == 1 or not region:has_part(x) then return whole(self, x, ...) end
    local list = {}
    for i, name in ipairs(names) do list[i] = self[name] end
    region:begin_columns(list, x)
    return forward(self, x, ...)
  end
  rawset(module, "forward", exact.like(forward_of_columns, forward))
end

-- -- sequence parallelism ---------------------------------------------------------------------------------------------
-- Handles a module's parameters that are whole on all ranks but are applied only to this rank's rows. Marks them as
-- parameters with partial gradients, which are summed over the ranks. In a forward in which ranks do not share the
-- rows, these parameters are applied to all rows on all ranks. Their gradient is then counted only once.
local function partial_inside(cut, module)
  local names, region = {}, cut.region
  for key, value, kind in registry.members(module) do
    if kind == "param" and not shard.of(value) then
      shard.set_partial(value)
      names[#names + 1] = key
    end
  end
  -- An adapter handles its own bias in the same way.
  if #names == 0 or module.class_name == "RowParallelLinear" then return end
  local forward = module.forward
  local function restore(fields, ok, ...)
    for key, t in pairs(fields) do registry.put(module, key, t) end
    if not ok then error((...), 0) end
    return ...
  end
  local function forward_once(self, ...)
    if region.on or not scope.grad_enabled() then return forward(self, ...) end
    local fields = {}
    for _, key in ipairs(names) do
      fields[key] = self[key]
      registry.put(self, key, region:once(fields[key]))
    end
    return restore(fields, pcall(forward, self, ...))
  end
  rawset(module, "forward", exact.like(forward_once, forward))
end

-- Marks the modules of a claim as inside the region. `done` contains modules that are already marked, or whose
-- gradients are partial in any case.
local function inside(cut, claim, done)
  for _, module in claim.module:named_modules() do
    if not done[module] then partial_inside(cut, module) end
    done[module] = true
    if module.class_name == "Dropout" then rawset(module, "region", cut.region) end
  end
end

-- Makes the region begin at a module's input. `leave` makes the region end after a module's output.
local function enter(cut, claim)
  local module, region = claim.module, cut.region
  local forward = module.forward
  local function entering(self, x, ...) return forward(self, region:enter(x), ...) end
  rawset(module, "forward", exact.like(entering, forward))
end

local function leave(cut, claim)
  local module, region = claim.module, cut.region
  local forward = module.forward
  local function leaving(...)
    local y = region:leave(forward(...))
    region.on = false                                       -- after this module, all ranks have all rows
    return y
  end
  rawset(module, "forward", exact.like(leaving, forward))
end

-- Makes each forward of the model begin with all rows on all ranks. If keys are cached (generate), each part begins
-- this way, too. In a pipeline, row.lua restores the state that the region had when a part began.
local function begin_forwards(model, region)
  local forward, parts_of = model.forward, model.parts
  local function beginning(...)
    region:begin()
    return forward(...)
  end
  rawset(model, "forward", exact.like(beginning, forward))
  if type(parts_of) ~= "function" then return end
  rawset(model, "parts", function(...)
    local list = {}
    for i, part in ipairs(parts_of(...)) do
      local copy = {}
      for key, value in pairs(part) do copy[key] = value end
      function copy.forward(carry, batch)
        local cached = type(batch) == "table" and (batch.caches ~= nil or batch.cached)
        if cached or i == 1 then region:begin(cached) end
        return part.forward(carry, batch)
      end
      list[i] = copy
    end
    return list
  end)
end

-- -- tied tables ------------------------------------------------------------------------------------------------------
-- The heads of embeddings whose rows are split. If the weight that F.linear or F.lm_loss gets is an embedding's weight,
-- the function uses the embedding's head.
local heads = setmetatable({}, { __mode = "k" })
hooks.on("tied_head", function(weight)
  for head in pairs(heads) do if rawequal(rawget(head, "tied").weight, weight) then return head end end
end)

-- Creates the head of each embedding whose rows are split.
local function make_heads(cut)
  for _, new in pairs(cut.made) do
    if new.class_name == "VocabParallelEmbedding" then
      local head = layers.ParallelLMHead(new.width, new.rows, { region = cut.region, tied = new })
      heads[head] = true
      rawset(new, "cut_head", head)                         -- the head lives as long as the embedding
    end
  end
end

-- Replaces each linear layer that shares the weight of a split embedding with the embedding's head. Raises an error for
-- any other module that shares a split weight, because the module would keep a whole copy that is trained separately.
local function find_tied(cut)
  local tables, found = {}, {}
  for old, new in pairs(cut.made) do
    if new.class_name == "VocabParallelEmbedding" then tables[nn_module.address(old.weight)] = true end
  end
  registry.walk(cut.model, function(path, module, kind, owner, key)
    if kind == "module" and module.class_name == "Linear" and tables[nn_module.address(module.weight)] then
      found[#found + 1] = { module = module, owner = owner, key = key, path = path, kind = "head", entry = { "head" },
        named = path }
    end
  end)
  for _, claim in ipairs(found) do put(claim, REPLACE.head(cut, claim)) end
  registry.walk(cut.model, function(name, value, kind)
    if kind == "param" and cut.parts[nn_module.address(value)] then
      caller.error(("tensor_parallel: %s is tied to a parameter that is cut: name its module in the table, too")
        :format(name))
    end
  end)
end

-- Returns the names of parameters that every rank has as a whole. A name has "*" in place of layer indices, and is
-- listed once.
local function replicated(model)
  local seen, list = {}, {}
  for name, p in model:named_parameters() do
    name = name:gsub("%.%d+%.", ".*.")
    if not shard.of(p) and not seen[name] then seen[name], list[#list + 1] = true, name end
  end
  return list
end

---@class ps.tensor_parallel.How
---@field group ps.Group the ranks that share the layers
---@field sequence boolean whether to use sequence parallelism
---@field keep_gathered boolean whether gathered rows are kept for backward
---@field pieces? integer number of pieces in which rows are exchanged while products are computed; with 1 or nil, rows
--- are exchanged before and after the products
---@field note fun(text: string)

--- Splits a model that was created by ps.deferred and has no data yet.
---@param model ps.nn.Module
---@param how ps.tensor_parallel.How
---@return ps.nn.Region
function tensor_parallel.cut(model, how)
  local claims = claims_of(model)
  if not claims then
    error(("tensor_parallel: %s has no table tensor_parallel that says how to cut its layers "
      .. "(docs/tensor_parallel.md)"):format(model.class_name), 0)
  end
  if rawget(model, "unpad") == true then
    error("tensor_parallel: with unpad = true the ranks cannot share the rows of a batch equally; make the model "
      .. "without it", 0)
  end
  local region = layers.Region.new(how.group, how.sequence, how.keep_gathered, how.pieces)
  scope.carry_state(region)
  region.keeps_dims = true
  for _, claim in ipairs(claims) do region.keeps_dims = region.keeps_dims and not claim.entry.flat end
  local cut = setmetatable({ model = model, region = region, made = {}, parts = {}, gathered = {},
    claims = claims }, Cut)
  local function of_kind(kind, fn)
    for _, claim in ipairs(claims) do if claim.kind == kind then fn(cut, claim) end end
  end
  of_kind("divide", divide)
  of_kind("column", note_columns)
  for _, kind in ipairs { "attention", "channels", "columns" } do
    of_kind(kind, function(_, claim)
      in_place.check(claim)
      in_place[kind](cut, claim, note_heads)
    end)
  end
  for _, kind in ipairs { "column", "row", "vocabulary", "head" } do
    of_kind(kind, function(_, claim)
      local new = REPLACE[kind](cut, claim)
      if not new then return end                            -- the function changed the module itself
      cut.made[claim.module] = new
      put(claim, new)
      local cut_into = rawget(claim.module, "cut_into")       -- set for a layer with an adapter (ps.lora)
      if cut_into then cut_into(claim.module, new, kind, claim, cut) end
      local adapters = rawget(model, "adapters_")
      if adapters then adapters:replaced(claim.module, new) end
    end)
  end
  of_kind("words", words)
  local done = {}
  of_kind("partial", function(_, claim)
    for _, module in claim.module:named_modules() do done[module] = true end
    for _, p in claim.module:named_parameters() do shard.set_partial(p) end
  end)
  if how.sequence then
    for _, kind in ipairs { "inside", "enter", "leave" } do
      of_kind(kind, function(_, claim) inside(cut, claim, done) end)
    end
    of_kind("enter", enter)
    of_kind("leave", leave)
  end
  find_tied(cut)
  make_heads(cut)
  rawset(model, "parallel_region", region)
  begin_forwards(model, region)
  how.note(("tensor_parallel: whole on all %d ranks: %s"):format(region.size, table.concat(replicated(model), ", ")))
  return region
end

--- Creates a model and splits its layers. This process has only its own part of each split layer.
---@param model_func fun(): ps.nn.Module
---@param how ps.tensor_parallel.How
---@param where {device: string, stage?: fun(parameter: ps.Tensor)} stage: is called with each parameter after the
---  parameter has its values
---@return ps.nn.Module
---@return ps.nn.Region
function tensor_parallel.make(model_func, how, where)
  local model = deferred.make(model_func)
  local region = tensor_parallel.cut(model, how)
  local off = where.stage and hooks.on("parameter", where.stage)
  local ok, problem = pcall(deferred.materialize, model, { device = where.device })
  if off then off() end
  if not ok then error(problem, 0) end
  return model, region
end

return tensor_parallel
