"""What one training run is: every choice, its meaning and its default.

`scripts/train.py` makes a flag of each field, and a sweep's configuration
file sets the same names; nothing is declared twice. The parameters of mechanisms
are made from their declarations. The file is long because its subject is one: the
list of choices, and which of them go together.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from absl import flags

from tfdp_fl import _validate, mechanisms
from tfdp_fl.accounting.charge import SAMPLINGS
from tfdp_fl.mechanisms import parameters

DATASETS = ("digits", "mnist", "shakespeare")
FEATURES = ("oriented_gradients",)
MODELS = ("linear", "mlp", "cnn", "lstm")
MECHANISMS: dict[str, type[mechanisms.Mechanism]] = {
    name: mechanisms.by_name(name) for name in mechanisms.names()
}
CENTRAL = tuple(
    name for name, kind in MECHANISMS.items() if kind.guarantee == "central"
)

# Where a choice is left open, what each data set is trained with; then what
# its mechanism suggests.
_BY_DATASET: dict[str, dict[str, Any]] = {
    "digits": {
        "num_clients": 500,
        "examples_per_client": 20,
        "shards_per_client": 2,
        "iid": True,
        "model": "mlp",
        "hidden_units": "128",
        "clients_per_round": 100,
        "rounds": 60,
        "batch_size": 10,
        "client_learning_rate": 0.2,
        "validation_freq": 1,
    },
    "mnist": {
        "num_clients": 1000,
        "examples_per_client": 600,
        "shards_per_client": 2,
        "iid": False,
        "model": "mlp",
        "hidden_units": "600,100",
        "clients_per_round": 100,
        "rounds": 60,
        "batch_size": 60,
        "client_learning_rate": 0.1,
        "validation_freq": 5,
    },
    "shakespeare": {
        "sequence_length": 80,
        "model": "lstm",
        "hidden_units": "128,128",
        "clients_per_round": 50,
        "rounds": 100,
        "batch_size": 10,
        "client_learning_rate": 1.0,
        "validation_freq": 10,
    },
}

_ALWAYS: dict[str, Any] = {"sampling": "poisson", "local_epochs": 1}

# What was tuned with a mechanism and the data set's usual model, on 5000
# training images that were held out, at epsilon = 8: python scripts/train.py
# --dataset=mnist --validation_examples=5000.
_TUNED: dict[tuple[str, str], dict[str, Any]] = {
    ("mnist", "adaptive"): {"rounds": 100, "initial_clip_norm": 0.4},
}
_TUNED_SERVER: dict[tuple[str, str], dict[str, Any]] = {
    ("mnist", "adaptive"): {
        "server_optimizer": "sgd",
        "server_learning_rate": 0.5,
        "server_momentum": 0.9,
        "server_schedule": "linear",
    },
}


# Settings that only go with some values of another one.
_IMAGES = ("digits", "mnist")
_ONLY_WITH: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("num_clients", "dataset", _IMAGES),
    ("iid", "dataset", _IMAGES),
    ("shards_per_client", "dataset", _IMAGES),
    ("input_shifts", "dataset", _IMAGES),
    ("examples_per_client", "dataset", _IMAGES),
    ("validation_examples", "dataset", _IMAGES),
    ("sequence_length", "dataset", ("shakespeare",)),
    ("clients_per_role", "dataset", ("shakespeare",)),
    ("data_path", "dataset", ("mnist", "shakespeare")),
    ("prior_smoothing", "client_loss", ("balanced",)),
    ("server_momentum", "server_optimizer", ("sgd",)),
    ("server_learning_rate", "server_optimizer", ("sgd", "adam")),
    ("server_schedule", "server_optimizer", ("sgd", "adam")),
    ("server_ema", "server_optimizer", ("sgd", "adam")),
)
# The same, once the model is chosen.
_ONLY_WITH_MODEL = (
    ("input_pooling", "model", ("linear", "mlp")),
    ("input_features", "model", ("linear", "mlp")),
)


def _option(default: Any, kind: Any, help_: str) -> Any:
    """Returns a field; `kind` is a type, or a tuple of the words allowed."""
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help_})


def parameters_of(mechanism: str) -> tuple[str, ...]:
    """Returns the settings that are parameters of a mechanism."""
    return tuple(field.name for field in _fields(mechanism))


def _fields(mechanism: str) -> list[dataclasses.Field[Any]]:
    return [
        field
        for field in dataclasses.fields(MECHANISMS[mechanism])
        # These come from --target_epsilon and --target_delta.
        if field.name not in ("epsilon", "delta")
    ]


def _declared_parameters() -> Any:
    """Returns a dataclass with every parameter of every mechanism, all None."""
    users: dict[str, list[tuple[str, dataclasses.Field[Any]]]] = {}
    for name in MECHANISMS:
        for field in _fields(name):
            users.setdefault(field.name, []).append((name, field))
    made = [
        (name, Any, _option(None, _kind(used[0][1]), _help(used)))
        for name, used in users.items()
    ]
    return dataclasses.make_dataclass(
        "_MechanismParameters", made, frozen=True, kw_only=True
    )


def _kind(field: dataclasses.Field[Any]) -> Any:
    check = field.metadata.get("check")
    if isinstance(check, parameters.OneOf):
        return tuple(check.words)
    if field.metadata.get("none_word") is not None:
        return str
    # A type, or its text where annotations are kept as text.
    declared = getattr(field.type, "__name__", str(field.type))
    return {"int": int, "float": float, "bool": bool}.get(declared.split(" ")[0], str)


def _help(used: list[tuple[str, dataclasses.Field[Any]]]) -> str:
    """Returns what a parameter is, to whom, and what it is if not given."""
    by_text: dict[str, list[str]] = {}
    for name, field in used:
        text = field.metadata.get("help", "").rstrip(".")
        value = field.metadata.get("start")
        if value is None and field.default is not dataclasses.MISSING:
            value = field.default
        if value is not None:
            text += f" ({value})"
        by_text.setdefault(text, []).append(name)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in by_text.items())


def _starts(mechanism: str) -> dict[str, Any]:
    """Returns the parameters that `train.py` starts from."""
    starts = {field.name: field.metadata.get("start") for field in _fields(mechanism)}
    return {name: value for name, value in starts.items() if value is not None}


_MechanismParameters: Any = _declared_parameters()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(_MechanismParameters):
    """Everything that decides a training run.

    None leaves a choice to the data set or the mechanism; `resolved` fills it
    in (always where the type is Any). What each field means is said in its
    help, which `python scripts/train.py --helpfull` prints.
    """

    # The data.
    dataset: str = _option(
        "digits",
        DATASETS,
        "digits (scikit-learn's, nothing to download), mnist, or shakespeare (a "
        "client per role).",
    )
    data_path: str | None = _option(
        None,
        str,
        "The data's file: Keras's mnist.npz (otherwise downloaded by Keras), or "
        "the Shakespeare text.",
    )
    num_clients: int | None = _option(
        None,
        int,
        "digits, mnist: N, how many clients there are (500, 1000).",
    )
    iid: bool | None = _option(
        None,
        bool,
        "digits, mnist: whether clients hold random examples (digits) or "
        "label shards (mnist).",
    )
    shards_per_client: int | None = _option(
        None, int, "digits, mnist: label shards per client, if not --iid (2)."
    )
    examples_per_client: int | None = _option(
        None, int, "digits, mnist: how many each client holds (20, 600)."
    )
    validation_examples: int = _option(
        0,
        int,
        "digits, mnist: if not 0, so many training examples are held out and "
        "evaluated on in place of the test set. Choose settings by these.",
    )
    sequence_length: int | None = _option(
        None, int, "shakespeare: characters in an example (80)."
    )
    clients_per_role: int | None = _option(
        None,
        int,
        "shakespeare: how many clients a role is at most (1). With more, a "
        "part of a role is what is protected.",
    )

    # The model.
    model: str | None = _option(
        None,
        MODELS,
        "linear (logistic regression), mlp, cnn (two 5x5 convolutions), or "
        "lstm (shakespeare's). By default what suits the data.",
    )
    hidden_units: str | None = _option(
        None,
        str,
        "Units of the dense (mlp, cnn) or LSTM layers, as in 600,100.",
    )
    input_pooling: int | None = _option(
        None,
        int,
        "linear, mlp: images come in as the means of squares of so many "
        "pixels' side; fewer weights for noise to fall on.",
    )
    input_features: str | None = _option(
        None,
        FEATURES,
        "linear, mlp: what the model sees of images, computed once: "
        "oriented_gradients (tfdp_fl.features), fixed and public, or the "
        "pixels themselves (by default).",
    )

    input_shifts: int = _option(
        0,
        int,
        "digits, mnist: each image that a client holds is moved at "
        "random, once: by so many pixels to one of four sides, or not at all. "
        "Inside the client, so that it changes no guarantee.",
    )

    # The mechanism.
    mechanism: str = _option(
        "adaptive",
        tuple(MECHANISMS),
        "What is released about a cohort, and the flags that are its parameters.",
    )
    mechanism_module: str | None = _option(
        None,
        str,
        "A Python file or module that registers a mechanism of your own "
        "(docs/architecture.md); it is imported first.",
    )
    target_epsilon: Any = _option(
        None,
        float,
        "The guarantee to keep at --target_delta; the noise is calibrated to it. "
        "With a trusted server: of the trained model, for a whole client. For local "
        "mechanisms: of what "
        "a client sends, for all it takes part in. For nbafl: per record. With "
        "--noise_multiplier the noise is as given, and training stops before "
        "the round that would spend more.",
    )
    target_delta: float | None = _option(
        None,
        float,
        "delta, at which epsilon is reported too; N^-1.1 unless given. With "
        "nbafl it follows from --constant.",
    )
    accountant: str | None = _option(
        None,
        ("rdp", "pld"),
        "Who calibrates and reports: rdp, or pld (tighter). Unless given, pld "
        "where noise is calibrated and pld is tight and quick, and rdp "
        "elsewhere.",
    )
    # The rounds.
    sampling: Any = _option(
        None,
        SAMPLINGS,
        "How a cohort is drawn: poisson (every client with probability m/N; "
        "for fixed, adaptive, median), fixed_size (m of N; for local ones), "
        "shuffled (every client once per pass), or cyclic (fixed groups in turn; "
        "for correlated).",
    )
    clients_per_round: str | float | None = _option(
        None,
        str,
        "m, the expected cohort size: a number, all, or one value a round, as "
        "in 50,50,100 or 30x50,30x100.",
    )
    rounds: Any = _option(None, int, "T, how many rounds.")

    # Local training and the server.
    local_epochs: Any = _option(
        None, int, "Passes of a client over its examples in one round."
    )
    batch_size: Any = _option(None, int, "Examples in a local batch.")
    shuffle: bool = _option(
        False, bool, "Whether clients shuffle their examples for each epoch."
    )
    client_learning_rate: float | None = _option(
        None, float, "The clients' learning rate."
    )
    client_loss: str = _option(
        "cross_entropy",
        ("cross_entropy", "balanced"),
        "What clients minimize. balanced: cross entropy that allows for the "
        "labels a client happens to hold (tfdp_fl.losses); for clients with "
        "few of the classes. Add --shuffle.",
    )
    prior_smoothing: float | None = _option(
        None,
        float,
        "--client_loss=balanced: what a class is given besides its share of "
        "the client's labels (0.01).",
    )
    server_optimizer: Any = _option(
        None,
        ("none", "sgd", "adam"),
        "What the server does with the mean update: add it (none), or take "
        "its negative for a gradient (sgd: FedAvgM, adam: FedAdam). none, but "
        "for --dataset=mnist with --mechanism=adaptive and the usual model: "
        "there sgd with momentum 0.9 and a rate that goes from 0.5 to 0.",
    )
    server_learning_rate: float | None = _option(
        None, float, "The server optimizer's learning rate (1; adam: 0.01)."
    )
    server_momentum: float = _option(0.0, float, "Momentum of --server_optimizer=sgd.")
    server_schedule: str = _option(
        "constant",
        ("constant", "linear", "cosine"),
        "How the server optimizer's learning rate goes, over --rounds: to 0 "
        "at the end unless constant.",
    )
    server_ema: float = _option(
        0.0,
        float,
        "If not 0, the trained model is an average of those of all rounds, "
        "each counting for so much less than the next (0.95, say). It is made "
        "of what was released, and costs no privacy.",
    )

    # How it runs; nothing here changes the guarantee, except a seed.
    between_client_variance: bool = _option(
        False,
        bool,
        "Whether history.csv receives Geyer's V_c and U_s. They are computed "
        "from unclipped updates, and are for studying, not for publishing.",
    )
    seed: int | None = _option(
        None,
        int,
        "Makes everything repeat bit for bit. Anyone who knows it can undo the "
        "noise, and privacy.txt says so; without it, fresh secret entropy.",
    )
    validation_freq: Any = _option(
        None, int, "Evaluate every so many rounds, and after the last."
    )
    checkpoint_every: int = _option(
        0,
        int,
        "Save the training after every so many rounds, for --resume; 0: never.",
    )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """Returns the settings that a mapping (of JSON) names.

        Raises:
          ValueError: A name is no field.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            _validate.one_of(names, setting=name)
        return cls(**values)

    @classmethod
    def read(cls, path: str | pathlib.Path) -> Settings:
        """Returns the settings that a run's `config.json` holds."""
        return cls.from_dict(json.loads(pathlib.Path(path).read_text("utf-8")))

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as JSON takes them."""
        return dataclasses.asdict(self)

    def resolved(self) -> Settings:
        """Returns the settings, checked, with every open choice filled in.

        Raises:
          ValueError: Two settings do not go together; the message names them
            as flags.
        """
        self._check_words()
        self._check_dataset()
        self._check_mechanism()
        self._check_only_with(_ONLY_WITH)
        if not 0 <= self.server_ema < 1:
            raise ValueError(
                "--server_ema must be at least 0 and less than 1, got "
                f"{self.server_ema!r}."
            )
        defaults = {**_ALWAYS, **_BY_DATASET[self.dataset]}
        usual_model = defaults["model"]
        defaults.update(MECHANISMS[self.mechanism].suggested_run)
        defaults.update(_starts(self.mechanism))
        server: dict[str, Any] = {"server_optimizer": "none"}
        if self.model is None and not self.input_features:
            which = self.dataset, self.mechanism
            defaults.update(_TUNED.get(which, {}))
            server = _TUNED_SERVER.get(which, server)
        if self.dataset == "shakespeare":
            defaults["model"] = usual_model
        if self.noise_multiplier is not None:
            defaults.pop("target_epsilon", None)
        if (self.model or defaults["model"]) != usual_model:
            defaults.pop("hidden_units")
        filled = self._with_defaults(defaults)
        if self.server_optimizer is None:
            filled = dataclasses.replace(filled, **server)
        filled._check_only_with(_ONLY_WITH_MODEL)
        if filled.input_features and filled.input_pooling:
            raise ValueError("--input_features is without --input_pooling.")
        if filled.iid:
            filled = dataclasses.replace(filled, shards_per_client=None)
        # Read now, so that a bad one is refused before anything starts.
        filled.schedule("clients_per_round")
        filled.schedule("noise_multiplier")
        filled.units()
        return filled

    def for_population(self, num_clients: int) -> Settings:
        """Returns the settings with `clients_per_round` for N clients.

        What the data set's default asks for is at most N.
        """
        if self.clients_per_round == "all":
            return dataclasses.replace(self, clients_per_round=num_clients)
        return self

    def _with_defaults(self, defaults: Mapping[str, Any]) -> Settings:
        changes = {
            name: value
            for name, value in defaults.items()
            if getattr(self, name) is None
        }
        return dataclasses.replace(self, **changes)

    def schedule(self, name: str) -> Any:
        """Returns a number, or one value a round, from a setting's text."""
        text = getattr(self, name)
        if text is None or text == "all" or isinstance(text, int | float):
            return text
        values: list[float] = []
        for part in str(text).split(","):
            match = re.fullmatch(r"\s*(?:(\d+)x)?([-+.\deE]+)\s*", part)
            try:
                if match is None:
                    raise ValueError(part)
                count, value = int(match[1] or 1), float(match[2])
            except ValueError as error:
                raise ValueError(
                    f"--{name} must be a number, or one value a round as in "
                    f"30x50,30x100, got {text!r}."
                ) from error
            values += [value] * count
        if len(values) == 1 and "x" not in str(text):
            return values[0]
        if self.rounds is not None and len(values) < self.rounds:
            raise ValueError(
                f"--{name} has {len(values)} values for --rounds={self.rounds}."
            )
        return tuple(values)

    def units(self) -> tuple[int, ...] | None:
        """Returns `hidden_units` as numbers."""
        if self.hidden_units is None:
            return None
        try:
            units = tuple(int(u) for u in str(self.hidden_units).split(","))
            for each in units:
                _validate.positive_integer(hidden_units=each)
        except ValueError as error:
            raise ValueError(
                "--hidden_units must be positive integers as in 600,100, got "
                f"{self.hidden_units!r}."
            ) from error
        return units

    def delta(self, num_clients: int) -> float:
        """Returns the delta at which epsilon is reported."""
        implied = self._implied_delta()
        if implied is not None:
            return min(implied, 1 - 1e-9)
        if self.target_delta is not None:
            return self.target_delta
        return num_clients**-1.1

    def _implied_delta(self) -> float | None:
        """Returns the delta that follows from the mechanism's parameters."""
        kind: Any = MECHANISMS[self.mechanism]
        if kind.guarantee != "record":
            return None
        made = kind(epsilon=1.0, **_starts(self.mechanism) | self.mechanism_options())
        return made.implied_delta

    def mechanism_options(self) -> dict[str, Any]:
        """Returns the mechanism's parameters that are set, noise excepted.

        Raises:
          ValueError: One is a text that stands for nothing.
        """
        options = {}
        for field in _fields(self.mechanism):
            value = getattr(self, field.name)
            if field.name == "noise_multiplier" or value is None:
                continue
            word = field.metadata.get("none_word")
            if word is not None and isinstance(value, str):
                try:
                    value = None if value == word else float(value)
                except ValueError as error:
                    raise ValueError(
                        f"--{field.name} must be a number or {word}, got {value!r}."
                    ) from error
            options[field.name] = value
        return options

    def _check_words(self) -> None:
        """Refuses words and types that a flag would have refused."""
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), field.metadata["kind"]
            if value is None and field.default is None:
                continue
            if isinstance(kind, tuple):
                _validate.one_of(kind, **{f"--{field.name}": value})
            elif kind is bool:
                _validate.instance_of(bool, **{f"--{field.name}": value})
            elif kind is int:
                _validate.non_negative_integer(**{f"--{field.name}": value})
            elif kind is float:
                _validate.finite(**{f"--{field.name}": value})

    def _check_dataset(self) -> None:
        if self.shards_per_client and self.iid:
            raise ValueError("--shards_per_client needs --noiid.")
        if self.dataset == "shakespeare" and not self.data_path:
            raise ValueError("--dataset=shakespeare needs --data_path.")
        if self.data_path and not pathlib.Path(self.data_path).exists():
            raise ValueError(f"--data_path={self.data_path} does not exist.")
        if self.model is not None and (
            (self.model == "lstm") != (self.dataset == "shakespeare")
        ):
            raise ValueError(
                "--model=lstm and --dataset=shakespeare need each other, got "
                f"--model={self.model} and --dataset={self.dataset}."
            )
        if self.model == "linear" and self.hidden_units:
            raise ValueError("--hidden_units is not for --model=linear.")

    def _check_mechanism(self) -> None:
        own = parameters_of(self.mechanism)
        for name in _MECHANISM_PARAMETERS:
            if getattr(self, name) is not None and name not in own:
                raise ValueError(
                    f"--{name} is no parameter of --mechanism="
                    f"{self.mechanism}, which has: {', '.join(own) or 'none'}."
                )
        if self.mechanism == "none" and self.target_epsilon is not None:
            raise ValueError("--target_epsilon cannot be kept with --mechanism=none.")
        if self.target_epsilon is not None:
            _validate.positive(**{"--target_epsilon": self.target_epsilon})
        if self.target_delta is not None:
            _validate.inside_unit_interval(**{"--target_delta": self.target_delta})
            if self._implied_delta() is not None:
                raise ValueError(
                    "--target_delta follows from the parameters of "
                    f"--mechanism={self.mechanism} (nbafl: --constant), and "
                    "is not given."
                )
        if self.accountant == "pld" and self.mechanism not in CENTRAL:
            raise ValueError(
                f"--accountant=pld is for --mechanism={'|'.join(CENTRAL)}, "
                f"got --mechanism={self.mechanism}."
            )
        self.mechanism_options()

    def _check_only_with(self, rules: tuple[tuple[str, str, tuple[str, ...]], ...]):
        """Refuses what is set beside a value that it does not go with."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, other, allowed in rules:
            given, value = getattr(self, name), getattr(self, other)
            if given and given != defaults[name] and value not in allowed:
                raise ValueError(
                    f"--{name} is for --{other}={'|'.join(allowed)}, got "
                    f"--{other}={value}."
                )


# Those that no setting of another kind has the name of, as --rounds has.
_MECHANISM_PARAMETERS = tuple(
    dict.fromkeys(
        parameter
        for mechanism in MECHANISMS
        for parameter in parameters_of(mechanism)
        if parameter not in Settings.__annotations__
    )
)

_DEFINE: dict[type, Any] = {
    bool: flags.DEFINE_bool,
    float: flags.DEFINE_float,
    int: flags.DEFINE_integer,
    str: flags.DEFINE_string,
}


def define_flags() -> tuple[str, ...]:
    """Defines a flag for each setting; returns their names."""
    fields = dataclasses.fields(Settings)
    for field in fields:
        kind, help_ = field.metadata["kind"], field.metadata["help"]
        if isinstance(kind, tuple):
            default: Any = field.default
            flags.DEFINE_enum(field.name, default, kind, help_)
        else:
            _DEFINE[kind](field.name, field.default, help_)
    return tuple(field.name for field in fields)


def given_flags() -> dict[str, Any]:
    """Returns the settings whose flags stand on the command line."""
    names = (field.name for field in dataclasses.fields(Settings))
    return {
        name: flags.FLAGS[name].value for name in names if flags.FLAGS[name].present
    }
