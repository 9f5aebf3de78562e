// The fast path of a call: recognise a call like an earlier one, allocate its outputs, launch its kernels.
//
// Tensors are read through DLPack's C exchange API (torch.Tensor.__dlpack_c_exchange_api__; the structures below
// follow dlpack.h, version 1). Nothing of torch, CUDA or a Python version is compiled in. fuser/python_launcher.py has
// the same in Python, fuser/record.py says what a record is; whatever is not exactly like a recorded call returns None
// from here, and the caller goes the long way.
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { MAX_ITEMS = 96, MAX_WORDS = 1024, MAX_ARGUMENT_WORDS = 512, MAX_RANK = 255, MAX_ORDERED = 15 };
// Places in a table of records, at most, and those in which one record may be.
enum { MAX_TABLE = 2048, WINDOW = 16 };
enum { DEVICE_CUDA = 2, VECTOR_BYTES = 16 };
// A kernel on the host runs without the GIL, unless its first replays took no longer than this, which data cannot change.
enum { LONG_NS = 20000, TIMED_REPLAYS = 3 };

// ---- DLPack

typedef struct {
  void *data;
  int32_t device_type, device_id, ndim;
  struct { uint8_t code, bits; uint16_t lanes; } dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct {
  struct { uint32_t major, minor; } version;
  void *prev_api;
  void *managed_tensor_allocator, *managed_tensor_from_py_object, *managed_tensor_to_py_object;
  int (*dltensor_from_py_object)(void *object, DLTensor *out);
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void **stream);
} ExchangeApi;

// ---- What the module is told once: see fuser/launcher.py

static const ExchangeApi *api;
static PyObject *tensor_type, *parameter_type;
// Python callables: lengths of the stacks of torch function and dispatch modes, whether grad mode is on, torch's number
// of threads, and what tells autograd that tensors were written to.
static PyObject *function_modes, *dispatch_modes, *grad_enabled, *thread_count, *increment_version;
// The namespace of torch.autograd.forward_ad, and the name in it that says how deep in dual levels we are.
static PyObject *forward_ad, *level_name, *no_level;
// The namespace of torch.autograd.profiler, the name in it that says whether anybody profiles, and what makes an event.
static PyObject *profiler, *profiled_name, *make_event;
// The CUDA driver's functions, once a CUDA kernel has been loaded.
static int (*driver_launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                            void **, void **);
static int (*driver_launch_with)(const void *, void *, void **, void **);
static int (*driver_device)(int *);
// Records made before this changed are stale.
static uint64_t generation;
static unsigned long long launches;
// The words "out", "call_anew" and "item".
static PyObject *out_name, *anew_name, *item_name;
// Stands for a default value or a constant that there is not.
static PyObject *missing;
static PyTypeObject *launcher_type;

// ---- One call, as it is described for comparison

typedef struct {
  // What must be equal: the numbers of arguments and of out= tensors; one word per number; a head, the sizes and the
  // strides per tensor.
  uint64_t words[MAX_WORDS];
  int word_count;
  // Held: while a kernel runs without the GIL, others may change the dict they came in.
  PyObject *items[MAX_ITEMS];
  uint64_t addresses[MAX_ITEMS];
  // For each tensor the first item that is the same object; -1 for a number.
  int firsts[MAX_ITEMS];
  int input_count, item_count, distinct_count;
  // Whether garbage is to be collected again once the addresses have been used.
  int collects;
} Call;

// What a record is found by.
typedef struct {
  const uint64_t *words;
  int count;
} Key;

typedef struct {
  PyObject *allocate, *arguments;
} Allocation;

// Arguments and number of threads.
typedef void HostKernel(const void *, int);

typedef struct {
  int index;
  char kind;
} Number;

typedef struct {
  uint64_t function;
  unsigned grid, block, shared_bytes;
  // Where the addresses begin in the arguments, the values whose addresses they are, and the numbers after them.
  int first, pointer_count, number_count, argument_words;
  int *pointers;
  Number *numbers;
  uint64_t *arguments;
  int is_parallel, is_steady;
  // Whether it may begin when all blocks of the launch before it have.
  int follows;
  // What a profiler calls it.
  PyObject *name;
  // How many replays over how many elements were timed, the shortest of them, and up to how many elements it is short
  // enough to keep the GIL.
  int timed;
  int64_t timed_numel, quick_numel, shortest_ns;
} Step;

// How a record serves calls of any size: see fuser.geometry.Flat.
typedef struct {
  // Elements of a block; elements from which threads share the work, and which a kernel can count at most.
  int64_t chunk, parallel_from, most;
  // Sizes and strides of the last call, with which the allocations' arguments begin; NULL before.
  uint64_t *words;
} Flat;

typedef struct {
  int references;
  uint64_t generation, hash;
  int word_count;
  uint64_t *words;
  // torch's own comparison of everything about the tensors, and of the modes that are on. It takes each tensor once.
  PyObject *check;
  // Values elsewhere that the call relies on: (dict or object, name, value), each still that very object.
  PyObject *reads;
  // What is called with the inputs in place of allocating and launching, in grad mode only; NULL for most records.
  PyObject *through;
  // What is called with sizes and strides, and gives what such a call allocates and launches; NULL for most records.
  PyObject *resize;
  // Whether grad mode has to be on (1) or off (0); -1 for either.
  int grad_mode;
  int device, is_cuda;
  int result_count, allocation_count, step_count;
  Allocation *allocations;
  Step *steps;
  // Keeps the kernels loaded.
  PyObject *kernels;
  int is_flat;
  Flat flat;
  // Whether an out= tensor may not be an input, either: what is written is read elsewhere afterwards.
  unsigned long long apart;
} Record;

typedef struct {
  Record *last;
  Record **records;
  int size;
} Table;

typedef struct {
  PyObject_HEAD
  // Names and default values of the scalars that follow the tensors. With an order, the inputs are places among the
  // arguments, or -1 - k for the k-th default; the names are then those of all parameters, or none, and for each there
  // is what an argument left out is, and what it has to be.
  PyObject *names, *defaults, *fill, *constants;
  int *order;
  int order_count;
  // Records that launch for any size of a linear kernel, those that launch for one, those that make such records, and
  // those that call something, of either kind: a call may fit one of each, by its tensors' requires_grad.
  Table flat, launching, resizing, calling;
} Launcher;

static void release(Record *record) {
  if (!record || --record->references) return;
  for (int i = 0; i < record->allocation_count; ++i) {
    Py_XDECREF(record->allocations[i].allocate);
    Py_XDECREF(record->allocations[i].arguments);
  }
  for (int i = 0; i < record->step_count; ++i) {
    PyMem_Free(record->steps[i].pointers);
    PyMem_Free(record->steps[i].numbers);
    PyMem_Free(record->steps[i].arguments);
    Py_XDECREF(record->steps[i].name);
  }
  PyMem_Free(record->allocations);
  PyMem_Free(record->steps);
  PyMem_Free(record->words);
  Py_XDECREF(record->check);
  Py_XDECREF(record->reads);
  Py_XDECREF(record->through);
  Py_XDECREF(record->resize);
  Py_XDECREF(record->kernels);
  PyMem_Free(record->flat.words);
  PyMem_Free(record);
}

// Until the kernels have their arguments, nothing may move what the addresses point to. The only code of others that
// could run before is that of finalizers, which collecting garbage calls (up to Python 3.11, from any allocation).
static void begin(Call *call) {
  call->item_count = call->distinct_count = 0;
  call->collects = Py_Version < 0x030c0000 && PyGC_Disable();
}

static void collect_again(Call *call) {
  if (call->collects) PyGC_Enable();
  call->collects = 0;
}

static void end(Call *call) {
  collect_again(call);
  while (call->item_count) Py_DECREF(call->items[--call->item_count]);
}

static int is_tensor(PyObject *item) {
  PyObject *type = (PyObject *)Py_TYPE(item);
  return type == tensor_type || type == parameter_type;
}

// These say whether it could be done, and leave no exception.

