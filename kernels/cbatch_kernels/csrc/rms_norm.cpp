// RMS norm: scales rows to unit root mean square, times a weight, beside a residual. See ../rms_norm.py.
//
// A row is summed in one order whatever its neighbours are: what it gets does not depend on the batch, to the bit.

#include <cmath>
#include <cstdint>

#include "parallel.h"
#include "rms_norm.h"
#include "simd.h"

namespace {

using namespace cbatch;

constexpr long ELEMENTS_PER_TASK = 8192;

template <class Element>
void normalise(const RmsNormArguments &a, const Element *x, const Element *residual, Element *result) {
    const float *weight = a.weight;
    int64_t whole = a.hidden / WIDTH * WIDTH;
    Floats squares[2] = {};
    int64_t i = 0;
    for (; i + 2 * WIDTH <= whole; i += 2 * WIDTH)
        for (int half = 0; half < 2; half++) {
            Floats part = load(x + i + half * WIDTH);
            squares[half] = fma(part, part, squares[half]);
        }
    if (i < whole) {
        Floats part = load(x + i);
        squares[0] = fma(part, part, squares[0]);
    }
    float total = sum(squares[0] + squares[1]);
    // The rest, one by one: through `load` and `store`, which know the element.
    for (i = whole; i < a.hidden; i++) {
        float part = load<1>(x + i)[0];
        total += part * part;
    }
    float scale = 1.0f / std::sqrt(total / static_cast<float>(a.hidden) + a.eps);
    for (i = 0; i < whole; i += WIDTH) {
        Floats normed = load(x + i) * scale * load(weight + i);
        store(result + i, residual ? load(residual + i) + normed : normed);
    }
    for (i = whole; i < a.hidden; i++) {
        auto normed = load<1>(x + i) * scale * load<1>(weight + i);
        store<1>(result + i, residual ? load<1>(residual + i) + normed : normed);
    }
}

template <class Element>
void run(const RmsNormArguments &a) {
    auto *x = static_cast<const Element *>(a.x), *residual = static_cast<const Element *>(a.residual);
    auto *result = static_cast<Element *>(a.result);
    parallel_for(a.num_rows, 1 + ELEMENTS_PER_TASK / a.hidden, a.num_threads, [&](long row) {
        int64_t token = row / a.rows_per_token, part = row % a.rows_per_token;
        int64_t at = token * a.result_token_stride + part * a.result_row_stride;
        normalise(a, x + token * a.token_stride + part * a.row_stride, residual ? residual + at : nullptr, result + at);
    });
}

}  // namespace

void cbatch_rms_norm(const cbatch::RmsNormArguments *arguments) {
    switch (arguments->element) {
        case 0: return run<float>(*arguments);
        case 1: return run<BFloat16>(*arguments);
        case 2: return run<Float16>(*arguments);
    }
}
