-- SPDX-License-Identifier: BSD-3-Clause
-- GPT-2. Parameter names, layouts ([in, out]) and initialisation are those of Hugging Face's GPT2LMHeadModel. The head
-- is the token table, so it is neither a parameter of its own nor stored, unless tie_word_embeddings is false.
-- Settings: gpt2_config.lua.
--
--   local gpt2 = require "models.gpt2"
--   local model = gpt2.new("gpt2", { dtype = "bf16" })         -- a preset, or a table of config.json's fields
--   local loss = model(x, y)                                   -- x, y: int [B, T]
--   local model = gpt2.from_pretrained("some/folder")          -- config.json + model.safetensors
--
-- Sizes: B batch, T positions, C width, H heads, D = C / H, V vocabulary, L layers.
local ps = require "ps"
local caller = require "ps.caller"
local nn = require "ps.nn"
local configs = require "models.gpt2_config"
local pretrained = require "ps.pretrained"
local F = ps.functional
local IGNORED, same_shape = require("ps.batch").IGNORED, require("ps.nn.module").same_shape
local error = caller.error

local gpt2 = {}

--- Settings by name; what a preset leaves out is gpt2_config's default.
gpt2.presets = {
  ["gpt2"] = {},
  ["gpt2-medium"] = { n_layer = 24, n_head = 16, n_embd = 1024 },
  ["gpt2-large"] = { n_layer = 36, n_head = 20, n_embd = 1280 },
  ["gpt2-xl"] = { n_layer = 48, n_head = 25, n_embd = 1600 },
  ["small"] = { vocab_size = 256, n_positions = 256, n_layer = 6, n_head = 4, n_embd = 256 },
  ["char"] = { vocab_size = 256, n_positions = 64, n_layer = 4, n_head = 4, n_embd = 128 },
  ["tiny"] = { vocab_size = 256, n_positions = 32, n_layer = 2, n_head = 2, n_embd = 32 },
}

local SETTINGS = { n_inner = "whole" }                     -- with their types
for key, default in pairs(configs.DEFAULTS) do SETTINGS[key] = type(default) end
local WHERE = { dtype = "string", device = "string", recompute = "boolean" }
local OPTIONS = { dropout = "number" }                     -- of gpt2.new: all of those
for _, keys in ipairs { SETTINGS, WHERE } do
  for key, kind in pairs(keys) do OPTIONS[key] = kind end
end

-- y + x, by way of the product's epilogue when no dropout stands between.
local function project(layer, drop, y, x)
  if not drop:active() then return layer(y, x) end
  return x + drop(layer(y))
end

local Attention = nn.class("Attention")
Attention.unscoped = true

-- layer: from 0.
function Attention:init(config, where, layer)
  local C = config.n_embd
  self.heads, self.width = config.n_head, C
  self.c_attn = nn.Conv1D(C, 3 * C, where)
  local scaled = config.initializer_range / math.sqrt(2 * config.n_layer)
  self.c_proj = nn.Conv1D(C, C, { std = scaled, dtype = where.dtype, device = where.device })
  self.attn_dropout = nn.Dropout(config.attn_pdrop)
  self.resid_dropout = nn.Dropout(config.resid_pdrop)
  local scale                                                           -- nil: 1 / sqrt(D)
  if not config.scale_attn_weights then scale = 1 end
  if config.scale_attn_by_inverse_layer_idx then scale = (scale or 1 / math.sqrt(C / config.n_head)) / (layer + 1) end
  self.plain = { causal = true, dropout = 0, scale = scale }
  self.dropping = { causal = true, dropout = config.attn_pdrop, scale = scale }
end

-- h [B, T, C] normalised, x [B, T, C] the residual stream. cache: {k, v [B, H, S, D]} filled up to position `at`.
-- mask bool [B, T], or nil: false hides a position as a key.
function Attention:forward(h, x, cache, at, mask)
  local qkv = self.c_attn(h)                                            -- [B, T, 3C]
  if cache then return self.c_proj(self:attend_cached(qkv, cache, at), x) end
  local options = self.attn_dropout:active() and self.dropping or self.plain
  if mask ~= nil then
    options = { causal = true, dropout = options.dropout, scale = options.scale, mask = mask }
  end
  local y = F.attention_packed(qkv, self.heads, options)
  return project(self.c_proj, self.resid_dropout, y, x)
