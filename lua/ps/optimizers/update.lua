-- SPDX-License-Identifier: BSD-3-Clause
-- Runs updates. Also passes the descriptions of optimizers to C: kinds of chunks for the states, and attributes of the
-- update ops.
local native = require "ps.core.ffi"
local chunk_kinds = require "ps.core.kinds"
local optimizers = require "ps.optimizers"
local ffi, C = native.ffi, native.C

local update = {}

-- Maps the name of an optimizer to the code of its op, a struct for the op's attributes, and a pointer type
-- for this struct.
local ops = {}
for _, name in ipairs(optimizers.names) do
  local made = optimizers.of(name)
  for place, state in ipairs(made.states) do chunk_kinds.add_state(state.name, place) end
  local of = { code = C["PS_OP_" .. made.op], attrs = ffi.new("ps_attrs_" .. made.op),
    pointer = ffi.typeof("ps_attrs_" .. made.op .. " *") }
  of.nbytes = ffi.sizeof(of.attrs)
  assert(of.nbytes <= 8 * C.PS_UPDATE_ATTRS and optimizers.takes(made) <= C.PS_MAX_STATES, name)
  ops[name] = of
end

--- Copies a group's settings into a C struct.
---@param into ffi.cdata* ps_update_group
---@param group table
function update.settings_into(into, group)
  local made, of = optimizers.of_group(group), ops[group.kind]
  into.op, into.n_states, into.n_needed = of.code, optimizers.takes(made), optimizers.needed(group)
  made.attrs(ffi.cast(of.pointer, into.attrs), group)
end

--- Updates parameters.
---@param list ps.Tensor[] the tensors of each parameter: param, master, grad and the states
---@param group table
---@param t integer index of the update, counted from 1
---@param scale number a factor that multiplies gradients
function update.run(list, group, t, scale)
  local made, of = optimizers.of_group(group), ops[group.kind]
  made.attrs(of.attrs, group)
  native.check(C.ps_update_attrs(of.code, of.attrs, t, scale))
  native.run(of.code, list, of.attrs, of.nbytes)
end

return update
