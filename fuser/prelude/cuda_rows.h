// How threads combine what they have of a row. A *part* is what some neighbouring elements come to, all accumulators of
// a pass; P, the pass, says how parts are combined, and what the part of no element is. The part with the smaller
// numbers is always the left one.

//@ always if rows
// Elements that are combined as one balanced tree.
constexpr int fuser_batch = 8192;

// The value of the lane that differs by `mask`.
template <typename C> FUSER_INLINE C fuser_exchange(const C& value, int mask) {
  constexpr int words = (sizeof(C) + 3) / 4;
  C other = value;
  unsigned int word[words] = {};
  memcpy(word, &value, sizeof(C));
#pragma unroll
  for (int i = 0; i < words; ++i) word[i] = __shfl_xor_sync(0xffffffffu, word[i], mask);
  memcpy(&other, word, sizeof(C));
  return other;
}

// By value: of two places in memory a compiler would choose the address, and keep both in memory for that.
template <typename C> FUSER_INLINE C fuser_pick(bool is_first, C first, C second) {
  if (is_first) return first;
  return second;
}

// Elements as the compiler has not seen them: it would keep what an earlier pass made of them in registers, not them.
template <typename S, int N> FUSER_INLINE void fuser_forget(fuser_vector<S, N>& from) {
  if constexpr (sizeof(from) % 4 == 0) {
    unsigned int word[sizeof(from) / 4];
    memcpy(word, &from, sizeof(from));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(from) / 4); ++i) asm volatile("" : "+r"(word[i]));
    memcpy(&from, word, sizeof(from));
  }
}

// The largest, or the smallest, of elements of which two fit in a word. A NaN is lost, as by fmax, unless it shall be kept
// of magnitudes.
template <typename S, int N, bool is_largest, bool keeps_nan = false> struct fuser_extreme {
  fuser_vector<S, N> found;

  FUSER_INLINE fuser_extreme() {
#pragma unroll
    for (int k = 0; k < N; ++k) found.set(k, fuser_from_compute<S>(is_largest ? -INFINITY : INFINITY));
  }
  FUSER_INLINE void add(const fuser_vector<S, N>& from, bool is_of_sizes = false) {
    const unsigned int bits = is_of_sizes ? 0x7fff7fffu : ~0u;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) found.word[i] = larger(found.word[i], from.word[i] & bits);
  }
  FUSER_INLINE void add(const S (&items)[N]) {
    fuser_vector<S, N> from;
#pragma unroll
    for (int k = 0; k < N; ++k) from.set(k, items[k]);
    add(from);
  }
  FUSER_INLINE float value() const {
    fuser_vector<S, 2> last;
    last.word[0] = found.word[0];
#pragma unroll
    for (int i = 1; i < N / 2; ++i) last.word[0] = larger(last.word[0], found.word[i]);
    last.word[0] = larger(last.word[0], last.word[0] >> 16 | last.word[0] << 16);
    return fuser_to_compute(last[0]);
  }

 private:
  static FUSER_INLINE unsigned int larger(unsigned int a, unsigned int b) {
    return fuser_pairs<S>::template extreme<is_largest, keeps_nan>(a, b);
  }
};

// Divides by one number again and again, with the bits of a division in three operations: the remainder of a first
// quotient corrects it. That this rounds as a division does was tried for all divisors and those of their dividends whose
// quotients come so close to the middle of two floats that it could not. Where numbers are so small or so large that a
// step would lose bits, what comes out is no quotient, and is_exact is cleared.
struct fuser_divisor {
  float by, inverse, least;
  unsigned int lowest;

  FUSER_INLINE explicit fuser_divisor(float by) : by(by) {
    inverse = fabsf(by) >= 0x1p-100f && fabsf(by) <= 0x1p100f ? __frcp_rn(by) : NAN;
    const float small = fabsf(inverse) * 0x1p-99f;
    least = small > 0x1p-125f ? small : 0x1p-125f;
    const float low = by * 0x1p-124f > 0x1p-98f ? by * 0x1p-124f : 0x1p-98f;
    lowest = by > 0 && inverse == inverse ? __float_as_uint(low) : 0xffffffffu;
  }
  FUSER_INLINE float quotient(float v, bool& is_exact) const {
    const float first = v * inverse, made = __fmaf_rn(__fmaf_rn(-by, first, v), inverse, first);
    is_exact &= fabsf(made) > least;
    return made;
  }
  // Of v that is a part of `by`, as all that add up to it: none is negative. It may be 0.
  FUSER_INLINE float share(float v, bool& is_exact) const {
    const float first = v * inverse;
    is_exact &= __float_as_uint(v) - 1u > lowest;
    return __fmaf_rn(__fmaf_rn(-by, first, v), inverse, first);
  }
  FUSER_INLINE float rough_share(float v, bool& is_exact) const {
    is_exact &= __float_as_uint(v) - 1u > lowest;
    return v * inverse;
  }
  // Within 2^-23 of it.
  FUSER_INLINE float rough_quotient(float v, bool& is_exact) const {
    const float made = v * inverse;
    is_exact &= fabsf(made) > least;
    return made;
  }
};

