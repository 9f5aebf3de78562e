// The fast path of a call: recognise a call like an earlier one, allocate its outputs, launch its kernels.
//
// Tensors are read through DLPack's C exchange API (torch.Tensor.__dlpack_c_exchange_api__; the structures below
// follow dlpack.h, version 1). Nothing of torch, CUDA or a Python version is compiled in. fuser/launcher.py has the
// same in Python and says what a record is; whatever is not exactly like a recorded call returns None from here, and
// the caller goes the long way.
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { MAX_ITEMS = 96, MAX_WORDS = 1024, MAX_ARGUMENT_WORDS = 512, MAX_TABLE = 1024 };
enum { DEVICE_CUDA = 2, VECTOR_BYTES = 16 };

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
static PyObject *forward_ad, *level_name;
// The CUDA driver's functions, once a CUDA kernel has been loaded.
static int (*driver_launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                            void **, void **);
static int (*driver_device)(int *);
// Records made before this changed are stale.
static uint64_t generation;
static unsigned long long launches;
// The words "out" and "call_anew".
static PyObject *out_name, *anew_name;

// ---- One call, as it is described for comparison

typedef struct {
  // What must be equal: the number of arguments; one word per number; a head, the sizes and the strides per tensor.
  uint64_t words[MAX_WORDS];
  int word_count;
  PyObject *items[MAX_ITEMS];
  uint64_t addresses[MAX_ITEMS];
  // For each item the first one that is the same object.
  int firsts[MAX_ITEMS];
  int input_count, item_count, distinct_count;
} Call;

typedef struct {
  PyObject *allocate, *arguments;
} Allocation;

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
  int is_parallel;
} Step;

typedef struct {
  int references;
  uint64_t generation, hash;
  int word_count;
  uint64_t *words;
  // torch's own comparison of everything about the tensors, and of the modes that are on. It takes each tensor once.
  PyObject *check;
  // What is called with the inputs in place of allocating and launching, in grad mode only; NULL for most records.
  PyObject *through;
  int needs_no_grad, device, is_cuda;
  int result_count, allocation_count, step_count;
  Allocation *allocations;
  Step *steps;
  // Keeps the kernels loaded.
  PyObject *kernels;
} Record;

typedef struct {
  Record *last;
  Record **records;
  int size;
} Table;

typedef struct {
  PyObject_HEAD
  // Names and default values of the scalars that follow the tensors. With an order, the inputs are places among the
  // arguments, or -1 - k for the k-th default.
  PyObject *names, *defaults;
  int *order;
  int order_count;
  // Records that launch, and records that call something: a call may fit one of each, by its tensors' requires_grad.
  Table launching, calling;
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
  }
  PyMem_Free(record->allocations);
  PyMem_Free(record->steps);
  PyMem_Free(record->words);
  Py_XDECREF(record->check);
  Py_XDECREF(record->through);
  Py_XDECREF(record->kernels);
  PyMem_Free(record);
}

static int is_tensor(PyObject *item) {
  PyObject *type = (PyObject *)Py_TYPE(item);
  return type == tensor_type || type == parameter_type;
}

// Both say whether it could be done.

static int read_tensor(PyObject *item, DLTensor *tensor) {
  if (api->dltensor_from_py_object(item, tensor) == 0) return 1;
  PyErr_Clear();
  return 0;
}

static int describe(Call *call, PyObject *item) {
  PyObject *type = (PyObject *)Py_TYPE(item);
  if (call->item_count == MAX_ITEMS || call->word_count + 1 > MAX_WORDS) return 0;
  call->items[call->item_count] = item;
  if (is_tensor(item)) {
    DLTensor tensor;
    if (!read_tensor(item, &tensor) || call->word_count + 1 + 2 * tensor.ndim > MAX_WORDS) return 0;
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
  } else {
    return 0;
  }
  ++call->item_count;
  return 1;
}

