// Attention of running requests over the pool of keys and values, without gathering or padding.
// dtype: 0 is float32, 1 is bfloat16. Products, softmax and sums are float32.
//
// A request's keys lie in slots of the pool, `slots` lists them. Its queries are its last tokens:
// each sees the keys up to its own place.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "engine_vectors.h"

namespace {

struct Shape {
  int64_t heads, kv_heads, size;
  // Elements from one query row to the next.
  int64_t query_stride;
  float scale;
};

// VECTORS: of 16 elements in a head; 0 when it is known only at run time.
template <typename T, int VECTORS>
struct Attention {
  // Places that all heads work on before the next ones.
  static constexpr int64_t BLOCK = 32;
  const Shape& shape;
  const T* keys;
  const T* values;
  std::vector<float> queries, scores, sums;
  int64_t key_stride, share;

  Attention(const Shape& shape, const T* keys, const T* values, int64_t longest)
      : shape(shape),
        keys(keys),
        values(values),
        queries(shape.heads * shape.size),
        scores(shape.heads * padded(longest)),
        sums(shape.heads * shape.size),
        key_stride(shape.kv_heads * shape.size),
        share(shape.heads / shape.kv_heads) {}

  static int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

  int vectors() const { return VECTORS ? VECTORS : (int)(shape.size / LANES); }

  // upcoming: slots of the request after this one, to be fetched meanwhile.
  void attend(const T* query, T* out, const int32_t* slots, int64_t length,
              const int32_t* upcoming, int64_t upcoming_length) {
    int64_t row = padded(length);
    for (int64_t i = 0; i < shape.heads * shape.size; i += LANES)
      store(&queries[i], load(query + i) * shape.scale);
    std::fill(sums.begin(), sums.end(), 0.0f);
    by_blocks(length, [&](int64_t first, int64_t end, int64_t head, auto heads, int64_t g) {
      score<heads.value>(slots, length, row, first, end, head, g);
    });
    for (int64_t head = 0; head < shape.heads; head++) normalise(&scores[head * row], length, row);
    by_blocks(length, [&](int64_t first, int64_t end, int64_t head, auto heads, int64_t g) {
      mix<heads.value>(slots, length, row, first, end, head, g, upcoming, upcoming_length);
    });
    for (int64_t i = 0; i < shape.heads * shape.size; i += LANES) store(out + i, load(&sums[i]));
  }

  // All heads work on a few places before the next ones, so that memory is read evenly; of the
  // query heads that share a key, as many at once as fit into registers.
  template <typename Work>
  void by_blocks(int64_t length, const Work& work) {
    for (int64_t first = 0; first < length; first += BLOCK) {
      int64_t end = std::min(first + BLOCK, length);
      for (int64_t head = 0; head < shape.kv_heads; head++) {
        int64_t g = 0;
        for (; g + 4 <= share; g += 4)
          work(first, end, head, std::integral_constant<int, 4>(), g);
        if (share - g == 3) work(first, end, head, std::integral_constant<int, 3>(), g);
        if (share - g == 2) work(first, end, head, std::integral_constant<int, 2>(), g);
        if (share - g == 1) work(first, end, head, std::integral_constant<int, 1>(), g);
      }
    }
  }

  template <int HEADS>
  void score(const int32_t* slots, int64_t length, int64_t row, int64_t first, int64_t end,
             int64_t head, int64_t g) {
    const float* mine = &queries[(head * share + g) * shape.size];
    float* to = &scores[(head * share + g) * row];
    const T* pool = keys + head * shape.size;
    // A row of scores has room for the places beyond the end, which repeat the last key.
    for (int64_t t = first; t < end; t += 4) {
      const T* key[4];
      for (int64_t n = 0; n < 4; n++) {
        key[n] = pool + slots[std::min(t + n, length - 1)] * key_stride;
        if (g == 0) ahead(pool, slots, t + n, length, values + head * shape.size, slots, length);
      }
      Floats product[HEADS][4] = {};
      for (int i = 0; i < vectors(); i++) {
        Floats part[4];
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) part[n] = load(key[n] + i * LANES);
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) {
          Floats query = load(mine + h * shape.size + i * LANES);
#pragma GCC unroll 4
          for (int n = 0; n < 4; n++) product[h][n] += part[n] * query;
        }
      }
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; h++) sum_four(product[h], to + h * row + t);
    }
  }

  // Slots are scattered: the processor does not see by itself what is read a block later, in
  // `pool`, or beyond the end in `later`.
  void ahead(const T* pool, const int32_t* slots, int64_t t, int64_t length, const T* later,
             const int32_t* later_slots, int64_t later_length) {
    const T* next;
    if (t + BLOCK < length)
      next = pool + slots[t + BLOCK] * key_stride;
    else if (t + BLOCK - length < later_length)
      next = later + later_slots[t + BLOCK - length] * key_stride;
    else
      return;
    for (int64_t i = 0; i < shape.size; i += 64 / (int64_t)sizeof(T)) __builtin_prefetch(next + i);
  }

  static void normalise(float* row, int64_t length, int64_t padded_length) {
    float top = row[0];
    for (int64_t t = 1; t < length; t++) top = row[t] > top ? row[t] : top;
    for (int64_t t = length; t < padded_length; t++) row[t] = -1e30f;
    Floats total{};
    for (int64_t t = 0; t < padded_length; t += LANES) {
      Floats weight = exponential(load(row + t) - top);
      store(row + t, weight);
      total += weight;
    }
    Floats inverse = broadcast(1.0f / sum(total));
    for (int64_t t = 0; t < padded_length; t += LANES) store(row + t, load(row + t) * inverse);
  }

  template <int HEADS>
  void mix(const int32_t* slots, int64_t length, int64_t row, int64_t begin, int64_t end,
           int64_t head, int64_t g, const int32_t* upcoming, int64_t upcoming_length) {
    constexpr int AT_ONCE = VECTORS == 0 ? 1 : VECTORS > 4 ? 4 : VECTORS;
    const float* weights = &scores[(head * share + g) * row];
    float* to = &sums[(head * share + g) * shape.size];
    const T* pool = values + head * shape.size;
    for (int first = 0; first < vectors(); first += AT_ONCE) {
      Floats kept[HEADS][AT_ONCE];
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
        for (int i = 0; i < AT_ONCE; i++)
          kept[h][i] = load(to + h * shape.size + (first + i) * LANES);
      for (int64_t t = begin; t < end; t++) {
        const T* value = pool + slots[t] * key_stride + first * LANES;
        if (g == 0 && first == 0)
          ahead(pool, slots, t, length, keys + head * shape.size, upcoming, upcoming_length);
#pragma GCC unroll 4
        for (int i = 0; i < AT_ONCE; i++) {
          Floats part = load(value + i * LANES);
#pragma GCC unroll 4
          for (int h = 0; h < HEADS; h++) kept[h][i] += part * weights[h * row + t];
        }
      }
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
        for (int i = 0; i < AT_ONCE; i++)
          store(to + h * shape.size + (first + i) * LANES, kept[h][i]);
    }
  }
};

