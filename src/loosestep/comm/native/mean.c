/* The exact mean in one pass: twins of mean_into() in comm/reducers/mean.py, to the bit.
 *
 * Sums are kept wider than the data, in the order of the replicas, and rounded once.
 */
#include "interface.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 1024 }; /* sums of this many elements stay in the nearest cache */

/* A power of two divides by multiplying, which is exact too, and faster. */
static int by_product(double divisor) {
    int exponent;
    return frexp(divisor, &exponent) == 0.5;
}

/* Sums of a block, in the order of the replicas. Few replicas are added in one pass. */
INLINE void sum_f32(double *restrict total, const float *const *replicas, size_t num,
                    const double *weights, size_t at, size_t size) {
    const float *a = replicas[0] + at;
    const float *b = num > 1 ? replicas[1] + at : 0, *c = num > 2 ? replicas[2] + at : 0;
    const float *d = num > 3 ? replicas[3] + at : 0;
    const size_t next = weights ? 1 : num > 4 ? 4 : num;
    if (weights)
        for (size_t i = 0; i < size; i++) total[i] = (double)a[i] * weights[0];
    else if (num == 1)
        for (size_t i = 0; i < size; i++) total[i] = (double)a[i];
    else if (num == 2)
        for (size_t i = 0; i < size; i++) total[i] = (double)a[i] + (double)b[i];
    else if (num == 3)
        for (size_t i = 0; i < size; i++) total[i] = (double)a[i] + (double)b[i] + (double)c[i];
    else
        for (size_t i = 0; i < size; i++)
            total[i] = (double)a[i] + (double)b[i] + (double)c[i] + (double)d[i];
    for (size_t r = next; r < num; r++) {
        const float *more = replicas[r] + at;
        const double weight = weights ? weights[r] : 1.0;
        for (size_t i = 0; i < size; i++) total[i] += (double)more[i] * weight;
    }
}

LOOP void mean_f32(float *const *outs, size_t num_outs, const float *const *replicas,
                   size_t num, const double *weights, double divisor, size_t count) {
    double total[BLOCK];
    const double factor = 1.0 / divisor;
    const int multiply = by_product(divisor);
    for (size_t at = 0; at < count; at += BLOCK) {
        const size_t size = count - at < BLOCK ? count - at : BLOCK;
        float *out = outs[0] + at;
        sum_f32(total, replicas, num, weights, at, size);
        if (multiply)
            for (size_t i = 0; i < size; i++) out[i] = (float)(total[i] * factor);
        else
            for (size_t i = 0; i < size; i++) out[i] = (float)(total[i] / divisor);
        for (size_t o = 1; o < num_outs; o++) memcpy(outs[o] + at, out, size * sizeof(float));
    }
}

INLINE float widen(uint16_t narrow) {
    const uint32_t bits = (uint32_t)narrow << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

INLINE uint16_t round_to_bf16(float wide) {
    uint32_t bits;
    memcpy(&bits, &wide, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return wide != wide ? 0x7fc0 : (uint16_t)rounded;
}

INLINE int is_finite_bf16(uint16_t value) { return (value & 0x7f80u) != 0x7f80u; }

/* One mean whose sum float has no room for: bfloat16 has the same range. */
INLINE uint16_t wide_mean_bf16(const uint16_t *const *replicas, size_t num, const double *weights,
                               double divisor, size_t at) {
    double total = 0.0;
    for (size_t r = 0; r < num; r++)
        total += (double)widen(replicas[r][at]) * (weights ? weights[r] : 1.0);
    return round_to_bf16((float)(total / divisor));
}

LOOP void mean_bf16(uint16_t *const *outs, size_t num_outs, const uint16_t *const *replicas, size_t num,
               const double *weights, double divisor, size_t count) {
    float total[BLOCK];
    uint16_t rounded[BLOCK];
    const float by = (float)divisor, factor = (float)(1.0 / divisor);
    const int multiply = by_product(divisor);
    for (size_t at = 0; at < count; at += BLOCK) {
        const size_t size = count - at < BLOCK ? count - at : BLOCK;
        for (size_t r = 0; r < num; r++) {
            const uint16_t *next = replicas[r] + at;
            const float weight = weights ? (float)weights[r] : 1.0f;
            if (r == 0)
                for (size_t i = 0; i < size; i++) total[i] = widen(next[i]) * weight;
            else
                for (size_t i = 0; i < size; i++) total[i] += widen(next[i]) * weight;
        }
        for (size_t i = 0; i < size; i++)
            rounded[i] = round_to_bf16(multiply ? total[i] * factor : total[i] / by);
        int finite = 1;
        for (size_t i = 0; i < size; i++) finite &= is_finite_bf16(rounded[i]);
        for (size_t i = 0; !finite && i < size; i++)
            if (!is_finite_bf16(rounded[i]))
                rounded[i] = wide_mean_bf16(replicas, num, weights, divisor, at + i);
        for (size_t o = 0; o < num_outs; o++) memcpy(outs[o] + at, rounded, size * sizeof(uint16_t));
    }
}

/* How far apart the replicas are: sums of squares of (replica - mean), and of the mean. */
LOOP void spread_f32(double *sums, const float *const *replicas, size_t num, size_t count) {
    double deviation = 0.0, magnitude = 0.0;
    for (size_t i = 0; i < count; i++) {
        double mean = 0.0;
        for (size_t r = 0; r < num; r++) mean += (double)replicas[r][i];
        mean /= (double)num;
        magnitude += mean * mean;
        for (size_t r = 0; r < num; r++) {
            const double apart = (double)replicas[r][i] - mean;
            deviation += apart * apart;
        }
    }
    sums[0] = deviation;
    sums[1] = magnitude;
}
