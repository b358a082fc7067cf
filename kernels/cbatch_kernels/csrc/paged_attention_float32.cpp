#include "paged_attention.h"

void cbatch_paged_attention_float32(const cbatch::AttentionArguments *arguments) {
    cbatch::attend_batch<float>(*arguments);
}
