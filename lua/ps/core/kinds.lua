-- SPDX-License-Identifier: BSD-3-Clause
-- The kinds of chunks (enum PS_KIND_ of src/ps.h), and the bytes of a chunk of each kind. An update reads chunks of
-- several kinds at once, so their tensors begin at different offsets. PS_KIND_SHIFT (src/ps.h) gives the reason.
local native = require "ps.core.ffi"
local ffi, C = native.ffi, native.C

local kinds = {}

local PAGE = 4096                       -- bytes; the size of a chunk is a multiple of it
local SHIFTED_FROM = 2 ^ 20             -- bytes of elements; in a smaller chunk the offset would waste memory
local BYTES = require("ps.core.dtype").nbytes

--- Names by number, and numbers by name.
kinds.name, kinds.number = {}, {}
for i = 0, C.PS_KIND_COUNT - 1 do
  local name = ffi.string(C.ps_kind_name(i))
  kinds.name[i], kinds.number[name] = name, i
end

-- Kinds that share another kind's offset: the two kinds never exist together.
local OFFSET_OF = { momentum_buffer = "exp_avg" }
local LAST = kinds.number.grad                    -- the largest offset

--- The most bytes by which a chunk of `numel` fp32 elements, of any kind, is larger than its elements.
---@param numel integer
---@return integer
function kinds.most_extra(numel)
  if numel * BYTES.fp32 < SHIFTED_FROM then return PAGE end
  return (math.ceil(LAST * C.PS_KIND_SHIFT / PAGE) + 1) * PAGE
end

--- Bytes before the first tensor of a chunk of a kind that holds `numel` elements of a type.
---@param kind string
---@param numel integer
---@param dtype "fp32"|"bf16"|"fp16"
---@return integer
function kinds.start(kind, numel, dtype)
  return numel * BYTES[dtype] >= SHIFTED_FROM and kinds.number[OFFSET_OF[kind] or kind] * C.PS_KIND_SHIFT
    or 0
end

-- Chunks of the optimizer's state have one size, since each may reuse the memory of another.
local SIZE_OF = { param_fp32 = "exp_avg_sq", exp_avg = "exp_avg_sq", momentum_buffer = "exp_avg_sq" }

--- Bytes of a chunk of a kind that holds `numel` elements of a type.
---@param kind string
---@param numel integer
---@param dtype "fp32"|"bf16"|"fp16"
---@return integer
function kinds.bytes(kind, numel, dtype)
  return math.ceil((numel * BYTES[dtype] + kinds.start(SIZE_OF[kind] or kind, numel, dtype)) / PAGE) * PAGE
end

return kinds
