// CPU dialect: math functions.

//@ FUSER_BUILTIN_1
// One instruction each, exactly rounded.
#define FUSER_BUILTIN_1(name) \
  FUSER_INLINE float name##f(float x) { return __builtin_##name##f(x); } \
  FUSER_INLINE float name(float x) { return __builtin_##name##f(x); } \
  FUSER_INLINE double name(double x) { return __builtin_##name(x); } \
  FUSER_PROMOTE_1(name)

//@ FUSER_INLINE_1
// For the functions below that are written once, as a template fuser_i_name<T>.
#define FUSER_INLINE_1(name) \
  FUSER_INLINE float name##f(float x) { return fuser_i_##name(x); } \
  FUSER_INLINE float name(float x) { return fuser_i_##name(x); } \
  FUSER_INLINE double name(double x) { return fuser_i_##name(x); } \
  FUSER_PROMOTE_1(name)

//@ FUSER_INLINE_2
#define FUSER_INLINE_2(name) \
  FUSER_INLINE float name##f(float x, float y) { return fuser_i_##name(x, y); } \
  FUSER_INLINE float name(float x, float y) { return fuser_i_##name(x, y); } \
  FUSER_INLINE double name(double x, double y) { return fuser_i_##name(x, y); } \
  FUSER_PROMOTE_2(name)

//@ FUSER_LANES_1
// For long functions, written once for double as fuser_d_name: float rounds its result, which is exact enough to be
// right nearly always.
#define FUSER_LANES_1(name) \
  FUSER_LANES float fuser_m_##name##f(float x) { return static_cast<float>(fuser_d_##name(static_cast<double>(x))); } \
  FUSER_LANES double fuser_m_##name(double x) { return fuser_d_##name(x); } \
  FUSER_FORWARD_1(name)

//@ each FUSER_MVEC_1: acos acosh asin asinh atan atanh cosh erfc expm1 log log1p log2 sinh tan tanh
//@ each FUSER_MVEC_EXP_1: exp
//@ each FUSER_MVEC_ERF_1: erf
//@ each FUSER_MVEC_APART_1: cbrt cos exp10 exp2 log10 sin
//@ each FUSER_MVEC_2: atan2
//@ each FUSER_MVEC_POW_2: pow
//@ each FUSER_MVEC_APART_2: hypot
//@ each FUSER_LIBM_1: lgamma logb tgamma j0 j1 y0 y1
//@ each FUSER_LIBM_2: nextafter remainder
//@ each FUSER_BUILTIN_1: ceil fabs floor nearbyint rint sqrt trunc

//@ signbit
FUSER_INLINE int signbit(float x) { return fuser_bit_cast<int>(x) < 0; }
FUSER_INLINE int signbit(double x) { return fuser_bit_cast<long long>(x) < 0; }
FUSER_PROMOTE_1(signbit)

//@ isnan
FUSER_INLINE int isnan(float x) { return x != x; }
FUSER_INLINE int isnan(double x) { return x != x; }
FUSER_PROMOTE_1(isnan)

//@ isinf
FUSER_INLINE int isinf(float x) { return __builtin_fabsf(x) == __builtin_huge_valf(); }
FUSER_INLINE int isinf(double x) { return __builtin_fabs(x) == __builtin_huge_val(); }
FUSER_PROMOTE_1(isinf)

//@ isfinite
FUSER_INLINE int isfinite(float x) { return __builtin_fabsf(x) < __builtin_huge_valf(); }
FUSER_INLINE int isfinite(double x) { return __builtin_fabs(x) < __builtin_huge_val(); }
FUSER_PROMOTE_1(isfinite)

//@ abs
FUSER_INLINE float abs(float x) { return __builtin_fabsf(x); }
FUSER_INLINE double abs(double x) { return __builtin_fabs(x); }
FUSER_INLINE int abs(int x) { return x < 0 ? -x : x; }
FUSER_INLINE long abs(long x) { return x < 0 ? -x : x; }
FUSER_INLINE long long abs(long long x) { return x < 0 ? -x : x; }
template <typename U>
FUSER_INLINE std::enable_if_t<fuser_is_any_of<U, unsigned, unsigned long, unsigned long long>, U> abs(U x) {
  return x;
}

//@ labs llabs
FUSER_INLINE long labs(long x) { return x < 0 ? -x : x; }
FUSER_INLINE long long llabs(long long x) { return x < 0 ? -x : x; }

//@ fma fmaf
FUSER_INLINE float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
FUSER_INLINE float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
FUSER_INLINE double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
FUSER_PROMOTE_3(fma)

//@ fuser_multiply_add
// In ops of torch's: the compiler of ATen's kernels contracts multiply-adds where the CPU has them, and this one none.
template <typename T> FUSER_INLINE T fuser_multiply_add(T x, T y, T z) {
#ifdef __FMA__
  if constexpr (std::is_same_v<T, float>) return __builtin_fmaf(x, y, z);
  if constexpr (std::is_same_v<T, double>) return __builtin_fma(x, y, z);
#endif
  return z + x * y;
}

//@ fuser_negate
// In ops of torch's: of -fma(x, y, z), which the group before may have made, g++ 12 makes -(x * y) - z, whose zeros have
// another sign.
template <typename T> FUSER_INLINE T fuser_negate(T x) {
  if constexpr (std::is_same_v<T, float>) return fuser_bit_cast<float>(fuser_bit_cast<unsigned>(x) ^ 1u << 31);
  if constexpr (std::is_same_v<T, double>)
    return fuser_bit_cast<double>(fuser_bit_cast<unsigned long long>(x) ^ 1ull << 63);
  return -x;
}

//@ copysign copysignf
FUSER_INLINE float copysignf(float x, float y) { return __builtin_copysignf(x, y); }
FUSER_INLINE float copysign(float x, float y) { return __builtin_copysignf(x, y); }
FUSER_INLINE double copysign(double x, double y) { return __builtin_copysign(x, y); }
FUSER_PROMOTE_2(copysign)

//@ fuser_power
// The power of torch's op. Its exponent is one for all elements, so that a branch on it costs once a vector; in the loop
// itself gcc would compute all branches for every element. That it is one gcc has to see: no branch rounds it. Where the
// loop has been written for one exponent (fuser_by_exponent), its formula is all that is left.
template <typename S, typename T> __attribute__((noinline, const, nothrow)) T fuser_exponent(T b) {
  return fuser_round<S>(b);
}
template <typename T, typename V> FUSER_INLINE V fuser_powers(V a, T b) {
  const T size = fabs(b);
  V power = a;
  if (b == 0) return V{} + 1;
  if (size == 2) power = a * a;
  if (b == 3) power = a * a * a;
  if (!((size == 1) | (size == 2) | (b == 3))) {
    T lanes[sizeof a / sizeof b];
    __builtin_memcpy(lanes, &a, sizeof a);
    if (size == T(0.5))
      for (T& lane : lanes) lane = sqrt(lane);
    else
      for (T& lane : lanes) lane = pow(lane, b);
    __builtin_memcpy(&power, lanes, sizeof a);
  }
  return (b == -1) | (b == -2) | (b == T(-0.5)) ? 1 / power : power;
}
#ifdef FUSER_MVEC_BYTES
#define FUSER_MVEC_NARROW_power(T, Narrow, cname, wide, symbol) \
  extern "C" FUSER_HIDDEN Narrow cname(Narrow, T) __asm__(symbol); \
  Narrow cname(Narrow x, T y) { return fuser_narrow<Narrow>(wide(fuser_widen<T>(x), y)); }
#define FUSER_POWER(T, l1, l2, l4) \
  _Pragma("omp declare simd notinbranch uniform(b)") \
  FUSER_HIDDEN T fuser_any_power(T a, T b) __asm__("fuser_m_power_" #T); \
  FUSER_HIDDEN fuser_widest<T> fuser_mvec_power_##T(fuser_widest<T>, T) \
      __asm__("_ZGV" FUSER_MVEC_ISA "N" FUSER_MVEC_WIDEST(l1, l2, l4) "vu_fuser_m_power_" #T); \
  fuser_widest<T> fuser_mvec_power_##T(fuser_widest<T> a, T b) { return fuser_powers(a, b); } \
  FUSER_MVEC_NARROW_power(T, T, fuser_scalar_power_##T, fuser_mvec_power_##T, "fuser_m_power_" #T) \
  FUSER_MVEC_NARROWER(power, T, power_##T, "vu", l1, l2)
FUSER_POWER(float, "4", "8", "16")
FUSER_POWER(double, "2", "4", "8")
#else
template <typename T> FUSER_INLINE T fuser_any_power(T a, T b) { return fuser_powers(a, b); }
#endif
// ATen multiplies bfloat16 in bfloat16, and has no formula for roots of half.
template <typename S, typename T> FUSER_INLINE T fuser_power(T a, T b) {
  const T e = __builtin_constant_p(b) ? b : fuser_exponent<S>(b);
  const T power = __builtin_constant_p(b) ? fuser_powers(a, b) : fuser_any_power(a, e);
  if constexpr (fuser_is_bfloat16<S>) {
    const T square = fuser_round<S>(a * a);
    return e == 3 ? square * a : e == -2 ? 1 / square : power;
  }
  if constexpr (fuser_is_half<S>) {
    const T root = (a == 0) | (a == -INFINITY) ? fabs(a) : power;
    return e == T(0.5) ? root : (e == T(-0.5)) & (root != power) ? 1 / root : power;
  }
  return power;
}
template <typename N, typename F> FUSER_INLINE void fuser_by_exponent(N n, F loop) {
  if constexpr (static_cast<N>(0.5) != 0) {
    if (n == 0.5) return loop(static_cast<N>(0.5));
    if (n == -0.5) return loop(static_cast<N>(-0.5));
  }
  if (n == 2) return loop(static_cast<N>(2));
  if (n == 3) return loop(static_cast<N>(3));
  if (n == -1) return loop(static_cast<N>(-1));
  if (n == -2) return loop(static_cast<N>(-2));
  if (n == 1) return loop(static_cast<N>(1));
  if (n == 0) return loop(static_cast<N>(0));
  loop(n);
}

//@ FUSER_FMOD_2
#if defined(FUSER_MVEC_BYTES) && defined(__FMA__)
// Remainders are exact, so that every right way has libm's bits. A quotient that T holds to its last digit is too large
// by one at most, where it was rounded up to an integer, and the rest of it is a number of T. Other lanes are libm's:
// huge quotients, NaN, infinity by something, something by 0.
template <typename T, typename V> FUSER_INLINE V fuser_compute_fmod(V x, V y, T (*function)(T, T)) {
  constexpr int lanes = sizeof(V) / sizeof(T);
  const T limit = static_cast<T>(sizeof(T) == 4 ? 0x1p24 : 0x1p53);
  T a[lanes], b[lanes], rest[lanes];
  __builtin_memcpy(a, &x, sizeof x);
  __builtin_memcpy(b, &y, sizeof y);
  int is_easy = 1;
  for (int i = 0; i < lanes; ++i) {
    const T size = fabs(a[i]), by = fabs(b[i]), quotient = size / by;
    const T r = fma(-trunc(quotient), by, size);
    rest[i] = copysign(size < by ? size : r < 0 ? r + by : r, a[i]);
    is_easy &= quotient < limit;
  }
  if (__builtin_expect(!is_easy, 0))
    for (int i = 0; i < lanes; ++i) rest[i] = function(a[i], b[i]);
  V z;
  __builtin_memcpy(&z, rest, sizeof z);
  return z;
}
#define FUSER_FMOD_2(name) \
  extern "C" float fuser_libm_##name##f(float, float) FUSER_SYMBOL(#name "f") FUSER_PURE; \
  extern "C" double fuser_libm_##name(double, double) FUSER_SYMBOL(#name) FUSER_PURE; \
  FUSER_MVEC_OF_2(float, fuser_m_##name##f, name##f, fuser_compute_fmod, fuser_libm_##name##f, "4", "8", "16") \
  FUSER_MVEC_OF_2(double, fuser_m_##name, name, fuser_compute_fmod, fuser_libm_##name, "2", "4", "8") \
  FUSER_FORWARD_2(name)
#else
#define FUSER_FMOD_2 FUSER_LIBM_2
#endif

//@ each FUSER_FMOD_2: fmod

//@ round roundf fuser_i_round
// gcc has no instruction for this. What is cut off is exact, and so is adding one.
template <typename T> FUSER_INLINE T fuser_i_round(T x) {
  const T t = trunc(x);
  return t + copysign(static_cast<T>(fabs(x - t) >= static_cast<T>(0.5)), x);
}
FUSER_INLINE_1(round)

//@ fmax fmaxf
// Conditional expressions, of one condition each, also where several are nested: gcc vectorises them, and not its
// builtin.
template <typename T> FUSER_INLINE T fuser_i_fmax(T x, T y) {
  const T most = x < y ? y : x;
  return x != x ? y : most;
}
FUSER_INLINE_2(fmax)

//@ fmin fminf
template <typename T> FUSER_INLINE T fuser_i_fmin(T x, T y) {
  const T least = y < x ? y : x;
  return x != x ? y : least;
}
FUSER_INLINE_2(fmin)

//@ fdim fdimf
template <typename T> FUSER_INLINE T fuser_i_fdim(T x, T y) { return x <= y ? static_cast<T>(0) : x - y; }
FUSER_INLINE_2(fdim)

//@ modf modff
FUSER_INLINE float modff(float x, float* whole) {
  const float t = __builtin_truncf(x);
  *whole = t;
  return __builtin_copysignf(x == t ? 0.0f : x - t, x);
}
FUSER_INLINE double modf(double x, double* whole) {
  const double t = __builtin_trunc(x);
  *whole = t;
  return __builtin_copysign(x == t ? 0.0 : x - t, x);
}
FUSER_INLINE float modf(float x, float* whole) { return modff(x, whole); }

//@ frexp frexpf
extern "C" float fuser_libm_frexpf(float, int*) FUSER_SYMBOL("frexpf");
extern "C" double fuser_libm_frexp(double, int*) FUSER_SYMBOL("frexp");
FUSER_INLINE float frexpf(float x, int* e) { return fuser_libm_frexpf(x, e); }
FUSER_INLINE float frexp(float x, int* e) { return fuser_libm_frexpf(x, e); }
FUSER_INLINE double frexp(double x, int* e) { return fuser_libm_frexp(x, e); }
template <typename I, typename = std::enable_if_t<std::is_integral_v<I>>>
FUSER_INLINE double frexp(I x, int* e) { return fuser_libm_frexp(static_cast<double>(x), e); }

//@ ldexp ldexpf
extern "C" float fuser_libm_ldexpf(float, int) FUSER_SYMBOL("ldexpf") FUSER_PURE;
extern "C" double fuser_libm_ldexp(double, int) FUSER_SYMBOL("ldexp") FUSER_PURE;
FUSER_INLINE float ldexpf(float x, int e) { return fuser_libm_ldexpf(x, e); }
FUSER_INLINE float ldexp(float x, int e) { return fuser_libm_ldexpf(x, e); }
FUSER_INLINE double ldexp(double x, int e) { return fuser_libm_ldexp(x, e); }
template <typename I, typename = std::enable_if_t<std::is_integral_v<I>>>
FUSER_INLINE double ldexp(I x, int e) { return fuser_libm_ldexp(static_cast<double>(x), e); }

//@ scalbn scalbnf
extern "C" float fuser_libm_scalbnf(float, int) FUSER_SYMBOL("scalbnf") FUSER_PURE;
extern "C" double fuser_libm_scalbn(double, int) FUSER_SYMBOL("scalbn") FUSER_PURE;
FUSER_INLINE float scalbnf(float x, int e) { return fuser_libm_scalbnf(x, e); }
FUSER_INLINE float scalbn(float x, int e) { return fuser_libm_scalbnf(x, e); }
FUSER_INLINE double scalbn(double x, int e) { return fuser_libm_scalbn(x, e); }
template <typename I, typename = std::enable_if_t<std::is_integral_v<I>>>
FUSER_INLINE double scalbn(I x, int e) { return fuser_libm_scalbn(static_cast<double>(x), e); }

//@ scalbln scalblnf
extern "C" float fuser_libm_scalblnf(float, long) FUSER_SYMBOL("scalblnf") FUSER_PURE;
extern "C" double fuser_libm_scalbln(double, long) FUSER_SYMBOL("scalbln") FUSER_PURE;
FUSER_INLINE float scalblnf(float x, long e) { return fuser_libm_scalblnf(x, e); }
FUSER_INLINE float scalbln(float x, long e) { return fuser_libm_scalblnf(x, e); }
FUSER_INLINE double scalbln(double x, long e) { return fuser_libm_scalbln(x, e); }

//@ remquo remquof
extern "C" float fuser_libm_remquof(float, float, int*) FUSER_SYMBOL("remquof");
extern "C" double fuser_libm_remquo(double, double, int*) FUSER_SYMBOL("remquo");
FUSER_INLINE float remquof(float x, float y, int* q) { return fuser_libm_remquof(x, y, q); }
FUSER_INLINE float remquo(float x, float y, int* q) { return fuser_libm_remquof(x, y, q); }
FUSER_INLINE double remquo(double x, double y, int* q) { return fuser_libm_remquo(x, y, q); }

//@ ilogb ilogbf
extern "C" int fuser_libm_ilogbf(float) FUSER_SYMBOL("ilogbf") FUSER_PURE;
extern "C" int fuser_libm_ilogb(double) FUSER_SYMBOL("ilogb") FUSER_PURE;
FUSER_INLINE int ilogbf(float x) { return fuser_libm_ilogbf(x); }
FUSER_INLINE int ilogb(float x) { return fuser_libm_ilogbf(x); }
FUSER_INLINE int ilogb(double x) { return fuser_libm_ilogb(x); }
FUSER_PROMOTE_1(ilogb)

//@ nan nanf
FUSER_INLINE double nan(const char*) { return __builtin_nan(""); }
FUSER_INLINE float nanf(const char*) { return __builtin_nanf(""); }

//@ FUSER_TO_INTEGER
#define FUSER_TO_INTEGER(name, result, rounded) \
  FUSER_INLINE result name##f(float x) { return static_cast<result>(rounded(x)); } \
  FUSER_INLINE result name(float x) { return static_cast<result>(rounded(x)); } \
  FUSER_INLINE result name(double x) { return static_cast<result>(rounded(x)); } \
  FUSER_PROMOTE_1(name)

//@ lrint lrintf
FUSER_TO_INTEGER(lrint, long, rint)

//@ llrint llrintf
FUSER_TO_INTEGER(llrint, long long, rint)

//@ lround lroundf
FUSER_TO_INTEGER(lround, long, round)

//@ llround llroundf
FUSER_TO_INTEGER(llround, long long, round)

//@ jn jnf
extern "C" float fuser_libm_jnf(int, float) FUSER_SYMBOL("jnf") FUSER_PURE;
extern "C" double fuser_libm_jn(int, double) FUSER_SYMBOL("jn") FUSER_PURE;
FUSER_INLINE float jnf(int n, float x) { return fuser_libm_jnf(n, x); }
FUSER_INLINE float jn(int n, float x) { return fuser_libm_jnf(n, x); }
FUSER_INLINE double jn(int n, double x) { return fuser_libm_jn(n, x); }

//@ yn ynf
extern "C" float fuser_libm_ynf(int, float) FUSER_SYMBOL("ynf") FUSER_PURE;
extern "C" double fuser_libm_yn(int, double) FUSER_SYMBOL("yn") FUSER_PURE;
FUSER_INLINE float ynf(int n, float x) { return fuser_libm_ynf(n, x); }
FUSER_INLINE float yn(int n, float x) { return fuser_libm_ynf(n, x); }
FUSER_INLINE double yn(int n, double x) { return fuser_libm_yn(n, x); }

//@ rsqrt rsqrtf
template <typename T> FUSER_INLINE T fuser_i_rsqrt(T x) { return static_cast<T>(1) / sqrt(x); }
FUSER_INLINE_1(rsqrt)

//@ rcbrt rcbrtf
template <typename T> FUSER_INLINE T fuser_i_rcbrt(T x) { return static_cast<T>(1) / cbrt(x); }
FUSER_INLINE_1(rcbrt)

//@ rhypot rhypotf
// NVRTC has this and the norms without float overloads: float arguments give double, here too.
FUSER_INLINE float rhypotf(float x, float y) { return 1.0f / hypotf(x, y); }
FUSER_INLINE double rhypot(double x, double y) { return 1.0 / hypot(x, y); }

//@ norm3d norm3df
FUSER_INLINE float norm3df(float x, float y, float z) { return hypotf(hypotf(x, y), z); }
FUSER_INLINE double norm3d(double x, double y, double z) { return hypot(hypot(x, y), z); }

//@ rnorm3d rnorm3df
FUSER_INLINE float rnorm3df(float x, float y, float z) { return 1.0f / hypotf(hypotf(x, y), z); }
FUSER_INLINE double rnorm3d(double x, double y, double z) { return 1.0 / hypot(hypot(x, y), z); }

//@ norm4d norm4df
FUSER_INLINE float norm4df(float a, float b, float c, float d) { return hypotf(hypotf(a, b), hypotf(c, d)); }
FUSER_INLINE double norm4d(double a, double b, double c, double d) { return hypot(hypot(a, b), hypot(c, d)); }

//@ rnorm4d rnorm4df
FUSER_INLINE float rnorm4df(float a, float b, float c, float d) { return 1.0f / hypotf(hypotf(a, b), hypotf(c, d)); }
FUSER_INLINE double rnorm4d(double a, double b, double c, double d) { return 1.0 / hypot(hypot(a, b), hypot(c, d)); }

//@ fuser_sincospi
// sin and cos of pi x: x less the nearest multiple of 2 and then of 1/2 is exact, and the quadrant says which of the two
// is which.
template <typename T> struct fuser_sincospi {
  T sine, cosine;
  static FUSER_INLINE fuser_sincospi<T> of(T x) {
    const T turn = x - 2 * rint(x * static_cast<T>(0.5));
    const T halves = rint(turn + turn), quadrant = halves < 0 ? halves + 4 : halves;
    const T angle = (turn - halves * static_cast<T>(0.5)) * static_cast<T>(3.14159265358979323846);
    const T s = sin(angle), c = cos(angle);
    const bool swap = (quadrant == 1) | (quadrant == 3);
    const T a = swap ? c : s, b = swap ? s : c;
    const T sine = a == 0 ? static_cast<T>(0) * x : quadrant >= 2 ? -a : a;
    // Adding zero makes a negative zero positive, as IEEE 754 wants cospi's.
    return {sine, ((quadrant == 1) | (quadrant == 2) ? -b : b) + static_cast<T>(0)};
  }
};

//@ sinpi sinpif
template <typename T> FUSER_INLINE T fuser_i_sinpi(T x) { return fuser_sincospi<T>::of(x).sine; }
FUSER_INLINE_1(sinpi)

//@ cospi cospif
template <typename T> FUSER_INLINE T fuser_i_cospi(T x) { return fuser_sincospi<T>::of(x).cosine; }
FUSER_INLINE_1(cospi)

//@ sincos sincosf
FUSER_INLINE void sincosf(float x, float* s, float* c) { *s = sinf(x); *c = cosf(x); }
FUSER_INLINE void sincos(float x, float* s, float* c) { *s = sinf(x); *c = cosf(x); }
FUSER_INLINE void sincos(double x, double* s, double* c) { *s = sin(x); *c = cos(x); }

//@ sincospi sincospif
template <typename T> FUSER_INLINE void fuser_i_sincospi(T x, T* s, T* c) {
  const fuser_sincospi<T> both = fuser_sincospi<T>::of(x);
  *s = both.sine;
  *c = both.cosine;
}
FUSER_INLINE void sincospif(float x, float* s, float* c) { fuser_i_sincospi(x, s, c); }
FUSER_INLINE void sincospi(float x, float* s, float* c) { fuser_i_sincospi(x, s, c); }
FUSER_INLINE void sincospi(double x, double* s, double* c) { fuser_i_sincospi(x, s, c); }

//@ fuser_erf_inverse fuser_erfc_inverse
// Halley's method, which triples the correct digits, from a starting value within 1 %.
// For |y| < 1/2: the first terms of erf's inverse series. Relative accuracy down to zero.
FUSER_INLINE double fuser_erf_inverse(double y) {
  double x = y * (0.886226925452758014 + y * y * 0.232013666534654499);
  for (int k = 0; k < 3; ++k) {
    const double error = erf(x) - y;
    x -= error / (1.12837916709551257 * exp(-x * x) + x * error);
  }
  return x;
}
// For 0 <= p <= 1/2: the rational function of Abramowitz and Stegun 26.2.22, as in Numerical Recipes, section 6.2.2.
FUSER_INLINE double fuser_erfc_inverse(double p) {
  const double t = sqrt(-2.0 * log(0.5 * p));
  double x = -0.70711 * ((2.30753 + t * 0.27061) / (1.0 + t * (0.99229 + t * 0.04481)) - t);
  for (int k = 0; k < 3; ++k) {
    const double error = erfc(x) - p;
    x += error / (1.12837916709551257 * exp(-x * x) - x * error);
  }
  // Where erfc(x) is denormal and has few digits: Newton's method for its logarithm, by its asymptotic series.
  for (int k = 0; p < 1e-290 && k < 3; ++k) {
    const double r = 0.5 / (x * x), series = 1 - r * (1 - 3 * r * (1 - 5 * r * (1 - 7 * r * (1 - 9 * r))));
    const double scaled = 0.56418958354775628695 / x * series;
    x += (log(scaled) - x * x - log(p)) * 0.886226925452758014 * scaled;
  }
  return p == 0.0 ? __builtin_huge_val() : x;
}

//@ erfinv erfinvf
FUSER_INLINE double fuser_d_erfinv(double y) {
  const double a = __builtin_fabs(y);
  return a < 0.5 ? fuser_erf_inverse(y) : __builtin_copysign(fuser_erfc_inverse(1.0 - a), y);
}
FUSER_LANES_1(erfinv)

//@ erfcinv erfcinvf fuser_d_erfcinv
FUSER_INLINE double fuser_d_erfcinv(double y) {
  return y <= 0.5 ? fuser_erfc_inverse(y) : y < 1.5 ? fuser_erf_inverse(1.0 - y) : -fuser_erfc_inverse(2.0 - y);
}
FUSER_LANES_1(erfcinv)

//@ normcdfinv normcdfinvf
FUSER_INLINE double fuser_d_normcdfinv(double p) { return 0.0 - 1.41421356237309505 * fuser_d_erfcinv(2.0 * p); }
FUSER_LANES_1(normcdfinv)

//@ normcdf normcdff
// erfc(-x / sqrt(2)) / 2. Far out, erfc magnifies the rounding of its argument by the argument squared: take it back
// to first order.
FUSER_INLINE double fuser_d_normcdf(double x) {
  const double root = -0.70710678118654752440, rest = 4.833646656726456726e-17;
  const double z = x * root, lost = __builtin_fma(x, root, -z) + x * rest;
  const double correction = 0.56418958354775628695 * exp(-z * z) * lost;
  return 0.5 * erfc(z) - (z > -6.0 && z < 28.0 ? correction : 0.0);
}
FUSER_LANES_1(normcdf)

//@ erfcx erfcxf
// exp(x^2) erfc(x); beyond 25 the asymptotic series, whose next term is below 1e-17. The rounding of x^2 is taken back.
FUSER_INLINE double fuser_d_erfcx(double x) {
  const double square = x * x, lost = __builtin_fma(x, x, -square), r = 0.5 / square;
  const double series = 0.56418958354775628695 / x * (1 - r * (1 - 3 * r * (1 - 5 * r * (1 - 7 * r * (1 - 9 * r)))));
  const double near = exp(square) * erfc(x);
  return x > 25.0 ? series : near == __builtin_huge_val() ? near : near + near * lost;
}
FUSER_LANES_1(erfcx)

//@ fuser_bessel_i
// Modified Bessel functions of order n = 0, 1. Up to 30 the power series, all of whose terms are positive; beyond,
// the asymptotic one (Abramowitz and Stegun 9.6.10 and 9.7.1). exp(x) is taken in two halves since it overflows
// before the result does.
template <int n> FUSER_INLINE double fuser_bessel_i(double x) {
  const double a = __builtin_fabs(x);
  double term = 1.0, sum = 1.0;
  if (a <= 30.0) {
    const double q = 0.25 * a * a;
    for (int k = 1; k < 200 && term > sum * 1e-18; ++k) {
      term *= q / (k * static_cast<double>(k + n));
      sum += term;
    }
    return n == 0 ? sum : 0.5 * x * sum;
  }
  for (int k = 1; k < 30; ++k) {
    term *= ((2 * k - 1) * static_cast<double>(2 * k - 1) - 4 * n * n) / (8.0 * k * a);
    sum += term;
  }
  const double half = exp(0.5 * a), value = half * (sum / sqrt(6.28318530717958647693 * a)) * half;
  const double size = a > 1e4 ? __builtin_huge_val() : value;
  return n == 0 ? size : __builtin_copysign(size, x);
}

//@ cyl_bessel_i0 cyl_bessel_i0f
FUSER_INLINE double fuser_d_cyl_bessel_i0(double x) { return fuser_bessel_i<0>(x); }
FUSER_LANES_1(cyl_bessel_i0)

//@ cyl_bessel_i1 cyl_bessel_i1f
FUSER_INLINE double fuser_d_cyl_bessel_i1(double x) { return fuser_bessel_i<1>(x); }
FUSER_LANES_1(cyl_bessel_i1)

//@ fdividef
FUSER_INLINE float fdividef(float x, float y) { return x / y; }

//@ __fdividef
FUSER_INLINE float __fdividef(float x, float y) { return x / y; }

//@ __expf
FUSER_INLINE float __expf(float x) { return expf(x); }

//@ __exp10f
FUSER_INLINE float __exp10f(float x) { return exp10f(x); }

//@ __logf
FUSER_INLINE float __logf(float x) { return logf(x); }

//@ __log2f
FUSER_INLINE float __log2f(float x) { return log2f(x); }

//@ __log10f
FUSER_INLINE float __log10f(float x) { return log10f(x); }

//@ __sinf
FUSER_INLINE float __sinf(float x) { return sinf(x); }

//@ __cosf
FUSER_INLINE float __cosf(float x) { return cosf(x); }

//@ __tanf
FUSER_INLINE float __tanf(float x) { return tanf(x); }

//@ __tanhf
FUSER_INLINE float __tanhf(float x) { return tanhf(x); }

//@ __powf
FUSER_INLINE float __powf(float x, float y) { return powf(x, y); }

//@ __sincosf
FUSER_INLINE void __sincosf(float x, float* s, float* c) { *s = sinf(x); *c = cosf(x); }

//@ __saturatef
FUSER_INLINE float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

//@ __fadd_rn
// The _rz, _ru and _rd forms are left out: they would need the rounding mode changed around each operation, and
// compilers move arithmetic across such changes.
FUSER_INLINE float __fadd_rn(float x, float y) { return x + y; }

//@ __fsub_rn
FUSER_INLINE float __fsub_rn(float x, float y) { return x - y; }

//@ __fmul_rn
FUSER_INLINE float __fmul_rn(float x, float y) { return x * y; }

//@ __fdiv_rn
FUSER_INLINE float __fdiv_rn(float x, float y) { return x / y; }

//@ __frcp_rn
FUSER_INLINE float __frcp_rn(float x) { return 1.0f / x; }

//@ __fsqrt_rn
FUSER_INLINE float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }

//@ __frsqrt_rn
// The double result is rounded once more: nearest but for about one in 2^29.
FUSER_INLINE float __frsqrt_rn(float x) { return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x))); }

//@ __fmaf_rn
FUSER_INLINE float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }

//@ __dadd_rn
FUSER_INLINE double __dadd_rn(double x, double y) { return x + y; }

//@ __dsub_rn
FUSER_INLINE double __dsub_rn(double x, double y) { return x - y; }

//@ __dmul_rn
FUSER_INLINE double __dmul_rn(double x, double y) { return x * y; }

//@ __ddiv_rn
FUSER_INLINE double __ddiv_rn(double x, double y) { return x / y; }

//@ __drcp_rn
FUSER_INLINE double __drcp_rn(double x) { return 1.0 / x; }

//@ __dsqrt_rn
FUSER_INLINE double __dsqrt_rn(double x) { return __builtin_sqrt(x); }

//@ __fma_rn
FUSER_INLINE double __fma_rn(double x, double y, double z) { return __builtin_fma(x, y, z); }

//@ FUSER_CONVERTS
// As the CUDA instructions: out of range saturates, NaN gives 0, in 64 bits the highest one.
template <typename To, typename From> FUSER_INLINE To fuser_saturate(From v) {
  constexpr bool is_signed = static_cast<To>(-1) < static_cast<To>(0);
  constexpr To most = static_cast<To>(~0ull >> (64 - 8 * sizeof(To) + is_signed));
  constexpr From half = static_cast<From>(1ull << (8 * sizeof(To) - 1 - is_signed));
  constexpr From least = is_signed ? -2 * half : From(0);
  // What no conversion is defined for is not converted.
  const From inside = (v >= least) & (v < 2 * half) ? v : From(0);
  const To outside = v != v ? sizeof(To) == 8 ? static_cast<To>(1ull << 63) : To(0)
                     : v > least ? most : v < least ? static_cast<To>(least) : To(0);
  return inside == v ? static_cast<To>(inside) : outside;
}
#define FUSER_CONVERTS(From, from, f, To, to) \
  FUSER_INLINE To __##from##2##to##_rn(From x) { return fuser_saturate<To>(__builtin_rint##f(x)); } \
  FUSER_INLINE To __##from##2##to##_rz(From x) { return fuser_saturate<To>(__builtin_trunc##f(x)); } \
  FUSER_INLINE To __##from##2##to##_rd(From x) { return fuser_saturate<To>(__builtin_floor##f(x)); } \
  FUSER_INLINE To __##from##2##to##_ru(From x) { return fuser_saturate<To>(__builtin_ceil##f(x)); }

//@ __float2int_rn __float2int_rz __float2int_rd __float2int_ru
FUSER_CONVERTS(float, float, f, int, int)

//@ __float2uint_rn __float2uint_rz __float2uint_rd __float2uint_ru
FUSER_CONVERTS(float, float, f, unsigned, uint)

//@ __float2ll_rn __float2ll_rz __float2ll_rd __float2ll_ru
FUSER_CONVERTS(float, float, f, long long, ll)

//@ __float2ull_rn __float2ull_rz __float2ull_rd __float2ull_ru
FUSER_CONVERTS(float, float, f, unsigned long long, ull)

//@ __double2int_rn __double2int_rz __double2int_rd __double2int_ru
FUSER_CONVERTS(double, double, , int, int)

//@ __double2uint_rn __double2uint_rz __double2uint_rd __double2uint_ru
FUSER_CONVERTS(double, double, , unsigned, uint)

//@ __double2ll_rn __double2ll_rz __double2ll_rd __double2ll_ru
FUSER_CONVERTS(double, double, , long long, ll)

//@ __double2ull_rn __double2ull_rz __double2ull_rd __double2ull_ru
FUSER_CONVERTS(double, double, , unsigned long long, ull)

//@ __int2float_rn
FUSER_INLINE float __int2float_rn(int x) { return static_cast<float>(x); }

//@ __int2double_rn
FUSER_INLINE double __int2double_rn(int x) { return static_cast<double>(x); }

//@ __uint2float_rn
FUSER_INLINE float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

//@ __uint2double_rn
FUSER_INLINE double __uint2double_rn(unsigned x) { return static_cast<double>(x); }

//@ __ll2float_rn
FUSER_INLINE float __ll2float_rn(long long x) { return static_cast<float>(x); }

//@ __ll2double_rn
FUSER_INLINE double __ll2double_rn(long long x) { return static_cast<double>(x); }

//@ __ull2float_rn
FUSER_INLINE float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }

//@ __ull2double_rn
FUSER_INLINE double __ull2double_rn(unsigned long long x) { return static_cast<double>(x); }

//@ __double2float_rn
FUSER_INLINE float __double2float_rn(double x) { return static_cast<float>(x); }

//@ __popc
FUSER_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }

//@ __popcll
FUSER_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }

//@ __clz
FUSER_INLINE int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }

//@ __clzll
FUSER_INLINE int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }

//@ __ffs
FUSER_INLINE int __ffs(int x) { return __builtin_ffs(x); }

//@ __ffsll
FUSER_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }

//@ __brev
FUSER_INLINE unsigned __brev(unsigned x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(x);
}

//@ __brevll
FUSER_INLINE unsigned long long __brevll(unsigned long long x) {
  const unsigned long long high = __brev(static_cast<unsigned>(x));
  return high << 32 | __brev(static_cast<unsigned>(x >> 32));
}

//@ __umulhi
FUSER_INLINE unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}

