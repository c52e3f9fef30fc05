-- SPDX-License-Identifier: BSD-3-Clause
-- Reads weights that bitsandbytes quantized to NF4 and transformers wrote to a folder. A weight NAME of shape
-- [rows, columns] is stored as several tensors:
--   NAME                                       U8 [values / 2, 1], two codes per byte, the first in the upper half
--   NAME.absmax                                F32 [blocks], one scale per block of 64 values
--   NAME.quant_map                             F32 [16], the values of NF4
--   NAME.quant_state.bitsandbytes__nf4         U8, JSON with the weight's shape
-- With double quantization, NAME.absmax is U8 and holds a code per scale. Two more tensors then exist:
--   NAME.nested_absmax                         F32, one scale per group of 256 codes
--   NAME.nested_quant_map                      F32, the values of the 256 codes
-- With double quantization, a block's scale is nested_quant_map[code] * nested_absmax + nested_offset.
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local copied = require "ps.core.copied"
local create = require "ps.tensor.create"
local encode = require "ps.core.encode"
local json = require "cjson"
local native = require "ps.core.ffi"
local rectangles = require "ps.core.rectangles"
local scope = require "ps.core.scope"
local nn_packed = require "ps.nn.packed"
local settings = require "ps.pretrained.settings"
local pieces = require "ps.io.pieces"
local safetensors = require "ps.io.safetensors"
local error = caller.error
local C, check = native.C, native.check

local bitsandbytes = {}

local NF4 = nn_packed.type "NF4"                           -- a block: its fp32 scale, then the bytes of 64 codes
local NF4_DOUBLE = nn_packed.type "NF4_DOUBLE"             -- a block: its scale's code, then the bytes of 64 codes
local BLOCK, GROUP, HEAD = NF4.block, nn_packed.SCALES_GROUP, nn_packed.SCALES_HEAD
local SCALES = "_scales"                                   -- suffix of the name of a packed weight's scales
local VALUES = 2 ^ 20                                      -- number of values that are read at a time
local STATE = ".quant_state.bitsandbytes__"
local STATE_NAME = "^(.*)" .. STATE:gsub("%.", "%%.") .. "(%w+)$"        -- the name of a weight, and its type
local CODES = 16                                           -- number of values of NF4

-- GPT-2's layers store their weights transposed ([in, out]). bitsandbytes quantizes [out, in].
local TRANSPOSED = "%.c_%l+%.weight$"

