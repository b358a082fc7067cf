// What the library says of itself.

#include "parallel.h"

CBATCH_API const char *cbatch_instruction_set() {
#if defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "plain instructions";
#endif
}
