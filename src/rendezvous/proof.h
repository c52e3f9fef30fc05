/* SPDX-License-Identifier: BSD-3-Clause
 * Proves that a connection of the store or the watch belongs to this run. Both ends name their run and prove that
 * they know its secret. Each sends 32 random bytes, and a keyed hash (BLAKE2b of libsodium) of the bytes that both
 * sent. The secret itself is never sent. Messages have a fixed size, so a stranger uses little memory. The proof
 * does not protect against an attacker who reads or alters packets.
 *
 *   rank            server
 *   OPEN       ->                its run, 32 random bytes
 *              <-   OFFER        the same of the server, which then hangs up if the runs differ
 *   PROOF      ->                hash(key, "rank", OPEN, OFFER)
 *              <-   WELCOME      hash(key, "server", OPEN, OFFER); or "refused", and hangs up */
#ifndef PS_RENDEZVOUS_PROOF_H
#define PS_RENDEZVOUS_PROOF_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

enum { PS_RUN_NAME = 128, PS_PROOF_BYTES = 32, PS_PROOF_TEXT = 256 };

/* Name and secret of a run, all zeros if it has neither. */
typedef struct ps_run {
    char name[PS_RUN_NAME + 4];            /* name with a final 0, "" for none */
    bool secret;                           /* the run has a secret; otherwise the key is all zeros */
    uint8_t key[PS_PROOF_BYTES];
} ps_run;

/* Makes a run from its name and secret, each of which may be NULL or "". PS_EINVAL: the name has over PS_RUN_NAME
 * bytes. */
int ps_run_make(const char *name, const char *secret, ps_run *out);
/* Copies `run` with a new key, derived from the old key and from `salt`. */
void ps_run_derive(const ps_run *run, const char *salt, ps_run *out);
void ps_run_token(char hex[2 * PS_PROOF_BYTES + 1]);        /* writes 256 random bits as text */
/* Compares a and b in constant time, so that the time reveals nothing. */
bool ps_proof_same(const uint8_t a[PS_PROOF_BYTES], const uint8_t b[PS_PROOF_BYTES]);
/* Returns "run 'NAME'" or "a run without a name", safe to print. */
const char *ps_run_shown(const char *name, char out[PS_RUN_NAME + 32]);

typedef struct ps_proof_hello {            /* body of OPEN and OFFER */
    uint32_t magic, secret;
    char run[PS_RUN_NAME];                 /* name of the run, padded with zeros */
    uint8_t random[PS_PROOF_BYTES];
} ps_proof_hello;
typedef struct ps_proof_word {             /* body of PROOF and WELCOME */
    uint32_t magic, refused;
    uint8_t hash[PS_PROOF_BYTES];
} ps_proof_word;
enum { PS_PROOF_MAGIC = 0x31485350 };      /* "PSH1" */

/* Performs a rank's side of the proof over a new connection. All errors begin with `what`:
 *   PS_EIO       the server closed the connection
 *   PS_ETIME     the server did not answer
 *   PS_EFORMAT   the server uses another protocol
 *   PS_ESTATE    the server belongs to another run, or has another secret */
int ps_proof_ask(int fd, const ps_run *run, double until, const char *what);

/* The server's progress in one connection's proof, at first all zeros. */
typedef struct ps_proof {
    bool opened;                           /* OPEN was received and OFFER was sent */
    uint32_t got;                          /* bytes of the present message received so far */
    ps_proof_hello open, offer;
    ps_proof_word word;
} ps_proof;
enum { PS_PROOF_HANG_UP = -1, PS_PROOF_MORE, PS_PROOF_DONE };
/* Reads the bytes that have arrived, and answers a complete message. Does not wait. After HANG_UP, `why` is the
 * reason for a client that used this protocol, else "". */
int ps_proof_answer(ps_proof *p, int fd, const ps_run *run, char why[PS_PROOF_TEXT]);

#ifdef __cplusplus
}
#endif
#endif
