/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the handshake of proof.h. Only this file uses libsodium. */
#define _GNU_SOURCE
#include "rendezvous/proof.h"
#include "base/error.h"
#include "base/text.h"
#include "rendezvous/net.h"
#include <sodium.h>
#include <stdio.h>
#include <string.h>

_Static_assert(sizeof(ps_proof_hello) == 168 && sizeof(ps_proof_word) == 40, "what goes over the wire has no holes");

/* -- runs ---------------------------------------------------------------------------------------------------------- */

int ps_run_make(const char *name, const char *secret, ps_run *out)
{
    size_t n = name ? strlen(name) : 0;
    *out = (ps_run){ .secret = secret && *secret };
    if (sodium_init() < 0) return ps_fail(PS_EIO, "libsodium finds no source of random numbers");
    if (n > PS_RUN_NAME)
        return ps_fail(PS_EINVAL, "the run's name (PS_RUN_ID) has %zu bytes; it may have %d", n, PS_RUN_NAME);
    if (n) memcpy(out->name, name, n);
    if (out->secret) crypto_generichash(out->key, sizeof out->key, (const void *)secret, strlen(secret), NULL, 0);
    return 0;
}

void ps_run_derive(const ps_run *run, const char *salt, ps_run *out)
{
    ps_run made = *run;
    crypto_generichash(made.key, sizeof made.key, (const void *)salt, strlen(salt), run->key, sizeof run->key);
    *out = made;
}

void ps_run_token(char hex[2 * PS_PROOF_BYTES + 1])
{
    uint8_t bytes[PS_PROOF_BYTES];
    randombytes_buf(bytes, sizeof bytes);
    sodium_bin2hex(hex, 2 * PS_PROOF_BYTES + 1, bytes, sizeof bytes);
}

bool ps_proof_same(const uint8_t a[PS_PROOF_BYTES], const uint8_t b[PS_PROOF_BYTES])
{
    return sodium_memcmp(a, b, PS_PROOF_BYTES) == 0;
}

const char *ps_run_shown(const char *name, char out[PS_RUN_NAME + 32])
{
    char text[PS_RUN_NAME + 16];
    if (!*name) return strcpy(out, "a run without a name");
    snprintf(out, PS_RUN_NAME + 32, "run '%s'", ps_text_shown(name, text, sizeof text));
    return out;
}

/* -- messages ------------------------------------------------------------------------------------------------------ */

static void say_hello(ps_proof_hello *h, const ps_run *run)
{
    *h = (ps_proof_hello){ .magic = PS_PROOF_MAGIC, .secret = run->secret };
    memcpy(h->run, run->name, sizeof h->run);
    randombytes_buf(h->random, sizeof h->random);
}

/* Computes the hash by which one side proves that it knows the key. The hash includes the role of this side. Therefore
 * a peer cannot prove anything if it only sends back the hash that it has received. */
static void prove(const ps_run *run, const char role[8], const ps_proof_hello *open, const ps_proof_hello *offer,
                  uint8_t out[PS_PROOF_BYTES])
{
    crypto_generichash_state state;
    crypto_generichash_init(&state, run->key, sizeof run->key, PS_PROOF_BYTES);
    crypto_generichash_update(&state, (const void *)role, 8);
    crypto_generichash_update(&state, (const void *)open, sizeof *open);
    crypto_generichash_update(&state, (const void *)offer, sizeof *offer);
    crypto_generichash_final(&state, out, PS_PROOF_BYTES);
}

static const char OF_RANK[8] = "rank", OF_SERVER[8] = "server";

static bool proves(const ps_run *run, const char role[8], const ps_proof_hello *open, const ps_proof_hello *offer,
                   const uint8_t said[PS_PROOF_BYTES])
{
    uint8_t right[PS_PROOF_BYTES];
    prove(run, role, open, offer, right);
    return ps_proof_same(right, said);
}

static bool same_run(const ps_run *run, const ps_proof_hello *h) { return !memcmp(h->run, run->name, sizeof h->run); }

/* Returns the name of the peer's run in a form that is safe to print. The name could contain any bytes, because the
 * peer has not proved anything yet. */
static const char *theirs(const ps_proof_hello *h, char out[PS_RUN_NAME + 32])
{
    char name[PS_RUN_NAME + 1];
    snprintf(name, sizeof name, "%.*s", PS_RUN_NAME, h->run);
    return ps_run_shown(name, out);
}

/* Describes for an error how the secret of the other end differs from the secret of this end. */
static const char *unlike(bool mine, bool other)
{
    if (mine == other) return "has another secret";
    return mine ? "has no secret" : "has a secret, which is lacking here";
}

/* -- a rank -------------------------------------------------------------------------------------------------------- */

