-- SPDX-License-Identifier: BSD-3-Clause
-- Functions that several heads of models use. Their results are the same as in transformers. They prepare named batches
-- and masks, and compute the losses of classification and question answering. For models that generate text, they
-- create caches of keys and values, and compute attention over the cached keys.
local devices = require "ps.core.devices"
local create = require "ps.tensor.create"
local functional = require "ps.tensor.functional"
local scope = require "ps.core.scope"
local tensors = require "ps.tensor"
local segments_of = require "ps.tensor.segments"
local caller = require "ps.core.caller"
local loss_weight = require "ps.core.loss_weight"
local settings = require "ps.pretrained.settings"
local same_shape = require("ps.nn.module").same_shape
local native = require "ps.core.ffi"
local F = functional
local IGNORED = require("ps.data.batch").IGNORED
local packed = require "ps.nn.packed"
local error = caller.error
local META = native.device_index "meta"

local heads = {}

local function shape_text(t) return "[" .. table.concat(t:shape(), ", ") .. "]" end

--- Raises an error if token ids [B, T] contain no token.
---@param who string
---@param ids ps.Tensor
function heads.some_tokens(who, ids)
  if ids:numel() > 0 then return end
  error(("%s: the token ids are %s, which has no tokens: pass at least one row of at least one token"):format(who,
    shape_text(ids)), 0)
end

--- Returns a model's arguments as a named batch. If the argument is only a tensor of token ids, it becomes
--- { input_ids = }. Positions [T] are expanded to all rows. The field `inputs` of the model's class defines the allowed
--- names: name -> "tensor".
---@param model ps.pretrained.Model
---@param given any
---@return table batch
function heads.batch(model, given)
  local who = model.family.model_type
  if scope.is_tensor(given) then given = { input_ids = given } end
  if type(given) ~= "table" then
    error(("%s takes a tensor of token ids or a batch by names, { input_ids =, ... }, not a %s"):format(who,
      type(given)))
  end
  caller.options(given, who .. ": a batch by names", model.inputs)
  local ids = given.input_ids
  if ids == nil then error(who .. ": a batch by names needs input_ids, int [batch, positions]") end
  if ids:dim() ~= 2 then
    error(("%s: input_ids is %s; it must be [batch, positions]"):format(who, shape_text(ids)), 0)
  end
  heads.some_tokens(who, ids)
  local places = given.position_ids
  if places ~= nil and places:dim() == 1 then
    local copy = {}
    for name, t in pairs(given) do copy[name] = t end
    copy.position_ids, given = places:reshape(1, -1), copy
  end
  return given
end

--- Returns a class's inputs without segment_ids. Classes with one label per row use this function, because their rows
--- cannot contain several sequences.
---@param inputs table<string, string>
---@return table<string, string>
function heads.without_segments(inputs)
  local rest = {}
  for name, kind in pairs(inputs) do
    if name ~= "segment_ids" and name ~= "loss_weights" then rest[name] = kind end
  end
  return rest
end

--- Checks that tensors of a batch have the shape of input_ids [B, T]. A tensor whose name is in `loose` may also have
--- a single row for all samples.
---@param who string
---@param given table
---@param names string[]
---@param loose? table<string, boolean>
function heads.same_shapes(who, given, names, loose)
  local ids = given.input_ids
  for _, name in ipairs(names) do
    local t = given[name]
    if t ~= nil and name == "attention_mask" and t:dim() > 2 then
      settings.refuse(who, name, shape_text(t), "masks must be [batch, positions]")
    end
    local one_row = t ~= nil and loose and loose[name] and t:dim() == 2 and t:size(0) == 1 and t:size(1) == ids:size(1)
    if t ~= nil and not one_row and not same_shape(t:shape(), ids:shape()) then
      error(("%s: %s is %s, but input_ids is %s"):format(who, name, shape_text(t), shape_text(ids)), 0)
    end
  end
end

--- Checks that the token ids are on the same device as the embedding's weight. Does not check the weight if it belongs
--- to another pipeline stage.
---@param who string
---@param ids ps.Tensor
---@param weight ps.Tensor
function heads.same_device(who, ids, weight)
  if ids.device_ == weight.device_ or weight.device_ == META then return end
  error(("%s: the token ids are on %s, but the model is on %s: set the loader's device = \"%s\", or use ids:to(\"%s\")")
    :format(who, ids:device(), weight:device(), weight:device(), weight:device()), 0)
end

