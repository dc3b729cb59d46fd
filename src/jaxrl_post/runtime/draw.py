"""Small pictures as inline SVG: curves, histograms, the timeline of a step.

Colours are classes that the page's style sheet fills, in light and in dark. All
text is escaped here.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence

from jaxrl_post import types

# Of a panel, in its own units; one unit is about a pixel on a phone.
_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 12, 24
# More points than pixels only make the file larger.
_POINTS = 300
# Of a timeline.
_LONG, _LANE, _NAMES = 960, 30, 124
_RECTS = 1500
# What waiting is filled with, so that it does not look like work.
_HATCH = (
  '<defs><pattern id="hatch" width="6" height="6" '
  'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
  '<rect class="hatch0" width="6" height="6"/>'
  '<rect class="hatch1" width="1" height="6"/></pattern></defs>'
)


@types.host_record
class Curve:
  """A line of a panel.

  Attributes:
    name: in the legend.
    points: x and y; those that are not finite are left out.
    dots: mark each point, for values that few steps have.
  """

  name: str
  points: Sequence[tuple[float, float]]
  dots: bool = False


@types.host_record
class Span:
  """What a lane of a timeline did.

  Attributes:
    lane: its row, from 0.
    kind: class of its colour.
    name: shown when pointed at.
    start: seconds from the left end.
    end: likewise.
  """

  lane: int
  kind: str
  name: str
  start: float
  end: float


def curves(title: str, found: Sequence[Curve]) -> str:
  """Draws lines over steps.

  Args:
    title: what is drawn, for those who cannot see it.
    found: at most four; those without a finite point are left out.

  Returns:
    An SVG, with at most `_POINTS` points a line, each the mean of its
    neighbours; empty if there is no point.
  """
  kept = [
    (i, curve, _thinned(curve.points, dots=curve.dots))
    for i, curve in enumerate(found)
  ]
  kept = [(i, curve, points) for i, curve, points in kept if points]
  everything = [point for _, _, points in kept for point in points]
  if not everything:
    return ""
  x_ends = _ends([x for x, _ in everything])
  y_ends = _ends([y for _, y in everything])
  at = _scales(x_ends, y_ends)
  parts = [*_grid(y_ends, at), *_steps(x_ends, at)]
  for i, curve, points in kept:
    placed = [at(x, y) for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    parts.append(f'<polyline class="line c{i}" points="{path}"/>')
    if curve.dots or len(placed) == 1:
      parts += [
        f'<circle class="dot c{i}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
        f"<title>{_text(curve.name)} {real[1]:.4g} at {real[0]:g}</title>"
        "</circle>"
        for (x, y), real in zip(placed, points, strict=True)
      ]
  return _svg(title, parts)


def bars(title: str, found: Sequence[tuple[str, float]]) -> str:
  """Draws a histogram.

  Args:
    title: as for `curves`.
    found: label and share of each bar, from left to right.

  Returns:
    An SVG; empty if there are no bars, or all are zero.
  """
  top = max((share for _, share in found), default=0.0)
  if top <= 0:
    return ""
  ends = _ends([0.0, top])
  at = _scales((0.0, float(len(found))), ends)
  parts = _grid(ends, at, form=lambda y: f"{100 * y:.3g}%")
  every = math.ceil(len(found) / 6)
  for i, (label, share) in enumerate(found):
    left, top_y = at(i + 0.08, share)
    right, floor = at(i + 0.92, 0.0)
    parts.append(
      f'<rect class="bar" x="{left:.1f}" y="{top_y:.1f}" '
      f'width="{right - left:.1f}" height="{floor - top_y:.1f}">'
      f"<title>{_text(label)}: {100 * share:.2f}%</title></rect>"
    )
    if i % every == 0:
      middle = (left + right) / 2
      parts.append(_label(middle, _HEIGHT - 8, label, "middle"))
  return _svg(title, parts)


def timeline(
  title: str,
  lanes: Sequence[str],
  spans: Sequence[Span],
  *,
  seconds: float,
  levels: Mapping[str, Sequence[tuple[float, float]]],
) -> str:
  """Draws what each lane did, and counters below.

  Args:
    title: as for `curves`.
    lanes: their names.
    spans: of all lanes; of more than `_RECTS` the longest are drawn.
    seconds: from the left end to the right one.
    levels: by name of a counter, when it took which value.

  Returns:
    An SVG that is wider than a phone: it is to be put where it can scroll.
  """
  width = _LONG - _NAMES - 8

  def at(second: float) -> float:
    return _NAMES + width * min(max(second / seconds, 0.0), 1.0)

  parts = [_HATCH]
  for i, name in enumerate(lanes):
    parts.append(_label(_NAMES - 8, i * _LANE + 20, name, "end"))
    parts.append(
      f'<rect class="lane" x="{_NAMES}" y="{i * _LANE + 4}" width="{width}" '
      f'height="{_LANE - 8}"/>'
    )
  longest = sorted(spans, key=lambda span: span.start - span.end)[:_RECTS]
  for span in longest:
    left, right = at(span.start), at(span.end)
    parts.append(
      f'<rect class="k {span.kind}" x="{left:.2f}" '
      f'y="{span.lane * _LANE + 4}" width="{max(right - left, 0.4):.2f}" '
      f'height="{_LANE - 8}"><title>{_text(span.name)} '
      f"{_seconds(span.end - span.start)}</title></rect>"
    )
  floor = len(lanes) * _LANE
  for i, (name, values) in enumerate(levels.items()):
    parts += _level(name, values, at, floor + i * (_LANE + 8))
  floor += len(levels) * (_LANE + 8) + 6
  parts += [
    _label(at(seconds * k / 4), floor + 10, _seconds(seconds * k / 4), anchor)
    for k, anchor in enumerate(("start", "middle", "middle", "middle", "end"))
  ]
  return _svg(title, parts, width=_LONG, height=floor + 18)


def _level(
  name: str,
  values: Sequence[tuple[float, float]],
  at: Callable[[float], float],
  top: float,
) -> list[str]:
  """Draws a counter as stairs, its largest value at its name."""
  most = max((value for _, value in values), default=0.0)
  corners, height = [], _LANE - 6
  for (second, value), (until, _) in zip(
    values, [*values[1:], (math.inf, 0.0)], strict=True
  ):
    y = top + 4 + height * (1 - (value / most if most else 0.0))
    end = at(until) if math.isfinite(until) else _LONG - 8.0
    corners += [f"{at(second):.1f},{y:.1f}", f"{end:.1f},{y:.1f}"]
  return [
    _label(_NAMES - 8, top + 20, f"{name} (to {most:g})", "end"),
    f'<polyline class="line c0" points="{" ".join(corners)}"/>',
  ]


def _thinned(
  points: Sequence[tuple[float, float]], *, dots: bool
) -> list[tuple[float, float]]:
  kept = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
  size = 1 if dots else math.ceil(len(kept) / _POINTS)
  parts = [kept[i : i + size] for i in range(0, len(kept), max(size, 1))]
  return [
    (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part))
    for part in parts
  ]


def _ends(values: Sequence[float]) -> tuple[float, float]:
  low, high = min(values), max(values)
  if high - low <= 1e-9 * max(abs(low), abs(high)):
    pad = abs(high) / 10
    return (low - pad, high + pad) if pad else (0.0, 1.0)
  return low, high


def _scales(
  x_ends: tuple[float, float], y_ends: tuple[float, float]
) -> Callable[[float, float], tuple[float, float]]:
  def at(x: float, y: float) -> tuple[float, float]:
    across = (x - x_ends[0]) / (x_ends[1] - x_ends[0])
    up = (y - y_ends[0]) / (y_ends[1] - y_ends[0])
    return (
      _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
      _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
    )

  return at


def _grid(
  ends: tuple[float, float],
  at: Callable[[float, float], tuple[float, float]],
  form: Callable[[float], str] = lambda y: f"{y:.3g}",
) -> list[str]:
  parts = []
  for value in _ticks(*ends):
    y = at(0.0, value)[1]
    parts.append(
      f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" '
      f'y2="{y:.1f}"/>'
    )
    parts.append(_label(_LEFT - 6, y + 4, form(value), "end"))
  return parts


def _steps(
  ends: tuple[float, float],
  at: Callable[[float, float], tuple[float, float]],
) -> list[str]:
  whole = [value for value in _ticks(*ends) if value == round(value)]
  return [
    _label(at(value, 0.0)[0], _HEIGHT - 8, f"{value:.0f}", "middle")
    for value in whole
  ]


def _ticks(low: float, high: float) -> list[float]:
  """Returns three to six round numbers between two."""
  rough = (high - low) / 4
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(k * power for k in (1, 2, 2.5, 5, 10) if k * power >= rough)
  first = math.ceil(low / step - 1e-9)
  last = math.floor(high / step + 1e-9)
  return [k * step for k in range(first, last + 1)]


def _seconds(value: float) -> str:
  if value >= 1:
    return f"{value:.2f} s"
  return f"{1000 * value:.3g} ms"


def _label(x: float, y: float, text: str, anchor: str) -> str:
  return (
    f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_text(text)}</text>'
  )


def _text(text: str) -> str:
  return html.escape(text, quote=True)


def _svg(
  title: str,
  parts: Sequence[str],
  *,
  width: float = _WIDTH,
  height: float = _HEIGHT,
) -> str:
  return (
    f'<svg viewBox="0 0 {width:g} {height:g}" role="img" '
    f'aria-label="{_text(title)}">{"".join(parts)}</svg>'
  )
