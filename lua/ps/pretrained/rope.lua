-- SPDX-License-Identifier: BSD-3-Clause
-- Computes rotary position embeddings as a config.json describes them: in `rope_parameters`, or in `rope_theta` and
-- `rope_scaling` in older files. The angle of column pair i at position p is p times the frequency of pair i. The base
-- frequency is theta^(-2i / D). The kinds below change the frequencies for sequences that are longer than the training
-- sequences. The formulas are from transformers' modeling_rope_utils.py. Unlike in transformers, the frequencies of
-- kind "dynamic" depend only on the sequence length of the current call.
local create = require "ps.tensor.create"
local ffi = require "ffi"
local settings = require "ps.pretrained.settings"
local error = require("ps.core.caller").error

local rope = {}

-- The settings that each kind reads in addition to rope_theta. A setting with the value true is required.
local KINDS = {
  default = {}, linear = { factor = true }, dynamic = { factor = true },
  llama3 = { factor = true, low_freq_factor = true, high_freq_factor = true, original_max_position_embeddings = false },
  yarn = { factor = true, original_max_position_embeddings = false, attention_factor = false, beta_fast = false,
    beta_slow = false, mscale = false, mscale_all_dim = false, truncate = false },
  longrope = { short_factor = true, long_factor = true, attention_factor = true, factor = false,
    original_max_position_embeddings = false },
}
local STRETCHED = { llama3 = true, yarn = true, longrope = true }
local TYPES = { truncate = "boolean", short_factor = "table", long_factor = "table" }

-- Checks that longrope's lists short_factor and long_factor are equal. If they differed, the frequencies would depend
-- on the length of the text.
local function check_factors(who, p)
  local same = #p.short_factor == #p.long_factor
  for i, one in ipairs(p.short_factor) do
    local fine = type(one) == "number" and one > 0
    if not fine then
      error(("%s: rope_parameters: short_factor[%d] is %s; it must be a number above 0"):format(who, i, tostring(one)))
    end
    same = same and one == p.long_factor[i]
  end
  if not same then
    settings.refuse(who, "long_factor", p.long_factor, "it differs from short_factor, which is not supported")
  end
end

--- Returns all settings of a configuration for rotary embeddings: rope_type, rope_theta, and the settings of the kind.
--- If a setting is not supported, raises an error that names the setting.
---@param who string
---@param config table
---@return table parameters
function rope.parameters(who, config)
  local given = config.rope_scaling or config.rope_parameters or {}
  local p, named = {}, given.rope_type or given.type
  if type(named) == "string" and not KINDS[named] then
    settings.refuse(who, "rope_type", named, settings.supported(KINDS))
  end
  for _, key in ipairs { "mrope_section", "mrope_interleaved" } do
    if given[key] ~= nil and type(given[key]) ~= "userdata" and given[key] ~= false then
      settings.refuse(who, key, given[key], "rotary embedding by sections of a head (mrope) is not supported")
    end
  end
  for key, value in pairs(given) do
    if type(value) == "table" and not (named == "longrope" and TYPES[key] == "table") then
      settings.refuse(who, key, value, "rotary embedding by kinds of layers is not supported")
    end
    if type(value) ~= "userdata" then p[key] = value end                -- null means absent
  end
  p.rope_type, p.type = p.rope_type or p.type or "default", nil
  p.rope_theta = p.rope_theta or config.rope_theta or 10000
  local kind = KINDS[p.rope_type]
  if not kind then settings.refuse(who, "rope_type", p.rope_type, settings.supported(KINDS)) end
  local share = p.partial_rotary_factor or config.partial_rotary_factor or 1
  if share ~= 1 then
    settings.refuse(who, "partial_rotary_factor", share, "an embedding of a part of each head is not supported")
  end
  if STRETCHED[p.rope_type] then
    p.original_max_position_embeddings = config.original_max_position_embeddings or p.original_max_position_embeddings
      or config.max_position_embeddings
  end
  if p.rope_type == "yarn" and type(given.factor) == "userdata" then      -- null in DeepSeek's files
    p.factor = config.max_position_embeddings / p.original_max_position_embeddings
  end
  if type(given.truncate) == "userdata" then p.truncate = false end         -- null means false for truncate
  for key, needed in pairs(kind) do
    local value = p[key]
    if value == nil and needed then
      error(("%s: rope_parameters of rope_type = %s need %s"):format(who, p.rope_type, key))
    end
    if value ~= nil and type(value) ~= (TYPES[key] or "number") then
      error(("%s: rope_parameters: %s is a %s; it must be a %s"):format(who, key, type(value), TYPES[key] or "number"))
    end
  end
  if p.rope_type == "longrope" then check_factors(who, p) end
  if type(p.rope_theta) ~= "number" or p.rope_theta <= 0 then
    error(("%s: rope_theta = %s: it must be above 0"):format(who, tostring(p.rope_theta)))
  end
  return p
