/* The Python module: takes over a network, checks every size, and calls the token step.
 *
 * open(sizes, weights, tensors, avx2) -> network
 *     sizes: see `Network`; weights: surprise, novelty; tensors: {name: (kind, data, scales)}
 * read(network, keys_values, memory, position, tokens, bound, logits) -> steps
 *     keys_values: layers x 2 x heads x capacity x size of one; memory: 4 x channels; these and
 *     logits are changed
 * multiply((kind, data, scales), rows, columns, x, out, avx2): one matrix, for tests
 * has_avx2() -> bool
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "network.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tiles are read as little-endian words"
#endif

#define NAME "agent_forge.native.network"
#define MOST 2097152 /* of any size: three of them side by side, times 2 * 127, fit int32 */

typedef struct {
    Network network;
    int avx2;
    int held, room; /* buffers */
    Py_buffer *buffers;
} Opened;

#if defined(__x86_64__)
#define READ_AVX2 read_avx2
#define MULTIPLY_AVX2 multiply_avx2
static int has_avx2(void) { return __builtin_cpu_supports("avx2") != 0; }
#else
#define READ_AVX2 read_plain
#define MULTIPLY_AVX2 multiply_plain
static int has_avx2(void) { return 0; }
#endif

/* -- buffers ---------------------------------------------------------------------------------- */

/* A buffer of `count` items of this format, in order; 0 and an error if it is not. */
static int view(PyObject *given, const char *name, const char *formats, int64_t size, int64_t count,
                int writable, Py_buffer *out) {
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(given, out, flags) < 0) return 0;
    const char *format = out->format ? out->format : "B";
    if (strlen(format) != 1 || !strchr(formats, *format) || out->itemsize != size)
        PyErr_Format(PyExc_ValueError, "%s has items of type '%s'", name, format);
    else if ((uintptr_t)out->buf % (uintptr_t)size)
        PyErr_Format(PyExc_ValueError, "%s is not aligned", name);
    else if (count >= 0 && out->len != count * size)
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes, not %lld", name, out->len,
                     (long long)(count * size));
    else
        return 1;
    PyBuffer_Release(out);
    return 0;
}

static int all_finite(const char *name, const float *values, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(values[i])) {
            PyErr_Format(PyExc_ValueError, "%s holds NaN or infinity", name);
            return 0;
        }
    return 1;
}

/* 0 and an error if two bits of a word are 3, which is no trit: sums could overflow. */
static int all_trits(const char *name, const uint32_t *words, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (words[i] & words[i] >> 1 & 0x55555555u) {
            PyErr_Format(PyExc_ValueError, "%s holds what is no trit", name);
            return 0;
        }
    return 1;
}

/* A buffer that stays as long as the network does. */
static const void *hold(Opened *o, PyObject *given, const char *name, int words, int64_t count) {
    if (o->held == o->room) {
        int room = 2 * o->room + 32;
        Py_buffer *more = realloc(o->buffers, sizeof(Py_buffer) * (size_t)room);
        if (!more) return PyErr_NoMemory();
        o->buffers = more;
        o->room = room;
    }
    Py_buffer *own = o->buffers + o->held;
    if (!view(given, name, words ? "IL" : "f", 4, count, 0, own)) return NULL;
    o->held++;
    return words || all_finite(name, own->buf, count) ? own->buf : NULL;
}

/* -- tensors ---------------------------------------------------------------------------------- */

static int read_matrix(Opened *o, PyObject *given, const char *name, int64_t rows, int64_t columns,
                       Matrix *out) {
    PyObject *data, *scales;
    int kind;
    if (!PyTuple_Check(given)) {
        PyErr_Format(PyExc_TypeError, "%s is no tuple", name);
        return 0;
    }
    if (!PyArg_ParseTuple(given, "iOO", &kind, &data, &scales)) return 0;
    int64_t tiles = PARTS(rows, TILE_ROWS), groups = PARTS(columns, GROUP_COLUMNS);
    *out = (Matrix){.kind = kind, .rows = rows, .columns = columns};
    if (kind == FLOATS) {
        out->data = hold(o, data, name, 0, rows * columns);
        return out->data != NULL;
    }
    if (kind != TERNARY && kind != NIBBLES) {
        PyErr_Format(PyExc_ValueError, "%s is of kind %d", name, kind);
        return 0;
    }
    int64_t words = kind == TERNARY ? PARTS(columns, WORD_TRITS) : groups * GROUP_WORDS;
    out->data = hold(o, data, name, 1, tiles * words * TILE_ROWS);
    int64_t scale_count = tiles * TILE_ROWS * (kind == TERNARY ? 1 : groups);
    if (kind == TERNARY && out->data && !all_trits(name, out->data, tiles * words * TILE_ROWS))
        return 0;
    out->scales = out->data ? hold(o, scales, name, 0, scale_count) : NULL;
    return out->scales != NULL;
}

