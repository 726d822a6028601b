"""Draw what ``python -m cuattn bench`` measured: speed against seqlen, memory against seqlen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from cuattn.bench.workloads import MASKS, PASSES

Row = dict[str, Any]
SUFFIXES = (".png", ".svg")
#: Label, colour (Okabe and Ito's, which the colour-blind tell apart) and marker of every peer.
STYLES = {
    "cuattn": ("cuattn", "#D55E00", "o"),
    "fa4": ("FA4", "#0072B2", "s"),
    "fa3": ("FA3", "#56B4E9", "D"),
    "cudnn": ("cuDNN", "#009E73", "^"),
    "fa2": ("FA2", "#CC79A7", "v"),
    "efficient": ("mem-efficient", "#E69F00", "P"),
    "formula": ("N x N formula", "#666666", "X"),
}
NOTES = (
    (("fa4", "fa3", "fa2"), "FA: FlashAttention"),
    (("fa2", "cudnn", "efficient"), "FA2, cuDNN, mem-efficient: by torch's SDPA"),
    (("formula",), "N x N formula: by CuPy and cuBLAS"),
)
#: In inches: a panel, what is around it (its labels on the right), and above and below them all.
WIDTH, HEIGHT = 2.9, 1.75
LEFT, RIGHT, ABOVE, BELOW = 0.7, 0.95, 0.3, 0.3
HEAD, FOOT = 0.6, 0.5
GREY, PALE = "#444444", "#DDDDDD"
LABEL_SIZE = 8.0
FONT: Any = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "cuattn"}


def check_importable() -> None:
    """Leave with SystemExit where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            f"--plot draws with matplotlib, which is not importable ({error}); "
            'pip install "cuattn[plot]"'
        ) from None


def draw(data: dict[str, Any], path: Path) -> list[Path]:
    """Draw the rows of a report, and return the files: speed to ``path``, memory beside it."""
    check_importable()
    import matplotlib

    speed = [row for row in data["rows"] if row["kind"] == "speed" and row["workload"] == "grid"]
    memory = [row for row in data["rows"] if row["kind"] == "memory"]
    drawn = []
    with matplotlib.rc_context(FONT):
        for rows, figure_of, its in (
            (speed, speed_figure, path),
            (memory, memory_figure, path.with_stem(path.stem + "_memory")),
        ):
            if rows:
                unnamed = {"Date": None} if its.suffix == ".svg" else {"Software": None}
                figure = figure_of(rows, data["circumstances"])
                figure.savefig(its, dpi=150, metadata=unnamed)
                drawn.append(its)
    if not drawn:
        raise SystemExit("there is nothing to draw: no cell of the grid and no memory")
    return drawn


def speed_figure(rows: Sequence[Row], circumstances: dict[str, Any]) -> Any:
    """A column for every head_dim, a row for every pass and mask."""
    head_dims = sorted({row["head_dim"] for row in rows})
    lines = [
        (name, mask)
        for name in PASSES
        for mask in MASKS
        if any((row["pass"], row["mask"]) == (name, mask) for row in rows)
    ]
    tokens = {row["batch"] * row["seqlen_q"] for row in rows}
    hidden = {row["num_heads"] * row["head_dim"] for row in rows}
    title = f"Attention, {_listed(row['dtype'] for row in rows)}"
    title += f", {_listed(f'{n:,}' for n in tokens)} tokens, hidden size {_listed(hidden)}"
    figure, panels = _panels(len(lines), len(head_dims), rows, title, circumstances)
    for (name, mask), panels_of_line in zip(lines, panels, strict=True):
        top = max(row["tflops"] for row in rows if row["pass"] == name)
        for dim, panel in zip(head_dims, panels_of_line, strict=True):
            own = [
                row
                for row in rows
                if (row["pass"], row["mask"], row["head_dim"]) == (name, mask, dim)
            ]
            panel.set_ylim(0, 1.05 * top)
            panel.set_title(f"{name}, {mask}, head_dim {dim}", loc="left", fontsize=9)
            _label(panel, _curves(panel, own, lambda row: row["tflops"]))
        panels_of_line[0].set_ylabel("TFLOP/s", color=GREY, fontsize=LABEL_SIZE)
    return figure


def memory_figure(rows: Sequence[Row], circumstances: dict[str, Any]) -> Any:
    """A panel for the forward, another for forward and backward; both axes logarithmic."""
    passes = [name for name in ("forward", "forward+backward") if name in _values(rows, "pass")]
    one = rows[0]
    title = f"Memory beyond inputs and outputs, {_listed(row['dtype'] for row in rows)}, "
    title += f"{one['mask']}, batch {one['batch']}, {one['num_heads']} heads, "
    title += f"head_dim {one['head_dim']}"
    figure, panels = _panels(1, len(passes), rows, title, circumstances, height=3)
    sizes = [row["extra_bytes"] for row in rows if row["extra_bytes"] > 0]
    highest = 2 * max([*sizes, *_values(rows, "score_matrix_bytes")])
    # why a floor: a logarithmic axis has no 0, which is the best there is
    floor = min(sizes, default=2**20) / 16
    for name, panel in zip(passes, panels[0], strict=True):
        own = [row for row in rows if row["pass"] == name]
        panel.set_yscale("log", base=2)
        panel.set_ylim(floor, highest)
        ticks = [2**power for power in range(10, 42, 4) if floor < 2**power < highest]
        panel.set_yticks(ticks, [_bytes(tick) for tick in ticks])
        panel.set_yticks([], minor=True)
        panel.set_title(name.replace("+", " and "), loc="left", fontsize=9)
        scores = sorted({(row["seqlen_q"], row["score_matrix_bytes"]) for row in own})
        panel.plot(*zip(*scores, strict=True), "--", color=GREY, linewidth=1)
        ends = _curves(panel, own, lambda row: max(row["extra_bytes"], floor))
        ends = [(f"{end[0]}, 0" if end[3] == floor else end[0], *end[1:]) for end in ends]
        _label(panel, [("float32 scores", GREY, *scores[-1]), *ends])
    return figure


