/* Files, and JSON in them. Nothing in a file is trusted: what does not fit ends the program with a
 * message and exit code 2. */

#ifndef FORGE_JSON_H
#define FORGE_JSON_H

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REFUSED 2      /* exit code */
#define MOST_DEPTH 100 /* of lists and objects within each other */
#define RECORD_BYTES (64 << 20)

static const char *reading = ""; /* the file that a message is about */

static void fail(const char *format, ...) {
    va_list values;
    fflush(stdout);
    fprintf(stderr, "forge_run: %s%s", reading, *reading ? ": " : "");
    va_start(values, format);
    vfprintf(stderr, format, values);
    va_end(values);
    fputc('\n', stderr);
    exit(REFUSED);
}

/* Room for `count` items, all zero; kept until the program ends unless somebody frees it. */
static void *allocate(int64_t count, size_t size) {
    void *room = NULL;
    if (count >= 0 && (uint64_t)count <= SIZE_MAX / size) room = calloc((size_t)count + 1, size);
    if (!room) fail("there is no memory for %lld items", (long long)count);
    return room;
}

/* -- files ------------------------------------------------------------------------------------ */

/* All of a stream, with a 0 behind it. */
static char *read_stream(FILE *file, int64_t most, int64_t *size) {
    int64_t room = 1 << 16, used = 0;
    char *content = allocate(room, 1);
    size_t got;
    while ((got = fread(content + used, 1, (size_t)(room - used), file))) {
        used += (int64_t)got;
        if (used > most) fail("it is longer than the %lld bytes that are read", (long long)most);
        if (used == room) {
            room *= 2;
            content = realloc(content, (size_t)room + 1);
            if (!content) fail("there is no memory for %lld bytes", (long long)room);
        }
    }
    if (ferror(file)) fail("it cannot be read: %s", strerror(errno));
    content[used] = 0;
    *size = used;
    char *fitted = realloc(content, (size_t)used + 1); /* so that sanitizers see its end, too */
    return fitted ? fitted : content;
}

static char *read_file(const char *folder, const char *name, int64_t most, int64_t *size) {
    char *path = allocate((int64_t)(strlen(folder) + strlen(name)) + 2, 1);
    sprintf(path, "%s/%s", folder, name);
    reading = path;
    FILE *file = fopen(path, "rb");
    if (!file) fail("it cannot be opened: %s", strerror(errno));
    char *content = read_stream(file, most, size);
    fclose(file);
    return content;
}

/* -- JSON ------------------------------------------------------------------------------------- */

/* A value, and behind it in the same array those that it holds; an object holds names and values in
 * turns. Texts are UTF-8, in the buffer that was parsed. */
typedef struct {
    char kind;    /* one of { [ " 0 t f n */
    int64_t span; /* values, itself included */
    double number;
    char *text;
    int64_t length;
} Json;

typedef struct {
    char *at; /* the text ends with a 0 */
    Json *values;
    int64_t count, room;
} Parser;

static void parse_value(Parser *p, int depth);

static void skip_blanks(Parser *p) {
    while (*p->at == ' ' || *p->at == '\n' || *p->at == '\r' || *p->at == '\t') p->at++;
}

static int64_t new_value(Parser *p, char kind) {
    if (p->count == p->room) {
        p->room = 2 * p->room + 64;
        p->values = realloc(p->values, sizeof(Json) * (size_t)p->room);
        if (!p->values) fail("there is no memory to parse it");
    }
    p->values[p->count] = (Json){.kind = kind, .span = 1};
    return p->count++;
}

/* Four hexadecimal digits. */
static uint32_t parse_hex(Parser *p) {
    uint32_t value = 0;
    for (int i = 0; i < 4; i++, p->at++) {
        if (!isxdigit((unsigned char)*p->at)) fail("not JSON: a bad escape in a text");
        int digit = isdigit((unsigned char)*p->at) ? *p->at - '0' : (*p->at | 32) - 'a' + 10;
        value = value * 16 + (uint32_t)digit;
    }
    return value;
}

/* A code point as UTF-8; returns the place behind it. */
static char *put_utf8(char *out, uint32_t point) {
    int more = point < 0x80 ? 0 : point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    static const unsigned char first[] = {0, 0xc0, 0xe0, 0xf0};
    *out++ = (char)(first[more] | point >> (6 * more));
    while (more-- > 0) *out++ = (char)(0x80 | (point >> (6 * more) & 0x3f));
    return out;
}

