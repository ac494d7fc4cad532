/* The token step: what ForgeNetwork.predict computes for one token of one text, in its order. */

#include <stdlib.h>

#include "linear.h"

#define EPSILON 1e-6f /* of norms, as in model/attention.py */
#define FLOOR 0.05f   /* the least weight of a write, as in model/memory.py */
#define NEAR 1e-6f    /* the least length of a vector in a cosine, as there */

/* Room for what a token needs in between, filled up to whole vectors. */
typedef struct {
    float *x, *normed, *change, *q, *k, *v, *mixed, *scores, *cos, *sin, *hidden, *up, *read;
    float *both;                /* of the gate: backbone and memory */
    float *features, *y, *z;    /* of the recursion, one after the other */
    float *embedded, *padded;
    Rounded rounded;
} Scratch;

static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

/* The next `count` floats of a room of which `used` are taken. */
static float *take(float *room, int64_t *used, int64_t count) {
    float *start = room ? room + *used : NULL;
    *used += PARTS(count, 32) * 32;
    return start;
}

/* Share out `room`; without one, only count. Returns the floats it takes. */
static int64_t share_out(const Network *n, const Cache *cache, float *room, Scratch *s) {
    int64_t used = 0;
    int64_t inner = largest(largest(n->hidden, n->gate_hidden), n->recursion_hidden);
    int64_t longest = largest(largest(inner, 3 * n->width), largest(n->channels, n->rank));
    longest = largest(longest, n->attention);
    s->x = take(room, &used, n->width);
    s->normed = take(room, &used, n->width);
    s->change = take(room, &used, n->width);
    s->q = take(room, &used, n->attention);
    s->k = take(room, &used, n->attention);
    s->v = take(room, &used, n->attention);
    s->mixed = take(room, &used, n->attention);
    s->scores = take(room, &used, cache->capacity);
    s->cos = take(room, &used, n->head_width);
    s->sin = take(room, &used, n->head_width);
    s->hidden = take(room, &used, inner);
    s->up = take(room, &used, inner);
    s->read = take(room, &used, n->channels);
    s->both = take(room, &used, 2 * n->width);
    s->features = take(room, &used, 3 * n->width);
    s->embedded = take(room, &used, n->rank);
    s->padded = take(room, &used, longest);
    s->rounded.digits = (Digit *)take(room, &used, longest);
    return used;
}

TARGET static inline void times(const Matrix *m, const float *x, Scratch *s, float *out) {
    multiply(m, x, &s->rounded, s->padded, out);
}

/* out = x / rms(x) * gain; without a gain, times 1. */
TARGET static void norm(const float *x, const float *gain, int64_t width, float *out) {
    float scale = 1.0f / sqrtf(dot(x, x, width) / (float)width + EPSILON);
    for (int64_t i = 0; i < width; i++) out[i] = x[i] * scale;
    for (int64_t i = 0; gain && i < width; i++) out[i] *= gain[i];
}

TARGET static void add(float *x, const float *y, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] += y[i];
}

/* These two take vectors that are filled up to eights. */
TARGET static void sigmoid(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES)
        store(x + i, 1.0f / (1.0f + exponential(-load(x + i))));
}

TARGET static void silu(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES)
        store(x + i, load(x + i) / (1.0f + exponential(-load(x + i))));
}

TARGET static void two_layers(const TwoLayers *l, const float *x, Scratch *s, float *out) {
    times(&l->inner, x, s, s->hidden);
    add(s->hidden, l->inner_bias, l->inner.rows);
    silu(s->hidden, l->inner.rows);
    times(&l->outer, s->hidden, s, out);
    add(out, l->outer_bias, l->outer.rows);
}

/* -- a block ---------------------------------------------------------------------------------- */

/* Turn the pairs of each head by the angles of the position. */
TARGET static void rotate(const Network *n, const Scratch *s, float *x) {
    int64_t half = n->head_width / 2;
    for (int64_t head = 0; head < n->heads; head++) {
        float *first = x + head * 2 * half, *second = first + half;
        for (int64_t i = 0; i < half; i++) {
            float a = first[i], b = second[i];
            first[i] = a * s->cos[i] - b * s->sin[i];
            second[i] = a * s->sin[i] + b * s->cos[i];
        }
    }
}

