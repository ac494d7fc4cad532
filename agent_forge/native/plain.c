/* The token step in plain C, for any processor. */

#define TARGET
#define LANES 4
typedef short Digit;
#define READ read_plain
#define MULTIPLY multiply_plain
#include "step.h"