// The same where nobody asks for each part whether it is exact: all are if the smallest quotient is larger than `least`,
// also rounded to 16 bits.
struct fuser_whole_divisor : fuser_divisor {
  float least;

  FUSER_INLINE explicit fuser_whole_divisor(const fuser_divisor& from)
      : fuser_divisor(from), least(__uint_as_float(from.lowest) * from.inverse * 1.02f) {}
  FUSER_INLINE float share(float v, bool&) const {
    const float first = v * inverse;
    return __fmaf_rn(__fmaf_rn(-by, first, v), inverse, first);
  }
  FUSER_INLINE float rough_share(float v, bool&) const { return v * inverse; }
};

// Divides any numbers by one, in double: what that rounds by lies far from the middle of two floats, or a quotient is
// one of double's. The compiler does not see what it divides by: it would work its inverse out for those who never ask.
struct fuser_exact_divisor {
  double by, inverse;

  FUSER_INLINE explicit fuser_exact_divisor(const fuser_divisor& from) {
    float hidden = from.by;
    unsigned int word = __float_as_uint(hidden);
    asm volatile("" : "+r"(word));
    memcpy(&hidden, &word, sizeof(word));
    by = hidden, inverse = 1.0 / by;
  }
  FUSER_INLINE float quotient(float v, bool&) const {
    const double first = v * inverse, rest = __fma_rn(-by, first, double(v));
    // Without a rest the first one is it, and keeps the sign of a zero.
    return static_cast<float>(fabs(rest) > 0 ? __fma_rn(rest, inverse, first) : first);
  }
};

// The same for counts of elements, to 2^24, and the next one after those: neighbours have its inverse in common.
FUSER_INLINE float fuser_next(float count) { return count + 1; }
FUSER_INLINE double fuser_next(double count) { return count + 1; }
template <typename T> FUSER_INLINE T fuser_next_share(T v, T count) { return v / fuser_next(count); }
FUSER_INLINE float fuser_next_inverse(float count) { return fuser_inverse_of_count(fuser_next(count)); }
FUSER_INLINE double fuser_next_inverse(double count) { return 1 / fuser_next(count); }
// A product that no compiler adds to anything before it is rounded.
FUSER_INLINE float fuser_rounded_product(float x, float y) { return __fmul_rn(x, y); }
FUSER_INLINE double fuser_rounded_product(double x, double y) { return __dmul_rn(x, y); }

// A count below 2^20 for those who divide again, by fuser_next_share, where what comes out is no quotient. Its inverse has
// twice a float's bits: what is left out is less than 2^-46 of the quotient, which is no closer to the middle of two
// floats than 2^-25 / count.
struct fuser_quick_count {
  float next, inverse, rest;
  bool& is_exact;

  FUSER_INLINE fuser_quick_count(float count, bool& is_exact)
      : next(count + 1), inverse(fuser_inverse_of_count(next)), is_exact(is_exact) {
    rest = __fmaf_rn(-next, inverse, 1.0f) * inverse;
  }
};
FUSER_INLINE float fuser_next(const fuser_quick_count& count) { return count.next; }
FUSER_INLINE float fuser_next_share(float v, const fuser_quick_count& count) {
  const float made = __fmaf_rn(v, count.inverse, v * count.rest);
  count.is_exact &= fabsf(made) > 0x1p-99f;
  return made;
}

// One for those whose quotients may lose a bit.
struct fuser_rough_count {
  float next, inverse;

  FUSER_INLINE explicit fuser_rough_count(float count) : next(count + 1), inverse(fuser_inverse_of_count(next)) {}
};
FUSER_INLINE float fuser_next(const fuser_rough_count& count) { return count.next; }
FUSER_INLINE float fuser_next_share(float v, const fuser_rough_count& count) { return v * count.inverse; }

