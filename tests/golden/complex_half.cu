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
  const fuser_complex_half s3 = fuser_from_compute<fuser_complex_half>(fuser_cast<std::complex<float>>(fuser_f0::rotate<std::complex<float>>(fuser_isolate<0>(v0), fuser_isolate<1>(fuser_cast<std::complex<float>>(v2)))));
  const std::complex<float> v3 = fuser_isolate<2>(fuser_to_compute(s3));
  // v4 = rotate(v3, v1), complex32
  const fuser_complex_half s4 = fuser_from_compute<fuser_complex_half>(fuser_cast<std::complex<float>>(fuser_f0::rotate<std::complex<float>>(fuser_isolate<3>(v3), fuser_isolate<4>(v1))));
  fuser_assign(out0, s4);
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
  const int first = ((int)blockIdx.x * 256 + threadIdx.x) * 4;
  if (first + 4 <= a.numel) {
    const auto in0 = fuser_load<4>(a.in0 + first);
    const auto in1 = fuser_to_compute(*(a.in1 + 0));
    fuser_vector<fuser_complex_half, 4> out0;
  #pragma unroll
    for (int k = 0; k < 4; ++k)
      fuser_element(fuser_to_compute(in0.item[k]), in1, std::complex<double>(a.number2[0], a.number2[1]), out0.item[k]);
    fuser_store<4>(a.out0 + first, out0);
  } else {
    for (int i = first; i < a.numel; ++i)
      fuser_element(fuser_to_compute(a.in0[i]), fuser_to_compute(a.in1[0]), std::complex<double>(a.number2[0], a.number2[1]), a.out0[i]);
  }
}
