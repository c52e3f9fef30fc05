/* SPDX-License-Identifier: BSD-3-Clause
 * Sizes and offsets of the structs that cross the FFI, as this compiler lays them out. spec/core/abi_spec.lua compares
 * them with LuaJIT's. For each struct there are its size and the offset of its last field. */
#include "ps_test.h"

#define ENTRY(type, field) { #type, sizeof(type) }, { #type "." #field, offsetof(type, field) },
static const struct { const char *name; int64_t size; } entries[] = {
    ENTRY(ps_tensor, grad_)
    ENTRY(ps_error_detail, left)
    ENTRY(ps_machine, device_sms)
    ENTRY(ps_device_info, fuses)
    ENTRY(ps_memory_info, limit)
    ENTRY(ps_holder, pad)
    ENTRY(ps_op_cost_info, bytes)
    ENTRY(ps_cached_attention, scale)
    ENTRY(ps_record_event, to)
    ENTRY(ps_record_total, flops)
    ENTRY(ps_calls_total, axis)
    ENTRY(ps_rng, pad)
    ENTRY(ps_st_entry, nbytes)
    ENTRY(ps_gguf_entry, as_it_is)
    ENTRY(ps_gguf_value, text)
    ENTRY(ps_loan, lender)
    ENTRY(ps_loader_config, world_size)
    ENTRY(ps_loader_position, batch)
    ENTRY(ps_tok_ids, n)
    ENTRY(ps_tok_block, flags)
    ENTRY(ps_use, action)
    ENTRY(ps_plan_chunk, valid)
    ENTRY(ps_move, pad)
    ENTRY(ps_plan_input, cyclic)
    ENTRY(ps_plan, valid_after)
    ENTRY(ps_trace_info, other)
    ENTRY(ps_chunk_config, ahead)
    ENTRY(ps_chunk_info, next_use)
    ENTRY(ps_tier_info, bytes_down)
    ENTRY(ps_step_forecast, resident)
    ENTRY(ps_part_config, nbytes)
    ENTRY(ps_param, n_states)
    ENTRY(ps_stats, max)
    ENTRY(ps_anomaly_info, module)
    ENTRY(ps_update_group, n_needed)
    ENTRY(ps_action, micro)
    ENTRY(ps_step_state, weight)
    ENTRY(ps_step_config, trace)
    ENTRY(ps_action_how, n_groups)
    ENTRY(ps_pipe_spec, vstages)
    ENTRY(ps_pipe_held, waiting)
    ENTRY(ps_pipe_cost, waiting)
    ENTRY(ps_pipe_link, pad)
    ENTRY(ps_pipe_span, end)
    ENTRY(ps_pipe_times, bubble)
    ENTRY(ps_pipe_rank_times, peak)
    ENTRY(ps_pipe_cut_times, tried)
    ENTRY(ps_pipe_tensor, shape)
    ENTRY(ps_pipe_event, loss)
    ENTRY(ps_engine_stats, ranks_wait_s)
    ENTRY(ps_rates, numel)
    ENTRY(ps_meeting, heartbeat_s)
    ENTRY(ps_pt_value, text)
    ENTRY(ps_pt_tensor, data)
    PS_ATTRS_STRUCTS(ENTRY)
};

int64_t ps_abi_size(int i, const char **name)
{
    if (i < 0 || (size_t)i >= sizeof entries / sizeof *entries) return -1;
    *name = entries[i].name;
    return entries[i].size;
}
