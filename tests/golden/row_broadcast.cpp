namespace fuser_f0 {
#line 1 "functor0.aten_mul"
template <typename T> T aten_mul(T a, T b) { return a * b; }
#line N "fuser_kernel"
}

namespace fuser_f1 {
#line 1 "functor1.aten_maximum"
template <typename T> T aten_maximum(T a, T b) { return a != a || a > b ? a : b; }
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
#endif

// Elements begin to end of the flattened loop nest. Everything is inlined here, so that the loop vectorises.
__attribute__((flatten, noinline)) static void fuser_range(const fuser_args& a, int64_t begin, int64_t end) {
  int64_t at[2];
  int64_t rest = begin;
  for (int dim = 0; dim < 2; ++dim) {
    at[dim] = rest % a.size[dim];
    rest /= a.size[dim];
  }
  while (begin < end) {
    const int64_t left = a.size[0] - at[0];
    const int64_t count = left < end - begin ? left : end - begin;
    const auto out0 = a.out0 + (at[0] * a.stride_out0[0] + at[1] * a.stride_out0[1]);
    const auto in0 = a.in0 + (at[0] * a.stride_in0[0] + at[1] * a.stride_in0[1]);
    const auto in1 = a.in1 + (at[0] * a.stride_in1[0] + at[1] * a.stride_in1[1]);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i)
      fuser_element(fuser_to_compute(in0[i]), fuser_to_compute(in1[i]), a.number2, out0[i]);
    begin += count;
    at[0] = 0;
    for (int dim = 1; dim < 2 && ++at[dim] == a.size[dim]; ++dim) at[dim] = 0;
  }
}

// Each thread takes one range of elements, whole cache lines apart; threads is 1 or torch's thread count.
extern "C" void fuser_kernel(const fuser_args* args, int threads) {
  const fuser_args& a = *args;
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if(parallel: threads > 1)
  {
    const int64_t share = ((a.numel + threads - 1) / threads + 63) / 64 * 64;
    const int64_t begin = share * omp_get_thread_num();
    const int64_t end = begin + share < a.numel ? begin + share : a.numel;
    if (begin < end) fuser_range(a, begin, end);
  }
#else
  fuser_range(a, 0, a.numel);
#endif
}