static int read_tensor(PyObject *item, DLTensor *tensor) {
  if (api->dltensor_from_py_object(item, tensor) == 0) return 1;
  PyErr_Clear();
  return 0;
}

static int describe(Call *call, PyObject *item) {
  PyObject *type = (PyObject *)Py_TYPE(item);
  if (call->item_count == MAX_ITEMS || call->word_count == MAX_WORDS) return 0;
  call->items[call->item_count] = item;
  if (is_tensor(item)) {
    DLTensor tensor;
    if (!read_tensor(item, &tensor) || tensor.ndim > MAX_RANK) return 0;
    if (call->word_count + 1 + 2 * tensor.ndim > MAX_WORDS) return 0;
    const uint64_t address = (uint64_t)tensor.data + tensor.byte_offset;
    int first = 0;
    while (call->items[first] != item) ++first;
    call->firsts[call->item_count] = first;
    call->distinct_count += first == call->item_count;
    const uint64_t head[] = {1, first, tensor.ndim, tensor.dtype.code, tensor.dtype.bits, tensor.device_type,
                             tensor.device_id & 0xff, tensor.device_type == DEVICE_CUDA && address % VECTOR_BYTES};
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word = word << 8 | head[i];
    uint64_t *words = call->words + call->word_count;
    words[0] = word;
    for (int i = 0; i < tensor.ndim; ++i) {
      words[1 + i] = tensor.shape[i];
      words[1 + tensor.ndim + i] = tensor.strides[i];
    }
    call->word_count += 1 + 2 * tensor.ndim;
    call->addresses[call->item_count] = address;
  } else if (type == (PyObject *)&PyFloat_Type || type == (PyObject *)&PyLong_Type ||
             type == (PyObject *)&PyBool_Type || type == (PyObject *)&PyComplex_Type) {
    call->words[call->word_count++] = (uint64_t)(uintptr_t)type;
    call->firsts[call->item_count] = -1;
  } else {
    return 0;
  }
  Py_INCREF(item);
  ++call->item_count;
  return 1;
}

// Describe a call's scalars in the order of their names; ``given`` is how many there are.
static int describe_scalars(Call *call, const Launcher *self, PyObject *scalars, Py_ssize_t given) {
  // Held, as comparing a key of the caller's may run code.
  PyObject *names = Py_NewRef(self->names), *defaults = Py_NewRef(self->defaults);
  const Py_ssize_t count = PyTuple_Size(names);
  int is_done = 1;
  for (Py_ssize_t i = 0; is_done && i < count; ++i) {
    PyObject *value = given ? PyDict_GetItemWithError(scalars, PyTuple_GetItem(names, i)) : NULL;
    if (value)
      --given;
    else if (given && PyErr_Occurred())
      is_done = 0;
    is_done = is_done && describe(call, value ? value : PyTuple_GetItem(defaults, i));
  }
  if (!is_done) PyErr_Clear();
  Py_DECREF(names);
  Py_DECREF(defaults);
  // Else there is a scalar that the functor does not have.
  return is_done && !given;
}

static int is_constant(PyObject *value, PyObject *constant) {
  // Of words that are equal there may be several.
  return value == constant || constant == missing ||
         (PyUnicode_CheckExact(value) && PyUnicode_CheckExact(constant) && !PyUnicode_Compare(value, constant));
}

// Put a call's arguments in the places of their parameters, those by name and those left out, too; the caller gives
// them back. Returns how many there are; -1 if they are not as the parameters want them.
static int place_arguments(PyObject **places, const Launcher *self, PyObject *tensors, PyObject *keywords,
                           Py_ssize_t given) {
  // Held, as comparing a key of the caller's may run code.
  PyObject *names = Py_NewRef(self->names), *fill = Py_NewRef(self->fill), *constants = Py_NewRef(self->constants);
  const Py_ssize_t count = PyTuple_Size(tensors), named = PyTuple_Size(names), all = named ? named : count;
  int placed = 0, is_done = count <= all && all <= MAX_ITEMS;
  for (; is_done && placed < all; placed += is_done) {
    PyObject *value = placed < count ? PyTuple_GetItem(tensors, placed) : NULL;
    if (!value && given) {
      value = PyDict_GetItemWithError(keywords, PyTuple_GetItem(names, placed));
      given -= value != NULL;
    }
    if (!value && !PyErr_Occurred()) value = PyTuple_GetItem(fill, placed);
    is_done = value && value != missing && (!named || is_constant(value, PyTuple_GetItem(constants, placed)));
    if (is_done) places[placed] = Py_NewRef(value);
  }
  if (!is_done) PyErr_Clear();
  Py_DECREF(names);
  Py_DECREF(fill);
  Py_DECREF(constants);
  if (is_done && !given) return placed;
  while (placed) Py_DECREF(places[--placed]);
  return -1;
}

// Describe a call's inputs in their order.
static int describe_ordered(Call *call, const Launcher *self, PyObject *tensors, PyObject *keywords, Py_ssize_t given,
                            uint64_t *count) {
  PyObject *places[MAX_ITEMS];
  int placed = place_arguments(places, self, tensors, keywords, given), is_done = placed >= 0;
  *count = placed;
  for (int i = 0; is_done && i < self->order_count; ++i) {
    const int place = self->order[i];
    is_done = place < placed && describe(call, place < 0 ? PyTuple_GetItem(self->defaults, -1 - place) : places[place]);
  }
  while (placed > 0) Py_DECREF(places[--placed]);
  return is_done;
}

// Describe a call's inputs (the tensors, then the scalars by name or default) and its out= tensors.
static int describe_call(Call *call, const Launcher *self, PyObject *tensors, PyObject *scalars, Py_ssize_t given,
                         PyObject *out) {
  const int is_tuple = PyTuple_CheckExact(out);
  const Py_ssize_t outs = out == Py_None ? 0 : is_tuple ? PyTuple_Size(out) : 1;
  uint64_t count = PyTuple_Size(tensors);
  call->word_count = 1;
  if (self->order) {
    if (!describe_ordered(call, self, tensors, scalars, given, &count)) return 0;
  } else {
    for (uint64_t i = 0; i < count; ++i)
      if (!describe(call, PyTuple_GetItem(tensors, i))) return 0;
    if (!describe_scalars(call, self, scalars, given)) return 0;
  }
  // A call without out= is none with an empty tuple.
  call->words[0] = count << 32 | (uint64_t)(out == Py_None ? 0 : outs + 1);
  call->input_count = call->item_count;
  for (Py_ssize_t i = 0; i < outs; ++i) {
    PyObject *item = is_tuple ? PyTuple_GetItem(out, i) : out;
    if (!is_tensor(item) || !describe(call, item)) return 0;
  }
  return 1;
}

// How many words an item has; a number's one is the address of its type.
static int ndim_of(const uint64_t *words) { return words[0] >> 56 ? (int)(words[0] >> 40 & 0xff) : 0; }
static int word_count_of(const uint64_t *words) { return 1 + 2 * ndim_of(words); }

// The order in which the dimensions of a dense tensor are nested, as a number: tensors of one order are given results
// of one order. 0 for one that is not dense.
static uint64_t order_of(const uint64_t *sizes, const uint64_t *strides, int ndim) {
  uint64_t expected = 1, order = 1;
  int dim = ndim;
  while (dim && strides[dim - 1] == expected) expected *= sizes[--dim];
  if (!dim) return order;
  // Another order than the usual one: a dimension of one element would have no place in it.
  expected = 1;
  for (int placed = 0; placed < ndim; ++placed) {
    for (dim = 0; dim < ndim && (strides[dim] != expected || sizes[dim] < 2); ++dim) {}
    if (dim == ndim || ndim > MAX_ORDERED) return 0;
    expected *= sizes[dim];
    order = order << 4 | (uint64_t)dim;
  }
  return order;
}

