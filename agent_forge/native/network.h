/* The network of agent_forge/model as the token step sees it. Sizes were checked in module.c. */

#ifndef FORGE_NETWORK_H
#define FORGE_NETWORK_H

#include <stdint.h>

/* How a matrix is written. Each tile is 32 bytes: one word of 32 bits for each of 8 rows.
 * FLOATS:  rows of floats, without tiles.
 * TERNARY: a word has 16 columns; column 4j + b is 2 bits of byte b, 0 1 2 for -1 0 1. One scale a
 *          row. What it is multiplied with is rounded to eight bits.
 * NIBBLES: a word has 8 columns, lowest bits first, each a number from -8 to 7. One scale for every
 *          32 columns of a row, in tiles of 8 rows.
 * Rows are filled up to 8, columns to 16 (TERNARY) or 32 (NIBBLES), with zeros. */
enum { FLOATS, TERNARY, NIBBLES };
#define TILE_ROWS 8
#define TILE_BYTES 32
#define WORD_TRITS 16
#define WORD_NIBBLES 8
#define GROUP_COLUMNS 32 /* that share a scale */
#define GROUP_WORDS (GROUP_COLUMNS / WORD_NIBBLES)
#define PARTS(count, size) (((count) + (size) - 1) / (size))

typedef struct {
    int64_t kind, rows, columns;
    const void *data;
    const float *scales;
} Matrix;

typedef struct {
    const float *norm_attention, *norm_mlp;
    Matrix q, k, v, out, gate, up, down;
} Block;

typedef struct {
    Matrix inner, outer;
    const float *inner_bias, *outer_bias;
} TwoLayers;

typedef struct {
    int64_t vocab, rank, width, layers, heads, hidden, channels, gate_hidden, recursion_hidden;
    int64_t window, steps, micro_steps, head_width;
    int64_t attention;       /* the width of all heads together */
    float surprise, novelty; /* weights of the memory */
    Matrix embedding, projection, projection_back;
    Block *blocks;
    Matrix memory_down, memory_up;
    const float *memory_norm, *decays, *frequencies;
    TwoLayers gate, refine, update;
    const float *gate_norm, *recursion_norm, *y_start, *z_start, *norm;
    const float *halting, *halting_bias, *halting_shifts;
} Network;

/* What a text has left: of each layer the keys, then the values, of each head `capacity` rows; and
 * the four sums of the memory. A token at position p has row p % capacity. */
typedef struct {
    float *keys_values, *memory;
    int64_t capacity, position;
} Cache;

/* Read tokens; logits of the last. Returns its recursion steps; -1 if there is no memory. */
typedef int64_t ReadFunction(const Network *, Cache *, const int64_t *tokens, int64_t count,
                             float bound, float *logits);
ReadFunction read_plain, read_avx2;

/* out = matrix x; 0 if there is no memory. */
typedef int MultiplyFunction(const Matrix *, const float *x, float *out);
MultiplyFunction multiply_plain, multiply_avx2;

#endif