static char *parse_escape(Parser *p, char *out) {
    static const char names[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    char name = *p->at;
    if (name == 'u') {
        p->at++;
        uint32_t point = parse_hex(p);
        if (point >= 0xd800 && point < 0xdc00 && p->at[0] == '\\' && p->at[1] == 'u') {
            p->at += 2;
            uint32_t low = parse_hex(p);
            if (low < 0xdc00 || low > 0xdfff) fail("not JSON: half a surrogate pair");
            point = 0x10000 + ((point - 0xd800) << 10) + (low - 0xdc00);
        }
        if (point >= 0xd800 && point < 0xe000) fail("not JSON: half a surrogate pair");
        return put_utf8(out, point); /* never longer than the escape was */
    }
    const char *found = name ? strchr(names, name) : NULL;
    if (!found) fail("not JSON: a bad escape in a text");
    p->at++;
    *out = meant[found - names];
    return out + 1;
}

/* A text; its escapes are replaced where they are. */
static void parse_text(Parser *p) {
    int64_t own = new_value(p, '"');
    char *start = ++p->at, *out = start;
    while (*p->at != '"') {
        if ((unsigned char)*p->at < 0x20) fail("not JSON: a text does not end");
        if (*p->at == '\\') {
            p->at++;
            out = parse_escape(p, out);
        } else {
            *out++ = *p->at++;
        }
    }
    p->at++;
    p->values[own].text = start;
    p->values[own].length = out - start;
}

static char *skip_digits(char *at) {
    if (!isdigit((unsigned char)*at)) fail("not JSON: a bad number");
    while (isdigit((unsigned char)*at)) at++;
    return at;
}

static void parse_number(Parser *p) {
    char *at = p->at + (*p->at == '-');
    at = *at == '0' ? at + 1 : skip_digits(at);
    if (*at == '.') at = skip_digits(at + 1);
    if (*at == 'e' || *at == 'E') {
        at++;
        at = skip_digits(at + (*at == '+' || *at == '-'));
    }
    double number = strtod(p->at, NULL);
    if (!isfinite(number)) fail("a number is beyond what can be stored");
    int64_t own = new_value(p, '0');
    p->values[own].number = number;
    p->at = at;
}

/* A list or an object, whose first character is at hand. */
static void parse_holder(Parser *p, int depth) {
    char opening = *p->at++, closing = opening == '{' ? '}' : ']';
    int64_t own = new_value(p, opening);
    if (depth == MOST_DEPTH) fail("it is nested deeper than %d levels", MOST_DEPTH);
    skip_blanks(p);
    if (*p->at == closing) {
        p->at++;
        return;
    }
    for (;;) {
        if (opening == '{') {
            skip_blanks(p);
            if (*p->at != '"') fail("not JSON: a name is missing");
            parse_text(p);
            skip_blanks(p);
            if (*p->at++ != ':') fail("not JSON: a colon is missing");
        }
        parse_value(p, depth + 1);
        skip_blanks(p);
        if (*p->at == closing) break;
        if (*p->at++ != ',') fail("not JSON, or not whole");
    }
    p->at++;
    p->values[own].span = p->count - own;
}

static void parse_value(Parser *p, int depth) {
    static const char *const words[] = {"true", "false", "null"};
    skip_blanks(p);
    if (*p->at == '{' || *p->at == '[') {
        parse_holder(p, depth);
    } else if (*p->at == '"') {
        parse_text(p);
    } else if (*p->at == '-' || isdigit((unsigned char)*p->at)) {
        parse_number(p);
    } else {
        for (int i = 0; i < 3; i++)
            if (!strncmp(p->at, words[i], strlen(words[i]))) {
                new_value(p, *words[i]);
                p->at += strlen(words[i]);
                return;
            }
        fail("not JSON, or not whole");
    }
}

/* A text of so many bytes that holds an object. */
static const Json *parse(char *text, int64_t size) {
    Parser p = {.at = text};
    parse_value(&p, 0);
    skip_blanks(&p);
    if (p.at != text + size) fail("not JSON: something follows its end");
    if (p.values->kind != '{') fail("it holds no record");
    return p.values;
}

static int is_text(const Json *value, const char *text) {
    return value && value->kind == '"' && value->length == (int64_t)strlen(text) &&
           !memcmp(value->text, text, (size_t)value->length);
}

/* The first value inside another, and the one behind a value; NULL if there is none. */
static const Json *first_of(const Json *holder) { return holder->span > 1 ? holder + 1 : NULL; }

static const Json *after(const Json *value, const Json *holder) {
    const Json *next = value + value->span;
    return next < holder + holder->span ? next : NULL;
}

/* The member of this name; NULL if there is none, or no object. */
static const Json *member(const Json *object, const char *name) {
    const Json *found = NULL;
    if (!object || object->kind != '{') return NULL;
    for (const Json *key = first_of(object); key; key = after(key + 1, object))
        if (is_text(key, name)) {
            if (found) fail("%s is there twice", name);
            found = key + 1;
        }
    return found;
}

static const Json *required(const Json *object, const char *name, char kind) {
    const Json *value = member(object, name);
    if (!value || value->kind != kind) fail("%s is missing, or not of its type", name);
    return value;
}

/* A whole number within bounds; `name` is for the message. */
static int64_t whole(const Json *value, const char *name, int64_t least, int64_t most) {
    if (!value || value->kind != '0' || value->number != floor(value->number) ||
        value->number < (double)least || value->number > (double)most)
        fail("%s is not a whole number from %lld to %lld", name, (long long)least, (long long)most);
    return (int64_t)value->number;
}

#endif
