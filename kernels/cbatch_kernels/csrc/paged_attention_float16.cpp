#include "paged_attention.h"

void cbatch_paged_attention_float16(const cbatch::AttentionArguments *arguments) {
    cbatch::attend_batch<cbatch::Float16>(*arguments);
}
