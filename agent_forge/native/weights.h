/* Weights of a model.safetensors: floats, and matrices in few bits (quant/packed.py), in the order
 * in which the token step reads them. */

#ifndef FORGE_WEIGHTS_H
#define FORGE_WEIGHTS_H

#include "entropy.h"
#include "json.h"
#include "network.h"

#define MOST 2097152 /* of any size of a network, as in module.c */
#define HEADER_BYTES 100000000
#define WEIGHT_BYTES ((int64_t)1 << 36)
#define LOWEST_SCALE 16 /* of a byte; below are no ordinary numbers of fp16 */

typedef struct {
    const Json *header, *matrices; /* of model.safetensors; of config.json, NULL if not packed */
    const unsigned char *data;
    int64_t size, activation_bits;
    void *content; /* of the file */
} Weights;

typedef struct {
    const Json *dtype, *shape;
    const unsigned char *data;
    int64_t size;
} Stored;

/* A tensor of the header; its bytes are within the file. */
static Stored stored(const Weights *w, const Json *record, const char *name) {
    const Json *offsets = required(record, "data_offsets", '[');
    if (offsets->span != 3) fail("%s has no two offsets", name);
    int64_t start = whole(offsets + 1, "an offset", 0, w->size);
    int64_t end = whole(offsets + 2, "an offset", start, w->size);
    return (Stored){required(record, "dtype", '"'), required(record, "shape", '['), w->data + start,
                    end - start};
}

static Stored find_stored(const Weights *w, const char *name) {
    const Json *record = member(w->header, name);
    if (!record) fail("%s is missing", name);
    return stored(w, record, name);
}

/* True if a shape is rows x columns; one row may also be a plain vector. */
static int has_shape(const Stored *s, int64_t rows, int64_t columns) {
    const Json *sizes = s->shape + 1;
    for (int64_t i = 0; i + 1 < s->shape->span; i++) whole(sizes + i, "a size", 0, INT32_MAX);
    if (s->shape->span == 2) return rows == 1 && (int64_t)sizes->number == columns;
    return s->shape->span == 3 && (int64_t)sizes[0].number == rows &&
           (int64_t)sizes[1].number == columns;
}

static float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, rest = half & 1023;
    float value;
    if (exponent == 0) {
        value = (float)rest * 5.9604644775390625e-8f; /* 2^-24 */
        return sign ? -value : value;
    }
    uint32_t bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | rest << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The number at an index of a tensor. */
