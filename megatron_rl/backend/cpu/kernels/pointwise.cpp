// RMSNorm and the gated unit of an MLP, forward and backward, and sums of rows, each in one pass
// over a row.
//
// Called by megatron_rl/backend/{pointwise,folding}.py. Inputs and results are float32 or bfloat16, all else
// is float32.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "trainer_math.h"

namespace {

template <typename T>
void norm_forward(const T* x, const T* weight, T* out, float* inverse, long rows, int width,
                  float eps) {
    for (long r = 0; r < rows; r++) {
        const T* row = x + r * width;
        T* to = out + r * width;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < width; i++) sum += widen(row[i]) * widen(row[i]);
        const float scale = 1 / std::sqrt(sum / width + eps);
        inverse[r] = scale;
#pragma omp simd
        for (int i = 0; i < width; i++) to[i] = narrow<T>(widen(row[i]) * scale * widen(weight[i]));
    }
}

template <typename T>
void norm_backward(const T* x, const T* weight, const T* grad, const float* inverse, T* grad_x,
                   float* grad_weight, long rows, int width) {
    for (long r = 0; r < rows; r++) {
        const T *row = x + r * width, *up = grad + r * width;
        T* to = grad_x + r * width;
        const float scale = inverse[r];
        float along = 0;
#pragma omp simd reduction(+ : along)
        for (int i = 0; i < width; i++) {
            const float part = widen(up[i]) * widen(row[i]);
            along += part * widen(weight[i]);
            grad_weight[i] += part * scale;
        }
        along *= scale * scale * scale / width;
#pragma omp simd
        for (int i = 0; i < width; i++)
            to[i] = narrow<T>(widen(up[i]) * widen(weight[i]) * scale - widen(row[i]) * along);
    }
}

template <typename T>
void gate_forward(const T* x, T* out, long rows, int width) {
    for (long r = 0; r < rows; r++) {
        const T *gate = x + r * 2 * width, *linear = gate + width;
        T* to = out + r * width;
#pragma omp simd
        for (int i = 0; i < width; i++) {
            const float g = widen(gate[i]);
            to[i] = narrow<T>(g / (1 + exp_of(-g)) * widen(linear[i]));
        }
    }
}

template <typename T>
void gate_backward(const T* x, const T* grad, T* grad_x, long rows, int width) {
    for (long r = 0; r < rows; r++) {
        const T *gate = x + r * 2 * width, *linear = gate + width, *up = grad + r * width;
        T *to_gate = grad_x + r * 2 * width, *to_linear = to_gate + width;
#pragma omp simd
        for (int i = 0; i < width; i++) {
            const float g = widen(gate[i]), u = widen(up[i]), l = widen(linear[i]);
            const float sigmoid = 1 / (1 + exp_of(-g));
            const float slope = sigmoid * (1 + g * (1 - sigmoid));
            to_gate[i] = narrow<T>(u * l * slope);
            to_linear[i] = narrow<T>(u * g * sigmoid);
        }
    }
}

// Of each position the sum of its rows: order[bounds[p]] up to order[bounds[p + 1]].
template <typename T>
void row_sums(const T* rows, const long* order, const long* bounds, T* out, long positions,
              int width) {
    std::vector<float> sum(width);
    for (long p = 0; p < positions; p++) {
        T* to = out + p * width;
        if (bounds[p + 1] - bounds[p] == 1) {
            memcpy(to, rows + order[bounds[p]] * width, width * sizeof(T));
            continue;
        }
        float* total = sum.data();
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (long k = bounds[p]; k < bounds[p + 1]; k++) {
            const T* row = rows + order[k] * width;
#pragma omp simd
            for (int i = 0; i < width; i++) total[i] += widen(row[i]);
        }
#pragma omp simd
        for (int i = 0; i < width; i++) to[i] = narrow<T>(total[i]);
    }
}

}  // namespace

extern "C" {

void rms_norm_forward(const void* x, const void* weight, void* out, float* inverse, long rows,
                      int width, float eps, int is_bfloat16) {
    if (is_bfloat16)
        norm_forward((const bfloat16*)x, (const bfloat16*)weight, (bfloat16*)out, inverse, rows,
                     width, eps);
    else
        norm_forward((const float*)x, (const float*)weight, (float*)out, inverse, rows, width, eps);
}

// Adds to grad_weight, [width] float32.
void rms_norm_backward(const void* x, const void* weight, const void* grad, const float* inverse,
                       void* grad_x, float* grad_weight, long rows, int width, int is_bfloat16) {
    if (is_bfloat16)
        norm_backward((const bfloat16*)x, (const bfloat16*)weight, (const bfloat16*)grad, inverse,
                      (bfloat16*)grad_x, grad_weight, rows, width);
    else
        norm_backward((const float*)x, (const float*)weight, (const float*)grad, inverse,
                      (float*)grad_x, grad_weight, rows, width);
}

// out = silu(x[:, :width]) * x[:, width:]
void swiglu_forward(const void* x, void* out, long rows, int width, int is_bfloat16) {
    if (is_bfloat16)
        gate_forward((const bfloat16*)x, (bfloat16*)out, rows, width);
    else
        gate_forward((const float*)x, (float*)out, rows, width);
}

void swiglu_backward(const void* x, const void* grad, void* grad_x, long rows, int width,
                     int is_bfloat16) {
    if (is_bfloat16)
        gate_backward((const bfloat16*)x, (const bfloat16*)grad, (bfloat16*)grad_x, rows, width);
    else
        gate_backward((const float*)x, (const float*)grad, (float*)grad_x, rows, width);
}

// order [rows], bounds [positions + 1]; out [positions, width]
void sum_rows(const void* rows, const long* order, const long* bounds, void* out, long positions,
              int width, int is_bfloat16) {
    if (is_bfloat16)
        row_sums((const bfloat16*)rows, order, bounds, (bfloat16*)out, positions, width);
    else
        row_sums((const float*)rows, order, bounds, (float*)out, positions, width);
}
}