/* The matrix of this name; `name` may have a number in it. */
static int matrix(Opened *o, PyObject *tensors, const char *name, int64_t number, int64_t rows,
                  int64_t columns, Matrix *out) {
    char full[96];
    PyOS_snprintf(full, sizeof full, name, (int)number);
    PyObject *given = PyDict_GetItemString(tensors, full);
    if (!given) {
        PyErr_Format(PyExc_ValueError, "%s is missing", full);
        return 0;
    }
    return read_matrix(o, given, full, rows, columns, out);
}

static int vector(Opened *o, PyObject *tensors, const char *name, int64_t number, int64_t count,
                  const float **out) {
    Matrix m;
    if (!matrix(o, tensors, name, number, 1, count, &m)) return 0;
    if (m.kind != FLOATS) {
        PyErr_Format(PyExc_ValueError, "%s is not of floats", name);
        return 0;
    }
    *out = m.data;
    return 1;
}

static int block(Opened *o, PyObject *t, int64_t i, Block *b) {
    int64_t d = o->network.width, h = o->network.hidden, a = o->network.attention;
    return vector(o, t, "blocks.%d.norm_attention.gain", i, d, &b->norm_attention) &&
           vector(o, t, "blocks.%d.norm_mlp.gain", i, d, &b->norm_mlp) &&
           matrix(o, t, "blocks.%d.attention.q.weight", i, a, d, &b->q) &&
           matrix(o, t, "blocks.%d.attention.k.weight", i, a, d, &b->k) &&
           matrix(o, t, "blocks.%d.attention.v.weight", i, a, d, &b->v) &&
           matrix(o, t, "blocks.%d.attention.out.weight", i, d, a, &b->out) &&
           matrix(o, t, "blocks.%d.mlp.gate.weight", i, h, d, &b->gate) &&
           matrix(o, t, "blocks.%d.mlp.up.weight", i, h, d, &b->up) &&
           matrix(o, t, "blocks.%d.mlp.down.weight", i, d, h, &b->down);
}

static int memory_and_gate(Opened *o, PyObject *t, Network *n) {
    int64_t d = n->width, m = n->channels, h = n->gate_hidden;
    return matrix(o, t, "memory.down.weight", 0, m, d, &n->memory_down) &&
           matrix(o, t, "memory.up.weight", 0, d, m, &n->memory_up) &&
           vector(o, t, "memory.norm.gain", 0, d, &n->memory_norm) &&
           vector(o, t, "memory.decays", 0, m, &n->decays) &&
           vector(o, t, "gate.norm.gain", 0, d, &n->gate_norm) &&
           matrix(o, t, "gate.inner.weight", 0, h, 2 * d, &n->gate.inner) &&
           vector(o, t, "gate.inner.bias", 0, h, &n->gate.inner_bias) &&
           matrix(o, t, "gate.outer.weight", 0, d, h, &n->gate.outer) &&
           vector(o, t, "gate.outer.bias", 0, d, &n->gate.outer_bias);
}

