-- SPDX-License-Identifier: BSD-3-Clause
-- Compares a GGUF file with the model that it was made from. Both models run on the same text, and their distributions
-- of the next token are compared. A certificate records how much the distributions differ.
local caller = require "ps.core.caller"
local create = require "ps.tensor.create"
local scope = require "ps.core.scope"
local F = require "ps.tensor.functional"
local writing = require "ps.io.gguf_write"
local error = caller.error

local verify = {}

local WINDOW = 256                                         -- number of tokens that are compared at a time
-- Limits by tensor type: the largest mean KL divergence, and the smallest fraction of positions at which both models
-- have the same likeliest token. The limits of a file are the widest limits among the types of its tensors. The limits
-- are meant for models that were not trained with low-bit weights.
local LIMITS = { F32 = { 1e-6, 0.999 }, F16 = { 1e-4, 0.99 }, BF16 = { 1e-2, 0.95 }, Q8_0 = { 1e-2, 0.95 },
  Q6_K = { 2e-2, 0.93 }, Q5_1 = { 5e-2, 0.9 }, Q5_0 = { 5e-2, 0.9 }, Q4_K = { 0.15, 0.8 }, Q4_1 = { 0.3, 0.75 },
  Q4_0 = { 0.3, 0.75 } }
local OTHER = { 0.5, 0.6 }

--- The default text for the comparison.
verify.TEXT = [[
The river rises in the hills to the north of the town, where the rain of the winter months is held by peat and moss. It
runs south for some forty miles before it meets the sea. For most of that way it is slow and wide, and small boats carry
grain, timber and wool between the villages on its banks. In the year 1847 a company built a railway along the valley,
and within ten years most of the boats were gone. The old warehouses still stand. Some of them are homes now, and one
holds a museum in which visitors can see the tools of the boat builders.

To compute the mean of a list of numbers, add the numbers and divide the sum by how many there are. In Python:

def mean(values):
    if not values:
        raise ValueError("the mean of an empty list is not defined")
    return sum(values) / len(values)

Question: What is the capital of France? Answer: The capital of France is Paris. Question: How many days does a week
have? Answer: A week has seven days. Question: Which gas do plants take from the air? Answer: Plants take carbon dioxide
from the air, and with water and the light of the sun they make sugar and oxygen.

"I have been told," she said, "that the letter never arrived." He looked at the table for a while before he answered.
"It did arrive," he said at last, "but nobody here could read it, and so it was put away with the other papers. I found
it this morning."
]]

-- Returns the log-probabilities [T, V] of the next token, in fp32.
local function log_probabilities(model, ids)
  local logits = model({ input_ids = ids }).logits
  return F.log_softmax(logits:reshape(logits:size(1), logits:size(2)):to("fp32"), -1)
end

---@class ps.gguf.Certificate
---@field tokens integer the number of compared positions
---@field mean_kl number the mean over positions of KL(reference || file), in nats
---@field max_kl number
---@field top1 number the fraction of positions at which both models have the same likeliest token
---@field perplexity number the perplexity of the file's model on the text
---@field reference_perplexity number
---@field limit_kl number the largest mean_kl that passes
---@field limit_top1 number the smallest top1 that passes
---@field pass boolean

--- Compares two language models on the ids of a text.
---@param model ps.pretrained.Model the model from the file
---@param reference ps.pretrained.Model
---@param ids integer[]
---@param limits number[] the largest mean KL divergence, and the smallest fraction of positions with the same likeliest
--- token
---@return ps.gguf.Certificate
function verify.compare(model, reference, ids, limits)
  local n, kl, worst, same, nll, nll_reference = 0, 0, 0, 0, 0, 0
  if #ids < 2 then error("verify: the text has fewer than two tokens") end
  local window = WINDOW
  for _, one in ipairs { model, reference } do
    window = math.min(window, one.config.max_position_embeddings or one.config.n_positions)
  end
  for first = 1, #ids - 1, window do
    local last = math.min(first + window, #ids)
    local part = {}
    for i = first, last do part[#part + 1] = ids[i] end
    scope.scope(scope.no_grad, function()
      local x = create.tensor({ { unpack(part, 1, #part - 1) } }, { dtype = "int32" })
      local y = create.tensor({ unpack(part, 2) }, { dtype = "int32" }):reshape(-1, 1)
      local a, b = log_probabilities(reference, x), log_probabilities(model, x)
      local each = (a:exp() * (a - b)):sum(-1)
      local sum = each:sum():item()
      if sum ~= sum or sum == math.huge then
        local which = a:sum():isfinite():item() and "file" or "reference"
        error(("verify: the %s's logits of tokens %d to %d are not finite, so nothing can be compared; look for NaN or "
          .. "too large values in its weights"):format(which, first, last - 1), 0)
      end
      n, kl = n + #part - 1, kl + sum
      worst = math.max(worst, each:max():item())
      same = same + (a:argmax(-1) - b:argmax(-1)):eq(0):to("fp32"):sum():item()
      nll, nll_reference = nll - b:gather(-1, y):sum():item(), nll_reference - a:gather(-1, y):sum():item()
    end)
  end
  local mean, share = math.max(kl / n, 0), same / n
  local fine = mean <= limits[1] and share >= limits[2]
  return { tokens = n, mean_kl = mean, max_kl = worst, top1 = share, perplexity = math.exp(nll / n),
    reference_perplexity = math.exp(nll_reference / n), limit_kl = limits[1], limit_top1 = limits[2], pass = fine }
end

local KEY = "psluajit.verify."
-- The fields of a certificate in a file's metadata, and their types.
local NOTED = { { "tokens", "uint32" }, { "mean_kl", "float32" }, { "max_kl", "float32" }, { "top1", "float32" },
  { "perplexity", "float32" }, { "reference_perplexity", "float32" }, { "pass", "bool" } }

--- Returns metadata entries that reserve space for a certificate. The entries say that 0 tokens were compared and that
--- the comparison has not passed.
---@return ps.gguf.Entry[]
function verify.entries()
  local entries = {}
  for i, one in ipairs(NOTED) do entries[i] = { KEY .. one[1], one[2], one[2] ~= "bool" and 0 } end
  return entries
end

--- Writes a certificate into the entries that a file reserves for it. Does not change the rest of the file.
---@param path string
---@param certificate ps.gguf.Certificate
function verify.note(path, certificate)
  for _, one in ipairs(NOTED) do
    writing.replace(path, { KEY .. one[1], one[2], certificate[one[1]] })
  end
end

--- Returns the limits for a file. They are the widest limits among the types of the file's tensors.
---@param file ps.Gguf
---@return number[]
function verify.limits(file)
  local widest = LIMITS.F32
  for _, name in ipairs(file:names()) do
    local limits = LIMITS[file:type(name)] or OTHER
    if limits[1] > widest[1] then widest = limits end
  end
  return widest
end

return verify
