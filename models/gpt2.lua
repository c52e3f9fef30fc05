-- SPDX-License-Identifier: BSD-3-Clause
-- GPT-2. Parameter names, layouts ([in, out]) and initialisation are the same as in Hugging Face's GPT2LMHeadModel,
-- GPT2ForSequenceClassification, GPT2ForTokenClassification and GPT2Model. The head of the language model uses the
-- token embedding as its weight, so the head has no parameter of its own. With tie_word_embeddings = false, the head
-- has its own weight. The settings are in gpt2_config.lua, and code that all models share is in ps/pretrained/.
--
--   local gpt2 = require "models.gpt2"
--   local model = gpt2.new("gpt2", { dtype = "bf16" })         -- a preset, or a table of config.json's fields
--   local loss = model(x, y)                                   -- x, y: int [B, T]
--   local model = gpt2.from_pretrained("some/folder")          -- config.json + model.safetensors
--
-- Sizes: B batch, T positions, C width, H heads, D = C / H, V vocabulary, L layers, K labels.
local ps = require "ps"
local caller = require "ps.caller"
local nn = require "ps.nn"
local parts = require "ps.nn.parts"
local generate = require "ps.pretrained.generate"
local heads = require "ps.pretrained.heads"
local Model = require "ps.pretrained.model"
local pretrained = require "ps.pretrained"
local settings = require "ps.pretrained.settings"
local config_rules = require "models.gpt2_config"
local F = ps.functional
local error = caller.error

-- Applies `layer` to y and dropout to the result, and adds x. Without dropout, the epilogue of the matrix product adds
-- x.
local function project(layer, drop, y, x)
  if not drop:active() then return layer(y, x) end
  return x + drop(layer(y))
end

local Attention = nn.class("Attention")
Attention.unscoped = true

-- `layer` is the index of the layer, counted from 0.
function Attention:init(config, where, layer)
  local C = config.n_embd
  self.heads, self.width = config.n_head, C
  self.c_attn = nn.Conv1D(C, 3 * C, where)
  local scaled = config.initializer_range / math.sqrt(2 * config.n_layer)
  self.c_proj = nn.Conv1D(C, C, { std = scaled, dtype = where.dtype, device = where.device })
  self.attn_dropout = nn.Dropout(config.attn_pdrop)
  self.resid_dropout = nn.Dropout(config.resid_pdrop)
  local scale                                                           -- nil means 1 / sqrt(D)
  if not config.scale_attn_weights then scale = 1 end
  if config.scale_attn_by_inverse_layer_idx then scale = (scale or 1 / math.sqrt(C / config.n_head)) / (layer + 1) end
  self.scale = scale
  self.plain = { causal = true, dropout = 0, scale = scale }
end

-- Computes attention. x [B, T, C] is the residual stream, and h [B, T, C] is x after the norm. cache is nil or {kv [B,
-- 2H, S, D]}, with the keys and values of the positions before `at`. mask is nil, bool [B, T] or int32 [B, T]. A bool
-- mask is false at positions whose keys are hidden. An int32 mask contains segment numbers.
function Attention:forward(h, x, cache, at, mask)
  local qkv = self.c_attn(h)                                            -- shape [B, T, 3C]
  if cache then return self.c_proj(heads.attend_cached(self, cache, at, mask, qkv), x) end
  local options, drops = self.plain, self.attn_dropout:active()
  if drops or mask ~= nil then
    options = { causal = true, dropout = drops and self.attn_dropout.p or 0, scale = self.scale, mask = mask,
      first_head = self.first_head }
  end
  local y = F.attention_packed(qkv, self.heads, options)
  return project(self.c_proj, self.resid_dropout, y, x)
end

local MLP = nn.class("MLP")
MLP.unscoped = true

