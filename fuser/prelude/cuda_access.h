// How the loop around the element function reads and writes: vectors of elements that follow each other along the
// innermost dimension, and tiles of operands that are dense along another one.

//@ always
// N elements of one operand. Those narrower than a register stay packed in words: the compiler would otherwise unpack
// each into a register of its own where the ways of whole vectors and of tails meet.
template <typename S, int N, bool is_packed = (sizeof(S) < 4 && sizeof(S) * N % 4 == 0)>
struct alignas(sizeof(S) * N) fuser_vector {
  S item[N];

  FUSER_INLINE S operator[](int k) const { return item[k]; }
  FUSER_INLINE void set(int k, const S& from) { item[k] = from; }
  FUSER_INLINE void pack() {}
  // Sets the W elements from the k-th on, or writes them, with one access.
  template <int W> FUSER_INLINE void load(int k, const S* from) {
    const auto part = *reinterpret_cast<const fuser_vector<S, W, false>*>(from);
#pragma unroll
    for (int i = 0; i < W; ++i) item[k + i] = part.item[i];
  }
  template <int W> FUSER_INLINE void store(int k, S* to) const {
    fuser_vector<S, W, false> part;
#pragma unroll
    for (int i = 0; i < W; ++i) part.item[i] = item[k + i];
    *reinterpret_cast<fuser_vector<S, W, false>*>(to) = part;
  }
};
template <typename S, int N> struct alignas(sizeof(S) * N) fuser_vector<S, N, true> {
  typedef std::conditional_t<sizeof(S) == 1, unsigned char, unsigned short> raw;
  static constexpr int per_word = 4 / sizeof(S), bits = 8 * sizeof(S);
  unsigned int word[N / per_word] = {};

  FUSER_INLINE S operator[](int k) const {
    const raw part = static_cast<raw>(word[k / per_word] >> (k % per_word * bits));
    return reinterpret_cast<const S&>(part);
  }
  // The element was not set before.
  FUSER_INLINE void set(int k, const S& from) {
    word[k / per_word] |= static_cast<unsigned int>(reinterpret_cast<const raw&>(from)) << (k % per_word * bits);
  }
  // Opaque from here on: the compiler would otherwise convert, or keep, one element after the other.
  FUSER_INLINE void pack() {
#pragma unroll
    for (int i = 0; i < N / per_word; ++i) asm("" : "+r"(word[i]));
  }
  template <int W> FUSER_INLINE void load(int k, const S* from) {
    if constexpr (W < per_word) {
#pragma unroll
      for (int i = 0; i < W; ++i) set(k + i, from[i]);
    } else {
      const auto part = *reinterpret_cast<const fuser_vector<unsigned int, W / per_word>*>(from);
#pragma unroll
      for (int i = 0; i < W / per_word; ++i) word[k / per_word + i] = part.item[i];
    }
  }
  template <int W> FUSER_INLINE void store(int k, S* to) const {
    if constexpr (W < per_word) {
#pragma unroll
      for (int i = 0; i < W; ++i) to[i] = (*this)[k + i];
    } else {
      fuser_vector<unsigned int, W / per_word> part;
#pragma unroll
      for (int i = 0; i < W / per_word; ++i) part.item[i] = word[k / per_word + i];
      *reinterpret_cast<decltype(part)*>(to) = part;
    }
  }
};

// Up to N elements, W with each access. `left` says how many there are: what would lie beyond repeats the first one, so
// that one element function serves whole vectors and their tails; without any, nothing is read. `is_wide` says whether the
// address allows such accesses.
template <int N, int W, typename S, typename I>
FUSER_INLINE fuser_vector<S, N> fuser_load(const S* from, I left, bool is_wide = true) {
  fuser_vector<S, N> to;
  if (left >= N && is_wide) {
#pragma unroll
    for (int k = 0; k < N; k += W) to.template load<W>(k, from + k);
  } else if (left > 0) {
#pragma unroll
    for (int k = 0; k < N; ++k) to.set(k, from[k < left ? k : 0]);
  }
  return to;
}

template <int N, int W, typename S, typename I>
FUSER_INLINE void fuser_store(S* to, const S (&items)[N], I left, bool is_wide = true) {
  fuser_vector<S, N> from;
#pragma unroll
  for (int k = 0; k < N; ++k) from.set(k, items[k]);
  from.pack();
  if (left >= N && is_wide) {
#pragma unroll
    for (int k = 0; k < N; k += W) from.template store<W>(k, to + k);
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (k < left) to[k] = from[k];
  }
}

//@ always if askew
// A vector that begins anywhere. Its bytes lie in two *granules* of as many bytes, which are aligned: they are read at
// once, and shifted when the vector is used, so that other reads are on their way meanwhile.
template <typename S, int N> struct fuser_askew {
  static constexpr int bytes = N * sizeof(S), W = bytes / 4;
  unsigned int word[2 * W];
  // How many bytes of the first granule come before it.
  unsigned int before;

  FUSER_INLINE fuser_vector<S, N> straight() const {
    unsigned int made[2 * W];
#pragma unroll
    for (int i = 0; i < 2 * W; ++i) made[i] = word[i];
#pragma unroll
    for (int step = W / 2; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < W + step; ++i) made[i] = before & 4 * step ? made[i + step] : made[i];
    }
#pragma unroll
    for (int i = 0; i < W; ++i) made[i] = __funnelshift_r(made[i], made[i + 1], before % 4 * 8);
    fuser_vector<S, N> to;
    memcpy(&to, made, bytes);
    return to;
  }
};

