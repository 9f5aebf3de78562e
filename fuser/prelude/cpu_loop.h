// CPU dialect: what the loop around the element function is made of. The feature "tiles" is for loops that are not one
// flat range.

//@ always
#if defined(__linux__)
extern "C" int madvise(void*, size_t, int) noexcept;
#endif
// New memory costs one page fault for every 4 KiB that is written first, several times what the writing itself takes.
// Asked for huge pages, Linux makes one for every 2 MiB. A hint: memory that is there already stays as it is.
FUSER_INLINE void fuser_prefer_huge_pages(const void* memory, int64_t bytes) {
#if defined(__linux__)
  constexpr int64_t page = 65536, worth_it = 4 << 20;  // the largest page of any machine that has 2 MiB ones as well
  constexpr int madv_hugepage = 14;
  if (bytes < worth_it) return;
  const int64_t begin = (reinterpret_cast<int64_t>(memory) + page - 1) / page * page;
  const int64_t end = (reinterpret_cast<int64_t>(memory) + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), static_cast<size_t>(end - begin), madv_hugepage);
#endif
}

//@ always if half
// Rounded in float: what lies below the 13th bit goes, or, of numbers below 2^-14, below 2^-24. NaN stays.
template <> struct fuser_rounder<fuser_half> {
  static FUSER_INLINE float round(float v) {
    const unsigned u = __float_as_uint(v), m = u & 0x7fffffffu;
    const unsigned denormal = __float_as_uint(__uint_as_float(m) + 0.5f - 0.5f);
    const unsigned normal = (m + (0xfffu + (m >> 13 & 1u))) & ~0x1fffu;
    const unsigned finite = fuser_choose(fuser_below(m, 0x38800000u), denormal, normal);
    const unsigned other = 0x7f800000u | (m & fuser_below(0x7f800000u, m));
    return __uint_as_float(fuser_choose(fuser_below(m, 0x477ff000u), finite, other) | (u & 0x80000000u));
  }
};
// A number that a loop will round to a half.
struct fuser_wide_half { float v; };
template <> struct fuser_storage<fuser_wide_half> {
  template <typename C> static FUSER_INLINE fuser_wide_half from(C v) { return {fuser_cast<float>(v)}; }
};
FUSER_INLINE float fuser_to_compute(fuser_wide_half s) { return fuser_round<fuser_half>(s.v); }
// As many at a time as there is an instruction for; the last ones alone.
#ifdef __F16C__
#ifdef __AVX512F__
constexpr int fuser_halves = 16;
#else
constexpr int fuser_halves = 8;
#endif
typedef short fuser_half_vector __attribute__((vector_size(2 * fuser_halves), aligned(2), may_alias));
typedef float fuser_wide_vector __attribute__((vector_size(4 * fuser_halves), aligned(4), may_alias));
#endif
FUSER_INLINE void fuser_load_halves(float* to, const fuser_half* from, int64_t count) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + fuser_halves <= count; i += fuser_halves) {
    const auto halves = *reinterpret_cast<const fuser_half_vector*>(from + i);
#ifdef __AVX512F__
    const fuser_wide_vector wide = __builtin_ia32_vcvtph2ps512_mask(halves, fuser_wide_vector{}, 0xffff, 4);
#else
    const fuser_wide_vector wide = __builtin_ia32_vcvtph2ps256(halves);
#endif
    *reinterpret_cast<fuser_wide_vector*>(to + i) = wide;
  }
#endif
  for (; i < count; ++i) to[i] = fuser_to_compute(from[i]);
}
FUSER_INLINE void fuser_store_halves(fuser_half* to, const fuser_wide_half* from, int64_t count) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + fuser_halves <= count; i += fuser_halves) {
    const auto wide = *reinterpret_cast<const fuser_wide_vector*>(from + i);
    // 0: to the nearest, of two the even one.
#ifdef __AVX512F__
    const fuser_half_vector halves = __builtin_ia32_vcvtps2ph512_mask(wide, 0, fuser_half_vector{}, 0xffff);
#else
    const fuser_half_vector halves = __builtin_ia32_vcvtps2ph256(wide, 0);
#endif
    *reinterpret_cast<fuser_half_vector*>(to + i) = halves;
  }
#endif
  for (; i < count; ++i) to[i] = fuser_from_compute<fuser_half>(from[i].v);
}