// Describe a call's inputs (the tensors, then the scalars by name or default) and its out= tensors.
static int describe_call(Call *call, const Launcher *self, PyObject *tensors, PyObject *scalars, PyObject *out) {
  call->item_count = call->distinct_count = 0;
  call->words[0] = PyTuple_Size(tensors);
  call->word_count = 1;
  if (self->order) {
    for (int i = 0; i < self->order_count; ++i) {
      const int place = self->order[i];
      if (place >= PyTuple_Size(tensors)) return 0;
      if (!describe(call, place < 0 ? PyTuple_GetItem(self->defaults, -1 - place) : PyTuple_GetItem(tensors, place)))
        return 0;
    }
    if (scalars && PyDict_Size(scalars) > PyDict_Contains(scalars, out_name)) return 0;
  } else {
    const Py_ssize_t count = PyTuple_Size(tensors);
    for (Py_ssize_t i = 0; i < count; ++i)
      if (!describe(call, PyTuple_GetItem(tensors, i))) return 0;
    Py_ssize_t given = scalars ? PyDict_Size(scalars) - PyDict_Contains(scalars, out_name) : 0;
    const Py_ssize_t names = PyTuple_Size(self->names);
    for (Py_ssize_t i = 0; i < names; ++i) {
      PyObject *value = given ? PyDict_GetItemWithError(scalars, PyTuple_GetItem(self->names, i)) : NULL;
      if (value) --given;
      if (!value && PyErr_Occurred()) return PyErr_Clear(), 0;
      if (!value) value = PyTuple_GetItem(self->defaults, i);
      if (!describe(call, value)) return 0;
    }
    // A scalar that the functor does not have.
    if (given) return 0;
  }
  call->input_count = call->item_count;
  if (out == Py_None) return 1;
  if (!PyTuple_CheckExact(out)) return describe(call, out);
  const Py_ssize_t outs = PyTuple_Size(out);
  for (Py_ssize_t i = 0; i < outs; ++i)
    if (!describe(call, PyTuple_GetItem(out, i))) return 0;
  return 1;
}

