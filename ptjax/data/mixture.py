"""An endless, resumable stream over several sources in exact proportions, on Grain.

Each block of records holds a whole number from every source, by largest remainder of its weight, so the realised
mixture is the same in every block and never a matter of luck. A record is a function of (sources, weights, block, seed,
index): the whole state is one integer. Sources are random access; nothing here reads files or tokenizes.
"""

from collections.abc import Mapping, Sequence
import sys
from typing import Any

import grain


def largest_remainder(weights: Sequence[float], total: int) -> list[int]:
  """Whole numbers that sum to `total` in proportion to the weights; ties go to the lower index.

  Raises:
    ValueError: a negative weight, or none above 0.
  """
  weight_sum = sum(weights)
  if not weight_sum > 0 or min(weights) < 0:
    raise ValueError(f'weights {list(weights)}: need numbers >= 0 with a positive sum')
  raw = [w * total / weight_sum for w in weights]
  counts = [int(x + 1e-9) for x in raw]  # 0.3 * 10 is 3, whatever floats make of it
  order = sorted(range(len(raw)), key=lambda i: (round(counts[i] - raw[i], 9), i))
  for i in order[:total - sum(counts)]:
    counts[i] += 1
  return counts


class _Blocks(grain.transforms.DatasetSelectionMap):
  """Endless blocks of `counts` records per source, spread evenly; Grain's own mixing rounds ratios and drifts."""

  def __init__(self, counts: Sequence[int]):
    self._counts = tuple(counts)
    spread = sorted(((k + 0.5) / count, source, k) for source, count in enumerate(counts) for k in range(count))
    self._pattern = [(source, k) for _, source, k in spread]

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, index: int) -> tuple[int, int]:
    block, place = divmod(index, len(self._pattern))
    source, k = self._pattern[place]
    return source, block * self._counts[source] + k


class Mixture:
  """Draws records of several sources, each shuffled anew at each of its epochs."""

  def __init__(self, sources: Mapping[str, Sequence[Any]], weights: Mapping[str, float], *, block: int, seed: int):
    """Args:
      sources: records by name.
      weights: relative share by name, the same names.
      block: records in which the shares are exact up to rounding to whole records.
      seed: of the order within each source.

    Raises:
      ValueError: names differ, a source is empty, or a share rounds to no record per block.
    """
    if set(sources) != set(weights):
      raise ValueError(f'mixture weights name {sorted(weights)}, but the sources are {sorted(sources)}')
    counts = largest_remainder([weights[name] for name in sources], block)
    for name, count in zip(sources, counts):
      if not len(sources[name]):
        raise ValueError(f'source {name!r} is empty; remove it or give it records')
      if not count:
        raise ValueError(f'source {name!r} with weight {weights[name]} gets none of the {block} records of a block; '
                         'raise its weight or the block, or remove it')
    self.counts = dict(zip(sources, counts))
    self._index = 0
    parts = [grain.MapDataset.source(records).shuffle(seed=seed + i).repeat()
             for i, records in enumerate(sources.values())]
    self._stream = grain.MapDataset.select_from_datasets(parts, _Blocks(counts))

  def draw(self, n: int) -> list[Any]:
    """The next n records."""
    self._index += n
    return [self._stream[i] for i in range(self._index - n, self._index)]

  def state_dict(self) -> dict[str, int]:
    """JSON-able; the same constructor arguments with this state go on with the same records."""
    return {'index': self._index}

  def load_state_dict(self, state: Mapping[str, int]) -> None:
    self._index = int(state['index'])
