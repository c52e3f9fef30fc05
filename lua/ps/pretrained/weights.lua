-- SPDX-License-Identifier: BSD-3-Clause
-- Loads weight files into a model of ps.pretrained. Names in files may have or lack the body's prefix. Older names,
-- such as LayerNorm.gamma, are also accepted. The files must have every tensor of the body. The head may be missing
-- from the files, or the files may contain a different head.
local dist = require "ps.dist"
local nn_module = require "ps.nn.module"
local sharded = require "ps.nn.sharded"
local caller = require "ps.core.caller"
local error = caller.error

local weights = {}

-- -- names ----------------------------------------------------------------------------------------------------------
-- Names of buffers in older files: masks and position ids.
local BUFFERS = { "%.attn%.bias$", "%.attn%.masked_bias$", "embeddings%.position_ids$",
  "embeddings%.token_type_ids$", "%.rotary_emb%.inv_freq$" }

local function fits(name, patterns)
  for _, pattern in ipairs(patterns or {}) do if name:find(pattern) then return true end end
  return false
end

-- Returns whether a tensor belongs to the body, which every file must contain. `name` is the tensor's name in a file or
-- in the model.
local function is_body(model, name)
  local rest = name:match("^" .. model.base .. "%.(.*)$") or name
  return model.body[rest:match("^[^.]+")] and not fits(rest, model.spare) or false
end

-- Returns the model's name for a name in a file, or nil if the model has no such tensor. `known` contains the model's
-- names, including the names of tied tensors.
local function own_name(model, known, name)
  name = name:gsub("LayerNorm%.gamma$", "LayerNorm.weight"):gsub("LayerNorm%.beta$", "LayerNorm.bias")
  local other = model.prefix and model.prefix .. "." .. name or name:match("^" .. model.base .. "%.(.*)$")
  return known[name] and name or other and known[other] and other or nil
end

--- Returns a function that maps a name in files to the model's name for the tensor, or to nil if the model has no such
--- tensor.
---@param model ps.pretrained.Model
---@return fun(name: string): string?
function weights.namer(model)
  local known = {}
  for name in pairs(model:state_dict { tied = false }) do known[name] = true end
  return function(name) return own_name(model, known, name) end
end

--- Returns a text with the first few names in sorted order.
---@param names string[]
---@return string
function weights.some(names)
  table.sort(names)
  local shown = {}
  for i = 1, math.min(#names, 8) do shown[i] = names[i] end
  if #names > 8 then shown[9] = ("and %d more"):format(#names - 8) end
  return table.concat(shown, ", ")
end

-- -- loading --------------------------------------------------------------------------------------------------------
-- Renames the tied tensors in the files to the model's names. If the files contain a tied tensor under both names,
-- checks that the two copies are equal, and removes one copy from `state`.
local function take_tied(model, state, files)
  for other, name in pairs(model.config.tie_word_embeddings and model.ties or {}) do
    if state:has(other) and not state:has(name) then state:rename(other, name)
    elseif state:has(other) then
      if not state:same(other, name) then
        error(("%s: %s differs from %s, but this model's head is tied to it; make the model with "
          .. "tie_word_embeddings = false (in config.json, too)"):format(table.concat(files.paths, ", "), other, name))
      end
      state:rename(other)
    end
  end
end

-- Removes tensors of the head from `state` if their shape in the file differs from their shape in the model. The
-- removed tensors are not loaded.
local function drop_mismatched(model, state, tensors)
  for _, name in ipairs(state:names()) do
    local tensor = tensors[name]
    if tensor and not is_body(model, name) and not nn_module.same_shape(state:shape(name), sharded.shape(tensor)) then
      state:rename(name)
    end
  end
end

local function tell(model, text, ...)
  if model.quiet or dist.rank() > 0 then return end
  io.stderr:write(("%s: %s\n"):format(model.class_name, text:format(...)))
end

-- Loads the tensors of an open state: all tensors of the body, and the tensors of the head that the state contains.
local function take(model, state, names, left, lost, how)
  local tensors = model:state_dict { tied = false }
  if how.ignore_mismatched_sizes then drop_mismatched(model, state, tensors) end
  local found = model:load_state_dict(state, { strict = false, check_only = true })
  local body, head = {}, {}
  for _, name in ipairs(found.missing) do table.insert(is_body(model, name) and body or head, name) end
  if #body > 0 then
    error(("load_state_dict: %d missing: %s: the files have no such tensors of the model's body"):format(#body,
      weights.some(body)))
  end
  if #lost > 0 and not how.shorter then
    error(("load_state_dict: %d unexpected: %s: the files have more of the model's body than config.json says"):format(
      #lost, weights.some(lost)))
  end
  model:load_state_dict(state, { strict = false })
  for _, name in ipairs(lost) do left[#left + 1] = name end
  for name, own in pairs(names) do
    local tied = model.config.tie_word_embeddings and model.ties and model.ties[own]
    names[name] = tied or own
  end
  model.loaded = { missing = head, left = left, names = names }
  if #head > 0 then
    tell(model, "the files lack %s, initialized from the seed: %s", caller.counted(#head, "parameter"),
      weights.some(head))
  end
  if #left > 0 then
    tell(model, "the model does not use %s of the files: %s", caller.counted(#left, "tensor"), weights.some(left))
  end
end

---@class ps.pretrained.Loading
---@field ignore_mismatched_sizes? boolean whether to skip tensors of the head whose shapes in files and model differ
---@field shorter? boolean whether the files may have more layers than the model

--- Loads the weights of open files into a model, one tensor at a time. Raises an error if a tensor of the body is
--- missing from the files, or if its shape there differs from its shape in the model.
---@param model ps.pretrained.Model
---@param files ps.pretrained.Files
---@param how? ps.pretrained.Loading
function weights.load(model, files, how)
  local known, names, left, lost = {}, {}, {}, {}
  for name in pairs(model:state_dict { tied = false }) do known[name] = true end
  if model.config.tie_word_embeddings then for other in pairs(model.ties or {}) do known[other] = true end end
  local state = files:state(function(name)
    local own = own_name(model, known, name)
    names[name] = own
    if own or fits(name, BUFFERS) then return own end
    table.insert(is_body(model, name) and lost or left, name)
  end)
  take_tied(model, state, files)
  take(model, state, names, left, lost, how or {})
end

return weights