// Reads N elements, of which those from `skip` to `left` are there. Where the second granule may end behind the last one,
// each is read by itself; no memory begins within a granule.
template <int N, typename S, typename I>
FUSER_INLINE fuser_askew<S, N> fuser_load_askew(const S* from, I left, int skip = 0) {
  typedef fuser_askew<S, N> askew;
  typedef fuser_vector<unsigned int, askew::W> granule;
  askew to;
  to.before = 0;
  if (skip == 0 && left >= 2 * N - 1) {
    to.before = reinterpret_cast<size_t>(from) % askew::bytes;
    const auto granules = reinterpret_cast<const granule*>(reinterpret_cast<const char*>(from) - to.before);
    const granule first = granules[0];
    granule second = first;
    if (to.before) second = granules[1];
#pragma unroll
    for (int i = 0; i < askew::W; ++i) {
      to.word[i] = first.item[i];
      to.word[askew::W + i] = second.item[i];
    }
  } else if (left > skip) {
    fuser_vector<S, N> own;
#pragma unroll
    for (int k = 0; k < N; ++k) own.set(k, from[k < skip || k >= left ? skip : k]);
    memcpy(to.word, &own, askew::bytes);
  }
  return to;
}

//@ always if level
// How many elements lie between an address and the last multiple of a vector's bytes before it.
template <int N, typename S> FUSER_INLINE int fuser_beyond_level(const S* at) {
  return static_cast<int>(reinterpret_cast<size_t>(at) % (N * sizeof(S)) / sizeof(S));
}
// Writes the elements from `skip` to `left` of a vector at such a multiple.
template <int N, typename S, typename I>
FUSER_INLINE void fuser_store_level(S* to, const S (&items)[N], I left, int skip) {
  if (skip == 0) return fuser_store<N, N>(to, items, left);
#pragma unroll
  for (int k = 0; k < N; ++k)
    if (k >= skip && k < left) to[k] = items[k];
}

//@ always
// The same for elements that lie apart.
template <int N, typename S, typename I, typename J>
FUSER_INLINE fuser_vector<S, N> fuser_gather(const S* from, I stride, J left) {
  fuser_vector<S, N> to;
  if (left > 0) {
#pragma unroll
    for (int k = 0; k < N; ++k) to.set(k, from[(k < left ? k : 0) * stride]);
  }
  return to;
}

// The same for elements that begin anew after every period of them.
template <int N, typename S, typename I, typename J>
FUSER_INLINE fuser_vector<S, N> fuser_repeat(const S* from, I phase, int64_t period, J left) {
  fuser_vector<S, N> to;
  if (left > 0) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      to.set(k, from[phase]);
      phase = phase + 1 == static_cast<I>(period) ? 0 : phase + 1;
    }
  }
  return to;
}

// The same for elements each of which lasts for a period, no shorter than N.
template <int N, typename S, typename I, typename J>
FUSER_INLINE fuser_vector<S, N> fuser_last(const S* from, I phase, int64_t period, J left) {
  fuser_vector<S, N> to;
  if (left > 0) {
    const I own = static_cast<I>(period) - phase;
    const S first = from[0], second = from[own < N && own < left ? 1 : 0];
#pragma unroll
    for (int k = 0; k < N; ++k) to.set(k, k < own ? first : second);
  }
  return to;
}

template <int N, typename S, typename I, typename J>
FUSER_INLINE void fuser_scatter(S* to, I stride, const S (&items)[N], J left) {
#pragma unroll
  for (int k = 0; k < N; ++k)
    if (k < left) to[k * stride] = items[k];
}

// A square of elements in shared memory: written down its columns, where the operand is dense, and read along its rows.
// Rows are padded, or the elements of a column would share a bank.
template <typename S, int side> struct fuser_tile {
  static constexpr int pitch = side + (sizeof(S) < 4 ? 4 / static_cast<int>(sizeof(S)) : 1);
  // Not S: shared memory cannot hold what has a constructor.
  alignas(16) unsigned char bytes[side * pitch * sizeof(S)];

  FUSER_INLINE S* at(int x, int y) { return reinterpret_cast<S*>(bytes) + y * pitch + x; }

  template <int N> FUSER_INLINE void write_column(int x, int y, const fuser_vector<S, N>& from) {
#pragma unroll
    for (int k = 0; k < N; ++k) *at(x, y + k) = from[k];
  }
  template <int N, typename I> FUSER_INLINE fuser_vector<S, N> read_row(int x, int y, I left) {
    fuser_vector<S, N> to;
#pragma unroll
    for (int k = 0; k < N; ++k) to.set(k, *at(x + (k < left ? k : 0), y));
    return to;
  }
};

