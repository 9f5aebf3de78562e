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

typedef unsigned int fuser_index;

// How many elements are left from here on, and where they are.
struct fuser_place {
  int left;
  fuser_index first;
};

FUSER_INLINE fuser_place fuser_find(const fuser_args& a, int u) {
  const fuser_index first = (static_cast<fuser_index>(blockIdx.x) * 256 + threadIdx.x) * 4;
  return {static_cast<int>(a.numel - first), first};
}

extern "C" __global__ void __launch_bounds__(256)
fuser_kernel(const __grid_constant__ fuser_args a) {
  fuser_place at[1];
  fuser_vector<fuser_complex_half, 4> in0[1];
  fuser_vector<std::complex<float>, 1> in1[1];
#pragma unroll
  for (int u = 0; u < 1; ++u) {
    at[u] = fuser_find(a, u);
    in0[u] = fuser_load<4, 4>(a.in0 + at[u].first, at[u].left);
    in1[u] = fuser_load<1, 1>(a.in1, at[u].left);
  }
#pragma unroll
  for (int u = 0; u < 1; ++u) {
    if (at[u].left <= 0) break;
    fuser_complex_half out0[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      fuser_element(fuser_to_compute(in0[u][k]), fuser_to_compute(in1[u][0]), std::complex<double>(a.number2[0], a.number2[1]), out0[k]);
    fuser_store<4, 4>(a.out0 + at[u].first, out0, at[u].left);
  }
}
