/* Texts to tokens: byte-level BPE with single digits, from a tokenizer.json of Agent Forge
 * (data/tokenizer.py). Texts are split as by the tokenizers library: a digit is a word, and the
 * rest is split by the rule of GPT-2. */

#ifndef FORGE_TOKENIZER_H
#define FORGE_TOKENIZER_H

#include "json.h"
#include "unicode.h"

/* Special tokens have fixed ids, as in data/tokenizer.py. */
enum { END_OF_TEXT = 0, USER = 3, ASSISTANT = 4, END_OF_TURN = 5, TOOL_CALL = 6, THINKING = 10, ANSWERING = 11 };
static const char *const SPECIAL[] = {
    "<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
    "<|tool_call|>", "<|end_call|>", "<|tool_result|>", "<|end_result|>",
    "[thinking]", "[/endthinking]", "<step>", "<mece>", "<falsify>", "<expert>", "<orthogonal>",
    "<doubt>", "<bayesian>", "<multidomain>", "<correct>", "<uncertain>",
};
enum { SPECIALS = sizeof SPECIAL / sizeof *SPECIAL };

typedef struct {
    const char *bytes; /* NULL: there is no such token */
    int64_t length;
} Piece;

/* Two tokens that become one; the lowest rank goes first. */
typedef struct {
    int64_t first, second, rank, whole; /* `whole` is the id, and 0 in an empty slot */
} Merge;

/* Slots are found by hashes; there are twice as many as entries, a power of 2. */
typedef struct {
    int64_t vocab, piece_slots, merge_slots;
    Piece *pieces; /* by id */
    int64_t *ids;  /* slots: an id and 1 */
    Merge *merges;
    int64_t of_byte[256];
    int whole_words; /* a word that is a token is read at once, whatever merges there are */
} Tokenizer;

typedef struct {
    int64_t *ids, count, room;
} Tokens;

static void add_token(Tokens *t, int64_t id) {
    if (t->count == t->room) {
        t->room = 2 * t->room + 64;
        t->ids = realloc(t->ids, sizeof(int64_t) * (size_t)t->room);
        if (!t->ids) fail("there is no memory for the prompt");
    }
    t->ids[t->count++] = id;
}

/* The code point at `at`, which moves behind it; -1 if there is no UTF-8. */
static int64_t next_point(const char **at, const char *end) {
    static const uint32_t least[] = {0, 0x80, 0x800, 0x10000};
    unsigned char byte = (unsigned char)*(*at)++;
    int more = byte < 0x80 ? 0 : byte >= 0xf0 ? 3 : byte >= 0xe0 ? 2 : 1;
    uint32_t point = more ? byte & (0x3fu >> more) : byte;
    if ((byte >= 0x80 && byte < 0xc2) || byte > 0xf4 || end - *at < more) return -1;
    for (int i = 0; i < more; i++, (*at)++) {
        if (((unsigned char)**at & 0xc0) != 0x80) return -1;
        point = point << 6 | ((unsigned char)**at & 0x3f);
    }
    if (point < least[more] || point > 0x10ffff || (point >= 0xd800 && point < 0xe000)) return -1;
    return point;
}

/* Bytes that are no printable character of Latin-1 are written as characters from 256 on. */
static int is_shifted(int byte) {
    return byte < 0x21 || (byte > 0x7e && byte < 0xa1) || byte == 0xad;
}

/* Turn the characters of a token, one a byte, into these bytes, where they are. */
static Piece to_bytes(char *text, int64_t length) {
    static int byte_of[256 + 68], known; /* 68 bytes are shifted */
    for (int byte = 0, shifted = 256; !known && byte < 256; byte++)
        byte_of[is_shifted(byte) ? shifted++ : byte] = byte + 1;
    known = 1;
    const char *at = text, *end = text + length;
    char *out = text;
    while (at < end) {
        int64_t point = next_point(&at, end);
        if (point < 0 || point >= 256 + 68 || !byte_of[point]) fail("a token is no row of bytes");
        *out++ = (char)(byte_of[point] - 1);
    }
    return (Piece){text, out - text};
}

