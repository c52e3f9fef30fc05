-- SPDX-License-Identifier: BSD-3-Clause
-- Prints what must never drift from ops.def and errors.def, at build time:
--   luajit gen.lua header OPS.DEF ERRORS.DEF           > ps_gen.h    enums and attribute structs (C and cdef)
--   luajit gen.lua lua    OPS.DEF                      > ops.lua     one thin Lua function per op, annotated
--   luajit gen.lua cdef   PS_GEN.H PS.H PS_TEST.H      > ps_cdef.h   the cdef text and its hash as C strings
local what, a, b = arg[1], arg[2], arg[3]

local function read(path)
  local f = assert(io.open(path, "rb"))
  local text = f:read("*a")
  f:close()
  return text
end

-- Returns the lines of a file, with the lines of a row and the pieces of its strings joined.
local function lines_of(path)
  local lines, row = {}, nil
  for line in read(path):gmatch("[^\n]+") do
    row = row and row .. " " .. line:match("^%s*(.*)$") or line
    if not row:match("^OP%(") or row:match('"%)$') then
      lines[#lines + 1] = row:match("^OP%(") and row:gsub('" "', "") or row
      row = nil
    end
  end
  assert(not row, "ops.def: the last row has no end")
  return lines
end

--- Returns the rows of ops.def: {name, ins = {{name, optional, variadic}}, outs, attrs = {{type, name, count,
--- default}}, flags, cost, doc, n_out}. n_out is the number of outputs, including those that never leave the engine.
local function parse_ops(path)
  local rows = {}
  for _, line in ipairs(lines_of(path)) do
    if line:match("^OP%(") then
      local name, ins, outs, attrs, infer, grad, saved, flags, cost, doc =
        line:match('^OP%(([%w_]+), "([^"]*)", "([^"]*)", %((.-)%), ([%w_]+), ([%w_]+), "([^"]*)", ([%w_|]+), '
          .. '([%w_]+), "([^"]*)"%)$')
      assert(name, "ops.def: this row does not follow the form described at the top of the file:\n" .. line)
      local row = { name = name, ins = {}, outs = {}, attrs = {}, infer = infer, grad = grad, saved = saved,
                    flags = flags, cost = cost, doc = doc }
      for w in ins:gmatch("%S+") do
        row.ins[#row.ins + 1] = { name = w:match("^[%w_]+"), optional = w:find("?", 1, true) and true,
                                  variadic = w:find("*", 1, true) and true }
      end
      row.n_out = select(2, outs:gsub("%S+", ""))
      for w in outs:gmatch("%S+") do
        if not w:find("~", 1, true) then row.outs[#row.outs + 1] = w end   -- outputs with ~ never leave the engine
      end
      for field in attrs:gmatch("%s*([^;]+);") do
        local decl, default = field:match("^(.-)%s*=%s*(.+)$")
        decl = decl or field
        local ctype, fname, count = decl:match("^([%w_]+)%s+([%w_]+)%[?(%d*)%]?$")
        assert(ctype, "ops.def: bad attribute '" .. field .. "' of " .. name)
        row.attrs[#row.attrs + 1] = { ctype = ctype, name = fname, count = tonumber(count), default = default }
      end
      rows[#rows + 1] = row
    elseif line:match("^%s*OP") then
      error("ops.def: a row must start with OP( at the begin of a line: " .. line)
    end
  end
  return rows
end

local function print_header()
  local out = { "/* Printed by src/gen.lua from ops.def and errors.def; do not edit. */", "#ifndef PS_GEN_H",
                "#define PS_GEN_H", "#include <stdint.h>", "/* @cdef */", "enum { PS_OK = 0," }
  for name, code, text in read(b):gmatch('PS_ERROR%((%w+),%s*(-?%d+), "([^"]*)"%)') do
    out[#out + 1] = ("  PS_%s = %s, /* %s */"):format(name, code, text)
  end
  out[#out + 1] = "};"
  out[#out + 1] = "enum { PS_SUB_NONE,"
  for name, text in read(b):gmatch('PS_SUBERROR%(([%w_]+),%s*"([^"]*)"%)') do
    out[#out + 1] = ("  PS_SUB_%s, /* %s */"):format(name, text)
  end
  out[#out + 1] = "};"
  local rows = parse_ops(a)
  out[#out + 1] = "enum {"
  for _, row in ipairs(rows) do out[#out + 1] = "  PS_OP_" .. row.name .. "," end
  out[#out + 1] = "  PS_OP_COUNT };"
  for _, row in ipairs(rows) do
    local fields = {}
    for _, at in ipairs(row.attrs) do
      fields[#fields + 1] = at.ctype .. " " .. at.name .. (at.count and ("[" .. at.count .. "]") or "") .. ";"
    end
    if #fields == 0 then fields[1] = "int32_t unused;" end
    out[#out + 1] = ("typedef struct ps_attrs_%s { %s } ps_attrs_%s;"):format(row.name, table.concat(fields, " "),
      row.name)
  end
  out[#out + 1] = "/* @endcdef */"
  local last = {}                                -- entries X(struct, last field), for comparing layouts
  for i, row in ipairs(rows) do
    last[i] = ("X(ps_attrs_%s, %s)"):format(row.name, row.attrs[1] and row.attrs[#row.attrs].name or "unused")
  end
  out[#out + 1] = "#define PS_ATTRS_STRUCTS(X) \\\n  " .. table.concat(last, " \\\n  ")
  out[#out + 1] = "#endif"
  io.write(table.concat(out, "\n"), "\n")
end

-- The range of an attribute of each integer type; nil for floats. 2^63 itself is not an int64.
local WHOLE = { int32_t = { "-0x1p31", "0x1p31" }, uint32_t = { "0", "0x1p32" }, int64_t = { "-0x1p63", "0x1p63" },
                uint64_t = { "-0x1p63", "0x1p64" } }
local function is_wrong(value, ctype)
  local range = WHOLE[ctype]
  if not range then return ("type_of(%s) ~= 'number'"):format(value) end
  return ("type_of(%s) ~= 'number' or %s %% 1 ~= 0 or %s < %s or %s >= %s"):format(value, value, value, range[1], value,
    range[2])
end

--- Prints one Lua function per op: op(inputs..., attributes...) -> outputs.... Optional inputs can be nil; an argument
--- after the last attribute is an error. Every call fills the op's own attribute struct and calls ps_apply. The file is
--- Lua so that editors can read it. lua/ps/core/ops.lua compiles the lines of each op separately, when the op is first
--- used.
local function print_lua()
  local out = {
    "-- Printed by src/gen.lua from ops.def; do not edit. One function per op: inputs, then attributes.",
    "---@diagnostic disable: unused-local",
    "return function(ffi, C, apply, caller)",
    "local ops, info = {}, {}",
    "local error, tensor, number, more = caller.error, caller.tensor, caller.number, caller.more",
    "local type_of = type",                                -- because an attribute can be called `type`
    "local ins = ffi.new('ps_tensor *[64]')",
  }
  local function add(...) out[#out + 1] = string.format(...) end
  for _, row in ipairs(parse_ops(a)) do
    local params, doc_params, fills = {}, {}, {}
    local variadic = row.ins[1] and row.ins[1].variadic
    add("do -- op %s of line %d", row.name, #out + 1)
    add("local attrs = ffi.new('ps_attrs_%s')", row.name)
    if variadic then
      params[1] = "list"
      doc_params[1] = "---@param list ps.Tensor[] " .. row.ins[1].name
      add("local nbytes = ffi.sizeof(attrs)")
    else
      for i, x in ipairs(row.ins) do
        params[#params + 1] = x.name
        doc_params[#doc_params + 1] = ("---@param %s%s ps.Tensor"):format(x.name, x.optional and "?" or "")
        fills[#fills + 1] = ("if type_of(%s) ~= 'cdata' then tensor(%s, '%s', '%s') end"):format(x.name, x.name,
          row.name, x.name)
        fills[#fills + 1] = ("ins[%d] = %s"):format(i - 1, x.name)
      end
    end
    for _, at in ipairs(row.attrs) do
      if not at.name:match("^pad%d*$") then
        local p = at.name
        for _, x in ipairs(row.ins) do if x.name == p then p = p .. "_" end end
        params[#params + 1] = p
        if at.count then
          doc_params[#doc_params + 1] = ("---@param %s integer[]"):format(p)
          fills[#fills + 1] = ("if type_of(%s) ~= 'table' then error('%s: %s is a list of numbers, not ' .. "
            .. "type_of(%s), 2) end")
            :format(p, row.name, at.name, p)
          fills[#fills + 1] = ("if #%s > %d then error('%s: %s takes at most %d numbers, got ' .. #%s, 2) end")
            :format(p, at.count, row.name, at.name, at.count, p)
          -- Without a loop, since LuaJIT compiles no path with a loop of few turns.
          for i = 1, at.count do
            fills[#fills + 1] = ("if #%s >= %d then local v = %s[%d] if v == nil or %s then v = number(v, '%s', '%s', "
              .. "'%s') end attrs.%s[%d] = v end"):format(p, i, p, i, is_wrong("v", at.ctype), row.name, at.name,
              at.ctype, at.name, i - 1)
          end
        else
          doc_params[#doc_params + 1] = ("---@param %s? number default %s"):format(p, at.default or "0")
          fills[#fills + 1] = ("if %s and (%s) then number(%s, '%s', '%s', '%s') end"):format(p,
            is_wrong(p, at.ctype), p, row.name, at.name, at.ctype)
          fills[#fills + 1] = ("attrs.%s = %s or %s"):format(at.name, p, at.default or "0")
        end
      end
    end
    add("--- %s", row.doc)
    for _, d in ipairs(doc_params) do out[#out + 1] = d end
    local rets = {}
    for i = 1, #row.outs do rets[i] = "ps.Tensor" end
    add("---@return %s", table.concat(rets, ", "))
    add("function ops.%s(%s)", row.name, table.concat(params, ", ") .. ", extra")
    add("if extra ~= nil then more('%s', '%s', extra) end", row.name, table.concat(params, ", "))
    if variadic then
      add("if type_of(list) ~= 'table' then error('%s takes a list of tensors, not ' .. type_of(list)) end", row.name)
      add("local n = #list")
      add("if n > 64 then error('%s takes at most 64 tensors, got ' .. n, 2) end", row.name)
      for i = 1, 2 do add("if n >= %d then ins[%d] = tensor(list[%d], '%s', %d) end", i, i - 1, i, row.name, i) end
      add("for i = 3, n do ins[i - 1] = tensor(list[i], '%s', i) end", row.name)
    end
    for _, f in ipairs(fills) do out[#out + 1] = f end
    add("return apply(C.PS_OP_%s, %s, ins, attrs, %s, %d)", row.name, variadic and "n" or #row.ins,
        "ffi.sizeof('ps_attrs_" .. row.name .. "')", #row.outs)
    add("end end")
    local in_names = {}
    for i, x in ipairs(row.ins) do in_names[i] = x.name .. (x.optional and "?" or "") .. (x.variadic and "*" or "") end
    add("info[C.PS_OP_%s] = { name = '%s', ins = '%s', outs = '%s', n_out = %d, flags = '%s', grad = '%s', doc = %q }",
        row.name, row.name, table.concat(in_names, " "), table.concat(row.outs, " "), row.n_out, row.flags, row.grad,
        row.doc)
  end
  add("return ops, info, ins")
  add("end")
  io.write(table.concat(out, "\n"), "\n")
end

--- Returns two 32-bit hashes, one after the other, in hex: FNV-1a, and one that rotates, mixes and adds.
local function hash(text)
  local bit = require "bit"
  local h1, h2 = 0x811c9dc5, 0x050c5d1f
  for i = 1, #text do
    local c = text:byte(i)
    h1 = bit.tobit(bit.bxor(h1, c) * 1.0)
    h1 = bit.tobit(bit.lshift(h1, 24) + h1 * 403)      -- times 0x01000193
    h2 = bit.tobit(bit.bxor(bit.rol(h2, 5), c) + 0x9e3779b9)
  end
  return bit.tohex(h1) .. bit.tohex(h2)
end

local function print_cdef()
  local text = {}
  for i = 2, #arg do
    local path = arg[i]
    local region = assert(read(path):match("/%* @cdef %*/(.-)/%* @endcdef %*/"), path .. ": no cdef region")
    assert(not region:find("\n%s*#"), path .. ": the cdef region must not hold preprocessor lines")
    text[#text + 1] = (region:gsub("/%*.-%*/", "")):gsub("\n%s*\n+", "\n")
  end
  text = table.concat(text, "\n")
  local out = { "/* Printed by src/gen.lua from ps_gen.h, ps.h and ps_test.h; do not edit. */",
    "static const char ps_cdef_text[] =" }
  for line in text:gmatch("[^\n]+") do out[#out + 1] = ("  %q \"\\n\""):format(line) end
  out[#out] = out[#out] .. ";"
  out[#out + 1] = ("static const char ps_cdef_hash[] = \"%s\";"):format(hash(text))
  io.write(table.concat(out, "\n"), "\n")
end

local actions = { header = print_header, lua = print_lua, cdef = print_cdef }
assert(actions[what], "usage: gen.lua header|lua|cdef FILES")()
