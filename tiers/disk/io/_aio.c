/* Batches through Linux native AIO, with digests, without the GIL.

   What it is for, and what it guarantees, is told in tiers/disk/io/aio.py. Where this is not
   compiled, plain O_DIRECT calls serve. The digest is a function of the xxhash package, handed
   over as an address: this module has no hash of its own. */

/* One build for every Python from 3.11 on. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { DIGEST_BYTES = 16 };

/* How many contexts of the kernel a process keeps that nobody uses, and how deep they may be. */
enum { MOST_KEPT = 16, MOST_KEPT_DEPTH = 64 };

typedef struct {
    uint64_t low;
    uint64_t high;
} Hash;

typedef Hash (*HashFunction)(const void *, size_t);

struct Batch;

typedef struct {
    PyObject_HEAD
    aio_context_t context;
    HashFunction hash;
    int64_t call_bytes; /* most of one call */
    long depth;         /* most places in the device's queue, a single call excepted */
    long flying;        /* places of the calls that the kernel has, of all batches */
    int busy;           /* a thread is at work without the GIL */
    long process;       /* see `process` below */
    struct Batch *oldest;
    struct io_event *events;
} Context;

/* Neighbouring bytes of a file, and the memory they go to or come from. */
typedef struct {
    struct Batch *batch;
    Py_ssize_t first; /* its first buffer */
    Py_ssize_t count;
    Py_ssize_t last; /* the calls that it is cut into end before this one */
    Py_ssize_t left; /* calls that have not ended */
    int64_t bytes;
    int64_t moved;
    int error;
} Request;

typedef struct Batch {
    PyObject_HEAD
    Context *context;
    struct Batch *next; /* the one begun after it, of the same context */
    int load;
    int told;
    size_t size; /* bytes of each buffer to make a digest of, or 0 */
    Py_ssize_t requests;
    Py_ssize_t calls;
    Py_ssize_t held;   /* views to release */
    Py_ssize_t begun;  /* calls */
    Py_ssize_t ended;  /* calls */
    Py_ssize_t hashed; /* requests */
    Request *request;
    struct iocb *block;
    struct iocb **pointer;
    struct iovec *vector;
    Py_buffer *view;
    unsigned char *digest;
} Batch;

static PyTypeObject *batch_type;

/* Contexts of the kernel that nobody uses, for whoever wants one next: to end one takes the kernel
   tens of milliseconds, and whoever closes a tier would wait for it once for each thread.
   Under the GIL. */
static struct {
    aio_context_t context;
    long depth;
} kept[MOST_KEPT];
static int kept_count;

/* Counts the forks behind this process: it has no use for the contexts of the one before. */
static long process;

static void
forked(void)
{
    process++;
    kept_count = 0;
}

/* -- without the GIL ------------------------------------------------------------------------- */

/* The places that a call takes in the queue of a device: one for each buffer, two for itself. */
static long
call_places(const struct iocb *block)
{
    return (long)block->aio_nbytes + 2;
}

static void
call_ended(const struct iocb *block, int64_t moved)
{
    Request *request = (Request *)(uintptr_t)block->aio_data;
    request->left--;
    if (moved >= 0) {
        request->moved += moved;
    } else if (!request->error) {
        request->error = (int)-moved;
    }
    request->batch->ended++;
}

/* How many calls to hand over at once: no neighbours, because the system would join them, and no
   more than there are places for. */
static long
batch_group(const Batch *self, long room)
{
    struct iocb **pointer = self->pointer + self->begun;
    long count = 0;
    while (self->begun + count < self->calls) {
        room -= call_places(pointer[count]);
        if (room < 0 || (count && pointer[count]->aio_data == pointer[count - 1]->aio_data)) {
            break;
        }
        count++;
    }
    return count;
}

