"""One organisation in a federation: its table of people, its model, its ledger.

An outside party (a server or another organisation) sends weights. The silo runs private
rounds on its own people from these weights, charges each round before releasing it, and
answers with the resulting weights. Everything that it sends is a private release.
Whatever weights the others send, the silo's answers are an adaptive composition, for
which the ledger's epsilon holds (Dwork & Roth 2014, section 3.5.2; what others do with
them, and send next, is post-processing). People of other silos have separate guarantees
(parallel composition). For a person in several silos, the costs add up.

That needs a plan that is fixed in advance. A server that decides by the answers when to
stop has (epsilon, delta) by the target: what it gets is a part of the longest training
that the target allows. If it also decides by them when to ask for an evaluation, each
number n of evaluations has its own longest training, so the answers with exactly n of
them are (epsilon, delta) by the target, and those with at most n are
(epsilon, (n + 1) delta).
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdp_fl import _files, _validate, accounting, keras_versions
from tfdp_fl.accounting import format_up, statement
from tfdp_fl.datasets import adapters, nests, tables
from tfdp_fl.engine import trainer
from tfdp_fl.keras import DPFederatedModel, PrivateMetrics, checkpoint, example_spec
from tfdp_fl.keras.callbacks import FederatedCallback, Report, RoundCheckpoint
from tfdp_fl.silo.directory import Message, SiloDirectory, change_error
from tfdp_fl.terms import Json, TrustModel

# Trained weights are never larger; training from larger ones yields only NaN.
_LARGEST_WEIGHT = 1e5
# The caveats of every silo's run, for its statement and its `Report`.
_CAVEATS = {"silo_outsiders", "silo_several", "silo_staff"}


class SiloUpdate(NamedTuple):
    """A silo's answer to weights; all of it may be published.

    Attributes:
      weights: The new weights, in the form of `get_weights`.
      rounds: The number of private rounds run from the received weights.
      epsilon: The cost of all releases so far, at the target's delta. (If the server
        stops because of what it was sent, the target holds instead.)
      spent: Whether the target allowed fewer rounds than planned; if it allowed none,
        `weights` are the received ones.
    """

    weights: list[np.ndarray]
    rounds: int
    epsilon: float
    spent: bool


class Silo:
    """Trains on its own people for a federation, privately for each of them.

    Each person in the table, with all of their rows, is protected against everyone
    outside, including the server and the other silos. A new process continues from the
    silo's directory, which has the clip, sampler, server optimizer, correlated noise
    and spending.
    """

    def __init__(
        self,
        build: Callable[[], DPFederatedModel],
        x: nests.Nest,
        y: nests.Nest,
        *,
        client_ids: tables.Ids,
        directory: str | os.PathLike[str],
        rounds: int = 1,
        batch_size: int = 32,
        local_epochs: int = 1,
        moved: bool = False,
    ):
        """Declares the model, the people, and the directory.

        Args:
          build: Returns a new, compiled model from `make_private`, the same in each
            process. Its `target_epsilon` is the most that this silo will ever spend in
            this directory, and its `num_clients` is the declared number of people.
          x: Features of all rows, [n, ...], as in `fit(x, y, client_ids=...)`.
          y: Labels of all rows, [n, ...].
          client_ids: The person of each row, [n].
          directory: A directory for this silo alone, created if necessary. It contains
            the ledger, the state and the answers, which only its owner can read (mode
            0600). It keeps the newest gibibyte of the answers' weights, and always the
            last answer's.
          rounds: The number of private rounds for each message.
          batch_size: Examples in one local batch.
          local_epochs: Passes over a person's rows in one round.
          moved: Confirms that the directory was moved here on purpose, is complete and
            up to date, and is not in use anywhere else.

        Raises:
          TypeError, ValueError: An argument is not allowed.
        """
        if not callable(build):
            raise TypeError(f"build must be callable, got {build!r}.")
        self._build = build
        # A new model, not yet restored from the directory.
        self._fresh_model: DPFederatedModel | None = self._build_model()
        target = self._fresh_model.setup.target
        assert target is not None
        self.target = target
        # Padded to the declared size, so that no answer reveals the number of people.
        table = adapters.group_by_person(
            x, y, client_ids, num_people=target.num_clients
        )
        # Independent of the order in which the table is given.
        names = [repr(name) for name in table.client_ids]
        self._table = table.take(np.argsort(names, kind="stable"))
        self._arguments: Json = {
            "rounds": _validate.positive_integer(rounds=rounds),
            "batch_size": _validate.number_of_rows(batch_size=batch_size),
            "local_epochs": _validate.positive_integer(local_epochs=local_epochs),
            "verbose": 0,
        }
        self._directory = SiloDirectory(directory, moved)
        # A model in the directory's state, unless another process has changed that.
        self._fed: DPFederatedModel | None = None
        # Problems with the table are reported here, only to its owner.
        self._fresh_model.fit(
            self._table, callbacks=[_TrainNothing()], **self._arguments
        )

    @property
    def num_people(self) -> int:
        """The declared number of people, which is public (their row counts are not)."""
        return self.target.num_clients

    def get_weights(self) -> list[np.ndarray]:
        """Returns the initial weights from `build`, which do not depend on any person.

        A server can start with those of any silo.
        """
        return (self._fresh_model or self._build_model()).get_weights()

    def train(
        self, weights: Sequence[npt.ArrayLike], message_id: str | int | None = None
    ) -> SiloUpdate:
        """Runs private rounds from received weights; charges, then answers.

        Args:
          weights: Weights in the form of `get_weights`.
          message_id: If the same message is sent again with the same id, it gets the
            same answer at no cost. If the answer's weights are no longer kept (see
            `directory`), it is refused, also at no cost. None: each call is a new
            message.

        Returns:
          The answer. Once the target is spent, it has the received weights, and `spent`
          is True.

        Raises:
          ValueError: The weights have other shapes, are not finite, or are too large.
            Nothing was charged.
          SiloError: See its subclasses: in use, moved, changed, or an id that was used
            before with other weights or too long ago. Nothing was charged.
          LedgerWriteError, CheckpointWriteError: The disk is full or read-only. All
            charges are in the ledger, and the same message may be sent again.
        """
        received = self._check_weights(weights)
        message = Message.of("train", message_id, received)
        with self._directory.exclusive():
            answer = self._directory.answer(message)
            if answer is None:
                answer = self._train(message, received)
                self._directory.keep(message, answer)
            # Without a round, no weights are stored, as they are the received ones.
            return SiloUpdate(**{**answer, "weights": answer["weights"] or received})

    def evaluate(
        self,
        weights: Sequence[npt.ArrayLike],
        *,
        private: PrivateMetrics,
        message_id: str | int | None = None,
    ) -> Json:
        """Returns noisy metrics of weights on this silo's people, charged beforehand.

        Args:
          weights: As in `train`.
          private: The metrics to release, with their bounds and noise. Decide the
            noise before the first answer; later evaluations must have the same. Exact
            metrics are not available, as they would reveal information about people.
          message_id: As in `train`.

        Returns:
          As `DPFederatedModel.evaluate_clients`.

        Raises:
          ValueError: As in `train`; or the target no longer allows such a release; or
            an earlier evaluation had another noise multiplier.
        """
        _validate.instance_of(PrivateMetrics, private=private)
        received = self._check_weights(weights)
        request = f"{private.noise_multiplier!r} {sorted(private.bounds.items())!r}"
        message = Message.of("evaluate", message_id, received, request)
        with self._directory.exclusive():
            answer = self._directory.answer(message)
            if answer is None:
                fed, _ = self._open()
                _require_same_noise(fed, private)
                self._set_weights(fed, received)
                self._directory.begin(message, fed.rounds, _count_charges(fed))
                answer = fed.evaluate_clients(self._table, verbose=0, private=private)
                self._directory.keep(message, answer)
                self._fed = fed
            return answer

    def epsilon(self, delta: float) -> float:
        """Returns the largest epsilon of any person of this silo, from the ledger."""
        _validate.inside_unit_interval(delta=delta)
        path = self._directory.ledger_path()
        if path is None:
            return 0.0
        return accounting.epsilon_from_ledger(path, delta, self.target.accountant)

    def privacy_statement(
        self, delta: float | None = None, format: str = "text"
    ) -> str | Json:
        """Returns what this silo's people are promised, and against whom.

        Args:
          delta: The delta at which epsilon is stated; None: the target's.
          format: "text" or "dict", as `DPFederatedModel.privacy_statement`, with the
            silo's own paragraph as "silo".
        """
        with self._directory.exclusive():
            fed, _ = self._open()
            self._fed = fed
            text = fed.privacy_statement(delta, format)
            preface = self._preface(fed, delta)
            if isinstance(text, dict):
                return {**text, "silo": preface}
            return f"{statement.wrap(preface)}\n\n{text}"

    def report(self, path: str | os.PathLike[str], delta: float | None = None) -> None:
        """Writes the statement and the settings as an HTML page without charts."""
        with self._directory.exclusive():
            page = Report(path, delta, title=self._directory.path.resolve().name)
            page.federated_model, _ = self._open()
            self._fed = page.federated_model
            page.preface = self._preface(page.federated_model, delta)
            page.on_train_begin()
            page.on_train_end()
            page.on_fit_end()

    def _preface(self, fed: DPFederatedModel, delta: float | None) -> str:
        """Returns a statement's first paragraph, at a delta; None: the target's."""
        facts: Any = fed.privacy_statement(delta, "dict")
        spent, delta = facts["epsilon"], facts["delta"]
        lost = self._directory.lost(_count_charges(fed))
        text = (
            f"One silo of a federation, with {self.num_people} people (a number that "
            "is declared and public). What is protected is one person of this silo, "
            "with all of their rows in its table. Below, a client is such a person, "
            "and the server that draws clients and adds noise is this silo itself. "
            "Protected against: everybody outside this silo, namely the federation's "
            "server, the other silos, and anyone who gets a model from them. They may "
            "send any weights, send them again, or collude: the promise for all "
            f"that this silo has sent so far is {_guarantee(spent, delta)}. "
            "If they stop because of what it sent, the promise is its target, "
            f"{_guarantee(self.target.epsilon, self.target.delta)}, which it never "
            f"exceeds. {self._promise_for_chosen_evaluations(fed)}"
            "Anyone who is also in another silo that has spent as much has "
            f"{_guarantee(2 * spent, 2 * delta)}. Not covered: whether this silo "
            "answers at all. It does not if its table is invalid or has other people "
            "than before."
        )
        if lost:
            text += (
                f" Releases charged for interrupted messages: {lost}. Their answers "
                "were never delivered, but epsilon counts them."
            )
        return text

    def _promise_for_chosen_evaluations(self, fed: DPFederatedModel) -> str:
        """Returns a sentence about a server that asks for them by what it was sent."""
        assert fed.account is not None
        if not (num_evaluations := fed.account.evaluations):
            return ""
        delta = (1 + num_evaluations) * self.target.delta
        return (
            "If that also decided when they asked for an evaluation "
            f"({num_evaluations} so far), delta counts once more for each: "
            f"{_guarantee(self.target.epsilon, delta)}. "
        )

    def _train(self, message: Message, received: list[np.ndarray]) -> Json:
        fed, first = self._open(message)
        if first is None:
            first = fed.rounds
            self._directory.give_up(_count_charges(fed))
            self._set_weights(fed, received)
            record_message = _RecordMessage(self._directory, message)
            fed.fit(
                self._table,
                callbacks=[self._make_checkpoint(), record_message],
                **self._arguments,
            )
        num_rounds = fed.rounds - first
        self._fed = fed
        return {
            "weights": fed.get_weights() if num_rounds else None,
            "rounds": num_rounds,
            "epsilon": fed.epsilon(self.target.delta),
            "spent": num_rounds < self._arguments["rounds"],
        }

    def _open(
        self, message: Message | None = None
    ) -> tuple[DPFederatedModel, int | None]:
        """Returns the model in the directory's state, and removes it from `self`.

        If anything fails before it is put back, the next call reads it from disk.

        Args:
          message: If this message was interrupted, its remaining rounds are run.

        Returns:
          The model; and the first round of the interrupted message, or None.
        """
        fed, self._fed = self._fed, None
        files, callbacks = self._directory, [self._make_checkpoint()]
        first = files.interrupted_round(message)
        if fed is not None and first is None and files.is_ours:
            return fed, None
        fed, self._fresh_model = self._fresh_model or self._build_model(), None
        files.check_settings(_settings(fed))
        if first is None:
            callbacks.append(_TrainNothing())
        else:
            files.expect_charges()
        if checkpoint.CheckpointDirectory(files.path).rounds():
            try:
                fed.fit(
                    self._table,
                    callbacks=callbacks,
                    resume_from=files.path,
                    **self._arguments,
                )
            except ValueError as error:
                raise change_error(files.path, str(error)) from error
        else:
            fed.fit(self._table, callbacks=callbacks, **self._arguments)
        assert fed.run is not None
        fed.run.caveats |= _CAVEATS
        lost = files.lost(_count_charges(fed)) - files.state["lost"]
        if lost and first is None:
            warnings.warn(
                f"Message {files.state['message']['name']} was interrupted. Releases "
                f"charged for it: {lost}. No answer was delivered, but epsilon counts "
                "them.",
                RuntimeWarning,
                stacklevel=4,
            )
        files.is_ours = True
        return fed, first

    def _make_checkpoint(self) -> RoundCheckpoint:
        return RoundCheckpoint(self._directory.path)

    def _build_model(self) -> DPFederatedModel:
        fed = self._build()
        if not isinstance(fed, DPFederatedModel):
            raise TypeError(
                "build must return a compiled DPFederatedModel, got a "
                f"{type(fed).__name__}."
            )
        fed.require_compiled("build returns the model")
        if fed.setup.target is None or fed.mechanism.trust_model != TrustModel.CENTRAL:
            raise ValueError(
                "build must return a model from make_private whose mechanism has a "
                "central guarantee, so that the silo enforces a target for its people, "
                f"got {fed.mechanism.name} with the target {fed.setup.target}."
            )
        if not fed.mechanism.all_releases_are_noisy:
            raise ValueError(
                "build must return a model whose mechanism adds noise to all that it "
                "releases: an exact median would tell the server of single people, so "
                "give MedianClipping a median_noise_multiplier, and do not override "
                "its clip_to_cohort."
            )
        if fed.setup.abandons_on_failure:
            raise ValueError(
                'build must return a model with on_client_failure="exclude" and noise '
                "that the silo adds itself: an abandoned round would tell the server "
                "that training on some person's data failed."
            )
        if fed.run is not None:
            raise ValueError("build must return a new model each time, got a used one.")
        return fed

    def _check_weights(self, weights: Sequence[npt.ArrayLike]) -> list[np.ndarray]:
        """Returns weights in the model's dtypes; raises ValueError for invalid ones."""
        fed = self._fed or self._fresh_model or self._build_model()
        variables = keras_versions.tf_variables(fed.model.weights)
        trainable = {id(v) for v in keras_versions.tf_variables(fed.trainable_weights)}
        arrays = [np.asarray(weight) for weight in weights]
        shapes = [tuple(v.shape) for v in variables]
        if [a.shape for a in arrays] != shapes or any(
            a.dtype.kind in "OSUmMc" for a in arrays
        ):
            raise ValueError(
                f"weights must be numbers with the shapes of get_weights(), {shapes}, "
                f"got {[f'{a.dtype}{list(a.shape)}' for a in arrays]}."
            )
        with np.errstate(over="ignore", invalid="ignore"):
            arrays = [
                a.astype(v.dtype.as_numpy_dtype)
                for a, v in zip(arrays, variables, strict=True)
            ]
        for index, (array, variable) in enumerate(zip(arrays, variables, strict=True)):
            values = array.astype(np.float64)
            largest = np.abs(values).max(initial=0.0)
            if not np.isfinite(largest):
                raise ValueError(
                    f"weights must be finite, got NaN or infinity in weights[{index}]."
                )
            if id(variable) in trainable and largest > _LARGEST_WEIGHT:
                raise ValueError(
                    f"weights must be at most {_LARGEST_WEIGHT:g} in magnitude, got "
                    f"{largest:g} in weights[{index}]: training from it would fail."
                )
        return arrays

    def _set_weights(self, fed: DPFederatedModel, received: list[np.ndarray]) -> None:
        """Sets weights; raises ValueError if the model's output is then not finite.

        The model is called on zeros and ones, never on people's data.
        """
        fed.set_weights(received)
        training = fed.require_compiled("train")
        spec = example_spec.conform(fed.model, training, self._table).element_spec[0]
        zeros = trainer.zeros_like_batch(spec)
        ones = tf.nest.map_structure(
            lambda leaf: tf.ones_like(leaf) if leaf.dtype.is_floating else leaf, zeros
        )
        for features in zeros, ones:
            for output in tf.nest.flatten(fed.model(features, training=False)):
                if not np.isfinite(np.asarray(output)).all():
                    raise ValueError(
                        "weights must make a model whose output is finite, got NaN or "
                        "infinity for features of zeros or ones. Nothing was charged."
                    )


