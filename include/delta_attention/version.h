#pragma once

#define DELTA_ATTENTION_VERSION_MAJOR 0
#define DELTA_ATTENTION_VERSION_MINOR 1
#define DELTA_ATTENTION_VERSION_PATCH 0
#define DELTA_ATTENTION_VERSION "0.1.0"

// Marks the symbols that the shared library exports; everything else is hidden.
#if defined(_WIN32)
#define DELTA_ATTENTION_API
#else
#define DELTA_ATTENTION_API __attribute__((visibility("default")))
#endif
