#!/usr/bin/env python3
"""Times PyTorch's scaled_dot_product_attention on the shapes of bench/softmax_forward.cpp and bench/softmax_vs_delta.cpp.

Backends are cuDNN and FlashAttention in bf16, the memory-efficient one and the plain products ("math") in f32. Writes
<output>/<gpu>/sdpa.json in the layout of the other result files; a benchmark's name is sdpa/<backend>/<dtype>/<shape> cold|graph.

Times are device times, as the other programs have them: of replays of a CUDA graph that holds the call, one behind another (graph), or each
after a write of twice the L2 cache (cold). Replays leave out Python's share, which is not what is compared. Operands are [B,H,N,D], the
layout that PyTorch documents, and contiguous. A result whose error against float64 passes the library's bar is an error entry, not a time;
a shape that a backend refuses, or that would take too long, is one that begins with "skipped:".

Exit code 77: skipped, with the reason.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from measured import RESULTS, prebuilt_commit
from peer import entries, failed, machine, usable_torch, write

MIN_SECONDS = 0.002       # of a repetition
LONGEST_SECONDS = 0.2     # of one call
BACKENDS = {"cudnn": ("CUDNN_ATTENTION", "bf16"), "flash": ("FLASH_ATTENTION", "bf16"),
            "efficient": ("EFFICIENT_ATTENTION", "f32"), "math": ("MATH", "f32")}
# A call's largest matrix of scores, in "math" only.
MOST_SCORE_BYTES = 8 << 30


def powers(first, last):
    while first <= last:
        yield first
        first *= 2


def shapes():
    """(batch, tokens, dim, causal, variants), in the order of softmax_forward's groups and then softmax_vs_delta's."""
    for dim in (32, 64, 128):
        for tokens in powers(256, 4096):
            yield 2, tokens, dim, False, ("graph",)
    for dim in (64, 128):
        for tokens in powers(256, 8192):
            for causal in (False, True):
                yield 2, tokens, dim, causal, ("graph", "cold")
    for batch in (1, 16):
        for tokens in powers(128, 131072):
            yield batch, tokens, 128, True, ("cold",)


def cases():
    """(backend, batch, tokens, dim, causal, variant), each once."""
    every = [(backend, *shape, variant) for *shape, variants in shapes() for backend in BACKENDS for variant in variants]
    return list(dict.fromkeys(every))


def case_name(backend, batch, tokens, dim, causal, variant, heads=8):
    mask = "causal" if causal else "full"
    return (f"sdpa/{backend}/{BACKENDS[backend][1]}/B:{batch} Nq:{tokens} Nkv:{tokens} H:{heads} Hkv:{heads} D:{dim} mask:{mask} {variant}")


class Call:
    """One call on its operands, captured in a CUDA graph once it ran and was checked."""

    def __init__(self, torch, backend, batch, tokens, dim, causal, heads=8):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        self.torch, self.dim, self.causal = torch, dim, causal
        self.dtype = BACKENDS[backend][1]
        self.backend, self.sdpa_kernel = getattr(SDPBackend, BACKENDS[backend][0]), sdpa_kernel
        options = {"device": "cuda", "dtype": torch.bfloat16 if self.dtype == "bf16" else torch.float32}
        self.q, self.k, self.v = (torch.randn(batch, heads, tokens, dim, **options) for _ in range(3))
        self.measure_memory()
        self.error = self.relative_error(self.run())
        self.capture()

    def run(self):
        with self.sdpa_kernel(self.backend):
            return self.torch.nn.functional.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=self.causal)

    def measure_memory(self):
        """Operands, and what the call needs beside them at the most."""
        cuda = self.torch.cuda
        with self.torch.no_grad():
            cuda.synchronize()
            cuda.reset_peak_memory_stats()
            before = cuda.memory_allocated()
            out = self.run()
            cuda.synchronize()
        out_bytes = out.numel() * out.element_size()
        self.operands = sum(x.numel() * x.element_size() for x in (self.q, self.k, self.v)) + out_bytes
        self.workspace = max(0, cuda.max_memory_allocated() - before - out_bytes)

    def relative_error(self, out):
        """Over the first, the middle and the last row of the first and the last head."""
        torch, tokens = self.torch, self.q.shape[2]
        difference = size = 0.0
        for batch, head in ((0, 0), (-1, -1)):
            for row in (0, tokens // 2, tokens - 1):
                seen = row + 1 if self.causal else tokens
                keys, values = self.k[batch, head, :seen].double(), self.v[batch, head, :seen].double()
                scores = keys @ self.q[batch, head, row].double() * self.dim**-0.5
                expected = torch.softmax(scores, 0) @ values
                difference += (out[batch, head, row].double() - expected).square().sum().item()
                size += expected.square().sum().item()
        return (difference / size)**0.5

    def allowed_error(self):
        return 2e-6 * self.dim**0.5 if self.dtype == "f32" else 1e-2

    def capture(self):
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.out = self.run()

    def seconds(self, calls, flush):
        """Device seconds of each of so many replays; `flush` runs before each."""
        event = lambda: self.torch.cuda.Event(enable_timing=True)
        marks = [(event(), event()) for _ in range(calls)]
        for start, stop in marks:
            flush()
            start.record()
            self.graph.replay()
            stop.record()
        self.torch.cuda.synchronize()
        return [start.elapsed_time(stop) * 1e-3 for start, stop in marks]


def time_call(call, flush, repetitions):
    """Microseconds, a mean for each repetition of at least MIN_SECONDS."""
    call.seconds(1, flush)
    once = call.seconds(1, flush)[0]
    calls = max(1, min(1000, round(MIN_SECONDS / once)))
    return [1e6 * statistics.fmean(call.seconds(calls, flush)) for _ in range(repetitions)]


class Clock:
    """Times cases one by one, and remembers how long shorter ones took."""

    def __init__(self, torch, repetitions):
        self.torch, self.repetitions, self.longest = torch, repetitions, {}
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.eraser = torch.empty(2 * l2, dtype=torch.uint8, device="cuda")
        self.latest = None, None

    def call(self, *case):
        if self.latest[0] != case:
            self.latest = None, None
            self.latest = case, Call(self.torch, *case)
        return self.latest[1]

    def expected_seconds(self, backend, batch, tokens, dim, causal):
        before = self.longest.get((backend, batch, dim, causal))
        return before[1] * (tokens / before[0])**2 if before else 0.0

    def too_much(self, backend, batch, tokens, dim, causal):
        expected = self.expected_seconds(backend, batch, tokens, dim, causal)
        if expected > LONGEST_SECONDS:
            return f"skipped: about {1e3 * expected:.0f} ms by the time of fewer tokens"
        if backend == "math" and 4 * batch * 8 * tokens * tokens > MOST_SCORE_BYTES:
            return "skipped: the matrix of scores takes too much memory"
        return ""

    def time(self, *case, variant):
        """The entries of one case."""
        backend, batch, tokens, dim, causal = case
        name = case_name(*case, variant)
        reason = self.too_much(*case)
        if reason:
            return failed(name, reason)
        try:
            call = self.call(*case)
            if not call.error <= call.allowed_error():
                return failed(name, f"wrong result: relative error {call.error:.2e}, allowed {call.allowed_error():.2e}")
            times = time_call(call, self.eraser.zero_ if variant == "cold" else lambda: None, self.repetitions)
        except RuntimeError as error:  # a backend that refuses, or no memory
            self.latest = None, None
            self.torch.cuda.empty_cache()
            return failed(name, f"skipped: {error}")
        self.longest[backend, batch, dim, causal] = tokens, 1e-6 * statistics.median(times)
        return entries(name, times, {"operands": call.operands, "workspace": call.workspace, "relative_error": call.error})


def context(torch, commit, seed):
    return {**machine(torch, "sdpa", commit, seed), "cudnn": str(torch.backends.cudnn.version()), "layout": "BHND",
            "relative_error_over": "first, middle and last row of the first and the last head"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the result folders go (default: bench/results)")
    parser.add_argument("--repetitions", type=int, default=5, help="of every benchmark (default: 5)")
    parser.add_argument("--allow-dirty", action="store_true", help="measure a checkout with uncommitted changes; it is marked -dirty")
    parser.add_argument("--filter", default="", help="only the cases whose name has this in it")
    options = parser.parse_args()

    torch = usable_torch("sdpa")
    commit = prebuilt_commit(options.allow_dirty)
    seed = int(os.environ.get("DELTA_ATTENTION_SEED") or torch.seed() % 2**32)
    torch.manual_seed(seed)
    clock = Clock(torch, options.repetitions)
    benchmarks = []
    for *case, variant in cases():
        name = case_name(*case, variant)
        if options.filter in name:
            benchmarks += clock.time(*case, variant=variant)
            last = benchmarks[-1]
            print(name, last.get("error_message") or f"{benchmarks[-2]['real_time']:.1f} us", flush=True)
    path = write("sdpa", context(torch, commit, seed), benchmarks, options.output)
    print(f"sdpa: wrote {path}")


if __name__ == "__main__":
    main()
