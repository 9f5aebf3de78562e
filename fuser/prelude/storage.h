// Small floats. Arithmetic happens in float; these structs hold the raw bits. Conversions round to nearest even and
// give what torch gives for every input, but for the payload of a NaN.
//
// fuser_half_bits, fuser_half_value and fuser_bfloat16_bits belong to the dialect: there is an instruction for each.

//@ always if bfloat16
struct fuser_bfloat16 { uint16_t bits; };
FUSER_INLINE float fuser_to_compute(fuser_bfloat16 s) { return __uint_as_float(static_cast<uint32_t>(s.bits) << 16); }
template <> struct fuser_storage<fuser_bfloat16> {
  template <typename C> static FUSER_INLINE fuser_bfloat16 from(C v) {
    return {fuser_bfloat16_bits(fuser_cast<float>(v))};
  }
};

//@ always if half
struct fuser_half { uint16_t bits; };
FUSER_INLINE float fuser_to_compute(fuser_half s) { return fuser_half_value(s.bits); }
template <> struct fuser_storage<fuser_half> {
  template <typename C> static FUSER_INLINE fuser_half from(C v) {
    return {fuser_half_bits(fuser_cast<float>(v))};
  }
};

//@ fuser_encode
// Code of |v| in a format with the given mantissa bits and exponent bias, rounded to nearest even as one integer;
// whatever is too large comes out larger than the largest finite code, never wrapped. NaN and infinity are the
// caller's.
template <int mantissa_bits, int bias> FUSER_INLINE uint32_t fuser_encode(uint32_t magnitude) {
  constexpr int shift = 23 - mantissa_bits;
  constexpr uint32_t smallest_normal = static_cast<uint32_t>(128 - bias) << 23;
  // Adding 2^k puts the lowest denormal bit into the lowest bit of the sum: the float addition does the rounding.
  constexpr uint32_t aligner = static_cast<uint32_t>(128 - bias + shift) << 23;
  const uint32_t denormal = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(aligner)) - aligner;
  const uint32_t odd = (magnitude >> shift) & 1u;
  const uint32_t rebased = magnitude - (static_cast<uint32_t>(127 - bias) << 23);
  const uint32_t normal = (rebased + ((1u << (shift - 1)) - 1u) + odd) >> shift;
  return magnitude < smallest_normal ? denormal : normal;
}

//@ fuser_decode
// Value of a code without its sign, infinities and NaN excepted.
template <int mantissa_bits, int bias> FUSER_INLINE float fuser_decode(uint32_t magnitude) {
  const uint32_t rebased = (magnitude << (23 - mantissa_bits)) + (static_cast<uint32_t>(127 - bias) << 23);
  // 2^(1 - bias - mantissa_bits), the step between denormals. The product is exact, and no float denormal takes part.
  const float step = __uint_as_float(static_cast<uint32_t>(128 - bias - mantissa_bits) << 23);
  const float denormal = static_cast<float>(static_cast<int>(magnitude)) * step;
  return magnitude < (1u << mantissa_bits) ? denormal : __uint_as_float(rebased);
}

//@ always if float8
struct fuser_float8_e4m3fn { uint8_t bits; };
struct fuser_float8_e5m2 { uint8_t bits; };
struct fuser_float8_e4m3fnuz { uint8_t bits; };
struct fuser_float8_e5m2fnuz { uint8_t bits; };
struct fuser_float8_e8m0fnu { uint8_t bits; };