struct fuser_divider { unsigned int multiplier, shift; };
// n / divisor for n below 2^31; fuser.geometry.divider makes the numbers.
FUSER_INLINE unsigned int fuser_divide(unsigned int n, const fuser_divider& by) {
  return (n + __umulhi(n, by.multiplier)) >> by.shift;
}

//@ always if counter
// What is beyond the end is a number like any other.
template <int N, typename I, typename J>
FUSER_INLINE fuser_vector<int64_t, N> fuser_gather(fuser_counter from, I stride, J) {
  fuser_vector<int64_t, N> to;
#pragma unroll
  for (int k = 0; k < N; ++k) to.set(k, from[k * stride]);
  return to;
}
// Where each W of them begin at a multiple of W: written so that the compiler sees what they have in common, and computes
// that once.
template <int N, int W, typename I> FUSER_INLINE fuser_vector<int64_t, N> fuser_load(fuser_counter from, I) {
  fuser_vector<int64_t, N> to;
#pragma unroll
  for (int k = 0; k < N; ++k) to.set(k, from[k / W * W] | (k % W));
  return to;
}

//@ fuser_taken
// What the loop has read of a table for one element.
template <typename S> struct fuser_taken { S value; };

//@ fuser_picked
template <typename S> FUSER_INLINE S fuser_picked(const fuser_taken<S>& piece) { return piece.value; }
// An element of a part, if it is there.
template <typename S> FUSER_INLINE fuser_vector<S, 1> fuser_pick(const S* from, int64_t place, bool is_there) {
  fuser_vector<S, 1> to = {};
  if (is_there) to.set(0, from[place]);
  return to;
}
FUSER_INLINE bool fuser_is_inside(int64_t number, int64_t count) {
  return static_cast<uint64_t>(number) < static_cast<uint64_t>(count);
}

//@ fuser_take
extern "C" __device__ void __assertfail(const char*, const char*, unsigned int, const char*, size_t);
// Where an entry of what stays in memory begins: one of `size`, which are `step` elements apart. Any other ends the
// process's use of the device, as in torch's own kernels.
template <typename S>
FUSER_INLINE const S* fuser_entry(
    const S* table, int64_t first, int64_t entry, int64_t step, int64_t size, int64_t wrap) {
  if (entry < 0) entry += wrap;
  if (static_cast<uint64_t>(entry) >= static_cast<uint64_t>(size))
    __assertfail("index out of bounds", "fuser", 0, "fuser_take", 1);
  return table + (first + entry * step);
}
// An element of it.
template <typename S>
FUSER_INLINE S fuser_take(const S* table, int64_t first, int64_t entry, int64_t step, int64_t size, int64_t wrap) {
  return *fuser_entry(table, first, entry, step, size, wrap);
}
// Neighbours of one entry, by wide accesses where its address allows them; and one of those.
template <int N, typename S, typename I>
FUSER_INLINE fuser_vector<S, N> fuser_take_piece(
    const S* table, int64_t first, int64_t entry, int64_t step, int64_t size, int64_t wrap, I left) {
  constexpr int W = N * sizeof(S) > 16 ? 16 / sizeof(S) : N;
  if (left <= 0) return {};
  const S* const from = fuser_entry(table, first, entry, step, size, wrap);
  return fuser_load<N, W>(from, left, reinterpret_cast<unsigned long long>(from) % (W * sizeof(S)) == 0);
}
template <typename S>
FUSER_INLINE S fuser_take(const fuser_taken<S>& piece, int64_t, int64_t, int64_t, int64_t, int64_t) {
  return piece.value;
}

//@ fuser_add_up
// How torch's index_put adds up what goes to one entry: with each sum rounded, where rows are wide; rounded once; or, in
// columns, 32 sums of every 32nd value, then the rest.
enum fuser_adding { fuser_add_each, fuser_add_once, fuser_add_lanes };
// The sum of some elements of what stays in memory, `step` apart: those that `order` says from `begin` to `end`.
template <fuser_adding how, typename S>
FUSER_INLINE S fuser_add_up(
    const S* table, const int64_t* order, int64_t first, int64_t step, int64_t begin, int64_t end) {
  using T = decltype(fuser_to_compute(S()));
  T sum = T(0);
  if (how == fuser_add_lanes && end - begin >= 32) {
    T sums[32] = {};
    for (; end - begin >= 32; begin += 32)
#pragma unroll
      for (int lane = 0; lane < 32; ++lane) sums[lane] += fuser_to_compute(table[first + order[begin + lane] * step]);
#pragma unroll
    for (int half = 16; half > 0; half /= 2)
#pragma unroll
      for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    sum = sums[0];
  }
#pragma unroll 4
  for (; begin < end; ++begin) {
    sum += fuser_to_compute(table[first + order[begin] * step]);
    if (how == fuser_add_each) sum = fuser_round<S>(sum);
  }
  return fuser_from_compute<S>(sum);
}

//@ always if lists
// Whether accesses to W elements are possible at an address.
template <int W, typename S> FUSER_INLINE bool fuser_is_aligned(const S* at) {
  return reinterpret_cast<unsigned long long>(at) % (W * sizeof(S)) == 0;
}