class _TrainNothing(FederatedCallback):
    """Makes a `fit` restore or prepare the state without training."""

    def allow_round(self, round_index: int) -> bool:
        del round_index
        return False


class _RecordMessage(FederatedCallback):
    """Records a message once a checkpoint has its weights, before any charge."""

    def __init__(self, files: SiloDirectory, message: Message):
        super().__init__()
        self._directory, self._message = files, message

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        del last_round
        fed = self.federated_model
        self._directory.begin(self._message, first_round, _count_charges(fed))


def _guarantee(epsilon: float, delta: float) -> str:
    return f"epsilon = {format_up(epsilon)} at delta = {format_up(delta, 6)}"


def _require_same_noise(fed: DPFederatedModel, private: PrivateMetrics) -> None:
    """Raises ValueError if an earlier evaluation had another noise multiplier.

    What was sent earlier could decide it. The statement's delta counts how many
    evaluations there were, and not of which kinds (`_promise_for_chosen_evaluations`).
    """
    assert fed.account is not None
    earlier = {cost.noise_multiplier for cost in fed.account.evaluation_costs}
    if earlier - {private.noise_multiplier}:
        raise ValueError(
            "private must have the noise_multiplier of this silo's earlier "
            f"evaluations, {earlier.pop():g}, got {private.noise_multiplier:g}."
        )


