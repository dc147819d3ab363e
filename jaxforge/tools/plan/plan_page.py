"""HTML page of a plan (`--html`), self-contained."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import jax

from jaxforge.model.runtime import gpu_capability
from jaxforge.model.transformer import build_model
from jaxforge.parallel.mesh import describe_mesh
from jaxforge.parallel.pipeline.drawing import as_svg
from jaxforge.parallel.pipeline.schedule import SCHEDULES
from jaxforge.parallel.sharding import param_shardings
from jaxforge.tools.pages.parts import document, fact_list, heading, legend, stacked_bar, table
from jaxforge.tools.plan.plan import Plan, bubble, collectives_by_wait
from jaxforge.tools.plan.timeline import Span

_KINDS = {
    "products": 0, "attention": 1, "experts": 3, "memory": 2, "other": 7,
    "parameters": 0, "optimizer": 4, "gradients": 5, "activations": 1,
    "all-gather": 4, "reduce-scatter": 5, "all-reduce": 3, "all-to-all": 1,
    "collective-permute": 7, "waiting": 5,
}  # fmt: skip
COLOURS = defaultdict(lambda: "c7", {kind: f"c{colour}" for kind, colour in _KINDS.items()})
"""Names of colours of the style by kind of memory, of work and of collectives."""
_COLLECTIVE = ("kind", "over", "times", "sent", "seconds", "waited", "where")
_ALTERNATIVE = ("plan", "memory", "tokens/s", "MFU", "waiting")
_PARAMETER = ("parameter", "shape", "split over", "on a device")
_WIDTH, _ROW, _LEFT = 1000, 22, 120
_THINNEST = 0.4  # SVG units; narrower spans are merged with their neighbours
_LOOPS = 3  # longest loops whose bodies are drawn as well

Alternatives = Sequence[tuple[str, Mapping[str, Any]]]
"""Names of plans, and their `--json` reports."""


def page(plan: Plan, alternatives: Alternatives = ()) -> str:
    """Return the page of a plan.

    Args:
        plan: the plan, complete or refused.
        alternatives: other plans for the same machine, the best first.
    """
    title = f"A run on {plan.topology}, planned"
    above = fact_list(dict(_facts(plan))) + "".join(_notes(plan))
    return document(title, above, "\n".join(_sections(plan, alternatives)))


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "verdict", "fits" if plan.fits else "does not run"
    if plan.step is not None:
        yield "mesh", describe_mesh(plan.step.mesh.shape)
        yield "compiled in", f"{plan.step.seconds:.0f} s"
    if plan.estimate is not None:
        estimate = plan.estimate
        yield "a step (an estimate)", f"{estimate.seconds:.3f} s, {estimate.tokens:,} tokens"
        yield "tokens/s per device (an estimate)", f"{estimate.tokens_per_second_per_device:,.0f}"
        yield "MFU (an estimate)", f"{estimate.mfu:.1%}; {estimate.mfu_causal:.1%} causal"
        yield (
            "to max_steps (an estimate)",
            f"{estimate.hours_to_max_steps:,.1f} hours, {estimate.device_hours:,.0f} device hours",
        )


def _notes(plan: Plan) -> Iterator[str]:
    for kind, lines in (("alarm", plan.errors), ("", plan.warnings), ("", plan.advice)):
        if lines:
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            yield f'<ul class="{kind}">{items}</ul>'


def _sections(plan: Plan, alternatives: Alternatives) -> Iterator[str]:
    if plan.step is not None:
        yield from _memory(plan)
    if plan.estimate is not None:
        yield from _time(plan)
    if plan.timeline is not None and plan.timeline.traffic:
        yield heading("Collectives", "of a step, on a device")
        yield table("", _COLLECTIVE, _collectives(plan), aligns=True)
    if alternatives:
        yield heading("Alternatives", "estimates")
        yield table("", _ALTERNATIVE, map(_alternative, alternatives), aligns=True)
    if plan.step is not None and plan.config is not None:
        d, accum = plan.config.distributed, plan.config.train.grad_accum_steps
        if d.pp > 1:
            yield heading("Pipeline", f"{bubble(plan):.1%} idle")
            schedule = SCHEDULES[d.pp_schedule](d.pp, accum, d.chunks)
            yield f'<div class="scroll">{as_svg(schedule)}</div>'
        yield heading("Parameters", "and their shards")
        yield table("", _PARAMETER, _parameters(plan), aligns=True)


def _memory(plan: Plan) -> Iterator[str]:
    assert plan.step is not None
    memory = plan.step.memory
    full_width = max(memory.peak, memory.capacity)
    yield heading("Memory of a device", f"{_gb(memory.peak)} of {_gb(memory.capacity)}")
    yield stacked_bar(memory.parts, full_width, _gb, COLOURS, limit=memory.capacity)
    yield legend({name: _gb(value) for name, value in memory.parts.items() if value}, COLOURS)


def _time(plan: Plan) -> Iterator[str]:
    assert plan.estimate is not None
    assert plan.timeline is not None
    line = plan.timeline
    parts = dict(sorted(line.busy.items(), key=lambda item: -item[1])) | {"waiting": line.waited}
    yield heading("A step", f"an estimate: {plan.estimate.estimated_from}")
    yield stacked_bar(parts, line.seconds, _seconds, COLOURS)
    yield legend({kind: _seconds(value) for kind, value in parts.items() if value}, COLOURS)
    yield f'<div class="scroll">{picture("step", line.spans, line.seconds)}</div>'
    loops = {(span.times, round(span.seconds, 6)): span for span in _all(line.spans) if span.inside}
    for loop in sorted(loops.values(), key=lambda span: -span.seconds)[:_LOOPS]:
        each = loop.seconds / loop.times
        name = f"{loop.name}: 1 of {loop.times} iterations"
        yield f'<div class="scroll">{picture(name, loop.inside, each)}</div>'


def _all(spans: Iterable[Span]) -> Iterator[Span]:
    for span in spans:
        yield span
        yield from _all(span.inside)


def picture(title: str, spans: Sequence[Span], seconds: float) -> str:
    """Return a timeline as SVG: the device in the first row, then the links of each mesh axis.

    Args:
        title: title of the picture.
        spans: spans of a computation.
        seconds: duration of the computation.
    """
    lanes = list(dict.fromkeys(["device", *(span.lane for span in spans)]))
    height = _ROW * (len(lanes) + 2)
    scale = (_WIDTH - _LEFT) / max(seconds, 1e-12)
    lines = [f'<svg class="time" viewBox="0 0 {_WIDTH} {height}">']
    lines.append(f'<text x="0" y="14">{escape(title)}, {1e3 * seconds:,.1f} ms</text>')
    for row, lane in enumerate(lanes, 1):
        y = row * _ROW
        lines.append(f'<text x="0" y="{y + 14}">{escape(lane)}</text>')
        lines += _boxes([span for span in spans if span.lane == lane], y, scale)
    lines.append("</svg>")
    return "\n".join(lines)


def _boxes(spans: Sequence[Span], y: float, scale: float) -> Iterator[str]:
    """Yield a box for each span; spans too thin to be seen are merged with their neighbours."""
    drawn = -math.inf
    for span in sorted(spans, key=lambda inner: inner.start):
        start, width = _LEFT + span.start * scale, span.seconds * scale
        if start + width < drawn + _THINNEST:
            continue
        drawn = start + width
        kind = _main_kind(span)
        label = f"{span.name}: {kind}, {1e3 * span.seconds:.3f} ms"
        label += f", {span.times} iterations" if span.times > 1 else ""
        yield (
            f'<rect x="{start:.2f}" y="{y}" width="{max(width, _THINNEST):.2f}" height="16" '
            f'style="--c: var(--{COLOURS[kind]})"><title>{escape(label)}</title></rect>'
        )


def _main_kind(span: Span) -> str:
    """Return the kind of work that dominates a loop."""
    if not span.inside:
        return span.kind
    sums: dict[str, float] = {}
    for inner in span.inside:
        if inner.lane == "device":
            kind = _main_kind(inner)
            sums[kind] = sums.get(kind, 0) + inner.seconds
    return max(sums, key=lambda kind: sums[kind]) if sums else span.kind


def _collectives(plan: Plan) -> Iterator[Sequence[str]]:
    assert plan.timeline is not None
    for key, item in collectives_by_wait(plan.timeline):
        where = "in a loop" if key.in_loop else "once"
        how = "overlapped" if key.overlapped else "exposed"
        yield (
            key.kind, " x ".join(key.axes), f"{item.count:,.0f}", _gb(item.bytes),
            f"{item.seconds:.4f}", f"{item.waited:.4f}", f"{where}, {how}",
        )  # fmt: skip


def _alternative(named: tuple[str, Mapping[str, Any]]) -> Sequence[str]:
    name, report = named
    memory, step = report.get("memory_per_device"), report.get("step")
    peak = _gb(memory["peak_bytes"]) if memory else "-"
    if not step or not report["fits"]:
        return name, peak, "does not run", "", ""
    waiting = step["waited_seconds"] / step["seconds"]
    return name, peak, f"{step['tokens_per_second']:,.0f}", f"{step['mfu']:.1%}", f"{waiting:.0%}"


def _parameters(plan: Plan) -> Iterator[Sequence[str]]:
    assert plan.step is not None
    assert plan.config is not None
    mesh = plan.step.mesh
    device = mesh.devices.flat[0]
    model = build_model(plan.config, device.platform, gpu_capability(device))
    shardings = param_shardings(model.abstract, model.axes, mesh)
    leaves = jax.tree_util.tree_leaves_with_path(model.abstract)
    for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        split = [
            f"{dim} by {' x '.join(_names(names, mesh.shape))}"
            for dim, names in enumerate(sharding.spec)
            if _names(names, mesh.shape)
        ]
        size = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        yield (
            jax.tree_util.keystr(path, simple=True, separator="."),
            " x ".join(map(str, leaf.shape)),
            ", ".join(split) or "nothing",
            f"{size / 1e6:,.2f} MB",
        )


def _names(names: Any, sizes: Mapping[str, int]) -> list[str]:  # noqa: ANN401
    axes = (names,) if isinstance(names, str) else names or ()
    return [name for name in axes if sizes[name] > 1]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s"


def _gb(n: float) -> str:
    return f"{n / 1e9:,.2f} GB"