/* Scores become probabilities. */
TARGET static void softmax(float *scores, int64_t count) {
    for (int64_t i = count; i % 8; i++) scores[i] = -INFINITY;
    Floats tops = load(scores), sums[EIGHT] = {0};
    for (int64_t i = LANES; i < count; i += LANES)
        tops = choose(load(scores + i) > tops, load(scores + i), tops);
    float top = tops[0];
    for (int i = 1; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    for (int64_t i = 0; i < count; i += 8)
        for (int j = 0; j < EIGHT; j++) {
            Floats v = exponential(load(scores + i + j * LANES) - top);
            sums[j] += v;
            store(scores + i + j * LANES, v);
        }
    float sum = sum8(sums);
    for (int64_t i = 0; i < count; i++) scores[i] /= sum;
}

/* out = the sum of `count` rows of values, times their scores. */
TARGET static void mix(const float *scores, const float *values, int64_t count, int64_t size,
                       float *out) {
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES) {
        Floats sums[4] = {0};
        for (int64_t t = 0; t < count; t++)
            for (int j = 0; j < 4; j++)
                sums[j] += load(values + t * size + i + j * LANES) * scores[t];
        for (int j = 0; j < 4; j++) store(out + i + j * LANES, sums[j]);
    }
    for (; i < size; i++) {
        out[i] = 0;
        for (int64_t t = 0; t < count; t++) out[i] += values[t * size + i] * scores[t];
    }
}

/* Put a token's keys or values where those of its head are. */
TARGET static void put(const Network *n, const Cache *cache, const float *x, float *rows) {
    int64_t size = n->head_width, row = cache->position % cache->capacity;
    for (int64_t head = 0; head < n->heads; head++)
        memcpy(rows + (head * cache->capacity + row) * size, x + head * size,
               sizeof(float) * (size_t)size);
}

TARGET static void attend(const Network *n, const Cache *cache, const float *keys,
                          const float *values, Scratch *s) {
    int64_t size = n->head_width, capacity = cache->capacity;
    int64_t seen = cache->position < capacity ? cache->position + 1 : capacity;
    float scale = 1.0f / sqrtf((float)size);
    for (int64_t head = 0; head < n->heads; head++) {
        int64_t start = head * capacity * size;
        for (int64_t t = 0; t < seen; t++)
            s->scores[t] = dot(s->q + head * size, keys + start + t * size, size) * scale;
        softmax(s->scores, seen);
        mix(s->scores, values + start, seen, size, s->mixed + head * size);
    }
}

TARGET static void block(const Network *n, const Block *b, const Cache *cache, float *keys,
                         Scratch *s) {
    float *values = keys + cache->capacity * n->attention;
    norm(s->x, b->norm_attention, n->width, s->normed);
    times(&b->q, s->normed, s, s->q);
    times(&b->k, s->normed, s, s->k);
    times(&b->v, s->normed, s, s->v);
    rotate(n, s, s->q);
    rotate(n, s, s->k);
    put(n, cache, s->k, keys);
    put(n, cache, s->v, values);
    attend(n, cache, keys, values, s);
    times(&b->out, s->mixed, s, s->change);
    add(s->x, s->change, n->width);
    norm(s->x, b->norm_mlp, n->width, s->normed);
    times(&b->gate, s->normed, s, s->hidden);
    times(&b->up, s->normed, s, s->up);
    silu(s->hidden, n->hidden);
    for (int64_t i = 0; i < n->hidden; i++) s->hidden[i] *= s->up[i];
    times(&b->down, s->hidden, s, s->change);
    add(s->x, s->change, n->width);
}

/* -- memory and gate -------------------------------------------------------------------------- */

/* How far v is from the mean of the past, 0 to 1; then v is added to that mean. */
TARGET static float difference(const float *v, float *past, float decay, int64_t count) {
    float own = fmaxf(sqrtf(dot(v, v, count)), NEAR);
    float other = fmaxf(sqrtf(dot(past, past, count)), NEAR);
    float cosine = dot(v, past, count) / (own * other);
    for (int64_t i = 0; i < count; i++) past[i] = v[i] + decay * past[i];
    return (1.0f - cosine) / 2.0f;
}

