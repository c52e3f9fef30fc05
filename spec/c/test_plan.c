/* SPDX-License-Identifier: BSD-3-Clause
 * The planner. This file's own executor performs plans in every order of moves and uses that the lists allow, and
 * checks the guarantees of chunk/plan.h. There are also traces with known answers, and Belady's rule against an
 * exhaustive search. */
#include "check.h"
#include "chunk/plan.h"

enum { CHUNKS = 48, USES = 2048 };

static int policy_of(const char *name)
{
    int policy = -1;
    CHECK(ps_policy_find(name, &policy) == 0);
    return policy;
}

static uint64_t state = 0x9E3779B97F4A7C15u;
static unsigned rnd(unsigned n)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (unsigned)(state >> 33) % n;
}

/* A step that is filled by hand or at random. */
static ps_plan_chunk chunks[CHUNKS];
static ps_use uses[USES];
static int64_t extra[PS_TIERS][USES];          /* by moment; used where in.extra says so */
static ps_plan_input in;

static void clear(int n_tiers, int n_chunks, int64_t nbytes, unsigned valid)
{
    in = (ps_plan_input){ .n_tiers = n_tiers, .n_chunks = n_chunks, .chunks = chunks, .uses = uses,
                          .policy = policy_of("belady") };
    for (int i = 0; i < n_chunks; i++) chunks[i] = (ps_plan_chunk){ .nbytes = nbytes, .valid = (uint8_t)valid };
}

/* Appends uses. A letter is a chunk: a lower-case letter reads and an upper-case letter writes, on tier 0. '!' puts
 * the next use on tier 1. A '.' after a letter ends the chunk's contents. A blank begins the next moment. */
static void trace(const char *text)
{
    int tier = 0;
    for (in.n_moments++; *text; text++) {
        if (*text == ' ') in.n_moments++;
        else if (*text == '!') tier = 1;
        else if (*text == '.') uses[in.n_uses - 1].ends = 1;
        else {
            bool write = *text < 'a';
            uses[in.n_uses++] = (ps_use){ .moment = in.n_moments - 1, .chunk = *text - (write ? 'A' : 'a'),
                                          .tier = (int8_t)tier, .write = write };
            tier = 0;
        }
    }
}

/* -- the executor ------------------------------------------------------------------------------------------------- */
typedef struct world {
    uint8_t space[CHUNKS], valid[CHUNKS];      /* bit sets of tiers */
    bool blank[CHUNKS];
    int64_t used[PS_TIERS], peak[PS_TIERS], copied[PS_TIERS][2];
    int done[PS_TIERS - 1], moment, use;       /* number of finished moves; the next moment, and its first use */
} world;

static const char *broken;

static int64_t limit_at(int t, int moment)
{
    return in.capacity[t] + (in.extra[t] && moment >= 0 && moment < in.n_moments ? in.extra[t][moment] : 0);
}

/* Moves between two moments can still use the room of the earlier moment. */
static void take(world *w, int c, int t)
{
    int64_t before = limit_at(t, w->moment - 1), limit = limit_at(t, w->moment);
    if (limit < before) limit = before;
    if (w->space[c] >> t & 1) broken = "a chunk takes space that it has";
    w->space[c] |= (uint8_t)(1 << t);
    w->used[t] += chunks[c].nbytes;
    if (w->used[t] > w->peak[t]) w->peak[t] = w->used[t];
    if (t < in.n_tiers - 1 && w->used[t] > limit) broken = "a tier holds more than it can";
}
static void give(world *w, int c, int t)
{
    if (!(w->space[c] >> t & 1)) broken = "a chunk leaves where it is not";
    w->space[c] &= (uint8_t)~(1 << t);
    w->used[t] -= chunks[c].nbytes;
}

