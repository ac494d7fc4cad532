/* Runs a model folder of Agent Forge without Python: config.json, model.safetensors (packed, or
 * whole in 16 or 32 bits) and tokenizer.json. `forge_run --help` says how it is called.
 *
 * The token step is step.h, compiled in plain.c and avx2.c: the same sums in the same order as in
 * Agent Forge itself. json.h, tokenizer.h, weights.h and entropy.h read the files; here are the
 * network that they make, the choice of the next token, and the command. */

#include <time.h>

#include "tokenizer.h"
#include "weights.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tiles and weights are read as little-endian words"
#endif

#define MOST_STEPS 1000 /* layers, recursion steps, micro steps, as in config/settings.py */
#define PROMPT_BYTES (16 << 20)
#define MOST_TOKENS 1000000000
#define ROPE_BASE 100.0         /* as in model/attention.py */
#define SHORTEST_HALF_LIFE 16.0 /* as in model/memory.py */
#define LEAST_ODDS 1e-4f        /* of the halting head, as in model/recursion.py */
#define THOUGHT_TOKENS 256      /* of a thought in a chat, as in infer/thinking.py */

/* -- the network ------------------------------------------------------------------------------ */

typedef struct {
    Network network;
    Weights weights;
    Tokenizer tokenizer;
    float bound;     /* of halting */
    double capacity; /* of the memory, in tokens */
} Model;

static double number(const Json *config, const char *name, double least, double most) {
    double value = required(config, name, '0')->number;
    if (value < least || value > most) fail("%s is not from %g to %g", name, least, most);
    return value;
}

static int64_t size_of(const Json *config, const char *name, int64_t most) {
    return whole(member(config, name), name, 1, most);
}

/* Which matrices are coded; `record` is of config.json. */
static void read_packing(const Json *record, Weights *w) {
    if (!record || record->kind == 'n') return;
    if (!is_text(member(record, "packed_by"), "agent_forge"))
        fail("the model is not packed by Agent Forge");
    whole(member(record, "version"), "the version of the packing", 1, 1);
    w->activation_bits = whole(member(record, "activation_bits"), "activation_bits", 0, 8);
    if (w->activation_bits % 8) fail("activation_bits is neither 0 nor 8");
    w->matrices = required(record, "matrices", '{');
}

/* A config.json without `head_size`, or with 0, has heads that share out the width. */
static void read_heads(const Json *config, Network *n) {
    const Json *size = member(config, "head_size");
    n->head_width = size ? whole(size, "head_size", 0, MOST) : 0;
    if (n->head_width % 2) fail("head_size is odd");
    if (!n->head_width && n->width % (2 * n->heads))
        fail("n_heads does not divide d_model into pairs");
    if (!n->head_width) n->head_width = n->width / n->heads;
    n->attention = n->heads * n->head_width;
    if (n->attention > MOST) fail("its heads are larger than the program can hold");
}

static void read_config(const char *folder, Model *m) {
    Network *n = &m->network;
    int64_t size;
    char *content = read_file(folder, "config.json", RECORD_BYTES, &size);
    const Json *c = parse(content, size);
    if (!is_text(member(c, "model_type"), "agent_forge"))
        fail("it is not of a network of Agent Forge");
    n->vocab = size_of(c, "vocab_size", MOST);
    n->rank = size_of(c, "embed_rank", MOST);
    n->width = size_of(c, "d_model", MOST);
    n->layers = size_of(c, "n_layers", MOST_STEPS);
    n->heads = size_of(c, "n_heads", MOST);
    n->hidden = size_of(c, "ffn_hidden", MOST);
    n->channels = size_of(c, "d_mem", MOST);
    n->gate_hidden = size_of(c, "gate_hidden", MOST);
    n->recursion_hidden = size_of(c, "trm_hidden", MOST);
    n->window = size_of(c, "sw_window", MOST);
    n->steps = size_of(c, "t_max", MOST_STEPS);
    n->micro_steps = size_of(c, "micro_steps", MOST_STEPS);
    n->surprise = (float)number(c, "surprise_weight", 0, 1e30);
    n->novelty = (float)number(c, "novelty_weight", 0, 1e30);
    m->bound = (float)number(c, "halt_threshold", 0, 1);
    m->capacity = number(c, "memory_capacity", 1, 1e18);
    read_heads(c, n);
    if (n->surprise + n->novelty <= 0) fail("surprise_weight and novelty_weight are both 0");
    read_packing(member(c, "quantization_config"), &m->weights);
}

