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

typedef unsigned int fuser_index;

// How many elements are left from here on, and where they are.
struct fuser_place {
  int left;
  fuser_index first;
};

FUSER_INLINE fuser_place fuser_find(const fuser_args& a, int u) {
  const fuser_index first = (static_cast<fuser_index>(blockIdx.x) * 256 + threadIdx.x) * 8;
  return {static_cast<int>(a.numel - first), first};
}

extern "C" __global__ void __launch_bounds__(256)
fuser_kernel(const __grid_constant__ fuser_args a) {
  fuser_place at[1];
  fuser_vector<bool, 8> in0[1];
  fuser_vector<int8_t, 8> in1[1];
  fuser_vector<fuser_half, 8> in2[1];
#pragma unroll
  for (int u = 0; u < 1; ++u) {
    at[u] = fuser_find(a, u);
    in0[u] = fuser_load<8, 8>(a.in0 + at[u].first, at[u].left);
    in1[u] = fuser_load<8, 8>(a.in1 + at[u].first, at[u].left);
    in2[u] = fuser_load<8, 8>(a.in2 + at[u].first, at[u].left);
  }
#pragma unroll
  for (int u = 0; u < 1; ++u) {
    if (at[u].left <= 0) break;
    uint8_t out0[8];
#pragma unroll
    for (int k = 0; k < 8; ++k)
      fuser_element(fuser_to_compute(in0[u][k]), fuser_to_compute(in1[u][k]), fuser_to_compute(in2[u][k]), (a.number3 != 0), a.number4, out0[k]);
    fuser_store<8, 8>(a.out0 + at[u].first, out0, at[u].left);
  }
}
