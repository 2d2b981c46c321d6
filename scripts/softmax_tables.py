"""Tables of docs/performance.md about softmax attention: its kernels beside one another and beside PyTorch's, and against delta attention.

They come from softmax_forward.json, softmax_vs_delta.json and sdpa.json of one folder of bench/results. What a file does not have is left
out of a table, and a table without rows is left out of the page.
"""

import json
import sys

from tables import NOTHING, machine_heading, medians, number, table, unique

PEERS = {"cudnn": "cuDNN", "flash": "PyTorch flash", "efficient": "PyTorch efficient", "math": "PyTorch math"}
MEGABYTE = 1e6
ROWMAX_TITLE = ("Tiles merged by row maximum (merge=0) or element by element (merge=1), exp exact (exp=0) or fast (exp=1), `rowmax`, f32, "
                "unmasked, graph replay, µs:")


class Row:
    """One benchmark of softmax attention, ours or a peer's: <operation>/<kernel>/<dtype>/<shape> [settings:...] <variant>."""

    def __init__(self, median, cv):
        name = median["run_name"].removesuffix("/manual_time")
        self.operation, self.kernel, self.dtype, rest = name.split("/", 3)
        *words, self.variant = rest.split()
        self.shape = dict(word.split(":", 1) for word in words)
        self.settings = self.shape.pop("settings", "")
        self.batch, self.queries, self.keys = (int(self.shape[key]) for key in ("B", "Nq", "Nkv"))
        self.dim, self.mask, self.page = int(self.shape["D"]), self.shape["mask"], int(self.shape.get("page", 0))
        self.microseconds, self.cv = median["real_time"], cv["real_time"]
        self.operands, self.workspace = median["operands"], median["workspace"]
        self.model_bytes, self.vs_predicted = median.get("model_bytes"), median.get("vs_predicted")


class Times:
    """Rows to be looked up."""

    def __init__(self, rows):
        self.rows = rows

    def where(self, **wanted):
        return Times([row for row in self.rows if all(getattr(row, key) == value for key, value in wanted.items())])

    def all(self, key):
        return sorted({getattr(row, key) for row in self.rows})

    def in_order(self, key):
        return unique(getattr(row, key) for row in self.rows)

    def one(self, **wanted):
        """The row, or None."""
        rows = self.where(**wanted).rows
        return rows[0] if rows else None

    def __bool__(self):
        return bool(self.rows)


def quotient(over, under):
    return over.microseconds / under.microseconds if over and under else None


def cells(values, text):
    return ["" if value is None else text(value) for value in values]


def over_lengths(times, head, lines):
    """A table with a column for every length. `lines` are (first cells, function of the length that gives a cell or None, its text)."""
    lengths = times.all("keys")
    rows = [[*first, *cells([value(length) for length in lengths], text)] for first, value, text in lines]
    rows = [row for row in rows if any(row[len(head):])]
    return table([*head, *(f"N={length}" for length in lengths)], rows) if rows else ""


def titled(title, text):
    return f"{title}\n\n{text}" if text else ""


def square(times):
    """Self-attention with plain settings: B=2, as many rows as keys."""
    return Times([row for row in times.rows if row.queries == row.keys and row.batch == 2 and not row.settings])


def by_length(times, **wanted):
    chosen = times.where(**wanted)
    return lambda length: chosen.one(keys=length)


def microseconds(rows):
    return lambda length: getattr(rows(length), "microseconds", None)


def kernel_label(row):
    return PEERS[row.kernel] if row.operation == "sdpa" else f"`{row.kernel}`"


def every_kernel(times):
    text = ""
    chosen = square(times).where(mask="full", variant="graph")
    for dim in chosen.all("dim"):
        some = chosen.where(dim=dim)
        lines = []
        for kernel, dtype in unique((row.kernel, row.dtype) for row in some.rows):
            rows = by_length(some, kernel=kernel, dtype=dtype)
            label = kernel_label(some.one(kernel=kernel, dtype=dtype))
            if dtype == "f32" or kernel in ("flash_tc", *PEERS):
                lines.append(([label, dtype], microseconds(rows), number))
        text += titled(f"Time in µs, D={dim}, unmasked, graph replay:", over_lengths(some, ["kernel", "dtype"], lines))
    return text


def ratios(times, title, head, pairs):
    """`pairs` are (first cells, rows of the numerator, rows of the denominator)."""
    lines = [(first, lambda n, over=over, under=under: quotient(over(n), under(n)), lambda value: f"{value:.2f}")
             for first, over, under in pairs]
    return titled(title, over_lengths(times, head, lines))


def of_dims(times, over, under, **common):
    """Pairs for every D of the same kind of rows but for what `over` and `under` say."""
    return [([str(dim)], by_length(times, dim=dim, **common, **over), by_length(times, dim=dim, **common, **under))
            for dim in times.all("dim")]


