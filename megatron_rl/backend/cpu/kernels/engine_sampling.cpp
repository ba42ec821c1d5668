// Draws one token from each row of logits and tells its logprob, in two passes over the row.
// dtype: 0 is float32, 1 is bfloat16.

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine_vectors.h"

namespace {

constexpr int64_t BLOCK = 1024;

// exp((logits - top) / temperature) of 16 logits, 0 for those beyond the end.
template <typename T>
Floats weights_at(const T* logits, int64_t i, int64_t width, float top, float inverse) {
  if (i + LANES <= width) return exponential((load(logits + i) - top) * inverse);
  T last[LANES] = {};
  std::copy(logits + i, logits + width, last);
  Floats weights = exponential((load(last) - top) * inverse);
  for (int lane = 0; lane < LANES; lane++)
    if (i + lane >= width) weights[lane] = 0.0f;
  return weights;
}

template <typename T>
float one(const T* at) {
  T padded[LANES] = {*at};
  return load(padded)[0];
}

template <typename T>
float largest(const T* logits, int64_t width) {
  Floats top = broadcast(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) top = larger(load(logits + i), top);
  float result = top[0];
  for (int lane = 1; lane < LANES; lane++) result = std::max(result, top[lane]);
  for (; i < width; i++) result = std::max(result, one(logits + i));
  return result;
}

template <typename T>
void sample_row(const T* logits, int64_t width, float temperature, double uniform, double* blocks,
                int64_t* token, float* logprob) {
  float top = largest(logits, width), inverse = 1.0f / temperature;
  double total = 0.0;
  for (int64_t first = 0, b = 0; first < width; first += BLOCK, b++) {
    Floats part{};
    int64_t end = std::min(first + BLOCK, width);
    for (int64_t i = first; i < end; i += LANES)
      part += weights_at(logits, i, width, top, inverse);
    blocks[b] = sum(part);
    total += blocks[b];
  }
  // In (0, total]: a token of probability 0 is never drawn.
  double threshold = std::max(uniform * total, std::numeric_limits<double>::min());
  double before = 0.0;
  int64_t b = 0, count = (width + BLOCK - 1) / BLOCK, chosen = -1;
  while (b + 1 < count && before + blocks[b] < threshold) before += blocks[b++];
  for (; b < count && chosen < 0; b++) {
    int64_t end = std::min((b + 1) * BLOCK, width), last = -1;
    for (int64_t i = b * BLOCK; i < end && chosen < 0; i += LANES) {
      Floats weights = weights_at(logits, i, width, top, inverse);
      for (int lane = 0; lane < LANES && i + lane < end && chosen < 0; lane++) {
        if (!(weights[lane] > 0.0f)) continue;
        last = i + lane;
        before += weights[lane];
        if (before >= threshold) chosen = i + lane;
      }
    }
    // The sum of a block rounds otherwise than one by one: its last possible token is meant then.
    if (chosen < 0) chosen = last;
  }
  *token = chosen < 0 ? 0 : chosen;
  *logprob = (float)((double)((one(logits + *token) - top) * inverse) - std::log(total));
}

template <typename T>
void sample(const T* logits, int64_t stride, int64_t rows, int64_t width, const float* temperatures,
            const double* uniforms, double* blocks, int64_t* tokens, float* logprobs) {
  for (int64_t row = 0; row < rows; row++)
    sample_row(logits + row * stride, width, temperatures[row], uniforms[row], blocks, tokens + row,
               logprobs + row);
}

}  // namespace

extern "C" {

// logits: rows of `stride` elements, of which `width` count; temperatures, uniforms: [rows], a
// uniform in (0, 1]; blocks: room for a number of each 1,024 logits of a row. logprobs are those
// under softmax(logits / temperature).
void engine_sample(int dtype, const void* logits, int64_t stride, int64_t rows, int64_t width,
                   const float* temperatures, const double* uniforms, double* blocks,
                   int64_t* tokens, float* logprobs) {
  if (dtype)
    sample((const Bfloat16*)logits, stride, rows, width, temperatures, uniforms, blocks, tokens,
           logprobs);
  else
    sample((const float*)logits, stride, rows, width, temperatures, uniforms, blocks, tokens,
           logprobs);
}
}