static int recursion(Opened *o, PyObject *t, Network *n) {
    int64_t d = n->width, h = n->recursion_hidden;
    return matrix(o, t, "recursion.refine.inner.weight", 0, h, 3 * d, &n->refine.inner) &&
           vector(o, t, "recursion.refine.inner.bias", 0, h, &n->refine.inner_bias) &&
           matrix(o, t, "recursion.refine.outer.weight", 0, d, h, &n->refine.outer) &&
           vector(o, t, "recursion.refine.outer.bias", 0, d, &n->refine.outer_bias) &&
           matrix(o, t, "recursion.update.inner.weight", 0, h, 2 * d, &n->update.inner) &&
           vector(o, t, "recursion.update.inner.bias", 0, h, &n->update.inner_bias) &&
           matrix(o, t, "recursion.update.outer.weight", 0, d, h, &n->update.outer) &&
           vector(o, t, "recursion.update.outer.bias", 0, d, &n->update.outer_bias) &&
           vector(o, t, "recursion.norm.gain", 0, d, &n->recursion_norm) &&
           vector(o, t, "recursion.y_start", 0, d, &n->y_start) &&
           vector(o, t, "recursion.z_start", 0, d, &n->z_start) &&
           vector(o, t, "halting.head.weight", 0, d, &n->halting) &&
           vector(o, t, "halting.head.bias", 0, 1, &n->halting_bias) &&
           vector(o, t, "halting.shifts", 0, n->steps, &n->halting_shifts);
}

static int all_tensors(Opened *o, PyObject *t) {
    Network *n = &o->network;
    n->blocks = calloc((size_t)n->layers, sizeof(Block));
    if (!n->blocks) return PyErr_NoMemory() != NULL;
    for (int64_t i = 0; i < n->layers; i++)
        if (!block(o, t, i, n->blocks + i)) return 0;
    int64_t d = n->width, half = n->head_width / 2;
    if (!matrix(o, t, "embedding.weight", 0, n->vocab, n->rank, &n->embedding)) return 0;
    if (n->embedding.kind == TERNARY) { /* its inputs are not rounded */
        PyErr_SetString(PyExc_ValueError, "embedding.weight is of floats or nibbles");
        return 0;
    }
    return matrix(o, t, "projection.weight", 0, d, n->rank, &n->projection) &&
           matrix(o, t, "projection.back", 0, n->rank, d, &n->projection_back) &&
           vector(o, t, "attention.frequencies", 0, half, &n->frequencies) &&
           vector(o, t, "norm.gain", 0, d, &n->norm) && memory_and_gate(o, t, n) &&
           recursion(o, t, n);
}

/* -- the functions ---------------------------------------------------------------------------- */

static void release(Opened *o) {
    for (int i = 0; i < o->held; i++) PyBuffer_Release(o->buffers + i);
    free(o->buffers);
    free(o->network.blocks);
    free(o);
}

static void release_capsule(PyObject *capsule) { release(PyCapsule_GetPointer(capsule, NAME)); }

static int sizes_fit(const Network *n) {
    const int64_t sizes[] = {n->vocab,    n->rank,        n->width,            n->layers,
                             n->heads,    n->hidden,      n->channels,         n->gate_hidden,
                             n->recursion_hidden, n->window, n->steps, n->micro_steps,
                             n->head_width};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] < 1 || sizes[i] > MOST) return 0;
    float total = n->surprise + n->novelty;
    return n->head_width % 2 == 0 && n->heads * n->head_width <= MOST && isfinite(total) &&
           total > 0;
}

static PyObject *open_network(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tensors, *capsule;
    Opened *o = calloc(1, sizeof *o);
    if (!o) return PyErr_NoMemory();
    Network *n = &o->network;
    if (!PyArg_ParseTuple(args, "(LLLLLLLLLLLLL)(ff)O!p", &n->vocab, &n->rank, &n->width, &n->layers,
                          &n->heads, &n->hidden, &n->channels, &n->gate_hidden,
                          &n->recursion_hidden, &n->window, &n->steps, &n->micro_steps,
                          &n->head_width, &n->surprise, &n->novelty, &PyDict_Type, &tensors,
                          &o->avx2))
        goto failed;
    o->avx2 = o->avx2 && has_avx2();
    if (!sizes_fit(n)) {
        PyErr_Format(PyExc_ValueError, "sizes are from 1 to %d, and a head has pairs", MOST);
        goto failed;
    }
    n->attention = n->heads * n->head_width;
    if (!all_tensors(o, tensors)) goto failed;
    if ((capsule = PyCapsule_New(o, NAME, release_capsule))) return capsule;
failed:
    release(o);
    return NULL;
}

