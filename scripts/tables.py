"""What the scripts that write tables from result files share."""

NOTHING = "No results yet.\n"


def unique(values):
    return list(dict.fromkeys(values))


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join([" --- "] * len(header)) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n\n"


def number(value):
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def spread(cv):
    """What follows a median whose repetitions differ much."""
    return f" ±{100 * cv:.0f}%" if cv > 0.05 else ""


def medians(results):
    """(median, coefficient of variation) of every benchmark that was measured, as the entries of the file."""
    aggregates = {}
    for entry in results["benchmarks"]:
        if entry.get("run_type") == "aggregate":
            aggregates.setdefault(entry["run_name"], {})[entry["aggregate_name"]] = entry
    return [(a["median"], a["cv"]) for a in aggregates.values() if "median" in a and "cv" in a]


def machine_heading(context):
    gpu = context["gpu"]
    where = context["cpu"]
    if gpu != "none":
        where = f"{gpu}, driver {context['driver']}, CUDA {context['cuda']}; {where}"
    return (f"**{where}, {context['threads']} threads.** Commit `{context['commit']}`, {context['date'][:10]}, "
            f"seed {context['seed']}.\n\n")
