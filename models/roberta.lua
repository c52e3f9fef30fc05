-- SPDX-License-Identifier: BSD-3-Clause
-- RoBERTa: BERT's encoder (models/bert.lua) with other heads. Positions are counted from pad_token_id + 1, and padding
-- is not counted. Parameter names and initialisation are the same as in Hugging Face's RobertaModel,
-- RobertaForMaskedLM, RobertaForSequenceClassification, RobertaForTokenClassification and RobertaForQuestionAnswering.
local ps = require "ps"
local nn = require "ps.nn"
local heads = require "ps.pretrained.heads"
local pretrained = require "ps.pretrained"
local settings = require "ps.pretrained.settings"
local pieces = require("models.bert").pieces
local F = ps.functional
local error = require("ps.caller").error

---@class RobertaModel: BertModel
local RobertaModel = nn.class("RobertaModel", pieces.BertModel)
RobertaModel.base = "roberta"

function RobertaModel:init(config, given, pooling)
  pieces.BertModel.init(self, config, given, pooling)
  if not self.config.pad_token_id then
    settings.refuse("roberta", "pad_token_id", nil, "positions are counted from it")
  end
end

-- Returns the positions int64 [B, T] of ids [B, T]. In each row or segment, the positions of ids that are not padding
-- are pad_token_id + 1, pad_token_id + 2, ... The position of padding is pad_token_id.
function RobertaModel:places(ids, segments)
  local pad = self.config.pad_token_id
  local counts = (segments ~= nil and segments:ne(0) or ids:ne(pad)):to("int64")
  local from_1 = segments ~= nil and heads.places_of(segments) + 1 or counts:cumsum(1)
  local places, most = from_1 * counts + pad, self.config.max_position_embeddings - pad - 1
  local longest = ids:size(1) > most and heads.known(places, function(t) return t:max():item() end) or 0
  if longest - pad > most then
    error(("roberta: a row has %d positions without padding, the model has %d (max_position_embeddings = %d, counted "
      .. "from pad_token_id + 1 = %d): shorten the rows"):format(longest - pad, most,
      self.config.max_position_embeddings, pad + 1), 0)
  end
  return places
end

local LMHead = nn.class("RobertaLMHead")

function LMHead:init(c, where)
  self.dense = nn.Linear(c.hidden_size, c.hidden_size, where)
  self.layer_norm = pieces.layer_norm(c, where)
  pieces.vocabulary_head(self, c, where)
end

function LMHead:forward(x) return self.layer_norm(F.gelu(self.dense(x))) end

local ForMaskedLM = pieces.derive("RobertaForMaskedLM", RobertaModel, false, function(self, c, where)
  self.lm_head = LMHead(c, where)
end)
ForMaskedLM.ties = { ["lm_head.decoder.weight"] = "roberta.embeddings.word_embeddings.weight",
  ["lm_head.decoder.bias"] = "lm_head.bias" }
pieces.masked_lm(ForMaskedLM, "lm_head", function(model) return model.lm_head end,
  function(model, x) return model.lm_head(x) end)

local ClassificationHead = nn.class("RobertaClassificationHead")

function ClassificationHead:init(c, where)
  self.dense = nn.Linear(c.hidden_size, c.hidden_size, where)
  self.dropout = pieces.classifier_dropout(c)
  self.out_proj = nn.Linear(c.hidden_size, c.num_labels, where)
end

-- Computes logits [B, K] from the first position of x [B, 1 or T, C].
function ClassificationHead:forward(x)
  return heads.dropped(self.dropout, self.out_proj, heads.dropped(self.dropout, self.dense, x:select(1, 0)):tanh())
end

local ForSequence = pieces.derive("RobertaForSequenceClassification", RobertaModel, false, function(self, c, where)
  self.classifier = ClassificationHead(c, where)
end)

ForSequence.inputs = pieces.ONE_LABEL
-- Returns { logits = [B, K], loss = }. labels are int [B] (one class per sequence), or float [B] or [B, K].
function ForSequence:finish(x, batch)
  local out = { logits = self.classifier(pieces.firsts(x, batch)) }
  if batch.labels ~= nil then out.loss = heads.classify("roberta", out.logits, batch.labels, self.config) end
  return out
end

local ForTokens, ForAnswers = pieces.per_token("Roberta", RobertaModel)

return pretrained.family {
  model_type = "roberta", settings = require("models.bert_config").roberta,
  classes = { RobertaModel = RobertaModel, RobertaForMaskedLM = ForMaskedLM,
    RobertaForSequenceClassification = ForSequence, RobertaForTokenClassification = ForTokens,
    RobertaForQuestionAnswering = ForAnswers },
  tasks = { base = "RobertaModel", masked_lm = "RobertaForMaskedLM",
    sequence_classification = "RobertaForSequenceClassification",
    token_classification = "RobertaForTokenClassification", question_answering = "RobertaForQuestionAnswering" },
  presets = {
    ["roberta-base"] = { max_position_embeddings = 514, type_vocab_size = 1, layer_norm_eps = 1e-5 },
    ["tiny"] = { vocab_size = 256, hidden_size = 32, num_hidden_layers = 2, num_attention_heads = 2,
      intermediate_size = 64, max_position_embeddings = 34 },
  },
  shorthands = { dropout = { "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout" } },
  unpads = true,
}
