namespace fuser_f0 {
#line 1 "functor0.aten_mul"
template <typename T> T aten_mul(T a, T b) { return a * b; }
#line N "fuser_kernel"
}

namespace fuser_f1 {
#line 1 "functor1.aten_maximum"
template <typename T> T aten_maximum(T a, T b) { 
#ifdef FUSER_CPU
return a != a || a > b ? a : b;
#else
 return a != a ? a : b != b ? b : max(a, b);
#endif
 }
#line N "fuser_kernel"
}

struct fuser_args {
  int64_t numel;
  float* out0;
  const float* in0;
  const float* in1;
  int64_t number2;
  int64_t size[2];
  int64_t stride_out0[2];
  int64_t stride_in0[2];
  int64_t stride_in1[2];
};

FUSER_INLINE void fuser_element(const float v0, const float v1, const int64_t v2, float& out0) {
  // v3 = mul(v0, v1), float32
  const float v3 = fuser_isolate<2>(fuser_cast<float>(fuser_f0::aten_mul<float>(fuser_isolate<0>(v0), fuser_isolate<1>(v1))));
  // v4 = maximum(v3, v2), float32
  const float v4 = fuser_isolate<5>(fuser_cast<float>(fuser_f1::aten_maximum<float>(fuser_isolate<3>(v3), fuser_isolate<4>(fuser_cast<float>(v2)))));
  out0 = v4;
}

#ifdef _OPENMP
extern "C" int omp_get_thread_num() noexcept;
extern "C" int omp_get_num_threads() noexcept;
#endif

// One tile.
__attribute__((flatten, noinline)) static void fuser_rows(const fuser_args a, int64_t row, int64_t rows, const int64_t* jump,
    float* out0, const float* in0, const float* in1) {
  for (int64_t j = 0; j < rows; ++j) {
    for (int64_t block = 0; block < row; block += 1024) {
      const int64_t stop = block + 1024 < row ? block + 1024 : row;
      __builtin_prefetch(out0 + stop, 1);
      __builtin_prefetch(in0 + stop);
      __builtin_prefetch(in1 + stop);
#pragma GCC ivdep
      for (int64_t i = block; i < stop; ++i)
        fuser_element(fuser_to_compute(in0[i]), fuser_to_compute(in1[i]), a.number2, out0[i]);
    }
    out0 += jump[0];
    in0 += jump[1];
    in1 += jump[2];
  }
}

// Tiles begin to end.
__attribute__((noinline)) static void fuser_range(const fuser_args& a, fuser_tiles<2> tile,
    int64_t begin, int64_t end) {
  for (tile.seek(begin); begin < end; ++begin, tile.next()) {
    const int64_t row = tile.width(), rows = tile.height();
    const auto out0 = a.out0 + tile.offset(a.stride_out0);
    const auto in0 = a.in0 + tile.offset(a.stride_in0);
    const auto in1 = a.in1 + tile.offset(a.stride_in1);
    const int64_t jump[] = {tile.jump(a.stride_out0), tile.jump(a.stride_in0), tile.jump(a.stride_in1)};
    fuser_rows(a, row, rows, jump, out0, in0, in1);
  }
}

// threads is 1 or torch's thread count.
extern "C" void fuser_kernel(const fuser_args* args, int threads) {
  const fuser_args& a = *args;
  fuser_prefer_huge_pages(a.out0, a.numel * sizeof(*a.out0));
  const int64_t* const buffered[] = {nullptr};
  const fuser_tiles<2> tile(a.size, buffered, 0, 256, threads);
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
