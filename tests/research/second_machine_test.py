"""The link to a second machine, and from how many clients that one pays."""

from __future__ import annotations

import math
import socket
import time

from absl.testing import absltest, parameterized

from research import link, second_machine


class WireTest(parameterized.TestCase):
    @parameterized.parameters(
        (40, 90), (1500, 1538), (1501, 1629), (52 + 10 * 1448, 15_380)
    )
    def test_bytes_of_a_packet(self, packet, wire):
        self.assertEqual(link.wire_bytes(packet), wire)


class DirectionTest(absltest.TestCase):
    def test_packets_wait_for_the_wire_and_travel(self):
        # 1538 bytes on the wire and 1 Mbit/s: 12.304 ms each.
        direction = link.Direction(rate=1e6, latency=0.5)
        packets = [bytes([number]) * 1510 for number in range(3)]
        for packet in packets:
            direction.send(packet, now=10.0)
        self.assertAlmostEqual(direction.due(), 10.512304)
        self.assertEqual(direction.arrived(10.5), [])
        self.assertEqual(direction.arrived(10.53), packets[:2])
        self.assertAlmostEqual(direction.due(), 10.536912)
        self.assertEqual(direction.arrived(11.0), packets[2:])
        self.assertIsNone(direction.due())
        # An idle wire starts anew.
        direction.send(packets[0], now=20.0)
        self.assertAlmostEqual(direction.due(), 20.512304)


class LinkTest(absltest.TestCase):
    def test_there_and_back_takes_twice_the_latency(self):
        if not link.is_possible():
            self.skipTest("A namespace and a network device need root.")
        with link.Link(rate=1e9, latency=0.05) as far:
            start = time.monotonic()
            with self.assertRaises(ConnectionRefusedError):
                socket.create_connection((far.address, 1), timeout=30)
            self.assertGreaterEqual(time.monotonic() - start, 0.1)
        # It is gone, and can be made again.
        with link.Link(rate=1e9, latency=0.0):
            pass


def _found(alone, linked):
    def quartiles(start, slope):
        return {
            cohort: [start + slope * cohort] * 3 for cohort in second_machine.COHORTS
        }

    return {"quartiles": {"alone": quartiles(*alone), "link": quartiles(*linked)}}


class BreakEvenTest(absltest.TestCase):
    def test_is_where_the_lines_meet(self):
        found = _found((0.01, 0.01), (0.31, 0.005))
        self.assertAlmostEqual(second_machine.break_even(found), 60.0, 6)

    def test_may_be_never_or_always(self):
        self.assertEqual(
            second_machine.break_even(_found((0.1, 0.01), (0.2, 0.011))),
            math.inf,
        )
        self.assertEqual(
            second_machine.break_even(_found((0.2, 0.01), (0.1, 0.005))), 0.0
        )


if __name__ == "__main__":
    absltest.main()
