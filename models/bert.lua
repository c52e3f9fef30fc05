-- SPDX-License-Identifier: BSD-3-Clause
-- BERT, an encoder that reads in both directions, and its heads. Parameter names, layouts ([out, in]) and
-- initialisation are the same as in Hugging Face's BertModel, BertForMaskedLM, BertForSequenceClassification,
-- BertForTokenClassification and BertForQuestionAnswering. models/roberta.lua derives from the classes here. The
-- settings are in bert_config.lua, and code that all models share is in ps/pretrained/.
--
--   local bert = require "models.bert"
--   local model = ps.from_pretrained("some/folder", { task = "sequence_classification", num_labels = 3 })
--   local out = model { input_ids = ids, attention_mask = mask, labels = labels }     -- out.loss, out.logits
--
-- With unpad = true (ps/pretrained/unpad.lua), the layers between the embeddings and the head process no padding. x is
-- then [S, C] and contains the S positions of [B, T] that are not padding. `rows` int64 [S] contains the index of each
-- of these positions among the B * T positions. `places` int64 [B * T] maps each position of [B, T] to its row in [S].
--
-- Sizes: B batch, T positions, C width, H heads, D = C / H, V vocabulary, K labels.
local ps = require "ps"
local nn = require "ps.nn"
local parts = require "ps.nn.parts"
local heads = require "ps.pretrained.heads"
local Model = require "ps.pretrained.model"
local pretrained = require "ps.pretrained"
local settings = require "ps.pretrained.settings"
local unpad = require "ps.pretrained.unpad"
local F = ps.functional
local error = require("ps.caller").error

local function shape_of(mask) return { mask:size(0), mask:size(1) } end

-- Applies dropout to x [B, T, C], or to x [S, C] if `rows` is given.
local function dropped(drop, x, mask, rows)
  if rows == nil then return drop(x) end
  return drop(x, unpad.part(x, rows, shape_of(mask)))
end

-- Applies `layer` to y and dropout to the result, and adds x. Without dropout, the epilogue of the matrix product adds
-- x.
local function project(layer, drop, y, x, mask, rows)
  if not drop:active() then return layer(y, x) end
  return x + dropped(drop, layer(y), mask, rows)
end

local function layer_norm(c, where)
  return nn.LayerNorm(c.hidden_size, { eps = c.layer_norm_eps, dtype = where.dtype, device = where.device })
end

-- -- the encoder ----------------------------------------------------------------------------------------------------
local Embeddings = nn.class("BertEmbeddings")

-- If where.padded is set, the position embedding has a row for padding. The position embedding is then registered last,
-- as in transformers' RoBERTa. Random values are always drawn in the order words, positions, token types.
function Embeddings:init(c, where)
  local function table_of(rows, padding)
    return nn.Embedding(rows, c.hidden_size, { std = where.std, dtype = where.dtype, device = where.device,
      padding_idx = heads.padding_row(padding, rows) })
  end
  self.word_embeddings = table_of(c.vocab_size, c.pad_token_id)
  local positions = table_of(c.max_position_embeddings, where.padded and c.pad_token_id)
  local types = table_of(c.type_vocab_size)
  if not where.padded then self.position_embeddings = positions end
  self.token_type_embeddings = types
  self.LayerNorm = layer_norm(c, where)
  if where.padded then self.position_embeddings = positions end
  self.dropout = nn.Dropout(c.hidden_dropout_prob)
end

-- Returns the first n rows of an embedding, as [n, C] or [1, n, C].
local function first_rows(rows, n, ids)
  if parts.is_plain(rows, nn.Embedding) then return rows.weight:narrow(0, 0, n) end
  return rows(ps.arange(0, n, 1, { dtype = "int64", device = ids:device() }):reshape(1, -1))
end

-- Computes the embeddings. ids: int [B, T]. types: int [B, T], or nil if all token types are 0. places: positions, int
-- [B or 1, T], or nil for 0, 1, ... If `rows` is given, ids, types and places are [S], and places must not be nil.
function Embeddings:forward(ids, types, places, mask, rows)
  local x = self.word_embeddings(ids)                                   -- shape [B, T, C]
  local type_rows, place_rows = self.token_type_embeddings, self.position_embeddings
  x = x + (types ~= nil and type_rows(types) or first_rows(type_rows, 1, ids))
  x = x + (places ~= nil and place_rows(places) or first_rows(place_rows, ids:size(1), ids))
  return dropped(self.dropout, self.LayerNorm(x), mask, rows)
