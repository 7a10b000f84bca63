"""The packages form layers: each imports only from those below it."""

from __future__ import annotations

from absl.testing import absltest

from tools import docs_site

# From the top; the packages of a row know nothing of each other.
_LAYERS = (
    ("experiments", "search"),
    ("keras", "learning", "runtimes"),
    ("aggregators", "auditing", "flower"),
    ("engine",),
    ("mechanisms", "secure_aggregation"),
    ("accounting", "correlated_noise", "datasets", "features"),
)


class ArchitectureTest(absltest.TestCase):
    def test_a_package_imports_only_from_those_below_it(self):
        imports = docs_site.imports()
        layer = {name: row for row, names in enumerate(_LAYERS) for name in names}
        self.assertCountEqual(layer, imports)
        for name, others in imports.items():
            for other in others:
                self.assertLess(layer[name], layer[other], f"{name} imports {other}")