//@ __mulhi
FUSER_INLINE int __mulhi(int x, int y) { return static_cast<int>(static_cast<long long>(x) * y >> 32); }

//@ __mul24
FUSER_INLINE int __mul24(int x, int y) {
  const long long a = static_cast<int>(static_cast<unsigned>(x) << 8) >> 8;
  return static_cast<int>(a * (static_cast<int>(static_cast<unsigned>(y) << 8) >> 8));
}

//@ __umul24
FUSER_INLINE unsigned __umul24(unsigned x, unsigned y) { return (x & 0xffffffu) * (y & 0xffffffu); }

//@ fuser_joined
FUSER_INLINE unsigned long long fuser_joined(unsigned low, unsigned high) {
  return static_cast<unsigned long long>(high) << 32 | low;
}

//@ __funnelshift_l
FUSER_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
  return static_cast<unsigned>(fuser_joined(low, high) << (n & 31u) >> 32);
}

//@ __funnelshift_lc
FUSER_INLINE unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned n) {
  return static_cast<unsigned>(fuser_joined(low, high) << (n < 32u ? n : 32u) >> 32);
}

//@ __funnelshift_r
FUSER_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
  return static_cast<unsigned>(fuser_joined(low, high) >> (n & 31u));
}

//@ __funnelshift_rc
FUSER_INLINE unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned n) {
  return static_cast<unsigned>(fuser_joined(low, high) >> (n < 32u ? n : 32u));
}