//@ fuser_of if rows
// Between two numbers of elements, n /fuser_of/ c, what a fuser_divisor does: their quotient is no small number, and none
// of them is. Where both are 0 it is no number, either.
struct fuser_of_type {};
constexpr fuser_of_type fuser_of{};
template <typename C> struct fuser_number { C value; };
template <typename C> FUSER_INLINE fuser_number<C> operator/(C value, fuser_of_type) { return {value}; }
template <typename C, typename B> FUSER_INLINE auto operator/(fuser_number<C> number, B by) { return number.value / by; }
FUSER_INLINE float operator/(fuser_number<float> number, float by) {
  const float v = number.value, inverse = fuser_inverse_of_count(by), first = __fmul_rn(v, inverse);
  return __fmaf_rn(__fmaf_rn(-by, first, v), inverse, first);
}

//@ always if abreast
// Launches side by side: the next one may begin once all blocks of this one have; and the last block of that one ends
// when the one before it has, so that what comes later finds both done.
FUSER_INLINE void fuser_admit_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
FUSER_INLINE void fuser_await_former() {
#if __CUDA_ARCH__ >= 900
  if (blockIdx.x == gridDim.x - 1) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

//@ always if rows
// Rows that begin anywhere. A vector's bytes lie in two *granules* of as many bytes, which are aligned; a granule is read
// or written at once, and its bytes are shifted to where they belong: all threads of a row take the same way through this.
template <int W, int U, int shift = 0>
FUSER_INLINE void fuser_shift(unsigned int (&words)[U][2 * W], unsigned int bytes) {
  if constexpr (shift <= W) {
    if (bytes / 4 != shift) return fuser_shift<W, U, shift + 1>(words, bytes);
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const unsigned int next = i + shift + 1 < 2 * W ? words[u][i + shift + 1] : 0;
        words[u][i] = __funnelshift_r(words[u][i + shift], next, bytes % 4 * 8);
      }
    }
  }
}

// Reads U vectors of a lane, the first one at `from`; a warp's U * 32 follow each other, and `left` elements of the row.
// `is_first`: it is the row's first lane. Where not all of a granule is the row's, its elements are read one by one:
// memory may begin behind its first byte, or end before its last one. A lane reads the granules in which its vectors
// begin; the next ones are those of the next lane, and of the last lane the next vector's of the first one.
template <int N, int U, typename S, typename I>
FUSER_INLINE void fuser_load_anywhere(fuser_vector<S, N> (&to)[U], const S* from, I left, bool is_first) {
  constexpr int bytes = N * sizeof(S), W = bytes / 4;
  typedef fuser_vector<unsigned int, W> granule;
  const unsigned int before = reinterpret_cast<size_t>(from) % bytes;
  const auto granules = reinterpret_cast<const granule*>(reinterpret_cast<const char*>(from) - before);
  const I missing = static_cast<I>(before / sizeof(S)), there = left + missing;
  const unsigned int lane = threadIdx.x % 32;
  // Of the row's first and last granule parts are others'.
  const bool has_head = is_first && missing > 0, has_next = lane == 0 && missing > 0;
  const I last = there / N;
  const bool has_tail = there > last * N && last % 32 == 0 && last < (U + has_next) * 32 && (left > 0 || !is_first);
  const auto edge = [&](I at) {
    fuser_vector<S, N> own;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const I n = at * N + k - missing, least = is_first && n < 0 ? 0 : n;
      own.set(k, from[least < left ? least : left - 1]);
    }
    granule made;
    memcpy(&made, &own, bytes);
    return made;
  };
  granule read[U + 1] = {};
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (u * 32 < last && (u > 0 || !has_head)) read[u] = granules[u * 32];
  if (has_next && U * 32 < last) read[U] = granules[U * 32];
  if (has_tail) {
    const granule tail = edge(last);
#pragma unroll
    for (int u = 0; u < U + 1; ++u)
      if (u * 32 == last) read[u] = tail;
  }
  if (has_head && left > 0) read[0] = edge(0);
  unsigned int words[U][2 * W];
#pragma unroll
  for (int i = 0; i < U * W; ++i) {
    const unsigned int own = read[i / W].item[i % W], next = lane > 0 ? own : read[i / W + 1].item[i % W];
    words[i / W][i % W] = own;
    words[i / W][W + i % W] = __shfl_sync(0xffffffffu, next, (lane + 1) % 32);
  }
  fuser_shift<W, U>(words, before);
#pragma unroll
  for (int u = 0; u < U; ++u) memcpy(&to[u], words[u], bytes);
}

