-- The model, and how a text becomes its input.
local ps = require "ps"
local nn, F = ps.nn, ps.F
local config = require "config"

local Classifier = nn.class "Classifier"

function Classifier:init(classes)
  self.embedding = nn.Embedding(config.buckets, config.width)
  self.hidden = nn.Linear(config.width, config.width)
  self.out = nn.Linear(config.width, classes)
end

-- ids: int32 [batch, letters]. With labels, int64 [batch], the loss, else the logits [batch, classes].
function Classifier:forward(ids, labels)
  local x = self.embedding(ids):mean(1)
  local logits = self.out(F.gelu(self.hidden(x)))
  if labels == nil then return logits end
  return F.cross_entropy(logits, labels)
end

-- The pairs of letters of a text, as numbers below config.buckets; blanks fill up short texts.
local function encode(text)
  local ids = {}
  text = (" " .. text:lower() .. (" "):rep(config.letters)):sub(1, config.letters + 1)
  for i = 1, config.letters do ids[i] = (text:byte(i) * 31 + text:byte(i + 1)) % config.buckets end
  return ids
end

return { new = function(classes) return Classifier(classes) end, encode = encode }
