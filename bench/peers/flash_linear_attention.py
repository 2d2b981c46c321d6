#!/usr/bin/env python3
"""Times flash-linear-attention (the package `fla`) on the shapes of bench/production.cpp, with all that is part of our call in its call.

chunk_kda with the bounded gate, chunk_gated_delta_rule, chunk_delta_rule and chunk_gla, in bf16. Shapes are read from the names of our own
benchmarks: from production.json of the same output folder, or --shapes, which also takes what `production --benchmark_list_tests` prints.
Writes <output>/<gpu>/fla.json in the layout of the other result files; a benchmark's name is
fla/<recurrence>/<function>/bf16/<shape> cold|graph.

Inputs, by the formulas of our program: q, k, v and the logits of beta and of the gate ~ N(0,1) in bf16; A and bias in f32, both ~ U(0,1)
under gate:strong, A = 0 and bias ~ U(-6,-4) under gate:weak; rows of the initial state of unit length, f32. The gate is
-5 sigmoid(exp(A) (x + bias)) for KDA and -exp(A) softplus(x + bias) for Gated DeltaNet. GLA: q and k of unit length, log decays
-exp(A) softplus(x + bias) in f32, A and bias ~ U(0,1). chunk_delta_rule has no sigmoid: PyTorch's, in bf16, is part of what is timed.

cold: device time of the call, each after a write of twice the L2 cache. The GPU sleeps first, long enough for Python to queue all launches;
where that was too short, all is measured again with a longer sleep. graph: device time of replays of a CUDA graph that holds the call.
A result whose error against float64 passes 1e-2 is an error entry, not a time.

Every shape is tuned for itself, over fla's own configurations with Triton's own timing. fla's keys are the numbers and sizes of heads, not
the lengths, so that it would go on with what it chose for the first length; here choices are forgotten before each shape, and none is
read from disk or kept there.

A shape times 60 to 120 configurations, an eighth of a second each, and first compiles those that Triton's cache on disk lacks, one by one.
--compile N fills that cache with all configurations of the chosen shapes from N processes, times nothing and ends:

  peer="python3 bench/peers/flash_linear_attention.py --only ^fla/kda/"
  $peer --compile 32
  CUDA_VISIBLE_DEVICES=0 DELTA_ATTENTION_SEED=1 $peer --add --part 1/2 &
  CUDA_VISIBLE_DEVICES=1 DELTA_ATTENTION_SEED=1 $peer --add --part 2/2 & wait

Every shape is written as soon as it is measured; --add keeps what is in the file, so that a run goes on where an earlier one ended, and
several processes can share a file.

Exit code 77: skipped, with the reason.
"""

import argparse
import contextlib
import fcntl
import gc
import json
import multiprocessing
import os
import re
import statistics
import sys
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from measured import RESULTS, prebuilt_commit, slug
from peer import entries, failed, machine, skip, usable_torch, write

MIN_SECONDS = 0.002  # of a repetition
MOST_CALLS = 30      # of a repetition
ALLOWED_ERROR = 1e-2
LOWER_BOUND = -5.0
SLEEP_CYCLES_PER_SECOND = 2e9  # at least what the clock of a GPU reaches
# Sequences up to WHOLE tokens are checked as a whole, PART tokens of longer ones.
WHOLE, PART = 2048, 512
FUNCTIONS = {"kda": "chunk_kda", "gated_delta_net": "chunk_gated_delta_rule", "delta_net": "chunk_delta_rule", "gla": "chunk_gla"}


