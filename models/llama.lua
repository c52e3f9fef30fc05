-- SPDX-License-Identifier: BSD-3-Clause
-- Llama 2 and 3: a decoder with rotary positions and grouped-query attention. RMS norms precede attention and the gated
-- MLP. Parameter names, layouts ([out, in]) and initialisation are the same as in Hugging Face's LlamaModel,
-- LlamaForCausalLM, LlamaForSequenceClassification and LlamaForTokenClassification. Mistral, Qwen2 and Qwen3 are the
-- same model with a few differences, which are listed in their files (models/mistral.lua, ...). The settings are in
-- llama_config.lua, and code that all models share is in ps/pretrained/.
--
--   local model = ps.from_pretrained("some/folder", { dtype = "bf16" })
--   local out = model { input_ids = ids, labels = ids }                      -- out.loss
--   local model = require("models.llama").new("llama-110m")
--   local loss = model(x, y)                                               -- x, y: int [B, T]
--
-- Sizes: B batch, T positions, C width, H query heads, G key/value heads, D width of a head, V vocabulary, K labels.
local ps = require "ps"
local nn = require "ps.nn"
local generate = require "ps.pretrained.generate"
local heads = require "ps.pretrained.heads"
local Model = require "ps.pretrained.model"
local parts = require "ps.nn.parts"
local pretrained = require "ps.pretrained"
local rope = require "ps.pretrained.rope"
local settings = require "ps.pretrained.settings"
local F = ps.functional

---@class ps.Llama.Variant a family that derives from this file
---@field brand string prefix of its class names, such as "Llama"
---@field biases fun(c: table): boolean, boolean, boolean returns three booleans: whether q, k and v have biases,
---  whether o has a bias, and whether the layers of the MLP have biases
---@field norms? boolean whether an RMS norm is applied to each head's queries and keys
---@field window? fun(c: table, layer: integer): integer? returns the number of keys that a query sees in a layer (from
--- 0), or nil for all

local function head_width(c) return c.head_dim or c.hidden_size / c.num_attention_heads end
local function key_heads(c) return c.num_key_value_heads or c.num_attention_heads end

local function linear(inputs, outputs, bias, where)
  return nn.Linear(inputs, outputs, { bias = bias, std = where.std, dtype = where.dtype, device = where.device })
end

local function norm(width, c, where)
  return nn.RMSNorm(width, { eps = c.rms_norm_eps, dtype = where.dtype, device = where.device })
end

-- -- layers ---------------------------------------------------------------------------------------------------------
local Attention = nn.class("LlamaAttention")
Attention.unscoped = true

-- `layer` is the index of the layer, counted from 0.
function Attention:init(c, where, variant, layer)
  local C, D, H, G = c.hidden_size, head_width(c), c.num_attention_heads, key_heads(c)
  local bias, output_bias = variant.biases(c)
  self.heads, self.groups, self.width = H, G, D
  self.q_proj = linear(C, H * D, bias, where)
  self.k_proj = linear(C, G * D, bias, where)
  self.v_proj = linear(C, G * D, bias, where)
  self.o_proj = linear(H * D, C, output_bias, where)
  if variant.norms then
    self.q_norm = norm(D, c, where)
    self.k_norm = norm(D, c, where)
  end
  self.dropout = nn.Dropout(c.attention_dropout)
  self.window = variant.window and variant.window(c, layer)
end

-- Reshapes y [B, T, n * D] to [B, n, T, D]. `normed` is the norm that is applied to each head, or nil.
local function split(self, y, n, normed)
  y = y:reshape(y:size(0), y:size(1), n, self.width)
  return (normed and normed(y) or y):permute(0, 2, 1, 3)
end

