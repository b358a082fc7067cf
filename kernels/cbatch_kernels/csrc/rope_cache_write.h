// What rotation and cache write are told. See ../rope_cache_write.py.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace cbatch {

// Heads of tokens, or of a page; strides count elements.
struct Tokens {
    const void *data;
    int64_t token_stride, head_stride;
};
struct Pages {
    void *data;
    int64_t page_stride, head_stride, slot_stride;
};

struct RopeCacheWriteArguments {  // as in ../rope_cache_write.py
    Tokens query, key, value;
    Pages key_pages, value_pages;
    const int64_t *slot_mapping;
    const void *cos, *sin;
    int64_t angle_stride, rotary_dim;
    int64_t num_tokens, num_heads, kv_heads, head_dim, page_size, element, num_threads;
};

}  // namespace cbatch

CBATCH_API void cbatch_rope_cache_write(const cbatch::RopeCacheWriteArguments *arguments);
