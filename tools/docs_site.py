"""What mkdocs is told about this project: a hook of mkdocs.yml.

- The API reference has a page for each subject, with public names that are read
  from the packages' `__init__.py`; nothing is imported.
- `<!-- packages -->` becomes a picture of the packages, drawn from the imports, and
  `<!-- comparison -->` README's table of other frameworks.
- A file of the repository that a page links to gets a page of its own, with its
  text; a link to a folder becomes the folder's path.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parents[1]

# How the pages of the API reference are grouped in the navigation.
_GROUPS = {
    "Training": "make_private model model_after search silo callbacks runtimes "
    "auditing",
    "Data": "federated_dataset federated_dataset_use datasets sampling",
    "Mechanisms": "mechanisms correlated_noise writing_mechanisms "
    "writing_mechanisms_parts",
    "Accounting": "accounting gaussians charges ledger statement",
    "TFF": "aggregators learning learning_epsilon",
    "Flower": "flower flower_older",
    "Secure sums": "secure_aggregation secure_aggregation_protocol",
}

# Page: its title, and what it has, as "package: names" (* is all of them). A name
# may be followed by the members that are shown, as in Class(a,b), or be a member.
PAGES: dict[str, tuple[str, ...]] = {
    "make_private": ("make_private", "tfdp_fl: make_private validate"),
    "model": ("DPFederatedModel: training", "tfdp_fl: DPFederatedModel(compile,fit)"),
    "model_after": (
        "DPFederatedModel: after training",
        "tfdp_fl: DPFederatedModel.epsilon DPFederatedModel.central_epsilon "
        "DPFederatedModel.privacy_statement DPFederatedModel.evaluate "
        "DPFederatedModel.evaluate_clients PrivateMetrics DPFederatedModel.predict "
        "DPFederatedModel.save DPFederatedModel.rounds "
        "DPFederatedModel.mechanism DPFederatedModel.setup",
    ),
    "search": (
        "A search inside the budget",
        "tfdp_fl: PrivateSearch(fit,epsilon,privacy_statement) PublicScore() "
        "PrivateScore()",
    ),
    "silo": (
        "A silo of a federation",
        "tfdp_fl: Silo(get_weights,train,evaluate,epsilon,privacy_statement,report) "
        "SiloUpdate()",
        "tfdp_fl.flower: silo_app",
        "tfdp_fl.silo: SiloError SiloInUseError SiloMovedError SiloChangedError "
        "SiloMessageError",
    ),
    "mechanisms": (
        "Mechanisms",
        "tfdp_fl: FixedClipping() AdaptiveClipping() MedianClipping() "
        "PerLayerClipping() LocalDP() AdaptiveLocalDP() NbAFL() QueryMechanism() "
        "NoPrivacy() ClientWeighting()",
    ),
    "correlated_noise": (
        "Correlated noise",
        "tfdp_fl: CorrelatedNoise() BLT() BandedToeplitz()",
    ),
    "callbacks": (
        "Callbacks",
        "tfdp_fl.keras.callbacks: RoundCheckpoint Ledger PrivacyBudget Report "
        "FederatedCallback",
    ),
    "federated_dataset": (
        "FederatedDataset: from your data",
        "tfdp_fl: FederatedDataset(from_client_arrays,from_indices,from_dataframe,"
        "from_tf_datasets,from_client_data,from_client_fn,from_parquet) "
        "limit_rows_per_client",
    ),
    "federated_dataset_use": (
        "FederatedDataset: its clients",
        "tfdp_fl: FederatedDataset.num_clients FederatedDataset.client_ids "
        "FederatedDataset.element_spec FederatedDataset.client "
        "FederatedDataset.client_sizes "
        "FederatedDataset.create_tf_dataset_for_client FederatedDataset.take "
        "FederatedDataset.split_by_id FederatedDataset.map "
        "FederatedDataset.in_memory",
    ),
    "datasets": (
        "Data sets",
        "tfdp_fl.datasets: as_federated load_digits load_mnist load_shakespeare "
        "load_emnist partition",
    ),
    "accounting": (
        "Planning",
        "tfdp_fl.accounting: epsilon delta calibrate_noise_multiplier max_rounds "
        "calibrate select_accountant epsilon_from_ledger",
    ),
    "gaussians": (
        "Gaussians",
        "tfdp_fl.accounting: gaussian_epsilon gaussian_delta "
        "analytic_noise_multiplier epsilon_of_mu_squared",
    ),
    "charges": (
        "Charges and accountants",
        "tfdp_fl.accounting: RoundCharge PrivacyAccountant",
    ),
    "ledger": (
        "The ledger",
        "tfdp_fl.accounting: PrivacyLedger LedgerContents LedgerEntry",
    ),
    "statement": (
        "Statement and budget",
        "tfdp_fl.accounting: privacy_statement StatementFacts PrivacyBudget "
        "PrivacyAccount",
    ),
    "auditing": (
        "Auditing, features and losses",
        "tfdp_fl.auditing: *",
        "tfdp_fl.features: *",
        "tfdp_fl.losses: *",
    ),
    "writing_mechanisms": ("Writing a mechanism", "tfdp_fl.mechanisms: Mechanism"),
    "writing_mechanisms_parts": (
        "Parts of a mechanism",
        "tfdp_fl.mechanisms: register parameter RoundState ClientContext "
        "Contribution PrivacyContext",
    ),
    "sampling": ("Sampling", "tfdp_fl.sampling: *"),
    "runtimes": ("Ray workers", "tfdp_fl.runtimes: *"),
    "aggregators": (
        "TFF: aggregators",
        "tfdp_fl.aggregators: from_mechanism FixedClippingFactory "
        "AdaptiveClippingFactory MedianClippingFactory CorrelatedNoiseFactory "
        "LocalDPFactory AdaptiveLocalDPFactory "
        "NbAFLFactory NoPrivacyFactory QueryFactory MechanismFactory "
        "WeightsFactory",
    ),
    "learning": (
        "TFF: learning processes",
        "tfdp_fl.learning: build_dp_fed_avg DPLearningProcess",
    ),
    "learning_epsilon": (
        "TFF: epsilon",
        "tfdp_fl.learning: epsilon Epsilon privacy_charges",
    ),
    "flower": (
        "Flower: message API",
        "tfdp_fl.flower: PrivateStrategy private_mod ChargedRound "
        "RoundNotConfiguredError",
    ),
    "flower_older": (
        "Flower: older API",
        "tfdp_fl.flower: DPFedAvgFixed DPFedAvgAdaptive DPFedAvg DPFedAvgNumPyClient",
    ),
    "secure_aggregation": (
        "Secure aggregation",
        "tfdp_fl.secure_aggregation: AdditiveSecretSharing sum_in_groups "
        "split_into_groups GroupedSum",
    ),
    "secure_aggregation_protocol": (
        "Secure aggregation: messages",
        "tfdp_fl.secure_aggregation: Member Message AggregationOutcome "
        "RejectedMessageError",
    ),
}
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)[^)\s]*\)")
_PICTURE, _COMPARISON = "<!-- packages -->", "<!-- comparison -->"
# What a search shows later than guides and the rest of the reference.
_LATER = (
    *("flower", "flower_older", "aggregators", "learning", "learning_epsilon"),
    *("charges", "gaussians", "statement", "ledger", "search"),
)


def public_names(package: str) -> Iterator[tuple[str, str]]:
    """Yields (name, where it is defined) of what a package hands on.

    Args:
      package: A package or module, such as "tfdp_fl.datasets".
    """
    folder = _ROOT.joinpath(*package.split("."))
    path = folder / "__init__.py" if folder.is_dir() else None
    tree = ast.parse((path or folder.with_suffix(".py")).read_text("utf-8"))
    found: dict[str, str] = {}
    wanted: list[str] | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                found[each.asname or each.name] = f"{node.module}.{each.name}"
        elif isinstance(node, ast.Assign) and (
            getattr(node.targets[0], "id", "") == "__all__"
        ):
            wanted = [str(name) for name in ast.literal_eval(node.value)]
    if wanted is None:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                not node.name.startswith("_")
            ):
                yield node.name, f"{package}.{node.name}"
        return
    for name in sorted(wanted, key=str.lower):
        where = found.get(name, f"{package}.{name}")
        if not name.startswith("_") and not _is_module(where):
            yield name, _followed(where)


def reference_page(page: str) -> str:
    """Returns a page of the API reference, in Markdown."""
    title, *contents = PAGES[page]
    lines = ["---", "search:", f"  boost: {0.2 if page in _LATER else 1.5}", "---"]
    lines += [f"# {title}", "", *_example(page), ""]
    for content in contents:
        package, wanted = content.split(": ")
        where = dict(public_names(package))
        for each in where if wanted == "*" else wanted.split():
            shown = re.fullmatch(r"(\w+)([.]\w+)?(?:\((.*)\))?", each)
            assert shown is not None, each
            name, member, members = shown.groups()
            lines.append(f"::: {where[name]}{member or ''}")
            if members is not None:
                listed = [f'"{one}"' for one in members.split(",") if one]
                lines += ["    options:", f"      members: [{', '.join(listed)}]"]
            lines.append("")
    return "\n".join(lines)


def examples() -> dict[str, str]:
    """Returns the cells of docs/examples.py by their names."""
    cells = (_ROOT / "docs/examples.py").read_text("utf-8").split("\n# %% ")[1:]
    return {name: code for name, _, code in (cell.partition("\n") for cell in cells)}


def _example(page: str) -> list[str]:
    known = examples()
    for name in (page, f"{page} (tff)"):
        if name in known:
            block = f"```python\n{known[name].strip()}\n```"
            before = f"```python\n{known['before'].strip()}\n```"
            hidden = before.replace("\n", "\n    ")
            return [block, "", '??? note "It begins with"', "", f"    {hidden}"]
    guides = {
        "silo": "silos",
        "flower": "flower",
        "learning": "tff",
        "writing": "architecture",
    }
    (guide,) = (guides[word] for word in guides if page.startswith(word))
    return [f"An example is in the guide: [{guide}](../{guide}.md)."]


def imports() -> dict[str, set[str]]:
    """Returns which packages of `tfdp_fl` each of them imports."""
    packages = {path.parent for path in _ROOT.glob("tfdp_fl/*/__init__.py")}
    known: dict[str, set[str]] = {}
    for folder in packages:
        found = known.setdefault(folder.name, set())
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module:
                    package, _, inner = node.module.partition(".")
                    if package == "tfdp_fl":
                        names = [inner] if inner else [n.name for n in node.names]
                        found |= {name.partition(".")[0] for name in names}
        found &= {package.name for package in packages} - {folder.name}
    return known


def picture() -> str:
    """Returns an SVG of the packages: each stands above all that it imports.

    A line is left out where a longer way says the same, and neighbours in a row
    stand near what they are joined to.
    """
    uses = imports()

    def below(name: str) -> set[str]:
        return uses[name].union(*map(below, uses[name]))

    def level(name: str) -> int:
        return max((level(other) + 1 for other in uses[name]), default=0)

    lines = {
        (name, other)
        for name in uses
        for other in uses[name]
        if not any(other in below(between) for between in uses[name])
    }
    rows: dict[int, list[str]] = {}
    for name in sorted(uses):
        rows.setdefault(level(name), []).append(name)
    place = {
        name: (place + 0.5) / len(row)
        for row in rows.values()
        for place, name in enumerate(row)
    }

    def wanted(name: str) -> tuple[float, str]:
        joined = [place[b if a == name else a] for a, b in lines if name in (a, b)]
        return sum(joined) / max(1, len(joined)), name

    for row in [*range(max(rows), -1, -1), *range(max(rows) + 1)] * 4:
        rows[row].sort(key=wanted)
        for number, name in enumerate(rows[row]):
            place[name] = (number + 0.5) / len(rows[row])
    width, height = 176 * max(map(len, rows.values())), 76 * max(rows) + 44
    x = {name: round(width * place[name]) for name in uses}
    y = {name: height - 22 - 76 * level(name) for name in uses}
    drawn = [
        f'<path d="M{x[a]} {y[a] + 16}C{x[a]} {y[b] - 34} {x[b]} {y[a] + 34} '
        f'{x[b]} {y[b] - 16}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.6" stroke-width="1.5"/>'
        for a, b in sorted(lines)
    ]
    drawn += [
        f'<rect x="{x[name] - 80}" y="{y[name] - 16}" width="160" height="32" rx="6" '
        'fill="var(--md-code-bg-color, #eee)" stroke="currentColor" '
        f'stroke-opacity="0.6"/><text x="{x[name]}" y="{y[name] + 5}" '
        f'text-anchor="middle" font-size="15" fill="currentColor">{name}</text>'
        for name in sorted(uses)
    ]
    return (
        '<div class="packages"><svg role="img" aria-label="The packages and their '
        f'imports" viewBox="0 0 {width} {height}">{"".join(drawn)}</svg></div>'
    )


def _is_module(name: str) -> bool:
    folder = _ROOT.joinpath(*name.split("."))
    return folder.is_dir() or folder.with_suffix(".py").is_file()


def _followed(where: str) -> str:
    """Returns the module that defines a name, past those that hand it on."""
    module, _, name = where.rpartition(".")
    if (_ROOT.joinpath(*module.split(".")) / "__init__.py").is_file():
        for other, origin in public_names(module):
            if other == name and origin != where:
                return origin
    return where


def on_files(files: Any, config: Any) -> Any:
    """Adds the API reference, and linked files' text; an event of mkdocs."""
    from mkdocs.structure.files import File

    texts = {f"reference/{page}.md": reference_page(page) for page in PAGES}
    for page in _ROOT.glob("docs/*.md"):
        for _, path in _OUTSIDE.findall(page.read_text("utf-8")):
            if (_ROOT / path).is_file():
                texts[_source_page(path)] = _source(path)
    for path, content in texts.items():
        files.append(File.generated(config, path, content=content))
    return files