-- Computes attention. x [B, T, C] is the residual stream, and h [B, T, C] is x after the norm. `seen` contains mask,
-- and cos and sin [B or 1, T, D / 2].
--
-- mask is nil, bool [B, S], int32 [B, T], or a mask of 4 dimensions. A bool mask is false at positions whose keys are
-- hidden. An int32 mask contains segment numbers. A mask of 4 dimensions replaces the causal mask. cache is nil or {k,
-- v [B, G, S, D]}, with the keys and values of the positions before `at`.
function Attention:forward(h, x, seen, cache, at)
  if cache then return self.o_proj(self:attend_cached(h, seen, cache, at), x) end
  local q = F.rope(split(self, self.q_proj(h), self.heads, self.q_norm), seen.cos, seen.sin)
  local B, T, mask = q:size(0), q:size(2), seen.mask
  local k = F.rope(split(self, self.k_proj(h), self.groups, self.k_norm), seen.cos, seen.sin)
  local v = split(self, self.v_proj(h), self.groups)
  local causal = mask == nil or mask:dim() == 2
  if self.first_head and not causal and mask:size(1) > 1 then mask = mask:narrow(1, self.first_head, self.heads) end
  local y = F.attention(q, k, v, { causal = causal, window = causal and self.window or nil,
    key_mask = causal and mask or nil, mask = not causal and mask or nil,
    dropout = self.dropout:active() and self.dropout.p or 0, first_head = self.first_head })
  return self.o_proj(y:permute(0, 2, 1, 3):reshape(B, T, self.heads * self.width), x)
end

-- Computes attention in a generation step. Returns [B, T, H * D].
function Attention:attend_cached(h, seen, cache, at)
  local q, k = self.q_proj(h), self.k_proj(h)
  if self.q_norm then
    local B, T = q:size(0), q:size(1)
    q, k = self.q_norm(q:reshape(B, T, self.heads, self.width)), self.k_norm(k:reshape(B, T, self.groups, self.width))
  end
  return heads.attend_cached(self, cache, at, seen.mask, q, k, self.v_proj(h), seen.cos, seen.sin)
end

local MLP = nn.class("LlamaMLP")
MLP.unscoped = true

function MLP:init(c, where, variant)
  local _, _, bias = variant.biases(c)
  self.gate_proj = linear(c.hidden_size, c.intermediate_size, bias, where)
  self.up_proj = linear(c.hidden_size, c.intermediate_size, bias, where)
  self.down_proj = linear(c.intermediate_size, c.hidden_size, bias, where)
  self.gated = settings.gated(c.hidden_act)
end

function MLP:forward(h, x)
  return self.down_proj(self.gated(self.gate_proj(h), self.up_proj(h)), x)              -- the product of gate and up is
                                                                                        -- [B, T, hidden]
end

local Layer = nn.class("LlamaDecoderLayer")

function Layer:init(c, where, variant, layer)
  self.self_attn = Attention(c, where, variant, layer)
  self.mlp = MLP(c, where, variant)
  self.input_layernorm = norm(c.hidden_size, c, where)
  self.post_attention_layernorm = norm(c.hidden_size, c, where)
end

function Layer:forward(x, seen, cache, at)
  x = self.self_attn(self.input_layernorm(x), x, seen, cache, at)
  return self.mlp(self.post_attention_layernorm(x), x)
end

-- -- the body -------------------------------------------------------------------------------------------------------
local INPUTS = { input_ids = "tensor", attention_mask = "tensor", position_ids = "tensor", segment_ids = "tensor" }
local LABELLED, WEIGHTED = { labels = "tensor" }, { labels = "tensor", loss_weights = "tensor" }
for name, kind in pairs(INPUTS) do LABELLED[name], WEIGHTED[name] = kind, kind end
local ONE_LABEL = heads.without_segments(LABELLED)
local BODY = { embed_tokens = true, layers = true, norm = true }

---@class LlamaModel: ps.pretrained.Model
local Body = nn.class("LlamaBody", Model)
Body.base, Body.body, Body.inputs = "model", BODY, INPUTS

