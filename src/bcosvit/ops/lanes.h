/* Vectors as long as the processor's: compilers keep longer ones in memory. */

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
