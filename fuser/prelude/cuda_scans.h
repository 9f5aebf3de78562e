// Running totals of rows, in the order of ATen's scans. A row is taken in chunks of C elements, a power of two. Within
// one, at level m, each element whose number has bit m gets what the run of 2^m elements before its own came to. What
// the chunks before came to is first added to element 0, so that it reaches the others by way of the elements 0, 1, 3,
// 7, ..., each of which ends the first run of a level: all else is computed side by side, for all chunks at once.

//@ always if scans
// What two small floats come to, rounded; and of the halves of two words, each of which is one as `S` is.
template <typename S> FUSER_INLINE S fuser_sum(const S& l, const S& r) {
  return fuser_from_compute<S>(fuser_to_compute(l) + fuser_to_compute(r));
}
template <typename S> FUSER_INLINE unsigned int fuser_sums(const S&, unsigned int l, unsigned int r) {
  S own[2], other[2];
  memcpy(own, &l, 4);
  memcpy(other, &r, 4);
  for (int k = 0; k < 2; ++k) own[k] = fuser_sum(own[k], other[k]);
  memcpy(&l, own, 4);
  return l;
}

//@ always if bfloat16 scans
#if __CUDA_ARCH__ >= 800
// Added to a product with one: the same, on all GPUs that know bfloat16.
FUSER_INLINE fuser_bfloat16 fuser_sum(const fuser_bfloat16& l, const fuser_bfloat16& r) {
  fuser_bfloat16 to;
  asm("fma.rn.bf16 %0, %1, %2, %3;" : "=h"(to.bits) : "h"(l.bits), "h"(static_cast<uint16_t>(0x3f80)), "h"(r.bits));
  return to;
}
FUSER_INLINE unsigned int fuser_sums(const fuser_bfloat16&, unsigned int l, unsigned int r) {
  unsigned int to;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(to) : "r"(l), "r"(0x3f803f80u), "r"(r));
  return to;
}
#endif

//@ always if half scans
#if __CUDA_ARCH__ >= 530
FUSER_INLINE fuser_half fuser_sum(const fuser_half& l, const fuser_half& r) {
  fuser_half to;
  asm("add.rn.f16 %0, %1, %2;" : "=h"(to.bits) : "h"(l.bits), "h"(r.bits));
  return to;
}
FUSER_INLINE unsigned int fuser_sums(const fuser_half&, unsigned int l, unsigned int r) {
  unsigned int to;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(to) : "r"(l), "r"(r));
  return to;
}
#endif

//@ always if scans
// Adds one part to each of a vector's: small floats in pairs.
template <int V, typename P>
FUSER_INLINE void fuser_lift(const P& p, const typename P::part& before, typename P::part (&own)[V]) {
  if constexpr (V % 2 == 0 && sizeof(before) == 2) {
    const typename P::part twice[2] = {before, before};
    const auto& [first] = before;
    unsigned int both;
    memcpy(&both, twice, 4);
#pragma unroll
    for (int k = 0; k < V; k += 2) {
      unsigned int pair;
      memcpy(&pair, own + k, 4);
      pair = fuser_sums(first, both, pair);
      memcpy(own + k, &pair, 4);
    }
  } else {
#pragma unroll
    for (int k = 0; k < V; ++k) own[k] = p.combine(before, own[k]);
  }
}

// What another lane of the warp has.
template <typename C> FUSER_INLINE C fuser_from_lane(const C& value, int lane) {
  constexpr int words = (sizeof(C) + 3) / 4;
  C other = value;
  unsigned int word[words] = {};
  memcpy(word, &value, sizeof(C));
#pragma unroll
  for (int i = 0; i < words; ++i) word[i] = __shfl_sync(0xffffffffu, word[i], lane & 31);
  memcpy(&other, word, sizeof(C));
  return other;
}

// What the elements of a vector are.
template <int V, typename C> FUSER_INLINE void fuser_set(C (&to)[V], const C (&from)[V]) {
#pragma unroll
  for (int k = 0; k < V; ++k) to[k] = from[k];
}
template <int V, typename P> FUSER_INLINE void fuser_clear(const P& p, typename P::part (&to)[V]) {
#pragma unroll
  for (int k = 0; k < V; ++k) to[k] = p.identity();
}

// The number of the highest bit.
constexpr int fuser_log2(int number) { return number > 1 ? 1 + fuser_log2(number / 2) : 0; }