end

function Attention:attend_cached(qkv, cache, at)
  local B, T, C, H = qkv:size(0), qkv:size(1), self.width, self.heads
  local function part(i)                                                -- [B, H, T, D]
    return qkv:narrow(2, i * C, C):reshape(B, T, H, C / H):permute(0, 2, 1, 3)
  end
  cache.k:narrow(2, at, T):copy_(part(1))
  cache.v:narrow(2, at, T):copy_(part(2))
  local y = F.attention(part(0), cache.k:narrow(2, 0, at + T), cache.v:narrow(2, 0, at + T), self.plain)
  return y:permute(0, 2, 1, 3):reshape(B, T, C)
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
  self.gelu, self.activation = configs.activation(config.activation_function)
end

function MLP:forward(h, x)
  if self.gelu == "tanh" and ps.prefers_fused(h:device()) then return self:fused(h, x) end
  local y = self.c_fc(h)                                                -- [B, T, 4C]
  return project(self.c_proj, self.dropout, self.gelu and F.gelu(y, self.gelu) or self.activation(y), x)
end

-- The same in one op, which a GPU has fast kernels for; its roundings in half types are fewer, so not quite the same.
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
  return self.mlp(self.ln_2(x), x)
end

local Transformer = nn.class("Transformer")

function Transformer:init(config, where)
  self.wte = nn.Embedding(config.vocab_size, config.n_embd, where)
  self.wpe = nn.Embedding(config.n_positions, config.n_embd, where)
  self.drop = nn.Dropout(config.embd_pdrop)
  self.h = nn.ModuleList()
  for layer = 0, config.n_layer - 1 do self.h:append(Block(config, where, layer)) end
  self.ln_f = nn.LayerNorm(config.n_embd, { eps = config.layer_norm_epsilon, dtype = where.dtype,
    device = where.device })
end

-- idx int [B, T] at positions from `at`; gives the residual stream [B, T, C] before the last norm.
function Transformer:forward(idx, caches, at, mask)
  at = at or 0
  local x = self.wte(idx) + self.wpe.weight:narrow(0, at, idx:size(1))  -- [B, T, C] + [T, C]
  x = self.drop(x)
  for i, block in self.h:each() do x = block(x, caches and caches[i], at, mask) end
  return x
end

---@class GPT2: ps.nn.Module
---@field config table
local GPT2 = nn.class("GPT2LMHeadModel")
gpt2.GPT2 = GPT2

---@param config table with config.json's fields; what it leaves out is GPT-2's
---@param options? {dtype?: string, device?: string, recompute?: boolean}
function GPT2:init(config, options)
  options = caller.options(options, "gpt2", WHERE)
  caller.typed(config, "table", "gpt2: the configuration")
  local full = configs.complete(config)
  self.config = full
  local where = { dtype = options.dtype, device = options.device, std = full.initializer_range }
  self.transformer = Transformer(full, where)
  if not full.tie_word_embeddings then
    self.lm_head = nn.Linear(full.n_embd, full.vocab_size, { bias = false, std = full.initializer_range,
      dtype = options.dtype, device = options.device })
  end
  if options.recompute then self:recompute_blocks() end
end

--- The head's weight [V, C]: the token table, or its own.
---@return ps.Tensor
function GPT2:head_weight() return (self.lm_head or self.transformer.wte).weight end

local NAMES = { input_ids = "tensor", labels = "tensor", attention_mask = "tensor" }

-- A batch by names, with transformers' meaning: labels [B, T] are the tokens themselves, of which each position but the
-- last learns the next one.
local function named(self, given)
  caller.options(given, "gpt2: a batch by names", NAMES)
  local ids, labels, mask = given.input_ids, given.labels, given.attention_mask
  if ids == nil then error("gpt2: a batch by names needs input_ids, int [batch, positions]") end
  for name, value in pairs(given) do
    if not same_shape(value:shape(), ids:shape()) then
      error(("gpt2: %s is [%s], input_ids is [%s]"):format(name, table.concat(value:shape(), ", "),
        table.concat(ids:shape(), ", ")))
    end
  end
  if mask ~= nil and mask:dtype() ~= "bool" then mask = mask:ne(0) end
  if labels == nil then return { logits = self:predict(ids, nil, mask) } end
  local B, T = ids:size(0), ids:size(1)
  local none = ps.full({ B, math.min(T, 1) }, IGNORED, { dtype = labels:dtype(), device = labels:device() })
  local targets = T > 1 and ps.cat({ labels:narrow(1, 1, T - 1), none }, 1) or none         -- [B, T]
  return { loss = self:predict(ids, targets, mask) }
