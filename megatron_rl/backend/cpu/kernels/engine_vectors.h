// Vectors of 16 floats, and how bfloat16 is read into and written from them. Included by the loops
// of engine ranks. GCC splits the vectors for processors with narrower registers.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr int LANES = 16;

// Bits of a bfloat16.
struct Bfloat16 {
  uint16_t bits;
};

static inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

static inline Floats load(const Bfloat16* from) {
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
#ifdef __AVX512F__
  // GCC 12 makes three instructions of the conversion.
  Words words = (Words)_mm512_cvtepu16_epi32((__m256i)bits);
#else
  Words words = __builtin_convertvector(bits, Words);
#endif
  return (Floats)(words << 16);
}

static inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

// Rounds to the nearest, ties to even, as torch does; NaN stays NaN. The processor's instruction
// takes numbers below 1.2e-38 for 0.
static inline void store(Bfloat16* to, Floats values) {
#ifdef __AVX512BF16__
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)values);
  std::memcpy(to, &rounded, sizeof rounded);
#else
  Words bits = (Words)values;
  Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  Ints is_nan = values != values;
  rounded = ((Words)is_nan & 0x7fc0u) | (~(Words)is_nan & rounded);
#ifdef __AVX512F__
  Halves halves = (Halves)_mm512_cvtepi32_epi16((__m512i)rounded);
#else
  Halves halves = __builtin_convertvector(rounded, Halves);
#endif
  std::memcpy(to, &halves, sizeof halves);
#endif
}

static inline Floats broadcast(float value) { return value - Floats{}; }

static inline float sum(Floats v) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  Eight low, high;
  std::memcpy(&low, &v, 32);
  std::memcpy(&high, (const char*)&v + 32, 32);
  low += high;
  Four a, b;
  std::memcpy(&a, &low, 16);
  std::memcpy(&b, (const char*)&low + 16, 16);
  a += b;
  return (a[0] + a[2]) + (a[1] + a[3]);
}

// The sums of four vectors, with half of the shuffles that one by one takes.
static inline void sum_four(const Floats* v, float* to) {
  typedef float Four __attribute__((vector_size(16)));
  constexpr Ints LOW = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
  constexpr Ints HIGH = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
  constexpr Ints EVEN = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  constexpr Ints ODD = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
  Floats a = __builtin_shuffle(v[0], v[1], LOW) + __builtin_shuffle(v[0], v[1], HIGH);
  Floats b = __builtin_shuffle(v[2], v[3], LOW) + __builtin_shuffle(v[2], v[3], HIGH);
  Floats all = __builtin_shuffle(a, b, EVEN) + __builtin_shuffle(a, b, ODD);
  Four parts[4];
  std::memcpy(parts, &all, sizeof all);
  Four sums = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  std::memcpy(to, &sums, sizeof sums);
}

static inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// exp(x) within 2 units in the last place for x <= 88; 0 below -87, where floats get denormal; NaN
// stays NaN. Cephes' polynomial.
static inline Floats exponential(Floats x) {
  Floats clamped = smaller(larger(x, broadcast(-87.3f)), broadcast(88.0f));
  Floats scaled = clamped * 1.44269504088896341f;
  // Adding 1.5 * 2^23 rounds to the nearest integer.
  Floats whole = (scaled + 12582912.0f) - 12582912.0f;
  Floats rest = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats p = broadcast(1.9875691500e-4f);
  p = p * rest + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * rest * rest + rest + 1.0f;
  Floats power = (Floats)((__builtin_convertvector(whole, Ints) + 127) << 23);
  Floats result = p * power;
  result = x < -87.3f ? Floats{} : result;
  return x != x ? x : result;
}
