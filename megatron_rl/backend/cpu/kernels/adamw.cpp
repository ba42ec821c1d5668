// One AdamW update of many tensors, each array read once.
//
// Called by megatron_rl/backend/cpu/adam.py. Source: arXiv 1711.05101, algorithm 2.

#include <cmath>

extern "C" void adamw(long tensors, float* const* params, const float* const* grads,
                      float* const* firsts, float* const* seconds, const long* sizes, float decay,
                      float step_size, float beta1, float beta2, float correction, float eps) {
    for (long t = 0; t < tensors; t++) {
        float *param = params[t], *first = firsts[t], *second = seconds[t];
        const float* grad = grads[t];
#pragma omp simd
        for (long i = 0; i < sizes[t]; i++) {
            const float g = grad[i];
            const float m = first[i] + (1 - beta1) * (g - first[i]);
            const float v = second[i] * beta2 + (1 - beta2) * g * g;
            first[i] = m;
            second[i] = v;
            param[i] = param[i] * decay - step_size * (m / (std::sqrt(v) / correction + eps));
        }
    }
}