template <typename T, int VECTORS>
void run(const Shape& shape, const T* query, T* out, const T* keys, const T* values,
         const int32_t* table, int64_t table_stride, const int64_t* rows, const int64_t* query_lens,
         const int64_t* key_lens, int64_t requests) {
  int64_t longest = 0;
  for (int64_t r = 0; r < requests; r++) longest = std::max(longest, key_lens[r]);
  Attention<T, VECTORS> attention(shape, keys, values, longest);
  for (int64_t r = 0; r < requests; r++) {
    int64_t queries = query_lens ? query_lens[r] : 1;
    const int32_t* slots = table + rows[r] * table_stride;
    bool is_last = r + 1 == requests;
    const int32_t* upcoming = is_last ? nullptr : table + rows[r + 1] * table_stride;
    for (int64_t q = 0; q < queries; q++) {
      attention.attend(query, out, slots, key_lens[r] - queries + q + 1, upcoming,
                       is_last || q + 1 < queries ? 0 : key_lens[r + 1]);
      query += shape.query_stride;
      out += shape.heads * shape.size;
    }
  }
}

template <typename T, typename... Rest>
int choose(const Shape& shape, Rest... rest) {
  switch (shape.size) {
    case 16: run<T, 1>(shape, rest...); return 0;
    case 32: run<T, 2>(shape, rest...); return 0;
    case 64: run<T, 4>(shape, rest...); return 0;
    case 128: run<T, 8>(shape, rest...); return 0;
  }
  if (shape.size % LANES) return 1;
  run<T, 0>(shape, rest...);
  return 0;
}

template <typename T>
void store_rows(const T* from, int64_t stride, T* pool, const int64_t* slots, int64_t rows,
                int64_t width) {
  for (int64_t row = 0; row < rows; row++)
    std::memcpy(pool + slots[row] * width, from + row * stride, width * sizeof(T));
}

}  // namespace

extern "C" {

// query: rows of query_stride elements; out: [queries, heads, size]; keys, values: [slots, kv_heads,
// size]; table: rows of table_stride slots; rows, key_lens: [requests]; query_lens: the same, or
// null for one query each. Returns 1 for a size that is not supported.
int engine_attend(int dtype, const void* query, int64_t query_stride, void* out, const void* keys,
                  const void* values, const int32_t* table, int64_t table_stride,
                  const int64_t* rows, const int64_t* query_lens, const int64_t* key_lens,
                  int64_t requests, int64_t heads, int64_t kv_heads, int64_t size, float scale) {
  Shape shape{heads, kv_heads, size, query_stride, scale};
  if (dtype)
    return choose<Bfloat16>(shape, (const Bfloat16*)query, (Bfloat16*)out, (const Bfloat16*)keys,
                            (const Bfloat16*)values, table, table_stride, rows, query_lens,
                            key_lens, requests);
  return choose<float>(shape, (const float*)query, (float*)out, (const float*)keys,
                       (const float*)values, table, table_stride, rows, query_lens, key_lens,
                       requests);
}

// Writes rows of `width` elements into the slots of both pools.
void engine_store(int dtype, const void* keys, int64_t key_stride, const void* values,
                  int64_t value_stride, void* key_pool, void* value_pool, const int64_t* slots,
                  int64_t rows, int64_t width) {
  if (dtype) {
    store_rows((const Bfloat16*)keys, key_stride, (Bfloat16*)key_pool, slots, rows, width);
    store_rows((const Bfloat16*)values, value_stride, (Bfloat16*)value_pool, slots, rows, width);
  } else {
    store_rows((const float*)keys, key_stride, (float*)key_pool, slots, rows, width);
    store_rows((const float*)values, value_stride, (float*)value_pool, slots, rows, width);
  }
}
}
