/* A batch of calls through Linux native AIO, with digests, in one call without the GIL.

   What it is for, and what it guarantees, is told in tiers/disk/io/aio.py, which does the same in
   Python where this is not compiled. The digest is a function of the xxhash package, handed over
   as an address: this module has no hash of its own. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <linux/aio_abi.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { DIGEST_BYTES = 16 };

typedef struct {
    uint64_t low;
    uint64_t high;
} Hash;

typedef Hash (*HashFunction)(const void *, size_t);

typedef struct {
    PyObject_HEAD
    aio_context_t context;
    HashFunction hash;
    long depth;
    int busy;
    struct io_event *events;
} Context;

/* One call: neighbouring bytes of a file, and the memory they go to or come from. */
typedef struct {
    Py_ssize_t first; /* its first buffer */
    Py_ssize_t count;
    int64_t bytes;
    int64_t moved; /* or the error's number, negated */
} Call;

typedef struct {
    Py_ssize_t calls;
    Py_ssize_t buffers;
    Py_ssize_t held; /* views to release */
    Call *call;
    struct iocb *block;
    struct iocb **pointer;
    struct iovec *vector;
    Py_buffer *view;
    unsigned char *digest;
} Batch;

static void
batch_release(Batch *batch)
{
    for (Py_ssize_t index = 0; index < batch->held; index++) {
        PyBuffer_Release(&batch->view[index]);
    }
    PyMem_Free(batch->call);
    PyMem_Free(batch->block);
    PyMem_Free(batch->pointer);
    PyMem_Free(batch->vector);
    PyMem_Free(batch->view);
    PyMem_Free(batch->digest);
}

/* The items of a request: descriptor, buffers as a tuple (a new reference), offset. */
static PyObject *
request_parts(PyObject *request, int *fd, long long *offset)
{
    if (!PyTuple_Check(request) || PyTuple_Size(request) != 3) {
        PyErr_SetString(PyExc_TypeError, "a request is a tuple (fd, buffers, offset)");
        return NULL;
    }
    *fd = (int)PyLong_AsLong(PyTuple_GetItem(request, 0));
    if (PyErr_Occurred()) {
        return NULL;
    }
    *offset = PyLong_AsLongLong(PyTuple_GetItem(request, 2));
    if (PyErr_Occurred()) {
        return NULL;
    }
    return PySequence_Tuple(PyTuple_GetItem(request, 1));
}

static int
batch_fill(Batch *batch, PyObject *requests, int load)
{
    Py_ssize_t calls = batch->calls = PyTuple_Size(requests);
    Py_ssize_t buffers = 0;
    for (Py_ssize_t index = 0; index < calls; index++) {
        int fd;
        long long offset;
        PyObject *its = request_parts(PyTuple_GetItem(requests, index), &fd, &offset);
        if (its == NULL) {
            return -1;
        }
        buffers += PyTuple_Size(its);
        Py_DECREF(its);
    }
    batch->buffers = buffers;
    batch->call = PyMem_Calloc(calls + 1, sizeof(Call));
    batch->block = PyMem_Calloc(calls + 1, sizeof(struct iocb));
    batch->pointer = PyMem_Calloc(calls + 1, sizeof(struct iocb *));
    batch->vector = PyMem_Calloc(buffers + 1, sizeof(struct iovec));
    batch->view = PyMem_Calloc(buffers + 1, sizeof(Py_buffer));
    batch->digest = PyMem_Calloc(buffers + 1, DIGEST_BYTES);
    if (!batch->call || !batch->block || !batch->pointer || !batch->vector || !batch->view ||
        !batch->digest) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t index = 0; index < calls; index++) {
        int fd;
        long long offset;
        PyObject *its = request_parts(PyTuple_GetItem(requests, index), &fd, &offset);
        if (its == NULL) {
            return -1;
        }
        Call *call = &batch->call[index];
        call->first = batch->held;
        call->count = PyTuple_Size(its);
        if (call->count > buffers - batch->held) {
            Py_DECREF(its);
            PyErr_SetString(PyExc_ValueError, "buffers have been added meanwhile");
            return -1;
        }
        for (Py_ssize_t at = 0; at < call->count; at++) {
            Py_buffer *view = &batch->view[batch->held];
            if (PyObject_GetBuffer(
                    PyTuple_GetItem(its, at), view, load ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) {
                Py_DECREF(its);
                return -1;
            }
            batch->vector[batch->held].iov_base = view->buf;
            batch->vector[batch->held].iov_len = (size_t)view->len;
            call->bytes += view->len;
            batch->held++;
        }
        Py_DECREF(its);
        struct iocb *block = &batch->block[index];
        block->aio_data = (uint64_t)index;
        block->aio_lio_opcode = load ? IOCB_CMD_PREADV : IOCB_CMD_PWRITEV;
        block->aio_fildes = (uint32_t)fd;
        block->aio_buf = (uint64_t)(uintptr_t)&batch->vector[call->first];
        block->aio_nbytes = (uint64_t)call->count;
        block->aio_offset = offset;
        batch->pointer[index] = block;
    }
    return 0;
}