end

local SelfAttention = nn.class("BertSelfAttention")
SelfAttention.unscoped = true

function SelfAttention:init(c, where)
  self.heads, self.width = c.num_attention_heads, c.hidden_size
  self.query = nn.Linear(self.width, self.width, where)
  self.key = nn.Linear(self.width, self.width, where)
  self.value = nn.Linear(self.width, self.width, where)
  self.dropout = nn.Dropout(c.attention_probs_dropout_prob)
end

-- Computes the self-attention of x [B, T, C]. mask is nil, bool [B, T] or int32 [B, T]. A bool mask is false at
-- positions whose keys are hidden. An int32 mask contains segment numbers.
function SelfAttention:forward(x, mask, rows, places)
  local C, H = self.width, self.heads
  local q = self.query(x)
  local shape = rows ~= nil and shape_of(mask) or { q:size(0), q:size(1) }
  local B, T = shape[1], shape[2]
  local function split(y)                                                                         -- shape [B, H, T, D]
    if rows ~= nil then y = unpad.unpack(y, places, shape) end
    return y:reshape(B, T, H, C / H):permute(0, 2, 1, 3)
  end
  local y = F.attention(split(q), split(self.key(x)), split(self.value(x)),
    { key_mask = mask, dropout = self.dropout:active() and self.dropout.p or 0, first_head = self.first_head })
  y = y:permute(0, 2, 1, 3):reshape(B, T, C)
  return rows ~= nil and unpad.pack(y, rows) or y
end

-- A linear layer, dropout, the residual sum and a norm. A layer has two such modules: after the attention, and after
-- the hidden layer of the MLP.
local Output = nn.class("BertOutput")
Output.unscoped = true

function Output:init(c, inputs, where)
  self.dense = nn.Linear(inputs, c.hidden_size, where)
  self.LayerNorm = layer_norm(c, where)
  self.dropout = nn.Dropout(c.hidden_dropout_prob)
end

function Output:forward(y, x, mask, rows)
  return self.LayerNorm(project(self.dense, self.dropout, y, x, mask, rows))
end

local Attention = nn.class("BertAttention")
Attention.unscoped = true

function Attention:init(c, where)
  self.self = SelfAttention(c, where)
  self.output = Output(c, c.hidden_size, where)
end

function Attention:forward(x, mask, rows, places)
  return self.output(self.self(x, mask, rows, places), x, mask, rows)
end

-- A linear layer and an activation.
local Intermediate = nn.class("BertIntermediate")
Intermediate.unscoped = true

function Intermediate:init(c, where)
  self.dense = nn.Linear(c.hidden_size, c.intermediate_size, where)
  self.gelu, self.activation = settings.activation(c.hidden_act)
end

function Intermediate:forward(x)
  local y = self.dense(x)
  return self.gelu and F.gelu(y, self.gelu) or self.activation(y)
end

local Layer = nn.class("BertLayer")

function Layer:init(c, where)
  self.attention = Attention(c, where)
  self.intermediate = Intermediate(c, where)
  self.output = Output(c, c.intermediate_size, where)
end

function Layer:forward(x, mask, rows, places)
  x = self.attention(x, mask, rows, places)
  return self.output(self.intermediate(x), x, mask, rows)
end

local Encoder = nn.class("BertEncoder")

function Encoder:init(c, where)
  self.layer = nn.ModuleList()
  for _ = 1, c.num_hidden_layers do self.layer:append(Layer(c, where)) end
end

-- Computes tanh(Linear(x)) of the first position.
local Pooler = nn.class("BertPooler")

function Pooler:init(c, where) self.dense = nn.Linear(c.hidden_size, c.hidden_size, where) end

function Pooler:forward(x) return self.dense(x:select(1, 0)):tanh() end           -- [B, T, C] -> [B, C]

-- -- models ---------------------------------------------------------------------------------------------------------
local INPUTS = { input_ids = "tensor", attention_mask = "tensor", token_type_ids = "tensor", position_ids = "tensor",
  segment_ids = "tensor" }

local function with(names)
  for name, kind in pairs(INPUTS) do names[name] = kind end
  return names
end

local LABELLED = with { labels = "tensor" }
local ONE_LABEL = heads.without_segments(LABELLED)
local ANSWERED = heads.without_segments(with { start_positions = "tensor", end_positions = "tensor" })

