// Vectors of floats, as wide as the compiler's target has them, and the few operations that the kernels are made of.
//
// GCC's and Clang's vector types; instructions are named only where the types cannot say what is meant, and each has a
// plain form beside it. They are named in assembly: the compilers' headers take longer to read than all the rest.
// Nothing here depends on what surrounds it: an operation on the same numbers gives the same bits wherever it is used
// (the library is compiled with -ffp-contract=off, and `fma` alone fuses).
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace cbatch {

#if defined(CBATCH_WIDTH)
#define CBATCH_PLAIN 1  // a width of one's own choice, for tests of what other targets run
#elif defined(__AVX512F__)
#define CBATCH_WIDTH 16
#elif defined(__AVX__)
#define CBATCH_WIDTH 8
#else
#define CBATCH_WIDTH 4
#endif
constexpr int WIDTH = CBATCH_WIDTH;

#if !defined(CBATCH_PLAIN) && (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)))
#define CBATCH_X86 1
#elif !defined(CBATCH_PLAIN) && defined(__aarch64__)
#define CBATCH_NEON 1
#endif

#if defined(__AVX512F__) || defined(__aarch64__) || CBATCH_WIDTH == 16
constexpr int NUM_REGISTERS = 32;
#else
constexpr int NUM_REGISTERS = 16;
#endif

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Shorts __attribute__((vector_size(2 * WIDTH)));
typedef float Quad __attribute__((vector_size(16)));

constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504088896341f;

#if defined(__clang__) || __GNUC__ >= 12
#define CBATCH_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CBATCH_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif

// Numbers as they lie in memory. bfloat16 is the upper half of a float.
struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

inline Floats splat(float x) { return x - Floats{}; }

// Lane numbers: 0, 1, 2, ...
inline Ints iota() {
    Ints lanes;
    for (int i = 0; i < WIDTH; i++) lanes[i] = i;
    return lanes;
}

inline Floats select(Ints mask, Floats where_set, Floats elsewhere) {
    return (Floats)((mask & (Ints)where_set) | (~mask & (Ints)elsewhere));
}

// The larger one; `b` where either is NaN.
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// a * b + c, rounded once where the target can.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(CBATCH_X86)
    asm("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
#elif defined(CBATCH_NEON)
    asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(c) : "w"(a), "w"(b));
    return c;
#else
    return a * b + c;
#endif
}

inline Ints lengthen(Shorts x) {
#if defined(CBATCH_X86)  // which older compilers make three instructions of
    Ints wide;
    asm("vpmovzxwd %1, %0" : "=v"(wide) : "vm"(x));
    return wide;
#else
    return __builtin_convertvector(x, Ints);
#endif
}

inline Floats widen_bfloat16(Shorts bits) {
    return (Floats)(lengthen(bits) << 16);
}

inline Floats widen_float16(Shorts bits) {
#if defined(CBATCH_X86)
    Floats wide;
    asm("vcvtph2ps %1, %0" : "=v"(wide) : "vm"(bits));
    return wide;
#else
    Ints wide = lengthen(bits);
    // Exponents are moved by a product, which takes numbers below the normal ones along; infinities and NaN are set.
    Floats moved = (Floats)((wide & 0x7fff) << 13) * 0x1p112f;
    Ints special = ((wide & 0x7c00) == 0x7c00) & 0x7f800000;
    return (Floats)((Ints)moved | special | ((wide & 0x8000) << 16));
#endif
}

// `count` of WIDTH numbers; the others are zero.
template <int count = WIDTH>
inline Floats load(const float *from) {
    Floats x = {};
    std::memcpy(&x, from, 4 * count);
    return x;
}

template <int count = WIDTH>
inline Floats load(const BFloat16 *from) {
    Shorts x = {};
    std::memcpy(&x, from, 2 * count);
    return widen_bfloat16(x);
}

template <int count = WIDTH>
inline Floats load(const Float16 *from) {
    Shorts x = {};
    std::memcpy(&x, from, 2 * count);
    return widen_float16(x);
}

