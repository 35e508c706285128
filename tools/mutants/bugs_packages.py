"""Planted bugs: what an installation meets: data folders of older versions, a configuration that is read again."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

UPGRADING: Final = "tests/test_upgrading.py"

PACKAGES: Final = (
    Mutant(
        "upgrade-older-catalogs-are-refused",
        "a data folder of the oldest supported version is opened",
        "tfmq/broker/catalog_state.py",
        "            if version > SNAPSHOT_VERSION:\n",
        "            if version != SNAPSHOT_VERSION:\n",
        [UPGRADING],
    ),
    Mutant(
        "upgrade-expects-later-fields",
        "a catalog has what its version has, and nothing of later ones",
        "tfmq/broker/catalog_state.py",
        "            if version >= SNAPSHOT_WITH_NODE:\n",
        "            if version >= SNAPSHOT_WITH_OWNERS:\n",
        [UPGRADING],
    ),
    Mutant(
        "upgrade-needs-a-checksum",
        "the version file of older versions has no checksum",
        "tfmq/data_dir.py",
        '    if checked is None and set(fields) != {"format", "node"}:\n',
        "    if checked is None:\n",
        [UPGRADING],
    ),
)
