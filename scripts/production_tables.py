"""Tables of docs/performance.md about the calls that served models make: our kernels beside flash-linear-attention and the memory floor.

They come from production.json and fla.json of one folder of bench/results. Without the latter its columns are left out.
"""

import json
import math
import sys

from tables import NOTHING, machine_heading, medians, number, spread, table, unique

VARIANTS = ("cold", "graph")


class Row:
    """One benchmark: <operation>/<recurrence>/<kernel>/<dtype>/<words> <variant>."""

    def __init__(self, median, cv):
        name = median["run_name"].removesuffix("/manual_time")
        self.operation, self.recurrence, kernel, self.dtype, rest = name.split("/", 4)
        self.words, self.variant = rest.rsplit(" ", 1)
        self.shape = dict(word.split(":", 1) for word in self.words.split())
        self.kernel = median.get("label") or kernel
        self.asked = kernel
        self.microseconds, self.cv = median["real_time"], cv["real_time"]
        self.error, self.state_error = median["relative_error"], median.get("state_relative_error")
        self.operands = median.get("operands")

    @property
    def problem(self):
        return self.recurrence, self.dtype, self.words

    @property
    def group(self):
        """What stands in one table."""
        gate = f", {self.shape['gate']} gate" if "gate" in self.shape else ""
        state = {"both": "initial and final state", "none": "no states"}[self.shape["state"]]
        heads = "" if self.shape["H"] == self.shape["HV"] else ", grouped value heads"
        return f"{self.recurrence}, {self.dtype}{gate}, {state}{heads}"

    @property
    def text(self):
        """'T=2048 H=8', 'B=4 T=2048 H=8', '1024x8 H=2 HV=8'."""
        shape = self.shape
        tokens = shape["lengths"].replace(",", ", ") if "lengths" in shape else f"T={shape['T']}"
        batch = f"B={shape['B']} " if shape["B"] != "1" else ""
        return f"{batch}{tokens} H={shape['H']}" + (f" HV={shape['HV']}" if shape["H"] != shape["HV"] else "")


class Line:
    """One problem with one of our kernels: our rows and the peer's, by variant."""

    def __init__(self, ours, peer):
        self.ours, self.peer = ours, peer
        self.any = next(iter(ours.values()))

    def speed(self, variant):
        """How many times faster we are; None if one of both was not measured."""
        if variant not in self.ours or variant not in self.peer:
            return None
        return self.peer[variant].microseconds / self.ours[variant].microseconds


def time_cell(row):
    return "" if row is None else number(row.microseconds) + spread(row.cv)


def error_cell(error):
    return "" if error is None else f"{error:.1e}"


def speed_cell(speed):
    return "" if speed is None else f"{speed:.2f}"


def lines_of(ours, peer):
    """In the order of our file."""
    theirs, found = {}, {}
    for row in peer:
        theirs.setdefault(row.problem, {})[row.variant] = row
    for row in ours:
        found.setdefault((row.problem, row.asked), {})[row.variant] = row
    return [Line(rows, theirs.get(problem, {})) for (problem, _), rows in found.items()]


def floor_cell(line, context):
    bandwidth = float(context.get("memory_bytes_per_second", 0))
    return number(1e6 * line.any.operands / bandwidth) if bandwidth else ""


def problem_table(lines, context):
    compared = any(line.peer for line in lines)
    header = ["shape", "kernel", "cold", "graph"]
    header += ["fla cold", "fla graph", "fla / ours, cold", "fla / ours, graph"] if compared else []
    header += ["floor", "error", "state error"] + (["fla error"] if compared else [])
    rows = []
    for line in lines:
        cells = [line.any.text, f"`{line.any.kernel}`", *(time_cell(line.ours.get(variant)) for variant in VARIANTS)]
        if compared:
            cells += [time_cell(line.peer.get(variant)) for variant in VARIANTS]
            cells += [speed_cell(line.speed(variant)) for variant in VARIANTS]
        cells += [floor_cell(line, context), error_cell(line.any.error), error_cell(line.any.state_error)]
        if compared:
            cells.append(error_cell(next((row.error for row in line.peer.values()), None)))
        rows.append(cells)
    return table(header, rows)


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(groups):
    """How much faster than the peer, in words that a target can be held against."""
    rows = []
    for name, lines in [*groups.items(), ("all", [line for lines in groups.values() for line in lines])]:
        lines = [line for line in lines if line.any.asked == "automatic"]
        for variant in VARIANTS:
            speeds = [speed for speed in (line.speed(variant) for line in lines) if speed is not None]
            if speeds:
                faster = sum(speed > 1 for speed in speeds)
                rows.append([name, variant, f"{faster} of {len(speeds)}", speed_cell(min(speeds)), speed_cell(geometric_mean(speeds))])
    if not rows:
        return ""
    return "Time of fla / ours, kernel `automatic`:\n\n" + table(["", "variant", "faster than fla", "lowest", "geometric mean"], rows)


def host_table(rows):
    if not rows:
        return ""
    lines = [[row.recurrence, row.text, f"`{row.kernel}`", time_cell(row)] for row in rows]
    return "Host time of one call until it is queued, µs:\n\n" + table(["recurrence", "shape", "kernel", "host"], lines)


def circumstances(ours, peer):
    """Whether both were measured on one machine with one checkout, and what differed."""
    differing = [field for field in ("cpu", "threads", "driver", "commit") if ours[field] != peer[field]]
    if not differing:
        return "Same machine and commit as ours."
    return "Not the same run as ours: " + ", ".join(f"{field} `{peer[field]}`, ours `{ours[field]}`" for field in differing) + "."


def peer_heading(ours, peer):
    return (f"flash-linear-attention {peer['fla']}, PyTorch {peer['torch']}, Triton {peer['triton']}, tuned for each shape, "
            f"{peer['date'][:10]}. {circumstances(ours, peer)}\n\n")


def section(files, brief=False):
    ours, peer = files.get("production"), files.get("fla")
    if not ours or (brief and not peer):
        return ""
    rows = [Row(*pair) for pair in medians(ours)]
    lines = lines_of([row for row in rows if row.operation == "production"], [Row(*pair) for pair in medians(peer)] if peer else [])
    groups = {name: [line for line in lines if line.any.group == name] for name in unique(line.any.group for line in lines)}
    text = machine_heading(ours["context"]) + (peer_heading(ours["context"], peer["context"]) if peer else "") + summary(groups)
    if brief:
        return text
    for name, some in groups.items():
        text += f"{name}, µs:\n\n" + problem_table(some, ours["context"])
    return text + host_table([row for row in rows if row.operation == "host_call"])


def production(results, brief=False):
    """All tables of all machines; `brief`: how they compare with the peer, where it was measured."""
    text = ""
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        files = {name: folder / f"{name}.json" for name in ("production", "fla")}
        try:
            text += section({name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}, brief)
        except (KeyError, ValueError, TypeError) as error:
            sys.exit(f"performance_tables: production.json or fla.json in {folder} is malformed: {error!r}")
    return text or NOTHING
