"""An example for each page of the API reference, shown there and run by the tests.

Each cell begins with the name of its page, and runs after the first one.
"""

# %% before
import keras
import numpy as np

import tfdp_fl

clients, test = tfdp_fl.datasets.load_digits(num_clients=20)
model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
fixed = tfdp_fl.FixedClipping(clip_norm=0.3, noise_multiplier=1.0)

# %% make_private
assert tfdp_fl.validate(model) == []
fed = tfdp_fl.make_private(
    model,
    target_epsilon=8.0,
    target_delta=5e-3,
    num_clients=20,
    clients_per_round=10,
    rounds=2,
)

# %% model
fed = tfdp_fl.DPFederatedModel(model, fixed, clients_per_round=10)
fed.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
history = fed.fit(clients, rounds=2, batch_size=10, validation_data=test, verbose=0)
print(history.history["val_accuracy"])

# %% model_after
fed = tfdp_fl.DPFederatedModel(model, fixed, clients_per_round=10)
fed.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
fed.fit(clients, rounds=2, batch_size=10, verbose=0)
print(fed.epsilon(delta=5e-3), fed.rounds, fed.evaluate(*test, verbose=0))
means = tfdp_fl.PrivateMetrics(bounds={"accuracy": (0, 1)}, noise_multiplier=5.0)
print(fed.evaluate_clients(clients, private=means, verbose=0)["accuracy"])
print(fed.privacy_statement(delta=5e-3), fed.central_epsilon(delta=5e-3))
print(fed.predict(test[0], verbose=0).shape, fed.mechanism, fed.setup.sampling)
fed.save("digits.keras")

# %% search
def build(rate):
    fed = tfdp_fl.DPFederatedModel(keras.models.clone_model(model), fixed, 10)
    fed.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"])
    return fed


search = tfdp_fl.PrivateSearch(
    build,
    [{"rate": 0.1}, {"rate": 0.3}],
    expected_trials=2,
    target_epsilon=8.0,
    target_delta=5e-3,
    score=tfdp_fl.PublicScore(*test, "accuracy"),  # Or, by clients that are held out,
)  # tfdp_fl.PrivateScore("accuracy", noise_multiplier=5.0).
best = search.fit(clients, rounds=2, batch_size=10)

# %% mechanisms
tfdp_fl.FixedClipping(clip_norm=0.3, noise_multiplier=1.0)
tfdp_fl.AdaptiveClipping(noise_multiplier=1.0, initial_clip_norm=0.1)
tfdp_fl.MedianClipping(noise_multiplier=1.0)
tfdp_fl.LocalDP(clip_norm=1.0, epsilon=8.0, delta=1e-5)
tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=1e-5)
tfdp_fl.NbAFL(epsilon=8.0, constant=3.0, weight_clip=1.0)
tfdp_fl.NoPrivacy()
weighting = tfdp_fl.ClientWeighting.num_examples(cap=20)
tfdp_fl.DPFederatedModel(model, fixed, 10, client_weighting=weighting)

# %% correlated_noise
correlated = tfdp_fl.CorrelatedNoise(
    clip_norm=0.3,
    noise_multiplier=1.0,
    strategy=tfdp_fl.BandedToeplitz(bands=2),  # Or tfdp_fl.BLT(num_buffers=3).
    rounds=4,
    min_separation=2,
)
fed = tfdp_fl.DPFederatedModel(model, correlated, 10, sampling="cyclic")

# %% callbacks
class Print(tfdp_fl.callbacks.FederatedCallback):
    def on_round_released(self, round_index, logs):
        print(round_index, logs["accuracy"])


fed = tfdp_fl.DPFederatedModel(model, fixed, clients_per_round=10)
fed.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
listeners = [
    tfdp_fl.callbacks.PrivacyBudget(epsilon=8.0, delta=5e-3),
    tfdp_fl.callbacks.RoundCheckpoint("run"),
    tfdp_fl.callbacks.Report("report.html"),
    Print(),
]
fed.fit(clients, rounds=2, batch_size=10, callbacks=listeners, verbose=0)

# %% federated_dataset
x, y = np.random.rand(6, 64), np.zeros(6, int)
tfdp_fl.FederatedDataset.from_client_arrays({"ann": (x, y), "bob": (x, y)})
tfdp_fl.FederatedDataset.from_indices(x, y, {"ann": [0, 1], "bob": [2, 5]})
tfdp_fl.FederatedDataset.from_client_fn(["ann", "bob"], lambda name: (x, y))
x, y, ids = tfdp_fl.limit_rows_per_client(x, y, ["ann"] * 4 + ["bob"] * 2, max_rows=2)

# %% federated_dataset_use
print(clients.num_clients, clients.element_spec, clients.client_sizes().sum())
x, y = clients.client(clients.client_ids[0])
training, held_out = clients.split_by_id(0.2)
halves = clients.map(lambda x, y: (x / 2, y))
some = clients.take([0, 1]).in_memory()
print(some.client_sizes(), some.create_tf_dataset_for_client(some.client_ids[0]))

# %% datasets
labels = np.arange(400) % 10
parts = tfdp_fl.datasets.partition(labels, num_clients=20, examples_per_client=20)
listed = tfdp_fl.datasets.as_federated([(np.ones((3, 2)), np.zeros(3))])

# %% accounting
from tfdp_fl import accounting

