namespace fuser_f0 {
#line 1 "functor0.split"
// Written T, returns nothing.
template <typename T>
void split(T x, T bias, T& low, T& high) {
  low = x - bias;
  high = x + bias;
}
#line N "fuser_kernel"
}

struct fuser_args {
  int64_t numel;
  double* out0;
  double* out1;
  const double* in0;
  const double* in1;
  int64_t size[2];
  int64_t count[2];
  fuser_divider divide[1];
  int64_t stride_out0[2];
  int64_t stride_out1[2];
  int64_t stride_in0[2];
  int64_t stride_in1[2];
};

FUSER_INLINE void fuser_element(const double v0, const double v1, double& out0, double& out1) {
  // v2, v3 = split(v0, v1), float64, float64
  double r2{};
  double r3{};
  fuser_f0::split<double>(fuser_isolate<0>(v0), fuser_isolate<1>(v1), r2, r3);
  const double v2 = fuser_isolate<2>(fuser_cast<double>(r2));
  out0 = v2;
  const double v3 = fuser_isolate<3>(fuser_cast<double>(r3));
  out1 = v3;
}

typedef unsigned int fuser_index;

// How many elements are left from here on, and where they are.
struct fuser_place {
  int left;
  fuser_index out0, out1, in0, in1;
};

FUSER_INLINE fuser_place fuser_find(const fuser_args& a, int u) {
  fuser_place at{};
  fuser_index rest = static_cast<fuser_index>(blockIdx.x) * 256 + threadIdx.x;
  const fuser_index next0 = fuser_divide(rest, a.divide[0]);
  const fuser_index x = (rest - next0 * static_cast<fuser_index>(a.count[0])) * 2;
  rest = next0;
  at.out0 += x;
  at.out1 += x;
  at.in0 += x;
  at.in1 += x * static_cast<fuser_index>(a.stride_in1[0]);
  const fuser_index i1 = rest;
  at.out0 += i1 * static_cast<fuser_index>(a.stride_out0[1]);
  at.out1 += i1 * static_cast<fuser_index>(a.stride_out1[1]);
  at.in0 += i1 * static_cast<fuser_index>(a.stride_in0[1]);
  at.in1 += i1 * static_cast<fuser_index>(a.stride_in1[1]);
  at.left = rest < a.count[1] ? static_cast<int>(a.size[0] - x) : 0;
  return at;
}

extern "C" __global__ void __launch_bounds__(256)
fuser_kernel(const __grid_constant__ fuser_args a) {
  fuser_place at[1];
  fuser_vector<double, 2> in0[1];
  fuser_vector<double, 2> in1[1];
#pragma unroll
  for (int u = 0; u < 1; ++u) {
    at[u] = fuser_find(a, u);
    in0[u] = fuser_load<2, 2>(a.in0 + at[u].in0, at[u].left);
    in1[u] = fuser_gather<2>(a.in1 + at[u].in1, static_cast<fuser_index>(a.stride_in1[0]), at[u].left);
  }
#pragma unroll
  for (int u = 0; u < 1; ++u) {
    if (at[u].left <= 0) break;
    double out0[2];
    double out1[2];
#pragma unroll
    for (int k = 0; k < 2; ++k)
      fuser_element(fuser_to_compute(in0[u][k]), fuser_to_compute(in1[u][k]), out0[k], out1[k]);
    fuser_store<2, 2>(a.out0 + at[u].out0, out0, at[u].left);
    fuser_store<2, 2>(a.out1 + at[u].out1, out1, at[u].left);
  }
}