static void
batch_submit(Batch *self)
{
    Context *context = self->context;
    while (self->begun < self->calls) {
        long count = batch_group(self, context->depth - context->flying);
        if (!count && context->flying) {
            return;
        }
        errno = 0;
        long taken = syscall(SYS_io_submit, context->context, count ? count : 1,
                             self->pointer + self->begun);
        if (taken > 0) {
            for (; taken; taken--) {
                context->flying += call_places(self->pointer[self->begun++]);
            }
        } else if (errno == EAGAIN && context->flying) {
            return;
        } else {
            /* The first of those that were handed over is refused, alone. */
            call_ended(self->pointer[self->begun++], errno ? -errno : -EIO);
        }
    }
}

/* Hand over what there is room for, of the oldest batch first. */
static void
context_submit(Context *self)
{
    for (Batch *batch = self->oldest; batch != NULL; batch = batch->next) {
        batch_submit(batch);
    }
}

static void
request_hash(Batch *self, const Request *request)
{
    for (Py_ssize_t at = request->first; at < request->first + request->count; at++) {
        const Py_buffer *view = &self->view[at];
        size_t length = (size_t)view->len < self->size ? (size_t)view->len : self->size;
        Hash hash = self->context->hash(view->buf, length);
        unsigned char *out = self->digest + at * DIGEST_BYTES;
        for (int byte = 0; byte < 8; byte++) {
            out[byte] = (unsigned char)(hash.high >> (56 - 8 * byte));
            out[8 + byte] = (unsigned char)(hash.low >> (56 - 8 * byte));
        }
    }
}

/* Make the digests that can be made now: of a store all that the system was told of, of a load
   what has come. */
static void
batch_hash_some(Batch *self)
{
    while (self->size && self->hashed < self->requests) {
        const Request *request = &self->request[self->hashed];
        if (self->load ? request->left > 0 : self->begun < request->last) {
            return;
        }
        if (!self->load || (!request->error && request->moved == request->bytes)) {
            request_hash(self, request);
        }
        self->hashed++;
    }
}

/* Take in the ends of at least `enough` calls, of whichever batch; 0 or an error's number. */
static int
context_reap(Context *self, long enough)
{
    struct timespec at_once = {0, 0};
    long got;
    do {
        errno = 0;
        got = syscall(SYS_io_getevents, self->context, enough, self->depth, self->events,
                      enough ? NULL : &at_once);
    } while (got < 0 && errno == EINTR);
    if (got < 0) {
        return errno ? errno : EIO;
    }
    for (long at = 0; at < got; at++) {
        const struct iocb *block = (struct iocb *)(uintptr_t)self->events[at].obj;
        self->flying -= call_places(block);
        call_ended(block, self->events[at].res);
    }
    return 0;
}

/* Wait for all calls; 0 or an error's number, which a valid context does not give. */
static int
batch_finish(Batch *self)
{
    for (;;) {
        context_submit(self->context);
        batch_hash_some(self);
        Py_ssize_t flying = self->begun - self->ended;
        if (!flying && self->ended == self->calls) {
            return 0;
        }
        /* Each wake-up costs, where the processors are taken: one, unless there is more to do. */
        long enough = self->begun < self->calls ? (long)(flying + 1) / 2 : (long)flying;
        if (enough < 1) {
            /* Other batches of the thread have all places: one of their calls has to end. */
            enough = 1;
        }
        int failed = context_reap(self->context, enough);
        if (failed) {
            return failed;
        }
    }
}

