"""pfl-research: its federated averaging, simulated by PyTorch.

The setting is how many processes train (pfl's own way to use several cores:
`torchrun`), a thread each; or one process with a thread for each core.
"""

from __future__ import annotations

import itertools
import os
import time

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

from research.rivals import work as work_lib


class _Network(torch.nn.Sequential):
    """As `workloads.mlp`."""

    def __init__(self, units):
        layers = []
        for inputs, outputs in itertools.pairwise(units):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
        super().__init__(*layers[:-1])

    def loss(self, inputs, targets, is_eval=False):
        return torch.nn.functional.cross_entropy(self(inputs), targets)

    def metrics(self, inputs, targets):
        return {}


class _Ends(TrainingProcessCallback):
    def __init__(self):
        self.times = []

    def after_central_iteration(self, aggregate_metrics, model, **unused):
        self.times.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    """Runs the rounds."""
    work = work_lib.asked()
    in_one = "RANK" not in os.environ
    torch.set_num_threads(os.cpu_count() if in_one else 1)
    torch.manual_seed(0)
    np.random.seed(0)
    x, y = work.data()
    users = [
        Dataset(raw_data=[torch.from_numpy(x[k]), torch.from_numpy(y[k])])
        for k in range(work.clients)
    ]
    users_of = FederatedDataset(
        lambda user: users[user],
        get_user_sampler("minimize_reuse", range(work.clients)),
    )
    network = _Network(work.units)
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    mechanism = GaussianMechanism(work.clip_norm, work.noise_multiplier)
    ends = _Ends()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=work_lib.WARM_UP + work.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=work.clients,
            val_cohort_size=0,
        ),
        SimulatedBackend(
            users_of,
            users_of,
            postprocessors=[CentrallyAppliedPrivacyMechanism(mechanism)],
        ),
        model,
        NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=work.learning_rate,
            local_batch_size=work.batch_size,
        ),
        NNEvalHyperParams(local_batch_size=work.examples),
        callbacks=[ends],
    )
    if os.environ.get("RANK", "0") == "0":
        work_lib.answer(ends.times)


if __name__ == "__main__":
    main()
