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
  int64_t zero;
  float* out0;
  const float* in0;
  const float* in1;
  double number2;
};

FUSER_INLINE void fuser_element(const int64_t zero, const float v0, const float v1, const double v2, float& out0) {
  // v3 = axpy(v0, v1, alpha=v2), float32
  const float v3 = fuser_isolate<2>(fuser_cross(fuser_cast<float>(fuser_f0::axpy<float>(fuser_isolate<0>(v0), fuser_isolate<1>(v1), v2)), zero));
  // v4 = silu(v3), float32
  const float v4 = fuser_isolate<4>(fuser_cast<float>(fuser_f1::aten_silu<float>(fuser_isolate<3>(v3))));
  out0 = v4;
}

// Elements that one thread reads or writes with one access.
template <typename S, int N> struct alignas(sizeof(S) * N) fuser_vector { S item[N]; };

template <int N, typename S> FUSER_INLINE fuser_vector<S, N> fuser_load(const S* from) {
  return *reinterpret_cast<const fuser_vector<S, N>*>(from);
}

template <int N, typename S> FUSER_INLINE void fuser_store(S* to, const fuser_vector<S, N>& from) {
  *reinterpret_cast<fuser_vector<S, N>*>(to) = from;
}

extern "C" __global__ void __launch_bounds__(256)
fuser_kernel(const __grid_constant__ fuser_args a) {
  const int64_t first = ((int64_t)blockIdx.x * 256 + threadIdx.x) * 4;
  if (first + 4 <= a.numel) {
    const auto in0 = fuser_load<4>(a.in0 + first);
    const auto in1 = fuser_load<4>(a.in1 + first);
    fuser_vector<float, 4> out0;
  #pragma unroll
    for (int k = 0; k < 4; ++k)
      fuser_element(a.zero, fuser_to_compute(in0.item[k]), fuser_to_compute(in1.item[k]), a.number2, out0.item[k]);
    fuser_store<4>(a.out0 + first, out0);
  } else {
    for (int64_t i = first; i < a.numel; ++i)
      fuser_element(a.zero, fuser_to_compute(a.in0[i]), fuser_to_compute(a.in1[i]), a.number2, a.out0[i]);
  }
}