/* -- batches --------------------------------------------------------------------------------- */

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
batch_allocate(Batch *self, Py_ssize_t requests, Py_ssize_t buffers)
{
    self->request = PyMem_Calloc(requests + 1, sizeof(Request));
    self->view = PyMem_Calloc(buffers + 1, sizeof(Py_buffer));
    self->digest = PyMem_Calloc(buffers + 1, DIGEST_BYTES);
    if (!self->request || !self->view || !self->digest) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

/* Take over the memory of one request. `buffers` is a tuple. */
static int
batch_add(Batch *self, Request *request, PyObject *buffers)
{
    request->batch = self;
    request->first = self->held;
    request->count = PyTuple_Size(buffers);
    for (Py_ssize_t at = 0; at < request->count; at++) {
        Py_buffer *view = &self->view[self->held];
        if (PyObject_GetBuffer(PyTuple_GetItem(buffers, at), view,
                               self->load ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) {
            return -1;
        }
        request->bytes += view->len;
        self->held++;
    }
    return 0;
}

/* Cut each request into calls. */
static int
batch_cut(Batch *self, const int *fds, const long long *offsets)
{
    Py_ssize_t calls = 0, vectors = 0;
    for (Py_ssize_t index = 0; index < self->requests; index++) {
        calls += 1 + self->request[index].bytes / self->context->call_bytes;
    }
    self->block = PyMem_Calloc(calls + 1, sizeof(struct iocb));
    self->pointer = PyMem_Calloc(calls + 1, sizeof(struct iocb *));
    self->vector = PyMem_Calloc(calls + self->held + 1, sizeof(struct iovec));
    if (!self->block || !self->pointer || !self->vector) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t index = 0; index < self->requests; index++) {
        Request *request = &self->request[index];
        Py_ssize_t at = request->first, end = request->first + request->count;
        int64_t done = 0, used = 0; /* of the request, of the buffer */
        do {
            struct iocb *block = &self->block[self->calls];
            block->aio_data = (uint64_t)(uintptr_t)request;
            block->aio_lio_opcode = self->load ? IOCB_CMD_PREADV : IOCB_CMD_PWRITEV;
            block->aio_fildes = (uint32_t)fds[index];
            block->aio_buf = (uint64_t)(uintptr_t)&self->vector[vectors];
            block->aio_offset = offsets[index] + done;
            int64_t room = self->context->call_bytes;
            while (at < end && room) {
                int64_t length = self->view[at].len - used;
                if (length > room) {
                    length = room;
                }
                self->vector[vectors].iov_base = (char *)self->view[at].buf + used;
                self->vector[vectors].iov_len = (size_t)length;
                vectors++;
                block->aio_nbytes++;
                room -= length;
                done += length;
                used += length;
                if (used == self->view[at].len) {
                    at++;
                    used = 0;
                }
            }
            self->pointer[self->calls] = block;
            self->calls++;
            request->left++;
        } while (at < end);
        request->last = self->calls;
    }
    return 0;
}

static int
batch_fill(Batch *self, PyObject *given)
{
    Py_ssize_t requests = PyTuple_Size(given), buffers = 0;
    PyObject *parts = PyTuple_New(requests);
    int *fds = PyMem_Calloc(requests + 1, sizeof(int));
    long long *offsets = PyMem_Calloc(requests + 1, sizeof(long long));
    int failed = parts == NULL || fds == NULL || offsets == NULL ? -1 : 0;
    if (failed && !PyErr_Occurred()) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t index = 0; !failed && index < requests; index++) {
        PyObject *its =
            request_parts(PyTuple_GetItem(given, index), &fds[index], &offsets[index]);
        if (its == NULL) {
            failed = -1;
        } else {
            buffers += PyTuple_Size(its);
            PyTuple_SetItem(parts, index, its);
        }
    }
    if (!failed) {
        failed = batch_allocate(self, requests, buffers);
    }
    for (Py_ssize_t index = 0; !failed && index < requests; index++) {
        failed = batch_add(self, &self->request[index], PyTuple_GetItem(parts, index));
    }
    if (!failed) {
        self->requests = requests;
        failed = batch_cut(self, fds, offsets);
    }
    Py_XDECREF(parts);
    PyMem_Free(fds);
    PyMem_Free(offsets);
    return failed;
}

/* (bytes moved or the error's number negated, digests) of one request. */
static PyObject *
request_outcome(const Batch *batch, const Request *request)
{
    long long moved = request->error ? -request->error : request->moved;
    int whole = batch->size && moved == request->bytes;
    PyObject *digests = PyList_New(whole ? request->count : 0);
    if (digests == NULL) {
        return NULL;
    }
    for (Py_ssize_t at = 0; at < (whole ? request->count : 0); at++) {
        const unsigned char *digest = batch->digest + (request->first + at) * DIGEST_BYTES;
        PyObject *bytes = PyBytes_FromStringAndSize((const char *)digest, DIGEST_BYTES);
        if (bytes == NULL || PyList_SetItem(digests, at, bytes) < 0) {
            Py_DECREF(digests);
            return NULL;
        }
    }
    return Py_BuildValue("(LN)", moved, digests);
}

