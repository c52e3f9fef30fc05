-- SPDX-License-Identifier: BSD-3-Clause
-- Freezes parameters by name, and lists which parameters are trained and which are frozen.
local caller = require "ps.core.caller"
local nearest = require "ps.core.nearest"
local readable = require "ps.core.readable"
local shard = require "ps.tensor.shard"

-- Converts a pattern of names to a Lua pattern that is matched against ".name.". "*" matches any characters. A pattern
-- matches whole components of a name: "layers.*" matches "model.layers.0.mlp.up_proj.weight", and "wte" matches
-- "transformer.wte.weight".
local function lua_pattern(pattern)
  return "%." .. pattern:gsub("[%^%$%(%)%%%.%[%]%+%-%?]", "%%%0"):gsub("%*", ".*") .. "%."
end

-- Returns the parameters whose names match a list of patterns. Each pattern must match at least one name.
local function chosen(module, patterns, call)
  if type(patterns) == "string" then patterns = { patterns } end
  caller.typed(patterns, "table", call .. ": the pattern of names, or the list of patterns,")
  local list, seen = {}, {}
  for _, pattern in ipairs(patterns) do
    caller.typed(pattern, "string", call .. ": a pattern of names")
    local fits, count, words = lua_pattern(pattern), 0, {}
    for name, p in module:named_parameters() do
      if ("." .. name .. "."):find(fits) then
        count = count + 1
        if not seen[name] then seen[name], list[#list + 1] = true, p end
      end
      words[#words + 1] = name
      for word in name:gmatch "[^.]+" do if not word:find "^%d" then words[#words + 1] = word end end
    end
    if count == 0 then
      local hint = nearest.find(pattern, words)
      caller.error(("%s: no parameter of %s has a name that fits '%s'%s"):format(call, module.class_name, pattern,
        hint and (" (did you mean '%s'?)"):format(hint) or ""))
    end
  end
  return list
end

local TRAINABLE = { prints_rows = true, __tostring = function(self)
  local lines = {}
  for i, row in ipairs(self) do
    lines[i] = { row.name, row.trained and "yes" or "no", row.dtype, ("%d"):format(row.tensors),
      ("%d"):format(row.parameters), readable.bytes(row.nbytes) }
  end
  local text = table.concat(readable.lines({ { title = "parameters", left = true }, { title = "trained", left = true },
    { title = "dtype", left = true }, { title = "tensors" }, { title = "numbers" }, { title = "size" } }, lines), "\n")
  return ("%s\ntrained: %d of %d numbers (%.3f %%), %s of %s"):format(text, self.trained, self.parameters,
    100 * self.trained / math.max(1, self.parameters), readable.bytes(self.trained_nbytes),
    readable.bytes(self.nbytes))
end }

-- Returns the rows of a table of parameters, with summed counts. Parameters share a row if their names differ only in
-- layer indices, they have the same type, and they are all trained or all frozen.
local function rows_of(module)
  local rows, by_key = { trained = 0, parameters = 0, trained_nbytes = 0, nbytes = 0 }, {}
  for name, p in module:named_parameters() do
    local short = name:gsub("%f[^.%z]%d+%f[.%z]", "*")
    local trained, dtype, n = p:needs_grad(), p:dtype(), shard.whole_numel(p)
    local key = ("%s %s %s"):format(short, tostring(trained), dtype)
    local row = by_key[key]
    if not row then
      row = { name = short, trained = trained, dtype = dtype, tensors = 0, parameters = 0, nbytes = 0 }
      by_key[key], rows[#rows + 1] = row, row
    end
    local nbytes = n * p:nbytes() / math.max(1, p:numel())
    row.tensors, row.parameters, row.nbytes = row.tensors + 1, row.parameters + n, row.nbytes + nbytes
    rows.parameters, rows.nbytes = rows.parameters + n, rows.nbytes + nbytes
    if trained then rows.trained, rows.trained_nbytes = rows.trained + n, rows.trained_nbytes + nbytes end
  end
  return setmetatable(rows, TRAINABLE)
end

---@param Module ps.nn.Module the class to which the methods are added
return function(Module)
  --- Freezes the parameters whose names match a pattern. Backward computes no gradients for frozen parameters. An
  --- engine that is created afterwards has no masters, gradients and optimizer state for these parameters. The
  --- parameters of an engine's model may be frozen and thawed between steps. In a pattern, "*" matches any characters.
  --- A pattern matches whole components of a name: "layers.*" matches "model.layers.0.mlp.up_proj.weight", and "wte"
  --- matches "transformer.wte.weight".
  ---@param patterns string|string[]
  ---@return ps.nn.Module self
  function Module:freeze(patterns)
    for _, p in ipairs(chosen(self, patterns, "module:freeze")) do p:requires_grad(false) end
    return self
  end

  --- Makes the parameters whose names match a pattern train again. An engine creates masters, gradients and optimizer
  --- state for these parameters before its next step. All ranks must thaw the same parameters.
  ---@param patterns string|string[]
  ---@return ps.nn.Module self
  function Module:thaw(patterns)
    for _, p in ipairs(chosen(self, patterns, "module:thaw")) do p:requires_grad(true) end
    return self
  end

  --- Returns a list of the trained and the frozen parameters. The list prints as a table with counts and sizes in
  --- bytes. Parameters whose names differ only in layer indices share a row. The list's fields trained, parameters,
  --- trained_nbytes and nbytes are sums.
  ---@return {name: string, trained: boolean, dtype: string, tensors: integer, parameters: integer, nbytes: number}[]
  function Module:trainable() return rows_of(self) end
end