static void do_move(world *w, const ps_move *m)
{
    int c = m->chunk, t = m->tier, below = t + 1;
    unsigned here = 1u << t, lower = 2u << t;
    if (m->kind == PS_MOVE_FETCH) {
        if (!(w->valid[c] & lower)) broken = "a fetch finds no copy below";
        if (w->valid[c] & here) broken = "a fetch of what is there";
        take(w, c, t);
        w->valid[c] |= (uint8_t)here;
        w->copied[t][0] += chunks[c].nbytes;
        return;
    }
    if (m->kind == PS_MOVE_EVICT) {
        if (!(w->valid[c] & here)) broken = "what is written down is not valid";
        if (w->valid[c] & ~(2 * here - 1)) broken = "a copy down that was not needed";
        if (below < in.n_tiers - 1) take(w, c, below);
        w->valid[c] |= (uint8_t)lower;
        w->copied[t][1] += chunks[c].nbytes;
    }
    give(w, c, t);
    if (w->valid[c] == here) broken = "the only valid copy is dropped";
    w->valid[c] &= (uint8_t)~here;
}

static void do_uses(world *w)
{
    bool ended[CHUNKS] = { false };
    for (; w->use < in.n_uses && uses[w->use].moment == w->moment; w->use++) {
        const ps_use *u = &uses[w->use];
        int c = u->chunk;
        unsigned here = 1u << u->tier;
        if (w->blank[c]) {
            if (u->tier < in.n_tiers - 1 && !(w->space[c] >> u->tier & 1)) take(w, c, u->tier);
            w->blank[c] = false;
            w->valid[c] = (uint8_t)here;
        }
        if (!(w->valid[c] & here)) broken = "a use does not find its chunk";
        if (u->write) w->valid[c] = (uint8_t)here;
        ended[c] = ended[c] || u->ends;
    }
    for (int c = 0; c < in.n_chunks; c++) if (ended[c]) w->valid[c] = 0, w->blank[c] = true;
    for (int t = 0; t < in.n_tiers - 1; t++)
        if (w->used[t] > limit_at(t, w->moment) && in.capacity[t] >= 0) broken = "too much for a moment";
    w->moment++;
}

static bool may_move(const world *w, const ps_plan *p, int l)
{
    if (w->done[l] == p->n_moves[l]) return false;
    const ps_move *m = &p->moves[l][w->done[l]];
    int other = in.n_tiers == 3 ? w->done[1 - l] : 0;
    return m->from <= w->moment && m->after <= other;
}

/* Performs the plan. If several actions are possible, eager 0 prefers uses, 2 prefers moves, and 1 chooses at
 * random. Returns NULL, or the guarantee that was violated. */
static const char *carry_out(const ps_plan *p, int eager)
{
    world w = { 0 };
    broken = NULL;
    for (int c = 0; c < in.n_chunks; c++) {
        if (p->valid_before[c] == 0) w.blank[c] = true;
        for (int t = 0; t < in.n_tiers - 1; t++)
            if (p->valid_before[c] >> t & 1) {
                w.space[c] |= (uint8_t)(1 << t);
                w.used[t] += chunks[c].nbytes;
            }
        w.valid[c] = p->valid_before[c];
    }
    memcpy(w.peak, w.used, sizeof w.peak);
    for (int64_t turns = 0; !broken; turns++) {
        bool move[2] = { may_move(&w, p, 0), in.n_tiers == 3 && may_move(&w, p, 1) }, go = w.moment < in.n_moments;
        for (int l = 0; l < in.n_tiers - 1 && go; l++)
            for (int i = w.done[l]; i < p->n_moves[l]; i++) go = go && p->moves[l][i].need > w.moment;
        if (!move[0] && !move[1] && !go) break;
        if (go && (eager == 0 || (!move[0] && !move[1]) || (eager == 1 && rnd(3) == 0))) {
            do_uses(&w);
            continue;
        }
        int l = move[0] && move[1] ? (int)rnd(2) : move[1];
        if (move[l]) do_move(&w, &p->moves[l][w.done[l]++]);
    }
    if (broken) return broken;
    if (w.moment < in.n_moments) return "somebody waits in a circle";
    for (int l = 0; l < in.n_tiers - 1; l++) {
        if (w.done[l] < p->n_moves[l]) return "a move never begins";
        if (w.copied[l][0] != p->fetched[l] || w.copied[l][1] != p->evicted[l]) return "bytes are counted wrongly";
        if (w.peak[l] > p->peak[l]) return "the peak is higher than it says";
        for (int i = 0; i < p->n_moves[l]; i++) {
            const ps_move *m = &p->moves[l][i];
            if (m->from > m->need || m->tier != l) return "a move is needed before it may begin";
            if (i > 0 && (m[-1].from > m->from || m[-1].need > m->need)) return "from or need falls along the list";
        }
    }
    for (int c = 0; c < in.n_chunks; c++) {
        if (w.valid[c] != p->valid_after[c]) return "the end is not as it says";
        if (w.space[c] & ~w.valid[c]) return "a stale copy stays";
    }
    return NULL;
}