/* Take in s->x; s->read is what the memory then holds, as NeuralMemory reads it. */
TARGET static void remember(const Network *n, float *recent, Scratch *s) {
    int64_t count = n->channels;
    float *distant = recent + count, *written = distant + count, *total = written + count;
    times(&n->memory_down, s->x, s, s->read);
    float surprise = n->surprise * difference(s->read, recent, n->decays[0], count);
    float novelty = n->novelty * difference(s->read, distant, n->decays[count - 1], count);
    float weight = FLOOR + (1 - FLOOR) * (surprise + novelty) / (n->surprise + n->novelty);
    for (int64_t i = 0; i < count; i++) {
        written[i] = weight * s->read[i] + n->decays[i] * written[i];
        total[i] = weight + n->decays[i] * total[i];
        s->read[i] = written[i] / total[i];
    }
}

/* The blend of backbone and memory, into s->features. */
TARGET static void blend(const Network *n, Scratch *s) {
    float *backbone = s->both, *memory = s->both + n->width;
    times(&n->memory_up, s->read, s, s->change);
    norm(s->change, n->memory_norm, n->width, memory);
    norm(s->x, n->gate_norm, n->width, backbone);
    two_layers(&n->gate, s->both, s, s->change);
    sigmoid(s->change, n->width);
    for (int64_t i = 0; i < n->width; i++)
        s->features[i] = s->change[i] * backbone[i] + (1.0f - s->change[i]) * memory[i];
}

/* -- recursion, halting, head ----------------------------------------------------------------- */

/* Refine s->y until it is sure enough; returns the steps it took. */
TARGET static int64_t decide(const Network *n, float bound, Scratch *s) {
    memcpy(s->y, s->features, sizeof(float) * (size_t)n->width);
    add(s->y, n->y_start, n->width);
    memcpy(s->z, n->z_start, sizeof(float) * (size_t)n->width);
    int64_t step = 0;
    for (float chance = 0; step < n->steps && (step == 0 || chance <= bound); step++) {
        for (int64_t i = 0; i < n->micro_steps; i++) {
            two_layers(&n->refine, s->features, s, s->change);
            add(s->change, s->z, n->width);
            norm(s->change, n->recursion_norm, n->width, s->z);
        }
        two_layers(&n->update, s->y, s, s->change);
        for (int64_t i = 0; i < n->width; i++) s->y[i] += s->change[i] / (float)n->steps;
        float logit = dot(s->z, n->halting, n->width) + *n->halting_bias;
        chance = 1.0f / (1.0f + expf(-(logit + n->halting_shifts[step])));
    }
    return step;
}

TARGET static void backbone(const Network *n, const Cache *cache, int64_t token, Scratch *s) {
    int64_t half = n->head_width / 2, layer = 2 * cache->capacity * n->attention;
    for (int64_t i = 0; i < half; i++) {
        float angle = (float)cache->position * n->frequencies[i];
        s->cos[i] = cosf(angle);
        s->sin[i] = sinf(angle);
    }
    look_up(&n->embedding, token, s->embedded);
    times(&n->projection, s->embedded, s, s->change);
    norm(s->change, NULL, n->width, s->x);
    for (int64_t i = 0; i < n->layers; i++)
        block(n, n->blocks + i, cache, cache->keys_values + i * layer, s);
    remember(n, cache->memory, s);
}

TARGET int64_t READ(const Network *n, Cache *cache, const int64_t *tokens, int64_t count,
                    float bound, float *logits) {
    Scratch s;
    float *room = calloc((size_t)share_out(n, cache, NULL, &s), sizeof(float));
    if (!room) return -1;
    share_out(n, cache, room, &s);
    s.y = s.features + n->width;
    s.z = s.y + n->width;
    for (int64_t i = 0; i < count; i++, cache->position++) backbone(n, cache, tokens[i], &s);
    blend(n, &s);
    int64_t steps = decide(n, bound, &s);
    norm(s.y, n->norm, n->width, s.normed);
    times(&n->projection_back, s.normed, &s, s.embedded);
    times(&n->embedding, s.embedded, &s, logits);
    free(room);
    return steps;
}

TARGET int MULTIPLY(const Matrix *m, const float *x, float *out) {
    size_t columns = (size_t)PARTS(m->columns, 32) * 32;
    float *room = calloc(2 * columns, sizeof(float));
    if (!room) return 0;
    Rounded rounded = {.digits = (Digit *)(room + columns)};
    multiply(m, x, &rounded, room, out);
    free(room);
    return 1;
}