--- Returns the embedding row that belongs to padding. As in PyTorch, a negative index counts from the end.
---@param pad? integer|false the configuration's pad_token_id
---@param rows integer
---@return integer? row nil if there is none
function heads.padding_row(pad, rows)
  if not pad then return nil end
  return pad < 0 and rows + pad or pad
end

--- Calls a function that reads a tensor's values, and returns its result. Returns nil in a dry run and on device meta,
--- because tensors have no values there.
---@param t ps.Tensor the tensor whose values fn reads
---@param fn fun(t: ps.Tensor): any
---@return any
function heads.known(t, fn)
  if t.device_ == META then return nil end
  return devices.known(scope.no_grad, fn, t)
end

-- Returns whether, in each row of a tensor [B, T], every number is the previous number plus one. Returns true if the
-- values are unknown.
local function go_up(places)
  local n = places:size(1) - 1
  return n < 1 or heads.known(places, function(t)
    return (t:narrow(1, 1, n) - t:narrow(1, 0, n)):ne(1):to("int64"):sum():item() == 0
  end) ~= false
end

-- Returns a float mask [B, T] that is 1 where a run of equal numbers begins. It is 1 at the start of each row and at
-- each position whose number differs from the previous number.
local function begins_of(differs)
  local first = create.ones({ differs:size(0), 1 }, { device = differs:device() })
  return tensors.cat({ first, differs:float() }, 1)
end

--- Returns each token's position in its segment, counted from 0. Padding has position 0.
---@param segments ps.Tensor int32 [B, T]
---@return ps.Tensor int64 [B, T]
function heads.places_of(segments)
  return scope.no_grad(function()
    local at = create.arange(0, segments:size(1), 1, { device = segments:device() }):reshape(1, -1)
    return ((at - segments_of.begins(segments)) * segments:ne(0):float()):to("int64")
  end)
end

-- Returns segments computed from position_ids. A segment begins at each position that is not the previous position plus
-- one.
local function by_places(places, rows)
  return scope.no_grad(function()
    local T = places:size(1)
    local begins = begins_of(places:narrow(1, 1, T - 1):to("int64"):ne(places:narrow(1, 0, T - 1):to("int64") + 1))
    return begins:cumsum(1):to("int32"):expand(rows, T):contiguous()
  end)
end

--- Finds the sequences that share the rows of a batch, and checks position_ids. If the batch has segment_ids, tokens
--- with the same id belong to the same sequence. As in transformers, a position_id that restarts within a row also
--- begins a sequence, on three conditions: the model is causal, there is no attention_mask, and the configuration has
--- use_cache = false.
---@param who string
---@param config? table nil if restarting position_ids have no meaning for this model
---@param given table a named batch
---@return ps.Tensor? segments int32 [B, T], for F.attention's key_mask
---@return ps.Tensor? position_ids the batch's position_ids. If the batch has only segment_ids, the positions restart in
--- each segment
function heads.segments(who, config, given)
  local places, segments = given.position_ids, given.segment_ids
  if places ~= nil and places:is_float() then
    error(("%s: position_ids is %s; it must be int32 or int64"):format(who, places:dtype()))
  end
  if segments ~= nil then
    heads.same_shapes(who, given, { "segment_ids" })
    if segments:dtype() ~= "int32" and segments:dtype() ~= "int64" then
      error(("%s: segment_ids is %s; it must be int32 or int64"):format(who, segments:dtype()))
    end
    if given.attention_mask ~= nil then
      error(("%s: a batch has both segment_ids and attention_mask; leave attention_mask out, and give padding segment "
        .. "0"):format(who))
    end
    if segments:dtype() ~= "int32" then segments = segments:to("int32") end
    return segments, places or heads.places_of(segments)
  end
  if config and config.use_cache == false and places ~= nil and given.attention_mask == nil and not go_up(places) then
    return by_places(places, given.input_ids:size(0)), places
  end
  return nil, places
end

--- Prepares and returns the parts of a model that accepts segments. In a batch with segments, dropout then treats each
--- segment as a separate sample.
---@param list ps.nn.Part[] parts that each receive the batch's mask in batch.mask
---@return ps.nn.Part[] list
function heads.segmented(list) return segments_of.parts(list) end

--- Converts a mask of ones and zeros to bool [B, T], where true marks visible keys.
---@param mask? ps.Tensor
---@return ps.Tensor?
function heads.mask(mask)
  if mask == nil or mask:dtype() == "bool" then return mask end
  return mask:ne(0)
end

