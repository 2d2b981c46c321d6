#!/usr/bin/env python3
"""bench/peers/flash_linear_attention.py as far as it goes without a GPU: its shapes, what it checks, its reference and its entries."""

import json
import multiprocessing
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench" / "peers"), str(ROOT / "scripts")]
import flash_linear_attention as peer
from production_tables import Row
from tables import medians

try:
    import numpy
except ImportError:
    numpy = None

PLAIN = "B:4 T:2048 H:8 HV:8 K:128 V:128 N:4 gate:weak state:none"
PACKED = "B:1 T:8192 H:2 HV:8 K:128 V:128 N:6 gate:strong lengths:1300,547,2048,963,271,3063 state:both"
UNGATED = "B:1 T:8192 H:8 HV:8 K:128 V:128 N:1 state:none"


class Shapes(unittest.TestCase):
    def test_those_of_a_result_file_and_of_a_list(self):
        names = [f"production/kda/automatic/bf16/{PLAIN} cold", f"production/kda/automatic/bf16/{PLAIN} graph",
                 f"production/gated_delta_net/automatic/bf16/{PACKED} cold", f"host_call/kda/automatic/bf16/{PLAIN} host"]
        for text in ("\n".join(name + "/manual_time" for name in names),
                     ",\n".join(f'{{"name": "{name}/manual_time", "run_name": "{name}/manual_time"}}' for name in names)):
            self.assertEqual([shape.words for shape in peer.shapes(text, "")], [PLAIN, PACKED])
            self.assertEqual([shape.words for shape in peer.shapes(text, "^fla/gated")], [PACKED])

    def test_parts(self):
        plain, packed, ungated = peer.Shape("kda", PLAIN), peer.Shape("gated_delta_net", PACKED), peer.Shape("delta_net", UNGATED)
        self.assertEqual((plain.strong, plain.states, plain.lengths, plain.gates), (False, False, None, 128))
        self.assertEqual((packed.strong, packed.states, packed.offsets()[-1], packed.gates), (True, True, 8192, 1))
        self.assertEqual(ungated.gates, 0)
        self.assertEqual(peer.Shape.parse_lengths("1024x8"), [1024] * 8)

    def test_both_ends_are_checked(self):
        self.assertEqual(peer.Shape("kda", PLAIN).checked(), [(0, 0, 0, 0, 0, 2048), (3, 7, 3, 0, 0, 2048)])
        self.assertEqual(peer.Shape("gated_delta_net", PACKED).checked(), [(0, 0, 0, 0, 0, 1300), (5, 7, 0, 6144, 7680, 8192)])
        self.assertEqual(peer.Shape("delta_net", UNGATED).checked(), [(0, 0, 0, 0, 0, 512), (0, 7, 0, 0, 0, 512)])


