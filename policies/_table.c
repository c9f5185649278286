/* OrderedTable: an ordered mapping that is never built anew.

   What it is for, and what it guarantees, is told in policies/table.py.

   Entries stand in blocks of BLOCK and are linked in their order by their places. They are found
   through cells, an open-addressed hash index with linear probing. A removal shifts the cells that
   follow back, so that nothing is left behind which would have to be cleaned up. When the index is
   half full, one of twice its size takes its place; each insertion then moves a few cells over, and
   meanwhile both are searched.

   The type does not take part in garbage collection: it holds what must not refer to it. */

/* One build for every Python from 3.11 on. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef struct {
    PyObject *key;   /* NULL where the place is free */
    PyObject *value;
    int32_t next;    /* 0 for none; of free places, the next free one */
    int32_t prev;
} Entry;

typedef struct {
    uint32_t hash;
    int32_t place;   /* EMPTY, GONE or an entry's */
} Cell;

typedef struct {
    Cell *cells;     /* NULL while there are none */
    uint32_t mask;
    uint32_t moved;  /* the cells before this one are in the index that follows */
} Index;

typedef struct {
    PyObject_HEAD
    Entry **blocks;  /* the first entry is not used: place 0 means none */
    Index index;
    Index old;       /* what is left of the index before, while it is moved */
    int32_t room;    /* places in `blocks` */
    int32_t fresh;   /* the lowest place that was never used */
    int32_t free;    /* the first free place below that */
    int32_t first;
    int32_t last;
    Py_ssize_t length;
    uint64_t changes;
} Table;

typedef enum { KEYS, VALUES, ITEMS } Kind;

typedef struct {
    PyObject_HEAD
    Table *table;
    int32_t place;
    uint64_t changes;
    Kind kind;
} Iterator;

enum {
    EMPTY = 0,
    GONE = -1,       /* of `old` only: who searches goes on behind it */
    BLOCK_BITS = 12,
    BLOCK = 1 << BLOCK_BITS,
    FEWEST_CELLS = 8,
    MOVED_AT_ONCE = 16,
    MOST_PLACES = 1 << 30,
};

static PyObject *iterator_type;

static inline Entry *
entry_at(Table *table, int32_t place)
{
    return &table->blocks[place >> BLOCK_BITS][place & (BLOCK - 1)];
}

/* -- the index ------------------------------------------------------------------------------- */

static int
hash_of(PyObject *key, uint32_t *hash)
{
    Py_hash_t whole = PyObject_Hash(key);
    if (whole == -1) {
        return -1;
    }
    *hash = (uint32_t)(((uint64_t)whole * UINT64_C(0x9E3779B97F4A7C15)) >> 32);
    return 0;
}

/* 1 if the key is in the index, at *at; 0 if not; -1 with an exception. */
static int
find_in(Table *table, Index index, PyObject *key, uint32_t hash, uint32_t *at)
{
    if (index.cells == NULL) {
        return 0;
    }
    uint32_t i = hash & index.mask;
    i = i < index.moved ? index.moved : i;
    /* Keys of the last cells may lie in the first ones that are not moved yet. Of those that are
       left, none may be empty. */
    for (uint32_t left = index.mask - index.moved + 1; left > 0; left--, i++) {
        if (i > index.mask) {
            i = index.moved;
        }
        Cell cell = index.cells[i];
        if (cell.place == EMPTY) {
            return 0;
        }
        if (cell.place == GONE || cell.hash != hash) {
            continue;
        }
        PyObject *mine = entry_at(table, cell.place)->key;
        if (mine != key) {
            uint64_t changes = table->changes;
            Py_INCREF(mine);
            int same = PyObject_RichCompareBool(mine, key, Py_EQ);
            Py_DECREF(mine);
            if (same < 0) {
                return -1;
            }
            if (changes != table->changes) {
                PyErr_SetString(PyExc_RuntimeError, "the table was changed by a comparison of keys");
                return -1;
            }
            if (!same) {
                continue;
            }
        }
        *at = i;
        return 1;
    }
    return 0;
}

