// CPU dialect: how math functions become vector functions. cpu_math.h uses these macros.
//
// Note [Same bits at every position]
// libmvec's vector functions and libm's scalar ones round differently, and gcc takes the scalar one for the tail of a
// loop and for loops that it cannot vectorise. So that an element's value never depends on its position, kernels call
// our own fuser_m_expf: gcc believes it to be an ordinary function with vector variants (the simd attribute), but its
// scalar form and its narrower variants all call libmvec's *widest* variant on a padded vector, and the widest
// variant *is* libmvec's. One algorithm, all paths. The definitions carry other C++ names than the declaration, and
// meet it by assembler name: gcc would otherwise generate vector variants of its own. The declaration is the C
// library's, under our assembler name: gcc vectorises a call inside a branch only if the function is a builtin.
// What it then folds at compile time (acos of a constant) it rounds correctly: another rounding of the same value, in
// every loop. (-frounding-math forbids that, but makes g++ 12 fill static tables of floats with garbage.) Exact results
// it folds in any case. So those functions are builtins that are exact wherever they can be; not cbrt(27), exp10(2),
// exp2(3), hypot(x, 0) and log10(100), whose functions stay apart. So do sin and cos, which gcc would merge into one
// scalar sincos.

//@ FUSER_SYMBOL
#define FUSER_STRING_(x) #x
#define FUSER_STRING(x) FUSER_STRING_(x)
#define FUSER_SYMBOL(name) __asm__(FUSER_STRING(__USER_LABEL_PREFIX__) name)

//@ FUSER_PURE
#define FUSER_PURE __attribute__((const, nothrow))

//@ FUSER_LANES
// For a function without vector form: its vector variants call it lane by lane, so that the loop around it still
// vectorises.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define FUSER_LANES static __attribute__((simd("notinbranch"), noinline, const, nothrow, unused))
#else
#define FUSER_LANES static inline __attribute__((const, nothrow))
#endif

