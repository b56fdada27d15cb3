/* Many small tensors by one call: copied to one buffer and back, looked through. */
#include "interface.h"

#include <string.h>

enum { AHEAD = 8 }; /* pieces lie anywhere: so many are fetched before their turn */

#define FETCH(pieces, i, num, writes) \
    if ((i) + AHEAD < (num)) __builtin_prefetch((pieces)[(i) + AHEAD], writes)

void gather(char *to, const char *const *pieces, const int64_t *sizes, int64_t num) {
    for (int64_t i = 0; i < num; to += sizes[i], i++) {
        FETCH(pieces, i, num, 0);
        memcpy(to, pieces[i], (size_t)sizes[i]);
    }
}

void scatter(const char *from, char *const *pieces, const int64_t *sizes, int64_t num) {
    for (int64_t i = 0; i < num; from += sizes[i], i++) {
        FETCH(pieces, i, num, 1);
        memcpy(pieces[i], from, (size_t)sizes[i]);
    }
}

/* Whether an exponent is all ones: that is an infinity or NaN. */
#define LOOKS_FOR_NONFINITE(name, type)                                   \
    LOOP int name(const type *x, int64_t count, type mask) {              \
        type found = 0;                                                   \
        for (int64_t i = 0; i < count; i++) found |= (x[i] & mask) == mask; \
        return found != 0;                                                \
    }
LOOKS_FOR_NONFINITE(any_nonfinite_16, uint16_t)
LOOKS_FOR_NONFINITE(any_nonfinite_32, uint32_t)
LOOKS_FOR_NONFINITE(any_nonfinite_64, uint64_t)

int64_t find_nonfinite(const char *const *pieces, const int64_t *sizes, int64_t num,
                       int64_t element_bytes, int64_t mask) {
    for (int64_t i = 0; i < num; i++) {
        const void *piece = pieces[i];
        const int64_t count = sizes[i] / element_bytes;
        FETCH(pieces, i, num, 0);
        if (element_bytes == 2 ? any_nonfinite_16(piece, count, (uint16_t)mask)
            : element_bytes == 4 ? any_nonfinite_32(piece, count, (uint32_t)mask)
                                 : any_nonfinite_64(piece, count, (uint64_t)mask))
            return i;
    }
    return -1;
}