def naive_against_tiled(times):
    chosen = square(times).where(mask="full", variant="graph", dtype="f32")
    return ratios(chosen, "`naive` / `tiled`, above 1 where tiling wins:", ["D"], of_dims(chosen, {"kernel": "naive"}, {"kernel": "tiled"}))


def fused_against_padded(times):
    chosen = square(times).where(mask="full", variant="graph", dtype="f32")
    return ratios(chosen, "`vec_fused` / `vec_padded`, what masks and layouts cost where none is used:", ["D"],
                  of_dims(chosen, {"kernel": "vec_fused"}, {"kernel": "vec_padded"}))


def storage_types(times):
    chosen = square(times).where(kernel="vec_fused", mask="full", variant="graph")
    pairs = [([str(dim), dtype], by_length(chosen, dim=dim, dtype=dtype), by_length(chosen, dim=dim, dtype="f32"))
             for dim in chosen.all("dim") for dtype in ("f16", "bf16")]
    return ratios(chosen, "`vec_fused` with 16-bit q, k, v and output / with f32:", ["D", "dtype"], pairs)


def saving(causal, full):
    ratio = quotient(causal, full)
    return None if ratio is None else 100 * (1 - ratio)


def causal_saving(times):
    chosen = square(times)
    chosen = Times([row for row in chosen.rows if chosen.where(kernel=row.kernel, mask="causal")])
    lines = []
    for kernel, dtype in unique((row.kernel, row.dtype) for row in chosen.rows):
        some = chosen.where(kernel=kernel, dtype=dtype)
        for dim in some.all("dim"):
            for variant in some.in_order("variant"):
                causal, full = (by_length(some, dim=dim, variant=variant, mask=mask) for mask in ("causal", "full"))
                lines.append(([kernel_label(some.rows[0]), dtype, str(dim), variant],
                              lambda n, causal=causal, full=full: saving(causal(n), full(n)), lambda value: f"{value:.0f}"))
    return titled("Time that a causal mask saves, in %:", over_lengths(chosen, ["kernel", "dtype", "D", "variant"], lines))


def settings_scan(times, kernel, title):
    """Settings across, the fastest in bold."""
    chosen = Times([row for row in times.where(kernel=kernel, dtype="f32").rows if row.settings])
    settings = chosen.in_order("settings")
    lines = []
    for dim in chosen.all("dim"):
        for length in chosen.all("keys"):
            some = chosen.where(dim=dim, keys=length)
            found = [getattr(some.one(settings=one), "microseconds", None) for one in settings]
            fastest = min((value for value in found if value is not None), default=None)
            if fastest is not None:
                lines.append([str(dim), str(length), *cells(found, lambda t: f"**{number(t)}**" if t == fastest else number(t))])
    return titled(title, table(["D", "N", *settings], lines)) if lines else ""


def memory(times):
    chosen = square(times).where(mask="full", variant="graph", dim=64)
    kernels = unique((row.kernel, row.dtype) for row in chosen.rows)
    lines = []
    for kernel, dtype in kernels:
        rows = by_length(chosen, kernel=kernel, dtype=dtype)
        lines.append(([kernel_label(chosen.one(kernel=kernel)), dtype],
                      lambda n, rows=rows: rows(n) and (rows(n).operands + rows(n).workspace) / MEGABYTE, number))
    return titled("Memory in MB (operands and workspace), B=2, H=8, D=64:", over_lengths(chosen, ["kernel", "dtype"], lines))


def model(times):
    chosen = square(times).where(mask="full", variant="graph", dim=64, operation="softmax_forward")
    lines = []
    for kernel, dtype in unique((row.kernel, row.dtype) for row in chosen.rows if row.vs_predicted):
        rows = by_length(chosen, kernel=kernel, dtype=dtype)
        lines.append(([f"`{kernel}`", dtype], lambda n, rows=rows: rows(n) and rows(n).vs_predicted, number))
    return titled("Measured time / time that the roofline model predicts, D=64, unmasked, graph replay:",
                  over_lengths(chosen, ["kernel", "dtype"], lines))


def decoding(times, context):
    chosen = Times([row for row in times.rows if row.queries == 1])
    columns = unique((row.kernel, row.page) for row in chosen.rows)
    ceiling = float(context.get("measured_copy_bytes_per_second", 0))

    def text(row):
        share = f" ({100 * row.model_bytes / row.microseconds * 1e6 / ceiling:.0f}%)" if ceiling and row.model_bytes else ""
        return number(row.microseconds) + share

    lines = []
    for batch in chosen.all("batch"):
        for keys in chosen.where(batch=batch).all("keys"):
            found = [chosen.one(batch=batch, keys=keys, kernel=kernel, page=page) for kernel, page in columns]
            lines.append([str(batch), str(keys), *cells(found, text)])
    header = [f"`{kernel}`" + (f", pages of {page}" if page else "") for kernel, page in columns]
    title = "Decoding, one row of q, H=32, Hkv=8, D=128, bf16, cold, µs (share of the measured copy bandwidth, by the model's bytes):"
    return titled(title, table(["B", "Nkv", *header], lines)) if lines else ""