static float number_at(const Stored *s, int wide, int brain, int64_t i) {
    uint16_t half;
    float value;
    if (wide) {
        memcpy(&value, s->data + 4 * i, sizeof value);
        return value;
    }
    memcpy(&half, s->data + 2 * i, sizeof half);
    if (!brain) return from_half(half);
    uint32_t bits = (uint32_t)half << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A tensor of finite floats. */
static float *floats(const Weights *w, const char *name, int64_t rows, int64_t columns) {
    Stored s = find_stored(w, name);
    int wide = is_text(s.dtype, "F32"), brain = is_text(s.dtype, "BF16");
    if (!wide && !brain && !is_text(s.dtype, "F16")) fail("%s is of no type that is read", name);
    if (!has_shape(&s, rows, columns) || s.size != rows * columns * (wide ? 4 : 2))
        fail("%s is not of %lld x %lld numbers", name, (long long)rows, (long long)columns);
    float *values = allocate(rows * columns, sizeof *values);
    for (int64_t i = 0; i < rows * columns; i++) {
        values[i] = number_at(&s, wide, brain, i);
        if (!isfinite(values[i])) fail("%s holds NaN or infinity", name);
    }
    return values;
}

/* How a matrix is coded: bits of a code, 0 for ternary; scales of a row; or whole steps, whose codes
 * are entropy-coded and may have eight bits. */
typedef struct {
    int64_t bits, groups;
    int steps;
} Codec;

/* True if a name is `step` and a number from 0.04 to 8: one or two digits, up to four behind a
 * point. */
static int is_steps(const char *name) {
    const char *at = name + 4;
    if (strncmp(name, "step", 4)) return 0;
    size_t digits = strspn(at, "0123456789");
    double step = strtod(at, NULL);
    at += digits;
    if (digits < 1 || digits > 2) return 0;
    if (*at == '.') {
        digits = strspn(++at, "0123456789");
        if (digits < 1 || digits > 4) return 0;
        at += digits;
    }
    return !*at && step >= 0.04 && step <= 8;
}

static Codec find_codec(const Json *record, const char *name, int64_t rows, int64_t columns) {
    const Json *codec = member(record, "codec"), *shape = required(record, "shape", '[');
    if (shape->span != 3 || whole(shape + 1, "a size", 1, MOST) != rows ||
        whole(shape + 2, "a size", 1, MOST) != columns || !is_off(record, "turned"))
        fail("%s is not of %lld x %lld numbers", name, (long long)rows, (long long)columns);
    if (is_text(codec, "ternary") || is_text(codec, "ternary_spec") ||
        is_text(codec, "ternary_bitnet"))
        return (Codec){0, 1, 0};
    int bits, group = 0;
    char text[16] = "", again[16];
    if (codec && codec->kind == '"' && codec->length < 12)
        memcpy(text, codec->text, (size_t)codec->length);
    if (*text && strlen(text) != (size_t)codec->length) *text = 0; /* there is a 0 in it */
    if (is_steps(text)) return (Codec){8, 1, 1};
    if (sscanf(text, "int%1dg%4d", &bits, &group) == 2 && bits > 1 && bits < 9 && group > 0)
        snprintf(again, sizeof again, "int%dg%d", bits, group);
    else if (sscanf(text, "int%1d", &bits) == 1 && bits > 1 && bits < 9)
        snprintf(again, sizeof again, "int%d", bits);
    else
        *again = 0;
    if (!*text || strcmp(text, again)) fail("%s is in a code that is not known", name);
    return (Codec){bits, strchr(text, 'g') ? PARTS(columns, group) : 1, 0};
}

/* The codes of a matrix, row by row. */
static signed char *read_codes(const Weights *w, const char *name, Codec codec, int64_t count) {
    char full[128];
    snprintf(full, sizeof full, "%s.codes", name);
    Stored s = find_stored(w, full);
    if (codec.steps) {
        if (!is_text(s.dtype, "U8") || !has_shape(&s, 1, s.size)) fail("%s are not bytes", full);
        return decode(s.data, s.size, full, count);
    }
    int64_t size = codec.bits ? PARTS(count * codec.bits, 8) : PARTS(count, 5);
    if (!is_text(s.dtype, "U8") || !has_shape(&s, 1, size) || s.size != size)
        fail("%s are not %lld bytes", full, (long long)size);
    signed char *codes = allocate(count, 1);
    for (int64_t i = 0; !codec.bits && i < count; i++) { /* five trits a byte */
        static const int powers[] = {1, 3, 9, 27, 81};
        if (s.data[i / 5] > 242) fail("%s: a byte of trits is above 242", full);
        codes[i] = (signed char)(s.data[i / 5] / powers[i % 5] % 3 - 1);
    }
    for (int64_t i = 0; codec.bits && i < count; i++) { /* lowest bits first, without gaps */
        int64_t bit = i * codec.bits, place = bit / 8;
        unsigned two = s.data[place] | (place + 1 < size ? s.data[place + 1] << 8 : 0);
        int code = (int)(two >> bit % 8 & ((1u << codec.bits) - 1));
        codes[i] = (signed char)(code - (1 << (codec.bits - 1)));
    }
    return codes;
}

/* The scales of steps, a byte each: the eighths of a power of 2, from 128 on; 0 is 0. */
static float *byte_scales(const Weights *w, const char *name, int64_t rows) {
    static const uint16_t mantissas[] = {0x3c00, 0x3c5d, 0x3cc2, 0x3d30,
                                         0x3da8, 0x3e2b, 0x3eba, 0x3f56}; /* 2^(i / 8) in fp16 */
    Stored s = find_stored(w, name);
    if (!is_text(s.dtype, "U8") || !has_shape(&s, rows, 1) || s.size != rows)
        fail("%s are not %lld bytes", name, (long long)rows);
    float *scales = allocate(rows, sizeof *scales);
    for (int64_t i = 0; i < rows; i++) {
        int byte = s.data[i];
        if (byte && byte < LOWEST_SCALE) fail("%s: a scale is impossible", name);
        if (byte) scales[i] = ldexpf(from_half(mantissas[byte % 8]), byte / 8 - 16);
    }
    return scales;
}

static float *half_scales(const Weights *w, const char *name, int64_t rows, int64_t groups) {
    if (!is_text(find_stored(w, name).dtype, "F16")) fail("%s are not of fp16", name);
    return floats(w, name, rows, groups);
}

/* True if codes fit four bits. */
static int are_small(const signed char *codes, int64_t count) {
    signed char lowest = 0, highest = 0;
    for (int64_t i = 0; i < count; i++) {
        lowest = codes[i] < lowest ? codes[i] : lowest;
        highest = codes[i] > highest ? codes[i] : highest;
    }
    return lowest >= -8 && highest <= 7;
}

/* Two bits a code, in tiles as network.h has them; where there is no weight, the code of 0. */
static Matrix ternary(const signed char *codes, const float *scales, int64_t rows,
                      int64_t columns) {
    int64_t words = PARTS(columns, WORD_TRITS), tiles = PARTS(rows, TILE_ROWS);
    uint32_t *data = allocate(tiles * words * TILE_ROWS, sizeof *data);
    float *padded = allocate(tiles * TILE_ROWS, sizeof *padded);
    memcpy(padded, scales, sizeof *padded * (size_t)rows);
    for (int64_t i = 0; i < tiles * words * TILE_ROWS; i++) data[i] = 0x55555555u;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < columns; i++) {
            int64_t word = i / WORD_TRITS, k = i % WORD_TRITS, bit = 8 * (k % 4) + 2 * (k / 4);
            uint32_t *to = data + (row / TILE_ROWS * words + word) * TILE_ROWS + row % TILE_ROWS;
            uint32_t code = (uint32_t)(codes[row * columns + i] + 1);
            *to = (*to & ~(3u << bit)) | code << bit;
        }
    return (Matrix){TERNARY, rows, columns, data, padded};
}