// The key of a call without sizes and strides, with another word at its end; ``words`` has room for MAX_ITEMS and two.
static Key describe_heads(const Call *call, uint64_t *words, uint64_t last) {
  const uint64_t *next = call->words + 1;
  words[0] = call->words[0];
  for (int i = 0; i < call->item_count; ++i, next += word_count_of(next)) words[1 + i] = next[0];
  words[1 + call->item_count] = last;
  return (Key){words, 2 + call->item_count};
}

// The order of the dimensions of all tensors of a call that have any, if it is one, they are dense and have the same
// sizes: one index serves them all. Else 0. Tells where in the call's words the first such tensor is, and how many
// elements it has.
static uint64_t find_order(const Call *call, const uint64_t **sized, int64_t *numel) {
  const uint64_t *next = call->words + 1;
  *sized = NULL;
  for (int i = 0; i < call->item_count; ++i, next += word_count_of(next)) {
    const int ndim = ndim_of(next);
    if (!ndim) continue;
    if (!*sized)
      *sized = next;
    else if (ndim != ndim_of(*sized) || memcmp(*sized + 1, next + 1, 2 * ndim * sizeof(uint64_t)))
      return 0;
  }
  if (!*sized) return 0;
  const int ndim = ndim_of(*sized);
  // A size is at least 2 in all, so that a tensor without dimensions is one that is read again and again.
  *numel = 1;
  for (int i = 1; i <= ndim; ++i)
    if (__builtin_mul_overflow(*numel, (int64_t)(*sized)[i], numel)) return 0;
  return *numel > 1 ? order_of(*sized + 1, *sized + 1 + ndim, ndim) : 0;
}

static uint64_t hash_words(Key key) {
  uint64_t hash = 0x9e3779b97f4a7c15u + key.count;
  for (int i = 0; i < key.count; ++i) {
    hash = (hash ^ key.words[i]) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  return hash;
}

static int is_like(const Record *record, Key key) {
  return record && record->generation == generation && record->word_count == key.count &&
         !memcmp(record->words, key.words, sizeof(uint64_t) * key.count);
}

static void set_last(Table *table, Record *record) {
  Record *before = table->last;
  ++record->references;
  table->last = record;
  release(before);
}

static int read_launches(Record *, Key, const Call *, PyObject *allocations, PyObject *steps);
static int keep(Table *, Record *);
static int is_tuple(PyObject *);

// The place of a record in a table, by its hash and how many places before it are taken: those after two, in turn.
static Record **place_of(const Table *table, uint64_t hash, int taken) {
  return &table->records[((taken & 1 ? hash >> 32 : hash) + taken / 2) & (table->size - 1)];
}

// The record of a call's signature, for the caller to release; or NULL.
static Record *find(Table *table, Key key) {
  Record *found = table->last;
  const int is_last = is_like(found, key);
  if (!is_last) {
    const uint64_t hash = table->size ? hash_words(key) : 0;
    found = NULL;
    for (int i = 0; i < WINDOW && i < table->size && !found; ++i) {
      Record *record = *place_of(table, hash, i);
      if (!record) return NULL;
      if (is_like(record, key)) found = record;
    }
    if (!found) return NULL;
  }
  // What releasing another record calls may replace this one.
  ++found->references;
  if (!is_last) set_last(table, found);
  return found;
}

static int is_zero(PyObject *callable) {
  PyObject *result = PyObject_CallNoArgs(callable);
  if (!result) return PyErr_Clear(), 0;
  const int zero = PyObject_Not(result) == 1;
  Py_DECREF(result);
  return zero;
}

// Whether there is no level of forward-mode differentiation, in which tensors may carry tangents.
static int is_forward_ad_off(void) {
  PyObject *level = PyDict_GetItemWithError(forward_ad, level_name);
  // Python has one object for this number.
  if (level == no_level) return 1;
  return PyErr_Clear(), 0;
}

static int are_reads_current(PyObject *reads) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(reads); ++i) {
    PyObject *read = PyTuple_GetItem(reads, i);
    PyObject *held = PyTuple_GetItem(read, 0), *name = PyTuple_GetItem(read, 1);
    PyObject *now = PyDict_CheckExact(held) ? Py_XNewRef(PyDict_GetItemWithError(held, name)) : PyObject_GetAttr(held, name);
    if (!now) return PyErr_Clear(), 0;
    Py_DECREF(now);
    if (now != PyTuple_GetItem(read, 2)) return 0;
  }
  return 1;
}

// torch's comparison of the tensors: type, dispatch keys with those of the active modes, requires_grad, layout.
static int passes_check(const Launcher *self, const Record *record, const Call *call, PyObject *tensors) {
  if (!is_zero(function_modes) || !is_zero(dispatch_modes) || !is_forward_ad_off()) return 0;
  if (record->grad_mode >= 0 && is_zero(grad_enabled) == record->grad_mode) return 0;
  if (!are_reads_current(record->reads)) return 0;
  PyObject *arguments;
  if (call->distinct_count == call->item_count && call->item_count == PyTuple_Size(tensors) && !self->order) {
    arguments = Py_NewRef(tensors);
  } else {
    arguments = PyTuple_New(call->distinct_count);
    if (!arguments) return PyErr_Clear(), 0;
    Py_ssize_t place = 0;
    for (int i = 0; i < call->item_count; ++i)
      if (call->firsts[i] == i)
        PyTuple_SetItem(arguments, place++, Py_NewRef(call->items[i]));
  }
  PyObject *verdict = PyObject_Call(record->check, arguments, NULL);
  Py_DECREF(arguments);
  if (!verdict) return PyErr_Clear(), 0;
  Py_DECREF(verdict);
  return verdict == Py_True;
}

// How many bytes from its first element a described tensor reaches.
static uint64_t reach_bytes(const uint64_t *words) {
  const int ndim = (int)(words[0] >> 40 & 0xff), bits = (int)(words[0] >> 24 & 0xff);
  uint64_t last = 0;
  for (int i = 0; i < ndim; ++i) {
    if (!words[1 + i]) return 0;
    last += (words[1 + i] - 1) * words[1 + ndim + i];
  }
  return (last + 1) * (uint64_t)((bits + 7) / 8);
}

// Whether each out= tensor is apart from every other tensor, or, where its bit is not set, is an input, element for
// element.
static int outputs_are_apart(const Call *call, unsigned long long apart) {
  const uint64_t *starts[MAX_ITEMS];
  const uint64_t *words = call->words + 1;
  for (int i = 0; i < call->item_count; ++i) {
    starts[i] = words;
    words += word_count_of(words);
  }
  for (int i = call->input_count; i < call->item_count; ++i) {
    const uint64_t begin = call->addresses[i], end = begin + reach_bytes(starts[i]);
    const int slot = i - call->input_count, may_be_input = slot < 64 && !(apart >> slot & 1);
    for (int j = 0; j < i; ++j) {
      if (call->firsts[j] < 0) continue;
      const int size = word_count_of(starts[j]);
      const uint64_t other = call->addresses[j];
      if (other >= end || begin >= other + reach_bytes(starts[j])) continue;
      const int is_same = may_be_input && j < call->input_count && other == begin && size == word_count_of(starts[i]) &&
                          *starts[i] << 16 == *starts[j] << 16 &&
                          !memcmp(starts[i] + 1, starts[j] + 1, sizeof(uint64_t) * (size - 1));
      if (!is_same) return 0;
    }
  }
  return 1;
}

static int is_double(PyObject *integer) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(integer, &overflow);
  return !overflow && value >= -(1LL << 53) && value <= 1LL << 53;
}

// As CUDA converts, and fused_kernel.py.
static int64_t to_integer(double real) {
  if (real != real) return 0;
  if (real <= -9223372036854775808.0) return INT64_MIN;
  return real >= 9223372036854774784.0 ? 9223372036854774784LL : (int64_t)real;
}

