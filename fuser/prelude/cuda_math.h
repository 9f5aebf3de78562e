// CUDA dialect: what is added to NVRTC's own math functions.
// A block without text names what NVRTC has and needs nothing for, so that it becomes visible in std:: too.

//@ modf modff nan nanf remquo remquof scalbln scalblnf
//@ fdividef jn jnf yn ynf norm3d norm3df norm4d norm4df rhypot rhypotf rnorm3d rnorm3df rnorm4d rnorm4df

//@ sincos sincosf sincospi sincospif

//@ memcpy memset

//@ each FUSER_PROMOTE_1:  acos acosh asin asinh atan atanh cbrt ceil cos cosh cospi cyl_bessel_i0 cyl_bessel_i1 erf
//@ each FUSER_PROMOTE_1: erfc erfcinv  erfcx erfinv exp exp10 exp2 expm1 fabs floor ilogb j0 j1 lgamma llrint llround
//@ each FUSER_PROMOTE_1: log  log10 log1p log2 logb lrint lround nearbyint normcdf normcdfinv rcbrt rint round rsqrt
//@ each FUSER_PROMOTE_1: sin sinh  sinpi sqrt tan tanh tgamma trunc y0 y1
//@ each FUSER_PROMOTE_2: atan2 copysign fdim fmax fmin fmod hypot nextafter remainder
//@ each FUSER_PROMOTE_3: fma

//@ fuser_brief_exp
// Within 2^-16 of the value, and 0 where a float would be denormal.
template <typename C> FUSER_INLINE C fuser_brief_exp(C v) { return exp(v); }
FUSER_INLINE float fuser_brief_exp(float v) {
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(v * 1.44269504f));
  return v;
}

//@ fuser_by
// How a functor divides: plainly, or floats without a branch, which clears is_exact where that may round otherwise.
struct fuser_plainly {};
struct fuser_quickly { bool is_exact = true; };
template <typename D, bool is_one> struct fuser_way { D& how; };
template <typename A, typename D, bool is_one> struct fuser_dividend { A value; D& how; };
template <bool is_one, typename D> FUSER_INLINE fuser_way<D, is_one> fuser_by(D& how) { return {how}; }
template <typename A, typename D, bool is_one>
FUSER_INLINE fuser_dividend<A, D, is_one> operator/(A value, const fuser_way<D, is_one>& by) {
  return {value, by.how};
}
template <typename A, typename D, bool is_one, typename B>
FUSER_INLINE auto operator/(const fuser_dividend<A, D, is_one>& dividend, B by) { return dividend.value / by; }
// The inverse is that of a division: what is left of 1 is far from 0, or no number, where it is not. The remainder of a
// first quotient corrects that, as a fuser_divisor does.
template <bool is_one>
FUSER_INLINE float operator/(const fuser_dividend<float, fuser_quickly, is_one>& dividend, float by) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(by));
  const float rest = __fmaf_rn(-by, inverse, 1.0f), v = dividend.value;
  inverse = __fmaf_rn(rest, inverse, inverse);
  dividend.how.is_exact &= fabsf(rest) < 0.5f;
  if constexpr (is_one) return inverse;
  const float first = __fmul_rn(v, inverse), made = __fmaf_rn(__fmaf_rn(-by, first, v), inverse, first);
  // Not && and ||, which branch.
  dividend.how.is_exact &= (fabsf(v) > 0x1p-60f & fabsf(made) > 0x1p-100f) | (__float_as_uint(v) == 0);
  return made;
}

//@ always if rows
// Of counts, 1 to 2^24: what __frcp_rn is, without a branch.
FUSER_INLINE float fuser_inverse_of_count(float count) {
  float made;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(count));
  return __fmaf_rn(__fmaf_rn(-count, made, 1.0f), made, made);
}

//@ signbit
FUSER_PROMOTE_1(signbit)

//@ isfinite
FUSER_PROMOTE_1(isfinite)

//@ isinf
FUSER_PROMOTE_1(isinf)

//@ isnan
FUSER_PROMOTE_1(isnan)

//@ pow powf
// NVRTC has pow(float, int) and pow(double, int), which is another algorithm than pow(float, float): keep what short
// integers get from it today.
template <typename A, typename B,
          typename = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B> &&
                                      !(std::is_same_v<A, B> && std::is_floating_point_v<A>)>>
FUSER_INLINE auto pow(A x, B y) {
  if constexpr (std::is_floating_point_v<A> && std::is_integral_v<B> && sizeof(B) < sizeof(int))
    return pow(x, static_cast<int>(y));
  else
    return pow(static_cast<fuser_promote<A, B>>(x), static_cast<fuser_promote<A, B>>(y));
}

//@ abs
template <typename U>
FUSER_INLINE std::enable_if_t<fuser_is_any_of<U, unsigned, unsigned long, unsigned long long>, U> abs(U x) {
  return x;
}

//@ frexp frexpf
template <typename I, typename = std::enable_if_t<std::is_integral_v<I>>>
FUSER_INLINE double frexp(I x, int* e) { return frexp(static_cast<double>(x), e); }

//@ ldexp ldexpf
template <typename I, typename = std::enable_if_t<std::is_integral_v<I>>>
FUSER_INLINE double ldexp(I x, int e) { return ldexp(static_cast<double>(x), e); }

//@ scalbn scalbnf
template <typename I, typename = std::enable_if_t<std::is_integral_v<I>>>
FUSER_INLINE double scalbn(I x, int e) { return scalbn(static_cast<double>(x), e); }
