"""The settings of a training run: their meanings and defaults.

They are declared in one table. Each is a flag of `scripts/train.py`, and a sweep's
configuration file uses the same names. Those of mechanisms come from the mechanisms'
own declarations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
from typing import Any, NamedTuple

from absl import flags

from tfdp_fl import _validate, mechanisms
from tfdp_fl.accounting.charge import SAMPLINGS
from tfdp_fl.mechanisms import declaration
from tfdp_fl.terms import Json, PrivacyUnit, TrustModel

MECHANISMS: dict[str, type[mechanisms.Mechanism]] = {
    name: mechanisms.by_name(name) for name in mechanisms.names()
}
CENTRAL_MECHANISMS = tuple(
    name for name, kind in MECHANISMS.items() if kind.trust_model == TrustModel.CENTRAL
)

# If every client adds its own noise, a useful model needs few weights and few rounds,
# with all clients in each (docs/mechanisms.md has results).
_ALL_CLIENTS_FEW_ROUNDS: Json = {
    "model": "linear",
    "sampling": "fixed_size",
    "clients_per_round": "all",
    "rounds": 10,
    "local_epochs": 5,
    "client_learning_rate": 0.5,
}
# The defaults that depend on the mechanism, by setting.
_MECHANISM_DEFAULTS: dict[str, Json] = {
    "none": {},
    "correlated": {"target_epsilon": 8.0, "sampling": "cyclic"},
    "local": {"target_epsilon": 16.0, **_ALL_CLIENTS_FEW_ROUNDS},
    "adaptive_local": {"target_epsilon": 16.0, **_ALL_CLIENTS_FEW_ROUNDS},
    "nbafl": {"target_epsilon": 50.0, **_ALL_CLIENTS_FEW_ROUNDS, "rounds": 20},
}

_DATASETS = ("digits", "mnist", "shakespeare")


class Option(NamedTuple):
    """The declaration of a setting.

    Attributes:
      default: The default. None is filled in by `resolve`. A list has the values with
        which it is filled in for digits, mnist and shakespeare.
      kind: A type, or a tuple of the allowed words.
      help: The text of the flag's help.
      requires: The name of another setting, and the values of it with which this
        setting is allowed.
    """

    default: Any
    kind: Any
    help: str
    requires: tuple[Any, ...] = ()


_IMAGES = ("dataset", "digits", "mnist")
_ROLES = ("dataset", "shakespeare")
_FILES = ("dataset", "mnist", "shakespeare")
_DENSE = ("model", "linear", "mlp")

_RUN_OPTIONS = {
    # The data.
    "dataset": Option("digits", _DATASETS, "scikit-learn's digits need no file."),
    "data_path": Option(
        None, str, "Keras's mnist.npz, or the text of Shakespeare's plays.", _FILES
    ),
    "num_clients": Option([500, 1000, None], int, "N, the number of clients.", _IMAGES),
    "iid": Option(
        [True, False, None],
        bool,
        "Clients hold random examples instead of two label shards each.",
        _IMAGES,
    ),
    "examples_per_client": Option(
        [20, 600, None], int, "Examples per client.", _IMAGES
    ),
    "validation_examples": Option(
        0, int, "Training examples held out for tuning; replace the test set.", _IMAGES
    ),
    "sequence_length": Option([None, None, 80], int, "Characters per example.", _ROLES),
    "clients_per_role": Option(
        None,
        int,
        "Maximum clients per role (1); if split, only a part of a role is protected.",
        _ROLES,
    ),
    # The model.
    "model": Option(["mlp", "mlp", "lstm"], ("linear", "mlp", "lstm"), "The network."),
    "hidden_units": Option(
        ["128", "600,100", "128,128"],
        str,
        "Units of the hidden layers.",
        ("model", "mlp", "lstm"),
    ),
    "input_pooling": Option(
        None, int, "Images are averaged over squares with this side.", _DENSE
    ),
    "input_features": Option(
        None, ("oriented_gradients",), "Fixed, public features of images.", _DENSE
    ),
    "input_shifts": Option(
        0,
        int,
        "Clients shift each image once, at random, by this many pixels.",
        _IMAGES,
    ),
    # The mechanism.
    "mechanism": Option(
        "adaptive", tuple(MECHANISMS), "The mechanism; other flags set its parameters."
    ),
    "mechanism_module": Option(
        None, str, "A Python file or module that registers your own mechanism."
    ),
    "target_epsilon": Option(
        None,
        float,
        "The privacy target at --target_delta. The noise is calibrated to it; with "
        "--noise_multiplier, training stops before the round that would exceed it.",
    ),
    "target_delta": Option(None, float, "Default: 0.1 / N; nbafl: from --constant."),
    "accountant": Option(
        None, ("rdp", "pld"), "For calibration and reports; pld is tighter."
    ),
    # The rounds.
    "sampling": Option(
        ["poisson"] * 3,
        SAMPLINGS,
        "How cohorts are drawn (the default can depend on the mechanism).",
    ),
    "clients_per_round": Option(
        [100, 100, 50],
        str,
        "m: a number, all (images only), or one per round as in 30x50,30x100.",
    ),
    "rounds": Option([60, 60, 100], int, "T, the number of rounds."),
    # Local training and the server.
    "local_epochs": Option(
        [1, 1, 1], int, "Passes over a client's examples per round."
    ),
    "batch_size": Option([10, 60, 10], int, "Examples per local batch."),
    "shuffle": Option(False, bool, "Clients shuffle their examples in each epoch."),
    "client_learning_rate": Option(
        [0.2, 0.1, 1.0], float, "The clients' learning rate."
    ),
    "prior_smoothing": Option(
        None,
        float,
        "Trains with the balanced softmax of tfdp_fl.losses, for clients with few "
        "classes. This is added to a client's share of each class (such as 0.01).",
    ),
    "server_learning_rate": Option(None, float, "The server's learning rate (1)."),
    "server_momentum": Option(None, float, "The server's momentum (0)."),
    "server_schedule": Option(
        None, ("constant", "linear"), "linear: the server's rate decays to 0."
    ),
    "server_ema": Option(
        None, float, "Decay of a moving average of the rounds' models (such as 0.95)."
    ),
    # The execution; of these, only a seed changes the guarantee.
    "seed": Option(
        None, int, "Makes the run repeatable; anyone who knows it can remove the noise."
    ),
    "validation_freq": Option([1, 5, 10], int, "Rounds between evaluations."),
    "checkpoint_every": Option(0, int, "Rounds between checkpoints, for --resume."),
}


def _fields(mechanism: str) -> list[dataclasses.Field[Any]]:
    """Returns a mechanism's parameters, without those that follow from the target."""
    fields = dataclasses.fields(MECHANISMS[mechanism])
    return [field for field in fields if field.name not in ("epsilon", "delta")]


