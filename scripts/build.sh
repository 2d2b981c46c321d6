# What the scripts share; to be sourced from the top folder of the repository.

build_dir=${BUILD_DIR:-build}
jobs=${JOBS:-$(nproc)}

# NVIDIA's packages put nvcc outside the PATH.
if ! command -v nvcc >/dev/null && [[ -x /usr/local/cuda/bin/nvcc ]]; then
  PATH=$PATH:/usr/local/cuda/bin
fi

configure_build() {
  local options=()
  if [[ ! -f "$build_dir/CMakeCache.txt" ]]; then
    options=(-G Ninja)
    if command -v ccache >/dev/null; then
      options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
    fi
  fi
  cmake -S . -B "$build_dir" "${options[@]}"
}

describe_build() {
  if grep -q '^CMAKE_CUDA_COMPILER:[^=]*=/' "$build_dir/CMakeCache.txt"; then
    if [[ -e /dev/nvidiactl ]]; then
      echo "with the CUDA kernels, and a GPU"
    else
      echo "with the CUDA kernels built; no GPU here, so they did not run"
    fi
  else
    echo "built without CUDA kernels"
  fi
}