---@class BertModel: ps.pretrained.Model
local BertModel = nn.class("BertModel", Model)
BertModel.base, BertModel.spare = "bert", { "^pooler%." }
BertModel.inputs = INPUTS
BertModel.body = { embeddings = true, encoder = true, pooler = true }

-- How the layers are split over ranks (ps/parallel/tensor/cut.lua).
local LAYER = "encoder.layer.*"
BertModel.tensor_parallel = {
  ["embeddings.word_embeddings"] = "vocabulary", ["embeddings.LayerNorm"] = { "enter", flat = true },
  ["embeddings.dropout"] = "inside", ["encoder"] = "inside",
  [LAYER .. ".attention.self"] = { "divide", "heads", "width", gather = { "query", "key", "value" },
    keys = { heads = "num_attention_heads", width = "hidden_size" } },
  [LAYER .. ".attention.self.query"] = "column", [LAYER .. ".attention.self.key"] = "column",
  [LAYER .. ".attention.self.value"] = "column", [LAYER .. ".attention.output.dense"] = "row",
  [LAYER .. ".intermediate.dense"] = "column", [LAYER .. ".output.dense"] = "row",
  ["encoder.layer.-1"] = "leave",
}

---@param config table config.json's fields; missing fields have the family's defaults
---@param given? {dtype?: string, device?: string, recompute?: boolean, unpad?: boolean}
---@param pooling? boolean whether the model has a pooler (default true)
function BertModel:init(config, given, pooling)
  local full, where = self:begin(config, given)
  where.padded = self.places ~= nil
  self.embeddings = Embeddings(full, where)
  where.padded = nil
  self.encoder = Encoder(full, where)
  if pooling ~= false then self.pooler = Pooler(full, where) end
  if given and given.recompute then self:recompute_blocks() end
  rawset(self, "unpad", given and given.unpad or nil)
end

-- Removes the padding from a batch that `read` has checked. The shape of ids, token types and positions becomes [S].
local function leave_out(batch, labels)
  local ids, shape = batch.input_ids, shape_of(batch.mask)
  batch.rows, batch.places = unpad.plan(heads.mask(batch.mask), labels)
  local types, places = batch.token_type_ids, batch.position_ids
  if places == nil then
    places = ps.arange(0, shape[2], 1, { dtype = "int64", device = ids:device() }):reshape(1, -1)
  end
  batch.input_ids, batch.position_ids = unpad.ids(ids, batch.rows, shape), unpad.ids(places, batch.rows, shape)
  if types ~= nil then batch.token_type_ids = unpad.ids(types, batch.rows, shape) end
end

-- Checks a batch (a table of named tensors) and returns the table that the parts read. This table contains the fields
-- of the batch and `mask`: bool [B, T], int32 [B, T] with segment numbers, or nil. If the positions depend on the
-- family or on segments, the table also contains position_ids. If unpad is set and there is a mask, padding is removed
-- (see leave_out). labels: int [B, T] for labels per token, or nil. A family whose positions depend on the ids has a
-- method places(ids, segments).
function BertModel:read(given, labels)
  local ids, c, who = given.input_ids, self.config, self.family.model_type
  heads.same_shapes(who, given, { "attention_mask", "token_type_ids", "position_ids" },
    { token_type_ids = true, position_ids = true })
  local batch = {}
  for name, t in pairs(given) do batch[name] = t end
  local segments, places = heads.segments(who, nil, given)
  if batch.position_ids == nil then batch.position_ids = self.places and self:places(ids, segments) or places end
  if batch.position_ids == nil and ids:size(1) > c.max_position_embeddings then
    error(("%s: input_ids has %d positions per row, the model has %d: shorten the rows"):format(who, ids:size(1),
      c.max_position_embeddings), 0)
  end
  heads.same_device(who, ids, self.embeddings.LayerNorm.weight)
  batch.mask = segments or heads.mask(given.attention_mask)
  if self.unpad and batch.mask ~= nil then leave_out(batch, labels) end
  return batch
end

-- Returns x as [B, T, C]. If padding was removed from x (x is [S, C]), inserts zeros at the padding.
local function padded(x, batch)
  return batch.rows ~= nil and unpad.unpack(x, batch.places, shape_of(batch.mask)) or x
end

-- Returns the first position (index 0) of each row of x as [B, 1, C], or all of x [B, T, C] if padding was not removed.
-- Heads for sequences read only the first position.
local function firsts(x, batch)
  return batch.rows ~= nil and unpad.first(x, batch.places, shape_of(batch.mask)) or x
