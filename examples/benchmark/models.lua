-- SPDX-License-Identifier: BSD-3-Clause
-- The model sizes of PatrickStar's benchmark (Fang et al. 2022), by name. A size consists of a width, a number of
-- tokens per row, a number of layers, and a number of heads.
local sizes = {}

local BERT, GPT = "bert", "gpt2"

-- The columns are: name, kind, width, tokens per row, layers, heads.
local ROWS = {
  { "Bert", BERT, 768, 512, 6, 12 }, { "Bertlarge", BERT, 1024, 512, 24, 16 },
  { "GPT2small", GPT, 1536, 128, 24, 16 }, { "GPT2_1B", GPT, 2048, 1024, 20, 16 },
  { "megatron_1.3B", GPT, 2048, 1024, 24, 32 }, { "GPT2_2B", GPT, 2048, 1024, 40, 16 },
  { "megatron_3.9B", GPT, 2560, 1024, 24, 40 }, { "GPT2_4B", GPT, 2304, 1024, 64, 16 },
  { "GPT3_6B", GPT, 3072, 1024, 53, 16 }, { "GPT3_8B", GPT, 3072, 1024, 72, 16 },
  { "GPT3_10B", GPT, 4096, 1024, 50, 16 }, { "GPT3_11B", GPT, 4096, 1024, 55, 16 },
  { "GPT3_12B", GPT, 4096, 1024, 60, 16 }, { "GPT3_13B", GPT, 4096, 1024, 65, 16 },
  { "GPT3_15B", GPT, 4096, 1024, 78, 16 }, { "GPT3_18B", GPT, 4096, 1024, 90, 16 },
  { "GPT_NV_18B", GPT, 6144, 1024, 40, 16 }, { "GPT_NV_39B", GPT, 8192, 1024, 48, 16 },
  { "GPT_NV_76B", GPT, 10240, 1024, 60, 16 }, { "GPT_DS_20B", GPT, 8192, 1024, 25, 16 },
  { "GPT_DS_40B", GPT, 8192, 1024, 50, 16 }, { "GPT_DS_50B", GPT, 8192, 1024, 62, 16 },
  { "GPT_DS_60B", GPT, 8192, 1024, 75, 16 }, { "GPT_DS_68B", GPT, 9216, 1024, 66, 16 },
  { "GPT_175B", GPT, 12288, 1024, 96, 96 }, { "GPT_220B", GPT, 12288, 1024, 120, 96 },
  { "GPT_250B", GPT, 12288, 1024, 137, 96 }, { "GPT_310B", GPT, 16384, 1024, 128, 128 },
  { "GPT_454B", GPT, 20480, 1024, 90, 128 },
}

local VOCABULARY = { [BERT] = 30522, [GPT] = 50257 }

---@class benchmark.Size
---@field name string
---@field kind "bert"|"gpt2"
---@field width integer
---@field seq integer number of tokens per row
---@field layers integer
---@field heads integer
---@field vocabulary integer

local function size_of(name, kind, width, seq, layers, heads, vocabulary)
  return { name = name, kind = kind, width = width, seq = seq, layers = layers, heads = heads,
    vocabulary = vocabulary or VOCABULARY[kind] }
end

--- Returns all names in the order of PatrickStar's list.
---@return string[]
function sizes.names()
  local names = {}
  for i, row in ipairs(ROWS) do names[i] = row[1] end
  return names
end

--- Returns the size for a name. The name can also be "WIDTH/SEQ/LAYERS/HEADS" or "WIDTH/SEQ/LAYERS/HEADS/VOCABULARY",
--- for a GPT of that size.
---@param name string
---@return benchmark.Size
function sizes.of(name)
  for _, row in ipairs(ROWS) do
    if row[1] == name then return size_of(unpack(row)) end
  end
  local numbers = {}
  for number in (name .. "/"):gmatch "([^/]*)/" do
    numbers[#numbers + 1] = number:find "^[1-9]%d*$" and tonumber(number) or 0
  end
  local ok = #numbers == 4 or #numbers == 5
  for _, number in ipairs(numbers) do ok = ok and number > 0 end
  if not ok then
    error(("there is no model '%s'; the models are %s and WIDTH/SEQ/LAYERS/HEADS"):format(name,
      table.concat(sizes.names(), ", ")), 0)
  end
  return size_of(name, GPT, numbers[1], numbers[2], numbers[3], numbers[4], numbers[5])
end

--- Returns the number of parameters of a GPT: 12 C^2 + 13 C per block, two embeddings and the last norm.
---@param size benchmark.Size
---@return number
function sizes.gpt_parameters(size)
  local c = size.width
  return size.layers * (12 * c * c + 13 * c) + (size.vocabulary + size.seq) * c + 2 * c
end

return sizes
