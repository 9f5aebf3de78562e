// How threads combine what they have of a row in torch's order: by halves. P and parts are those of cuda_rows.h.

//@ always if orders
// Of what a thread keeps for later passes R vectors stay in registers; others it has in shared memory, 16 bytes beside
// those of the next of T threads.
template <int R, int T, typename S, int N>
FUSER_INLINE void fuser_put_aside(fuser_vector<S, N>* own, uint4* spare, int u, const fuser_vector<S, N>& from) {
  constexpr int words = sizeof(from) / 16;
  if (u < R) own[u] = from;
  else {
    uint4 word[words];
    memcpy(word, &from, sizeof(from));
#pragma unroll
    for (int i = 0; i < words; ++i) spare[((u - R) * words + i) * T] = word[i];
  }
}
template <int R, int T, typename S, int N>
FUSER_INLINE fuser_vector<S, N> fuser_take_back(const fuser_vector<S, N>* own, const uint4* spare, int u) {
  constexpr int words = sizeof(fuser_vector<S, N>) / 16;
  if (u < R) return own[u];
  uint4 word[words];
#pragma unroll
  for (int i = 0; i < words; ++i) word[i] = spare[((u - R) * words + i) * T];
  fuser_vector<S, N> to;
  memcpy(&to, word, sizeof(to));
  return to;
}

// Combines what lanes have: each with the lane `mask` above it, from `mask` down to `end`. The first lanes get the result.
template <int mask, int end, typename P>
FUSER_INLINE typename P::part fuser_halve_lanes(const P& p, typename P::part own) {
  if constexpr (mask < end || mask == 0) return own;
  else return fuser_halve_lanes<mask / 2, end>(p, p.combine(own, p.exchange(own, mask)));
}

// What the first of W lanes has, to all of them; they all have it where the order of two parts makes no difference.
template <int W, typename P> FUSER_INLINE typename P::part fuser_from_first(typename P::part own) {
  if constexpr (P::commutes || W == 1) return own;
  else {
    constexpr int words = (sizeof(own) + 3) / 4;
    unsigned int word[words] = {};
    memcpy(word, &own, sizeof(own));
#pragma unroll
    for (int i = 0; i < words; ++i) word[i] = __shfl_sync(0xffffffffu, word[i], 0, W);
    memcpy(&own, word, sizeof(own));
    return own;
  }
}

// What the accumulators of one of torch's threads come to, in order: A of each of F lanes. The first lane gets it.
template <int F, int A, typename P>
FUSER_INLINE typename P::part fuser_join(const P& p, const typename P::part (&own)[A]) {
  typename P::part all = own[0];
#pragma unroll
  for (int i = 1; i < A; ++i) all = p.combine(all, own[i]);
  static_assert(F == 1 || F == 2 || F == 4, "lanes that differ in one or two bits");
#pragma unroll
  for (int lane = 1; lane < F; ++lane) {
#pragma unroll
    for (int i = 0; i < A; ++i) all = p.combine(all, p.exchange(own[i], lane));
  }
  return all;
}

// The threads of a row, X side by side and Y times that: along x first. `shared` has a place for each of them, and each
// gets the result.
template <int X, int Y, int F = 1, typename P>
FUSER_INLINE typename P::part fuser_halve_team(const P& p, typename P::part own, typename P::part* shared) {
  if constexpr (F > 1) {
    // F threads each, of which the first one has what it comes to.
    const int t = threadIdx.x % (X * Y * F);
    __syncthreads();
    if (t % F == 0) shared[t / F] = own;
    __syncthreads();
    static_assert(X * Y <= 32, "they fit in a warp");
    return fuser_halve_team<X, Y>(p, shared[t % (X * Y)], shared);
  } else if constexpr (X * Y <= 32) {
    return fuser_from_first<X * Y, P>(fuser_halve_lanes<X * Y / 2, X>(p, fuser_halve_lanes<X / 2, 1>(p, own)));
  } else {
    static_assert(Y <= 32 && (Y == 1 || X >= 32), "what is along y fits in a warp");
    const int t = threadIdx.x % (X * Y);
    if constexpr (X > 32) {
      __syncthreads();
      shared[t] = own;
      __syncthreads();
      typename P::part items[X / 32];
#pragma unroll
      for (int i = 0; i < X / 32; ++i) items[i] = shared[t / X * X + i * 32 + t % 32];
#pragma unroll
      for (int half = X / 64; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) items[i] = p.combine(items[i], items[i + half]);
      }
      own = items[0];
    }
    own = fuser_halve_lanes<(X > 32 ? 32 : X) / 2, 1>(p, own);
    if constexpr (Y > 1) {
      __syncthreads();
      if (t % X == 0) shared[t / X] = own;
      __syncthreads();
      own = fuser_halve_lanes<Y / 2, 1>(p, shared[t % Y]);
    }
    return fuser_from_first<(Y > 1 ? Y : 32), P>(own);
  }
}

