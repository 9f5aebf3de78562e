// How the loop around the element function reads and writes: vectors of elements that follow each other along the
// innermost dimension, and tiles of operands that are dense along another one.

//@ always
template <typename S, int N> struct alignas(sizeof(S) * N) fuser_vector { S item[N]; };

// Up to N elements, W with each access. `left` says how many there are: what would lie beyond repeats the first one, so
// that one element function serves whole vectors and their tails; without any, nothing is read.
template <int N, int W, typename S, typename I> FUSER_INLINE fuser_vector<S, N> fuser_load(const S* from, I left) {
  fuser_vector<S, N> to;
  if (left >= N) {
#pragma unroll
    for (int k = 0; k < N; k += W) {
      const auto part = *reinterpret_cast<const fuser_vector<S, W>*>(from + k);
#pragma unroll
      for (int i = 0; i < W; ++i) to.item[k + i] = part.item[i];
    }
  } else if (left > 0) {
#pragma unroll
    for (int k = 0; k < N; ++k) to.item[k] = from[k < left ? k : 0];
  }
  return to;
}

template <int N, int W, typename S, typename I>
FUSER_INLINE void fuser_store(S* to, const fuser_vector<S, N>& from, I left) {
  if (left >= N) {
#pragma unroll
    for (int k = 0; k < N; k += W) {
      fuser_vector<S, W> part;
#pragma unroll
      for (int i = 0; i < W; ++i) part.item[i] = from.item[k + i];
      *reinterpret_cast<fuser_vector<S, W>*>(to + k) = part;
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (k < left) to[k] = from.item[k];
  }
}

// The same for elements that lie apart.
template <int N, typename S, typename I, typename J>
FUSER_INLINE fuser_vector<S, N> fuser_gather(const S* from, I stride, J left) {
  fuser_vector<S, N> to;
  if (left > 0) {
#pragma unroll
    for (int k = 0; k < N; ++k) to.item[k] = from[(k < left ? k : 0) * stride];
  }
  return to;
}

template <int N, typename S, typename I, typename J>
FUSER_INLINE void fuser_scatter(S* to, I stride, const fuser_vector<S, N>& from, J left) {
#pragma unroll
  for (int k = 0; k < N; ++k)
    if (k < left) to[k * stride] = from.item[k];
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
    for (int k = 0; k < N; ++k) *at(x, y + k) = from.item[k];
  }
  template <int N, typename I> FUSER_INLINE fuser_vector<S, N> read_row(int x, int y, I left) {
    fuser_vector<S, N> to;
#pragma unroll
    for (int k = 0; k < N; ++k) to.item[k] = *at(x + (k < left ? k : 0), y);
    return to;
  }
};

struct fuser_divider { unsigned int multiplier, shift; };
// n / divisor for n below 2^31; fuser.geometry.divider makes the numbers.
FUSER_INLINE unsigned int fuser_divide(unsigned int n, const fuser_divider& by) {
  return (n + __umulhi(n, by.multiplier)) >> by.shift;
}