//@ FUSER_FORWARD_1
#define FUSER_FORWARD_1(name) \
  FUSER_INLINE float name(float x) { return fuser_m_##name##f(x); } \
  FUSER_INLINE double name(double x) { return fuser_m_##name(x); } \
  FUSER_INLINE float name##f(float x) { return fuser_m_##name##f(x); } \
  FUSER_PROMOTE_1(name)

//@ FUSER_FORWARD_2
#define FUSER_FORWARD_2(name) \
  FUSER_INLINE float name(float x, float y) { return fuser_m_##name##f(x, y); } \
  FUSER_INLINE double name(double x, double y) { return fuser_m_##name(x, y); } \
  FUSER_INLINE float name##f(float x, float y) { return fuser_m_##name##f(x, y); } \
  FUSER_PROMOTE_2(name)

//@ FUSER_LIBM_1
#define FUSER_LIBM_1(name) \
  extern "C" float fuser_libm_##name##f(float) FUSER_SYMBOL(#name "f") FUSER_PURE; \
  extern "C" double fuser_libm_##name(double) FUSER_SYMBOL(#name) FUSER_PURE; \
  FUSER_LANES float fuser_m_##name##f(float x) { return fuser_libm_##name##f(x); } \
  FUSER_LANES double fuser_m_##name(double x) { return fuser_libm_##name(x); } \
  FUSER_FORWARD_1(name)

//@ FUSER_LIBM_2
#define FUSER_LIBM_2(name) \
  extern "C" float fuser_libm_##name##f(float, float) FUSER_SYMBOL(#name "f") FUSER_PURE; \
  extern "C" double fuser_libm_##name(double, double) FUSER_SYMBOL(#name) FUSER_PURE; \
  FUSER_LANES float fuser_m_##name##f(float x, float y) { return fuser_libm_##name##f(x, y); } \
  FUSER_LANES double fuser_m_##name(double x, double y) { return fuser_libm_##name(x, y); } \
  FUSER_FORWARD_2(name)

//@ FUSER_MVEC_BYTES
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#if defined(__AVX512F__)
#define FUSER_MVEC_BYTES 64
#define FUSER_MVEC_ISA "e"
#elif defined(__AVX2__)
#define FUSER_MVEC_BYTES 32
#define FUSER_MVEC_ISA "d"
#elif defined(__AVX__)
#define FUSER_MVEC_BYTES 32
#define FUSER_MVEC_ISA "c"
#else
#define FUSER_MVEC_BYTES 16
#define FUSER_MVEC_ISA "b"
#endif
#define FUSER_HIDDEN __attribute__((visibility("hidden"), const, nothrow))
#define FUSER_SIMD __attribute__((simd("notinbranch"), const, nothrow))

template <typename T, int bytes> struct fuser_vector { typedef T type __attribute__((vector_size(bytes))); };
template <typename T> using fuser_widest = typename fuser_vector<T, FUSER_MVEC_BYTES>::type;

// A scalar or a narrow vector, repeated. In registers: what was stored in two pieces, a processor is slow to load in one.
template <typename T, typename Narrow> FUSER_INLINE fuser_widest<T> fuser_widen(Narrow x) {
  fuser_widest<T> wide;
  if constexpr (sizeof x == sizeof(T)) {
    wide = x - fuser_widest<T>{};
  } else if constexpr (sizeof wide == 64) {
    __asm__("vshuff64x2 %2, %g1, %g1, %0" : "=v"(wide) : "v"(x), "i"(sizeof x == 32 ? 0x44 : 0));
  } else {
    __asm__("vinsertf128 $1, %1, %t1, %0" : "=x"(wide) : "x"(x));
  }
  return wide;
}
template <typename Narrow, typename Wide> FUSER_INLINE Narrow fuser_narrow(Wide x) {
  Narrow narrow;
  __builtin_memcpy(&narrow, &x, sizeof narrow);
  return narrow;
}

// Calls of one definition: from (scalar or vector) Narrow to the widest variant and back.
#define FUSER_MVEC_NARROW_1(T, Narrow, cname, wide, symbol) \
  extern "C" FUSER_HIDDEN Narrow cname(Narrow) __asm__(symbol); \
  Narrow cname(Narrow x) { return fuser_narrow<Narrow>(wide(fuser_widen<T>(x))); }
#define FUSER_MVEC_NARROW_2(T, Narrow, cname, wide, symbol) \
  extern "C" FUSER_HIDDEN Narrow cname(Narrow, Narrow) __asm__(symbol); \
  Narrow cname(Narrow x, Narrow y) { return fuser_narrow<Narrow>(wide(fuser_widen<T>(x), fuser_widen<T>(y))); }

// "_ZGV" ISA "N" lanes: the vector ABI's names. b: 16 bytes, c: 32 (AVX), d: 32 (AVX2), e: 64; a variant of a type of
// L lanes in 16 bytes has L, 2L and 4L.
#define FUSER_ALIAS(from, to) __asm__(".set " from "," to);
#define FUSER_COMMA ,
#define FUSER_MVEC_NARROW_b(k, T, name, args, l1) \
  FUSER_MVEC_NARROW_##k(T, fuser_vector<T FUSER_COMMA 16>::type, fuser_b_##name, fuser_mvec_##name, \
                        "_ZGVbN" l1 args "_fuser_m_" #name)
#define FUSER_MVEC_NARROW_d(k, T, name, args, l2) \
  FUSER_MVEC_NARROW_##k(T, fuser_vector<T FUSER_COMMA 32>::type, fuser_cd_##name, fuser_mvec_##name, \
                        "_ZGVdN" l2 args "_fuser_m_" #name)
#define FUSER_MVEC_ALIAS_c(name, args, l2) \
  FUSER_ALIAS("_ZGVcN" l2 args "_fuser_m_" #name, "_ZGVdN" l2 args "_fuser_m_" #name)

#if FUSER_MVEC_BYTES == 64
#define FUSER_MVEC_WIDEST(l1, l2, l4) l4
#define FUSER_MVEC_NARROWER(k, T, name, args, l1, l2) \
  FUSER_MVEC_NARROW_b(k, T, name, args, l1) \
  FUSER_MVEC_NARROW_d(k, T, name, args, l2) \
  FUSER_MVEC_ALIAS_c(name, args, l2)
#elif FUSER_MVEC_BYTES == 32
#define FUSER_MVEC_WIDEST(l1, l2, l4) l2
#ifdef __AVX2__
#define FUSER_MVEC_NARROWER(k, T, name, args, l1, l2) \
  FUSER_MVEC_NARROW_b(k, T, name, args, l1) FUSER_MVEC_ALIAS_c(name, args, l2)
#else
#define FUSER_MVEC_NARROWER(k, T, name, args, l1, l2) FUSER_MVEC_NARROW_b(k, T, name, args, l1)
#endif
#else
#define FUSER_MVEC_WIDEST(l1, l2, l4) l1
#define FUSER_MVEC_NARROWER(k, T, name, args, l1, l2)
#endif

#define FUSER_MVEC_ONE_1(T, declared, name, l1, l2, l4) \
  extern "C" fuser_widest<T> fuser_mvec_##name(fuser_widest<T>) \
      __asm__("_ZGV" FUSER_MVEC_ISA "N" FUSER_MVEC_WIDEST(l1, l2, l4) "v_" #name) FUSER_PURE; \
  FUSER_ALIAS("_ZGV" FUSER_MVEC_ISA "N" FUSER_MVEC_WIDEST(l1, l2, l4) "v_fuser_m_" #name, \
              "_ZGV" FUSER_MVEC_ISA "N" FUSER_MVEC_WIDEST(l1, l2, l4) "v_" #name) \
  FUSER_MVEC_REST_1(T, declared, name, l1, l2)
#define FUSER_MVEC_REST_1(T, declared, name, l1, l2) \
  extern "C" T declared(T) __asm__("fuser_m_" #name) FUSER_SIMD; \
  FUSER_MVEC_NARROW_1(T, T, fuser_scalar_##name, fuser_mvec_##name, "fuser_m_" #name) \
  FUSER_MVEC_NARROWER(1, T, name, "v", l1, l2)
// `compute` calls the function, which is libmvec's or one lane's, and corrects its result before anybody sees it.
#define FUSER_MVEC_ONE_2(T, declared, name, compute, l1, l2, l4) \
  extern "C" fuser_widest<T> fuser_libmvec_##name(fuser_widest<T>, fuser_widest<T>) \
      __asm__("_ZGV" FUSER_MVEC_ISA "N" FUSER_MVEC_WIDEST(l1, l2, l4) "vv_" #name) FUSER_PURE; \
  FUSER_MVEC_OF_2(T, declared, name, compute, fuser_libmvec_##name, l1, l2, l4)
#define FUSER_MVEC_OF_2(T, declared, name, compute, function, l1, l2, l4) \
  extern "C" T declared(T, T) __asm__("fuser_m_" #name) FUSER_SIMD; \
  extern "C" FUSER_HIDDEN fuser_widest<T> fuser_mvec_##name(fuser_widest<T>, fuser_widest<T>) \
      __asm__("_ZGV" FUSER_MVEC_ISA "N" FUSER_MVEC_WIDEST(l1, l2, l4) "vv_fuser_m_" #name); \
  fuser_widest<T> fuser_mvec_##name(fuser_widest<T> x, fuser_widest<T> y) { return compute<T>(x, y, function); } \
  FUSER_MVEC_NARROW_2(T, T, fuser_scalar_##name, fuser_mvec_##name, "fuser_m_" #name) \
  FUSER_MVEC_NARROWER(2, T, name, "vv", l1, l2)

template <typename T, typename V> FUSER_INLINE V fuser_compute(V x, V y, V (*function)(V, V)) { return function(x, y); }
// Whether a lane of a mask is set.
template <typename M> FUSER_INLINE bool fuser_any(M mask) {
  const auto words = (fuser_widest<long long>)mask;
  long long any = 0;
  for (unsigned i = 0; i < sizeof words / sizeof any; ++i) any |= words[i];
  return any != 0;
}
// libmvec leaves negative numbers to the scalar function: it gets their magnitude, and the sign is seen to here.
// gcc replaces pow(x, 2), pow(x, -1) and, in vectorised loops alone, pow(x, 0.5) where it knows the exponent: the
// function has to do the same where gcc does not. (torch does so, too; -0 and -infinity have no other square root then.)
template <typename T, typename V> FUSER_INLINE V fuser_compute_pow(V x, V y, V (*function)(V, V)) {
  typedef decltype(x < y) Mask;
  const Mask sign = (Mask)-V{}, negative = (Mask)x & sign;
  V z = function((V)((Mask)x & ~sign), y);
  if (fuser_any(negative)) {
    // Numbers that no integer holds are whole, but for NaN, and even: as is the smallest integer, which they become.
    const T large = static_cast<T>(sizeof(T) == 4 ? 0x1p46 : 0x1p104);
    const Mask whole = __builtin_convertvector(y, Mask);
    const Mask is_whole = (__builtin_convertvector(whole, V) == y) | (y * y >= large);
    const Mask is_finite = x - x == V{}, has_none = is_finite & (x < V{}) & ~is_whole;
    z = has_none ? V{} / V{} : (V)((Mask)z ^ (negative & is_whole & -(whole & 1)));
  }
  const T half = static_cast<T>(0.5), one = 1, two = 2;
  if (__builtin_expect(fuser_any((y == two) | (y == half) | (y == -one)), 0)) {
    for (unsigned i = 0; i < sizeof(V) / sizeof(T); ++i) {
      const T root = static_cast<T>(__builtin_sqrt(static_cast<double>(x[i])));  // the right float for a float, too
      z[i] = y[i] == two ? x[i] * x[i] : y[i] == half ? root : y[i] == -one ? one / x[i] : z[i];
    }
  }
  return z;
}
#endif

//@ FUSER_MVEC_1
#ifdef FUSER_MVEC_BYTES
#define FUSER_MVEC_1(name) \
  FUSER_MVEC_ONE_1(float, name##f, name##f, "4", "8", "16") \
  FUSER_MVEC_ONE_1(double, name, name, "2", "4", "8") \
  FUSER_INLINE float name(float x) { return name##f(x); } \
  FUSER_PROMOTE_1(name)
#else
#define FUSER_MVEC_1 FUSER_LIBM_1
#endif

//@ FUSER_MVEC_OWN_1
// Of which the widest vectors of floats are fuser's own.
#define FUSER_MVEC_OWN_1(name) \
  FUSER_MVEC_REST_1(float, name##f, name##f, "4", "8") \
  FUSER_MVEC_ONE_1(double, name, name, "2", "4", "8") \
  FUSER_INLINE float name(float x) { return name##f(x); } \
  FUSER_PROMOTE_1(name)

//@ FUSER_MVEC_EXP_1
#if defined(FUSER_MVEC_BYTES) && FUSER_MVEC_BYTES == 64
// Half of libmvec's time, and 1.01 ULP at most (measured over all floats), where that is 2.6 off: 2^n * p(r) with
// x = n * log(2) + r, and an instruction that scales, also to what is subnormal or infinite. Of a polynomial beyond its
// range it makes infinity, which is right above it.
extern "C" FUSER_HIDDEN fuser_widest<float> fuser_mvec_expf(fuser_widest<float>) __asm__("_ZGVeN16v_fuser_m_expf");
fuser_widest<float> fuser_mvec_expf(fuser_widest<float> x) {
  fuser_widest<float> n, p, least = fuser_widest<float>{} - 150.0f;
  __asm__("vmaxps %1, %2, %0" : "=v"(x) : "v"(x), "v"(least));  // NaN stays
  for (int i = 0; i < 16; ++i) {
    n[i] = __builtin_fmaf(x[i], 0x1.715476p0f, 0x1.8p23f) - 0x1.8p23f;
    const float r = __builtin_fmaf(n[i], 0x1.05c610p-29f, __builtin_fmaf(n[i], -0x1.62e430p-1f, x[i]));
    float q = __builtin_fmaf(0x1.6a23d0p-10f, r, 0x1.123a20p-7f);
    q = __builtin_fmaf(q, r, 0x1.5558f2p-5f);
    q = __builtin_fmaf(q, r, 0x1.555492p-3f);
    q = __builtin_fmaf(q, r, 0x1.fffffcp-2f);
    p[i] = __builtin_fmaf(q, r * r, r) + 1.0f;
  }
  __asm__("vscalefps %1, %0, %0" : "+v"(p) : "v"(n));
  return p;
}
#define FUSER_MVEC_EXP_1 FUSER_MVEC_OWN_1
#else
#define FUSER_MVEC_EXP_1 FUSER_MVEC_1
#endif

//@ FUSER_MVEC_ERF_1
#if defined(FUSER_MVEC_BYTES) && FUSER_MVEC_BYTES == 64
// Half of libmvec's time, and 1.75 ULP at most (measured over all floats): polynomials around the multiples of
// 67/256, whose coefficients one instruction looks up, fitted to erf in Chebyshev's points; the first is erf(x) / x - 1.
constexpr fuser_widest<float> fuser_erf_terms[6] = {
    {0x1.06eba8p-3f, 0x1.27a4p-2f, 0x1.14eab4p-1f, 0x1.776148p-1f, 0x1.b8f742p-1f, 0x1.df1e36p-1f, 0x1.f27ff8p-1f,
     0x1.fb194p-1f, 0x1.fe6e18p-1f, 0x1.ff8ea2p-1f, 0x1.ffe3e2p-1f, 0x1.fff9ep-1f, 0x1.fffed4p-1f, 0x1.ffffcep-1f,
     0x1.fffff8p-1f, 0x1p0f},
    {-0x1.57f698p-53f, 0x1.0dbdcp0f, 0x1.b745c6p-1f, 0x1.37e2b8p-1f, 0x1.822e66p-2f, 0x1.a0f50cp-3f, 0x1.888d1ep-4f,
     0x1.42426ep-5f, 0x1.cd5ec8p-7f, 0x1.1ffbd8p-8f, 0x1.397cfp-10f, 0x1.29900cp-12f, 0x1.ec92bp-15f, 0x1.637f88p-17f,
     0x1.bf71b4p-20f, 0x1.eb1268p-23f},
    {-0x1.81261ep-2f, -0x1.1a60d8p-2f, -0x1.cbdaeep-2f, -0x1.e9c10ep-2f, -0x1.9448f8p-2f, -0x1.10d14ap-2f,
     -0x1.34383ep-3f, -0x1.2732d6p-4f, -0x1.e2fe4ep-6f, -0x1.5326ccp-7f, -0x1.9a2dd2p-9f, -0x1.ac3ac6p-11f,
     -0x1.829942p-13f, -0x1.2e33c4p-15f, -0x1.998224p-18f, -0x1.e15df6p-21f},
    {0x1.2a133ap-44f, -0x1.3661ccp-2f, -0x1.08c0b8p-3f, 0x1.83721ap-5f, 0x1.32da8ep-3f, 0x1.510464p-3f,
     0x1.013d02p-3f, 0x1.32d4bep-4f, 0x1.2aa5acp-5f, 0x1.e49a5cp-7f, 0x1.4bc012p-8f, 0x1.8237f6p-10f, 0x1.804eb6p-12f,
     0x1.480f36p-14f, 0x1.e1cd76p-17f, 0x1.30facp-19f},
    {0x1.cb5d8p-4f, 0x1.0b4c58p-3f, 0x1.754b88p-3f, 0x1.1f4e32p-3f, 0x1.b58964p-5f, -0x1.2bbbfep-6f, -0x1.896a72p-5f,
     -0x1.6c1fb6p-5f, -0x1.d0daa8p-6f, -0x1.cc4c9ep-7f, -0x1.719c94p-8f, -0x1.ec317cp-10f, -0x1.134a26p-11f,
     -0x1.04d992p-13f, -0x1.a523bp-16f, -0x1.22d2e2p-18f},
    {-0x1.0f6312p-37f, 0x1.3a6fb8p-4f, 0x1.1b6becp-11f, -0x1.daac8p-5f, -0x1.11edd8p-4f, -0x1.434c82p-5f,
     -0x1.e4919ep-8f, 0x1.49ed3ep-7f, 0x1.a16dfap-7f, 0x1.1dda6cp-7f, 0x1.1c8536p-8f, 0x1.bdb186p-10f,
     0x1.1c615cp-11f, 0x1.2d3c38p-13f, 0x1.0beecp-15f, 0x1.934c8ap-18f},
};
extern "C" FUSER_HIDDEN fuser_widest<float> fuser_mvec_erff(fuser_widest<float>) __asm__("_ZGVeN16v_fuser_m_erff");
fuser_widest<float> fuser_mvec_erff(fuser_widest<float> x) {
  fuser_widest<float> size, step, t, most = fuser_widest<float>{} + 3.95f;
  for (int i = 0; i < 16; ++i) size[i] = __builtin_fabsf(x[i]);
  __asm__("vminps %1, %2, %0" : "=v"(size) : "v"(size), "v"(most));  // NaN stays
  for (int i = 0; i < 16; ++i) step[i] = __builtin_fmaf(size[i], 0x1.e9131ap1f, 0x1.8p23f);
  const auto place = reinterpret_cast<fuser_vector<int, 64>::type>(step);
  step -= 0x1.8p23f;
  for (int i = 0; i < 16; ++i) t[i] = __builtin_fmaf(step[i], -0x1.0cp-2f, size[i]);
  fuser_widest<float> sum = __builtin_shuffle(fuser_erf_terms[5], place);
  for (int k = 4; k >= 0; --k) {
    const fuser_widest<float> term = __builtin_shuffle(fuser_erf_terms[k], place);
    for (int i = 0; i < 16; ++i) sum[i] = __builtin_fmaf(sum[i], t[i], term[i]);
  }
  for (int i = 0; i < 16; ++i) {
    const float value = step[i] == 0.0f ? __builtin_fmaf(size[i], sum[i], size[i]) : sum[i];
    sum[i] = __builtin_copysignf(value, x[i]);
  }
  return sum;
}
#define FUSER_MVEC_ERF_1 FUSER_MVEC_OWN_1
#else
#define FUSER_MVEC_ERF_1 FUSER_MVEC_1
#endif

//@ FUSER_MVEC_APART_1
#ifdef FUSER_MVEC_BYTES
#define FUSER_MVEC_APART_1(name) \
  FUSER_MVEC_ONE_1(float, fuser_m_##name##f, name##f, "4", "8", "16") \
  FUSER_MVEC_ONE_1(double, fuser_m_##name, name, "2", "4", "8") \
  FUSER_FORWARD_1(name)
#else
#define FUSER_MVEC_APART_1 FUSER_LIBM_1
#endif

//@ FUSER_MVEC_2 FUSER_MVEC_POW_2
#ifdef FUSER_MVEC_BYTES
#define FUSER_MVEC_COMPUTED_2(name, compute) \
  FUSER_MVEC_ONE_2(float, name##f, name##f, compute, "4", "8", "16") \
  FUSER_MVEC_ONE_2(double, name, name, compute, "2", "4", "8") \
  FUSER_INLINE float name(float x, float y) { return name##f(x, y); } \
  FUSER_PROMOTE_2(name)
#define FUSER_MVEC_2(name) FUSER_MVEC_COMPUTED_2(name, fuser_compute)
#define FUSER_MVEC_POW_2(name) FUSER_MVEC_COMPUTED_2(name, fuser_compute_pow)
#else
#define FUSER_MVEC_2 FUSER_LIBM_2
#define FUSER_MVEC_POW_2 FUSER_LIBM_2
#endif

//@ FUSER_MVEC_APART_2
#ifdef FUSER_MVEC_BYTES
#define FUSER_MVEC_APART_2(name) \
  FUSER_MVEC_ONE_2(float, fuser_m_##name##f, name##f, fuser_compute, "4", "8", "16") \
  FUSER_MVEC_ONE_2(double, fuser_m_##name, name, fuser_compute, "2", "4", "8") \
  FUSER_FORWARD_2(name)
#else
#define FUSER_MVEC_APART_2 FUSER_LIBM_2
#endif
