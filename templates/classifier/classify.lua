-- Prints the class of a text: psluajit classify.lua "the train to the coast was late"
local ps = require "ps"
local model_file = require "model"

-- Reads the names of the classes, and checks the command line.
local function read()
  if not arg[1] then error("give a text: psluajit classify.lua TEXT", 0) end
  local names, file = {}, io.open "classes.txt"
  if not file then error("there is no classes.txt: run psluajit train.lua first", 0) end
  for line in file:lines() do names[#names + 1] = line end
  file:close()
  return names
end
local names = require("ps.command_line").try("classify.lua", read)      -- an error is one line
local model = model_file.new(#names)
model:load_state_dict(ps.load "model.safetensors")

local logits = model(ps.tensor({ model_file.encode(arg[1]) }, { dtype = "int32" }))
local shares = ps.softmax(logits, 1):tolist()[1]
for i, name in ipairs(names) do print(("%-10s %.2f"):format(name, shares[i])) end