/* The newest of a context is the last in its list. */
static void
context_add(Context *self, Batch *batch)
{
    Batch **at = &self->oldest;
    while (*at != NULL) {
        at = &(*at)->next;
    }
    *at = batch;
}

static void
context_remove(Context *self, const Batch *batch)
{
    for (Batch **at = &self->oldest; *at != NULL; at = &(*at)->next) {
        if (*at == batch) {
            *at = batch->next;
            return;
        }
    }
}

static int
context_enter(Context *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "a context serves one thread");
        return -1;
    }
    self->busy = 1;
    return 0;
}

static PyObject *
batch_end(Batch *self, PyObject *Py_UNUSED(none))
{
    if (self->told) {
        PyErr_SetString(PyExc_RuntimeError, "the batch has ended before");
        return NULL;
    }
    if (context_enter(self->context) < 0) {
        return NULL;
    }
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = batch_finish(self);
    Py_END_ALLOW_THREADS
    self->context->busy = 0;
    if (failed) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    self->told = 1;
    context_remove(self->context, self);
    PyObject *outcomes = PyList_New(self->requests);
    for (Py_ssize_t index = 0; outcomes != NULL && index < self->requests; index++) {
        PyObject *outcome = request_outcome(self, &self->request[index]);
        if (outcome == NULL || PyList_SetItem(outcomes, index, outcome) < 0) {
            Py_CLEAR(outcomes);
        }
    }
    for (; self->held; self->held--) {
        PyBuffer_Release(&self->view[self->held - 1]);
    }
    return outcomes;
}

static void
batch_dealloc(Batch *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    int lost = 0;
    if (self->begun > self->ended) {
        /* Nobody has waited for them. */
        self->calls = self->begun;
        if (self->context->busy) {
            lost = 1;
        } else {
            self->context->busy = 1;
            self->size = 0;
            Py_BEGIN_ALLOW_THREADS
            lost = batch_finish(self);
            Py_END_ALLOW_THREADS
            self->context->busy = 0;
        }
    }
    if (lost) {
        /* The kernel may still use all of it, so nobody else may have it. */
        return;
    }
    if (self->context != NULL) {
        context_remove(self->context, self);
    }
    for (Py_ssize_t index = 0; index < self->held; index++) {
        PyBuffer_Release(&self->view[index]);
    }
    PyMem_Free(self->request);
    PyMem_Free(self->block);
    PyMem_Free(self->pointer);
    PyMem_Free(self->vector);
    PyMem_Free(self->view);
    PyMem_Free(self->digest);
    Py_XDECREF((PyObject *)self->context);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* -- contexts -------------------------------------------------------------------------------- */

static PyObject *
context_begin(Context *self, PyObject *args)
{
    PyObject *given;
    int load;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "Opn:begin", &given, &load, &size)) {
        return NULL;
    }
    if (size < 0) {
        PyErr_SetString(PyExc_ValueError, "hashed: must not be negative");
        return NULL;
    }
    PyObject *requests = PySequence_Tuple(given);
    if (requests == NULL) {
        return NULL;
    }
    Batch *batch = (Batch *)((allocfunc)PyType_GetSlot(batch_type, Py_tp_alloc))(batch_type, 0);
    if (batch == NULL) {
        Py_DECREF(requests);
        return NULL;
    }
    Py_INCREF((PyObject *)self);
    batch->context = self;
    batch->load = load;
    batch->size = (size_t)size;
    int failed = batch_fill(batch, requests);
    Py_DECREF(requests);
    if (failed < 0 || context_enter(self) < 0) {
        Py_DECREF((PyObject *)batch);
        return NULL;
    }
    context_add(self, batch);
    Py_BEGIN_ALLOW_THREADS
    context_submit(self);
    if (!load) {
        batch_hash_some(batch);
    }
    /* Files in memory have been copied by now. */
    if (batch->begun == batch->calls && context_reap(self, 0) == 0 &&
        batch->ended == batch->calls) {
        batch_hash_some(batch);
    }
    Py_END_ALLOW_THREADS
    self->busy = 0;
    return (PyObject *)batch;
}