// Writes a number where it goes, and returns where the next one does; sets an error for one that does not fit.
static uint64_t *put_number(PyObject *item, char kind, uint64_t *to) {
  double real;
  int64_t integer;
  switch (kind) {
    case 'f':
      // An integer that is no double goes the long way.
      if (PyLong_Check(item) && !is_double(item)) return PyErr_SetNone(PyExc_OverflowError), to;
      real = PyFloat_AsDouble(item);
      memcpy(to++, &real, 8);
      break;
    case 'c':
      real = PyComplex_RealAsDouble(item);
      memcpy(to++, &real, 8);
      real = PyComplex_ImagAsDouble(item);
      memcpy(to++, &real, 8);
      break;
    case 'b':
      integer = PyObject_IsTrue(item);
      memcpy(to++, &integer, 8);
      break;
    default:
      integer = PyFloat_Check(item) ? to_integer(PyFloat_AsDouble(item)) : PyLong_AsLongLong(item);
      memcpy(to++, &integer, 8);
  }
  return to;
}

// The arguments of one step, after a copy of its template; 0 for a number that does not fit.
static int pack(const Step *step, const Call *call, const uint64_t *values, uint64_t *arguments) {
  memcpy(arguments, step->arguments, sizeof(uint64_t) * step->argument_words);
  uint64_t *next = arguments + step->first;
  for (int i = 0; i < step->pointer_count; ++i) *next++ = values[step->pointers[i]];
  for (int i = 0; i < step->number_count; ++i) {
    const int index = step->numbers[i].index;
    // Of a tensor on the CPU, its value.
    PyObject *item = call->firsts[index] < 0 ? Py_NewRef(call->items[index])
                                             : PyObject_CallMethodObjArgs(call->items[index], item_name, NULL);
    if (item) next = put_number(item, step->numbers[i].kind, next);
    Py_XDECREF(item);
    if (PyErr_Occurred()) return PyErr_Clear(), 0;
  }
  return 1;
}

// What cuLaunchKernelEx takes.
typedef struct {
  int id;
  char padding[4];
  int value[16];
} LaunchAttribute;

typedef struct {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void *stream;
  const LaunchAttribute *attributes;
  unsigned attribute_count;
} LaunchConfig;

static int launch_cuda(const Step *step, unsigned grid, uint64_t *arguments, void *stream) {
  // As one buffer: CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE, _END. The driver takes less time for it than for a parameter.
  size_t bytes = sizeof(uint64_t) * step->argument_words;
  void *extra[] = {(void *)1, arguments, (void *)2, &bytes, NULL};
  void *function = (void *)(uintptr_t)step->function;
  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
  const LaunchAttribute abreast = {.id = 6, .value = {1}};
  const LaunchConfig config = {grid, 1, 1, step->block, 1, 1, step->shared_bytes, stream, &abreast, 1};
  int status;
  Py_BEGIN_ALLOW_THREADS
  if (step->follows && driver_launch_with)
    status = driver_launch_with(&config, function, NULL, extra);
  else
    status = driver_launch(function, grid, 1, 1, step->block, 1, 1, step->shared_bytes, stream, NULL, extra);
  Py_END_ALLOW_THREADS
  if (status) PyErr_Format(PyExc_RuntimeError, "CUDA refused to launch a fused kernel: error %d", status);
  return !status;
}

