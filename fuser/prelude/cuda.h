// CUDA dialect. NVRTC declares the CUDA math functions for float and double by itself, globally; missing are integer
// and mixed arguments, the std:: names (prelude.py adds the using-declarations) and the fixed-width types.

//@ always
#define FUSER_INLINE __device__ __forceinline__
#define FUSER_MEMBER __device__ __forceinline__

// Conversions of e4m3fn and e5m2: cuda_storage.h.
#if __CUDA_ARCH__ >= 890
#define FUSER_HAS_FLOAT8_INSTRUCTIONS
#endif

// As jiterator has them; NVRTC has no __builtin_huge_valf.
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

// As torch: uint8 by way of int64, so that negative numbers wrap; otherwise the instruction's saturation.
template <typename To, typename From> FUSER_INLINE To fuser_truncate(From v) {
  if constexpr (sizeof(To) == 1 && static_cast<To>(-1) > static_cast<To>(0))
    return static_cast<To>(static_cast<long long>(v));
  else
    return static_cast<To>(v);
}

template <typename To, typename From> FUSER_INLINE To fuser_from_integer(From v) {
  return v == 0 ? static_cast<To>(0) : static_cast<To>(v);
}

template <typename S> FUSER_INLINE void fuser_assign(S& to, const S& from) { to = from; }

// Nothing is contracted or merged across: NVVM sees an opaque value, and two uses of one value carry different texts,
// so they stay two values. Not volatile: what nobody needs still goes away.
template <int use, typename C> struct fuser_isolator { static FUSER_INLINE C isolate(C v) { return v; } };
template <int use> struct fuser_isolator<use, float> {
  static FUSER_INLINE float isolate(float v) { asm("// %1" : "+f"(v) : "n"(use)); return v; }
};
template <int use> struct fuser_isolator<use, double> {
  static FUSER_INLINE double isolate(double v) { asm("// %1" : "+d"(v) : "n"(use)); return v; }
};
template <int use, typename C> FUSER_INLINE C fuser_isolate(C v) { return fuser_isolator<use, C>::isolate(v); }

// ptxas does not see the empty asm, and contracts c - a * b where NVVM did not. What it cannot look through is a zero
// that is only known at run time.
FUSER_INLINE float fuser_cross(float v, long long zero) {
  return __int_as_float(__float_as_int(v) ^ static_cast<int>(zero));
}
FUSER_INLINE double fuser_cross(double v, long long zero) {
  return __longlong_as_double(__double_as_longlong(v) ^ zero);
}

//@ fuser_half_bits fuser_half_value
FUSER_INLINE unsigned short fuser_half_bits(float v) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
}
FUSER_INLINE float fuser_half_value(unsigned short bits) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
}

//@ fuser_bfloat16_bits
FUSER_INLINE unsigned short fuser_bfloat16_bits(float v) {
#if __CUDA_ARCH__ >= 800
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
#else
  const unsigned u = __float_as_uint(v);
  return static_cast<unsigned short>(v != v ? 0x7fffu : (u + 0x7fffu + (u >> 16 & 1u)) >> 16);
#endif
}
