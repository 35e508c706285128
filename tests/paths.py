"""Where the checkout and its tests are, for tests that read pages or golden files."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
