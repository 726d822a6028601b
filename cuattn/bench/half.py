"""float16 and bfloat16 attention beside its peers, speed and memory: ``python -m cuattn bench``.

Every cell of the grid (head_dim, mask, seqlen, pass) is timed in one process: cuattn and the peers
that are installed take turns. A peer that does not take a case, or computes something else, is left
out of it; the reason is a row of the JSON. Ratios are a peer's time over cuattn's: above 1, cuattn
is faster.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cuattn._typing import Array
from cuattn.bench import plot, report, workloads
from cuattn.bench.memory import release
from cuattn.bench.peers import TITLES, LackError, Peer, Runner, find, reason
from cuattn.bench.timing import REPEATS, rounds
from cuattn.bench.workloads import Workload, cupy_with_device, normal_on_device
from cuattn.jit.replay import AFTER_CALLS

T = TypeVar("T")
Row = dict[str, Any]
PARTS = ("grid", "alone", "few-queries", "long")
#: A peer whose result is further from cuattn's, as a part of its largest element, computes
#: something else. Roundings of 16 bit stay far below.
DIFFERENCE = 0.1


def measure_speed(
    cupy: Any, workload: Workload, peers: Sequence[Peer], repeats: int = REPEATS
) -> Iterator[Row]:
    """A row for every pass and peer; cuattn is the first peer, and it may not fail."""
    arrays = normal_on_device(cupy, workload)
    runners = {peer.name: _attempt(peer, peer.start, workload, arrays) for peer in peers}
    for name in workload.passes:
        ours = getattr(runners["cuattn"][0], name)()
        expected = [array.astype(cupy.float32) for array in _as_tuple(ours)]
        calls: dict[str, Callable[[], Any]] = {}
        for peer in peers:
            call, (runner, why) = None, runners[peer.name]
            if runner is not None:
                call, why = _attempt(peer, _agreeing, cupy, peer, runner, name, expected)
            if call is None:
                yield _left_out("speed", workload, name, peer, why)
            else:
                calls[peer.name] = call
        del ours, expected
        for _ in range(AFTER_CALLS):
            calls["cuattn"]()  # so that a burst is of calls as they are launched when repeated
        all_seconds = rounds(*calls.values(), cupy=cupy, repeats=repeats)
        flops, own = workload.flops(name), statistics.median(all_seconds[0])
        for title, seconds in zip(calls, all_seconds, strict=True):
            median = statistics.median(seconds)
            yield {
                "kind": "speed",
                **workload.facts(),
                "pass": name,
                "peer": title,
                "seconds": median,
                "rounds": seconds,
                "tflops": flops / median / 1e12,
                "ratio_to_cuattn": median / own,
            }


def _agreeing(
    cupy: Any, peer: Peer, runner: Runner, name: str, expected: Sequence[Array]
) -> Callable[[], Any]:
    """A pass of a peer, called once: its results must be about those that are expected."""
    call: Callable[[], Any] = getattr(runner, name)
    for result, wanted in zip(_as_tuple(call()), expected, strict=True):
        array = peer.as_cupy(result).astype(cupy.float32)
        difference = float(abs(array - wanted).max() / abs(wanted).max())
        if not difference <= DIFFERENCE:  # NaN neither
            raise LackError(f"differs from cuattn by {difference:.2g} of the largest element")
    return call


def measure_memory(cupy: Any, workload: Workload, peers: Sequence[Peer]) -> Iterator[Row]:
    """A row for every peer: bytes beyond inputs and outputs, of a forward and with its backward."""
    arrays = normal_on_device(cupy, workload)
    for peer in peers:
        for name, method in (("forward", "forward"), ("forward+backward", "both")):
            release(cupy)
            found, why = _attempt(peer, _bytes, peer, workload, arrays, method)
            if found is None:
                yield _left_out("memory", workload, name, peer, why)
                continue
            taken, outputs = found
            yield {
                "kind": "memory",
                **workload.facts(),
                "pass": name,
                "peer": peer.name,
                "input_bytes": sum(array.nbytes for array in arrays),
                "output_bytes": outputs,
                "extra_bytes": taken - outputs,
                "score_matrix_bytes": 4 * workload.num_scores,
            }


def _bytes(peer: Peer, workload: Workload, arrays: Sequence[Array], method: str) -> tuple[int, int]:
    """What a call takes at most, and what of that are its results."""
    function = getattr(peer.start(workload, arrays), method)
    function()  # what is made once, such as a plan, is not counted
    results, taken = peer.taken(function)
    return taken, sum(array.nbytes for array in _as_tuple(results))


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def _attempt(peer: Peer, function: Callable[..., T], *arguments: Any) -> tuple[T | None, str]:
    """What a peer's function gives, or None and what its error and its warnings say."""
    if peer.name == "cuattn":
        return function(*arguments), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return function(*arguments), ""
        except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
            said = (" ".join(str(each.message).split()) for each in caught)
            return None, "; ".join(dict.fromkeys([reason(error), *said]))