static uint64_t hash_bytes(uint64_t hash, Piece piece) {
    for (int64_t i = 0; i < piece.length; i++)
        hash = (hash ^ (unsigned char)piece.bytes[i]) * 1099511628211u; /* FNV-1a */
    return hash;
}

/* The slot of the token that is two pieces in a row, or where it would be. */
static int64_t *piece_slot(const Tokenizer *t, Piece a, Piece b) {
    uint64_t hash = hash_bytes(hash_bytes(14695981039346656037u, a), b);
    for (;; hash++) {
        int64_t *slot = t->ids + (hash & (uint64_t)(t->piece_slots - 1));
        if (!*slot) return slot;
        Piece found = t->pieces[*slot - 1];
        if (found.length == a.length + b.length &&
            !memcmp(found.bytes, a.bytes, (size_t)a.length) &&
            !memcmp(found.bytes + a.length, b.bytes, (size_t)b.length))
            return slot;
    }
}

/* The merge of two tokens, or the empty slot where it would be. */
static Merge *merge_slot(const Tokenizer *t, int64_t first, int64_t second) {
    uint64_t hash = ((uint64_t)first << 32 | (uint64_t)second) * 0x9e3779b97f4a7c15u >> 20;
    for (;; hash++) {
        Merge *slot = t->merges + (hash & (uint64_t)(t->merge_slots - 1));
        if (!slot->whole || (slot->first == first && slot->second == second)) return slot;
    }
}

static int64_t slots_for(int64_t entries) {
    int64_t slots = 64;
    while (slots < 2 * entries) slots *= 2;
    return slots;
}

static void read_vocabulary(Tokenizer *t, const Json *vocabulary) {
    static const Piece nothing = {"", 0};
    t->piece_slots = slots_for(vocabulary->span / 2);
    t->ids = allocate(t->piece_slots, sizeof *t->ids);
    t->pieces = allocate(t->vocab, sizeof *t->pieces);
    for (const Json *key = first_of(vocabulary); key; key = after(key + 1, vocabulary)) {
        int64_t id = whole(key + 1, "an id of the vocabulary", 0, t->vocab - 1);
        if (t->pieces[id].bytes) fail("two tokens have the id %lld", (long long)id);
        Piece piece = to_bytes(key->text, key->length);
        if (!piece.length) fail("a token is empty");
        t->pieces[id] = piece;
        int64_t *slot = piece_slot(t, piece, nothing);
        if (*slot) fail("a token is there twice");
        *slot = id + 1;
    }
    for (int byte = 0; byte < 256; byte++) {
        char one = (char)byte;
        t->of_byte[byte] = *piece_slot(t, (Piece){&one, 1}, nothing) - 1;
        if (t->of_byte[byte] < 0) fail("the byte %d has no token", byte);
    }
}

/* The two sides of a merge: a list of two, or a text with a blank between them. */
static void merge_sides(const Json *merge, Piece sides[2]) {
    if (merge->kind == '"') {
        char *blank = memchr(merge->text, ' ', (size_t)merge->length);
        if (!blank) fail("a merge has no two sides");
        sides[0] = to_bytes(merge->text, blank - merge->text);
        sides[1] = to_bytes(blank + 1, merge->text + merge->length - blank - 1);
        return;
    }
    if (merge->kind != '[' || merge->span != 3 || merge[1].kind != '"' || merge[2].kind != '"')
        fail("a merge has no two sides");
    for (int i = 0; i < 2; i++) sides[i] = to_bytes(merge[i + 1].text, merge[i + 1].length);
}

