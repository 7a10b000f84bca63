"""What works while clients train, and never beside anything else."""

from __future__ import annotations

import threading

import tensorflow as tf

from tfdp_fl.engine import background


class BackgroundThreadTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.thread = background.BackgroundThread()
        self.addCleanup(self.thread.close)

    def test_beside_the_block_and_done_after_it(self):
        began, go_on, seen = threading.Event(), threading.Event(), []

        def work():
            began.set()
            self.assertTrue(go_on.wait(60))
            seen.append(threading.current_thread())

        self.thread.expect(work)
        self.assertFalse(began.wait(0.05))  # Not before the block.
        with self.thread.computing():
            self.assertTrue(began.wait(60))
            self.assertEqual(seen, [])
            go_on.set()
        self.assertLen(seen, 1)
        self.assertIsNot(seen[0], threading.main_thread())
        with self.thread.computing():  # Once.
            pass
        self.assertLen(seen, 1)
        self.thread.close()
        self.assertFalse(seen[0].is_alive())

    def test_begins_when_it_is_told_to(self):
        calls = []
        self.thread.expect(lambda: calls.append(threading.current_thread()))
        with self.thread.computing(at_once=False) as begin:
            self.thread.start()
            self.thread.submit(lambda: None).result(60)
            self.assertEqual(calls, [])  # It would have been before that.
            begin()
            begin()
        self.assertLen(calls, 1)
        self.thread.expect(lambda: calls.append(None))
        with self.thread.computing(at_once=False):
            pass  # Nobody said so.
        with self.thread.computing():
            pass
        self.assertLen(calls, 1)

    def test_done_also_where_the_block_raises(self):
        began, done = threading.Event(), []

        def work():
            began.set()
            threading.Event().wait(0.05)
            done.append(True)

        self.thread.expect(work)
        with self.assertRaises(KeyError), self.thread.computing():
            self.assertTrue(began.wait(60))
            raise KeyError
        self.assertEqual(done, [True])

    def test_nobody_hears_of_its_errors(self):
        def work():
            raise ValueError("drawn again, where it is needed")

        self.thread.expect(work)
        with self.thread.computing():
            pass

    def test_closed(self):
        calls = []
        self.thread.expect(lambda: calls.append(1))
        self.thread.close()
        with self.thread.computing():
            pass
        self.assertEqual(calls, [])
        with self.assertRaisesRegex(RuntimeError, "takes no work"):
            self.thread.submit(lambda: None)
        self.thread.start()
        self.assertEqual(self.thread.submit(lambda: 3).result(60), 3)


if __name__ == "__main__":
    tf.test.main()
