/* Codecs in one pass. Every function has a twin in in_torch.py that gives the same bits.
 *
 * A message is a float32 for every block of values, then a row of bytes for every block, over all
 * runs; a run's last block may be shorter. A row
 * of q bytes is cut into planes: byte i holds the codes of elements i, i + q, i + 2q, ... so that
 * neighbours stay neighbours and loops need no shuffles. With 1, 2 and 4 planes a code has 8, 4
 * and 2 bits; with 5 it is one of three, a digit to base 3.
 */
#include "interface.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define SMALLEST_SCALE 0x1p-126f /* a smaller one might be flushed to zero, and divide by it */

typedef int32_t __attribute__((may_alias)) bits_t;

typedef struct {
    int stochastic;
    uint32_t first, second;
} draw_t;

/* The largest magnitude's bits: for floats that are >= 0, bits sort as the values do. */
INLINE int32_t largest_bits(const float *x, int64_t count) {
    const bits_t *bits = (const bits_t *)x;
    int32_t top = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t magnitude = bits[i] & 0x7fffffff;
        top = magnitude > top ? magnitude : top;
    }
    return top;
}

LOOP int all_finite(const float *x, int64_t count) {
    return largest_bits(x, count) < 0x7f800000;
}

/* A number in [0, 1) that depends on the key and the element's index only. */
INLINE float uniform(uint32_t index, draw_t draw) {
    uint32_t h = index * 0x9E3779B1u + draw.first;
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13)) + draw.second;
    h *= 0xC2B2AE35u;
    h ^= h >> 16;
    return (float)(int32_t)(h >> 8) * 0x1p-24f;
}

/* What a digit of a plane counts. */
INLINE int worth(int planes, int plane) {
    int value = 1;
    for (int i = 0; i < plane; i++) value *= planes == TRITS ? 3 : 1 << (8 / planes);
    return value;
}

INLINE void pack_codes(const uint8_t *codes, int64_t bytes, int planes, uint8_t *row) {
    for (int64_t i = 0; i < bytes; i++) {
        uint8_t packed = codes[i];
        for (int plane = 1; plane < planes; plane++)
            packed += (uint8_t)(codes[i + plane * bytes] * worth(planes, plane));
        row[i] = packed;
    }
}

/* Products of 16 more bits in place of divisions, which are no vector instructions. */
static const int32_t THIRDS[TRITS] = {65536, 21846, 7282, 2428, 810};

INLINE int32_t trit_of(int32_t packed, int32_t thirds) {
    int32_t rest = (packed * thirds) >> 16;
    return rest - 3 * ((rest * THIRDS[1]) >> 16);
}

/* Uniform steps: code - bias is the number of steps. */
INLINE void steps_of(const float *x, int64_t count, int64_t index, int most, int bias,
                     draw_t draw, float *scale_out, uint8_t *codes) {
    int32_t top = largest_bits(x, count);
    float absmax;
    memcpy(&absmax, &top, 4);
    float scale = absmax / (float)most;
    scale = scale < SMALLEST_SCALE ? SMALLEST_SCALE : scale;
    float limit = nextafterf(FLT_MAX / (float)most, 0.0f); /* so that most * scale is finite */
    scale = scale > limit ? limit : scale;
    for (int64_t i = 0; i < count; i++) {
        float ratio = x[i] / scale;
        int32_t step;
        if (draw.stochastic) {
            float raised = ratio + uniform((uint32_t)(index + i), draw);
            step = (int32_t)raised;
            step -= (float)step > raised; /* floorf, which would not be a vector instruction */
        } else {
            step = (int32_t)rintf(ratio);
        }
        step = step > most ? most : step;
        step = step < -most ? -most : step;
        codes[i] = (uint8_t)(step + bias);
    }
    *scale_out = scale;
}

/* The root mean square; squares are added in halves, an order that vectors and torch share. */
INLINE float rms_of(const float *x, int64_t count) {
    double sums[LARGEST_BLOCK / 2 + 1];
    int64_t width = 1;
    while (2 * width < count) width *= 2;
    for (int64_t i = 0; i < width; i++) sums[i] = i < count ? (double)x[i] * (double)x[i] : 0.0;
    for (int64_t i = 0; i < count - width; i++)
        sums[i] += (double)x[i + width] * (double)x[i + width];
    for (width /= 2; width > 0; width /= 2)
        for (int64_t i = 0; i < width; i++) sums[i] += sums[i + width];
    return (float)sqrt(sums[0] / (double)count);
}

INLINE float outer_level(float rms, int planes) {
    float level = (planes == TRITS ? 1.224f : 1.510f) * rms;
    return level > FLT_MAX ? FLT_MAX : level;
}