def parameters_of(mechanism: str) -> tuple[str, ...]:
    """Returns the settings that are parameters of a mechanism."""
    return tuple(field.name for field in _fields(mechanism))


def _parameter_options() -> dict[str, Option]:
    """Returns an option for every parameter of every mechanism."""
    kinds: Json = {}
    helps: dict[str, dict[str, list[str]]] = {}
    for mechanism in MECHANISMS:
        for field in _fields(mechanism):
            kinds.setdefault(field.name, _kind_of(field))
            text = field.metadata.get("help", "").rstrip(".")
            start = field.metadata.get("start")
            if start is None and field.default is not dataclasses.MISSING:
                start = field.default
            if start is not None:
                text += f" ({start})"
            helps.setdefault(field.name, {}).setdefault(text, []).append(mechanism)
    return {
        name: Option(
            None,
            kind,
            "; ".join(f"{', '.join(users)}: {t}" for t, users in helps[name].items()),
        )
        for name, kind in kinds.items()
    }


def _kind_of(field: dataclasses.Field[Any]) -> type | tuple[str, ...]:
    """Returns `Option.kind` of a mechanism's parameter."""
    check = field.metadata.get("check")
    if isinstance(check, declaration.OneOf):
        return tuple(check.words)
    if field.metadata.get("none_word") is not None:
        return str
    # With `from __future__ import annotations`, it is text.
    declared = getattr(field.type, "__name__", str(field.type))
    return {"int": int, "float": float, "bool": bool}.get(declared.split(" ")[0], str)


def _mechanism_defaults(mechanism: str) -> Json:
    """Returns the default parameters of a mechanism for training runs."""
    starts = {field.name: field.metadata.get("start") for field in _fields(mechanism)}
    return {name: value for name, value in starts.items() if value is not None}


def _required_flag(option: Option) -> str:
    """Returns the flag that an option requires."""
    name, *values = option.requires
    return f"--{name}={'|'.join(map(str, values))}"