static void read_merges(Tokenizer *t, const Json *merges) {
    static const Piece nothing = {"", 0};
    t->merge_slots = slots_for(merges->span);
    t->merges = allocate(t->merge_slots, sizeof *t->merges);
    int64_t rank = 0;
    for (const Json *merge = first_of(merges); merge; merge = after(merge, merges), rank++) {
        Piece sides[2];
        merge_sides(merge, sides);
        int64_t first = *piece_slot(t, sides[0], nothing) - 1;
        int64_t second = *piece_slot(t, sides[1], nothing) - 1;
        int64_t joined = *piece_slot(t, sides[0], sides[1]) - 1;
        if (first < 0 || second < 0 || joined <= 0)
            fail("merge %lld is of tokens that are not in the vocabulary", (long long)rank);
        *merge_slot(t, first, second) = (Merge){first, second, rank, joined};
    }
}

static int is_off(const Json *object, const char *name) {
    const Json *value = member(object, name);
    return !value || value->kind == 'n' || value->kind == 'f' || is_text(value, "");
}

/* Refuse a tokenizer that splits texts in another way than ours do. */
static void check_kind(const Json *root) {
    const Json *model = required(root, "model", '{');
    const Json *split = member(root, "pre_tokenizer"), *parts = member(split, "pretokenizers");
    const Json *digits = parts && parts->kind == '[' ? first_of(parts) : NULL;
    const Json *letters = digits ? after(digits, parts) : NULL;
    const Json *each = member(digits, "individual_digits"), *by = member(letters, "use_regex");
    if (!is_text(member(model, "type"), "BPE") || !is_off(model, "dropout") ||
        !is_off(model, "unk_token") || !is_off(model, "continuing_subword_prefix") ||
        !is_off(model, "end_of_word_suffix") || !is_off(model, "byte_fallback") ||
        !is_off(root, "normalizer") || !is_off(root, "post_processor") ||
        !is_text(member(split, "type"), "Sequence") ||
        !is_text(member(digits, "type"), "Digits") || !each || each->kind != 't' ||
        !is_text(member(letters, "type"), "ByteLevel") || !letters || after(letters, parts) ||
        !is_off(letters, "add_prefix_space") || (by && by->kind != 't'))
        fail("it is not byte-level BPE with single digits, as Agent Forge trains it");
}

/* Special tokens have no text; each of ours has its own id. */
static void check_specials(Tokenizer *t, const Json *added) {
    int found[SPECIALS] = {0};
    for (const Json *token = first_of(added); token; token = after(token, added)) {
        int64_t id = whole(member(token, "id"), "the id of an added token", 0, t->vocab - 1);
        const Json *special = member(token, "special");
        if (!special || special->kind != 't') fail("it adds tokens that are not special");
        if (id < SPECIALS && is_text(member(token, "content"), SPECIAL[id])) found[id] = 1;
        t->pieces[id] = (Piece){"", 0};
    }
    for (int id = 0; id < SPECIALS; id++)
        if (!found[id]) fail("it has no special token %s at id %d", SPECIAL[id], id);
}

static Tokenizer read_tokenizer(const char *folder, int64_t vocab) {
    Tokenizer t = {.vocab = vocab};
    int64_t size;
    char *content = read_file(folder, "tokenizer.json", RECORD_BYTES, &size);
    const Json *root = parse(content, size), *model;
    check_kind(root);
    model = required(root, "model", '{');
    t.whole_words = !is_off(model, "ignore_merges");
    read_vocabulary(&t, required(model, "vocab", '{'));
    read_merges(&t, required(model, "merges", '['));
    check_specials(&t, required(root, "added_tokens", '['));
    reading = "";
    return t;
}

enum { LETTER, NUMBER, BLANK, OTHER };

static int kind_of(uint32_t point) {
    if (point < 0x80) {
        int c = (int)point;
        return isalpha(c) ? LETTER : isdigit(c) ? NUMBER : isspace(c) ? BLANK : OTHER;
    }
    if (point == 0x85 || point == 0xa0 || point == 0x1680 || (point >= 0x2000 && point <= 0x200a) ||
        point == 0x2028 || point == 0x2029 || point == 0x202f || point == 0x205f || point == 0x3000)
        return BLANK;
    if (within(point, LETTERS, sizeof LETTERS / sizeof *LETTERS)) return LETTER;
    return within(point, NUMBERS, sizeof NUMBERS / sizeof *NUMBERS) ? NUMBER : OTHER;
}

