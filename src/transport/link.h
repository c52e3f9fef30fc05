/* SPDX-License-Identifier: BSD-3-Clause
 * A pretend link, for benches and tests: with PS_SIM_LINK=bytes a second in the environment, the messages of this
 * process to all others pass it one after the other, each in the time that its bytes take. Nothing computes meanwhile:
 * a message waits, and is then sent as without the link. */
#ifndef PS_TRANSPORT_LINK_H
#define PS_TRANSPORT_LINK_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_link ps_link;
/* Sends a message that has passed, from the link's thread, in which it must not wait for the link's user. */
typedef void (*ps_link_send)(void *message, int peer, uint64_t slot);

/* *out: NULL without PS_SIM_LINK. PS_EINVAL: it is no number of bytes; PS_ENOMEM. */
int ps_link_open(ps_link_send send, ps_link **out);
/* Puts a message behind those that are on the link. PS_ENOMEM: it will not be sent. */
int ps_link_put(ps_link *link, void *message, int peer, uint64_t slot, int64_t nbytes);
/* The message, if it has not passed, is not sent any more. NULL link: nothing happens. */
void ps_link_drop(ps_link *link, const void *message);
void ps_link_close(ps_link *link);         /* NULL: nothing happens */

#ifdef __cplusplus
}
#endif
#endif
