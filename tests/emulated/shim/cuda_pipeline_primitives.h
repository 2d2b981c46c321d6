#pragma once

// Stands in for CUDA's header of this name. A copy arrives when it is waited for; until then its target holds NaN. Whoever touches it in
// between races with one of the two.

#include <cuda_awbarrier_primitives.h>

#include <cstddef>
#include <cstring>
#include <deque>
#include <vector>

namespace delta_attention::test {

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes, zeros;  // of the bytes, the last ones that become 0 and are not read
};
inline thread_local std::vector<Copy> started_copies;
inline thread_local std::deque<std::vector<Copy>> committed_copies;

inline void finish(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    std::memcpy(copy.to, copy.from, copy.bytes - copy.zeros);
    std::memset(static_cast<char*>(copy.to) + copy.bytes - copy.zeros, 0, copy.zeros);
  }
}

}  // namespace delta_attention::test

inline void __pipeline_memcpy_async(void* to, const void* from, std::size_t bytes, std::size_t zeros = 0) {
  std::memset(to, 0xff, bytes);
  delta_attention::test::started_copies.push_back({to, from, bytes, zeros});
}
inline void __pipeline_commit() {
  using namespace delta_attention::test;
  committed_copies.push_back(started_copies);
  started_copies.clear();
}
/// All commits but the last `most_in_flight` arrive.
inline void __pipeline_wait_prior(int most_in_flight) {
  using namespace delta_attention::test;
  while (committed_copies.size() > static_cast<std::size_t>(most_in_flight)) {
    finish(committed_copies.front());
    committed_copies.pop_front();
  }
}
/// What was started arrives before anything else that this thread does at the barrier.
inline void __pipeline_arrive_on(__mbarrier_t*) {
  using namespace delta_attention::test;
  finish(started_copies);
  started_copies.clear();
}
