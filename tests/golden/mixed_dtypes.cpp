namespace fuser_f0 {
#line 1 "functor0.aten_where"
template <typename T> T aten_where(bool condition, T a, T b) { return condition ? a : b; }
#line N "fuser_kernel"
}

namespace fuser_f1 {
#line 1 "functor1.quantize"
#define LEVELS 255
template <typename T> T clip(T v) { return v < 0 ? T(0) : v > LEVELS ? T(LEVELS) : v; }
template <typename T> T quantize(T x, bool keep, int64_t offset) { return keep ? x : clip(x * LEVELS + T(offset)); }
#line N "fuser_kernel"
}
#undef LEVELS

struct fuser_args {
  int64_t numel;
  uint8_t* out0;
  const bool* in0;
  const int8_t* in1;
  const fuser_half* in2;
  int64_t number3;
  int64_t number4;
};

FUSER_INLINE void fuser_element(const bool v0, const int8_t v1, const float v2, const bool v3, const int64_t v4, uint8_t& out0) {
  // v5 = where(v0, v1, v2), float16
  const float v5 = fuser_isolate<3>(fuser_round<fuser_half>(fuser_cast<float>(fuser_f0::aten_where<float>(fuser_isolate<0>(v0), fuser_isolate<1>(fuser_round<fuser_half>(fuser_cast<float>(v1))), fuser_isolate<2>(v2)))));
  // v6 = quantize(v5, keep=v3, offset=v4), uint8
  const uint8_t v6 = fuser_isolate<5>(fuser_cast<uint8_t>(fuser_f1::quantize<float>(fuser_isolate<4>(v5), v3, v4)));
  out0 = v6;
}

#ifdef _OPENMP
extern "C" int omp_get_thread_num() noexcept;
extern "C" int omp_get_num_threads() noexcept;
#endif

// Elements begin to end.
__attribute__((flatten, noinline)) static void fuser_range(const fuser_args a, int64_t begin, int64_t end) {
  const auto out0 = a.out0;
  const auto in0 = a.in0;
  const auto in1 = a.in1;
  const auto in2 = a.in2;
  for (int64_t block = begin; block < end; block += 1024) {
    const int64_t stop = block + 1024 < end ? block + 1024 : end;
    __builtin_prefetch(out0 + stop, 1);
    __builtin_prefetch(in0 + stop);
    __builtin_prefetch(in1 + stop);
    __builtin_prefetch(in2 + stop);
    alignas(64) float wide_in2[1024];
    fuser_load_halves(wide_in2, in2 + block, stop - block);
#pragma GCC ivdep
    for (int64_t i = block; i < stop; ++i)
      fuser_element(fuser_to_compute(in0[i]), fuser_to_compute(in1[i]), wide_in2[i - block], (a.number3 != 0), a.number4, out0[i]);
  }
}

// threads is 1 or torch's thread count.
extern "C" void fuser_kernel(const fuser_args* args, int threads) {
  const fuser_args& a = *args;
  fuser_prefer_huge_pages(a.out0, a.numel * sizeof(*a.out0));
  // Even a region of one thread costs as much as a small kernel.
  if (threads == 1) return fuser_range(a, 0, a.numel);
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
  {
    const int64_t parts = omp_get_num_threads();
    const int64_t share = ((a.numel + parts - 1) / parts + 63) / 64 * 64;
    const int64_t begin = share * omp_get_thread_num();
    const int64_t end = begin + share < a.numel ? begin + share : a.numel;
    if (begin < end) fuser_range(a, begin, end);
  }
#else
  fuser_range(a, 0, a.numel);
#endif
}
