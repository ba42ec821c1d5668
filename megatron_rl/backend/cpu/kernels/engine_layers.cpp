// The small operators between the products of a decoder layer, in one pass over memory each.
// dtype: 0 is float32, 1 is bfloat16. Widths are multiples of 16 unless said otherwise.

#include <cmath>

#include "engine_vectors.h"

namespace {

// out = norm(x + residual) * weight, residual = x + residual; sums and norms in float32.
template <typename T>
void add_norm(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t width,
              float epsilon) {
  constexpr int64_t KEPT = 8192;
  alignas(64) float kept[KEPT];
  for (int64_t row = 0; row < rows; row++, x += width, out += width) {
    Floats squares{};
    for (int64_t i = 0; i < width; i += LANES) {
      Floats value = load(x + i);
      if (residual) {
        value += load(residual + i);
        store(residual + i, value);
      }
      // The norm is that of the sum before it is rounded.
      store(kept + i, value);
      squares += value * value;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / (float)width + epsilon);
    for (int64_t i = 0; i < width; i += LANES)
      store(out + i, load(kept + i) * scale * load(weight + i));
    if (residual) residual += width;
  }
}

// out = silu(gate) * up, where a row holds the gates and then the ups.
template <typename T>
void silu_multiply(const T* x, T* out, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; row++, x += 2 * width, out += width)
    for (int64_t i = 0; i < width; i += LANES) {
      Floats gate = load(x + i);
      store(out + i, gate / (1.0f + exponential(-gate)) * load(x + width + i));
    }
}

template <typename T>
void turn(T* first, T* second, const T* cosines, const T* sines) {
  Floats a = load(first), b = load(second), c = load(cosines), s = load(sines);
  store(first, a * c - b * s);
  store(second, b * c + a * s);
}

// Turns the first half of each head against the second, in place.
template <typename T>
void rotate(T* x, int64_t stride, int64_t heads, int64_t size, const T* table,
            const int64_t* positions, int64_t rows) {
  int64_t half = size / 2;
  for (int64_t row = 0; row < rows; row++) {
    const T* cosines = table + positions[row] * size;
    const T* sines = cosines + half;
    for (int64_t head = 0; head < heads; head++) {
      T* first = x + row * stride + head * size;
      T* second = first + half;
      int64_t i = 0;
      for (; i + LANES <= half; i += LANES)
        turn(first + i, second + i, cosines + i, sines + i);
      if (i == half) continue;
      T rest[4][LANES] = {};
      int64_t bytes = (half - i) * sizeof(T);
      std::memcpy(rest[0], first + i, bytes);
      std::memcpy(rest[1], second + i, bytes);
      std::memcpy(rest[2], cosines + i, bytes);
      std::memcpy(rest[3], sines + i, bytes);
      turn(rest[0], rest[1], rest[2], rest[3]);
      std::memcpy(first + i, rest[0], bytes);
      std::memcpy(second + i, rest[1], bytes);
    }
  }
}

}  // namespace

extern "C" {

// residual may be null. Returns 0, or 1 for a width that is not supported.
int engine_add_norm(int dtype, const void* x, void* residual, const void* weight, void* out,
                    int64_t rows, int64_t width, float epsilon) {
  if (width % LANES || width > 8192) return 1;
  if (dtype)
    add_norm((const Bfloat16*)x, (Bfloat16*)residual, (const Bfloat16*)weight, (Bfloat16*)out, rows,
             width, epsilon);
  else
    add_norm((const float*)x, (float*)residual, (const float*)weight, (float*)out, rows, width,
             epsilon);
  return 0;
}

int engine_silu_multiply(int dtype, const void* x, void* out, int64_t rows, int64_t width) {
  if (width % LANES) return 1;
  if (dtype)
    silu_multiply((const Bfloat16*)x, (Bfloat16*)out, rows, width);
  else
    silu_multiply((const float*)x, (float*)out, rows, width);
  return 0;
}

// x: rows of `stride` elements that begin with `heads` heads; table: [positions, size], cosines and
// then sines, in the type of x.
int engine_rotate(int dtype, void* x, int64_t stride, int64_t heads, int64_t size,
                  const void* table, const int64_t* positions, int64_t rows) {
  if (size % 2) return 1;
  if (dtype)
    rotate((Bfloat16*)x, stride, heads, size, (const Bfloat16*)table, positions, rows);
  else
    rotate((float*)x, stride, heads, size, (const float*)table, positions, rows);
  return 0;
}
}