//@ __byte_perm
FUSER_INLINE unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
  unsigned made = 0;
  for (int slot = 0; slot < 4; ++slot) {
    const unsigned from = which >> 4 * slot & 7u;
    made |= static_cast<unsigned>(fuser_joined(low, high) >> 8 * from & 255u) << 8 * slot;
  }
  return made;
}

//@ __sad
FUSER_INLINE unsigned __sad(int x, int y, unsigned z) {
  const long long difference = static_cast<long long>(x) - y;
  return static_cast<unsigned>(difference < 0 ? -difference : difference) + z;
}

//@ __usad
FUSER_INLINE unsigned __usad(unsigned x, unsigned y, unsigned z) { return (x < y ? y - x : x - y) + z; }

//@ __hadd
FUSER_INLINE int __hadd(int x, int y) { return static_cast<int>((static_cast<long long>(x) + y) >> 1); }

//@ __rhadd
FUSER_INLINE int __rhadd(int x, int y) { return static_cast<int>((static_cast<long long>(x) + y + 1) >> 1); }

//@ __uhadd
FUSER_INLINE unsigned __uhadd(unsigned x, unsigned y) {
  return static_cast<unsigned>((static_cast<unsigned long long>(x) + y) >> 1);
}

//@ __urhadd
FUSER_INLINE unsigned __urhadd(unsigned x, unsigned y) {
  return static_cast<unsigned>((static_cast<unsigned long long>(x) + y + 1) >> 1);
}