/* A text as characters: their kinds, and where they begin; one more place for the end. */
typedef struct {
    const char *text;
    int64_t count, *starts;
    unsigned char *kinds;
} Characters;

static Characters characters_of(const char *text, int64_t length) {
    Characters c = {.text = text, .starts = allocate(length + 1, sizeof *c.starts)};
    c.kinds = allocate(length + 1, 1);
    const char *at = text, *end = text + length;
    while (at < end) {
        c.starts[c.count] = at - text;
        int64_t point = next_point(&at, end);
        if (point < 0) fail("the prompt is not UTF-8");
        c.kinds[c.count++] = (unsigned char)kind_of((uint32_t)point);
    }
    c.starts[c.count] = length;
    return c;
}

static int64_t run_end(const Characters *c, int64_t from, int64_t end, int kind) {
    while (from < end && c->kinds[from] == kind) from++;
    return from;
}

/* The end of a word that begins at `from`, in a text without digits up to `end`, as in GPT-2:
 * 's|'t|'re|'ve|'m|'ll|'d| ?letters| ?others|blanks but the last before a word|blanks */
static int64_t word_end(const Characters *c, int64_t from, int64_t end) {
    const char *at = c->text + c->starts[from];
    int64_t left = c->starts[end] - c->starts[from];
    if (*at == '\'' && left > 1 && strchr("stmd", at[1]) && at[1]) return from + 2;
    if (left > 2 && (!strncmp(at, "'re", 3) || !strncmp(at, "'ve", 3) || !strncmp(at, "'ll", 3)))
        return from + 3;
    int64_t start = from + (*at == ' ' && from + 1 < end && c->kinds[from + 1] != BLANK);
    if (c->kinds[start] != BLANK) return run_end(c, start, end, c->kinds[start]);
    int64_t blanks = run_end(c, from, end, BLANK);
    return blanks == end || blanks == from + 1 ? blanks : blanks - 1;
}

/* Add the tokens of a word: the pair with the lowest rank is joined until there is none. */
static void add_word(const Tokenizer *t, const char *bytes, int64_t length, Tokens *out) {
    int64_t known = *piece_slot(t, (Piece){bytes, length}, (Piece){"", 0});
    if (t->whole_words && known) {
        add_token(out, known - 1);
        return;
    }
    int64_t *word = allocate(length, sizeof *word);
    for (int64_t i = 0; i < length; i++) word[i] = t->of_byte[(unsigned char)bytes[i]];
    for (;;) {
        const Merge *best = NULL;
        int64_t place = 0;
        for (int64_t i = 0; i + 1 < length; i++) {
            const Merge *merge = merge_slot(t, word[i], word[i + 1]);
            if (merge->whole && (!best || merge->rank < best->rank)) {
                best = merge;
                place = i;
            }
        }
        if (!best) break;
        word[place] = best->whole;
        length--;
        memmove(word + place + 1, word + place + 2, sizeof *word * (size_t)(length - place - 1));
    }
    for (int64_t i = 0; i < length; i++) add_token(out, word[i]);
    free(word);
}

/* Add the tokens of a text; special names in it are plain text. */
static void encode(const Tokenizer *t, const char *text, int64_t length, Tokens *out) {
    Characters c = characters_of(text, length);
    int64_t from = 0;
    while (from < c.count) {
        int64_t end = from, next = from + 1; /* up to the next digit, which is a word of its own */
        if (c.kinds[from] != NUMBER) {
            while (end < c.count && c.kinds[end] != NUMBER) end++;
            next = word_end(&c, from, end);
        }
        add_word(t, text + c.starts[from], c.starts[next] - c.starts[from], out);
        from = next;
    }
    free(c.starts);
    free(c.kinds);
}

#endif