@unittest.skipUnless(numpy, "no NumPy here")
class Reference(unittest.TestCase):
    def test_two_tokens_by_hand(self):
        q = k = numpy.array([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
        v = numpy.array([[2.0], [4.0]])
        decay, beta = numpy.full((2, 4), 0.5), numpy.array([1.0, 0.5])
        state = numpy.array([[8.0], [8.0], [0.0], [0.0]])
        out = peer.reference(q, k, v, decay, beta, state, True)
        # 8 -> 4, corrected to 2, read as 2 / 2; 2 -> 1, corrected by half of 4 - 1.
        self.assertEqual(out.ravel().tolist(), [1.0, 1.25])
        self.assertEqual(state.ravel().tolist(), [2.5, 2.0, 0.0, 0.0])

    def test_additive_without_a_gate(self):
        q = k = numpy.array([[1.0, 0.0, 0.0, 0.0]] * 2)
        state = numpy.zeros((4, 1))
        out = peer.reference(q, k, numpy.array([[2.0], [4.0]]), None, None, state, False)
        self.assertEqual(out.ravel().tolist(), [1.0, 3.0])


class Entries(unittest.TestCase):
    def test_tables_read_them_as_the_same_problem(self):
        shape = peer.Shape("kda", PLAIN)
        (median, cv), = medians({"benchmarks": peer.entries(shape.name("cold"), [3.0, 1.0, 2.0], {"relative_error": 4e-3})})
        theirs = Row(median, cv)
        ours = Row({"run_name": f"production/kda/automatic/bf16/{PLAIN} cold/manual_time", "real_time": 1.0, "relative_error": 1e-3},
                   {"real_time": 0.0})
        self.assertEqual(theirs.problem, ours.problem)
        self.assertEqual((theirs.kernel, theirs.variant, theirs.microseconds), ("chunk_kda", "cold", 2.0))


class Adding(unittest.TestCase):
    CONTEXT = {"commit": "c", "gpu": "A GPU", "driver": "1", "torch": "2", "triton": "3", "fla": "0.1"}

    def earlier(self, **changes):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "fla.json"
            file.write_text(json.dumps({"context": {**self.CONTEXT, "seed": "7"}, "benchmarks": [{"name": "a"}]}))
            return peer.earlier(file, {**self.CONTEXT, **changes})

    def test_to_results_of_the_same_kind(self):
        self.assertEqual(self.earlier(), ([{"name": "a"}], 7))

    def test_not_to_results_of_another_commit(self):
        with self.assertRaisesRegex(SystemExit, "has commit c, this run d"):
            self.earlier(commit="d")


class Keeping(unittest.TestCase):
    CONTEXT = {**Adding.CONTEXT, "seed": "7"}

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.output = Path(folder.name)
        self.file = self.output / "a-gpu" / "fla.json"

    def names(self):
        return {entry["name"] for entry in json.loads(self.file.read_text())["benchmarks"]}

    def test_replaces_or_adds(self):
        for name, add, expected in (("a", True, {"a"}), ("b", True, {"a", "b"}), ("c", False, {"c"})):
            peer.keep(self.output, self.CONTEXT, [{"name": name}], add)
            self.assertEqual(self.names(), expected)
        self.assertEqual(list(self.file.parent.iterdir()), [self.file])

    def test_processes_side_by_side_lose_nothing(self):
        processes = [multiprocessing.get_context("fork").Process(target=self.add_many, args=(which,)) for which in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        self.assertEqual(self.names(), {f"{which} {i}" for which in range(2) for i in range(20)})

    def add_many(self, which):
        for i in range(20):
            peer.keep(self.output, self.CONTEXT, [{"name": f"{which} {i}"}], True)

    def test_not_what_another_seed_drew(self):
        peer.keep(self.output, self.CONTEXT, [{"name": "a"}], True)
        with self.assertRaisesRegex(SystemExit, "has seed 7, this run 8"):
            peer.keep(self.output, {**self.CONTEXT, "seed": "8"}, [{"name": "b"}], True)

    def test_parts_share_the_shapes_out(self):
        shapes = list(range(7))
        self.assertEqual(sorted(shapes[peer.part("1/3")] + shapes[peer.part("2/3")] + shapes[peer.part("3/3")]), shapes)
        for wrong in ("0/2", "3/2", "2"):
            self.assertRaises(ValueError, peer.part, wrong)


class Autotuner:
    """As far as Triton's is used: configurations that a hook may leave out, and choices."""

    def __init__(self, name, configs, knobs):
        self.name, self.configs, self.knobs, self.cache, self.compiled = name, configs, knobs, {}, []

    def run(self, *args, grid, warmup, **kwargs):
        raise AssertionError("tunes")

    def warmup(self, *args, grid, **kwargs):
        hook = self.knobs.runtime.jit_cache_hook
        self.compiled += [c for c in self.configs if not hook(key=f"{kwargs} {c}", fn=SimpleNamespace(name=self.name), repr="", compile={})]


class Compiling(unittest.TestCase):
    def compiled(self, share, of):
        class Mine(Autotuner):
            pass
        knobs = SimpleNamespace(runtime=SimpleNamespace(jit_cache_hook=None))
        kernels = [Mine(name, range(50), knobs) for name in ("a", "b")]
        peer.only_compile(knobs, Mine, share, of)
        for kernel in kernels:
            kernel.run(grid=(1,), warmup=False, K=128)
        return [(kernel.name, config) for kernel in kernels for config in kernel.compiled]

    def test_every_configuration_in_one_process(self):
        shares = [self.compiled(share, 4) for share in range(4)]
        self.assertEqual(sorted(sum(shares, [])), [(name, config) for name in ("a", "b") for config in range(50)])
        self.assertTrue(all(len(share) >= 10 for share in shares))

    def test_choices_are_forgotten(self):
        kernel = Autotuner("a", [], None)
        kernel.cache["key"] = "choice"
        peer.forget_choices(Autotuner)
        self.assertEqual(kernel.cache, {})


class Timing(unittest.TestCase):
    def clock(self):
        clock = peer.Clock.__new__(peer.Clock)
        clock.repetitions = 3
        return clock

    def test_repetitions_are_long_enough(self):
        times = []
        once = lambda: times.append(2e-4) or times[-1]
        self.assertEqual(self.clock().repetitions_of(once), [200.0] * 3)
        self.assertEqual(len(times), 1 + 3 * 10)

    def test_a_call_that_was_not_queued_in_time_spoils_them(self):
        times = iter([1e-3, 1e-3, None, *[1e-3] * 10])
        self.assertIsNone(self.clock().repetitions_of(lambda: next(times)))

    def test_wrong_results_are_no_times(self):
        call = type("Call", (), {"shape": peer.Shape("kda", PLAIN), "error": 1e-3, "state_error": float("nan")})
        self.assertIn("wrong result", self.clock().entries(call)[0]["error_message"])


if __name__ == "__main__":
    unittest.main()
