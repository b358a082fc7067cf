// Rotary position embedding, and the cache write of what is rotated. See ../rope_cache_write.py.

#include <cstdint>
#include <cstring>

#include "parallel.h"
#include "rope_cache_write.h"
#include "simd.h"

namespace {

using namespace cbatch;

constexpr long ELEMENTS_PER_TASK = 8192;

template <int count, class Element>
void rotate(Element *to, const Element *from, const Element *cos, const Element *sin, int64_t half) {
    Floats a = load<count>(from), b = load<count>(from + half);
    store<count>(to, a * load<count>(cos) - b * load<count>(sin));
    store<count>(to + half, b * load<count>(cos + half) + a * load<count>(sin + half));
}

// Rotate a head; dimensions beyond the rotary ones are left to the caller. `to` and `from` may be the same.
template <class Element>
void rotate_head(Element *to, const Element *from, const Element *cos, const Element *sin, int64_t half) {
    int64_t i = 0;
    for (; i < half / WIDTH * WIDTH; i += WIDTH) rotate<WIDTH>(to + i, from + i, cos + i, sin + i, half);
    for (; i < half; i++) rotate<1>(to + i, from + i, cos + i, sin + i, half);
}

template <class Element>
Element *head_of(const Tokens &tokens, int64_t token, int64_t head) {
    auto *data = static_cast<Element *>(const_cast<void *>(tokens.data));
    return data + token * tokens.token_stride + head * tokens.head_stride;
}

template <class Element>
Element *slot_of(const Pages &pages, int64_t page, int64_t slot, int64_t head) {
    return static_cast<Element *>(pages.data) + page * pages.page_stride + slot * pages.slot_stride +
           head * pages.head_stride;
}

template <class Element>
void run(const RopeCacheWriteArguments &a) {
    int64_t half = a.rotary_dim / 2, rest = (a.head_dim - a.rotary_dim) * sizeof(Element);
    int64_t elements = (a.num_heads + 2 * a.kv_heads) * a.head_dim;
    parallel_for(a.num_tokens, 1 + ELEMENTS_PER_TASK / elements, a.num_threads, [&](long token) {
        auto *cos = static_cast<const Element *>(a.cos) + token * a.angle_stride;
        auto *sin = static_cast<const Element *>(a.sin) + token * a.angle_stride;
        for (int64_t head = 0; head < a.num_heads; head++) {
            auto *query = head_of<Element>(a.query, token, head);
            rotate_head(query, query, cos, sin, half);
        }
        int64_t page = a.slot_mapping[token] / a.page_size, slot = a.slot_mapping[token] % a.page_size;
        for (int64_t head = 0; head < a.kv_heads; head++) {
            auto *key = head_of<Element>(a.key, token, head), *to = slot_of<Element>(a.key_pages, page, slot, head);
            rotate_head(to, key, cos, sin, half);
            std::memcpy(to + a.rotary_dim, key + a.rotary_dim, rest);
            std::memcpy(slot_of<Element>(a.value_pages, page, slot, head), head_of<Element>(a.value, token, head),
                        a.head_dim * sizeof(Element));
        }
    });
}

}  // namespace

void cbatch_rope_cache_write(const cbatch::RopeCacheWriteArguments *arguments) {
    switch (arguments->element) {
        case 0: return run<float>(*arguments);
        case 1: return run<BFloat16>(*arguments);
        case 2: return run<Float16>(*arguments);
    }
}
