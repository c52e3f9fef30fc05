-- SPDX-License-Identifier: BSD-3-Clause
-- Idioms of OSLO's tutorial (idioms_lib.lua).
local ps = require "ps"

-- OSLO's configuration for its layouts.
local PARALLEL = { pipeline = { model_parallelism = { enable = true, pipeline_parallel_size = 2 } },
  tensor = { model_parallelism = { enable = true, tensor_parallel_size = 2 } } }

return function(rows_of)
  local row = rows_of "OSLO"
  -- Returns the layout's configuration, in OSLO's form if OSLO has the layout.
  local function config_of(e)
    local config = { plan_print = false, optimizer = { type = "SGD", params = { lr = 0.5 } } }
    for key, value in pairs(PARALLEL[e.layout] or e.config) do config[key] = value end
    return config
  end
  local function step(e, want, n)
    local sum, count = 0, 0
    for out in e.model:micro_batches { input_ids = e.x, labels = e.x } do
      sum, count = sum + e:loss_of(out.loss), count + 1
      out.loss:backward()
    end
    e:holds(sum / count, n, want)
    e.optimizer:step()
  end
  local function own_losses(e)
    local model, losses = e.model_func(), {}
    local optimizer = ps.optim.SGD(model, { lr = 0.5, per_rank = ps.world_size() > 1 or nil })
    for n = 1, 3 do
      local out = model { input_ids = e.whole_x, labels = e.whole_x }
      losses[n] = out.loss:item()
      out.loss:backward()
      optimizer:step()
      optimizer:zero_grad()
    end
    return losses
  end
  row("optimizer = SGD(model.parameters()); model = oslo.initialize(model, config)", function(e)
    local losses = own_losses(e)
    local model = e.model_func()
    local optimizer = ps.optim.SGD(model, { lr = 0.5 })
    local config = config_of(e)
    config.optimizer = nil
    e.model = ps.initialize { model = model, optimizer = optimizer, config = config, quiet = true }
    e.optimizer = optimizer
    for n = 1, 3 do
      optimizer:zero_grad()
      step(e, losses[n], n)
    end
  end, { tensor = "this model already exists, whole on each rank" })
  row("for out in model(**batch): out.loss.backward()", function(e)
    local losses = own_losses(e)
    e.model, e.optimizer = ps.initialize { model_func = e.model_func, config = config_of(e), quiet = true }
    for n = 1, 2 do step(e, losses[n], n) end
    if e.layout == "pipeline" then
      local sum, count = 0, 0
      for out in e.model { input_ids = e.x, labels = e.x } do
        sum, count = sum + out.loss:item(), count + 1
        out.loss:backward()
      end
      e:holds(sum / count, 3, losses[3])
      e.optimizer:step()
    end
  end)
  row("model.generate(**tokens, num_beams=3)", function(e)
    local plain = e.model_func()
    plain:eval()
    local options = { num_beams = 3, max_new_tokens = 3 }
    local want = table.concat(plain:generate({ 1, 2, 3 }, options), " ")
    e.model, e.optimizer = ps.initialize { model_func = e.model_func, config = config_of(e), quiet = true }
    e.model:eval()
    assert(table.concat(e.model:generate({ 1, 2, 3 }, options), " ") == want)
  end)
  row("model.save_parallelized(save_directory); model = model.from_parallelized(dir)", function(e)
    local folder = e:path("parallel-" .. e.layout)
    e.model, e.optimizer = ps.initialize { model_func = e.model_func, config = config_of(e), quiet = true }
    e:after(0)
    e:after(1)
    e.model:save_parallelized { save_directory = folder }
    ps.synchronize()
    e.model:close()
    e.model, e.optimizer = ps.initialize { model_func = e.model_func, config = config_of(e), quiet = true }
    local model = e.model:from_parallelized(folder)
    assert(model == e.model)
    e:after(2)
  end)
  row("model.save_parallelized(dir, merge_checkpoints=True)", function(e)
    local folder = e:path("merged-" .. e.layout)
    e.model, e.optimizer = ps.initialize { model_func = e.model_func, config = config_of(e), quiet = true }
    e:after(0)
    e.model:save_parallelized(folder, { merge_checkpoints = true })
    ps.synchronize()
    local model = ps.from_pretrained(folder, { quiet = true })
    e.near(model(e.whole_x, e.whole_y):item(), e.losses[2], "the loss of the files")
  end)
end