static Matrix layer(const Weights *w, const char *part, const char *name, int64_t rows,
                    int64_t columns) {
    char full[96];
    snprintf(full, sizeof full, "%s.%s.weight", part, name);
    return matrix(w, full, rows, columns, 1);
}

static const float *vector(const Weights *w, const char *part, const char *name, int64_t count) {
    char full[96];
    snprintf(full, sizeof full, "%s.%s", part, name);
    return floats(w, full, 1, count);
}

static Block read_block(const Weights *w, const Network *n, int64_t number) {
    char part[32];
    snprintf(part, sizeof part, "blocks.%d", (int)number);
    int64_t d = n->width, h = n->hidden, a = n->attention;
    return (Block){
        .norm_attention = vector(w, part, "norm_attention.gain", d),
        .norm_mlp = vector(w, part, "norm_mlp.gain", d),
        .q = layer(w, part, "attention.q", a, d),
        .k = layer(w, part, "attention.k", a, d),
        .v = layer(w, part, "attention.v", a, d),
        .out = layer(w, part, "attention.out", d, a),
        .gate = layer(w, part, "mlp.gate", h, d),
        .up = layer(w, part, "mlp.up", h, d),
        .down = layer(w, part, "mlp.down", d, h),
    };
}

static TwoLayers read_two_layers(const Weights *w, const char *part, int64_t inputs, int64_t hidden,
                                 int64_t width) {
    return (TwoLayers){
        .inner = layer(w, part, "inner", hidden, inputs * width),
        .outer = layer(w, part, "outer", width, hidden),
        .inner_bias = vector(w, part, "inner.bias", hidden),
        .outer_bias = vector(w, part, "outer.bias", width),
    };
}

/* rank x width from width x rank, as floats. */
static Matrix turned(const Matrix *m) {
    float *row = allocate(m->columns, sizeof *row), *data;
    data = allocate(m->rows * m->columns, sizeof *data);
    for (int64_t i = 0; i < m->columns; i++) { /* what the matrix makes of one 1 is a column */
        row[i] = 1;
        if (!multiply_plain(m, row, data + i * m->rows)) fail("there is no memory");
        row[i] = 0;
    }
    free(row);
    return (Matrix){FLOATS, m->columns, m->rows, data, NULL};
}

static float log_odds(float p) {
    p = p < LEAST_ODDS ? LEAST_ODDS : p > 1 - LEAST_ODDS ? 1 - LEAST_ODDS : p;
    return logf(p / (1 - p));
}

/* What follows from sizes alone: decays of the memory, frequencies of the rotary positions. */
static void derive(Network *n, double capacity) {
    int64_t half = n->head_width / 2, last = n->channels > 1 ? n->channels - 1 : 1;
    float *decays = allocate(n->channels, sizeof(float));
    float *frequencies = allocate(half, sizeof(float));
    double ratio = fmax(capacity, SHORTEST_HALF_LIFE) / SHORTEST_HALF_LIFE;
    for (int64_t i = 0; i < n->channels; i++) {
        float half_life = (float)(SHORTEST_HALF_LIFE * pow(ratio, (double)i / (double)last));
        decays[i] = (float)exp2(-1.0f / half_life);
    }
    for (int64_t i = 0; i < half; i++)
        frequencies[i] = (float)pow(ROPE_BASE, -(float)i / (float)half);
    n->decays = decays;
    n->frequencies = frequencies;
}

