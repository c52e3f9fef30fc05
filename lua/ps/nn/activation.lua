-- SPDX-License-Identifier: BSD-3-Clause
-- Activations and Dropout. Except for PReLU, these modules have no parameters.
local create = require "ps.tensor.create"
local functional = require "ps.tensor.functional"
local caller = require "ps.core.caller"
local error = caller.error
local nn_module = require "ps.nn.module"
local F = functional

local activation = {}

local function plain(name, fn)
  local class = nn_module.class(name)
  class.unscoped = true
  --- Creates the module. It takes no arguments.
  ---@param inplace? nil PyTorch's option inplace, which is rejected
  function class:init(inplace) -- luacheck: no self
    if inplace == nil then return end
    error(("nn.%s takes no arguments; inplace does not exist here and changes no values: write nn.%s()"):format(name,
      name))
  end
  --- Applies the function to each element.
  ---@param x ps.Tensor
  ---@return ps.Tensor of x's shape
  function class:forward(x) return fn(x) end -- luacheck: no self
  class._like, class._takes = name:lower(), {}
  activation[name] = class
end

plain("ReLU", F.relu)
plain("SiLU", F.silu)
plain("Tanh", F.tanh)
plain("Sigmoid", F.sigmoid)
plain("SELU", F.selu)
plain("ReLU6", F.relu6)
plain("Mish", F.mish)
plain("LogSigmoid", F.logsigmoid)
plain("Hardsigmoid", F.hardsigmoid)
plain("Hardswish", F.hardswish)
plain("Softsign", F.softsign)

