-- Continues a text: psluajit sample.lua "A model"
local ps = require "ps"
local gpt2 = require "models.gpt2"
local config = require "config"

-- Loads the weights that train.lua wrote.
local function weights()
  local file = io.open "model.safetensors"
  if not file then error("there is no model.safetensors: run psluajit train.lua first", 0) end
  file:close()
  return ps.load "model.safetensors"
end

local start = arg[1] ~= "" and arg[1] or "The "
local model = gpt2.new(config.model)
model:load_state_dict(require("ps.command_line").try("sample.lua", weights))      -- an error is one line
model:eval()
ps.manual_seed(config.seed)

local ids = ps.tensor({ { start:byte(1, config.seq - 1) } }, { dtype = "int32" })
local n = math.max(1, config.seq - ids:size(1))                     -- the model reads at most this many bytes
local list = model:generate(ids, n, { temperature = 0.8, top_k = 40 })
local row, text = type(list) == "table" and list[1] or list:tolist()[1], {}
for i, id in ipairs(row) do text[i] = string.char(id) end
print(table.concat(text))
