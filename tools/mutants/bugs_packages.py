"""Planted bugs: what an installation meets: data folders of older versions, a configuration that is read again."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

UPGRADING: Final = "tests/test_upgrading.py"
MAIN: Final = "tests/server/test_main.py"

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
    Mutant(
        "sighup-applies-what-it-can-of-a-wrong-file",
        "a configuration that is wrong changes nothing on SIGHUP",
        "tfmq/config.py",
        "        read = parse_value(key, value, origin, topic, typed)\n",
        "        try:\n            read = parse_value(key, value, origin, topic, typed)\n"
        "        except ConfigError:\n            if again:\n                continue\n            raise\n",
        [MAIN],
    ),
    Mutant(
        "sighup-falls-back-to-the-defaults",
        "a configuration that is wrong changes nothing on SIGHUP",
        "tfmq/server/main.py",
        '        logger.error("SIGHUP: the configuration stays as it was: %s", error.sentence)\n',
        '        logger.error("SIGHUP: the configuration stays as it was: %s", error.sentence)\n'
        "        service.reload(type(service.config)())\n",
        [MAIN],
    ),
    Mutant(
        "sighup-keeps-silent-about-restarts",
        "SIGHUP names the changed keys that need a restart",
        "tfmq/server/main.py",
        "    if later:\n        parts.append(",
        "    if later and not changed:\n        parts.append(",
        [MAIN],
    ),
)
