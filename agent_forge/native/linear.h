/* Vectors and matrices: sums, products, exponentials. Numbers are taken LANES at a time, by the
 * compiler's own vectors; the one instruction that it would not find is in `tile_sums`. The order
 * of sums does not depend on LANES and no product is fused with a sum (-ffp-contract=off), so that
 * plain.c and avx2.c give the same bits. */

#include <math.h>
#include <string.h>

#include "network.h"

#define VECTOR __attribute__((vector_size(4 * LANES)))
typedef float Floats VECTOR;
typedef int32_t Ints VECTOR;
typedef uint32_t Words VECTOR;
typedef int16_t Shorts VECTOR;
typedef uint16_t Codes VECTOR;
typedef char Bytes VECTOR;

#define EIGHT (8 / LANES)      /* vectors that hold eight numbers */
#define ALL(x) ((x) - (Ints){0})
#define LEVELS 127.0f          /* of eight bits, on either side of 0 */
#define SMALLEST_TOP 1e-8f     /* below it, a vector counts as zeros */
#define ROUNDER 12582912.0f    /* 1.5 * 2^23: what is added to it is rounded to a whole number */
#define INFINITE_BITS 0x7f800000u
#define WORDS_OF_SHORTS 16     /* sums of 256 columns fit 16 bits: 256 * 127 = 32,512 */

/* An input of ternary matrices: whole numbers, their step and their sum. */
typedef struct {
    Digit *digits;
    float step;
    int32_t sum;
} Rounded;

TARGET static inline Floats load(const float *x) {
    Floats v;
    memcpy(&v, x, sizeof v);
    return v;
}

TARGET static inline void store(float *x, Floats v) { memcpy(x, &v, sizeof v); }

TARGET static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The sum of eight numbers. */
TARGET static inline float sum8(const Floats *v) {
    float s[8];
    memcpy(s, v, sizeof s);
    return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
}

TARGET static inline float dot(const float *a, const float *b, int64_t count) {
    Floats part[2 * EIGHT] = {0};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int j = 0; j < 2 * EIGHT; j++)
            part[j] += load(a + i + LANES * j) * load(b + i + LANES * j);
    float sum = sum8(part) + sum8(part + EIGHT);
    for (; i < count; i++) sum += a[i] * b[i];
    return sum;
}

/* The one or the other, where `mask` says so; a comparison with NaN says no. */
TARGET static inline Floats choose(Ints mask, Floats yes, Floats no) {
    return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no));
}

/* e^x to seven digits; beyond what a float holds, the nearest that it does. */
TARGET static inline Floats exponential(Floats x) {
    const Floats lowest = -87.0f - (Floats){0}, highest = 88.0f - (Floats){0};
    x = choose(x < lowest, lowest, x);
    x = choose(x > highest, highest, x);
    Floats rounder = x * 1.44269504f + ROUNDER, n = rounder - ROUNDER;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts */
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (Floats)(((Words)rounder << 23) + 0x3f800000u); /* times 2^n */
}

/* Round a vector as quant/layers.py does, and fill it up; 0 if a number is not finite. */
TARGET static int round_input(const float *x, int64_t count, Rounded *out) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(x[i]) & 0x7fffffffu; /* sorted as the numbers are, NaN last */
        largest = bits > largest ? bits : largest;
    }
    if (largest >= INFINITE_BITS) return 0;
    float top;
    memcpy(&top, &largest, sizeof top);
    float step = (top < SMALLEST_TOP ? SMALLEST_TOP : top) / LEVELS;
    int32_t sum = 0;
    Digit *restrict digits = out->digits;
    for (int64_t i = 0; i < count; i++) {
        int32_t digit = (int32_t)(bits_of(x[i] / step + ROUNDER) - bits_of(ROUNDER));
        digits[i] = (Digit)digit;
        sum += digit;
    }
    for (int64_t i = count; i % WORD_TRITS; i++) digits[i] = 0;
    out->step = step;
    out->sum = sum;
    return 1;
}

/* Sums of two columns each of 16: entries 2r and 2r + 1 belong to row r. */
TARGET static inline Shorts tile_sums(Codes tile, const Digit *digits) {
    Shorts part[4];
    for (int j = 0; j < 4; j++, digits += 4) {
#ifdef FORGE_AVX2
        int32_t four;
        memcpy(&four, digits, sizeof four);
        Codes codes = (tile >> (2 * j)) & 0x0303;
        part[j] = (Shorts)__builtin_ia32_pmaddubsw256((Bytes)codes, (Bytes)ALL(four));
#else
        Shorts first = (Shorts)ALL((uint16_t)digits[0] | (int32_t)((uint32_t)digits[2] << 16));
        Shorts second = (Shorts)ALL((uint16_t)digits[1] | (int32_t)((uint32_t)digits[3] << 16));
        part[j] = (Shorts)((tile >> (2 * j)) & 3) * first;
        part[j] += (Shorts)((tile >> (2 * j + 8)) & 3) * second;
#endif
    }
    return (part[0] + part[1]) + (part[2] + part[3]);
}

