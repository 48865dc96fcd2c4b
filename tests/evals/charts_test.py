"""Charts are SVG that fits any page colour, whatever the labels and numbers."""

import math
from xml.etree import ElementTree

from absl.testing import absltest
import numpy as np

from ptjax.evals import charts

NAN = math.nan


class ChartsTest(absltest.TestCase):

  def texts(self, svg):
    root = ElementTree.fromstring(svg)
    self.assertNotIn('width', root.attrib)
    self.assertIn('viewBox', root.attrib)
    return [node.text for node in root.iter('{http://www.w3.org/2000/svg}text')]

  def test_labels_are_neither_markup_nor_mathematics(self):
    label = '<script>x</script> $\\frac{$ "&amp;" _y'
    texts = self.texts(charts.lines({label: ([1, 2], [0, 1]), 'b': ([1], [2])}, title='a "title" <b>'))
    self.assertIn(label, texts)
    self.assertIn('a "title" <b>', texts)

  def test_colours_come_from_the_page(self):
    svg = charts.lines({'a': ([1, 2], [0, 1])}, title='t')
    self.assertIn('currentColor', svg)
    self.assertIn('var(--grid)', svg)
    self.assertNotIn('#010203', svg)
    self.assertNotIn('#ffffff', svg)

  def test_the_same_numbers_draw_the_same_bytes(self):
    draw = lambda: charts.lines({'a': ([1, 2], [0, 1])}, title='t')
    self.assertEqual(draw(), draw())

  def test_odd_numbers(self):
    for values in ([NAN] * 3, [math.inf, 1.0, NAN], [1e300, -1e300, 0.0], [0.0] * 3):
      for draw in (charts.lines, charts.stacked):
        with self.subTest(values=values, draw=draw.__name__):
          self.assertIn('t', self.texts(draw({'a': ([1, 2, 3], values)}, title='t')))
    self.texts(charts.lines({'a': ([1, 2], [0.0, 1e-6])}, title='t', log=True))  # no logarithm of 0
    self.texts(charts.stacked({'a': ([5], [1.0]), 'b': ([7], [1.0])}, title='t'))

  def test_log_scale(self):
    self.assertIn('1e-06', self.texts(charts.lines({'a': ([1, 2], [1e-6, 1e-5])}, title='t', log=True)))

  def test_accuracy_leaves_out_what_is_missing(self):
    rates = {('base', 'x'): (0.5, 0.4, 0.6), ('rl', 'y'): (NAN, 0.0, 1.0)}
    texts = self.texts(charts.accuracy(['base', 'rl'], ['x', 'y'], rates, {'x': 0.1, 'y': NAN}))
    self.assertContainsSubset({'base', 'rl', 'x', 'y', 'constant answer'}, set(texts))

  def test_running_mean(self):
    # each mean is over the finite ones among the value, one before and one after
    got = charts._running_mean(np.array([1.0, 3.0, NAN, NAN, NAN, 5.0]), 1)
    np.testing.assert_allclose(got, [2.0, 2.0, 3.0, NAN, 5.0, 5.0])


if __name__ == '__main__':
  absltest.main()