end

--- How many targets a batch by names has: those of its labels that are not -100, but for the first of each row, which
--- no position predicts. Nil for other batches: y counts as it is.
---@param given any
---@return integer?
function GPT2:count_targets(given)
  local labels = type(given) == "table" and given.labels
  if not ps.is_tensor(labels) or labels:dim() ~= 2 then return nil end
  local T = labels:size(1)
  return T > 1 and labels:narrow(1, 1, T - 1):ne(IGNORED):sum():item() or 0
end

--- idx int [B, T]; without targets: logits [B, T, V]; with targets int [B, T] (-100: ignored): the mean loss, computed
--- without ever holding all logits. Or one table as transformers has it, { input_ids =, labels =, attention_mask = } of
--- [B, T] each: gives { loss = }, or without labels { logits = }. There targets are the labels shifted by one, while
--- `targets` are what each position should give.
---@param idx ps.Tensor|{input_ids: ps.Tensor, labels?: ps.Tensor, attention_mask?: ps.Tensor}
---@param targets? ps.Tensor
---@return ps.Tensor|{loss?: ps.Tensor, logits?: ps.Tensor}
function GPT2:forward(idx, targets)
  if type(idx) == "table" and targets == nil and next(idx) ~= nil and #idx == 0 then return named(self, idx) end
  if not ps.is_tensor(idx) then
    error(("gpt2 takes a tensor of token ids, not a %s: ps.tensor({ { 1, 2, 3 } }, { dtype = \"int32\" })"):format(
      type(idx)))
  end
  return self:predict(idx, targets)
end

-- Logits, or with targets their loss; mask bool [B, T].
function GPT2:predict(idx, targets, mask)
  if idx:dim() ~= 2 then error("gpt2: idx must be [batch, positions], it has " .. idx:dim() .. " dimensions", 0) end
  if idx:size(1) > self.config.n_positions then
    error(("gpt2: %d positions, this model has %d"):format(idx:size(1), self.config.n_positions), 0)
  end
  local body = self.transformer
  if idx.device_ ~= body.ln_f.weight.device_ then
    error(("gpt2: the token ids are on %s, the model on %s: give the loader device = \"%s\", or take ids:to(\"%s\")")
      :format(idx:device(), body.ln_f.weight:device(), body.ln_f.weight:device(), body.ln_f.weight:device()), 0)
  end
  local x = body.ln_f(body(idx, nil, nil, mask))                        -- [B, T, C]
  if targets ~= nil then return F.lm_loss(x, self:head_weight(), targets) end
  return F.linear(x, self:head_weight(), nil, { out_in = true })        -- [B, T, V]
end

--- Floating-point operations of training on one token: 6 for each weight that multiplies (the token table once, as the
--- head) and 12 L C T for attention over T positions.
---@param seq? integer T, default n_positions
---@return number
function GPT2:flops_per_token(seq)
  if seq ~= nil then caller.typed(seq, "number", "gpt2: flops_per_token: the positions") end
  local c = self.config
  local looked_up = c.n_positions + (self.lm_head and c.vocab_size or 0)
  local n = self:num_parameters() - looked_up * c.n_embd
  return 6 * n + 12 * c.n_layer * c.n_embd * (seq or c.n_positions)
end

local function new_caches(self, B, S)
  local c, caches = self.config, {}
  local weight = self.transformer.wte.weight
  local where = { dtype = weight:dtype(), device = weight:device() }
  local shape = { B, c.n_head, S, c.n_embd / c.n_head }
  for i = 0, c.n_layer - 1 do caches[i] = { k = ps.empty(shape, where), v = ps.empty(shape, where) } end
  return caches
end

