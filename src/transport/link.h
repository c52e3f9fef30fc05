/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares a simulated link, for benchmarks and tests. The environment variable PS_SIM_LINK is the rate of
 * the link in bytes per second. If it is set, the messages of this process pass the link one after the other. Each
 * message is sent after the time that the link needs for its bytes at this rate. The link uses no processor time. */
#ifndef PS_TRANSPORT_LINK_H
#define PS_TRANSPORT_LINK_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_link ps_link;
/* The type of a function that sends a message after it has passed the link. The thread of the link calls this function.
 * The function must not wait for a thread that calls the link. */
typedef void (*ps_link_send)(void *message, int peer, uint64_t slot);

/* Opens the link. Sets *out to NULL if PS_SIM_LINK is not set. Returns PS_EINVAL if PS_SIM_LINK is not a number of
 * bytes per second, or PS_ENOMEM if there is no memory. */
int ps_link_open(ps_link_send send, ps_link **out);
/* Queues a message. If there is no memory, returns PS_ENOMEM and the message is not queued. */
int ps_link_put(ps_link *link, void *message, int peer, uint64_t slot, int64_t nbytes);
/* Removes a message that has not passed the link yet, so that it is not sent. Does nothing if `link` is NULL. */
void ps_link_drop(ps_link *link, const void *message);
void ps_link_close(ps_link *link);         /* does nothing if `link` is NULL */

#ifdef __cplusplus
}
#endif
#endif