static bool verify(const ps_plan *p, int line)
{
    for (int i = 0; i < 6; i++) {
        const char *why = carry_out(p, i < 3 ? i : 1);
        if (!check(!why, line, "the plan can be carried out", why)) return false;
    }
    return true;
}

/* Makes and checks a plan. Returns the bytes moved on both levels, or a negative code. */
static int64_t moved(int policy, bool steady, int line)
{
    ps_plan p;
    int32_t bad;
    in.policy = policy;
    int rc = steady ? ps_plan_steady(&in, &p, &bad) : ps_plan_make(&in, &p, &bad);
    if (!check(rc == 0, line, "a plan is made", ps_error_message())) return rc;
    int64_t sum = p.fetched[0] + p.fetched[1] + p.evicted[0] + p.evicted[1];
    if (!verify(&p, line)) sum = -1;
    ps_plan_clear(&p);
    return sum;
}
#define MOVED(policy) moved((policy), false, __LINE__)
#define STEADY(policy) moved((policy), true, __LINE__)

/* -- known answers ------------------------------------------------------------------------------------------------ */
static bool move_is(const ps_plan *p, int l, int i, int kind, char chunk, int from, int need)
{
    if (i >= p->n_moves[l]) return false;
    const ps_move *m = &p->moves[l][i];
    if (m->kind == kind && m->chunk == chunk - 'a' && m->from == from && m->need == need) return true;
    printf("move %d of level %d: kind %d chunk %c from %d need %d\n", i, l, m->kind, 'a' + m->chunk, m->from, m->need);
    return false;
}

static void make(ps_plan *p)
{
    int32_t bad;
    if (OK(ps_plan_make(&in, p, &bad))) verify(p, __LINE__);
}