/* As find_in, over both indexes; *in is the one that has it. */
static int
find(Table *table, PyObject *key, uint32_t hash, Index *in, uint32_t *at)
{
    *in = table->index;
    int found = find_in(table, *in, key, hash, at);
    if (found == 0 && table->old.cells != NULL) {
        *in = table->old;
        found = find_in(table, *in, key, hash, at);
    }
    return found;
}

/* The place of a key; 0 if it is not here; -1 with an exception. */
static int32_t
place_of(Table *table, PyObject *key)
{
    uint32_t hash, at;
    Index in;
    if (hash_of(key, &hash) < 0) {
        return -1;
    }
    int found = find(table, key, hash, &in, &at);
    return found <= 0 ? found : in.cells[at].place;
}

static void
put_cell(Index index, Cell cell)
{
    uint32_t i = cell.hash & index.mask;
    while (index.cells[i].place != EMPTY) {
        i = (i + 1) & index.mask;
    }
    index.cells[i] = cell;
}

static void
take_cell(Index index, uint32_t at)
{
    uint32_t hole = at;
    for (uint32_t i = (at + 1) & index.mask;; i = (i + 1) & index.mask) {
        Cell cell = index.cells[i];
        if (cell.place == EMPTY) {
            break;
        }
        /* It may go back to the hole if that is not before the cell where its search begins. */
        if (((i - cell.hash) & index.mask) >= ((i - hole) & index.mask)) {
            index.cells[hole] = cell;
            hole = i;
        }
    }
    index.cells[hole].place = EMPTY;
}

static void
move_some(Table *table, uint32_t count)
{
    Index *old = &table->old;
    while (count-- > 0) {
        Cell cell = old->cells[old->moved];
        if (cell.place > 0) {
            put_cell(table->index, cell);
        }
        if (old->moved++ == old->mask) {
            PyMem_Free(old->cells);
            old->cells = NULL;
            return;
        }
    }
}