// What a thread has of N of torch's threads: by halves, until `end` are left.
template <int N, int end = 1, typename P>
FUSER_INLINE typename P::part fuser_halve_own(const P& p, typename P::part* own) {
#pragma unroll
  for (int half = N / 2; half >= end; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) own[i] = p.combine(own[i], own[i + half]);
  }
  return own[0];
}

// The threads of a row where each does the work of several of torch's: of M warps beside each other, then of the M next
// ones, and of each of these G lanes beside each other, then of the G next ones. Of U vectors each has one behind the
// other. L is P, as it is for what lanes have.
template <int X, int Y, int G, int M, int U, typename P, typename L>
FUSER_INLINE typename P::part fuser_halve_apart(
    const P& p, const L& lanes, typename P::part (&own)[X * Y / (G * M)]) {
  constexpr int N = X / G;
#pragma unroll
  for (int j = 0; j < Y / M; ++j) {
    typename P::part part = own[j * N];
    if (j * N < U) part = fuser_halve_lanes<G / 2, 1>(lanes, fuser_halve_own<N>(p, own + j * N));
    own[j] = part;
  }
  return fuser_from_first<G * M, P>(fuser_halve_lanes<G * M / 2, G>(lanes, fuser_halve_own<Y / M>(p, own)));
}

// The threads of a row where each has the elements of V neighbours among torch's threads, in accumulators of each.
template <int X, int Y, int V, typename P>
FUSER_INLINE typename P::part fuser_halve_wide(const P& p, typename P::part (&own)[V], typename P::part* shared) {
  static_assert(X <= 32 && Y <= 32 && (X == 32 || Y == 1), "a warp of torch's");
#pragma unroll
  for (int k = 0; k < V; ++k) own[k] = fuser_halve_lanes<X / V / 2, 1>(p, own[k]);
  fuser_halve_own<V>(p, own);
  if constexpr (Y == 1) return fuser_from_first<X / V, P>(own[0]);
  else {
    const int t = threadIdx.x % (X * Y / V);
    __syncthreads();
    if (t % (X / V) == 0) shared[t / (X / V)] = own[0];
    __syncthreads();
    return fuser_from_first<Y, P>(fuser_halve_lanes<Y / 2, 1>(p, shared[t % Y]));
  }
}

// The same in pairs. Warps are 32 in ATen's kernel: those that are not there have nothing, which is combined, too.
template <int mask, int end, typename P>
FUSER_INLINE typename P::part fuser_rise_lanes(const P& p, typename P::part own) {
  if constexpr (mask >= end) return own;
  else return fuser_rise_lanes<2 * mask, end>(p, p.combine(own, p.exchange(own, mask)));
}

template <int X, int Y, int V, typename P>
FUSER_INLINE typename P::part fuser_rise_wide(const P& p, typename P::part (&own)[V], typename P::part* shared) {
#pragma unroll
  for (int apart = 1; apart < V; apart *= 2) {
#pragma unroll
    for (int k = 0; k < V; k += 2 * apart) own[k] = p.combine(own[k], own[k + apart]);
  }
  typename P::part all = fuser_rise_lanes<1, X / V>(p, own[0]);
  const int t = threadIdx.x % (X * Y / V);
  __syncthreads();
  if (t % (X / V) == 0) shared[t / (X / V)] = all;
  __syncthreads();
  all = fuser_rise_lanes<1, Y>(p, shared[t % Y]);
#pragma unroll
  for (int warps = Y; warps < 32; warps *= 2) all = p.combine(all, p.identity());
  return fuser_from_first<Y, P>(all);
}

// Known where there are clusters.
template <int N, int apart, int A, typename P>
FUSER_INLINE void fuser_tell_blocks(
    const P&, typename P::part* to, const unsigned long long* box, unsigned int lane, unsigned int blocks,
    const typename P::part (&own)[A]);

// What slots have that keep one accumulator each, in A slots of each thread of C blocks: V beside each other, and others
// as far apart as threads reach. X is a warp at most. Every thread gets the result; passes have `shared` of their own in
// turn.
template <int X, int Y, int C, bool is_serial, int V, int A, typename P>
FUSER_INLINE typename P::part fuser_unite(
    const P& p, typename P::part (&own)[A], typename P::part* shared, const unsigned long long* box, unsigned int rank) {
  constexpr int T = X * Y / A / C, lanes = T * C * V < X ? T : X / V;
  const int t = threadIdx.x % T;
  if constexpr (is_serial) {
    static_assert(lanes == X, "warps are torch's");
    typename P::part* const mine = shared + Y;
#pragma unroll
    for (int i = 0; i < A; ++i) mine[i * T + t] = own[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < A; ++i) {
      own[i] = p.identity();
#pragma unroll
      for (int lane = 0; lane < X; ++lane) own[i] = p.combine(own[i], mine[i * T + t / X * X + lane]);
    }
  } else {
    if constexpr (lanes * V < X) fuser_halve_own<A, V>(p, own);
#pragma unroll
    for (int i = 0; i < (lanes * V < X ? V : A); ++i) own[i] = fuser_halve_lanes<lanes / 2, 1>(p, own[i]);
    fuser_halve_own<V>(p, own);
  }
  constexpr int count = A / V;
#pragma unroll
  for (int i = 0; i < count; ++i) own[i] = fuser_from_first<lanes, P>(own[i]);
  if constexpr (Y == 1) return own[0];
  else {
    typename P::part* const place = shared + rank * (T / lanes) + t / lanes;
    if constexpr (C > 1) fuser_tell_blocks<count, C * (T / lanes)>(p, place, box, t % lanes, C, own);
    else {
#pragma unroll
      for (int i = 0; i < count; ++i)
        if (t % lanes == 0) place[i * (T / lanes)] = own[i];
      __syncthreads();
    }
    if constexpr (!is_serial) return fuser_from_first<Y, P>(fuser_halve_lanes<Y / 2, 1>(p, shared[t % Y]));
    else {
      typename P::part all = p.identity();
#pragma unroll
      for (int y = 0; y < Y; ++y) all = p.combine(all, shared[y]);
      return all;
    }
  }
}

