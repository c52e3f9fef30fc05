-- SPDX-License-Identifier: BSD-3-Clause
-- Continues token sequences with a causal model, whose keys and values are cached. A model gives:
--   positions()                             how many positions it has
--   new_caches(B, S)                        caches of B rows and S positions
--   next_logits(rows, from, caches, at)     logits [B, V] after the columns `from`.. of the rows, whose earlier ones
--                                           are in the caches up to `at`
local ps = require "ps"
local caller = require "ps.caller"
local error = caller.error

local function run(model, rows, n, chosen)
  local B, window = #rows, model:positions()
  local caches = model:new_caches(B, window)
  local at, offset = 0, 0
  for i = 1, n do
    local length = #rows[1]
    local from = length                         -- one new column, when the caches hold all others
    if i == 1 or at >= window then              -- start, or full: positions begin again with the last half window
      from = math.max(1, length - (i == 1 and window or math.ceil(window / 2)) + 1)
      at = 0
    end
    local next_ids = ps.scope(function()
      local logits = model:next_logits(rows, from, caches, at)
      return ps.ops.sample(logits, chosen.temperature, chosen.top_p, chosen.top_k, chosen.seed, offset):tolist()
    end)
    at, offset = at + length - from + 1, offset + B
    for r = 1, B do rows[r][length + 1] = next_ids[r] end
    if chosen.on_token and chosen.on_token(B == 1 and next_ids[1] or next_ids, i) == false then break end
  end
  return rows
end

local GENERATE = { temperature = "number", top_k = "whole", top_p = "number", seed = "whole", on_token = "callable" }

--- Continues token sequences. Keys and values are cached; when all positions are full, it goes on from the last half.
---@param model ps.pretrained.Model
---@param prompt integer[]|integer[][]|ps.Tensor a list of ids, a list of equally long lists, or int [B, T]
---@param n integer tokens to add
---@param options? {temperature?: number, top_k?: integer, top_p?: number, seed?: integer,
---  on_token?: fun(id: integer|integer[], i: integer): boolean?} temperature 0 takes the likeliest; on_token may stop
---  with false; without a seed the engine's random numbers are used
---@return integer[]|integer[][] ids prompt and continuation, a list for a list
return function(model, prompt, n, options)
  local chosen = { temperature = 1, top_k = 0, top_p = 1 }
  for key, value in pairs(caller.options(options, "generate", GENERATE)) do chosen[key] = value end
  if type(prompt) ~= "table" and not ps.is_tensor(prompt) then
    error("generate: the prompt is a list of token ids or a tensor, not " .. tostring(prompt))
  end
  caller.whole(n, "generate: the number of tokens", 0)
  if chosen.seed then caller.seed(chosen.seed, "generate: seed")
  else
    local rng = ps.rng()
    chosen.seed = rng.seed + rng.offset * 0x9E3779B97F4A7C15ULL
    rng.offset = rng.offset + 1
  end
  if type(prompt) == "cdata" then prompt = prompt:tolist() end
  local single = type(prompt[1]) ~= "table"
  local rows = {}
  for r, row in ipairs(single and { prompt } or prompt) do
    rows[r] = { unpack(row) }
    if #row == 0 or #row ~= #rows[1] then error("generate: prompts must be of one length, at least 1") end
    for _, id in ipairs(row) do caller.whole(id, "generate: a token id") end
  end
  local was_training = model.training
  model:eval()
  local ok, result = pcall(ps.no_grad, ps.scope, run, model, rows, n, chosen)
  model:train(was_training)
  if not ok then error(result, 0) end
  return single and result[1] or result
end