// Writes them: a lane writes the granules in which its vectors begin and those before them end. Where not all of one is
// the warp's, each element is written by itself: before the first lane's, and behind the last one's, and at a row's end.
template <int N, int U, typename S, typename I>
FUSER_INLINE void fuser_store_anywhere(S* to, const fuser_vector<S, N> (&from)[U], I left) {
  constexpr int bytes = N * sizeof(S), W = bytes / 4;
  const unsigned int before = reinterpret_cast<size_t>(to) % bytes, lane = threadIdx.x % 32;
  unsigned int words[U][2 * W], last[W] = {};
#pragma unroll
  for (int u = 0; u < U; ++u) {
    memcpy(words[u] + W, &from[u], bytes);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      // Of the lane before, which for the first one is the last one, a vector before.
      const unsigned int word = __shfl_sync(0xffffffffu, words[u][W + i], (lane + 31) % 32);
      words[u][i] = lane > 0 ? word : last[i];
      last[i] = word;
    }
  }
  fuser_shift<W, U>(words, bytes - before);
  const I head = N - static_cast<I>(before / sizeof(S));
  fuser_vector<unsigned int, W> made[U];
#pragma unroll
  for (int u = 0; u < U; ++u) memcpy(&made[u], words[u], bytes);
  const auto granules = reinterpret_cast<fuser_vector<unsigned int, W>*>(reinterpret_cast<char*>(to) - before);
  if (left + static_cast<I>(lane) * N >= U * 32 * N) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (u > 0 || lane > 0 || before == 0) granules[u * 32] = made[u];
    }
    if (before > 0 && (lane == 0 || lane == 31)) {
      const auto edge = fuser_pick(lane == 0, from[0], from[U - 1]);
      S* const at = lane == 0 ? to : to + (U - 1) * 32 * N;
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (k < head == (lane == 0)) at[k] = edge[k];
    }
    return;
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const I rest = left - u * 32 * N;
    const bool is_whole = (u > 0 || lane > 0 || before == 0) && rest >= head;
    const bool is_next_whole = before == 0 || ((u < U - 1 || lane < 31) && rest - N >= head);
    if (is_whole) granules[u * 32] = made[u];
    if (!is_whole || !is_next_whole) {
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (k < rest && !(k < head ? is_whole : is_next_whole)) to[u * 32 * N + k] = from[u][k];
    }
  }
}

template <int N, typename P> FUSER_INLINE typename P::part fuser_tree(const P& p, const typename P::part* items) {
  if constexpr (N == 1) return items[0];
  else return p.combine(fuser_tree<N / 2>(p, items), fuser_tree<N / 2>(p, items + N / 2));
}

// A pass all of whose parts at a time are of as many elements.
template <typename P> struct fuser_alike : P {
  FUSER_INLINE typename P::part combine(const typename P::part& l, const typename P::part& r) const {
    P::assume_alike(l, r);
    return P::combine(l, r);
  }
  static FUSER_INLINE typename P::part exchange(const typename P::part& own, int mask) {
    return P::exchange_alike(own, mask);
  }
};

// A lane's part and that of a lane with larger or smaller numbers, in order, where that makes a difference.
template <typename P>
FUSER_INLINE typename P::part fuser_join(
    const P& p, bool is_upper, const typename P::part& own, const typename P::part& other) {
  if constexpr (P::commutes) return p.combine(own, other);
  else return p.combine(p.pick(is_upper, other, own), p.pick(is_upper, own, other));
}

// Combines the parts of lanes that differ by less than `end`, from `mask` on; every lane gets the result.
template <int mask, int end, typename P>
FUSER_INLINE typename P::part fuser_butterfly(const P& p, typename P::part own) {
  if constexpr (mask >= end) return own;
  else {
    const bool is_upper = threadIdx.x & mask;
    return fuser_butterfly<mask * 2, end>(p, fuser_join(p, is_upper, own, p.exchange(own, mask)));
  }
}

// Combines U parts of each of T lanes, each with those of the other lanes. Lane i gets the result of the parts i % U: in
// the first steps lanes share the work, and exchange what the other one needs.
template <int U, int T, int mask = 1, typename P>
FUSER_INLINE typename P::part fuser_lanes(const P& p, const typename P::part* items) {
  static_assert(U * mask <= T, "there is a lane for each result");
  if constexpr (U == 1) return fuser_butterfly<mask, T>(p, items[0]);
  else {
    const bool is_upper = threadIdx.x & mask;
    typename P::part kept[U / 2];
#pragma unroll
    for (int i = 0; i < U / 2; ++i) {
      const typename P::part own = p.pick(is_upper, items[2 * i + 1], items[2 * i]);
      const typename P::part other = p.exchange(p.pick(is_upper, items[2 * i], items[2 * i + 1]), mask);
      kept[i] = fuser_join(p, is_upper, own, other);
    }
    return fuser_lanes<U / 2, T, mask * 2>(p, kept);
  }
}

