"""One description for both faces."""

from tfmq.client.faces import copy_docs_from


class First:
    """The first."""

    def both(self) -> None:
        """What it does."""

    def only(self) -> None:
        """Here only."""


def test_methods_take_the_docs_and_keep_their_own_behind() -> None:
    @copy_docs_from(First)
    class Second:
        """The second."""

        def both(self) -> None:
            """And here."""

        def other(self) -> None:
            """Mine."""

    assert Second.both.__doc__ == "What it does.\n\nAnd here."
    assert Second.other.__doc__ == "Mine."
    assert Second.__doc__ == "The second.\n\nThe first."
