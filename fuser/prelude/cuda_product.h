// A matrix product whose elements are summed up in the order of cuBLAS's kernels for odd rows (fuser.cuda.products).
//
// Those add, for each element, the products of so many neighbours of k at a time as one instruction of the tensor cores
// takes, from zero on; of each slice of k what is left over after whole tiles comes first. They read one element at a
// time. Here rows are whole vectors: sixteen bytes at once, three tiles ahead, eight warps with 64 x 64 results each.
//
// Defined before: LEFT_ROWS, RIGHT_ROWS (whether an operand lies densely along k), DEPTH (of an instruction: 8 or 16),
// IS_HALF (or bfloat16).
#if IS_HALF
#define KIND "f16"
#else
#define KIND "bf16"
#endif
typedef unsigned int u32;
typedef unsigned short u16;

enum { M = 128, N = 256, K = 64, STAGES = 3, OWN = 64, THREADS = 256, LEFT_BYTES = M * K * 2, STAGE_BYTES = (M + N) * K * 2 };

struct product_args {
  const u16* left;
  const u16* right;
  u16* out;
  long long left_stride, right_stride;
  // Of the result; which places along k are added up; whether to what is there.
  int rows, columns, first, last, adds;
  // Where the operands have zeros that are not in the other one, or not in the result: from which place along k, or which
  // row, and how many.
  int k_gap_at, k_gap, row_gap_at, row_gap;
};

// Asks for SIZE x K elements of an operand, in vectors that lie where no two lanes meet the same bank.
template <int SIZE, bool IS_ROWS>
__device__ __forceinline__ void fetch_tile(u32 to, const u16* from, long long stride, int first, int count, int k,
                                           int last, int gap_at, int gap) {
  constexpr int VECTORS = (IS_ROWS ? K : SIZE) / 8;
#pragma unroll
  for (int turn = 0; turn < SIZE * K / 8 / THREADS; ++turn) {
    const int at = turn * THREADS + threadIdx.x, row = at / VECTORS, vector = at % VECTORS;
    int outer = row + (IS_ROWS ? first : k), left = (IS_ROWS ? last - k : count - first) - 8 * vector;
    bool is_there = outer < (IS_ROWS ? count : last) && left > 0;
    if (!IS_ROWS && outer >= gap_at) {
      is_there &= outer >= gap_at + gap;
      outer -= gap;
    }
    const int bytes = is_there ? (left < 8 ? 2 * left : 16) : 0;
    const u16* source = is_there ? from + outer * stride + (IS_ROWS ? k : first) + 8 * vector : from;
    const u32 place = to + (row * VECTORS + (vector & ~7 | (vector ^ row) & 7)) * 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(source), "r"(bytes));
  }
}

// Reads four 8 x 8 parts of a tile: neighbours along k are one after another in the first two, of the right operand, or
// in the first and third.
template <int SIZE, bool IS_ROWS, bool IS_RIGHT>
__device__ __forceinline__ void read_parts(u32 (&parts)[4], u32 tile, int first, int k) {
  constexpr int VECTORS = (IS_ROWS ? K : SIZE) / 8;
  const int lane = threadIdx.x & 31, low = lane >> 3 & 1, high = lane >> 4;
  const int own = first / 8 + (IS_RIGHT ? high : low), deep = k / 8 + (IS_RIGHT ? low : high);
  const int row = 8 * (IS_ROWS ? own : deep) + (lane & 7), vector = IS_ROWS ? deep : own;
  const u32 place = tile + (row * VECTORS + (vector & ~7 | (vector ^ row) & 7)) * 16;
  if (IS_ROWS)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(parts[0]), "=r"(parts[1]), "=r"(parts[2]), "=r"(parts[3]) : "r"(place));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(parts[0]), "=r"(parts[1]), "=r"(parts[2]), "=r"(parts[3]) : "r"(place));
}

struct fragments {
  u32 left[OWN / 16][4], right[OWN / 16][4];

  __device__ __forceinline__ void read(u32 tile, int row, int column, int k) {
#pragma unroll
    for (int i = 0; i < OWN / 16; ++i) read_parts<M, LEFT_ROWS, false>(left[i], tile, row + 16 * i, k);
#pragma unroll
    for (int j = 0; j < OWN / 16; ++j) read_parts<N, RIGHT_ROWS, true>(right[j], tile + LEFT_BYTES, column + 16 * j, k);
  }
};

#define MULTIPLY(DEPTH_, LEFT_, RIGHT_, ...)                                                         \
  asm("mma.sync.aligned.m16n8k" #DEPTH_ ".row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, "      \
      LEFT_ ", " RIGHT_ ", {%0, %1, %2, %3};"                                                        \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : __VA_ARGS__)

