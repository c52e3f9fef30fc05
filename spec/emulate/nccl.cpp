/* SPDX-License-Identifier: BSD-3-Clause
 * A stand-in for libnccl.so.2 between processes of one machine whose devices are emulated: sockets between all ranks,
 * and a thread of each communicator that connects them and performs groups of sends and receives when their turn in
 * their stream has come. The calls return at once with ncclInProgress, like the real library if it must not block; a
 * group is in its stream after the state has been queried twice. A failed group stays in its stream until the
 * communicator is ended. Different threads may use different communicators, which do not wait for each other; a
 * communicator ends its exchanges in the order of their calls, each when all its ranks have reached it. It is strict
 * where the real library is undefined: a call while another is in progress, or an exchange outside a group, is an
 * error.
 *
 * PS_EMULATE_NCCL: "old" is version 2.13, "refuses" fails to connect on rank 1, "breaks=N" and "stalls=N" make rank
 * 1's exchange N fail or stall. */
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "nccl.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

struct message { char *bytes; size_t n; int peer; };

struct reduction { bool on; const float *in; float *out; size_t n; };

struct group {
    std::vector<message> out, in;
    reduction reduce = { false, nullptr, nullptr, 0 };
    struct { char *to; const char *from; size_t n; } own = { nullptr, nullptr, 0 };   /* a message from this rank to
                                                                                       * itself */
    cudaStream_t stream = nullptr;
    std::atomic<bool> over{ false };
};

}

/* Remains after it was ended, since streams can still have its work. */
struct ncclComm {
    int rank, size, exchanges = 0;
    std::string name;                          /* name of the sockets, without the rank */
    std::vector<int> peers;                    /* sockets, indexed by rank */
    std::atomic<bool> connected{ false }, closing{ false };
    std::atomic<int> failure{ ncclSuccess };
    std::thread thread;
    std::mutex lock;
    std::condition_variable work;
    std::deque<group *> due;                   /* groups that are due */
    group *next = nullptr, *last = nullptr;    /* next: a group that is open or not in its stream yet */
    bool ended = false, finalizing = false;    /* ended: whether the group `next` was ended */
    int asked = 0;
};