static void test_known(void)
{
    ps_plan p;
    clear(2, 3, 10, 2);                          /* Belady: c replaces b, whose next use is later */
    trace("a b c a b");
    in.capacity[0] = 20;
    make(&p);
    CHECK(p.n_moves[0] == 6 && p.fetched[0] == 40 && p.evicted[0] == 0 && p.peak[0] == 20 && p.peak[1] == 30);
    CHECK(move_is(&p, 0, 2, PS_MOVE_DROP, 'b', 2, 2) && move_is(&p, 0, 3, PS_MOVE_FETCH, 'c', 2, 2));
    CHECK(p.valid_after[0] + p.valid_after[1] + p.valid_after[2] == 2 + 3 + 3);
    ps_plan_clear(&p);
    in.policy = policy_of("lru");                   /* every use is a miss */
    make(&p);
    CHECK(p.fetched[0] == 50);
    ps_plan_clear(&p);

    clear(2, 3, 10, 2);                          /* dirty chunks are written to the lower tier once */
    trace("A b c a A b");
    in.capacity[0] = 20;
    in.cyclic = 1;
    make(&p);
    CHECK(p.evicted[0] == 0 && p.fetched[0] == 40);
    ps_plan_clear(&p);
    in.capacity[0] = 10;
    make(&p);
    CHECK(p.evicted[0] == 20 && p.fetched[0] == 50);
    CHECK(move_is(&p, 0, 1, PS_MOVE_EVICT, 'a', 1, 1) && move_is(&p, 0, 2, PS_MOVE_FETCH, 'b', 1, 1));
    ps_plan_clear(&p);

    clear(2, 2, 10, 0);                          /* a chunk without contents is not fetched, but is written */
    trace("a b a");
    in.capacity[0] = 10;
    make(&p);
    CHECK(p.fetched[0] == 10 && p.evicted[0] == 20 && p.valid_after[0] == 3 && p.valid_after[1] == 2);
    ps_plan_clear(&p);

    clear(2, 2, 10, 2);                          /* a use on the lower tier: the chunk is written down for it, and is
                                                  * stale after its write */
    trace("A b !a !A a !B !b");
    in.capacity[0] = 20;
    make(&p);
    CHECK(p.evicted[0] == 10 && p.fetched[0] == 30 && p.valid_after[1] == 2);
    CHECK(move_is(&p, 0, 2, PS_MOVE_EVICT, 'a', 1, 2) && move_is(&p, 0, 4, PS_MOVE_DROP, 'b', 4, 5));
    ps_plan_clear(&p);

    clear(2, 3, 10, 2);                          /* contents that end are neither written down nor fetched again */
    trace("A b A. b c");
    in.capacity[0] = 20;
    in.cyclic = 1;
    CHECK(STEADY(policy_of("belady")) == 10);
    in.capacity[0] = 10;
    make(&p);
    CHECK(p.evicted[0] == 10 && p.fetched[0] == 50 && p.valid_after[0] == 0);
    ps_plan_clear(&p);
    CHECK(STEADY(policy_of("belady")) == 50);

    clear(2, 4, 10, 3);                          /* a smaller tier that is not used */
    in.capacity[0] = 20;
    make(&p);
    CHECK(p.n_moves[0] == 2 && p.moves[0][0].kind == PS_MOVE_DROP);
    ps_plan_clear(&p);
}

static void test_ahead(void)
{
    ps_plan p;
    clear(2, 4, 10, 2);                          /* each fetch begins when the previous chunk is used */
    trace("a b c d");
    in.capacity[0] = 40;
    in.ahead[0] = 20;
    make(&p);
    CHECK(move_is(&p, 0, 1, PS_MOVE_FETCH, 'b', 0, 1) && move_is(&p, 0, 2, PS_MOVE_FETCH, 'c', 1, 2) &&
          move_is(&p, 0, 3, PS_MOVE_FETCH, 'd', 2, 3));
    ps_plan_clear(&p);
    in.capacity[0] = 20;                         /* not before its victim's last use */
    make(&p);
    CHECK(move_is(&p, 0, 2, PS_MOVE_DROP, 'a', 1, 2) && move_is(&p, 0, 3, PS_MOVE_FETCH, 'c', 1, 2));
    ps_plan_clear(&p);
    in.capacity[0] = 10;                         /* and never by evicting a chunk in use */
    make(&p);
    CHECK(move_is(&p, 0, 6, PS_MOVE_FETCH, 'd', 3, 3));
    ps_plan_clear(&p);
    in.capacity[0] = 20;                         /* across the end of the step */
    in.cyclic = 1;
    make(&p);
    int last = p.n_moves[0] - 1;
    CHECK(p.moves[0][last].kind == PS_MOVE_FETCH && p.moves[0][last].need >= 4);
    ps_plan_clear(&p);
    int32_t bad;
    OK(ps_plan_steady(&in, &p, &bad));
    CHECK(!memcmp(p.valid_before, p.valid_after, 4));
    ps_plan_clear(&p);
}

