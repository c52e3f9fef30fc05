/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares the messages between the store and a rank that has proved that it belongs to the run. All
 * numbers are little-endian. A peer with another magic number loses its connection. */
#ifndef PS_RENDEZVOUS_STORE_PROTOCOL_H
#define PS_RENDEZVOUS_STORE_PROTOCOL_H
#include <stdint.h>

enum { PS_STORE_MAGIC = 0x31565350 };                  /* "PSV1" */
enum { PS_STORE_HELLO, PS_STORE_SET, PS_STORE_GET, PS_STORE_FAULT, PS_STORE_BYE, PS_STORE_ALL };
/* A request. It consists of this header, the key and the value.
 *   HELLO   a is the rank, and b is the world size.
 *   GET     a is the maximum wait in milliseconds.
 *   ALL     It is answered when all ranks have sent HELLO. a has the same meaning as for GET.
 *   FAULT   The value is the text. */
typedef struct ps_store_request {
    uint32_t magic, what, key_nbytes, value_nbytes;
    int32_t a, b;
} ps_store_request;
/* An answer. It consists of this header, and the value or the text of the error. FAULT and BYE have no answer. */
typedef struct ps_store_answer {
    uint32_t magic;
    int32_t status;                                     /* 0, or a PS_E* error */
    uint32_t nbytes;
} ps_store_answer;
#endif
