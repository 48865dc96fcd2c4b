"""The pool keeps order, retries the host alone, and turns what breaks into `error`, never into a 0 that counts."""

from unittest import mock

from absl.testing import absltest

from ptjax import types
from ptjax.verify import base
from ptjax.verify import sandbox
from ptjax.verify import worker


def task(verifier='exact', **fields):
  return types.Task('t', 'd', (), verifier, **{'reference': '1', **fields})


class PoolTest(absltest.TestCase):

  def test_order_and_version(self):
    with base.VerifierPool() as pool:
      verdicts = pool.run([task(reference=str(i)) for i in range(50)], [str(i % 7) for i in range(50)])
    self.assertEqual([v.status for v in verdicts], ['pass' if i < 7 else 'fail' for i in range(50)])
    self.assertEqual({v.verifier_version for v in verdicts}, {base.version('exact')})

  def test_what_breaks_is_an_error(self):
    for error, calls in ((KeyError('x'), 1), (sandbox.SandboxError('x'), 3), (worker.Died('x'), 3)):
      broken = mock.Mock(side_effect=error)
      with mock.patch.dict(base.VERIFIERS, exact=base.Row(broken, mock.Mock(), ())), base.VerifierPool() as pool:
        [verdict] = pool.run([task()], ['1'])
      self.assertEqual(verdict.status, 'error')
      self.assertIn(type(error).__name__, verdict.evidence['error'])
      self.assertEqual(broken.call_count, calls)

  def test_a_host_failure_that_passes(self):
    good = types.Verdict('pass', 1.0)
    flaky = mock.Mock(side_effect=[sandbox.SandboxError('x'), good])
    with mock.patch.dict(base.VERIFIERS, exact=base.Row(flaky, mock.Mock(), ())), base.VerifierPool() as pool:
      self.assertEqual(pool.run([task()], ['1'])[0].status, 'pass')

  def test_too_many_errors_of_a_domain_end_the_run_and_name_it(self):
    def verify(task, text):
      if text == 'break':
        raise KeyError('lost file')
      return types.Verdict('fail', 0.0)

    tasks = [types.Task('t', domain, (), 'exact', '1') for domain in ('good', 'bad') for _ in range(40)]
    texts = ['1'] * 40 + ['break'] * 4 + ['1'] * 36
    with mock.patch.dict(base.VERIFIERS, exact=base.Row(verify, mock.Mock(), ())):
      with base.VerifierPool(max_error_frac=0.1) as pool:
        pool.run(tasks, texts)  # 4 of 40
        with self.assertRaisesRegex(base.TooManyErrors, "domain 'bad': 8 of the latest 45 .*KeyError: 'lost file'"):
          pool.run(tasks[40:45], texts[40:45])
      with base.VerifierPool() as pool:
        pool.run(tasks[40:], ['break'] * 40)  # any number of them where each is looked at

  def test_no_isolation_is_refused(self):
    code = task('code', reference=None, tests={'style': 'asserts', 'text': 'assert f() == 1'})
    unavailable = mock.Mock(side_effect=sandbox.SandboxUnavailable('no sandbox'))
    with mock.patch.object(sandbox, 'Sandbox', unavailable), base.VerifierPool() as pool:
      with self.assertRaises(sandbox.SandboxUnavailable):
        pool.run([code], ['def f(): return 1'])

  def test_errors(self):
    with base.VerifierPool() as pool:
      with self.assertRaisesRegex(ValueError, 'must pair up'):
        pool.run([task()], [])
      with self.assertRaisesRegex(ValueError, r"unknown verifier 'maths'; known are \['code', 'exact', 'math'"):
        pool.run([task('maths')], ['1'])

  def test_versions_differ(self):
    self.assertLen({base.version(name) for name in base.VERIFIERS}, len(base.VERIFIERS))
    self.assertRegex(base.version('math'), '^[0-9a-f]{16}$')


if __name__ == '__main__':
  absltest.main()