class Shape:
    """One shape, by its name in our results without program, kernel and variant."""

    def __init__(self, recurrence, words):
        self.recurrence, self.words = recurrence, words
        parts = dict(word.split(":", 1) for word in words.split())
        self.B, self.T, self.H, self.HV, self.K, self.V, self.N = (int(parts[key]) for key in ("B", "T", "H", "HV", "K", "V", "N"))
        self.strong = parts.get("gate") != "weak"
        self.states = parts["state"] == "both"
        self.lengths = self.parse_lengths(parts["lengths"]) if "lengths" in parts else None

    @staticmethod
    def parse_lengths(text):
        """'1024x8' or '300,547'."""
        if "x" in text:
            length, count = text.split("x")
            return [int(length)] * int(count)
        return [int(length) for length in text.split(",")]

    @property
    def gates(self):
        """Of a head and token."""
        return {"kda": self.K, "gla": self.K, "gated_delta_net": 1, "delta_net": 0}[self.recurrence]

    def offsets(self):
        result = [0]
        for length in self.lengths:
            result.append(result[-1] + length)
        return result

    def name(self, variant):
        return f"fla/{self.recurrence}/{FUNCTIONS[self.recurrence]}/bf16/{self.words} {variant}"

    def bounds(self, sequence):
        """Batch row, first token and token behind the last."""
        if self.lengths is None:
            return sequence, 0, self.T
        return 0, *self.offsets()[sequence:sequence + 2]

    def checked(self):
        """(sequence, head, batch row, first, checked, last): the reference goes over [first, last), compared are [checked, last)."""
        row, begin, end = self.bounds(0)
        pairs = [(0, 0, row, begin, begin, end if end - begin <= WHOLE else begin + PART)]
        row, begin, end = self.bounds(self.N - 1)
        span = begin, begin, end
        if end - begin > WHOLE:
            span = (end - WHOLE, end - PART, end) if self.gates else (begin, begin, begin + PART)
        return [*pairs, (self.N - 1, self.HV - 1, row, *span)]


def shapes(text, only):
    """Every shape that the text names once, in its order, where the pattern finds something in its name."""
    found = re.findall(r"\bproduction/(\w+)/\w+/bf16/([^\"\n]*?) (?:cold|graph)\b", text)
    every = [Shape(recurrence, words) for recurrence, words in dict.fromkeys(found)]
    return [shape for shape in every if re.search(only, shape.name(""))]


def reference(q, k, v, decay, beta, state, delta):
    """The recurrence token by token in float64: rows of q, k, v and decay, numbers beta; the state [K,V] is advanced in place."""
    import numpy
    out = numpy.empty_like(v)
    scale = q.shape[1]**-0.5
    for t in range(q.shape[0]):
        if decay is not None:
            state *= decay[t][:, None]
        update = beta[t] * (v[t] - k[t] @ state) if delta else v[t]
        state += numpy.outer(k[t], update)
        out[t] = scale * (q[t] @ state)
    return out