FUSER_INLINE float fuser_signed(float magnitude, uint32_t sign_bit7) {
  return __uint_as_float(__float_as_uint(magnitude) | (sign_bit7 << 24));
}
#ifndef FUSER_HAS_FLOAT8_INSTRUCTIONS
FUSER_INLINE float fuser_to_compute(fuser_float8_e4m3fn s) {
  const uint32_t m = s.bits & 0x7fu;
  return fuser_signed(m == 0x7fu ? NAN : fuser_decode<3, 7>(m), s.bits & 0x80u);
}
FUSER_INLINE float fuser_to_compute(fuser_float8_e5m2 s) {
  const uint32_t m = s.bits & 0x7fu;
  return fuser_signed(m > 0x7cu ? NAN : m == 0x7cu ? INFINITY : fuser_decode<2, 15>(m), s.bits & 0x80u);
}
#endif
// "fnuz": no infinity, no negative zero; its code 0x80 is the only NaN.
FUSER_INLINE float fuser_to_compute(fuser_float8_e4m3fnuz s) {
  return s.bits == 0x80u ? NAN : fuser_signed(fuser_decode<3, 8>(s.bits & 0x7fu), s.bits & 0x80u);
}
FUSER_INLINE float fuser_to_compute(fuser_float8_e5m2fnuz s) {
  return s.bits == 0x80u ? NAN : fuser_signed(fuser_decode<2, 16>(s.bits & 0x7fu), s.bits & 0x80u);
}
// An exponent alone: 2^(code - 127). Code 0 is a float denormal, code 255 is NaN.
FUSER_INLINE float fuser_to_compute(fuser_float8_e8m0fnu s) {
  const uint32_t e = s.bits;
  return __uint_as_float(e == 0u ? 0x00400000u : e == 255u ? 0x7fc00000u : e << 23);
}

// What does not fit becomes `overflow`. For e5m2 that is infinity; for e4m3fn NaN or, in newer versions of torch, the
// largest number: FUSER_E4M3FN_OVERFLOW is what the torch in use does.
template <int mantissa_bits, int bias> FUSER_INLINE uint8_t fuser_float8_bits(float v, uint32_t overflow) {
  const uint32_t u = __float_as_uint(v), m = u & 0x7fffffffu;
  uint32_t code = fuser_encode<mantissa_bits, bias>(m);
  code = (code > overflow) | (m >= 0x7f800000u) ? overflow : code;
  code = m > 0x7f800000u ? 0x7fu : code;
  return static_cast<uint8_t>(code | (u >> 24 & 0x80u));
}
template <int mantissa_bits, int bias> FUSER_INLINE uint8_t fuser_float8_fnuz_bits(float v) {
  const uint32_t u = __float_as_uint(v), m = u & 0x7fffffffu, code = fuser_encode<mantissa_bits, bias>(m);
  const uint32_t with_sign = code == 0u ? 0u : code | (u >> 24 & 0x80u);
  return static_cast<uint8_t>((code > 0x7fu) | (m >= 0x7f800000u) ? 0x80u : with_sign);
}
FUSER_INLINE uint8_t fuser_float8_e8m0fnu_bits(float v) {
  const uint32_t u = __float_as_uint(v), e = u >> 23 & 0xffu, mantissa = u & 0x7fffffu;
  // Half way goes up, as to an even neighbour, except below the smallest power, whose code 0 is even. The sign is
  // dropped.
  const uint32_t up = (mantissa > 0x400000u) | ((mantissa == 0x400000u) & (e > 0u));
  return static_cast<uint8_t>(e == 255u ? 255u : e + up);
}
#ifndef FUSER_HAS_FLOAT8_INSTRUCTIONS
template <> struct fuser_storage<fuser_float8_e4m3fn> {
  template <typename C> static FUSER_INLINE fuser_float8_e4m3fn from(C v) {
    return {fuser_float8_bits<3, 7>(fuser_cast<float>(v), FUSER_E4M3FN_OVERFLOW)};
  }
};
template <> struct fuser_storage<fuser_float8_e5m2> {
  template <typename C> static FUSER_INLINE fuser_float8_e5m2 from(C v) {
    return {fuser_float8_bits<2, 15>(fuser_cast<float>(v), 0x7cu)};
  }
};
#endif
template <> struct fuser_storage<fuser_float8_e4m3fnuz> {
  template <typename C> static FUSER_INLINE fuser_float8_e4m3fnuz from(C v) {
    return {fuser_float8_fnuz_bits<3, 8>(fuser_cast<float>(v))};
  }
};
template <> struct fuser_storage<fuser_float8_e5m2fnuz> {
  template <typename C> static FUSER_INLINE fuser_float8_e5m2fnuz from(C v) {
    return {fuser_float8_fnuz_bits<2, 16>(fuser_cast<float>(v))};
  }
};
template <> struct fuser_storage<fuser_float8_e8m0fnu> {
  template <typename C> static FUSER_INLINE fuser_float8_e8m0fnu from(C v) {
    return {fuser_float8_e8m0fnu_bits(fuser_cast<float>(v))};
  }
};
