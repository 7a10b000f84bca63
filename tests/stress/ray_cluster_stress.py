"""A Ray cluster of two nodes: the same model, also when a node is lost.

Two nodes are two raylets on this machine, each with CPUs of its own: what
`ray start --head` and `ray start --address=...` start on two machines. The
network between machines is not tried here.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import unittest
from unittest import mock

import numpy as np
from absl.testing import absltest

from tests.runtimes import cohorts
from tfdp_fl import runtimes

_CPUS = 2


@unittest.skipUnless(importlib.util.find_spec("ray"), "ray is not installed")
class ClusterTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        from ray import cluster_utils

        root = pathlib.Path(__file__).resolve().parents[2]
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        self.enter_context(mock.patch.dict(os.environ, PYTHONPATH=path))
        self.cluster = cluster_utils.Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": _CPUS, "include_dashboard": False},
        )
        self.addCleanup(self.cluster.shutdown)
        self.second = self.cluster.add_node(num_cpus=_CPUS)
        self.cluster.wait_for_nodes()
        self.case = cohorts._CASES["adaptive"]

    def _workers(self, **arguments):
        import ray

        self.addCleanup(ray.shutdown)
        # One worker fills a node, so that both nodes have one.
        return self.enter_context(
            runtimes.RayWorkers(
                self.cluster.address,
                num_workers=2,
                resources={"num_cpus": _CPUS},
                **arguments,
            )
        )

    def _node_of(self, pid: int):
        """Returns the node whose raylet started a worker."""
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        parent = int(fields[2].split()[1])
        return next(
            node
            for node in self.cluster.list_all_nodes()
            if node.all_processes["raylet"][0].process.pid == parent
        )

    def _assert_same_model(self, federated):
        here = cohorts._federated(self.case)
        cohorts._fit(here, self.case, self.case.clients())
        for a, b in zip(here.get_weights(), federated.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        self.assertEqual(here.epsilon(1e-3), federated.epsilon(1e-3))

    def test_workers_on_both_nodes_train_the_same_model(self):
        workers = self._workers().open()
        self.assertLen({self._node_of(pid).node_id for pid in workers.pids}, 2)
        federated = cohorts._federated(self.case)
        cohorts._fit(federated, self.case, self.case.clients(), runtime=workers)
        self._assert_same_model(federated)

    def test_a_lost_node_is_made_up_for(self):
        workers = self._workers().open()
        nodes = [self._node_of(pid) for pid in workers.pids]
        struck, victim = next(
            (place, node)
            for place, node in enumerate(nodes)
            if node is not self.cluster.head_node
        )
        federated = cohorts._federated(self.case)
        original, lost = workers._cluster.actor, []

        def actor(place):
            if not lost and place == struck:
                # As its shards are sent; then one node is there that has room
                # for no second worker, until a new one joins.
                lost.append(victim)
                self.cluster.remove_node(victim, allow_graceful=False)
                self.cluster.add_node(num_cpus=_CPUS)
            return original(place)

        with mock.patch.object(workers._cluster, "actor", actor):
            cohorts._fit(federated, self.case, self.case.clients(), runtime=workers)
        self.assertLen(lost, 1)
        self._assert_same_model(federated)


if __name__ == "__main__":
    absltest.main()
