// All layers of a decoder in one call: nothing but the products and what lies between them takes time. See ../decoder.py.
//
// A layer is what its operations are when they are called one by one: the same numbers, to the bit.

#include <algorithm>
#include <cstring>

#include "attention_arguments.h"
#include "linear.h"
#include "rms_norm.h"
#include "rope_cache_write.h"

namespace {

using namespace cbatch;

struct Norm {
    const float *weight;  // or null: there is none
    float eps;
};

struct Product {
    const void *weight;
    const float *bias;
    int64_t out_features, is_gated, activation, is_bfloat16;
};

struct Layer {  // as in ../decoder.py
    Norm input_norm, query_norm, key_norm, output_norm;
    Product heads, output, gated, down;
    int64_t num_heads, kv_heads, head_dim;
    int64_t rotates, window;  // 0: none
    float scaling, softcap;   // softcap 0: none
};

// What a layer reads and writes beside its weights.
struct Place {
    void *keys, *values;
    const AttentionArguments *attention;  // of the layer's type, without what differs from layer to layer
    const int64_t *slot_mapping;
};

struct Batch {  // as in ../decoder.py
    float *hidden;  // [num_tokens, width], changed in place
    float *workspace;
    const float *cos, *sin;
    int64_t angle_stride, rotary_dim;
    int64_t num_tokens, width, num_threads;
    const int64_t *wanted;  // ascending: the tokens whose result anybody reads; or null, for all of them
    int64_t num_wanted;
};

constexpr int64_t FLOAT32 = 0;

int64_t heads_of(const Layer &layer) { return layer.num_heads + 2 * layer.kv_heads; }

// Floats of a token beside its hidden state: normed, then its heads and what they attended to, or what was gated.
int64_t workspace_of(const Layer &layer, int64_t width) {
    int64_t attending = (heads_of(layer) + layer.num_heads) * layer.head_dim;
    return width + std::max(attending, layer.gated.out_features);
}

void multiply(const Batch &b, const Product &p, const float *x, int64_t in_features, const float *residual,
              float *result) {
    LinearArguments arguments = {x, p.weight, p.bias, residual, result, b.num_tokens, in_features, p.out_features,
                                 in_features, p.out_features, p.out_features, p.is_gated, p.activation, p.is_bfloat16,
                                 b.num_threads};
    cbatch_linear(&arguments);
}

void normalise(const Batch &b, const Norm &norm, const float *x, float *result) {
    RmsNormArguments arguments = {x, result, norm.weight, nullptr, b.num_tokens, 1, b.width, 0, b.width, 0, b.width, FLOAT32,
                                  b.num_threads, norm.eps};
    cbatch_rms_norm(&arguments);
}

// Norm each head of a token by itself, in place.
void normalise_heads(const Batch &b, const Layer &layer, const Norm &norm, float *first, int64_t count) {
    if (!norm.weight) return;
    int64_t stride = heads_of(layer) * layer.head_dim;
    RmsNormArguments arguments = {first, first, norm.weight, nullptr, b.num_tokens * count, count, stride, layer.head_dim, stride,
                                  layer.head_dim, layer.head_dim, FLOAT32, b.num_threads, norm.eps};
    cbatch_rms_norm(&arguments);
}

// Rotate queries and keys, write keys and values to the cache, attend.
void attend(const Batch &b, const Layer &layer, const Place &place, float *heads, float *result) {
    AttentionArguments attention = *place.attention;
    const int64_t *strides[] = {attention.key_strides, attention.value_strides};
    float *keys = heads + layer.num_heads * layer.head_dim, *values = keys + layer.kv_heads * layer.head_dim;
    int64_t stride = heads_of(layer) * layer.head_dim;
    normalise_heads(b, layer, layer.query_norm, heads, layer.num_heads);
    normalise_heads(b, layer, layer.key_norm, keys, layer.kv_heads);
    RopeCacheWriteArguments writing = {
        {heads, stride, layer.head_dim},
        {keys, stride, layer.head_dim},
        {values, stride, layer.head_dim},
        {place.keys, strides[0][0], strides[0][1], strides[0][2]},
        {place.values, strides[1][0], strides[1][1], strides[1][2]},
        place.slot_mapping,
        b.cos,
        b.sin,
        b.angle_stride,
        layer.rotates ? b.rotary_dim : 0,
        b.num_tokens,
        layer.num_heads,
        layer.kv_heads,
        layer.head_dim,
        attention.page_size,
        FLOAT32,
        b.num_threads,
    };
    cbatch_rope_cache_write(&writing);
    attention.query = heads, attention.query_token_stride = stride, attention.query_head_stride = layer.head_dim;
    attention.result = result, attention.keys = place.keys, attention.values = place.values;
    attention.window = layer.window, attention.scaling = layer.scaling, attention.softcap = layer.softcap;
    cbatch_paged_attention_float32(&attention);
}

// What follows attention.
void finish_layer(const Batch &b, const Layer &layer, const float *attended, float *normed, float *gated) {
    multiply(b, layer.output, attended, layer.num_heads * layer.head_dim, b.hidden, b.hidden);
    normalise(b, layer.output_norm, b.hidden, normed);
    multiply(b, layer.gated, normed, b.width, nullptr, gated);
    multiply(b, layer.down, gated, layer.gated.out_features, b.hidden, b.hidden);
}

void move_row(float *rows, int64_t size, int64_t from, int64_t to) {
    if (from != to) std::memcpy(rows + to * size, rows + from * size, size * sizeof(float));
}

// The same for the tokens that are wanted, moved together and back; the others stay unfinished.
void finish_wanted(const Batch &b, const Layer &layer, float *attended, float *normed, float *gated) {
    Batch few = b;
    few.num_tokens = b.num_wanted;
    for (int64_t i = 0; i < b.num_wanted; i++) {
        move_row(b.hidden, b.width, b.wanted[i], i);
        move_row(attended, layer.num_heads * layer.head_dim, b.wanted[i], i);
    }
    finish_layer(few, layer, attended, normed, gated);
    for (int64_t i = b.num_wanted - 1; i >= 0; i--) move_row(b.hidden, b.width, i, b.wanted[i]);
}

void run_layer(const Batch &b, const Layer &layer, const Place &place, bool is_last) {
    float *normed = b.workspace, *heads = normed + b.num_tokens * b.width;
    float *attended = heads + b.num_tokens * heads_of(layer) * layer.head_dim, *gated = heads;
    normalise(b, layer.input_norm, b.hidden, normed);
    multiply(b, layer.heads, normed, b.width, nullptr, heads);
    attend(b, layer, place, heads, attended);
    if (is_last && b.wanted)
        finish_wanted(b, layer, attended, normed, gated);
    else
        finish_layer(b, layer, attended, normed, gated);
}

}  // namespace

CBATCH_API int64_t cbatch_decoder_workspace(const Layer *layers, int64_t num_layers, int64_t width) {
    int64_t most = 0;
    for (int64_t i = 0; i < num_layers; i++) most = std::max(most, workspace_of(layers[i], width));
    return most;
}

CBATCH_API void cbatch_decoder(const Layer *layers, const Place *places, int64_t num_layers, const Batch *batch) {
    for (int64_t i = 0; i < num_layers; i++) run_layer(*batch, layers[i], places[i], i == num_layers - 1);
}
