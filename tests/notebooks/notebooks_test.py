#!/usr/bin/env python3
"""The notebooks run to their end on the committed result files and where there are none, and stop at a malformed one.

Exit code 77: skipped, with the reason.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROGRAMS = ["error_growth", "softmax_vs_delta", "delta_forward"]  # whose results each of them reads
RESULTS = ROOT / "bench" / "results"
NEEDED = "import ipykernel, matplotlib, nbconvert, numpy"
MALFORMED = {
    "truncated": '{"context": {',
    "of another kind": '["context", "benchmarks", "regimes", "rows", "fits"]',
    "without its parts": '{"context": {"gpu": "none"}}',
}


def find_python():
    """A Python that can execute notebooks: the project's own, or the one that runs this."""
    for python in (ROOT / ".venv" / "bin" / "python", Path(sys.executable)):
        if python.exists() and subprocess.run([python, "-c", NEEDED], capture_output=True).returncode == 0:
            return python
    return None


def execute(notebook, results=None):
    """Runs a notebook: the finished process, and the text that its cells printed."""
    with tempfile.TemporaryDirectory() as folder:
        # Nothing of the user's own Jupyter: another kernel of the same name, start-up files.
        apart = {"JUPYTER_DATA_DIR": folder, "JUPYTER_CONFIG_DIR": folder, "IPYTHONDIR": folder}
        where = {"DELTA_ATTENTION_RESULTS": str(results)} if results else {}
        command = [PYTHON, "-m", "nbconvert", "--execute", "--to", "notebook", "--output-dir", folder, notebook]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **apart, **where})
        if done.returncode != 0:
            return done, ""
        cells = json.loads((Path(folder) / notebook.name).read_text())["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        return done, "".join("".join(output.get("text", "")) for output in outputs)


class Notebooks(unittest.TestCase):
    def test_are_there_without_outputs(self):
        self.assertEqual([notebook.stem for notebook in NOTEBOOKS], ["error_growth", "softmax_vs_delta", "staged_kernels"])
        for notebook in NOTEBOOKS:
            for cell in json.loads(notebook.read_text())["cells"]:
                self.assertFalse(cell.get("outputs"), f"{notebook.name}: {cell['id']} has outputs")

    def test_run_on_the_committed_results(self):
        for notebook, program in zip(NOTEBOOKS, PROGRAMS):
            with self.subTest(notebook.name):
                done, text = execute(notebook)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn(", commit " if any(RESULTS.glob(f"*/{program}.json")) else "There is no ", text)

    def test_the_comparison_names_the_crossover(self):
        entry = lambda series, tokens, aggregate, value: {
            "run_name": f"softmax_vs_delta/{series}/B:1 T:{tokens} H:8 D:128 cold/manual_time", "run_type": "aggregate",
            "aggregate_name": aggregate, "real_time": value, "operands": 1e6, "workspace": 0.0}
        times = {"softmax/flash_tc/bf16": {1024: 5.0, 2048: 40.0}, "kda/automatic/bf16": {1024: 10.0, 2048: 20.0}}
        made_up = {"context": {"gpu": "A GPU", "commit": "c", "date": "2026-01-01"},
                   "benchmarks": [entry(series, tokens, aggregate, value) for series, points in times.items()
                                  for tokens, time in points.items() for aggregate, value in (("median", time), ("cv", 0.0))]}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "machine").mkdir()
            (Path(folder) / "machine" / "softmax_vs_delta.json").write_text(json.dumps(made_up))
            done, text = execute(ROOT / "notebooks" / "softmax_vs_delta.ipynb", folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("kda against the fastest softmax in bf16: 2048\n", text)
        self.assertIn("Not measured on this machine: PyTorch's attention.", text)

    def test_run_without_results_and_say_so(self):
        for notebook in NOTEBOOKS:
            with self.subTest(notebook.name), tempfile.TemporaryDirectory() as empty:
                done, text = execute(notebook, empty)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("There is no ", text)

    def test_stop_at_a_malformed_file_and_name_it(self):
        for notebook, program in zip(NOTEBOOKS, PROGRAMS):
            with self.subTest(notebook.name), tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "machine").mkdir()
                (Path(folder) / "machine" / f"{program}.json").write_text(MALFORMED["without its parts"])
                done, _ = execute(notebook, folder)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(f"{program}.json is malformed", done.stderr)

    def test_every_malformed_file_is_an_error(self):
        for kind, text in MALFORMED.items():
            with self.subTest(kind), tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "error_growth.json"
                file.write_text(text)
                code = "import sys, pathlib, results; results.read(pathlib.Path(sys.argv[1]))"
                done = subprocess.run([PYTHON, "-c", code, file], cwd=ROOT / "notebooks", capture_output=True, text=True)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn("is malformed", done.stderr)


if __name__ == "__main__":
    PYTHON = find_python()
    if PYTHON is None:
        print(f"skipped: no Python here can `{NEEDED}`; `scripts/setup --test` installs them into .venv")
        sys.exit(77)
    unittest.main(verbosity=2)