---@param config table config.json's fields; missing fields have the family's defaults
---@param given? {dtype?: string, device?: string, recompute?: boolean}
function Body:init(config, given)
  local c, where = self:begin(config, given)
  self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size, { std = where.std,
    padding_idx = heads.padding_row(c.pad_token_id, c.vocab_size), dtype = where.dtype, device = where.device })
  self.layers = nn.ModuleList()
  for layer = 0, c.num_hidden_layers - 1 do self.layers:append(Layer(c, where, self.variant, layer)) end
  self.norm = norm(c.hidden_size, c, where)
  rawset(self, "rope", rope.new(self.family.model_type, c, head_width(c)))
  if given and given.recompute then self:recompute_blocks() end
end

-- How the layers are split over ranks (ps/parallel/tensor/cut.lua).
local ATTENTION, GATED = "layers.*.self_attn", "layers.*.mlp"
Body.tensor_parallel = {
  ["embed_tokens"] = { "vocabulary", enter = true, flat = true }, ["layers"] = "inside",
  [ATTENTION] = { "divide", "heads", "groups", gather = { "q_proj", "k_proj", "v_proj" },
    keys = { heads = "num_attention_heads", groups = "num_key_value_heads" } },
  [ATTENTION .. ".q_proj"] = "column", [ATTENTION .. ".k_proj"] = "column", [ATTENTION .. ".v_proj"] = "column",
  [ATTENTION .. ".o_proj"] = "row",
  [ATTENTION .. ".q_norm"] = { "partial", optional = true }, [ATTENTION .. ".k_norm"] = { "partial", optional = true },
  [GATED] = { "divide", gather = { "gate_proj", "up_proj" } },
  [GATED .. ".gate_proj"] = "column", [GATED .. ".up_proj"] = "column", [GATED .. ".down_proj"] = "row",
  ["norm"] = "leave",
}

-- Returns the mask of a batch as bool [B, T]. A mask of 4 dimensions (bool or floats) is returned unchanged.
local function mask_of(who, given)
  local mask = given.attention_mask
  if mask == nil or mask:dim() ~= 4 then
    heads.same_shapes(who, given, { "attention_mask" })
    return heads.mask(mask)
  end
  if mask:dtype() ~= "bool" and not mask:is_float() then
    settings.refuse(who, "attention_mask", mask:dtype(), "with 4 dimensions it must be bool, or floats to add")
  end
  return mask
end

-- Checks a batch (a table of named tensors) and returns the table that the parts read. This table contains input_ids
-- [B, T], and cos, sin and mask for attention. The mask can contain segment numbers.
local function read(self, given)
  local body, ids, who = self.model or self, given.input_ids, self.family.model_type
  heads.same_shapes(who, given, { "position_ids", "labels" }, { position_ids = true })
  local weight = body.norm.weight
  heads.same_device(who, ids, weight)
  local segments, places = heads.segments(who, self.config, given)
  local cos, sin = body.rope:angles(places, ids:size(1), 0, ids:device(), weight:dtype())
  return { input_ids = ids, cos = cos, sin = sin, mask = segments or mask_of(who, given) }
end

-- Returns the model's parts: "embed_tokens", one part per layer ("layers.0" and so on), and the part named `last`. The
-- carry between parts is { x = [B, T, C] }, the residual stream. The last part applies the last norm and calls fn(x,
-- batch). `modules` are the other modules that the last part uses. In a generation step, the batch contains caches (see
-- step_batch), and x of fn contains only the last position, [B, 1, C].
local function list_parts(self, last, modules, fn)
  local body = self.model or self
  local list = { { name = "embed_tokens", modules = { body.embed_tokens }, forward = function(_, batch)
    return { x = body.embed_tokens(batch.input_ids) }
  end } }
  for i, layer in body.layers:each() do
    list[#list + 1] = { name = "layers." .. i, modules = { layer }, forward = function(carry, batch)
      return { x = layer(carry.x, batch, batch.caches and batch.caches[i], batch.at) }
    end }
  end
  list[#list + 1] = { name = last, modules = { body.norm, unpack(modules) }, forward = function(carry, batch)
    return fn(body.norm(batch.caches and heads.last_position(carry.x) or carry.x), batch)
  end }
  return heads.segmented(list)
end

