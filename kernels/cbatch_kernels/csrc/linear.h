// What a linear layer over packed weights is told. See ../packed_linear.py.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace cbatch {

struct LinearArguments {  // as in ../packed_linear.py; strides count elements
    const float *x;
    const void *weight;     // panels; of a gated pair those of both, one after the other
    const float *bias;      // [out_features], of a gated pair twice as many; or null
    const float *residual;  // added at the end; or null
    float *result;
    int64_t num_rows, in_features, out_features, x_stride, residual_stride, result_stride;
    int64_t is_gated, activation, is_bfloat16, num_threads;
};

}  // namespace cbatch

CBATCH_API void cbatch_linear(const cbatch::LinearArguments *arguments);
