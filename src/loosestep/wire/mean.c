/* The exact mean in one pass: twins of mean_into() in mean.py, to the bit; and below, trains of
 * buffers through shared memory, as train.py describes them.
 *
 * Sums are kept wider than the data, in the order of the replicas, and rounded once.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 1024 }; /* sums of this many elements stay in the nearest cache */

/* A power of two divides by multiplying, which is exact too, and faster. */
static int by_product(double divisor) {
    int exponent;
    return frexp(divisor, &exponent) == 0.5;
}

/* Sums of a block, in the order of the replicas. Few replicas are added in one pass. */
static void sum_f32(double *restrict total, const float *const *replicas, size_t num,
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

void mean_f32(float *const *outs, size_t num_outs, const float *const *replicas, size_t num,
              const double *weights, double divisor, size_t count) {
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

static inline float widen(uint16_t narrow) {
    const uint32_t bits = (uint32_t)narrow << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static inline uint16_t round_to_bf16(float wide) {
    uint32_t bits;
    memcpy(&bits, &wide, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return wide != wide ? 0x7fc0 : (uint16_t)rounded;
}

void mean_bf16(uint16_t *const *outs, size_t num_outs, const uint16_t *const *replicas, size_t num,
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
        for (size_t o = 0; o < num_outs; o++) memcpy(outs[o] + at, rounded, size * sizeof(uint16_t));
    }
}

/* How far apart the replicas are: sums of squares of (replica - mean), and of the mean. */
void spread_f32(double *sums, const float *const *replicas, size_t num, size_t count) {
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

void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

/* ---- Trains: many buffers, one after the other, through the windows of all neighbours. ---- */

enum { PLACE, DETAIL, OFFERED, REDUCED, TAKEN, SLEEPER, MARKS }; /* the columns of a slot, as in board.py */
enum { WINDOWS = 3, MOST = 64, AHEAD = 32, SPINS = 200, SAMPLE = 256, OFFSET_BITS = 44 };
enum { DONE = 0, WAITING = 1, STRANGE = 2 }; /* what drive() returns */

typedef struct {
    int64_t *mine; /* my row on its board */
    int64_t *told; /* its row on mine */
    char *arena;   /* its windows for trains */
    char **homes;  /* where its resident memory is mapped here, by key */
    int64_t num_homes;
    int64_t member; /* its group rank */
} Neighbour;

typedef struct {
    Neighbour *neighbours;
    int64_t num_neighbours, group_rank, group_size;
    char *arena;
    int64_t window_bytes, slots;
    char **buffers;
    const int64_t *numels, *places; /* places: where a buffer is resident, else -1 */
    int64_t num_buffers, element_bytes;
    const int64_t *numbers, *previous; /* of their slots, and of who used those last; 0: nobody */
    const int64_t *window_numbers;     /* who used each window last; 0: nobody */
    const double *weights;
    double divisor;
    int64_t offered, step, phase, at; /* how far it is */
    int64_t waits_for;                /* the index of a neighbour */
    double deviation, magnitude, samples;
} Train;

static int64_t column_of(const Train *train, int64_t number) {
    return MARKS * (number % train->slots);
}

static void tell(const Neighbour *to, int64_t column, int64_t value) {
    __atomic_store_n(&to->mine[column], value, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&to->mine[column - column % MARKS + SLEEPER], __ATOMIC_SEQ_CST) == value)
        syscall(SYS_futex, &to->mine[column], FUTEX_WAKE, 0x7fffffff, 0, 0, 0);
}

/* Return whether a neighbour has come so far; sleep a little if it has not. */
static int reached(Train *train, int64_t index, int64_t column, int64_t value, double seconds) {
    int64_t *told = train->neighbours[index].told;
    for (int i = 0; i < SPINS; i++)
        if (__atomic_load_n(&told[column], __ATOMIC_ACQUIRE) >= value) return 1;
    const struct timespec limit = {0, (long)(seconds * 1e9)};
    __atomic_store_n(&told[column - column % MARKS + SLEEPER], value, __ATOMIC_SEQ_CST);
    const int64_t now = __atomic_load_n(&told[column], __ATOMIC_SEQ_CST);
    if (now < value) syscall(SYS_futex, &told[column], FUTEX_WAIT, (uint32_t)now, &limit, 0, 0);
    if (__atomic_load_n(&told[column], __ATOMIC_ACQUIRE) >= value) return 1;
    train->waits_for = index;
    return 0;
}

static int all_reached(Train *train, int64_t column, int64_t value, double seconds) {
    for (int64_t n = 0; n < train->num_neighbours; n++)
        if (!reached(train, n, column, value, seconds)) return 0;
    return 1;
}

static char *window(const Train *train, char *arena, int64_t index) {
    return arena + index * train->window_bytes;
}


/* Where the part of a buffer begins that a member owns, in bytes. */
static int64_t part(const Train *train, int64_t i, int64_t member) {
    return train->numels[i] * member / train->group_size * train->element_bytes;
}

static int offer(Train *train, int64_t i, double seconds) {
    const int64_t number = train->numbers[i], slot = column_of(train, number);
    int64_t place = train->places[i];
    if (!all_reached(train, slot + TAKEN, train->previous[i], seconds)) return 0;
    if (place < 0) {
        const int64_t before =
            i >= WINDOWS ? train->numbers[i - WINDOWS] : train->window_numbers[i % WINDOWS];
        if (!all_reached(train, column_of(train, before) + TAKEN, before, seconds)) return 0;
        const int64_t first = part(train, i, train->group_rank);
        const int64_t last = part(train, i, train->group_rank + 1);
        char *room = window(train, train->arena, i % WINDOWS);
        memcpy(room, train->buffers[i], first);
        memcpy(room + last, train->buffers[i] + last,
               train->numels[i] * train->element_bytes - last);
        place = -1 - WINDOWS - i % WINDOWS; /* the first ones are not for trains */
    }
    for (int64_t n = 0; n < train->num_neighbours; n++) {
        train->neighbours[n].mine[slot + PLACE] = place;
        tell(&train->neighbours[n], slot + OFFERED, number);
    }
    return 1;
}

/* Where a neighbour's version of a buffer lies; 0: nowhere that is known here. */
static char *version(const Train *train, const Neighbour *of, int64_t slot) {
    const int64_t place = of->told[slot + PLACE], key = place >> OFFSET_BITS;
    if (place < -WINDOWS) return window(train, of->arena, -1 - place - WINDOWS);
    if (place < 0) return 0;
    if (key < 1 || key >= of->num_homes || !of->homes[key]) return 0;
    return of->homes[key] + (place & (((int64_t)1 << OFFSET_BITS) - 1));
}

static int reduce(Train *train, int64_t i, double seconds) {
    const int64_t number = train->numbers[i], slot = column_of(train, number);
    if (!all_reached(train, slot + OFFERED, number, seconds)) return 0;
    const int64_t first = part(train, i, train->group_rank);
    const int64_t count = (part(train, i, train->group_rank + 1) - first) / train->element_bytes;
    char *mine = train->buffers[i] + first, *replicas[MOST], *outs[MOST + 1] = {mine};
    size_t num_outs = 1;
    int in_windows = 0;
    replicas[train->group_rank] = mine;
    for (int64_t n = 0; n < train->num_neighbours; n++) {
        const Neighbour *from = &train->neighbours[n];
        char *whole = version(train, from, slot);
        if (!whole) return -1;
        replicas[from->member] = whole + first;
        if (from->told[slot + PLACE] < 0)
            in_windows = 1;
        else
            outs[num_outs++] = whole + first;
    }
    if (in_windows && train->places[i] < 0)
        outs[num_outs++] = window(train, train->arena, i % WINDOWS) + first;
    if (train->element_bytes == 4) {
        double sums[2];
        const size_t some = count < SAMPLE ? (size_t)count : SAMPLE;
        spread_f32(sums, (const float *const *)replicas, train->group_size, some);
        train->deviation += sums[0];
        train->magnitude += sums[1] * (double)train->group_size;
        train->samples += (double)some * (double)train->group_size;
        mean_f32((float *const *)outs, num_outs, (const float *const *)replicas,
                 train->group_size, train->weights, train->divisor, count);
    } else
        mean_bf16((uint16_t *const *)outs, num_outs, (const uint16_t *const *)replicas,
                  train->group_size, train->weights, train->divisor, count);
    for (int64_t n = 0; n < train->num_neighbours; n++)
        tell(&train->neighbours[n], slot + REDUCED, number);
    return 1;
}

/* Copy to memory that is not read again soon: past the caches, where lines need not be fetched. */
#if defined(__SSE2__)
#include <immintrin.h>
void copy_home(char *to, const char *from, size_t size) {
    size_t at = (size_t)(-(uintptr_t)to & 63);
    if (at > size) at = size;
    memcpy(to, from, at);
    for (; at + 64 <= size; at += 64)
        for (int i = 0; i < 64; i += 16)
            _mm_stream_si128((__m128i *)(to + at + i),
                             _mm_loadu_si128((const __m128i *)(from + at + i)));
    _mm_sfence();
    memcpy(to + at, from + at, size - at);
}
#else
void copy_home(char *to, const char *from, size_t size) { memcpy(to, from, size); }
#endif

static int collect(Train *train, int64_t i, double seconds) {
    const int64_t number = train->numbers[i], slot = column_of(train, number);
    for (; train->at < train->num_neighbours; train->at++) {
        const Neighbour *from = &train->neighbours[train->at];
        if (!reached(train, train->at, slot + REDUCED, number, seconds)) return 0;
        const int64_t first = part(train, i, from->member);
        const int64_t last = part(train, i, from->member + 1);
        if (train->places[i] < 0)
            copy_home(train->buffers[i] + first, version(train, from, slot) + first, last - first);
    }
    train->at = 0;
    for (int64_t n = 0; n < train->num_neighbours; n++)
        tell(&train->neighbours[n], slot + TAKEN, number);
    return 1;
}

/* Offer buffers: this one, and those that follow it if they need no window. */
static int offer_some(Train *train, double seconds) {
    while (train->offered < train->num_buffers &&
           (train->offered <= train->step ||
            (train->places[train->offered] >= 0 && train->offered < train->step + AHEAD))) {
        if (!offer(train, train->offered, seconds)) return 0;
        train->offered++;
    }
    return 1;
}

/* While one buffer is filled, the one before is summed and the one before that emptied. */
static int one_phase(Train *train, double seconds) {
    const int64_t i = train->step - train->phase;
    if (train->phase == 0) return offer_some(train, seconds);
    if (i < 0 || i >= train->num_buffers) return 1;
    return train->phase == 1 ? reduce(train, i, seconds) : collect(train, i, seconds);
}

/* Go on until all is done, or a neighbour lets wait for longer than some seconds. */
int64_t drive(Train *train, double seconds) {
    for (; train->step < train->num_buffers + 2; train->step++) {
        for (; train->phase < 3; train->phase++) {
            const int went = one_phase(train, seconds);
            if (went < 0) return STRANGE;
            if (!went) return WAITING;
        }
        train->phase = 0;
    }
    const int64_t last = train->numbers[train->num_buffers - 1];
    const int64_t column = column_of(train, last) + TAKEN;
    return all_reached(train, column, last, seconds) ? DONE : WAITING;
}