//@ always if tiles
// The loop nest cut into tiles: `row` elements along dimension 0, `rows` along dimension `across`, one along the others.
// It is at one of them; rank 1 has no `across` (0) and tiles of one row.
template <int rank> struct fuser_tiles {
  const int64_t* size;
  int across = rank > 1;
  int64_t row, rows = 1;
  // First element of the current tile.
  int64_t at[rank];

  // Operands that go through buffers have these strides. Where one has its smallest stride in another dimension than
  // the innermost, tiles are squares over the two: whole cache lines are read, and all of each. A tile has `edge`
  // squared elements at most, or less, so that every thread gets several.
  FUSER_INLINE fuser_tiles(const int64_t* size, const int64_t* const* buffered, int operands, int64_t edge, int threads)
      : size(size) {
    int64_t numel = 1;
    for (int dim = 0; dim < rank; ++dim) numel *= size[dim];
    while (edge > 16 && numel < edge * edge * 4 * threads) edge /= 2;
    row = edge * edge;
    for (int place = 0; place < operands && row != edge; ++place) {
      int best = 0;
      for (int dim = 1; dim < rank; ++dim)
        if (buffered[place][dim] != 0 && buffered[place][dim] < buffered[place][best]) best = dim;
      if (best != 0) across = best, row = edge;
    }
    if (row > size[0]) row = size[0];
    if (across) rows = edge * edge / row < size[across] ? edge * edge / row : size[across];
    row = edge * edge / rows < size[0] ? edge * edge / rows : size[0];
  }

  FUSER_INLINE int64_t extent(int dim) const { return dim == 0 ? row : dim == across ? rows : 1; }
  FUSER_INLINE int64_t count(int dim) const { return (size[dim] + extent(dim) - 1) / extent(dim); }
  FUSER_INLINE int64_t total() const {
    int64_t product = 1;
    for (int dim = 0; dim < rank; ++dim) product *= count(dim);
    return product;
  }
  FUSER_INLINE void seek(int64_t tile) {
    for (int dim = 0; dim < rank; ++dim) {
      at[dim] = tile % count(dim) * extent(dim);
      tile /= count(dim);
    }
  }
  FUSER_INLINE void next() {
    for (int dim = 0; dim < rank; ++dim) {
      at[dim] += extent(dim);
      if (at[dim] < size[dim]) return;
      at[dim] = 0;
    }
  }
  // Of the current tile, which may be cut off at the end of a dimension.
  FUSER_INLINE int64_t width() const { return row < size[0] - at[0] ? row : size[0] - at[0]; }
  FUSER_INLINE int64_t height() const {
    return !across ? 1 : rows < size[across] - at[across] ? rows : size[across] - at[across];
  }
  FUSER_INLINE int64_t offset(const int64_t* stride) const {
    int64_t sum = 0;
    for (int dim = 0; dim < rank; ++dim) sum += at[dim] * stride[dim];
    return sum;
  }
  // From one row of an operand to the next.
  FUSER_INLINE int64_t jump(const int64_t* stride) const { return across ? stride[across] : 0; }
};

//@ always if tiles
// Copies between an operand and a buffer move raw words, whatever their type. (Attributes do not survive as template
// arguments: the templates below take the size.)
template <int bytes> struct fuser_words;
template <> struct fuser_words<1> { typedef unsigned char type __attribute__((may_alias)); };
template <> struct fuser_words<2> { typedef unsigned short type __attribute__((may_alias)); };
template <> struct fuser_words<4> { typedef unsigned int type __attribute__((may_alias)); };
template <> struct fuser_words<8> { typedef unsigned long long type __attribute__((may_alias, aligned(4))); };
template <> struct fuser_words<16> { typedef unsigned __int128 type __attribute__((may_alias, aligned(4))); };

// Words of a line of the squares below: a vector register's worth, 16 at most. 0: no squares.
#if defined(__clang__)
template <int bytes> inline constexpr int fuser_lanes = 0;
#elif defined(__AVX512F__)
template <int bytes> inline constexpr int fuser_lanes = bytes == 16 ? 0 : bytes == 8 ? 8 : 16;
#elif defined(__AVX2__)
template <int bytes> inline constexpr int fuser_lanes = bytes == 16 ? 0 : bytes < 4 ? 16 : 32 / bytes;
#else
template <int bytes> inline constexpr int fuser_lanes = 0;
#endif

// Where the words of two lines go when the blocks off the diagonal change places: first those of half the square's size,
// at last single words.
template <typename Word, int lanes> struct fuser_rounds {
  Word low[4][lanes], high[4][lanes];
  constexpr fuser_rounds() : low(), high() {
    for (int round = 0, half = lanes / 2; half > 0; ++round, half /= 2) {
      for (int e = 0; e < lanes; ++e) {
        low[round][e] = static_cast<Word>(e & half ? lanes + (e ^ half) : e);
        high[round][e] = static_cast<Word>(e & half ? lanes + e : e ^ half);
      }
    }
  }
};

