/* A fuzzer of the C program (libFuzzer, `make fuzz`): what it does to a model folder that nobody
 * trusts. An input is config.json, tokenizer.json and model.safetensors, with SPLIT in between.
 *
 * forge_run.c is compiled as it is; its files, its memory and its end are put under these names. */

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SPLIT "\xff\xfe\xff\xfe" /* in no UTF-8 */
#define SPLIT_BYTES 4
#define MOST_BYTES ((size_t)64 << 20) /* at once; the program says that there is no memory */
#define MOST_ROOMS 4096
#define MOST_LOOPS 64 /* of a token: more take longer, and read no other place */
#define WINDOW 16     /* bytes of weights that are changed at a time */
#define LAST 512      /* of them, every second time: codes */

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most);

typedef struct {
    uint8_t *data;
    size_t size;
} Part;

static Part parts[3]; /* of the input: config, tokenizer, weights */
static void *rooms[MOST_ROOMS];
static int room_count;
static jmp_buf refused;
static FILE *opened, *nowhere;

/* -- what forge_run.c gets instead of the library --------------------------------------------- */

static void *kept(void *room) {
    if (room_count == MOST_ROOMS) abort();
    if (room) rooms[room_count++] = room;
    return room;
}

static void forget(void *room) {
    int i = room_count - 1;
    while (i >= 0 && rooms[i] != room) i--;
    if (i < 0) abort();
    memmove(rooms + i, rooms + i + 1, sizeof *rooms * (size_t)(--room_count - i));
}

static void *fuzz_calloc(size_t count, size_t size) {
    return count > MOST_BYTES / size ? NULL : kept(calloc(count, size));
}

static void *fuzz_realloc(void *room, size_t size) {
    if (size > MOST_BYTES) return NULL;
    if (room) forget(room);
    return kept(realloc(room, size));
}

static void fuzz_free(void *room) {
    if (room) forget(room);
    free(room);
}

static FILE *fuzz_fopen(const char *path, const char *mode) {
    int which = strstr(path, "config") ? 0 : strstr(path, "tokenizer") ? 1 : 2;
    return opened = fmemopen(parts[which].data, parts[which].size, mode);
}

static int fuzz_fclose(FILE *file) {
    opened = NULL;
    return fclose(file);
}

#undef stdout
#undef stderr
#define stdout nowhere
#define stderr nowhere
#define calloc fuzz_calloc
#define realloc fuzz_realloc
#define free fuzz_free
#define fopen fuzz_fopen
#define fclose fuzz_fclose
#define exit(code) longjmp(refused, 1)
#define main forge_main
#include "../../agent_forge/native/forge_run.c"
#undef calloc
#undef realloc
#undef free
#undef fopen
#undef fclose
#undef exit
#undef main

/* -- inputs ----------------------------------------------------------------------------------- */

/* Find the parts of an input; 0 if there are not three. */
static int split(uint8_t *data, size_t size) {
    for (int i = 0; i < 2; i++) {
        uint8_t *end = memmem(data, size, SPLIT, SPLIT_BYTES);
        if (!end) return 0;
        parts[i] = (Part){data, (size_t)(end - data)};
        size -= parts[i].size + SPLIT_BYTES;
        data = end + SPLIT_BYTES;
    }
    parts[2] = (Part){data, size};
    return 1;
}

static void run(void) {
    static const char text[] = "It's 12 caf\xc3\xa9s,\n  then 'tis \xe4\xbd\xa0";
    Model m = read_model("");
    Tokens tokens = {0};
    encode(&m.tokenizer, text, sizeof text - 1, &tokens);
    if (m.network.steps * m.network.micro_steps > MOST_LOOPS) return;
    Options o = {.tokens = 2, .temperature = 1, .top_k = 3};
    Text t = begin_text(&m, &o, tokens.count);
    read_tokens(&t, tokens.ids, tokens.count < 4 ? tokens.count : 4);
    write_text(&t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint8_t *copy = malloc(size + 1);
    if (!nowhere) nowhere = fopen("/dev/null", "w");
    memcpy(copy, data, size);
    int known = split(copy, size);
    reading = "";
    if (known && !setjmp(refused)) run();
    if (opened) fclose(opened);
    opened = NULL;
    while (room_count) free(rooms[--room_count]);
    free(copy);
    return known ? 0 : -1;
}

/* Change a part of the input, within `most` bytes of it all; returns its new size. */
static size_t change(uint8_t *data, size_t size, size_t most, Part part) {
    uint8_t *end = part.data + part.size, *behind = data + size;
    size_t room = part.size + (most - size);
    uint8_t *copy = malloc(room + 1);
    memcpy(copy, part.data, part.size);
    size_t new_size = LLVMFuzzerMutate(copy, part.size, room);
    memmove(part.data + new_size, end, (size_t)(behind - end));
    memcpy(part.data, copy, new_size);
    free(copy);
    return new_size;
}

/* Most changes keep the parts apart, and the header's length right, so that they are looked at. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    unsigned which = seed % 8;
    if (!which || size > most || !split(data, size)) return LLVMFuzzerMutate(data, size, most);
    if (which < 4) {
        Part part = parts[which < 3 ? 0 : 1];
        return size - part.size + change(data, size, most, part);
    }
    Part weights = parts[2];
    uint64_t length = 0;
    if (weights.size >= 8) memcpy(&length, weights.data, 8);
    if (weights.size < 8 || length > weights.size - 8) return LLVMFuzzerMutate(data, size, most);
    if (which < 6) {
        uint64_t new_length = change(data, size, most, (Part){weights.data + 8, length});
        memcpy(weights.data, &new_length, 8);
        return size - length + new_length;
    }
    size_t left = weights.size - 8 - length;
    if (!left) return size;
    size_t from = seed >> 20 & 1 && left > LAST ? left - LAST : 0;
    uint8_t *end = weights.data + weights.size, *at = end - left + from + seed / 8 % (left - from);
    size_t window = end - at < WINDOW ? (size_t)(end - at) : WINDOW;
    uint8_t some[WINDOW];
    memcpy(some, at, window);
    size_t changed = LLVMFuzzerMutate(some, window, window);
    memcpy(at, some, changed);
    return size;
}
