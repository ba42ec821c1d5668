// What logprobs need of rows of logits, and the gradient of logits in their place.
//
// Called by megatron_rl/backend/softmax.py. Logits are float32 or bfloat16, all else is float32. A
// row stays in the processor's caches between its passes, and no other row of its size is needed.

#include "trainer_math.h"

namespace {

template <typename T>
void sums_of(const T* logits, const long* targets, float* maxima, float* sums, float* weighted,
             float* chosen, long rows, long ids, float inverse_temperature) {
    for (long r = 0; r < rows; r++) {
        const T* row = logits + r * ids;
        float most = widen(row[0]);
#pragma omp simd reduction(max : most)
        for (long i = 0; i < ids; i++) most = widen(row[i]) > most ? widen(row[i]) : most;
        most *= inverse_temperature;
        float sum = 0, along = 0;
#pragma omp simd reduction(+ : sum, along)
        for (long i = 0; i < ids; i++) {
            const float below = widen(row[i]) * inverse_temperature - most;
            const float e = exp_of(below);
            sum += e;
            along += e * below;
        }
        maxima[r] = most;
        sums[r] = sum;
        weighted[r] = along;
        chosen[r] = widen(row[targets[r]]) * inverse_temperature - most;
    }
}

template <typename T>
void gradient_of(T* logits, const long* targets, const float* log_z, const float* slopes,
                 const float* target_slopes, const float* bonuses, const float* entropies,
                 long rows, long ids, float inverse_temperature) {
    for (long r = 0; r < rows; r++) {
        T* row = logits + r * ids;
        const float slope = slopes[r], shift = log_z[r], bonus = bonuses[r];
        const float target = widen(row[targets[r]]) * inverse_temperature - shift;
        const float target_slope = bonus == 0 ? slope : slope + bonus * (target + entropies[r]);
        // Apart, as most objectives have no bonus.
        if (bonus == 0) {
#pragma omp simd
            for (long i = 0; i < ids; i++)
                row[i] = narrow<T>(-slope * exp_of(widen(row[i]) * inverse_temperature - shift));
        } else {
#pragma omp simd
            for (long i = 0; i < ids; i++) {
                const float below = widen(row[i]) * inverse_temperature - shift;
                const float along = slope + bonus * (below + entropies[r]);
                row[i] = narrow<T>(-along * exp_of(below));
            }
        }
        row[targets[r]] = narrow<T>(target_slopes[r] - target_slope * exp_of(target));
    }
}

}  // namespace

extern "C" {

// Of each row: the largest logit over the temperature; relative to it, the sums of exp and of
// exp * logit, and the target's logit.
void softmax_sums(const void* logits, const long* targets, float* maxima, float* sums,
                  float* weighted, float* chosen, long rows, long ids, float inverse_temperature,
                  int is_bfloat16) {
    if (is_bfloat16)
        sums_of((const bfloat16*)logits, targets, maxima, sums, weighted, chosen, rows, ids,
                inverse_temperature);
    else
        sums_of((const float*)logits, targets, maxima, sums, weighted, chosen, rows, ids,
                inverse_temperature);
}

// In place of each logit: -slope * softmax, plus the target's slope where it is the target, and
// -bonus * softmax * (log softmax + entropy).
void softmax_gradient(void* logits, const long* targets, const float* log_z, const float* slopes,
                      const float* target_slopes, const float* bonuses, const float* entropies,
                      long rows, long ids, float inverse_temperature, int is_bfloat16) {
    if (is_bfloat16)
        gradient_of((bfloat16*)logits, targets, log_z, slopes, target_slopes, bonuses,
                    entropies, rows, ids, inverse_temperature);
    else
        gradient_of((float*)logits, targets, log_z, slopes, target_slopes, bonuses,
                    entropies, rows, ids, inverse_temperature);
}
}