// The Y threads that share V rows: the first one gets what theirs come to.
template <int X, int Y, int V, typename P>
FUSER_INLINE void fuser_halve_stack(const P& p, typename P::part (&own)[V], typename P::part* shared) {
  const int y = threadIdx.x / X;
  typename P::part* const mine = shared + threadIdx.x * V;
#pragma unroll
  for (int half = Y / 2; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < V; ++k) mine[k] = own[k];
    __syncthreads();
    if (y < half) {
#pragma unroll
      for (int k = 0; k < V; ++k) own[k] = p.combine(own[k], mine[half * X * V + k]);
    }
    __syncthreads();
  }
}

// What blocks came to that share a row, in the threads of one of them: along y first.
template <int X, int Y, typename P>
FUSER_INLINE typename P::part fuser_halve_blocks(const P& p, typename P::part own, typename P::part* shared) {
  __syncthreads();
  shared[threadIdx.x] = own;
  __syncthreads();
  typename P::part items[Y];
#pragma unroll
  for (int i = 0; i < Y; ++i) items[i] = shared[i * X + threadIdx.x % X];
#pragma unroll
  for (int half = Y / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) items[i] = p.combine(items[i], items[i + half]);
  }
  return fuser_halve_team<X, 1>(p, items[0], shared);
}

// Counts the blocks that share a row and have written what they came to; whether this is the last one.
FUSER_INLINE bool fuser_is_last(unsigned int* count, unsigned int blocks) {
  __shared__ unsigned int before;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) before = atomicAdd(count, 1u);
  __syncthreads();
  __threadfence();
  return before + 1 == blocks;
}

// Where an element lies of a row of D dimensions: for vectors that may go on along the next one.
template <int D> struct fuser_scattered {
  int64_t size[D], stride[D];

  FUSER_INLINE int64_t find(int64_t n) const {
    int64_t offset = 0;
#pragma unroll
    for (int dim = 0; dim < D; ++dim) {
      offset += (dim + 1 < D ? n % size[dim] : n) * stride[dim];
      n /= size[dim];
    }
    return offset;
  }
};

template <int N, int D, typename S>
FUSER_INLINE fuser_vector<S, N> fuser_pick_up(const S* from, const fuser_scattered<D>& place, int64_t n, int left) {
  fuser_vector<S, N> to;
#pragma unroll
  for (int k = 0; k < N; ++k)
    if (k < left) to.set(k, from[place.find(n + k)]);
  return to;
}

template <int N, int D, typename S>
FUSER_INLINE void fuser_put_down(S* to, const fuser_scattered<D>& place, int64_t n, const S (&items)[N], int left) {
#pragma unroll
  for (int k = 0; k < N; ++k)
    if (k < left) to[place.find(n + k)] = items[k];
}

//@ always if orders counter
template <int N, int D>
FUSER_INLINE fuser_vector<int64_t, N> fuser_pick_up(fuser_counter from, const fuser_scattered<D>& place, int64_t n, int left) {
  fuser_vector<int64_t, N> to;
#pragma unroll
  for (int k = 0; k < N; ++k) to.set(k, from[place.find(n + k)]);
  return to;
}

//@ always if orders cluster
// Writes what a warp has to the same places of each block, one lane to each, and waits until all have.
template <int N, int apart, int A, typename P>
FUSER_INLINE void fuser_tell_blocks(
    const P&, typename P::part* to, const unsigned long long* box, unsigned int lane, unsigned int blocks,
    const typename P::part (&own)[A]) {
  constexpr int words = (sizeof(typename P::part) + 3) / 4;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    unsigned int word[words] = {};
    memcpy(word, own + i, sizeof(typename P::part));
    if (lane < blocks) fuser_tell(reinterpret_cast<unsigned int*>(to + i * apart), box, lane, word);
  }
  fuser_await(box);
}