// A warp combines a batch of which there are `count` parts in shared memory, one for every S elements; every lane gets
// the result.
template <int S, typename P>
FUSER_INLINE typename P::part fuser_warp_batch(const P& p, const typename P::part* parts, int count) {
  constexpr int most = fuser_batch / S, lanes = most < 32 ? most : 32, each = most / lanes;
  typename P::part own[each];
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int at = static_cast<int>(threadIdx.x % lanes) * each + i;
    own[i] = at < count ? parts[at] : p.identity();
  }
  return fuser_butterfly<1, lanes>(p, fuser_tree<each>(p, own));
}

// The warps of a team of T threads add to `total` the batches of which there are `count` parts in shared memory.
template <int S, int T, typename P>
FUSER_INLINE void fuser_fold(
    const P& p, typename P::part& total, const typename P::part* parts, typename P::part* batches, int count) {
  constexpr int per_batch = fuser_batch / S;
  __syncthreads();
  for (int i = threadIdx.x % T / 32; i * per_batch < count; i += T / 32) {
    const typename P::part own = fuser_warp_batch<S>(p, parts + i * per_batch, count - i * per_batch);
    if (threadIdx.x % 32 == 0) batches[i] = own;
  }
  __syncthreads();
  for (int i = 0; i * per_batch < count; ++i) total = p.combine(total, batches[i]);
}

// How many parts of some size wait in shared memory: at least those of one round over a team's threads.
constexpr int fuser_waiting(int least, int bytes) {
  int count = least;
  while (count * 2 * bytes <= 16384) count *= 2;
  return count;
}

// Merges parts of V rows that come one after another as a binary counter does; `number` counts them, and is the same
// for a warp's threads: they branch together.
template <int i = 0, int N, int V, typename P>
FUSER_INLINE void fuser_push(
    const P& p, typename P::part (&waiting)[N][V], unsigned int number, typename P::part (&own)[V]) {
  if constexpr (i < N) {
    if (number & 1) {
#pragma unroll
      for (int k = 0; k < V; ++k) own[k] = p.combine(waiting[i][k], own[k]);
      fuser_push<i + 1>(p, waiting, number / 2, own);
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k) waiting[i][k] = own[k];
    }
  }
}

// What the first `number` of them come to.
template <int N, int V, typename P>
FUSER_INLINE void fuser_settle(
    const P& p, const typename P::part (&waiting)[N][V], unsigned int number, typename P::part (&own)[V]) {
  bool is_first = true;
#pragma unroll
  for (int k = 0; k < V; ++k) own[k] = p.identity();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (number >> i & 1) {
#pragma unroll
      for (int k = 0; k < V; ++k) own[k] = is_first ? waiting[i][k] : p.combine(waiting[i][k], own[k]);
      is_first = false;
    }
  }
}

// The Y threads that share a batch of V rows each: the first one gets what all of theirs come to.
template <int X, int Y, int V, typename P>
FUSER_INLINE void fuser_stack(const P& p, typename P::part (&own)[V], typename P::part* shared) {
  const int y = threadIdx.x / X;
  typename P::part* const mine = shared + threadIdx.x * V;
#pragma unroll
  for (int step = 1; step < Y; step *= 2) {
#pragma unroll
    for (int k = 0; k < V; ++k) mine[k] = own[k];
    __syncthreads();
    if (y % (2 * step) == 0) {
#pragma unroll
      for (int k = 0; k < V; ++k) own[k] = p.combine(own[k], mine[step * X * V + k]);
    }
    __syncthreads();
  }
}