def _default(option: Option) -> Any:
    return None if isinstance(option.default, list) else option.default


# A mechanism's parameter with the name of a run's option (--rounds) is that option.
OPTIONS = {**_parameter_options(), **_RUN_OPTIONS}
_Options: Any = dataclasses.make_dataclass(
    "_Options",
    [
        (name, Any, dataclasses.field(default=_default(option)))
        for name, option in OPTIONS.items()
    ],
    frozen=True,
    kw_only=True,
)


class Settings(_Options):
    """Everything that defines a training run: a field for each of `OPTIONS`.

    None leaves a choice to the data set or the mechanism, and `resolve` fills it in.
    `python scripts/train.py --help` prints the meaning of each field.
    """

    @classmethod
    def read(cls, path: str | pathlib.Path) -> Settings:
        """Returns the settings in a run's `config.json`."""
        return cls(**json.loads(pathlib.Path(path).read_text("utf-8")))

    def resolve(self) -> Settings:
        """Returns the checked settings with every open choice filled in.

        Raises:
          ValueError: A setting is not allowed, or two contradict each other; the
            message names them as flags.
        """
        self._check_kinds()
        self._check_dataset()
        self._check_mechanism()
        dataset_index = _DATASETS.index(self.dataset)
        by_dataset = {
            name: option.default[dataset_index]
            for name, option in OPTIONS.items()
            if isinstance(option.default, list)
        }
        defaults = {
            **by_dataset,
            **_MECHANISM_DEFAULTS.get(self.mechanism, {"target_epsilon": 8.0}),
            **_mechanism_defaults(self.mechanism),
        }
        if self.dataset == "shakespeare":  # Other models, and N is not known yet.
            for name in ("model", "clients_per_round"):
                defaults[name] = by_dataset[name]
        if self.noise_multiplier is not None:
            defaults.pop("target_epsilon", None)
        if (self.model or defaults["model"]) != by_dataset["model"]:
            defaults.pop("hidden_units")
        changes = {n: v for n, v in defaults.items() if getattr(self, n) is None}
        resolved = dataclasses.replace(self, **changes)
        self._check_requirements(resolved)
        if resolved.clients_per_round == "all" and resolved.num_clients:
            resolved = dataclasses.replace(
                resolved, clients_per_round=resolved.num_clients
            )
        if resolved.input_features and resolved.input_pooling:
            raise ValueError("--input_features and --input_pooling exclude each other.")
        # Parse them now, so that invalid ones are refused before anything starts.
        resolved.schedule("clients_per_round")
        resolved.schedule("noise_multiplier")
        resolved.units()
        return resolved

    def schedule(self, name: str) -> Any:
        """Returns a setting as a number, or as a tuple with one value per round."""
        text = getattr(self, name)
        if text is None or isinstance(text, int | float):
            return text
        values: list[float] = []
        for part in str(text).split(","):
            match = re.fullmatch(r"\s*(?:(\d+)x)?(\d+(\.\d*)?([eE][-+]?\d+)?)\s*", part)
            if match is None:
                raise ValueError(
                    f"--{name} must be a number, or one value per round as in "
                    f"30x50,30x100, got {text!r}."
                )
            values += [float(match[2])] * int(match[1] or 1)
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
        with contextlib.suppress(ValueError):
            units = tuple(map(int, str(self.hidden_units).split(",")))
            if min(units) > 0:
                return units
        raise ValueError(
            "--hidden_units must be positive integers as in 600,100, got "
            f"{self.hidden_units!r}."
        )

    def delta(self, num_clients: int) -> float:
        """Returns the delta at which epsilon is reported."""
        return self._implied_delta() or self.target_delta or 0.1 / num_clients

    def _implied_delta(self) -> float | None:
        """Returns the delta that follows from the mechanism's parameters."""
        kind: Any = MECHANISMS[self.mechanism]
        if kind.privacy_unit != PrivacyUnit.RECORD:
            return None
        mechanism = kind(
            epsilon=1.0,
            **_mechanism_defaults(self.mechanism) | self.mechanism_options(),
        )
        return min(mechanism.implied_delta, 1 - 1e-9)

    def mechanism_options(self) -> Json:
        """Returns the mechanism's parameters that are set, without the noise.

        Raises:
          ValueError: One is a text with no meaning.
        """
        options = {}
        for field in _fields(self.mechanism):
            value = getattr(self, field.name)
            if field.name == "noise_multiplier" or value is None:
                continue
            none_word = field.metadata.get("none_word")
            if none_word is not None and isinstance(value, str):
                try:
                    value = None if value == none_word else float(value)
                except ValueError as error:
                    raise ValueError(
                        f"--{field.name} must be a number or {none_word}, got "
                        f"{value!r}."
                    ) from error
            options[field.name] = value
        return options

    def _check_kinds(self) -> None:
        """Refuses words and types that a flag would refuse."""
        for name, option in OPTIONS.items():
            value, kind = getattr(self, name), option.kind
            if value is None and _default(option) is None:
                continue
            if isinstance(kind, tuple):
                _validate.one_of(kind, **{f"--{name}": value})
            elif kind is bool:
                _validate.instance_of(bool, **{f"--{name}": value})
            elif kind is int:
                _validate.non_negative_integer(**{f"--{name}": value})
            elif kind is float:
                _validate.finite(**{f"--{name}": value})

    def _check_dataset(self) -> None:
        if self.dataset == "shakespeare" and not self.data_path:
            raise ValueError("--dataset=shakespeare needs --data_path.")
        if self.data_path and not pathlib.Path(self.data_path).exists():
            raise ValueError(f"--data_path={self.data_path} does not exist.")
        if self.model is not None and (
            (self.model == "lstm") != (self.dataset == "shakespeare")
        ):
            raise ValueError(
                "--model=lstm and --dataset=shakespeare must be used together, got "
                f"--model={self.model} and --dataset={self.dataset}."
            )

    def _check_mechanism(self) -> None:
        parameters = parameters_of(self.mechanism)
        for name in OPTIONS.keys() - _RUN_OPTIONS.keys() - {*parameters}:
            if getattr(self, name) is not None:
                raise ValueError(
                    f"--{name} is no parameter of --mechanism={self.mechanism}, whose "
                    f"parameters are: {', '.join(parameters) or 'none'}."
                )
        if self.mechanism == "none" and self.target_epsilon is not None:
            raise ValueError("--target_epsilon cannot be met with --mechanism=none.")
        if self.target_epsilon is not None:
            _validate.positive(**{"--target_epsilon": self.target_epsilon})
        if self.target_delta is not None and self._implied_delta() is not None:
            raise ValueError(
                f"--target_delta must not be given with --mechanism={self.mechanism}, "
                "where it follows from other parameters (nbafl: --constant)."
            )
        if self.accountant == "pld" and self.mechanism not in CENTRAL_MECHANISMS:
            raise ValueError(
                f"--accountant=pld is for --mechanism={'|'.join(CENTRAL_MECHANISMS)}, "
                f"got --mechanism={self.mechanism}."
            )
        self.mechanism_options()

    def _check_requirements(self, resolved: Settings) -> None:
        """Refuses settings whose required setting has another value."""
        for name, option in OPTIONS.items():
            setting = getattr(self, name)
            if not option.requires or not setting or setting == _default(option):
                continue
            needed, *allowed = option.requires
            value = getattr(resolved, needed)
            if value not in allowed:
                raise ValueError(
                    f"--{name} requires {_required_flag(option)}, got "
                    f"--{needed}={value}."
                )


_DEFINE_FLAG: dict[type, Any] = {
    bool: flags.DEFINE_bool,
    float: flags.DEFINE_float,
    int: flags.DEFINE_integer,
    str: flags.DEFINE_string,
}


def _help(option: Option) -> str:
    """Returns an option's help, with its requirement and its default per data set."""
    text = option.help
    if option.requires:
        text += f" For {_required_flag(option)}."
    if isinstance(option.default, list):
        pairs = zip(_DATASETS, option.default, strict=True)
        values = [f"{name}: {value}" for name, value in pairs if value is not None]
        text += f" ({', '.join(values)})"
    return text


def define_flags() -> None:
    """Defines a flag for each setting."""
    for name, option in OPTIONS.items():
        if isinstance(option.kind, tuple):
            flags.DEFINE_enum(name, _default(option), option.kind, _help(option))
        else:
            _DEFINE_FLAG[option.kind](name, _default(option), _help(option))


def given_flags() -> Json:
    """Returns the settings that were given on the command line."""
    return {
        name: flags.FLAGS[name].value for name in OPTIONS if flags.FLAGS[name].present
    }