template <int count = WIDTH>
inline void store(float *to, Floats x) {
    std::memcpy(to, &x, 4 * count);
}

template <int count = WIDTH>
inline void store(BFloat16 *to, Floats x) {  // to the nearest, ties to even
    Ints bits = (Ints)x;
    Ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Ints is_nan = x != x;
    Shorts narrow = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), Shorts);
    std::memcpy(to, &narrow, 2 * count);
}

template <int count = WIDTH>
inline void store(Float16 *to, Floats x) {
#if defined(CBATCH_X86)
    Shorts narrow;
    asm("vcvtps2ph $0, %1, %0" : "=v"(narrow) : "v"(x));
#else
    Ints sign = ((Ints)x >> 16) & 0x8000, magnitude = (Ints)x & 0x7fffffff;
    // Normal numbers: round the dropped 13 bits. Smaller ones: a sum with 0.5 lines their bits up and rounds them.
    Ints normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112 << 23)) >> 13;
    Ints small = (Ints)((Floats)magnitude + 0.5f) - 0x3f000000;
    Ints is_small = magnitude < (113 << 23), is_large = magnitude >= 0x477ff000, is_nan = magnitude > 0x7f800000;
    Ints bits = (is_small & small) | (~is_small & normal);
    bits = (is_large & 0x7c00) | (~is_large & bits);
    Shorts narrow = __builtin_convertvector(sign | bits | (is_nan & 0x7e00), Shorts);
#endif
    std::memcpy(to, &narrow, 2 * count);
}

// The sums of four vectors. Each adds its lanes in the same order, whatever the other three are.
inline Quad sums(Floats a, Floats b, Floats c, Floats d) {
#if CBATCH_WIDTH == 4
    Floats ab = CBATCH_SHUFFLE(a, b, 0, 4, 1, 5) + CBATCH_SHUFFLE(a, b, 2, 6, 3, 7);
    Floats cd = CBATCH_SHUFFLE(c, d, 0, 4, 1, 5) + CBATCH_SHUFFLE(c, d, 2, 6, 3, 7);
    return CBATCH_SHUFFLE(ab, cd, 0, 1, 4, 5) + CBATCH_SHUFFLE(ab, cd, 2, 3, 6, 7);
#elif CBATCH_WIDTH == 8
    Floats ab = CBATCH_SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + CBATCH_SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    Floats cd = CBATCH_SHUFFLE(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + CBATCH_SHUFFLE(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    Floats all = CBATCH_SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + CBATCH_SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    Quad parts[2];
    std::memcpy(parts, &all, sizeof parts);
    return parts[0] + parts[1];
#else
    Floats ab = CBATCH_SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                CBATCH_SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    Floats cd = CBATCH_SHUFFLE(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                CBATCH_SHUFFLE(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    Floats all = CBATCH_SHUFFLE(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                 CBATCH_SHUFFLE(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    Quad parts[4];
    std::memcpy(parts, &all, sizeof parts);
    return (parts[0] + parts[2]) + (parts[1] + parts[3]);
#endif
}

inline float sum(Floats x) { return sums(x, x, x, x)[0]; }

// 2^x: exactly 1 at 0, exactly 0 below -126, else within 8e-8 of it. For x up to 127.
inline Floats exp2(Floats x) {
    constexpr float SHIFTER = 0x1.8p23f;  // a sum with it has no room for a fraction
    Floats shifted = x + SHIFTER;
    Floats f = x - (shifted - SHIFTER);
    Floats power = splat(0.00015353362f);  // a least maximum of the relative error on [-1/2, 1/2]
    power = fma(power, f, splat(0.0013398875f));
    power = fma(power, f, splat(0.0096184369f));
    power = fma(power, f, splat(0.0555033237f));
    power = fma(power, f, splat(0.2402264774f));
    power = fma(power, f, splat(0.6931471825f));
    power = fma(power, f, splat(1.0f));
    Floats scaled = (Floats)((Ints)power + ((Ints)shifted << 23));
    return select(x < -126.0f, Floats{}, scaled);
}

}  // namespace cbatch
