/* What the library says of itself, for the check when it is loaded. */
#include "interface.h"

const char *interface_hash(void) { return INTERFACE_HASH; }

int64_t size_of_neighbour(void) { return (int64_t)sizeof(Neighbour); }

int64_t size_of_train(void) { return (int64_t)sizeof(Train); }

int64_t size_of_chance(void) { return (int64_t)sizeof(Chance); }

/* The name of what LOOP chooses on this processor. */
const char *target(void) {
#if defined(ONE_TARGET) || !defined(__x86_64__) || !defined(__gnu_linux__)
    return "one target";
#else
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4";
    return __builtin_cpu_supports("x86-64-v3") ? "x86-64-v3" : "x86-64";
#endif
}
