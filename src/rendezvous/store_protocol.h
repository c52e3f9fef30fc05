/* SPDX-License-Identifier: BSD-3-Clause
 * Messages between the store and a rank that has proved to belong to the run. All numbers are little-endian. A peer
 * with another magic number loses its connection. */
#ifndef PS_RENDEZVOUS_STORE_PROTOCOL_H
#define PS_RENDEZVOUS_STORE_PROTOCOL_H
#include <stdint.h>

enum { PS_STORE_MAGIC = 0x31565350 };                  /* "PSV1" */
enum { PS_STORE_HELLO, PS_STORE_SET, PS_STORE_GET, PS_STORE_FAULT, PS_STORE_BYE, PS_STORE_ALL };
/* A request: this header, then the key, then the value.
 *   HELLO   a is the rank, b the world size
 *   GET     a is the longest wait in milliseconds
 *   ALL     answered when all ranks have sent HELLO; a is as for GET
 *   FAULT   the value is the text */
typedef struct ps_store_request {
    uint32_t magic, what, key_nbytes, value_nbytes;
    int32_t a, b;
} ps_store_request;
/* An answer: this header, then the value or the text of the error. FAULT and BYE are not answered. */
typedef struct ps_store_answer {
    uint32_t magic;
    int32_t status;                                     /* 0 or PS_E* */
    uint32_t nbytes;
} ps_store_answer;
#endif