function MLP:init(config, where)
  local C = config.n_embd
  local hidden = config.n_inner or 4 * C
  local scaled = config.initializer_range / math.sqrt(2 * config.n_layer)
  self.c_fc = nn.Conv1D(C, hidden, where)
  self.c_proj = nn.Conv1D(hidden, C, { std = scaled, dtype = where.dtype, device = where.device })
  self.dropout = nn.Dropout(config.resid_pdrop)
  self.gelu, self.activation = settings.activation(config.activation_function)
end

-- Returns whether a layer is a plain nn.Conv1D. If a script has replaced the layer, or if it has an adapter, the result
-- is false, and the layer's own forward must run.
local function is_ours(layer) return parts.is_plain(layer, nn.Conv1D) end

-- `cached` is true in a generation step. On the cpu, one fused op then replaces three ops, with bit-identical results.
function MLP:forward(h, x, cached)
  local one = self.gelu == "tanh" and not self.parallel and is_ours(self.c_fc) and is_ours(self.c_proj)
  if one and (cached and h:device() == "cpu" or ps.prefers_fused(h:device())) then return self:fused(h, x) end
  local y = self.c_fc(h)                                                -- shape [B, T, 4C]
  return project(self.c_proj, self.dropout, self.gelu and F.gelu(y, self.gelu) or self.activation(y), x)
end

-- Computes the MLP with one fused op, for which GPUs have fast kernels. On a GPU with bf16 or fp16 values, the fused op
-- rounds less often than separate ops, so results differ slightly.
function MLP:fused(h, x)
  local fc, proj, drops = self.c_fc, self.c_proj, self.dropout:active()
  local y = F.mlp(h, fc.weight, fc.bias, proj.weight, proj.bias, { out_in = false, residual = not drops and x or nil })
  return drops and x + self.dropout(y) or y
end

local Block = nn.class("Block")

function Block:init(config, where, layer)
  local norm = { eps = config.layer_norm_epsilon, dtype = where.dtype, device = where.device }
  self.ln_1 = nn.LayerNorm(config.n_embd, norm)
  self.attn = Attention(config, where, layer)
  self.ln_2 = nn.LayerNorm(config.n_embd, norm)
  self.mlp = MLP(config, where)
end

function Block:forward(x, cache, at, mask)
  x = self.attn(self.ln_1(x), x, cache, at, mask)
  return self.mlp(self.ln_2(x), x, cache ~= nil)
end

local INPUTS = { input_ids = "tensor", attention_mask = "tensor", token_type_ids = "tensor", position_ids = "tensor",
  segment_ids = "tensor" }
local LABELLED, WEIGHTED = { labels = "tensor" }, { labels = "tensor", loss_weights = "tensor" }
for name, kind in pairs(INPUTS) do LABELLED[name], WEIGHTED[name] = kind, kind end
local ONE_LABEL = heads.without_segments(LABELLED)

local BODY = { wte = true, wpe = true, h = true, ln_f = true }

---@class GPT2Model: ps.pretrained.Model
local GPT2Model = nn.class("GPT2Model", Model)
GPT2Model.base, GPT2Model.body, GPT2Model.inputs = "transformer", BODY, INPUTS

---@param config table config.json's fields; missing fields have GPT-2's defaults
---@param given? {dtype?: string, device?: string, recompute?: boolean}
function GPT2Model:init(config, given)
  local full, where = self:begin(config, given)
  self.wte = nn.Embedding(full.vocab_size, full.n_embd, where)
  self.wpe = nn.Embedding(full.n_positions, full.n_embd, where)
  self.drop = nn.Dropout(full.embd_pdrop)
  self.h = nn.ModuleList()
  for layer = 0, full.n_layer - 1 do self.h:append(Block(full, where, layer)) end
  self.ln_f = nn.LayerNorm(full.n_embd, { eps = full.layer_norm_epsilon, dtype = where.dtype, device = where.device })
  if given and given.recompute then self:recompute_blocks() end
end

