/* SPDX-License-Identifier: BSD-3-Clause
 * Storages whose bytes belong to a lender, such as a mapped file. Each pin asks the lender whether the bytes are
 * unchanged. No budget counts these bytes. */
#include "base/alloc.h"
#include "base/error.h"
#include "mem/mem.h"

typedef struct lent {
    ps_keeper keeper;             /* must be the first field; keeps one storage */
    ps_keeper *before;            /* previous keeper, restored when the loan ends */
    ps_loan loan;
    bool written;                 /* a pin wrote to the bytes, so they may differ from the lender's */
} lent;

static void lent_free(ps_keeper *keeper, ps_storage *s)
{
    lent *l = (lent *)keeper;
    s->keeper = l->before;
    s->block = NULL;
    l->loan.end(l->loan.lender);
    ps_free(l);
}

static int lent_pin(ps_keeper *keeper, ps_storage *s, int device, unsigned access, void **out)
{
    lent *l = (lent *)keeper;
    PS_TRY(l->loan.check(l->loan.lender));
    if (access & PS_WRITE) l->written = true;
    *out = l->loan.bytes;
    s->pins++;
    return 0;
}

static void lent_unpin(ps_keeper *keeper, ps_storage *s, int device) { s->pins--; }

static bool lent_take_loan(ps_storage *s, ps_loan *out)
{
    lent *l = s->block;
    if (l->written || s->pins > 0) return false;
    *out = l->loan;
    s->keeper = l->before;
    s->block = NULL;
    ps_free(l);
    return true;
}

static const ps_keeper_table lent_keeper = { .name = "lent", .free = lent_free, .pin = lent_pin, .unpin = lent_unpin,
                                             .take_loan = lent_take_loan };

int ps_storage_lend(ps_storage *s, const ps_loan *loan)
{
    lent *l = ps_alloc(sizeof *l);
    if (!l) return ps_fail_nomem(sizeof *l);
    ps_storage_free(s);           /* an older loan restores its previous keeper */
    *l = (lent){ { &lent_keeper }, s->keeper, *loan, false };
    s->keeper = &l->keeper;
    s->block = l;
    return 0;
}
