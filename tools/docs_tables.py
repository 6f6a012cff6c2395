"""The tables of the README and of the page on performance, made from tools/results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any

import docs_reference
import docs_results as results
from docs_results import SHORT

from scan_registry.bench.shares import by_kind
from scan_registry.diagnostics.first_calls import MEASURED
from scan_registry.dispatch.fit import Tier, nearest_tier
from scan_registry.hardware.device import described
from scan_registry.hardware.products import PRODUCTS
from scan_registry.hardware.target import RELEASED, Capability, Target
from scan_registry.kernels.linear_scan.op import random_cases
from scan_registry.kernels.linear_scan.op.bench import Case
from scan_registry.ops.benchmark import Timing
from scan_registry.ops.operator import PASSES

_MADE = re.compile(r"(<!-- made: ([\w-]+) -->\n)(?:(?!<!-- ).)*(<!-- end -->)", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def milliseconds(value: float) -> str:
    """With as many digits as were measured well."""
    return f"{value:.4f}" if value < 1 else f"{value:.3f}"


# --- Scans ------------------------------------------------------------------------------------


def _scan(layout: str, batch: int, channels: int, time: int, dtype: str) -> list[str]:
    """A row: forward and backward, each with our time, share of the roofline and the best baseline."""
    case = {"layout": layout, "batch": batch, "channels": channels, "time": time, "dtype": dtype}
    shape = (batch, channels, time) if layout == "time_last" else (batch, time, channels)
    row = [f"{layout.replace('_', '-')} {shape}", SHORT[dtype]]
    for direction in ("forward", "backward"):
        ours, theirs = (
            results.quickest(
                (e for e in results.timings(name, **case) if e["direction"] == direction), who
            )
            for name, who in (("h100-targets", "scan-registry"), ("h100-bench", "accelerated-scan"))
        )
        assert ours is not None
        share = ours["roofline_ms"] / ours["ms"]
        other = milliseconds(theirs["ms"]) if theirs else "–"
        row += [milliseconds(ours["ms"]), f"{share:.2f}", other]
    return row


_SCANS = ("layout, shape", "dtype", "forward, ms", "of roofline", "accelerated-scan",
          "backward, ms", "of roofline", "accelerated-scan")  # fmt: skip


def scans() -> str:
    """The shapes of ``tools/bench.py`` that are targets, too."""
    shapes = [("time_last", 8, 1536, t) for t in (128, 512, 2048, 8192, 32768)]
    shapes += [("channel_last", 8, 1024, t) for t in (1024, 8192, 32768)]
    return table(_SCANS, [_scan(*s, dtype) for s in shapes for dtype in ("float32", "bfloat16")])


def scans_short() -> str:
    """Few of them, for the README."""
    shapes = [("time_last", 8, 1536, 512), ("time_last", 8, 1536, 8192), ("channel_last", 8, 1024, 8192)]  # fmt: skip
    return table(_SCANS, [_scan(*shape, "bfloat16") for shape in shapes])


def groups() -> str:
    """The share of the roofline by group, on both GPUs."""

    def span(values: Sequence[float]) -> str:
        least, most = f"{min(values):.2f}", f"{max(values):.2f}"
        return least if least == most else f"{least} to {most}"

    rows = [
        [group.name]
        + [span(results.shares(group, gpu, way)) for gpu in ("h200", "h100") for way in ("forward", "backward")]
        for group in results.GROUPS
    ]  # fmt: skip
    head = ("group", "H200 forward", "H200 backward", "H100 forward", "H100 backward")
    return table(head, rows)


def targets() -> str:
    """How many targets are met, and how many are missed by at most 0.01."""
    rows = []
    for gpu in ("h200", "h100"):
        outcomes = results.document(f"{gpu}-targets")["targets"]
        met = sum(outcome["met"] for outcome in outcomes)
        close = sum(not o["met"] and o["target"] - o["ratio"] <= 0.01 for o in outcomes)
        rows.append([results.of_run(f"{gpu}-targets"), f"{met} of {len(outcomes)}", str(close)])
    return table(("run", "targets met", "missed by at most 0.01"), rows)


#: Runs whose shapes differ in how they were chosen.
_CHOICES = {
    "`linear_scan`, the shapes that it is tuned for": ("h100-targets",),
    "`linear_scan`, shapes that people use": ("h200-uses",),
    "`linear_scan`, random shapes": ("h200-bench-random",),
    "`gated_scan`, three sizes": ("h100-bench-gated",),
    "`causal_conv1d`, sizes of Mamba models, one misaligned": ("h100-bench-conv",),
    "`selective_scan`, sizes of Mamba models": ("h200-bench-selective",),
    "`ssd_scan`, sizes of Mamba-2 models": ("h200-bench-ssd",),
}


def choices() -> str:
    """The share of the roofline by how the shapes were chosen: the mean, and the least and the largest."""
    rows = []
    for what, runs in _CHOICES.items():
        ways = [sorted(results.every_share(runs, way)) for way in ("forward", "backward")]
        gpu = runs[0].partition("-")[0].upper()
        spans = [
            f"{geometric_mean(way):.2f} ({way[0]:.{2 if way[0] > 0.01 else 3}f} to {way[-1]:.2f})"
            for way in ways
        ]
        rows.append([what, str(len(ways[0])), gpu, *spans])
    return table(("kernels and shapes", "cases", "GPU", "forward", "backward"), rows)


def kinds() -> str:
    """The share of the roofline by kind of random case, as ``bench --random`` prints it."""
    timings = (
        Timing(**{**timing, "case": Case(**timing["case"])})
        for timing in results.document("h200-bench-random")["timings"]
    )
    rows = [
        [kind.kind, str(kind.cases), *(f"{kind.means[way]:.2f}" for way in PASSES)]
        for kind in by_kind(timings, random_cases.kind)
    ]
    return table(("kind", "cases", *PASSES), rows)


# --- Networks ---------------------------------------------------------------------------------


def _pair(ratios: Mapping[str, float]) -> str:
    ways = ("forward", "forward+backward")
    return " / ".join(f"{ratios[way]:.2f}" for way in ways) if ratios else "–"


def networks() -> str:
    """Recurrent networks, forward / forward + backward."""
    modules = {"lstm": "LSTM", "gru": "GRU", "elman": "RNN", "slstm": "SLSTM"}
    sizes = [("lstm", 12, 64), ("lstm", 3, 256), ("lstm", 1, 768), ("lstm", 1, 1024)]
    sizes += [("slstm", 1, 768), ("gru", 1, 768), ("elman", 1, 768)]
    rows = []
    for cell, heads, dim in sizes:
        size = {"function": cell, "heads": heads, "dim": dim}
        own = results.network("scan-registry", dtype="bfloat16", **size)
        halves = [
            results.network(f"{package}.{modules[cell]}", dtype="float16", **size)
            for package in ("scan_registry.nn", "torch.nn")
        ]
        step = f"{own['forward'] / 1024 * 1e3:.2f}"
        rows.append([f"{cell} {heads} × {dim}", _pair(own), step, *map(_pair, halves)])
    head = ("cell, heads × units", "`rnn`, bf16", "µs per step, forward", "`scan_registry.nn`, fp16",
            "`torch.nn` (cuDNN), fp16")  # fmt: skip
    return table(head, rows)


def flashrnn() -> str:
    """The networks that FlashRNN was timed on, in one run, forward / forward + backward."""
    names = ("scan-registry", "flashrnn cuda_fused", "flashrnn cuda")
    rows = []
    for cell, heads, dim in (
        ("lstm", 12, 64),
        ("lstm", 3, 256),
        ("lstm", 1, 768),
        ("slstm", 1, 768),
    ):
        size = {"function": cell, "heads": heads, "dim": dim, "dtype": "bfloat16"}
        networks = (results.network(name, "h100-bench-rnn-flashrnn", **size) for name in names)
        rows.append([f"{cell} {heads} × {dim}", *map(_pair, networks)])
    return table(
        ("cell, heads × units", "`rnn`", "FlashRNN, `cuda_fused`", "FlashRNN, `cuda`"), rows
    )


# --- First calls ------------------------------------------------------------------------------


def _median(runs: Sequence[Mapping[str, Any]], key: str) -> str:
    values = sorted(run[key] for run in runs)
    middle = values[len(values) // 2]
    return f"{middle:,.0f}" if middle >= 1000 else f"{middle:.3g}"


def tiers() -> str:
    """First calls by tier, in ms."""
    rows = []
    for result in results.document("h200-tiers")["results"]:
        cold, warm = result["cold"], result["warm"]
        rows.append(
            [f"`{result['tier']}`" + result["name"].replace(result["tier"], "")]
            + [_median(runs, key) for key in ("forward_ms", "backward_ms") for runs in (cold, warm)]
        )
    head = ("tier", "forward: first", "second process", "backward: first", "second process")
    return table(head, rows)


def cold_start() -> str:
    """Import, first scan and cost per call, of all packages that were measured."""
    rows = []
    for name, host in (("h200-coldstart", "H200"), ("h100-coldstart", "H100"), ("h200-coldstart-baselines", "H200, another host")):  # fmt: skip
        by_name = {record["name"]: record for record in results.document(name)["results"]}
        scale = _median([{"us": us} for us in by_name["torch.mul"]["plain_us"]], "us")
        for who, record in by_name.items():
            if record["cold"]:
                calls = [
                    _median([{"us": us} for us in record[key]], "us")
                    for key in ("plain_us", "tracked_us")
                ]
                first = [_median(record["cold"], key) for key in ("import_ms", "first_ms")]
                rows.append([f"{who}, {host}", *first, *calls, scale])
    head = ("", "import, ms", "first scan, ms", "µs per call", "with gradients", "`torch.mul`, µs")
    return table(head, rows)


# --- GPUs -------------------------------------------------------------------------------------


def transformers_model(run: str) -> str:
    """A model of transformers on each path."""
    record = results.document(run)
    mamba_ssm = f"mamba_ssm {record['mamba_ssm']}, ms"
    if results.convolution_is_ours(run):
        mamba_ssm = f"mamba_ssm {record['mamba_ssm']} with scan-registry's convolution, ms"
    rows = []
    for what in dict.fromkeys(run["what"] for run in record["runs"]):
        rows.append([what, *map(results.milliseconds, results.of_model(what, run).values())])
    head = ("", "its own path, ms", mamba_ssm, "stand-ins, ms")
    where = f"Measured: {results.of_run(run)}, transformers {record['transformers']}."
    return f"{table(head, rows)}\n\n{where}"


def jax() -> str:
    """Scans under jit, beside torch's call and JAX's own scans."""
    record = results.document("h200-jax")
    ways = {"scan_registry.jax": "ours", "the torch call": "torch", "associative_scan": "associative_scan", "lax.scan": "lax.scan"}  # fmt: skip
    rows = []
    for row in record["speed"]:
        both = (
            f"{results.milliseconds(row[way])} / {results.milliseconds(row[f'{way}, with backward'])}"
            if way in row
            else ""
            for way in ways.values()
        )
        last = "time" if row["dim"] == -1 else "channels"
        rows.append([f"{tuple(row['shape'])}, {last} last", row["dtype"], *both])
    where = f"Milliseconds, forward / with backward. Measured: {results.of_run('h200-jax')}."
    return f"{table(('shape', 'dtype', *ways), rows)}\n\n{where}"


def gpus() -> str:
    """Every GPU that doctor knows by name, and the tier of each language with a wheel of all archives."""
    by_capability: dict[Capability, list[str]] = {}
    for product in PRODUCTS:
        by_capability.setdefault(product.capability, []).append(
            f"{product.name} ({', '.join(product.also)})" if product.also else product.name
        )
    rows = [
        ["{}.{}".format(*capability), ", ".join(names), released_tier(capability, "cuda"), released_tier(capability, "triton")]
        for capability, names in by_capability.items()
    ]  # fmt: skip
    return table(("compute capability", "GPUs that `--for` knows", "CUDA C++", "Triton"), rows)


def released_tier(capability: Capability, language: str) -> str:
    """The closest tier of the archives in releases, with its archive. Triton's machine code from 9.0 up runs on one
    capability."""
    released = [Target.parse(label) for label in RELEASED]
    fitting = []
    for target in released:
        exact = language == "triton" and target.capability >= (9, 0) and not target.is_ptx
        code = Target(target.capability, suffix="a") if exact else target
        if code.misfit(capability) is None:
            fitting.append(
                (nearest_tier(code, described(capability)), -target.number, target.label)
            )
    tier, _, label = min(fitting, default=(Tier.REFERENCE, 0, ""))
    return f"`{tier}`, {label}" if label else f"`{tier}`: too old"


def first_calls() -> str:
    """The first call by tier and language, as doctor prints it."""
    kinds = [(tier, language) for tier in (Tier.EXACT, Tier.SAME_MAJOR, Tier.PTX, Tier.JIT) for language in ("cuda", "triton")]  # fmt: skip
    rows = []
    for tier, language in [*kinds, (Tier.REFERENCE, "torch")]:
        if (tier, language) == (Tier.SAME_MAJOR, "triton"):
            continue  # exists among 8.x alone, where the default wheel gives it to no GPU
        times = MEASURED.get((tier, language))
        cells = [f"{time:.3g}" for time in times] if times else ["not measured"] * 2
        name = {"cuda": "CUDA C++", "triton": "Triton", "torch": "plain torch"}[language]
        rows.append([f"`{tier}`", name, *cells])
    return table(("tier", "language", "first call, ms", "in later processes"), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "scans": scans,
    "scans-short": scans_short,
    "choices": choices,
    "kinds": kinds,
    "groups": groups,
    "targets": targets,
    "networks": networks,
    "flashrnn": flashrnn,
    "tiers": tiers,
    "gpus": gpus,
    "first-calls": first_calls,
    "cold-start": cold_start,
    "mamba2": partial(transformers_model, results.MAMBA2),
    "jax": jax,
    "nemotron_h": partial(transformers_model, results.NEMOTRON_H),
}


def with_tables(text: str) -> str:
    """A page with its tables made anew: what stands between ``<!-- made: NAME -->`` and ``<!-- end -->``."""

    def replacement(match: re.Match[str]) -> str:
        if match[2] == "names":  # of the page itself
            content = table(("name", "what it does"), docs_reference.names(text))
        else:
            content = TABLES[match[2]]()
        return f"{match[1]}\n{content}\n\n{match[3]}"

    return _MADE.sub(replacement, text)
