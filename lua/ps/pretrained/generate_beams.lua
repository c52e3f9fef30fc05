-- SPDX-License-Identifier: BSD-3-Clause
-- Beam search as in transformers 5. At each step, the `num_beams` likeliest continuations of each prompt are continued.
-- The best continuations that have ended are kept. The score of a running continuation is the sum of its log
-- probabilities. When a continuation ends, its score is divided by its length to the power length_penalty.
-- Sizes: B prompts, K beams, V words.
local create = require "ps.tensor.create"
local scope = require "ps.core.scope"
local generate_choose = require "ps.pretrained.generate_choose"
local copied = require "ps.core.copied"

local beams = {}

local NEVER = -1e9                                         -- smaller than every score; an infinity would make sums NaN

---@class ps.pretrained.Beam
---@field score number
---@field token? integer
---@field parent? ps.pretrained.Beam the beam that this beam continues, or nil if it continues the prompt

-- Returns the last n tokens of a prompt and its continuation, or all tokens if there are fewer than n.
local function tail_of(beam, prompt, n)
  local back = {}
  while beam.parent and #back < n do back[#back + 1], beam = beam.token, beam.parent end
  for i = #prompt, math.max(1, #prompt - (n - #back) + 1), -1 do back[#back + 1] = prompt[i] end
  local tail = {}
  for i = #back, 1, -1 do tail[#tail + 1] = back[i] end
  return tail
end

local function ids_of(beam, prompt)
  local back, ids = {}, copied(prompt)
  while beam.parent do back[#back + 1], beam = beam.token, beam.parent end
  for i = #back, 1, -1 do ids[#ids + 1] = back[i] end
  return ids
end

-- Returns the likeliest continuations by one token: their scores and their indices in [B, K * V], sorted by descending
-- score.
local function candidates(rows, running, K, keep, chosen)
  local B = #running
  return scope.scope(function()
    local logits = rows:logits()
    local V = logits:size(1)
    local logp = generate_choose.process(logits:log_softmax(-1), rows, chosen, rows.model.together)
    local scores = {}
    for b, list in ipairs(running) do
      for k, beam in ipairs(list) do scores[(b - 1) * K + k] = beam.score end
    end
    local sums = logp + create.tensor(scores, { dtype = "fp32", device = logp:device() }):reshape(B * K, 1)
    local values, places = sums:reshape(B, K * V):topk(math.min(keep, K * V))
    return values:tolist(), places:tolist(), V
  end)
end

-- Adds the candidates that have ended to a prompt's list, which keeps the K best ended candidates.
local function finish(state, found, K, length, chosen)
  if not state.improvable or chosen.early_stopping == true and #state.finished == K then return end
  for rank, beam in ipairs(found) do
    if beam.ended and rank <= K then
      beam.final = beam.score / length ^ chosen.length_penalty
      local at = #state.finished + 1
      while at > 1 and state.finished[at - 1].final < beam.final do at = at - 1 end
      table.insert(state.finished, at, beam)
      state.finished[K + 1] = nil
    end
  end
end

-- Returns the K candidates to continue. Candidates that have not ended come before candidates that have ended. The
-- order within each of these two groups is kept.
local function go_on(found, K)
  local list = {}
  for _, beam in ipairs(found) do if not beam.ended and #list < K then list[#list + 1] = beam end end
  for _, beam in ipairs(found) do
    if beam.ended and #list < K then
      list[#list + 1] = { score = beam.score + NEVER, token = beam.token, parent = beam.parent, place = beam.place }
    end
  end
  return list
end

-- Returns whether a running beam can still reach a higher score than the worst of the K finished beams.
local function may_improve(state, best, K, length, n, chosen)
  if #state.finished < K then return true end
  if chosen.early_stopping == "never" and chosen.length_penalty > 0 then length = n end
  return best / length ^ chosen.length_penalty > state.finished[K].final
end

--- Generates continuations of prompts with beam search.
---@param rows ps.pretrained.Rows K rows per prompt
---@param prompts integer[][]
---@param n integer the largest number of tokens to add
---@param chosen table
---@return integer[][] the num_return_sequences best sequences per prompt, in the order of the prompts
function beams.run(rows, prompts, n, chosen)
  local K, states, running = chosen.num_beams, {}, {}
  local keep = math.max(2, 1 + chosen.eos_count) * K
  for b in ipairs(prompts) do
    states[b], running[b] = { finished = {}, improvable = true }, {}
    for k = 1, K do running[b][k] = { score = k == 1 and 0 or NEVER } end
  end
  for i = 1, n do
    rows:ready()
    local values, places, V = candidates(rows, running, K, keep, chosen)
    local order, next_ids, all_ended, all_full, improvable = {}, {}, true, true, false
    for b, prompt in ipairs(prompts) do
      local state, found = states[b], {}
      for c, score in ipairs(values[b]) do
        local place, token = math.floor(places[b][c] / V), places[b][c] % V
        local beam = { score = score, token = token, parent = running[b][place + 1], place = place }
        beam.ended = i == n or chosen.eos[token] ~= nil
          or chosen.stops and chosen.stops(tail_of(beam, prompt, chosen.tail)) or false
        all_ended = all_ended and beam.ended
        found[c] = beam
      end
      finish(state, found, K, i, chosen)
      running[b] = go_on(found, K)
      for k, beam in ipairs(running[b]) do
        order[(b - 1) * K + k], next_ids[(b - 1) * K + k] = (b - 1) * K + beam.place, beam.token
      end
      state.improvable = state.improvable and may_improve(state, running[b][1].score, K, i, n, chosen)
      improvable = improvable or state.improvable
      all_full = all_full and #state.finished == K
    end
    if all_ended or not improvable or all_full and chosen.early_stopping == true then break end
    scope.scope(function()
      rows:reorder(order)
      rows:append(create.tensor(next_ids, { dtype = "int32", device = rows.ids:device() }))
    end)
  end
  local results = {}
  for b, prompt in ipairs(prompts) do
    for k = 1, chosen.num_return_sequences do results[#results + 1] = ids_of(states[b].finished[k], prompt) end
  end
  return results
end

return beams
