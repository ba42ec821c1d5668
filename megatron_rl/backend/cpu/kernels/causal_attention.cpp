// Causal attention within packed sequences, forward and backward, with rotary positions.
//
// Called by megatron_rl/backend/cpu/packed_attention.py. Sums are in float32. A block of queries sees
// the keys up to its end alone, and no probabilities are kept: the backward pass computes them
// again from the logarithm of their denominators.

#include <algorithm>
#include <cmath>
#include <vector>

#include "trainer_math.h"

// Head h of token t stands at t * token + (h / (heads / groups)) * group + (h % ...) * dim.
struct Heads {
    void* data;
    long token, group;
};

struct Shape {
    int sequences, heads, groups, dim;
    int window;       // positions before its own that a query sees; -1: all
    float scale;
    const int* bounds;  // [sequences + 1]
    const float* cosines;  // [longest, dim / 2]; null: positions are not rotated
    const float* sines;
};

namespace {

constexpr int BLOCK = 16;  // queries

struct Panels {
    std::vector<float> key, key_t, value, value_t, grad_key, grad_value;
    std::vector<float> query, scores, grad_scores, out, grad_out;
};
thread_local Panels panels;

inline void rotate(float* row, const Shape& s, int position, float sign) {
    if (!s.cosines) return;
    const int half = s.dim / 2;
    const float* cosine = s.cosines + long(position) * half;
    const float* sine = s.sines + long(position) * half;
#pragma omp simd
    for (int d = 0; d < half; d++) {
        float low = row[d], high = row[d + half], turn = sign * sine[d];
        row[d] = low * cosine[d] - high * turn;
        row[d + half] = high * cosine[d] + low * turn;
    }
}

template <typename T>
inline void read(const T* from, float* row, int dim) {
#pragma omp simd
    for (int d = 0; d < dim; d++) row[d] = widen(from[d]);
}

template <typename T>
inline void write(const float* row, T* to, int dim) {
#pragma omp simd
    for (int d = 0; d < dim; d++) to[d] = narrow<T>(row[d]);
}

// What is rotated is rounded as engines round it, whose caches hold rotated keys.
template <typename T>
inline void read_rotated(const T* from, float* row, const Shape& s, int position) {
    read(from, row, s.dim);
    if (!s.cosines) return;
    rotate(row, s, position, 1);
#pragma omp simd
    for (int d = 0; d < s.dim; d++) row[d] = widen(narrow<T>(row[d]));
}

void transpose(const float* from, long width, int rows, int columns, float* to, long length) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) to[c * length + r] = from[r * width + c];
}

template <typename T>
struct Pass {
    const Shape& s;
    const int width;  // a row of a panel: dim, padded with zeros
    const int ratio;
    int start, length, columns;  // of the sequence; columns: its keys, padded

    explicit Pass(const Shape& shape)
        : s(shape), width(round_up(shape.dim, WIDTH)), ratio(shape.heads / shape.groups) {}

    T* at(const Heads& h, int group, int head, int position) const {
        return (T*)h.data + (start + position) * h.token + group * h.group + head * s.dim;
    }

    void begin(int sequence) {
        start = s.bounds[sequence];
        length = s.bounds[sequence + 1] - start;
        columns = round_up(length, BLOCK);
    }

    void load_keys(const Heads& key, const Heads& value, int group, bool is_backward) {
        const size_t size = size_t(columns) * width;
        panels.key.assign(size, 0);
        panels.value.assign(size, 0);
        panels.key_t.assign(size, 0);
        for (int j = 0; j < length; j++) {
            read_rotated(at(key, group, 0, j), &panels.key[long(j) * width], s, j);
            read(at(value, group, 0, j), &panels.value[long(j) * width], s.dim);
        }
        transpose(panels.key.data(), width, length, s.dim, panels.key_t.data(), columns);
        if (!is_backward) return;
        panels.value_t.assign(size, 0);
        transpose(panels.value.data(), width, length, s.dim, panels.value_t.data(), columns);
        panels.grad_key.assign(size, 0);
        panels.grad_value.assign(size, 0);
    }