-- How the layers are split over ranks (ps/parallel/tensor/cut.lua).
GPT2Model.tensor_parallel = {
  ["wte"] = "vocabulary", ["drop"] = { "enter", flat = true },
  ["h"] = "inside",
  ["h.*.attn"] = { "divide", "heads", "width", keys = { heads = "n_head", width = "n_embd" } },
  ["h.*.attn.c_attn"] = { "column", blocks = 3 }, ["h.*.attn.c_proj"] = "row",
  ["h.*.mlp.c_fc"] = "column", ["h.*.mlp.c_proj"] = "row",
  ["ln_f"] = "leave",
}

-- Checks a batch (a table of named tensors) and returns the table that the parts read. This table contains input_ids
-- [B, T], mask, token_type_ids and position_ids. mask is bool [B, T], int32 [B, T] with segment numbers, or nil.
local function read(self, given, body)
  local ids = given.input_ids
  heads.same_shapes("gpt2", given, { "attention_mask", "token_type_ids", "position_ids" },
    { position_ids = true, token_type_ids = true })
  local segments, places = heads.segments("gpt2", self.config, given)
  if places == nil and ids:size(1) > self.config.n_positions then
    error(("gpt2: input_ids has %d positions per row, the model has %d: shorten the rows"):format(ids:size(1),
      self.config.n_positions), 0)
  end
  heads.same_device("gpt2", ids, body.ln_f.weight)
  return { input_ids = ids, mask = segments or heads.mask(given.attention_mask), token_type_ids = given.token_type_ids,
    position_ids = places }
end

-- Returns the embeddings [B or 1, T, C] of the positions in `place` int [B or 1, T]. If place is nil, the positions
-- start at `at`.
local function positions(body, ids, place, at)
  if place == nil and parts.is_plain(body.wpe, nn.Embedding) then return body.wpe.weight:narrow(0, at, ids:size(1)) end
  return body.wpe(place ~= nil and place or ps.arange(at, at + ids:size(1), 1, { dtype = "int64",
    device = ids:device() }):reshape(1, -1))
end

-- Returns the embeddings [B, T, C] of ids int [B, T]. The first id of each row is at position `at`, unless the batch
-- contains position_ids.
local function embed(body, ids, batch, at)
  local x = body.wte(ids)                                               -- shape [B, T, C]
  x = x + positions(body, ids, batch.position_ids, at)
  if batch.token_type_ids ~= nil then x = x + body.wte(batch.token_type_ids) end
  return body.drop(x)
end

-- Returns the model's parts: "embed", one part per layer ("h.0" to "h.L-1"), and the part named `last`. The carry
-- between parts is { x = [B, T, C] }, the residual stream. The last part applies the last norm and calls fn(x, batch).
-- `modules` are the other modules that the last part uses. In a generation step, the batch contains caches (see
-- step_batch), and x of fn contains only the last position, [B, 1, C].
local function list_parts(self, last, modules, fn)
  local body = self.transformer or self
  local list = { { name = "embed", modules = { body.wte, body.wpe }, forward = function(_, batch)
    return { x = embed(body, batch.input_ids, batch, batch.at or 0) }
  end } }
  for i, block in body.h:each() do
    list[#list + 1] = { name = "h." .. i, modules = { block }, forward = function(carry, batch)
      return { x = block(carry.x, batch.caches and batch.caches[i], batch.at or 0, batch.mask) }
    end }
  end
  list[#list + 1] = { name = last, modules = { body.ln_f, unpack(modules) }, forward = function(carry, batch)
    return fn(body.ln_f(batch.caches and heads.last_position(carry.x) or carry.x), batch)
  end }
  return heads.segmented(list)
end

--- Returns the table that the parts read. `given` is a table of named tensors, or token ids [B, T].
---@param given table|ps.Tensor
---@return table<string, ps.Tensor> batch
function GPT2Model:batch_of(given) return read(self, heads.batch(self, given), self) end

---@return ps.nn.Part[]
function GPT2Model:parts()
  return list_parts(self, "ln_f", {}, function(x) return { last_hidden_state = x } end)