// What the first of them has, to all.
template <int X, int Y, int V, typename C> FUSER_INLINE void fuser_share(C (&own)[V], C* shared) {
  if constexpr (Y > 1) {
    C* const mine = shared + threadIdx.x % X * V;
    if (threadIdx.x < X) {
#pragma unroll
      for (int k = 0; k < V; ++k) mine[k] = own[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < V; ++k) own[k] = mine[k];
    __syncthreads();
  }
}

constexpr int fuser_most(int a, int b) { return a > b ? a : b; }

// What blocks tell those that wait for it: each word beside one that says that it is there, written at once. The memory
// is zero before; `first` is the number of the notes that others have.
template <typename C> struct fuser_notes {
  static constexpr int words = (sizeof(C) + 3) / 4;
  volatile unsigned long long* at;

  FUSER_INLINE fuser_notes(unsigned int* all, size_t first)
      : at(reinterpret_cast<unsigned long long*>(all) + first * words) {}
  FUSER_INLINE void put(size_t slot, const C& own) const {
    unsigned int word[words] = {};
    memcpy(word, &own, sizeof(C));
#pragma unroll
    for (int i = 0; i < words; ++i) at[slot * words + i] = 1ull << 32 | word[i];
  }
  FUSER_INLINE C await(size_t slot) const {
    unsigned long long found[words];
    unsigned int word[words], is_there;
    do {
      is_there = 1;
#pragma unroll
      for (int i = 0; i < words; ++i) found[i] = at[slot * words + i];
#pragma unroll
      for (int i = 0; i < words; ++i) {
        word[i] = static_cast<unsigned int>(found[i]);
        is_there &= static_cast<unsigned int>(found[i] >> 32);
      }
    } while (!is_there);
    C own;
    memcpy(&own, word, sizeof(C));
    return own;
  }
};

// Adds parts in shared memory, in order: what comes next is there before it is needed.
template <typename P>
FUSER_INLINE typename P::part fuser_in_order(
    const P& p, typename P::part total, const typename P::part* parts, unsigned int count) {
  constexpr unsigned int many = fuser_most(32 / sizeof(total), 1);
  typename P::part next[many];
  if (count >= many) {
#pragma unroll
    for (unsigned int j = 0; j < many; ++j) next[j] = parts[j];
  }
  unsigned int i = 0;
  for (; i + many <= count; i += many) {
    typename P::part own[many];
#pragma unroll
    for (unsigned int j = 0; j < many; ++j) own[j] = next[j];
    if (i + 2 * many <= count) {
#pragma unroll
      for (unsigned int j = 0; j < many; ++j) next[j] = parts[i + many + j];
    }
#pragma unroll
    for (unsigned int j = 0; j < many; ++j) total = p.combine(total, own[j]);
  }
  for (; i < count; ++i) total = p.combine(total, parts[i]);
  return total;
}

// Blocks that have a batch of a row each, of which the first warp knows what it comes to: every block of a *turn* leaves
// that to the last one, which adds it to what the turns before came to. True is returned to the first warp of the row's
// last block, with what the row comes to. Blocks begin in the order of their numbers, so that whoever waits does so for
// blocks that run.
template <int T, typename P>
FUSER_INLINE bool fuser_follow(
    const P& p, typename P::part& own, const fuser_notes<typename P::part>& notes, unsigned int piece,
    unsigned int pieces) {
  constexpr int bytes = sizeof(own), turn = bytes <= 16 ? 1024 : bytes <= 64 ? 256 : 64;
  // Runs of so many lie in banks of their own.
  constexpr unsigned int run = turn / 32, gap = P::is_associative ? run : turn;
  const bool is_last = piece == pieces - 1;
  const unsigned int t = threadIdx.x, others = piece % turn, begin = piece - others;
  if (!is_last && others < turn - 1) {
    if (t == 0) notes.put(piece, own);
    return false;
  }
  alignas(16) __shared__ unsigned char shared[(turn + turn / gap) * bytes];
  const auto parts = reinterpret_cast<typename P::part*>(shared);
  for (unsigned int i = t; i < others; i += T) parts[i + i / gap] = notes.await(begin + i);
  __syncthreads();
  if (t >= 32) return false;
  auto total = p.identity();
  if constexpr (P::is_associative) {
    for (unsigned int i = t * run; i < (t + 1) * run && i < others; ++i) total = p.combine(total, parts[i + t]);
    total = fuser_butterfly<1, 32>(p, total);
    if (begin > 0) total = p.combine(notes.await(begin - 1), total);
  } else {
    if (begin > 0) total = notes.await(begin - 1);
    total = fuser_in_order(p, total, parts, others);
  }
  own = p.combine(total, own);
  if (!is_last && t == 0) notes.put(piece, own);
  return is_last;
}

// Rows that several blocks share, a *piece* each. What a piece comes to goes to memory; pieces are counted in *turns* of
// 128, and whoever completes a turn folds it, in order, with those that are complete before and after it. While a block
// does so, others leave theirs to it.
constexpr unsigned int fuser_turn = 128;

// Parts in memory that other blocks write: past the first cache.
template <typename C> struct fuser_slots {
  static constexpr int words = (sizeof(C) + 3) / 4;
  unsigned int* at;

  FUSER_INLINE C get(size_t slot) const {
    unsigned int word[words];
    C own;
#pragma unroll
    for (int i = 0; i < words; ++i) word[i] = __ldcg(at + slot * words + i);
    memcpy(&own, word, sizeof(C));
    return own;
  }
  FUSER_INLINE void put(size_t slot, const C& own) const {
    unsigned int word[words] = {};
    memcpy(word, &own, sizeof(C));
#pragma unroll
    for (int i = 0; i < words; ++i) __stcg(at + slot * words + i, word[i]);
  }
};

// What the blocks of one tile share; `across` rows lie side by side in it, and a piece has a part of each for each of its
// B batches.
template <typename C, int B = 1> struct fuser_workspace {
  unsigned int* head;
  unsigned int pieces, turns;

  FUSER_INLINE fuser_workspace(unsigned int* all, size_t tile, unsigned int pieces, int across)
      : pieces(pieces), turns((pieces + fuser_turn - 1) / fuser_turn) {
    head = all + tile * (2 + turns + static_cast<size_t>(fuser_slots<C>::words) * across * (1 + pieces * B));
  }
  // Of the folded ones; of the first piece.
  FUSER_INLINE fuser_slots<C> total() const { return {head + 2 + turns}; }
  FUSER_INLINE fuser_slots<C> piece(int across) const { return {head + 2 + turns + fuser_slots<C>::words * across}; }
  FUSER_INLINE bool is_complete(unsigned int turn) const {
    return turn < turns && __ldcg(head + 2 + turn) == (turn + 1 < turns ? fuser_turn : pieces - turn * fuser_turn);
  }

  // Counts a piece whose parts the block has written, and calls fold(begin, end, is_last) for the pieces that it has to
  // fold.
  template <typename Fold> FUSER_INLINE void finish(unsigned int number, Fold fold) const {
    __shared__ unsigned int range[2];
    const unsigned int none = ~0u;
    bool tries = false;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      const unsigned int turn = number / fuser_turn;
      atomicAdd(head + 2 + turn, 1u);
      // Of two that see the turn complete, one gets it.
      tries = is_complete(turn);
    }
    while (true) {
      if (threadIdx.x == 0) {
        range[0] = range[1] = none;
        if (tries && atomicExch(head, 1u) == 0) {
          __threadfence();
          unsigned int end = range[0] = __ldcg(head + 1);
          while (is_complete(end)) ++end;
          range[1] = end;
          __threadfence();
        }
      }
      __syncthreads();
      const unsigned int begin = range[0], end = range[1];
      if (begin == none) return;
      const bool is_last = end == turns;
      if (begin < end) fold(begin * fuser_turn, is_last ? pieces : end * fuser_turn, is_last);
      __threadfence();
      __syncthreads();
      if (is_last) return;
      if (threadIdx.x == 0) {
        __stcg(head + 1, end);
        __threadfence();
        atomicExch(head, 0u);
        __threadfence();
        tries = is_complete(end);
      }
    }
  }
};

