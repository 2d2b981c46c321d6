#pragma once

// Stands in for CUDA's header of this name: a word counts the arrivals of all rounds, and how many each takes.

#include <atomic>
#include <cstdint>
#include <thread>

struct __mbarrier_t {
  std::atomic<std::uint32_t> arrived, expected;
};

inline void __mbarrier_init(__mbarrier_t* barrier, std::uint32_t expected) {
  barrier->arrived.store(0, std::memory_order_relaxed);
  barrier->expected.store(expected, std::memory_order_relaxed);
}
/// Orders what comes before it with what follows where somebody has seen it.
inline std::uint64_t __mbarrier_arrive(__mbarrier_t* barrier) { return barrier->arrived.fetch_add(1, std::memory_order_acq_rel); }

inline bool __mbarrier_test_wait_parity(__mbarrier_t* barrier, bool parity) {
  const std::uint32_t rounds = barrier->arrived.load(std::memory_order_acquire) / barrier->expected.load(std::memory_order_relaxed);
  if (rounds % 2 != (parity ? 1u : 0u)) return true;
  std::this_thread::yield();
  return false;
}
