/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares a proof that a connection of the store or the watch belongs to this run. Both ends name their
 * run and prove that they know its secret. Each end sends 32 random bytes. It then sends a keyed hash (BLAKE2b of
 * libsodium) of OPEN and OFFER, which contain the random bytes of both ends. The secret itself is never sent. Messages
 * have a fixed size, so a stranger cannot make the server use much memory. The proof does not protect against an
 * attacker who reads or alters packets.
 *
 *   rank            server
 *   OPEN       ->                the rank's run, 32 random bytes
 *              <-   OFFER        the server's run, 32 random bytes; if the runs differ, the server then hangs up
 *   PROOF      ->                hash(key, "rank", OPEN, OFFER)
 *              <-   WELCOME      hash(key, "server", OPEN, OFFER); or "refused", after which the server hangs up */
#ifndef PS_RENDEZVOUS_PROOF_H
#define PS_RENDEZVOUS_PROOF_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

enum { PS_RUN_NAME = 128, PS_PROOF_BYTES = 32, PS_PROOF_TEXT = 256 };

/* The name and the secret of a run. If the run has neither, all bytes are zeros. */
typedef struct ps_run {
    char name[PS_RUN_NAME + 4];            /* name of the run with a final 0; "" if the run has no name */
    /* secret: true if the run has a secret; otherwise all bytes of the key are zeros */
    bool secret;
    uint8_t key[PS_PROOF_BYTES];
} ps_run;

/* Makes a run from its name and its secret. Both may be NULL or "". Returns PS_EINVAL if the name has more than
 * PS_RUN_NAME bytes. */
int ps_run_make(const char *name, const char *secret, ps_run *out);
/* Copies `run` to *out, but replaces the key by a new key, which is derived from the old key and from `salt`. */
void ps_run_derive(const ps_run *run, const char *salt, ps_run *out);
void ps_run_token(char hex[2 * PS_PROOF_BYTES + 1]);        /* writes 256 random bits in hexadecimal */
/* Returns true if a and b are equal. Compares them in constant time, so that the time reveals nothing about the
 * bytes. */
bool ps_proof_same(const uint8_t a[PS_PROOF_BYTES], const uint8_t b[PS_PROOF_BYTES]);
/* Returns "run 'NAME'", or "a run without a name" if `name` is "". The text is safe to print. */
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

/* Performs the rank's side of the proof on a new connection. The text of each error begins with `what`. Returns 0 or:
 *   PS_EIO       the server has closed the connection
 *   PS_ETIME     the server did not answer before the time `until`
 *   PS_EFORMAT   the server uses another protocol
 *   PS_ESTATE    the server belongs to another run, or has another secret */
int ps_proof_ask(int fd, const ps_run *run, double until, const char *what);

/* The server's progress in the proof of one connection. Initially all bytes are zeros. */
typedef struct ps_proof {
    bool opened;                           /* OPEN has been received and OFFER has been sent */
    uint32_t got;                          /* number of bytes of the present message received so far */
    ps_proof_hello open, offer;
    ps_proof_word word;
} ps_proof;
enum { PS_PROOF_HANG_UP = -1, PS_PROOF_MORE, PS_PROOF_DONE };
/* Reads the bytes that have arrived. If they complete a message, answers the message. Does not wait. After
 * PS_PROOF_HANG_UP, `why` contains the reason if the client used this protocol, and is "" otherwise. */
int ps_proof_answer(ps_proof *p, int fd, const ps_run *run, char why[PS_PROOF_TEXT]);

#ifdef __cplusplus
}
#endif
#endif
