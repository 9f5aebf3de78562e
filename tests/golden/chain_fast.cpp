namespace fuser_f0 {
#line 1 "functor0.axpy"
template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }
#line N "fuser_kernel"
}

namespace fuser_f1 {
#line 1 "functor1.aten_silu"
template <typename T> T aten_silu(T x) { return x / (T(1) + exp(-x)); }
#line N "fuser_kernel"
}

struct fuser_args {
  int64_t numel;
  fuser_bfloat16* out0;
  const fuser_bfloat16* in0;
  const fuser_bfloat16* in1;
  double number2;
};

FUSER_INLINE void fuser_element(const float v0, const float v1, const double v2, fuser_bfloat16& out0) {
  // v3 = axpy(v0, v1, alpha=v2), bfloat16
  const float v3 = fuser_cast<float>(fuser_f0::axpy<float>(v0, v1, v2));
  // v4 = silu(v3), bfloat16
  const float v4 = fuser_cast<float>(fuser_f1::aten_silu<float>(v3));
  out0 = fuser_from_compute<fuser_bfloat16>(v4);
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
  for (int64_t block = begin; block < end; block += 2048) {
    const int64_t stop = block + 2048 < end ? block + 2048 : end;
    __builtin_prefetch(out0 + stop, 1);
    __builtin_prefetch(in0 + stop);
    __builtin_prefetch(in1 + stop);
#pragma GCC ivdep
    for (int64_t i = block; i < stop; ++i)
      fuser_element(fuser_to_compute(in0[i]), fuser_to_compute(in1[i]), a.number2, out0[i]);
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