static void read_network(const Weights *w, Network *n) {
    int64_t d = n->width, blocks = n->layers;
    n->blocks = allocate(blocks, sizeof(Block));
    for (int64_t i = 0; i < blocks; i++) n->blocks[i] = read_block(w, n, i);
    n->embedding = matrix(w, "embedding.weight", n->vocab, n->rank, 0);
    n->projection = matrix(w, "projection.weight", d, n->rank, 0);
    n->projection_back = turned(&n->projection);
    n->memory_down = layer(w, "memory", "down", n->channels, d);
    n->memory_up = layer(w, "memory", "up", d, n->channels);
    n->memory_norm = vector(w, "memory", "norm.gain", d);
    n->gate_norm = vector(w, "gate", "norm.gain", d);
    n->gate = read_two_layers(w, "gate", 2, n->gate_hidden, d);
    n->refine = read_two_layers(w, "recursion.refine", 3, n->recursion_hidden, d);
    n->update = read_two_layers(w, "recursion.update", 2, n->recursion_hidden, d);
    n->recursion_norm = vector(w, "recursion", "norm.gain", d);
    n->y_start = vector(w, "recursion", "y_start", d);
    n->z_start = vector(w, "recursion", "z_start", d);
    n->norm = vector(w, "norm", "gain", d);
    n->halting = vector(w, "halting", "head.weight", d);
    n->halting_bias = vector(w, "halting", "head.bias", 1);
    float *shifts = floats(w, "halting.mean_target", 1, n->steps);
    const float *said = vector(w, "halting", "mean_probability", n->steps);
    for (int64_t i = 0; i < n->steps; i++) shifts[i] = log_odds(shifts[i]) - log_odds(said[i]);
    n->halting_shifts = shifts;
}

static Model read_model(const char *folder) {
    Model m = {.bound = 0};
    read_config(folder, &m);
    m.tokenizer = read_tokenizer(folder, m.network.vocab);
    read_weights(folder, &m.weights);
    read_network(&m.weights, &m.network);
    free(m.weights.content);
    derive(&m.network, m.capacity);
    reading = "";
    return m;
}

/* -- choosing tokens -------------------------------------------------------------------------- */

typedef struct {
    const char *folder, *prompt, *ids;
    int64_t tokens, top_k;
    uint64_t seed;
    double temperature;
    int chat, encode, logits, bench;
} Options;

/* A text that is read and continued. */
typedef struct {
    const Model *model;
    const Options *options;
    ReadFunction *read;
    Cache cache;
    float *logits;   /* of the next token */
    double *chances; /* room for a draw */
    uint64_t random;
} Text;

/* SplitMix64 (Steele, Lea and Flood, 2014): a number from 0 up to, but not including, 1. The seed
 * is its first state; draws are not those of torch. */
