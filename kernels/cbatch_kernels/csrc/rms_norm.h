// What an RMS norm is told. See ../rms_norm.py.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace cbatch {

struct RmsNormArguments {  // as in ../rms_norm.py; strides count elements
    const void *x;
    void *result;
    const float *weight;
    const void *residual;  // where the result will lie, or null
    int64_t num_rows, rows_per_token, token_stride, row_stride, result_token_stride, result_row_stride;
    int64_t hidden, element, num_threads;
    float eps;
};

}  // namespace cbatch

CBATCH_API void cbatch_rms_norm(const cbatch::RmsNormArguments *arguments);