--- Applies dropout and then a layer.
---@param drop ps.nn.Dropout
---@param layer ps.nn.Module
---@param x ps.Tensor
---@return ps.Tensor
function heads.dropped(drop, layer, x)
  if drop:active() then x = drop(x) end
  return layer(x)
end

--- Returns one position of each sequence in x [B, T, C], as [B, C]. For sequence b this is x[b, at[b]]. `at` is int
--- [B].
---@param x ps.Tensor
---@param at ps.Tensor
---@return ps.Tensor
function heads.rows(x, at)
  local B, T, C = x:size(0), x:size(1), x:size(2)
  local first = create.arange(0, B, 1, { dtype = "int64", device = x:device() }) * T
  return F.embedding(first + at, x:reshape(B * T, C))
end

-- Returns the labels that the positions 0 .. T - 2 of a named batch predict. T must be greater than 1. With
-- segment_ids, the last position of a segment predicts no label.
local function next_labels(given)
  local labels, segments = given.labels, given.segment_ids
  local T = labels:size(1)
  local after = labels:narrow(1, 1, T - 1)
  if segments == nil then return after end
  local own, other = segments:narrow(1, 0, T - 1), segments:narrow(1, 1, T - 1)
  return after:masked_fill(own:ne(other):logical_or(own:eq(0)), IGNORED)
end

--- Returns the targets [B, T] of a language model's named batch, as in transformers. The labels are the tokens
--- themselves, and each position predicts the next token. The last position of a row has no target. With segment_ids,
--- the last position of each segment has no target either.
---@param given {labels: ps.Tensor, segment_ids?: ps.Tensor} both [B, T]
---@return ps.Tensor
function heads.shifted(given)
  local labels = given.labels
  local B, T = labels:size(0), labels:size(1)
  local none = create.full({ B, math.min(T, 1) }, IGNORED, { dtype = labels:dtype(), device = labels:device() })
  return T > 1 and tensors.cat({ next_labels(given), none }, 1) or none
end

--- Checks and returns the second argument of a language model's call: the targets, or nil. Raises an error for a table,
--- because named inputs belong in the same table as the tokens.
---@param who string
---@param targets? ps.Tensor
---@return ps.Tensor?
function heads.targets(who, targets)
  if targets == nil or scope.is_tensor(targets) then return targets end
  error(("%s: the targets are a %s, not a tensor: write model { input_ids = x, labels = x }, where labels are the "
    .. "tokens themselves, or model(x, y), where y[i] is the token after x[i]"):format(who, type(targets)))
end

-- Returns the weights of the targets that next_labels returns. Ignored targets have weight 0.
local function next_weights(given)
  local T = given.labels:size(1)
  return given.loss_weights:narrow(1, 1, T - 1) * next_labels(given):ne(IGNORED):float()
end

--- Returns the weights of the targets that heads.shifted returns. A target's weight is the weight of its label in
--- loss_weights, or 0 if the target is ignored. Returns nil if the batch has no loss_weights.
---@param who string
---@param given {labels: ps.Tensor, loss_weights?: ps.Tensor, segment_ids?: ps.Tensor}
---@return ps.Tensor? fp32 [B, T]
function heads.shifted_weights(who, given)
  local weights = given.loss_weights
  if weights == nil then return nil end
  heads.same_shapes(who, given, { "loss_weights" })
  if given.labels == nil then error(who .. ": loss_weights are weights of labels, and the batch has no labels") end
  if not weights:is_float() then
    error(("%s: loss_weights is %s; it must be fp32"):format(who, weights:dtype()))
  end
  local B, T = weights:size(0), weights:size(1)
  local none = create.zeros({ B, math.min(T, 1) }, { device = weights:device() })
  return T > 1 and tensors.cat({ next_weights(given):float(), none }, 1) or none
end

--- Returns the weighted mean loss, which is the sum of weight times loss divided by the sum of the weights. All logits
--- are in memory at the same time.
---@param logits ps.Tensor [B, T, V]
---@param targets ps.Tensor int [B, T]
---@param weights ps.Tensor fp32 [B, T]
---@return ps.Tensor loss
function heads.weighted_loss(logits, targets, weights)
  local n = targets:numel()
  local sum = scope.no_grad(function() return weights:sum() end)
  local total = heads.known(sum, function(t) return t:item() end) or n
  return loss_weight.as(function()
    local losses = F.cross_entropy(logits:reshape(n, -1), targets:reshape(n), { reduction = "none" })
    return (losses:float() * weights:reshape(n)):sum() / (total > 0 and total or 1)
  end, total)
