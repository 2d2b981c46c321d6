// The fused projection on the CPU: panels of W and of x as float64, multiplied by Eigen, rounded once.

#include <Eigen/Core>
#include <algorithm>

#include "api/fused_qkv_kernel.h"
#include "delta_attention_reference.h"

namespace delta_attention {
namespace {

using Eigen::Index;
using Eigen::MatrixXd;
using reference::load;

constexpr Index kPanel = 64;  // rows of x, and columns of W

MatrixXd rows_of_x(const FusedQkvLaunch& call, Index first, Index rows) {
  MatrixXd x(rows, call.problem.channels);
  for (Index r = 0; r < rows; ++r) {
    const Index b = (first + r) / call.problem.tokens, n = (first + r) % call.problem.tokens;
    for (Index c = 0; c < call.problem.channels; ++c) x(r, c) = load(call.args.x, b, n, c);
  }
  return x;
}

MatrixXd columns_of_w(const FusedQkvLaunch& call, Index first, Index columns) {
  MatrixXd w(call.problem.channels, columns);
  for (Index c = 0; c < call.problem.channels; ++c) {
    for (Index j = 0; j < columns; ++j) w(c, j) = load(call.args.w, c, first + j);
  }
  return w;
}

const Tensor& output_of(const FusedQkvLaunch& call, const OutputOperand* operand) {
  return operand == &call.problem.q ? call.args.q : operand == &call.problem.k ? call.args.k : call.args.v;
}

void store_panel(const FusedQkvLaunch& call, const MatrixXd& y, Index first_row, Index first_column) {
  for (Index j = 0; j < y.cols(); ++j) {
    const auto [operand, head, channel] = call.problem.place_of(first_column + j);
    const double bias = call.args.bias.present() ? load(call.args.bias, first_column + j) : 0.0;
    for (Index r = 0; r < y.rows(); ++r) {
      const Index row = first_row + r;
      reference::store(output_of(call, operand), y(r, j) + bias, row / call.problem.tokens, row % call.problem.tokens, head, channel);
    }
  }
}

void launch(const FusedQkvLaunch& call) {
  const Index columns = call.problem.columns(), rows = call.problem.rows();
  for (Index column = 0; column < columns; column += kPanel) {
    const MatrixXd w = columns_of_w(call, column, std::min(kPanel, columns - column));
    for (Index row = 0; row < rows; row += kPanel) {
      store_panel(call, rows_of_x(call, row, std::min(kPanel, rows - row)) * w, row, column);
    }
  }
}

}  // namespace

extern const FusedQkvKernel qkv_cpu_kernel;
const FusedQkvKernel qkv_cpu_kernel = {
    "qkv_cpu",
    DeviceType::cpu,
    [](const FusedQkvProblem&, const DeviceProperties&) { return std::string(); },
    [](const FusedQkvProblem&) { return std::size_t{0}; },
    launch,
};

}  // namespace delta_attention