static int transfer(int fd, void *bytes, size_t nbytes, bool out, double until, const char *what)
{
    int done = ps_net_transfer(fd, bytes, nbytes, out, until);
    if (done < 0)
        return ps_fail(PS_EIO, "%s: the server of rank 0 closed the connection; rank 0 ended, or another program "
                       "answers there", what);
    if (done == 0) return ps_fail(PS_ETIME, "%s: the server of rank 0 does not answer; is rank 0 stopped?", what);
    return 0;
}

static int foreign(const char *what)
{
    return ps_fail(PS_EFORMAT, "%s: what answers is not the store of rank 0; is the port another program's?", what);
}

int ps_proof_ask(int fd, const ps_run *run, double until, const char *what)
{
    ps_proof_hello open, offer;
    ps_proof_word word = { .magic = PS_PROOF_MAGIC };
    char mine[PS_RUN_NAME + 32], other[PS_RUN_NAME + 32];
    say_hello(&open, run);
    PS_TRY(transfer(fd, &open, sizeof open, true, until, what));
    PS_TRY(transfer(fd, &offer.magic, sizeof offer.magic, false, until, what));
    /* The magic number is checked first, because the message of another protocol may be shorter than an OFFER. */
    if (offer.magic != PS_PROOF_MAGIC) return foreign(what);
    PS_TRY(transfer(fd, &offer.secret, sizeof offer - sizeof offer.magic, false, until, what));
    if (!same_run(run, &offer))
        return ps_fail(PS_ESTATE, "%s: %s answers there, but this rank belongs to %s; two runs use one address, or the "
                       "ranks of one run have different names (PS_RUN_ID): give each run its own port (MASTER_PORT, "
                       "--master-port)", what, theirs(&offer, other), ps_run_shown(run->name, mine));
    prove(run, OF_RANK, &open, &offer, word.hash);
    PS_TRY(transfer(fd, &word, sizeof word, true, until, what));
    PS_TRY(transfer(fd, &word, sizeof word, false, until, what));
    if (word.magic != PS_PROOF_MAGIC) return foreign(what);
    if (!word.refused && proves(run, OF_SERVER, &open, &offer, word.hash)) return 0;
    return ps_fail(PS_ESTATE, "%s: the program that answers for %s %s; give all ranks the same PS_SECRET", what,
                   ps_run_shown(run->name, mine), unlike(run->secret, offer.secret));
}

/* -- the server ---------------------------------------------------------------------------------------------------- */

/* Sends all bytes without waiting. The socket buffer of a new connection has room for them. Returns false if it fails
 * to send all bytes. */
static bool send_all(int fd, void *bytes, size_t nbytes)
{
    return ps_net_some(fd, bytes, nbytes, true) == (int64_t)nbytes;
}

/* Receives more bytes of a message without waiting. Returns PS_PROOF_DONE when the message is complete. */
static int receive(ps_proof *p, int fd, void *message, uint32_t nbytes)
{
    while (p->got < nbytes) {
        int64_t n = ps_net_some(fd, (char *)message + p->got, nbytes - p->got, false);
        if (n == 0) return PS_PROOF_MORE;
        if (n < 0) return PS_PROOF_HANG_UP;
        p->got += (uint32_t)n;
        uint32_t magic;
        memcpy(&magic, message, sizeof magic);
        if (p->got >= sizeof magic && magic != PS_PROOF_MAGIC) return PS_PROOF_HANG_UP;
    }
    p->got = 0;
    return PS_PROOF_DONE;
}

int ps_proof_answer(ps_proof *p, int fd, const ps_run *run, char why[PS_PROOF_TEXT])
{
    char other[PS_RUN_NAME + 32];
    why[0] = 0;
    if (!p->opened) {
        int done = receive(p, fd, &p->open, sizeof p->open);
        if (done != PS_PROOF_DONE) return done;
        say_hello(&p->offer, run);
        p->opened = true;
        if (!send_all(fd, &p->offer, sizeof p->offer)) return PS_PROOF_HANG_UP;
        if (!same_run(run, &p->open)) {
            snprintf(why, PS_PROOF_TEXT, "is of %s", theirs(&p->open, other));
            return PS_PROOF_HANG_UP;
        }
    }
    int done = receive(p, fd, &p->word, sizeof p->word);
    if (done != PS_PROOF_DONE) return done;
    bool right = proves(run, OF_RANK, &p->open, &p->offer, p->word.hash);
    ps_proof_word word = { .magic = PS_PROOF_MAGIC, .refused = !right };
    if (right) prove(run, OF_SERVER, &p->open, &p->offer, word.hash);
    else snprintf(why, PS_PROOF_TEXT, "%s", unlike(run->secret, p->open.secret));
    return send_all(fd, &word, sizeof word) && right ? PS_PROOF_DONE : PS_PROOF_HANG_UP;
}