static int64_t now_ns(void) {
  struct timespec now = {0};
  timespec_get(&now, TIME_UTC);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int launch_cpu(Step *step, int64_t numel, int is_parallel, const uint64_t *arguments) {
  HostKernel *function = (HostKernel *)(uintptr_t)step->function;
  if (numel <= step->quick_numel) return function(arguments, 1), 1;
  int threads = 1;
  if (is_parallel) {
    PyObject *count = PyObject_CallNoArgs(thread_count);
    if (!count) return 0;
    threads = (int)PyLong_AsLong(count);
    Py_DECREF(count);
    if (threads < 1 && !PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "torch has %d threads", threads);
    if (threads < 1) return 0;
  }
  int64_t taken;
  Py_BEGIN_ALLOW_THREADS
  const int64_t begin = now_ns();
  function(arguments, threads);
  taken = now_ns() - begin;
  Py_END_ALLOW_THREADS
  if (numel > step->timed_numel) step->timed = 0, step->timed_numel = numel;
  if (is_parallel || !step->is_steady || step->timed == TIMED_REPLAYS || numel < step->timed_numel) return 1;
  if (!step->timed || taken < step->shortest_ns) step->shortest_ns = taken;
  if (++step->timed == TIMED_REPLAYS && step->shortest_ns <= LONG_NS) step->quick_numel = numel;
  return 1;
}

static int is_profiled(void) {
  PyObject *flag = PyDict_GetItemWithError(profiler, profiled_name);
  return flag ? flag == Py_True : (PyErr_Clear(), 0);
}

// The elements of a call by a record for any size; 1 for all others.
static int launch_step(const Record *record, Step *step, int64_t numel, uint64_t *arguments, void *stream) {
  const Flat *flat = &record->flat;
  unsigned grid = step->grid;
  int is_parallel = step->is_parallel;
  if (record->is_flat) {
    // An argument struct begins with the number of elements.
    arguments[0] = numel;
    grid = record->is_cuda ? (unsigned)((numel - 1) / flat->chunk + 1) : 0;
    is_parallel = numel >= flat->parallel_from;
  }
  return record->is_cuda ? launch_cuda(step, grid, arguments, stream) : launch_cpu(step, numel, is_parallel, arguments);
}

// Launch inside an event that torch's profiler and NVTX see; without one if that cannot be made.
static int launch_profiled(const Record *record, Step *step, int64_t numel, uint64_t *arguments, void *stream) {
  PyObject *event = PyObject_CallFunctionObjArgs(make_event, step->name, NULL);
  PyObject *entered = event ? PyObject_CallMethod(event, "__enter__", NULL) : NULL;
  if (!entered) PyErr_Clear();
  Py_XDECREF(entered);
  const int is_launched = launch_step(record, step, numel, arguments, stream);
  // It ends with its object.
  Py_XDECREF(event);
  return is_launched;
}

// out= tensors were written to: what autograd has saved of them is no longer what it was.
static int tell_autograd(PyObject *out) {
  PyObject *tensors = PyTuple_CheckExact(out) ? Py_NewRef(out) : PyTuple_Pack(1, out);
  PyObject *arguments = tensors ? PyTuple_Pack(1, tensors) : NULL;
  PyObject *done = arguments ? PyObject_Call(increment_version, arguments, NULL) : NULL;
  Py_XDECREF(tensors);
  Py_XDECREF(arguments);
  Py_XDECREF(done);
  return done != NULL;
}

static PyObject *new_tuple(const uint64_t *values, int count) {
  PyObject *tuple = PyTuple_New(count);
  for (int i = 0; tuple && i < count; ++i) {
    PyObject *value = PyLong_FromLongLong((long long)values[i]);
    if (!value) return Py_DECREF(tuple), NULL;
    PyTuple_SetItem(tuple, i, value);
  }
  return tuple;
}

// Let a record for any size allocate with these sizes and strides.
static int set_sizes(Record *record, const uint64_t *sized) {
  const int ndim = ndim_of(sized);
  const size_t bytes = 2 * ndim * sizeof(uint64_t);
  if (record->flat.words && !memcmp(record->flat.words, sized + 1, bytes)) return 1;
  uint64_t *words = PyMem_Malloc(bytes);
  PyObject *shape = new_tuple(sized + 1, ndim), *strides = new_tuple(sized + 1 + ndim, ndim);
  PyObject *now[MAX_ITEMS];
  int is_done = words && shape && strides, count = 0;
  for (; is_done && count < record->allocation_count; count += is_done)
    is_done = (now[count] = PyTuple_Pack(3, shape, strides, PyTuple_GetItem(record->allocations[count].arguments, 2))) != NULL;
  Py_XDECREF(shape);
  Py_XDECREF(strides);
  if (!is_done) {
    while (count) Py_DECREF(now[--count]);
    return PyMem_Free(words), PyErr_Occurred() ? 0 : (PyErr_NoMemory(), 0);
  }
  // All of them from here on: making tuples may collect garbage, and what that calls may set other sizes.
  for (int i = 0; i < count; ++i) {
    PyObject *before = record->allocations[i].arguments;
    record->allocations[i].arguments = now[i];
    Py_DECREF(before);
  }
  PyMem_Free(record->flat.words);
  memcpy(words, sized + 1, bytes);
  record->flat.words = words;
  return 1;
}

static PyObject *allocate(const Allocation *item) {
  // Held: allocating may collect garbage, and what that calls may come back here with other sizes.
  PyObject *arguments = Py_NewRef(item->arguments), *tensor = PyObject_Call(item->allocate, arguments, NULL);
  Py_DECREF(arguments);
  return tensor;
}

// Allocate and launch. The result is NULL with an error set, None (nothing was done), or the call's value.
// For a record for any size ``sized`` are the words of a tensor of the call's sizes and strides, ``numel`` its elements.
static PyObject *replay(Record *record, Call *call, PyObject *out, const uint64_t *sized, int64_t numel) {
  void *stream = NULL;
  if (record->is_cuda) {
    int device = -1;
    if (!driver_launch || driver_device(&device) || device != record->device ||
        api->current_work_stream(DEVICE_CUDA, device, &stream))
      return PyErr_Clear(), Py_NewRef(Py_None);
  }
  uint64_t values[2 * MAX_ITEMS];
  PyObject *made[MAX_ITEMS], *result = NULL;
  int made_count = 0, value_count = call->item_count;
  memcpy(values, call->addresses, sizeof(uint64_t) * call->item_count);
  for (; made_count < record->allocation_count; ++made_count) {
    // Each time: the allocation before may have called somebody who called with other sizes.
    if (record->is_flat && !set_sizes(record, sized)) goto done;
    PyObject *tensor = allocate(&record->allocations[made_count]);
    DLTensor described;
    if (!(made[made_count] = tensor)) goto done;
    if (!is_tensor(tensor) || !read_tensor(tensor, &described)) {
      ++made_count;
      PyErr_SetString(PyExc_TypeError, "an allocator returned something else than a tensor with memory");
      goto done;
    }
    values[value_count++] = (uint64_t)described.data + described.byte_offset;
  }
  for (int i = 0; i < record->step_count; ++i) {
    Step *step = &record->steps[i];
    uint64_t arguments[MAX_ARGUMENT_WORDS];
    if (!pack(step, call, values, arguments)) {
      // The long way has the error's words.
      result = Py_NewRef(Py_None);
      goto done;
    }
    collect_again(call);
    if (!(is_profiled() ? launch_profiled : launch_step)(record, step, numel, arguments, stream)) goto done;
    ++launches;
  }
  if (out != Py_None) {
    const int is_packed = PyTuple_CheckExact(out) && record->result_count == 1;
    if (tell_autograd(out)) result = Py_NewRef(is_packed ? PyTuple_GetItem(out, 0) : out);
  } else if (record->result_count == 1) {
    result = Py_NewRef(made[0]);
  } else if ((result = PyTuple_New(record->result_count))) {
    for (int i = 0; i < record->result_count; ++i) PyTuple_SetItem(result, i, Py_NewRef(made[i]));
  }
done:
  while (made_count) Py_DECREF(made[--made_count]);
  return result;
}

// Call what a record says with the call's inputs, in order.
static PyObject *call_through(const Record *record, Call *call) {
  collect_again(call);
  PyObject *inputs = PyTuple_New(call->input_count);
  if (!inputs) return NULL;
  for (int i = 0; i < call->input_count; ++i) PyTuple_SetItem(inputs, i, Py_NewRef(call->items[i]));
  PyObject *result = PyObject_Call(record->through, inputs, NULL);
  Py_DECREF(inputs);
  return result;
}

// Replay a call by a record of its own, which another one makes; None if that cannot.
static PyObject *resize(Launcher *self, const Record *from, Call *call) {
  PyObject *sizes = PyTuple_New(call->word_count - 1 - call->item_count);
  const uint64_t *next = call->words + 1;
  Py_ssize_t count = 0;
  for (int i = 0; sizes && i < call->item_count; ++i, next += word_count_of(next))
    for (int word = 1; word < word_count_of(next); ++word) {
      PyObject *size = PyLong_FromLongLong((long long)next[word]);
      if (!size) return Py_DECREF(sizes), NULL;
      PyTuple_SetItem(sizes, count++, size);
    }
  PyObject *made = sizes ? PyObject_Call(from->resize, sizes, NULL) : NULL, *allocations, *steps, *kernels;
  Py_XDECREF(sizes);
  if (!made || made == Py_None) return made;
  Record *record = PyMem_Calloc(1, sizeof(Record));
  PyObject *result = record ? NULL : PyErr_NoMemory();
  if (record) {
    ++record->references;
    record->generation = from->generation;
    record->check = Py_NewRef(from->check);
    record->reads = Py_NewRef(from->reads);
    record->grad_mode = from->grad_mode;
    record->device = from->device;
    record->is_cuda = from->is_cuda;
    record->result_count = from->result_count;
    if (is_tuple(made) && PyArg_ParseTuple(made, "O!O!O", &PyTuple_Type, &allocations, &PyTuple_Type, &steps, &kernels)) {
      record->kernels = Py_NewRef(kernels);
      if (PyTuple_Size(allocations) < from->result_count)
        PyErr_SetString(PyExc_ValueError, "a call of other sizes has as many results");
      else if (read_launches(record, (Key){call->words, call->word_count}, call, allocations, steps) &&
               keep(&self->launching, record))
        result = replay(record, call, Py_None, NULL, 1);
    }
  }
  Py_DECREF(made);
  release(record);
  return result;
}

// Replay a call if there is a record of its key; None if not. The rest is as in ``replay``.
static PyObject *launch_from(Launcher *self, Table *table, Key key, Call *call, PyObject *tensors, PyObject *out,
                             const uint64_t *sized, int64_t numel) {
  Record *record = find(table, key);
  if (!record) Py_RETURN_NONE;
  PyObject *result = NULL;
  if ((record->is_flat && numel > record->flat.most) || !passes_check(self, record, call, tensors) ||
      (out != Py_None && !outputs_are_apart(call, record->apart)))
    result = Py_NewRef(Py_None);
  else if (record->resize)
    result = resize(self, record, call);
  else
    result = record->through ? call_through(record, call) : replay(record, call, out, sized, numel);
  release(record);
  return result;
}

// Replay a described call by a record of one of five kinds; None if there is none.
static PyObject *launch_described(Launcher *self, Call *call, PyObject *tensors, PyObject *out) {
  uint64_t words[2 + MAX_ITEMS];
  const Key whole = {call->words, call->word_count};
  const uint64_t *sized = NULL;
  int64_t numel = 1;
  const uint64_t order = self->flat.last ? find_order(call, &sized, &numel) : 0;
  // Of each table, whether its keys are without sizes.
  const struct { Table *table; int is_sizeless; } ways[] = {
      {&self->flat, 1}, {&self->launching, 0}, {&self->resizing, 1}, {&self->calling, 0}, {&self->calling, 1}};
  PyObject *result = Py_NewRef(Py_None);
  for (int way = order ? 0 : 1; way < 5 && result == Py_None; ++way) {
    Table *table = ways[way].table;
    if (!table->last || (table == &self->resizing && out != Py_None)) continue;
    const Key key = ways[way].is_sizeless ? describe_heads(call, words, way ? 0 : order) : whole;
    Py_DECREF(result);
    result = launch_from(self, table, key, call, tensors, out, sized, way ? 1 : numel);
  }
  return result;
}

// Replay a call if there is a record like it; None if not. ``scalars`` has ``given`` values, and maybe ``out`` as well.
static PyObject *launch(Launcher *self, PyObject *tensors, PyObject *scalars, Py_ssize_t given, PyObject *out) {
  if (!self->flat.last && !self->launching.last && !self->calling.last) Py_RETURN_NONE;
  Call call;
  begin(&call);
  const int is_described = describe_call(&call, self, tensors, scalars, given, out);
  PyObject *result = is_described ? launch_described(self, &call, tensors, out) : Py_NewRef(Py_None);
  end(&call);
  return result;
}

static PyObject *launcher_launch(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
  if (count != 3 || !PyTuple_CheckExact(arguments[0]) || (arguments[1] != Py_None && !PyDict_Check(arguments[1])))
    return PyErr_SetString(PyExc_TypeError, "launch(tensors, scalars, out) takes a tuple and a dict or None"), NULL;
  PyObject *scalars = arguments[1];
  return launch((Launcher *)object, arguments[0], scalars, scalars == Py_None ? 0 : PyDict_Size(scalars), arguments[2]);
}

// Calling an object: its ``call_anew`` serves what is not like a recorded call.
static PyObject *launcher_call(PyObject *object, PyObject *tensors, PyObject *keywords) {
  PyObject *out = keywords ? PyDict_GetItemWithError(keywords, out_name) : NULL;
  if (!out && PyErr_Occurred()) return NULL;
  // Where arguments have an order, one of the function's own may be called so: it is not left out by giving None.
  const int is_out = out && (out != Py_None || !((Launcher *)object)->order);
  const Py_ssize_t given = keywords ? PyDict_Size(keywords) - is_out : 0;
  out = Py_NewRef(out ? out : Py_None);
  PyObject *result = launch((Launcher *)object, tensors, keywords, given, out);
  Py_DECREF(out);
  if (result != Py_None) return result;
  Py_DECREF(result);
  PyObject *anew = PyObject_GetAttr(object, anew_name);
  if (!anew) return NULL;
  result = PyObject_Call(anew, tensors, keywords);
  Py_DECREF(anew);
  return result;
}

// ---- Making records

// Return an array of the integers of a tuple, for the caller to free; NULL with an error set.
static int *read_ints(PyObject *tuple, int *count) {
  *count = (int)PyTuple_Size(tuple);
  int *values = PyMem_Calloc(*count + 1, sizeof(int));
  if (!values) return (int *)PyErr_NoMemory();
  for (int i = 0; i < *count; ++i) {
    const long value = PyLong_AsLong(PyTuple_GetItem(tuple, i));
    if (value != (int)value) PyErr_SetString(PyExc_OverflowError, "an index does not fit");
    if (PyErr_Occurred()) return PyMem_Free(values), NULL;
    values[i] = (int)value;
  }
  return values;
}

static int is_tuple(PyObject *item) {
  return PyTuple_Check(item) || (PyErr_SetString(PyExc_TypeError, "a record is made of tuples"), 0);
}

static int is_callable(PyObject *item) {
  return PyCallable_Check(item) || (PyErr_SetString(PyExc_TypeError, "a record's functions must be callable"), 0);
}

// Whether what a step says fits its arguments and the call; the addresses are the caller's word.
static int fits(const Step *step, const Call *call, int allocation_count, int is_cuda) {
  Py_ssize_t fields = (Py_ssize_t)step->first + step->pointer_count;
  for (int i = 0; i < step->number_count; ++i) {
    const Number *number = &step->numbers[i];
    fields += number->kind == 'c' ? 2 : 1;
    if (!strchr("fcib", number->kind) || number->index < 0 || number->index >= call->input_count) return 0;
  }
  for (int i = 0; i < step->pointer_count; ++i) {
    const int place = step->pointers[i];
    if (place < 0 || place >= call->item_count + allocation_count) return 0;
    if (place < call->item_count && call->firsts[place] < 0) return 0;
  }
  if (step->first < 0 || fields > step->argument_words || step->argument_words > MAX_ARGUMENT_WORDS) return 0;
  return step->function && (!is_cuda || (step->grid && step->block));
}

static int read_step(Step *step, PyObject *tuple, const Call *call, int allocation_count, int is_cuda) {
  PyObject *pointers, *arguments, *indices, *name;
  const char *kinds;
  unsigned long long function;
  if (!is_tuple(tuple) ||
      !PyArg_ParseTuple(tuple, "KIIIpO!iO!O!sppU", &function, &step->grid, &step->block, &step->shared_bytes,
                        &step->follows, &PyBytes_Type, &arguments, &step->first, &PyTuple_Type, &pointers,
                        &PyTuple_Type, &indices, &kinds, &step->is_parallel, &step->is_steady, &name))
    return 0;
  step->function = function;
  step->name = Py_NewRef(name);
  if (!(step->pointers = read_ints(pointers, &step->pointer_count))) return 0;
  int *numbers = read_ints(indices, &step->number_count);
  if (!numbers) return 0;
  const Py_ssize_t bytes = PyBytes_Size(arguments);
  const int is_whole = bytes % 8 == 0 && bytes / 8 <= MAX_ARGUMENT_WORDS && (int)strlen(kinds) == step->number_count;
  step->argument_words = (int)(bytes / 8);
  step->numbers = PyMem_Calloc(step->number_count + 1, sizeof(Number));
  step->arguments = PyMem_Malloc(bytes);
  if (!step->numbers || !step->arguments) return PyMem_Free(numbers), PyErr_NoMemory(), 0;
  memcpy(step->arguments, PyBytes_AsString(arguments), bytes);
  for (int i = 0; is_whole && i < step->number_count; ++i) step->numbers[i] = (Number){numbers[i], kinds[i]};
  PyMem_Free(numbers);
  if (is_whole && fits(step, call, allocation_count, is_cuda)) return 1;
  return PyErr_SetString(PyExc_ValueError, "a step's fields do not fit its arguments, or the call"), 0;
}

// Where a record may be put: a place that is free, stale, or of its like; NULL if all of them are taken.
static Record **find_place(const Table *table, const Record *record) {
  for (int i = 0; i < WINDOW && i < table->size; ++i) {
    Record **place = place_of(table, record->hash, i);
    if (!*place || (*place)->generation != generation || (*place)->hash == record->hash) return place;
  }
  return NULL;
}

static int grow(Table *table, int size) {
  const Table before = *table;
  Record **records = PyMem_Calloc(size, sizeof(Record *));
  if (!records) return PyErr_NoMemory(), 0;
  table->records = records;
  table->size = size;
  for (int i = 0; i < before.size; ++i) {
    Record **place = before.records[i] ? find_place(table, before.records[i]) : NULL;
    if (!place || *place) continue;
    *place = before.records[i];
    before.records[i] = NULL;
  }
  // Those for which there is no place.
  for (int i = 0; i < before.size; ++i) release(before.records[i]);
  PyMem_Free(before.records);
  return 1;
}

// Keep a record in its place in the table; a table that is too full for it grows up to its bound.
static int keep(Table *table, Record *record) {
  Record **place = find_place(table, record);
  while (!place && table->size < MAX_TABLE) {
    if (!grow(table, table->size ? table->size * 2 : 1)) return 0;
    place = find_place(table, record);
  }
  if (!place) place = place_of(table, record->hash, (int)(record->hash >> 60));
  // What releasing calls may come back here: it finds the new record.
  Record *before = *place;
  *place = record;
  ++record->references;
  release(before);
  set_last(table, record);
  return 1;
}

static void clear(Table *table) {
  const Table before = *table;
  memset(table, 0, sizeof(Table));
  release(before.last);
  for (int i = 0; i < before.size; ++i) release(before.records[i]);
  PyMem_Free(before.records);
}

static int forget(PyObject *object) {
  Launcher *self = (Launcher *)object;
  clear(&self->flat);
  clear(&self->launching);
  clear(&self->resizing);
  clear(&self->calling);
  return 0;
}

static int visit_record(const Record *record, visitproc visit, void *arg) {
  for (int i = 0; i < record->allocation_count; ++i) {
    Py_VISIT(record->allocations[i].allocate);
    Py_VISIT(record->allocations[i].arguments);
  }
  Py_VISIT(record->check);
  Py_VISIT(record->reads);
  Py_VISIT(record->through);
  Py_VISIT(record->resize);
  Py_VISIT(record->kernels);
  return 0;
}

// Each record once, though the last one may have a place, too. Whoever else holds a record holds the launcher.
static int visit_table(const Table *table, visitproc visit, void *arg) {
  const Record *last = table->last;
  int status = 0;
  for (int i = 0; i < table->size && !status; ++i) {
    if (table->records[i]) status = visit_record(table->records[i], visit, arg);
    if (table->records[i] == last) last = NULL;
  }
  return status || !last ? status : visit_record(last, visit, arg);
}

// Give a new record its key, what it allocates and what it launches; 0 with an error set.
static int read_launches(Record *record, Key key, const Call *call, PyObject *allocations, PyObject *steps) {
  const int allocation_count = (int)PyTuple_Size(allocations), step_count = (int)PyTuple_Size(steps);
  if (allocation_count > MAX_ITEMS) return PyErr_SetString(PyExc_ValueError, "a record has too many allocations"), 0;
  record->hash = hash_words(key);
  record->word_count = key.count;
  record->words = PyMem_Malloc(sizeof(uint64_t) * key.count);
  record->allocations = PyMem_Calloc(allocation_count + 1, sizeof(Allocation));
  record->steps = PyMem_Calloc(step_count + 1, sizeof(Step));
  if (!record->words || !record->allocations || !record->steps) return PyErr_NoMemory(), 0;
  memcpy(record->words, key.words, sizeof(uint64_t) * key.count);
  for (int i = 0; i < allocation_count; ++i) {
    PyObject *item = PyTuple_GetItem(allocations, i), *allocate, *of;
    if (!is_tuple(item) || !PyArg_ParseTuple(item, "OO!", &allocate, &PyTuple_Type, &of) || !is_callable(allocate))
      return 0;
    if (record->is_flat && PyTuple_Size(of) != 3)
      return PyErr_SetString(PyExc_ValueError, "a record for any size allocates by shape, strides and dtype"), 0;
    record->allocations[i] = (Allocation){Py_NewRef(allocate), Py_NewRef(of)};
    record->allocation_count = i + 1;
  }
  for (int i = 0; i < step_count; ++i) {
    record->step_count = i + 1;
    if (!read_step(&record->steps[i], PyTuple_GetItem(steps, i), call, allocation_count, record->is_cuda)) return 0;
  }
  return 1;
}

// Fill a new record from what is kept of a call; 0 with an error set.
static int read_record(Record *record, const Call *call, PyObject *out, PyObject *recorded) {
  PyObject *check, *mode, *allocations, *steps, *kernels, *through, *reads, *flat, *resize;
  unsigned long long planned;
  if (!PyArg_ParseTuple(recorded, "OKOO!iO!ipOOO!O!OK", &check, &planned, &mode, &PyTuple_Type,
                        &allocations, &record->result_count, &PyTuple_Type, &steps, &record->device, &record->is_cuda,
                        &kernels, &through, &PyTuple_Type, &reads, &PyTuple_Type, &flat, &resize,
                        &record->apart) ||
      !is_callable(check) || (through != Py_None && !is_callable(through)) ||
      (resize != Py_None && !is_callable(resize)))
    return 0;
  for (Py_ssize_t i = 0; i < PyTuple_Size(reads); ++i) {
    PyObject *read = PyTuple_GetItem(reads, i);
    if (!is_tuple(read) || PyTuple_Size(read) != 3 || !PyUnicode_Check(PyTuple_GetItem(read, 1)))
      return PyErr_SetString(PyExc_TypeError, "what a record reads is a dict or an object, a name and a value"), 0;
  }
  const int allocation_count = (int)PyTuple_Size(allocations), step_count = (int)PyTuple_Size(steps);
  const int out_count = call->item_count - call->input_count;
  if (record->result_count < 0 ||
      (through == Py_None &&
       (out == Py_None ? record->result_count > allocation_count : record->result_count != out_count)))
    return PyErr_SetString(PyExc_ValueError, "a record's results are not among its allocations or out="), 0;
  uint64_t words[2 + MAX_ITEMS];
  Key key = {call->words, call->word_count};
  if (PyTuple_Size(flat)) {
    Flat *into = &record->flat;
    const uint64_t *sized;
    int64_t numel;
    if (!PyArg_ParseTuple(flat, "LLL", &into->chunk, &into->parallel_from, &into->most)) return 0;
    if ((out_count && through != Py_None) || resize != Py_None || step_count != (through == Py_None) || into->chunk < 1)
      return PyErr_SetString(PyExc_ValueError, "a record for any size calls, or launches once"), 0;
    const uint64_t order = through == Py_None ? find_order(call, &sized, &numel) : 0;
    record->is_flat = order != 0;
    if (record->is_flat || through != Py_None) key = describe_heads(call, words, order);
  }
  if (resize != Py_None) {
    if (out_count || through != Py_None)
      return PyErr_SetString(PyExc_ValueError, "a record that makes others makes new tensors"), 0;
    key = describe_heads(call, words, 0);
  }
  record->generation = planned;
  record->grad_mode = mode == Py_None ? -1 : mode == Py_True;
  record->check = Py_NewRef(check);
  record->reads = Py_NewRef(reads);
  record->kernels = Py_NewRef(kernels);
  record->through = through == Py_None ? NULL : Py_NewRef(through);
  record->resize = resize == Py_None ? NULL : Py_NewRef(resize);
  if (!read_launches(record, key, call, allocations, steps)) return 0;
  // The number of elements goes there.
  if (record->is_flat && !record->steps[0].first)
    return PyErr_SetString(PyExc_ValueError, "a record for any size has arguments that begin with a size"), 0;
  return 1;
}

static Table *table_of(Launcher *self, const Record *record) {
  if (record->resize) return &self->resizing;
  return record->is_flat ? &self->flat : record->through ? &self->calling : &self->launching;
}

static PyObject *launcher_add(PyObject *object, PyObject *arguments) {
  Launcher *self = (Launcher *)object;
  PyObject *tensors, *scalars, *out, *recorded;
  if (!PyArg_ParseTuple(arguments, "O!OOO!", &PyTuple_Type, &tensors, &scalars, &out, &PyTuple_Type, &recorded))
    return NULL;
  if (scalars != Py_None && !PyDict_Check(scalars))
    return PyErr_SetString(PyExc_TypeError, "scalars must be a dict or None"), NULL;
  if (!api || !self->names) return PyErr_SetString(PyExc_RuntimeError, "the launcher is not set up"), NULL;
  Call call;
  begin(&call);
  Record *record = NULL;
  PyObject *result = NULL;
  if (!describe_call(&call, self, tensors, scalars, scalars == Py_None ? 0 : PyDict_Size(scalars), out))
    result = Py_NewRef(Py_False);
  else if (!(record = PyMem_Calloc(1, sizeof(Record))))
    PyErr_NoMemory();
  else if (++record->references, read_record(record, &call, out, recorded) &&
                                     keep(table_of(self, record), record))
    result = Py_NewRef(Py_True);
  release(record);
  end(&call);
  return result;
}

// ---- The type and the module

// Any arguments: a subclass has its own, and calls __init__ with what this type needs.
static PyObject *launcher_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

// A second time, too: records of before are forgotten.
static int launcher_init(PyObject *object, PyObject *arguments, PyObject *keywords) {
  static char *words[] = {"names", "defaults", "order", "fill", "constants", NULL};
  Launcher *self = (Launcher *)object;
  PyObject *names, *defaults, *order = Py_None, *fill = NULL, *constants = NULL;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!O!|OO!O!", words, &PyTuple_Type, &names, &PyTuple_Type,
                                   &defaults, &order, &PyTuple_Type, &fill, &PyTuple_Type, &constants))
    return -1;
  for (Py_ssize_t i = 0; i < PyTuple_Size(names); ++i)
    if (!PyUnicode_CheckExact(PyTuple_GetItem(names, i)))
      return PyErr_SetString(PyExc_TypeError, "names must be a tuple of str"), -1;
  if (order == Py_None && PyTuple_Size(names) != PyTuple_Size(defaults))
    return PyErr_SetString(PyExc_ValueError, "one default (or None) per name"), -1;
  int *places = NULL, count = 0;
  if (order != Py_None) {
    const Py_ssize_t named = PyTuple_Size(names);
    if (named && (!fill || PyTuple_Size(fill) != named || !constants || PyTuple_Size(constants) != named))
      return PyErr_SetString(PyExc_ValueError, "one value to fill in and one constant per name"), -1;
    if (!PyTuple_Check(order)) return PyErr_SetString(PyExc_TypeError, "order must be a tuple"), -1;
    if (!(places = read_ints(order, &count))) return -1;
    for (int i = 0; i < count; ++i)
      if (places[i] < 0 && -1 - places[i] >= PyTuple_Size(defaults))
        return PyMem_Free(places), PyErr_SetString(PyExc_ValueError, "order names no default"), -1;
  }
  PyObject *before[] = {self->names, self->defaults, self->fill, self->constants};
  PyMem_Free(self->order);
  self->names = Py_NewRef(names);
  self->defaults = Py_NewRef(defaults);
  // Of a launcher without an order they are not read.
  self->fill = Py_NewRef(fill ? fill : names);
  self->constants = Py_NewRef(constants ? constants : names);
  self->order = places;
  self->order_count = count;
  forget(object);
  for (int i = 0; i < 4; ++i) Py_XDECREF(before[i]);
  return 0;
}