end

local function fp32(x) return tonumber(ffi.cast("float", x)) end

-- Returns the frequencies theta^(-2i / D) of the D / 2 pairs. Intermediate results are rounded as in transformers,
-- because models were trained with the rounded frequencies. The rounded frequencies differ from the exact frequencies
-- by a factor of up to 1 + 5e-7.
local function plain(theta, D)
  local all = {}
  for i = 0, D / 2 - 1 do all[i + 1] = fp32(1 / fp32(theta ^ fp32(2 * i / D))) end
  return all
end

-- Returns the frequencies of kind llama3, and the factor 1. Low frequencies are divided by `factor`, high frequencies
-- do not change, and frequencies between them are interpolated.
local function llama3(p, theta, D)
  local all, old = plain(theta, D), p.original_max_position_embeddings
  for i, frequency in ipairs(all) do
    local wave = 2 * math.pi / frequency
    if wave > old / p.low_freq_factor then all[i] = frequency / p.factor
    elseif wave >= old / p.high_freq_factor then
      local smooth = (old / wave - p.low_freq_factor) / (p.high_freq_factor - p.low_freq_factor)
      all[i] = (1 - smooth) * frequency / p.factor + smooth * frequency
    end
  end
  return all, 1
end

--- Returns the numbers by which the kind llama3 divides the D / 2 frequencies. GGUF files store these numbers in the
--- tensor rope_freqs.weight.
---@param p table settings of the kind llama3
---@param theta number rope_theta
---@param D integer the width of a head
---@return number[]
function rope.llama3_factors(p, theta, D)
  local list, unscaled = {}, plain(theta, D)
  for i, one in ipairs((llama3(p, theta, D))) do list[i] = unscaled[i] / one end
  return list
end

