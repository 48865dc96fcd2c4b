"""Charts of a report as inline SVG, drawn without a display and without a global pyplot state.

Text and grid lines take their colour from the page (`currentColor`, `--grid`), so one SVG serves light and dark pages.
Labels are never read as mathematics or markup. No file is read here: numbers come in, SVG text comes out.
"""

from collections.abc import Mapping, Sequence
import io
import math
import re

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
import numpy as np

COLORS = ('#8a8f98', '#3f8fd9', '#e0862c', '#2aa57b', '#c75c9f', '#8878d8', '#a9962f', '#d6544f', '#3aa6b5', '#97663f')
STATUS_COLORS = {'pass': '#2aa57b', 'fail': '#d6544f', 'timeout': '#e0862c', 'error': '#8878d8'}
_TEXT, _GRID = '#010203', '#040506'  # stand-ins, exchanged for the page's own colours
_STYLE = {
    'text.parse_math': False, 'svg.fonttype': 'none', 'svg.hashsalt': 'ptjax', 'font.size': 10.0,
    'axes.spines.top': False, 'axes.spines.right': False, 'axes.grid': True, 'axes.axisbelow': True,
    'text.color': _TEXT, 'axes.labelcolor': _TEXT, 'xtick.color': _TEXT, 'ytick.color': _TEXT,
    'axes.edgecolor': _GRID, 'grid.color': _GRID, 'grid.linewidth': 0.8, 'legend.frameon': False,
    'axes.titlelocation': 'left', 'axes.titlesize': 11, 'axes.titleweight': 'bold', 'legend.fontsize': 9}

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # label -> (steps, values)


def accuracy(stages: Sequence[str], domains: Sequence[str],
             rates: Mapping[tuple[str, str], tuple[float, float, float]],
             constant: Mapping[str, float]) -> str:
  """Returns a chart of accuracy with intervals: one row per domain, one mark per stage.

  Args:
    rates: (stage, domain) -> (rate, low, high) as fractions; missing or nan pairs are left out.
    constant: domain -> accuracy of the best constant answer, drawn as a dotted line.
  """
  with rc_context(_STYLE):
    figure, axes = _figure(0.9 + 0.15 * len(domains) * (len(stages) + 1.2), width=4.6)
    for s, stage in enumerate(stages):
      rows = [(d, *rates[stage, domain]) for d, domain in enumerate(domains) if (stage, domain) in rates]
      rows = np.array([row for row in rows if not math.isnan(row[1])], dtype=float).reshape(-1, 4)
      row, rate, low, high = rows.T
      offset = (s - (len(stages) - 1) / 2) * 0.72 / max(len(stages), 1)
      axes.errorbar(100 * rate, row + offset, xerr=100 * np.maximum([rate - low, high - rate], 0), fmt='o',
                    color=COLORS[s % len(COLORS)], markersize=5, linewidth=1.6, label=stage)
    axes.vlines([100 * constant[domain] for domain in domains], np.arange(len(domains)) - 0.42,
                np.arange(len(domains)) + 0.42, color=_TEXT, linestyle='dotted', linewidth=1.2,
                label='constant answer')
    axes.set_yticks(range(len(domains)), domains)
    axes.set_ylim(len(domains) - 0.5, -0.5)
    axes.grid(axis='y', visible=False)
    for boundary in range(1, len(domains)):
      axes.axhline(boundary - 0.5, color=_GRID, linewidth=0.6)
    axes.set_xlim(-2, 102)
    axes.set_xlabel('answer right, %')
    _legend(axes, columns=4)
    return _svg(figure, 'accuracy by stage and domain, with intervals')


def lines(series: Series, *, title: str, ylabel: str = '', log: bool = False, smooth: bool = True) -> str:
  """Returns a line chart over steps; with `smooth`, long curves get their running mean drawn on top."""
  with rc_context(_STYLE):
    figure, axes = _figure(height=2.3)
    for i, (label, (steps, values)) in enumerate(series.items()):
      color = COLORS[(i + 1) % len(COLORS)]
      steps, values = _finite(steps, values)
      width = len(values) // 24
      if width < 1 or not smooth:
        axes.plot(steps, values, color=color, linewidth=1.8, marker='o' if len(values) < 3 else '', label=label)
        continue
      axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.4)
      axes.plot(steps, _running_mean(values, width), color=color, linewidth=2.0, label=label)
    if log and all(v > 0 for _, (_, values) in series.items() for v in values):
      axes.set_yscale('log')
      axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:g}'))
      axes.yaxis.set_minor_formatter(NullFormatter())
    _finish(axes, title, ylabel, legend=len(series) > 1)
    return _svg(figure, title)


def stacked(series: Series, *, title: str, ylabel: str = '', colors: Mapping[str, str] | None = None) -> str:
  """Returns parts of a whole over steps, stacked; a series counts as 0 at a step where it has no number."""
  with rc_context(_STYLE):
    figure, axes = _figure(height=2.4)
    steps = np.array(sorted({step for xs, _ in series.values() for step in xs}), dtype=float)
    edges = np.concatenate([[steps[0] - 0.5], (steps[1:] + steps[:-1]) / 2, [steps[-1] + 0.5]])
    base = np.zeros(len(steps))
    for i, (label, (xs, ys)) in enumerate(series.items()):
      at = dict(zip(xs, ys))
      heights = np.array([at.get(step, 0.0) for step in steps], dtype=float)
      top = base + np.where(np.isfinite(heights), heights, 0.0)
      color = (colors or {}).get(label, COLORS[(i + 1) % len(COLORS)])
      axes.stairs(top, edges, baseline=base, fill=True, color=color, label=label, linewidth=0)
      base = top
    axes.grid(axis='x', visible=False)
    axes.set_xlim(edges[0], edges[-1])
    _finish(axes, title, ylabel, legend=True)
    return _svg(figure, title)


def _figure(height: float, width: float = 3.8) -> tuple[Figure, Axes]:
  figure = Figure(figsize=(width, height), layout='constrained')
  FigureCanvasSVG(figure)
  return figure, figure.add_subplot()


def _finish(axes: Axes, title: str, ylabel: str, legend: bool) -> None:
  axes.set_xlabel('step')
  axes.set_ylabel(ylabel)
  axes.xaxis.get_major_locator().set_params(integer=True)
  if legend:
    _legend(axes, columns=3)
  axes.set_title(title, pad=8 if not legend else 12)


def _legend(axes: Axes, columns: int) -> None:
  axes.figure.legend(loc='outside lower center', ncols=columns, handlelength=1.4, columnspacing=1.2)


def _finite(steps: Sequence[float], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
  steps, values = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
  return steps, np.where(np.isfinite(values), values, np.nan)


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
  """Returns the mean of the finite values up to `width` steps before and after; nan where there is none."""
  window = np.ones(2 * width + 1)
  count = np.convolve(np.isfinite(values), window, mode='same')
  total = np.convolve(np.nan_to_num(values), window, mode='same')
  return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _svg(figure: Figure, label: str) -> str:
  out = io.StringIO()
  figure.savefig(out, format='svg', transparent=True, metadata={'Date': None, 'Creator': None})
  svg = out.getvalue()
  svg = svg[svg.index('<svg'):]
  svg = re.sub(r'<metadata>.*?</metadata>', '', svg, flags=re.DOTALL)
  svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1', svg, count=1)
  svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1', svg, count=1)
  label = re.sub(r'[^\w ,.%/-]', ' ', label)
  svg = svg.replace('<svg', f'<svg role="img" aria-label="{label}"', 1)
  return svg.replace(_TEXT, 'currentColor').replace(_GRID, 'var(--grid)')