// Adds pieces to what the first of Y threads has of V rows each: every thread merges the B pieces of a batch, and the
// first one takes the batches in order.
template <int X, int Y, int B, int V, typename P>
FUSER_INLINE void fuser_fold_pieces(
    const P& p, typename P::part (&total)[V], const fuser_slots<typename P::part>& pieces, unsigned int begin,
    unsigned int end, typename P::part* shared) {
  const unsigned int x = threadIdx.x % X, y = threadIdx.x / X;
  constexpr int levels = B == 1 ? 1 : B == 2 ? 2 : B <= 4 ? 3 : B <= 8 ? 4 : B <= 16 ? 5 : B <= 32 ? 6 : 7;
  for (unsigned int at = begin; at < end; at += Y * B) {
    const unsigned int first = at + y * B;
    typename P::part waiting[levels][V], own[V];
    unsigned int count = 0;
#pragma unroll 4
    for (; count < B && first + count < end; ++count) {
#pragma unroll
      for (int k = 0; k < V; ++k) own[k] = pieces.get((static_cast<size_t>(first + count) * X + x) * V + k);
      fuser_push(p, waiting, count, own);
    }
    fuser_settle(p, waiting, count, own);
#pragma unroll
    for (int k = 0; k < V; ++k) shared[threadIdx.x * V + k] = own[k];
    __syncthreads();
    if (y == 0) {
      const unsigned int batches = (end - at + B - 1) / B, own = batches < Y ? batches : Y;
      // Where nothing but this takes time: what comes next is there before it is needed.
      constexpr unsigned int many = 32 / V;
      unsigned int i = 0;
      for (; i + many <= own; i += many) {
        typename P::part next[many][V];
#pragma unroll
        for (int j = 0; j < many * V; ++j) next[j / V][j % V] = shared[((i + j / V) * X + x) * V + j % V];
#pragma unroll
        for (int j = 0; j < many * V; ++j) total[j % V] = p.combine(total[j % V], next[j / V][j % V]);
      }
      for (; i < own; ++i) {
#pragma unroll
        for (int k = 0; k < V; ++k) total[k] = p.combine(total[k], shared[(i * X + x) * V + k]);
      }
    }
    __syncthreads();
  }
}

