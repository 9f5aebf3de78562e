// CPU dialect, math functions of config.cpu_math = "precise": right to one unit in the last place.
//
// float goes through double, where libmvec's 4 units are nothing: rounded once more, the result is the nearest float but
// for about one in 2^26. double has no wider vectors: it takes libm's scalar function where that is right to one unit,
// and else libm's function for long double, which is rounded. Neither depends on an element's position: a function's
// vector variants call it lane by lane (FUSER_LANES), and libmvec's are all one (Note [Same bits at every position]).
// No function here bears the name of a builtin: gcc folds nothing.

//@ FUSER_PRECISE_LIBM_1
#define FUSER_PRECISE_LIBM_1(name) \
  extern "C" double fuser_libm_##name(double) FUSER_SYMBOL(#name) FUSER_PURE; \
  FUSER_LANES double fuser_p_##name(double x) { return fuser_libm_##name(x); }

//@ FUSER_PRECISE_LIBM_2
#define FUSER_PRECISE_LIBM_2(name) \
  extern "C" double fuser_libm_##name(double, double) FUSER_SYMBOL(#name) FUSER_PURE; \
  FUSER_LANES double fuser_p_##name(double x, double y) { return fuser_libm_##name(x, y); }

//@ FUSER_PRECISE_LONG_1
// Where long double is double, this is libm's function.
#define FUSER_PRECISE_LONG_1(name) \
  extern "C" long double fuser_libm_##name##l(long double) FUSER_SYMBOL(#name "l") FUSER_PURE; \
  FUSER_LANES double fuser_p_##name(double x) { return static_cast<double>(fuser_libm_##name##l(x)); }

//@ FUSER_PRECISE_MVEC_1
#ifdef FUSER_MVEC_BYTES
#define FUSER_PRECISE_MVEC_1(name) FUSER_MVEC_ONE_1(double, fuser_v_##name, name, "2", "4", "8")
#else
#define FUSER_PRECISE_MVEC_1(name) FUSER_PRECISE_SAME_1(name)
#endif

//@ FUSER_PRECISE_MVEC_2
#ifdef FUSER_MVEC_BYTES
#define FUSER_PRECISE_MVEC_2(name) FUSER_MVEC_ONE_2(double, fuser_v_##name, name, fuser_compute, "2", "4", "8")
#else
#define FUSER_PRECISE_MVEC_2(name) FUSER_PRECISE_SAME_2(name)
#endif

//@ FUSER_PRECISE_SAME_1 FUSER_PRECISE_MVEC_1
#define FUSER_PRECISE_SAME_1(name) \
  FUSER_INLINE double fuser_v_##name(double x) { return fuser_p_##name(x); }

//@ FUSER_PRECISE_SAME_2 FUSER_PRECISE_MVEC_2
#define FUSER_PRECISE_SAME_2(name) \
  FUSER_INLINE double fuser_v_##name(double x, double y) { return fuser_p_##name(x, y); }

//@ FUSER_PRECISE_1
// Of fuser_p_name for double and fuser_v_name for float.
#define FUSER_PRECISE_1(name) \
  FUSER_INLINE float name##f(float x) { return static_cast<float>(fuser_v_##name(static_cast<double>(x))); } \
  FUSER_INLINE float name(float x) { return name##f(x); } \
  FUSER_INLINE double name(double x) { return fuser_p_##name(x); } \
  FUSER_PROMOTE_1(name)

//@ FUSER_PRECISE_2
#define FUSER_PRECISE_2(name) \
  FUSER_INLINE float name##f(float x, float y) { \
    return static_cast<float>(fuser_v_##name(static_cast<double>(x), static_cast<double>(y))); \
  } \
  FUSER_INLINE float name(float x, float y) { return name##f(x, y); } \
  FUSER_INLINE double name(double x, double y) { return fuser_p_##name(x, y); } \
  FUSER_PROMOTE_2(name)
