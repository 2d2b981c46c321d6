#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>
#include <system_error>

#include "commands.h"
#include "delta_attention/error.h"
#include "delta_attention/version.h"
#include "errors.h"

namespace delta_attention::cli {
namespace {

enum ExitCode { kOk = 0, kUsage = 1, kBadInput = 2, kUnsupported = 3, kIo = 4, kInternal = 5, kBreach = 6 };

constexpr const char* kDescription =
    "Linear and delta attention on CPU and GPU (version " DELTA_ATTENTION_VERSION
    ").\n"
    "A head reads tokens one by one, keeps a memory S of what keys mean, and answers each query from it.";

constexpr const char* kFooter =
    "Start here:\n"
    "  delta-attention demo                    every kernel of this machine on real data: errors and times\n"
    "  delta-attention info                    devices, kernels and recurrences\n"
    "  delta-attention run --help              your own tensors, from a safetensors file\n"
    "  delta-attention verify                  whether this build is right on this machine\n"
    "  delta-attention error-growth --quick    what rounding does to long sequences, kernel by kernel\n"
    "\n"
    "Exit codes:\n"
    "  0  done\n"
    "  1  the command line is wrong\n"
    "  2  the input file or the arguments are wrong (the message names the tensor, what was expected and what came)\n"
    "  3  legal, but not possible here: no such device or kernel, or not enough memory\n"
    "  4  a file could not be opened, read or written (missing, no permission, no space)\n"
    "  5  an internal error\n"
    "  6  verify: something does not hold that should (the report says what)";

int report(ExitCode code, const char* what) {
  std::fprintf(stderr, "delta-attention: %s\n", what);
  return code;
}

/// Runs the chosen subcommand; every failure becomes one message and one exit code.
int run(const Work& work) {
  try {
    work();
    if (std::fflush(stdout) != 0) return report(kIo, "standard output could not be written");
    return kOk;
  } catch (const Breach& error) {
    return report(kBreach, error.what());
  } catch (const BadInput& error) {
    return report(kBadInput, error.what());
  } catch (const InvalidArgument& error) {
    return report(kBadInput, error.what());
  } catch (const Unsupported& error) {
    return report(kUnsupported, error.what());
  } catch (const OutOfMemory& error) {
    return report(kUnsupported, error.what());
  } catch (const std::bad_alloc&) {
    return report(kUnsupported, "not enough memory");
  } catch (const IoError& error) {
    return report(kIo, error.what());
  } catch (const std::system_error& error) {
    return report(kIo, error.what());
  } catch (const std::exception& error) {
    return report(kInternal, error.what());
  }
}

int run_program(int argc, char** argv) {
  CLI::App app(kDescription, "delta-attention");
  app.footer(kFooter);
  app.set_version_flag("--version", DELTA_ATTENTION_VERSION);
  app.require_subcommand(1);
  Work selected;
  add_run_command(app, selected);
  add_info_command(app, selected);
  add_demo_command(app, selected);
  add_verify_command(app, selected);
  add_call_command(app, selected);
  add_error_growth_command(app, selected);
  add_tune_command(app, selected);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kOk : kUsage;
  }
  return run(selected);
}

}  // namespace
}  // namespace delta_attention::cli

int main(int argc, char** argv) { return delta_attention::cli::run_program(argc, argv); }
