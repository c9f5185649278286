/* Codec int8: groups of 16-bit floats as 8-bit integers with a scale; see tiers/codec.py.

   Results are the same to the bit as those of the NumPy code there, so everything is written with
   plain operations of IEEE 754 singles, in loops that a compiler turns into vector instructions. */

/* One build for every Python from 3.11 on. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <fenv.h>
#include <stdint.h>
#include <string.h>

enum {
    GROUP = 64,
    CODED = GROUP + 2, /* the largest number by size, and an integer for each */
};

enum { BFLOAT16 = 0, FLOAT16 = 1 };

enum {
    INFINITE = 0x7F80,
    NO_NUMBER = 0x7FC0,
    HALF_INFINITE = 0x7C00,
    NO_HALF = 0x7E00,
    LEAST = 0x0400, /* bfloat16: 127 divided by less is beyond what is finite */
};

/* Adding it and looking at the lowest bits rounds to the nearest integer, halves to even. */
#define ROUNDING 12582912.0f

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define WIDEST __attribute__((target_clones("avx2", "default")))
#else
#define WIDEST
#endif

static inline float
single(uint32_t bits)
{
    float found;
    memcpy(&found, &bits, sizeof(found));
    return found;
}

static inline uint32_t
bits_of(float number)
{
    uint32_t found;
    memcpy(&found, &number, sizeof(found));
    return found;
}

/* A finite number of either kind. */
static inline float
widened(uint16_t number, int kind)
{
    uint32_t sign = (uint32_t)(number & 0x8000) << 16;
    if (kind == BFLOAT16)
        return single((uint32_t)number << 16);
    /* The exponent has another bias: 2^112 makes up for it, of subnormal numbers, too. */
    return single(sign | bits_of(single((uint32_t)(number & 0x7FFF) << 13) * 0x1p112f));
}

/* The nearest number of either kind, halves to even; what is too large is the largest. */
static inline uint16_t
narrowed(float number, int kind)
{
    uint32_t sign = bits_of(number) & 0x80000000u, size = bits_of(number) ^ sign;
    if (kind == BFLOAT16) {
        size = (size + 0x7FFF + ((size >> 16) & 1)) >> 16;
        return (uint16_t)((sign >> 16) | (size > 0x7F7F ? 0x7F7F : size));
    }
    /* Below 2^-14 numbers are multiples of 2^-24, which are the lowest bits of those from 1/2 on. */
    int32_t small = (int32_t)(bits_of(single(size) + 0.5f) - 0x3F000000u);
    int32_t usual = (int32_t)(size - 0x38000000u + 0xFFF + ((size >> 13) & 1)) >> 13;
    int32_t is_small = -((int32_t)size < 0x38800000);
    int32_t found = (small & is_small) | (usual & ~is_small);
    found = found > 0x7BFF ? 0x7BFF : found;
    return (uint16_t)((sign >> 16) | (uint32_t)found);
}

static inline void
encode_group(const uint16_t *source, uint8_t *target, int kind)
{
    int16_t largest = 0;
    for (int i = 0; i < GROUP; i++) {
        int16_t size = (int16_t)(source[i] & 0x7FFF);
        largest = size > largest ? size : largest;
    }
    uint16_t told = (uint16_t)largest;
    float factor = 0.0f;
    if (largest >= (kind == BFLOAT16 ? INFINITE : HALF_INFINITE))
        /* A number that is none, or infinite: nothing of the group comes back. */
        told = kind == BFLOAT16 ? NO_NUMBER : NO_HALF;
    else if (kind == BFLOAT16 && largest < LEAST)
        told = 0;
    else if (largest)
        factor = 127.0f / widened(told, kind);
    memcpy(target, &told, 2);
    int8_t *integers = (int8_t *)target + 2;
    if (factor == 0.0f) {
        memset(integers, 0, GROUP);
        return;
    }
    for (int i = 0; i < GROUP; i++)
        integers[i] = (int8_t)bits_of(widened(source[i], kind) * factor + ROUNDING);
}

