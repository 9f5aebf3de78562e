// std::complex<T>, shared by both dialects. Layout and alignment of c10::complex: two T, aligned to 2 sizeof(T).
// Products and quotients follow c10 (plain product, quotient scaled as in Smith's method); the elementary functions
// follow W. Kahan, "Branch Cuts for Complex Elementary Functions" (1987), which keeps each component accurate.

//@ always if complex
namespace std {
template <typename T> struct alignas(2 * sizeof(T)) complex {
  typedef T value_type;
  T real_, imag_;

  FUSER_MEMBER constexpr complex(T re = T(), T im = T()) : real_(re), imag_(im) {}
  template <typename U> FUSER_MEMBER constexpr complex(const complex<U>& z)
      : real_(static_cast<T>(z.real_)), imag_(static_cast<T>(z.imag_)) {}

  FUSER_MEMBER constexpr T real() const { return real_; }
  FUSER_MEMBER constexpr T imag() const { return imag_; }
  FUSER_MEMBER void real(T v) { real_ = v; }
  FUSER_MEMBER void imag(T v) { imag_ = v; }

  FUSER_MEMBER complex& operator=(T v) { real_ = v; imag_ = T(); return *this; }
  FUSER_MEMBER complex& operator+=(T v) { real_ += v; return *this; }
  FUSER_MEMBER complex& operator-=(T v) { real_ -= v; return *this; }
  FUSER_MEMBER complex& operator*=(T v) { real_ *= v; imag_ *= v; return *this; }
  FUSER_MEMBER complex& operator/=(T v) { real_ /= v; imag_ /= v; return *this; }
  template <typename U> FUSER_MEMBER complex& operator+=(const complex<U>& z) { return *this = *this + complex(z); }
  template <typename U> FUSER_MEMBER complex& operator-=(const complex<U>& z) { return *this = *this - complex(z); }
  template <typename U> FUSER_MEMBER complex& operator*=(const complex<U>& z) { return *this = *this * complex(z); }
  template <typename U> FUSER_MEMBER complex& operator/=(const complex<U>& z) { return *this = *this / complex(z); }
};

template <typename T> FUSER_INLINE constexpr complex<T> operator+(const complex<T>& z) { return z; }
template <typename T> FUSER_INLINE constexpr complex<T> operator-(const complex<T>& z) { return {-z.real_, -z.imag_}; }
template <typename T> FUSER_INLINE constexpr complex<T> operator+(const complex<T>& z, const complex<T>& w) {
  return {z.real_ + w.real_, z.imag_ + w.imag_};
}
template <typename T> FUSER_INLINE constexpr complex<T> operator-(const complex<T>& z, const complex<T>& w) {
  return {z.real_ - w.real_, z.imag_ - w.imag_};
}
template <typename T> FUSER_INLINE constexpr complex<T> operator*(const complex<T>& z, const complex<T>& w) {
#ifdef __CUDACC__
  return {z.real_ * w.real_ - z.imag_ * w.imag_, z.real_ * w.imag_ + z.imag_ * w.real_};
#else
  // The same without a difference beside a sum, of which g++ 12 and 13 make a fused multiply-add, also where they must
  // contract nothing.
  const T minus = -z.imag_;
  return {z.real_ * w.real_ + minus * w.imag_, z.real_ * w.imag_ + z.imag_ * w.real_};
#endif
}
template <typename T> FUSER_INLINE constexpr complex<T> operator/(const complex<T>& z, const complex<T>& w) {
  const T c = w.real_, d = w.imag_, abs_c = c < 0 ? -c : c, abs_d = d < 0 ? -d : d;
  if (abs_c >= abs_d) {
    if (abs_c == 0 && abs_d == 0) return {z.real_ / abs_c, z.imag_ / abs_d};
    const T ratio = d / c, scale = T(1) / (c + d * ratio);
    return {(z.real_ + z.imag_ * ratio) * scale, (z.imag_ - z.real_ * ratio) * scale};
  }
  const T ratio = c / d, scale = T(1) / (d + c * ratio);
  return {(z.real_ * ratio + z.imag_) * scale, (z.imag_ * ratio - z.real_) * scale};
}
template <typename T> FUSER_INLINE constexpr bool operator==(const complex<T>& z, const complex<T>& w) {
  return z.real_ == w.real_ && z.imag_ == w.imag_;
}
template <typename T> FUSER_INLINE constexpr bool operator!=(const complex<T>& z, const complex<T>& w) {
  return !(z == w);
}

// With a real number of any type, which takes the complex number's precision.
#define FUSER_COMPLEX_MIXED(op, on_left, on_right) \
  template <typename T, typename S, typename = enable_if_t<is_arithmetic_v<S>>> \
  FUSER_INLINE constexpr auto operator op(const complex<T>& z, S s) { \
    const T v = static_cast<T>(s); \
    return on_right; \
  } \
  template <typename T, typename S, typename = enable_if_t<is_arithmetic_v<S>>> \
  FUSER_INLINE constexpr auto operator op(S s, const complex<T>& z) { \
    const T v = static_cast<T>(s); \
    return on_left; \
  }
FUSER_COMPLEX_MIXED(+, (complex<T>(v + z.real_, z.imag_)), (complex<T>(z.real_ + v, z.imag_)))
FUSER_COMPLEX_MIXED(-, (complex<T>(v - z.real_, -z.imag_)), (complex<T>(z.real_ - v, z.imag_)))
FUSER_COMPLEX_MIXED(*, (complex<T>(v * z.real_, v * z.imag_)), (complex<T>(z.real_ * v, z.imag_ * v)))
FUSER_COMPLEX_MIXED(/, (complex<T>(v) / z), (complex<T>(z.real_ / v, z.imag_ / v)))
FUSER_COMPLEX_MIXED(==, (z.real_ == v && z.imag_ == T()), (z.real_ == v && z.imag_ == T()))
FUSER_COMPLEX_MIXED(!=, (z.real_ != v || z.imag_ != T()), (z.real_ != v || z.imag_ != T()))

template <typename T> FUSER_INLINE constexpr T real(const complex<T>& z) { return z.real_; }
template <typename T> FUSER_INLINE constexpr T imag(const complex<T>& z) { return z.imag_; }
template <typename T> FUSER_INLINE constexpr complex<T> conj(const complex<T>& z) { return {z.real_, -z.imag_}; }
template <typename T> FUSER_INLINE constexpr T norm(const complex<T>& z) {
  return z.real_ * z.real_ + z.imag_ * z.imag_;
}

// A real number is a complex one without imaginary part.
template <typename S>
using fuser_real_part = enable_if_t<is_arithmetic_v<S>, conditional_t<is_integral_v<S>, double, S>>;
template <typename S> FUSER_INLINE constexpr fuser_real_part<S> real(S s) { return s; }
template <typename S> FUSER_INLINE constexpr fuser_real_part<S> imag(S) { return 0; }
template <typename S> FUSER_INLINE constexpr complex<fuser_real_part<S>> conj(S s) {
  return {static_cast<fuser_real_part<S>>(s), 0};
}
template <typename S> FUSER_INLINE constexpr fuser_real_part<S> norm(S s) {
  return static_cast<fuser_real_part<S>>(s) * static_cast<fuser_real_part<S>>(s);
}
}  // namespace std