static void
call_hash(const Context *self, Batch *batch, Py_ssize_t index, size_t size)
{
    const Call *call = &batch->call[index];
    for (Py_ssize_t at = call->first; at < call->first + call->count; at++) {
        const struct iovec *vector = &batch->vector[at];
        size_t length = vector->iov_len < size ? vector->iov_len : size;
        Hash hash = self->hash(vector->iov_base, length);
        unsigned char *out = batch->digest + at * DIGEST_BYTES;
        for (int byte = 0; byte < 8; byte++) {
            out[byte] = (unsigned char)(hash.high >> (56 - 8 * byte));
            out[8 + byte] = (unsigned char)(hash.low >> (56 - 8 * byte));
        }
    }
}

/* Run all calls. Returns when none is in flight any more, 0 or the number of an error which left
   calls in flight that nobody can wait for: that does not happen with a valid context. */
static int
batch_run(const Context *self, Batch *batch, int load, size_t size)
{
    Py_ssize_t total = batch->calls, begun = 0, ended = 0, hashed = 0;
    while (ended < total) {
        Py_ssize_t room = self->depth - (begun - ended);
        if (room > total - begun) {
            room = total - begun;
        }
        if (room > 0) {
            errno = 0;
            long taken =
                syscall(SYS_io_submit, self->context, (long)room, batch->pointer + begun);
            if (taken > 0) {
                begun += taken;
            } else if (errno != EAGAIN || begun == ended) {
                /* The first of those that were handed over is refused, alone. */
                batch->call[begun].moved = errno ? -errno : -EIO;
                begun++;
                ended++;
            }
        }
        if (!load && size) {
            /* While the device reads the same memory. */
            for (; hashed < begun; hashed++) {
                call_hash(self, batch, hashed, size);
            }
        }
        if (begun == ended) {
            continue;
        }
        long flying = (long)(begun - ended);
        long got = syscall(SYS_io_getevents, self->context, flying > 1 ? flying / 2 : 1,
                           self->depth, self->events, NULL);
        if (got < 0) {
            if (errno == EINTR) {
                continue;
            }
            return errno ? errno : EIO;
        }
        for (long at = 0; at < got; at++) {
            batch->call[self->events[at].data].moved = self->events[at].res;
        }
        ended += got;
        if (load && size) {
            /* While the device moves the rest. */
            for (long at = 0; at < got; at++) {
                Py_ssize_t index = (Py_ssize_t)self->events[at].data;
                if (batch->call[index].moved == batch->call[index].bytes) {
                    call_hash(self, batch, index, size);
                }
            }
        }
    }
    return 0;
}

