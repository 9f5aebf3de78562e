namespace fuser_f0 {
#line 1 "functor0.split"
// Written T, returns nothing.
template <typename T>
void split(T x, T bias, T& low, T& high) {
  low = x - bias;
  high = x + bias;
}
#line N "fuser_kernel"
}

struct fuser_args {
  int64_t numel;
  double* out0;
  double* out1;
  const double* in0;
  const double* in1;
  int64_t size[2];
  int64_t stride_out0[2];
  int64_t stride_out1[2];
  int64_t stride_in0[2];
  int64_t stride_in1[2];
};

FUSER_INLINE void fuser_element(const double v0, const double v1, double& out0, double& out1) {
  // v2, v3 = split(v0, v1), float64, float64
  double r2{};
  double r3{};
  fuser_f0::split<double>(fuser_isolate<0>(v0), fuser_isolate<1>(v1), r2, r3);
  const double v2 = fuser_isolate<2>(fuser_cast<double>(r2));
  out0 = v2;
  const double v3 = fuser_isolate<3>(fuser_cast<double>(r3));
  out1 = v3;
}

#ifdef _OPENMP
extern "C" int omp_get_thread_num() noexcept;
extern "C" int omp_get_num_threads() noexcept;
#endif

// One tile.
__attribute__((flatten, noinline)) static void fuser_rows(const fuser_args a, int64_t row, int64_t rows, const int64_t* jump,
    double* out0, double* out1, const double* in0, const double* in1) {
  for (int64_t j = 0; j < rows; ++j) {
    for (int64_t block = 0; block < row; block += 512) {
      const int64_t stop = block + 512 < row ? block + 512 : row;
      __builtin_prefetch(out0 + stop, 1);
      __builtin_prefetch(out1 + stop, 1);
      __builtin_prefetch(in0 + stop);
      __builtin_prefetch(in1 + stop);
#pragma GCC ivdep
      for (int64_t i = block; i < stop; ++i)
        fuser_element(fuser_to_compute(in0[i]), fuser_to_compute(in1[i]), out0[i], out1[i]);
    }
    out0 += jump[0];
    out1 += jump[1];
    in0 += jump[2];
    in1 += jump[3];
  }
}

// Tiles begin to end.
__attribute__((noinline)) static void fuser_range(const fuser_args& a, fuser_tiles<2> tile,
    int64_t begin, int64_t end) {
  alignas(64) unsigned char buffer_out0[4096 * sizeof(double)];
  alignas(64) unsigned char buffer_out1[4096 * sizeof(double)];
  alignas(64) unsigned char buffer_in0[4096 * sizeof(double)];
  alignas(64) unsigned char buffer_in1[4096 * sizeof(double)];
  for (tile.seek(begin); begin < end; ++begin, tile.next()) {
    const int64_t row = tile.width(), rows = tile.height();
    const auto out0 = fuser_place(buffer_out0, a.out0 + tile.offset(a.stride_out0), row, rows, a.stride_out0[0], tile.jump(a.stride_out0));
    const auto out1 = fuser_place(buffer_out1, a.out1 + tile.offset(a.stride_out1), row, rows, a.stride_out1[0], tile.jump(a.stride_out1));
    const auto in0 = fuser_gather(buffer_in0, a.in0 + tile.offset(a.stride_in0), row, rows, a.stride_in0[0], tile.jump(a.stride_in0));
    const auto in1 = fuser_gather(buffer_in1, a.in1 + tile.offset(a.stride_in1), row, rows, a.stride_in1[0], tile.jump(a.stride_in1));
    const int64_t jump[] = {row, row, row, row};
    fuser_rows(a, row * rows, 1, jump, out0, out1, in0, in1);
    fuser_scatter(a.out0 + tile.offset(a.stride_out0), out0, row, rows, a.stride_out0[0], tile.jump(a.stride_out0));
    fuser_scatter(a.out1 + tile.offset(a.stride_out1), out1, row, rows, a.stride_out1[0], tile.jump(a.stride_out1));
  }
}

// threads is 1 or torch's thread count.
extern "C" void fuser_kernel(const fuser_args* args, int threads) {
  const fuser_args& a = *args;
  fuser_prefer_huge_pages(a.out0, a.numel * sizeof(*a.out0));
  fuser_prefer_huge_pages(a.out1, a.numel * sizeof(*a.out1));
  const int64_t* const buffered[] = {a.stride_out0, a.stride_out1, a.stride_in0, a.stride_in1};
  const fuser_tiles<2> tile(a.size, buffered, 4, 64, threads);
  const int64_t total = tile.total();
  // Even a region of one thread costs as much as a small kernel.
  if (threads == 1) return fuser_range(a, tile, 0, total);
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
  {
    const int64_t parts = omp_get_num_threads();
    const int64_t share = (total + parts - 1) / parts;
    const int64_t begin = share * omp_get_thread_num();
    const int64_t end = begin + share < total ? begin + share : total;
    if (begin < end) fuser_range(a, tile, begin, end);
  }
#else
  fuser_range(a, tile, 0, total);
#endif
}
