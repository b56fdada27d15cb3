/* Trains: many buffers, one after the other, through the windows of all neighbours, as
 * comm/reducers/train.py describes them.
 */
#define _GNU_SOURCE
#include "interface.h"

#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { AHEAD = 32, SPINS = 200 }; /* buffers offered early; looks before a rank goes to sleep */

void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

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
    char *mine = train->buffers[i] + first, *replicas[MOST_MEMBERS], *outs[MOST_MEMBERS + 1] = {mine};
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
        const size_t some = count < DRIFT_SAMPLE ? (size_t)count : DRIFT_SAMPLE;
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
