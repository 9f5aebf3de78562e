// The blocks of a cluster, which write to each other's shared memory. A *box* counts the bytes that come to its block:
// nobody waits for what else a block has under way, as a barrier's threads would.

//@ always if cluster
FUSER_INLINE unsigned int fuser_shared_address(const void* at) {
  return static_cast<unsigned int>(__cvta_generic_to_shared(at));
}

// One thread sets up the boxes of its block before it arrives.
FUSER_INLINE void fuser_expect(unsigned long long* box, unsigned int bytes) {
  const unsigned int at = fuser_shared_address(box);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// All threads of the cluster wait until all have arrived.
FUSER_INLINE void fuser_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
FUSER_INLINE void fuser_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Writes words to the same place in another block, and counts them in its box.
template <int N>
FUSER_INLINE void fuser_tell(
    unsigned int* to, const unsigned long long* box, unsigned int rank, const unsigned int (&words)[N]) {
  unsigned int at, counted;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(fuser_shared_address(to)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"(fuser_shared_address(box)), "r"(rank));
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(at + 4 * i),
                 "r"(words[i]), "r"(counted)
                 : "memory");
  }
}

// Waits until all has come that a box expects.
FUSER_INLINE void fuser_await(const unsigned long long* box) {
  unsigned int is_done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(is_done)
        : "r"(fuser_shared_address(box))
        : "memory");
  } while (!is_done);
}
