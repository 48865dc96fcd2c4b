"""The notebook runs from top to bottom, at its tiny size with fewer steps."""

import os
import pathlib
from unittest import mock

import nbclient
import nbformat
from absl.testing import absltest

ROOT = pathlib.Path(__file__).resolve().parents[2]
OVERRIDES = [
    '--config.dpo.steps=1', '--config.rl.steps=1', '--config.eval.tasks_per_domain=2', '--config.gate.enabled=False']


class NotebookTest(absltest.TestCase):

  def test_runs_and_shows_a_table(self):
    notebook = nbformat.read(ROOT / 'notebooks' / 'quickstart.ipynb', as_version=4)
    nbformat.validate(notebook)
    self.assertFalse([c for c in notebook.cells if c.get('outputs')], 'commit the notebook without outputs')
    (parameters,) = [c for c in notebook.cells if 'parameters' in c.metadata.get('tags', [])]
    workdir = self.create_tempdir().full_path
    parameters.source += f'\nWORKDIR = {workdir!r}\nOVERRIDES = {OVERRIDES!r}\n'
    with mock.patch.dict(os.environ, JAX_NUM_CPU_DEVICES='1'):
      nbclient.NotebookClient(
          notebook, timeout=1800, kernel_name='python3', resources={'metadata': {'path': ROOT / 'notebooks'}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get('outputs', [])]
    written = ''.join(o.text for o in outputs if o.output_type == 'stream')
    (table,) = [o.data['text/markdown'] for o in outputs if 'text/markdown' in o.get('data', {})]
    self.assertIn('| domain | base | sft | dpo | rl |', table, written[-3000:])
    self.assertIn('| average |', table)
    self.assertTrue(any('image/png' in o.get('data', {}) for o in outputs))
    self.assertTrue(pathlib.Path(workdir, 'report.html').exists())
    self.assertIn('report.html', outputs[-1].text)


if __name__ == '__main__':
  absltest.main()