def _left_out(what: str, workload: Workload, name: str, peer: Peer, why: str) -> Row:
    facts = {**workload.facts(), "pass": name, "peer": peer.name}
    return {"kind": "left out", "of": what, **facts, "reason": why}


def summary(rows: Iterable[Row]) -> list[Row]:
    """Over the cells of the grid, for every pass and peer: mean and least ratio.

    The peer "best" is in every cell the fastest that is not cuattn.
    """
    cells: dict[tuple[str, str], dict[tuple[Any, ...], float]] = {}
    for row in rows:
        if row["kind"] == "speed" and row["workload"] == "grid" and row["peer"] != "cuattn":
            cell, ratio = (row["head_dim"], row["mask"], row["seqlen_q"]), row["ratio_to_cuattn"]
            cells.setdefault((row["pass"], row["peer"]), {})[cell] = ratio
            best = cells.setdefault((row["pass"], "best"), {})
            best[cell] = min(ratio, best.get(cell, ratio))
    order = ("best", *TITLES)
    found = []
    for name, peer in sorted(cells, key=lambda key: (key[0] != "forward", order.index(key[1]))):
        ratios = cells[name, peer]
        worst = min(ratios, key=lambda cell: ratios[cell])
        found.append(
            {
                "pass": name,
                "peer": peer,
                "cells": len(ratios),
                "mean": statistics.geometric_mean(ratios.values()),
                "least": ratios[worst],
                "least_at": dict(zip(("head_dim", "mask", "seqlen"), worst, strict=True)),
            }
        )
    return found


def run(
    cupy: Any, chosen: Sequence[Workload], peers: Sequence[Peer], repeats: int = REPEATS
) -> Iterator[list[Row]]:
    """The rows of every workload, as soon as they are there."""
    for workload in chosen:
        rows = list(measure_speed(cupy, workload, peers, repeats)) if workload.passes else []
        if workload.memory:
            rows += measure_memory(cupy, workload, peers)
        release(cupy)
        yield rows


