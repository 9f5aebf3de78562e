// CPU dialect: the language part. Written for g++ and clang++, any architecture.

//@ always
#define __device__
#define __host__
#define __global__
#define __constant__
#define __shared__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define FUSER_INLINE inline __attribute__((always_inline))
#define FUSER_MEMBER inline __attribute__((always_inline))

#define INFINITY __builtin_huge_valf()
#define NAN __builtin_nanf("")

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

// Out of range, C++ leaves the result open, and gcc's scalar and vector instructions differ: the result would depend
// on the element's position. Going through a signed type that has one and the same instruction for both (out of
// range: its smallest value) settles it. Negative numbers wrap in unsigned types, as in torch.
template <typename To, typename From> FUSER_INLINE To fuser_truncate(From v) {
  constexpr bool is_unsigned = static_cast<To>(-1) > static_cast<To>(0);
  if constexpr (!is_unsigned && sizeof(To) <= 4) {
    return static_cast<To>(static_cast<int>(v));
  } else if constexpr (is_unsigned && sizeof(To) == 8) {
    const From top = static_cast<From>(9223372036854775808.0);
    const long long low = static_cast<long long>(v), high = static_cast<long long>(v - top);
    return static_cast<To>(v >= top ? static_cast<To>(high) ^ (static_cast<To>(1) << 63) : static_cast<To>(low));
  } else {
    return static_cast<To>(static_cast<long long>(v));
  }
}

// gcc 12 vectorises no loop with an assignment of one struct to another.
template <typename S> FUSER_INLINE void fuser_assign(S& to, const S& from) { __builtin_memcpy(&to, &from, sizeof to); }

// Where torch's own ops differ between devices.
#define FUSER_CPU

// Kernels are compiled with -ffp-contract=off: there is nothing to hold apart.
template <int use, typename C> FUSER_INLINE C fuser_isolate(C v) { return v; }

template <typename To, typename From> FUSER_INLINE To fuser_bit_cast(From v) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  __builtin_memcpy(&to, &v, sizeof to);
  return to;
}

// Bools in memory are bytes: gcc 12 knows no vector of what is one bit.
FUSER_INLINE bool fuser_to_compute(const bool& v) { return fuser_bit_cast<unsigned char>(v) != 0; }

// gcc turns float(int(x)) into trunc(x), which is -0 for -0.3; an integer's zero has no sign. A mask: of a branch on a
// number of the call gcc 12 makes conditions that it cannot vectorise.
template <typename T> struct fuser_bits { typedef int type; };
template <> struct fuser_bits<double> { typedef long long type; };
template <typename To, typename From> FUSER_INLINE To fuser_from_integer(From v) {
  typedef typename fuser_bits<To>::type Bits;
  return fuser_bit_cast<To>(fuser_bit_cast<Bits>(static_cast<To>(v)) & -static_cast<Bits>(v != 0));
}
// Of what a comparison says, or a bool in memory, gcc 12 vectorises no conversion to floating point.
template <typename To> FUSER_INLINE To fuser_from_integer(bool v) {
  typedef typename fuser_bits<To>::type Bits;
  return fuser_bit_cast<To>(fuser_bit_cast<Bits>(static_cast<To>(1)) & -static_cast<Bits>(v));
}

//@ __float_as_int
FUSER_INLINE int __float_as_int(float v) { return fuser_bit_cast<int>(v); }

//@ __int_as_float
FUSER_INLINE float __int_as_float(int v) { return fuser_bit_cast<float>(v); }

//@ __float_as_uint
FUSER_INLINE unsigned __float_as_uint(float v) { return fuser_bit_cast<unsigned>(v); }

//@ __uint_as_float
FUSER_INLINE float __uint_as_float(unsigned v) { return fuser_bit_cast<float>(v); }

//@ __double_as_longlong
FUSER_INLINE long long __double_as_longlong(double v) { return fuser_bit_cast<long long>(v); }

//@ __longlong_as_double
FUSER_INLINE double __longlong_as_double(long long v) { return fuser_bit_cast<double>(v); }

//@ __double2hiint
FUSER_INLINE int __double2hiint(double v) { return static_cast<int>(fuser_bit_cast<long long>(v) >> 32); }

//@ __double2loint
FUSER_INLINE int __double2loint(double v) { return static_cast<int>(fuser_bit_cast<long long>(v)); }

//@ __hiloint2double
FUSER_INLINE double __hiloint2double(int hi, int lo) {
  const unsigned long long high = static_cast<unsigned>(hi), low = static_cast<unsigned>(lo);
  return fuser_bit_cast<double>(high << 32 | low);
}

//@ memcpy
extern "C" void* memcpy(void*, const void*, size_t) noexcept;

//@ memset
extern "C" void* memset(void*, int, size_t) noexcept;

//@ NULL
#define NULL __null

//@ FUSER_VECTORS
// CUDA's vector types, which are no more than their fields.
#define FUSER_VECTORS(name, T) \
  struct name##1 { T x; }; \
  struct name##2 { T x, y; }; \
  struct name##3 { T x, y, z; }; \
  struct name##4 { T x, y, z, w; }; \
  FUSER_INLINE name##1 make_##name##1(T x) { return {x}; } \
  FUSER_INLINE name##2 make_##name##2(T x, T y) { return {x, y}; } \
  FUSER_INLINE name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  FUSER_INLINE name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