--- Returns the 16 values of NF4 for a scale of 1, as fp32 [16]. Unpacks a block that contains every code.
---@return ps.Tensor
function bitsandbytes.map()
  local bytes = { 0, 0, 0x80, 0x3f }                       -- the scale: the bytes of 1 in fp32
  for i = 0, BLOCK - 1, 2 do bytes[#bytes + 1] = i % CODES * CODES + (i + 1) % CODES end
  local block = create.tensor({ bytes }, { dtype = "uint8", device = "cpu" })
  return native.ops.unpack(block, nil, NF4.number, native.dtype_code "fp32"):reshape(-1):narrow(0, 0, CODES)
end

-- -- config.json ----------------------------------------------------------------------------------------------------
local function value_of(value)
  if value == json.null then return nil end
  return value
end

local function is_list_of_names(list)
  if type(list) ~= "table" then return false end
  for key, name in pairs(list) do if type(key) ~= "number" or type(name) ~= "string" then return false end end
  return true
end

--- Checks the quantization_config of a config.json. Raises an error that names the field if the quantization is not NF4
--- of bitsandbytes.
---@param fields table the decoded config.json
---@param where string the file, for messages
---@return table fields without quantization_config
---@return table? quantization the contents of quantization_config, or nil if it is absent or empty
function bitsandbytes.split(fields, where)
  local given = value_of(fields.quantization_config)
  if given == nil or given == false or type(given) == "table" and next(given) == nil then return fields end
  local function refuse(key, value, why)
    settings.refuse(where, "quantization_config" .. key, value == nil and "none" or value, why)
  end
  if type(given) ~= "table" then refuse("", given, "it must be an object") end
  local function get(key) return value_of(given[key]) end
  local method = get "quant_method"
  if method == nil and not (get "load_in_4bit" or get "load_in_8bit") then
    refuse("", given, "it has no quant_method; only bitsandbytes with nf4 is supported")
  elseif method ~= nil and method ~= "bitsandbytes" then
    refuse(".quant_method", method, "only bitsandbytes with nf4 is supported")
  end
  if get "load_in_8bit" then
    refuse(".load_in_8bit", true, "weights of 8 bits are not supported, only load_in_4bit with nf4")
  end
  if get "load_in_4bit" ~= true then refuse(".load_in_4bit", get "load_in_4bit", "it must be true") end
  if get "bnb_4bit_quant_type" ~= "nf4" then               -- transformers' default is fp4
    refuse(".bnb_4bit_quant_type", get "bnb_4bit_quant_type", "only nf4 is supported")
  end
  local storage = get "bnb_4bit_quant_storage"
  if storage ~= nil and storage ~= "uint8" then
    refuse(".bnb_4bit_quant_storage", storage, "only uint8 is supported")
  end
  local skip = get "llm_int8_skip_modules"
  if skip ~= nil and not is_list_of_names(skip) then
    refuse(".llm_int8_skip_modules", skip, "it must be a list of names")
  end
  local rest = copied(fields)
  rest.quantization_config = nil
  return rest, given
end

-- Returns whether `one`, an entry of llm_int8_skip_modules, matches a module. An entry matches if it is the module's
-- name, the beginning of this name up to a dot, or the end of this name.
local function skips(one, module)
  return one ~= "" and (module == one or module:sub(1, #one + 1) == one .. "." or module:sub(-#one) == one)
end

-- -- weights in files -----------------------------------------------------------------------------------------------
---@class ps.pretrained.Nf4Weight
---@field file table the file with the codes
---@field rows integer
---@field columns integer
---@field sides table<string, table> the open files of the weight's other tensors, such as absmax. A key is the end of a
--- tensor's name
---@field offset? number nested_offset, if the scales are quantized
---@field transposed boolean whether the model's weight is [columns, rows]
---@field packed? ps.nn.PackedType type of the blocks that reads return; nil if reads return numbers

---@class ps.pretrained.Nf4Weights the quantized weights of open files; it has the same methods as one open file
---@field path string for messages
---@field private weights table<string, ps.pretrained.Nf4Weight>
---@field private hidden table<string, boolean> names of all tensors in the files that belong to a quantized weight
---@field private scales table<string, string> maps the name of a packed weight's scales to the weight's name
local Weights = {}
Weights.__index = Weights

-- Raises an error if a tensor is missing, if its type is not `dtype`, or if its shape is not `shape`. `part` and
-- `subject` are words for messages.
local function check_tensor(self, name, file, dtype, shape, part, subject)
  if not file then settings.refuse(self.path, name, "none", ("the files lack %s in NF4"):format(part)) end
  local its, other = file:dtype(name)
  if its ~= dtype or not rectangles.same(file:shape(name), shape) then
    settings.refuse(self.path, name, ("%s [%s]"):format(its or other, rectangles.text(file:shape(name))),
      ("%s must be %s [%s]"):format(subject, dtype, rectangles.text(shape)))
  end
end

-- Checks another tensor of a weight with check_tensor. `suffix` is the end of the tensor's name.
local function check_side(self, name, weight, suffix, dtype, shape)
  check_tensor(self, name .. "." .. suffix, weight.sides[suffix], dtype, shape, "this tensor of a weight", "it")
end

-- Returns the decoded quant_state of a weight.
local function read_state(self, name, file, kind)
  local full = name .. STATE .. kind
  if kind ~= "nf4" then settings.refuse(self.path, full, "present", "only weights in NF4 are supported") end
  if file:dtype(full) ~= "uint8" then settings.refuse(self.path, full, file:dtype(full), "it must be uint8") end
  local text = scope.scope(function()
    local bytes = file:tensor(full, "cpu")
    local buffer = array "uint8_t"(math.max(1, bytes:numel()))
    check(C.ps_tensor_read(bytes, buffer, bytes:nbytes()))
    return native.ffi.string(buffer, bytes:numel())
  end)
  local ok, state = pcall(json.decode, text)
  if not ok or type(state) ~= "table" then settings.refuse(self.path, full, "damaged", "it must be a JSON object") end
  return state, full
end

local function is_size(value) return type(value) == "number" and value >= 1 and value % 1 == 0 and value < 2 ^ 31 end

-- Checks the quant_state of a weight, and sets the weight's shape from it.
local function check_state(self, weight, state, full)
  local function refuse(key, value, why)
    settings.refuse(self.path, full .. "." .. key, value == nil and "none" or value, why)
  end
  local function must_be(key, wanted)
    if state[key] ~= wanted then refuse(key, state[key], ("only %s is supported"):format(wanted)) end
  end
  must_be("quant_type", "nf4")
  must_be("blocksize", BLOCK)
  local shape = state.shape
  if type(shape) ~= "table" or #shape ~= 2 or not (is_size(shape[1]) and is_size(shape[2])) then
    local ok, text = pcall(encode, shape)                  -- fails if `shape` contains infinity
    refuse("shape", ok and type(shape) == "table" and text or shape, "it must be two whole numbers")
  end
  weight.rows, weight.columns = shape[1], shape[2]
  if weight.columns % BLOCK ~= 0 then
    refuse("shape", "[" .. rectangles.text(shape) .. "]", ("rows must be multiples of %d values"):format(BLOCK))
  end
  if state.nested_blocksize == nil and not weight.sides.nested_absmax then return end
  must_be("nested_blocksize", GROUP)
  must_be("nested_dtype", "float32")
  local offset = state.nested_offset
  if type(offset) ~= "number" or math.abs(offset) == math.huge or offset ~= offset then
    refuse("nested_offset", offset, "it must be a number")
  end
  weight.offset = offset
end

-- Checks that the quant_map of a weight has the values of NF4.
local function check_map(self, name, weight)
  local full = name .. ".quant_map"
  scope.scope(function()
    local map = weight.sides.quant_map:tensor(full, "cpu"):tolist()
    for i, value in ipairs(bitsandbytes.map():tolist()) do
      if map[i] ~= value then
        settings.refuse(self.path, ("%s[%d]"):format(full, i - 1), map[i], ("NF4 has %.9g"):format(value))
      end
    end
  end)
end

local SIDES = { "absmax", "quant_map", "nested_absmax", "nested_quant_map" }

-- Adds a weight and all tensors that belong to it.
local function add(self, files, name, kind)
  local state_file = files[name .. STATE .. kind]
  local weight = { file = files[name], sides = {}, transposed = name:find(TRANSPOSED) ~= nil }
  for _, suffix in ipairs(SIDES) do
    weight.sides[suffix] = files[name .. "." .. suffix]
    self.hidden[name .. "." .. suffix] = true
  end
  self.hidden[name], self.hidden[name .. STATE .. kind] = true, true
  local state, full = read_state(self, name, state_file, kind)
  check_state(self, weight, state, full)
  local numel = weight.rows * weight.columns
  local blocks = numel / BLOCK
  check_tensor(self, name, weight.file, "uint8", { numel / 2, 1 }, "the codes of this weight",
    ("a weight of [%d, %d] in NF4"):format(weight.rows, weight.columns))
  check_side(self, name, weight, "absmax", weight.offset and "uint8" or "fp32", { blocks })
  check_side(self, name, weight, "quant_map", "fp32", { CODES })
  if weight.offset then
    check_side(self, name, weight, "nested_absmax", "fp32", { math.ceil(blocks / GROUP) })
    check_side(self, name, weight, "nested_quant_map", "fp32", { 256 })
  end
  check_map(self, name, weight)
  self.weights[name] = weight
end

--- Returns the quantized weights of open files, or nil if there are none. Raises an error that names the tensor if a
--- weight is not quantized to NF4, or if a tensor of a weight is missing or has a wrong shape.
---@param path string the folder, for messages
---@param list table[] open files
---@return ps.pretrained.Nf4Weights?
function bitsandbytes.find(path, list)
  local files, found = {}, {}
  for _, file in ipairs(list) do
    for _, name in ipairs(file:names()) do
      files[name] = file
      local weight, kind = name:match(STATE_NAME)
      if weight then found[#found + 1] = { weight, kind } end
    end
  end
  local self = setmetatable({ path = path, weights = {}, hidden = {}, scales = {} }, Weights)
  table.sort(found, function(a, b) return a[1] < b[1] end)
  for _, one in ipairs(found) do add(self, files, one[1], one[2]) end
  for name in pairs(files) do
    local weight = name:match "^(.*)%.quant_map$"
    if weight and not self.weights[weight] then
      settings.refuse(path, weight .. STATE .. "nf4", "none", "the files lack this tensor of a weight in NF4")
    end
  end
  return found[1] and self or nil
end

--- Compares the quantization_config with the files. Raises an error if no weight is quantized. Also raises an error if
--- llm_int8_skip_modules names a weight that is quantized.
---@param weights ps.pretrained.Nf4Weights?
---@param quantization table see bitsandbytes.split
---@param where string the file of quantization_config
function bitsandbytes.check(weights, quantization, where)
  if not weights then
    settings.refuse(where, "quantization_config.load_in_4bit", true, "the files have no weights in NF4; remove "
      .. "quantization_config")
  end
  for _, one in ipairs(value_of(quantization.llm_int8_skip_modules) or {}) do
    for _, name in ipairs(weights:names()) do
      if skips(one, (name:gsub("%.[^.]*$", ""))) then
        settings.refuse(where, "quantization_config.llm_int8_skip_modules", one, ("the files have %s in NF4"):format(
          name))
      end
    end
  end
end

--- Returns whether a tensor of the files belongs to a quantized weight.
---@param name string
---@return boolean
function Weights:hides(name) return self.hidden[name] or false end

--- Returns a sorted list of names: the quantized weights, and the scales of weights that stay packed as NF4_DOUBLE.
---@return string[]
function Weights:names()
  local all = copied(self.weights)
  for name in pairs(self.scales) do all[name] = true end
  return caller.sorted_names(all)
end

local function weight_of(self, name)
  local weight = self.weights[name]
  if not weight then error(("%s holds no weight '%s' in NF4"):format(self.path, tostring(name))) end
  return weight
end

---@param name string
---@return boolean
function Weights:has(name) return self.weights[name] ~= nil or self.scales[name] ~= nil end

--- Makes later reads of a weight return its blocks, as uint8 [rows, bytes per row]. If `kind` is NF4_DOUBLE, a second
--- tensor holds the scales, as fp32 (base/blocks.h). The name of this tensor is the weight's name with the suffix
--- _scales.
---@param name string
---@param kind ps.nn.PackedType NF4, or NF4_DOUBLE for a weight with double quantization
function Weights:keep_packed(name, kind)
  weight_of(self, name).packed = kind
  if kind.scales then self.scales[name .. SCALES] = name end
end

--- Returns the shape of the model's weight. For a weight that stays packed, returns the shape of its blocks.
---@param name string
---@return integer[]
function Weights:shape(name)
  if self.scales[name] then
    local weight = self.weights[self.scales[name]]
    return { nn_packed.scales_numel(weight.rows * weight.columns) }
  end
  local weight = weight_of(self, name)
  if weight.packed then return { weight.rows, weight.columns / BLOCK * weight.packed.nbytes } end
  if weight.transposed then return { weight.columns, weight.rows } end
  return { weight.rows, weight.columns }
end

---@param name string
---@return string
function Weights:dtype(name)
  return not self.scales[name] and weight_of(self, name).packed and "uint8" or "fp32"
end

--- Returns the name of a weight's type in the files: NF4_DOUBLE with double quantization, otherwise NF4.
---@param name string
---@return string
function Weights:type(name) return (weight_of(self, name).offset and NF4_DOUBLE or NF4).name end

--- Raises an error if there is no weight of this name.
---@param name string
function Weights:check(name) weight_of(self, self.scales[name] or name) end

-- Reads the codes of the scales of n blocks, starting at block `first`, into uint8 [n].
local function read_codes(name, weight, codes, first)
  weight.sides.absmax:read_part(name .. ".absmax", codes, { first })
end

-- Returns the tensor of scales for a weight that stays packed as NF4_DOUBLE.
local function scales_of(name, weight)
  local numel = nn_packed.scales_numel(weight.rows * weight.columns)
  local made, sides = create.empty({ numel }, { dtype = "fp32", device = "cpu" }), weight.sides
  made:narrow(0, 0, 1):fill_(weight.offset)
  sides.nested_quant_map:read_part(name .. ".nested_quant_map", made:narrow(0, 1, HEAD - 1), { 0 })
  sides.nested_absmax:read_part(name .. ".nested_absmax", made:narrow(0, HEAD, numel - HEAD), { 0 })
  return made
end

-- Returns the scales of n blocks, starting at block `first`, as fp32 [n]. `map` has the values of nested_quant_map.
local function scales(name, weight, map, first, n)
  local file, full = weight.sides.absmax, name .. ".absmax"
  if not weight.offset then
    local made = create.empty({ n }, { dtype = "fp32", device = "cpu" })
    file:read_part(full, made, { first })
    return made
  end
  local group = math.floor(first / GROUP)                  -- whole groups are read; only the last group can be shorter
  local groups = math.ceil((first + n) / GROUP) - group
  local total = weight.rows * weight.columns / BLOCK
  local codes = create.zeros({ groups * GROUP }, { dtype = "uint8", device = "cpu" })
  read_codes(name, weight, codes:narrow(0, 0, math.min(total - group * GROUP, groups * GROUP)), group * GROUP)
  local of_groups = create.empty({ groups }, { dtype = "fp32", device = "cpu" })
  weight.sides.nested_absmax:read_part(name .. ".nested_absmax", of_groups, { group })
  local values = native.ops.embedding(map:reshape(256, 1), codes:to "int32", -1):reshape(groups, GROUP)
  return (values * of_groups:reshape(groups, 1) + weight.offset):reshape(-1):narrow(0, first - group * GROUP, n)
end

-- Returns the bytes of fp32 values [n], as uint8 [n, 4].
local function bytes_of(values)
  local n = values:numel()
  local buffer, made = array "uint8_t"(4 * n), create.empty({ n, 4 }, { dtype = "uint8", device = "cpu" })
  check(C.ps_tensor_read(values:contiguous(), buffer, 4 * n))
  check(C.ps_tensor_write(made, buffer, 4 * n))
  return made
end

-- Makes a tensor use the blocks of a packed weight in its mapped files, without a copy. Returns false if the blocks
-- must be read instead. This is the case for a weight that stays packed as NF4 and has double quantization in the
-- files, because its fp32 scales are computed.
local function borrow_blocks(name, weight, tensor)
  local kind, half = weight.packed, BLOCK / 2
  if weight.offset and kind ~= NF4_DOUBLE or C.ps_tensor_is_contiguous(tensor) == 0 then return false end
  return safetensors.borrow_blocks(tensor, { file = weight.sides.absmax, name = name .. ".absmax",
    width = kind.nbytes - half }, { file = weight.file, name = name, width = half })
end

-- Returns n rows of a weight, starting at row `first`, as blocks of type `kind`. The result is uint8 [n, bytes per
-- row]. `map` has the values of nested_quant_map.
local function blocks_of(name, weight, kind, map, first, n)
  local per_row = weight.columns / BLOCK
  local count, half = n * per_row, BLOCK / 2
  local codes = create.empty({ count * half, 1 }, { dtype = "uint8", device = "cpu" })
  weight.file:read_part(name, codes, { first * per_row * half, 0 })
  local made = create.empty({ count, kind.nbytes }, { dtype = "uint8", device = "cpu" })
  local before = kind.nbytes - half
  if kind == NF4_DOUBLE then
    local of_scales = create.empty({ count }, { dtype = "uint8", device = "cpu" })
    read_codes(name, weight, of_scales, first * per_row)
    made:narrow(1, 0, before):copy_(of_scales:reshape(count, 1))
  else
    made:narrow(1, 0, before):copy_(bytes_of(scales(name, weight, map, first * per_row, count)))
  end
  made:narrow(1, before, half):copy_(codes:reshape(count, half))
  return made:reshape(n, per_row * kind.nbytes)
end

--- Reads a rectangle of a weight into a tensor of the rectangle's shape, and converts the values to the tensor's dtype.
--- Only the rows of the rectangle are read.
---@param name string
---@param tensor ps.Tensor
---@param offset integer[] offset of the rectangle
function Weights:read_part(name, tensor, offset)
  local of, whole, shape = self.scales[name], self:shape(name), tensor:shape()
  pieces.check_part(self.path, name, whole, shape, offset)
  if of then
    scope.scope(scope.no_grad, function()
      tensor:detach():copy_(scales_of(of, self.weights[of]):narrow(0, offset[1], shape[1]):to(tensor:device()))
    end)
    return
  end
  local weight = weight_of(self, name)
  if weight.packed and not rectangles.same(whole, shape) then
    error(("%s: weight '%s' is packed, and only all of it can be read"):format(self.path, name))
  end
  if weight.packed and borrow_blocks(name, weight, tensor) then return end
  local into, at = tensor:detach(), offset
  if weight.transposed and not weight.packed then into, at = into:transpose(0, 1), { offset[2], offset[1] } end
  local rows, columns = into:size(0), into:size(1)
  local step = math.max(1, math.floor(VALUES / weight.columns))
  local function copy_rows(map, first)
    local n = math.min(step, rows - first)
    local part = blocks_of(name, weight, weight.packed or NF4, map, at[1] + first, n)
    if not weight.packed then
      part = native.ops.unpack(part, nil, NF4.number, native.dtype_code "fp32"):narrow(1, at[2], columns)
    end
    into:narrow(0, first, n):copy_(part:to(tensor:device()))
  end
  scope.scope(scope.no_grad, function()
    local map = weight.offset and weight.sides.nested_quant_map:tensor(name .. ".nested_quant_map", "cpu")
    for first = 0, rows - 1, step do scope.scope(copy_rows, map, first) end
  end)
end

--- Reads a weight into a tensor of the same shape, and converts the values to the tensor's dtype.
---@param name string
---@param tensor ps.Tensor
function Weights:read_into(name, tensor)
  local shape = self:shape(name)
  pieces.check_whole(self.path, name, shape, tensor:shape())
  self:read_part(name, tensor, rectangles.zeros(shape))
end

--- Returns a new tensor with a weight's values. Scopes do not free the tensor.
---@param name string
---@param device? string
---@return ps.Tensor
function Weights:tensor(name, device)
  local tensor = create.empty(self:shape(name), { dtype = self:dtype(name), device = device or "cpu" })
  self:read_into(name, tensor)
  return tensor:keep()
end

bitsandbytes.CODES, bitsandbytes.STATE = CODES, STATE

return bitsandbytes
