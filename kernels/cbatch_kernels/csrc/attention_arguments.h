// What paged attention is told. See ../compiled_attention.py.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace cbatch {

struct AttentionArguments {  // as in ../compiled_attention.py; strides count elements: of pages, heads and slots
    const void *query;
    int64_t query_token_stride, query_head_stride;
    void *result;  // [num_tokens, num_heads, head_dim]
    const void *keys, *values;
    int64_t key_strides[3], value_strides[3];
    const int32_t *cu_seqlens_q, *context_lens;
    const int32_t *context_starts;  // or null: all zero
    const int32_t *block_tables;
    int64_t table_stride;
    const float *sinks;  // [num_heads], or null
    int64_t num_sequences, num_decode_rows, num_query_tokens, num_tokens;
    int64_t num_heads, kv_heads, head_dim, page_size;
    int64_t window;  // 0: none
    int64_t num_threads;
    float scaling, softcap;  // softcap 0: none
};

}  // namespace cbatch

CBATCH_API void cbatch_paged_attention_bfloat16(const cbatch::AttentionArguments *arguments);
CBATCH_API void cbatch_paged_attention_float16(const cbatch::AttentionArguments *arguments);
CBATCH_API void cbatch_paged_attention_float32(const cbatch::AttentionArguments *arguments);
