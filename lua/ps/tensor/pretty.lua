-- SPDX-License-Identifier: BSD-3-Clause
-- Prints values at the prompt. The keys of nested tables are sorted, and strings are quoted. A tensor is printed as its
-- shape, its type, its device and a corner of its values. Printing never raises an error. If a tensor was dropped, a
-- table contains itself, or __tostring failed, the printed text says so.
local ffi = require "ffi"
local caller = require "ps.core.caller"
local C = ffi.C

local pretty = {}

---@class ps.pretty.options
---@field width? integer number of columns to use (default 80)
---@field depth? integer number of nesting levels shown (default 4)
---@field items? integer number of entries shown per table (default 64)
---@field total? integer number of entries shown in all tables together (default 400)
---@field text? integer number of bytes shown per string (default 2000)

local EDGE = 3           -- elements shown at each end of a long dimension
local CORNER = 150       -- largest number of values read for one tensor
local WHOLE = 2 ^ 53     -- doubles represent every whole number below 2^53

local escapes = { ["\n"] = "\\n", ["\t"] = "\\t", ["\r"] = "\\r", ["\""] = "\\\"", ["\\"] = "\\\\", ["\0"] = "\\0" }

---@param s string
---@param limit integer
---@return string
local function quote(s, limit)
  local cut = #s > limit
  local shown = cut and s:sub(1, limit) or s
  shown = shown:gsub("[%c\"\\]", function(c) return escapes[c] or ("\\%03d"):format(c:byte()) end)
  return "\"" .. shown .. "\"" .. (cut and ("... (%d bytes)"):format(#s) or "")
end

--- Returns tostring(v), or a replacement if tostring raises an error.
---@param v any
---@return string
local function safe_tostring(v)
  local ok, text = pcall(tostring, v)
  return ok and text or ("<%s whose __tostring failed>"):format(type(v))
end

-- -- tensors --------------------------------------------------------------------------------------------------------

local tensor_type, pointer_type

---@param v any
---@return boolean
local function is_tensor(v)
  if type(v) ~= "cdata" then return false end
  if not tensor_type then
    local ok, ct = pcall(ffi.typeof, "ps_tensor")
    if not ok then return false end      -- without the engine there are no tensors
    tensor_type, pointer_type = ct, ffi.typeof("$ *", ct)
  end
  return ffi.istype(tensor_type, v) or (ffi.istype(pointer_type, v) and v ~= nil)
end
pretty.is_tensor = is_tensor

--- Returns a headline such as "tensor [2, 3] fp32 cpu", and whether the tensor's values can be read.
---@param t ps.Tensor
---@return string, boolean
local function headline(t)
  local shape = {}
  for i = 0, t.ndim - 1 do shape[i + 1] = ("%d"):format(tonumber(t.shape_[i])) end
  local text = ("tensor [%s] %s"):format(table.concat(shape, ", "), ffi.string(C.ps_dtype_name(t.dtype_)))
  if C.ps_tensor_alive(t) == 0 then return text .. " (its scope has ended: the values were dropped)", false end
  local device = ffi.string(C.ps_device_name(t.ctx, t.device_))
  text = text .. " " .. device
  if t.flags % 2 == 1 then text = text .. " requires_grad" end
  return text, device ~= "meta"
end

--- Returns the indices along a dimension to show. -1 represents the omitted indices.
---@param n integer
---@param edge integer
---@return integer[]
local function positions(n, edge)
  local list = {}
  local all = n <= 2 * edge
  for i = 0, (all and n or edge) - 1 do list[#list + 1] = i end
  if all then return list end
  list[#list + 1] = -1
  for i = n - edge, n - 1 do list[#list + 1] = i end
  return list
end

-- Returns the value of an int64 element as text, for a value that a double cannot hold.
local function exact(element)
  local value = ffi.new "int64_t[1]"
  if C.ps_tensor_read(element:contiguous(), value, 8) < 0 then return element:item() end
  return (tostring(value[0]):gsub("LL$", ""))
end

--- Returns the values to show for a tensor in device memory, in order. Each run of elements in a row is copied
--- separately, so that a large tensor needs neither host memory for all its data nor further device memory.
---@param t ps.Tensor
---@param edge integer
---@return (number|string)[]
local function read_away(t, edge)
  local numbers = {}
  local function one(element)
    local x = element:item()
    if type(x) == "boolean" then x = x and 1 or 0 end
    numbers[#numbers + 1] = math.abs(x) >= WHOLE and element.dtype_ == C.PS_I64 and exact(element) or x
  end
  local function take(part)
    local host = part:to("cpu")
    for i = 0, tonumber(host.numel_) - 1 do one(host[i]) end
  end
  local function walk(part)
    local n = tonumber(part.shape_[0])
    if part.ndim > 1 then
      for _, p in ipairs(positions(n, edge)) do
        if p >= 0 then walk(part[p]) end
      end
    elseif n <= 2 * edge then take(part)
    else
      take(part:narrow(0, 0, edge))
      take(part:narrow(0, n - edge, edge))
    end
  end
  local was = C.ps_set_grad_enabled(t.ctx, 0)
  local ok, problem = pcall(function()
    if t.ndim == 0 then one(t:detach():to "cpu") else walk(t:detach()) end
  end)
  C.ps_set_grad_enabled(t.ctx, was)
  if not ok then error(problem, 0) end
  return numbers
end

local on_host = { cpu = true, ref = true }

--- Reads the elements to show. Returns them as nested lists of numbers, in which false represents omitted elements.
---@param t ps.Tensor
---@return table|nil values
---@return (number|string)[] flat all numbers that were read, in order; a number that a double cannot hold is a text
local function read_corner(t)
  local ndim, strides, edge = t.ndim, {}, EDGE + 1
  repeat
    local shown = 1
    edge = edge - 1
    for d = 0, ndim - 1 do shown = shown * math.min(tonumber(t.shape_[d]), 2 * edge) end
  until shown <= CORNER or edge == 1
  local stride = 1
  for d = ndim - 1, 0, -1 do
    strides[d] = stride
    stride = stride * tonumber(t.shape_[d])
  end
  local cell, flat, failed = ffi.new("double[1]"), {}, false
  local away = not on_host[ffi.string(C.ps_device_name(t.ctx, t.device_))] and read_away(t, edge)
  local function walk(d, at)
    if d == ndim then
      local x = away and away[#flat + 1]
      if not x then
        if C.ps_tensor_read_f64(t, at, 1, cell) < 0 then failed = true end
        x = cell[0]
        if math.abs(x) >= WHOLE and t.dtype_ == C.PS_I64 then
          local element, rest = t, at
          for e = 0, ndim - 1 do
            element, rest = element[math.floor(rest / strides[e])], rest % strides[e]
          end
          x = exact(element)
        end
      end
      flat[#flat + 1] = x
      return x
    end
    local list = {}
    for i, p in ipairs(positions(tonumber(t.shape_[d]), edge)) do
      list[i] = p >= 0 and walk(d + 1, at + p * strides[d]) or false
    end
    return list
  end
  local values = walk(0, 0)
  if failed then return nil, flat end
  return values, flat
end

local kinds = { bool = "bool", int32 = "int", int64 = "int", uint8 = "int" }

--- Selects one format for all numbers of a tensor, so that the columns are aligned.
---@param flat number[]
---@param kind string
---@return fun(x: number): string
local function number_format(flat, kind)
  if kind == "bool" then return function(x) return x ~= 0 and "true" or "false" end end
  local largest, smallest, whole = 0, math.huge, true
  for _, x in ipairs(flat) do
    local a = type(x) == "number" and math.abs(x) or 0
    if a < math.huge then
      if a > largest then largest = a end
      if a > 0 and a < smallest then smallest = a end
      if x % 1 ~= 0 then whole = false end
    end
  end
  local pattern = "%.4f"
  if kind == "int" then pattern = "%.0f"
  elseif largest >= 1e8 or (largest > 0 and (smallest < 1e-4 and largest / smallest > 1e3 or largest < 1e-3)) then
    pattern = "%.4e"
  elseif whole then pattern = "%.0f." end
  return function(x)
    if type(x) == "string" then return x end
    if x ~= x then return "nan" end
    if x == math.huge or x == -math.huge then return x > 0 and "inf" or "-inf" end
    return pattern:format(x)
  end
end

---@param values table|number|false
---@param write fun(x: number): string
---@param indent integer
---@return string
local function write_values(values, write, indent)
  if values == false then return "..." end
  if type(values) ~= "table" then return write(values) end
  local parts, nested = {}, type(values[1]) == "table"
  for i, v in ipairs(values) do parts[i] = write_values(v, write, indent + 1) end
  if not nested then return "[" .. table.concat(parts, ", ") .. "]" end
  local deep = type(values[1][1]) == "table"
  return "[" .. table.concat(parts, (deep and ",\n\n" or ",\n") .. (" "):rep(indent + 1)) .. "]"
end

--- Returns the shape, type and device of a tensor, and its first and last values.
---@param t ps.Tensor
---@return string
function pretty.tensor(t)
  local ok, text = pcall(function()
    local head, readable = headline(t)
    if not readable then return head end
    if t.numel_ == 0 then return head .. ": empty" end
    local values, flat = read_corner(t)
    if values == nil then return head .. ": not readable: " .. ffi.string(C.ps_error_message()) end
    local raw = number_format(flat, kinds[ffi.string(C.ps_dtype_name(t.dtype_))] or "float")
    local width = 0
    for _, x in ipairs(flat) do width = math.max(width, #raw(x)) end
    if t.ndim == 0 then return head .. ": " .. raw(values) end
    return head .. "\n" .. write_values(values, function(x) return ("%" .. width .. "s"):format(raw(x)) end, 0)
  end)
  return ok and text or "tensor (cannot be shown: " .. safe_tostring(text) .. ")"
end

-- -- other values ---------------------------------------------------------------------------------------------------

local keywords = {}
for w in ([[and break do else elseif end false for function goto if in local nil not or repeat return then true
    until while]]):gmatch("%a+") do keywords[w] = true end

---@param f function
---@return string
local function describe_function(f)
  local fn = require("ps.core.exact").inner(f)
  local info, call = debug.getinfo(fn, "S"), caller.calls[fn]
  if info.what == "C" or info.source:find("^=%[builtin") then return "function <builtin>" end
  return ("function %s<%s:%d>"):format(call and call .. "() " or "", info.short_src, info.linedefined)
end

local rank = { number = 1, string = 2, boolean = 3 }

---@param a any
---@param b any
---@return boolean
local function key_before(a, b)
  local ra, rb = rank[type(a)] or 4, rank[type(b)] or 4
  if ra ~= rb then return ra < rb end
  if ra <= 2 then return a < b end
  return safe_tostring(a) < safe_tostring(b)
end

local write_value

---@param key any
---@param state table
---@return string
local function write_key(key, state)
  if type(key) == "string" and key:match("^[%a_][%w_]*$") and not keywords[key] then return key end
  return "[" .. write_value(key, state, state.depth, 0) .. "]"
end

---@param t table
---@param state table
---@param level integer
---@param column integer number of columns used before the table
---@return string
local function write_table(t, state, level, column)
  if state.path[t] then return "<cycle>" end
  if next(t) == nil then return "{}" end
  if level >= state.depth then return "{...}" end
  state.path[t] = true
  local parts, count, listed, left_out = {}, #t, {}, 0
  local function add(prefix, value)
    if #parts >= state.items or state.left <= 0 then
      left_out = left_out + 1
    else
      state.left = state.left - 1
      parts[#parts + 1] = prefix .. write_value(value, state, level + 1, 2 * level + 2 + #prefix)
    end
  end
  for i = 1, count do
    listed[i] = true
    add("", rawget(t, i))
  end
  local keys = {}
  for k in next, t do
    if not listed[k] then keys[#keys + 1] = k end
  end
  table.sort(keys, key_before)
  for _, k in ipairs(keys) do add(write_key(k, state) .. " = ", rawget(t, k)) end
  if left_out > 0 then parts[#parts + 1] = ("... %d more"):format(left_out) end
  state.path[t] = nil
  local line = "{ " .. table.concat(parts, ", ") .. " }"
  if column + #line <= state.width and not line:find("\n", 1, true) then return line end
  local pad = "\n" .. (" "):rep(2 * level + 2)
  return "{" .. pad .. table.concat(parts, "," .. pad) .. "\n" .. (" "):rep(2 * level) .. "}"
end

function write_value(v, state, level, column)
  local kind = type(v)
  if kind == "string" then return quote(v, state.text) end
  if kind == "function" then return describe_function(v) end
  if kind == "table" then
    local mt = debug.getmetatable(v)
    if not (type(mt) == "table" and rawget(mt, "__tostring")) then return write_table(v, state, level, column) end
  elseif kind == "cdata" and is_tensor(v) then
    if level == 0 then return pretty.tensor(v) end
    local ok, text = pcall(headline, v)
    return ok and text or "tensor"
  end
  return safe_tostring(v)
end

local OPTIONS = { width = "number", depth = "number", items = "number", total = "number", text = "number",
  color = "boolean" }

local TIER_COLORS = { device = 32, host = 33, disk = 35 }

-- Colors the text of a table: the heading is bold, and the name of each tier has its color.
local function colored(text)
  local heading, rows = text:match "^([^\n]*)(.*)$"
  rows = rows:gsub("%f[%w](%l+)%f[%W]", function(word)
    return TIER_COLORS[word] and ("\27[%dm%s\27[0m"):format(TIER_COLORS[word], word)
  end)
  return "\27[1m" .. heading .. "\27[0m" .. rows
end

--- Returns a value as text of several lines.
---@param value any
---@param options? ps.pretty.options
---@return string
function pretty.format(value, options)
  local o = caller.options(options, "ps.pretty.format", OPTIONS)
  local state = { width = o.width or 80, depth = o.depth or 4, items = o.items or 64, left = o.total or 400,
                  text = o.text or 2000, path = {} }
  local text, mt = write_value(value, state, 0, 0), debug.getmetatable(value)
  return o.color and type(mt) == "table" and rawget(mt, "prints_rows") and text:find "\n" and colored(text) or text
end

---@param ... any
function pretty.print(...)
  for i = 1, select("#", ...) do io.write(pretty.format((select(i, ...))), "\n") end
end

caller.shown = pretty.format

return pretty