/* One more block of entries, or a larger one while there is but one; -1 with an exception. */
static int
add_places(Table *table)
{
    int32_t room = table->room;
    if (room >= MOST_PLACES) {
        PyErr_SetString(PyExc_OverflowError, "the table is full");
        return -1;
    }
    int32_t full = room >> BLOCK_BITS;
    int32_t size = room >= BLOCK ? BLOCK : room ? 2 * room : FEWEST_CELLS;
    if (room == 0 || room >= BLOCK) {
        Entry **blocks = PyMem_Realloc(table->blocks, ((size_t)full + 1) * sizeof(Entry *));
        if (blocks == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        blocks[full] = NULL;
        table->blocks = blocks;
    }
    Entry *block = PyMem_Realloc(table->blocks[full], (size_t)size * sizeof(Entry));
    if (block == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    table->blocks[full] = block;
    table->room = full * BLOCK + size;
    table->fresh = room ? table->fresh : 1;
    return 0;
}

/* Room for one more; -1 with an exception. */
static int
make_room(Table *table)
{
    if (table->old.cells != NULL) {
        move_some(table, MOVED_AT_ONCE);
    }
    size_t cells = table->index.cells == NULL ? 0 : (size_t)table->index.mask + 1;
    if (((size_t)table->length + 1) * 2 > cells) {
        if (table->old.cells != NULL) {
            move_some(table, table->old.mask + 1);
        }
        size_t more = cells ? 2 * cells : FEWEST_CELLS;
        Cell *made = PyMem_Calloc(more, sizeof(Cell));
        if (made == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        table->old = table->index;
        table->old.moved = 0;
        table->index.cells = made;
        table->index.mask = (uint32_t)(more - 1);
    }
    if (table->free == 0 && table->fresh == table->room) {
        return add_places(table);
    }
    return 0;
}

/* -- the order ------------------------------------------------------------------------------- */

static void
link_entry(Table *table, int32_t place, int last)
{
    Entry *entry = entry_at(table, place);
    if (last) {
        entry->prev = table->last;
        entry->next = 0;
        *(entry->prev ? &entry_at(table, entry->prev)->next : &table->first) = place;
        table->last = place;
    }
    else {
        entry->prev = 0;
        entry->next = table->first;
        *(entry->next ? &entry_at(table, entry->next)->prev : &table->last) = place;
        table->first = place;
    }
}

static void
unlink_entry(Table *table, int32_t place)
{
    Entry *entry = entry_at(table, place);
    *(entry->prev ? &entry_at(table, entry->prev)->next : &table->first) = entry->next;
    *(entry->next ? &entry_at(table, entry->next)->prev : &table->last) = entry->prev;
}

/* -- entries --------------------------------------------------------------------------------- */

/* A new entry at the end; the key is not here. */
static int
append(Table *table, PyObject *key, PyObject *value, uint32_t hash)
{
    if (make_room(table) < 0) {
        return -1;
    }
    int32_t place = table->free;
    if (place) {
        table->free = entry_at(table, place)->next;
    }
    else {
        place = table->fresh++;
    }
    Py_INCREF(key);
    Py_INCREF(value);
    Entry *entry = entry_at(table, place);
    entry->key = key;
    entry->value = value;
    link_entry(table, place, 1);
    put_cell(table->index, (Cell){hash, place});
    table->length++;
    table->changes++;
    return 0;
}

static int
set(Table *table, PyObject *key, PyObject *value)
{
    uint32_t hash, at;
    Index in;
    if (hash_of(key, &hash) < 0) {
        return -1;
    }
    int found = find(table, key, hash, &in, &at);
    if (found < 0) {
        return -1;
    }
    if (!found) {
        return append(table, key, value, hash);
    }
    Entry *entry = entry_at(table, in.cells[at].place);
    PyObject *before = entry->value;
    Py_INCREF(value);
    entry->value = value;
    Py_DECREF(before);
    return 0;
}

/* The entry in a cell goes; its references are the caller's. */
static void
take(Table *table, Index in, uint32_t at, PyObject **key, PyObject **value)
{
    int32_t place = in.cells[at].place;
    if (in.cells == table->old.cells) {
        in.cells[at].place = GONE;
    }
    else {
        take_cell(in, at);
    }
    unlink_entry(table, place);
    Entry *entry = entry_at(table, place);
    *key = entry->key;
    *value = entry->value;
    entry->key = NULL;
    entry->next = table->free;
    table->free = place;
    table->length--;
    table->changes++;
}

/* 1 and the value, which is the caller's, if the key was here; 0 if not; -1 with an exception. */
static int
take_key(Table *table, PyObject *key, PyObject **value)
{
    uint32_t hash, at;
    Index in;
    PyObject *mine;
    if (hash_of(key, &hash) < 0) {
        return -1;
    }
    int found = find(table, key, hash, &in, &at);
    if (found > 0) {
        take(table, in, at, &mine, value);
        Py_DECREF(mine);
    }
    return found;
}

static void
empty(Table *table)
{
    Table before = *table;
    table->blocks = NULL;
    table->index.cells = table->old.cells = NULL;
    table->room = table->fresh = table->free = table->first = table->last = 0;
    table->length = 0;
    table->changes++;
    for (int32_t place = before.first; place;) {
        Entry *entry = entry_at(&before, place);
        place = entry->next;
        Py_DECREF(entry->key);
        Py_DECREF(entry->value);
    }
    for (int32_t place = 0; place < before.room; place += BLOCK) {
        PyMem_Free(before.blocks[place >> BLOCK_BITS]);
    }
    PyMem_Free(before.blocks);
    PyMem_Free(before.index.cells);
    PyMem_Free(before.old.cells);
}

/* -- what Python sees ------------------------------------------------------------------------ */

static PyObject *
key_error(PyObject *key)
{
    PyErr_SetObject(PyExc_KeyError, key);
    return NULL;
}

static int
count_of(const char *name, Py_ssize_t given, Py_ssize_t least, Py_ssize_t most)
{
    if (given < least || given > most) {
        PyErr_Format(PyExc_TypeError, "%s() does not take %zd arguments", name, given);
        return -1;
    }
    return 0;
}

static PyObject *
given_back(PyObject *value)
{
    Py_INCREF(value);
    return value;
}

static Py_ssize_t
table_length(Table *table)
{
    return table->length;
}

static int
table_contains(Table *table, PyObject *key)
{
    int32_t place = place_of(table, key);
    return place < 0 ? -1 : place > 0;
}

/* The value of a key; NULL if it is not here, and then perhaps with an exception. */
static PyObject *
value_of(Table *table, PyObject *key)
{
    int32_t place = place_of(table, key);
    return place > 0 ? given_back(entry_at(table, place)->value) : NULL;
}

static PyObject *
table_item(Table *table, PyObject *key)
{
    PyObject *value = value_of(table, key);
    return value != NULL || PyErr_Occurred() ? value : key_error(key);
}

static int
table_set_item(Table *table, PyObject *key, PyObject *value)
{
    if (value != NULL) {
        return set(table, key, value);
    }
    int found = take_key(table, key, &value);
    if (found > 0) {
        Py_DECREF(value);
        return 0;
    }
    if (!found) {
        key_error(key);
    }
    return -1;
}

/* As methods: to be called by name is slower through a slot. */
static PyObject *
table_has(Table *table, PyObject *key)
{
    int found = table_contains(table, key);
    return found < 0 ? NULL : PyBool_FromLong(found);
}

static PyObject *
table_get(Table *table, PyObject *const *args, Py_ssize_t count)
{
    if (count_of("get", count, 1, 2) < 0) {
        return NULL;
    }
    PyObject *value = value_of(table, args[0]);
    if (value != NULL || PyErr_Occurred()) {
        return value;
    }
    return given_back(count == 2 ? args[1] : Py_None);
}

static PyObject *
table_setdefault(Table *table, PyObject *const *args, Py_ssize_t count)
{
    if (count_of("setdefault", count, 2, 2) < 0) {
        return NULL;
    }
    PyObject *value = value_of(table, args[0]);
    if (value != NULL || PyErr_Occurred()) {
        return value;
    }
    return set(table, args[0], args[1]) < 0 ? NULL : given_back(args[1]);
}

static PyObject *
table_pop(Table *table, PyObject *const *args, Py_ssize_t count)
{
    PyObject *value;
    if (count_of("pop", count, 1, 2) < 0) {
        return NULL;
    }
    int found = take_key(table, args[0], &value);
    if (found != 0) {
        return found < 0 ? NULL : value;
    }
    return count == 2 ? given_back(args[1]) : key_error(args[0]);
}

/* Whether `last` is wanted, which is given at `args[position]` or by its name; -1: exception. */
static int
wants_last(const char *name, PyObject *const *args, Py_ssize_t count, PyObject *names,
           Py_ssize_t position)
{
    Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
    if (count_of(name, count + named, position, position + 1) < 0 || count < position) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError, "%s() needs a key", name);
        }
        return -1;
    }
    if (named && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "last") != 0) {
        PyErr_Format(PyExc_TypeError, "%s() knows no argument %R", name, PyTuple_GetItem(names, 0));
        return -1;
    }
    return count + named > position ? PyObject_IsTrue(args[position]) : 1;
}