// What a record calls or reads may hold the callable: a method that its object keeps fused, say.
static int launcher_traverse(PyObject *object, visitproc visit, void *arg) {
  const Launcher *self = (Launcher *)object;
  const Table *tables[] = {&self->flat, &self->launching, &self->resizing, &self->calling};
  int status = 0;
  for (int i = 0; i < 4 && !status; ++i) status = visit_table(tables[i], visit, arg);
  if (status) return status;
  Py_VISIT(self->defaults);
  Py_VISIT(self->fill);
  Py_VISIT(self->constants);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

static void launcher_dealloc(PyObject *object) {
  Launcher *self = (Launcher *)object;
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  forget(object);
  PyMem_Free(self->order);
  Py_XDECREF(self->names);
  Py_XDECREF(self->defaults);
  Py_XDECREF(self->fill);
  Py_XDECREF(self->constants);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static PyMethodDef launcher_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launcher_launch, METH_FASTCALL,
     "launch(tensors, scalars, out)\n--\n\nReplay a call that is like a recorded one; None if there is none."},
    {"add", launcher_add, METH_VARARGS, "Record a call: see fuser.launcher.Launcher.add."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot launcher_slots[] = {{Py_tp_new, launcher_new},
                                       {Py_tp_init, launcher_init},
                                       {Py_tp_call, launcher_call},
                                       {Py_tp_dealloc, launcher_dealloc},
                                       {Py_tp_traverse, launcher_traverse},
                                       {Py_tp_clear, forget},
                                       {Py_tp_methods, launcher_methods},
                                       {Py_tp_doc, "Replays calls that are like recorded ones, in C."},
                                       {0, NULL}};

static PyType_Spec launcher_spec = {"fuser._launcher.Launcher", sizeof(Launcher), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, launcher_slots};

static PyObject *set_torch(PyObject *module, PyObject *arguments) {
  PyObject *capsule, *found[11];
  if (!PyArg_ParseTuple(arguments, "OO!O!OOOOOOO!O!O", &capsule, &PyType_Type, &found[0], &PyType_Type, &found[1],
                        &found[2], &found[3], &found[4], &found[5], &found[6], &found[7], &PyDict_Type, &found[8],
                        &PyDict_Type, &found[9], &found[10]))
    return NULL;
  for (int i = 2; i < 8; ++i)
    if (!PyCallable_Check(found[i])) return PyErr_SetString(PyExc_TypeError, "torch's functions are callable"), NULL;
  const ExchangeApi *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (!table) return NULL;
  if (table->version.major != 1)
    return PyErr_Format(PyExc_ImportError, "DLPack %u is not version 1", table->version.major), NULL;
  PyObject **places[] = {&tensor_type, &parameter_type, &function_modes, &dispatch_modes, &grad_enabled,
                         &thread_count, &increment_version, &make_event, &forward_ad, &profiler, &missing};
  for (int i = 0; i < 11; ++i) {
    PyObject *before = *places[i];
    *places[i] = Py_NewRef(found[i]);
    Py_XDECREF(before);
  }
  api = table;
  Py_RETURN_NONE;
}

static PyObject *set_driver(PyObject *module, PyObject *arguments) {
  unsigned long long launch, device, launch_with = 0;
  if (!PyArg_ParseTuple(arguments, "KK|K", &launch, &device, &launch_with)) return NULL;
  if (!launch || !device) return PyErr_SetString(PyExc_ValueError, "a function of the driver has no address"), NULL;
  // Without it launches run one after another.
  memcpy(&driver_launch_with, &(uintptr_t){(uintptr_t)launch_with}, sizeof(void *));
  memcpy(&driver_device, &(uintptr_t){(uintptr_t)device}, sizeof(void *));
  memcpy(&driver_launch, &(uintptr_t){(uintptr_t)launch}, sizeof(void *));
  Py_RETURN_NONE;
}

// Put a function into a class under the name __call__ and leave what the interpreter calls as it is.
static PyObject *show_call(PyObject *module, PyObject *arguments) {
  PyObject *type, *function;
  if (!PyArg_ParseTuple(arguments, "O!O", &PyType_Type, &type, &function)) return NULL;
  if ((PyTypeObject *)type == launcher_type || PyType_GetSlot((PyTypeObject *)type, Py_tp_call) != launcher_call)
    return PyErr_SetString(PyExc_TypeError, "show_call takes a class without a __call__"), NULL;
  PyObject *names = PyObject_GenericGetDict(type, NULL);
  if (!names) return NULL;
  const int status = PyDict_SetItemString(names, "__call__", function);
  Py_DECREF(names);
  PyType_Modified((PyTypeObject *)type);
  return status ? NULL : Py_NewRef(Py_None);
}

static PyObject *set_generation(PyObject *module, PyObject *number) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred()) return NULL;
  generation = value;
  Py_RETURN_NONE;
}

