// What every kernel has, in both dialects: fixed-width types, constants, traits, promotion and casts. No header is
// included: parsing <cmath> and friends takes longer than compiling the kernel.
//
// A line "//@ a b" opens a block that is emitted when the functors mention a or b (or another emitted block does);
// "//@ always" opens one that is always there; "//@ each MACRO: a b" stands for the blocks "MACRO(a)" and "MACRO(b)".

//@ always
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

#define POS_INFINITY INFINITY
#define NEG_INFINITY (-INFINITY)

namespace std {
using ::size_t;
using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t;
using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t;

template <typename T, T v> struct integral_constant { static constexpr T value = v; typedef T value_type; };
template <bool b> using bool_constant = integral_constant<bool, b>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <typename T, typename U> struct is_same : false_type {};
template <typename T> struct is_same<T, T> : true_type {};
template <typename T, typename U> inline constexpr bool is_same_v = is_same<T, U>::value;
template <bool b, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> { typedef T type; };
template <bool b, typename T = void> using enable_if_t = typename enable_if<b, T>::type;
template <bool b, typename T, typename F> struct conditional { typedef T type; };
template <typename T, typename F> struct conditional<false, T, F> { typedef F type; };
template <bool b, typename T, typename F> using conditional_t = typename conditional<b, T, F>::type;
template <typename T> struct remove_const { typedef T type; };
template <typename T> struct remove_const<const T> { typedef T type; };
template <typename T> struct remove_volatile { typedef T type; };
template <typename T> struct remove_volatile<volatile T> { typedef T type; };
template <typename T> struct remove_cv { typedef typename remove_const<typename remove_volatile<T>::type>::type type; };
template <typename T> using remove_cv_t = typename remove_cv<T>::type;
template <typename T> struct remove_reference { typedef T type; };
template <typename T> struct remove_reference<T&> { typedef T type; };
template <typename T> struct remove_reference<T&&> { typedef T type; };
template <typename T> using remove_reference_t = typename remove_reference<T>::type;
}  // namespace std

template <typename T, typename... Us> inline constexpr bool fuser_is_any_of = (std::is_same_v<T, Us> || ...);

namespace std {
template <typename T> inline constexpr bool is_floating_point_v = fuser_is_any_of<remove_cv_t<T>, float, double>;
template <typename T> inline constexpr bool is_integral_v =
    fuser_is_any_of<remove_cv_t<T>, bool, char, signed char, unsigned char, wchar_t, char16_t, char32_t, short,
                    unsigned short, int, unsigned, long, unsigned long, long long, unsigned long long>;
template <typename T> inline constexpr bool is_arithmetic_v = is_floating_point_v<T> || is_integral_v<T>;
template <typename T> struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <typename T> struct is_integral : bool_constant<is_integral_v<T>> {};
template <typename T> struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
}  // namespace std

// The type in which a two-argument math function works. NVRTC takes (float, integer) as float where C++ says double;
// we follow NVRTC, since functors were written against it. Calls that NVRTC refuses, (float, double) and two
// integers, follow C++: double.
template <typename A, typename B> using fuser_promote = std::conditional_t<
    std::is_same_v<A, double> || std::is_same_v<B, double> || (std::is_integral_v<A> && std::is_integral_v<B>),
    double, float>;

// Integer arguments of math functions become double, as in C++.
#define FUSER_PROMOTE_1(name) \
  template <typename I, typename = std::enable_if_t<std::is_integral_v<I>>> \
  FUSER_INLINE auto name(I x) { return name(static_cast<double>(x)); }

#define FUSER_PROMOTE_2(name) \
  template <typename A, typename B, typename = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B> && \
      !(std::is_same_v<A, B> && std::is_floating_point_v<A>)>> \
  FUSER_INLINE auto name(A x, B y) { \
    return name(static_cast<fuser_promote<A, B>>(x), static_cast<fuser_promote<A, B>>(y)); \
  }

#define FUSER_PROMOTE_3(name) \
  template <typename A, typename B, typename C, \
            typename = std::enable_if_t< \
                std::is_arithmetic_v<A> && std::is_arithmetic_v<B> && std::is_arithmetic_v<C> && \
                !(std::is_same_v<A, B> && std::is_same_v<A, C> && std::is_floating_point_v<A>)>> \
  FUSER_INLINE auto name(A x, B y, C z) { \
    typedef fuser_promote<A, B> P; \
    typedef fuser_promote<std::conditional_t<std::is_integral_v<A> && std::is_integral_v<B>, A, P>, C> Q; \
    return name(static_cast<Q>(x), static_cast<Q>(y), static_cast<Q>(z)); \
  }

// fuser_cast<To>(from): static_cast between any two compute types; complex.h adds the complex ones.
// fuser_truncate (one for each dialect) says what floating point to integer means outside the integer's range, and
// fuser_from_integer what the way back is.
template <typename To, typename From> struct fuser_caster {
  static FUSER_INLINE To cast(From v) {
    if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To> && !std::is_same_v<To, bool>)
      return fuser_truncate<To>(v);
    else if constexpr (std::is_integral_v<From> && std::is_floating_point_v<To>)
      return fuser_from_integer<To>(v);
    else
      return static_cast<To>(v);
  }
};
template <typename To, typename From> FUSER_INLINE To fuser_cast(From v) { return fuser_caster<To, From>::cast(v); }