// Of W lanes that have U vectors of V elements each of a row, those of a round side by side.
template <int C, int W, int V, int U, typename P> struct fuser_scan {
  typedef typename P::part part;
  // Elements of a round; lanes and rounds that have a chunk.
  static constexpr int N = W * V, L = C < N ? C / V : W, R = C > N ? C / N : 1;
  // Chunks of all, and the runs of each that end with elements 0, 1, 3, 7, ...
  static constexpr int chunks = N * U / C, runs = fuser_log2(C) + 1;
  // Bytes of what a warp tells others.
  static constexpr int told = chunks * runs * sizeof(part);
  const P& p;
  part (&own)[U][V];
  // Of the warp: its own lane, and the row's first one.
  const int lane = threadIdx.x % 32, first = lane / W * W;

  // Whether a vector is in the run of `half` vectors that follows as many at the beginning of a chunk.
  FUSER_INLINE bool is_first(int u, int half) const { return u % R == 0 && (lane - first) % L / half == 1; }
  FUSER_INLINE bool is_head(int u) const { return u % R == 0 && (lane - first) % L == 0; }

  // What each element comes to within its chunk, without what the first run of its last level came to.
  FUSER_INLINE void run() {
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int half = 1; half < V; half *= 2) {
#pragma unroll
        for (int k = half; k < V; ++k) {
          if ((k & half) && !(k / half == 1 && is_head(u))) own[u][k] = p.combine(own[u][k / half * half - 1], own[u][k]);
        }
      }
#pragma unroll
      for (int half = 1; half < L; half *= 2) {
        const part before = fuser_from_lane(own[u][V - 1], lane / half * half - 1);
        if ((lane & half) && !is_first(u, half)) fuser_lift(p, before, own[u]);
      }
    }
#pragma unroll
    for (int half = 1; half < R; half *= 2) {
#pragma unroll
      for (int u = half; u < U; ++u) {
        const part before = fuser_from_lane(own[u / half * half - 1][V - 1], first + W - 1);
        if ((u & half) && u % R / half != 1) fuser_lift(p, before, own[u]);
      }
    }
  }

  // Which vector of which lane has element `number` of a chunk.
  static FUSER_INLINE int vector_of(int chunk, int number) { return (chunk * C + number) / N; }
  FUSER_INLINE int lane_of(int chunk, int number) const { return first + (chunk * C + number) % N / V; }

  // Tells other warps what the first runs of the chunks come to.
  FUSER_INLINE void tell(part* to) const {
#pragma unroll
    for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll
      for (int run = 0; run < runs; ++run) {
        const int number = (1 << run) - 1;
        if (lane == lane_of(chunk, number)) to[chunk * runs + run] = own[vector_of(chunk, number)][number % V];
      }
    }
  }

  // Adds what came before; returns that with all of these.
  FUSER_INLINE part add(part total) {
    part lift[U] = {};
#pragma unroll
    for (int chunk = 0; chunk < chunks; ++chunk) {
      part line[runs];
#pragma unroll
      for (int run = 0; run < runs; ++run) {
        const int number = (1 << run) - 1;
        total = p.combine(total, fuser_from_lane(own[vector_of(chunk, number)][number % V], lane_of(chunk, number)));
        line[run] = total;
      }
#pragma unroll
      for (int u = vector_of(chunk, 0); u <= vector_of(chunk, C - 1); ++u) {
        const int place = u * N + (lane - first) * V - chunk * C;
        if (place == 0) {
          own[u][0] = line[0];
#pragma unroll
          for (int k = 1; k < V; ++k) own[u][k] = p.combine(line[fuser_log2(k)], own[u][k]);
        }
#pragma unroll
        for (int run = fuser_log2(V); run < runs - 1; ++run) {
          if (place >> run == 1) lift[u] = line[run];
        }
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!is_head(u)) fuser_lift(p, lift[u], own[u]);
    }
    return total;
  }
};

// The same of G warps that have a row, one behind the other; `waiting` has room for what all of them tell.
template <int C, int W, int V, int U, int G, typename P>
FUSER_INLINE void fuser_running(
    const P& p, typename P::part (&own)[U][V], typename P::part& total, typename P::part* waiting, int warp) {
  fuser_scan<C, W, V, U, P> scan{p, own};
  scan.run();
  if constexpr (G == 1) {
    total = scan.add(total);
  } else {
    constexpr int count = scan.chunks * scan.runs;
    scan.tell(waiting + warp * count);
    __syncthreads();
    typename P::part before = total;
    for (int other = 0; other < G; ++other) {
      if (other == warp) before = total;
#pragma unroll
      for (int i = 0; i < count; ++i) total = p.combine(total, waiting[other * count + i]);
    }
    scan.add(before);
  }
}