end

--- Returns the last hidden states [B, T, C]. `given` is a table of named tensors, or token ids [B, T].
---@param given table|ps.Tensor
---@return {last_hidden_state: ps.Tensor}
function GPT2Model:forward(given) return parts.fold(self:parts(), self:batch_of(given)) end

function GPT2Model:vocabulary() return { { self.wte, "weight" } } end

-- `looked_up` is the number of elements of embeddings that are used only to look up rows. The classification classes
-- share this function, because their heads use no embedding as weight.
function GPT2Model:costs()
  local c = self.config
  return { looked_up = (c.n_positions + c.vocab_size) * c.n_embd, layers = c.n_layer, width = c.n_embd,
    positions = c.n_positions }
end

-- -- language model -------------------------------------------------------------------------------------------------
---@class GPT2: ps.pretrained.Model
---@field config table
local GPT2 = nn.class("GPT2LMHeadModel", Model)
GPT2.base, GPT2.prefix, GPT2.body = "transformer", "transformer", BODY
GPT2.inputs = WEIGHTED
GPT2.ties = { ["lm_head.weight"] = "transformer.wte.weight" }
GPT2.tensor_parallel = { ["transformer.ln_f"] = "inside", ["tied_head"] = { "head", optional = true },
  ["lm_head"] = { "head", optional = true } }

-- The first part of init, which is the same for all classes with a head.
local function begin(self, config, given)
  local full, where = self:begin(config, given)
  self.transformer = GPT2Model(full, { dtype = where.dtype, device = where.device })
  return full, where
end

local function finish(self, given)
  if given and given.recompute then self:recompute_blocks() end
end

---@param config table config.json's fields; missing fields have GPT-2's defaults
---@param given? {dtype?: string, device?: string, recompute?: boolean}
function GPT2:init(config, given)
  local full, where = begin(self, config, given)
  if full.tie_word_embeddings then
    rawset(self, "tied_head", nn.LMHead(full.n_embd, full.vocab_size, { tied = self.transformer.wte }))
  else
    self.lm_head = nn.LMHead(full.n_embd, full.vocab_size, { std = where.std, dtype = where.dtype,
      device = where.device })
  end
  finish(self, given)
end

--- Returns the head, which computes logits [.., V], or the loss of these logits, from the last norm's output [.., C].
--- The head's weight is the token embedding or a parameter of its own.
---@return ps.nn.LMHead
function GPT2:head() return self.lm_head or self.tied_head end

function GPT2:vocabulary()
  return { { self.transformer.wte, "weight" }, self.lm_head and { self.lm_head, "weight" } }
end

function GPT2:costs()
  local cost = GPT2Model.costs(self)
  if not self.lm_head then cost.looked_up = self.config.n_positions * self.config.n_embd end
  return cost
end

--- Returns the number of targets in a batch (see heads.count_targets).
---@param given any
---@return integer?
function GPT2:count_targets(given) return heads.count_targets(given) end -- luacheck: no self

-- Returns whether forward was called with a table of named tensors instead of positional arguments.
local function is_named(idx, targets)
  return type(idx) == "table" and targets == nil and next(idx) ~= nil and #idx == 0
end

--- Returns the table that the parts read. The arguments are the same as for forward.
---@param idx ps.Tensor|table
---@param targets? ps.Tensor
---@return table<string, ps.Tensor> batch input_ids, mask, token_type_ids, position_ids, targets
function GPT2:batch_of(idx, targets)
  if is_named(idx, targets) then
    local given = heads.batch(self, idx)
    heads.same_shapes("gpt2", given, { "labels" })
    local batch = read(self, given, self.transformer)
    if given.labels ~= nil then batch.targets = heads.shifted(given) end
    batch.target_weights = heads.shifted_weights("gpt2", given)
    return batch
  end
  if not ps.is_tensor(idx) then
    error(("gpt2 takes a tensor of token ids, not a %s: ps.tensor({ { 1, 2, 3 } }, { dtype = \"int32\" })"):format(
      type(idx)))
  end
  if idx:dim() ~= 2 then error("gpt2: idx must be [batch, positions], not of " .. idx:dim() .. " dimensions", 0) end
  heads.some_tokens("gpt2", idx)
  local batch = read(self, { input_ids = idx }, self.transformer)
  batch.targets = heads.targets("gpt2", targets)
  return batch
