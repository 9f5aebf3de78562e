// Conversions of the small floats for which a GPU has an instruction that storage.h does not know of.

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
#endif
