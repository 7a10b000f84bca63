"""Noise off, the engine is TFF's unweighted federated averaging."""

from __future__ import annotations

import gc

import numpy as np
import tensorflow as tf

from tests.engine import cohorts
from tfdp_fl import datasets

_BATCH, _CLIENTS, _ROUNDS, _RATE = 5, 3, 5, 0.1


def _cnn():
    return tf.keras.Sequential(
        [
            tf.keras.layers.Reshape([8, 8, 1], input_shape=(64,)),
            tf.keras.layers.Conv2D(8, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )


class TFFEqualityTest(tf.test.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        import tensorflow_federated as tff

        cls.tff = tff
        cls.outer = tff.framework.get_context_stack().current
        tff.backends.native.set_sync_local_cpp_execution_context()

    @classmethod
    def tearDownClass(cls):
        # The context's worker process ends with the context.
        cls.tff.framework.set_default_context(cls.outer)
        gc.collect()
        super().tearDownClass()

    def test_weights_after_five_rounds_on_digits(self):
        # 24 examples a client: the last of five batches is short.
        dataset, _ = datasets.load_digits(
            num_clients=6, examples_per_client=24, iid=False
        )
        cohorts_of_round = [
            np.sort(np.random.default_rng(t).permutation(6)[:_CLIENTS])
            for t in range(_ROUNDS)
        ]
        tf.keras.utils.set_random_seed(4)
        model = _cnn()
        start = model.get_weights()
        theirs = self._tff_weights(start, dataset, cohorts_of_round)
        engine = cohorts.make_engine(model, dataset, num_replicas=2)
        for t, positions in enumerate(cohorts_of_round):
            cohorts.run_round(
                engine,
                dataset,
                round_index=t,
                positions=positions,
                clients_per_round=float(_CLIENTS),
                batch_size=_BATCH,
                local_epochs=1,
                learning_rate=_RATE,
            )
        for first, ours, wanted in zip(start, model.get_weights(), theirs, strict=True):
            scale = np.linalg.norm(wanted)
            self.assertLess(np.linalg.norm(ours - wanted), 1e-4 * scale)
            # And it is not the start that both still are at.
            self.assertGreater(np.linalg.norm(ours - first), 0.01)

    def _tff_weights(self, start, dataset, cohorts_of_round):
        tff = self.tff
        x_spec, y_spec = dataset.element_spec
        spec = (
            tf.TensorSpec([None, *x_spec.shape], x_spec.dtype),
            tf.TensorSpec([None, *y_spec.shape], y_spec.dtype),
        )

        def model_fn():
            return tff.learning.models.from_keras_model(
                _cnn(), loss=cohorts.cross_entropy(), input_spec=spec
            )

        process = tff.learning.algorithms.build_unweighted_fed_avg(
            model_fn,
            client_optimizer_fn=tff.learning.optimizers.build_sgdm(_RATE),
            server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0),
        )
        state = process.initialize()
        state = process.set_model_weights(
            state,
            tff.learning.models.ModelWeights(trainable=start, non_trainable=[]),
        )
        ids = list(dataset.client_ids)
        for positions in cohorts_of_round:
            clients = []
            for position in positions:
                x, y = dataset.client(ids[position])
                clients.append(
                    tf.data.Dataset.from_tensor_slices(
                        (np.asarray(x), np.asarray(y))
                    ).batch(_BATCH)
                )
            state = process.next(state, clients).state
        return list(process.get_model_weights(state).trainable)