def _panels(
    num_rows: int,
    num_columns: int,
    rows: Sequence[Row],
    title: str,
    circumstances: dict[str, Any],
    height: float = HEIGHT,
) -> tuple[Any, list[list[Any]]]:
    """A figure with empty panels, row by row, placed in inches: nothing moves afterwards."""
    from matplotlib.figure import Figure

    down, across = ABOVE + height + BELOW, LEFT + WIDTH + RIGHT
    size = across * num_columns, HEAD + down * num_rows + FOOT
    figure = Figure(figsize=size)
    device = circumstances.get("device") or "unknown device"
    figure.text(0.15 / size[0], 1 - 0.12 / size[1], title, va="top", fontweight="bold")
    figure.text(0.15 / size[0], 1 - 0.32 / size[1], device, va="top", color=GREY)
    present = _values(rows, "peer")
    notes = (note for peers, note in NOTES if present.intersection(peers))
    note: dict[str, Any] = {"fontsize": LABEL_SIZE, "color": GREY}
    figure.text(0.15 / size[0], 0.12 / size[1], "; ".join(notes), **note)
    panels = [
        [
            figure.add_axes(
                (
                    (across * column + LEFT) / size[0],
                    (FOOT + down * (num_rows - 1 - row) + BELOW) / size[1],
                    WIDTH / size[0],
                    height / size[1],
                )
            )
            for column in range(num_columns)
        ]
        for row in range(num_rows)
    ]
    ticks = sorted(_values(rows, "seqlen_q"))
    for panel in (panel for line in panels for panel in line):
        panel.set_xscale("log", base=2)
        panel.set_xlim(ticks[0] / 1.25, ticks[-1] * 1.25)
        panel.set_xticks(ticks, [_short(tick) for tick in ticks])
        panel.set_xticks([], minor=True)
        panel.grid(axis="y", color=PALE, linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(GREY)
        panel.tick_params(colors=GREY, labelsize=LABEL_SIZE)
    for panel in panels[-1]:
        panel.set_xlabel("seqlen", color=GREY, fontsize=LABEL_SIZE)
    return figure, panels


def _curves(
    panel: Any, rows: Sequence[Row], height: Callable[[Row], float]
) -> list[tuple[str, str, float, float]]:
    """Draw a line for every peer, cuattn's above the others; what to write at the end of each."""
    ends = []
    for peer in reversed(STYLES):
        own = sorted((row for row in rows if row["peer"] == peer), key=lambda row: row["seqlen_q"])
        if not own:
            continue
        label, colour, marker = STYLES[peer]
        ours = peer == "cuattn"
        points = [(row["seqlen_q"], height(row)) for row in own]
        panel.plot(
            *zip(*points, strict=True),
            color=colour,
            marker=marker,
            markersize=4.5 if ours else 3.5,
            linewidth=1.9 if ours else 1.1,
            zorder=3 if ours else 2,
            clip_on=False,
        )
        ends.append((label, colour, *points[-1]))
    return ends


def _label(panel: Any, ends: Sequence[tuple[str, str, float, float]]) -> None:
    """Write its name at the end of every line, moved up or down where two would meet."""
    last = max((x for *_, x, _ in ends), default=0)
    written = [end for end in ends if end[2] == last]
    to_axes = panel.transData + panel.transAxes.inverted()
    heights = [to_axes.transform((x, y))[1] for *_, x, y in written]
    inches = panel.figure.get_figheight() * panel.get_position().height
    places = spread(heights, 1.15 * LABEL_SIZE / 72 / inches)
    for (label, colour, x, y), place in zip(written, places, strict=True):
        panel.annotate(
            label,
            xy=(x, y),
            xytext=(1.03, place),
            textcoords="axes fraction",
            va="center",
            fontsize=LABEL_SIZE,
            fontweight="bold" if label.startswith("cuattn") else "normal",
            color=_darker(colour),
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )
    for label, colour, x, y in ends:
        if x != last:  # a line that ends before the others
            panel.annotate(
                label,
                xy=(x, y),
                xytext=(3, 6),
                textcoords="offset points",
                ha="right",
                fontsize=LABEL_SIZE,
                color=_darker(colour),
            )


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Positions in the order of the values and at least a gap apart, as near to them as can be."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    # Less rank times gap, positions need only not fall: where they would, neighbours share a mean.
    blocks: list[list[float]] = []
    for rank, index in enumerate(order):
        blocks.append([values[index] - rank * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    shared = [fmean(block) for block in blocks for _ in block]
    places = {index: shared[rank] + rank * gap for rank, index in enumerate(order)}
    return [places[index] for index in range(len(values))]


def _values(rows: Iterable[Row], key: str) -> set[Any]:
    return {row[key] for row in rows}


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(sorted({str(value) for value in values}))


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _bytes(count: int) -> str:
    power = (count.bit_length() - 1) // 10
    return f"{count >> 10 * power} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _darker(colour: str) -> tuple[float, ...]:
    """Dark enough for small letters."""
    return tuple(0.75 * int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
