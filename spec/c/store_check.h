/* SPDX-License-Identifier: BSD-3-Clause
 * Ranks of a test that meet at a store on this machine, in a run without a name and a secret. */
#ifndef PS_SPEC_STORE_CHECK_H
#define PS_SPEC_STORE_CHECK_H
#include "rendezvous/store.h"

static const char *const LOCAL = "127.0.0.1";
static const ps_run nobody;                /* a run without a name and a secret */

static inline int come(int port, int rank, int size, double timeout_s, ps_store **out)
{
    return ps_store_connect(LOCAL, port, &(ps_store_rank){ rank, size, &nobody, timeout_s }, out);
}
static inline int join(const char *rendezvous, int rank, int size, double timeout_s, ps_store_server **server,
                       ps_store **out)
{
    ps_run run;
    ps_meeting m = { .rendezvous = rendezvous, .rank = rank, .size = size, .timeout_s = timeout_s };
    return ps_store_join(&m, &run, server, out);
}

#endif