/* Large chunks are fetched early, too: those of one moment together, after the use of the large ones before them. */
static void test_large(void)
{
    ps_plan p;
    clear(2, 5, 10, 2);
    chunks[2].nbytes = chunks[4].nbytes = 30;
    trace("a b c d e");
    in.capacity[0] = 200;
    in.ahead[0] = 20;
    make(&p);
    CHECK(move_is(&p, 0, 1, PS_MOVE_FETCH, 'b', 0, 1) && move_is(&p, 0, 2, PS_MOVE_FETCH, 'c', 0, 2) &&
          move_is(&p, 0, 3, PS_MOVE_FETCH, 'd', 1, 3) && move_is(&p, 0, 4, PS_MOVE_FETCH, 'e', 3, 4));
    ps_plan_clear(&p);

    clear(2, 5, 10, 2);
    for (int i = 2; i < 5; i++) chunks[i].nbytes = 30;
    trace("c a b de");
    in.capacity[0] = 200;
    in.ahead[0] = 20;
    make(&p);
    CHECK(move_is(&p, 0, 1, PS_MOVE_FETCH, 'a', 0, 1) && move_is(&p, 0, 2, PS_MOVE_FETCH, 'b', 0, 2) &&
          move_is(&p, 0, 3, PS_MOVE_FETCH, 'd', 1, 3) && move_is(&p, 0, 4, PS_MOVE_FETCH, 'e', 1, 3));
    ps_plan_clear(&p);

    clear(2, 9, 10, 2);                          /* larger than four chunks of mean size, but not than the depth */
    chunks[7].nbytes = chunks[8].nbytes = 500;
    trace("a b c d hi e f hi");
    in.capacity[0] = 1100;
    in.ahead[0] = 500;
    make(&p);
    CHECK(move_is(&p, 0, 4, PS_MOVE_FETCH, 'h', 0, 4) && move_is(&p, 0, 5, PS_MOVE_FETCH, 'i', 0, 4));
    ps_plan_clear(&p);
}

static void test_three_tiers(void)
{
    ps_plan p;
    clear(3, 3, 10, 4);                          /* through the host, one chunk at a time */
    trace("a b c");
    in.capacity[0] = 30;
    in.capacity[1] = 10;
    make(&p);
    CHECK(p.fetched[0] == 30 && p.fetched[1] == 30 && p.evicted[0] == 0 && p.evicted[1] == 0 && p.peak[1] == 10);
    CHECK(p.valid_after[0] == 5 && p.valid_after[2] == 7 && p.moves[0][2].after == 5);
    ps_plan_clear(&p);

    clear(3, 2, 10, 4);                          /* moved down twice, to the host and then to the disk */
    trace("A B a");
    in.capacity[0] = in.capacity[1] = 10;
    make(&p);
    CHECK(p.evicted[0] == 20 && p.evicted[1] >= 10 && p.peak[0] == 10 && p.peak[1] == 10);
    ps_plan_clear(&p);

    clear(3, 2, 10, 2);                          /* the host's copy is dropped first, and returns when the device
                                                  * drops its copy */
    trace("a !b a b");
    chunks[1].valid = 4;
    in.capacity[0] = in.capacity[1] = 10;
    make(&p);
    CHECK(p.evicted[1] == 0 || p.fetched[1] >= 10);
    ps_plan_clear(&p);

    clear(3, 4, 10, 4);                          /* Adam on the host, whose chunks are not copied to the device */
    trace("a b b a !A!c !B!d");
    in.capacity[0] = 20;
    in.capacity[1] = 40;
    in.cyclic = 1;
    CHECK(STEADY(policy_of("belady")) == 20);
    CHECK(STEADY(policy_of("plan")) == 20);

    clear(3, 3, 10, 4);                          /* contents that end on the device are dropped on the host and the
                                                  * disk, too */
    trace("A b a. b c b c");
    in.capacity[0] = in.capacity[1] = 20;
    in.cyclic = 1;
    CHECK(STEADY(policy_of("belady")) == 10);
    clear(3, 2, 10, 4);                          /* contents that end on the host; the next contents begin on the
                                                  * device */
    trace("A b !a. b");
    in.capacity[0] = in.capacity[1] = 20;
    in.cyclic = 1;
    CHECK(STEADY(policy_of("belady")) == 10);
}

