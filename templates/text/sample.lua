-- Continues a text: psluajit sample.lua "A model"
local ps = require "ps"
local gpt2 = require "models.gpt2"
local config = require "config"

local start = arg[1] or "The "
local model = gpt2.new(config.model)
model:load_state_dict(ps.load "model.safetensors")
model:eval()
ps.manual_seed(config.seed)

local ids = ps.tensor({ { start:byte(1, config.seq - 1) } }, { dtype = "int32" })
local n = math.max(1, config.seq - ids:size(1))                     -- the model reads at most this many bytes
local list = model:generate(ids, n, { temperature = 0.8, top_k = 40 })
local row, text = type(list) == "table" and list[1] or list:tolist()[1], {}
for i, id in ipairs(row) do text[i] = string.char(id) end
print(table.concat(text))