template <typename To, typename U> struct fuser_caster<To, std::complex<U>> {
  static FUSER_INLINE To cast(std::complex<U> z) { return fuser_cast<To>(z.real_); }
};
template <typename U> struct fuser_caster<bool, std::complex<U>> {
  static FUSER_INLINE bool cast(std::complex<U> z) { return z.real_ != 0 || z.imag_ != 0; }
};
template <typename T, typename From> struct fuser_caster<std::complex<T>, From> {
  static FUSER_INLINE std::complex<T> cast(From v) { return {static_cast<T>(v), T()}; }
};
template <typename T, typename U> struct fuser_caster<std::complex<T>, std::complex<U>> {
  static FUSER_INLINE std::complex<T> cast(std::complex<U> z) {
    return {static_cast<T>(z.real_), static_cast<T>(z.imag_)};
  }
};

#ifdef __CUDACC__
template <int use, typename T> struct fuser_isolator<use, std::complex<T>> {
  static FUSER_INLINE std::complex<T> isolate(std::complex<T> z) {
    return {fuser_isolator<use, T>::isolate(z.real_), fuser_isolator<use, T>::isolate(z.imag_)};
  }
};
template <typename T> FUSER_INLINE std::complex<T> fuser_cross(std::complex<T> z, long long zero) {
  return {fuser_cross(z.real_, zero), fuser_cross(z.imag_, zero)};
}
#endif

