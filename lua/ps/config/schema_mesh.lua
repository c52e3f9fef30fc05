-- SPDX-License-Identifier: BSD-3-Clause
-- The keys that split a model among processes, and their aliases in DeepSpeed, OSLO and BMTrain. This file is a part of
-- schema.lua and has the same form.
jit.off(true, true)                    -- compiled traces would keep this file in memory after it is unloaded
local H, I, A = "honoured", "ignored", "alias"

-- The files that act on keys.
local ROW = "lua/ps/engine/pipeline/row.lua"
local SETTLED = "lua/ps/config/init.lua"
local SETUP = "lua/ps/engine/setup.lua"

local STAGES = "it is for a model of several stages"
local OWN = "DeepSpeed's way to cut layers; here the model defines how its layers are cut"

---@param T table ps.core.types
---@return table[] sections
return function(T)
  return {
    { "", "The numbers of micro-batches, in the spelling of OSLO and BMTrain.", {
      { "micro_batch_size", T.integer(1), nil, A, "train_micro_batch_size_per_gpu" },
      { "num_micro_batches", T.integer(1, T.MICRO_BATCHES), nil, A, "gradient_accumulation_steps" },
    } },
    { "pipeline", "Settings for a model that is cut into stages on different processes.", {
      { "stages", T.integer(1), 1, H, "number of pipeline stages, each on its own process (docs/pipeline.md)",
        acts = SETUP },
      { "schedule", T.enum "gpipe|1f1b|interleaved|looped_bfs|zb_h1|zb_v", "1f1b", H,
        "the order of forwards and backwards", acts = ROW },
      { "virtual_stages", T.integer(1), nil, H, "number of virtual stages per process (default 1, or 2 with "
        .. "zb_v)", acts = ROW },
      { "partition", T.string, "best", H, "how the model is cut. best and cost select the cut with the "
        .. "shortest step by counted operations, and measured the cut with the shortest step by measured seconds. "
        .. "uniform balances the numbers of parts, parameters the numbers of parameters, and type:NAME the numbers of "
        .. "parts with a module of class NAME. Any other text is Megatron's layout string (docs/pipeline.md)",
        acts = ROW },
      { "activation_checkpoint_interval", T.integer(0), 0, H, "1 has the same effect as recompute = true; with 0, "
        .. "recompute decides",
        check = function(value)
          if value > 1 then return "each block is its own recompute segment; set 1, or 0 for none" end
        end, acts = SETTLED },
      { "seed_layers", T.boolean, false, I, "the weights are those of one process, whatever the cut" },
      { "pipe_partitioned", T.boolean, true, I, STAGES }, { "grad_partitioned", T.boolean, true, I, STAGES },
      { "use_reentrant", T.boolean, true, I, "there is one implementation of recomputation" },
    } },
    { "tensor_parallel", "Settings for layers that are cut among processes.", acts = SETUP, {
      { "size", T.integer(1), 1, H, "number of processes, each of which has a part of every layer "
        .. "(docs/tensor_parallel.md)" },
      { "sequence_parallel", T.boolean, true, H, "whether each process has only its share of the rows between layers" },
      { "tp_keep_gathered", T.boolean, false, H, "whether backward keeps the rows that a layer gathered in the "
        .. "forward; if false, it gathers them again" },
      { "autotp_size", T.integer(0), nil, A, "tensor_parallel.size",
        as = function(value) return value > 0 and value end },
      { "preset_model", T.string, nil, I, OWN }, { "partition_config", T.tree, nil, I, OWN },
      { "tp_overlap_comm", T.either(T.boolean, T.integer(1, 8)), false, H, "whether communication of rows overlaps "
        .. "with the products of column and row layers, in the given number of pieces; true means 4 pieces" },
      { "dtype", T.string, "fp16", I, "the sections fp16 and bf16 set the type" },
      { "keep_module_on_host", T.boolean, false, I, "parameters are moved to their tiers as they are made" },
    } },
    { "tensor_parallel.tp", "", {
      { "tp_size", T.integer(1), nil, A, "tensor_parallel.size" },
      { "tp_grain_size", T.integer(1), 1, I, OWN },
    } },
    { "model_parallelism", "OSLO's section.", {
      { "enable", T.boolean, nil, I, "sizes above 1 enable it; false together with such a size is an error" },
      { "pipeline_parallel_size", T.integer(1), nil, A, "pipeline.stages" },
      { "tensor_parallel_size", T.integer(1), nil, A, "tensor_parallel.size" },
      { "micro_batch_size", T.integer(1), nil, A, "train_micro_batch_size_per_gpu" },
    } },
  }
end