/* Eight results, of which the matrix may have fewer. */
TARGET static inline void store_rows(const Matrix *m, int64_t row, const Floats *values,
                                     float *out) {
    int64_t left = m->rows - row;
    memcpy(out + row, values, sizeof(float) * (size_t)(left < TILE_ROWS ? left : TILE_ROWS));
}

TARGET static void multiply_ternary(const Matrix *m, const Rounded *x, float *out) {
    int64_t words = PARTS(m->columns, WORD_TRITS);
    const char *tiles = m->data;
    for (int64_t row = 0; row < m->rows; row += TILE_ROWS) {
        Ints sums[EIGHT] = {0};
        for (int64_t word = 0; word < words;) {
            int64_t end = word + WORDS_OF_SHORTS < words ? word + WORDS_OF_SHORTS : words;
            Shorts part[EIGHT] = {0};
            for (; word < end; word++, tiles += TILE_BYTES)
                for (int j = 0; j < EIGHT; j++) {
                    Codes tile;
                    memcpy(&tile, tiles + j * sizeof tile, sizeof tile);
                    part[j] += tile_sums(tile, x->digits + word * WORD_TRITS);
                }
            for (int j = 0; j < EIGHT; j++)
                sums[j] += ((Ints)((Words)part[j] << 16) >> 16) + ((Ints)part[j] >> 16);
        }
        Floats values[EIGHT];
        for (int j = 0; j < EIGHT; j++) /* codes are one too large */
            values[j] = __builtin_convertvector(sums[j] - x->sum, Floats) *
                        (load(m->scales + row + j * LANES) * x->step);
        store_rows(m, row, values, out);
    }
}

/* The sums of 32 columns, without their scale. */
TARGET static inline Floats nibble_sums(const char *tiles, const float *x) {
    Floats part[4] = {0};
    for (int word = 0; word < GROUP_WORDS; word++, tiles += TILE_BYTES, x += WORD_NIBBLES) {
        Words tile;
        memcpy(&tile, tiles, sizeof tile);
        for (int i = 0; i < WORD_NIBBLES; i++) {
            Ints codes = (Ints)(tile << (28 - 4 * i)) >> 28;
            part[i % 4] += __builtin_convertvector(codes, Floats) * x[i];
        }
    }
    return (part[0] + part[1]) + (part[2] + part[3]);
}

/* x is filled up with zeros to a multiple of 32. */
TARGET static void multiply_nibbles(const Matrix *m, const float *x, float *out) {
    int64_t groups = PARTS(m->columns, GROUP_COLUMNS);
    const char *tiles = m->data;
    const float *scales = m->scales;
    for (int64_t row = 0; row < m->rows; row += TILE_ROWS) {
        Floats sums[EIGHT] = {0};
        for (int64_t group = 0; group < groups; group++) {
            for (int j = 0; j < EIGHT; j++)
                sums[j] += nibble_sums(tiles + j * 4 * LANES, x + group * GROUP_COLUMNS) *
                           load(scales + j * LANES);
            tiles += GROUP_WORDS * TILE_BYTES;
            scales += TILE_ROWS;
        }
        store_rows(m, row, sums, out);
    }
}

/* out = m x. */
TARGET static void multiply(const Matrix *m, const float *x, Rounded *rounded, float *padded,
                            float *out) {
    if (m->kind == TERNARY) {
        if (round_input(x, m->columns, rounded))
            multiply_ternary(m, rounded, out);
        else
            for (int64_t row = 0; row < m->rows; row++) out[row] = NAN;
    } else if (m->kind == NIBBLES) {
        memcpy(padded, x, sizeof(float) * (size_t)m->columns);
        for (int64_t i = m->columns; i % GROUP_COLUMNS; i++) padded[i] = 0;
        multiply_nibbles(m, padded, out);
    } else {
        const float *rows = m->data;
        for (int64_t row = 0; row < m->rows; row++)
            out[row] = dot(rows + row * m->columns, x, m->columns);
    }
}

/* One row of a matrix that is not ternary. */
TARGET static void look_up(const Matrix *m, int64_t row, float *out) {
    if (m->kind == FLOATS) {
        memcpy(out, (const float *)m->data + row * m->columns, sizeof(float) * (size_t)m->columns);
        return;
    }
    int64_t group = row / TILE_ROWS * PARTS(m->columns, GROUP_COLUMNS), lane = row % TILE_ROWS;
    const uint32_t *words = (const uint32_t *)m->data + group * GROUP_WORDS * TILE_ROWS;
    for (int64_t i = 0; i < m->columns; i++) {
        uint32_t word = words[i / WORD_NIBBLES * TILE_ROWS + lane];
        int32_t code = (int32_t)(word << (28 - i % WORD_NIBBLES * 4)) >> 28;
        out[i] = (float)code * m->scales[(group + i / GROUP_COLUMNS) * TILE_ROWS + lane];
    }
}