end

---@return ps.nn.Part[]
function GPT2:parts()
  local head = self:head()
  return list_parts(self, "head", { self.lm_head or self.transformer.wte }, function(x, batch)
    if batch.target_weights ~= nil then
      return { loss = heads.weighted_loss(head(x), batch.targets, batch.target_weights) }
    end
    if batch.targets ~= nil then return { loss = head:loss(x, batch.targets) } end
    return { logits = head(x) }                                         -- shape [B, T, V]
  end)
end

--- Computes logits or the loss. idx is int [B, T]. Without targets, returns logits [B, T, V]. With targets int [B, T]
--- (-100 is ignored), returns the mean loss, and never holds all logits in memory. Target t belongs to position t.
---
--- Alternatively, idx is one table in transformers' form: { input_ids =, labels =, attention_mask =, token_type_ids =,
--- position_ids =, segment_ids = }, all [B, T]. The result is then { loss = }, or { logits = } if there are no labels.
--- The target of position t is the label at t + 1. segment_ids (0 for padding) divide each row into several sequences,
--- which do not see or predict each other. With loss_weights fp32 [B, T], the loss is a weighted mean over the labels.
---@param idx ps.Tensor|{input_ids: ps.Tensor, labels?: ps.Tensor, attention_mask?: ps.Tensor, token_type_ids?:
--- ps.Tensor, position_ids?: ps.Tensor, segment_ids?: ps.Tensor, loss_weights?: ps.Tensor}
---@param targets? ps.Tensor
---@return ps.Tensor|{loss?: ps.Tensor, logits?: ps.Tensor}
function GPT2:forward(idx, targets)
  local out = parts.fold(self:parts(), self:batch_of(idx, targets))
  if is_named(idx, targets) then return out end
  return targets ~= nil and out.loss or out.logits
end

function GPT2:positions() return self.config.n_positions end

-- Returns one cache {kv [B, 2H, S, D]} for each layer, for the heads of this rank. The first H heads of a cache are
-- keys, and the other H heads are values.
function GPT2:new_caches(B, S, kind)
  local attn = self.transformer.h[0].attn                                -- has the heads of this rank
  return heads.caches({ "kv" }, { B, 2 * attn.heads, S, attn.width / attn.heads }, self.transformer.h, function(block)
    return block.ln_1.weight
  end, kind)
end

-- Returns the batch of a generation step (ps/pretrained/generate_rows.lua).
function GPT2:step_batch(ids, step) -- luacheck: no self
  return { input_ids = ids, mask = step.mask, position_ids = step.position_ids, caches = step.caches, at = step.at }
end
function GPT2:next_logits(ids, step) return parts.fold(step.parts, self:step_batch(ids, step)).logits end

GPT2.generate = generate

-- -- classification -------------------------------------------------------------------------------------------------
---@class GPT2ForSequenceClassification: ps.pretrained.Model
local ForSequence = nn.class("GPT2ForSequenceClassification", Model)
ForSequence.base, ForSequence.prefix, ForSequence.body = "transformer", "transformer", BODY

function ForSequence:init(config, given)
  local full, where = begin(self, config, given)
  self.score = nn.Linear(full.n_embd, full.num_labels, { bias = false, std = where.std, dtype = where.dtype,
    device = where.device })
  finish(self, given)
end

