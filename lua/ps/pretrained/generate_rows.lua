-- SPDX-License-Identifier: BSD-3-Clause
-- The sequences that a causal model continues. Their tokens are in one tensor, padded on the left. The caches hold the
-- keys and values of the columns that the model has read. A model needs these functions:
--   positions()                  returns the model's number of positions, or math.huge if it has no limit
--   new_caches(R, S, kind)       returns a table with a table of tensors [R rows, ., S positions, .] for each layer.
--                                The tensors have the dtype of the weights, or the type `kind` if it is given: "bf16"
--                                or "q8_0" (uint8, rows of blocks)
--   next_logits(ids, step)       returns logits [R, V] or [R, 1, V] after the columns ids int [R, n]. These columns
--                                follow the step.at columns whose keys and values are in step.caches.
--                                step.mask: bool [R, at + n], false hides a column; nil hides none
--                                step.position_ids: int64 [R, n]; nil means at, at + 1, ...
--                                step.parts: the result of the model's parts() (nn/parts.lua), if it has that method
-- To generate in a pipeline, a model also needs this function:
--   step_batch(ids, step)        returns a batch with the same inputs for the model's parts (nn/parts.lua). The last
--                                part returns { logits = }
-- A model in a pipeline (engine/pipeline/generate.lua) also has the field where_ids, the device of ids, and these
-- functions, which coordinate the ranks:
--   agreed(read)                 calls read() on all ranks. If it fails on one rank, or if the ranks' requests differ,
--                                raises an error on all ranks
--   together(fn)                 calls fn() on all ranks. Raises one rank's error on all ranks. Returns false if fn
--                                returns false on any rank
-- Sizes: R rows, where R = B * `copies` for B prompts; L columns; V words of the vocabulary.
local caller = require "ps.core.caller"
local create = require "ps.tensor.create"
local error = caller.error

---@class ps.pretrained.Rows
---@field model ps.pretrained.Model
---@field count integer R, the number of rows
---@field copies integer number of adjacent rows per prompt
---@field ids ps.Tensor int32 [R, L]; a prompt's last token is in column `width` - 1
---@field width integer number of columns of the prompts
---@field length integer number of filled columns
---@field parts ps.nn.Part[]? the list of the model's parts, made once for all tokens; nil if the model has no parts
---@field starts integer[] the column of each row's first token, counted from 0
---@field lead integer the largest value of `starts`
---@field base integer? the column of ids whose position in the caches is 0; nil before the first logits
---@field kind? string type of the caches, if it differs from the type of the weights
---@field at integer number of columns, starting at `base`, whose keys and values are in the caches
local Rows = {}
Rows.__index = Rows

local rows = {}

local function device_of(model) return model.where_ids or model:parameters()[1]:device() end