namespace {

/* A group's work in its stream. */
struct turn : ps_emu_work {
    ncclComm *c;
    group *g;
    bool begun = false;
    turn(ncclComm *comm, group *what) : c(comm), g(what) {}
    bool go(void) override
    {
        if (c->closing || g->over) return true;
        if (begun) return false;
        begun = true;
        std::lock_guard<std::mutex> guard(c->lock);
        c->due.push_back(g);
        c->work.notify_all();
        return false;
    }
};

thread_local ncclComm *in_group;               /* the communicator to which the thread's open group belongs */
thread_local bool group_open;
std::mutex error_lock;
std::string last_error;

void set_error(const char *text)
{
    std::lock_guard<std::mutex> guard(error_lock);
    last_error = text;
}

const char *setting() { const char *s = getenv("PS_EMULATE_NCCL"); return s ? s : ""; }

sockaddr_un address(const std::string &name, int rank, socklen_t *size)
{
    sockaddr_un a = {};
    a.sun_family = AF_UNIX;
    std::string path = name + "." + std::to_string(rank);
    memcpy(a.sun_path + 1, path.data(), path.size());      /* an abstract address, so that no file remains in a
                                                            * folder */
    *size = (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + path.size());
    return a;
}

/* Moves n bytes over a socket. Fails if the peer has disconnected or this end is closing. */
bool whole(ncclComm *c, int fd, char *bytes, size_t n, bool sending)
{
    while (n > 0) {
        pollfd p = { fd, (short)(sending ? POLLOUT : POLLIN), 0 };
        if (c->closing) return false;
        if (poll(&p, 1, 20) <= 0) continue;
        ssize_t moved = sending ? send(fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, bytes, n, MSG_DONTWAIT);
        if (moved < 0 && errno == EAGAIN) continue;
        if (moved <= 0) return false;
        bytes += moved;
        n -= (size_t)moved;
    }
    return true;
}

/* Listens for the ranks after r and connects to the ranks before r. */
bool connect_all(ncclComm *c)
{
    socklen_t size;
    sockaddr_un own = address(c->name, c->rank, &size);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool good = bind(listener, (sockaddr *)&own, size) == 0 && listen(listener, c->size) == 0;
    for (int r = 0; good && r < c->rank; r++) {
        sockaddr_un theirs = address(c->name, r, &size);
        int fd = -1, rank = c->rank;
        for (;;) {
            fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
            if (connect(fd, (sockaddr *)&theirs, size) == 0) break;
            close(fd);
            if (c->closing) { close(listener); return false; }
            usleep(2000);
        }
        c->peers[(size_t)r] = fd;
        good = whole(c, fd, (char *)&rank, sizeof rank, true);
    }
    for (int n = c->rank + 1; good && n < c->size;) {
        pollfd p = { listener, POLLIN, 0 };
        if (c->closing) { close(listener); return false; }
        if (poll(&p, 1, 20) <= 0) continue;
        int fd = accept(listener, nullptr, nullptr), rank = -1;
        good = whole(c, fd, (char *)&rank, sizeof rank, false) && rank > c->rank && rank < c->size;
        if (good) c->peers[(size_t)rank] = fd, n++;
    }
    close(listener);
    return good;
}

/* Waits until all ranks with which bytes are exchanged have reached this exchange. No message is sent earlier, not
 * even a small one. */
bool meet(ncclComm *c, const std::vector<message> &out, const std::vector<message> &in)
{
    std::vector<bool> with((size_t)c->size);
    bool good = true;
    char here = 0;
    for (const message &m : out) with[(size_t)m.peer] = true;
    for (const message &m : in) with[(size_t)m.peer] = true;
    for (size_t r = 0; r < with.size(); r++) good = good && (!with[r] || whole(c, c->peers[r], &here, 1, true));
    for (size_t r = 0; r < with.size(); r++) good = good && (!with[r] || whole(c, c->peers[r], &here, 1, false));
    return good;
}

/* Exchanges messages. Each begins with its length, so that both ends can compare it. */
bool exchange(ncclComm *c, const std::vector<message> &out, const std::vector<message> &in)
{
    std::atomic<bool> sent{ true };
    if (!meet(c, out, in)) return false;
    std::thread sender([&] {
        for (const message &m : out)
            if (!whole(c, c->peers[(size_t)m.peer], (char *)&m.n, sizeof m.n, true) ||
                !whole(c, c->peers[(size_t)m.peer], m.bytes, m.n, true)) { sent = false; return; }
    });
    bool got = true;
    for (const message &m : in) {
        size_t n = 0;
        got = got && whole(c, c->peers[(size_t)m.peer], (char *)&n, sizeof n, false) && n == m.n &&
              whole(c, c->peers[(size_t)m.peer], m.bytes, m.n, false);
        if (!got) break;
    }
    sender.join();
    return got && sent;
}

/* Returns whether rank 1 has reached the exchange for which the setting requests `what`. */
bool is_to(ncclComm *c, const char *what)
{
    size_t n = strlen(what);
    return c->rank == 1 && strncmp(setting(), what, n) == 0 && c->exchanges == atoi(setting() + n);
}

void carry_out(ncclComm *c, group *g)
{
    c->exchanges++;
    if (is_to(c, "breaks=")) {
        set_error("a link is down");
        c->failure = ncclRemoteError;
        return;
    }
    while (is_to(c, "stalls=") && !c->closing) usleep(2000);
    if (g->own.n) memmove(g->own.to, g->own.from, g->own.n);
    std::vector<std::vector<float>> theirs((size_t)c->size, std::vector<float>(g->reduce.on ? g->reduce.n : 0));
    if (g->reduce.on)
        for (int r = 0; r < c->size; r++) {
            if (r == c->rank) continue;
            g->out.push_back({ (char *)const_cast<float *>(g->reduce.in), g->reduce.n * 4, r });
            g->in.push_back({ (char *)theirs[(size_t)r].data(), g->reduce.n * 4, r });
        }
    bool good = exchange(c, g->out, g->in);
    for (size_t i = 0; good && i < (g->reduce.on ? g->reduce.n : 0); i++) {
        float total = 0;
        for (int r = 0; r < c->size; r++) total += r == c->rank ? g->reduce.in[i] : theirs[(size_t)r][i];
        g->reduce.out[i] = total;
    }
    if (good) g->over = true;
    else c->failure = ncclRemoteError;
}

void run(ncclComm *c)
{
    bool refuses = c->rank == 1 && strcmp(setting(), "refuses") == 0;
    if (refuses) set_error("no usable network");
    if (refuses) c->failure = ncclSystemError;
    else if (!connect_all(c)) c->failure = ncclRemoteError;
    c->connected = true;
    for (;;) {
        std::unique_lock<std::mutex> guard(c->lock);
        c->work.wait(guard, [&] { return !c->due.empty() || c->closing; });
        if (c->closing) return;
        group *g = c->due.front();
        c->due.pop_front();
        guard.unlock();
        if (c->failure == ncclSuccess) carry_out(c, g);
    }
}

int state_of(const ncclComm *c)
{
    if (c->failure) return c->failure;
    return c->connected && !c->ended && !(c->finalizing && c->last && !c->last->over) ? ncclSuccess : ncclInProgress;
}

ncclResult_t join(ncclComm *c, cudaStream_t stream)
{
    if (!group_open || state_of(c) != ncclSuccess || c->finalizing || (in_group && in_group != c)) {
        set_error("a call outside a group, or while another is in progress");
        return ncclInvalidUsage;
    }
    in_group = c;
    if (!c->next) c->next = new group;
    if (c->next->stream && c->next->stream != stream) return ncclInvalidUsage;
    c->next->stream = stream;
    return ncclSuccess;
}

}

