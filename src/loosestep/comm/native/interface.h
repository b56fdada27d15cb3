/* What Python and C share, written once: numbers, structures and functions.
 *
 * C includes this file; interface.py reads it and makes ctypes of it. So it keeps to a plain form:
 * every number and field on a line of its own with its type, no macros in declarations. Whoever
 * changes it need not change a version: its hash is compiled in and compared when it is loaded.
 */
#ifndef LOOSESTEP_INTERFACE_H
#define LOOSESTEP_INTERFACE_H

#include <stddef.h>
#include <stdint.h>

/* Functions with loops are compiled for several processors; the best one is chosen when the library
 * is loaded. ONE_TARGET leaves that out, for compilers that cannot, and for sanitizers. */
#if defined(ONE_TARGET) || !defined(__x86_64__) || !defined(__gnu_linux__)
#define LOOP
#else
#define LOOP __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#define INLINE static inline __attribute__((always_inline))

enum {
    /* Columns of a slot on a board: where the buffer lies, and the number of the last one that is
     * so far. SLEEPER is the owner's: the number of the slot that one of its threads sleeps on. */
    PLACE = 0,
    DETAIL = 1,
    OFFERED = 2,
    REDUCED = 3,
    TAKEN = 4,
    SLEEPER = 5,
    MARKS = 6, /* how many columns a slot has */

    WINDOWS = 3,       /* of a rank: one is filled, one is summed, one is emptied */
    OFFSET_BITS = 44,  /* of a place in resident memory; its key is above them */
    MOST_MEMBERS = 64, /* of a group whose buffers a train carries */
    DRIFT_SAMPLE = 256, /* elements of every slice from which the replicas' drift is estimated */

    /* What drive() returns. */
    DONE = 0,
    WAITING = 1,
    STRANGE = 2,

    LARGEST_BLOCK = 4096, /* elements that share a scale */
    SHORT_CHUNK = 4096,   /* elements of which a place takes 12 bits; 16 in longer chunks */
    LARGEST_CHUNK = 65536,
    TRITS = 5,            /* digits to base 3 in a byte: the number of planes that means Ternary */
};

typedef struct {
    int64_t *mine;  /* my row on its board */
    int64_t *told;  /* its row on mine */
    char *arena;    /* its windows for trains */
    char **homes;   /* where its resident memory is mapped here, by key */
    int64_t num_homes;
    int64_t member; /* its group rank */
} Neighbour;

typedef struct {
    Neighbour *neighbours;
    int64_t num_neighbours;
    int64_t group_rank;
    int64_t group_size;
    char *arena;
    int64_t window_bytes;
    int64_t slots;
    char **buffers;
    const int64_t *numels;
    const int64_t *places; /* where a buffer is resident, else -1 */
    int64_t num_buffers;
    int64_t element_bytes;
    const int64_t *numbers;        /* of the buffers' slots */
    const int64_t *previous;       /* of who used those slots last; 0: nobody */
    const int64_t *window_numbers; /* of who used each window last; 0: nobody */
    const double *weights;         /* of the members; none: all alike */
    double divisor;
    int64_t offered; /* from here on: how far it is */
    int64_t step;
    int64_t phase;
    int64_t at;
    int64_t waits_for; /* the index of a neighbour */
    double deviation;
    double magnitude;
    double samples;
} Train;

typedef struct {
    uint32_t first; /* the key */
    uint32_t second;
    uint32_t index; /* of a run's first element in its tensor */
} Chance;

#pragma GCC visibility push(default)

/* interface.c */
const char *interface_hash(void);
const char *target(void);
int64_t size_of_neighbour(void);
int64_t size_of_train(void);
int64_t size_of_chance(void);

/* mean.c */
void mean_f32(float *const *outs, size_t num_outs, const float *const *replicas, size_t num,
              const double *weights, double divisor, size_t count);
void mean_bf16(uint16_t *const *outs, size_t num_outs, const uint16_t *const *replicas, size_t num,
               const double *weights, double divisor, size_t count);
void spread_f32(double *sums, const float *const *replicas, size_t num, size_t count);

/* trains.c */
void fence(void);
void copy_home(char *to, const char *from, size_t size);
int64_t drive(Train *train, double seconds);

/* codecs.c; planes are codes in a byte: 1, 2, 4, or TRITS. Values are those of runs, of which the
 * lengths are given, and blocks or chunks begin anew at each; `count` are the values at the front
 * that are decoded. Chances: one for every run; none: to the nearest. `kept` says how many values
 * of a chunk go with a message, by the chunk's length. */
int all_finite(const float *x, int64_t count);
void encode_blocks(int planes, const float *x, const int64_t *lengths, int64_t runs, int64_t block,
                   const Chance *chances, float *scales, uint8_t *rows);
void decode_blocks(int planes, const float *scales, const uint8_t *rows, const int64_t *lengths,
                   int64_t runs, int64_t count, int64_t block, float share, float *out);
void add_blocks(int planes, const float *scales, const uint8_t *rows, const int64_t *lengths,
                int64_t runs, int64_t count, int64_t block, float share, float *out);
void encode_topk(const float *x, const int64_t *lengths, int64_t runs, int64_t chunk,
                 const int32_t *kept, float *values, uint8_t *places);
void add_topk(const float *values, const uint8_t *places, const int64_t *lengths, int64_t runs,
              int64_t count, int64_t chunk, const int32_t *kept, float share, float *out);

/* pieces.c; sizes in bytes, a mask of the bits of an exponent; -1: all are finite */
void gather(char *to, const char *const *pieces, const int64_t *sizes, int64_t num);
void scatter(const char *from, char *const *pieces, const int64_t *sizes, int64_t num);
int64_t find_nonfinite(const char *const *pieces, const int64_t *sizes, int64_t num,
                       int64_t element_bytes, int64_t mask);

#pragma GCC visibility pop

#endif
