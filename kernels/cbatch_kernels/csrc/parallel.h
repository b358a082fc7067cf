// Loops over the threads of torch's own OpenMP runtime: a second pool would fight the first, whose threads spin.
//
// GOMP_parallel is exported by GNU's, LLVM's and Intel's runtimes alike, and found among the symbols that torch has
// made visible; so any compiler will do, and none needs an OpenMP of its own.
#pragma once

#include <atomic>

extern "C" void GOMP_parallel(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);

// Exported to Python; everything else is hidden.
#define CBATCH_API extern "C" __attribute__((visibility("default")))

namespace cbatch {

// Call body(i) for each i below `count`, in any order, `grain` at a time, each from one of `num_threads` threads. These
// are torch.get_num_threads(): a runtime that is asked for fewer now and then ends threads and starts them again.
template <class Body>
void parallel_for(long count, long grain, long num_threads, const Body &body) {
    struct Shared {
        std::atomic<long> next{0};
        long count, grain;
        const Body *body;

        static void work(void *data) {
            auto *shared = static_cast<Shared *>(data);
            for (;;) {
                long first = shared->next.fetch_add(shared->grain, std::memory_order_relaxed);
                if (first >= shared->count) return;
                long end = first + shared->grain < shared->count ? first + shared->grain : shared->count;
                for (long i = first; i < end; i++) (*shared->body)(i);
            }
        }
    } shared;
    shared.count = count, shared.grain = grain, shared.body = &body;
    if (num_threads <= 1 || count <= grain)
        Shared::work(&shared);
    else
        GOMP_parallel(&Shared::work, &shared, static_cast<unsigned>(num_threads), 0);
}

}  // namespace cbatch