/* Three levels, -outer, 0 and outer; the best for a Gaussian too. What is zero stays zero. */
INLINE void signs_of(const float *x, int64_t count, int64_t index, draw_t draw,
                     float *scale_out, uint8_t *codes) {
    float rms = rms_of(x, count);
    float outer = outer_level(rms, TRITS), border = 0.612f * rms;
    for (int64_t i = 0; i < count; i++) {
        float value = x[i];
        int32_t code;
        if (draw.stochastic) {
            int32_t base = value < 0.0f ? 0 : 1;
            float low = base == 0 ? -outer : 0.0f;
            code = base + (uniform((uint32_t)(index + i), draw) * outer < value - low);
        } else {
            code = 1 + (value > border) - (value < -border);
        }
        codes[i] = (uint8_t)code;
    }
    *scale_out = rms;
}

/* Four levels, -outer, -inner, inner, outer: those of Lloyd and Max for a Gaussian. */
INLINE void levels_of(const float *x, int64_t count, int64_t index, draw_t draw,
                      float *scale_out, uint8_t *codes) {
    float rms = rms_of(x, count);
    float inner = 0.4528f * rms, outer = outer_level(rms, 4), border = 0.9816f * rms;
    for (int64_t i = 0; i < count; i++) {
        float value = x[i];
        int32_t code;
        if (draw.stochastic) {
            int32_t base = value < -inner ? 0 : value < inner ? 1 : 2;
            float low = base == 0 ? -outer : base == 1 ? -inner : inner;
            float width = base == 1 ? 2.0f * inner : outer - inner;
            code = base + (uniform((uint32_t)(index + i), draw) * width < value - low);
        } else {
            code = 2 - (value < 0.0f) + (value > border) - (value < -border);
        }
        codes[i] = (uint8_t)code;
    }
    *scale_out = rms;
}

/* One block of at most LARGEST_BLOCK values; returns how many bytes its row has. */
INLINE int64_t encode_block(const float *x, int64_t length, int64_t start, int planes, draw_t draw,
                            float *scale, uint8_t *row) {
    uint8_t codes[LARGEST_BLOCK + 8];
    int bias = planes == TRITS ? 1 : 1 << (8 / planes - 1);
    int64_t bytes = (length + planes - 1) / planes;
    uint8_t *place = planes == 1 ? row : codes;
    memset(codes + length, bias, 8);
    if (planes == TRITS)
        signs_of(x, length, start, draw, scale, place);
    else if (planes == 4)
        levels_of(x, length, start, draw, scale, place);
    else
        steps_of(x, length, start, bias - 1, bias, draw, scale, place);
    if (planes != 1) pack_codes(codes, bytes, planes, row);
    return bytes;
}

INLINE void encode(const float *x, const int64_t *lengths, int64_t runs, int64_t block, int planes,
                   int stochastic, const Chance *chances, float *scales, uint8_t *rows) {
    for (int64_t run = 0; run < runs; run++) {
        draw_t draw = {0, 0, 0};
        int64_t index = 0;
        if (stochastic) {
            draw = (draw_t){1, chances[run].first, chances[run].second};
            index = chances[run].index;
        }
        for (int64_t start = 0; start < lengths[run]; start += block) {
            int64_t length = lengths[run] - start < block ? lengths[run] - start : block;
            rows += encode_block(x + start, length, index + start, planes, draw, scales++, rows);
        }
        x += lengths[run];
    }
}

INLINE float value_of(int code, int planes, float scale, float outer) {
    if (planes == TRITS) return (float)(code - 1) * outer;
    if (planes != 4) return (float)(code - (1 << (8 / planes - 1))) * scale;
    float size = (code == 1 || code == 2) ? scale : outer;
    return code < 2 ? -size : size;
}

INLINE int64_t decode_block(float rms, const uint8_t *row, int64_t length, int planes, int adds,
                            float share, float *out) {
    int64_t bytes = (length + planes - 1) / planes;
    float scale = planes == 4 ? 0.4528f * rms : rms;
    float outer = outer_level(rms, planes);
    for (int plane = 0; plane < planes; plane++) {
        float *part = out + plane * bytes;
        int64_t some = length - plane * bytes < bytes ? length - plane * bytes : bytes;
        int shift = plane * 8 / planes, mask = (1 << (8 / planes)) - 1;
        int32_t thirds = THIRDS[plane];
        for (int64_t i = 0; i < some; i++) {
            int code = planes == TRITS ? trit_of(row[i], thirds) : (row[i] >> shift) & mask;
            float value = value_of(code, planes, scale, outer);
            part[i] = adds ? part[i] + share * value : share * value;
        }
    }
    return bytes;
}

INLINE void decode(const float *scales, const uint8_t *rows, const int64_t *lengths, int64_t runs,
                   int64_t count, int64_t block, int planes, int adds, float share, float *out) {
    for (int64_t run = 0; run < runs && count > 0; run++) {
        int64_t most = lengths[run] < count ? lengths[run] : count;
        for (int64_t start = 0; start < most; start += block) {
            int64_t length = most - start < block ? most - start : block;
            rows += decode_block(*scales++, rows, length, planes, adds, share, out + start);
        }
        out += most;
        count -= most;
    }
}

