/* SPDX-License-Identifier: BSD-3-Clause
 * A simulated link, for benches and tests. If PS_SIM_LINK (bytes per second) is set in the environment, this process
 * sends its messages one after the other, each after the time that its bytes need at this rate. The link uses no
 * processor time. */
#ifndef PS_TRANSPORT_LINK_H
#define PS_TRANSPORT_LINK_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_link ps_link;
/* Sends a message that has passed the link. Runs on the link's thread, and must not wait for any caller of the link. */
typedef void (*ps_link_send)(void *message, int peer, uint64_t slot);

/* Opens the link, or sets *out to NULL if PS_SIM_LINK is not set. PS_EINVAL: PS_SIM_LINK is not a number of bytes.
 * PS_ENOMEM. */
int ps_link_open(ps_link_send send, ps_link **out);
/* Queues a message. PS_ENOMEM: it was not queued. */
int ps_link_put(ps_link *link, void *message, int peer, uint64_t slot, int64_t nbytes);
/* Removes a message that has not passed the link, so that it is not sent. Does nothing if `link` is NULL. */
void ps_link_drop(ps_link *link, const void *message);
void ps_link_close(ps_link *link);         /* does nothing for NULL */

#ifdef __cplusplus
}
#endif
#endif
