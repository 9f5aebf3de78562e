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
  int64_t zero;
  float* out0;
  const float* in0;
  const float* in1;
  int64_t number2;
  int64_t size[2];
  int64_t count[2];
  fuser_divider divide[1];
  int64_t stride_out0[2];
  int64_t stride_in0[2];
  int64_t stride_in1[2];
};

FUSER_INLINE void fuser_element(const int64_t zero, const float v0, const float v1, const int64_t v2, float& out0) {
  // v3 = mul(v0, v1), float32
  const float v3 = fuser_isolate<2>(fuser_cross(fuser_cast<float>(fuser_f0::aten_mul<float>(fuser_isolate<0>(v0), fuser_isolate<1>(v1))), zero));
  // v4 = maximum(v3, v2), float32
  const float v4 = fuser_isolate<5>(fuser_cast<float>(fuser_f1::aten_maximum<float>(fuser_isolate<3>(v3), fuser_isolate<4>(fuser_cast<float>(v2)))));
  out0 = v4;
}

typedef unsigned int fuser_index;

// How many elements are left from here on, and where they are.
struct fuser_place {
  int left;
  fuser_index out0, in0, in1;
};

FUSER_INLINE fuser_place fuser_find(const fuser_args& a, int u) {
  fuser_place at{};
  fuser_index rest = (static_cast<fuser_index>(blockIdx.x) * 2 + u) * 128 + threadIdx.x;
  const fuser_index next0 = fuser_divide(rest, a.divide[0]);
  const fuser_index x = (rest - next0 * static_cast<fuser_index>(a.count[0])) * 4;
  rest = next0;
  at.out0 += x;
  at.in0 += x;
  at.in1 += x;
  const fuser_index i1 = rest;
  at.out0 += i1 * static_cast<fuser_index>(a.stride_out0[1]);
  at.in0 += i1 * static_cast<fuser_index>(a.stride_in0[1]);
  at.in1 += i1 * static_cast<fuser_index>(a.stride_in1[1]);
  at.left = rest < a.count[1] ? static_cast<int>(a.size[0] - x) : 0;
  return at;
}

extern "C" __global__ void __launch_bounds__(128)
fuser_kernel(const __grid_constant__ fuser_args a) {
  fuser_place at[2];
  fuser_vector<float, 4> in0[2];
  fuser_vector<float, 4> in1[2];
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    at[u] = fuser_find(a, u);
    in0[u] = fuser_load<4, 4>(a.in0 + at[u].in0, at[u].left);
    in1[u] = fuser_load<4, 4>(a.in1 + at[u].in1, at[u].left);
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    if (at[u].left <= 0) break;
    float out0[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      fuser_element(a.zero, fuser_to_compute(in0[u][k]), fuser_to_compute(in1[u][k]), a.number2, out0[k]);
    fuser_store<4, 4>(a.out0 + at[u].out0, out0, at[u].left);
  }
}