static uint64_t hash_words(const Call *call) {
  uint64_t hash = 0x9e3779b97f4a7c15u + call->input_count;
  for (int i = 0; i < call->word_count; ++i) {
    hash = (hash ^ call->words[i]) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  return hash;
}

static int is_like(const Record *record, const Call *call) {
  return record && record->generation == generation && record->word_count == call->word_count &&
         !memcmp(record->words, call->words, sizeof(uint64_t) * call->word_count);
}

static void set_last(Table *table, Record *record) {
  Record *before = table->last;
  ++record->references;
  table->last = record;
  release(before);
}

// The record of a call's signature, or NULL.
static Record *find(Table *table, const Call *call) {
  if (is_like(table->last, call)) return table->last;
  if (!table->size) return NULL;
  Record *found = table->records[hash_words(call) & (table->size - 1)];
  if (!is_like(found, call)) return NULL;
  set_last(table, found);
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
  const int is_off = level && PyLong_AsLong(level) == -1 && !PyErr_Occurred();
  return PyErr_Clear(), is_off;
}

// torch's comparison of the tensors: type, dispatch keys with those of the active modes, requires_grad, layout.
static int passes_check(const Launcher *self, const Record *record, const Call *call, PyObject *tensors) {
  if (!is_zero(function_modes) || !is_zero(dispatch_modes) || !is_forward_ad_off()) return 0;
  if (record->needs_no_grad && !is_zero(grad_enabled)) return 0;
  if (record->through && is_zero(grad_enabled)) return 0;
  PyObject *arguments;
  if (call->distinct_count == call->item_count && call->item_count == PyTuple_Size(tensors) && !self->order) {
    arguments = Py_NewRef(tensors);
  } else {
    arguments = PyTuple_New(call->distinct_count);
    if (!arguments) return PyErr_Clear(), 0;
    Py_ssize_t place = 0;
    for (int i = 0; i < call->item_count; ++i)
      if (call->firsts[i] == i && is_tensor(call->items[i]))
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

static int word_count_of(const uint64_t *words, PyObject *item) {
  return is_tensor(item) ? 1 + 2 * (int)(words[0] >> 40 & 0xff) : 1;
}

// Whether each out= tensor is apart from every other tensor, or is an input, element for element.
static int outputs_are_apart(const Call *call) {
  const uint64_t *starts[MAX_ITEMS];
  const uint64_t *words = call->words + 1;
  for (int i = 0; i < call->item_count; ++i) {
    starts[i] = words;
    words += word_count_of(words, call->items[i]);
  }
  for (int i = call->input_count; i < call->item_count; ++i) {
    const uint64_t begin = call->addresses[i], end = begin + reach_bytes(starts[i]);
    for (int j = 0; j < i; ++j) {
      const int size = word_count_of(starts[j], call->items[j]);
      if (!is_tensor(call->items[j])) continue;
      const uint64_t other = call->addresses[j];
      if (other >= end || begin >= other + reach_bytes(starts[j])) continue;
      const int is_same = j < call->input_count && other == begin && size == word_count_of(starts[i], call->items[i]) &&
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

// The arguments of one step, after a copy of its template; 0 for a number that does not fit.
static int pack(const Step *step, const Call *call, const uint64_t *values, uint64_t *arguments) {
  memcpy(arguments, step->arguments, sizeof(uint64_t) * step->argument_words);
  uint64_t *next = arguments + step->first;
  for (int i = 0; i < step->pointer_count; ++i) *next++ = values[step->pointers[i]];
  for (int i = 0; i < step->number_count; ++i) {
    PyObject *item = call->items[step->numbers[i].index];
    double real;
    int64_t integer;
    switch (step->numbers[i].kind) {
      case 'f':
        // An integer that is no double goes the long way.
        if (PyLong_Check(item) && !is_double(item)) return PyErr_Clear(), 0;
        real = PyFloat_AsDouble(item);
        memcpy(next++, &real, 8);
        break;
      case 'c':
        real = PyComplex_RealAsDouble(item);
        memcpy(next++, &real, 8);
        real = PyComplex_ImagAsDouble(item);
        memcpy(next++, &real, 8);
        break;
      case 'b':
        integer = PyObject_IsTrue(item);
        memcpy(next++, &integer, 8);
        break;
      default:
        integer = PyFloat_Check(item) ? to_integer(PyFloat_AsDouble(item)) : PyLong_AsLongLong(item);
        memcpy(next++, &integer, 8);
    }
    if (PyErr_Occurred()) return PyErr_Clear(), 0;
  }
  return 1;
}

static int launch_cuda(const Step *step, uint64_t *arguments, void *stream) {
  void *parameters[] = {arguments};
  int status;
  Py_BEGIN_ALLOW_THREADS
  status = driver_launch((void *)(uintptr_t)step->function, step->grid, 1, 1, step->block, 1, 1, step->shared_bytes,
                         stream, parameters, NULL);
  Py_END_ALLOW_THREADS
  if (status) PyErr_Format(PyExc_RuntimeError, "CUDA refused to launch a fused kernel: error %d", status);
  return !status;
}

static int launch_cpu(const Step *step, const uint64_t *arguments) {
  void (*function)(const void *, int) = (void (*)(const void *, int))(uintptr_t)step->function;
  if (!step->is_parallel) return function(arguments, 1), 1;
  PyObject *count = PyObject_CallNoArgs(thread_count);
  if (!count) return 0;
  const int threads = (int)PyLong_AsLong(count);
  Py_DECREF(count);
  Py_BEGIN_ALLOW_THREADS
  function(arguments, threads);
  Py_END_ALLOW_THREADS
  return 1;
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

// Allocate and launch. The result is NULL with an error set, None (nothing was done), or the call's value.
static PyObject *replay(const Record *record, const Call *call, PyObject *out) {
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
    const Allocation *item = &record->allocations[made_count];
    PyObject *tensor = PyObject_Call(item->allocate, item->arguments, NULL);
    DLTensor described;
    if (!(made[made_count] = tensor)) goto done;
    if (api->dltensor_from_py_object(tensor, &described)) {
      ++made_count;
      goto done;
    }
    values[value_count++] = (uint64_t)described.data + described.byte_offset;
  }
  for (int i = 0; i < record->step_count; ++i) {
    const Step *step = &record->steps[i];
    uint64_t arguments[MAX_ARGUMENT_WORDS];
    if (!pack(step, call, values, arguments)) {
      // The long way has the error's words.
      result = Py_NewRef(Py_None);
      goto done;
    }
    if (!(record->is_cuda ? launch_cuda(step, arguments, stream) : launch_cpu(step, arguments))) goto done;
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
static PyObject *call_through(const Record *record, const Call *call) {
  PyObject *inputs = PyTuple_New(call->input_count);
  if (!inputs) return NULL;
  for (int i = 0; i < call->input_count; ++i) PyTuple_SetItem(inputs, i, Py_NewRef(call->items[i]));
  PyObject *result = PyObject_Call(record->through, inputs, NULL);
  Py_DECREF(inputs);
  return result;
}

// Replay a call if one of two kinds of records is like it; None if not.
static PyObject *launch_from(Launcher *self, Table *table, const Call *call, PyObject *tensors, PyObject *out) {
  Record *record = find(table, call);
  if (!record) Py_RETURN_NONE;
  // Another thread may replace the record while Python code runs.
  ++record->references;
  PyObject *result = NULL;
  if (!passes_check(self, record, call, tensors) || (out != Py_None && !outputs_are_apart(call)))
    result = Py_NewRef(Py_None);
  else
    result = record->through ? call_through(record, call) : replay(record, call, out);
  release(record);
  return result;
}

// Replay a call if there is a record like it; None if not. ``scalars`` may be NULL, and may hold ``out`` as well.
static PyObject *launch(Launcher *self, PyObject *tensors, PyObject *scalars, PyObject *out) {
  Call call;
  if ((!self->launching.last && !self->calling.last) || !describe_call(&call, self, tensors, scalars, out))
    Py_RETURN_NONE;
  PyObject *result = launch_from(self, &self->launching, &call, tensors, out);
  if (result != Py_None || !self->calling.last) return result;
  Py_DECREF(result);
  return launch_from(self, &self->calling, &call, tensors, out);
}

static PyObject *launcher_launch(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
  if (count != 3 || !PyTuple_CheckExact(arguments[0]))
    return PyErr_SetString(PyExc_TypeError, "launch(tensors, scalars, out) takes a tuple first"), NULL;
  return launch((Launcher *)object, arguments[0], arguments[1] == Py_None ? NULL : arguments[1], arguments[2]);
}

// Calling an object: its ``call_anew`` serves what is not like a recorded call.
static PyObject *launcher_call(PyObject *object, PyObject *tensors, PyObject *keywords) {
  PyObject *out = keywords ? PyDict_GetItemWithError(keywords, out_name) : NULL;
  if (!out && PyErr_Occurred()) return NULL;
  PyObject *result = launch((Launcher *)object, tensors, keywords, out ? out : Py_None);
  if (result != Py_None) return result;
  Py_DECREF(result);
  PyObject *anew = PyObject_GetAttr(object, anew_name);
  if (!anew) return NULL;
  result = PyObject_Call(anew, tensors, keywords);
  Py_DECREF(anew);
  return result;
}

// ---- Making records

// Fill an array of words from a tuple of integers; NULL with an error set.
static int *read_ints(PyObject *tuple, int *count) {
  *count = (int)PyTuple_Size(tuple);
  int *values = *count < 0 ? NULL : PyMem_Calloc(*count + 1, sizeof(int));
  if (!values && !PyErr_Occurred()) PyErr_NoMemory();
  for (int i = 0; values && i < *count; ++i) values[i] = (int)PyLong_AsLong(PyTuple_GetItem(tuple, i));
  return values;
}

static int read_step(Step *step, PyObject *tuple, int value_count) {
  PyObject *pointers, *arguments, *indices;
  const char *kinds;
  unsigned long long function;
  if (!PyArg_ParseTuple(tuple, "KIIIO!iO!O!sp", &function, &step->grid, &step->block, &step->shared_bytes,
                        &PyBytes_Type, &arguments, &step->first, &PyTuple_Type, &pointers, &PyTuple_Type, &indices,
                        &kinds, &step->is_parallel))
    return 0;
  step->function = function;
  int number_count = 0;
  int *numbers = NULL;
  if (!(step->pointers = read_ints(pointers, &step->pointer_count)) || !(numbers = read_ints(indices, &number_count)))
    return 0;
  step->number_count = number_count;
  step->numbers = PyMem_Calloc(number_count + 1, sizeof(Number));
  const Py_ssize_t bytes = PyBytes_Size(arguments);
  step->argument_words = (int)(bytes / 8);
  step->arguments = PyMem_Malloc(bytes);
  if (!step->numbers || !step->arguments) return PyMem_Free(numbers), PyErr_NoMemory(), 0;
  memcpy(step->arguments, PyBytes_AsString(arguments), bytes);
  int fields = step->first + step->pointer_count, fits = bytes % 8 == 0 && (int)strlen(kinds) == number_count;
  for (int i = 0; fits && i < number_count; ++i) {
    step->numbers[i] = (Number){numbers[i], kinds[i]};
    fields += kinds[i] == 'c' ? 2 : 1;
    fits = numbers[i] >= 0 && numbers[i] < value_count;
  }
  for (int i = 0; i < step->pointer_count; ++i)
    fits = fits && step->pointers[i] >= 0 && step->pointers[i] < value_count;
  PyMem_Free(numbers);
  if (PyErr_Occurred()) return 0;
  if (fits && fields <= step->argument_words && step->argument_words <= MAX_ARGUMENT_WORDS) return 1;
  return PyErr_SetString(PyExc_ValueError, "a step's fields do not fit its arguments"), 0;
}

static int grow(Table *table, int size) {
  Record **records = PyMem_Calloc(size, sizeof(Record *));
  if (!records) return PyErr_NoMemory(), 0;
  for (int i = 0; i < table->size; ++i) {
    Record *record = table->records[i];
    if (record) records[record->hash & (size - 1)] = record;
  }
  PyMem_Free(table->records);
  table->records = records;
  table->size = size;
  return 1;
}

// Keep a record in its place in the table; a table that is too small for two records grows up to its bound.
static int keep(Table *table, Record *record) {
  if (!table->size && !grow(table, 1)) return 0;
  for (;;) {
    Record **place = &table->records[record->hash & (table->size - 1)];
    const int is_taken = *place && (*place)->generation == generation && (*place)->hash != record->hash;
    if (is_taken && table->size < MAX_TABLE) {
      if (!grow(table, table->size * 2)) return 0;
      continue;
    }
    // What releasing calls may come back here: it finds the new record.
    Record *before = *place;
    *place = record;
    ++record->references;
    release(before);
    break;
  }
  set_last(table, record);
  return 1;
}

static void clear(Table *table) {
  release(table->last);
  for (int i = 0; i < table->size; ++i) release(table->records[i]);
  PyMem_Free(table->records);
}

static PyObject *launcher_add(PyObject *object, PyObject *arguments) {
  Launcher *self = (Launcher *)object;
  PyObject *tensors, *scalars, *out, *recorded, *check, *allocations, *steps, *kernels, *through;
  int results, device, is_cuda, needs_no_grad;
  unsigned long long planned;
  if (!PyArg_ParseTuple(arguments, "O!OOO!", &PyTuple_Type, &tensors, &scalars, &out, &PyTuple_Type, &recorded) ||
      !PyArg_ParseTuple(recorded, "OKpO!iO!ipOO", &check, &planned, &needs_no_grad, &PyTuple_Type, &allocations,
                        &results, &PyTuple_Type, &steps, &device, &is_cuda, &kernels, &through))
    return NULL;
  Call call;
  const int allocation_count = (int)PyTuple_Size(allocations), step_count = (int)PyTuple_Size(steps);
  if (scalars == Py_None) scalars = NULL;
  if (!describe_call(&call, self, tensors, scalars, out) || allocation_count > MAX_ITEMS) Py_RETURN_FALSE;
  if (results > allocation_count && out == Py_None)
    return PyErr_SetString(PyExc_ValueError, "more results than allocations"), NULL;
  Record *record = PyMem_Calloc(1, sizeof(Record));
  if (!record) return PyErr_NoMemory();
  record->references = 1;
  record->generation = planned;
  record->hash = hash_words(&call);
  record->check = Py_NewRef(check);
  record->kernels = Py_NewRef(kernels);
  record->through = through == Py_None ? NULL : Py_NewRef(through);
  record->needs_no_grad = needs_no_grad;
  record->device = device;
  record->is_cuda = is_cuda;
  record->result_count = results;
  record->word_count = call.word_count;
  record->words = PyMem_Malloc(sizeof(uint64_t) * (call.word_count + 1));
  record->allocations = PyMem_Calloc(allocation_count + 1, sizeof(Allocation));
  record->steps = PyMem_Calloc(step_count + 1, sizeof(Step));
  if (!record->words || !record->allocations || !record->steps) {
    release(record);
    return PyErr_NoMemory();
  }
  memcpy(record->words, call.words, sizeof(uint64_t) * call.word_count);
  int is_made = 1;
  for (int i = 0; is_made && i < allocation_count; ++i) {
    PyObject *allocate, *of;
    is_made = PyArg_ParseTuple(PyTuple_GetItem(allocations, i), "OO!", &allocate, &PyTuple_Type, &of);
    if (!is_made) break;
    record->allocations[i] = (Allocation){Py_NewRef(allocate), Py_NewRef(of)};
    record->allocation_count = i + 1;
  }
  for (int i = 0; is_made && i < step_count; ++i) {
    record->step_count = i + 1;
    is_made = read_step(&record->steps[i], PyTuple_GetItem(steps, i), call.item_count + allocation_count);
  }
  is_made = is_made && keep(record->through ? &self->calling : &self->launching, record);
  release(record);
  return is_made ? Py_NewRef(Py_True) : NULL;
}

// ---- The type and the module

// Any arguments: a subclass has its own, and calls __init__ with what this type needs.
static PyObject *launcher_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

static int launcher_init(PyObject *object, PyObject *arguments, PyObject *keywords) {
  static char *words[] = {"names", "defaults", "order", NULL};
  Launcher *self = (Launcher *)object;
  PyObject *names, *defaults, *order = Py_None;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!O!|O", words, &PyTuple_Type, &names, &PyTuple_Type,
                                   &defaults, &order))
    return -1;
  if (order == Py_None && PyTuple_Size(names) != PyTuple_Size(defaults))
    return PyErr_SetString(PyExc_ValueError, "one default (or None) per name"), -1;
  int *places = NULL, count = 0;
  if (order != Py_None) {
    if (!PyTuple_Check(order)) return PyErr_SetString(PyExc_TypeError, "order must be a tuple"), -1;
    if (!(places = read_ints(order, &count))) return PyErr_NoMemory(), -1;
    for (int i = 0; i < count; ++i)
      if (-places[i] > PyTuple_Size(defaults)) PyErr_SetString(PyExc_ValueError, "order names no default");
    if (PyErr_Occurred()) return PyMem_Free(places), -1;
  }
  PyObject *before[] = {self->names, self->defaults};
  PyMem_Free(self->order);
  self->names = Py_NewRef(names);
  self->defaults = Py_NewRef(defaults);
  self->order = places;
  self->order_count = count;
  Py_XDECREF(before[0]);
  Py_XDECREF(before[1]);
  return 0;
}

static void launcher_dealloc(PyObject *object) {
  Launcher *self = (Launcher *)object;
  PyTypeObject *type = Py_TYPE(object);
  clear(&self->launching);
  clear(&self->calling);
  PyMem_Free(self->order);
  Py_XDECREF(self->names);
  Py_XDECREF(self->defaults);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static PyMethodDef launcher_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launcher_launch, METH_FASTCALL,
     "launch(tensors, scalars, out)\n--\n\nReplay a call that is like a recorded one; None if there is none."},
    {"add", launcher_add, METH_VARARGS, "Record a call: see fuser.launcher.PythonLauncher.add."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot launcher_slots[] = {{Py_tp_new, launcher_new},
                                       {Py_tp_init, launcher_init},
                                       {Py_tp_call, launcher_call},
                                       {Py_tp_dealloc, launcher_dealloc},
                                       {Py_tp_methods, launcher_methods},
                                       {Py_tp_doc, "Replays calls that are like recorded ones, in C."},
                                       {0, NULL}};

static PyType_Spec launcher_spec = {"fuser._launcher.Launcher", sizeof(Launcher), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, launcher_slots};

static PyObject *set_torch(PyObject *module, PyObject *arguments) {
  PyObject *capsule, *found[8];
  if (!PyArg_ParseTuple(arguments, "OOOOOOOOO!", &capsule, &found[0], &found[1], &found[2], &found[3], &found[4],
                        &found[5], &found[6], &PyDict_Type, &found[7]))
    return NULL;
  const ExchangeApi *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (!table) return NULL;
  if (table->version.major != 1)
    return PyErr_Format(PyExc_ImportError, "DLPack %u is not version 1", table->version.major), NULL;
  PyObject **places[] = {&tensor_type, &parameter_type, &function_modes, &dispatch_modes, &grad_enabled,
                         &thread_count, &increment_version, &forward_ad};
  for (int i = 0; i < 8; ++i) {
    PyObject *before = *places[i];
    *places[i] = Py_NewRef(found[i]);
    Py_XDECREF(before);
  }
  api = table;
  Py_RETURN_NONE;
}

static PyObject *set_driver(PyObject *module, PyObject *arguments) {
  unsigned long long launch, device;
  if (!PyArg_ParseTuple(arguments, "KK", &launch, &device)) return NULL;
  memcpy(&driver_device, &(uintptr_t){(uintptr_t)device}, sizeof(void *));
  memcpy(&driver_launch, &(uintptr_t){(uintptr_t)launch}, sizeof(void *));
  Py_RETURN_NONE;
}

// Put a function into a class under the name __call__ and leave what the interpreter calls as it is.
static PyObject *show_call(PyObject *module, PyObject *arguments) {
  PyObject *type, *function;
  if (!PyArg_ParseTuple(arguments, "O!O", &PyType_Type, &type, &function)) return NULL;
  PyObject *names = PyObject_GenericGetDict(type, NULL);
  if (!names) return NULL;
  const int status = PyDict_SetItemString(names, "__call__", function);
  Py_DECREF(names);
  PyType_Modified((PyTypeObject *)type);
  return status ? NULL : Py_NewRef(Py_None);
}

static PyObject *set_generation(PyObject *module, PyObject *number) {
  generation = PyLong_AsUnsignedLongLong(number);
  return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *launch_count(PyObject *module, PyObject *unused) { return PyLong_FromUnsignedLongLong(launches); }

static PyMethodDef module_methods[] = {
    {"set_torch", set_torch, METH_VARARGS, "Tell the module what it needs of torch."},
    {"set_driver", set_driver, METH_VARARGS, "Tell the addresses of cuLaunchKernel and cuCtxGetDevice."},
    {"show_call", show_call, METH_VARARGS, "Show a function as a class's __call__: see fuser.launcher.called_in_c."},
    {"set_generation", set_generation, METH_O, "Make records of other generations stale."},
    {"launch_count", launch_count, METH_NOARGS, "Return how many kernels were launched from here."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "fuser._launcher", NULL, -1, module_methods,
                                               NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__launcher(void) {
  out_name = PyUnicode_InternFromString("out");
  anew_name = PyUnicode_InternFromString("call_anew");
  level_name = PyUnicode_InternFromString("_current_level");
  if (!out_name || !anew_name || !level_name) return NULL;
  PyObject *module = PyModule_Create(&module_definition);
  PyObject *type = module ? PyType_FromSpec(&launcher_spec) : NULL;
  if (!type || PyModule_AddObjectRef(module, "Launcher", type)) {
    Py_XDECREF(type);
    Py_XDECREF(module);
    return NULL;
  }
  Py_DECREF(type);
  return module;
}