end

--- Returns the number of targets in a named batch. If the batch has loss_weights, returns the sum of the targets'
--- weights instead. Targets are the labels that are not -100. The first label of each row, or of each segment if there
--- are segment_ids, is not a target, because no position predicts it. Returns nil for a batch that does not have labels
--- [B, T]. The caller then counts the targets without these rules.
---@param given any
---@return integer?
function heads.count_targets(given)
  local labels = type(given) == "table" and given.labels
  if not scope.is_tensor(labels) or labels:dim() ~= 2 then return nil end
  local T = labels:size(1)
  if T > 1 and given.loss_weights ~= nil then return next_weights(given):sum():item() end
  return T > 1 and next_labels(given):ne(IGNORED):sum():item() or 0
end

--- For each row, returns the position of the last token that is not padding, as int64 [B]. If a row contains only
--- padding, its position is 0.
---@param who string
---@param ids ps.Tensor [B, T]
---@param pad? integer the configuration's pad_token_id
---@return ps.Tensor
function heads.last_tokens(who, ids, pad)
  local B, T = ids:size(0), ids:size(1)
  if not pad then
    if B > 1 then
      error(("%s: the configuration has no pad_token_id, which is needed to find the ends of %d sequences"):format(
        who, B),
        0)
    end
    return create.full({ 1 }, T - 1, { dtype = "int64", device = ids:device() })
  end
  return (create.arange(0, T, 1, { dtype = "int64", device = ids:device() }) * ids:ne(pad):to("int64")):argmax(-1)
end

-- Returns the kind of classification. If the configuration does not set it, derives it from the labels.
local function problem_of(config, labels)
  if config.problem_type then return config.problem_type end
  if config.num_labels == 1 then return "regression" end
  local dtype = labels:dtype()
  return (dtype == "int32" or dtype == "int64") and "single_label_classification" or "multi_label_classification"
end

--- Returns the loss of logits [B, K] for whole sequences. config.problem_type selects the loss. If problem_type is
--- absent, the loss depends on config.num_labels and on the dtype of the labels. The losses are:
---   regression                    the squared error of K numbers
---   single_label_classification   the cross entropy of one class out of K
---   multi_label_classification    the binary cross entropy of each of K labels
---@param who string
---@param logits ps.Tensor [B, K]
---@param labels ps.Tensor [B], or [B, K] for several numbers or labels
---@param config table
---@return ps.Tensor loss
function heads.classify(who, logits, labels, config)
  local B, K, problem = logits:size(0), logits:size(1), problem_of(config, labels)
  local wants = problem == "single_label_classification" and B or B * K
  if labels:numel() ~= wants then
    local floats = not config.problem_type and labels:is_float() and labels:numel() == B
    error(("%s: labels is %s; %s of %d rows with num_labels = %d needs [%s]%s"):format(who, shape_text(labels), problem,
      B, K, wants == B and B or B .. ", " .. K, floats and ("; these are %s, but classes must be integers: "
      .. "ps.tensor(labels, { dtype = \"int64\" })"):format(labels:dtype()) or ""), 0)
  end
  if problem == "single_label_classification" then return F.cross_entropy(logits, labels:reshape(B)) end
  local target = labels:to(logits:dtype()):reshape(B, K)
  if problem == "regression" then return F.mse_loss(logits, target) end
  return F.binary_cross_entropy_with_logits(logits, target)
end

--- Returns the loss of logits [B, T, K] for one class per token. Labels are int [B, T]. Labels of -100 are ignored.
---@param logits ps.Tensor
---@param labels ps.Tensor
---@return ps.Tensor loss
function heads.classify_tokens(logits, labels) return F.cross_entropy(logits, labels) end

--- Splits the logits [B, T, 2] of question answering into start logits and end logits, each [B, T]. If `first` and
--- `last`, int [B], are given, also returns the loss, which is the mean of the two cross entropies. The weight of the
--- loss is the number of rows. Positions outside [0, T) are treated as in transformers: a negative position becomes 0,
--- and a position of T or more is ignored.
---@param logits ps.Tensor
---@param first? ps.Tensor
---@param last? ps.Tensor
---@return {start_logits: ps.Tensor, end_logits: ps.Tensor, loss: ps.Tensor?}
function heads.answer(logits, first, last)
  local B, T, given = logits:size(0), logits:size(1), {}
  local out = { start_logits = logits:select(2, 0):contiguous(), end_logits = logits:select(2, 1):contiguous() }
  if first == nil or last == nil then return out end
  out.loss = loss_weight.as(function()
    for i, position in ipairs { first, last } do
      given[i] = F.cross_entropy(i == 1 and out.start_logits or out.end_logits, position:reshape(B):clamp(0, T),
        { ignore_index = T })
    end
    return (given[1] + given[2]) / 2
  end, B)
  return out
