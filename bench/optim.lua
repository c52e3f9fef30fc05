-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/optim.lua IN.safetensors --optimizer NAME --params JSON --steps N [--chunk JSON] [--ranks R]
-- Updates parameters with given gradients, for comparisons with other programs. IN contains fp32 tensors: the
-- parameters p.<name>, and the gradients g.<name>.<step> of each step, counted from 0. The parameters p.<name> after N
-- steps and the states s.<name>.<state> are written to IN.out.safetensors.
-- By default, an optimizer of ps.optim performs the steps. With --chunk, the engine performs the steps, and JSON is its
-- configuration (memory, bf16, chunk_size, ...). With --ranks, R processes perform the steps. All processes have the
-- same gradients, which the engine averages. If the request is refused, the exit status is 2, and the error contains
-- the reason.
local ps = require "ps"
local argparse = require "argparse"
local cjson = require "cjson"
local paths = require "ps.paths"
local command_line = require "ps.core.command_line"
local whole = command_line.whole

local parser = argparse("bench/optim.lua", "Updates parameters with given gradients.")
parser:argument("file", "IN.safetensors")
parser:option("--optimizer", "a name of ps.optim", "AdamW")
parser:option("--params", "its settings, as JSON", "{}")
whole(parser:option("--steps", "updates", "1"), 1)
parser:option("--chunk", "a configuration for the engine, as JSON")
whole(parser:option("--ranks", "processes", "1"), 1, 64)
parser:flag("--rank", "(for this script) this process is one of several"):hidden(true)
local args = command_line.parse(parser)

local function refuse(problem)
  io.stderr:write("bench/optim.lua: ", tostring(problem), "\n")
  os.exit(2)
end

local function decoded(text, option)
  local ok, value = pcall(cjson.decode, text)
  if not ok or type(value) ~= "table" then refuse(("%s %s: the value must be a JSON object"):format(option, text)) end
  return value
end

local settings = decoded(args.params, "--params")
local out_path = args.file:gsub("%.safetensors$", "") .. ".out.safetensors"

-- Returns the sorted names of the parameters in the file, and the open file.
local function open()
  local file, names = ps.safetensors.open(args.file), {}
  for _, key in ipairs(file:names()) do names[#names + 1] = key:match "^p%.(.+)$" end
  table.sort(names)
  if #names == 0 then refuse(args.file .. " has no tensor p.<name>") end
  return file, names
end

local function gradient(file, name, step) return file:tensor(("g.%s.%d"):format(name, step)) end

local function plain()
  local file, names = open()
  local params = {}
  for i, name in ipairs(names) do params[i] = ps.nn.Parameter(file:tensor("p." .. name)) end
  local made = ps.optim[args.optimizer]
  if not made then refuse(("there is no ps.optim.%s"):format(args.optimizer)) end
  local opt = made({ { params = params, param_names = names } }, settings)
  for step = 0, args.steps - 1 do
    for i, name in ipairs(names) do params[i]:set_grad(gradient(file, name, step)) end
    opt:step()
  end
  local out = {}
  for i, name in ipairs(names) do out["p." .. name] = params[i] end
  for number, states in pairs(opt:torch_state_dict().state) do
    for key, value in pairs(states) do
      if type(value) ~= "number" then out[("s.%s.%s"):format(names[number + 1], key)] = value end
    end
  end
  ps.safetensors.save(out_path, out)
end

-- A model whose loss is the sum of its parameters times given numbers. Hence the gradients are these numbers. A
-- parameter is called "<number>_<name>.value", so that rules that depend on names (as in Muon) match its name.
local Holder, Given = ps.nn.class "Holder", ps.nn.class "Given"
function Holder:init(value) self.value = ps.nn.Parameter(value) end
function Given:init(file, names)
  self.keys = {}
  for i, name in ipairs(names) do
    self.keys[i] = ("%d_%s"):format(i - 1, (name:gsub("%.", "_")))
    self[self.keys[i]] = Holder(file:tensor("p." .. name))
  end
end
function Given:forward(...)
  local loss
  for i, grad in ipairs { ... } do
    local part = (self[self.keys[i]].value:to "fp32" * grad):sum()
    loss = loss and loss + part or part
  end
  return loss
end

local function engine()
  local file, names = open()
  local config = args.chunk and decoded(args.chunk, "--chunk") or {}
  config.optimizer = { type = args.optimizer, params = settings }
  config.plan_print = false
  local model, opt = ps.initialize { quiet = true, config = config, model_func = function()
    return Given(file, names)
  end }
  for step = 0, args.steps - 1 do
    local grads = {}
    for i, name in ipairs(names) do grads[i] = gradient(file, name, step) end
    model:backward(model(unpack(grads)))
    opt:step()
  end
  local out = {}
  for key, value in pairs(model:state_dict()) do out["p." .. names[tonumber(key:match "^%d+") + 1]] = value end
  for key, value in pairs(opt:state_dict(model).tensors) do
    local number, state = key:match "^(%d+)_.*%.value%.(.+)$"
    out[("s.%s.%s"):format(names[tonumber(number) + 1], state)] = value
  end
  local rank = ps.rank and ps.rank() or 0
  ps.safetensors.save(args.ranks > 1 and ("%s.%d"):format(out_path, rank) or out_path, out)
  model:close()
end

-- Merges the files of all ranks into one file. The file of a rank contains the tensors that the rank owns.
local function join()
  local all = {}
  for rank = 0, args.ranks - 1 do
    local path = ("%s.%d"):format(out_path, rank)
    local file = ps.safetensors.open(path)
    for _, key in ipairs(file:names()) do all[key] = file:tensor(key) end
    os.remove(path)
  end
  ps.safetensors.save(out_path, all)
end

local quote = require("bench.process_lib").quote

local function ranks()
  local words = { quote(arg[-1]), quote(paths.root .. "/tools/launch.lua"), "--nproc-per-node", args.ranks, "--",
    quote(arg[0]), quote(args.file), "--rank", "--optimizer", quote(args.optimizer), "--params", quote(args.params),
    "--steps", args.steps, "--ranks", args.ranks, "--chunk", quote(args.chunk or "{}") }
  if os.execute(table.concat(words, " ")) ~= 0 then refuse "a rank failed" end
  join()
end

local ok, problem
if args.rank then
  ps.init_distributed { quiet = true }
  ok, problem = pcall(engine)
elseif args.ranks > 1 then ok, problem = pcall(ranks)
else ok, problem = pcall(args.chunk and engine or plain) end
if not ok then refuse(type(problem) == "table" and problem.msg or problem) end
