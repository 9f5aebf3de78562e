namespace fuser_f0 {
#line 1 "functor0.rotate"
template <typename T> T rotate(T z, T by) { return z * by; }
#line N "fuser_kernel"
}

struct fuser_args {
  int64_t numel;
  fuser_complex_half* out0;
  const fuser_complex_half* in0;
  const std::complex<float>* in1;
  double number2[2];
};

FUSER_INLINE void fuser_element(const std::complex<float> v0, const std::complex<float> v1, const std::complex<double> v2, fuser_complex_half& out0) {
  // v3 = rotate(v0, v2), complex32
  const std::complex<float> v3 = fuser_isolate<2>(fuser_round<fuser_complex_half>(fuser_cast<std::complex<float>>(fuser_f0::rotate<std::complex<float>>(fuser_isolate<0>(v0), fuser_isolate<1>(fuser_cast<std::complex<float>>(v2))))));
  // v4 = rotate(v3, v1), complex32
  const fuser_complex_half s4 = fuser_from_compute<fuser_complex_half>(fuser_cast<std::complex<float>>(fuser_f0::rotate<std::complex<float>>(fuser_isolate<3>(v3), fuser_isolate<4>(fuser_round<fuser_complex_half>(v1)))));
  fuser_assign(out0, s4);
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
  const auto v1 = fuser_to_compute(in1[0]);
  for (int64_t block = begin; block < end; block += 1024) {
    const int64_t stop = block + 1024 < end ? block + 1024 : end;
    __builtin_prefetch(out0 + stop, 1);
    __builtin_prefetch(in0 + stop);
#pragma GCC ivdep
    for (int64_t i = block; i < stop; ++i)
      fuser_element(fuser_to_compute(in0[i]), v1, std::complex<double>(a.number2[0], a.number2[1]), out0[i]);
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
