"""Without its libraries tfmq.arrow says in one sentence what to install."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("missing", ["pyarrow", "numpy"])
def test_what_is_missing_is_named_with_the_way_to_get_it(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; import tfmq.arrow"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: tfmq.arrow needs ")
    assert last.endswith("pip install pyarrow numpy")


def test_tfmq_itself_imports_none_of_it() -> None:
    program = "import sys, tfmq; tfmq.Producer; print({'numpy', 'pyarrow'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"