/* Four bits a code, in tiles as network.h has them; scales have `width` columns each. */
static Matrix nibbles(const signed char *codes, const float *scales, int64_t rows, int64_t columns,
                      int64_t groups, int64_t width) {
    int64_t chunks = PARTS(columns, GROUP_COLUMNS), tiles = PARTS(rows, TILE_ROWS);
    int64_t words = chunks * GROUP_WORDS;
    uint32_t *data = allocate(tiles * words * TILE_ROWS, sizeof *data);
    float *tiled = allocate(tiles * chunks * TILE_ROWS, sizeof *tiled);
    for (int64_t row = 0; row < rows; row++) {
        int64_t tile = row / TILE_ROWS, lane = row % TILE_ROWS;
        for (int64_t i = 0; i < columns; i++)
            data[(tile * words + i / WORD_NIBBLES) * TILE_ROWS + lane] |=
                ((uint32_t)codes[row * columns + i] & 15) << 4 * (i % WORD_NIBBLES);
        for (int64_t i = 0; i < chunks; i++)
            tiled[(tile * chunks + i) * TILE_ROWS + lane] =
                scales[row * groups + i * GROUP_COLUMNS / width];
    }
    return (Matrix){NIBBLES, rows, columns, data, tiled};
}

/* A matrix as it was before it was coded. */
static Matrix whole_floats(const signed char *codes, const float *scales, int64_t rows,
                           int64_t columns, int64_t groups, int64_t width) {
    float *data = allocate(rows * columns, sizeof *data);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < columns; i++)
            data[row * columns + i] =
                (float)codes[row * columns + i] * scales[row * groups + i / width];
    return (Matrix){FLOATS, rows, columns, data, NULL};
}

/* A matrix in the shortest form in which the token step computes with it. `rounds`: its layer
 * rounds what it is given, if it is ternary. */
static Matrix matrix(const Weights *w, const char *name, int64_t rows, int64_t columns,
                     int rounds) {
    const Json *record = member(w->matrices, name);
    if (!record) return (Matrix){FLOATS, rows, columns, floats(w, name, rows, columns), NULL};
    Codec codec = find_codec(record, name, rows, columns);
    char full[128];
    snprintf(full, sizeof full, "%s.scales", name);
    float *scales =
        codec.steps ? byte_scales(w, full, rows) : half_scales(w, full, rows, codec.groups);
    signed char *codes = read_codes(w, name, codec, rows * columns);
    int64_t width = PARTS(columns, codec.groups);
    int small = codec.steps ? are_small(codes, rows * columns) : codec.bits <= 4;
    Matrix m;
    if (!codec.bits && rounds && w->activation_bits)
        m = ternary(codes, scales, rows, columns);
    else if (small && (codec.groups == 1 || width % GROUP_COLUMNS == 0))
        m = nibbles(codes, scales, rows, columns, codec.groups, width);
    else
        m = whole_floats(codes, scales, rows, columns, codec.groups, width);
    free(codes);
    free(scales);
    return m;
}

/* The header and the bytes of a file, which its tensors fill together. */
static void read_weights(const char *folder, Weights *w) {
    int64_t size, total = 0;
    w->content = read_file(folder, "model.safetensors", WEIGHT_BYTES, &size);
    const unsigned char *content = w->content;
    uint64_t length = 0;
    for (int i = 0; size >= 8 && i < 8; i++) length |= (uint64_t)content[i] << 8 * i;
    if (size < 8 || length > (uint64_t)size - 8 || length > HEADER_BYTES)
        fail("it is cut short, or no safetensors file");
    char *header = allocate((int64_t)length, 1);
    memcpy(header, content + 8, (size_t)length);
    w->header = parse(header, (int64_t)length);
    w->data = content + 8 + length;
    w->size = size - 8 - (int64_t)length;
    for (const Json *key = first_of(w->header); key; key = after(key + 1, w->header))
        if (!is_text(key, "__metadata__")) total += stored(w, key + 1, "a tensor").size;
    if (total != w->size) fail("its tensors do not fill it: it is cut short, or damaged");
}

#endif