//@ __umul64hi
FUSER_INLINE unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}

//@ __mul64hi
FUSER_INLINE long long __mul64hi(long long x, long long y) {
  return static_cast<long long>(static_cast<__int128>(x) * y >> 64);
}

//@ fuser_divide
// See fuser/cxx/division.py. The results are those that RISC-V defines: a quotient by zero has all bits set, and the
// remainder is the dividend; the smallest integer divided by -1 is itself, and leaves 0.
struct fuser_divide_type {};
constexpr fuser_divide_type fuser_divide{};
// By value: a constant that a lambda does not capture may be one.
template <typename L> struct fuser_dividend { L value; };
template <typename R> struct fuser_divisor { R value; };

template <typename L, typename R> FUSER_INLINE constexpr auto fuser_quotient(L l, R r) {
  typedef decltype(l / r) C;
  if constexpr (std::is_integral_v<C> || fuser_is_any_of<C, __int128, unsigned __int128>) {
    const C a = static_cast<C>(l), b = static_cast<C>(r);
    if (b == 0) return static_cast<C>(-1);
    if (static_cast<C>(-1) < 0 && b == static_cast<C>(-1)) {
      C negative = 0;
      __builtin_sub_overflow(static_cast<C>(0), a, &negative);
      return negative;
    }
    return static_cast<C>(a / b);
  } else {
    return l / r;
  }
}

