// Conversions of the small floats for which a GPU has an instruction that storage.h does not know of.

//@ always if rows
// The larger, or the smaller, one of two pairs of elements, each; of a NaN and a number the number, or, of larger ones
// that are not negative, the NaN.
template <typename S> struct fuser_pairs {
  template <bool is_larger, bool keeps_nan>
  static FUSER_INLINE unsigned int extreme(unsigned int a, unsigned int b) {
    unsigned int found = 0;
#pragma unroll
    for (int shift = 0; shift < 32; shift += 16) {
      const auto own = static_cast<unsigned short>(a >> shift), other = static_cast<unsigned short>(b >> shift);
      const float first = fuser_to_compute(reinterpret_cast<const S&>(own));
      const float second = fuser_to_compute(reinterpret_cast<const S&>(other));
      bool is_other = first != first || (is_larger ? second > first : second < first);
      if (keeps_nan) is_other = second != second || second > first;
      found |= static_cast<unsigned int>(is_other ? other : own) << shift;
    }
    return found;
  }
};
#if __CUDA_ARCH__ >= 800
#define FUSER_PAIRS(S, type) \
  template <> struct fuser_pairs<S> { \
    template <bool is_larger, bool keeps_nan> \
    static FUSER_INLINE unsigned int extreme(unsigned int a, unsigned int b) { \
      if (keeps_nan) asm("max.NaN." type " %0, %0, %1;" : "+r"(a) : "r"(b)); \
      else if (is_larger) asm("max." type " %0, %0, %1;" : "+r"(a) : "r"(b)); \
      else asm("min." type " %0, %0, %1;" : "+r"(a) : "r"(b)); \
      return a; \
    } \
  };
#else
#define FUSER_PAIRS(S, type)
#endif

//@ always if bfloat16 rows
FUSER_PAIRS(fuser_bfloat16, "bf16x2")

//@ always if half rows
FUSER_PAIRS(fuser_half, "f16x2")

//@ always if bfloat16
#if __CUDA_ARCH__ >= 800
// The pair (v, 0) in bfloat16 is v rounded, as a float: one instruction to round and to widen.
template <> struct fuser_rounder<fuser_bfloat16> {
  static FUSER_INLINE float round(float v) {
    unsigned int rounded;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(rounded) : "f"(v), "f"(0.0f));
    return __uint_as_float(rounded);
  }
};
// The upper half of what was rounded; the conversion to 16 bits alone is made by the slow unit of exp and division.
template <> struct fuser_keeper<fuser_bfloat16> {
  static FUSER_INLINE float keep(float v, fuser_bfloat16& stored) {
    const float rounded = fuser_round<fuser_bfloat16>(v);
    stored.bits = static_cast<uint16_t>(__float_as_uint(rounded) >> 16);
    return rounded;
  }
};
// As above, of what is rounded already.
template <> struct fuser_exact<fuser_bfloat16> {
  static FUSER_INLINE fuser_bfloat16 from(float v) { return {static_cast<uint16_t>(__float_as_uint(v) >> 16)}; }
};
#endif

//@ always if float8
#ifdef FUSER_HAS_FLOAT8_INSTRUCTIONS
FUSER_INLINE float fuser_to_compute(fuser_float8_e4m3fn s) {
  unsigned int halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(s.bits)));
  return fuser_half_value(static_cast<unsigned short>(halves));
}
// The upper byte of a half.
FUSER_INLINE float fuser_to_compute(fuser_float8_e5m2 s) {
  return fuser_half_value(static_cast<unsigned short>(s.bits << 8));
}

// Rounding alone: to and from the code at once, and what the instructions clamp is put right in float.
template <> struct fuser_rounder<fuser_float8_e4m3fn> {
  static FUSER_INLINE float round(float v) {
    unsigned short pair;
    unsigned int halves;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(v));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    const float rounded = fuser_half_value(static_cast<unsigned short>(halves));
    return FUSER_E4M3FN_OVERFLOW == 0x7fu && fabsf(v) > 464.0f ? NAN : rounded;
  }
};
template <> struct fuser_rounder<fuser_float8_e5m2> {
  static FUSER_INLINE float round(float v) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(v));
    const float rounded = fuser_half_value(static_cast<unsigned short>(pair << 8));
    return fabsf(v) >= 61440.0f ? copysignf(INFINITY, v) : rounded;
  }
};

// The instructions clamp to the largest finite code; the next one is infinity in e5m2, and NaN in e4m3fn.
template <> struct fuser_storage<fuser_float8_e4m3fn> {
  template <typename C> static FUSER_INLINE fuser_float8_e4m3fn from(C v) {
    const float f = fuser_cast<float>(v);
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(f));
    // 464 is half way from 448, the largest, to what would follow.
    const bool is_over = FUSER_E4M3FN_OVERFLOW == 0x7fu && fabsf(f) > 464.0f;
    return {static_cast<uint8_t>(pair + is_over)};
  }
};
template <> struct fuser_storage<fuser_float8_e5m2> {
  template <typename C> static FUSER_INLINE fuser_float8_e5m2 from(C v) {
    const float f = fuser_cast<float>(v);
    unsigned short pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(f));
    // 61440 is half way from 57344, the largest, to infinity.
    return {static_cast<uint8_t>(pair + (fabsf(f) >= 61440.0f))};
  }
};
#endif
