// Cache write: copies a step's new keys and values to the slots of their pages. See ../cache_write.py.

#include <cstdint>
#include <cstring>

#include "parallel.h"

namespace {

// Keys or values: where they are and where they go; strides in bytes.
struct Copy {
    const char *tokens;
    int64_t token_stride, head_stride;
    char *pages;
    int64_t page_stride, page_head_stride, slot_stride;
};

struct Arguments {  // as in ../cache_write.py
    Copy copies[2];
    const int64_t *slot_mapping;
    int64_t num_tokens, kv_heads, page_size, head_bytes, num_threads;
};

constexpr long TOKENS_PER_TASK = 16;

}  // namespace

CBATCH_API void cbatch_cache_write(const Arguments *arguments) {
    const Arguments &a = *arguments;
    cbatch::parallel_for(a.num_tokens, TOKENS_PER_TASK, a.num_threads, [&](long token) {
        int64_t page = a.slot_mapping[token] / a.page_size, offset = a.slot_mapping[token] % a.page_size;
        for (const Copy &copy : a.copies) {
            const char *from = copy.tokens + token * copy.token_stride;
            char *to = copy.pages + page * copy.page_stride + offset * copy.slot_stride;
            for (int64_t head = 0; head < a.kv_heads; head++)
                std::memcpy(to + head * copy.page_head_stride, from + head * copy.head_stride, a.head_bytes);
        }
    });
}
