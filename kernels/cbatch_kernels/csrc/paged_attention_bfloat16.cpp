#include "paged_attention.h"

void cbatch_paged_attention_bfloat16(const cbatch::AttentionArguments *arguments) {
    cbatch::attend_batch<cbatch::BFloat16>(*arguments);
}
