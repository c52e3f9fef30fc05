/* SPDX-License-Identifier: BSD-3-Clause
 * libFuzzer target of the messages to the watch. The input's first byte selects the sender: a stranger, a process that
 * has proved that it belongs to the group, or rank 1, to rank 0; or rank 0 to rank 2. A stranger must change nothing.
 * */
#include "rendezvous/watch.c"

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

enum { STRANGER, PROVED, RANK, RANK_0, MODES };

static void must(int condition)
{
    if (!condition) abort();
}

static ps_watch *watch_of(int rank)
{
    static ps_run run;
    if (!run.secret) must(ps_run_make("fuzz", "a secret", &run) == 0);
    ps_watch *w = ps_alloc0(sizeof *w);
    must(w && (w->peers = ps_alloc0(3 * sizeof *w->peers)) != NULL);
    w->rank = rank;
    w->size = 3;
    w->silence_s = 5;
    w->beat_s = 1;
    w->run = run;
    w->places.known[0] = true;
    w->places.at[0].peer = -1;
    w->listener = w->wake[0] = w->wake[1] = -1;
    must((w->epoll = epoll_create1(EPOLL_CLOEXEC)) >= 0);
    snprintf(w->host, sizeof w->host, "here");
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->news, NULL);
    return w;
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    int fd[2];
    char heard[4096];
    if (!size) return 0;
    int mode = input[0] % MODES;
    ps_watch *w = watch_of(mode == RANK_0 ? 2 : 0);
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd) == 0);
    for (size_t at = 1; at < size;) {
        ssize_t n = send(fd[0], input + at, size - at, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n <= 0) break;
        at += (size_t)n;
    }
    shutdown(fd[0], SHUT_WR);
    watch_peer *p = peer_new(w, fd[1], mode == RANK ? 1 : mode == RANK_0 ? 0 : -1);
    must(p != NULL);
    p->proved = mode == PROVED;
    if (p->rank >= 0) w->peers[p->rank] = p;
    else w->strangers = p, w->n_strangers = 1;
    for (int i = 0; i < 64 && p->fd >= 0; i++) {
        if (!receive(w, p)) lost(w, p);
        while (recv(fd[0], heard, sizeof heard, MSG_DONTWAIT) > 0) { }
        if (w->pending.on) judge(w);
    }
    must(p->fd < 0);
    if (mode == STRANGER) must(!atomic_load(&w->over) && w->n_come == 0 && !w->pending.on && w->n_strangers == 1);
    if (atomic_load(&w->over)) must(w->code < 0 && strlen(w->verdict) < PS_WATCH_TEXT);
    close(fd[0]);
    watch_free(w);
    return 0;
}