// to[j * to_jump + i] = from[i * from_jump + j] for a square of words.
template <int bytes>
FUSER_INLINE void fuser_transpose(typename fuser_words<bytes>::type* to, int64_t to_jump,
                                  const typename fuser_words<bytes>::type* from, int64_t from_jump) {
  constexpr int lanes = fuser_lanes<bytes>;
  typedef typename fuser_words<bytes>::type Word;
  typedef Word Line __attribute__((vector_size(lanes * bytes)));
  static constexpr fuser_rounds<Word, lanes> rounds;
  Line line[lanes];
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) __builtin_memcpy(&line[i], from + i * from_jump, sizeof(Line));
#pragma GCC unroll 4
  for (int round = 0; lanes >> round > 1; ++round) {
    const int half = lanes / 2 >> round;
    Line low, high;
    __builtin_memcpy(&low, rounds.low[round], sizeof(Line));
    __builtin_memcpy(&high, rounds.high[round], sizeof(Line));
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) {
      if (i & half) continue;
      const Line upper = line[i], lower = line[i + half];
      line[i] = __builtin_shuffle(upper, lower, low);
      line[i + half] = __builtin_shuffle(upper, lower, high);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) __builtin_memcpy(to + i * to_jump, &line[i], sizeof(Line));
}

// Vectorised and cloned, what is left after the squares would take longer to compile than the rest of the kernel.
#if defined(__clang__)
#define FUSER_ONCE static __attribute__((noinline))
#else
#define FUSER_ONCE static __attribute__((noinline, noclone, optimize("no-tree-vectorize")))
#endif

// to[i * to_step + j * to_jump] = from[i * from_step + j * from_jump] for i < row, j < rows.
template <int bytes>
FUSER_ONCE void fuser_copy(void* to_memory, int64_t to_step, int64_t to_jump, const void* from_memory,
                           int64_t from_step, int64_t from_jump, int64_t row, int64_t rows) {
  typedef typename fuser_words<bytes>::type Word;
  const auto to = static_cast<Word*>(to_memory);
  const auto from = static_cast<const Word*>(from_memory);
  if (to_step == 1 && from_step == 1) {
    for (int64_t j = 0; j < rows; ++j)
      __builtin_memcpy(to + j * to_jump, from + j * from_jump, static_cast<size_t>(row) * bytes);
    return;
  }
  int64_t done = 0;
  if constexpr (fuser_lanes<bytes> != 0) {
    constexpr int lanes = fuser_lanes<bytes>;
    // Dense along the rows on one side, across them on the other.
    const bool gathers = to_step == 1 && from_jump == 1, scatters = from_step == 1 && to_jump == 1;
    for (; (gathers || scatters) && done + lanes <= row; done += lanes) {
      int64_t j = 0;
      for (; j + lanes <= rows; j += lanes)
        fuser_transpose<bytes>(to + done * to_step + j * to_jump, gathers ? to_jump : to_step,
                               from + done * from_step + j * from_jump, gathers ? from_step : from_jump);
      for (; j < rows; ++j)
        for (int64_t i = done; i < done + lanes; ++i) to[i * to_step + j * to_jump] = from[i * from_step + j * from_jump];
    }
  }
  for (int64_t j = 0; j < rows; ++j)
    for (int64_t i = done; i < row; ++i) to[i * to_step + j * to_jump] = from[i * from_step + j * from_jump];
}

// Return where a tile's elements lie one after another: in the operand if they do, else in the buffer.
template <typename T>
FUSER_INLINE T* fuser_place(void* buffer, T* operand, int64_t row, int64_t rows, int64_t step, int64_t jump) {
  const bool is_dense = (step == 1 || row == 1) && (jump == row || rows == 1);
  return is_dense ? operand : static_cast<T*>(buffer);
}
template <typename T>
FUSER_INLINE const T* fuser_gather(void* buffer, const T* from, int64_t row, int64_t rows, int64_t step, int64_t jump) {
  T* const to = static_cast<T*>(buffer);
  const T* const place = fuser_place<const T>(to, from, row, rows, step, jump);
  if (place == from) return from;
  const int64_t apart = jump == 0 ? 1 : rows;
  fuser_copy<sizeof(T)>(to, 1, row, from, step, jump, row, apart);
  // One row for all: what is there doubles until it is enough.
  for (int64_t have = row * apart, wanted = row * rows; have < wanted; have *= 2)
    __builtin_memcpy(to + have, to, static_cast<size_t>(have < wanted - have ? have : wanted - have) * sizeof(T));
  return to;
}
template <typename T>
FUSER_INLINE void fuser_scatter(T* to, const T* place, int64_t row, int64_t rows, int64_t step, int64_t jump) {
  if (place != to) fuser_copy<sizeof(T)>(to, step, jump, place, 1, row, row, rows);
}

//@ always if tiles counter
FUSER_INLINE const int64_t* fuser_gather(void* buffer, fuser_counter from, int64_t row, int64_t rows, int64_t step,
                                         int64_t jump) {
  const auto to = static_cast<int64_t*>(buffer);
  for (int64_t j = 0; j < rows; ++j)
    for (int64_t i = 0; i < row; ++i) to[j * row + i] = from[j * jump + i * step];
  return to;
}
