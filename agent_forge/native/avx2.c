/* The token step with AVX2, which x86 processors have had since 2013; chosen when it runs. */

#if defined(__x86_64__)
#define FORGE_AVX2
#define TARGET __attribute__((target("avx2")))
#define LANES 8
typedef signed char Digit;
#define READ read_avx2
#define MULTIPLY multiply_avx2
#include "step.h"
#endif