/* Chunks that are on a tier already use room there, too. */
static void test_less_than_no_room(void)
{
    ps_plan p;
    int32_t bad;
    clear(2, 2, 10, 1);
    trace("a b");
    in.capacity[0] = -1;
    FAILS(ps_plan_make(&in, &p, &bad), PS_ENOMEM, "on tier 0, which has -1");
    CHECK(bad == 0);
    FAILS(ps_plan_steady(&in, &p, &bad), PS_ENOMEM, "on tier 0, which has -1");
    clear(3, 2, 10, 2);
    trace("!a !b");
    in.capacity[0] = 20;
    in.capacity[1] = -1;
    FAILS(ps_plan_make(&in, &p, &bad), PS_ENOMEM, "on tier 1, which has -1");
    CHECK(bad == 0);
}

/* An op that needs more than the capacity gets the free bytes at its moment, and only then. Afterwards the bytes are
 * free again. */
static void test_extra(void)
{
    ps_plan p;
    int32_t bad;
    clear(2, 4, 10, 2);
    trace("a b abc abc d a");
    in.capacity[0] = 20;
    FAILS(ps_plan_make(&in, &p, &bad), PS_ENOMEM, "moment 2 of the step needs 30 bytes");
    memset(extra[0], 0, sizeof extra[0]);
    in.extra[0] = extra[0];
    extra[0][2] = 9, extra[0][3] = 10;
    FAILS(ps_plan_make(&in, &p, &bad), PS_ENOMEM, "on tier 0, which has 29");
    CHECK(bad == 4);
    extra[0][2] = 10;
    in.ahead[0] = 20;
    for (int policy = 0; ps_policy_name(policy); policy++) {
        in.policy = policy;
        if (!OK(ps_plan_make(&in, &p, &bad))) continue;
        CHECK(verify(&p, __LINE__) && p.peak[0] == 30 && p.fetched[0] >= 40 && p.fetched[0] <= 50);
        for (int i = 0; i < p.n_moves[0]; i++)
            if (p.moves[0][i].kind == PS_MOVE_FETCH && p.moves[0][i].chunk == 2)
                CHECK(p.moves[0][i].from == 2 && p.moves[0][i].need == 2);      /* not earlier, since there is no
                                                                                 * room */
        ps_plan_clear(&p);
    }
    clear(2, 3, 10, 2);
    trace("ab cab");                                      /* c gets the extra room instead of a's room, which is
                                                           * needed, too */
    in.capacity[0] = 20;
    in.extra[0] = extra[0];
    extra[0][1] = 10;
    if (OK(ps_plan_make(&in, &p, &bad))) CHECK(p.fetched[0] == 30);
    ps_plan_clear(&p);
    memset(extra[0], 0, sizeof extra[0]);                 /* chunks without uses change nothing */
    clear(2, 4, 10, 2);
    trace("a b ab c d a");
    in.capacity[0] = 20;
    in.ahead[0] = 20;
    int64_t without = MOVED(policy_of("plan"));
    in.extra[0] = extra[0];
    for (int m = 0; m < in.n_moments; m++) extra[0][m] = 15;
    CHECK(MOVED(policy_of("plan")) == without);
}

