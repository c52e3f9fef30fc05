/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the table of transport.h with Gloo's TCP transport. It is the only C++ file outside
 * backend/cuda, and it lets no exception escape to its callers. An exchange uses one of Gloo's unbound buffers for each
 * combination of peer and direction. Therefore the error of a failed exchange can name the rank of the peer.
 *
 * Gloo's thread accesses the caller's bytes while their buffer exists, but never after the destructor of the buffer has
 * returned. Therefore a call returns an error only after the communicator has freed all its buffers. If the caller
 * freed its bytes earlier, a write in Gloo's thread could fail and throw there, which would end the process.
 *
 * Gloo's own collectives are used only by benchmarks. In these collectives, the order of the terms of a sum depends on
 * the position of an element, and a wrong size ends the process. */
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
extern "C" {
#include "base/error.h"
}
#include "rendezvous/store.h"
#include "rendezvous/watch.h"
#include "transport/link.h"
#include "transport/transport.h"

namespace {

using std::chrono::milliseconds;

struct store_failed : std::runtime_error { using std::runtime_error::runtime_error; };

/* The store, with the interface that Gloo uses. After a failure, the error of this thread contains the engine's
 * message. */
class Store : public gloo::rendezvous::Store {
public:
    Store(ps_store *store, double timeout_s) : store_(store), timeout_s_(timeout_s) { }
    void set(const std::string &key, const std::vector<char> &data) override
    {
        code = ps_store_set(store_, key.c_str(), data.data(), int64_t(data.size()));
        if (code < 0) failed();
    }
    std::vector<char> get(const std::string &key) override
    {
        std::vector<char> value(PS_STORE_MAX_VALUE);
        int64_t nbytes = 0;
        code = ps_store_get(store_, key.c_str(), timeout_s_, value.data(), int64_t(value.size()), &nbytes);
        if (code < 0) {
            /* The key for the address of a rank is the rank's number. */
            if (code == PS_ETIME && key.find_first_not_of("0123456789") == std::string::npos) {
                ps_error_prefix("rank %s did not send the address at which it listens: ", key.c_str());
                ps_error_set_rank(std::atoi(key.c_str()));
            }
            failed();
        }
        value.resize(size_t(nbytes));
        return value;
    }
    void wait(const std::vector<std::string> &keys) override
    {
        for (const auto &key : keys) get(key);
    }
    void wait(const std::vector<std::string> &keys, const milliseconds &) override { wait(keys); }
    int code = 0;

private:
    [[noreturn]] void failed() { throw store_failed("store"); }
    ps_store *store_;
    double timeout_s_;
};

using Buffer = std::unique_ptr<gloo::transport::UnboundBuffer>;

struct Gloo;

} // namespace

struct ps_comm_post {
    Gloo *g;
    bool out;
    Buffer buffer;
};