/* One of that depth, or 0. */
static aio_context_t
take_kept(long depth)
{
    for (int at = kept_count - 1; at >= 0; at--) {
        if (kept[at].depth == depth) {
            aio_context_t context = kept[at].context;
            kept[at] = kept[--kept_count];
            return context;
        }
    }
    return 0;
}

/* Whether there was room for it. */
static int
keep(aio_context_t context, long depth)
{
    if (kept_count == MOST_KEPT || depth > MOST_KEPT_DEPTH) {
        return 0;
    }
    kept[kept_count].context = context;
    kept[kept_count++].depth = depth;
    return 1;
}

static PyObject *
context_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    long depth;
    long long call_bytes;
    unsigned long long function;
    if (kwargs != NULL && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Context takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "lLK:Context", &depth, &call_bytes, &function)) {
        return NULL;
    }
    if (depth < 1 || depth > 65536 || call_bytes < 1 || !function) {
        PyErr_SetString(PyExc_ValueError,
                        "depth: 1 to 65536; call_bytes: from 1; function: an address");
        return NULL;
    }
    Context *self = (Context *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->depth = depth;
    self->call_bytes = call_bytes;
    self->hash = (HashFunction)(uintptr_t)function;
    self->events = PyMem_Calloc(depth, sizeof(struct io_event));
    if (self->events == NULL) {
        Py_DECREF((PyObject *)self);
        return PyErr_NoMemory();
    }
    self->process = process;
    self->context = take_kept(depth);
    if (!self->context && syscall(SYS_io_setup, depth, &self->context) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        self->context = 0;
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static void
context_dealloc(Context *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    /* Each batch that the kernel still has refers to its context: nothing is in flight. */
    if (self->context && self->process == process && !keep(self->context, self->depth)) {
        Py_BEGIN_ALLOW_THREADS
        syscall(SYS_io_destroy, self->context);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(self->events);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef context_methods[] = {
    {"begin", (PyCFunction)context_begin, METH_VARARGS, NULL},
    {NULL},
};

static PyType_Slot context_slots[] = {
    {Py_tp_new, context_new},
    {Py_tp_dealloc, context_dealloc},
    {Py_tp_methods, context_methods},
    {0, NULL},
};

static PyType_Spec context_spec = {
    .name = "kvstore.tiers.disk.io._aio.Context",
    .basicsize = sizeof(Context),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = context_slots,
};

static PyObject *
batch_waits(Batch *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(self->ended < self->calls);
}

static PyMethodDef batch_methods[] = {
    {"waits", (PyCFunction)batch_waits, METH_NOARGS, NULL},
    {"end", (PyCFunction)batch_end, METH_NOARGS, NULL},
    {NULL},
};

static PyType_Slot batch_slots[] = {
    {Py_tp_dealloc, batch_dealloc},
    {Py_tp_methods, batch_methods},
    {0, NULL},
};

static PyType_Spec batch_spec = {
    .name = "kvstore.tiers.disk.io._aio.Batch",
    .basicsize = sizeof(Batch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = batch_slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore.tiers.disk.io._aio",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__aio(void)
{
    PyObject *made = PyModule_Create(&module);
    PyObject *context = PyType_FromSpec(&context_spec);
    batch_type = (PyTypeObject *)PyType_FromSpec(&batch_spec);
    if (made == NULL || context == NULL || batch_type == NULL ||
        PyModule_AddObjectRef(made, "Context", context) < 0) {
        Py_XDECREF(context);
        Py_XDECREF(made);
        return NULL;
    }
    Py_DECREF(context);
    int failed = pthread_atfork(NULL, NULL, forked);
    if (failed) {
        Py_DECREF(made);
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return made;
}