static void test_refused(void)
{
    ps_plan p;
    int32_t bad = 7;
    clear(2, 3, 10, 2);
    trace("a bc abc");
    in.capacity[0] = 20;
    FAILS(ps_plan_make(&in, &p, &bad), PS_ENOMEM,
          "moment 2 of the step needs 30 bytes of chunks at once on tier 0, which has 20");
    CHECK(bad == 5);
    clear(3, 2, 10, 4);
    trace("a b");
    in.capacity[0] = 20;
    in.capacity[1] = 9;
    FAILS(ps_plan_steady(&in, &p, &bad), PS_ENOMEM, "on tier 1");
    CHECK(bad == 0);
    in.n_tiers = 4;
    FAILS(ps_plan_make(&in, &p, &bad), PS_EINVAL, "4 tiers");
    CHECK(bad == -1);
    in.n_tiers = 2;
    in.policy = 99;
    FAILS(ps_plan_make(&in, &p, &bad), PS_EINVAL, "policy");
    in.policy = policy_of("belady");
    FAILS(ps_plan_make(&in, &p, &bad), PS_EINVAL, "2 tiers");
    chunks[0].valid = chunks[1].valid = 2;
    uses[1].chunk = 2;
    FAILS(ps_plan_make(&in, &p, &bad), PS_EINVAL, "use 1 is of chunk 2 of 2");
    uses[1] = (ps_use){ .moment = 2, .chunk = 1 };
    FAILS(ps_plan_make(&in, &p, &bad), PS_EINVAL, "there are 2 moments");
    uses[1].moment = 1;
    in.n_tiers = 1;
    chunks[0].valid = 0;
    chunks[1].valid = 1;
    OK(ps_plan_make(&in, &p, &bad));
    CHECK(p.valid_after[0] == 1 && p.peak[0] == 20 && p.n_moves[0] == 0);
    ps_plan_clear(&p);
    int policy;
    for (int i = 0; ps_policy_name(i); i++) CHECK(ps_policy_find(ps_policy_name(i), &policy) == 0 && policy == i);
    FAILS(ps_policy_find("optimal", &policy), PS_EINVAL, "'optimal'; the policies are plan, belady, lru, fifo");
    CHECK(!ps_policy_name(-1) && !ps_policy_name(99));
}

/* -- random traces ------------------------------------------------------------------------------------------------ */
static void random_input(void)
{
    static int64_t sums[USES][PS_TIERS];                  /* bytes that each moment's op uses */
    int n_tiers = 2 + (int)rnd(2), n = 2 + (int)rnd(rnd(4) ? 10 : CHUNKS - 2);
    clear(n_tiers, n, 0, 0);
    int64_t total = 0;
    for (int c = 0; c < n; c++) {
        chunks[c].nbytes = rnd(8) ? 1 + (int)rnd(20) : 10 * (int)rnd(10);
        chunks[c].valid = (uint8_t)(rnd(3) ? 1u << (n_tiers - 1) : rnd(1u << n_tiers));
        total += chunks[c].nbytes;
    }
    in.n_moments = (int)rnd(rnd(3) ? 40 : 400);
    int wide = 1 + (int)rnd(4), host = rnd(2) ? (int)rnd(50) : 0, write = (int)rnd(80),
        ends = rnd(2) ? (int)rnd(30) : 0;
    int64_t widest[PS_TIERS] = { 0 }, largest = 0;
    for (int c = 0; c < n; c++) if (chunks[c].nbytes > largest) largest = chunks[c].nbytes;
    for (int m = 0; m < in.n_moments; m++) {
        int64_t *sum = sums[m];
        memset(sum, 0, sizeof sums[m]);
        bool seen[CHUNKS] = { 0 };
        for (int k = (int)rnd((unsigned)wide + 1); k > 0; k--) {
            int c = rnd(3) ? (m + k) % n : (int)rnd((unsigned)n), t = (int)rnd(100) < host;
            if (seen[c]) continue;
            seen[c] = true;
            sum[t] += chunks[c].nbytes;
            uses[in.n_uses++] = (ps_use){ .moment = m, .chunk = c, .tier = (int8_t)t, .write = (int)rnd(100) < write,
                                          .ends = (int)rnd(100) < ends };
        }
        for (int t = 0; t < 2; t++) if (sum[t] > widest[t]) widest[t] = sum[t];
    }
    if (widest[1] < largest) widest[1] = largest;
    for (int t = 0; t < 2; t++) {
        int64_t most = total > widest[t] ? total - widest[t] : 0;
        in.capacity[t] = widest[t] + (rnd(4) ? (int64_t)rnd((unsigned)most / (1 + rnd(4)) + 1) : 0);
        unsigned part = 1 + rnd(8);
        in.ahead[t] = rnd(2) ? 0 : (int64_t)(rnd((unsigned)total + 1) / part);
        if (rnd(3)) continue;
        int64_t less = t == 0 ? (int64_t)rnd((unsigned)widest[0] + 1) : largest;
        if (less < in.capacity[t]) in.capacity[t] = less;
        for (int m = 0; m < in.n_moments; m++)
            extra[t][m] = sums[m][t] > in.capacity[t] ? sums[m][t] - in.capacity[t] : 0;
        in.extra[t] = extra[t];
    }
    in.cyclic = (int)rnd(2);
}