static PyObject *
table_popitem(Table *table, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    int last = wants_last("popitem", args, count, names, 0);
    if (last < 0) {
        return NULL;
    }
    int32_t place = last ? table->last : table->first;
    if (!place) {
        PyErr_SetString(PyExc_KeyError, "the table is empty");
        return NULL;
    }
    uint32_t hash, at;
    Index in;
    PyObject *key = given_back(entry_at(table, place)->key), *value;
    int found = hash_of(key, &hash) < 0 ? -1 : find(table, key, hash, &in, &at);
    Py_DECREF(key);
    if (found <= 0) {
        if (!found) {
            PyErr_SetString(PyExc_RuntimeError, "the hash of a key has changed");
        }
        return NULL;
    }
    take(table, in, at, &key, &value);
    PyObject *pair = PyTuple_Pack(2, key, value);
    Py_DECREF(key);
    Py_DECREF(value);
    return pair;
}

static PyObject *
table_move_to_end(Table *table, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    int last = wants_last("move_to_end", args, count, names, 1);
    if (last < 0) {
        return NULL;
    }
    int32_t place = place_of(table, args[0]);
    if (place <= 0) {
        return place < 0 ? NULL : key_error(args[0]);
    }
    if (place != (last ? table->last : table->first)) {
        unlink_entry(table, place);
        link_entry(table, place, last);
        table->changes++;
    }
    Py_RETURN_NONE;
}

