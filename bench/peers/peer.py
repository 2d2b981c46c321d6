"""What the scripts that time a peer share: PyTorch, the machine, and result files in the layout of the other programs."""

import datetime
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from measured import results_text, slug

SKIPPED = 77


def skip(name, reason):
    print(f"{name}: skipped: {reason}")
    sys.exit(SKIPPED)


def usable_torch(name):
    """PyTorch with a GPU, or the end of the program."""
    try:
        import torch
    except ImportError:
        skip(name, "there is no PyTorch here")
    if not torch.cuda.is_available():
        skip(name, "PyTorch sees no GPU")
    return torch


def entries(name, times, counters):
    """As Google Benchmark writes them: every repetition, median and coefficient of variation."""
    common = {"name": name, "run_name": name, "repetitions": len(times), "time_unit": "us"}
    result = [{**common, "run_type": "iteration", "repetition_index": i, "real_time": time, **counters} for i, time in enumerate(times)]
    median, mean = statistics.median(times), statistics.fmean(times)
    variation = statistics.stdev(times) / mean if len(times) > 1 else 0.0
    for aggregate, value in (("median", median), ("cv", variation)):
        result.append({**common, "run_type": "aggregate", "aggregate_name": aggregate, "real_time": value, **counters})
    return result


def failed(name, message):
    first_line = str(message).strip().split("\n")[0]
    return [{"name": name, "run_name": name, "run_type": "iteration", "error_occurred": True, "error_message": first_line}]


def cpu_model():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def driver_version():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine(torch, executable, commit, seed):
    """The context that every peer's file has."""
    return {"date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), "executable": executable, "commit": commit,
            "seed": str(seed), "cpu": cpu_model(), "threads": str(os.cpu_count()), "gpu": torch.cuda.get_device_name(0),
            "driver": driver_version(), "cuda": torch.version.cuda, "torch": torch.__version__}


def write(name, context, benchmarks, output):
    path = output / slug(context["gpu"]) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")  # a program that is ended meanwhile leaves the old file
    part.write_text(results_text({"context": context, "benchmarks": benchmarks}))
    part.replace(path)
    return path