class Call:
    """One call on its operands."""

    def __init__(self, torch, fla_ops, shape):
        self.torch, self.shape = torch, shape
        self.function = getattr(fla_ops, FUNCTIONS[shape.recurrence])
        self.inputs, self.options = {}, {}
        self.make_inputs()
        self.make_gates()
        self.make_states()

    def check(self):
        """Memory and errors. The first run tunes."""
        self.run()
        self.measure_memory()
        self.error, self.state_error = self.errors(*self.run())

    def random(self, *size):
        return self.torch.randn(*size, device="cuda", dtype=self.torch.bfloat16)

    def uniform(self, low, high, *size):
        return low + (high - low) * self.torch.rand(*size, device="cuda")

    def unit(self, x):
        return self.torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype)

    def make_inputs(self):
        s = self.shape
        self.inputs = {"q": self.random(s.B, s.T, s.H, s.K), "k": self.random(s.B, s.T, s.H, s.K), "v": self.random(s.B, s.T, s.HV, s.V)}
        if s.recurrence == "gla":
            self.inputs.update(q=self.unit(self.inputs["q"]), k=self.unit(self.inputs["k"]))
        else:
            self.inputs["beta"] = self.random(s.B, s.T, s.HV)
            self.options["use_qk_l2norm_in_kernel"] = True
        if s.recurrence in ("kda", "gated_delta_net"):
            self.options.update(use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True)
        if s.recurrence == "kda":
            self.options.update(safe_gate=True, lower_bound=LOWER_BOUND)

    def make_gates(self):
        s = self.shape
        if s.gates == 0:
            return
        logits = self.random(s.B, s.T, s.HV, *([s.gates] if s.gates > 1 else []))
        rates = self.uniform(0, 1, s.HV) if s.strong else self.torch.zeros(s.HV, device="cuda")
        biases = self.uniform(*((0, 1) if s.strong else (-6, -4)), s.HV * s.gates)
        if s.recurrence == "gla":
            softplus = self.torch.nn.functional.softplus(logits.float() + biases.view(s.HV, s.gates))
            self.inputs["g"] = -rates.exp()[:, None] * softplus
        else:
            self.inputs.update(g=logits, A_log=rates, dt_bias=biases)

    def make_states(self):
        s, torch = self.shape, self.torch
        if s.states:
            self.inputs["initial_state"] = self.unit(torch.randn(s.N, s.HV, s.K, s.V, device="cuda"))
            self.options["output_final_state"] = True
        if s.lengths:
            self.options["cu_seqlens_cpu"] = torch.tensor(s.offsets())
            self.inputs["cu_seqlens"] = self.options["cu_seqlens_cpu"].cuda()

    def run(self):
        inputs = self.inputs
        if self.shape.recurrence == "delta_net":
            inputs = {**inputs, "beta": inputs["beta"].sigmoid()}
        with self.torch.inference_mode():
            return self.function(**inputs, **self.options)[:2]

    def measure_memory(self):
        """Operands, and what the call needs beside them at the most."""
        cuda = self.torch.cuda
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        outputs = [x for x in self.run() if x is not None]
        cuda.synchronize()
        of = lambda tensors: sum(x.numel() * x.element_size() for x in tensors)
        self.operands = of(self.inputs.values()) + of(outputs)
        self.workspace = max(0, cuda.max_memory_allocated() - before - of(outputs))

    def decays(self, g, head):
        """Of one head: [tokens, K]."""
        torch, s = self.torch, self.shape
        g = g.view(g.shape[0], s.gates)
        if s.recurrence == "gla":
            return g.exp()
        rate = self.inputs["A_log"][head].double().exp().cpu()
        x = g + self.inputs["dt_bias"].view(s.HV, s.gates)[head].double().cpu()
        log = LOWER_BOUND * torch.sigmoid(rate * x) if s.recurrence == "kda" else -rate * torch.nn.functional.softplus(x)
        return log.exp().expand(-1, s.K)

    def expected(self, sequence, head, row, first, last):
        """Output and final state of the tokens [first, last)."""
        torch, s = self.torch, self.shape
        rows = lambda name, h: self.inputs[name][row, first:last, h].double().cpu()
        q, k = (rows(name, head // (s.HV // s.H)) for name in ("q", "k"))
        if s.recurrence != "gla":
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        beta = rows("beta", head).sigmoid().numpy() if "beta" in self.inputs else None
        decay = self.decays(rows("g", head), head).numpy() if s.gates else None
        state = torch.zeros(s.K, s.V, dtype=torch.float64)
        if s.states and first == s.bounds(sequence)[1]:
            state = self.inputs["initial_state"][sequence, head].double().cpu()
        state = state.numpy()
        out = reference(q.numpy(), k.numpy(), rows("v", head).numpy(), decay, beta, state, s.recurrence != "gla")
        return out, state

    def errors(self, out, final_state):
        """Relative errors of the output and, where it is checked, of the final state."""
        sums = {"out": [0.0, 0.0], "state": [0.0, 0.0]}

        def add(which, actual, wanted):
            sums[which][0] += ((actual.double().cpu().numpy() - wanted)**2).sum()
            sums[which][1] += (wanted**2).sum()

        for sequence, head, row, first, checked, last in self.shape.checked():
            expected, state = self.expected(sequence, head, row, first, last)
            add("out", out[row, checked:last, head], expected[checked - first:])
            if final_state is not None and last == self.shape.bounds(sequence)[2]:
                add("state", final_state[sequence, head], state)
        return [(difference / size)**0.5 if size else None for difference, size in sums.values()]

    def capture(self):
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph


class Clock:
    def __init__(self, torch, repetitions):
        self.torch, self.repetitions = torch, repetitions
        self.eraser = torch.empty(2 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device="cuda")

    def event(self):
        return self.torch.cuda.Event(enable_timing=True)

    def cold_seconds(self, call, sleep):
        """Device seconds of one call; None if Python had not queued all of it when it began."""
        cuda = self.torch.cuda
        start, stop = self.event(), self.event()
        cuda.synchronize()
        cuda._sleep(int(sleep * SLEEP_CYCLES_PER_SECOND))
        self.eraser.zero_()
        start.record()
        call.run()
        stop.record()
        queued = not start.query()
        cuda.synchronize()
        return start.elapsed_time(stop) * 1e-3 if queued else None

    def cold(self, call):
        """As repetitions_of(), with a sleep that is long enough."""
        begin = time.perf_counter()
        call.run()
        sleep = 2 * (time.perf_counter() - begin)
        for _ in range(4):
            times = self.repetitions_of(lambda: self.cold_seconds(call, sleep))
            if times:
                return times
            sleep *= 2
        raise RuntimeError("skipped: Python takes too long to queue the call")

    def graph(self, call):
        graph = call.capture()

        def seconds():
            start, stop = self.event(), self.event()
            start.record()
            graph.replay()
            stop.record()
            return start, stop

        def replays():
            self.eraser.zero_()  # keeps the GPU busy while the replays are queued
            graph.replay()
            marks = [seconds() for _ in range(MOST_CALLS)]
            self.torch.cuda.synchronize()
            return statistics.fmean(start.elapsed_time(stop) * 1e-3 for start, stop in marks)

        return [1e6 * replays() for _ in range(self.repetitions)]

    def repetitions_of(self, once):
        """Microseconds, a mean for each repetition of about MIN_SECONDS; None if `once` fails."""
        first = once()
        if first is None:
            return None
        calls = max(1, min(MOST_CALLS, round(MIN_SECONDS / first)))
        times = [[once() for _ in range(calls)] for _ in range(self.repetitions)]
        if any(None in repetition for repetition in times):
            return None
        return [1e6 * statistics.fmean(repetition) for repetition in times]

    def entries(self, call):
        """Of both variants of a call."""
        shape = call.shape
        errors = [error for error in (call.error, call.state_error) if error is not None]
        if not all(error <= ALLOWED_ERROR for error in errors):
            return failed(shape.name("cold"), f"wrong result: relative error {call.error:.2e}, of the state {call.state_error}")
        counters = {"operands": call.operands, "workspace": call.workspace, "relative_error": call.error}
        if call.state_error is not None:
            counters["state_relative_error"] = call.state_error
        return entries(shape.name("cold"), self.cold(call), counters) + entries(shape.name("graph"), self.graph(call), counters)


def measure(torch, fla_ops, shape, clock):
    """The entries of one shape. What a function refuses, or what does not fit, is no end of the program."""
    begin = time.perf_counter()
    try:
        call = Call(torch, fla_ops, shape)
        call.check()
        result = clock.entries(call)
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        result = failed(shape.name("cold"), f"skipped: {error}")
    torch.cuda.empty_cache()
    medians = [f"{e['real_time']:.1f} us" for e in result if e.get("aggregate_name") == "median"]
    print(shape.name(""), ", ".join(medians) or result[0]["error_message"], f"({time.perf_counter() - begin:.0f} s)", flush=True)
    return result


def forget_choices(autotuner):
    """So that all kernels are tuned at their next call."""
    for tuned in [x for x in gc.get_objects() if issubclass(type(x), autotuner)]:
        tuned.cache.clear()


def only_compile(knobs, autotuner, share, of):
    """From here on this process compiles its share of all configurations, into Triton's cache on disk, and tunes nothing."""
    knobs.runtime.jit_cache_hook = lambda *, key, fn, **_: zlib.crc32(f"{fn.name} {key}".encode()) % of != share  # true: leave it out
    autotuner.run = lambda self, *args, warmup, **kwargs: self.warmup(*args, **kwargs)


def compile_share(chosen, share, of):
    torch = usable_torch("fla")
    torch.cuda.set_device(share % torch.cuda.device_count())
    fla_ops, _ = usable_fla(torch)
    from triton import knobs
    from triton.runtime.autotuner import Autotuner
    only_compile(knobs, Autotuner, share, of)
    for shape in chosen:
        try:
            Call(torch, fla_ops, shape).run()
        except Exception as error:  # the tuning compiles what is missing, or says what is wrong
            print(f"{shape.name('')}: not all is compiled: {error!r}", flush=True)
        torch.cuda.empty_cache()


def compile_all(chosen, count):
    begin = time.perf_counter()
    context = multiprocessing.get_context("spawn")  # CUDA survives no fork
    processes = [context.Process(target=compile_share, args=(chosen, share, count)) for share in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    failures = sum(process.exitcode != 0 for process in processes)
    print(f"fla: {len(chosen)} shapes compiled in {time.perf_counter() - begin:.0f} s, {failures} processes failed")
    sys.exit(failures > 0)


def usable_fla(torch):
    """fla's functions, or the end of the program."""
    os.environ["FLA_CACHE_RESULTS"] = "0"  # choices are neither read from disk nor kept there
    try:
        import fla
        import fla.ops
    except Exception as error:  # an old Triton or PyTorch fails in many ways
        skip("fla", f"cannot import fla: {error!r}")
    return fla.ops, fla.__version__


def read_shapes(options, gpu):
    candidates = [options.shapes] if options.shapes else [folder / slug(gpu) / "production.json" for folder in (options.output, RESULTS)]
    for file in candidates:
        if file.exists():
            return shapes(file.read_text(), options.only)
    skip("fla", f"no shapes: there is no {' and no '.join(map(str, candidates))}")


def earlier(file, context):
    """The entries of an earlier run and its seed. They stand in one file only if the same was measured."""
    results = json.loads(file.read_text())
    for field in ("commit", "gpu", "driver", "torch", "triton", "fla"):
        if results["context"][field] != context[field]:
            sys.exit(f"fla: {file} has {field} {results['context'][field]}, this run {context[field]}; without --add it is replaced")
    return results["benchmarks"], int(results["context"]["seed"])


@contextlib.contextmanager
def locked(folder):
    """One process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def keep(output, context, benchmarks, add):
    """Writes the file; `add`: behind what is there, which other processes may have added meanwhile."""
    file = output / slug(context["gpu"]) / "fla.json"
    with locked(file.parent):
        there, seed = earlier(file, context) if add and file.exists() else ([], int(context["seed"]))
        if str(seed) != context["seed"]:
            sys.exit(f"fla: {file} has seed {seed}, this run {context['seed']}; set DELTA_ATTENTION_SEED for all that share it")
        write("fla", context, there + benchmarks, output)


def part(text):
    """'2/3': every third one from the second on."""
    which, of = map(int, text.split("/"))
    if not 1 <= which <= of:
        raise ValueError
    return slice(which - 1, None, of)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the result folders go (default: bench/results)")
    parser.add_argument("--repetitions", type=int, default=5, help="of every benchmark (default: 5)")
    parser.add_argument("--allow-dirty", action="store_true", help="measure a checkout with uncommitted changes; it is marked -dirty")
    parser.add_argument("--shapes", type=Path, help="a file that names our benchmarks")
    parser.add_argument("--only", default="", help="only the shapes whose name, fla/<recurrence>/..., this regular expression finds")
    parser.add_argument("--part", type=part, default=slice(None), help="1/2 and 2/2: every other of these shapes")
    parser.add_argument("--add", action="store_true", help="keep what is in the file, and measure the shapes that it lacks")
    parser.add_argument("--compile", type=int, metavar="N", help="compile with N processes for runs to come, and measure nothing")
    options = parser.parse_args()

    torch = usable_torch("fla")
    gpu = torch.cuda.get_device_name(0)
    chosen = read_shapes(options, gpu)[options.part]
    if options.compile:
        compile_all(chosen, options.compile)
    fla_ops, version = usable_fla(torch)
    import triton
    from triton.runtime.autotuner import Autotuner
    seed = int(os.environ.get("DELTA_ATTENTION_SEED") or torch.seed() % 2**32)
    context = {**machine(torch, "fla", prebuilt_commit(options.allow_dirty), seed), "fla": version, "triton": triton.__version__,
               "relative_error_over": f"as in production.json: whole sequences up to {WHOLE} tokens, {PART} of longer ones"}
    file, there = options.output / slug(gpu) / "fla.json", set()
    if options.add and file.exists():
        benchmarks, seed = earlier(file, context)
        context["seed"], there = str(seed), {entry["name"] for entry in benchmarks}
    clock, add = Clock(torch, options.repetitions), options.add
    for shape in chosen:
        if shape.name("cold") not in there:
            forget_choices(Autotuner)
            torch.manual_seed(seed)
            keep(options.output, context, measure(torch, fla_ops, shape, clock), add)
            add = True
    print(f"fla: {len(chosen)} shapes are in {file}")


if __name__ == "__main__":
    main()