static PyObject *
table_clear(Table *table, PyObject *Py_UNUSED(ignored))
{
    empty(table);
    Py_RETURN_NONE;
}

static PyObject *
table_update(Table *table, PyObject *other)
{
    PyObject *pairs = PyObject_HasAttrString(other, "items")
                          ? PyObject_CallMethod(other, "items", NULL)
                          : given_back(other);
    PyObject *iterator = pairs == NULL ? NULL : PyObject_GetIter(pairs);
    Py_XDECREF(pairs);
    if (iterator == NULL) {
        return NULL;
    }
    PyObject *pair;
    while ((pair = PyIter_Next(iterator)) != NULL) {
        int bad = 1;
        if (PyTuple_Check(pair) && PyTuple_Size(pair) == 2) {
            bad = set(table, PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1));
        }
        else {
            PyErr_SetString(PyExc_TypeError, "update() takes a mapping or (key, value) tuples");
        }
        Py_DECREF(pair);
        if (bad) {
            break;
        }
    }
    Py_DECREF(iterator);
    return PyErr_Occurred() ? NULL : given_back(Py_None);
}

static PyObject *
table_sizeof(Table *table, PyObject *Py_UNUSED(ignored))
{
    size_t size = sizeof(Table) + (size_t)table->room * sizeof(Entry);
    size += table->index.cells == NULL ? 0 : ((size_t)table->index.mask + 1) * sizeof(Cell);
    size += table->old.cells == NULL ? 0 : ((size_t)table->old.mask + 1) * sizeof(Cell);
    return PyLong_FromSize_t(size);
}

static PyObject *
table_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    if (PyTuple_Size(args) || (names != NULL && PyDict_Size(names))) {
        PyErr_SetString(PyExc_TypeError, "OrderedTable() takes no arguments");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return alloc(type, 0);
}

static void
table_dealloc(Table *table)
{
    PyTypeObject *type = Py_TYPE((PyObject *)table);
    empty(table);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(table);
    Py_DECREF(type);
}

/* -- iterators ------------------------------------------------------------------------------- */

static PyObject *
iterate(Table *table, Kind kind)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot((PyTypeObject *)iterator_type, Py_tp_alloc);
    Iterator *iterator = (Iterator *)alloc((PyTypeObject *)iterator_type, 0);
    if (iterator != NULL) {
        Py_INCREF((PyObject *)table);
        iterator->table = table;
        iterator->place = table->first;
        iterator->changes = table->changes;
        iterator->kind = kind;
    }
    return (PyObject *)iterator;
}

static PyObject *
table_iter(Table *table)
{
    return iterate(table, KEYS);
}

static PyObject *
table_keys(Table *table, PyObject *Py_UNUSED(ignored))
{
    return iterate(table, KEYS);
}