API ncclResult_t ncclGetVersion(int *out)
{
    *out = strcmp(setting(), "old") == 0 ? 21304 : 22809;
    return ncclSuccess;
}

API ncclResult_t ncclGetUniqueId(ncclUniqueId *out)
{
    memset(out, 0, sizeof *out);
    snprintf(out->internal, sizeof out->internal, "ps-nccl-%ld-%ld", (long)getpid(), (long)random());
    return ncclSuccess;
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    if (config->blocking || rank < 0 || rank >= size) return ncclInvalidArgument;
    ncclComm *c = new ncclComm;
    c->rank = rank;
    c->size = size;
    c->name = id.internal;
    c->peers.assign((size_t)size, -1);
    c->thread = std::thread(run, c);
    *out = c;
    return ncclInProgress;
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *out)
{
    if (c->ended && ++c->asked == 2) {
        c->ended = false;
        c->last = c->next;
        c->next = nullptr;
        c->last->stream->add(new turn(c, c->last));
    }
    if (c->finalizing && c->last) c->last->stream->drive();
    *out = (ncclResult_t)state_of(c);
    return ncclSuccess;
}

API const char *ncclGetErrorString(ncclResult_t r)
{
    return r == ncclRemoteError ? "remote process exited or there was a network error"
        : r == ncclSystemError ? "unhandled system error" : r == ncclInvalidUsage ? "invalid usage" : "an error";
}

API const char *ncclGetLastError(ncclComm_t)
{
    static thread_local std::string copy;
    std::lock_guard<std::mutex> guard(error_lock);
    copy = last_error;
    return copy.c_str();
}

/* Waits until every peer has closed its end, as the threads of the real library do. */
static ncclResult_t end(ncclComm_t c)
{
    {
        std::lock_guard<std::mutex> guard(c->lock);
        c->closing = true;
        c->work.notify_all();
    }
    c->thread.join();
    for (int fd : c->peers) if (fd >= 0) shutdown(fd, SHUT_WR);
    for (int fd : c->peers) {
        char rest[4096];
        while (fd >= 0 && recv(fd, rest, sizeof rest, 0) > 0) { }
        if (fd >= 0) close(fd);
    }
    return ncclSuccess;
}

API ncclResult_t ncclCommAbort(ncclComm_t c) { return end(c); }
API ncclResult_t ncclCommDestroy(ncclComm_t c) { return end(c); }
/* Completes when everything that was begun is complete. */
API ncclResult_t ncclCommFinalize(ncclComm_t c)
{
    if (state_of(c) != ncclSuccess) return ncclInvalidUsage;
    c->finalizing = true;
    return ncclInProgress;
}

API ncclResult_t ncclGroupStart(void)
{
    if (group_open) return ncclInvalidUsage;
    group_open = true;
    in_group = nullptr;
    return ncclSuccess;
}

API ncclResult_t ncclGroupEnd(void)
{
    ncclComm *c = in_group;
    if (!group_open) return ncclInvalidUsage;
    group_open = false;
    in_group = nullptr;
    if (!c) return ncclSuccess;
    c->ended = true;
    c->asked = 0;
    return ncclInProgress;
}

API ncclResult_t ncclSend(const void *p, size_t n, ncclDataType_t, int peer, ncclComm_t c, cudaStream_t s)
{
    ncclResult_t r = join(c, s);
    if (r == ncclSuccess) c->next->out.push_back({ (char *)const_cast<void *>(p), n, peer });
    return r;
}

API ncclResult_t ncclRecv(void *p, size_t n, ncclDataType_t, int peer, ncclComm_t c, cudaStream_t s)
{
    ncclResult_t r = join(c, s);
    if (r == ncclSuccess) c->next->in.push_back({ (char *)p, n, peer });
    return r;
}

API ncclResult_t ncclAllGather(const void *in, void *out, size_t n, ncclDataType_t, ncclComm_t c, cudaStream_t s)
{
    ncclResult_t r = join(c, s);
    if (r != ncclSuccess) return r;
    for (int peer = 0; peer < c->size; peer++) {
        char *place = (char *)out + (size_t)peer * n * 4;
        if (peer == c->rank) c->next->own = { place, (const char *)in, n * 4 };
        else c->next->in.push_back({ place, n * 4, peer });
        if (peer != c->rank) c->next->out.push_back({ (char *)const_cast<void *>(in), n * 4, peer });
    }
    return r;
}

API ncclResult_t ncclAllReduce(const void *in, void *out, size_t n, ncclDataType_t, ncclRedOp_t, ncclComm_t c,
                               cudaStream_t s)
{
    ncclResult_t r = join(c, s);
    if (r == ncclSuccess) c->next->reduce = { true, (const float *)in, (float *)out, n };
    return r;
}