//@ always if complex half
struct alignas(4) fuser_complex_half { fuser_half real, imag; };
FUSER_INLINE std::complex<float> fuser_to_compute(fuser_complex_half s) {
  return {fuser_to_compute(s.real), fuser_to_compute(s.imag)};
}
template <> struct fuser_storage<fuser_complex_half> {
  template <typename C> static FUSER_INLINE fuser_complex_half from(C v) {
    const std::complex<float> z = fuser_cast<std::complex<float>>(v);
    return {fuser_from_compute<fuser_half>(z.real_), fuser_from_compute<fuser_half>(z.imag_)};
  }
};

//@ abs if complex
namespace std {
template <typename T> FUSER_INLINE T abs(const complex<T>& z) { return ::hypot(z.real_, z.imag_); }
}  // namespace std

//@ arg if complex
namespace std {
template <typename T> FUSER_INLINE T arg(const complex<T>& z) { return ::atan2(z.imag_, z.real_); }
template <typename S> FUSER_INLINE fuser_real_part<S> arg(S s) {
  return ::atan2(fuser_real_part<S>(0), static_cast<fuser_real_part<S>>(s));
}
}  // namespace std

//@ proj if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> proj(const complex<T>& z) {
  return ::isinf(z.real_) || ::isinf(z.imag_) ? complex<T>(INFINITY, ::copysign(T(0), z.imag_)) : z;
}
}  // namespace std

//@ polar if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> polar(const T& r, const T& theta = T()) {
  return {r * ::cos(theta), r * ::sin(theta)};
}
}  // namespace std

//@ exp if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> exp(const complex<T>& z) {
  if (z.imag_ == 0) return {::exp(z.real_), z.imag_};
  if (z.real_ == -INFINITY && !::isfinite(z.imag_)) return {0, 0};
  // In two halves, as exp(x) may overflow where exp(x) cos(y) does not.
  const bool large = z.real_ > 80;
  const T e = ::exp(large ? z.real_ * T(0.5) : z.real_), f = large ? e : T(1);
  if (z.real_ == INFINITY && !::isfinite(z.imag_)) return {z.real_, z.imag_ - z.imag_};
  return {e * ::cos(z.imag_) * f, e * ::sin(z.imag_) * f};
}
}  // namespace std

//@ fuser_log_abs if complex
// log |z| without overflow or underflow of |z|, and by log1p where |z| is close to one.
template <typename T> FUSER_INLINE T fuser_log_abs(std::complex<T> z) {
  const T x = ::fabs(z.real_), y = ::fabs(z.imag_), most = x < y ? y : x, least = x < y ? x : y;
  if (most > T(0.5) && most < T(2) && most * most + least * least < T(3))
    return T(0.5) * ::log1p((most - 1) * (most + 1) + least * least);
  const T scale = most > T(1e30) ? T(0.0625) : most < T(1e-30) ? T(33554432) : T(1);
  const T shift = most > T(1e30) ? T(2.77258872223978124) : most < T(1e-30) ? T(-17.3286795139986326) : T(0);
  return ::log(::hypot(x * scale, y * scale)) + shift;
}