// Storage types and compute types are the same thing except for the small floats of storage.h.
template <typename T> FUSER_INLINE T fuser_to_compute(T v) { return v; }
template <typename S> struct fuser_storage {
  template <typename C> static FUSER_INLINE S from(C v) { return fuser_cast<S>(v); }
};
template <typename S, typename C> FUSER_INLINE S fuser_from_compute(C v) { return fuser_storage<S>::from(v); }

// A value rounded to what S holds, still in the compute type.
template <typename S> struct fuser_rounder {
  template <typename C> static FUSER_INLINE C round(C v) { return fuser_to_compute(fuser_from_compute<S>(v)); }
};
template <typename S, typename C> FUSER_INLINE C fuser_round(C v) { return fuser_rounder<S>::round(v); }

// The same for a value that is stored, too.
template <typename S> struct fuser_keeper {
  template <typename C> static FUSER_INLINE C keep(C v, S& stored) {
    stored = fuser_from_compute<S>(v);
    return fuser_to_compute(stored);
  }
};
template <typename S, typename C> FUSER_INLINE C fuser_keep(C v, S& stored) {
  return fuser_keeper<S>::keep(v, stored);
}

// Of a value that the type holds exactly.
template <typename S> struct fuser_exact {
  template <typename C> static FUSER_INLINE S from(C v) { return fuser_from_compute<S>(v); }
};
template <typename S, typename C> FUSER_INLINE S fuser_exactly(C v) { return fuser_exact<S>::from(v); }

//@ always if counter
// Stands where a pointer stands: its element at an offset is the offset, so that strides make of it the number of each
// element of a loop.
struct fuser_counter {
  int64_t first = 0;

  FUSER_INLINE int64_t operator[](int64_t offset) const { return first + offset; }
  FUSER_INLINE fuser_counter operator+(int64_t offset) const { return {first + offset}; }
  FUSER_INLINE void operator+=(int64_t offset) { first += offset; }
};

//@ fuser_is_half fuser_is_bfloat16
struct fuser_half;
struct fuser_bfloat16;
template <typename S> constexpr bool fuser_is_half = std::is_same_v<S, fuser_half>;
template <typename S> constexpr bool fuser_is_bfloat16 = std::is_same_v<S, fuser_bfloat16>;

//@ fuser_half_step fuser_bfloat16_step
// ATen computes some ops in the narrow dtype itself, and rounds every step to it: its CUDA kernels in half and bfloat16,
// its CPU kernels in one of them alone. Else a kernel rounds its result alone.
template <typename S, bool is_narrow, typename C> FUSER_INLINE C fuser_step(C v) {
#ifndef __CUDACC__
  if constexpr (!is_narrow) return v;
#endif
  return fuser_round<S>(v);
}
template <typename S, typename C> FUSER_INLINE C fuser_half_step(C v) { return fuser_step<S, fuser_is_half<S>>(v); }
template <typename S, typename C> FUSER_INLINE C fuser_bfloat16_step(C v) {
  return fuser_step<S, fuser_is_bfloat16<S>>(v);
}

//@ min max
// As on CUDA: a NaN argument is dropped. The common type is that of a + b (int for two shorts), as NVRTC's overloads
// give.
template <typename A, typename B, typename = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
FUSER_INLINE auto max(A a, B b) {
  typedef decltype(a + b) C;
  C x = static_cast<C>(a), y = static_cast<C>(b);
  return ((x < y) | (x != x)) ? y : x;
}
template <typename A, typename B, typename = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
FUSER_INLINE auto min(A a, B b) {
  typedef decltype(a + b) C;
  C x = static_cast<C>(a), y = static_cast<C>(b);
  return ((y < x) | (x != x)) ? y : x;
}
// The C++ ones compare and nothing else: std::max(NaN, 1) is NaN.
namespace std {
template <typename T> FUSER_INLINE constexpr T max(const T& a, const T& b) { return a < b ? b : a; }
template <typename T> FUSER_INLINE constexpr T min(const T& a, const T& b) { return b < a ? b : a; }
}  // namespace std

//@ clamp
namespace std {
template <typename T> FUSER_INLINE constexpr T clamp(const T& v, const T& lo, const T& hi) {
  return v < lo ? lo : hi < v ? hi : v;
}
}  // namespace std

//@ always if rows
// An accumulator type's largest value, or its smallest: what infinity means as an identity.
template <typename T> FUSER_INLINE T fuser_end(bool is_upper) {
  if constexpr (std::is_floating_point_v<T>) return is_upper ? T(INFINITY) : -T(INFINITY);
  else if constexpr (std::is_same_v<T, bool>) return is_upper;
  else {
    constexpr T ones = static_cast<T>(~T(0));
    constexpr T top = ones > T(0) ? ones : static_cast<T>(~uint64_t(0) >> (65 - 8 * sizeof(T)));
    return is_upper ? top : ones > T(0) ? T(0) : static_cast<T>(-top - 1);
  }
}