--- Returns the table that the parts read. `given` is a table of named tensors, or token ids [B, T].
---@param given table|ps.Tensor
---@return table<string, ps.Tensor> batch
function Body:batch_of(given) return read(self, heads.batch(self, given)) end

---@return ps.nn.Part[]
function Body:parts()
  return list_parts(self, "norm", {}, function(x) return { last_hidden_state = x } end)
end

--- Returns the last hidden states [B, T, C]. `given` is a table of named tensors, or token ids [B, T].
---@param given table|ps.Tensor
---@return {last_hidden_state: ps.Tensor}
function Body:forward(given) return parts.fold(self:parts(), self:batch_of(given)) end

function Body:vocabulary() return { { self.embed_tokens, "weight" } } end

-- `looked_up` is the number of elements of embeddings that are used only to look up rows. `width` is the total width of
-- all query heads.
function Body:costs()
  local c = self.config
  return { looked_up = c.vocab_size * c.hidden_size, layers = c.num_hidden_layers,
    width = c.num_attention_heads * head_width(c), positions = c.max_position_embeddings }
end

-- -- language model -------------------------------------------------------------------------------------------------
---@class Llama: ps.pretrained.Model
---@field config table
local CausalLM = nn.class("LlamaCausalLM", Model)
CausalLM.base, CausalLM.prefix, CausalLM.body, CausalLM.inputs = "model", "model", BODY, WEIGHTED
CausalLM.ties = { ["lm_head.weight"] = "model.embed_tokens.weight" }
CausalLM.tensor_parallel = { ["model.norm"] = "inside", ["tied_head"] = { "head", optional = true },
  ["lm_head"] = { "head", optional = true } }

-- The first part of init, which is the same for all classes with a head.
local function begin(self, config, given)
  local c, where = self:begin(config, given)
  self.model = self.variant.Body(c, { dtype = where.dtype, device = where.device })
  return c, where
end

local function finish(self, given)
  if given and given.recompute then self:recompute_blocks() end
end

---@param config table config.json's fields; missing fields have the family's defaults
---@param given? {dtype?: string, device?: string, recompute?: boolean}
function CausalLM:init(config, given)
  local c, where = begin(self, config, given)
  if c.tie_word_embeddings then
    rawset(self, "tied_head", nn.LMHead(c.hidden_size, c.vocab_size, { tied = self.model.embed_tokens }))
  else
    self.lm_head = nn.LMHead(c.hidden_size, c.vocab_size, { std = where.std, dtype = where.dtype,
      device = where.device })
  end
  finish(self, given)
end

--- Returns the head, which computes logits [.., V], or the loss of these logits, from the last norm's output [.., C].
--- The head's weight is a parameter of its own or the token embedding.
---@return ps.nn.LMHead
function CausalLM:head() return self.lm_head or self.tied_head end

function CausalLM:vocabulary()
  return { { self.model.embed_tokens, "weight" }, self.lm_head and { self.lm_head, "weight" } }
end

function CausalLM:costs()
  local cost = self.model:costs()
  if not self.lm_head then cost.looked_up = 0 end
  return cost
end

--- Returns the number of targets in a batch (see heads.count_targets).
---@param given any
---@return integer?
function CausalLM:count_targets(given) return heads.count_targets(given) end -- luacheck: no self

--- Returns the table that the parts read. The arguments are the same as for forward.
---@param idx ps.Tensor|table
---@param targets? ps.Tensor
---@return table<string, ps.Tensor> batch
function CausalLM:batch_of(idx, targets)
  local given = heads.batch(self, idx)
  local batch = read(self, given)
  batch.targets = heads.targets(self.family.model_type, targets)
  if given.labels ~= nil then batch.targets = heads.shifted(given) end
  batch.target_weights = heads.shifted_weights(self.family.model_type, given)
  return batch
end

