import collections

from absl.testing import absltest

from tfdp_fl.aggregators import state as state_lib

STATE = state_lib.AggregatorState((), 1, (), (), False)


class FindAggregatorStateTest(absltest.TestCase):
    def test_finds_it_wherever_it_is(self):
        inside = collections.OrderedDict(clip=1.0, inner=[(), (STATE,)])
        self.assertIs(state_lib.find_aggregator_state(inside), STATE)
        self.assertIs(state_lib.find_aggregator_state(STATE), STATE)

    def test_exactly_one(self):
        with self.assertRaisesRegex(ValueError, "found 0"):
            state_lib.find_aggregator_state({"a": 1.0})
        with self.assertRaisesRegex(ValueError, "found 2"):
            state_lib.find_aggregator_state([STATE, STATE])


if __name__ == "__main__":
    absltest.main()
