"""The report's plots: matplotlib figures as SVG text, which a page shows without scripts and without a network."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hsx_dist.errors import ConfigError, install_extra
from hsx_dist.observe.report.facts import Attempt, LayerSize, Timeline
from hsx_dist.observe.report.prompt_attention import LayerPatterns
from hsx_dist.observe.report.states import MOST_LAYERS, StateNumbers, spread
from hsx_dist.working_folder import require_no_settings_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GREY = "#3465a4", "#d9822b", "#4c9a5b", "#c0504d", "#b8bec6"
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be selected, and has the page's font
    "svg.hashsalt": "hsx",  # the same figure gives the same bytes
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa3ad",
    "axes.labelcolor": "#333a42",
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlecolor": "#333a42",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ec",
    "xtick.color": "#555d66",
    "ytick.color": "#555d66",
    "legend.frameon": False,
}

#: matplotlib reads this file in the working folder, which may be a downloaded run. It can make matplotlib run TeX.
SETTINGS = "matplotlibrc"
#: Limit of the attempts whose beginning is drawn. Of more, evenly spaced ones are drawn.
_MOST_ATTEMPTS = 40
#: Ticks of logarithmic axes: 1, 2, 5, 10, …
_ROUND = [digit * 10**power for power in range(8) for digit in (1, 2, 5)]


class Canvas:
    """Draws figures one after another. The constructor imports matplotlib.

    Raises:
        ConfigError: matplotlib is not installed; the working folder, which may be a run, has settings for it.
    """

    def __init__(self) -> None:
        require_no_settings_of("matplotlib", SETTINGS)
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError as e:
            raise ConfigError(f"expected matplotlib for a report, got none. {install_extra('report')}") from e
        self._style = lambda: matplotlib.rc_context(_STYLE)
        self._figure = Figure
        self._drawn = 0

    def _draw(self, fill: Any, width: float, height: float, label: str) -> str:
        """Return SVG of a figure of ``width`` by ``height`` inches, drawn by ``fill(figure)``. ``label``: its name."""
        with self._style(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # matplotlib's, of figures without finite or positive values
            figure = self._figure(figsize=(width, height), layout="constrained")
            fill(figure)
            out = io.StringIO()
            figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        text = text[text.index("<svg") :]
        # Ids must differ from those of the page's other figures.
        self._drawn += 1
        text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>f{self._drawn}-", text)
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)

    # -- where time went -----------------------------------------------------------------------------------------

    def throughput(self, timeline: Timeline) -> str:
        """Draw the tokens and bytes that became durable over time, and the beginnings of attempts after the first."""
        # Parts of two attempts may alternate in time.
        begun = np.sort(np.unique(timeline.attempts, return_index=True)[1])[1:].tolist()

        def fill(figure: Figure) -> None:
            left, right = figure.subplots(1, 2)
            end = max(float(timeline.seconds[-1]), 1.0)
            bins = np.linspace(0, end, 61)
            scale, unit = _time_unit(end)
            for axes, values, name, color, by in (
                (left, timeline.tokens, "tokens per second", BLUE, 1.0),
                (right, timeline.raw_bytes, "MB per second, before encoding", ORANGE, 1e6),
            ):
                # The tokens of a part are spread evenly over the time since the previous receipt.
                stored = np.interp(bins, [0.0, *timeline.seconds], [0.0, *np.cumsum(values / by)])
                rates = np.diff(stored) / np.diff(bins)
                axes.stairs(rates, bins / scale, fill=True, color=color, alpha=0.35)
                axes.stairs(rates, bins / scale, color=color)
                axes.set_title(name)
                axes.set_xlabel(f"{unit} since the run began")
                axes.set_ylim(bottom=0)
                for at in spread(begun, _MOST_ATTEMPTS):
                    axes.axvline(timeline.seconds[at] / scale, color=RED, linestyle=":", linewidth=1)

        return self._draw(fill, 9.6, 2.6, "Throughput over time")

    def where_time_went(self, attempts: Sequence[Attempt]) -> str:
        """Draw the seconds of engines and of writers by activity: one bar for each, over all attempts."""

        def total(name: str) -> float:
            return sum(a.counted[name] for a in attempts)

        engine, copy, wait = (total(n) for n in ("engine_seconds", "copy_seconds", "store_wait_seconds"))
        bars = [
            (
                "writers",
                [
                    ("compress", total("encode_seconds"), BLUE),
                    ("upload", total("put_seconds"), ORANGE),
                    ("wait for room", total("room_wait_seconds"), RED),
                ],
            ),
            (
                "engines",
                [
                    ("compute", max(engine - copy - wait, 0.0), BLUE),
                    ("copy", copy, GREEN),
                    ("wait for the store", wait, RED),
                    ("no task", total("idle_seconds"), GREY),
                ],
            ),
        ]

        def fill(figure: Figure) -> None:
            for axes, (name, pieces) in zip(figure.subplots(2, 1), reversed(bars), strict=True):
                left = 0.0
                whole = max(sum(seconds for _, seconds, _ in pieces), 1e-9)
                for what, seconds, color in pieces:
                    label = f"{what}: {seconds:,.1f} s ({_share(seconds / whole)})"
                    axes.barh([0], [seconds], left=left, color=color, height=0.7, label=label)
                    left += seconds
                axes.set_yticks([0], [name])
                axes.set_xlim(0, whole)
                axes.grid(visible=False)
                axes.set_ylim(-0.4, 0.4)
                # The labels have the seconds. The bars have different scales, so axes would mislead.
                axes.set_xticks([])
                axes.spines[["left", "bottom"]].set_visible(False)
                axes.tick_params(left=False)
                axes.legend(loc="upper left", bbox_to_anchor=(-0.01, 0), ncols=4, fontsize=9, columnspacing=1.4)

        return self._draw(fill, 9.6, 1.9, "Where time went")

    # -- stored states -------------------------------------------------------------------------------------------

    def layer_sizes(self, sizes: Sequence[LayerSize]) -> str:
        """Draw each layer's stored bytes as a share of its raw bytes. Of very many layers, draws evenly spaced ones."""
        sizes = spread(sizes, MOST_LAYERS)

        def fill(figure: Figure) -> None:
            axes = figure.subplots()
            at = np.arange(len(sizes))
            shares = np.array([100 * s.stored / max(s.raw, 1) for s in sizes])
            axes.bar(at, shares, color=BLUE, width=0.75)
            if len(sizes) <= 12:
                for x, share in enumerate(shares):
                    axes.text(x, float(share), f"{share:.1f}%", ha="center", va="bottom", fontsize=9)
            axes.axhline(100, color=GREY, linewidth=1)
            _name_layers(axes, [s.name for s in sizes])
            axes.set_ylabel("% of the raw bytes")
            axes.set_ylim(0, max(108, shares.max() * 1.08))
            axes.grid(visible=False, axis="x")

        return self._draw(fill, 4.8, 2.7, "Stored bytes by layer")

    def lengths(self, lengths: np.ndarray[Any, Any]) -> str:
        """Draw a histogram of the samples' lengths in tokens."""

        def fill(figure: Figure) -> None:
            axes = figure.subplots()
            most = int(lengths.max())
            wide = most > 10 * max(np.median(lengths), 1)
            low = max(int(lengths.min()), 1)
            bins = np.geomspace(low, most + 1, 41) if wide else np.linspace(0, most + 1, min(most + 1, 40) + 1)
            axes.hist(lengths, bins=list(bins), color=GREEN, alpha=0.85)
            if wide:
                axes.set_xscale("log")
                axes.set_xticks([t for t in _ROUND if low <= t <= most], minor=False)
                axes.minorticks_off()
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_major_formatter("{x:,.0f}")
            for name, q, style in (("median", 50, "-"), ("99th percentile", 99, ":")):
                value = np.percentile(lengths, q)
                axes.axvline(value, color="#333a42", linestyle=style, linewidth=1, label=f"{name}: {value:,.0f}")
            axes.legend(fontsize=9)
            axes.set_xlabel("tokens of a sample")
            axes.set_ylabel("samples")

        return self._draw(fill, 4.8, 2.7, "Lengths of samples")

    # -- what the states look like -------------------------------------------------------------------------------

    def norms(self, numbers: StateNumbers) -> str:
        """Draw norms of the states by layer."""

        def fill(figure: Figure) -> None:
            axes = figure.subplots()
            at = np.arange(len(numbers.layer_ids))
            low, first, median, third, high = numbers.norms
            axes.fill_between(at, low, high, color=BLUE, alpha=0.15, linewidth=0, label="1% to 99% of tokens")
            axes.fill_between(at, first, third, color=BLUE, alpha=0.35, linewidth=0, label="middle half")
            axes.plot(at, median, color=BLUE, marker="o", markersize=3, label="median")
            axes.plot(at, numbers.first_token, color=RED, marker="s", markersize=3, linestyle="--", label="first token")
            axes.set_yscale("log")
            _name_layers(axes, numbers.layer_ids)
            axes.set_ylabel("Euclidean norm")
            axes.legend(fontsize=9)

        return self._draw(fill, 9.6, 3.0, "Norms by layer")

    def outliers(self, numbers: StateNumbers) -> str:
        """Draw the channels that stand out most, in each layer."""

        def fill(figure: Figure) -> None:
            axes = figure.subplots()
            log = np.log10(np.maximum(numbers.outliers, 1e-3))
            image = axes.imshow(log, aspect="auto", cmap="Blues", vmin=0, vmax=max(float(log.max()), 1.0))
            axes.set_yticks(range(len(numbers.channels)), [str(c) for c in numbers.channels], fontsize=8)
            _name_layers(axes, numbers.layer_ids)
            axes.set_ylabel("channel")
            axes.grid(visible=False)
            bar = figure.colorbar(image, ax=axes, fraction=0.05)
            ticks = [t for t in _ROUND if t <= 10 ** max(float(log.max()), 1.0)]
            bar.set_ticks([float(np.log10(t)) for t in ticks], labels=[f"{t:,}\u00d7" for t in ticks])
            bar.ax.minorticks_off()

        return self._draw(fill, 4.8, 3.8, "Channels that stand out")

    def similarity(self, numbers: StateNumbers) -> str:
        """Draw the mean cosine between the states of one token in two layers."""

        def fill(figure: Figure) -> None:
            axes = figure.subplots()
            image = axes.imshow(numbers.similarity, cmap="viridis", vmin=min(0.0, numbers.similarity.min()), vmax=1)
            n = len(numbers.layer_ids)
            _name_layers(axes, numbers.layer_ids)
            _name_layers(axes, numbers.layer_ids, vertical=True)
            axes.grid(visible=False)
            if n <= 8:
                for i in range(n):
                    for j in range(n):
                        value = numbers.similarity[i, j]
                        color = "black" if value > 0.6 else "white"
                        axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=color, fontsize=9)
            figure.colorbar(image, ax=axes, fraction=0.046)

        return self._draw(fill, 4.8, 3.8, "Similarity between layers")

    # -- which tokens heads attend to ------------------------------------------------------------------------------

    def attention(self, found: LayerPatterns) -> str:
        """Draw a map for each head: a row for each token, and a column for each token that it attends to."""
        columns = 8 if len(found.heads) > 12 else 6
        rows = -(-len(found.heads) // columns)
        n = found.patterns.shape[1]
        future = ~np.tri(n, dtype=bool)

        def fill(figure: Figure) -> None:
            grid = figure.subplots(rows, columns, squeeze=False)
            for axes in grid.flat[len(found.heads) :]:
                axes.set_axis_off()
            for axes, head, pattern in zip(grid.flat, found.heads, found.patterns, strict=False):
                shown = np.sqrt(np.ma.masked_array(pattern, future))
                image = axes.imshow(shown, cmap="Blues", vmin=0, vmax=1, interpolation="none")
                axes.set_title(f"head {head}", fontsize=9, pad=3)
                axes.grid(visible=False)
                axes.set_xticks([])
                axes.set_yticks([])
            corner = grid[rows - 1, 0]
            corner.set_xticks([0, n - 1])
            corner.set_yticks([0, n - 1])
            corner.tick_params(labelsize=8)
            corner.set_xlabel("attended to", fontsize=8)
            corner.set_ylabel("token", fontsize=8)
            bar = figure.colorbar(image, ax=grid, fraction=0.02, pad=0.01)
            ticks = (0, 0.05, 0.2, 0.5, 1)
            bar.set_ticks([t**0.5 for t in ticks], labels=[f"{t:g}" for t in ticks])

        height = 9.6 / columns * rows + 0.35
        return self._draw(fill, 9.6, height, f"Attention patterns of layer {found.layer}")


def _name_layers(axes: Axes, layers: Sequence[int | str], *, vertical: bool = False) -> None:
    step = -(-len(layers) // 16)
    at = list(range(0, len(layers), step))
    (axes.set_yticks if vertical else axes.set_xticks)(at, [str(layers[i]) for i in at])
    (axes.set_ylabel if vertical else axes.set_xlabel)("layer")


def _time_unit(seconds: float) -> tuple[float, str]:
    return (3600.0, "hours") if seconds > 3 * 3600 else (60.0, "minutes") if seconds > 300 else (1.0, "seconds")


def _share(part: float) -> str:
    """Return a share in percent. Avoids 0% for a share above 0, and 100% for a share below 1."""
    return "<1%" if 0 < part < 0.005 else ">99%" if 0.995 <= part < 1 else f"{part:.0%}"