def against_peers(times):
    chosen = Times([row for row in square(times).rows if row.dtype == "bf16"])
    lines = []
    for peer in ("cudnn", "flash"):
        for dim in (64, 128):
            for mask in ("full", "causal"):
                for variant in ("graph", "cold"):
                    some = chosen.where(dim=dim, mask=mask, variant=variant)
                    theirs, ours = by_length(some, kernel=peer), by_length(some, kernel="flash_tc")
                    lines.append(([PEERS[peer], str(dim), mask, variant], theirs, ours))
    return ratios(chosen, "Speed of `flash_tc` against PyTorch's attention in bf16 (its time / ours, above 1 where ours is faster):",
                  ["against", "D", "mask", "variant"], lines)


def worst(values):
    values = [value for value in values if value is not None]
    return min(values) if values else None


def targets(times):
    """What the kernels are held to: figure, worst value found, bound, all 'at least'."""
    chosen = square(times)
    long = [length for length in chosen.all("keys") if length >= 2048]

    def speed(mask):
        some = chosen.where(dim=128, mask=mask, dtype="bf16", variant="graph")
        return worst(quotient(some.one(kernel="cudnn", keys=n), some.one(kernel="flash_tc", keys=n)) for n in long)

    def saved(kernel):
        some = chosen.where(kernel=kernel, keys=4096, variant="graph")
        return worst(saving(some.one(dim=dim, dtype=dtype, mask="causal"), some.one(dim=dim, dtype=dtype, mask="full"))
                     for dim in some.all("dim") for dtype in some.all("dtype"))

    plain = chosen.where(mask="full", variant="graph", dtype="f32")
    fused = worst(quotient(plain.one(kernel="vec_padded", dim=dim, keys=n), plain.one(kernel="vec_fused", dim=dim, keys=n))
                  for dim in plain.all("dim") for n in plain.all("keys"))
    found = [("speed of `flash_tc` against cuDNN, bf16, D=128, N ≥ 2048, full", speed("full"), 0.6),
             ("speed of `flash_tc` against cuDNN, bf16, D=128, N ≥ 2048, causal", speed("causal"), 0.6),
             ("speed of `vec_fused` against `vec_padded`, f32, unmasked", fused, 0.98),
             ("% saved by a causal mask at N=4096, `vec_fused`", saved("vec_fused"), 40),
             ("% saved by a causal mask at N=4096, `flash_tc`", saved("flash_tc"), 40)]
    lines = [[what, f"at least {bound:g}", f"{value:.3g}", "yes" if value >= bound else "no"] for what, value, bound in found
             if value is not None]
    return titled("Targets, graph replay, the worst of the shapes that each is about:",
                  table(["figure", "target", "worst", "met"], lines)) if lines else ""


def peer_heading(context):
    return f"PyTorch {context['torch']}, cuDNN {context['cudnn']}, driver {context['driver']}, {context['date'][:10]}.\n\n"


def ceilings(context):
    names = {"measured_copy_bytes_per_second": ("copy", "GB/s", 1e9),
             "measured_f32_flops_per_second": ("f32 multiply-adds", "TFLOP/s", 1e12),
             "measured_bf16_mma_flops_per_second": ("bf16 mma.sync", "TFLOP/s", 1e12)}
    found = [f"{what} {number(float(context[key]) / unit)} {name}" for key, (what, name, unit) in names.items() if key in context]
    return f"Ceilings measured in this run: {', '.join(found)}.\n\n" if found else ""


def forward_section(files):
    ours, peer = files.get("softmax_forward"), files.get("sdpa")
    if not ours:
        return ""
    times = Times([Row(*pair) for results in (ours, peer) if results for pair in medians(results)])
    text = machine_heading(ours["context"]) + (peer_heading(peer["context"]) if peer else "") + ceilings(ours["context"])
    return text + "".join([
        targets(times), every_kernel(times), naive_against_tiled(times), fused_against_padded(times), causal_saving(times),
        storage_types(times), settings_scan(times, "rowmax", ROWMAX_TITLE),
        settings_scan(times, "vec_fused", "Keys a tile, `vec_fused`, f32, unmasked, graph replay, µs:"), memory(times), against_peers(times),
        decoding(times, ours["context"]), model(times)])


