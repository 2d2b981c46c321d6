// Errors keep their types on the way from the library to a program, whichever way the two are linked.

#include <delta_attention/delta_attention.h>

#include <cstdio>

int main() {
  float x[4] = {1, 2, 3, 4}, out[4];
  delta_attention::ForwardArgs args;
  args.q = args.k = args.v = delta_attention::tensor(x, {1, 2, 1, 2});
  args.out = delta_attention::tensor(out, {1, 2, 1, 2});
  delta_attention::Execution execution;
  execution.kernel = "no_such_kernel";

  int caught = 0;
  try {
    delta_attention_forward(delta_attention::ForwardArgs());
  } catch (const delta_attention::InvalidArgument& error) {
    caught += error.argument() == "q";
  }
  try {
    delta_attention_forward(args, execution);
  } catch (const delta_attention::Unsupported&) {
    ++caught;
  }
  try {
    delta_attention_forward(args, execution);
  } catch (const std::exception&) {
    ++caught;
  }
  std::printf("caught %d of 3 errors by type\n", caught);
  return caught == 3 ? 0 : 1;
}