# The noise multiplier, the sampling, N, m, the rounds, delta.
print(accounting.epsilon(1.0, "poisson", 1000, 100, 100, 1e-5))
print(accounting.calibrate_noise_multiplier(8.0, "poisson", 1000, 100, 100, 1e-5))
print(accounting.max_rounds(1.0, "poisson", 1000, 100, 8.0, 1e-5))
print(accounting.delta(1.0, "poisson", 1000, 100, 100, 8.0))

# %% gaussians
from tfdp_fl import accounting

z = accounting.analytic_noise_multiplier(epsilon=1.0, delta=1e-5)
print(z, accounting.gaussian_epsilon(z, 1e-5), accounting.gaussian_delta(z, 1.0))
print(accounting.epsilon_of_mu_squared(100 / z**2, delta=1e-5))  # 100 releases.

# %% charges
import dp_accounting
from tfdp_fl import accounting

charge = accounting.RoundCharge(
    sampling="poisson",
    num_clients=1000,
    clients_per_round=100,
    event=dp_accounting.GaussianDpEvent(1.0),
)
accountant = accounting.PrivacyAccountant()
accountant.add(charge)
print(accountant.epsilon(1e-5), accounting.select_accountant([charge]))

# %% ledger
from tfdp_fl import accounting

fed = tfdp_fl.DPFederatedModel(model, fixed, clients_per_round=10)
fed.compile(keras.optimizers.SGD(0.1), loss)
ledger = tfdp_fl.callbacks.Ledger("ledger.jsonl")
fed.fit(clients, rounds=2, batch_size=10, callbacks=[ledger], verbose=0)
print(accounting.epsilon_from_ledger("ledger.jsonl", delta=5e-3))
contents = accounting.PrivacyLedger.read("ledger.jsonl")
print(contents.head, len(contents.entries), contents.epsilon(delta=5e-3))

# %% statement
from tfdp_fl import accounting

facts = accounting.StatementFacts(
    trust_model="central", mechanism="mine", epsilon_rdp=lambda delta: 1.0
)
print(accounting.privacy_statement(facts, 1e-5))
budget = accounting.PrivacyBudget(epsilon=2.0, delta=1e-5)

# %% auditing
audit = tfdp_fl.auditing.CanaryAudit(num_canaries=20)
balanced = tfdp_fl.losses.BalancedSoftmaxCrossentropy()
fed = tfdp_fl.DPFederatedModel(model, fixed, clients_per_round=10)
fed.compile(keras.optimizers.SGD(0.1), balanced)
fed.fit(clients, rounds=2, batch_size=10, audit=audit, verbose=0)
print(audit.estimate(delta=5e-3))
gradients = tfdp_fl.features.OrientedGradients()  # A layer for images.

# %% sampling
for name in ("poisson", "fixed_size", "shuffled", "cyclic"):
    sampler = tfdp_fl.sampling.make_sampler(name, 1000, 100)
    cohort = sampler.draw()  # Train cohort.positions, charge, and then:
    sampler.release(cohort)
    print(type(sampler).__name__, len(cohort.positions), cohort.participation.relation)

# %% runtimes
import ray

ray.init(num_cpus=2, include_dashboard=False)
workers = tfdp_fl.runtimes.RayWorkers(num_workers=2)
fed = tfdp_fl.DPFederatedModel(model, fixed, clients_per_round=10)
fed.compile(keras.optimizers.SGD(0.1), loss)
fed.fit(clients, rounds=1, batch_size=10, runtime=workers, verbose=0)
ray.shutdown()

# %% secure_aggregation
from tfdp_fl import secure_aggregation

protocol = secure_aggregation.AdditiveSecretSharing()
updates = [np.full(3, 0.1 * k) for k in range(9)]
total = secure_aggregation.sum_in_groups(updates, protocol, group_size=3)
print(total.total)
fed = tfdp_fl.DPFederatedModel(model, fixed, 10, secure_aggregation=protocol)

# %% secure_aggregation_protocol
from tfdp_fl import secure_aggregation

protocol = secure_aggregation.AdditiveSecretSharing()
names = ("ann", "bob", "cat")
members = {
    name: secure_aggregation.Member(
        protocol, name, np.ones(3), members=names, session="round 1"
    )
    for name in names
}
sent = [message for one in members.values() for message in one.begin(now=0.0)]
for message in sent:  # Each answers with further messages.
    sent += members[message.recipient].receive(message, now=0.0)
print(members["ann"].outcome.value)

# %% writing_mechanisms_parts
import tensorflow as tf
from tfdp_fl import algorithm, mechanisms

context = mechanisms.PrivacyContext(clients_per_round=10)
query = fixed.bind(context)
state = query.begin_round(query.initial_global_state(), 1.0, 10)
one = algorithm.make_contribution(query, query.derive_sample_params(state), [tf.ones(3)])
print(one.update, one.norm)

# %% aggregators (tff)
import tensorflow_federated as tff

factory = tfdp_fl.aggregators.from_mechanism(fixed, clients_per_round=10)
process = factory.create(tff.TensorType(np.float32, [3]))
output = process.next(process.initialize(), [np.ones(3, np.float32)] * 10)
print(output.result)

# %% learning (tff)
import tensorflow as tf
import tensorflow_federated as tff

spec = (tf.TensorSpec([None, 64], tf.float32), tf.TensorSpec([None], tf.int32))
process = tfdp_fl.learning.build_dp_fed_avg(
    tff.learning.models.functional_model_from_keras(
        lambda: keras.Sequential([keras.layers.Dense(10, input_shape=(64,))]), loss, spec
    ),
    fixed,
    clients_per_round=10,
    client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
)