//@ log if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> log(const complex<T>& z) {
  return {fuser_log_abs(z), ::atan2(z.imag_, z.real_)};
}
}  // namespace std

//@ log2 if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> log2(const complex<T>& z) { return log(z) * T(1.44269504088896341); }
}  // namespace std

//@ log10 if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> log10(const complex<T>& z) { return log(z) * T(0.434294481903251828); }
}  // namespace std

//@ sqrt if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> sqrt(const complex<T>& z) {
  const T x = z.real_, y = z.imag_;
  if (::isinf(y)) return {T(INFINITY), y};
  if (x == 0 && y == 0) return {T(0), y};
  if (x == INFINITY) return {x, y == y ? ::copysign(T(0), y) : y};
  if (x == -INFINITY) return {y == y ? T(0) : y, ::copysign(T(INFINITY), y)};
  // Scaled by an even power of two when |z| could overflow or lose bits as a denormal.
  const T most = ::fmax(::fabs(x), ::fabs(y));
  const T scale = most > T(1e30) ? T(0.0625) : most < T(1e-30) ? T(67108864) : T(1);
  const T back = most > T(1e30) ? T(4) : most < T(1e-30) ? T(0.0001220703125) : T(1);
  const T a = x * scale, b = y * scale;
  const T t = ::sqrt(T(0.5) * (::fabs(a) + ::hypot(a, b))), u = ::fabs(b) / (t + t);
  return {(a >= 0 ? t : u) * back, ::copysign((a >= 0 ? u : t) * back, y)};
}
}  // namespace std

//@ pow powf if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> pow(const complex<T>& z, const complex<T>& w) {
  if (w == T(0)) return {T(1), T(0)};
  if (z == T(0)) return w.real_ > 0 ? complex<T>() : exp(w * log(z));
  return exp(w * log(z));
}
template <typename T, typename S, typename = enable_if_t<is_arithmetic_v<S>>>
FUSER_INLINE complex<T> pow(const complex<T>& z, S s) { return pow(z, complex<T>(static_cast<T>(s))); }
template <typename T, typename S, typename = enable_if_t<is_arithmetic_v<S>>>
FUSER_INLINE complex<T> pow(S s, const complex<T>& w) { return pow(complex<T>(static_cast<T>(s)), w); }
}  // namespace std

//@ sinh if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> sinh(const complex<T>& z) {
  if (z.imag_ == 0) return {::sinh(z.real_), z.imag_};
  if (z.real_ == 0) return {z.real_, ::sin(z.imag_)};
  return {::sinh(z.real_) * ::cos(z.imag_), ::cosh(z.real_) * ::sin(z.imag_)};
}
}  // namespace std

//@ cosh if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> cosh(const complex<T>& z) {
  if (z.imag_ == 0) return {::cosh(z.real_), ::copysign(T(1), z.real_) * z.imag_};
  if (z.real_ == 0) return {::cos(z.imag_), z.real_ * ::copysign(T(1), z.imag_)};
  return {::cosh(z.real_) * ::cos(z.imag_), ::sinh(z.real_) * ::sin(z.imag_)};
}
}  // namespace std

//@ tanh if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> tanh(const complex<T>& z) {
  const T x = z.real_, y = z.imag_;
  // Beyond 11 (22 for double) the real part is 1 to the last bit.
  if (::fabs(x) > (sizeof(T) == 4 ? T(11) : T(22))) {
    const T e = ::exp(-::fabs(x));
    return {::copysign(T(1), x), ::isinf(y) ? ::copysign(T(0), y) : T(4) * ::sin(y) * ::cos(y) * e * e};
  }
  const T t = ::tan(y), beta = 1 + t * t, s = ::sinh(x), rho = ::sqrt(1 + s * s), below = 1 + beta * s * s;
  return {beta * rho * s / below, t / below};
}
}  // namespace std

