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

extern "C" __global__ void __launch_bounds__(256)
fuser_kernel(const __grid_constant__ fuser_args a) {
  unsigned int rest = (unsigned int)blockIdx.x * 256 + threadIdx.x;
  if (rest >= a.numel) return;
  unsigned int at_out0 = 0;
  unsigned int at_out1 = 0;
  unsigned int at_in0 = 0;
  unsigned int at_in1 = 0;
  {
    const unsigned int next = rest / (unsigned int)a.size[0];
    const unsigned int here = rest - next * (unsigned int)a.size[0];
    rest = next;
    at_out0 += here * 1;
    at_out1 += here * 1;
    at_in0 += here * 1;
    at_in1 += here * (unsigned int)a.stride_in1[0];
  }
  {
    const unsigned int here = rest;
    at_out0 += here * (unsigned int)a.stride_out0[1];
    at_out1 += here * (unsigned int)a.stride_out1[1];
    at_in0 += here * (unsigned int)a.stride_in0[1];
    at_in1 += here * (unsigned int)a.stride_in1[1];
  }
  fuser_element(fuser_to_compute(a.in0[at_in0]), fuser_to_compute(a.in1[at_in1]), a.out0[at_out0], a.out1[at_out1]);
}