end

-- Returns the model's parts: "embeddings", one part per layer ("encoder.layer.0" and so on), and the part named `last`.
-- The carry between parts is { x = [B, T, C] or [S, C] }. The last part calls fn(x, batch), which uses `modules`.
local function list_parts(body, last, modules, fn)
  local list = { { name = "embeddings", modules = { body.embeddings }, forward = function(_, batch)
    return { x = body.embeddings(batch.input_ids, batch.token_type_ids, batch.position_ids, batch.mask, batch.rows) }
  end } }
  for i, layer in body.encoder.layer:each() do
    list[#list + 1] = { name = "encoder.layer." .. i, modules = { layer }, forward = function(carry, batch)
      return { x = layer(carry.x, batch.mask, batch.rows, batch.places) }
    end }
  end
  list[#list + 1] = { name = last, modules = modules, forward = function(carry, batch) return fn(carry.x, batch) end }
  return heads.segmented(list)
end

--- Returns the table that the parts read. `given` is a table of named tensors, or token ids [B, T].
---@param given table|ps.Tensor
---@return table<string, ps.Tensor> batch
function BertModel:batch_of(given) return self:read(heads.batch(self, given)) end

---@return ps.nn.Part[]
function BertModel:parts()
  return list_parts(self, "pooler", { self.pooler }, function(x, batch)
    return { last_hidden_state = padded(x, batch),
      pooler_output = self.pooler and self.pooler(firsts(x, batch)) or nil }
  end)
end

--- Returns the last hidden states [B, T, C]. With unpad, the hidden states of padding are zero. If the model has a
--- pooler, also returns the pooler's output [B, C] for the first position. `given` is a table of named tensors, or
--- token ids [B, T].
---@param given table|ps.Tensor
---@return {last_hidden_state: ps.Tensor, pooler_output: ps.Tensor?}
function BertModel:forward(given) return parts.fold(self:parts(), self:batch_of(given)) end

function BertModel:vocabulary() return { { self.embeddings.word_embeddings, "weight" } } end

function BertModel:costs()
  local c = self.config
  return { looked_up = (c.vocab_size + c.max_position_embeddings + c.type_vocab_size) * c.hidden_size,
    layers = c.num_hidden_layers, width = c.hidden_size, positions = c.max_position_embeddings }
end

-- Returns the modules of a model that are outside its body, and the pooler of the body.
local function own_modules(model)
  local list = { model[model.prefix].pooler }
  for path, module in model:named_modules() do
    if path ~= "" and path ~= model.prefix and not path:find(".", 1, true) then list[#list + 1] = module end
  end
  return list
end

-- The linear layer, activation and norm before the logits of a masked language model.
local Transform = nn.class("BertPredictionHeadTransform")

function Transform:init(c, where)
  self.dense = nn.Linear(c.hidden_size, c.hidden_size, where)
  self.gelu, self.activation = settings.activation(c.hidden_act)
  self.LayerNorm = layer_norm(c, where)
end

function Transform:forward(x)
  local y = self.dense(x)
  return self.LayerNorm(self.gelu and F.gelu(y, self.gelu) or self.activation(y))
end

--- Adds the parameters of the last product to the head of a masked language model. If weights are tied, the token
--- embedding is the weight, and only `bias` [V] is added. Otherwise `decoder` is added, which has a weight and a bias.
--- As in transformers, the module then also has an unused parameter `bias`, which gets no gradient.
---@param module ps.nn.Module
---@param c table
---@param where table
local function vocabulary_head(module, c, where)
  local at = { dtype = where.dtype, device = where.device }
  module:param("bias", ps.zeros({ c.vocab_size }, at))
  if c.tie_word_embeddings then return end
  rawset(module, "_unused", { bias = true })                -- engine/step/unused.lua reads this field
  module.decoder = nn.Linear(c.hidden_size, c.vocab_size, where)
end

-- Returns the weight [V, C] and the bias [V] of the model's head. `module` was prepared by vocabulary_head().
local function vocabulary_of(model, module)
  if module.decoder then return parts.weight(module.decoder), module.decoder.bias end
  return model[model.prefix].embeddings.word_embeddings.weight, module.bias
end

-- If the vocabulary is split over ranks, returns its head: the decoder, or the head of the tied embedding. Otherwise
-- returns false or nil.
local function parallel_head(module)
  local decoder = module.decoder
  return decoder and decoder.class_name == "ParallelLMHead" and decoder or rawget(module, "vocabulary")
end

--- Defines the methods that all masked language models share. `path` is the path of the module that contains bias and
--- decoder. `head` returns this module. `transform` returns the vectors that are multiplied by the head's weight.
---@param class table
---@param path string
---@param head fun(model: table): ps.nn.Module
---@param transform fun(model: table, x: ps.Tensor): ps.Tensor
local function masked_lm(class, path, head, transform)
  -- Returns { logits = [B, T, V] }. If there are labels int [B, T] (-100 is ignored), returns { loss = } instead, and
  -- never holds all logits in memory.
  class.labelled = { "labels" }
  class.tensor_parallel = { [path] = { "words", table = class.prefix .. ".embeddings.word_embeddings" },
    [path .. ".decoder"] = { "head", optional = true } }
  function class:finish(x, batch)
    local labels = batch.labels
    if batch.rows ~= nil and labels ~= nil then labels = unpad.labels(labels, batch.rows, shape_of(batch.mask)) end
    x = transform(self, labels ~= nil and x or padded(x, batch))
    local cut_head = parallel_head(head(self))
    if cut_head then
      if labels == nil then return { logits = cut_head(x) } end
      return { loss = cut_head:loss(x, labels) }
    end
    local weight, bias = vocabulary_of(self, head(self))
    if labels == nil then return { logits = F.linear(x, weight, bias) } end
    return { loss = F.lm_loss(x, weight, labels, { bias = bias }) }
  end

  function class:head_modules()
    local list = own_modules(self)
    if self.config.tie_word_embeddings then list[#list + 1] = self[self.prefix].embeddings.word_embeddings end
    return list
  end

  function class:vocabulary()
    local list, module = self[self.prefix]:vocabulary(), head(self)
    list[2] = { module, "bias" }
    if module.decoder then list[3], list[4] = { module.decoder, "weight" }, { module.decoder, "bias" } end
    return list
  end

  function class:costs()
    local cost, c = self[self.prefix]:costs(), self.config
    if c.tie_word_embeddings then cost.looked_up = cost.looked_up - c.vocab_size * c.hidden_size
    else cost.looked_up = cost.looked_up + c.vocab_size end                     -- counts the unused bias
    return cost
  end
end

-- Returns the dropout before a classifier.
local function classifier_dropout(c) return nn.Dropout(c.classifier_dropout or c.hidden_dropout_prob) end

-- Returns a class with a body of class Body and a head. build(self, c, where) creates the head. The class must define
-- finish(x, batch), which computes the result of forward from the encoder's output x [B, T, C]. class.labelled lists
-- the names of the batch's tensors that must have the shape of the ids.
local function derive(name, Body, pooling, build)
  local class = nn.class(name, Model)
  class.base, class.prefix, class.body, class.spare = Body.base, Body.base, Body.body, Body.spare
  class.inputs, class.labelled, class.head_modules = LABELLED, {}, own_modules
  function class:init(config, given)
    local full, where = self:begin(config, given)
    local unpads = given and given.unpad or nil
    self[self.prefix] = Body(full, { dtype = where.dtype, device = where.device, unpad = unpads }, pooling)
    build(self, full, where)
    if given and given.recompute then self:recompute_blocks() end
    rawset(self, "unpad", unpads)
  end
  --- Returns the table that the parts read. `given` is a table of named tensors, or token ids [B, T].
  ---@param given table|ps.Tensor
  ---@return table<string, ps.Tensor> batch
  function class:batch_of(given)
    given = heads.batch(self, given)
    heads.same_shapes(self.family.model_type, given, self.labelled)
    return self[self.prefix]:read(given, self.labelled[1] and given.labels)
  end
  ---@return ps.nn.Part[]
  function class:parts()
    return list_parts(self[self.prefix], "head", self:head_modules(), function(x, batch)
      return self:finish(x, batch)
    end)
  end
  --- Returns the outputs of the head, and the loss if there are labels. `given` is a table of named tensors, or token
  --- ids [B, T].
  ---@param given table|ps.Tensor
  ---@return table<string, ps.Tensor>
  function class:forward(given) return parts.fold(self:parts(), self:batch_of(given)) end
  function class:vocabulary() return self[self.prefix]:vocabulary() end
  function class:costs() return self[self.prefix]:costs() end
  return class
end

--- Returns the classes for token classification and question answering, which BERT and RoBERTa share.
---@param brand string the prefix of the class names, such as "Bert"
---@param Body table
---@return table token_class
---@return table answer_class
local function per_token(brand, Body)
  local ForTokens = derive(brand .. "ForTokenClassification", Body, false, function(self, c, where)
    self.dropout = classifier_dropout(c)
    self.classifier = nn.Linear(c.hidden_size, c.num_labels, where)
  end)
  ForTokens.labelled = { "labels" }
  -- Returns { logits = [B, T, K], loss = }. labels are int [B, T] (-100 is ignored).
  function ForTokens:finish(x, batch)
    local out = { logits = heads.dropped(self.dropout, self.classifier, padded(x, batch)) }
    if batch.labels ~= nil then out.loss = heads.classify_tokens(out.logits, batch.labels) end
    return out
  end

  local ForAnswers = derive(brand .. "ForQuestionAnswering", Body, false, function(self, c, where)
    if c.num_labels ~= 2 then
      settings.refuse(self.family.model_type, "num_labels", c.num_labels, "question answering needs 2: start and end")
    end
    if self[self.prefix].unpad then
      settings.refuse(self.family.model_type, "unpad", true, "question answering scores all positions, with padding")
    end
    self.qa_outputs = nn.Linear(c.hidden_size, 2, where)
  end)
  ForAnswers.inputs = ANSWERED
  -- Returns { start_logits = [B, T], end_logits = [B, T], loss = }. start_positions and end_positions are int [B].
  function ForAnswers:finish(x, batch)
    return heads.answer(self.qa_outputs(x), batch.start_positions, batch.end_positions)
  end
  return ForTokens, ForAnswers
end

local Holder = nn.class("Module")                         -- a module without parameters of its own, which contains
                                                          -- other modules

local ForMaskedLM = derive("BertForMaskedLM", BertModel, false, function(self, c, where)
  self.cls = Holder()
  self.cls.predictions = Holder()
  self.cls.predictions.transform = Transform(c, where)
  vocabulary_head(self.cls.predictions, c, where)
end)
ForMaskedLM.ties = { ["cls.predictions.decoder.weight"] = "bert.embeddings.word_embeddings.weight",
  ["cls.predictions.decoder.bias"] = "cls.predictions.bias" }
masked_lm(ForMaskedLM, "cls.predictions", function(model) return model.cls.predictions end,
  function(model, x) return model.cls.predictions.transform(x) end)

local ForSequence = derive("BertForSequenceClassification", BertModel, true, function(self, c, where)
  self.dropout = classifier_dropout(c)
  self.classifier = nn.Linear(c.hidden_size, c.num_labels, where)
end)

ForSequence.inputs = ONE_LABEL
-- Returns { logits = [B, K], loss = }. labels are int [B] (one class per sequence), or float [B] or [B, K].
function ForSequence:finish(x, batch)
  local out = { logits = heads.dropped(self.dropout, self.classifier, self.bert.pooler(firsts(x, batch))) }
  if batch.labels ~= nil then out.loss = heads.classify("bert", out.logits, batch.labels, self.config) end
  return out
end

local ForTokens, ForAnswers = per_token("Bert", BertModel)

local bert = pretrained.family {
  model_type = "bert", settings = require("models.bert_config").bert,
  classes = { BertModel = BertModel, BertForMaskedLM = ForMaskedLM, BertForSequenceClassification = ForSequence,
    BertForTokenClassification = ForTokens, BertForQuestionAnswering = ForAnswers },
  tasks = { base = "BertModel", masked_lm = "BertForMaskedLM",
    sequence_classification = "BertForSequenceClassification",
    token_classification = "BertForTokenClassification", question_answering = "BertForQuestionAnswering" },
  presets = {
    ["bert-base"] = {},
    ["bert-large"] = { hidden_size = 1024, num_hidden_layers = 24, num_attention_heads = 16, intermediate_size = 4096 },
    ["tiny"] = { vocab_size = 256, hidden_size = 32, num_hidden_layers = 2, num_attention_heads = 2,
      intermediate_size = 64, max_position_embeddings = 32 },
  },
  shorthands = { dropout = { "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout" } },
  unpads = true,
}
-- Functions and classes that models/roberta.lua uses.
bert.pieces = { BertModel = BertModel, derive = derive, per_token = per_token, masked_lm = masked_lm,
  vocabulary_head = vocabulary_head, classifier_dropout = classifier_dropout, layer_norm = layer_norm, firsts = firsts,
  ONE_LABEL = ONE_LABEL }

return bert
