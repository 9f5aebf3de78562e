// What a host program has from <limits>, <climits>, <cfloat>, <cstdint> and <cmath>: NVRTC has no headers, and none are
// included. Constants, not macros: a functor may define macros, variables and parameters of these names.

//@ numeric_limits
#ifdef __CUDACC__
inline constexpr float fuser_infinity = __builtin_bit_cast(float, 0x7f800000);
inline constexpr float fuser_nan = __builtin_bit_cast(float, 0x7fc00000);
#else
inline constexpr float fuser_infinity = __builtin_inff(), fuser_nan = __builtin_nanf("");
#endif

template <typename T> struct fuser_integer_limits {
  static constexpr bool is_specialized = true, is_integer = true, is_exact = true, is_iec559 = false;
  static constexpr bool is_signed = static_cast<T>(-1) < static_cast<T>(0), has_infinity = false, has_quiet_NaN = false;
  static constexpr int radix = 2, digits = std::is_same_v<T, bool> ? 1 : 8 * static_cast<int>(sizeof(T)) - is_signed;
  static constexpr int digits10 = digits * 30103 / 100000, max_digits10 = 0, min_exponent = 0, max_exponent = 0;
  static FUSER_INLINE constexpr T max() { return static_cast<T>(~uint64_t(0) >> (64 - digits)); }
  static FUSER_INLINE constexpr T lowest() { return static_cast<T>(is_signed ? -max() - 1 : 0); }
  static FUSER_INLINE constexpr T min() { return lowest(); }
  static FUSER_INLINE constexpr T epsilon() { return T(0); }
  static FUSER_INLINE constexpr T denorm_min() { return T(0); }
  static FUSER_INLINE constexpr T infinity() { return T(0); }
  static FUSER_INLINE constexpr T quiet_NaN() { return T(0); }
};

template <typename T> struct fuser_float_limits {
  static constexpr bool is_single = std::is_same_v<T, float>;
  static constexpr bool is_specialized = true, is_integer = false, is_exact = false, is_iec559 = true;
  static constexpr bool is_signed = true, has_infinity = true, has_quiet_NaN = true;
  static constexpr int radix = 2, digits = is_single ? 24 : 53, digits10 = is_single ? 6 : 15;
  static constexpr int max_digits10 = is_single ? 9 : 17, min_exponent = is_single ? -125 : -1021;
  static constexpr int max_exponent = is_single ? 128 : 1024;
  static FUSER_INLINE constexpr T pick(float of_float, double of_double) {
    if constexpr (is_single) return of_float; else return of_double;
  }
  static FUSER_INLINE constexpr T max() { return pick(0x1.fffffep127f, 0x1.fffffffffffffp1023); }
  static FUSER_INLINE constexpr T lowest() { return -max(); }
  static FUSER_INLINE constexpr T min() { return pick(0x1p-126f, 0x1p-1022); }
  static FUSER_INLINE constexpr T epsilon() { return pick(0x1p-23f, 0x1p-52); }
  static FUSER_INLINE constexpr T denorm_min() { return pick(0x1p-149f, 0x1p-1074); }
  static FUSER_INLINE constexpr T infinity() { return fuser_infinity; }
  static FUSER_INLINE constexpr T quiet_NaN() { return fuser_nan; }
};

// A complex number has no limits: asking for one does not compile, where <limits> says 0.
struct fuser_no_limits { static constexpr bool is_specialized = false; };

namespace std {
template <typename T> struct numeric_limits
    : conditional_t<is_integral_v<T>, fuser_integer_limits<T>,
                    conditional_t<is_floating_point_v<T>, fuser_float_limits<T>, fuser_no_limits>> {};
template <typename T> struct numeric_limits<const T> : numeric_limits<T> {};
}  // namespace std

//@ M_E M_LOG2E M_LOG10E M_LN2 M_LN10 M_PI M_PI_2 M_PI_4 M_1_PI M_2_PI M_2_SQRTPI M_SQRT2 M_SQRT1_2
inline constexpr double M_E = 2.7182818284590452354, M_LOG2E = 1.4426950408889634074;
inline constexpr double M_LOG10E = 0.43429448190325182765, M_LN2 = 0.69314718055994530942;
inline constexpr double M_LN10 = 2.30258509299404568402, M_PI = 3.14159265358979323846;
inline constexpr double M_PI_2 = 1.57079632679489661923, M_PI_4 = 0.78539816339744830962;
inline constexpr double M_1_PI = 0.31830988618379067154, M_2_PI = 0.63661977236758134308;
inline constexpr double M_2_SQRTPI = 1.12837916709551257390, M_SQRT2 = 1.41421356237309504880;
inline constexpr double M_SQRT1_2 = 0.70710678118654752440;

//@ FLT_MAX FLT_MIN FLT_EPSILON DBL_MAX DBL_MIN DBL_EPSILON
inline constexpr float FLT_MAX = 0x1.fffffep127f, FLT_MIN = 0x1p-126f, FLT_EPSILON = 0x1p-23f;
inline constexpr double DBL_MAX = 0x1.fffffffffffffp1023, DBL_MIN = 0x1p-1022, DBL_EPSILON = 0x1p-52;

//@ INT_MAX INT_MIN UINT_MAX LLONG_MAX LLONG_MIN ULLONG_MAX
inline constexpr int INT_MAX = 0x7fffffff, INT_MIN = -INT_MAX - 1;
inline constexpr unsigned UINT_MAX = 0xffffffffu;
inline constexpr long long LLONG_MAX = 0x7fffffffffffffffll, LLONG_MIN = -LLONG_MAX - 1;
inline constexpr unsigned long long ULLONG_MAX = 0xffffffffffffffffull;

//@ INT8_MAX INT8_MIN UINT8_MAX INT16_MAX INT16_MIN UINT16_MAX INT32_MAX INT32_MIN UINT32_MAX INT64_MAX INT64_MIN UINT64_MAX
inline constexpr int INT8_MAX = 127, INT8_MIN = -128, UINT8_MAX = 255;
inline constexpr int INT16_MAX = 32767, INT16_MIN = -32768, UINT16_MAX = 65535;
inline constexpr int INT32_MAX = 0x7fffffff, INT32_MIN = -INT32_MAX - 1;
inline constexpr uint32_t UINT32_MAX = 0xffffffffu;
inline constexpr int64_t INT64_MAX = 0x7fffffffffffffffll, INT64_MIN = -INT64_MAX - 1;
inline constexpr uint64_t UINT64_MAX = 0xffffffffffffffffull;
