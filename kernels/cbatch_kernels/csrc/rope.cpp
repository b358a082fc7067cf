// Rotary position embedding in place, halves rotated against one another. See ../rope.py.

#include <cstdint>

#include "parallel.h"
#include "simd.h"

namespace {

using namespace cbatch;

struct Arguments {  // as in ../rope.py; strides count elements
    void *heads;
    const void *cos, *sin;
    int64_t num_tokens, num_heads, token_stride, head_stride, angle_stride, rotary_dim, element, num_threads;
};

constexpr long ELEMENTS_PER_TASK = 8192;

template <int count, class Element>
void rotate(Element *first, Element *second, const Element *cos, const Element *sin, int64_t half) {
    Floats a = load<count>(first), b = load<count>(second);
    store<count>(first, a * load<count>(cos) - b * load<count>(sin));
    store<count>(second, b * load<count>(cos + half) + a * load<count>(sin + half));
}

template <class Element>
void run(const Arguments &a) {
    int64_t half = a.rotary_dim / 2, whole = half / WIDTH * WIDTH;
    parallel_for(a.num_tokens, 1 + ELEMENTS_PER_TASK / (a.num_heads * a.rotary_dim), a.num_threads, [&](long token) {
        auto *cos = static_cast<const Element *>(a.cos) + token * a.angle_stride;
        auto *sin = static_cast<const Element *>(a.sin) + token * a.angle_stride;
        for (int64_t head = 0; head < a.num_heads; head++) {
            Element *first = static_cast<Element *>(a.heads) + token * a.token_stride + head * a.head_stride;
            int64_t i = 0;
            for (; i < whole; i += WIDTH) rotate<WIDTH>(first + i, first + half + i, cos + i, sin + i, half);
            for (; i < half; i++) rotate<1>(first + i, first + half + i, cos + i, sin + i, half);
        }
    });
}

}  // namespace

CBATCH_API void cbatch_rope(const Arguments *arguments) {
    switch (arguments->element) {
        case 0: return run<float>(*arguments);
        case 1: return run<BFloat16>(*arguments);
        case 2: return run<Float16>(*arguments);
    }
}