class Contender:
    """One line of the comparison: softmax or a recurrence, by a kernel, in a dtype, for a batch; points by T."""

    def __init__(self, method, kernel, dtype, batch):
        self.method, self.kernel, self.dtype, self.batch = method, kernel, dtype, batch
        self.microseconds, self.megabytes, self.chosen = {}, {}, {}

    @property
    def softmax(self):
        return self.method == "softmax"

    @property
    def label(self):
        return PEERS.get(self.kernel, self.kernel) if self.softmax else f"{self.method}, {self.kernel}"

    def add(self, tokens, median):
        self.microseconds[tokens] = median["real_time"]
        self.megabytes[tokens] = (median["operands"] + median["workspace"]) / MEGABYTE
        self.chosen[tokens] = median.get("label") or self.kernel


def contenders(files):
    """Of softmax_vs_delta.json, and of the peers on the same shapes: H=8, D=128, causal, cold."""
    found = {}

    def add(method, kernel, dtype, batch, tokens, median):
        key = (method, kernel, dtype, int(batch))
        found.setdefault(key, Contender(*key)).add(int(tokens), median)

    for median, _ in medians(files["softmax_vs_delta"]):
        _, method, kernel, dtype, rest = median["run_name"].removesuffix("/manual_time").split("/", 4)
        shape = dict(word.split(":", 1) for word in rest.split() if ":" in word)
        add(method, kernel, dtype, shape["B"], shape["T"], median)
    batches = {key[3] for key in found}
    for pair in medians(files["sdpa"]) if files.get("sdpa") else []:
        row = Row(*pair)
        if row.dim == 128 and row.mask == "causal" and row.variant == "cold" and row.batch in batches:
            add("softmax", row.kernel, row.dtype, row.batch, row.keys, pair[0])
    return list(found.values())


def strongest(softmax):
    """The fastest softmax for each T, as one contender."""
    best = Contender("softmax", "the fastest softmax", softmax[0].dtype, softmax[0].batch)
    for one in softmax:
        for tokens, time in one.microseconds.items():
            if time < best.microseconds.get(tokens, float("inf")):
                best.microseconds[tokens], best.megabytes[tokens] = time, one.megabytes[tokens]
    return best


def crossover(delta, softmax):
    """The smallest T from which delta is faster wherever both were measured; None if it is not at the largest such T, or there is none."""
    first = None
    for tokens in sorted(set(delta.microseconds) & set(softmax.microseconds)):
        if delta.microseconds[tokens] >= softmax.microseconds[tokens]:
            first = None
        elif first is None:
            first = tokens
    return first


def crossover_text(delta, softmax):
    common = set(delta.microseconds) & set(softmax.microseconds)
    if not common:
        return ""
    first = crossover(delta, softmax)
    return f"not up to {max(common)}" if first is None else f"{first}" + (" (all)" if first == min(common) else "")


def crossover_table(some):
    """Rows: delta contenders; columns: softmax ones of the same dtype and batch."""
    softmax = [one for one in some if one.softmax]
    delta = [one for one in some if not one.softmax]
    if not softmax or not delta:
        return ""
    columns = [*softmax, *([strongest(softmax)] if len(softmax) > 1 else [])]
    lines = [[one.label, *(crossover_text(one, other) for other in columns)] for one in delta]
    return table(["delta attention", *(f"against {one.label}" for one in columns)], lines)


def over_tokens(some, figure):
    lengths = sorted({tokens for one in some for tokens in getattr(one, figure)})
    lines = [[one.label, *cells([getattr(one, figure).get(tokens) for tokens in lengths], number)] for one in some]
    return table(["", *(f"T={tokens}" for tokens in lengths)], lines)


def vs_section(files):
    if not files.get("softmax_vs_delta"):
        return ""
    found = contenders(files)
    text = machine_heading(files["softmax_vs_delta"]["context"])
    for batch in sorted({one.batch for one in found}):
        for dtype in unique(one.dtype for one in found):
            some = [one for one in found if one.batch == batch and one.dtype == dtype]
            where = f"B={batch}, {dtype}"
            text += titled(f"{where}: the smallest T from which delta attention is faster:", crossover_table(some))
            text += titled(f"{where}, time in µs:", over_tokens(some, "microseconds") if some else "")
            text += titled(f"{where}, memory in MB:", over_tokens(some, "megabytes") if some else "")
    return text


def read_folder(folder):
    """The files of one machine, by program."""
    files = {}
    for program in ("softmax_forward", "softmax_vs_delta", "sdpa"):
        file = folder / f"{program}.json"
        if file.exists():
            files[program] = json.loads(file.read_text())
    return files


def sections(results, section):
    text = ""
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        try:
            text += section(read_folder(folder))
        except (KeyError, ValueError, TypeError) as error:
            sys.exit(f"performance_tables: a file of softmax attention in {folder} is malformed: {error!r}")
    return text or NOTHING


def softmax_forward(results):
    return sections(results, forward_section)


def softmax_vs_delta(results):
    return sections(results, vs_section)