//@ sin if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> sin(const complex<T>& z) {
  const complex<T> w = sinh(complex<T>(-z.imag_, z.real_));
  return {w.imag_, -w.real_};
}
}  // namespace std

//@ cos if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> cos(const complex<T>& z) { return cosh(complex<T>(-z.imag_, z.real_)); }
}  // namespace std

//@ tan if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> tan(const complex<T>& z) {
  const complex<T> w = tanh(complex<T>(-z.imag_, z.real_));
  return {w.imag_, -w.real_};
}
}  // namespace std

//@ fuser_is_huge if complex
// Where 1 - z and 1 + z are -z and z to the last bit and beyond, the inverse functions are log(2z) but for a rotation.
template <typename T> FUSER_INLINE bool fuser_is_huge(std::complex<T> z) {
  const T limit = sizeof(T) == 4 ? T(1e8) : T(1e16);
  return ::fabs(z.real_) > limit || ::fabs(z.imag_) > limit;
}

//@ asin if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> asin(const complex<T>& z) {
  if (fuser_is_huge(z))
    return {::atan2(z.real_, ::fabs(z.imag_)), ::copysign(fuser_log_abs(z) + T(0.693147180559945309), z.imag_)};
  const complex<T> a = sqrt(complex<T>(1 - z.real_, -z.imag_)), b = sqrt(complex<T>(1 + z.real_, z.imag_));
  return {::atan2(z.real_, a.real_ * b.real_ - a.imag_ * b.imag_), ::asinh(a.real_ * b.imag_ - a.imag_ * b.real_)};
}
}  // namespace std

//@ acos if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> acos(const complex<T>& z) {
  if (fuser_is_huge(z))
    return {::atan2(::fabs(z.imag_), z.real_), -::copysign(fuser_log_abs(z) + T(0.693147180559945309), z.imag_)};
  const complex<T> a = sqrt(complex<T>(1 - z.real_, -z.imag_)), b = sqrt(complex<T>(1 + z.real_, z.imag_));
  return {2 * ::atan2(a.real_, b.real_), ::asinh(b.real_ * a.imag_ - b.imag_ * a.real_)};
}
}  // namespace std

//@ acosh if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> acosh(const complex<T>& z) {
  if (fuser_is_huge(z)) return {fuser_log_abs(z) + T(0.693147180559945309), ::atan2(z.imag_, z.real_)};
  const complex<T> a = sqrt(complex<T>(z.real_ - 1, z.imag_)), b = sqrt(complex<T>(z.real_ + 1, z.imag_));
  return {::asinh(a.real_ * b.real_ + a.imag_ * b.imag_), 2 * ::atan2(a.imag_, b.real_)};
}
}  // namespace std

//@ asinh if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> asinh(const complex<T>& z) {
  const complex<T> w = asin(complex<T>(-z.imag_, z.real_));
  return {w.imag_, -w.real_};
}
}  // namespace std

//@ atanh if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> atanh(const complex<T>& z) {
  const T x = ::fabs(z.real_), y = z.imag_;
  if (fuser_is_huge(z)) {
    const T h = ::hypot(x, y);
    return {::isinf(h) ? ::copysign(T(0), z.real_) : z.real_ / h / h, ::copysign(T(1.57079632679489662), y)};
  }
  // Near the poles at 1 and -1 the square of the distance h would underflow, and the logarithm is far from zero.
  const T h = ::hypot(1 - x, y);
  const T re = h < T(0.125) ? T(0.5) * ::log(::hypot(1 + x, y) / h) : T(0.25) * ::log1p(4 * x / (h * h));
  return {::copysign(re, z.real_), T(0.5) * ::atan2(2 * y, (1 - x) * (1 + x) - y * y)};
}
}  // namespace std

//@ atan if complex
namespace std {
template <typename T> FUSER_INLINE complex<T> atan(const complex<T>& z) {
  const complex<T> w = atanh(complex<T>(-z.imag_, z.real_));
  return {w.imag_, -w.real_};
}
}  // namespace std