end

-- -- generation ------------------------------------------------------------------------------------------------------
--- Returns the last position of x [B, T, C], as [B, 1, C].
---@param x ps.Tensor
---@return ps.Tensor
function heads.last_position(x) return x:narrow(1, x:size(1) - 1, 1):contiguous() end

-- Returns the shape and dtype of a cache whose type differs from the type of the weights.
local function cache_of(kind, shape, where)
  if where.device ~= "cpu" and where.device ~= "ref" and where.device ~= "meta" then
    error(("generate: kv_cache = %q works only on the cpu, but the model's weights are on %s"):format(kind,
      where.device))
  end
  if kind == "bf16" then return shape, "bf16" end
  local q8, width = packed.type "Q8_0", shape[4]
  if width % q8.block ~= 0 then
    error(("generate: kv_cache = \"q8_0\" needs heads of a multiple of %d columns, but the model's have %d; use "
      .. "\"bf16\""):format(q8.block, width))
  end
  return { shape[1], shape[2], shape[3], width / q8.block * q8.nbytes }, "uint8"
end

--- Creates caches of keys and values. Layers are counted from 0. Each layer gets one tensor of the given shape for each
--- name. The tensor has the dtype of the layer's weights, or the type `kind` if `kind` is given. Layers on other
--- pipeline ranks get no tensors.
---@param names string[]
---@param shape integer[]
---@param layers ps.nn.ModuleList
---@param weight_of fun(layer: ps.nn.Module): ps.Tensor
---@param kind? "bf16"|"q8_0"
---@return table<integer, table<string, ps.Tensor>>
function heads.caches(names, shape, layers, weight_of, kind)
  local caches = {}
  for i, layer in layers:each() do
    local weight = weight_of(layer)
    local where = { dtype = weight:dtype(), device = weight:device() }
    local sizes = shape
    if kind and kind ~= where.dtype then sizes, where.dtype = cache_of(kind, shape, where) end
    if where.device ~= "meta" then
      caches[i] = {}
      for _, name in ipairs(names) do caches[i][name] = create.empty(sizes, where) end
    end
  end
  return caches
end

local how, attended = native.ffi.new "ps_cached_attention", native.ffi.new "ps_tensor *[1]"

--- Computes attention for T new positions, and appends their keys and values to the caches. The caches already contain
--- the keys and values of the `at` positions before the new positions. A single function does all of this, because with
--- separate functions, the calls for one token of a small model would take longer than the memory accesses. The
--- function computes no gradients.
---@param attention {heads: integer, groups?: integer, scale?: number, window?: integer} H heads, and G groups of keys
--- and values (default H)
---@param caches {kv?: ps.Tensor, k?: ps.Tensor, v?: ps.Tensor} either kv [B, 2 G, S, D], where all keys are before the
--- values, or k and v [B, G, S, D]
---@param at integer
---@param mask? ps.Tensor bool [B, at + T]; false hides a key
---@param q ps.Tensor [B, T, H D]. With a cache kv, it is [B, T, (H + 2 G) D]: queries, keys and values concatenated
---@param k? ps.Tensor [B, T, G D]
---@param v? ps.Tensor [B, T, G D]
---@param cos? ps.Tensor cosines for F.rope, which rotates q and k
---@param sin? ps.Tensor
---@return ps.Tensor [B, T, H D]
function heads.attend_cached(attention, caches, at, mask, q, k, v, cos, sin)
  how.heads, how.groups, how.at = attention.heads, attention.groups or attention.heads, at
  how.window, how.scale = attention.window or 0, attention.scale or 0
  if native.placer then native.placer() end
  local keys = caches.kv or caches.k
  native.retry(native.C.ps_attention_cached, native.ctx, how, q, k, v, keys, caches.v, cos, sin, mask, attended)
  if native.follower then
    native.follower(nil, how, native.ffi.sizeof(how), 8, { [0] = q, k, v, keys, caches.v, cos, sin, mask }, 1, attended)
  end
  return native.own(attended[0])
end

return heads
