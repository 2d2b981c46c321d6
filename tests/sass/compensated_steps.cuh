#pragma once

// The kernels of compensated_steps.h for any summation.

#include "compensated_steps.h"

namespace compensated_steps {

constexpr int kThreads = 128;

/// S <- a S + x y, what a recurrence does with one element of its state at one token.
template <class Sum>
__device__ void apply(Operation operation, Sum& sum, float x, float y) {
  if (operation == Operation::add) sum.add(x);
  if (operation == Operation::scale || operation == Operation::step) sum.scale(x);
  if (operation == Operation::add_product || operation == Operation::step) sum.add_product(x, y);
}

template <class Sum, Operation kOperation>
__device__ void apply_to_element(const Operands* operands, Result* results, int n) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= n) return;
  Sum sum;
  sum.sum = operands[i].sum;
  sum.compensation = operands[i].compensation;
  apply(kOperation, sum, operands[i].x, operands[i].y);
  results[i] = {sum.sum, sum.compensation};
}

template <class Sum>
__global__ void __launch_bounds__(kThreads) compensated_add(const Operands* operands, Result* results, int n) {
  apply_to_element<Sum, Operation::add>(operands, results, n);
}
template <class Sum>
__global__ void __launch_bounds__(kThreads) compensated_scale(const Operands* operands, Result* results, int n) {
  apply_to_element<Sum, Operation::scale>(operands, results, n);
}
template <class Sum>
__global__ void __launch_bounds__(kThreads) compensated_add_product(const Operands* operands, Result* results, int n) {
  apply_to_element<Sum, Operation::add_product>(operands, results, n);
}
template <class Sum>
__global__ void __launch_bounds__(kThreads) compensated_step(const Operands* operands, Result* results, int n) {
  apply_to_element<Sum, Operation::step>(operands, results, n);
}

template <class Sum>
void launch(Operation operation, const Operands* operands, Result* results, int n) {
  const int blocks = (n + kThreads - 1) / kThreads;
  switch (operation) {
    case Operation::add: compensated_add<Sum><<<blocks, kThreads>>>(operands, results, n); break;
    case Operation::scale: compensated_scale<Sum><<<blocks, kThreads>>>(operands, results, n); break;
    case Operation::add_product: compensated_add_product<Sum><<<blocks, kThreads>>>(operands, results, n); break;
    case Operation::step: compensated_step<Sum><<<blocks, kThreads>>>(operands, results, n); break;
  }
}

}  // namespace compensated_steps
