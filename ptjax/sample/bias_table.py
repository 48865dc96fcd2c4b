"""Which logit bias lies in which row of the device's table. Equal biases share a row; row 0 adds nothing."""

import numpy as np


class BiasTable:
  """Rows 1..`rows` of biases in use, with the users of each; an unused row keeps its bias until it is needed."""

  def __init__(self, rows: int):
    self._bias: dict[int, bytes] = {}
    self._users = dict.fromkeys(range(1, rows + 1), 0)
    self.unwritten: dict[int, np.ndarray] = {}  # rows whose bias the device does not have yet

  def take(self, bias: np.ndarray | None) -> int | None:
    """The row of a bias, now used once more; None if all rows hold others."""
    if bias is None:
      return 0
    key = bias.tobytes()
    row = next((row for row, known in self._bias.items() if known == key), None)
    if row is None:
      row = next((row for row, users in self._users.items() if not users), None)
      if row is None:
        return None
      self._bias[row], self.unwritten[row] = key, bias
    self._users[row] += 1
    return row

  def release(self, row: int) -> None:
    if row:
      if self._users[row] < 1:
        raise RuntimeError(f'bias row {row} is released more often than it was taken')
      self._users[row] -= 1