static void test_random(void)
{
    int before = failed;
    for (int i = 0; i < 1200 && failed == before; i++) {
        random_input();
        int64_t bytes[64];
        for (int policy = 0; ps_policy_name(policy); policy++) {
            MOVED(policy);
            bytes[policy] = in.cyclic ? STEADY(policy) : MOVED(policy);
        }
        if (!in.cyclic) CHECK(bytes[policy_of("plan")] <= bytes[policy_of("belady")]);
        if (failed == before) continue;
        printf("random trace %d: %d tiers, %d chunks, %d uses\n", i, in.n_tiers, in.n_chunks, in.n_uses);
    }
}

/* If everything fits, no policy makes a difference, and nothing moves twice. */
static void test_all_fits(void)
{
    for (int i = 0; i < 200; i++) {
        random_input();
        in.cyclic = 1;
        bool host = false;
        for (int u = 0; u < in.n_uses; u++) host = host || uses[u].tier == 1;
        for (int t = 0; t < 2; t++) {
            in.capacity[t] = 0;
            for (int c = 0; c < in.n_chunks; c++) in.capacity[t] += chunks[c].nbytes;
        }
        if (host) continue;
        for (int policy = 0; ps_policy_name(policy); policy++) CHECK(STEADY(policy) == 0);
    }
}

/* -- Belady against everything ------------------------------------------------------------------------------------ */
static int search(int i, unsigned here, int room)
{
    for (; i < in.n_uses && here >> uses[i].chunk & 1; i++);
    if (i == in.n_uses) return 0;
    unsigned with = here | 1u << uses[i].chunk;
    if (__builtin_popcount(here) < room) return 1 + search(i + 1, with, room);
    int least = INT32_MAX;
    for (int c = 0; c < in.n_chunks; c++)
        if (here >> c & 1) {
            int cost = 1 + search(i + 1, with & ~(1u << c), room);
            if (cost < least) least = cost;
        }
    return least;
}

static void test_optimal(void)
{
    for (int i = 0; i < 400; i++) {
        clear(2, 3 + (int)rnd(3), 1, 2);
        int room = 1 + (int)rnd(3), length = 4 + (int)rnd(10);
        for (int m = 0; m < length; m++)
            uses[in.n_uses++] = (ps_use){ .moment = in.n_moments++, .chunk = (int)rnd((unsigned)in.n_chunks) };
        in.capacity[0] = room;
        CHECK(MOVED(policy_of("belady")) == search(0, 0, room));
        CHECK(MOVED(policy_of("plan")) == search(0, 0, room));
    }
}

/* -- faults ------------------------------------------------------------------------------------------------------- */
static void test_failing(void)
{
    state = 12345;
    do random_input(); while (in.n_tiers != 3 || in.n_uses < 400 || !in.cyclic);
    in.policy = policy_of("plan");
    for (int nth = 0;; nth++) {
        ps_plan p;
        int32_t bad;
        ps_test_fail_alloc(nth, 1);
        int rc = ps_plan_steady(&in, &p, &bad);
        bool hit = ps_test_fail_alloc_left() < 0;
        ps_test_fail_alloc(-1, 0);
        CHECK(hit ? rc == PS_ENOMEM && bad == -1 : rc == 0);
        if (rc == 0) ps_plan_clear(&p);
        if (!hit) {
            CHECK(nth > 10);
            return;
        }
    }
}

int main(void)
{
    test_known();
    test_ahead();
    test_large();
    test_three_tiers();
    test_refused();
    test_extra();
    test_less_than_no_room();
    test_random();
    test_all_fits();
    test_optimal();
    test_failing();
    return end_checks();
}