static double draw(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

static int descending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* The lowest logit that is among the `k` highest. */
static double lowest_kept(Text *t, int64_t k) {
    int64_t vocab = t->model->network.vocab;
    if (!k || k >= vocab) return -INFINITY;
    for (int64_t i = 0; i < vocab; i++) t->chances[i] = t->logits[i];
    qsort(t->chances, (size_t)vocab, sizeof *t->chances, descending);
    return t->chances[k - 1];
}

/* The next token: the likeliest, or at a temperature one that is drawn. */
static int64_t choose(Text *t) {
    int64_t vocab = t->model->network.vocab, best = 0, last = 0;
    for (int64_t i = 0; i < vocab; i++) {
        if (isnan(t->logits[i])) fail("the network computes what is no number");
        if (t->logits[i] > t->logits[best]) best = i;
    }
    if (!isfinite(t->logits[best])) fail("the network computes infinite numbers");
    if (t->options->temperature == 0) return best;
    double bound = lowest_kept(t, t->options->top_k), sum = 0, left;
    for (int64_t i = 0; i < vocab; i++) {
        double logit = (double)t->logits[i] - t->logits[best];
        t->chances[i] = t->logits[i] >= bound ? exp(logit / t->options->temperature) : 0;
        sum += t->chances[i];
    }
    left = draw(&t->random) * sum;
    for (int64_t i = 0; i < vocab; i++) {
        if (!(t->chances[i] > 0)) continue;
        last = i;
        if ((left -= t->chances[i]) < 0) break;
    }
    return last;
}

static void read_tokens(Text *t, const int64_t *ids, int64_t count) {
    const Network *n = &t->model->network;
    if (t->read(n, &t->cache, ids, count, t->model->bound, t->logits) < 0)
        fail("there is no memory for a token");
}

static void ban(Text *t, int64_t first, int64_t last) {
    for (int64_t id = first; id <= last; id++) t->logits[id] = -INFINITY;
}

static void show(const Text *t, int64_t id, FILE *to) {
    Piece piece = t->model->tokenizer.pieces[id];
    if (piece.length) fwrite(piece.bytes, 1, (size_t)piece.length, to);
    fflush(to);
}

/* Think: up to `[/endthinking]`, which is read even if the model did not come to it. */
static void think(Text *t) {
    int64_t id = THINKING, end = ANSWERING;
    for (int64_t i = 0; i < THOUGHT_TOKENS; i++) {
        read_tokens(t, &id, 1);
        ban(t, THINKING, THINKING);
        id = choose(t);
        if (id == ANSWERING || id == END_OF_TEXT || id == END_OF_TURN) break;
        if (id < SPECIALS) fprintf(stderr, "%s", SPECIAL[id]);
        show(t, id, stderr);
        if (i + 1 == THOUGHT_TOKENS) read_tokens(t, &id, 1);
    }
    fputc('\n', stderr);
    read_tokens(t, &end, 1);
}

/* Write up to the end of the text; thoughts are not written, as `forge generate` has it. A chat may
 * begin with one, which goes to stderr. Returns how many tokens were chosen. */
static int64_t write_text(Text *t) {
    const Options *o = t->options;
    if (o->chat && !o->bench && choose(t) == THINKING) think(t);
    for (int64_t i = 0; i < o->tokens; i++) {
        ban(t, TOOL_CALL, SPECIALS - 1); /* it calls no tools, and thinks before it answers alone */
        if (o->bench) ban(t, 0, SPECIALS - 1);
        int64_t id = choose(t);
        if (id == END_OF_TEXT || id == END_OF_TURN) return i;
        if (!o->bench) show(t, id, stdout);
        if (i + 1 < o->tokens || o->bench) read_tokens(t, &id, 1);
    }
    return o->tokens;
}

/* -- the command ------------------------------------------------------------------------------ */

static const char *const HELP =
    "forge_run MODEL_DIR PROMPT [options]   continue a text; PROMPT - reads stdin\n"
    "  --chat            PROMPT is a user's turn; a thought goes to stderr\n"
    "  --tokens N        at most so many (128)\n"
    "  --temperature T   0 takes the likeliest (0), else 0.001 to 1000\n"
    "  --top-k K         draw among the K likeliest (0: all)\n"
    "  --seed S          of the draws (0)\n"
    "  --ids \"1 2 3\"     token ids instead of PROMPT\n"
    "  --encode          print the token ids of the prompt, and no more\n"
    "  --logits          print the logits behind the prompt, and no more\n"
    "  --bench           print the speed instead of the text, which has N tokens\n";

static int64_t integer(const char *text, const char *name, int64_t least, int64_t most) {
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno || value < least || value > most)
        fail("%s is a whole number from %lld to %lld", name, (long long)least, (long long)most);
    return value;
}

static double temperature(const char *text) {
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value == 0 || (value >= 0.001 && value <= 1000)))
        fail("--temperature is 0, or from 0.001 to 1000");
    return value;
}

static int take_flag(Options *o, const char *name) {
    int *flag = !strcmp(name, "--chat")     ? &o->chat
                : !strcmp(name, "--encode") ? &o->encode
                : !strcmp(name, "--logits") ? &o->logits
                : !strcmp(name, "--bench")  ? &o->bench
                                            : NULL;
    if (flag) *flag = 1;
    return flag != NULL;
}

static void take_option(Options *o, const char *name, const char *value) {
    static const char *const known[] = {"--tokens", "--temperature", "--top-k", "--seed", "--ids"};
    int which = 0;
    while (which < 5 && strcmp(name, known[which])) which++;
    if (which == 5) fail("there is no option %s; --help lists them", name);
    if (!value) fail("%s needs a value", name);
    if (which == 0) o->tokens = integer(value, name, 1, MOST_TOKENS);
    if (which == 1) o->temperature = temperature(value);
    if (which == 2) o->top_k = integer(value, name, 0, MOST);
    if (which == 3) o->seed = (uint64_t)integer(value, name, 0, INT64_MAX);
    if (which == 4) o->ids = value;
}

