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

}  // namespace delta_attention::cli
