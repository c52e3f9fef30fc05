-- Trains the classifier of model.lua on data.tsv.
local ps = require "ps"
local config = require "config"
local model_file = require "model"

-- The examples of a file, and the names of its classes in the order of their first lines.
local function read(path)
  local rows, names, number, texts = {}, {}, {}, {}
  local file, why = io.open(path)
  if not file then error("cannot open " .. why, 0) end
  for line in file:lines() do
    local class, text = line:match "^([^\t]+)\t(.+)$"
    if not class then error(("%s: line %d has no tab between a class and a text"):format(path, #rows + 1), 0) end
    if not number[class] then
      names[#names + 1] = class
      number[class] = #names - 1
    end
    texts[class] = (texts[class] or 0) + 1
    rows[#rows + 1] = { ids = model_file.encode(text), class = number[class] }
  end
  file:close()
  if #rows < 5 or #names < 2 then
    error(("%s: at least 5 texts and 2 classes are needed; it has %d and %d"):format(path, #rows, #names), 0)
  end
  for _, class in ipairs(names) do
    if texts[class] == 1 then
      error(("%s: the class '%s' has only one text. A line is a class, a tab and a text, and there is no header line."
        ):format(path, class), 0)
    end
  end
  print(("%s: %d texts of %d classes: %s"):format(path, #rows, #names, table.concat(names, ", ")))
  return rows, names
end

ps.manual_seed(config.seed)
local rows, names = require("ps.command_line").try("train.lua", read, "data.tsv")      -- an error is one line
local train, test = {}, {}
for i, row in ipairs(rows) do table.insert(i % 5 == 0 and test or train, row) end

local function batch(list, from, to)
  local ids, classes = {}, {}
  for i = from, math.min(to, #list) do ids[#ids + 1], classes[#classes + 1] = list[i].ids, list[i].class end
  return ps.tensor(ids, { dtype = "int32" }), ps.tensor(classes, { dtype = "int64" })
end

local model, optimizer = ps.initialize {
  config = config.engine, quiet = true,
  model_func = function() return model_file.new(#names) end,
}

-- The share of test rows whose class the model finds.
local function accuracy()
  return ps.no_grad(function()
    local ids, classes = batch(test, 1, #test)
    return model(ids):argmax(1):eq(classes):to("fp32"):mean():item()
  end)
end

for epoch = 1, config.epochs do
  local order = ps.randperm(#train):tolist()
  local shuffled, loss = {}, nil
  for i, at in ipairs(order) do shuffled[i] = train[at + 1] end
  for from = 1, #shuffled, config.batch do
    optimizer:zero_grad()
    loss = model(batch(shuffled, from, from + config.batch - 1))
    model:backward(loss)
    optimizer:step()
  end
  if epoch % 10 == 0 then print(("epoch %d: loss %.3f, accuracy %.2f"):format(epoch, loss:item(), accuracy())) end
end

ps.save(model:state_dict(), "model.safetensors")
local file = assert(io.open("classes.txt", "w"))
file:write(table.concat(names, "\n"), "\n")
assert(file:close())
print "wrote model.safetensors and classes.txt"
