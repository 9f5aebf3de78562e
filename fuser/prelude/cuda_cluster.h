// The blocks of a cluster, which can write to each other's shared memory.

//@ always if cluster
// All threads of the cluster wait for each other: what they wrote before they arrived is seen by all who have waited.
FUSER_INLINE void fuser_arrive() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
FUSER_INLINE void fuser_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Writes to the same place in the shared memory of another block.
template <typename C> FUSER_INLINE void fuser_tell(C* to, unsigned int rank, const C& value) {
  constexpr int size = sizeof(C) % 4 ? 1 : 4, count = sizeof(C) / size;
  typedef std::conditional_t<size == 4, unsigned int, unsigned char> word;
  word words[count];
  unsigned int at;
  memcpy(words, &value, sizeof(C));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(at)
      : "r"(static_cast<unsigned int>(__cvta_generic_to_shared(to))), "r"(rank));
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const unsigned int own = words[i];
    if constexpr (size == 4) asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(at + 4 * i), "r"(own) : "memory");
    else asm volatile("st.shared::cluster.u8 [%0], %1;" ::"r"(at + i), "r"(own) : "memory");
  }
}