def _count_charges(fed: DPFederatedModel) -> int:
    """Returns the number of charged releases: rounds and evaluations."""
    assert fed.account is not None
    return fed.account.rounds + fed.account.evaluations


def _settings(fed: DPFederatedModel) -> Json:
    """Returns the settings of a built model that must not change.

    Checkpoints compare further settings.
    """
    training = fed.require_compiled("train")

    def describe(value: object) -> list[object] | str:
        if hasattr(value, "get_config"):
            return [type(value).__name__, _files.to_plain(value.get_config(), repr)]
        return getattr(value, "__name__", type(value).__name__)

    settings = {
        "the model": _architecture(fed.model),
        "its loss": training.loss,
        "its learning rate": training.learning_rate,
        "the target": vars(fed.setup.target),
        "its weights' shapes": [w.shape for w in fed.model.weights],
    }
    return _files.to_plain(settings, describe)


def _architecture(model: tf.keras.Model) -> str:
    """Returns a digest of a model's layers that ignores the names from Keras.

    (Keras calls the second model in a process `sequential_1`, not `sequential`.)
    """
    try:
        config = json.loads(model.to_json())
    except (NotImplementedError, TypeError, ValueError):
        return type(model).__qualname__  # A subclassed model without a config.
    config.pop("compile_config", None)
    text = _files.to_canonical_json(config)
    for index, layer in enumerate(keras_versions.layers_of(model, include_self=True)):
        text = text.replace(json.dumps(layer.name), f'"layer {index}"')
    return hashlib.sha256(text.encode()).hexdigest()
