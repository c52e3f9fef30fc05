-- Prints the class of a text: psluajit classify.lua "the train to the coast was late"
local ps = require "ps"
local model_file = require "model"

local names = {}
for line in io.lines "classes.txt" do names[#names + 1] = line end
local model = model_file.new(#names)
model:load_state_dict(ps.load "model.safetensors")

local text = arg[1] or error("give a text: psluajit classify.lua TEXT", 0)
local logits = model(ps.tensor({ model_file.encode(text) }, { dtype = "int32" }))
local shares = ps.softmax(logits, 1):tolist()[1]
for i, name in ipairs(names) do print(("%-10s %.2f"):format(name, shares[i])) end