def _source_page(path: str) -> str:
    return f"source/{path.replace('/', '.')}.md"


def _source(path: str) -> str:
    text = (_ROOT / path).read_text("utf-8")
    before = f"---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n# {path}\n\n"
    return f"{before}`````{pathlib.Path(path).suffix[1:]}\n{text}\n`````\n"


def on_config(config: Any) -> Any:
    """Adds them to the navigation; an event of mkdocs."""
    groups = [
        {group: [f"reference/{page}.md" for page in pages.split()]}
        for group, pages in _GROUPS.items()
    ]
    config.nav.append({"API": groups})
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in pictures and tables, and leads links to files' pages."""

    def led(match: re.Match[str]) -> str:
        text, path = match.groups()
        if (_ROOT / path).is_file():
            return f"[{text}]({_source_page(path)})"
        return text if path in text.replace("`", "") else f"{text} (`{path}`)"

    if _PICTURE in markdown:
        markdown = markdown.replace(_PICTURE, picture())
    if _COMPARISON in markdown:
        readme = (_ROOT / "README.md").read_text("utf-8")
        (table,) = re.findall(r"(?ms)^## Why this.*?(?=^## )", readme)
        markdown = markdown.replace(_COMPARISON, table.replace("](docs/", "]("))
    return _OUTSIDE.sub(led, markdown.replace(" ± ", "\xa0±\xa0"))


def on_page_content(html: str, **_: Any) -> str:
    """Lets code in tables break between names (on a phone, also within them)."""

    def breakable(code: re.Match[str]) -> str:
        text = re.sub(
            r"(?<=[a-z])(?=[A-Z])|(?<=\w_)(?=\w)", '<wbr class="hump">', code[0]
        )
        return re.sub(r"([(,]|=(?!\")|\.(?=[a-zA-Z_]{3}))", r"\1<wbr>", text)

    def cell(found: re.Match[str]) -> str:
        return re.sub(r"(?<=<code>).*?(?=</code>)", breakable, found[0])

    return re.sub(r"(?s)<td[ >].*?</td>", cell, html)