static Options read_options(int count, char **given) {
    Options o = {.tokens = 128};
    for (int i = 1; i < count; i++) {
        if (strncmp(given[i], "--", 2)) {
            if (o.prompt) fail("there is more than one prompt: put it in quotes");
            *(o.folder ? &o.prompt : &o.folder) = given[i];
        } else if (!strcmp(given[i], "--help")) {
            fputs(HELP, stdout);
            exit(0);
        } else if (!take_flag(&o, given[i])) {
            take_option(&o, given[i], i + 1 < count ? given[i + 1] : NULL);
            i++;
        }
    }
    if (!o.folder || (!o.prompt) == (!o.ids)) fail("a model and a prompt are needed\n%s", HELP);
    return o;
}

/* Add the ids that a text lists. */
static void list_ids(const char *text, int64_t vocab, Tokens *out) {
    while (*text) {
        char *end;
        long long id = strtoll(text, &end, 10);
        if (end == text || id < 0 || id >= vocab || (*end && *end != ' '))
            fail("--ids are whole numbers from 0 to %lld", (long long)vocab - 1);
        add_token(out, id);
        for (text = end; *text == ' ';) text++;
    }
}

static Tokens prompt_tokens(const Model *m, const Options *o) {
    Tokens tokens = {0};
    const char *prompt = o->prompt;
    int64_t size = prompt ? (int64_t)strlen(prompt) : 0;
    if (prompt && !strcmp(prompt, "-")) prompt = read_stream(stdin, PROMPT_BYTES, &size);
    if (o->chat) add_token(&tokens, USER);
    if (prompt)
        encode(&m->tokenizer, prompt, size, &tokens);
    else
        list_ids(o->ids, m->network.vocab, &tokens);
    if (o->chat) add_token(&tokens, END_OF_TURN);
    if (o->chat) add_token(&tokens, ASSISTANT);
    if (!tokens.count) fail("the prompt is empty");
    return tokens;
}

static ReadFunction *best_step(void) {
#if defined(__x86_64__)
    const char *plain = getenv("FORGE_PLAIN_C");
    if (__builtin_cpu_supports("avx2") && !(plain && !strcmp(plain, "1"))) return read_avx2;
#endif
    return read_plain;
}

static Text begin_text(const Model *m, const Options *o, int64_t prompt) {
    const Network *n = &m->network;
    int64_t most = prompt + o->tokens + THOUGHT_TOKENS + 2;
    Text t = {.model = m, .options = o, .read = best_step(), .random = o->seed};
    t.cache.capacity = most < n->window ? most : n->window;
    t.cache.keys_values = allocate(n->layers * 2 * n->attention * t.cache.capacity, sizeof(float));
    t.cache.memory = allocate(4 * n->channels, sizeof(float));
    t.logits = allocate(n->vocab + TILE_ROWS, sizeof(float));
    t.chances = allocate(n->vocab, sizeof(double));
    return t;
}

static void say_speed(const char *did, int64_t count, clock_t from, clock_t to) {
    double seconds = (double)(to - from) / CLOCKS_PER_SEC;
    printf("%s %lld tokens, %.1f tokens/s\n", did, (long long)count,
           seconds > 0 ? (double)count / seconds : 0);
}

/* The most memory that this process has had, where the system tells it. */
static void say_memory(void) {
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    long long kilobytes;
    while (status && fgets(line, sizeof line, status))
        if (sscanf(line, "VmHWM: %lld kB", &kilobytes) == 1)
            printf("peak memory: %lld kB\n", kilobytes);
    if (status) fclose(status);
}

int main(int count, char **given) {
    Options o = read_options(count, given);
    Model m = read_model(o.folder);
    Tokens prompt = prompt_tokens(&m, &o);
    for (int64_t i = 0; o.encode && i < prompt.count; i++)
        printf("%lld%c", (long long)prompt.ids[i], i + 1 < prompt.count ? ' ' : '\n');
    if (o.encode) return 0;
    Text t = begin_text(&m, &o, prompt.count);
    clock_t start = clock();
    read_tokens(&t, prompt.ids, prompt.count);
    clock_t read = clock();
    for (int64_t i = 0; o.logits && i < m.network.vocab; i++) printf("%.6g\n", t.logits[i]);
    if (o.logits) return 0;
    int64_t written = write_text(&t);
    if (o.bench) {
        say_speed("read", prompt.count, start, read);
        say_speed("wrote", written, read, clock());
        say_memory();
    } else {
        putchar('\n');
    }
    return 0;
}
