/* Codes that were written in as few bits as their distribution allows (quant/entropy.py, which says
 * how): lowest code, number of codes, frequencies, a state for each lane, words. */

#ifndef FORGE_ENTROPY_H
#define FORGE_ENTROPY_H

#include "json.h"

#define PRECISION 14 /* bits of a frequency */
#define TOTAL (1 << PRECISION)
#define LOWEST_STATE (1u << 16)
/* Codes of a lane, about, and of one of a large matrix. */
#define LANE_CODES 2048
#define LARGE_LANE_CODES 1280
#define LARGE (1 << 17)
#define HEAD_BYTES 2    /* in front of the frequencies */

/* What a state says with its lowest bits. */
typedef struct {
    uint16_t often[TOTAL], within[TOTAL]; /* frequency of a code; place among its own slots */
    signed char code[TOTAL];
} Slots;

/* Bytes at `data` that are not read yet. */
typedef struct {
    const unsigned char *data;
    int64_t size;
    const char *name; /* for messages */
} Written;

static uint32_t take_number(Written *w, int bytes) {
    uint32_t value = 0;
    if (w->size < bytes) fail("%s are cut short", w->name);
    for (int i = 0; i < bytes; i++) value |= (uint32_t)w->data[i] << 8 * i;
    w->data += bytes;
    w->size -= bytes;
    return value;
}

static void take_slots(Written *w, Slots *slots) {
    int lowest = (signed char)take_number(w, 1), count = (int)take_number(w, 1) + 1;
    uint32_t used = 0;
    for (int i = 0; i < count; i++) {
        uint32_t often = take_number(w, 2);
        if (lowest + count > 128 || often > TOTAL - used)
            fail("%s: codes or their frequencies are impossible", w->name);
        for (uint32_t k = 0; k < often; k++, used++) {
            slots->often[used] = (uint16_t)often;
            slots->within[used] = (uint16_t)k;
            slots->code[used] = (signed char)(lowest + i);
        }
    }
    if (used != TOTAL) fail("%s: codes or their frequencies are impossible", w->name);
}

/* A code for each lane, whose states move on. */
static void take_row(Written *w, const Slots *slots, uint32_t *states, int64_t lanes,
                     signed char *codes) {
    for (int64_t lane = 0; lane < lanes; lane++) {
        uint32_t state = states[lane], slot = state & (TOTAL - 1);
        codes[lane] = slots->code[slot];
        state = slots->often[slot] * (state >> PRECISION) + slots->within[slot];
        if (state < LOWEST_STATE) state = state << 16 | take_number(w, 2);
        states[lane] = state;
    }
}

static int64_t lanes_of(int64_t count) {
    int64_t lanes = count / (count < LARGE ? LANE_CODES : LARGE_LANE_CODES);
    return lanes ? lanes : 1;
}

/* So many codes, of which `size` bytes are made. */
static signed char *decode(const unsigned char *data, int64_t size, const char *name,
                           int64_t count) {
    Written w = {data, size, name};
    Slots *slots = allocate(1, sizeof *slots);
    int64_t lanes = lanes_of(count);
    take_slots(&w, slots);
    if (w.size / 4 < lanes) fail("%s are cut short", name); /* before there is room for codes */
    uint32_t *states = allocate(lanes, sizeof *states);
    for (int64_t i = 0; i < lanes; i++) {
        states[i] = take_number(&w, 4);
        if (states[i] < LOWEST_STATE) fail("%s: a state is impossible", name);
    }
    signed char *codes = allocate(count, 1);
    for (int64_t at = 0; at < count; at += lanes)
        take_row(&w, slots, states, count - at < lanes ? count - at : lanes, codes + at);
    for (int64_t i = 0; i < lanes; i++)
        if (states[i] != LOWEST_STATE) fail("%s do not end where their codes do", name);
    if (w.size) fail("%s go on behind their codes", name);
    free(states);
    free(slots);
    return codes;
}

#endif
