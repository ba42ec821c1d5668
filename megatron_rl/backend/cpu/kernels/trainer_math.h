// What the trainer's loops share: vectors, bfloat16, exp, and products of small matrices.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512F__
constexpr int WIDTH = 16;
constexpr int TILE_ROWS = 8;
#else
constexpr int WIDTH = 8;
constexpr int TILE_ROWS = 4;
#endif
typedef float Vector __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

struct bfloat16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

template <typename T>
inline T narrow(float x);
template <>
inline float narrow<float>(float x) {
    return x;
}
// To nearest, ties to even; NaN stays NaN.
template <>
inline bfloat16 narrow<bfloat16>(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t(x != x ? 0x7fc0 : rounded)};
}

// Within 2 units in the last place; NaN stays NaN. Beyond the ends of float32 it gives about 1e-38
// or 1e38. Source of the polynomial: Cephes, expf.
inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = __builtin_rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = (int32_t(n) + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

template <int ROWS, int VECTORS>
inline void tile(const float* a, long row, long column, const float* b, long ldb, float* c,
                 long ldc, int depth, bool adds) {
    Vector sums[ROWS][VECTORS];
    for (int m = 0; m < ROWS; m++)
        for (int n = 0; n < VECTORS; n++)
            sums[m][n] = adds ? *(const Vector*)(c + m * ldc + n * WIDTH) : Vector{};
    for (int k = 0; k < depth; k++) {
        Vector right[VECTORS];
        for (int n = 0; n < VECTORS; n++) right[n] = *(const Vector*)(b + k * ldb + n * WIDTH);
        for (int m = 0; m < ROWS; m++)
            for (int n = 0; n < VECTORS; n++) sums[m][n] += a[m * row + k * column] * right[n];
    }
    for (int m = 0; m < ROWS; m++)
        for (int n = 0; n < VECTORS; n++) *(Vector*)(c + m * ldc + n * WIDTH) = sums[m][n];
}

// c = a @ b, or c += a @ b: a[m, k] stands at a[m * row + k * column]; b is [depth, ldb].
// rows are a multiple of TILE_ROWS, columns of WIDTH.
inline void multiply(const float* a, long row, long column, const float* b, long ldb, float* c,
                     long ldc, int rows, int columns, int depth, bool adds) {
    for (int m = 0; m < rows; m += TILE_ROWS) {
        int n = 0;
        for (; n + 2 * WIDTH <= columns; n += 2 * WIDTH)
            tile<TILE_ROWS, 2>(a + m * row, row, column, b + n, ldb, c + m * ldc + n, ldc, depth,
                               adds);
        if (n < columns)
            tile<TILE_ROWS, 1>(a + m * row, row, column, b + n, ldb, c + m * ldc + n, ldc, depth,
                               adds);
    }
}

}  // namespace