-- Creates the class of a module that calls fn(x, ...) with stored numbers.
--   names, defaults: the names of the numbers and their default values
--   dim: whether the numbers are dimensions, which must be integers
--   like: the function's name for help (default: the class name in lower case)
local function with_numbers(class_name, fn, names, defaults, dim, like)
  local class = nn_module.class(class_name)
  class.unscoped = true
  --- Stores the numbers that forward passes to the function of ps.F.
  ---@param a? number
  ---@param b? number
  function class:init(a, b)
    local given = { a, b }
    for i, name in ipairs(names) do
      local value, what = given[i] == nil and defaults[i] or given[i], ("nn.%s: %s"):format(class_name, name)
      self[name] = dim and caller.whole(value, what) or caller.typed(value, "number", what)
    end
    if given[#names + 1] ~= nil then caller.more("nn." .. class_name, table.concat(names, ", "), given[#names + 1]) end
  end
  --- Applies the function of ps.F with the stored numbers.
  ---@param x ps.Tensor
  ---@return ps.Tensor
  function class:forward(x)
    if names[2] then return fn(x, self[names[1]], self[names[2]]) end
    return fn(x, self[names[1]])
  end
  function class:extra_repr()
    local parts = {}
    for i, name in ipairs(names) do parts[i] = ("%s=%g"):format(name, self[name]) end
    return table.concat(parts, ", ")
  end
  class._like, class._takes = like or class_name:lower(), {}
  for i, name in ipairs(names) do
    class._takes[i] = ("%s?: %s (default %g)"):format(name, dim and "integer" or "number", defaults[i])
  end
  activation[class_name] = class
end

with_numbers("LeakyReLU", F.leaky_relu, { "negative_slope" }, { 0.01 }, false, "leaky_relu")
with_numbers("CELU", F.celu, { "alpha" }, { 1 })
with_numbers("Softmin", function(x, dim) return F.softmin(x, dim) end, { "dim" }, { -1 }, true)
with_numbers("PixelShuffle", F.pixel_shuffle, { "upscale_factor" }, { 1 }, true, "pixel_shuffle")
with_numbers("ELU", F.elu, { "alpha" }, { 1 })
with_numbers("Softplus", F.softplus, { "beta", "threshold" }, { 1, 20 })
with_numbers("Hardtanh", F.hardtanh, { "min_val", "max_val" }, { -1, 1 })
with_numbers("Softmax", function(x, dim) return F.softmax(x, dim) end, { "dim" }, { -1 }, true)
with_numbers("LogSoftmax", function(x, dim) return F.log_softmax(x, dim) end, { "dim" }, { -1 }, true, "log_softmax")
with_numbers("GLU", function(x, dim) return F.glu(x, dim) end, { "dim" }, { -1 }, true)
with_numbers("Flatten", function(x, first, last) return x:flatten(first, last) end, { "start_dim", "end_dim" },
  { 1, -1 }, true)

---@class ps.nn.Unflatten: ps.nn.Module
local Unflatten = nn_module.class("Unflatten")
Unflatten.unscoped = true

--- Stores the dimension that forward splits into several dimensions.
---@param dim integer
---@param sizes integer[] sizes of the new dimensions; one size may be -1
function Unflatten:init(dim, sizes)
  self.dim = caller.whole(dim, "nn.Unflatten: dim")
  self.sizes = caller.list(sizes, "nn.Unflatten: the sizes")
end
--- Splits the stored dimension of the input into several dimensions.
---@param x ps.Tensor
---@return ps.Tensor
function Unflatten:forward(x) return x:unflatten(self.dim, self.sizes) end
function Unflatten:extra_repr() return ("dim=%d, sizes={%s}"):format(self.dim, table.concat(self.sizes, ", ")) end
activation.Unflatten = Unflatten

---@class ps.nn.GELU: ps.nn.Module
local GELU = nn_module.class("GELU")
GELU.unscoped = true

local GELU_WORDS = { none = true, tanh = true }

--- Multiplies x by the probability that a standard normal variable is at most x (Hendrycks and Gimpel 2016). The
--- probability is exact, or approximated with tanh.
---@param approximate? "none"|"tanh" (default "none"); "tanh" is GPT-2's gelu_new
function GELU:init(approximate)
  self.approximate = approximate or "none"
  caller.one_of(self.approximate, GELU_WORDS, "nn.GELU: approximate")
end
--- Applies the function to each element.
---@param x ps.Tensor
---@return ps.Tensor of x's shape
function GELU:forward(x) return F.gelu(x, self.approximate) end
function GELU:extra_repr() return "approximate=" .. self.approximate end
activation.GELU = GELU

---@class ps.nn.Dropout: ps.nn.Module
local Dropout = nn_module.class("Dropout")
Dropout.unscoped = true

--- In training, sets elements to 0 with probability p and multiplies all other elements by 1 / (1 - p).
---@param p? number in [0, 1) (default 0.5)
function Dropout:init(p)
  self.p = p or 0.5
  caller.typed(self.p, "number", "Dropout: p")
  if not (self.p >= 0 and self.p < 1) then error("Dropout: p must be in [0, 1), got " .. tostring(p)) end
end

--- Returns whether a call would drop elements now. This is the case in training, if p is above 0.
---@return boolean
function Dropout:active()
  if self.training or self.p == 0 then return self.p > 0 end
  nn_module.dropout_is_off(self)
  return false
end

--- Drops elements in training. In evaluation mode, returns x itself.
---@param x ps.Tensor
---@param part? {first?: integer, rows?: ps.Tensor, per_sample: integer} if x is a part of a larger tensor, describes
--- the part, as in F.dropout
---@return ps.Tensor of x's shape
function Dropout:forward(x, part)
  if not self:active() then return x end
  return F.dropout(x, self.p, true, part or self.region and self.region:part(x) or nil)
end
function Dropout:extra_repr() return "p=" .. self.p end
activation.Dropout = Dropout

-- Creates the class of a Dropout module that drops whole channels.
local function channel_dropout(class_name, fn)
  local class = nn_module.class(class_name, Dropout)
  class.unscoped = true
  --- In training, sets whole channels to 0 with probability p and multiplies all other channels by 1 / (1 - p).
  ---@param p? number in [0, 1) (default 0.5)
  function class:init(p) Dropout.init(self, p) end
  --- Drops channels in training. In evaluation mode, returns x itself.
  ---@param x ps.Tensor [N, C, ...]
  ---@return ps.Tensor of x's shape
  function class:forward(x)
    if not self:active() then return x end
    return fn(x, self.p)
  end
  activation[class_name] = class
end
channel_dropout("Dropout1d", F.dropout1d)
channel_dropout("Dropout2d", F.dropout2d)

---@class ps.nn.PReLU: ps.nn.Module
---@field weight ps.Tensor [num_parameters]
local PReLU = nn_module.class("PReLU")
PReLU.unscoped = true

local PRELU = { init = "number", dtype = "string", device = "string" }

--- Creates a ReLU with a trained slope for negative inputs (He et al. 2015).
---@param num_parameters? integer number of slopes: the number of channels, or 1 for one slope (default 1)
---@param init? number|{init?: number, dtype?: string, device?: string} the initial slope (default 0.25), or options
function PReLU:init(num_parameters, init)
  if type(init) == "number" then init = { init = init } end
  local options = caller.options(init, "nn.PReLU", PRELU)
  self.num_parameters = caller.whole(num_parameters or 1, "nn.PReLU: num_parameters", 1)
  self:param("weight", create.full({ self.num_parameters }, options.init or 0.25, { dtype = options.dtype,
    device = options.device }))
end
--- Applies the function.
---@param x ps.Tensor [N, num_parameters, ...], or of any shape if there is one slope
---@return ps.Tensor of x's shape
function PReLU:forward(x) return F.prelu(x, self.weight) end
function PReLU:extra_repr() return ("num_parameters=%d"):format(self.num_parameters) end
activation.PReLU = PReLU

return activation