-- Returns the frequencies of kind longrope, and the attention factor. Frequency i is divided by element
-- i of short_factor.
local function longrope(p, D)
  local all = {}
  if #p.short_factor ~= D / 2 then
    error(("rope_parameters: short_factor has %d numbers, but a head of %d columns has %d pairs"):format(
      #p.short_factor, D, D / 2))
  end
  for i = 0, D / 2 - 1 do all[i + 1] = fp32(1 / fp32(p.short_factor[i + 1] * fp32(p.rope_theta ^ fp32(2 * i / D)))) end
  return all, p.attention_factor
end

-- Returns x, or nil if x is 0. In these settings, 0 means that there is no value.
local function above_0(x) return x ~= 0 and x or nil end

-- Returns YaRN's frequencies (Peng et al. 2023), and the attention factor. If a pair rotates often within the original
-- length, its frequency does not change. If a pair rotates rarely, its frequency is divided by `factor`. Between these
-- pairs, a linear ramp interpolates between the two frequencies.
local function yarn(p, D)
  local old, truncate = p.original_max_position_embeddings, p.truncate ~= false
  local function pair_of(turns) return D * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(p.rope_theta)) end
  local low, high = pair_of(above_0(p.beta_fast) or 32), pair_of(above_0(p.beta_slow) or 1)
  if truncate then low, high = math.floor(low), math.ceil(high) end
  low, high = math.max(low, 0), math.min(high, D - 1)
  if low == high then high = high + 0.001 end
  local all = plain(p.rope_theta, D)
  for i, frequency in ipairs(all) do
    local ramp = math.min(math.max((i - 1 - low) / (high - low), 0), 1)
    all[i] = frequency / p.factor * ramp + frequency * (1 - ramp)
  end
  local function scale(by) return p.factor <= 1 and 1 or 0.1 * by * math.log(p.factor) + 1 end
  local factor = p.attention_factor
  if not factor and p.mscale and p.mscale_all_dim and p.mscale ~= 0 and p.mscale_all_dim ~= 0 then
    factor = scale(p.mscale) / scale(p.mscale_all_dim)
  end
  return all, factor or scale(1)
end

--- Returns the frequencies of the D / 2 pairs, and the factor by which cosines and sines are multiplied.
---@param p table the result of rope.parameters
---@param D integer the width of a head
---@param most integer max_position_embeddings
---@param length integer number of positions; only the kind "dynamic" uses it
---@return number[] frequencies
---@return number factor
function rope.frequencies(p, D, most, length)
  if p.rope_type == "llama3" then return llama3(p, p.rope_theta, D) end
  if p.rope_type == "yarn" then return yarn(p, D) end
  if p.rope_type == "longrope" then return longrope(p, D) end
  local theta, by = p.rope_theta, 1
  if p.rope_type == "linear" then by = p.factor end
  if p.rope_type == "dynamic" then
    theta = theta * (p.factor * math.max(length, most) / most - (p.factor - 1)) ^ (D / (D - 2))
  end
  local all = plain(theta, D)
  for i, frequency in ipairs(all) do all[i] = frequency / by end
  return all, 1
end

---@class ps.pretrained.Rope
local Rope = {}
Rope.__index = Rope

--- Creates the rotary embedding of a model.
---@param who string
---@param config table the complete configuration
---@param D integer the width of a head
---@return ps.pretrained.Rope
function rope.new(who, config, D)
  local self = setmetatable({ parameters = rope.parameters(who, config), width = D,
    most = config.max_position_embeddings }, Rope)
  if self.parameters.rope_type == "dynamic" then
    if D == 2 then error(who .. ": rope_type = dynamic needs heads of more than 2 columns") end
  else self.fixed = { rope.frequencies(self.parameters, D, self.most, 0) } end
  local frequencies = self.fixed and self.fixed[1] or rope.frequencies(self.parameters, D, self.most, 0)
  for _, frequency in ipairs(frequencies) do
    local is_finite = math.abs(frequency) < math.huge
    if not is_finite then
      local list = {}
      for key, value in pairs(self.parameters) do list[#list + 1] = ("%s = %s"):format(key, tostring(value)) end
      table.sort(list)
      error(("%s: rope_parameters (%s) give a frequency of %g"):format(who, table.concat(list, ", "), frequency))
    end
  end
  return self
end

--- Returns the cosines and sines [B or 1, T, D / 2] for positions, in the form that F.rope expects for tensors of a
--- dtype.
---@param places? ps.Tensor int [B or 1, T] (default: `at`, at + 1, ...)
---@param T integer
---@param at integer
---@param device string the device of the results
---@param dtype string dtype of the tensors that are rotated
---@return ps.Tensor cos
---@return ps.Tensor sin
function Rope:angles(places, T, at, device, dtype)
  local length = at + T
  if places ~= nil and self.parameters.rope_type == "dynamic" then length = places:max():item() + 1 end
  local all, factor
  if self.fixed then all, factor = unpack(self.fixed)
  else all, factor = rope.frequencies(self.parameters, self.width, self.most, length) end
  local frequencies = create.tensor(all, { dtype = "fp32", device = device })
  places = places ~= nil and places:to("fp32") or create.arange(at, at + T, 1, { dtype = "fp32", device = device })
  local angles = places:reshape(-1, T, 1) * frequencies
  local cos, sin = angles:cos(), angles:sin()
  if factor ~= 1 then cos, sin = cos * factor, sin * factor end
  if dtype == "fp64" then return cos:to("fp64"), sin:to("fp64") end
  return cos, sin
end

return rope