/* One copy of the loops for every number of planes, which the compiler then knows. */
#define FOR_PLANES(planes, call) \
    switch (planes) {            \
    case 1:                      \
        call(1);                 \
        break;                   \
    case 2:                      \
        call(2);                 \
        break;                   \
    case 4:                      \
        call(4);                 \
        break;                   \
    default:                     \
        call(TRITS);             \
    }

LOOP void encode_blocks(int planes, const float *x, const int64_t *lengths, int64_t runs,
                        int64_t block, const Chance *chances, float *scales, uint8_t *rows) {
#define DRAWN(p) encode(x, lengths, runs, block, p, 1, chances, scales, rows)
#define NEAREST(p) encode(x, lengths, runs, block, p, 0, chances, scales, rows)
    if (chances)
        FOR_PLANES(planes, DRAWN)
    else
        FOR_PLANES(planes, NEAREST)
}

LOOP void decode_blocks(int planes, const float *scales, const uint8_t *rows,
                        const int64_t *lengths, int64_t runs, int64_t count, int64_t block,
                        float share, float *out) {
#define DECODE(p) decode(scales, rows, lengths, runs, count, block, p, 0, share, out)
    FOR_PLANES(planes, DECODE)
}

LOOP void add_blocks(int planes, const float *scales, const uint8_t *rows, const int64_t *lengths,
                     int64_t runs, int64_t count, int64_t block, float share, float *out) {
#define ADD(p) decode(scales, rows, lengths, runs, count, block, p, 1, share, out)
    FOR_PLANES(planes, ADD)
}

INLINE int64_t count_from(const bits_t *x, int64_t count, int32_t least) {
    int32_t found = 0;
    for (int64_t i = 0; i < count; i++) found += (x[i] & 0x7fffffff) >= least;
    return found;
}

/* The bits of the wanted-th largest magnitude, found bit by bit: a chunk stays in the cache, and
 * counting is a vector loop. */
INLINE int32_t border_of(const bits_t *x, int64_t count, int64_t wanted) {
    int32_t border = 0;
    for (int bit = 30; bit >= 0; bit--) {
        int32_t higher = border | (int32_t)(1u << bit);
        if (count_from(x, count, higher) >= wanted) border = higher;
    }
    return border;
}

/* Places in chunks, one after the other; two of 12 bits take three bytes. */
INLINE void put_place(uint8_t *places, int64_t i, int64_t chunk, uint32_t place) {
    if (chunk > SHORT_CHUNK) {
        places[2 * i] = (uint8_t)place;
        places[2 * i + 1] = (uint8_t)(place >> 8);
        return;
    }
    uint8_t *at = places + i / 2 * 3 + i % 2;
    if (i % 2 == 0) {
        at[0] = (uint8_t)place;
        at[1] = (uint8_t)(place >> 8);
    } else {
        at[0] |= (uint8_t)(place << 4);
        at[1] = (uint8_t)(place >> 4);
    }
}

INLINE uint32_t get_place(const uint8_t *places, int64_t i, int64_t chunk) {
    if (chunk > SHORT_CHUNK) return places[2 * i] | (uint32_t)places[2 * i + 1] << 8;
    const uint8_t *at = places + i / 2 * 3 + i % 2;
    if (i % 2 == 0) return at[0] | ((uint32_t)at[1] & 15) << 8;
    return at[0] >> 4 | (uint32_t)at[1] << 4;
}

LOOP void encode_topk(const float *x, const int64_t *lengths, int64_t runs, int64_t chunk,
                      const int32_t *kept, float *values, uint8_t *places) {
    int64_t total = 0;
    for (int64_t run = 0; run < runs; run++) {
        for (int64_t start = 0; start < lengths[run]; start += chunk) {
            int64_t length = lengths[run] - start < chunk ? lengths[run] - start : chunk;
            const bits_t *bits = (const bits_t *)(x + start);
            int64_t last = total + kept[length];
            int32_t border = border_of(bits, length, kept[length]);
            int64_t ties = kept[length] - count_from(bits, length, border + 1);
            for (int64_t i = 0; i < length && total < last; i++) {
                int32_t magnitude = bits[i] & 0x7fffffff;
                if (magnitude < border || (magnitude == border && ties-- <= 0)) continue;
                put_place(places, total, chunk, (uint32_t)i);
                values[total++] = x[start + i];
            }
        }
        x += lengths[run];
    }
}

LOOP void add_topk(const float *values, const uint8_t *places, const int64_t *lengths, int64_t runs,
                   int64_t count, int64_t chunk, const int32_t *kept, float share, float *out) {
    int64_t total = 0;
    for (int64_t run = 0; run < runs && count > 0; run++) {
        int64_t most = lengths[run] < count ? lengths[run] : count;
        for (int64_t start = 0; start < most; start += chunk) {
            int64_t length = most - start < chunk ? most - start : chunk;
            for (int64_t last = total + kept[length]; total < last; total++)
                out[start + get_place(places, total, chunk)] += share * values[total];
        }
        out += most;
        count -= most;
    }
}