/* (bytes moved or the error's number negated, digests) of one call. */
static PyObject *
call_outcome(const Batch *batch, const Call *call, int hashed)
{
    int whole = hashed && call->moved == call->bytes;
    PyObject *digests = PyList_New(whole ? call->count : 0);
    if (digests == NULL) {
        return NULL;
    }
    for (Py_ssize_t at = 0; at < (whole ? call->count : 0); at++) {
        const unsigned char *digest = batch->digest + (call->first + at) * DIGEST_BYTES;
        PyObject *bytes = PyBytes_FromStringAndSize((const char *)digest, DIGEST_BYTES);
        if (bytes == NULL || PyList_SetItem(digests, at, bytes) < 0) {
            Py_DECREF(digests);
            return NULL;
        }
    }
    return Py_BuildValue("(LN)", (long long)call->moved, digests);
}

static PyObject *
context_move(Context *self, PyObject *args)
{
    PyObject *given;
    int load;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "Opn:move", &given, &load, &size)) {
        return NULL;
    }
    if (size < 0) {
        PyErr_SetString(PyExc_ValueError, "size: must not be negative");
        return NULL;
    }
    PyObject *requests = PySequence_Tuple(given);
    if (requests == NULL) {
        return NULL;
    }
    Batch batch = {0};
    PyObject *outcomes = NULL;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "a context serves one thread");
    } else if (batch_fill(&batch, requests, load) == 0) {
        int failed;
        self->busy = 1;
        Py_BEGIN_ALLOW_THREADS
        failed = batch_run(self, &batch, load, (size_t)size);
        Py_END_ALLOW_THREADS
        self->busy = 0;
        if (failed) {
            errno = failed;
            PyErr_SetFromErrno(PyExc_OSError);
        } else {
            outcomes = PyList_New(batch.calls);
        }
        for (Py_ssize_t index = 0; outcomes != NULL && index < batch.calls; index++) {
            PyObject *outcome = call_outcome(&batch, &batch.call[index], size > 0);
            if (outcome == NULL || PyList_SetItem(outcomes, index, outcome) < 0) {
                Py_CLEAR(outcomes);
            }
        }
    }
    batch_release(&batch);
    Py_DECREF(requests);
    return outcomes;
}

static PyObject *
context_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    long depth;
    unsigned long long function;
    if (kwargs != NULL && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Context takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "lK:Context", &depth, &function)) {
        return NULL;
    }
    if (depth < 1 || depth > 65536 || !function) {
        PyErr_SetString(PyExc_ValueError, "depth: 1 to 65536; function: an address");
        return NULL;
    }
    Context *self = (Context *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->depth = depth;
    self->hash = (HashFunction)(uintptr_t)function;
    self->events = PyMem_Calloc(depth, sizeof(struct io_event));
    if (self->events == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    if (syscall(SYS_io_setup, depth, &self->context) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        self->context = 0;
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void
context_dealloc(Context *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->context) {
        syscall(SYS_io_destroy, self->context);
    }
    PyMem_Free(self->events);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef context_methods[] = {
    {"move", (PyCFunction)context_move, METH_VARARGS, NULL},
    {NULL},
};

static PyType_Slot context_slots[] = {
    {Py_tp_new, context_new},
    {Py_tp_dealloc, context_dealloc},
    {Py_tp_methods, context_methods},
    {0, NULL},
};

static PyType_Spec context_spec = {
    .name = "tiers.disk.io._aio.Context",
    .basicsize = sizeof(Context),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = context_slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tiers.disk.io._aio",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__aio(void)
{
    PyObject *made = PyModule_Create(&module);
    PyObject *context = PyType_FromSpec(&context_spec);
    if (made == NULL || context == NULL || PyModule_AddObjectRef(made, "Context", context) < 0) {
        Py_XDECREF(context);
        Py_XDECREF(made);
        return NULL;
    }
    Py_DECREF(context);
    return made;
}