//@ always if tables
// Tables of functions, in shared memory: of the numbers of bfloat16 from 2^-13 to below 8, and of their negatives.
constexpr unsigned int fuser_least = (127 - 13) << 7, fuser_entries = 16 << 7;

// Fills a block's table.
template <int T, typename F> FUSER_INLINE void fuser_fill(const F& table) {
  for (unsigned int i = threadIdx.x; i < 2 * fuser_entries; i += T) {
    const unsigned int bits = (i % fuser_entries + fuser_least) | i / fuser_entries << 15;
    table.entries()[i] = table(__uint_as_float(bits << 16));
  }
}

// Looks up what it is of N numbers that bfloat16 holds; computes it where one of them is not there. Two numbers at a time
// are halves of a word: what is left below or above the table sets one of their upper bits.
template <int N, typename F>
FUSER_INLINE void fuser_look_up(const F& table, const float (&x)[N], float (&y)[N]) {
  constexpr unsigned int twice = 0x10001u, offsets = 4 * (fuser_entries - 1) * twice;
  unsigned int outside = N % 2 ? ~0u : 0u;
#pragma unroll
  for (int k = 0; k + 1 < N; k += 2) {
    const unsigned int word = __float_as_uint(x[k]) >> 16 | (__float_as_uint(x[k + 1]) & 0xffff0000u);
    const unsigned int place = (word & 0x7fffu * twice) - fuser_least * twice;
    const unsigned int at = (place << 2 & offsets) | (word >> 2 & 4 * fuser_entries * twice);
    const auto entries = reinterpret_cast<const char*>(table.entries());
    outside |= place;
    y[k] = *reinterpret_cast<const float*>(entries + (at & 0xffffu));
    y[k + 1] = *reinterpret_cast<const float*>(entries + (at >> 16));
  }
  if (__builtin_expect((outside & (0x10000u - fuser_entries) * twice) != 0, 0)) {
#pragma unroll
    for (int k = 0; k < N; ++k) y[k] = table(x[k]);
  }
}

//@ always if cluster
// fuser_fold where C blocks share a row, each of which has the same number of batches: they tell each other theirs, in
// words.
template <int S, int T, int own_batches, int C, typename P, typename I>
FUSER_INLINE void fuser_fold_blocks(
    const P& p, typename P::part& total, const typename P::part* parts, unsigned int* batches,
    const unsigned long long* box, unsigned int rank, I length) {
  constexpr int per_batch = fuser_batch / S, words = (sizeof(total) + 3) / 4;
  __syncthreads();
  for (int i = threadIdx.x / 32; i < own_batches; i += T / 32) {
    const typename P::part own = fuser_warp_batch<S>(p, parts + i * per_batch, per_batch);
    unsigned int word[words] = {};
    memcpy(word, &own, sizeof(own));
    const unsigned int lane = threadIdx.x % 32;
    if (lane < C) fuser_tell(batches + (rank * own_batches + i) * words, box, lane, word);
  }
  fuser_await(box);
#pragma unroll(own_batches * C <= 32 ? own_batches * C : 8)
  for (int i = 0; i < own_batches * C; ++i) {
    typename P::part own;
    memcpy(&own, batches + i * words, sizeof(own));
    if (static_cast<I>(i) * fuser_batch < length) total = p.combine(total, own);
  }
}

//@ always if powers
// What is not there of a row is less than anything.
template <typename S, int N, typename I> FUSER_INLINE void fuser_fill(fuser_vector<S, N>& from, I left) {
  fuser_vector<S, N> filled;
#pragma unroll
  for (int k = 0; k < N; ++k) filled.set(k, k < left ? from[k] : fuser_from_compute<S>(-INFINITY));
  from = filled;
}

// The sum of e to the power of what elements are less than a finite number, none of which is larger.
template <typename S, int N> FUSER_INLINE float fuser_powers(const fuser_vector<S, N>& from, float top) {
  float sum[N];
#pragma unroll
  for (int k = 0; k < N; ++k) sum[k] = fuser_brief_exp(fuser_to_compute(from[k]) - top);
#pragma unroll
  for (int by = 1; by < N; by *= 2)
#pragma unroll
    for (int k = 0; k + by < N; k += 2 * by) sum[k] += sum[k + by];
  return sum[0];
}