---@return ps.nn.Part[]
function ForSequence:parts()
  return list_parts(self, "head", { self.score }, function(x, batch)
    local last = heads.last_tokens("gpt2", batch.input_ids, self.config.pad_token_id)
    local out = { logits = self.score(heads.rows(x, last)) }             -- [B, K]
    if batch.labels ~= nil then out.loss = heads.classify("gpt2", out.logits, batch.labels, self.config) end
    return out
  end)
end

---@class GPT2ForTokenClassification: ps.pretrained.Model
local ForTokens = nn.class("GPT2ForTokenClassification", Model)
ForTokens.base, ForTokens.prefix, ForTokens.body = "transformer", "transformer", BODY

function ForTokens:init(config, given)
  local full, where = begin(self, config, given)
  self.dropout = nn.Dropout(full.classifier_dropout or full.hidden_dropout or 0.1)
  self.classifier = nn.Linear(full.n_embd, full.num_labels, where)
  finish(self, given)
end

---@return ps.nn.Part[]
function ForTokens:parts()
  return list_parts(self, "head", { self.classifier }, function(x, batch)
    local out = { logits = heads.dropped(self.dropout, self.classifier, x) }
    if batch.labels ~= nil then out.loss = heads.classify_tokens(out.logits, batch.labels) end
    return out
  end)
end

for class, labelled in pairs { [ForSequence] = {}, [ForTokens] = { "labels" } } do
  class.inputs = class == ForTokens and LABELLED or ONE_LABEL
  --- Returns the table that the parts read. `given` is a table of named tensors, or token ids [B, T].
  ---@param given table|ps.Tensor
  ---@return table<string, ps.Tensor> batch
  function class:batch_of(given)
    given = heads.batch(self, given)
    heads.same_shapes("gpt2", given, labelled)
    local batch = read(self, given, self.transformer)
    batch.labels = given.labels
    return batch
  end
  --- Returns { logits =, loss = }. `given` is a table of named tensors, or token ids [B, T].
  ---
  --- For sequences, logits are [B, K], and labels are int [B] (one class per sequence), or float [B] or [B, K]. The
  --- logits are computed at the last token that is not config.pad_token_id. For tokens, logits are [B, T, K], and
  --- labels are int [B, T] (-100 is ignored).
  ---@param given table|ps.Tensor
  ---@return {logits: ps.Tensor, loss: ps.Tensor?}
  function class:forward(given) return parts.fold(self:parts(), self:batch_of(given)) end
  function class:vocabulary() return { { self.transformer.wte, "weight" } } end
  class.costs = GPT2Model.costs
end

local gpt2 = pretrained.family {
  model_type = "gpt2", settings = config_rules, default = "GPT2LMHeadModel",
  classes = { GPT2LMHeadModel = GPT2, GPT2Model = GPT2Model, GPT2ForSequenceClassification = ForSequence,
    GPT2ForTokenClassification = ForTokens },
  tasks = { causal_lm = "GPT2LMHeadModel", base = "GPT2Model",
    sequence_classification = "GPT2ForSequenceClassification", token_classification = "GPT2ForTokenClassification" },
  presets = {                                              -- missing fields have the defaults of gpt2_config.lua
    ["gpt2"] = {},
    ["gpt2-medium"] = { n_layer = 24, n_head = 16, n_embd = 1024 },
    ["gpt2-large"] = { n_layer = 36, n_head = 20, n_embd = 1280 },
    ["gpt2-xl"] = { n_layer = 48, n_head = 25, n_embd = 1600 },
    ["small"] = { vocab_size = 256, n_positions = 256, n_layer = 6, n_head = 4, n_embd = 256 },
    ["char"] = { vocab_size = 256, n_positions = 64, n_layer = 4, n_head = 4, n_embd = 128 },
    ["tiny"] = { vocab_size = 256, n_positions = 32, n_layer = 2, n_head = 2, n_embd = 32 },
  },
  shorthands = { dropout = { "embd_pdrop", "attn_pdrop", "resid_pdrop", "classifier_dropout" } },
}
gpt2.GPT2 = GPT2

return gpt2