    // Queries of a block times the scale, then their scores of keys [first, last).
    void score(const Heads& query, int group, int head, int top, int first, int last) {
        std::fill(panels.query.begin(), panels.query.end(), 0.0f);
        for (int i = 0; i < BLOCK && top + i < length; i++) {
            float* row = &panels.query[i * width];
            read_rotated(at(query, group, head, top + i), row, s, top + i);
            for (int d = 0; d < s.dim; d++) row[d] *= s.scale;
        }
        multiply(panels.query.data(), width, 1, panels.key_t.data() + first, columns,
                 panels.scores.data() + first, columns, BLOCK, last - first, s.dim, false);
    }

    int first_seen(int position) const {
        return s.window < 0 ? 0 : std::max(0, position - s.window);
    }

    void prepare_blocks() {
        panels.query.resize(size_t(BLOCK) * width);
        panels.out.resize(size_t(BLOCK) * width);
        panels.grad_out.resize(size_t(BLOCK) * width);
        panels.scores.resize(size_t(BLOCK) * columns);
        panels.grad_scores.resize(size_t(BLOCK) * columns);
    }

    // Probabilities in place of scores, zero where a query does not see a key.
    void forward_block(const Heads& query, const Heads& out, float* log_sums, int group, int head,
                       int top) {
        const int first = first_seen(top) / BLOCK * BLOCK, last = top + BLOCK;
        score(query, group, head, top, first, last);
        float inverse[BLOCK];
        for (int i = 0; i < BLOCK; i++) {
            float* row = &panels.scores[long(i) * columns];
            const int seen = first_seen(top + i), end = top + i + 1;
            float most = row[seen], sum = 0;
#pragma omp simd reduction(max : most)
            for (int j = seen; j < end; j++) most = row[j] > most ? row[j] : most;
#pragma omp simd reduction(+ : sum)
            for (int j = seen; j < end; j++) sum += row[j] = exp_of(row[j] - most);
            std::fill(row + first, row + seen, 0.0f);
            std::fill(row + end, row + last, 0.0f);
            inverse[i] = 1 / sum;
            if (top + i < length)
                log_sums[long(start + top + i) * s.heads + group * ratio + head] =
                    most + std::log(sum);
        }
        multiply(panels.scores.data() + first, columns, 1, &panels.value[long(first) * width],
                 width, panels.out.data(), width, BLOCK, width, last - first, false);
        for (int i = 0; i < BLOCK && top + i < length; i++) {
            float* row = &panels.out[i * width];
            for (int d = 0; d < s.dim; d++) row[d] *= inverse[i];
            write(row, at(out, group, head, top + i), s.dim);
        }
    }