def chosen_workloads(arguments: argparse.Namespace) -> list[Workload]:
    """What the options ask for."""
    dtype, passes = arguments.dtype, tuple(arguments.passes)
    cells: dict[str, Any] = {
        "head_dims": arguments.head_dims,
        "masks": arguments.masks,
        "passes": passes,
    }
    chosen = []
    if "grid" in arguments.workloads:
        chosen += workloads.grid(dtype, seqlens=arguments.seqlens, **cells)
    if "alone" in arguments.workloads:
        chosen += workloads.alone(dtype, **cells)
    if "few-queries" in arguments.workloads and "forward" in passes:
        chosen.append(workloads.few_queries(dtype))
    if "long" in arguments.workloads:
        chosen += workloads.long(dtype, passes)
    return chosen


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    choose: dict[str, Any] = {"nargs": "+", "metavar": "X"}
    of_cells = "of the grid and of sequences alone"
    lengths, all_lengths = workloads.SEQLENS, (*workloads.SHORT_SEQLENS, *workloads.SEQLENS)
    for option, values, choices, what in (
        ("--workloads", PARTS, PARTS, "parts to run: %(choices)s"),
        ("--head-dims", workloads.HEAD_DIMS, workloads.HEAD_DIMS, f"{of_cells}: %(choices)s"),
        ("--masks", workloads.MASKS, workloads.MASKS, f"{of_cells}: %(choices)s"),
        ("--seqlens", lengths, all_lengths, f"of the grid: %(choices)s (from {lengths[0]})"),
        ("--passes", workloads.PASSES, workloads.PASSES, "passes to time: %(choices)s"),
    ):
        parser.add_argument(
            option, choices=choices, default=values, type=type(values[0]), help=what, **choose
        )
    parser.add_argument("--dtype", choices=workloads.DTYPES, default=workloads.DTYPES[0])
    others = [name for name in TITLES if name != "cuattn"]
    parser.add_argument(
        "--peers",
        nargs="*",
        metavar="X",
        choices=others,
        default=others,
        help="beside cuattn, where they are installed: %(choices)s",
    )
    parser.add_argument(
        "--rounds", type=_positive, default=REPEATS, help="that medians are of (%(default)s)"
    )
    parser.add_argument(
        "--json", type=_to_write, metavar="PATH", help="write the numbers there, cell by cell"
    )
    parser.add_argument(
        "--plot",
        type=_picture,
        metavar="PATH",
        help="draw speed there, a .png or .svg, and memory in a second file beside it",
    )
    parser.add_argument(
        "--from-json",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="measure nothing: print and draw what earlier runs wrote",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a number of 1 or more")
    return int(text)


def _to_write(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a path in a folder that exists")
    return path


def _picture(text: str) -> Path:
    path = _to_write(text)
    if path.suffix not in plot.SUFFIXES:
        expected = " or ".join(plot.SUFFIXES)
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a path that ends in {expected}")
    return path


def main(arguments: argparse.Namespace) -> int:
    """Measure, or read what was measured; print, write and draw it."""
    cupy = None if arguments.from_json else cupy_with_device()
    if arguments.plot:
        plot.check_importable()  # before minutes of work that end in a picture
    if arguments.from_json:
        data = _read(arguments.from_json)
        present = {row["peer"] for row in data["rows"] if row["kind"] != "left out"}
        names = [name for name in TITLES if name in present]
        _print_titles(names)
        _print_rows(data["rows"], names)
    else:
        data = _measure(cupy, arguments)
    _print_left_out(data["rows"])
    _print_summary(data["summary"])
    if arguments.plot:
        for path in plot.draw(data, arguments.plot):
            print(f"drawn: {path}")
    return 0


def _measure(cupy: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    peers, missing = find(cupy, arguments.peers)
    for peer in peers:
        print(f"{peer.name:10} {TITLES[peer.name]}: {peer.version}")
    for name, why in missing.items():
        print(f"{name:10} left out: {why}")
    about = {"peers": {peer.name: peer.version for peer in peers}, "missing": missing}
    rows: list[Row] = []
    names = [peer.name for peer in peers]
    _print_titles(names)
    for found in run(cupy, chosen_workloads(arguments), peers, arguments.rounds):
        _print_rows(found, names)
        rows += found
        report.write(arguments.json, rows, **about, summary=summary(rows))
    return {
        "circumstances": report.circumstances(),
        **about,
        "summary": summary(rows),
        "rows": rows,
    }


def _read(paths: Sequence[Path]) -> dict[str, Any]:
    """The reports of earlier runs as one, of one device and the same sources; the later counts."""
    reports = [report.read(path) for path in paths]
    first = reports[0]
    for path, data in zip(paths, reports, strict=True):
        if not all("kind" in row for row in data["rows"]):
            raise SystemExit(f"{path}: a report of another benchmark")
        for key in ("device", "sources_sha256"):
            got, wanted = data["circumstances"].get(key), first["circumstances"].get(key)
            if got != wanted:
                raise SystemExit(f"{path}: {key} is {got}, that of {paths[0]} is {wanted}")
    what = ("kind", "of", "workload", "dtype", "head_dim", "mask", "seqlen_q", "pass", "peer")
    every = [row for data in reports for row in data["rows"]]
    rows = list({tuple(map(row.get, what)): row for row in every}.values())
    if len({row["dtype"] for row in rows}) > 1:
        raise SystemExit("these reports are of more than one dtype: read one at a time")
    return {**first, "rows": rows, "summary": summary(rows)}


def _print_titles(peers: Sequence[str]) -> None:
    titles = "".join(f"{peer:>10}" for peer in peers)
    print(f"\n{'':53}{titles}   TFLOP/s; of memory MB beyond inputs and outputs")


def _print_rows(rows: Sequence[Row], peers: Sequence[str]) -> None:
    """A line for every pass, a column for every peer."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        if row["kind"] == "left out":
            continue
        value = row["tflops"] if row["kind"] == "speed" else row["extra_bytes"] / 1e6
        of_queries, of_keys = row["seqlen_q"], row["seqlen_k"]
        length = f"{of_queries}" if of_queries == of_keys else f"{of_queries}x{of_keys}"
        case = f"{row['workload']:12}{row['head_dim']:4} {row['mask']:7}{length:>10}"
        label = row["pass"] if row["kind"] == "speed" else f"{row['pass']}, MB"
        lines.setdefault((case, label), {})[row["peer"]] = f"{value:10.1f}"
    for (case, label), values in lines.items():
        columns = "".join(values.get(peer, f"{'-':>10}") for peer in peers)
        print(f"{case} {label:18}{columns}", flush=True)


def _print_left_out(rows: Iterable[Row]) -> None:
    """Every reason once, with the number of cases."""
    left_out = [row for row in rows if row["kind"] == "left out"]
    counted = collections.Counter((row["peer"], row["of"], row["reason"]) for row in left_out)
    for (peer, what, why), count in counted.items():
        print(f"{peer:10} {what} left out {count} x: {why}")


def _print_summary(found: Sequence[Row]) -> None:
    if found:
        print("\nHow many times as fast as a peer cuattn is, over the cells of the grid:")
        print(f"{'pass':10}{'peer':11}{'cells':>5}{'mean':>7}{'least':>7}")
    for row in found:
        where = "head_dim {head_dim}, {mask}, seqlen {seqlen}".format(**row["least_at"])
        print(
            f"{row['pass']:10}{row['peer']:11}{row['cells']:5}{row['mean']:7.2f}"
            f"{row['least']:7.2f} at {where}"
        )
