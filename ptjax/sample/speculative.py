"""Guesses of the next tokens, for a decode step that checks several positions at once.

`look_up` copies what followed the latest earlier occurrence of the row's last few tokens (prompt look-up decoding):
code, quotations and structured answers repeat themselves. A guess is a single token, so checking it needs no second
distribution: the window draws at each position as always and keeps the draw whatever it is; a guess that it equals made
the next position's draw valid too. The accepted draws are those of decoding without guesses.
"""

import jax
import jax.numpy as jnp
import numpy as np


def look_up(token_BS: jax.Array, position_B: jax.Array, count: int, ngram: int) -> jax.Array:
  """guess_BW: up to W = `count` tokens that may come after position_B; -1 where there is no guess.

  The longest run of at most `ngram` last tokens that occurs earlier decides, of its occurrences the latest.

  Args:
    token_BS: tokens up to position_B; later entries may be anything.
    position_B: of the last token.
  """
  B, S = token_BS.shape
  place_S = np.arange(S)
  run_BS = jnp.zeros((B, S), jnp.int32)  # length of the run of last tokens that ends at each place
  going_BS = (place_S[None] < position_B[:, None])
  for back in range(ngram):
    last_B1 = jnp.take_along_axis(token_BS, jnp.maximum(position_B - back, 0)[:, None], axis=1)
    shifted_BS = jnp.pad(token_BS, ((0, 0), (back, 0)), constant_values=-1)[:, :S]
    going_BS &= (shifted_BS == last_B1) & (position_B >= back)[:, None]
    run_BS += going_BS
  found_B = jnp.argmax(run_BS * S + place_S[None], axis=1)
  known_B = jnp.max(run_BS, axis=1) > 0
  from_BW = found_B[:, None] + 1 + np.arange(count)[None]
  guess_BW = jnp.take_along_axis(token_BS, jnp.minimum(from_BW, S - 1), axis=1)
  # A run that ends just before the last token repeats itself: its guesses go on from their own beginning.
  period_B1 = (position_B - found_B)[:, None]
  inside_BW = found_B[:, None] + 1 + np.arange(count)[None] % jnp.maximum(period_B1, 1)
  guess_BW = jnp.where(from_BW <= position_B[:, None], guess_BW,
                       jnp.take_along_axis(token_BS, jnp.minimum(inside_BW, S - 1), axis=1))
  return jnp.where(known_B[:, None], guess_BW, -1).astype(jnp.int32)
