"""What every script that keeps measurements shares: the commit they belong to and the folder they go to."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def git(*arguments):
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip()


def checkout_commit(allow_dirty):
    """The checkout's commit. Results and the pages made from them may be uncommitted, nothing else."""
    dirty = git("status", "--porcelain", "--", ".", ":!bench/results", ":!docs/performance.md",
                ":!docs/numerics.md")
    if not dirty:
        return git("rev-parse", "HEAD")
    if not allow_dirty:
        sys.exit(f"uncommitted changes; commit them, or pass --allow-dirty to mark the results so:\n{dirty}")
    return git("rev-parse", "HEAD") + "-dirty"


def prebuilt_commit(allow_dirty):
    """For binaries that were built elsewhere: whoever copied them names their commit, or it is the checkout's."""
    given = os.environ.get("DELTA_ATTENTION_COMMIT")
    if given:
        return given
    if not (ROOT / ".git").exists():
        sys.exit("no git checkout here; set DELTA_ATTENTION_COMMIT to the commit that the binaries were built from")
    return checkout_commit(allow_dirty)


def slug(name):
    """'NVIDIA H200' -> 'nvidia-h200', 'Intel(R) Xeon(R) Processor' -> 'intel-xeon-processor'."""
    name = re.sub(r"\((r|tm)\)", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def results_text(results):
    """A result file's text: JSON with a line a benchmark."""
    lines = ",\n  ".join(json.dumps(benchmark) for benchmark in results["benchmarks"])
    context = json.dumps(results["context"], indent=1).replace("\n", "\n ")
    return f'{{\n "context": {context},\n "benchmarks": [\n  {lines}\n ]\n}}\n'
