/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares the messages between the store and a rank that has proved that it belongs to the run. All
 * numbers are little-endian. If a peer sends another magic number, its connection is closed. */
#ifndef PS_RENDEZVOUS_STORE_PROTOCOL_H
#define PS_RENDEZVOUS_STORE_PROTOCOL_H
#include <stdint.h>

enum { PS_STORE_MAGIC = 0x31565350 };                  /* "PSV1" */
enum { PS_STORE_HELLO, PS_STORE_SET, PS_STORE_GET, PS_STORE_FAULT, PS_STORE_BYE, PS_STORE_ALL };
/* A request consists of this header, the key and the value.
 *   HELLO   a is the rank, and b is the world size.
 *   GET     a is the maximum wait in milliseconds.
 *   ALL     The server answers when all ranks have sent HELLO. a is the maximum wait in milliseconds.
 *   FAULT   The value is the text of the fault. */
typedef struct ps_store_request {
    uint32_t magic, what, key_nbytes, value_nbytes;
    int32_t a, b;
} ps_store_request;
/* An answer consists of this header, followed by the value or by the text of the error. FAULT and BYE have no
 * answer. */
typedef struct ps_store_answer {
    uint32_t magic;
    int32_t status;                                     /* 0, or a PS_E* error */
    uint32_t nbytes;
} ps_store_answer;
#endif