-- Logits [B, V] after the columns `from`.. of the rows, whose earlier ones are in the caches up to `at`.
local function next_logits(self, rows, from, caches, at)
  local columns = {}
  for r, row in ipairs(rows) do columns[r] = { unpack(row, from) } end
  local body = self.transformer
  local idx = ps.tensor(columns, { dtype = "int32", device = body.wte.weight:device() })
  local T = idx:size(1)
  local x = body(idx, caches, at):narrow(1, T - 1, 1):contiguous()      -- [B, 1, C]
  return F.linear(body.ln_f(x), self:head_weight(), nil, { out_in = true }):reshape(#rows, self.config.vocab_size)
end

local function generate(self, rows, n, options)
  local B, window = #rows, self.config.n_positions
  local caches = new_caches(self, B, window)
  local at, offset = 0, 0
  for i = 1, n do
    local length = #rows[1]
    local from = length                         -- one new column, when the caches hold all others
    if i == 1 or at >= window then              -- start, or full: positions begin again with the last half window
      from = math.max(1, length - (i == 1 and window or math.ceil(window / 2)) + 1)
      at = 0
    end
    local next_ids = ps.scope(function()
      local logits = next_logits(self, rows, from, caches, at)
      return ps.ops.sample(logits, options.temperature, options.top_p, options.top_k, options.seed, offset):tolist()
    end)
    at, offset = at + length - from + 1, offset + B
    for r = 1, B do rows[r][length + 1] = next_ids[r] end
    if options.on_token and options.on_token(B == 1 and next_ids[1] or next_ids, i) == false then break end
  end
  return rows
end

local GENERATE = { temperature = "number", top_k = "whole", top_p = "number", seed = "whole", on_token = "callable" }

--- Continues token sequences. Keys and values are cached; when n_positions are full, it goes on from the last half.
---@param prompt integer[]|integer[][]|ps.Tensor a list of ids, a list of equally long lists, or int [B, T]
---@param n integer tokens to add
---@param options? {temperature?: number, top_k?: integer, top_p?: number, seed?: integer,
---  on_token?: fun(id: integer|integer[], i: integer): boolean?} temperature 0 takes the likeliest; on_token may stop
---  with false; without a seed the engine's random numbers are used
---@return integer[]|integer[][] ids prompt and continuation, a list for a list
function GPT2:generate(prompt, n, options)
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
  local was_training = self.training
  self:eval()
  local ok, result = pcall(ps.no_grad, ps.scope, generate, self, rows, n, chosen)
  self:train(was_training)
  if not ok then error(result, 0) end
  return single and result[1] or result
end

-- Our name for a name in a file; nil for what checkpoints carry besides parameters.
local function own_name(name)
  if name:match("%.attn%.bias$") or name:match("%.attn%.masked_bias$") then return nil end
  return (name == "lm_head.weight" or name:match("^transformer%.")) and name or "transformer." .. name
end

local HEAD, TABLE = "lm_head.weight", "transformer.wte.weight"

-- A file of a tied model may hold the head, too: it must be the token table.
local function check_tied(state, paths)
  if not state:has(HEAD) then return end
  if not state:has(TABLE) then return state:rename(HEAD, TABLE) end
  if not state:same(HEAD, TABLE) then
    error(("%s: lm_head.weight is not transformer.wte.weight, but this model's head is tied to it; make the model with "
      .. "tie_word_embeddings = false (in config.json, too)"):format(table.concat(paths, ", ")))
  end
  state:rename(HEAD)
end

-- Calls fn with the state that is in files, and closes them.
local function with_weights(paths, tied, fn)
  local state = pretrained.open(paths, own_name)
  local ok, problem = pcall(function()
    if tied then check_tied(state, paths) end
    fn(state)
  end)
  state.close()
  if not ok then error(problem, 0) end
end

-- Sizes by the weights that have them: a dimension, from 1.
local SIZE_OF = { { "vocab_size", TABLE, 1 }, { "n_embd", TABLE, 2 }, { "n_positions", "transformer.wpe.weight", 1 },
  { "n_inner", "transformer.h.0.mlp.c_fc.weight", 2 } }

-- Refuses a config.json of other sizes than the weights beside it, before memory and time go into a model of them.
local function check_sizes(config, state, from)
  local layers, seen = 0, {}
  for _, name in ipairs(state.names()) do
    local layer = name:match("^transformer%.h%.(%d+)%.")
    if layer and not seen[layer] then seen[layer], layers = true, layers + 1 end
  end
  if config.n_layer > layers then
    error(("%s: n_layer is %.0f, and the files have weights of %d layers"):format(from, config.n_layer, layers))
  end
  for _, row in ipairs(SIZE_OF) do
    local key, name, at = unpack(row)
    local shape, size = state:has(name) and state:shape(name), config[key] or 4 * config.n_embd   -- n_inner's default
    if shape and shape[at] ~= size then
      error(("%s: %s is %.0f, and %s in the files is [%s]"):format(from, key, size, name, table.concat(shape, ", ")))
    end
  end
end

local told = {}                                            -- files whose dtype a note was about

-- What config.json says of the type of its weights is no order: values of any type go into parameters of ours.
local function tell_dtype(config, model, from)
  local word, made = config.dtype or config.torch_dtype, model:head_weight():dtype()
  local dtype = pretrained.own_dtype(word)
  if not dtype or dtype == made or told[from] or ps.rank() > 0 then return end
  told[from] = true
  io.stderr:write(("psluajit: %s: dtype is %s, which is not followed: parameters are made in %s, unless "
    .. "from_pretrained(folder, { dtype = \"%s\" }) or an engine's configuration asks for others\n"):format(from, word,
    made, dtype))
end

--- Loads weights from files (safetensors, or PyTorch's pytorch_model.bin), with or without the "transformer." in front
--- of names.
---@param ... string paths
---@return GPT2 self
function GPT2:load_weights(...)
  local paths = { ... }
  if #paths == 0 then error("load_weights takes paths of files") end
  for _, path in ipairs(paths) do caller.typed(path, "string", "load_weights: a path") end
  with_weights(paths, self.config.tie_word_embeddings, function(state) self:load_state_dict(state) end)
  return self
end

--- The model in a folder that Hugging Face's save_pretrained wrote (one file of weights, or several and their index).
--- What its config.json asks for is done, or refused by name; its sizes are those of the weights. Only its dtype is not
--- followed, which a line on standard error says: `dtype` is the default type where it is left out.
---@param folder string
---@param options? {dtype?: string, device?: string, recompute?: boolean}
---@return GPT2
function gpt2.from_pretrained(folder, options)
  caller.typed(folder, "string", "from_pretrained: the folder")
  local from = folder .. "/config.json"
  local config = configs.complete(configs.from_file(pretrained.read_json(from)))
  local model
  with_weights(pretrained.files(folder), config.tie_word_embeddings, function(state)
    check_sizes(config, state, from)
    model = GPT2(config, options)
    model:load_state_dict(state)
  end)
  if not (options and options.dtype) then tell_dtype(config, model, from) end
  return model
end

--- Writes config.json and model.safetensors as from_pretrained and Hugging Face read them: of an engine the fp32 values
--- (masters), by rank 0, where all ranks call it.
---@param folder string
---@param engine? ps.Engine the engine that holds this model passes itself
function GPT2:save_pretrained(folder, engine)
  pretrained.save(engine or self, folder, function(dtype) return configs.to_file(self.config, dtype) end)
end

--- A model from a preset's name, or from a table of config.json's fields. Settings in `options` (n_layer, vocab_size,
--- ...) change the preset; `dropout` sets all three probabilities.
---@param preset string|table
---@param options? table
---@return GPT2
function gpt2.new(preset, options)
  local config, rest = {}, {}
  local base = type(preset) == "table" and preset or gpt2.presets[preset]
  if not base then
    local names = {}
    for name in pairs(gpt2.presets) do names[#names + 1] = name end
    table.sort(names)
    error(("gpt2: no preset '%s' (there are %s)"):format(tostring(preset), table.concat(names, ", ")))
  end
  for key, value in pairs(caller.options(base, "gpt2.new", SETTINGS)) do config[key] = value end
  for key, value in pairs(caller.options(options, "gpt2.new", OPTIONS)) do
    if key == "dropout" then
      config.embd_pdrop, config.attn_pdrop, config.resid_pdrop = value, value, value
    else
      (WHERE[key] and rest or config)[key] = value
    end
  end
  return GPT2(config, rest)
end

return gpt2