/* 0 and an error if these tokens cannot be read into this cache. */
static int readable(const Network *n, const Cache *c, const int64_t *tokens, int64_t count) {
    if (c->capacity < 1 || c->capacity > n->window || c->position < 0 || count < 1 ||
        c->position > INT64_MAX - count ||
        (c->capacity < n->window && c->position + count > c->capacity)) {
        PyErr_SetString(PyExc_ValueError, "the tokens do not fit the cache");
        return 0;
    }
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= n->vocab) {
            PyErr_Format(PyExc_ValueError, "token %lld is outside the vocabulary of %lld",
                         (long long)tokens[i], (long long)n->vocab);
            return 0;
        }
    return 1;
}

/* Views of the four buffers of `read`; how many of them there are. */
static int read_views(const Network *n, PyObject *const given[4], Py_buffer views[4]) {
    if (!view(given[0], "keys and values", "f", 4, -1, 1, views)) return 0;
    if (!view(given[1], "the memory", "f", 4, 4 * n->channels, 1, views + 1)) return 1;
    if (!view(given[2], "tokens", "lq", 8, -1, 0, views + 2)) return 2;
    return view(given[3], "logits", "f", 4, n->vocab, 1, views + 3) ? 4 : 3;
}

static PyObject *read_tokens(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *given[4];
    Py_buffer views[4];
    Cache cache;
    float bound;
    if (!PyArg_ParseTuple(args, "OOOLOfO", &capsule, given, given + 1, &cache.position, given + 2,
                          &bound, given + 3))
        return NULL;
    Opened *o = PyCapsule_GetPointer(capsule, NAME);
    if (!o) return NULL;
    const Network *n = &o->network;
    int64_t row = n->layers * 2 * n->attention * 4, steps = -2; /* bytes of one token */
    int held = read_views(n, given, views);
    if (held == 4) {
        const int64_t *tokens = views[2].buf, count = views[2].len / 8;
        cache.keys_values = views[0].buf;
        cache.memory = views[1].buf;
        cache.capacity = views[0].len % row ? 0 : views[0].len / row;
        if (readable(n, &cache, tokens, count)) {
            ReadFunction *read = o->avx2 ? READ_AVX2 : read_plain;
            Py_BEGIN_ALLOW_THREADS
            steps = read(n, &cache, tokens, count, bound, views[3].buf);
            Py_END_ALLOW_THREADS
        }
    }
    while (held > 0) PyBuffer_Release(views + --held);
    if (steps == -1) return PyErr_NoMemory();
    return steps < 0 ? NULL : PyLong_FromLongLong(steps);
}

static PyObject *multiply_one(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *given, *x_given, *out_given;
    int64_t rows, columns;
    int avx2, done = 0;
    if (!PyArg_ParseTuple(args, "O!LLOOp", &PyTuple_Type, &given, &rows, &columns, &x_given,
                          &out_given, &avx2))
        return NULL;
    if (rows < 1 || columns < 1 || rows > MOST || columns > MOST)
        return PyErr_Format(PyExc_ValueError, "sizes are from 1 to %d", MOST);
    Opened held = {0};
    Matrix m;
    Py_buffer x, out;
    if (read_matrix(&held, given, "the matrix", rows, columns, &m) &&
        view(x_given, "x", "f", 4, columns, 0, &x)) {
        if (view(out_given, "out", "f", 4, rows, 1, &out)) {
            MultiplyFunction *multiply = avx2 && has_avx2() ? MULTIPLY_AVX2 : multiply_plain;
            done = multiply(&m, x.buf, out.buf);
            if (!done) PyErr_NoMemory();
            PyBuffer_Release(&out);
        }
        PyBuffer_Release(&x);
    }
    for (int i = 0; i < held.held; i++) PyBuffer_Release(held.buffers + i);
    free(held.buffers);
    if (!done) return NULL;
    Py_RETURN_NONE;
}

static PyObject *avx2_is_there(PyObject *self, PyObject *none) {
    (void)self;
    (void)none;
    return PyBool_FromLong(has_avx2());
}

static PyMethodDef functions[] = {
    {"open", open_network, METH_VARARGS, "Take over a network."},
    {"read", read_tokens, METH_VARARGS, "Read tokens into a cache; logits of the last, and steps."},
    {"multiply", multiply_one, METH_VARARGS, "Multiply one matrix with a vector."},
    {"has_avx2", avx2_is_there, METH_NOARGS, "True if this processor has AVX2."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, functions,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