__device__ __forceinline__ void multiply(float (&sums)[OWN / 16][OWN / 8][4], const fragments& own) {
#pragma unroll
  for (int step = 0; step < 16; step += DEPTH)
#pragma unroll
    for (int i = 0; i < OWN / 16; ++i)
#pragma unroll
      for (int j = 0; j < OWN / 8; ++j) {
        float(&sum)[4] = sums[i][j];
        const u32* left = own.left[i] + step / 4;
        const u32* right = own.right[j / 2] + 2 * (j & 1) + step / 8;
#if DEPTH == 8
        MULTIPLY(8, "{%4, %5}", "{%6}", "r"(left[0]), "r"(left[1]), "r"(right[0]));
#else
        MULTIPLY(16, "{%4, %5, %6, %7}", "{%8, %9}", "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]),
                 "r"(right[0]), "r"(right[1]));
#endif
      }
}

__device__ __forceinline__ float to_float(u16 bits) {
#if IS_HALF
  float made;
  asm("cvt.f32.f16 %0, %1;" : "=f"(made) : "h"(bits));
  return made;
#else
  return __uint_as_float(static_cast<u32>(bits) << 16);
#endif
}

__device__ __forceinline__ u16 to_bits(float value) {
  u16 made;
  asm("cvt.rn." KIND ".f32 %0, %1;" : "=h"(made) : "f"(value));
  return made;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fuser_kernel(const __grid_constant__ product_args a) {
  extern __shared__ __align__(128) unsigned char memory[];
  const u32 tiles = static_cast<u32>(__cvta_generic_to_shared(memory));
  const int first_row = blockIdx.x * M, first_column = blockIdx.y * N, steps = (a.last - a.first + K - 1) / K;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = warp % 2 * OWN, column = warp / 2 * OWN;
  float sums[OWN / 16][OWN / 8][4] = {};
  auto fetch = [&](int step) {
    const u32 to = tiles + step % STAGES * STAGE_BYTES;
    const int k = a.first + step * K;
    if (step < steps) {
      fetch_tile<M, LEFT_ROWS>(to, a.left, a.left_stride, first_row, a.rows + a.row_gap, k, a.last, a.last, 0);
      fetch_tile<N, RIGHT_ROWS>(to + LEFT_BYTES, a.right, a.right_stride, first_column, a.columns, k, a.last,
                                a.k_gap_at, a.k_gap);
    }
    asm volatile("cp.async.commit_group;");
  };
  auto wait = [&] {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
    __syncthreads();
  };
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) fetch(step);
  fragments own[2];
  wait();
  own[0].read(tiles, row, column, 0);
  for (int step = 0; step < steps; ++step) {
    const u32 tile = tiles + step % STAGES * STAGE_BYTES;
#pragma unroll
    for (int k = 0; k < K; k += 16) {
      if (k == 0) fetch(step + STAGES - 1);
      if (k + 16 < K) {
        own[(k / 16 + 1) % 2].read(tile, row, column, k + 16);
      } else {
        wait();
        own[0].read(tiles + (step + 1) % STAGES * STAGE_BYTES, row, column, 0);
      }
      multiply(sums, own[k / 16 % 2]);
    }
  }
  asm volatile("cp.async.wait_all;");
  __syncthreads();
  // Through shared memory, so that neighbours are written side by side.
  constexpr int PITCH = N + 2;
  float* const made = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (warp % 2 == half)
#pragma unroll
      for (int i = 0; i < OWN / 16; ++i)
#pragma unroll
        for (int j = 0; j < OWN / 8; ++j)
#pragma unroll
          for (int part = 0; part < 4; ++part)
            made[(16 * i + lane / 4 + part / 2 * 8) * PITCH + column + 8 * j + lane % 4 * 2 + part % 2] = sums[i][j][part];
    __syncthreads();
#pragma unroll 8
    for (int at = threadIdx.x; at < OWN * N; at += THREADS) {
      const int own_column = first_column + at % N;
      int own_row = first_row + half * OWN + at / N;
      bool is_there = own_column < a.columns;
      if (own_row >= a.row_gap_at) {
        is_there &= own_row >= a.row_gap_at + a.row_gap;
        own_row -= a.row_gap;
      }
      if (is_there && own_row < a.rows) {
        u16* const place = a.out + static_cast<long long>(own_row) * a.columns + own_column;
        const float value = made[at / N * PITCH + at % N];
        *place = to_bits(a.adds ? value + to_float(*place) : value);
      }
    }
    __syncthreads();
  }
}