template <typename L, typename R> FUSER_INLINE constexpr auto fuser_modulo(L l, R r) {
  typedef decltype(l % r) C;
  const C a = static_cast<C>(l), b = static_cast<C>(r);
  if (b == 0) return a;
  return static_cast<C>(-1) < 0 && b == static_cast<C>(-1) ? static_cast<C>(0) : static_cast<C>(a % b);
}

#define FUSER_DIVISION(op, function) \
  template <typename L> FUSER_INLINE constexpr fuser_dividend<L> operator op(L l, fuser_divide_type) { \
    return {l}; \
  } \
  template <typename L, typename R> FUSER_INLINE constexpr auto operator op(fuser_dividend<L> l, R r) { \
    return function(l.value, r); \
  } \
  template <typename L, typename R> FUSER_INLINE constexpr auto operator op##=(fuser_dividend<L> l, R r) { \
    return function(l.value, r); \
  } \
  template <typename R> FUSER_INLINE constexpr fuser_divisor<R> operator op##=(fuser_divide_type, R r) { \
    return {r}; \
  } \
  template <typename L, typename R> FUSER_INLINE constexpr L& operator op##=(L& l, fuser_divisor<R> r) { \
    return l = static_cast<L>(function(l, r.value)); \
  }
FUSER_DIVISION(/, fuser_quotient)
FUSER_DIVISION(%, fuser_modulo)
