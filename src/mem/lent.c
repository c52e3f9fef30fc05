/* SPDX-License-Identifier: BSD-3-Clause
 * Storages whose bytes belong to lenders, such as a mapped file. Each pin calls the lenders to check that the bytes
 * are unchanged. No budget counts these bytes. */
#include "base/alloc.h"
#include "base/error.h"
#include "mem/mem.h"

typedef struct lent {
    ps_keeper keeper;             /* must be the first field; each of these keepers keeps one storage */
    ps_keeper *before;            /* previous keeper, which is restored when the loans end */
    ps_loans loans;
    bool written;                 /* true if the bytes were pinned for writing, so that they may differ from the
                                   * lender's bytes */
} lent;

/* Returns a storage to its previous keeper. The storage then has no bytes. */
static void give_back(lent *l, ps_storage *s)
{
    s->keeper = l->before;
    s->block = NULL;
}

static void lent_free(ps_keeper *keeper, ps_storage *s)
{
    lent *l = (lent *)keeper;
    give_back(l, s);
    ps_loans_end(&l->loans);
    ps_free(l);
}

/* Copies the blocks of two loans to memory that the previous keeper allocates, and ends the loans. */
static int copy_blocks(lent *l, ps_storage *s)
{
    void *bytes = NULL;
    give_back(l, s);
    int rc = ((ps_mem *)l->before)->table->alloc((ps_mem *)l->before, s);
    if (rc == 0) rc = ps_storage_pin(s, s->device, PS_WRITE, &bytes);
    if (rc < 0) {
        ps_storage_free(s);
        s->keeper = &l->keeper;
        s->block = l;
        return rc;
    }
    int64_t blocks = s->nbytes / (l->loans.width[0] + l->loans.width[1]);
    for (int i = 0; i < 2; i++)
        ps_loans_copy(bytes, &l->loans, i, 0, l->loans.loan[i].bytes, blocks * l->loans.width[i]);
    ps_storage_unpin(s, s->device);
    ps_loans_end(&l->loans);
    ps_free(l);
    return 0;
}

static int lent_pin(ps_keeper *keeper, ps_storage *s, int device, unsigned access, void **out)
{
    lent *l = (lent *)keeper;
    PS_TRY(ps_loans_check(&l->loans));
    if (l->loans.n == 2) {
        PS_TRY(copy_blocks(l, s));
        return ps_storage_pin(s, device, access, out);
    }
    if (access & PS_WRITE) l->written = true;
    *out = l->loans.loan[0].bytes;
    s->pins++;
    return 0;
}

static void lent_unpin(ps_keeper *keeper, ps_storage *s, int device) { s->pins--; }

static bool lent_take_loans(ps_storage *s, ps_loans *out)
{
    lent *l = s->block;
    if (l->written || s->pins > 0) return false;
    *out = l->loans;
    give_back(l, s);
    ps_free(l);
    return true;
}

static const ps_keeper_table lent_keeper = { .name = "lent", .free = lent_free, .pin = lent_pin, .unpin = lent_unpin,
                                             .take_loans = lent_take_loans };

int ps_storage_lend(ps_storage *s, const ps_loans *loans)
{
    lent *l = ps_alloc(sizeof *l);
    if (!l) return ps_fail_nomem(sizeof *l);
    ps_storage_free(s);           /* if the bytes were lent, this ends that loan and restores the keeper from before
                                   * it */
    *l = (lent){ { &lent_keeper }, s->keeper, *loans, false };
    s->keeper = &l->keeper;
    s->block = l;
    return 0;
}