static PyObject *launch_count(PyObject *module, PyObject *unused) { return PyLong_FromUnsignedLongLong(launches); }

static PyMethodDef module_methods[] = {
    {"set_torch", set_torch, METH_VARARGS, "Tell the module what it needs of torch."},
    {"set_driver", set_driver, METH_VARARGS,
     "Tell the addresses of cuLaunchKernel, cuCtxGetDevice and, where launches may run side by side, cuLaunchKernelEx."},
    {"show_call", show_call, METH_VARARGS, "Show a function as a class's __call__: see fuser.launcher.called_in_c."},
    {"set_generation", set_generation, METH_O, "Make records of other generations stale."},
    {"launch_count", launch_count, METH_NOARGS, "Return how many kernels were launched from here."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "fuser._launcher", NULL, -1, module_methods,
                                               NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__launcher(void) {
  out_name = PyUnicode_InternFromString("out");
  anew_name = PyUnicode_InternFromString("call_anew");
  item_name = PyUnicode_InternFromString("item");
  level_name = PyUnicode_InternFromString("_current_level");
  profiled_name = PyUnicode_InternFromString("_is_profiler_enabled");
  no_level = PyLong_FromLong(-1);
  if (!out_name || !anew_name || !item_name || !level_name || !profiled_name || !no_level) return NULL;
  PyObject *module = PyModule_Create(&module_definition);
  PyObject *type = module ? PyType_FromSpec(&launcher_spec) : NULL;
  if (!type || PyModule_AddObjectRef(module, "Launcher", type)) {
    Py_XDECREF(type);
    Py_XDECREF(module);
    return NULL;
  }
  // The module's own reference: it is never unloaded.
  launcher_type = (PyTypeObject *)type;
  return module;
}