static inline void
decode_group(const uint8_t *source, uint16_t *target, int kind)
{
    uint16_t told;
    memcpy(&told, source, 2);
    const int8_t *integers = (const int8_t *)source + 2;
    if ((told & 0x7FFF) >= (kind == BFLOAT16 ? INFINITE : HALF_INFINITE)) {
        for (int i = 0; i < GROUP; i++)
            target[i] = kind == BFLOAT16 ? NO_NUMBER : NO_HALF;
        return;
    }
    float factor = widened(told, kind) / 127.0f;
    for (int i = 0; i < GROUP; i++)
        target[i] = narrowed((float)integers[i] * factor, kind);
}

WIDEST static void
encode_groups(const uint16_t *source, uint8_t *target, Py_ssize_t groups, int kind)
{
    if (kind == BFLOAT16)
        for (Py_ssize_t at = 0; at < groups; at++)
            encode_group(source + at * GROUP, target + at * CODED, BFLOAT16);
    else
        for (Py_ssize_t at = 0; at < groups; at++)
            encode_group(source + at * GROUP, target + at * CODED, FLOAT16);
}

/* In place, from the last group to the first: none is written over before it has been read. */
WIDEST static void
decode_groups(uint8_t *memory, Py_ssize_t groups, int kind)
{
    uint8_t coded[CODED];
    if (kind == BFLOAT16)
        for (Py_ssize_t at = groups; at-- > 0;) {
            memcpy(coded, memory + at * CODED, CODED);
            decode_group(coded, (uint16_t *)memory + at * GROUP, BFLOAT16);
        }
    else
        for (Py_ssize_t at = groups; at-- > 0;) {
            memcpy(coded, memory + at * CODED, CODED);
            decode_group(coded, (uint16_t *)memory + at * GROUP, FLOAT16);
        }
}

static PyObject *
encode(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer source, target;
    int kind;
    if (!PyArg_ParseTuple(args, "y*w*i", &source, &target, &kind))
        return NULL;
    Py_ssize_t whole = source.len / (2 * GROUP), rest = source.len % (2 * GROUP);
    if (source.len % 2 || target.len < (whole + (rest > 0)) * CODED || (uintptr_t)source.buf % 2) {
        PyBuffer_Release(&source);
        PyBuffer_Release(&target);
        PyErr_SetString(PyExc_ValueError, "the target is too small, or the source no whole numbers");
        return NULL;
    }
    fenv_t before;
    Py_BEGIN_ALLOW_THREADS
    /* Whatever the thread does with subnormal numbers: torch and others may flush them. */
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    encode_groups(source.buf, target.buf, whole, kind);
    if (rest) {
        uint16_t last[GROUP] = {0};
        memcpy(last, (char *)source.buf + whole * 2 * GROUP, (size_t)rest);
        encode_groups(last, (uint8_t *)target.buf + whole * CODED, 1, kind);
    }
    fesetenv(&before);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    Py_RETURN_NONE;
}

static PyObject *
decode(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer memory;
    Py_ssize_t size;
    int kind;
    if (!PyArg_ParseTuple(args, "w*ni", &memory, &size, &kind))
        return NULL;
    Py_ssize_t whole = size / (2 * GROUP), rest = size % (2 * GROUP);
    Py_ssize_t coded = (whole + (rest > 0)) * CODED;
    if (size < 0 || size % 2 || memory.len < size || memory.len < coded ||
        (uintptr_t)memory.buf % 2) {
        PyBuffer_Release(&memory);
        PyErr_SetString(PyExc_ValueError, "the memory is too small, or holds no whole numbers");
        return NULL;
    }
    fenv_t before;
    Py_BEGIN_ALLOW_THREADS
    /* Whatever the thread does with subnormal numbers: torch and others may flush them. */
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    if (rest) {
        uint8_t last[CODED];
        uint16_t numbers[GROUP];
        memcpy(last, (uint8_t *)memory.buf + whole * CODED, CODED);
        decode_group(last, numbers, kind);
        memcpy((uint8_t *)memory.buf + whole * 2 * GROUP, numbers, (size_t)rest);
    }
    decode_groups(memory.buf, whole, kind);
    fesetenv(&before);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&memory);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"encode", encode, METH_VARARGS, NULL},
    {"decode", decode, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kvstore.tiers._codec", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__codec(void)
{
    return PyModule_Create(&definition);
}