//@ char1 make_char1 char2 make_char2 char3 make_char3 char4 make_char4
FUSER_VECTORS(char, signed char)

//@ uchar1 make_uchar1 uchar2 make_uchar2 uchar3 make_uchar3 uchar4 make_uchar4
FUSER_VECTORS(uchar, unsigned char)

//@ short1 make_short1 short2 make_short2 short3 make_short3 short4 make_short4
FUSER_VECTORS(short, short)

//@ ushort1 make_ushort1 ushort2 make_ushort2 ushort3 make_ushort3 ushort4 make_ushort4
FUSER_VECTORS(ushort, unsigned short)

//@ int1 make_int1 int2 make_int2 int3 make_int3 int4 make_int4
FUSER_VECTORS(int, int)

//@ uint1 make_uint1 uint2 make_uint2 uint3 make_uint3 uint4 make_uint4
FUSER_VECTORS(uint, unsigned int)

//@ long1 make_long1 long2 make_long2 long3 make_long3 long4 make_long4
FUSER_VECTORS(long, long)

//@ ulong1 make_ulong1 ulong2 make_ulong2 ulong3 make_ulong3 ulong4 make_ulong4
FUSER_VECTORS(ulong, unsigned long)

//@ longlong1 make_longlong1 longlong2 make_longlong2 longlong3 make_longlong3 longlong4 make_longlong4
FUSER_VECTORS(longlong, long long)

//@ ulonglong1 make_ulonglong1 ulonglong2 make_ulonglong2 ulonglong3 make_ulonglong3 ulonglong4 make_ulonglong4
FUSER_VECTORS(ulonglong, unsigned long long)

//@ float1 make_float1 float2 make_float2 float3 make_float3 float4 make_float4
FUSER_VECTORS(float, float)

//@ double1 make_double1 double2 make_double2 double3 make_double3 double4 make_double4
FUSER_VECTORS(double, double)

//@ printf
extern "C" int printf(const char*, ...);

//@ assert
extern "C" int printf(const char*, ...);
#define assert(condition) \
  ((condition) ? static_cast<void>(0) \
               : (static_cast<void>(printf("Assertion `%s' failed.\n", #condition)), __builtin_abort()))

//@ fuser_below fuser_choose
// Of numbers below 2^31: all bits where the first one is the smaller one. By masks: of branches on what is computed
// beside them gcc 12 makes some that it cannot vectorise.
FUSER_INLINE unsigned fuser_below(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<int>(a - b) >> 31); }
FUSER_INLINE unsigned fuser_choose(unsigned mask, unsigned yes, unsigned no) { return (yes & mask) | (no & ~mask); }

//@ fuser_half_bits fuser_half_value
// Integer code: gcc 12 does not vectorise conversions from and to _Float16, and this it does. Adding 1/2, whose last bit
// is the lowest of half's denormals, rounds to those; they are what 2^-14 has been added to. No float denormal takes
// part.
FUSER_INLINE unsigned short fuser_half_bits(float v) {
  const unsigned u = fuser_bit_cast<unsigned>(v), m = u & 0x7fffffffu;
  const unsigned denormal = fuser_bit_cast<unsigned>(fuser_bit_cast<float>(m) + 0.5f) - 0x3f000000u;
  const unsigned normal = (m + (0xc8000fffu + (m >> 13 & 1u))) >> 13;
  const unsigned finite = fuser_choose(fuser_below(m, 0x38800000u), denormal, normal);
  const unsigned other = 0x7c00u | (fuser_below(0x7f800000u, m) & 0x200u);
  const unsigned code = fuser_choose(fuser_below(m, 0x47800000u), finite, other);
  return static_cast<unsigned short>(code | (u >> 16 & 0x8000u));
}
FUSER_INLINE float fuser_half_value(unsigned short bits) {
  const unsigned m = (bits & 0x7fffu) << 13;
  const float least = fuser_bit_cast<float>(0x38800000u), above = fuser_bit_cast<float>(m + 0x38800000u);
  const unsigned rebased = m + 0x38000000u + (~fuser_below(m, 0xf800000u) & 0x38000000u);
  const unsigned u = fuser_choose(fuser_below(m, 0x800000u), fuser_bit_cast<unsigned>(above - least), rebased);
  return fuser_bit_cast<float>(u | static_cast<unsigned>(bits & 0x8000u) << 16);
}

//@ fuser_bfloat16_bits
FUSER_INLINE unsigned short fuser_bfloat16_bits(float v) {
  const unsigned u = fuser_bit_cast<unsigned>(v);
  // Of what was read and only copied the compiler knows the lower half.
  if (__builtin_constant_p(u & 0xffffu) && (u & 0xffffu) == 0) return static_cast<unsigned short>(u >> 16);
  const unsigned rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  return static_cast<unsigned short>(v != v ? 0x7fc0u : rounded);
}
