#pragma once

// The subcommands. Each adds its options to `app` and, when the user chose it, leaves its work in `selected`.

#include <functional>

namespace CLI {
class App;
}

namespace delta_attention::cli {

using Work = std::function<void()>;

void add_run_command(CLI::App& app, Work& selected);
void add_info_command(CLI::App& app, Work& selected);
void add_demo_command(CLI::App& app, Work& selected);
void add_verify_command(CLI::App& app, Work& selected);
void add_call_command(CLI::App& app, Work& selected);
void add_error_growth_command(CLI::App& app, Work& selected);
void add_tune_command(CLI::App& app, Work& selected);

}  // namespace delta_attention::cli
