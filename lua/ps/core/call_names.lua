-- SPDX-License-Identifier: BSD-3-Clause
-- The names that comms_logger.prof_ops accepts. They are names of torch.distributed and DeepSpeed. Each name selects a
-- list of calls. The list contains the names that these calls have in the record of events (docs/profiling.md).
local names = {
  all_reduce = { "all_reduce", "all-reduction of chunks" },
  reduce_scatter = { "reduce_scatter", "reduction of chunks", "reduction in a row layer",
    "backward of a column layer" },
  all_gather = { "all_gather", "gather of chunks", "gather in a column layer" },
  broadcast = { "broadcast" },
  barrier = { "barrier" },
  send = { "send" },
  recv = { "recv" },
}
names.reduce_scatter_tensor, names.all_gather_into_tensor = names.reduce_scatter, names.all_gather
names.isend, names.irecv = names.send, names.recv
return names
