r"""Measures and draws what a round costs with a second machine.

    python research/network.py --output=network.png
    python research/network.py --megabits=10000 --output=network.png

The second machine is a network namespace at the other end of a link of so many
Mbit/s and milliseconds (each way), and one core of this machine; the first is
another core. A model of 10 MB is trained by one of them alone, and by a TFF
worker on each, on cohorts of several sizes: from some size on the second
machine pays, and the last line says from which. Needs Linux, root (for the
namespace and its link), two cores, and TensorFlow Federated; a few minutes.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# research/ is not installed, and a program finds only its own folder.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
from absl import app, flags

from research import second_machine
from tfdp_fl.experiments import plots

_MEGABITS = flags.DEFINE_float(
    "megabits", 1000.0, "The link's rate, Mbit/s.", lower_bound=1.0
)
_LATENCY = flags.DEFINE_float(
    "latency_ms", 1.0, "Milliseconds each way.", lower_bound=0.0
)
_OUTPUT = flags.DEFINE_string("output", "network.png", "The .png file.")
_JSON = flags.DEFINE_string("json", None, "Where the figures go, or nowhere.")


def _draw(found: Mapping[str, Any], path: str) -> None:
    asked = found["asked"]
    names = {
        "alone": "one machine, in process",
        "no link": "two, by a worker on each, no network between",
        "link": f"two, at {asked['megabits']:g} Mbit/s and {asked['latency_ms']:g} ms",
    }
    figure, axes = plots.pyplot().subplots(figsize=(7, 4))
    for color, side in zip(plots.COLORS, second_machine.SIDES, strict=False):
        by_cohort = found["quartiles"][side]
        low, median, high = np.transpose(list(by_cohort.values()))
        axes.errorbar(
            list(by_cohort),
            median,
            [median - low, high - median],
            fmt="o",
            color=color,
            label=names[side],
        )
        start, slope = second_machine.line(by_cohort)
        ends = np.asarray([0, max(by_cohort)])
        axes.plot(ends, start + slope * ends, color=color, linewidth=1)
    even = second_machine.break_even(found)
    if math.isfinite(even):
        axes.axvline(even, color="gray", linestyle=":")
        axes.annotate(
            f"break-even: {even:.0f} clients",
            (even, axes.get_ylim()[1]),
            xytext=(4, -12),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_xlabel("clients in a round")
    axes.set_ylabel("a round, seconds")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    plots.save(figure, path)


def _say(found: Mapping[str, Any]) -> None:
    measured = found["link"]
    print(
        f"The link: {measured['megabits']:.0f} Mbit/s, "
        f"{measured['round_trip_ms']:.2f} ms there and back."
    )
    for side in second_machine.SIDES:
        start, slope = second_machine.line(found["quartiles"][side])
        print(
            f"{side}: {1e3 * start:.0f} ms a round and {1e3 * slope:.2f} ms a "
            "client; "
            + ", ".join(
                f"{cohort}: {1e3 * each[1]:.0f} ms"
                for cohort, each in found["quartiles"][side].items()
            )
        )
    bytes_ = found["model_bytes"]
    least = 2 * 8e-6 * bytes_ / measured["megabits"]
    least += 1e-3 * measured["round_trip_ms"]
    print(
        f"The model of {bytes_ / 1e6:.1f} MB there and its sum back take the "
        f"link {1e3 * least:.0f} ms."
    )
    even = second_machine.break_even(found)
    print(
        f"A second machine pays from {even:.0f} clients a round on."
        if math.isfinite(even)
        else "A second machine never pays."
    )


def main(argv: Sequence[str]) -> None:
    """Measures, draws and says it."""
    del argv
    found = second_machine.measure(_MEGABITS.value, _LATENCY.value)
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(found, file)
    _draw(found, _OUTPUT.value)
    _say(found)
    print(f"Drawn: {_OUTPUT.value}")


if __name__ == "__main__":
    app.run(main)
