"""The report's page: HTML around the plots. Self-contained: a browser loads nothing else, and runs no script."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

import numpy as np

from hsx_dist.format.description import described_layers
from hsx_dist.observe.report.facts import RunFacts, gather_facts
from hsx_dist.observe.report.html import document, escape, table
from hsx_dist.observe.report.plots import Canvas
from hsx_dist.observe.report.prompt_attention import (
    HEADS_DRAWN,
    LAYERS_DRAWN,
    TOKENS_DRAWN,
    PromptAttention,
    gather_attention,
)
from hsx_dist.observe.report.states import StateNumbers, TokenNorms, gather_states, spread
from hsx_dist.observe.units import bytes_text
from hsx_dist.reading import Run
from hsx_dist.reading.select import Selection
from hsx_dist.reading.statistics import LayerStatistics, stored_statistics
from hsx_dist.reading.stored import select_stored
from hsx_dist.store import Store

#: Token ids → the text of each.
DecodeEach = Callable[[Sequence[int]], list[str]]
#: Counts of parts that are not stored any more, and their labels.
_GONE = {"removed_parts": "of them removed after use", "lost_parts": "of them lost"}
#: Limit in characters of the settings.
SETTINGS_SHOWN = 1 << 20
#: Layers that are shown token by token.
LAYERS_SHOWN = 8


def write_report(
    store: Store,
    *,
    chosen: Sequence[str] = (),
    samples: int = 24,
    decode: DecodeEach | None = None,
    model: str | None = None,
) -> str:
    """Return the page about the run at ``store``, as HTML.

    Args:
        chosen: keys of samples that are shown token by token. Default: a short, a medium and a long sample.
        samples: how many samples are read for norms and similarities.
        decode: token ids to the text of each; without it tokens are shown as ids.
        model: folder or id of the model whose configuration is used for attention patterns. Without it they are drawn
            only for the built-in model.

    Raises:
        RunError: there is no run, or it is being removed. SampleNotFound: the run has no sample of a chosen key.
        SampleConsumed, NotFound: a chosen sample is not stored any more.
        ConfigError: matplotlib is not installed; ``model`` cannot be loaded.
        StoreError, FormatError: something cannot be read.
    """
    run = Run(store)
    canvas = Canvas()
    facts = gather_facts(run)
    with run.place.reading():
        for key in chosen:
            run[key].token_ids("numpy")  # raises if a sample that the caller names is gone
        stored = select_stored(run)
        statistics = _statistics(stored_statistics(run))
        shown = list(chosen) or _typical(stored)
        states = gather_states(run, spread(stored.keys(), samples), shown)
        attention = gather_attention(run, shown, model)
    sections = [
        _what_ran(facts),
        _time(facts, canvas),
        _stored(facts, canvas),
        _failures(facts),
        *(_states(states, canvas) if states is not None else []),
        statistics,
        *([_samples(states, decode)] if states is not None and states.chosen else []),
        *([_attention(attention, decode, canvas)] if attention is not None else []),
        _settings(facts),
    ]
    return document(facts.url, "\n".join(s for s in sections if s))


def _typical(samples: Selection) -> list[str]:
    """Return the keys of a short, a medium and a long sample."""
    by_length = sorted(zip(samples.lengths.tolist(), samples.keys(), strict=True))
    worth = [key for num_tokens, key in by_length if num_tokens > 1] or [key for _, key in by_length]
    return list(dict.fromkeys(worth[int(q * (len(worth) - 1))] for q in (0.25, 0.5, 0.9))) if worth else []


def _what_ran(facts: RunFacts) -> str:
    state = "complete" if facts.complete else facts.attempts[-1].state if facts.attempts else "not started"
    good = "good" if state == "complete" else "bad" if state in ("failed", "no heartbeat") else ""
    c = facts.counts
    ratio = c["stored_bytes"] / c["raw_bytes"] if c["raw_bytes"] else 0.0
    seconds = sum(a.progress["seconds"] for a in facts.attempts)
    numbers = [
        (f"{c['samples']:,}", "samples"),
        (f"{c['tokens']:,}", "tokens"),
        (f"{c['refused']:,} / {c['failed']:,}", "refused / failed"),
        (bytes_text(c["raw_bytes"]), "raw"),
        (bytes_text(c["stored_bytes"]), f"stored ({ratio:.1%})"),
        (f"{c['parts']:,}", "parts"),
    ]
    numbers += [(f"{c[name]:,}", label) for name, label in _GONE.items() if c[name]]
    if seconds > 0:
        computed = sum(a.progress["tokens"] for a in facts.attempts)
        numbers.append((f"{computed / seconds:,.0f}", "tokens per second"))
    layers = facts.meaning.get("layers", [])
    deepest = described_layers(facts.about)
    of = f" of 0…{deepest}" if deepest is not None else ""
    rows = [
        ("model", facts.meaning.get("model", "?")),
        ("layers", (", ".join(str(x) for x in layers) if isinstance(layers, list) else str(layers)) + of),
        ("engine", _engine(facts)),
        ("codec", ", ".join(sorted(facts.codecs)) or "no part is stored"),
        ("software", _software(facts) or "?"),
        ("created", _when(facts.created)),
    ]
    attempts = "".join(
        f"<tr><td>{a.number}</td><td>{escape(_when(a.created))}</td><td>{escape(a.host)}</td><td>{escape(a.state)}</td>"
        f'<td class="n">{a.progress["seconds"]:,.1f}</td></tr>'
        for a in facts.attempts
    )
    return (
        f'<h1>{escape(facts.url)}</h1><span class="state {good}">{escape(state)}</span>'
        f'<div class="facts">{"".join(f"<div class=fact><b>{v}</b><span>{n}</span></div>" for v, n in numbers)}</div>'
        f'<section id="what"><h2>What ran</h2>{table(rows)}'
        "<h3>Attempts</h3><table><tr><th>attempt</th><th>began</th><th>host</th><th>ended as</th>"
        f'<th class="n">seconds with engines</th></tr>{attempts}</table></section>'
    )


def _time(facts: RunFacts, canvas: Canvas) -> str:
    parts = []
    if len(facts.timeline.seconds):
        parts.append(
            "<h2>Throughput</h2><p class=note>Tokens and bytes that became durable, by the times of receipts. Each "
            "part is spread over the time since the previous receipt. Engines load first."
            + (" Dotted lines: another attempt takes over." if len(facts.attempts) > 1 else "")
            + "</p>"
            + canvas.throughput(facts.timeline)
        )
    if any(a.counted["engine_seconds"] for a in facts.attempts):
        parts.append(
            "<h2>Where time went</h2><p class=note>Seconds of all engines, and thread seconds of all writers. Writers "
            "work in parallel with the engines. Red time slows a run down.</p>" + canvas.where_time_went(facts.attempts)
        )
    return f'<section id="time">{"".join(parts)}</section>' if parts else ""


def _stored(facts: RunFacts, canvas: Canvas) -> str:
    if not len(facts.lengths):
        return ""
    sizes = ""
    if facts.layer_sizes:
        codecs = ", ".join(f"{escape(name)} ({n} parts)" for name, n in sorted(facts.codecs.items()))
        plot = canvas.layer_sizes(facts.layer_sizes)
        sizes = f"<div><h2>Sizes by layer</h2><p class=note>Codec {codecs}.</p>{plot}</div>"
    longest = f"<p class=note>{len(facts.lengths):,} samples, the longest of {facts.lengths.max():,} tokens.</p>"
    return (
        f'<section id="stored"><div class="pair">{sizes}'
        f"<div><h2>Lengths</h2>{longest}{canvas.lengths(facts.lengths)}</div></div></section>"
    )


def _failures(facts: RunFacts) -> str:
    rows = [
        f'<tr><td>{what}</td><td class="n">{n:,}</td><td>{escape(reason)}</td></tr>'
        for what, reasons in (("refused", facts.refused), ("failed", facts.failed), ("poison", facts.poison))
        for reason, n in reasons
    ]
    body = (
        '<table><tr><th>outcome</th><th class="n">rows</th><th>reason (numbers left out)</th></tr>'
        f"{''.join(rows)}</table>"
        if rows
        else f"<p class=note>{'Every row has its sample' if facts.complete else 'None so far'}.</p>"
    )
    return f'<section id="failures"><h2>Rows without a sample</h2>{body}</section>'


def _states(states: StateNumbers, canvas: Canvas) -> Iterable[str]:
    about = (
        f"Over {states.tokens:,} tokens of {states.samples} samples spread over the run "
        f"({states.dtype}, hidden size {states.hidden_size:,})."
    )
    yield (
        f'<section id="states"><h2>Norms</h2><p class=note>{about} The first token is shown separately: in most models '
        f"it is an attention sink with a very different norm.</p>{canvas.norms(states)}"
        '<div class="pair"><div><h2>Channels that stand out</h2><p class=note>Mean magnitude of a channel over that of '
        "the layer's median channel. Such channels determine how well a lossy codec works.</p>"
        f"{canvas.outliers(states)}</div>"
        "<div><h2>How similar are layers?</h2><p class=note>Mean cosine between the states of the same token in two "
        f"layers; first tokens left out.</p>{canvas.similarity(states)}</div></div></section>"
    )


def _statistics(layers: Iterable[LayerStatistics]) -> str:
    names = ("tokens", "left out at each start", "mean norm", "RMS norm", "largest norm", "factor to sqrt(H)")
    head = "".join(f'<th class="n">{name}</th>' for name in names)
    # One after another: the values by channel, 24 bytes each, are not shown.
    rows = sorted(
        (
            own.point,
            own.layer,
            f'<tr><td>{escape(own.point)}</td><td class="n">{own.layer}</td><td class="n">{own.tokens:,}</td>'
            f'<td class="n">{own.skip_first}</td>'
            + "".join(
                f'<td class="n">{x:.4g}</td>' for x in (own.mean_norm, own.rms_norm, own.max_norm, own.norm_factor)
            )
            + "</tr>",
        )
        for own in layers
    )
    if not rows:
        return ""
    body = "".join(row for *_, row in rows)
    return (
        '<section id="statistics"><h2>Statistics</h2><p class=note><code>hsx stats</code> stored them with the run. '
        "Data sets use them for scaling.</p>"
        f'<table><tr><th>point</th><th class="n">layer</th>{head}</tr>{body}</table></section>'
    )


def _samples(states: StateNumbers, decode: DecodeEach | None) -> str:
    note = (
        'The norm of every token against the layer\'s median in this sample: smaller <span class="scale"></span> four '
        "times and more. Point at a token to see its norm."
    )
    if decode is None:
        note += " Tokens are shown as ids. <code>hsx report --tokenizer FOLDER_OR_ID</code> shows their text."
    shown = "".join(_sample(states, s, decode) for s in states.chosen)
    return f'<section id="samples"><h2>Samples, token by token</h2><p class=note>{note}</p>{shown}</section>'


def _sample(states: StateNumbers, sample: TokenNorms, decode: DecodeEach | None) -> str:
    ids = [int(i) for i in sample.token_ids]
    texts = decode(ids) if decode is not None else [f" {i}" for i in ids]
    at = [round(i * (len(states.layer_ids) - 1) / (LAYERS_SHOWN - 1)) for i in range(LAYERS_SHOWN)]
    at = list(dict.fromkeys(at)) if len(states.layer_ids) > LAYERS_SHOWN else list(range(len(states.layer_ids)))
    medians = np.median(sample.norms, axis=0)
    lines = []
    for k in at:
        with np.errstate(invalid="ignore"):  # infinite norms
            ratios = sample.norms[:, k] / max(medians[k], 1e-30)
        spans = "".join(
            f'<span style="background:{_color(ratio)}" title="{norm:.4g}">{_token(text)}</span>'
            for text, ratio, norm in zip(texts, ratios, sample.norms[:, k], strict=True)
        )
        lines.append(f'<div class="layer">layer {states.layer_ids[k]}</div><div class="text">{spans}</div>')
    of = f", the first {len(ids)} of {sample.num_tokens:,}" if len(ids) < sample.num_tokens else f", {len(ids)} tokens"
    return f'<h3>{escape(sample.key)}{of}</h3><div class="tokens">{"".join(lines)}</div>'


def _attention(found: PromptAttention, decode: DecodeEach | None, canvas: Canvas) -> str:
    begin = f'<section id="attention"><h2>Attention patterns</h2><h3>{escape(found.key)}</h3>'
    if not found.layers:
        why = (
            f"Not drawn: {escape(found.missing)}"
            if found.missing
            else "Not drawn. The run has queries and keys. Patterns also need the rotary positions and the scale of "
            "their model. Name the model: <code>hsx report --model FOLDER_OR_ID</code>."
        )
        return f"{begin}<p class=note>{why}</p></section>"
    ids = [int(i) for i in found.token_ids]
    texts = decode(ids) if decode is not None else [f" {i}" for i in ids]
    note = (
        f"From the stored queries and keys, with the rotary positions and the scale of {escape(found.model)}. Each row "
        "is a token, each column a token that it attends to. Colours show the square root of the weight. "
        f"Shown are {_part(len(ids), found.num_tokens, 'tokens', 'the first ')}, "
        f"{_part(len(found.layers), len(found.stored), 'stored layers')} and "
        f"{_part(len(found.layers[0].heads), found.layers[0].num_heads, 'heads')} "
        f"(at most {TOKENS_DRAWN}, {LAYERS_DRAWN} and {HEADS_DRAWN})."
    )
    maps = "".join(f"<h3>Layer {layer.layer}</h3>{canvas.attention(layer)}" for layer in found.layers)
    rows = "".join(
        f'<div class="layer">layer {layer.layer}</div><div class="text">'
        + "".join(
            f'<span style="background:rgba(52,101,164,{0.8 * _opacity(weight):.2f})" title="token {i}: {weight:.3f}">'
            f"{_token(text)}</span>"
            for i, (text, weight) in enumerate(zip(texts, layer.last.tolist(), strict=True))
        )
        + "</div>"
        for layer in found.layers
    )
    return (
        f"{begin}<p class=note>{note}</p>{maps}<h3>What the last of these tokens attends to, mean of all heads</h3>"
        f'<div class="tokens">{rows}</div></section>'
    )


def _part(shown: int, of: int, what: str, which: str = "") -> str:
    return f"all {of:,} {what}" if shown == of else f"{which}{shown:,} of {of:,} {what}"


def _opacity(weight: float) -> float:
    return float(np.sqrt(np.clip(weight, 0, 1))) if np.isfinite(weight) else 0.0


def _token(text: str) -> str:
    return escape(text.replace("\n", "⏎")) or "·"


def _color(ratio: float) -> str:
    """Return blue below the median, white at the median, orange up to four times the median."""
    if not np.isfinite(ratio):
        return "#c0504d"
    x = float(np.clip(np.log2(max(ratio, 1e-6)), -1, 2))
    return f"rgba(52,101,164,{-0.35 * x:.2f})" if x < 0 else f"rgba(217,130,43,{0.45 * x:.2f})"


def _settings(facts: RunFacts) -> str:
    encoder = json.JSONEncoder(indent=1, ensure_ascii=False)
    pieces, left = [], SETTINGS_SHOWN
    # In pieces: the indents of nested values may take far more text than the stored object.
    for piece in encoder.iterencode({"meaning": dict(facts.meaning), "settings": dict(facts.settings)}):
        pieces.append(piece[:left])
        left -= len(piece)
        if left <= 0:
            pieces.append("\n… (`hsx show RUN --json` has all settings)")
            break
    lines = "\n".join(map(escape, "".join(pieces).split("\n")))
    return (
        '<section id="settings"><h2>Settings</h2><p class=note>As stored in the run, without credentials.</p>'
        f"<details><summary>Show</summary><pre>{lines}</pre></details></section>"
    )


def _when(text: str) -> str:
    """Return a time in ISO 8601 as text for people, in UTC. Other text is returned unchanged."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return text


def _engine(facts: RunFacts) -> str:
    settings = facts.settings
    kwargs = settings.get("engine_kwargs")
    words = [f"{name}={value}" for name, value in kwargs.items()] if isinstance(kwargs, dict) else []
    if settings.get("pool") == "ray":
        most = settings.get("max_replicas", "?")
        words.insert(0, "1 replica" if most == 1 else f"up to {most} replicas")
    return ", ".join(words) or "vLLM's defaults"


def _software(facts: RunFacts) -> str:
    """Versions of packages, from the newest part that was read."""
    names = ("hsx", "vllm", "ray")
    return ", ".join(f"{'hsx_dist' if n == 'hsx' else n} {facts.about[n]}" for n in names if n in facts.about)