--- Creates rows for prompts, with room for n more tokens.
---@param model ps.pretrained.Model
---@param prompts integer[][] no prompt is empty
---@param n integer
---@param copies integer rows per prompt
---@param kind? "bf16"|"q8_0" type of the caches (default: the type of the weights)
---@return ps.pretrained.Rows
function rows.new(model, prompts, n, copies, kind)
  local width, columns, starts = 0, {}, {}
  for _, prompt in ipairs(prompts) do width = math.max(width, #prompt) end
  for _, prompt in ipairs(prompts) do
    local row = {}
    for i = 1, width do row[i] = prompt[i - width + #prompt] or 0 end
    for _ = 1, copies do
      columns[#columns + 1], starts[#starts + 1] = row, width - #prompt
    end
  end
  local self = setmetatable({ model = model, count = #columns, copies = copies, width = width, length = width,
    starts = starts, lead = math.max(unpack(starts)), at = 0, next = {}, kind = kind,
    parts = model.parts and model:parts() }, Rows)
  self.window = math.min(model:positions(), width + n)
  self.ids = create.zeros({ #columns, width + n }, { dtype = "int32", device = device_of(model) })
  self.ids:narrow(1, 0, width):copy_(create.tensor(columns, { dtype = "int32", device = device_of(model) }))
  return self
end

-- Returns two tensors to compare: the column indices `first`, first + 1, ... as int64 [1, n], and `starts` as
-- int64 [R, 1].
local function columns_and_starts(self, first, n, starts)
  local where = { dtype = "int64", device = self.ids:device() }
  return create.arange(first, first + n, 1, where):reshape(1, n), create.tensor(starts, where):reshape(self.count, 1)
end

--- Returns which of the first n columns hold tokens instead of padding, as bool [R, n]. Returns nil if no column holds
--- padding.
---@param n integer
---@return ps.Tensor?
function Rows:real(n)
  if self.lead == 0 then return nil end
  local columns, starts = columns_and_starts(self, 0, n, self.starts)
  return columns:ge(starts)
end

local DTYPES = { bf16 = "bf16", q8_0 = "uint8" }

-- Raises an error if the model ignored the requested type of its caches.
local function check_caches(caches, kind)
  local _, layer = next(caches)
  local _, t = next(layer or {})
  if not kind or t == nil or t:dtype() == DTYPES[kind] then return end
  error(("generate: kv_cache = %q has no effect on this model, whose new_caches returns %s; remove the option"):format(
    kind, t:dtype()))
end

-- Makes the model read the columns again, starting at column `base`. Empties the caches and assigns position 0 to
-- column `base`.
local function read_from(self, base)
  if not self.caches then
    self.caches = self.model:new_caches(self.count, self.window, self.kind)
    check_caches(self.caches, self.kind)
  end
  self.base, self.at, self.mask, self.shift = base, 0, nil, nil
  if self.lead > base then
    local columns, starts = columns_and_starts(self, base, self.window, self.starts)
    self.mask = columns:ge(starts)                                      -- [R, window]
    self.shift = (starts - base):clamp(0, self.window)                 -- [R, 1], the position of each row's first token
  end
end

--- Ensures that the caches have room for another column. If all of the model's positions are used, the model reads the
--- last half of the columns again.
function Rows:ready()
  if not self.base then read_from(self, math.max(0, self.length - self.window))
  elseif self.at >= self.window then read_from(self, self.length - math.ceil(self.window / 2)) end
end

-- Returns the rows 0, copies, 2 copies, ... of a cache, a mask or ids. These are the first rows of the prompts.
local function firsts(self, t) return t:slice(0, 0, self.count, self.copies) end

-- Copies the caches of each prompt's first row to the prompt's other rows. Only positions before n are copied.
local function hand_on(self, n)
  local prompts = self.count / self.copies
  for _, layer in pairs(self.caches) do
    for _, t in pairs(layer) do
      local read = t:narrow(2, 0, n)
      for i = 1, self.copies - 1 do read:slice(0, i, prompts * self.copies, self.copies):copy_(firsts(self, read)) end
    end
  end
end

--- Runs the model on the columns that it has not read yet. The caller first calls `ready`, outside the scope in which
--- it calls this function.
---@return ps.Tensor logits fp32 [R, V] for the next token
function Rows:logits()
  local from, n = self.base + self.at, self.length - self.base - self.at
  -- All copies of a prompt are still equal, so the model reads each prompt only once.
  local once = self.copies > 1 and self.at == 0 and self.length == self.width
  local function part(t)
    if t == nil or not once then return t end
    return firsts(self, t)
  end
  local step = { at = self.at, caches = self.caches, parts = self.parts }
  if once then
    step.caches = {}
    for i, layer in pairs(self.caches) do
      step.caches[i] = {}
      for name, t in pairs(layer) do step.caches[i][name] = firsts(self, t) end
    end
  end
  if self.mask ~= nil then
    local columns = create.arange(self.at, self.at + n, 1, { dtype = "int64", device = self.ids:device() })
    step.mask = part(self.mask:narrow(1, 0, self.at + n))
    step.position_ids = part((columns:reshape(1, n) - self.shift):clamp(0, self.window))
  end
  local logits = self.model:next_logits(part(self.ids:narrow(1, from, n)), step)
  self.at = self.at + n
  if once then
    hand_on(self, n)
    local V = logits:size(-1)
    logits = logits:reshape(-1, 1, V):expand(self.count / self.copies, self.copies, V):reshape(self.count, V)
  end
  if logits:dim() == 3 then logits = logits:squeeze(1) end
  return logits:dtype() == "fp32" and logits or logits:to("fp32")
end

--- Appends a column of tokens.
---@param ids ps.Tensor int [R]
function Rows:append(ids)
  self.ids:narrow(1, self.length, 1):copy_(ids:reshape(self.count, 1))
  self.length = self.length + 1
end

--- Replaces each row's tokens, keys and values with the tokens, keys and values of another row that continues
--- the same prompt.
---@param order integer[] the index of the source row for each row, from 0
function Rows:reorder(order)
  local same = true
  for r, other in ipairs(order) do same = same and other == r - 1 end
  if same then return end
  local index = create.tensor(order, { dtype = "int64", device = self.ids:device() })
  if self.length > self.width then
    local written = self.ids:narrow(1, self.width, self.length - self.width)
    written:copy_(written:index_select(0, index))
  end
  -- All rows of a prompt are equal in the prompt's columns, so only later columns are copied.
  local first = math.max(0, self.width - self.base)
  if first >= self.at then return end
  for _, layer in pairs(self.caches) do
    for _, t in pairs(layer) do
      local read = t:narrow(2, first, self.at - first)
      read:copy_(read:index_select(0, index))
    end
  end
end

return rows