static PyObject *
table_values(Table *table, PyObject *Py_UNUSED(ignored))
{
    return iterate(table, VALUES);
}

static PyObject *
table_items(Table *table, PyObject *Py_UNUSED(ignored))
{
    return iterate(table, ITEMS);
}

static PyObject *
iterator_next(Iterator *iterator)
{
    if (!iterator->place) {
        return NULL;
    }
    if (iterator->changes != iterator->table->changes) {
        PyErr_SetString(PyExc_RuntimeError, "the table was changed while it was walked through");
        return NULL;
    }
    Entry *entry = entry_at(iterator->table, iterator->place);
    iterator->place = entry->next;
    switch (iterator->kind) {
    case KEYS:
        return given_back(entry->key);
    case VALUES:
        return given_back(entry->value);
    default:
        return PyTuple_Pack(2, entry->key, entry->value);
    }
}

static void
iterator_dealloc(Iterator *iterator)
{
    PyTypeObject *type = Py_TYPE((PyObject *)iterator);
    Py_XDECREF((PyObject *)iterator->table);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(iterator);
    Py_DECREF(type);
}

/* -- the module ------------------------------------------------------------------------------ */

#define CALLED_FAST (METH_FASTCALL | METH_KEYWORDS)

static PyMethodDef table_methods[] = {
    {"__contains__", (PyCFunction)table_has, METH_O | METH_COEXIST, NULL},
    {"__getitem__", (PyCFunction)table_item, METH_O | METH_COEXIST, NULL},
    {"get", (PyCFunction)(void (*)(void))table_get, METH_FASTCALL, NULL},
    {"setdefault", (PyCFunction)(void (*)(void))table_setdefault, METH_FASTCALL, NULL},
    {"pop", (PyCFunction)(void (*)(void))table_pop, METH_FASTCALL, NULL},
    {"popitem", (PyCFunction)(void (*)(void))table_popitem, CALLED_FAST, NULL},
    {"move_to_end", (PyCFunction)(void (*)(void))table_move_to_end, CALLED_FAST, NULL},
    {"clear", (PyCFunction)table_clear, METH_NOARGS, NULL},
    {"update", (PyCFunction)table_update, METH_O, NULL},
    {"keys", (PyCFunction)table_keys, METH_NOARGS, NULL},
    {"values", (PyCFunction)table_values, METH_NOARGS, NULL},
    {"items", (PyCFunction)table_items, METH_NOARGS, NULL},
    {"__sizeof__", (PyCFunction)table_sizeof, METH_NOARGS, NULL},
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, NULL},
    {NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, table_methods},
    {Py_tp_iter, table_iter},
    {Py_sq_contains, table_contains},
    {Py_mp_length, table_length},
    {Py_mp_subscript, table_item},
    {Py_mp_ass_subscript, table_set_item},
    {Py_tp_hash, PyObject_HashNotImplemented},
    {0, NULL},
};

static PyType_Spec table_spec = {
    .name = "kvstore.policies._table.OrderedTable",
    .basicsize = sizeof(Table),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = table_slots,
};

static PyType_Slot iterator_slots[] = {
    {Py_tp_dealloc, iterator_dealloc},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, iterator_next},
    {0, NULL},
};

static PyType_Spec iterator_spec = {
    .name = "kvstore.policies._table.Iterator",
    .basicsize = sizeof(Iterator),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = iterator_slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore.policies._table",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__table(void)
{
    PyObject *made = PyModule_Create(&module);
    PyObject *table = PyType_FromSpec(&table_spec);
    iterator_type = PyType_FromSpec(&iterator_spec);
    if (made == NULL || table == NULL || iterator_type == NULL ||
        PyModule_AddObjectRef(made, "OrderedTable", table) < 0) {
        Py_XDECREF(table);
        Py_XDECREF(made);
        return NULL;
    }
    Py_DECREF(table);
    return made;
}