namespace {

/* The connections of all ranks. The communicator of all ranks shares its World with all communicators that were cut
 * from it. */
struct World {
    ~World()
    {
        ps_link_close(link);
        ps_watch_close(watch);
    }
    std::shared_ptr<gloo::rendezvous::Context> context;
    ps_watch *watch = nullptr;
    ps_link *link = nullptr;               /* the simulated link, or NULL */
    std::atomic<bool> hung_up{ false };
    std::mutex lock;                       /* guards `users`, their lanes and their posts */
    /* left: signals that the last thread has left the lanes of a communicator */
    std::condition_variable left;
    std::vector<Gloo *> users;
};

struct Gloo {
    Gloo(const std::shared_ptr<World> &w, const ps_comm &c) : comm(c), world(w)
    {
        std::lock_guard<std::mutex> guard(world->lock);
        world->users.push_back(this);
    }
    ~Gloo()
    {
        ps_watch_part(world->watch, comm.place);
        let_go();
        std::lock_guard<std::mutex> guard(world->lock);
        world->users.erase(std::find(world->users.begin(), world->users.end(), this));
    }
    /* Records that one more thread uses the lanes. Returns false if the connections are closed or are being closed. */
    bool enter()
    {
        std::lock_guard<std::mutex> guard(world->lock);
        if (!world->hung_up) threads++;
        return !world->hung_up;
    }
    void leave()
    {
        std::lock_guard<std::mutex> guard(world->lock);
        if (--threads == 0) world->left.notify_all();
    }
    /* Waits until all threads have left the lanes of this communicator, and then ends the exchanges in progress of this
     * communicator. After that, the memory of the exchanges belongs to the callers again, because the destructor of a
     * buffer waits until Gloo's thread no longer uses the bytes of the buffer. */
    void let_go()
    {
        std::unique_lock<std::mutex> guard(world->lock);
        world->left.wait(guard, [this] { return threads == 0; });
        for (auto &lane : lanes) {
            for (auto &buffer : lane.out) ps_link_drop(world->link, buffer.get());
            lane.in.clear();
            lane.out.clear();
        }
    }
    ps_comm comm;                          /* must be first, because the functions of the table get its address */
    std::shared_ptr<World> world;
    /* id: distinguishes the slots of communicators. Two communicators that have two ranks in common have different
     * ids. */
    int32_t id = 0;
    /* ranks: the memory to which comm.ranks points */
    std::vector<int32_t> ranks;
    /* lanes: [size] the buffers of each lane, while the lane has an exchange in progress */
    struct { std::vector<Buffer> in, out; } lanes[PS_COMM_LANES];
    int threads = 0;                       /* number of threads that use the lanes */
    std::vector<ps_comm_post *> posts;
};

/* The number of slots per communicator. Slots 1 to PS_COMM_LANES belong to its lanes. */
enum { SLOTS = 32 };
static_assert(1 + PS_COMM_LANES + PS_COMM_SLOTS <= SLOTS, "a communicator's slots");

Gloo *self(ps_comm *comm) { return reinterpret_cast<Gloo *>(comm); }

/* Gloo waits for a connection five times as long as its time-out says. */
milliseconds connect_timeout(double timeout_s) { return milliseconds(1 + int64_t(timeout_s * 1e3 / 5)); }

/* Returns a message of Gloo without its prefix, which is a position in Gloo's source. */
const char *plain(const char *text)
{
    const char *end = text[0] == '[' ? std::strstr(text, "] ") : nullptr;
    return end ? end + 2 : text;
}

/* Returns true if a message of Gloo reports a time-out: "Timed out ..." or "Connect timeout ...". */
bool late(const char *text) { return std::strstr(text, "imed out") || std::strstr(text, "imeout"); }

/* Raises an error about a failed call with a peer. First asks the watch, because another rank may be to blame. */
int peer_failed(const Gloo *g, int peer, const char *what, const char *text)
{
    int rc = ps_watch_complain(g->comm.watch, g->comm.place, late(text) ? PS_WATCH_TIME_OUT : PS_WATCH_LOST, peer,
                               g->comm.timeout_s, plain(text));
    if (rc < 0) return rc;
    if (late(text))
        return ps_fail_rank(PS_ETIME, peer,
                            "rank %d %s within %g s; is it stopped, busy, or in another part of the script? Its output "
                            "may say (init_distributed's timeout sets the seconds)", peer, what, g->comm.timeout_s);
    return ps_fail_rank(PS_EIO, peer, "rank %d closed the connection: it ended or failed first, and its own "
                                      "output says why (%s)",
                        peer, plain(text));
}

/* Sends a message that has passed the simulated link. If the connection is closed, this function raises no error. The
 * thread that waits for the message then gets the error. */
void send_now(void *message, int peer, uint64_t slot)
{
    try {
        static_cast<gloo::transport::UnboundBuffer *>(message)->send(peer, slot);
    } catch (...) {
    }
}

/* Sends the bytes of a buffer to a rank of the world. */
void put(World *world, const Buffer &buffer, int peer, uint64_t slot, int64_t nbytes)
{
    if (!world->link) buffer->send(peer, slot);
    else if (ps_link_put(world->link, buffer.get(), peer, slot, nbytes) < 0) throw std::bad_alloc();
}

void abort_wait(ps_comm_post *post)
{
    if (post->out) post->buffer->abortWaitSend();
    else post->buffer->abortWaitRecv();
}

/* Aborts the waits of all threads in this process that wait for Gloo. */
void abort_waits(World *world)
{
    std::lock_guard<std::mutex> guard(world->lock);
    for (Gloo *g : world->users) {
        for (auto &lane : g->lanes) {
            for (auto &buffer : lane.in)
                if (buffer) buffer->abortWaitRecv();
            for (auto &buffer : lane.out)
                if (buffer) buffer->abortWaitSend();
        }
        for (ps_comm_post *post : g->posts) abort_wait(post);
    }
}

/* Closes the connections of all communicators, and aborts the waits of the threads that use them. Also ends the
 * exchanges in progress of this communicator. If another thread is already closing the connections, does not wait for
 * that thread. */
void close_connections(Gloo *g)
{
    World *world = g->world.get();
    if (!world->hung_up.exchange(true)) {
        try {
            world->context->closeConnections();
        } catch (...) {                    /* the connections are already closed */
        }
        abort_waits(world);
    }
    g->let_go();
}

void hang_up(ps_comm *comm)
{
    Gloo *g = self(comm);
    if (!g->world->hung_up)
        ps_watch_complain(comm->watch, comm->place, PS_WATCH_GIVES_UP, ps_comm_world(comm, comm->rank), 0,
                          ps_error_message());
    close_connections(g);
    ps_error_set_final();
}

/* Called by the thread of the watch. */
void on_verdict(void *arg) { abort_waits(static_cast<World *>(arg)); }

/* Runs `call`, and turns its failure into an error. While `call` runs, it updates `peer` and `what`. `peer` is the
 * world rank with which `call` communicates. `what` is the text of the error if the communication with `peer` fails.
 * `call` returns false if its wait was aborted by a verdict, or because another communicator has closed the
 * connections. */
template <typename F> int guarded(Gloo *g, const int &peer, const char *const &what, const F &call)
{
    int rc = 0;
    if (!g->enter()) {
        g->let_go();
        return ps_watch_failed_before(g->comm.watch);
    }
    try {
        const bool done = call();
        if (done) {
            g->leave();
            return 0;
        }
        rc = ps_watch_verdict(g->comm.watch);
        if (rc == 0) rc = ps_watch_failed_before(g->comm.watch);
    } catch (const std::bad_alloc &) {
        rc = ps_fail(PS_ENOMEM, "no memory for Gloo's messages to and from rank %d", peer);
    } catch (const std::exception &e) {
        rc = peer_failed(g, peer, what, e.what());
    } catch (...) {
        rc = ps_fail(PS_EIO, "Gloo failed with rank %d", peer);
    }
    g->leave();
    close_connections(g);
    return ps_error_set_final();
}

int begin(ps_comm *comm, int lane, const ps_comm_part *send, const ps_comm_part *recv)
{
    Gloo *g = self(comm);
    int peer = 0;
    const char *what = "could not be reached";
    return guarded(g, peer, what, [&] {
        auto &in = g->lanes[lane].in, &out = g->lanes[lane].out;
        const uint64_t slot = uint64_t(g->id) * SLOTS + uint64_t(lane) + 1;
        std::lock_guard<std::mutex> guard(g->world->lock);
        if (ps_watch_over(comm->watch) || g->world->hung_up) return false;
        in.resize(size_t(comm->size));
        out.resize(size_t(comm->size));
        /* The loop begins with a neighbor of this rank, so that each rank begins with a different peer. */
        for (int i = 1; i < comm->size; i++) {
            const int r = (comm->rank - i + comm->size) % comm->size;
            peer = ps_comm_world(comm, r);
            if (recv[r].nbytes == 0) continue;
            in[size_t(r)] = g->world->context->createUnboundBuffer(recv[r].address, size_t(recv[r].nbytes));
            in[size_t(r)]->recv(peer, slot);
        }
        for (int i = 1; i < comm->size; i++) {
            const int r = (comm->rank + i) % comm->size;
            peer = ps_comm_world(comm, r);
            if (send[r].nbytes == 0) continue;
            out[size_t(r)] = g->world->context->createUnboundBuffer(send[r].address, size_t(send[r].nbytes));
            put(g->world.get(), out[size_t(r)], peer, slot, send[r].nbytes);
        }
        return true;
    });
}

int finish(ps_comm *comm, int lane)
{
    Gloo *g = self(comm);
    int peer = 0;
    const char *what = "sent nothing";
    const auto until = std::chrono::steady_clock::now() + milliseconds(int64_t(g->comm.timeout_s * 1e3));
    auto left = [&] {
        auto ms = std::chrono::duration_cast<milliseconds>(until - std::chrono::steady_clock::now());
        return ms.count() < 1 ? milliseconds(1) : ms;
    };
    return guarded(g, peer, what, [&] {
        auto &in = g->lanes[lane].in, &out = g->lanes[lane].out;
        for (int i = 1; i < comm->size; i++) {
            const auto r = size_t((comm->rank - i + comm->size) % comm->size);
            peer = ps_comm_world(comm, int(r));
            if (in[r] && !in[r]->waitRecv(nullptr, left())) return false;
        }
        what = "took nothing";
        for (int i = 1; i < comm->size; i++) {
            const auto r = size_t((comm->rank + i) % comm->size);
            peer = ps_comm_world(comm, int(r));
            if (out[r] && !out[r]->waitSend(nullptr, left())) return false;
        }
        std::lock_guard<std::mutex> guard(g->world->lock);
        in.clear();
        out.clear();
        return true;
    });
}

void close_comm(ps_comm *comm)
{
    try {
        delete self(comm);
    } catch (...) {                        /* if closing fails, the failure is ignored */
    }
}

/* Runs one of Gloo's own collectives, for benchmarks. The caller must ensure that all ranks pass the same size. */
template <typename F> int raw(const F &call)
{
    try {
        call();
        return 0;
    } catch (const std::exception &e) {
        return ps_fail(PS_EIO, "Gloo's own collective failed: %s", plain(e.what()));
    } catch (...) {
        return ps_fail(PS_EIO, "Gloo's own collective failed");
    }
}

int raw_all_gather(ps_comm *comm, float *out, float *in, int64_t count)
{
    return raw([=] {
        gloo::AllgatherOptions options(self(comm)->world->context);
        options.setInput(in, size_t(count));
        options.setOutput(out, size_t(count) * size_t(comm->size));
        gloo::allgather(options);
    });
}

int raw_all_reduce(ps_comm *comm, float *out, float *in, int64_t count)
{
    return raw([=] {
        gloo::AllreduceOptions options(self(comm)->world->context);
        options.setInput(in, size_t(count));
        options.setOutput(out, size_t(count));
        options.setReduceFunction(
            static_cast<void (*)(void *, const void *, const void *, size_t)>(&gloo::sum<float>));
        gloo::allreduce(options);
    });
}

/* -- single messages ----------------------------------------------------------------------------------------------- */

int post(ps_comm *comm, int slot, int peer, bool out, void *bytes, int64_t nbytes, ps_comm_post **made)
{
    Gloo *g = self(comm);
    try {
        std::unique_ptr<ps_comm_post> p(new ps_comm_post{ g, out, nullptr });
        std::lock_guard<std::mutex> guard(g->world->lock);
        if (ps_watch_over(comm->watch) || g->world->hung_up) return ps_watch_failed_before(comm->watch);
        g->posts.reserve(g->posts.size() + 1);
        p->buffer = g->world->context->createUnboundBuffer(bytes, size_t(nbytes));
        const uint64_t number = uint64_t(g->id) * SLOTS + PS_COMM_LANES + uint64_t(slot) + 1;
        if (out) put(g->world.get(), p->buffer, ps_comm_world(comm, peer), number, nbytes);
        else p->buffer->recv(ps_comm_world(comm, peer), number);
        g->posts.push_back(p.get());
        *made = p.release();
        return 0;
    } catch (const std::bad_alloc &) {
        return ps_fail(PS_ENOMEM, "no memory for a message of Gloo");
    } catch (const std::exception &e) {
        return ps_fail(PS_EIO, "%s", plain(e.what()));
    }
}

int post_wait(ps_comm_post *post, double seconds)
{
    const milliseconds most(1 + int64_t(std::min(seconds, 1e8) * 1e3));
    try {
        return post->out ? post->buffer->waitSend(nullptr, most) : post->buffer->waitRecv(nullptr, most);
    } catch (const std::exception &e) {
        return ps_fail(late(e.what()) ? PS_ETIME : PS_EIO, "%s", plain(e.what()));
    }
}

void post_wake(ps_comm_post *post)
{
    std::lock_guard<std::mutex> guard(post->g->world->lock);
    abort_wait(post);
}

void post_drop(ps_comm_post *post)
{
    if (!post) return;
    std::lock_guard<std::mutex> guard(post->g->world->lock);
    auto &posts = post->g->posts;
    posts.erase(std::find(posts.begin(), posts.end(), post));
    ps_link_drop(post->g->world->link, post->buffer.get());
    delete post;
}

extern const ps_comm_table table, part_table;

int cut(ps_comm *comm, int n, const int32_t *ranks, const char *axis, int32_t id, ps_comm **out)
{
    const Gloo *from = self(comm);
    try {
        std::unique_ptr<Gloo> g(new Gloo(from->world, *comm));
        g->comm.place = -1;
        g->comm.table = &part_table;
        g->comm.size = n;
        g->id = id;
        std::snprintf(g->comm.axis, sizeof g->comm.axis, "%s", axis);
        int32_t least = ps_comm_world(comm, ranks[0]);
        for (int i = 0; i < n; i++) {
            const int32_t world = ps_comm_world(comm, ranks[i]);
            g->ranks.push_back(world);
            if (ranks[i] == comm->rank) g->comm.rank = i;
            least = std::min(least, world);
        }
        g->comm.ranks = g->ranks.data();
        g->comm.place = ps_watch_join(comm->watch, uint64_t(least) << 32 | uint32_t(id), axis);
        if (g->comm.place < 0) return g->comm.place;
        *out = &g.release()->comm;
        return 0;
    } catch (const std::bad_alloc &) {
        return ps_fail(PS_ENOMEM, "no memory for a group of %d ranks", n);
    }
}

const ps_comm_table table = { "gloo", begin, finish, hang_up, close_comm, cut, post, post_wait, post_wake, post_drop,
                              nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                              nullptr, nullptr, raw_all_gather, raw_all_reduce };
/* The table of communicators that were cut from the world. It does not contain Gloo's own collectives, because they
 * need all ranks. */
const ps_comm_table part_table = { "gloo", begin, finish, hang_up, close_comm, cut, post, post_wait, post_wake,
                                   post_drop, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                   nullptr, nullptr, nullptr, nullptr, nullptr, nullptr };

/* Makes the device. It listens at the address from which this machine reached rank 0, or at the address of the
 * interface in GLOO_SOCKET_IFNAME. Other ranks can reach this machine at this address. */
std::shared_ptr<gloo::transport::Device> make_device(const ps_store *store)
{
    gloo::transport::tcp::attr attr;
    const char *interface = std::getenv("GLOO_SOCKET_IFNAME");
    if (interface && *interface) attr.iface = interface;
    else attr.hostname = ps_store_local_address(store);
    return gloo::transport::tcp::CreateDevice(attr);
}

/* Computes the proof that rank `from` sends to rank `to` on a new connection. The proof is a hash that needs the key of
 * the group. */
void introduction(const ps_run &group, int from, int to, uint8_t bytes[PS_PROOF_BYTES])
{
    ps_run made;
    char text[64];
    std::snprintf(text, sizeof text, "gloo %d %d", from, to);
    ps_run_derive(&group, text, &made);
    std::memcpy(bytes, made.key, PS_PROOF_BYTES);
}

/* Makes the key of the group from the key of the run and from random bits. Only ranks that the store has accepted can
 * read the random bits. */
int group_key(ps_store *store, const ps_watch_options &options, double timeout_s, ps_run *out)
{
    static const char *const key = "group";
    char text[2 * PS_PROOF_BYTES + 1] = "";
    int64_t nbytes = 0;
    if (options.rank == 0) {
        ps_run_token(text);
        PS_TRY(ps_store_set(store, key, text, int64_t(std::strlen(text))));
    } else
        PS_TRY(ps_store_get(store, key, timeout_s, text, sizeof text - 1, &nbytes));
    ps_run_derive(options.run, text, out);
    return 0;
}

/* Exchanges proofs with all ranks. A proof is necessary because Gloo accepts any first connection to a port as the
 * connection of the rank for which the port waits. After this function, no rank needs the store. */
int greet(Gloo *g, const ps_run &group)
{
    const int rank = g->comm.rank;
    const auto n = static_cast<size_t>(g->comm.size);
    std::vector<uint8_t> from(n * PS_PROOF_BYTES), to(n * PS_PROOF_BYTES), right(PS_PROOF_BYTES);
    std::vector<ps_comm_part> send, recv;
    for (size_t i = 0; i < n; i++) {
        introduction(group, rank, int(i), &to[i * PS_PROOF_BYTES]);
        send.push_back({ &to[i * PS_PROOF_BYTES], PS_PROOF_BYTES });
        recv.push_back({ &from[i * PS_PROOF_BYTES], PS_PROOF_BYTES });
    }
    int rc = begin(&g->comm, PS_COMM_HEADER, send.data(), recv.data());
    if (rc == 0) rc = finish(&g->comm, PS_COMM_HEADER);
    if (rc < 0) {
        ps_error_prefix("joining the other ranks: ");
        return rc;
    }
    for (int i = 0; i < g->comm.size; i++) {
        introduction(group, i, rank, right.data());
        if (i != rank && !ps_proof_same(right.data(), &from[size_t(i) * PS_PROOF_BYTES]))
            return ps_fail(PS_EIO, "the process that connected to rank %d as rank %d does not belong to this run: "
                                   "its port, which the "
                           "system chose, was reached by another program", rank, i);
    }
    return 0;
}

int connect(ps_store *store, const ps_watch_options &options, double timeout_s, ps_comm **out)
{
    const int rank = options.rank, size = options.size;
    Store view(store, timeout_s);
    ps_run group;
    PS_TRY(ps_store_meet(store, timeout_s));
    PS_TRY(group_key(store, options, timeout_s, &group));
    try {
        auto device = make_device(store);
        auto world = std::make_shared<World>();
        PS_TRY(ps_link_open(send_now, &world->link));
        std::unique_ptr<Gloo> g(new Gloo(world, { &table, rank, size, timeout_s, nullptr, 0, nullptr, "", false }));
        world->context = std::make_shared<gloo::rendezvous::Context>(rank, size);
        world->context->setTimeout(connect_timeout(timeout_s));
        world->context->connectFullMesh(view, device);
        world->context->setTimeout(milliseconds(int64_t(timeout_s * 1e3)));
        if (size > 1) {
            ps_watch_options mine = options;
            mine.on_verdict = on_verdict;
            mine.arg = world.get();
            int started = ps_watch_start(store, &mine, &world->watch);
            if (started < 0) return started;
            g->comm.watch = world->watch;
        }
        PS_TRY(greet(g.get(), group));
        *out = &g.release()->comm;
        return 0;
    } catch (const store_failed &) {
        return view.code;                                   /* the error has already been raised */
    } catch (const std::bad_alloc &) {
        return ps_fail(PS_ENOMEM, "no memory for a Gloo group of %d ranks", size);
    } catch (const std::exception &e) {
        PS_TRY(ps_store_ask_fault(store));                  /* another rank may have failed first */
        return ps_fail(late(e.what()) ? PS_ETIME : PS_EIO,
                       "rank %d of %d could not connect to the others within %g s: %s (GLOO_SOCKET_IFNAME names the "
                       "network interface to use; now %s)", rank, size, timeout_s, plain(e.what()),
                       ps_store_local_address(store));
    } catch (...) {
        return ps_fail(PS_EIO, "Gloo could not make a group of %d ranks", size);
    }
}

/* Ignores SIGPIPE, so that a dead peer causes an error instead of ending this process. If the process already has a
 * handler for SIGPIPE, keeps that handler. */
void ignore_sigpipe()
{
    struct sigaction now;
    if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

} // namespace

extern "C" int ps_comm_gloo(const ps_meeting *m, ps_comm **out)
{
    ps_store_server *server = nullptr;
    ps_store *store = nullptr;
    ps_run run;
    ignore_sigpipe();
    int rc = ps_store_join(m, &run, &server, &store);
    if (rc < 0) return rc;
    const char *host = server ? ps_store_host(server) : nullptr;
    rc = connect(store, { m->rank, m->size, m->heartbeat_s, m->timeout_s, host, &run, nullptr, nullptr }, m->timeout_s,
                 out);
    char why[1024];
    std::snprintf(why, sizeof why, "%s", ps_error_message());
    if (rc < 0) ps_store_fault(store, why);
    ps_store_close(store, rc == 0);
    ps_store_stop(server, rc < 0);
    /* ps_store_close or ps_store_stop may have changed the error */
    return rc < 0 ? ps_fail(rc, "%s", why) : 0;
}