    // Probabilities, and the gradients of scores over them: P and P * (dP - sum(dO * O)).
    void differentiate(const Heads& out, const Heads& grad_out, const float* log_sums, int group,
                       int head, int top, int first, int last) {
        float share[BLOCK] = {};
        std::fill(panels.grad_out.begin(), panels.grad_out.end(), 0.0f);
        for (int i = 0; i < BLOCK && top + i < length; i++) {
            float* grad = &panels.grad_out[i * width];
            read(at(grad_out, group, head, top + i), grad, s.dim);
            const T* value = at(out, group, head, top + i);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int d = 0; d < s.dim; d++) sum += grad[d] * widen(value[d]);
            share[i] = sum;
        }
        multiply(panels.grad_out.data(), width, 1, panels.value_t.data() + first, columns,
                 panels.grad_scores.data() + first, columns, BLOCK, last - first, s.dim, false);
        for (int i = 0; i < BLOCK; i++) {
            float* row = &panels.scores[long(i) * columns];
            float* grad = &panels.grad_scores[long(i) * columns];
            const bool is_real = top + i < length;
            const int seen = is_real ? first_seen(top + i) : last, end = is_real ? top + i + 1 : last;
            const float log_sum =
                is_real ? log_sums[long(start + top + i) * s.heads + group * ratio + head] : 0;
            const float own = share[i];
#pragma omp simd
            for (int j = seen; j < end; j++) {
                row[j] = exp_of(row[j] - log_sum);
                grad[j] = row[j] * (grad[j] - own);
            }
            for (float* each : {row, grad}) {
                std::fill(each + first, each + seen, 0.0f);
                std::fill(each + end, each + last, 0.0f);
            }
        }
    }

    void backward_block(const Heads& query, const Heads& out, const Heads& grad_out,
                        const float* log_sums, const Heads& grad_query, int group, int head,
                        int top) {
        const int first = first_seen(top) / BLOCK * BLOCK, last = top + BLOCK;
        const int keys = last - first;
        score(query, group, head, top, first, last);
        differentiate(out, grad_out, log_sums, group, head, top, first, last);
        const float* grads = panels.grad_scores.data() + first;
        multiply(panels.scores.data() + first, 1, columns, panels.grad_out.data(), width,
                 &panels.grad_value[long(first) * width], width, keys, width, BLOCK, true);
        multiply(grads, 1, columns, panels.query.data(), width,
                 &panels.grad_key[long(first) * width], width, keys, width, BLOCK, true);
        multiply(grads, columns, 1, &panels.key[long(first) * width], width, panels.out.data(),
                 width, BLOCK, width, keys, false);
        for (int i = 0; i < BLOCK && top + i < length; i++) {
            float* row = &panels.out[i * width];
            for (int d = 0; d < s.dim; d++) row[d] *= s.scale;
            rotate(row, s, top + i, -1);
            write(row, at(grad_query, group, head, top + i), s.dim);
        }
    }

    void store_key_gradients(const Heads& grad_key, const Heads& grad_value, int group) {
        for (int j = 0; j < length; j++) {
            float* row = &panels.grad_key[long(j) * width];
            rotate(row, s, j, -1);
            write(row, at(grad_key, group, 0, j), s.dim);
            write(&panels.grad_value[long(j) * width], at(grad_value, group, 0, j), s.dim);
        }
    }
};

template <typename T>
void forward(const Shape& s, const Heads& query, const Heads& key, const Heads& value,
             const Heads& out, float* log_sums) {
    Pass<T> pass(s);
    for (int sequence = 0; sequence < s.sequences; sequence++) {
        pass.begin(sequence);
        pass.prepare_blocks();
        for (int group = 0; group < s.groups; group++) {
            pass.load_keys(key, value, group, false);
            for (int head = 0; head < pass.ratio; head++)
                for (int top = 0; top < pass.length; top += BLOCK)
                    pass.forward_block(query, out, log_sums, group, head, top);
        }
    }
}

template <typename T>
void backward(const Shape& s, const Heads* inputs, const float* log_sums, const Heads* gradients) {
    const Heads &query = inputs[0], &key = inputs[1], &value = inputs[2];
    Pass<T> pass(s);
    for (int sequence = 0; sequence < s.sequences; sequence++) {
        pass.begin(sequence);
        pass.prepare_blocks();
        for (int group = 0; group < s.groups; group++) {
            pass.load_keys(key, value, group, true);
            for (int head = 0; head < pass.ratio; head++)
                for (int top = 0; top < pass.length; top += BLOCK)
                    pass.backward_block(query, inputs[3], inputs[4], log_sums, gradients[0], group,
                                        head, top);
            pass.store_key_gradients(gradients[1], gradients[2], group);
        }
    }
}

}  // namespace

extern "C" {

// inputs: query, key, value; out and log_sums ([tokens, heads] float32) are written.
void attention_forward(const Shape* s, const Heads* inputs, const Heads* out, float* log_sums,
                       int is_bfloat16) {
    auto run = is_bfloat16 ? forward<bfloat16> : forward<float>;
    run(*s, inputs[0], inputs[1], inputs[2], *out, log_sums);
}

// inputs: query, key, value, result, its gradient; gradients of query, key and value are written.
void attention_backward(const Shape* s, const Heads* inputs, const float* log_sums,
                        const Heads* gradients, int is_bfloat16) {
    auto run = is_bfloat16 ? backward<bfloat16> : backward<float>;
    run(*s, inputs, log_sums, gradients);
}
}