---@return ps.nn.Part[]
function CausalLM:parts()
  local head = self:head()
  return list_parts(self, "head", { self.lm_head or self.model.embed_tokens }, function(x, batch)
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
--- Alternatively, idx is one table in transformers' form: { input_ids =, labels =, attention_mask =, position_ids = }.
--- The result is then { loss = }, or { logits = } if there are no labels. The target of position t is the label at t +
--- 1.
---
--- attention_mask is [B, T], or [B or 1, H or 1, T, T]. A mask of 4 dimensions contains bools, or floats that are added
--- to the scores. It replaces the causal mask. segment_ids int [B, T] (0 for padding) divide each row into several
--- sequences, which do not see or predict each other. With loss_weights fp32 [B, T], the loss is a weighted mean over
--- the labels.
---@param idx ps.Tensor|{input_ids: ps.Tensor, labels?: ps.Tensor, attention_mask?: ps.Tensor, position_ids?: ps.Tensor,
--- segment_ids?: ps.Tensor, loss_weights?: ps.Tensor}
---@param targets? ps.Tensor
---@return ps.Tensor|{loss?: ps.Tensor, logits?: ps.Tensor}
function CausalLM:forward(idx, targets)
  local out = parts.fold(self:parts(), self:batch_of(idx, targets))
  if not ps.is_tensor(idx) then return out end
  return targets ~= nil and out.loss or out.logits
end

-- There is no limit, because rotary embeddings also work for positions that did not occur in training. transformers has
-- no limit, either.
function CausalLM:positions() return math.huge end -- luacheck: no self

-- Returns one cache {k, v [B, G, S, D]} for each layer, for the heads of this rank.
function CausalLM:new_caches(B, S, kind)
  local attention = self.model.layers[0].self_attn                      -- has the heads of this rank
  return heads.caches({ "k", "v" }, { B, attention.groups, S, attention.width }, self.model.layers, function(layer)
    return layer.input_layernorm.weight
  end, kind)
end

-- Returns the batch of a generation step (ps/pretrained/generate_rows.lua).
function CausalLM:step_batch(ids, step)
  local body = self.model
  local cos, sin = body.rope:angles(step.position_ids, ids:size(1), step.at, ids:device(), body.norm.weight:dtype())
  return { input_ids = ids, cos = cos, sin = sin, mask = step.mask, caches = step.caches, at = step.at }
end
function CausalLM:next_logits(ids, step) return parts.fold(step.parts, self:step_batch(ids, step)).logits end

CausalLM.generate = generate

-- -- classification -------------------------------------------------------------------------------------------------
---@class LlamaForSequenceClassification: ps.pretrained.Model
local ForSequence = nn.class("LlamaSequences", Model)

function ForSequence:init(config, given)
  local c, where = begin(self, config, given)
  self.score = linear(c.hidden_size, c.num_labels, false, where)
  finish(self, given)
end

---@class LlamaForTokenClassification: ps.pretrained.Model
local ForTokens = nn.class("LlamaTokens", Model)

function ForTokens:init(config, given)
  local c, where = begin(self, config, given)
  self.dropout = nn.Dropout(c.classifier_dropout or c.hidden_dropout or 0.1)
  self.score = linear(c.hidden_size, c.num_labels, c.token_classification_bias ~= false, where)
  finish(self, given)
end

---@return ps.nn.Part[]
function ForSequence:parts()
  local who = self.family.model_type
  return list_parts(self, "head", { self.score }, function(x, batch)
    local last = heads.last_tokens(who, batch.input_ids, self.config.pad_token_id)
    local out = { logits = self.score(heads.rows(x, last)) }             -- [B, K]
    if batch.labels ~= nil then out.loss = heads.classify(who, out.logits, batch.labels, self.config) end
    return out
  end)
end

---@return ps.nn.Part[]
function ForTokens:parts()
  return list_parts(self, "head", { self.score }, function(x, batch)
    local out = { logits = heads.dropped(self.dropout, self.score, x) }   -- shape [B, T, K]
    if batch.labels ~= nil then out.loss = heads.classify_tokens(out.logits, batch.labels) end
    return out
  end)
end

for _, class in ipairs { ForSequence, ForTokens } do
  class.base, class.prefix, class.body = "model", "model", BODY
  class.inputs = class == ForTokens and LABELLED or ONE_LABEL
  function class:vocabulary() return self.model:vocabulary() end
  function class:costs() return self.model:costs() end

  --- Returns the table that the parts read. `given` is a table of named tensors, or token ids [B, T].
  function class:batch_of(given)
    given = heads.batch(self, given)
    local labels, rest = given.labels, {}
    for name, t in pairs(given) do if name ~= "labels" or class == ForTokens then rest[name] = t end end
    local batch = read(self, rest)
    batch.labels = labels
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
end

-- -- families -------------------------------------------------------------------------------------------------------
local llama = {}

--- Registers a family of models that derives from Llama.
---@param variant ps.Llama.Variant
---@param rules ps.pretrained.Settings
---@param presets table<string, table>
---@return ps.pretrained.Family
function llama.family(variant, rules, presets)
  local brand, classes = variant.brand, {}
  local function class(name, base)
    local made = nn.class(name, base)
    made.variant, classes[name] = variant, made
    return made
  end
  variant.Body = class(brand .. "Model", Body)
  class(brand .. "ForCausalLM", CausalLM)
  class(brand .. "ForSequenceClassification", ForSequence)
  class(brand .. "ForTokenClassification", ForTokens)
  presets.tiny = presets.tiny or { vocab_size = 256, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, head_dim = 8, max_position_embeddings = 64 }
  return pretrained.family {
    model_type = rules.rules.model_type, settings = rules, default = brand .. "ForCausalLM", classes = classes,
    tasks = { causal_lm = brand .. "ForCausalLM", base = brand .. "Model",
      sequence_classification = brand .. "ForSequenceClassification",
      token_classification = brand .. "ForTokenClassification" },
    presets = presets, shorthands = { dropout = { "attention_dropout", "classifier_dropout" } },
  }
end

local LLAMA3 = { rope_type = "llama3", rope_theta = 500000, factor = 32, low_freq_factor = 1, high_freq_factor = 4,
  original_max_position_embeddings = 8192 }

local family = llama.family({
  brand = "Llama",
  biases = function(c) return c.attention_bias, c.attention_bias, c.mlp_bias end,
}, require("models.llama_config").llama, {                 -- missing fields have the defaults of llama_config.lua
  ["llama-2-7b"] = { max_position_embeddings = 4096, rms_norm_eps = 1e-5 },
  ["llama-3-8b"] = { vocab_size = 128256, intermediate_size = 14336, num_key_value_heads = 8,
    max_position_embeddings = 8192, rms_norm_eps = 1e-5, rope_parameters = { rope_theta = 500000 } },
  ["llama-3.2-1b"] = { vocab_size = 128256, hidden_size = 2048, intermediate_size = 8192, num_hidden_layers = 16,
    num_key_value_heads = 8, head_dim = 64, max_position_embeddings = 131072, rms_norm_eps = 1e-5,
    tie_word_embeddings = true, rope_parameters = LLAMA3 },
  ["tinyllama-1.1b"] = { hidden_size = 2048, intermediate_size = 5632, num_hidden_layers = 22,
    num_key_value_heads = 4, rms_norm_eps = 1e-5 },
  ["llama-110m"] = { hidden_size = 768, intermediate_size = 2048, num_hidden_layers = 12, num_attention_heads = 12,
    max_position_embeddings = 1024, rms_norm_eps = 1e-5, tie_word_embeddings = true },
})
family.of = llama.family                                   -- the files of models that derive from Llama call it

--- Returns the number of keys in the attention window of a Qwen layer, or nil if the layer has no window. Layers are
--- counted from 0. layer_types says which layers have a window. Without layer_types, layer max_window_layers and all
--- later layers have a window.
---@param c table
---@param layer integer
---@return integer?
function family.window_of(c, layer)
  if not c.use_sliding_window or not c.sliding_window then return nil end
  local slides = layer >= c.max_window_layers
  if c.layer_types then slides = c.layer_types[layer + 1] == "sliding_attention" end
  return slides and c.sliding_window or nil
end

return family
