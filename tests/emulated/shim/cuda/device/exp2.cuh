#pragma once

// Stands in for the kernels' header of this name.

#include <cmath>

namespace delta_attention {

constexpr float kLog2E = 1.4426950408889634f;

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }

}  // namespace delta_attention
